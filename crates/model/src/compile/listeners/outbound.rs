//! Outbound listeners, for requests of the workload.
//!
//! `virtualOutbound` accepts every redirected connection and hands it to the listener of its original destination. HTTP
//! ports share one listener for all addresses; any other port has one for each address of a service. Other connections
//! pass to their original destination or are refused, as the mesh configuration says.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use skysail_core::{
    ClusterName,
    names::{self, Direction},
};
use skysail_xds::envoy::pb::envoy::extensions::filters::listener::http_inspector::v3::HttpInspector;

use super::{any_address, detection_timeout, inspector, virtual_listener};
use crate::{
    ProxyView, World,
    api::{
        Protocol, Service, ServicePort, Typed,
        mesh_config::OutboundMode,
        sidecar::{CaptureMode, Egress, EgressListener},
    },
    compile::{
        access_log, balance,
        clusters::BLACK_HOLE,
        filters::{self, Routes, Setting},
        pb::{address, boolean, core, listener, pack, seconds, uint32},
        routes,
        visibility::UnknownDestinations,
    },
};

use core::TrafficDirection;

/// Timeout of a TLS handshake with the client in seconds.
const HANDSHAKE_SECONDS: i64 = 15;
/// ALPN of HTTP in plain text.
const PLAIN_HTTP: [&str; 2] = ["http/1.1", "h2c"];

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
                Protocol::Unknown => named.own.push((service, port.port)),
                protocol if protocol.is_http() => drop(named.shared.insert(port.port)),
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
    /// Services with ports that have listeners of their own.
    services: Vec<Arc<Typed<Service>>>,
    /// What the Sidecar lets the clients call.
    egress: Option<Arc<Egress>>,
    /// Egress listeners with an address of their own, with their services; at least one each.
    bound: Vec<BoundEgress>,
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
    services: impl Iterator<Item = Arc<Typed<Service>>>,
    egress: Option<Arc<Egress>>,
    bound: Vec<BoundEgress>,
) -> Outline {
    let mut outline = Outline { egress, bound, ..Outline::default() };
    for service in services {
        let http = service.spec.ports.iter().filter(|port| port.protocol.is_http());
        outline.shared.extend(http.map(|port| port.port));
        if service.spec.ports.iter().any(has_own) {
            outline.services.push(service);
        }
    }
    outline
}

/// Returns whether a port has a listener for each address of its service.
fn has_own(port: &ServicePort) -> bool {
    port.protocol != Protocol::Udp && !port.protocol.is_http()
}

/// Returns the outbound listeners of a sidecar.
pub(in crate::compile) fn compile(
    world: &World,
    view: &ProxyView,
    outline: &Outline,
) -> Vec<listener::Listener> {
    let unknown = UnknownDestinations::of(world.mesh(), outline.egress.as_deref());
    let setting = Setting {
        mesh: world.mesh(),
        view,
        hash_source_ip: false,
        grpc_web: false,
        http2: false,
        dynamic_dns: unknown.mode == OutboundMode::AllowAnyDynamicDns,
    };
    let bound = outline.bound.iter().map(|(of, services)| bound(world, setting, of, services));
    let mut by_address: BTreeMap<String, listener::Listener> =
        bound.map(|listener| (listener.name.clone(), listener)).collect();
    if !view.intercepts {
        LocalListeners { world, setting, outline }.add(&mut by_address);
        return by_address.into_values().collect();
    }
    for service in &outline.services {
        for port in service.spec.ports.iter().filter(|port| has_own(port)) {
            for addresses in listener_addresses(world, view, service, port) {
                let listener = of_addresses(world, setting, service, port, &addresses);
                by_address.entry(listener.name.clone()).or_insert(listener);
            }
        }
    }
    let shared = outline.shared.iter().map(|port| shared(world, setting, *port, &unknown));
    std::iter::once(catch_all(world, setting, &unknown))
        .chain(shared)
        .chain(by_address.into_values())
        .collect()
}

/// Returns the addresses that clients use, grouped by listener: the service's own, or each of its pods' if it is
/// headless.
fn listener_addresses(
    world: &World,
    view: &ProxyView,
    service: &Typed<Service>,
    port: &ServicePort,
) -> Vec<Vec<IpAddr>> {
    let reachable = |ip: &IpAddr| if ip.is_ipv4() { view.ipv4 } else { view.ipv6 };
    if service.spec.headless {
        let endpoints = world.endpoints(service, port).into_iter().filter(|endpoint| endpoint.ready);
        return endpoints
            .filter_map(|endpoint| endpoint.address.ip())
            .filter(reachable)
            .map(|ip| vec![ip])
            .collect();
    }
    let own: Vec<IpAddr> = service.spec.cluster_ips.iter().copied().filter(reachable).collect();
    if own.is_empty() { Vec::new() } else { vec![own] }
}

/// Returns the listener that accepts every redirected connection.
fn catch_all(world: &World, setting: Setting<'_>, unknown: &UnknownDestinations) -> listener::Listener {
    let port = names::OUTBOUND_PORT;
    // A connection to the listener itself would loop.
    let black_hole = listener::FilterChain {
        filter_chain_match: Some(listener::FilterChainMatch {
            destination_port: crate::compile::pb::uint32(port.into()),
            ..Default::default()
        }),
        filters: filters::tcp_chain(setting, Direction::Outbound, BLACK_HOLE, Vec::new()),
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
            Routes::Inline(Box::new(routes::of_unknown_hosts(world.mesh(), unknown))),
            Vec::new(),
        ),
        name: "virtualOutbound-catchall-tcp-http".into(),
        ..Default::default()
    });
    let chains = std::iter::once(black_hole).chain(by_host).chain([rest]).collect();
    listener::Listener {
        use_original_dst: boolean(true),
        traffic_direction: TrafficDirection::Outbound as i32,
        listener_filters: setting.dynamic_dns.then(http_inspector).into_iter().collect(),
        ..virtual_listener(world, setting.view, "virtualOutbound", port, chains)
    }
}

/// Returns the listener of an HTTP port, for all addresses.
fn shared(
    world: &World,
    setting: Setting<'_>,
    port: u16,
    unknown: &UnknownDestinations,
) -> listener::Listener {
    let any = any_address(setting.view);
    let both = setting.view.ipv4 && setting.view.ipv6;
    let extra: &[&str] = if both { &["::"] } else { &[] };
    let name = format!("{any}_{port}");
    let passthrough = listener::FilterChain {
        filter_chain_match: Some(Default::default()),
        filters: filters::tcp_chain(setting, Direction::Outbound, &unknown.cluster, Vec::new()),
        name: "PassthroughFilterChain".into(),
        ..Default::default()
    };
    let routes = Routes::ByName(port.to_string());
    listener::Listener {
        filter_chains: vec![http_chain(setting, &name, routes)],
        default_filter_chain: Some(passthrough),
        listener_filters: vec![http_inspector()],
        ..unbound(world, name, any, extra, port)
    }
}

/// Listeners of a proxy to which no connections are redirected: one on the loopback address for each port. Without the
/// original destination, a port that is not HTTP leads to the first service that has it.
struct LocalListeners<'a> {
    world: &'a World,
    setting: Setting<'a>,
    outline: &'a Outline,
}

impl LocalListeners<'_> {
    fn add(&self, by_address: &mut BTreeMap<String, listener::Listener>) {
        let Self { world, setting, outline } = *self;
        let ip = loopback(setting.view);
        for port in &outline.shared {
            let name = format!("{ip}_{port}");
            let mut chain = http_chain(setting, &name, Routes::ByName(port.to_string()));
            chain.filter_chain_match = None;
            let listener =
                listener::Listener { filter_chains: vec![chain], ..unbound(world, name, ip, &[], *port) };
            by_address.entry(listener.name.clone()).or_insert_with(|| with_socket(world, listener));
        }
        for service in &outline.services {
            for port in service.spec.ports.iter().filter(|port| has_own(port)) {
                let name = format!("{ip}_{}", port.port);
                if by_address.contains_key(&name) {
                    continue;
                }
                let listener = of_texts(world, setting, service, port, &[ip.to_owned()]);
                by_address.insert(name, with_socket(world, listener));
            }
        }
    }
}

/// Returns a listener with a socket of its own.
fn with_socket(world: &World, listener: listener::Listener) -> listener::Listener {
    listener::Listener {
        access_log: access_log::of_listener(world.mesh()),
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
    setting: Setting<'_>,
    egress: &EgressListener,
    services: &[Arc<Typed<Service>>],
) -> listener::Listener {
    let port = egress.port().unwrap_or_default();
    let has_socket = egress.capture_mode == CaptureMode::None || !setting.view.intercepts;
    let ip = match egress.bind.as_str() {
        "" => loopback(setting.view),
        ip => ip,
    };
    let name = format!("{ip}_{port}");
    let protocol = egress.port.as_ref().and_then(|port| port.parsed_protocol()).unwrap_or(Protocol::Tcp);
    let mut chain = if protocol.is_http() {
        http_chain(setting, &name, Routes::ByName(port.to_string()))
    } else {
        let cluster = ClusterName::outbound(port, "", &services[0].fqdn()).to_string();
        let rule = world.destination_rule(&services[0].fqdn(), &setting.view.namespace);
        let hashing = Setting { hash_source_ip: balance::hashes_source_ip(rule.as_deref()), ..setting };
        listener::FilterChain {
            filters: filters::tcp_chain(hashing, Direction::Outbound, &cluster, Vec::new()),
            transport_socket_connect_timeout: Some(seconds(HANDSHAKE_SECONDS)),
            ..Default::default()
        }
    };
    // The protocol is declared, so it need not be detected.
    chain.filter_chain_match = None;
    let listener = listener::Listener { filter_chains: vec![chain], ..unbound(world, name, ip, &[], port) };
    if has_socket { with_socket(world, listener) } else { listener }
}

/// Returns the listener of a service port for these addresses.
fn of_addresses(
    world: &World,
    setting: Setting<'_>,
    service: &Typed<Service>,
    port: &ServicePort,
    addresses: &[IpAddr],
) -> listener::Listener {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    of_texts(world, setting, service, port, &texts)
}

fn of_texts(
    world: &World,
    setting: Setting<'_>,
    service: &Typed<Service>,
    port: &ServicePort,
    texts: &[String],
) -> listener::Listener {
    let extra: Vec<&str> = texts.iter().skip(1).map(String::as_str).collect();
    let name = format!("{}_{}", texts[0], port.port);
    let host = service.fqdn();
    let cluster = ClusterName::outbound(port.port, "", &host).to_string();
    let rule = world.destination_rule(&host, &setting.view.namespace);
    let hashing = Setting { hash_source_ip: balance::hashes_source_ip(rule.as_deref()), ..setting };
    let tcp = listener::FilterChain {
        filters: filters::tcp_chain(hashing, Direction::Outbound, &cluster, Vec::new()),
        transport_socket_connect_timeout: Some(seconds(HANDSHAKE_SECONDS)),
        ..Default::default()
    };
    if port.protocol != Protocol::Unknown {
        return listener::Listener {
            filter_chains: vec![tcp],
            ..unbound(world, name, &texts[0], &extra, port.port)
        };
    }
    let routes = Routes::ByName(format!("{host}:{}", port.port));
    listener::Listener {
        filter_chains: vec![http_chain(setting, &name, routes)],
        default_filter_chain: Some(tcp),
        listener_filters: vec![http_inspector()],
        ..unbound(world, name, &texts[0], &extra, port.port)
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
fn unbound(world: &World, name: String, ip: &str, extra: &[&str], port: u16) -> listener::Listener {
    let additional = extra
        .iter()
        .map(|ip| listener::AdditionalAddress { address: Some(address(*ip, port)), ..Default::default() });
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

fn http_inspector() -> listener::ListenerFilter {
    inspector("envoy.filters.listener.http_inspector", pack(&HttpInspector::default()))
}
