//! HTTP/2 (RFC 9113), for connections that belong to one thread.
//!
//! Bytes are frames ([`frame`]) and header blocks ([`hpack`]), the fields of which are heads ([`heads`]). A
//! `Session` is the state of a connection and touches no socket; its `Driver` is the task's part that does. To
//! the story of a request a stream is a [`Duplex`].

mod driver;
mod duplex;
mod frame;
mod heads;
mod hpack;
mod options;
mod session;

pub(crate) use driver::Driver;
pub(crate) use duplex::{Answered, Connection, Duplex, Gone, Unsent};
pub(crate) use frame::{Kind, Reason};
pub(crate) use heads::{Bounds, Fault, framing};
pub use options::{Http2Options, Keepalive};
pub(crate) use session::{Limits, Lost, Request, Role};
#[cfg(feature = "fuzzing")]
pub(crate) use {
    hpack::{Decoder, Encoder},
    session::Session,
};
