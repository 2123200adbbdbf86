//! ProxyConfigs and the mesh configuration set how sidecars start.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use serde_json::Value;
use skysail_testkit::{Mesh, Setup};

const MESH: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    defaultConfig:
      proxyMetadata: {ISTIO_META_FROM_MESH: "1", ISTIO_META_LEVEL: mesh}
---
apiVersion: networking.istio.io/v1beta1
kind: ProxyConfig
metadata: {name: default, namespace: istio-system}
spec: {concurrency: 2}
---
apiVersion: networking.istio.io/v1beta1
kind: ProxyConfig
metadata: {name: web, namespace: shop}
spec:
  selector: {matchLabels: {app: web}}
  concurrency: 3
  environmentVariables: {ISTIO_META_LEVEL: workload}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}, annotations: {proxy.istio.io/config: "concurrency: 4"}}
spec: {containers: [{name: c, image: registry.example/web}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: shop, labels: {app: db}, annotations: {proxy.istio.io/config: "concurrency: 4"}}
spec: {containers: [{name: c, image: registry.example/db}]}
---
apiVersion: v1
kind: Pod
metadata: {name: front, namespace: shop, labels: {app: front}}
spec: {containers: [{name: c, image: registry.example/front}]}
"#;

/// Returns what the sidecar of a pod says about itself.
fn info(mesh: &Mesh, pod: &str) -> Value {
    let answer = mesh.call(pod, "http://localhost:15000/server_info", &[]);
    assert_eq!(answer.status, Some(200), "{answer:?}");
    answer.json()
}

#[test]
fn sidecars_start_with_the_most_specific_settings() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).ready();
    for (pod, workers, level) in [("web", 3, "workload"), ("db", 4, "mesh"), ("front", 2, "mesh")] {
        let info = info(&mesh, pod);
        assert_eq!(info["command_line_options"]["concurrency"], workers, "{pod}: {info:#}");
        let metadata = &info["node"]["metadata"];
        assert_eq!((&metadata["FROM_MESH"], &metadata["LEVEL"]), (&"1".into(), &level.into()), "{pod}");
    }
    assert!(!mesh.output().contains("ProxyConfig"), "no warning: {}", mesh.output());
}
