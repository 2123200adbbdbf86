//! Gateways: the one that a client outside the mesh reaches, and the servers of the Gateways that select it.

use std::net::SocketAddr;

use skysail_model::{ServerSource, api::gateway::ServerTlsMode, gateway_servers};
use skysail_proxy::explain::Explanation;
use skysail_sandbox::{Offline, OfflinePod};

use super::{
    hop::{Place, Received},
    proxies::Proxy,
    report::ServerStep,
    sources::Sources,
};

/// Maximum number of hosts in a sentence.
const MAX_HOSTS: usize = 4;

/// The gateway that a client outside the mesh connects to.
pub(super) struct Entrance<'a> {
    pub(super) pod: &'a OfflinePod,
    /// Port of the pod.
    pub(super) port: u16,
    /// Remark about other gateways; empty for none.
    pub(super) note: String,
}

/// Selects the gateway for a port and host. Gateways whose Service has the port are preferred, among these those with a
/// server at the port, and among these those with a server for the host. `wanted` restricts the choice to gateways with this name.
pub(super) fn entrance<'a>(
    mesh: &'a Offline,
    port: u16,
    host: &str,
    wanted: Option<&str>,
) -> Result<Entrance<'a>, String> {
    let all = mesh.gateways(port);
    if all.is_empty() {
        let reason = "the configuration has no gateway: clients outside the mesh reach none of its workloads";
        return Err(reason.to_owned());
    }
    let names = |list: &[(&OfflinePod, Option<u16>)]| {
        list.iter()
            .map(|(pod, _)| format!("{}/{}", pod.namespace, pod.owner.name))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut left = all.clone();
    if let Some(wanted) = wanted {
        let matching = mesh.matching(wanted);
        left.retain(|(pod, _)| matching.iter().any(|other| other.owner == pod.owner));
        if left.is_empty() {
            return Err(format!(
                "--gateway {wanted}: there is no such gateway; known gateways: {}",
                names(&all)
            ));
        }
    }
    if left.iter().any(|(_, target)| target.is_some()) {
        left.retain(|(_, target)| target.is_some());
    }
    let has_server = |(pod, target): &(&OfflinePod, Option<u16>), wanted: &dyn Fn(&ServerSource) -> bool| {
        let view = pod.proxy(&mesh.world).map(|node| node.view);
        let servers = view.map(|view| gateway_servers(&mesh.world, &view)).unwrap_or_default();
        servers.iter().any(|server| Some(server.port) == *target && wanted(server))
    };
    let conditions: [&dyn Fn(&ServerSource) -> bool; 2] = [&|_| true, &|server| server.has_host(host)];
    for condition in conditions {
        if left.len() > 1 && left.iter().any(|gateway| has_server(gateway, condition)) {
            left.retain(|gateway| has_server(gateway, condition));
        }
    }
    let others = left.get(1..).unwrap_or_default();
    let note = match others.is_empty() {
        true => String::new(),
        false => format!("other gateways serve this too, and --gateway selects one: {}", names(others)),
    };
    let Some((pod, target)) = left.first().copied() else { return Err("there is no gateway".to_owned()) };
    Ok(Entrance { pod, port: target.unwrap_or(port), note })
}

/// Returns the listener of a gateway for an address, or why there is none.
pub(super) fn listener(proxy: &Proxy, address: SocketAddr) -> Result<String, String> {
    proxy.configuration.listener_at(address).ok_or_else(|| {
        let ports: Vec<String> = proxy.configuration.ports().iter().map(ToString::to_string).collect();
        let has = if ports.is_empty() { "no port".to_owned() } else { ports.join(", ") };
        format!("the gateway has no listener for port {} of its pods: it listens on {has}", address.port())
    })
}

/// Returns the servers of the Gateways that select a proxy: the ones that take a connection, and why the others do not.
pub(super) fn servers(
    sources: &Sources<'_>,
    place: &Place<'_>,
    explained: &Explanation,
    received: &Received<'_>,
) -> Vec<ServerStep> {
    let all = gateway_servers(sources.world, &place.proxy.view);
    let port = received.destination.port();
    let number = all.iter().find(|server| server.port == port).map_or(port, |server| server.number);
    let step = |server: &ServerSource| {
        let taken = takes(server, explained, received);
        ServerStep {
            name: words(server),
            taken,
            mismatch: if taken { String::new() } else { mismatch(server, received, number) },
            source: Some(sources.server(server)),
        }
    };
    let has_port = |server: &&ServerSource| server.port == port;
    let at_port: Vec<&ServerSource> = all.iter().filter(has_port).collect();
    // Servers on other ports are described only if this port has none.
    if at_port.is_empty() { all.iter().map(step).collect() } else { at_port.into_iter().map(step).collect() }
}

fn takes(server: &ServerSource, explained: &Explanation, received: &Received<'_>) -> bool {
    if !explained.has_filter_chain || !server.is_served || server.port != received.destination.port() {
        return false;
    }
    if !explained.route_table.is_empty() {
        let is_table = server.route_table == explained.route_table;
        return is_table && (server.tls.is_some() || server.has_host(received.host));
    }
    let is_tls = server.tls.is_some() == received.is_tls();
    let mut names = explained.server_names.iter();
    is_tls && (explained.server_names.is_empty() || names.any(|name| server.has_host(name)))
}

/// Returns the first property of a connection that does not match a server.
fn mismatch(server: &ServerSource, received: &Received<'_>, number: u16) -> String {
    let expected = || list(&server.hosts, " or ");
    if server.port != received.destination.port() {
        return format!("port {number}, expected: {}", server.number);
    }
    if !server.is_served {
        return "an earlier server has its port, or one of its hosts".to_owned();
    }
    match (server.tls.is_some(), received.is_tls()) {
        (true, false) => "plain text, expected: TLS".to_owned(),
        (false, true) => "TLS, expected: plain text".to_owned(),
        (true, true) if received.server_name.is_empty() => format!("no SNI, expected: {}", expected()),
        (true, true) if !server.has_host(received.server_name) => {
            format!("SNI {}, expected: {}", received.server_name, expected())
        }
        (false, false) if !received.host.is_empty() && !server.has_host(received.host) => {
            format!("host {}, expected: {}", received.host, expected())
        }
        _ => "it has no routes for the connection, or another server takes it".to_owned(),
    }
}

fn words(server: &ServerSource) -> String {
    let tls = server.tls.map(|mode| format!(", TLS {}", mode_words(mode))).unwrap_or_default();
    format!("{} on port {}{tls}, hosts {}", server.protocol, server.number, list(&server.hosts, ", "))
}

fn mode_words(mode: ServerTlsMode) -> &'static str {
    match mode {
        ServerTlsMode::Passthrough => "PASSTHROUGH",
        ServerTlsMode::Simple => "SIMPLE",
        ServerTlsMode::Mutual => "MUTUAL",
        ServerTlsMode::AutoPassthrough => "AUTO_PASSTHROUGH",
        ServerTlsMode::IstioMutual => "ISTIO_MUTUAL",
        ServerTlsMode::OptionalMutual => "OPTIONAL_MUTUAL",
    }
}

fn list(hosts: &[String], joint: &str) -> String {
    let more = hosts.len().saturating_sub(MAX_HOSTS);
    let shown = hosts.iter().take(MAX_HOSTS).cloned().collect::<Vec<_>>().join(joint);
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}
