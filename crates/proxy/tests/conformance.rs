//! Third-party conformance tests: `h2spec`, which violates every rule of RFC 9113 and RFC 7541 once, and gRPC's
//! interoperability tests through two sidecars with mutual TLS.
//!
//! Both are Go programs, which `test.sh` installs into the user's cache.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/program.rs"]
mod program;
mod support;

use std::{fs, net::SocketAddr, path::Path, process::Stdio, time::Duration};

use program::Program;
use skysail_identity::{Authority, KeyAndCsr};
use skysail_testkit::cached;
use support::within;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, Command},
};

/// A mesh authority, which issues certificates into `NAME.pem` and `NAME.key`, and whose roots are in
/// `roots.pem`.
struct Issuer<'a> {
    authority: Authority,
    folder: &'a Path,
}

impl<'a> Issuer<'a> {
    fn new(folder: &'a Path) -> Self {
        let authority = Authority::ephemeral().unwrap();
        fs::write(folder.join("roots.pem"), authority.roots_pem()).unwrap();
        Self { authority, folder }
    }

    fn issue(&self, name: &str) {
        let request = KeyAndCsr::generate(None).unwrap();
        let id = skysail_core::SpiffeId::new("cluster.local", "default", name);
        let signed = self.authority.sign(&request.csr_pem, &id, Duration::from_hours(1)).unwrap();
        fs::write(self.folder.join(format!("{name}.pem")), signed.pem()).unwrap();
        fs::write(self.folder.join(format!("{name}.key")), request.key_pem()).unwrap();
    }

    /// Returns a transport socket with this certificate.
    fn transport(&self, side: &str, name: &str, more: &str) -> String {
        let folder = self.folder.display();
        format!(
            r#"
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.{side}TlsContext
          {more}
          common_tls_context:
            alpn_protocols: [h2]
            tls_certificates:
            - certificate_chain: {{filename: {folder}/{name}.pem}}
              private_key: {{filename: {folder}/{name}.key}}
            validation_context: {{trusted_ca: {{filename: {folder}/roots.pem}}}}
"#
        )
    }
}

/// Returns a bootstrap with one listener `l` that sends all requests to one server. The chain and the cluster
/// may have a transport socket.
fn bootstrap(codec: &str, downstream: &str, server: SocketAddr, http2: bool, upstream: &str) -> String {
    let (ip, port) = (server.ip(), server.port());
    let options = if http2 { "http2_protocol_options: {}" } else { "http_protocol_options: {}" };
    format!(
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
          codec_type: {codec}
          http2_protocol_options: {{max_concurrent_streams: 100}}
          route_config:
            virtual_hosts:
            - {{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: c, timeout: 0s}}}}]}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
{downstream}
  clusters:
    - name: c
      type: STATIC
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: {{{options}}}
      load_assignment:
        cluster_name: c
        endpoints:
        - lb_endpoints:
          - endpoint: {{address: {{socket_address: {{address: "{ip}", port_value: {port}}}}}}}
{upstream}
"#
    )
}

/// Starts a server that answers one complete request per connection. An answer to an incomplete request would race
/// with the frame for which the proxy must reset the stream.
async fn server() -> SocketAddr {
    support::server(|_, mut client| async move {
        let content = "content ".repeat(100);
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", content.len());
        let (mut request, mut block) = (Vec::new(), [0; 4096]);
        while !is_complete(&request) {
            match client.stream.read(&mut block).await {
                Ok(count @ 1..) => request.extend_from_slice(&block[..count]),
                _ => return,
            }
        }
        let _ = client.stream.write_all((head + &content).as_bytes()).await;
        client.rest().await;
    })
    .await
}

/// Returns whether these bytes are a whole HTTP/1.1 request.
fn is_complete(request: &[u8]) -> bool {
    let request = String::from_utf8_lossy(request);
    let Some((head, body)) = request.split_once("\r\n\r\n") else { return false };
    let field = |name| head.lines().find_map(|line: &str| line.strip_prefix(name));
    match field("content-length: ") {
        Some(length) => body.len() >= length.parse().unwrap(),
        // The last chunk may be followed by trailers.
        None if field("transfer-encoding: ").is_some() => {
            format!("\r\n{body}").contains("\r\n0\r\n") && body.ends_with("\r\n\r\n")
        }
        None => true,
    }
}

/// Runs `h2spec` against a listener.
async fn h2spec(address: SocketAddr, flags: &[&str]) {
    let output = Command::new(cached("h2spec-2.2.1/h2spec"))
        .args(["--port", &address.port().to_string()])
        .args(flags)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(TIMEOUT, output).await.unwrap().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let failures = stdout.split_once("Failures:").map_or(&*stdout, |(_, failures)| failures);
    assert!(
        stdout.contains("145 tests, 145 passed, 0 skipped, 0 failed"),
        "{failures}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Timeout. The programs take seconds, so only a hang reaches it.
const TIMEOUT: Duration = Duration::from_secs(300);

#[tokio::test]
async fn http2_conforms_to_its_specification() {
    let folder = tempfile::tempdir().unwrap();
    let server = server().await;
    let program = Program::start(folder.path(), &bootstrap("HTTP2", "", server, false, "")).await;
    h2spec(program.listener("l").await, &[]).await;
}

#[tokio::test]
async fn http2_over_tls_conforms_to_its_specification() {
    let folder = tempfile::tempdir().unwrap();
    let issuer = Issuer::new(folder.path());
    issuer.issue("server");
    let server = server().await;
    let transport = issuer.transport("Downstream", "server", "require_client_certificate: false");
    let program = Program::start(folder.path(), &bootstrap("AUTO", &transport, server, false, "")).await;
    h2spec(program.listener("l").await, &["--tls", "--insecure"]).await;
}

/// Cases of <https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md> that need no cloud
/// account.
const CASES: [&str; 16] = [
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "timeout_on_sleeping_server",
    "cancel_after_begin",
    "cancel_after_first_response",
    "status_code_and_message",
    "special_status_message",
    "custom_metadata",
    "unimplemented_method",
    "unimplemented_service",
    "orca_per_rpc",
    "orca_oob",
];

/// The cases `orca_…` test load reports in responses; this makes the client read them.
const LOOKS_AT_LOAD: &str = r#"{"loadBalancingConfig": [{"test_backend_metrics_load_balancer": {}}]}"#;

/// Starts gRPC's own server and waits until it listens.
async fn grpc_server() -> (Child, SocketAddr) {
    let mut child = Command::new(cached("grpc-interop-1.75.0/server"))
        .args(["-port", "0"])
        .env("GRPC_GO_LOG_SEVERITY_LEVEL", "info")
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let port = loop {
        let line = within(lines.next_line()).await.unwrap().expect("the server ended");
        if let Some((_, port)) = line.split_once("interop server listening on [::]:") {
            break port.parse().unwrap();
        }
    };
    // The server would block on a full pipe.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    (child, SocketAddr::from(([127, 0, 0, 1], port)))
}

#[tokio::test]
async fn grpc_interoperates_through_two_sidecars() {
    let folder = tempfile::tempdir().unwrap();
    let issuer = Issuer::new(folder.path());
    issuer.issue("client");
    issuer.issue("server");
    let (_server, address) = grpc_server().await;
    let transport = issuer.transport("Downstream", "server", "require_client_certificate: true");
    let behind = Program::start(folder.path(), &bootstrap("HTTP2", &transport, address, true, "")).await;
    let transport = issuer.transport("Upstream", "client", "sni: a");
    let address = behind.listener("l").await;
    let before = Program::start(folder.path(), &bootstrap("AUTO", "", address, true, &transport)).await;
    let port = before.listener("l").await.port().to_string();
    let mut failed = Vec::new();
    for case in CASES {
        let output = Command::new(cached("grpc-interop-1.75.0/client"))
            .args(["-server_host", "127.0.0.1", "-server_port", &port, "-test_case", case])
            .args(if case.starts_with("orca") { &["-service_config_json", LOOKS_AT_LOAD][..] } else { &[] })
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(TIMEOUT, output).await.unwrap().unwrap();
        if !output.status.success() {
            failed.push(format!("{case}: {}", String::from_utf8_lossy(&output.stderr)));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    // All cases shared one connection between the sidecars.
    let stats = before.page("GET", "/stats/prometheus").await;
    assert!(stats.contains("envoy_cluster_upstream_cx_total{cluster_name=\"c\"} 1\n"), "{stats}");
}
