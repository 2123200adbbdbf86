//! Validation of WorkloadEntry, WorkloadGroup.

use super::{Code, Finding, Findings, is_dns_name, port};
use crate::api::{
    Address, WorkloadEntry, WorkloadGroup,
    workload::{ReadinessProbe, UNIX},
};

/// Maximum length in bytes of the path of a Unix domain socket.
const MAX_SOCKET_PATH: usize = 107;

/// Checks a WorkloadEntry.
pub(crate) fn workload_entry(spec: &WorkloadEntry) -> Vec<Finding> {
    let mut findings = Findings::default();
    endpoint(spec, "spec", &mut findings);
    findings.done()
}

/// Checks a WorkloadGroup.
pub(crate) fn workload_group(spec: &WorkloadGroup) -> Vec<Finding> {
    let mut findings = Findings::default();
    let template = &spec.template;
    if *template == WorkloadEntry::default() {
        findings.add(
            Code::MissingField,
            "spec.template",
            "is missing",
            "write a template with a serviceAccount",
        );
    }
    if !template.address.is_empty() {
        let remedy = "remove it; each machine reports its own address";
        findings.add(Code::FieldNotAllowed, "spec.template.address", "is not allowed in a template", remedy);
    }
    if !template.labels.is_empty() && !spec.metadata.labels.is_empty() {
        let remedy = "write all labels to spec.metadata.labels";
        findings.add(
            Code::NoEffect,
            "spec.template.labels",
            "labels of spec.metadata take precedence",
            remedy,
        );
    }
    ports(template, "spec.template", &mut findings);
    locality(&template.locality, "spec.template.locality", &mut findings);
    if let Some(of) = &spec.probe {
        probe(of, &mut findings);
    }
    findings.done()
}

/// Checks the fields of an endpoint.
pub(super) fn endpoint(spec: &WorkloadEntry, field: &str, findings: &mut Findings) {
    let address = format!("{field}.address");
    match Address::of(&spec.address) {
        Address::Ip(_) => {}
        // The gateways of its network reach it.
        Address::Hidden if !spec.network.is_empty() => {}
        Address::Hidden => {
            let remedy = "write an IP address, a host name, or unix:// and a path";
            findings.add(Code::MissingField, address, "is missing", remedy);
        }
        Address::Unix(path) => socket(&path, &address, findings),
        Address::Name(_) => {
            if spec.address.starts_with("unix:") {
                let message = format!("{:?} is not the address of a socket", spec.address);
                findings.add(
                    Code::InvalidAddress,
                    address,
                    message,
                    format!("write {UNIX} and an absolute path"),
                );
            } else if !is_dns_name(&spec.address) {
                let message = format!("{:?} is neither an IP address nor a host name", spec.address);
                findings.add(
                    Code::InvalidAddress,
                    address,
                    message,
                    "write an IP address or a full host name",
                );
            }
        }
    }
    if spec.address.starts_with(UNIX) && !spec.ports.is_empty() {
        findings.add(
            Code::FieldNotAllowed,
            format!("{field}.ports"),
            "is not allowed with a socket",
            "remove it",
        );
    }
    ports(spec, field, findings);
    locality(&spec.locality, &format!("{field}.locality"), findings);
}

/// Checks the path of a Unix domain socket.
pub(super) fn socket(path: &str, field: &str, findings: &mut Findings) {
    if !path.starts_with(['/', '@']) {
        let remedy = format!("write {UNIX}/PATH, or {UNIX}@NAME for an abstract socket");
        findings.add(Code::InvalidPath, field, format!("{path:?} is not an absolute path"), remedy);
    } else if path.len() > MAX_SOCKET_PATH || path.contains('\0') {
        let message = format!("a path has at most {MAX_SOCKET_PATH} bytes and no NUL");
        findings.add(Code::InvalidPath, field, message, "use a shorter path");
    }
}

fn ports(spec: &WorkloadEntry, field: &str, findings: &mut Findings) {
    for (name, number) in &spec.ports {
        port(*number, &skysail_yaml::join(&format!("{field}.ports"), name), findings);
    }
}

fn locality(text: &str, field: &str, findings: &mut Findings) {
    let parts: Vec<&str> = text.split('/').collect();
    if !text.is_empty() && (parts.len() > 3 || parts.iter().any(|part| part.is_empty() || *part == "*")) {
        let remedy = "write REGION/ZONE/SUBZONE; the later parts may be missing";
        findings.add(Code::InvalidValue, field, format!("{text:?} is not a locality"), remedy);
    }
}

fn probe(probe: &ReadinessProbe, findings: &mut Findings) {
    let field = "spec.probe";
    let times = [
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ];
    for (name, _) in times.iter().filter(|(_, value)| *value < 0) {
        findings.add(
            Code::OutOfRange,
            format!("{field}.{name}"),
            "is negative",
            "write a positive number, or remove it",
        );
    }
    let methods =
        [probe.http_get.is_some(), probe.tcp_socket.is_some(), probe.exec.is_some(), probe.grpc.is_some()];
    if methods.iter().filter(|present| **present).count() != 1 {
        let remedy = "write one of httpGet, tcpSocket, exec and grpc";
        findings.add(Code::ExclusiveFields, field, "needs exactly one method", remedy);
    }
    if let Some(http) = &probe.http_get {
        port(http.port, "spec.probe.httpGet.port", findings);
        if !matches!(http.scheme.as_str(), "" | "HTTP" | "HTTPS" | "http" | "https") {
            let message = format!("{:?} is not a scheme", http.scheme);
            findings.add(Code::UnknownValue, "spec.probe.httpGet.scheme", message, "write HTTP or HTTPS");
        }
    }
    if let Some(tcp) = &probe.tcp_socket {
        port(tcp.port, "spec.probe.tcpSocket.port", findings);
    }
    if let Some(grpc) = &probe.grpc {
        port(grpc.port, "spec.probe.grpc.port", findings);
    }
    if probe.exec.as_ref().is_some_and(|exec| exec.command.is_empty()) {
        findings.add(
            Code::MissingField,
            "spec.probe.exec.command",
            "is missing",
            "write the program and its arguments",
        );
    }
}
