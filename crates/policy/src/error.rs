//! Errors of requests and connections, and the responses to them.
//!
//! An error has a kind, a side and a cause. One table ([`Error::response`]) maps it to status, gRPC status, response
//! flag, details and body. The texts are Envoy's, because alerts and users search logs for them. [`crate::retry`]
//! decides whether a failed attempt is retried. A direct response or a redirect is no error.

use std::{borrow::Cow, fmt};

use skysail_http::{
    grpc_status,
    http2::{Reason, StreamClosed, StreamError, Unsent},
};

/// Side that caused an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The client.
    Downstream,
    /// The server, or the connection to it.
    Upstream,
    /// This proxy, or its configuration.
    Internal,
}

/// Kind of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No virtual host or route matches.
    RouteNotFound,
    /// The cluster of the route does not exist; the response has this status.
    ClusterNotFound(u16),
    /// The control plane has not answered whether the host exists.
    HostUnanswered,
    /// The control plane has not sent these secrets, which connections to the host need.
    SecretsMissing(Box<str>),
    /// The cluster has no endpoint to select.
    NoHealthyUpstream,
    /// The host of a dynamic forward proxy has no address.
    DnsFailed,
    /// The cache of a dynamic forward proxy is full.
    DnsCacheOverflow,
    /// Too many requests wait for a lookup of a dynamic forward proxy.
    DnsPendingOverflow,
    /// The connection failed (refused, unreachable, TLS handshake failed).
    ConnectFailed,
    /// The connect timeout has expired.
    ConnectTimeout,
    /// The upstream closed the connection.
    UpstreamClosed,
    /// The connection was closed because the upstream did not answer a keep-alive ping. It may have processed the
    /// request.
    UpstreamSilent,
    /// The upstream reset the stream.
    UpstreamReset,
    /// The upstream refused the HTTP/2 stream without processing it.
    UpstreamRefused,
    /// The upstream violated the HTTP protocol.
    UpstreamProtocol,
    /// The head of the upstream's response exceeds the limit.
    AnswerTooLarge,
    /// The route timeout has expired.
    ResponseTimeout,
    /// The per-try timeout has expired.
    TryTimeout,
    /// A circuit breaker of the cluster is open.
    Overflow,
    /// The stream idle timeout has expired; `true` if the request was complete.
    StreamIdle(bool),
    /// The maximum duration of the stream is exceeded; `true` if the request was complete.
    StreamDuration(bool),
    /// The timeout for receiving the request has expired.
    RequestTimeout,
    /// The worker is overloaded.
    Overloaded,
    /// A policy refuses the request; the details name the rule.
    Denied(Box<str>),
    /// The request was admitted, and the current configuration would refuse it; the cause has the reason.
    Revoked,
    /// The fault filter aborts with this HTTP status.
    FaultAbort(u16),
    /// The fault filter aborts with this gRPC status.
    FaultAbortGrpc(u32),
    /// An external processor has ended the exchange: it has answered the request, or failed.
    ProcessorEnded,
    /// The client closed the connection or reset the stream.
    DownstreamClosed,
    /// The client violated the HTTP protocol.
    DownstreamProtocol,
    /// The request's body exceeds the buffer limit.
    BodyTooLarge,
    /// The request has no `Host`.
    MissingHost,
    /// The path cannot be normalised.
    BadPath,
    /// The upgrade is not allowed.
    UpgradeRefused,
    /// No filter chain matches the connection.
    NoFilterChain,
}

/// An error of a request or connection.
#[derive(Debug)]
pub struct Error {
    /// Kind.
    pub kind: Kind,
    /// Cause, as the system or the peer reports it, such as `Connection refused`.
    pub cause: Option<Box<str>>,
    /// The client has received a part of the response.
    pub response_started: bool,
}

/// Response flags of access logs and metrics (`%RESPONSE_FLAGS%`). Text lists them in Envoy's order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(u32);

/// Names of the flags by bit. The order is Envoy's: the end of retries comes before the failure of the last attempt.
const FLAG_NAMES: [&str; 26] = [
    "URX", "UO", "UH", "UT", "LR", "UR", "UF", "UC", "NR", "DI", "FI", "RL", "UAEX", "DC", "SI", "DPE",
    "UMSDR", "NFCF", "UPE", "NC", "OM", "DT", "DU", "RV", "DF", "RLSE",
];

#[expect(missing_docs, reason = "each is the flag of that name in Envoy's access log")]
impl Flags {
    pub const NONE: Self = Self(0);
    pub const URX: Self = Self(1);
    pub const UO: Self = Self(1 << 1);
    pub const UH: Self = Self(1 << 2);
    pub const UT: Self = Self(1 << 3);
    pub const LR: Self = Self(1 << 4);
    pub const UR: Self = Self(1 << 5);
    pub const UF: Self = Self(1 << 6);
    pub const UC: Self = Self(1 << 7);
    pub const NR: Self = Self(1 << 8);
    pub const DI: Self = Self(1 << 9);
    pub const FI: Self = Self(1 << 10);
    pub const RL: Self = Self(1 << 11);
    pub const UAEX: Self = Self(1 << 12);
    pub const DC: Self = Self(1 << 13);
    pub const SI: Self = Self(1 << 14);
    pub const DPE: Self = Self(1 << 15);
    pub const UMSDR: Self = Self(1 << 16);
    pub const NFCF: Self = Self(1 << 17);
    pub const UPE: Self = Self(1 << 18);
    pub const NC: Self = Self(1 << 19);
    pub const OM: Self = Self(1 << 20);
    pub const DT: Self = Self(1 << 21);
    /// An extension of Envoy's flags, "discovery unavailable": the control plane has not answered whether the host
    /// exists.
    pub const DU: Self = Self(1 << 22);
    /// An extension of Envoy's flags, "revoked": the request was admitted, and the current configuration would refuse
    /// it.
    pub const RV: Self = Self(1 << 23);
    pub const DF: Self = Self(1 << 24);
    pub const RLSE: Self = Self(1 << 25);

    /// Returns the flag with this name.
    pub fn named(name: &str) -> Option<Self> {
        let bit = FLAG_NAMES.iter().position(|known| *known == name)?;
        Some(Self(1 << bit))
    }

    /// Adds flags.
    pub fn insert(&mut self, other: Self) {
        self.0 |= other.0;
    }

    /// Returns whether all these flags are set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the flags as a number, for hashing.
    pub fn bits(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("-");
        }
        let set = FLAG_NAMES.iter().enumerate().filter(|(bit, _)| self.0 & (1 << bit) != 0);
        for (position, (_, name)) in set.enumerate() {
            f.write_str(if position == 0 { "" } else { "," })?;
            f.write_str(name)?;
        }
        Ok(())
    }
}

/// Response and log entries for an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorResponse {
    /// HTTP status; 0 if no response is possible, because the client has gone.
    pub status: u16,
    /// gRPC status for gRPC requests, whose HTTP status is 200.
    pub grpc: u32,
    /// Response flag.
    pub flags: Flags,
    /// Response code details.
    pub details: Cow<'static, str>,
    /// Body (`text/plain`), or `grpc-message` for gRPC requests; empty for none.
    pub body: Cow<'static, str>,
}

impl Error {
    /// Returns an error before the response has started.
    pub fn new(kind: Kind) -> Self {
        Self { kind, cause: None, response_started: false }
    }

    /// Returns an error with a cause from the system or the peer.
    pub fn caused(kind: Kind, cause: impl fmt::Display) -> Self {
        Self { cause: Some(cause.to_string().into()), ..Self::new(kind) }
    }

    /// Marks that the client has received a part of the response.
    #[must_use]
    pub fn after_response_started(mut self) -> Self {
        self.response_started = true;
        self
    }

    /// Returns the side that caused the error.
    pub fn side(&self) -> Side {
        match self.kind {
            Kind::ConnectFailed
            | Kind::ConnectTimeout
            | Kind::UpstreamClosed
            | Kind::UpstreamSilent
            | Kind::UpstreamReset
            | Kind::UpstreamRefused
            | Kind::UpstreamProtocol
            | Kind::AnswerTooLarge
            | Kind::ResponseTimeout
            | Kind::TryTimeout => Side::Upstream,
            Kind::DownstreamClosed
            | Kind::DownstreamProtocol
            | Kind::BodyTooLarge
            | Kind::MissingHost
            | Kind::BadPath
            | Kind::UpgradeRefused
            | Kind::StreamIdle(_)
            | Kind::StreamDuration(_)
            | Kind::RequestTimeout
            | Kind::Denied(_)
            | Kind::Revoked => Side::Downstream,
            Kind::RouteNotFound
            | Kind::ClusterNotFound(_)
            | Kind::HostUnanswered
            | Kind::SecretsMissing(_)
            | Kind::NoHealthyUpstream
            | Kind::DnsFailed
            | Kind::DnsCacheOverflow
            | Kind::DnsPendingOverflow
            | Kind::Overflow
            | Kind::Overloaded
            | Kind::FaultAbort(_)
            | Kind::FaultAbortGrpc(_)
            | Kind::ProcessorEnded
            | Kind::NoFilterChain => Side::Internal,
        }
    }

    /// Returns whether a retry is possible. Whether the policy wants one: [`crate::retry::should_retry`].
    pub fn may_retry(&self) -> bool {
        self.side() == Side::Upstream && !self.response_started && self.kind != Kind::ResponseTimeout
    }

    /// Returns whether the upstream certainly did not process the request.
    pub fn never_sent(&self) -> bool {
        matches!(self.kind, Kind::ConnectFailed | Kind::ConnectTimeout | Kind::UpstreamRefused)
    }

    /// Returns the response to the error. This is the one table of kinds and responses.
    pub fn response(&self) -> ErrorResponse {
        let plain = |status, flags, details: &'static str, body: &'static str| ErrorResponse {
            status,
            grpc: grpc_status::from_http(status),
            flags,
            details: Cow::Borrowed(details),
            body: Cow::Borrowed(body),
        };
        match &self.kind {
            Kind::RouteNotFound => plain(404, Flags::NR, "route_not_found", ""),
            Kind::ClusterNotFound(status) => plain(*status, Flags::NC, "cluster_not_found", ""),
            Kind::HostUnanswered => plain(
                503,
                Flags::DU,
                "host_discovery_unanswered",
                "no answer from the control plane about this host",
            ),
            Kind::SecretsMissing(names) => ErrorResponse {
                details: Cow::Owned(one_word(&format!("secrets_missing{{{names}}}"))),
                // The names are for the log alone: they may tell a client about the mesh.
                ..plain(503, Flags::DU, "", "the control plane has not sent a secret that this host needs")
            },
            Kind::NoHealthyUpstream => plain(503, Flags::UH, "no_healthy_upstream", "no healthy upstream"),
            Kind::DnsFailed => plain(503, Flags::DF, "dns_resolution_failure", "DNS resolution failure"),
            Kind::DnsCacheOverflow => plain(503, Flags::UO, "dns_cache_overflow", "DNS cache overflow"),
            Kind::DnsPendingOverflow => plain(
                503,
                Flags::UO,
                "dynamic_forward_proxy_pending_request_overflow",
                "Dynamic forward proxy pending request overflow",
            ),
            Kind::ConnectFailed => self.reset(503, Flags::UF, "remote connection failure"),
            Kind::ConnectTimeout => self.reset(503, Flags::UF, "connection timeout"),
            Kind::UpstreamClosed | Kind::UpstreamSilent => {
                self.reset(503, Flags::UC, "connection termination")
            }
            Kind::UpstreamReset => self.reset(503, Flags::UR, "remote reset"),
            Kind::UpstreamRefused => self.reset(503, Flags::UR, "remote refused stream reset"),
            Kind::UpstreamProtocol | Kind::AnswerTooLarge => self.reset(502, Flags::UPE, "protocol error"),
            Kind::Overflow => self.reset(503, Flags::UO, "overflow"),
            Kind::Overloaded => plain(503, Flags::OM, "overload", "envoy overloaded"),
            Kind::ResponseTimeout => plain(504, Flags::UT, "response_timeout", "upstream request timeout"),
            Kind::TryTimeout => plain(504, Flags::UT, "upstream_per_try_timeout", "upstream request timeout"),
            Kind::StreamIdle(request_complete) => plain(
                if *request_complete { 504 } else { 408 },
                Flags::SI,
                "stream_idle_timeout",
                "stream timeout",
            ),
            Kind::StreamDuration(request_complete) => ErrorResponse {
                grpc: 4,
                ..plain(
                    if *request_complete { 504 } else { 408 },
                    Flags::NONE,
                    "max_duration_timeout",
                    "downstream duration timeout",
                )
            },
            Kind::RequestTimeout => plain(408, Flags::NONE, "request_overall_timeout", "request timeout"),
            Kind::Denied(details) => ErrorResponse {
                details: Cow::Owned(details.to_string()),
                ..plain(403, Flags::NONE, "", "RBAC: access denied")
            },
            Kind::Revoked => ErrorResponse {
                details: Cow::Owned(revoked(self.cause.as_deref().unwrap_or_default())),
                ..plain(403, Flags::RV, "", "no longer admitted")
            },
            Kind::FaultAbort(status) => plain(*status, Flags::FI, "fault_filter_abort", "fault filter abort"),
            // As in Envoy, other requests than those of gRPC get 200.
            Kind::FaultAbortGrpc(grpc) => ErrorResponse {
                grpc: *grpc,
                ..plain(200, Flags::FI, "fault_filter_abort", "fault filter abort")
            },
            // The processor's own answer or details replace these.
            Kind::ProcessorEnded => plain(500, Flags::NONE, "ext_proc_error", ""),
            Kind::DownstreamClosed => plain(0, Flags::DC, "downstream_remote_disconnect", ""),
            Kind::DownstreamProtocol => plain(400, Flags::DPE, "http1.codec_error", "Bad Request"),
            Kind::BodyTooLarge => plain(413, Flags::NONE, "request_payload_too_large", "Payload Too Large"),
            Kind::MissingHost => plain(400, Flags::NONE, "missing_host_header", ""),
            Kind::BadPath => plain(400, Flags::NONE, "path_normalization_failed", ""),
            Kind::UpgradeRefused => plain(403, Flags::NONE, "upgrade_failed", ""),
            Kind::NoFilterChain => plain(0, Flags::NR, "filter_chain_not_found", ""),
        }
    }

    /// Returns the response to an upstream reset, with Envoy's texts. Only logs contain the cause.
    fn reset(&self, status: u16, flags: Flags, reason: &str) -> ErrorResponse {
        let started = if self.response_started { "after" } else { "before" };
        let cause = self.cause.as_deref().unwrap_or_default();
        let bar = if cause.is_empty() { "" } else { "|" };
        let details = format!("upstream_reset_{started}_response_started{{{reason}{bar}{cause}}}");
        ErrorResponse {
            status,
            grpc: grpc_status::from_http(status),
            flags,
            details: Cow::Owned(one_word(&details)),
            body: Cow::Owned(format!(
                "upstream connect error or disconnect/reset before headers. reset reason: {reason}"
            )),
        }
    }
}

/// Returns the details of a request or connection that is no longer admitted.
pub fn revoked(reason: impl fmt::Display) -> String {
    one_word(&format!("admission_revoked{{{reason}}}"))
}

/// Replaces white space by underscores, as Envoy does, so that a text is one word in a log line.
pub fn one_word(text: &str) -> String {
    text.replace(|c: char| c.is_ascii_whitespace(), "_")
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answer = self.response();
        write!(f, "{} ({})", answer.details, answer.flags)
    }
}

impl std::error::Error for Error {}

/// Error of an upstream stream that ended early.
impl From<StreamError> for Error {
    fn from(cause: StreamError) -> Self {
        let kind = match cause {
            StreamError::Reset(Reason::PROTOCOL) => return Self::new(Kind::UpstreamProtocol),
            StreamError::Reset(_) | StreamError::Dropped => return Self::new(Kind::UpstreamReset),
            StreamError::Unprocessed => return Self::new(Kind::UpstreamRefused),
            StreamError::Oversized => return Self::new(Kind::AnswerTooLarge),
            StreamError::Broken(_) => Kind::UpstreamProtocol,
            StreamError::Closed(_) => Kind::UpstreamClosed,
            StreamError::Silent => Kind::UpstreamSilent,
        };
        Self::caused(kind, cause)
    }
}

/// Error of a request that the upstream connection did not accept.
impl From<Unsent> for Error {
    fn from(unsent: Unsent) -> Self {
        match unsent {
            Unsent::Used => Self::new(Kind::UpstreamReset),
            Unsent::Unrepresentable => Self::new(Kind::BadPath),
            Unsent::Lost(cause) => Self::caused(Kind::UpstreamRefused, cause),
        }
    }
}

/// Error of a response that the downstream connection did not accept.
impl From<StreamClosed> for Error {
    fn from(StreamClosed: StreamClosed) -> Self {
        Self::new(Kind::DownstreamClosed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_texts_of_envoy() {
        let table = [
            (Error::new(Kind::RouteNotFound), 404, "NR", "route_not_found", ""),
            (Error::new(Kind::ClusterNotFound(503)), 503, "NC", "cluster_not_found", ""),
            (Error::new(Kind::NoHealthyUpstream), 503, "UH", "no_healthy_upstream", "no healthy upstream"),
            (
                Error::caused(Kind::ConnectFailed, "delayed connect error: Connection refused"),
                503,
                "UF",
                "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_Connection_refused}",
                "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure",
            ),
            (
                Error::new(Kind::UpstreamClosed),
                503,
                "UC",
                "upstream_reset_before_response_started{connection_termination}",
                "upstream connect error or disconnect/reset before headers. reset reason: connection termination",
            ),
            (
                Error::new(Kind::HostUnanswered),
                503,
                "DU",
                "host_discovery_unanswered",
                "no answer from the control plane about this host",
            ),
            (
                Error::new(Kind::SecretsMissing("kubernetes://a, kubernetes://b".into())),
                503,
                "DU",
                "secrets_missing{kubernetes://a,_kubernetes://b}",
                "the control plane has not sent a secret that this host needs",
            ),
            (Error::new(Kind::Overloaded), 503, "OM", "overload", "envoy overloaded"),
            (Error::new(Kind::ResponseTimeout), 504, "UT", "response_timeout", "upstream request timeout"),
            (
                Error::new(Kind::Denied("rbac_access_denied_matched_policy[none]".into())),
                403,
                "-",
                "rbac_access_denied_matched_policy[none]",
                "RBAC: access denied",
            ),
            (
                Error::caused(Kind::Revoked, "filter_chain_removed"),
                403,
                "RV",
                "admission_revoked{filter_chain_removed}",
                "no longer admitted",
            ),
            (Error::new(Kind::FaultAbort(555)), 555, "FI", "fault_filter_abort", "fault filter abort"),
            (Error::new(Kind::DownstreamClosed), 0, "DC", "downstream_remote_disconnect", ""),
        ];
        for (error, status, flags, details, body) in table {
            let answer = error.response();
            assert_eq!(
                (answer.status, answer.flags.to_string().as_str(), &*answer.details, &*answer.body),
                (status, flags, details, body)
            );
        }
        let late = Error::new(Kind::UpstreamClosed).after_response_started();
        assert_eq!(late.response().details, "upstream_reset_after_response_started{connection_termination}");
        assert!(!late.may_retry());
    }

    #[test]
    fn flags_are_listed_in_order() {
        let mut flags = Flags::URX;
        flags.insert(Flags::UF);
        assert_eq!(flags.to_string(), "URX,UF");
        assert!(flags.contains(Flags::UF) && !flags.contains(Flags::DC));
        assert_eq!(Flags::OM.to_string(), "OM");
    }
}
