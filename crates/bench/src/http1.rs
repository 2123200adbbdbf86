//! The part of HTTP/1.1 that the load generator and the echo server need: the boundaries of messages.

use memchr::{memchr, memmem};

/// Head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Bytes of the start line and the headers, with the empty line.
    pub(crate) length: usize,
    /// Value of `content-length`, if present.
    pub(crate) content_length: Option<usize>,
    /// The connection closes after this message.
    pub(crate) close: bool,
    /// The body is chunked, which neither side here reads.
    pub(crate) chunked: bool,
}

/// Parses the head of a message; `None` while it is incomplete.
pub(crate) fn head(bytes: &[u8]) -> Option<Head> {
    let length = memmem::find(bytes, b"\r\n\r\n")? + 4;
    let mut head = Head { length, content_length: None, close: false, chunked: false };
    let mut rest = &bytes[..length - 2];
    while let Some(end) = memchr(b'\n', rest) {
        rest = &rest[end + 1..];
        if let Some(value) = value_of(rest, b"content-length:") {
            head.content_length = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        } else if let Some(value) = value_of(rest, b"connection:") {
            head.close = value.eq_ignore_ascii_case(b"close");
        } else if value_of(rest, b"transfer-encoding:").is_some() {
            head.chunked = true;
        }
    }
    Some(head)
}

/// Returns the status code of a response; 0 if there is none.
pub(crate) fn status(head: &[u8]) -> u16 {
    head.get(9..12)
        .and_then(|code| std::str::from_utf8(code).ok())
        .and_then(|code| code.parse().ok())
        .unwrap_or(0)
}

fn value_of<'a>(lines: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, rest) = lines.split_at_checked(name.len())?;
    if !start.eq_ignore_ascii_case(name) {
        return None;
    }
    let end = memchr(b'\n', rest).unwrap_or(rest.len());
    Some(rest[..end].trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_parsed_once_it_is_complete() {
        let text = b"HTTP/1.1 200 OK\r\nServer: x\r\nCONTENT-Length: 12\r\n\r\nbody";
        for cut in 0..text.len() - 4 {
            assert_eq!(head(&text[..cut]), None, "{cut}");
        }
        let head = head(text).unwrap();
        let expected =
            Head { length: text.len() - 4, content_length: Some(12), close: false, chunked: false };
        assert_eq!(head, expected);
        assert_eq!(status(text), 200);
    }

    #[test]
    fn connection_and_framing_headers_are_parsed() {
        let head =
            head(b"GET / HTTP/1.1\r\nConnection: Close\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
        assert!(head.close && head.chunked);
        assert_eq!(head.content_length, None);
        assert_eq!(status(b"HTTP/1.1 "), 0);
    }
}
