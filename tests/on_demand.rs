//! Sidecars hold the resources that they use, independent of the mesh's size. Sidecars of a restarted pod get them
//! before the first request.

use std::{
    io::{self, Write as _},
    time::{Duration, Instant},
};

use serde_json::Value;
use skysail_testkit::{Mesh, Setup, eventually};

/// Services that no workload calls.
const OTHERS: usize = 200;

fn shop() -> Setup {
    let others: String = (0..OTHERS)
        .map(|number| {
            format!(
                "---\n{{apiVersion: v1, kind: Service, metadata: {{name: other-{number}, namespace: shop}}, spec: {{selector: \
                 {{app: other-{number}}}, ports: [{{name: http, port: 80}}]}}}}\n"
            )
        })
        .collect();
    Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &format!("{}{others}", include_str!("shop.yaml")))
}

/// Returns a page of a workload's sidecar.
fn page(mesh: &Mesh, workload: &str, path: &str) -> String {
    mesh.call(workload, &format!("http://127.0.0.1:15000{path}"), &[]).body
}

fn hosts(mesh: &Mesh) -> Vec<String> {
    let page: Value = serde_json::from_str(&page(mesh, "front", "/on_demand")).unwrap_or_default();
    let hosts = page["80"]["hosts"].as_array().cloned().unwrap_or_default();
    hosts.into_iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect()
}

fn waited(mesh: &Mesh) -> bool {
    let metrics = page(mesh, "front", "/stats/prometheus");
    let mut counts = metrics.lines().filter(|line| line.starts_with("skysail_on_demand_requests"));
    counts.any(|line| !line.ends_with(" 0"))
}

#[test]
fn a_sidecar_holds_used_hosts_and_a_restarted_pod_prefetches_them() {
    let stock = "80/stock.shop.svc.cluster.local:80";
    let mesh = shop().ready();
    assert_eq!(hosts(&mesh), [""; 0], "nothing is used yet");
    // The very first request succeeds.
    assert_eq!(mesh.call("front", "http://stock.shop/", &[]).status, Some(200));
    assert_eq!(mesh.call("front", "http://stock/", &["-H", "x-want: v2"]).status, Some(200));
    assert_eq!(hosts(&mesh), [stock]);
    assert!(waited(&mesh));
    let clusters = page(&mesh, "front", "/clusters");
    assert!(clusters.contains("outbound|80|v2|stock.shop.svc.cluster.local::"), "{clusters}");
    assert!(!clusters.contains("other-"), "{clusters}");

    // A new service is found, although its name was requested before.
    let late = "http://late.shop/";
    assert_ne!(mesh.call("front", late, &[]).status, Some(200));
    let service = "{apiVersion: v1, kind: Service, metadata: {name: late, namespace: shop}, spec: {selector: {app: stock}, \
                   ports: [{name: http, port: 80, targetPort: 9090}]}}";
    mesh.put("late.yaml", service);
    mesh.wait_status("front", late, &[], 200);

    // The control plane learns a host when a sidecar subscribes to it, which may follow the first request.
    eventually("the control plane remembers both hosts", || {
        let used = mesh.call("control", "http://10.244.0.1:15014/debug/used", &[]).body;
        let hosts = ["80/stock.shop.", "80/late.shop."];
        if hosts.iter().all(|host| used.contains(host)) { Ok(()) } else { Err(used) }
    });
    let before = mesh.names("front");
    mesh.edit("mesh.yaml", "image: registry.example/shop/front,", "image: registry.example/shop/front:2,");
    eventually("the pod is another one", || match mesh.names("front") {
        now if now.len() == 1 && now != before => Ok(()),
        now => Err(format!("{now:?}")),
    });
    mesh.wait_gone("shop", "front", &before);
    eventually("the new pod has what the one before used", || match hosts(&mesh) {
        now if now.len() == 2 && now.iter().any(|name| name == stock) => Ok(()),
        now => Err(format!("{now:?}")),
    });
    assert_eq!(mesh.call("front", "http://stock.shop/", &[]).status, Some(200));
    assert!(!waited(&mesh), "no request had to wait");
}

#[test]
fn hosts_are_found_one_after_the_other() {
    let mesh = shop().ready();
    let mut took: Vec<Duration> = (0..20)
        .map(|number| {
            let began = Instant::now();
            // The service has no endpoint, which gives a response.
            assert_eq!(mesh.call("front", &format!("http://other-{number}.shop/"), &[]).status, Some(503));
            began.elapsed()
        })
        .collect();
    assert_eq!(hosts(&mesh).len(), 20);
    took.sort_unstable();
    let metrics = page(&mesh, "front", "/stats/prometheus");
    let waits: Vec<&str> = metrics.lines().filter(|line| line.starts_with("skysail_on_demand")).collect();
    // Written past the capture of test output: figures to read, without a limit.
    writeln!(io::stderr(), "a first request took {:?} with its program; {waits:?}", took[took.len() / 2])
        .unwrap();
}

/// An unknown host may be one of the mesh, so no request for it leaves in plain text.
#[test]
fn without_a_control_plane_only_known_hosts_are_reached() {
    const UNANSWERED: &str = "no answer from the control plane about this host";
    let mesh = shop().ready();
    let stock = "http://stock.shop/";
    let outside = ["-H", "host: outside.example"];
    mesh.wait_status("front", stock, &[], 200);
    // The mesh has no such host, so the request is passed through, to an address where no server accepts plain text.
    let passed = mesh.call("front", stock, &outside);
    assert_ne!(passed.body, UNANSWERED);
    let control = mesh.status()["control"].clone();
    let signal = |name: &str| {
        let kill = mesh.run(&["exec", "front", "--", "sh", "-c", &format!("kill -{name} {control}")]);
        assert!(kill.status.success(), "{kill:?}");
    };
    signal("STOP");
    let refused = mesh.call("front", "http://other-0.shop/", &[]);
    assert_eq!((refused.status, refused.body.as_str()), (Some(503), UNANSWERED));
    assert_eq!(mesh.call("front", stock, &[]).status, Some(200));
    let again = mesh.call("front", stock, &outside);
    assert_eq!(
        (again.status, &again.body),
        (passed.status, &passed.body),
        "what passed through passes through"
    );
    signal("CONT");
    eventually("the control plane answers", || match mesh.call("front", "http://other-0.shop/", &[]) {
        answer if answer.body == UNANSWERED => Err(format!("{answer:?}")),
        // The service has no endpoint.
        answer => {
            assert_eq!(answer.status, Some(503));
            Ok(())
        }
    });
}
