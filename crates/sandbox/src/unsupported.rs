//! What pods ask for that is not done here, each with what to do about it.
//!
//! What only says where a pod may run, what it may use and how its image is got is passed over: there is one
//! machine, and there are no images. Everything else that has no effect is named. A stand-in is not the image, so
//! of its container nothing is said but that.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::objects::{Container, PodSpec, Probe};

/// Of a pod, passed over.
const POD: &[&str] = &[
    "affinity",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "hostUsers",
    "imagePullSecrets",
    "nodeName",
    "nodeSelector",
    "os",
    "overhead",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "resources",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "shareProcessNamespace",
    "tolerations",
    "topologySpreadConstraints",
    // Named with the containers that mount them.
    "volumes",
];

/// Of a container, passed over.
const CONTAINER: &[&str] = &[
    "imagePullPolicy",
    "resizePolicy",
    "resources",
    "securityContext",
    "stdin",
    "stdinOnce",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "tty",
];

/// What is not done of a pod's own fields.
pub(crate) fn of_pod(spec: &PodSpec) -> Vec<String> {
    let mut notes = Vec::new();
    if spec.host_network {
        notes.push(
            "hostNetwork is not supported: the pod gets a network of its own and no sidecar".to_owned(),
        );
    }
    for (field, value) in set(&spec.other, POD) {
        notes.push(match (field, value.as_str()) {
            ("dnsPolicy", Some("ClusterFirst")) => continue,
            ("dnsPolicy" | "dnsConfig", _) => {
                format!("{field} has no effect: pods use the DNS server of the mesh")
            }
            ("hostAliases", _) => "hostAliases has no effect: add a Service with this name".to_owned(),
            ("serviceAccount", _) => "serviceAccount has no effect: use serviceAccountName".to_owned(),
            _ => no_effect(field),
        });
    }
    notes
}

/// What is not done of a container for which a program runs.
pub(crate) fn of_container(container: &Container) -> Vec<String> {
    let mut notes = Vec::new();
    for (field, value) in set(&container.other, CONTAINER) {
        notes.push(match field {
            "volumeMounts" => {
                let mounts = value.as_array().into_iter().flatten();
                let places: Vec<_> = mounts.filter_map(|mount| mount["mountPath"].as_str()).collect();
                format!(
                    "volumeMounts has no effect ({}): the program sees this machine's files; pass the content in args or \
                     env",
                    places.join(", ")
                )
            }
            "livenessProbe" => {
                "livenessProbe is not supported: a program that hangs is not restarted; one that exits is"
                    .to_owned()
            }
            "startupProbe" => {
                "startupProbe is not supported: the container counts as started when its readinessProbe succeeds".to_owned()
            }
            "lifecycle" => {
                "lifecycle hooks are not run: let the program do the same when it starts and on SIGTERM".to_owned()
            }
            "workingDir" => {
                "workingDir has no effect: the program runs in the directory of `skysail up`; use absolute paths".to_owned()
            }
            _ => no_effect(field),
        });
    }
    notes.extend(container.readiness_probe.as_ref().and_then(of_probe));
    notes
}

fn of_probe(probe: &Probe) -> Option<String> {
    let by_https = probe.http_get.as_ref().is_some_and(|target| target.is_https());
    by_https.then(|| "readinessProbe over HTTPS is not supported: the container is ready when the port accepts connections".to_owned())
}

/// The fields that say something and are not passed over.
fn set<'a>(
    fields: &'a BTreeMap<String, Value>,
    passed_over: &[&str],
) -> impl Iterator<Item = (&'a str, &'a Value)> {
    let empty = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    fields
        .iter()
        .map(|(field, value)| (field.as_str(), value))
        .filter(move |(field, value)| !passed_over.contains(field) && !empty(value))
}

fn no_effect(field: &str) -> String {
    format!("{field} is not supported and has no effect")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_has_no_effect_is_named_and_the_rest_is_not() {
        let spec: PodSpec = serde_json::from_value(json!({
            "serviceAccountName": "a", "nodeSelector": { "a": "b" }, "volumes": [{ "name": "v" }],
            "dnsPolicy": "ClusterFirst", "restartPolicy": "Never", "hostPID": false, "hostIPC": true,
            "hostAliases": [{ "ip": "10.0.0.1" }],
            "containers": [{
                "name": "c", "image": "i", "resources": { "limits": {} }, "volumeDevices": [],
                "volumeMounts": [{ "name": "v", "mountPath": "/data" }, { "name": "w", "mountPath": "/etc/w" }],
                "livenessProbe": { "exec": {} }, "startupProbe": { "exec": {} }, "lifecycle": { "preStop": {} },
                "readinessProbe": { "httpGet": { "port": 80, "scheme": "HTTPS" } },
            }],
        }))
        .unwrap();
        let named = |notes: &[String], words: &[&str]| {
            assert_eq!(notes.len(), words.len(), "{notes:#?}");
            for word in words {
                assert!(notes.iter().any(|note| note.contains(word)), "{word}: {notes:#?}");
            }
        };
        named(&of_pod(&spec), &["hostIPC", "hostAliases"]);
        let container = &spec.containers[0];
        named(
            &of_container(container),
            &["(/data, /etc/w)", "livenessProbe", "startupProbe", "lifecycle", "readinessProbe"],
        );
    }

    #[test]
    fn probes_that_can_be_made_are_not_named() {
        let said = |probe: Value| of_probe(&serde_json::from_value(probe).unwrap());
        assert_eq!(said(json!({ "httpGet": { "path": "/", "port": 80 } })), None);
        assert_eq!(said(json!({ "tcpSocket": { "port": "http" } })), None);
        assert!(said(json!({ "httpGet": { "port": 80, "scheme": "HTTPS" } })).unwrap().contains("HTTPS"));
        assert_eq!(said(json!({ "grpc": { "port": 80 } })), None);
        assert_eq!(said(json!({ "exec": { "command": ["true"] } })), None);
    }
}
