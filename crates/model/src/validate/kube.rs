//! Validation of Kubernetes' objects, as far as the mesh depends on them. The API server checks the rest.

use std::num::NonZeroU16;

use skysail_yaml::join;

use super::{Code, Finding, Findings, annotations, injection, is_dns_name, is_label_text, port};
use crate::{
    api::{
        Kind, Labels, Meta, Protocol,
        kube::{GATEWAY_PORT, TRAFFIC_DISTRIBUTION, TrafficDistribution},
        manifest::{IntOrText, ServiceManifest, ServicePortManifest},
    },
    spelling::VARIABLE,
};

/// Checks name and namespace.
pub(crate) fn meta(kind: Kind, meta: &Meta) -> Vec<Finding> {
    let mut findings = Findings::default();
    let strict = matches!(kind, Kind::Namespace | Kind::Service);
    let good = if strict {
        is_label_text(&meta.name, false)
    } else {
        meta.name.len() <= 253 && meta.name.split('.').all(|part| is_label_text(part, false))
    };
    if meta.name.is_empty() {
        findings.add(Code::MissingField, "metadata.name", "is missing", "set a name");
    } else if !good {
        let message = format!("{:?} is not a valid name", meta.name);
        let remedy = if meta.name.contains("${") {
            VARIABLE
        } else if strict {
            "use at most 63 lower-case letters, digits and '-'"
        } else {
            "use lower-case letters, digits, '-' and '.'"
        };
        findings.add(Code::InvalidName, "metadata.name", message, remedy);
    }
    if kind.is_namespaced() && !is_label_text(&meta.namespace, false) {
        let message = format!("{:?} is not a valid namespace", meta.namespace);
        findings.add(
            Code::InvalidName,
            "metadata.namespace",
            message,
            "use lower-case letters, digits and '-'",
        );
    }
    labels(&meta.labels, "metadata.labels", &mut findings);
    settings(kind, meta, &mut findings);
    injection::check(kind, meta, &mut findings);
    annotations::check(kind, &meta.annotations, &mut findings);
    findings.done()
}

/// Warns about values without effect in labels and annotations that are settings.
fn settings(kind: Kind, meta: &Meta, findings: &mut Findings) {
    let is_service = matches!(kind, Kind::Service | Kind::ServiceEntry | Kind::Namespace);
    let distribution = TrafficDistribution::of_annotation(&meta.annotations).filter(|_| is_service);
    if distribution == Some(TrafficDistribution::Any) {
        let message = "has an unknown value, so clients prefer no endpoints";
        let field = join("metadata.annotations", TRAFFIC_DISTRIBUTION);
        findings.add(Code::NoEffect, field, message, "use PreferClose, PreferSameZone or PreferSameNode");
    }
    let is_gateway = matches!(kind, Kind::Service | Kind::KubernetesGateway);
    if is_gateway && meta.labels.get(GATEWAY_PORT).is_some_and(|port| port.parse::<NonZeroU16>().is_err()) {
        let field = join("metadata.labels", GATEWAY_PORT);
        let message = "is not a port, so port 15443 applies";
        findings.add(Code::NoEffect, field, message, "write a port from 1 to 65535");
    }
}

/// Checks keys and values of labels. Source: Kubernetes, "Labels and Selectors", syntax and character set.
pub(super) fn labels(labels: &Labels, field: &str, findings: &mut Findings) {
    let good = |text: &str| {
        let end = |byte: u8| byte.is_ascii_alphanumeric();
        let bytes = text.as_bytes();
        bytes.len() <= 63
            && bytes.iter().all(|byte| end(*byte) || b"-_.".contains(byte))
            && bytes.first().is_none_or(|byte| end(*byte))
            && bytes.last().is_none_or(|byte| end(*byte))
    };
    let remedy = "use at most 63 letters, digits, '-', '_' and '.'; begin and end with a letter or digit";
    for (key, value) in labels {
        let field = join(field, key);
        let (prefix, name) =
            key.rsplit_once('/').map_or((None, &**key), |(prefix, name)| (Some(prefix), name));
        if name.is_empty() || !good(name) || prefix.is_some_and(|prefix| !is_dns_name(prefix)) {
            findings.add(Code::InvalidLabel, &field, format!("{key:?} is not a valid label key"), remedy);
        }
        if !good(value) {
            findings.add(Code::InvalidLabel, &field, format!("{value:?} is not a valid label value"), remedy);
        }
    }
}

/// Checks a Service.
pub(crate) fn service(service: &ServiceManifest, findings: &mut Findings) {
    let Some(spec) = &service.spec else {
        findings.add(Code::MissingField, "spec", "is missing", "add ports and a selector");
        return;
    };
    let distribution = spec.traffic_distribution.as_deref();
    if distribution.is_some_and(|value| TrafficDistribution::of_field(value).is_none()) {
        let message = "is not one of the values of the field";
        let remedy = "use PreferClose, PreferSameZone or PreferSameNode";
        findings.add(Code::UnknownValue, "spec.trafficDistribution", message, remedy);
    }
    let ports = &spec.ports;
    let external = spec.kind.as_deref() == Some("ExternalName");
    let headless = spec.cluster_ip.as_deref() == Some("None");
    if ports.is_empty() && !external && !headless {
        findings.add(Code::MissingField, "spec.ports", "is missing", "add at least one port");
    }
    for (index, one) in ports.iter().enumerate() {
        let field = format!("spec.ports[{index}]");
        port(u32::try_from(one.port).unwrap_or_default(), &format!("{field}.port"), findings);
        if let Some(IntOrText::Int(target)) = one.target_port {
            port(u32::try_from(target).unwrap_or_default(), &format!("{field}.targetPort"), findings);
        }
        let name = one.name.as_deref().unwrap_or_default();
        protocol_of(one, &field, findings);
        if !name.is_empty() && !is_label_text(name, false) {
            let remedy = "use at most 63 lower-case letters, digits and '-'";
            findings.add(
                Code::InvalidName,
                format!("{field}.name"),
                format!("{name:?} is not a valid port name"),
                remedy,
            );
        }
        if name.is_empty() && ports.len() > 1 {
            findings.add(
                Code::MissingField,
                format!("{field}.name"),
                "is missing",
                "name each port of a Service that has several",
            );
        }
        let protocol = |port: &ServicePortManifest| port.protocol.clone().unwrap_or_else(|| "TCP".to_owned());
        for (earlier, other) in ports[..index].iter().enumerate() {
            if other.port == one.port && protocol(other) == protocol(one) {
                let message = format!("port {} is defined twice, first in ports[{earlier}]", one.port);
                findings.add(
                    Code::DuplicatePort,
                    format!("{field}.port"),
                    message,
                    "use a different number for each port",
                );
            }
            if !name.is_empty() && other.name.as_deref() == Some(name) {
                findings.add(
                    Code::DuplicateName,
                    format!("{field}.name"),
                    format!("{name:?} is defined twice"),
                    "use a different name for each port",
                );
            }
        }
    }
    if external && spec.external_name.as_deref().unwrap_or_default().is_empty() {
        findings.add(
            Code::MissingField,
            "spec.externalName",
            "is missing; type ExternalName requires it",
            "set the host name",
        );
    }
    let addresses = spec.cluster_ip.iter().chain(&spec.cluster_ips);
    for address in addresses.filter(|text| !matches!(text.as_str(), "" | "None")) {
        if address.parse::<std::net::IpAddr>().is_err() {
            findings.add(
                Code::InvalidAddress,
                "spec.clusterIP",
                format!("{address:?} is not an IP address"),
                "remove it to have an address allocated, or write None for a headless Service",
            );
        }
    }
}

/// Protocol names of a port. Source: Istio's "Protocol Selection".
const PROTOCOLS: &[&str] =
    &["http", "http2", "https", "grpc", "grpc-web", "tcp", "tls", "mongo", "mysql", "redis", "udp"];

/// Reports words that are probably misspelt protocols: such a port is treated as one that declares none.
fn protocol_of(port: &ServicePortManifest, field: &str, findings: &mut Findings) {
    let near = |word: &str| {
        let typo = |known: &&&str| crate::spelling::distance(known, word) == 1;
        PROTOCOLS.iter().find(typo).filter(|_| word.len() >= 3 && Protocol::parse(word).is_none())
    };
    let message = |word: &str| format!("{word:?} is not a protocol, so the protocol is detected");
    match (port.app_protocol.as_deref(), port.name.as_deref()) {
        (Some(word), _) => {
            if let Some(known) = near(word) {
                findings.add(
                    Code::PortProtocolTypo,
                    format!("{field}.appProtocol"),
                    message(word),
                    format!("did you mean {known}?"),
                );
            }
        }
        (None, Some(name)) => {
            let word = name.split('-').next().unwrap_or_default();
            if let Some(known) = near(word) {
                findings.add(
                    Code::PortProtocolTypo,
                    format!("{field}.name"),
                    message(word),
                    format!("did you mean {known}?"),
                );
            }
        }
        _ => {}
    }
}
