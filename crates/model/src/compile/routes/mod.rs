//! RDS: routes by host.
//!
//! Each HTTP port has one route configuration, shared by all services with that port. A port of undeclared protocol has
//! its own. Requests for a host go to the service of that name, or as a VirtualService defines.

mod action;
mod retry;
mod virtual_service;

pub(super) use virtual_service::{
    at_gateway, conditions as http_conditions, field_paths, matches_everything,
};

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use skysail_core::{ClusterName, names as core_names};
use skysail_proto::Codec as _;
use skysail_xds::{Kind, Resource, istio};

use super::{
    Scope, balance,
    clusters::DYNAMIC_DNS,
    listeners, order,
    pb::{boolean, fields, from_ads, host_of, metadata, route, seconds, timed_action, uint32},
    visibility::UnknownDestinations,
};
use crate::{
    api::{
        MeshConfig, Protocol, Service, Typed, VirtualService,
        mesh_config::{OutboundMode, UnansweredHosts},
        proxy_config::SharedHeaders,
    },
    world::{DOMAIN, NamespaceFacts, WELL_KNOWN_PORT, fqdn, host_matches},
};

/// Maximum size of the body of a direct response in bytes.
const DIRECT_RESPONSE_BYTES: u32 = 1 << 20;

/// Returns the routes of an HTTP port, as one resource or with one for each virtual host.
pub(super) fn shared(scope: &Scope<'_>, services: &[&Typed<Service>], port: u16) -> Vec<Arc<Resource>> {
    let (name, mut hosts, elsewhere) =
        (port.to_string(), hosts(scope, services, port), unknown_destinations(scope));
    // Without any host in the configuration a client would wait for one.
    if !scope.uses_vhds || hosts.is_empty() {
        hosts.push(elsewhere);
        return vec![encode(&configuration(name, hosts))];
    }
    let mut configuration = configuration(name, vec![elsewhere]);
    configuration.vhds = Some(route::Vhds { config_source: Some(from_ads()) });
    let mut made = vec![encode(&configuration)];
    made.extend(hosts.into_iter().map(|mut host| {
        // Envoy removes virtual hosts by this name.
        host.name = format!("{port}/{}", host.name);
        order::encode_host(&port.to_string(), &host)
    }));
    made
}

/// Returns the routes of a Unix domain socket. Each service has one port, to which the requests for its host go.
pub(super) fn at_socket(scope: &Scope<'_>, name: &str, services: &[Arc<Typed<Service>>]) -> Arc<Resource> {
    let aliases = scope.world.aliases(scope.namespace);
    let of_service = |service: &Arc<Typed<Service>>| {
        let port = service.spec.ports.first()?.port;
        Some(of_service(scope, service, port, domains(scope, service, &aliases)))
    };
    let mut hosts: Vec<route::VirtualHost> = services.iter().filter_map(of_service).collect();
    hosts.sort_by(|a, b| a.name.cmp(&b.name));
    make_unique(&mut hosts);
    hosts.push(unknown_destinations(scope));
    encode(&configuration(name.to_owned(), hosts))
}

/// Returns the virtual hosts of an HTTP port.
fn hosts(scope: &Scope<'_>, services: &[&Typed<Service>], port: u16) -> Vec<route::VirtualHost> {
    let routed = services.iter().filter(|service| is_routed(service, port));
    let services: Vec<&Typed<Service>> = routed.copied().collect();
    let aliases = scope.world.aliases(scope.namespace);
    let of_service =
        |service: &&Typed<Service>| of_service(scope, service, port, domains(scope, service, &aliases));
    let mut hosts: Vec<route::VirtualHost> = services.iter().map(of_service).collect();
    hosts.extend(of_other_hosts(scope, &services, port));
    hosts.sort_by(|a, b| a.name.cmp(&b.name));
    make_unique(&mut hosts);
    hosts
}

/// Returns whether a service has this port for HTTP.
fn is_routed(service: &Typed<Service>, port: u16) -> bool {
    let port = service.spec.port(port);
    port.is_some_and(|port| port.protocol.is_http() || port.protocol == Protocol::Unknown)
}

/// Compiles the routes of the services whose routes differ in the client's namespace, one resource for each virtual
/// host. Returns `None` if other virtual hosts may differ too.
pub(super) fn of_namespace(
    scope: &Scope<'_>,
    facts: &NamespaceFacts,
    services: &[Arc<Typed<Service>>],
    has_routes: impl Fn(u16) -> bool,
) -> Option<Vec<Arc<Resource>>> {
    let aliases = if facts.has_aliases { scope.world.aliases(scope.namespace) } else { Aliases::default() };
    let mut made = Vec::new();
    let mut claimed: HashSet<String> = HashSet::new();
    for service in services {
        let domains = domains(scope, service, &aliases);
        let is_disputed = |domain: &String| scope.world.names_others(service, domain);
        if facts.shares_addresses(&service.spec) || domains.iter().any(is_disputed) {
            return None;
        }
        let host = service.fqdn();
        for port in service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp) {
            let number = port.port;
            let is_http = port.protocol.is_http();
            let has_own = !is_http && port.protocol == Protocol::Unknown;
            if is_http && !has_routes(number) {
                return None;
            }
            if has_own && listeners::is_everywhere(service) {
                return None;
            }
            if has_own {
                made.push(own(scope, service, number));
            }
            if (is_http || has_own) && has_routes(number) {
                let mut hosts = vec![of_service(scope, service, number, domains.clone())];
                make_unique(&mut hosts);
                made.extend(hosts.into_iter().map(|mut made| {
                    made.name = format!("{number}/{host}:{number}");
                    order::encode_host(&number.to_string(), &made)
                }));
            }
        }
        let others = on_well_known_port(scope, service)?;
        for mut other in others.into_iter().filter(|_| has_routes(WELL_KNOWN_PORT)) {
            other.name = format!("{WELL_KNOWN_PORT}/{}", other.name);
            made.push(order::encode_host(&WELL_KNOWN_PORT.to_string(), &other));
        }
        // Of two with the same name, one gets it.
        if !domains.into_iter().collect::<HashSet<_>>().into_iter().all(|domain| claimed.insert(domain)) {
            return None;
        }
    }
    Some(made)
}

/// Returns the virtual host of a service on port 80, which it does not have ([`of_other_hosts`]); empty if there is none.
/// Returns `None` if its VirtualService has several hosts, which may be on the ports of each other.
fn on_well_known_port(scope: &Scope<'_>, service: &Typed<Service>) -> Option<Vec<route::VirtualHost>> {
    let host = service.fqdn();
    let rule = scope.virtual_service(&host).filter(|rule| rule.spec.derived.is_none());
    let Some(rule) = rule else { return Some(Vec::new()) };
    if rule.spec.hosts.len() > 1 {
        return None;
    }
    if is_routed(service, WELL_KNOWN_PORT) {
        return Some(Vec::new());
    }
    let routes = virtual_service::routes(scope, rule, WELL_KNOWN_PORT);
    let name = format!("{host}:{WELL_KNOWN_PORT}");
    let has_routes = !routes.is_empty();
    Some(has_routes.then(|| virtual_host(scope.headers, name, vec![host], routes)).into_iter().collect())
}

/// Compiles the routes of a service that is visible everywhere again. `made` returns the previous resource. Only the
/// service's own routes may have changed since.
pub(super) fn recompile(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    made: impl Fn(Kind, &str) -> Option<Arc<Resource>>,
) -> Vec<Arc<Resource>> {
    let host = service.fqdn();
    let mut own_hosts = Vec::new();
    for port in service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp) {
        let number = port.port;
        let before = made(Kind::VirtualHost, &format!("{number}/{host}:{number}"));
        // The domains stay, even if another service has some of them too.
        let before = before.and_then(|before| route::VirtualHost::from_slice(&before.body).ok());
        if let Some(before) = before {
            let now = of_service(scope, service, number, before.domains);
            let host = route::VirtualHost { name: before.name, ..now };
            own_hosts.push(order::encode_host(&number.to_string(), &host));
        }
        if port.protocol == Protocol::Unknown {
            own_hosts.push(own(scope, service, number));
        }
    }
    own_hosts
}

/// Returns the routes of a service port with a listener of its own, on which every host means the service.
pub(super) fn own(scope: &Scope<'_>, service: &Typed<Service>, port: u16) -> Arc<Resource> {
    let host = of_service(scope, service, port, vec!["*".into()]);
    encode(&configuration(host.name.clone(), vec![host]))
}

/// Returns the same routes for clients that subscribe by the name of the service's cluster.
pub(super) fn of_cluster(scope: &Scope<'_>, service: &Typed<Service>, port: u16) -> Arc<Resource> {
    let name = ClusterName::outbound(port, "", &service.fqdn()).to_string();
    encode(&configuration(name, vec![of_service(scope, service, port, vec!["*".into()])]))
}

fn encode(configuration: &route::RouteConfiguration) -> Arc<Resource> {
    order::encode(Kind::Route, &configuration.name, configuration)
}

pub(super) fn configuration(
    name: String,
    virtual_hosts: Vec<route::VirtualHost>,
) -> route::RouteConfiguration {
    route::RouteConfiguration {
        name,
        virtual_hosts,
        // Routes may arrive before their clusters.
        validate_clusters: boolean(false),
        max_direct_response_body_size_bytes: uint32(DIRECT_RESPONSE_BYTES),
        ignore_port_in_host_matching: true,
        ..Default::default()
    }
}

pub(super) fn virtual_host(
    headers: SharedHeaders,
    name: String,
    domains: Vec<String>,
    routes: Vec<route::Route>,
) -> route::VirtualHost {
    let include_request_attempt_count = !headers.hides_attempts;
    route::VirtualHost { name, domains, routes, include_request_attempt_count, ..Default::default() }
}

fn of_service(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    port: u16,
    domains: Vec<String>,
) -> route::VirtualHost {
    let host = service.fqdn();
    let rule = scope.virtual_service_on(&host, port);
    let routes = rule.map(|rule| virtual_service::routes(scope, rule, port)).unwrap_or_default();
    let routes = if routes.is_empty() { vec![default_route(scope, &host, port)] } else { routes };
    virtual_host(scope.headers, format!("{host}:{port}"), domains, routes)
}

/// Returns the hosts of VirtualServices that are not services with this port. They are served on port 80, and on the
/// ports of the services that the same VirtualService names.
fn of_other_hosts(scope: &Scope<'_>, services: &[&Typed<Service>], port: u16) -> Vec<route::VirtualHost> {
    let names: HashSet<String> = services.iter().map(|service| service.fqdn()).collect();
    let mut made = Vec::new();
    // Routes of Gateway API exist for services only.
    for rule in scope.virtual_services().into_iter().filter(|rule| rule.spec.derived.is_none()) {
        let hosts: Vec<String> =
            rule.spec.hosts.iter().map(|host| fqdn(host, &rule.meta.namespace)).collect();
        let covers = |host: &String| names.iter().any(|name| host_matches(host, name));
        if port != WELL_KNOWN_PORT && !hosts.iter().any(covers) {
            continue;
        }
        let follows = |host: &&String| {
            let of_host = scope.virtual_service(host);
            of_host.is_some_and(|of_host| Arc::ptr_eq(of_host, rule))
        };
        let others: Vec<&String> = hosts.iter().filter(|host| !covers(host)).filter(follows).collect();
        if others.is_empty() {
            continue;
        }
        let routes = virtual_service::routes(scope, rule, port);
        if !routes.is_empty() {
            made.extend(others.into_iter().map(|host| {
                virtual_host(scope.headers, format!("{host}:{port}"), vec![host.clone()], routes.clone())
            }));
        }
    }
    made
}

/// Returns the VirtualService that makes the routes of a host on a port, and its field for each route.
pub(super) fn sources<'a>(
    scope: &Scope<'a>,
    host: &str,
    port: u16,
) -> Option<(&'a Arc<Typed<VirtualService>>, Vec<String>)> {
    let is_service = scope.world.service(host).is_some_and(|service| service.spec.port(port).is_some());
    let rule = if is_service { scope.virtual_service_on(host, port) } else { scope.virtual_service(host) }?;
    Some((rule, virtual_service::field_paths(scope, rule, port, None)))
}

fn default_route(scope: &Scope<'_>, host: &str, port: u16) -> route::Route {
    let cluster = ClusterName::outbound(port, "", host).to_string();
    let to = route::RouteAction {
        hash_policy: balance::hash_policy(scope, &cluster).into_iter().collect(),
        cluster_specifier: Some(route::route_action::ClusterSpecifier::Cluster(cluster)),
        retry_policy: retry::policy(scope.world.mesh(), None),
        ..timed_action(seconds(0))
    };
    route::Route {
        name: "default".into(),
        r#match: Some(every_path()),
        action: Some(route::route::Action::Route(to)),
        decorator: Some(route::Decorator { operation: format!("{host}:{port}/*"), ..Default::default() }),
        ..Default::default()
    }
}

/// Returns the route configuration of requests for unknown addresses.
pub(super) fn of_unknown_hosts(
    mesh: &MeshConfig,
    unknown: &UnknownDestinations,
    headers: SharedHeaders,
) -> route::RouteConfiguration {
    let host = unknown_hosts(mesh, unknown, headers);
    configuration(host.name.clone(), vec![host])
}

fn unknown_destinations(scope: &Scope<'_>) -> route::VirtualHost {
    let mesh = scope.world.mesh();
    unknown_hosts(mesh, &UnknownDestinations::of(mesh, scope.egress.map(Arc::as_ref)), scope.headers)
}

/// Returns the virtual host for unknown hosts: requests pass to their original destination or are refused.
fn unknown_hosts(
    mesh: &MeshConfig,
    unknown: &UnknownDestinations,
    headers: SharedHeaders,
) -> route::VirtualHost {
    let policy = &mesh.outbound_traffic_policy;
    let to = |cluster: String| {
        route::route::Action::Route(route::RouteAction {
            cluster_specifier: Some(route::route_action::ClusterSpecifier::Cluster(cluster)),
            ..timed_action(seconds(0))
        })
    };
    let (name, action) = match unknown.mode {
        OutboundMode::AllowAny => ("allow_any", to(unknown.cluster.clone())),
        OutboundMode::AllowAnyDynamicDns => ("allow_any_dynamic_dns", to(DYNAMIC_DNS.into())),
        OutboundMode::RegistryOnly => (
            "block_all",
            route::route::Action::DirectResponse(route::DirectResponseAction {
                status: 502,
                ..Default::default()
            }),
        ),
    };
    let all = route::Route {
        name: name.into(),
        r#match: Some(every_path()),
        action: Some(action),
        ..Default::default()
    };
    let mut host = virtual_host(headers, name.into(), vec!["*".into()], vec![all]);
    if policy.unanswered_hosts == UnansweredHosts::CatchAll {
        let yes = fields([(core_names::TAKES_UNANSWERED, istio::string("true"))]);
        host.metadata = Some(metadata(core_names::METADATA, yes));
    }
    host
}

fn every_path() -> route::RouteMatch {
    route::RouteMatch {
        path_specifier: Some(route::route_match::PathSpecifier::Prefix("/".into())),
        ..Default::default()
    }
}

/// Returns the names by which a client of this namespace may call a service and its aliases.
fn domains(scope: &Scope<'_>, service: &Typed<Service>, aliases: &Aliases<'_>) -> Vec<String> {
    let full = service.fqdn();
    let below_cluster = full.strip_suffix(DOMAIN).and_then(|rest| rest.strip_suffix(".svc."));
    let mut domains = if service.spec.entry_host.is_some()
        && let Some((name, namespace)) = below_cluster.and_then(|own| own.split_once('.'))
    {
        names(name, namespace, scope.namespace)
    } else if service.spec.entry_host.is_some() {
        let dotted = format!("{full}.");
        vec![full.clone(), dotted]
    } else {
        names(&service.meta.name, &service.meta.namespace, scope.namespace)
    };
    let others = aliases.get(&full).into_iter().flatten();
    domains.extend(others.flat_map(|alias| names(&alias.meta.name, &alias.meta.namespace, scope.namespace)));
    if service.spec.headless {
        // The pods of a headless service have names under its own.
        domains.extend(domains.clone().iter().map(|domain| format!("*.{domain}")));
    }
    let reachable = |ip: &&IpAddr| if ip.is_ipv4() { scope.ipv4 } else { scope.ipv6 };
    domains.extend(service.spec.cluster_ips.iter().filter(reachable).map(|ip| host_of(*ip)));
    domains
}

/// Returns the names of a Kubernetes Service for clients of a namespace, the full name first.
pub(super) fn names(name: &str, namespace: &str, client: &str) -> Vec<String> {
    let full = core_names::service_fqdn(name, namespace, DOMAIN);
    let mut names = vec![full.clone(), format!("{full}.")];
    if namespace == client {
        names.extend([name.to_owned(), format!("{name}.{namespace}.svc"), format!("{name}.{namespace}")]);
    } else {
        names.extend([format!("{name}.{namespace}"), format!("{name}.{namespace}.svc")]);
    }
    names
}

/// Aliases by the full name of their service.
type Aliases<'a> = BTreeMap<String, Vec<&'a Arc<Typed<Service>>>>;

/// Removes duplicate domains, which Envoy refuses. A full name always stays with its own service.
fn make_unique(hosts: &mut Vec<route::VirtualHost>) {
    let full: HashSet<String> = hosts.iter().filter_map(|host| host.domains.first().cloned()).collect();
    let mut seen = HashSet::new();
    for host in hosts.iter_mut() {
        let mut first = true;
        host.domains.retain(|domain| {
            let own = std::mem::take(&mut first);
            (own || !full.contains(domain)) && seen.insert(domain.clone())
        });
    }
    hosts.retain(|host| !host.domains.is_empty());
}

/// The VirtualService from which a route is compiled.
type RouteRule = Typed<VirtualService>;
