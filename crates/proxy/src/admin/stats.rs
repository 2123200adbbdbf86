//! `/stats` and `/stats/prometheus`: what workers count, and what the process says of itself by Envoy's names.

use std::{collections::HashMap, time::Duration};

use axum::{
    Json,
    extract::{Query, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use skysail_xds::Kind as Resources;

use super::{Admin, Options, server};
use crate::telemetry::{
    Metrics,
    plain::{Kind, Wanted},
};

/// Most bytes that a compiled filter may take.
const MAX_FILTER: usize = 1 << 18;

/// `/stats`, in the form that is asked for.
pub(super) async fn page(State(admin): State<std::sync::Arc<Admin>>, Query(options): Options) -> Response {
    let format = options.get("format").map_or("text", String::as_str);
    match (format, wanted(&options)) {
        (_, Err(reason)) => (StatusCode::BAD_REQUEST, reason).into_response(),
        ("text", Ok(wanted)) => metrics(&admin).await.text(&wanted).into_response(),
        ("json", Ok(wanted)) => Json(metrics(&admin).await.json(&wanted)).into_response(),
        ("prometheus", Ok(wanted)) => exposition(metrics(&admin).await.prometheus(&wanted)),
        _ => {
            let usage = "usage: /stats?format=(text|json|prometheus)\n".to_owned();
            (StatusCode::BAD_REQUEST, usage).into_response()
        }
    }
}

/// `/stats/prometheus`.
pub(super) async fn prometheus(
    State(admin): State<std::sync::Arc<Admin>>,
    Query(options): Options,
) -> Response {
    match wanted(&options) {
        Ok(wanted) => exposition(metrics(&admin).await.prometheus(&wanted)),
        Err(reason) => (StatusCode::BAD_REQUEST, reason).into_response(),
    }
}

fn exposition(text: String) -> Response {
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// What the parameters ask for; those of Envoy's that only concern forms that are not served are passed over.
fn wanted(options: &HashMap<String, String>) -> Result<Wanted, String> {
    let filter = options.get("filter").filter(|filter| !filter.is_empty());
    // Metrics are open to the network.
    let compiled = |filter: &String| regex::RegexBuilder::new(filter).size_limit(MAX_FILTER).build();
    let filter = filter.map(compiled).transpose();
    let kind = match options.get("type").map(|kind| kind.to_ascii_lowercase()).as_deref() {
        None | Some("all") => None,
        Some("counters") => Some(Kind::Counters),
        Some("gauges") => Some(Kind::Gauges),
        Some("histograms") => Some(Kind::Histograms),
        Some("textreadouts") => Some(Kind::TextReadouts),
        Some(other) => {
            return Err(format!(
                "type: {other:?} is none of All, Counters, Gauges, Histograms, TextReadouts\n"
            ));
        }
    };
    if let Some(buckets) = options.get("histogram_buckets").filter(|buckets| *buckets != "none") {
        return Err(format!("histogram_buckets: {buckets:?} is not supported; there is none\n"));
    }
    Ok(Wanted {
        filter: filter.map_err(|error| format!("Invalid re2 regex: {error}\n"))?,
        used_only: options.contains_key("usedonly"),
        kind,
    })
}

/// Everything there is to show.
async fn metrics(admin: &Admin) -> Metrics {
    let shards = admin.workers.scrape().await;
    let mut metrics = Metrics::new(shards, &admin.shared.local, Some(&admin.shared.access_log));
    add_server(admin, &mut metrics);
    add_discovery(admin, &mut metrics).await;
    for (name, value) in admin.shared.pressure.stats() {
        metrics.add_gauge(name, value);
    }
    metrics
}

/// `server.`: this process.
fn add_server(admin: &Admin, metrics: &mut Metrics) {
    let state = admin.state();
    let memory = server::Memory::now();
    let connections = metrics.sum("envoy_listener_downstream_cx_active");
    for (name, value) in [
        ("server.state", state.number()),
        ("server.live", u64::from(state == server::State::Live)),
        ("server.uptime", admin.since.elapsed().as_secs()),
        ("server.concurrency", admin.workers.count() as u64),
        ("server.hot_restart_epoch", 0),
        ("server.parent_connections", 0),
        ("server.total_connections", connections),
        ("server.memory_allocated", memory.allocated),
        ("server.memory_heap_size", memory.heap),
        ("server.memory_physical_size", memory.physical),
        ("server.days_until_first_cert_expiring", days_left(admin)),
    ] {
        metrics.add_gauge(name, value);
    }
}

/// Days until the first certificate ends; without one the highest number, as in Envoy.
fn days_left(admin: &Admin) -> u64 {
    let tls = admin.configuration.tls();
    let named = tls.identities().into_iter().filter_map(|(_, identity)| identity);
    let ends = named.chain(tls.unnamed_identities()).map(|identity| {
        identity.not_after.duration_since(std::time::SystemTime::now()).unwrap_or(Duration::ZERO).as_secs()
            / 86_400
    });
    ends.min().unwrap_or(u32::MAX.into())
}

/// `cluster_manager.`, `listener_manager.`, `control_plane.`: what came by discovery, and what is in force.
async fn add_discovery(admin: &Admin, metrics: &mut Metrics) {
    let configuration = &admin.configuration;
    for (scope, kind) in
        [("cluster_manager.cds", Resources::Cluster), ("listener_manager.lds", Resources::Listener)]
    {
        let updates = configuration.updates(kind);
        metrics.add_counter(format!("{scope}.update_attempt"), updates.success + updates.rejected);
        metrics.add_counter(format!("{scope}.update_success"), updates.success);
        metrics.add_counter(format!("{scope}.update_rejected"), updates.rejected);
        metrics.add_counter(format!("{scope}.update_failure"), 0);
        metrics.add_gauge(format!("{scope}.update_time"), updates.at_ms);
    }
    metrics.add_gauge("control_plane.connected_state", configuration.is_connected().into());
    let inventory = configuration.inventory().await;
    let clusters = inventory.clusters.values();
    let [active, warming] = counts(clusters.map(|slot| (slot.active.is_some(), slot.warming.is_some())));
    metrics.add_gauge("cluster_manager.active_clusters", active);
    metrics.add_gauge("cluster_manager.warming_clusters", warming);
    let listeners = inventory.listeners.values();
    let [active, warming] = counts(listeners.map(|slot| (slot.active.is_some(), slot.warming.is_some())));
    metrics.add_gauge("listener_manager.total_listeners_active", active);
    metrics.add_gauge("listener_manager.total_listeners_warming", warming);
    metrics.add_gauge("listener_manager.total_listeners_draining", 0);
    // Envoy's workers begin with the first configuration; ours are there before it, but serve nothing.
    metrics.add_gauge("listener_manager.workers_started", configuration.is_ready().into());
}

fn counts(slots: impl Iterator<Item = (bool, bool)>) -> [u64; 2] {
    slots.fold([0, 0], |[active, warming], (is_active, is_warming)| {
        [active + u64::from(is_active), warming + u64::from(is_warming)]
    })
}
