//! LDS: one listener for each port and address.

use std::collections::BTreeSet;

use skysail_core::names::Direction;
use skysail_xds::envoy::pb::envoy::extensions::filters::listener::{
    proxy_protocol::v3::ProxyProtocol, tls_inspector::v3::TlsInspector,
};

use super::{
    filter_chains::{self, Chain},
    servers::MergedServers,
};
use crate::{
    ProxyView,
    compile::{
        Scope, connections,
        extension::Extensions,
        filters::{self, FilterSettings},
        listeners::{any_address, inspector, virtual_listener},
        pb::{address, core, listener, pack, seconds, uint32},
        rbac::Authorization,
        telemetry::SideTelemetry,
    },
};

/// Timeout of a TLS handshake with the client in seconds.
const HANDSHAKE_SECONDS: i64 = 15;
/// Size of the first read of a ClientHello in bytes; most are shorter.
const TLS_READ_BYTES: u32 = 512;

/// Returns the listeners of a gateway.
pub(super) fn compile(
    scope: &Scope<'_>,
    view: &ProxyView,
    merged: &MergedServers<'_>,
    authorization: &Authorization,
) -> Vec<listener::Listener> {
    let telemetry = SideTelemetry::new(scope.world, view, Direction::Outbound);
    let proxy = filters::settings(scope.world.mesh(), view);
    let extensions = Extensions::new(scope.world, view);
    let setting = FilterSettings {
        mesh: scope.world.mesh(),
        view,
        telemetry: &telemetry,
        hash_source_ip: false,
        grpc_web: false,
        http2: false,
        dynamic_dns: false,
        proxy: &proxy,
        extensions: &extensions,
        port: 0,
    };
    let mut made: Vec<(u16, String, Vec<Chain>)> = Vec::new();
    // Server names of forwarded TLS by port and address: Envoy refuses two chains with the same match.
    let mut names = BTreeSet::new();
    for group in &merged.groups {
        let bind = if group.bind.is_empty() { any_address(view) } else { group.bind };
        let name = format!("{bind}_{}", group.port);
        let chains = filter_chains::of_group(scope, setting, merged, group, &name, authorization, &mut names);
        match made.iter_mut().find(|(port, other, _)| *port == group.port && other == bind) {
            Some((.., all)) => all.extend(chains),
            None => made.push((group.port, bind.to_owned(), chains)),
        }
    }
    // Envoy refuses a listener without filter chains.
    let made = made.into_iter().filter(|(.., chains)| !chains.is_empty());
    made.map(|(port, bind, chains)| listener(setting, &bind, port, chains)).collect()
}

fn listener(setting: FilterSettings<'_>, bind: &str, port: u16, chains: Vec<Chain>) -> listener::Listener {
    let is_tls = |chain: &Chain| chain.socket.is_some() || !chain.server_names.is_empty();
    let inspects = chains.iter().any(is_tls);
    let inspect_tls = TlsInspector { initial_read_buffer_size: uint32(TLS_READ_BYTES), ..Default::default() };
    let behind_proxy = setting.proxy.gateway_topology.proxy_protocol.is_some();
    let inspector = || inspector("envoy.filters.listener.tls_inspector", pack(&inspect_tls));
    let view = setting.view;
    let both = view.ipv4 && view.ipv6 && bind == any_address(view);
    let extra = listener::AdditionalAddress { address: Some(address("::", port)), ..Default::default() };
    listener::Listener {
        address: Some(address(bind, port)),
        additional_addresses: both.then_some(extra).into_iter().collect(),
        listener_filters: behind_proxy
            .then(proxy_protocol)
            .into_iter()
            .chain(inspects.then(inspector))
            .collect(),
        traffic_direction: core::TrafficDirection::Outbound as i32,
        per_connection_buffer_limit_bytes: connections::buffer_limit(
            setting.proxy.connection_settings.as_ref(),
        ),
        ..virtual_listener(
            setting,
            &format!("{bind}_{port}"),
            port,
            chains.into_iter().map(filter_chain).collect(),
        )
    }
}

/// Returns the filter that reads the PROXY protocol of a load balancer in front of the gateway.
fn proxy_protocol() -> listener::ListenerFilter {
    inspector("envoy.filters.listener.proxy_protocol", pack(&ProxyProtocol::default()))
}

fn filter_chain(chain: Chain) -> listener::FilterChain {
    let Chain { mut server_names, alpn, filters, socket } = chain;
    // A chain for all names has no match.
    if server_names.iter().any(|name| name == "*") {
        server_names.clear();
    }
    server_names.sort();
    let found =
        listener::FilterChainMatch { server_names, application_protocols: alpn, ..Default::default() };
    listener::FilterChain {
        filter_chain_match: (found != listener::FilterChainMatch::default()).then_some(found),
        filters,
        transport_socket: socket,
        transport_socket_connect_timeout: Some(seconds(HANDSHAKE_SECONDS)),
        ..Default::default()
    }
}
