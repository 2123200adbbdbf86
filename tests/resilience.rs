//! Failures that no client notices: an end of the control plane, and the expiry of certificates.

use serde_json::Value;
use skysail_testkit::{Mesh, Setup, eventually};

const STOCK: &str = "http://stock.shop/";

fn shop(arguments: &[&str]) -> Mesh {
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml"));
    let mesh = setup.with(arguments).ready();
    mesh.wait_status("front", STOCK, &[], 200);
    mesh.wait_status("front", STOCK, &["-H", "x-want: v2"], 200);
    mesh
}

#[test]
fn traffic_survives_a_restart_of_the_control_plane() {
    let mesh = shop(&[]);
    let load = mesh.load("front", &[STOCK, "-c", "4", "--rate", "300", "--count", "x-version"]);
    load.wait_more(100);
    for signal in ["KILL", "TERM", "KILL"] {
        let old = mesh.status()["control"].clone();
        let kill = mesh.run(&["exec", "front", "--", "sh", "-c", &format!("kill -{signal} {old}")]);
        assert!(kill.status.success(), "{kill:?}");
        load.wait_more(100);
        eventually("another control plane runs", || match mesh.status()["control"].clone() {
            Value::Null => Err("none runs".to_owned()),
            new if new == old => Err("the old one runs".to_owned()),
            _ => Ok(()),
        });
    }
    // The new one knows its sidecars, and they know it: an edit arrives, and a new pod gets its certificate.
    mesh.edit("mesh.yaml", "replicas: 1 # stock-v1", "replicas: 2 # stock-v1");
    mesh.edit("mesh.yaml", "weight: 0", "weight: 50");
    mesh.edit("mesh.yaml", "weight: 100", "weight: 50");
    load.wait("the edit arrives", |report| report.count("v2") >= 50);
    eventually("the new pod is ready", || match mesh.pods("stock-v1") {
        (2, 2) => Ok(()),
        counts => Err(format!("{counts:?}")),
    });
    load.finish().assert_all_good();
}

#[test]
fn certificates_are_renewed_under_load() {
    let mesh = shop(&["--control-arg=--cert-ttl=6s"]);
    let load = mesh.load("front", &[STOCK, "-c", "4", "--rate", "300"]);
    let issued = || {
        let log = mesh.run(&["logs", "control"]);
        String::from_utf8_lossy(&log.stdout).matches("certificate issued").count()
    };
    // Three sidecars; after this number, each of them has renewed its certificate twice.
    eventually("all certificates are renewed", || match issued() {
        15.. => Ok(()),
        count => Err(format!("{count} certificates")),
    });
    // The connections are older than the certificates. New pods on both sides make new ones with the present
    // certificates.
    mesh.edit("mesh.yaml", "replicas: 1 # front", "replicas: 2 # front");
    mesh.edit("mesh.yaml", "replicas: 1 # stock-v1", "replicas: 2 # stock-v1");
    for workload in ["front", "stock-v1"] {
        eventually("the new pods are ready", || match mesh.pods(workload) {
            (2, 2) => Ok(()),
            counts => Err(format!("{counts:?}")),
        });
    }
    let status = mesh.status();
    let fronts = status["pods"].as_array().unwrap().iter().filter(|pod| pod["workload"] == "front");
    for front in fronts {
        let name = front["name"].as_str().unwrap();
        mesh.wait_status(name, STOCK, &[], 200);
        for _ in 0..10 {
            let answer = mesh.call(name, STOCK, &[]);
            assert_eq!(answer.json()["caller"], "spiffe://cluster.local/ns/shop/sa/default", "{answer:?}");
        }
    }
    load.wait_more(100);
    load.finish().assert_all_good();
}

/// A sidecar or a program that is killed loses its requests, but not the pod.
#[test]
fn killed_programs_of_a_pod_are_restarted() {
    let mesh = shop(&[]);
    for program in ["proxy", "stock"] {
        let process = |mesh: &Mesh| {
            let status = mesh.status();
            let mut pods = status["pods"].as_array().into_iter().flatten();
            let pod = pods.find(|pod| pod["workload"] == "stock-v1").cloned().unwrap_or_default();
            let mut programs = pod["programs"].as_array().into_iter().flatten();
            programs.find(|found| found["name"] == program).map(|found| found["process"].clone())
        };
        let old = process(&mesh).unwrap_or_default();
        let kill = mesh.run(&["exec", "stock-v1", "--", "sh", "-c", &format!("kill -KILL {old}")]);
        assert!(kill.status.success(), "{kill:?}");
        eventually("it runs again", || match process(&mesh) {
            Some(new) if new.is_u64() && new != old => Ok(()),
            other => Err(format!("{other:?}")),
        });
        mesh.wait_for_output(&format!("{program} exited"));
        mesh.wait_status("front", STOCK, &[], 200);
        let report = mesh.load("front", &[STOCK, "-n", "200"]).finish();
        report.assert_all_good();
    }
}
