//! The airline example: its traffic does what its YAML specifies.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::path::Path;

use serde_json::Value;
use skysail_testkit::{Mesh, Setup, eventually};

const COUNT: &str = "http://flight:9080/flight/config/countFlightSegments";

fn airline() -> Setup {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/airline");
    Setup::of_folder(env!("CARGO_BIN_EXE_skysail"), &example)
}

#[test]
fn the_traffic_follows_the_yaml() {
    let mesh = airline().ready();
    canary_receives_its_weight(&mesh);
    a_header_selects_v2(&mesh);
    slow_responses_time_out(&mesh);
    only_allowed_callers_reach_customer(&mesh);
    travellers_get_responses(&mesh);
    // One response was late on purpose. Among few others, that makes its edge unhealthy, and no other.
    let ended = mesh.interrupt();
    let unhealthy = ended.stdout.lines().filter(|line| line.contains(" % success, ")).collect::<Vec<_>>();
    assert!(unhealthy.iter().all(|line| line.starts_with("airline/traffic -> airline/flight-")), "{ended:?}");
    assert_eq!(ended.status.code(), Some(i32::from(!unhealthy.is_empty())), "{ended:?}");
}

/// Timeout of the routes to flights (`timeout: 2s`).
const LIMIT_MS: f64 = 2000.0;

/// 90 to 10, within 2 points.
fn canary_receives_its_weight(mesh: &Mesh) {
    mesh.wait_status("booking", COUNT, &[], 200);
    mesh.wait_status("booking", COUNT, &["-H", "x-canary: always"], 200);
    let load = mesh.load("booking", &[COUNT, "-n", "5000", "-c", "8", "--count", "x-flight-version"]);
    let report = load.finish();
    let good = report.assert_all_good_or_late(LIMIT_MS);
    assert_eq!(report.count("v1") + report.count("v2"), good, "{report:?}");
    assert!((400..=600).contains(&report.count("v2")), "{report:?}");
}

fn a_header_selects_v2(mesh: &Mesh) {
    let canary = ["-H", "x-canary: always", "-n", "200", "--count", "x-flight-version"];
    let report = mesh.load("booking", &[&[COUNT][..], &canary].concat()).finish();
    let good = report.assert_all_good_or_late(LIMIT_MS);
    assert_eq!(report.count("v2"), good, "{report:?}");
}

fn slow_responses_time_out(mesh: &Mesh) {
    let login = mesh.call(
        "traffic",
        "http://auth:9080/auth/login",
        &["-d", "login=uid0@email.com&password=password", "-H", FORM, "-X", "POST"],
    );
    assert_eq!(login.status, Some(200), "{login:?}");
    let token = login.json()["token"].as_str().unwrap_or_default().to_owned();
    let authorization = format!("authorization: Bearer {token}");
    let trip = "fromAirport=FRA&toAirport=JFK&fromDate=2026-12-01&oneWay=true";
    let ask = |delay: u32| {
        let url = format!("http://flight:9080/flight/queryflights?delay={delay}");
        mesh.call("traffic", &url, &["-X", "POST", "-H", FORM, "-H", &authorization, "-d", trip])
    };
    assert_eq!(ask(100).status, Some(200));
    let late = ask(4000);
    assert_eq!(late.status, Some(504), "{late:?}");
}

const FORM: &str = "content-type: application/x-www-form-urlencoded";

fn only_allowed_callers_reach_customer(mesh: &Mesh) {
    let (url, form) = ("http://customer:9080/customer/internal/validateid", ["-X", "POST", "-H", FORM, "-d"]);
    let ask =
        |from: &str| mesh.call(from, url, &[&form[..], &["login=uid0@email.com&password=password"]].concat());
    let denied = ask("flight-v1");
    assert_eq!(denied.status, Some(403), "{denied:?}");
    assert_eq!(denied.body, "RBAC: access denied");
    assert_eq!(ask("auth").status, Some(200));

    let metrics = mesh.call("flight-v1", "http://127.0.0.1:15090/stats/prometheus", &[]).body;
    let counted = metrics.lines().find(|line| {
        line.starts_with("istio_requests_total")
            && line.contains("response_code=\"403\"")
            && line.contains("destination_service=\"customer.airline.svc.cluster.local\"")
    });
    assert!(counted.is_some_and(|line| line.ends_with(" 1")), "{counted:?} in\n{metrics}");
}

fn travellers_get_responses(mesh: &Mesh) {
    eventually("calls were answered as expected", || {
        let stats = mesh.call("traffic", "http://127.0.0.1:9080/stats", &[]).json();
        let calls = stats["calls"].as_object().unwrap();
        let expected = |call: &Value| call["as_expected"].as_u64() > Some(0);
        if calls.len() >= 6 && calls.values().all(expected) { Ok(()) } else { Err(stats.to_string()) }
    });
}

/// The page of `main` and the calls of its script pass the gateway. Paths for services only are refused.
#[test]
fn the_page_and_its_calls_pass_the_gateway() {
    let ingress = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/airline-ingress");
    let mesh = airline().with(&[ingress.to_str().unwrap(), "--name", "airline-ingress"]).ready();
    let url = |path: &str| format!("http://ingress:8080{path}");
    mesh.wait_status("traffic", &url("/"), &[], 200);
    let page = mesh.call("traffic", &url("/"), &[]).body;
    assert!(page.contains("<h1>Airline</h1>") && page.contains(r#"const AIRPORTS = ["AMS","#), "{page}");
    let form = ["-X", "POST", "-H", FORM, "-d", "login=uid0@email.com&password=password"];
    let login = mesh.call("traffic", &url("/auth/login"), &form);
    assert_eq!(login.status, Some(200), "{login:?}");
    for path in
        ["/customer/config/countCustomers", "/flight/config/countFlights", "/booking/config/countBookings"]
    {
        assert_eq!(mesh.call("traffic", &url(path), &[]).status, Some(200), "{path}");
    }
    let denied = mesh.call("traffic", &url("/customer/internal/validateid"), &form);
    assert_eq!(denied.status, Some(403), "{denied:?}");
}

/// The result for scripts: one JSON document and the exit code.
#[test]
fn the_result_has_every_edge() {
    let mut mesh = airline().with(&["--name", "airline-json", "--for", "8s", "--output", "json"]).ready();
    // The traffic generator calls these edges at random.
    let denied = mesh.call("flight-v1", "http://customer:9080/customer/internal/validateid", &["-X", "POST"]);
    assert_eq!(denied.status, Some(403), "{denied:?}");
    let ended = mesh.ended();
    assert!(ended.status.success(), "{ended:?}");
    let result: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(result["healthy"], true, "{result}");
    assert_eq!(result["diagnostics"], Value::Array(Vec::new()));
    let edges = result["edges"].as_array().unwrap();
    let pairs = [
        ("auth", "customer"),
        ("booking", "customer"),
        ("booking", "flight-v1"),
        ("traffic", "auth"),
        ("traffic", "booking"),
        ("traffic", "customer"),
        ("traffic", "flight-v1"),
        ("traffic", "flight-v2"),
    ];
    for (from, to) in pairs {
        let named = |edge: &&Value| {
            edge["source"] == format!("airline/{from}") && edge["destination"] == format!("airline/{to}")
        };
        assert!(edges.iter().any(|edge| named(&edge)), "no edge from {from} to {to}: {edges:#?}");
    }
    for edge in edges {
        assert_eq!(edge["mtls"], true, "{edge}");
        assert_eq!(edge["failed"], 0, "{edge}");
        let known = pairs.iter().any(|(_, to)| edge["destination"] == format!("airline/{to}"));
        assert!(known || edge["destination"] == "airline/flight-v2", "{edge}");
    }
    let denied: u64 = edges.iter().filter_map(|edge| edge["denied"].as_u64()).sum();
    assert!(denied > 0, "{edges:#?}");
}
