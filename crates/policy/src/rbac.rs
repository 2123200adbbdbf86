//! May this connection or request go on? Envoy's RBAC, evaluated.
//!
//! Policies are in the order of the filters (DENY before ALLOW); the first that refuses decides. A permission or
//! principal about headers or paths never holds on a connection. Shadow rules are evaluated and reported, never
//! enforced.
//!
//! Of a header with several values, any may be the one that the server uses. A rule that allows therefore needs every value
//! to match, and one that denies needs one (`not_rule` and `not_id` swap the two); Envoy takes one for both.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use serde_json::{Map, Value};

use crate::{
    config::{
        policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
        text::TextMatch,
    },
    matching::{self, Values},
    peer::Peer,
};
use skysail_http::head::RequestHead;

#[cfg(test)]
mod tests;

/// What a policy looks at.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The request; `None` for a connection.
    pub head: Option<&'a RequestHead>,
    /// The other end of the connection.
    pub peer: &'a Peer,
    /// Its address.
    pub source: SocketAddr,
    /// The client's address, `x-forwarded-for` taken into account.
    pub remote: IpAddr,
    /// The (original) destination.
    pub destination: SocketAddr,
    /// The server name the TLS client asked for.
    pub server_name: Option<&'a str>,
    /// What filters before found out, by their names.
    pub metadata: Option<&'a Map<String, Value>>,
}

/// What policies say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Allow,
    /// Refuse.
    Deny {
        /// The rule that refuses; `None` when no rule allows.
        rule: Option<Arc<str>>,
        /// `rbac_access_denied_matched_policy[…]`.
        details: Box<str>,
    },
}

/// What single policies said, for counting. Bits of one policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Policies whose rules let it pass.
    pub allowed: u32,
    /// Policies whose rules refused it.
    pub denied: u32,
    /// Policies whose shadow rules would let it pass.
    pub shadow_allowed: u32,
    /// Policies whose shadow rules would refuse it.
    pub shadow_denied: u32,
    /// What other filters may know of the shadow rules.
    pub found: Vec<(String, Value)>,
}

/// Checks policies in order; the first refusal counts. What shadow rules say goes into the metadata of whoever asks.
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
            if !allowed {
                tally.denied += 1;
                return deny(matched);
            }
            tally.allowed += 1;
        }
    }
    Verdict::Allow
}

/// Whether it may go on, and the rule that matched.
fn evaluate<'a>(rules: &'a Rules, subject: &Subject<'_>) -> (bool, Option<&'a Arc<str>>) {
    let values = match rules.action {
        RuleAction::Allow => Values::Every,
        RuleAction::Deny => Values::Any,
        RuleAction::Log => Values::One,
    };
    let matched = rules.rules.iter().find(|rule| matches(rule, subject, values));
    let allowed = match rules.action {
        RuleAction::Log => true,
        RuleAction::Allow => matched.is_some(),
        RuleAction::Deny => matched.is_none(),
    };
    (allowed, matched.map(|rule| &rule.name))
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

/// What `values` becomes inside of a negation.
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

/// Without a name to match, a TLS connection is enough. Else one of the certificate's URI names, DNS names or its
/// subject must match.
fn authenticated(name: Option<&TextMatch>, peer: &Peer) -> bool {
    let Some(test) = name else { return peer.tls };
    let Some(names) = peer.names() else { return false };
    let any = |names: &[String]| names.iter().any(|name| matching::text(test, name.as_bytes()));
    any(&names.uris) || any(&names.dns) || matching::text(test, names.subject.as_bytes())
}

fn path_is(test: &TextMatch, subject: &Subject<'_>) -> bool {
    subject.head.is_some_and(|head| matching::text(test, head.path_without_query().as_bytes()))
}
