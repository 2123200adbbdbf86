//! Protocol switches: the bytes after a response 101 are not inspected, so the response must grant the
//! requested and allowed protocol and nothing else.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::{envoy, server, support::within};

/// Response of the server to a WebSocket upgrade, reason, the client's status and whether its next bytes reach
/// the server, and the same with Envoy.
type Switch = (&'static str, &'static str, &'static str, (u16, bool), (u16, bool));

#[rustfmt::skip]
const SWITCHES: &[Switch] = &[
    ("the requested protocol", "RFC 9110, 15.2.2", "Upgrade: websocket\r\nConnection: Upgrade\r\n", (101, true), (101, true)),
    ("the same in other letters", "RFC 9110, 7.8", "Upgrade: WebSocket\r\nConnection: upgrade\r\n", (101, true), (101, true)),
    ("HTTP/2", "RFC 9110, 7.8: not the requested protocol", "Upgrade: h2c\r\nConnection: Upgrade\r\n", (502, false), (101, false)),
    ("the requested protocol and HTTP/2", "RFC 9110, 7.8", "Upgrade: websocket\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n", (502, false), (101, true)),
    ("both in one field", "RFC 9110, 7.8", "Upgrade: websocket, h2c\r\nConnection: Upgrade\r\n", (502, false), (101, true)),
    ("nothing", "RFC 9110, 15.2.2: the server must name the protocol that it switches to", "Connection: Upgrade\r\n", (502, false), (101, false)),
];

/// A request that no policy sees if it passes as bytes.
const HIDDEN: &[u8] = b"GET /admin HTTP/1.1\r\nHost: a\r\n\r\n";
const ASKS: &[u8] =
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n";

/// A server that answers 101 with these fields, sends `hi`, and records what it receives until the connection
/// ends.
#[derive(Clone, Default)]
struct Switching(Arc<Mutex<&'static str>>);

impl Switching {
    async fn start(got: tokio::sync::mpsc::UnboundedSender<Vec<u8>>) -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Self::default();
        let shared = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(shared.clone().serve(stream, got.clone()));
            }
        });
        (server, address)
    }

    async fn serve(self, mut stream: TcpStream, got: tokio::sync::mpsc::UnboundedSender<Vec<u8>>) {
        let (mut all, mut block) = (Vec::new(), [0; 4096]);
        let mut answered = false;
        while let Ok(count @ 1..) = stream.read(&mut block).await {
            all.extend_from_slice(&block[..count]);
            if !answered && all.ends_with(b"\r\n\r\n") {
                answered = true;
                let fields = *self.0.lock().unwrap();
                let answer = format!("HTTP/1.1 101 Switching Protocols\r\n{fields}\r\nhi");
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        }
        let _ = got.send(all);
    }
}

/// Returns the status of the response, and whether the following bytes reached the server.
async fn ask(
    address: SocketAddr,
    got: &mut tokio::sync::mpsc::UnboundedReceiver<Vec<u8>>,
) -> (u16, bool, String) {
    let mut stream = within(TcpStream::connect(address)).await.unwrap();
    stream.write_all(ASKS).await.unwrap();
    let (mut received, mut block) = (Vec::new(), [0; 4096]);
    // Through a tunnel the server sends `hi`; after any other response the connection ends.
    while !received.ends_with(b"\r\n\r\nhi") {
        match within(stream.read(&mut block)).await {
            Ok(count @ 1..) => received.extend_from_slice(&block[..count]),
            _ => break,
        }
    }
    let _ = stream.write_all(HIDDEN).await;
    let _ = stream.shutdown().await;
    drop(stream);
    let reached = within(got.recv()).await.unwrap();
    let received = String::from_utf8_lossy(&received).into_owned();
    let status = received.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, reached.ends_with(HIDDEN), received)
}

async fn decide(envoy: bool) {
    let (got, mut gets) = tokio::sync::mpsc::unbounded_channel();
    let (server, address) = Switching::start(got).await;
    let (_running, _proxy, proxied) = if envoy {
        let (running, address) = envoy::start(address, false).await;
        (Some(running), None, address)
    } else {
        let proxy = server::proxy(address).await;
        let address = proxy.address;
        (None, Some(proxy), address)
    };
    let mut wrong = Vec::new();
    for (what, why, fields, ours, theirs) in SWITCHES {
        *server.0.lock().unwrap() = fields;
        let (status, reached, received) = ask(proxied, &mut gets).await;
        let expected = if envoy { theirs } else { ours };
        if (status, reached) != *expected {
            wrong.push(format!(
                "{what} ({why}): expected {expected:?}, got {status}, {reached}: {received:?}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn only_the_requested_protocol_is_switched_to() {
    decide(false).await;
}

#[tokio::test]
async fn envoys_decisions_are_those_of_the_table() {
    decide(true).await;
}
