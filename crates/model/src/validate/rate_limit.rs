//! Validation of RateLimitPolicy.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{Code, Finding, Findings, header_name, is_known_status, is_label_text, security, string_match};
use crate::api::{
    RateLimitPolicy, RateLimitTarget, StringMatch,
    rate_limit::{Limit, LimitResponse, RateLimitKey, RateLimitMatch, RateLimitRule},
};

/// Maximum number of rules. Each is a filter of the proxy.
const MAX_RULES: usize = 64;
/// Maximum number of attributes of a rule.
const MAX_KEYS_OF_RULE: usize = 8;
/// Maximum number of texts in a list of a match, which become one expression.
const MAX_TEXTS: usize = 64;
/// Maximum size of a response's text in bytes. Source: Envoy's limit of inline texts in local replies.
const MAX_BODY: usize = 4096;
/// Shortest interval. Source: Envoy's `local_ratelimit` filter.
const MIN_INTERVAL: Duration = Duration::from_millis(50);
/// Longest interval: one year.
const MAX_INTERVAL: Duration = Duration::from_secs(365 * 86_400);
/// Maximum number of combinations of values that are counted apart. Each takes about 200 bytes.
const MAX_KEYS: u32 = 1 << 20;

/// Checks a RateLimitPolicy.
pub(crate) fn rate_limit_policy(spec: &RateLimitPolicy) -> Vec<Finding> {
    let mut findings = Findings::default();
    security::selector(spec.selector.as_ref(), &mut findings);
    if spec.selector.is_some() && !spec.target_refs.is_empty() {
        findings.add(
            Code::ExclusiveFields,
            "spec.selector",
            "is not allowed together with targetRefs",
            "remove one of them",
        );
    }
    for (index, one) in spec.target_refs.iter().enumerate() {
        target(one, &format!("spec.targetRefs[{index}]"), &mut findings);
    }
    if spec.rules.is_empty() {
        findings.add(Code::NoEffect, "spec.rules", "is empty, so the policy limits nothing", "add a rule");
    }
    if spec.rules.len() > MAX_RULES {
        let message = format!("has {} rules; the maximum is {MAX_RULES}", spec.rules.len());
        findings.add(Code::TooMany, "spec.rules", message, "split the policy");
    }
    let mut names = BTreeSet::new();
    for (index, one) in spec.rules.iter().enumerate() {
        let field = format!("spec.rules[{index}]");
        if !names.insert(one.name_at(index)) {
            findings.add(
                Code::DuplicateName,
                format!("{field}.name"),
                "is the name of two rules",
                "rename one of them",
            );
        }
        rule(one, &field, &mut findings);
    }
    findings.done()
}

fn target(target: &RateLimitTarget, field: &str, findings: &mut Findings) {
    if target.name.is_empty() {
        findings.add(Code::MissingField, format!("{field}.name"), "is missing", "set the name of the object");
    }
    if !target.is_service() && !target.is_gateway() && !target.is_route() {
        let message = match target.group.as_str() {
            "" => format!("a {} cannot be a target", target.kind),
            group => format!("a {} of group {group} cannot be a target", target.kind),
        };
        let remedy = "name a Service, a Gateway, HTTPRoute or GRPCRoute of gateway.networking.k8s.io, or a VirtualService of networking.istio.io";
        findings.add(Code::InvalidValue, format!("{field}.kind"), message, remedy);
    } else if !target.section_name.is_empty() && !target.is_route() {
        let message = format!("is not supported for a {}", target.kind);
        let remedy = "remove it; only the rules of routes can be named";
        findings.add(Code::Unsupported, format!("{field}.sectionName"), message, remedy);
    }
}

fn rule(rule: &RateLimitRule, field: &str, findings: &mut Findings) {
    if !rule.name.is_empty() && !is_label_text(&rule.name, false) {
        let message = format!("{:?} is not a valid name", rule.name);
        let remedy = "use at most 63 lower-case letters, digits and '-'";
        findings.add(Code::InvalidValue, format!("{field}.name"), message, remedy);
    }
    if let Some(matched) = &rule.matched {
        conditions(matched, &format!("{field}.match"), findings);
    }
    keys(&rule.by, field, findings);
    match (&rule.limit, &rule.global) {
        (Some(limit), None) => limits(limit, &rule.by, &format!("{field}.limit"), findings),
        (None, Some(global)) => {
            if global.provider.name.is_empty() {
                let remedy = "name a provider with envoyRateLimit of the mesh configuration";
                findings.add(
                    Code::MissingField,
                    format!("{field}.global.provider.name"),
                    "is missing",
                    remedy,
                );
            }
        }
        (Some(_), Some(_)) => {
            let message = "is not allowed together with global: the rate limit service has the limits";
            findings.add(Code::ExclusiveFields, format!("{field}.limit"), message, "remove one of them");
        }
        (None, None) => {
            findings.add(
                Code::MissingField,
                field,
                "has no limit",
                "set limit, or global for a rate limit service",
            );
        }
    }
    if let Some(of) = &rule.response {
        response(of, &format!("{field}.response"), findings);
    }
}

fn conditions(matched: &RateLimitMatch, field: &str, findings: &mut Findings) {
    if *matched == RateLimitMatch::default() {
        findings.add(
            Code::EmptyField,
            field,
            "has no condition",
            "set one, or remove match to limit all requests",
        );
    }
    let lists = [
        ("paths", &matched.paths),
        ("methods", &matched.methods),
        ("hosts", &matched.hosts),
        ("principals", &matched.principals),
        ("notPrincipals", &matched.not_principals),
    ];
    for (name, list) in lists {
        if list.len() > MAX_TEXTS {
            let message = format!("has {} values; the maximum is {MAX_TEXTS}", list.len());
            findings.add(
                Code::TooMany,
                format!("{field}.{name}"),
                message,
                "use a common prefix, or several rules",
            );
        }
        for (index, text) in list.iter().enumerate() {
            let at = format!("{field}.{name}[{index}]");
            let inner = text.strip_prefix('*').or_else(|| text.strip_suffix('*')).unwrap_or(text);
            if text.is_empty() {
                findings.add(Code::EmptyField, at, "is empty", "set a value, or remove it");
            } else if inner.contains('*') {
                let message = format!("{text:?} has '*' inside; it is allowed at one end only");
                findings.add(Code::InvalidValue, at, message, "write a text, PREFIX* or *SUFFIX");
            } else if name == "paths" && !text.starts_with(['/', '*']) {
                findings.add(Code::InvalidPath, at, format!("{text:?} does not begin with /"), "write /PATH");
            } else if name.ends_with("rincipals") && text.starts_with("spiffe://") {
                let message = "has the prefix spiffe://, which no principal has";
                findings.add(Code::InvalidValue, at, message, "write TRUST_DOMAIN/ns/NAMESPACE/sa/ACCOUNT");
            } else if name == "methods" && text.chars().any(|letter| letter.is_ascii_lowercase()) {
                findings.add(
                    Code::NoEffect,
                    at,
                    format!("{text:?} is not in upper case"),
                    "methods are case-sensitive",
                );
            }
        }
    }
    for (name, headers) in [("headers", &matched.headers), ("withoutHeaders", &matched.without_headers)] {
        header_conditions(headers, &format!("{field}.{name}"), findings);
    }
}

fn header_conditions(headers: &BTreeMap<String, StringMatch>, field: &str, findings: &mut Findings) {
    for (name, wanted) in headers {
        let at = skysail_yaml::join(field, name);
        header_name(name, &at, findings);
        string_match(wanted, &at, true, findings);
    }
}

fn keys(by: &[RateLimitKey], field: &str, findings: &mut Findings) {
    if by.len() > MAX_KEYS_OF_RULE {
        let message = format!("has {} attributes; the maximum is {MAX_KEYS_OF_RULE}", by.len());
        findings.add(Code::TooMany, format!("{field}.by"), message, "remove some of them");
    }
    let mut known = BTreeSet::new();
    for (index, key) in by.iter().enumerate() {
        let at = format!("{field}.by[{index}]");
        let attributes = key.attributes();
        if attributes.len() != 1 {
            let message = "must have exactly one attribute";
            let remedy = "set one of sourcePrincipal, sourceAddress, clientAddress, header, jwtClaim, method, host and route";
            findings.add(Code::InvalidValue, &at, message, remedy);
            continue;
        }
        if !known.insert(key.descriptor_key()) {
            let message = format!("has the key {:?} of another attribute", key.descriptor_key());
            findings.add(Code::InvalidValue, &at, message, "remove it, or set key");
        }
        if !key.header.is_empty() {
            header_name(&key.header, &format!("{at}.header"), findings);
        }
        if key.jwt_claim.split('.').any(str::is_empty) && !key.jwt_claim.is_empty() {
            let message = format!("{:?} is not the path of a claim", key.jwt_claim);
            findings.add(
                Code::InvalidValue,
                format!("{at}.jwtClaim"),
                message,
                "write CLAIM, or CLAIM.CLAIM for nested claims",
            );
        }
        let Some(address) = key.client_address else { continue };
        if !key.key.is_empty() {
            let message = "is not allowed with clientAddress: Envoy has a fixed key for it";
            findings.add(Code::InvalidValue, format!("{at}.key"), message, "remove it");
        }
        for (name, length, max) in [
            ("ipv4PrefixLength", address.ipv4_prefix_length, 32),
            ("ipv6PrefixLength", address.ipv6_prefix_length, 128),
        ] {
            if length.is_some_and(|length| length > max) {
                let message = format!("{} is above {max}", length.unwrap_or_default());
                findings.add(
                    Code::InvalidValue,
                    format!("{at}.clientAddress.{name}"),
                    message,
                    "set a shorter prefix",
                );
            }
        }
    }
}

fn limits(limit: &Limit, by: &[RateLimitKey], field: &str, findings: &mut Findings) {
    if limit.requests == 0 {
        let remedy = "set at least 1; to refuse all requests, use an AuthorizationPolicy";
        findings.add(Code::MissingField, format!("{field}.requests"), "is missing or 0", remedy);
    }
    if limit.burst == Some(0) {
        findings.add(
            Code::InvalidValue,
            format!("{field}.burst"),
            "must be at least 1",
            "set a number, or remove it",
        );
    }
    match (limit.unit, limit.interval) {
        (Some(_), Some(_)) => {
            findings.add(
                Code::ExclusiveFields,
                format!("{field}.interval"),
                "is not allowed together with unit",
                "remove one",
            );
        }
        (None, None) => {
            let remedy = "set unit to SECOND, MINUTE, HOUR or DAY, or interval";
            findings.add(Code::MissingField, format!("{field}.unit"), "is missing", remedy);
        }
        (None, Some(interval)) if !(MIN_INTERVAL..=MAX_INTERVAL).contains(&interval.0) => {
            let message = format!("{interval} is not between 50ms and 8760h");
            findings.add(Code::OutOfRange, format!("{field}.interval"), message, "set another length");
        }
        _ => {}
    }
    match limit.max_keys {
        Some(max) if !(1..=MAX_KEYS).contains(&max) => {
            let message = format!("{max} is not between 1 and {MAX_KEYS}");
            findings.add(Code::OutOfRange, format!("{field}.maxKeys"), message, "set another number");
        }
        Some(_) if by.is_empty() => {
            findings.add(
                Code::NoEffect,
                format!("{field}.maxKeys"),
                "has no effect without by",
                "remove it, or set by",
            );
        }
        _ => {}
    }
}

fn response(response: &LimitResponse, field: &str, findings: &mut Findings) {
    if let Some(status) = response.status.filter(|status| *status < 400 || !is_known_status(*status)) {
        let message = format!("{status} is not a status of errors that Envoy knows");
        findings.add(Code::InvalidStatus, format!("{field}.status"), message, "write a number such as 503");
    }
    if response.body.len() > MAX_BODY {
        let message = format!("has {} bytes; the maximum is {MAX_BODY}", response.body.len());
        findings.add(Code::TooMany, format!("{field}.body"), message, "shorten the text");
    }
    if response.content_type.chars().any(|letter| !letter.is_ascii() || letter.is_control()) {
        let message = format!("{:?} is not a type of content", response.content_type);
        findings.add(
            Code::InvalidValue,
            format!("{field}.contentType"),
            message,
            "write a type such as application/json",
        );
    }
    if !response.content_type.is_empty() && response.body.is_empty() {
        findings.add(
            Code::NoEffect,
            format!("{field}.contentType"),
            "has no effect without body",
            "set body",
        );
    }
    for (name, value) in &response.headers {
        let at = skysail_yaml::join(&format!("{field}.headers"), name);
        header_name(name, &at, findings);
        if matches!(
            &*name.to_ascii_lowercase(),
            "host" | "content-length" | "connection" | "transfer-encoding"
        ) {
            findings.add(Code::ProtectedHeader, &at, "cannot be set", "remove it");
        }
        if value.is_empty() || value.chars().any(char::is_control) {
            findings.add(
                Code::InvalidValue,
                &at,
                "must be a text without control characters",
                "correct the value",
            );
        }
    }
}
