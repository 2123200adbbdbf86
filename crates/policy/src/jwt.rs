//! JWT authentication: finds tokens in a request, verifies them and applies their claims. Does no IO; the caller
//! supplies keys and time.
//!
//! The messages are those of Envoy's `jwt_authn` filter, because clients see them.

use std::{borrow::Cow, sync::Arc};

use base64::{
    Engine as _,
    prelude::{BASE64_URL_SAFE, BASE64_URL_SAFE_NO_PAD},
};
use jsonwebtoken::Algorithm;
use serde_json::{Map, Value};
use skysail_identity::jwks::Mismatch;

use crate::{
    config::{
        jwt::{Jwt, JwtProvider, KeySet, Keys, Requirement, Source},
        route::Setting,
    },
    route,
};
use skysail_http::head::RequestHead;

mod json;
mod signatures;
#[cfg(test)]
mod tests;
mod verdicts;

use signatures::KnownToken;
pub use signatures::Signatures;
pub use verdicts::{TokenVerdict, verdicts};

/// Maximum length of the path in a realm.
const REALM: usize = 256;

/// Reason for the refusal of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is described by its message")]
pub enum Status {
    Missing,
    BadFormat,
    BadHeader,
    HeaderNotJson,
    NoAlgorithm,
    UnknownAlgorithm,
    BadPayload,
    PayloadNotJson,
    BadSignature,
    BadIssuer,
    BadSubject,
    BadAudience,
    BadStart,
    BadEnd,
    UnknownIssuer,
    NotYetValid,
    Expired,
    AudienceNotAllowed,
    NoSuchKey,
    Forged,
    NoKeys,
}

impl Status {
    /// Returns the message for the client.
    pub fn words(self) -> &'static str {
        match self {
            Self::Missing => "Jwt is missing",
            Self::BadFormat => {
                "Jwt is not in the form of Header.Payload.Signature with two dots and 3 sections"
            }
            Self::BadHeader => "Jwt header is an invalid Base64url encoded",
            Self::HeaderNotJson => "Jwt header is an invalid JSON",
            Self::NoAlgorithm => "Jwt header [alg] field is required and must be a string",
            Self::UnknownAlgorithm => "Jwt header [alg] is not supported",
            Self::BadPayload => "Jwt payload is an invalid Base64url encoded",
            Self::PayloadNotJson => "Jwt payload is an invalid JSON",
            Self::BadSignature => "Jwt signature is an invalid Base64url encoded",
            Self::BadIssuer => "Jwt payload [iss] field is not a string",
            Self::BadSubject => "Jwt payload [sub] field is not a string",
            Self::BadAudience => "Jwt payload [aud] field is not a string or string list",
            Self::BadStart => "Jwt payload [nbf] field is not a positive 64 bit integer",
            Self::BadEnd => "Jwt payload [exp] field is not a positive 64 bit integer",
            Self::UnknownIssuer => "Jwt issuer is not configured",
            Self::NotYetValid => "Jwt not yet valid",
            Self::Expired => "Jwt is expired",
            Self::AudienceNotAllowed => "Audiences in Jwt are not allowed",
            Self::NoSuchKey => "Jwks doesn't have key to match kid or alg from Jwt",
            Self::Forged => "Jwt verification fails",
            Self::NoKeys => "Jwks remote fetch is failed",
        }
    }

    /// Returns the more informative of two reasons: an invalid token, then a token of another issuer, then no token.
    fn more_informative(self, other: Self) -> Self {
        let weight = |status| match status {
            Self::Missing => 0,
            Self::UnknownIssuer => 1,
            _ => 2,
        };
        if weight(other) >= weight(self) { other } else { self }
    }

    /// Returns the HTTP status.
    pub fn http(self) -> u16 {
        if self == Self::AudienceNotAllowed { 403 } else { 401 }
    }
}

/// A verified token.
#[derive(Debug)]
pub struct VerifiedToken<'a> {
    provider: &'a JwtProvider,
    source: &'a Source,
    token: Arc<Token>,
}

/// Result of a check.
#[derive(Debug)]
pub enum JwtOutcome<'a> {
    /// The request is admitted; these are its verified tokens.
    Pass(Vec<VerifiedToken<'a>>),
    /// The request is refused.
    Refused(Status),
    /// The keys of this provider must be fetched first.
    NeedsKeys(usize),
}

/// Reason for the end of an evaluation.
enum JwtFailure {
    Status(Status),
    NeedsKeys(usize),
}

/// Inputs of a check.
struct Check<'a, 'h> {
    jwt: &'a Jwt,
    head: &'h RequestHead,
    /// Seconds since the Unix epoch.
    now: u64,
    /// Providers whose keys were fetched for this request. They are used even if they have expired since.
    fetched: &'h [usize],
    /// Providers whose keys could not be fetched.
    failed: &'h [usize],
    /// Providers whose signatures are taken as valid. For explanations.
    assumed: &'h [usize],
    signatures: Option<&'h Signatures>,
}

/// Returns the requirement for a request, or `None` if there is none. A route may name a requirement (`setting`).
///
/// # Errors
/// The route names a requirement that the filter does not have, because routes and listeners are updated separately.
/// The text is Envoy's.
pub fn requirement<'a>(
    jwt: &'a Jwt,
    setting: Option<&Setting>,
    head: &RequestHead,
    rng: &mut fastrand::Rng,
) -> Result<Option<&'a Requirement>, String> {
    let Some(Setting::Jwt(name)) = setting else {
        let mut rules = jwt.rules.iter();
        let rule = rules.find(|(matches, _)| route::matches(matches, head, None, rng));
        return Ok(rule.map(|(_, requirement)| requirement));
    };
    if let Some((_, requirement)) = jwt.named.iter().find(|(other, _)| other == name) {
        return Ok(Some(requirement));
    }
    let mut names: Vec<&str> = jwt.named.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    Err(format!("Wrong requirement_name: {name}. It should be one of [{}]", names.join(",")))
}

/// Checks a request against a requirement. `now` is in seconds since the Unix epoch. `fetched` are the providers whose
/// keys were fetched for this request, `failed` those whose keys could not be fetched.
pub fn check<'a>(
    jwt: &'a Jwt,
    requirement: &'a Requirement,
    head: &RequestHead,
    now: u64,
    (fetched, failed): (&[usize], &[usize]),
) -> JwtOutcome<'a> {
    Check { jwt, head, now, fetched, failed, assumed: &[], signatures: None }.outcome(requirement)
}

/// Checks a request that was admitted before, reusing its signature checks.
pub fn check_again<'a>(
    jwt: &'a Jwt,
    requirement: &'a Requirement,
    head: &RequestHead,
    now: u64,
    signatures: &Signatures,
) -> JwtOutcome<'a> {
    Check { jwt, head, now, fetched: &[], failed: &[], assumed: &[], signatures: Some(signatures) }
        .outcome(requirement)
}

/// Checks a request and takes the signatures of these providers as valid, because their keys are not known. For
/// explanations.
pub fn check_assuming<'a>(
    jwt: &'a Jwt,
    requirement: &'a Requirement,
    head: &RequestHead,
    now: u64,
    assumed: &[usize],
) -> JwtOutcome<'a> {
    Check { jwt, head, now, fetched: &[], failed: &[], assumed, signatures: None }.outcome(requirement)
}

impl<'a> Check<'a, '_> {
    fn outcome(&self, requirement: &'a Requirement) -> JwtOutcome<'a> {
        let mut good = Vec::new();
        match self.meets(requirement, &mut good) {
            Ok(()) => JwtOutcome::Pass(good),
            Err(JwtFailure::Status(status)) => JwtOutcome::Refused(status),
            Err(JwtFailure::NeedsKeys(provider)) => JwtOutcome::NeedsKeys(provider),
        }
    }

    fn meets(
        &self,
        requirement: &'a Requirement,
        good: &mut Vec<VerifiedToken<'a>>,
    ) -> Result<(), JwtFailure> {
        match requirement {
            Requirement::Nothing => Ok(()),
            Requirement::Provider(index, audiences) => {
                let Some(provider) = self.jwt.providers.get(*index) else { return Ok(()) };
                let tokens = tokens(provider, self.head);
                if tokens.is_empty() {
                    return Err(JwtFailure::Status(Status::Missing));
                }
                // All tokens must be valid, because the upstream may use any of them.
                for (source, token) in tokens {
                    good.push(self.token(*index, source, &token, audiences.as_deref())?);
                }
                Ok(())
            }
            Requirement::Any(some) => {
                let mut worst = Status::Missing;
                for one in some {
                    let before = good.len();
                    match self.meets(one, good) {
                        Err(JwtFailure::Status(status)) => worst = worst.more_informative(status),
                        settled => return settled,
                    }
                    good.truncate(before);
                }
                Err(JwtFailure::Status(worst))
            }
            Requirement::All(all) => all.iter().try_for_each(|one| self.meets(one, good)),
            Requirement::AllowMissing(providers) => {
                let mut providers = providers.iter().filter_map(|index| self.jwt.providers.get(*index));
                if providers.all(|provider| tokens(provider, self.head).is_empty()) {
                    return Ok(());
                }
                Err(JwtFailure::Status(Status::Missing))
            }
            Requirement::AllowMissingOrFailed => Ok(()),
        }
    }

    fn token(
        &self,
        index: usize,
        source: &'a Source,
        text: &str,
        audiences: Option<&[Box<str>]>,
    ) -> Result<VerifiedToken<'a>, JwtFailure> {
        let stop = |status| Err(JwtFailure::Status(status));
        let Some(provider) = self.jwt.providers.get(index) else { return stop(Status::UnknownIssuer) };
        let known = signatures::known(text);
        let token = match &known {
            Some(known) => Arc::clone(&known.token),
            None => Arc::new(Token::parse(text).map_err(JwtFailure::Status)?),
        };
        if provider.issuer.as_deref().is_some_and(|issuer| issuer != token.issuer()) {
            return stop(Status::UnknownIssuer);
        }
        let skew = provider.clock_skew.as_secs();
        if token.from.is_some_and(|from| self.now.saturating_add(skew) < from) {
            return stop(Status::NotYetValid);
        }
        if token.until.is_some_and(|until| self.now > until.saturating_add(skew)) {
            return stop(Status::Expired);
        }
        let wanted = audiences.unwrap_or(&provider.audiences);
        if !wanted.is_empty() && !wanted.iter().any(|wanted| token.is_for(wanted)) {
            return stop(Status::AudienceNotAllowed);
        }
        if !self.assumed.contains(&index) {
            self.verify(index, provider, (&token, text), known.as_deref())?;
        }
        Ok(VerifiedToken { provider, source, token })
    }

    /// Verifies the signature of a token.
    fn verify(
        &self,
        index: usize,
        provider: &JwtProvider,
        (token, text): (&Arc<Token>, &str),
        known: Option<&KnownToken>,
    ) -> Result<(), JwtFailure> {
        let keys = match &provider.keys {
            Keys::Local(keys) => Arc::clone(keys),
            Keys::Remote(_) if self.failed.contains(&index) => {
                return Err(JwtFailure::Status(Status::NoKeys));
            }
            Keys::Remote(remote) => match remote.fetched.load().as_deref() {
                Some((until, keys))
                    if *until > std::time::Instant::now() || self.fetched.contains(&index) =>
                {
                    Arc::clone(keys)
                }
                _ => return Err(JwtFailure::NeedsKeys(index)),
            },
        };
        let verified = match self.signatures {
            Some(of_request) => {
                of_request.check((self.jwt.fingerprint, index, text), || token.verify(text, &keys))
            }
            None => signatures::check(known, &keys, (token, text), || token.verify(text, &keys)),
        };
        verified.map_err(JwtFailure::Status)
    }
}

/// A parsed token.
#[derive(Debug)]
struct Token {
    header: Value,
    algorithm: Algorithm,
    claims: Value,
    /// Validity (`nbf` and `exp`) in seconds since the Unix epoch.
    from: Option<u64>,
    until: Option<u64>,
    /// The payload as it is in the token.
    payload: Box<str>,
}

impl Token {
    fn parse(text: &str) -> Result<Self, Status> {
        let (signed, signature) = text.rsplit_once('.').ok_or(Status::BadFormat)?;
        let (header, payload) = signed.split_once('.').ok_or(Status::BadFormat)?;
        if payload.contains('.') || header.is_empty() || payload.is_empty() || signature.is_empty() {
            return Err(Status::BadFormat);
        }
        let bytes = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text);
        let header = bytes(header).map_err(|_| Status::BadHeader)?;
        let header = json::object(&header).map_err(|_| Status::HeaderNotJson)?;
        let algorithm = header["alg"].as_str().ok_or(Status::NoAlgorithm)?;
        let algorithm = algorithm.parse().map_err(|_| Status::UnknownAlgorithm)?;
        let claims = bytes(payload).map_err(|_| Status::BadPayload)?;
        let claims = json::object(&claims).map_err(|_| Status::PayloadNotJson)?;
        bytes(signature).map_err(|_| Status::BadSignature)?;
        let is_text = |claim: &Value| claim.is_null() || claim.is_string();
        if !is_text(&claims["iss"]) {
            return Err(Status::BadIssuer);
        }
        if !is_text(&claims["sub"]) {
            return Err(Status::BadSubject);
        }
        let is_list = claims["aud"].as_array().is_some_and(|list| list.iter().all(Value::is_string));
        if !is_text(&claims["aud"]) && !is_list {
            return Err(Status::BadAudience);
        }
        let from = seconds(&claims["nbf"]).ok_or(Status::BadStart)?;
        let until = seconds(&claims["exp"]).ok_or(Status::BadEnd)?;
        Ok(Self { header, algorithm, claims, from, until, payload: payload.into() })
    }

    fn issuer(&self) -> &str {
        self.claims["iss"].as_str().unwrap_or_default()
    }

    /// Returns whether the token is for this audience. The scheme and a trailing slash are ignored, as in Envoy.
    fn is_for(&self, wanted: &str) -> bool {
        let bare = |text: &str| {
            let text = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
            text.strip_suffix('/').unwrap_or(text).to_owned()
        };
        let wanted = bare(wanted);
        match &self.claims["aud"] {
            Value::String(audience) => bare(audience) == wanted,
            Value::Array(all) => {
                all.iter().filter_map(Value::as_str).any(|audience| bare(audience) == wanted)
            }
            _ => false,
        }
    }

    /// Verifies the signature. `text` is the token from which this was parsed.
    fn verify(&self, text: &str, keys: &KeySet) -> Result<(), Status> {
        let (signed, signature) = text.rsplit_once('.').ok_or(Status::BadFormat)?;
        let id = self.header["kid"].as_str();
        keys.verify(id, self.algorithm, signed.as_bytes(), signature).map_err(|mismatch| match mismatch {
            Mismatch::NoSuchKey => Status::NoSuchKey,
            Mismatch::Forged => Status::Forged,
        })
    }
}

/// Parses a time claim. The outer `None` is an invalid value. Fractions are cut off, and 0 is treated as absent.
fn seconds(claim: &Value) -> Option<Option<u64>> {
    let number = match claim {
        Value::Null => return Some(None),
        Value::Number(number) => number.as_u64().or_else(|| {
            let number = number.as_f64().filter(|number| (0.0..9.0e18).contains(number))?;
            Some(number as u64)
        })?,
        _ => return None,
    };
    Some((number > 0).then_some(number))
}

/// Returns the tokens in a provider's places. Several values in one place are joined, which makes the token invalid:
/// the upstream might use another one than was verified.
fn tokens<'a, 'h>(provider: &'a JwtProvider, head: &'h RequestHead) -> Vec<(&'a Source, Cow<'h, str>)> {
    let mut tokens = Vec::new();
    for source in &provider.from {
        let token = match source {
            Source::Header(name, prefix) => {
                let all = joined(head.header_values(name)).filter(|all| !all.is_empty());
                all.and_then(|all| after(all, prefix))
            }
            Source::Param(name) => head.query().and_then(|query| param(query, name)).map(Cow::Owned),
            Source::Cookie(name) => joined(head.cookies(name)),
        };
        tokens.extend(token.map(|token| (source, token)));
    }
    tokens
}

/// Returns the text after a prefix. The whole rest is the token, because the upstream may use any part of it.
fn after<'h>(all: Cow<'h, str>, prefix: &str) -> Option<Cow<'h, str>> {
    // The prefix usually begins the text. A search costs more than a comparison.
    let start = if all.starts_with(prefix) { prefix.len() } else { all.find(prefix)? + prefix.len() };
    Some(match all {
        Cow::Borrowed(all) => Cow::Borrowed(all[start..].trim()),
        Cow::Owned(all) => Cow::Owned(all[start..].trim().to_owned()),
    })
}

fn param(query: &str, name: &str) -> Option<String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let values = pairs.filter(|(key, _)| plain(key) == name).map(|(_, value)| plain(value));
    values.reduce(|all, value| all + "," + &value)
}

/// Joins several values by commas, which no token contains.
fn joined<'a>(mut values: impl Iterator<Item = &'a [u8]>) -> Option<Cow<'a, str>> {
    let first = values.next()?;
    let Some(second) = values.next() else {
        // A token is ASCII, which this finds faster.
        return Some(str::from_utf8(first).map_or_else(|_| String::from_utf8_lossy(first), Cow::Borrowed));
    };
    let all: Vec<&[u8]> = [first, second].into_iter().chain(values).collect();
    Some(String::from_utf8_lossy(&all.join(&b","[..])).into_owned().into())
}

/// Decodes percent escapes in a part of a query.
fn plain(text: &str) -> String {
    let (mut out, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, after @ ..] = rest {
        let byte = match (first, after) {
            (b'%', [high, low, ..]) => {
                let digits = [char::from(*high).to_digit(16), char::from(*low).to_digit(16)];
                if let [Some(high), Some(low)] = digits { u8::try_from(high << 4 | low).ok() } else { None }
            }
            _ => None,
        };
        rest = if byte.is_some() { &after[2..] } else { after };
        out.push(byte.unwrap_or(*first));
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Removes a parameter from the query.
fn remove_param(head: &mut RequestHead, name: &str) {
    let Some((path, query)) = head.path().split_once('?') else { return };
    let stays = |pair: &&str| plain(pair.split_once('=').map_or(*pair, |(key, _)| key)) != name;
    let rest: Vec<&str> = query.split('&').filter(stays).collect();
    let mark = if rest.is_empty() { "" } else { "?" };
    let path = format!("{path}{mark}{}", rest.join("&"));
    head.set_path(&path);
}

/// Returns `www-authenticate` for a refused client (RFC 6750, section 3).
pub fn challenge(status: Status, head: &RequestHead) -> String {
    let original = head.header("x-envoy-original-path").and_then(|path| std::str::from_utf8(path).ok());
    let path: String = original.unwrap_or(head.path()).chars().take(REALM).collect();
    let error = if status == Status::Missing { "" } else { ", error=\"invalid_token\"" };
    format!("Bearer realm=\"{}://{}{path}\"{error}", head.scheme(), head.authority())
}

/// Returns whether a request has fields that only this filter may set.
pub fn is_unclean(jwt: &Jwt, head: &RequestHead) -> bool {
    own_fields(jwt).any(|name| head.has(name))
}

/// Removes the fields that only this filter may set.
pub fn sanitize(jwt: &Jwt, head: &mut RequestHead) {
    for name in own_fields(jwt) {
        head.remove(name);
    }
}

/// Returns the fields that hold claims and payloads.
fn own_fields(jwt: &Jwt) -> impl Iterator<Item = &str> {
    jwt.providers.iter().flat_map(|provider| {
        let of_claims = provider.claim_headers.iter().map(|(name, _)| name);
        provider.payload_header.iter().chain(of_claims).map(|name| &**name)
    })
}

/// Applies verified tokens: sets headers for the upstream and the dynamic `metadata`. Returns whether the route must
/// be selected again.
pub fn apply(
    good: Vec<VerifiedToken<'_>>,
    head: &mut RequestHead,
    metadata: &mut Map<String, Value>,
) -> bool {
    let mut clear_route = false;
    for VerifiedToken { provider, source, token } in good {
        let Token { header, claims, payload, .. } = &*token;
        if let Some(name) = &provider.payload_header {
            let padding = if provider.pad_payload_header { (4 - payload.len() % 4) % 4 } else { 0 };
            head.append(name, format!("{payload}{}", "=".repeat(padding)).as_bytes());
        }
        for (name, path) in &provider.claim_headers {
            let claim = path.iter().try_fold(claims, |value, key| value.get(&**key));
            if let Some(text) = claim.and_then(claim_text).filter(|text| !text.is_empty()) {
                // A claim may contain any character. A line break in a head would begin another field.
                let clean: String = text.chars().filter(|c| !c.is_control()).collect();
                head.append(name, clean.as_bytes());
            }
        }
        match source {
            _ if provider.forward => {}
            Source::Header(name, _) => _ = head.remove(name),
            Source::Param(name) => remove_param(head, name),
            // Cookies stay in the request, as in Envoy.
            Source::Cookie(_) => {}
        }
        if let Some(name) = &provider.header_in_metadata {
            metadata.insert(name.to_string(), header.clone());
        }
        if let Some(name) = &provider.payload_in_metadata {
            metadata.insert(name.to_string(), listed(claims.clone(), &provider.spaced_claims));
        }
        clear_route |= provider.clear_route;
    }
    clear_route
}

/// Returns a claim as a header value; lists and objects are JSON in base64url.
fn claim_text(claim: &Value) -> Option<String> {
    Some(match claim {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(is) => is.to_string(),
        Value::Null => return None,
        Value::Array(_) | Value::Object(_) => BASE64_URL_SAFE.encode(claim.to_string()),
    })
}

/// Splits these claims at spaces into lists.
fn listed(mut claims: Value, spaced: &[Box<str>]) -> Value {
    for name in spaced {
        if let Some(claim) = claims.get_mut(&**name)
            && let Some(text) = claim.as_str()
        {
            *claim = text.split(' ').filter(|word| !word.is_empty()).collect();
        }
    }
    claims
}
