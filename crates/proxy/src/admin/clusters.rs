//! `/clusters`: every endpoint with its statistics, as Envoy prints them.

use std::{collections::HashMap, fmt::Write as _, net::SocketAddr, sync::Arc};

use serde_json::{Value, json};

use crate::{accept::workers::HostStats, discovery::inventory::Inventory};
use skysail_policy::config::{
    Cluster, Endpoint,
    cluster::{Discovery, Health, Place},
};

/// Endpoint statistics by cluster and address, summed over all workers.
struct EndpointStats(HashMap<(Arc<str>, SocketAddr), HostStats>);

impl EndpointStats {
    fn new(all: &[HostStats]) -> Self {
        let mut sums: HashMap<(Arc<str>, SocketAddr), HostStats> = HashMap::new();
        for one in all {
            let Some(address) = one.address else { continue };
            let sum = sums.entry((Arc::clone(&one.cluster), address)).or_default();
            sum.connections += one.connections;
            sum.connections_total += one.connections_total;
            sum.connect_failures += one.connect_failures;
            sum.requests += one.requests;
            sum.requests_total += one.requests_total;
            sum.errors += one.errors;
        }
        Self(sums)
    }

    /// Returns the statistics as (name, value, whether it is a gauge).
    fn of(&self, cluster: &Cluster, address: SocketAddr) -> [(&'static str, u64, bool); 8] {
        let none = HostStats::default();
        let host = self.0.get(&(Arc::clone(&cluster.name), address)).unwrap_or(&none);
        [
            ("cx_active", host.connections.into(), true),
            ("cx_connect_fail", host.connect_failures, false),
            ("cx_total", host.connections_total, false),
            ("rq_active", host.requests.into(), true),
            ("rq_error", host.errors, false),
            ("rq_success", host.requests_total.saturating_sub(host.errors), false),
            ("rq_timeout", 0, false),
            ("rq_total", host.requests_total, false),
        ]
    }
}

fn in_force(inventory: &Inventory) -> impl Iterator<Item = (&Arc<Cluster>, bool)> {
    inventory
        .clusters
        .values()
        .filter_map(|slot| slot.active.as_ref())
        .map(|accepted| (&accepted.value, !accepted.is_static))
}

fn endpoints(cluster: &Cluster) -> Vec<(usize, Arc<Endpoint>)> {
    let endpoints = cluster.endpoints.load();
    let by_priority = endpoints.priorities.iter().enumerate();
    by_priority
        .flat_map(|(priority, list)| list.iter().map(move |endpoint| (priority, Arc::clone(endpoint))))
        .collect()
}

fn is_ejected(endpoint: &Endpoint) -> bool {
    endpoint.state.as_ref().is_some_and(|track| track.is_ejected())
}

/// Returns `healthy`, or Envoy's health flags of the endpoint.
fn flags(endpoint: &Endpoint) -> String {
    let ejected = if is_ejected(endpoint) { "/failed_outlier_check" } else { "" };
    let by_eds = match endpoint.health {
        Health::Healthy => "",
        Health::Degraded => "/degraded_eds_health",
        Health::Unhealthy => "/failed_eds_health",
        Health::Draining => "/eds_status_draining",
    };
    if ejected.is_empty() && by_eds.is_empty() { "healthy".to_owned() } else { format!("{ejected}{by_eds}") }
}

/// Returns the health as `envoy.admin.v3.HostHealthStatus`.
fn health(endpoint: &Endpoint) -> Value {
    let by_eds = match endpoint.health {
        Health::Healthy => "HEALTHY",
        Health::Degraded => "DEGRADED",
        Health::Unhealthy => "UNHEALTHY",
        Health::Draining => "DRAINING",
    };
    let mut status = json!({"eds_health_status": by_eds});
    if is_ejected(endpoint) {
        status["failed_outlier_check"] = true.into();
    }
    status
}

/// Returns region, zone and sub-zone.
fn place(cluster: &Cluster, endpoint: &Endpoint) -> [Box<str>; 3] {
    let endpoints = cluster.endpoints.load();
    endpoints.localities.get(endpoint.locality as usize).map(|known| known.place.clone()).unwrap_or_default()
}

fn locality(cluster: &Cluster, endpoint: &Endpoint) -> Value {
    let names = ["region", "zone", "sub_zone"].iter().zip(place(cluster, endpoint));
    names.filter(|(_, value)| !value.is_empty()).map(|(name, value)| (*name, value.into_string())).collect()
}

/// Formats the statistics as text, one line per value.
pub(super) fn text(inventory: &Inventory, figures: &[HostStats]) -> String {
    let figures = EndpointStats::new(figures);
    let mut out = String::new();
    for (cluster, dynamic) in in_force(inventory) {
        let name = &cluster.name;
        let _ = writeln!(out, "{name}::observability_name::{name}");
        let limits = cluster.limits;
        for (what, limit) in [
            ("max_connections", limits.connections),
            ("max_pending_requests", limits.pending),
            ("max_requests", limits.requests),
            ("max_retries", limits.retries),
        ] {
            let _ = writeln!(out, "{name}::default_priority::{what}::{limit}");
        }
        let _ = writeln!(out, "{name}::added_via_api::{dynamic}");
        if let Discovery::Eds(service) = &cluster.discovery {
            let _ = writeln!(out, "{name}::eds_service_name::{service}");
        }
        for (priority, endpoint) in endpoints(cluster) {
            let at = format!("{name}::{}", endpoint.place());
            for (what, value, _) in figures.of(cluster, endpoint.address) {
                let _ = writeln!(out, "{at}::{what}::{value}");
            }
            let _ = writeln!(out, "{at}::hostname::{}", endpoint.hostname.as_deref().unwrap_or_default());
            let _ = writeln!(out, "{at}::health_flags::{}", flags(&endpoint));
            let _ = writeln!(out, "{at}::weight::{}", endpoint.weight);
            for (what, value) in ["region", "zone", "sub_zone"].iter().zip(place(cluster, &endpoint)) {
                let _ = writeln!(out, "{at}::{what}::{value}");
            }
            let _ = writeln!(out, "{at}::priority::{priority}");
        }
    }
    out
}

/// Returns the statistics as `envoy.admin.v3.Clusters`.
pub(super) fn json(inventory: &Inventory, figures: &[HostStats]) -> Value {
    let figures = EndpointStats::new(figures);
    let statuses: Vec<Value> =
        in_force(inventory).map(|(cluster, dynamic)| status(cluster, dynamic, &figures)).collect();
    json!({"cluster_statuses": statuses})
}

fn status(cluster: &Cluster, dynamic: bool, figures: &EndpointStats) -> Value {
    let hosts: Vec<Value> = endpoints(cluster)
        .into_iter()
        .map(|(priority, endpoint)| {
            let stats: Vec<Value> = figures
                .of(cluster, endpoint.address)
                .into_iter()
                .map(|(name, value, gauge)| {
                    let kind = if gauge { "GAUGE" } else { "COUNTER" };
                    json!({"name": name, "value": value.to_string(), "type": kind})
                })
                .collect();
            json!({
                "address": place_of(&endpoint),
                "stats": stats,
                "health_status": health(&endpoint),
                "locality": locality(cluster, &endpoint),
                "weight": endpoint.weight,
                "priority": priority,
                "hostname": endpoint.hostname.as_deref().unwrap_or_default(),
            })
        })
        .collect();
    let limits = cluster.limits;
    let mut status = json!({
        "name": &*cluster.name,
        "observability_name": &*cluster.name,
        "added_via_api": dynamic,
        "host_statuses": hosts,
        "circuit_breakers": {"thresholds": [{
            "max_connections": limits.connections,
            "max_pending_requests": limits.pending,
            "max_requests": limits.requests,
            "max_retries": limits.retries,
        }]},
    });
    if let Discovery::Eds(service) = &cluster.discovery {
        status["eds_service_name"] = (**service).into();
    }
    status
}

fn place_of(endpoint: &Endpoint) -> Value {
    match endpoint.place() {
        Place::Ip(of) => address(of),
        Place::Pipe(path) => json!({"pipe": {"path": path}}),
    }
}

/// Returns an address as `envoy.config.core.v3.Address`.
pub(super) fn address(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip().to_string(), "port_value": address.port()}})
}
