//! Completes the objects in the inputs of Istio's tests of analyzers.
//!
//! These objects have only the fields that the tested analyzer reads. The API server refuses many of them, and so does
//! our validation, which then reports the missing field and checks no references of the object.

use serde_json::{Value, json};

/// Returns the documents of a text with complete objects.
pub(crate) fn text(text: &str) -> String {
    let mut complete = String::new();
    for document in skysail_yaml::documents(text) {
        let mut root = document.root.unwrap().to_json();
        match root.get_mut("items").and_then(Value::as_array_mut) {
            Some(items) => items.iter_mut().for_each(object),
            None => object(&mut root),
        }
        complete.push_str(&format!("{root}\n---\n"));
    }
    complete
}

fn object(object: &mut Value) {
    // Kubernetes has no names with capitals.
    if let Some(name) = object["metadata"]["name"].as_str().map(str::to_lowercase) {
        object["metadata"]["name"] = name.into();
    }
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    let spec = &mut object["spec"];
    match kind.as_str() {
        "Pod" => pod(spec),
        "Deployment" => pod(&mut spec["template"]["spec"]),
        "Service" => service(spec),
        "ServiceEntry" => default(spec, "ports", json!([{"number": 80, "name": "http", "protocol": "HTTP"}])),
        "VirtualService" if ["http", "tcp", "tls"].iter().all(|list| spec[list].is_null()) => {
            spec["http"] = json!([{"directResponse": {"status": 200}}]);
        }
        "Gateway" if spec["gatewayClassName"].is_null() => gateway(spec),
        _ => {}
    }
}

/// Sets a field that is missing.
fn default(within: &mut Value, field: &str, value: Value) {
    if within[field].is_null() {
        within[field] = value;
    }
}

/// Returns the items of a list; none if the field is missing.
fn items<'a>(within: &'a mut Value, field: &str) -> impl Iterator<Item = &'a mut Value> {
    within.get_mut(field).and_then(Value::as_array_mut).into_iter().flatten()
}

fn pod(spec: &mut Value) {
    default(spec, "containers", json!([{}]));
    for list in ["containers", "initContainers"] {
        for container in items(spec, list) {
            default(container, "name", "app".into());
            default(container, "image", "app".into());
        }
    }
}

/// Makes protocols of HTTP the protocol of the application: `protocol` is that of the transport.
fn service(spec: &mut Value) {
    default(spec, "ports", json!([{"name": "http", "port": 80}]));
    for port in items(spec, "ports") {
        if let Some(protocol) = port["protocol"].as_str().filter(|name| name.starts_with("HTTP")) {
            port["appProtocol"] = protocol.to_lowercase().into();
            port["protocol"] = Value::Null;
        }
    }
}

fn gateway(spec: &mut Value) {
    let server = json!({"port": {"number": 80, "name": "http", "protocol": "HTTP"}, "hosts": ["a.example"]});
    default(spec, "servers", json!([server]));
    for (index, server) in items(spec, "servers").enumerate() {
        if let Some(name) = server["port"]["name"].as_str() {
            server["port"]["name"] = format!("{name}-{index}").into();
        }
    }
}
