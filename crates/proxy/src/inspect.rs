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
/// What a request may begin with; in HTTP/1 methods of one's own would make any text a beginning of a request. Source:
/// IANA's registry of methods, with those that Envoy knows besides.
const METHODS: [&str; 41] = [
    "ACL",
    "BASELINE-CONTROL",
    "BIND",
    "CHECKIN",
    "CHECKOUT",
    "CONNECT",
    "COPY",
    "DELETE",
    "GET",
    "HEAD",
    "LABEL",
    "LINK",
    "LOCK",
    "M-SEARCH",
    "MERGE",
    "MKACTIVITY",
    "MKCALENDAR",
    "MKCOL",
    "MKWORKSPACE",
    "MOVE",
    "NOTIFY",
    "OPTIONS",
    "ORDERPATCH",
    "PATCH",
    "POST",
    "PROPFIND",
    "PROPPATCH",
    "PURGE",
    "PUT",
    "QUERY",
    "REBIND",
    "REPORT",
    "SEARCH",
    "SOURCE",
    "SUBSCRIBE",
    "TRACE",
    "UNBIND",
    "UNLINK",
    "UNLOCK",
    "UNSUBSCRIBE",
    "UPDATE",
];
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
    // An empty line before the first is nothing (RFC 9112, 2.2).
    let bytes = match bytes {
        [b'\r'] => &[],
        [b'\r', b'\n', rest @ ..] | [b'\n', rest @ ..] => rest,
        _ => bytes,
    };
    let line_end = memchr::memchr(b'\n', bytes);
    let line = bytes[..line_end.unwrap_or(bytes.len())].trim_ascii_end();
    // Servers take a tab for a space, so that this must not make another protocol of it.
    let is_blank = |b: &u8| matches!(b, b' ' | b'\t');
    let method = &line[..line.iter().position(is_blank).unwrap_or(line.len())];
    if line_end.is_none() {
        let is_whole = method.len() < line.len();
        let begins =
            |known: &&str| known.as_bytes().starts_with(method) && (!is_whole || known.len() == method.len());
        if !METHODS.iter().any(|known| begins(&known)) {
            return Look::Known;
        }
        if bytes.len() < MAX_LINE {
            return Look::More;
        }
        findings.protocols = vec![(*b"http/1.1").into()];
        return Look::Known;
    }
    let is_method = !method.is_empty() && method.iter().all(|b| crate::http1::parse::is_token(*b));
    for (name, version) in [(b"http/1.1", b"HTTP/1.1"), (b"http/1.0", b"HTTP/1.0")] {
        if is_method && line.strip_suffix(version).and_then(<[u8]>::last).is_some_and(is_blank) {
            findings.protocols = vec![(*name).into()];
        }
    }
    Look::Known
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
        for text in ["hello", "EHLO", "GETX", "GET1", "\r\nhello", "GETX /"] {
            assert_eq!(look(text.as_bytes()), (Look::Known, None), "{text}");
        }
        assert_eq!(look(b"\r"), (Look::More, None));
        assert_eq!(look(b"\r\nGET /"), (Look::More, None));
        assert_eq!(look(b"\r\nGET / HTTP/1.1\r\n"), known("http/1.1"));
        assert_eq!(look(b"GET\t/\tHTTP/1.1\r\n"), known("http/1.1"));
        assert_eq!(look(b"OWN / HTTP/1.1\r\n"), known("http/1.1"));
        assert_eq!(look(b"GET key\r\n"), (Look::Known, None));
        let long = format!("GET /{}", "a".repeat(MAX_LINE));
        assert_eq!(look(&long.as_bytes()[..MAX_LINE - 1]), (Look::More, None));
        assert_eq!(look(long.as_bytes()), known("http/1.1"));
        assert_eq!(look(b"\x00\x01"), (Look::Known, None));
        assert_eq!(look(b"*1\r\n$4\r\nPING\r\n"), (Look::Known, None));
        assert_eq!(tls(b"GET", &mut Findings::default()), Look::Known);
        assert_eq!(tls(b"\x16\x03\x01\x00\x05hello and more", &mut Findings::default()), Look::Broken);
    }
}
