//! Outbound listeners, for requests of the workload.
//!
//! `virtualOutbound` accepts every redirected connection and hands it to the listener of its original destination. HTTP
//! ports share one listener for all addresses; any other port has one for each address of a service. Services without
//! an address, and those with blocks of addresses, share the listener for all addresses too. Other connections pass to
//! their original destination or are refused, as the mesh configuration says.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
    sync::Arc,
};

use skysail_core::{
    ClusterName,
    names::{self, Direction},
};
use skysail_xds::envoy::pb::envoy::extensions::filters::listener::{
    http_inspector::v3::HttpInspector, tls_inspector::v3::TlsInspector,
};

use super::{
    any_address, detection_timeout, inspector,
    l4::{HANDSHAKE_SECONDS, L4Target},
    virtual_listener,
};
use crate::{
    ProxyView, World,
    api::{
        Meta, Protocol, Resolution, Service, ServicePort, Typed, VirtualService,
        mesh_config::OutboundMode,
        sidecar::{CaptureMode, Egress, EgressListener},
    },
    compile::{
        balance,
        clusters::BLACK_HOLE,
        dynamic_dns::{self, Families},
        extension::Extensions,
        filters::{self, FilterSettings, HttpPolicy, Routes},
        pb::{address, boolean, core, listener, network, pack, seconds, uint32},
        routes,
        telemetry::SideTelemetry,
        visibility::UnknownDestinations,
    },
    world::{fqdn, host_matches},
};

use core::TrafficDirection;

/// ALPN of HTTP in plain text.
const PLAIN_HTTP: [&str; 2] = ["http/1.1", "h2c"];
/// Bytes that the TLS inspector reads first, as in istiod.
const FIRST_READ: u32 = 512;

/// Route configurations that outbound listeners name.
#[derive(Default)]
pub(in crate::compile) struct RouteNames<'a> {
    /// Ports whose routes all services with the port share.
    pub(in crate::compile) shared: BTreeSet<u16>,
    /// Service ports with routes of their own.
    pub(in crate::compile) own: Vec<(&'a Typed<Service>, u16)>,
}

/// Returns the route configurations that the listeners for these services name.
pub(in crate::compile) fn named<'a>(services: &[&'a Typed<Service>]) -> RouteNames<'a> {
    let mut named = RouteNames::default();
    for service in services {
        for port in &service.spec.ports {
            match port.protocol {
                Protocol::Unknown if !is_everywhere(service) => named.own.push((service, port.port)),
                protocol if protocol.is_http() || protocol == Protocol::Unknown => {
                    named.shared.insert(port.port);
                }
                _ => {}
            }
        }
    }
    named
}

/// Outline of the outbound listeners, for all sidecars with the same client scope.
#[derive(Clone, Debug, Default)]
pub struct Outline {
    /// HTTP ports.
    shared: BTreeSet<u16>,
    /// Hosts that proxies resolve for each request, by HTTP port.
    dynamic: BTreeMap<u16, Vec<String>>,
    /// Services with ports that have listeners of their own. The first service gets an address that several have.
    services: Vec<Outlined>,
    /// Services that the clients' Sidecar allows.
    egress: Option<Arc<Egress>>,
    /// Egress listeners with an address of their own, with their services; at least one each.
    bound: Vec<BoundEgress>,
}

/// A service with ports that have listeners of their own.
#[derive(Clone, Debug)]
struct Outlined {
    service: Arc<Typed<Service>>,
    /// VirtualServices with TCP or TLS rules for the service, oldest first.
    rules: Vec<Arc<Typed<VirtualService>>>,
    /// Server names of the service and its aliases.
    server_names: Vec<String>,
}

impl Outline {
    /// Returns what the Sidecar lets the clients call; `None`: everything.
    pub(in crate::compile) fn egress(&self) -> Option<&Egress> {
        self.egress.as_deref()
    }
}

/// Egress listener with its services, which have its port alone.
type BoundEgress = (EgressListener, Vec<Arc<Typed<Service>>>);

/// Returns the outline of the listeners for these services.
pub(in crate::compile) fn outline(
    world: &World,
    namespace: &str,
    services: impl Iterator<Item = Arc<Typed<Service>>>,
    egress: Option<Arc<Egress>>,
    bound: Vec<BoundEgress>,
) -> Outline {
    let rules = world.virtual_services(namespace);
    let rules: Vec<(Vec<String>, &Arc<Typed<VirtualService>>)> = rules
        .into_iter()
        .filter(|rule| !rule.spec.tcp.is_empty() || !rule.spec.tls.is_empty())
        .map(|rule| (rule.spec.hosts.iter().map(|host| fqdn(host, &rule.meta.namespace)).collect(), rule))
        .collect();
    let aliases = world.aliases(namespace);
    let mut outline = Outline { egress, bound, ..Outline::default() };
    for service in services {
        let http = service.spec.ports.iter().filter(|port| port.protocol.is_http());
        for port in http {
            outline.shared.insert(port.port);
            if service.spec.entry_host.as_ref().is_some_and(|it| it.resolution == Resolution::DynamicDns) {
                outline.dynamic.entry(port.port).or_default().push(service.fqdn());
            }
        }
        if !service.spec.ports.iter().any(has_own) {
            continue;
        }
        let host = service.fqdn();
        let of_host = rules.iter().filter(|(hosts, _)| {
            hosts.iter().any(|pattern| host_matches(pattern, &host) || host_matches(&host, pattern))
        });
        let others = aliases.get(&host).into_iter().flatten();
        let others =
            others.flat_map(|alias| routes::names(&alias.meta.name, &alias.meta.namespace, namespace));
        outline.services.push(Outlined {
            service,
            rules: of_host.map(|(_, rule)| Arc::clone(rule)).collect(),
            server_names: std::iter::once(host.clone()).chain(others).collect(),
        });
    }
    // Without times of creation, objects of an earlier file are older.
    let age = |meta: &Meta| {
        let file = world.service_file(&meta.namespace, &meta.name).filter(|_| meta.created.is_none());
        (meta.created.unwrap_or_default(), file, meta.name.clone(), meta.namespace.clone())
    };
    outline.services.sort_by_cached_key(|outlined| age(&outlined.service.meta));
    outline
}

/// Returns whether a port has filter chains for its service alone.
fn has_own(port: &ServicePort) -> bool {
    port.protocol != Protocol::Udp && !port.protocol.is_http()
}

/// Returns whether clients use any address for a service: a host of a ServiceEntry without addresses.
pub(in crate::compile) fn is_everywhere(service: &Typed<Service>) -> bool {
    let entry_host = service.spec.entry_host.as_ref();
    entry_host.is_some_and(|entry_host| entry_host.blocks.is_empty()) && service.spec.cluster_ips.is_empty()
}

/// Returns the outbound listeners of a sidecar.
pub(in crate::compile) fn compile(
    world: &World,
    view: &ProxyView,
    outline: &Outline,
) -> Vec<listener::Listener> {
    let unknown = UnknownDestinations::of(world.mesh(), outline.egress.as_deref());
    let telemetry = SideTelemetry::new(world, view, Direction::Outbound);
    let proxy = filters::settings(world.mesh(), view);
    let extensions = Extensions::new(world, view);
    let setting = FilterSettings {
        mesh: world.mesh(),
        view,
        telemetry: &telemetry,
        hash_source_ip: false,
        grpc_web: false,
        http2: false,
        dynamic_dns: unknown.mode == OutboundMode::AllowAnyDynamicDns,
        proxy: &proxy,
        extensions: &extensions,
        port: 0,
    };
    let bound = outline.bound.iter().map(|(of, services)| bound(world, setting, of, services));
    let mut by_address: BTreeMap<String, listener::Listener> =
        bound.map(|listener| (listener.name.clone(), listener)).collect();
    if !view.intercepts {
        LocalListeners { world, setting, outline, unknown: &unknown }.add(&mut by_address);
        return by_address.into_values().collect();
    }
    let mut drafts: BTreeMap<String, Draft> = BTreeMap::new();
    for port in &outline.shared {
        let bind = Bind::everywhere(view, None);
        let draft = draft(&mut drafts, &bind, *port);
        draft.add_http(setting, &format!("{}_{port}", bind.addresses[0]), port.to_string());
        if let (Some(hosts), Some(chain)) = (outline.dynamic.get(port), draft.chains.last_mut()) {
            dynamic_dns::add_filters(chain, hosts, Families { ipv4: view.ipv4, ipv6: view.ipv6 });
        }
    }
    for outlined @ Outlined { service, .. } in &outline.services {
        for port in service.spec.ports.iter().filter(|port| has_own(port)) {
            for bind in binds(world, view, service, port) {
                draft(&mut drafts, &bind, port.port).add_service(world, setting, outlined, port, &bind);
            }
        }
    }
    for (name, draft) in drafts {
        let listener = draft.finish(world, setting, &unknown, name.clone());
        by_address.entry(name).or_insert(listener);
    }
    std::iter::once(catch_all(setting, &unknown)).chain(by_address.into_values()).collect()
}

/// Addresses of a listener.
struct Bind {
    /// At least one; the first names the listener.
    addresses: Vec<String>,
    /// Whether the addresses are unspecified ones.
    is_everywhere: bool,
    /// Block of addresses to which its filter chains are limited.
    block: Option<String>,
}

impl Bind {
    fn of(addresses: Vec<IpAddr>) -> Self {
        let addresses = addresses.iter().map(ToString::to_string).collect();
        Self { addresses, is_everywhere: false, block: None }
    }

    fn everywhere(view: &ProxyView, block: Option<String>) -> Self {
        let mut addresses = vec![any_address(view).to_owned()];
        if view.ipv4 && view.ipv6 {
            addresses.push("::".to_owned());
        }
        Self { addresses, is_everywhere: true, block }
    }
}

/// Returns the addresses that clients use, by listener: the service's own, or each of its pods' if it is headless.
fn binds(world: &World, view: &ProxyView, service: &Typed<Service>, port: &ServicePort) -> Vec<Bind> {
    let reachable = |ip: &IpAddr| if ip.is_ipv4() { view.ipv4 } else { view.ipv6 };
    if service.spec.headless {
        let endpoints = world.endpoints(service, port).into_iter().filter(|endpoint| endpoint.ready);
        return endpoints
            .filter_map(|endpoint| endpoint.address.ip())
            .filter(reachable)
            .map(|ip| Bind::of(vec![ip]))
            .collect();
    }
    let own = service.spec.cluster_ips.iter().copied().filter(reachable);
    let Some(entry_host) = &service.spec.entry_host else {
        let own: Vec<IpAddr> = own.collect();
        return if own.is_empty() { Vec::new() } else { vec![Bind::of(own)] };
    };
    if is_everywhere(service) {
        return vec![Bind::everywhere(view, None)];
    }
    // As in Istio, each address of a ServiceEntry has a listener.
    let blocks = entry_host.blocks.iter().map(|block| Bind::everywhere(view, Some(block.clone())));
    own.map(|ip| Bind::of(vec![ip])).chain(blocks).collect()
}

/// A listener under construction.
struct Draft {
    addresses: Vec<String>,
    port: u16,
    chains: Vec<listener::FilterChain>,
    /// Server names and blocks of addresses that have a filter chain. Empty texts match every connection.
    taken: HashSet<(String, String)>,
    has_http: bool,
}

fn draft<'a>(drafts: &'a mut BTreeMap<String, Draft>, bind: &Bind, port: u16) -> &'a mut Draft {
    drafts.entry(format!("{}_{port}", bind.addresses[0])).or_insert_with(|| Draft {
        addresses: bind.addresses.clone(),
        port,
        chains: Vec::new(),
        taken: HashSet::new(),
        has_http: false,
    })
}

impl Draft {
    /// Adds the filter chains of a service's port.
    fn add_service(
        &mut self,
        world: &World,
        setting: FilterSettings<'_>,
        outlined: &Outlined,
        port: &ServicePort,
        bind: &Bind,
    ) {
        let Outlined { service, rules, server_names } = outlined;
        let is_wild = service.meta.name.starts_with('*');
        let by_name = bind.is_everywhere || bind.block.is_some() || is_wild;
        let block = bind.block.as_deref();
        let server_names = if by_name { &server_names[..] } else { &[] };
        let setting = FilterSettings { port: port.port, ..setting };
        let target = L4Target { world, setting, service, port, block, server_names, rules };
        if port.protocol == Protocol::Unknown {
            let own = format!("{}:{}", service.fqdn(), port.port);
            let routes = if is_everywhere(service) { port.port.to_string() } else { own };
            self.add_http(setting, &format!("{}_{}", bind.addresses[0], port.port), routes);
        }
        target.chains().into_iter().for_each(|chain| self.add(chain));
    }

    /// Adds the filter chain of HTTP in plain text.
    fn add_http(&mut self, setting: FilterSettings<'_>, name: &str, routes: String) {
        if !self.has_http {
            self.has_http = true;
            let setting = FilterSettings { port: self.port, ..setting };
            self.chains.push(http_chain(setting, name, Routes::ByName(routes)));
        }
    }

    /// Adds a filter chain without the part of its match that another one has: the first match applies, and Envoy
    /// refuses matches that overlap.
    fn add(&mut self, chain: listener::FilterChain) {
        let found = chain.filter_chain_match.clone().unwrap_or_default();
        let names = if found.server_names.is_empty() { vec![String::new()] } else { found.server_names };
        let mut free: BTreeMap<Vec<usize>, Vec<String>> = BTreeMap::new();
        let texts: Vec<String> = found.prefix_ranges.iter().map(network).collect();
        for name in names {
            let mut ranges = Vec::new();
            if texts.is_empty() && !self.taken.insert((name.clone(), String::new())) {
                continue;
            }
            for (index, range) in texts.iter().enumerate() {
                if self.taken.insert((name.clone(), range.clone())) {
                    ranges.push(index);
                }
            }
            if texts.is_empty() || !ranges.is_empty() {
                free.entry(ranges).or_default().push(name);
            }
        }
        for (ranges, names) in free {
            let mut part = chain.clone();
            if let Some(found) = &mut part.filter_chain_match {
                found.server_names = names.into_iter().filter(|name| !name.is_empty()).collect();
                found.prefix_ranges =
                    ranges.iter().filter_map(|index| found.prefix_ranges.get(*index).cloned()).collect();
            }
            self.chains.push(part);
        }
    }

    /// Returns the listener. Connections that no filter chain matches pass to their original destination or are
    /// refused.
    fn finish(
        mut self,
        world: &World,
        setting: FilterSettings<'_>,
        unknown: &UnknownDestinations,
        name: String,
    ) -> listener::Listener {
        let every = self.chains.iter().position(|chain| chain.filter_chain_match.is_none());
        let default = match every {
            Some(_) if self.chains.len() == 1 => None,
            Some(at) => Some(self.chains.remove(at)),
            None => Some(pass_through(setting, unknown)),
        };
        let found = |chain: &listener::FilterChain| chain.filter_chain_match.clone().unwrap_or_default();
        let by_name = self.chains.iter().any(|chain| !found(chain).server_names.is_empty());
        let inspectors = by_name.then(tls_inspector).into_iter().chain(self.has_http.then(http_inspector));
        let (first, extra) = self.addresses.split_first().map_or(("", &[][..]), |(a, b)| (a.as_str(), b));
        // As in Istio, the timeout applies where HTTP is detected.
        let timeout = if self.has_http { detection_timeout(world) } else { seconds(0) };
        listener::Listener {
            filter_chains: self.chains,
            default_filter_chain: default,
            listener_filters: inspectors.collect(),
            listener_filters_timeout: Some(timeout),
            ..unbound(name, first, extra, self.port)
        }
    }
}

/// Returns the filter chain of unknown destinations.
fn pass_through(setting: FilterSettings<'_>, unknown: &UnknownDestinations) -> listener::FilterChain {
    listener::FilterChain {
        filter_chain_match: Some(Default::default()),
        filters: filters::tcp_chain(setting, Direction::Outbound, &unknown.cluster, Vec::new()),
        name: "PassthroughFilterChain".into(),
        ..Default::default()
    }
}

/// Returns the listener that accepts every redirected connection.
fn catch_all(setting: FilterSettings<'_>, unknown: &UnknownDestinations) -> listener::Listener {
    let port = names::OUTBOUND_PORT;
    // A connection to the listener itself would loop.
    let black_hole = listener::FilterChain {
        filter_chain_match: Some(listener::FilterChainMatch {
            destination_port: uint32(port.into()),
            ..Default::default()
        }),
        filters: filters::black_hole_chain(setting, Direction::Outbound, BLACK_HOLE),
        name: "virtualOutbound-blackhole".into(),
        ..Default::default()
    };
    let rest = listener::FilterChain {
        filters: filters::tcp_chain(setting, Direction::Outbound, &unknown.cluster, Vec::new()),
        name: "virtualOutbound-catchall-tcp".into(),
        ..Default::default()
    };
    let by_host = setting.dynamic_dns.then(|| listener::FilterChain {
        filter_chain_match: Some(listener::FilterChainMatch {
            application_protocols: PLAIN_HTTP.map(str::to_owned).into(),
            ..Default::default()
        }),
        filters: filters::http_chain(
            setting,
            Direction::Outbound,
            "outbound_virtualOutbound_allow_any_dynamic_dns;".into(),
            Routes::Inline(Box::new(routes::of_unknown_hosts(setting.mesh, unknown, setting.proxy.shared()))),
            HttpPolicy::default(),
        ),
        name: "virtualOutbound-catchall-tcp-http".into(),
        ..Default::default()
    });
    let chains = std::iter::once(black_hole).chain(by_host).chain([rest]).collect();
    listener::Listener {
        use_original_dst: boolean(true),
        traffic_direction: TrafficDirection::Outbound as i32,
        listener_filters: setting.dynamic_dns.then(http_inspector).into_iter().collect(),
        ..virtual_listener(setting, "virtualOutbound", port, chains)
    }
}

/// Listeners of a proxy to which no connections are redirected: one on the loopback address for each port. Without the
/// original destination, a port that is not HTTP leads to the first service that has it.
struct LocalListeners<'a> {
    world: &'a World,
    setting: FilterSettings<'a>,
    outline: &'a Outline,
    unknown: &'a UnknownDestinations,
}

impl LocalListeners<'_> {
    fn add(&self, by_address: &mut BTreeMap<String, listener::Listener>) {
        let Self { world, setting, outline, unknown } = *self;
        let ip = loopback(setting.view);
        for port in &outline.shared {
            let name = format!("{ip}_{port}");
            let setting = FilterSettings { port: *port, ..setting };
            let mut chain = http_chain(setting, &name, Routes::ByName(port.to_string()));
            chain.filter_chain_match = None;
            let listener = listener::Listener { filter_chains: vec![chain], ..unbound(name, ip, &[], *port) };
            by_address.entry(listener.name.clone()).or_insert_with(|| with_socket(setting, listener));
        }
        for outlined in &outline.services {
            for port in outlined.service.spec.ports.iter().filter(|port| has_own(port)) {
                let name = format!("{ip}_{}", port.port);
                if by_address.contains_key(&name) {
                    continue;
                }
                let bind = Bind { addresses: vec![ip.to_owned()], is_everywhere: false, block: None };
                let mut drafts = BTreeMap::new();
                let made = draft(&mut drafts, &bind, port.port);
                made.add_service(world, setting, outlined, port, &bind);
                for (name, draft) in drafts {
                    let listener = draft.finish(world, setting, unknown, name.clone());
                    by_address.insert(name, with_socket(setting, listener));
                }
            }
        }
    }
}

/// Returns a listener with a socket of its own.
fn with_socket(setting: FilterSettings<'_>, listener: listener::Listener) -> listener::Listener {
    listener::Listener {
        access_log: setting.telemetry.listener_logs.clone(),
        bind_to_port: None,
        max_connections_to_accept_per_socket_event: uint32(1),
        ..listener
    }
}

/// Returns the loopback address of the proxy's family.
fn loopback(view: &ProxyView) -> &'static str {
    if view.ipv4 || !view.ipv6 { "127.0.0.1" } else { "::1" }
}

/// Returns the listener of an egress listener with an address of its own.
fn bound(
    world: &World,
    setting: FilterSettings<'_>,
    egress: &EgressListener,
    services: &[Arc<Typed<Service>>],
) -> listener::Listener {
    let port = egress.port().unwrap_or_default();
    let is_pipe = egress.socket().is_some();
    let has_socket = egress.capture_mode == CaptureMode::None || is_pipe || !setting.view.intercepts;
    let ip = match egress.bind.as_str() {
        "" => loopback(setting.view),
        ip => ip,
    };
    let setting = FilterSettings { port, ..setting };
    let name = format!("{ip}_{port}");
    let mut chain = if egress.is_http() {
        let routes = if is_pipe { egress.bind.clone() } else { port.to_string() };
        http_chain(setting, &name, Routes::ByName(routes))
    } else {
        let port = services[0].spec.ports.first().map_or(port, |port| port.port);
        let cluster = ClusterName::outbound(port, "", &services[0].fqdn()).to_string();
        let rule = world.destination_rule(&services[0].fqdn(), &setting.view.namespace);
        let hashing =
            FilterSettings { hash_source_ip: balance::hashes_source_ip(rule.as_deref(), ""), ..setting };
        listener::FilterChain {
            filters: filters::tcp_chain(hashing, Direction::Outbound, &cluster, Vec::new()),
            transport_socket_connect_timeout: Some(seconds(HANDSHAKE_SECONDS)),
            ..Default::default()
        }
    };
    // The protocol is declared, so it need not be detected.
    chain.filter_chain_match = None;
    let mut listener = listener::Listener { filter_chains: vec![chain], ..unbound(name, ip, &[], port) };
    if let Some(path) = egress.socket() {
        let pipe = core::Pipe { path: path.to_owned(), mode: 0 };
        listener.address = Some(core::Address { address: Some(core::address::Address::Pipe(pipe)) });
    }
    if has_socket { with_socket(setting, listener) } else { listener }
}

fn http_chain(setting: FilterSettings<'_>, listener: &str, routes: Routes) -> listener::FilterChain {
    listener::FilterChain {
        filter_chain_match: Some(listener::FilterChainMatch {
            transport_protocol: "raw_buffer".into(),
            application_protocols: PLAIN_HTTP.map(str::to_owned).into(),
            ..Default::default()
        }),
        filters: filters::http_chain(
            setting,
            Direction::Outbound,
            format!("outbound_{listener};"),
            routes,
            HttpPolicy::default(),
        ),
        transport_socket_connect_timeout: Some(seconds(HANDSHAKE_SECONDS)),
        ..Default::default()
    }
}

/// Returns a listener without a socket. It receives connections by their original destination.
fn unbound(name: String, ip: &str, extra: &[String], port: u16) -> listener::Listener {
    let additional = extra
        .iter()
        .map(|ip| listener::AdditionalAddress { address: Some(address(ip, port)), ..Default::default() });
    listener::Listener {
        name,
        address: Some(address(ip, port)),
        additional_addresses: additional.collect(),
        listener_filters_timeout: Some(seconds(0)),
        continue_on_listener_filters_timeout: true,
        traffic_direction: TrafficDirection::Outbound as i32,
        bind_to_port: boolean(false),
        ..Default::default()
    }
}

fn tls_inspector() -> listener::ListenerFilter {
    let config = TlsInspector { initial_read_buffer_size: uint32(FIRST_READ), ..Default::default() };
    inspector("envoy.filters.listener.tls_inspector", pack(&config))
}

fn http_inspector() -> listener::ListenerFilter {
    inspector("envoy.filters.listener.http_inspector", pack(&HttpInspector::default()))
}
