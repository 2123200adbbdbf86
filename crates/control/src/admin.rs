//! Admin pages and metrics; `/` lists them. `/ready` and `/metrics` are open; the others require [`Access`].

use std::{convert::Infallible, fmt::Display, sync::Arc};

use axum::{
    Router,
    extract::{Path, RawQuery, State},
    http::{HeaderMap, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use skysail_core::shutdown::Shutdown;
use skysail_xds::Codec as _;
use tokio::{net::TcpListener, sync::Semaphore};

use crate::{
    access::{self, Access},
    authority::AuthorityManager,
    config_dump::whole_config_dump,
    metrics::Gauges,
    prefetch::PrefetchHistory,
    publish::Publisher,
    resolve::DnsCache,
};

/// Data of the pages.
pub(crate) struct Pages {
    pub(crate) publisher: Arc<Publisher>,
    pub(crate) dns_cache: Arc<DnsCache>,
    pub(crate) authority: Arc<AuthorityManager>,
    pub(crate) prefetch: Arc<PrefetchHistory>,
    pub(crate) shutdown: Shutdown,
}

/// Names of the pages that [`Pages::json`] returns; `/debug/objects` has a handler of its own.
const DEBUG: [&str; 7] = ["ca", "config_changes", "config_errors", "config_files", "dns", "syncz", "used"];

impl Pages {
    /// Returns a page as JSON; `list` is the list of pages. Returns `None` for an unknown name.
    pub(crate) fn json(&self, name: &str) -> Option<serde_json::Result<String>> {
        Some(match name {
            "ca" => serde_json::to_string(&self.authority.status()),
            "config_changes" => serde_json::to_string(&self.publisher.changes()),
            "config_errors" => serde_json::to_string(&self.publisher.findings()),
            "config_files" => serde_json::to_string(&self.publisher.file_fingerprints()),
            "dns" => serde_json::to_string(&self.dns_cache.status()),
            "syncz" => serde_json::to_string(&self.publisher.clients()),
            "used" => serde_json::to_string(&self.prefetch.all()),
            "list" => serde_json::to_string(&DEBUG),
            _ => return None,
        })
    }
}

/// Permits to make a dump, which copies the configuration of a proxy a few times.
static DUMPS: Semaphore = Semaphore::const_new(2);

const HELP: &str = "\
/debug/ca                 certificate authority and its roots; POST /ca/rotate from this machine or pod starts a rotation
/debug/config_changes     last changes of the configuration: number, time, file, object, action, effect
/debug/config_dump        resources of a proxy as envoy.admin.v3.ConfigDump (binary), without secrets: ?proxyID=POD.NAMESPACE
/debug/config_errors      errors and warnings of the configuration: file, line, object, field, remedy
/debug/config_files       files in use and their fingerprints
/debug/dns                DNS names of endpoints: addresses, seconds to expiry, errors
/debug/objects            objects with their state and numbers of proxies; one with all proxies: /debug/objects/KIND/NAMESPACE/NAME
/debug/syncz              connected proxies; versions sent, accepted and rejected by type
/debug/used               virtual hosts to prefetch, by identity of the proxies that requested them
/metrics                  metrics in Prometheus' text format; open to the network
/ready                    200 when ready, 503 during the shutdown; open to the network
";

/// Serves the pages until the process ends.
pub(crate) async fn serve(listener: TcpListener, pages: Arc<Pages>, access: Arc<Access>) -> Infallible {
    let router = Router::new()
        .route("/", get(index))
        .route("/help", get(index))
        .route("/ca/rotate", post(rotate))
        .route("/debug/config_dump", get(config_dump))
        .route("/debug/objects", get(objects))
        .route("/debug/objects/{kind}/{namespace}/{name}", get(object))
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

async fn objects(State(pages): State<Arc<Pages>>) -> Response {
    computed(move || Some(serde_json::to_string(&pages.publisher.objects()))).await
}

async fn object(
    State(pages): State<Arc<Pages>>,
    Path((kind, namespace, name)): Path<(String, String, String)>,
) -> Response {
    computed(move || Some(serde_json::to_string(&pages.publisher.object(&kind, &namespace, &name)?))).await
}

/// Returns a page about objects, which is computed on another thread.
async fn computed(page: impl FnOnce() -> Option<serde_json::Result<String>> + Send + 'static) -> Response {
    match tokio::task::spawn_blocking(page).await {
        Ok(Some(Ok(json))) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Ok(Some(Err(error))) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        Ok(None) => {
            (StatusCode::NOT_FOUND, "no such object; /debug/objects lists all objects\n").into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// Returns what a proxy may subscribe to. The query has the proxy's node id or `POD.NAMESPACE`, as istiod's page does.
async fn config_dump(State(pages): State<Arc<Pages>>, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let Some(proxy) = query.split('&').find_map(|part| part.strip_prefix("proxyID=")) else {
        return (StatusCode::BAD_REQUEST, "write ?proxyID=POD.NAMESPACE\n").into_response();
    };
    let proxy = proxy.to_owned();
    let Ok(making) = DUMPS.acquire().await else { return StatusCode::SERVICE_UNAVAILABLE.into_response() };
    let page = tokio::task::spawn_blocking(move || {
        let _making = making;
        whole_config_dump(&pages.publisher, &proxy).map(|dump| dump.map(|dump| dump.to_vec()))
    });
    let failed = |error: &dyn Display| {
        (StatusCode::INTERNAL_SERVER_ERROR, format!("the dump cannot be made: {error}\n")).into_response()
    };
    match page.await {
        Ok(Ok(Some(page))) => ([(header::CONTENT_TYPE, "application/x-protobuf")], page).into_response(),
        Ok(Ok(None)) => {
            (StatusCode::NOT_FOUND, "no such proxy is connected; /debug/syncz lists all proxies\n")
                .into_response()
        }
        Ok(Err(error)) => failed(&error),
        Err(error) => failed(&error),
    }
}

async fn debug(State(pages): State<Arc<Pages>>, Path(name): Path<String>) -> Response {
    match pages.json(&name) {
        Some(Ok(json)) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Some(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        None => (StatusCode::NOT_FOUND, "unknown page; / lists all pages\n").into_response(),
    }
}

/// The server starts after the configuration is read, so only the shutdown changes readiness.
async fn ready(State(pages): State<Arc<Pages>>) -> (StatusCode, &'static str) {
    if pages.shutdown.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n")
    } else {
        (StatusCode::OK, "ready\n")
    }
}

/// Starts a rotation of the root.
async fn rotate(State(pages): State<Arc<Pages>>) -> (StatusCode, String) {
    match pages.authority.rotate().await {
        Ok(()) => (StatusCode::OK, "rotation started; /debug/ca shows its step\n".to_owned()),
        Err(reason) => (StatusCode::CONFLICT, format!("{reason}\n")),
    }
}

async fn metrics(State(pages): State<Arc<Pages>>) -> impl IntoResponse {
    let dns_names = pages.dns_cache.conditions();
    let authority = Some(pages.authority.status());
    let gauges = Gauges { authority, dns_names, ..pages.publisher.gauges() };
    let text = pages.publisher.metrics.render(&gauges);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}
