//! The HTTP/2 codec (RFC 9113).
//!
//! Bytes are frames (`frame`) with header blocks (`hpack`), whose fields form heads (`heads`). A [`Session`] is the
//! state of a connection and does no IO. For connections that belong to one thread, a [`Driver`] reads and writes the
//! socket, and a request uses its stream through a [`Duplex`].

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
pub use duplex::{Answered, Connection, Duplex, StreamClosed, Unsent};
pub use frame::{FrameKind, Reason};
pub use heads::{Bounds, HeadError, framing};
pub use options::{Http2Options, Keepalive};
pub use session::{Request, Role, Session, SessionLimits, StreamError};
