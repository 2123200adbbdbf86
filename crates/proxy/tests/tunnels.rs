//! CONNECT and upgrades between clients and servers of either version of HTTP.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/http2.rs"]
mod http2;
#[path = "support/program.rs"]
mod program;
mod support;
#[path = "support/tls.rs"]
mod tls;

use std::net::SocketAddr;

use bytes::Bytes;
use h2::{RecvStream, SendStream, client::SendRequest, ext::Protocol};
use http::{Method, Request, Response, StatusCode};
use program::Program;
use support::{Client, server, within};
use tls::over_tls;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
};

/// CONNECT leads to `bytes` as TCP, and to `h1:1` and `h2:1` as CONNECT. GET requests are routed by path and
/// may be upgraded to WebSocket.
fn bootstrap(http1: SocketAddr, http2: SocketAddr) -> String {
    let connect = |authority: &str, cluster: &str, config: &str| {
        format!(
            r#"
              - match: {{connect_matcher: {{}}, headers: [{{name: ":authority", string_match: {{exact: "{authority}"}}}}]}}
                route: {{cluster: {cluster}, upgrade_configs: [{{upgrade_type: CONNECT{config}}}]}}"#
        )
    };
    let cluster = |name: &str, options: &str, address: SocketAddr| {
        format!(
            r#"
  - name: {name}
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{{options}}}
    load_assignment:
      cluster_name: {name}
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}}}]}}]"#,
            port = address.port()
        )
    };
    let routes = [
        connect("bytes:1", "http1", ", connect_config: {}"),
        connect("h1:1", "http1", ""),
        connect("h2:1", "http2", ""),
        connect("no:1", "http1", ", enabled: false"),
    ];
    let clusters = [
        cluster("http1", "http_protocol_options: {}", http1),
        cluster("http2", "http2_protocol_options: {allow_connect: true}", http2),
    ];
    let listener = |name: &str, tls: &str| {
        format!(
            r#"
  - name: {name}
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - {tls}
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: l
          http2_protocol_options: {{allow_connect: true}}
          upgrade_configs: [{{upgrade_type: websocket}}]
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:{}
              - {{match: {{prefix: /h1}}, route: {{cluster: http1}}}}
              - {{match: {{prefix: /h2}}, route: {{cluster: http2}}}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}"#,
            routes.concat()
        )
    };
    let listeners =
        [listener("plain", ""), listener("secured", &format!("transport_socket: {}", files::tls()))];
    let (listeners, clusters) = (listeners.concat(), clusters.concat());
    format!("node: {{id: a}}\nstatic_resources:\n  listeners:{listeners}\n  clusters:{clusters}\n")
}

/// Starts an HTTP/1.1 server that grants every request, sends `hi`, and answers a ping.
async fn http1_server() -> SocketAddr {
    server(|_, mut client| async move {
        let head = client.head().await;
        if head.starts_with("CONNECT ") {
            assert!(head.starts_with("CONNECT h1:1 HTTP/1.1\r\nhost: h1:1\r\n"), "{head}");
            client.send("HTTP/1.1 200 OK\r\n\r\n").await;
        } else if head.starts_with("GET ") {
            assert!(head.to_lowercase().contains("\r\nupgrade: websocket\r\n"), "{head}");
            assert!(head.contains("\r\nsec-websocket-key: ") && !head.contains(":protocol"), "{head}");
            assert!(!head.contains("transfer-encoding"), "{head}");
            let granted =
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n";
            client.send(granted).await;
        } else {
            // Bytes without a head.
            assert_eq!(head, "hello\r\n\r\n");
        }
        client.send("hi").await;
        assert_eq!(client.exactly(4).await, "ping");
        client.send("pong").await;
    })
    .await
}

/// Starts the same server for HTTP/2.
async fn http2_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut builder = h2::server::Builder::new();
                let mut connection = builder.enable_connect_protocol().handshake(stream).await.unwrap();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    assert_eq!(request.method(), Method::CONNECT);
                    match request.extensions().get::<Protocol>() {
                        Some(protocol) => {
                            assert_eq!((protocol.as_str(), request.uri().path()), ("websocket", "/h2"));
                        }
                        None => assert_eq!(request.uri().authority().unwrap(), "h2:1"),
                    }
                    let stream = respond.send_response(Response::new(()), false).unwrap();
                    tokio::spawn(answer(stream, request.into_body()));
                }
            });
        }
    });
    address
}

async fn answer(mut stream: SendStream<Bytes>, mut body: RecvStream) {
    stream.send_data("hi".into(), false).unwrap();
    assert_eq!(read(&mut body, 4).await, "ping");
    stream.send_data("pong".into(), true).unwrap();
}

async fn read(body: &mut RecvStream, length: usize) -> String {
    let mut all = Vec::new();
    while all.len() < length {
        let piece = within(body.data()).await.unwrap().unwrap();
        body.flow_control().release_capacity(piece.len()).unwrap();
        all.extend_from_slice(&piece);
    }
    String::from_utf8(all).unwrap()
}

async fn start(folder: &tempfile::TempDir) -> Program {
    Program::start(folder.path(), &bootstrap(http1_server().await, http2_server().await)).await
}

/// Connects to this listener, with this ALPN protocol if it uses TLS.
async fn connect(program: &Program, listener: &str, protocol: &str) -> TcpStream {
    let address = program.listener(listener).await;
    match listener {
        "plain" => TcpStream::connect(address).await.unwrap(),
        _ => over_tls(address, protocol).await,
    }
}

/// Returns an HTTP/2 client that supports extended CONNECT.
async fn http2_client(stream: TcpStream) -> SendRequest<Bytes> {
    let (requests, connection) = within(h2::client::handshake(stream)).await.unwrap();
    tokio::spawn(connection);
    let requests = within(requests.ready()).await.unwrap();
    within(async {
        while !requests.is_extended_connect_protocol_enabled() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    requests
}

/// Exchanges data through a tunnel; `first` is what the peer expects first.
async fn talk(mut stream: SendStream<Bytes>, mut body: RecvStream, first: &'static str) {
    stream.send_data(first.into(), false).unwrap();
    assert_eq!(read(&mut body, 2).await, "hi");
    stream.send_data("ping".into(), false).unwrap();
    assert_eq!(read(&mut body, 4).await, "pong");
    // The server has half-closed.
    while let Some(rest) = within(body.data()).await {
        assert_eq!(rest.unwrap(), "");
    }
}

async fn http1_talk(client: &mut Client) {
    assert_eq!(client.exactly(2).await, "hi");
    client.send("ping").await;
    assert_eq!(client.exactly(4).await, "pong");
}

#[tokio::test]
async fn an_http1_client_opens_tunnels_to_either_version() {
    let folder = tempfile::tempdir().unwrap();
    let program = start(&folder).await;
    let connect = async |listener| Client::new(connect(&program, listener, "http/1.1").await);
    for (listener, path) in [("plain", "/h1"), ("plain", "/h2"), ("secured", "/h1"), ("secured", "/h2")] {
        let mut client = connect(listener).await;
        let upgrade = "Connection: Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n";
        client.send(&format!("GET {path} HTTP/1.1\r\nHost: a\r\n{upgrade}\r\n")).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{head}");
        let lower = head.to_lowercase();
        assert!(
            lower.contains("\r\nupgrade: websocket\r\n") && lower.contains("\r\nconnection: upgrade\r\n"),
            "{head}"
        );
        http1_talk(&mut client).await;
    }
    for authority in ["h1:1", "h2:1", "bytes:1"] {
        let mut client = connect("plain").await;
        let first = if authority == "bytes:1" { "hello\r\n\r\n" } else { "" };
        client.send(&format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n{first}")).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(!head.contains("content-length") && !head.contains("transfer-encoding"), "{head}");
        http1_talk(&mut client).await;
    }
}

#[tokio::test]
async fn an_http2_client_opens_tunnels_to_either_version() {
    let folder = tempfile::tempdir().unwrap();
    let program = start(&folder).await;
    let plain = http2_client(connect(&program, "plain", "h2").await).await;
    let secured = http2_client(connect(&program, "secured", "h2").await).await;
    for (requests, path) in [(&plain, "/h1"), (&plain, "/h2"), (&secured, "/h1"), (&secured, "/h2")] {
        let mut request = Request::builder().method(Method::CONNECT).uri(format!("http://a{path}"));
        request.extensions_mut().unwrap().insert(Protocol::from_static("websocket"));
        let request = request.header("sec-websocket-version", "13").body(()).unwrap();
        let (answer, stream) = requests.clone().send_request(request, false).unwrap();
        let answer = within(answer).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{answer:?}");
        assert!(!answer.headers().contains_key("upgrade"), "{answer:?}");
        talk(stream, answer.into_body(), "").await;
    }
    let requests = plain;
    for authority in ["h1:1", "h2:1", "bytes:1"] {
        let request = Request::builder().method(Method::CONNECT).uri(authority).body(()).unwrap();
        let (answer, stream) = requests.clone().send_request(request, false).unwrap();
        let answer = within(answer).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{answer:?}");
        talk(stream, answer.into_body(), if authority == "bytes:1" { "hello\r\n\r\n" } else { "" }).await;
    }
}

#[tokio::test]
async fn forbidden_tunnels_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let program = start(&folder).await;
    let address = program.listener("plain").await;
    let requests = http2_client(connect(&program, "plain", "h2").await).await;
    for (authority, status) in [("no:1", 403), ("other:1", 404)] {
        let mut client = Client::new(TcpStream::connect(address).await.unwrap());
        client.send(&format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
        let head = client.head().await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{authority}: {head}");
        let request = Request::builder().method(Method::CONNECT).uri(authority).body(()).unwrap();
        let (answer, _stream) = requests.clone().send_request(request, false).unwrap();
        assert_eq!(within(answer).await.unwrap().status().as_u16(), status);
    }
    for protocol in ["other", "h2c"] {
        let mut request = Request::builder().method(Method::CONNECT).uri("http://a/h1");
        request.extensions_mut().unwrap().insert(Protocol::from_static(protocol));
        let (answer, _stream) = requests.clone().send_request(request.body(()).unwrap(), false).unwrap();
        assert_eq!(within(answer).await.unwrap().status(), StatusCode::FORBIDDEN, "{protocol}");
    }
    // CONNECT has no content.
    let mut client = Client::new(TcpStream::connect(address).await.unwrap());
    client.send("CONNECT h1:1 HTTP/1.1\r\nHost: h1:1\r\nContent-Length: 5\r\n\r\nhello").await;
    assert!(client.head().await.starts_with("HTTP/1.1 400 "));
}

/// A response 101 grants no CONNECT, and no protocol other than the requested one, for either version of HTTP.
#[tokio::test]
async fn an_unrequested_protocol_is_not_granted() {
    let switching = server(|_, mut client| async move {
        client.head().await;
        client.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n").await;
        assert_eq!(client.rest().await, "");
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), &bootstrap(switching, switching)).await;
    for request in [
        "CONNECT h1:1 HTTP/1.1\r\nHost: h1:1\r\n\r\n",
        "CONNECT h1:1 HTTP/1.1\r\nHost: h1:1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        "GET /h1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ] {
        let mut client = Client::new(connect(&program, "plain", "http/1.1").await);
        client.send(request).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{request}: {head}");
    }
    let requests = http2_client(connect(&program, "plain", "h2").await).await;
    let mut request = Request::builder().method(Method::CONNECT).uri("http://a/h1");
    request.extensions_mut().unwrap().insert(Protocol::from_static("websocket"));
    for request in [request, Request::builder().method(Method::CONNECT).uri("h1:1")] {
        let (answer, _stream) = requests.clone().send_request(request.body(()).unwrap(), false).unwrap();
        assert_eq!(within(answer).await.unwrap().status(), StatusCode::BAD_GATEWAY);
    }
}

#[tokio::test]
async fn a_server_may_half_close_first_and_receives_the_rest() {
    let (tell, mut received) = tokio::sync::mpsc::unbounded_channel();
    let brief = server(move |_, mut client| {
        let tell = tell.clone();
        async move {
            client.send("bye").await;
            client.stream.shutdown().await.unwrap();
            tell.send(client.rest().await.len()).unwrap();
        }
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), &bootstrap(brief, brief)).await;
    let mut client = Client::new(connect(&program, "plain", "http/1.1").await);
    client.send("CONNECT bytes:1 HTTP/1.1\r\nHost: bytes:1\r\n\r\n").await;
    assert!(client.head().await.starts_with("HTTP/1.1 200 OK\r\n"));
    assert_eq!(client.rest().await, "bye");
    client.send(&"x".repeat(300_000)).await;
    client.stream.shutdown().await.unwrap();
    assert_eq!(within(received.recv()).await.unwrap(), 300_000);

    let requests = http2_client(connect(&program, "plain", "h2").await).await;
    let request = Request::builder().method(Method::CONNECT).uri("bytes:1").body(()).unwrap();
    let (answer, mut stream) = requests.clone().send_request(request, false).unwrap();
    let mut body = within(answer).await.unwrap().into_body();
    assert_eq!(http2::content(&mut body).await, (b"bye".to_vec(), None));
    http2::send(&mut stream, vec![b'x'; 300_000].into()).await;
    stream.send_data(Bytes::new(), true).unwrap();
    assert_eq!(within(received.recv()).await.unwrap(), 300_000);
}
