//! Pages for people and Prometheus; `/` lists them.

use std::{sync::Arc, time::SystemTime};

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use skysail_core::shutdown::Shutdown;
use tokio::net::TcpListener;

use crate::{metrics::Gauges, publish::Publisher, resolve::Names};

/// What the pages show.
struct Pages {
    publisher: Arc<Publisher>,
    names: Arc<Names>,
    shutdown: Shutdown,
    root_expiry: u64,
}

const HELP: &str = "\
/debug/config_errors      what is wrong with the configuration: file, line, object, field, remedy
/debug/config_files       files in force, with the fingerprints of their texts
/debug/dns                names of endpoints: addresses, how long they hold, what went wrong
/debug/syncz              connected proxies, and what each has taken or refused
/metrics                  counters and gauges as Prometheus text
/ready                    200 when ready, 503 when shutting down
";

/// Serves the pages until the process ends.
pub(crate) async fn serve(
    listener: TcpListener,
    publisher: Arc<Publisher>,
    names: Arc<Names>,
    root_expiry: SystemTime,
    shutdown: Shutdown,
) -> std::io::Result<()> {
    let root_expiry = root_expiry.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let pages = Arc::new(Pages { publisher, names, shutdown, root_expiry });
    let router = Router::new()
        .route("/", get(async || HELP))
        .route("/help", get(async || HELP))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/debug/syncz", get(async |State(pages): State<Arc<Pages>>| Json(pages.publisher.clients())))
        .route("/debug/dns", get(async |State(pages): State<Arc<Pages>>| Json(pages.names.status())))
        .route(
            "/debug/config_files",
            get(async |State(pages): State<Arc<Pages>>| Json(pages.publisher.taken())),
        )
        .route(
            "/debug/config_errors",
            get(async |State(pages): State<Arc<Pages>>| Json(pages.publisher.findings())),
        )
        .with_state(pages);
    axum::serve(listener, router).await
}

/// The pages are served once the configuration was read, so only the end makes a difference.
async fn ready(State(pages): State<Arc<Pages>>) -> (StatusCode, &'static str) {
    if pages.shutdown.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n")
    } else {
        (StatusCode::OK, "ready\n")
    }
}

async fn metrics(State(pages): State<Arc<Pages>>) -> impl IntoResponse {
    let names = pages.names.conditions();
    let gauges = Gauges { root_expiry: pages.root_expiry, names, ..pages.publisher.gauges() };
    let text = pages.publisher.metrics.render(&gauges);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}
