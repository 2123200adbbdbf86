//! Traffic under constant change: pods are added and removed, certificates are renewed every few seconds, routes and
//! policies are edited. No request may fail, and no memory may grow.
//!
//! It takes a few seconds at a low rate, or as `SKYSAIL_SOAK_SECONDS` and `SKYSAIL_SOAK_RATE` (requests per second)
//! specify.

use std::{
    env,
    time::{Duration, Instant},
};

use serde_json::Value;
use skysail_testkit::{Mesh, Setup, eventually};

const STOCK: &str = "http://stock.shop/";

/// Lifetime of certificates; they are renewed before its end.
const TTL: &str = "--control-arg=--cert-ttl=10s";

/// Objects that are added and removed as a whole.
const MORE: &str = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: elsewhere, namespace: shop}
spec:
  hosts: [elsewhere.example]
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: STATIC
  endpoints: [{address: 192.0.2.1}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: nobody-deletes, namespace: shop}
spec:
  action: DENY
  rules: [{to: [{operation: {methods: [DELETE]}}]}]
";

/// Memory of a process that runs throughout, in KiB.
struct Memory {
    what: &'static str,
    process: Value,
    /// One value per round.
    resident: Vec<u64>,
}

impl Memory {
    fn look(&mut self, mesh: &Mesh) {
        let file = format!("/proc/{}/status", self.process);
        let status = mesh.run(&["exec", "front", "--", "grep", "RssAnon", &file]).stdout;
        let status = String::from_utf8_lossy(&status).into_owned();
        let number = status.split_whitespace().nth(1).and_then(|number| number.parse().ok());
        assert!(number.is_some(), "{} has ended: {status}", self.what);
        self.resident.extend::<Option<u64>>(number);
    }

    /// The last third of the rounds needs no more memory than the second third.
    fn assert_flat(&self) {
        println!("{}: {:?} KiB", self.what, self.resident);
        let third = self.resident.len() / 3;
        let max = |part: &[u64]| part.iter().copied().max().unwrap_or_default();
        let (before, after) = (max(&self.resident[third..2 * third]), max(&self.resident[2 * third..]));
        let grown = after.saturating_sub(before);
        assert!(third == 0 || grown < before / 10 + 1024, "{} grows: {:?} KiB", self.what, self.resident);
    }
}

#[test]
fn no_request_is_lost_under_constant_change() {
    let number = |name, usual: u64| env::var(name).map_or(usual, |text| text.parse().unwrap());
    let length = Duration::from_secs(number("SKYSAIL_SOAK_SECONDS", 5));
    let rate = number("SKYSAIL_SOAK_RATE", 300).to_string();

    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml"));
    let mesh = setup.with(&[TTL]).ready();
    mesh.wait_status("front", STOCK, &[], 200);
    mesh.wait_status("front", STOCK, &["-H", "x-want: v2"], 200);
    let status = mesh.status();
    let front = status["pods"].as_array().unwrap().iter().find(|pod| pod["workload"] == "front").unwrap();
    let proxy = front["programs"].as_array().unwrap().iter().find(|program| program["name"] == "proxy");
    let memory = |what, process: &Value| Memory { what, process: process.clone(), resident: Vec::new() };
    let mut memories = [
        memory("the client's sidecar", &proxy.unwrap()["process"]),
        memory("the control plane", &status["control"]),
    ];

    let load = mesh
        .load(front["name"].as_str().unwrap(), &[STOCK, "-c", "16", "--rate", &rate, "--count", "x-version"]);
    let (start, mut rounds) = (Instant::now(), 0);
    while rounds == 0 || start.elapsed() < length {
        change_everything(&mesh);
        memories.iter_mut().for_each(|memory| memory.look(&mesh));
        rounds += 1;
    }
    let report = load.finish();
    println!(
        "{rounds} rounds in {:?}: {} answers, the slowest after {} ms",
        start.elapsed(),
        report.answered,
        report.slowest_ms
    );
    report.assert_all_good();
    assert!(report.count("v1") > 0 && report.count("v2") > 0, "{report:?}");
    memories.iter().for_each(Memory::assert_flat);
}

/// One round, which ends in the state in which it started.
fn change_everything(mesh: &Mesh) {
    let edit = |from: &str, to: &str| mesh.edit("mesh.yaml", from, to);
    let ready = |workload: &str, count| {
        eventually("the pods are ready", || match mesh.pods(workload) {
            (ready, all) if ready == count && all == count => Ok(()),
            counts => Err(format!("{counts:?} of {workload}")),
        });
    };
    edit("replicas: 1 # stock-v1", "replicas: 3 # stock-v1");
    edit("replicas: 1 # front", "replicas: 2 # front");
    ready("stock-v1", 3);
    ready("front", 2);
    edit("weight: 100", "weight: 60");
    edit("weight: 0", "weight: 40");
    mesh.put("more.yaml", MORE);
    edit("replicas: 3 # stock-v1", "replicas: 1 # stock-v1");
    edit("replicas: 2 # front", "replicas: 1 # front");
    ready("stock-v1", 1);
    ready("front", 1);
    edit("weight: 40", "weight: 0");
    edit("weight: 60", "weight: 100");
    mesh.put("more.yaml", "");
}
