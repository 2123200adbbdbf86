//! RDS of gateways: the routes of all VirtualServices that are bound to the Gateways of a server.

use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry};

use super::servers::{GatewayServer, MergedServers};
use crate::compile::{Scope, pb::route, routes};
use crate::world::BoundRule;

/// Maximum number of listeners of a port for which requests on the wrong connection get 421.
const MAX_LISTENERS: usize = 128;

/// A virtual host, and the VirtualServices whose routes it has.
struct Host {
    name: String,
    /// Domains; several for hosts with the same routes.
    domains: Vec<String>,
    /// Gateway and VirtualService of each list of routes, in order.
    sources: Vec<RuleBinding>,
    redirects: bool,
}

/// Gateway (`NAMESPACE/NAME`), and namespace and name of a VirtualService.
type RuleBinding = (String, String, String);

/// Returns a route configuration for these servers, which have the same name of routes.
pub(super) fn compile(
    scope: &Scope<'_>,
    merged: &MergedServers<'_>,
    name: &str,
    servers: &[GatewayServer<'_>],
) -> route::RouteConfiguration {
    let mut made: HashMap<RuleBinding, Vec<route::Route>> = HashMap::new();
    let mut hosts: BTreeMap<String, Host> = BTreeMap::new();
    for server in servers {
        add_server(scope, merged.rules_of(server), server, &mut made, &mut hosts);
    }
    let mut others = other_listeners(merged, servers);
    if !others.is_empty() {
        let own: Vec<String> = servers.iter().flat_map(GatewayServer::server_names).collect();
        hosts.retain(|domain, _| !is_of_other(domain, &others, &own));
    }
    let number = servers.first().map_or(0, |server| server.server.number());
    let mut virtual_hosts: Vec<_> =
        collapse(hosts).into_iter().map(|host| virtual_host(scope, host, &made)).collect();
    if virtual_hosts.is_empty() {
        // Requests get 404.
        let name = format!("blackhole:{number}");
        virtual_hosts.push(route::VirtualHost { name, domains: vec!["*".into()], ..Default::default() });
    }
    let taken: BTreeSet<&String> = virtual_hosts.iter().flat_map(|host| &host.domains).collect();
    others.retain(|host| !taken.contains(host));
    if !others.is_empty() {
        virtual_hosts.push(misdirected(scope, number, others));
    }
    virtual_hosts.sort_by(|a, b| a.name.cmp(&b.name));
    routes::configuration(name.to_owned(), virtual_hosts)
}

/// Returns the hosts of other listeners of Gateway API that end TLS at the same port; none if there are very many.
fn other_listeners(merged: &MergedServers<'_>, servers: &[GatewayServer<'_>]) -> BTreeSet<String> {
    let is_listener = |server: &&GatewayServer<'_>| {
        server.gateway.spec.only_in.is_some() && server.tls().is_some() && server.server.is_http()
    };
    let Some(first) = servers.first().filter(is_listener) else { return BTreeSet::new() };
    let others = merged.routes.values().flatten().filter(is_listener).filter(|other| {
        other.listener_port == first.listener_port
            && other.server.bind == first.server.bind
            && other.route_name != first.route_name
    });
    // Each listener gets the hosts of all others.
    if others.clone().count() > MAX_LISTENERS {
        return BTreeSet::new();
    }
    let own: BTreeSet<String> = servers.iter().flat_map(GatewayServer::server_names).collect();
    others.flat_map(GatewayServer::server_names).filter(|host| !own.contains(host)).collect()
}

/// Returns whether a listener for `host`, more specific than all of `own`, serves a domain.
fn is_of_other(domain: &str, others: &BTreeSet<String>, own: &[String]) -> bool {
    let covers = |wide: &str, host: &str| match wide.strip_prefix('*') {
        Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
        None => wide == host,
    };
    others.iter().any(|other| covers(other, domain) && own.iter().any(|own| covers(own, other)))
}

/// Returns a virtual host that answers 421 to requests for hosts of other listeners: the client uses a connection that TLS
/// has led to this listener. Source: GEP-3567.
fn misdirected(scope: &Scope<'_>, number: u16, others: BTreeSet<String>) -> route::VirtualHost {
    let answer = route::Route {
        r#match: Some(route::RouteMatch {
            path_specifier: Some(route::route_match::PathSpecifier::Prefix("/".into())),
            ..Default::default()
        }),
        action: Some(route::route::Action::DirectResponse(route::DirectResponseAction {
            status: 421,
            ..Default::default()
        })),
        ..Default::default()
    };
    let name = format!("misdirected:{number}");
    routes::virtual_host(scope.headers, name, others.into_iter().collect(), vec![answer])
}

fn add_server(
    scope: &Scope<'_>,
    rules: &[BoundRule<'_>],
    server: &GatewayServer<'_>,
    made: &mut HashMap<RuleBinding, Vec<route::Route>>,
    hosts: &mut BTreeMap<String, Host>,
) {
    let gateway = server.gateway_name();
    let number = server.server.number();
    let redirects = server.server.tls.as_ref().is_some_and(|tls| tls.https_redirect);
    let new = |domain: &String| Host {
        name: format!("{domain}:{number}"),
        domains: vec![domain.clone()],
        sources: Vec::new(),
        redirects: false,
    };
    for bound in rules {
        let (rule, common) = (bound.rule, bound.common_hosts(&server.hosts));
        if common.is_empty() {
            continue;
        }
        let source = (gateway.clone(), rule.meta.namespace.clone(), rule.meta.name.clone());
        let routes =
            made.entry(source.clone()).or_insert_with(|| routes::at_gateway(scope, rule, number, &gateway));
        if routes.is_empty() {
            continue;
        }
        for domain in common {
            let host = match hosts.entry(domain) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(free) => {
                    let host = new(free.key());
                    free.insert(host)
                }
            };
            host.sources.push(source.clone());
            host.redirects |= redirects;
        }
    }
    if redirects {
        // As in Istio, hosts without routes keep their namespace.
        for domain in &server.hosts {
            hosts.entry(domain.clone()).or_insert_with(|| new(domain)).redirects = true;
        }
    }
}

/// Unites hosts with the same routes. The most specific host names them.
fn collapse(hosts: BTreeMap<String, Host>) -> Vec<Host> {
    let mut all: Vec<Host> = hosts.into_values().collect();
    let rank = |host: &Host| {
        let domain = &host.domains[0];
        (domain.starts_with('*'), std::cmp::Reverse(domain.len()), domain.clone())
    };
    all.sort_by_cached_key(rank);
    let mut united: Vec<Host> = Vec::new();
    for host in all {
        let same = |known: &&mut Host| known.sources == host.sources && known.redirects == host.redirects;
        match united.iter_mut().find(same) {
            Some(known) => known.domains.extend(host.domains),
            None => united.push(host),
        }
    }
    united
}

fn virtual_host(
    scope: &Scope<'_>,
    host: Host,
    made: &HashMap<RuleBinding, Vec<route::Route>>,
) -> route::VirtualHost {
    let routes = host.sources.iter().filter_map(|source| made.get(source)).flatten().cloned();
    // A route for all requests would hide the routes of the other VirtualServices.
    let (last, first): (Vec<_>, Vec<_>) = routes.partition(routes::matches_everything);
    let require =
        if host.redirects { route::virtual_host::TlsRequirementType::All } else { Default::default() };
    route::VirtualHost {
        require_tls: require as i32,
        ..routes::virtual_host(
            scope.headers,
            host.name,
            host.domains,
            first.into_iter().chain(last).collect(),
        )
    }
}
