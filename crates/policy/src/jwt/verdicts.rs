//! Verdicts about the tokens of a request by each provider, as sentences for people. Not part of the request path.

use chrono::{DateTime, SecondsFormat};
use serde_json::Value;

use super::{Check, JwtFailure, Status, Token, tokens};
use crate::config::jwt::{Jwt, JwtProvider, Keys, Source};
use skysail_core::names::UNFETCHED_KEY;
use skysail_http::head::RequestHead;

/// Verdict of a provider about a token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenVerdict {
    /// Index of the provider.
    pub provider: usize,
    /// Place of the token in the request.
    pub place: String,
    /// Reason for the refusal; `None` if the provider accepts the token.
    pub refused: Option<String>,
    /// The signature is taken as valid, because the keys are not known.
    pub is_assumed: bool,
    /// Claims, verified or not; null if they cannot be read.
    pub claims: Value,
}

/// Returns the verdicts of all providers about the tokens in their places. `now` is in seconds since the Unix epoch.
/// The signatures of the providers in `assumed` are taken as valid.
pub fn verdicts(jwt: &Jwt, head: &RequestHead, now: u64, assumed: &[usize]) -> Vec<TokenVerdict> {
    let check = Check { jwt, head, now, fetched: &[], failed: &[], assumed, signatures: None };
    let mut found = Vec::new();
    for (index, provider) in jwt.providers.iter().enumerate() {
        for (source, text) in tokens(provider, head) {
            let refused = match check.token(index, source, &text, None) {
                Ok(_) => None,
                Err(JwtFailure::NeedsKeys(_)) => {
                    Some("the keys of the issuer are not fetched yet".to_owned())
                }
                Err(JwtFailure::Status(status)) => Some(words(status, provider, &text)),
            };
            found.push(TokenVerdict {
                provider: index,
                place: place(source),
                is_assumed: refused.is_none() && assumed.contains(&index),
                refused,
                claims: Token::parse(&text).map(|token| token.claims).unwrap_or_default(),
            });
        }
    }
    found
}

fn place(source: &Source) -> String {
    match source {
        Source::Header(name, _) => format!("header {name}"),
        Source::Param(name) => format!("query parameter {name}"),
        Source::Cookie(name) => format!("cookie {name}"),
    }
}

/// Returns the reason of a status, with the values that decide it.
fn words(status: Status, provider: &JwtProvider, text: &str) -> String {
    let Ok(token) = Token::parse(text) else { return status.words().to_owned() };
    let detail = match status {
        Status::UnknownIssuer => {
            let expected = provider.issuer.as_deref().unwrap_or_default();
            return format!("issuer {}, expected: {expected}", token.issuer());
        }
        Status::Expired => format!("exp is {}", date(token.until)),
        Status::NotYetValid => format!("nbf is {}", date(token.from)),
        Status::AudienceNotAllowed => {
            format!("aud is {}, expected: {}", token.claims["aud"], provider.audiences.join(" or "))
        }
        Status::NoSuchKey | Status::Forged if is_unfetched(provider) => {
            return "the control plane has not fetched the keys of the issuer, so no token is valid"
                .to_owned();
        }
        Status::NoSuchKey | Status::Forged => {
            let id = token.header["kid"].as_str().unwrap_or("none");
            format!("kid {id}, alg {}", token.header["alg"].as_str().unwrap_or_default())
        }
        _ => return status.words().to_owned(),
    };
    format!("{}: {detail}", status.words())
}

/// Returns whether the provider has only the key by which the control plane replaces keys that it has not fetched.
fn is_unfetched(provider: &JwtProvider) -> bool {
    let Keys::Local(keys) = &provider.keys else { return false };
    matches!(keys.0.as_slice(), [only] if only.id.as_deref() == Some(UNFETCHED_KEY))
}

/// Returns a time claim as a date.
fn date(seconds: Option<u64>) -> String {
    let time = seconds
        .and_then(|seconds| i64::try_from(seconds).ok())
        .and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.map(|time| time.to_rfc3339_opts(SecondsFormat::Secs, true)).unwrap_or_default()
}
