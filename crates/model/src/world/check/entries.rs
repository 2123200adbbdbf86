//! Checks of ServiceEntries: hosts defined several times, ports that no address distinguishes, selectors without a pod.

use super::{About, Report, label_text, workloads};
use crate::{
    api::{Kind, Protocol, ServiceEntry, service_entry::host_of},
    diagnostic::Severity,
};

impl Report<'_> {
    pub(super) fn service_entries(&mut self) {
        for entry in self.world.service_entries.iter() {
            let about = About { entry, kind: Kind::ServiceEntry };
            for (index, host) in entry.object.spec.hosts.iter().enumerate() {
                let Some(service) = self.world.service_named(about.namespace(), &host_of(host)) else {
                    continue;
                };
                let of = service.spec.entry_host.as_ref().map_or("", |entry_host| entry_host.entry.as_str());
                if of != entry.object.meta.name {
                    let message = format!(
                        "ServiceEntry {of} is older and defines {host}; this definition has no effect"
                    );
                    let remedy = "merge endpoints and ports into one ServiceEntry";
                    self.report(&about, Severity::Error, format!("spec.hosts[{index}]"), message, remedy);
                }
            }
            self.ports_without_address(&about);
            self.selected_pods(&about);
        }
    }

    /// Checks ports whose connections name no host, so that only an address distinguishes services.
    fn ports_without_address(&mut self, about: &About<'_, ServiceEntry>) {
        let spec = &about.entry.object.spec;
        let allocated = self.world.allocates() && spec.hosts.iter().all(|host| spec.is_allocatable(host));
        if !spec.addresses.is_empty() || allocated {
            return;
        }
        for (index, port) in spec.ports.iter().enumerate() {
            let may_name_none = |protocol: Protocol| !protocol.is_http() && !protocol.is_tls();
            if port.parsed_protocol().is_some_and(may_name_none) {
                let number = port.number;
                let message = format!(
                    "has no address to recognise connections by: those to port {number} of any address that no \
                     other service has go to this host"
                );
                let field = format!("spec.ports[{index}]");
                self.report(about, Severity::Warning, field, message, "set spec.addresses");
            }
        }
    }

    fn selected_pods(&mut self, about: &About<'_, ServiceEntry>) {
        let Some(selector) = about.entry.object.spec.selector() else { return };
        let namespace = about.namespace();
        // Only if any workload is known, since rules may be checked alone.
        let any = self.world.pods().next().is_some() || self.world.templates().next().is_some();
        if any && workloads(self.world, Some(namespace), selector).next().is_none() {
            let wanted = label_text(selector);
            let message = format!("no pod of namespace {namespace} has {wanted}, so it has no endpoints");
            let remedy = "check labels and namespace";
            self.report(about, Severity::Warning, "spec.workloadSelector", message, remedy);
        }
    }
}
