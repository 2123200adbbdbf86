//! Inspection of the first bytes of a connection: a TLS client hello, HTTP/1, the preface of HTTP/2, or another
//! protocol.
//!
//! An inspector gets all bytes so far after every read, and keeps its position. The work is therefore proportional to
//! the bytes, however a client splits them. Sources: Envoy's listener filters `tls_inspector` and `http_inspector`.

use rustls::server::Acceptor;

use skysail_http::http1::parse::is_token;
use skysail_policy::config::listener::Transport;

/// Results of the inspection.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Plain or TLS; `None` if not inspected.
    pub(crate) transport: Option<Transport>,
    /// Server name of the client hello, in lower case.
    pub(crate) server_name: Option<Box<str>>,
    /// ALPN protocols of the client hello, or the HTTP version.
    pub(crate) protocols: Vec<Box<[u8]>>,
}

/// State of an inspection after a read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InspectionState {
    /// More bytes are needed. Never the result of the last call.
    More,
    /// The inspection is complete.
    Known,
    /// The client hello is malformed: the connection is closed.
    Broken,
}

/// Maximum length of the first line. A longer line that begins as HTTP counts as HTTP, so that no client evades the
/// HTTP filters by a long path.
const MAX_LINE: usize = 8 * 1024;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Detects a TLS client hello.
#[derive(Default)]
pub(crate) struct TlsInspector {
    acceptor: Option<Box<Acceptor>>,
    /// Number of bytes that the acceptor has got.
    given: usize,
}

impl TlsInspector {
    /// Inspects all bytes so far. A client hello that is incomplete at the `last` call is malformed.
    pub(crate) fn inspect(&mut self, bytes: &[u8], last: bool, findings: &mut Findings) -> InspectionState {
        let more = if last { InspectionState::Broken } else { InspectionState::More };
        // A handshake record (22) of version 3.x; RFC 8446, section 5.1.
        match bytes {
            [] | [22] | [22, 3] => return more,
            [22, 3, ..] => {}
            _ => {
                findings.transport = Some(Transport::RawBuffer);
                return InspectionState::Known;
            }
        }
        let acceptor = self.acceptor.get_or_insert_default();
        let mut rest = bytes.get(self.given..).unwrap_or_default();
        while !rest.is_empty() {
            let before = rest.len();
            if acceptor.read_tls(&mut rest).is_err() {
                return InspectionState::Broken;
            }
            self.given += before - rest.len();
            match acceptor.accept() {
                Ok(None) if rest.len() < before => {}
                Ok(Some(accepted)) => {
                    let hello = accepted.client_hello();
                    findings.transport = Some(Transport::Tls);
                    findings.server_name = hello.server_name().map(|name| name.to_ascii_lowercase().into());
                    findings.protocols = hello.alpn().into_iter().flatten().map(Box::from).collect();
                    return InspectionState::Known;
                }
                Ok(None) | Err(_) => return InspectionState::Broken,
            }
        }
        more
    }
}

/// Detects HTTP.
#[derive(Default)]
pub(crate) struct HttpInspector {
    /// Start of the first line, after leading white space.
    start: usize,
    /// Position in the first word.
    word: usize,
    /// Position of the search for the end of the first line.
    searched: usize,
    /// Number of bytes that these searches have read.
    #[cfg(test)]
    work: usize,
}

impl HttpInspector {
    /// Inspects all bytes so far. At the `last` call an incomplete first line counts as a long one.
    pub(crate) fn inspect(&mut self, bytes: &[u8], last: bool, findings: &mut Findings) -> InspectionState {
        let shared = bytes.len().min(PREFACE.len());
        if bytes[..shared] == PREFACE[..shared] {
            if shared == PREFACE.len() {
                findings.protocols = vec![(*b"h2c").into()];
                return InspectionState::Known;
            } else if !last {
                return InspectionState::More;
            }
        }
        // Servers skip empty lines and blanks before the first line, and accept any white space in it as a space. Such
        // a line must be detected as HTTP here as well, in however many pieces it arrives.
        self.start = self.skip(bytes, self.start, is_white);
        self.word = self.skip(bytes, self.word.max(self.start), is_token);
        // A token of any length may be a method.
        let is_method = bytes.get(self.word).is_none_or(|b| is_white(*b));
        let end = self.line_end(bytes);
        let is_long = last || self.start >= MAX_LINE || end.unwrap_or(bytes.len()) >= MAX_LINE;
        let version: &[u8] = match end {
            _ if self.start < MAX_LINE && !is_method => return InspectionState::Known,
            _ if is_long => b"http/1.1",
            None => return InspectionState::More,
            Some(end) => {
                let words = bytes[self.start..end].split(|b| is_white(*b));
                let mut words = words.filter(|word| !word.is_empty());
                let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
                let is_path = target.starts_with(b"/");
                match words.next_back() {
                    Some(b"HTTP/1.0") => b"http/1.0",
                    Some(version) if version.starts_with(b"HTTP/") => b"http/1.1",
                    // HTTP/0.9: no version.
                    Some(_) if method == b"GET" && is_path => b"http/1.1",
                    None if is_path || memchr::memmem::find(target, b"://").is_some() => b"http/1.1",
                    _ => return InspectionState::Known,
                }
            }
        };
        findings.protocols = vec![version.into()];
        InspectionState::Known
    }

    /// Returns the position of the first byte from `from` on that is not skipped.
    fn skip(&mut self, bytes: &[u8], from: usize, is_skipped: fn(u8) -> bool) -> usize {
        let count = bytes[from..].iter().take_while(|b| is_skipped(**b)).count();
        #[cfg(test)]
        (self.work += count);
        from + count
    }

    /// Returns the position of the line feed that ends the first line.
    fn line_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let from = self.searched.max(self.start);
        self.searched = bytes.len();
        #[cfg(test)]
        (self.work += bytes.len() - from);
        memchr::memchr(b'\n', &bytes[from..]).map(|at| from + at)
    }
}

/// Returns whether any server accepts the byte as white space. Besides ASCII white space, these are the ASCII
/// separators and, as in Python's line splitting, 0x85 and 0xa0 of Latin-1.
fn is_white(b: u8) -> bool {
    matches!(b, b' ' | b'\t'..=b'\r' | 0x1c..=0x1f | 0x85 | 0xa0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn tls(bytes: &[u8], findings: &mut Findings) -> InspectionState {
        TlsInspector::default().inspect(bytes, false, findings)
    }

    fn http(bytes: &[u8], findings: &mut Findings) -> InspectionState {
        HttpInspector::default().inspect(bytes, false, findings)
    }

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
    fn a_client_hello_is_read_once_it_is_complete() {
        let bytes = hello("Outbound_.80_._.A.b", &[b"istio-http/1.1", b"istio"]);
        for end in 0..bytes.len() {
            assert_eq!(tls(&bytes[..end], &mut Findings::default()), InspectionState::More, "{end}");
        }
        let mut findings = Findings::default();
        assert_eq!(tls(&bytes, &mut findings), InspectionState::Known);
        assert_eq!(findings.transport, Some(Transport::Tls));
        assert_eq!(findings.server_name.as_deref(), Some("outbound_.80_._.a.b"));
        assert_eq!(findings.protocols, [Box::from(&b"istio-http/1.1"[..]), Box::from(&b"istio"[..])]);
    }

    #[test]
    fn plain_protocols_are_distinguished() {
        let inspect = |bytes: &[u8]| {
            let mut findings = Findings::default();
            let seen = http(bytes, &mut findings);
            (seen, findings.protocols.first().map(|p| String::from_utf8_lossy(p).into_owned()))
        };
        let known = |text: &str| (InspectionState::Known, Some(text.to_owned()));
        assert_eq!(inspect(b"GET / HTTP/1.1\r\n"), known("http/1.1"));
        assert_eq!(inspect(b"GET / HTTP/1.0\n"), known("http/1.0"));
        assert_eq!(inspect(PREFACE), known("h2c"));
        assert_eq!(inspect(b"PRI * HT"), (InspectionState::More, None));
        assert_eq!(inspect(b"GE"), (InspectionState::More, None));
        assert_eq!(inspect(b""), (InspectionState::More, None));
        assert_eq!(inspect(b"GET / HTTP/1"), (InspectionState::More, None));
        assert_eq!(inspect(b"EHLO me\r\n"), (InspectionState::Known, None));
        // Bytes that cannot become a request are detected at once, because their sender may wait for an answer.
        for text in ["{\"a\"", "a@b", "\x00", "\r\n("] {
            assert_eq!(inspect(text.as_bytes()), (InspectionState::Known, None), "{text}");
        }
        for text in [
            "",
            "\r",
            "\r\n\r\n",
            "a-method-that-is-longer-than-any-that-is-in-use",
            "OWN",
            "own ",
            "own a",
            "OWN /a",
            "OPTIONS *",
            "GET HTTP://a",
        ] {
            assert_eq!(inspect(text.as_bytes()), (InspectionState::More, None), "{text}");
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
            "POST /\r\n",
            "GET http://a/\r\n",
            "A-METHOD-THAT-IS-LONGER-THAN-ANY-THAT-IS-IN-USE / HTTP/1.1\r\n",
        ] {
            assert_eq!(inspect(line.as_bytes()), known("http/1.1"), "{line}");
        }
        for white in [b"GET\x1f/\x1cHTTP/1.1\n", b"GET\xa0/\x85HTTP/1.1\n"] {
            assert_eq!(inspect(white), known("http/1.1"), "{white:?}");
        }
        assert_eq!(inspect(b"GET key\r\n"), (InspectionState::Known, None));
        assert_eq!(inspect(b"OPTIONS rtsp://a RTSP/1.0\r\n"), (InspectionState::Known, None));
        let long = format!("GET /{}", "a".repeat(MAX_LINE));
        assert_eq!(inspect(&long.as_bytes()[..MAX_LINE - 1]), (InspectionState::More, None));
        assert_eq!(inspect(long.as_bytes()), known("http/1.1"));
        assert_eq!(inspect(b"\x00\x01"), (InspectionState::Known, None));
        assert_eq!(inspect(b"*1\r\n$4\r\nPING\r\n"), (InspectionState::Known, None));
        assert_eq!(tls(b"GET", &mut Findings::default()), InspectionState::Known);
        assert_eq!(
            tls(b"\x16\x03\x01\x00\x05hello and more", &mut Findings::default()),
            InspectionState::Broken
        );
    }

    /// Splits a record into records of one byte.
    fn fragments(record: &[u8]) -> Vec<u8> {
        record[5..].iter().flat_map(|byte| [22, 3, 1, 0, 1, *byte]).collect()
    }

    #[test]
    fn a_hello_in_many_records_is_parsed_once() {
        let whole = hello("a.b", &[b"istio"]);
        let bytes = fragments(&whole);
        let mut inspector = TlsInspector::default();
        let (mut findings, mut given) = (Findings::default(), 0);
        for end in 0..bytes.len() {
            let before = inspector.given;
            assert_eq!(
                inspector.inspect(&bytes[..end], false, &mut findings),
                InspectionState::More,
                "{end}"
            );
            given += inspector.given - before;
        }
        assert_eq!(inspector.inspect(&bytes, false, &mut findings), InspectionState::Known);
        assert_eq!((findings.server_name.as_deref(), given), (Some("a.b"), bytes.len() - 1));
        let mut at_once = Findings::default();
        assert_eq!(tls(&bytes, &mut at_once), InspectionState::Known);
        assert_eq!(at_once, findings);
    }

    #[test]
    fn a_line_in_many_pieces_is_read_once() {
        for text in [format!("\r\n \r\nGET /{} HTTP/1.1\r\n", "a".repeat(4_000)), " ".repeat(2 * MAX_LINE)] {
            let (mut inspector, mut findings) = (HttpInspector::default(), Findings::default());
            let known = (0..=text.len()).find(|end| {
                inspector.inspect(&text.as_bytes()[..*end], false, &mut findings) == InspectionState::Known
            });
            let known = known.unwrap();
            assert_eq!(known, text.len().min(MAX_LINE));
            assert_eq!(findings.protocols, [Box::from(&b"http/1.1"[..])]);
            assert!(inspector.work <= 3 * known, "{} for {known} bytes", inspector.work);
        }
    }

    #[test]
    fn the_last_call_has_a_result() {
        let bytes = hello("a", &[]);
        for end in 0..bytes.len() {
            let state = TlsInspector::default().inspect(&bytes[..end], true, &mut Findings::default());
            assert_eq!(state, InspectionState::Broken, "{end}");
        }
        for (text, protocol) in [("GET /a", Some("http/1.1")), ("", Some("http/1.1")), ("{", None)] {
            let mut findings = Findings::default();
            assert_eq!(
                HttpInspector::default().inspect(text.as_bytes(), true, &mut findings),
                InspectionState::Known
            );
            assert_eq!(findings.protocols.first().map(|p| &**p), protocol.map(str::as_bytes), "{text}");
        }
    }
}
