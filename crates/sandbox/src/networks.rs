//! Networks of the mesh and their addresses.

use std::{collections::BTreeSet, net::Ipv4Addr};

use crate::objects::fnv;

/// Network of pods; its first address is the bridge's.
pub(crate) const POD_NETWORK: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 244, 0, 0), 16);
/// Address of the bridge: gateway, DNS server and control plane.
pub(crate) const BRIDGE: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
/// First two bytes of the virtual addresses of Services.
pub(crate) const SERVICE_NETWORK: [u8; 2] = [10, 96];

/// Allocates a free address of the network with these first two bytes; `None` if it is full. The name determines where
/// the search starts.
pub(crate) fn free_address([a, b]: [u8; 2], name: &str, taken: &mut BTreeSet<Ipv4Addr>) -> Option<Ipv4Addr> {
    let start = fnv(name.as_bytes()) as u16;
    let candidates = (0..u16::MAX).map(|step| {
        let [c, d] = start.wrapping_add(step).to_be_bytes();
        Ipv4Addr::new(a, b, c, d)
    });
    let mut usable = candidates.filter(|address| ![0, 255].contains(&address.octets()[3]));
    let free = usable.find(|address| !taken.contains(address))?;
    taken.insert(free);
    Some(free)
}
