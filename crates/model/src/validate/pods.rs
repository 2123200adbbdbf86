//! Validation of Pods and of objects that make them, as by the API server, and of valid settings that cannot work.

use std::collections::{BTreeMap, BTreeSet};

use super::{Code, Findings, injection, is_label_text, kube::labels, port, volumes};
use crate::{
    api::{
        Kind, Labels,
        manifest::{Container, IntOrText, PodManifest, PodSpec, PodTemplate, ProbeManifest, WorkloadSpec},
        selects,
    },
    spelling::VARIABLE,
};

/// Checks the specification of a workload at the path `at`.
pub(crate) fn workload(kind: Kind, spec: &WorkloadSpec, at: &str, findings: &mut Findings) {
    if spec.replicas.is_some_and(|replicas| replicas < 0) {
        findings.add(Code::OutOfRange, format!("{at}.replicas"), "is negative", "use 0 or more");
    }
    if let Some(selector) = spec.selector.as_ref().filter(|_| kind != Kind::Job && kind != Kind::CronJob) {
        let field = format!("{at}.selector");
        if selector.match_labels.is_empty() && selector.match_expressions.is_empty() {
            findings.add(Code::EmptyField, field, "is empty", "set matchLabels to labels of the template");
        } else if !selects(
            &selector.match_labels,
            spec.template.metadata.labels.as_ref().unwrap_or(&BTreeMap::new()),
        ) {
            let labels = crate::world::label_text(&selector.match_labels);
            let message = format!("the template's labels do not match the selector ({labels})");
            let field = format!("{at}.template.metadata.labels");
            findings.add(
                Code::TemplateLabels,
                field,
                message,
                "add every label of the selector to the template",
            );
        }
    }
    template(kind, &spec.template, &format!("{at}.template"), findings);
}

fn template(kind: Kind, template: &PodTemplate, at: &str, findings: &mut Findings) {
    let metadata = format!("{at}.metadata");
    for (found, name) in
        [(&template.metadata.labels, "labels"), (&template.metadata.annotations, "annotations")]
    {
        if let Some(found) = found {
            injection::values(found, &format!("{metadata}.{name}"), findings);
        }
    }
    if let Some(found) = &template.metadata.labels {
        labels(found, &format!("{metadata}.labels"), findings);
    }
    let none = Labels::new();
    let (of_labels, of_annotations) = (&template.metadata.labels, &template.metadata.annotations);
    let (of_labels, of_annotations) = (of_labels.as_ref(), of_annotations.as_ref());
    injection::pod(
        &template.spec,
        of_labels.unwrap_or(&none),
        of_annotations.unwrap_or(&none),
        &format!("{at}."),
        findings,
    );
    let allowed: &[&str] = match kind {
        Kind::Job | Kind::CronJob => &["OnFailure", "Never"],
        _ => &["Always"],
    };
    let policy = template.spec.restart_policy.as_deref().unwrap_or("Always");
    if !allowed.contains(&policy) {
        let message = format!("a {kind} does not support {policy:?}");
        let remedy = format!("write restartPolicy: {}", allowed.join(" or "));
        findings.add(Code::FieldNotAllowed, format!("{at}.spec.restartPolicy"), message, remedy);
    }
    pod_spec(&template.spec, kind, &format!("{at}.spec"), findings);
}

/// Checks a Pod.
pub(crate) fn pod(object: &PodManifest, findings: &mut Findings) {
    let none = Labels::new();
    let (labels, annotations) = (object.metadata.labels.as_ref(), object.metadata.annotations.as_ref());
    injection::pod(&object.spec, labels.unwrap_or(&none), annotations.unwrap_or(&none), "", findings);
    pod_spec(&object.spec, Kind::Pod, "spec", findings);
}

fn pod_spec(spec: &PodSpec, kind: Kind, at: &str, findings: &mut Findings) {
    if spec.containers.is_empty() {
        findings.add(Code::EmptyField, format!("{at}.containers"), "is empty", "add at least one container");
    }
    volumes::sources(&spec.volumes, &format!("{at}.volumes"), findings);
    let volumes = names(spec.volumes.iter().map(|volume| &*volume.name), &format!("{at}.volumes"), findings);
    let mut containers = BTreeSet::new();
    // Containers by port number and protocol: all containers of a pod share its address.
    let mut listening = BTreeMap::new();
    for (list, all) in [("initContainers", &spec.init_containers), ("containers", &spec.containers)] {
        for (index, one) in all.iter().enumerate() {
            let at = format!("{at}.{list}[{index}]");
            container(one, &at, findings);
            volumes::mounts(&one.volume_mounts, &format!("{at}.volumeMounts"), findings);
            if !containers.insert(&*one.name) {
                let message = format!("{:?} is the name of another container of the pod", one.name);
                findings.add(
                    Code::DuplicateName,
                    format!("{at}.name"),
                    message,
                    "use a different name for each container",
                );
            }
            for (mount, named) in one.volume_mounts.iter().enumerate() {
                // Volumes of a StatefulSet may come from its volumeClaimTemplates.
                if kind != Kind::StatefulSet && !volumes.contains(&*named.name) {
                    let field = format!("{at}.volumeMounts[{mount}].name");
                    let message = format!("the pod has no volume {:?}", named.name);
                    findings.add(Code::UnknownVolume, field, message, "add the volume, or correct the name");
                }
            }
            // Other init containers have ended when the containers start.
            if list == "containers" || one.restart_policy.as_deref() == Some("Always") {
                shared_ports(one, &at, &mut listening, findings);
            }
        }
    }
}

fn container(container: &Container, at: &str, findings: &mut Findings) {
    if !is_label_text(&container.name, false) {
        let message = format!("{:?} is not a valid container name", container.name);
        findings.add(
            Code::InvalidName,
            format!("{at}.name"),
            message,
            "use lower-case letters, digits and '-'",
        );
    }
    if container.image.is_empty() {
        findings.add(Code::MissingField, format!("{at}.image"), "is missing", "add image");
    } else if container.image.contains("${") {
        findings.add(
            Code::InvalidImage,
            format!("{at}.image"),
            format!("{:?} is not the name of an image", container.image),
            VARIABLE,
        );
    }
    let mut ports = BTreeSet::new();
    for (index, one) in container.ports.iter().enumerate() {
        let at = format!("{at}.ports[{index}]");
        port(u32::try_from(one.container_port).unwrap_or_default(), &format!("{at}.containerPort"), findings);
        let Some(name) = one.name.as_deref().filter(|name| !name.is_empty()) else { continue };
        if !is_port_name(name) {
            let remedy = "use at most 15 lower-case letters, digits and '-', with at least one letter";
            findings.add(
                Code::InvalidName,
                format!("{at}.name"),
                format!("{name:?} is not a valid port name"),
                remedy,
            );
        } else if !ports.insert(name) {
            let message = format!("{name:?} is the name of another port of the container");
            findings.add(
                Code::DuplicateName,
                format!("{at}.name"),
                message,
                "use a different name for each port",
            );
        }
    }
    let probes = [
        ("livenessProbe", &container.liveness_probe),
        ("readinessProbe", &container.readiness_probe),
        ("startupProbe", &container.startup_probe),
    ];
    for (field, found) in probes {
        if let Some(found) = found {
            probe(found, container, &format!("{at}.{field}"), findings);
        }
    }
}

/// Returns whether a text is a service name of IANA, RFC 6335, section 5.1.
fn is_port_name(name: &str) -> bool {
    name.len() <= 15
        && is_label_text(name, false)
        && !name.contains("--")
        && name.bytes().any(|byte| byte.is_ascii_lowercase())
}

fn probe(probe: &ProbeManifest, container: &Container, at: &str, findings: &mut Findings) {
    let targets = [("httpGet", &probe.http_get), ("tcpSocket", &probe.tcp_socket)];
    let actions = targets.iter().filter(|(_, target)| target.is_some()).count()
        + usize::from(probe.exec.is_some())
        + usize::from(probe.grpc.is_some());
    if actions != 1 {
        let message = if actions == 0 { "has no handler" } else { "has more than one handler" };
        findings.add(
            Code::ExclusiveFields,
            at,
            message,
            "set exactly one of httpGet, tcpSocket, grpc and exec",
        );
    }
    for (name, target) in targets {
        let field = format!("{at}.{name}.port");
        match target.as_ref().map(|target| &target.port) {
            Some(IntOrText::Int(number)) => {
                port(u32::try_from(*number).unwrap_or_default(), &field, findings);
            }
            Some(IntOrText::Text(name)) if name.parse::<u16>().is_err() && !has_port(container, name) => {
                let message = format!("the container has no port named {name:?}, so the probe always fails");
                findings.add(Code::ProbePort, field, message, "name the port, or use its number");
            }
            _ => {}
        }
    }
}

fn has_port(container: &Container, name: &str) -> bool {
    container.ports.iter().any(|port| port.name.as_deref() == Some(name))
}

/// Reports containers of a pod that cannot listen because another one uses the port.
fn shared_ports<'a>(
    container: &'a Container,
    at: &str,
    listening: &mut BTreeMap<(i64, &'a str), &'a str>,
    findings: &mut Findings,
) {
    for (index, port) in container.ports.iter().enumerate() {
        let key = (port.container_port, port.protocol.as_deref().unwrap_or("TCP"));
        if let Some(other) = listening.insert(key, &container.name).filter(|other| *other != container.name) {
            let message = format!(
                "container {other:?} of the pod declares port {} too, and only one container can listen on it",
                key.0
            );
            let field = format!("{at}.ports[{index}].containerPort");
            findings.add(
                Code::ContainerPortConflict,
                field,
                message,
                "use different ports for the containers of a pod",
            );
        }
    }
}

/// Reports names that are used twice. Returns all names.
fn names<'a>(names: impl Iterator<Item = &'a str>, at: &str, findings: &mut Findings) -> BTreeSet<&'a str> {
    let mut known = BTreeSet::new();
    for (index, name) in names.enumerate() {
        if !known.insert(name) {
            findings.add(
                Code::DuplicateName,
                format!("{at}[{index}].name"),
                format!("{name:?} is defined twice"),
                "remove one of them",
            );
        }
    }
    known
}
