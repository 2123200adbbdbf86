//! PROXY protocol, downstream and upstream: the client's address comes from the header, and the next proxy
//! receives it.

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
use support::{Client, echo};
use tokio::{io::AsyncWriteExt as _, net::TcpStream};

/// One proxy behind another. `plain` accepts everything but version 2, `behind` adds the client's address;
/// `before` and `bytes` send both versions.
fn bootstrap(server: SocketAddr, behind: SocketAddr) -> String {
    let http = |name: &str, filter: &str, remote: bool, routes: &str| {
        format!(
            r#"
  - name: {name}
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    listener_filters:
    - name: envoy.filters.listener.proxy_protocol
      typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol{filter}}}
    - name: envoy.filters.listener.http_inspector
      typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.listener.http_inspector.v3.HttpInspector}}
    filter_chains:
    - filter_chain_match: {{application_protocols: [http/1.1]}}
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: {name}
          use_remote_address: {remote}
          route_config: {{virtual_hosts: [{{name: all, domains: ["*"], routes: [{routes}]}}]}}
          http_filters:
          - name: envoy.filters.http.rbac
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC
              rules:
                policies: {{all: {{permissions: [{{any: true}}], principals: [{{direct_remote_ip: {{address_prefix: 127.0.0.1, prefix_len: 32}}}}]}}}}
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
"#
        )
    };
    let cluster = |name: &str, to: SocketAddr, transport: &str| {
        format!(
            r#"
  - name: {name}
    type: STATIC
    {transport}
    load_assignment:
      cluster_name: {name}
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}}}]}}]
"#,
            port = to.port()
        )
    };
    let received = |version: &str| {
        format!(
            r#"transport_socket:
      name: envoy.transport_sockets.upstream_proxy_protocol
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.proxy_protocol.v3.ProxyProtocolUpstreamTransport
        config: {{version: {version}}}
        transport_socket:
          name: envoy.transport_sockets.raw_buffer
          typed_config: {{"@type": type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer}}"#
        )
    };
    let listeners = [
        http("behind", "", true, "{match: {prefix: /}, route: {cluster: server}}"),
        http(
            "plain",
            ", allow_requests_without_proxy_protocol: true, disallowed_versions: [V2]",
            true,
            "{match: {prefix: /}, route: {cluster: server}}",
        ),
        http(
            "before",
            "",
            false,
            "{match: {prefix: /1}, route: {cluster: v1}}, {match: {prefix: /2}, route: {cluster: v2}}",
        ),
    ];
    let clusters = [
        cluster("server", server, ""),
        cluster("v1", behind, &received("V1")),
        cluster("v2", behind, &received("V2")),
    ];
    let bytes = r#"
  - name: bytes
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    listener_filters:
    - name: envoy.filters.listener.proxy_protocol
      typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol}
    filter_chains:
    - filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: bytes
          cluster: v2
"#;
    let (listeners, clusters) = (listeners.concat(), clusters.concat());
    format!("node: {{id: a}}\nstatic_resources:\n  listeners:{listeners}{bytes}\n  clusters:{clusters}")
}

const V1: &[u8] = b"PROXY TCP4 1.2.3.4 5.6.7.8 1000 80\r\n";
const V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\x04\x03\x02\x01\x05\x06\x07\x08\0\x01\0\x50";
/// Header of a proxy's own connection (LOCAL).
const LOCAL: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";

/// Connects and sends these bytes first.
async fn connect(address: SocketAddr, first: &[u8]) -> Client {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(first).await.unwrap();
    Client::new(stream)
}

/// Returns the client address that the server receives.
async fn client(client: &mut Client, path: &str) -> String {
    client.send(&format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
    let (head, body) = client.message().await;
    let found = body.lines().find_map(|line| line.strip_prefix("x-envoy-external-address: "));
    assert!(found.is_some(), "{head}{body}");
    found.unwrap_or_default().to_owned()
}

#[tokio::test]
async fn the_client_address_comes_from_the_proxy_header() {
    let folder = tempfile::tempdir().unwrap();
    let server = echo().await;
    let program = Program::start(folder.path(), &bootstrap(server, server)).await;
    let (behind, plain) = (program.listener("behind").await, program.listener("plain").await);
    for (address, first, expected) in [
        (behind, V1, "1.2.3.4"),
        (behind, V2, "4.3.2.1"),
        (behind, LOCAL, "127.0.0.1"),
        (plain, V1, "1.2.3.4"),
        (plain, b"", "127.0.0.1"),
    ] {
        let mut connection = connect(address, first).await;
        for _ in 0..2 {
            assert_eq!(client(&mut connection, "/").await, expected, "{}", first.escape_ascii());
        }
    }
    for (address, first) in [
        (behind, &b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..]),
        (behind, b"PROXY TCP4 1.2.3.4\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"),
        (plain, &[V2, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"].concat()),
    ] {
        let answer = connect(address, first).await.rest().await;
        assert_eq!(answer, "", "{}", first.escape_ascii());
    }
    let stats = program.page("GET", "/stats/prometheus").await;
    let refused = "envoy_listener_downstream_cx_proxy_proto_error{listener_address=\"behind\"} 2\n";
    assert!(stats.contains(refused), "{stats}");
}

#[tokio::test]
async fn the_next_proxy_receives_the_client_address() {
    let folder = tempfile::tempdir().unwrap();
    let server = echo().await;
    let behind = Program::start(folder.path(), &bootstrap(server, server)).await;
    let file = bootstrap(server, behind.listener("behind").await);
    let program = Program::start(folder.path(), &file).await;
    let before = program.listener("before").await;
    // Two clients at once: a connection for one client never serves another.
    let (mut one, mut other) = (connect(before, V1).await, connect(before, V2).await);
    for path in ["/1", "/2", "/1", "/2"] {
        assert_eq!(client(&mut one, path).await, "1.2.3.4", "{path}");
        assert_eq!(client(&mut other, path).await, "4.3.2.1", "{path}");
    }
    let mut bytes = connect(program.listener("bytes").await, V1).await;
    assert_eq!(client(&mut bytes, "/").await, "1.2.3.4");
}
