//! Listeners at random, of all that routes, policies and faults are made of.

use fastrand::Rng;
use serde_json::{Map, Value, json};

use crate::tokens::TOKENS;

pub(crate) const HOSTS: [&str; 8] =
    ["a.example", "b.example", "a.b.example", "*.example", "*.b.example", "a.*", "a.b.*", "*"];
pub(crate) const HEADERS: [&str; 6] = ["x-a", "x-b", "x-a", "X-B", "x-c", "content-type"];
pub(crate) const VALUES: [&str; 10] =
    ["a", "b", "ab", "A", "", "one", "42", "-7", "a, b", "application/grpc"];
const PATHS: [&str; 10] = ["/", "/a", "/b", "/ab", "/a/b", "/A", "/a/", "/b/a", "/42", "/a/b/"];
const REGEXES: [&str; 8] = ["/.*", "/a.*", "/[ab]+", "/(a|b)/.*", "/\\d+", ".*b", "/a(/.*)?", "(?i)/ab?"];
const TEXTS: [&str; 6] = ["a", "b", "ab", "one", "4", "A"];
const FORMATS: [&str; 8] = [
    "plain",
    "%REQ(x-a)%",
    "%PROTOCOL%",
    "%REQ(:path)%",
    "a%%b",
    "%REQ(x-b?x-c)%",
    "<%REQ(:authority)%>",
    "%REQ(:method):2%",
];
const CLUSTERS: [&str; 3] = ["one", "two", "none"];

pub(crate) fn one<'a>(rng: &mut Rng, from: &[&'a str]) -> &'a str {
    from[rng.usize(..from.len())]
}

/// Whether it is so one time in `of`.
fn rarely(rng: &mut Rng, of: u32) -> bool {
    rng.u32(..of) == 0
}

fn many(rng: &mut Rng, most: usize, mut make: impl FnMut(&mut Rng) -> Value) -> Value {
    (0..rng.usize(..=most)).map(|_| make(rng)).collect()
}

/// Puts all fields of the second into the first.
fn add(to: &mut Value, fields: Value) {
    if let (Value::Object(to), Value::Object(fields)) = (to, fields) {
        to.extend(fields);
    }
}

pub(crate) fn listener(rng: &mut Rng, number: usize) -> Value {
    let escaped = ["KEEP_UNCHANGED", "REJECT_REQUEST", "UNESCAPE_AND_REDIRECT", "UNESCAPE_AND_FORWARD"];
    let server = ["OVERWRITE", "PASS_THROUGH"];
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "a",
        "generate_request_id": false,
        "normalize_path": rng.bool(),
        "merge_slashes": rng.bool(),
        "path_with_escaped_slashes_action": one(rng, &escaped),
        "server_name": "twin",
        "server_header_transformation": one(rng, &server),
        "xff_num_trusted_hops": rng.u32(..2),
        "route_config": table(rng),
        "http_filters": filters(rng),
    });
    json!({
        "name": format!("listener-{number}"),
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    })
}

fn filters(rng: &mut Rng) -> Value {
    let filter = |name: &str, mut config: Value| {
        let kind = format!("type.googleapis.com/envoy.extensions.filters.http.{name}");
        add(&mut config, json!({"@type": kind}));
        json!({"name": name, "typed_config": config})
    };
    let mut filters = Vec::new();
    for _ in 0..rng.usize(..3) {
        filters.push(filter("rbac.v3.RBAC", json!({"rules": rules(rng)})));
    }
    let by_listener = if rarely(rng, 4) { abort(rng) } else { json!({}) };
    filters.push(filter("fault.v3.HTTPFault", by_listener));
    if rng.bool() {
        filters.push(filter("cors.v3.Cors", json!({})));
    }
    if rng.bool() {
        filters.push(filter("jwt_authn.v3.JwtAuthentication", tokens(rng)));
    }
    if rarely(rng, 3) {
        filters.push(filter("ext_authz.v3.ExtAuthz", authorization(rng)));
    }
    if rarely(rng, 4) {
        filters.push(filter("local_ratelimit.v3.LocalRateLimit", limit(rng)));
    }
    rng.shuffle(&mut filters);
    for filter in &mut filters {
        if rarely(rng, 6) {
            add(filter, json!({"disabled": true}));
        }
    }
    filters.push(filter("router.v3.Router", json!({})));
    filters.into()
}

/// A bucket that does not fill again before all is over.
fn limit(rng: &mut Rng) -> Value {
    let share = |rng: &mut Rng| json!({"default_value": {"numerator": if rarely(rng, 3) { 0 } else { 100 }}});
    let mut limit = json!({
        "stat_prefix": "a",
        "token_bucket": {"max_tokens": rng.u32(1..40), "fill_interval": "86400s"},
        "filter_enabled": share(rng),
        "filter_enforced": share(rng),
        "rate_limited_as_resource_exhausted": rng.bool(),
    });
    if rng.bool() {
        let status = one(rng, &["ServiceUnavailable", "OK", "Forbidden"]);
        add(&mut limit, json!({"status": {"code": status}}));
    }
    if rng.bool() {
        add(&mut limit, json!({"response_headers_to_add": many(rng, 2, header_to_add)}));
        add(&mut limit, json!({"request_headers_to_add_when_not_enforced": many(rng, 2, header_to_add)}));
    }
    limit
}

/// Who is asked.
fn authorization(rng: &mut Rng) -> Value {
    let list = |rng: &mut Rng| {
        let names = ["x-a", "x-b", "x-c", "x-new"];
        json!({"patterns": (0..rng.usize(1..3)).map(|_| string_match(rng, &names)).collect::<Value>()})
    };
    let mut authorization = json!({
        "failure_mode_allow": rng.bool(),
        "failure_mode_allow_header_add": rng.bool(),
        // In Envoy the first route decides which filters there are, here the new one decides about those that follow.
        "clear_route_cache": false,
        "transport_api_version": "V3",
    });
    if rng.bool() {
        let service = json!({"envoy_grpc": {"cluster_name": "grpc-authorizer"}, "timeout": "20s"});
        add(&mut authorization, json!({"grpc_service": service}));
    } else {
        let service = json!({
            "server_uri": {"uri": "http://authorizer", "cluster": "http-authorizer", "timeout": "20s"},
            "path_prefix": "/check",
            "authorization_response": {
                "allowed_upstream_headers": list(rng),
                "allowed_client_headers": list(rng),
                "allowed_client_headers_on_success": list(rng),
            },
        });
        add(&mut authorization, json!({"http_service": service}));
    }
    if rarely(rng, 3) {
        add(&mut authorization, json!({"allowed_headers": list(rng)}));
    }
    if rarely(rng, 3) {
        add(&mut authorization, json!({"status_on_error": {"code": "BadGateway"}}));
    }
    if rarely(rng, 4) {
        let most = [3, 100, 60_000][rng.usize(..3)];
        let body = json!({"max_request_bytes": most, "allow_partial_message": rng.bool()});
        add(&mut authorization, json!({"with_request_body": body}));
    }
    authorization
}

/// Which tokens are needed.
fn tokens(rng: &mut Rng) -> Value {
    let provider = |rng: &mut Rng, issuer: &str| {
        let mut provider = json!({
            "issuer": issuer,
            "local_jwks": {"inline_string": TOKENS.keys},
            "forward": rng.bool(),
            "payload_in_metadata": "payload",
            "normalize_payload_in_metadata": {"space_delimited_claims": ["scope"]},
        });
        if rarely(rng, 3) {
            add(&mut provider, json!({"audiences": [one(rng, &["a", "http://a", "d"])]}));
        }
        if rarely(rng, 3) {
            add(
                &mut provider,
                json!({"from_headers": [{"name": "x-token", "value_prefix": "T-"}], "from_cookies": ["token"]}),
            );
        }
        if rarely(rng, 3) {
            add(
                &mut provider,
                json!({"forward_payload_header": "x-a", "pad_forward_payload_header": rng.bool()}),
            );
        }
        if rarely(rng, 3) {
            let claim =
                one(rng, &["sub", "groups", "nested.role", "nested.number", "nested.is", "exp", "none"]);
            add(&mut provider, json!({"claim_to_headers": [{"header_name": "X-B", "claim_name": claim}]}));
        }
        provider
    };
    let rule = |rng: &mut Rng| {
        let (mut matches, _) = route_match(rng);
        // Envoy does not look at it here, and we refuse it.
        matches.as_object_mut().unwrap().remove("grpc");
        if rarely(rng, 6) {
            json!({"match": matches})
        } else {
            json!({"match": matches, "requires": requirement(rng, 2)})
        }
    };
    json!({
        "providers": {"one": provider(rng, "one"), "two": provider(rng, "two"), "any": provider(rng, "")},
        "rules": many(rng, 2, rule),
        "bypass_cors_preflight": rng.bool(),
    })
}

fn requirement(rng: &mut Rng, depth: u32) -> Value {
    let some =
        |rng: &mut Rng| json!({"requirements": [requirement(rng, depth - 1), requirement(rng, depth - 1)]});
    match rng.u8(if depth == 0 { 4 } else { 0 }..8) {
        0 | 1 => json!({"requires_any": some(rng)}),
        // Envoy takes a token off before the next requirement is looked at, we do when all have been.
        2 => json!({"requires_all": {"requirements": [requirement(rng, 0), {}]}}),
        3 => json!({"requires_any": {"requirements": [requirement(rng, 0), {"allow_missing": {}}]}}),
        4 => json!({"provider_and_audiences": {"provider_name": "one", "audiences": ["b"]}}),
        _ => json!({"provider_name": one(rng, &["one", "two", "any"])}),
    }
}

fn abort(rng: &mut Rng) -> Value {
    let status = [401, 403, 503][rng.usize(..3)];
    json!({
        "abort": {"http_status": status, "percentage": {"numerator": 100}},
        "headers": [header_match(rng)],
    })
}

fn rules(rng: &mut Rng) -> Value {
    let mut policies = Map::new();
    for number in 0..rng.usize(1..3) {
        let policy = json!({"permissions": [permission(rng, 2)], "principals": [principal(rng, 2)]});
        policies.insert(format!("policy-{number}"), policy);
    }
    json!({"action": one(rng, &["ALLOW", "DENY"]), "policies": policies})
}

fn permission(rng: &mut Rng, depth: u32) -> Value {
    match rng.u8(if depth == 0 { 3 } else { 0 }..7) {
        0 => json!({"not_rule": permission(rng, depth - 1)}),
        1 => json!({"and_rules": {"rules": [permission(rng, depth - 1), permission(rng, depth - 1)]}}),
        2 => json!({"or_rules": {"rules": [permission(rng, depth - 1), permission(rng, depth - 1)]}}),
        3 => json!({"any": true}),
        4 => json!({"header": header_match(rng)}),
        5 => json!({"url_path": {"path": string_match(rng, &PATHS)}}),
        _ => json!({"destination_ip": {"address_prefix": "127.0.0.0", "prefix_len": 8}}),
    }
}

fn principal(rng: &mut Rng, depth: u32) -> Value {
    match rng.u8(if depth == 0 { 3 } else { 0 }..8) {
        0 => json!({"not_id": principal(rng, depth - 1)}),
        1 => json!({"and_ids": {"ids": [principal(rng, depth - 1), principal(rng, depth - 1)]}}),
        2 => json!({"or_ids": {"ids": [principal(rng, depth - 1), principal(rng, depth - 1)]}}),
        3 | 4 => json!({"any": true}),
        5 => json!({"header": header_match(rng)}),
        6 if rng.bool() => {
            let test = match rng.u8(..4) {
                0 => json!({"present_match": rng.bool()}),
                1 => json!({"list_match": {"one_of": {"string_match": {"exact": "a"}}}}),
                2 => {
                    json!({"or_match": {"value_matchers": [{"string_match": {"prefix": "r"}}, {"list_match": {"one_of": {"string_match": {"exact": "read"}}}}]}})
                }
                _ => json!({"string_match": string_match(rng, &["one", "me", "a"])}),
            };
            let claim = one(rng, &["iss", "sub", "groups", "scope", "aud"]);
            json!({"metadata": {"filter": "envoy.filters.http.jwt_authn", "path": [{"key": "payload"}, {"key": claim}], "value": test, "invert": rarely(rng, 3)}})
        }
        6 => json!({"direct_remote_ip": {"address_prefix": "127.0.0.1", "prefix_len": 32}}),
        _ => json!({"remote_ip": {"address_prefix": "10.0.0.0", "prefix_len": 8}}),
    }
}

fn string_match(rng: &mut Rng, texts: &[&str]) -> Value {
    let text = one(rng, texts);
    let mut matcher = match rng.u8(..5) {
        0 => return json!({"safe_regex": {"regex": one(rng, &REGEXES)}}),
        1 => json!({"prefix": text}),
        2 => json!({"suffix": text}),
        3 => json!({"contains": text}),
        _ => json!({"exact": text}),
    };
    if rarely(rng, 3) {
        add(&mut matcher, json!({"ignore_case": true}));
    }
    matcher
}

fn header_match(rng: &mut Rng) -> Value {
    let name =
        if rarely(rng, 5) { one(rng, &[":method", ":authority", ":path"]) } else { one(rng, &HEADERS) };
    let mut matcher = match rng.u8(..4) {
        0 => json!({"present_match": rng.bool()}),
        1 => json!({"range_match": {"start": -10, "end": rng.i32(-8..50)}}),
        _ => json!({"string_match": string_match(rng, &TEXTS)}),
    };
    add(&mut matcher, json!({"name": name, "invert_match": rarely(rng, 4)}));
    if rarely(rng, 4) {
        add(&mut matcher, json!({"treat_missing_header_as_empty": true}));
    }
    matcher
}

fn table(rng: &mut Rng) -> Value {
    let mut domains = HOSTS.to_vec();
    rng.shuffle(&mut domains);
    let mut hosts = Vec::new();
    while domains.len() > 2 && hosts.len() < 4 {
        let domains: Vec<&str> = domains.drain(..rng.usize(1..3)).collect();
        let mut host = json!({
            "name": format!("host-{}", hosts.len()),
            "domains": domains,
            "routes": (0..rng.usize(1..6)).map(|_| route(rng)).collect::<Vec<_>>(),
            "include_request_attempt_count": rarely(rng, 4),
        });
        if rarely(rng, 8) {
            add(&mut host, json!({"require_tls": "ALL"}));
        }
        add(&mut host, header_operations(rng));
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

fn header_to_add(rng: &mut Rng) -> Value {
    let actions =
        ["APPEND_IF_EXISTS_OR_ADD", "ADD_IF_ABSENT", "OVERWRITE_IF_EXISTS_OR_ADD", "OVERWRITE_IF_EXISTS"];
    json!({
        "header": {"key": one(rng, &["x-a", "x-b", "x-new"]), "value": one(rng, &FORMATS)},
        "append_action": one(rng, &actions),
        "keep_empty_value": rng.bool(),
    })
}

fn route(rng: &mut Rng) -> Value {
    let (matches, is_prefix) = route_match(rng);
    let mut route = json!({"match": matches});
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

/// Also whether there is a prefix that can be rewritten.
fn route_match(rng: &mut Rng) -> (Value, bool) {
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
                let mut cluster = json!({"name": one(rng, &CLUSTERS[..2]), "weight": weight});
                add(&mut cluster, header_operations(rng));
                cluster
            };
            json!({"weighted_clusters": {"clusters": [cluster(rng, 0), cluster(rng, 5)]}})
        }
        2 => json!({"cluster": one(rng, &CLUSTERS)}),
        _ => json!({"cluster": one(rng, &CLUSTERS[..2])}),
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
    if rarely(rng, 4) {
        add(&mut forward, json!({"timeout": one(rng, &["0s", "10s"])}));
    }
    forward
}
