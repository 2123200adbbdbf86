//! The mesh's root is replaced while workloads call each other, each time over a new connection. No call fails at any
//! step, and in the end no proxy trusts the former root.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end the test")]

use serde_json::Value;
use skysail_testkit::{Load, Mesh, Setup, eventually};

const STOCK: &str = "http://stock.shop/";

/// Lifetime of certificates; a step lasts a little longer.
const TTL: &str = "--control-arg=--cert-ttl=10s";

/// Mutual TLS only.
const STRICT: &str = "
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: shop}
spec: {mtls: {mode: STRICT}}
";

/// A handshake for each request.
const HANDSHAKES: &str = "  trafficPolicy: {connectionPool: {http: {maxRequestsPerConnection: 1}}}\n";

/// Returns the authority in JSON output.
fn authority(mesh: &Mesh, verb: &str) -> Value {
    let output = mesh.run(&["ca", verb, "--output", "json"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
}

/// Returns the serial numbers of the roots with this property.
fn serials(status: &Value, what: &str) -> Vec<String> {
    let roots = status["roots"].as_array().unwrap().iter().filter(|root| root[what] == true);
    roots.map(|root| root["serial"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_root_is_replaced_and_no_call_fails() {
    let shop = include_str!("shop.yaml");
    let every = shop.replacen("  host: stock\n", &format!("  host: stock\n{HANDSHAKES}"), 1);
    assert_ne!(shop, every);
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &(every + STRICT));
    let mesh = setup.with(&[TTL]).ready();
    mesh.wait_status("front", STOCK, &[], 200);

    let before = authority(&mesh, "status");
    assert_eq!((before["kind"].as_str(), before["step"].as_str()), (Some("self-signed"), Some("settled")));
    let old = serials(&before, "signs");
    assert_eq!((old.len(), serials(&before, "trusted")), (1, old.clone()));

    let load = mesh.load("front", &[STOCK, "-c", "4", "--rate", "60"]);
    load.wait_more(50);
    let begun = authority(&mesh, "rotate");
    assert_eq!((begun["step"].as_str(), serials(&begun, "signs")), (Some("distribute"), old.clone()));
    let again = mesh.run(&["ca", "rotate"]);
    assert!(
        !again.status.success() && String::from_utf8_lossy(&again.stderr).contains("already"),
        "{again:?}"
    );

    let issue = until(&mesh, "issue");
    let new = serials(&issue, "signs");
    assert!(new != old && serials(&issue, "trusted").len() == 2, "{issue}");
    calls(&load);
    let retire = until(&mesh, "retire");
    assert_eq!((serials(&retire, "signs"), serials(&retire, "trusted")), (new.clone(), new));
    calls(&load);
    let settled = until(&mesh, "settled");
    assert_eq!(settled["roots"].as_array().unwrap().len(), 1, "{settled}");
    calls(&load);

    let report = load.finish();
    println!("{} answers, the slowest after {} ms", report.answered, report.slowest_ms);
    report.assert_all_good();
    let trusted = std::fs::read_to_string(mesh.run_folder().join("config/ca/root-cert.pem")).unwrap();
    assert_eq!(trusted.matches("BEGIN CERTIFICATE").count(), 1);
}

fn calls(load: &Load) {
    load.wait_more(50);
}

/// Waits for a step.
fn until(mesh: &Mesh, step: &str) -> Value {
    eventually(&format!("the step {step}"), || {
        let status = authority(mesh, "status");
        if status["step"] == step { Ok(status) } else { Err(status.to_string()) }
    })
}
