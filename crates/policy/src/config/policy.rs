//! RBAC policies for connections and requests.
//!
//! Source: `envoy.config.rbac.v3`.

mod index;

use std::{ops::Range, sync::Arc};

pub use self::index::{RuleAttributes, RuleIndex};
use super::{
    listener::Cidr,
    text::{HeaderMatch, MetadataMatch, TextMatch},
};

/// An RBAC filter.
#[derive(Debug)]
pub struct Policy {
    /// Enforced rules; `None` admits everything.
    pub rules: Option<Rules>,
    /// Shadow rules: evaluated and counted, never enforced.
    pub shadow: Option<Rules>,
    /// Prefix of the metadata keys that hold the result of the shadow rules.
    pub shadow_prefix: Box<str>,
}

/// Rules with an action. Source: `envoy.config.rbac.v3.RBAC`.
#[derive(Debug)]
pub struct Rules {
    /// Action on a match.
    pub action: RuleAction,
    /// Rules, sorted by name as Envoy evaluates them.
    pub rules: Vec<Rule>,
    /// Finds the rules that a request may match; `None` if there are few.
    pub index: Option<RuleIndex>,
}

impl Rules {
    /// Sorts and indexes rules.
    pub fn new(action: RuleAction, mut rules: Vec<Rule>) -> Self {
        rules.sort_by(|a, b| a.name.cmp(&b.name));
        let index = RuleIndex::new(&rules);
        Self { action, rules, index }
    }
}

/// Action on a match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleAction {
    /// Matching requests are admitted, all others refused.
    Allow,
    /// Matching requests are refused, all others admitted.
    Deny,
    /// All requests are admitted; matching ones are logged.
    Log,
}

/// A rule. Source: `envoy.config.rbac.v3.Policy`.
#[derive(Debug)]
pub struct Rule {
    /// Name, such as `ns[default]-policy[ratings]-rule[0]`. Response code details contain it.
    pub name: Arc<str>,
    /// Permissions, one of which must match.
    pub permissions: Vec<Permission>,
    /// Principals, one of which must match.
    pub principals: Vec<Principal>,
}

/// Match of the operation. Source: `envoy.config.rbac.v3.Permission`.
#[derive(Debug)]
pub enum Permission {
    /// Any operation.
    Any,
    /// All of these.
    All(Vec<Permission>),
    /// One of these.
    OneOf(Vec<Permission>),
    /// Not this.
    Not(Box<Permission>),
    /// A header. Never matches a connection.
    Header(HeaderMatch),
    /// The path without the query. Never matches a connection.
    Path(TextMatch),
    /// A path template, compiled. Never matches a connection.
    Template(regex::bytes::Regex),
    /// Destination port.
    Port(u16),
    /// Range of destination ports.
    PortRange(Range<u32>),
    /// Destination address.
    Ip(Cidr),
    /// SNI of the client.
    ServerName(TextMatch),
    /// Dynamic metadata.
    Metadata(MetadataMatch),
}

/// Match of the client. Source: `envoy.config.rbac.v3.Principal`.
#[derive(Debug)]
pub enum Principal {
    /// Any client.
    Any,
    /// All of these.
    All(Vec<Principal>),
    /// One of these.
    OneOf(Vec<Principal>),
    /// Not this.
    Not(Box<Principal>),
    /// A TLS client. A URI name, a DNS name or the subject of its certificate must match the test, if given.
    Authenticated(Option<TextMatch>),
    /// Address of the peer.
    DirectIp(Cidr),
    /// Address of the client, by `x-forwarded-for` where trusted.
    RemoteIp(Cidr),
    /// A header. Never matches a connection.
    Header(HeaderMatch),
    /// The path without the query. Never matches a connection.
    Path(TextMatch),
    /// Dynamic metadata.
    Metadata(MetadataMatch),
}
