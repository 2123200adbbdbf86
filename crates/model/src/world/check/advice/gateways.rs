//! Gateways: ports that no Service has, hosts and certificates that two Gateways serve.

use std::collections::BTreeMap;

use super::super::{ObjectReport, Report, label_text};
use crate::{
    World,
    analysis::Code,
    api::{Gateway, Kind, Labels, kube::TargetPort, selects},
    world::{gateway_api::HIDDEN, store::Entry},
};

impl Report<'_> {
    /// Reports ports of servers that no Service of the Gateway's pods has.
    pub(super) fn gateway_ports(&mut self) {
        let world = self.world.unrecorded();
        for entry in written(self.world.unrecorded()) {
            let about = ObjectReport { entry, kind: Kind::Gateway };
            let selector = &entry.object.spec.selector;
            let pods = world.pods().map(|pod| (&pod.meta.namespace, &*pod.meta.labels));
            let templates =
                world.templates().map(|template| (&template.meta.namespace, &template.spec.labels));
            let of_gateway = pods.chain(templates).filter(|(_, labels)| selects(selector, labels));
            let services: Vec<_> = of_gateway
                .flat_map(|(namespace, labels)| world.services_selecting(namespace, labels))
                .collect();
            if services.is_empty() {
                continue;
            }
            for (index, server) in entry.object.spec.servers.iter().enumerate() {
                let Some(number) = server.port.as_ref().and_then(|port| u16::try_from(port.number).ok())
                else {
                    continue;
                };
                let leads_here =
                    |target: &TargetPort| !matches!(target, TargetPort::Number(of) if *of != number);
                let mut ports = services.iter().flat_map(|service| &service.spec.ports);
                if ports.any(|port| port.port == number || leads_here(&port.target)) {
                    continue;
                }
                let names: Vec<&str> =
                    services.iter().map(|service| service.meta.name.as_str()).take(3).collect();
                let message = format!("Service {} of its pods has no port {number}", names.join(", "));
                let field = format!("spec.servers[{index}].port.number");
                self.report(
                    &about,
                    Code::GatewayPortNotOnService,
                    field,
                    message,
                    "add the port to the Service",
                );
            }
        }
    }

    /// Reports hosts and certificates that two Gateways of the same pods have.
    pub(super) fn gateway_conflicts(&mut self) {
        let mut hosts: BTreeMap<(&Labels, u32, &str), &Entry<Gateway>> = BTreeMap::new();
        let mut certificates: BTreeMap<(&Labels, &str), &Entry<Gateway>> = BTreeMap::new();
        let mut found = Vec::new();
        let mut gateways = written(self.world.unrecorded());
        gateways.sort_by(|one, other| one.age().cmp(&other.age()));
        for entry in gateways {
            let spec = &entry.object.spec;
            for (index, server) in spec.servers.iter().enumerate() {
                let port = server.port.as_ref().map_or(0, |port| port.number);
                for (at, host) in server.hosts.iter().enumerate() {
                    let bare = host.split_once('/').map_or(host.as_str(), |(_, bare)| bare);
                    let first = *hosts.entry((&spec.selector, port, bare)).or_insert(entry);
                    if !std::ptr::eq(first, entry) {
                        let field = format!("spec.servers[{index}].hosts[{at}]");
                        found.push((
                            entry,
                            first,
                            Code::GatewayConflict,
                            field,
                            format!("{bare} at port {port}"),
                        ));
                    }
                }
                let credentials = server.tls.iter().flat_map(|tls| tls.credentials());
                for name in credentials {
                    let first = *certificates.entry((&spec.selector, name)).or_insert(entry);
                    if !std::ptr::eq(first, entry) {
                        let field = format!("spec.servers[{index}].tls.credentialName");
                        let what = format!("the certificate {name}");
                        found.push((entry, first, Code::SharedCertificate, field, what));
                    }
                }
            }
        }
        for (entry, first, code, field, what) in found {
            let (about, first) = (
                ObjectReport { entry, kind: Kind::Gateway },
                ObjectReport { entry: first, kind: Kind::Gateway },
            );
            let of = label_text(&entry.object.spec.selector);
            let message = format!("{} has {what} for the same pods ({of})", first.name());
            self.report(&about, code, field, message, "merge the Gateways, or change one of them");
        }
    }
}

/// Returns the Gateways that users wrote: neither those of Gateway API nor those of Ingresses.
fn written(world: &World) -> Vec<&Entry<Gateway>> {
    let is_written = |entry: &&Entry<Gateway>| {
        entry.object.spec.only_in.is_none() && !entry.object.meta.name.ends_with(HIDDEN)
    };
    world.gateways.iter().filter(is_written).collect()
}
