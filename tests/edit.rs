//! Edits of the YAML of a mesh under load: they take effect, and no request is lost.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use skysail_testkit::{Load, Mesh, Setup, eventually};

const STOCK: &str = "http://stock.shop/";

fn shop() -> Mesh {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml")).ready();
    mesh.wait_status("front", STOCK, &[], 200);
    mesh.wait_status("front", STOCK, &["-H", "x-want: v2"], 200);
    mesh
}

fn load(mesh: &Mesh) -> Load {
    let load = mesh.load("front", &[STOCK, "-c", "4", "--rate", "300", "--count", "x-version"]);
    load.wait_more(100);
    load
}

#[test]
fn new_weights_take_effect_without_a_lost_request() {
    let mesh = shop();
    let load = load(&mesh);
    let text = fs::read_to_string(mesh.config().join("mesh.yaml")).unwrap();
    let swapped = text.replace("weight: 100", "weight: X").replace("weight: 0", "weight: 100");
    let swapped = swapped.replace("weight: X", "weight: 0");
    let mut longest = Duration::ZERO;
    for turn in 0..10 {
        let (new, old) = if turn % 2 == 0 { ("v2", "v1") } else { ("v1", "v2") };
        let text = if turn % 2 == 0 { &swapped } else { &text };
        let before = load.report();
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        if turn < 5 {
            mesh.put("mesh.yaml", text);
        } else {
            // Not every editor writes another file first.
            fs::write(mesh.config().join("mesh.yaml"), text).unwrap();
        }
        load.wait("the new version answers", |now| now.count(new) >= before.count(new) + 50);
        // When the old version gets no more requests, its last request shows how long the change took.
        let after = eventually("the old version rests", || {
            let first = load.report();
            let second = load.wait_more(50);
            if first.count(old) == second.count(old) { Ok(second) } else { Err(format!("{second:?}")) }
        });
        let last = Duration::from_micros(u64::try_from(after.values[old].last).unwrap());
        longest = longest.max(last.saturating_sub(began));
    }
    load.finish().assert_all_good();
    // Written past the capture of test output: a figure to read, without a limit.
    writeln!(io::stderr(), "the slowest of 10 edits took effect after {longest:?}").unwrap();
}

#[test]
fn replicas_are_added_and_removed_without_a_lost_request() {
    let mesh = shop();
    let load = load(&mesh);
    let scale = |from: u32, to: u32| {
        mesh.edit(
            "mesh.yaml",
            &format!("replicas: {from} # stock-v1"),
            &format!("replicas: {to} # stock-v1"),
        );
        let pods = usize::try_from(to).unwrap();
        eventually("the pods are there", || match mesh.pods("stock-v1") {
            counts if counts == (pods, pods) => Ok(()),
            counts => Err(format!("{counts:?}")),
        });
    };
    scale(1, 3);
    eventually("a new pod answers", || {
        let pods: Vec<_> =
            (0..20).map(|_| mesh.call("front", STOCK, &[]).json()["pod"]["name"].clone()).collect();
        if pods.iter().any(|pod| *pod != pods[0]) { Ok(()) } else { Err(format!("only {}", pods[0])) }
    });
    let three = mesh.names("stock-v1");
    scale(3, 1);
    mesh.wait_gone("shop", "stock-v1", &three);
    // A second edit: the pods that are removed are those that are not ready yet.
    mesh.edit("mesh.yaml", "replicas: 1 # stock-v1", "replicas: 4 # stock-v1");
    eventually("the pods are begun", || match mesh.pods("stock-v1").1 {
        4 => Ok(()),
        count => Err(count.to_string()),
    });
    scale(4, 1);
    // A new template replaces every pod.
    let one = mesh.names("stock-v1");
    mesh.edit("mesh.yaml", "image: registry.example/shop/stock,", "image: registry.example/shop/stock:2,");
    eventually("the pod is another one", || {
        let now = mesh.names("stock-v1");
        if now.len() == 1 && now != one { Ok(()) } else { Err(format!("{now:?}")) }
    });
    mesh.wait_gone("shop", "stock-v1", &one);
    load.wait_more(100);
    load.finish().assert_all_good();
}

const DENY: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: no-secrets, namespace: shop}
spec:
  selector: {matchLabels: {app: stock}}
  action: DENY
  rules: [{to: [{operation: {paths: [/secret]}}]}]
";

const STRANGER: &str = "
apiVersion: v1
kind: Pod
metadata: {name: stranger, namespace: shop, labels: {sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: shell, image: registry.example/shell}]}
";

/// Policies apply to open connections, and break none.
#[test]
fn policies_are_added_and_removed_without_a_lost_request() {
    let mesh = shop();
    mesh.put("stranger.yaml", STRANGER);
    eventually("the stranger is there", || match mesh.pods("stranger") {
        (1, 1) => Ok(()),
        counts => Err(format!("{counts:?}")),
    });
    let load = load(&mesh);
    let secrets = mesh.load("front", &["http://stock.shop/secret", "-c", "2", "--rate", "100"]);
    for _ in 0..3 {
        let before = secrets.wait_more(20).status;
        mesh.put("deny.yaml", DENY);
        let count = |status: &BTreeMap<u16, u64>, code| status.get(&code).copied().unwrap_or_default();
        secrets.wait("secrets are denied", |now| count(&now.status, 403) >= count(&before, 403) + 20);
        let denied = secrets.report().status;
        fs::remove_file(mesh.config().join("deny.yaml")).unwrap();
        secrets.wait("secrets are open", |now| count(&now.status, 200) >= count(&denied, 200) + 20);
    }
    for (from, to, status) in [("STRICT", "PERMISSIVE", Some(200)), ("PERMISSIVE", "STRICT", None)] {
        mesh.edit("mesh.yaml", &format!("mode: {from}"), &format!("mode: {to}"));
        eventually(&format!("the stranger's calls meet {to}"), || {
            let answer = mesh.call("stranger", STOCK, &[]);
            if answer.status == status { Ok(()) } else { Err(format!("{answer:?}")) }
        });
        load.wait_more(100);
    }
    let secrets = secrets.finish();
    assert_eq!(secrets.failed, 0, "{secrets:?}");
    assert!(secrets.status.keys().all(|status| [200, 403].contains(status)), "{secrets:?}");
    load.finish().assert_all_good();
}

const WAREHOUSE: &str = "
apiVersion: v1
kind: Service
metadata: {name: warehouse, namespace: shop}
spec:
  selector: {app: warehouse}
  ports: [{name: http, port: 8000, targetPort: 7000}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: warehouse, namespace: shop}
spec:
  selector: {matchLabels: {app: warehouse}}
  template:
    metadata: {labels: {app: warehouse}}
    spec: {containers: [{name: all, image: registry.example/warehouse, ports: [{containerPort: 7000}]}]}
";

/// A new file adds a service, which ends with the file.
#[test]
fn a_service_is_added_and_removed_with_its_file() {
    let mesh = shop();
    let url = "http://warehouse.shop:8000/";
    assert_eq!(mesh.call("front", url, &[]).status, None);
    for _ in 0..2 {
        mesh.put("warehouse.yaml", WAREHOUSE);
        mesh.wait_status("front", url, &[], 200);
        fs::remove_file(mesh.config().join("warehouse.yaml")).unwrap();
        eventually("the service is gone", || {
            let answer = mesh.call("front", url, &[]);
            if answer.status.is_none() { Ok(()) } else { Err(format!("{answer:?}")) }
        });
        // The pod ends after its connections.
        eventually("the pod is gone", || {
            let pods = mesh.pods("warehouse");
            if pods == (0, 0) { Ok(()) } else { Err(format!("{pods:?}")) }
        });
    }
}

/// `skysail up` prints each edit with its effect, and the access that a changed policy opens.
#[test]
fn effects_of_edits_are_printed() {
    let mesh = shop();
    mesh.edit("mesh.yaml", "weight: 100", "weight: 99");
    mesh.edit("mesh.yaml", "weight: 0", "weight: 1");
    mesh.wait("the edit is reported", |output| {
        let is_reported = |line: &&str| {
            line.starts_with("applied    VirtualService shop/")
                && line.contains("mesh.yaml): requests to stock.")
        };
        output.lines().find(is_reported).map(|_| ()).ok_or_else(|| output.to_owned())
    });
    let policy = "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: closed, namespace: shop}\nspec: {action: DENY, rules: [{to: [{operation: {paths: [/admin]}}]}]}\n";
    mesh.put("policy.yaml", policy);
    mesh.wait_status("front", "http://stock.shop/admin", &[], 403);
    fs::remove_file(mesh.config().join("policy.yaml")).unwrap();
    mesh.wait_status("front", "http://stock.shop/admin", &[], 200);
    let accepted =
        "requests that this policy denied are accepted now by shop/front, shop/stock-v1, shop/stock-v2";
    printed(&mesh, "deleted    AuthorizationPolicy shop/closed", accepted);
    // The namespace has STRICT.
    for (mode, effect) in [("PERMISSIVE", "accepted"), ("STRICT", "refused")] {
        mesh.put("policy.yaml", &MUTUAL_TLS.replace("MODE", mode));
        let text = format!("connections without mutual TLS are {effect} now by shop/stock-v1, shop/stock-v2");
        printed(&mesh, "applied    PeerAuthentication shop/stock", &text);
    }
}

const MUTUAL_TLS: &str = "
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: stock, namespace: shop}
spec: {selector: {matchLabels: {app: stock}}, mtls: {mode: MODE}}
";

fn printed(mesh: &Mesh, start: &str, text: &str) {
    mesh.wait(text, |output| {
        let found = output.lines().any(|line| line.starts_with(start) && line.contains(text));
        if found { Ok(()) } else { Err(output.to_owned()) }
    });
}

/// An invalid policy without a valid version restricts at least as much as intended.
#[test]
fn a_refused_policy_restricts_until_it_is_fixed() {
    let admin = "http://stock.shop/admin";
    let spec = "{action: DENY, rules: [{to: [{operation: {paths: [/admin]}}], from: [{source: {ipBlocks: [10.0.0.0/99]}}]}]}";
    let policy = format!(
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: closed, namespace: shop}}\nspec: {spec}\n"
    );
    let text = format!("{}---\n{policy}", include_str!("shop.yaml"));
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready();
    mesh.wait_status("front", STOCK, &[], 200);
    assert_eq!(mesh.call("front", admin, &[]).status, Some(403), "from the start");
    mesh.put("mesh.yaml", include_str!("shop.yaml"));
    mesh.wait_status("front", admin, &[], 200);
    // The same while the mesh runs.
    mesh.put("policy.yaml", &policy);
    mesh.wait_status("front", admin, &[], 403);
    mesh.wait_status("front", STOCK, &[], 200);
    printed(&mesh, "refused    AuthorizationPolicy shop/closed", "until its errors are fixed, its rules");
    // Valid, and with an address that no pod has.
    mesh.put("policy.yaml", &policy.replace("10.0.0.0/99", "192.0.2.0/24"));
    mesh.wait_status("front", admin, &[], 200);
    // The last valid version stays in effect.
    mesh.put("policy.yaml", &policy.replace("DENY", "deny"));
    mesh.wait("the error", |output| {
        if output.contains("did you mean DENY?") { Ok(()) } else { Err(output.to_owned()) }
    });
    mesh.wait_status("front", admin, &[], 200);
}
