//! What the sidecar shows of itself: the admin page in Envoy's shape, readiness, metrics.

mod access;
mod clusters;
mod dump;
mod logging;

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
    http::{StatusCode, header::CONTENT_TYPE},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::Bytes;
use prost::Message as _;
use serde_json::{Value, json};
use skysail_xds::envoy::pb::envoy::config::{bootstrap::v3::Bootstrap, core::v3::Node};
use tokio::{net::TcpListener, sync::Notify};

use crate::{
    config::listener::Direction,
    discovery::Configuration,
    telemetry,
    worker::{Drain, Shared, Workers},
};

/// For so long connections are taken on when they are drained gracefully (`--drain-time-s` of Envoy).
const DRAIN_TIME: Duration = Duration::from_secs(600);

/// What the pages show.
pub(crate) struct Admin {
    configuration: Arc<Configuration>,
    workers: Arc<Workers>,
    shared: Shared,
    /// Encoded, for the config dump.
    bootstrap: Bytes,
    started: SystemTime,
    since: Instant,
    quit: Arc<Notify>,
    draining: AtomicBool,
}

/// Which pages a port has.
#[derive(Clone, Copy)]
pub(crate) enum Pages {
    /// The admin page.
    All,
    /// `/healthz/ready`.
    Health,
    /// `/stats/prometheus`.
    Metrics,
}

const HELP: &str = "\
/certs                    certificates in use and when they end
/clusters                 clusters and their endpoints (?format=json)
/config_dump              configuration in force (?resource=, ?mask=, ?name_regex=, ?include_eds)
/drain_listeners          (POST) take no new connections, finish those there are (?inboundonly, ?graceful, ?skip_exit)
/healthz/ready            200 when ready; open to the network, as /ready and /stats/prometheus
/listeners                addresses listened on (?format=json)
/logging                  (POST) what is logged (?level=, ?NAME=LEVEL, ?paths=NAME:LEVEL,... change it)
/memory                   resident memory in bytes
/on_demand                virtual hosts by route configuration: those in hand, names asked for, names that none has
/quitquitquit             (POST) drain and end
/ready                    LIVE when ready
/server_info              version, state, uptime, node
/stats                    counters and gauges, one a line (?filter=)
/stats/prometheus         the same as Prometheus text
";

impl Admin {
    pub(crate) fn new(
        configuration: Arc<Configuration>,
        workers: Arc<Workers>,
        shared: Shared,
        bootstrap: &Bytes,
        quit: Arc<Notify>,
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
        })
    }

    /// From now on not ready.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    fn state(&self) -> &'static str {
        match (self.draining.load(Ordering::Acquire), self.configuration.is_ready()) {
            (true, _) => "DRAINING",
            (false, true) => "LIVE",
            (false, false) => "INITIALIZING",
        }
    }
}

/// A bootstrap that only says who we are, for the config dump of a sidecar that has no file.
pub(crate) fn node_only(node: &Node) -> Bytes {
    Bootstrap { node: Some(node.clone()), ..Bootstrap::default() }.encode_to_vec().into()
}

/// Serves pages on an address.
///
/// # Errors
/// When the address cannot be listened on.
pub(crate) async fn serve(
    admin: &Arc<Admin>,
    address: SocketAddr,
    what: &'static str,
    pages: Pages,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address} for the {what}"))?;
    tracing::info!(address = %listener.local_addr()?, "{what}");
    let router = match pages {
        Pages::Health => Router::new().route("/healthz/ready", get(ready)),
        Pages::Metrics => Router::new().route("/stats/prometheus", get(prometheus)),
        Pages::All => all(),
    };
    let service = router.with_state(Arc::clone(admin)).into_make_service_with_connect_info::<access::Ends>();
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, service).await {
            tracing::error!(%error, "the {what} ended");
        }
    });
    Ok(())
}

fn all() -> Router<Arc<Admin>> {
    Router::new()
        .route("/", get(async || HELP))
        .route("/help", get(async || HELP))
        .route("/certs", get(certs))
        .route("/clusters", get(clusters_page))
        .route("/config_dump", get(config_dump))
        .route("/drain_listeners", post(drain_listeners))
        .route("/listeners", get(listeners))
        .route("/logging", post(logging::page))
        .route("/memory", get(memory))
        .route("/on_demand", get(on_demand))
        .route("/quitquitquit", post(quit))
        .route("/server_info", get(server_info))
        .route("/stats", get(stats))
        .layer(middleware::from_fn(access::guard))
        .route("/healthz/ready", get(ready))
        .route("/ready", get(ready))
        .route("/stats/prometheus", get(prometheus))
}

type Options = Query<HashMap<String, String>>;

async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    let state = admin.state();
    let status = if state == "LIVE" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, format!("{state}\n")).into_response()
}

async fn metrics(admin: &Admin) -> String {
    telemetry::collect(admin.workers.scrape().await, &admin.shared.local, Some(&admin.shared.access_log))
}

async fn prometheus(State(admin): State<Arc<Admin>>) -> Response {
    let text = metrics(&admin).await;
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn stats(State(admin): State<Arc<Admin>>, Query(options): Options) -> Response {
    let text = metrics(&admin).await;
    if options.get("format").is_some_and(|format| format == "prometheus") {
        return ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response();
    }
    let filter = match options.get("filter").map(|filter| regex::Regex::new(filter)).transpose() {
        Ok(filter) => filter,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("filter: {error}\n")).into_response(),
    };
    let mut lines = String::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        // The value follows the last space; label values may hold spaces too.
        if let Some((name, value)) = line.rsplit_once(' ')
            && filter.as_ref().is_none_or(|filter| filter.is_match(name))
        {
            let _ = writeln!(lines, "{name}: {value}");
        }
    }
    lines.into_response()
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
    // A child process, so that this thread goes on meanwhile.
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
            .map(|(name, _, address)| json!({"name": &**name, "local_address": clusters::address(*address)}))
            .collect();
        return Json(json!({"listener_statuses": statuses})).into_response();
    }
    let mut text = String::new();
    for (name, _, address) in addresses {
        let _ = writeln!(text, "{name}::{address}");
    }
    text.into_response()
}

async fn certs(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let time = |time: SystemTime| rfc3339(time);
    let mut certificates = Vec::new();
    let tls = admin.configuration.tls();
    let named = tls.identities().into_iter().filter_map(|(name, identity)| Some((name.name, identity?)));
    let unnamed = tls.unnamed_identities().into_iter().map(|identity| ("<inline>".into(), identity));
    for (name, identity) in named.chain(unnamed) {
        let left = identity.not_after.duration_since(SystemTime::now()).unwrap_or_default();
        let names: Vec<Value> = identity
            .peer
            .uris
            .iter()
            .map(|uri| json!({"uri": uri}))
            .chain(identity.peer.dns.iter().map(|dns| json!({"dns": dns})))
            .collect();
        certificates.push(json!({
            "ca_cert": [],
            "cert_chain": [{
                "path": &*name,
                "subject_alt_names": names,
                "valid_from": time(identity.not_before),
                "expiration_time": time(identity.not_after),
                "days_until_expiration": (left.as_secs() / 86_400).to_string(),
            }],
        }));
    }
    Json(json!({"certificates": certificates}))
}

async fn server_info(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let uptime = format!("{}s", admin.since.elapsed().as_secs());
    let local = &admin.shared.local;
    Json(json!({
        "version": concat!(env!("CARGO_PKG_VERSION"), "/skysail-proxy"),
        "state": admin.state(),
        "uptime_current_epoch": uptime,
        "uptime_all_epochs": uptime,
        "hot_restart_version": "disabled",
        "node": {"id": &*local.node_id, "cluster": &*local.node_cluster, "user_agent_name": "skysail-proxy"},
        "command_line_options": {"command": std::env::args().collect::<Vec<_>>()},
    }))
}

async fn memory() -> Json<Value> {
    // The second number is the resident set, in pages of 4 KiB.
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    Json(json!({"allocated": (pages * 4096).to_string()}))
}

async fn on_demand(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let inventory = admin.configuration.inventory().await;
    Json(inventory.hosts.iter().map(|(table, hosts)| (table.to_string(), hosts.shown())).collect())
}

async fn quit(State(admin): State<Arc<Admin>>) -> &'static str {
    admin.quit.notify_one();
    "OK\n"
}

/// Envoy's, where parameters count by being there. Answers when all workers have begun.
async fn drain_listeners(State(admin): State<Arc<Admin>>, Query(options): Options) -> Response {
    const KNOWN: [&str; 3] = ["inboundonly", "graceful", "skip_exit"];
    if let Some(unknown) = options.keys().find(|name| !KNOWN.contains(&name.as_str())) {
        let reason = format!("there is no parameter {unknown:?}, only {}\n", KNOWN.join(", "));
        return (StatusCode::BAD_REQUEST, reason).into_response();
    }
    let [inbound_only, graceful, skip_exit] = KNOWN.map(|name| options.contains_key(name));
    admin.drain();
    let directions = if inbound_only { &[Direction::Inbound] } else { Direction::ALL };
    let drain = Drain { directions, close: !graceful && !skip_exit, patience: DRAIN_TIME };
    admin.workers.begin_drain(drain).await;
    if graceful && !skip_exit {
        let workers = Arc::clone(&admin.workers);
        tokio::spawn(async move {
            tokio::time::sleep(DRAIN_TIME).await;
            workers.begin_drain(Drain { close: true, ..drain }).await;
        });
    }
    "OK\n".into_response()
}

fn wants_json(options: &HashMap<String, String>) -> bool {
    options.get("format").is_some_and(|format| format == "json")
}

/// A time as RFC 3339 has it, to the second.
fn rfc3339(time: SystemTime) -> String {
    let mut text = Vec::new();
    telemetry::format::write_time(time, &mut text);
    String::from_utf8_lossy(&text).into_owned()
}
