//! Kubernetes' objects, as far as the mesh stands on them; for the rest the API server is there.

use k8s_openapi::{api::core::v1::Service, apimachinery::pkg::util::intstr::IntOrString};

use super::{Finding, Findings, is_label_text, port};
use crate::api::{Kind, Meta};

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
        findings.error("metadata.name", "is missing", "name the object");
    } else if !good {
        let message = format!("{:?} is not a name", meta.name);
        findings.error("metadata.name", message, "use lower-case letters, digits and '-'");
    }
    if kind.is_namespaced() && !is_label_text(&meta.namespace, false) {
        let message = format!("{:?} is not a namespace", meta.namespace);
        findings.error("metadata.namespace", message, "use lower-case letters, digits and '-'");
    }
    findings.done()
}

/// Checks a Service.
pub(crate) fn service(service: &Service) -> Vec<Finding> {
    let mut findings = Findings::default();
    let Some(spec) = &service.spec else {
        findings.error("spec", "is missing", "add ports and a selector");
        return findings.done();
    };
    let ports = spec.ports.as_deref().unwrap_or_default();
    let external = spec.type_.as_deref() == Some("ExternalName");
    let headless = spec.cluster_ip.as_deref() == Some("None");
    if ports.is_empty() && !external && !headless {
        findings.error("spec.ports", "is missing", "a service needs at least one port");
    }
    for (index, one) in ports.iter().enumerate() {
        let field = format!("spec.ports[{index}]");
        port(u32::try_from(one.port).unwrap_or_default(), &format!("{field}.port"), &mut findings);
        if let Some(IntOrString::Int(target)) = one.target_port {
            port(u32::try_from(target).unwrap_or_default(), &format!("{field}.targetPort"), &mut findings);
        }
        let name = one.name.as_deref().unwrap_or_default();
        if name.is_empty() && ports.len() > 1 {
            findings.error(format!("{field}.name"), "is missing", "with several ports, each needs a name");
        }
        let protocol = |port: &k8s_openapi::api::core::v1::ServicePort| {
            port.protocol.clone().unwrap_or_else(|| "TCP".to_owned())
        };
        for (earlier, other) in ports[..index].iter().enumerate() {
            if other.port == one.port && protocol(other) == protocol(one) {
                let message = format!("port {} stands twice, first in ports[{earlier}]", one.port);
                findings.error(format!("{field}.port"), message, "give each port its own number");
            }
            if !name.is_empty() && other.name.as_deref() == Some(name) {
                findings.error(
                    format!("{field}.name"),
                    format!("{name:?} stands twice"),
                    "give each port its own name",
                );
            }
        }
    }
    let addresses = spec.cluster_ip.iter().chain(spec.cluster_ips.iter().flatten());
    for address in addresses.filter(|text| !matches!(text.as_str(), "" | "None")) {
        if address.parse::<std::net::IpAddr>().is_err() {
            findings.error(
                "spec.clusterIP",
                format!("{address:?} is not an address"),
                "leave it out to get one",
            );
        }
    }
    findings.done()
}
