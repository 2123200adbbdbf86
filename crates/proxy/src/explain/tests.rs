//! Explanations of listeners and their settings.

use std::time::Instant;

use serde_json::json;
use skysail_policy::{
    config::{
        Endpoints,
        cluster::{Endpoint, Health, Locality},
    },
    state::health::EndpointState,
};
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
    listener_of(address, underscores, &json!({}), &routes)
}

/// Returns a listener with further settings of its connection manager, and these routes.
fn listener_of(address: &Value, underscores: &str, settings: &Value, routes: &Value) -> Value {
    let router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
    let mut manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "a",
        "common_http_protocol_options": {"headers_with_underscores_action": underscores},
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": router}}],
    });
    let all = settings.as_object().into_iter().flatten();
    all.for_each(|(name, value)| manager[name.as_str()] = value.clone());
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

/// Returns the outcome of a request for a path, with a setting of the connection manager.
fn outcome(settings: &Value, routes: &Value, path: &str) -> Outcome {
    let head = RequestHead::build("GET", path, "a", &[]);
    let address = SocketAddr::from(([127, 0, 0, 1], 81));
    let connection = Connection { source: address, destination: address, tls: None };
    let at = json!({"socket_address": {"address": "127.0.0.1", "port_value": 81}});
    let proxy = proxy(&json!([listener_of(&at, "ALLOW", settings, routes)]));
    proxy.explain("ALLOW", &connection, Some(&head)).outcome
}

#[test]
fn paths_are_refused_and_redirected_as_by_the_proxy() {
    let routes = json!([{"match": {"path": "/a/b"}, "direct_response": {"status": 202}}]);
    let of = |action: &str, path: &str| {
        outcome(&json!({"path_with_escaped_slashes_action": action}), &routes, path)
    };
    let status = |outcome: &Outcome| if let Outcome::Responded(status, _) = outcome { *status } else { 0 };
    assert_eq!(status(&of("KEEP_UNCHANGED", "/a%2Fb")), 404);
    assert_eq!(status(&of("UNESCAPE_AND_FORWARD", "/a%2Fb")), 202);
    assert_eq!(status(&of("REJECT_REQUEST", "/a%2Fb")), 400);
    let redirect = "redirect to the normalized path /a/b".to_owned();
    assert_eq!(of("UNESCAPE_AND_REDIRECT", "/a%2Fb"), Outcome::Responded(307, redirect));
}

#[test]
fn locations_have_the_rewritten_path() {
    let routes = json!([
        {"match": {"prefix": "/a/"}, "redirect": {"host_redirect": "b", "prefix_rewrite": "/c/"}},
    ]);
    let redirect = Outcome::Responded(301, "redirect to http://b/c/d".to_owned());
    assert_eq!(outcome(&json!({}), &routes, "/a/d"), redirect);
}

/// Returns the health of each endpoint of a cluster, and why no request reaches it.
fn states(cluster: Cluster, priorities: Vec<Vec<Endpoint>>, weights: &[u32]) -> Vec<(&'static str, String)> {
    let localities = weights.iter().map(|weight| Locality { place: Default::default(), weight: *weight });
    let endpoints = Endpoints {
        priorities: priorities.into_iter().map(|list| list.into_iter().map(Arc::new).collect()).collect(),
        localities: localities.collect(),
        ..Endpoints::default()
    };
    cluster.endpoints.store(Arc::new(endpoints));
    let sends = EndpointProtocol::Bytes { is_tunnel: false };
    let report = target::describe(&cluster, ([10, 0, 0, 1], 80).into(), sends, &Origins::default());
    report.endpoints.into_iter().map(|endpoint| (endpoint.health, endpoint.unused)).collect()
}

#[test]
fn endpoints_that_get_no_request_have_a_reason() {
    let endpoint = |health, locality| {
        let state = Some(Arc::new(EndpointState::new(Instant::now())));
        Endpoint { health, locality, state, ..Endpoint::new(([10, 0, 0, 1], 80).into(), None) }
    };
    let ejected = endpoint(Health::Healthy, 0);
    shares::eject(&ejected);
    let first = vec![
        endpoint(Health::Healthy, 0),
        endpoint(Health::Healthy, 0),
        endpoint(Health::Healthy, 0),
        endpoint(Health::Degraded, 0),
        endpoint(Health::Draining, 0),
        endpoint(Health::Healthy, 1),
    ];
    let cluster = Cluster { locality_weighted: true, panic_threshold: 0, ..Cluster::new("a") };
    let found = states(cluster, vec![first, vec![endpoint(Health::Healthy, 0)]], &[1, 0]);
    let words: Vec<(&str, &str)> = found.iter().map(|(health, unused)| (*health, unused.as_str())).collect();
    assert_eq!(
        words[2..],
        [
            ("healthy", ""),
            ("degraded", "degraded, and not used because enough endpoints are healthy"),
            ("draining", "draining"),
            ("healthy", "its locality has no weight"),
            ("healthy", "priority 1 is not used"),
        ]
    );
    let few = vec![endpoint(Health::Unhealthy, 0), ejected, endpoint(Health::Healthy, 0)];
    let cluster = Cluster { panic_threshold: 0, ..Cluster::new("a") };
    let found = states(cluster, vec![few], &[]);
    assert_eq!(found[0], ("unhealthy", "unhealthy".to_owned()));
    assert_eq!(found[1], ("ejected", "ejected by outlier detection".to_owned()));
    assert_eq!(found[2], ("healthy", String::new()));
}
