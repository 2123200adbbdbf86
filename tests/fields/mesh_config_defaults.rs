//! MeshConfig: connection pools and outlier detection of the clusters whose DestinationRule has none.

use serde_json::Value;
use skysail_testkit::{Mesh, eventually};

use crate::{
    CLIENTS, check, get, mesh_with,
    pools_connections::{ONE_PORT, services},
    wait, wait_logged,
};

const RULES: &str = include_str!("mesh_config_defaults.yaml");
/// The policy of the mesh and of the DestinationRule of `ruled`.
const POLICY: &str = "connectionPool: {\
    tcp: {maxConnections: 91, connectTimeout: 200ms, tcpKeepalive: {probes: 9, time: 78s, interval: 12s}, \
    maxConnectionDuration: 3000s, idleTimeout: 2000s}, \
    http: {http1MaxPendingRequests: 92, http2MaxRequests: 93, maxRequestsPerConnection: 1, maxRetries: 94, \
    idleTimeout: 1000s, h2UpgradePolicy: UPGRADE, useClientProtocol: false, maxConcurrentStreams: 95, \
    http2KeepAlive: {interval: 60s, timeout: 20s}}}, \
    outlierDetection: {splitExternalLocalOriginErrors: true, consecutiveLocalOriginFailures: 96, \
    consecutiveGatewayErrors: 97, consecutive5xxErrors: 3, interval: 98s, baseEjectionTime: 600s, \
    maxEjectionPercent: 100, minHealthPercent: 50, outlierDetectionHttpErrorCodes: [500]}";

fn rules(policy: &str) -> String {
    let services = services("server", &["plain", "ruled", "own", "failing", "sound"], ONE_PORT);
    RULES.replace("{POLICY}", &format!("{{{policy}}}")) + &services
}

#[test]
fn clusters_have_the_settings_of_the_mesh() {
    let mesh = mesh_with(&rules(POLICY), &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        for host in ["plain", "ruled", "own", "failing", "sound"] {
            wait(&mesh, client, &get(&format!("http://{host}/"), 200, &["\"pod\""]));
        }
        settings(&mesh, client);
        // The default is 10 s.
        let late = crate::with(&["-m", "9"], "http://silent.example.com/", 503, &["connection timeout"]);
        wait(&mesh, client, &late);
        for (host, protocol) in [("plain", "HTTP/2"), ("own", "HTTP/1.1")] {
            let path = format!("/{host}/{client}");
            check(&mesh, &[client], &[get(&format!("http://{host}{path}"), 200, &[])]);
            wait_logged(&mesh, &["server", "-c", "proxy"], &[&format!("{path} {protocol}\"")]);
        }
    }
    let strict = POLICY.replace("minHealthPercent: 50", "minHealthPercent: 0");
    mesh.put("rules.yaml", &rules(&strict.replace("http2MaxRequests: 93", "http2MaxRequests: 1")));
    for client in CLIENTS {
        limits(&mesh, client);
        ejections(&mesh, client);
    }
}

/// Returns a cluster of a client's proxy.
fn cluster(mesh: &Mesh, client: &str, name: &str) -> Value {
    fn find(value: &Value, name: &str) -> Option<Value> {
        let is_it = value["name"] == name && !value["connect_timeout"].is_null();
        let mut below: Box<dyn Iterator<Item = &Value>> = match value {
            Value::Array(items) => Box::new(items.iter()),
            Value::Object(fields) => Box::new(fields.values()),
            _ => Box::new(std::iter::empty()),
        };
        if is_it { Some(value.clone()) } else { below.find_map(|value| find(value, name)) }
    }
    let dump = mesh.call(client, "http://127.0.0.1:15000/config_dump", &[]).body;
    let parsed = serde_json::from_str(&dump).unwrap_or_else(|error| panic!("{error}: {dump}"));
    find(&parsed, name).unwrap_or_else(|| panic!("{client} has no {name}: {dump}"))
}

/// A cluster without a rule has the settings of one whose rule has the same.
fn settings(mesh: &Mesh, client: &str) {
    let [plain, ruled, own] = ["plain", "ruled", "own"]
        .map(|host| cluster(mesh, client, &format!("outbound|80||{host}.shop.svc.cluster.local")));
    for field in [
        "connect_timeout",
        "circuit_breakers",
        "upstream_connection_options",
        "typed_extension_protocol_options",
        "outlier_detection",
        "common_lb_config",
    ] {
        assert!(!plain[field].is_null(), "{client} {field}: {plain}");
        assert_eq!(plain[field], ruled[field], "{client} {field}");
    }
    // A rule replaces the whole pool, and keeps the outlier detection.
    assert_eq!(own["outlier_detection"], ruled["outlier_detection"], "{client}");
    let limits = |cluster: &Value| cluster["circuit_breakers"]["thresholds"][0].clone();
    assert_eq!(limits(&own)["max_retries"], 7, "{client}: {own}");
    assert_ne!(limits(&own)["max_connections"], 91, "{client}: {own}");
    let unknown = cluster(mesh, client, "PassthroughCluster");
    assert_eq!(limits(&unknown)["max_connections"], 91, "{client}: {unknown}");
    assert!(unknown["outlier_detection"].is_null(), "{client}: {unknown}");
}

fn limits(mesh: &Mesh, client: &str) {
    // The proxy of the client refuses requests to one host, that of the server those to the other.
    for (host, details) in [("plain", "{overflow}"), ("own", " via_upstream ")] {
        eventually(&format!("requests of {client} to {host} are limited"), || {
            let path = format!("/limited/{host}/{client}?delay=300ms");
            let url = format!("http://{host}{path}");
            let report = mesh.load(client, &[&url, "-n", "16", "-c", "8"]).finish();
            match report.status.get(&503) {
                Some(1..16) => wait_logged(mesh, &[client, "-c", "proxy"], &[&path, " 503 ", details]),
                _ => return Err(format!("{report:?}")),
            }
            Ok(())
        });
    }
}

fn ejections(mesh: &Mesh, client: &str) {
    for _ in 0..6 {
        check(mesh, &[client], &[get("http://sound/?status=500", 500, &["\"pod\""])]);
    }
    eventually(&format!("the endpoint of failing is ejected for {client}"), || {
        mesh.call(client, "http://failing/?status=500", &[]);
        crate::ask(mesh, client, &get("http://failing/?status=500", 503, &["no healthy upstream"]))
    });
    check(mesh, &[client], &[get("http://sound/", 200, &["\"pod\""])]);
}
