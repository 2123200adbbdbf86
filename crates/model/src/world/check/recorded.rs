//! The World as the checks of one object read it. Each method records what it reads as an [`Input`]. The
//! [`Validator`](super::Validator) repeats the checks of an object only if one of their inputs has changed.
//!
//! The checks have no other access to the World. [`RecordedWorld::unrecorded`] is for analyses that run once. The
//! settings of the mesh are not recorded: a change of these repeats all checks.

use std::{
    cell::{OnceCell, RefCell},
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    net::IpAddr,
    sync::Arc,
};

use super::super::{World, delegates::DelegateError, endpoints::Endpoint, store::Entry};
use crate::api::{
    DestinationRule, EntryEndpoint, Gateway, GrpcRoute, HttpRoute, Kind, Labels, MeshConfig, MtlsMode,
    PeerAuthentication, Pod, RateLimitPolicy, Secret, Service, ServiceEntry, ServicePort, Telemetry,
    Template, TrafficExtension, Typed, VirtualService, virtual_service::Delegate,
};

/// What a check can read, and what a change of an object affects. The kind of Pods includes that of objects that make
/// Pods.
#[derive(Hash)]
pub(super) enum Input<'a> {
    /// Whether there is an object of a kind.
    Any(Kind),
    /// All objects of a kind.
    All(Kind),
    /// The objects of a kind in a namespace.
    In(Kind, &'a str),
    /// The object of a kind, namespace and name.
    Object(Kind, &'a str, &'a str),
    /// Services, VirtualServices of the mesh, and DestinationRules of a host.
    Host(&'a str),
    /// Those of all hosts with a wildcard.
    Wildcards,
    /// Services with an address.
    Address(IpAddr),
}

/// The World and the inputs recorded since the last [`RecordedWorld::take_inputs`].
pub(super) struct RecordedWorld<'a> {
    world: &'a World,
    hasher: RandomState,
    inputs: RefCell<Vec<u64>>,
    /// Kubernetes Services by address; made when they are read.
    addresses: OnceCell<HashMap<IpAddr, Vec<&'a Entry<Service>>>>,
    /// The first Kubernetes Service by HTTP port; made when they are read.
    http_ports: OnceCell<HashMap<u16, &'a Entry<Service>>>,
}

impl<'a> RecordedWorld<'a> {
    pub(super) fn new(world: &'a World, hasher: RandomState) -> Self {
        let (addresses, http_ports) = (OnceCell::new(), OnceCell::new());
        Self { world, hasher, inputs: RefCell::default(), addresses, http_ports }
    }

    /// Returns the World itself, for analyses of all objects at once.
    pub(super) fn unrecorded(&self) -> &'a World {
        self.world
    }

    pub(super) fn hash(&self, input: Input<'_>) -> u64 {
        self.hasher.hash_one(input)
    }

    /// Records an input. Two inputs with the same hash only repeat checks without need.
    pub(super) fn record(&self, input: Input<'_>) {
        self.inputs.borrow_mut().push(self.hash(input));
    }

    /// Returns the recorded inputs, each once, and forgets them.
    pub(super) fn take_inputs(&self) -> Box<[u64]> {
        let mut inputs = self.inputs.borrow_mut();
        inputs.sort_unstable();
        inputs.dedup();
        let taken = inputs.as_slice().into();
        inputs.clear();
        taken
    }

    pub(super) fn mesh(&self) -> &'a MeshConfig {
        self.world.mesh()
    }

    pub(super) fn allocates(&self) -> bool {
        self.world.allocates()
    }

    pub(super) fn has_provider(&self, name: &str) -> bool {
        self.world.provider(name).is_some()
    }

    /// Returns the reason why an authorizer cannot be used.
    pub(super) fn authorizer_error(&self, name: &str) -> Option<String> {
        self.record(Input::All(Kind::Service));
        self.world.authorizer(name).err()
    }

    /// Returns the reason why the address of Zipkin in `defaultConfig` has no collector.
    pub(super) fn zipkin_error(&self) -> Option<String> {
        self.record(Input::All(Kind::Service));
        self.world.zipkin_collector()?.err()
    }

    /// Returns whether a rate limit service has a domain, or the reason why it cannot be used.
    pub(super) fn rate_limit_domain(&self, name: &str) -> Result<bool, String> {
        self.record(Input::All(Kind::Service));
        self.world.rate_limit_service(name).map(|(service, ..)| !service.domain.is_empty())
    }

    pub(super) fn service(&self, fqdn: &str) -> Option<&'a Arc<Typed<Service>>> {
        self.record(Input::Host(fqdn));
        self.world.service(fqdn)
    }

    pub(super) fn service_named(&self, namespace: &str, name: &str) -> Option<&'a Arc<Typed<Service>>> {
        self.record(Input::Object(Kind::Service, namespace, name));
        self.world.service_named(namespace, name)
    }

    pub(super) fn any_service(&self) -> bool {
        self.record(Input::Any(Kind::Service));
        self.world.services().next().is_some()
    }

    pub(super) fn services(&self) -> impl Iterator<Item = &'a Arc<Typed<Service>>> + use<'a> {
        self.record(Input::All(Kind::Service));
        self.world.services()
    }

    pub(super) fn services_in<'b>(
        &self,
        namespace: &'b str,
    ) -> impl Iterator<Item = &'a Entry<Service>> + use<'a, 'b> {
        self.record(Input::In(Kind::Service, namespace));
        self.world.services.in_namespace(namespace)
    }

    /// Returns the Kubernetes Services with this address.
    pub(super) fn services_with_address(&self, address: IpAddr) -> &[&'a Entry<Service>] {
        self.record(Input::Address(address));
        let by_address = self.addresses.get_or_init(|| {
            let mut by_address: HashMap<IpAddr, Vec<&Entry<Service>>> = HashMap::new();
            for entry in self.kubernetes_services() {
                for address in &entry.object.spec.cluster_ips {
                    by_address.entry(*address).or_default().push(entry);
                }
            }
            by_address
        });
        by_address.get(&address).map_or(&[], Vec::as_slice)
    }

    /// Returns the first Kubernetes Service with this HTTP port.
    pub(super) fn service_with_http_port(&self, port: u16) -> Option<&'a Entry<Service>> {
        self.record(Input::All(Kind::Service));
        let by_port = self.http_ports.get_or_init(|| {
            let mut by_port = HashMap::new();
            for entry in self.kubernetes_services() {
                for port in entry.object.spec.ports.iter().filter(|port| port.protocol.is_http()) {
                    by_port.entry(port.port).or_insert(entry);
                }
            }
            by_port
        });
        by_port.get(&port).copied()
    }

    fn kubernetes_services(&self) -> impl Iterator<Item = &'a Entry<Service>> + use<'a> {
        self.world.services.iter().filter(|entry| entry.object.spec.entry_host.is_none())
    }

    pub(super) fn endpoints(&self, service: &Typed<Service>, port: &ServicePort) -> Vec<Endpoint> {
        let namespace = service.meta.namespace.as_str();
        self.record(Input::Host(&service.fqdn()));
        self.record(Input::In(Kind::EndpointSlice, namespace));
        self.record(Input::In(Kind::WorkloadEntry, namespace));
        // A slice may have the address of a Pod of any namespace.
        self.record(Input::All(Kind::Pod));
        self.world.endpoints(service, port)
    }

    pub(super) fn service_entry(&self, namespace: &str, name: &str) -> Option<&'a Entry<ServiceEntry>> {
        self.record(Input::Object(Kind::ServiceEntry, namespace, name));
        self.world.service_entries.get(namespace, name)
    }

    /// Returns the VirtualServices with HTTP rules for a host or the wildcard that matches it, those with precedence
    /// first.
    pub(super) fn virtual_service_entries(
        &self,
        host: &str,
        client_namespace: &str,
    ) -> Vec<&'a Entry<VirtualService>> {
        self.record_rules_of(host);
        self.world.virtual_service_entries(host, client_namespace, |_| true)
    }

    pub(super) fn virtual_service(&self, namespace: &str, name: &str) -> Option<&'a Entry<VirtualService>> {
        self.record(Input::Object(Kind::VirtualService, namespace, name));
        self.world.virtual_services.get(namespace, name)
    }

    pub(super) fn delegate(
        &self,
        root: &Typed<VirtualService>,
        delegate: &Delegate,
    ) -> Result<&'a Entry<VirtualService>, DelegateError> {
        let (namespace, name) = delegate.key(&root.meta.namespace);
        self.record(Input::Object(Kind::VirtualService, namespace, name));
        self.world.delegate(root, delegate)
    }

    pub(super) fn is_delegate(&self, namespace: &str, name: &str) -> bool {
        self.record(Input::All(Kind::VirtualService));
        self.world.roots_of(namespace, name).next().is_some()
    }

    pub(super) fn destination_rule(
        &self,
        fqdn: &str,
        namespace: &str,
    ) -> Option<Arc<Typed<DestinationRule>>> {
        self.record_rules_of(fqdn);
        self.world.destination_rule(fqdn, namespace)
    }

    /// Records the inputs of a look-up of rules for a host. Only a caller that keeps results calls this itself.
    pub(super) fn record_rules_of(&self, host: &str) {
        self.record(Input::Host(host));
        self.record(Input::Wildcards);
        // They decide which namespaces are visible.
        if self.world.has_visibility_by_labels() {
            self.record(Input::All(Kind::Namespace));
        }
    }

    pub(super) fn gateway(&self, namespace: &str, name: &str) -> Option<&'a Entry<Gateway>> {
        self.record(Input::Object(Kind::Gateway, namespace, name));
        self.world.gateways.get(namespace, name)
    }

    pub(super) fn secret(&self, namespace: &str, name: &str) -> Option<&'a Secret> {
        self.record(Input::Object(Kind::Secret, namespace, name));
        self.world.secret(namespace, name)
    }

    pub(super) fn namespace(&self, name: &str) -> Option<&'a Labels> {
        self.record(Input::Object(Kind::Namespace, "", name));
        self.world.namespace(name)
    }

    pub(super) fn has_service_account(&self, namespace: &str, name: &str) -> bool {
        self.record(Input::Object(Kind::ServiceAccount, namespace, name));
        self.world.service_accounts.get(namespace, name).is_some()
    }

    pub(super) fn any_service_account(&self, namespace: &str) -> bool {
        self.record(Input::In(Kind::ServiceAccount, namespace));
        self.world.service_accounts.in_namespace(namespace).next().is_some()
    }

    /// Returns whether any Pod, or any object that makes Pods, is known.
    pub(super) fn any_workload(&self) -> bool {
        self.record(Input::Any(Kind::Pod));
        self.world.pods().next().is_some() || self.world.templates().next().is_some()
    }

    /// Returns all Pods.
    pub(super) fn pods(&self) -> impl Iterator<Item = &'a Arc<Typed<Pod>>> + use<'a> {
        self.record(Input::All(Kind::Pod));
        self.world.pods()
    }

    /// Returns the Pods of a namespace.
    pub(super) fn pods_in<'b>(
        &self,
        namespace: &'b str,
    ) -> impl Iterator<Item = &'a Arc<Typed<Pod>>> + use<'a, 'b> {
        self.record(Input::In(Kind::Pod, namespace));
        self.world.pods.in_namespace(namespace).map(|entry| &entry.object)
    }

    /// Returns the Pods of a namespace that have these labels; none for the empty selector.
    pub(super) fn pods_selected<'b>(
        &self,
        namespace: &'b str,
        selector: &'b Labels,
    ) -> impl Iterator<Item = &'b Arc<Typed<Pod>>> + use<'a, 'b>
    where
        'a: 'b,
    {
        self.record(Input::In(Kind::Pod, namespace));
        self.world.pods_selected(namespace, selector)
    }

    /// Returns all objects that make Pods.
    pub(super) fn templates(&self) -> impl Iterator<Item = &'a Arc<Typed<Template>>> + use<'a> {
        self.record(Input::All(Kind::Pod));
        self.world.templates()
    }

    /// Returns the objects of a namespace that make Pods.
    pub(super) fn templates_in<'b>(
        &self,
        namespace: &'b str,
    ) -> impl Iterator<Item = &'b Typed<Template>> + use<'a, 'b>
    where
        'a: 'b,
    {
        self.record(Input::In(Kind::Pod, namespace));
        super::templates_in(self.world, namespace)
    }

    /// Returns the labels of all workloads that a selector matches, in a namespace or in all.
    pub(super) fn workloads<'b>(
        &self,
        namespace: Option<&'b str>,
        selector: &'b Labels,
    ) -> impl Iterator<Item = &'b Labels> + use<'a, 'b>
    where
        'a: 'b,
    {
        self.record(namespace.map_or(Input::All(Kind::Pod), |namespace| Input::In(Kind::Pod, namespace)));
        super::workloads(self.world, namespace, selector)
    }

    /// Returns whether a workload runs in a namespace.
    pub(super) fn runs_in(&self, namespace: &str) -> bool {
        self.record(Input::In(Kind::Pod, namespace));
        super::runs_in(self.world, namespace)
    }

    pub(super) fn entries_selected<'b>(
        &self,
        namespace: &'b str,
        selector: &'b Labels,
    ) -> impl Iterator<Item = &'b Arc<Typed<EntryEndpoint>>> + use<'a, 'b>
    where
        'a: 'b,
    {
        self.record(Input::In(Kind::WorkloadEntry, namespace));
        self.world.entries_selected(namespace, selector)
    }

    /// Returns whether a RequestAuthentication of a namespace, or of the root namespace, applies to a workload.
    pub(super) fn verifies_tokens(&self, namespace: &str, labels: &Labels) -> bool {
        self.record_with_root(Kind::RequestAuthentication, namespace);
        !self.world.request_authentications(namespace, labels).is_empty()
    }

    pub(super) fn peer_mode(&self, namespace: &str, labels: &Labels, port: u16) -> MtlsMode {
        self.record_with_root(Kind::PeerAuthentication, namespace);
        self.world.peer_mode(namespace, labels, port)
    }

    fn record_with_root(&self, kind: Kind, namespace: &str) {
        self.record(Input::In(kind, namespace));
        self.record(Input::In(kind, &self.mesh().root_namespace));
    }

    pub(super) fn peer_authentications_in<'b>(
        &self,
        namespace: &'b str,
    ) -> impl Iterator<Item = &'a Entry<PeerAuthentication>> + use<'a, 'b> {
        self.record(Input::In(Kind::PeerAuthentication, namespace));
        self.world.peer_authentications.in_namespace(namespace)
    }

    pub(super) fn rate_limit_policies_in<'b>(
        &self,
        namespace: &'b str,
    ) -> impl Iterator<Item = &'a Entry<RateLimitPolicy>> + use<'a, 'b> {
        self.record(Input::In(Kind::RateLimitPolicy, namespace));
        self.world.rate_limit_policies.in_namespace(namespace)
    }

    /// Returns the Telemetries of a namespace.
    pub(super) fn telemetries_in<'b>(
        &self,
        namespace: &'b str,
    ) -> impl Iterator<Item = &'a Entry<Telemetry>> + use<'a, 'b> {
        self.record(Input::In(Kind::Telemetry, namespace));
        self.world.telemetries.in_namespace(namespace)
    }

    /// Returns whether the script of an extension may be beyond the limits of a workload.
    pub(super) fn exceeds_scripts(&self, extension: &Typed<TrafficExtension>) -> bool {
        self.record_with_root(Kind::TrafficExtension, &extension.meta.namespace);
        self.world.exceeds_scripts(extension)
    }

    pub(super) fn has_kubernetes_gateway(&self, namespace: &str, name: &str) -> bool {
        self.record(Input::Object(Kind::KubernetesGateway, namespace, name));
        self.world.kubernetes_gateways.get(namespace, name).is_some()
    }

    pub(super) fn http_route(&self, namespace: &str, name: &str) -> Option<&'a HttpRoute> {
        self.record(Input::Object(Kind::HttpRoute, namespace, name));
        self.world.http_routes.get(namespace, name).map(|entry| &entry.object.spec)
    }

    pub(super) fn grpc_route(&self, namespace: &str, name: &str) -> Option<&'a GrpcRoute> {
        self.record(Input::Object(Kind::GrpcRoute, namespace, name));
        self.world.grpc_routes.get(namespace, name).map(|entry| &entry.object.spec)
    }
}
