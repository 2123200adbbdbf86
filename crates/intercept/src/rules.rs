//! Packet rules as values, before they are installed in the kernel. [`crate::nftables`] installs them.

use std::{net::Ipv4Addr, str::FromStr};

/// Condition on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// The transport protocol has this number.
    Protocol(u8),
    /// The sending socket has this mark.
    Mark(u32),
    /// The output interface is `lo`.
    OutLoopback,
    /// The destination is in this network.
    To(Network),
    /// The destination is not in this network.
    NotTo(Network),
    /// The source is in this network.
    From(Network),
    /// The destination port is this one.
    Port(u16),
    /// True once in `n` times, at random.
    OneIn(u32),
    /// A rule of this network namespace has changed the destination.
    Translated,
}

/// Verdict on the first packet of a connection, and so on the whole connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No change.
    Leave,
    /// The destination becomes this port in the same network namespace.
    Redirect(u16),
    /// The destination becomes this address and port.
    To(Ipv4Addr, u16),
    /// The source becomes this address, so that answers come back the same way.
    From(Ipv4Addr),
}

/// A rule: the verdict applies if all conditions hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Conditions.
    pub conditions: Vec<Match>,
    /// Verdict.
    pub verdict: Verdict,
}

/// Rules of a network namespace: for outbound and for inbound connections, and for packets that leave it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// For connections of the namespace's programs.
    pub output: Vec<Rule>,
    /// For connections that arrive.
    pub input: Vec<Rule>,
    /// For packets that leave, after routing.
    pub leaving: Vec<Rule>,
}

/// An IPv4 network, such as `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Address; the bits below the prefix do not count.
    pub address: Ipv4Addr,
    /// Length of the prefix in bits.
    pub prefix: u8,
}

impl Network {
    /// Returns the network of one address.
    pub const fn host(address: Ipv4Addr) -> Self {
        Self { address, prefix: 32 }
    }

    /// Returns whether an address is in the network.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        (u32::from(address) ^ u32::from(self.address)) & self.mask() == 0
    }

    /// Returns the netmask.
    pub fn mask(self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0)
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text:?} is not an IPv4 range such as 10.0.0.0/8");
        let (address, prefix) = text.split_once('/').unwrap_or((text, "32"));
        let prefix: u8 = prefix.parse().map_err(|_| wrong())?;
        let address = address.parse().map_err(|_| wrong())?;
        if prefix > 32 { Err(wrong()) } else { Ok(Self { address, prefix }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_parsed() {
        assert_eq!("10.0.0.0/8".parse::<Network>().unwrap().mask(), 0xff00_0000);
        assert_eq!("0.0.0.0/0".parse::<Network>().unwrap().mask(), 0);
        assert_eq!("10.0.0.1".parse::<Network>().unwrap().mask(), u32::MAX);
        assert!("10.0.0.0/33".parse::<Network>().is_err());
        assert!("::/0".parse::<Network>().is_err());
        let network: Network = "10.244.0.0/16".parse().unwrap();
        assert!(network.contains([10, 244, 255, 255].into()) && !network.contains([10, 245, 0, 0].into()));
    }
}
