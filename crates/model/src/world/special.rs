//! Differences between the configuration for clients of a namespace and the base, which is the configuration for
//! clients of a namespace without objects.
//!
//! The differences are short names, objects exported to the namespace alone, its DestinationRules, and rules that match
//! the namespace. All other shared resources are equal in all namespaces, so they are compiled and held once. The
//! estimate may be too large, never too small.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use super::{World, fqdn, host_matches, store::Entry};
use crate::api::{DestinationRule, Service, Typed, VirtualService};

/// Namespace and name of a service.
type ServiceName = (String, String);

/// Differences of each namespace.
#[derive(Debug, Default)]
pub struct NamespaceFacts {
    by_namespace: HashMap<String, NamespaceOverrides>,
    /// Addresses that several services have.
    shared_ips: HashSet<IpAddr>,
    /// There are Services of type ExternalName.
    pub(crate) has_aliases: bool,
    none: NamespaceOverrides,
}

/// Differences for the clients of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceOverrides {
    /// Services (namespace, name) whose clusters, endpoints or routes may differ.
    pub services: BTreeSet<ServiceName>,
    /// Whether other routes may differ too.
    pub routes: bool,
    /// Whether the services differ, and with them the name table.
    pub names: bool,
    /// Whether the outbound listeners may differ.
    pub outline: bool,
}

impl NamespaceFacts {
    /// Returns the differences of a namespace.
    pub fn of(&self, namespace: &str) -> &NamespaceOverrides {
        self.by_namespace.get(namespace).unwrap_or(&self.none)
    }

    /// Returns whether another service has one of the addresses of a service.
    pub(crate) fn shares_addresses(&self, service: &Service) -> bool {
        service.cluster_ips.iter().any(|ip| self.shared_ips.contains(ip))
    }

    fn at(&mut self, namespace: &str) -> &mut NamespaceOverrides {
        if !self.by_namespace.contains_key(namespace) {
            self.by_namespace.insert(namespace.to_owned(), NamespaceOverrides::default());
        }
        self.by_namespace.entry(namespace.to_owned()).or_default()
    }

    fn add(&mut self, namespace: &str, service: &Typed<Service>) {
        self.at(namespace).services.insert(name_of(service));
    }
}

impl World {
    /// Returns the differences of all namespaces.
    pub fn namespace_facts(&self) -> NamespaceFacts {
        let mut facts = NamespaceFacts::default();
        let mut ips: HashSet<IpAddr> = HashSet::new();
        for service in self.services() {
            facts.shared_ips.extend(service.spec.cluster_ips.iter().filter(|ip| !ips.insert(**ip)));
            self.add_service(&mut facts, service);
        }
        self.destination_rules.iter().for_each(|entry| self.add_destination_rule(&mut facts, entry));
        self.virtual_services.iter().for_each(|entry| self.add_virtual_service(&mut facts, entry));
        facts
    }

    fn add_service(&self, facts: &mut NamespaceFacts, service: &Typed<Service>) {
        let owner = service.meta.namespace.as_str();
        let only_in = restricted(self.service_export_to(service).into_iter(), owner);
        if service.spec.external_name.is_some() {
            facts.has_aliases = true;
            let name = service.fqdn();
            let target = self.service(&fqdn(self.aliased(&name), ""));
            for namespace in only_in.iter().flatten().copied().chain([owner]) {
                if let Some(target) = target {
                    facts.add(namespace, target);
                }
                facts.at(namespace).outline = true;
            }
            return;
        }
        facts.add(owner, service);
        for namespace in only_in.iter().flatten() {
            facts.add(namespace, service);
            let special = facts.at(namespace);
            (special.names, special.outline) = (true, true);
        }
        if service.spec.entry_host.is_none() {
            return;
        }
        let host = service.fqdn();
        // A host below the domain of the cluster has short names in the namespace that it names.
        let below = host.strip_suffix(super::DOMAIN).and_then(|rest| rest.strip_suffix(".svc."));
        if let Some((_, namespace)) = below.and_then(|own| own.split_once('.')) {
            facts.add(namespace, service);
        }
        let owners = self.services_of_host(&host);
        if owners.len() > 1 {
            // The client's namespace decides which of them is used.
            for namespace in owners.iter().copied().chain(only_in.iter().flatten().copied()) {
                for owner in &owners {
                    facts.at(namespace).services.insert(((*owner).to_owned(), host.clone()));
                }
                let special = facts.at(namespace);
                (special.names, special.outline, special.routes) = (true, true, true);
            }
        }
    }

    fn add_destination_rule(&self, facts: &mut NamespaceFacts, entry: &Entry<DestinationRule>) {
        let owner = entry.object.meta.namespace.as_str();
        let listed = self.destination_rule_export_to(entry);
        let mut namespaces = restricted(listed.iter().map(String::as_str), owner).unwrap_or_default();
        namespaces.insert(owner);
        let pattern = fqdn(&entry.object.spec.host, owner);
        let hosts: BTreeSet<String> = if pattern.starts_with('*') {
            let services = self.services().map(|service| service.fqdn());
            let targets = self.virtual_service_targets.iter().map(|(host, _)| host.clone());
            services.chain(targets).filter(|host| host_matches(&pattern, host)).collect()
        } else {
            BTreeSet::from([pattern])
        };
        for host in &hosts {
            let services: Vec<&Arc<Typed<Service>>> = self.all_of_host(host).collect();
            // Routes to the host have its hash policy.
            let rules = self.virtual_service_targets.get(host);
            let rules: Vec<_> = rules
                .filter_map(|(namespace, name)| self.virtual_services.get(namespace, name))
                .map(|entry| &*entry.object)
                .collect();
            for namespace in &namespaces {
                services.iter().for_each(|service| facts.add(namespace, service));
                rules.iter().for_each(|rule| self.add_rule(facts, namespace, rule));
            }
        }
    }

    fn add_virtual_service(&self, facts: &mut NamespaceFacts, entry: &Entry<VirtualService>) {
        let rule = &entry.object;
        let listed = self.virtual_service_export_to(entry).iter().map(String::as_str);
        let only_in = restricted(listed, &rule.meta.namespace).unwrap_or_default();
        let matched = rule.spec.http.iter().flat_map(|http| &http.matches);
        let matched = matched.filter_map(|found| found.source_namespace.as_deref());
        for namespace in only_in.into_iter().chain(matched).collect::<BTreeSet<_>>() {
            self.add_rule(facts, namespace, rule);
            if !rule.spec.tcp.is_empty() || !rule.spec.tls.is_empty() {
                facts.at(namespace).outline = true;
            }
        }
    }

    /// Returns whether another object than this service may have the virtual host of a domain.
    pub(crate) fn names_others(&self, service: &Typed<Service>, domain: &str) -> bool {
        let below = domain.strip_prefix("*.").unwrap_or(domain);
        [domain, below].into_iter().map(|name| name.trim_end_matches('.')).any(|name| {
            let is_other =
                |namespace: &str, of: &str| namespace != service.meta.namespace || of != service.meta.name;
            let mut entries = self.entry_hosts.get(name);
            let of_rules = name != service.fqdn() && self.virtual_service_hosts.get(name).next().is_some();
            of_rules || entries.any(|(namespace, _)| is_other(namespace, name))
        })
    }

    /// Adds the routes of a VirtualService to what differs in a namespace.
    fn add_rule(&self, facts: &mut NamespaceFacts, namespace: &str, rule: &Typed<VirtualService>) {
        // The routes of a rule without hosts are part of others.
        let mut elsewhere = rule.spec.hosts.is_empty();
        for host in &rule.spec.hosts {
            let host = fqdn(host, &rule.meta.namespace);
            let mut services = self.all_of_host(&host).peekable();
            elsewhere |= services.peek().is_none();
            services.for_each(|service| facts.add(namespace, service));
        }
        facts.at(namespace).routes |= elsewhere;
    }

    /// Returns the services of exactly this host.
    pub(super) fn all_of_host<'a>(&'a self, host: &'a str) -> impl Iterator<Item = &'a Arc<Typed<Service>>> {
        let owners = self.services_of_host(host).into_iter();
        let of_entries = owners.filter_map(move |owner| self.services.get(owner, host));
        let kubernetes = self.kubernetes_service(host).into_iter();
        kubernetes.chain(of_entries.map(|entry| &entry.object))
    }
}

/// Returns the namespaces that see an object of namespace `owner` with this `exportTo`, if not all do.
pub(in crate::world) fn restricted<'a>(
    list: impl Iterator<Item = &'a str>,
    owner: &'a str,
) -> Option<BTreeSet<&'a str>> {
    let listed: Vec<&str> = list.collect();
    if listed.is_empty() || listed.contains(&"*") {
        return None;
    }
    let named = listed.into_iter().filter(|entry| *entry != "~");
    Some(named.map(|entry| if entry == "." { owner } else { entry }).collect())
}

fn name_of(service: &Typed<Service>) -> ServiceName {
    (service.meta.namespace.clone(), service.meta.name.clone())
}
