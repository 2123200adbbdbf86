//! A sidecar program with an access log, for the tests of its limits.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderName, Request, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{net::TcpStream, sync::watch};

use crate::{
    files::{self, filter, listener, to, with},
    program::Program,
    support::{Client, server, within},
};

/// A sidecar with a listener `l` and an access log of status, flags and details.
pub(crate) struct Setup {
    pub(crate) program: Program,
    folder: TempDir,
}

/// Name of the access log file.
pub(crate) const LOG: &str = "access.log";

impl Setup {
    /// Starts HTTP with these clusters; the first gets all paths that do not begin with another's name.
    pub(crate) async fn http(options: &Value, clusters: &[Value]) -> Self {
        let mut routes: Vec<_> = clusters[1..]
            .iter()
            .map(|cluster| {
                let name = cluster["name"].as_str().unwrap();
                json!({"match": {"prefix": format!("/{name}")}, "route": {"cluster": name}})
            })
            .collect();
        routes.extend(to(clusters[0]["name"].as_str().unwrap()).as_array().unwrap().clone());
        Self::start(clusters, |log| files::http(&[], &routes.into(), &with(log, options))).await
    }

    /// Starts TCP with this cluster.
    pub(crate) async fn tcp(options: &Value, cluster: Value) -> Self {
        let clusters = [cluster];
        Self::start(&clusters, |log| {
            let proxy = with(json!({"stat_prefix": "t", "cluster": clusters[0]["name"]}), options);
            filter("network.tcp_proxy.v3.TcpProxy", &with(proxy, &log))
        })
        .await
    }

    pub(crate) async fn start(clusters: &[Value], terminal: impl FnOnce(Value) -> Value) -> Self {
        let folder = TempDir::new().unwrap();
        let log = folder.path().join(LOG);
        let file = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog";
        let line = "%PROTOCOL% %RESPONSE_CODE% %RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS%\n";
        let to = json!({"access_log": [{"name": "file", "typed_config": {
            "@type": file, "path": log, "log_format": {"text_format_source": {"inline_string": line}}
        }}]});
        Self::of(folder, &[listener("l", &[terminal(to)])], clusters).await
    }

    pub(crate) async fn of(folder: TempDir, listeners: &[Value], clusters: &[Value]) -> Self {
        let program = Program::start(folder.path(), &files::bootstrap(listeners, clusters)).await;
        Self { program, folder }
    }

    pub(crate) async fn stream(&self) -> TcpStream {
        TcpStream::connect(self.program.listener("l").await).await.unwrap()
    }

    pub(crate) async fn client(&self) -> Client {
        Client::new(self.stream().await)
    }

    pub(crate) async fn http2(&self) -> SendRequest<Bytes> {
        let (requests, connection) = within(h2::client::handshake(self.stream().await)).await.unwrap();
        tokio::spawn(connection);
        requests
    }

    /// Waits until a metric has this value.
    pub(crate) async fn counts(&self, metric: &str, value: u64) {
        let (begin, end) = (format!("{metric}{{"), format!("}} {value}"));
        within(async {
            loop {
                let page = self.program.page("GET", "/stats/prometheus").await;
                let mut lines = page.lines();
                if lines.any(|line| line.starts_with(&begin) && line.ends_with(&end)) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    /// Waits for these access log lines, and no others before them.
    pub(crate) async fn logs(&self, lines: &[&str]) {
        within(async {
            loop {
                let log = std::fs::read_to_string(self.folder.path().join(LOG)).unwrap_or_default();
                if log.lines().count() >= lines.len() {
                    return assert_eq!(log.lines().collect::<Vec<_>>(), lines);
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

/// HTTP/2 client preface with an empty SETTINGS frame.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
pub(crate) const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// Returns a request with this number of fields besides `host`, one of them of length `long`.
pub(crate) fn get(path: &str, fields: usize, long: usize) -> String {
    let fields: String =
        (0..fields).map(|n| format!("x{n}: {}\r\n", "v".repeat(if n == 0 { long } else { 1 }))).collect();
    format!("GET {path} HTTP/1.1\r\nhost: a\r\n{fields}\r\n")
}

/// Returns the same request for HTTP/2.
pub(crate) fn request(path: &str, fields: usize, long: usize) -> Request<()> {
    let mut request = Request::get(format!("http://a{path}")).body(()).unwrap();
    for n in 0..fields {
        let name = HeaderName::try_from(format!("x{n}")).unwrap();
        let value = "v".repeat(if n == 0 { long } else { 1 });
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    request
}

pub(crate) async fn status(requests: &mut SendRequest<Bytes>, request: Request<()>) -> StatusCode {
    *requests = within(requests.clone().ready()).await.unwrap();
    let (answer, _) = requests.send_request(request, true).unwrap();
    within(answer).await.unwrap().status()
}

/// Starts a server that holds its responses until it is released.
pub(crate) async fn held() -> (watch::Sender<bool>, SocketAddr) {
    let (release, released) = watch::channel(false);
    let at = server(move |_, mut client| {
        let mut released = released.clone();
        async move {
            while let Some((head, _)) = client.message_if_any().await {
                if head.starts_with("GET /held") {
                    released.wait_for(|released| *released).await.unwrap();
                }
                client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            }
        }
    });
    (release, at.await)
}
