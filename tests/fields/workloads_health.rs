//! WorkloadGroup: probes that the sidecars of machines run.

use std::fs;

use skysail_testkit::{Mesh, eventually};

use crate::{get, log, mesh_with, wait};

/// Machines for Istio's agents. Here they have sidecars.
const MACHINES: &str = include_str!("../agent/machines.yaml");
const ACCOUNT: &str = "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: front, namespace: shop}\n";
const NAMES: [&str; 5] = ["by-http", "by-tcp", "by-grpc", "by-command", "sick"];

fn wait_for(mesh: &Mesh, machine: &str, status: u16, text: &str) {
    for client in ["client", "by-envoy"] {
        wait(mesh, client, &get(&format!("http://{machine}/"), status, &[text]));
    }
}

#[test]
fn machines_have_endpoints_while_their_probes_succeed() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("healthy");
    let mut machines = MACHINES.replace("MARK", mark.to_str().unwrap());
    for name in NAMES {
        let config = format!("\"proxyMetadata: {{ISTIO_META_AUTO_REGISTER_GROUP: {name}}}\"");
        let without = format!("labels: {{app: {name}, sidecar.istio.io/inject: 'false'}}");
        let with = format!("labels: {{app: {name}}}, annotations: {{proxy.istio.io/config: {config}}}");
        machines = machines.replace(&without, &with);
    }
    let mesh = mesh_with(&[ACCOUNT, &machines].join("---\n"), &["shop/by-envoy"]).ready();
    for machine in &NAMES[..3] {
        wait_for(&mesh, machine, 200, "\"name\":\"by-");
    }
    let requests = |machine: &str, texts: &[&str]| {
        let log = log(&mesh, &[machine]);
        log.lines().filter(|line| texts.iter().all(|text| line.contains(text))).count()
    };
    assert!(requests("by-http", &["path=/ready", "host=own.example", "own-probe"]) > 0);
    // Its probes fail, so it has no endpoint although its sidecar is connected.
    eventually("the probes of sick fail", || match requests("sick", &["path=/status/500"]) {
        count @ 0..3 => Err(format!("{count} requests")),
        _ => Ok(()),
    });
    for machine in ["sick", "by-command"] {
        wait_for(&mesh, machine, 503, "no healthy upstream");
    }
    for _ in 0..2 {
        fs::write(&mark, "").unwrap();
        wait_for(&mesh, "by-command", 200, "\"name\":\"by-command-");
        fs::remove_file(&mark).unwrap();
        wait_for(&mesh, "by-command", 503, "no healthy upstream");
    }
}
