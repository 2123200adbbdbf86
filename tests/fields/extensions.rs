//! TrafficExtension: scripts in their phases, at `skysail-proxy` and at a real Envoy. Wasm plugins that decide which
//! requests pass: they cannot run, so the requests are refused.

use skysail_testkit::Mesh;

use crate::{CLIENTS, Case, check, get, mesh_with, wait, with};

const RULES: &str = include_str!("extensions.yaml");

#[test]
fn scripts_run_in_their_phases() {
    let mesh = mesh_with(RULES, &["shop/api-v2", "shop/by-envoy"]).ready();
    for client in CLIENTS {
        for server in ["v1", "v2"] {
            let (to, version) = (format!("x-to: {server}"), format!("\"version\":\"{server}\""));
            let to = ["-H", to.as_str()];
            let order = "\"x-order\":\"authn, early, late, latest, stats, last, root\"";
            let has = [order, "\"x-match\":\"server\"", "x-client: shop", &version];
            wait(&mesh, client, &with(&to, "http://api/", 200, &has));
            check(
                &mesh,
                &[client],
                &[
                    with(&to, "http://api/authz", 403, &[]),
                    with(&to, "http://api/stats", 200, &["\"x-mark\":\"denied\""]),
                    Case {
                        url: "http://api:8081/",
                        arguments: &to,
                        status: 200,
                        has: &[order],
                        lacks: &["x-client"],
                    },
                ],
            );
        }
        wait(&mesh, client, &get("http://edge/", 200, &["x-edge: yes"]));
    }
    let plain = Case { url: "http://api.shop/", arguments: &[], status: 200, has: &[], lacks: &["x-client"] };
    check(&mesh, &["outsider"], &[plain]);
}

/// Server with `skysail-proxy`, and one with a real Envoy.
const SERVERS: [&str; 2] = ["one", "two"];

const SERVICES: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: one, namespace: shop}
spec: {selector: {app: api, version: v1}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: two, namespace: shop}
spec: {selector: {app: api, version: v2}, ports: [{name: http, port: 80, targetPort: 8080}]}
"#;

/// Returns a WasmPlugin for the servers.
fn plugin(spec: &str) -> String {
    format!(
        "apiVersion: extensions.istio.io/v1alpha1\nkind: WasmPlugin\nmetadata: {{name: auth, namespace: shop}}\n\
         spec:\n  selector: {{matchLabels: {{app: api}}}}\n  url: oci://registry.example/auth\n  {spec}\n"
    )
}

/// Returns a TrafficExtension of phase AUTHZ for the servers.
fn extension(module: &str) -> String {
    format!(
        "apiVersion: extensions.istio.io/v1alpha1\nkind: TrafficExtension\n\
         metadata: {{name: auth, namespace: shop}}\nspec:\n  selector: {{matchLabels: {{app: api}}}}\n  \
         phase: AUTHZ\n  wasm: {{url: oci://registry.example/auth{module}}}\n"
    )
}

/// Applies an object, and waits for the status of requests.
fn gives(mesh: &Mesh, object: &str, status: u16) {
    mesh.put("plugin.yaml", object);
    for server in SERVERS {
        wait(mesh, "by-skysail", &get(&format!("http://{server}/"), status, &[]));
    }
}

#[test]
fn plugins_that_cannot_run_refuse_requests() {
    let mesh = mesh_with(&format!("{RULES}---{SERVICES}"), &["shop/api-v2"]).ready();
    let on = |port: u16, mode: &str| {
        format!("phase: AUTHN\n  match: [{{mode: {mode}, ports: [{{number: {port}}}]}}]")
    };
    for (object, status) in [
        // The status changes from case to case.
        (plugin(&on(8080, "SERVER")), 403),
        (plugin("phase: STATS"), 200),
        (plugin(&on(8080, "UNDEFINED")), 403),
        (plugin(&on(9999, "SERVER")), 200),
        (plugin("phase: AUTHZ\n  failStrategy: FAIL_RELOAD"), 403),
        (plugin(&on(8080, "CLIENT")), 200),
        (extension(""), 403),
        (extension(", failStrategy: FAIL_OPEN"), 200),
        // The server closes the connection.
        (plugin("phase: AUTHN\n  type: NETWORK"), 503),
        (plugin("phase: AUTHN\n  failStrategy: FAIL_OPEN"), 200),
        (extension(", type: NETWORK"), 503),
    ] {
        gives(&mesh, &object, status);
    }
    mesh.wait_for_output("SKY0804");
    let gateway = "targetRef: {group: gateway.networking.k8s.io, kind: Gateway, name: edge}";
    let at_gateway = |spec: &str| plugin(spec).replace("selector: {matchLabels: {app: api}}", gateway);
    gives(&mesh, &at_gateway("phase: AUTHN"), 200);
    wait(&mesh, "by-skysail", &get("http://edge/", 403, &[]));
    wait(&mesh, "by-skysail", &get("http://edge:8083/", 200, &[]));
    gives(&mesh, &at_gateway("phase: AUTHN\n  type: NETWORK"), 200);
    wait(&mesh, "by-skysail", &get("http://edge:8083/", 503, &[]));
}
