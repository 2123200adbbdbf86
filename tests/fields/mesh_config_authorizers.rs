//! MeshConfig: providers that decide about requests, external authorizers and rate limit services.

use skysail_testkit::Mesh;

use crate::{check, get, mesh_config_collector::Collector, mesh_with, wait, with};

const RULES: &str = include_str!("mesh_config_authorizers.yaml");
/// Servers, the second with a real Envoy.
const SERVERS: [&str; 2] = ["ours", "theirs"];
/// The provider that speaks gRPC, in place of the other one.
const GRPC: &str = "envoyExtAuthzGrpc:
        service: collector.shop.svc.cluster.local
        port: 80
        timeout: 500ms
        failOpen: false
        statusOnError: \"507\"
        includeRequestBodyInCheck: {maxRequestBytes: 4, allowPartialMessage: true, packAsBytes: false}
";

const BODY: [&str; 4] = ["-X", "POST", "-d", "0123456789abc"];

#[test]
fn providers_decide_about_requests() {
    let mesh = mesh_with(RULES, &["shop/api-v2"]).ready();
    let _collector = Collector::start(&mesh, "collector");
    let http = RULES.find("envoyExtAuthzHttp").unwrap()..RULES.find("    - name: limits").unwrap();
    over_http(&mesh);
    limits(&mesh);
    mesh.put("rules.yaml", &RULES.replace(&RULES[http], GRPC));
    over_grpc(&mesh);
}

/// Waits for a response from each server, then for others.
fn of_servers(mesh: &Mesh, path: &str, arguments: &[&str], status: u16, has: &[&str]) {
    for server in SERVERS {
        wait(mesh, "by-skysail", &with(arguments, &format!("http://{server}{path}"), status, has));
    }
}

fn over_http(mesh: &Mesh) {
    // The header is in the response, and in the request to the server.
    let verdict = ["\nx-verdict: 0123456789 asked", "\"x-verdict\":\"0123456789 asked\""];
    of_servers(mesh, "/private", &[&BODY[..], &["-H", "x-ask: asked"]].concat(), 200, &verdict);
    of_servers(mesh, "/private/deny", &[], 403, &[]);
    of_servers(mesh, "/private/slow", &[], 511, &[]);
    mesh.edit("rules.yaml", "includeHeadersInCheck: [x-ask]", "includeHeadersInCheck: []");
    mesh.edit("rules.yaml", "headersToUpstreamOnAllow: [x-verdict]", "headersToUpstreamOnAllow: []");
    mesh.edit("rules.yaml", "headersToDownstreamOnAllow: [x-verdict]", "headersToDownstreamOnAllow: []");
    mesh.edit("rules.yaml", "failOpen: false", "failOpen: true");
    mesh.edit("rules.yaml", "allowPartialMessage: true", "allowPartialMessage: false");
    of_servers(mesh, "/private", &BODY, 413, &[]);
    of_servers(mesh, "/private/slow", &[], 200, &["\"pod\""]);
    for server in SERVERS {
        let url = format!("http://{server}/private");
        let lacks = crate::Case { lacks: &["x-verdict"], ..get(&url, 200, &["\"pod\""]) };
        check(mesh, &["by-skysail"], &[lacks]);
    }
}

fn limits(mesh: &Mesh) {
    of_servers(mesh, "/limited", &[], 429, &[]);
    mesh.edit("rules.yaml", "domain: fast", "domain: slow");
    mesh.edit("rules.yaml", "timeout: 30s", "timeout: 200ms");
    of_servers(mesh, "/limited", &[], 508, &[]);
    mesh.edit("rules.yaml", "failClosed: true", "failClosed: false");
    of_servers(mesh, "/limited", &[], 200, &["\"pod\""]);
}

fn over_grpc(mesh: &Mesh) {
    of_servers(mesh, "/private", &BODY, 200, &["\"x-verdict\":\"text=0123 raw=\""]);
    of_servers(mesh, "/private/slow", &[], 507, &[]);
    mesh.edit("rules.yaml", "packAsBytes: false", "packAsBytes: true");
    mesh.edit("rules.yaml", "failOpen: false", "failOpen: true");
    of_servers(mesh, "/private", &BODY, 200, &["\"x-verdict\":\"text= raw=0123\""]);
    of_servers(mesh, "/private/slow", &[], 200, &["\"pod\""]);
}
