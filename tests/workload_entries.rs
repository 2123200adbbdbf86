//! WorkloadEntries in a mesh: a ServiceEntry selects a machine and a pod, and callers reach both.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::collections::BTreeSet;

use skysail_testkit::{Mesh, Setup, eventually};

/// The machine is a pod that no selector of the entry matches: only its address names it. Its certificate has another
/// service account than the pod's.
const MESH: &str = r#"
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: api}
spec:
  hosts: [api.example.com]
  location: MESH_INTERNAL
  ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}]
  resolution: STATIC
  workloadSelector: {labels: {app: api}}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: machine}
spec:
  address: 192.0.2.1
  ports: {http: 8081}
  labels: {app: api}
  serviceAccount: machine
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: machine}
---
apiVersion: v1
kind: Pod
metadata: {name: api, labels: {app: api}}
spec: {containers: [{name: c, image: registry.example/api, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: machine, labels: {role: machine}}
spec:
  serviceAccountName: machine
  containers: [{name: c, image: registry.example/machine, ports: [{containerPort: 8081}]}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: front}
spec:
  selector: {matchLabels: {app: front}}
  template:
    metadata: {labels: {app: front}}
    spec: {containers: [{name: front, image: registry.example/front}]}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: strict}
spec: {mtls: {mode: STRICT}}
"#;

/// Returns the address of a pod.
fn address(mesh: &Mesh, name: &str) -> String {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let pod = pods.iter().find(|pod| pod["name"] == name).unwrap();
    pod["address"].as_str().unwrap().to_owned()
}

/// Calls the host until exactly these pods have answered.
fn wait_answers(mesh: &Mesh, expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(ToString::to_string).collect();
    eventually(&format!("{expected:?} answer"), || {
        let mut answered = BTreeSet::new();
        for _ in 0..20 {
            let answer = mesh.call("front", "http://api.example.com/", &[]);
            if answer.status != Some(200) {
                return Err(format!("{answer:?}"));
            }
            let report = answer.json();
            assert!(!report["caller"].is_null(), "mutual TLS: {report:#}");
            answered.insert(report["pod"]["name"].as_str().unwrap_or_default().to_owned());
        }
        if answered == expected { Ok(()) } else { Err(format!("{answered:?}")) }
    });
}

/// The workloads `envoys` have a real Envoy.
fn selects_machines(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).with_envoys(envoys).ready();
    assert!(!mesh.output().contains("WorkloadEntry"), "no warning: {}", mesh.output());
    mesh.edit("mesh.yaml", "192.0.2.1", &address(&mesh, "machine"));
    wait_answers(&mesh, &["api", "machine"]);

    // The machine leaves the service with its label.
    mesh.edit(
        "mesh.yaml",
        "  labels: {app: api}\n  serviceAccount",
        "  labels: {app: gone}\n  serviceAccount",
    );
    wait_answers(&mesh, &["api"]);

    // It returns, with most of the weight.
    mesh.edit(
        "mesh.yaml",
        "  labels: {app: gone}\n  serviceAccount",
        "  labels: {app: api}\n  serviceAccount",
    );
    wait_answers(&mesh, &["api", "machine"]);
    mesh.edit(
        "mesh.yaml",
        "ports: {http: 8081}\n  labels: {app: api}",
        "ports: {http: 8081}\n  weight: 50\n  labels: {app: api}",
    );
    eventually("most requests go to the heavier endpoint", || {
        let calls = (0..20).map(|_| mesh.call("front", "http://api.example.com/", &[]));
        let machine = calls.filter(|answer| answer.json()["pod"]["name"] == "machine").count();
        if machine >= 15 { Ok(()) } else { Err(format!("{machine} of 20")) }
    });
}

#[test]
fn a_service_entry_selects_a_machine_and_a_pod() {
    selects_machines(&[]);
}

#[test]
fn a_service_entry_selects_endpoints_for_an_envoy() {
    selects_machines(&["default/front"]);
}
