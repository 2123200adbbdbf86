//! Pages for people and Prometheus; `/` lists them. Readiness and metrics are open, the others need [`Access`].

use std::{net::IpAddr, sync::Arc};

use axum::{
    Json, Router,
    extract::{State, connect_info::Connected},
    http::{StatusCode, header},
    middleware,
    response::IntoResponse,
    routing::{get, post},
    serve::IncomingStream,
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
struct Pages {
    publisher: Arc<Publisher>,
    names: Arc<Names>,
    keeper: Arc<Keeper>,
    habits: Arc<Habits>,
    shutdown: Shutdown,
}

const HELP: &str = "\
/debug/ca                 the certificate authority and its roots; POST /ca/rotate, from this machine or pod, replaces the root
/debug/config_errors      what is wrong with the configuration: file, line, object, field, remedy
/debug/config_files       files in force, with the fingerprints of their texts
/debug/dns                names of endpoints: addresses, how long they hold, what went wrong
/debug/syncz              connected proxies, and what each has taken or refused
/debug/used               virtual hosts that workloads use, by identity: sent to their proxies before they ask
/metrics                  counters and gauges as Prometheus text; open to the network
/ready                    200 when ready, 503 when shutting down; open to the network
";

/// Serves the pages until the process ends.
pub(crate) async fn serve(
    listener: TcpListener,
    publisher: Arc<Publisher>,
    names: Arc<Names>,
    keeper: Arc<Keeper>,
    habits: Arc<Habits>,
    access: Arc<Access>,
    shutdown: Shutdown,
) -> std::io::Result<()> {
    let pages = Arc::new(Pages { publisher, names, keeper, habits, shutdown });
    let router = Router::new()
        .route("/", get(async || HELP))
        .route("/help", get(async || HELP))
        .route("/debug/ca", get(async |State(pages): State<Arc<Pages>>| Json(pages.keeper.status())))
        .route("/ca/rotate", post(rotate))
        .route("/debug/syncz", get(async |State(pages): State<Arc<Pages>>| Json(pages.publisher.clients())))
        .route("/debug/used", get(async |State(pages): State<Arc<Pages>>| Json(pages.habits.all())))
        .route("/debug/dns", get(async |State(pages): State<Arc<Pages>>| Json(pages.names.status())))
        .route(
            "/debug/config_files",
            get(async |State(pages): State<Arc<Pages>>| Json(pages.publisher.taken())),
        )
        .route(
            "/debug/config_errors",
            get(async |State(pages): State<Arc<Pages>>| Json(pages.publisher.findings())),
        )
        .layer(middleware::from_fn_with_state(access, access::guard))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(pages);
    axum::serve(listener, router.into_make_service_with_connect_info::<Ends>()).await
}

/// The pages are served once the configuration was read, so only the end makes a difference.
async fn ready(State(pages): State<Arc<Pages>>) -> (StatusCode, &'static str) {
    if pages.shutdown.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n")
    } else {
        (StatusCode::OK, "ready\n")
    }
}

/// The two ends of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) local: Option<IpAddr>,
    pub(crate) remote: IpAddr,
}

impl Connected<IncomingStream<'_, TcpListener>> for Ends {
    fn connect_info(stream: IncomingStream<'_, TcpListener>) -> Self {
        let local = stream.io().local_addr().ok().map(|address| address.ip());
        Self { local, remote: stream.remote_addr().ip() }
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
