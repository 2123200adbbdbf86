//! Compilation of a World and a proxy's view to xDS resources, as istiod would send them.
//!
//! Clusters and endpoints of services, and routes of sidecars, depend only on the [`ClientScope`] of the client. They
//! are shared by all clients with an equal one, and each [`Part`] of them is compiled separately. Listeners, inbound
//! clusters and routes of gateways depend on the whole view.
//!
//! Modules in the order of the data:
//!
//! - [`pb`], [`packed`] and [`order`]: messages and their bytes
//! - [`policy`], [`pool`], [`balance`] and [`locality`]: settings of DestinationRules; [`stat_names`] and [`protocol`]
//! - [`visibility`], [`tls`], [`dynamic_dns`], [`networks`], [`clusters`], [`endpoints`]
//! - [`clause`], [`authorizer`], [`jwt`] and [`rbac`]: authentication of requests and authorization
//! - [`rate_limit`]: limits of requests
//! - [`client_match`]: conditions of VirtualServices on the client
//! - [`access_log`], [`tracing`], [`telemetry`], [`filters`], [`listeners`], [`routes`], [`nametable`]
//! - [`gateway`]: listeners, routes and secrets of gateways
//! - [`grpc`]: clients without a proxy
//! - [`envoy_filter`]: patches of the result
//! - [`excluded`]: what is not compiled for a client, and why

mod access_log;
mod authorizer;
mod balance;
mod clause;
mod client_match;
mod clusters;
mod connections;
mod dynamic_dns;
mod endpoints;
mod envoy_filter;
mod excluded;
mod extension;
mod filters;
mod gateway;
mod grpc;
mod jwt;
mod listeners;
mod locality;
mod nametable;
mod networks;
mod order;
mod packed;
mod pb;
mod policy;
mod pool;
mod protocol;
mod rate_limit;
mod rbac;
mod routes;
mod stat_names;
mod telemetry;
mod tls;
mod tracing;
mod visibility;

use std::{collections::BTreeSet, sync::Arc};

use networks::ClusterForm;
use skysail_proto::Codec;
use skysail_xds::{Kind, Resource, Resources};

pub use self::{
    excluded::{ExcludedMatch, RuleKind, excluded_matches},
    gateway::{ServerSource, gateway_l4_source, gateway_servers},
    jwt::{TokenRule, token_rules},
    listeners::{Outline, sidecar_l4_field},
};

use crate::{
    ClientScope, Code, Diagnostic, ObjectKey, ProxyView, Role, World,
    api::{
        self, AuthorizationPolicy, DestinationRule, Labels, Protocol, Service, Typed, VirtualService,
        kube::Locality, mesh_config::OutboundMode, proxy_config::SharedHeaders, sidecar::Egress,
        virtual_service::Destination,
    },
    world::{Endpoint, Grouping, NamespaceFacts, gateway_name},
};

/// Unit of compilation: resources that are compiled together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Clusters and endpoints of a service: namespace and name.
    Service(String, String),
    /// All routes.
    Routes,
    /// Names of services: the name table; for gRPC clients the listeners.
    Names,
    /// Trust bundles by trust domain.
    Trust,
}

/// Compiles all resources of a proxy on an unknown node. Also returns diagnostics about configuration that could not be
/// compiled as written.
pub fn compile(world: &World, view: &ProxyView) -> (Resources, Vec<Diagnostic>) {
    compile_for(world, view, "")
}

/// Compiles all resources of a proxy on a node ([`ProxyNode::hostname`](crate::ProxyNode::hostname)), as [`compile`] does.
pub fn compile_for(world: &World, view: &ProxyView, node: &str) -> (Resources, Vec<Diagnostic>) {
    let client_scope = ClientScope::of(view, &world.grouping());
    let (mut made, findings) = compile_own(world, view, &outline(world, &client_scope));
    for part in parts(world, &client_scope) {
        compile_part(world, &client_scope, &part).into_iter().for_each(|resource| made.insert(resource));
        if let Part::Service(namespace, name) = &part {
            let on_node = compile_on_nodes(world, &client_scope, (namespace, name), [node]);
            on_node.into_iter().flat_map(|(_, of_node)| of_node).for_each(|resource| made.insert(resource));
        }
    }
    (made, findings)
}

/// Returns the parts shared by proxies with this client scope.
pub fn parts(world: &World, client_scope: &ClientScope) -> Vec<Part> {
    let scope = Scope::new(world, client_scope);
    let of =
        |service: &Typed<Service>| Part::Service(service.meta.namespace.clone(), service.meta.name.clone());
    scope.services().map(|service| of(&service)).chain([Part::Routes, Part::Names, Part::Trust]).collect()
}

/// Compiles a part for proxies with this client scope; empty if the part does not exist.
pub fn compile_part(world: &World, client_scope: &ClientScope, part: &Part) -> Vec<Arc<Resource>> {
    envoy_filter::patch_shared(world, client_scope, unpatched_part(world, client_scope, part))
}

fn unpatched_part(world: &World, client_scope: &ClientScope, part: &Part) -> Vec<Arc<Resource>> {
    let scope = Scope::new(world, client_scope);
    match part {
        Part::Service(namespace, name) => {
            let service = world.service_named(namespace, name).and_then(|service| scope.seen(service));
            service.map(|service| of_service(&scope, &service)).unwrap_or_default()
        }
        Part::Routes if scope.role == Role::Router => Vec::new(),
        Part::Routes if scope.role == Role::Grpc => {
            scope.services().flat_map(|service| grpc::routes(&scope, &service)).collect()
        }
        Part::Routes => {
            let services: Vec<Arc<Typed<Service>>> = scope.routed_services().collect();
            let services: Vec<&Typed<Service>> = services.iter().map(Arc::as_ref).collect();
            let named = listeners::named(&services);
            let shared = named.shared.iter().flat_map(|port| routes::shared(&scope, &services, *port));
            let own = named.own.iter().map(|(service, port)| routes::own(&scope, service, *port));
            let at_sockets = scope.http_sockets().filter_map(|listener| {
                let services = scope.socket_services(listener);
                (!services.is_empty()).then(|| routes::at_socket(&scope, &listener.bind, &services))
            });
            shared.chain(own).chain(at_sockets).collect()
        }
        Part::Names => {
            let services: Vec<Arc<Typed<Service>>> = scope.services().collect();
            let services: Vec<&Typed<Service>> = services.iter().map(Arc::as_ref).collect();
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

/// Compiles a service (namespace, name) for those of these nodes on which its clients may have other resources than
/// those of [`compile_part`]: the nodes of its endpoints, and the unknown node (empty). Some of the resources may be equal.
pub fn compile_on_nodes<N: AsRef<str>>(
    world: &World,
    client_scope: &ClientScope,
    (namespace, name): (&str, &str),
    nodes: impl IntoIterator<Item = N>,
) -> Vec<(N, Vec<Arc<Resource>>)> {
    let scope = Scope::new(world, client_scope);
    let service = world.service_named(namespace, name).and_then(|service| scope.seen(service));
    let Some(service) = service else { return Vec::new() };
    if !locality::depends_on_node(&scope, &service, scope.rule(&service).as_deref().map(|rule| &rule.spec)) {
        return Vec::new();
    }
    let endpoints = service.spec.ports.iter().flat_map(|port| world.endpoints(&service, port));
    let known: BTreeSet<String> = endpoints.map(|member| locality::node_of(&member).to_owned()).collect();
    let is_known = |node: &N| node.as_ref().is_empty() || known.contains(node.as_ref());
    let compile = |node: N| {
        let scope = Scope { node: Some(node.as_ref()), ..scope };
        let made = envoy_filter::patch_shared(world, client_scope, of_service(&scope, &service));
        (node, made)
    };
    nodes.into_iter().filter(is_known).map(compile).collect()
}

/// Returns the services (namespace, name) whose resources may depend on the client's node.
pub fn services_by_node(world: &World, client_scope: &ClientScope) -> Vec<(String, String)> {
    let scope = Scope::new(world, client_scope);
    let by_node = |service: &Arc<Typed<Service>>| {
        locality::depends_on_node(&scope, service, scope.rule(service).as_deref().map(|rule| &rule.spec))
    };
    let of = |service: Arc<Typed<Service>>| (service.meta.namespace.clone(), service.meta.name.clone());
    scope.services().filter(by_node).map(of).collect()
}

/// Returns whether a part is known to be equal for two sibling scopes ([`is_sibling`](ClientScope::is_sibling)). May
/// return false for equal parts. Clusters rarely depend on the client's namespace.
pub fn is_equal_for_siblings(world: &World, one: &ClientScope, other: &ClientScope, part: &Part) -> bool {
    let Part::Service(namespace, name) = part else { return false };
    let Some(service) = world.service_named(namespace, name) else { return false };
    let (one, other) = (Scope::new(world, one), Scope::new(world, other));
    let ports = |scope: &Scope<'_>| scope.seen(service).map(|service| service.spec.ports.clone());
    let is_seen_alike = match (&one.egress, &other.egress) {
        (None, None) => one.sees(service) && other.sees(service),
        _ => ports(&one).is_some_and(|ports_of_one| Some(ports_of_one) == ports(&other)),
    };
    is_seen_alike && one.rule(service) == other.rule(service)
}

/// Compiles the routes of one host ([`ChangeSet::hosts`](crate::ChangeSet::hosts)) again, for clients with this
/// scope and [routes by host](ClientScope::routes_by_host). `made` returns the previous resource.
pub fn compile_host(
    world: &World,
    client_scope: &ClientScope,
    host: &str,
    made: impl Fn(Kind, &str) -> Option<Arc<Resource>>,
) -> Vec<Arc<Resource>> {
    let scope = Scope::new(world, client_scope);
    // The routes of gateways are compiled with their listeners.
    let service = world.service(host).filter(|_| scope.role != Role::Router);
    let Some(service) = service else { return Vec::new() };
    if scope.role == Role::Grpc {
        let seen = scope.seen(service);
        seen.map(|service| grpc::routes(&scope, &service)).unwrap_or_default()
    } else {
        routes::recompile(&scope, service, made)
    }
}

/// Returns the VirtualService that makes the routes of a host (full name) on a port for clients with this scope, and
/// its field for each route in order; `None` if the routes are those of the service itself. For explanations.
pub fn route_sources(
    world: &World,
    client_scope: &ClientScope,
    host: &str,
    port: u16,
) -> Option<(Arc<Typed<VirtualService>>, Vec<String>)> {
    let scope = Scope::new(world, client_scope);
    let (rule, fields) = routes::sources(&scope, host, port)?;
    Some((Arc::clone(rule), fields))
}

/// Returns the fields of a VirtualService that cause its routes on a port of a gateway, one for each route in order.
/// For explanations.
pub fn gateway_route_fields(
    world: &World,
    view: &ProxyView,
    rule: &Typed<VirtualService>,
    port: u16,
) -> Vec<String> {
    let client_scope = ClientScope::of(view, &world.grouping());
    let scope = Scope::new(world, &client_scope);
    let served = world.gateways(&view.namespace, &view.labels);
    let served = served.iter().map(|gateway| format!("{}/{}", gateway.meta.namespace, gateway.meta.name));
    let named: Vec<String> =
        rule.spec.gateways.iter().map(|name| gateway_name(name, &rule.meta.namespace)).collect();
    let bound = served.filter(|gateway| named.contains(gateway));
    let mut fields = bound.map(|gateway| routes::field_paths(&scope, rule, port, Some(&gateway)));
    fields.find(|fields| !fields.is_empty()).unwrap_or_default()
}

/// Compiles the routes of a scope that differ from those of its [base](ClientScope::base). `has_routes` returns whether
/// the base has the route configuration of a port. Returns `None` if all routes have to be compiled for the namespace,
/// for example because they are not compiled by host.
pub fn compile_local_routes(
    world: &World,
    client_scope: &ClientScope,
    facts: &NamespaceFacts,
    has_routes: impl Fn(u16) -> bool,
) -> Option<Vec<Arc<Resource>>> {
    let special = facts.of(&client_scope.namespace);
    if client_scope.role == Role::Router || special.services.is_empty() && !special.routes {
        return Some(Vec::new());
    }
    if special.routes || !client_scope.routes_by_host() {
        return None;
    }
    let scope = Scope::new(world, client_scope);
    let services = special.services.iter().filter_map(|(namespace, name)| {
        world.service_named(namespace, name).and_then(|service| scope.seen(service))
    });
    routes::of_namespace(&scope, facts, &services.collect::<Vec<_>>(), has_routes)
}

/// Compiles the routes of a service ([`ChangeSet::service_hosts`](crate::ChangeSet::service_hosts)) for clients with
/// this scope; empty if the service does not exist. `has_routes` returns whether the client has the route configuration
/// of a port. Returns `None` if all routes have to be compiled, for example for a scope with a Sidecar.
pub fn compile_service_routes(
    world: &World,
    client_scope: &ClientScope,
    facts: &NamespaceFacts,
    host: &str,
    has_routes: impl Fn(u16) -> bool,
) -> Option<Vec<Arc<Resource>>> {
    let is_separate = client_scope.routes_by_host() && client_scope.egress.is_none();
    match client_scope.role {
        Role::Router => return Some(Vec::new()),
        Role::Sidecar if is_separate => {}
        Role::Sidecar | Role::Grpc => return None,
    }
    let scope = Scope::new(world, client_scope);
    let service = world.service(host).and_then(|service| scope.seen(service));
    routes::of_namespace(&scope, facts, service.as_slice(), has_routes)
}

/// Returns the outline of the outbound listeners of proxies with this client scope.
pub fn outline(world: &World, client_scope: &ClientScope) -> Outline {
    match client_scope.role {
        Role::Sidecar => Scope::new(world, client_scope).outline(),
        Role::Router | Role::Grpc => Outline::default(),
    }
}

/// Compiles the resources that depend on a proxy's workload. Also returns diagnostics about configuration that could
/// not be compiled as written. The outline is that of the proxy's client scope.
pub fn compile_own(world: &World, view: &ProxyView, outline: &Outline) -> (Resources, Vec<Diagnostic>) {
    let mut findings = CompileFindings { world, list: Vec::new() };
    let mut made = Resources::default();
    // Shared resources and the routes of gateways depend on the client's labels. Only the latter are compiled here.
    // What a Sidecar selects is in the outline.
    let grouping = match view.role {
        Role::Router => world.grouping(),
        Role::Sidecar | Role::Grpc => Grouping::of_settings(world),
    };
    let client_scope = ClientScope::of(view, &grouping);
    let scope = Scope::new(world, &client_scope);
    match view.role {
        Role::Router => {
            add_cluster(&mut made, &clusters::black_hole(world.mesh()));
            gateway::add(&mut made, &scope, view, &mut findings);
        }
        Role::Grpc => {}
        Role::Sidecar => add_sidecar(&mut made, &scope, view, outline, &mut findings),
    }
    gateway::secrets::of_rules(world, view).into_iter().for_each(|secret| made.insert(secret));
    let (made, warnings) = envoy_filter::patch_own(world, view, made);
    findings.list.extend(warnings);
    (made, findings.list)
}

/// Compiles those secrets of a gateway that may differ after a change of Secrets
/// ([`ChangeSet::secrets`](crate::ChangeSet::secrets)). Returns each name with its secret, or with `None` if the
/// gateway has no such secret any more. `is_sent` returns whether the gateway has a secret of a name.
pub fn compile_secrets(
    world: &World,
    view: &ProxyView,
    changed: &BTreeSet<(String, String)>,
    is_sent: impl Fn(&str) -> bool,
) -> Vec<(Arc<str>, Option<Arc<Resource>>)> {
    gateway::secrets::changed(world, view, changed, is_sent)
}

/// Properties of a client on which shared resources depend.
#[derive(Clone, Copy)]
struct Scope<'a> {
    world: &'a World,
    role: Role,
    /// Namespace of the client, which decides the visibility of objects.
    namespace: &'a str,
    /// Name of the Kubernetes cluster of the client.
    cluster_id: &'a str,
    /// Locality of the client.
    locality: &'a Locality,
    /// Node of the client; empty: unknown. `None` for a node without endpoints.
    node: Option<&'a str>,
    /// Network of the client; empty: unknown.
    network: &'a str,
    /// Whether the client is a gateway between networks.
    joins_networks: bool,
    /// Labels of the client, which affect the priority of endpoints, the match of routes and the DestinationRule.
    labels: &'a Labels,
    ipv4: bool,
    ipv6: bool,
    /// Whether the client detects the protocol of ports that declare none. The servers of gateways declare it.
    sniffs: bool,
    /// Whether Istio's own filters must be omitted.
    plain_envoy: bool,
    /// Whether virtual hosts are separate resources.
    uses_vhds: bool,
    /// Whether the client receives the resolved addresses of endpoints instead of their DNS names.
    takes_resolved_addresses: bool,
    /// Whether the client answers DNS queries of its workload.
    answers_dns: bool,
    /// Headers that the client sets.
    headers: SharedHeaders,
    /// Credential that a gateway presents to servers with a BackendTLSPolicy.
    client_credential: Option<&'a str>,
    /// Services that the client's Sidecar allows; `None`: all.
    egress: Option<&'a Arc<Egress>>,
}

impl<'a> Scope<'a> {
    fn new(world: &'a World, client_scope: &'a ClientScope) -> Self {
        Self {
            world,
            role: client_scope.role,
            namespace: &client_scope.namespace,
            cluster_id: &client_scope.cluster_id,
            locality: &client_scope.locality,
            node: None,
            network: &client_scope.network,
            joins_networks: client_scope.joins_networks,
            labels: &client_scope.labels,
            ipv4: client_scope.ipv4,
            ipv6: client_scope.ipv6,
            sniffs: client_scope.role == Role::Sidecar,
            plain_envoy: client_scope.plain_envoy,
            uses_vhds: client_scope.uses_vhds,
            takes_resolved_addresses: client_scope.takes_resolved_addresses,
            answers_dns: client_scope.answers_dns,
            headers: client_scope.headers,
            client_credential: client_scope.client_credential.as_deref(),
            egress: client_scope.egress.as_ref(),
        }
    }

    /// Returns whether a service is visible to a client of this scope. Ignores the client's Sidecar.
    fn sees(&self, service: &Typed<Service>) -> bool {
        service.spec.external_name.is_none()
            && self.world.service_visible(service, self.namespace)
            && self.world.service_chosen(service, self.namespace)
    }

    /// Returns the port of a destination with this full host. As in Istio, without a port it is the single port of the
    /// service at gateways, and the port of the request (`default`) otherwise.
    fn destination_port(&self, to: &Destination, host: &str, default: u16) -> u16 {
        let written = to.port.and_then(|selector| u16::try_from(selector.number).ok());
        let single = || match self.world.service(host).map(|service| &service.spec.ports[..]) {
            Some([only]) if self.role == Role::Router => Some(only.port),
            _ => None,
        };
        written.filter(|number| *number > 0).or_else(single).unwrap_or(default)
    }

    /// Returns the network of an endpoint; empty if unknown.
    fn network_of<'b>(&'b self, member: &'b Endpoint) -> &'b str {
        static NONE: Labels = Labels::new();
        let labels = member.pod.as_ref().map_or(&NONE, |pod| &*pod.meta.labels);
        self.world.topology().network_of(labels, member.address.ip(), self.cluster_id)
    }

    /// Returns the rule that a client of this scope applies to a service.
    fn rule(&self, service: &Typed<Service>) -> Option<Arc<Typed<DestinationRule>>> {
        self.world.destination_rule_for(&service.fqdn(), self.namespace, Some(self.labels))
    }
}

/// Diagnostics about configuration that is not applied as written.
struct CompileFindings<'a> {
    world: &'a World,
    list: Vec<Diagnostic>,
}

impl CompileFindings<'_> {
    fn warn(
        &mut self,
        code: Code,
        policy: &Typed<AuthorizationPolicy>,
        field: &str,
        message: &str,
        remedy: &str,
    ) {
        let key = ObjectKey {
            kind: api::Kind::AuthorizationPolicy,
            namespace: policy.meta.namespace.clone(),
            name: policy.meta.name.clone(),
        };
        let origin = self.world.origin_of(policy).cloned().unwrap_or_default();
        let finding = Diagnostic::new(code, &origin.file, origin.line_of(field), message);
        self.list.push(finding.object(&key).field(field).remedy(remedy));
    }
}

/// Returns the clusters and endpoints of a service.
fn of_service(scope: &Scope<'_>, service: &Typed<Service>) -> Vec<Arc<Resource>> {
    let mut made = Vec::new();
    let rule = scope.rule(service);
    let ports = || service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp);
    let is_external = service.spec.entry_host.as_ref().is_some_and(|entry_host| entry_host.external);
    let forwarded = (scope.joins_networks && !is_external).then_some(ClusterForm::Forwarded);
    let forms = std::iter::once(ClusterForm::Routed).chain(forwarded);
    for (form, port) in forms.flat_map(|form| ports().map(move |port| (form, port))) {
        let mut clusters = if scope.role == Role::Grpc {
            grpc::clusters(scope, service, port, rule.as_deref())
        } else {
            clusters::outbound(scope, service, port, rule.as_deref(), form)
        };
        let by_discovery = clusters.iter().any(|cluster| cluster.eds_cluster_config.is_some());
        if by_discovery {
            let assignments = endpoints::assignments(scope, service, port, rule.as_deref(), form);
            made.extend(assignments.iter().map(|one| order::encode(Kind::Endpoint, &one.cluster_name, one)));
        } else if clusters.iter().any(clusters::is_resolved_by_proxies) {
            let assignments = endpoints::assignments(scope, service, port, rule.as_deref(), form);
            for (cluster, assignment) in clusters.iter_mut().zip(assignments) {
                cluster.load_assignment = clusters::is_resolved_by_proxies(cluster).then_some(assignment);
            }
        }
        made.extend(clusters.iter().map(|cluster| order::encode(Kind::Cluster, &cluster.name, cluster)));
    }
    made
}

/// Adds the resources that only a sidecar has.
fn add_sidecar(
    made: &mut Resources,
    scope: &Scope<'_>,
    view: &ProxyView,
    outline: &Outline,
    findings: &mut CompileFindings<'_>,
) {
    clusters::special(scope, view).iter().for_each(|cluster| add_cluster(made, cluster));
    let unknown = visibility::UnknownDestinations::of(scope.world.mesh(), outline.egress());
    if unknown.mode == OutboundMode::AllowAnyDynamicDns {
        add_cluster(made, &clusters::dynamic_dns(scope, view));
    }
    let ports = listeners::inbound_ports(scope.world, view);
    for port in &ports {
        add_cluster(made, &clusters::inbound(scope, view, port));
    }

    let tcp_ports: Vec<u16> = ports
        .iter()
        .filter(|port| !port.protocol.is_http() && port.protocol != Protocol::Unknown)
        .map(|port| port.port)
        .collect();
    let authorization = rbac::Authorization::new(scope.world, view, &tcp_ports, findings);
    if view.intercepts {
        let inbound = listeners::inbound(scope.world, view, &ports, &authorization);
        add(made, Kind::Listener, &inbound.name, &inbound);
    }
    for port in ports.iter().filter(|port| port.has_socket() || !view.intercepts) {
        let inbound = listeners::inbound_with_socket(scope.world, view, port, &authorization);
        add(made, Kind::Listener, &inbound.name, &inbound);
    }
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
