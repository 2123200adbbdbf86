//! Pods with failing programs, and programs that cannot run at all: the mesh reports them with the reason.

use serde_json::Value;
use skysail_testkit::{Mesh, Setup, eventually};

/// Returns a mesh of one Deployment with these containers.
fn deployment(containers: &str) -> Setup {
    let text = format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: web, namespace: shop}}\nspec:\n  selector: {{matchLabels: {{app: web}}}}\n  template:\n    metadata: {{labels: {{app: web}}}}\n    spec:\n      containers:\n{containers}"
    );
    Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text)
}

/// Waits until a pod of the workload is not ready, for a reason that contains all these words.
fn wait_reason(mesh: &Mesh, words: &[&str]) {
    eventually("the reason is in the status", || {
        // The mesh may not have a status yet.
        let output = mesh.run(&["status", "--output", "json"]);
        let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let is_meant = |reason: &str| words.iter().all(|word| reason.contains(word));
        let mut pods = status["pods"].as_array().into_iter().flatten();
        match pods.any(|pod| pod["ready"] == false && pod["reason"].as_str().is_some_and(is_meant)) {
            true => Ok(()),
            false => Err(format!("{status}")),
        }
    });
}

#[test]
fn containers_on_one_port_are_not_ready_and_the_port_is_named() {
    let mesh = deployment(
        "      - {name: web, image: acme/web, ports: [{name: http, containerPort: 8080}]}\n      - {name: twin, image: acme/twin, ports: [{name: http-twin, containerPort: 8080}]}\n",
    )
    .start();
    wait_reason(&mesh, &["CrashLoopBackOff", "in use", "8080 (http"]);
    let ended = mesh.interrupt();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.stdout.contains("not healthy"), "{ended:?}");
    // The message names the user's object, not the Pod made from it.
    assert!(!ended.stdout.contains("generated/"), "{ended:?}");
}

#[test]
fn a_program_that_ends_is_restarted_and_its_last_line_is_the_reason() {
    let mesh =
        deployment("      - {name: web, image: acme/web, command: [sh, -c, 'echo no database; exit 7']}\n")
            .with(&["--run-commands"])
            .start();
    wait_reason(&mesh, &["CrashLoopBackOff", "7", "no database"]);
    assert_eq!(mesh.interrupt().status.code(), Some(1));
}

#[test]
fn init_containers_run_first_and_jobs_complete() {
    let text = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: load, namespace: shop}\nspec:\n  completions: 2\n  template:\n    metadata: {labels: {app: load}}\n    spec:\n      restartPolicy: Never\n      initContainers:\n      - {name: prepare, image: busybox, command: [sh, -c, 'echo prepared']}\n      containers:\n      - {name: load, image: busybox, command: [sh, -c, 'echo loaded']}\n";
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), text).with(&["--run-commands"]).ready();
    eventually("both pods have completed", || {
        let status = mesh.status();
        let pods = status["pods"].as_array().unwrap();
        match pods.iter().filter(|pod| pod["phase"] == "Succeeded").count() {
            2 => Ok(()),
            _ => Err(status.to_string()),
        }
    });
    let logs = mesh.run(&["logs", "load"]);
    let logs = String::from_utf8(logs.stdout).unwrap();
    let (prepared, loaded) = (logs.find("prepared"), logs.find("loaded"));
    assert!(prepared.is_some() && loaded.is_some(), "{logs}");
    assert!(mesh.interrupt().status.success());
}

/// The sidecar of a completed Job has ended, and the start does not wait for it.
#[test]
fn a_completed_job_makes_a_mesh_ready_and_healthy() {
    let text = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: load, namespace: shop}\nspec:\n  template:\n    metadata: {labels: {app: load}}\n    spec:\n      restartPolicy: Never\n      containers:\n      - {name: load, image: busybox}\n";
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), text).with(&["--ready-within=300s"]).start();
    mesh.wait_for_output("shop/load");
    mesh.wait_ready();
    let ended = mesh.interrupt();
    assert!(ended.status.success(), "{ended:?}");
    assert!(!ended.stdout.contains("warning"), "{ended:?}");
}

#[test]
fn a_job_that_fails_too_often_has_failed() {
    let text = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: load, namespace: shop}\nspec:\n  backoffLimit: 1\n  template:\n    metadata: {labels: {app: load}}\n    spec:\n      restartPolicy: Never\n      containers:\n      - {name: load, image: busybox, command: [sh, -c, 'echo broken; exit 3']}\n";
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), text).with(&["--run-commands"]).start();
    wait_reason(&mesh, &["container load has failed", "broken"]);
    assert_eq!(mesh.interrupt().status.code(), Some(1));
}

#[test]
fn a_program_that_cannot_start_is_reported_once_with_its_error() {
    let web = "      - {name: web, image: acme/web}\n";
    for (arguments, message) in [
        (["--control-arg=--nonsense"], "unexpected argument '--nonsense'"),
        (["--concurrency=0"], "--concurrency"),
    ] {
        let ended = deployment(web).with(&arguments).start().ended();
        assert_eq!(ended.status.code(), Some(2), "{ended:?}");
        assert_eq!(ended.stderr.matches(message).count(), 1, "{ended:?}");
    }
}

#[test]
fn more_pods_than_allowed_are_refused_before_and_while_the_mesh_runs() {
    let web = "      - {name: web, image: acme/web}\n";
    let mesh = deployment(web).with(&["--max-pods=2"]).ready();
    mesh.edit("mesh.yaml", "spec:\n  selector", "spec:\n  replicas: 5\n  selector");
    mesh.wait_for_output("3 of 5 pods are not started");
    eventually("as many run as are allowed", || match mesh.pods("web") {
        (2, 2) => Ok(()),
        counts => Err(format!("{counts:?}")),
    });
    assert_eq!(mesh.interrupt().status.code(), Some(1));
    let ended = deployment(web).with(&["--max-pods=0"]).start().ended();
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    let text = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web, namespace: shop}\nspec:\n  replicas: 5\n  selector: {matchLabels: {app: web}}\n  template:\n    metadata: {labels: {app: web}}\n    spec: {containers: [{name: web, image: acme/web}]}\n";
    let ended = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), text).with(&["--max-pods=2"]).start().ended();
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    assert!(
        ended.stderr.contains("the configuration has 5 pods (most: Deployment shop/web with 5)"),
        "{ended:?}"
    );
}

/// Failures after the last poll of the sidecars affect the result as well.
#[test]
fn failures_right_before_the_end_count() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml")).ready();
    mesh.wait_status("front", "http://stock.shop/", &[], 200);
    let answer = mesh.call("front", "http://stock.shop/status/503", &[]);
    assert_eq!(answer.status, Some(503), "{answer:?}");
    let ended = mesh.interrupt();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.stdout.contains("shop/front -> shop/stock-v1: "), "{ended:?}");
}

/// A program that hangs is ended and restarted; the probes of a slow program wait for its start.
#[test]
fn programs_that_hang_or_do_not_start_are_restarted() {
    let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, namespace: shop, labels: {app: web}}\nspec:\n  volumes: [{name: data}]\n  containers:\n  - name: web\n    image: busybox\n    \
        command: [sh, -c, 'rm -f /skysail-data/sick; echo run >> /skysail-data/runs; [ $(wc -l < /skysail-data/runs) = 1 ] || touch /skysail-data/started; exec sleep 100000']\n    \
        startupProbe: {exec: {command: [test, -f, /skysail-data/started]}, periodSeconds: 1, timeoutSeconds: 3600, failureThreshold: 1}\n    \
        livenessProbe: {exec: {command: [test, '!', -f, /skysail-data/sick]}, periodSeconds: 1, timeoutSeconds: 3600, failureThreshold: 1}\n    \
        volumeMounts: [{name: data, mountPath: /skysail-data}]\n";
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), text).with(&["--run-commands"]).start();
    mesh.wait_for_output("shop/web: web exited (startupProbe failed: `test -f /skysail-data/started`: exit status: 1); restarting");
    mesh.wait_ready();
    assert!(mesh.run(&["exec", "web", "--", "touch", "/skysail-data/sick"]).status.success());
    mesh.wait_for_output("shop/web: web exited (livenessProbe failed: `test ! -f /skysail-data/sick`: exit status: 1); restarting");
    eventually("it runs again", || match mesh.status()["pods"][0].clone() {
        pod if pod["restarts"].as_u64() >= Some(2) && pod["ready"] == true => Ok(()),
        pod => Err(pod.to_string()),
    });
    assert!(mesh.interrupt().status.success());
}
