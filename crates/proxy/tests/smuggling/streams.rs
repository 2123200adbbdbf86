//! HTTP/2 requests to an HTTP/1.1 server, where only bytes separate fields.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    envoy::{
        self,
        Envoy::{self, Forwards, Refuses, Same},
    },
    requests::{is_next, next},
    server::{self, Server},
    support::within,
};

pub(crate) type Fields = &'static [(&'static str, &'static str)];

/// Input, reason for the reset with PROTOCOL_ERROR, and Envoy's decision. The input is fields after those of a
/// POST (all fields if they begin with a pseudo-header), and frames of content. The stream stays incomplete at
/// the server.
type Refused = (&'static str, &'static str, Fields, &'static [&'static str], Envoy);

/// Input, reason for accepting it, what the server receives, and Envoy's decision.
type Forwarded = (&'static str, &'static str, Fields, &'static [&'static str], &'static str, Envoy);

const POST: Fields = &[(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/")];

#[rustfmt::skip]
const REFUSED: &[Refused] = &[
    ("CR and LF in a value", "RFC 9113, 8.2.1", &[("x", "y\r\ncontent-length: 5")], &[], Same),
    ("LF in a value", "RFC 9113, 8.2.1", &[("x", "y\ntransfer-encoding: chunked")], &[], Same),
    ("CR in a value", "RFC 9113, 8.2.1", &[("x", "y\rz")], &[], Same),
    ("NUL in a value", "RFC 9113, 8.2.1", &[("x", "y\0z")], &[], Same),
    ("a control byte in a value", "RFC 9110, 5.5", &[("x", "y\u{1}z")], &[], Same),
    ("a space before a value", "RFC 9113, 8.2.1", &[("x", " y")], &[], Forwards(1)),
    ("a tab after a value", "RFC 9113, 8.2.1", &[("x", "y\t")], &[], Forwards(1)),
    ("a colon in a name", "RFC 9113, 8.2.1", &[("x: y\r\nz", "a")], &[], Same),
    ("a colon at the end of a name", "RFC 9113, 8.2.1", &[("transfer-encoding:", "chunked")], &[], Same),
    ("a space in a name", "RFC 9113, 8.2.1", &[("content-length ", "5")], &[], Same),
    ("an upper-case name", "RFC 9113, 8.2.1", &[("Content-Length", "5")], &[], Same),
    ("no name", "RFC 9113, 8.2.1", &[("", "y")], &[], Same),
    ("a name beyond ASCII", "RFC 9113, 8.2.1", &[("x\u{e9}", "y")], &[], Same),
    ("a coding", "RFC 9113, 8.2.2", &[("transfer-encoding", "chunked")], &["0\r\n\r\n"], Same),
    ("a connection field", "RFC 9113, 8.2.2", &[("connection", "close")], &[], Same),
    ("keep-alive", "RFC 9113, 8.2.2", &[("keep-alive", "5")], &[], Same),
    ("an upgrade", "RFC 9113, 8.2.2", &[("upgrade", "websocket")], &[], Same),
    ("te beyond trailers", "RFC 9113, 8.2.2", &[("te", "gzip")], &[], Same),
    ("more content than its length", "RFC 9113, 8.1.1", &[("content-length", "4")], &["hello"], Same),
    ("less content than its length", "RFC 9113, 8.1.1", &[("content-length", "6")], &["hello"], Same),
    ("more content in a further frame", "RFC 9113, 8.1.1", &[("content-length", "5")], &["hello", "GET / HTTP/1.1\r\n"], Forwards(1)),
    ("a length and no content", "RFC 9113, 8.1.1", &[("content-length", "5")], &[], Same),
    ("content though its length is 0", "RFC 9113, 8.1.1", &[("content-length", "0")], &["hello"], Forwards(1)),
    ("two lengths", "RFC 9110, 8.6", &[("content-length", "5"), ("content-length", "6")], &["hello"], Same),
    ("a list of lengths", "RFC 9110, 8.6", &[("content-length", "5, 5")], &["hello"], Same),
    ("a length with a sign", "RFC 9110, 8.6", &[("content-length", "+5")], &["hello"], Same),
    ("a pseudo-header after a field", "RFC 9113, 8.3",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), ("x", "y"), (":path", "/")], &[], Same),
    ("a path twice", "RFC 9113, 8.3",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/"), (":path", "/b")], &[], Same),
    ("an authority twice", "RFC 9113, 8.3",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":authority", "b"), (":path", "/")], &[], Same),
    ("an unknown pseudo-header", "RFC 9113, 8.3",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/"), (":x", "y")], &[], Same),
    ("an answer's pseudo-header", "RFC 9113, 8.3.1",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/"), (":status", "200")], &[], Same),
    ("no path", "RFC 9113, 8.3.1", &[(":method", "GET"), (":scheme", "http"), (":authority", "a")], &[], Same),
    ("an empty path", "RFC 9113, 8.3.1", &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "")], &[], Same),
    ("a relative path", "RFC 9113, 8.3.1", &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "b")], &[], Same),
    ("a path with a space", "RFC 9112, 3.2",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/b HTTP/1.1")], &[], Same),
    ("a path with CR and LF", "RFC 9112, 3.2",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/ HTTP/1.1\r\nhost: b\r\n\r\n")], &[], Same),
    ("a path with a tab", "RFC 9112, 3.2",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/b\tc")], &[], Same),
    ("a path with a fragment", "RFC 9113, 8.3.1",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/b#c")], &[], Same),
    ("a method with a space", "RFC 9110, 9.1",
     &[(":method", "GET /b HTTP/1.1"), (":scheme", "http"), (":authority", "a"), (":path", "/")], &[], Same),
    ("a method with CR and LF", "RFC 9110, 9.1",
     &[(":method", "GET / HTTP/1.1\r\nhost: b\r\n\r\nGET"), (":scheme", "http"), (":authority", "a"), (":path", "/")], &[], Same),
    ("no method", "RFC 9113, 8.3.1", &[(":scheme", "http"), (":authority", "a"), (":path", "/")], &[], Same),
    ("an empty method", "RFC 9110, 9.1", &[(":method", ""), (":scheme", "http"), (":authority", "a"), (":path", "/")], &[], Same),
    ("no scheme", "RFC 9113, 8.3.1", &[(":method", "GET"), (":authority", "a"), (":path", "/")], &[], Same),
    ("a scheme with a space", "RFC 3986, 3.1",
     &[(":method", "GET"), (":scheme", "http://b/ HTTP/1.1\r\nx:"), (":authority", "a"), (":path", "/")], &[], Same),
    ("an authority with CR and LF", "RFC 9113, 8.2.1",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a\r\nx: y"), (":path", "/")], &[], Same),
    ("an authority with a user", "RFC 9113, 8.3.1",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "b@a"), (":path", "/")], &[], Same),
    ("an authority with a path", "RFC 3986, 3.2",
     &[(":method", "GET"), (":scheme", "http"), (":authority", "a/b"), (":path", "/")], &[], Same),
    ("neither authority nor host", "RFC 9113, 8.3.1", &[(":method", "GET"), (":scheme", "http"), (":path", "/")], &[], Same),
    ("two hosts", "RFC 9112, 3.2",
     &[(":method", "GET"), (":scheme", "http"), (":path", "/"), ("host", "a"), ("host", "b")], &[], Same),
    ("CONNECT with a path", "RFC 9113, 8.5",
     &[(":method", "CONNECT"), (":scheme", "http"), (":authority", "a:1"), (":path", "/")], &[], Same),
    ("an extended CONNECT without a setting that allows it", "RFC 8441, 4",
     &[(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "http"), (":authority", "a"), (":path", "/")], &[], Same),
];

#[rustfmt::skip]
const FORWARDED: &[Forwarded] = &[
    ("content without a length", "RFC 9112, 6.3: in chunks", &[], &["hel", "lo"],
     "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Same),
    ("content with its length", "RFC 9113, 8.1.1", &[("content-length", "5")], &["hello"],
     "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello", Same),
    ("content that looks like a request", "RFC 9112, 6.2", &[("content-length", "23")], &["GET /b HTTP/1.1\r\nx: y\r\n"],
     "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 23\r\n\r\nGET /b HTTP/1.1\r\nx: y\r\n", Same),
    ("content that looks like the last chunk", "RFC 9112, 7.1", &[], &["0\r\n\r\nGET /b HTTP/1.1\r\n\r\n"],
     "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n18\r\n0\r\n\r\nGET /b HTTP/1.1\r\n\r\n\r\n0\r\n\r\n", Same),
    ("a host beside the authority", "RFC 9113, 8.3.1: the authority counts", &[("host", "b")], &[],
     "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n", Same),
    ("a host and no authority", "RFC 9113, 8.3.1",
     &[(":method", "GET"), (":scheme", "http"), (":path", "/"), ("host", "b")], &[],
     "GET / HTTP/1.1\r\nhost: b\r\n\r\n", Same),
    ("a name with underscores", "RFC 9110, 5.1: another field", &[("transfer_encoding", "chunked")], &[],
     "POST / HTTP/1.1\r\nhost: a\r\ntransfer_encoding: chunked\r\ncontent-length: 0\r\n\r\n", Same),
    ("credentials twice", "RFC 9110, 5.3", &[("authorization", "a"), ("x", "1"), ("authorization", "b")], &[],
     "POST / HTTP/1.1\r\nhost: a\r\nauthorization: a,b\r\nx: 1\r\ncontent-length: 0\r\n\r\n", Same),
    ("settings for an upgrade", "RFC 7540, 3.2.1", &[("http2-settings", "AAMAAABkAAQAAP__")], &[],
     "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n", Same),
    ("cookies in pieces", "RFC 9113, 8.2.3", &[("cookie", "a=1"), ("cookie", "b=2")], &[],
     "POST / HTTP/1.1\r\nhost: a\r\ncookie: a=1; b=2\r\ncontent-length: 0\r\n\r\n", Same),
];

/// Result of a case.
#[derive(Debug)]
struct Outcome {
    /// Event on the stream: the first byte of the response head, or the error that ended the stream or the
    /// connection.
    event: StreamEvent,
    requests: Vec<String>,
    next: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum StreamEvent {
    Head(u8),
    Reset(u32),
    GoAway(u32),
    Closed,
    Nothing,
}

const PROTOCOL_ERROR: u32 = 1;
/// First byte of a response head with status 200.
const OK: u8 = 0x88;

/// Returns the frames of a head, and of content that ends the stream.
pub(crate) fn message<'a>(
    stream: u8,
    fields: impl IntoIterator<Item = &'a (&'static str, &'static str)>,
    content: &[&str],
) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.extend([0, name.len() as u8]);
        block.extend(name.as_bytes());
        block.push(value.len() as u8);
        block.extend(value.as_bytes());
    }
    let mut out = Vec::new();
    let mut frame = |kind: u8, flags: u8, payload: &[u8]| {
        out.extend([0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream]);
        out.extend(payload);
    };
    frame(1, if content.is_empty() { 5 } else { 4 }, &block);
    for (i, piece) in content.iter().enumerate() {
        frame(0, u8::from(i + 1 == content.len()), piece.as_bytes());
    }
    out
}

async fn run(address: SocketAddr, server: &Server, fields: Fields, content: &[&str]) -> Outcome {
    let mut stream = within(TcpStream::connect(address)).await.unwrap();
    let mut out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let whole = fields.first().is_some_and(|(name, _)| name.starts_with(':'));
    out.extend(message(1, if whole { &[] } else { POST }.iter().chain(fields), content));
    let _ = stream.write_all(&out).await;
    let event = tokio::time::timeout(TIMEOUT, event(&mut stream)).await.unwrap_or(StreamEvent::Nothing);
    drop(stream);
    let requests = server.requests();
    Outcome { event, requests, next: next(address, server).await }
}

/// Timeout for expected events. No case passes because of it.
const TIMEOUT: Duration = Duration::from_secs(10);

async fn event(stream: &mut TcpStream) -> StreamEvent {
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).await.is_err() {
            return StreamEvent::Closed;
        }
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        if stream.read_exact(&mut payload).await.is_err() {
            return StreamEvent::Closed;
        }
        let number = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
        match head[3] {
            1 => {
                return StreamEvent::Head(*payload.iter().find(|byte| !matches!(byte, 0x20..=0x3f)).unwrap());
            }
            3 => return StreamEvent::Reset(number(0)),
            7 => return StreamEvent::GoAway(number(4)),
            _ => {}
        }
    }
}

impl Outcome {
    fn is_refused(&self) -> bool {
        is_next(&self.next)
            && self.requests.is_empty()
            && self.event != StreamEvent::Nothing
            && self.event != StreamEvent::Head(OK)
    }

    fn is_forwarded(&self) -> bool {
        is_next(&self.next) && self.requests.len() == 1 && self.event == StreamEvent::Head(OK)
    }
}

#[tokio::test]
async fn requests_that_http1_cannot_express_are_refused_and_others_arrive_unchanged() {
    let (server, address) = Server::start().await;
    let proxy = server::proxy(address).await;
    let mut wrong = Vec::new();
    for (what, why, fields, content, _) in REFUSED {
        let outcome = run(proxy.address, &server, fields, content).await;
        if !outcome.is_refused() || outcome.event != StreamEvent::Reset(PROTOCOL_ERROR) {
            wrong.push(format!("{what} must be refused ({why}): {outcome:?}"));
        }
    }
    for (what, why, fields, content, request, _) in FORWARDED {
        let outcome = run(proxy.address, &server, fields, content).await;
        if !outcome.is_forwarded() || outcome.requests[0] != *request {
            wrong.push(format!("{what} must be forwarded as {request:?} ({why}): {outcome:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn envoys_decisions_are_those_of_the_tables() {
    let (server, address) = Server::start().await;
    let (_running, envoy) = envoy::start(address, false).await;
    let mut wrong = Vec::new();
    let refused = REFUSED.iter().map(|(what, _, fields, content, envoy)| {
        (what, fields, content, if let Same = envoy { Refuses(0) } else { *envoy })
    });
    let forwarded = FORWARDED.iter().map(|(what, _, fields, content, _, envoy)| {
        (what, fields, content, if let Same = envoy { Forwards(1) } else { *envoy })
    });
    for (what, fields, content, expected) in refused.chain(forwarded) {
        let outcome = run(envoy, &server, fields, content).await;
        let as_said = match expected {
            Same => false,
            Refuses(_) => outcome.is_refused(),
            // It may still be in flight when the stream is reset.
            Forwards(count) => outcome.requests.len() + outcome.next.len() == count + 1,
        };
        if !as_said {
            wrong.push(format!("{what}: expected {expected:?}, got {outcome:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
