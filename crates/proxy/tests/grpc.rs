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

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use program::Program;
use support::{Client, server, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

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
        (", timeout: 0s, max_grpc_timeout: 0s", "50m", "grpc-message: upstream request timeout\r\n"),
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

const WEB: &str = r#"
          - name: envoy.filters.http.grpc_web
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.grpc_web.v3.GrpcWeb}"#;

/// A server of gRPC that repeats what it is sent, and says that all is well.
async fn grpc() -> SocketAddr {
    server(|_, mut client| async move {
        let head = client.head().await;
        assert!(head.contains("\r\ncontent-type: application/grpc\r\n"), "{head}");
        assert!(head.contains("\r\nte: trailers\r\n"), "{head}");
        if head.contains("\r\ncontent-length: 7\r\n") {
            assert_eq!(client.exactly(7).await, "\0\0\0\0\x02hi");
        } else {
            let body = client.until("0\r\n\r\n").await;
            assert_eq!(body, "7\r\n\0\0\0\0\x02hi\r\n0\r\n\r\n");
        }
        client
            .send("HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
            .await;
        client.send("7\r\n\0\0\0\0\x02hi\r\n0\r\nGrpc-Status: 0\r\n\r\n").await;
        client.rest().await;
    })
    .await
}

/// A call of gRPC-Web, whose message says hi.
async fn call(address: SocketAddr, kind: &str, content: &[u8]) -> Client {
    let mut client = Client::new(TcpStream::connect(address).await.unwrap());
    let length = content.len();
    let head = format!(
        "POST /a/b HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nAccept: {kind}\r\nContent-Length: {length}\r\n\r\n"
    );
    client.send(&head).await;
    client.stream.write_all(content).await.unwrap();
    client
}

/// What follows it.
const TRAILERS: &[u8] = b"\x80\0\0\0\x0fgrpc-status:0\r\n";
const HI: &[u8] = b"\0\0\0\0\x02hi";

#[tokio::test]
async fn clients_of_grpc_web_call_servers_of_grpc() {
    let folder = tempfile::tempdir().unwrap();
    let (_program, address) = start(&folder, grpc().await, "", WEB).await;
    let answer = read(call(address, "application/grpc-web+proto", HI).await).await;
    let (head, body) = answer.split_at(answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4);
    let head = String::from_utf8_lossy(head);
    assert!(head.contains("\r\ncontent-type: application/grpc-web+proto\r\n"), "{head}");
    // The trailers are the last message.
    let content: Vec<u8> = chunks(body).concat();
    assert_eq!(content, [HI, TRAILERS].concat());

    let call = call(address, "application/grpc-web-text", BASE64.encode(HI).as_bytes()).await;
    let answer = read(call).await;
    let (head, body) = answer.split_at(answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4);
    let head = String::from_utf8_lossy(head);
    assert!(head.contains("\r\ncontent-type: application/grpc-web-text+proto\r\n"), "{head}");
    let content: Vec<u8> = chunks(body).iter().flat_map(|text| BASE64.decode(text).unwrap()).collect();
    assert_eq!(content, [HI, TRAILERS].concat());
}

/// An answer to its last chunk.
async fn read(mut client: Client) -> Vec<u8> {
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n0\r\n\r\n") {
        assert_ne!(
            within(client.stream.read_buf(&mut answer)).await.unwrap(),
            0,
            "{}",
            answer.escape_ascii()
        );
    }
    answer
}

/// The content of each chunk.
fn chunks(mut body: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    loop {
        let line = body.iter().position(|b| *b == b'\r').unwrap();
        let size = usize::from_str_radix(std::str::from_utf8(&body[..line]).unwrap(), 16).unwrap();
        if size == 0 {
            return all;
        }
        all.push(&body[line + 2..line + 2 + size]);
        body = &body[line + 4 + size..];
    }
}

#[tokio::test]
async fn failures_are_told_in_the_words_of_grpc_web() {
    let folder = tempfile::tempdir().unwrap();
    for (server, expected) in [
        (
            silent().await,
            ["HTTP/1.1 504 ", "grpc-status: 14\r\n", "grpc-message: upstream request timeout\r\n"],
        ),
        (support::echo().await, ["HTTP/1.1 200 ", "grpc-status: 2\r\n", "content-length: 0\r\n"]),
    ] {
        let (_program, address) = start(&folder, server, ", timeout: 0.2s", WEB).await;
        let mut client = call(address, "application/grpc-web", HI).await;
        let head = client.head().await;
        assert!(head.contains("content-type: application/grpc-web+proto\r\n"), "{head}");
        assert!(expected.iter().all(|expected| head.contains(expected)), "{expected:?}: {head}");
    }
    // What should be base64 is not.
    let (_program, address) = start(&folder, grpc().await, "", WEB).await;
    let head = call(address, "application/grpc-web-text", b"????").await.head().await;
    assert!(head.starts_with("HTTP/1.1 400 ") && head.contains("grpc-status: 13\r\n"), "{head}");
}
