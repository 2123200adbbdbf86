//! Route tables.

use fastrand::Rng;
use serde_json::{Map, Value, json};

use crate::{
    filters::{abort, limit_rule, route_limit, route_mutations, rules},
    random::{
        HOSTS, PATHS, REGEXES, TEXTS, add, header_match, header_to_add, many, one, rarely, string_match,
    },
};

const CLUSTERS: [&str; 4] = ["one", "two", "three", "none"];

pub(crate) fn table(rng: &mut Rng) -> Value {
    let mut domains = HOSTS.to_vec();
    rng.shuffle(&mut domains);
    let mut hosts = Vec::new();
    while domains.len() > 2 && hosts.len() < 4 {
        let domains: Vec<&str> = domains.drain(..rng.usize(1..3)).collect();
        let mut host = json!({
            "name": format!("host-{}", hosts.len()),
            "domains": domains,
            "routes": (0..rng.usize(1..6)).map(|number| route(rng, number)).collect::<Vec<_>>(),
            "include_request_attempt_count": rarely(rng, 4),
        });
        if rarely(rng, 8) {
            add(&mut host, json!({"require_tls": "ALL"}));
        }
        if rarely(rng, 2) {
            add(&mut host, json!({"rate_limits": many(rng, 3, limit_rule)}));
        }
        add(&mut host, header_operations(rng));
        if rarely(rng, 4) {
            let of_filters = json!({"header_mutation.v3.HeaderMutation": route_mutations(rng)});
            add(&mut host, json!({"typed_per_filter_config": of_filters}));
        }
        hosts.push(host);
    }
    let mut table = json!({"name": "table", "virtual_hosts": hosts, "ignore_port_in_host_matching": rng.bool(), "validate_clusters": false});
    add(&mut table, header_operations(rng));
    table
}

fn header_operations(rng: &mut Rng) -> Value {
    if !rarely(rng, 3) {
        return json!({});
    }
    json!({
        "request_headers_to_add": many(rng, 2, header_to_add),
        "request_headers_to_remove": many(rng, 1, |rng| one(rng, &["x-a", "x-b", "x-forwarded-proto"]).into()),
        "response_headers_to_add": many(rng, 2, header_to_add),
        "response_headers_to_remove": many(rng, 1, |rng| one(rng, &["x-a", "x-b", "server"]).into()),
    })
}

fn route(rng: &mut Rng, number: usize) -> Value {
    let (matches, is_prefix) = route_match(rng);
    let mut route = json!({"name": format!("route-{number}"), "match": matches});
    let action = match rng.u8(..6) {
        0 => {
            let status = [200, 204, 404, 418, 503][rng.usize(..5)];
            json!({"direct_response": {"status": status, "body": {"inline_string": one(rng, &["", "said"])}}})
        }
        1 => json!({"redirect": redirect(rng, is_prefix)}),
        _ => json!({"route": forward(rng, is_prefix)}),
    };
    add(&mut route, action);
    add(&mut route, header_operations(rng));
    let mut of_filters = Map::new();
    if rarely(rng, 4) {
        let cors = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.cors.v3.CorsPolicy",
            "allow_origin_string_match": [{"suffix": one(rng, &["a.example", "b.example"])}],
            "allow_methods": "GET",
            "allow_credentials": rng.bool(),
        });
        of_filters.insert("cors.v3.Cors".to_owned(), cors);
    }
    if rarely(rng, 6) {
        let mut fault = abort(rng);
        add(
            &mut fault,
            json!({"@type": "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault"}),
        );
        of_filters.insert("fault.v3.HTTPFault".to_owned(), fault);
    }
    if rarely(rng, 6) {
        let policy = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBACPerRoute",
            "rbac": if rarely(rng, 3) { json!({}) } else { json!({"rules": rules(rng)}) },
        });
        of_filters.insert("rbac.v3.RBAC".to_owned(), policy);
    }
    if rarely(rng, 4) {
        of_filters.insert("ratelimit.v3.RateLimit".to_owned(), route_limit(rng));
    }
    if rarely(rng, 4) {
        of_filters.insert("header_mutation.v3.HeaderMutation".to_owned(), route_mutations(rng));
    }
    if rarely(rng, 8) {
        let filter = one(rng, &["rbac.v3.RBAC", "fault.v3.HTTPFault", "cors.v3.Cors"]);
        let mut wrapped = json!({"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig"});
        match of_filters.remove(filter) {
            Some(config) if rng.bool() => add(&mut wrapped, json!({"config": config})),
            _ => add(&mut wrapped, json!({"disabled": true})),
        }
        of_filters.insert(filter.to_owned(), wrapped);
    }
    add(&mut route, json!({"typed_per_filter_config": of_filters}));
    route
}

/// Returns a route match and whether it has a prefix that can be rewritten.
pub(crate) fn route_match(rng: &mut Rng) -> (Value, bool) {
    let path = one(rng, &PATHS);
    let (mut matches, is_prefix) = match rng.u8(..5) {
        0 => (json!({"path": path}), true),
        1 => (json!({"safe_regex": {"regex": one(rng, &REGEXES)}}), false),
        2 if path.len() > 1 => (json!({"path_separated_prefix": path.trim_end_matches('/')}), true),
        _ => (json!({"prefix": path}), true),
    };
    if rarely(rng, 4) && is_prefix {
        add(&mut matches, json!({"case_sensitive": false}));
    }
    if rarely(rng, 3) {
        add(&mut matches, json!({"headers": many(rng, 2, header_match)}));
    }
    if rarely(rng, 4) {
        let mut query = json!({"name": one(rng, &["a", "b"])});
        let condition = if rng.bool() {
            json!({"present_match": true})
        } else {
            json!({"string_match": string_match(rng, &TEXTS)})
        };
        add(&mut query, condition);
        add(&mut matches, json!({"query_parameters": [query]}));
    }
    if rarely(rng, 10) {
        add(&mut matches, json!({"grpc": {}}));
    }
    (matches, is_prefix)
}

fn redirect(rng: &mut Rng, is_prefix: bool) -> Value {
    let codes = ["MOVED_PERMANENTLY", "FOUND", "SEE_OTHER", "TEMPORARY_REDIRECT", "PERMANENT_REDIRECT"];
    let mut redirect = json!({"response_code": one(rng, &codes), "strip_query": rng.bool()});
    match rng.u8(..3) {
        0 => add(&mut redirect, json!({"https_redirect": true})),
        1 => add(&mut redirect, json!({"scheme_redirect": "ftp"})),
        _ => {}
    }
    if rng.bool() {
        add(&mut redirect, json!({"host_redirect": one(rng, &["c.example", "c.example:81"])}));
    }
    if rng.bool() {
        let port = [80, 443, 8443][rng.usize(..3)];
        add(&mut redirect, json!({"port_redirect": port}));
    }
    match rng.u8(..4) {
        0 => add(&mut redirect, json!({"path_redirect": one(rng, &["/new", "/new?c=d", "new"])})),
        1 if is_prefix => add(&mut redirect, json!({"prefix_rewrite": one(rng, &["/new", "/", "/new/"])})),
        2 => add(&mut redirect, json!({"regex_rewrite": rewrite(rng)})),
        _ => {}
    }
    redirect
}

fn rewrite(rng: &mut Rng) -> Value {
    let regex = one(rng, &["/a", "a|b", "/(\\w+)/(\\w+)", "^/", "b$", "x*"]);
    let substitution = if regex.contains('(') { "/\\2/\\1" } else { one(rng, &["/new", "", "-\\0-"]) };
    json!({"pattern": {"regex": regex}, "substitution": substitution})
}

fn forward(rng: &mut Rng, is_prefix: bool) -> Value {
    let mut forward = match rng.u8(..8) {
        0 => json!({"cluster_header": "x-c"}),
        1 => {
            let cluster = |rng: &mut Rng, weight: u32| {
                let mut cluster = json!({"name": one(rng, &CLUSTERS[..3]), "weight": weight});
                add(&mut cluster, header_operations(rng));
                cluster
            };
            json!({"weighted_clusters": {"clusters": [cluster(rng, 0), cluster(rng, 5)]}})
        }
        2 => json!({"cluster": one(rng, &CLUSTERS)}),
        _ => json!({"cluster": one(rng, &CLUSTERS[..3])}),
    };
    if rarely(rng, 4) {
        add(
            &mut forward,
            json!({"cluster_not_found_response_code": one(rng, &["NOT_FOUND", "INTERNAL_SERVER_ERROR"])}),
        );
    }
    match rng.u8(..4) {
        0 if is_prefix => add(&mut forward, json!({"prefix_rewrite": one(rng, &["/new", "/", "/new/"])})),
        1 => add(&mut forward, json!({"regex_rewrite": rewrite(rng)})),
        _ => {}
    }
    match rng.u8(..6) {
        0 => add(&mut forward, json!({"host_rewrite_literal": "c.example"})),
        1 => add(&mut forward, json!({"host_rewrite_header": "x-host"})),
        2 => add(&mut forward, json!({"auto_host_rewrite": true})),
        _ => {}
    }
    add(&mut forward, json!({"append_x_forwarded_host": rng.bool()}));
    if rarely(rng, 4) {
        add(&mut forward, json!({"timeout": one(rng, &["0s", "10s"])}));
    }
    if rarely(rng, 3) {
        add(
            &mut forward,
            json!({"rate_limits": many(rng, 3, limit_rule), "include_vh_rate_limits": rng.bool()}),
        );
    }
    forward
}
