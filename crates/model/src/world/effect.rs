//! The effect of configuration changes, as text for people.
//!
//! The policies before and after a batch of changes are compared for the workloads that a changed policy selects
//! ([`policies`]). Every statement describes the state after the batch.

mod policies;

use std::{cell::OnceCell, collections::HashMap};

use super::{World, check::label_text, fqdn};
use crate::{
    api::{
        ConfigMap, Kind, Object, ObjectKey, destination_rule::WorkloadSelector, mesh_config,
        security::TargetRef,
    },
    diagnostic::{Diagnostic, Severity},
    origin::Origin,
};
use policies::Workloads;

/// Maximum number of names in a list; longer lists are truncated.
const MAX_LISTED: usize = 3;

impl World {
    /// Returns a World with the policies and the mesh configuration of this one. While it is kept, changes of other
    /// objects copy nothing.
    #[must_use]
    pub fn policies(&self) -> Self {
        Self {
            mesh: self.mesh.clone(),
            default_mesh: self.default_mesh.clone(),
            peer_authentications: self.peer_authentications.clone(),
            authorization_policies: self.authorization_policies.clone(),
            request_authentications: self.request_authentications.clone(),
            ..Self::default()
        }
    }

    /// Returns the object of a key and where it was read, if its kind has an effect of its own on proxies.
    pub fn effective(&self, key: &ObjectKey) -> Option<(Object, &Origin)> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        macro_rules! found {
            ($store:ident, $kind:ident) => {{
                let entry = self.$store.get(namespace, name)?;
                (Object::$kind(entry.object.clone()), &entry.origin)
            }};
        }
        Some(match key.kind {
            Kind::VirtualService => found!(virtual_services, VirtualService),
            Kind::DestinationRule => found!(destination_rules, DestinationRule),
            Kind::ServiceEntry => found!(service_entries, ServiceEntry),
            Kind::Service => found!(services, Service),
            Kind::PeerAuthentication => found!(peer_authentications, PeerAuthentication),
            Kind::AuthorizationPolicy => found!(authorization_policies, AuthorizationPolicy),
            Kind::RequestAuthentication => found!(request_authentications, RequestAuthentication),
            Kind::Telemetry => found!(telemetries, Telemetry),
            Kind::ConfigMap if (namespace, name) == (mesh_config::NAMESPACE, mesh_config::NAME) => {
                let entry = self.mesh.as_ref()?;
                (Object::ConfigMap(entry.object.clone()), &entry.origin)
            }
            _ => return None,
        })
    }
}

/// Describes the changes of a batch.
#[derive(Debug)]
pub struct Effects<'a> {
    before: &'a World,
    after: &'a World,
    /// Fields with errors, by object.
    errors: HashMap<&'a str, Vec<&'a str>>,
    /// Made when the first policy is described.
    workloads: OnceCell<Workloads<'a>>,
}

/// The effect of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// False if the applied object has no effect; an error states the reason.
    pub is_in_force: bool,
    /// Description of the change.
    pub text: String,
}

impl<'a> Effects<'a> {
    /// Describes changes between `before` ([`World::policies`]) and `after`. `findings` are the diagnostics of `after`.
    pub fn new(before: &'a World, after: &'a World, findings: &'a [Diagnostic]) -> Self {
        let mut errors: HashMap<&str, Vec<&str>> = HashMap::new();
        for finding in findings.iter().filter(|finding| finding.severity == Severity::Error) {
            errors.entry(&finding.object).or_default().push(&finding.field);
        }
        Self { before, after, errors, workloads: OnceCell::new() }
    }

    /// Returns the effect of the change of an object: hosts for routing, workloads for policies. For a policy the text
    /// also states what is newly accepted or denied. `None` if nothing changed, and for kinds without an effect of
    /// their own.
    pub fn of(&self, key: &ObjectKey, before: Option<&Object>) -> Option<Effect> {
        let after = self.after.effective(key).map(|(object, _)| object);
        if before == after.as_ref() {
            return None;
        }
        let errors = self.errors.get(&*key.to_string()).map_or(&[][..], Vec::as_slice);
        let reach = match (&after, before) {
            (Some(after), _) => self.reach(after, errors),
            (None, before) => self.reach(before?, &[]),
        };
        let is_in_force = reach.is_some();
        let clauses = match after.as_ref().or(before) {
            Some(Object::PeerAuthentication(_) | Object::AuthorizationPolicy(_) | Object::ConfigMap(_)) => {
                let workloads = self.workloads.get_or_init(|| Workloads::new(self.after));
                workloads.compare(self.before, self.after, before, after.as_ref())
            }
            _ => Vec::new(),
        };
        let text: Vec<String> = reach.into_iter().chain(clauses).collect();
        (!text.is_empty()).then(|| Effect { is_in_force, text: text.join("; ") })
    }

    /// Returns the hosts or workloads that an object affects, without the fields that have errors.
    fn reach(&self, object: &Object, errors: &[&str]) -> Option<String> {
        let without_errors = |hosts: &[String]| {
            let named = hosts.iter().enumerate();
            let named = named.filter(|(index, _)| !errors.contains(&&*format!("spec.hosts[{index}]")));
            let hosts: Vec<String> = named.map(|(_, host)| host.clone()).collect();
            (!hosts.is_empty()).then_some(hosts)
        };
        Some(match object {
            Object::VirtualService(object) => {
                let hosts = without_errors(&object.spec.hosts)?;
                let full = hosts.iter().map(|host| fqdn(host, &object.meta.namespace));
                format!("requests to {}", list(full.collect()))
            }
            Object::DestinationRule(object) => {
                format!("connections to {}", fqdn(&object.spec.host, &object.meta.namespace))
            }
            Object::ServiceEntry(object) => {
                format!("connections to {}", list(without_errors(&object.spec.hosts)?))
            }
            Object::Service(object) => {
                format!("connections to {}", fqdn(&object.meta.name, &object.meta.namespace))
            }
            Object::PeerAuthentication(object) => {
                let without_effect = |field: &&str| matches!(*field, "spec" | "spec.selector");
                if errors.iter().any(without_effect) {
                    return None;
                }
                self.workloads_text(&object.meta.namespace, object.spec.selector.as_ref())
            }
            Object::AuthorizationPolicy(object) => self.attached_text(
                &object.meta.namespace,
                object.spec.selector.as_ref(),
                object.spec.target_ref.iter().chain(&object.spec.target_refs),
            ),
            Object::Telemetry(object) => self.attached_text(
                &object.meta.namespace,
                object.spec.selector.as_ref(),
                object.spec.target_ref.iter().chain(&object.spec.target_refs),
            ),
            Object::RequestAuthentication(object) => {
                let issuers = object.spec.jwt_rules.iter().map(|rule| rule.issuer.clone());
                let workloads = self.attached_text(
                    &object.meta.namespace,
                    object.spec.selector.as_ref(),
                    object.spec.target_ref.iter().chain(&object.spec.target_refs),
                );
                format!("requests with tokens to {workloads}; accepted issuers: {}", list(issuers.collect()))
            }
            Object::ConfigMap(object) if matches!(object.spec, ConfigMap::Mesh(_)) => {
                "all proxies of the mesh".to_owned()
            }
            _ => return None,
        })
    }

    /// Returns text for the workloads that a policy selects, or for the objects that it is attached to.
    fn attached_text<'t>(
        &self,
        namespace: &str,
        selector: Option<&WorkloadSelector>,
        targets: impl Iterator<Item = &'t TargetRef>,
    ) -> String {
        let targets: Vec<String> =
            targets.map(|target| format!("{} {namespace}/{}", target.kind, target.name)).collect();
        if targets.is_empty() { self.workloads_text(namespace, selector) } else { list(targets) }
    }

    fn workloads_text(&self, namespace: &str, selector: Option<&WorkloadSelector>) -> String {
        let labels = selector.map(|selector| &selector.match_labels).filter(|labels| !labels.is_empty());
        let labels =
            labels.map_or_else(String::new, |labels| format!(" with the labels {}", label_text(labels)));
        match namespace == self.after.mesh().root_namespace {
            true => format!("all workloads of the mesh{labels}"),
            false => format!("workloads of namespace {namespace}{labels}"),
        }
    }
}

fn list(mut names: Vec<String>) -> String {
    let more = names.len().saturating_sub(MAX_LISTED);
    names.truncate(MAX_LISTED);
    let names = names.join(", ");
    if more == 0 { names } else { format!("{names} and {more} more") }
}

#[cfg(test)]
mod tests;
