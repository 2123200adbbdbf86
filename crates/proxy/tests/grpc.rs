//! What a sidecar does for gRPC beyond passing it on: deadlines, and clients that speak gRPC-Web.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/program.rs"]
mod program;
mod support;

use std::net::SocketAddr;

use program::Program;
use support::{Client, server};
use tokio::net::TcpStream;

/// All requests go to one server of HTTP/1.1 (what is tested depends on no version), with these settings of the route,
/// through these filters.
async fn start(
    folder: &tempfile::TempDir,
    server: SocketAddr,
    route: &str,
    filters: &str,
) -> (Program, SocketAddr) {
    let port = server.port();
    let bootstrap = format!(
        r#"
node: {{id: a}}
static_resources:
  listeners:
  - name: l
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: l
          route_config: {{virtual_hosts: [{{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: c{route}}}}}]}}]}}
          http_filters:{filters}
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: c
    type: STATIC
    load_assignment:
      cluster_name: c
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}}}]}}]
"#
    );
    let program = Program::start(folder.path(), &bootstrap).await;
    let address = program.listener("l").await;
    (program, address)
}

/// A server that hears, and never answers.
async fn silent() -> SocketAddr {
    server(|_, mut client| async move {
        client.rest().await;
    })
    .await
}

#[tokio::test]
async fn deadlines_of_clients_are_heeded() {
    let folder = tempfile::tempdir().unwrap();
    let server = silent().await;
    for (route, waits, answer) in [
        // As Istio has it: no limit but the client's.
        (
            ", timeout: 0s, max_grpc_timeout: 0s",
            "50m",
            "grpc-message: upstream request timeout\r\n",
        ),
        (", timeout: 0s, max_grpc_timeout: 0.05s", "1H", "grpc-status: 14\r\n"),
        (", timeout: 100s, max_grpc_timeout: 0.05s", "", "grpc-status: 14\r\n"),
        (", timeout: 0s, max_stream_duration: {max_stream_duration: 0.05s}", "", "grpc-status: 4\r\n"),
        (
            ", timeout: 0s, max_stream_duration: {max_stream_duration: 100s, grpc_timeout_header_max: 0s}",
            "50m",
            "grpc-message: downstream duration timeout\r\n",
        ),
        (", timeout: 0s, max_stream_duration: {grpc_timeout_header_max: 0.05s}", "1H", "grpc-status: 4\r\n"),
    ] {
        let (_program, address) = start(&folder, server, route, "").await;
        let mut client = Client::new(TcpStream::connect(address).await.unwrap());
        let waits = if waits.is_empty() { String::new() } else { format!("grpc-timeout: {waits}\r\n") };
        let head = format!("POST /a/b HTTP/1.1\r\nHost: a\r\nContent-Type: application/grpc\r\n{waits}");
        client.send(&format!("{head}Content-Length: 0\r\n\r\n")).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains(answer), "{route}: {head}");
    }
}

#[tokio::test]
async fn servers_are_told_how_long_is_waited() {
    let folder = tempfile::tempdir().unwrap();
    for (route, expected) in [
        (", timeout: 0s, max_grpc_timeout: 5s", "5000m"),
        (", timeout: 0s, max_grpc_timeout: 0s, grpc_timeout_offset: 1s", "9000m"),
        (", timeout: 20s", "10S"),
    ] {
        let (_program, address) = start(&folder, support::echo().await, route, "").await;
        let mut client = Client::new(TcpStream::connect(address).await.unwrap());
        client.send("POST /a/b HTTP/1.1\r\nHost: a\r\nContent-Type: application/grpc\r\ngrpc-timeout: 10S\r\nContent-Length: 0\r\n\r\n").await;
        let (_, body) = client.message().await;
        assert!(body.contains(&format!("\r\ngrpc-timeout: {expected}\r\n")), "{route}: {body}");
    }
}
