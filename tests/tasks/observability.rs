//! Tasks of access logs, metrics and traces, and of a rate limit.

use skysail_testkit::{Mesh, eventually};

use crate::{app_with, apply, assert_quiet, logged, remove, wait_answer};

#[test]
fn logs_metrics_and_traces_are_configured() {
    let mesh = app_with(&[]).ready();
    wait_answer(&mesh, "http://films/", &[], 200, "films");

    apply(&mesh, "access-logs");
    let line = "GET /status/404 answered 404 to spiffe://cluster.local/ns/default/sa/page";
    let films = ["films-v1", "films-v2", "films-v3"];
    eventually("films log errors", || {
        mesh.call("page", "http://films/status/404", &[]);
        films.iter().try_for_each(|films| logged(&mesh, &[films, "-c", "proxy"], &[line]))
    });
    mesh.call("page", "http://films/good", &[]);
    mesh.call("page", "http://films/status/404", &[]);
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
    eventually("traces are collected", || logged(&mesh, &["collector"], &["method=POST path=/api/v2/spans"]));
    remove(&mesh, "telemetry");

    limits(&mesh);
    assert_quiet(&mesh);
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
