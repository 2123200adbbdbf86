//! One attribute of an AuthorizationPolicy's rule and how Envoy checks it.

use skysail_xds::envoy::pb::envoy::extensions::path::r#match::uri_template::v3::UriTemplateMatchConfig;

use super::pb::{self, cidr, core, matcher, matching, pack, rbac, route};
use crate::api::{
    MeshConfig,
    security::{Condition, Operation, Rule, Source},
};

use matcher::string_matcher::MatchPattern;
use rbac::{Permission, Principal, permission, principal};
use route::header_matcher::HeaderMatchSpecifier;

/// An attribute that cannot be checked where the rule is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unchecked;

/// Attribute of a request or a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attribute<'a> {
    Principal,
    Token,
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
}

/// An attribute, values one of which it must have, and values none of which it may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clause<'a> {
    attribute: Attribute<'a>,
    pub(super) values: &'a [String],
    pub(super) not_values: &'a [String],
}

impl<'a> Clause<'a> {
    /// `from[].source`, in the order Istio writes.
    pub(super) fn of_source(source: &'a Source) -> Vec<Self> {
        let all = [
            (Attribute::Principal, &source.principals, &source.not_principals),
            (Attribute::Token, &source.request_principals, &source.not_request_principals),
            (Attribute::ServiceAccount, &source.service_accounts, &source.not_service_accounts),
            (Attribute::Namespace, &source.namespaces, &source.not_namespaces),
            (Attribute::TrustDomain, &source.trust_domains, &source.not_trust_domains),
            (Attribute::RemoteIp, &source.remote_ip_blocks, &source.not_remote_ip_blocks),
            (Attribute::SourceIp, &source.ip_blocks, &source.not_ip_blocks),
        ];
        Self::given(&all)
    }

    /// `to[].operation`.
    pub(super) fn of_operation(operation: &'a Operation) -> Vec<Self> {
        let all = [
            (Attribute::Host, &operation.hosts, &operation.not_hosts),
            (Attribute::Method, &operation.methods, &operation.not_methods),
            (Attribute::Path, &operation.paths, &operation.not_paths),
            (Attribute::DestinationPort, &operation.ports, &operation.not_ports),
        ];
        Self::given(&all)
    }

    /// `when[]`; `None` for an unknown key.
    pub(super) fn of_condition(condition: &'a Condition) -> Option<Self> {
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
            key if key.starts_with("request.auth.") => Attribute::Token,
            _ => Attribute::Header(header()?),
        };
        Some(Self { attribute, values: &condition.values, not_values: &condition.not_values })
    }

    /// True for attributes that only HTTP requests have.
    pub(super) fn needs_http(&self) -> bool {
        matches!(
            self.attribute,
            Attribute::Header(_) | Attribute::Host | Attribute::Method | Attribute::Path | Attribute::Token
        )
    }

    /// True for attributes of the peer, false for those of the request.
    pub(super) fn is_of_peer(&self) -> bool {
        !matches!(
            self.attribute,
            Attribute::Host
                | Attribute::Method
                | Attribute::Path
                | Attribute::DestinationPort
                | Attribute::DestinationIp
                | Attribute::ServerName
        )
    }

    /// How the peer is checked for a value: any of these.
    pub(super) fn principals(
        &self,
        value: &str,
        mesh: &MeshConfig,
        namespace: &str,
        tcp: bool,
    ) -> Result<Vec<Principal>, Unchecked> {
        let identifier = match self.attribute {
            Attribute::Principal => {
                let names = with_aliases(value, mesh).into_iter();
                return Ok(names.map(|name| authenticated(text_after("spiffe://", &name))).collect());
            }
            Attribute::Namespace => {
                return Ok(vec![authenticated(by_regex(format!(".*/ns/{}/.*", value.replace('*', ".*"))))]);
            }
            Attribute::ServiceAccount => {
                let (namespace, account) = value.split_once('/').unwrap_or((namespace, value));
                let expression = format!("spiffe://.+/ns/{namespace}/(.+/|)sa/{account}(/.+)?");
                return Ok(vec![authenticated(by_regex(expression))]);
            }
            Attribute::TrustDomain => {
                let domain = value.split('*').map(escape).collect::<Vec<_>>().join("[^/]*");
                return Ok(vec![authenticated(by_regex(format!("spiffe://{domain}/.*")))]);
            }
            Attribute::RemoteIp => principal::Identifier::RemoteIp(cidr(value).ok_or(Unchecked)?),
            Attribute::SourceIp => principal::Identifier::DirectRemoteIp(cidr(value).ok_or(Unchecked)?),
            Attribute::Header(name) if !tcp => principal::Identifier::Header(header(name, value, false)),
            _ => return Err(Unchecked),
        };
        Ok(vec![Principal { identifier: Some(identifier) }])
    }

    /// How the request is checked for a value.
    pub(super) fn permission(&self, value: &str, tcp: bool) -> Result<Permission, Unchecked> {
        let rule = match self.attribute {
            Attribute::DestinationIp => permission::Rule::DestinationIp(cidr(value).ok_or(Unchecked)?),
            Attribute::DestinationPort => {
                let port: u16 = value.parse().map_err(|_| Unchecked)?;
                permission::Rule::DestinationPort(port.into())
            }
            Attribute::ServerName => permission::Rule::RequestedServerName(text_after("", value)),
            _ if tcp => return Err(Unchecked),
            Attribute::Host => permission::Rule::Header(header(":authority", value, true)),
            Attribute::Method => permission::Rule::Header(header(":method", value, false)),
            Attribute::Path => path(value),
            _ => return Err(Unchecked),
        };
        Ok(Permission { rule: Some(rule) })
    }

    fn given(all: &[(Attribute<'static>, &'a Vec<String>, &'a Vec<String>)]) -> Vec<Self> {
        let given = all.iter().filter(|(_, values, not_values)| !values.is_empty() || !not_values.is_empty());
        given
            .map(|(attribute, values, not_values)| Self { attribute: *attribute, values, not_values })
            .collect()
    }
}

/// A principal of our own trust domain under each of its names. `cluster.local` always means our own.
fn with_aliases(value: &str, mesh: &MeshConfig) -> Vec<String> {
    let Some((domain, rest)) = value.split_once('/') else { return vec![value.to_owned()] };
    let own = || std::iter::once(&mesh.trust_domain).chain(&mesh.trust_domain_aliases);
    if domain != "cluster.local" && own().all(|name| name != domain) {
        return vec![value.to_owned()];
    }
    own().map(|name| format!("{name}/{rest}")).collect()
}

/// `text`, `text*`, `*text` or `*`, each after a prefix.
fn text_after(prefix: &str, value: &str) -> matcher::StringMatcher {
    let pattern = match (value.strip_prefix('*'), value.strip_suffix('*')) {
        (Some(""), _) => return by_regex(".+".into()),
        (Some(end), _) if prefix.is_empty() => MatchPattern::Suffix(end.to_owned()),
        (Some(end), _) => return by_regex(format!("{prefix}.*{}", escape(end))),
        (None, Some(start)) => MatchPattern::Prefix(format!("{prefix}{start}")),
        (None, None) => MatchPattern::Exact(format!("{prefix}{value}")),
    };
    matching(pattern)
}

fn by_regex(expression: String) -> matcher::StringMatcher {
    matching(MatchPattern::SafeRegex(pb::regex(expression)))
}

fn escape(text: &str) -> String {
    regex::escape(text)
}

fn authenticated(name: matcher::StringMatcher) -> Principal {
    let authenticated = principal::Authenticated { principal_name: Some(name) };
    Principal { identifier: Some(principal::Identifier::Authenticated(authenticated)) }
}

fn header(name: &str, value: &str, ignore_case: bool) -> route::HeaderMatcher {
    let specifier = if value == "*" {
        HeaderMatchSpecifier::PresentMatch(true)
    } else {
        HeaderMatchSpecifier::StringMatch(matcher::StringMatcher { ignore_case, ..text_after("", value) })
    };
    route::HeaderMatcher {
        name: name.to_owned(),
        header_match_specifier: Some(specifier),
        ..Default::default()
    }
}

/// A path, or a template: `{*}` is one segment, `{**}` any number.
fn path(value: &str) -> permission::Rule {
    if value.contains("{*}") || value.contains("{**}") {
        let template = value.replace("{**}", "**").replace("{*}", "*");
        return permission::Rule::UriTemplate(core::TypedExtensionConfig {
            name: "uri-template".into(),
            typed_config: Some(pack(&UriTemplateMatchConfig { path_template: template })),
        });
    }
    permission::Rule::UrlPath(matcher::PathMatcher {
        rule: Some(matcher::path_matcher::Rule::Path(text_after("", value))),
    })
}

/// True if a rule matches every request that another rule matches, as far as the texts of both tell.
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

/// True if each clause covers one of the others: all clauses of a source or an operation must hold.
fn all_cover(clauses: &[Clause<'_>], others: &[Clause<'_>]) -> bool {
    clauses.iter().all(|clause| others.iter().any(|other| clause.covers(other)))
}

impl Clause<'_> {
    /// True if the clause holds wherever another one holds.
    fn covers(&self, other: &Self) -> bool {
        let among = |value: &String, values: &[String]| values.iter().any(|known| value_covers(known, value));
        let values = self.values.is_empty()
            || !other.values.is_empty() && other.values.iter().all(|value| among(value, self.values));
        let not_values = self.not_values.iter().all(|value| among(value, other.not_values));
        self.attribute == other.attribute && values && not_values
    }
}

/// True if a value is equal to another one, or is its `PREFIX*` or `*SUFFIX`.
fn value_covers(pattern: &str, value: &str) -> bool {
    let prefix = pattern.strip_suffix('*').filter(|_| !value.starts_with('*'));
    let suffix = pattern.strip_prefix('*').filter(|_| !value.ends_with('*'));
    pattern == value
        || pattern == "*"
        || prefix.is_some_and(|prefix| value.starts_with(prefix))
        || suffix.is_some_and(|suffix| value.ends_with(suffix))
}
