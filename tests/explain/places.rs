//! The places that a request reaches: many workloads, gateways that route to themselves, and gateways on the
//! path of a part of the requests.

use std::fmt::Write as _;

use serde_json::Value;

use super::{check, explain_text};

const FRONT: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: front, labels: {app: front}}
spec: {containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: bare, labels: {app: bare, sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: i}]}
";

/// Returns a pod with a Service of its name.
fn program(name: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{app: {name}}}}}\n\
         spec: {{containers: [{{name: c, image: i, ports: [{{containerPort: 8080}}]}}]}}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{selector: {{app: {name}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}\n"
    )
}

/// Returns a gateway with a Gateway for all hosts, and a VirtualService with these destinations in equal
/// parts.
fn gateway(name: &str, destinations: &[&str]) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\n\
         metadata: {{name: {name}, labels: {{istio: {name}}}, \
         annotations: {{inject.istio.io/templates: gateway}}}}\n\
         spec: {{containers: [{{name: istio-proxy, image: auto}}]}}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{selector: {{istio: {name}}}, ports: [{{name: http, port: 80}}]}}\n\
         ---\napiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: {name}}}\n\
         spec: {{selector: {{istio: {name}}}, \
         servers: [{{port: {{number: 80, name: http, protocol: HTTP}}, hosts: ['*']}}]}}\n{}",
        routes(name, "'*'", name, destinations)
    )
}

/// Returns a VirtualService of a gateway (or `mesh`) with these destinations in equal parts.
fn routes(name: &str, host: &str, gateway: &str, destinations: &[&str]) -> String {
    let weight = 100 / destinations.len();
    let all: Vec<String> =
        destinations.iter().map(|to| format!("{{destination: {{host: {to}}}, weight: {weight}}}")).collect();
    format!(
        "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: {name}}}\n\
         spec: {{hosts: [{host}], gateways: [{gateway}], http: [{{route: [{}]}}]}}\n",
        all.join(", ")
    )
}

/// Returns a policy that denies all requests to a workload.
fn deny(app: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: {app}}}\n\
         spec: {{selector: {{matchLabels: {{app: {app}}}}}, action: DENY, rules: [{{}}]}}\n"
    )
}

/// Returns the Service `web` with this number of workloads, of which the last denies all requests.
fn workloads(number: usize) -> String {
    let mut text = FRONT.to_owned();
    for index in 0..number {
        write!(
            text,
            "---\napiVersion: v1\nkind: Pod\n\
             metadata: {{name: web-{index:03}, labels: {{set: web, app: web-{index:03}}}}}\n\
             spec: {{containers: [{{name: c, image: i, ports: [{{containerPort: 8080}}]}}]}}\n"
        )
        .unwrap();
    }
    text + "---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\n\
            spec: {selector: {set: web}, ports: [{name: http, port: 80, targetPort: 8080}]}\n"
        + &deny(&format!("web-{:03}", number - 1))
}

/// Explains a request with JSON output.
fn json(text: &str, arguments: &[&str]) -> Value {
    let (_, report) = explain_text(text, &[arguments, &["--output", "json"]].concat());
    serde_json::from_str(&report).unwrap()
}

#[test]
fn all_workloads_of_a_service_are_followed() {
    let text = workloads(10);
    let reason = "the proxy of default/web-009 responds with 403: it matches a DENY rule of \
                  AuthorizationPolicy default/web-009";
    for client in ["front", "bare"] {
        check(
            explain_text(&text, &["--from", client, "http://web/"]),
            1,
            &[
                "INBOUND at the sidecar of default/web-000, 10 % of the requests",
                "INBOUND at the sidecar of default/web-009, 10 % of the requests",
                "1 more place, 10 % of the requests, 1 of them served",
                &format!("REFUSED: refused for 10 % of the requests: {reason}"),
            ],
        );
        let report = json(&text, &["--from", client, "http://web/"]);
        assert_eq!(report["destinations"].as_array().map(Vec::len), Some(10), "{client}");
        assert_eq!((&report["state"], &report["status"]), (&"refused".into(), &Value::Null));
    }
}

#[test]
fn places_beyond_the_limit_are_not_served() {
    let text = workloads(210);
    check(
        explain_text(&text, &["--from", "front", "http://web/"]),
        1,
        &[
            "NOTE the report has at most 200 places: 10 more are not explained",
            "DESTINATION, 4.8 % of the requests",
            "result not explained: 10 places beyond the limit of 200 places",
            "192 more places, 91.4 % of the requests, 192 of them served",
            "NOT EXPLAINED: 4.8 % of the requests are not explained",
        ],
    );
    let report = json(&text, &["--from", "front", "http://web/"]);
    assert_eq!((&report["served"], &report["state"]), (&false.into(), &"unknown".into()));
}

#[test]
fn gateways_that_route_to_themselves_are_explained_once() {
    let names: Vec<String> = (0..8).map(|index| format!("edge-{index}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut text = FRONT.to_owned() + &gateway("edge", &names);
    for name in &names {
        write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
             spec: {{selector: {{istio: edge}}, ports: [{{name: http, port: 80}}]}}\n"
        )
        .unwrap();
    }
    let (code, report) = explain_text(&text, &["--from", "outside", "http://a.example/"]);
    assert_eq!(report.matches("GATEWAY default/edge").count(), 1, "{report}");
    let end = "the request returns to the gateway default/edge, on the same route";
    check(
        (code, report),
        1,
        &[
            "WORKLOAD default/edge, 12.5 % of the requests",
            end,
            &format!("REFUSED: refused for 100 % of the requests: {end}"),
        ],
    );
    let pair = FRONT.to_owned() + &gateway("one", &["two"]) + &gateway("two", &["one"]);
    check(
        explain_text(&pair, &["--from", "outside", "--gateway", "one", "http://a.example/"]),
        1,
        &["GATEWAY default/one", "GATEWAY default/two", "returns to the gateway default/one"],
    );
}

#[test]
fn a_path_with_too_many_gateways_is_not_explained() {
    let chain: String =
        (0..7).map(|index| gateway(&format!("g{index}"), &[&format!("g{}", index + 1)])).collect();
    let text = FRONT.to_owned() + &program("g7") + &chain;
    let of =
        |first: &str| explain_text(&text, &["--from", "outside", "--gateway", first, "http://a.example/"]);
    check(of("g1"), 0, &["GATEWAY default/g6", "INBOUND at the sidecar of default/g7", "SERVED"]);
    let limit = "NOT EXPLAINED: the request passes more than 6 gateways";
    check(of("g0"), 1, &["GATEWAY default/g5", "WORKLOAD default/g6", limit]);
}

/// A gateway may send a request to itself with another host, which has another route.
#[test]
fn a_gateway_that_changes_the_host_is_passed_twice() {
    let text = FRONT.to_owned()
        + &program("web")
        + &gateway("edge", &["edge"]).replace("http: [{", "http: [{rewrite: {authority: inner.example}, ")
        + &routes("inner", "inner.example", "edge", &["web"]);
    check(
        explain_text(&text, &["--from", "outside", "http://a.example/"]),
        0,
        &["GATEWAY default/edge", "GATEWAY default/edge", "INBOUND at the sidecar of default/web", "SERVED"],
    );
}

#[test]
fn shares_behind_a_gateway_are_those_of_all_requests() {
    let text = FRONT.to_owned()
        + &program("good")
        + &program("bad")
        + &program("web")
        + &gateway("edge", &["good", "bad"])
        + &routes("web", "web", "mesh", &["good", "edge"])
        + &deny("bad");
    let (code, report) = explain_text(&text, &["--from", "front", "http://web/"]);
    assert!(!report.contains("503"), "{report}");
    check(
        (code, report),
        1,
        &[
            "INBOUND at the sidecar of default/good, 50 % of the requests",
            "GATEWAY default/edge, 50 % of the requests",
            "INBOUND at the sidecar of default/good, 25 % of the requests",
            "INBOUND at the sidecar of default/bad, 25 % of the requests",
            "REFUSED: refused for 25 % of the requests: the proxy of default/bad responds with 403",
        ],
    );
    let report = json(&text, &["--from", "front", "http://web/"]);
    let edge = &report["destinations"][1];
    assert_eq!((&edge["share"], &edge["next"][1]["share"]), (&0.5.into(), &0.25.into()), "{edge:#}");
    assert_eq!((&edge["status"], &edge["next"][1]["status"]), (&Value::Null, &403.into()), "{edge:#}");
}
