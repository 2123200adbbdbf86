//! Services and VirtualServices that a client sees by its Sidecar.
//!
//! A client has clusters for the services of all egress listeners, and for the destinations of the VirtualServices that
//! it sees. An egress listener with a port applies to this port alone. One without a port gives clusters for all ports
//! of its services, but routes only for the ports that no other listener has.

use std::{net::IpAddr, sync::Arc};

use skysail_core::ClusterName;

use super::{
    Scope,
    clusters::{BLACK_HOLE, PASSTHROUGH},
    listeners,
};
use crate::{
    Outline,
    api::{
        MeshConfig, Protocol, Service, ServicePort, Typed, VirtualService,
        mesh_config::OutboundMode,
        sidecar::{Egress, EgressListener},
    },
    world::World,
};

impl<'a> Scope<'a> {
    /// Returns the services for which a client has clusters, with the ports that it may use.
    pub(super) fn services(&self) -> impl Iterator<Item = Arc<Typed<Service>>> {
        self.world.services().filter_map(|service| self.seen(service))
    }

    /// Returns the services that a client sees, with the addresses that it uses and all ports.
    fn addressed(&self) -> impl Iterator<Item = Arc<Typed<Service>>> {
        self.world.services().filter(|service| self.sees(service)).map(|service| self.with_addresses(service))
    }

    /// Returns a service with the addresses that its clients use: those allocated for clients that answer DNS, if it
    /// has no others.
    fn with_addresses(&self, service: &Arc<Typed<Service>>) -> Arc<Typed<Service>> {
        let spec = &service.spec;
        let has_own =
            spec.entry_host.as_ref().is_none_or(|of| !of.blocks.is_empty()) || !spec.cluster_ips.is_empty();
        if !self.answers_dns || has_own || spec.auto_ips.is_empty() {
            return Arc::clone(service);
        }
        let of_family = |ip: &&IpAddr| if ip.is_ipv4() { self.ipv4 || !self.ipv6 } else { self.ipv6 };
        let cluster_ips = spec.auto_ips.iter().filter(of_family).copied().collect();
        let spec = Service { cluster_ips, ..spec.clone() };
        Arc::new(Typed { meta: service.meta.clone(), spec })
    }

    /// Returns a service with the ports for which a client has clusters; `None` if there are none.
    pub(super) fn seen(&self, service: &Arc<Typed<Service>>) -> Option<Arc<Typed<Service>>> {
        if !self.sees(service) {
            return None;
        }
        let service = &self.with_addresses(service);
        let listeners = self.egress_listeners();
        if listeners.is_empty() {
            return Some(Arc::clone(service));
        }
        let host = service.fqdn();
        let importing: Vec<Option<u16>> = listeners
            .iter()
            .filter(|listener| self.imports(listener, service))
            .map(EgressListener::port)
            .collect();
        let has = |port: &ServicePort| importing.iter().any(|of| of.is_none_or(|of| of == port.port));
        let seen = with_ports(service, has);
        if seen.is_none() && self.world.is_target_of_rules(listeners, &host, self.namespace) {
            return Some(Arc::clone(service));
        }
        seen
    }

    /// Returns the services whose names have routes, with the ports of these routes.
    pub(super) fn routed_services(&self) -> impl Iterator<Item = Arc<Typed<Service>>> {
        let listeners = self.egress_listeners();
        self.world.services().filter(|service| self.sees(service)).filter_map(move |service| {
            if listeners.is_empty() {
                return Some(Arc::clone(service));
            }
            with_ports(service, |port| {
                let own = listeners.iter().find(|listener| listener.port() == Some(port.port));
                match own {
                    Some(own) => self.imports(own, service),
                    None => self.is_imported_without_port(service),
                }
            })
        })
    }

    /// Returns the outline of the outbound listeners.
    pub(super) fn outline(&self) -> Outline {
        let Some(egress) = self.egress.filter(|egress| !egress.listeners.is_empty()) else {
            let services = self.addressed();
            return listeners::outline(
                self.world,
                self.namespace,
                services,
                self.egress.cloned(),
                Vec::new(),
            );
        };
        let captured = self.addressed().filter_map(|service| {
            with_ports(&service, |port| {
                let mut own = egress
                    .listeners
                    .iter()
                    .filter(|listener| listener.port() == Some(port.port) && !listener.is_bound())
                    .peekable();
                match own.peek() {
                    Some(_) => own.any(|listener| self.imports(listener, &service)),
                    None => self.is_imported_without_port(&service),
                }
            })
        });
        let bound = egress.listeners.iter().filter(|listener| listener.is_bound());
        let bound = bound.filter_map(|listener| {
            let services = match listener.port() {
                Some(port) => self.imported(listener, |of| of.spec.port(port).map(|port| port.port)),
                None => self.socket_services(listener),
            };
            (!services.is_empty()).then(|| (listener.clone(), services))
        });
        listeners::outline(self.world, self.namespace, captured, Some(Arc::clone(egress)), bound.collect())
    }

    /// Returns the services of a listener on a Unix domain socket, each with the port to which requests go: its first one
    /// of HTTP, or its only one for connections. There are none for other listeners.
    pub(super) fn socket_services(&self, listener: &EgressListener) -> Vec<Arc<Typed<Service>>> {
        if listener.socket().is_none() {
            return Vec::new();
        }
        self.imported(listener, |service| {
            let mut ports = service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp);
            let is_http = |port: &&ServicePort| port.protocol.is_http() || port.protocol == Protocol::Unknown;
            let port = if listener.is_http() {
                ports.find(is_http)
            } else {
                ports.next().filter(|_| ports.next().is_none())
            };
            port.map(|port| port.port)
        })
    }

    /// Returns the services of an egress listener with one port each; without those for which `port` returns none.
    fn imported(
        &self,
        listener: &EgressListener,
        port: impl Fn(&Typed<Service>) -> Option<u16>,
    ) -> Vec<Arc<Typed<Service>>> {
        let services = self.addressed().filter(|service| self.imports(listener, service));
        let with_port = |service: Arc<Typed<Service>>| {
            let port = port(&service)?;
            with_ports(&service, |own| own.port == port)
        };
        services.filter_map(with_port).collect()
    }

    /// Returns the listeners on Unix domain sockets that serve requests of HTTP.
    pub(super) fn http_sockets(&self) -> impl Iterator<Item = &'a EgressListener> + use<'a> {
        self.egress_listeners().iter().filter(|listener| listener.socket().is_some() && listener.is_http())
    }

    /// Returns the VirtualService that routes a host.
    pub(super) fn virtual_service(&self, host: &str) -> Option<&'a Arc<Typed<VirtualService>>> {
        let listeners = self.egress_listeners();
        let imported = |rule: &Typed<VirtualService>| World::imports_rule(listeners, rule, self.namespace);
        self.world.virtual_service(host, self.namespace, imported)
    }

    /// Returns the VirtualService that routes a port of a host.
    pub(super) fn virtual_service_on(&self, host: &str, port: u16) -> Option<&'a Arc<Typed<VirtualService>>> {
        let listeners = self.egress_listeners();
        let imported = |rule: &Typed<VirtualService>| World::imports_rule(listeners, rule, self.namespace);
        self.world.virtual_service_on(host, port, self.namespace, imported)
    }

    /// Returns the VirtualServices that a client applies, those with precedence first.
    pub(super) fn virtual_services(&self) -> Vec<&'a Arc<Typed<VirtualService>>> {
        let listeners = self.egress_listeners();
        let mut rules = self.world.virtual_services(self.namespace);
        rules.retain(|rule| World::imports_rule(listeners, rule, self.namespace));
        rules
    }

    /// Returns the egress listeners of the Sidecar; none if it restricts no services.
    fn egress_listeners(&self) -> &'a [EgressListener] {
        self.egress.map_or(&[], |egress| &egress.listeners)
    }

    fn imports(&self, listener: &EgressListener, service: &Typed<Service>) -> bool {
        listener.imports(self.namespace, &service.meta.namespace, &service.fqdn())
    }

    fn is_imported_without_port(&self, service: &Typed<Service>) -> bool {
        let mut listeners = self.egress_listeners().iter().filter(|listener| listener.port.is_none());
        listeners.any(|listener| self.imports(listener, service))
    }
}

/// Policy of a client for traffic to unknown destinations.
pub(super) struct UnknownDestinations {
    pub(super) mode: OutboundMode,
    /// Cluster for TCP connections to unknown destinations.
    pub(super) cluster: String,
}

impl UnknownDestinations {
    /// Returns the policy of the Sidecar, otherwise of the mesh.
    pub(super) fn of(mesh: &MeshConfig, egress: Option<&Egress>) -> Self {
        let policy = egress.and_then(|egress| egress.policy.as_ref());
        let mode = policy.map_or(mesh.outbound_traffic_policy.mode, |policy| policy.mode.0);
        let proxy = policy.and_then(|policy| policy.egress_proxy.as_ref());
        let cluster = match (mode, proxy) {
            (OutboundMode::RegistryOnly, _) => BLACK_HOLE.to_owned(),
            (_, Some(proxy)) => {
                let port = u16::try_from(proxy.port.number).unwrap_or_default();
                ClusterName::outbound(port, &proxy.subset, &proxy.host).to_string()
            }
            (_, None) => PASSTHROUGH.to_owned(),
        };
        Self { mode, cluster }
    }
}

/// Returns a service with some of its ports; `None` if it has none of them.
fn with_ports(
    service: &Arc<Typed<Service>>,
    has: impl Fn(&ServicePort) -> bool,
) -> Option<Arc<Typed<Service>>> {
    let count = service.spec.ports.iter().filter(|port| has(port)).count();
    if count == service.spec.ports.len() {
        return (count > 0).then(|| Arc::clone(service));
    }
    (count > 0).then(|| {
        let mut narrowed = Typed::clone(service);
        narrowed.spec.ports.retain(has);
        Arc::new(narrowed)
    })
}
