//! Evaluation of Envoy's RBAC for connections and requests.
//!
//! Policies are in the order of the filters (DENY before ALLOW); the first refusal decides. Permissions and principals
//! for headers or paths never match a connection. Shadow rules are evaluated and reported, never enforced.
//!
//! The server may use any of several values of a header. A rule that allows therefore needs all values to match, and a
//! rule that denies needs one (`not_rule` and `not_id` swap the two). Envoy needs one value in both cases.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use serde_json::{Map, Value};

use crate::{
    config::{
        policy::{Permission, Policy, Principal, Rule, RuleAction, RuleAttributes, RuleIndex, Rules},
        text::TextMatch,
    },
    matching::{self, Values},
    peer::Peer,
};
use skysail_http::head::RequestHead;

mod mismatch;
#[cfg(test)]
mod tests;

pub use mismatch::mismatch;

/// Input of a check.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The request; `None` for a connection.
    pub head: Option<&'a RequestHead>,
    /// Downstream peer.
    pub peer: &'a Peer,
    /// Address of the downstream peer.
    pub source: SocketAddr,
    /// Address of the client, with `x-forwarded-for` taken into account.
    pub remote: IpAddr,
    /// Destination address, by original destination if known.
    pub destination: SocketAddr,
    /// SNI of the client.
    pub server_name: Option<&'a str>,
    /// Dynamic metadata, by filter name.
    pub metadata: Option<&'a Map<String, Value>>,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request is admitted.
    Allow,
    /// The request is refused.
    Deny {
        /// The rule that refuses; `None` if no rule allows the request.
        rule: Option<Arc<str>>,
        /// Response code details, `rbac_access_denied_matched_policy[…]`.
        details: Box<str>,
    },
}

/// Results of single policies, for metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of policies that admitted the request.
    pub allowed: u32,
    /// Number of policies that refused it.
    pub denied: u32,
    /// Number of policies whose shadow rules would admit it.
    pub shadow_allowed: u32,
    /// Number of policies whose shadow rules would refuse it.
    pub shadow_denied: u32,
    /// Dynamic metadata with the results of the shadow rules.
    pub found: Vec<(String, Value)>,
    /// Whether rules with action LOG match; `None` without such rules.
    pub log_hint: Option<bool>,
}

impl Tally {
    /// Returns the dynamic metadata for access logs, in the namespace `envoy.common`.
    pub fn log_metadata(&self) -> Option<(String, Value)> {
        self.log_hint.map(|matched| (LOG_HINT.to_owned(), matched.into()))
    }
}

/// Key of [`Tally::log_metadata`]. Source: Envoy's RBAC filters.
const LOG_HINT: &str = "access_log_hint";

/// Checks policies in order until the first refusal. Counts results in `tally`, which also receives the metadata of
/// shadow rules.
pub fn check(policies: &[Arc<Policy>], subject: &Subject<'_>, tally: &mut Tally) -> Verdict {
    for policy in policies {
        if let Some(rules) = &policy.shadow {
            let (allowed, matched) = evaluate(rules, subject);
            *if allowed { &mut tally.shadow_allowed } else { &mut tally.shadow_denied } += 1;
            let result = if allowed { "allowed" } else { "denied" };
            let named = matched.map(|name| ("shadow_effective_policy_id", name.to_string()));
            for (key, value) in named.into_iter().chain([("shadow_engine_result", result.to_owned())]) {
                tally.found.push((format!("{}{key}", policy.shadow_prefix), value.into()));
            }
        }
        if let Some(rules) = &policy.rules {
            let (allowed, matched) = evaluate(rules, subject);
            if rules.action == RuleAction::Log {
                tally.log_hint = Some(matched.is_some());
            }
            if !allowed {
                tally.denied += 1;
                return deny(matched);
            }
            tally.allowed += 1;
        }
    }
    Verdict::Allow
}

/// Returns the name of the rule that matches a request; for reports.
pub fn matched<'a>(rules: &'a Rules, subject: &Subject<'_>) -> Option<&'a Arc<str>> {
    evaluate(rules, subject).1
}

/// Returns whether rules admit a request, and the rule that matched.
fn evaluate<'a>(rules: &'a Rules, subject: &Subject<'_>) -> (bool, Option<&'a Arc<str>>) {
    let values = values_of(rules.action);
    let matched = match &rules.index {
        None => rules.rules.iter().find(|rule| matches(rule, subject, values)),
        Some(index) => first_match(index, &rules.rules, subject, values),
    };
    let allowed = match rules.action {
        RuleAction::Log => true,
        RuleAction::Allow => matched.is_some(),
        RuleAction::Deny => matched.is_none(),
    };
    (allowed, matched.map(|rule| &rule.name))
}

/// Returns the first rule that matches. Only rules that the index lists for the subject are examined.
fn first_match<'a>(
    index: &RuleIndex,
    rules: &'a [Rule],
    subject: &Subject<'_>,
    values: Values,
) -> Option<&'a Rule> {
    let attributes = RuleAttributes {
        path: subject.head.map(|head| head.path_without_query().as_bytes()),
        names: subject.peer.names(),
        direct: subject.source.ip(),
        remote: subject.remote,
    };
    let claim = |path: &[Box<str>]| matching::metadata_value(path, subject.metadata)?.as_str();
    let mut first = None;
    index.visit(&attributes, claim, |positions| {
        for position in positions.iter().map(|position| *position as usize) {
            if first.is_some_and(|(before, _)| before <= position) {
                return;
            }
            let rule = rules.get(position).filter(|rule| matches(rule, subject, values));
            if let Some(rule) = rule {
                first = Some((position, rule));
                return;
            }
        }
    });
    first.map(|(_, rule)| rule)
}

/// Returns which of several values of a header decide.
fn values_of(action: RuleAction) -> Values {
    match action {
        RuleAction::Allow => Values::Every,
        RuleAction::Deny => Values::Any,
        RuleAction::Log => Values::One,
    }
}

fn deny(rule: Option<&Arc<str>>) -> Verdict {
    let name = rule.map_or("none", |name| &**name);
    let name: String = name.chars().map(|c| if c.is_ascii_whitespace() { '_' } else { c }).collect();
    let details = format!("rbac_access_denied_matched_policy[{name}]").into();
    Verdict::Deny { rule: rule.cloned(), details }
}

fn matches(rule: &Rule, subject: &Subject<'_>, values: Values) -> bool {
    rule.permissions.iter().any(|permission| permitted(permission, subject, values))
        && rule.principals.iter().any(|principal| identified(principal, subject, values))
}

/// Returns the rule for several values inside a negation.
fn negated(values: Values) -> Values {
    match values {
        Values::One => Values::One,
        Values::Any => Values::Every,
        Values::Every => Values::Any,
    }
}

fn permitted(permission: &Permission, subject: &Subject<'_>, values: Values) -> bool {
    match permission {
        Permission::Any => true,
        Permission::Metadata(test) => matching::metadata(test, subject.metadata),
        Permission::All(all) => all.iter().all(|one| permitted(one, subject, values)),
        Permission::OneOf(some) => some.iter().any(|one| permitted(one, subject, values)),
        Permission::Not(one) => !permitted(one, subject, negated(values)),
        Permission::Header(test) => {
            subject.head.is_some_and(|head| matching::header_values(test, head, values))
        }
        Permission::Path(test) => path_is(test, subject),
        Permission::Template(regex) => {
            subject.head.is_some_and(|head| regex.is_match(head.path_without_query().as_bytes()))
        }
        Permission::Port(port) => subject.destination.port() == *port,
        Permission::PortRange(range) => range.contains(&u32::from(subject.destination.port())),
        Permission::Ip(range) => range.contains(subject.destination.ip()),
        Permission::ServerName(test) => {
            matching::text(test, subject.server_name.unwrap_or_default().as_bytes())
        }
    }
}

fn identified(principal: &Principal, subject: &Subject<'_>, values: Values) -> bool {
    match principal {
        Principal::Any => true,
        Principal::Metadata(test) => matching::metadata(test, subject.metadata),
        Principal::All(all) => all.iter().all(|one| identified(one, subject, values)),
        Principal::OneOf(some) => some.iter().any(|one| identified(one, subject, values)),
        Principal::Not(one) => !identified(one, subject, negated(values)),
        Principal::Authenticated(name) => authenticated(name.as_ref(), subject.peer),
        Principal::DirectIp(range) => range.contains(subject.source.ip()),
        Principal::RemoteIp(range) => range.contains(subject.remote),
        Principal::Header(test) => {
            subject.head.is_some_and(|head| matching::header_values(test, head, values))
        }
        Principal::Path(test) => path_is(test, subject),
    }
}

/// Returns whether the peer matches a name. Without a name, TLS is enough. Otherwise a URI name, a DNS name or the
/// subject of the certificate must match.
fn authenticated(name: Option<&TextMatch>, peer: &Peer) -> bool {
    let Some(test) = name else { return peer.tls };
    let Some(names) = peer.names() else { return false };
    let any = |names: &[String]| names.iter().any(|name| matching::text(test, name.as_bytes()));
    any(&names.uris) || any(&names.dns) || matching::text(test, names.subject.as_bytes())
}

fn path_is(test: &TextMatch, subject: &Subject<'_>) -> bool {
    subject.head.is_some_and(|head| matching::text(test, head.path_without_query().as_bytes()))
}
