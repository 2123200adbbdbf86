//! Log lines about limits that peers reach: at most one a minute per limit and worker, because a peer may reach a limit
//! again and again. Metrics count every event.

use std::{
    cell::Cell,
    fmt,
    time::{Duration, Instant},
};

use tracing::warn;

/// A limit that a peer can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Size of a request's head in bytes.
    HeadSize,
    /// Number of fields of a request's head.
    HeadFields,
    /// Time from the first byte of a request's head to its end.
    HeadTime,
    /// Time without progress of a request.
    StreamIdle,
    /// Time for the complete request.
    RequestTime,
    /// Time for a request and its response.
    StreamDuration,
    /// Size of the content that is buffered for a filter.
    Content,
    /// Number of concurrent streams.
    Streams,
    /// Time for the PROXY header of a connection.
    ProxyHeader,
    /// Time for the first bytes of a connection.
    Inspection,
    /// Time for a TLS handshake.
    Handshake,
    /// Size of the head of an upstream's response.
    AnswerHead,
    /// Number of connections to a cluster.
    Connections,
    /// Number of requests that wait for a connection to a cluster.
    Pending,
    /// Number of requests to a cluster.
    Requests,
    /// Number of retries to a cluster.
    Retries,
    /// Number of downstream connections.
    Clients,
    /// Number of virtual hosts that are loaded on demand.
    Names,
    /// Time for the control plane's response about a virtual host.
    Discovery,
    /// Connections and requests that a new configuration does not admit.
    Admission,
    /// Failures of Lua scripts.
    Script,
    /// Failures of external processors.
    Processor,
}

impl Limit {
    /// Returns the setting of the limit, and the consequence of reaching it.
    fn text(self) -> &'static str {
        match self {
            Self::HeadSize => {
                "the head of a request is larger than max_request_headers_kb: the request is refused"
            }
            Self::HeadFields => {
                "the head of a request has more fields than max_headers_count: the request is refused"
            }
            Self::HeadTime => {
                "the head of a request did not arrive within request_headers_timeout: the request is refused"
            }
            Self::StreamIdle => "a request made no progress within its idle timeout: the request is ended",
            Self::RequestTime => "a request did not arrive within request_timeout: the request is refused",
            Self::StreamDuration => "a request took longer than max_stream_duration: the request is ended",
            Self::Content => {
                "the content of a request is larger than max_request_bytes: the request is refused"
            }
            Self::Streams => {
                "a client opened more streams than max_concurrent_streams: the streams are refused"
            }
            Self::ProxyHeader => {
                "the PROXY header of a connection did not arrive within listener_filters_timeout: the connection is \
                 closed"
            }
            Self::Inspection => {
                "the protocol of a connection was not detected within listener_filters_timeout: the connection is \
                 closed"
            }
            Self::Handshake => {
                "a TLS handshake did not complete within transport_socket_connect_timeout: the connection is closed"
            }
            Self::AnswerHead => {
                "the head of a response is larger than max_response_headers_kb or max_headers_count allows: the \
                 response is refused"
            }
            Self::Connections => "it has max_connections connections: requests wait for one",
            Self::Pending => {
                "max_pending_requests requests wait for a connection: further requests are refused"
            }
            Self::Requests => "it has max_requests requests: further requests are refused",
            Self::Retries => {
                "it has as many retries as its retry budget or max_retries allows: further requests are not retried"
            }
            Self::Clients => {
                "there are max_active_downstream_connections connections: further connections are closed"
            }
            Self::Names => {
                "too many virtual hosts are loaded on demand: this one is not requested from the control plane"
            }
            Self::Discovery => {
                "the control plane has not answered whether the mesh has the host: the request is refused; \
                 outboundTrafficPolicy.unansweredHosts of the mesh configuration decides this"
            }
            Self::Admission => {
                "a connection or request is no longer admitted by the configuration in effect: it ends after \
                 skysail.admission.drain_ms"
            }
            Self::Processor => {
                "external processing failed: the request fails, or continues as failure_mode_allow says"
            }
            Self::Script => "a Lua script failed: the message continues with the changes made so far",
        }
    }
}

const COUNT: usize = Limit::Processor as usize + 1;
/// Minimum time between two log lines about one limit.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

thread_local! {
    static LAST_LOGGED: [Cell<Option<Instant>>; COUNT] = const { [const { Cell::new(None) }; COUNT] };
}

/// Logs that a limit has been reached, unless that was logged within the last minute. `place` names the object and the
/// peer.
#[cold]
pub(crate) fn log(limit: Limit, place: fmt::Arguments<'_>) {
    if LAST_LOGGED.with(|last| is_due(&last[limit as usize], Instant::now())) {
        warn!("{place}: {} (logged at most once a minute; metrics count every event)", limit.text());
    }
}

fn is_due(last: &Cell<Option<Instant>>, now: Instant) -> bool {
    let due = last.get().is_none_or(|last| now.saturating_duration_since(last) >= LOG_INTERVAL);
    if due {
        last.set(Some(now));
    }
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_logged_once_a_minute() {
        let (last, start) = (Cell::new(None), Instant::now());
        let logged = [0, 1, 59, 60, 61, 119, 120].map(|at| is_due(&last, start + Duration::from_secs(at)));
        assert_eq!(logged, [true, false, false, true, false, false, true]);
    }
}
