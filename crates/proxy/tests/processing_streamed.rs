//! External processing of bodies that are forwarded at the same time, beside a real Envoy.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/either.rs"]
mod either;
#[path = "support/envoy.rs"]
mod envoy;
#[path = "support/files.rs"]
mod files;
#[path = "support/http2.rs"]
mod http2;
#[path = "support/processed.rs"]
mod processed;
#[path = "support/processor.rs"]
mod processor;
#[path = "support/program.rs"]
mod program;
mod support;

use bytes::Bytes;
use either::Either;
use http::{HeaderMap, HeaderValue, Response};
use processed::{ask, both, message, post, same_streamed};
use serde_json::{Value, json};
use support::{Client, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

const BOTH: &str = "STREAMED";

/// Time for which a server does not read: longer than the processor may take for an answer.
const STALL: std::time::Duration = std::time::Duration::from_secs(2);

fn mode(request: &str, response: &str) -> Value {
    json!({"processing_mode": {"request_body_mode": request, "response_body_mode": response}})
}

async fn client(proxy: &Either) -> Client {
    Client::new(TcpStream::connect(proxy.listener("l").await).await.unwrap())
}

#[tokio::test]
async fn chunks_are_changed() {
    let proxies = both(&mode(BOTH, BOTH)).await;
    let (head, got) = same_streamed(&proxies, &post("/change", "hello")).await;
    // The length of what the processor makes of the body is unknown.
    assert!(head.contains("transfer-encoding: chunked") && !head.contains("content-length"), "{head}");
    assert!(got.contains("HELLO") && got.contains("transfer-encoding: CHUNKED"), "{got}");
    let (_, got) = same_streamed(&proxies, &post("/a", "hello")).await;
    assert!(got.ends_with("hello") && !got.contains("content-length"), "{got}");
    let (_, got) = same_streamed(&proxies, &post("/clear", "hello")).await;
    assert!(got.is_empty(), "{got}");
    // Without a body there are no chunks.
    same_streamed(&proxies, &processed::get("/a")).await;
    let empty = "POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
    same_streamed(&proxies, empty).await;
}

#[tokio::test]
async fn larger_bodies_than_any_buffer_pass() {
    let proxies = both(&mode(BOTH, BOTH)).await;
    let body = "hello world ".repeat(300_000);
    for proxy in &proxies {
        let (_, got) = ask(proxy, &post("/a", &body)).await;
        assert!(got.ends_with(&body), "{} bytes", got.len());
    }
    let body = "x".repeat(3_000_000);
    for proxy in &proxies {
        let (_, got) = ask(proxy, &post("/change", &body)).await;
        let count = got.bytes().filter(|byte| *byte == b'X').count();
        assert!((3_000_000..3_000_100).contains(&count), "{count}");
    }
}

#[tokio::test]
async fn a_chunk_is_forwarded_before_the_next_arrives() {
    let upstream = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = files::cluster("direct", upstream.local_addr().unwrap(), false);
    let proxies = processed::both_at(&mode(BOTH, BOTH), &files::to("direct"), &[], &[own]).await;
    for proxy in &proxies {
        let mut client = client(proxy).await;
        client
            .send("POST /change HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
            .await;
        let (stream, _) = within(upstream.accept()).await.unwrap();
        let mut server = Client::new(stream);
        server.head().await;
        assert_eq!(server.until("ONE\r\n").await, "3\r\nONE\r\n");
        // The response begins before the request ends.
        server.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n").await;
        assert!(client.head().await.starts_with("HTTP/1.1 200"));
        assert_eq!(client.until("AB\r\n").await, "2\r\nAB\r\n");
        client.send("3\r\ntwo\r\n0\r\n\r\n").await;
        assert_eq!(server.until("TWO\r\n").await, "3\r\nTWO\r\n");
        assert_eq!(server.until("\r\n\r\n").await, "0\r\n\r\n");
        server.send("1\r\nc\r\n0\r\n\r\n").await;
        assert_eq!(client.until("\r\n\r\n").await, "1\r\nC\r\n0\r\n\r\n");
    }
}

#[tokio::test]
async fn a_receiver_that_stalls_does_not_make_the_processor_late() {
    let upstream = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = files::cluster("direct", upstream.local_addr().unwrap(), false);
    let config = files::with(mode(BOTH, "NONE"), &json!({"message_timeout": "3s"}));
    let proxies = processed::both_at(&config, &files::to("direct"), &[], &[own]).await;
    let request = post("/a", &"x".repeat(16_000_000));
    for (number, proxy) in proxies.iter().enumerate() {
        let mut client = client(proxy).await;
        let sent = async {
            client.send(&request).await;
        };
        let serve = async {
            let (mut stream, _) = within(upstream.accept()).await.unwrap();
            // The stall of a server that has no time for the body, longer than the timeout of a message.
            tokio::time::sleep(2 * STALL).await;
            let (mut got, mut block) = (0, vec![0; 1 << 20]);
            loop {
                let count = within(stream.read(&mut block)).await.unwrap();
                assert!(count > 0, "proxy {number}: the connection ended");
                got += block[..count].iter().filter(|byte| **byte == b'x').count();
                if block[..count].ends_with(b"0\r\n\r\n") {
                    break;
                }
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            got
        };
        let ((), got) = tokio::join!(sent, serve);
        assert!((16_000_000..16_000_100).contains(&got), "proxy {number}: {got} bytes");
        assert!(client.head().await.starts_with("HTTP/1.1 200"));
    }
}

/// Both proxies with two processors, of which the first gets the body of the request in chunks.
async fn two_processors() -> [Either; 2] {
    let first = files::with(
        mode(BOTH, "NONE"),
        &json!({"grpc_service": {"envoy_grpc": {"cluster_name": "processor"}}, "message_timeout": "0.5s"}),
    );
    let first = files::filter("http.ext_proc.v3.ExternalProcessor", &first);
    processed::both_with(&json!({}), &files::to("mirror"), &[first]).await
}

#[tokio::test]
async fn the_order_of_a_body_is_kept_when_a_processor_leaves() {
    for proxy in &two_processors().await {
        let mut client = client(proxy).await;
        let head = "POST /body-end-second-waits HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
        client.send(head).await;
        // A slow client. The first processor leaves with the first chunk, while the second is asked.
        for number in 10..30 {
            client.send(&format!("2\r\n{number}\r\n")).await;
            tokio::time::sleep(STALL / 40).await;
        }
        client.send("0\r\n\r\n").await;
        let (head, got) = message(&mut client).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        let expected: String = (10..30).map(|number| number.to_string()).collect();
        assert!(processed::whole_body(got.clone()).ends_with(&expected), "{got}");
    }
}

#[tokio::test]
async fn a_body_in_chunks_goes_on_while_the_next_processor_is_asked() {
    let proxies = two_processors().await;
    let body = "x".repeat(200_000);
    for proxy in &proxies {
        let (head, got) = ask(proxy, &post("/second-waits", &body)).await;
        assert!(head.starts_with("HTTP/1.1 200") && got.ends_with(&body), "{head} {} bytes", got.len());
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_while_the_processor_has_its_body() {
    let config = files::with(mode(BOTH, "NONE"), &json!({"message_timeout": "600s"}));
    let [_, proxy] = both(&config).await;
    let mut leaving = client(&proxy).await;
    leaving.send(&post("/body-silent", "hello")).await;
    let active = async |count: &str| {
        let line = format!(" {count}");
        within(async {
            loop {
                let page = proxy.page("/stats/prometheus").await;
                let mut lines =
                    page.lines().filter(|line| line.starts_with("envoy_http_downstream_rq_active{"));
                if lines.any(|found| found.contains("\"h\"") && found.ends_with(&line)) {
                    return;
                }
            }
        })
        .await;
    };
    active("1").await;
    drop(leaving);
    active("0").await;
}

#[tokio::test]
async fn metadata_of_each_chunk_may_change() {
    let [_, proxy] = both(&mode(BOTH, BOTH)).await;
    let body = "x".repeat(1_000_000);
    let (head, got) = ask(&proxy, &post("/metadata-of-chunks", &body)).await;
    assert!(head.starts_with("HTTP/1.1 200") && got.ends_with(&body), "{head} {} bytes", got.len());
    let (head, _) = ask(&proxy, &post("/metadata-grows", &body)).await;
    assert!(head.starts_with("HTTP/1.1 500"), "{head}");
}

#[tokio::test]
async fn failures_in_a_request_end_it_or_are_allowed() {
    let with = |more: Value| files::with(mode(BOTH, "NONE"), &more);
    let proxies = both(&with(json!({"message_timeout": "0.5s"}))).await;
    for (path, status) in [
        ("/body-fail", "500"),
        ("/body-silent", "504"),
        ("/body-immediate", "418"),
        ("/body-huge", "500"),
        ("/body-streamed", "500"),
    ] {
        for proxy in &proxies {
            // Envoy has no limit for the size of a chunk, and ignores one of the other mode.
            if ["/body-huge", "/body-streamed"].contains(&path) && matches!(proxy, Either::Envoy(_)) {
                continue;
            }
            let (head, _) = ask(proxy, &post(path, "hello")).await;
            assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{path} {head}");
        }
    }
    let proxies = both(&with(json!({"message_timeout": "0.5s", "failure_mode_allow": true}))).await;
    for path in ["/body-fail", "/body-silent", "/body-twice"] {
        let (head, got) = same_streamed(&proxies, &post(path, "hello")).await;
        assert!(head.starts_with("HTTP/1.1 200") && got.ends_with("hello"), "{path} {head} {got}");
    }
}

#[tokio::test]
async fn failures_after_the_head_of_the_response_end_the_connection() {
    let upstream = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = files::cluster("direct", upstream.local_addr().unwrap(), false);
    let config = files::with(mode("NONE", BOTH), &json!({"message_timeout": "0.5s"}));
    let proxies = processed::both_at(&config, &files::to("direct"), &[], &[own]).await;
    for path in ["/body-fail-response", "/body-silent-response", "/body-immediate-response"] {
        for proxy in &proxies {
            let mut client = client(proxy).await;
            client.send(&post(path, "hello")).await;
            let (stream, _) = within(upstream.accept()).await.unwrap();
            let mut server = Client::new(stream);
            server.message().await;
            server.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
            assert!(client.head().await.starts_with("HTTP/1.1 200"), "{path}");
            server.send("2\r\nab\r\n").await;
            assert_eq!(client.rest().await, "", "{path}");
        }
    }
}

#[tokio::test]
async fn a_processor_returns_a_body_of_its_own() {
    let mode = json!({
        "request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"
    });
    let proxies = both(&json!({"processing_mode": mode, "message_timeout": "0.5s"})).await;
    // With and without waiting for the whole body before the answer about the headers.
    for path in ["/a", "/whole"] {
        let (head, got) = same_streamed(&proxies, &post(path, "hello")).await;
        assert!(head.contains("x-response: 200") && !head.contains("content-length"), "{head}");
        assert!(got.contains("HELLO") && got.contains("x-request: END=FALSE"), "{got}");
    }
    same_streamed(&proxies, &processed::get("/a")).await;
    let body = "x".repeat(100_000);
    for proxy in &proxies {
        let (_, got) = ask(proxy, &post("/a", &body)).await;
        let count = got.bytes().filter(|byte| *byte == b'X').count();
        assert!((100_000..100_100).contains(&count), "{count}");
    }
    // A client that waits for the interim response gets it, although the processor waits for the body.
    let mut client = client(&proxies[1]).await;
    client.send("POST /whole HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n").await;
    assert!(client.head().await.starts_with("HTTP/1.1 100"));
    client.send("hello").await;
    let (head, body) = message(&mut client).await;
    assert!(head.starts_with("HTTP/1.1 200") && body.contains("HE\r\n3\r\nLLO"), "{head} {body}");
}

#[tokio::test]
async fn a_processor_of_its_own_body_keeps_the_order() {
    let mode = json!({"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"});
    let proxies = both(&json!({"processing_mode": mode})).await;
    for (path, status) in [("/lost", "500"), ("/immediate-late", "418"), ("/first", "500")] {
        let (head, _) = same_streamed(&proxies, &post(path, "hello")).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{path} {head}");
    }
    // The result must not end before the body: its rest would be read as the next request.
    let mut early = client(&proxies[1]).await;
    early.send("POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\nhello").await;
    let rest = early.rest().await;
    assert!(rest.starts_with("HTTP/1.1 500") && rest.matches("HTTP/1.1").count() == 1, "{rest}");
}

#[tokio::test]
async fn counters_are_those_of_envoy() {
    let proxies = both(&files::with(mode(BOTH, BOTH), &json!({"message_timeout": "0.5s"}))).await;
    for path in ["/a", "/body-fail", "/body-silent", "/body-immediate"] {
        same_streamed(&proxies, &post(path, "hello")).await;
    }
    let mut both = Vec::new();
    for proxy in &proxies {
        let page = proxy.page("/stats/prometheus").await;
        let lines = page.lines().filter(|line| line.starts_with("envoy_http_ext_proc_"));
        let mut found: Vec<_> = lines
            .filter_map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                let name = name.split('{').next()?.trim_start_matches("envoy_http_ext_proc_");
                // A processor has closed its call after the sidecar: the sidecar counts no such event.
                (value != "0" && name != "server_half_closed").then(|| format!("{name} {value}"))
            })
            .collect();
        found.sort();
        both.push(found);
    }
    assert_eq!(both[1], both[0]);
    assert!(both[1].iter().any(|line| line == "message_timeouts 1"), "{both:?}");
}

#[tokio::test]
async fn a_processor_may_only_observe() {
    let mode = files::with(mode(BOTH, BOTH), &json!({"observability_mode": true}));
    let proxies = both(&mode).await;
    for (number, proxy) in proxies.iter().enumerate() {
        let path = format!("/observed-{number}");
        let (head, got) = ask(proxy, &post(&path, "hello")).await;
        assert!(head.starts_with("HTTP/1.1 200") && got.ends_with("hello"), "{head} {got}");
        // The length does not change.
        assert!(!head.contains("chunked") && got.contains("content-length: 5"), "{head} {got}");
        let seen = within(async {
            loop {
                let arrived = processor::ARRIVED.notified();
                let seen: Vec<_> = {
                    let all = processor::OBSERVED.lock().unwrap();
                    all.iter().filter(|(of, _)| *of == path).map(|(_, seen)| seen.clone()).collect()
                };
                if seen.iter().any(|seen| seen.starts_with("ResponseBody") && seen.ends_with("hello")) {
                    return seen;
                }
                arrived.await;
            }
        });
        let mut seen = seen.await;
        // Envoy sends the end of a body on its own.
        seen.retain(|seen| !seen.ends_with(' '));
        assert_eq!(seen[..3], ["RequestHeaders", "RequestBody hello", "ResponseHeaders"], "{seen:?}");
    }
    // Its failure has no effect. In Envoy, it has one if it arrives before the response.
    let (head, _) = ask(&proxies[1], &post("/fail", "hello")).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
}

#[tokio::test]
async fn trailers_are_changed_with_and_without_the_body() {
    // Returns the body and the trailers.
    let upstream = http2::http2_server(|_, request, mut respond| async move {
        let (content, trailers) = http2::content(&mut request.into_body()).await;
        let mut stream = respond.send_response(Response::new(()), false).unwrap();
        stream.send_data(content.into(), false).unwrap();
        stream.send_trailers(trailers.unwrap()).unwrap();
    })
    .await;
    let own = [files::cluster("direct", upstream, true)];
    for (body, content) in [("NONE", "hello"), ("STREAMED", "HELLO"), ("FULL_DUPLEX_STREAMED", "HELLO")] {
        let mode = json!({
            "request_body_mode": body, "request_trailer_mode": "SEND",
            "response_body_mode": body, "response_trailer_mode": "SEND"
        });
        let config = json!({"processing_mode": mode});
        for proxy in &processed::both_at(&config, &files::to("direct"), &[], &own).await {
            let stream = TcpStream::connect(proxy.listener("l").await).await.unwrap();
            let mut requests = http2::client(stream).await;
            let (response, mut stream) =
                requests.send_request(http2::request("POST", "/change"), false).unwrap();
            stream.send_data(Bytes::from_static(b"hello"), false).unwrap();
            let mut trailers = HeaderMap::new();
            trailers.insert("x-own", HeaderValue::from_static("1"));
            stream.send_trailers(trailers).unwrap();
            let response = within(response).await.unwrap();
            assert!(response.headers().contains_key("x-response"), "{body}");
            let (got, trailers) = http2::content(&mut response.into_body()).await;
            assert_eq!(String::from_utf8(got).unwrap(), content, "{body}");
            // The request had one field; the processor has added one, and sees two in the response.
            let trailers = trailers.unwrap();
            assert!(trailers["x-own"] == "1" && trailers["x-trailers"] == "2", "{body} {trailers:?}");
        }
    }
}

#[tokio::test]
async fn a_processed_body_is_sent_again() {
    let upstream = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = files::cluster("direct", upstream.local_addr().unwrap(), false);
    let retry = json!({"retry_on": "5xx", "num_retries": 1});
    let routes = json!([{"match": {"prefix": "/"}, "route": {"cluster": "direct", "retry_policy": retry}}]);
    let proxies = processed::both_at(&mode(BOTH, "NONE"), &routes, &[], &[own]).await;
    for proxy in &proxies {
        let mut client = client(proxy).await;
        client.send(&post("/change", "hello")).await;
        for answer in ["503 No", "200 OK"] {
            let (stream, _) = within(upstream.accept()).await.unwrap();
            let mut server = Client::new(stream);
            server.head().await;
            assert!(server.until("0\r\n\r\n").await.contains("HELLO"), "{answer}");
            let head = format!("HTTP/1.1 {answer}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
            server.send(&head).await;
        }
        assert!(client.head().await.starts_with("HTTP/1.1 200"));
    }
}
