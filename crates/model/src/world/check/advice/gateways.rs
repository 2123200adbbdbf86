//! Gateways: ports that no Service has, hosts and certificates that two Gateways serve.

use std::collections::BTreeMap;

use super::{
    super::{ObjectReport, Report, label_text, workloads},
    MAX_PAIRS,
};
use crate::{
    World,
    analysis::Code,
    api::{Gateway, Kind, Labels, gateway::Server, kube::TargetPort, selects},
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

    /// Reports hosts that two Gateways of the same pods serve at a port.
    pub(super) fn gateway_conflicts(&mut self) {
        let world = self.world.unrecorded();
        let gateways = by_age(world);
        let mut groups: BTreeMap<(u32, &str), Vec<Served<'_>>> = BTreeMap::new();
        for entry in &gateways {
            for (index, server) in entry.object.spec.servers.iter().enumerate() {
                let port = server.port.as_ref().map_or(0, |port| port.number);
                for (at, host) in server.hosts.iter().enumerate() {
                    let (namespace, bare) = host.split_once('/').unwrap_or(("*", host));
                    let own = &entry.object.meta.namespace;
                    let namespace = if namespace == "." { own } else { namespace };
                    let field = (index, at);
                    groups.entry((port, bare)).or_default().push(Served { entry, server, namespace, field });
                }
            }
        }
        let (mut pairs, mut selected) = (0, BTreeMap::new());
        let (mut found, mut cut) = (Vec::new(), None);
        for ((port, host), served) in &groups {
            for one in served {
                let left = MAX_PAIRS.saturating_sub(pairs);
                let rival = served.iter().take(left).find(|other| {
                    pairs += 1;
                    one.overlaps(other)
                        && is_of_same_pods(world, one.selector(), other.selector(), &mut selected)
                });
                if rival.is_none() && served.len() > left {
                    cut.get_or_insert(one.entry);
                }
                found.extend(rival.map(|rival| (*one, rival.entry, *port, *host)));
            }
        }
        if let Some(entry) = cut {
            self.incomplete(&ObjectReport { entry, kind: Kind::Gateway }, &[Code::GatewayConflict]);
        }
        for (one, rival, port, host) in found {
            let about = ObjectReport { entry: one.entry, kind: Kind::Gateway };
            let rival = ObjectReport { entry: rival, kind: Kind::Gateway }.name();
            let of = label_text(one.selector());
            let message = format!("{rival} has {host} at port {port} for the same pods ({of})");
            let field = format!("spec.servers[{}].hosts[{}]", one.field.0, one.field.1);
            self.report(&about, Code::GatewayConflict, field, message, MERGE);
        }
    }

    /// Reports certificates that another Gateway of the same pods uses too.
    pub(super) fn shared_certificates(&mut self) {
        let gateways = by_age(self.world.unrecorded());
        let mut groups: BTreeMap<&str, Vec<(&Entry<Gateway>, usize)>> = BTreeMap::new();
        for entry in &gateways {
            for (index, server) in entry.object.spec.servers.iter().enumerate() {
                for name in server.tls.iter().flat_map(|tls| tls.credentials()) {
                    groups.entry(name).or_default().push((entry, index));
                }
            }
        }
        let (mut pairs, mut is_cut) = (0, false);
        for (name, users) in groups {
            for (entry, index) in &users {
                let selector = &entry.object.spec.selector;
                let left = MAX_PAIRS.saturating_sub(pairs);
                let rival = users.iter().take(left).find(|(other, _)| {
                    pairs += 1;
                    !std::ptr::eq(*other, *entry) && selects(selector, &other.object.spec.selector)
                });
                let about = ObjectReport { entry, kind: Kind::Gateway };
                if rival.is_none() && users.len() > left && !std::mem::replace(&mut is_cut, true) {
                    self.incomplete(&about, &[Code::SharedCertificate]);
                }
                let Some((rival, _)) = rival else { continue };
                let rival = ObjectReport { entry: rival, kind: Kind::Gateway }.name();
                let of = label_text(selector);
                let message = format!("{rival} has the certificate {name} for the same pods ({of})");
                let field = format!("spec.servers[{index}].tls.credentialName");
                self.report(&about, Code::SharedCertificate, field, message, MERGE);
            }
        }
    }
}

/// Remedy for two Gateways of the same pods.
const MERGE: &str = "merge the Gateways, or change one of them";

/// A host of a server.
#[derive(Clone, Copy)]
struct Served<'a> {
    entry: &'a Entry<Gateway>,
    server: &'a Server,
    /// Namespace of the VirtualServices that may use it, or `*`.
    namespace: &'a str,
    /// Positions of the server and of the host.
    field: (usize, usize),
}

impl<'a> Served<'a> {
    fn selector(&self) -> &'a Labels {
        &self.entry.object.spec.selector
    }

    /// Returns whether both serve VirtualServices of one namespace at the same address.
    fn overlaps(&self, other: &Self) -> bool {
        let is_common = self.namespace == "*" || other.namespace == "*" || self.namespace == other.namespace;
        !std::ptr::eq(self.entry, other.entry) && is_common && self.server.bind == other.server.bind
    }
}

/// Returns whether two selectors are for the same pods: they are equal, or one has the labels of the other and selects a
/// workload. `selected` keeps which of them do.
fn is_of_same_pods<'a>(
    world: &World,
    one: &'a Labels,
    other: &'a Labels,
    selected: &mut BTreeMap<&'a Labels, bool>,
) -> bool {
    let narrow = if one.len() < other.len() { other } else { one };
    let wide = if one.len() < other.len() { one } else { other };
    one == other
        || selects(wide, narrow)
            && *selected.entry(narrow).or_insert_with(|| workloads(world, None, narrow).next().is_some())
}

/// Returns the Gateways that users wrote, oldest first.
fn by_age(world: &World) -> Vec<&Entry<Gateway>> {
    let mut gateways = written(world);
    gateways.sort_by(|one, other| one.age().cmp(&other.age()));
    gateways
}

/// Returns the Gateways that users wrote: neither those of Gateway API nor those of Ingresses.
pub(super) fn written(world: &World) -> Vec<&Entry<Gateway>> {
    let is_written = |entry: &&Entry<Gateway>| {
        entry.object.spec.only_in.is_none() && !entry.object.meta.name.ends_with(HIDDEN)
    };
    world.gateways.iter().filter(is_written).collect()
}
