//! Envoy's decisions about the cases.

use std::net::SocketAddr;

use crate::process::Running;

/// Envoy's decision about a case.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Envoy {
    /// The same as the sidecar's.
    Same,
    /// Refuses with this status (0: closes the connection).
    Refuses(u16),
    /// Forwards this number of requests to the server, and as many responses to the client.
    Forwards(usize),
}

/// Starts Envoy in front of a server of either version; returns it with its listener's address.
pub(crate) async fn start(server: SocketAddr, http2: bool) -> (Running, SocketAddr) {
    let text = BOOTSTRAP.replace("SERVER_PORT", &server.port().to_string());
    let running = Running::start(&if http2 { text + HTTP2 } else { text }).await;
    let address = running.listener("cases").await;
    (running, address)
}

const BOOTSTRAP: &str = r#"
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: cases
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: cases
          generate_request_id: false
          normalize_path: true
          delayed_close_timeout: 0s
          http_protocol_options: {accept_http_10: true}
          upgrade_configs: [{upgrade_type: websocket}]
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: /}, route: {cluster: server, timeout: 0s}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: server
    connect_timeout: 5s
    load_assignment:
      cluster_name: server
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: SERVER_PORT}}}
"#;

const HTTP2: &str = r#"
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
"#;
