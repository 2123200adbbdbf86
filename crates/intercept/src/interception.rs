//! The rules of a pod whose connections a sidecar handles.
//!
//! They have the order of the iptables rules of Istio's init container. `skysail up` and the command `intercept` use the
//! same function. They differ in what identifies the sidecar: a mark, or a user and a group.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use crate::rules::{Family, Interface, Match, Network, Rule, Rules, Sender};

/// Source address of connections from a sidecar to its own workload, so that they are not intercepted again.
pub(crate) const DELIVERED_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 6);
/// The same for IPv6. The command `intercept` assigns it to `lo`.
pub(crate) const DELIVERED_FROM_V6: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);

/// Which connections are intercepted before exclusions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Include<T> {
    /// All.
    #[default]
    All,
    /// Those to these ports or networks.
    Only(Vec<T>),
}

/// A list with commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List<T>(pub Vec<T>);

/// Connections of a pod that are not intercepted. Exclusions have precedence over inclusions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exceptions {
    /// Ports whose inbound connections are intercepted.
    pub include_inbound: Include<u16>,
    /// Ports whose inbound connections are not intercepted.
    pub exclude_inbound: Vec<u16>,
    /// Ports to which outbound connections are intercepted, regardless of `include_ranges`.
    pub include_outbound: Vec<u16>,
    /// Ports to which outbound connections are not intercepted.
    pub exclude_outbound: Vec<u16>,
    /// Networks to which outbound connections are intercepted.
    pub include_ranges: Include<Network>,
    /// Networks to which outbound connections are not intercepted.
    pub exclude_ranges: Vec<Network>,
    /// Interfaces of virtual machines in the pod: what arrives there is outbound.
    pub virtual_interfaces: Vec<Interface>,
    /// Interfaces whose connections are not intercepted.
    pub exclude_interfaces: Vec<Interface>,
}

/// How the connections of a pod reach its sidecar.
#[derive(Clone, Debug)]
pub struct Interception<'a> {
    /// Sockets of the sidecar, whose connections are not intercepted.
    pub sidecar: &'a [Sender],
    /// Port of the sidecar for connections of the pod's programs.
    pub outbound_port: u16,
    /// Port of the sidecar for connections to the pod.
    pub inbound_port: u16,
    /// Connections that are not intercepted.
    pub exceptions: &'a Exceptions,
    /// Further rules for connections of the pod's programs to other addresses than the pod's own. They precede the
    /// exceptions.
    pub before: Vec<Rule>,
}

impl<T: FromStr> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
        let items = items.map(|item| item.parse().map_err(|_| format!("{item:?} is not valid")));
        items.collect::<Result<_, _>>().map(Self)
    }
}

impl<T: FromStr> FromStr for Include<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.trim() == "*" { Ok(Self::All) } else { text.parse().map(|List(items)| Self::Only(items)) }
    }
}

impl<T> Include<T> {
    /// Returns the inclusions; `None` stands for all.
    fn of(&self, belongs: impl Fn(&T) -> bool) -> Vec<Option<&T>> {
        match self {
            Self::All => vec![None],
            Self::Only(items) => items.iter().filter(|item| belongs(item)).map(Some).collect(),
        }
    }
}

impl Exceptions {
    /// Returns whether connections of the pod's programs to this address are excluded because of the address or the
    /// port.
    pub fn bypasses(&self, address: IpAddr, port: u16) -> bool {
        self.exclude_outbound.contains(&port)
            || self.exclude_ranges.iter().any(|range| range.contains(address))
    }

    /// Returns whether a connection of the pod's programs to this address is intercepted, as [`Interception::rules`]
    /// decides. The address is not one of the pod.
    pub fn intercept_outbound(&self, address: IpAddr, port: u16) -> bool {
        let included = match &self.include_ranges {
            Include::All => true,
            Include::Only(ranges) => ranges.iter().any(|range| range.contains(address)),
        };
        let own = address.is_loopback() && (address == Ipv4Addr::LOCALHOST || !self.include_loopback());
        !own && !self.bypasses(address, port) && (included || self.include_outbound.contains(&port))
    }

    /// Returns whether a connection to this port of the pod is intercepted, as [`Interception::rules`] decides.
    pub fn intercept_inbound(&self, port: u16) -> bool {
        let included = match &self.include_inbound {
            Include::All => true,
            Include::Only(ports) => ports.contains(&port),
        };
        included && !self.exclude_inbound.contains(&port)
    }

    /// Returns whether connections to loopback addresses are intercepted, as an included network asks for it.
    fn include_loopback(&self) -> bool {
        match &self.include_ranges {
            Include::All => false,
            Include::Only(ranges) => ranges.iter().any(|range| range.address.is_loopback()),
        }
    }
}

impl Interception<'_> {
    /// Returns the rules of a family.
    pub fn rules(&self, family: Family) -> Rules {
        Rules { output: self.output(family), input: self.input(family), leaving: Vec::new() }
    }

    fn output(&self, family: Family) -> Vec<Rule> {
        let exceptions = self.exceptions;
        let [own, delivered_from]: [IpAddr; 2] = match family {
            Family::V4 => [Ipv4Addr::LOCALHOST.into(), DELIVERED_FROM.into()],
            Family::V6 => [Ipv6Addr::LOCALHOST.into(), DELIVERED_FROM_V6.into()],
        };
        let [own, delivered_from] = [own, delivered_from].map(Network::host);
        let port_rules = |ports: &[u16], rule: fn(Match) -> Rule| -> Vec<Rule> {
            ports.iter().map(|port| rule(Match::Port(*port))).collect()
        };
        let mut rules = Vec::new();
        let excluded = exceptions.exclude_interfaces.iter().cloned();
        rules.extend(excluded.map(|interface| Rule::leave(vec![Match::Out(interface)])));
        // Also the sidecar's calls to an excluded port of its own pod.
        let excluded = &exceptions.exclude_outbound;
        rules.extend(port_rules(excluded, |port| Rule::leave(vec![Match::OutLoopback, port])));
        rules.push(Rule::leave(vec![Match::OutLoopback, Match::From(delivered_from)]));
        for sender in self.sidecar {
            // The sidecar calls its own pod through a Service: the call is inbound like any other.
            let conditions = vec![Match::Sender(*sender), Match::OutLoopback, Match::NotTo(own)];
            rules.push(Rule::redirect(conditions, self.inbound_port));
        }
        rules.extend(self.sidecar.iter().map(|sender| Rule::leave(vec![Match::Sender(*sender)])));
        if !exceptions.include_loopback() {
            rules.push(Rule::leave(vec![Match::OutLoopback]));
        }
        rules.push(Rule::leave(vec![Match::To(own)]));
        rules.extend(self.before.iter().cloned());
        rules.extend(port_rules(excluded, |port| Rule::leave(vec![port])));
        let ranges = exceptions.exclude_ranges.iter().filter(|range| range.family() == family);
        rules.extend(ranges.map(|range| Rule::leave(vec![Match::To(*range)])));
        let ports = exceptions.include_outbound.iter();
        rules.extend(ports.map(|port| Rule::redirect(vec![Match::Port(*port)], self.outbound_port)));
        rules.extend(self.included(family, &[]));
        rules
    }

    fn input(&self, family: Family) -> Vec<Rule> {
        let exceptions = self.exceptions;
        let mut rules = Vec::new();
        for interface in &exceptions.virtual_interfaces {
            let from = Match::In(interface.clone());
            rules.extend(self.included(family, &[from]));
        }
        let interfaces = exceptions.virtual_interfaces.iter().chain(&exceptions.exclude_interfaces);
        rules.extend(interfaces.map(|interface| Rule::leave(vec![Match::In(interface.clone())])));
        let excluded = exceptions.exclude_inbound.iter();
        rules.extend(excluded.map(|port| Rule::leave(vec![Match::Port(*port)])));
        let included = exceptions.include_inbound.of(|_| true).into_iter();
        rules.extend(included.map(|port| {
            Rule::redirect(port.map(|port| Match::Port(*port)).into_iter().collect(), self.inbound_port)
        }));
        rules
    }

    /// Returns rules that redirect connections to the included networks of a family to the outbound port.
    fn included(&self, family: Family, conditions: &[Match]) -> Vec<Rule> {
        let networks = self.exceptions.include_ranges.of(|range| range.family() == family).into_iter();
        let to = |network: Option<&Network>| network.map(|network| Match::To(*network));
        let rule = |network| {
            Rule::redirect(conditions.iter().cloned().chain(to(network)).collect(), self.outbound_port)
        };
        networks.map(rule).collect()
    }
}

#[cfg(test)]
mod tests;
