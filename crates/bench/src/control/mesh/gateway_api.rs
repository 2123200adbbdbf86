//! Objects of Gateway API, and Ingresses, that change while a gateway is connected. They are for the first gateway of a large
//! mesh. Its Service, which names it for the Gateways, and the routes that do not change come with each object.

use serde_json::{Value, json};

use super::{
    CHANGED,
    change::GATEWAY,
    large::{EDGE, gateway_label},
    namespace,
};

/// Version of the API.
const API: &str = "gateway.networking.k8s.io/v1";
/// Name of the Gateway, of the Service, and of the routes.
const NAME: &str = "changed-api";

/// Returns an object with this name.
fn object(version: &str, kind: &str, namespace: &str, spec: Value) -> Value {
    json!({
        "apiVersion": version, "kind": kind,
        "metadata": {"name": NAME, "namespace": namespace}, "spec": spec,
    })
}

/// Returns a Service that selects the gateway's pod, and a Gateway for that pod with these listeners.
fn gateway_with(listeners: Value) -> [Value; 2] {
    let service = json!({
        "clusterIP": "172.17.0.1", "selector": {"istio": gateway_label(GATEWAY)},
        "ports": [
            {"name": "http", "port": 80}, {"name": "tcp", "port": 9000}, {"name": "tls", "port": 9443},
        ],
    });
    let address = json!({"type": "Hostname", "value": format!("{NAME}.{EDGE}.svc.cluster.local")});
    let spec = json!({
        "gatewayClassName": "istio", "addresses": [address], "listeners": listeners,
        "allowedListeners": {"namespaces": {"from": "Same"}},
    });
    [object("v1", "Service", EDGE, service), object(API, "Gateway", EDGE, spec)]
}

/// Returns a listener whose routes may be in any namespace.
fn listener(name: &str, port: u16, protocol: &str, host: Option<String>) -> Value {
    let mut listener = json!({
        "name": name, "port": port, "protocol": protocol, "allowedRoutes": {"namespaces": {"from": "All"}},
    });
    if let Some(host) = host {
        listener["hostname"] = host.into();
    }
    listener
}

/// Returns the host of a listener, which each version changes.
fn host(version: usize) -> Option<String> {
    Some(format!("v{version}.api.example.com"))
}

/// Returns a route of a kind to the service that changes, for a parent in the namespace of the gateways.
fn route(version: &str, kind: &str, parent: &str, rule: Value, hosts: &[&str]) -> Value {
    let parent =
        json!({"group": "gateway.networking.k8s.io", "kind": parent, "name": NAME, "namespace": EDGE});
    let mut spec = json!({"parentRefs": [parent], "rules": [rule]});
    if !hosts.is_empty() {
        spec["hostnames"] = hosts.into();
    }
    object(version, kind, &namespace(CHANGED, 1), spec)
}

/// Returns a rule that forwards to the service that changes.
fn one_backend() -> Value {
    json!({"backendRefs": [{"name": format!("svc-{CHANGED}"), "port": 80}]})
}

/// Returns a rule with two backends, of which each version changes the weights.
fn weighted(version: usize) -> Value {
    let backend = |weight: usize| json!({"name": format!("svc-{CHANGED}"), "port": 80, "weight": weight});
    // An absent backend takes its share too.
    let mut absent = backend(1);
    absent["name"] = "absent".into();
    json!({"backendRefs": [backend(1 + version % 100), absent]})
}

/// Returns a Gateway with a listener, and its HTTPRoute.
pub(super) fn gateway(version: usize) -> Vec<Value> {
    let listeners = json!([listener("http", 80, "HTTP", host(version))]);
    let route = route(API, "HTTPRoute", "Gateway", one_backend(), &[]);
    gateway_with(listeners).into_iter().chain([route]).collect()
}

/// Returns a ListenerSet with a listener, its Gateway, and its HTTPRoute.
pub(super) fn listener_set(version: usize) -> Vec<Value> {
    let gateway = gateway_with(json!([listener("http", 80, "HTTP", Some("api.example.com".to_owned()))]));
    let spec = json!({
        "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": NAME},
        "listeners": [listener("set", 80, "HTTP", host(version))],
    });
    let set = object(API, "ListenerSet", EDGE, spec);
    let route = route(API, "HTTPRoute", "ListenerSet", one_backend(), &[]);
    gateway.into_iter().chain([set, route]).collect()
}

/// Returns a TLSRoute of a listener that passes TLS through, and its Gateway.
pub(super) fn tls_route(version: usize) -> Vec<Value> {
    let mut tls = listener("tls", 9443, "TLS", None);
    tls["tls"] = json!({"mode": "Passthrough"});
    let route = route(API, "TLSRoute", "Gateway", weighted(version), &["tls.api.example.com"]);
    gateway_with(json!([tls])).into_iter().chain([route]).collect()
}

/// Returns a TCPRoute, and its Gateway.
pub(super) fn tcp_route(version: usize) -> Vec<Value> {
    let gateway = gateway_with(json!([listener("tcp", 9000, "TCP", None)]));
    let route = route("gateway.networking.k8s.io/v1alpha2", "TCPRoute", "Gateway", weighted(version), &[]);
    gateway.into_iter().chain([route]).collect()
}

/// Returns an Ingress, and the mesh configuration by which the gateway serves Ingresses.
pub(super) fn ingress(version: usize) -> Vec<Value> {
    let mesh = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "istio", "namespace": "istio-system"},
        "data": {"mesh": format!("{{ingressControllerMode: DEFAULT, ingressSelector: {}}}", gateway_label(GATEWAY))},
    });
    let backend = json!({"service": {"name": format!("svc-{CHANGED}"), "port": {"number": 80}}});
    let path = json!({"path": format!("/v{version}"), "pathType": "Prefix", "backend": backend});
    let spec = json!({"rules": [{"host": "ingress.example.com", "http": {"paths": [path]}}]});
    vec![mesh, object("networking.k8s.io/v1", "Ingress", &namespace(CHANGED, 1), spec)]
}
