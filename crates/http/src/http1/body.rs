//! Reading bodies: which of the bytes that arrive are content, and where the message ends.

use super::{Framing, HeadLimits, Malformed, parse};
use crate::head::Headers;

/// Reads one body.
#[derive(Debug)]
pub struct BodyDecoder {
    state: State,
    /// Raw trailer lines until the last is there.
    raw_trailers: Vec<u8>,
}

/// What the next bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Content, so many bytes more, then the end.
    Length(u64),
    /// Content until the connection ends.
    UntilClose,
    /// Digits of a chunk's size; how many came so far, and their value.
    Size(u64, u8),
    /// A chunk's extension, thrown away, up to a limit.
    Extension(u64, u16),
    /// The line feed after a chunk's size.
    SizeEnd(u64),
    /// Content of a chunk.
    Chunk(u64),
    /// What follows a chunk: CR, then LF.
    ChunkCr,
    ChunkLf,
    /// The trailer section; how long the current line is so far.
    Trailers(u32),
    End,
}

/// What [`BodyDecoder::next`] found: first `skip` bytes of framing, then `data` bytes of content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Bytes that are not content.
    pub skip: usize,
    /// Bytes of content after those.
    pub data: usize,
}

/// Extensions are thrown away, but an endless one costs work for nothing.
const MAX_EXTENSION: u16 = 1024;

impl BodyDecoder {
    /// A body of this framing.
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

    /// Whether the body is complete.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.state == State::End
    }

    /// How many bytes of content are still to come, if that is known.
    #[inline]
    pub fn left(&self) -> Option<u64> {
        match self.state {
            State::End => Some(0),
            State::Length(left) => Some(left),
            _ => None,
        }
    }

    /// Says that the connection has ended; true if the body may end so.
    #[inline]
    pub fn close(&mut self) -> bool {
        if self.state == State::UntilClose {
            self.state = State::End;
        }
        self.is_done()
    }

    /// The trailer fields, when the body is complete and had any.
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

    /// Takes what is at the front of `input`. Nothing skipped, no data and not done means: more bytes are needed.
    ///
    /// # Errors
    /// Bytes that are not what section 7.1 says.
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
                // 15 digits are a million terabytes, and leave no way to overflow.
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
        // Errors show up here, before the message counts as complete.
        self.trailers(limits)?;
        Ok(State::End)
    }
}

fn at_most(left: u64, there: usize) -> usize {
    usize::try_from(left).map_or(there, |left| left.min(there))
}
