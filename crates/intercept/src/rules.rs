//! Packet rules as values, before they are installed in the kernel. [`crate::nftables`] installs them.
//!
//! As texts, rules have the syntax of the program `nft`.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

/// Number of TCP among the transport protocols.
pub const TCP: u8 = 6;
/// Number of UDP among the transport protocols.
pub const UDP: u8 = 17;
/// Length of an interface's name in bytes with its zero byte (`IFNAMSIZ`).
const NAME_SIZE: usize = 16;

/// Family of addresses. Each has tables of its own, because a kernel may lack IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Condition on a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    /// The transport protocol has this number.
    Protocol(u8),
    /// The packet is from this sender.
    Sender(Sender),
    /// The output interface is `lo`.
    OutLoopback,
    /// The packet leaves by this interface.
    Out(Interface),
    /// The packet arrives by this interface.
    In(Interface),
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

/// A socket of this network namespace that sends packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// One with this mark (`SO_MARK`).
    Mark(u32),
    /// One that a process with this effective user id opened.
    User(u32),
    /// One that a process with this effective group id opened.
    Group(u32),
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

/// Rules of a network namespace for one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// For connections of the namespace's programs.
    pub output: Vec<Rule>,
    /// For connections that arrive.
    pub input: Vec<Rule>,
    /// For packets that leave, after routing.
    pub leaving: Vec<Rule>,
}

/// A network, such as `10.0.0.0/8` or `fd00::/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Address; the bits below the prefix do not count.
    pub address: IpAddr,
    /// Length of the prefix in bits.
    pub prefix: u8,
}

/// Name of a network interface. With `+` at its end, it is the beginning of names, as in iptables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface(String);

impl Rule {
    /// Returns a rule that changes nothing.
    pub fn leave(conditions: Vec<Match>) -> Self {
        Self { conditions, verdict: Verdict::Leave }
    }

    /// Returns a rule that redirects TCP connections to a port.
    pub fn redirect(mut conditions: Vec<Match>, port: u16) -> Self {
        conditions.insert(0, Match::Protocol(TCP));
        Self { conditions, verdict: Verdict::Redirect(port) }
    }
}

impl Network {
    /// Returns the network of one address.
    pub const fn host(address: IpAddr) -> Self {
        Self { address, prefix: if address.is_ipv4() { 32 } else { 128 } }
    }

    /// Returns whether an address is in the network.
    pub fn contains(self, address: IpAddr) -> bool {
        let ((own, width), (other, other_width)) = (bits(self.address), bits(address));
        width == other_width && (own ^ other) & self.mask() == 0
    }

    /// Returns the family of the addresses.
    pub fn family(self) -> Family {
        if self.address.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    /// Returns the netmask.
    pub fn mask(self) -> u128 {
        let (_, width) = bits(self.address);
        let all = u128::MAX >> (128 - width);
        all.checked_shl(width.saturating_sub(u32::from(self.prefix))).unwrap_or(0) & all
    }

    /// Returns the address without the bits below the prefix, and the netmask, both as the bytes of a packet.
    pub(crate) fn bytes(self) -> (Vec<u8>, Vec<u8>) {
        let (address, width) = bits(self.address);
        let bytes = |value: u128| value.to_be_bytes()[16 - width as usize / 8..].to_vec();
        (bytes(address & self.mask()), bytes(self.mask()))
    }
}

/// Returns an address as a number, and its length in bits.
fn bits(address: IpAddr) -> (u128, u32) {
    match address {
        IpAddr::V4(address) => (u128::from(u32::from(address)), 32),
        IpAddr::V6(address) => (u128::from(address), 128),
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text:?} is not a range of addresses such as 10.0.0.0/8 or fd00::/8");
        let (address, prefix) = text.split_once('/').map_or((text, None), |(one, other)| (one, Some(other)));
        let host = Self::host(address.parse().map_err(|_| wrong())?);
        let prefix = prefix.map_or(Ok(host.prefix), str::parse).map_err(|_| wrong())?;
        if prefix > host.prefix { Err(wrong()) } else { Ok(Self { prefix, ..host }) }
    }
}

impl Interface {
    /// Returns the bytes with which the kernel's name, padded with zero bytes, must begin.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.0.as_bytes().to_vec();
        match self.0.strip_suffix('+') {
            Some(beginning) => bytes.truncate(beginning.len()),
            None => bytes.resize(NAME_SIZE, 0),
        }
        bytes
    }
}

impl FromStr for Interface {
    type Err = String;

    /// Accepts the names that the kernel accepts.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let valid = |byte: u8| byte.is_ascii_graphic() && !b"/:\"".contains(&byte);
        if text.len() < NAME_SIZE && text.bytes().all(valid) && !["", "+", ".", ".."].contains(&text) {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!("{text:?} is not the name of an interface"))
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.conditions.iter().try_for_each(|condition| write!(f, "{condition} "))?;
        match self.verdict {
            Verdict::Leave => f.write_str("accept"),
            Verdict::Redirect(port) => write!(f, "redirect to :{port}"),
            Verdict::To(address, port) => write!(f, "dnat to {address}:{port}"),
            Verdict::From(address) => write!(f, "snat to {address}"),
        }
    }
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Protocol(TCP) => f.write_str("meta l4proto tcp"),
            Self::Protocol(UDP) => f.write_str("meta l4proto udp"),
            Self::Protocol(number) => write!(f, "meta l4proto {number}"),
            Self::Sender(Sender::Mark(mark)) => write!(f, "meta mark {mark}"),
            Self::Sender(Sender::User(user)) => write!(f, "meta skuid {user}"),
            Self::Sender(Sender::Group(group)) => write!(f, "meta skgid {group}"),
            Self::OutLoopback => f.write_str("oif \"lo\""),
            Self::Out(interface) => write!(f, "oifname {interface}"),
            Self::In(interface) => write!(f, "iifname {interface}"),
            Self::To(network) => write!(f, "{} daddr {network}", network.family()),
            Self::NotTo(network) => write!(f, "{} daddr != {network}", network.family()),
            Self::From(network) => write!(f, "{} saddr {network}", network.family()),
            Self::Port(port) => write!(f, "th dport {port}"),
            Self::OneIn(count) => write!(f, "numgen random mod {count} 0"),
            Self::Translated => f.write_str("ct status dnat"),
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.strip_suffix('+') {
            Some(beginning) => write!(f, "\"{beginning}*\""),
            None => write!(f, "\"{}\"", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_parsed() {
        let network = |text: &str| text.parse::<Network>().unwrap();
        assert_eq!(network("10.0.0.0/8").mask(), 0xff00_0000);
        assert_eq!(network("0.0.0.0/0").mask(), 0);
        assert_eq!(network("10.0.0.1").mask(), u128::from(u32::MAX));
        assert_eq!(network("::/0").mask(), 0);
        assert_eq!(network("::1").mask(), u128::MAX);
        for wrong in ["10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/-1", "a", ""] {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
        let pods = network("10.244.0.0/16");
        assert!(pods.contains([10, 244, 255, 255].into()) && !pods.contains([10, 245, 0, 0].into()));
        let local = network("fd00::/8");
        assert!(local.contains("fdff::1".parse().unwrap()) && !local.contains("fe80::1".parse().unwrap()));
        assert!(!network("::/0").contains([10, 0, 0, 1].into()) && !pods.contains("::".parse().unwrap()));
        assert_eq!(network("10.244.3.4/16").bytes(), (vec![10, 244, 0, 0], vec![255, 255, 0, 0]));
        assert_eq!(network("ff02::1/16").bytes().0[..3], [0xff, 2, 0]);
    }

    #[test]
    fn interfaces_are_parsed() {
        let bytes = |text: &str| text.parse::<Interface>().unwrap().bytes();
        assert_eq!(bytes("eth0"), *b"eth0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(bytes("net+"), *b"net");
        for wrong in ["", "+", "..", "a b", "a/b", "a\"b", "a:1", "a-name-too-long1", "é"] {
            assert!(wrong.parse::<Interface>().is_err(), "{wrong}");
        }
    }
}
