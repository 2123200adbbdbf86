//! Limits on what peers can grow. Each test checks the response, the metric, the access log,
//! and the connection.

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

use std::{net::SocketAddr, time::Duration};

use files::{cluster, with};
use http::{HeaderName, Request, Response};
use limited::{GET, PREFACE, Setup, get, held, request, status};
use serde_json::{Value, json};
use support::{echo, server, within};
use tokio::{io::AsyncWriteExt as _, net::TcpListener};

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

#[tokio::test]
async fn names_with_underscores_are_refused_or_removed() {
    // A server that refuses such a name.
    let at = server(|_, mut client| async move {
        while let Some((head, _)) = client.message_if_any().await {
            let status = if head.contains("x_own") { "500 Unexpected" } else { "200 OK" };
            client.send(&format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n")).await;
        }
    })
    .await;
    let start = |action: &'static str| async move {
        let options = json!({"common_http_protocol_options": {"headers_with_underscores_action": action}});
        Setup::http(&options, &[cluster("c", at, false)]).await
    };
    let (named, plain) =
        ("GET / HTTP/1.1\r\nhost: a\r\nx_own: 1\r\n\r\n", "GET / HTTP/1.1\r\nhost: a\r\n\r\n");
    let with_name = || Request::get("http://a/").header("x_own", "1").body(()).unwrap();
    for (action, status) in [("ALLOW", 500), ("DROP_HEADER", 200)] {
        let setup = start(action).await;
        let mut client = setup.client().await;
        client.send(named).await;
        let (head, _) = client.message().await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{action}: {head}");
        let answer = setup.http2().await.send_request(with_name(), true).unwrap().0;
        assert_eq!(within(answer).await.unwrap().status(), status, "{action}");
    }
    let setup = start("REJECT_REQUEST").await;
    let mut client = setup.client().await;
    client.send(plain).await;
    assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
    client.send(named).await;
    let (head, _) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 400 ") && head.contains("\r\nconnection: close\r\n"), "{head}");
    assert_eq!(client.rest().await, "");
    let mut requests = setup.http2().await;
    let answer = requests.send_request(with_name(), true).unwrap().0;
    let refused = within(answer).await.unwrap_err();
    assert!(refused.is_reset(), "{refused}");
    assert_eq!(status(&mut requests, request("/", 0, 0)).await, 200, "the connection continues");
    setup
        .logs(&[
            "HTTP/1.1 200 - via_upstream",
            "HTTP/1.1 400 DPE http1.unexpected_underscore",
            "HTTP/2 0 DPE http2.unexpected_underscore",
            "HTTP/2 200 - via_upstream",
        ])
        .await;
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
    let max = json!({"max_requests_per_connection": 2});
    let mut far = cluster("c", echo().await, false);
    far["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["common_http_protocol_options"] =
        max.clone();
    let setup = Setup::http(&json!({"common_http_protocol_options": max}), &[far]).await;
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

/// The settings of connections that are too old at their first request, and may send it.
fn too_old() -> Value {
    json!({"common_http_protocol_options": {"max_connection_duration": "0.000001s"}})
}

#[tokio::test]
async fn a_connection_that_is_too_old_ends_with_its_next_request() {
    let setup = Setup::http(&too_old(), &[cluster("c", echo().await, false)]).await;
    let mut client = setup.client().await;
    client.send(GET).await;
    let (answer, _) = client.message().await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("\r\nconnection: close\r\n"), "{answer}");
    assert_eq!(client.rest().await, "");
    setup.counts("envoy_http_downstream_cx_max_duration_reached", 1).await;
    // HTTP/2 ends after a GOAWAY, without a reset.
    let (_requests, connection) = within(h2::client::handshake(setup.stream().await)).await.unwrap();
    within(tokio::spawn(connection)).await.unwrap().unwrap();
    setup.counts("envoy_http_downstream_cx_max_duration_reached", 2).await;
}

#[tokio::test]
async fn a_connection_that_becomes_too_old_during_a_request_is_counted() {
    let options = json!({"common_http_protocol_options": {"max_connection_duration": "0.5s"}});
    let slow = server(|_, mut client| async move {
        client.head().await;
        // Longer than the limit.
        tokio::time::sleep(Duration::from_secs(1)).await;
        client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    });
    let setup = Setup::http(&options, &[cluster("c", slow.await, false)]).await;
    let mut client = setup.client().await;
    client.send(GET).await;
    assert!(client.rest().await.contains("\r\nconnection: close\r\n"));
    setup.counts("envoy_http_downstream_cx_max_duration_reached", 1).await;
}

#[tokio::test]
async fn a_connection_that_is_too_old_ends_without_a_request() {
    let mut options = too_old();
    options["drain_timeout"] = json!("0.01s");
    let setup = Setup::http(&options, &[cluster("c", echo().await, false)]).await;
    let mut client = setup.client().await;
    assert_eq!(client.rest().await, "");
    setup.counts("envoy_http_downstream_cx_max_duration_reached", 1).await;
}

#[tokio::test]
async fn responses_have_the_request_id_where_configured() {
    let options = json!({"always_set_request_id_in_response": true, "generate_request_id": false});
    let setup = Setup::http(&options, &[cluster("c", echo().await, false)]).await;
    let mut client = setup.client().await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\nx-request-id: abc\r\n\r\n").await;
    let (answer, _) = client.message().await;
    assert!(answer.contains("\r\nx-request-id: abc\r\n"), "{answer}");
    client.send(GET).await;
    let (answer, _) = client.message().await;
    assert!(!answer.contains("x-request-id"), "{answer}");
}
