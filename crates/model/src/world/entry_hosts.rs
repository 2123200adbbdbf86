//! Hosts of ServiceEntries as services, and the DNS answers for the names of their endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::{AffectedWorkloads, ChangeSet, Endpoint, World, store::Entry};
use crate::{
    api::{EntryEndpoint, EntryHost, Service, ServiceEntry, ServicePort, Typed, service_entry::host_of},
    origin::Origin,
};

/// DNS answer for a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// All addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// One address of each family, for services with resolution `DNS_ROUND_ROBIN`.
    pub current: BTreeSet<IpAddr>,
}

impl World {
    /// Returns the names of endpoints and of network gateways to look up, each with its users: services
    /// (`NAMESPACE/HOST`) and "gateway of a network".
    pub fn names_to_resolve(&self) -> BTreeMap<Arc<str>, Vec<String>> {
        let text = |(namespace, host): &(String, String)| format!("{namespace}/{host}");
        let mut names: BTreeMap<Arc<str>, Vec<String>> = self
            .name_users
            .iter()
            .map(|(name, users)| (Arc::clone(name), users.iter().map(text).collect()))
            .collect();
        for name in self.gateway_names() {
            names.entry(Arc::clone(name)).or_default().push("gateway of a network".to_owned());
        }
        names
    }

    /// Sets the DNS answer for a name; `None` removes it. Returns false if it did not change.
    pub fn resolve(&mut self, name: &str, now: Option<Resolved>) -> bool {
        if self.resolved.get(name) == now.as_ref() {
            return false;
        }
        match now {
            Some(now) => Arc::make_mut(&mut self.resolved).insert(name.into(), now),
            None => Arc::make_mut(&mut self.resolved).remove(name),
        };
        if self.gateway_names().any(|of_gateway| **of_gateway == *name) {
            self.topology.take();
        }
        let services = self.name_users.get(name).cloned().collect();
        self.add_changes(ChangeSet { services, ..ChangeSet::default() });
        true
    }

    /// Returns the DNS answer for a name.
    pub fn resolved(&self, name: &str) -> Option<&Resolved> {
        self.resolved.get(name)
    }

    pub(super) fn put_entry(&mut self, entry: Arc<Typed<ServiceEntry>>, origin: Origin) -> bool {
        let (namespace, name) = (entry.meta.namespace.clone(), entry.meta.name.clone());
        let mut hosts = self.unindex_entry(&namespace, &name);
        self.count_hosts(&namespace, &name, Some(&entry.spec));
        for host in entry.spec.hosts.iter().map(|host| host_of(host)) {
            self.entry_hosts.insert(host.clone(), &entry.meta);
            hosts.insert(host);
        }
        let changed = self.service_entries.insert(entry, origin);
        hosts.iter().for_each(|host| self.rebuild_service(&namespace, host));
        changed
    }

    pub(super) fn remove_entry(&mut self, namespace: &str, name: &str) -> bool {
        let hosts = self.unindex_entry(namespace, name);
        self.count_hosts(namespace, name, None);
        let removed = self.service_entries.remove(namespace, name);
        hosts.iter().for_each(|host| self.rebuild_service(namespace, host));
        removed
    }

    /// Counts the hosts of an entry for the allocation of addresses, instead of those that the entry had before.
    fn count_hosts(&mut self, namespace: &str, name: &str, after: Option<&ServiceEntry>) {
        let before = self.service_entries.get(namespace, name).map(|entry| Arc::clone(&entry.object));
        Arc::make_mut(&mut self.auto_addresses).replace(before.as_ref().map(|before| &before.spec), after);
    }

    /// Resolves conflicts between hosts whose addresses are allocated by hash.
    pub(super) fn settle_addresses(&mut self) {
        if !self.auto_addresses.has_conflicts_to_settle() {
            return;
        }
        let moved = Arc::make_mut(&mut self.auto_addresses).settle();
        for host in &moved {
            let namespaces: Vec<String> = self.entry_hosts.get(host).map(|(of, _)| of.clone()).collect();
            namespaces.iter().for_each(|namespace| self.rebuild_service(namespace, host));
        }
        if !moved.is_empty() {
            self.add_changes(ChangeSet::everything());
        }
    }

    /// Removes the hosts of an entry from the index and returns them.
    fn unindex_entry(&mut self, namespace: &str, name: &str) -> BTreeSet<String> {
        let Some(entry) = self.service_entries.get(namespace, name) else { return BTreeSet::new() };
        let hosts: BTreeSet<String> = entry.object.spec.hosts.iter().map(|host| host_of(host)).collect();
        hosts.iter().for_each(|host| self.entry_hosts.remove(host, &entry.object.meta));
        hosts
    }

    /// Rebuilds the service of a host in a namespace from its entries.
    pub(super) fn rebuild_service(&mut self, namespace: &str, host: &str) {
        if let Some(before) = self.services.get(namespace, host).map(|before| Arc::clone(&before.object)) {
            for endpoint in before.spec.entry_host.iter().flat_map(|entry_host| &entry_host.endpoints) {
                if let Some(ip) = endpoint.address.ip() {
                    self.endpoint_ips.remove(&ip, &before.meta);
                }
            }
            for name in before.spec.entry_host.iter().flat_map(|entry_host| entry_host.names()) {
                self.name_users.remove(name, &before.meta);
            }
        }
        let Some((service, origin)) = self.merged(namespace, host) else {
            self.services.remove(namespace, host);
            return;
        };
        for endpoint in service.spec.entry_host.iter().flat_map(|entry_host| &entry_host.endpoints) {
            if let Some(ip) = endpoint.address.ip() {
                self.endpoint_ips.insert(ip, &service.meta);
            }
        }
        for name in service.spec.entry_host.iter().flat_map(|entry_host| entry_host.names()) {
            self.name_users.insert(Arc::clone(name), &service.meta);
        }
        self.services.insert(Arc::new(service), origin);
    }

    /// Returns the service of a host in a namespace. The oldest entry defines it. As in Istio, the others of the
    /// namespace that [agree](merges) with it add their ports, endpoints and addresses.
    fn merged(&self, namespace: &str, host: &str) -> Option<(Typed<Service>, Origin)> {
        let entries = self.entry_hosts.get(host).filter(|(of, _)| of == namespace);
        let entries = entries.filter_map(|(namespace, name)| self.service_entries.get(namespace, name));
        let mut entries: Vec<&Entry<ServiceEntry>> = entries.collect();
        entries.sort_by(|a, b| a.age().cmp(&b.age()));
        let (first, others) = entries.split_first()?;
        let mut service = self.service_of(&first.object, host);
        for other in others.iter().filter(|other| merges(&first.object.spec, &other.object.spec)) {
            merge(&mut service, self.service_of(&other.object, host));
        }
        Some((service, first.origin.clone()))
    }

    fn service_of(&self, entry: &Typed<ServiceEntry>, host: &str) -> Typed<Service> {
        let selected = entry.spec.selector_of_names().into_iter();
        let selected = selected.flat_map(|selector| self.entries_selected(&entry.meta.namespace, selector));
        let selected = selected.map(|endpoint| endpoint.spec.clone()).collect();
        entry.service(host, self.allocated(host), &self.auto_addresses.of(host), selected)
    }

    /// Returns whether any ServiceEntry is known.
    pub(super) fn has_entry_hosts(&self) -> bool {
        self.entry_hosts.iter().next().is_some()
    }

    fn allocated(&self, host: &str) -> Option<IpAddr> {
        self.allocated.as_ref()?.get(host).copied()
    }

    /// Sets the addresses allocated to hosts; `None` if no allocator runs. Returns false if nothing changed.
    pub(super) fn allocate(&mut self, now: Option<BTreeMap<String, IpAddr>>) -> bool {
        let before = std::mem::replace(&mut self.allocated, now.map(Arc::new));
        if before == self.allocated {
            return false;
        }
        let known = before.iter().chain(&self.allocated).flat_map(|addresses| addresses.keys());
        let mut hosts: BTreeSet<String> = known.cloned().collect();
        hosts.retain(|host| {
            before.as_ref().and_then(|before| before.get(host).copied()) != self.allocated(host)
        });
        for host in hosts {
            let namespaces: BTreeSet<String> =
                self.entry_hosts.get(&host).map(|(namespace, _)| namespace.clone()).collect();
            namespaces.iter().for_each(|namespace| self.rebuild_service(namespace, &host));
        }
        true
    }

    /// Returns whether an allocator assigns addresses to hosts that have none.
    pub(super) fn allocates(&self) -> bool {
        self.allocated.is_some()
    }

    /// Returns the resources that depend on a ServiceEntry: those of its hosts, also where other namespaces define
    /// them.
    pub(super) fn changes_of_entry(&self, namespace: &str, name: &str) -> ChangeSet {
        let Some(entry) = self.service_entries.get(namespace, name) else { return ChangeSet::default() };
        // The workloads that are its endpoints. Another entry of a host may take effect instead, with other endpoints.
        let spec = &entry.object.spec;
        let hosts: BTreeSet<String> = spec.hosts.iter().map(|host| host_of(host)).collect();
        let mut others = self.service_entries.in_namespace(namespace).map(|entry| &entry.object);
        let is_shared = others.any(|other| {
            other.meta.name != name && other.spec.hosts.iter().any(|host| hosts.contains(&host_of(host)))
        });
        let selected = match is_shared {
            true => Some(AffectedWorkloads::ALL),
            false => spec.selector().cloned().map(AffectedWorkloads::Labelled),
        };
        let addressed = hosts.into_iter().map(AffectedWorkloads::Addressed);
        let mut changes = ChangeSet::of_workloads(namespace, addressed.chain(selected));
        for host in entry.object.spec.hosts.iter().map(|host| host_of(host)) {
            if host.starts_with('*') {
                changes.gateway_routes = true;
            } else {
                changes.add(self.gateways_of_host(&host));
            }
            for (namespace, _) in self.entry_hosts.get(&host) {
                changes.rule_hosts.insert((namespace.clone(), host.clone()));
                if let Some(service) = self.service_named(namespace, &host) {
                    changes.workloads |= self.shapes_listeners(service);
                    changes.services.insert((namespace.clone(), host.clone()));
                    changes.addresses.extend(self.addresses_of(service));
                }
            }
            // A Kubernetes Service of this name has the entry's endpoints too.
            if let Some(service) = self.kubernetes_service(&host) {
                changes.services.insert((service.meta.namespace.clone(), service.meta.name.clone()));
            }
        }
        changes.names = !changes.services.is_empty();
        changes
    }
}

/// Returns whether an entry adds to the service of an older one with the same host and namespace: resolution, location
/// and selector must be equal.
pub(super) fn merges(first: &ServiceEntry, other: &ServiceEntry) -> bool {
    first.resolution == other.resolution
        && first.location == other.location
        && first.selector() == other.selector()
}

/// Adds the ports, endpoints and addresses of another service with the same host. An endpoint serves the ports of its
/// own entry.
fn merge(service: &mut Typed<Service>, other: Typed<Service>) {
    let ports_of = |service: &Service| service.ports.iter().map(|port| port.port).collect::<Arc<[u16]>>();
    let (first, second) = (ports_of(&service.spec), ports_of(&other.spec));
    let Some(entry_host) = &mut service.spec.entry_host else { return };
    let entry_host = Arc::make_mut(entry_host);
    let limit = |endpoint: &mut EntryEndpoint, ports: &Arc<[u16]>| {
        endpoint.serves.get_or_insert_with(|| Arc::clone(ports));
    };
    entry_host.endpoints.iter_mut().for_each(|endpoint| limit(endpoint, &first));
    for mut endpoint in other.spec.entry_host.iter().flat_map(|other| other.endpoints.iter().cloned()) {
        limit(&mut endpoint, &second);
        entry_host.endpoints.push(endpoint);
    }
    for port in other.spec.ports {
        if service.spec.ports.iter().all(|known| known.port != port.port) {
            service.spec.ports.push(port);
        }
    }
    for ip in other.spec.cluster_ips {
        if !service.spec.cluster_ips.contains(&ip) {
            service.spec.cluster_ips.push(ip);
        }
    }
}

/// Returns the endpoints of a port.
pub(super) fn endpoints(entry_host: &EntryHost, port: &ServicePort) -> Vec<Endpoint> {
    entry_host.endpoints.iter().filter_map(|from| endpoint(from, port)).collect()
}

/// Returns the endpoint for a port; `None` if it does not serve the port.
pub(super) fn endpoint(from: &EntryEndpoint, port: &ServicePort) -> Option<Endpoint> {
    let number = from.port(port)?;
    Some(Endpoint {
        address: from.address.clone(),
        name: None,
        port: number,
        pod: Some(Arc::clone(&from.workload)),
        locality: from.locality.clone(),
        weight: from.weight,
        ready: true,
    })
}
