//! Connections that annotations exclude from interception: they reach Services as from a pod without a sidecar.

use skysail_testkit::{Mesh, Setup, eventually};

const URL: &str = "http://stock.shop/";

fn caller(name: &str, annotation: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, annotations: {{traffic.sidecar.istio.io/{annotation}}}}}\n\
         spec: {{containers: [{{name: web, image: registry.example/shop/{name}, ports: [{{containerPort: 8080}}]}}]}}\n"
    )
}

/// Calls until stock answers. Returns the caller's identity as stock reports it.
fn identity(mesh: &Mesh, from: &str) -> serde_json::Value {
    eventually(&format!("stock answers {from}"), || {
        let answer = mesh.call(from, URL, &[]);
        if answer.status == Some(200) {
            Ok(answer.json()["caller"].clone())
        } else {
            Err(format!("{answer:?}"))
        }
    })
}

#[test]
fn excluded_connections_reach_services_without_the_sidecar() {
    let shop = include_str!("shop.yaml").replace("mode: STRICT", "mode: PERMISSIVE");
    let callers = [
        ("by-port", "excludeOutboundPorts: '80,81'"),
        ("by-range", "excludeOutboundIPRanges: 10.96.0.0/16"),
        ("by-inclusion", "includeOutboundIPRanges: 192.0.2.0/24"),
        ("other-port", "excludeOutboundPorts: '9'"),
    ];
    let pods: String = callers.iter().map(|(name, annotation)| caller(name, annotation)).collect();
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &format!("{shop}{pods}")).ready();
    for (name, _) in &callers[..3] {
        assert!(identity(&mesh, name).is_null(), "{name} has no identity where its sidecar is bypassed");
    }
    assert!(identity(&mesh, "other-port").is_string());
    // A Service that is added later is known as well.
    let later = "apiVersion: v1\nkind: Service\nmetadata: {name: later, namespace: shop}\nspec: {selector: {app: stock}, ports: [{name: http, port: 81, targetPort: 9090}]}\n";
    mesh.put("later.yaml", later);
    mesh.wait_status("by-port", "http://later.shop:81/", &[], 200);
    // Where the server requires mutual TLS, its log names each refused connection.
    mesh.edit("mesh.yaml", "mode: PERMISSIVE", "mode: STRICT");
    eventually("a refused connection is logged", || {
        mesh.call("by-port", URL, &[]);
        let log = mesh.run(&["logs", "stock-v1", "-c", "proxy"]);
        let log = String::from_utf8_lossy(&log.stdout).into_owned();
        if log.contains(" NR filter_chain_not_found ") { Ok(()) } else { Err(log) }
    });
    let log = mesh.run(&["logs", "stock-v1", "-c", "proxy"]);
    let log = String::from_utf8_lossy(&log.stdout);
    assert!(!log.contains(" WARN "), "{log}");
}

/// A Sidecar without the host that its workload calls.
const ELSEWHERE: &str = "
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: limited, namespace: shop}
spec:
  workloadSelector: {labels: {app: limited}}
  egress: [{hosts: ['./nothing.shop.svc.cluster.local']}]
---
apiVersion: v1
kind: Pod
metadata: {name: limited, namespace: shop, labels: {app: limited}}
spec: {containers: [{name: web, image: registry.example/shop/limited, ports: [{containerPort: 8080}]}]}
";

#[test]
fn connections_that_sidecars_pass_through_reach_services() {
    let shop = include_str!("shop.yaml").replace("mode: STRICT", "mode: PERMISSIVE");
    // The rules for all of these are one batch.
    let others: String = (0..1_000)
        .map(|number| {
            format!(
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{number}, namespace: shop}}\n\
                 spec: {{selector: {{app: stock}}, ports: [{{name: http, port: 80, targetPort: 9090}}]}}\n"
            )
        })
        .collect();
    let text = format!("{shop}{ELSEWHERE}{others}");
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready();
    // The sidecar does not know the host, and dials the address of the Service.
    assert!(identity(&mesh, "limited").is_null());
    assert!(identity(&mesh, "front").is_string());
    assert!(!mesh.output().contains("do not reach Services"), "{}", mesh.output());
}
