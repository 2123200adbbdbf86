//! Choices that a proxy or the explanation makes: the endpoint by weight, the listener of a Sidecar, the
//! authorizer of a CUSTOM policy, the gateway among several, and routes for a fraction of the requests.

use super::{bearer, check, explain_text, tasks};

const CLIENT: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: front, labels: {app: front}}
spec: {containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web, version: v1}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
";

fn front(more: &str, arguments: &[&str]) -> (i32, String) {
    explain_text(&format!("{CLIENT}---\n{more}"), &[&["--from", "front"], arguments].concat())
}

const WEIGHTED: &str = "\
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: legacy}
spec:
  hosts: [legacy.example]
  location: MESH_EXTERNAL
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints:
  - {address: 203.0.113.1, weight: 1}
  - {address: 203.0.113.2, weight: 3}
";

#[test]
fn endpoints_get_requests_by_their_weights() {
    check(
        front(WEIGHTED, &["http://legacy.example/"]),
        0,
        &[
            "endpoints 2 of 2",
            "203.0.113.1:80, plain text, 25 %",
            "203.0.113.2:80, plain text, 75 %",
            "DESTINATION, 25 % of the requests, at 203.0.113.1:80",
            "DESTINATION, 75 % of the requests, at 203.0.113.2:80",
            "SERVED",
        ],
    );
}

const LISTENERS: &str = "\
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: front}
spec:
  workloadSelector: {labels: {app: front}}
  outboundTrafficPolicy: {mode: REGISTRY_ONLY}
  egress:
  - port: {number: 80, protocol: HTTP, name: http}
    bind: 127.0.0.1
    captureMode: NONE
    hosts: [./web.default.svc.cluster.local]
";

#[test]
fn listeners_of_sidecars_have_sockets_of_their_own() {
    let of = |arguments: &[&str]| front(LISTENERS, arguments);
    check(
        of(&["-H", "host: web", "http://127.0.0.1/"]),
        0,
        &[
            "listener 127.0.0.1_80",
            "virtual host web.default.svc.cluster.local:80 of route table",
            "cluster outbound|80||web.default.svc.cluster.local, 100 %",
            "INBOUND at the sidecar of default/web",
            "SERVED",
        ],
    );
    // Other ports of the address are those of programs in the pod.
    let own = "WORKLOAD default/front, 100 % of the requests, at 127.0.0.1:81";
    check(of(&["http://127.0.0.1:81/"]), 0, &[own, "a program in the pod of default/front receives it"]);
    // No listener intercepts connections to the Service.
    check(of(&["http://web/"]), 1, &["listener virtualOutbound", "BlackHoleCluster", "REFUSED"]);
}

const AUTHORIZED: &str = "\
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    extensionProviders:
    - {name: ask, envoyExtAuthzHttp: {service: asked.default.svc.cluster.local, port: 80}}
---
apiVersion: v1
kind: Pod
metadata: {name: asked, labels: {app: asked}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: asked}
spec: {selector: {app: asked}, ports: [{name: http, port: 80, targetPort: 8080}]}
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

#[test]
fn authorizers_are_asked_about_requests_that_their_policies_select() {
    let call =
        "asks the authorizer outbound|80||asked.default.svc.cluster.local, which may refuse the request";
    check(
        front(AUTHORIZED, &["http://web/private/a"]),
        0,
        &[
            "policy CUSTOM its provider decides: rule istio-ext-authz-ask-ns[default]-policy[ask]-rule[0]",
            "<- AuthorizationPolicy default/ask spec.rules[0], mesh.yaml:41",
            call,
            "SERVED",
        ],
    );
    let (code, report) = front(AUTHORIZED, &["http://web/public"]);
    assert!(!report.contains("asks the authorizer"), "{report}");
    check((code, report), 0, &["policy CUSTOM its provider is not asked: no rule matches", "SERVED"]);
    let gone = AUTHORIZED.replace("selector: {app: asked}", "selector: {app: gone}");
    let reason = "the authorizer cannot answer: the cluster has no endpoint";
    check(front(&gone, &["http://web/private"]), 1, &["policy CUSTOM", "responds 403", reason]);
    check(front(&gone, &["http://web/public"]), 0, &["SERVED"]);
    let open = gone.replace("port: 80}}", "port: 80, failOpen: true}}");
    check(front(&open, &["http://web/private"]), 0, &["its failure admits requests", "SERVED"]);
    let unknown = AUTHORIZED.replace("provider: {name: ask}", "provider: {name: other}");
    check(
        front(&unknown, &["http://web/private"]),
        1,
        &["policy DENY DENIES", "AuthorizationPolicy default/ask"],
    );
}

#[test]
fn authorizers_of_connections_close_them_if_they_cannot_answer() {
    let text = CLIENT.replace("name: http, port: 80,", "name: tcp, port: 80,");
    let grpc = AUTHORIZED
        .replace("envoyExtAuthzHttp", "envoyExtAuthzGrpc")
        .replace("operation: {paths: ['/private*']}", "operation: {ports: ['8080']}");
    let of = |rules: &str| explain_text(&format!("{text}---\n{rules}"), &["--from", "front", "tcp://web:80"]);
    let authorizer = "the authorizer outbound|80||asked.default.svc.cluster.local";
    let call = format!("asks {authorizer}, which may refuse the connection");
    check(of(&grpc), 0, &["policy CUSTOM its provider decides", &call, "SERVED"]);
    let gone = grpc.replace("selector: {app: asked}", "selector: {app: gone}");
    let reason = "the authorizer cannot answer: the cluster has no endpoint";
    check(
        of(&gone),
        1,
        &[
            "policy CUSTOM its provider decides",
            &format!("{authorizer} cannot answer: the cluster has no endpoint"),
            &format!("closes {reason}"),
            &format!("REFUSED: the proxy of default/web closes the connection: {reason}"),
        ],
    );
    let open = gone.replace("port: 80}}", "port: 80, failOpen: true}}");
    check(of(&open), 0, &["and its failure admits connections", "SERVED"]);
    let other = gone.replace("ports: ['8080']", "ports: ['8081']");
    check(of(&other), 0, &["policy CUSTOM its provider is not asked", "SERVED"]);
}

/// Returns a gateway whose Service has a port, and a Gateway with a server for a host.
fn gateway(name: &str, port: u16, server: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\n\
         metadata: {{name: {name}, labels: {{istio: {name}}}, \
         annotations: {{inject.istio.io/templates: gateway}}}}\n\
         spec: {{containers: [{{name: istio-proxy, image: auto}}]}}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{selector: {{istio: {name}}}, ports: [{{name: http, port: {port}}}]}}\n\
         ---\napiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: {name}}}\n\
         spec: {{selector: {{istio: {name}}}, servers: [{server}]}}\n\
         ---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: {name}}}\n\
         spec: {{hosts: ['*'], gateways: [{name}], http: [{{directResponse: {{status: 200}}}}]}}\n"
    )
}

fn server(port: u16, host: &str) -> String {
    format!("{{port: {{number: {port}, name: http, protocol: HTTP}}, hosts: ['{host}']}}")
}

#[test]
fn the_gateway_is_the_one_with_the_port_and_the_host() {
    let gateways = [
        gateway("a-port", 81, &server(81, "*")),
        gateway("b-server", 80, &server(8080, "*")),
        gateway("c-host", 80, &server(80, "c.example")),
        gateway("d-host", 80, &server(80, "d.example")),
        gateway("e-host", 80, &server(80, "d.example")),
    ];
    let text = format!("{CLIENT}{}", gateways.concat());
    let of = |arguments: &[&str]| explain_text(&text, &[&["--from", "outside"], arguments].concat());
    check(of(&["http://any.example:81/"]), 0, &["GATEWAY default/a-port", "SERVED"]);
    check(of(&["http://c.example/"]), 0, &["GATEWAY default/c-host", "server HTTP on port 80", "SERVED"]);
    let other = "NOTE other gateways serve this too, and --gateway selects one: default/e-host";
    check(of(&["http://d.example/"]), 0, &[other, "GATEWAY default/d-host", "SERVED"]);
    let (_, report) = of(&["--gateway", "e-host", "http://d.example/"]);
    assert!(report.contains("GATEWAY default/e-host") && !report.contains("other gateways"), "{report}");
    // A gateway without a server for the port is the last choice.
    check(
        of(&["--gateway", "b-server", "http://d.example/"]),
        1,
        &["GATEWAY default/b-server", "not server HTTP on port 8080", "it listens on", "REFUSED"],
    );
    check(of(&["http://none.example/"]), 1, &["GATEWAY default/c-host", "not server", "responds 404"]);
}

const REFUSED: &str = "\
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: redirects}
spec:
  configPatches:
  - applyTo: HTTP_ROUTE
    match: {context: SIDECAR_OUTBOUND}
    patch: {operation: MERGE, value: {route: {internal_redirect_policy: {max_internal_redirects: 1}}}}
";

#[test]
fn a_route_table_that_the_proxy_refuses_is_named() {
    check(
        front(REFUSED, &["http://web/"]),
        1,
        &[
            "responds 404: the proxy refuses the route table 80, and has no earlier version of it",
            "not applied 80: virtual_hosts[0].routes[0].route.internal_redirect_policy",
            "REFUSED",
        ],
    );
}

/// A gateway selects the route again by the claims of verified tokens.
#[test]
fn a_refused_route_table_is_the_reason_after_a_token_too() {
    let tokens = std::fs::read_to_string(tasks().join("jwt/tokens.yaml")).unwrap();
    let (authentication, _) = tokens.split_once("---").unwrap();
    let refused = REFUSED.replace("SIDECAR_OUTBOUND", "GATEWAY");
    let text = CLIENT.to_owned()
        + &gateway("edge", 80, &server(80, "*"))
            .replace("{directResponse: {status: 200}}", "{route: [{destination: {host: web}}]}")
        + "---\n"
        + &authentication.replace("matchLabels: {app: films}", "matchLabels: {istio: edge}")
        + "---\n"
        + &refused;
    check(
        explain_text(&text, &["--from", "outside", "-H", &bearer("guest.jwt"), "http://a.example/"]),
        1,
        &["token header authorization: valid", "responds 404: the proxy refuses the route table http.80"],
    );
}

const FRACTION: &str = "\
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: web}
spec:
  hosts: [web]
  http:
  - name: first
    match: [{headers: {x-first: {exact: 'yes'}}}]
    route: [{destination: {host: web}}]
    timeout: 1s
  - {name: second, route: [{destination: {host: web}}], timeout: 2s}
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: fraction}
spec:
  configPatches:
  - applyTo: HTTP_ROUTE
    match: {context: SIDECAR_OUTBOUND, routeConfiguration: {vhost: {route: {name: first}}}}
    patch: {operation: MERGE, value: {match: {runtime_fraction: {default_value: {numerator: 25}}}}}
";

#[test]
fn routes_for_a_fraction_of_the_requests_name_it() {
    let of = |numerator: &str| {
        let text = FRACTION.replace("numerator: 25", &format!("numerator: {numerator}"));
        front(&text, &["-H", "x-first: yes", "http://web/"])
    };
    let never = "not route 0 first: the route is for 0 % of the requests";
    check(of("0"), 0, &[never, "route 1 second", "timeout 2 s", "SERVED"]);
    let (code, report) = of("100");
    assert!(!report.contains("second"), "{report}");
    check((code, report), 0, &["route 0 first", "timeout 1 s", "spec.http[0].timeout", "SERVED"]);
    check(
        of("25"),
        1,
        &[
            "route 0 first, for 25 % of the requests",
            "route 1 second",
            "timeout 2 s",
            "<- VirtualService default/web spec.http[1].timeout",
            "INBOUND at the sidecar of default/web, 75 % of the requests",
            "DESTINATION, 25 % of the requests",
            "result not explained: the requests take a route for a fraction of the requests",
            "NOT EXPLAINED: 25 % of the requests are not explained",
        ],
    );
    let (_, report) = front(FRACTION, &["-H", "x-first: yes", "http://web/", "--output", "json"]);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["client"]["routes"][0]["share"], 0.25, "{report:#}");
}

const ANSWERED: &str = "\
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: web}
spec:
  hosts: [web]
  http:
  - corsPolicy: {allowOrigins: [{exact: 'http://a.example'}], allowMethods: [GET]}
    route: [{destination: {host: web}}]
";

#[test]
fn preflights_are_answered_by_the_sidecar() {
    let preflight = ["-X", "OPTIONS", "-H", "access-control-request-method: GET", "http://web/"];
    let of =
        |origin: &str| front(ANSWERED, &[&["-H", &format!("origin: {origin}")], &preflight[..]].concat());
    let cause = "<- VirtualService default/web spec.http[0].corsPolicy, mesh.yaml:22";
    check(of("http://a.example"), 0, &["answers the preflight", cause, "responds 200: CORS preflight"]);
    // Preflights of other origins are forwarded.
    check(
        of("http://b.example"),
        0,
        &["answers preflights", "INBOUND", "the program of default/web receives it"],
    );
    let request = ["-H", "origin: http://a.example", "http://web/"];
    check(front(ANSWERED, &request), 0, &["sets the CORS headers of the response", cause, "INBOUND"]);
}

#[test]
fn limits_apply_to_requests_that_the_gateway_answers() {
    let limit = "---\napiVersion: skysail.io/v1alpha1\nkind: RateLimitPolicy\n\
                 metadata: {name: edge}\nspec:\n  \
                 selector: {matchLabels: {istio: edge}}\n  rules:\n  \
                 - {by: [{header: x-user}], limit: {requests: 2, unit: DAY}}\n";
    let text = gateway("edge", 80, &server(80, "*")).trim_start_matches("---\n").to_owned() + limit;
    check(
        explain_text(&text, &["--from", "outside", "-H", "x-user: ann", "http://a.example/"]),
        0,
        &[
            "limit 2 in 86400 s, 2 at once, for header.x-user=ann; 429 above it",
            "responds 200: direct response",
        ],
    );
}

const NODES: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: near, labels: {app: api}}
spec: {nodeName: n1, containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far, labels: {app: api}}
spec: {nodeName: n2, containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client, labels: {app: client}}
spec: {nodeName: ON, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Service
metadata: {name: api}
spec: {selector: {app: api}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: api}
spec:
  host: api
  trafficPolicy:
    outlierDetection: {consecutive5xxErrors: 5}
    loadBalancer: {localityLbSetting: {failoverPriority: [kubernetes.io/hostname]}}
";

#[test]
fn endpoints_of_the_clients_node_come_first() {
    let on = |node: &str| {
        let text = NODES.replace("ON", node);
        explain_text(&text, &["--from", "client", "http://api/"])
    };
    let unused = "mutual TLS of the mesh; priority 1 is not used";
    check(on("n1"), 0, &["endpoints 1 of 2", unused, "SERVED: the program of default/near receives it"]);
    check(on("n2"), 0, &["endpoints 1 of 2", unused, "SERVED: the program of default/far receives it"]);
    check(on("n3"), 0, &["endpoints 2 of 2"]);
}
