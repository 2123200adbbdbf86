//! Validation of filters.

use std::collections::BTreeSet;

use super::{Code, backend, hostname, limit};
use crate::{
    api::gateway_api::{
        Cors, Filter, FilterType, HeaderFilter, Mirror, PathModifier, PathModifierType, Redirect, UrlRewrite,
    },
    validate::{Findings, formats, header_name, port},
};

/// Place of filters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FilterPlace {
    /// Rule of an HTTPRoute; `true` if all matches of the rule are one prefix.
    Http { prefix: bool },
    /// Backend of an HTTPRoute or a GRPCRoute.
    HttpBackend,
    /// Rule of a GRPCRoute.
    Grpc,
}

/// Checks the filters of a rule or of a backend.
pub(super) fn check(list: &[Filter], place: FilterPlace, field: &str, findings: &mut Findings) {
    limit(list.len(), 16, field, findings);
    let mut seen = BTreeSet::new();
    for (index, filter) in list.iter().enumerate() {
        let at = format!("{field}[{index}]");
        let Some(kind) = filter.kind else {
            findings.add(
                Code::MissingField,
                format!("{at}.type"),
                "is missing",
                "set the type of the filter",
            );
            continue;
        };
        // Mirrors may be repeated.
        if !seen.insert(kind) && kind != FilterType::RequestMirror {
            findings.add(
                Code::DuplicateName,
                &at,
                format!("a filter of type {kind:?} is listed twice"),
                "merge the two",
            );
        }
        one(filter, kind, place, &at, findings);
    }
    if seen.contains(&FilterType::RequestRedirect) && seen.contains(&FilterType::UrlRewrite) {
        let message = "RequestRedirect and URLRewrite exclude each other";
        findings.add(Code::ExclusiveFields, field, message, "remove one of them, or split the rule");
    }
}

fn one(filter: &Filter, kind: FilterType, place: FilterPlace, at: &str, findings: &mut Findings) {
    use FilterType::*;
    let fields = [
        (RequestHeaderModifier, "requestHeaderModifier", filter.request_header_modifier.is_some()),
        (ResponseHeaderModifier, "responseHeaderModifier", filter.response_header_modifier.is_some()),
        (RequestMirror, "requestMirror", filter.request_mirror.is_some()),
        (RequestRedirect, "requestRedirect", filter.request_redirect.is_some()),
        (UrlRewrite, "urlRewrite", filter.url_rewrite.is_some()),
        (Cors, "cors", filter.cors.is_some()),
        (ExtensionRef, "extensionRef", filter.extension_ref.is_some()),
    ];
    for (of, name, given) in fields {
        let field = format!("{at}.{name}");
        match (of == kind, given) {
            (true, false) => findings.add(
                Code::MissingField,
                field,
                "is missing",
                format!("add it, or change type {kind:?}"),
            ),
            (false, true) => findings.add(
                Code::FieldNotAllowed,
                field,
                format!("does not belong to type {kind:?}"),
                "remove it",
            ),
            _ => {}
        }
    }
    if matches!(kind, ExternalAuth | ExtensionRef) {
        let remedy = "remove the filter, or use an AuthorizationPolicy";
        return findings.add(
            Code::Unsupported,
            format!("{at}.type"),
            format!("{kind:?} is not supported"),
            remedy,
        );
    }
    let of_headers = matches!(kind, RequestHeaderModifier | ResponseHeaderModifier);
    if place == FilterPlace::HttpBackend && !of_headers {
        let message = format!("{kind:?} is not supported for single backends");
        return findings.add(Code::Unsupported, format!("{at}.type"), message, "move the filter to the rule");
    }
    if place == FilterPlace::Grpc && !of_headers && kind != RequestMirror {
        let message = format!("a GRPCRoute has no filters of type {kind:?}");
        return findings.add(Code::FieldNotAllowed, format!("{at}.type"), message, "use an HTTPRoute");
    }
    let modifiers = [
        (&filter.request_header_modifier, "requestHeaderModifier"),
        (&filter.response_header_modifier, "responseHeaderModifier"),
    ];
    for (modifier, name) in modifiers {
        modifier.iter().for_each(|of| headers(of, &format!("{at}.{name}"), findings));
    }
    let prefix = place == FilterPlace::Http { prefix: true };
    filter.request_mirror.iter().for_each(|of| mirror(of, &format!("{at}.requestMirror"), findings));
    filter
        .request_redirect
        .iter()
        .for_each(|of| redirect(of, prefix, &format!("{at}.requestRedirect"), findings));
    filter.url_rewrite.iter().for_each(|of| rewrite(of, prefix, &format!("{at}.urlRewrite"), findings));
    filter.cors.iter().for_each(|of| cors(of, &format!("{at}.cors"), findings));
}

fn headers(of: &HeaderFilter, field: &str, findings: &mut Findings) {
    for (list, name) in [(&of.set, "set"), (&of.add, "add")] {
        limit(list.len(), 16, &format!("{field}.{name}"), findings);
        for (index, header) in list.iter().enumerate() {
            let at = format!("{field}.{name}[{index}]");
            header_name(&header.name, &format!("{at}.name"), findings);
            if list[..index].iter().any(|other| other.name.eq_ignore_ascii_case(&header.name)) {
                let message = format!("{:?} is listed twice", header.name);
                findings.add(Code::DuplicateName, format!("{at}.name"), message, "remove one of them");
            }
            if header.value.is_empty() || header.value.contains(['\r', '\n', '\0']) {
                findings.add(
                    Code::InvalidHeader,
                    format!("{at}.value"),
                    "is not a valid value of a header",
                    "set a text of one line",
                );
            }
            formats::header_value(&header.value, &format!("{at}.value"), findings);
        }
    }
    limit(of.remove.len(), 16, &format!("{field}.remove"), findings);
    for (index, name) in of.remove.iter().enumerate() {
        header_name(name, &format!("{field}.remove[{index}]"), findings);
    }
}

fn mirror(of: &Mirror, field: &str, findings: &mut Findings) {
    backend(&of.backend_ref, &format!("{field}.backendRef"), findings);
    if of.percent.is_some() && of.fraction.is_some() {
        findings.add(
            Code::ExclusiveFields,
            field,
            "percent and fraction exclude each other",
            "remove one of them",
        );
    }
    if of.percent.is_some_and(|percent| !(0..=100).contains(&percent)) {
        findings.add(
            Code::InvalidPercentage,
            format!("{field}.percent"),
            "is not a percentage",
            "percentages go from 0 to 100",
        );
    }
    if let Some(share) = of.fraction {
        let denominator = share.denominator.unwrap_or(100);
        if denominator < 1 || !(0..=denominator).contains(&share.numerator) {
            let message = format!("{}/{denominator} is not between 0 and 1", share.numerator);
            findings.add(
                Code::InvalidPercentage,
                format!("{field}.fraction"),
                message,
                "use a denominator of at least the numerator",
            );
        }
    }
}

fn redirect(of: &Redirect, prefix: bool, field: &str, findings: &mut Findings) {
    if of.scheme.as_deref().is_some_and(|scheme| !matches!(scheme, "http" | "https")) {
        findings.add(
            Code::UnknownValue,
            format!("{field}.scheme"),
            "is neither http nor https",
            "use http or https",
        );
    }
    if let Some(name) = &of.hostname {
        hostname(name, false, &format!("{field}.hostname"), findings);
    }
    if let Some(number) = of.port {
        port(number, &format!("{field}.port"), findings);
    }
    if let Some(status) = of.status_code.filter(|status| !matches!(status, 301 | 302 | 303 | 307 | 308)) {
        let message = format!("{status} is not a redirect status");
        findings.add(
            Code::InvalidStatus,
            format!("{field}.statusCode"),
            message,
            "use 301, 302, 303, 307 or 308",
        );
    }
    of.path.iter().for_each(|of| path(of, prefix, &format!("{field}.path"), findings));
}

fn rewrite(of: &UrlRewrite, prefix: bool, field: &str, findings: &mut Findings) {
    if let Some(name) = &of.hostname {
        hostname(name, false, &format!("{field}.hostname"), findings);
    }
    if of.hostname.is_none() && of.path.is_none() {
        findings.add(Code::NoEffect, field, "has no effect", "set hostname or path");
    }
    of.path.iter().for_each(|of| path(of, prefix, &format!("{field}.path"), findings));
}

fn path(of: &PathModifier, prefix: bool, field: &str, findings: &mut Findings) {
    let (wanted, other) = match of.kind {
        None => {
            return findings.add(
                Code::MissingField,
                format!("{field}.type"),
                "is missing",
                "set the type of the replacement",
            );
        }
        Some(PathModifierType::ReplaceFullPath) => {
            (("replaceFullPath", &of.replace_full_path), ("replacePrefixMatch", &of.replace_prefix_match))
        }
        Some(PathModifierType::ReplacePrefixMatch) => {
            (("replacePrefixMatch", &of.replace_prefix_match), ("replaceFullPath", &of.replace_full_path))
        }
    };
    if wanted.1.is_none() {
        findings.add(
            Code::MissingField,
            format!("{field}.{}", wanted.0),
            "is missing",
            "add it, or change type",
        );
    }
    if other.1.is_some() {
        findings.add(
            Code::FieldNotAllowed,
            format!("{field}.{}", other.0),
            "does not belong to this type",
            "remove it",
        );
    }
    if wanted.1.as_ref().is_some_and(|path| path.len() > 1024 || path.contains(['\r', '\n', '\0'])) {
        findings.add(
            Code::InvalidPath,
            format!("{field}.{}", wanted.0),
            "is not a valid path",
            "use at most 1024 characters",
        );
    }
    if of.kind == Some(PathModifierType::ReplacePrefixMatch) && !prefix {
        let message = "requires exactly one match, of type PathPrefix";
        findings.add(Code::FieldNotAllowed, field, message, "split the rule, or use ReplaceFullPath");
    }
}

fn cors(of: &Cors, field: &str, findings: &mut Findings) {
    let lists = [
        (&of.allow_origins, "allowOrigins", 64),
        (&of.allow_methods, "allowMethods", 9),
        (&of.allow_headers, "allowHeaders", 64),
        (&of.expose_headers, "exposeHeaders", 64),
    ];
    for (list, name, max) in lists {
        let field = format!("{field}.{name}");
        limit(list.len(), max, &field, findings);
        if list.len() > 1 && list.iter().any(|value| value == "*") {
            findings.add(
                Code::ExclusiveFields,
                field,
                "\"*\" excludes all other values",
                "remove the others",
            );
        }
    }
    for (index, origin) in of.allow_origins.iter().enumerate() {
        let known = origin == "*" || origin.starts_with("http://") || origin.starts_with("https://");
        // The text becomes part of an expression.
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._~:/*[]%".contains(c);
        if !known || origin.len() > 253 || !origin.chars().all(plain) {
            let message = format!("{origin:?} is not an origin");
            findings.add(
                Code::InvalidValue,
                format!("{field}.allowOrigins[{index}]"),
                message,
                "use \"*\" or SCHEME://HOST[:PORT]",
            );
        }
    }
    if of.max_age == Some(0) {
        findings.add(
            Code::OutOfRange,
            format!("{field}.maxAge"),
            "0 is below 1",
            "use at least 1, or remove the field",
        );
    }
}
