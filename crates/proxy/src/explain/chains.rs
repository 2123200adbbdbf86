//! Filter chains that are not selected for a connection.

use skysail_policy::config::{
    FilterChain, Listener,
    listener::{ChainMatch, Cidr, Transport},
};

use super::report::ChainReport;
use crate::worker::filter_chain_match::{Criterion, Facts, excluded};

/// Returns the filter chains for the port of a connection that are not selected, with the reasons.
pub(super) fn unmatched(listener: &Listener, facts: &Facts<'_>) -> Vec<ChainReport> {
    let excluded = excluded(listener, facts).into_iter();
    let of_port = excluded.filter(|(_, criterion)| *criterion != Criterion::Port);
    let report = |(chain, criterion): (&std::sync::Arc<FilterChain>, Criterion)| ChainReport {
        name: chain.name.to_string(),
        server_names: server_names(chain),
        mismatch: words(criterion, &chain.matches, facts),
    };
    of_port.map(report).collect()
}

/// Returns the server names that a filter chain matches.
pub(super) fn server_names(chain: &FilterChain) -> Vec<String> {
    chain.matches.server_names.iter().map(ToString::to_string).collect()
}

fn words(criterion: Criterion, m: &ChainMatch, facts: &Facts<'_>) -> String {
    let findings = facts.findings;
    let is_excluded = criterion.rank(m, facts).is_none();
    let ranges = |ranges: &[Cidr]| {
        let texts = ranges.iter().map(|range| format!("{}/{}", range.address, range.prefix_len));
        texts.collect::<Vec<_>>()
    };
    let texts = |list: &[Box<str>]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (what, expected) = match criterion {
        Criterion::Port => {
            let port = m.destination_port.map(|port| port.to_string());
            (format!("port {}", facts.destination.port()), port.into_iter().collect())
        }
        Criterion::Destination => {
            (format!("destination {}", facts.destination.ip()), ranges(&m.destinations))
        }
        Criterion::ServerName => {
            let what = match (&findings.server_name, findings.transport) {
                (Some(name), _) => format!("SNI {name}"),
                (None, Some(Transport::Tls)) => "no SNI".to_owned(),
                (None, _) => "plain text without SNI".to_owned(),
            };
            (what, texts(&m.server_names))
        }
        Criterion::Transport => {
            let name = |transport| if transport == Transport::Tls { "TLS" } else { "plain text" };
            let own = name(findings.transport.unwrap_or(Transport::RawBuffer));
            (own.to_owned(), m.transport.map(|transport| name(transport).to_owned()).into_iter().collect())
        }
        Criterion::Protocol => {
            let offered: Vec<_> =
                findings.protocols.iter().map(|protocol| String::from_utf8_lossy(protocol)).collect();
            let what = match (offered.is_empty(), findings.transport) {
                (false, Some(Transport::Tls)) => format!("ALPN {}", offered.join(", ")),
                (true, Some(Transport::Tls)) => "no ALPN".to_owned(),
                (false, _) => format!("protocol {}", offered.join(", ")),
                (true, _) => "not HTTP".to_owned(),
            };
            (what, texts(&m.application_protocols))
        }
        Criterion::Source => (format!("client address {}", facts.source.ip()), ranges(&m.sources)),
    };
    match (is_excluded, expected.is_empty()) {
        (true, _) => format!("{what}, expected: {}", expected.join(" or ")),
        (false, true) => format!("{what}: another filter chain names it"),
        (false, false) => {
            format!("{what}: another filter chain is more specific than {}", expected.join(", "))
        }
    }
}
