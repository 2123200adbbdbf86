//! Connections that a proxy accepts: `connectionSettings` in its connection managers and listeners.

use skysail_xds::envoy::pb::envoy::extensions::filters::network::http_connection_manager::v3::{
    HttpConnectionManager, http_connection_manager::PathWithEscapedSlashesAction,
};

use super::pb::{UInt32Value, core, duration, uint32};
use crate::api::{
    Duration,
    connection_settings::{ConnectionSettings, EscapedSlashesAction, UnderscoresAction},
};

use core::http_protocol_options::HeadersWithUnderscoresAction;

/// Sets the limits, timeouts and normalization of a connection manager. They replace those of the mesh configuration.
pub(super) fn apply(manager: &mut HttpConnectionManager, from: &ConnectionSettings) {
    let time = |length: Option<Duration>| length.map(|length| duration(length.0));
    let mut common = manager.common_http_protocol_options.take().unwrap_or_default();
    common.idle_timeout = time(from.http_idle_timeout).or(common.idle_timeout);
    common.max_connection_duration = time(from.http_max_connection_duration);
    common.max_stream_duration = time(from.http_max_stream_duration);
    common.headers_with_underscores_action = (match from.http_headers_with_underscores_action {
        UnderscoresAction::Unspecified | UnderscoresAction::Allow => HeadersWithUnderscoresAction::Allow,
        UnderscoresAction::Reject => HeadersWithUnderscoresAction::RejectRequest,
        UnderscoresAction::Drop => HeadersWithUnderscoresAction::DropHeader,
    }) as i32;
    if common != core::HttpProtocolOptions::default() {
        manager.common_http_protocol_options = Some(common);
    }
    manager.stream_idle_timeout = time(from.http_stream_idle_timeout).or(manager.stream_idle_timeout);
    manager.request_timeout = time(from.http_request_timeout);
    manager.request_headers_timeout = time(from.http_request_headers_timeout);
    manager.drain_timeout = time(from.http_drain_timeout);
    set_http2(manager, from);
    manager.merge_slashes = from.http_merge_slashes.unwrap_or(manager.merge_slashes);
    use PathWithEscapedSlashesAction as Escaped;
    let escaped = match from.http_path_with_escaped_slashes_action {
        EscapedSlashesAction::Unspecified => return,
        EscapedSlashesAction::KeepUnchanged => Escaped::KeepUnchanged,
        EscapedSlashesAction::RejectRequest => Escaped::RejectRequest,
        EscapedSlashesAction::UnescapeAndRedirect => Escaped::UnescapeAndRedirect,
        EscapedSlashesAction::UnescapeAndForward => Escaped::UnescapeAndForward,
    };
    manager.path_with_escaped_slashes_action = escaped as i32;
}

fn set_http2(manager: &mut HttpConnectionManager, from: &ConnectionSettings) {
    let streams = number(from.http_max_concurrent_streams);
    let stream_window = number(from.http2_initial_stream_window_size);
    let connection_window = number(from.http2_initial_connection_window_size);
    if streams.is_none() && stream_window.is_none() && connection_window.is_none() {
        return;
    }
    let options = manager.http2_protocol_options.get_or_insert_default();
    options.max_concurrent_streams = streams;
    options.initial_stream_window_size = stream_window;
    options.initial_connection_window_size = connection_window;
}

/// Returns the buffer size of connections to a gateway's listeners.
pub(super) fn buffer_limit(from: Option<&ConnectionSettings>) -> Option<UInt32Value> {
    number(from?.listener_per_connection_buffer_limit_bytes)
}

fn number(value: Option<i32>) -> Option<UInt32Value> {
    value.and_then(|value| u32::try_from(value).ok()).and_then(uint32)
}
