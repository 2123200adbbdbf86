//! HTTP/2 (RFC 9113), for connections that belong to one thread.
//!
//! Bytes are frames (`frame`) and header blocks (`hpack`), the fields of which are heads (`heads`). A `Session` is the state
//! of a connection and touches no socket. Its [`Driver`] reads and writes the socket. A request sees its stream as a [`Duplex`].

mod driver;
mod duplex;
mod frame;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod heads;
mod hpack;
mod options;
mod session;

pub use driver::Driver;
pub use duplex::{Answered, Connection, Duplex, Gone, Unsent};
pub use frame::{FrameKind, Reason};
pub use heads::{Bounds, HeadError, framing};
pub use options::{Http2Options, Keepalive};
pub use session::{Lost, Request, Role, SessionLimits};
