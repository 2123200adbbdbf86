//! Port 15020, `/stats/prometheus`: the metrics of the proxy, followed by those of the workload beside it, as Istio's
//! agent merges them. [`VARIABLE`] names the page of the workload.
//!
//! Both pages are read while the client reads, so the memory of a scrape does not depend on their length.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use axum::{
    Router,
    body::{Body, Bytes},
    extract::{RawQuery, State},
    http::{HeaderMap, HeaderValue, Request, StatusCode, header},
    response::{IntoResponse as _, Response},
    routing::get,
};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use skysail_core::names::{ADMIN_PORT, HEALTH_PORT, MERGED_METRICS_PORT, METRICS_PORT};
use tokio::{sync::Semaphore, time::timeout};
use tokio_stream::StreamExt as _;

use crate::discovery::remote::connect_tcp;

/// Variable with the annotations of the pod that describe the page of the workload, in JSON. Istio's injector sets it.
const VARIABLE: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";
/// Path of the metrics of proxies.
const PROXY_PATH: &str = "/stats/prometheus";
/// Host of the pages.
const LOCAL: &str = "localhost";
/// Header in which Prometheus sends its timeout, in seconds.
const SCRAPE_TIMEOUT: &str = "x-prometheus-scrape-timeout-seconds";
/// Timeout of a client that states none. Source: the default `scrape_timeout` of Prometheus.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum timeout.
const MAX_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum size of a page's head in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Maximum number of scrapes in progress.
const SCRAPES: usize = 8;
/// Ports of the proxy in a mesh.
const OWN_PORTS: [u16; 4] = [ADMIN_PORT, HEALTH_PORT, MERGED_METRICS_PORT, METRICS_PORT];
/// Formats that can follow the metrics of the proxy.
const ACCEPTED: HeaderValue = HeaderValue::from_static(
    "text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.1",
);
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// Page with the metrics of the workload.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WorkloadPage {
    port: u16,
    path: String,
}

/// Annotations `prometheus.io/…` as Istio's injector writes them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ScrapeAnnotations {
    scrape: String,
    path: String,
    port: String,
}

impl WorkloadPage {
    /// Reads the page from the environment. `None`: the workload has no metrics.
    fn of_environment() -> anyhow::Result<Option<Self>> {
        match std::env::var(VARIABLE) {
            Ok(text) => Self::parse(&text).with_context(|| format!("variable {VARIABLE}")),
            Err(_) => Ok(None),
        }
    }

    fn parse(text: &str) -> anyhow::Result<Option<Self>> {
        let ScrapeAnnotations { scrape, path, port } = serde_json::from_str(text)?;
        if scrape == "false" {
            return Ok(None);
        }
        // Istio's defaults.
        let port = if port.is_empty() { "80" } else { &port };
        let port = port.parse().with_context(|| format!("{port:?} is not a port"))?;
        ensure!(!OWN_PORTS.contains(&port), "port {port} is one of the proxy, not of the workload");
        let path = if path.is_empty() { "/metrics".to_owned() } else { path };
        let slash = if path.starts_with('/') { "" } else { "/" };
        Ok(Some(Self { port, path: format!("{slash}{path}") }))
    }
}

/// Part of the merged page.
#[derive(Clone, Copy, Debug)]
enum MetricsPart {
    Proxy,
    Workload,
}

/// Pages that are merged, and what became of the scrapes.
struct MergedMetrics {
    /// Port of the proxy's own metrics.
    proxy: u16,
    workload: Option<WorkloadPage>,
    /// `SO_MARK` of sockets.
    mark: Option<u32>,
    /// Scrapes that may begin.
    free: Arc<Semaphore>,
    scrapes: AtomicU64,
    failures_of_proxy: AtomicU64,
    failures_of_workload: AtomicU64,
}

/// Returns the pages. `proxy` is the port of the proxy's own metrics, `mark` the `SO_MARK` of sockets.
pub(super) fn router(proxy: u16, mark: Option<u32>) -> Router {
    let workload = WorkloadPage::of_environment().unwrap_or_else(|error| {
        tracing::error!("the metrics of the workload are not merged: {error:#}");
        None
    });
    let merged = Arc::new(MergedMetrics::new(proxy, workload, mark));
    // The second is the path that scrapers use by default.
    Router::new().route(PROXY_PATH, get(page)).route("/metrics", get(page)).with_state(merged)
}

impl MergedMetrics {
    fn new(proxy: u16, workload: Option<WorkloadPage>, mark: Option<u32>) -> Self {
        Self {
            proxy,
            workload,
            mark,
            free: Arc::new(Semaphore::new(SCRAPES)),
            scrapes: AtomicU64::default(),
            failures_of_proxy: AtomicU64::default(),
            failures_of_workload: AtomicU64::default(),
        }
    }

    /// Returns the figures of the scrapes, under the names of Istio's agent.
    fn figures(&self) -> String {
        format!(
            "# TYPE istio_agent_scrapes_total counter\n\
             istio_agent_scrapes_total {}\n\
             # TYPE istio_agent_scrape_failures_total counter\n\
             istio_agent_scrape_failures_total{{type=\"application\"}} {}\n\
             istio_agent_scrape_failures_total{{type=\"envoy\"}} {}\n",
            self.scrapes.load(Relaxed),
            self.failures_of_workload.load(Relaxed),
            self.failures_of_proxy.load(Relaxed),
        )
    }

    /// Returns the result of a step of a part. Counts and logs its failure.
    fn succeeded<T>(&self, part: MetricsPart, result: anyhow::Result<T>) -> Option<T> {
        let failures = match part {
            MetricsPart::Proxy => &self.failures_of_proxy,
            MetricsPart::Workload => &self.failures_of_workload,
        };
        result
            .inspect_err(|error| {
                failures.fetch_add(1, Relaxed);
                tracing::warn!(
                    "cannot read the metrics of the {}: {error:#}",
                    format!("{part:?}").to_lowercase()
                );
            })
            .ok()
    }

    /// Requests a page, and returns the response once its head is read.
    async fn get(&self, port: u16, path: &str, client: &HeaderMap) -> anyhow::Result<Response<Incoming>> {
        let reading = self.request(port, path, client);
        timeout(limit(client), reading).await.context("no answer in time")?
    }

    async fn request(&self, port: u16, path: &str, client: &HeaderMap) -> anyhow::Result<Response<Incoming>> {
        let stream = connect_tcp(LOCAL, port, self.mark).await?;
        let (mut sender, connection) =
            http1::Builder::new().max_buf_size(MAX_HEAD).handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = Request::get(path)
            .header(header::HOST, format!("{LOCAL}:{port}"))
            .header(header::ACCEPT, ACCEPTED)
            .body(Body::empty())?;
        for name in [SCRAPE_TIMEOUT, "user-agent"] {
            if let (Some(value), Ok(name)) = (client.get(name), header::HeaderName::try_from(name)) {
                request.headers_mut().insert(name, value.clone());
            }
        }
        let response = sender.send_request(request).await?;
        ensure!(response.status() == StatusCode::OK, "the response has status {}", response.status());
        Ok(response)
    }
}

/// Returns the timeout of a page's head: most of the client's timeout, so that the other page still arrives in time.
fn limit(client: &HeaderMap) -> Duration {
    let seconds = client.get(SCRAPE_TIMEOUT).and_then(|value| value.to_str().ok()?.parse().ok());
    let stated = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    stated.map_or(DEFAULT_TIMEOUT, |stated| stated.min(MAX_TIMEOUT)).mul_f64(0.8)
}

async fn page(
    State(merged): State<Arc<MergedMetrics>>,
    RawQuery(query): RawQuery,
    client: HeaderMap,
) -> Response {
    let Ok(permit) = Arc::clone(&merged.free).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many scrapes in progress\n").into_response();
    };
    merged.scrapes.fetch_add(1, Relaxed);
    let path = query.map_or_else(|| PROXY_PATH.to_owned(), |query| format!("{PROXY_PATH}?{query}"));
    let of_workload = async {
        match &merged.workload {
            Some(page) => Some(merged.get(page.port, &page.path, &client).await),
            None => None,
        }
    };
    let (of_proxy, of_workload) = tokio::join!(merged.get(merged.proxy, &path, &client), of_workload);
    let of_proxy = merged.succeeded(MetricsPart::Proxy, of_proxy);
    let of_workload = of_workload.and_then(|read| merged.succeeded(MetricsPart::Workload, read));
    let is_open_metrics =
        |value: &&HeaderValue| value.as_bytes().starts_with(b"application/openmetrics-text");
    let kind = of_workload.as_ref().and_then(|response| response.headers().get(header::CONTENT_TYPE));
    let kind = kind.filter(is_open_metrics).cloned().unwrap_or(TEXT);
    // A part that fails ends, so that the others are complete.
    let stream = |part: MetricsPart, response: Option<Response<Incoming>>| {
        let body = response.map_or_else(Body::empty, |response| Body::new(response.into_body()));
        let merged = Arc::clone(&merged);
        let complete = move |piece: Result<Bytes, axum::Error>| {
            merged.succeeded(part, piece.map_err(anyhow::Error::from)).map(Ok::<_, Infallible>)
        };
        body.into_data_stream().map_while(complete)
    };
    // The workload's part is the last, because the end of an OpenMetrics page is marked.
    let pieces = tokio_stream::once(Ok(Bytes::from(merged.figures())))
        .chain(stream(MetricsPart::Proxy, of_proxy))
        .chain(stream(MetricsPart::Workload, of_workload))
        .map(move |piece| {
            let _in_progress = &permit;
            piece
        });
    ([(header::CONTENT_TYPE, kind)], Body::from_stream(pieces)).into_response()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::body::to_bytes;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    /// Serves this text to every connection.
    async fn serve_text(text: &'static str) -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                // One read: the request has no body and is short.
                assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", text.len());
                stream.write_all((head + text).as_bytes()).await.unwrap();
            }
        });
        port
    }

    async fn scrape(merged: &Arc<MergedMetrics>) -> Response {
        page(State(Arc::clone(merged)), RawQuery(None), HeaderMap::new()).await
    }

    /// A client that does not read its response keeps a scrape in progress.
    #[tokio::test]
    async fn scrapes_in_progress_are_limited() {
        let workload =
            WorkloadPage { port: serve_text("of_workload 1\n").await, path: "/metrics".to_owned() };
        let merged = Arc::new(MergedMetrics::new(serve_text("of_proxy 1\n").await, Some(workload), None));
        let mut unread = Vec::new();
        for _ in 0..SCRAPES {
            unread.push(scrape(&merged).await);
        }
        assert_eq!(scrape(&merged).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        let body = to_bytes(unread.pop().unwrap().into_body(), 10_000).await.unwrap();
        assert!(body.ends_with(b"\nof_proxy 1\nof_workload 1\n"), "{body:?}");
        assert_eq!(scrape(&merged).await.status(), StatusCode::OK);
    }

    #[test]
    fn the_page_of_the_workload_has_defaults() {
        let page = |port, path: &str| Some(WorkloadPage { port, path: path.to_owned() });
        for (text, expected) in [
            (r#"{"scrape": "", "path": "", "port": ""}"#, page(80, "/metrics")),
            (r#"{"scrape": "true", "path": "stats", "port": "8080"}"#, page(8080, "/stats")),
            (r#"{"scrape": "false", "port": "8080"}"#, None),
        ] {
            assert_eq!(WorkloadPage::parse(text).unwrap(), expected, "{text}");
        }
        let error = WorkloadPage::parse(r#"{"port": "http"}"#).unwrap_err();
        assert_eq!(error.to_string(), "\"http\" is not a port");
        assert!(WorkloadPage::parse(r#"{"port": "15020"}"#).is_err(), "it would read itself");
    }

    #[test]
    fn the_client_states_the_timeout() {
        let of = |text: &'static str| {
            limit(&HeaderMap::from_iter([(SCRAPE_TIMEOUT.parse().unwrap(), HeaderValue::from_static(text))]))
        };
        assert_eq!(of("2.5"), Duration::from_secs(2));
        assert_eq!(of("1e9"), Duration::from_secs(48));
        for invalid in ["-1", "NaN", "inf", "soon"] {
            assert_eq!(of(invalid), Duration::from_secs(8), "{invalid}");
        }
    }
}
