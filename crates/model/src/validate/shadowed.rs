//! Rules of a VirtualService that no request or connection reaches, because earlier rules match all of them.

use super::{Code, Findings};
use crate::api::{
    StringMatch, VirtualService,
    virtual_service::{HttpMatchRequest, IstioHttpRoute, L4Match},
};

/// Maximum number of rules compared, to bound the time.
const MAX_RULES: usize = 200;

/// Reports rules whose every match is covered by a match of an earlier rule.
pub(super) fn rules(rules: &[IstioHttpRoute], findings: &mut Findings) {
    for (index, rule) in rules.iter().enumerate().take(MAX_RULES) {
        let Some(first) = rules[..index].iter().position(|earlier| covers_rule(earlier, rule)) else {
            continue;
        };
        let takes_all = covers_rule(&rules[first], &IstioHttpRoute::default());
        let what =
            if takes_all { "matches every request" } else { "matches every request that this rule matches" };
        let message = format!("is unreachable: http[{first}] {what}");
        findings.add(
            Code::UnreachableRule,
            format!("spec.http[{index}]"),
            message,
            "move it before that rule, or remove it",
        );
        if takes_all {
            // The same applies to all later rules.
            return;
        }
    }
}

/// Reports rules of connections whose every match is covered by a match of an earlier rule of the same list.
pub(super) fn connections(spec: &VirtualService, findings: &mut Findings) {
    let tcp: Vec<&[L4Match]> = spec.tcp.iter().map(|rule| rule.matches.as_slice()).collect();
    let tls: Vec<&[L4Match]> = spec.tls.iter().map(|rule| rule.matches.as_slice()).collect();
    for (list, rules) in [("tcp", tcp), ("tls", tls)] {
        for (index, rule) in rules.iter().enumerate().take(MAX_RULES) {
            let covered = |earlier: &&[L4Match]| covers_connections(earlier, rule);
            if let Some(first) = rules[..index].iter().position(covered) {
                let message = format!(
                    "is unreachable: {list}[{first}] matches every connection that this rule matches"
                );
                let field = format!("spec.{list}[{index}]");
                findings.add(Code::UnreachableRule, field, message, "move it before that rule, or remove it");
            }
        }
    }
}

fn covers_connections(earlier: &[L4Match], later: &[L4Match]) -> bool {
    let any = [L4Match::default()];
    let earlier = if earlier.is_empty() { &any[..] } else { earlier };
    let later = if later.is_empty() { &any[..] } else { later };
    later.iter().all(|narrow| earlier.iter().any(|wide| covers_connection(wide, narrow)))
}

/// Returns whether `wide` matches every connection that `narrow` matches. Server names and addresses are compared as
/// texts, because the most specific one is used, whatever the order.
pub(crate) fn covers_connection(wide: &L4Match, narrow: &L4Match) -> bool {
    let port = |found: &L4Match| found.port.filter(|port| *port > 0);
    let same = |wide: &[String], narrow: &[String]| {
        wide.len() == narrow.len() && narrow.iter().all(|item| wide.contains(item))
    };
    same(&wide.sni_hosts, &narrow.sni_hosts)
        && same(&wide.destination_subnets, &narrow.destination_subnets)
        && (port(wide).is_none() || port(wide) == port(narrow))
        && wide.source_labels.iter().all(|(name, value)| narrow.source_labels.get(name) == Some(value))
        && (wide.source_namespace.is_none() || wide.source_namespace == narrow.source_namespace)
        && (wide.gateways.is_empty() || wide.gateways == narrow.gateways)
}

/// Returns whether a rule matches every request that another one matches. Only single matches are compared, so some
/// cases are missed.
fn covers_rule(earlier: &IstioHttpRoute, later: &IstioHttpRoute) -> bool {
    if earlier.delegate.is_some() {
        // The delegate may match less.
        return false;
    }
    let any = [HttpMatchRequest::default()];
    let earlier = if earlier.matches.is_empty() { &any[..] } else { &earlier.matches };
    let later = if later.matches.is_empty() { &any[..] } else { &later.matches };
    later.iter().all(|narrow| earlier.iter().any(|wide| covers_request(wide, narrow)))
}

/// Returns whether `wide` matches every request that `narrow` matches.
pub(crate) fn covers_request(wide: &HttpMatchRequest, narrow: &HttpMatchRequest) -> bool {
    fn same<T: PartialEq>(wide: Option<&T>, narrow: Option<&T>) -> bool {
        wide.is_none() || wide == narrow
    }
    path_covers(wide, narrow)
        && same(wide.scheme.as_ref(), narrow.scheme.as_ref())
        && same(wide.method.as_ref(), narrow.method.as_ref())
        && same(wide.authority.as_ref(), narrow.authority.as_ref())
        && same(wide.port.as_ref(), narrow.port.as_ref())
        && same(wide.source_namespace.as_ref(), narrow.source_namespace.as_ref())
        && wide.headers.iter().all(|(name, value)| narrow.headers.get(name) == Some(value))
        && wide.query_params.iter().all(|(name, value)| narrow.query_params.get(name) == Some(value))
        && wide.source_labels.iter().all(|(name, value)| narrow.source_labels.get(name) == Some(value))
        && wide.without_headers.iter().all(|(name, value)| narrow.without_headers.get(name) == Some(value))
        && (wide.gateways.is_empty() || wide.gateways == narrow.gateways)
}

fn path_covers(wide: &HttpMatchRequest, narrow: &HttpMatchRequest) -> bool {
    let Some(path) = &wide.uri else { return true };
    match (path, &narrow.uri) {
        (StringMatch::Prefix(prefix), _) if prefix == "/" => true,
        (_, None) => false,
        (wide_path, Some(narrow_path)) if wide_path == narrow_path => {
            wide.ignore_uri_case || !narrow.ignore_uri_case
        }
        (StringMatch::Prefix(prefix), Some(StringMatch::Prefix(path) | StringMatch::Exact(path))) => {
            !wide.ignore_uri_case && !narrow.ignore_uri_case && path.starts_with(prefix.as_str())
        }
        _ => false,
    }
}
