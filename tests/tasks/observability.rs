//! Tasks of access logs, metrics and traces, and of a rate limit.

use skysail_testkit::{Mesh, eventually};

use crate::{app_with, apply, assert_quiet, logged, remove, wait_answer};

#[test]
fn logs_metrics_and_traces_are_configured() {
    let mesh = app_with(&[]).ready();
    wait_answer(&mesh, "http://films/", &[], 200, "films");

    apply(&mesh, "access-logs");
    let films = ["films-v1", "films-v2", "films-v3"];
    wait_logged(&mesh, &films, 404);
    mesh.call("page", "http://films/good", &[]);
    // Later requests are logged after it.
    wait_logged(&mesh, &films, 410);
    for of in films.iter().chain(&["page"]) {
        assert!(
            logged(&mesh, &[of, "-c", "proxy"], &["/good"]).is_err(),
            "{of} logs a request without an error"
        );
    }
    remove(&mesh, "access-logs");

    apply(&mesh, "telemetry");
    mesh.wait_status("page", "http://films/search", &[], 200);
    eventually("requests are counted by route", || {
        mesh.call("page", "http://films/search", &[]);
        mesh.call("page", "http://films/", &[]);
        let metrics = mesh.call("page", "http://127.0.0.1:15090/stats/prometheus", &[]).body;
        let counted = |route: &str| {
            metrics.lines().any(|line| {
                line.starts_with("istio_requests_total{")
                    && line.contains(&format!(r#"route="{route}""#))
                    && !line.contains("request_protocol=")
            })
        };
        if counted("search") && counted("others") { Ok(()) } else { Err(metrics) }
    });
    // Spans that are sent before the collector is ready are lost.
    eventually("traces are collected", || {
        mesh.call("page", "http://films/", &[]);
        logged(&mesh, &["collector"], &["method=POST path=/api/v2/spans"])
    });
    remove(&mesh, "telemetry");

    limits(&mesh);
    assert_quiet(&mesh);
}

/// Calls films until each of its pods has logged a response of this status in the format of the example.
fn wait_logged(mesh: &Mesh, films: &[&str], status: u16) {
    let line = format!("GET /status/{status} answered {status} to spiffe://cluster.local/ns/default/sa/page");
    eventually(&format!("films log {status}"), || {
        mesh.call("page", &format!("http://films/status/{status}"), &[]);
        films.iter().try_for_each(|films| logged(mesh, &[films, "-c", "proxy"], &[&line]))
    });
}

/// The bucket has four tokens, and the next come after a minute.
fn limits(mesh: &Mesh) {
    apply(mesh, "local-rate-limit");
    let call = || {
        let output = mesh.run(&["call", "page", "http://seats/", "-i", "-n", "8"]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let limited = eventually("requests are refused", || match call() {
        text if text.contains("HTTP/1.1 429") => Ok(text),
        text => Err(text),
    });
    assert!(limited.contains("x-local-rate-limit: true"), "{limited}");
    let limited = call();
    assert!(limited.matches("HTTP/1.1 429").count() >= 4, "{limited}");
}
