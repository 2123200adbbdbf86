//! HTTP/1.1 as bytes: heads, bodies, and how they are written. RFC 9112, sections 2 to 9.
//!
//! Strict where leniency lets two parties disagree about where a message ends: what is not plainly well-formed
//! is refused, and every message sent on is framed anew from what was understood.

pub mod body;
pub mod parse;
pub mod write;

#[cfg(test)]
mod tests;

pub use body::BodyDecoder;
pub use parse::{ConnectionOptions, HeadLimits, Malformed, Scan};

/// How the end of a body is known. Source: RFC 9112, section 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// There is no body.
    None,
    /// After so many bytes.
    Length(u64),
    /// By the last chunk.
    Chunked,
    /// By the end of the connection (responses only).
    UntilClose,
}
