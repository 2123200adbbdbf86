//! Limits on what peers can grow, and on durations. Each test checks the response, the metric, the access log,
//! and the connection.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/program.rs"]
mod program;
mod support;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use files::{address, cluster, filter, listener, to, with};
use h2::client::SendRequest;
use http::{HeaderName, Request, Response, StatusCode};
use program::Program;
use serde_json::{Value, json};
use support::{Client, echo, server, within};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// A sidecar with a listener `l` and an access log of status, flags and details.
struct Setup {
    program: Program,
    folder: TempDir,
}

/// Name of the access log file.
const LOG: &str = "access.log";

impl Setup {
    /// Starts HTTP with these clusters; the first gets all paths that do not begin with another's name.
    async fn http(options: &Value, clusters: &[Value]) -> Self {
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
    async fn tcp(options: &Value, cluster: Value) -> Self {
        let clusters = [cluster];
        Self::start(&clusters, |log| {
            let proxy = with(json!({"stat_prefix": "t", "cluster": clusters[0]["name"]}), options);
            filter("network.tcp_proxy.v3.TcpProxy", &with(proxy, &log))
        })
        .await
    }

    async fn start(clusters: &[Value], terminal: impl FnOnce(Value) -> Value) -> Self {
        let folder = TempDir::new().unwrap();
        let log = folder.path().join(LOG);
        let file = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog";
        let line = "%PROTOCOL% %RESPONSE_CODE% %RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS%\n";
        let to = json!({"access_log": [{"name": "file", "typed_config": {
            "@type": file, "path": log, "log_format": {"text_format_source": {"inline_string": line}}
        }}]});
        Self::of(folder, &[listener("l", &[terminal(to)])], clusters).await
    }

    async fn of(folder: TempDir, listeners: &[Value], clusters: &[Value]) -> Self {
        let program = Program::start(folder.path(), &files::bootstrap(listeners, clusters)).await;
        Self { program, folder }
    }

    async fn stream(&self) -> TcpStream {
        TcpStream::connect(self.program.listener("l").await).await.unwrap()
    }

    async fn client(&self) -> Client {
        Client::new(self.stream().await)
    }

    async fn http2(&self) -> SendRequest<Bytes> {
        let (requests, connection) = within(h2::client::handshake(self.stream().await)).await.unwrap();
        tokio::spawn(connection);
        requests
    }

    /// Waits until a metric has this value.
    async fn counts(&self, metric: &str, value: u64) {
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
    async fn logs(&self, lines: &[&str]) {
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
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// Returns a request with this number of fields besides `host`, one of them of length `long`.
fn get(path: &str, fields: usize, long: usize) -> String {
    let fields: String =
        (0..fields).map(|n| format!("x{n}: {}\r\n", "v".repeat(if n == 0 { long } else { 1 }))).collect();
    format!("GET {path} HTTP/1.1\r\nhost: a\r\n{fields}\r\n")
}

/// Returns the same request for HTTP/2.
fn request(path: &str, fields: usize, long: usize) -> Request<()> {
    let mut request = Request::get(format!("http://a{path}")).body(()).unwrap();
    for n in 0..fields {
        let name = HeaderName::try_from(format!("x{n}")).unwrap();
        let value = "v".repeat(if n == 0 { long } else { 1 });
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    request
}

async fn status(requests: &mut SendRequest<Bytes>, request: Request<()>) -> StatusCode {
    *requests = within(requests.clone().ready()).await.unwrap();
    let (answer, _) = requests.send_request(request, true).unwrap();
    within(answer).await.unwrap().status()
}

#[tokio::test]
async fn request_heads_are_limited() {
    let options =
        json!({"max_request_headers_kb": 8, "common_http_protocol_options": {"max_headers_count": 5}});
    let mut setup = Setup::http(&options, &[cluster("c", echo().await, false)]).await;
    for (fields, long, allowed) in [(4, 1, true), (5, 1, false), (1, 8000, true), (1, 8200, false)] {
        let mut client = setup.client().await;
        client.send(&get("/", fields, long)).await;
        let (head, body) = client.message().await;
        if allowed {
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
            continue;
        }
        assert!(head.starts_with("HTTP/1.1 431 ") && head.contains("\r\nconnection: close\r\n"), "{head}");
        assert_eq!(body, "Request Header Fields Too Large");
        assert_eq!(client.rest().await, "");
    }
    // In HTTP/2 the host counts too. The connection continues.
    let mut requests = setup.http2().await;
    for (fields, long, allowed) in
        [(1, 1, true), (2, 1, false), (1, 7900, true), (1, 8200, false), (1, 1, true)]
    {
        let expected = if allowed { 200 } else { 431 };
        assert_eq!(status(&mut requests, request("/", fields, long)).await, expected, "{fields} {long}");
    }
    // A refused request need not be complete.
    let (answer, _body) = requests.send_request(request("/", 2, 1), false).unwrap();
    assert_eq!(within(answer).await.unwrap().status(), 431);
    setup
        .logs(&[
            "HTTP/1.1 200 - via_upstream",
            "HTTP/1.1 431 DPE http1.too_many_headers",
            "HTTP/1.1 200 - via_upstream",
            "HTTP/1.1 431 DPE http1.headers_too_large",
            "HTTP/2 200 - via_upstream",
            "HTTP/2 431 DPE http2.too_many_headers",
            "HTTP/2 200 - via_upstream",
            "HTTP/2 431 DPE http2.header_list_size_too_large",
            "HTTP/2 200 - via_upstream",
            "HTTP/2 431 DPE http2.too_many_headers",
        ])
        .await;
    setup.counts("skysail_http1_too_many_headers", 1).await;
    setup.counts("skysail_http1_headers_too_large", 1).await;
    setup.counts("envoy_http_downstream_cx_protocol_error", 2).await;
    setup.counts("envoy_http2_header_overflow", 2).await;
    setup.counts("envoy_http2_header_list_size_too_large", 1).await;
    // Logged once a minute, for both versions together.
    let received = setup.program.until("more fields than max_headers_count").await;
    assert!(received.contains("h, client 127.0.0.1:"), "{received}");
    setup.program.until("larger than max_request_headers_kb").await;
    let rest = setup.program.quit().await;
    assert!(!rest.contains("max_headers_count") && !rest.contains("max_request_headers_kb"), "{rest}");
}

/// Starts an HTTP/2 server whose response heads depend on the path.
async fn http2_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    let mut answer = Response::new(());
                    for (name, value) in fields(request.uri().path()) {
                        let name = HeaderName::try_from(name).unwrap();
                        answer.headers_mut().insert(name, value.parse().unwrap());
                    }
                    let _ = respond.send_response(answer, true);
                }
            });
        }
    });
    at
}

/// Returns the fields of a response: six, one of 9,000 bytes, or one.
fn fields(path: &str) -> Vec<(String, String)> {
    match path.rsplit('/').next() {
        Some("many") => (0..6).map(|n| (format!("x{n}"), "v".to_owned())).collect(),
        Some("large") => vec![("x".to_owned(), "v".repeat(9000))],
        _ => vec![("x".to_owned(), "v".to_owned())],
    }
}

#[tokio::test]
async fn response_heads_are_limited() {
    let http1 = server(|_, mut client| async move {
        while let Some((head, _)) = client.message_if_any().await {
            let path = head.split(' ').nth(1).unwrap();
            let fields: String =
                fields(path).iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
            client.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n{fields}\r\n")).await;
        }
    });
    let limited = |mut cluster: Value| {
        let options = &mut cluster["typed_extension_protocol_options"];
        options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["common_http_protocol_options"] =
            json!({"max_response_headers_kb": 8, "max_headers_count": 5});
        cluster
    };
    let clusters =
        [cluster("h1", http1.await, false), cluster("h2", http2_server().await, true)].map(limited);
    let mut setup = Setup::http(&json!({}), &clusters).await;
    let mut client = setup.client().await;
    for path in ["/", "/many", "/large", "/", "/h2/", "/h2/many", "/h2/large", "/h2/"] {
        client.send(&get(path, 0, 0)).await;
        let (head, body) = client.message().await;
        if path.ends_with('/') {
            assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {head}");
        } else {
            assert!(head.starts_with("HTTP/1.1 502 "), "{path}: {head}");
            assert!(body.ends_with("reset reason: protocol error"), "{path}: {body}");
        }
    }
    let (good, bad) = (
        "HTTP/1.1 200 - via_upstream",
        "HTTP/1.1 502 UPE upstream_reset_before_response_started{protocol_error}",
    );
    setup.logs(&[good, bad, bad, good, good, bad, bad, good]).await;
    let page = setup.program.page("GET", "/stats/prometheus").await;
    for cluster in ["h1", "h2"] {
        for metric in ["skysail_cluster_upstream_head_too_large", "envoy_cluster_upstream_cx_protocol_error"]
        {
            let line = format!("{metric}{{cluster_name=\"{cluster}\"}} 2\n");
            assert!(page.contains(&line), "no {line} in {page}");
        }
    }
    // An error in an HTTP/2 response affects only its stream.
    assert!(page.contains("envoy_cluster_upstream_cx_total{cluster_name=\"h2\"} 1\n"), "{page}");
    setup.program.until("cluster h1: the head of a response is larger than max_response_headers_kb").await;
}

#[tokio::test]
async fn heads_have_a_timeout() {
    for (limit, logged, body, metric, words) in [
        (
            "request_headers_timeout",
            "- request_header_timeout",
            "request header timeout",
            "envoy_http_downstream_rq_header_timeout",
            "did not arrive within request_headers_timeout",
        ),
        (
            "stream_idle_timeout",
            "SI stream_idle_timeout",
            "stream timeout",
            "envoy_http_downstream_rq_idle_timeout",
            "a request made no progress within its idle timeout",
        ),
        (
            "request_timeout",
            "- request_overall_timeout",
            "request timeout",
            "envoy_http_downstream_rq_timeout",
            "did not arrive within request_timeout",
        ),
    ] {
        let mut setup = Setup::http(&json!({limit: "0.2s"}), &[cluster("c", echo().await, false)]).await;
        let mut client = setup.client().await;
        client.send("GET / HTTP/1.1\r\nhost: a\r\n").await;
        let answer = client.rest().await;
        assert!(answer.starts_with("HTTP/1.1 408 ") && answer.ends_with(body), "{answer}");
        setup.counts(metric, 1).await;
        setup.program.until(words).await;
        // In HTTP/2 the connection ends too, because no other head could be read.
        let mut stream = setup.stream().await;
        stream.write_all(&[PREFACE, b"\0\0\x01\x01\x01\0\0\0\x01\x82"].concat()).await.unwrap();
        within(stream.read_to_end(&mut Vec::new())).await.unwrap();
        setup.logs(&[&format!("HTTP/1.1 408 {logged}"), &format!("HTTP/2 0 {logged}")]).await;
        setup.counts(metric, 2).await;
    }
}

/// Starts a server that holds its responses until it is released.
async fn held() -> (watch::Sender<bool>, SocketAddr) {
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

#[tokio::test]
async fn a_cluster_limits_concurrent_requests() {
    let (release, at) = held().await;
    let breakers = json!({"circuit_breakers": {"thresholds": [{"max_requests": 1}]}});
    let mut setup = Setup::http(&json!({}), &[with(cluster("c", at, false), &breakers)]).await;
    let mut first = setup.client().await;
    first.send(&get("/held", 0, 0)).await;
    setup.counts("envoy_cluster_upstream_rq_active", 1).await;
    let mut second = setup.client().await;
    second.send(GET).await;
    let (head, body) = second.message().await;
    assert!(head.starts_with("HTTP/1.1 503 ") && body.ends_with("reset reason: overflow"), "{head}{body}");
    assert!(head.contains("x-envoy-overloaded: true\r\n"), "{head}");
    let mut requests = setup.http2().await;
    assert_eq!(status(&mut requests, request("/", 0, 0)).await, 503);
    setup.counts("envoy_cluster_upstream_rq_active_overflow", 2).await;
    setup.program.until("cluster c: it has max_requests requests").await;
    release.send(true).unwrap();
    assert!(first.head().await.starts_with("HTTP/1.1 200 "));
    // Both connections continue.
    setup.counts("envoy_cluster_upstream_rq_active", 0).await;
    second.send(GET).await;
    assert!(second.head().await.starts_with("HTTP/1.1 200 "));
    setup.counts("envoy_cluster_upstream_rq_active", 0).await;
    assert_eq!(status(&mut requests, request("/", 0, 0)).await, 200);
    let (good, full) = ("200 - via_upstream", "503 UO upstream_reset_before_response_started{overflow}");
    let lines = [("1.1", full), ("2", full), ("1.1", good), ("1.1", good), ("2", good)]
        .map(|(version, line)| format!("HTTP/{version} {line}"));
    setup.logs(&lines.each_ref().map(String::as_str)).await;
}

#[tokio::test]
async fn streams_beyond_the_limit_are_counted() {
    let (release, at) = held().await;
    let options = json!({"http2_protocol_options": {"max_concurrent_streams": 1}});
    let mut setup = Setup::http(&options, &[cluster("c", at, false)]).await;
    // A client that has not read the maximum of concurrent streams.
    let mut stream = setup.stream().await;
    let mut begin = PREFACE.to_vec();
    for id in [1, 3, 5] {
        let block = b"\x82\x86\x04\x05/held\x41\x01a";
        begin.extend([0, 0, block.len() as u8, 1, 5, 0, 0, 0, id]);
        begin.extend(block);
    }
    stream.write_all(&begin).await.unwrap();
    setup.counts("envoy_http2_stream_refused_errors", 2).await;
    setup.program.until("a client opened more streams than max_concurrent_streams").await;
    release.send(true).unwrap();
    setup.logs(&["HTTP/2 200 - via_upstream"]).await;
}

#[tokio::test]
async fn connections_limit_their_number_of_requests() {
    let most = json!({"max_requests_per_connection": 2});
    let mut far = cluster("c", echo().await, false);
    far["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["common_http_protocol_options"] =
        most.clone();
    let setup = Setup::http(&json!({"common_http_protocol_options": most}), &[far]).await;
    let mut client = setup.client().await;
    client.send(&GET.repeat(3)).await;
    let (first, _) = client.message().await;
    assert!(!first.contains("connection: close"), "{first}");
    let (second, _) = client.message().await;
    assert!(second.contains("\r\nconnection: close\r\n"), "{second}");
    assert_eq!(client.rest().await, "");
    setup.counts("envoy_http_downstream_cx_max_requests_reached", 1).await;
    setup.counts("envoy_cluster_upstream_cx_max_requests", 1).await;
    let (mut requests, connection) = within(h2::client::handshake(setup.stream().await)).await.unwrap();
    let connection = tokio::spawn(connection);
    for _ in 0..2 {
        assert_eq!(status(&mut requests, request("/", 0, 0)).await, 200);
    }
    // It closes without a reset, although the client would continue.
    within(connection).await.unwrap().unwrap();
    setup.counts("envoy_http_downstream_cx_max_requests_reached", 2).await;
    setup.counts("envoy_cluster_upstream_cx_total", 2).await;
}

#[tokio::test]
async fn connect_attempts_have_a_timeout() {
    // A listener with a full queue: a further connection gets no answer.
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    full.listen(0).unwrap();
    let at = full.local_addr().unwrap().as_socket().unwrap();
    let _taken = TcpStream::connect(at).await.unwrap();
    let far = with(cluster("c", at, false), &json!({"connect_timeout": "0.2s"}));
    let setup = Setup::http(&json!({}), &[far]).await;
    let mut client = setup.client().await;
    client.send(GET).await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    assert!(body.ends_with("reset reason: connection timeout"), "{body}");
    setup.logs(&["HTTP/1.1 503 UF upstream_reset_before_response_started{connection_timeout}"]).await;
    setup.counts("envoy_cluster_upstream_cx_connect_timeout", 1).await;
    setup.counts("envoy_cluster_upstream_cx_connect_fail", 1).await;
}

#[tokio::test]
async fn requests_have_a_timeout() {
    let setup = Setup::http(&json!({"request_timeout": "0.2s"}), &[cluster("c", echo().await, false)]).await;
    let mut client = setup.client().await;
    client.send("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhalf").await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 408 ") && head.contains("\r\nconnection: close\r\n"), "{head}");
    assert_eq!(body, "request timeout");
    assert_eq!(client.rest().await, "");
    let mut requests = setup.http2().await;
    let post = Request::post("http://a/").body(()).unwrap();
    let (answer, _body) = requests.send_request(post, false).unwrap();
    assert_eq!(within(answer).await.unwrap().status(), 408);
    assert_eq!(status(&mut requests, request("/", 0, 0)).await, 200);
    setup.counts("envoy_http_downstream_rq_timeout", 2).await;
    let late = "408 - request_overall_timeout";
    let lines =
        [format!("HTTP/1.1 {late}"), format!("HTTP/2 {late}"), "HTTP/2 200 - via_upstream".to_owned()];
    setup.logs(&lines.each_ref().map(String::as_str)).await;
}

#[tokio::test]
async fn streams_have_a_maximum_duration() {
    let (_release, at) = held().await;
    let route = json!({"cluster": "c", "max_stream_duration": {"max_stream_duration": "0.2s"}});
    let routes = json!([{"match": {"prefix": "/"}, "route": route}]);
    let clusters = [cluster("c", at, false)];
    let mut setup = Setup::start(&clusters, |log| files::http(&[], &routes, &log)).await;
    for (request, status) in [
        (get("/held", 0, 0), 504),
        ("GET /held HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nhalf".to_owned(), 408),
    ] {
        let mut client = setup.client().await;
        client.send(&request).await;
        let (head, body) = client.message().await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
        assert_eq!(body, "downstream duration timeout");
    }
    setup.counts("envoy_http_downstream_rq_max_duration_reached", 2).await;
    setup.program.until("a request took longer than max_stream_duration").await;
    setup.logs(&["HTTP/1.1 504 - max_duration_timeout", "HTTP/1.1 408 - max_duration_timeout"]).await;
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let setup = Setup::tcp(&json!({"idle_timeout": "0.2s"}), cluster("c", echo().await, false)).await;
    assert_eq!(setup.client().await.rest().await, "");
    setup.counts("envoy_tcp_idle_timeout", 1).await;

    // Upstream and downstream.
    let mut far = cluster("c", echo().await, false);
    let options = json!({"idle_timeout": "0.2s"});
    far["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["common_http_protocol_options"] =
        options.clone();
    let setup = Setup::http(&json!({}), std::slice::from_ref(&far)).await;
    let mut client = setup.client().await;
    for served in 1..=2 {
        client.send(GET).await;
        assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
        setup.counts("envoy_cluster_upstream_cx_idle_timeout", served).await;
        setup.counts("envoy_cluster_upstream_cx_active", 0).await;
        setup.counts("envoy_cluster_upstream_cx_total", served).await;
    }
    let setup = Setup::http(&json!({"common_http_protocol_options": options}), &[far]).await;
    assert_eq!(setup.client().await.rest().await, "");
    setup.counts("envoy_http_downstream_cx_idle_timeout", 1).await;
}

#[tokio::test]
async fn a_try_that_times_out_is_retried() {
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let silent = server(move |_, mut client| {
        let count = count.clone();
        async move {
            client.message().await;
            count.fetch_add(1, Relaxed);
            client.rest().await;
        }
    });
    let mut far = cluster("c", silent.await, false);
    let endpoints = &mut far["load_assignment"]["endpoints"][0]["lb_endpoints"];
    let second = json!({"endpoint": {"address": address(echo().await)}});
    endpoints.as_array_mut().unwrap().push(second);
    let route = json!({"cluster": "c", "retry_policy": {
        "retry_on": "gateway-error",
        "num_retries": 2,
        "per_try_timeout": "0.2s",
        "host_selection_retry_max_attempts": 5,
        "retry_host_predicate": [{
            "name": "previous",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
            }
        }]
    }});
    let routes = json!([{"match": {"prefix": "/"}, "route": route}]);
    let setup = Setup::start(&[far], |log| files::http(&[], &routes, &log)).await;
    // One of two requests, or both, reach the silent server first.
    let mut client = setup.client().await;
    for _ in 0..2 {
        client.send(GET).await;
        assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
    }
    setup.logs(&["HTTP/1.1 200 - via_upstream"; 2]).await;
    let asked = asked.load(Relaxed);
    assert!(asked > 0);
    setup.counts("envoy_cluster_upstream_rq_per_try_timeout", asked).await;
    setup.counts("envoy_cluster_upstream_rq_retry", asked).await;
    setup.counts("envoy_cluster_upstream_rq_total", 2 + asked).await;
    setup.counts("envoy_cluster_upstream_rq_timeout", 0).await;
}

#[tokio::test]
async fn a_disconnected_client_does_not_wait_for_a_connection() {
    let breakers = json!({"circuit_breakers": {"thresholds": [
        {"max_connections": 1, "max_pending_requests": 1}
    ]}});
    let far = with(cluster("c", echo().await, false), &breakers);
    let mut setup = Setup::tcp(&json!({}), far).await;
    let mut first = setup.client().await;
    first.send(GET).await;
    first.message().await;
    // Each waits, and makes room for the next when it disconnects.
    for waiting in 1..=3 {
        let gone = setup.client().await;
        setup.counts("envoy_cluster_upstream_cx_overflow", waiting).await;
        drop(gone);
        setup.logs(&vec!["- 0 DC downstream_remote_disconnect"; waiting as usize]).await;
    }
    setup.program.until("cluster c: it has max_connections connections").await;
    let mut patient = setup.client().await;
    patient.send(GET).await;
    setup.counts("envoy_cluster_upstream_cx_overflow", 4).await;
    assert_eq!(setup.client().await.rest().await, "");
    setup.counts("envoy_cluster_upstream_rq_pending_overflow", 1).await;
    setup.program.until("max_pending_requests requests wait for a connection").await;
    drop(first);
    assert!(patient.message().await.0.starts_with("HTTP/1.1 200 "));

    // Waiting is limited by the timeout, even if the connection in use never ends.
    let to = |options| {
        let proxy = with(json!({"stat_prefix": "t", "cluster": "c"}), &options);
        filter("network.tcp_proxy.v3.TcpProxy", &proxy)
    };
    let short = to(json!({"max_downstream_connection_duration": "0.2s"}));
    let listeners = [listener("stay", &[to(json!({}))]), listener("l", &[short])];
    let far = with(cluster("c", echo().await, false), &breakers);
    let setup = Setup::of(TempDir::new().unwrap(), &listeners, &[far]).await;
    let mut first = Client::new(TcpStream::connect(setup.program.listener("stay").await).await.unwrap());
    first.send(GET).await;
    first.message().await;
    assert_eq!(setup.client().await.rest().await, "");
    setup.counts("envoy_tcp_max_downstream_connection_duration", 1).await;
    first.send(GET).await;
    first.message().await;
}
