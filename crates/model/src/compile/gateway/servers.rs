//! Merging of the servers of several Gateways, as Istio merges them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    ProxyView, World,
    api::{
        Gateway, Protocol, Service, Typed, VirtualService,
        gateway::{Server, ServerTls},
        kube::TargetPort,
    },
    world::{BoundRule, shown_name},
};

/// Label of services whose ports are not those of Gateways. Its value has no meaning, as in Istio.
const UNTRANSLATED: &str = "experimental.istio.io/disable-gateway-port-translation";

/// A server and its Gateway.
#[derive(Clone)]
pub(super) struct GatewayServer<'a> {
    pub(super) gateway: &'a Typed<Gateway>,
    pub(super) server: &'a Server,
    /// Hosts, with the namespace of the Gateway in place of `.`.
    pub(super) hosts: Vec<String>,
    /// Port on which the proxy listens.
    pub(super) listener_port: u16,
    /// Name of the routes; empty for a server without HTTP.
    pub(super) route_name: String,
}

/// Servers that share a port, an address and a protocol.
pub(super) struct ServerGroup<'a> {
    pub(super) port: u16,
    pub(super) bind: &'a str,
    pub(super) protocol: Protocol,
    pub(super) servers: Vec<GatewayServer<'a>>,
}

/// Merged servers.
#[derive(Default)]
pub(super) struct MergedServers<'a> {
    /// Groups in the order of their first servers.
    pub(super) groups: Vec<ServerGroup<'a>>,
    /// Servers by the name of their routes.
    pub(super) routes: BTreeMap<String, Vec<GatewayServer<'a>>>,
    /// VirtualServices by the Gateway to which they are bound.
    rules: HashMap<String, Vec<BoundRule<'a>>>,
    /// Server names of TLS by port and address.
    names: BTreeSet<(u16, &'a str, String)>,
}

impl<'a> GatewayServer<'a> {
    pub(super) fn new(gateway: &'a Typed<Gateway>, server: &'a Server, listener_port: u16) -> Self {
        let own = &gateway.meta.namespace;
        let full = |host: &String| match host.strip_prefix("./") {
            Some(host) => format!("{own}/{host}"),
            None => host.clone(),
        };
        let route_name = route_name(gateway, server, listener_port);
        Self { gateway, server, hosts: server.hosts.iter().map(full).collect(), listener_port, route_name }
    }

    /// Returns the name of the Gateway: `NAMESPACE/NAME`.
    pub(super) fn gateway_name(&self) -> String {
        gateway_name(self.gateway)
    }

    /// Returns the server names of TLS.
    pub(super) fn server_names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for host in &self.hosts {
            let bare = host.split_once('/').map_or(host.as_str(), |(_, bare)| bare);
            if names.iter().all(|known| known != bare) {
                names.push(bare.to_owned());
            }
        }
        names
    }

    /// Returns the settings of TLS that clients speak.
    pub(super) fn tls(&self) -> Option<&'a ServerTls> {
        self.server.terminating_or_forwarded_tls()
    }
}

/// Merges the servers of all Gateways that select a proxy, with the VirtualServices that are bound to them.
pub(super) fn merge<'a>(world: &'a World, view: &ProxyView) -> MergedServers<'a> {
    let mut merged = merge_servers(world, view);
    for gateway in world.gateways(&view.namespace, &view.labels) {
        let name = gateway_name(gateway);
        let rules = world.gateway_rules(&name, &view.namespace);
        merged.rules.insert(name, rules);
    }
    merged
}

/// Merges the servers of all Gateways that select a proxy, without VirtualServices.
pub(super) fn merge_servers<'a>(world: &'a World, view: &ProxyView) -> MergedServers<'a> {
    let mut merged = MergedServers::default();
    let ports = ListenerPorts::new(world, view);
    for gateway in world.gateways(&view.namespace, &view.labels) {
        for server in &gateway.spec.servers {
            let (Some(protocol), number) = (server.protocol(), server.number()) else { continue };
            if number != 0 {
                let port = ports.of(&gateway.spec, number);
                merged.add(GatewayServer::new(gateway, server, port), protocol);
            }
        }
    }
    merged
}

/// Ports of the services that lead to a proxy: service, its port, and the port on which the proxy listens.
///
/// A service leads to the proxy because its selector matches, or because an endpoint has an address of the proxy. As in
/// Istio, the oldest service comes first, and of two of one age the first by name.
pub(super) struct ListenerPorts<'a>(Vec<(&'a Typed<Service>, u16, u16)>);

impl<'a> ListenerPorts<'a> {
    pub(super) fn new(world: &'a World, view: &ProxyView) -> Self {
        let mut found: Vec<(&Typed<Service>, u16, u16)> = Vec::new();
        for (name, port, target) in &view.addressed {
            let service = world.service_named(&view.namespace, name);
            found.extend(service.map(|service| (&**service, *port, *target)));
        }
        for service in world.services_selecting(&view.namespace, &view.labels) {
            for port in service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp) {
                let target = match &port.target {
                    TargetPort::Number(number) => Some(*number),
                    TargetPort::Name(name) => view.named_ports.get(name).copied(),
                };
                found.extend(target.map(|target| (&**service, port.port, target)));
            }
        }
        found.sort_by_key(|(service, ..)| (service.meta.created.unwrap_or(i64::MAX), &service.meta.name));
        Self(found)
    }

    /// Returns the port on which the proxy listens for a port of a Gateway. A port of no service is the proxy's own. The
    /// Services that a Gateway names precede others, and as in Istio, the label against translation does not concern them.
    pub(super) fn of(&self, gateway: &Gateway, number: u16) -> u16 {
        let all = || self.0.iter().filter(|(_, port, _)| *port == number);
        let named = all().find(|(service, ..)| gateway.services.contains(&service.meta.name));
        let other = || all().find(|(service, ..)| !service.meta.labels.contains_key(UNTRANSLATED));
        named.or_else(other).map_or(number, |(.., target)| *target)
    }
}

fn gateway_name(gateway: &Typed<Gateway>) -> String {
    format!("{}/{}", gateway.meta.namespace, gateway.meta.name)
}

fn route_name(gateway: &Typed<Gateway>, server: &Server, listener_port: u16) -> String {
    let bind = if server.bind.is_empty() { String::new() } else { format!(".{}", server.bind) };
    if server.is_plain_http() {
        format!("http.{listener_port}{bind}")
    } else if server.is_http() {
        let name = server.port.as_ref().map_or("", |port| port.name.as_str());
        let meta = &gateway.meta;
        let gateway = shown_name(&meta.name);
        format!("https.{}.{name}.{gateway}.{}{bind}", server.number(), meta.namespace)
    } else {
        String::new()
    }
}

impl<'a> MergedServers<'a> {
    /// Returns the VirtualServices that are bound to a server's Gateway.
    pub(super) fn rules_of(&self, server: &GatewayServer<'_>) -> &[BoundRule<'a>] {
        self.rules.get(&server.gateway_name()).map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the VirtualServices whose hosts the server has.
    pub(super) fn served_rules(&self, server: &GatewayServer<'_>) -> Vec<&'a Typed<VirtualService>> {
        let bound = self.rules_of(server).iter();
        bound.filter(|bound| !bound.common_hosts(&server.hosts).is_empty()).map(|bound| bound.rule).collect()
    }

    /// Adds a server unless it conflicts with an earlier one, as Envoy would refuse the listener.
    fn add(&mut self, server: GatewayServer<'a>, protocol: Protocol) {
        let (port, bind) = (server.listener_port, server.server.bind.as_str());
        if server.tls().is_some() {
            let names = server.server_names();
            let place = |name: &String| (port, bind, name.clone());
            if names.iter().any(|name| self.names.contains(&place(name))) {
                return;
            }
            self.names.extend(names.iter().map(place));
        }
        let mut at_port = self.groups.iter_mut().filter(|group| group.port == port && group.bind == bind);
        let group = match at_port.next() {
            None => None,
            // Servers of HTTP in plain text share the filter chain of the first.
            Some(group) if group.is_plain() => {
                if !(group.protocol.is_http() && protocol.is_http()) {
                    return;
                }
                Some(group)
            }
            Some(_) if server.tls().is_none() => return,
            Some(_) if server.server.is_http() && self.routes.contains_key(&server.route_name) => return,
            Some(group) if group.protocol == protocol => Some(group),
            Some(_) => at_port.find(|group| group.protocol == protocol),
        };
        if !server.route_name.is_empty() {
            self.routes.entry(server.route_name.clone()).or_default().push(server.clone());
        }
        match group {
            Some(group) => group.servers.push(server),
            None => self.groups.push(ServerGroup { port, bind, protocol, servers: vec![server] }),
        }
    }
}

impl ServerGroup<'_> {
    /// Returns whether clients speak plain text.
    pub(super) fn is_plain(&self) -> bool {
        self.servers.iter().all(|server| server.tls().is_none())
    }
}
