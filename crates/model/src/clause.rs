//! Clauses: single attributes of an AuthorizationPolicy's rule, and whether one rule covers another.

use crate::api::security::{Condition, Operation, Rule, Source};

/// Attribute of a request or a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attribute<'a> {
    Principal,
    /// Principal of a token, `ISSUER/SUBJECT`.
    RequestPrincipal,
    /// Audiences of a token.
    Audiences,
    /// Presenter of a token.
    Presenter,
    /// Claim of a token, as a path in brackets.
    Claim(&'a str),
    ServiceAccount,
    Namespace,
    TrustDomain,
    RemoteIp,
    SourceIp,
    Header(&'a str),
    Host,
    Method,
    Path,
    DestinationPort,
    DestinationIp,
    ServerName,
    /// Value in the dynamic metadata of a filter: filter and key.
    Metadata(&'a str, &'a str),
}

/// An attribute, with values of which one must match and values of which none may match.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clause<'a> {
    pub(crate) attribute: Attribute<'a>,
    pub(crate) values: &'a [String],
    pub(crate) not_values: &'a [String],
}

impl<'a> Clause<'a> {
    /// Returns the clauses of `from[].source`, in Istio's order.
    pub(crate) fn of_source(source: &'a Source) -> Vec<Self> {
        let all = [
            (Attribute::Principal, &source.principals, &source.not_principals),
            (Attribute::RequestPrincipal, &source.request_principals, &source.not_request_principals),
            (Attribute::ServiceAccount, &source.service_accounts, &source.not_service_accounts),
            (Attribute::Namespace, &source.namespaces, &source.not_namespaces),
            (Attribute::TrustDomain, &source.trust_domains, &source.not_trust_domains),
            (Attribute::RemoteIp, &source.remote_ip_blocks, &source.not_remote_ip_blocks),
            (Attribute::SourceIp, &source.ip_blocks, &source.not_ip_blocks),
        ];
        Self::given(&all)
    }

    /// Returns the clauses of `to[].operation`, in Istio's order.
    pub(crate) fn of_operation(operation: &'a Operation) -> Vec<Self> {
        let all = [
            (Attribute::Host, &operation.hosts, &operation.not_hosts),
            (Attribute::Method, &operation.methods, &operation.not_methods),
            (Attribute::Path, &operation.paths, &operation.not_paths),
            (Attribute::DestinationPort, &operation.ports, &operation.not_ports),
        ];
        Self::given(&all)
    }

    fn given(all: &[(Attribute<'static>, &'a Vec<String>, &'a Vec<String>)]) -> Vec<Self> {
        let given = all.iter().filter(|(_, values, not_values)| !values.is_empty() || !not_values.is_empty());
        given
            .map(|(attribute, values, not_values)| Self { attribute: *attribute, values, not_values })
            .collect()
    }

    /// Returns the clause of a condition in `when[]`; `None` for an unknown key.
    pub(crate) fn of_condition(condition: &'a Condition) -> Option<Self> {
        let header = || condition.key.strip_prefix("request.headers[")?.strip_suffix(']');
        let attribute = match condition.key.as_str() {
            "source.ip" => Attribute::SourceIp,
            "remote.ip" => Attribute::RemoteIp,
            "source.namespace" => Attribute::Namespace,
            "source.principal" => Attribute::Principal,
            "source.serviceAccount" => Attribute::ServiceAccount,
            "source.trustDomain" => Attribute::TrustDomain,
            "destination.ip" => Attribute::DestinationIp,
            "destination.port" => Attribute::DestinationPort,
            "connection.sni" => Attribute::ServerName,
            "request.auth.principal" => Attribute::RequestPrincipal,
            "request.auth.audiences" => Attribute::Audiences,
            "request.auth.presenter" => Attribute::Presenter,
            key => match (key.strip_prefix("request.auth.claims"), key.strip_prefix("experimental.")) {
                (Some(path), _) => Attribute::Claim(path),
                (_, Some(path)) => {
                    let (filter, key) = path.strip_suffix(']')?.split_once('[')?;
                    Attribute::Metadata(filter, key)
                }
                _ => Attribute::Header(header()?),
            },
        };
        Some(Self { attribute, values: &condition.values, not_values: &condition.not_values })
    }

    /// Returns whether only HTTP requests have the attribute.
    pub(crate) fn needs_http(&self) -> bool {
        matches!(self.attribute, Attribute::Header(_) | Attribute::Host | Attribute::Method | Attribute::Path)
            || self.is_of_token()
    }

    /// Returns whether the attribute is read from a token.
    pub(crate) fn is_of_token(&self) -> bool {
        matches!(
            self.attribute,
            Attribute::RequestPrincipal | Attribute::Audiences | Attribute::Presenter | Attribute::Claim(_)
        )
    }

    /// Returns whether Envoy's RBAC matches the attribute in a principal rather than in a permission.
    pub(crate) fn is_of_peer(&self) -> bool {
        !matches!(
            self.attribute,
            Attribute::Host
                | Attribute::Method
                | Attribute::Path
                | Attribute::DestinationPort
                | Attribute::DestinationIp
                | Attribute::ServerName
                | Attribute::Metadata(..)
        )
    }
}

/// Parses the path of a claim, `[a][b]`; `None` if it has another form.
pub(crate) fn claim_path(path: &str) -> Option<Vec<&str>> {
    let parts: Vec<&str> = path.strip_prefix('[')?.strip_suffix(']')?.split("][").collect();
    let valid = |part: &&str| !part.is_empty() && !part.contains(['[', ']']);
    parts.iter().all(valid).then_some(parts)
}

/// Returns whether the texts of two rules show that the first matches every request that the other matches.
pub(crate) fn covers(rule: &Rule, other: &Rule) -> bool {
    let of_sources = |a: &Source, b: &Source| all_cover(&Clause::of_source(a), &Clause::of_source(b));
    let of_operations =
        |a: &Operation, b: &Operation| all_cover(&Clause::of_operation(a), &Clause::of_operation(b));
    let from = rule.from.is_empty()
        || !other.from.is_empty()
            && other.from.iter().all(|b| rule.from.iter().any(|a| of_sources(&a.source, &b.source)));
    let to = rule.to.is_empty()
        || !other.to.is_empty()
            && other.to.iter().all(|b| rule.to.iter().any(|a| of_operations(&a.operation, &b.operation)));
    let when = rule.when.iter().all(|a| {
        other.when.iter().any(|b| {
            a == b || {
                let (a, b) = (Clause::of_condition(a), Clause::of_condition(b));
                a.zip(b).is_some_and(|(a, b)| a.covers(&b))
            }
        })
    });
    from && to && when
}

/// Returns whether each clause covers one of the others. All clauses of a source or an operation must hold.
fn all_cover(clauses: &[Clause<'_>], others: &[Clause<'_>]) -> bool {
    clauses.iter().all(|clause| others.iter().any(|other| clause.covers(other)))
}

impl Clause<'_> {
    /// Returns whether the clause holds wherever the other one holds.
    fn covers(&self, other: &Self) -> bool {
        let among = |value: &String, values: &[String]| values.iter().any(|known| value_covers(known, value));
        let values = self.values.is_empty()
            || !other.values.is_empty() && other.values.iter().all(|value| among(value, self.values));
        let not_values = self.not_values.iter().all(|value| among(value, other.not_values));
        self.attribute == other.attribute && values && not_values
    }
}

/// Returns whether a pattern matches all texts of another one. Forms are `TEXT`, `PREFIX*`, `*SUFFIX` and `*`.
fn value_covers(pattern: &str, value: &str) -> bool {
    let prefix = pattern.strip_suffix('*').filter(|_| !value.starts_with('*'));
    let suffix = pattern.strip_prefix('*').filter(|_| !value.ends_with('*'));
    pattern == value
        || pattern == "*"
        || prefix.is_some_and(|prefix| value.starts_with(prefix))
        || suffix.is_some_and(|suffix| value.ends_with(suffix))
}
