//! Checks of ServiceEntries: hosts defined several times, ports that no address distinguishes, selectors without a pod.

use super::{ObjectReport, Report, label_text};
use crate::{
    analysis::Code,
    api::{Protocol, ServiceEntry, service_entry::host_of},
    world::entry_hosts::merges,
};

/// Variable that has the proxies of the mesh answer DNS.
const DNS_CAPTURE: &str = "ISTIO_META_DNS_CAPTURE";

impl Report<'_> {
    pub(super) fn service_entry(&mut self, about: &ObjectReport<'_, ServiceEntry>) {
        let entry = about.entry;
        for (index, host) in entry.object.spec.hosts.iter().enumerate() {
            let Some(service) = self.world.service_named(about.namespace(), &host_of(host)) else {
                continue;
            };
            let of = service.spec.entry_host.as_ref().map_or("", |entry_host| entry_host.entry.as_str());
            let first = self.world.service_entry(about.namespace(), of);
            let merged = first.is_some_and(|first| merges(&first.object.spec, &entry.object.spec));
            if of != entry.object.meta.name && !merged {
                let message = format!(
                    "ServiceEntry {of} is older and defines {host} with another resolution, location or \
                         workloadSelector; this definition has no effect"
                );
                let remedy = "use the same resolution, location and workloadSelector";
                self.report(about, Code::EntryConflict, format!("spec.hosts[{index}]"), message, remedy);
            }
        }
        self.ports_without_address(about);
        self.selected_pods(about);
    }

    /// Checks ports whose connections name no host, so that only an address distinguishes services.
    fn ports_without_address(&mut self, about: &ObjectReport<'_, ServiceEntry>) {
        let spec = &about.entry.object.spec;
        // The control plane allocates addresses for proxies that answer DNS.
        let variables = &self.world.mesh().default_config.proxy_metadata;
        let answers = variables.get(DNS_CAPTURE).is_some_and(|value| value == "true");
        let allocated =
            (self.world.allocates() || answers) && spec.hosts.iter().all(|host| spec.is_allocatable(host));
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
                self.report(about, Code::AddresslessPort, field, message, "set spec.addresses");
            }
        }
    }

    fn selected_pods(&mut self, about: &ObjectReport<'_, ServiceEntry>) {
        let Some(selector) = about.entry.object.spec.selector() else { return };
        let namespace = about.namespace();
        // Only if any workload is known, since rules may be checked alone.
        let any = self.world.any_workload();
        let entries = self.world.entries_selected(namespace, selector).next().is_some();
        if any && !entries && self.world.workloads(Some(namespace), selector).next().is_none() {
            let wanted = label_text(selector);
            let message = format!(
                "no pod or WorkloadEntry of namespace {namespace} has {wanted}, so it has no endpoints"
            );
            let remedy = "check labels and namespace";
            self.report(about, Code::SelectsNothing, "spec.workloadSelector", message, remedy);
        }
    }
}
