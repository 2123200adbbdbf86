//! Services: ports without a declared protocol, workloads of several Services, ServiceEntries with the same addresses.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{ObjectReport, Report};
use crate::{
    analysis::Code,
    api::{Kind, Protocol, Service, ServiceEntry, kube::TargetPort},
    world::store::Entry,
};

/// Namespaces whose Services are not those of users. Source: istioctl, which leaves them out too.
const SYSTEM: &[&str] = &["istio-system", "kube-node-lease", "kube-public", "kube-system"];

impl Report<'_> {
    /// Reports ports that declare no protocol, and TCP ports of ExternalName Services.
    pub(super) fn service_ports_by_name(&mut self) {
        let world = self.world.unrecorded();
        let typos = self.diagnostics.iter().filter(|found| found.code == Code::PortProtocolTypo);
        let typos: BTreeSet<(String, u32)> = typos.map(|found| (found.file.clone(), found.line)).collect();
        for entry in world.services.iter().filter(|entry| entry.object.spec.entry_host.is_none()) {
            let about = ObjectReport { entry, kind: Kind::Service };
            if SYSTEM.contains(&about.namespace()) {
                continue;
            }
            let spec = &entry.object.spec;
            for (index, port) in spec.ports.iter().enumerate() {
                let field = format!("spec.ports[{index}].name");
                if typos.contains(&(entry.origin.file.to_string(), entry.origin.line_of(&field))) {
                    continue;
                }
                let name = if port.name.is_empty() { "without a name".to_owned() } else { port.name.clone() };
                let names_no_host = matches!(port.protocol, Protocol::Unknown | Protocol::Tcp);
                if spec.external_name.is_some() && names_no_host {
                    let message = format!(
                        "port {} ({name}) is TCP, and TCP connections name no host: they may go elsewhere",
                        port.port
                    );
                    let remedy = "name the port http, https or tls";
                    self.report(&about, Code::ExternalNamePort, field, message, remedy);
                } else if port.protocol == Protocol::Unknown {
                    let message =
                        format!("port {} ({name}) declares no protocol, so it is detected", port.port);
                    let remedy = "name it PROTOCOL or PROTOCOL-NAME, or set appProtocol";
                    self.report(&about, Code::PortProtocolUnknown, field, message, remedy);
                }
            }
        }
    }

    /// Reports workloads of several Services, if two of these use the same port with different protocols, or map
    /// different ports to one port of the container.
    pub(super) fn pods_of_several_services(&mut self) {
        let world = self.world.unrecorded();
        let templates = world.templates.values().flat_map(|templates| templates.iter());
        for entry in templates.filter(|entry| entry.object.spec.allows_injection) {
            let about = ObjectReport { entry, kind: entry.object.spec.kind };
            let services = world.services_selecting(about.namespace(), &entry.object.spec.labels);
            let mut by_port: BTreeMap<u16, (Protocol, &str)> = BTreeMap::new();
            let mut by_target: BTreeMap<String, (u16, &str)> = BTreeMap::new();
            for service in services {
                let name = service.meta.name.as_str();
                for port in &service.spec.ports {
                    let (protocol, first) = *by_port.entry(port.port).or_insert((port.protocol, name));
                    if first != name && protocol != port.protocol {
                        let message = format!(
                            "Services {first} and {name} use port {} with different protocols",
                            port.port
                        );
                        let remedy = "use the same protocol, or different ports";
                        self.report(&about, Code::PodPortProtocols, "spec.template", message, remedy);
                    }
                    let target = match &port.target {
                        TargetPort::Number(number) => number.to_string(),
                        TargetPort::Name(name) => name.clone(),
                    };
                    let (number, first) = *by_target.entry(target).or_insert((port.port, name));
                    if first != name && number != port.port {
                        let message = format!(
                            "Services {first} and {name} map ports {number} and {} to the same port of the container",
                            port.port
                        );
                        let remedy = "use the same port in both Services";
                        self.report(&about, Code::PodTargetPorts, "spec.template", message, remedy);
                    }
                }
            }
        }
    }

    /// Reports ServiceEntries with the same address and port but different hosts, if the protocol names no host.
    pub(super) fn entry_addresses(&mut self) {
        let mut seen: BTreeMap<(&str, u32), &Entry<ServiceEntry>> = BTreeMap::new();
        let mut found = Vec::new();
        let mut entries: Vec<_> = self.world.unrecorded().service_entries.iter().collect();
        entries.sort_by(|one, other| one.age().cmp(&other.age()));
        for entry in entries {
            let spec = &entry.object.spec;
            let opaque = |protocol: Protocol| !protocol.is_http() && !protocol.is_tls();
            let ports = spec.ports.iter().filter(|port| port.parsed_protocol().is_some_and(opaque));
            for port in ports {
                for (index, address) in spec.addresses.iter().enumerate() {
                    let first = *seen.entry((address, port.number)).or_insert(entry);
                    let is_same_host = first.object.spec.hosts == spec.hosts;
                    if !std::ptr::eq(first, entry) && !is_same_host {
                        found.push((entry, first, index, format!("{address}:{}", port.number)));
                    }
                }
            }
        }
        for (entry, first, index, place) in found {
            let about = ObjectReport { entry, kind: Kind::ServiceEntry };
            let first = ObjectReport { entry: first, kind: Kind::ServiceEntry }.name();
            let message = format!(
                "{first} has {place} too; all connections go to the older entry, because they name no host"
            );
            let field = format!("spec.addresses[{index}]");
            self.report(
                &about,
                Code::EntryAddressConflict,
                field,
                message,
                "use different addresses or ports",
            );
        }
    }
}

/// Returns whether a Service has a port whose protocol is HTTP or is detected.
pub(super) fn has_http(service: &Service) -> bool {
    service.ports.iter().any(|port| port.protocol.is_http() || port.protocol == Protocol::Unknown)
}
