//! The DestinationRule of a host, by client namespace and client labels.

use std::sync::Arc;

use super::{
    CONFIG_MAP, CREDENTIAL, World,
    hosts::{by_age, exported, most_specific},
    store::Entry,
};
use crate::{
    ProxyView, Role,
    api::{
        DestinationRule, Labels, TrafficPolicy, Typed,
        destination_rule::{ClientTls, WorkloadSelector},
        selects,
    },
};

/// Rule that results from merging, with its effective `exportTo`.
struct MergedRule<'a> {
    rule: Arc<Typed<DestinationRule>>,
    export_to: &'a [String],
}

impl World {
    /// Returns the DestinationRule that clients of a namespace apply to a service, without those for selected
    /// workloads.
    pub fn destination_rule(
        &self,
        fqdn: &str,
        client_namespace: &str,
    ) -> Option<Arc<Typed<DestinationRule>>> {
        self.destination_rule_for(fqdn, client_namespace, None)
    }

    /// Returns the DestinationRule that a client with these labels applies to a service: one of the client's namespace,
    /// otherwise of the service's, otherwise of the root namespace. Rules with a `workloadSelector` are considered only
    /// with labels, and only in the client's namespace. Source: Istio's `PushContext` and `SidecarScope`.
    pub fn destination_rule_for(
        &self,
        fqdn: &str,
        client_namespace: &str,
        labels: Option<&Labels>,
    ) -> Option<Arc<Typed<DestinationRule>>> {
        let root = self.mesh().root_namespace.as_str();
        // In the root namespace only private rules are meant for its own clients; the others are defaults of the mesh.
        let own = self.most_specific_rules(fqdn, client_namespace, |export_to| {
            exports(export_to, client_namespace, client_namespace)
                && (client_namespace != root || is_private(export_to, client_namespace))
        });
        if !own.is_empty() {
            return choose(merge(own), client_namespace, labels);
        }
        let service_namespace = self.service(fqdn).map_or("", |service| service.meta.namespace.as_str());
        for namespace in [service_namespace, root] {
            let shared =
                self.most_specific_rules(fqdn, namespace, |export_to| !is_private(export_to, namespace));
            let mut merged = merge(shared);
            merged.retain(|merged| {
                let is_own = namespace == client_namespace || merged.rule.spec.workload_selector.is_none();
                is_own && exports(merged.export_to, namespace, client_namespace)
            });
            if !merged.is_empty() {
                return choose(merged, client_namespace, labels);
            }
        }
        None
    }

    /// Returns the TLS settings that name a credential. A gateway applies the rules that it sees, a sidecar those that
    /// select it.
    pub(crate) fn client_credentials<'a>(&'a self, view: &ProxyView) -> Vec<&'a ClientTls> {
        let default = &self.mesh().default_destination_rule_export_to;
        let applies = |entry: &&Entry<DestinationRule>| {
            let (meta, spec) = (&entry.object.meta, &entry.object.spec);
            let export_to = if spec.export_to.is_empty() { default } else { &spec.export_to };
            let selects_it = |selector: &WorkloadSelector| {
                meta.namespace == view.namespace && selects(&selector.match_labels, &view.labels)
            };
            match &spec.workload_selector {
                _ if spec.is_derived => exports(export_to, &meta.namespace, &view.namespace),
                Some(selector) => selects_it(selector),
                None => view.role == Role::Router && exports(export_to, &meta.namespace, &view.namespace),
            }
        };
        let with_credential =
            self.destination_rules.iter().filter(|entry| entry.object.spec.has_credential());
        let applying = with_credential.filter(applies).map(|entry| &entry.object.spec);
        // Only Gateway API refers to ConfigMaps and to objects of other namespaces, which it checks to be permitted.
        let may_use = |rule: &DestinationRule, tls: &&ClientTls| {
            let name = &tls.credential_name;
            rule.is_derived || !(name.starts_with(CONFIG_MAP) || name.starts_with(CREDENTIAL))
        };
        applying.flat_map(|rule| rule.credentials().filter(move |tls| may_use(rule, tls))).collect()
    }

    /// Returns the rules of a namespace with the most specific host, oldest first, each with its effective `exportTo`.
    fn most_specific_rules<'a>(
        &'a self,
        fqdn: &str,
        namespace: &str,
        keep: impl Fn(&[String]) -> bool,
    ) -> Vec<(&'a Entry<DestinationRule>, &'a [String])> {
        let export_to = |entry: &'a Entry<DestinationRule>| self.destination_rule_export_to(entry);
        let found = most_specific(&self.destination_rule_hosts, fqdn, |pattern| {
            by_age(&self.destination_rules, &self.destination_rule_hosts, pattern, |entry| {
                entry.object.meta.namespace == namespace
                    && self.discovers(namespace)
                    && keep(export_to(entry))
            })
        });
        found.into_iter().map(|entry| (entry, export_to(entry))).collect()
    }

    /// Returns the `exportTo` of a rule, or the mesh's default.
    pub(super) fn destination_rule_export_to<'a>(
        &'a self,
        entry: &'a Entry<DestinationRule>,
    ) -> &'a [String] {
        let default = &self.mesh().default_destination_rule_export_to;
        let own = &entry.object.spec.export_to;
        // As in Istio, a default with "." has no other namespaces.
        let private = default.iter().find(|entry| *entry == ".").map(std::slice::from_ref);
        if own.is_empty() { private.unwrap_or(default) } else { own }
    }
}

pub(super) fn exports(export_to: &[String], owner: &str, client: &str) -> bool {
    exported(export_to.iter().map(String::as_str), owner, client)
}

/// Returns whether only the owner's namespace sees a rule.
fn is_private(export_to: &[String], owner: &str) -> bool {
    !export_to.is_empty() && export_to.iter().all(|entry| entry == "." || entry == "~" || entry == owner)
}

/// Merges the rules of one host: their subsets are united, and the oldest policy is used. Rules with different
/// selectors or a different `exportTo` stay apart.
fn merge<'a>(rules: Vec<(&'a Entry<DestinationRule>, &'a [String])>) -> Vec<MergedRule<'a>> {
    let mut merged: Vec<MergedRule<'a>> = Vec::new();
    for (entry, export_to) in rules {
        let selector = entry.object.spec.workload_selector.as_ref();
        let mut apart = true;
        for known in merged.iter_mut().filter(|known| known.export_to == export_to) {
            let of_known = known.rule.spec.workload_selector.as_ref();
            let both = selector.is_some() && of_known.is_some();
            if both && selector != of_known {
                continue;
            }
            apart &= selector != of_known;
            add(&mut known.rule, &entry.object.spec);
        }
        if apart {
            merged.push(MergedRule { rule: Arc::clone(&entry.object), export_to });
        }
    }
    merged
}

/// Adds the subsets and the policy that a rule lacks.
fn add(rule: &mut Arc<Typed<DestinationRule>>, from: &DestinationRule) {
    for subset in &from.subsets {
        if rule.spec.subsets.iter().all(|known| known.name != subset.name) {
            Arc::make_mut(rule).spec.subsets.push(subset.clone());
        }
    }
    match (rule.spec.is_derived, from.is_derived) {
        (true, false) => {
            let filled = fill(from.traffic_policy.as_ref(), rule.spec.traffic_policy.as_ref());
            Arc::make_mut(rule).spec.traffic_policy = filled;
        }
        (false, true) => {
            let filled = fill(rule.spec.traffic_policy.as_ref(), from.traffic_policy.as_ref());
            Arc::make_mut(rule).spec.traffic_policy = filled;
        }
        _ if rule.spec.traffic_policy.is_none() && from.traffic_policy.is_some() => {
            Arc::make_mut(rule).spec.traffic_policy.clone_from(&from.traffic_policy);
        }
        _ => {}
    }
}

/// Returns a policy with the settings of one that is made from policies of Gateway API where it has none. Source:
/// istiod's merging of both.
fn fill(own: Option<&TrafficPolicy>, derived: Option<&TrafficPolicy>) -> Option<TrafficPolicy> {
    let (Some(own), Some(derived)) = (own, derived) else { return own.or(derived).cloned() };
    let mut filled = own.clone();
    filled.tls = filled.tls.or_else(|| derived.tls.clone());
    for of_port in &derived.port_level_settings {
        let known = filled.port_level_settings.iter_mut().find(|known| known.port == of_port.port);
        match known {
            Some(known) => known.tls = known.tls.take().or_else(|| of_port.tls.clone()),
            None => filled.port_level_settings.push(of_port.clone()),
        }
    }
    Some(filled)
}

/// Returns the rule for a client: the first whose selector matches, otherwise the last without a selector.
fn choose(
    merged: Vec<MergedRule<'_>>,
    namespace: &str,
    labels: Option<&Labels>,
) -> Option<Arc<Typed<DestinationRule>>> {
    let mut default = None;
    for MergedRule { rule, .. } in merged {
        match (&rule.spec.workload_selector, labels) {
            (None, _) => default = Some(rule),
            (Some(selector), Some(labels))
                if rule.meta.namespace == namespace && selects(&selector.match_labels, labels) =>
            {
                return Some(rule);
            }
            _ => {}
        }
    }
    default
}
