//! What clients of gRPC take that ask for configuration themselves, without a proxy (metadata `GENERATOR: grpc`), as Istio
//! sends it: <https://github.com/grpc/proposal/blob/master/A27-xds-global-load-balancing.md>.
//!
//! A client asks by name: for the listener `HOST:PORT`, which names the routes of that port of that service, which name
//! clusters, which name endpoints. Routes and endpoints are those of sidecars; of a cluster gRPC takes little, and refuses what
//! it does not know, so clusters are made here.

use std::sync::Arc;

use skysail_core::ClusterName;
use skysail_xds::{
    Kind, Resource,
    envoy::pb::envoy::extensions::filters::{
        http::{fault::v3::HttpFault, router::v3::Router},
        network::http_connection_manager::v3::{
            HttpConnectionManager, Rds, http_connection_manager::RouteSpecifier,
        },
    },
};

use super::{
    Scope, balance, filters, order,
    pb::{Any, cluster, from_ads, listener, pack},
    policy::Effective,
    pool, routes,
};
use crate::api::{
    DestinationRule, Protocol, Service, ServicePort, Typed,
    destination_rule::{LoadBalancer, SimpleLb},
};

use cluster::cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig, LbPolicy};

/// The listeners of a service, by each name it may be asked for.
pub(super) fn listeners(scope: &Scope<'_>, service: &Typed<Service>) -> Vec<Arc<Resource>> {
    let (hosts, full) = (hosts(scope, service), service.fqdn());
    let mut made = Vec::new();
    for port in ports(service) {
        let manager = connection_manager(ClusterName::outbound(port.port, "", &full).to_string());
        made.extend(hosts.iter().map(|host| {
            let name = format!("{host}:{}", port.port);
            let api_listener = Some(listener::ApiListener { api_listener: Some(manager.clone()) });
            let listener = listener::Listener { name, api_listener, ..Default::default() };
            order::encode(Kind::Listener, &listener.name, &listener)
        }));
    }
    made
}

/// The routes of a service, a resource for each port.
pub(super) fn routes(scope: &Scope<'_>, service: &Typed<Service>) -> Vec<Arc<Resource>> {
    ports(service).map(|port| routes::of_cluster(scope, service, port.port)).collect()
}

/// The clusters of a service's port: of the whole service, then of each subset.
pub(super) fn clusters(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    port: &ServicePort,
    rule: Option<&Typed<DestinationRule>>,
) -> Vec<cluster::Cluster> {
    let host = service.fqdn();
    let rule = rule.map(|rule| &rule.spec);
    let whole = rule.map(|rule| Effective::of_rule(rule, port.port)).unwrap_or_default();
    let made = |subset: &str, effective: &Effective<'_>| {
        of_endpoints(scope, ClusterName::outbound(port.port, subset, &host).to_string(), effective)
    };
    let subsets = rule.into_iter().flat_map(|rule| rule.subsets.iter().map(move |subset| (rule, subset)));
    std::iter::once(made("", &whole))
        .chain(
            subsets.map(|(rule, subset)| made(&subset.name, &Effective::of_subset(rule, subset, port.port))),
        )
        .collect()
}

fn ports(service: &Typed<Service>) -> impl Iterator<Item = &ServicePort> {
    service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp)
}

/// The names a client may ask for a service by. As in Istio, the short ones are for its own namespace.
fn hosts(scope: &Scope<'_>, service: &Typed<Service>) -> Vec<String> {
    let (name, namespace) = (&service.meta.name, &service.meta.namespace);
    let mut hosts = vec![service.fqdn()];
    if service.spec.outside.is_none() && namespace == scope.namespace {
        hosts.extend([name.clone(), format!("{name}.{namespace}"), format!("{name}.{namespace}.svc")]);
    }
    hosts
}

fn connection_manager(routes: String) -> Any {
    pack(&HttpConnectionManager {
        http_filters: vec![
            filters::http("envoy.filters.http.fault", pack(&HttpFault::default())),
            filters::http("envoy.filters.http.router", pack(&Router::default())),
        ],
        route_specifier: Some(RouteSpecifier::Rds(Rds {
            config_source: Some(from_ads()),
            route_config_name: routes,
        })),
        ..Default::default()
    })
}

fn of_endpoints(scope: &Scope<'_>, name: String, effective: &Effective<'_>) -> cluster::Cluster {
    let mut made = cluster::Cluster {
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::Eds as i32)),
        eds_cluster_config: Some(EdsClusterConfig {
            eds_config: Some(from_ads()),
            service_name: name.clone(),
        }),
        circuit_breakers: Some(pool::unlimited()),
        name,
        ..Default::default()
    };
    pool::apply(&mut made, scope.world.mesh(), effective.connection_pool);
    pick(&mut made, effective.load_balancer);
    made
}

/// How a client picks. It goes around unless told otherwise, which is its own habit; what it does not know it would refuse.
fn pick(made: &mut cluster::Cluster, balancer: Option<&LoadBalancer>) {
    let Some(balancer) = balancer else { return };
    match (&balancer.consistent_hash, balancer.simple) {
        (Some(hash), _) => balance::ring(made, hash),
        (None, Some(SimpleLb::LeastRequest | SimpleLb::LeastConn)) => {
            made.lb_policy = LbPolicy::LeastRequest as i32;
        }
        _ => {}
    }
}
