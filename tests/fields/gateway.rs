//! Gateways of Istio and of Gateway API, served by `skysail-proxy` and by a real Envoy.

use skysail_testkit::Mesh;

use crate::{Case, ask, check, mesh_with, wait, with};

const RULES: &str = include_str!("gateway.yaml");
/// Key set and token of other tests: the claim `team` is `blue`.
const KEYS: &str = include_str!("keys.json");
const TOKEN: &str = include_str!("alice.jwt");

const GATEWAYS: [&str; 2] = ["edge-skysail", "edge-envoy"];

/// Checks the responses to requests for a host at a port of both gateways.
fn at(mesh: &Mesh, port: u16, host: &str, path: &str, expected: &Case<'_>) {
    for gateway in GATEWAYS {
        let (url, host) = (format!("http://{gateway}:{port}{path}"), format!("host: {host}"));
        let arguments = [&["-H", &host], expected.arguments].concat();
        check(mesh, &["plain"], &[Case { url: &url, arguments: &arguments, ..*expected }]);
    }
}

/// Returns the expectation of a status and a text, for any URL.
fn is<'a>(status: u16, has: &'a [&'a str]) -> Case<'a> {
    with(&[], "", status, has)
}

#[test]
fn servers_and_listeners_are_served() {
    let rules = RULES.replace("KEYS", KEYS.trim());
    let mesh = mesh_with(&rules, &["shop/edge-envoy"]).ready();
    for gateway in GATEWAYS {
        for (port, host, status) in
            [(80, "a.shop.example", 200), (8081, "same.example", 200), (8082, "more.example", 302)]
        {
            let (url, host) = (format!("http://{gateway}:{port}/"), format!("host: {host}"));
            wait(&mesh, "plain", &with(&["-H", &host], &url, status, &[]));
        }
        wait(&mesh, "plain", &with(&[], &format!("http://{gateway}:8083/"), 200, &["\"pod\""]));
        wait(&mesh, "plain", &with(&[], &format!("http://{gateway}:8084/"), 200, &["\"version\":\"v2\""]));
    }
    servers(&mesh);
    protocols(&mesh);
    listeners(&mesh);
}

fn servers(mesh: &Mesh) {
    at(mesh, 80, "b.shop.example", "/", &is(404, &[]));
    // The server takes this host from the other namespace.
    at(mesh, 80, "other.example", "/", &is(295, &[]));
    let bearer = format!("authorization: Bearer {}", TOKEN.trim());
    at(mesh, 80, "a.shop.example", "/", &with(&["-H", &bearer], "", 298, &[]));
    at(mesh, 80, "a.shop.example", "/anonymous", &is(297, &[]));
    at(mesh, 80, "a.shop.example", "/", &with(&["-H", "authorization: Bearer no.token.here"], "", 401, &[]));
    for gateway in GATEWAYS {
        let host = ["-H", "host: a.shop.example"];
        check(mesh, &[gateway], &[with(&host, "http://127.0.0.1:8090/port", 296, &[])]);
        let refused = ask(mesh, "plain", &with(&host, &format!("http://{gateway}:8090/port"), 296, &[]));
        assert!(refused.is_err(), "{gateway} serves a local port");
    }
}

/// Servers of HTTP2, GRPC, GRPC-WEB and MONGO.
fn protocols(mesh: &Mesh) {
    for gateway in GATEWAYS {
        wait(mesh, "plain", &with(&[], &format!("http://{gateway}:8088/"), 200, &["\"version\":\"v2\""]));
        let plain = with(&["-H", "host: rpc.example"], "", 294, &[]);
        wait(mesh, "plain", &Case { url: &format!("http://{gateway}:8085/"), ..plain });
        let ready = with(&["-H", "host: rpc.example"], "", 200, &["\"pod\""]);
        wait(mesh, "plain", &Case { url: &format!("http://{gateway}:8086/"), ..ready });
    }
    at(mesh, 8085, "rpc.example", "/", &with(&["--http2"], "", 294, &[]));
    at(mesh, 8085, "other.example", "/", &with(&["--http2"], "", 404, &[]));
    let call = ["--http2", "-H", "content-type: application/grpc", "-H", "te: trailers", "-d", "hello"];
    let answer = with(&call, "", 200, &["content-type: application/grpc", "hello"]);
    at(mesh, 8086, "rpc.example", "/shop.Any/Any", &Case { lacks: &["\"pod\""], ..answer });
    // A message `hello` in base64. The server of GRPC-WEB translates it, so that the service answers a call of gRPC; the
    // one of GRPC forwards it as it is.
    let web = [
        "-H",
        "content-type: application/grpc-web-text",
        "-H",
        "accept: application/grpc-web-text",
        "-d",
        "AAAAAAVoZWxsbw==",
    ];
    let answer = with(&web, "", 200, &["content-type: application/grpc-web-text", "AAAAAAVoZWxsb"]);
    at(mesh, 8087, "rpc.example", "/shop.Any/Any", &Case { lacks: &["\"pod\""], ..answer });
    at(mesh, 8086, "rpc.example", "/shop.Any/Any", &with(&web, "", 200, &["\"pod\""]));
}

fn listeners(mesh: &Mesh) {
    at(mesh, 8081, "a.selected.example", "/x", &is(302, &["location: http://moved.example"]));
    at(mesh, 8081, "b.selected.example", "/x", &is(404, &[]));
    // The listener takes routes of its own namespace, and the other one calls of gRPC alone.
    at(mesh, 8081, "same.example", "/x", &is(200, &["\"pod\"", "\"x-forwarded-port\":\"8081\""]));
    at(mesh, 8081, "calls.example", "/x", &is(404, &[]));
    at(mesh, 8081, "same.example", "/denied", &is(403, &[]));
    at(mesh, 8082, "more.example", "/x", &is(302, &["location: http://more.moved.example"]));
}
