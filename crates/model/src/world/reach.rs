//! Which resources of which proxies an object affects, for its status.
//!
//! The estimate follows from the object and the indexes; nothing is compiled. It may name a proxy whose resources the
//! object does not change. It names every proxy on which the object has a direct effect. Indirect effects are not
//! included, such as that of a PeerAuthentication on the clients of a workload.

use std::{
    collections::{BTreeSet, HashMap},
    fmt, iter,
    sync::Arc,
};

use skysail_xds::Kind as ResourceType;

use super::{
    CREDENTIAL, World,
    change_set::routes_connections,
    destination_rules::exports,
    envoy_filters, fqdn,
    gateways::{SECRET, gateway_name},
    host_matches, mesh_hosts,
    policy::{applies, is_wide, selected},
    rate_limits,
    sidecar::targets,
    store::{Entry, Store},
};
use crate::{
    ProxyView, Role,
    api::{
        Kind, Labels, ObjectKey, RateLimitPolicy, RateLimitTarget, Typed, VirtualService,
        destination_rule::WorkloadSelector, envoy_filter::ApplyTo, mesh_config, security::TargetRef, selects,
    },
    origin::Origin,
};

const CLUSTERS: &[ResourceType] = &[ResourceType::Cluster, ResourceType::Endpoint];
const ROUTES: &[ResourceType] = &[ResourceType::Route, ResourceType::VirtualHost];
const LISTENERS: &[ResourceType] = &[ResourceType::Listener];
const SERVICE: &[ResourceType] =
    &[ResourceType::Cluster, ResourceType::Endpoint, ResourceType::Route, ResourceType::VirtualHost];
const GATEWAY: &[ResourceType] = &[ResourceType::Listener, ResourceType::Route, ResourceType::Secret];

/// Resources that an object affects, at the proxies to which it [applies](Reach::applies).
pub struct Reach<'a> {
    /// Types of the resources.
    pub types: Vec<ResourceType>,
    /// The resources of these types that are affected.
    pub resources: ReachedResources,
    applies: Box<dyn Fn(&ProxyView) -> bool + Send + Sync + 'a>,
}

impl Reach<'_> {
    /// Returns whether the object applies to a proxy.
    pub fn applies(&self, view: &ProxyView) -> bool {
        (self.applies)(view)
    }
}

impl fmt::Debug for Reach<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.types, self.resources)
    }
}

/// Some resources of a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReachedResources {
    /// Those of hosts (full names, or `*.suffix`), and the route configurations of their ports.
    Hosts {
        /// Hosts.
        hosts: BTreeSet<String>,
        /// Ports of the hosts.
        ports: BTreeSet<u16>,
    },
    /// Resources of the workload: those with these names, or all if the list is empty.
    Own(Vec<String>),
    /// All.
    All,
}

/// Objects with a status, and the resources that they affect.
#[derive(Debug)]
pub struct ReachIndex<'a> {
    world: &'a World,
    /// Internal objects by the object from which they are made.
    made: HashMap<ObjectKey, BTreeSet<&'a ObjectKey>>,
}

impl World {
    /// Returns the objects with a status: those that configure the mesh, without those that describe the platform, such
    /// as Pods.
    pub fn configured_objects(&self) -> Vec<(ObjectKey, &Origin)> {
        let mut all = Vec::new();
        macro_rules! add {
            ($($store:ident $kind:ident),*) => {
                $(add_objects(&mut all, &self.$store, Kind::$kind);)*
            };
        }
        add!(
            services Service, secrets Secret, virtual_services VirtualService, destination_rules DestinationRule,
            service_entries ServiceEntry, workload_entries WorkloadEntry, gateways Gateway, sidecars Sidecar,
            peer_authentications PeerAuthentication, authorization_policies AuthorizationPolicy,
            request_authentications RequestAuthentication, telemetries Telemetry, envoy_filters EnvoyFilter,
            ingresses Ingress, kubernetes_gateways KubernetesGateway, listener_sets ListenerSet,
            http_routes HttpRoute, grpc_routes GrpcRoute, tls_routes TlsRoute, tcp_routes TcpRoute,
            backend_tls_policies BackendTlsPolicy, rate_limit_policies RateLimitPolicy,
            wasm_plugins WasmPlugin, traffic_extensions TrafficExtension
        );
        all.extend(self.mesh.iter().map(|entry| (key(Kind::ConfigMap, &entry.object), &entry.origin)));
        all.retain(|(key, _)| !self.gateway_api.made.contains(key));
        // Hosts of ServiceEntries are services as well.
        all.retain(|(key, _)| {
            let service = || self.service_named(&key.namespace, &key.name);
            key.kind != Kind::Service || service().is_some_and(|service| service.spec.entry_host.is_none())
        });
        all
    }

    /// Returns an index of the resources that objects affect.
    pub fn reaches(&self) -> ReachIndex<'_> {
        let mut made: HashMap<ObjectKey, BTreeSet<&ObjectKey>> = HashMap::new();
        let is_origin = |key: &ObjectKey| {
            use Kind::{
                BackendTlsPolicy, GrpcRoute, HttpRoute, Ingress, KubernetesGateway, ListenerSet, TcpRoute,
                TlsRoute,
            };
            matches!(
                key.kind,
                BackendTlsPolicy
                    | GrpcRoute
                    | HttpRoute
                    | Ingress
                    | KubernetesGateway
                    | ListenerSet
                    | TcpRoute
                    | TlsRoute
            )
        };
        if !self.gateway_api.made.is_empty() {
            let objects = self.configured_objects();
            let origins = objects.iter().filter(|(key, _)| is_origin(key));
            let by_place: HashMap<(&str, u32), &ObjectKey> =
                origins.map(|(key, origin)| ((&*origin.file, origin.line), key)).collect();
            for internal in self.gateway_api.made.iter() {
                let origin = self.origin(internal);
                let of = origin.and_then(|origin| by_place.get(&(&*origin.file, origin.line)));
                of.into_iter()
                    .for_each(|of| _ = made.entry(ObjectKey::clone(of)).or_default().insert(internal));
                // A VirtualService may have the rules of several routes.
                let rule = Some(internal).filter(|key| key.kind == Kind::VirtualService);
                let rule = rule.and_then(|key| self.virtual_services.get(&key.namespace, &key.name));
                for source in rule
                    .iter()
                    .flat_map(|rule| &rule.object.spec.http)
                    .filter_map(|http| http.source.as_ref())
                {
                    let namespace = internal.namespace.clone();
                    let route = ObjectKey { kind: source.kind, namespace, name: source.route.to_string() };
                    made.entry(route).or_default().insert(internal);
                }
            }
        }
        ReachIndex { world: self, made }
    }
}

impl<'a> ReachIndex<'a> {
    /// Returns the resources that an object affects; none if it does not exist.
    pub fn of(&self, key: &ObjectKey) -> Vec<Reach<'a>> {
        let world = self.world;
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        match key.kind {
            Kind::Service => world.reach_of_service(namespace, name),
            Kind::ServiceEntry => {
                let entry = world.service_entries.get(namespace, name).map(|entry| &entry.object);
                let hosts = entry.into_iter().flat_map(|entry| entry.spec.hosts.iter().cloned());
                let hosts = hosts.map(|host| fqdn(&host, namespace));
                let clients = world.reach_of_hosts(hosts, SERVICE, |_| true);
                let workloads = entry.and_then(|entry| {
                    let selector = &entry.spec.workload_selector.as_ref()?.labels;
                    Some(reach_of_workloads(&entry.meta.namespace, selector))
                });
                iter::once(clients).chain(workloads).collect()
            }
            Kind::WorkloadEntry => {
                let services = world.changes_of_workload_entry(namespace, name).services;
                let services = services.iter().filter_map(|(of, name)| world.service_named(of, name));
                vec![world.reach_of_hosts(services.map(|service| service.fqdn()), CLUSTERS, |_| true)]
            }
            Kind::VirtualService => {
                let rule = world.virtual_services.get(namespace, name);
                rule.map(|rule| world.reach_of_rule(rule)).unwrap_or_default()
            }
            Kind::DestinationRule => world.reach_of_destination_rule(namespace, name),
            Kind::Gateway => {
                let Some(entry) = world.gateways.get(namespace, name) else { return Vec::new() };
                let gateway = &entry.object.spec;
                vec![own(GATEWAY, |view| {
                    view.role == Role::Router
                        && selects(&gateway.selector, &view.labels)
                        && gateway.only_in.as_ref().is_none_or(|only| *only == view.namespace)
                })]
            }
            Kind::Sidecar => {
                let Some(entry) = world.sidecars.get(namespace, name) else { return Vec::new() };
                let types = [SERVICE, LISTENERS].concat();
                vec![all(types, |view| {
                    let of = || world.sidecar(&view.namespace, &view.labels);
                    view.role != Role::Router && of().is_some_and(|of| of.meta == entry.object.meta)
                })]
            }
            Kind::Secret => reach_of_secret(namespace, name),
            Kind::ConfigMap if (namespace, name) == (mesh_config::NAMESPACE, mesh_config::NAME) => {
                vec![all(ResourceType::ALL.to_vec(), |_| true)]
            }
            Kind::EnvoyFilter => {
                let Some(entry) = world.envoy_filters.get(namespace, name) else { return Vec::new() };
                let root = world.mesh().root_namespace.as_str();
                let patches = entry.object.spec.config_patches.iter();
                let types: BTreeSet<ResourceType> =
                    patches.flat_map(|patch| patched(patch.apply_to)).copied().collect();
                vec![all(types.into_iter().collect(), move |view| {
                    envoy_filters::applies(&entry.object, view, root)
                })]
            }
            Kind::RateLimitPolicy => {
                let policy = world.rate_limit_policies.get(namespace, name).map(|entry| &entry.object);
                policy.map(|policy| self.of_rate_limits(policy)).unwrap_or_default()
            }
            Kind::WasmPlugin | Kind::TrafficExtension => world.reach_of_extension(key).into_iter().collect(),
            Kind::PeerAuthentication
            | Kind::AuthorizationPolicy
            | Kind::RequestAuthentication
            | Kind::Telemetry => world.reach_of_policy(key).into_iter().collect(),
            _ => self.made.get(key).into_iter().flatten().flat_map(|made| self.of(made)).collect(),
        }
    }

    fn of_rate_limits(&self, policy: &'a Typed<RateLimitPolicy>) -> Vec<Reach<'a>> {
        let namespace = &policy.meta.namespace;
        let is_root = *namespace == self.world.mesh().root_namespace;
        let mut reaches = vec![own(LISTENERS, move |view| {
            let is_own = *namespace == view.namespace;
            (is_own || is_root) && rate_limits::application(policy, view, is_own).is_some()
        })];
        let routes = policy.spec.target_refs.iter().filter(|target| target.is_route());
        let of_target = |target: &RateLimitTarget| {
            let kinds = [Kind::VirtualService, Kind::HttpRoute, Kind::GrpcRoute];
            let kind = kinds.into_iter().find(|kind| kind.as_str() == target.kind)?;
            Some(ObjectKey { kind, namespace: namespace.clone(), name: target.name.clone() })
        };
        reaches.extend(routes.filter_map(of_target).flat_map(|route| self.of(&route)));
        reaches
    }
}

impl World {
    fn reach_of_service(&self, namespace: &str, name: &str) -> Vec<Reach<'_>> {
        let Some(service) = self.service_named(namespace, name) else { return Vec::new() };
        let workloads = reach_of_workloads(&service.meta.namespace, &service.spec.selector);
        let sees = |view: &ProxyView| self.service_visible(service, &view.namespace);
        vec![self.reach_of_hosts([service.fqdn()].into_iter(), SERVICE, sees), workloads]
    }

    fn reach_of_rule<'a>(&'a self, entry: &'a Entry<VirtualService>) -> Vec<Reach<'a>> {
        let (meta, spec) = (&entry.object.meta, &entry.object.spec);
        if spec.hosts.is_empty() {
            let roots = self.roots_of(&meta.namespace, &meta.name);
            // A root that is a delegate itself has no effect.
            let roots = roots.filter(|root| !root.object.spec.hosts.is_empty());
            return roots.flat_map(|root| self.reach_of_rule(root)).collect();
        }
        let sees = move |view: &ProxyView| self.virtual_service_visible(entry, &view.namespace);
        let mut reaches = Vec::new();
        if spec.is_for_mesh() {
            reaches.push(self.reach_of_hosts(mesh_hosts(&entry.object).into_iter(), ROUTES, sees));
            if routes_connections(spec) {
                reaches.push(own(LISTENERS, move |view| view.role == Role::Sidecar && sees(view)));
            }
            // With Sidecars, a client sees a destination because a VirtualService leads to it.
            if self.has_sidecars() {
                reaches.push(self.reach_of_hosts(targets(&entry.object).into_iter(), CLUSTERS, sees));
            }
        }
        let names = spec.gateways.iter().map(|name| gateway_name(name, &meta.namespace));
        let gateways = names.filter_map(|name| {
            let (namespace, name) = name.split_once('/')?;
            Some(&self.gateways.get(namespace, name)?.object.spec)
        });
        let gateways: Vec<_> = gateways.collect();
        if !gateways.is_empty() {
            let types = if routes_connections(spec) { GATEWAY } else { &[ResourceType::Route] };
            reaches.push(own(types, move |view| {
                let is_bound = || gateways.iter().any(|gateway| selects(&gateway.selector, &view.labels));
                view.role == Role::Router && is_bound() && sees(view)
            }));
        }
        reaches
    }

    fn reach_of_destination_rule(&self, namespace: &str, name: &str) -> Vec<Reach<'_>> {
        let Some(entry) = self.destination_rules.get(namespace, name) else { return Vec::new() };
        let (meta, spec) = (&entry.object.meta, &entry.object.spec);
        let applies = move |view: &ProxyView| {
            let selector = spec.workload_selector.as_ref();
            exports(self.destination_rule_export_to(entry), &meta.namespace, &view.namespace)
                && selector.is_none_or(|of| {
                    meta.namespace == view.namespace && selects(&of.match_labels, &view.labels)
                })
        };
        let mut reaches =
            vec![self.reach_of_hosts([fqdn(&spec.host, &meta.namespace)].into_iter(), CLUSTERS, applies)];
        if spec.has_credential() {
            let names = spec.credentials().flat_map(|tls| match tls.credential_name.as_str() {
                name if name.contains("://") => secret_names("", name),
                name => secret_names(SECRET, name),
            });
            let (types, resources) = (vec![ResourceType::Secret], ReachedResources::Own(names.collect()));
            reaches.push(Reach { types, resources, applies: Box::new(applies) });
        }
        reaches
    }

    /// Returns the reach of a policy that selects workloads.
    fn reach_of_policy(&self, key: &ObjectKey) -> Option<Reach<'_>> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        macro_rules! attached {
            ($store:ident) => {{
                let object = &self.$store.get(namespace, name)?.object;
                let spec = &object.spec;
                let targets = spec.target_ref.iter().chain(&spec.target_refs).collect();
                self.reach_of_attached(&object.meta.namespace, spec.selector.as_ref(), targets)
            }};
        }
        Some(match key.kind {
            Kind::AuthorizationPolicy => attached!(authorization_policies),
            Kind::RequestAuthentication => attached!(request_authentications),
            Kind::Telemetry => attached!(telemetries),
            _ => {
                let object = &self.peer_authentications.get(namespace, name)?.object;
                let selector = object.spec.selector.as_ref();
                let is_mesh_wide = object.meta.namespace == self.mesh().root_namespace && is_wide(selector);
                own(LISTENERS, move |view| {
                    is_mesh_wide
                        || object.meta.namespace == view.namespace && selected(selector, &view.labels)
                })
            }
        })
    }

    /// Returns the reach of a WasmPlugin or a TrafficExtension.
    fn reach_of_extension(&self, key: &ObjectKey) -> Option<Reach<'_>> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        if key.kind == Kind::WasmPlugin {
            let Typed { meta, spec } = &*self.wasm_plugins.get(namespace, name)?.object;
            let targets = spec.target_ref.iter().chain(&spec.target_refs).collect();
            return Some(self.reach_of_attached(&meta.namespace, spec.selector.as_ref(), targets));
        }
        let Typed { meta, spec } = &*self.traffic_extensions.get(namespace, name)?.object;
        let targets = spec.target_refs.iter().collect();
        Some(self.reach_of_attached(&meta.namespace, spec.selector.as_ref(), targets))
    }

    fn reach_of_attached<'a>(
        &'a self,
        namespace: &'a str,
        selector: Option<&'a WorkloadSelector>,
        targets: Vec<&'a TargetRef>,
    ) -> Reach<'a> {
        let is_root = namespace == self.mesh().root_namespace;
        own(LISTENERS, move |view| {
            let is_own = namespace == view.namespace;
            (is_own || is_root) && applies(selector, targets.iter().copied(), is_own, &view.labels)
        })
    }

    /// Returns the reach of an object that affects resources of hosts.
    fn reach_of_hosts<'a>(
        &self,
        patterns: impl Iterator<Item = String>,
        types: &[ResourceType],
        applies: impl Fn(&ProxyView) -> bool + Send + Sync + 'a,
    ) -> Reach<'a> {
        let (mut hosts, mut ports) = (BTreeSet::new(), BTreeSet::new());
        for pattern in patterns {
            let mut is_service = false;
            let one = if pattern.starts_with('*') { None } else { self.service(&pattern) };
            let several =
                self.services().filter(|of| pattern.starts_with('*') && host_matches(&pattern, &of.fqdn()));
            for service in one.into_iter().chain(several) {
                is_service = true;
                hosts.insert(service.fqdn());
                ports.extend(service.spec.ports.iter().map(|port| port.port));
            }
            // A VirtualService has routes on port 80 for hosts without a service of this port.
            if !is_service || types == ROUTES {
                ports.insert(super::WELL_KNOWN_PORT);
            }
            hosts.insert(pattern);
        }
        let resources = ReachedResources::Hosts { hosts, ports };
        Reach { types: types.to_vec(), resources, applies: Box::new(applies) }
    }
}

/// Returns the reach of a service at the workloads that it selects.
fn reach_of_workloads<'a>(namespace: &'a str, selector: &'a Labels) -> Reach<'a> {
    own(&[ResourceType::Cluster, ResourceType::Listener], move |view| {
        view.role == Role::Sidecar
            && view.namespace == namespace
            && !selector.is_empty()
            && selects(selector, &view.labels)
    })
}

/// Returns the secrets that come from a Secret. As in Istio, a proxy gets those of its own namespace, and those that a
/// Gateway of Gateway API may refer to.
fn reach_of_secret<'a>(namespace: &str, name: &str) -> Vec<Reach<'a>> {
    let of = |names, applies: Box<dyn Fn(&ProxyView) -> bool + Send + Sync>| Reach {
        types: vec![ResourceType::Secret],
        resources: ReachedResources::Own(names),
        applies,
    };
    let owner = namespace.to_owned();
    vec![
        of(secret_names(SECRET, name), Box::new(move |view| view.namespace == owner)),
        of(secret_names(&format!("{CREDENTIAL}{namespace}/"), name), Box::new(|_| true)),
    ]
}

/// Returns the names of the secrets of a credential: its certificate and its roots.
fn secret_names(prefix: &str, name: &str) -> Vec<String> {
    vec![format!("{prefix}{name}"), format!("{prefix}{name}-cacert")]
}

/// Returns the types of the resources that a patch changes.
fn patched(to: ApplyTo) -> &'static [ResourceType] {
    match to {
        ApplyTo::Invalid | ApplyTo::Bootstrap => &[],
        ApplyTo::Cluster => &[ResourceType::Cluster],
        // Inbound listeners contain their routes.
        ApplyTo::RouteConfiguration | ApplyTo::VirtualHost | ApplyTo::HttpRoute => {
            &[ResourceType::Listener, ResourceType::Route, ResourceType::VirtualHost]
        }
        ApplyTo::ExtensionConfig => &[ResourceType::Listener, ResourceType::ExtensionConfig],
        ApplyTo::Listener
        | ApplyTo::FilterChain
        | ApplyTo::NetworkFilter
        | ApplyTo::HttpFilter
        | ApplyTo::ListenerFilter => LISTENERS,
    }
}

fn own<'a>(types: &[ResourceType], applies: impl Fn(&ProxyView) -> bool + Send + Sync + 'a) -> Reach<'a> {
    let resources = ReachedResources::Own(Vec::new());
    Reach { types: types.to_vec(), resources, applies: Box::new(applies) }
}

fn all<'a>(types: Vec<ResourceType>, applies: impl Fn(&ProxyView) -> bool + Send + Sync + 'a) -> Reach<'a> {
    Reach { types, resources: ReachedResources::All, applies: Box::new(applies) }
}

fn add_objects<'a, T>(all: &mut Vec<(ObjectKey, &'a Origin)>, store: &'a Store<T>, kind: Kind) {
    all.extend(store.iter().map(|entry| (key(kind, &entry.object), &entry.origin)));
}

fn key<T>(kind: Kind, object: &Arc<Typed<T>>) -> ObjectKey {
    ObjectKey { kind, namespace: object.meta.namespace.clone(), name: object.meta.name.clone() }
}
