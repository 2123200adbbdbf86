//! The HTTP/1.1 codec: heads and bodies (RFC 9112, sections 2 to 9).
//!
//! The parser is strict where a lenient one could disagree with another party about the end of a message. Anything but
//! a well-formed message is refused. Every forwarded message gets new framing, by the parsed values.

pub mod body;
pub mod parse;
pub mod write;

#[cfg(test)]
mod tests;

pub use body::BodyDecoder;
pub use parse::{ConnectionOptions, HeadLimits, Malformed, Scan};

/// Framing of a body: the way in which its end is marked. Source: RFC 9112, section 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body.
    None,
    /// A body of this number of bytes.
    Length(u64),
    /// Chunked transfer coding.
    Chunked,
    /// The body ends with the connection (responses only).
    UntilClose,
}
