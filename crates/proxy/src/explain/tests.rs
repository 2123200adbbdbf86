//! Explanations of listeners and their settings.

use serde_json::json;
use skysail_xds::envoy::pb::envoy::config::bootstrap::v3::Bootstrap;

use super::*;
use crate::translate::bootstrap::convert::{self, Conversion};

/// Returns the configuration of a proxy with these listeners.
fn proxy(listeners: &Value) -> ProxyConfiguration {
    let bootstrap = json!({"static_resources": {"listeners": listeners}}).to_string();
    let bootstrap = convert::convert(Conversion::Bootstrap, bootstrap.as_bytes()).unwrap();
    let resources = Bootstrap::from_slice(&bootstrap).unwrap().static_resources.unwrap();
    let resources = resources.listeners.iter().map(|listener| EncodedResource {
        kind: Kind::Listener,
        name: listener.name.clone(),
        body: listener.to_vec().into(),
    });
    let proxy = ProxyConfiguration::load(&resources.collect::<Vec<_>>());
    assert!(proxy.refused().is_empty(), "{:?}", proxy.refused());
    proxy
}

/// Returns a listener that responds 200 to every request without `x_own`.
fn listener(address: &Value, underscores: &str) -> Value {
    let routes = json!([
        {"match": {"prefix": "/", "headers": [{"name": "x_own", "present_match": true}]},
            "direct_response": {"status": 403}},
        {"match": {"prefix": "/"}, "direct_response": {"status": 200}},
    ]);
    let router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "a",
        "common_http_protocol_options": {"headers_with_underscores_action": underscores},
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": router}}],
    });
    let chain = json!({"filters": [{"name": "http", "typed_config": manager}]});
    json!({"name": underscores, "address": address, "filter_chains": [chain]})
}

#[test]
fn listeners_on_unix_sockets_have_no_ports() {
    let tcp = json!({"socket_address": {"address": "127.0.0.1", "port_value": 81}});
    let pipe = json!({"pipe": {"path": "/nowhere/socket"}});
    let listeners = json!([listener(&tcp, "ALLOW"), listener(&pipe, "DROP_HEADER")]);
    assert_eq!(proxy(&listeners).ports(), [81].into());
}

#[test]
fn names_with_underscores_are_treated_as_by_the_proxy() {
    let head = RequestHead::build("GET", "/", "a", &[("x_own", "1")]);
    let address = SocketAddr::from(([127, 0, 0, 1], 81));
    let connection = Connection { source: address, destination: address, tls: None };
    for (action, status) in [("ALLOW", 403), ("DROP_HEADER", 200), ("REJECT_REQUEST", 400)] {
        let at = json!({"socket_address": {"address": "127.0.0.1", "port_value": 81}});
        let explained = proxy(&json!([listener(&at, action)])).explain(action, &connection, Some(&head));
        let Outcome::Responded(responded, _) = &explained.outcome else { panic!("{explained:?}") };
        assert_eq!(*responded, status, "{action}");
    }
}
