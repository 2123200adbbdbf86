//! The families of the pod's addresses.

use std::{io, net::IpAddr};

use nix::ifaddrs::getifaddrs;

use crate::rules::Family;

/// Families in which the pod has addresses. Loopback and link-local addresses do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) v4: bool,
    pub(crate) v6: bool,
}

impl Addresses {
    /// Reads the addresses of this thread's network namespace.
    pub(crate) fn read() -> io::Result<Self> {
        let mut found = Self::default();
        for interface in getifaddrs()? {
            let Some(address) = interface.address else { continue };
            let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            let v6 = address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip()));
            if let Some(address) = v4.or(v6) {
                found.add(address.to_canonical());
            }
        }
        Ok(found)
    }

    fn add(&mut self, address: IpAddr) {
        let is_local = match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        // `::6` of an earlier run.
        let is_ours = address == crate::interception::DELIVERED_FROM_V6;
        if !is_local && !is_ours && !address.is_loopback() {
            self.v4 |= address.is_ipv4();
            self.v6 |= address.is_ipv6();
        }
    }

    /// Returns whether IPv6 is intercepted. As with Istio, the first address of the pod decides, and the kernel lists
    /// those of IPv4 first.
    pub(crate) fn intercept_v6(self, dual_stack: bool) -> bool {
        self.v6 && (dual_stack || !self.v4)
    }

    /// Returns the families whose connections are redirected.
    pub(crate) fn families(self, dual_stack: bool) -> &'static [Family] {
        if self.intercept_v6(dual_stack) { &[Family::V4, Family::V6] } else { &[Family::V4] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(addresses: &[&str]) -> Addresses {
        let mut found = Addresses::default();
        addresses.iter().for_each(|address| found.add(address.parse().unwrap()));
        found
    }

    #[test]
    fn the_families_of_the_addresses_are_intercepted() {
        let both = [Family::V4, Family::V6];
        for (addresses, dual_stack, families) in [
            (&["127.0.0.1", "10.0.0.1", "::1", "fe80::1"][..], false, &both[..1]),
            (&["10.0.0.1", "fd00::1"], false, &both[..1]),
            (&["10.0.0.1", "fd00::1"], true, &both),
            (&["127.0.0.1", "::1", "fd00::1", "::6"], false, &both),
            (&["10.0.0.1", "::1", "::6"], true, &both[..1]),
            (&[], true, &both[..1]),
        ] {
            assert_eq!(of(addresses).families(dual_stack), families, "{addresses:?}, {dual_stack}");
        }
    }
}
