//! The control plane looks up names in ServiceEntries and sends their changes to the sidecars.

use skysail_testkit::{Mesh, Setup, eventually};

/// A host outside the mesh, at the DNS name of one version's pods.
const OUTSIDE: &str = "
apiVersion: v1
kind: Service
metadata: {name: there, namespace: shop}
spec:
  clusterIP: None
  selector: {app: stock, version: v1} # there
  ports: [{name: tcp, port: 9090}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: outside, namespace: shop}
spec:
  hosts: [outside.example]
  addresses: [240.0.0.9]
  location: MESH_EXTERNAL
  resolution: DNS
  ports: [{number: 80, name: http, protocol: HTTP, targetPort: 9090}]
  endpoints: [{address: there.shop.svc.cluster.local}]
";

/// Hosts without addresses: one whose status has an address, and one that is allocated an address.
const WITHOUT_ADDRESSES: &str = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: stored, namespace: shop}
spec:
  hosts: [stored.example]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: 9000, name: tcp, protocol: TCP, targetPort: 9090}]
  workloadSelector: {labels: {app: stock}}
status: {addresses: [{host: stored.example, value: 240.240.77.7}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: allocated, namespace: shop}
spec:
  hosts: [allocated.example]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: 9000, name: tcp, protocol: TCP, targetPort: 9090}]
  workloadSelector: {labels: {app: stock}}
";

const URL: &str = "http://240.0.0.9/";

/// Waits until this version answers.
fn wait_version(mesh: &Mesh, version: &str) {
    eventually(&format!("{version} answers"), || {
        let answer = mesh.call("front", URL, &[]);
        let is = answer.status == Some(200) && answer.body.contains(&format!("stock-{version}"));
        if is { Ok(()) } else { Err(format!("{answer:?}")) }
    });
}

/// Changes the DNS name to the pods of another version.
fn move_to(mesh: &Mesh, from: &str, to: &str) {
    let selector = |version: &str| format!("selector: {{app: stock, version: {version}}} # there");
    mesh.edit("mesh.yaml", &selector(from), &selector(to));
    wait_version(mesh, to);
}

#[test]
fn traffic_follows_a_name_and_survives_a_restart_of_the_control_plane() {
    let text = include_str!("shop.yaml").replace("mode: STRICT", "mode: PERMISSIVE");
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &format!("{text}---{OUTSIDE}")).ready();
    wait_version(&mesh, "v1");
    let load = mesh.load("front", &[URL, "-c", "2", "--rate", "50"]);
    load.wait_more(20);
    move_to(&mesh, "v1", "v2");

    let old = mesh.status()["control"].clone();
    let kill = mesh.run(&["exec", "front", "--", "sh", "-c", &format!("kill -KILL {old}")]);
    assert!(kill.status.success(), "{kill:?}");
    eventually("another control plane runs", || match mesh.status()["control"].clone() {
        new if new == old || new.is_null() => Err(format!("{new} runs")),
        _ => Ok(()),
    });
    load.wait_more(100);
    move_to(&mesh, "v2", "v1");
    load.finish().assert_all_good();
}

#[test]
fn hosts_without_addresses_have_that_of_their_status_or_an_allocated_one() {
    let text = format!("{}---{WITHOUT_ADDRESSES}", include_str!("shop.yaml"));
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text);
    let mesh = setup.with_envoys(&["shop/front"]).ready();
    for host in ["stored.example", "240.240.77.7", "allocated.example"] {
        mesh.wait_status("front", &format!("http://{host}:9000/"), &[], 200);
    }
    let output = mesh.run(&["exec", "front", "--", "getent", "ahostsv4", "stored.example"]);
    let addresses = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(addresses.starts_with("240.240.77.7 "), "{output:?}");
    let output = mesh.run(&["exec", "front", "--", "getent", "ahostsv4", "allocated.example"]);
    let addresses = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(addresses.starts_with("240.240.") && !addresses.contains("240.240.77.7"), "{output:?}");
}
