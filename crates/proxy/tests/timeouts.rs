//! Timeouts of heads, connection attempts, requests, tries and idle connections. Each test checks the
//! response, the metric, the access log, and the connection.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/limited.rs"]
mod limited;
#[path = "support/program.rs"]
mod program;
mod support;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use files::{address, cluster, filter, listener, with};
use http::Request;
use limited::{GET, PREFACE, Setup, get, held, request, status};
use serde_json::json;
use support::{Client, echo, server, within};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
};

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
    // A server that answers after the whole request.
    let at = server(|_, mut client| async move {
        while let Some((head, _)) = client.message_if_any().await {
            if head.contains("transfer-encoding: chunked") {
                client.until("0\r\n\r\n").await;
            }
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        }
    })
    .await;
    let setup = Setup::http(&json!({"request_timeout": "0.2s"}), &[cluster("c", at, false)]).await;
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

/// That of the connection manager applies to routes without their own.
#[tokio::test]
async fn connection_managers_limit_the_duration_of_streams() {
    let (_release, at) = held().await;
    let zero =
        json!({"cluster": "c", "timeout": "0.6s", "max_stream_duration": {"max_stream_duration": "0s"}});
    let routes = json!([
        {"match": {"prefix": "/held/unlimited"}, "route": zero},
        {"match": {"prefix": "/"}, "route": {"cluster": "c"}},
    ]);
    let options = json!({"common_http_protocol_options": {"max_stream_duration": "0.2s"}});
    let clusters = [cluster("c", at, false)];
    let setup = Setup::start(&clusters, |log| files::http(&[], &routes, &files::with(log, &options))).await;
    for (path, text) in
        [("/held", "downstream duration timeout"), ("/held/unlimited", "upstream request timeout")]
    {
        let mut client = setup.client().await;
        client.send(&get(path, 0, 0)).await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 504 "), "{head}");
        assert_eq!(body, text, "{path}");
    }
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

/// The workers look for idle connections once a second, far more rarely than these requests are sent.
#[tokio::test]
async fn a_connection_that_reached_the_idle_timeout_serves_no_request() {
    const TIMEOUT: Duration = Duration::from_millis(1);
    let behind = Setup::http(&json!({}), &[cluster("c", echo().await, false)]).await;
    let at = behind.program.listener("l").await;
    for http2 in [false, true] {
        let mut far = cluster("c", at, http2);
        far["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["common_http_protocol_options"] =
            json!({"idle_timeout": "0.001s"});
        let setup = Setup::http(&json!({}), &[far]).await;
        let mut client = setup.client().await;
        for served in 1..=20 {
            client.send(GET).await;
            assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
            setup.counts("envoy_cluster_upstream_cx_total", served).await;
            tokio::time::sleep(TIMEOUT).await;
        }
    }
}

#[tokio::test]
async fn a_try_that_times_out_is_retried() {
    let attempts = Arc::new(AtomicU64::new(0));
    let count = attempts.clone();
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
    let attempts = attempts.load(Relaxed);
    assert!(attempts > 0);
    setup.counts("envoy_cluster_upstream_rq_per_try_timeout", attempts).await;
    setup.counts("envoy_cluster_upstream_rq_retry", attempts).await;
    setup.counts("envoy_cluster_upstream_rq_total", 2 + attempts).await;
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
    // Each client waits, and frees its place for the next one when it disconnects.
    for waiting in 1..=3 {
        let closing = setup.client().await;
        setup.counts("envoy_cluster_upstream_cx_overflow", waiting).await;
        drop(closing);
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

/// The response's head arrives before the request, which then takes longer than the idle timeout.
#[tokio::test]
async fn a_request_that_is_still_sent_is_not_idle() {
    const TIMEOUT: Duration = Duration::from_secs(3);
    let (arrived, mut arrivals) = mpsc::unbounded_channel();
    let at = server(move |_, mut client| {
        let arrived = arrived.clone();
        async move {
            client.head().await;
            client.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
            while client.until("\r\n").await != "0\r\n" {
                client.until("\r\n").await;
                arrived.send(()).unwrap();
            }
            client.send("3\r\nend\r\n0\r\n\r\n").await;
        }
    });
    let setup = Setup::http(&json!({"stream_idle_timeout": "3s"}), &[cluster("c", at.await, false)]).await;
    let mut client = setup.client().await;
    client.send("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n").await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let start = Instant::now();
    while start.elapsed() < TIMEOUT * 4 / 3 {
        client.send("1\r\nx\r\n").await;
        within(arrivals.recv()).await.unwrap();
    }
    client.send("0\r\n\r\n").await;
    client.until("3\r\nend\r\n0\r\n\r\n").await;
    setup.logs(&["HTTP/1.1 200 - via_upstream"]).await;
}

#[tokio::test]
async fn the_first_bytes_of_a_connection_have_a_timeout() {
    for (kind, words) in [
        (
            "proxy_protocol.v3.ProxyProtocol",
            "the PROXY header of a connection did not arrive within listener_filters_timeout",
        ),
        (
            "tls_inspector.v3.TlsInspector",
            "the protocol of a connection was not detected within listener_filters_timeout",
        ),
    ] {
        let to = filter("network.tcp_proxy.v3.TcpProxy", &json!({"stat_prefix": "t", "cluster": "c"}));
        let first = filter(&format!("listener.{kind}"), &json!({}));
        let limits = json!({"listener_filters_timeout": "0.2s", "listener_filters": [first]});
        let listeners = [with(listener("l", &[to]), &limits)];
        let clusters = [cluster("c", echo().await, false)];
        let mut setup = Setup::of(TempDir::new().unwrap(), &listeners, &clusters).await;
        assert_eq!(setup.client().await.rest().await, "");
        setup.program.until(words).await;
    }
}
