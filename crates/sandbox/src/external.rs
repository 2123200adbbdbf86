//! Hosts of ServiceEntries: their addresses in DNS and in sidecars, and the pods that see them.
//!
//! A host without addresses gets one of 240.240.0.0/16, as in Istio, unless it is a wildcard or its resolution is NONE.
//! The control plane reads the allocation as a ConfigMap. Only pods with a sidecar see these hosts, because only
//! sidecars can route their addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use serde_json::{Value, json};
use skysail_model::{
    api::{
        Protocol, Resolution, ServiceEntry, mesh_config, selects,
        service_entry::{EntryPort, host_of},
    },
    world::{exported, host_matches},
};

use crate::{
    names::{Answer, Hosts, Names},
    networks,
    objects::{Entries, Key, Labels},
    plan::Pod,
};

/// First two bytes of allocated addresses.
const NETWORK: [u8; 2] = [240, 240];

/// Allocated addresses of hosts without addresses: each host keeps its first one.
#[derive(Debug, Default)]
pub(crate) struct Allocation(BTreeMap<String, Ipv4Addr>);

impl Allocation {
    /// Returns the allocation of a running mesh, from the objects that it makes ([`document`]).
    pub(crate) fn of(objects: &[Value]) -> Self {
        let maps = objects.iter().filter(|object| object["kind"] == "ConfigMap");
        let entries = maps.flat_map(|map| map["data"].as_object().into_iter().flatten());
        let address =
            |(host, address): (&String, &Value)| Some((host.clone(), address.as_str()?.parse().ok()?));
        Self(entries.filter_map(address).collect())
    }

    /// Allocates an address to each host that needs one, and returns all of them. A host keeps the address of its
    /// entry's status.
    pub(crate) fn assign(&mut self, entries: &Entries) -> &BTreeMap<String, Ipv4Addr> {
        let hosts =
            entries.values().flat_map(|entry| entry.hosts.iter().map(move |host| (entry, host_of(host))));
        let hosts = hosts.filter(|(entry, host)| !host.starts_with('*') && entry.is_allocatable(host));
        let hosts: BTreeSet<String> = hosts.map(|(_, host)| host).collect();
        let stored = entries.values().flat_map(|entry| &entry.assigned);
        let stored = stored.filter_map(|(host, address)| match address {
            IpAddr::V4(address) if hosts.contains(host) => Some((host.clone(), *address)),
            _ => None,
        });
        let stored: BTreeMap<String, Ipv4Addr> = stored.collect();
        let mut taken: BTreeSet<Ipv4Addr> = entries.values().flat_map(addresses).collect();
        taken.extend(stored.values());
        self.0.retain(|host, address| hosts.contains(host) && !taken.contains(address));
        self.0.extend(stored);
        taken.extend(self.0.values());
        for host in hosts {
            if !self.0.contains_key(&host)
                && let Some(address) = networks::free_address(NETWORK, &host, &mut taken)
            {
                self.0.insert(host, address);
            }
        }
        &self.0
    }
}

/// Returns the ConfigMap with the allocation, for the control plane.
pub(crate) fn document(allocated: &BTreeMap<String, Ipv4Addr>) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": mesh_config::ADDRESSES, "namespace": mesh_config::NAMESPACE },
        "data": allocated,
    })
}

/// Returns the hosts that each pod with a sidecar sees, by the pod's address.
pub(crate) fn hosts(
    entries: &Entries,
    allocated: &BTreeMap<String, Ipv4Addr>,
    pods: &[(&Pod, bool)],
) -> Hosts {
    let mut by_namespace = BTreeMap::new();
    let pods = pods.iter().map(|(pod, _)| pod).filter(|pod| pod.sidecar && !entries.is_empty());
    pods.map(|pod| {
        let namespace = pod.namespace.as_str();
        let names = by_namespace.entry(namespace);
        let names = names.or_insert_with(|| Arc::new(names_in(entries, allocated, namespace)));
        (pod.address, Arc::clone(names))
    })
    .collect()
}

/// Returns the hosts that pods of a namespace see. If several entries have a host, the namespace's own takes
/// precedence.
fn names_in(entries: &Entries, allocated: &BTreeMap<String, Ipv4Addr>, namespace: &str) -> Names {
    let mut names = Names::new();
    let visible = entries.iter().filter(|((owner, _), entry)| is_visible(owner, entry, namespace));
    let (own, others): (Vec<_>, Vec<_>) = visible.partition(|((owner, _), _)| owner == namespace);
    for (_, entry) in own.into_iter().chain(others) {
        for host in entry.hosts.iter().map(|host| host_of(host)).filter(|host| !host.starts_with('*')) {
            let found: Vec<Ipv4Addr> = match allocated.get(&host).filter(|_| entry.is_allocatable(&host)) {
                Some(address) => vec![*address],
                None => addresses(entry).collect(),
            };
            if !found.is_empty() {
                names.entry(host).or_insert(Answer::Addresses(found));
            }
        }
    }
    names
}

/// Returns why DNS has no answer for the host of a ServiceEntry; `None` if no entry has it.
pub(crate) fn missing_answer(
    entries: &Entries,
    name: &str,
    namespace: &str,
    sidecar: bool,
) -> Option<String> {
    let found = |pattern: &str, fits: &dyn Fn(&str, &str) -> bool| fits(&host_of(pattern), name);
    let search = |fits: &dyn Fn(&str, &str) -> bool| {
        entries.iter().find_map(|(key, entry)| {
            let host = entry.hosts.iter().find(|host| found(host, fits))?;
            Some((key, entry, host.as_str()))
        })
    };
    let exact = search(&|host, name| host == name);
    let ((owner, name), entry, host) = exact.or_else(|| search(&host_matches))?;
    let what = format!("{host} of ServiceEntry {owner}/{name}");
    Some(if host.starts_with('*') {
        format!("{what}: a wildcard has no address; add the full name to spec.hosts")
    } else if !sidecar {
        format!("{what}: only pods with a sidecar can reach it")
    } else if !is_visible(owner, entry, namespace) {
        format!(
            "{what}: spec.exportTo hides it from namespace {namespace} \
             (the default is defaultServiceExportTo of the mesh configuration)"
        )
    } else if !entry.addresses.is_empty() {
        format!("{what}: spec.addresses has no single IPv4 address; add one, or remove the field")
    } else if entry.resolution == Resolution::None {
        format!(
            "{what}: with resolution NONE no address is allocated; set spec.addresses, or use resolution STATIC"
        )
    } else {
        format!("{what}: no address of 240.240.0.0/16 is left; set spec.addresses")
    })
}

/// Returns the entry that has this host and takes its endpoints from DNS.
pub(crate) fn looked_up<'a>(entries: &'a Entries, host: &str) -> Option<&'a Key> {
    let looks_up = |entry: &ServiceEntry| entry.resolution.is_dns() && entry.endpoints.is_empty();
    let has = |entry: &ServiceEntry| entry.hosts.iter().any(|known| host_of(known) == host);
    entries.iter().find(|(_, entry)| looks_up(entry) && has(entry)).map(|(key, _)| key)
}

/// Returns the target ports of the entries that select pods with these labels, with their protocols, without UDP.
pub(crate) fn ports(
    entries: &Entries,
    namespace: &str,
    labels: &Labels,
) -> impl Iterator<Item = (u16, Protocol)> {
    let selects =
        move |entry: &&ServiceEntry| entry.selector().is_some_and(|selector| selects(selector, labels));
    let entries = entries.iter().filter(move |((owner, _), _)| owner == namespace).map(|(_, entry)| entry);
    let ports = entries.filter(selects).flat_map(|entry| &entry.ports);
    let ports =
        ports.filter_map(|port| Some((target(port)?, port.parsed_protocol().unwrap_or(Protocol::Tcp))));
    ports.filter(|(_, protocol)| *protocol != Protocol::Udp)
}

fn target(port: &EntryPort) -> Option<u16> {
    let number = if port.target_port == 0 { port.number } else { port.target_port };
    u16::try_from(number).ok()
}

/// Returns the IPv4 addresses of an entry. Pods have no IPv6 addresses, and a CIDR block is not an address.
fn addresses(entry: &ServiceEntry) -> impl Iterator<Item = Ipv4Addr> {
    entry.addresses.iter().filter_map(|text| match text.parse() {
        Ok(IpAddr::V4(address)) => Some(address),
        _ => None,
    })
}

fn is_visible(owner: &str, entry: &ServiceEntry, namespace: &str) -> bool {
    exported(entry.export_to.iter().map(String::as_str), owner, namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(specs: &[(&str, &str, Value)]) -> Entries {
        let entry = |(namespace, name, spec): &(&str, &str, Value)| {
            (((*namespace).to_owned(), (*name).to_owned()), serde_json::from_value(spec.clone()).unwrap())
        };
        specs.iter().map(entry).collect()
    }

    fn shop() -> Entries {
        entries(&[
            (
                "a",
                "api",
                json!({ "hosts": ["API.example.com."], "resolution": "STATIC",
                "ports": [{ "number": 80 }, { "number": 443, "targetPort": 8443 }, { "number": 53, "protocol": "UDP" }],
                "workloadSelector": { "labels": { "app": "api" } } }),
            ),
            (
                "a",
                "block",
                json!({ "hosts": ["block.example"], "addresses": ["10.1.0.0/16"], "resolution": "STATIC" }),
            ),
            ("a", "none", json!({ "hosts": ["none.example", "*.wild.example"], "resolution": "NONE" })),
            (
                "a",
                "own",
                json!({ "hosts": ["own.example"], "addresses": ["240.240.0.7", "fd00::1"], "exportTo": ["."] }),
            ),
            ("b", "own", json!({ "hosts": ["own.example"], "addresses": ["10.0.0.8"] })),
        ])
    }

    #[test]
    fn hosts_have_their_own_addresses_or_a_stable_one() {
        let (entries, mut allocation) = (shop(), Allocation::default());
        let allocated = allocation.assign(&entries).clone();
        assert_eq!(allocated.keys().collect::<Vec<_>>(), ["api.example.com"]);
        let address = allocated["api.example.com"];
        assert_eq!(address.octets()[..2], NETWORK);
        let only = |address: Ipv4Addr| Answer::Addresses(vec![address]);
        let a = names_in(&entries, &allocated, "a");
        assert_eq!(a.keys().collect::<Vec<_>>(), ["api.example.com", "own.example"]);
        assert_eq!(
            (&a["api.example.com"], &a["own.example"]),
            (&only(address), &only([240, 240, 0, 7].into()))
        );
        assert_eq!(names_in(&entries, &allocated, "c")["own.example"], only([10, 0, 0, 8].into()));

        let host = |n: usize| {
            (
                ("m".to_owned(), n.to_string()),
                ServiceEntry {
                    hosts: vec![format!("h{n}.example")],
                    resolution: Resolution::Dns,
                    ..ServiceEntry::default()
                },
            )
        };
        let many: Entries = entries.into_iter().chain((0..2000).map(host)).collect();
        let all = allocation.assign(&many);
        assert_eq!(all["api.example.com"], address);
        let distinct: BTreeSet<&Ipv4Addr> = all.values().collect();
        assert_eq!(distinct.len(), 2001);
        assert!(!distinct.contains(&Ipv4Addr::new(240, 240, 0, 7)), "an entry has set it");
    }

    #[test]
    fn a_host_without_an_answer_has_a_reason() {
        let entries = shop();
        for (name, namespace, sidecar, expected) in [
            ("none.example", "a", true, "no address is allocated"),
            ("x.wild.example", "a", true, "a wildcard has no address"),
            ("block.example", "a", true, "no single IPv4 address"),
            ("api.example.com", "a", false, "only pods with a sidecar"),
        ] {
            let found = missing_answer(&entries, name, namespace, sidecar).unwrap();
            assert!(found.contains(expected), "{name}: {found}");
        }
        let hidden: Entries = entries
            .iter()
            .filter(|((owner, _), _)| owner == "a")
            .map(|(k, e)| (k.clone(), e.clone()))
            .collect();
        assert!(
            missing_answer(&hidden, "own.example", "b", true)
                .unwrap()
                .contains("exportTo hides it from namespace b")
        );
        assert_eq!(missing_answer(&entries, "other.example", "a", true), None);
    }

    #[test]
    fn ports_of_entries_are_found_by_labels() {
        let labels = Labels::from([("app".to_owned(), "api".to_owned())]);
        let entries = shop();
        let of = |namespace| ports(&entries, namespace, &labels).map(|(port, _)| port).collect::<Vec<_>>();
        assert_eq!(of("a"), [80, 8443]);
        assert!(of("b").is_empty());
    }
}
