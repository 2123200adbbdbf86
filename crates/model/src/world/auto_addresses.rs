//! Addresses that the control plane allocates to hosts of ServiceEntries without any, for proxies that answer DNS.
//!
//! The hash of a host chooses its slot, so that an address survives a restart. Of several hosts with one slot the first
//! by name has it, unless a ServiceEntry itself has an address of the slot. The others, in order of their names, have
//! the next free slots; none if all are taken. The result depends only on the entries, not on the order of events.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::api::{ServiceEntry, service_entry::host_of};

/// Number of slots for each third byte: the last byte is neither 0 nor 255.
const LAST_BYTES: u16 = 254;
/// Number of slots.
const SLOTS: u16 = 256 * LAST_BYTES;
/// First bytes of the addresses. Source: Istio's automatic allocation.
const IPV4: [u8; 2] = [240, 240];
/// First words of the IPv6 addresses (RFC 5180: `2001:2::/48`).
const IPV6: [u16; 7] = [0x2001, 2, 0, 0, 0, 0, 0xf0f0];

/// Slots of hosts.
#[derive(Clone, Debug, Default)]
pub(super) struct AutoAddresses {
    /// Number of entries that need an address for a host.
    hosts: BTreeMap<String, usize>,
    /// Hosts by the slot of their hash.
    by_slot: BTreeMap<u16, BTreeSet<String>>,
    /// Number of times that an address of a slot is in `addresses` or in the status of an entry.
    written: BTreeMap<u16, usize>,
    /// Slots with several hosts, or with a host and a written address.
    contested: BTreeSet<u16>,
    /// Slots of hosts that do not have the slot of their hash; `None` if all are taken.
    moved: BTreeMap<String, Option<u16>>,
    /// Whether `moved` may be out of date.
    is_outdated: bool,
}

impl AutoAddresses {
    /// Returns the addresses of a host; none if it needs none.
    pub(super) fn of(&self, host: &str) -> Vec<IpAddr> {
        if !self.hosts.contains_key(host) {
            return Vec::new();
        }
        let slot = self.moved.get(host).copied().unwrap_or_else(|| Some(preferred_slot(host)));
        slot.map(|slot| addresses(slot).to_vec()).unwrap_or_default()
    }

    /// Replaces an entry by another one. [`AutoAddresses::settle`] resolves the conflicts.
    pub(super) fn replace(&mut self, before: Option<&ServiceEntry>, after: Option<&ServiceEntry>) {
        for (entry, is_added) in [(before, false), (after, true)] {
            let Some(entry) = entry else { continue };
            for host in entry.hosts_to_allocate() {
                self.count_host(host, is_added);
            }
            let written = entry.addresses.iter().filter_map(|text| text.parse().ok());
            for slot in written.chain(entry.assigned.iter().map(|(_, ip)| *ip)).filter_map(slot_of) {
                count(&mut self.written, slot, is_added);
                self.update_contested(slot);
            }
        }
        self.is_outdated = true;
    }

    /// Returns whether a change may have affected hosts with conflicts.
    pub(super) fn has_conflicts_to_settle(&self) -> bool {
        self.is_outdated && !(self.contested.is_empty() && self.moved.is_empty())
    }

    /// Resolves conflicts. Returns the hosts whose addresses change by it.
    pub(super) fn settle(&mut self) -> BTreeSet<String> {
        self.is_outdated = false;
        let moved = self.make_moved();
        let before = std::mem::replace(&mut self.moved, moved);
        let all = before.keys().chain(self.moved.keys());
        all.filter(|host| before.get(*host) != self.moved.get(*host)).cloned().collect()
    }

    fn count_host(&mut self, host: String, is_added: bool) {
        let slot = preferred_slot(&host);
        let is_needed = count(&mut self.hosts, host.clone(), is_added);
        let of_slot = self.by_slot.entry(slot).or_default();
        if is_needed {
            of_slot.insert(host);
        } else {
            of_slot.remove(&host);
        }
        if of_slot.is_empty() {
            self.by_slot.remove(&slot);
        }
        self.update_contested(slot);
    }

    fn update_contested(&mut self, slot: u16) {
        let count = self.by_slot.get(&slot).map_or(0, BTreeSet::len);
        if count > 1 || count == 1 && self.written.contains_key(&slot) {
            self.contested.insert(slot);
        } else {
            self.contested.remove(&slot);
        }
    }

    /// Returns the slots of hosts that cannot have the slot of their hash.
    fn make_moved(&self) -> BTreeMap<String, Option<u16>> {
        let mut hosts: BTreeSet<&String> = BTreeSet::new();
        for slot in &self.contested {
            let first = usize::from(!self.written.contains_key(slot));
            hosts.extend(self.by_slot.get(slot).into_iter().flatten().skip(first));
        }
        let is_free = |slot: &u16| !self.by_slot.contains_key(slot) && !self.written.contains_key(slot);
        let mut free: BTreeSet<u16> = (0..SLOTS).filter(is_free).collect();
        let mut moved = BTreeMap::new();
        for host in hosts {
            let next = free.range(preferred_slot(host)..).next().or(free.first()).copied();
            next.map(|slot| free.remove(&slot));
            moved.insert(host.clone(), next);
        }
        moved
    }
}

/// Adds or subtracts one. Returns whether the count is above zero.
fn count<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K, is_added: bool) -> bool {
    match counts.get_mut(&key) {
        Some(number) if is_added => *number += 1,
        Some(number) if *number > 1 => *number -= 1,
        Some(_) => {
            counts.remove(&key);
            return false;
        }
        None if is_added => _ = counts.insert(key, 1),
        None => return false,
    }
    true
}

/// Returns the slot of a host's hash (FNV-1a).
fn preferred_slot(host: &str) -> u16 {
    let hash =
        host.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash % u32::from(SLOTS)) as u16
}

fn addresses(slot: u16) -> [IpAddr; 2] {
    let (third, last) = (slot / LAST_BYTES, slot % LAST_BYTES + 1);
    let [a, b, c, d, e, f, g] = IPV6;
    let v4 = Ipv4Addr::new(IPV4[0], IPV4[1], third as u8, last as u8);
    [v4.into(), Ipv6Addr::new(a, b, c, d, e, f, g, (third << 8) | last).into()]
}

/// Returns the slot of an address in the ranges; `None` for other addresses.
fn slot_of(ip: IpAddr) -> Option<u16> {
    let (third, last) = match ip {
        IpAddr::V4(ip) => match ip.octets() {
            [a, b, third, last] if [a, b] == IPV4 => (third, last),
            _ => return None,
        },
        IpAddr::V6(ip) => match ip.segments() {
            [first @ .., last] if first == IPV6 => {
                let [third, last] = last.to_be_bytes();
                (third, last)
            }
            _ => return None,
        },
    };
    let last = u16::from(last).checked_sub(1).filter(|last| *last < LAST_BYTES)?;
    Some(u16::from(third) * LAST_BYTES + last)
}

impl ServiceEntry {
    /// Returns the hosts for which the control plane allocates addresses.
    fn hosts_to_allocate(&self) -> impl Iterator<Item = String> {
        let hosts = self.hosts.iter().map(|host| host_of(host)).filter(|host| self.is_allocatable(host));
        hosts.filter(|host| self.assigned.iter().all(|(assigned, _)| assigned != host))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(hosts: &[&str]) -> ServiceEntry {
        let hosts = hosts.iter().map(ToString::to_string).collect();
        ServiceEntry { hosts, resolution: crate::api::Resolution::Static, ..ServiceEntry::default() }
    }

    /// Replaces an entry; returns the hosts of other entries whose addresses change.
    fn change(
        auto: &mut AutoAddresses,
        before: Option<&ServiceEntry>,
        after: Option<&ServiceEntry>,
    ) -> BTreeSet<String> {
        auto.replace(before, after);
        if auto.has_conflicts_to_settle() { auto.settle() } else { BTreeSet::new() }
    }

    /// Returns two hosts with one slot, in order of their names.
    fn colliding() -> [String; 2] {
        let mut seen = BTreeMap::new();
        for number in 0.. {
            let host = format!("h{number}.example.com");
            if let Some(other) = seen.insert(preferred_slot(&host), host.clone()) {
                let mut pair = [host, other];
                pair.sort();
                return pair;
            }
        }
        unreachable!("there are more numbers than slots")
    }

    #[test]
    fn a_slot_and_its_addresses_are_the_same() {
        for slot in [0, 1, 253, 254, 255, SLOTS - 1] {
            for ip in addresses(slot) {
                assert_eq!(slot_of(ip), Some(slot), "{ip}");
            }
        }
        assert_eq!(addresses(0)[0].to_string(), "240.240.0.1");
        assert_eq!(addresses(SLOTS - 1).map(|ip| ip.to_string()), ["240.240.255.254", "2001:2::f0f0:fffe"]);
        for other in ["240.240.1.0", "240.240.1.255", "240.241.1.1", "2001:2::1", "10.0.0.1"] {
            assert_eq!(slot_of(other.parse().unwrap()), None, "{other}");
        }
    }

    #[test]
    fn addresses_do_not_depend_on_the_order_of_entries() {
        let [first, second] = colliding();
        let (one, two) = (entry(&[&first]), entry(&[&second]));
        let mut forward = AutoAddresses::default();
        assert!(change(&mut forward, None, Some(&one)).is_empty());
        let moved = change(&mut forward, None, Some(&two));
        assert_eq!(moved, BTreeSet::from([second.clone()]));
        let mut backward = AutoAddresses::default();
        change(&mut backward, None, Some(&two));
        let alone = backward.of(&second);
        change(&mut backward, None, Some(&one));
        for host in [&first, &second] {
            assert_eq!(forward.of(host), backward.of(host));
        }
        assert_ne!(forward.of(&first), forward.of(&second));
        // The host has the slot again when the other one goes.
        assert_eq!(change(&mut forward, Some(&one), None), BTreeSet::from([second.clone()]));
        assert_eq!(forward.of(&second), alone);
        assert!(forward.of(&first).is_empty());
    }

    #[test]
    fn a_written_address_is_not_allocated() {
        let mut auto = AutoAddresses::default();
        let host = entry(&["a.example.com"]);
        change(&mut auto, None, Some(&host));
        let before = auto.of("a.example.com");
        let written = ServiceEntry { addresses: vec![before[0].to_string()], ..entry(&["b.example.com"]) };
        assert!(change(&mut auto, None, Some(&written)).contains("a.example.com"));
        assert_ne!(auto.of("a.example.com"), before);
        assert!(auto.of("b.example.com").is_empty());
        change(&mut auto, Some(&written), None);
        assert_eq!(auto.of("a.example.com"), before);
    }

    #[test]
    fn hosts_without_a_free_slot_have_no_address() {
        let names: Vec<String> =
            (0..u32::from(SLOTS) + 3).map(|number| format!("h{number}.example.com")).collect();
        let mut auto = AutoAddresses::default();
        change(&mut auto, None, Some(&entry(&names.iter().map(String::as_str).collect::<Vec<_>>())));
        let all: Vec<Vec<IpAddr>> = names.iter().map(|name| auto.of(name)).collect();
        let different: BTreeSet<&IpAddr> = all.iter().filter_map(|ips| ips.first()).collect();
        assert_eq!(different.len(), usize::from(SLOTS));
        assert_eq!(all.iter().filter(|ips| ips.is_empty()).count(), 3);
    }
}
