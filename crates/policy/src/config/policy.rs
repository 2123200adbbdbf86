//! Authorization: Envoy's RBAC, on connections and on requests.
//!
//! Source: `envoy.config.rbac.v3`.

use std::{ops::Range, sync::Arc};

use super::{
    listener::Cidr,
    text::{HeaderMatch, MetadataMatch, TextMatch},
};

/// One RBAC filter.
#[derive(Debug)]
pub struct Policy {
    /// What happens to what a rule matches (and, for `Allow`, to what none does).
    pub rules: Option<Rules>,
    /// Evaluated and counted, never enforced.
    pub shadow: Option<Rules>,
    /// Before the names under which other filters find what the shadow rules said.
    pub shadow_prefix: Box<str>,
}

/// Source: `envoy.config.rbac.v3.RBAC`.
#[derive(Debug)]
pub struct Rules {
    /// What a match means.
    pub action: RuleAction,
    /// Sorted by name, as Envoy evaluates them.
    pub rules: Vec<Rule>,
}

/// What a match means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleAction {
    /// Only what matches goes on.
    Allow,
    /// What matches is refused.
    Deny,
    /// All goes on; matches are logged.
    Log,
}

/// Source: `envoy.config.rbac.v3.Policy`.
#[derive(Debug)]
pub struct Rule {
    /// `ns[default]-policy[ratings]-rule[0]`, named in the answer's details.
    pub name: Arc<str>,
    /// What is done: one must hold.
    pub permissions: Vec<Permission>,
    /// Who does it: one must hold.
    pub principals: Vec<Principal>,
}

/// What is done. Source: `envoy.config.rbac.v3.Permission`.
#[derive(Debug)]
pub enum Permission {
    /// Anything.
    Any,
    /// All of these.
    All(Vec<Permission>),
    /// One of these.
    OneOf(Vec<Permission>),
    /// Not this.
    Not(Box<Permission>),
    /// A header (never holds on a connection).
    Header(HeaderMatch),
    /// The path without the query (never holds on a connection).
    Path(TextMatch),
    /// A path template, compiled (never holds on a connection).
    Template(regex::bytes::Regex),
    /// The destination's port.
    Port(u16),
    /// The destination's port in a range.
    PortRange(Range<u32>),
    /// The destination's address.
    Ip(Cidr),
    /// The server name the TLS client asked for.
    ServerName(TextMatch),
    /// What a filter before found out.
    Metadata(MetadataMatch),
}

/// Who does it. Source: `envoy.config.rbac.v3.Principal`.
#[derive(Debug)]
pub enum Principal {
    /// Anybody.
    Any,
    /// All of these.
    All(Vec<Principal>),
    /// One of these.
    OneOf(Vec<Principal>),
    /// Not this.
    Not(Box<Principal>),
    /// Known by a certificate, whose URI name (else DNS name, else subject) matches, if given.
    Authenticated(Option<TextMatch>),
    /// The address of the connection's other end.
    DirectIp(Cidr),
    /// The client's address, `x-forwarded-for` taken into account.
    RemoteIp(Cidr),
    /// A header (never holds on a connection).
    Header(HeaderMatch),
    /// The path without the query (never holds on a connection).
    Path(TextMatch),
    /// What a filter before found out.
    Metadata(MetadataMatch),
}
