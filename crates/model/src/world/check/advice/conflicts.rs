//! Objects that disagree about one host: DestinationRules of which the older takes precedence, protocols of
//! ServiceEntries, and rules of the mesh and of gateways.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    super::{ObjectReport, Report},
    MAX_PAIRS,
};
use crate::{
    World,
    analysis::Code,
    api::{DestinationRule, Kind, ServiceEntry, VirtualService},
    world::{hosts::fqdn, special::restricted, store::Entry},
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

    /// Reports hosts that several VirtualServices have, at both of two where one has no effect. `hosts` reports those that
    /// have none in their own namespace.
    pub(super) fn shared_hosts(&mut self) {
        let world = self.world.unrecorded();
        let is_rule = |entry: &&Entry<VirtualService>| {
            let spec = &entry.object.spec;
            spec.derived.is_none() && spec.is_for_mesh() && !spec.http.is_empty()
        };
        let mut rules: BTreeMap<String, Vec<HostRule<'_>>> = BTreeMap::new();
        for entry in world.virtual_services.iter().filter(is_rule) {
            for (index, host) in entry.object.spec.hosts.iter().enumerate() {
                rules.entry(fqdn(host, &entry.object.meta.namespace)).or_default().push((entry, index));
            }
        }
        let (mut pairs, mut reported) = (0, BTreeSet::new());
        for rules in rules.values().filter(|rules| rules.len() > 1) {
            let mut seen = Vec::new();
            for namespace in clients(world, rules) {
                pairs += rules.len();
                if pairs > MAX_PAIRS {
                    let about = ObjectReport { entry: rules[0].0, kind: Kind::VirtualService };
                    return self.incomplete(&about, &[Code::HostConflict, Code::SharedHost]);
                }
                let mut of_namespace: Vec<&HostRule<'_>> = rules
                    .iter()
                    .filter(|(entry, _)| world.virtual_service_visible(entry, namespace))
                    .collect();
                of_namespace.sort_by(|one, other| {
                    world.precedence(one.0, namespace).cmp(&world.precedence(other.0, namespace))
                });
                let own = of_namespace.iter().skip(1).filter(|of| of.0.object.meta.namespace == namespace);
                reported.extend(own.map(|of| (rule_name(of), of.1)));
                seen.push((namespace, of_namespace));
            }
            for (namespace, of_namespace) in seen {
                let Some((first, rest)) = of_namespace.split_first() else { continue };
                for other in rest.iter().filter(|(entry, _)| !std::ptr::eq(*entry, first.0)) {
                    self.shared_host((first, other), namespace, &mut reported);
                }
            }
        }
    }

    /// Reports that the first of two VirtualServices precedes the other for the clients of a namespace. `reported` are the
    /// hosts of VirtualServices that are not reported again.
    fn shared_host<'a>(
        &mut self,
        (first, other): (&HostRule<'a>, &HostRule<'a>),
        namespace: &str,
        reported: &mut BTreeSet<(String, usize)>,
    ) {
        let world = self.world.unrecorded();
        let host = &other.0.object.spec.hosts[other.1];
        if reported.insert((rule_name(other), other.1)) {
            let [one, two] = [first, other].map(|(entry, _)| world.precedence(entry, namespace).0);
            let code = if one == two { Code::HostConflict } else { Code::SharedHost };
            let message =
                format!("in namespace {namespace}, {} takes precedence for {host}", rule_name(first));
            let about = ObjectReport { entry: other.0, kind: Kind::VirtualService };
            self.report(&about, code, format!("spec.hosts[{}]", other.1), message, MERGE);
        }
        if reported.insert((rule_name(first), first.1)) {
            let other = rule_name(other);
            let message = format!("{other} has {host} too, and has no effect on it in namespace {namespace}");
            let about = ObjectReport { entry: first.0, kind: Kind::VirtualService };
            self.report(&about, Code::SharedHost, format!("spec.hosts[{}]", first.1), message, MERGE);
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
type HostRule<'a> = (&'a Entry<VirtualService>, usize);

fn rule_name((entry, _): &HostRule<'_>) -> String {
    ObjectReport { entry, kind: Kind::VirtualService }.name()
}

/// Returns the namespaces in which the precedence of VirtualServices may differ: their own, and those to which one is
/// exported by name.
fn clients<'a>(world: &'a World, rules: &[HostRule<'a>]) -> BTreeSet<&'a str> {
    let of = |(entry, _): &HostRule<'a>| {
        let own = entry.object.meta.namespace.as_str();
        let listed = world.virtual_service_export_to(entry).iter().map(String::as_str);
        let named = restricted(listed, own).unwrap_or_default();
        named.into_iter().chain([own])
    };
    rules.iter().flat_map(of).collect()
}

/// Returns whether a namespace sees two objects, by their namespaces and `exportTo`.
fn meet<'a>([(one, to_one), (other, to_other)]: [(&'a String, &'a Vec<String>); 2]) -> bool {
    let seen_in = |own, list: &'a [String]| restricted(list.iter().map(String::as_str), own);
    match (seen_in(one, to_one), seen_in(other, to_other)) {
        (Some(one), Some(other)) => !one.is_disjoint(&other),
        _ => true,
    }
}
