//! Telemetry: metrics and access logs. A public Envoy has no filter for Istio's metrics, so `skysail-proxy` alone is
//! tested for them.

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, check, get, log, mesh_with, wait, wait_logged, with};

const RULES: &str = include_str!("telemetry.yaml");

#[test]
fn metrics_and_logs_are_selected() {
    let mesh = mesh_with(RULES, &["shop/by-envoy", "shop/api-v2"]).ready();
    for client in CLIENTS {
        for to in ["v1", "v2"] {
            let header = format!("x-to: {to}");
            wait(&mesh, client, &with(&["-H", &header], "http://api/", 200, &[to]));
        }
    }
    logs(&mesh);
    metrics(&mesh);
}

fn logs(mesh: &Mesh) {
    let error = with(&["-H", "x-to: v2"], "http://api/bad?status=404", 404, &[]);
    for client in CLIENTS {
        wait(mesh, client, &get("http://api/good", 200, &[]));
        wait(mesh, client, &with(&["-H", "x-to: v2"], "http://api/good", 200, &[]));
        check(mesh, &[client], &[get("http://api/bad?status=404", 404, &[])]);
        eventually("the server logs an error", || {
            check(mesh, &[client], &[with(error.arguments, error.url, error.status, &[])]);
            let log = log(mesh, &["api-v2", "-c", "proxy"]);
            if log.contains("GET /bad?status=404 ") { Ok(()) } else { Err(log) }
        });
        wait_logged(mesh, &[client, "-c", "proxy"], &["GET /good "]);
    }
    let of_v2 = log(mesh, &["api-v2", "-c", "proxy"]);
    assert!(!of_v2.contains("GET /good "), "{of_v2}");
    let of_v1 = log(mesh, &["api-v1", "-c", "proxy"]);
    assert!(!of_v1.contains("GET /bad") && !of_v1.contains("GET /good"), "{of_v1}");
}

fn metrics(mesh: &Mesh) {
    let page = |workload: &str| mesh.call(workload, "http://127.0.0.1:15090/stats/prometheus", &[]).body;
    let requests = |page: &str| -> Vec<String> {
        let lines = page.lines().filter(|line| line.starts_with("istio_requests_total{"));
        lines.filter(|line| line.contains("api.shop.svc.cluster.local")).map(str::to_owned).collect()
    };
    let client = eventually("the client counts requests", || {
        check(mesh, &["by-skysail"], &[get("http://api/", 200, &[])]);
        let page = page("by-skysail");
        if requests(&page).is_empty() { Err(page) } else { Ok(page) }
    });
    let own = requests(&client);
    let is_changed =
        |line: &String| line.contains("request_method=\"GET\"") && !line.contains("response_flags");
    assert!(own.iter().all(is_changed), "{own:#?}");
    let server = page("api-v1");
    let own = requests(&server);
    assert!(!own.is_empty() && own.iter().all(|line| line.contains("response_flags")), "{own:#?}");
    for page in [&client, &server] {
        assert!(!page.contains("istio_request_bytes") && page.contains("istio_response_bytes"), "{page}");
    }
}
