//! The load: a client on one thread, and the results that it measures.

mod bytes;
mod hello;
mod http2;
mod idle;
mod requests;
mod scheduled;
mod sequence;
pub(crate) mod surge;

use std::{net::SocketAddr, time::Duration};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
pub(crate) use skysail_load::WindowBoundary;

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
    /// Requests of a protocol. Has a schedule, and no TLS.
    Scheduled(LoadProtocol),
}

/// Protocol of requests at the rate of a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LoadProtocol {
    /// HTTP/1.1 on persistent connections.
    #[default]
    Http1,
    /// HTTP/2 with prior knowledge, one stream at a time on each connection.
    Http2,
    /// gRPC: the unary call `Ping` of Fortio, one at a time on each connection.
    Grpc,
    /// Bytes that the server echoes.
    Tcp,
}

impl LoadProtocol {
    /// Returns the name in texts.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Http1 => "HTTP/1.1",
            Self::Http2 => "HTTP/2",
            Self::Grpc => "gRPC (unary)",
            Self::Tcp => "TCP (echo)",
        }
    }

    /// Returns the name in scenarios and result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http1 => "http1",
            Self::Http2 => "http2",
            Self::Grpc => "grpc",
            Self::Tcp => "tcp",
        }
    }

    /// Returns the traffic of a client.
    pub(crate) fn traffic(self) -> Traffic {
        if self.is_http1() { Traffic::Http1 } else { Traffic::Scheduled(self) }
    }

    /// Returns true for HTTP/1.1; for serialization.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(crate) fn is_http1(&self) -> bool {
        *self == Self::Http1
    }
}

impl Traffic {
    /// Returns the protocol of the proxies and the server.
    pub(crate) fn protocol(self) -> Protocol {
        match self {
            Self::Http1 | Self::NewConnections { .. } => Protocol::Http1,
            Self::Http2 { .. } => Protocol::Http2,
            Self::Bytes => Protocol::Tcp,
            Self::Scheduled(LoadProtocol::Http1) => Protocol::Http1,
            Self::Scheduled(LoadProtocol::Http2) => Protocol::Http2,
            Self::Scheduled(LoadProtocol::Grpc) => Protocol::Grpc,
            Self::Scheduled(LoadProtocol::Tcp) => Protocol::Echo,
        }
    }
}

/// Maximum time by which a window is extended if no response has arrived in it.
const MAX_EXTENSION: Duration = Duration::from_secs(60);

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
    /// Responses from the start of the warm-up on. Counted with a schedule only.
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
        Traffic::Scheduled(protocol) => scheduled::drive(load, protocol, on_boundary),
    }
}

#[cfg(test)]
mod tests;
