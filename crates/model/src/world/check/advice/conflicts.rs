//! Objects that disagree about one host: DestinationRules of which the older takes precedence, protocols of
//! ServiceEntries, and rules of the mesh and of gateways.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{ObjectReport, Report};
use crate::{
    analysis::Code,
    api::{DestinationRule, Kind, ServiceEntry, VirtualService},
    world::{hosts::fqdn, store::Entry},
};

impl Report<'_> {
    /// Reports settings that an older rule of the same host, selector and `exportTo` has too.
    pub(super) fn destination_rule_conflicts(&mut self) {
        let mut rules: Vec<_> = self.world.unrecorded().destination_rules.iter().collect();
        rules.sort_by(|one, other| one.age().cmp(&other.age()));
        let mut by_host: BTreeMap<(&str, String), Vec<&Entry<DestinationRule>>> = BTreeMap::new();
        let mut found = Vec::new();
        for entry in rules {
            let (meta, spec) = (&entry.object.meta, &entry.object.spec);
            let older = by_host.entry((&meta.namespace, fqdn(&spec.host, &meta.namespace))).or_default();
            let same = |other: &&&Entry<DestinationRule>| {
                let of = &other.object.spec;
                of.workload_selector == spec.workload_selector && of.export_to == spec.export_to
            };
            for first in older.iter().filter(same).take(1) {
                let of = &first.object.spec;
                if of.traffic_policy.is_some() && spec.traffic_policy.is_some() {
                    found.push((
                        entry,
                        *first,
                        "spec.trafficPolicy".to_owned(),
                        "has a trafficPolicy".to_owned(),
                    ));
                }
                for (index, subset) in spec.subsets.iter().enumerate() {
                    if of.subsets.iter().any(|known| known.name == subset.name) {
                        let what = format!("has subset {}", subset.name);
                        found.push((entry, *first, format!("spec.subsets[{index}].name"), what));
                    }
                }
            }
            // Rules are compared with the oldest one, so that the time is bounded.
            if older.is_empty() || !older.iter().any(|other| same(&other)) {
                older.push(entry);
            }
        }
        for (entry, first, field, what) in found {
            let about = ObjectReport { entry, kind: Kind::DestinationRule };
            let first = ObjectReport { entry: first, kind: Kind::DestinationRule }.name();
            let message = format!("has no effect: {first} is older and {what} for the same host");
            self.report(&about, Code::DestinationRuleConflict, field, message, "merge the rules into one");
        }
    }

    /// Reports hosts that several VirtualServices have. The rule that a namespace has for itself is meant to precede one
    /// for all namespaces. `hosts` reports conflicts in a VirtualService's own namespace.
    pub(super) fn shared_hosts(&mut self) {
        let world = self.world.unrecorded();
        let is_rule = |entry: &&Entry<VirtualService>| {
            let spec = &entry.object.spec;
            spec.derived.is_none() && spec.is_for_mesh() && !spec.http.is_empty()
        };
        let mut entries: Vec<_> = world.virtual_services.iter().filter(is_rule).collect();
        let order = |entry: &Entry<VirtualService>| world.is_public(entry);
        entries.sort_by(|one, other| (order(one), one.age()).cmp(&(order(other), other.age())));
        let mut owners: BTreeMap<String, HostOwners<'_>> = BTreeMap::new();
        let mut found = Vec::new();
        for entry in entries {
            let (meta, spec) = (&entry.object.meta, &entry.object.spec);
            let scopes = scopes(&meta.namespace, world.virtual_service_export_to(entry));
            for (index, host) in spec.hosts.iter().enumerate() {
                let owner = (entry, index);
                let first =
                    owners.entry(fqdn(host, &meta.namespace)).or_default().add(owner, scopes.as_ref());
                found.extend(first.into_iter().map(|first| (owner, first)));
            }
        }
        let mut reported = BTreeSet::new();
        for ((later, index), (first, of_first)) in found {
            let (about, other) = (
                ObjectReport { entry: later, kind: Kind::VirtualService },
                ObjectReport { entry: first, kind: Kind::VirtualService },
            );
            let host = &later.object.spec.hosts[index];
            if !world.virtual_service_visible(first, about.namespace()) {
                let code = if order(first) == order(later) { Code::HostConflict } else { Code::SharedHost };
                let message = format!("where {} is visible, it takes precedence for {host}", other.name());
                self.report(&about, code, format!("spec.hosts[{index}]"), message, MERGE);
            }
            if reported.insert((other.name(), of_first)) {
                let message = format!("{} has {host} too, and has no effect on it", about.name());
                self.report(&other, Code::SharedHost, format!("spec.hosts[{of_first}]"), message, MERGE);
            }
        }
    }

    /// Reports ports of ServiceEntries that another entry with the same host has with another protocol.
    pub(super) fn entry_protocols(&mut self) {
        let world = self.world.unrecorded();
        let mut entries: Vec<_> = world.service_entries.iter().collect();
        entries.sort_by(|one, other| one.age().cmp(&other.age()));
        let mut seen: BTreeMap<(&str, u32), (&Entry<ServiceEntry>, usize)> = BTreeMap::new();
        let (mut found, mut reported) = (Vec::new(), BTreeSet::new());
        for entry in entries {
            let spec = &entry.object.spec;
            let hosts = spec.hosts.iter();
            let ports = hosts.flat_map(|host| spec.ports.iter().enumerate().map(move |port| (host, port)));
            for (host, (index, port)) in ports {
                let key = (host.as_str(), port.number);
                let (first, of_first) = *seen.entry(key).or_insert((entry, index));
                let protocol = &first.object.spec.ports[of_first].protocol;
                let scopes =
                    [&first.object, &entry.object].map(|of| (&of.meta.namespace, &of.spec.export_to));
                let is_same = protocol.eq_ignore_ascii_case(&port.protocol);
                if !is_same && meet(scopes) {
                    let place = format!("for port {} of {host}", port.number);
                    found.push((entry, first, index, format!("{protocol} {place}")));
                    if reported.insert((host, port.number)) {
                        found.push((first, entry, of_first, format!("{} {place}", port.protocol)));
                    }
                }
            }
        }
        for (entry, other, index, what) in found {
            let about = ObjectReport { entry, kind: Kind::ServiceEntry };
            let other = ObjectReport { entry: other, kind: Kind::ServiceEntry }.name();
            let message = format!("{other} has protocol {what}");
            let field = format!("spec.ports[{index}].protocol");
            self.report(&about, Code::EntryProtocolConflict, field, message, "use the same protocol");
        }
    }

    /// Reports destinations without a subset at gateways, if another rule has subsets for the same host.
    pub(super) fn subsets_at_gateways(&mut self) {
        let mut divided: BTreeMap<String, &Entry<VirtualService>> = BTreeMap::new();
        let world = self.world.unrecorded();
        let written = || world.virtual_services.iter().filter(|entry| entry.object.spec.derived.is_none());
        for entry in written() {
            let (meta, spec) = (&entry.object.meta, &entry.object.spec);
            let full = |host: &String| fqdn(host, &meta.namespace);
            let own: Vec<String> = spec.hosts.iter().map(full).collect();
            for to in spec.http.iter().flat_map(|http| &http.route).map(|route| &route.destination) {
                if !to.subset.is_empty() && own.contains(&full(&to.host)) {
                    divided.insert(full(&to.host), entry);
                }
            }
        }
        let at_gateways: Vec<_> = written().filter(|entry| !entry.object.spec.is_for_mesh()).collect();
        for entry in at_gateways {
            let about = ObjectReport { entry, kind: Kind::VirtualService };
            for (rule, http) in entry.object.spec.http.iter().enumerate() {
                for (index, route) in http.route.iter().enumerate() {
                    let to = &route.destination;
                    let other = divided.get(&fqdn(&to.host, about.namespace()));
                    let Some(other) = other.filter(|_| to.subset.is_empty()) else { continue };
                    let other = ObjectReport { entry: *other, kind: Kind::VirtualService }.name();
                    let message =
                        format!("the subsets of {other} do not apply to requests through a gateway");
                    let field = format!("spec.http[{rule}].route[{index}].destination");
                    let remedy = "name a subset here too, if requests through the gateway need it";
                    self.report(&about, Code::SubsetNotAtGateway, field, message, remedy);
                }
            }
        }
    }
}

/// Remedy for VirtualServices of the same host.
const MERGE: &str = "merge the rules into one VirtualService";

/// A VirtualService, and the position of a host in it.
type HostOwner<'a> = (&'a Entry<VirtualService>, usize);

/// The VirtualServices of a host that take precedence.
#[derive(Default)]
struct HostOwners<'a> {
    /// Among those that all namespaces see.
    public: Option<HostOwner<'a>>,
    /// Among those that a namespace sees, by the namespace.
    scoped: BTreeMap<&'a str, HostOwner<'a>>,
}

impl<'a> HostOwners<'a> {
    /// Adds a VirtualService that the namespaces `scopes` see, or all. Those without `scopes` are added last. Returns
    /// those with precedence in one of the namespaces.
    fn add(&mut self, owner: HostOwner<'a>, scopes: Option<&BTreeSet<&'a str>>) -> Vec<HostOwner<'a>> {
        let mut first: Vec<_> = match scopes {
            None => match self.public.replace(self.public.unwrap_or(owner)) {
                Some(public) => vec![public],
                None => self.scoped.values().copied().collect(),
            },
            Some(scopes) => {
                scopes.iter().map(|namespace| *self.scoped.entry(namespace).or_insert(owner)).collect()
            }
        };
        first.retain(|(entry, _)| !std::ptr::eq(*entry, owner.0));
        first
    }
}

/// Returns the namespaces that see an object, by its namespace and `exportTo`; `None` for all.
fn scopes<'a>(own: &'a str, list: &'a [String]) -> Option<BTreeSet<&'a str>> {
    let is_public = list.is_empty() || list.iter().any(|name| name == "*");
    let names = list.iter().filter(|name| *name != "~").map(|name| if name == "." { own } else { name });
    (!is_public).then(|| names.collect())
}

/// Returns whether a namespace sees two objects, by their namespaces and `exportTo`.
fn meet([(one, to_one), (other, to_other)]: [(&String, &Vec<String>); 2]) -> bool {
    match (scopes(one, to_one), scopes(other, to_other)) {
        (Some(one), Some(other)) => !one.is_disjoint(&other),
        _ => true,
    }
}
