//! Traffic between injected pods. The nodes need the images of `skysail image`, also that of `--program skysail`, in the
//! registry that `SKYSAIL_IMAGE_REGISTRY` names. Without it, the test says that it is skipped.

use std::env;

use skysail_testkit::cached;

use crate::{cluster::Cluster, install::Mesh};

/// An echo server with two pods, which accepts mutual TLS only.
const SERVER: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: { name: server }
spec:
  replicas: 2
  selector: { matchLabels: { app: server } }
  template:
    metadata: { labels: { app: server } }
    spec:
      containers:
        - name: echo
          image: IMAGE
          args: [workload, echo, --port, '8080']
          ports: [{ name: web, containerPort: 8080 }]
          readinessProbe: { httpGet: { port: web, path: / }, periodSeconds: 1 }
          livenessProbe: { tcpSocket: { port: web } }
---
apiVersion: v1
kind: Service
metadata: { name: server }
spec:
  selector: { app: server }
  ports: [{ name: http, port: 80, targetPort: web }]
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: { name: strict }
spec: { mtls: { mode: STRICT } }
";
/// A Job that sends requests. It is complete when both its program and its sidecar have ended.
const CLIENT: &str = "
apiVersion: batch/v1
kind: Job
metadata: { name: client }
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers:
        - { name: load, image: IMAGE, args: [load, '-n', '20', '-c', '2', 'http://server.NAMESPACE/'] }
";

/// Runs the client in a namespace. Returns its output when the Job has this condition.
fn run_client(cluster: &Cluster, text: &str, condition: &str) -> String {
    cluster.done(&["apply", "-f", "-"], text);
    let wait = format!("--for=condition={condition}");
    cluster.done(&["wait", "job/client", &wait, "--timeout=120s"], "");
    cluster.done(&["logs", "job/client", "-c", "load"], "")
}

#[test]
fn injected_pods_speak_mutual_tls_and_jobs_end() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    let Ok(registry) = env::var("SKYSAIL_IMAGE_REGISTRY") else {
        eprintln!("SKIPPED: SKYSAIL_IMAGE_REGISTRY names no registry with the images of this version");
        return;
    };
    let definitions = cached("pilot-agent-eed52ebb66ad/crd-all.gen.yaml");
    let definitions = definitions.to_str().unwrap();
    mesh.cluster.done(&["apply", "--server-side", "--force-conflicts", "-f", definitions], "");
    mesh.done("install", &["--image-registry", &registry, "--replicas", "1", "--timeout", "120s"]);

    let inside = Cluster::start(&[&format!("istio.io/rev={}", mesh.revision)]).unwrap();
    let image = format!("{registry}/skysail:{}", env!("CARGO_PKG_VERSION"));
    let text = |text: &str| text.replace("IMAGE", &image).replace("NAMESPACE", &inside.namespace);
    inside.done(&["apply", "-f", "-"], &text(SERVER));
    inside.done(&["rollout", "status", "deployment/server", "--timeout=120s"], "");
    let pods = inside.done(&["get", "pods", "-o", "jsonpath={.items[*].spec.initContainers[*].name}"], "");
    assert_eq!(pods, "istio-init istio-proxy istio-init istio-proxy");
    let output = run_client(&inside, &text(CLIENT), "complete");
    assert!(output.contains("200: 20"), "{output}");

    // A pod without a sidecar speaks plain text.
    let outside = Cluster::start(&[]).unwrap();
    let output = run_client(&outside, &text(CLIENT), "failed");
    assert!(output.contains("the first request to"), "{output}");
}
