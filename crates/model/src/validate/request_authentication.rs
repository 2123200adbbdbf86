//! Validation of RequestAuthentication.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Code, Finding, Findings, header_name, milliseconds, security};
use crate::{
    api::{RequestAuthentication, security::JwtRule},
    world::is_url,
};

/// Maximum size of a key set in bytes. Sets of public issuers have a few kilobytes.
pub const MAX_KEY_SET: usize = 256 << 10;
/// Maximum number of keys of a key set.
const MAX_KEYS: usize = 256;

/// The checked part of a key set. Source: RFC 7517 section 5.
#[derive(Deserialize)]
struct KeySet {
    keys: Vec<Map<String, Value>>,
}

/// Checks a key set.
///
/// # Errors
/// Fails if the text is not a key set, with the reason.
pub fn key_set(text: &str) -> Result<(), String> {
    if text.len() > MAX_KEY_SET {
        return Err(format!("it has more than {MAX_KEY_SET} bytes"));
    }
    let set: KeySet = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if set.keys.is_empty() || set.keys.len() > MAX_KEYS {
        return Err(format!("it has {} keys; 1 to {MAX_KEYS} are allowed", set.keys.len()));
    }
    match set.keys.iter().position(|key| !key.get("kty").is_some_and(Value::is_string)) {
        Some(index) => Err(format!("keys[{index}] has no kty")),
        None => Ok(()),
    }
}

/// Checks a RequestAuthentication.
pub(crate) fn request_authentication(spec: &RequestAuthentication) -> Vec<Finding> {
    let mut findings = Findings::default();
    security::selector(spec.selector.as_ref(), &mut findings);
    security::attachment(spec.selector.is_some(), spec.target_ref.as_ref(), &spec.target_refs, &mut findings);
    if spec.jwt_rules.is_empty() {
        let message = "is empty, so the policy has no effect";
        findings.add(
            Code::PolicyWithoutEffect,
            "spec.jwtRules",
            message,
            "add the issuers whose tokens are accepted",
        );
    }
    for (index, rule) in spec.jwt_rules.iter().enumerate() {
        jwt_rule(rule, &format!("spec.jwtRules[{index}]"), &mut findings);
    }
    findings.done()
}

fn jwt_rule(rule: &JwtRule, field: &str, findings: &mut Findings) {
    if rule.issuer.is_empty() && rule.jwks_uri.is_empty() && rule.jwks.is_empty() {
        findings.add(
            Code::MissingField,
            format!("{field}.issuer"),
            "is missing",
            "set the issuer, claim iss of its tokens",
        );
    } else if rule.issuer.is_empty() {
        let message = "is missing: tokens of any issuer are accepted that a key of the key set signed";
        findings.add(
            Code::AnyIssuer,
            format!("{field}.issuer"),
            message,
            "set the issuer, claim iss of its tokens",
        );
    }
    if !rule.jwks_uri.is_empty() && !is_url(&rule.jwks_uri) {
        let message = format!("{:?} is not a URL with http or https", rule.jwks_uri);
        findings.add(Code::InvalidUrl, format!("{field}.jwksUri"), message, "write https://HOST/PATH");
    }
    if rule.jwks.is_empty() && rule.jwks_uri.is_empty() && !is_url(&rule.issuer) && !rule.issuer.is_empty() {
        let message = "the issuer is not a URL, and the rule has no key set: all its tokens are refused";
        findings.add(Code::NoKeySet, format!("{field}.issuer"), message, "set jwksUri or jwks");
    }
    if !rule.jwks.is_empty()
        && let Err(reason) = key_set(&rule.jwks)
    {
        let remedy = "write a JSON Web Key Set, {\"keys\": [...]}";
        findings.add(
            Code::InvalidKeySet,
            format!("{field}.jwks"),
            format!("is not a key set: {reason}"),
            remedy,
        );
    }
    let names = [
        (&rule.audiences, "audiences"),
        (&rule.from_params, "fromParams"),
        (&rule.from_cookies, "fromCookies"),
        (&rule.space_delimited_claims, "spaceDelimitedClaims"),
    ];
    for (list, name) in names {
        for (index, _) in list.iter().enumerate().filter(|(_, value)| value.is_empty()) {
            findings.add(Code::EmptyField, format!("{field}.{name}[{index}]"), "is empty", "remove it");
        }
    }
    for (index, from) in rule.from_headers.iter().enumerate() {
        header_name(&from.name, &format!("{field}.fromHeaders[{index}].name"), findings);
    }
    if !rule.output_payload_to_header.is_empty() {
        header_name(&rule.output_payload_to_header, &format!("{field}.outputPayloadToHeader"), findings);
    }
    for (index, to) in rule.output_claim_to_headers.iter().enumerate() {
        let field = format!("{field}.outputClaimToHeaders[{index}]");
        header_name(&to.header, &format!("{field}.header"), findings);
        if to.claim.is_empty() {
            findings.add(Code::EmptyField, format!("{field}.claim"), "is empty", "set the name of a claim");
        }
    }
    milliseconds(rule.timeout, &format!("{field}.timeout"), findings);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: &str) -> Vec<String> {
        let spec = serde_json::from_str(&format!("{{\"jwtRules\": [{rule}]}}")).unwrap();
        let found = request_authentication(&spec).into_iter();
        found.map(|found| format!("{} {}: {}", found.code.severity(), found.field, found.message)).collect()
    }

    #[test]
    fn rules_are_checked() {
        assert_eq!(check(r#"{"issuer": "https://a", "fromParams": ["t"], "timeout": "1s"}"#), [""; 0]);
        for (rule, expected) in [
            (r#"{"audiences": ["a"]}"#, "error spec.jwtRules[0].issuer: is missing"),
            (r#"{"issuer": "a", "jwksUri": "file:///etc/keys"}"#, "error spec.jwtRules[0].jwksUri"),
            (r#"{"issuer": "a"}"#, "warning spec.jwtRules[0].issuer: the issuer is not a URL"),
            (r#"{"issuer": "a", "jwks": "[]"}"#, "error spec.jwtRules[0].jwks: is not a key set"),
            (r#"{"issuer": "a", "jwks": "{\"keys\": [{}]}"}"#, "error spec.jwtRules[0].jwks: is not"),
            (r#"{"issuer": "https://a", "fromCookies": [""]}"#, "error spec.jwtRules[0].fromCookies[0]"),
            (
                r#"{"issuer": "https://a", "fromHeaders": [{"name": "a b"}]}"#,
                "error spec.jwtRules[0].fromHeaders[0].name",
            ),
            (
                r#"{"issuer": "https://a", "outputClaimToHeaders": [{"header": "x"}]}"#,
                "error spec.jwtRules[0].outputClaimToHeaders[0].claim",
            ),
        ] {
            let found = check(rule);
            assert!(found.iter().any(|found| found.starts_with(expected)), "{rule} {found:?}");
        }
    }
}
