//! Heads in HTTP/2: validation of messages (RFC 9113, section 8), and conversion from and to fields.

use super::hpack::Encoder;
use crate::{
    head::{self, Headers, RequestHead, ResponseHead, Scheme, Version},
    http1::{
        Framing,
        parse::{self, is_field_value, is_forbidden_in_trailers, is_lower_token, is_token},
    },
};

/// Limits on a head.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum size in bytes: names and values, plus 32 for each field.
    pub size: usize,
    /// Maximum number of fields, including pseudo-header fields as in Envoy.
    pub fields: usize,
}

/// Reason why fields are not a valid head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadError {
    /// A field or pseudo-header field is not allowed, or a pseudo-header field is missing.
    Malformed,
    /// The size exceeds the limit.
    TooLarge,
    /// The number of fields exceeds the limit.
    TooMany,
}

/// Destination of fields.
pub(super) enum Target<'a> {
    Request(&'a mut RequestHead),
    Answer(&'a mut ResponseHead),
    Trailers(&'a mut Headers),
    /// The fields are discarded.
    Nothing,
}

/// A head in the course of decoding.
pub(super) struct HeadReader<'a> {
    target: Target<'a>,
    left: Bounds,
    fault: Option<HeadError>,
    /// Bit set of pseudo-header fields so far.
    pseudo: u8,
    /// A regular field has been decoded.
    fields: bool,
    host: bool,
    /// Value of `content-length`.
    length: Option<u64>,
    /// Extended CONNECT is allowed (RFC 8441).
    connect: bool,
}

const METHOD: u8 = 1;
const SCHEME: u8 = 2;
const AUTHORITY: u8 = 4;
const PATH: u8 = 8;
const STATUS: u8 = 16;
const PROTOCOL: u8 = 32;

impl<'a> HeadReader<'a> {
    pub(super) fn new(target: Target<'a>, bounds: Bounds) -> Self {
        let (fault, length) = (None, None);
        let (pseudo, fields, host, connect) = (0, false, false, false);
        Self { target, left: bounds, fault, pseudo, fields, host, length, connect }
    }

    /// Allows `:protocol` with CONNECT.
    pub(super) fn connecting(self, connect: bool) -> Self {
        Self { connect, ..self }
    }

    /// Adds a field.
    pub(super) fn field(&mut self, name: &[u8], value: &[u8]) {
        if self.fault.is_none() {
            self.fault = self.take(name, value).err();
        }
    }

    fn take(&mut self, name: &[u8], value: &[u8]) -> Result<(), HeadError> {
        let size = self.left.size.checked_sub(name.len() + value.len() + 32).ok_or(HeadError::TooLarge)?;
        let fields = self.left.fields.checked_sub(1).ok_or(HeadError::TooMany)?;
        self.left = Bounds { size, fields };
        if let Some(name) = name.strip_prefix(b":") {
            return self.pseudo(name, value).ok_or(HeadError::Malformed);
        }
        self.fields = true;
        self.regular(name, value).ok_or(HeadError::Malformed)
    }

    /// Adds a pseudo-header field. Only known ones are allowed, each once, before all other fields (section 8.3).
    fn pseudo(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        let bit = match name {
            b"method" => METHOD,
            b"scheme" => SCHEME,
            b"authority" => AUTHORITY,
            b"path" => PATH,
            b"status" => STATUS,
            b"protocol" if self.connect => PROTOCOL,
            _ => return None,
        };
        if self.fields || self.pseudo & bit != 0 {
            return None;
        }
        self.pseudo |= bit;
        match (&mut self.target, bit) {
            (Target::Nothing, _) => {}
            (Target::Request(head), METHOD) => {
                let method = match value {
                    b"GET" => "GET",
                    b"POST" => "POST",
                    _ => {
                        let valid =
                            !value.is_empty() && value.len() <= 64 && value.iter().all(|b| is_token(*b));
                        str::from_utf8(value).ok().filter(|_| valid)?
                    }
                };
                head.set_method(method);
            }
            (Target::Request(head), SCHEME) => {
                let rest = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
                if !value.first()?.is_ascii_alphabetic() || !value.iter().all(rest) {
                    return None;
                }
                if value == b"https" {
                    head.set_scheme(Scheme::Https);
                }
            }
            (Target::Request(head), AUTHORITY) => head.set_authority(head::as_authority(value)?),
            (Target::Request(head), PATH) => {
                let valid = !value.iter().any(|b| *b <= b' ' || *b == 0x7f || *b == b'#');
                head.set_path(str::from_utf8(value).ok().filter(|_| valid)?);
            }
            // The protocol is stored as in HTTP/1.1. An `upgrade` field of the peer is refused, so that there is only
            // this one.
            (Target::Request(head), PROTOCOL) => {
                let valid = !value.is_empty() && value.iter().all(|b| is_token(*b));
                head.push(b"upgrade", valid.then_some(value)?);
            }
            (Target::Answer(head), STATUS) => {
                let [a @ b'1'..=b'9', b @ b'0'..=b'9', c @ b'0'..=b'9'] = value else { return None };
                let digit = |digit: &u8| u16::from(digit - b'0');
                head.set_status(digit(a) * 100 + digit(b) * 10 + digit(c));
            }
            _ => return None,
        }
        Some(())
    }

    /// Adds a regular field (sections 8.2.1 and 8.2.2).
    fn regular(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        let plain = !name.is_empty() && name.iter().all(|b| is_lower_token(*b));
        let blank = |b: Option<&u8>| matches!(b, Some(b' ' | b'\t'));
        if !plain || blank(value.first()) || blank(value.last()) || !is_field_value(value) {
            return None;
        }
        match name {
            b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade" => {
                return None;
            }
            b"te" if value != b"trailers" => return None,
            b"content-length" => {
                let before = self.length.replace(parse::length(value)?);
                if before.is_some() {
                    return None;
                }
            }
            b"host" => {
                if self.host || !head::is_authority(value) {
                    return None;
                }
                self.host = true;
            }
            _ => {}
        }
        match &mut self.target {
            Target::Request(head) => head.push(name, value),
            Target::Answer(head) => head.push(name, value),
            // Discarding is allowed (RFC 9110, section 6.5.1), and nothing in HTTP/2 depends on these fields.
            Target::Trailers(_) if is_forbidden_in_trailers(name) => {}
            Target::Trailers(head) => head.push(name, value),
            Target::Nothing => {}
        }
        Some(())
    }

    /// Validates the head; returns the content length, if known.
    pub(super) fn finish(self) -> Result<Option<u64>, HeadError> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let whole = match self.target {
            Target::Nothing => true,
            Target::Trailers(trailers) => {
                head::combine_answered(trailers);
                self.pseudo == 0
            }
            Target::Answer(head) => {
                head.version = Version::Http2;
                head.combine_repeated();
                self.pseudo == STATUS
            }
            Target::Request(head) => {
                head.version = Version::Http2;
                if self.host {
                    // `:authority` has precedence over `host` (section 8.3.1).
                    if self.pseudo & AUTHORITY == 0 {
                        head.load_authority();
                    } else {
                        head.remove("host");
                    }
                }
                // Clients may split cookies into several fields (section 8.2.3).
                head.combine_repeated();
                let path = head.path();
                let path_is_absolute = path.starts_with('/');
                match head.method() {
                    "CONNECT" if self.pseudo & PROTOCOL == 0 => self.pseudo == METHOD | AUTHORITY,
                    "CONNECT" => {
                        head.set_method("GET");
                        path_is_absolute && self.pseudo == METHOD | SCHEME | AUTHORITY | PATH | PROTOCOL
                    }
                    method => {
                        let valid = path_is_absolute || (path == "*" && method == "OPTIONS");
                        let named = !head.authority().is_empty();
                        // `:protocol` is allowed only with CONNECT.
                        valid && named && self.pseudo | AUTHORITY == METHOD | SCHEME | AUTHORITY | PATH
                    }
                }
            }
        };
        if whole { Ok(self.length) } else { Err(HeadError::Malformed) }
    }
}

/// Returns the framing of a body for an HTTP/1.1 receiver.
pub fn framing(end: bool, length: Option<u64>) -> Framing {
    if end { Framing::None } else { length.map_or(Framing::Chunked, Framing::Length) }
}

/// Encodes the head of a request; returns false if HTTP/2 cannot represent it. `upgrade` uses extended CONNECT (RFC
/// 8441).
pub(super) fn request(encoder: &mut Encoder, out: &mut Vec<u8>, head: &RequestHead, upgrade: bool) -> bool {
    let connect = head.method() == "CONNECT";
    let protocol = head.header("upgrade").filter(|_| upgrade && !connect);
    if head.method().is_empty() || (if connect { head.authority() } else { head.path() }).is_empty() {
        return false;
    }
    encoder.begin(out);
    match head.method() {
        _ if protocol.is_some() => encoder.field(out, b":method", b"CONNECT"),
        "GET" => encoder.indexed(out, 2),
        "POST" => encoder.indexed(out, 3),
        method => encoder.field(out, b":method", method.as_bytes()),
    }
    if let Some(protocol) = protocol {
        encoder.field(out, b":protocol", &protocol.to_ascii_lowercase());
    }
    if !connect {
        encoder.indexed(out, if head.scheme() == "https" { 7 } else { 6 });
        match head.path() {
            "/" => encoder.indexed(out, 4),
            path => encoder.field(out, b":path", path.as_bytes()),
        }
    }
    if !head.authority().is_empty() {
        encoder.field(out, b":authority", head.authority().as_bytes());
    }
    fields(encoder, out, head);
    true
}

/// Encodes the head of a response.
pub(super) fn answer(encoder: &mut Encoder, out: &mut Vec<u8>, head: &ResponseHead) {
    encoder.begin(out);
    status(encoder, out, head.status());
    fields(encoder, out, head);
}

/// Encodes `:status`.
pub(super) fn status(encoder: &mut Encoder, out: &mut Vec<u8>, status: u16) {
    match status {
        200 => encoder.indexed(out, 8),
        204 => encoder.indexed(out, 9),
        206 => encoder.indexed(out, 10),
        304 => encoder.indexed(out, 11),
        400 => encoder.indexed(out, 12),
        404 => encoder.indexed(out, 13),
        500 => encoder.indexed(out, 14),
        _ => {
            let digit = |by: u16| b'0' + (status / by % 10) as u8;
            encoder.field(out, b":status", &[digit(100), digit(10), digit(1)]);
        }
    }
}

/// Encodes trailers.
pub(super) fn trailers(encoder: &mut Encoder, out: &mut Vec<u8>, trailers: &Headers) {
    encoder.begin(out);
    fields(encoder, out, trailers);
}

/// Encodes fields, without those of HTTP/1 connections.
fn fields(encoder: &mut Encoder, out: &mut Vec<u8>, headers: &Headers) {
    for (name, value) in headers.iter() {
        match name {
            b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade" => {}
            b"te" if value != b"trailers" => {}
            _ => encoder.field(out, name, value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { size: 1000, fields: 10 };
    const GET: [(&str, &str); 4] =
        [(":method", "GET"), (":scheme", "http"), (":authority", "a:1"), (":path", "/x")];

    fn request(fields: &[(&str, &str)]) -> Result<RequestHead, HeadError> {
        let mut head = RequestHead::default();
        let mut reading = HeadReader::new(Target::Request(&mut head), BOUNDS);
        for (name, value) in fields {
            reading.field(name.as_bytes(), value.as_bytes());
        }
        reading.finish().map(|_| head)
    }

    fn with(more: &[(&'static str, &'static str)]) -> Result<RequestHead, HeadError> {
        request(&[&GET, more].concat())
    }

    #[test]
    fn requests_are_decoded() {
        let head = with(&[("cookie", "a"), ("host", "b"), ("te", "trailers"), ("cookie", "c")]).unwrap();
        let read = (head.method(), head.scheme(), head.authority(), head.path());
        assert_eq!(read, ("GET", "http", "a:1", "/x"));
        assert_eq!((head.header("cookie"), head.len()), (Some(&b"a; c"[..]), 2));
        let head = request(&[GET[0], GET[1], GET[3], ("host", "b:2")]).unwrap();
        assert_eq!((head.authority(), head.len()), ("b:2", 0));
        assert!(request(&[(":method", "CONNECT"), (":authority", "a:1")]).is_ok());
        assert!(request(&[(":method", "OPTIONS"), GET[1], GET[2], (":path", "*")]).is_ok());
    }

    #[test]
    fn extended_connect_becomes_an_upgrade() {
        let read = |fields: &[(&str, &str)], connect| {
            let mut head = RequestHead::default();
            let mut reading = HeadReader::new(Target::Request(&mut head), BOUNDS).connecting(connect);
            fields.iter().for_each(|(name, value)| reading.field(name.as_bytes(), value.as_bytes()));
            reading.finish().map(|_| head)
        };
        let connect = (":method", "CONNECT");
        let whole = [connect, (":protocol", "websocket"), GET[1], GET[2], GET[3]];
        let head = read(&whole, true).unwrap();
        assert_eq!(
            (head.method(), head.path(), head.header("upgrade")),
            ("GET", "/x", Some(&b"websocket"[..]))
        );
        assert!(read(&whole, false).is_err());
        for left_out in 0..whole.len() {
            let mut fields = whole.to_vec();
            fields.remove(left_out);
            assert!(read(&fields, true).is_err(), "{:?}", whole[left_out]);
        }
        assert!(read(&[connect, (":protocol", "a b"), GET[1], GET[2], GET[3]], true).is_err());
        assert!(read(&[GET[0], (":protocol", "websocket"), GET[1], GET[2], GET[3]], true).is_err());
        assert!(read(&[connect, GET[2]], true).unwrap().header("upgrade").is_none());
    }

    #[test]
    fn fields_that_are_not_for_trailers_are_discarded() {
        let mut trailers = Headers::default();
        let mut reading = HeadReader::new(Target::Trailers(&mut trailers), BOUNDS);
        for name in ["host", "grpc-status", "content-length", "x-forwarded-client-cert", "authorization"] {
            reading.field(name.as_bytes(), b"5");
        }
        assert_eq!(reading.finish(), Ok(Some(5)));
        assert_eq!(trailers.iter().collect::<Vec<_>>(), [(&b"grpc-status"[..], &b"5"[..])]);
    }

    #[test]
    fn malformed_requests_are_refused() {
        for fields in [&GET[1..], &GET[..3], &[GET[0], GET[2], GET[3]], &[]] {
            assert_eq!(request(fields).unwrap_err(), HeadError::Malformed, "{fields:?}");
        }
        for more in [
            (":path", "/y"),
            (":status", "200"),
            (":protocol", "websocket"),
            ("X-Upper", "a"),
            ("", "a"),
            ("a b", "a"),
            ("connection", "close"),
            ("transfer-encoding", "chunked"),
            ("te", "gzip"),
            ("a", "b\r\nc: d"),
            ("a", "b\0"),
            ("a", " b"),
            ("a", "b "),
            ("content-length", "-1"),
            ("content-length", "1, 1"),
            ("host", "a/b"),
        ] {
            assert_eq!(with(&[more]).unwrap_err(), HeadError::Malformed, "{more:?}");
        }
        assert_eq!(
            with(&[("content-length", "1"), ("content-length", "1")]).unwrap_err(),
            HeadError::Malformed
        );
        let late = request(&[GET[0], GET[1], GET[2], ("a", "b"), GET[3]]);
        assert_eq!(late.unwrap_err(), HeadError::Malformed);
        for path in ["", "x", "*", "/a b", "/a#b"] {
            let read = request(&[GET[0], GET[1], GET[2], (":path", path)]);
            assert_eq!(read.unwrap_err(), HeadError::Malformed, "{path:?}");
        }
        assert_eq!(with(&[("a", ""); 11]).unwrap_err(), HeadError::TooMany);
        let long = "a".repeat(1000);
        let mut all = GET.to_vec();
        all.push(("a", &long));
        assert_eq!(request(&all).unwrap_err(), HeadError::TooLarge);
    }
}
