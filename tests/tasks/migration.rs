//! The YAML in `docs/from-linkerd-and-osm.md` does what the page says.

use skysail_testkit::{Mesh, eventually};

use crate::{app_with, assert_quiet, logged, versions, wait_answer};

const PAGE: &str = include_str!("../../docs/from-linkerd-and-osm.md");
const FILMS: &str = "http://films/";

/// Puts the block of YAML that contains this text into the mesh's configuration.
fn put(mesh: &Mesh, file: &str, text: &str) {
    let mut blocks = PAGE.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    mesh.put(file, blocks.find(|block| block.contains(text)).unwrap());
}

fn drop_file(mesh: &Mesh, file: &str) {
    std::fs::remove_file(mesh.config().join(file)).unwrap();
}

#[test]
fn resources_of_other_meshes_have_counterparts() {
    let mesh = app_with(&[]).ready();
    wait_answer(&mesh, FILMS, &[], 200, "films");
    modes(&mesh);
    split_and_metrics(&mesh);
    budget(&mesh);

    put(&mesh, "sidecar.yaml", "kind: Sidecar");
    mesh.wait_status("seats", "http://192.0.2.1/", &[], 502);
    mesh.wait_status("seats", FILMS, &[], 200);
    assert_quiet(&mesh);
}

/// One object denies everything, and a policy allows an edge. Without them, everything is allowed.
fn modes(mesh: &Mesh) {
    put(mesh, "deny.yaml", "name: default-deny");
    wait_answer(mesh, FILMS, &[], 403, "RBAC: access denied");
    mesh.wait_status("page", "http://seats/", &[], 403);
    put(mesh, "allow.yaml", "name: films}\nspec:\n  selector");
    wait_answer(mesh, FILMS, &[], 200, "films");
    mesh.wait_status("seats", FILMS, &[], 403);
    mesh.wait_status("page", FILMS, &["-X", "POST"], 403);
    drop_file(mesh, "allow.yaml");
    mesh.edit(
        "deny.yaml",
        "name: default-deny",
        "annotations: {istio.io/dry-run: 'true'}, name: default-deny",
    );
    wait_answer(mesh, "http://seats/", &[], 200, "seats");
    eventually("a dry run counts", || {
        mesh.call("page", "http://seats/", &[]);
        let metrics = mesh.call("seats", "http://127.0.0.1:15090/stats/prometheus", &[]).body;
        let mut counters = metrics.lines().filter(|line| line.starts_with("envoy_http_rbac_shadow_denied"));
        if counters.any(|line| !line.ends_with(" 0")) { Ok(()) } else { Err(metrics) }
    });
    drop_file(mesh, "deny.yaml");
    mesh.wait_status("seats", FILMS, &[], 200);
}

fn split_and_metrics(mesh: &Mesh) {
    put(mesh, "split.yaml", "kind: HTTPRoute");
    eventually("the split takes effect", || {
        let found = versions(mesh, FILMS, 100, &[]);
        let of = |version: &str| found.get(version).copied().unwrap_or_default();
        let is_it = found.len() == 2 && of("v1") > 70 && of("v2") > 0;
        if is_it { Ok(()) } else { Err(format!("{found:?}")) }
    });
    put(mesh, "metrics.yaml", "kind: Telemetry");
    eventually("requests are counted by route", || {
        mesh.call("page", FILMS, &[]);
        let metrics = mesh.call("page", "http://127.0.0.1:15090/stats/prometheus", &[]).body;
        let mut counters = metrics.lines().filter(|line| line.starts_with("istio_requests_total{"));
        let is_it = counters.any(|line| line.contains(r#"route=""#) && line.contains("films-v1"));
        if is_it { Ok(()) } else { Err(metrics) }
    });
}

/// Twelve requests at once fail. Each may be retried three times, and the budget permits two retries at a time at most.
fn budget(mesh: &Mesh) {
    put(mesh, "budget.yaml", "retryBudget");
    let url = "http://seats/budget?status=503&delay=300ms";
    eventually("the budget refuses retries", || {
        let report = mesh.load("page", &[url, "-n", "12", "-c", "12"]).finish();
        assert_eq!(report.status.get(&503), Some(&12), "{report:?}");
        logged(mesh, &["page", "-c", "proxy"], &["GET /budget", " 503 UO"])
    });
}
