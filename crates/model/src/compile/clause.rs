//! Envoy's form of a clause of an AuthorizationPolicy's rule.

use skysail_xds::envoy::pb::envoy::extensions::path::r#match::uri_template::v3::UriTemplateMatchConfig;

use super::pb::{self, cidr, core, matcher, matching, pack, rbac, route};
use crate::{
    api::MeshConfig,
    clause::{Attribute, Clause},
};

use matcher::string_matcher::MatchPattern;
use rbac::{Permission, Principal, permission, principal};
use route::header_matcher::HeaderMatchSpecifier;

/// Error for an attribute that the filter cannot check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotCheckable;

impl Clause<'_> {
    /// Returns the principals that match a value; any of them suffices.
    pub(super) fn principals(
        &self,
        value: &str,
        mesh: &MeshConfig,
        namespace: &str,
        tcp: bool,
    ) -> Result<Vec<Principal>, NotCheckable> {
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
            Attribute::RemoteIp => principal::Identifier::RemoteIp(cidr(value).ok_or(NotCheckable)?),
            Attribute::SourceIp => principal::Identifier::DirectRemoteIp(cidr(value).ok_or(NotCheckable)?),
            Attribute::Header(name) if !tcp => principal::Identifier::Header(header(name, value, false)),
            _ => return Err(NotCheckable),
        };
        Ok(vec![Principal { identifier: Some(identifier) }])
    }

    /// Returns the permission that matches a value.
    pub(super) fn permission(&self, value: &str, tcp: bool) -> Result<Permission, NotCheckable> {
        let rule = match self.attribute {
            Attribute::DestinationIp => permission::Rule::DestinationIp(cidr(value).ok_or(NotCheckable)?),
            Attribute::DestinationPort => {
                let port: u16 = value.parse().map_err(|_| NotCheckable)?;
                permission::Rule::DestinationPort(port.into())
            }
            Attribute::ServerName => permission::Rule::RequestedServerName(text_after("", value)),
            _ if tcp => return Err(NotCheckable),
            Attribute::Host => permission::Rule::Header(header(":authority", value, true)),
            Attribute::Method => permission::Rule::Header(header(":method", value, false)),
            Attribute::Path => path(value),
            _ => return Err(NotCheckable),
        };
        Ok(Permission { rule: Some(rule) })
    }
}

/// Returns a principal of the mesh's own trust domain under each alias. `cluster.local` always means the mesh's own.
fn with_aliases(value: &str, mesh: &MeshConfig) -> Vec<String> {
    let Some((domain, rest)) = value.split_once('/') else { return vec![value.to_owned()] };
    let own = || std::iter::once(&mesh.trust_domain).chain(&mesh.trust_domain_aliases);
    if domain != "cluster.local" && own().all(|name| name != domain) {
        return vec![value.to_owned()];
    }
    own().map(|name| format!("{name}/{rest}")).collect()
}

/// Returns a matcher for `text`, `text*`, `*text` or `*`, each after a prefix.
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

/// Returns a matcher for a path or a template: `{*}` is one segment, `{**}` any number.
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
