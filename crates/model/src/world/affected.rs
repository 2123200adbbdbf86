//! Further estimates of what a change may affect ([`change_set`](super::change_set)): objects that concern some
//! workloads or gateways only.

use std::collections::BTreeSet;

use super::{
    ChangeSet, World,
    change_set::AffectedWorkloads,
    mesh_hosts,
    policy::{affected_workloads, is_wide, selected},
    sidecar::{destinations, targets},
};
use crate::api::{
    DestinationRule, Kind, Labels, MtlsMode, ObjectKey, PeerAuthentication, Protocol, Service, Typed,
    VirtualService, kube::TrafficDistribution, sidecar::Egress,
};

/// Hosts of a VirtualService of the mesh, the namespaces that see it, and the hosts to which it sends requests. With a
/// Sidecar, a client sees the destinations of the VirtualServices that it sees.
#[derive(PartialEq)]
pub(super) struct ImportFacts {
    hosts: Vec<String>,
    export_to: Vec<String>,
    targets: BTreeSet<String>,
}

impl World {
    /// Returns the resources that depend on a Namespace. Unless visibility depends on its labels, they affect only
    /// internal objects of the Gateway API ([`World::settle`]) and the topology.
    pub(super) fn changes_of_namespace(&self, name: &str) -> ChangeSet {
        let entry = self.namespaces.get("", name).map(|entry| &entry.object.meta.annotations);
        if self.has_visibility_by_labels() {
            return ChangeSet::everything();
        }
        let distributes = entry.is_some_and(|of| TrafficDistribution::of_annotation(of).is_some());
        if !distributes {
            return ChangeSet::default();
        }
        ChangeSet { services: self.services_in(name), ..ChangeSet::default() }
    }

    /// Returns the resources that depend on a PeerAuthentication: the listeners of its namespace, and the services with
    /// endpoints there if any PeerAuthentication disables mutual TLS. One of the root namespace affects everything.
    pub(super) fn changes_of_peer_authentication(&self, namespace: &str, name: &str) -> ChangeSet {
        let policy = self.peer_authentications.get(namespace, name).map(|entry| &entry.object.spec);
        let Some(policy) = policy else { return ChangeSet::default() };
        if namespace == self.mesh().root_namespace {
            return ChangeSet::everything();
        }
        let mut changes =
            ChangeSet::of_workloads(namespace, affected_workloads(policy.selector.as_ref(), [].into_iter()));
        if !self.peer_authentications.iter().any(|entry| disables(&entry.object.spec)) {
            return changes;
        }
        let selects = |labels: &Labels| selected(policy.selector.as_ref(), labels);
        let is_wide = is_wide(policy.selector.as_ref());
        // Services of the namespace, and those of others whose slices have addresses of its pods.
        changes.services.extend(self.services_in(namespace));
        for slice in self.slices.iter().map(|entry| &entry.object) {
            let mut pods = slice.spec.endpoints.iter().filter_map(|endpoint| self.pod_by_ip(endpoint.ip));
            if pods.any(|pod| pod.meta.namespace == namespace && (is_wide || selects(&pod.meta.labels))) {
                changes.services.insert((slice.meta.namespace.clone(), slice.spec.service.clone()));
            }
        }
        changes
    }

    /// Returns the workloads to which a policy of its namespace applies.
    pub(super) fn selected_workloads(&self, key: &ObjectKey) -> Option<BTreeSet<AffectedWorkloads>> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        macro_rules! of {
            ($store:ident) => {{
                let spec = &self.$store.get(namespace, name)?.object.spec;
                affected_workloads(spec.selector.as_ref(), spec.target_ref.iter().chain(&spec.target_refs))
            }};
        }
        Some(match key.kind {
            Kind::AuthorizationPolicy => of!(authorization_policies),
            Kind::RequestAuthentication => of!(request_authentications),
            Kind::Telemetry => of!(telemetries),
            Kind::WasmPlugin => of!(wasm_plugins),
            Kind::TrafficExtension => {
                let spec = &self.traffic_extensions.get(namespace, name)?.object.spec;
                affected_workloads(spec.selector.as_ref(), spec.target_refs.iter())
            }
            _ => BTreeSet::from([AffectedWorkloads::ALL]),
        })
    }

    /// Returns the resources that depend on a Sidecar beside those of the scopes of its workloads
    /// ([`Grouping`](super::Grouping)): the listeners of its namespace. One of the root namespace affects everything.
    pub(super) fn changes_of_sidecar(&self, namespace: &str, name: &str) -> ChangeSet {
        let Some(entry) = self.sidecars.get(namespace, name) else { return ChangeSet::default() };
        if namespace == self.mesh().root_namespace {
            return ChangeSet::everything();
        }
        let labels = entry.object.spec.workload_selector.as_ref().map(|selector| selector.labels.clone());
        let selected = AffectedWorkloads::Labelled(labels.unwrap_or_default());
        let mut changes = ChangeSet::of_workloads(namespace, [selected]);
        // The address of a pod is part of its view if a Sidecar defines its inbound ports.
        if self.sidecars.in_namespace(namespace).any(|entry| !entry.object.spec.ingress.is_empty())
            || !entry.object.spec.ingress.is_empty()
        {
            let pods = self.pods.in_namespace(namespace).map(|entry| &entry.object.meta);
            changes.pods.extend(pods.map(|pod| (pod.namespace.clone(), pod.name.clone())));
        }
        changes
    }

    /// Returns the resources that depend on an EnvoyFilter. Those that proxies share depend on it by the assignment of
    /// views to scopes ([`Grouping`](super::Grouping)).
    pub(super) fn changes_of_envoy_filter(&self, namespace: &str, name: &str) -> ChangeSet {
        let Some(entry) = self.envoy_filters.get(namespace, name) else { return ChangeSet::default() };
        let patches = &entry.object.spec.config_patches;
        let is_wide = namespace == self.mesh().root_namespace;
        let concerns_views = patches.iter().any(|patch| patch.metadata_keys().next().is_some());
        if concerns_views || patches.iter().any(|patch| patch.apply_to.is_shared()) {
            return ChangeSet::everything();
        }
        let labels = entry.object.spec.workload_selector.as_ref().map(|selector| selector.labels.clone());
        let selected = match entry.object.spec.target_refs.is_empty() {
            true => AffectedWorkloads::Labelled(labels.unwrap_or_default()),
            false => AffectedWorkloads::ALL,
        };
        let workloads = (!is_wide).then_some(selected);
        ChangeSet { workloads: is_wide, ..ChangeSet::of_workloads(namespace, workloads) }
    }

    /// Returns the services of a namespace.
    fn services_in(&self, namespace: &str) -> BTreeSet<(String, String)> {
        let services = self.services.in_namespace(namespace).map(|entry| &entry.object.meta);
        services.map(|service| (service.namespace.clone(), service.name.clone())).collect()
    }

    /// Returns the gateways whose resources depend on the services of a host: those with a route to it, and those
    /// between networks.
    pub(super) fn gateways_of_host(&self, host: &str) -> ChangeSet {
        if self.services.iter().any(|entry| entry.object.spec.external_name.is_some()) {
            // A route may have the name of an ExternalName Service that stands for the host.
            return ChangeSet { gateway_routes: true, ..ChangeSet::default() };
        }
        let mut gateways: BTreeSet<Labels> =
            self.network_gateways().into_iter().map(|of| of.selector).collect();
        for entry in self.virtual_services.iter() {
            let (meta, spec) = (&entry.object.meta, &entry.object.spec);
            if spec.hosts.is_empty() {
                if leads_to(&entry.object, host) {
                    let roots = self.roots_of(&meta.namespace, &meta.name);
                    roots.for_each(|root| gateways.extend(self.selectors_of(&root.object)));
                }
            } else if spec.gateways.iter().any(|name| name != "mesh") && leads_to(&entry.object, host) {
                gateways.extend(self.selectors_of(&entry.object));
            }
        }
        ChangeSet { gateways, ..ChangeSet::default() }
    }

    /// Returns whether a service has ports whose listeners depend on the service itself and its DestinationRule.
    pub(super) fn has_own_listeners(&self, service: &Typed<Service>) -> bool {
        let mut ports = service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp);
        self.is_provider_host(&service.fqdn()) || ports.any(|port| !port.protocol.is_http())
    }

    /// Returns whether a workload with a Sidecar may see a service, and no other service with HTTP on this port.
    pub(super) fn is_alone_for_sidecars(&self, service: &Typed<Service>, port: u16) -> bool {
        let host = service.fqdn();
        let root = &self.mesh().root_namespace;
        self.sidecars.iter().any(|entry| {
            let Some(egress) = entry.object.spec.egress() else { return false };
            let client = entry.object.meta.namespace.as_str();
            let imports = |of: &Typed<Service>, host: &str| {
                let listeners = &egress.listeners;
                listeners.iter().any(|listener| listener.imports(client, &of.meta.namespace, host))
            };
            if egress.listeners.is_empty() {
                return false;
            }
            if client == root || !is_plain(&egress) {
                return true;
            }
            let has_http =
                |of: &Typed<Service>| of.spec.port(port).is_some_and(|port| port.protocol.is_http());
            imports(service, &host)
                && !self.services().any(|other| {
                    other.meta != service.meta
                        && other.spec.entry_host.is_none()
                        && other.spec.external_name.is_none()
                        && has_http(other)
                        && imports(other, &other.fqdn())
                        && self.service_visible(other, client)
                })
        })
    }

    /// Returns whether a DestinationRule of a host (full name) selects endpoints by a hash. Routes to the host then
    /// have the hash policy.
    pub(super) fn hashes(&self, host: &str) -> bool {
        let wild = self.destination_rule_hosts.wildcards(host);
        let names = wild.flat_map(|pattern| self.destination_rule_hosts.get(pattern));
        let names = names.chain(self.destination_rule_hosts.get(host));
        let mut rules =
            names.filter_map(|(namespace, name)| Some(&self.destination_rules.get(namespace, name)?.object));
        rules.any(|rule| has_hash(&rule.spec))
    }

    /// Returns the properties of a VirtualService that decide what clients with a Sidecar see; `None` for other kinds.
    pub(super) fn imports_of(&self, key: &ObjectKey) -> Option<ImportFacts> {
        let entry = Some(key).filter(|key| key.kind == Kind::VirtualService && self.has_sidecars());
        let entry = entry.and_then(|key| self.virtual_services.get(&key.namespace, &key.name))?;
        Some(ImportFacts {
            hosts: mesh_hosts(&entry.object),
            export_to: self.virtual_service_export_to(entry).to_vec(),
            targets: targets(&entry.object),
        })
    }

    /// Returns the resources that differ because clients with a Sidecar see other services than before.
    pub(super) fn changes_of_imports(
        &self,
        before: &Option<ImportFacts>,
        after: &Option<ImportFacts>,
    ) -> ChangeSet {
        if before == after {
            return ChangeSet::default();
        }
        let targets = before.iter().chain(after).flat_map(|facts| &facts.targets);
        let services = targets.filter_map(|host| self.service(host));
        let services: BTreeSet<(String, String)> =
            services.map(|service| (service.meta.namespace.clone(), service.meta.name.clone())).collect();
        ChangeSet { names: !services.is_empty(), services, ..ChangeSet::default() }
    }
}

/// Returns whether a DestinationRule selects endpoints by a hash.
pub(super) fn has_hash(rule: &DestinationRule) -> bool {
    rule.balancers().any(|balancer| balancer.consistent_hash.is_some())
}

/// Returns whether a policy disables mutual TLS somewhere.
fn disables(policy: &PeerAuthentication) -> bool {
    let modes = policy.mtls.iter().chain(policy.port_level_mtls.values()).map(|mtls| mtls.mode);
    modes.into_iter().any(|mode| mode == MtlsMode::Disable)
}

/// Returns whether a VirtualService sends requests or connections to a host.
fn leads_to(rule: &Typed<VirtualService>, host: &str) -> bool {
    destinations(rule).any(|to| to == host)
}

/// Returns whether egress listeners have no ports or addresses of their own.
fn is_plain(egress: &Egress) -> bool {
    egress.listeners.iter().all(|listener| listener.port.is_none() && !listener.is_bound())
}
