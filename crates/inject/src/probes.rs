//! Sends the probes of the pod's containers to the sidecar, which asks the containers. Otherwise the kubelet, which has no
//! certificate of the mesh, could not probe a container whose peers must use mutual TLS.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Variable of the sidecar with the original probes, by path.
pub(crate) const VARIABLE: &str = "ISTIO_KUBE_APP_PROBERS";

/// Probes of a container, and the path at which the sidecar serves each: prefix and last part.
const PROBES: [(&str, &str); 3] =
    [("readinessProbe", "readyz"), ("livenessProbe", "livez"), ("startupProbe", "startupz")];
/// Handlers of a container's lifecycle.
const HANDLERS: [(&str, &str); 2] = [("preStop", "prestopz"), ("postStart", "poststartz")];

/// Rewrites the probes of containers. Returns the original probes by path, and warnings.
pub(crate) fn rewrite<'a>(
    containers: impl Iterator<Item = &'a mut Value>,
    status_port: u16,
) -> (Map<String, Value>, Vec<String>) {
    let (mut originals, mut warnings) = (Map::new(), Vec::new());
    for container in containers {
        let name = container["name"].as_str().unwrap_or_default().to_owned();
        let ports = named_ports(container);
        let mut one = |probe: &mut Value, path: String, kinds: &[&str]| match rewrite_one(
            probe,
            &path,
            kinds,
            &ports,
            status_port,
        ) {
            Ok(Some(original)) => drop(originals.insert(path, original)),
            Ok(None) => {}
            Err(problem) => warnings.push(format!("container {name}: {problem}")),
        };
        for (field, last) in PROBES {
            if let Some(probe) = container.get_mut(field) {
                one(probe, format!("/app-health/{name}/{last}"), &["httpGet", "tcpSocket", "grpc"]);
            }
        }
        for (field, last) in HANDLERS {
            if let Some(handler) = container.get_mut("lifecycle").and_then(|all| all.get_mut(field)) {
                one(handler, format!("/app-lifecycle/{name}/{last}"), &["httpGet", "tcpSocket"]);
            }
        }
    }
    (originals, warnings)
}

/// Returns the ports of a container by name.
fn named_ports(container: &Value) -> BTreeMap<String, Value> {
    let ports = container["ports"].as_array().into_iter().flatten();
    ports
        .filter_map(|port| Some((port["name"].as_str()?.to_owned(), port["containerPort"].clone())))
        .collect()
}

/// Rewrites a probe to an HTTP request for `path`. Returns the original with a numeric port, or `None` if the probe opens
/// no connection or is rewritten already.
fn rewrite_one(
    probe: &mut Value,
    path: &str,
    kinds: &[&str],
    ports: &BTreeMap<String, Value>,
    status_port: u16,
) -> Result<Option<Value>, String> {
    let Some(fields) = probe.as_object_mut() else { return Ok(None) };
    let Some(kind) = kinds.iter().find(|kind| fields.get(**kind).is_some_and(Value::is_object)) else {
        return Ok(None);
    };
    let Some(mut action) = fields.remove(*kind) else { return Ok(None) };
    if let Some(name) = action["port"].as_str() {
        // A number in quotes is also a number.
        let number = name.parse::<u16>().ok().map(Value::from).or_else(|| ports.get(name).cloned());
        let Some(number) = number else {
            let problem =
                format!("the probe at {path} is not sent to the sidecar: there is no port {name:?}");
            fields.insert((*kind).to_owned(), action);
            return Err(problem);
        };
        action["port"] = number;
    }
    if action["port"] == json!(status_port) {
        fields.insert((*kind).to_owned(), action);
        return Ok(None);
    }
    let mut request = match *kind {
        "httpGet" => action.clone(),
        _ => json!({}),
    };
    request["path"] = path.into();
    request["port"] = status_port.into();
    if request["scheme"] == "HTTPS" {
        request["scheme"] = "HTTP".into();
    }
    fields.insert("httpGet".into(), request);
    let mut original = Map::new();
    original.insert((*kind).to_owned(), action);
    if let Some(timeout) = fields.get("timeoutSeconds") {
        original.insert("timeoutSeconds".into(), timeout.clone());
    }
    Ok(Some(Value::Object(original)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_of_all_kinds_are_sent_to_the_sidecar() {
        let mut containers = [json!({
            "name": "web", "ports": [{ "name": "http", "containerPort": 8080 }],
            "readinessProbe": { "httpGet": { "path": "/ok", "port": "http", "scheme": "HTTPS",
                "httpHeaders": [{ "name": "a", "value": "b" }] }, "timeoutSeconds": 3 },
            "livenessProbe": { "tcpSocket": { "port": 9090 }, "periodSeconds": 5 },
            "startupProbe": { "grpc": { "port": 7070, "service": "s" } },
            "lifecycle": { "preStop": { "httpGet": { "port": 8080, "path": "/bye" } },
                "postStart": { "exec": { "command": ["true"] } } },
        })];
        let (originals, warnings) = rewrite(containers.iter_mut(), 15020);
        assert_eq!(warnings, Vec::<String>::new());
        let expected = json!({
            "/app-health/web/readyz": { "httpGet": { "path": "/ok", "port": 8080, "scheme": "HTTPS",
                "httpHeaders": [{ "name": "a", "value": "b" }] }, "timeoutSeconds": 3 },
            "/app-health/web/livez": { "tcpSocket": { "port": 9090 } },
            "/app-health/web/startupz": { "grpc": { "port": 7070, "service": "s" } },
            "/app-lifecycle/web/prestopz": { "httpGet": { "port": 8080, "path": "/bye" } },
        });
        assert_eq!(Value::Object(originals), expected);
        let web = &containers[0];
        assert_eq!(
            web["readinessProbe"],
            json!({ "httpGet": { "path": "/app-health/web/readyz", "port": 15020, "scheme": "HTTP",
                "httpHeaders": [{ "name": "a", "value": "b" }] }, "timeoutSeconds": 3 })
        );
        assert_eq!(
            web["livenessProbe"],
            json!({ "httpGet": { "path": "/app-health/web/livez", "port": 15020 }, "periodSeconds": 5 })
        );
        assert_eq!(
            web["startupProbe"],
            json!({ "httpGet": { "path": "/app-health/web/startupz", "port": 15020 } })
        );
        assert_eq!(web["lifecycle"]["postStart"], json!({ "exec": { "command": ["true"] } }));
    }

    #[test]
    fn a_probe_of_an_unknown_port_is_left_and_reported() {
        let original = json!({ "name": "web", "livenessProbe": { "tcpSocket": { "port": "http" } } });
        let mut containers = [original.clone()];
        let (originals, warnings) = rewrite(containers.iter_mut(), 15020);
        assert!(originals.is_empty() && containers[0] == original);
        assert!(warnings[0].contains("container web: ") && warnings[0].contains("\"http\""), "{warnings:?}");
    }
}
