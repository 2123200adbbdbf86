//! RateLimitPolicies in a mesh: which requests count together, which are refused, and how.
//!
//! The same requests go to a server with the sidecar and to one with a real Envoy. No limit refills within a test: an
//! interval is a day.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

use std::path::PathBuf;

use skysail_testkit::{Mesh, Setup};

/// Tokens and their key set are those of another test.
const TOKENS: &str = include_str!("tokens.rs");

const MESH: &str = r"
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: web-envoy}
spec: {selector: {app: web-envoy}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web, role: server}}
spec: {containers: [{name: c, image: registry.example/web, ports: [{containerPort: 8080}]}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web-envoy}
spec:
  selector: {matchLabels: {app: web-envoy}}
  template:
    metadata: {labels: {app: web-envoy, role: server}}
    spec: {containers: [{name: c, image: registry.example/web, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: front, labels: {app: front}}
spec: {serviceAccountName: front, containers: [{name: c, image: registry.example/front, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: other, labels: {app: other}}
spec: {serviceAccountName: other, containers: [{name: c, image: registry.example/other, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: front}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: other}
---
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: tokens}
spec:
  jwtRules: [{issuer: 'https://tokens.example.com', audiences: [shop], jwks: 'KEYS'}]
";

/// One rule for each path. `READY` is a path whose second request is refused once the policy is in effect.
const POLICY: &str = r"
apiVersion: skysail.io/v1alpha1
kind: RateLimitPolicy
metadata: {name: servers}
spec:
  selector: {matchLabels: {role: server}}
  rules:
  - {name: ready, match: {paths: [/READY]}, limit: {requests: 1, unit: DAY}}
  - {name: all, match: {paths: [/all]}, limit: {requests: 2, unit: DAY}}
  - {name: principal, match: {paths: [/principal*]}, by: [{sourcePrincipal: true}], limit: {requests: 2, unit: DAY}}
  - {name: address, match: {paths: [/address]}, by: [{sourceAddress: true}], limit: {requests: 1, unit: DAY}}
  - {name: client, match: {paths: [/client]}, by: [{clientAddress: {}}], limit: {requests: 1, unit: DAY}}
  - {name: header, match: {paths: [/header]}, by: [{header: X-User}], limit: {requests: 1, unit: DAY}}
  - {name: claim, match: {paths: [/claim]}, by: [{jwtClaim: sub}], limit: {requests: 1, unit: DAY}}
  - {name: two, match: {paths: [/two]}, by: [{method: true}, {host: true}], limit: {requests: 1, unit: DAY}}
  - {name: method, match: {paths: [/method], methods: [POST, PUT]}, limit: {requests: 1, unit: DAY}}
  - {name: host, match: {paths: [/host], hosts: ['*.EXAMPLE.com']}, limit: {requests: 1, unit: DAY}}
  - {name: headers, match: {paths: [/headers], headers: {x-tier: {exact: free}}, withoutHeaders: {x-skip: {}}}, limit: {requests: 1, unit: DAY}}
  - {name: named, match: {paths: [/named], principals: [cluster.local/ns/default/sa/front]}, limit: {requests: 1, unit: DAY}}
  - {name: others, match: {paths: [/others], notPrincipals: ['*/sa/front']}, limit: {requests: 1, unit: DAY}}
  - {name: burst, match: {paths: [/burst]}, limit: {requests: 1, unit: DAY, burst: 3}}
  - {name: shadow, match: {paths: [/shadow]}, limit: {requests: 1, unit: DAY}, shadow: true}
  - name: response
    match: {paths: [/response]}
    limit: {requests: 1, interval: 24h}
    response: {status: 503, headers: {x-limited: 100%}, rateLimitHeaders: true}
";

/// Returns a constant of the other test.
fn token(name: &str) -> &'static str {
    let start = format!("const {name}: &str = ");
    let line = TOKENS.lines().find_map(|line| line.strip_prefix(&start)).unwrap();
    line.trim_start_matches("r#").trim_end_matches(';').trim_end_matches('#').trim_matches('"')
}

fn envoy() -> PathBuf {
    let cached =
        || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/skysail/envoy-1.40.0/envoy");
    let path = std::env::var_os("SKYSAIL_ENVOY").map_or_else(cached, PathBuf::from);
    assert!(path.is_file(), "there is no Envoy at {}: run ./test.sh, which fetches it", path.display());
    path
}

/// Waits until a policy is in effect: the second request of its path is refused. Envoy keeps the filters of a
/// connection, so each client waits for a new one.
fn wait_policy(mesh: &Mesh, server: &str, path: &str) {
    for client in ["front", "other"] {
        mesh.wait_status(client, &format!("http://{server}/{path}"), &[], 429);
    }
}

/// Sends requests of a client and compares their statuses.
fn assert_statuses(mesh: &Mesh, client: &str, url: &str, arguments: &[&str], expected: &[u16]) {
    let found: Vec<_> = expected.iter().map(|_| mesh.call(client, url, arguments)).collect();
    let statuses: Vec<_> = found.iter().filter_map(|answer| answer.status).collect();
    assert_eq!(statuses, expected, "{client} {url} {arguments:?}: {found:?}");
}

#[test]
fn requests_are_limited_by_their_attributes() {
    let text = MESH.replace("KEYS", token("KEYS"));
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text);
    let instead = format!("default/web-envoy={}", envoy().display());
    let mesh = setup.with(&["--envoy", &instead]).ready();
    for server in ["web", "web-envoy"] {
        for client in ["front", "other"] {
            mesh.wait_status(client, &format!("http://{server}/"), &[], 200);
        }
    }
    mesh.put("limits.yaml", &POLICY.replace("READY", "ready"));
    for server in ["web", "web-envoy"] {
        wait_policy(&mesh, server, "ready");
        limits_of(&mesh, server);
    }

    // A changed policy counts anew, a removed one limits nothing.
    mesh.put("limits.yaml", &POLICY.replace("READY", "again").replace("requests: 2", "requests: 1"));
    for server in ["web", "web-envoy"] {
        wait_policy(&mesh, server, "again");
        assert_statuses(&mesh, "front", &format!("http://{server}/all"), &[], &[200, 429]);
    }
    mesh.put("limits.yaml", "");
    for server in ["web", "web-envoy"] {
        mesh.wait_status("front", &format!("http://{server}/all"), &[], 200);
    }
    assert!(!mesh.said().contains("rejected"), "{}", mesh.said());
}

fn limits_of(mesh: &Mesh, server: &str) {
    let of = |client: &str, path: &str, arguments: &[&str], expected: &[u16]| {
        assert_statuses(mesh, client, &format!("http://{server}{path}"), arguments, expected);
    };
    of("front", "/free", &[], &[200; 4]);
    of("front", "/all?a=b", &[], &[200, 200, 429]);
    of("other", "/all", &[], &[429]);
    // A client cannot choose its identity by the header that carries it within the proxy.
    of("front", "/principal/a", &["-H", "x-skysail-limit-0: =spiffe://forged"], &[200, 200, 429]);
    of("front", "/principal/b", &["-H", "x-skysail-limit-0: =spiffe://other"], &[429]);
    of("other", "/principal/b", &[], &[200, 200, 429]);
    for path in ["/address", "/client"] {
        of("front", path, &[], &[200, 429]);
        of("other", path, &[], &[200, 429]);
    }
    of("front", "/address", &["-H", "x-forwarded-for: 192.0.2.9"], &[429]);
    for user in ["x-user: ann", "x-user: bob", "x-unset: a"] {
        of("front", "/header", &["-H", user], &[200, 429]);
        of("other", "/header", &["-H", user], &[429]);
    }
    let bearer = |name: &str| format!("authorization: Bearer {}", token(name));
    for user in [&bearer("EDITOR"), &bearer("READER"), "x-no: token"] {
        of("front", "/claim", &["-H", user], &[200, 429]);
    }
    of("front", "/claim", &["-H", &bearer("EXPIRED")], &[401]);
    for arguments in [&["-X", "PUT"][..], &[], &["-H", "host: b.example.com"]] {
        let first = mesh.call("front", &format!("http://{server}/two"), arguments);
        let second = mesh.call("front", &format!("http://{server}/two"), arguments);
        assert_eq!(
            second.status == Some(429),
            first.status == Some(200),
            "{arguments:?} {first:?} {second:?}"
        );
    }
    of("front", "/method", &["-X", "POST"], &[200, 429]);
    of("front", "/method", &["-X", "PUT"], &[429]);
    of("front", "/method", &[], &[200, 200]);
    of("front", "/host", &[], &[200, 200]);
    of("front", "/headers", &["-H", "x-tier: free"], &[200, 429]);
    of("front", "/headers", &["-H", "x-tier: free", "-H", "x-skip: yes"], &[200, 200]);
    of("front", "/headers", &["-H", "x-tier: gold"], &[200, 200]);
    of("front", "/named", &[], &[200, 429]);
    of("other", "/named", &[], &[200, 200]);
    of("front", "/others", &[], &[200, 200]);
    of("other", "/others", &[], &[200, 429]);
    of("front", "/burst", &[], &[200, 200, 200, 429]);
    of("front", "/shadow", &[], &[200, 200, 200]);
    let url = format!("http://{server}/response");
    let (allowed, refused) = (mesh.call("front", &url, &["-i"]), mesh.call("front", &url, &["-i"]));
    assert_eq!((allowed.status, refused.status), (Some(200), Some(503)), "{allowed:?} {refused:?}");
    assert!(allowed.body.contains("x-ratelimit-remaining: 0"), "{allowed:?}");
    assert!(refused.body.contains("x-limited: 100%") && !allowed.body.contains("x-limited"), "{refused:?}");
    // The server does not see the headers with attributes.
    let echo = mesh.call("front", &format!("http://{server}/"), &["-H", "x-skysail-limit-1: a"]);
    assert!(echo.status == Some(200) && !echo.body.contains("x-skysail-limit"), "{echo:?}");
}
