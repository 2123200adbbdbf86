//! Validation of ServiceEntries.

use std::{collections::BTreeMap, net::IpAddr};

use super::{Finding, Findings, export_to, host, is_dns_name, port};
use crate::api::{Address, Labels, Resolution, ServiceEntry, service_entry::WorkloadEntry};

/// Checks a ServiceEntry.
pub(crate) fn service_entry(spec: &ServiceEntry) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.hosts.is_empty() {
        findings.error("spec.hosts", "is missing", "add at least one host");
    }
    for (index, name) in spec.hosts.iter().enumerate() {
        hosts(spec, name, &format!("spec.hosts[{index}]"), &mut findings);
    }
    for (index, address) in spec.addresses.iter().enumerate() {
        let field = format!("spec.addresses[{index}]");
        let (ip, length) = address.split_once('/').unwrap_or((address, "0"));
        let ip: Option<IpAddr> = ip.parse().ok();
        let longest = if ip.is_some_and(|ip| ip.is_ipv6()) { 128 } else { 32 };
        if ip.is_none()
            || length.parse::<u8>().is_ok_and(|length| length > longest)
            || length.parse::<u8>().is_err()
        {
            let remedy = "write an IP address, or a block such as 10.0.0.0/8";
            findings.error(field, format!("{address:?} is not an IP address"), remedy);
        }
    }
    ports(spec, &mut findings);
    endpoints(spec, &mut findings);
    export_to(&spec.export_to, "spec.exportTo", &mut findings);
    if !spec.subject_alt_names.is_empty() {
        // An error, since without this check any server would be accepted.
        let remedy = "set subjectAltNames in the tls settings of a DestinationRule";
        findings.error("spec.subjectAltNames", "is not supported yet", remedy);
    }
    findings.done()
}

/// Parses the addresses allocated to hosts.
pub(crate) fn addresses(data: &Labels, findings: &mut Findings) -> BTreeMap<String, IpAddr> {
    let mut addresses = BTreeMap::new();
    for (host, text) in data {
        match text.parse() {
            Ok(address) => _ = addresses.insert(host.clone(), address),
            Err(_) => {
                let field = skysail_yaml::join("data", host);
                findings.error(field, format!("{text:?} is not an address"), "write an IP address");
            }
        }
    }
    addresses
}

fn hosts(spec: &ServiceEntry, name: &str, field: &str, findings: &mut Findings) {
    host(name, field, findings);
    let domain = format!(".svc.{}", crate::world::DOMAIN);
    if name == "*" || !name.contains('.') {
        let message = format!("{name:?} has no dot");
        findings.error(field, message, "write a full name, such as api.example.com");
    } else if name.trim_end_matches('.').ends_with(&domain) {
        let message = format!("{name:?} is the name of a Kubernetes Service");
        findings.error(field, message, "use a Service; such hosts are not supported yet in a ServiceEntry");
    } else if name.starts_with('*') && spec.resolution.is_dns() && spec.endpoints.is_empty() {
        let message = "DNS cannot resolve a wildcard";
        findings.error(field, message, "add endpoints, or use resolution NONE");
    }
}

fn ports(spec: &ServiceEntry, findings: &mut Findings) {
    if spec.ports.is_empty() {
        findings.error("spec.ports", "is missing", "add at least one port");
    }
    for (index, of) in spec.ports.iter().enumerate() {
        let field = format!("spec.ports[{index}]");
        port(of.number, &format!("{field}.number"), findings);
        if of.target_port != 0 {
            port(of.target_port, &format!("{field}.targetPort"), findings);
        }
        if of.parsed_protocol().is_none() {
            let message = format!("{:?} is not a protocol", of.protocol);
            let remedy = "use HTTP, HTTP2, GRPC, GRPC-Web, HTTPS, TLS, TCP, MONGO, MYSQL, REDIS or UDP";
            findings.error(format!("{field}.protocol"), message, remedy);
        }
        let before = &spec.ports[..index];
        if before.iter().any(|other| other.number == of.number) {
            findings.error(
                format!("{field}.number"),
                "is defined twice",
                "use a different number for each port",
            );
        }
        if before.iter().any(|other| other.name == of.name) {
            findings.error(format!("{field}.name"), "is defined twice", "use a different name for each port");
        }
    }
}

fn endpoints(spec: &ServiceEntry, findings: &mut Findings) {
    let (count, field) = (spec.endpoints.len(), "spec.endpoints");
    match spec.resolution {
        Resolution::None if count > 0 => {
            findings.error(field, "is not allowed with resolution NONE", "use STATIC or DNS");
        }
        Resolution::Static if count == 0 && spec.workload_selector.is_none() => {
            findings.error(
                field,
                "is missing",
                "add endpoints or a workloadSelector, or use another resolution",
            );
        }
        Resolution::DnsRoundRobin if count > 1 => {
            findings.error(
                field,
                "DNS_ROUND_ROBIN allows one endpoint only",
                "use DNS, or remove the other endpoints",
            );
        }
        Resolution::DynamicDns => {
            let remedy = "use DNS with full names, or NONE";
            findings.error("spec.resolution", "DYNAMIC_DNS is not supported yet", remedy);
        }
        _ => {}
    }
    if let Some(selector) = &spec.workload_selector {
        let field = "spec.workloadSelector";
        if count > 0 {
            findings.error(field, "cannot stand beside endpoints", "keep one of them");
        }
        if selector.labels.is_empty() {
            let remedy = "name labels of the pods that are its endpoints";
            findings.error(format!("{field}.labels"), "is missing", remedy);
        }
        if spec.resolution != Resolution::Static {
            findings.warning(field, "has an effect with resolution STATIC only", "write resolution: STATIC");
        }
    }
    for (index, endpoint) in spec.endpoints.iter().enumerate() {
        workload(spec, endpoint, &format!("{field}[{index}]"), findings);
    }
}

fn workload(spec: &ServiceEntry, endpoint: &WorkloadEntry, field: &str, findings: &mut Findings) {
    let address = format!("{field}.address");
    if endpoint.address.starts_with("unix:") {
        findings.error(address, "Unix domain sockets are not supported yet", "use an IP address and a port");
    } else if Address::of(&endpoint.address).ip().is_none() {
        if !is_dns_name(&endpoint.address) {
            let message = format!("{:?} is neither an IP address nor a host name", endpoint.address);
            findings.error(address, message, "write an IP address or a full host name");
        } else if !spec.resolution.is_dns() {
            let message = format!("{:?} is a host name", endpoint.address);
            findings.error(address, message, "write an IP address, or use resolution DNS");
        }
    }
    for (name, number) in &endpoint.ports {
        let field = skysail_yaml::join(&format!("{field}.ports"), name);
        port(*number, &field, findings);
        if spec.ports.iter().all(|port| port.name != *name) {
            findings.error(
                field,
                format!("the ServiceEntry has no port named {name:?}"),
                "use a name of spec.ports",
            );
        }
    }
}
