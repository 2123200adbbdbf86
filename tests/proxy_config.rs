//! ProxyConfigs and the mesh configuration set how sidecars start.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

use std::path::Path;

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

/// The workloads `envoys` have a real Envoy.
fn starts_with_settings(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).with_envoys(envoys).ready();
    for (pod, workers, level) in [("web", 3, "workload"), ("db", 4, "mesh"), ("front", 2, "mesh")] {
        let info = info(&mesh, pod);
        assert_eq!(info["command_line_options"]["concurrency"], workers, "{pod}: {info:#}");
        let metadata = &info["node"]["metadata"];
        assert_eq!((&metadata["FROM_MESH"], &metadata["LEVEL"]), (&"1".into(), &level.into()), "{pod}");
    }
    assert!(!mesh.output().contains("ProxyConfig"), "no warning: {}", mesh.output());
}

#[test]
fn sidecars_start_with_the_most_specific_settings() {
    starts_with_settings(&[]);
}

#[test]
fn envoys_start_with_the_most_specific_settings() {
    starts_with_settings(&["shop/web", "shop/db", "shop/front"]);
}

const STARTS: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    defaultConfig: {terminationDrainDuration: 7s, interceptionMode: NONE, holdApplicationUntilProxyStarts: true}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}, annotations: {sidecar.istio.io/interceptionMode: REDIRECT}}
spec: {containers: [{name: c, image: registry.example/web, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: free, namespace: shop, labels: {app: free}}
spec: {containers: [{name: c, image: registry.example/free}]}
---
apiVersion: v1
kind: Pod
metadata:
  name: back
  namespace: shop
  labels: {app: back}
  annotations: {proxy.istio.io/config: "{interceptionMode: REDIRECT, terminationDrainDuration: 9s}"}
spec: {containers: [{name: c, image: registry.example/back}]}
"#;

/// Returns the drain time with which the sidecar of a pod was started.
fn drain_seconds(mesh: &Mesh, pod: &str) -> Option<String> {
    let (folder, node) = (mesh.run_folder(), format!("pods/shop/{pod}/node.json"));
    let is_it = |argument: &str| Path::new(argument).starts_with(&folder) && argument.ends_with(&node);
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    let mut lines = lines.map(|line| String::from_utf8_lossy(&line).into_owned());
    let line = lines.find(|line| line.split('\0').any(is_it))?;
    let mut arguments = line.split('\0').skip_while(|argument| *argument != "--drain-seconds");
    arguments.nth(1).map(str::to_owned)
}

/// The workloads `envoys` have a real Envoy.
fn applies_settings(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), STARTS).with_envoys(envoys).ready();
    for (pod, mode, drain) in [("web", "REDIRECT", "7"), ("free", "NONE", "7"), ("back", "REDIRECT", "9")] {
        let info = info(&mesh, pod);
        assert_eq!(info["node"]["metadata"]["INTERCEPTION_MODE"], mode, "{pod}: {info:#}");
        assert_eq!(drain_seconds(&mesh, pod).as_deref(), Some(drain), "{pod}");
        let answer = mesh.call(pod, "http://web.shop/", &[]);
        assert_eq!(answer.status, Some(200), "{pod}: {answer:?}");
        let caller = &answer.json()["headers"]["x-forwarded-client-cert"];
        assert_eq!(caller.is_string(), mode == "REDIRECT", "{pod}: {answer:?}");
    }
}

#[test]
fn settings_of_starts_are_applied() {
    applies_settings(&[]);
}

#[test]
fn settings_of_starts_are_applied_to_envoys() {
    applies_settings(&["shop/web", "shop/free", "shop/back"]);
}

const IDLE: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp, port: 82, targetPort: 8082}]}
---
apiVersion: v1
kind: Service
metadata: {name: idle, namespace: shop}
spec: {selector: {app: idle}, ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp, port: 82, targetPort: 8082}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {containers: [{name: c, image: registry.example/web, ports: [{containerPort: 8080}, {containerPort: 8082}]}]}
---
apiVersion: v1
kind: Pod
metadata:
  name: idle
  namespace: shop
  labels: {app: idle}
  annotations: {proxy.istio.io/config: "proxyMetadata: {ISTIO_META_IDLE_TIMEOUT: 500ms}"}
spec: {containers: [{name: c, image: registry.example/idle, ports: [{containerPort: 8080}, {containerPort: 8082}]}]}
"#;

/// Returns whether a connection without traffic is closed within the time, in seconds. A request precedes on port 80.
fn is_closed(mesh: &Mesh, pod: &str, host: &str, port: u16, seconds: &str) -> bool {
    let request = if port == 80 {
        format!("printf 'GET / HTTP/1.1\\r\\nhost: {host}\\r\\n\\r\\n' >&3;")
    } else {
        String::new()
    };
    let script = format!("exec 3<>/dev/tcp/{host}/{port}; {request} cat <&3");
    let output = mesh.run(&["exec", pod, "--", "timeout", seconds, "bash", "-c", &script]);
    match output.status.code() {
        Some(0) => true,
        Some(124) => false,
        _ => panic!("{pod} {host}:{port}: {output:?}"),
    }
}

#[test]
fn an_idle_timeout_closes_connections_that_the_sidecar_accepts() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), IDLE).ready();
    assert!(is_closed(&mesh, "idle", "web", 80, "60"), "HTTP");
    assert!(is_closed(&mesh, "idle", "web", 82, "60"), "outbound TCP");
    assert!(is_closed(&mesh, "web", "idle", 82, "60"), "inbound TCP");
    // Within this time a sidecar without the setting closes no connection.
    assert!(!is_closed(&mesh, "web", "web.shop", 82, "3"));
}
