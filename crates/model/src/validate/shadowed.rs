//! Rules of a VirtualService that no request or connection reaches, because earlier rules match all of them.

use super::{Code, Findings};
use crate::{
    api::{
        VirtualService,
        virtual_service::{HttpMatchRequest, IstioHttpRoute, L4Match},
    },
    coverage::{covers_connection, covers_request},
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
