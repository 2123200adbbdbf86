//! HTTPRoute and GRPCRoute for the services of the mesh.

use skysail_testkit::Mesh;

use crate::{CLIENTS, Case, check, get, log, mesh_with, wait, wait_logged, with};

const RULES: &str = include_str!("gateway_api.yaml");

#[test]
fn routes_of_services_are_applied() {
    let mesh = mesh_with(RULES, &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        wait(&mesh, client, &get("http://api/exact", 200, &["x-rule: exact"]));
        wait(&mesh, client, &call("http://calls/shop.Whole/Any", &[], &["x-rule: whole"]));
    }
    check(&mesh, &CLIENTS, &matches());
    check(&mesh, &CLIENTS, &filters());
    check(&mesh, &CLIENTS, &calls());
    mirrors(&mesh);
    // The parent is one port of the service.
    let other =
        Case { url: "http://api:8081/exact", arguments: &[], status: 200, has: &[], lacks: &["x-rule"] };
    check(&mesh, &CLIENTS, &[other]);
}

fn matches() -> Vec<Case<'static>> {
    let headers = &["-H", "x-exact: a", "-H", "x-regex: bbb"];
    vec![
        get("http://api/exact/more", 200, &["x-rule: rest"]),
        get("http://two/7/regex", 200, &["x-rule: regex"]),
        with(&["-X", "PUT"], "http://api/method/any", 200, &["x-rule: method"]),
        get("http://api/method", 200, &["x-rule: rest"]),
        with(headers, "http://api/headers?q=1", 200, &["x-rule: headers"]),
        with(headers, "http://api/headers?q=2", 200, &["x-rule: rest"]),
        with(&headers[..2], "http://api/headers?q=1", 200, &["x-rule: rest"]),
        get("http://api/timeout/request?delay=20s", 504, &[]),
        get("http://api/timeout/backend?delay=20s", 504, &[]),
        get("http://api/retry?status=503", 503, &["\"x-envoy-attempt-count\":\"4\""]),
        get("http://api/retry?status=500", 500, &["\"x-envoy-attempt-count\":\"1\""]),
        get("http://two/hasty-retry?delay=20s", 504, &["upstream request timeout"]),
        get("http://two/no-retry?status=503", 503, &["\"x-envoy-attempt-count\":\"1\""]),
    ]
}

fn filters() -> Vec<Case<'static>> {
    let old = &["-H", "x-set: old", "-H", "x-add: old", "-H", "x-remove: old"];
    let changed = &[
        "\"x-set\":\"new\"",
        "\"x-add\":\"old, more\"",
        "\"x-backend\":\"two\"",
        "\"version\":\"v2\"",
        "x-answer: more",
    ];
    let preflight =
        &["-X", "OPTIONS", "-H", "origin: https://a.example", "-H", "access-control-request-method: PUT"];
    let allowed = &[
        "access-control-allow-origin: https://a.example",
        "access-control-allow-methods: GET,PUT",
        "access-control-allow-headers: x-one",
        "access-control-max-age: 90",
        "access-control-allow-credentials: true",
    ];
    vec![
        Case {
            url: "http://api/modify",
            arguments: old,
            status: 200,
            has: changed,
            lacks: &["\"x-remove\"", "x-envoy-upstream-service-time"],
        },
        get("http://api/redirect/a", 302, &["location: https://new.example:8443/all"]),
        get("http://api/rewrite/prefix/a", 200, &["\"path\":\"/new/a\"", "\"host\":\"inner.example\""]),
        get("http://api/rewrite/full/a", 200, &["\"path\":\"/full\""]),
        Case { url: "http://api/cors", arguments: preflight, status: 200, has: allowed, lacks: &["\"pod\""] },
        with(
            &["-H", "origin: https://a.example"],
            "http://api/cors",
            200,
            &["access-control-expose-headers: x-seen"],
        ),
    ]
}

/// A call of gRPC; the arguments begin with those of every call.
fn call<'a>(url: &'a str, more: &'a [&'a str], has: &'a [&'a str]) -> Case<'a> {
    let arguments = match more {
        [] => &["--http2", "-H", "content-type: application/grpc", "-H", "te: trailers"],
        more => more,
    };
    with(arguments, url, 200, has)
}

fn calls() -> Vec<Case<'static>> {
    let mia = &["--http2", "-H", "content-type: application/grpc", "-H", "te: trailers", "-H", "x-user: mia"];
    vec![
        call("http://calls/shop.Stock/Count", mia, &["x-rule: exact"]),
        call("http://calls/shop.Stock/Watch", &[], &["x-rule: regex"]),
    ]
}

fn mirrors(mesh: &Mesh) {
    for client in CLIENTS {
        for kind in ["percent", "all", "fraction"] {
            check(
                mesh,
                &[client],
                &[get(&format!("http://api/mirror/{kind}/{client}"), 200, &["\"version\":\"v1\""])],
            );
        }
        for kind in ["all", "fraction"] {
            wait_logged(mesh, &["api-v2"], &[&format!("path=/mirror/{kind}/{client} ")]);
        }
    }
    let copies = log(mesh, &["api-v2"]);
    assert!(!copies.contains("/mirror/percent"), "{copies}");
}
