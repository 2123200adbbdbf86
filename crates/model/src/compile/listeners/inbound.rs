//! Inbound listener: one filter chain for each port and each kind of connection.
//!
//! The port, TLS or not, and the protocol that the client offers in TLS (sidecars offer `istio`, ...) select the filter
//! chain. PERMISSIVE ports accept mutual TLS from sidecars and plain text from others, STRICT ports require mutual TLS,
//! DISABLE ports are not inspected.

use std::collections::BTreeMap;

use skysail_core::{
    ClusterName,
    names::{self, Direction},
};
use skysail_xds::envoy::pb::envoy::extensions::filters::listener::{
    http_inspector::v3::HttpInspector, original_dst::v3::OriginalDst, tls_inspector::v3::TlsInspector,
};

use super::{InboundPort, detection_timeout, inspector, virtual_listener};
use crate::{
    ProxyView, World,
    api::{MtlsMode, Protocol, proxy_config::HttpSettings},
    compile::{
        clusters::{BLACK_HOLE, INBOUND_PASSTHROUGH},
        extension::Extensions,
        filters::{self, FilterSettings, Routes},
        pb::{
            address, boolean, config_path, core, fields, listener, metadata, pack, route, seconds, types,
            uint32,
        },
        rate_limit::RateLimits,
        rbac::Authorization,
        stat_names::StatNameVariables,
        telemetry::SideTelemetry,
        tls,
    },
};

use listener::listener_filter_chain_match_predicate::{MatchSet, Rule};

/// First number after the last port.
const PORTS_END: i32 = 65536;
/// Size of the first read of a ClientHello in bytes; most are shorter.
const TLS_READ_BYTES: u32 = 512;
/// ALPN of HTTP in plain text.
const PLAIN_HTTP: &[&str] = &["http/1.1", "h2c"];
const ISTIO_TCP: &[&str] = &[tls::PEER_EXCHANGE, tls::ISTIO];

/// Protocol of a port.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Http,
    Tcp,
    /// Detected from the first bytes.
    Either,
}

/// Match of one kind of connection.
#[derive(Clone, Copy)]
struct ChainMatch {
    transport: &'static str,
    alpn: &'static [&'static str],
    http: bool,
    terminate: bool,
}

/// Port to which a chain leads.
struct InboundTarget<'a> {
    /// `None` for the ports without a service.
    port: Option<u16>,
    /// Service port, if a service leads to it.
    service: Option<&'a InboundPort<'a>>,
}

/// Settings shared by all inbound chains.
struct Inbound<'a> {
    setting: FilterSettings<'a>,
    authorization: &'a Authorization,
    limits: RateLimits<'a>,
}

impl<'a> Inbound<'a> {
    fn new(
        world: &'a World,
        view: &'a ProxyView,
        telemetry: &'a SideTelemetry,
        proxy: &'a HttpSettings,
        authorization: &'a Authorization,
        extensions: &'a Extensions<'a>,
    ) -> Self {
        let setting = FilterSettings {
            mesh: world.mesh(),
            view,
            telemetry,
            hash_source_ip: false,
            grpc_web: false,
            http2: false,
            dynamic_dns: false,
            proxy,
            extensions,
            port: 0,
        };
        Self { setting, authorization, limits: RateLimits::new(world, view) }
    }
}

/// Returns the listener `virtualInbound`.
pub(in crate::compile) fn compile(
    world: &World,
    view: &ProxyView,
    ports: &[InboundPort<'_>],
    authorization: &Authorization,
) -> listener::Listener {
    let telemetry = SideTelemetry::new(world, view, Direction::Inbound);
    let proxy = filters::settings(world.mesh(), view);
    let extensions = Extensions::new(world, view);
    let inbound = Inbound::new(world, view, &telemetry, &proxy, authorization, &extensions);
    let mut chains = vec![black_hole(inbound.setting)];
    let mut inspected = BTreeMap::from([(names::INBOUND_PORT, Inspected::default())]);

    let default_matches = matches_for(Content::Either, world.workload_mode(&view.namespace, &view.labels));
    chains.extend(inbound.chains(&InboundTarget { port: None, service: None }, default_matches));
    for (port, mode) in world.port_modes(&view.namespace, &view.labels) {
        if ports.iter().all(|served| served.port != port || served.has_socket()) {
            let chain_matches = matches_for(Content::Either, mode);
            inspected.insert(port, Inspected::of(chain_matches));
            chains.extend(inbound.chains(&InboundTarget { port: Some(port), service: None }, chain_matches));
        }
    }
    for port in ports.iter().filter(|port| !port.has_socket()) {
        let chain_matches = matches_for(content(port.protocol), port.mode);
        inspected.insert(port.port, Inspected::of(chain_matches));
        chains.extend(
            inbound.chains(&InboundTarget { port: Some(port.port), service: Some(port) }, chain_matches),
        );
    }

    listener::Listener {
        listener_filters: listener_filters(Inspected::of(default_matches), &inspected),
        listener_filters_timeout: Some(detection_timeout(world)),
        continue_on_listener_filters_timeout: true,
        traffic_direction: core::TrafficDirection::Inbound as i32,
        ..virtual_listener(inbound.setting, "virtualInbound", names::INBOUND_PORT, chains)
    }
}

/// Returns the listener of a port with a socket of its own, which a Sidecar defines.
pub(in crate::compile) fn with_socket(
    world: &World,
    view: &ProxyView,
    port: &InboundPort<'_>,
    authorization: &Authorization,
) -> listener::Listener {
    let telemetry = SideTelemetry::new(world, view, Direction::Inbound);
    let proxy = filters::settings(world.mesh(), view);
    let extensions = Extensions::new(world, view);
    let inbound = Inbound::new(world, view, &telemetry, &proxy, authorization, &extensions);
    let chain_matches = matches_for(content(port.protocol), port.mode);
    let chains = inbound.chains(&InboundTarget { port: Some(port.port), service: Some(port) }, chain_matches);
    let ip = inbound.ip(port);
    let name = format!("{ip}_{}", port.port);
    let inspected = Inspected::of(chain_matches);
    let only = |filter: listener::ListenerFilter| listener::ListenerFilter {
        filter_disabled: Some(listener::ListenerFilterChainMatchPredicate {
            rule: Some(Rule::NotMatch(Box::new(in_ranges(&[(
                i32::from(port.port),
                i32::from(port.port) + 1,
            )])))),
        }),
        ..filter
    };
    let filters = [(inspected.tls, tls_inspector()), (inspected.http, http_inspector())];
    let filters = filters.into_iter().filter(|(is_needed, _)| *is_needed);
    listener::Listener {
        address: Some(address(ip, port.port)),
        listener_filters: filters.map(|(_, filter)| only(filter)).collect(),
        listener_filters_timeout: Some(detection_timeout(world)),
        continue_on_listener_filters_timeout: true,
        traffic_direction: core::TrafficDirection::Inbound as i32,
        ..virtual_listener(inbound.setting, &name, port.port, chains)
    }
}

fn content(protocol: Protocol) -> Content {
    match protocol {
        Protocol::Unknown => Content::Either,
        protocol if protocol.is_http() => Content::Http,
        _ => Content::Tcp,
    }
}

fn matches_for(content: Content, mode: MtlsMode) -> &'static [ChainMatch] {
    const fn mutual(alpn: &'static [&'static str], http: bool) -> ChainMatch {
        ChainMatch { transport: "tls", alpn, http, terminate: true }
    }
    const fn plain(alpn: &'static [&'static str], http: bool) -> ChainMatch {
        ChainMatch { transport: "raw_buffer", alpn, http, terminate: false }
    }
    // TLS of the application itself, passed through.
    const FOREIGN_TLS: ChainMatch = ChainMatch { transport: "tls", alpn: &[], http: false, terminate: false };
    match (mode, content) {
        (MtlsMode::Disable, Content::Http) => const { &[plain(&[], true)] },
        (MtlsMode::Disable, Content::Tcp) => const { &[plain(&[], false)] },
        (MtlsMode::Disable, Content::Either) => const { &[plain(PLAIN_HTTP, true), plain(&[], false)] },
        (MtlsMode::Strict, Content::Http) => const { &[mutual(&[], true)] },
        (MtlsMode::Strict, Content::Tcp) => const { &[mutual(&[], false)] },
        (MtlsMode::Strict, Content::Either) => {
            const { &[mutual(&tls::ISTIO_HTTP, true), mutual(&[], false)] }
        }
        (MtlsMode::Permissive | MtlsMode::Unset, Content::Http) => {
            const { &[mutual(&tls::ISTIO_ANY, true), plain(&[], true)] }
        }
        (MtlsMode::Permissive | MtlsMode::Unset, Content::Tcp) => {
            const { &[mutual(&tls::ISTIO_ANY, false), FOREIGN_TLS, plain(&[], false)] }
        }
        (MtlsMode::Permissive | MtlsMode::Unset, Content::Either) => {
            const {
                &[
                    mutual(&tls::ISTIO_HTTP, true),
                    plain(PLAIN_HTTP, true),
                    mutual(ISTIO_TCP, false),
                    plain(&[], false),
                    FOREIGN_TLS,
                ]
            }
        }
    }
}

impl Inbound<'_> {
    fn chains(&self, target: &InboundTarget<'_>, chain_matches: &[ChainMatch]) -> Vec<listener::FilterChain> {
        chain_matches.iter().map(|chain_match| self.chain(target, *chain_match)).collect()
    }

    fn chain(&self, target: &InboundTarget<'_>, chain_match: ChainMatch) -> listener::FilterChain {
        let plain_envoy = self.setting.view.plain_envoy;
        let socket =
            chain_match.terminate.then(|| tls::downstream(self.setting.mesh, !chain_match.http, plain_envoy));
        listener::FilterChain {
            filter_chain_match: Some(listener::FilterChainMatch {
                destination_port: target.port.and_then(|port| uint32(port.into())),
                transport_protocol: chain_match.transport.into(),
                application_protocols: chain_match.alpn.iter().map(ToString::to_string).collect(),
                ..Default::default()
            }),
            filters: if chain_match.http { self.http_filters(target) } else { self.tcp_filters(target) },
            transport_socket: socket,
            metadata: target.service.and_then(|port| port.ingress).map(|(sidecar, _)| {
                let path = config_path("sidecar", &sidecar.meta.namespace, &sidecar.meta.name);
                metadata("istio", fields([("config", path)]))
            }),
            name: match (target.service, chain_match.http) {
                (Some(service), _) => self.address(service),
                (None, true) => "virtualInbound-catchall-http".into(),
                (None, false) => "virtualInbound".into(),
            },
            ..Default::default()
        }
    }

    fn tcp_filters(&self, target: &InboundTarget<'_>) -> Vec<listener::Filter> {
        let pattern = &self.setting.mesh.inbound_cluster_stat_name;
        let stat_prefix = if pattern.is_empty() { target.cluster() } else { target.named().fill(pattern) };
        filters::named_tcp_chain(
            FilterSettings { port: target.port.unwrap_or_default(), ..self.setting },
            Direction::Inbound,
            stat_prefix,
            &target.cluster(),
            self.authorization.tcp_filters(),
        )
    }

    fn http_filters(&self, target: &InboundTarget<'_>) -> Vec<listener::Filter> {
        let prefix = match target.service {
            Some(service) => format!("inbound_{};", self.address(service)),
            None => format!("{INBOUND_PASSTHROUGH};"),
        };
        let routes = Routes::Inline(Box::new(target.routes()));
        let grpc_web = target.service.is_some_and(|service| service.protocol == Protocol::GrpcWeb);
        let http2 = target.service.is_some_and(|service| service.protocol.is_http2());
        let setting =
            FilterSettings { grpc_web, http2, port: target.port.unwrap_or_default(), ..self.setting };
        let services = target.service.iter().flat_map(|port| &port.services);
        let limits = self.limits.of_services(services.map(|(service, _)| *service));
        let policy = limits.after(self.authorization.http_filters());
        filters::http_chain(setting, Direction::Inbound, prefix, routes, policy)
    }

    fn address(&self, port: &InboundPort<'_>) -> String {
        format!("{}_{}", self.ip(port), port.port)
    }

    /// Returns the address of a port in names: as a Sidecar defines it, otherwise any.
    fn ip(&self, port: &InboundPort<'_>) -> String {
        let view = self.setting.view;
        match (port.ingress, view.address) {
            (Some((_, ingress)), _) if !ingress.bind.is_empty() => ingress.bind.clone(),
            (Some(_), Some(ip)) => ip.to_string(),
            _ => super::any_address(view).to_owned(),
        }
    }
}

impl InboundTarget<'_> {
    /// Returns the names of the service in statistics.
    fn named(&self) -> StatNameVariables<'_> {
        let Some(port) = self.service else { return StatNameVariables::default() };
        match port.services.first().filter(|_| port.ingress.is_none()) {
            Some((service, first)) => StatNameVariables::of_port(service, first, port.port),
            None => StatNameVariables { host: port.host(), port: port.port, ..StatNameVariables::default() },
        }
    }

    fn cluster(&self) -> String {
        match self.service {
            Some(service) => ClusterName::inbound(service.port).to_string(),
            None => INBOUND_PASSTHROUGH.into(),
        }
    }

    /// Returns routes that send all requests to the one cluster.
    fn routes(&self) -> route::RouteConfiguration {
        let cluster = self.cluster();
        let (service, number) = match self.service {
            Some(port) => (port.host(), port.service_port()),
            None => (String::new(), 0),
        };
        // Only HTTP/1 connections are closed while a request is on its way.
        let retries = self.service.is_none_or(|port| !port.protocol.is_http2());
        let action = route::RouteAction {
            cluster_specifier: Some(route::route_action::ClusterSpecifier::Cluster(cluster.clone())),
            timeout: Some(seconds(0)),
            // The workload closed the idle connection at that moment, so it received no part of the request.
            retry_policy: retries.then(|| route::RetryPolicy {
                retry_on: "reset-before-request".into(),
                num_retries: uint32(2),
                ..Default::default()
            }),
            max_stream_duration: Some(route::route_action::MaxStreamDuration {
                max_stream_duration: Some(seconds(0)),
                grpc_timeout_header_max: Some(seconds(0)),
                ..Default::default()
            }),
            ..Default::default()
        };
        let everything = route::Route {
            name: "default".into(),
            r#match: Some(route::RouteMatch {
                path_specifier: Some(route::route_match::PathSpecifier::Prefix("/".into())),
                ..Default::default()
            }),
            action: Some(route::route::Action::Route(action)),
            decorator: Some(route::Decorator {
                operation: format!("{service}:{number}/*"),
                ..Default::default()
            }),
            ..Default::default()
        };
        route::RouteConfiguration {
            name: cluster,
            virtual_hosts: vec![route::VirtualHost {
                name: format!("inbound|http|{number}"),
                domains: vec!["*".into()],
                routes: vec![everything],
                ..Default::default()
            }],
            validate_clusters: boolean(false),
            ..Default::default()
        }
    }
}

/// Returns the chain for connections to the listener itself, which would loop.
fn black_hole(setting: FilterSettings<'_>) -> listener::FilterChain {
    listener::FilterChain {
        filter_chain_match: Some(listener::FilterChainMatch {
            destination_port: uint32(names::INBOUND_PORT.into()),
            ..Default::default()
        }),
        filters: filters::black_hole_chain(setting, Direction::Inbound, BLACK_HOLE),
        name: "virtualInbound-blackhole".into(),
        ..Default::default()
    }
}

/// Protocols that must be detected before a chain is selected.
#[derive(Clone, Copy, Default)]
struct Inspected {
    tls: bool,
    http: bool,
}

impl Inspected {
    fn of(chain_matches: &[ChainMatch]) -> Self {
        Self {
            tls: chain_matches.iter().any(|chain_match| chain_match.transport == "tls"),
            http: chain_matches
                .iter()
                .any(|chain_match| chain_match.transport != "tls" && !chain_match.alpn.is_empty()),
        }
    }
}

/// Returns the listener filters. Inspectors are disabled for ports that do not need them: where the server sends first,
/// they would only wait for their timeout.
fn listener_filters(default: Inspected, ports: &BTreeMap<u16, Inspected>) -> Vec<listener::ListenerFilter> {
    let tls = disabled_ranges(default.tls, ports.iter().map(|(port, inspected)| (*port, inspected.tls)));
    let http = disabled_ranges(default.http, ports.iter().map(|(port, inspected)| (*port, inspected.http)));
    let inspectors = [(tls, tls_inspector()), (http, http_inspector())];
    let mut filters = vec![inspector("envoy.filters.listener.original_dst", pack(&OriginalDst::default()))];
    for (ranges, inspector) in inspectors {
        if let Some(ranges) = ranges {
            filters.push(listener::ListenerFilter { filter_disabled: Some(in_ranges(&ranges)), ..inspector });
        }
    }
    filters
}

fn tls_inspector() -> listener::ListenerFilter {
    let inspect = TlsInspector { initial_read_buffer_size: uint32(TLS_READ_BYTES), ..Default::default() };
    inspector("envoy.filters.listener.tls_inspector", pack(&inspect))
}

fn http_inspector() -> listener::ListenerFilter {
    inspector("envoy.filters.listener.http_inspector", pack(&HttpInspector::default()))
}

/// Returns the port ranges for which an inspector is disabled, or `None` if no port needs it. `ports` are sorted; the
/// end of a range is exclusive.
fn disabled_ranges(
    default: bool,
    ports: impl Iterator<Item = (u16, bool)> + Clone,
) -> Option<Vec<(i32, i32)>> {
    let single = |port: u16| (i32::from(port), i32::from(port) + 1);
    if default {
        return Some(ports.filter(|(_, on)| !on).map(|(port, _)| single(port)).collect());
    }
    if ports.clone().all(|(_, on)| !on) {
        return None;
    }
    let mut ranges = Vec::new();
    let mut from = 0;
    for (port, _) in ports.filter(|(_, on)| *on) {
        let (start, end) = single(port);
        ranges.push((from, start));
        from = end;
    }
    ranges.push((from, PORTS_END));
    ranges.retain(|(start, end)| start < end);
    Some(ranges)
}

/// Returns a predicate that matches connections to these ports.
fn in_ranges(ranges: &[(i32, i32)]) -> listener::ListenerFilterChainMatchPredicate {
    let range = |(start, end): &(i32, i32)| listener::ListenerFilterChainMatchPredicate {
        rule: Some(Rule::DestinationPortRange(types::Int32Range { start: *start, end: *end })),
    };
    match ranges {
        [only] => range(only),
        _ => listener::ListenerFilterChainMatchPredicate {
            rule: Some(Rule::OrMatch(MatchSet { rules: ranges.iter().map(range).collect() })),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inspectors_are_disabled_for_ports_that_need_none() {
        let ports = [(80, false), (90, true)].into_iter();
        assert_eq!(disabled_ranges(true, ports.clone()), Some(vec![(80, 81)]));
        assert_eq!(disabled_ranges(false, ports), Some(vec![(0, 90), (91, 65536)]));
        assert_eq!(disabled_ranges(false, [(80, false)].into_iter()), None);
        assert_eq!(disabled_ranges(false, [(0, true), (1, true)].into_iter()), Some(vec![(2, 65536)]));
    }
}
