//! World × proxy view → xDS resources, as istiod would send them.
//!
//! Clusters, endpoints and routes depend on the client only by its [`ClientScope`], and are shared by all clients that have the
//! same; each [`Part`] of them is made by itself. Listeners depend on the whole view.
//!
//! In the order of the data: [`pb`], [`packed`] and [`order`] (messages and their bytes), [`policy`], [`pool`], [`balance`] and [`locality`] (which settings hold), [`tls`], [`clusters`], [`endpoints`],
//! [`clause`] and [`rbac`] (authorization), [`access_log`], [`filters`], [`listeners`], [`routes`], [`nametable`]; [`grpc`] for
//! clients without a proxy.

mod access_log;
mod balance;
mod clause;
mod clusters;
mod endpoints;
mod filters;
mod grpc;
mod listeners;
mod locality;
mod nametable;
mod order;
mod packed;
mod pb;
mod policy;
mod pool;
mod rbac;
mod routes;
mod tls;

use std::{collections::BTreeSet, sync::Arc};

use skysail_proto::Codec;
use skysail_xds::{Kind, Resource, Resources};

pub use self::listeners::Outline;

use crate::{
    ClientScope, Diagnostic, ObjectKey, ProxyView, Role, Severity, World,
    api::{self, AuthorizationPolicy, DestinationRule, Labels, Protocol, Service, Typed, kube::Locality},
};

/// Unit of compilation: resources that are compiled together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The clusters and endpoints of a service: namespace and name.
    Service(String, String),
    /// All routes.
    Routes,
    /// The names of services: the name table; for gRPC's clients the listeners.
    Names,
    /// Trust bundles by trust domain.
    Trust,
}

/// Compiles all resources of a proxy. Also returns findings about configuration that could not be compiled as written.
pub fn compile(world: &World, view: &ProxyView) -> (Resources, Vec<Diagnostic>) {
    let surroundings = ClientScope::of(view, &world.label_keys());
    let (mut made, findings) = compile_own(world, view, &outline(world, &surroundings));
    for part in parts(world, &surroundings) {
        compile_part(world, &surroundings, &part).into_iter().for_each(|resource| made.insert(resource));
    }
    (made, findings)
}

/// The parts that proxies of these surroundings share.
pub fn parts(world: &World, surroundings: &ClientScope) -> Vec<Part> {
    let scope = Scope::new(world, surroundings);
    let of =
        |service: &Typed<Service>| Part::Service(service.meta.namespace.clone(), service.meta.name.clone());
    scope.services().map(|service| of(service)).chain([Part::Routes, Part::Names, Part::Trust]).collect()
}

/// Compiles a part for proxies of these surroundings; empty if the part does not exist.
pub fn compile_part(world: &World, surroundings: &ClientScope, part: &Part) -> Vec<Arc<Resource>> {
    let scope = Scope::new(world, surroundings);
    match part {
        Part::Service(namespace, name) => {
            let service = world.service_named(namespace, name).filter(|service| scope.sees(service));
            service.map(|service| of_service(&scope, service)).unwrap_or_default()
        }
        Part::Routes if scope.role == Role::Router => Vec::new(),
        Part::Routes if scope.role == Role::Grpc => {
            scope.services().flat_map(|service| grpc::routes(&scope, service)).collect()
        }
        Part::Routes => {
            let services: Vec<&Typed<Service>> = scope.services().map(Arc::as_ref).collect();
            let named = listeners::named(&services);
            let shared = named.shared.iter().flat_map(|port| routes::shared(&scope, &services, *port));
            let own = named.own.iter().map(|(service, port)| routes::own(&scope, service, *port));
            shared.chain(own).collect()
        }
        Part::Names => {
            let services: Vec<&Typed<Service>> = scope.services().map(Arc::as_ref).collect();
            if scope.role == Role::Grpc {
                return grpc::listeners(&scope, &services);
            }
            vec![order::encode(Kind::NameTable, "", &nametable::compile(&scope, &services))]
        }
        Part::Trust if scope.role == Role::Grpc => Vec::new(),
        Part::Trust => {
            let bundles = tls::bundles(world.mesh(), world.roots());
            bundles.iter().map(|secret| order::encode(Kind::Secret, &secret.name, secret)).collect()
        }
    }
}

/// Whether a part is the same for proxies of two surroundings that are [`kin`](ClientScope::kin), as far as that is easily
/// seen: what services are to others seldom depends on the namespace these are in.
pub fn is_alike(world: &World, one: &ClientScope, other: &ClientScope, part: &Part) -> bool {
    let Part::Service(namespace, name) = part else { return false };
    let Some(service) = world.service_named(namespace, name) else { return false };
    let (one, other) = (Scope::new(world, one), Scope::new(world, other));
    one.sees(service) && other.sees(service) && one.rule(service) == other.rule(service)
}

/// The routes of one host ([`ChangeSet::hosts`](crate::ChangeSet::hosts)) anew, for proxies that have these surroundings and take
/// [routes by host](ClientScope::routes_by_host); `made` gives what was made before.
pub fn compile_host(
    world: &World,
    surroundings: &ClientScope,
    host: &str,
    made: impl Fn(Kind, &str) -> Option<Arc<Resource>>,
) -> Vec<Arc<Resource>> {
    let scope = Scope::new(world, surroundings);
    let Some(service) = world.service(host) else { return Vec::new() };
    if scope.role == Role::Grpc {
        grpc::routes(&scope, service)
    } else {
        routes::again(&scope, service, made)
    }
}

/// Outline of the outbound listeners of proxies of these surroundings.
pub fn outline(world: &World, surroundings: &ClientScope) -> Outline {
    match surroundings.role {
        Role::Sidecar => listeners::outline(Scope::new(world, surroundings).services()),
        Role::Router | Role::Grpc => Outline::default(),
    }
}

/// Compiles the resources that depend on a proxy's workload. Also returns findings about configuration that could not be compiled as
/// written. The outline is that of the proxy's surroundings.
pub fn compile_own(world: &World, view: &ProxyView, outline: &Outline) -> (Resources, Vec<Diagnostic>) {
    let mut findings = CompileFindings { world, list: Vec::new() };
    let mut made = Resources::default();
    // Labels matter to routes and endpoints only, which are shared.
    let surroundings = ClientScope::of(view, &BTreeSet::new());
    let scope = Scope::new(world, &surroundings);
    match view.role {
        Role::Router => add_cluster(&mut made, &clusters::black_hole()),
        Role::Grpc => {}
        Role::Sidecar => add_sidecar(&mut made, &scope, view, outline, &mut findings),
    }
    (made, findings.list)
}

/// Properties of a client on which shared resources depend.
struct Scope<'a> {
    world: &'a World,
    role: Role,
    /// Namespace of the client, which decides the visibility of objects.
    namespace: &'a str,
    /// The cluster endpoints are in.
    cluster_id: &'a str,
    /// Locality of the client.
    locality: &'a Locality,
    /// The client's labels, by which endpoints can be near and routes can hold.
    labels: &'a Labels,
    ipv4: bool,
    ipv6: bool,
    /// The client detects the protocol of undeclared ports. Gateways have it in their own configuration.
    sniffs: bool,
    /// Istio's own filters must be left out.
    plain_envoy: bool,
    /// Virtual hosts are resources of their own.
    hosts_apart: bool,
    /// Names of endpoints are sent as their addresses.
    names_resolved: bool,
}

impl<'a> Scope<'a> {
    fn new(world: &'a World, surroundings: &'a ClientScope) -> Self {
        Self {
            world,
            role: surroundings.role,
            namespace: &surroundings.namespace,
            cluster_id: &surroundings.cluster_id,
            locality: &surroundings.locality,
            labels: &surroundings.labels,
            ipv4: surroundings.ipv4,
            ipv6: surroundings.ipv6,
            sniffs: surroundings.role == Role::Sidecar,
            plain_envoy: surroundings.plain_envoy,
            hosts_apart: surroundings.hosts_apart,
            names_resolved: surroundings.names_resolved,
        }
    }

    /// The services a client of this scope may call.
    fn services(&self) -> impl Iterator<Item = &'a Arc<Typed<Service>>> {
        self.world.services().filter(|service| self.sees(service))
    }

    /// Whether a client of this scope may call a service.
    fn sees(&self, service: &Typed<Service>) -> bool {
        service.spec.external_name.is_none()
            && self.world.service_visible(service, self.namespace)
            && self.world.service_chosen(service, self.namespace)
    }

    /// The rule a client of this scope follows towards a service.
    fn rule(&self, service: &Typed<Service>) -> Option<Arc<Typed<DestinationRule>>> {
        self.world.destination_rule(&service.fqdn(), self.namespace)
    }
}

/// CompileFindings about configuration that is not applied as written.
struct CompileFindings<'a> {
    world: &'a World,
    list: Vec<Diagnostic>,
}

impl CompileFindings<'_> {
    fn warn(&mut self, policy: &Typed<AuthorizationPolicy>, field: &str, message: &str, remedy: &str) {
        let key = ObjectKey {
            kind: api::Kind::AuthorizationPolicy,
            namespace: policy.meta.namespace.clone(),
            name: policy.meta.name.clone(),
        };
        let origin = self.world.origin_of(policy).cloned().unwrap_or_default();
        let finding = Diagnostic::new(Severity::Warning, &origin.file, origin.line_of(field), message);
        self.list.push(finding.object(&key).field(field).remedy(remedy));
    }
}

/// The clusters and endpoints of a service.
fn of_service(scope: &Scope<'_>, service: &Typed<Service>) -> Vec<Arc<Resource>> {
    let mut made = Vec::new();
    let rule = scope.rule(service);
    for port in service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp) {
        let mut clusters = if scope.role == Role::Grpc {
            grpc::clusters(scope, service, port, rule.as_deref())
        } else {
            clusters::outbound(scope, service, port, rule.as_deref())
        };
        let by_discovery = clusters.iter().any(|cluster| cluster.eds_cluster_config.is_some());
        if by_discovery {
            let assignments = endpoints::assignments(scope, service, port, rule.as_deref());
            made.extend(assignments.iter().map(|one| order::encode(Kind::Endpoint, &one.cluster_name, one)));
        } else if clusters.iter().any(clusters::looks_up) {
            let assignments = endpoints::assignments(scope, service, port, rule.as_deref());
            for (cluster, assignment) in clusters.iter_mut().zip(assignments) {
                cluster.load_assignment = clusters::looks_up(cluster).then_some(assignment);
            }
        }
        made.extend(clusters.iter().map(|cluster| order::encode(Kind::Cluster, &cluster.name, cluster)));
    }
    made
}

/// What only a sidecar has.
fn add_sidecar(
    made: &mut Resources,
    scope: &Scope<'_>,
    view: &ProxyView,
    outline: &Outline,
    findings: &mut CompileFindings<'_>,
) {
    clusters::special(view).iter().for_each(|cluster| add_cluster(made, cluster));
    let ports = listeners::inbound_ports(scope.world, view);
    for port in &ports {
        add_cluster(made, &clusters::inbound(scope, view, port));
    }

    let policies = scope.world.authorization_policies(&view.namespace, &view.labels);
    let policies = policies.iter().map(|policy| policy.as_ref());
    let tcp_ports: Vec<u16> = ports
        .iter()
        .filter(|port| !port.protocol.is_http() && port.protocol != Protocol::Unknown)
        .map(|port| port.port)
        .collect();
    let authorization = rbac::Authorization::new(scope.world.mesh(), policies, &tcp_ports, findings);
    let inbound = listeners::inbound(scope.world, view, &ports, &authorization);
    add(made, Kind::Listener, &inbound.name, &inbound);
    for listener in listeners::outbound(scope.world, view, outline) {
        add(made, Kind::Listener, &listener.name, &listener);
    }
}

fn add_cluster(made: &mut Resources, cluster: &pb::cluster::Cluster) {
    add(made, Kind::Cluster, &cluster.name, cluster);
}

fn add<M: Codec>(made: &mut Resources, kind: Kind, name: &str, message: &M) {
    made.insert(order::encode(kind, name, message));
}

#[cfg(test)]
mod tests;
