//! Requests over HTTP/1.1: `/metrics` returns the counters, any other path runs the script.

use std::{
    io::{self, ErrorKind, Write as _},
    rc::Rc,
    time::Instant,
};

use memchr::memchr;
use skysail_load::http1::{self, Chunks, Head};
use tokio::{io::AsyncReadExt as _, net::TcpStream};

use super::{MockService, outgoing::write_message};

/// Initial size of a connection's input buffer in bytes.
const FIRST_INPUT: usize = 4 << 10;
/// Maximum size of the head of a request in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Request target of the counters.
pub(super) const METRICS: &[u8] = b"/metrics";
/// Response to a request whose body is invalid.
const BAD_REQUEST: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
/// Response to a request whose head is too large.
const TOO_LARGE: &[u8] =
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
/// Headers of requests that calls repeat, so that the spans of sidecars become one trace: those of isotope, and `b3`.
pub(super) const FORWARDED: [&str; 15] = [
    "x-request-id",
    "x-b3-traceid",
    "x-b3-spanid",
    "x-b3-parentspanid",
    "x-b3-sampled",
    "x-b3-flags",
    "x-ot-span-context",
    "x-datadog-trace-id",
    "x-datadog-parent-id",
    "x-datadog-sampling-priority",
    "traceparent",
    "tracestate",
    "x-cloud-trace-context",
    "grpc-trace-bin",
    "b3",
];

/// Connection of a client.
struct Incoming {
    stream: TcpStream,
    input: Vec<u8>,
    filled: usize,
    output: Vec<u8>,
}

/// A request without its body.
struct IncomingRequest {
    head: Head,
    is_head: bool,
    asks_for_metrics: bool,
    closes: bool,
    /// Keep-alive must be confirmed (HTTP/1.0).
    confirms: bool,
    /// Lines of the headers to forward.
    forwarded: Rc<[u8]>,
}

/// Serves the requests of a connection.
///
/// # Errors
/// The connection fails, or a request is invalid.
pub(super) async fn serve(stream: TcpStream, service: Rc<MockService>) -> io::Result<()> {
    let mut connection = Incoming { stream, input: vec![0; FIRST_INPUT], filled: 0, output: Vec::new() };
    let forwards = !service.script.is_empty();
    while let Some(request) = connection.request(forwards).await? {
        let started = Instant::now();
        connection.skip_body(&request.head).await?;
        if request.asks_for_metrics {
            let text = service.counters.text();
            connection.respond(&request, "200 OK", &text).await?;
        } else {
            service.counters.received();
            match service.answer(Rc::clone(&request.forwarded)).await {
                Ok(()) => {
                    let size = service.response_size;
                    connection.begin("200 OK", size, &request);
                    let size = if request.is_head { 0 } else { size };
                    write_message(&mut connection.stream, &mut connection.output, size).await?;
                    service.counters.answered(true, started.elapsed(), service.response_size);
                }
                Err(error) => {
                    connection.respond(&request, "500 Internal Server Error", &error).await?;
                    service.counters.answered(false, started.elapsed(), error.len() as u64);
                }
            }
        }
        if request.closes {
            return Ok(());
        }
    }
    Ok(())
}

impl Incoming {
    /// Reads the head of the next request; `None` at the end of the connection.
    async fn request(&mut self, forwards: bool) -> io::Result<Option<IncomingRequest>> {
        let head = loop {
            if let Some(head) = http1::head(&self.input[..self.filled]) {
                break head;
            }
            if self.filled >= MAX_HEAD {
                return Err(self.refuse(TOO_LARGE).await);
            }
            if !self.fill().await? {
                return Ok(None);
            }
        };
        let bytes = &self.input[..head.length];
        let line = &bytes[..memchr(b'\r', bytes).unwrap_or(bytes.len())];
        let target = line.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
        let is_http10 = line.ends_with(b"HTTP/1.0");
        let request = IncomingRequest {
            head,
            is_head: line.starts_with(b"HEAD "),
            asks_for_metrics: target == METRICS,
            closes: if is_http10 { !head.keep_alive } else { head.close },
            confirms: is_http10 && head.keep_alive,
            forwarded: if forwards { forwarded(&bytes[line.len()..]).into() } else { Rc::default() },
        };
        self.consume(head.length);
        Ok(Some(request))
    }

    /// Reads the body of a request and discards it.
    async fn skip_body(&mut self, head: &Head) -> io::Result<()> {
        if head.has_invalid_length {
            return Err(self.refuse(BAD_REQUEST).await);
        }
        let (mut left, mut chunks) = (head.content_length.unwrap_or(0), Chunks::START);
        loop {
            let taken = if head.chunked {
                let (taken, is_done) = chunks.read(&self.input[..self.filled], |_| {});
                self.consume(taken);
                match is_done {
                    Some(true) => return Ok(()),
                    Some(false) => 0,
                    None => return Err(self.refuse(BAD_REQUEST).await),
                }
            } else {
                left.min(self.filled)
            };
            if !head.chunked {
                self.consume(taken);
                left -= taken;
                if left == 0 {
                    return Ok(());
                }
            }
            if !self.fill().await? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Reads more input. Returns false at the end of the connection.
    async fn fill(&mut self) -> io::Result<bool> {
        if self.filled == self.input.len() {
            self.input.resize(self.filled * 2, 0);
        }
        let length = self.stream.read(&mut self.input[self.filled..]).await?;
        self.filled += length;
        Ok(length > 0)
    }

    fn consume(&mut self, length: usize) {
        self.input.copy_within(length..self.filled, 0);
        self.filled -= length;
    }

    /// Writes a response to the output, without its body.
    fn begin(&mut self, status: &str, size: u64, request: &IncomingRequest) {
        self.output.clear();
        let connection = match (request.closes, request.confirms) {
            (true, _) => "Connection: close\r\n",
            (false, true) => "Connection: keep-alive\r\n",
            (false, false) => "",
        };
        // Writing to a Vec cannot fail.
        let _ = write!(
            self.output,
            "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {size}\r\n{connection}\r\n"
        );
    }

    /// Sends a response with a text.
    async fn respond(&mut self, request: &IncomingRequest, status: &str, text: &str) -> io::Result<()> {
        self.begin(status, text.len() as u64, request);
        if !request.is_head {
            self.output.extend_from_slice(text.as_bytes());
        }
        write_message(&mut self.stream, &mut self.output, 0).await
    }

    /// Sends a response to an invalid request. The returned error ends the connection.
    async fn refuse(&mut self, response: &[u8]) -> io::Error {
        self.output.clear();
        self.output.extend_from_slice(response);
        match write_message(&mut self.stream, &mut self.output, 0).await {
            Ok(()) => ErrorKind::InvalidData.into(),
            Err(error) => error,
        }
    }
}

/// Returns the lines of headers that calls repeat. `lines` begins with the end of the request line.
fn forwarded(lines: &[u8]) -> Vec<u8> {
    let mut forwarded = Vec::new();
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        let name = &line[..memchr(b':', line).unwrap_or(0)];
        if FORWARDED.iter().any(|known| name.eq_ignore_ascii_case(known.as_bytes())) {
            forwarded.extend_from_slice(line);
        }
    }
    forwarded
}
