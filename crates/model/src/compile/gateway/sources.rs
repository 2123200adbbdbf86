//! Objects from which the filter chains of gateways are compiled. Explanations show them.

use super::{
    filter_chains::applies,
    servers::{self, GatewayServer, MergedServers},
};
use crate::{
    ObjectKey, ProxyView, World,
    api::{
        Kind, Typed, VirtualService,
        gateway::{Server, ServerTlsMode},
    },
    compile::listeners::{has_names, tls_field},
    world::is_within,
};

/// A server of a Gateway that selects a proxy.
#[derive(Clone, Debug)]
pub struct ServerSource {
    /// Gateway.
    pub gateway: ObjectKey,
    /// Position in `spec.servers`.
    pub index: usize,
    /// Port of the gateway's Service.
    pub number: u16,
    /// Port on which the proxy listens.
    pub port: u16,
    /// Protocol, as the object has it.
    pub protocol: String,
    /// TLS of clients; `None` for plain text.
    pub tls: Option<ServerTlsMode>,
    /// Hosts without the namespaces of VirtualServices.
    pub hosts: Vec<String>,
    /// Name of the route table; empty without HTTP.
    pub route_table: String,
    /// Whether the server is in effect; otherwise an earlier server has its port, route table or a server name.
    pub is_served: bool,
}

impl ServerSource {
    /// Returns whether the server has a host or a wildcard for it.
    pub fn has_host(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        self.hosts.iter().any(|own| is_within(&host, &own.to_ascii_lowercase()))
    }
}

/// Returns the servers of all Gateways that select a proxy, in the order in which they are merged.
pub fn gateway_servers(world: &World, view: &ProxyView) -> Vec<ServerSource> {
    let merged = servers::merge_servers(world, view);
    let served = |server: &Server| {
        let all = || merged.groups.iter().flat_map(|group| &group.servers);
        all().any(|known| std::ptr::eq(known.server, server))
    };
    let ports = servers::ListenerPorts::new(world, view);
    let mut found = Vec::new();
    for gateway in world.gateways(&view.namespace, &view.labels) {
        for (index, server) in gateway.spec.servers.iter().enumerate() {
            let port = ports.of(&gateway.spec, server.number());
            let of = GatewayServer::new(gateway, server, port);
            found.push(ServerSource {
                gateway: ObjectKey {
                    kind: Kind::Gateway,
                    namespace: gateway.meta.namespace.clone(),
                    name: gateway.meta.name.clone(),
                },
                index,
                number: server.number(),
                port,
                protocol: server.port.as_ref().map(|port| port.protocol.clone()).unwrap_or_default(),
                tls: of.tls().map(|tls| tls.mode),
                hosts: of.server_names(),
                route_table: of.route_name.clone(),
                is_served: served(server),
            });
        }
    }
    found
}

/// Returns the VirtualService from which a gateway's filter chain of TCP or forwarded TLS is compiled, and the field of
/// its rule. The chain has these server names on this port of the proxy.
pub fn gateway_l4_source(
    world: &World,
    view: &ProxyView,
    port: u16,
    server_names: &[String],
) -> Option<(ObjectKey, String)> {
    let merged = servers::merge(world, view);
    let groups = merged.groups.iter().filter(|group| group.port == port);
    let mut at_port = groups.flat_map(|group| &group.servers);
    at_port.find_map(|server| source_at(&merged, server, server_names))
}

fn source_at(
    merged: &MergedServers<'_>,
    server: &GatewayServer<'_>,
    server_names: &[String],
) -> Option<(ObjectKey, String)> {
    let gateway = server.gateway_name();
    let is_forwarded = server.tls().is_some_and(|tls| tls.mode.is_passthrough());
    let names: Vec<String> = if server.tls().is_some() { server.server_names() } else { Vec::new() };
    for rule in merged.served_rules(server) {
        let field = match is_forwarded {
            true => tls_field(rule, server_names, |found| {
                applies(std::slice::from_ref(found), rule, server, &gateway)
            }),
            false if has_names(&names, server_names) => {
                let position =
                    rule.spec.tcp.iter().position(|tcp| applies(&tcp.matches, rule, server, &gateway));
                position.map(|index| format!("spec.tcp[{index}]"))
            }
            false => None,
        };
        if let Some(field) = field {
            return Some((key(rule), field));
        }
    }
    None
}

fn key(rule: &Typed<VirtualService>) -> ObjectKey {
    let (namespace, name) = (rule.meta.namespace.clone(), rule.meta.name.clone());
    ObjectKey { kind: Kind::VirtualService, namespace, name }
}
