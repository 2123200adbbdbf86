//! Validation of HTTPRoute, GRPCRoute, TLSRoute and TCPRoute.

use std::collections::BTreeSet;

use super::{
    Code, backends,
    filters::{self, FilterPlace},
    hostnames, limit, named_matches, parents,
};
use crate::{
    api::gateway_api::{
        FilterType, GrpcMethod, GrpcRoute, HttpMatch, HttpRoute, HttpRule, L4Rule, MatchType, PathMatchType,
        TcpRoute, TlsRoute,
    },
    validate::{Finding, Findings, regex},
};

/// Methods that a match may name.
const METHODS: &[&str] = &["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];

/// Checks an HTTPRoute.
pub(crate) fn http_route(spec: &HttpRoute) -> Vec<Finding> {
    let mut findings = Findings::default();
    parents(&spec.parent_refs, &mut findings);
    hostnames(&spec.hostnames, &mut findings);
    limit(spec.rules.len(), 16, "spec.rules", &mut findings);
    let matches = spec.rules.iter().map(|rule| rule.matches.len()).sum();
    limit(matches, 128, "spec.rules", &mut findings);
    names(spec.rules.iter().map(|rule| rule.name.as_ref()), &mut findings);
    for (index, rule) in spec.rules.iter().enumerate() {
        http_rule(rule, &format!("spec.rules[{index}]"), &mut findings);
    }
    findings.done()
}

/// Checks a GRPCRoute.
pub(crate) fn grpc_route(spec: &GrpcRoute) -> Vec<Finding> {
    let mut findings = Findings::default();
    parents(&spec.parent_refs, &mut findings);
    hostnames(&spec.hostnames, &mut findings);
    limit(spec.rules.len(), 16, "spec.rules", &mut findings);
    names(spec.rules.iter().map(|rule| rule.name.as_ref()), &mut findings);
    for (index, rule) in spec.rules.iter().enumerate() {
        let field = format!("spec.rules[{index}]");
        limit(rule.matches.len(), 64, &format!("{field}.matches"), &mut findings);
        for (at, found) in rule.matches.iter().enumerate() {
            let field = format!("{field}.matches[{at}]");
            named_matches(&found.headers, &format!("{field}.headers"), true, &mut findings);
            found.method.iter().for_each(|of| grpc_method(of, &format!("{field}.method"), &mut findings));
        }
        filters::check(&rule.filters, FilterPlace::Grpc, &format!("{field}.filters"), &mut findings);
        backends(&rule.backend_refs, &format!("{field}.backendRefs"), &mut findings);
        for (at, of) in rule.backend_refs.iter().enumerate() {
            let field = format!("{field}.backendRefs[{at}].filters");
            // As in an HTTPRoute: unlike a rule, a single backend cannot have a mirror.
            filters::check(&of.filters, FilterPlace::HttpBackend, &field, &mut findings);
        }
    }
    findings.done()
}

/// Checks a TLSRoute.
pub(crate) fn tls_route(spec: &TlsRoute) -> Vec<Finding> {
    let mut findings = Findings::default();
    parents(&spec.parent_refs, &mut findings);
    hostnames(&spec.hostnames, &mut findings);
    if spec.hostnames.is_empty() {
        findings.add(Code::MissingField, "spec.hostnames", "is missing", "add the server names");
    }
    l4_rules(&spec.rules, &mut findings);
    findings.done()
}

/// Checks a TCPRoute.
pub(crate) fn tcp_route(spec: &TcpRoute) -> Vec<Finding> {
    let mut findings = Findings::default();
    parents(&spec.parent_refs, &mut findings);
    l4_rules(&spec.rules, &mut findings);
    findings.done()
}

fn l4_rules(rules: &[L4Rule], findings: &mut Findings) {
    if rules.is_empty() {
        findings.add(Code::MissingField, "spec.rules", "is missing", "add a rule");
    }
    if rules.len() > 1 {
        let message = "rules have no conditions, so only the first is used";
        findings.add(Code::UnreachableRule, "spec.rules", message, "remove the others");
    }
    limit(rules.len(), 16, "spec.rules", findings);
    for (index, rule) in rules.iter().enumerate() {
        let field = format!("spec.rules[{index}].backendRefs");
        if rule.backend_refs.is_empty() {
            findings.add(Code::MissingField, &field, "is missing", "add a backend");
        }
        backends(&rule.backend_refs, &field, findings);
    }
}

fn names<'a>(list: impl Iterator<Item = Option<&'a String>>, findings: &mut Findings) {
    let mut seen = BTreeSet::new();
    for (index, name) in list.enumerate() {
        let Some(name) = name else { continue };
        let field = format!("spec.rules[{index}].name");
        if name.is_empty() || name.len() > 253 || !super::is_dns_name(name) {
            findings.add(
                Code::InvalidName,
                &field,
                format!("{name:?} is not a valid name"),
                "use letters, digits and '-'",
            );
        }
        if !seen.insert(name) {
            findings.add(Code::DuplicateName, &field, format!("{name:?} is used twice"), "use another name");
        }
    }
}

fn http_rule(rule: &HttpRule, field: &str, findings: &mut Findings) {
    let at = |name: &str| format!("{field}.{name}");
    limit(rule.matches.len(), 64, &at("matches"), findings);
    for (index, found) in rule.matches.iter().enumerate() {
        http_match(found, &format!("{field}.matches[{index}]"), findings);
    }
    let is_prefix =
        |found: &HttpMatch| found.path.as_ref().is_none_or(|path| path.kind == PathMatchType::PathPrefix);
    let prefix = match &rule.matches[..] {
        [] => true,
        [only] => is_prefix(only),
        _ => false,
    };
    filters::check(&rule.filters, FilterPlace::Http { prefix }, &at("filters"), findings);
    let has = |kind| rule.filters.iter().any(|filter| filter.kind == Some(kind));
    if has(FilterType::RequestRedirect) && !rule.backend_refs.is_empty() {
        let message = "is not allowed together with filter RequestRedirect";
        findings.add(Code::ExclusiveFields, at("backendRefs"), message, "remove one of them");
    }
    backends(&rule.backend_refs, &at("backendRefs"), findings);
    for (index, of) in rule.backend_refs.iter().enumerate() {
        let field = format!("{field}.backendRefs[{index}].filters");
        filters::check(&of.filters, FilterPlace::HttpBackend, &field, findings);
    }
    if let Some(retry) = &rule.retry {
        for (index, code) in retry.codes.iter().enumerate().filter(|(_, code)| !(400..=599).contains(*code)) {
            let message = format!("{code} is not a status of an error");
            findings.add(
                Code::InvalidStatus,
                at(&format!("retry.codes[{index}]")),
                message,
                "use 400 to 599",
            );
        }
        if retry.attempts.is_some_and(|attempts| attempts < 0) {
            findings.add(Code::OutOfRange, at("retry.attempts"), "is below 0", "use 0 to disable retries");
        }
    }
    if let Some(timeouts) = rule.timeouts
        && let (Some(request), Some(backend)) = (timeouts.request, timeouts.backend_request)
        && !request.0.is_zero()
        && backend > request
    {
        let message = "is longer than timeouts.request";
        findings.add(Code::BackendTimeout, at("timeouts.backendRequest"), message, "use a shorter timeout");
    }
}

fn http_match(found: &HttpMatch, field: &str, findings: &mut Findings) {
    if let Some(path) = &found.path {
        let at = format!("{field}.path.value");
        let value = path.value.as_deref().unwrap_or("/");
        if value.len() > 1024 {
            findings.add(Code::TooMany, &at, "has more than 1024 characters", "use a shorter path");
        }
        if path.kind == PathMatchType::RegularExpression {
            regex(value, &at, findings);
        } else if !value.starts_with('/') {
            findings.add(
                Code::InvalidPath,
                &at,
                format!("{value:?} does not begin with /"),
                format!("write /{value}"),
            );
        } else if let Some(bad) =
            ["//", "/./", "/../", "%2f", "%2F", "#"].iter().find(|bad| value.contains(**bad))
        {
            findings.add(
                Code::InvalidPath,
                &at,
                format!("{value:?} contains {bad:?}"),
                "use a normalized path",
            );
        } else if value.ends_with("/..") || value.ends_with("/.") {
            findings.add(
                Code::InvalidPath,
                &at,
                format!("{value:?} ends with a relative element"),
                "use a normalized path",
            );
        }
    }
    if let Some(method) = found.method.as_ref().filter(|method| !METHODS.contains(&method.as_str())) {
        let message = format!("{method:?} is not one of {}", METHODS.join(", "));
        findings.add(Code::UnknownValue, format!("{field}.method"), message, "use a method in upper case");
    }
    named_matches(&found.headers, &format!("{field}.headers"), true, findings);
    named_matches(&found.query_params, &format!("{field}.queryParams"), false, findings);
}

fn grpc_method(of: &GrpcMethod, field: &str, findings: &mut Findings) {
    if of.service.is_none() && of.method.is_none() {
        findings.add(Code::MissingField, field, "has neither service nor method", "set one of them");
    }
    for (name, text) in [("service", &of.service), ("method", &of.method)] {
        let Some(text) = text else { continue };
        let at = format!("{field}.{name}");
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.' && name == "service";
        if of.kind == MatchType::RegularExpression {
            regex(text, &at, findings);
        } else if text.is_empty() || text.len() > 1024 || !text.chars().all(plain) {
            findings.add(
                Code::InvalidName,
                &at,
                format!("{text:?} is not a valid name"),
                "use the name in the .proto file",
            );
        }
    }
}
