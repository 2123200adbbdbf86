//! Conservative estimate of the resources that a change may affect. It may be too large, never too small.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use super::{World, hosts, mesh_hosts};
use crate::{
    ClientScope, ObjectKey, ProxyView, Role,
    api::{
        Kind, Labels, Pod, Protocol, Resolution, Service, ServicePort, Typed, VirtualService,
        kube::SliceEndpoint, mesh_config, selects,
    },
    world::WELL_KNOWN_PORT,
};

/// Namespace without clients: an object visible there is visible everywhere.
const NOWHERE: &str = "";

/// Resources that may differ since the last [`World::take_changes`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangeSet {
    /// All resources.
    pub everything: bool,
    /// Services (namespace, name) whose clusters and endpoints may differ.
    pub services: BTreeSet<(String, String)>,
    /// All routes.
    pub routes: bool,
    /// Hosts of VirtualServices, with their namespaces. All routes of the clients that see them may differ.
    pub rule_hosts: BTreeSet<(String, String)>,
    /// Hosts of services whose routes may differ.
    pub hosts: BTreeSet<String>,
    /// Hosts of services that were added, removed or changed, and that affect no routes but their own.
    pub service_hosts: BTreeSet<String>,
    /// The routes of all gateways.
    pub gateway_routes: bool,
    /// The name table and the outline of the listeners, by services among `services`.
    pub names: bool,
    /// The workload-specific resources of all proxies.
    pub workloads: bool,
    /// Workloads, with their namespaces, whose workload-specific resources may differ.
    pub workloads_in: BTreeSet<(String, AffectedWorkloads)>,
    /// Selectors of Gateways: the listeners and routes of the gateways that they select may differ.
    pub gateways: BTreeSet<Labels>,
    /// Secrets (namespace, name) that may differ, and with them the secrets that gateways are sent.
    pub secrets: BTreeSet<(String, String)>,
    /// Pods (namespace, name) that may differ, and with them the views of their proxies. With `everything`, all pods.
    pub pods: BTreeSet<(String, String)>,
    /// Addresses of endpoints that may differ. The views of proxies with such an address may differ.
    pub addresses: BTreeSet<IpAddr>,
}

/// Workloads of a namespace that a change may affect.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AffectedWorkloads {
    /// Those with these labels; all if there are none.
    Labelled(Labels),
    /// Those whose address is among the endpoints of the service of this name.
    Addressed(String),
}

impl AffectedWorkloads {
    /// All workloads of the namespace.
    pub(super) const ALL: Self = Self::Labelled(Labels::new());

    /// Returns the workloads of a service: those that it selects, and those with the address of an endpoint.
    pub(super) fn of_service(service: &Typed<Service>) -> impl Iterator<Item = Self> {
        let selector = Some(service.spec.selector.clone()).filter(|selector| !selector.is_empty());
        [Self::Addressed(service.meta.name.clone())].into_iter().chain(selector.map(Self::Labelled))
    }

    fn contain(&self, view: &ProxyView) -> bool {
        match self {
            Self::Labelled(labels) => selects(labels, &view.labels),
            Self::Addressed(service) => view.addressed.iter().any(|(name, ..)| name == service),
        }
    }
}

impl ChangeSet {
    /// Returns the estimate for workloads of a namespace.
    pub(super) fn of_workloads(namespace: &str, which: impl IntoIterator<Item = AffectedWorkloads>) -> Self {
        let workloads_in = which.into_iter().map(|which| (namespace.to_owned(), which)).collect();
        Self { workloads_in, ..Self::default() }
    }

    /// Returns whether nothing may differ.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether [`Self::affects_own`] may hold for a proxy of a namespace. Costs less, because the caller has the
    /// namespace without an access to the view.
    pub fn may_affect_own_in(&self, namespace: &str) -> bool {
        self.everything
            || self.workloads
            || self.gateway_routes
            || !self.gateways.is_empty()
            || self.workloads_in.iter().any(|(of, _)| of == namespace)
    }

    /// Returns whether the workload-specific resources of a proxy may differ, apart from the secrets of
    /// [`ChangeSet::affects_secrets`]. Those of a gateway include its routes.
    pub fn affects_own(&self, view: &ProxyView) -> bool {
        let of_gateway =
            || self.gateway_routes || self.gateways.iter().any(|selector| selects(selector, &view.labels));
        self.everything
            || self.workloads
            || self.workloads_in.iter().any(|(of, which)| *of == view.namespace && which.contain(view))
            || view.role == Role::Router && of_gateway()
    }

    /// Returns whether the secrets that a proxy is sent may differ ([`compile_secrets`](crate::compile_secrets)).
    pub fn affects_secrets(&self, view: &ProxyView) -> bool {
        !self.secrets.is_empty() && view.role == Role::Router
    }

    /// Returns whether the resources that proxies share, or the outline of their listeners, may differ.
    pub fn affects_shared(&self) -> bool {
        let Self { everything, services, routes, hosts, service_hosts, names, workloads, .. } = self;
        let has_names = !services.is_empty() || !hosts.is_empty() || !service_hosts.is_empty();
        *everything || *routes || *names || *workloads || has_names || !self.rule_hosts.is_empty()
    }

    /// Returns whether all routes may differ.
    pub fn affects_all_routes(&self) -> bool {
        self.everything || self.routes || !self.rule_hosts.is_empty()
    }

    /// Returns whether the resources of a scope may differ. `has` returns whether the scope has the resources of a
    /// service (namespace, name). Returns false only if a Sidecar hides all that may differ.
    pub fn affects_scope(
        &self,
        world: &World,
        scope: &ClientScope,
        has: impl Fn(&(String, String)) -> bool,
    ) -> bool {
        let Some(egress) = scope.egress.as_ref().filter(|egress| !egress.listeners.is_empty()) else {
            return true;
        };
        if self.everything || self.routes || self.workloads {
            return true;
        }
        let names = |namespace: &str, host: &str| {
            egress.listeners.iter().any(|listener| listener.imports(&scope.namespace, namespace, host))
        };
        // A VirtualService of any namespace may route the host.
        let hosts = self.hosts.iter().chain(&self.service_hosts);
        let has_host = |host: &String| egress.listeners.iter().any(|listener| listener.names(host));
        let sees = |service: &(String, String)| {
            let host = world.service_named(&service.0, &service.1).map(|service| service.fqdn());
            let is_target = |host: &str| world.is_target_of_rules(&egress.listeners, host, &scope.namespace);
            has(service) || host.is_some_and(|host| names(&service.0, &host) || is_target(&host))
        };
        self.rule_hosts.iter().any(|(namespace, host)| names(namespace, host))
            || hosts.into_iter().any(has_host)
            // `names` concerns these services alone.
            || self.services.iter().any(sees)
    }

    /// Adds the estimate of another change.
    pub fn add(&mut self, other: Self) {
        self.everything |= other.everything;
        self.services.extend(other.services);
        self.routes |= other.routes;
        self.rule_hosts.extend(other.rule_hosts);
        self.hosts.extend(other.hosts);
        self.service_hosts.extend(other.service_hosts);
        self.gateway_routes |= other.gateway_routes;
        self.names |= other.names;
        self.workloads |= other.workloads;
        self.workloads_in.extend(other.workloads_in);
        self.gateways.extend(other.gateways);
        self.secrets.extend(other.secrets);
        self.pods.extend(other.pods);
        self.addresses.extend(other.addresses);
    }

    /// Returns the estimate that everything may differ.
    pub fn everything() -> Self {
        Self { everything: true, ..Self::default() }
    }

    fn nothing() -> Self {
        Self::default()
    }
}

impl World {
    /// Returns and resets the estimate. The first call returns everything.
    pub fn take_changes(&mut self) -> ChangeSet {
        self.settle();
        let of_topology = self.take_topology_change();
        self.add_changes(of_topology);
        self.changes.replace(ChangeSet::nothing()).unwrap_or_else(ChangeSet::everything)
    }

    /// Returns the resources that depend on the current object of a key.
    pub(super) fn changes_of(&self, key: &ObjectKey) -> ChangeSet {
        if self.changes.as_ref().is_none_or(|changes| changes.everything) {
            return ChangeSet::nothing();
        }
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        match key.kind {
            // These kinds only affect warnings.
            Kind::ServiceAccount
            | Kind::Deployment
            | Kind::StatefulSet
            | Kind::DaemonSet
            | Kind::ReplicaSet
            | Kind::Job
            | Kind::CronJob
            | Kind::WorkloadGroup
            | Kind::ProxyConfig => ChangeSet::nothing(),
            // These kinds have an effect only through the internal objects made from them.
            Kind::GatewayClass
            | Kind::KubernetesGateway
            | Kind::ListenerSet
            | Kind::HttpRoute
            | Kind::GrpcRoute
            | Kind::TlsRoute
            | Kind::TcpRoute
            | Kind::ReferenceGrant
            | Kind::BackendTlsPolicy
            | Kind::Ingress
            | Kind::IngressClass => ChangeSet::nothing(),
            Kind::ConfigMap if !mesh_config::is_own(namespace, name) => {
                ChangeSet { workloads: self.uses_root_map(namespace, name), ..ChangeSet::default() }
            }
            Kind::ConfigMap => ChangeSet::everything(),
            Kind::Node => self.changes_of_node(name),
            Kind::Namespace => self.changes_of_namespace(name),
            Kind::PeerAuthentication => self.changes_of_peer_authentication(namespace, name),
            Kind::Sidecar => self.changes_of_sidecar(namespace, name),
            Kind::EnvoyFilter => self.changes_of_envoy_filter(namespace, name),
            Kind::RateLimitPolicy => self.changes_of_rate_limits(namespace, name),
            Kind::Gateway => {
                let gateway = self.gateways.get(namespace, name).map(|entry| &entry.object.spec);
                let gateways = gateway.map(|gateway| gateway.selector.clone()).into_iter().collect();
                ChangeSet { gateways, ..ChangeSet::default() }
            }
            Kind::Secret => self.changes_of_secret(namespace, name),
            Kind::AuthorizationPolicy
            | Kind::RequestAuthentication
            | Kind::Telemetry
            | Kind::WasmPlugin
            | Kind::TrafficExtension
                if namespace == self.mesh().root_namespace =>
            {
                ChangeSet { workloads: true, ..ChangeSet::default() }
            }
            Kind::AuthorizationPolicy
            | Kind::RequestAuthentication
            | Kind::Telemetry
            | Kind::WasmPlugin
            | Kind::TrafficExtension => {
                ChangeSet::of_workloads(namespace, self.selected_workloads(key).unwrap_or_default())
            }
            Kind::VirtualService => {
                let rule = self.virtual_services.get(namespace, name).map(|entry| &entry.object);
                rule.map(|rule| self.changes_of_rules(rule)).unwrap_or_default()
            }
            Kind::Service => self.changes_of_service(namespace, name),
            Kind::ServiceEntry => self.changes_of_entry(namespace, name),
            Kind::WorkloadEntry => self.changes_of_workload_entry(namespace, name),
            Kind::EndpointSlice => self.changes_of_slice(namespace, name),
            Kind::DestinationRule => self.changes_of_destination_rule(namespace, name),
            Kind::Pod => self.pod(namespace, name).map(|pod| self.changes_of_pod(pod)).unwrap_or_default(),
        }
    }

    /// Returns the resources that depend on a Secret.
    fn changes_of_secret(&self, namespace: &str, name: &str) -> ChangeSet {
        if self.secrets.get(namespace, name).is_none() {
            return ChangeSet::nothing();
        }
        // Sidecars get the secrets of rules that select them.
        let mut rules = self.destination_rules.in_namespace(namespace).map(|entry| &entry.object.spec);
        let of_sidecars = rules.any(|rule| rule.workload_selector.is_some() && rule.has_credential());
        let secrets = BTreeSet::from([(namespace.to_owned(), name.to_owned())]);
        let of_sidecars = of_sidecars.then_some(AffectedWorkloads::ALL);
        ChangeSet { secrets, ..ChangeSet::of_workloads(namespace, of_sidecars) }
    }

    /// Returns the resources that depend on a DestinationRule.
    fn changes_of_destination_rule(&self, namespace: &str, name: &str) -> ChangeSet {
        let rule = self.destination_rules.get(namespace, name).map(|entry| &entry.object);
        let Some(rule) = rule else { return ChangeSet::nothing() };
        let host = hosts::fqdn(&rule.spec.host, namespace);
        let services: Vec<_> = self.all_of_host(&host).collect();
        // A rule with a wildcard also applies to services with narrower hosts.
        if services.is_empty() || host.starts_with('*') {
            return ChangeSet::everything();
        }
        let name =
            |service: &&Arc<Typed<Service>>| (service.meta.namespace.clone(), service.meta.name.clone());
        let shapes = |service: &&Arc<Typed<Service>>| {
            self.has_own_listeners(service) || self.is_destination_of_connections(service)
        };
        ChangeSet {
            services: services.iter().map(name).collect(),
            routes: self.hashes(&host),
            workloads: rule.spec.has_credential() || services.iter().any(shapes),
            // Their metadata name the rule that applies to them.
            workloads_in: services
                .iter()
                .flat_map(|service| {
                    let workloads = AffectedWorkloads::of_service(service);
                    workloads.map(|which| (service.meta.namespace.clone(), which))
                })
                .collect(),
            ..self.gateways_of_host(&host)
        }
    }

    /// Returns the resources that depend on a Service.
    fn changes_of_service(&self, namespace: &str, name: &str) -> ChangeSet {
        let Some(service) = self.service_named(namespace, name) else { return ChangeSet::nothing() };
        let mut services = BTreeSet::from([(namespace.to_owned(), name.to_owned())]);
        // ServiceEntries of this name are visible only without the Service.
        let host = service.fqdn();
        services.extend(self.entry_hosts.get(&host).map(|(of, _)| (of.clone(), host.clone())));
        let is_alone = self.has_routes_alone(service);
        ChangeSet {
            services,
            routes: !is_alone,
            service_hosts: is_alone.then(|| host.clone()).into_iter().collect(),
            names: true,
            addresses: self.addresses_of(service),
            workloads: self.shapes_listeners(service) || self.is_destination_of_connections(service),
            workloads_in: AffectedWorkloads::of_service(service)
                .map(|which| (namespace.to_owned(), which))
                .collect(),
            ..self.gateways_of_host(&host)
        }
    }

    /// Returns the resources that depend on a VirtualService, or on those that delegate to it.
    fn changes_of_rules(&self, rule: &Typed<VirtualService>) -> ChangeSet {
        if rule.spec.hosts.is_empty() {
            let mut changes = ChangeSet::nothing();
            let roots = self.roots_of(&rule.meta.namespace, &rule.meta.name);
            // A root that is a delegate itself has no effect.
            for root in roots.filter(|root| !root.object.spec.hosts.is_empty()) {
                changes.add(self.changes_of_rules(&root.object));
            }
            return changes;
        }
        let gateways = self.selectors_of(rule);
        if !rule.spec.is_for_mesh() {
            return ChangeSet { gateways, ..ChangeSet::default() };
        }
        // Rules for connections are part of the listeners.
        let workloads = routes_connections(&rule.spec);
        let changes = ChangeSet { workloads, gateways, ..ChangeSet::default() };
        match self.only_service_of(rule) {
            Some(host) => ChangeSet { hosts: BTreeSet::from([host]), ..changes },
            None => {
                let hosts = mesh_hosts(rule).into_iter();
                let rule_hosts = hosts.map(|host| (rule.meta.namespace.clone(), host)).collect();
                ChangeSet { rule_hosts, ..changes }
            }
        }
    }

    /// Returns whether rules for connections forward to a service. Its ports and settings are then part of listeners.
    fn is_destination_of_connections(&self, service: &Typed<Service>) -> bool {
        let host = service.fqdn();
        let rules = self.virtual_services.iter().map(|entry| &entry.object);
        rules.filter(|rule| routes_connections(&rule.spec)).any(|rule| {
            let tls = rule.spec.tls.iter().flat_map(|route| &route.route);
            let tcp = rule.spec.tcp.iter().flat_map(|route| &route.route);
            let named = |to: &str| hosts::fqdn(to, &rule.meta.namespace) == host;
            tls.chain(tcp).any(|to| named(&to.destination.host))
        })
    }

    /// Returns the host of a VirtualService if it is a single service that is visible in all namespaces.
    fn only_service_of(&self, rule: &Typed<VirtualService>) -> Option<String> {
        let [host] = &rule.spec.hosts[..] else { return None };
        let host = hosts::fqdn(host, &rule.meta.namespace);
        let service = self.service(&host).filter(|service| service.spec.entry_host.is_none())?;
        let well_known = service.spec.port(WELL_KNOWN_PORT)?;
        let is_routed = well_known.protocol.is_http() || well_known.protocol == Protocol::Unknown;
        (is_routed && service.spec.external_name.is_none() && self.service_visible(service, NOWHERE))
            .then_some(host)
    }

    /// Returns whether outbound listeners of other workloads may depend on a service. All services with the same HTTP
    /// port share its listener, which depends on a service only if no other has the port.
    pub(super) fn shapes_listeners(&self, service: &Typed<Service>) -> bool {
        // Filters of telemetry and authorization name the clusters of providers. The listener of a port names the hosts
        // that proxies resolve.
        let entry_host = service.spec.entry_host.as_ref();
        let is_dynamic = entry_host.is_some_and(|of| of.resolution == Resolution::DynamicDns);
        if is_dynamic || self.is_provider_host(&service.fqdn()) {
            return true;
        }
        let mut ports = service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp);
        ports.any(|port| {
            !port.protocol.is_http()
                || !self.is_common(service, port.port)
                || self.is_alone_for_sidecars(service, port.port)
        })
    }

    /// Returns whether all clients see another service with a port of HTTP.
    fn is_common(&self, service: &Typed<Service>, port: u16) -> bool {
        let has_http =
            |service: &Typed<Service>| service.spec.port(port).is_some_and(|port| port.protocol.is_http());
        let others = self.services().filter(|other| other.meta != service.meta);
        // The service of a ServiceEntry's host depends on the client.
        let others = others.filter(|other| other.spec.entry_host.is_none());
        let mut like_it = others.filter(|other| has_http(other) && other.spec.external_name.is_none());
        like_it.any(|other| self.service_visible(other, NOWHERE))
    }

    /// Returns whether adding or removing a Service changes only its own virtual hosts. That holds if it shares no
    /// name, address or port on which other services' routes depend, and no rule or alias names it.
    fn has_routes_alone(&self, service: &Typed<Service>) -> bool {
        let host = service.fqdn();
        let is_plain = service.spec.entry_host.is_none()
            && service.spec.external_name.is_none()
            && self.service_visible(service, NOWHERE);
        let by_rules = || {
            self.virtual_service_hosts.get(&host).next().is_some()
                || self.virtual_service_hosts.wildcards(&host).next().is_some()
                || self.virtual_service_targets.get(&host).next().is_some()
        };
        let shares_address = |other: &Typed<Service>| {
            other.meta != service.meta
                && other.spec.cluster_ips.iter().any(|ip| service.spec.cluster_ips.contains(ip))
        };
        let is_involved =
            |other: &Arc<Typed<Service>>| other.spec.external_name.is_some() || shares_address(other);
        let (name, namespace) = (&service.meta.name, &service.meta.namespace);
        let names =
            [host.clone(), name.clone(), format!("{name}.{namespace}"), format!("{name}.{namespace}.svc")];
        let is_routed = |port: &ServicePort| {
            port.protocol == Protocol::Unknown
                || port.protocol.is_http() && !self.is_common(service, port.port)
        };
        is_plain
            && !by_rules()
            && !service.spec.ports.iter().any(is_routed)
            && !names.iter().any(|name| {
                self.names_others(service, name) || self.names_others(service, &format!("*.{name}"))
            })
            && !self.services().any(is_involved)
    }

    /// Returns the resources of the services that select a pod.
    fn changes_of_pod(&self, pod: &Typed<Pod>) -> ChangeSet {
        let namespace = pod.meta.namespace.as_str();
        let pods = BTreeSet::from([(pod.meta.namespace.clone(), pod.meta.name.clone())]);
        let mut changes = ChangeSet { pods, ..ChangeSet::default() };
        for service in self.services_selecting(namespace, &pod.meta.labels) {
            changes.add(self.changes_of_endpoints(namespace, &service.meta.name));
        }
        // A slice may belong to a service without a selector, and to another namespace if it names the pod by address.
        for slice in self.slices.iter().map(|entry| &entry.object) {
            let near = slice.meta.namespace == namespace;
            let leads = |endpoint: &SliceEndpoint| {
                near && endpoint.pod == pod.meta.name || pod.spec.ips.contains(&endpoint.ip)
            };
            let service = (slice.meta.namespace.clone(), slice.spec.service.clone());
            if !changes.services.contains(&service) && slice.spec.endpoints.iter().any(leads) {
                changes.add(self.changes_of_endpoints(&service.0, &service.1));
            }
        }
        changes
    }

    /// Returns the resources that depend on a Node: those with the locality of its endpoints and clients. A Node that has
    /// just joined a cluster has none.
    fn changes_of_node(&self, name: &str) -> ChangeSet {
        let mut changes = ChangeSet::nothing();
        let pods = self.pods.iter().map(|entry| &entry.object).filter(|pod| pod.spec.node == name);
        pods.for_each(|pod| changes.add(self.changes_of_pod(pod)));
        let slices = self.slices.iter().map(|entry| &entry.object);
        for slice in slices.filter(|of| of.spec.endpoints.iter().any(|endpoint| endpoint.node == name)) {
            changes.add(self.changes_of_slice(&slice.meta.namespace, &slice.meta.name));
        }
        changes
    }

    /// Returns the resources that depend on an EndpointSlice.
    fn changes_of_slice(&self, namespace: &str, name: &str) -> ChangeSet {
        let Some(slice) = self.slices.get(namespace, name).map(|entry| &entry.object) else {
            return ChangeSet::nothing();
        };
        let mut changes = self.changes_of_endpoints(namespace, &slice.spec.service);
        let service = self.service_named(namespace, &slice.spec.service);
        if service.is_none_or(|service| service.spec.selector.is_empty()) {
            changes.addresses.extend(slice.spec.endpoints.iter().map(|endpoint| endpoint.ip));
        }
        changes
    }

    /// Returns the resources that depend on a service's endpoints. Endpoints of a headless service are also part of
    /// listeners and the name table.
    pub(super) fn changes_of_endpoints(&self, namespace: &str, service: &str) -> ChangeSet {
        let headless = self.service_named(namespace, service).is_some_and(|service| service.spec.headless);
        ChangeSet {
            services: BTreeSet::from([(namespace.to_owned(), service.to_owned())]),
            names: headless,
            workloads: headless,
            ..ChangeSet::default()
        }
    }
}

/// Returns whether a VirtualService has rules for connections.
pub(super) fn routes_connections(spec: &VirtualService) -> bool {
    !spec.tcp.is_empty() || !spec.tls.is_empty()
}
