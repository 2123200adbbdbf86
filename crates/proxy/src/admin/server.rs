//! `/server_info`, `/memory`, `/runtime`, `/ready` and `/healthcheck`: state of the process in Envoy's shape.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use axum::{
    Json,
    extract::State as Extract,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::envoy::config::bootstrap::v3::{Bootstrap, runtime_layer::LayerSpecifier};

use super::Admin;
use crate::translate::bootstrap::{convert, runtime};

/// `envoy.admin.v3.ServerInfo.ServerState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerState {
    Live,
    Draining,
    Initializing,
}

impl ServerState {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Live => "LIVE",
            Self::Draining => "DRAINING",
            Self::Initializing => "INITIALIZING",
        }
    }

    pub(super) fn number(self) -> u64 {
        match self {
            Self::Live => 0,
            Self::Draining => 1,
            Self::Initializing => 3,
        }
    }
}

pub(super) async fn ready(Extract(admin): Extract<Arc<Admin>>) -> Response {
    let state = admin.state();
    let status = if state == ServerState::Live { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, format!("{}\n", state.name())).into_response()
}

/// `/healthcheck/fail`: makes readiness fail until `/healthcheck/ok`.
pub(super) async fn fail(Extract(admin): Extract<Arc<Admin>>) -> &'static str {
    admin.failed.store(true, Ordering::Release);
    "OK\n"
}

pub(super) async fn recover(Extract(admin): Extract<Arc<Admin>>) -> &'static str {
    admin.failed.store(false, Ordering::Release);
    "OK\n"
}

/// Returns `envoy.admin.v3.ServerInfo`, with the command line options that Envoy has too.
pub(super) async fn info(Extract(admin): Extract<Arc<Admin>>) -> Response {
    let uptime = format!("{}s", admin.since.elapsed().as_secs());
    let bootstrap = admin.bootstrap.clone();
    // The conversion waits for a child process, so it must not block this thread.
    let node = tokio::task::spawn_blocking(move || node(&bootstrap)).await;
    let node = match node {
        Ok(Ok(node)) => node,
        Ok(Err(error)) => return (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")).into_response(),
        Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    };
    let info = json!({
        "version": concat!(env!("CARGO_PKG_VERSION"), "/skysail-proxy"),
        "state": admin.state().name(),
        "uptime_current_epoch": uptime,
        "uptime_all_epochs": uptime,
        "hot_restart_version": "disabled",
        "hot_restart_initializing": false,
        "command_line_options": command_line(&admin),
        "node": node,
    });
    Json(info).into_response()
}

/// Returns `envoy.admin.v3.CommandLineOptions`. Envoy prints every field.
fn command_line(admin: &Admin) -> Value {
    let level = skysail_core::logging::levels().into_iter().find(|(module, _)| module.is_none());
    let level = match level.as_ref().map_or("off", |(_, level)| level) {
        "warn" => "warning",
        other => other,
    };
    json!({
        "base_id": "0",
        "concurrency": admin.workers.count(),
        "config_path": admin.options.config_path,
        "config_yaml": admin.options.config_yaml,
        "allow_unknown_static_fields": admin.options.lenient,
        "admin_address_path": "",
        "local_address_ip_version": "v4",
        "log_level": level,
        "component_log_level": "",
        "log_format": "",
        "log_path": "",
        "service_cluster": "",
        "service_node": "",
        "service_zone": "",
        "file_flush_interval": "0.100s",
        "drain_time": format!("{}s", admin.options.drain_time.as_secs()),
        "parent_shutdown_time": "0s",
        "mode": "Serve",
        "disable_hot_restart": true,
        "restart_epoch": 0,
        "cpuset_threads": false,
        "reject_unknown_dynamic_fields": false,
        "ignore_unknown_dynamic_fields": false,
        "disabled_extensions": [],
        "drain_strategy": "Immediate",
    })
}

/// Returns the node as JSON.
fn node(bootstrap: &[u8]) -> anyhow::Result<Value> {
    let mut node = Bootstrap::from_slice(bootstrap)?.node.unwrap_or_default();
    if node.user_agent_name.is_empty() {
        node.user_agent_name = "skysail-proxy".to_owned();
    }
    let bootstrap = Bootstrap { node: Some(node), ..Bootstrap::default() };
    let dump = skysail_xds::envoy::pb::envoy::admin::v3::BootstrapConfigDump {
        bootstrap: Some(bootstrap),
        last_updated: None,
    };
    let dump = super::dump::wrap(&dump);
    let mut value: Value =
        serde_json::from_slice(&convert::convert_in_child(convert::Conversion::ConfigDump, dump)?)?;
    Ok(value["configs"][0]["bootstrap"]["node"].take())
}

/// Memory of this process in bytes, from the kernel.
pub(super) struct Memory {
    /// Resident anonymous memory.
    pub(super) allocated: u64,
    /// Size of the data segments (`VmData`).
    pub(super) heap: u64,
    /// Resident memory.
    pub(super) physical: u64,
}

impl Memory {
    pub(super) fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
            kilobytes.unwrap_or(0) * 1024
        };
        Self { allocated: bytes("RssAnon"), heap: bytes("VmData"), physical: bytes("VmRSS") }
    }
}

/// Returns `envoy.admin.v3.Memory`. Fields that describe only Envoy's allocator are 0.
pub(super) async fn memory() -> Json<Value> {
    let Memory { allocated, heap, physical } = Memory::now();
    Json(json!({
        "allocated": allocated.to_string(),
        "heap_size": heap.to_string(),
        "pageheap_unmapped": "0",
        "pageheap_free": "0",
        "total_thread_cache": "0",
        "total_physical_bytes": physical.to_string(),
    }))
}

/// Returns the layers of the runtime with their values; the last layer that has a key determines its value.
pub(super) async fn runtime(Extract(admin): Extract<Arc<Admin>>) -> Json<Value> {
    let bootstrap = Bootstrap::from_slice(&admin.bootstrap).unwrap_or_default();
    let layers = bootstrap.layered_runtime.unwrap_or_default().layers;
    let mut entries: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (index, layer) in layers.iter().enumerate() {
        let Some(LayerSpecifier::StaticLayer(values)) = &layer.layer_specifier else { continue };
        for (key, value) in runtime::entries(values) {
            entries.entry(key).or_insert_with(|| vec![String::new(); layers.len()])[index] = value;
        }
    }
    let entries: serde_json::Map<_, _> = entries
        .into_iter()
        .map(|(key, values)| {
            let last = values.iter().rev().find(|value| !value.is_empty()).cloned().unwrap_or_default();
            (key, json!({"layer_values": values, "final_value": last}))
        })
        .collect();
    let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
    Json(json!({"layers": names, "entries": entries}))
}
