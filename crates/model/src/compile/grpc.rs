//! Resources of gRPC clients that take configuration without a proxy (metadata `GENERATOR: grpc`), as Istio sends them:
//! <https://github.com/grpc/proposal/blob/master/A27-xds-global-load-balancing.md>.
//!
//! A client subscribes by name. Listener `HOST:PORT` names the routes of that service port, routes name clusters, and
//! clusters name endpoints. Routes and endpoints are those of sidecars. Clusters are compiled here, because gRPC
//! supports few of their fields and refuses others.

use std::{collections::HashSet, sync::Arc};

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
    pool, routes, tls,
};
use crate::api::{
    DestinationRule, MeshConfig, Protocol, Service, ServicePort, Typed,
    destination_rule::{ClientTlsMode, LoadBalancer, SimpleLb},
};

use cluster::cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig, LbPolicy};

/// Returns the listeners of these services, by each name that clients may use.
pub(super) fn listeners(scope: &Scope<'_>, services: &[&Typed<Service>]) -> Vec<Arc<Resource>> {
    let full: HashSet<String> = services.iter().map(|service| service.fqdn()).collect();
    let mut made = Vec::new();
    for service in services {
        let mut hosts = short_names(scope, service);
        // The full name of a service may be a short name of another.
        hosts.retain(|host| !full.contains(host));
        hosts.push(service.fqdn());
        for port in ports(service) {
            let routes = ClusterName::outbound(port.port, "", &service.fqdn()).to_string();
            let manager = connection_manager(routes);
            made.extend(hosts.iter().map(|host| listener(format!("{host}:{}", port.port), &manager)));
        }
    }
    made
}

/// Returns the routes of a service, one resource for each port.
pub(super) fn routes(scope: &Scope<'_>, service: &Typed<Service>) -> Vec<Arc<Resource>> {
    ports(service).map(|port| routes::of_cluster(scope, service, port.port)).collect()
}

/// Returns the clusters of a service port: that of the whole service, then that of each subset.
pub(super) fn clusters(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    port: &ServicePort,
    rule: Option<&Typed<DestinationRule>>,
) -> Vec<cluster::Cluster> {
    let (host, mesh) = (service.fqdn(), scope.world.mesh());
    let rule = rule.map(|rule| &rule.spec);
    let whole = rule.map(|rule| Effective::of_rule(rule, port.port)).unwrap_or_default();
    let made = |subset: &str, effective: &Effective<'_>| {
        let name = ClusterName::outbound(port.port, subset, &host).to_string();
        let mut made = of_endpoints(mesh, name, effective);
        // As in Istio only if the rule sets it, since it is unknown whether a server accepts both.
        if effective.tls.is_some_and(|tls| tls.mode == ClientTlsMode::IstioMutual) {
            made.transport_socket = Some(tls::for_grpc(mesh, &scope.world.service_identities(service)));
        }
        made
    };
    let subsets = rule.into_iter().flat_map(|rule| &rule.subsets);
    let subsets = subsets.map(|subset| made(&subset.name, &whole.of_subset(subset, port.port)));
    std::iter::once(made("", &whole)).chain(subsets).collect()
}

fn ports(service: &Typed<Service>) -> impl Iterator<Item = &ServicePort> {
    service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp)
}

/// Returns the short names of a service for a client. As in Istio, only services of its own namespace have them.
fn short_names(scope: &Scope<'_>, service: &Typed<Service>) -> Vec<String> {
    let (name, namespace) = (&service.meta.name, &service.meta.namespace);
    if service.spec.entry_host.is_some() || namespace != scope.namespace {
        return Vec::new();
    }
    vec![name.clone(), format!("{name}.{namespace}"), format!("{name}.{namespace}.svc")]
}

fn listener(name: String, manager: &Any) -> Arc<Resource> {
    let api_listener = Some(listener::ApiListener { api_listener: Some(manager.clone()) });
    let listener = listener::Listener { name, api_listener, ..Default::default() };
    order::encode(Kind::Listener, &listener.name, &listener)
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

fn of_endpoints(mesh: &MeshConfig, name: String, effective: &Effective<'_>) -> cluster::Cluster {
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
    pool::apply(&mut made, mesh, effective.connection_pool);
    pick(&mut made, effective.load_balancer);
    made
}

/// Sets the load balancing policy. The client's default is round robin; it would refuse an unknown policy.
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
