//! Settings of an HTTP/2 connection.

use std::time::Duration;

/// What one end of a connection of HTTP/2 wants. Source: `envoy.config.core.v3.Http2ProtocolOptions`.
#[derive(Clone, Copy, Debug)]
pub struct Http2Options {
    /// Most requests at once on a connection: of a client's, and of ours to a server.
    pub max_streams: u32,
    /// Bytes that may be on their way to us on a stream (`initial_stream_window_size`).
    pub stream_window: u32,
    /// The same on a connection.
    pub connection_window: u32,
    /// Clients may ask for an upgrade by CONNECT (RFC 8441).
    pub allow_connect: bool,
    /// Whether the other end is asked now and then if it is still there.
    pub keepalive: Option<Keepalive>,
    /// So many frames more than do any good may the other end send within 30 seconds: those that bring nothing, and
    /// those that must be answered (`max_outbound_control_frames`).
    pub chatter: u32,
    /// So many streams more than it lets end well may the other end reset within 30 seconds; see
    /// `skysail.overload` in the documentation of limits.
    pub resets: u32,
}

impl Http2Options {
    /// What holds where nothing is configured but this. Envoy's windows are 16 and 24 MiB.
    pub const fn new(max_streams: u32) -> Self {
        let (stream_window, connection_window) = (256 * 1024, 1024 * 1024);
        Self {
            max_streams,
            stream_window,
            connection_window,
            allow_connect: false,
            keepalive: None,
            chatter: 2000,
            resets: 200,
        }
    }
}

/// Pings. Source: `envoy.config.core.v3.KeepaliveSettings`.
#[derive(Clone, Copy, Debug)]
pub struct Keepalive {
    /// Time between an answer and the next ping.
    pub interval: Duration,
    /// How long an answer may take.
    pub timeout: Duration,
    /// By how much of itself the interval is made longer at random, in millionths.
    pub jitter: u32,
}
