//! Incremental parsing of HTTP/1.1 responses. Bodies are counted and discarded, so a connection needs only a buffer for
//! the head.

use crate::http1::{self, Chunks, Head};

/// A complete response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Bytes of the status line and the headers.
    pub head: u64,
    /// Bytes of the body as transferred.
    pub body: u64,
    /// The server closes the connection after this response.
    pub closes: bool,
}

/// Error of the server. The connection cannot be used further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// The bytes are no HTTP/1.x response.
    Response,
    /// The chunked body has an invalid size or line end.
    Chunk,
    /// The headers do not fit into the buffer.
    HeadTooLarge,
}

/// Reader of the responses of one connection.
#[derive(Debug)]
pub struct ResponseReader {
    /// Responses have no body, whatever their headers say (HEAD).
    is_head: bool,
    phase: Phase,
    response: Response,
}

#[derive(Debug)]
enum Phase {
    Head,
    /// Bytes of the body that are missing.
    Length(u64),
    Chunks(Chunks),
    /// The body ends with the connection.
    UntilClose,
}

const EMPTY: Response = Response { status: 0, head: 0, body: 0, closes: false };

impl ResponseReader {
    /// Creates a reader of responses to requests with this method.
    pub fn new(method: &str) -> Self {
        Self { is_head: method == "HEAD", phase: Phase::Head, response: EMPTY }
    }

    /// Prepares for the next response.
    pub fn reset(&mut self) {
        (self.phase, self.response) = (Phase::Head, EMPTY);
    }

    /// Reads received bytes from `input` and sets `filled` to the number of bytes that remain at its front. Returns
    /// the response once it is complete.
    ///
    /// # Errors
    /// The bytes are no response. The connection cannot be used further.
    pub fn read(&mut self, input: &mut [u8], filled: &mut usize) -> Result<Option<Response>, Invalid> {
        let mut at = 0;
        let result = loop {
            let rest = &input[at..*filled];
            match &mut self.phase {
                Phase::Head => {
                    let Some(head) = http1::head(rest) else {
                        let is_full = at == 0 && *filled == input.len();
                        break if is_full { Err(Invalid::HeadTooLarge) } else { Ok(None) };
                    };
                    if let Err(error) = self.select(&head, rest) {
                        break Err(error);
                    }
                    at += head.length;
                }
                Phase::Length(0) => break Ok(Some(self.response)),
                Phase::Length(left) => {
                    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(rest.len());
                    *left -= taken as u64;
                    self.response.body += taken as u64;
                    at += taken;
                    if *left > 0 {
                        break Ok(None);
                    }
                }
                Phase::UntilClose => {
                    self.response.body += rest.len() as u64;
                    at = *filled;
                    break Ok(None);
                }
                Phase::Chunks(state) => {
                    let (taken, result) = state.read(rest, |_| {});
                    self.response.body += taken as u64;
                    at += taken;
                    match result {
                        Some(true) => self.phase = Phase::Length(0),
                        Some(false) => break Ok(None),
                        None => break Err(Invalid::Chunk),
                    }
                }
            }
        };
        input.copy_within(at..*filled, 0);
        *filled -= at;
        result
    }

    /// Handles the end of the connection. Returns the response if this end completes it.
    pub fn end(&self) -> Option<Response> {
        matches!(self.phase, Phase::UntilClose).then_some(self.response)
    }

    /// Checks a head and selects the form of the body.
    fn select(&mut self, head: &Head, bytes: &[u8]) -> Result<(), Invalid> {
        let version = bytes.get(..9);
        if !version.is_some_and(|text| text.starts_with(b"HTTP/1.") && text[8] == b' ') {
            return Err(Invalid::Response);
        }
        let status = http1::status(bytes);
        if !(100..1_000).contains(&status) || head.has_invalid_length {
            return Err(Invalid::Response);
        }
        if status < 200 && status != 101 {
            // The final response follows.
            return Ok(());
        }
        let closes = if bytes[7] == b'0' { !head.keep_alive } else { head.close };
        self.response = Response { status, head: head.length as u64, body: 0, closes };
        self.phase = if self.is_head || matches!(status, 101 | 204 | 304) {
            Phase::Length(0)
        } else if head.chunked {
            Phase::Chunks(Chunks::START)
        } else if let Some(length) = head.content_length {
            Phase::Length(length as u64)
        } else {
            self.response.closes = true;
            Phase::UntilClose
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a text in pieces of this length, through a buffer of 256 bytes.
    fn read(method: &str, text: &str, piece: usize) -> Result<Vec<Response>, Invalid> {
        let (mut reader, mut buffer, mut filled) = (ResponseReader::new(method), [0; 256], 0);
        let mut all = Vec::new();
        for piece in text.as_bytes().chunks(piece) {
            buffer[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
            while let Some(response) = reader.read(&mut buffer, &mut filled)? {
                all.push(response);
                reader.reset();
            }
        }
        all.extend(reader.end());
        Ok(all)
    }

    #[test]
    fn responses_are_read_however_their_bytes_arrive() {
        let body = "y".repeat(1_000);
        let text = format!(
            "HTTP/1.1 100 Continue\r\n\r\n\
             HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{body}\
             HTTP/1.1 204 No Content\r\n\r\n\
             HTTP/1.1 503 x\r\nconnection: close\r\ncontent-length: 2\r\n\r\nab\
             HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3e8;a=b\r\n{body}\r\n1\r\nz\r\n0\r\nx: y\r\n\r\n\
             HTTP/1.0 200 OK\r\n\r\nuntil the end"
        );
        for piece in [1, 2, 3, 7, 100] {
            let all = read("GET", &text, piece).unwrap();
            let statuses: Vec<_> = all.iter().map(|one| (one.status, one.closes)).collect();
            assert_eq!(
                statuses,
                [(200, false), (204, false), (503, true), (200, false), (200, true)],
                "{piece}"
            );
            let bodies: Vec<_> = all.iter().map(|one| one.body).collect();
            assert_eq!(bodies[..3], [1_000, 0, 2], "{piece}");
            assert_eq!(bodies[4], 13, "{piece}");
            assert_eq!(all[0].head, 41);
        }
    }

    #[test]
    fn a_response_to_head_has_no_body() {
        let text = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nHTTP/1.1 404 x\r\ncontent-length: 7\r\n\r\n";
        let all = read("HEAD", text, 10).unwrap();
        assert_eq!(all.iter().map(|one| (one.status, one.body)).collect::<Vec<_>>(), [(200, 0), (404, 0)]);
    }

    #[test]
    fn invalid_responses_are_refused() {
        for (text, expected) in [
            ("SSH-2.0-x\r\n\r\n", Invalid::Response),
            ("HTTP/1.1 abc\r\n\r\n", Invalid::Response),
            ("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", Invalid::Response),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", Invalid::Chunk),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc", Invalid::Chunk),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1111111111111111\r\n", Invalid::Chunk),
        ] {
            assert_eq!(read("GET", text, 5), Err(expected), "{text}");
        }
        let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "y".repeat(300));
        assert_eq!(read("GET", &long, 256), Err(Invalid::HeadTooLarge));
    }
}
