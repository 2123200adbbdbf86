//! What a connection begins with: a TLS client hello, HTTP/1, the preface of HTTP/2, or something else.
//!
//! Pure functions over the bytes so far. Sources: Envoy's listener filters `tls_inspector` and `http_inspector`.

use rustls::server::Acceptor;

use crate::config::listener::Transport;

/// What the first bytes told.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Plain or TLS.
    pub(crate) transport: Option<Transport>,
    /// The server name of a client hello, in lower case.
    pub(crate) server_name: Option<Box<str>>,
    /// The protocols a client hello offers, or the one HTTP version found.
    pub(crate) protocols: Vec<Box<[u8]>>,
}

/// What a look at the bytes so far leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// More bytes are needed.
    More,
    /// It is known.
    Known,
    /// TLS that cannot be read: the connection is closed.
    Broken,
}

/// A first line that goes on for longer is HTTP's if it begins as one: nothing may evade what is configured for HTTP by a
/// long path.
const MAX_LINE: usize = 8 * 1024;
/// Longer words are no methods.
const MAX_METHOD: usize = 32;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Looks for a client hello.
pub(crate) fn tls(bytes: &[u8], findings: &mut Findings) -> Look {
    // A handshake record (22) of version 3.x; RFC 8446, section 5.1.
    match bytes {
        [] => return Look::More,
        [22] | [22, 3] => return Look::More,
        [22, 3, ..] => {}
        _ => {
            findings.transport = Some(Transport::RawBuffer);
            return Look::Known;
        }
    }
    let mut acceptor = Acceptor::default();
    let mut rest = bytes;
    while !rest.is_empty() {
        if acceptor.read_tls(&mut rest).is_err() {
            return Look::Broken;
        }
        match acceptor.accept() {
            Ok(None) => {}
            Ok(Some(accepted)) => {
                let hello = accepted.client_hello();
                findings.transport = Some(Transport::Tls);
                findings.server_name = hello.server_name().map(|name| name.to_ascii_lowercase().into());
                findings.protocols = hello.alpn().into_iter().flatten().map(Box::from).collect();
                return Look::Known;
            }
            Err(_) => return Look::Broken,
        }
    }
    Look::More
}

/// Looks for HTTP.
pub(crate) fn http(bytes: &[u8], findings: &mut Findings) -> Look {
    let shared = bytes.len().min(PREFACE.len());
    if bytes[..shared] == PREFACE[..shared] {
        if shared < PREFACE.len() {
            return Look::More;
        }
        findings.protocols = vec![(*b"h2c").into()];
        return Look::Known;
    }
    // Servers pass over empty lines, and blanks, before the first line, and take any white space in it for a space. None of
    // that must make another protocol of it, nor in how many pieces it comes.
    let start = bytes.iter().position(|b| !is_white(*b)).unwrap_or(bytes.len());
    let text = &bytes[start..];
    let end = memchr::memchr(b'\n', text);
    let mut words = text[..end.unwrap_or(text.len())].split(|b| is_white(*b)).filter(|word| !word.is_empty());
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let is_method = method.len() <= MAX_METHOD && method.iter().all(|b| crate::http1::parse::is_token(*b));
    let is_long = start >= MAX_LINE || end.map_or(bytes.len(), |end| start + end) >= MAX_LINE;
    let version: &[u8] = match (end, words.next_back().unwrap_or_default()) {
        _ if start < MAX_LINE && !is_method => return Look::Known,
        _ if is_long => b"http/1.1",
        (None, _) => return Look::More,
        (Some(_), b"HTTP/1.0") => b"http/1.0",
        (Some(_), version) if version.starts_with(b"HTTP/") => b"http/1.1",
        // As long ago, without a version.
        _ if method == b"GET" && target.starts_with(b"/") => b"http/1.1",
        _ => return Look::Known,
    };
    findings.protocols = vec![version.into()];
    Look::Known
}

fn is_white(b: u8) -> bool {
    matches!(b, b' ' | b'\t'..=b'\r')
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn hello(name: &str, protocols: &[&[u8]]) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|p| p.to_vec()).collect();
        let name = name.to_owned().try_into().unwrap();
        let mut session = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        session.write_tls(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_client_hello_is_read_once_it_is_whole() {
        let bytes = hello("Outbound_.80_._.A.b", &[b"istio-http/1.1", b"istio"]);
        for end in 0..bytes.len() {
            assert_eq!(tls(&bytes[..end], &mut Findings::default()), Look::More, "{end}");
        }
        let mut findings = Findings::default();
        assert_eq!(tls(&bytes, &mut findings), Look::Known);
        assert_eq!(findings.transport, Some(Transport::Tls));
        assert_eq!(findings.server_name.as_deref(), Some("outbound_.80_._.a.b"));
        assert_eq!(findings.protocols, [Box::from(&b"istio-http/1.1"[..]), Box::from(&b"istio"[..])]);
    }

    #[test]
    fn other_beginnings_are_told_apart() {
        let look = |bytes: &[u8]| {
            let mut findings = Findings::default();
            let seen = http(bytes, &mut findings);
            (seen, findings.protocols.first().map(|p| String::from_utf8_lossy(p).into_owned()))
        };
        let known = |text: &str| (Look::Known, Some(text.to_owned()));
        assert_eq!(look(b"GET / HTTP/1.1\r\n"), known("http/1.1"));
        assert_eq!(look(b"GET / HTTP/1.0\n"), known("http/1.0"));
        assert_eq!(look(PREFACE), known("h2c"));
        assert_eq!(look(b"PRI * HT"), (Look::More, None));
        assert_eq!(look(b"GE"), (Look::More, None));
        assert_eq!(look(b""), (Look::More, None));
        assert_eq!(look(b"GET / HTTP/1"), (Look::More, None));
        assert_eq!(look(b"EHLO me\r\n"), (Look::Known, None));
        // What cannot become a request is known at once, as its sender may wait for an answer.
        for text in ["{\"a\"", "a@b", "\x00", "\r\n(", "a-word-that-is-too-long-for-a-method"] {
            assert_eq!(look(text.as_bytes()), (Look::Known, None), "{text}");
        }
        for text in ["", "\r", "\r\n\r\n", "OWN", "own ", "own a", "OWN /a", "OPTIONS *", "GET HTTP://a"] {
            assert_eq!(look(text.as_bytes()), (Look::More, None), "{text}");
        }
        for line in [
            "\r\nGET / HTTP/1.1\r\n",
            "\n\n GET / HTTP/1.1\n",
            "GET\t/\tHTTP/1.1\r\n",
            "GET\x0b/\rHTTP/1.1\x0b\n",
            "OWN / HTTP/1.1\r\n",
            "GET /a b HTTP/1.1\r\n",
            "GET / HTTP/1.2\r\n",
            "GET / HTTP/2.0\r\n",
            "GET /\r\n",
        ] {
            assert_eq!(look(line.as_bytes()), known("http/1.1"), "{line}");
        }
        assert_eq!(look(b"GET key\r\n"), (Look::Known, None));
        assert_eq!(look(b"OPTIONS rtsp://a RTSP/1.0\r\n"), (Look::Known, None));
        let long = format!("GET /{}", "a".repeat(MAX_LINE));
        assert_eq!(look(&long.as_bytes()[..MAX_LINE - 1]), (Look::More, None));
        assert_eq!(look(long.as_bytes()), known("http/1.1"));
        assert_eq!(look(b"\x00\x01"), (Look::Known, None));
        assert_eq!(look(b"*1\r\n$4\r\nPING\r\n"), (Look::Known, None));
        assert_eq!(tls(b"GET", &mut Findings::default()), Look::Known);
        assert_eq!(tls(b"\x16\x03\x01\x00\x05hello and more", &mut Findings::default()), Look::Broken);
    }
}
