//! Configuration as it stands in Envoy's files, put together of what all tests have in common.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::net::SocketAddr;

use serde_json::{Value, json};

/// A whole file.
pub(crate) fn bootstrap(listeners: &[Value], clusters: &[Value]) -> String {
    json!({"node": {"id": "a"}, "static_resources": {"listeners": listeners, "clusters": clusters}})
        .to_string()
}

/// A listener at a free port that does this with what comes in.
pub(crate) fn listener(name: &str, filters: &[Value]) -> Value {
    json!({
        "name": name,
        "address": address(SocketAddr::from(([127, 0, 0, 1], 0))),
        "filter_chains": [{"filters": filters}]
    })
}

/// HTTP through these filters to where these routes lead, for all hosts. `options` are further fields of the manager.
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

/// One route for everything.
pub(crate) fn to(cluster: &str) -> Value {
    json!([{"match": {"prefix": "/"}, "route": {"cluster": cluster}}])
}

/// A filter by its type, without what all types begin with.
pub(crate) fn filter(kind: &str, config: &Value) -> Value {
    let url = format!("type.googleapis.com/envoy.extensions.filters.{kind}");
    json!({"name": kind, "typed_config": with(json!({"@type": url}), config)})
}

/// A cluster of one server, which speaks HTTP/1.1 unless `http2`.
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

/// TLS for a listener, with a new certificate of its own.
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

/// An object with the fields of another in place of its own.
pub(crate) fn with(mut object: Value, fields: &Value) -> Value {
    if let (Some(object), Some(fields)) = (object.as_object_mut(), fields.as_object()) {
        object.extend(fields.clone());
    }
    object
}
