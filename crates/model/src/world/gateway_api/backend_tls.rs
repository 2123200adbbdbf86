//! BackendTLSPolicies as DestinationRules of Istio's form: one for each host of their targets.

use std::collections::{BTreeMap, BTreeSet};

use super::{DerivedObjects, Route, RouteRules};
use crate::{
    api::{
        BackendTlsPolicy, DestinationRule, Kind, Meta, ObjectKey, TrafficPolicy,
        destination_rule::{ClientTls, ClientTlsMode, PortTrafficPolicy},
        gateway_api::{GROUP, INTERNAL, ISTIO_GROUP, ObjectReference, ParentReference, SanType},
        value::PortSelector,
    },
    origin::Origin,
    world::{World, store::Entry},
};

/// Scheme of credentials that are ConfigMaps with roots: `configmap://NAMESPACE/NAME`.
pub(crate) const CONFIG_MAP: &str = "configmap://";
/// Credential of a policy without usable roots: no connection is made, neither in plain text nor without verification.
pub(crate) const INVALID: &str = "invalid://";
/// Well-known roots: those of the proxy's system.
const SYSTEM: &str = "System";
/// Annotation by which a policy has no effect.
const IGNORED: &str = "istio.io/ignore-policy-attachment";

/// Reason and message of a refusal.
pub(super) type Reason = (&'static str, String);

/// Object to which a policy applies.
struct PolicyTarget {
    key: ObjectKey,
    /// Hosts of the object.
    hosts: Vec<String>,
    /// Port to which the policy applies; `None`: all.
    port: Option<u16>,
}

/// Outcome for one target of a policy.
pub(super) struct Outcome<'a> {
    pub(super) reference: &'a ObjectReference,
    /// Reason for which the policy does not apply to the target.
    pub(super) refusal: Option<Reason>,
    target: Option<PolicyTarget>,
}

/// A policy, and what becomes of it.
pub(super) struct ResolvedPolicy<'a> {
    pub(super) meta: &'a Meta,
    origin: &'a Origin,
    spec: &'a BackendTlsPolicy,
    /// Credential with the roots, empty for those of the system; fails with the reason if they cannot be used.
    pub(super) roots: Result<String, Reason>,
    pub(super) outcomes: Vec<Outcome<'a>>,
}

/// Rules by target and host.
type ByTarget<'a> = BTreeMap<(ObjectKey, String), (TrafficPolicy, (&'a Meta, &'a Origin))>;

impl World {
    /// Makes the DestinationRules of BackendTLSPolicies. Adds their targets to `parents`.
    pub(super) fn make_backend_tls(&self, made: &mut DerivedObjects, parents: &mut BTreeSet<ObjectKey>) {
        let policies = self.backend_tls();
        let mut rules: ByTarget<'_> = BTreeMap::new();
        for policy in &policies {
            let namespace = &policy.meta.namespace;
            parents.extend(policy.spec.target_refs.iter().filter_map(|of| target_key(of, namespace)));
            for outcome in policy.outcomes.iter().filter(|outcome| outcome.refusal.is_none()) {
                let Some(target) = &outcome.target else { continue };
                for host in &target.hosts {
                    let key = (target.key.clone(), host.clone());
                    let (rule, _) = rules
                        .entry(key)
                        .or_insert_with(|| (TrafficPolicy::default(), (policy.meta, policy.origin)));
                    set(rule, target.port, policy.tls());
                }
            }
        }
        for ((target, host), (policy, of)) in rules {
            let name = match target.kind {
                Kind::Service => format!("{}~{INTERNAL}", target.name),
                _ => format!("{}~{}~{INTERNAL}", target.name, host.replace('.', "-")),
            };
            let spec = DestinationRule {
                host,
                traffic_policy: Some(policy),
                is_derived: true,
                ..DestinationRule::default()
            };
            made.add(&target.namespace, name, of, spec);
        }
    }

    /// Returns all policies, those with precedence first.
    pub(super) fn backend_tls(&self) -> Vec<ResolvedPolicy<'_>> {
        let is_ignored = |entry: &&Entry<BackendTlsPolicy>| {
            entry.object.meta.annotations.get(IGNORED).is_some_and(|value| value == "true")
        };
        let mut entries: Vec<_> =
            self.backend_tls_policies.iter().filter(|entry| !is_ignored(entry)).collect();
        entries.sort_by(|a, b| {
            let key = |entry: &Entry<BackendTlsPolicy>| {
                let meta = &entry.object.meta;
                (meta.created.unwrap_or(i64::MAX), meta.namespace.clone(), meta.name.clone())
            };
            key(a).cmp(&key(b))
        });
        let mut taken: BTreeMap<(ObjectKey, Option<&str>), &str> = BTreeMap::new();
        let mut policies = Vec::new();
        for entry in entries {
            let (meta, spec) = (&entry.object.meta, &entry.object.spec);
            let outcomes = spec.target_refs.iter().map(|reference| {
                let (target, mut refusal) = match self.policy_target(reference, &meta.namespace) {
                    Ok(target) => (Some(target), None),
                    Err(message) => (None, Some(("TargetNotFound", message))),
                };
                if let Some(target) = &target {
                    let place = (target.key.clone(), reference.section_name.as_deref());
                    let first = *taken.entry(place).or_insert(&meta.name);
                    if first != meta.name {
                        let message =
                            format!("Conflicts with BackendTLSPolicy {first:?} targeting the same backend");
                        refusal = Some(("Conflicted", message));
                    }
                }
                Outcome { reference, refusal, target }
            });
            let outcomes = outcomes.collect();
            let roots = self.policy_roots(meta, spec);
            policies.push(ResolvedPolicy { meta, origin: &entry.origin, spec, roots, outcomes });
        }
        policies
    }

    /// Returns the target of a reference; fails with the reason.
    fn policy_target(&self, of: &ObjectReference, namespace: &str) -> Result<PolicyTarget, String> {
        let kind = of.kind.as_deref().unwrap_or("Service");
        let Some(key) = target_key(of, namespace) else {
            return Err(format!("targetRefs invalid: unsupported reference kind: {kind}"));
        };
        let missing = || format!("targetRefs invalid: {kind} {namespace}/{} not found", of.name);
        let hosts: Vec<String> = match key.kind {
            Kind::Service => {
                let service = self.service_named(namespace, &of.name);
                let service = service.filter(|service| service.spec.entry_host.is_none());
                vec![service.ok_or_else(missing)?.fqdn()]
            }
            _ => {
                let entry = self.service_entries.get(namespace, &of.name);
                entry.ok_or_else(missing)?.object.spec.hosts.clone()
            }
        };
        let section = of.section_name.as_deref().filter(|section| !section.is_empty());
        let port = section.map(|section| {
            let services = hosts.iter().filter_map(|host| match key.kind {
                Kind::Service => self.service_named(namespace, &of.name),
                _ => self.service_named(namespace, host),
            });
            let mut ports = services.flat_map(|service| &service.spec.ports);
            let found = ports.find(|port| port.name == section).map(|port| port.port);
            found.ok_or_else(|| {
                format!(
                    "targetRefs invalid: sectionName {section:?} does not exist in {kind} {namespace}/{}",
                    of.name
                )
            })
        });
        Ok(PolicyTarget { key, hosts, port: port.transpose()? })
    }

    /// Returns the credential with the roots of a policy.
    fn policy_roots(&self, meta: &Meta, spec: &BackendTlsPolicy) -> Result<String, Reason> {
        let validation = &spec.validation;
        match (validation.well_known_ca_certificates.as_deref(), validation.ca_certificate_refs.first()) {
            (Some(SYSTEM), _) | (None, None) => Ok(String::new()),
            (Some(other), _) => Err(("Invalid", format!("Unknown wellKnownCACertificates: {other}"))),
            (None, Some(of)) => {
                let kind = of.kind.as_deref().unwrap_or("ConfigMap");
                if (of.group.as_deref().unwrap_or_default(), kind) != ("", "ConfigMap") {
                    let message = format!("Certificate reference not supported: unsupported kind {kind}");
                    return Err(("InvalidKind", message));
                }
                match self.root_map(&meta.namespace, &of.name) {
                    Some(_) => Ok(format!("{CONFIG_MAP}{}/{}", meta.namespace, of.name)),
                    None => Err((
                        "InvalidCACertificateRef",
                        format!(
                            "Certificate reference not found: ConfigMap {}/{} with certificates in key ca.crt",
                            meta.namespace, of.name
                        ),
                    )),
                }
            }
        }
    }

    /// Returns the Gateways whose routes have an object as their backend.
    pub(super) fn gateways_of_backend(
        routes: &[Route<'_>],
        policy: &ResolvedPolicy<'_>,
    ) -> BTreeSet<(String, String)> {
        let keys: Vec<&ObjectKey> = policy
            .outcomes
            .iter()
            .filter_map(|outcome| outcome.target.as_ref().map(|target| &target.key))
            .collect();
        let mut gateways = BTreeSet::new();
        for route in routes.iter().filter(|route| matches!(route.rules, RouteRules::Http(_))) {
            let own = &route.meta.namespace;
            let leads = route.backends.iter().any(|backend| {
                let namespace = backend.namespace.as_ref().unwrap_or(own);
                keys.iter().any(|key| {
                    (key.kind.as_str(), &key.namespace, &key.name)
                        == (backend.group_kind().1, namespace, &backend.name)
                })
            });
            let parents = route.parents.iter().filter(|of| leads && of.group_kind() == (GROUP, "Gateway"));
            gateways.extend(
                parents.map(|of| (of.namespace.clone().unwrap_or_else(|| own.clone()), of.name.clone())),
            );
        }
        gateways
    }
}

impl ResolvedPolicy<'_> {
    /// Returns the settings of TLS. As Gateway API demands, a certificate must have the host name if no other names are
    /// listed.
    fn tls(&self) -> ClientTls {
        let validation = &self.spec.validation;
        let mut names: Vec<String> = validation
            .subject_alt_names
            .iter()
            .map(|of| match of.kind {
                SanType::Hostname => of.hostname.clone(),
                SanType::Uri => of.uri.clone(),
            })
            .collect();
        if names.is_empty() {
            names.push(validation.hostname.clone());
        }
        ClientTls {
            mode: ClientTlsMode::Simple,
            sni: validation.hostname.clone(),
            subject_alt_names: names,
            credential_name: self.roots.clone().unwrap_or_else(|_| INVALID.to_owned()),
            is_of_backend: true,
            ..ClientTls::default()
        }
    }
}

/// Sets TLS of a port, or of all ports, unless it is set.
fn set(rule: &mut TrafficPolicy, port: Option<u16>, tls: ClientTls) {
    let Some(port) = port else {
        rule.tls.get_or_insert(tls);
        return;
    };
    let number = u32::from(port);
    if rule.port_level_settings.iter().all(|known| known.port.number != number) {
        let port = PortSelector { number };
        rule.port_level_settings.push(PortTrafficPolicy { port, tls: Some(tls), ..Default::default() });
        rule.port_level_settings.sort_by_key(|known| known.port.number);
    }
}

/// Returns the key of a target; `None` for a kind that no policy may have.
fn target_key(of: &ObjectReference, namespace: &str) -> Option<ObjectKey> {
    let kind = match (of.group.as_deref().unwrap_or_default(), of.kind.as_deref().unwrap_or("Service")) {
        ("", "Service") => Kind::Service,
        (ISTIO_GROUP, "ServiceEntry") => Kind::ServiceEntry,
        _ => return None,
    };
    Some(ObjectKey { kind, namespace: namespace.to_owned(), name: of.name.clone() })
}

/// Returns a reference as a parent in a status.
pub(super) fn ancestor(of: &ObjectReference) -> ParentReference {
    ParentReference {
        group: Some(of.group.clone().unwrap_or_default()),
        kind: Some(of.kind.clone().unwrap_or_else(|| "Service".to_owned())),
        name: of.name.clone(),
        section_name: of.section_name.clone(),
        ..ParentReference::default()
    }
}

#[cfg(test)]
mod tests;
