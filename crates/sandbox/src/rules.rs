//! Packet rules of the mesh.
//!
//! [`interception`] are the rules of [`skysail_intercept`] for pods whose sidecar has a mark. [`services`] does the work of
//! kube-proxy where no sidecar resolves virtual addresses. [`bridge`] does it for the connections that sidecars pass
//! through, and redirects connections out of the mesh to the egress listener.

use std::{collections::BTreeMap, net::Ipv4Addr};

use skysail_core::names::{HEALTH_PORT, INBOUND_PORT, MERGED_METRICS_PORT, METRICS_PORT, OUTBOUND_PORT};
use skysail_intercept::{
    interception::{Exceptions, Include, Interception, List},
    rules::{Family, Match, Network, Rule, Rules, Sender, TCP, UDP, Verdict},
};

/// A port of a Service and its backends, for connections that bypass the sidecar.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VirtualPort {
    pub(crate) address: Ipv4Addr,
    pub(crate) port: u16,
    pub(crate) udp: bool,
    pub(crate) backends: Vec<(Ipv4Addr, u16)>,
}

const ANNOTATIONS: &str = "traffic.sidecar.istio.io/";
/// Ports of the sidecar, whose connections are not intercepted.
const SIDECAR_PORTS: [u16; 3] = [METRICS_PORT, HEALTH_PORT, MERGED_METRICS_PORT];

/// Returns the connections of a pod that are not intercepted, by its annotations `traffic.sidecar.istio.io/…`. Also returns
/// the errors as texts.
pub(crate) fn exceptions(annotations: &BTreeMap<String, String>) -> (Exceptions, Vec<String>) {
    let mut exceptions = Exceptions { exclude_inbound: SIDECAR_PORTS.to_vec(), ..Exceptions::default() };
    let mut problems = Vec::new();
    for (key, value) in annotations {
        let Some(name) = key.strip_prefix(ANNOTATIONS) else { continue };
        if let Err(problem) = set(&mut exceptions, name, value) {
            problems.push(format!("annotation {key}: {problem}"));
        }
    }
    (exceptions, problems)
}

fn set(exceptions: &mut Exceptions, name: &str, value: &str) -> Result<(), String> {
    let ports = || value.parse().map(|List(ports): List<u16>| ports);
    match name {
        "includeInboundPorts" => exceptions.include_inbound = value.parse()?,
        "excludeInboundPorts" => exceptions.exclude_inbound.extend(ports()?),
        "includeOutboundPorts" => exceptions.include_outbound = ports()?,
        "excludeOutboundPorts" => exceptions.exclude_outbound = ports()?,
        "includeOutboundIPRanges" => exceptions.include_ranges = value.parse()?,
        "excludeOutboundIPRanges" => exceptions.exclude_ranges = value.parse::<List<_>>()?.0,
        _ => return Err("is not supported here and has no effect".to_owned()),
    }
    Ok(())
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
    let bypasses = |port: &&VirtualPort| exceptions.bypasses(port.address.into(), port.port);
    let mut before = vec![Rule::leave(vec![Match::To(Network::host(infrastructure.into()))])];
    before.extend(services(ports.iter().filter(bypasses)));
    let interception = Interception {
        sidecar: &[Sender::Mark(mark)],
        outbound_port: OUTBOUND_PORT,
        inbound_port: INBOUND_PORT,
        exceptions,
        before,
    };
    let mut rules = interception.rules(Family::V4);
    // Connections that are not intercepted: UDP, and TCP outside the included ranges.
    let left = |port: &&VirtualPort| port.udp || exceptions.include_ranges != Include::All;
    rules.output.extend(services(ports.iter().filter(left).filter(|port| !bypasses(port))));
    rules
}

/// Returns rules that send connections for virtual addresses to a backend, each with the same probability.
pub(crate) fn services<'a>(ports: impl Iterator<Item = &'a VirtualPort>) -> Vec<Rule> {
    let mut rules = Vec::new();
    for port in ports {
        for (index, (address, target)) in port.backends.iter().enumerate() {
            let left = u32::try_from(port.backends.len() - index).unwrap_or(1);
            let protocol = if port.udp { UDP } else { TCP };
            let mut conditions = vec![
                Match::To(Network::host(port.address.into())),
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
    let mut rules: Vec<Rule> = closed.map(|network| Rule::leave(vec![Match::To(network)])).collect();
    rules.push(Rule::redirect(vec![Match::From(pods)], port));
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
        let (exceptions, problems) = exceptions(&annotations);
        assert_eq!(exceptions.exclude_inbound, [15090, 15021, 15020, 22, 9000]);
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
        set(&mut exceptions, "includeInboundPorts", "8080").unwrap();
        set(&mut exceptions, "includeOutboundIPRanges", "").unwrap();
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
            annotations.iter().for_each(|(name, value)| set(&mut exceptions, name, value).unwrap());
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
        let chances: Vec<_> = rules.iter().map(|rule| rule.conditions.last().cloned().unwrap()).collect();
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
