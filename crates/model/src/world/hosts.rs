//! Objects of a host name, by client namespace: services, VirtualServices and their visibility.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    DOMAIN, World,
    index::HostIndex,
    store::{Age, Entry, Store},
};
use crate::api::{
    Service, Typed, VirtualService,
    entry_visibility::{EntryVisibility, EntryVisibilityRule},
    namespace_selector::NamespaceSelector,
};

/// Port for the hosts of a VirtualService that are not services.
pub(crate) const WELL_KNOWN_PORT: u16 = 80;

/// Returns the full name of a host in an object of this namespace. As in Istio, only a name without dots is completed:
/// `reviews.default` stays as it is and names no service.
pub fn fqdn(host: &str, namespace: &str) -> String {
    if host.is_empty() || host.contains(['.', '*', ':']) {
        host.trim_end_matches('.').to_ascii_lowercase()
    } else {
        skysail_core::names::service_fqdn(&host.to_ascii_lowercase(), namespace, DOMAIN)
    }
}

/// Returns whether `pattern` (`*`, `*.example.com` or a full name) matches `host`.
pub fn host_matches(pattern: &str, host: &str) -> bool {
    match pattern.strip_prefix('*') {
        Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix) || suffix.is_empty(),
        None => pattern == host,
    }
}

impl Typed<Service> {
    /// Returns the full name: `reviews.default.svc.cluster.local`, or the host of a ServiceEntry.
    pub fn fqdn(&self) -> String {
        match self.spec.entry_host {
            Some(_) => self.meta.name.clone(),
            None => skysail_core::names::service_fqdn(&self.meta.name, &self.meta.namespace, DOMAIN),
        }
    }
}

impl World {
    /// Returns the service of this full name.
    pub fn service(&self, fqdn: &str) -> Option<&Arc<Typed<Service>>> {
        self.service_entry(fqdn).map(|entry| &entry.object)
    }

    pub(super) fn service_entry(&self, fqdn: &str) -> Option<&Entry<Service>> {
        self.kubernetes_entry(fqdn)
            .or_else(|| self.entry_host_services(fqdn).min_by(|a, b| a.age().cmp(&b.age())))
    }

    /// Returns the Kubernetes Service of this full name.
    pub(super) fn kubernetes_service(&self, fqdn: &str) -> Option<&Arc<Typed<Service>>> {
        self.kubernetes_entry(fqdn).map(|entry| &entry.object)
    }

    fn kubernetes_entry(&self, fqdn: &str) -> Option<&Entry<Service>> {
        let own = fqdn.strip_suffix(DOMAIN)?.strip_suffix(".svc.")?;
        let (name, namespace) = own.split_once('.')?;
        self.services.get(namespace, name).filter(|entry| entry.object.spec.entry_host.is_none())
    }

    /// Returns the namespaces that define a service of this full name.
    pub fn services_of_host(&self, fqdn: &str) -> BTreeSet<&str> {
        let service = self.service_entry(fqdn).map(|entry| &*entry.object.meta.namespace);
        let of_entries = self.entry_host_services(fqdn).map(|entry| &*entry.object.meta.namespace);
        service.into_iter().chain(of_entries).collect()
    }

    /// Returns the services of a host of ServiceEntries, by namespace.
    fn entry_host_services(&self, host: &str) -> impl Iterator<Item = &Entry<Service>> {
        let namespaces: BTreeSet<&String> =
            self.entry_hosts.get(host).map(|(namespace, _)| namespace).collect();
        namespaces.into_iter().filter_map(move |namespace| self.services.get(namespace, host))
    }

    /// Returns whether clients of this namespace use this service for its host. If visible ServiceEntries of several
    /// namespaces define the host, that of the client's namespace takes precedence, then the oldest.
    pub fn service_chosen(&self, service: &Typed<Service>, namespace: &str) -> bool {
        if service.spec.entry_host.is_none() {
            return true;
        }
        // Hosts below the domain of the cluster: a Kubernetes Service takes precedence.
        if self.kubernetes_service(&service.meta.name).is_some() {
            return false;
        }
        let visible = |entry: &&Entry<Service>| self.service_visible(&entry.object, namespace);
        let entries = self.entry_host_services(&service.meta.name).filter(visible);
        let own = |entry: &Entry<Service>| entry.object.meta.namespace == namespace;
        let first = entries.min_by(|a, b| own(b).cmp(&own(a)).then_with(|| a.age().cmp(&b.age())));
        first.is_some_and(|first| first.object.meta.namespace == service.meta.namespace)
    }

    /// Returns whether `discoverySelectors` select a namespace, so that its services and routing objects are used.
    pub fn discovers(&self, namespace: &str) -> bool {
        let selectors = &self.mesh().discovery_selectors;
        selectors.is_empty() || selectors.iter().any(|selector| self.selects_namespace(selector, namespace))
    }

    /// Returns whether a selector selects a namespace.
    pub(super) fn selects_namespace(&self, selector: &NamespaceSelector, namespace: &str) -> bool {
        let labels = self.namespace(namespace);
        selector.selects(|key| match key {
            // Kubernetes sets this label itself.
            "kubernetes.io/metadata.name" => Some(namespace),
            key => labels?.get(key).map(String::as_str),
        })
    }

    /// Returns whether clients of this namespace see the service.
    pub fn service_visible(&self, service: &Typed<Service>, namespace: &str) -> bool {
        let owner = &service.meta.namespace;
        self.discovers(owner) && exported(self.service_export_to(service).into_iter(), owner, namespace)
    }

    /// Returns the `exportTo` of a service: its annotation or the mesh's default, within the visibility of its
    /// ServiceEntry. Empty: all namespaces.
    pub(super) fn service_export_to<'a>(&'a self, service: &'a Typed<Service>) -> Vec<&'a str> {
        let listed: Vec<&str> = match service.meta.annotations.get("networking.istio.io/exportTo") {
            Some(list) => list.split(',').map(str::trim).collect(),
            None => self.mesh().default_service_export_to.iter().map(String::as_str).collect(),
        };
        let owner = &service.meta.namespace;
        match self.entry_visibility(service) {
            EntryVisibility::None => vec!["~"],
            EntryVisibility::Namespace if exported(listed.iter().copied(), owner, owner) => vec!["."],
            EntryVisibility::Namespace => vec!["~"],
            EntryVisibility::Public | EntryVisibility::VisibilityUnspecified => listed,
        }
    }

    /// Returns the upper bound of the visibility of a service; public unless it is that of a ServiceEntry.
    fn entry_visibility(&self, service: &Typed<Service>) -> EntryVisibility {
        let setting = &self.mesh().service_entry_visibility;
        if !setting.apply_to_sidecars || service.spec.entry_host.is_none() {
            return EntryVisibility::Public;
        }
        let selects = |rule: &EntryVisibilityRule| {
            let selector = rule.namespace_selector.as_ref();
            selector.is_some_and(|selector| self.selects_namespace(selector, &service.meta.namespace))
        };
        let mut policies = setting.policies.iter();
        let first = policies.find(|policy| policy.matching_rules.iter().all(selects));
        first.map_or(setting.default_visibility, |policy| policy.visibility)
    }

    /// Returns whether the visibility of objects depends on the labels of namespaces.
    pub(super) fn has_visibility_by_labels(&self) -> bool {
        let setting = &self.mesh().service_entry_visibility;
        let has_rules = setting.policies.iter().any(|policy| !policy.matching_rules.is_empty());
        !self.mesh().discovery_selectors.is_empty() || setting.apply_to_sidecars && has_rules
    }

    /// Returns the VirtualServices that sidecars of this namespace apply, those with precedence first.
    pub fn virtual_services(&self, client_namespace: &str) -> Vec<&Arc<Typed<VirtualService>>> {
        let mut entries: Vec<_> = self
            .virtual_services
            .iter()
            .filter(|entry| {
                entry.object.spec.is_for_mesh() && self.virtual_service_visible(entry, client_namespace)
            })
            .collect();
        self.sort_by_precedence(&mut entries, client_namespace);
        entries.into_iter().map(|entry| &entry.object).collect()
    }

    /// Returns the precedence of a VirtualService for the clients of a namespace that sees it, lowest first: those
    /// exported to the own namespace, then to a named one, then routes of Gateway API in the own namespace, then those
    /// exported to all, each in the order of age. Source: istiod's `SelectVirtualServices`.
    pub(super) fn precedence<'a>(&self, entry: &'a Entry<VirtualService>, client: &str) -> (u8, Age<'a>) {
        let is_own = entry.object.meta.namespace == client;
        // In istiod, routes have no `exportTo`.
        let is_route = entry.object.spec.derived.as_ref().is_some_and(|of| !of.is_ingress);
        let class = match (is_route, is_own) {
            (true, true) => 2,
            _ if is_route || self.is_public(entry) => 3,
            (_, true) => 0,
            (_, false) => 1,
        };
        (class, entry.age())
    }

    /// Sorts VirtualServices that the clients of a namespace see, those with precedence first.
    pub(super) fn sort_by_precedence(&self, entries: &mut [&Entry<VirtualService>], client: &str) {
        entries.sort_by(|one, other| self.precedence(one, client).cmp(&self.precedence(other, client)));
    }

    /// Returns whether a VirtualService is exported to all namespaces.
    fn is_public(&self, entry: &Entry<VirtualService>) -> bool {
        let list = self.virtual_service_export_to(entry);
        list.is_empty() || list.iter().any(|name| name == "*")
    }

    /// Returns all VirtualServices.
    pub(crate) fn all_virtual_services(&self) -> impl Iterator<Item = &Typed<VirtualService>> {
        self.virtual_services.iter().map(|entry| &*entry.object)
    }

    /// Returns the VirtualService that routes requests to a host for sidecars of this namespace. The full name precedes
    /// wildcards, longer wildcards precede shorter ones, and of several that with precedence is used. Only those with HTTP
    /// rules that `keep` selects count.
    pub fn virtual_service(
        &self,
        host: &str,
        client_namespace: &str,
        keep: impl Fn(&Typed<VirtualService>) -> bool,
    ) -> Option<&Arc<Typed<VirtualService>>> {
        self.virtual_service_entries(host, client_namespace, keep).first().map(|entry| &entry.object)
    }

    /// Returns the VirtualService that routes a port of a host for sidecars of this namespace. Only those with HTTP rules
    /// that `keep` selects count.
    pub fn virtual_service_on(
        &self,
        host: &str,
        port: u16,
        client_namespace: &str,
        keep: impl Fn(&Typed<VirtualService>) -> bool,
    ) -> Option<&Arc<Typed<VirtualService>>> {
        let entries = self.virtual_service_entries(host, client_namespace, keep);
        let has_port = |entry: &&&Entry<VirtualService>| {
            let derived = entry.object.spec.derived.as_ref();
            // The rules for all ports are also part of those for one port.
            let specific = |other: &&Entry<VirtualService>| {
                other.object.meta.namespace == entry.object.meta.namespace
                    && other.object.spec.derived.as_ref().is_some_and(|other| other.port == Some(port))
            };
            match derived.map(|derived| derived.port) {
                None => true,
                Some(Some(wanted)) => wanted == port,
                Some(None) => !entries.iter().any(specific),
            }
        };
        entries.iter().find(has_port).map(|entry| &entry.object)
    }

    /// Returns the VirtualServices with HTTP rules that `keep` selects, of the most specific host pattern, those with
    /// precedence first; only the first takes effect.
    pub(super) fn virtual_service_entries(
        &self,
        host: &str,
        client_namespace: &str,
        keep: impl Fn(&Typed<VirtualService>) -> bool,
    ) -> Vec<&Entry<VirtualService>> {
        most_specific(&self.virtual_service_hosts, host, |pattern| {
            let visible = |entry: &&Entry<VirtualService>| {
                !entry.object.spec.http.is_empty()
                    && self.virtual_service_visible(entry, client_namespace)
                    && keep(&entry.object)
            };
            let mut entries = by_age(&self.virtual_services, &self.virtual_service_hosts, pattern, visible);
            self.sort_by_precedence(&mut entries, client_namespace);
            entries
        })
    }

    pub(super) fn virtual_service_visible(
        &self,
        entry: &Entry<VirtualService>,
        client_namespace: &str,
    ) -> bool {
        let list = self.virtual_service_export_to(entry);
        self.discovers(&entry.object.meta.namespace)
            && exported(list.iter().map(String::as_str), &entry.object.meta.namespace, client_namespace)
    }

    /// Returns the `exportTo` of a VirtualService, or the mesh's default.
    pub(super) fn virtual_service_export_to<'a>(&'a self, entry: &'a Entry<VirtualService>) -> &'a [String] {
        let own = &entry.object.spec.export_to;
        if own.is_empty() { &self.mesh().default_virtual_service_export_to } else { own }
    }
}

/// Returns whether an object of namespace `owner` with this `exportTo` is visible in namespace `client`.
pub fn exported<'a>(mut list: impl Iterator<Item = &'a str>, owner: &str, client: &str) -> bool {
    let Some(first) = list.next() else { return true };
    std::iter::once(first).chain(list).any(|entry| match entry {
        "*" => true,
        "." => owner == client,
        "~" => false,
        namespace => namespace == client,
    })
}

/// Returns the result for the full name, otherwise for the longest wildcard that has one.
pub(super) fn most_specific<T>(
    index: &HostIndex,
    host: &str,
    mut find: impl FnMut(&str) -> Vec<T>,
) -> Vec<T> {
    let exact = find(host);
    if !exact.is_empty() {
        return exact;
    }
    index.wildcards(host).map(|pattern| find(pattern)).find(|found| !found.is_empty()).unwrap_or_default()
}

pub(super) fn by_age<'a, T>(
    store: &'a Store<T>,
    index: &'a HostIndex,
    host: &str,
    keep: impl Fn(&&'a Entry<T>) -> bool,
) -> Vec<&'a Entry<T>> {
    let found = index.get(host).filter_map(|(namespace, name)| store.get(namespace, name));
    let mut entries: Vec<_> = found.filter(keep).collect();
    entries.sort_by(|a, b| a.age().cmp(&b.age()));
    entries
}
