//! A real Envoy accepts the control plane's resources, and behaves like the sidecar.
//!
//! Two clients of one identity send the same requests; one has a real Envoy instead of the sidecar. So has one of the
//! two servers. Every outcome must be the same: status, body, and the request as the server reports it.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use skysail_testkit::{Answer, Mesh, Setup, envoy, eventually, script};

/// Requests, and the status that both clients must get.
const REQUESTS: &[(&str, &[&str], u16)] = &[
    ("http://target:8080/", &[], 200),
    ("http://target:8080/?a=b&c", &["-H", "x-kept: yes"], 200),
    ("http://target:8080/", &["-H", "x-to: envoy"], 200),
    ("http://target:8080/", &["-X", "POST", "-d", "a body", "-H", "x-to: envoy"], 200),
    ("http://target.airline.svc.cluster.local:8080/full/name", &[], 200),
    ("http://target:8080/direct", &[], 418),
    ("http://target:8080/old/page", &[], 308),
    ("http://target:8080/", &["-H", "x-abort: yes"], 429),
    ("http://target:8080/api/things?q=1", &["-H", "x-remove: me", "-H", "x-add: 1"], 200),
    ("http://target:8080/api/things", &["-X", "PUT", "-d", "x"], 200),
    ("http://target:8080/42/items", &[], 200),
    ("http://target:8080/x42/items", &[], 200),
    ("http://target:8080/nowhere", &[], 503),
    ("http://target:8080/delay/3s", &[], 504),
    ("http://target:8080/status/500", &[], 500),
    ("http://target:8080/secret/plans", &[], 403),
    ("http://target:8080/secret/plans", &["-H", "x-to: envoy"], 403),
    ("http://target:8080/", &["-X", "DELETE"], 403),
    ("http://target:8080/", &["-X", "DELETE", "-H", "x-to: envoy"], 403),
    ("http://flight:9080/flight/config/countFlightSegments", &[], 200),
    ("http://flight:9080/flight/config/countFlightSegments", &["-H", "x-canary: always"], 200),
    ("http://customer:9080/customer/internal/validateid", &["-X", "POST"], 403),
    ("http://main:9080/no/such/page", &[], 404),
];

#[test]
fn an_envoy_behaves_like_the_sidecar() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let envoy = envoy();
    let instead = |workload: &str| format!("airline/{workload}={}", envoy.display());
    let setup = Setup::of_folder(env!("CARGO_BIN_EXE_skysail"), &folder.join("examples/airline"));
    setup.add(&folder.join("tests/envoy/probes.yaml"));
    let arguments = ["--envoy", &instead("by-envoy"), "--envoy", &instead("target-envoy")];
    let mesh = setup.with(&arguments).ready();
    for client in ["by-envoy", "by-skysail"] {
        mesh.wait_status(client, "http://target:8080/", &[], 200);
        mesh.wait_status(client, "http://target:8080/42/items", &[], 200);
    }

    let mut different = Vec::new();
    for (url, arguments, status) in REQUESTS {
        let ask = |client: &str| outcome(&mesh.call(client, url, arguments));
        let (theirs, ours) = (ask("by-envoy"), ask("by-skysail"));
        if theirs != ours || theirs.0 != Some(*status) {
            different.push(format!("{url} {arguments:?}\n  Envoy:   {theirs:?}\n  Skysail: {ours:?}"));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
    canary_is_met_by_both(&mesh);
    no_resource_is_rejected(&mesh);
}

/// Pods with an Envoy end like those with the sidecar: when no client calls them any more, and after the last response.
#[test]
fn envoys_are_added_and_removed_without_a_lost_request() {
    let instead = format!("shop/stock-v1={}", envoy().display());
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml"));
    let mesh = setup.with(&["--envoy", &instead]).ready();
    let slow = "http://stock.shop/delay/200ms";
    mesh.wait_status("front", slow, &[], 200);
    let load = mesh.load("front", &[slow, "-c", "32", "--rate", "100"]);
    load.wait_more(20);
    let scale = |from: usize, to: usize| {
        let before = mesh.names("stock-v1");
        let line = |count| format!("replicas: {count} # stock-v1");
        mesh.edit("mesh.yaml", &line(from), &line(to));
        eventually("the pods are there", || match mesh.pods("stock-v1") {
            counts if counts == (to, to) => Ok(()),
            counts => Err(format!("{counts:?}")),
        });
        load.wait_more(50);
        mesh.wait_gone("shop", "stock-v1", &before);
    };
    scale(1, 3);
    scale(3, 1);
    let before = mesh.names("stock-v1");
    mesh.edit("mesh.yaml", "image: registry.example/shop/stock,", "image: registry.example/shop/stock:2,");
    eventually("the pod is another one", || match mesh.names("stock-v1") {
        now if now.len() == 1 && now != before => Ok(()),
        now => Err(format!("{now:?}")),
    });
    mesh.wait_gone("shop", "stock-v1", &before);
    load.wait_more(50);
    load.finish().assert_all_good();
    assert!(!mesh.output().contains("requests to it may have failed"), "{}", mesh.output());
}

/// Routes turn to a cluster that is added with them, and back when it is removed. An Envoy has the endpoints of the
/// cluster before the route, and the route away from it before the removal.
#[test]
fn an_envoy_loses_no_request_while_clusters_come_and_go() {
    let instead = format!("shop/front={}", envoy().display());
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml"));
    let mesh = setup.with(&["--envoy", &instead]).ready();
    let stock = "http://stock.shop/";
    mesh.wait_status("front", stock, &[], 200);
    let load = mesh.load("front", &[stock, "-c", "4", "--rate", "400", "--count", "x-version"]);
    load.wait_more(50);
    let subset = "    - {name: v2, labels: {version: v2}}\n";
    let without = std::fs::read_to_string(mesh.config().join("mesh.yaml")).unwrap();
    for turn in 0..10 {
        let name = format!("turn-{turn}");
        let with = without
            .replace(subset, &format!("{subset}    - {{name: {name}, labels: {{version: v1}}}}\n"))
            .replace("subset: v1}\n          weight", &format!("subset: {name}}}\n          weight"))
            .replace("x-version: v1", &format!("x-version: {name}"));
        mesh.put("mesh.yaml", &with);
        load.wait("the new cluster answers", |now| now.count(&name) >= 20);
        let before = load.report().count("v1");
        mesh.put("mesh.yaml", &without);
        load.wait("the old cluster answers", |now| now.count("v1") >= before + 20);
    }
    load.finish().assert_all_good();
    no_update_is_rejected(&mesh, "front");
}

/// State-of-the-world discovery, in which responses are complete: an Envoy accepts all of it, and changes, and loses no
/// request.
#[test]
fn an_envoy_takes_the_state_of_the_world() {
    let folder = tempfile::tempdir().unwrap();
    let program = asking_for_the_state_of_the_world(folder.path());
    let instead = ["front", "stock-v1"].map(|workload| format!("shop/{workload}={}", program.display()));
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml"));
    let mesh = setup.with(&["--envoy", &instead[0], "--envoy", &instead[1]]).ready();
    let stock = "http://stock.shop/";
    mesh.wait_status("front", stock, &[], 200);
    mesh.wait_status("front", stock, &["-H", "x-want: v2"], 200);
    let load = mesh.load("front", &[stock, "-c", "4", "--rate", "200", "--count", "x-version"]);
    load.wait_more(50);

    // A route; then one to a new cluster, away from a removed one; then endpoints.
    let turned = |from: &str, to: &str, version: &str| {
        mesh.edit("mesh.yaml", from, to);
        let before = load.report().count(version);
        load.wait(&format!("{version} answers"), |now| now.count(version) >= before + 50);
    };
    let weights = |v1: u32, v2: u32| {
        let of = |version: &str, weight: u32| {
            format!(
                "subset: {version}}}\n          weight: {weight}\n          headers: {{response: {{set: {{x-version: {version}}}}}}}\n"
            )
        };
        format!("{}        - destination: {{host: stock, {}", of("v1", v1), of("v2", v2))
    };
    turned(&weights(100, 0), &weights(0, 100), "v2");
    let subset = "    - {name: v2, labels: {version: v2}}\n";
    let more = format!("{subset}    - {{name: new, labels: {{version: v1}}}}\n");
    let text = std::fs::read_to_string(mesh.config().join("mesh.yaml")).unwrap();
    let text = text
        .replace(subset, &more)
        .replace("subset: v2}\n          weight", "subset: new}\n          weight");
    let text = text.replace("x-version: v2", "x-version: new");
    mesh.put("mesh.yaml", &text);
    load.wait("the new cluster answers", |now| now.count("new") >= 50);
    let back =
        weights(0, 100).replace("subset: v2", "subset: new").replace("x-version: v2", "x-version: new");
    let text = text.replace(&back, &weights(100, 0)).replace(&more, subset);
    mesh.put("mesh.yaml", &text);
    let before = load.report().count("v1");
    load.wait("the old cluster answers", |now| now.count("v1") >= before + 50);
    mesh.edit("mesh.yaml", "replicas: 1 # stock-v1", "replicas: 2 # stock-v1");
    eventually("both pods answer", || {
        let pod = || mesh.call("front", stock, &[]).json()["pod"]["name"].clone();
        let first = pod();
        if (0..10).any(|_| pod() != first) { Ok(()) } else { Err(format!("only {first}")) }
    });
    load.finish().assert_all_good();
    all_is_taken(&mesh, &["front", "stock-v1"]);
}

/// Returns an Envoy that is started as usual, but with state-of-the-world discovery in its bootstrap.
fn asking_for_the_state_of_the_world(folder: &Path) -> PathBuf {
    let text = format!(
        "#!/bin/sh\n[ \"$1\" = --config-path ] && sed -i 's/DELTA_GRPC/GRPC/' \"$2\"\nexec '{}' \"$@\"\n",
        envoy().display()
    );
    let program = folder.join("envoy");
    script(&program, &text);
    program
}

/// Checks that the Envoy of a workload has counted no rejected update.
fn no_update_is_rejected(mesh: &Mesh, workload: &str) {
    let stats = mesh.call(workload, "http://127.0.0.1:15000/stats?filter=update_rejected", &[]).body;
    let refused = |line: &&str| !line.ends_with(": 0");
    assert!(
        stats.contains("update_rejected") && !stats.lines().any(|line| refused(&line)),
        "{workload}: {stats}"
    );
}

/// Checks that neither the control plane nor the Envoys of these workloads have counted a rejected update.
fn all_is_taken(mesh: &Mesh, workloads: &[&str]) {
    for workload in workloads {
        let stats = mesh.call(workload, "http://127.0.0.1:15000/stats?filter=update_success", &[]).body;
        for kind in ["cluster_manager.cds", "listener_manager.lds", ".rds.80"] {
            let of_kind = |line: &&str| line.contains(&format!("{kind}.update_success: "));
            let taken = stats.lines().find(of_kind).and_then(|line| line.rsplit(' ').next());
            assert!(taken.is_some_and(|count| count != "0"), "{kind} of {workload}: {stats}");
        }
        no_update_is_rejected(mesh, workload);
    }
    eventually("all is synced", || {
        let proxies: Value = mesh.call("control", "http://10.244.0.1:15014/debug/syncz", &[]).json();
        let forms = |proxy: &Value| (proxy["form"] == "sotw").then_some(());
        let proxies = proxies.as_array().unwrap();
        assert_eq!(proxies.iter().filter_map(forms).count(), workloads.len() + 1, "{proxies:?}");
        for proxy in proxies {
            for (kind, status) in proxy["types"].as_object().unwrap() {
                assert_eq!(status["nacked"], 0, "{kind} at {proxy}");
                if status["synced"] != true {
                    return Err(format!("{kind} at {proxy}"));
                }
            }
        }
        Ok(())
    });
}

/// Returns the response, without the fields that differ between requests.
fn outcome(answer: &Answer) -> (Option<u16>, Value) {
    let mut body = serde_json::from_str(&answer.body).unwrap_or_else(|_| Value::from(answer.body.as_str()));
    if let Some(headers) = body.get_mut("headers").and_then(Value::as_object_mut) {
        // New for each request.
        headers.remove("x-request-id");
        // Contains the hash of the client's certificate.
        headers.remove("x-forwarded-client-cert");
        // A sidecar removes these; a public Envoy, which lacks Istio's filter, passes them on.
        headers.remove("x-envoy-peer-metadata");
        headers.remove("x-envoy-peer-metadata-id");
    }
    (answer.status, body)
}

/// Both clients meet the weights: 90 to 10, within 3 points.
fn canary_is_met_by_both(mesh: &Mesh) {
    let url = "http://flight:9080/flight/config/countFlightSegments";
    for client in ["by-envoy", "by-skysail"] {
        let report =
            mesh.load(client, &[url, "-n", "2000", "-c", "4", "--count", "x-flight-version"]).finish();
        report.assert_all_good_or_late(2_000.0);
        assert!((140..=260).contains(&report.count("v2")), "{client}: {report:?}");
    }
}

/// The control plane knows all eleven proxies, and none has rejected a resource. All of them subscribe to virtual hosts
/// one by one.
fn no_resource_is_rejected(mesh: &Mesh) {
    let proxies: Value = mesh.call("control", "http://10.244.0.1:15014/debug/syncz", &[]).json();
    let proxies = proxies.as_array().unwrap();
    assert_eq!(proxies.len(), 11, "{proxies:?}");
    for proxy in proxies {
        assert!(proxy["types"]["vhds"]["acked"].as_u64() > Some(0), "{proxy}");
        for (kind, status) in proxy["types"].as_object().unwrap() {
            assert_eq!(status["nacked"], 0, "{kind} at {proxy}");
        }
    }
}
