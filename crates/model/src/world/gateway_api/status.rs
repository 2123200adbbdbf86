//! Status of objects of Gateway API, as the specification defines it.

use std::collections::BTreeSet;

use super::{
    Refusal, Route,
    attach::{Attached, RouteTarget},
    backend_tls::{self, ResolvedPolicy},
    credentials::RefusedReference,
    listeners::{GatewayListener, ListenerConflict},
};
use crate::{
    api::{
        Kind, ObjectKey, Typed,
        gateway_api::{FrontendValidationMode, KubernetesGateway, ParentReference},
    },
    world::{World, store::Entry},
};

/// Maximum number of ancestors in the status of a policy.
const MAX_ANCESTORS: usize = 16;

/// A condition. Reasons are those of the specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusCondition {
    /// Type, such as `Accepted`.
    pub kind: &'static str,
    /// Whether it holds.
    pub status: bool,
    /// Reason.
    pub reason: &'static str,
    /// Message, for people.
    pub message: String,
}

/// Status of a route at one parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentStatus {
    /// The parent.
    pub parent: ParentReference,
    /// Conditions by type.
    pub conditions: Vec<StatusCondition>,
}

/// Status of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerStatus {
    /// Name.
    pub name: String,
    /// Number of routes that use the listener.
    pub attached_routes: usize,
    /// Kinds of routes that may use the listener.
    pub supported_kinds: Vec<Kind>,
    /// Conditions by type.
    pub conditions: Vec<StatusCondition>,
}

/// Status of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayApiStatus {
    /// The object.
    pub object: ObjectKey,
    /// Conditions of a Gateway, a ListenerSet or a GatewayClass.
    pub conditions: Vec<StatusCondition>,
    /// Listeners of a Gateway or a ListenerSet.
    pub listeners: Vec<ListenerStatus>,
    /// Number of accepted ListenerSets of a Gateway; `None` for other objects.
    pub attached_listener_sets: Option<usize>,
    /// Parents of a route, or ancestors of a policy.
    pub parents: Vec<ParentStatus>,
}

impl World {
    /// Returns the status of the routes, Gateways, ListenerSets and GatewayClasses that are served here. A pure
    /// function of the objects: assigned addresses and times are not part of it.
    pub fn gateway_api_status(&self) -> Vec<GatewayApiStatus> {
        let (routes, listeners) = (self.routes(), self.gateway_listeners());
        let mut uses = vec![0; listeners.len()];
        let mut made: Vec<GatewayApiStatus> = Vec::new();
        for route in &routes {
            let resolved = [false, true].map(|at_gateway| self.resolved_refs(route, at_gateway));
            let mut parents = Vec::new();
            let mut used = vec![false; listeners.len()];
            for parent in route.parents {
                let attached = self.attach(route, parent, &listeners);
                for target in &attached.targets {
                    let RouteTarget::Listener { listener, .. } = target else { continue };
                    let at = listeners.iter().position(|other| std::ptr::eq(other, *listener));
                    at.into_iter().for_each(|at| used[at] = true);
                }
                let at_gateway = matches!(parent.group_kind().1, "Gateway" | "ListenerSet");
                parents.extend(parent_status(parent, &attached, &resolved[usize::from(at_gateway)]));
            }
            used.iter().zip(&mut uses).for_each(|(used, uses)| *uses += usize::from(*used));
            made.push(GatewayApiStatus {
                parents,
                ..new(route.kind, &route.meta.namespace, &route.meta.name)
            });
        }
        for (listener, routes) in listeners.iter().zip(uses) {
            let key = new(listener.kind, &listener.meta.namespace, &listener.meta.name);
            let overlaps = listeners.iter().any(|other| listener.overlaps(other));
            let credentials =
                listener.credentials.clone().and_then(|of| self.missing(&of).map_or(Ok(()), Err));
            let status = listener_status(listener, &credentials, routes, overlaps);
            match made.iter_mut().find(|known| known.object == key.object) {
                Some(known) => known.listeners.push(status),
                None => made.push(GatewayApiStatus { listeners: vec![status], ..key }),
            }
        }
        self.add_conditions(&mut made);
        for set in self.refused_listener_sets() {
            let message = "the Gateway does not allow ListenerSets of this namespace";
            made.push(GatewayApiStatus {
                conditions: ["Accepted", "Programmed"].map(|kind| fails(kind, "NotAllowed", message)).into(),
                ..new(Kind::ListenerSet, &set.object.meta.namespace, &set.object.meta.name)
            });
        }
        for entry in self.gateway_classes.iter().filter(|entry| self.is_own_class(&entry.object.meta.name)) {
            let conditions = vec![holds("Accepted", "Accepted", "Handled by Istio controller")];
            made.push(GatewayApiStatus {
                conditions,
                ..new(Kind::GatewayClass, "", &entry.object.meta.name)
            });
        }
        made.extend(self.backend_tls().iter().map(|policy| policy_status(policy, &routes)));
        made.sort_by(|a, b| a.object.cmp(&b.object));
        made
    }

    /// Adds the conditions of Gateways and ListenerSets whose listeners are known, and the number of ListenerSets.
    fn add_conditions(&self, made: &mut [GatewayApiStatus]) {
        let mut accepted: BTreeSet<ObjectKey> = BTreeSet::new();
        let with_listeners = || |of: &&mut GatewayApiStatus| !of.listeners.is_empty();
        for set in made.iter_mut().filter(with_listeners()).filter(|of| of.object.kind == Kind::ListenerSet) {
            set.conditions = set_conditions(&set.listeners);
            if set.conditions.iter().any(|of| of.kind == "Accepted" && of.status) {
                accepted.insert(set.object.clone());
            }
        }
        for known in made.iter_mut().filter(with_listeners()) {
            let Some(gateway) = self.gateway_entry(&known.object).map(|entry| &*entry.object) else {
                continue;
            };
            let conditions = &mut known.conditions;
            *conditions = gateway_conditions(&known.listeners);
            if let Some(refused) = self.refused_parameters(gateway) {
                replace(conditions, &refused);
            }
            self.check_addresses(gateway, conditions);
            if let Some((reason, message)) = self.refused_client_credential(gateway) {
                replace(conditions, &fails("ResolvedRefs", reason, message));
            }
            if accepts_insecure_clients(gateway) {
                let message = "Gateway is operating in AllowInsecureFallback mode for frontend validation";
                conditions.push(holds("InsecureFrontendValidationMode", "ConfigurationChanged", message));
            }
            let sets = self.listener_sets_of(gateway).into_iter().map(|set| &set.object.meta);
            let keys = sets.map(|of| new(Kind::ListenerSet, &of.namespace, &of.name).object);
            known.attached_listener_sets = Some(keys.filter(|key| accepted.contains(key)).count());
        }
    }

    /// Returns the condition of a Gateway whose parameters cannot be used. As in Istio, they are those of a ConfigMap,
    /// and the listeners are served without them.
    fn refused_parameters(&self, gateway: &Typed<KubernetesGateway>) -> Option<StatusCondition> {
        let of = gateway.spec.infrastructure.parameters_ref.as_ref()?;
        let (group, kind) = (of.group.as_deref().unwrap_or_default(), of.kind.as_deref().unwrap_or_default());
        let namespace = &gateway.meta.namespace;
        let message = if (group, kind) != ("", "ConfigMap") {
            format!("Unsupported parametersRef group/kind {group}/{kind}, only ConfigMap is supported")
        } else if !self.has_config_map(namespace, &of.name) {
            format!("parametersRef ConfigMap {namespace}/{} does not exist", of.name)
        } else {
            return None;
        };
        Some(fails("Accepted", "InvalidParameters", message))
    }

    /// Returns the Gateway of a key; `None` for an object of another kind.
    pub(super) fn gateway_entry(&self, key: &ObjectKey) -> Option<&Entry<KubernetesGateway>> {
        let is_gateway = key.kind == Kind::KubernetesGateway;
        self.kubernetes_gateways.get(&key.namespace, &key.name).filter(|_| is_gateway)
    }

    /// Returns the backends of routes whose Service exists and has no such port: the route, and a description.
    pub(in crate::world) fn backends_without_port(&self) -> Vec<(ObjectKey, String)> {
        let mut found = Vec::new();
        for route in self.routes() {
            let referrer = self.referrer(route.kind, route.meta, true);
            for backend in &route.backends {
                let host = referrer.backend_host(backend).ok();
                let Some((service, port)) = host.and_then(|host| self.service(&host)).zip(backend.port)
                else {
                    continue;
                };
                let ports = &service.spec.ports;
                if ports.iter().any(|known| u32::from(known.port) == port) {
                    continue;
                }
                let known: Vec<String> = ports.iter().map(|known| known.port.to_string()).collect();
                let message = format!(
                    "backend {} has no port {port}, so it receives nothing; its ports: {}",
                    backend.name,
                    known.join(", ")
                );
                found.push((new(route.kind, &route.meta.namespace, &route.meta.name).object, message));
            }
        }
        found
    }

    /// Returns the condition about the backends of a route at a Gateway or at a service. As in Istio, the last error is
    /// reported.
    fn resolved_refs(&self, route: &Route<'_>, at_gateway: bool) -> StatusCondition {
        let referrer = self.referrer(route.kind, route.meta, at_gateway);
        let mut condition = holds("ResolvedRefs", "ResolvedRefs", "All references resolved");
        for backend in &route.backends {
            let namespace = backend.namespace.as_ref().unwrap_or(&route.meta.namespace);
            let found = match referrer.backend_host(backend) {
                Ok(host) if self.service(&host).is_some() => continue,
                Ok(host) => fails("ResolvedRefs", "BackendNotFound", format!("backend({host}) not found")),
                Err(Refusal::NotPermitted) => {
                    let message = format!(
                        "backendRef {}/{namespace} not accessible to a {} in namespace \"{}\" (missing a \
                         ReferenceGrant?)",
                        backend.name, route.kind, route.meta.namespace
                    );
                    fails("ResolvedRefs", "RefNotPermitted", message)
                }
                Err(Refusal::Kind) => {
                    let (group, kind) = backend.group_kind();
                    let message = format!("backendRefs of kind {group}/{kind} are not supported");
                    fails("ResolvedRefs", "InvalidKind", message)
                }
            };
            condition = found;
        }
        condition
    }
}

fn new(kind: Kind, namespace: &str, name: &str) -> GatewayApiStatus {
    let object = ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() };
    GatewayApiStatus {
        object,
        conditions: Vec::new(),
        listeners: Vec::new(),
        attached_listener_sets: None,
        parents: Vec::new(),
    }
}

/// Returns whether a Gateway accepts clients without a certificate although it verifies those of others.
fn accepts_insecure_clients(gateway: &Typed<KubernetesGateway>) -> bool {
    let mut validations = gateway.spec.tls.iter().flat_map(|tls| tls.frontend.validations());
    validations.any(|of| of.mode == FrontendValidationMode::AllowInsecureFallback)
}

/// Replaces the condition of the same type.
pub(super) fn replace(conditions: &mut [StatusCondition], by: &StatusCondition) {
    conditions.iter_mut().filter(|of| of.kind == by.kind).for_each(|of| of.clone_from(by));
}

pub(super) fn holds(kind: &'static str, reason: &'static str, message: impl Into<String>) -> StatusCondition {
    StatusCondition { kind, status: true, reason, message: message.into() }
}

pub(super) fn fails(kind: &'static str, reason: &'static str, message: impl Into<String>) -> StatusCondition {
    StatusCondition { kind, status: false, reason, message: message.into() }
}

/// Returns the status at a parent; `None` if another controller serves it.
fn parent_status(
    parent: &ParentReference,
    attached: &Attached<'_>,
    resolved: &StatusCondition,
) -> Option<ParentStatus> {
    let accepted = match &attached.refusal {
        Some((reason, message)) => fails("Accepted", reason, message.clone()),
        None if attached.targets.is_empty() => return None,
        None => holds("Accepted", "Accepted", "Route was valid"),
    };
    Some(ParentStatus { parent: parent.clone(), conditions: vec![accepted, resolved.clone()] })
}

/// Returns the status of a policy at its targets, and at the Gateways whose routes lead to them.
fn policy_status(policy: &ResolvedPolicy<'_>, routes: &[Route<'_>]) -> GatewayApiStatus {
    const FINE: &str = "Configuration is valid";
    let mut conditions =
        vec![holds("Accepted", "Accepted", FINE), holds("ResolvedRefs", "ResolvedRefs", FINE)];
    match &policy.roots {
        Ok(_) => {}
        Err(("Invalid", message)) => conditions[0] = fails("Accepted", "Invalid", message.clone()),
        Err((reason, message)) => {
            let none = "Certificate reference invalid";
            conditions[0] = fails("Accepted", "NoValidCACertificate", format!("{none}: {message}"));
            conditions[1] = fails("ResolvedRefs", reason, message.clone());
        }
    }
    let mut parents = Vec::new();
    for outcome in &policy.outcomes {
        if let Some((reason, message)) = &outcome.refusal {
            conditions[0] = fails("Accepted", reason, message.clone());
        }
        let parent = backend_tls::ancestor(outcome.reference);
        parents.push(ParentStatus { parent, conditions: conditions.clone() });
    }
    for (_, name) in World::gateways_of_backend(routes, policy) {
        let parent = ParentReference { name, ..ParentReference::default() };
        parents.push(ParentStatus { parent, conditions: conditions.clone() });
    }
    // The API permits as many.
    parents.truncate(MAX_ANCESTORS);
    GatewayApiStatus { parents, ..new(Kind::BackendTlsPolicy, &policy.meta.namespace, &policy.meta.name) }
}

fn listener_status(
    of: &GatewayListener<'_>,
    credentials: &Result<(), RefusedReference>,
    attached_routes: usize,
    overlaps: bool,
) -> ListenerStatus {
    const FINE: &str = "No errors found";
    let mut conditions = vec![
        holds("Accepted", "Accepted", FINE),
        fails("Conflicted", "NoConflicts", FINE),
        holds("Programmed", "Programmed", FINE),
        holds("ResolvedRefs", "ResolvedRefs", FINE),
    ];
    if let Some(conflict) = of.conflict {
        let (reason, message) = match conflict {
            ListenerConflict::Protocol => {
                ("ProtocolConflict", "an earlier listener has the port with another protocol")
            }
            ListenerConflict::Hostname => {
                ("HostnameConflict", "an earlier listener has the port and the host")
            }
        };
        conditions[0] = fails("Accepted", reason, message);
        conditions[1] = holds("Conflicted", reason, message);
        conditions[2] = fails("Programmed", reason, message);
    }
    if !of.listener.is_supported() {
        let message = "the protocol is not supported, or has no settings of TLS";
        conditions[0] = fails("Accepted", "UnsupportedProtocol", message);
        conditions[2] = fails("Programmed", "Invalid", message);
    }
    if let Err((reason, message)) = credentials {
        // As in Istio, a missing grant counts here for certificates of the gateway too.
        if *reason != "InvalidCertificateRef" {
            conditions[0] = fails("Accepted", "NoValidCACertificate", message.clone());
        }
        conditions[2] = fails("Programmed", "Invalid", "Bad TLS configuration");
        conditions[3] = fails("ResolvedRefs", reason, message.clone());
    } else if of.listener.unsupported_kinds().next().is_some() {
        conditions[3] = fails("ResolvedRefs", "InvalidRouteKinds", "Invalid route kinds");
    }
    if overlaps {
        let message =
            "clients may send requests for hosts of another listener of the port on the same connection";
        conditions.push(holds("OverlappingTLSConfig", "OverlappingHostnames", message));
    }
    let supported_kinds =
        of.listener.kinds().iter().copied().filter(|kind| of.listener.allows_kind(*kind)).collect();
    ListenerStatus { name: of.listener.name.clone(), attached_routes, supported_kinds, conditions }
}

impl ListenerStatus {
    fn is_valid(&self) -> bool {
        self.conditions.iter().any(|of| of.kind == "Programmed" && of.status)
    }
}

/// Returns the conditions of a Gateway with these listeners.
fn gateway_conditions(listeners: &[ListenerStatus]) -> Vec<StatusCondition> {
    let has_valid = listeners.iter().any(ListenerStatus::is_valid);
    let accepted = if listeners.iter().all(ListenerStatus::is_valid) {
        holds("Accepted", "Accepted", "Resource accepted")
    } else if has_valid {
        holds("Accepted", "ListenersNotValid", "One or more of the Gateway's listeners are invalid")
    } else {
        fails("Accepted", "ListenersNotValid", "None of the Gateway's listeners are valid")
    };
    let programmed = if has_valid {
        holds("Programmed", "Programmed", "Resource programmed")
    } else {
        fails("Programmed", "Invalid", "No listener is valid")
    };
    vec![accepted, programmed, holds("ResolvedRefs", "ResolvedRefs", "All references resolved")]
}

/// Returns the conditions of a ListenerSet with these listeners. One valid listener suffices.
fn set_conditions(listeners: &[ListenerStatus]) -> Vec<StatusCondition> {
    if listeners.iter().any(ListenerStatus::is_valid) {
        let accepted = holds("Accepted", "Accepted", "Resource accepted");
        return vec![accepted, holds("Programmed", "Programmed", "Resource programmed")];
    }
    let message = "None of the ListenerSet's listeners are valid";
    ["Accepted", "Programmed"].map(|kind| fails(kind, "ListenersNotValid", message)).into()
}

#[cfg(test)]
mod tests;
