//! Responses of an HTTP/2 server to HTTP/1.1 clients, where only bytes separate fields and responses.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use skysail_policy::config::{Cluster, cluster::UpstreamProtocol};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::{
    answers::{PROTOCOL, ask},
    envoy, server,
    streams::{Fields, message},
    support::cluster,
};

/// Method, response of the server (fields, frames of content), reason, result for the client (status and
/// content; 0 for the end of the connection), and Envoy's status.
type Reply =
    (&'static str, &'static str, &'static str, Fields, &'static [&'static str], u16, &'static str, u16);

#[rustfmt::skip]
const REPLIES: &[Reply] = &[
    ("CR and LF in a value", "RFC 9113, 8.2.1", "GET", &[(":status", "200"), ("x", "y\r\ncontent-length: 0")], &["hello"], 502, PROTOCOL, 502),
    ("an answer in a value", "RFC 9113, 8.2.1", "GET", &[(":status", "200"), ("x", "y\r\n\r\nHTTP/1.1 200 OK\r\n")], &[], 502, PROTOCOL, 502),
    ("LF in a value", "RFC 9113, 8.2.1", "GET", &[(":status", "200"), ("x", "y\ncontent-length: 0")], &["hello"], 502, PROTOCOL, 502),
    ("CR in a value", "RFC 9113, 8.2.1", "GET", &[(":status", "200"), ("x", "y\rz")], &[], 502, PROTOCOL, 502),
    ("NUL in a value", "RFC 9113, 8.2.1", "GET", &[(":status", "200"), ("x", "y\0z")], &[], 502, PROTOCOL, 502),
    ("CR and LF in a name", "RFC 9113, 8.2.1", "GET", &[(":status", "200"), ("x: y\r\nz", "a")], &[], 502, PROTOCOL, 502),
    ("a colon at the end of a name", "RFC 9113, 8.2.1", "GET", &[(":status", "200"), ("transfer-encoding:", "chunked")], &[], 502, PROTOCOL, 502),
    ("an upper-case name", "RFC 9113, 8.2.1", "GET", &[(":status", "200"), ("Content-Length", "5")], &[], 502, PROTOCOL, 502),
    ("a connection field", "RFC 9113, 8.2.2", "GET", &[(":status", "200"), ("connection", "close")], &["hello"], 502, PROTOCOL, 502),
    ("keep-alive", "RFC 9113, 8.2.2", "GET", &[(":status", "200"), ("keep-alive", "5")], &["hello"], 502, PROTOCOL, 502),
    ("an upgrade", "RFC 9113, 8.2.2", "GET", &[(":status", "200"), ("upgrade", "websocket")], &["hello"], 502, PROTOCOL, 502),
    ("a coding", "RFC 9113, 8.2.2", "GET", &[(":status", "200"), ("transfer-encoding", "chunked")], &["0\r\n\r\n"], 502, PROTOCOL, 502),
    ("two lengths", "RFC 9110, 8.6", "GET", &[(":status", "200"), ("content-length", "5"), ("content-length", "6")], &["hello"], 502, PROTOCOL, 502),
    ("a list of lengths", "RFC 9110, 8.6", "GET", &[(":status", "200"), ("content-length", "5, 5")], &["hello"], 502, PROTOCOL, 502),
    ("a length with a sign", "RFC 9110, 8.6", "GET", &[(":status", "200"), ("content-length", "+5")], &["hello"], 502, PROTOCOL, 502),
    ("less content than its length", "RFC 9113, 8.1.1: cut short", "GET", &[(":status", "200"), ("content-length", "6")], &["hello"], 200, "hello", 200),
    ("more content than its length", "RFC 9113, 8.1.1: no response", "GET", &[(":status", "200"), ("content-length", "4")], &["hello"], 0, "", 200),
    ("more content in a further frame", "RFC 9113, 8.1.1", "GET", &[(":status", "200"), ("content-length", "5")], &["hello", "HTTP/1.1 200 OK\r\n"], 200, "hello", 200),
    ("a length and no content", "RFC 9113, 8.1.1: no response", "GET", &[(":status", "200"), ("content-length", "5")], &[], 0, "", 502),
    ("content that looks like the last chunk", "RFC 9112, 7.1", "GET", &[(":status", "200")], &["0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"], 200, "18\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n\r\n0\r\n\r\n", 200),
    ("HEAD answered with content", "RFC 9110, 9.3.2", "HEAD", &[(":status", "200"), ("content-length", "5")], &["hello"], 200, "", 200),
    ("204 with content", "RFC 9110, 15.3.5", "GET", &[(":status", "204")], &["hello"], 204, "", 204),
    ("304 with content", "RFC 9110, 15.4.5", "GET", &[(":status", "304")], &["hello"], 304, "", 304),
    ("two statuses", "RFC 9113, 8.3", "GET", &[(":status", "200"), (":status", "204")], &[], 502, PROTOCOL, 502),
    ("no status", "RFC 9113, 8.3.2", "GET", &[("x", "y")], &[], 502, PROTOCOL, 502),
    ("a status after a field", "RFC 9113, 8.3", "GET", &[("x", "y"), (":status", "200")], &[], 502, PROTOCOL, 502),
    ("a status with CR and LF", "RFC 9113, 8.3.2", "GET", &[(":status", "200 OK\r\nx: y")], &[], 502, PROTOCOL, 502),
    ("a status of two digits", "RFC 9110, 15", "GET", &[(":status", "20")], &[], 502, PROTOCOL, 502),
    ("101", "RFC 9113, 8.6: there is none in HTTP/2", "GET", &[(":status", "101")], &[], 502, PROTOCOL, 502),
    ("an interim answer that ends the stream", "RFC 9113, 8.1", "GET", &[(":status", "103")], &[], 502, PROTOCOL, 502),
    ("a request's pseudo-header", "RFC 9113, 8.3", "GET", &[(":status", "200"), (":path", "/")], &[], 502, PROTOCOL, 502),
];

/// A server that answers each request with the next scripted response, or else with status 200.
#[derive(Clone, Default)]
struct Replying(Arc<Mutex<Option<&'static Reply>>>);

impl Replying {
    async fn start() -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Self::default();
        let shared = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(shared.clone().serve(stream));
            }
        });
        (server, address)
    }

    /// Returns `None` at the end of the connection.
    async fn serve(self, mut stream: TcpStream) -> Option<()> {
        stream.read_exact(&mut [0; 24]).await.ok()?;
        stream.write_all(b"\0\0\0\x04\0\0\0\0\0").await.ok()?;
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.ok()?;
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            stream.read_exact(&mut payload).await.ok()?;
            match (head[3], head[4]) {
                (4, 0) => stream.write_all(b"\0\0\0\x04\x01\0\0\0\0").await.ok()?,
                (1, _) => {
                    let reply = self.0.lock().unwrap().take();
                    let fine: (Fields, &[&str]) = (&[(":status", "200"), ("content-length", "4")], &["fine"]);
                    let (fields, content) = reply.map_or(fine, |reply| (reply.3, reply.4));
                    stream.write_all(&message(head[8], fields, content)).await.ok()?;
                }
                _ => {}
            }
        }
    }
}

#[tokio::test]
async fn no_response_becomes_two_or_another() {
    let (server, address) = Replying::start().await;
    let proxy =
        server::before(Cluster { protocol: UpstreamProtocol::Http2, ..cluster(&[address], None) }).await;
    let mut wrong = Vec::new();
    for reply in REPLIES {
        let (what, why, method, _, _, status, content, _) = reply;
        *server.0.lock().unwrap() = Some(reply);
        let got = ask(proxy.address, method).await;
        let next = ask(proxy.address, "GET").await;
        if (got.0, &*got.1) != (*status, *content) || (next.0, &*next.1) != (200, "fine") {
            wrong.push(format!("{what} ({why}): {got:?}, then {next:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn envoys_decisions_are_those_of_the_table() {
    let (server, address) = Replying::start().await;
    let (_running, envoy) = envoy::start(address, true).await;
    let mut wrong = Vec::new();
    for reply in REPLIES {
        let (what, _, method, _, _, _, _, status) = reply;
        *server.0.lock().unwrap() = Some(reply);
        let got = ask(envoy, method).await;
        let next = ask(envoy, "GET").await;
        if got.0 != *status || (next.0, &*next.1) != (200, "fine") {
            wrong.push(format!("{what}: expected {status}, got {got:?}, then {next:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
