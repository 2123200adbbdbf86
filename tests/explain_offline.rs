//! `skysail explain -f`: requests through gateways, connections, tokens and rate limits, on the folders of
//! `examples/tasks` and on texts. The texts of the reports are part of the behaviour.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

#[path = "explain/certificates.rs"]
mod certificates;
#[path = "explain/choices.rs"]
mod choices;
#[path = "explain/clients.rs"]
mod clients;
#[path = "explain/places.rs"]
mod places;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Exit code and report.
type Explained = (i32, String);

fn tasks() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tasks")
}

/// Runs `skysail explain` in a folder, with these files and arguments.
fn explain(folder: &Path, files: &[&str], arguments: &[&str]) -> Explained {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skysail"));
    command.arg("explain").args(files.iter().flat_map(|file| ["-f", file])).args(arguments);
    let output = command.current_dir(folder.canonicalize().unwrap()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout) + &text(&output.stderr))
}

/// Explains a request on folders of the tasks, together with the application and the gateway.
fn explain_task(task: &str, arguments: &[&str]) -> Explained {
    explain(&tasks(), &["app", "gateway", task], arguments)
}

/// Explains a request on a text in the file `mesh.yaml`.
fn explain_text(text: &str, arguments: &[&str]) -> Explained {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("mesh.yaml"), text).unwrap();
    explain(folder.path(), &["mesh.yaml"], arguments)
}

/// Checks the exit code, and that the report has these texts in this order. Line breaks within a sentence do not matter.
#[track_caller]
fn check((code, report): Explained, expected_code: i32, texts: &[&str]) {
    assert_eq!(code, expected_code, "{report}");
    let is_narrow = report.lines().all(|line| line.chars().count() <= 100);
    assert!(is_narrow || expected_code == 2, "{report}");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let whole = words(&report);
    let mut rest = whole.as_str();
    for text in texts {
        let text = words(text);
        let at = rest.find(&text);
        assert!(at.is_some(), "{text:?} is missing, or not in order:\n{report}");
        rest = &rest[at.unwrap_or_default() + text.len()..];
    }
}

#[test]
fn a_request_from_outside_names_the_server_of_the_gateway() {
    let films = "http://cinema.example.com:8080/films";
    check(
        explain_task("ingress", &["--from", "outside", films]),
        0,
        &[
            "GATEWAY default/ingress, 100 % of the requests, at 10.244.0.5:8080",
            "<- Service default/ingress spec.ports[0], gateway/gateway.yaml:",
            "server HTTP on port 8080, hosts cinema.example.com",
            "<- Gateway default/cinema spec.servers[0], ingress/routes.yaml:8",
            "route 0",
            "<- VirtualService default/cinema spec.http[0].match[0], ingress/routes.yaml:18",
            "INBOUND at the sidecar of default/films-v1",
            "SERVED",
        ],
    );
    let (_, by_address) = explain_task("ingress", &["--from", "203.0.113.9", films]);
    assert!(by_address.contains("from outside (203.0.113.9)"), "{by_address}");
}

#[test]
fn a_request_from_outside_to_the_wrong_place_names_the_servers_that_do_not_take_it() {
    let from_outside = |task: &str, url: &str| explain_task(task, &["--from", "outside", url]);
    let server = "<- Gateway default/cinema spec.servers[0], ingress/routes.yaml:8";
    check(
        from_outside("ingress", "http://cinema.example.com/films"),
        1,
        &[
            "not server HTTP on port 8080, hosts cinema.example.com: port 80, expected: 8080",
            server,
            "it listens on 8080",
        ],
    );
    check(
        from_outside("ingress", "http://other.example:8080/films"),
        1,
        &[
            "host other.example, expected: cinema.example.com",
            server,
            "responds 404",
            "there is cinema.example.com",
        ],
    );
    check(
        from_outside("ingress", "https://cinema.example.com:8080/films"),
        1,
        &["TLS, expected: plain text", server, "REFUSED"],
    );
    check(
        from_outside("secure-ingress", "https://other.example.com:8443/"),
        1,
        &[
            "connection TLS, SNI other.example.com",
            "SNI other.example.com, expected: cinema.example.com",
            "no filter chain",
        ],
    );
    check(
        from_outside("ingress-gateway-api", "http://cinema.example.com:8080/other"),
        1,
        &[
            "server HTTP",
            "<- Gateway default/cinema spec.listeners[0], ingress-gateway-api/routes.yaml:9",
            "not route 0",
        ],
    );
    let none = explain(&tasks(), &["app"], &["--from", "outside", "http://films/"]);
    check(none, 1, &["the configuration has no gateway"]);
    let named = explain_task("ingress", &["--from", "outside", "--gateway", "nobody", "http://a:8080/"]);
    check(named, 1, &["--gateway nobody: there is no such gateway; known gateways: default/ingress"]);
}

#[test]
fn mutual_tls_of_a_gateway_needs_a_certificate() {
    let vip = "https://vip.example.com:8443/";
    check(
        explain_task("secure-ingress", &["--from", "outside", vip]),
        1,
        &[
            "server HTTPS on port 8443, TLS MUTUAL, hosts vip.example.com",
            "<- Gateway default/cinema-secure spec.servers[1], secure-ingress/routes.yaml:",
            "closes the filter chain requires a client certificate, and the client has none",
        ],
    );
    let with = ["--from", "outside", vip, "--cert", "secure-ingress/member.crt"];
    check(
        explain_task("secure-ingress", &with),
        0,
        &["connection mutual TLS, SNI vip.example.com", "SERVED"],
    );
    let redirect = ["--from", "outside", "http://vip.example.com:8080/"];
    check(explain_task("secure-ingress", &redirect), 0, &["responds 301: the virtual host requires TLS"]);
    let plain = ["--from", "outside", "http://vip.example.com:8080/", "--cert", "secure-ingress/member.crt"];
    check(explain_task("secure-ingress", &plain), 2, &["a client in plain text presents no certificate"]);
}

#[test]
fn forwarded_tls_is_followed_to_its_server() {
    let of = |host: &str| {
        let url = format!("tls://{host}:8443");
        explain_task("sni-passthrough", &["--from", "outside", &url])
    };
    check(
        of("tickets.example.com"),
        1,
        &[
            "CONNECTION tls://tickets.example.com:8443",
            "server TLS on port 8443, TLS PASSTHROUGH, hosts tickets.example.com",
            "filter chain SNI tickets.example.com",
            "<- VirtualService default/passthrough spec.tls[0].match[0], sni-passthrough/routes.yaml:19",
            "timeout none; idle 3600 s",
            "cluster outbound|9443||tickets.default.svc.cluster.local, 100 %",
            "GATEWAY default/tickets, 100 % of the connections",
            "the filter chain expects HTTP, and the client sends no request",
        ],
    );
    check(of("other.example.com"), 1, &["SNI other.example.com, expected: tickets.example.com", "REFUSED"]);
    let request = ["--from", "outside", "https://tickets.example.com:8443/"];
    check(explain_task("sni-passthrough", &request), 0, &["responds 200: direct response", "SERVED"]);
}

#[test]
fn a_sidecar_presents_its_certificate_to_an_egress_gateway() {
    check(
        explain(&tasks(), &["app", "egress-gateway"], &["--from", "page", "http://api.partner.example/"]),
        0,
        &[
            "OUTBOUND at the sidecar of default/page",
            "cluster outbound|443|partner|egress.default.svc.cluster.local, 100 %",
            "mutual TLS of the mesh",
            "GATEWAY default/egress, 100 % of the requests",
            "connection mutual TLS, principal spiffe://cluster.local/ns/default/sa/page",
            "server HTTPS on port 443, TLS ISTIO_MUTUAL, hosts api.partner.example",
            "cluster outbound|443||api.partner.example, 100 %",
            "SERVED",
        ],
    );
}

#[test]
fn a_proxy_responds_for_an_endpoint_that_closes_its_connection() {
    let kinds = "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: web}\nspec: {mtls: {mode: STRICT}}\n\
                 ---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: web}\n\
                 spec: {host: web.default.svc.cluster.local, trafficPolicy: {tls: {mode: DISABLE}}}\n";
    let text = format!("{LIMITED}---\n{kinds}");
    let reason = "mutual TLS is STRICT; the proxy before it responds with 503";
    check(
        explain_text(&text, &["--from", "front", "http://web/"]),
        1,
        &["plain text", "INBOUND", "mTLS mode STRICT", "closes", reason],
    );
    let mutual = text.replace("DISABLE", "ISTIO_MUTUAL");
    let principal = "connection mutual TLS, principal spiffe://cluster.local/ns/default/sa/front";
    check(explain_text(&mutual, &["--from", "front", "http://web/"]), 0, &[principal, "SERVED"]);
}

#[test]
fn weighted_connections_name_their_virtual_service() {
    check(
        explain_task("tcp-traffic-shifting", &["--from", "page", "tcp://ticker:9000"]),
        0,
        &[
            "listener 10.96.",
            "filter chain of all connections to the port",
            "<- VirtualService default/ticker spec.tcp[0], tcp-traffic-shifting/weights.yaml:24",
            "cluster outbound|9000|v1|ticker.default.svc.cluster.local, 80 %",
            "connect timeout 10 s",
            "cluster outbound|9000|v2|ticker.default.svc.cluster.local, 20 %",
            "INBOUND at the sidecar of default/films-v1, 80 % of the connections",
        ],
    );
}

#[test]
fn routes_of_delegates_name_the_delegate() {
    let rules = "\
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: store}
spec:
  hosts: [store]
  http:
    - match: [{uri: {prefix: /old}}]
      route: [{destination: {host: store, port: {number: 5432}}}]
    - match: [{uri: {prefix: /new}}]
      delegate: {name: part}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: part}
spec:
  http:
    - match: [{uri: {prefix: /new/a}}]
      route: [{destination: {host: store, port: {number: 5432}}}]
    - timeout: 3s
      route: [{destination: {host: store, port: {number: 5432}}}]
";
    let text = STORE.replace("name: tcp,", "name: http,") + rules;
    let explained =
        |path: &str| explain_text(&text, &["--from", "front", &format!("http://store:5432{path}")]);
    let root = "<- VirtualService default/store spec.http[0].match[0], mesh.yaml:";
    check(explained("/old"), 0, &[root]);
    check(explained("/new/a"), 0, &["<- VirtualService default/part spec.http[0], mesh.yaml:"]);
    let second = "<- VirtualService default/part spec.http[1], mesh.yaml:";
    check(
        explained("/new/b"),
        0,
        &[second, "timeout 3 s", "<- VirtualService default/part spec.http[1].timeout"],
    );
}

const STORE: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: front, labels: {app: front}}
spec: {serviceAccountName: front, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: bare, labels: {app: bare, sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: store, labels: {app: store}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 5432}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: store}
spec: {selector: {app: store}, ports: [{name: tcp, port: 5432}, {name: tls, port: 5433, targetPort: 5432}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: store}
spec:
  hosts: [store.default.svc.cluster.local]
  tls:
    - match: [{port: 5433, sniHosts: [store.default.svc.cluster.local]}]
      route: [{destination: {host: store, port: {number: 5433}}}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: store}
spec:
  selector: {matchLabels: {app: store}}
  action: ALLOW
  rules:
    - from: [{source: {principals: [cluster.local/ns/default/sa/front]}}]
      to: [{operation: {ports: ['5432']}}]
";

#[test]
fn connections_meet_policies_and_the_mode_of_mutual_tls() {
    let rule = "<- AuthorizationPolicy default/store spec.rules[0], mesh.yaml:37";
    check(
        explain_text(STORE, &["--from", "front", "tcp://store:5432"]),
        0,
        &["policy ALLOW admits: rule ns[default]-policy[store]-rule[0] matches", rule, "SERVED"],
    );
    let denied = explain_text(STORE, &["--from", "bare", "tcp://store:5432"]);
    let reason =
        "not rule no principal (plain text), expected: \"spiffe://cluster.local/ns/default/sa/front\"";
    check(
        denied,
        1,
        &[
            "the client has no sidecar",
            "INBOUND",
            "policy ALLOW DENIES: no rule matches",
            reason,
            rule,
            "closes",
            "AuthorizationPolicy default/store",
        ],
    );
    // What a policy says about requests never allows a connection.
    let by_path = STORE.replace("to: [{operation: {ports: ['5432']}}]", "to: [{operation: {paths: [/a]}}]");
    let (code, report) = explain_text(&by_path, &["--from", "front", "tcp://store:5432"]);
    assert_eq!(code, 1, "{report}");
    let strict = format!(
        "{STORE}---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: store}}\nspec: {{mtls: {{mode: STRICT}}}}\n"
    );
    check(
        explain_text(&strict, &["--from", "bare", "tcp://store:5432"]),
        1,
        &["mTLS mode STRICT", "not chain", "plain text, expected: TLS", "mutual TLS is STRICT"],
    );
}

#[test]
fn server_names_select_the_filter_chain_of_a_client() {
    let named = explain_text(STORE, &["--from", "front", "tls://store.default.svc.cluster.local:5433"]);
    check(
        named,
        0,
        &[
            "connection TLS, SNI store.default.svc.cluster.local",
            "filter chain SNI store.default.svc.cluster.local",
            "<- VirtualService default/store spec.tls[0].match[0], mesh.yaml:27",
            "SERVED",
        ],
    );
    let other = explain_text(STORE, &["--from", "front", "tls://store:5433"]);
    check(
        other,
        1,
        &[
            "not chain SNI store, expected: store.default.svc.cluster.local",
            "cluster PassthroughCluster",
            "INBOUND at the sidecar of default/store",
            "policy ALLOW DENIES",
        ],
    );
}

/// Returns the `authorization` header with a token of the task `jwt`.
fn bearer(token: &str) -> String {
    let token = fs::read_to_string(tasks().join("jwt").join(token)).unwrap();
    format!("authorization: Bearer {}", token.trim())
}

#[test]
fn tokens_are_verified_and_their_claims_decide() {
    let of = |header: &str, path: &str| {
        let url = format!("http://films{path}");
        explain_task("jwt", &["--from", "page", "-H", header, &url])
    };
    let (guest, staff) = (bearer("guest.jwt"), bearer("staff.jwt"));
    let rule = "<- RequestAuthentication default/films spec.jwtRules[0], jwt/tokens.yaml:8";
    check(
        of("x-user: ann", "/"),
        1,
        &["has no token", "policy ALLOW DENIES", "not rule no verified token, expected: claim iss"],
    );
    check(
        of(&guest, "/"),
        0,
        &[
            "token header authorization: valid, principal https://accounts.cinema.example/",
            rule,
            "policy ALLOW admits",
        ],
    );
    check(
        of(&guest, "/staff"),
        1,
        &[
            "token header authorization: valid",
            "policy ALLOW DENIES",
            "not rule claim groups is",
            "expected: \"staff\"",
            "responds 403",
        ],
    );
    check(of(&staff, "/staff"), 0, &["groups [\"staff\"]", "policy ALLOW admits", "SERVED"]);
    check(
        of("authorization: Bearer forged", "/"),
        1,
        &[
            "bad token header authorization: Jwt is not in the form",
            rule,
            "responds 401",
            "RequestAuthentication default/films",
        ],
    );
    let changed = staff.replace(".e", ".E");
    check(of(&changed, "/"), 1, &["bad token", "responds 401"]);
}

#[test]
fn unknown_keys_and_other_issuers_are_named() {
    let tokens = fs::read_to_string(tasks().join("jwt/tokens.yaml")).unwrap();
    let app = fs::read_to_string(tasks().join("app/cinema.yaml")).unwrap();
    let of = |tokens: String| {
        explain_text(
            &format!("{app}---\n{tokens}"),
            &["--from", "page", "-H", &bearer("guest.jwt"), "http://films/"],
        )
    };
    let keys = tokens.lines().find(|line| line.trim().starts_with("jwks:")).unwrap();
    let from_server = tokens.replace(keys, "      jwksUri: https://accounts.cinema.example/keys");
    check(
        of(from_server),
        0,
        &[
            "token header authorization: valid",
            "the keys of https://accounts.cinema.example/keys are not fetched here",
        ],
    );
    let other = tokens.replace("issuer: https://accounts.cinema.example", "issuer: https://other.example");
    check(
        of(other),
        1,
        &[
            "bad token header authorization: issuer https://accounts.cinema.example, expected: https://other.example",
            "responds 401",
        ],
    );
}

const LIMITED: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: front, labels: {app: front}}
spec: {serviceAccountName: front, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    extensionProviders:
    - name: limits
      envoyRateLimit: {service: limits.default.svc.cluster.local, port: 8081, domain: shop}
---
apiVersion: v1
kind: Service
metadata: {name: limits}
spec: {selector: {app: limits}, ports: [{name: grpc, port: 8081}]}
---
apiVersion: skysail.io/v1alpha1
kind: RateLimitPolicy
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  rules:
  - name: per-client
    match: {paths: [/api/*]}
    by: [{sourcePrincipal: true}]
    limit: {requests: 100, unit: MINUTE, burst: 3}
    response: {status: 503}
  - name: all
    limit: {requests: 1000, unit: HOUR}
    shadow: true
  - name: users
    by: [{header: x-user, key: user}]
    global: {provider: {name: limits}}
";

#[test]
fn rate_limits_name_their_descriptors() {
    check(
        explain_text(LIMITED, &["--from", "front", "-H", "x-user: ann", "http://web/api/1"]),
        0,
        &[
            "limit 100 in 60 s, 3 at once, for",
            "sourcePrincipal=spiffe://cluster.local/ns/default/sa/front; 503 above it",
            "<- RateLimitPolicy default/web spec.rules[0], mesh.yaml:36",
            "limit 1000 in 3600 s",
            "requests above it are only counted",
            "<- RateLimitPolicy default/web spec.rules[1], mesh.yaml:41",
            "limit of the service outbound|8081||limits.default.svc.cluster.local, domain shop, for user=ann; 429 above it",
            "<- RateLimitPolicy default/web spec.rules[2], mesh.yaml:44",
            "SERVED",
        ],
    );
    check(
        explain_text(LIMITED, &["--from", "front", "http://web/other"]),
        0,
        &[
            "not limit header :path is \"/other\", expected:",
            "<- RateLimitPolicy default/web spec.rules[0]",
            "limit 1000 in 3600 s",
        ],
    );
    // Limits of an EnvoyFilter have one bucket for all requests.
    check(
        explain_task("local-rate-limit", &["--from", "page", "http://seats/"]),
        0,
        &["limit 4 in 60 s, 4 at once, for all requests to this proxy; 429 above it", "SERVED"],
    );
}
