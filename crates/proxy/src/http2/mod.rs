//! HTTP/2: the crate `h2` does the framing (RFC 9113); here is what joins it to connections ([`Io`]), to heads
//! ([`convert`]) and to the story of a request, for which a stream is a [`Duplex`].

mod convert;
mod duplex;
mod io;

pub(crate) use convert::{request_framing, request_head};
pub(crate) use duplex::{Answered, Duplex};
pub(crate) use io::Io;

/// What may be on its way to us on one stream before we say that there is room for more. Envoy's is 16 MiB.
pub(crate) const STREAM_WINDOW: u32 = 256 * 1024;
/// The same for a whole connection.
pub(crate) const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// Most bytes of one stream that wait to be written.
pub(crate) const SEND_BUFFER: usize = 64 * 1024;
/// Largest head of an answer, as HTTP/1.1 has it.
pub(crate) const MAX_HEAD: u32 = 60 * 1024;
