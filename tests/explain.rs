//! `skysail explain`: what it says about a folder, and that random meshes do what it says.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

#[path = "explain/certificates.rs"]
mod certificates;
#[path = "explain/compare.rs"]
mod compare;
#[path = "explain/edge.rs"]
mod edge;
#[path = "explain/outbound.rs"]
mod outbound;
#[path = "explain/patches.rs"]
mod patches;
#[path = "explain/random.rs"]
mod random;
#[path = "explain/running.rs"]
mod running;

use std::{
    collections::BTreeSet,
    env, fs,
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
};

use serde_json::Value;
use skysail_testkit::Setup;

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");

/// `SKYSAIL_EXPLAIN_SEEDS` is the number of meshes, `SKYSAIL_EXPLAIN_FROM` the first seed. The workloads in
/// `SKYSAIL_EXPLAIN_ENVOYS`, separated by spaces, have a real Envoy.
#[test]
fn random_meshes_do_what_is_explained() {
    let number = |name: &str| env::var(name).ok().and_then(|number| number.parse().ok());
    let first = number("SKYSAIL_EXPLAIN_FROM").unwrap_or(0);
    let seeds = number("SKYSAIL_EXPLAIN_SEEDS").unwrap_or(2);
    let mut statuses = BTreeSet::new();
    for seed in first..first + seeds {
        statuses.extend(compare::compare(seed));
    }
    let is_varied = statuses.is_superset(&[0, 200, 401, 403, 404].into()) && statuses.len() > 6;
    assert!(is_varied || seeds < 2, "{statuses:?}");
}

const SHOP: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: front, namespace: shop, labels: {app: front}}
spec: {containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: back, namespace: shop, labels: {app: back}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: back, namespace: shop}
spec: {selector: {app: back}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: back, namespace: shop}
spec:
  hosts: [back]
  http:
    - match: [{headers: {x-user: {exact: ann}}}]
      redirect: {uri: /for-ann}
    - route: [{destination: {host: back}}]
      timeout: 3s
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: back, namespace: shop}
spec:
  action: DENY
  rules:
    - to: [{operation: {methods: [DELETE]}}]
";

/// Runs `skysail explain` in a folder with the file `shop.yaml` and returns the exit code and both outputs.
fn explain_text(arguments: &[&str]) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("shop.yaml"), SHOP).unwrap();
    let mut command = Command::new(SKYSAIL);
    let output = command.arg("explain").args(arguments).current_dir(folder.path()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn each_decision_names_its_object_and_line() {
    let (code, text, _) =
        explain_text(&["-f", "shop.yaml", "--from", "front", "-X", "DELETE", "http://back/"]);
    assert_eq!(code, 1);
    for line in [
        "  not route 0    header x-user is absent, expected: \"ann\"",
        "                   <- VirtualService shop/back spec.http[0].match[0], shop.yaml:22",
        "  timeout        3 s; idle none",
        "                   <- VirtualService shop/back spec.http[1].timeout, shop.yaml:25",
        "  policy         DENY DENIES: rule ns[shop]-policy[back]-rule[0] matches",
        "                   <- AuthorizationPolicy shop/back spec.rules[0], shop.yaml:33",
        "  connection     mutual TLS, principal spiffe://cluster.local/ns/shop/sa/default",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(text.lines().last().unwrap_or_default().contains("shop/back"), "{text}");
}

#[test]
fn exit_codes_tell_the_result() {
    let code = |arguments: &[&str]| explain_text(arguments).0;
    let of = |arguments: &[&str]| code(&[&["-f", "shop.yaml", "--from", "front"], arguments].concat());
    assert_eq!(of(&["http://back/"]), 0);
    assert_eq!(of(&["http://back/", "-H", "x-user: ann"]), 0, "a redirect is served");
    assert_eq!(of(&["http://other/"]), 1, "the name does not exist");
    assert_eq!(of(&["ftp://back/"]), 2);
    assert_eq!(code(&["-f", "shop.yaml", "--from", "nobody", "http://back/"]), 2);
    assert_eq!(code(&["-f", "missing.yaml", "--from", "front", "http://back/"]), 2);
    let (_, _, stderr) = explain_text(&["-f", "shop.yaml", "--from", "nobody", "http://back/"]);
    assert!(stderr.contains("it has shop/back, shop/front"), "{stderr}");
}

#[test]
fn a_running_mesh_tells_what_its_proxies_hold() {
    let mesh = Setup::of_text(SKYSAIL, SHOP).ready();
    let url = "http://back/a";
    let explained = || -> Value {
        let output = mesh.run(&["explain", "--from", "shop/front", url, "--output", "json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    };
    let report = explained();
    assert_eq!(report["served"], true, "{report:#}");
    assert_eq!(report["notes"].as_array().map(Vec::len), Some(0), "{report:#}");
    let host = "back.shop.svc.cluster.local:80";
    let on_demand = |report: &Value| report["client"]["on_demand"].to_string().contains(host);
    assert!(on_demand(&report), "{report:#}");
    let pod = report["destinations"][0]["to"]["address"].clone();
    mesh.wait_status("front", url, &[], 200);
    let report = explained();
    assert!(!on_demand(&report), "{report:#}");
    assert_eq!(report["destinations"][0]["to"]["address"], pod);
    assert_eq!(mesh.status()["pods"][0]["address"], pod, "the address is the running pod's");
    // A change is in the explanation once the sidecars have it.
    mesh.edit("mesh.yaml", "methods: [DELETE]", "paths: [/a]");
    mesh.wait_status("front", url, &[], 403);
    let report = explained();
    assert_eq!((&report["served"], &report["status"]), (&false.into(), &403.into()), "{report:#}");
    let source = &report["destinations"][0]["hop"]["filters"][0]["sources"][0];
    assert_eq!((&source["object"], &source["line"]), (&"AuthorizationPolicy shop/back".into(), &33.into()));
    // The page of the sidecar explains the same without the mesh, though the file has the former policy.
    let page = mesh.call("back", "http://127.0.0.1:15000/config_dump?include_eds", &[]).body;
    let dump = mesh.config().parent().unwrap().join("dump.json");
    fs::write(&dump, &page).unwrap();
    let of_file = ["-f", "shop.yaml", "--from", "front", url];
    let held = format!("back={}", dump.display());
    let (code, text, _) = explain_text(&of_file);
    assert_eq!(code, 0, "{text}");
    let (code, text, errors) = explain_text(&[&of_file[..], &["--config-dump", &held]].concat());
    assert!(code == 1 && text.contains("DENIES: rule ns[shop]-policy[back]-rule[0]"), "{text}{errors}");
    for wrong in ["back", "nobody=/dev/null", "back=/dev/null", "back=missing.json"] {
        let (code, _, errors) = explain_text(&[&of_file[..], &["--config-dump", wrong]].concat());
        assert!(code == 2 && errors.contains(&format!("--config-dump {wrong}")), "{errors}");
    }
    // An object that is refused keeps its last version, and the explanation says so.
    mesh.edit("mesh.yaml", "action: DENY", "action: REFUSE");
    let report = explained();
    assert!(report["errors"][0].as_str().unwrap_or_default().contains("spec.action"), "{report:#}");
    assert_eq!(report["status"], 403, "{report:#}");
}

/// `--control` explains what the control plane serves, for the pods that are connected to it: here an older version of a
/// policy than that of the file.
#[test]
fn a_control_plane_tells_what_it_serves() {
    let mesh = Setup::of_text(SKYSAIL, SHOP).ready();
    let url = "http://back/a";
    let mut forward = mesh.command(&["port-forward", "control", ":15014"]);
    let mut forward = forward.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(forward.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let control = line.split(' ').nth(2).unwrap().to_owned();
    let explained = |control: &str| -> (i32, Value, String) {
        let arguments =
            ["-f", "shop.yaml", "--control", control, "--from", "shop/front", url, "--output", "json"];
        let (code, text, errors) = explain_text(&arguments);
        (code, serde_json::from_str(&text).unwrap_or_default(), errors)
    };
    let (code, report, errors) = explained(&control);
    assert_eq!((code, &report["served"]), (0, &true.into()), "{report:#} {errors}");
    assert_eq!(report["notes"].as_array().map(Vec::len), Some(0), "{report:#}");
    let pod = &report["destinations"][0]["to"]["address"];
    assert_eq!(&mesh.status()["pods"][0]["address"], pod, "the address is the connected pod's");
    mesh.edit("mesh.yaml", "methods: [DELETE]", "paths: [/a]");
    mesh.wait_status("front", url, &[], 403);
    let (code, report, errors) = explained(&control);
    assert_eq!((code, &report["status"]), (1, &403.into()), "{report:#} {errors}");
    let source = &report["destinations"][0]["hop"]["filters"][0]["sources"][0];
    assert_eq!(source["object"], "AuthorizationPolicy shop/back", "{report:#}");
    // From elsewhere in the network, access is refused.
    let answer = mesh.call("front", "http://10.244.0.1:15014/debug/config_dump?proxyID=a.b", &[]);
    assert_eq!(answer.status, Some(401));
    forward.kill().unwrap();
    forward.wait().unwrap();
    let (code, _, errors) = explained(&control);
    assert!(code == 2 && errors.contains(&format!("--control {control}")), "{errors}");
}
