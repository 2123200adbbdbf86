//! RateLimitPolicies in a mesh: which requests count together, which are refused, and how.
//!
//! The same requests go to a server with the sidecar and to one with a real Envoy. No limit refills within a test: an
//! interval is a day.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

use std::process::{Child, Stdio};

use skysail_testkit::{Mesh, Setup, envoy};
use skysail_xds::envoy::pb::envoy::{
    config::core::v3::HeaderValue,
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::Code,
        rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
    },
};

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
const POLICY: &str = r#"
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
    response: {status: 503, headers: {x-limited: 100%}, body: '{"limit": "100%"}', contentType: application/json, rateLimitHeaders: true}
  - {name: last, match: {paths: [/last]}, limit: {requests: 1, unit: DAY}}
"#;

/// Returns a constant of the other test.
fn token(name: &str) -> &'static str {
    let start = format!("const {name}: &str = ");
    let line = TOKENS.lines().find_map(|line| line.strip_prefix(&start)).unwrap();
    line.trim_start_matches("r#").trim_end_matches(';').trim_end_matches('#').trim_matches('"')
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
        counts_are_shown(&mesh, server);
    }

    // A changed policy starts with full buckets; a removed policy limits nothing.
    mesh.put("limits.yaml", &POLICY.replace("READY", "again").replace("requests: 2", "requests: 1"));
    for server in ["web", "web-envoy"] {
        wait_policy(&mesh, server, "again");
        assert_statuses(&mesh, "front", &format!("http://{server}/all"), &[], &[200, 429]);
    }
    mesh.put("limits.yaml", "");
    for server in ["web", "web-envoy"] {
        mesh.wait_status("front", &format!("http://{server}/all"), &[], 200);
    }
    assert!(!mesh.output().contains("rejected"), "{}", mesh.output());
}

fn limits_of(mesh: &Mesh, server: &str) {
    let of = |client: &str, path: &str, arguments: &[&str], expected: &[u16]| {
        assert_statuses(mesh, client, &format!("http://{server}{path}"), arguments, expected);
    };
    of("front", "/free", &[], &[200; 4]);
    of("front", "/all?a=b", &[], &[200, 200, 429]);
    let refused = mesh.call("front", &format!("http://{server}/all"), &["-i"]);
    assert!(refused.body.contains("retry-after: "), "{refused:?}");
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
    assert!(refused.body.contains("content-type: application/json\r\n"), "{refused:?}");
    assert!(refused.body.ends_with(r#"{"limit": "100%"}"#), "{refused:?}");
    // The texts of other rules and replies remain.
    for path in ["/burst", "/last", "/last"] {
        let answer = mesh.call("front", &format!("http://{server}{path}"), &[]);
        assert!(answer.status == Some(200) || answer.body == "local_rate_limited", "{path}: {answer:?}");
    }
    // The server does not see the headers with attributes.
    let echo = mesh.call("front", &format!("http://{server}/"), &["-H", "x-skysail-limit-1: a"]);
    assert!(echo.status == Some(200) && !echo.body.contains("x-skysail-limit"), "{echo:?}");
}

/// Envoy's metrics count the requests of each rule.
fn counts_are_shown(mesh: &Mesh, server: &str) {
    let names = mesh.names(server);
    let pod = names.first().map_or(server, String::as_str);
    let text = mesh.call(pod, "http://127.0.0.1:15090/stats/prometheus", &[]).body;
    let counts = [("shadow", 2, 0), ("burst", 2, 2), ("headers", 1, 1)];
    for (rule, above, refused) in counts {
        for (name, count) in [("rate_limited", above), ("enforced", refused)] {
            let line = format!(
                "envoy_http_local_rate_limit_{name}{{envoy_local_http_ratelimit_prefix=\"default/servers/{rule}\"}} {count}\n"
            );
            assert!(text.contains(&line), "no {line} in {text}");
        }
    }
}

const EDGE: &str = r"
apiVersion: apps/v1
kind: Deployment
metadata: {name: edge}
spec:
  selector: {matchLabels: {app: edge}}
  template:
    metadata:
      labels: {app: edge, gateway.networking.k8s.io/gateway-name: edge}
      annotations: {inject.istio.io/templates: gateway}
    spec: {containers: [{name: istio-proxy, image: auto, ports: [{containerPort: 8080}, {containerPort: 8081}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: edge}
spec:
  selector: {app: edge}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: http-more, port: 81, targetPort: 8081}]
---
apiVersion: v1
kind: Pod
metadata: {name: outside, labels: {app: outside, sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: registry.example/outside, ports: [{containerPort: 8080}]}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: edge}
spec:
  gatewayClassName: istio
  listeners: [{name: http, port: 80, protocol: HTTP}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: shop}
spec:
  parentRefs: [{name: edge}]
  hostnames: [shop.example.com]
  rules:
  - {name: limited, matches: [{path: {value: /a}}, {path: {value: /b}}], backendRefs: [{name: web, port: 80}]}
  - {name: free, backendRefs: [{name: web, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: more}
spec:
  selector: {app: edge}
  servers: [{port: {number: 81, name: http, protocol: HTTP}, hosts: ['*']}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: more}
spec:
  hosts: [more.example.com]
  gateways: [more]
  http:
  - {name: one, match: [{uri: {prefix: /one}}], route: [{destination: {host: web}}]}
  - {name: two, route: [{destination: {host: web}}]}
";

const EDGE_POLICIES: &str = r"
apiVersion: skysail.io/v1alpha1
kind: RateLimitPolicy
metadata: {name: route}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: shop, sectionName: limited}]
  rules: [{limit: {requests: 2, unit: DAY}}]
---
apiVersion: skysail.io/v1alpha1
kind: RateLimitPolicy
metadata: {name: more}
spec:
  targetRefs: [{group: networking.istio.io, kind: VirtualService, name: more}]
  rules: [{by: [{route: true}], limit: {requests: 1, unit: DAY}}]
---
apiVersion: skysail.io/v1alpha1
kind: RateLimitPolicy
metadata: {name: edge}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: edge}]
  rules:
  - {match: {paths: [/ready]}, limit: {requests: 1, unit: DAY}}
  - {match: {paths: [/client]}, by: [{clientAddress: {}}], limit: {requests: 1, unit: DAY}}
";

fn limits_at_a_gateway(with: &[&str]) {
    let text = [&MESH.replace("KEYS", token("KEYS")), EDGE].join("---\n");
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).with(with).ready();
    let of = |port: u16, host: &str, path: &str, arguments: &[&str], expected: &[u16]| {
        let host = format!("host: {host}.example.com");
        let arguments = [&["-H", &host], arguments].concat();
        assert_statuses(&mesh, "outside", &format!("http://edge:{port}{path}"), &arguments, expected);
    };
    let wait = |port: u16, host: &str, path: &str, status: u16| {
        let host = format!("host: {host}.example.com");
        mesh.wait_status("outside", &format!("http://edge:{port}{path}"), &["-H", &host], status);
    };
    wait(80, "shop", "/", 200);
    wait(81, "more", "/", 200);
    mesh.put("limits.yaml", EDGE_POLICIES);
    wait(80, "shop", "/ready", 429);
    // All requests of the rule count together, those of other rules do not.
    of(80, "shop", "/free", &[], &[200; 4]);
    of(80, "shop", "/a", &[], &[200]);
    of(80, "shop", "/b", &[], &[200, 429]);
    of(80, "shop", "/a", &[], &[429]);
    // A client cannot choose its address.
    of(80, "shop", "/client", &["-H", "x-forwarded-for: 192.0.2.1"], &[200, 429]);
    of(80, "shop", "/client", &["-H", "x-forwarded-for: 192.0.2.2"], &[429]);
    // Each route of the VirtualService has its own limit.
    of(81, "more", "/one", &[], &[200, 429]);
    of(81, "more", "/two", &[], &[200, 429]);
    assert!(!mesh.output().contains("rejected"), "{}", mesh.output());
}

#[test]
fn routes_of_gateways_are_limited() {
    limits_at_a_gateway(&[]);
}

#[test]
fn routes_of_gateways_are_limited_by_an_envoy() {
    limits_at_a_gateway(&["--envoy", &format!("default/edge={}", envoy().display())]);
}

/// Address on which the rate limit service listens; set in the process that serves it.
const LIMITER: &str = "SKYSAIL_TEST_LIMITER";

const GLOBAL: &str = r"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    extensionProviders:
    - name: limits
      envoyRateLimit:
        service: limiter.default.svc.cluster.local
        port: 9081
        domain: shop
        timeout: 30s
        statusOnError: 503
        # failClosed: true
---
apiVersion: v1
kind: Service
metadata: {name: limiter}
spec: {selector: {app: limiter}, ports: [{name: grpc, port: 9081}]}
---
apiVersion: v1
kind: Pod
metadata: {name: limiter, labels: {app: limiter, sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: registry.example/limiter, ports: [{containerPort: 8080}]}]}
---
apiVersion: skysail.io/v1alpha1
kind: RateLimitPolicy
metadata: {name: global}
spec:
  selector: {matchLabels: {role: server}}
  rules:
  - name: user
    match: {paths: [/user]}
    by: [{header: x-user, key: user}, {sourcePrincipal: true}]
    global: {provider: {name: limits}}
    response: {status: 403, headers: {x-limited: 'yes'}, body: later}
  - name: shadow
    match: {paths: [/shadow]}
    by: [{header: x-user}]
    global: {provider: {name: limits}, domain: other}
    shadow: true
";

/// A service that refuses the user `no`, and ends with the user `last`. Its responses have a header with the domain and the entries of the descriptor.
struct Limiter;

#[tonic::async_trait]
impl RateLimitService for Limiter {
    async fn should_rate_limit(
        &self,
        request: tonic::Request<RateLimitRequest>,
    ) -> Result<tonic::Response<RateLimitResponse>, tonic::Status> {
        let request = request.into_inner();
        let entries: Vec<_> = request.descriptors.iter().flat_map(|descriptor| &descriptor.entries).collect();
        let shown: Vec<_> = entries.iter().map(|entry| format!("{}={}", entry.key, entry.value)).collect();
        if entries.iter().any(|entry| entry.value == "last") {
            std::process::exit(0);
        }
        let limited = entries.iter().any(|entry| entry.value == "no");
        Ok(tonic::Response::new(RateLimitResponse {
            overall_code: if limited { Code::OverLimit } else { Code::Ok }.into(),
            response_headers_to_add: vec![HeaderValue {
                key: "x-descriptor".into(),
                value: format!("{} {}", request.domain, shown.join(" ")),
                ..Default::default()
            }],
            ..Default::default()
        }))
    }
}

/// Serves decisions in the process that another test starts within a pod.
#[tokio::test]
async fn the_rate_limit_service() {
    let Ok(address) = std::env::var(LIMITER) else { return };
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let service = RateLimitServiceServer::new(Limiter);
    tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
}

/// Starts the rate limit service in a pod.
fn start_limiter(mesh: &Mesh, pod: &str, port: u16) -> Child {
    let program = std::env::current_exe().unwrap().to_string_lossy().into_owned();
    let variable = format!("{LIMITER}=0.0.0.0:{port}");
    let test = ["env", &variable, &program, "--exact", "the_rate_limit_service", "--test-threads", "1"];
    let mut command = mesh.command(&[&["exec", pod, "--"], &test[..]].concat());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_service_decides_about_requests() {
    let text = [&MESH.replace("KEYS", token("KEYS")), GLOBAL].join("---\n");
    let instead = format!("default/web-envoy={}", envoy().display());
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).with(&["--envoy", &instead]).ready();
    let mut limiter = start_limiter(&mesh, "limiter", 9081);
    for server in ["web", "web-envoy"] {
        let ask = |path: &str, user: &str| {
            let arguments = ["-i", "-H", user];
            let answer = mesh.call("front", &format!("http://{server}{path}"), &arguments);
            (answer.status, answer.body)
        };
        let user = format!("http://{server}/user");
        mesh.wait_status("front", &user, &["-H", "x-user: no"], 403);
        let principal = "sourcePrincipal=spiffe://cluster.local/ns/default/sa/front";
        let (status, body) = ask("/user", "x-user: ann");
        let descriptor = format!("x-descriptor: shop rule=default/global/user user=ann {principal}");
        assert!(status == Some(200) && body.contains(&descriptor), "{server}: {status:?} {body}");
        assert!(!body.contains("x-skysail-limit"), "{server}: {body}");
        let (status, body) = ask("/user", "x-user: no");
        assert!(status == Some(403) && body.contains("x-limited: yes"), "{server}: {status:?} {body}");
        assert!(body.ends_with("\nlater"), "{server}: {body}");
        // Without the header the descriptor lacks its entry.
        let (status, body) = ask("/user", "x-other: no");
        let descriptor = format!("x-descriptor: shop rule=default/global/user {principal}");
        assert!(status == Some(200) && body.contains(&descriptor), "{server}: {status:?} {body}");
        let (status, body) = ask("/shadow", "x-user: no");
        let descriptor = "x-descriptor: other rule=default/global/shadow header.x-user=no";
        assert!(status == Some(200) && body.contains(descriptor), "{server}: {status:?} {body}");
        let (status, body) = ask("/free", "x-user: no");
        assert!(status == Some(200) && !body.contains("x-descriptor"), "{server}: {status:?} {body}");
    }
    // The service is away: requests pass, or are refused if the provider says so.
    mesh.call("front", "http://web/user", &["-H", "x-user: last"]);
    limiter.wait().unwrap();
    for server in ["web", "web-envoy"] {
        mesh.wait_status("front", &format!("http://{server}/user"), &["-H", "x-user: no"], 200);
    }
    mesh.edit("mesh.yaml", "# failClosed", "failClosed");
    for server in ["web", "web-envoy"] {
        mesh.wait_status("front", &format!("http://{server}/user"), &["-H", "x-user: ann"], 503);
        mesh.wait_status("front", &format!("http://{server}/free"), &[], 200);
    }
    assert!(!mesh.output().contains("rejected"), "{}", mesh.output());
}

/// The page for users, whose examples are one mesh.
const PAGE: &str = include_str!("../docs/rate-limits.md");

const SERVICE_OF_PAGE: &str = "
apiVersion: v1
kind: Pod
metadata: {name: ratelimit, labels: {app: ratelimit, sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: registry.example/ratelimit, ports: [{containerPort: 8080}]}]}
";

#[test]
fn the_examples_of_the_page_limit_requests() {
    let blocks = PAGE.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let text = blocks.chain([SERVICE_OF_PAGE]).collect::<Vec<_>>().join("---\n");
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready();
    let mut limiter = start_limiter(&mesh, "ratelimit", 8081);
    mesh.wait_status("front", "http://web/orders/1", &["-H", "x-user: no"], 429);
    let answer = mesh.call("front", "http://web/orders/1", &["-i", "-H", "x-user: ann"]);
    assert!(answer.body.contains("x-descriptor: shop rule=default/users/per-user user=ann"), "{answer:?}");
    assert_statuses(&mesh, "front", "http://web/", &[], &[200; 5]);
    // A token arrives every 0.6 seconds, so more than three requests may pass before one is refused.
    mesh.wait_status("front", "http://web/api/1", &[], 503);
    assert!(!mesh.output().contains("RateLimitPolicy"), "{}", mesh.output());
    mesh.call("front", "http://web/orders/1", &["-H", "x-user: last"]);
    limiter.wait().unwrap();
}
