//! Settings of an HTTP/2 connection.

use std::time::Duration;

/// Settings of one side of an HTTP/2 connection. Source: `envoy.config.core.v3.Http2ProtocolOptions`.
#[derive(Clone, Copy, Debug)]
pub struct Http2Options {
    /// Maximum number of concurrent streams: those of a client, or those that this proxy opens to a server.
    pub max_streams: u32,
    /// Initial receive window of a stream in bytes (`initial_stream_window_size`).
    pub stream_window: u32,
    /// Receive window of the connection in bytes (`initial_connection_window_size`).
    pub connection_window: u32,
    /// Clients may use extended CONNECT (RFC 8441).
    pub allow_connect: bool,
    /// Keep-alive pings; `None` disables them.
    pub keepalive: Option<Keepalive>,
    /// Budget of useless frames in 30 seconds: frames without content, and frames that require a response
    /// (`max_outbound_control_frames`). Useful frames replenish it.
    pub useless_frames: u32,
    /// Budget of streams in 30 seconds that a client resets, or that end because the peer violated the protocol
    /// (`overload.premature_reset_total_stream_count`). Streams that end well replenish it.
    pub resets: u32,
}

impl Http2Options {
    /// Returns the defaults with this number of streams. The windows are 256 KiB and 1 MiB; Envoy's are 16 and 24 MiB.
    pub const fn new(max_streams: u32) -> Self {
        let (stream_window, connection_window) = (256 * 1024, 1024 * 1024);
        Self {
            max_streams,
            stream_window,
            connection_window,
            allow_connect: false,
            keepalive: None,
            useless_frames: 2000,
            resets: 200,
        }
    }
}

/// Settings of keep-alive pings. Source: `envoy.config.core.v3.KeepaliveSettings`.
#[derive(Clone, Copy, Debug)]
pub struct Keepalive {
    /// Time between an acknowledgement and the next ping.
    pub interval: Duration,
    /// Timeout of an acknowledgement.
    pub timeout: Duration,
    /// Maximum random extension of the interval, in millionths of it.
    pub jitter: u32,
}
