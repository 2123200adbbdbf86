//! Outbound listeners, for requests of the workload.
//!
//! `virtualOutbound` accepts every redirected connection and hands it to the listener of its original destination. HTTP
//! ports share one listener for all addresses; any other port has one for each address of a service. Services without
//! an address, and those with blocks of addresses, share the listener for all addresses too. Other connections pass to their original destination or are refused, as the mesh configuration says.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
    sync::Arc,
};

use skysail_core::names::{self, Direction};
use skysail_xds::envoy::pb::envoy::extensions::filters::listener::{
    http_inspector::v3::HttpInspector, tls_inspector::v3::TlsInspector,
};

use super::{
    any_address, detection_timeout, inspector,
    l4::{HANDSHAKE_SECONDS, Target},
    virtual_listener,
};
use crate::{
    ProxyView, World,
    api::{
        Meta, Protocol, Resolution, Service, ServicePort, Typed, VirtualService, mesh_config::OutboundMode,
    },
    compile::{
        clusters::{BLACK_HOLE, PASSTHROUGH},
        dynamic_dns::{self, Families},
        filters::{self, Routes, Setting},
        pb::{address, boolean, core, listener, pack, seconds, uint32},
        routes,
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
pub(in crate::compile) struct Named<'a> {
    /// Ports whose routes all services with the port share.
    pub(in crate::compile) shared: BTreeSet<u16>,
    /// Service ports with routes of their own.
    pub(in crate::compile) own: Vec<(&'a Typed<Service>, u16)>,
}

/// Returns the route configurations that the listeners for these services name.
pub(in crate::compile) fn named<'a>(services: &[&'a Typed<Service>]) -> Named<'a> {
    let mut named = Named::default();
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
    /// Services with ports that have listeners of their own, in the order in which they get an address that several
    /// have.
    services: Vec<Outlined>,
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

/// Returns the outline of the listeners for these services.
pub(in crate::compile) fn outline<'a>(
    world: &World,
    namespace: &str,
    services: impl Iterator<Item = &'a Arc<Typed<Service>>>,
) -> Outline {
    let rules = world.virtual_services(namespace);
    let rules: Vec<(Vec<String>, &Arc<Typed<VirtualService>>)> = rules
        .into_iter()
        .filter(|rule| !rule.spec.tcp.is_empty() || !rule.spec.tls.is_empty())
        .map(|rule| (rule.spec.hosts.iter().map(|host| fqdn(host, &rule.meta.namespace)).collect(), rule))
        .collect();
    let aliases = world.aliases(namespace);
    let mut outline = Outline::default();
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
            service: Arc::clone(service),
            rules: of_host.map(|(_, rule)| Arc::clone(rule)).collect(),
            server_names: std::iter::once(host.clone()).chain(others).collect(),
        });
    }
    let age = |meta: &Meta| (meta.created.unwrap_or_default(), meta.name.clone(), meta.namespace.clone());
    outline.services.sort_by_cached_key(|outlined| age(&outlined.service.meta));
    outline
}

/// Returns whether a port has filter chains for its service alone.
fn has_own(port: &ServicePort) -> bool {
    port.protocol != Protocol::Udp && !port.protocol.is_http()
}

/// Returns whether clients use any address for a service: a host of a ServiceEntry without addresses.
fn is_everywhere(service: &Typed<Service>) -> bool {
    let entry_host = service.spec.entry_host.as_ref();
    entry_host.is_some_and(|entry_host| entry_host.blocks.is_empty()) && service.spec.cluster_ips.is_empty()
}

/// Returns the outbound listeners of a sidecar.
pub(in crate::compile) fn compile(
    world: &World,
    view: &ProxyView,
    outline: &Outline,
) -> Vec<listener::Listener> {
    let setting = Setting { mesh: world.mesh(), view, hash_source_ip: false, grpc_web: false };
    let mut drafts: BTreeMap<String, Draft> = BTreeMap::new();
    for port in &outline.shared {
        let bind = Bind::everywhere(view, None);
        let draft = draft(&mut drafts, &bind, *port);
        draft.add_http(setting, &format!("{}_{port}", bind.addresses[0]), port.to_string());
        if let (Some(hosts), Some(chain)) = (outline.dynamic.get(port), draft.chains.last_mut()) {
            dynamic_dns::add_filters(chain, hosts, Families { ipv4: view.ipv4, ipv6: view.ipv6 });
        }
    }
    for Outlined { service, rules, server_names } in &outline.services {
        for port in service.spec.ports.iter().filter(|port| has_own(port)) {
            for bind in binds(world, view, service, port) {
                let is_wild = service.meta.name.starts_with('*');
                let by_name = bind.is_everywhere || bind.block.is_some() || is_wild;
                let target = Target {
                    world,
                    setting,
                    service,
                    port,
                    block: bind.block.as_deref(),
                    server_names: if by_name { server_names } else { &[] },
                    rules,
                };
                let draft = draft(&mut drafts, &bind, port.port);
                if port.protocol == Protocol::Unknown {
                    let own = format!("{}:{}", service.fqdn(), port.port);
                    let routes = if is_everywhere(service) { port.port.to_string() } else { own };
                    draft.add_http(setting, &format!("{}_{}", bind.addresses[0], port.port), routes);
                }
                target.chains().into_iter().for_each(|chain| draft.add(chain));
            }
        }
    }
    let listeners = drafts.into_iter().map(|(name, draft)| draft.finish(world, setting, name));
    std::iter::once(catch_all(world, setting)).chain(listeners).collect()
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
    /// Adds the filter chain of HTTP in plain text.
    fn add_http(&mut self, setting: Setting<'_>, name: &str, routes: String) {
        if !self.has_http {
            self.has_http = true;
            self.chains.push(http_chain(setting, name, Routes::ByName(routes)));
        }
    }

    /// Adds a filter chain without the part of its match that another one has: the first match applies, and Envoy
    /// refuses matches that overlap.
    fn add(&mut self, chain: listener::FilterChain) {
        let found = chain.filter_chain_match.clone().unwrap_or_default();
        let names = if found.server_names.is_empty() { vec![String::new()] } else { found.server_names };
        let text = |range: &core::CidrRange| {
            format!("{}/{}", range.address_prefix, range.prefix_len.map_or(0, |length| length.value))
        };
        let mut free: BTreeMap<Vec<usize>, Vec<String>> = BTreeMap::new();
        let texts: Vec<String> = found.prefix_ranges.iter().map(text).collect();
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
    fn finish(mut self, world: &World, setting: Setting<'_>, name: String) -> listener::Listener {
        let every = self.chains.iter().position(|chain| chain.filter_chain_match.is_none());
        let default = match every {
            Some(_) if self.chains.len() == 1 => None,
            Some(at) => Some(self.chains.remove(at)),
            None => Some(pass_through(setting)),
        };
        let found = |chain: &listener::FilterChain| chain.filter_chain_match.clone().unwrap_or_default();
        let by_name = self.chains.iter().any(|chain| !found(chain).server_names.is_empty());
        let inspectors = by_name.then(tls_inspector).into_iter().chain(self.has_http.then(http_inspector));
        let (first, extra) = self.addresses.split_first().map_or(("", &[][..]), |(a, b)| (a.as_str(), b));
        listener::Listener {
            filter_chains: self.chains,
            default_filter_chain: default,
            listener_filters: inspectors.collect(),
            ..unbound(world, name, first, extra, self.port)
        }
    }
}

/// Returns the filter chain of unknown destinations.
fn pass_through(setting: Setting<'_>) -> listener::FilterChain {
    listener::FilterChain {
        filter_chain_match: Some(Default::default()),
        filters: filters::tcp_chain(setting, Direction::Outbound, unknown_destinations(setting), Vec::new()),
        name: "PassthroughFilterChain".into(),
        ..Default::default()
    }
}

/// Returns the listener that accepts every redirected connection.
fn catch_all(world: &World, setting: Setting<'_>) -> listener::Listener {
    let port = names::OUTBOUND_PORT;
    // A connection to the listener itself would loop.
    let black_hole = listener::FilterChain {
        filter_chain_match: Some(listener::FilterChainMatch {
            destination_port: uint32(port.into()),
            ..Default::default()
        }),
        filters: filters::tcp_chain(setting, Direction::Outbound, BLACK_HOLE, Vec::new()),
        name: "virtualOutbound-blackhole".into(),
        ..Default::default()
    };
    let rest = listener::FilterChain {
        filters: filters::tcp_chain(setting, Direction::Outbound, unknown_destinations(setting), Vec::new()),
        name: "virtualOutbound-catchall-tcp".into(),
        ..Default::default()
    };
    listener::Listener {
        use_original_dst: boolean(true),
        traffic_direction: TrafficDirection::Outbound as i32,
        ..virtual_listener(world, setting.view, "virtualOutbound", port, vec![black_hole, rest])
    }
}

/// Returns the cluster of connections to unknown addresses.
fn unknown_destinations(setting: Setting<'_>) -> &'static str {
    match setting.mesh.outbound_traffic_policy.mode {
        OutboundMode::AllowAny => PASSTHROUGH,
        OutboundMode::RegistryOnly => BLACK_HOLE,
    }
}

fn http_chain(setting: Setting<'_>, listener: &str, routes: Routes) -> listener::FilterChain {
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
            Vec::new(),
        ),
        transport_socket_connect_timeout: Some(seconds(HANDSHAKE_SECONDS)),
        ..Default::default()
    }
}

/// Returns a listener without a socket. It receives connections by their original destination.
fn unbound(world: &World, name: String, ip: &str, extra: &[String], port: u16) -> listener::Listener {
    let additional = extra
        .iter()
        .map(|ip| listener::AdditionalAddress { address: Some(address(ip, port)), ..Default::default() });
    listener::Listener {
        name,
        address: Some(address(ip, port)),
        additional_addresses: additional.collect(),
        listener_filters_timeout: Some(detection_timeout(world)),
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
