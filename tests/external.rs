//! Hosts of ServiceEntries in a mesh: they resolve, pods replace them, and each unresolved name has a reason.

use nix::unistd::Uid;
use skysail_testkit::{Mesh, Setup, eventually};

/// The example of the document, unchanged.
const DOCUMENT: &str = include_str!("../docs/external-hosts.md");

/// Hosts that cannot be reached, each for one reason, and a caller without a sidecar.
const UNREACHABLE: &str = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: real}
spec:
  hosts: [real.example]
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: DNS
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: none}
spec:
  hosts: [none.example, '*.wild.example']
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: NONE
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: hidden, namespace: other}
spec:
  hosts: [hidden.example]
  exportTo: ['.']
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: STATIC
  endpoints: [{address: 192.0.2.1}]
---
apiVersion: v1
kind: Pod
metadata: {name: stranger, labels: {sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: registry.example/stranger, ports: [{containerPort: 8080}]}]}
";

fn example() -> &'static str {
    DOCUMENT.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap_or_default()
}

/// Calls `url` until the pod of this name answers.
fn wait_answer(mesh: &Mesh, url: &str, pod: &str) -> serde_json::Value {
    eventually(&format!("{pod} answers to {url}"), || {
        let answer = mesh.call("front", url, &[]);
        match answer.status {
            Some(200) if answer.json()["pod"]["name"] == pod => Ok(answer.json()),
            _ => Err(format!("{answer:?}")),
        }
    })
}

/// Calls `url` until the response is the echo of the request's bytes, which is no HTTP.
fn wait_echo(mesh: &Mesh, url: &str) {
    eventually(&format!("the bytes come back from {url}"), || {
        let answer = mesh.call("front", url, &[]);
        match answer.body.contains("no status line") {
            true => Ok(()),
            false => Err(format!("{answer:?}")),
        }
    });
}

fn assert_unknown(mesh: &Mesh, from: &str, host: &str) {
    let answer = mesh.call(from, &format!("http://{host}/"), &[]);
    assert!(answer.status.is_none() && answer.body.contains("not known"), "{host}: {answer:?}");
}

#[test]
fn pods_replace_external_hosts() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), example()).ready();
    let http = wait_answer(&mesh, "http://api.example.com/", "api");
    assert!(http["headers"]["x-request-id"].is_string(), "the sidecar routes HTTP: {http:#}");
    wait_echo(&mesh, "http://api.example.com:443/");
    assert!(!mesh.output().contains("warning"), "{}", mesh.output());

    // A change of the entry takes effect at once, in DNS and in the sidecars.
    mesh.edit("mesh.yaml", "hosts: [api.example.com]", "hosts: [new.example.com]");
    wait_echo(&mesh, "http://new.example.com:443/");
    assert_unknown(&mesh, "front", "api.example.com");

    // A stand-in with a sidecar is called in plain text, because the entry is MESH_EXTERNAL.
    mesh.edit("mesh.yaml", ", sidecar.istio.io/inject: \"false\"", "");
    let report = eventually("the stand-in has a sidecar and is ready", || {
        let status = mesh.status();
        let pod = status["pods"].as_array().and_then(|pods| pods.iter().find(|pod| pod["name"] == "api"));
        match pod {
            Some(pod) if pod["sidecar"] == true && pod["ready"] == true => {
                Ok(wait_answer(&mesh, "http://new.example.com/", "api"))
            }
            other => Err(format!("{other:?}")),
        }
    });
    assert!(report["caller"].is_null(), "no certificate: {report:#}");
}

#[test]
fn a_host_without_an_answer_has_a_reason() {
    let text = format!("{}---{UNREACHABLE}", example());
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text);
    let mesh = if Uid::effective().is_root() { setup.as_user(65534) } else { setup }.ready();
    mesh.wait_status("front", "http://real.example/", &[], 503);
    mesh.wait_for_output("ServiceEntry default/real: real.example has no endpoints");
    // Each time, and not only as often as the kernel answers a pod by default.
    for _ in 0..10 {
        let refused = mesh.call("stranger", "http://192.0.2.1/", &["--max-time", "6"]);
        assert!(refused.body.contains("unreachable"), "not a timeout, though nothing is there: {refused:?}");
    }
    for (from, host, reason) in [
        ("front", "none.example", "with resolution NONE no address is allocated"),
        ("front", "x.wild.example", "*.wild.example of ServiceEntry default/none: a wildcard has no address"),
        ("front", "hidden.example", "spec.exportTo hides it from namespace default"),
        ("stranger", "api.example.com", "only pods with a sidecar can reach it"),
    ] {
        assert_unknown(&mesh, from, host);
        assert_unknown(&mesh, from, host);
        mesh.wait_for_output(reason);
        assert_eq!(mesh.output().matches(reason).count(), 1, "{}", mesh.output());
    }
}
