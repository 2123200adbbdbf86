//! Random listeners with all kinds of routes, policies and faults.

use fastrand::Rng;
use serde_json::{Value, json};

use crate::{
    filters::filters,
    random::{one, rarely},
    routes::table,
    secrets,
};

pub(crate) fn listener(rng: &mut Rng, number: usize) -> Value {
    let escaped = ["KEEP_UNCHANGED", "REJECT_REQUEST", "UNESCAPE_AND_REDIRECT", "UNESCAPE_AND_FORWARD"];
    let server = ["OVERWRITE", "APPEND_IF_ABSENT", "PASS_THROUGH"];
    let mut manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "a",
        "generate_request_id": false,
        "normalize_path": rng.bool(),
        "merge_slashes": rng.bool(),
        "path_with_escaped_slashes_action": one(rng, &escaped),
        "server_name": "twin",
        "server_header_transformation": one(rng, &server),
        "use_remote_address": rng.bool(),
        "skip_xff_append": rarely(rng, 4),
        "xff_num_trusted_hops": rng.u32(..3),
        "route_config": table(rng),
        "http_filters": filters(rng),
        "http_protocol_options": {"accept_http_10": rng.bool(), "enable_trailers": true},
        "delayed_close_timeout": "0.01s",
        "access_log": access_log(),
    });
    if rng.bool() {
        manager["upgrade_configs"] = json!([{"upgrade_type": "websocket"}]);
    }
    if rng.bool() {
        let range = one(rng, &["127.0.0.0", "10.0.0.0"]);
        manager["internal_address_config"] =
            json!({"cidr_ranges": [{"address_prefix": range, "prefix_len": 8}]});
    }
    let mut chain = json!({"filters": [{"name": "http", "typed_config": manager}]});
    if rarely(rng, 4) {
        chain["transport_socket"] = secrets::transport_socket();
    }
    json!({
        "name": format!("listener-{number}"),
        "address": address(),
        "filter_chains": [chain],
    })
}

/// Returns the address of a listener. A port of 127.0.0.1 may have belonged to an earlier server whose clients
/// still connect; their requests would be in the logs.
pub(crate) fn address() -> Value {
    json!({"socket_address": {"address": "127.0.13.1", "port_value": 0}})
}

/// Returns an access log without varying fields.
pub(crate) fn access_log() -> Value {
    json!([{"name": "file", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
        "path": "/dev/stdout",
        "log_format": {"json_format": {
            "case": "%REQ(X-CASE)%",
            "method": "%REQ(:METHOD)%",
            "path": "%REQ(:PATH)%",
            "original path": "%REQ(X-ENVOY-ORIGINAL-PATH)%",
            "authority": "%REQ(:AUTHORITY)%",
            "protocol": "%PROTOCOL%",
            "status": "%RESPONSE_CODE%",
            "details": "%RESPONSE_CODE_DETAILS%",
            "flags": "%RESPONSE_FLAGS%",
            "route": "%ROUTE_NAME%",
            "cluster": "%UPSTREAM_CLUSTER%",
            "upstream": "%UPSTREAM_HOST%",
            "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
            "failure": "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
            "received": "%BYTES_RECEIVED%",
            "sent": "%BYTES_SENT%",
            "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
            "peer": "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%",
            "server name": "%REQUESTED_SERVER_NAME%",
            "grpc": "%GRPC_STATUS_NUMBER%",
        }},
    }}])
}
