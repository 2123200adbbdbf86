//! The load: what a client does to what is measured, on one thread, and what it saw.

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

/// What to send.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) target: SocketAddr,
    pub(crate) traffic: Traffic,
    pub(crate) connections: usize,
    /// When requests are due. Without it each connection (HTTP/2: stream) sends the next request once it has the answer
    /// to the last one.
    pub(crate) schedule: Option<Schedule>,
    /// Bytes of a request's body, and of an answer's.
    pub(crate) payload: usize,
    pub(crate) warmup: Duration,
    pub(crate) window: Duration,
    /// The client itself speaks mutual TLS.
    pub(crate) tls: Option<Tls>,
}

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Traffic {
    /// Requests over HTTP/1.1 on lasting connections.
    Http1,
    /// A connection of its own for every request.
    NewConnections {
        /// Whether the client offers to continue an earlier TLS session.
        resume: bool,
    },
    /// Requests over HTTP/2, so many at a time on each connection; never at a rate.
    Http2 {
        /// Requests under way on a connection.
        streams: usize,
    },
    /// Bytes to the server; never at a rate.
    Bytes,
}

impl Traffic {
    /// What the proxies and the server have to speak.
    pub(crate) fn protocol(self) -> Protocol {
        match self {
            Self::Http1 | Self::NewConnections { .. } => Protocol::Http1,
            Self::Http2 { .. } => Protocol::Http2,
            Self::Bytes => Protocol::Tcp,
        }
    }
}

/// A moment at which somebody else looks at the clock, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The measured window begins.
    Begin,
    /// The measured window ends.
    End,
}

/// What came back. Of [`Traffic::Bytes`], a "request" is 1,000,000 bytes sent, and there are no latencies.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Nanoseconds from when a request was due to its complete answer; without a schedule, from when it was sent.
    pub(crate) due: Histogram<u64>,
    /// Nanoseconds from when it was sent.
    pub(crate) sent: Histogram<u64>,
    /// Requests due in the window; without a schedule, those that ended in it.
    pub(crate) requests: u64,
    /// Of these, those without an answer: their connection broke or time was up.
    pub(crate) unanswered: u64,
    /// Of these, those answered by something other than 200.
    pub(crate) refused: u64,
    /// Of these, those whose connection continued an earlier TLS session.
    pub(crate) resumed: u64,
    /// Answers that came within the window, whenever their requests were due.
    pub(crate) answered_in_window: u64,
}

impl Outcome {
    fn new() -> anyhow::Result<Self> {
        let none = histogram()?;
        Ok(Self {
            due: none.clone(),
            sent: none,
            requests: 0,
            unanswered: 0,
            refused: 0,
            resumed: 0,
            answered_in_window: 0,
        })
    }
}

/// A histogram of nanoseconds to three digits.
pub(crate) fn histogram() -> anyhow::Result<Histogram<u64>> {
    /// Longest latency it can tell.
    const LONGEST: u64 = 60_000_000_000;
    Ok(Histogram::new_with_bounds(1, LONGEST, 3)?)
}

/// Applies the load; `tell` is called on this thread when the measured window begins and ends.
pub(crate) fn drive(load: &Load, tell: impl FnMut(Moment)) -> anyhow::Result<Outcome> {
    match load.traffic {
        Traffic::Http1 | Traffic::NewConnections { .. } => requests::drive(load, tell),
        Traffic::Http2 { streams } => http2::drive(load, streams, tell),
        Traffic::Bytes => bytes::drive(load, tell),
    }
}

#[cfg(test)]
mod tests;
