//! Envoy's form of a clause of an AuthorizationPolicy's rule.

use skysail_xds::envoy::pb::envoy::extensions::path::r#match::uri_template::v3::UriTemplateMatchConfig;

use super::pb::{self, cidr, core, matcher, matching, pack, rbac, route};
use crate::{
    api::MeshConfig,
    clause::{Attribute, Clause, claim_path},
};

use matcher::{string_matcher::MatchPattern, value_matcher::MatchPattern as ValuePattern};
use rbac::{Permission, Principal, permission, principal};
use route::header_matcher::HeaderMatchSpecifier;

/// Error for an attribute or a value that the filter cannot check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotCheckable;

/// Filter that puts the claims of tokens into dynamic metadata.
const TOKENS: &str = "envoy.filters.http.jwt_authn";
/// Key of the claims.
pub(super) const PAYLOAD: &str = "payload";

impl Clause<'_> {
    /// Returns the principal that matches one of these values. `None` for an attribute whose values are compiled one by
    /// one.
    pub(super) fn principal_of_all(
        &self,
        values: &[String],
        tcp: bool,
    ) -> Option<Result<Principal, NotCheckable>> {
        let claims = match self.attribute {
            Attribute::RequestPrincipal if tcp => return Some(Err(NotCheckable)),
            Attribute::RequestPrincipal => {
                let mut ids: Vec<Principal> = values.iter().map(|value| request_principal(value)).collect();
                return Some(Ok(match ids.len() {
                    1 => ids.remove(0),
                    _ => Principal { identifier: Some(principal::Identifier::OrIds(principal::Set { ids })) },
                }));
            }
            Attribute::Audiences => Some(vec!["aud"]),
            Attribute::Presenter => Some(vec!["azp"]),
            Attribute::Claim(path) => claim_path(path),
            _ => return None,
        };
        Some(match claims {
            Some(claims) if !tcp => Ok(in_metadata(&claims, one_or_list(values))),
            _ => Err(NotCheckable),
        })
    }

    /// Returns the permission that matches one of these values. `None` for an attribute whose values are compiled one
    /// by one.
    pub(super) fn permission_of_all(&self, values: &[String]) -> Option<Permission> {
        let Attribute::Metadata(filter, key) = self.attribute else { return None };
        let matchers = values.iter().map(|value| {
            let in_list = value.strip_prefix('[').and_then(|value| value.strip_suffix(']'));
            in_list.map_or_else(|| by_text(value), |value| in_list_of(by_text(value)))
        });
        let value = any_of(matchers.collect());
        let matcher = metadata_matcher(filter, &[key], value);
        #[expect(deprecated, reason = "what istiod sends; the successor is newer than the proxies of Istio")]
        let rule = permission::Rule::Metadata(matcher);
        Some(Permission { rule: Some(rule) })
    }

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
                if !value.contains('*') {
                    let start = MatchPattern::Prefix(format!("spiffe://{value}/"));
                    return Ok(vec![authenticated(matching(start))]);
                }
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

/// Returns a principal of the mesh's own trust domain under each of its names, and any other principal unchanged.
/// `cluster.local` always means the mesh's own trust domain.
pub(super) fn with_aliases(value: &str, mesh: &MeshConfig) -> Vec<String> {
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

/// Returns the principal of a token, `ISSUER/SUBJECT`. The last slash separates them, as issuers are often URLs.
fn request_principal(value: &str) -> Principal {
    let any = || by_regex(".+".into());
    let exact = |text: &str| matching(MatchPattern::Exact(text.to_owned()));
    let parts = value.rsplit_once('/');
    let (issuer, subject) = match (value, parts) {
        ("*", _) => (any(), any()),
        (_, Some((issuer, subject))) if value.starts_with('*') => {
            let end = issuer.trim_start_matches('*');
            let issuer = if issuer == "*" { any() } else { matching(MatchPattern::Suffix(end.to_owned())) };
            (issuer, exact(subject))
        }
        (_, None) if value.starts_with('*') => {
            (any(), matching(MatchPattern::Suffix(value.trim_start_matches('*').to_owned())))
        }
        (_, Some((issuer, "*"))) => (exact(issuer), any()),
        (_, Some((issuer, subject))) => match subject.strip_suffix('*') {
            Some(start) => (exact(issuer), matching(MatchPattern::Prefix(start.to_owned()))),
            None => (exact(issuer), exact(subject)),
        },
        (_, None) => match value.strip_suffix('*') {
            Some(start) => (matching(MatchPattern::Prefix(start.to_owned())), any()),
            None => (exact(value), exact("")),
        },
    };
    let claim = |name: &str, text| in_metadata(&[name], matching_value(ValuePattern::StringMatch(text)));
    let ids = vec![claim("iss", issuer), claim("sub", subject)];
    Principal { identifier: Some(principal::Identifier::AndIds(principal::Set { ids })) }
}

/// Returns a matcher for a claim that is one of these texts, or a list with one of them.
fn one_or_list(values: &[String]) -> matcher::ValueMatcher {
    let value = any_of(values.iter().map(|value| by_text(value)).collect());
    matching_value(ValuePattern::OrMatch(matcher::OrMatcher {
        value_matchers: vec![in_list_of(value.clone()), value],
    }))
}

/// Returns a matcher for a value that one of these matches.
fn any_of(mut value_matchers: Vec<matcher::ValueMatcher>) -> matcher::ValueMatcher {
    match value_matchers.len() {
        1 => value_matchers.remove(0),
        _ => matching_value(ValuePattern::OrMatch(matcher::OrMatcher { value_matchers })),
    }
}

fn in_list_of(value: matcher::ValueMatcher) -> matcher::ValueMatcher {
    let one = matcher::list_matcher::MatchPattern::OneOf(Box::new(value));
    matching_value(ValuePattern::ListMatch(Box::new(matcher::ListMatcher { match_pattern: Some(one) })))
}

fn by_text(value: &str) -> matcher::ValueMatcher {
    matching_value(ValuePattern::StringMatch(text_after("", value)))
}

fn matching_value(pattern: ValuePattern) -> matcher::ValueMatcher {
    matcher::ValueMatcher { match_pattern: Some(pattern) }
}

/// Returns a principal whose token has a claim at this path.
fn in_metadata(claims: &[&str], value: matcher::ValueMatcher) -> Principal {
    let path: Vec<&str> = std::iter::once(PAYLOAD).chain(claims.iter().copied()).collect();
    let matcher = metadata_matcher(TOKENS, &path, value);
    #[expect(deprecated, reason = "what istiod sends; the successor is newer than the proxies of Istio")]
    let identifier = principal::Identifier::Metadata(matcher);
    Principal { identifier: Some(identifier) }
}

/// Returns a matcher for a value in the dynamic metadata of a filter.
pub(super) fn metadata_matcher(
    filter: &str,
    path: &[&str],
    value: matcher::ValueMatcher,
) -> matcher::MetadataMatcher {
    let segment = |key: &&str| matcher::metadata_matcher::PathSegment {
        segment: Some(matcher::metadata_matcher::path_segment::Segment::Key((*key).to_owned())),
    };
    matcher::MetadataMatcher {
        filter: filter.to_owned(),
        path: path.iter().map(segment).collect(),
        value: Some(value),
        ..Default::default()
    }
}
