//! A service graph of isotope, converted and run: each service gets the requests that the graph implies.

#![expect(clippy::panic, reason = "a test fails by panic")]

use std::{fs, process::Command};

use skysail_testkit::{Mesh, Setup};

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");
const GRAPH: &str = "\
defaults:
  requestSize: 1 KB
  responseSize: 10 KB
  numRbacPolicies: 2
services:
- name: front
  isEntrypoint: true
  script:
  - - call: stock
    - call: price
  - sleep: 1ms
  - call: price
- name: stock
- name: price
  namespace: back
  type: grpc
";

/// Returns a counter of a service, which another service reads through both sidecars.
fn counter(mesh: &Mesh, host: &str, name: &str) -> u64 {
    let answer = mesh.call("front", &format!("http://{host}:8080/metrics"), &[]);
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    answer.body.lines().find_map(value).unwrap_or_else(|| panic!("{name}: {answer:?}"))
}

fn requests(mesh: &Mesh) -> [u64; 3] {
    ["front", "stock", "price.back"].map(|host| counter(mesh, host, "service_incoming_requests_total"))
}

#[test]
fn services_get_the_requests_of_their_graph() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("graph.yaml");
    fs::write(&file, GRAPH).unwrap();
    let converted =
        Command::new(SKYSAIL).args(["bench", "graph", "convert", "kubernetes"]).arg(&file).output().unwrap();
    assert!(converted.status.success() && converted.stderr.is_empty(), "{converted:?}");
    let mesh = Setup::of_text(SKYSAIL, &String::from_utf8(converted.stdout).unwrap()).ready();
    mesh.wait_status("stock", "http://front:8080/", &[], 200);
    let sent = "service_outgoing_requests_total{destination_service=\"price.back:8080\"}";
    let (before, sent_before) = (requests(&mesh), counter(&mesh, "front", sent));
    for _ in 0..5 {
        let answer = mesh.call("stock", "http://front:8080/", &[]);
        assert_eq!((answer.status, answer.body.len()), (Some(200), 10 << 10), "{answer:?}");
    }
    let after = requests(&mesh);
    let requests: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    assert_eq!(requests, [5, 5, 10]);
    assert_eq!(counter(&mesh, "front", sent) - sent_before, 10);
}
