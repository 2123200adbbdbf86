//! Validation of the actions of a VirtualService's rule other than routing: redirects, rewrites, retries, faults,
//! headers.

use skysail_core::{names::GRPC_STATUS, re2};

use super::{Code, Findings, formats, header_name, milliseconds, percent, port, regex};
use crate::api::{
    Duration,
    virtual_service::{HeaderOps, Headers, HttpFault, HttpRedirect, HttpRetry, HttpRewrite, IstioHttpRoute},
};

/// Envoy's retry conditions.
const RETRY_ON: &[&str] = &[
    "5xx",
    "gateway-error",
    "reset",
    "reset-before-request",
    "connect-failure",
    "envoy-ratelimited",
    "retriable-4xx",
    "refused-stream",
    "retriable-status-codes",
    "retriable-headers",
    "http3-post-connect-failure",
    "cancelled",
    "deadline-exceeded",
    "internal",
    "resource-exhausted",
    "unavailable",
];

pub(super) fn http_redirect(redirect: &HttpRedirect, field: &str, findings: &mut Findings) {
    let empty = [&redirect.uri, &redirect.authority, &redirect.prefix_rewrite, &redirect.scheme]
        .iter()
        .all(|text| text.is_empty());
    if empty && redirect.port.is_none() && redirect.derive_port.is_none() {
        findings.add(
            Code::EmptyField,
            field,
            "has no effect",
            "set uri, authority, port, scheme or prefixRewrite",
        );
    }
    if !redirect.uri.is_empty() && !redirect.prefix_rewrite.is_empty() {
        findings.add(
            Code::ExclusiveFields,
            format!("{field}.prefixRewrite"),
            "is not allowed together with uri",
            "remove one of them",
        );
    }
    if let Some(number) = redirect.port {
        port(number, &format!("{field}.port"), findings);
        if redirect.derive_port.is_some() {
            findings.add(
                Code::ExclusiveFields,
                format!("{field}.derivePort"),
                "is not allowed together with port",
                "remove one of them",
            );
        }
    }
    if !redirect.scheme.is_empty() && !matches!(redirect.scheme.as_str(), "http" | "https") {
        let message = format!("{:?} is neither http nor https", redirect.scheme);
        findings.add(Code::UnknownValue, format!("{field}.scheme"), message, "use http or https");
    }
    if !matches!(redirect.redirect_code, 0 | 301 | 302 | 303 | 307 | 308) {
        let message = format!("{} is not a redirect status", redirect.redirect_code);
        findings.add(
            Code::InvalidStatus,
            format!("{field}.redirectCode"),
            message,
            "use 301, 302, 303, 307 or 308",
        );
    }
}

pub(super) fn http_rewrite(
    rewrite: &HttpRewrite,
    route: &IstioHttpRoute,
    field: &str,
    findings: &mut Findings,
) {
    if rewrite.uri.is_empty() && rewrite.authority.is_empty() && rewrite.uri_regex_rewrite.is_none() {
        findings.add(Code::EmptyField, field, "has no effect", "set uri, authority or uriRegexRewrite");
    }
    if let Some(by_regex) = &rewrite.uri_regex_rewrite {
        let field = format!("{field}.uriRegexRewrite");
        if !rewrite.uri.is_empty() {
            findings.add(
                Code::ExclusiveFields,
                &field,
                "is not allowed together with uri",
                "remove one of them",
            );
        }
        regex(&by_regex.pattern, &format!("{field}.match"), findings);
        rewrite_groups(&by_regex.pattern, &by_regex.rewrite, &format!("{field}.rewrite"), findings);
    }
    let sets =
        route.headers.iter().flat_map(|headers| headers.request.set.keys().chain(headers.request.add.keys()));
    let authorities =
        sets.filter(|name| is_authority(name)).count() + usize::from(!rewrite.authority.is_empty());
    if authorities > 1 {
        findings.add(
            Code::ExclusiveFields,
            format!("{field}.authority"),
            "the authority is set more than once",
            "set it in one place",
        );
    }
}

/// Checks that the expression has the groups of the replacement: `\3` needs a third group.
fn rewrite_groups(pattern: &str, rewrite: &str, field: &str, findings: &mut Findings) {
    let Ok(pattern) = re2::compile(pattern) else { return };
    let groups = pattern.captures_len() - 1;
    let mut rest = rewrite.chars();
    while let Some(c) = rest.next() {
        if c != '\\' {
            continue;
        }
        match rest.next().map(|c| (c, c.to_digit(10))) {
            Some((_, Some(group))) if group as usize > groups => {
                let message = format!("\\{group} refers to a group that the expression does not have");
                findings.add(
                    Code::InvalidRegex,
                    field,
                    message,
                    format!("the highest group of the expression is {groups}"),
                );
            }
            Some((_, Some(_)) | ('\\', None)) => {}
            _ => findings.add(
                Code::InvalidRegex,
                field,
                "\\ without a group number",
                "write \\1 to \\9 for groups, \\\\ for a backslash",
            ),
        }
    }
}

/// Checks retry conditions and attempts.
pub(super) fn retries(retry: &HttpRetry, field: &str, findings: &mut Findings) {
    if retry.attempts < 0 {
        findings.add(
            Code::OutOfRange,
            format!("{field}.attempts"),
            format!("{} is below 0", retry.attempts),
            "use 0 or more",
        );
    }
    if retry.attempts == 0 && (!retry.retry_on.is_empty() || retry.per_try_timeout.is_some()) {
        findings.add(
            Code::RetriesDisabled,
            format!("{field}.attempts"),
            "is 0, so the other retry settings have no effect",
            "set attempts, or remove the other settings to disable retries",
        );
    }
    milliseconds(retry.per_try_timeout, &format!("{field}.perTryTimeout"), findings);
    milliseconds(retry.backoff, &format!("{field}.backoff"), findings);
    for condition in retry.retry_on.split(',').map(str::trim).filter(|condition| !condition.is_empty()) {
        let code = condition.parse::<u32>().is_ok_and(|code| (100..600).contains(&code));
        if !code && !RETRY_ON.contains(&condition) {
            let near = crate::spelling::nearest(condition, RETRY_ON);
            let remedy = near.map_or_else(
                || format!("use HTTP status codes and {}", RETRY_ON.join(", ")),
                |near| format!("did you mean {near}?"),
            );
            findings.add(
                Code::UnknownValue,
                format!("{field}.retryOn"),
                format!("{condition:?} is not a retry condition"),
                remedy,
            );
        }
    }
}

/// Reports a per-try timeout longer than the timeout of the whole request, which ends the request first.
pub(super) fn per_try_timeout(
    route: &IstioHttpRoute,
    retry: &HttpRetry,
    field: &str,
    findings: &mut Findings,
) {
    let whole = route.timeout.filter(|timeout| *timeout > Duration::ZERO);
    if let (Some(whole), Some(one)) = (whole, retry.per_try_timeout)
        && one > whole
    {
        let message = format!("is longer than the route's timeout of {whole}, which ends the request first");
        let field = format!("{field}.retries.perTryTimeout");
        findings.add(Code::RetryTimeout, field, message, "set a shorter perTryTimeout or a longer timeout");
    }
}

pub(super) fn http_fault(fault: &HttpFault, field: &str, findings: &mut Findings) {
    if fault.delay.is_none() && fault.abort.is_none() {
        findings.add(Code::EmptyField, field, "has no effect", "set delay or abort");
    }
    if let Some(delay) = &fault.delay {
        let field = format!("{field}.delay");
        if delay.fixed_delay.is_none() {
            findings.add(
                Code::MissingField,
                format!("{field}.fixedDelay"),
                "is missing",
                "set a duration, such as 5s",
            );
        }
        milliseconds(delay.fixed_delay, &format!("{field}.fixedDelay"), findings);
        if let Some(share) = &delay.percentage {
            percent(share.value, &format!("{field}.percentage.value"), findings);
        }
        percent(f64::from(delay.percent), &format!("{field}.percent"), findings);
    }
    if let Some(abort) = &fault.abort {
        let field = format!("{field}.abort");
        let given = [abort.http_status.is_some(), abort.grpc_status.is_some(), abort.http2_error.is_some()];
        if given.iter().filter(|given| **given).count() != 1 {
            findings.add(
                Code::ExclusiveFields,
                &field,
                "must have exactly one of httpStatus and grpcStatus",
                "set one of them",
            );
        }
        if let Some(code) = abort.http_status {
            status(code, 599, &format!("{field}.httpStatus"), findings);
        }
        if let Some(name) = abort.grpc_status.as_ref().filter(|name| !GRPC_STATUS.contains(&name.as_str())) {
            let remedy = format!("use one of {}", GRPC_STATUS.join(", "));
            findings.add(
                Code::InvalidStatus,
                format!("{field}.grpcStatus"),
                format!("{name:?} is not a gRPC status"),
                remedy,
            );
        }
        if let Some(share) = &abort.percentage {
            percent(share.value, &format!("{field}.percentage.value"), findings);
        }
    }
}

pub(super) fn status(code: u32, highest: u32, field: &str, findings: &mut Findings) {
    if !(200..=highest).contains(&code) {
        findings.add(
            Code::InvalidStatus,
            field,
            format!("{code} is not a valid response status"),
            format!("use 200 to {highest}"),
        );
    }
}

pub(super) fn headers(headers: Option<&Headers>, field: &str, findings: &mut Findings) {
    let Some(headers) = headers else { return };
    header_ops(&headers.request, &format!("{field}.request"), true, findings);
    header_ops(&headers.response, &format!("{field}.response"), false, findings);
}

fn header_ops(ops: &HeaderOps, field: &str, is_request: bool, findings: &mut Findings) {
    for (list, what) in [(&ops.set, "set"), (&ops.add, "add")] {
        for (name, value) in list {
            let field = skysail_yaml::join(&format!("{field}.{what}"), name);
            check_changeable(name, &field, is_request, findings);
            if value.bytes().any(|byte| byte < b' ' && byte != b'\t' || byte == 0x7f) {
                findings.add(
                    Code::InvalidHeader,
                    &field,
                    "the value contains control characters",
                    "remove them",
                );
            }
            formats::header_value(value, &field, findings);
        }
    }
    for (index, name) in ops.remove.iter().enumerate() {
        check_changeable(name, &format!("{field}.remove[{index}]"), false, findings);
    }
}

/// Checks the name of a header that an operation changes. Pseudo-headers and the host may not be changed,
/// with one exception: with `host_too` the operation may set the host.
fn check_changeable(name: &str, field: &str, host_too: bool, findings: &mut Findings) {
    if is_authority(name) && host_too {
    } else if name.starts_with(':') || name.eq_ignore_ascii_case("host") {
        findings.add(Code::ProtectedHeader, field, format!("{name:?} cannot be changed here"), "use rewrite");
    } else {
        header_name(name, field, findings);
    }
}

fn is_authority(name: &str) -> bool {
    name.eq_ignore_ascii_case(":authority") || name.eq_ignore_ascii_case("host")
}
