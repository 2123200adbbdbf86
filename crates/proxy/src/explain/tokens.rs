//! Tokens of a request: the verdict of each issuer's rule, and their effect on the request.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use skysail_policy::{
    config::{http::metadata, jwt::Jwt, route::Setting},
    cors,
    jwt::{self, JwtOutcome, TokenVerdict},
    matching,
};

use super::{
    filters::{Passage, effect},
    report::{Explanation, FilterReport, Outcome, TokenReport},
};

/// Claims that are not listed: times, an identifier, and the two that the principal consists of.
const COMMON: [&str; 6] = ["iss", "sub", "iat", "exp", "nbf", "jti"];

/// Verifies the tokens of a request and applies their claims. Returns whether the request is admitted.
pub(super) fn verify(
    passage: &mut Passage<'_>,
    name: &str,
    jwt: &Jwt,
    setting: Option<&Setting>,
    explained: &mut Explanation,
) -> bool {
    jwt::sanitize(jwt, &mut passage.head);
    let requirement = jwt::requirement(jwt, setting, &passage.head, &mut fastrand::Rng::with_seed(0));
    let requirement = match requirement {
        Ok(Some(_)) if jwt.bypass_preflight && cors::is_preflight(&passage.head) => {
            explained.filters.push(effect(name, "a CORS preflight needs no token"));
            return true;
        }
        Ok(Some(requirement)) => requirement,
        Ok(None) => {
            explained.filters.push(effect(name, "the request needs no token"));
            return true;
        }
        Err(problem) => {
            explained.filters.push(effect(name, &problem));
            explained.outcome = Outcome::Responded(403, problem);
            return false;
        }
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let assumed = &passage.configuration.assumed;
    let verdicts = jwt::verdicts(jwt, &passage.head, now, assumed);
    let mut step = FilterReport {
        name: name.to_owned(),
        tokens: verdicts.into_iter().map(|verdict| report(jwt, verdict)).collect(),
        ..FilterReport::default()
    };
    let (refused, clear_route) = match jwt::check_assuming(jwt, requirement, &passage.head, now, assumed) {
        JwtOutcome::Pass(verified) => {
            if verified.is_empty() && step.tokens.is_empty() {
                step.effect = "the request has no token, which RequestAuthentications admit".to_owned();
            }
            let mut found = Map::new();
            let clear_route = jwt::apply(verified, &mut passage.head, &mut found);
            matching::merge_metadata(&mut passage.metadata, metadata::JWT, found);
            (None, clear_route)
        }
        JwtOutcome::Refused(status) => (Some((status.http(), status.words().to_owned())), false),
        JwtOutcome::NeedsKeys(_) => {
            step.effect = "the keys of the issuer are not fetched: the token is taken as absent".to_owned();
            (None, false)
        }
    };
    explained.filters.push(step);
    if let Some((status, reason)) = refused {
        explained.outcome = Outcome::Responded(status, reason);
        return false;
    }
    if clear_route {
        passage.route_again(explained);
    }
    true
}

fn report(jwt: &Jwt, verdict: TokenVerdict) -> TokenReport {
    let TokenVerdict { provider, place, refused, is_assumed, claims } = verdict;
    let issuer = jwt.providers.get(provider).and_then(|provider| provider.issuer.as_deref());
    let text = |claim: &str| claims[claim].as_str().unwrap_or_default().to_owned();
    let shown = claims.as_object().into_iter().flatten().filter(|(name, _)| !COMMON.contains(&name.as_str()));
    let shown: Vec<(String, Value)> = shown.map(|(name, value)| (name.clone(), value.clone())).collect();
    TokenReport {
        rule: provider,
        place,
        issuer: issuer.unwrap_or_default().to_owned(),
        principal: format!("{}/{}", text("iss"), text("sub")),
        refused,
        is_assumed,
        claims: shown,
    }
}
