//! Builders for Envoy configuration files.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::net::SocketAddr;

use serde_json::{Value, json};

/// Returns a whole bootstrap.
pub(crate) fn bootstrap(listeners: &[Value], clusters: &[Value]) -> String {
    json!({"node": {"id": "a"}, "static_resources": {"listeners": listeners, "clusters": clusters}})
        .to_string()
}

/// Returns a listener on a free port with these network filters.
pub(crate) fn listener(name: &str, filters: &[Value]) -> Value {
    json!({
        "name": name,
        "address": address(SocketAddr::from(([127, 0, 0, 1], 0))),
        "filter_chains": [{"filters": filters}]
    })
}

/// Returns an HTTP connection manager with these filters and routes for all hosts. `options` are further fields
/// of the manager.
pub(crate) fn http(filters: &[Value], routes: &Value, options: &Value) -> Value {
    let mut filters = filters.to_vec();
    filters.push(filter("http.router.v3.Router", &json!({})));
    let all = json!({"name": "all", "domains": ["*"], "routes": routes});
    let manager = json!({
        "stat_prefix": "h",
        "route_config": {"virtual_hosts": [all]},
        "http_filters": filters
    });
    filter("network.http_connection_manager.v3.HttpConnectionManager", &with(manager, options))
}

/// Returns a catch-all route to a cluster.
pub(crate) fn to(cluster: &str) -> Value {
    json!([{"match": {"prefix": "/"}, "route": {"cluster": cluster}}])
}

/// Returns a filter by its type without the common prefix.
pub(crate) fn filter(kind: &str, config: &Value) -> Value {
    let url = format!("type.googleapis.com/envoy.extensions.filters.{kind}");
    json!({"name": kind, "typed_config": with(json!({"@type": url}), config)})
}

/// Returns a cluster of one server, which speaks HTTP/1.1 unless `http2`.
pub(crate) fn cluster(name: &str, server: SocketAddr, http2: bool) -> Value {
    let protocol = if http2 { "http2_protocol_options" } else { "http_protocol_options" };
    let options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "typed_extension_protocol_options": {options: {
            "@type": format!("type.googleapis.com/{options}"),
            "explicit_http_config": {protocol: {}}
        }},
        "load_assignment": {"cluster_name": name, "endpoints": [
            {"lb_endpoints": [{"endpoint": {"address": address(server)}}]}]}
    })
}

/// Returns a downstream TLS socket with a new certificate.
pub(crate) fn tls() -> Value {
    let issued = rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap();
    let certificate = json!({
        "certificate_chain": {"inline_string": issued.cert.pem()},
        "private_key": {"inline_string": issued.signing_key.serialize_pem()}
    });
    let context = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext";
    json!({"name": "tls", "typed_config": {
        "@type": context,
        "common_tls_context": {"tls_certificates": [certificate], "alpn_protocols": ["h2", "http/1.1"]}
    }})
}

pub(crate) fn address(of: SocketAddr) -> Value {
    json!({"socket_address": {"address": of.ip().to_string(), "port_value": of.port()}})
}

/// Returns an object with the fields of another added or replaced.
pub(crate) fn with(mut object: Value, fields: &Value) -> Value {
    if let (Some(object), Some(fields)) = (object.as_object_mut(), fields.as_object()) {
        object.extend(fields.clone());
    }
    object
}
