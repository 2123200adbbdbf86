//! Services: addresses that clash, and named ports no container has.

use std::collections::HashMap;

use super::{About, Report, label_text, workloads};
use crate::{
    api::{Kind, Protocol, Service, kube::TargetPort},
    diagnostic::Severity,
    world::store::Entry,
};

impl Report<'_> {
    pub(super) fn services(&mut self) {
        let mut addresses = HashMap::new();
        let mut http_ports = HashMap::new();
        let kubernetes = |entry: &&Entry<Service>| entry.object.spec.outside.is_none();
        for entry in self.world.services.iter().filter(kubernetes) {
            for port in entry.object.spec.ports.iter().filter(|port| port.protocol.is_http()) {
                http_ports.entry(port.port).or_insert(About { entry, kind: Kind::Service });
            }
        }
        for entry in self.world.services.iter().filter(kubernetes) {
            let about = About { entry, kind: Kind::Service };
            for address in &entry.object.spec.cluster_ips {
                if let Some(other) = addresses.insert(*address, About { entry, kind: Kind::Service }) {
                    let message = format!("{address} is also the address of {}", other.name());
                    self.say(
                        &about,
                        Severity::Error,
                        "spec.clusterIP",
                        message,
                        "give each service its own address",
                    );
                }
            }
            self.named_ports(&about);
            self.addressless(&about, &http_ports);
        }
    }

    /// A `targetPort` by name that no container has.
    fn named_ports(&mut self, about: &About<'_, Service>) {
        let service = &about.entry.object;
        if service.spec.selector.is_empty() {
            return;
        }
        let namespace = about.namespace();
        let taken = workloads(self.world, Some(namespace), &service.spec.selector).next().is_some();
        // Where workloads are known at all, and not only rules.
        let any = self.world.pods().next().is_some() || self.world.templates().next().is_some();
        if any && !taken {
            let wanted = label_text(&service.spec.selector);
            let message = format!("no pod of namespace {namespace} has {wanted}, so it has no endpoints");
            self.say(about, Severity::Warning, "spec.selector", message, "check labels and namespace");
        }
        for (index, port) in service.spec.ports.iter().enumerate() {
            let TargetPort::Name(name) = &port.target else { continue };
            let mut pods = self.world.pods_selected(about.namespace(), &service.spec.selector).peekable();
            let some = pods.peek().is_some();
            if some && pods.all(|pod| port.resolve(&pod.spec).is_none()) {
                let message =
                    format!("no container of its pods has a port named {name:?}, so it has no endpoints");
                let field = format!("spec.ports[{index}].targetPort");
                self.say(
                    about,
                    Severity::Error,
                    field,
                    message,
                    "name the container's port, or use its number",
                );
            }
        }
    }

    /// TCP without an address of its own is told apart by the port alone, where HTTP may stand already.
    fn addressless(&mut self, about: &About<'_, Service>, http_ports: &HashMap<u16, About<'_, Service>>) {
        let spec = &about.entry.object.spec;
        if !spec.cluster_ips.is_empty() || spec.headless || spec.external_name.is_some() {
            return;
        }
        for (index, port) in spec.ports.iter().enumerate().filter(|(_, port)| port.protocol == Protocol::Tcp)
        {
            if let Some(other) = http_ports.get(&port.port) {
                let message = format!("has no address, and port {} is HTTP for {}", port.port, other.name());
                let field = format!("spec.ports[{index}].port");
                self.say(about, Severity::Warning, field, message, "give it a clusterIP, or another port");
            }
        }
    }
}
