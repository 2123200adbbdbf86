//! Requests that the sidecar and Envoy log with the same configuration.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::net::SocketAddr;

use crate::{collector::Collector, support::server};

pub(crate) const BOOTSTRAP: &str = r#"
node: {id: here, cluster: there, locality: {zone: z}}
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: http
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: h
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: h
          server_name: s
          http2_protocol_options: {}
          access_log: [ACCESS_LOG]
          route_config:
            validate_clusters: false
            # It is longer where it takes longer.
            response_headers_to_remove: [x-envoy-upstream-service-time]
            virtual_hosts:
            - name: v
              domains: ["*"]
              routes:
              - {name: direct, match: {prefix: /direct}, direct_response: {status: 410, body: {inline_string: gone}}}
              - {name: refused, match: {prefix: /refused}, route: {cluster: refused}}
              - {name: missing, match: {prefix: /missing}, route: {cluster: missing}}
              - {name: rewritten, match: {prefix: /rewritten}, route: {cluster: upstream, prefix_rewrite: /other}}
              - name: plain
                match: {prefix: /plain}
                route: {cluster: upstream}
                request_headers_to_add: [{header: {key: x-added, value: a}}]
          http_filters:
          - name: router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  - name: tcp
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: t
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t
          cluster: upstream
          access_log: [TCP_LOG]
  - name: tcp-refused
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: t
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t
          cluster: refused
          access_log: [TCP_LOG]
  clusters:
  - name: upstream
    type: STATIC
    load_assignment:
      cluster_name: upstream
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: UPSTREAM}}}
  - name: refused
    type: STATIC
    load_assignment:
      cluster_name: refused
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 1}}}
  - name: collector
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: collector
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: COLLECTOR}}}
"#;

pub(crate) const HTTP_ALS: &str = r#"{
name: als, typed_config: {
  "@type": type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig,
  common_config: {
    log_name: http-log, transport_api_version: V3, buffer_flush_interval: 0.05s,
    grpc_service: {envoy_grpc: {cluster_name: collector, authority: who}, initial_metadata: [{key: x-who, value: me}]}},
  additional_request_headers_to_log: [X-A, x-missing, x-added, ":path"],
  additional_response_headers_to_log: [x-b]}}"#;
/// Configuration of an access log with entries of requests; `SIZE` sets the buffer.
pub(crate) const HTTP: &str = "name: als, typed_config: {\"@type\": type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig, \
    common_config: {log_name: l, transport_api_version: V3, SIZE, grpc_service: {envoy_grpc: {cluster_name: collector}, timeout: 0.2s}}}";
pub(crate) const TCP_ALS: &str = r#"{
name: als, typed_config: {
  "@type": type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.TcpGrpcAccessLogConfig,
  common_config: {
    log_name: tcp-log, transport_api_version: V3, buffer_flush_interval: 0.05s,
    grpc_service: {envoy_grpc: {cluster_name: collector}}}}}"#;

/// Starts a server whose responses depend on the path.
pub(crate) async fn upstream() -> SocketAddr {
    server(|_, mut client| async move {
        while let Some((head, _)) = client.message_if_any().await {
            let status = if head.contains("/404") { "404 Not Found" } else { "200 OK" };
            let grpc = if head.contains("/grpc") {
                "content-type: application/grpc\r\ngrpc-status: 5\r\n"
            } else {
                ""
            };
            let answer =
                format!("HTTP/1.1 {status}\r\ncontent-length: 5\r\nx-b: one\r\nx-b: two\r\n{grpc}\r\nhello");
            client.send(&answer).await;
        }
    })
    .await
}

pub(crate) const REQUESTS: &[&str] = &[
    "GET /plain?a=b HTTP/1.1\r\nhost: a.b:81\r\nuser-agent: u\r\nreferer: http://r/\r\nx-forwarded-for: 1.2.3.4\r\nx-a: one\r\nx-a: two\r\n\r\n",
    "POST /plain/404 HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc",
    "PURGE /rewritten/x HTTP/1.1\r\nhost: a\r\n\r\n",
    "GET /direct HTTP/1.1\r\nhost: a\r\n\r\n",
    "GET /refused HTTP/1.1\r\nhost: a\r\n\r\n",
    "GET /missing HTTP/1.1\r\nhost: a\r\n\r\n",
    "GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n",
    "POST /plain/grpc HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\ncontent-length: 0\r\n\r\n",
];

/// Returns the bootstrap with these access logs.
pub(crate) async fn bootstrap(collector: &Collector, http: &str, tcp: &str) -> String {
    BOOTSTRAP
        .replace("COLLECTOR", &collector.address.port().to_string())
        .replace("UPSTREAM", &upstream().await.port().to_string())
        .replace("ACCESS_LOG", http)
        .replace("TCP_LOG", tcp)
}
