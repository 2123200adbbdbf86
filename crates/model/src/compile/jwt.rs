//! The filter that verifies tokens, from RequestAuthentications.
//!
//! Rules of all policies are sorted by issuer. A request with tokens must have a valid one of any rule; a request
//! without any passes. AuthorizationPolicies decide whether a token is required.

use std::sync::Arc;

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::envoy::extensions::filters::{
    http::jwt_authn::v3::{
        JwtAuthentication, JwtClaimToHeader, JwtHeader, JwtProvider, JwtRequirement, JwtRequirementAndList,
        JwtRequirementOrList, RequirementRule, jwt_provider, jwt_requirement::RequiresType,
        requirement_rule::RequirementType,
    },
    network::http_connection_manager::v3::HttpFilter,
};

use super::{
    clause::PAYLOAD,
    filters, packed,
    pb::{core, route},
};
use crate::{
    KeySource, Kind, ObjectKey, ProxyView, Role, World,
    api::{RequestAuthentication, Typed, security::JwtRule},
};

/// Key set that verifies no token, for rules whose key set could not be fetched yet. The key is a point of the curve
/// P-256. Its x coordinate is the SHA-256 digest of a fixed text (`skysail: no key` and the byte 1), so its private key
/// is unknown.
pub(super) const NO_KEY: &str = concat!(
    r#"{"keys":[{"kty":"EC","crv":"P-256","alg":"ES256","use":"sig","kid":"none","#,
    r#""x":"sf1E26CLz9VF65E2ya0rvdyoqj0ynhs-WR-a-96fz2g","#,
    r#""y":"M4FrCs7WEO7G5rVxw8aefQFqRLj1yaIpbzNRoAU1Ckw"}]}"#,
);

/// Claims that are lists in all tokens.
const LISTS: [&str; 2] = ["permission", "scope"];

/// Returns the filter of a workload; `None` if no policy applies to it.
pub(super) fn filter(world: &World, view: &ProxyView) -> Option<HttpFilter> {
    let rules = rules(world, view);
    if rules.is_empty() {
        return None;
    }
    let mut body = Vec::new();
    for (index, (.., rule)) in rules.iter().enumerate() {
        let provider = (name(index), provider(world, view, rule));
        let part = JwtAuthentication { providers: [provider].into(), ..Default::default() };
        body.extend(part.to_vec());
    }
    let everything = route::RouteMatch {
        path_specifier: Some(route::route_match::PathSpecifier::Prefix("/".into())),
        ..Default::default()
    };
    let rest = JwtAuthentication {
        rules: vec![RequirementRule {
            r#match: Some(everything),
            requirement_type: Some(RequirementType::Requires(requirement(rules.len()))),
        }],
        bypass_cors_preflight: true,
        ..Default::default()
    };
    body.extend(rest.to_vec());
    Some(filters::http("envoy.filters.http.jwt_authn", packed::of_type::<JwtAuthentication>(body)))
}

/// Returns the rules that apply to a workload, with their policies and positions, in the order of the providers.
fn rules<'a>(
    world: &'a World,
    view: &ProxyView,
) -> Vec<(&'a Typed<RequestAuthentication>, usize, &'a JwtRule)> {
    let policies = world.request_authentications(&view.namespace, &view.labels);
    let of = |policy: &'a Arc<Typed<RequestAuthentication>>| {
        policy.spec.jwt_rules.iter().enumerate().map(move |(index, rule)| (&**policy, index, rule))
    };
    let mut rules: Vec<_> = policies.into_iter().flat_map(of).collect();
    rules.sort_by(|(.., a), (.., b)| a.issuer.cmp(&b.issuer));
    rules
}

/// A rule of a RequestAuthentication that applies to a workload. For explanations.
#[derive(Clone, Debug)]
pub struct TokenRule {
    /// RequestAuthentication.
    pub policy: ObjectKey,
    /// Field of the rule.
    pub field: String,
    /// URL or issuer from which the control plane fetches the keys; empty for keys in the rule.
    pub keys_from: String,
    /// The keys are known. Otherwise the proxy refuses every token of the issuer.
    pub has_keys: bool,
}

/// Returns the rules for the tokens of requests to a workload, in the order of the filter's providers.
pub fn token_rules(world: &World, view: &ProxyView) -> Vec<TokenRule> {
    let rule = |(policy, index, rule): (&Typed<RequestAuthentication>, usize, &JwtRule)| TokenRule {
        policy: ObjectKey {
            kind: Kind::RequestAuthentication,
            namespace: policy.meta.namespace.clone(),
            name: policy.meta.name.clone(),
        },
        field: format!("spec.jwtRules[{index}]"),
        keys_from: KeySource::of(rule).map(|source| source.to_string()).unwrap_or_default(),
        has_keys: key_set(world, rule) != NO_KEY,
    };
    rules(world, view).into_iter().map(rule).collect()
}

fn name(index: usize) -> String {
    format!("origins-{index}")
}

fn provider(world: &World, view: &ProxyView, rule: &JwtRule) -> JwtProvider {
    let mut lists: Vec<String> = LISTS.map(str::to_owned).into();
    lists.extend(rule.space_delimited_claims.iter().cloned());
    lists.sort_unstable();
    lists.dedup();
    JwtProvider {
        issuer: rule.issuer.clone(),
        audiences: rule.audiences.clone(),
        forward: rule.forward_original_token,
        from_headers: rule
            .from_headers
            .iter()
            .map(|from| JwtHeader { name: from.name.clone(), value_prefix: from.prefix.clone() })
            .collect(),
        from_params: rule.from_params.clone(),
        from_cookies: rule.from_cookies.clone(),
        forward_payload_header: rule.output_payload_to_header.clone(),
        payload_in_metadata: PAYLOAD.into(),
        normalize_payload_in_metadata: Some(jwt_provider::NormalizePayload { space_delimited_claims: lists }),
        claim_to_headers: rule
            .output_claim_to_headers
            .iter()
            .map(|to| JwtClaimToHeader {
                header_name: to.header.clone(),
                claim_name: to.claim.clone(),
                ..Default::default()
            })
            .collect(),
        // Routes of gateways may match claims.
        clear_route_cache: view.role == Role::Router,
        jwks_source_specifier: Some(jwt_provider::JwksSourceSpecifier::LocalJwks(core::DataSource {
            specifier: Some(core::data_source::Specifier::InlineString(key_set(world, rule).to_owned())),
            ..Default::default()
        })),
        ..Default::default()
    }
}

/// Returns the key set of a rule; one that verifies nothing while it is unknown.
fn key_set<'a>(world: &'a World, rule: &'a JwtRule) -> &'a str {
    if !rule.jwks.is_empty() {
        return &rule.jwks;
    }
    let fetched = KeySource::of(rule).and_then(|source| world.key_set(&source));
    fetched.map_or(NO_KEY, |keys| keys)
}

/// Returns the requirement for requests: a valid token of one provider, or no token at all of any.
fn requirement(providers: usize) -> JwtRequirement {
    let of = |index: usize| requires(RequiresType::ProviderName(name(index)));
    let or_missing =
        |index: usize| any(vec![of(index), requires(RequiresType::AllowMissing(Default::default()))]);
    if providers == 1 {
        return or_missing(0);
    }
    let all = JwtRequirementAndList { requirements: (0..providers).map(or_missing).collect() };
    let mut requirements: Vec<JwtRequirement> = (0..providers).map(of).collect();
    requirements.push(requires(RequiresType::RequiresAll(all)));
    any(requirements)
}

fn any(requirements: Vec<JwtRequirement>) -> JwtRequirement {
    requires(RequiresType::RequiresAny(JwtRequirementOrList { requirements }))
}

fn requires(requires_type: RequiresType) -> JwtRequirement {
    JwtRequirement { requires_type: Some(requires_type) }
}
