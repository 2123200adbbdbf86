//! Parser of heads.
//!
//! A head is parsed once, when it is complete. [`Scan`] finds its end in one pass, however the bytes arrive. The head
//! is then copied and indexed. Sources are sections of RFC 9112 unless noted otherwise.

use std::{ops::Range, sync::LazyLock};

use memchr::memmem::Finder;

use super::Framing;
use crate::head::{self, Headers, RequestHead, ResponseHead, Scheme, Version};

/// Limits on a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Maximum size in bytes.
    pub max_head: usize,
    /// Maximum number of header fields.
    pub max_headers: u32,
    /// Whether the head keeps the original case of the field names.
    pub keep_case: bool,
}

/// Reason for the refusal of a message, as Envoy's response code details, and the status of the response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Status: 400, 408, 426, 431, 501 or 505.
    pub status: u16,
    /// Response code details, such as `http1.codec_error` or `http1.unexpected_transfer_encoding`.
    pub reason: &'static str,
}

impl Malformed {
    /// Returns a refusal with this status and these details.
    #[inline]
    pub const fn new(status: u16, reason: &'static str) -> Self {
        Self { status, reason }
    }
}

/// Options of `connection` and related fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionOptions {
    /// The sender closes the connection after this message.
    pub close: bool,
    /// The sender requests or accepts another protocol: `connection: upgrade` with `upgrade`.
    pub upgrade: bool,
}

/// End of a head.
static END: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\r\n\r\n"));

/// Search for the end of a head while bytes arrive.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scan {
    /// Number of bytes that have been searched.
    at: usize,
    /// Start of the current line.
    line: usize,
    /// A line that is not empty has been found, so the message has begun.
    begun: bool,
}

impl Scan {
    /// Returns the length of the head with its empty line, if it is complete. Empty lines before the head are part of
    /// it (2.2).
    ///
    /// # Errors
    /// A line ends without CR, or the head exceeds the limit. Section 2.2 permits a recipient to accept a bare LF, but
    /// a stricter recipient would then parse another message.
    pub fn end(&mut self, input: &[u8], limits: &HeadLimits) -> Result<Option<usize>, Malformed> {
        // Nearly all heads arrive in one piece. The parser then finds invalid line ends.
        if self.at == 0
            && !input.starts_with(b"\r")
            && let Some(end) = END.find(input)
        {
            if end + 3 >= limits.max_head {
                return Err(Malformed::new(431, "http1.headers_too_large"));
            }
            return Ok(Some(end + 4));
        }
        let from = self.at;
        for found in memchr::memchr_iter(b'\n', &input[from..]) {
            let newline = from + found;
            if newline == 0 || input[newline - 1] != b'\r' {
                return Err(Malformed::new(400, "http1.codec_error"));
            }
            let empty = newline == self.line + 1;
            self.line = newline + 1;
            self.begun |= !empty;
            if empty && self.begun {
                if newline >= limits.max_head {
                    return Err(Malformed::new(431, "http1.headers_too_large"));
                }
                *self = Self::default();
                return Ok(Some(newline + 1));
            }
        }
        self.at = input.len();
        if input.len() >= limits.max_head {
            return Err(Malformed::new(431, "http1.headers_too_large"));
        }
        Ok(None)
    }
}

/// Parses a complete request head, as [`Scan`] found it, into `head`.
///
/// # Errors
/// The head is not well-formed.
pub fn request(
    bytes: &[u8],
    limits: &HeadLimits,
    head: &mut RequestHead,
) -> Result<(Framing, ConnectionOptions), Malformed> {
    head.clear();
    head.load(bytes);
    let (line, rest) = first_line(head.text()).ok_or(BAD)?;
    let (method, target, version) = request_line(head.text(), line)?;
    head.version = version;
    fields(head, rest, limits)?;
    head.load_method(method);
    set_host(head)?;
    set_target(head, target)?;
    let framing = request_framing(head)?;
    // Bytes after the head belong to the tunnel (RFC 9110, section 9.3.6).
    if framing != Framing::None && head.method() == "CONNECT" {
        return Err(BAD);
    }
    head.combine_repeated();
    let connection = connection(head, version)?;
    if head.has("connection") && names_others(head) {
        return Err(REJECTED);
    }
    if limits.keep_case {
        head.keep_case(bytes);
    }
    Ok((framing, connection))
}

/// Parses a complete response head, as [`Scan`] found it, into `head`.
///
/// # Errors
/// The head is not well-formed.
pub fn response(
    bytes: &[u8],
    limits: &HeadLimits,
    to_method: &str,
    head: &mut ResponseHead,
) -> Result<(Framing, ConnectionOptions), Malformed> {
    head.clear();
    head.load(bytes);
    let (line, rest) = first_line(head.text()).ok_or(BAD)?;
    let (version, status) = status_line(&head.text()[line])?;
    head.version = version;
    head.set_status(status);
    fields(head, rest, limits)?;
    let framing = response_framing(head, to_method)?;
    head.combine_repeated();
    let mut connection = connection(head, version)?;
    connection.close |= framing == Framing::UntilClose;
    if limits.keep_case {
        head.keep_case(bytes);
    }
    Ok((framing, connection))
}

/// Parses trailer fields: lines, without the empty one that ends them.
///
/// # Errors
/// A field is not well-formed, or is not allowed in trailers.
#[inline]
pub fn trailers(bytes: &[u8], limits: &HeadLimits, into: &mut Headers) -> Result<(), Malformed> {
    into.load(bytes);
    fields(into, 0, limits)?;
    if into.iter().any(|(name, _)| is_forbidden_in_trailers(name)) {
        return Err(BAD);
    }
    head::combine_answered(into);
    Ok(())
}

/// Returns whether a field is not allowed in trailers, because it concerns the framing, routing or content format of
/// the message or identifies its sender (RFC 9110, section 6.5.1).
pub fn is_forbidden_in_trailers(name: &[u8]) -> bool {
    const NEVER: [&[u8]; 12] = [
        b"content-length",
        b"transfer-encoding",
        b"host",
        b"connection",
        b"te",
        b"trailer",
        b"content-encoding",
        b"content-type",
        b"authorization",
        b"x-forwarded-client-cert",
        b"x-forwarded-for",
        b"x-envoy-peer-metadata",
    ];
    NEVER.contains(&name)
}

/// Maximum number of options in `connection`, as in Envoy. Each is compared with the names of all fields.
const MAX_OPTIONS: usize = 9;
const REJECTED: Malformed = Malformed::new(400, "http1.connection_header_rejected");
const BAD: Malformed = Malformed::new(400, "http1.codec_error");
const BAD_TARGET: Malformed = Malformed::new(400, "http1.invalid_url");

/// Returns the first line that is not empty, and the start of the next line.
fn first_line(text: &[u8]) -> Option<(Range<usize>, usize)> {
    let mut start = 0;
    while text[start..].starts_with(b"\r\n") {
        start += 2;
    }
    let end = start + memchr::memchr(b'\r', &text[start..])?;
    (text.get(end + 1) == Some(&b'\n')).then_some((start..end, end + 2))
}

fn request_line(text: &[u8], line: Range<usize>) -> Result<(Range<usize>, Range<usize>, Version), Malformed> {
    let bytes = &text[line.clone()];
    let method_end = memchr::memchr(b' ', bytes).ok_or(BAD)?;
    let target_end = memchr::memrchr(b' ', bytes).ok_or(BAD)?;
    if method_end == 0 || method_end > 64 || !bytes[..method_end].iter().all(|b| is_token(*b)) {
        return Err(Malformed::new(400, "http1.invalid_method"));
    }
    if target_end <= method_end + 1 {
        return Err(BAD_TARGET);
    }
    let version = match &bytes[target_end + 1..] {
        b"HTTP/1.1" => Version::Http11,
        b"HTTP/1.0" => Version::Http10,
        [b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', b'.', b'0'..=b'9'] => {
            return Err(Malformed::new(505, "http1.unsupported_version"));
        }
        _ => return Err(BAD),
    };
    // White space and control characters are not allowed (3.2). The normalisation of the path refuses a fragment.
    let target = &bytes[method_end + 1..target_end];
    if target.iter().any(|b| *b <= b' ' || *b == 0x7f) {
        return Err(BAD_TARGET);
    }
    let at = line.start;
    Ok((at..at + method_end, at + method_end + 1..at + target_end, version))
}

fn status_line(line: &[u8]) -> Result<(Version, u16), Malformed> {
    let (version, rest) = match line {
        [b'H', b'T', b'T', b'P', b'/', b'1', b'.', b'1', b' ', rest @ ..] => (Version::Http11, rest),
        [b'H', b'T', b'T', b'P', b'/', b'1', b'.', b'0', b' ', rest @ ..] => (Version::Http10, rest),
        _ => return Err(BAD),
    };
    // The reason phrase may be missing, and so may the space before it, which some servers omit (4).
    let (code, reason) = rest.split_at_checked(3).ok_or(BAD)?;
    if !matches!(reason.first(), None | Some(b' ')) || reason.iter().any(|b| !is_value(*b)) {
        return Err(BAD);
    }
    match code {
        [a @ b'1'..=b'9', b @ b'0'..=b'9', c @ b'0'..=b'9'] => {
            Ok((version, u16::from(a - b'0') * 100 + u16::from(b - b'0') * 10 + u16::from(c - b'0')))
        }
        _ => Err(BAD),
    }
}

/// Parses the field lines from `at` to the empty line or the end. Each byte is read once.
fn fields(headers: &mut Headers, mut at: usize, limits: &HeadLimits) -> Result<(), Malformed> {
    let bad = Malformed::new(400, "http1.invalid_characters");
    while at < headers.text().len() {
        let text = headers.text_mut();
        if text[at] == b'\r' {
            return if text.get(at + 1) == Some(&b'\n') { Ok(()) } else { Err(BAD) };
        }
        // White space before the colon (5.1) or at the start of a line (obs-fold, 5.2) is not part of a token: refused.
        let colon = lower_name(text, at);
        if colon == at || text.get(colon) != Some(&b':') {
            return Err(bad);
        }
        let end = value_end(text, colon + 1).ok_or(BAD)?;
        if text[end] != b'\r' || text.get(end + 1) != Some(&b'\n') {
            return Err(bad);
        }
        let (mut from, mut to) = (colon + 1, end);
        while from < to && is_blank(text[from]) {
            from += 1;
        }
        while from < to && is_blank(text[to - 1]) {
            to -= 1;
        }
        if headers.len() >= limits.max_headers as usize {
            return Err(Malformed::new(431, "http1.too_many_headers"));
        }
        headers.index_field(at..colon, from..to);
        at = end + 2;
    }
    Ok(())
}

/// Converts a name to lower case. Returns its end: the first byte that is not part of a token.
pub(super) fn lower_name(text: &mut [u8], mut at: usize) -> usize {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const HIGH: u64 = ONES << 7;
    loop {
        // Tests eight bytes at a time. The sum of a byte and `0x80 - x` has its high bit set if the byte is at least x.
        while let Some(bytes) = text[at..].first_chunk_mut::<8>() {
            let block = u64::from_le_bytes(*bytes);
            let ascii = block & !HIGH;
            let from = |byte: u64, limit: u8| byte + ONES * u64::from(0x80 - limit);
            let upper = from(ascii, b'A') & !from(ascii, b'Z' + 1) & HIGH;
            let lower = ascii | upper >> 2;
            let letter = from(lower, b'a') & !from(lower, b'z' + 1);
            let dash = !from(lower ^ (ONES * u64::from(b'-')), 1);
            let other = !((letter | dash) & !block) & HIGH;
            if other == 0 {
                *bytes = lower.to_le_bytes();
                at += 8;
                continue;
            }
            let known = other.trailing_zeros() / 8;
            let mask = (1_u64 << (known * 8)) - 1;
            *bytes = (lower & mask | block & !mask).to_le_bytes();
            at += known as usize;
            break;
        }
        match text.get_mut(at) {
            Some(byte) if TOKEN[usize::from(*byte)] != 0 => *byte = TOKEN[usize::from(*byte)],
            _ => return at,
        }
        at += 1;
    }
}

/// Returns whether these bytes may be a field value.
#[inline]
pub fn is_field_value(value: &[u8]) -> bool {
    value_end(value, 0).is_none()
}

/// Returns the position of the first byte that a value may not contain, which need not be the end of the line.
fn value_end(text: &[u8], mut at: usize) -> Option<usize> {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const HIGH: u64 = ONES << 7;
    // Tests eight bytes at a time. A borrow marks bytes below a space, and DEL (7f). A tab is marked too, and accepted.
    while let Some(block) = text[at..].first_chunk::<8>() {
        let block = u64::from_le_bytes(*block);
        let delete = block ^ (ONES * 0x7f);
        let found = (block.wrapping_sub(ONES * 0x20) & !block | delete.wrapping_sub(ONES) & !delete) & HIGH;
        if found == 0 {
            at += 8;
            continue;
        }
        at += found.trailing_zeros() as usize / 8;
        if is_value(text[at]) {
            at += 1;
        } else {
            return Some(at);
        }
    }
    text[at..].iter().position(|b| !is_value(*b)).map(|more| at + more)
}

/// Moves the `host` field to the authority. HTTP/1.1 requires exactly one (3.2).
fn set_host(head: &mut RequestHead) -> Result<(), Malformed> {
    if head.may_repeat("host") && head.header_values("host").nth(1).is_some() {
        return Err(BAD);
    }
    match head.load_authority() {
        Some(true) => Ok(()),
        Some(false) => Err(Malformed::new(400, "http1.invalid_authority")),
        None if head.version == Version::Http10 => Ok(()),
        None => Err(Malformed::new(400, "missing_host_header")),
    }
}

/// Parses the four forms of a target (3.2).
fn set_target(head: &mut RequestHead, at: Range<usize>) -> Result<(), Malformed> {
    let target = &head.text()[at.clone()];
    let connect = head.method() == "CONNECT";
    if !connect && (target.starts_with(b"/") || (target == b"*" && head.method() == "OPTIONS")) {
        return if head.load_path(at) { Ok(()) } else { Err(BAD_TARGET) };
    }
    let target = str::from_utf8(target).map_err(|_| BAD_TARGET)?.to_owned();
    let target = target.as_str();
    if connect {
        // In an IPv6 address without brackets, the last part is not a port.
        let (host, port) = target.rsplit_once(':').ok_or(BAD_TARGET)?;
        let bare = host.contains(':') && !host.ends_with(']');
        if host.is_empty() || bare || !head::is_authority(target.as_bytes()) || port.parse::<u16>().is_err() {
            return Err(BAD_TARGET);
        }
        head.set_authority(target);
        return Ok(());
    }
    let (scheme, rest) = target.split_once("://").ok_or(BAD_TARGET)?;
    if scheme.eq_ignore_ascii_case("https") {
        head.set_scheme(Scheme::Https);
    } else if !scheme.eq_ignore_ascii_case("http") {
        return Err(BAD_TARGET);
    }
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if head::as_authority(authority.as_bytes()).is_none() {
        return Err(BAD_TARGET);
    }
    // The authority of the target replaces the `Host` field (3.2.2).
    head.set_authority(authority);
    match path {
        "" => head.set_path("/"),
        path if path.starts_with('?') => head.set_path(&format!("/{path}")),
        path => head.set_path(path),
    }
    Ok(())
}

/// Returns the framing of a request (6.3). An ambiguous message is refused.
fn request_framing(head: &RequestHead) -> Result<Framing, Malformed> {
    let length = content_length(head)?;
    if !head.has("transfer-encoding") {
        return Ok(match length {
            None | Some(0) => Framing::None,
            Some(length) => Framing::Length(length),
        });
    }
    if length.is_some() {
        return Err(Malformed::new(400, "http1.content_length_and_chunked_not_allowed"));
    }
    if head.version == Version::Http10 {
        return Err(Malformed::new(400, "http1.transfer_encoding_not_allowed"));
    }
    only_chunked(head)?;
    Ok(Framing::Chunked)
}

fn response_framing(head: &ResponseHead, to_method: &str) -> Result<Framing, Malformed> {
    let length = content_length(head)?;
    let encoded = head.has("transfer-encoding");
    if encoded && (length.is_some() || head.version == Version::Http10) {
        return Err(Malformed::new(400, "http1.content_length_and_chunked_not_allowed"));
    }
    if encoded {
        only_chunked(head)?;
    }
    let status = head.status();
    if to_method == "HEAD" || status < 200 || status == 204 || status == 304 {
        return Ok(Framing::None);
    }
    if to_method == "CONNECT" && status < 300 {
        return Ok(Framing::None);
    }
    Ok(match length {
        _ if encoded => Framing::Chunked,
        Some(0) => Framing::None,
        Some(length) => Framing::Length(length),
        None => Framing::UntilClose,
    })
}

/// Parses `content-length`: one field, one number, digits only. Lists of equal numbers (6.3) are refused.
fn content_length(headers: &Headers) -> Result<Option<u64>, Malformed> {
    let mut values = headers.header_values("content-length");
    let Some(value) = values.next() else { return Ok(None) };
    let number = length(value).filter(|_| values.next().is_none());
    number.map(Some).ok_or(Malformed::new(400, "http1.unexpected_content_length"))
}

/// Parses a length of at most 18 digits.
#[inline]
pub fn length(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > 18 {
        return None;
    }
    value.iter().try_fold(0_u64, |number, digit| {
        digit.is_ascii_digit().then(|| number * 10 + u64::from(digit - b'0'))
    })
}

/// Fails unless the only transfer coding is `chunked`; others are not implemented (6.1).
fn only_chunked(headers: &Headers) -> Result<(), Malformed> {
    let mut values = headers.header_values("transfer-encoding");
    let known = values.next().is_some_and(|value| value.eq_ignore_ascii_case(b"chunked"));
    if known && values.next().is_none() {
        Ok(())
    } else {
        Err(Malformed::new(501, "http1.invalid_transfer_encoding"))
    }
}

/// Parses `connection` (section 9).
fn connection(headers: &Headers, version: Version) -> Result<ConnectionOptions, Malformed> {
    let (mut close, mut keep, mut upgrade, mut options) = (false, false, false, 0);
    for token in headers.header_values("connection").flat_map(|value| value.split(|b| *b == b',')) {
        options += 1;
        let token = token.trim_ascii();
        close |= token.eq_ignore_ascii_case(b"close");
        keep |= token.eq_ignore_ascii_case(b"keep-alive");
        upgrade |= token.eq_ignore_ascii_case(b"upgrade");
    }
    if options > MAX_OPTIONS {
        return Err(REJECTED);
    }
    Ok(ConnectionOptions {
        close: close || (version == Version::Http10 && !keep),
        upgrade: upgrade && version == Version::Http11 && headers.has("upgrade"),
    })
}

/// Returns whether `connection` names an end-to-end field, or a field in which proxies describe the client. Fields that
/// it names are removed, so it may name only those of this connection (RFC 9110, section 7.6.1).
fn names_others(headers: &Headers) -> bool {
    const OTHERS: [&[u8]; 5] =
        [b"host", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-client-cert"];
    let mut tokens = headers.header_values("connection").flat_map(|value| value.split(|b| *b == b','));
    tokens.any(|token| {
        let token = token.trim_ascii();
        token.starts_with(b":") || OTHERS.iter().any(|other| token.eq_ignore_ascii_case(other))
    })
}

fn is_blank(b: u8) -> bool {
    matches!(b, b' ' | b'\t')
}

/// Bytes of tokens in lower case; 0 for all others. Source: RFC 9110, section 5.6.2.
const TOKEN: [u8; 256] = {
    let mut table = [0; 256];
    let mut byte = 0_u8;
    while byte < 128 {
        let others = matches!(
            byte,
            b'!' | b'#'..=b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~'
        );
        if others || byte.is_ascii_alphanumeric() {
            table[byte as usize] = byte.to_ascii_lowercase();
        }
        byte += 1;
    }
    table
};

/// Returns whether a token may contain a byte.
#[inline]
pub fn is_token(b: u8) -> bool {
    TOKEN[usize::from(b)] != 0
}

/// Returns whether a token in lower case may contain a byte.
#[inline]
pub fn is_lower_token(b: u8) -> bool {
    b != 0 && TOKEN[usize::from(b)] == b
}

/// Returns whether a value may contain a byte (RFC 9110, section 5.5): no control characters but the tab.
#[inline]
pub fn is_value(b: u8) -> bool {
    b >= b' ' && b != 0x7f || b == b'\t'
}
