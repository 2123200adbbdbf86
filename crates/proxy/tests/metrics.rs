//! Changes of Istio's metrics by the filter's configuration.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/program.rs"]
mod program;
mod support;

use program::Program;
use support::{Client, within};
use tokio::net::TcpStream;

fn bootstrap(stats: &str) -> String {
    format!(
        r#"
node: {{id: a}}
static_resources:
  listeners:
  - name: http
    traffic_direction: OUTBOUND
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: h
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: h
          route_config:
            virtual_hosts:
            - name: v
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, direct_response: {{status: 200}}}}]
          http_filters:
          - name: istio.stats
            typed_config: {{"@type": type.googleapis.com/stats.PluginConfig, {stats}}}
          - name: router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  - name: tcp
    traffic_direction: OUTBOUND
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: istio.stats
        typed_config: {{"@type": type.googleapis.com/stats.PluginConfig, {stats}}}
      - name: t
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t
          cluster: none
"#
    )
}

async fn ask(program: &Program, method: &str) {
    let mut client = Client::new(TcpStream::connect(program.listener("http").await).await.unwrap());
    client.send(&format!("{method} /a HTTP/1.1\r\nhost: a\r\n\r\n")).await;
    assert!(client.head().await.starts_with("HTTP/1.1 200 "));
}

/// Waits until a metric has this number of lines and returns them.
async fn until(program: &Program, metric: &str, count: usize) -> Vec<String> {
    within(async {
        loop {
            let page = program.page("GET", "/stats/prometheus").await;
            let lines = page.lines().filter(|line| line.starts_with(metric)).map(str::to_owned);
            let lines: Vec<_> = lines.collect();
            if lines.len() == count {
                return lines;
            }
            tokio::task::yield_now().await;
        }
    })
    .await
}

#[tokio::test]
async fn telemetry_settings_change_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(
        folder.path(),
        &bootstrap(
            "metrics: [\
             {name: requests_total, dimensions: {request_method: request.method, missing: request.referer}, \
              tags_to_remove: [response_flags]}, \
             {name: request_bytes, drop: true}, \
             {name: tcp_connections_opened_total, dimensions: {port: string(destination.port)}}]",
        ),
    )
    .await;
    for method in ["GET", "PUT", "GET"] {
        ask(&program, method).await;
    }
    let requests = until(&program, "istio_requests_total{", 2).await;
    assert!(requests[0].ends_with(",missing=\"unknown\",request_method=\"GET\"} 2"), "{requests:?}");
    assert!(requests[1].ends_with(",missing=\"unknown\",request_method=\"PUT\"} 1"), "{requests:?}");
    assert!(requests.iter().all(|line| !line.contains("response_flags=")), "{requests:?}");
    let durations = until(&program, "istio_request_duration_milliseconds_count{", 1).await;
    assert!(durations[0].contains("response_flags=\"-\"") && durations[0].ends_with(" 3"), "{durations:?}");
    until(&program, "istio_request_bytes", 0).await;

    let address = program.listener("tcp").await;
    let _client = TcpStream::connect(address).await.unwrap();
    let opened = until(&program, "istio_tcp_connections_opened_total{", 1).await;
    assert!(opened[0].contains(&format!(",port=\"{}\"}} 1", address.port())), "{opened:?}");
    let closed = until(&program, "istio_tcp_connections_closed_total{", 1).await;
    assert!(!closed[0].contains("port=\""), "{closed:?}");
}

#[tokio::test]
async fn metrics_of_removed_workloads_expire() {
    let folder = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap("rotation_interval: 1s, graceful_deletion_interval: 0.2s");
    let program = Program::start(folder.path(), &bootstrap).await;
    ask(&program, "GET").await;
    until(&program, "istio_requests_total{", 1).await;
    until(&program, "istio_requests_total{", 0).await;
    assert_eq!(until(&program, "skysail_metric_series_expired_total{} 1", 1).await.len(), 1);
    ask(&program, "GET").await;
    let requests = until(&program, "istio_requests_total{", 1).await;
    assert!(requests[0].ends_with("} 1"), "{requests:?}");
}

#[tokio::test]
async fn the_number_of_series_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap("metrics: [{name: requests_total, dimensions: {method: request.method}}]");
    let mut program = Program::with(folder.path(), &bootstrap, &["--max-metric-series", "3"]).await;
    // One series for the metrics without methods, and two of the four methods.
    for method in ["A", "B", "C", "A", "D"] {
        ask(&program, method).await;
    }
    until(&program, "skysail_metric_series_dropped_total{} 2", 1).await;
    let requests = until(&program, "istio_requests_total{", 2).await;
    assert!(
        requests[0].ends_with("method=\"A\"} 2") && requests[1].ends_with("method=\"B\"} 1"),
        "{requests:?}"
    );
    program.until("the limit of 3 metric series is reached").await;
}
