//! Selection of the filter chain for a connection.
//!
//! As in Envoy, the filter chains are narrowed down criterion by criterion: destination port, destination address,
//! server name, transport, application protocol, source address. Each criterion keeps only the most specific matches. A
//! filter chain that is more specific in an earlier criterion hides others even if a later criterion excludes it.
//! Source: `envoy.config.listener.v3.FilterChainMatch`.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use crate::worker::inspect::Findings;
use skysail_policy::config::{
    FilterChain, Listener, Snapshot,
    listener::{ChainMatch, Cidr, Transport},
};

/// Properties of a connection that filter chains match.
#[derive(Debug)]
pub(crate) struct Facts<'a> {
    /// Destination address, before interception.
    pub(crate) destination: SocketAddr,
    /// Source address.
    pub(crate) source: SocketAddr,
    /// Results of the inspection of its first bytes.
    pub(crate) findings: &'a Findings,
}

/// Returns the listener of a connection that the socket of `entry` accepted. With `use_original_dst` this is the
/// listener of the destination address, if there is one.
pub(crate) fn listener(snapshot: &Snapshot, entry: &Arc<Listener>, destination: SocketAddr) -> Arc<Listener> {
    let by_address = &snapshot.listeners.by_address;
    let any = match destination {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let found = || {
        let exact = by_address.get(&destination);
        exact.or_else(|| by_address.get(&SocketAddr::new(any, destination.port()))).cloned()
    };
    let target = if entry.use_original_dst { found() } else { None };
    target.unwrap_or_else(|| entry.clone())
}

/// A criterion of filter chain matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Criterion {
    /// Destination port.
    Port,
    /// Destination address.
    Destination,
    /// Server name of TLS.
    ServerName,
    /// TLS or plain text.
    Transport,
    /// ALPN protocol, or HTTP version.
    Protocol,
    /// Source address.
    Source,
}

/// Criteria in the order of their evaluation.
const CRITERIA: [Criterion; 6] = [
    Criterion::Port,
    Criterion::Destination,
    Criterion::ServerName,
    Criterion::Transport,
    Criterion::Protocol,
    Criterion::Source,
];

impl Criterion {
    /// Returns the rank of a match for a connection; `None` if it excludes the connection.
    pub(crate) fn rank(self, m: &ChainMatch, facts: &Facts<'_>) -> Option<usize> {
        match self {
            Self::Port => {
                let is_it = m.destination_port == Some(facts.destination.port());
                ranked(m.destination_port.is_none(), is_it.then_some(1))
            }
            Self::Destination => longest(&m.destinations, facts.destination),
            Self::ServerName => server_name(&m.server_names, facts.findings.server_name.as_deref()),
            Self::Transport => {
                let transport = facts.findings.transport.unwrap_or(Transport::RawBuffer);
                ranked(m.transport.is_none(), (m.transport == Some(transport)).then_some(1))
            }
            Self::Protocol => ranked(m.application_protocols.is_empty(), protocol(m, facts.findings)),
            Self::Source => longest(&m.sources, facts.source),
        }
    }
}

/// Returns the filter chain for a connection: the best match, or else the default chain.
pub(crate) fn select<'a>(listener: &'a Listener, facts: &Facts<'_>) -> Option<&'a Arc<FilterChain>> {
    let mut left: Vec<&Arc<FilterChain>> = listener.chains.iter().collect();
    for criterion in CRITERIA {
        narrow(&mut left, |m| criterion.rank(m, facts));
    }
    left.first().copied().or(listener.default_chain.as_ref())
}

/// Returns the filter chains that a connection does not get, each with the criterion that decides it. For explanations.
pub(crate) fn excluded<'a>(
    listener: &'a Listener,
    facts: &Facts<'_>,
) -> Vec<(&'a Arc<FilterChain>, Criterion)> {
    let mut left: Vec<&Arc<FilterChain>> = listener.chains.iter().collect();
    let mut found = Vec::new();
    for criterion in CRITERIA {
        let before = left.clone();
        narrow(&mut left, |m| criterion.rank(m, facts));
        let is_left = |chain: &Arc<FilterChain>| left.iter().any(|other| Arc::ptr_eq(other, chain));
        found.extend(before.into_iter().filter(|chain| !is_left(chain)).map(|chain| (chain, criterion)));
    }
    found
}

/// Returns whether the filter chain of a connection to this destination may depend on its first bytes.
pub(crate) fn needs_findings(listener: &Listener, destination: SocketAddr) -> bool {
    listener.chains.iter().any(|chain| {
        let m = &chain.matches;
        m.destination_port.is_none_or(|port| port == destination.port())
            && (!m.server_names.is_empty() || m.transport.is_some() || !m.application_protocols.is_empty())
    })
}

/// Keeps the filter chains of the highest rank, and removes those without a rank.
fn narrow(left: &mut Vec<&Arc<FilterChain>>, rank: impl Fn(&ChainMatch) -> Option<usize>) {
    let best = left.iter().filter_map(|chain| rank(&chain.matches)).max();
    left.retain(|chain| best.is_some() && rank(&chain.matches) == best);
}

/// Returns rank 0 for a filter chain without this criterion, else the rank of its match.
fn ranked(is_any: bool, matched: Option<usize>) -> Option<usize> {
    if is_any { Some(0) } else { matched }
}

/// Ranks a longer prefix above a shorter one.
fn longest(ranges: &[Cidr], address: SocketAddr) -> Option<usize> {
    let ip = address.ip();
    let matched =
        ranges.iter().filter(|range| range.contains(ip)).map(|range| usize::from(range.prefix_len) + 1);
    ranked(ranges.is_empty(), matched.max())
}

/// Ranks exact names above wildcards, and longer wildcards above shorter ones.
fn server_name(names: &[Box<str>], requested: Option<&str>) -> Option<usize> {
    let rank = |name: &str| {
        let requested = requested?;
        match name.strip_prefix('*') {
            Some(suffix) => {
                (requested.len() > suffix.len() && requested.ends_with(suffix)).then_some(suffix.len() + 1)
            }
            None => (name == requested).then_some(usize::MAX),
        }
    };
    ranked(names.is_empty(), names.iter().filter_map(|name| rank(name)).max())
}

/// Ranks the protocols by the client's order of preference.
fn protocol(m: &ChainMatch, findings: &Findings) -> Option<usize> {
    let accepted = &m.application_protocols;
    let found = findings
        .protocols
        .iter()
        .position(|offered| accepted.iter().any(|protocol| protocol.as_bytes() == &**offered));
    found.map(|position| usize::MAX - position)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use skysail_policy::config::{
        listener::{Direction, TcpProxy, Terminal},
        route::Targets,
    };

    fn chain(name: &str, matches: ChainMatch) -> Arc<FilterChain> {
        let tcp = TcpProxy {
            stat_prefix: name.into(),
            targets: Targets::Single("c".into()),
            max_duration: None,
            hash_source_ip: false,
            tunnel: None,
            idle_timeout: Some(Duration::from_secs(1)),
            stats: None,
            access_logs: vec![],
        };
        Arc::new(FilterChain {
            name: name.into(),
            matches,
            tls: None,
            policies: vec![],
            sni_port: None,
            host_cache: None,
            connection_limits: Vec::new(),
            external_authorization: None,
            metadata_exchange: false,
            terminal: Terminal::Tcp(Arc::new(tcp)),
            handshake_timeout: None,
            fingerprint: None,
        })
    }

    fn listener(chains: Vec<Arc<FilterChain>>, default_chain: Option<Arc<FilterChain>>) -> Listener {
        Listener {
            name: "l".into(),
            addresses: vec![],
            pipe: None,
            bind: true,
            use_original_dst: false,
            read_original_dst: false,
            proxy_protocol: None,
            inspect_tls: None,
            inspect_http: None,
            inspect_timeout: None,
            continue_on_timeout: false,
            bypass_overload: false,
            ignore_connection_limit: false,
            direction: Direction::Inbound,
            chains,
            default_chain,
            access_logs: vec![],
        }
    }

    fn findings(transport: Transport, name: Option<&str>, protocols: &[&str]) -> Findings {
        Findings {
            transport: Some(transport),
            server_name: name.map(Into::into),
            protocols: protocols.iter().map(|p| p.as_bytes().into()).collect(),
        }
    }

    fn chosen(listener: &Listener, destination: &str, findings: &Findings) -> String {
        let facts = Facts {
            destination: destination.parse().unwrap(),
            source: "10.9.9.9:1".parse().unwrap(),
            findings,
        };
        select(listener, &facts).map_or("none".into(), |chain| chain.name.to_string())
    }

    #[test]
    fn permissive_inbound_chains_are_distinguished() {
        let any = ChainMatch::default;
        let tls = || ChainMatch { transport: Some(Transport::Tls), ..any() };
        let raw = || ChainMatch { transport: Some(Transport::RawBuffer), ..any() };
        let protocols = |list: &[&str]| list.iter().map(|p| (*p).into()).collect::<Vec<Box<str>>>();
        let port = |port, m: ChainMatch| ChainMatch { destination_port: Some(port), ..m };
        let listener = listener(
            vec![
                chain("blackhole", port(15006, any())),
                chain(
                    "tls",
                    port(9080, ChainMatch { application_protocols: protocols(&["istio-http/1.1"]), ..tls() }),
                ),
                chain("plain", port(9080, raw())),
                chain(
                    "catch-http",
                    ChainMatch { application_protocols: protocols(&["http/1.1", "h2c"]), ..raw() },
                ),
                chain("catch-tcp", raw()),
            ],
            None,
        );
        let plain_http = findings(Transport::RawBuffer, None, &["http/1.1"]);
        let mesh = findings(Transport::Tls, Some("x"), &["istio-http/1.1"]);
        let plain = findings(Transport::RawBuffer, None, &[]);
        assert_eq!(chosen(&listener, "10.0.0.1:15006", &plain_http), "blackhole");
        assert_eq!(chosen(&listener, "10.0.0.1:9080", &mesh), "tls");
        assert_eq!(chosen(&listener, "10.0.0.1:9080", &plain_http), "plain");
        assert_eq!(chosen(&listener, "10.0.0.1:80", &plain_http), "catch-http");
        assert_eq!(chosen(&listener, "10.0.0.1:80", &plain), "catch-tcp");
        let other_tls = findings(Transport::Tls, Some("x"), &["h2"]);
        assert_eq!(chosen(&listener, "10.0.0.1:9080", &other_tls), "none");
        let facts = Facts {
            destination: "10.0.0.1:9080".parse().unwrap(),
            source: "10.9.9.9:1".parse().unwrap(),
            findings: &other_tls,
        };
        let why: Vec<_> = excluded(&listener, &facts).into_iter().map(|(of, why)| (&*of.name, why)).collect();
        let expected = [
            ("blackhole", Criterion::Port),
            ("catch-http", Criterion::Port),
            ("catch-tcp", Criterion::Port),
            ("plain", Criterion::Transport),
            ("tls", Criterion::Protocol),
        ];
        assert_eq!(why, expected);
    }

    #[test]
    fn a_more_specific_chain_hides_others() {
        let names = |list: &[&str]| ChainMatch {
            server_names: list.iter().map(|n| (*n).into()).collect(),
            ..ChainMatch::default()
        };
        let range = |address: &str, prefix_len| ChainMatch {
            destinations: vec![Cidr { address: address.parse().unwrap(), prefix_len }],
            ..ChainMatch::default()
        };
        let by_name = listener(
            vec![
                chain("exact", names(&["a.b.c"])),
                chain("long", names(&["*.b.c"])),
                chain("short", names(&["*.c"])),
            ],
            Some(chain("default", ChainMatch::default())),
        );
        let chosen_by_name = |name| chosen(&by_name, "1.1.1.1:1", &findings(Transport::Tls, Some(name), &[]));
        assert_eq!(chosen_by_name("a.b.c"), "exact");
        assert_eq!(chosen_by_name("x.b.c"), "long");
        assert_eq!(chosen_by_name("x.y.c"), "short");
        assert_eq!(chosen_by_name("d"), "default");
        let by_range =
            listener(vec![chain("wide", range("10.0.0.0", 8)), chain("narrow", range("10.1.0.0", 16))], None);
        let none = findings(Transport::RawBuffer, None, &[]);
        assert_eq!(chosen(&by_range, "10.1.2.3:1", &none), "narrow");
        assert_eq!(chosen(&by_range, "10.2.2.3:1", &none), "wide");
        assert_eq!(chosen(&by_range, "11.2.2.3:1", &none), "none");
    }
}
