//! Injected pods are objects that a real API server accepts. The webhooks inject them there, and validate objects.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Lines, Write as _},
    process::{Child, ChildStderr, Command, Stdio},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use skysail_testkit::{cached, eventually};

use crate::cluster::Cluster;

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");
const IMAGE: &str = "registry.example/skysail-proxy:1";

/// Returns a pod that passes the "restricted" pod security standard.
fn pod() -> Value {
    json!({
        "metadata": { "labels": { "app": "web" } },
        "spec": {
            "securityContext": { "runAsNonRoot": true, "runAsUser": 1000,
                                 "seccompProfile": { "type": "RuntimeDefault" } },
            "containers": [{
                "name": "web", "image": "registry.example/web:1",
                "ports": [{ "name": "http", "containerPort": 8080 }],
                "readinessProbe": { "httpGet": { "port": "http", "path": "/" } },
                "livenessProbe": { "grpc": { "port": 9000 } },
                "startupProbe": { "tcpSocket": { "port": "http" } },
                "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
            }],
        },
    })
}

/// Returns a workload of each kind.
fn workloads() -> Vec<Value> {
    let selector = json!({ "matchLabels": { "app": "web" } });
    let mut job = pod();
    job["spec"]["restartPolicy"] = "Never".into();
    let apps = |kind: &str| {
        json!({ "apiVersion": "apps/v1", "kind": kind, "metadata": { "name": "web" },
                "spec": { "selector": selector, "template": pod() } })
    };
    let mut stateful = apps("StatefulSet");
    stateful["spec"]["serviceName"] = "web".into();
    let mut alone = pod();
    alone["apiVersion"] = "v1".into();
    alone["kind"] = "Pod".into();
    alone["metadata"]["name"] = "web".into();
    vec![
        apps("Deployment"),
        stateful,
        apps("DaemonSet"),
        apps("ReplicaSet"),
        json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "web" },
                "spec": { "template": job } }),
        json!({ "apiVersion": "batch/v1", "kind": "CronJob", "metadata": { "name": "web" },
                "spec": { "schedule": "0 0 * * *", "jobTemplate": { "spec": { "template": job } } } }),
        json!({ "apiVersion": "v1", "kind": "ReplicationController", "metadata": { "name": "web" },
                "spec": { "selector": { "app": "web" }, "template": pod() } }),
        json!({ "apiVersion": "v1", "kind": "List", "items": [apps("Deployment")] }),
        alone,
    ]
}

/// Runs `skysail inject` on standard input.
fn inject(input: &str, options: &[&str]) -> String {
    let mut child = Command::new(SKYSAIL)
        .args(["inject", "--image", IMAGE, "--filename", "-"])
        .args(options)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_api_server_accepts_every_kind_of_injected_workload() {
    let Some(cluster) = Cluster::start(&["pod-security.kubernetes.io/enforce=privileged"]) else { return };
    for annotations in [
        json!({}),
        json!({ "sidecar.istio.io/nativeSidecar": "false" }),
        json!({ "sidecar.istio.io/capNetBindService": "true" }),
        json!({ "sidecar.istio.io/proxyCPULimit": "1", "sidecar.istio.io/userVolume": "{\"a\": {\"emptyDir\": {}}}",
                "sidecar.istio.io/userVolumeMount": "{\"a\": {\"mountPath\": \"/a\"}}" }),
    ] {
        for workload in workloads() {
            let mut text = workload.to_string();
            // The annotations of the pod; a workload has none of its own.
            text = text.replace(
                "{\"labels\":{\"app\":\"web\"}",
                &format!("{{\"annotations\":{annotations},\"labels\":{{\"app\":\"web\"}}"),
            );
            let injected = inject(&text, &[]);
            assert!(injected.contains("name: istio-proxy"), "{injected}");
            cluster.done(&["apply", "--dry-run=server", "--validate=strict", "-f", "-"], &injected);
        }
    }
}

#[test]
fn with_a_cni_plugin_an_injected_pod_passes_the_restricted_standard() {
    let Some(cluster) = Cluster::start(&["pod-security.kubernetes.io/enforce=restricted"]) else { return };
    let pod = workloads().pop().unwrap().to_string();
    let apply = ["apply", "--dry-run=server", "-f", "-"];
    for options in [&["--interception", "cni"][..], &["--interception", "cni", "--cluster-id", "east"]] {
        cluster.done(&apply, &inject(&pod, options));
    }
    let refused = cluster.kubectl(&apply, &inject(&pod, &[]));
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("violates PodSecurity") && message.contains("istio-init"), "{message}");
    assert!(!message.contains("istio-proxy"), "only the init container has capabilities: {message}");
}

/// A control plane with the webhook, and the configuration that leads the API server to it.
struct Webhook {
    child: Child,
    /// Log, which the control plane can write until the end.
    _log: Lines<BufReader<ChildStderr>>,
    folder: tempfile::TempDir,
    address: String,
}

impl Webhook {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        fs::create_dir(path("config")).unwrap();
        let host = env::var("SKYSAIL_KUBE_HOST").unwrap_or_else(|_| "127.0.0.1".to_owned());
        let mut child = Command::new(SKYSAIL)
            .args(["control", "--listen", &host, "--tls-port", "0", "--admin-port", "0", "--log-json"])
            .args(["--config", &path("config"), "--ca-dir", &path("ca")])
            .args(["--injection-port", "0", "--injection-image", IMAGE])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            if line["fields"]["message"] == "serving sidecar injection (TLS)" {
                break line["fields"]["address"].as_str().unwrap().to_owned();
            }
        };
        Self { child, _log: lines, folder, address }
    }

    /// Returns a configuration of this kind, for the objects of a group in a namespace.
    fn configuration(
        &self,
        cluster: &Cluster,
        kind: &str,
        path: &str,
        (group, resource): (&str, &str),
    ) -> Value {
        let root = fs::read(self.folder.path().join("ca/root-cert.pem")).unwrap();
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": { "name": cluster.namespace },
            "webhooks": [{
                "name": "namespace.sidecar-injector.istio.io",
                "clientConfig": { "url": format!("https://{}{path}", self.address), "caBundle": STANDARD.encode(&root) },
                "rules": [{ "operations": ["CREATE", "UPDATE"], "apiGroups": [group], "apiVersions": ["*"],
                            "resources": [resource] }],
                "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": cluster.namespace } },
                "sideEffects": "None", "failurePolicy": "Fail", "admissionReviewVersions": ["v1"],
            }],
        })
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_webhook_injects_the_pods_of_a_cluster() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    let webhook = Webhook::start();
    let pods = ("", "pods");
    let configuration = webhook.configuration(&cluster, "MutatingWebhookConfiguration", "/inject", pods);
    cluster.done(&["create", "-f", "-"], &configuration.to_string());
    let checked = std::panic::catch_unwind(|| {
        let mut pod = workloads().pop().unwrap();
        // The API server applies a new configuration within a moment; until then it admits pods without the webhook.
        let created: Value = loop {
            let made =
                cluster.done(&["create", "--dry-run=server", "-o", "json", "-f", "-"], &pod.to_string());
            let made: Value = serde_json::from_str(&made).unwrap();
            if made["spec"]["initContainers"].is_array() {
                break made;
            }
        };
        assert_eq!(created["spec"]["initContainers"][1]["image"], IMAGE);
        assert_eq!(created["metadata"]["labels"]["service.istio.io/canonical-name"], "web");
        // The API server adds the token of each container; the sidecar has it too.
        let text = created.to_string();
        assert!(text.contains("/app-health/web/readyz") && text.contains("istio-ca-root-cert"), "{text}");

        pod["metadata"]["annotations"] = json!({ "sidecar.istio.io/proxyCPU": "much" });
        let refused = cluster.kubectl(&["create", "--dry-run=server", "-f", "-"], &pod.to_string());
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && message.contains("\"much\" is not a quantity"), "{message}");
        pod["metadata"]["annotations"] = json!({ "sidecar.istio.io/enableCoreDump": "true" });
        let warned = cluster.kubectl(&["create", "--dry-run=server", "-f", "-"], &pod.to_string());
        let message = String::from_utf8_lossy(&warned.stderr).into_owned();
        assert!(message.contains("enableCoreDump has no effect"), "{message}");
    });
    cluster.done(&["delete", "mutatingwebhookconfiguration", &cluster.namespace], "");
    if let Err(panic) = checked {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn the_webhook_refuses_objects_with_errors() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    let definitions = cached("pilot-agent-eed52ebb66ad/crd-all.gen.yaml");
    cluster.done(&["apply", "--server-side", "--force-conflicts", "-f", definitions.to_str().unwrap()], "");
    let rule = |weights: [u32; 2]| {
        let routes = weights.map(|weight| json!({ "destination": { "host": "shop" }, "weight": weight }));
        json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService", "metadata": { "name": "shop" },
                "spec": { "hosts": ["shop"], "http": [{ "route": routes }] } })
        .to_string()
    };
    let (good, bad) = (rule([90, 10]), rule([0, 0]));
    // The definition of the kind does not refuse it.
    cluster.done(&["create", "--dry-run=server", "-f", "-"], &bad);
    let webhook = Webhook::start();
    let rules = ("networking.istio.io", "virtualservices");
    let configuration = webhook.configuration(&cluster, "ValidatingWebhookConfiguration", "/validate", rules);
    cluster.done(&["create", "-f", "-"], &configuration.to_string());
    let checked = std::panic::catch_unwind(|| {
        // The API server applies a new configuration within a moment.
        let message = eventually("the webhook refuses the object", || {
            let refused = cluster.kubectl(&["create", "--dry-run=server", "-f", "-"], &bad);
            let message = String::from_utf8_lossy(&refused.stderr).into_owned();
            if message.contains("[SKY") { Ok(message) } else { Err(message) }
        });
        assert!(message.contains("spec.http[0].route"), "{message}");
        cluster.done(&["create", "-f", "-"], &good);
        let refused = cluster.kubectl(&["replace", "-f", "-"], &bad);
        assert!(!refused.status.success(), "a change is validated too");
        cluster.done(&["delete", "virtualservice/shop"], "");
    });
    cluster.done(&["delete", "validatingwebhookconfiguration", &cluster.namespace], "");
    if let Err(panic) = checked {
        std::panic::resume_unwind(panic);
    }
}
