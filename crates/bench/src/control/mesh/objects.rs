//! Objects of every mesh: services with their pods and endpoints, and a route and a policy of one of them.

use serde_json::{Value, json};

use super::{CHANGED, address, host, namespace};

/// Returns a namespace. From version 1 on it has a label.
pub(super) fn namespace_object(name: &str, version: usize) -> Value {
    let mut metadata = json!({"name": name});
    if version > 0 {
        metadata["labels"] = json!({"version": format!("v{version}")});
    }
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
}

pub(super) fn service(number: usize, namespaces: usize) -> Value {
    let [high, low] = u16::try_from(number).unwrap_or(u16::MAX).to_be_bytes();
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": format!("svc-{number}"), "namespace": namespace(number, namespaces)},
        "spec": {
            "clusterIP": format!("172.16.{high}.{low}"),
            "selector": {"app": format!("svc-{number}")},
            "ports": [{"name": "http", "port": 80, "targetPort": 8080}],
        },
    })
}

pub(super) fn pod(service: usize, index: usize, namespaces: usize) -> Value {
    let app = format!("svc-{service}");
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": format!("{app}-{index}"), "namespace": namespace(service, namespaces),
            "labels": {"app": app, "version": "v1", "security.istio.io/tlsMode": "istio"},
        },
        "spec": {
            "serviceAccountName": "default", "nodeName": "node-0",
            "containers": [{"name": "app", "image": "app", "ports": [{"containerPort": 8080}]}],
        },
        "status": {
            "phase": "Running", "podIP": address(service, index).to_string(),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

/// Returns the endpoints of a service.
pub(super) fn slice(service: usize, namespaces: usize, endpoints: usize) -> Value {
    let name = format!("svc-{service}");
    let endpoint = |pod: usize| {
        let address = address(service, pod).to_string();
        let target = json!({"kind": "Pod", "name": format!("{name}-{pod}"), "namespace": namespace(service, namespaces)});
        json!({"addresses": [address], "conditions": {"ready": true}, "targetRef": target})
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{name}-1"), "namespace": namespace(service, namespaces),
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
    })
}

pub(super) fn route(version: usize) -> Value {
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": {"name": "changed", "namespace": namespace(CHANGED, 1)},
        "spec": {
            "hosts": [host(CHANGED, 1)],
            "http": [{"timeout": format!("{}s", 10 + version), "route": [{"destination": {"host": host(CHANGED, 1)}}]}],
        },
    })
}

pub(super) fn policy(version: usize) -> Value {
    json!({
        "apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy",
        "metadata": {"name": "changed", "namespace": namespace(CHANGED, 1)},
        "spec": {
            "selector": {"matchLabels": {"app": format!("svc-{CHANGED}")}},
            "action": "DENY",
            "rules": [{"to": [{"operation": {"paths": [format!("/private/{version}")]}}]}],
        },
    })
}
