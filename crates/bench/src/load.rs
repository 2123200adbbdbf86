//! The load: a client on one thread, and the results that it measures.

mod bytes;
mod hello;
mod http2;
mod idle;
mod requests;
mod sequence;
pub(crate) mod surge;

use std::{net::SocketAddr, time::Duration};

use hdrhistogram::Histogram;

pub(crate) use self::{hello::hellos, idle::Idle, sequence::send};
use crate::{node::Protocol, schedule::Schedule, stream::Tls};

/// Load to apply.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) target: SocketAddr,
    pub(crate) traffic: Traffic,
    pub(crate) connections: usize,
    /// Schedule of the requests. Without one, each connection (HTTP/2: stream) sends its next request when the last
    /// one is answered.
    pub(crate) schedule: Option<Schedule>,
    /// Bytes of the body of a request, and of a response.
    pub(crate) payload: usize,
    pub(crate) warmup: Duration,
    /// Measured time. It is extended until a response has arrived, by `MAX_EXTENSION` at most.
    pub(crate) window: Duration,
    /// Certificates of the client, if it uses mutual TLS itself.
    pub(crate) tls: Option<Tls>,
}

/// Traffic of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Traffic {
    /// Requests over HTTP/1.1 on persistent connections.
    Http1,
    /// A new connection for every request.
    NewConnections {
        /// The client offers to resume an earlier TLS session.
        resume: bool,
    },
    /// Requests over HTTP/2 with several streams on each connection. Has no schedule.
    Http2 {
        /// Requests in progress per connection.
        streams: usize,
    },
    /// Bytes to the server. Has no schedule.
    Bytes,
}

impl Traffic {
    /// Returns the protocol of the proxies and the server.
    pub(crate) fn protocol(self) -> Protocol {
        match self {
            Self::Http1 | Self::NewConnections { .. } => Protocol::Http1,
            Self::Http2 { .. } => Protocol::Http2,
            Self::Bytes => Protocol::Tcp,
        }
    }
}

/// Maximum time by which a window is extended if no response has arrived in it.
const MAX_EXTENSION: Duration = Duration::from_secs(60);

/// Boundary of the measured window, at which the caller takes its own samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WindowBoundary {
    /// The measured window begins.
    Begin,
    /// The measured window ends.
    End,
}

/// Result of a load. For [`Traffic::Bytes`], a "request" is 1,000,000 bytes sent, and there are no latencies.
#[derive(Clone, Debug)]
pub(crate) struct LoadOutcome {
    /// Nanoseconds from the due time of a request to its complete response; without a schedule, from the time it was
    /// sent.
    pub(crate) due: Histogram<u64>,
    /// Nanoseconds from the time a request was sent to its complete response.
    pub(crate) sent: Histogram<u64>,
    /// Nanoseconds from the due time of a request until the generator took it up. Empty without a schedule.
    pub(crate) late: Histogram<u64>,
    /// Requests due in the window; without a schedule, those that ended in it.
    pub(crate) requests: u64,
    /// Of these, requests without a response: their connection broke or they timed out.
    pub(crate) unanswered: u64,
    /// Of these, requests with a response other than 200.
    pub(crate) refused: u64,
    /// Of these, requests on a connection that resumed an earlier TLS session.
    pub(crate) resumed: u64,
    /// Responses within the window, whenever their requests were due.
    pub(crate) answered_in_window: u64,
    /// Responses from the start of the warm-up on. Counted for HTTP/1.1 only.
    pub(crate) answered: u64,
}

impl LoadOutcome {
    fn new() -> anyhow::Result<Self> {
        let none = histogram()?;
        Ok(Self {
            due: none.clone(),
            sent: none.clone(),
            late: none,
            requests: 0,
            unanswered: 0,
            refused: 0,
            resumed: 0,
            answered_in_window: 0,
            answered: 0,
        })
    }
}

/// Returns a histogram of nanoseconds with three significant digits.
pub(crate) fn histogram() -> anyhow::Result<Histogram<u64>> {
    /// Maximum latency of the histogram.
    const MAX_LATENCY: u64 = 60_000_000_000;
    Ok(Histogram::new_with_bounds(1, MAX_LATENCY, 3)?)
}

/// Applies the load. Calls `on_boundary` on this thread when the measured window begins and ends.
pub(crate) fn drive(load: &Load, on_boundary: impl FnMut(WindowBoundary)) -> anyhow::Result<LoadOutcome> {
    match load.traffic {
        Traffic::Http1 | Traffic::NewConnections { .. } => requests::drive(load, on_boundary),
        Traffic::Http2 { streams } => http2::drive(load, streams, on_boundary),
        Traffic::Bytes => bytes::drive(load, on_boundary),
    }
}

#[cfg(test)]
mod tests;
