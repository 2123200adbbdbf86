//! Responses of an HTTP/1.1 server: left-over bytes of one must not become the response to another client.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    envoy,
    server::{self, Server},
    support::within,
};

/// Method, response of the server, reason, result for the client (status and content), and Envoy's status (0 if
/// what it forwards is not a response).
type Answer = (&'static str, &'static str, &'static str, &'static [u8], u16, &'static str, u16);

#[rustfmt::skip]
const ANSWERS: &[Answer] = &[
    ("a length and chunks", "RFC 9112, 6.3: ought to be handled as an error", "GET",
     b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 502, PROTOCOL, 502),
    ("two lengths", "RFC 9112, 6.3: a proxy must answer 502", "GET",
     b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 0\r\n\r\nhello", 502, PROTOCOL, 502),
    ("a length that is not a number", "RFC 9112, 6.3", "GET",
     b"HTTP/1.1 200 OK\r\ncontent-length: 5a\r\n\r\nhello", 502, PROTOCOL, 502),
    ("an unknown coding", "RFC 9112, 6.1", "GET",
     b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhello", 502, PROTOCOL, 502),
    ("chunks in HTTP/1.0", "RFC 9112, 6.1: framing is faulty", "GET",
     b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 502, PROTOCOL, 200),
    ("a folded line", "RFC 9112, 5.2: must be replaced, or answered with 502", "GET",
     b"HTTP/1.1 200 OK\r\nx: y\r\n content-length: 5\r\n\r\nhello", 502, PROTOCOL, 200),
    ("a space before the colon", "RFC 9112, 5.1: must be removed, or the response refused", "GET",
     b"HTTP/1.1 200 OK\r\ncontent-length : 5\r\n\r\nhello", 502, PROTOCOL, 502),
    ("LF alone", "RFC 9112, 2.2", "GET",
     b"HTTP/1.1 200 OK\ncontent-length: 0\n\n", 502, PROTOCOL, 200),
    ("CR alone in a value", "RFC 9112, 2.2", "GET",
     b"HTTP/1.1 200 OK\r\nx: y\rcontent-length: 5\r\ncontent-length: 0\r\n\r\n", 502, PROTOCOL, 200),
    ("NUL in a value", "RFC 9110, 5.5", "GET",
     b"HTTP/1.1 200 OK\r\nx: y\0\r\ncontent-length: 0\r\n\r\n", 502, PROTOCOL, 502),
    ("a status of two digits", "RFC 9112, 4", "GET",
     b"HTTP/1.1 20 OK\r\ncontent-length: 0\r\n\r\n", 502, PROTOCOL, 0),
    ("a status of four digits", "RFC 9112, 4", "GET",
     b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n", 502, PROTOCOL, 200),
    ("another protocol", "RFC 9112, 4", "GET",
     b"RTSP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", 502, PROTOCOL, 502),
    ("another version", "RFC 9112, 2.3", "GET",
     b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n", 502, PROTOCOL, 200),
    ("an unrequested 101", "RFC 9110, 15.2.2", "GET",
     b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 502, PROTOCOL, 0),
    ("interim answers before the last", "RFC 9110, 15.2", "GET",
     b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", 200, "hello", 200),
    ("an interim answer with a length", "RFC 9112, 6.3: it has no content; what follows is the answer", "GET",
     b"HTTP/1.1 103 Early Hints\r\ncontent-length: 5\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", 200, "hello", 502),
    ("an answer after the answer", "RFC 9112, 9.2: must not be taken for one; the connection is not used again", "GET",
     b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison", 200, "hello", 200),
    ("bytes after the last chunk", "RFC 9112, 9.2", "GET",
     b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison", 200, "5\r\nhello\r\n0\r\n\r\n", 200),
    ("HEAD answered with content", "RFC 9112, 6.3: the head is the whole response", "HEAD",
     b"HTTP/1.1 200 OK\r\ncontent-length: 44\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison", 200, "", 200),
    ("204 with content", "RFC 9112, 6.3", "GET",
     b"HTTP/1.1 204 No Content\r\ncontent-length: 44\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison", 204, "", 502),
    ("304 with content", "RFC 9112, 6.3", "GET",
     b"HTTP/1.1 304 Not Modified\r\ncontent-length: 44\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison", 304, "", 304),
    ("a reason with a control byte", "RFC 9112, 4", "GET",
     b"HTTP/1.1 200 O\x01K\r\ncontent-length: 0\r\n\r\n", 502, PROTOCOL, 502),
];

/// Response to a protocol error of the server.
pub(crate) const PROTOCOL: &str =
    "upstream connect error or disconnect/reset before headers. reset reason: protocol error";

/// Timeout for the end of a response. One of Envoy's responses has no end.
const TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) async fn ask(address: SocketAddr, method: &str) -> (u16, String) {
    let mut stream = within(TcpStream::connect(address)).await.unwrap();
    let request = format!("{method} / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut all = Vec::new();
    let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut all)).await;
    let all = String::from_utf8_lossy(&all);
    let mut rest = &*all;
    loop {
        let Some((head, content)) = rest.split_once("\r\n\r\n") else { return (0, rest.to_owned()) };
        match head.get(9..12).map(str::parse) {
            Some(Ok(100..200)) => rest = content,
            Some(Ok(status)) => return (status, content.to_owned()),
            _ => return (0, rest.to_owned()),
        }
    }
}

#[tokio::test]
async fn no_response_reaches_another_client() {
    let (server, address) = Server::start().await;
    let proxy = server::proxy(address).await;
    let mut wrong = Vec::new();
    for (what, why, method, answer, status, content, _) in ANSWERS {
        server.answer(answer);
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
    let (server, address) = Server::start().await;
    let (_running, envoy) = envoy::start(address, false).await;
    let mut wrong = Vec::new();
    for (what, _, method, answer, _, _, status) in ANSWERS {
        server.answer(answer);
        let got = ask(envoy, method).await;
        let next = ask(envoy, "GET").await;
        if got.0 != *status || (next.0, &*next.1) != (200, "fine") {
            wrong.push(format!("{what}: expected {status}, got {got:?}, then {next:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
