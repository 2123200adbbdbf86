//! Validation of ServiceEntries.

use std::{collections::BTreeMap, net::IpAddr};

use super::{Code, Finding, Findings, export_to, host, is_dns_name, port};
use crate::api::{
    Address, Labels, Protocol, Resolution, ServiceEntry, WorkloadEntry, service_entry::Location,
    workload::UNIX,
};

/// Checks a ServiceEntry.
pub(crate) fn service_entry(spec: &ServiceEntry) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.hosts.is_empty() {
        findings.add(Code::MissingField, "spec.hosts", "is missing", "add at least one host");
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
            findings.add(Code::InvalidAddress, field, format!("{address:?} is not an IP address"), remedy);
        }
    }
    ports(spec, &mut findings);
    endpoints(spec, &mut findings);
    export_to(&spec.export_to, "spec.exportTo", &mut findings);
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
                findings.add(
                    Code::InvalidAddress,
                    field,
                    format!("{text:?} is not an address"),
                    "write an IP address",
                );
            }
        }
    }
    addresses
}

fn hosts(spec: &ServiceEntry, name: &str, field: &str, findings: &mut Findings) {
    host(name, field, findings);
    if name == "*" || !name.contains('.') {
        let message = format!("{name:?} has no dot");
        findings.add(Code::InvalidHost, field, message, "write a full name, such as api.example.com");
    } else if name.starts_with('*') && spec.resolution.is_dns() && spec.endpoints.is_empty() {
        let message = "DNS cannot resolve a wildcard";
        findings.add(Code::WildcardResolution, field, message, "add endpoints, or use resolution NONE");
    }
}

fn ports(spec: &ServiceEntry, findings: &mut Findings) {
    if spec.ports.is_empty() {
        findings.add(Code::MissingField, "spec.ports", "is missing", "add at least one port");
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
            findings.add(Code::UnknownProtocol, format!("{field}.protocol"), message, remedy);
        }
        let before = &spec.ports[..index];
        if before.iter().any(|other| other.number == of.number) {
            findings.add(
                Code::DuplicatePort,
                format!("{field}.number"),
                "is defined twice",
                "use a different number for each port",
            );
        }
        if before.iter().any(|other| other.name == of.name) {
            findings.add(
                Code::DuplicateName,
                format!("{field}.name"),
                "is defined twice",
                "use a different name for each port",
            );
        }
    }
}

fn endpoints(spec: &ServiceEntry, findings: &mut Findings) {
    let (count, field) = (spec.endpoints.len(), "spec.endpoints");
    match spec.resolution {
        Resolution::None if count > 0 => {
            findings.add(
                Code::EntryResolution,
                field,
                "is not allowed with resolution NONE",
                "use STATIC or DNS",
            );
        }
        Resolution::Static if count == 0 && spec.workload_selector.is_none() => {
            findings.add(
                Code::EntryResolution,
                field,
                "is missing",
                "add endpoints or a workloadSelector, or use another resolution",
            );
        }
        Resolution::DnsRoundRobin if count > 1 => {
            findings.add(
                Code::EntryResolution,
                field,
                "DNS_ROUND_ROBIN allows one endpoint only",
                "use DNS, or remove the other endpoints",
            );
        }
        Resolution::DynamicDns => dynamic_dns(spec, findings),
        _ => {}
    }
    if let Some(selector) = &spec.workload_selector {
        let field = "spec.workloadSelector";
        if count > 0 {
            findings.add(
                Code::ExclusiveFields,
                field,
                "is not allowed together with endpoints",
                "keep one of them",
            );
        }
        if selector.labels.is_empty() {
            let remedy = "name labels of the workloads that are its endpoints";
            findings.add(
                Code::EmptySelector,
                format!("{field}.labels"),
                "is missing, so it selects no workload",
                remedy,
            );
        }
        if matches!(spec.resolution, Resolution::None | Resolution::DynamicDns) {
            let remedy = "write resolution: STATIC or DNS";
            findings.add(Code::NoEffect, field, "has no effect with resolution NONE or DYNAMIC_DNS", remedy);
        }
    }
    let sockets = spec.endpoints.iter().any(|endpoint| endpoint.address.starts_with(UNIX));
    if sockets && spec.ports.len() != 1 {
        findings.add(
            Code::EntryResolution,
            "spec.ports",
            "a socket serves exactly one port",
            "write one port",
        );
    }
    for (index, endpoint) in spec.endpoints.iter().enumerate() {
        workload(spec, endpoint, &format!("{field}[{index}]"), findings);
    }
}

/// Checks an entry with resolution DYNAMIC_DNS: proxies resolve the host of each request or connection.
fn dynamic_dns(spec: &ServiceEntry, findings: &mut Findings) {
    if !spec.endpoints.is_empty() {
        let remedy = "remove them; proxies resolve the host of each request";
        findings.add(
            Code::EntryResolution,
            "spec.endpoints",
            "is not allowed with resolution DYNAMIC_DNS",
            remedy,
        );
    }
    if spec.location != Location::MeshExternal {
        let remedy = "write location: MESH_EXTERNAL";
        findings.add(
            Code::EntryResolution,
            "spec.location",
            "must be MESH_EXTERNAL with resolution DYNAMIC_DNS",
            remedy,
        );
    }
    for (index, of) in spec.ports.iter().enumerate() {
        let protocol = of.parsed_protocol();
        if protocol.is_some_and(|protocol| !protocol.is_http() && protocol != Protocol::Tls) {
            let message = format!("{:?} names no host, which DYNAMIC_DNS needs", of.protocol);
            findings.add(
                Code::EntryResolution,
                format!("spec.ports[{index}].protocol"),
                message,
                "use HTTP or TLS",
            );
        }
    }
}

fn workload(spec: &ServiceEntry, endpoint: &WorkloadEntry, field: &str, findings: &mut Findings) {
    super::workload::endpoint(endpoint, field, findings);
    let address = format!("{field}.address");
    match Address::of(&endpoint.address) {
        Address::Name(_) if !spec.resolution.is_dns() && is_dns_name(&endpoint.address) => {
            let message = format!("{:?} is a host name", endpoint.address);
            findings.add(
                Code::EntryResolution,
                address,
                message,
                "write an IP address, or use resolution DNS",
            );
        }
        Address::Unix(_) if spec.resolution != Resolution::Static => {
            findings.add(
                Code::EntryResolution,
                address,
                "is a socket, which is not resolved",
                "use resolution STATIC",
            );
        }
        _ => {}
    }
    for name in endpoint.ports.keys() {
        let field = skysail_yaml::join(&format!("{field}.ports"), name);
        if spec.ports.iter().all(|port| port.name != *name) {
            findings.add(
                Code::UnknownPortName,
                field,
                format!("the ServiceEntry has no port named {name:?}"),
                "use a name of spec.ports",
            );
        }
    }
}
