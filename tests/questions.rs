//! The meshes and rules in the pages of `docs/questions`: they behave as the pages describe.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use skysail_testkit::{Mesh, Setup, eventually};

const SHOP: &str = include_str!("../docs/questions/shop.yaml");
const FAULTS: &str = include_str!("../docs/questions/faults.md");
const SHIFT: &str = include_str!("../docs/questions/shift-traffic.md");
const STOCK: &str = "http://stock/";
/// The rule of the VirtualService before which the pages add others.
const WEIGHTED: &str = "    - name: weighted\n";

#[test]
fn pages_about_policies_routes_and_faults_are_correct() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), SHOP).ready();
    identity_and_policy(&mesh);
    weights(&mesh);
    rules(&mesh);
}

/// `mutual-tls.md` and `why-403.md`.
fn identity_and_policy(mesh: &Mesh) {
    mesh.wait_status("front", STOCK, &[], 200);
    assert_eq!(mesh.call("front", STOCK, &[]).json()["caller"], "spiffe://cluster.local/ns/shop/sa/front");
    // One request in ten goes to the other version, whose log then has it.
    eventually("the log has the reason", || {
        let denied = mesh.call("front", "http://stock/admin/x", &[]);
        assert_eq!((denied.status, denied.body.trim()), (Some(403), "RBAC: access denied"));
        logged(mesh, "stock-v1", "403 - rbac_access_denied_matched_policy[none]")
    });
}

/// `shift-traffic.md`: both versions answer, and the edit of the page works.
fn weights(mesh: &Mesh) {
    for version in ["v1", "v2"] {
        eventually(version, || {
            let answer = mesh.call("front", STOCK, &[]).json();
            if answer["pod"]["version"] == version { Ok(()) } else { Err(answer.to_string()) }
        });
    }
    for weight in ["weight: 90", "weight: 10"] {
        assert_eq!(SHOP.matches(weight).count(), 1, "{weight}");
    }
}

/// The rules of `faults.md`, and the last of `shift-traffic.md`.
fn rules(mesh: &Mesh) {
    let added = format!("{}{}{WEIGHTED}", blocks(FAULTS)[0], blocks(SHIFT)[1]);
    mesh.put("mesh.yaml", &SHOP.replacen(WEIGHTED, &added, 1));
    mesh.wait_status("front", STOCK, &["-H", "x-try: abort"], 418);
    let version = mesh.call("front", STOCK, &["-H", "x-want: v2"]).json()["pod"]["version"].clone();
    assert_eq!(version, "v2");
    let delayed = mesh.call("front", STOCK, &["-H", "x-try: delay"]);
    assert_eq!(delayed.status, Some(200), "{delayed:?}");
    let late = mesh.call("front", "http://stock/delay/60s", &["-H", "x-try: timeout"]);
    assert_eq!((late.status, late.body.trim()), (Some(504), "upstream request timeout"));
    let retried = mesh.call("front", "http://stock/status/503", &["-H", "x-try: retries"]);
    assert_eq!(retried.status, Some(503), "{retried:?}");
    assert_eq!(retried.json()["headers"]["x-envoy-attempt-count"], "4");
    for entry in ["200 DI via_upstream", "418 FI fault_filter_abort", "504 UT response_timeout", "503 URX"] {
        eventually(entry, || logged(mesh, "front", entry));
    }
}

/// Returns the YAML in a page.
fn blocks(page: &str) -> Vec<&str> {
    page.split("```yaml\n").skip(1).map(|rest| rest.split_once("```").unwrap().0).collect()
}

/// Checks that the access log of a workload's sidecar contains a text; the error is the log.
fn logged(mesh: &Mesh, workload: &str, text: &str) -> Result<(), String> {
    let output = mesh.run(&["logs", workload, "-c", "proxy"]);
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    if log.contains(text) { Ok(()) } else { Err(log) }
}
