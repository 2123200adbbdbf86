//! Decoder of bodies: finds the content and the end of a message.

use super::{Framing, HeadLimits, Malformed, parse};
use crate::head::Headers;

/// Decoder of one body.
#[derive(Debug)]
pub struct BodyDecoder {
    state: State,
    /// Raw trailer lines, until the trailer section is complete.
    raw_trailers: Vec<u8>,
}

/// State of the decoder: the meaning of the next byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Content; number of remaining bytes.
    Length(u64),
    /// Content until the connection ends.
    UntilClose,
    /// Digits of a chunk size: value, and number of digits so far.
    Size(u64, u8),
    /// A chunk extension, which is discarded: chunk size, and length so far.
    Extension(u64, u16),
    /// LF after a chunk size.
    SizeEnd(u64),
    /// Content of a chunk; number of remaining bytes.
    Chunk(u64),
    /// CR after a chunk.
    ChunkCr,
    /// LF after a chunk.
    ChunkLf,
    /// Trailer section; length of the current line so far.
    Trailers(u32),
    End,
}

/// Result of [`BodyDecoder::next`]: `skip` bytes of framing, then `data` bytes of content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Number of framing bytes.
    pub skip: usize,
    /// Number of content bytes after them.
    pub data: usize,
}

/// Maximum length of a chunk extension in bytes. Extensions are discarded; the limit bounds the work for them.
const MAX_EXTENSION: u16 = 1024;

impl BodyDecoder {
    /// Returns a decoder for a body with this framing.
    #[inline]
    pub fn new(framing: Framing) -> Self {
        let state = match framing {
            Framing::None | Framing::Length(0) => State::End,
            Framing::Length(length) => State::Length(length),
            Framing::Chunked => State::Size(0, 0),
            Framing::UntilClose => State::UntilClose,
        };
        Self { state, raw_trailers: Vec::new() }
    }

    /// Returns whether the body is complete.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.state == State::End
    }

    /// Returns the number of remaining content bytes, if known.
    #[inline]
    pub fn left(&self) -> Option<u64> {
        match self.state {
            State::End => Some(0),
            State::Length(left) => Some(left),
            _ => None,
        }
    }

    /// Handles the end of the connection; returns whether the body is complete.
    #[inline]
    pub fn close(&mut self) -> bool {
        if self.state == State::UntilClose {
            self.state = State::End;
        }
        self.is_done()
    }

    /// Returns the trailer fields of a complete body, if it has any.
    ///
    /// # Errors
    /// See [`parse::trailers`].
    #[inline]
    pub fn trailers(&self, limits: &HeadLimits) -> Result<Option<Headers>, Malformed> {
        if self.raw_trailers.is_empty() {
            return Ok(None);
        }
        let mut headers = Headers::default();
        parse::trailers(&self.raw_trailers, limits, &mut headers)?;
        Ok(Some(headers))
    }

    /// Decodes the front of `input`. If nothing is skipped, there is no data and the body is not done, more bytes are
    /// needed.
    ///
    /// # Errors
    /// The bytes violate RFC 9112, section 7.1, or a trailer section or chunk extension exceeds its limit.
    pub fn next(&mut self, input: &[u8], limits: &HeadLimits) -> Result<Piece, Malformed> {
        let mut skip = 0;
        loop {
            match self.state {
                State::End => return Ok(Piece { skip, data: 0 }),
                State::UntilClose => return Ok(Piece { skip, data: input.len() - skip }),
                State::Length(left) => {
                    let data = at_most(left, input.len() - skip);
                    let left = left - data as u64;
                    self.state = if left == 0 { State::End } else { State::Length(left) };
                    return Ok(Piece { skip, data });
                }
                State::Chunk(left) => {
                    let data = at_most(left, input.len() - skip);
                    let left = left - data as u64;
                    self.state = if left == 0 { State::ChunkCr } else { State::Chunk(left) };
                    return Ok(Piece { skip, data });
                }
                _ => {
                    let Some(byte) = input.get(skip) else { return Ok(Piece { skip, data: 0 }) };
                    self.state = self.framing_byte(*byte, limits)?;
                    skip += 1;
                }
            }
        }
    }

    fn framing_byte(&mut self, byte: u8, limits: &HeadLimits) -> Result<State, Malformed> {
        let bad = Malformed::new(400, "http1.codec_error");
        match (self.state, byte) {
            (State::Size(size, digits), b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                // Fifteen digits cannot overflow, and are more than any real size.
                if digits >= 15 {
                    return Err(bad);
                }
                let digit = match byte {
                    b'0'..=b'9' => byte - b'0',
                    _ => (byte | 0x20) - b'a' + 10,
                };
                Ok(State::Size(size * 16 + u64::from(digit), digits + 1))
            }
            (State::Size(size, 1..), b'\r') | (State::Extension(size, _), b'\r') => Ok(State::SizeEnd(size)),
            (State::Size(size, 1..), b';') => Ok(State::Extension(size, 0)),
            (State::Extension(size, length), b'\t' | b' '..=0x7e) if length < MAX_EXTENSION => {
                Ok(State::Extension(size, length + 1))
            }
            (State::SizeEnd(0), b'\n') => Ok(State::Trailers(0)),
            (State::SizeEnd(size), b'\n') => Ok(State::Chunk(size)),
            (State::ChunkCr, b'\r') => Ok(State::ChunkLf),
            (State::ChunkLf, b'\n') => Ok(State::Size(0, 0)),
            (State::Trailers(length), _) => self.trailer_byte(length, byte, limits),
            _ => Err(bad),
        }
    }

    fn trailer_byte(&mut self, length: u32, byte: u8, limits: &HeadLimits) -> Result<State, Malformed> {
        if self.raw_trailers.len() >= limits.max_head {
            return Err(Malformed::new(431, "http1.trailers_too_large"));
        }
        self.raw_trailers.push(byte);
        if byte != b'\n' {
            return Ok(State::Trailers(length + 1));
        }
        let end = self.raw_trailers.len();
        if !self.raw_trailers.ends_with(b"\r\n") {
            return Err(Malformed::new(400, "http1.codec_error"));
        }
        if length > 1 {
            return Ok(State::Trailers(0));
        }
        self.raw_trailers.truncate(end - 2);
        // An error is reported before the message counts as complete.
        self.trailers(limits)?;
        Ok(State::End)
    }
}

fn at_most(left: u64, there: usize) -> usize {
    usize::try_from(left).map_or(there, |left| left.min(there))
}
