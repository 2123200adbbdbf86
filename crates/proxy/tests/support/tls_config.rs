//! Bootstrap configuration of listeners with TLS, for Envoy and for the sidecar.

#![allow(dead_code, reason = "each test file uses a part of it")]

use serde_json::{Value, json};

use crate::pki::Certificate;

pub(crate) fn typed(kind: &str, config: &Value) -> Value {
    let mut config = config.clone();
    config["@type"] = format!("type.googleapis.com/envoy.extensions.{kind}").into();
    json!({"name": "any", "typed_config": config})
}

pub(crate) fn socket(port: u16) -> Value {
    json!({"socket_address": {"address": "127.0.0.1", "port_value": port}})
}

/// Returns a listener that answers directly, or sends requests for `hN` to cluster N.
pub(crate) fn listener(name: &str, tls: Option<&Value>, clusters: &[Value]) -> Value {
    let host = |name: &str, domain: &str, mut route: Value| {
        route["match"] = json!({"prefix": "/"});
        json!({"name": name, "domains": [domain], "routes": [route]})
    };
    let to = |(index, cluster): (usize, &Value)| {
        host(&format!("h{index}"), &format!("h{index}"), json!({"route": {"cluster": cluster["name"]}}))
    };
    let hosts = clusters.iter().enumerate().map(to);
    let itself = host("itself", "*", json!({"direct_response": {"status": 200}}));
    let manager = json!({
        "stat_prefix": name,
        "route_config": {"virtual_hosts": hosts.chain([itself]).collect::<Vec<_>>()},
        "http_filters": [typed("filters.http.router.v3.Router", &json!({}))],
    });
    let manager = typed("filters.network.http_connection_manager.v3.HttpConnectionManager", &manager);
    let mut chain = json!({"filters": [manager]});
    if let Some(tls) = tls {
        chain["transport_socket"] = typed("transport_sockets.tls.v3.DownstreamTlsContext", tls);
    }
    json!({"name": name, "address": socket(0), "filter_chains": [chain]})
}

pub(crate) fn bootstrap(listeners: &[Value], clusters: &[Value]) -> String {
    json!({
        "admin": {"address": socket(0)},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    })
    .to_string()
}

pub(crate) fn inline(pem: &str) -> Value {
    json!({"inline_string": pem})
}

pub(crate) fn own(certificate: &Certificate) -> Value {
    json!([{"certificate_chain": inline(&certificate.chain), "private_key": inline(&certificate.key)}])
}
