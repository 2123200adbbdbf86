//! External authorizers in a mesh: AuthorizationPolicies with action CUSTOM.

use skysail_testkit::{Mesh, Setup, pod, service};

/// The authorizer is an echo server: it receives the path and the query of a request, and answers with the status that
/// the query names.
const AUTHORIZATION: &str = r"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    extensionProviders:
    - name: ask
      envoyExtAuthzHttp:
        service: authorizer.default.svc.cluster.local
        port: 80
        timeout: 5s
        pathPrefix: /check
        includeRequestHeadersInCheck: [x-ask]
        includeAdditionalHeadersInCheck: {x-from: mesh}
        headersToDownstreamOnDeny: [content-type]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: ask}
spec:
  selector: {matchLabels: {app: web}}
  action: CUSTOM
  provider: {name: ask}
  rules: [{to: [{operation: {paths: ['/private*']}}]}]
";

fn answer(mesh: &Mesh, path: &str, status: u16, pod: &str) {
    let answer =
        mesh.call("front", &format!("http://web{path}"), &["-H", "x-ask: yes", "-H", "x-other: yes"]);
    assert_eq!(answer.status, Some(status), "{path}: {answer:?}");
    let echo = answer.json();
    assert_eq!(echo["pod"]["name"], pod, "{path}: {echo:#}");
    if pod == "authorizer" {
        let headers = &echo["headers"];
        assert_eq!((&headers["x-ask"], &headers["x-from"]), (&"yes".into(), &"mesh".into()), "{echo:#}");
        assert!(headers["x-other"].is_null(), "{echo:#}");
    }
}

#[test]
fn an_authorizer_decides_about_matching_requests() {
    let services = ["web", "authorizer"].map(service);
    let pods = ["web", "authorizer", "front"].map(pod);
    let text = [&services[..], &pods, &[AUTHORIZATION.to_owned()]].concat().join("---\n");
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready();
    mesh.wait_status("front", "http://web/private", &[], 200);
    answer(&mesh, "/private", 200, "web");
    answer(&mesh, "/private?status=401", 401, "authorizer");
    // The rules do not match, so the server itself answers.
    answer(&mesh, "/public?status=401", 401, "web");

    // The authorizer is away: nothing that it would decide passes.
    mesh.edit("mesh.yaml", "selector: {app: authorizer}", "selector: {app: nobody}");
    mesh.wait_status("front", "http://web/private", &[], 403);
    answer(&mesh, "/public", 200, "web");

    // It fails open if the provider says so.
    mesh.edit("mesh.yaml", "timeout: 5s", "failOpen: true");
    mesh.wait_status("front", "http://web/private", &[], 200);

    // A provider that does not exist denies.
    mesh.edit("mesh.yaml", "- name: ask", "- name: other");
    mesh.wait_status("front", "http://web/private", &[], 403);
    answer(&mesh, "/public", 200, "web");
}
