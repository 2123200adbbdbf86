//! What holds for a workload: mutual TLS and authorization.

use std::sync::Arc;

use super::{Origin, World, store::Entry};
use crate::api::{
    AuthorizationPolicy, Labels, MtlsMode, PeerAuthentication, Typed, destination_rule::WorkloadSelector,
    selects,
};

impl World {
    /// What clients of a workload must do on one of its (container) ports. The oldest policy that selects the
    /// workload, then its namespace's, then the mesh's; `UNSET` asks the next. Never [`MtlsMode::Unset`].
    pub fn peer_mode(&self, namespace: &str, labels: &Labels, port: u16) -> MtlsMode {
        let workload = self.workload_policy(namespace, labels);
        let of_port = workload.and_then(|entry| entry.object.spec.port_level_mtls.get(&port.to_string()));
        match of_port.map(|mtls| mtls.mode) {
            Some(mode) if mode != MtlsMode::Unset => mode,
            _ => self.workload_mode(namespace, labels),
        }
    }

    /// The same for ports no policy names.
    pub fn workload_mode(&self, namespace: &str, labels: &Labels) -> MtlsMode {
        let levels = [
            self.workload_policy(namespace, labels),
            self.wide_policy(namespace),
            self.wide_policy(&self.mesh().root_namespace),
        ];
        let modes = levels.into_iter().flatten().filter_map(|entry| entry.object.spec.mtls);
        modes.map(|mtls| mtls.mode).find(|mode| *mode != MtlsMode::Unset).unwrap_or(MtlsMode::Permissive)
    }

    /// Ports of a workload that a policy names, with what holds there.
    pub fn port_modes(&self, namespace: &str, labels: &Labels) -> Vec<(u16, MtlsMode)> {
        let workload = self.workload_policy(namespace, labels);
        let ports = workload.into_iter().flat_map(|entry| entry.object.spec.port_level_mtls.keys());
        let mut modes: Vec<_> = ports
            .filter_map(|port| port.parse().ok())
            .map(|port| (port, self.peer_mode(namespace, labels, port)))
            .collect();
        modes.sort_by_key(|(port, _)| *port);
        modes
    }

    /// The authorization policies that hold for a workload: the root namespace's, then its own's, oldest first.
    pub fn authorization_policies(
        &self,
        namespace: &str,
        labels: &Labels,
    ) -> Vec<&Arc<Typed<AuthorizationPolicy>>> {
        let root = self.mesh().root_namespace.as_str();
        let mut policies = Vec::new();
        for of in [root, namespace] {
            let mut entries: Vec<_> = self
                .authorization_policies
                .in_namespace(of)
                .filter(|entry| {
                    let spec = &entry.object.spec;
                    let attached = spec.target_ref.is_some() || !spec.target_refs.is_empty();
                    !attached && selected(spec.selector.as_ref(), labels)
                })
                .collect();
            entries.sort_by(|a, b| a.age().cmp(&b.age()));
            policies.extend(entries.into_iter().map(|entry| &entry.object));
            if root == namespace {
                break;
            }
        }
        policies
    }

    /// Where an authorization policy was read.
    pub(crate) fn origin_of(&self, policy: &Typed<AuthorizationPolicy>) -> Option<&Origin> {
        let entry = self.authorization_policies.get(&policy.meta.namespace, &policy.meta.name);
        entry.map(|entry| &entry.origin)
    }

    /// The oldest policy of the namespace that selects the workload. Those of the root namespace select none, as in
    /// Istio.
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

    /// The oldest policy for the whole namespace.
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

fn selected(selector: Option<&WorkloadSelector>, labels: &Labels) -> bool {
    selector.is_none_or(|selector| selects(&selector.match_labels, labels))
}
