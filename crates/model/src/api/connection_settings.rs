//! Settings of the connections that a proxy accepts: `connectionSettings` of its settings.

use serde::Deserialize;

use super::Duration;

/// Limits, timeouts and normalization of requests. Source: `istio.mesh.v1alpha1.ProxyConfig.ConnectionSettings`.
///
/// As in Istio, an annotation replaces those of the mesh configuration as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ConnectionSettings {
    /// Defaults of the fields that are unset.
    pub profile: ConnectionProfile,
    /// Buffer size in bytes of each connection to a gateway.
    pub listener_per_connection_buffer_limit_bytes: Option<i32>,
    /// Idle timeout of a connection without requests.
    pub http_idle_timeout: Option<Duration>,
    /// Time after which a connection serves no further request.
    pub http_max_connection_duration: Option<Duration>,
    /// Time between the two GOAWAYs of HTTP/2.
    pub http_drain_timeout: Option<Duration>,
    /// Timeout of the whole request.
    pub http_request_timeout: Option<Duration>,
    /// Timeout of a request's head from its first byte.
    pub http_request_headers_timeout: Option<Duration>,
    /// Idle timeout of a stream.
    pub http_stream_idle_timeout: Option<Duration>,
    /// Maximum duration of a request and its response.
    pub http_max_stream_duration: Option<Duration>,
    /// Maximum number of concurrent streams of an HTTP/2 connection.
    pub http_max_concurrent_streams: Option<i32>,
    /// Flow-control window in bytes of an HTTP/2 stream.
    pub http2_initial_stream_window_size: Option<i32>,
    /// Flow-control window in bytes of an HTTP/2 connection.
    pub http2_initial_connection_window_size: Option<i32>,
    /// Treatment of header names with underscores.
    pub http_headers_with_underscores_action: UnderscoresAction,
    /// Whether adjacent slashes are merged; unset: as `pathNormalization` of the mesh configuration says.
    pub http_merge_slashes: Option<bool>,
    /// Treatment of `%2F` and `%5C` in paths; unspecified: as `pathNormalization` of the mesh configuration says.
    pub http_path_with_escaped_slashes_action: EscapedSlashesAction,
}

/// Names of the fields of [`ConnectionSettings`], those with an effect.
pub(crate) const FIELDS: [&str; 15] = [
    "profile",
    "listenerPerConnectionBufferLimitBytes",
    "httpIdleTimeout",
    "httpMaxConnectionDuration",
    "httpDrainTimeout",
    "httpRequestTimeout",
    "httpRequestHeadersTimeout",
    "httpStreamIdleTimeout",
    "httpMaxStreamDuration",
    "httpMaxConcurrentStreams",
    "http2InitialStreamWindowSize",
    "http2InitialConnectionWindowSize",
    "httpHeadersWithUnderscoresAction",
    "httpMergeSlashes",
    "httpPathWithEscapedSlashesAction",
];

/// Defaults of connection settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ConnectionProfile {
    /// Istio's defaults.
    #[default]
    Sidecar,
    /// At gateways, Envoy's recommendations for proxies that untrusted clients reach.
    Edge,
}

/// Treatment of header names with underscores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
pub enum UnderscoresAction {
    /// Default of the profile.
    #[default]
    #[serde(rename = "HEADERS_WITH_UNDERSCORES_UNSPECIFIED")]
    Unspecified,
    /// They are forwarded.
    #[serde(rename = "HEADERS_WITH_UNDERSCORES_ALLOW")]
    Allow,
    /// The request is refused.
    #[serde(rename = "HEADERS_WITH_UNDERSCORES_REJECT_REQUEST")]
    Reject,
    /// They are removed.
    #[serde(rename = "HEADERS_WITH_UNDERSCORES_DROP_HEADER")]
    Drop,
}

/// Treatment of `%2F` and `%5C` in paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum EscapedSlashesAction {
    /// Default of the profile.
    #[default]
    #[serde(rename = "PATH_WITH_ESCAPED_SLASHES_UNSPECIFIED")]
    Unspecified,
    /// They are kept.
    KeepUnchanged,
    /// The request is refused.
    RejectRequest,
    /// They are unescaped, and the client is redirected to the result.
    UnescapeAndRedirect,
    /// They are unescaped.
    UnescapeAndForward,
}

/// Least flow-control window in bytes (RFC 9113, section 6.9.2).
const MIN_WINDOW: i32 = 65_535;

impl ConnectionSettings {
    /// Removes numbers that a proxy would refuse, and returns the field and the least value of each.
    pub(crate) fn remove_bad(&mut self) -> Vec<(&'static str, i32)> {
        let numbers = [
            (
                "listenerPerConnectionBufferLimitBytes",
                &mut self.listener_per_connection_buffer_limit_bytes,
                0,
            ),
            ("httpMaxConcurrentStreams", &mut self.http_max_concurrent_streams, 1),
            ("http2InitialStreamWindowSize", &mut self.http2_initial_stream_window_size, MIN_WINDOW),
            ("http2InitialConnectionWindowSize", &mut self.http2_initial_connection_window_size, MIN_WINDOW),
        ];
        let bad = numbers.into_iter().filter(|(_, value, least)| value.is_some_and(|value| value < *least));
        bad.map(|(field, value, least)| {
            *value = None;
            (field, least)
        })
        .collect()
    }

    /// Returns these settings with the defaults of their profile for gateways.
    #[must_use]
    pub fn at_gateway(&self) -> Self {
        let mut made = self.clone();
        if self.profile != ConnectionProfile::Edge {
            return made;
        }
        let seconds = |count| Duration(std::time::Duration::from_secs(count));
        made.listener_per_connection_buffer_limit_bytes.get_or_insert(32 << 10);
        made.http_idle_timeout.get_or_insert(seconds(3_600));
        made.http_stream_idle_timeout.get_or_insert(seconds(300));
        made.http_request_timeout.get_or_insert(seconds(300));
        made.http_request_headers_timeout.get_or_insert(seconds(60));
        made.http_max_concurrent_streams.get_or_insert(100);
        made.http2_initial_stream_window_size.get_or_insert(64 << 10);
        made.http2_initial_connection_window_size.get_or_insert(1 << 20);
        made.http_merge_slashes.get_or_insert(true);
        if made.http_headers_with_underscores_action == UnderscoresAction::Unspecified {
            made.http_headers_with_underscores_action = UnderscoresAction::Reject;
        }
        if made.http_path_with_escaped_slashes_action == EscapedSlashesAction::Unspecified {
            made.http_path_with_escaped_slashes_action = EscapedSlashesAction::UnescapeAndRedirect;
        }
        made
    }
}
