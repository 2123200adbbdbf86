//! Random clusters with hashing load balancers: each key has one endpoint.

use fastrand::Rng;
use serde_json::{Value, json};

use crate::{
    listener::{access_log, address},
    random::rarely,
    request::{Request, Version},
};

/// Returns a listener that leads to `cluster` by all kinds of hash policies.
pub(crate) fn listener(rng: &mut Rng, number: usize, cluster: &str) -> Value {
    let mut hash_policy = Vec::new();
    for _ in 0..rng.usize(1..4) {
        let mut policy = match rng.u8(..3) {
            0 => json!({"header": {"header_name": "x-key"}}),
            1 => json!({"query_parameter": {"name": "key"}}),
            _ => json!({"cookie": {"name": "key"}}),
        };
        policy["terminal"] = rng.u8(..4).eq(&0).into();
        hash_policy.push(policy);
    }
    // Always present, because without a hash the selection is random.
    hash_policy.push(json!({"header": {"header_name": ":path"}}));
    let routes =
        json!([{"match": {"prefix": "/"}, "route": {"cluster": cluster, "hash_policy": hash_policy}}]);
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "a",
        "generate_request_id": false,
        "access_log": access_log(),
        "route_config": {"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": routes}]},
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

/// Returns a cluster of these endpoints, each with a weight and a health status, in priorities or localities.
pub(crate) fn cluster(rng: &mut Rng, name: &str, endpoints: &[Value]) -> Value {
    let mut groups: Vec<Value> = Vec::new();
    let priorities = rng.u32(1..4);
    let weighed = rng.bool();
    for number in 0..priorities.max(rng.u32(1..5)) {
        groups.push(json!({
            "locality": {"zone": format!("zone-{number}")},
            "priority": number % priorities,
            "load_balancing_weight": rng.u32(1..10),
            "lb_endpoints": [],
        }));
    }
    for endpoint in endpoints {
        let mut endpoint = endpoint.clone();
        endpoint["load_balancing_weight"] = rng.u32(1..8).into();
        let states =
            ["HEALTHY", "HEALTHY", "HEALTHY", "UNKNOWN", "UNHEALTHY", "DRAINING", "DEGRADED", "TIMEOUT"];
        endpoint["health_status"] = states[rng.usize(..states.len())].into();
        let group = rng.usize(..groups.len());
        if let Some(list) = groups[group]["lb_endpoints"].as_array_mut() {
            list.push(endpoint);
        }
    }
    let mut cluster = json!({
        "name": name, "type": "STATIC", "connect_timeout": "5s",
        "load_assignment": {"cluster_name": name, "endpoints": groups},
        "common_lb_config": {"healthy_panic_threshold": {"value": f64::from(rng.u32(..=1000)) / 10.0}},
    });
    if weighed {
        cluster["common_lb_config"]["locality_weighted_lb_config"] = json!({});
    }
    if rng.bool() {
        let factor = json!({"overprovisioning_factor": rng.u32(100..200)});
        cluster["load_assignment"]["policy"] = factor;
    }
    if rng.bool() {
        cluster["lb_policy"] = "MAGLEV".into();
        cluster["maglev_lb_config"]["table_size"] = [11, 101, 1009][rng.usize(..3)].into();
    } else {
        let minimum = rng.u32(1..500);
        let function = ["XX_HASH", "MURMUR_HASH_2"][rng.usize(..2)];
        cluster["lb_policy"] = "RING_HASH".into();
        cluster["ring_hash_lb_config"] = json!({
            "minimum_ring_size": minimum, "maximum_ring_size": minimum + rng.u32(..500), "hash_function": function,
        });
    }
    cluster
}

/// Returns a request with some of the hashed properties.
pub(crate) fn request(rng: &mut Rng) -> Request {
    let mut key = || (0..rng.usize(..40)).map(|_| rng.alphanumeric()).collect::<String>();
    let (path, query, first, second, cookie) = (key(), key(), key(), key(), key());
    let query = if rng.bool() { format!("?a=b&key={query}&key=c") } else { String::new() };
    let version = if rng.bool() { Version::Http11 } else { Version::Http2 };
    let mut request = Request::new(version, "GET", format!("/{path}{query}"), "a".to_owned());
    for (value, given) in [(first, rng.bool()), (second, rarely(rng, 4))] {
        if given {
            request.field("x-key", value);
        }
    }
    if rng.bool() {
        request.field("cookie", format!("a=b; key=\"{cookie}\"; c"));
    }
    request
}
