//! The container of the sidecar and its volumes.

use std::collections::HashSet;

use serde_json::{Value, json};
use skysail_core::names::{HEALTH_PORT, MERGED_METRICS_PORT, METRICS_PORT, TOKEN_AUDIENCE};

use crate::{
    plan::{BIND, InjectError, Owner, Plan},
    settings::NAME,
};

/// Program of the image.
const PROGRAM: &str = "skysail-proxy";
/// Folder with the trust bundle of the control plane, and its file.
const ROOT_FOLDER: &str = "/var/run/secrets/istio";
const ROOT_FILE: &str = "/var/run/secrets/istio/root-cert.pem";
/// Folder with the token of the pod's service account, and its file.
const TOKEN_FOLDER: &str = "/var/run/secrets/tokens";
const TOKEN_FILE: &str = "/var/run/secrets/tokens/istio-token";
/// Lifetime of the token in seconds. The kubelet renews it.
const TOKEN_LIFETIME: u32 = 43_200;
/// ConfigMap with the trust bundle, in each namespace.
const ROOT_CONFIG_MAP: &str = "istio-ca-root-cert";
/// Folder with the labels and annotations of the pod.
const POD_FOLDER: &str = "/etc/istio/pod";

/// Returns the container.
pub(crate) fn container(plan: &Plan<'_>, owner: &Owner, apps: &[Value]) -> Result<Value, InjectError> {
    let mut container = json!({
        "name": NAME,
        "image": plan.image,
        "args": arguments(plan)?,
        "ports": [{ "name": "http-envoy-prom", "containerPort": METRICS_PORT, "protocol": "TCP" }],
        "env": environment(plan, owner, apps),
        "resources": plan.resources,
        "securityContext": security(plan),
        "volumeMounts": mounts(plan)?,
    });
    if plan.native {
        container["restartPolicy"] = json!("Always");
    }
    if let Some((hook, command)) = hook(plan) {
        container["lifecycle"] = json!({ hook: { "exec": { "command": command } } });
    }
    if plan.status_port > 0 {
        let number = |name: &str, default: u32| {
            let text = plan.annotations.get(&format!("readiness.status.sidecar.istio.io/{name}"));
            text.and_then(|text| text.parse().ok()).unwrap_or(default)
        };
        let ready = json!({ "path": "/healthz/ready", "port": HEALTH_PORT });
        container["startupProbe"] =
            json!({ "httpGet": ready, "periodSeconds": 1, "timeoutSeconds": 3, "failureThreshold": 600 });
        container["readinessProbe"] = json!({
            "httpGet": ready,
            "initialDelaySeconds": number("initialDelaySeconds", 0),
            "periodSeconds": number("periodSeconds", 15),
            "timeoutSeconds": 3,
            "failureThreshold": number("failureThreshold", 4),
        });
    }
    plan.set_pull_policy(&mut container);
    Ok(container)
}

/// Returns the lifecycle hook and its command. Containers after an ordinary sidecar start once its hook has ended. A native
/// sidecar ends after the containers, so it begins its drain at the end of the pod by a hook.
fn hook(plan: &Plan<'_>) -> Option<(&'static str, Vec<String>)> {
    let command = |words: &[&str]| [PROGRAM].iter().chain(words).map(|word| (*word).to_owned()).collect();
    match (plan.native, plan.status_port) {
        (false, _) if plan.holds() => Some(("postStart", command(&["wait"]))),
        (true, MERGED_METRICS_PORT) => Some(("preStop", command(&["drain"]))),
        (true, port @ 1..) => {
            let url = format!("http://localhost:{port}/drain");
            Some(("preStop", command(&["drain", "--url", &url])))
        }
        _ => None,
    }
}

/// Returns the arguments of skysail-proxy. It reads its node from the environment.
fn arguments(plan: &Plan<'_>) -> Result<Vec<String>, InjectError> {
    let address = match plan.config.get("discoveryAddress") {
        None | Some(Value::Null) => plan.settings.control_plane.as_str(),
        Some(Value::String(address)) => address,
        Some(other) => return Err(InjectError::Config(format!("discoveryAddress {other} is not HOST:PORT"))),
    };
    let mut arguments: Vec<String> =
        ["--discovery", address, "--ca-root", ROOT_FILE, "--token", TOKEN_FILE].map(str::to_owned).into();
    if !plan.is_sidecar() {
        arguments.extend(["--node-type", "router"].map(str::to_owned));
    }
    if let Some(level) = plan.annotations.get("sidecar.istio.io/logLevel") {
        arguments.extend(["--log-level".to_owned(), level.to_owned()]);
    }
    match plan.config.get("concurrency") {
        None | Some(Value::Null) => {}
        Some(value) => match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            // 0 stands for the number of CPUs, which is the default.
            Some(0) => {}
            Some(number) => arguments.extend(["--concurrency".to_owned(), number.to_string()]),
            None => {
                return Err(InjectError::Config(format!("concurrency {value} is not a number of threads")));
            }
        },
    }
    if ![0, MERGED_METRICS_PORT].contains(&plan.status_port) {
        arguments.extend(["--merged-metrics-port".to_owned(), plan.status_port.to_string()]);
    }
    Ok(arguments)
}

/// Returns the variables, with the names of Istio's injector.
fn environment(plan: &Plan<'_>, owner: &Owner, apps: &[Value]) -> Vec<Value> {
    let field =
        |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } });
    let text = |name: &str, value: &str| json!({ "name": name, "value": value });
    let names: Vec<&str> = apps.iter().filter_map(|app| app["name"].as_str()).collect();
    let ports: Vec<&Value> = apps.iter().filter_map(|app| app["ports"].as_array()).flatten().collect();
    let mut variables = vec![
        field("POD_NAME", "metadata.name"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("INSTANCE_IP", "status.podIP"),
        field("SERVICE_ACCOUNT", "spec.serviceAccountName"),
        field("HOST_IP", "status.hostIP"),
        field("ISTIO_META_NODE_NAME", "spec.nodeName"),
        text("PROXY_CONFIG", &json!(plan.config).to_string()),
        text("ISTIO_META_POD_PORTS", &json!(ports).to_string()),
        text("ISTIO_META_APP_CONTAINERS", &names.join(",")),
        text("ISTIO_META_CLUSTER_ID", &plan.settings.cluster_id),
        text("ISTIO_META_INTERCEPTION_MODE", plan.mode.as_str()),
    ];
    if !plan.network.is_empty() {
        variables.push(text("ISTIO_META_NETWORK", &plan.network));
    }
    if !plan.workload_name.is_empty() {
        variables.push(text("ISTIO_META_WORKLOAD_NAME", &plan.workload_name));
    }
    if !owner.name.is_empty() && !owner.api_version.is_empty() {
        let Owner { api_version, kind, name, namespace } = owner;
        let namespace = if namespace.is_empty() { "default" } else { namespace };
        let path = format!(
            "kubernetes://apis/{api_version}/namespaces/{namespace}/{}s/{name}",
            kind.to_ascii_lowercase()
        );
        variables.push(text("ISTIO_META_OWNER", &path));
    }
    let mesh = plan.config.get("meshId").and_then(Value::as_str).filter(|id| !id.is_empty());
    variables.push(text("ISTIO_META_MESH_ID", mesh.unwrap_or(&plan.settings.trust_domain)));
    variables.push(text("TRUST_DOMAIN", &plan.settings.trust_domain));
    // What the pod determines is not replaced.
    let known: HashSet<String> =
        variables.iter().filter_map(|known| known["name"].as_str().map(str::to_owned)).collect();
    let is_new = |variable: &Value| variable["name"].as_str().is_none_or(|name| !known.contains(name));
    variables.extend(plan.variables().into_iter().filter(is_new));
    variables
}

/// Returns the security context. It passes the "restricted" pod security standard, unless the sidecar needs a capability.
fn security(plan: &Plan<'_>) -> Value {
    let bind = plan.annotations.get(BIND) == Some("true");
    let mut capabilities = json!({ "drop": ["ALL"] });
    if bind {
        capabilities["add"] = json!(["NET_BIND_SERVICE"]);
    }
    json!({
        "allowPrivilegeEscalation": false,
        "privileged": false,
        "capabilities": capabilities,
        "readOnlyRootFilesystem": true,
        "runAsNonRoot": !bind,
        "runAsUser": if bind { 0 } else { plan.user },
        "runAsGroup": plan.group,
        "seccompProfile": { "type": "RuntimeDefault" },
    })
}

fn mounts(plan: &Plan<'_>) -> Result<Vec<Value>, InjectError> {
    let mut mounts = vec![
        json!({ "name": "istiod-ca-cert", "mountPath": ROOT_FOLDER, "readOnly": true }),
        json!({ "name": "istio-token", "mountPath": TOKEN_FOLDER, "readOnly": true }),
        json!({ "name": "istio-podinfo", "mountPath": POD_FOLDER, "readOnly": true }),
    ];
    mounts.extend(of_user(plan, "sidecar.istio.io/userVolumeMount")?);
    Ok(mounts)
}

/// Returns the volumes of the sidecar.
pub(crate) fn volumes(plan: &Plan<'_>) -> Result<Vec<Value>, InjectError> {
    let item = |name: &str| json!({ "path": name, "fieldRef": { "fieldPath": format!("metadata.{name}") } });
    let token = json!({ "path": "istio-token", "expirationSeconds": TOKEN_LIFETIME,
                        "audience": TOKEN_AUDIENCE });
    let mut volumes = vec![
        json!({ "name": "istio-token", "projected": { "sources": [{ "serviceAccountToken": token }] } }),
        json!({ "name": "istiod-ca-cert", "configMap": { "name": ROOT_CONFIG_MAP } }),
        json!({ "name": "istio-podinfo", "downwardAPI": { "items": [item("labels"), item("annotations")] } }),
    ];
    volumes.extend(of_user(plan, "sidecar.istio.io/userVolume")?);
    Ok(volumes)
}

/// Returns the volumes or mounts in an annotation: a JSON object by name.
fn of_user(plan: &Plan<'_>, name: &str) -> Result<Vec<Value>, InjectError> {
    let Some(text) = plan.annotations.get(name) else { return Ok(Vec::new()) };
    let problem = "is not a JSON object of objects by name";
    let Ok(Value::Object(by_name)) = serde_json::from_str(text) else {
        return Err(plan.annotations.error(name, problem).into());
    };
    let one = |(key, mut value): (String, Value)| {
        let Value::Object(fields) = &mut value else {
            return Err(plan.annotations.error(name, problem).into());
        };
        fields.insert("name".into(), key.into());
        Ok(value)
    };
    by_name.into_iter().map(one).collect()
}
