//! Translates the JWT filter.

use std::{collections::HashMap, hash::Hash, sync::Arc, time::Duration};

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::envoy::{
    config::{
        core::v3::{DataSource, HttpUri, data_source::Specifier, http_uri},
        route::v3::RouteMatch,
    },
    extensions::filters::http::jwt_authn::v3::{
        JwtAuthentication, JwtProvider as ProviderProto, JwtRequirement, PerRouteConfig, RemoteJwks,
        jwt_provider::JwksSourceSpecifier, jwt_requirement::RequiresType, per_route_config, requirement_rule,
    },
};

use super::{At as _, Reject, Result, duration, fingerprint, route};
use skysail_policy::config::{
    jwt::{Jwt, JwtProvider, KeySet, Keys, RemoteKeys, Requirement, Source},
    route::Setting,
};

/// Envoy's defaults.
const CLOCK_SKEW: Duration = Duration::from_secs(60);
const KEYS_LIFETIME: Duration = Duration::from_secs(600);

/// Translates the filter.
pub(super) fn translate(proto: &JwtAuthentication) -> Result<Jwt> {
    // Sorted, because a map has no order.
    let mut protos: Vec<_> = proto.providers.iter().collect();
    protos.sort_by_key(|(name, _)| *name);
    let mut providers = Vec::with_capacity(protos.len());
    let mut places = HashMap::new();
    for (name, proto) in protos {
        places.insert(name.as_str(), providers.len());
        providers.push(provider(name, proto).at(format_args!("providers[{name:?}]"))?);
    }
    let mut named = Vec::new();
    for (name, proto) in &proto.requirement_map {
        let requirement = requirement(proto, &places).at(format_args!("requirement_map[{name:?}]"))?;
        named.push((name.as_str().into(), requirement));
    }
    let mut rules = Vec::with_capacity(proto.rules.len());
    for (index, rule) in proto.rules.iter().enumerate() {
        let path = format!("rules[{index}]");
        let matches = rule.r#match.as_ref().ok_or_else(|| Reject::new("must be given").at_field("match"));
        let matches = matches.and_then(|matches| route::route_match(matches).at("match")).at(&path)?;
        let is_ignored = |test: &RouteMatch| {
            test.grpc.is_some() || test.runtime_fraction.is_some() || !test.dynamic_metadata.is_empty()
        };
        if rule.r#match.as_ref().is_some_and(is_ignored) {
            let what = "Envoy does not look at grpc, runtime_fraction and dynamic_metadata here: remove them";
            return Err(Reject::new(what).at_field("match").at_field(path));
        }
        let requires = match &rule.requirement_type {
            None => Requirement::Nothing,
            Some(requirement_rule::RequirementType::Requires(proto)) => {
                requirement(proto, &places).at("requires").at(&path)?
            }
            Some(requirement_rule::RequirementType::RequirementName(name)) => {
                by_name(&named, name).at("requirement_name").at(&path)?.clone()
            }
        };
        rules.push((matches, requires));
    }
    let fingerprint = fingerprint(decision_inputs(proto));
    Ok(Jwt { fingerprint, providers, rules, named, bypass_preflight: proto.bypass_cors_preflight })
}

/// Returns the part of the configuration that affects which requests are admitted. Equal configurations have
/// equal hashes.
fn decision_inputs(proto: &JwtAuthentication) -> impl Hash + use<> {
    let mut rest = proto.clone();
    rest.stat_prefix = String::new();
    // Sorted, because maps are encoded in random order.
    let mut providers: Vec<_> = rest.providers.drain().collect();
    let mut requirements: Vec<_> = rest.requirement_map.drain().collect();
    providers.sort_by(|a, b| a.0.cmp(&b.0));
    requirements.sort_by(|a, b| a.0.cmp(&b.0));
    for (_, provider) in &mut providers {
        if let Some(JwksSourceSpecifier::RemoteJwks(remote)) = &mut provider.jwks_source_specifier {
            // Only the server of the keys matters, not how they are fetched.
            let uri = remote.http_uri.take().map(|uri| HttpUri { timeout: None, ..uri });
            *remote = RemoteJwks { http_uri: uri, ..RemoteJwks::default() };
        }
    }
    let providers: Vec<_> = providers.into_iter().map(|(name, provider)| (name, provider.to_vec())).collect();
    let requirements: Vec<_> =
        requirements.into_iter().map(|(name, requirement)| (name, requirement.to_vec())).collect();
    (rest.to_vec(), providers, requirements)
}

/// Translates a route's override of the filter.
pub(super) fn setting(proto: &PerRouteConfig) -> Result<Setting> {
    match &proto.requirement_specifier {
        Some(per_route_config::RequirementSpecifier::Disabled(true)) => Ok(Setting::Off),
        Some(per_route_config::RequirementSpecifier::RequirementName(name)) => {
            Ok(Setting::Jwt(name.as_str().into()))
        }
        _ => Err(Reject::new("must be `disabled: true` or a requirement_name")),
    }
}

fn by_name<'a>(named: &'a [(Box<str>, Requirement)], name: &str) -> Result<&'a Requirement> {
    let found = named.iter().find(|(other, _)| **other == *name);
    found
        .map(|(_, requirement)| requirement)
        .ok_or_else(|| Reject::new(format!("requirement_map has no {name:?}")))
}

fn provider(name: &str, proto: &ProviderProto) -> Result<JwtProvider> {
    let filled = |text: &str| (!text.is_empty()).then(|| text.into());
    let header = |text: &str| (!text.is_empty()).then(|| text.to_ascii_lowercase().into());
    let texts = |texts: &[String]| texts.iter().map(|text| text.as_str().into()).collect();
    let mut claim_headers = Vec::new();
    for (index, claim) in proto.claim_to_headers.iter().enumerate() {
        let path: Vec<Box<str>> = if claim.claim_path.is_empty() {
            claim.claim_name.split('.').map(Box::from).collect()
        } else {
            claim.claim_path.iter().map(|segment| segment.key.as_str().into()).collect()
        };
        let name = header(&claim.header_name).ok_or_else(|| {
            Reject::new("needs a header_name").at_field(format_args!("claim_to_headers[{index}]"))
        })?;
        claim_headers.push((name, path));
    }
    let spaced = proto.normalize_payload_in_metadata.as_ref();
    Ok(JwtProvider {
        name: name.into(),
        issuer: filled(&proto.issuer),
        audiences: texts(&proto.audiences),
        keys: keys(proto)?,
        forward: proto.forward,
        from: sources(proto),
        payload_in_metadata: filled(&proto.payload_in_metadata),
        header_in_metadata: filled(&proto.header_in_metadata),
        spaced_claims: spaced.map(|spaced| texts(&spaced.space_delimited_claims)).unwrap_or_default(),
        payload_header: header(&proto.forward_payload_header),
        pad_payload_header: proto.pad_forward_payload_header,
        claim_headers,
        clock_skew: match proto.clock_skew_seconds {
            0 => CLOCK_SKEW,
            seconds => Duration::from_secs(seconds.into()),
        },
        clear_route: proto.clear_route_cache,
    })
}

fn sources(proto: &ProviderProto) -> Vec<Source> {
    let headers = proto.from_headers.iter();
    let headers = headers
        .map(|from| Source::Header(from.name.to_ascii_lowercase().into(), from.value_prefix.as_str().into()));
    let params = proto.from_params.iter().map(|name| Source::Param(name.as_str().into()));
    let cookies = proto.from_cookies.iter().map(|name| Source::Cookie(name.as_str().into()));
    let sources: Vec<Source> = headers.chain(params).chain(cookies).collect();
    if sources.is_empty() {
        return vec![
            Source::Header("authorization".into(), "Bearer ".into()),
            Source::Param("access_token".into()),
        ];
    }
    sources
}

fn keys(proto: &ProviderProto) -> Result<Keys> {
    match &proto.jwks_source_specifier {
        Some(JwksSourceSpecifier::LocalJwks(source)) => {
            let text = inline(source).at("local_jwks")?;
            let keys = KeySet::parse(text)
                .map_err(|problem| Reject::new(format!("the key set {problem}")).at_field("local_jwks"))?;
            Ok(Keys::Local(keys.into()))
        }
        Some(JwksSourceSpecifier::RemoteJwks(remote)) => {
            Ok(Keys::Remote(self::remote(remote).at("remote_jwks")?))
        }
        None => Err(Reject::new("needs local_jwks or remote_jwks")),
    }
}

fn inline(source: &DataSource) -> Result<&[u8]> {
    match &source.specifier {
        Some(Specifier::InlineString(text)) => Ok(text.as_bytes()),
        Some(Specifier::InlineBytes(bytes)) => Ok(bytes),
        _ => Err(Reject::new("must be an inline_string or inline_bytes")),
    }
}

fn remote(proto: &RemoteJwks) -> Result<RemoteKeys> {
    let uri = proto.http_uri.as_ref().ok_or_else(|| Reject::new("must be given").at_field("http_uri"))?;
    let HttpTarget { cluster, authority, path, timeout } = http_uri(uri).at("http_uri")?;
    let lifetime = match &proto.cache_duration {
        Some(time) => duration(time).at("cache_duration")?,
        None => KEYS_LIFETIME,
    };
    if lifetime < Duration::from_millis(1) {
        return Err(Reject::new("must be at least 1 ms").at_field("cache_duration"));
    }
    Ok(RemoteKeys { cluster, authority, path, timeout, lifetime, fetched: Arc::default() })
}

/// Target of an HTTP request.
pub(super) struct HttpTarget {
    pub(super) cluster: Box<str>,
    pub(super) authority: Box<str>,
    pub(super) path: Box<str>,
    pub(super) timeout: Duration,
}

/// Splits a URI into authority and path.
pub(super) fn http_uri(proto: &HttpUri) -> Result<HttpTarget> {
    let Some(http_uri::HttpUpstreamType::Cluster(cluster)) = &proto.http_upstream_type else {
        return Err(Reject::new("must be given").at_field("cluster"));
    };
    let bare = proto.uri.split_once("://").map_or(proto.uri.as_str(), |(_, rest)| rest);
    let (authority, path) = bare.split_at(bare.find('/').unwrap_or(bare.len()));
    Ok(HttpTarget {
        cluster: cluster.as_str().into(),
        authority: authority.into(),
        path: if path.is_empty() { "/".into() } else { path.into() },
        timeout: match &proto.timeout {
            Some(time) => timeout_or_day(duration(time).at("timeout")?),
            None => return Err(Reject::new("must be given").at_field("timeout")),
        },
    })
}

/// Returns the timeout of a request of the sidecar itself; for 0, which means no timeout, a day.
pub(super) fn timeout_or_day(time: Duration) -> Duration {
    if time.is_zero() { Duration::from_secs(24 * 3600) } else { time }
}

fn requirement(proto: &JwtRequirement, places: &HashMap<&str, usize>) -> Result<Requirement> {
    requirement_within(proto, places, &[])
}

/// Translates a requirement. `siblings` are the providers that the enclosing `requires_any` list names.
fn requirement_within(
    proto: &JwtRequirement,
    places: &HashMap<&str, usize>,
    siblings: &[usize],
) -> Result<Requirement> {
    let place = |name: &str| {
        places.get(name).copied().ok_or_else(|| Reject::new(format!("there is no provider {name:?}")))
    };
    let all = |protos: &[JwtRequirement], siblings: &[usize]| -> Result<Vec<Requirement>> {
        let indexed = protos.iter().enumerate();
        indexed
            .map(|(index, one)| {
                requirement_within(one, places, siblings).at(format_args!("requirements[{index}]"))
            })
            .collect()
    };
    Ok(match &proto.requires_type {
        None => Requirement::Nothing,
        Some(RequiresType::ProviderName(name)) => {
            Requirement::Provider(place(name).at("provider_name")?, None)
        }
        Some(RequiresType::ProviderAndAudiences(both)) => {
            let audiences = both.audiences.iter().map(|one| one.as_str().into()).collect();
            let index = place(&both.provider_name).at("provider_and_audiences.provider_name")?;
            Requirement::Provider(index, Some(audiences))
        }
        Some(RequiresType::RequiresAll(list)) => {
            Requirement::All(all(&list.requirements, &[]).at("requires_all")?)
        }
        Some(RequiresType::RequiresAny(list)) => {
            let named = list.requirements.iter().filter_map(|one| match &one.requires_type {
                Some(RequiresType::ProviderName(name)) => Some(name.as_str()),
                Some(RequiresType::ProviderAndAudiences(both)) => Some(both.provider_name.as_str()),
                _ => None,
            });
            let named: Vec<usize> = named.filter_map(|name| places.get(name).copied()).collect();
            let mut some = all(&list.requirements, &named).at("requires_any")?;
            // Requirements that accept requests without a token are evaluated last.
            some.sort_by_key(|one| {
                matches!(one, Requirement::AllowMissing(_) | Requirement::AllowMissingOrFailed)
            });
            Requirement::Any(some)
        }
        // Without other providers in the list, `allow_missing` accepts valid tokens of all providers.
        Some(RequiresType::AllowMissing(_)) if siblings.is_empty() => {
            let mut all: Vec<usize> = places.values().copied().collect();
            all.sort_unstable();
            let good = all.iter().map(|index| Requirement::Provider(*index, None));
            Requirement::Any(good.chain([Requirement::AllowMissing(all.clone())]).collect())
        }
        Some(RequiresType::AllowMissing(_)) => Requirement::AllowMissing(siblings.to_vec()),
        Some(RequiresType::AllowMissingOrFailed(_)) => Requirement::AllowMissingOrFailed,
        Some(_) => return Err(Reject::new("this kind of requirement is not supported")),
    })
}
