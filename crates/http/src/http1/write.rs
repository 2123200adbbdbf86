//! Encoder of messages: heads, and bodies in the framing of the next hop.
//!
//! Fields that frame a message are written from the parsed framing, not copied from the received message. One is copied
//! that frames nothing: `content-length` of a response to HEAD or with status 304.

use super::Framing;
use crate::{
    buffer::Buffer,
    head::{Headers, Names, RequestHead, ResponseHead},
};

/// Connection fields of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// No `connection` field: the default of HTTP/1.1.
    Keep,
    /// `connection: keep-alive`, for an HTTP/1.0 peer that requested it.
    KeepAlive,
    /// `connection: close`.
    Close,
    /// `connection: upgrade`; the `upgrade` field is kept.
    Upgrade,
}

/// Writes a request head.
pub fn request(out: &mut Buffer, head: &RequestHead, framing: Framing, persistence: Persistence) {
    let start = out.len();
    out.extend(head.method().as_bytes());
    out.extend(b" ");
    let target = if head.method() == "CONNECT" { head.authority() } else { head.path() };
    out.extend(target.as_bytes());
    out.extend(b" HTTP/1.1\r\nhost: ");
    out.extend(head.authority().as_bytes());
    out.extend(b"\r\n");
    fields(out, head, persistence, true);
    match framing {
        Framing::Length(length) => content_length(out, length),
        // A request body cannot end with the connection.
        Framing::Chunked | Framing::UntilClose => out.extend(b"transfer-encoding: chunked\r\n"),
        Framing::None if matches!(head.method(), "GET" | "HEAD" | "DELETE" | "TRACE" | "CONNECT") => {}
        // Other methods may have a body; `content-length: 0` states that there is none (RFC 9110, section 8.6).
        Framing::None => content_length(out, 0),
    }
    end(out, persistence);
    head.restore_case(&mut out.bytes_mut()[start..]);
}

/// Writes a response head. `to_method` is the method of the request.
pub fn response(
    out: &mut Buffer,
    head: &ResponseHead,
    framing: Framing,
    to_method: &str,
    persistence: Persistence,
) {
    let (start, status) = (out.len(), head.status());
    if status == 200 {
        out.extend(b"HTTP/1.1 200 OK\r\n");
    } else {
        out.extend(b"HTTP/1.1 ");
        number(out, status.into(), 10);
        out.extend(b" ");
        out.extend(reason(status).as_bytes());
        out.extend(b"\r\n");
    }
    let silent = status < 200 || status == 204 || (to_method == "CONNECT" && status < 300);
    fields(out, head, persistence, true);
    match framing {
        Framing::Length(length) => content_length(out, length),
        Framing::Chunked => out.extend(b"transfer-encoding: chunked\r\n"),
        Framing::None if silent => {}
        Framing::None if to_method == "HEAD" || status == 304 => {
            if let Some(length) = head.header("content-length") {
                out.extend(b"content-length: ");
                out.extend(length);
                out.extend(b"\r\n");
            }
        }
        Framing::None => content_length(out, 0),
        Framing::UntilClose => {}
    }
    end(out, persistence);
    head.restore_case(&mut out.bytes_mut()[start..]);
}

/// Writes content in a framing.
pub fn data(out: &mut Buffer, framing: Framing, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    if framing == Framing::Chunked {
        number(out, bytes.len() as u64, 16);
        out.extend(b"\r\n");
        out.extend(bytes);
        out.extend(b"\r\n");
    } else {
        out.extend(bytes);
    }
}

/// Writes the end of a body in a framing.
#[inline]
pub fn finish(out: &mut Buffer, framing: Framing, trailers: Option<&Headers>) {
    if framing != Framing::Chunked {
        return;
    }
    out.extend(b"0\r\n");
    if let Some(trailers) = trailers {
        fields(out, trailers, Persistence::Keep, false);
    }
    out.extend(b"\r\n");
}

fn fields(out: &mut Buffer, headers: &Headers, persistence: Persistence, in_head: bool) {
    const FRAMING: Names = Names::of(&[
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "host",
        "proxy-connection",
        "upgrade",
    ]);
    let framing = |name: &[u8]| match name {
        b"content-length" | b"transfer-encoding" | b"connection" | b"keep-alive" | b"host"
        | b"proxy-connection" => true,
        b"upgrade" => persistence != Persistence::Upgrade || !in_head,
        _ => false,
    };
    headers.lines(FRAMING, framing, |piece| out.extend(piece));
}

fn end(out: &mut Buffer, persistence: Persistence) {
    out.extend(match persistence {
        Persistence::Keep => b"\r\n",
        Persistence::KeepAlive => b"connection: keep-alive\r\n\r\n",
        Persistence::Close => b"connection: close\r\n\r\n",
        Persistence::Upgrade => b"connection: upgrade\r\n\r\n",
    });
}

fn content_length(out: &mut Buffer, length: u64) {
    out.extend(b"content-length: ");
    number(out, length, 10);
    out.extend(b"\r\n");
}

fn number(out: &mut Buffer, mut value: u64, base: u64) {
    let mut digits = [0_u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b"0123456789abcdef"[(value % base) as usize];
        value /= base;
        if value == 0 {
            break;
        }
    }
    out.extend(&digits[at..]);
}

/// Returns the reason phrase of a common status (RFC 9110, section 15, and other RFCs); empty for others.
pub fn reason(status: u16) -> &'static str {
    match status {
        100 => "Continue",
        101 => "Switching Protocols",
        103 => "Early Hints",
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        203 => "Non-Authoritative Information",
        204 => "No Content",
        205 => "Reset Content",
        206 => "Partial Content",
        300 => "Multiple Choices",
        301 => "Moved Permanently",
        302 => "Found",
        303 => "See Other",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        402 => "Payment Required",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        406 => "Not Acceptable",
        407 => "Proxy Authentication Required",
        408 => "Request Timeout",
        409 => "Conflict",
        410 => "Gone",
        411 => "Length Required",
        412 => "Precondition Failed",
        413 => "Payload Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        416 => "Range Not Satisfiable",
        417 => "Expectation Failed",
        418 => "I'm a teapot",
        421 => "Misdirected Request",
        422 => "Unprocessable Content",
        425 => "Too Early",
        426 => "Upgrade Required",
        428 => "Precondition Required",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        451 => "Unavailable For Legal Reasons",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        511 => "Network Authentication Required",
        _ => "",
    }
}
