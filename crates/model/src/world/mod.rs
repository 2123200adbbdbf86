//! All objects of the mesh, typed and indexed. Synchronous: three methods change objects, all others only read them.
//!
//! [`World::apply`], [`World::delete`] and [`World::reset`] maintain the indexes. `hosts` finds the objects of a host
//! name, `endpoints` those of a service, `policy` those of a workload. `check` reports inconsistent objects, and
//! `identify` determines the properties of a proxy.
//!
//! A clone of the World shares all maps and costs a few dozen reference counts. A change copies only what it changes:
//! the map of the object's kind and namespace, and the indexes of the kind.

mod affected;
mod aliases;
mod auto_addresses;
mod change_set;
mod check;
mod delegates;
mod destination_rules;
mod effect;
mod endpoints;
mod entry_hosts;
mod envoy_filters;
mod extensions;
mod gateway_api;
mod gateways;
mod hosts;
mod identify;
mod index;
mod origins;
mod policy;
mod providers;
mod rate_limits;
mod reach;
mod registration;
mod sidecar;
mod special;
mod store;
mod tokens;
mod topology;
mod workload_entries;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, OnceLock},
};

pub use change_set::{AffectedWorkloads, ChangeSet};
pub use check::Validator;
pub(crate) use check::label_text;
pub use effect::{Effect, Effects};
pub use endpoints::Endpoint;
pub use entry_hosts::Resolved;
pub use envoy_filters::{FilterSelection, SharedFilters};
pub(crate) use extensions::{AppliedExtension, ExtensionEffect};
pub(crate) use gateway_api::{CONFIG_MAP, CREDENTIAL, INVALID, ROOTS, shown_name};
pub use gateway_api::{
    CONTROLLERS, ClusterStatus, GatewayApiStatus, GatewayDeployment, ListenerStatus, OWN_CLASS,
    ObjectCondition, ParentStatus, StatusCondition,
};
pub(crate) use gateways::{BoundRule, GatewayHosts, SECRET, gateway_name, is_within};
pub(crate) use hosts::WELL_KNOWN_PORT;
pub use hosts::{exported, fqdn, host_matches};
pub use identify::AccountMismatch;
use index::{HostIndex, LabelIndex, MultiMap};
pub(crate) use rate_limits::AppliedLimit;
pub use reach::{Reach, ReachIndex, ReachedResources};
pub use registration::RegistrationError;
pub use sidecar::Grouping;
pub use special::{NamespaceFacts, NamespaceOverrides};
use store::{Entry, Store};
pub(crate) use tokens::is_url;
pub use tokens::{KeyFetch, KeySource};
pub(crate) use topology::{NetworkGateway, Topology};
pub use workload_entries::Addressed;

use crate::{
    api::{
        AuthorizationPolicy, BackendTlsPolicy, ConfigMap, DestinationRule, EndpointSlice, EntryEndpoint,
        EnvoyFilter, Gateway, GatewayClass, GrpcRoute, HttpRoute, Ingress, IngressClass, Kind, Labels,
        ListenerSet, MeshConfig, Meta, Node, Object, ObjectKey, PeerAuthentication, Pod, ProxyConfig,
        RateLimitPolicy, ReferenceGrant, RequestAuthentication, Secret, Service, ServiceEntry, Sidecar,
        TcpRoute, Telemetry, Template, TlsRoute, TrafficExtension, Typed, VirtualService, WasmPlugin,
        WorkloadEntry, WorkloadGroup,
        destination_rule::{LoadBalancer, LocalityLb, ZoneAwareLb},
        gateway_api as gateway_api_kinds,
        kube::Locality,
        mesh_config, selects,
    },
    origin::Origin,
};

/// Domain of services.
pub const DOMAIN: &str = "cluster.local";

/// All objects of the mesh.
#[derive(Clone, Debug, Default)]
pub struct World {
    mesh: Option<Entry<ConfigMap>>,
    default_mesh: Arc<MeshConfig>,
    /// Roots of the mesh's own authority, PEM.
    roots: Arc<str>,
    namespaces: Store<()>,
    nodes: Store<Node>,
    /// Services of Kubernetes, and one for each host of a ServiceEntry.
    services: Store<Service>,
    service_accounts: Store<()>,
    pods: Store<Pod>,
    /// Secrets with certificates, keys or roots.
    secrets: Store<Secret>,
    /// Workloads by kind, such as Deployments.
    templates: BTreeMap<Kind, Store<Template>>,
    slices: Store<EndpointSlice>,
    virtual_services: Store<VirtualService>,
    destination_rules: Store<DestinationRule>,
    service_entries: Store<ServiceEntry>,
    peer_authentications: Store<PeerAuthentication>,
    authorization_policies: Store<AuthorizationPolicy>,
    gateways: Store<Gateway>,
    sidecars: Store<Sidecar>,
    workload_entries: Store<WorkloadEntry>,
    workload_groups: Store<WorkloadGroup>,
    proxy_configs: Store<ProxyConfig>,
    envoy_filters: Store<EnvoyFilter>,
    request_authentications: Store<RequestAuthentication>,
    telemetries: Store<Telemetry>,
    ingresses: Store<Ingress>,
    ingress_classes: Store<IngressClass>,
    gateway_classes: Store<GatewayClass>,
    kubernetes_gateways: Store<gateway_api_kinds::KubernetesGateway>,
    listener_sets: Store<ListenerSet>,
    http_routes: Store<HttpRoute>,
    grpc_routes: Store<GrpcRoute>,
    tls_routes: Store<TlsRoute>,
    tcp_routes: Store<TcpRoute>,
    reference_grants: Store<ReferenceGrant>,
    backend_tls_policies: Store<BackendTlsPolicy>,
    wasm_plugins: Store<WasmPlugin>,
    traffic_extensions: Store<TrafficExtension>,
    rate_limit_policies: Store<RateLimitPolicy>,
    /// ConfigMaps without settings of the mesh. Of those without certificates, only the name is kept.
    other_config_maps: Store<ConfigMap>,

    /// Pods by namespace and label.
    pod_labels: LabelIndex,
    /// Pods by address.
    pod_ips: MultiMap<std::net::IpAddr>,
    /// Endpoints of WorkloadEntries, with their labels.
    entry_workloads: Store<EntryEndpoint>,
    /// WorkloadEntries by namespace and label.
    workload_labels: LabelIndex,
    /// WorkloadEntries by address.
    workload_ips: MultiMap<std::net::IpAddr>,
    /// Services by the addresses of their own endpoints: those of ServiceEntries and of EndpointSlices.
    endpoint_ips: MultiMap<std::net::IpAddr>,
    /// EndpointSlices by (namespace, service).
    service_slices: MultiMap<(String, String)>,
    /// VirtualServices of the mesh by host.
    virtual_service_hosts: HostIndex,
    /// VirtualServices of the mesh by the hosts to which they send requests.
    virtual_service_targets: MultiMap<String>,
    /// DestinationRules by host.
    destination_rule_hosts: HostIndex,
    /// ServiceEntries by host.
    entry_hosts: MultiMap<String>,
    /// Addresses allocated to hosts of ServiceEntries; `None` if no allocator runs.
    allocated: Option<Arc<BTreeMap<String, std::net::IpAddr>>>,
    /// Addresses that the control plane allocates itself.
    auto_addresses: Arc<auto_addresses::AutoAddresses>,
    /// Services of ServiceEntries by the names of their endpoints.
    name_users: MultiMap<Arc<str>>,
    /// DNS answers by name.
    resolved: Arc<HashMap<Arc<str>, Resolved>>,
    /// Internal objects made from those of Gateway API.
    gateway_api: gateway_api::State,
    /// Key sets that the control plane fetched.
    key_sets: Arc<HashMap<KeySource, Arc<str>>>,
    /// Networks and gateways; made when they are read.
    topology: OnceLock<Arc<Topology>>,
    /// Topology at the last [`World::take_changes`].
    last_topology: Arc<Topology>,
    /// What may have changed since the last [`World::take_changes`]; `None` before the first call.
    changes: Option<ChangeSet>,
}

impl World {
    /// Creates a World without objects.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the default access log file for a mesh configuration without one; empty disables the log.
    #[must_use]
    pub fn with_access_log(mut self, file: &str) -> Self {
        Arc::make_mut(&mut self.default_mesh).access_log_file = Some(file.to_owned());
        self
    }

    /// Adds an object or replaces the one of the same key. Returns false if nothing changed.
    pub fn apply(&mut self, object: Object, origin: Origin) -> bool {
        let key = object.key();
        let mut changes = self.changes_of(&key);
        let mut affects_topology = self.affects_topology(&key);
        let imports = self.imports_of(&key);
        let is_mesh = key.kind == Kind::ConfigMap && key.name == mesh_config::NAME && affects_topology;
        let mesh = self.mesh.as_ref().filter(|_| is_mesh).map(|entry| Arc::clone(&entry.object));
        let changed = self.put(object, origin);
        if changed {
            changes.add(self.changes_of(&key));
            changes.add(self.changes_of_imports(&imports, &self.imports_of(&key)));
            if mesh.is_some_and(|mesh| self.has_same_mesh(&mesh.spec)) {
                // The networks have an effect through the topology alone.
                changes = ChangeSet::default();
            }
            affects_topology |= self.affects_topology(&key);
            if affects_topology {
                self.topology.take();
            }
            self.add_changes(changes);
            self.mark_gateway_api(&key);
        }
        changed
    }

    fn add_changes(&mut self, more: ChangeSet) {
        if let Some(changes) = &mut self.changes {
            changes.add(more);
        }
    }

    fn put(&mut self, object: Object, origin: Origin) -> bool {
        match object {
            Object::Namespace(object) => self.namespaces.insert(object, origin),
            Object::Node(object) => self.nodes.insert(object, origin),
            Object::Service(object) => self.services.insert(object, origin),
            Object::ServiceAccount(object) => self.service_accounts.insert(object, origin),
            Object::Template(object) => {
                self.templates.entry(object.spec.kind).or_default().insert(object, origin)
            }
            Object::Secret(object) if object.spec.is_empty() => {
                self.secrets.remove(&object.meta.namespace, &object.meta.name)
            }
            Object::Secret(object) => self.secrets.insert(object, origin),
            Object::PeerAuthentication(object) => self.peer_authentications.insert(object, origin),
            Object::AuthorizationPolicy(object) => self.authorization_policies.insert(object, origin),
            Object::ConfigMap(object) => self.apply_config_map(object, origin),
            Object::Gateway(object) => self.gateways.insert(object, origin),
            Object::Sidecar(object) => self.sidecars.insert(object, origin),
            Object::WorkloadEntry(object) => self.put_workload_entry(object, origin),
            Object::WorkloadGroup(object) => self.workload_groups.insert(object, origin),
            Object::ProxyConfig(object) => self.proxy_configs.insert(object, origin),
            Object::EnvoyFilter(object) => self.envoy_filters.insert(object, origin),
            Object::RequestAuthentication(object) => self.request_authentications.insert(object, origin),
            Object::Telemetry(object) => self.telemetries.insert(object, origin),
            Object::Ingress(object) => self.ingresses.insert(object, origin),
            Object::IngressClass(object) => self.ingress_classes.insert(object, origin),
            Object::GatewayClass(object) => self.gateway_classes.insert(object, origin),
            Object::KubernetesGateway(object) => self.kubernetes_gateways.insert(object, origin),
            Object::ListenerSet(object) => self.listener_sets.insert(object, origin),
            Object::HttpRoute(object) => self.http_routes.insert(object, origin),
            Object::GrpcRoute(object) => self.grpc_routes.insert(object, origin),
            Object::TlsRoute(object) => self.tls_routes.insert(object, origin),
            Object::TcpRoute(object) => self.tcp_routes.insert(object, origin),
            Object::ReferenceGrant(object) => self.reference_grants.insert(object, origin),
            Object::BackendTlsPolicy(object) => self.backend_tls_policies.insert(object, origin),
            Object::WasmPlugin(object) => self.wasm_plugins.insert(object, origin),
            Object::TrafficExtension(object) => self.traffic_extensions.insert(object, origin),
            Object::RateLimitPolicy(object) => self.rate_limit_policies.insert(object, origin),
            Object::Pod(object) => {
                self.unindex(Kind::Pod, &object.meta.namespace, &object.meta.name);
                self.index_pod(&object);
                self.pods.insert(object, origin)
            }
            Object::EndpointSlice(object) => {
                self.unindex(Kind::EndpointSlice, &object.meta.namespace, &object.meta.name);
                let service = (object.meta.namespace.clone(), object.spec.service.clone());
                self.service_slices.insert(service.clone(), &object.meta);
                let ips = addresses_of(&object);
                let changed = self.slices.insert(object, origin);
                ips.into_iter().for_each(|ip| self.endpoint_ips.insert_name(ip, service.clone()));
                changed
            }
            Object::VirtualService(object) => {
                self.unindex(Kind::VirtualService, &object.meta.namespace, &object.meta.name);
                for host in mesh_hosts(&object) {
                    self.virtual_service_hosts.insert(host, &object.meta);
                }
                for host in sidecar::targets(&object) {
                    self.virtual_service_targets.insert(host, &object.meta);
                }
                self.virtual_services.insert(object, origin)
            }
            Object::DestinationRule(object) => {
                self.unindex(Kind::DestinationRule, &object.meta.namespace, &object.meta.name);
                let host = hosts::fqdn(&object.spec.host, &object.meta.namespace);
                self.destination_rule_hosts.insert(host, &object.meta);
                self.destination_rules.insert(object, origin)
            }
            Object::ServiceEntry(object) => self.put_entry(object, origin),
        }
    }

    /// Removes an object. Returns false if it did not exist.
    pub fn delete(&mut self, key: &ObjectKey) -> bool {
        let mut changes = self.changes_of(key);
        let affects_topology = self.affects_topology(key);
        let imports = self.imports_of(key);
        let deleted = self.remove_object(key);
        if deleted {
            changes.add(self.changes_of_imports(&imports, &None));
            if affects_topology {
                self.topology.take();
            }
            self.add_changes(changes);
            self.mark_gateway_api(key);
        }
        deleted
    }

    fn remove_object(&mut self, key: &ObjectKey) -> bool {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        self.unindex(key.kind, namespace, name);
        match key.kind {
            Kind::Namespace => self.namespaces.remove(namespace, name),
            Kind::Node => self.nodes.remove(namespace, name),
            Kind::Service => self.services.remove(namespace, name),
            Kind::ServiceAccount => self.service_accounts.remove(namespace, name),
            Kind::Pod => self.pods.remove(namespace, name),
            Kind::Secret => self.secrets.remove(namespace, name),
            kind @ (Kind::Deployment
            | Kind::StatefulSet
            | Kind::DaemonSet
            | Kind::ReplicaSet
            | Kind::Job
            | Kind::CronJob) => {
                self.templates.get_mut(&kind).is_some_and(|templates| templates.remove(namespace, name))
            }
            Kind::EndpointSlice => self.slices.remove(namespace, name),
            Kind::ConfigMap => match (namespace, name) {
                (mesh_config::NAMESPACE, mesh_config::NAME) => self.mesh.take().is_some(),
                (mesh_config::NAMESPACE, mesh_config::ADDRESSES) => self.allocate(None),
                _ => self.other_config_maps.remove(namespace, name),
            },
            Kind::VirtualService => self.virtual_services.remove(namespace, name),
            Kind::DestinationRule => self.destination_rules.remove(namespace, name),
            Kind::ServiceEntry => self.remove_entry(namespace, name),
            Kind::PeerAuthentication => self.peer_authentications.remove(namespace, name),
            Kind::AuthorizationPolicy => self.authorization_policies.remove(namespace, name),
            Kind::Gateway => self.gateways.remove(namespace, name),
            Kind::Sidecar => self.sidecars.remove(namespace, name),
            Kind::WorkloadEntry => self.remove_workload_entry(namespace, name),
            Kind::WorkloadGroup => self.workload_groups.remove(namespace, name),
            Kind::ProxyConfig => self.proxy_configs.remove(namespace, name),
            Kind::EnvoyFilter => self.envoy_filters.remove(namespace, name),
            Kind::RequestAuthentication => self.request_authentications.remove(namespace, name),
            Kind::Telemetry => self.telemetries.remove(namespace, name),
            Kind::Ingress => self.ingresses.remove(namespace, name),
            Kind::IngressClass => self.ingress_classes.remove(namespace, name),
            Kind::GatewayClass => self.gateway_classes.remove(namespace, name),
            Kind::KubernetesGateway => self.kubernetes_gateways.remove(namespace, name),
            Kind::ListenerSet => self.listener_sets.remove(namespace, name),
            Kind::HttpRoute => self.http_routes.remove(namespace, name),
            Kind::GrpcRoute => self.grpc_routes.remove(namespace, name),
            Kind::TlsRoute => self.tls_routes.remove(namespace, name),
            Kind::TcpRoute => self.tcp_routes.remove(namespace, name),
            Kind::ReferenceGrant => self.reference_grants.remove(namespace, name),
            Kind::BackendTlsPolicy => self.backend_tls_policies.remove(namespace, name),
            Kind::WasmPlugin => self.wasm_plugins.remove(namespace, name),
            Kind::TrafficExtension => self.traffic_extensions.remove(namespace, name),
            Kind::RateLimitPolicy => self.rate_limit_policies.remove(namespace, name),
        }
    }

    /// Replaces all objects.
    pub fn reset(&mut self, objects: impl IntoIterator<Item = (Object, Origin)>) {
        let (roots, default_mesh) = (Arc::clone(&self.roots), Arc::clone(&self.default_mesh));
        *self = Self { roots, default_mesh, ..Self::new() };
        for (object, origin) in objects {
            self.apply(object, origin);
        }
        self.settle();
    }

    /// Returns the mesh configuration, or Istio's defaults.
    pub fn mesh(&self) -> &MeshConfig {
        match self.mesh.as_ref().map(|entry| &entry.object.spec) {
            Some(ConfigMap::Mesh(mesh)) => mesh,
            _ => &self.default_mesh,
        }
    }

    /// Returns the roots of the mesh's own authority, PEM; empty until known.
    pub fn roots(&self) -> &str {
        &self.roots
    }

    /// Sets the roots of the mesh's own authority. Returns true if resources of proxies depend on them.
    pub fn set_roots(&mut self, roots: &str) -> bool {
        let changed = *self.roots != *roots && self.mesh().binds_roots();
        self.roots = roots.into();
        if changed {
            self.add_changes(ChangeSet { everything: true, ..ChangeSet::default() });
        }
        changed
    }

    /// Returns the labels of a namespace, if it was declared.
    pub fn namespace(&self, name: &str) -> Option<&Labels> {
        self.namespaces.get("", name).map(|entry| &*entry.object.meta.labels)
    }

    /// Returns all services, by namespace and name.
    pub fn services(&self) -> impl Iterator<Item = &Arc<Typed<Service>>> {
        self.services.iter().map(|entry| &entry.object)
    }

    /// Returns the service of this name.
    pub fn service_named(&self, namespace: &str, name: &str) -> Option<&Arc<Typed<Service>>> {
        self.services.get(namespace, name).map(|entry| &entry.object)
    }

    /// Returns the file of a service, or of the ServiceEntry from which it is made.
    pub(crate) fn service_file(&self, namespace: &str, name: &str) -> Option<Arc<str>> {
        self.services.get(namespace, name).map(|entry| Arc::clone(&entry.origin.file))
    }

    /// Returns the keys of client labels on which shared resources depend: `sourceLabels` of routes, `workloadSelector`
    /// of DestinationRules, and `failoverPriority` without the node.
    fn label_keys(&self) -> BTreeSet<String> {
        let routes = self.virtual_services.iter().flat_map(|entry| &entry.object.spec.http);
        let matched = routes.flat_map(|route| &route.matches).flat_map(|found| found.source_labels.keys());
        let rules = || self.destination_rules.iter().map(|entry| &entry.object.spec);
        let selectors = rules().filter_map(|rule| rule.workload_selector.as_ref());
        let selected = selectors.flat_map(|selector| selector.match_labels.keys());
        let balanced = rules().flat_map(DestinationRule::balancers).flat_map(LoadBalancer::label_keys);
        let everywhere = self.mesh().locality_lb_setting.iter().flat_map(LocalityLb::label_keys);
        let zones = self.mesh().zone_aware_lb_setting.iter().flat_map(ZoneAwareLb::label_keys);
        matched.chain(selected).chain(balanced).chain(everywhere).chain(zones).cloned().collect()
    }

    /// Returns all pods, by namespace and name.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<Typed<Pod>>> {
        self.pods.iter().map(|entry| &entry.object)
    }

    /// Returns all objects that make pods, by kind, namespace and name.
    pub fn templates(&self) -> impl Iterator<Item = &Arc<Typed<Template>>> {
        self.templates.values().flat_map(Store::iter).map(|entry| &entry.object)
    }

    /// Returns the pod of this name.
    pub fn pod(&self, namespace: &str, name: &str) -> Option<&Arc<Typed<Pod>>> {
        self.pods.get(namespace, name).map(|entry| &entry.object)
    }

    /// Returns the pod with this address. Ignores pods that have ended or share the address of their node.
    pub fn pod_by_ip(&self, ip: std::net::IpAddr) -> Option<&Arc<Typed<Pod>>> {
        self.pod_ips
            .get(&ip)
            .filter_map(|(namespace, name)| self.pod(namespace, name))
            .find(|pod| !pod.spec.host_network && !pod.spec.has_ended)
    }

    /// Returns the pods of a namespace that have these labels; none for the empty selector.
    pub fn pods_selected<'a>(
        &'a self,
        namespace: &'a str,
        selector: &'a Labels,
    ) -> impl Iterator<Item = &'a Arc<Typed<Pod>>> {
        let pods = self.pod_labels.candidates(namespace, selector);
        let pods = pods.filter_map(move |name| self.pod(namespace, name));
        pods.filter(move |pod| selects(selector, &pod.meta.labels))
    }

    /// Returns the locality of a Pod: that of its label, else that of its Node.
    pub(crate) fn pod_locality(&self, pod: &Typed<Pod>) -> Locality {
        Locality::of_workload(&pod.meta.labels).unwrap_or_else(|| self.locality(&pod.spec.node))
    }

    /// Returns the locality of a Node; empty if unknown.
    pub fn locality(&self, node: &str) -> Locality {
        self.nodes.get("", node).map(|entry| entry.object.spec.locality.clone()).unwrap_or_default()
    }

    fn apply_config_map(&mut self, mut object: Arc<Typed<ConfigMap>>, origin: Origin) -> bool {
        let default = &self.default_mesh.access_log_file;
        if let ConfigMap::Mesh(mesh) = &object.spec
            && mesh.access_log_file.is_none()
            && default.is_some()
            && let ConfigMap::Mesh(mesh) = &mut Arc::make_mut(&mut object).spec
        {
            mesh.access_log_file.clone_from(default);
        }
        match &object.spec {
            ConfigMap::Mesh(_) => {
                let changed = self.mesh.as_ref().is_none_or(|entry| entry.object.spec != object.spec);
                self.mesh = Some(Entry { object, origin });
                changed
            }
            ConfigMap::Addresses(addresses) => self.allocate(Some(addresses.clone())),
            ConfigMap::Roots(_) => self.other_config_maps.insert(object, origin),
            ConfigMap::Other => {
                // Only the name counts. Other programs may change labels and annotations often.
                let meta = Meta {
                    namespace: object.meta.namespace.clone(),
                    name: object.meta.name.clone(),
                    ..Meta::default()
                };
                let object = Arc::new(Typed { meta, spec: ConfigMap::Other });
                self.other_config_maps.insert(object, origin)
            }
        }
    }

    /// Returns the certificates (PEM) of a ConfigMap.
    pub(crate) fn root_map(&self, namespace: &str, name: &str) -> Option<&str> {
        match &self.other_config_maps.get(namespace, name)?.object.spec {
            ConfigMap::Roots(pem) => Some(pem),
            _ => None,
        }
    }

    /// Returns whether there is a ConfigMap of this name that has no settings of the mesh.
    fn has_config_map(&self, namespace: &str, name: &str) -> bool {
        self.other_config_maps.get(namespace, name).is_some()
    }

    fn index_pod(&mut self, pod: &Typed<Pod>) {
        self.pod_labels.insert(&pod.meta);
        for ip in &pod.spec.ips {
            self.pod_ips.insert(*ip, &pod.meta);
        }
    }

    /// Removes the current object of a key from the indexes.
    fn unindex(&mut self, kind: Kind, namespace: &str, name: &str) {
        match kind {
            Kind::Pod => {
                if let Some(entry) = self.pods.get(namespace, name) {
                    self.pod_labels.remove(&entry.object.meta);
                    for ip in &entry.object.spec.ips {
                        self.pod_ips.remove(ip, &entry.object.meta);
                    }
                }
            }
            Kind::EndpointSlice => {
                if let Some(entry) = self.slices.get(namespace, name) {
                    let service = (namespace.to_owned(), entry.object.spec.service.clone());
                    let removed = Arc::clone(&entry.object);
                    self.service_slices.remove(&service, &removed.meta);
                    // Another slice of the service may have the address too.
                    let left: BTreeSet<std::net::IpAddr> =
                        self.slices_of(namespace, &service.1).flat_map(addresses_of).collect();
                    for ip in addresses_of(&removed).difference(&left) {
                        self.endpoint_ips.remove_name(ip, &service);
                    }
                }
            }
            Kind::VirtualService => {
                if let Some(entry) = self.virtual_services.get(namespace, name) {
                    for host in mesh_hosts(&entry.object) {
                        self.virtual_service_hosts.remove(&host, &entry.object.meta);
                    }
                    for host in sidecar::targets(&entry.object) {
                        self.virtual_service_targets.remove(&host, &entry.object.meta);
                    }
                }
            }
            Kind::DestinationRule => {
                if let Some(entry) = self.destination_rules.get(namespace, name) {
                    let host = hosts::fqdn(&entry.object.spec.host, namespace);
                    self.destination_rule_hosts.remove(&host, &entry.object.meta);
                }
            }
            _ => {}
        }
    }
}

/// Returns the addresses of a slice's endpoints.
fn addresses_of(slice: &Typed<EndpointSlice>) -> BTreeSet<std::net::IpAddr> {
    slice.spec.endpoints.iter().map(|endpoint| endpoint.ip).collect()
}

/// Returns the full host names that a VirtualService routes in the mesh.
fn mesh_hosts(object: &Typed<VirtualService>) -> Vec<String> {
    if !object.spec.is_for_mesh() {
        return Vec::new();
    }
    object.spec.hosts.iter().map(|host| hosts::fqdn(host, &object.meta.namespace)).collect()
}

#[cfg(test)]
mod tests;
