//! What the log says of limits that others reach: of each at most once a minute on each worker, as who reaches one may do
//! so again and again. Metrics count every time.

use std::{
    cell::Cell,
    fmt,
    time::{Duration, Instant},
};

use tracing::warn;

/// A limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Bytes of a request's head.
    HeadSize,
    /// Fields of a request's head.
    HeadFields,
    /// Time for a request's head.
    HeadTime,
    /// Time in which nothing moves.
    StreamIdle,
    /// Time for a whole request.
    RequestTime,
    /// Time for a request and its answer.
    StreamDuration,
    /// Content that is kept for a filter.
    Content,
    /// Streams at once.
    Streams,
    /// Time for the first bytes of a connection.
    Inspection,
    /// Time for a handshake of TLS.
    Handshake,
    /// The head of an upstream's answer.
    AnswerHead,
    /// A cluster's connections.
    Connections,
    /// A cluster's requests that wait for a connection.
    Pending,
    /// A cluster's requests.
    Requests,
    /// A cluster's retries.
    Retries,
    /// Connections from clients.
    Clients,
    /// Names of virtual hosts that requests ask for.
    Names,
    /// Time for the control plane's answer about a virtual host.
    Discovery,
    /// What a new configuration would not admit any more.
    Admission,
}

impl Limit {
    /// What follows from it, and what sets it.
    fn words(self) -> &'static str {
        match self {
            Self::HeadSize => "a request's head is larger than max_request_headers_kb allows: it is refused",
            Self::HeadFields => {
                "a request's head has more fields than max_headers_count allows: it is refused"
            }
            Self::HeadTime => {
                "a request's head did not come whole within request_headers_timeout: it is refused"
            }
            Self::StreamIdle => "nothing moved on a request within its idle timeout: it is ended",
            Self::RequestTime => "a request did not come whole within request_timeout: it is refused",
            Self::StreamDuration => "a request took longer than max_stream_duration allows: it is ended",
            Self::Content => "a request's content is larger than max_request_bytes allows: it is refused",
            Self::Streams => {
                "a client opened more streams than max_concurrent_streams allows: they are refused"
            }
            Self::Inspection => {
                "a connection did not say what it is within listener_filters_timeout: it is closed"
            }
            Self::Handshake => {
                "a client did not finish TLS within transport_socket_connect_timeout: it is closed"
            }
            Self::AnswerHead => {
                "the head of an answer is larger than max_response_headers_kb or max_headers_count allows: it is \
                 refused"
            }
            Self::Connections => {
                "there are as many connections as max_connections allows: requests wait for one"
            }
            Self::Pending => {
                "as many requests wait for a connection as max_pending_requests allows: others are refused"
            }
            Self::Requests => "there are as many requests as max_requests allows: others are refused",
            Self::Retries => "there are as many retries as allowed: other requests are not tried again",
            Self::Clients => {
                "there are as many connections as max_active_downstream_connections allows: others are closed"
            }
            Self::Names => {
                "as many names of hosts are in use as are asked for: it is not known whether the mesh has this one"
            }
            Self::Discovery => {
                "the control plane has not answered whether the mesh has the host: the request is refused; \
                 outboundTrafficPolicy.unansweredHosts of the mesh configuration decides this"
            }
            Self::Admission => {
                "what was admitted before is not admitted by the configuration of now: it is ended after \
                 skysail.admission.drain_ms"
            }
        }
    }
}

const COUNT: usize = Limit::Admission as usize + 1;
/// The log hears of a limit no more often.
const QUIET: Duration = Duration::from_secs(60);

thread_local! {
    static TOLD: [Cell<Option<Instant>>; COUNT] = const { [const { Cell::new(None) }; COUNT] };
}

/// Says that a limit has been reached, and where, unless it was said not long ago.
#[cold]
pub(crate) fn log(limit: Limit, place: fmt::Arguments<'_>) {
    if TOLD.with(|told| is_due(&told[limit as usize], Instant::now())) {
        warn!("{place}: {} (said once a minute at most; metrics count every time)", limit.words());
    }
}

fn is_due(told: &Cell<Option<Instant>>, now: Instant) -> bool {
    let due = told.get().is_none_or(|told| now.saturating_duration_since(told) >= QUIET);
    if due {
        told.set(Some(now));
    }
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_told_of_once_a_minute() {
        let (told, start) = (Cell::new(None), Instant::now());
        let said = [0, 1, 59, 60, 61, 119, 120].map(|at| is_due(&told, start + Duration::from_secs(at)));
        assert_eq!(said, [true, false, false, true, false, false, true]);
    }
}
