//! A request, independent of the HTTP version.

use std::fmt::{self, Write as _};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    Http10,
    Http11,
    Http2,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) version: Version,
    pub(crate) method: &'static str,
    pub(crate) path: String,
    /// `host`, or `:authority` in HTTP/2.
    pub(crate) host: String,
    pub(crate) fields: Vec<(String, String)>,
    pub(crate) body: Body,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    None,
    /// With a content-length.
    Whole(String),
    /// Without a content-length; these trailers may follow.
    Pieces(Vec<&'static str>, Vec<(&'static str, &'static str)>),
}

impl Request {
    pub(crate) fn new(version: Version, method: &'static str, path: String, host: String) -> Self {
        Self { version, method, path, host, fields: Vec::new(), body: Body::None }
    }

    pub(crate) fn field(&mut self, name: &str, value: impl Into<String>) {
        self.fields.push((name.to_owned(), value.into()));
    }

    pub(crate) fn asks_for_websocket(&self) -> bool {
        self.fields.iter().any(|(name, value)| name == "upgrade" && value.eq_ignore_ascii_case("websocket"))
    }

    /// Encodes the request for HTTP/1 on a connection that is not reused.
    pub(crate) fn bytes(&self) -> String {
        let mut text = self.head();
        // The default in HTTP/1.0.
        let close = if self.version == Version::Http10 { "" } else { "connection: close\r\n" };
        match &self.body {
            Body::None => _ = write!(text, "{close}\r\n"),
            Body::Whole(content) => {
                _ = write!(text, "{close}content-length: {}\r\n\r\n{content}", content.len());
            }
            Body::Pieces(pieces, trailers) => {
                _ = write!(text, "{close}transfer-encoding: chunked\r\n\r\n");
                for piece in pieces {
                    _ = write!(text, "{:x}\r\n{piece}\r\n", piece.len());
                }
                text.push_str("0\r\n");
                for (name, value) in trailers {
                    _ = write!(text, "{name}: {value}\r\n");
                }
                text.push_str("\r\n");
            }
        }
        text
    }

    fn head(&self) -> String {
        let version = match self.version {
            Version::Http10 => "HTTP/1.0",
            Version::Http11 => "HTTP/1.1",
            Version::Http2 => "HTTP/2",
        };
        let mut head = format!("{} {} {version}\r\nhost: {}\r\n", self.method, self.path, self.host);
        for (name, value) in &self.fields {
            _ = write!(head, "{name}: {value}\r\n");
        }
        head
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}{:?}", self.head(), self.body)
    }
}
