//! The control plane's Deployment, its Service, and what decides about the number of its pods.

use serde_json::{Value, json};
use skysail_core::names::{CONTROL_ADMIN_PORT, DISCOVERY_PLAIN_PORT, DISCOVERY_TLS_PORT};

use super::{APP, ISTIOD, labels, selector};
use crate::{
    object::{Object, ObjectKind},
    settings::Installation,
};

/// Port of the webhook in the pod. The Service has it on the port that Istio's Service has it on.
const WEBHOOK_PORT: u16 = 15_017;
const WEBHOOK_SERVICE_PORT: u16 = 443;
/// User and group of the control plane. It is not the sidecars' user, whose connections are never intercepted: the control
/// plane warns about pods of that user.
const USER: u32 = 65_532;
/// Folder of the state that survives a restart of the container.
const STATE_FOLDER: &str = "/var/lib/skysail";
/// Requests for resources. 2,000 sidecars cost 114 MB (docs/performance.md).
const CPU: &str = "100m";
const MEMORY: &str = "128Mi";
/// Limits of the HorizontalPodAutoscaler, and its target in percent of [`CPU`]: some cores at the most.
const MIN_REPLICAS: u32 = 1;
const MAX_REPLICAS: u32 = 5;
const CPU_TARGET: u32 = 80;
/// Seconds in which Services stop to send connections to a pod that ends.
const REMOVAL_SECONDS: u32 = 5;

/// Returns the Service, the Deployment, the PodDisruptionBudget and, without a fixed number of replicas, the
/// HorizontalPodAutoscaler.
pub(super) fn objects(installation: &Installation) -> Vec<Object> {
    let target = &installation.target;
    let (name, namespace) = (&target.name(), &target.namespace);
    let mut labels = labels(target);
    labels[APP] = ISTIOD.into();
    let object = |kind, name: &str, spec: Value| {
        Object::new(kind, namespace, name, json!({ "metadata": { "labels": labels }, "spec": spec }))
    };
    // The budget is also right for one replica: it can be evicted.
    let budget = json!({ "maxUnavailable": 1, "selector": { "matchLabels": selector(target) } });
    let mut objects = vec![
        object(ObjectKind::SERVICE, &target.service(), service(installation)),
        object(ObjectKind::DEPLOYMENT, name, deployment(installation, &labels)),
        object(ObjectKind::DISRUPTION_BUDGET, name, budget),
    ];
    if installation.replicas.is_none() {
        let cpu =
            json!({ "name": "cpu", "target": { "type": "Utilization", "averageUtilization": CPU_TARGET } });
        let spec = json!({
            "scaleTargetRef": { "apiVersion": "apps/v1", "kind": "Deployment", "name": name },
            "minReplicas": MIN_REPLICAS,
            "maxReplicas": MAX_REPLICAS,
            "metrics": [{ "type": "Resource", "resource": cpu }],
        });
        objects.push(object(ObjectKind::AUTOSCALER, name, spec));
    }
    objects
}

/// Returns the spec of the Service. Names and ports are those of Istio's.
fn service(installation: &Installation) -> Value {
    let port = |name: &str, port: u16, target: u16| json!({ "name": name, "port": port, "targetPort": target, "protocol": "TCP" });
    let mut ports = vec![
        port("https-dns", DISCOVERY_TLS_PORT, DISCOVERY_TLS_PORT),
        port("https-webhook", WEBHOOK_SERVICE_PORT, WEBHOOK_PORT),
        port("http-monitoring", CONTROL_ADMIN_PORT, CONTROL_ADMIN_PORT),
    ];
    if let Some(plain) = installation.plain_port {
        ports.push(port("grpc-xds", DISCOVERY_PLAIN_PORT, plain));
    }
    json!({ "ports": ports, "selector": selector(&installation.target) })
}

/// Returns the spec of the Deployment.
fn deployment(installation: &Installation, labels: &Value) -> Value {
    let target = &installation.target;
    let mut labels = labels.clone();
    labels["sidecar.istio.io/inject"] = "false".into();
    let spread = json!({
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": { "matchLabels": selector(target) },
        "matchLabelKeys": ["pod-template-hash"],
    });
    let pod = json!({
        "serviceAccountName": target.name(),
        "securityContext": { "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                             "seccompProfile": { "type": "RuntimeDefault" } },
        "containers": [container(installation)],
        "topologySpreadConstraints": [spread],
        "volumes": [{ "name": "state", "emptyDir": {} }],
    });
    let annotations =
        json!({ "prometheus.io/scrape": "true", "prometheus.io/port": CONTROL_ADMIN_PORT.to_string() });
    let mut spec = json!({
        "selector": { "matchLabels": selector(target) },
        // A new pod is ready before an old one ends.
        "strategy": { "type": "RollingUpdate", "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } },
        "template": { "metadata": { "labels": labels, "annotations": annotations }, "spec": pod },
    });
    if let Some(replicas) = installation.replicas {
        spec["replicas"] = replicas.into();
    }
    spec
}

fn container(installation: &Installation) -> Value {
    let port = |name: &str, port: u16| json!({ "name": name, "containerPort": port, "protocol": "TCP" });
    let mut ports = vec![
        port("tls-xds", DISCOVERY_TLS_PORT),
        port("https-webhooks", WEBHOOK_PORT),
        port("http-monitoring", CONTROL_ADMIN_PORT),
    ];
    ports.extend(installation.plain_port.map(|number| port("grpc-xds", number)));
    let field =
        |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } });
    json!({
        "name": "discovery",
        "image": installation.control_image,
        "args": arguments(installation),
        "env": [field("POD_NAME", "metadata.name"), field("POD_NAMESPACE", "metadata.namespace")],
        "ports": ports,
        "readinessProbe": { "httpGet": { "path": "/ready", "port": CONTROL_ADMIN_PORT },
                            "periodSeconds": 3, "timeoutSeconds": 5 },
        "lifecycle": { "preStop": { "sleep": { "seconds": REMOVAL_SECONDS } } },
        "resources": { "requests": { "cpu": CPU, "memory": MEMORY } },
        "securityContext": { "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                             "capabilities": { "drop": ["ALL"] } },
        "volumeMounts": [{ "name": "state", "mountPath": STATE_FOLDER }],
    })
}

/// Returns the options of skysaild.
pub(super) fn arguments(installation: &Installation) -> Vec<String> {
    let target = &installation.target;
    let address = format!("{}.{}.svc:{DISCOVERY_TLS_PORT}", target.service(), target.namespace);
    let mut arguments = ["--kubernetes", "--write-status"].map(str::to_owned).to_vec();
    for (name, value) in [
        ("--state-dir", STATE_FOLDER),
        ("--injection-image", &installation.proxy_image),
        ("--injection-control-plane", &address),
        ("--injection-revision", &target.revision),
    ] {
        arguments.push(format!("{name}={value}"));
    }
    if installation.deploys_gateways {
        arguments.push("--deploy-gateways".to_owned());
    }
    if installation.cni {
        arguments.push("--injection-cni".to_owned());
    }
    arguments.extend(installation.arguments.iter().cloned());
    arguments
}
