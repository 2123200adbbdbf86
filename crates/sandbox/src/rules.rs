//! Packet rules of the mesh.
//!
//! [`interception`] is equivalent to the iptables rules of Istio's init container, but identifies the sidecar's traffic
//! by its mark instead of its user id. [`services`] does the work of kube-proxy where no sidecar resolves virtual
//! addresses. [`bridge`] does it for the connections that sidecars pass through, and redirects connections out of the mesh
//! to the egress listener. [`skysail_intercept::nftables`] installs the rules.

use std::{collections::BTreeMap, net::Ipv4Addr, str::FromStr};

use skysail_core::names::{HEALTH_PORT, INBOUND_PORT, MERGED_METRICS_PORT, METRICS_PORT, OUTBOUND_PORT};
use skysail_intercept::rules::{Match, Network, Rule, Rules, Verdict};

/// Connections of a pod that are not intercepted, by the pod's annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Exceptions {
    include_inbound: Option<Vec<u16>>,
    exclude_inbound: Vec<u16>,
    include_outbound: Vec<u16>,
    exclude_outbound: Vec<u16>,
    include_ranges: Option<Vec<Network>>,
    exclude_ranges: Vec<Network>,
}

/// A port of a Service and its backends, for connections that bypass the sidecar.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VirtualPort {
    pub(crate) address: Ipv4Addr,
    pub(crate) port: u16,
    pub(crate) udp: bool,
    pub(crate) backends: Vec<(Ipv4Addr, u16)>,
}

const LOOPBACK: Network = Network { address: Ipv4Addr::new(127, 0, 0, 0), prefix: 8 };
/// Source address of connections from a sidecar to its own workload, so that they are not intercepted again.
const DELIVERED_FROM: Network = Network::host(Ipv4Addr::new(127, 0, 0, 6));
const TCP: u8 = 6;
const UDP: u8 = 17;

const ANNOTATIONS: &str = "traffic.sidecar.istio.io/";

impl Exceptions {
    /// Returns whether connections to a port of a Service are not intercepted because of its port or its address.
    fn exclude(&self, port: &VirtualPort) -> bool {
        let contains = |range: &Network| {
            let mask = range.mask();
            u32::from(range.address) & mask == u32::from(port.address) & mask
        };
        self.exclude_outbound.contains(&port.port) || self.exclude_ranges.iter().any(contains)
    }

    /// Returns whether a connection of the pod's programs to this address is intercepted, as [`interception`] decides.
    pub(crate) fn intercept_outbound(&self, address: Ipv4Addr, port: u16) -> bool {
        if LOOPBACK.contains(address) || self.exclude_outbound.contains(&port) {
            return false;
        }
        if self.exclude_ranges.iter().any(|range| range.contains(address)) {
            return false;
        }
        let included = |ranges: &Vec<Network>| ranges.iter().any(|range| range.contains(address));
        self.include_outbound.contains(&port) || self.include_ranges.as_ref().is_none_or(included)
    }

    /// Returns whether a connection to this port of the pod is intercepted, as [`interception`] decides.
    pub(crate) fn intercept_inbound(&self, port: u16) -> bool {
        ![METRICS_PORT, HEALTH_PORT, MERGED_METRICS_PORT].contains(&port)
            && !self.exclude_inbound.contains(&port)
            && self.include_inbound.as_ref().is_none_or(|ports| ports.contains(&port))
    }

    /// Reads the annotations `traffic.sidecar.istio.io/…` of a pod. Also returns the errors as texts.
    pub(crate) fn read(annotations: &BTreeMap<String, String>) -> (Self, Vec<String>) {
        let mut exceptions = Self::default();
        let mut problems = Vec::new();
        for (key, value) in annotations {
            let Some(name) = key.strip_prefix(ANNOTATIONS) else { continue };
            if let Err(problem) = exceptions.set(name, value) {
                problems.push(format!("annotation {key}: {problem}"));
            }
        }
        (exceptions, problems)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let all = value.trim() == "*";
        match name {
            "includeInboundPorts" => self.include_inbound = if all { None } else { Some(list(value)?) },
            "excludeInboundPorts" => self.exclude_inbound = list(value)?,
            "includeOutboundPorts" => self.include_outbound = list(value)?,
            "excludeOutboundPorts" => self.exclude_outbound = list(value)?,
            "includeOutboundIPRanges" => self.include_ranges = if all { None } else { Some(list(value)?) },
            "excludeOutboundIPRanges" => self.exclude_ranges = list(value)?,
            _ => return Err("is not supported here and has no effect".to_owned()),
        }
        Ok(())
    }
}

fn list<T: FromStr>(value: &str) -> Result<Vec<T>, String> {
    let items = value.split(',').map(str::trim).filter(|item| !item.is_empty());
    items.map(|item| item.parse().map_err(|_| format!("{item:?} is not valid"))).collect()
}

/// Returns the rules of a pod with a sidecar whose own sockets carry `mark`. Connections to `infrastructure` are never
/// intercepted. Connections to Services that bypass the sidecar go to a backend, because no sidecar resolves their
/// addresses.
pub(crate) fn interception(
    exceptions: &Exceptions,
    mark: u32,
    infrastructure: Ipv4Addr,
    ports: &[VirtualPort],
) -> Rules {
    let leave = |conditions: Vec<Match>| Rule { conditions, verdict: Verdict::Leave };
    let tcp = |mut conditions: Vec<Match>, port| {
        conditions.insert(0, Match::Protocol(TCP));
        Rule { conditions, verdict: Verdict::Redirect(port) }
    };
    let mut output = vec![
        leave(vec![Match::From(DELIVERED_FROM)]),
        // The sidecar calls its own pod through a Service: the call is inbound like any other.
        tcp(vec![Match::Mark(mark), Match::OutLoopback, Match::NotTo(LOOPBACK)], INBOUND_PORT),
        leave(vec![Match::Mark(mark)]),
        leave(vec![Match::OutLoopback]),
        leave(vec![Match::To(LOOPBACK)]),
        leave(vec![Match::To(Network::host(infrastructure))]),
    ];
    output.extend(services(ports.iter().filter(|port| exceptions.exclude(port))));
    output.extend(exceptions.exclude_outbound.iter().map(|port| leave(vec![Match::Port(*port)])));
    output.extend(exceptions.exclude_ranges.iter().map(|range| leave(vec![Match::To(*range)])));
    output
        .extend(exceptions.include_outbound.iter().map(|port| tcp(vec![Match::Port(*port)], OUTBOUND_PORT)));
    match &exceptions.include_ranges {
        None => output.push(tcp(vec![], OUTBOUND_PORT)),
        Some(ranges) => {
            output.extend(ranges.iter().map(|range| tcp(vec![Match::To(*range)], OUTBOUND_PORT)));
        }
    }
    // Connections that are not intercepted: UDP, and TCP outside the included ranges.
    let left = |port: &&VirtualPort| port.udp || exceptions.include_ranges.is_some();
    output.extend(services(ports.iter().filter(left).filter(|port| !exceptions.exclude(port))));

    let own = [METRICS_PORT, HEALTH_PORT, MERGED_METRICS_PORT];
    let mut input: Vec<Rule> =
        own.iter().chain(&exceptions.exclude_inbound).map(|port| leave(vec![Match::Port(*port)])).collect();
    match &exceptions.include_inbound {
        None => input.push(tcp(vec![], INBOUND_PORT)),
        Some(ports) => input.extend(ports.iter().map(|port| tcp(vec![Match::Port(*port)], INBOUND_PORT))),
    }
    Rules { output, input, leaving: Vec::new() }
}

/// Returns rules that send connections for virtual addresses to a backend, each with the same probability.
pub(crate) fn services<'a>(ports: impl Iterator<Item = &'a VirtualPort>) -> Vec<Rule> {
    let mut rules = Vec::new();
    for port in ports {
        for (index, (address, target)) in port.backends.iter().enumerate() {
            let left = u32::try_from(port.backends.len() - index).unwrap_or(1);
            let protocol = if port.udp { UDP } else { TCP };
            let mut conditions = vec![
                Match::To(Network::host(port.address)),
                Match::Protocol(protocol),
                Match::Port(port.port),
            ];
            if left > 1 {
                conditions.push(Match::OneIn(left));
            }
            rules.push(Rule { conditions, verdict: Verdict::To(*address, *target) });
        }
    }
    rules
}

/// Returns the rules of the bridge's namespace, where packets arrive that are for no pod's address. TCP connections to
/// Services go to a backend, and have the bridge's address `own` as their source. `egress` follows.
pub(crate) fn bridge(ports: &[VirtualPort], own: Ipv4Addr, egress: Vec<Rule>) -> Rules {
    let mut input = services(ports.iter().filter(|port| !port.udp));
    input.extend(egress);
    let leaving = vec![Rule { conditions: vec![Match::Translated], verdict: Verdict::From(own) }];
    Rules { output: Vec::new(), input, leaving }
}

/// Returns rules that redirect TCP connections from `pods` to a port of the bridge's namespace, except those to
/// `closed` networks.
pub(crate) fn egress(closed: impl Iterator<Item = Network>, pods: Network, port: u16) -> Vec<Rule> {
    let leave = |network| Rule { conditions: vec![Match::To(network)], verdict: Verdict::Leave };
    let mut rules: Vec<Rule> = closed.map(leave).collect();
    let conditions = vec![Match::Protocol(TCP), Match::From(pods)];
    rules.push(Rule { conditions, verdict: Verdict::Redirect(port) });
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_exclude_connections_and_invalid_ones_are_reported() {
        let annotations = BTreeMap::from(
            [
                ("traffic.sidecar.istio.io/excludeInboundPorts", "22, 9000"),
                ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.1.0.0/16"),
                ("traffic.sidecar.istio.io/excludeOutboundPorts", "many"),
                ("traffic.sidecar.istio.io/kubevirtInterfaces", "x"),
                ("other", "x"),
            ]
            .map(|(key, value)| (key.to_owned(), value.to_owned())),
        );
        let (exceptions, problems) = Exceptions::read(&annotations);
        assert_eq!(exceptions.exclude_inbound, [22, 9000]);
        assert_eq!(exceptions.exclude_ranges, ["10.1.0.0/16".parse().unwrap()]);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("excludeOutboundPorts"));
        let rules = interception(&exceptions, 1, Ipv4Addr::LOCALHOST, &[]);
        assert!(rules.input.iter().any(|rule| rule.conditions == [Match::Port(9000)]));
        assert_eq!(rules.output.last().unwrap().verdict, Verdict::Redirect(OUTBOUND_PORT));
    }

    #[test]
    fn only_included_ports_and_ranges_are_intercepted() {
        let mut exceptions = Exceptions::default();
        exceptions.set("includeInboundPorts", "8080").unwrap();
        exceptions.set("includeOutboundIPRanges", "").unwrap();
        let rules = interception(&exceptions, 1, Ipv4Addr::LOCALHOST, &[]);
        let last = rules.input.last().unwrap();
        assert_eq!(last.conditions, [Match::Protocol(TCP), Match::Port(8080)]);
        assert!(!rules.output.iter().any(|rule| rule.verdict == Verdict::Redirect(OUTBOUND_PORT)));
    }

    #[test]
    fn connections_that_bypass_the_sidecar_go_to_backends() {
        let port = |last: u8, port: u16, udp: bool| {
            let backends = vec![(Ipv4Addr::new(10, 244, 0, last), 8080)];
            VirtualPort { address: Ipv4Addr::new(10, 96, 0, last), port, udp, backends }
        };
        let ports = [port(1, 80, false), port(2, 81, false), port(3, 53, true), port(4, 80, true)];
        // Returns the backends, and whether their rules precede the redirection of all other connections.
        let backends = |annotations: &[(&str, &str)]| {
            let mut exceptions = Exceptions::default();
            annotations.iter().for_each(|(name, value)| exceptions.set(name, value).unwrap());
            let rules = interception(&exceptions, 1, Ipv4Addr::LOCALHOST, &ports).output;
            let all =
                Rule { conditions: vec![Match::Protocol(TCP)], verdict: Verdict::Redirect(OUTBOUND_PORT) };
            let all = rules.iter().position(|rule| *rule == all);
            let leave = rules.iter().position(|rule| rule.conditions == [Match::Port(80)]);
            let found = rules.iter().enumerate().filter_map(|(at, rule)| match rule.verdict {
                Verdict::To(address, _) => {
                    Some((address.octets()[3], all.or(leave).is_none_or(|all| at < all)))
                }
                _ => None,
            });
            found.collect::<Vec<_>>()
        };
        assert_eq!(backends(&[]), [(3, false), (4, false)]);
        assert_eq!(backends(&[("excludeOutboundPorts", "80")]), [(1, true), (4, true), (3, false)]);
        assert_eq!(
            backends(&[("excludeOutboundIPRanges", "10.96.0.2/32")]),
            [(2, true), (3, false), (4, false)]
        );
        let ranges = backends(&[("includeOutboundIPRanges", "10.0.0.0/16")]);
        assert_eq!(ranges.iter().map(|(last, _)| *last).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }

    #[test]
    fn backends_have_the_same_probability() {
        let backends = [1, 2, 3].map(|last| (Ipv4Addr::new(10, 244, 0, last), 8080)).to_vec();
        let port = VirtualPort { address: Ipv4Addr::new(10, 96, 0, 1), port: 80, udp: false, backends };
        let rules = services([port].iter());
        let chances: Vec<_> = rules.iter().map(|rule| rule.conditions.last().copied().unwrap()).collect();
        assert_eq!(chances, [Match::OneIn(3), Match::OneIn(2), Match::Port(80)]);
    }

    #[test]
    fn closed_networks_are_excluded_before_the_redirection() {
        let [pods, closed] = ["10.244.0.0/16", "169.254.0.0/16"].map(|text| text.parse().unwrap());
        let rules = egress([closed].into_iter(), pods, 7000);
        assert_eq!(rules[0], Rule { conditions: vec![Match::To(closed)], verdict: Verdict::Leave });
        assert_eq!(rules[1].conditions, [Match::Protocol(TCP), Match::From(pods)]);
        assert_eq!(rules[1].verdict, Verdict::Redirect(7000));
    }
}
