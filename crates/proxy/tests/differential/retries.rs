//! Random retry policies, and requests that determine the result of each try. No case depends on timing.

use fastrand::Rng;
use serde_json::{Value, json};

use crate::{
    listener::{access_log, address},
    random::{add, one, rarely},
    request::{Body, Request, Version},
    servers,
};

const ON: [&str; 12] = [
    "5xx",
    "gateway-error",
    "reset",
    "reset-before-request",
    "connect-failure",
    "retriable-4xx",
    "refused-stream",
    "retriable-status-codes",
    "retriable-headers",
    "envoy-ratelimited",
    "5xx,reset,connect-failure",
    "unknown",
];
const GRPC_ON: [&str; 5] =
    ["cancelled", "deadline-exceeded", "internal", "resource-exhausted", "unavailable"];
/// Results of tries; see [`servers`].
const BEHAVIOURS: [&str; 18] = [
    "200",
    "200",
    "404",
    "409",
    "418",
    "500",
    "502",
    "503",
    "503",
    "reset",
    "reset",
    "refused",
    "broken",
    "garbage",
    "overloaded",
    "limited",
    "marked",
    "grpc14",
];

/// Returns clusters with one HTTP/1.1 server, one HTTP/2 server, several selected by path, none, and one with a retry
/// budget. No connection is reused, because the sidecar retries at once on one that was closed while idle.
pub(crate) fn clusters() -> Vec<Value> {
    let mut ring = servers::http1("ring-0");
    for name in ["ring-1", "ring-2", "ring-3"] {
        let endpoint = servers::http1(name)["load_assignment"]["endpoints"][0]["lb_endpoints"][0].take();
        ring["load_assignment"]["endpoints"][0]["lb_endpoints"].as_array_mut().unwrap().push(endpoint);
    }
    add(&mut ring, json!({"name": "ring", "lb_policy": "RING_HASH"}));
    ring["load_assignment"]["cluster_name"] = "ring".into();
    // No server listens on this port.
    let dead = servers::cluster("dead", 1);
    // One retry at a time needs 25 requests, of which retries are some. None is an hour ago.
    let mut budget = servers::http1("budget");
    let share =
        json!({"budget_percent": {"value": 4}, "min_retry_concurrency": 0, "budget_interval": "3600s"});
    add(&mut budget, json!({"circuit_breakers": {"thresholds": [{"retry_budget": share}]}}));
    let mut clusters = vec![servers::http1("one"), servers::http2("two"), ring, dead, budget];
    for cluster in &mut clusters {
        let once = json!({"max_requests_per_connection": 1});
        for (_, options) in cluster["typed_extension_protocol_options"].as_object_mut().into_iter().flatten()
        {
            options["common_http_protocol_options"] = once.clone();
        }
    }
    clusters
}

/// Returns a listener that leads to one of the clusters.
pub(crate) fn listener(rng: &mut Rng, number: usize) -> Value {
    let mut route = json!({
        "cluster": one(rng, &["one", "one", "two", "two", "ring", "dead", "budget", "budget"]),
        "timeout": one(rng, &["0s", "20s"]),
        "hash_policy": [{"header": {"header_name": ":path"}}],
    });
    if !rarely(rng, 5) {
        add(&mut route, json!({"retry_policy": policy(rng)}));
    }
    let host = json!({
        "name": format!("a.{number}:80"),
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": route, "stat_prefix": one(rng, &["", "of.route"])}],
        "include_request_attempt_count": rng.bool(),
    });
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "a",
        "generate_request_id": false,
        "access_log": access_log(),
        "http_protocol_options": {"enable_trailers": true},
        "delayed_close_timeout": "0.01s",
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "10.0.0.0", "prefix_len": 8}]},
        "route_config": {"virtual_hosts": [host]},
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
        }],
    });
    json!({
        "name": format!("listener-{number}"),
        "address": address(),
        "filter_chains": [{"filters": [{"name": "hcm", "typed_config": manager}]}],
    })
}

fn policy(rng: &mut Rng) -> Value {
    let mut on: Vec<&str> = (0..rng.usize(..3)).map(|_| one(rng, &ON[..ON.len() - 1])).collect();
    if rarely(rng, 3) {
        on.push(one(rng, &GRPC_ON));
    }
    let mut policy = json!({
        "retry_on": on.join(","),
        "retriable_status_codes": [404, 418],
        "retriable_headers": [{"name": "x-again"}],
        "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.002s"},
    });
    if rng.bool() {
        add(&mut policy, json!({"num_retries": rng.u32(..4)}));
    }
    if rarely(rng, 4) {
        add(&mut policy, json!({"per_try_timeout": one(rng, &["10s", "30s"])}));
    }
    if rarely(rng, 5) {
        add(&mut policy, json!({"retriable_request_headers": [{"name": "x-a"}]}));
    }
    if rng.bool() {
        let predicate = json!({"name": "previous", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
        }});
        let more =
            json!({"retry_host_predicate": [predicate], "host_selection_retry_max_attempts": rng.u32(1..6)});
        add(&mut policy, more);
    }
    policy
}

/// Returns a request of an internal or external client, which may itself request retries.
pub(crate) fn request(rng: &mut Rng) -> Request {
    let version = if rng.bool() { Version::Http11 } else { Version::Http2 };
    let method = one(rng, &["GET", "POST", "HEAD"]);
    let mut request = Request::new(version, method, format!("/{}", rng.u32(..1000)), "a".to_owned());
    let ways: Vec<&str> = (0..rng.usize(1..5)).map(|_| one(rng, &BEHAVIOURS)).collect();
    request.field("x-serve", ways.join(","));
    if rng.bool() {
        request.field("x-forwarded-for", one(rng, &["10.0.0.1", "10.0.0.1", "1.2.3.4"]));
    }
    for (name, values) in [
        ("x-envoy-retry-on", &ON[..]),
        ("x-envoy-retry-grpc-on", &GRPC_ON),
        ("x-envoy-max-retries", &["0", "1", "2", "5", "no"]),
        ("x-envoy-retriable-status-codes", &["409", "404,200", "no"]),
        ("x-envoy-retriable-header-names", &["x-b", "x-none,x-again"]),
        ("x-envoy-upstream-rq-timeout-ms", &["15000", "0", "no"]),
        ("x-envoy-upstream-rq-per-try-timeout-ms", &["12000", "30000", "0"]),
        ("x-envoy-upstream-alt-stat-name", &["a"]),
        ("x-a", &["a"]),
        ("content-type", &["application/grpc"]),
    ] {
        if rarely(rng, 5) {
            request.field(name, one(rng, values));
        }
    }
    if method == "POST" {
        request.body = match rng.u8(..3) {
            0 => Body::Whole("body".to_owned()),
            1 => Body::Pieces(vec!["bo", "dy"], vec![("x-late", "yes")]),
            _ => Body::None,
        };
    }
    request
}
