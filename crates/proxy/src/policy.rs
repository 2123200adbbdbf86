//! May this connection or request go on? Envoy's RBAC, evaluated.
//!
//! Policies are in the order of the filters (DENY before ALLOW); the first that refuses decides. A permission or
//! principal about headers or paths never holds on a connection. Shadow rules are evaluated and reported, never
//! enforced.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use crate::{
    config::{
        policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
        text::TextMatch,
    },
    head::RequestHead,
    matching,
    peer::Peer,
};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Policies whose rules let it pass.
    pub allowed: u32,
    /// Policies whose rules refused it.
    pub denied: u32,
    /// Policies whose shadow rules would let it pass.
    pub shadow_allowed: u32,
    /// Policies whose shadow rules would refuse it.
    pub shadow_denied: u32,
}

/// Asks the policies in order, up to the first that refuses.
pub fn check(policies: &[Arc<Policy>], subject: &Subject<'_>, tally: &mut Tally) -> Verdict {
    for policy in policies {
        if let Some(shadow) = &policy.shadow {
            match enforce(shadow, subject) {
                Verdict::Allow => tally.shadow_allowed += 1,
                Verdict::Deny { .. } => tally.shadow_denied += 1,
            }
        }
        if let Some(rules) = &policy.rules {
            match enforce(rules, subject) {
                Verdict::Allow => tally.allowed += 1,
                deny @ Verdict::Deny { .. } => {
                    tally.denied += 1;
                    return deny;
                }
            }
        }
    }
    Verdict::Allow
}

fn enforce(rules: &Rules, subject: &Subject<'_>) -> Verdict {
    let matched = rules.rules.iter().find(|rule| matches(rule, subject));
    match (rules.action, matched) {
        (RuleAction::Log, _) | (RuleAction::Allow, Some(_)) | (RuleAction::Deny, None) => Verdict::Allow,
        (RuleAction::Allow, None) => deny(None),
        (RuleAction::Deny, Some(rule)) => deny(Some(&rule.name)),
    }
}

fn deny(rule: Option<&Arc<str>>) -> Verdict {
    let name = rule.map_or("none", |name| &**name);
    // One word in a log line: Envoy replaces white space.
    let name: String = name.chars().map(|c| if c.is_ascii_whitespace() { '_' } else { c }).collect();
    let details = format!("rbac_access_denied_matched_policy[{name}]").into();
    Verdict::Deny { rule: rule.cloned(), details }
}

fn matches(rule: &Rule, subject: &Subject<'_>) -> bool {
    rule.permissions.iter().any(|permission| permitted(permission, subject))
        && rule.principals.iter().any(|principal| identified(principal, subject))
}

fn permitted(permission: &Permission, subject: &Subject<'_>) -> bool {
    match permission {
        Permission::Any => true,
        Permission::All(all) => all.iter().all(|one| permitted(one, subject)),
        Permission::OneOf(some) => some.iter().any(|one| permitted(one, subject)),
        Permission::Not(one) => !permitted(one, subject),
        Permission::Header(test) => subject.head.is_some_and(|head| matching::header(test, head)),
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

fn identified(principal: &Principal, subject: &Subject<'_>) -> bool {
    match principal {
        Principal::Any => true,
        Principal::All(all) => all.iter().all(|one| identified(one, subject)),
        Principal::OneOf(some) => some.iter().any(|one| identified(one, subject)),
        Principal::Not(one) => !identified(one, subject),
        Principal::Authenticated(name) => authenticated(name.as_ref(), subject.peer),
        Principal::DirectIp(range) => range.contains(subject.source.ip()),
        Principal::RemoteIp(range) => range.contains(subject.remote),
        Principal::Header(test) => subject.head.is_some_and(|head| matching::header(test, head)),
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
