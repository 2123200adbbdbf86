//! WorkloadEntries as endpoints, and the services that reach a workload by its address instead of its labels.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use super::{ChangeSet, World};
use crate::{
    api::{
        Address, EntryEndpoint, Labels, Service, ServicePort, Typed, WorkloadEntry, kube::TargetPort,
        selects, service_entry::host_of,
    },
    origin::Origin,
};

/// Service port that leads to a workload by its address: the service's name (in the workload's namespace), the service
/// port, the workload's port.
pub type Addressed = (String, u16, u16);

impl EntryEndpoint {
    /// Returns the endpoint's port for a service port. `None` if it does not serve it.
    pub(crate) fn port(&self, port: &ServicePort) -> Option<u16> {
        if self.serves.as_ref().is_some_and(|serves| !serves.contains(&port.port)) {
            return None;
        }
        match (self.ports.get(&port.name), &port.target) {
            (Some(own), _) => Some(*own),
            (None, TargetPort::Number(number)) => Some(*number),
            (None, TargetPort::Name(name)) => self.ports.get(name).copied(),
        }
    }
}

impl World {
    pub(super) fn put_workload_entry(&mut self, object: Arc<Typed<WorkloadEntry>>, origin: Origin) -> bool {
        let namespace = object.meta.namespace.clone();
        let mut labels = self.unindex_workload_entry(&namespace, &object.meta.name);
        let endpoint = object.endpoint();
        self.workload_labels.insert(&endpoint.meta);
        if let Some(ip) = endpoint.spec.address.ip() {
            self.workload_ips.insert(ip, &endpoint.meta);
        }
        labels.push(Arc::clone(&endpoint.meta.labels));
        self.entry_workloads.insert(Arc::new(endpoint), origin.clone());
        let changed = self.workload_entries.insert(object, origin);
        self.rebuild_resolved(&namespace, &labels);
        changed
    }

    pub(super) fn remove_workload_entry(&mut self, namespace: &str, name: &str) -> bool {
        let labels = self.unindex_workload_entry(namespace, name);
        self.entry_workloads.remove(namespace, name);
        let removed = self.workload_entries.remove(namespace, name);
        self.rebuild_resolved(namespace, &labels);
        removed
    }

    /// Removes a WorkloadEntry from the indexes. Returns its labels.
    fn unindex_workload_entry(&mut self, namespace: &str, name: &str) -> Vec<Arc<Labels>> {
        let Some(before) = self.entry_workloads.get(namespace, name) else { return Vec::new() };
        let before = Arc::clone(&before.object);
        self.workload_labels.remove(&before.meta);
        if let Some(ip) = before.spec.address.ip() {
            self.workload_ips.remove(&ip, &before.meta);
        }
        vec![Arc::clone(&before.meta.labels)]
    }

    /// Rebuilds the services whose names to resolve come from WorkloadEntries with these labels.
    fn rebuild_resolved(&mut self, namespace: &str, labels: &[Arc<Labels>]) {
        let selecting = self.service_entries.in_namespace(namespace).filter(|entry| {
            let selector = entry.object.spec.selector_of_names();
            selector.is_some_and(|selector| labels.iter().any(|labels| selects(selector, labels)))
        });
        let hosts: BTreeSet<String> =
            selecting.flat_map(|entry| entry.object.spec.hosts.iter()).map(|host| host_of(host)).collect();
        hosts.iter().for_each(|host| self.rebuild_service(namespace, host));
    }

    /// Returns the endpoints of the WorkloadEntries of a namespace that have these labels; none for the empty selector.
    pub(super) fn entries_selected<'a>(
        &'a self,
        namespace: &'a str,
        selector: &'a Labels,
    ) -> impl Iterator<Item = &'a Arc<Typed<EntryEndpoint>>> {
        let names = self.workload_labels.candidates(namespace, selector);
        let entries = names.filter_map(move |name| self.entry_workloads.get(namespace, name));
        entries.map(|entry| &entry.object).filter(move |entry| selects(selector, &entry.meta.labels))
    }

    /// Returns the resources that depend on a WorkloadEntry: the services that select it.
    pub(super) fn changes_of_workload_entry(&self, namespace: &str, name: &str) -> ChangeSet {
        let Some(entry) = self.entry_workloads.get(namespace, name).map(|entry| &entry.object) else {
            return ChangeSet::default();
        };
        let mut changes = ChangeSet::default();
        changes.addresses.extend(entry.spec.address.ip());
        for service in self.services_selecting(namespace, &entry.meta.labels) {
            changes.add(self.changes_of_endpoints(namespace, &service.meta.name));
        }
        for entry_of_names in self.service_entries.in_namespace(namespace) {
            let spec = &entry_of_names.object.spec;
            if spec.selector_of_names().is_some_and(|selector| selects(selector, &entry.meta.labels)) {
                let hosts = spec.hosts.iter().map(|host| (namespace.to_owned(), host_of(host)));
                changes.services.extend(hosts);
            }
        }
        changes
    }

    /// Returns the addresses of the WorkloadEntries that a service selects, and of its own endpoints. A proxy with one
    /// of them may have other inbound ports after a change of the service.
    pub(super) fn addresses_of(&self, service: &Typed<Service>) -> BTreeSet<IpAddr> {
        let (namespace, name) = (&service.meta.namespace, &service.meta.name);
        let selected = self.entries_selected(namespace, &service.spec.selector);
        let mut found: BTreeSet<IpAddr> = selected.filter_map(|entry| entry.spec.address.ip()).collect();
        if let Some(entry_host) = &service.spec.entry_host {
            found.extend(entry_host.endpoints.iter().filter_map(|endpoint| endpoint.address.ip()));
        } else if service.spec.selector.is_empty() {
            let slices = self.slices_of(namespace, name);
            found.extend(slices.flat_map(|slice| slice.spec.endpoints.iter().map(|endpoint| endpoint.ip)));
        }
        found
    }

    /// Returns the ports of the namespace's services that lead to a workload with these addresses because an endpoint
    /// has one of them. Services that select pods by label are not among them. As in Istio, services of other
    /// namespaces are not either: they may not open ports here.
    pub fn services_at(&self, namespace: &str, ips: &[IpAddr]) -> Vec<Addressed> {
        let mut found = BTreeSet::new();
        for ip in ips {
            let mine = self.endpoint_ips.get(ip).filter(|(of, _)| of == namespace);
            for service in mine.filter_map(|(_, name)| self.service_named(namespace, name)) {
                self.ports_at(service, *ip, &mut found);
            }
            let entries = self.workload_ips.get(ip).filter(|(of, _)| of == namespace);
            let entries = entries.filter_map(|(_, name)| self.entry_workloads.get(namespace, name));
            for entry in entries.map(|entry| &entry.object) {
                for service in self.services_selecting(namespace, &entry.meta.labels) {
                    let targets =
                        service.spec.ports.iter().map(|port| (port, entry.spec.port(port))).collect();
                    add(service, targets, &mut found);
                }
            }
        }
        found.into_iter().collect()
    }

    fn ports_at(&self, service: &Typed<Service>, ip: IpAddr, found: &mut BTreeSet<Addressed>) {
        let at = |port| {
            let here = self.endpoints(service, port).into_iter();
            here.filter(|endpoint| endpoint.address == Address::Ip(ip)).map(|endpoint| endpoint.port).next()
        };
        if service.spec.selector.is_empty() {
            add(service, service.spec.ports.iter().map(|port| (port, at(port))).collect(), found);
        }
    }
}

fn add(service: &Typed<Service>, targets: Vec<(&ServicePort, Option<u16>)>, found: &mut BTreeSet<Addressed>) {
    let targets = targets.into_iter().filter_map(|(port, target)| Some((port.port, target?)));
    found.extend(targets.map(|(port, target)| (service.meta.name.clone(), port, target)));
}
