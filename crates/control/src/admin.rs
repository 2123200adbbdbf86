//! Pages for people and Prometheus; `/` lists them. Readiness and metrics are open, the others need [`Access`].

use std::{convert::Infallible, sync::Arc};

use axum::{
    Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use skysail_core::shutdown::Shutdown;
use tokio::net::TcpListener;

use crate::{
    access::{self, Access},
    authority::Keeper,
    habits::Habits,
    metrics::Gauges,
    publish::Publisher,
    resolve::Names,
};

/// What the pages show.
pub(crate) struct Pages {
    pub(crate) publisher: Arc<Publisher>,
    pub(crate) names: Arc<Names>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) habits: Arc<Habits>,
    pub(crate) shutdown: Shutdown,
}

/// The pages below `/debug`.
const DEBUG: [&str; 7] = ["ca", "config_changes", "config_errors", "config_files", "dns", "syncz", "used"];

impl Pages {
    /// One of them as JSON; `list` names them. `None` if there is no such page.
    pub(crate) fn json(&self, name: &str) -> Option<serde_json::Result<String>> {
        Some(match name {
            "ca" => serde_json::to_string(&self.keeper.status()),
            "config_changes" => serde_json::to_string(&self.publisher.changes()),
            "config_errors" => serde_json::to_string(&self.publisher.findings()),
            "config_files" => serde_json::to_string(&self.publisher.taken()),
            "dns" => serde_json::to_string(&self.names.status()),
            "syncz" => serde_json::to_string(&self.publisher.clients()),
            "used" => serde_json::to_string(&self.habits.all()),
            "list" => serde_json::to_string(&DEBUG),
            _ => return None,
        })
    }
}

const HELP: &str = "\
/debug/ca                 the certificate authority and its roots; POST /ca/rotate, from this machine or pod, replaces the root
/debug/config_changes     the last changes of the configuration in force: number, time, file, object, action, effect
/debug/config_errors      what is wrong with the configuration: file, line, object, field, remedy
/debug/config_files       files in force, with the fingerprints of their texts
/debug/dns                names of endpoints: addresses, how long they hold, what went wrong
/debug/syncz              connected proxies, and what each has taken or refused
/debug/used               virtual hosts that workloads use, by identity: sent to their proxies before they ask
/metrics                  counters and gauges as Prometheus text; open to the network
/ready                    200 when ready, 503 when shutting down; open to the network
";

/// Serves the pages until the process ends.
pub(crate) async fn serve(listener: TcpListener, pages: Arc<Pages>, access: Arc<Access>) -> Infallible {
    let router = Router::new()
        .route("/", get(index))
        .route("/help", get(index))
        .route("/ca/rotate", post(rotate))
        .route("/debug/{name}", get(debug))
        .layer(middleware::from_fn_with_state(access, access::guard))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(pages);
    skysail_admin::serve(listener, router).await
}

async fn index(headers: HeaderMap) -> Response {
    skysail_admin::index("skysaild", HELP, &headers)
}

async fn debug(State(pages): State<Arc<Pages>>, Path(name): Path<String>) -> Response {
    match pages.json(&name) {
        Some(Ok(json)) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Some(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        None => (StatusCode::NOT_FOUND, "there is no such page; / lists them\n").into_response(),
    }
}

/// The pages are served once the configuration was read, so only the end makes a difference.
async fn ready(State(pages): State<Arc<Pages>>) -> (StatusCode, &'static str) {
    if pages.shutdown.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n")
    } else {
        (StatusCode::OK, "ready\n")
    }
}

/// Begins to replace the root.
async fn rotate(State(pages): State<Arc<Pages>>) -> (StatusCode, String) {
    match pages.keeper.rotate() {
        Ok(()) => (StatusCode::OK, "begun; /debug/ca tells where it stands\n".to_owned()),
        Err(why) => (StatusCode::CONFLICT, format!("{why}\n")),
    }
}

async fn metrics(State(pages): State<Arc<Pages>>) -> impl IntoResponse {
    let names = pages.names.conditions();
    let authority = Some(pages.keeper.status());
    let gauges = Gauges { authority, names, ..pages.publisher.gauges() };
    let text = pages.publisher.metrics.render(&gauges);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}
