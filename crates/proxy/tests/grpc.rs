//! gRPC: deadlines, and clients that use gRPC-Web.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/http2.rs"]
mod http2;
#[path = "support/message.rs"]
mod message;
#[path = "support/program.rs"]
mod program;
mod support;

use std::net::SocketAddr;

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use files::{bootstrap, cluster, filter, http, listener, with};
use message::{Client, Message, map, server};
use program::Program;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// Clients of both HTTP versions with a server of the same version each, these route settings and filters.
struct Proxied {
    _folder: tempfile::TempDir,
    program: Program,
}

impl Proxied {
    async fn start(servers: [SocketAddr; 2], route: &Value, filters: &[Value]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [http1, http2] = servers;
        let clusters = [cluster("http1", http1, false), cluster("http2", http2, true)];
        let listeners = ["http1", "http2"].map(|name| {
            let routes = json!([{"match": {"prefix": "/"}, "route": with(json!({"cluster": name}), route)}]);
            listener(name, &[http(filters, &routes, &json!({}))])
        });
        let program = Program::start(folder.path(), &bootstrap(&listeners, &clusters)).await;
        Self { _folder: folder, program }
    }

    async fn clients(&self) -> [Client; 2] {
        let http1 = TcpStream::connect(self.program.listener("http1").await).await.unwrap();
        let http2 = TcpStream::connect(self.program.listener("http2").await).await.unwrap();
        [Client::new(http1, false).await, Client::new(http2, true).await]
    }
}

/// Starts a server of each version.
async fn servers<F, R>(answer: F) -> [SocketAddr; 2]
where
    F: Fn(Message) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Message> + Send + 'static,
{
    [server(false, None, answer.clone()).await, server(true, None, answer).await]
}

/// Starts servers that read and never answer.
async fn silent() -> [SocketAddr; 2] {
    servers(|_| std::future::pending()).await
}

/// Echoes the request without its content.
async fn repeat(request: Message) -> Message {
    Message::new(&[], format!("{:?}", request.fields)).with_length()
}

/// Returns a field of a response without content.
fn received(answer: &Message, name: &str) -> String {
    answer.fields.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
}

#[tokio::test]
async fn deadlines_of_clients_are_honoured() {
    let servers = silent().await;
    for (route, waits, name, value) in [
        // As Istio configures it: no limit except the client's.
        (
            json!({"timeout": "0s", "max_grpc_timeout": "0s"}),
            "50m",
            "grpc-message",
            "upstream request timeout",
        ),
        (json!({"timeout": "0s", "max_grpc_timeout": "0.05s"}), "1H", "grpc-status", "14"),
        (json!({"timeout": "100s", "max_grpc_timeout": "0.05s"}), "", "grpc-status", "14"),
        (
            json!({"timeout": "0s", "max_stream_duration": {"max_stream_duration": "0.05s"}}),
            "",
            "grpc-status",
            "4",
        ),
        (
            json!({"timeout": "0s",
                "max_stream_duration": {"max_stream_duration": "100s", "grpc_timeout_header_max": "0s"}}),
            "50m",
            "grpc-message",
            "downstream duration timeout",
        ),
        (
            json!({"timeout": "0s", "max_stream_duration": {"grpc_timeout_header_max": "0.05s"}}),
            "1H",
            "grpc-status",
            "4",
        ),
    ] {
        let proxied = Proxied::start(servers, &route, &[]).await;
        let mut call = Message::new(&[("content-type", "application/grpc")], "").with_length();
        if !waits.is_empty() {
            call.fields.extend(map(&[("grpc-timeout", waits)]));
        }
        for mut client in proxied.clients().await {
            let answer = client.ask(&call).await;
            assert_eq!(
                (answer.status, received(&answer, name)),
                (200, value.to_owned()),
                "{route}: {answer:?}"
            );
        }
    }
}

#[tokio::test]
async fn servers_receive_the_remaining_timeout() {
    let servers = servers(repeat).await;
    for (route, expected) in [
        (json!({"timeout": "0s", "max_grpc_timeout": "5s"}), "5000m"),
        (json!({"timeout": "0s", "max_grpc_timeout": "0s", "grpc_timeout_offset": "1s"}), "9000m"),
        (json!({"timeout": "20s"}), "10S"),
    ] {
        let proxied = Proxied::start(servers, &route, &[]).await;
        let call = [("content-type", "application/grpc"), ("grpc-timeout", "10S")];
        for mut client in proxied.clients().await {
            let answer = client.ask(&Message::new(&call, "").with_length()).await;
            let body = String::from_utf8_lossy(&answer.content);
            assert!(body.contains(&format!("\"grpc-timeout\": \"{expected}\"")), "{route}: {body}");
        }
    }
}

fn web() -> Value {
    filter("http.grpc_web.v3.GrpcWeb", &json!({}))
}

/// Echoes the content as a gRPC server, with status OK.
async fn grpc(request: Message) -> Message {
    assert_eq!(request.fields["content-type"], "application/grpc");
    assert_eq!(request.fields["te"], "trailers");
    let answer = Message::new(&[("content-type", "application/grpc")], request.content);
    Message { trailers: map(&[("grpc-status", "0")]), ..answer }
}

/// Returns a gRPC-Web request.
fn call(kind: &'static str, content: impl Into<bytes::Bytes>) -> Message {
    Message::new(&[("content-type", kind), ("accept", kind)], content)
}

/// The trailers of its response.
const TRAILERS: &[u8] = b"\x80\0\0\0\x0fgrpc-status:0\r\n";
const HI: &[u8] = b"\0\0\0\0\x02hi";

/// Decodes concatenated base64 texts.
fn decode(text: &[u8]) -> Vec<u8> {
    text.chunks(4).flat_map(|four| BASE64.decode(four).unwrap()).collect()
}

#[tokio::test]
async fn grpc_web_clients_reach_grpc_servers() {
    let proxied = Proxied::start(servers(grpc).await, &json!({}), &[web()]).await;
    let large = [&[0, 0, 0x0f, 0x42, 0x40], &[7; 1_000_000][..]].concat();
    for mut client in proxied.clients().await {
        for message in [HI, &large] {
            // The trailers are the last message.
            let expected = [message, TRAILERS].concat();
            let bytes = call("application/grpc-web+proto", message.to_owned());
            let answer = client.ask(&bytes.with_length()).await;
            assert_eq!(received(&answer, "content-type"), "application/grpc-web+proto");
            assert!(answer.content == expected, "{} bytes", answer.content.len());

            // Neither the pieces nor the decoded messages end on base64 quantum boundaries.
            for piece in [1, 7, 99_999] {
                if message.len() > 100_000 * piece {
                    continue;
                }
                let text = Message { piece, ..call("application/grpc-web-text", BASE64.encode(message)) };
                let answer = client.ask(&text).await;
                assert_eq!(received(&answer, "content-type"), "application/grpc-web-text+proto");
                assert!(decode(&answer.content) == expected, "{} bytes", answer.content.len());
            }
        }
    }
}

#[tokio::test]
async fn failures_are_reported_in_grpc_web() {
    let cases =
        [(silent().await, 504, "14", "upstream request timeout"), (servers(repeat).await, 200, "2", "")];
    for (servers, status, code, message) in cases {
        let proxied = Proxied::start(servers, &json!({"timeout": "0.2s"}), &[web()]).await;
        for mut client in proxied.clients().await {
            let answer = client.ask(&call("application/grpc-web", HI).with_length()).await;
            assert_eq!(received(&answer, "content-type"), "application/grpc-web+proto");
            assert_eq!((answer.status, &*received(&answer, "grpc-status")), (status, code), "{answer:?}");
            assert_eq!(received(&answer, "grpc-message"), message, "{answer:?}");
            assert_eq!(answer.content, "", "{answer:?}");
        }
    }
    // Invalid base64.
    let proxied = Proxied::start(servers(grpc).await, &json!({}), &[web()]).await;
    for mut client in proxied.clients().await {
        let answer = client.ask(&call("application/grpc-web-text", "????").with_length()).await;
        assert_eq!((answer.status, &*received(&answer, "grpc-status")), (400, "13"), "{answer:?}");
    }
}
