//! The part of HTTP/1 that generators and echo servers need: heads and chunked bodies.

use memchr::{memchr, memmem};

/// Head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bytes of the start line and the headers, with the empty line.
    pub length: usize,
    /// Value of `content-length`, if present.
    pub content_length: Option<usize>,
    /// The connection closes after this message.
    pub close: bool,
    /// The header `connection` asks to keep the connection, as HTTP/1.0 needs it.
    pub keep_alive: bool,
    /// The body is chunked.
    pub chunked: bool,
    /// The value of `content-length` is not a number.
    pub has_invalid_length: bool,
}

/// Parses the head of a message; `None` while it is incomplete.
pub fn head(bytes: &[u8]) -> Option<Head> {
    let length = memmem::find(bytes, b"\r\n\r\n")? + 4;
    let mut head = Head {
        length,
        content_length: None,
        close: false,
        keep_alive: false,
        chunked: false,
        has_invalid_length: false,
    };
    let mut rest = &bytes[..length - 2];
    while let Some(end) = memchr(b'\n', rest) {
        rest = &rest[end + 1..];
        if let Some(value) = value_of(rest, b"content-length:") {
            head.content_length = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
            head.has_invalid_length = head.content_length.is_none();
        } else if let Some(value) = value_of(rest, b"connection:") {
            head.close = value.eq_ignore_ascii_case(b"close");
            head.keep_alive = value.eq_ignore_ascii_case(b"keep-alive");
        } else if value_of(rest, b"transfer-encoding:").is_some() {
            head.chunked = true;
        }
    }
    Some(head)
}

/// Returns the status code of a response; 0 if there is none.
pub fn status(head: &[u8]) -> u16 {
    head.get(9..12)
        .and_then(|code| std::str::from_utf8(code).ok())
        .and_then(|code| code.parse().ok())
        .unwrap_or(0)
}

/// Returns the value of the first line, if it has this lower-case name with a colon.
pub(crate) fn value_of<'a>(lines: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, rest) = lines.split_at_checked(name.len())?;
    if !start.eq_ignore_ascii_case(name) {
        return None;
    }
    let end = memchr(b'\n', rest).unwrap_or(rest.len());
    Some(rest[..end].trim_ascii())
}

/// State within a chunked body (RFC 9112, section 7.1).
#[derive(Clone, Copy, Debug)]
pub enum Chunks {
    /// In the size of a chunk.
    Size {
        /// The digits so far.
        value: u64,
        /// Number of digits so far.
        digits: u8,
    },
    /// After the size, up to the end of its line.
    Extension {
        /// Size of the chunk.
        value: u64,
    },
    /// In the data of a chunk, with the bytes that are missing.
    Data(u64),
    /// In the line end after the data.
    DataEnd,
    /// A line of the trailers, with its length so far.
    Trailer(u64),
}

impl Chunks {
    /// State before the first chunk.
    pub const START: Self = Self::Size { value: 0, digits: 0 };

    /// Reads bytes, and passes those of the body to `body`. Returns the number of bytes read, and whether the body is
    /// complete; `None` if it is invalid.
    pub fn read(&mut self, bytes: &[u8], mut body: impl FnMut(&[u8])) -> (usize, Option<bool>) {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            let next = match *self {
                Self::Data(left) => {
                    let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - at);
                    body(&bytes[at..at + taken]);
                    at += taken;
                    let left = left - taken as u64;
                    *self = if left == 0 { Self::DataEnd } else { Self::Data(left) };
                    continue;
                }
                Self::Size { value, digits } => match (char::from(byte).to_digit(16), byte) {
                    (Some(digit), _) if digits < 15 => {
                        Some(Self::Size { value: value << 4 | u64::from(digit), digits: digits + 1 })
                    }
                    (None, b'\r' | b';' | b' ' | b'\t') if digits > 0 => Some(Self::Extension { value }),
                    _ => None,
                },
                Self::Extension { value } if byte != b'\n' => Some(Self::Extension { value }),
                Self::Extension { value: 0 } => Some(Self::Trailer(0)),
                Self::Extension { value } => Some(Self::Data(value)),
                Self::DataEnd if byte == b'\r' => Some(Self::DataEnd),
                Self::DataEnd => (byte == b'\n').then_some(Self::START),
                Self::Trailer(0) if byte == b'\n' => return (at + 1, Some(true)),
                Self::Trailer(_) if byte == b'\n' => Some(Self::Trailer(0)),
                Self::Trailer(length) => Some(Self::Trailer(length + u64::from(byte != b'\r'))),
            };
            let Some(next) = next else { return (at, None) };
            *self = next;
            at += 1;
        }
        (at, Some(false))
    }
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
        let expected = Head {
            length: text.len() - 4,
            content_length: Some(12),
            close: false,
            keep_alive: false,
            chunked: false,
            has_invalid_length: false,
        };
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
