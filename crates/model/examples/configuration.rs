//! Work for `skysail bench instructions`: parses 1,000 services, or compiles them for a sidecar, N times.
//!
//! ```text
//! cargo run --release -p skysail-model --example configuration -- parse N
//! cargo run --release -p skysail-model --example configuration -- compile N
//! ```
//!
//! The functions are those that the control plane calls. What precedes the repetitions is the same for each N.

use std::{error::Error, fmt::Write as _, hint::black_box};

use serde_json::json;
use skysail_model::{
    ClientScope, Files, ProxyNode, World, api::kube::Locality, compile_own, compile_part, outline, parse,
    parts,
};

const SERVICES: u16 = 1_000;
const NAMESPACES: u16 = 10;
/// Name of the file in diagnostics.
const FILE: &str = "services.yaml";

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let work = arguments.next().unwrap_or_default();
    let times: u32 = arguments.next().unwrap_or_default().parse()?;
    let text = services()?;
    match &*work {
        "parse" => (0..times).for_each(|_| drop(black_box(parse(&text, FILE)))),
        "compile" => compile(&text, times)?,
        _ => return Err("usage: configuration parse|compile N".into()),
    }
    Ok(())
}

/// Compiles all resources of a sidecar.
fn compile(text: &str, times: u32) -> Result<(), Box<dyn Error>> {
    let (mut files, mut world) = (Files::new(), World::new());
    for change in files.take(0, FILE, parse(text, FILE)) {
        change.apply_to(&mut world);
    }
    world.take_changes();
    let metadata = json!({"NAMESPACE": "ns-0", "LABELS": {"app": "svc-0"}, "CLUSTER_ID": "Kubernetes"});
    let mut node = ProxyNode::parse(
        "sidecar~10.0.0.0~svc-0-0.ns-0~ns-0.svc.cluster.local",
        metadata,
        Locality::default(),
    )?;
    node.view.is_authenticated = true;
    let cluster = node.view.cluster_id.clone();
    world.identify(&mut node, &cluster)?;
    let scope = ClientScope::of(&node.view, &world.grouping());
    for _ in 0..times {
        for part in parts(&world, &scope) {
            black_box(compile_part(&world, &scope, &part));
        }
        black_box(compile_own(&world, &node.view, &outline(&world, &scope)));
    }
    Ok(())
}

/// Returns services with two endpoints each.
fn services() -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    for number in 0..SERVICES {
        let [high, low] = number.to_be_bytes();
        let (name, namespace) = (format!("svc-{number}"), format!("ns-{}", number % NAMESPACES));
        write!(
            text,
            "---
apiVersion: v1
kind: Service
metadata:
  name: {name}
  namespace: {namespace}
spec:
  clusterIP: 172.16.{high}.{low}
  selector:
    app: {name}
  ports:
  - name: http
    port: 80
    targetPort: 8080
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {name}-1
  namespace: {namespace}
  labels:
    kubernetes.io/service-name: {name}
addressType: IPv4
ports:
- name: http
  port: 8080
endpoints:
- addresses: [10.0.{high}.{low}]
- addresses: [10.1.{high}.{low}]
"
        )?;
    }
    Ok(text)
}
