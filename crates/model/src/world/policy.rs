//! Policies of a workload: mutual TLS and authorization.

use std::{collections::BTreeSet, sync::Arc};

use super::{World, change_set::AffectedWorkloads, store::Entry};
use crate::{
    api::{
        AuthorizationPolicy, Labels, MtlsMode, PeerAuthentication, Typed,
        destination_rule::WorkloadSelector,
        security::{Action, TargetRef},
        selects,
    },
    origin::Origin,
};

/// Label of the proxies of a Gateway of the Gateway API, with its name.
pub(super) const GATEWAY_LABEL: &str = "gateway.networking.k8s.io/gateway-name";
/// API group of such a Gateway.
const GATEWAY_GROUP: &str = "gateway.networking.k8s.io";

impl World {
    /// Returns the mode of mutual TLS on a container port of a workload. It comes from the oldest policy that selects
    /// the workload, otherwise from the namespace's policy, otherwise from the mesh's. `UNSET` inherits from the next.
    /// The default is [`MtlsMode::Permissive`]; the result is never [`MtlsMode::Unset`].
    pub fn peer_mode(&self, namespace: &str, labels: &Labels, port: u16) -> MtlsMode {
        let workload = self.workload_policy(namespace, labels);
        let of_port = workload.and_then(|entry| entry.object.spec.port_level_mtls.get(&port.to_string()));
        match of_port.map(|mtls| mtls.mode) {
            Some(mode) if mode != MtlsMode::Unset => mode,
            _ => self.mode_with(workload, namespace),
        }
    }

    /// Returns the mode of the ports that no policy names.
    pub fn workload_mode(&self, namespace: &str, labels: &Labels) -> MtlsMode {
        self.mode_with(self.workload_policy(namespace, labels), namespace)
    }

    /// Returns the ports of a workload that a policy names, with their modes.
    pub fn port_modes(&self, namespace: &str, labels: &Labels) -> Vec<(u16, MtlsMode)> {
        self.peer_modes(namespace, labels).1
    }

    /// Returns the mode of the ports that no policy names, and the ports that a policy names with their modes.
    pub(super) fn peer_modes(&self, namespace: &str, labels: &Labels) -> (MtlsMode, Vec<(u16, MtlsMode)>) {
        let workload = self.workload_policy(namespace, labels);
        let others = self.mode_with(workload, namespace);
        let named = workload.into_iter().flat_map(|entry| &entry.object.spec.port_level_mtls);
        let mode = |mode: MtlsMode| if mode == MtlsMode::Unset { others } else { mode };
        let ports = named.filter_map(|(port, mtls)| Some((port.parse().ok()?, mode(mtls.mode))));
        let mut ports: Vec<(u16, MtlsMode)> = ports.collect();
        ports.sort_by_key(|(port, _)| *port);
        (others, ports)
    }

    /// Returns the mode from the workload's policy, otherwise from its namespace's, otherwise from the mesh's. The
    /// default is `PERMISSIVE`.
    fn mode_with(&self, workload: Option<&Entry<PeerAuthentication>>, namespace: &str) -> MtlsMode {
        let mode = |entry: Option<&Entry<PeerAuthentication>>| {
            entry?.object.spec.mtls.map(|mtls| mtls.mode).filter(|mode| *mode != MtlsMode::Unset)
        };
        mode(workload)
            .or_else(|| mode(self.wide_policy(namespace)))
            .or_else(|| mode(self.wide_policy(&self.mesh().root_namespace)))
            .unwrap_or(MtlsMode::Permissive)
    }

    /// Returns the policy and its field that decide the mode of mutual TLS on a container port of a workload; `None` if
    /// the default applies. For explanations.
    pub fn peer_mode_source(
        &self,
        namespace: &str,
        labels: &Labels,
        port: u16,
    ) -> Option<(&Arc<Typed<PeerAuthentication>>, String)> {
        let workload = self.workload_policy(namespace, labels);
        let set = |mode: MtlsMode| mode != MtlsMode::Unset;
        let port = port.to_string();
        let of_port = workload
            .filter(|entry| entry.object.spec.port_level_mtls.get(&port).is_some_and(|mtls| set(mtls.mode)));
        if let Some(entry) = of_port {
            return Some((&entry.object, format!("spec.portLevelMtls.{port}")));
        }
        let root = self.wide_policy(&self.mesh().root_namespace);
        let mut candidates = [workload, self.wide_policy(namespace), root].into_iter().flatten();
        let found = candidates.find(|entry| entry.object.spec.mtls.is_some_and(|mtls| set(mtls.mode)));
        found.map(|entry| (&entry.object, "spec.mtls.mode".to_owned()))
    }

    /// Returns the authorization policies that apply to a workload: those of the root namespace, then those of its own,
    /// oldest first.
    pub fn authorization_policies(
        &self,
        namespace: &str,
        labels: &Labels,
    ) -> Vec<&Arc<Typed<AuthorizationPolicy>>> {
        let root = self.mesh().root_namespace.as_str();
        let mut policies = Vec::new();
        for of in [root, namespace] {
            let mut entries: Vec<_> = self.applying(of, of == namespace, labels).collect();
            entries.sort_by(|a, b| a.age().cmp(&b.age()));
            policies.extend(entries.into_iter().map(|entry| &entry.object));
            if root == namespace {
                break;
            }
        }
        policies
    }

    /// Returns whether an ALLOW policy that is not a dry run applies to a workload.
    pub(super) fn has_allow_policy(&self, namespace: &str, labels: &Labels) -> bool {
        let of_namespaces = [self.mesh().root_namespace.as_str(), namespace].into_iter();
        let mut policies = of_namespaces.flat_map(|of| self.applying(of, of == namespace, labels));
        policies.any(|entry| entry.object.spec.action == Action::Allow && !entry.object.meta.is_dry_run())
    }

    /// Returns the authorization policies of a namespace that apply to workloads with these labels. `own` is whether
    /// it is the namespace of the workloads.
    fn applying<'a>(
        &'a self,
        namespace: &str,
        own: bool,
        labels: &Labels,
    ) -> impl Iterator<Item = &'a Entry<AuthorizationPolicy>> {
        self.authorization_policies.in_namespace(namespace).filter(move |entry| {
            let spec = &entry.object.spec;
            applies(spec.selector.as_ref(), spec.target_ref.iter().chain(&spec.target_refs), own, labels)
        })
    }

    /// Returns where an authorization policy was read.
    pub(crate) fn origin_of(&self, policy: &Typed<AuthorizationPolicy>) -> Option<&Origin> {
        let entry = self.authorization_policies.get(&policy.meta.namespace, &policy.meta.name);
        entry.map(|entry| &entry.origin)
    }

    /// Returns the oldest policy of the namespace that selects the workload. As in Istio, policies of the root
    /// namespace select no workload.
    fn workload_policy(&self, namespace: &str, labels: &Labels) -> Option<&Entry<PeerAuthentication>> {
        if namespace == self.mesh().root_namespace {
            return None;
        }
        let narrow = |entry: &&Entry<PeerAuthentication>| {
            let selector = entry.object.spec.selector.as_ref();
            !is_wide(selector) && selected(selector, labels)
        };
        self.peer_authentications.in_namespace(namespace).filter(narrow).min_by(|a, b| a.age().cmp(&b.age()))
    }

    /// Returns the oldest policy for the whole namespace.
    fn wide_policy(&self, namespace: &str) -> Option<&Entry<PeerAuthentication>> {
        let policies = self.peer_authentications.in_namespace(namespace);
        policies
            .filter(|entry| is_wide(entry.object.spec.selector.as_ref()))
            .min_by(|a, b| a.age().cmp(&b.age()))
    }
}

pub(super) fn is_wide(selector: Option<&WorkloadSelector>) -> bool {
    selector.is_none_or(|selector| selector.match_labels.is_empty())
}

/// Returns whether a policy applies to a workload. Policies attached to objects apply to the proxies of a Gateway
/// in their own namespace (`own`); the other targets of Istio concern its waypoints.
pub(super) fn applies<'a>(
    selector: Option<&WorkloadSelector>,
    targets: impl Iterator<Item = &'a TargetRef>,
    own: bool,
    labels: &Labels,
) -> bool {
    let mut targets = targets.peekable();
    if targets.peek().is_none() {
        return selected(selector, labels);
    }
    let gateway = labels.get(GATEWAY_LABEL);
    own && targets.any(|target| {
        target.kind == "Gateway" && target.group == GATEWAY_GROUP && gateway == Some(&target.name)
    })
}

/// Returns the workloads to which a policy may apply ([`applies`]).
pub(super) fn affected_workloads<'a>(
    selector: Option<&WorkloadSelector>,
    targets: impl Iterator<Item = &'a TargetRef>,
) -> BTreeSet<AffectedWorkloads> {
    let of_gateway = |target: &TargetRef| [(GATEWAY_LABEL.to_owned(), target.name.clone())].into();
    let attached: BTreeSet<_> = targets.map(of_gateway).map(AffectedWorkloads::Labelled).collect();
    if !attached.is_empty() {
        return attached;
    }
    let labels = selector.map(|selector| selector.match_labels.clone());
    BTreeSet::from([AffectedWorkloads::Labelled(labels.unwrap_or_default())])
}

/// Returns whether a selector selects workloads with these labels.
pub(super) fn selected(selector: Option<&WorkloadSelector>, labels: &Labels) -> bool {
    selector.is_none_or(|selector| selects(&selector.match_labels, labels))
}
