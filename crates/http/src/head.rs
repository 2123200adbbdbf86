//! Heads of requests and responses, as every codec fills them and every decision reads them. Buffers live as long as the
//! connection, so that a request allocates nothing here. Pseudo-headers of HTTP/2 are fields of their own.

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

/// Which HTTP a message came in by.
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
    /// As the access log writes it: `HTTP/1.1`, `HTTP/2`.
    #[inline]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http10 => "HTTP/1.0",
            Self::Http11 => "HTTP/1.1",
            Self::Http2 => "HTTP/2",
        }
    }
}

/// What a client asks.
#[derive(Debug, Default, PartialEq)]
pub struct RequestHead {
    method: String,
    path: String,
    authority: String,
    scheme: Scheme,
    /// Which HTTP it came in by.
    pub version: Version,
    headers: Headers,
}

impl Clone for RequestHead {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.clone_from(self);
        copy
    }

    /// Makes this a copy of another, with the memory that this one has.
    fn clone_from(&mut self, from: &Self) {
        let Self { method, path, authority, scheme, version, headers } = from;
        self.method.clone_from(method);
        self.path.clone_from(path);
        self.authority.clone_from(authority);
        (self.scheme, self.version) = (*scheme, *version);
        self.headers.clone_from(headers);
    }
}

/// What a server answers.
#[derive(Clone, Debug, Default)]
pub struct ResponseHead {
    status: u16,
    /// Which HTTP it came in by.
    pub version: Version,
    headers: Headers,
}

/// The scheme of a request's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Scheme {
    /// `http`.
    #[default]
    Http,
    /// `https`.
    Https,
}

/// Heads that are not used any more, kept for their memory, of one thread.
struct Spares {
    requests: Vec<RequestHead>,
    answers: Vec<ResponseHead>,
}

thread_local! {
    static SPARES: RefCell<Spares> = const { RefCell::new(Spares { requests: Vec::new(), answers: Vec::new() }) };
}

/// Heads of each kind that a thread keeps.
const SPARE: usize = 64;

impl RequestHead {
    /// An empty head, if possible with the memory of one that was given to [`Self::recycle`].
    #[inline]
    pub fn spare() -> Self {
        SPARES.with(|spares| spares.borrow_mut().requests.pop()).unwrap_or_default()
    }

    /// Bytes of text.
    #[inline]
    pub fn size(&self) -> usize {
        self.method.len() + self.path.len() + self.authority.len() + self.headers.text().len()
    }

    /// A copy, if possible with the memory of a head that was given to [`Self::recycle`].
    #[inline]
    pub fn copy(&self) -> Self {
        let mut copy = Self::spare();
        copy.clone_from(self);
        copy
    }

    /// Keeps its memory for another.
    #[inline]
    pub fn recycle(mut self) {
        if self.headers.is_worth_keeping() {
            self.clear();
            SPARES.with(|spares| keep(&mut spares.borrow_mut().requests, self));
        }
    }

    /// A head made here rather than read: for requests of our own and for tests.
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

    /// `GET`.
    #[inline]
    pub fn method(&self) -> &str {
        &self.method
    }

    /// Origin form with the query: `/a/b?c=d`. `*` for `OPTIONS *`, empty for `CONNECT`.
    #[inline]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The path up to the query (or a fragment that should not be there).
    #[inline]
    pub fn path_without_query(&self) -> &str {
        let end = self.path.bytes().position(|b| matches!(b, b'?' | b'#')).unwrap_or(self.path.len());
        &self.path[..end]
    }

    /// What follows the first `?`, if there is one.
    #[inline]
    pub fn query(&self) -> Option<&str> {
        let query = self.path.split_once('?')?.1;
        Some(query.split_once('#').map_or(query, |(query, _)| query))
    }

    /// The first cookie of this name, without quotes around its value.
    #[inline]
    pub fn cookie<'a>(&'a self, name: &'a str) -> Option<&'a [u8]> {
        self.cookies(name).next()
    }

    /// All cookies of this name, without quotes around their values.
    #[inline]
    pub fn cookies<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        let pairs = self.header_values("cookie").flat_map(|value| value.split(|byte| *byte == b';'));
        pairs.filter_map(move |pair| {
            let (key, value) = pair.split_at(pair.iter().position(|byte| *byte == b'=')?);
            let value = value[1..].trim_ascii();
            let bare = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
            (key.trim_ascii() == name.as_bytes()).then(|| bare.unwrap_or(value))
        })
    }

    /// What stands in the request's line, or for it, rather than among its fields: `:path`, `host`.
    #[inline]
    pub fn apart(&self, name: &str) -> Option<&str> {
        match name {
            ":path" => Some(self.path()),
            ":method" => Some(self.method()),
            ":scheme" => Some(self.scheme()),
            ":authority" | "host" => Some(self.authority()).filter(|authority| !authority.is_empty()),
            _ => None,
        }
    }

    /// `Host` or `:authority`: `reviews:9080`.
    #[inline]
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// `http` or `https`.
    #[inline]
    pub fn scheme(&self) -> &'static str {
        match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    /// Another method.
    #[inline]
    pub fn set_method(&mut self, method: &str) {
        replace(&mut self.method, method);
    }

    /// Another path, with its query.
    #[inline]
    pub fn set_path(&mut self, path: &str) {
        replace(&mut self.path, path);
    }

    /// Another authority.
    #[inline]
    pub fn set_authority(&mut self, authority: &str) {
        replace(&mut self.authority, authority);
    }

    /// Another scheme.
    #[inline]
    pub fn set_scheme(&mut self, scheme: Scheme) {
        self.scheme = scheme;
    }

    /// The fields alone.
    #[inline]
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Takes the method from the loaded text, which is known to be ASCII there.
    #[inline]
    pub fn load_method(&mut self, range: Range<usize>) {
        let method = match &self.headers.text()[range] {
            b"GET" => "GET",
            b"POST" => "POST",
            other => std::str::from_utf8(other).unwrap_or_default(),
        };
        replace(&mut self.method, method);
    }

    /// Takes the path from the loaded text; false if it is not UTF-8 there.
    #[inline]
    pub fn load_path(&mut self, range: Range<usize>) -> bool {
        let path = std::str::from_utf8(&self.headers.text()[range]);
        path.is_ok_and(|path| {
            replace(&mut self.path, path);
            true
        })
    }

    /// Moves the first `host` field to the authority. `None` if there is no such field, false if it holds no authority.
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

    /// Makes the head ready for another request, keeping the memory.
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
    /// An empty head, if possible with the memory of one that was given to [`Self::recycle`].
    #[inline]
    pub fn spare() -> Self {
        SPARES.with(|spares| spares.borrow_mut().answers.pop()).unwrap_or_default()
    }

    /// Keeps its memory for another.
    #[inline]
    pub fn recycle(mut self) {
        if self.headers.is_worth_keeping() {
            self.clear();
            SPARES.with(|spares| keep(&mut spares.borrow_mut().answers, self));
        }
    }

    /// A head made here rather than read.
    #[inline]
    pub fn build(status: u16, headers: &[(&str, &str)]) -> Self {
        let mut head = Self { status, ..Self::default() };
        for (name, value) in headers {
            head.append(name, value.as_bytes());
        }
        head
    }

    /// `200`.
    #[inline]
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Another status.
    #[inline]
    pub fn set_status(&mut self, status: u16) {
        self.status = status;
    }

    /// The fields alone.
    #[inline]
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Makes the head ready for another response, keeping the memory.
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

/// Whether a value is `uri-host [":" port]` of RFC 3986 without userinfo: a name, an IPv4 address, or an IPv6 address, which may
/// stand without its brackets where no port follows. A port has at most five digits; all else behind the last colon would be a
/// port to some and part of the name to others.
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

/// The same of a value with a colon or a bracket.
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

/// A value as an authority to set; `None` if it is empty or none that a `Host` field could hold.
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
    fn path_and_query_come_apart() {
        let head = |path| RequestHead::build("GET", path, "a", &[]);
        assert_eq!(head("/a?b?c").path_without_query(), "/a");
        assert_eq!(head("/a?b?c").query(), Some("b?c"));
        assert_eq!(head("/a").query(), None);
        assert_eq!(head("/a?").query(), Some(""));
    }

    #[test]
    fn authorities_have_one_reading() {
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
