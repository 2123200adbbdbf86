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
    api::{Protocol, Service, ServicePort, Typed, mesh_config::OutboundMode},
    compile::{
        balance,
        clusters::{BLACK_HOLE, PASSTHROUGH},
        filters::{self, Routes, Setting},
        pb::{address, boolean, core, listener, pack, seconds},
        telemetry::SideTelemetry,
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
}

/// Returns the outline of the listeners for these services.
pub(in crate::compile) fn outline<'a>(services: impl Iterator<Item = &'a Arc<Typed<Service>>>) -> Outline {
    let mut outline = Outline::default();
    for service in services {
        let http = service.spec.ports.iter().filter(|port| port.protocol.is_http());
        outline.shared.extend(http.map(|port| port.port));
        if service.spec.ports.iter().any(has_own) {
            outline.services.push(Arc::clone(service));
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
    let telemetry = SideTelemetry::new(world, view, Direction::Outbound);
    let setting =
        Setting { mesh: world.mesh(), view, telemetry: &telemetry, hash_source_ip: false, grpc_web: false };
    let mut by_address: BTreeMap<String, listener::Listener> = BTreeMap::new();
    for service in &outline.services {
        for port in service.spec.ports.iter().filter(|port| has_own(port)) {
            for addresses in listener_addresses(world, view, service, port) {
                let listener = of_addresses(world, setting, service, port, &addresses);
                by_address.entry(listener.name.clone()).or_insert(listener);
            }
        }
    }
    let shared = outline.shared.iter().map(|port| shared(world, setting, *port));
    std::iter::once(catch_all(setting)).chain(shared).chain(by_address.into_values()).collect()
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
fn catch_all(setting: Setting<'_>) -> listener::Listener {
    let port = names::OUTBOUND_PORT;
    // A connection to the listener itself would loop.
    let black_hole = listener::FilterChain {
        filter_chain_match: Some(listener::FilterChainMatch {
            destination_port: crate::compile::pb::uint32(port.into()),
            ..Default::default()
        }),
        filters: filters::black_hole_chain(setting, Direction::Outbound, BLACK_HOLE),
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
        ..virtual_listener(setting, "virtualOutbound", port, vec![black_hole, rest])
    }
}

/// Returns the cluster of connections to unknown addresses.
fn unknown_destinations(setting: Setting<'_>) -> &'static str {
    match setting.mesh.outbound_traffic_policy.mode {
        OutboundMode::AllowAny => PASSTHROUGH,
        OutboundMode::RegistryOnly => BLACK_HOLE,
    }
}

/// Returns the listener of an HTTP port, for all addresses.
fn shared(world: &World, setting: Setting<'_>, port: u16) -> listener::Listener {
    let any = any_address(setting.view);
    let both = setting.view.ipv4 && setting.view.ipv6;
    let extra: &[&str] = if both { &["::"] } else { &[] };
    let name = format!("{any}_{port}");
    let passthrough = listener::FilterChain {
        filter_chain_match: Some(Default::default()),
        filters: filters::tcp_chain(setting, Direction::Outbound, unknown_destinations(setting), Vec::new()),
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

/// Returns the listener of a service port for these addresses.
fn of_addresses(
    world: &World,
    setting: Setting<'_>,
    service: &Typed<Service>,
    port: &ServicePort,
    addresses: &[IpAddr],
) -> listener::Listener {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
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
