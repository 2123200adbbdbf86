//! Fields of pods that have no effect here, each with a remedy.
//!
//! Fields about placement, resources and image pulls are ignored without a note, because there is one machine and there
//! are no images. Every other field without an effect is reported. A stand-in is not the image, so the fields of its
//! container are not reported.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    objects::{Container, Downward, PodSpec, Probe, Volume, VolumeMount},
    plan::Pod,
    volumes::{DEFAULT_SIZE, VolumeKind},
};

/// Fields of a pod that are ignored without a note.
const POD: &[&str] = &[
    "affinity",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "hostUsers",
    "imagePullSecrets",
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
    // The model reads both.
    "serviceAccount",
    "serviceAccountName",
    "shareProcessNamespace",
    "tolerations",
    "topologySpreadConstraints",
];

/// Fields of a container that are ignored without a note.
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

/// Returns notes about the fields of a pod.
pub(crate) fn of_pod(spec: &PodSpec) -> Vec<String> {
    let mut notes = Vec::new();
    if spec.host_network {
        notes.push(
            "hostNetwork is not supported: the pod gets its own network namespace and no sidecar".to_owned(),
        );
    }
    for (field, value) in set(&spec.other, POD) {
        notes.push(match (field, value.as_str()) {
            ("dnsPolicy", Some("ClusterFirst")) => continue,
            ("dnsPolicy" | "dnsConfig", _) => {
                format!("{field} has no effect: pods use the DNS server of the mesh")
            }
            ("hostAliases", _) => "hostAliases has no effect: add a Service with this name".to_owned(),
            _ => no_effect(field),
        });
    }
    notes
}

/// Returns notes about a container for which a program runs.
pub(crate) fn of_container(container: &Container, pod: &Pod) -> Vec<String> {
    let mut notes = Vec::new();
    for (field, _) in set(&container.other, CONTAINER) {
        notes.push(match field {
            "lifecycle" => {
                "lifecycle hooks are not run: make the program do this at its start and on SIGTERM".to_owned()
            }
            _ => no_effect(field),
        });
    }
    let probes = [
        ("readinessProbe", &container.readiness_probe),
        ("livenessProbe", &container.liveness_probe),
        ("startupProbe", &container.startup_probe),
    ];
    notes.extend(probes.iter().filter_map(|(field, probe)| of_probe(field, probe.as_ref()?)));
    for mount in &container.volume_mounts {
        notes.extend(of_mount(mount));
        match pod.spec.volumes.iter().find(|volume| volume.name == mount.name) {
            Some(volume) => notes.extend(of_volume(volume, &mount.mount_path, pod)),
            None => {
                notes.push(format!("nothing is mounted at {}: no volume {}", mount.mount_path, mount.name));
            }
        }
    }
    notes
}

fn of_mount(mount: &VolumeMount) -> Vec<String> {
    let VolumeMount { name, mount_path, other, .. } = mount;
    let notes =
        set(other, &["recursiveReadOnly"]).filter_map(|(field, value)| match (field, value.as_str()) {
            ("mountPropagation", Some("None")) => None,
            ("subPathExpr", _) => Some(format!(
                "subPathExpr is not supported: volume {name} is not mounted at {mount_path}; use subPath"
            )),
            _ => Some(format!("{field} has no effect on volume {name} at {mount_path}")),
        });
    notes.collect()
}

/// Returns notes about a volume.
fn of_volume(volume: &Volume, mount_path: &str, pod: &Pod) -> Vec<String> {
    let name = &volume.name;
    if let Some(host) = &volume.host_path {
        // The program sees the folder at its own path.
        let note = format!(
            "volume {name}: hostPath is not mounted at {mount_path}; the program sees this machine's files, also {}",
            host.path
        );
        return if host.path == mount_path { Vec::new() } else { vec![note] };
    }
    let mut notes: Vec<String> = match volume.kind() {
        Some(VolumeKind::Claim(claim)) => vec![format!(
            "volume {name}: a folder in memory replaces PersistentVolumeClaim {claim} until the mesh ends; it is empty \
             at first and holds {} MiB at most",
            DEFAULT_SIZE >> 20
        )],
        Some(_) => Vec::new(),
        None => {
            let kinds: Vec<_> = volume.other.keys().map(String::as_str).collect();
            let kinds = kinds.join(", ");
            vec![format!("volume {name}: {kinds} is not supported; nothing is mounted at {mount_path}")]
        }
    };
    notes.extend(volume.downward.iter().flat_map(|source| of_fields(name, source, pod)));
    for source in volume.projected.iter().flat_map(|projected| &projected.sources) {
        notes.extend(source.downward.iter().flat_map(|source| of_fields(name, source, pod)));
        notes.extend(
            source.other.keys().map(|kind| format!("volume {name}: projected {kind} is not supported")),
        );
    }
    notes
}

/// Returns notes about the fields for which no file is created.
fn of_fields(volume: &str, source: &Downward, pod: &Pod) -> Vec<String> {
    let missing = source.items.iter().filter_map(|item| {
        let field = item.field_ref.as_ref().map(|field| field.field_path.as_str());
        let what = match field {
            None => "resourceFieldRef".to_owned(),
            Some("metadata.labels" | "metadata.annotations") => return None,
            Some(field) if pod.field(field).is_some() => return None,
            Some(field) => format!("fieldPath {field}"),
        };
        Some(format!("volume {volume}: {what} is not supported; there is no file {}", item.path))
    });
    missing.collect()
}

fn of_probe(field: &str, probe: &Probe) -> Option<String> {
    let by_https = probe.http_get.as_ref().is_some_and(|target| target.is_https());
    by_https.then(|| {
        format!("{field} over HTTPS is not supported: it succeeds when the port accepts connections")
    })
}

/// Returns the fields that are set and not ignored.
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
    use crate::objects::{Template, Workload};
    use serde_json::json;

    #[test]
    fn fields_without_an_effect_are_reported() {
        let spec: PodSpec = serde_json::from_value(json!({
            "serviceAccountName": "a", "nodeSelector": { "a": "b" },
            "volumes": [
                { "name": "v" }, { "name": "w", "hostPath": { "path": "/srv/w" } }, { "name": "n", "nfs": { "server": "s" } },
                { "name": "c", "persistentVolumeClaim": { "claimName": "disk" } },
                { "name": "d", "downwardAPI": { "items": [
                    { "path": "cpu", "resourceFieldRef": { "resource": "limits.cpu" } },
                    { "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } },
                    { "path": "ip", "fieldRef": { "fieldPath": "status.podIP" } },
                    { "path": "zone", "fieldRef": { "fieldPath": "spec.zone" } },
                ] } },
                { "name": "p", "projected": { "sources": [{ "clusterTrustBundle": { "path": "ca" } }] } },
            ],
            "dnsPolicy": "ClusterFirst", "restartPolicy": "Never", "hostPID": false, "hostIPC": true,
            "hostAliases": [{ "ip": "10.0.0.1" }],
            "containers": [{
                "name": "c", "image": "i", "resources": { "limits": {} }, "volumeDevices": [],
                "volumeMounts": [
                    { "name": "v", "mountPath": "/data", "mountPropagation": "Bidirectional" },
                    { "name": "v", "mountPath": "/more", "subPathExpr": "$(X)" },
                    { "name": "w", "mountPath": "/etc/w" }, { "name": "w", "mountPath": "/srv/w" },
                    { "name": "n", "mountPath": "/nfs" }, { "name": "c", "mountPath": "/disk" },
                    { "name": "d", "mountPath": "/info" }, { "name": "p", "mountPath": "/ca" },
                ],
                "livenessProbe": { "exec": {} }, "lifecycle": { "preStop": {} },
                "startupProbe": { "httpGet": { "port": 80, "scheme": "HTTPS" } },
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
        let workload = Workload {
            kind: "Pod".to_owned(),
            template: Template { spec: spec.clone(), ..Template::default() },
            ..Workload::default()
        };
        let pod = Pod::new(&workload, "p".to_owned(), [10, 244, 0, 2].into(), &BTreeMap::new());
        named(
            &of_container(&spec.containers[0], &pod),
            &[
                "startupProbe over HTTPS",
                "lifecycle",
                "readinessProbe over HTTPS",
                "mountPropagation has no effect on volume v at /data",
                "subPathExpr is not supported",
                "hostPath is not mounted at /etc/w; the program sees this machine's files, also /srv/w",
                "volume n: nfs is not supported; nothing is mounted at /nfs",
                "volume c: a folder in memory replaces PersistentVolumeClaim disk",
                "volume d: resourceFieldRef is not supported; there is no file cpu",
                "volume d: fieldPath spec.zone is not supported; there is no file zone",
                "volume p: projected clusterTrustBundle is not supported",
            ],
        );
    }

    #[test]
    fn supported_probes_are_not_reported() {
        let note = |probe: Value| of_probe("readinessProbe", &serde_json::from_value(probe).unwrap());
        assert_eq!(note(json!({ "httpGet": { "path": "/", "port": 80 } })), None);
        assert_eq!(note(json!({ "tcpSocket": { "port": "http" } })), None);
        assert!(note(json!({ "httpGet": { "port": 80, "scheme": "HTTPS" } })).unwrap().contains("HTTPS"));
        assert_eq!(note(json!({ "grpc": { "port": 80 } })), None);
        assert_eq!(note(json!({ "exec": { "command": ["true"] } })), None);
    }
}
