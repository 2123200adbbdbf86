//! Admin interface of the sidecar: the admin page in Envoy's shape, readiness, metrics.

mod access;
mod certs;
mod clusters;
mod dump;
mod logging;
mod server;
mod stats;

use std::{
    collections::HashMap,
    fmt::Write as _,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use axum::{
    Json, Router,
    extract::{Query, State},
    http::{HeaderMap, StatusCode},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::Bytes;
use serde_json::{Value, json};
use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::envoy::config::{bootstrap::v3::Bootstrap, core::v3::Node};
use tokio::{net::TcpListener, sync::Notify};

pub(crate) use self::logging::level;

use crate::{
    accept::workers::{Drain, Shared, Workers},
    discovery::Configuration,
};
use skysail_policy::config::listener::Direction;

/// State behind the admin pages.
pub(crate) struct Admin {
    configuration: Arc<Configuration>,
    workers: Arc<Workers>,
    shared: Shared,
    /// Encoded `envoy.config.bootstrap.v3.Bootstrap`, for `/config_dump`.
    bootstrap: Bytes,
    started: SystemTime,
    since: Instant,
    quit: Arc<Notify>,
    draining: AtomicBool,
    /// Set by `/healthcheck/fail`.
    failed: AtomicBool,
    options: CommandLine,
    snapshots: stats::Snapshots,
}

/// Command line options that the pages show or use.
#[derive(Clone, Debug)]
pub(crate) struct CommandLine {
    /// Duration of a graceful drain, after which listeners accept no more connections.
    pub(crate) drain_time: Duration,
    /// Path of the bootstrap file; empty without one.
    pub(crate) config_path: String,
    /// Bootstrap text that was merged into the file.
    pub(crate) config_yaml: String,
    /// Unsupported bootstrap fields are warned about instead of refused.
    pub(crate) lenient: bool,
}

/// Set of pages that a port serves.
#[derive(Clone, Copy)]
pub(crate) enum Pages {
    /// Every page.
    All,
    /// Only `/healthz/ready`.
    Health,
    /// Only `/stats/prometheus`.
    Metrics,
}

const HELP: &str = "\
/certs                    certificates in use and their expiry
/clusters                 clusters and their endpoints (?format=json)
/config_dump              configuration in effect (?resource=, ?mask=, ?name_regex=, ?include_eds)
/drain_listeners          (POST) accept no new connections, finish open ones (?inboundonly, ?graceful, ?skip_exit)
/healthcheck/fail         (POST) not ready until /healthcheck/ok
/healthcheck/ok           (POST) ready again
/healthz/ready            200 when ready; open to the network, as /ready and /stats/prometheus
/listeners                listener addresses (?format=json)
/logging                  (POST) log levels (change them by ?level=, ?NAME=LEVEL, ?paths=NAME:LEVEL,...)
/memory                   memory in bytes
/on_demand                virtual hosts by route configuration: known hosts, requested authorities, absent authorities
/quitquitquit             (POST) drain and exit
/ready                    LIVE when ready
/runtime                  layers of the runtime and their values
/server_info              version, state, uptime, node
/stats                    statistics by Envoy's names (?format=json|prometheus, ?filter=REGEX, ?usedonly, ?type=)
/stats/prometheus         the same as Prometheus text (?filter=REGEX, ?usedonly)
";

impl Admin {
    pub(crate) fn new(
        configuration: Arc<Configuration>,
        workers: Arc<Workers>,
        shared: Shared,
        bootstrap: &Bytes,
        quit: Arc<Notify>,
        options: CommandLine,
    ) -> Arc<Self> {
        Arc::new(Self {
            configuration,
            workers,
            shared,
            bootstrap: bootstrap.clone(),
            started: SystemTime::now(),
            since: Instant::now(),
            quit,
            draining: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            options,
            snapshots: stats::Snapshots::default(),
        })
    }

    /// Makes readiness fail from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    fn state(&self) -> server::ServerState {
        let draining = self.draining.load(Ordering::Acquire) || self.failed.load(Ordering::Acquire);
        match (draining, self.configuration.is_ready()) {
            (true, _) => server::ServerState::Draining,
            (false, true) => server::ServerState::Live,
            (false, false) => server::ServerState::Initializing,
        }
    }
}

/// Returns a bootstrap that contains only the node, for the config dump of a sidecar without a bootstrap file.
pub(crate) fn node_only(node: &Node) -> Bytes {
    Bootstrap { node: Some(node.clone()), ..Bootstrap::default() }.to_vec().into()
}

/// Serves pages on an address, and returns the address.
///
/// # Errors
/// The address cannot be bound.
pub(crate) async fn serve(
    admin: &Arc<Admin>,
    address: SocketAddr,
    what: &'static str,
    pages: Pages,
) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address} for the {what}"))?;
    let address = listener.local_addr()?;
    tracing::info!(%address, "{what}");
    let router = match pages {
        Pages::Health => Router::new().route("/healthz/ready", get(server::ready)),
        Pages::Metrics => Router::new().route("/stats/prometheus", get(stats::prometheus)),
        Pages::All => all(),
    };
    tokio::spawn(skysail_admin::serve(listener, router.with_state(Arc::clone(admin))));
    Ok(address)
}

/// Returns pages of Istio's agent: readiness, and for local callers those that end the sidecar.
pub(crate) fn agent_pages(admin: &Arc<Admin>) -> Router {
    Router::new()
        .route("/drain", post(drain_inbound))
        .route("/quitquitquit", post(quit))
        .layer(middleware::from_fn(access::guard))
        .route("/healthz/ready", get(server::ready))
        .with_state(Arc::clone(admin))
}

fn all() -> Router<Arc<Admin>> {
    Router::new()
        .route("/", get(index))
        .route("/help", get(index))
        .route("/certs", get(certs::page))
        .route("/clusters", get(clusters_page))
        .route("/config_dump", get(config_dump))
        .route("/drain_listeners", post(drain_listeners))
        .route("/healthcheck/fail", post(server::fail))
        .route("/healthcheck/ok", post(server::recover))
        .route("/listeners", get(listeners))
        .route("/logging", post(logging::page))
        .route("/memory", get(server::memory))
        .route("/on_demand", get(on_demand))
        .route("/quitquitquit", post(quit))
        .route("/runtime", get(server::runtime))
        .route("/server_info", get(server::info))
        .route("/stats", get(stats::page))
        .layer(middleware::from_fn(access::guard))
        .route("/healthz/ready", get(server::ready))
        .route("/ready", get(server::ready))
        .route("/stats/prometheus", get(stats::prometheus))
}

type Options = Query<HashMap<String, String>>;

async fn index(headers: HeaderMap) -> Response {
    skysail_admin::index("skysail-proxy", HELP, &headers)
}

async fn clusters_page(State(admin): State<Arc<Admin>>, Query(options): Options) -> Response {
    let figures = admin.workers.clusters().await;
    let inventory = admin.configuration.inventory().await;
    if wants_json(&options) {
        return Json(clusters::json(&inventory, &figures)).into_response();
    }
    clusters::text(&inventory, &figures).into_response()
}

async fn config_dump(State(admin): State<Arc<Admin>>, Query(options): Options) -> Response {
    let dump = dump::config_dump(&admin, options.contains_key("include_eds")).await;
    // The conversion waits for a child process, so it must not block this thread.
    let converted = tokio::task::spawn_blocking(move || dump::to_json(dump)).await;
    match converted {
        Ok(Ok(value)) => match dump::select(value, &options) {
            Ok(value) => Json(value).into_response(),
            Err(reason) => (StatusCode::BAD_REQUEST, reason).into_response(),
        },
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn listeners(State(admin): State<Arc<Admin>>, Query(options): Options) -> Response {
    let mut addresses = admin.workers.addresses().await;
    addresses.sort_by(|a, b| a.0.cmp(&b.0));
    if wants_json(&options) {
        let statuses: Vec<Value> = addresses
            .iter()
            .map(|(name, _, address)| {
                let local = match admin.workers.pipe(name) {
                    Some(path) => json!({"pipe": {"path": path}}),
                    None => clusters::address(*address),
                };
                json!({"name": &**name, "local_address": local})
            })
            .collect();
        return Json(json!({"listener_statuses": statuses})).into_response();
    }
    let mut text = String::new();
    for (name, _, address) in addresses {
        let _ = match admin.workers.pipe(&name) {
            Some(path) => writeln!(text, "{name}::{path}"),
            None => writeln!(text, "{name}::{address}"),
        };
    }
    text.into_response()
}

async fn on_demand(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let inventory = admin.configuration.inventory().await;
    Json(inventory.hosts.iter().map(|(table, hosts)| (table.to_string(), hosts.to_json())).collect())
}

async fn quit(State(admin): State<Arc<Admin>>) -> &'static str {
    admin.quit.notify_one();
    "OK\n"
}

/// Drains listeners as Envoy does: a parameter applies if it is present. Responds when every worker has begun
/// to drain.
async fn drain_listeners(State(admin): State<Arc<Admin>>, Query(options): Options) -> Response {
    const KNOWN: [&str; 3] = ["inboundonly", "graceful", "skip_exit"];
    if let Some(unknown) = options.keys().find(|name| !KNOWN.contains(&name.as_str())) {
        let reason = format!("there is no parameter {unknown:?}, only {}\n", KNOWN.join(", "));
        return (StatusCode::BAD_REQUEST, reason).into_response();
    }
    let [inbound_only, graceful, skip_exit] = KNOWN.map(|name| options.contains_key(name));
    admin.drain();
    let drain_time = admin.options.drain_time;
    let directions = if inbound_only { &[Direction::Inbound] } else { Direction::ALL };
    let drain = Drain { directions, close: !graceful && !skip_exit, timeout: drain_time };
    admin.workers.begin_drain(drain).await;
    // A client that waits for the end of the connections must not read a count from before the drain.
    admin.snapshots.expire().await;
    if graceful && !skip_exit {
        let workers = Arc::clone(&admin.workers);
        tokio::spawn(async move {
            tokio::time::sleep(drain_time).await;
            workers.begin_drain(Drain { close: true, ..drain }).await;
        });
    }
    "OK\n".into_response()
}

/// Drains inbound listeners as Istio's agent does before the programs of its pod end: they accept connections until then.
async fn drain_inbound(admin: State<Arc<Admin>>) -> Response {
    let options = ["inboundonly", "graceful", "skip_exit"].map(|name| (name.to_owned(), String::new()));
    drain_listeners(admin, Query(options.into())).await
}

fn wants_json(options: &HashMap<String, String>) -> bool {
    options.get("format").is_some_and(|format| format == "json")
}
