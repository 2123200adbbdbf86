//! Attachment of routes to their parents.

use super::{Route, listeners::GatewayListener};
use crate::{
    api::{
        Kind, ObjectKey, Protocol,
        gateway_api::{GROUP, ISTIO_GROUP, ParentReference},
    },
    world::{World, gateways::is_within},
};

/// Part of a parent to which a route is attached.
#[derive(Debug)]
pub(super) enum RouteTarget<'a> {
    /// Requests of sidecars for a service.
    Mesh {
        /// Full name of the service.
        host: String,
        /// Port of the service; `None`: all.
        port: Option<u16>,
        /// Whether the route is in another namespace than the service. It then applies only to clients of its own
        /// namespace.
        consumer: bool,
    },
    /// Requests to a gateway.
    Listener {
        /// The listener.
        listener: &'a GatewayListener<'a>,
        /// Hosts of the route that the listener may have; `*` for a route without hosts. Hosts of a more specific
        /// listener of the Gateway are left to it.
        hosts: Vec<String>,
    },
}

/// Result of the attachment to one parent.
#[derive(Debug, Default)]
pub(super) struct Attached<'a> {
    /// Targets; none if refused.
    pub(super) targets: Vec<RouteTarget<'a>>,
    /// Reason and message of a refusal. Parents of other controllers neither have targets nor a refusal.
    pub(super) refusal: Option<(&'static str, String)>,
}

/// Returns the Service or ServiceEntry to which a reference of a route leads.
pub(super) fn mesh_parent(route: &Route<'_>, parent: &ParentReference) -> Option<ObjectKey> {
    let kind = match parent.group_kind() {
        ("", "Service") => Kind::Service,
        (ISTIO_GROUP, "ServiceEntry") => Kind::ServiceEntry,
        _ => return None,
    };
    let namespace = parent.namespace.as_ref().unwrap_or(&route.meta.namespace).clone();
    Some(ObjectKey { kind, namespace, name: parent.name.clone() })
}

impl Attached<'_> {
    fn refused(reason: &'static str, message: String) -> Self {
        Self { targets: Vec::new(), refusal: Some((reason, message)) }
    }
}

impl World {
    /// Attaches a route to a parent.
    pub(super) fn attach<'a>(
        &self,
        route: &Route<'_>,
        parent: &ParentReference,
        listeners: &'a [GatewayListener<'a>],
    ) -> Attached<'a> {
        if let Some(key) = mesh_parent(route, parent) {
            return self.attach_to_mesh(route, parent, &key);
        }
        match parent.group_kind() {
            (GROUP, "Gateway") => self.attach_to_gateway(route, parent, Kind::KubernetesGateway, listeners),
            (GROUP, "ListenerSet") => self.attach_to_gateway(route, parent, Kind::ListenerSet, listeners),
            (group, kind) => {
                let message = format!("parents of kind {group}/{kind} are not supported");
                Attached::refused("InvalidKind", message)
            }
        }
    }

    fn attach_to_mesh<'a>(
        &self,
        route: &Route<'_>,
        parent: &ParentReference,
        key: &ObjectKey,
    ) -> Attached<'a> {
        let names: Vec<&String> = match key.kind {
            Kind::Service => vec![&key.name],
            _ => {
                let entry = self.service_entries.get(&key.namespace, &key.name);
                entry.into_iter().flat_map(|entry| &entry.object.spec.hosts).collect()
            }
        };
        let is_entry = key.kind == Kind::ServiceEntry;
        let services = names.into_iter().filter_map(|name| self.service_named(&key.namespace, name));
        let services: Vec<_> =
            services.filter(|service| service.spec.entry_host.is_some() == is_entry).collect();
        if services.is_empty() {
            return Attached::refused("NoMatchingParent", format!("{key} not found"));
        }
        let port = parent.port.and_then(|port| u16::try_from(port).ok());
        let has_port = |number: u16, protocol: Protocol| {
            port.is_none_or(|port| port == number) && protocol != Protocol::Udp
        };
        let mut targets = Vec::new();
        for service in services {
            if service.spec.ports.iter().any(|port| has_port(port.port, port.protocol)) {
                let consumer = key.namespace != route.meta.namespace;
                targets.push(RouteTarget::Mesh { host: service.fqdn(), port, consumer });
            }
        }
        if targets.is_empty() {
            let message = format!("{key} has no port {}", parent.port.unwrap_or_default());
            return Attached::refused("NoMatchingParent", message);
        }
        Attached { targets, refusal: None }
    }

    fn attach_to_gateway<'a>(
        &self,
        route: &Route<'_>,
        parent: &ParentReference,
        kind: Kind,
        listeners: &'a [GatewayListener<'a>],
    ) -> Attached<'a> {
        let namespace = parent.namespace.as_ref().unwrap_or(&route.meta.namespace);
        let of_parent = |of: &&GatewayListener<'_>| {
            of.kind == kind && of.meta.name == parent.name && of.meta.namespace == *namespace
        };
        let mut all = listeners.iter().filter(of_parent).peekable();
        if all.peek().is_none() {
            let is_foreign = kind == Kind::KubernetesGateway
                && self.kubernetes_gateways.get(namespace, &parent.name).is_some();
            if is_foreign {
                return Attached::default();
            }
            let message = format!("{kind} {namespace}/{} not found", parent.name);
            return Attached::refused("NoMatchingParent", message);
        }
        let named = |of: &&GatewayListener<'_>| {
            parent.section_name.as_ref().is_none_or(|name| *name == of.listener.name)
                && parent.port.is_none_or(|port| port == of.listener.port)
        };
        let mut refusal = ("NoMatchingParent", "no listener has this sectionName and port".to_owned());
        let mut targets = Vec::new();
        for listener in all.filter(named) {
            match self.attach_to_listener(route, listener) {
                Ok(mut hosts) if listener.is_usable() => {
                    if matches!(route.kind, Kind::HttpRoute | Kind::GrpcRoute) {
                        hosts.retain(|host| !listeners.iter().any(|other| listener.leaves(host, other)));
                    }
                    targets.push(RouteTarget::Listener { listener, hosts });
                }
                Ok(_) => refusal = ("NoMatchingParent", "the listener is not accepted".to_owned()),
                Err(reason) => refusal = reason,
            }
        }
        let refusal = targets.is_empty().then_some(refusal);
        Attached { targets, refusal }
    }

    /// Returns the hosts of a route that a listener may have; fails if the route may not use the listener.
    fn attach_to_listener(
        &self,
        route: &Route<'_>,
        of: &GatewayListener<'_>,
    ) -> Result<Vec<String>, (&'static str, String)> {
        let host = of.listener.hostname.as_deref().filter(|host| !host.is_empty());
        let may_have =
            |name: &&String| host.is_none_or(|host| is_within(name, host) || is_within(host, name));
        let hosts: Vec<String> = match route.hostnames {
            [] => vec!["*".to_owned()],
            names => names.iter().filter(may_have).cloned().collect(),
        };
        let shown = host.unwrap_or("*");
        if hosts.is_empty() {
            let message = format!("no hostnames matched parent hostname {shown:?}");
            return Err(("NoMatchingListenerHostname", message));
        }
        if !of.listener.allows_kind(route.kind) {
            let message = format!("kind {} is not allowed", route.kind);
            return Err(("NotAllowedByListeners", message));
        }
        let allowed = of.listener.allowed_routes.as_ref().and_then(|allowed| allowed.namespaces.as_ref());
        if !self.is_allowed(allowed, &of.meta.namespace, &route.meta.namespace) {
            let namespace = &route.meta.namespace;
            let message = format!(
                "hostnames matched parent hostname {shown:?}, but namespace {namespace:?} is not allowed by the parent"
            );
            return Err(("NotAllowedByListeners", message));
        }
        Ok(hosts)
    }
}

#[cfg(test)]
mod tests;
