//! World × proxy view → xDS resources, as istiod would send them.
//!
//! Each module makes one kind of resource and declares what it depends on. Clusters and endpoints of a service depend
//! on the client only by what a [`Scope`] holds, so they can be shared between all views of one scope; routes depend
//! on the client's labels too (`sourceLabels`), listeners on the whole view.
//!
//! In the order of the data: [`pb`], [`packed`] and [`order`] (messages and their bytes), [`policy`], [`pool`], [`balance`] and [`locality`] (which settings hold), [`tls`], [`clusters`], [`endpoints`],
//! [`clause`] and [`rbac`] (authorization), [`access_log`], [`filters`], [`listeners`], [`routes`], [`nametable`].

mod access_log;
mod balance;
mod clause;
mod clusters;
mod endpoints;
mod filters;
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

use std::sync::Arc;

use skysail_xds::{Kind, Resource, Resources};

use crate::{
    Diagnostic, ObjectKey, ProxyView, Role, Severity, World,
    api::{self, AuthorizationPolicy, DestinationRule, Labels, Protocol, Service, Typed, kube::Locality},
};

/// Everything a proxy is to be sent, and what could not be made as it was written.
pub fn compile(world: &World, view: &ProxyView) -> (Resources, Vec<Diagnostic>) {
    let mut findings = Findings { world, list: Vec::new() };
    let mut made = Resources::default();
    let scope = Scope {
        world,
        namespace: &view.namespace,
        cluster_id: &view.cluster_id,
        locality: &view.locality,
        labels: &view.labels,
        sniffs: view.role == Role::Sidecar,
        plain_envoy: view.plain_envoy,
    };
    let services: Vec<&Typed<Service>> = scope.services().collect();
    for service in &services {
        add_service(&mut made, &scope, service);
    }
    add(&mut made, Kind::NameTable, "", &nametable::compile(&scope, view.role, &services));
    match view.role {
        Role::Router => add_cluster(&mut made, &clusters::black_hole()),
        Role::Sidecar => add_sidecar(&mut made, &scope, view, &services, &mut findings),
    }
    (made, findings.list)
}

/// What clusters and endpoints depend on beside the World.
struct Scope<'a> {
    world: &'a World,
    /// The client's namespace, which decides what it sees.
    namespace: &'a str,
    /// The cluster endpoints are in.
    cluster_id: &'a str,
    /// Where the client is.
    locality: &'a Locality,
    /// The client's labels, by which endpoints can be near.
    labels: &'a Labels,
    /// The client finds out what undeclared ports speak. Gateways know it from their own configuration.
    sniffs: bool,
    /// Istio's own filters must be left out.
    plain_envoy: bool,
}

impl<'a> Scope<'a> {
    /// The services a client of this scope may call.
    fn services(&self) -> impl Iterator<Item = &'a Typed<Service>> {
        let (world, namespace) = (self.world, self.namespace);
        let all = world.services().map(Arc::as_ref);
        all.filter(move |service| {
            service.spec.external_name.is_none() && world.service_visible(service, namespace)
        })
    }

    /// The rule a client of this scope follows towards a service.
    fn rule(&self, service: &Typed<Service>) -> Option<Arc<Typed<DestinationRule>>> {
        self.world.destination_rule(&service.fqdn(), self.namespace)
    }
}

/// What of the configuration is not done as written.
struct Findings<'a> {
    world: &'a World,
    list: Vec<Diagnostic>,
}

impl Findings<'_> {
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
fn add_service(made: &mut Resources, scope: &Scope<'_>, service: &Typed<Service>) {
    let rule = scope.rule(service);
    for port in service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp) {
        let clusters = clusters::outbound(scope, service, port, rule.as_deref());
        let by_discovery = clusters.iter().any(|cluster| cluster.eds_cluster_config.is_some());
        clusters.iter().for_each(|cluster| add_cluster(made, cluster));
        if by_discovery {
            for assignment in endpoints::assignments(scope, service, port, rule.as_deref()) {
                add(made, Kind::Endpoint, &assignment.cluster_name, &assignment);
            }
        }
    }
}

/// What only a sidecar has.
fn add_sidecar(
    made: &mut Resources,
    scope: &Scope<'_>,
    view: &ProxyView,
    services: &[&Typed<Service>],
    findings: &mut Findings<'_>,
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

    let outbound = listeners::outbound(scope.world, view, services);
    for listener in &outbound.listeners {
        add(made, Kind::Listener, &listener.name, listener);
    }
    let shared = outbound.shared_ports.iter().map(|port| routes::shared(scope, view, services, *port));
    let own = outbound.own_routes.iter().map(|(service, port)| routes::own(scope, view, service, *port));
    for routes in shared.chain(own) {
        add(made, Kind::Route, &routes.name, &routes);
    }
}

fn add_cluster(made: &mut Resources, cluster: &pb::cluster::Cluster) {
    add(made, Kind::Cluster, &cluster.name, cluster);
}

fn add<M: prost::Message>(made: &mut Resources, kind: Kind, name: &str, message: &M) {
    made.insert(Resource::encode(kind, name, message));
}

#[cfg(test)]
mod tests;
