//! HTTP filters before the router.

use fastrand::Rng;
use serde_json::{Map, Value, json};

use crate::{
    random::{
        PATHS, RULED, TEXTS, add, header_match, header_match_of, header_to_add, many, one, rarely,
        string_match,
    },
    routes::route_match,
    tokens::TOKENS,
};

pub(crate) fn filters(rng: &mut Rng) -> Value {
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
    if rarely(rng, 3) {
        filters.push(filter("ratelimit.v3.RateLimit", service_limit(rng)));
    }
    if rarely(rng, 3) {
        let mut mutation = mutations(rng);
        add(&mut mutation, json!({"most_specific_header_mutations_wins": rng.bool()}));
        filters.push(filter("header_mutation.v3.HeaderMutation", mutation));
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

/// Returns a token bucket that is not refilled during the test.
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
    if rng.bool() {
        add(&mut limit, descriptors(rng));
        if rarely(rng, 3) {
            add(&mut limit, json!({"rate_limits": [filter_rule(rng)]}));
        }
    }
    limit
}

/// Returns mutations of headers and of the query.
fn mutations(rng: &mut Rng) -> Value {
    let mutation = |rng: &mut Rng| match rng.u8(..4) {
        0 => json!({"remove": one(rng, &["x-a", "x-b", "X-New"])}),
        1 => json!({"remove_on_match": {"key_matcher": string_match(rng, &["x-a", "x-b", "new"])}}),
        _ => json!({"append": header_to_add(rng)}),
    };
    let actions =
        ["APPEND_IF_EXISTS_OR_ADD", "ADD_IF_ABSENT", "OVERWRITE_IF_EXISTS_OR_ADD", "OVERWRITE_IF_EXISTS"];
    let query = |rng: &mut Rng| match rng.u8(..4) {
        0 => json!({"remove": one(rng, &["a", "b"])}),
        _ => {
            // Envoy decodes parameters that it keeps (docs/proxy-fields.md).
            let value = one(rng, &["plain", "%REQ(:method)%"]);
            let record = json!({"key": one(rng, &["a", "b", "c"]), "value": value});
            json!({"append": {"record": record, "action": one(rng, &actions)}})
        }
    };
    let max = if rarely(rng, 2) { 2 } else { 0 };
    json!({"mutations": {
        "request_mutations": many(rng, 3, mutation),
        "query_parameter_mutations": many(rng, max, query),
        "response_mutations": many(rng, 3, mutation),
    }})
}

/// Returns a route's settings for filters that change headers and buffer bodies.
pub(crate) fn route_mutations(rng: &mut Rng) -> Value {
    let mut mutations = mutations(rng);
    add(
        &mut mutations,
        json!({"@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutationPerRoute"}),
    );
    mutations
}

/// Returns a filter that asks a rate limit service.
fn service_limit(rng: &mut Rng) -> Value {
    let service = json!({"envoy_grpc": {"cluster_name": "limiter"}});
    let mut limit = json!({
        "domain": "d",
        "stage": u8::from(rarely(rng, 4)),
        "timeout": "20s",
        "request_type": one(rng, &["both", "both", "internal", "external"]),
        "failure_mode_deny": rng.bool(),
        "rate_limited_as_resource_exhausted": rng.bool(),
        "rate_limit_service": {"grpc_service": service, "transport_api_version": "V3"},
        "enable_x_ratelimit_headers": one(rng, &["OFF", "DRAFT_VERSION_03"]),
        "disable_x_envoy_ratelimited_header": rng.bool(),
    });
    if rarely(rng, 3) {
        let status = one(rng, &["ServiceUnavailable", "OK", "Forbidden"]);
        add(
            &mut limit,
            json!({"rate_limited_status": {"code": status}, "status_on_error": {"code": "BadGateway"}}),
        );
    }
    if rarely(rng, 3) {
        add(&mut limit, json!({"response_headers_to_add": many(rng, 2, header_to_add)}));
    }
    if rarely(rng, 4) {
        // The service's type of content is for refusals only.
        add(&mut limit, json!({"domain": "odd", "filter_enforced": {"default_value": {"numerator": 0}}}));
    }
    if rarely(rng, 3) {
        add(&mut limit, json!({"rate_limits": [filter_rule(rng)]}));
    }
    limit
}

/// Returns a rule in a filter, which has no stage.
fn filter_rule(rng: &mut Rng) -> Value {
    let mut rule = limit_rule(rng);
    if let Some(rule) = rule.as_object_mut() {
        rule.remove("stage");
    }
    if rng.bool() {
        add(&mut rule, json!({"hits_addend": {"number": rng.u32(..3)}}));
    }
    rule
}

/// Returns a route's settings for the filter that asks a rate limit service.
pub(crate) fn route_limit(rng: &mut Rng) -> Value {
    let mut limit = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute",
        "vh_rate_limits": one(rng, &["OVERRIDE", "INCLUDE", "IGNORE"]),
    });
    if rng.bool() {
        add(&mut limit, json!({"domain": "odd"}));
    }
    if rarely(rng, 3) {
        add(&mut limit, json!({"rate_limits": [filter_rule(rng)]}));
    }
    limit
}

/// Returns descriptors that the rules of [`limit_rule`] make of some requests.
fn descriptors(rng: &mut Rng) -> Value {
    let mut descriptors: Vec<Value> = Vec::new();
    for _ in 0..rng.usize(1..5) {
        let (key, values): (_, &[_]) = match rng.u8(..6) {
            0 => ("x-a", &["a", "ab", "one", ""]),
            1 => ("path", &["/a", "/"]),
            2 => ("query", &["a", "", "b"]),
            3 => ("header_match", &["v"]),
            4 => ("destination_cluster", &["one", "two"]),
            _ => ("masked_remote_address", &["127.0.0.0/16", ""]),
        };
        let entries = json!([{"key": "generic_key", "value": "g"}, {"key": key, "value": one(rng, values)}]);
        if descriptors.iter().all(|known| known["entries"] != entries) {
            let bucket = json!({"max_tokens": rng.u32(1..5), "fill_interval": "86400s"});
            descriptors.push(json!({"entries": entries, "token_bucket": bucket}));
        }
    }
    json!({
        "descriptors": descriptors,
        "always_consume_default_token_bucket": rng.bool(),
        "enable_x_ratelimit_headers": one(rng, &["OFF", "DRAFT_VERSION_03"]),
        "vh_rate_limits": one(rng, &["OVERRIDE", "INCLUDE", "IGNORE"]),
        "stage": u8::from(rarely(rng, 4)),
    })
}

/// Returns a rule for rate limit descriptors.
pub(crate) fn limit_rule(rng: &mut Rng) -> Value {
    let skip = rarely(rng, 3);
    let action = match rng.u8(..7) {
        0 => {
            json!({"request_headers": {"header_name": "x-a", "descriptor_key": "x-a", "skip_if_absent": skip}})
        }
        1 => json!({"request_headers": {"header_name": ":path", "descriptor_key": "path"}}),
        2 => json!({"query_parameters": {"query_parameter_name": "a", "descriptor_key": "query"}}),
        3 => json!({"header_value_match":
            {"descriptor_value": "v", "expect_match": rng.bool(), "headers": [header_match_of(rng, &[RULED])]}}),
        4 => json!({"destination_cluster": {}}),
        5 => json!({"masked_remote_address": {"v4_prefix_mask_len": 16}}),
        _ => {
            json!({"query_parameter_value_match": {"descriptor_key": "header_match", "descriptor_value": "v",
            "query_parameters": [{"name": "a", "string_match": string_match(rng, &TEXTS)}]}})
        }
    };
    let constant = json!({"generic_key": {"descriptor_value": "g"}});
    json!({"stage": u8::from(rarely(rng, 4)), "actions": [constant, action]})
}

/// Returns an ext_authz filter.
fn authorization(rng: &mut Rng) -> Value {
    let list = |rng: &mut Rng| {
        let names = ["x-a", "x-b", "x-c", "x-new"];
        json!({"patterns": (0..rng.usize(1..3)).map(|_| string_match(rng, &names)).collect::<Value>()})
    };
    let mut authorization = json!({
        "failure_mode_allow": rng.bool(),
        "failure_mode_allow_header_add": rng.bool(),
        // In Envoy the first route determines the filters; in the sidecar a new route determines those that
        // follow.
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
        let max = [3, 100, 60_000][rng.usize(..3)];
        let body = json!({"max_request_bytes": max, "allow_partial_message": rng.bool()});
        add(&mut authorization, json!({"with_request_body": body}));
    }
    authorization
}

/// Returns a JWT filter.
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
        // Envoy ignores it here, and the sidecar refuses it.
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
        // Envoy removes a token before it evaluates the next requirement, the sidecar after all.
        2 => json!({"requires_all": {"requirements": [requirement(rng, 0), {}]}}),
        3 => json!({"requires_any": {"requirements": [requirement(rng, 0), {"allow_missing": {}}]}}),
        4 => json!({"provider_and_audiences": {"provider_name": "one", "audiences": ["b"]}}),
        _ => json!({"provider_name": one(rng, &["one", "two", "any"])}),
    }
}

pub(crate) fn abort(rng: &mut Rng) -> Value {
    let status = [401, 403, 503][rng.usize(..3)];
    json!({
        "abort": {"http_status": status, "percentage": {"numerator": 100}},
        "headers": [header_match(rng)],
    })
}

pub(crate) fn rules(rng: &mut Rng) -> Value {
    let mut policies = Map::new();
    for number in 0..rng.usize(1..3) {
        let policy = json!({"permissions": [permission(rng, 2)], "principals": [principal(rng, 2)]});
        policies.insert(format!("policy-{number}"), policy);
    }
    json!({"action": one(rng, &["ALLOW", "DENY"]), "policies": policies})
}

/// Returns a condition on a field that occurs once, or that both proxies combine.
fn ruled(rng: &mut Rng) -> Value {
    header_match_of(rng, &[RULED, RULED, "content-type", "x-forwarded-for"])
}

fn permission(rng: &mut Rng, depth: u32) -> Value {
    match rng.u8(if depth == 0 { 3 } else { 0 }..7) {
        0 => json!({"not_rule": permission(rng, depth - 1)}),
        1 => json!({"and_rules": {"rules": [permission(rng, depth - 1), permission(rng, depth - 1)]}}),
        2 => json!({"or_rules": {"rules": [permission(rng, depth - 1), permission(rng, depth - 1)]}}),
        3 => json!({"any": true}),
        4 => json!({"header": ruled(rng)}),
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
        5 => json!({"header": ruled(rng)}),
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
