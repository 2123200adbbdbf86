//! Failures that count for outlier detection.

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

use std::net::SocketAddr;

use files::{bootstrap, cluster, http, listener, to};
use program::Program;
use serde_json::{Value, json};
use support::{Client, server};
use tokio::net::TcpStream;

/// Starts a server that always answers with this status.
async fn answering(status: u16) -> SocketAddr {
    server(move |_, mut client| async move {
        while client.message_if_any().await.is_some() {
            client.send(&format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n")).await;
        }
    })
    .await
}

/// Returns a port that refuses connections.
fn refusing_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Sends 20 requests in round robin to a good server and this one; returns the failures, and an accessor of the
/// ejection metrics.
async fn failures(bad: SocketAddr, outlier: Value) -> (u32, impl Fn(&str) -> u64) {
    failures_by(bad, outlier, json!({})).await
}

/// The same with options of HTTP.
async fn failures_by(bad: SocketAddr, outlier: Value, options: Value) -> (u32, impl Fn(&str) -> u64) {
    let mut endpoints = cluster("c", answering(200).await, false);
    let other = cluster("c", bad, false)["load_assignment"]["endpoints"][0]["lb_endpoints"][0].take();
    endpoints["load_assignment"]["endpoints"][0]["lb_endpoints"].as_array_mut().unwrap().push(other);
    endpoints["outlier_detection"] = outlier;
    endpoints["typed_extension_protocol_options"] = options;
    let manager = http(&[], &to("c"), &json!({}));
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), &bootstrap(&[listener("l", &[manager])], &[endpoints])).await;
    let mut client = Client::new(TcpStream::connect(program.listener("l").await).await.unwrap());
    let mut failures = 0;
    for _ in 0..20 {
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        failures += u32::from(!client.message().await.0.starts_with("HTTP/1.1 200 "));
    }
    let metrics = program.page("GET", "/stats/prometheus").await;
    let value = move |name: &str| {
        let line = format!("envoy_cluster_outlier_detection_ejections_{name}{{cluster_name=\"c\"}} ");
        metrics.lines().find_map(|text| text.strip_prefix(&line)).map_or(0, |value| value.parse().unwrap())
    };
    (failures, value)
}

#[tokio::test]
async fn gateway_failures_are_counted_separately() {
    let outlier = json!({
        "consecutive_gateway_failure": 2,
        "enforcing_consecutive_gateway_failure": 100,
        "enforcing_consecutive_5xx": 0,
        "max_ejection_percent": 50
    });
    let (failed, metric) = failures(answering(502).await, outlier.clone()).await;
    assert_eq!((failed, metric("active"), metric("enforced_consecutive_gateway_failure")), (2, 1, 1));
    let (failed, metric) = failures(answering(500).await, outlier).await;
    assert_eq!((failed, metric("active"), metric("enforced_total")), (10, 0, 0));
}

#[tokio::test]
async fn connect_failures_are_counted_separately_if_configured() {
    let outlier = json!({
        "split_external_local_origin_errors": true,
        "consecutive_local_origin_failure": 2,
        "enforcing_consecutive_local_origin_failure": 100,
        "enforcing_consecutive_5xx": 0,
        "max_ejection_percent": 50
    });
    let (failed, metric) = failures(refusing_address(), outlier.clone()).await;
    assert_eq!((failed, metric("active"), metric("enforced_consecutive_local_origin_failure")), (2, 1, 1));
    let (failed, metric) = failures(answering(500).await, outlier).await;
    assert_eq!((failed, metric("active"), metric("enforced_total")), (10, 0, 0));
    // Otherwise they count as 503.
    let outlier = json!({"consecutive_5xx": 2, "max_ejection_percent": 50});
    let (failed, metric) = failures(refusing_address(), outlier).await;
    assert_eq!((failed, metric("active"), metric("enforced_consecutive_5xx")), (2, 1, 1));
}

#[tokio::test]
async fn ejections_do_not_exceed_the_maximum_percentage() {
    let outlier = json!({"consecutive_5xx": 2, "max_ejection_percent": 0});
    let (failed, metric) = failures(answering(500).await, outlier).await;
    assert_eq!((failed, metric("active"), metric("enforced_total")), (10, 0, 0));
    assert!(metric("overflow") > 0 && metric("detected_consecutive_5xx") > 0);
    let outlier = json!({"consecutive_5xx": 2, "max_ejection_percent": 0, "always_eject_one_host": true});
    let (failed, metric) = failures(answering(500).await, outlier).await;
    assert_eq!((failed, metric("active"), metric("overflow")), (2, 1, 0));
}

#[tokio::test]
async fn statuses_of_a_matcher_are_the_errors() {
    let options = |pattern: Value| {
        let status = json!({"name": ":status", "string_match": pattern});
        json!({"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http_protocol_options": {}},
            "outlier_detection": {"error_matcher": {"or_match": {"rules": [
                {"http_response_headers_match": {"headers": [status]}},
                {"http_response_headers_match": {"headers": [{"name": ":status", "string_match": {"exact": "999"}}]}},
            ]}}},
        }})
    };
    let outlier = json!({"consecutive_5xx": 2, "max_ejection_percent": 50});
    let too_many = options(json!({"exact": "429"}));
    let (failed, metric) = failures_by(answering(429).await, outlier.clone(), too_many.clone()).await;
    assert_eq!((failed, metric("active"), metric("enforced_consecutive_5xx")), (2, 1, 1));
    let (failed, metric) = failures_by(answering(500).await, outlier.clone(), too_many).await;
    assert_eq!((failed, metric("active"), metric("enforced_total")), (10, 0, 0));
    let (failed, metric) = failures_by(answering(404).await, outlier, options(json!({"prefix": "4"}))).await;
    assert_eq!((failed, metric("active")), (2, 1));
}
