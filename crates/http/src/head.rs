//! Heads of requests and responses. Every codec fills them, and every decision reads them. Later messages reuse their
//! memory, so that a request allocates nothing. The pseudo-header fields of HTTP/2 are fields of the
//! structs.

mod case;
mod combined;
mod fields;

use std::{
    cell::RefCell,
    net::Ipv6Addr,
    ops::{Deref, DerefMut, Range},
};

pub use combined::combine_answered;
pub use fields::Headers;
pub use fields::Names;

/// HTTP version of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Version {
    /// HTTP/1.0.
    Http10,
    /// HTTP/1.1.
    #[default]
    Http11,
    /// HTTP/2.
    Http2,
}

impl Version {
    /// Returns the version as the access log writes it: `HTTP/1.1`, `HTTP/2`.
    #[inline]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http10 => "HTTP/1.0",
            Self::Http11 => "HTTP/1.1",
            Self::Http2 => "HTTP/2",
        }
    }
}

/// Head of a request.
#[derive(Debug, Default, PartialEq)]
pub struct RequestHead {
    method: String,
    path: String,
    authority: String,
    scheme: Scheme,
    /// HTTP version of the received message.
    pub version: Version,
    headers: Headers,
}

impl Clone for RequestHead {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.clone_from(self);
        copy
    }

    /// Copies another head into the memory of this one.
    fn clone_from(&mut self, from: &Self) {
        let Self { method, path, authority, scheme, version, headers } = from;
        self.method.clone_from(method);
        self.path.clone_from(path);
        self.authority.clone_from(authority);
        (self.scheme, self.version) = (*scheme, *version);
        self.headers.clone_from(headers);
    }
}

/// Head of a response.
#[derive(Clone, Debug, Default)]
pub struct ResponseHead {
    status: u16,
    /// HTTP version of the received message.
    pub version: Version,
    headers: Headers,
}

/// Scheme of a request's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Scheme {
    /// `http`.
    #[default]
    Http,
    /// `https`.
    Https,
}

/// Unused heads of a thread, kept for their memory.
struct HeadPool {
    requests: Vec<RequestHead>,
    answers: Vec<ResponseHead>,
}

thread_local! {
    static SPARES: RefCell<HeadPool> = const { RefCell::new(HeadPool { requests: Vec::new(), answers: Vec::new() }) };
}

/// Maximum number of unused heads of each kind that a thread keeps.
const SPARE: usize = 64;

impl RequestHead {
    /// Returns an empty head, if possible with the memory of a head from [`Self::recycle`].
    #[inline]
    pub fn spare() -> Self {
        SPARES.with(|spares| spares.borrow_mut().requests.pop()).unwrap_or_default()
    }

    /// Returns the length of all texts in bytes.
    #[inline]
    pub fn size(&self) -> usize {
        self.method.len() + self.path.len() + self.authority.len() + self.headers.text().len()
    }

    /// Returns a copy, if possible with the memory of a head from [`Self::recycle`].
    #[inline]
    pub fn copy(&self) -> Self {
        let mut copy = Self::spare();
        copy.clone_from(self);
        copy
    }

    /// Keeps the memory for another head.
    #[inline]
    pub fn recycle(mut self) {
        if self.headers.is_worth_keeping() {
            self.clear();
            SPARES.with(|spares| keep(&mut spares.borrow_mut().requests, self));
        }
    }

    /// Builds a head, for requests of the proxy itself and for tests.
    #[inline]
    pub fn build(method: &str, path: &str, authority: &str, headers: &[(&str, &str)]) -> Self {
        let mut head = Self::default();
        head.set_method(method);
        head.set_path(path);
        head.set_authority(authority);
        for (name, value) in headers {
            head.append(name, value.as_bytes());
        }
        head
    }

    /// Returns the method, such as `GET`.
    #[inline]
    pub fn method(&self) -> &str {
        &self.method
    }

    /// Returns the path with the query, `/a/b?c=d`. It is `*` for `OPTIONS *`, and empty for `CONNECT`.
    #[inline]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the path without the query and without a fragment, which a request must not have.
    #[inline]
    pub fn path_without_query(&self) -> &str {
        let end = self.path.bytes().position(|b| matches!(b, b'?' | b'#')).unwrap_or(self.path.len());
        &self.path[..end]
    }

    /// Returns the query: the text after the first `?`.
    #[inline]
    pub fn query(&self) -> Option<&str> {
        let query = self.path.split_once('?')?.1;
        Some(query.split_once('#').map_or(query, |(query, _)| query))
    }

    /// Returns the first cookie with this name, without quotes around its value.
    #[inline]
    pub fn cookie<'a>(&'a self, name: &'a str) -> Option<&'a [u8]> {
        self.cookies(name).next()
    }

    /// Returns all cookies with this name, without quotes around their values.
    #[inline]
    pub fn cookies<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let pairs = self.header_values("cookie").flat_map(|value| value.split(|byte| *byte == b';'));
        pairs.filter_map(move |pair| {
            let (key, value) = pair.split_at(pair.iter().position(|byte| *byte == b'=')?);
            let value = value[1..].trim_ascii();
            let bare = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
            (key.trim_ascii() == name.as_bytes()).then(|| bare.unwrap_or(value))
        })
    }

    /// Returns the value of a header that is not stored as a field, such as `:path` or `host`.
    #[inline]
    pub fn pseudo_header(&self, name: &str) -> Option<&str> {
        match name {
            ":path" => Some(self.path()),
            ":method" => Some(self.method()),
            ":scheme" => Some(self.scheme()),
            ":authority" | "host" => Some(self.authority()).filter(|authority| !authority.is_empty()),
            _ => None,
        }
    }

    /// Returns `Host` or `:authority`, such as `reviews:9080`.
    #[inline]
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Returns the scheme, `http` or `https`.
    #[inline]
    pub fn scheme(&self) -> &'static str {
        match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    /// Sets the method.
    #[inline]
    pub fn set_method(&mut self, method: &str) {
        replace(&mut self.method, method);
    }

    /// Sets the path with the query.
    #[inline]
    pub fn set_path(&mut self, path: &str) {
        replace(&mut self.path, path);
    }

    /// Sets the authority.
    #[inline]
    pub fn set_authority(&mut self, authority: &str) {
        replace(&mut self.authority, authority);
    }

    /// Sets the field of this name to the path with the query.
    pub fn copy_path_to(&mut self, name: &str) {
        self.headers.set(name, self.path.as_bytes());
    }

    /// Sets the field of this name to the authority.
    pub fn copy_authority_to(&mut self, name: &str) {
        self.headers.set(name, self.authority.as_bytes());
    }

    /// Sets the scheme.
    #[inline]
    pub fn set_scheme(&mut self, scheme: Scheme) {
        self.scheme = scheme;
    }

    /// Returns the fields.
    #[inline]
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Sets the method from a range of the loaded text that is known to be ASCII.
    #[inline]
    pub fn load_method(&mut self, range: Range<usize>) {
        let method = match &self.headers.text()[range] {
            b"GET" => "GET",
            b"POST" => "POST",
            other => std::str::from_utf8(other).unwrap_or_default(),
        };
        replace(&mut self.method, method);
    }

    /// Sets the path from the loaded text; returns false if it is not UTF-8.
    #[inline]
    pub fn load_path(&mut self, range: Range<usize>) -> bool {
        let path = std::str::from_utf8(&self.headers.text()[range]);
        path.is_ok_and(|path| {
            replace(&mut self.path, path);
            true
        })
    }

    /// Moves the first `host` field to the authority. Returns `None` if there is none, and false if it is no
    /// authority.
    #[inline]
    pub fn load_authority(&mut self) -> Option<bool> {
        let host = self.headers.take_first("host")?;
        let host = &self.headers.text()[host];
        if !is_authority(host) {
            return Some(false);
        }
        replace(&mut self.authority, std::str::from_utf8(host).unwrap_or_default());
        Some(true)
    }

    /// Clears the head for another request; keeps the memory.
    #[inline]
    pub fn clear(&mut self) {
        self.method.clear();
        self.path.clear();
        self.authority.clear();
        self.headers.clear();
        self.scheme = Scheme::Http;
        self.version = Version::Http11;
    }
}

impl ResponseHead {
    /// Returns an empty head, if possible with the memory of a head from [`Self::recycle`].
    #[inline]
    pub fn spare() -> Self {
        SPARES.with(|spares| spares.borrow_mut().answers.pop()).unwrap_or_default()
    }

    /// Keeps the memory for another head.
    #[inline]
    pub fn recycle(mut self) {
        if self.headers.is_worth_keeping() {
            self.clear();
            SPARES.with(|spares| keep(&mut spares.borrow_mut().answers, self));
        }
    }

    /// Builds a head.
    #[inline]
    pub fn build(status: u16, headers: &[(&str, &str)]) -> Self {
        let mut head = Self { status, ..Self::default() };
        for (name, value) in headers {
            head.append(name, value.as_bytes());
        }
        head
    }

    /// Returns the status, such as `200`.
    #[inline]
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Sets the status.
    #[inline]
    pub fn set_status(&mut self, status: u16) {
        self.status = status;
    }

    /// Returns the fields.
    #[inline]
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Clears the head for another response; keeps the memory.
    #[inline]
    pub fn clear(&mut self) {
        self.status = 0;
        self.version = Version::Http11;
        self.headers.clear();
    }
}

impl Deref for RequestHead {
    type Target = Headers;

    fn deref(&self) -> &Headers {
        &self.headers
    }
}

impl DerefMut for RequestHead {
    fn deref_mut(&mut self) -> &mut Headers {
        &mut self.headers
    }
}

impl Deref for ResponseHead {
    type Target = Headers;

    fn deref(&self) -> &Headers {
        &self.headers
    }
}

impl DerefMut for ResponseHead {
    fn deref_mut(&mut self) -> &mut Headers {
        &mut self.headers
    }
}

fn keep<T>(spares: &mut Vec<T>, head: T) {
    if spares.len() < SPARE {
        spares.push(head);
    }
}

/// Returns whether a value is `uri-host [":" port]` (RFC 3986) without userinfo. The host is a name, an IPv4 address
/// or an IPv6 address; the latter needs no brackets if there is no port. A port has at most five digits. Parsers
/// differ on other text after the last colon: some take it as a port, others as a part of the name.
pub fn is_authority(value: &[u8]) -> bool {
    const HOST: u8 = 1;
    const MARK: u8 = 2;
    const CLASS: [u8; 256] = {
        let mut table = [0; 256];
        let mut b = 0;
        while b < 128 {
            table[b] = (b as u8).is_ascii_alphanumeric() as u8;
            b += 1;
        }
        let others = b"-._~%!$&'()*+;=";
        let mut at = 0;
        while at < others.len() {
            table[others[at] as usize] = HOST;
            at += 1;
        }
        (table[b':' as usize], table[b'[' as usize], table[b']' as usize]) = (MARK, MARK, MARK);
        table
    };
    let mut seen = 0;
    for b in value {
        let class = CLASS[usize::from(*b)];
        if class == 0 {
            return false;
        }
        seen |= class;
    }
    seen & MARK == 0 || has_port(value)
}

/// As [`is_authority`], for a value with a colon or a bracket.
fn has_port(value: &[u8]) -> bool {
    let is_ipv6 = |text: &[u8]| {
        let text = std::str::from_utf8(text).unwrap_or_default();
        text.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
    };
    let is_port = |text: &[u8]| text.len() <= 5 && text.iter().all(u8::is_ascii_digit);
    if let Some(rest) = value.strip_prefix(b"[") {
        let Some(end) = memchr::memchr(b']', rest) else { return false };
        return is_ipv6(&rest[..end])
            && match &rest[end + 1..] {
                [] => true,
                [b':', port @ ..] => is_port(port),
                _ => false,
            };
    }
    let Some(colon) = value.iter().rposition(|b| *b == b':') else { return false };
    let (host, port) = (&value[..colon], &value[colon + 1..]);
    is_port(port) && !host.iter().any(|b| matches!(b, b':' | b'[' | b']')) || is_ipv6(value)
}

/// Returns a value as an authority; `None` if it is empty or not valid in a `Host` field.
#[inline]
pub fn as_authority(value: &[u8]) -> Option<&str> {
    let valid = !value.is_empty() && is_authority(value);
    std::str::from_utf8(value).ok().filter(|_| valid)
}

fn replace(text: &mut String, with: &str) {
    text.clear();
    text.push_str(with);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_and_query_are_separated() {
        let head = |path| RequestHead::build("GET", path, "a", &[]);
        assert_eq!(head("/a?b?c").path_without_query(), "/a");
        assert_eq!(head("/a?b?c").query(), Some("b?c"));
        assert_eq!(head("/a").query(), None);
        assert_eq!(head("/a?").query(), Some(""));
    }

    #[test]
    fn ambiguous_authorities_are_refused() {
        for valid in [
            "a",
            "a.b",
            "a:80",
            "a:",
            "A-b_c~%20:00080",
            "1.2.3.4:1",
            "[::1]",
            "[::1]:80",
            "[::1]:",
            "::1",
            "*",
        ] {
            assert_eq!(as_authority(valid.as_bytes()), Some(valid));
        }
        for wrong in [
            "", "a b", "a@b", "a/b", "a:x", "a:+1", "a:123456", "a:1:2", "a:80:", "[a]", "[::1", "[::1]x",
            "a[::1]", "]", "é",
        ] {
            assert_eq!(as_authority(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
