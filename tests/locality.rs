//! Endpoints that clients prefer by locality or node, or select by it, and endpoints that are ejected for statuses of a
//! DestinationRule.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{collections::BTreeSet, fs};

use skysail_testkit::{Mesh, Setup, eventually};

/// Pods of a mesh on one machine that name no node are on the node `skysail`. The addresses of the endpoints are not known before the
/// pods run.
const MESH: &str = r#"
apiVersion: v1
kind: Node
metadata:
  name: skysail
  labels: {topology.kubernetes.io/region: north, topology.kubernetes.io/zone: a}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata:
  name: api
  annotations: {networking.istio.io/traffic-distribution: PreferClose}
spec:
  hosts: [api.example.com]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}]
  endpoints:
  - {address: 192.0.2.1, locality: north/a}
  - {address: 192.0.2.2, locality: north/b}
---
apiVersion: v1
kind: Pod
metadata: {name: here, labels: {app: here, set: near}}
spec: {containers: [{name: c, image: registry.example/api, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: there, labels: {app: there}}
spec: {containers: [{name: c, image: registry.example/api, ports: [{containerPort: 8080}]}]}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: machine}
spec: {address: 192.0.2.3, locality: north/b, labels: {set: near}}
---
apiVersion: v1
kind: Service
metadata: {name: near}
spec: {selector: {set: near}, trafficDistribution: PreferClose, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: front, labels: {app: front}}
spec: {containers: [{name: c, image: registry.example/front}]}
"#;

const RULE: &str = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: api}
spec:
  host: api.example.com
  trafficPolicy:
    outlierDetection: {consecutive5xxErrors: 2, outlierDetectionHttpErrorCodes: [418], baseEjectionTime: 600s, maxEjectionPercent: 100}
";

/// Routes to subsets by the labels that endpoints have in addition to those of their pods.
const SUBSETS: &str = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: near}
spec:
  host: near
  subsets:
  - {name: there, labels: {topology.kubernetes.io/zone: b}}
  - {name: node, labels: {kubernetes.io/hostname: skysail, topology.istio.io/cluster: Kubernetes}}
  - {name: elsewhere, labels: {topology.istio.io/cluster: other}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: near}
spec:
  hosts: [near]
  http:
  - {match: [{uri: {prefix: /there}}], route: [{destination: {host: near, subset: there}}]}
  - {match: [{uri: {prefix: /node}}], route: [{destination: {host: near, subset: node}}]}
  - {match: [{uri: {prefix: /elsewhere}}], route: [{destination: {host: near, subset: elsewhere}}]}
  - {route: [{destination: {host: near}}]}
";

/// Pods and clients on two nodes.
const NODES: &str = r"
apiVersion: v1
kind: Service
metadata: {name: api}
spec: {selector: {app: api}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: one, labels: {app: api, tier: a}}
spec: {nodeName: n1, containers: [{name: c, image: registry.example/api, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: two, labels: {app: api, tier: a}}
spec: {nodeName: n2, containers: [{name: c, image: registry.example/api, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: two-b, labels: {app: api, tier: b}}
spec: {nodeName: n2, containers: [{name: c, image: registry.example/api, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client-1, labels: {app: client-1, tier: b}}
spec: {nodeName: n1, containers: [{name: c, image: registry.example/client}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client-2, labels: {app: client-2, tier: a}}
spec: {nodeName: n2, containers: [{name: c, image: registry.example/client}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client-3, labels: {app: client-3}}
spec: {nodeName: n3, containers: [{name: c, image: registry.example/client}]}
";

/// Prefers endpoints by the labels `PRIORITY`.
const NODE_RULE: &str = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: api}
spec:
  host: api
  trafficPolicy:
    outlierDetection: {consecutive5xxErrors: 100}
    loadBalancer: {localityLbSetting: {failoverPriority: [PRIORITY]}}
";

const URL: &str = "http://api.example.com/";

fn address(mesh: &Mesh, name: &str) -> String {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let pod = pods.iter().find(|pod| pod["name"] == name).unwrap();
    pod["address"].as_str().unwrap().to_owned()
}

/// Calls until exactly these pods have answered.
fn wait_answers(mesh: &Mesh, url: &str, expected: &[&str]) {
    wait_answers_to(mesh, "front", url, expected);
}

fn wait_answers_to(mesh: &Mesh, client: &str, url: &str, expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(ToString::to_string).collect();
    eventually(&format!("{expected:?} answer {client} at {url}"), || {
        let calls = (0..20).map(|_| mesh.call(client, url, &[]));
        let name = |answer: skysail_testkit::Answer| match answer.status {
            Some(200) => Ok(answer.json()["pod"]["name"].as_str().unwrap_or_default().to_owned()),
            _ => Err(format!("{answer:?}")),
        };
        let answered = calls.map(name).collect::<Result<BTreeSet<String>, String>>()?;
        if answered == expected { Ok(()) } else { Err(format!("{answered:?}")) }
    });
}

/// The workloads `envoys` have a real Envoy.
fn prefers_near_endpoints(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).with_envoys(envoys).ready();
    mesh.edit("mesh.yaml", "192.0.2.1", &address(&mesh, "here"));
    mesh.edit("mesh.yaml", "192.0.2.2", &address(&mesh, "there"));
    mesh.edit("mesh.yaml", "192.0.2.3", &address(&mesh, "there"));
    wait_answers(&mesh, URL, &["here"]);
    wait_answers(&mesh, "http://near/", &["here"]);
    mesh.edit("mesh.yaml", "trafficDistribution: PreferClose, ", "");
    wait_answers(&mesh, "http://near/", &["here", "there"]);
    mesh.put("subsets.yaml", SUBSETS);
    wait_answers(&mesh, "http://near/there", &["there"]);
    wait_answers(&mesh, "http://near/node", &["here"]);
    mesh.wait_status("front", "http://near/elsewhere", &[], 503);
    mesh.edit("mesh.yaml", "  annotations: {networking.istio.io/traffic-distribution: PreferClose}\n", "");
    wait_answers(&mesh, URL, &["here", "there"]);

    let teapot = format!("{URL}status/418");
    (0..10).for_each(|_| mesh.wait_status("front", &teapot, &[], 418));
    mesh.put("rule.yaml", RULE);
    eventually("both endpoints are ejected", || match mesh.call("front", &teapot, &[]).status {
        Some(503) => Ok(()),
        status => Err(format!("{status:?}")),
    });
    assert_eq!(mesh.call("front", URL, &[]).status, Some(503));

    // A status that is not listed is no error.
    mesh.put("rule.yaml", &RULE.replace("418", "429"));
    mesh.wait_status("front", URL, &[], 200);
    let broken = format!("{URL}status/500");
    (0..10).for_each(|_| mesh.wait_status("front", &broken, &[], 500));
    mesh.wait_status("front", URL, &[], 200);
}

#[test]
fn near_endpoints_are_preferred_and_listed_statuses_eject() {
    prefers_near_endpoints(&[]);
}

#[test]
fn near_endpoints_are_preferred_by_an_envoy() {
    prefers_near_endpoints(&["default/front"]);
}

/// The workloads `envoys` have a real Envoy.
fn prefers_endpoints_of_the_node(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), NODES).with_envoys(envoys).ready();
    let (all, of_2) = (["one", "two", "two-b"], ["two", "two-b"]);
    // Endpoints that answer the clients on the three nodes.
    let answers = |expected: [&[&str]; 3]| {
        for (client, expected) in ["client-1", "client-2", "client-3"].into_iter().zip(expected) {
            wait_answers_to(&mesh, client, "http://api/", expected);
        }
    };
    let rule = |priority: &str| mesh.put("rule.yaml", &NODE_RULE.replace("PRIORITY", priority));
    answers([&all; 3]);
    rule("kubernetes.io/hostname");
    answers([&["one"], &of_2, &all]);
    rule("kubernetes.io/hostname=n1");
    answers([&["one"]; 3]);
    // The client on n1 prefers `two-b`, which has its tier, and the one on n2 the endpoint of its tier on its node.
    rule("topology.istio.io/network, tier, kubernetes.io/hostname");
    answers([&["two-b"], &["two"], &all]);
    rule("kubernetes.io/hostname, tier");
    answers([&["one"], &["two"], &all]);

    // Without an endpoint on the node, the others take over.
    mesh.edit("mesh.yaml", "{name: one, labels: {app: api, tier: a}}", "{name: one, labels: {app: other}}");
    answers([&of_2, &["two"], &of_2]);
    mesh.edit("mesh.yaml", "{name: one, labels: {app: other}}", "{name: one, labels: {app: api, tier: a}}");
    answers([&["one"], &["two"], &all]);

    fs::remove_file(mesh.config().join("rule.yaml")).unwrap();
    answers([&all; 3]);
    mesh.edit(
        "mesh.yaml",
        "{selector: {app: api},",
        "{selector: {app: api}, trafficDistribution: PreferSameNode,",
    );
    answers([&["one"], &of_2, &all]);
}

#[test]
fn endpoints_of_the_clients_node_come_first() {
    prefers_endpoints_of_the_node(&[]);
}

#[test]
fn endpoints_of_the_clients_node_come_first_for_an_envoy() {
    prefers_endpoints_of_the_node(&["default/client-1", "default/client-2", "default/client-3"]);
}
