//! Validation of VirtualServices.

use skysail_core::names::GRPC_STATUS;

use super::{
    Code, Finding, Findings, export_to, header_name, host, percent, port, positive, regex, security::is_cidr,
    shadowed, string_match,
};
use crate::api::{
    Duration, StringMatch, VirtualService,
    virtual_service::{
        Destination, HeaderOps, Headers, HttpDestination, HttpFault, HttpMatch, HttpRedirect, HttpRetry,
        HttpRewrite, HttpRoute, L4Destination, L4Match,
    },
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

/// Checks a VirtualService.
pub(crate) fn virtual_service(spec: &VirtualService) -> Vec<Finding> {
    let mut findings = Findings::default();
    hosts(spec, &mut findings);
    if spec.hosts.is_empty() {
        delegate(spec, &mut findings);
    }
    export_to(&spec.export_to, "spec.exportTo", &mut findings);
    if spec.http.is_empty() && spec.tls.is_empty() && spec.tcp.is_empty() {
        findings.add(Code::MissingField, "spec", "has no routes", "add http, tls or tcp");
    }
    for (index, route) in spec.http.iter().enumerate() {
        http_route(route, &format!("spec.http[{index}]"), &mut findings);
    }
    for (index, delegate) in
        spec.http.iter().enumerate().filter_map(|(i, http)| Some((i, http.delegate.as_ref()?)))
    {
        if delegate.name.is_empty() {
            let field = format!("spec.http[{index}].delegate.name");
            findings.add(
                Code::MissingField,
                field,
                "is missing",
                "set the name of a VirtualService without hosts",
            );
        }
    }
    shadowed::rules(&spec.http, &mut findings);
    for (index, route) in spec.tls.iter().enumerate() {
        let field = format!("spec.tls[{index}]");
        if route.matches.is_empty() {
            findings.add(
                Code::MissingField,
                format!("{field}.match"),
                "is missing",
                "add a match with sniHosts",
            );
        }
        for (at, found) in route.matches.iter().enumerate() {
            let field = format!("{field}.match[{at}]");
            if found.sni_hosts.is_empty() {
                findings.add(
                    Code::MissingField,
                    format!("{field}.sniHosts"),
                    "is missing",
                    "add the server names",
                );
            }
            server_names(spec, &found.sni_hosts, &field, &mut findings);
            l4_match(found, &field, &mut findings);
        }
        l4_destinations(&route.route, &field, &mut findings);
    }
    for (index, route) in spec.tcp.iter().enumerate() {
        let field = format!("spec.tcp[{index}]");
        for (at, found) in route.matches.iter().enumerate() {
            let field = format!("{field}.match[{at}]");
            if !found.sni_hosts.is_empty() {
                findings.add(
                    Code::FieldNotAllowed,
                    format!("{field}.sniHosts"),
                    "is not allowed in tcp",
                    "use tls",
                );
            }
            l4_match(found, &field, &mut findings);
        }
        l4_destinations(&route.route, &field, &mut findings);
    }
    findings.done()
}

/// Checks a VirtualService without hosts, which has rules for others that delegate to it.
fn delegate(spec: &VirtualService, findings: &mut Findings) {
    let message = "is not allowed in a VirtualService without hosts, which is a delegate";
    if !spec.gateways.is_empty() {
        findings.add(
            Code::NotADelegate,
            "spec.gateways",
            message,
            "add the hosts, or remove it: the gateways are those of the root",
        );
    }
    for (name, given) in [("tls", !spec.tls.is_empty()), ("tcp", !spec.tcp.is_empty())] {
        if given {
            findings.add(Code::NotADelegate, format!("spec.{name}"), message, "add the hosts, or use http");
        }
    }
    for (index, _) in spec.http.iter().enumerate().filter(|(_, http)| http.delegate.is_some()) {
        let message = "is not allowed in a delegate: delegation has one level";
        findings.add(
            Code::NotADelegate,
            format!("spec.http[{index}].delegate"),
            message,
            "name the rules here",
        );
    }
}

fn hosts(spec: &VirtualService, findings: &mut Findings) {
    for (index, name) in spec.hosts.iter().enumerate() {
        let field = format!("spec.hosts[{index}]");
        host(name, &field, findings);
        if spec.hosts[..index].contains(name) {
            findings.add(
                Code::DuplicateName,
                &field,
                format!("{name:?} is defined twice"),
                "remove one of them",
            );
        }
        let mesh_wide = name == "*" && spec.is_for_mesh();
        if mesh_wide {
            findings.add(
                Code::WildcardHost,
                &field,
                "\"*\" matches every host of the mesh",
                "list the hosts, or set gateways",
            );
        }
    }
}

/// Checks that server names belong to the hosts of the VirtualService.
fn server_names(spec: &VirtualService, names: &[String], field: &str, findings: &mut Findings) {
    for (index, name) in names.iter().enumerate() {
        let field = format!("{field}.sniHosts[{index}]");
        host(name, &field, findings);
        let name = name.to_ascii_lowercase();
        if !spec.hosts.iter().any(|host| crate::world::host_matches(&host.to_ascii_lowercase(), &name)) {
            let message = format!("{name:?} is no subset of the hosts");
            findings.add(Code::SniHostNotCovered, field, message, "use server names below spec.hosts");
        }
    }
}

/// Checks a match of connections.
fn l4_match(found: &L4Match, field: &str, findings: &mut Findings) {
    if let Some(number) = found.port {
        port(number, &format!("{field}.port"), findings);
    }
    for (index, subnet) in found.destination_subnets.iter().enumerate() {
        if !is_cidr(subnet) {
            let message = format!("{subnet:?} is neither an IP address nor a CIDR block");
            let field = format!("{field}.destinationSubnets[{index}]");
            findings.add(
                Code::InvalidAddress,
                field,
                message,
                "write an address, or a block such as 10.0.0.0/8",
            );
        }
    }
    if !found.source_subnet.is_empty() {
        let message = "has no effect, neither here nor in Istio";
        findings.add(
            Code::NoEffect,
            format!("{field}.sourceSubnet"),
            message,
            "use sourceLabels or sourceNamespace",
        );
    }
}

fn http_route(route: &HttpRoute, field: &str, findings: &mut Findings) {
    action(route, field, findings);
    for (index, matched) in route.matches.iter().enumerate() {
        http_match(matched, &format!("{field}.match[{index}]"), findings);
    }
    destinations(&route.route, field, findings);
    let at = |name: &str| format!("{field}.{name}");
    if let Some(redirect) = &route.redirect {
        http_redirect(redirect, &at("redirect"), findings);
    }
    if let Some(direct) = &route.direct_response {
        status(direct.status, 599, &at("directResponse.status"), findings);
        if direct.body.as_ref().is_some_and(|body| body.string.is_some() == body.bytes.is_some()) {
            let field = at("directResponse.body");
            findings.add(
                Code::ExclusiveFields,
                field,
                "must have exactly one of string and bytes",
                "set one of them",
            );
        }
    }
    if let Some(rewrite) = &route.rewrite {
        http_rewrite(rewrite, route, &at("rewrite"), findings);
    }
    if let Some(retry) = &route.retries {
        retries(retry, &at("retries"), findings);
        per_try_timeout(route, retry, field, findings);
    }
    if let Some(fault) = &route.fault {
        http_fault(fault, &at("fault"), findings);
    }
    headers(route.headers.as_ref(), &at("headers"), findings);
    for (index, origin) in route.cors_policy.iter().flat_map(|cors| &cors.allow_origins).enumerate() {
        string_match(origin, &at(&format!("corsPolicy.allowOrigins[{index}]")), false, findings);
    }
    for (index, mirror) in route.mirrors.iter().enumerate() {
        destination(&mirror.destination, &at(&format!("mirrors[{index}].destination")), findings);
        if let Some(share) = &mirror.percentage {
            percent(share.value, &at(&format!("mirrors[{index}].percentage.value")), findings);
        }
    }
    if let Some(mirror) = &route.mirror {
        destination(mirror, &at("mirror"), findings);
        if !route.mirrors.is_empty() {
            findings.add(
                Code::ExclusiveFields,
                at("mirror"),
                "is not allowed together with mirrors",
                "remove mirror",
            );
        }
    }
    if let Some(share) = &route.mirror_percentage {
        percent(share.value, &at("mirrorPercentage.value"), findings);
    }
}

/// Checks that a rule has exactly one action.
fn action(route: &HttpRoute, field: &str, findings: &mut Findings) {
    let actions = [
        ("route", !route.route.is_empty()),
        ("redirect", route.redirect.is_some()),
        ("directResponse", route.direct_response.is_some()),
        ("delegate", route.delegate.is_some()),
    ];
    let given: Vec<&str> = actions.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    match given[..] {
        [] => findings.add(
            Code::RouteWithoutAction,
            field,
            "has no action",
            "add route, redirect, directResponse or delegate",
        ),
        [_] => {}
        [first, ref rest @ ..] => {
            let message = format!("{first} and {} exclude each other", rest.join(" and "));
            findings.add(Code::ExclusiveFields, field, message, "remove one of them, or split the rule");
        }
    }
    let away = route.redirect.is_some() || route.direct_response.is_some();
    if away && route.rewrite.is_some() {
        findings.add(
            Code::ExclusiveFields,
            format!("{field}.rewrite"),
            "is not allowed together with redirect or directResponse",
            "remove it",
        );
    }
    if route.redirect.is_some() && route.fault.is_some() {
        findings.add(
            Code::ExclusiveFields,
            format!("{field}.fault"),
            "is not allowed together with redirect",
            "remove it",
        );
    }
}

fn http_match(matched: &HttpMatch, field: &str, findings: &mut Findings) {
    let at = |name: &str| format!("{field}.{name}");
    let parts = [
        ("uri", &matched.uri),
        ("scheme", &matched.scheme),
        ("method", &matched.method),
        ("authority", &matched.authority),
    ];
    for (name, part) in parts {
        if let Some(part) = part {
            string_match(part, &at(name), false, findings);
        }
    }
    for (list, name) in [(&matched.headers, "headers"), (&matched.without_headers, "withoutHeaders")] {
        for (header, part) in list {
            let field = skysail_yaml::join(&at(name), header);
            let claim = header.strip_prefix("@request.auth.claims");
            if claim.is_some_and(|rest| rest.starts_with(['.', '['])) {
                // Gateways match claims of tokens that a RequestAuthentication has verified.
                string_match(part, &field, true, findings);
                continue;
            }
            if header.starts_with('@') {
                findings.add(
                    Code::InvalidValue,
                    &field,
                    "is not a claim of a token",
                    "write @request.auth.claims.NAME",
                );
                continue;
            }
            header_name(header, &field, findings);
            string_match(part, &field, true, findings);
            if matches!(header.as_str(), "uri" | "scheme" | "method" | "authority") {
                let remedy = format!("use field {header} of the match");
                findings.add(Code::NoEffect, &field, "is ignored: it is not a header", remedy);
            }
        }
    }
    for (name, part) in &matched.query_params {
        string_match(part, &skysail_yaml::join(&at("queryParams"), name), true, findings);
    }
    if let Some(number) = matched.port {
        port(number, &at("port"), findings);
    }
    if let Some(uri) = &matched.uri {
        path(uri, &at("uri"), findings);
    }
    if let Some(StringMatch::Exact(method)) = &matched.method
        && *method != method.to_uppercase()
    {
        let message = format!("{method:?} never matches: methods are upper case");
        findings.add(Code::NeverMatches, at("method"), message, format!("write {}", method.to_uppercase()));
    }
}

/// Reports path conditions that no request meets, and those with a `*`, which is not a wildcard.
fn path(uri: &StringMatch, field: &str, findings: &mut Findings) {
    let (StringMatch::Exact(path) | StringMatch::Prefix(path)) = uri else { return };
    if path.starts_with(['\u{201c}', '\u{201d}', '\u{2018}', '\u{2019}']) {
        let message = format!("{path:?} never matches: typographic quotes are part of the text");
        findings.add(Code::NeverMatches, field, message, "use the quotes \" or '");
    } else if !path.starts_with('/') {
        let message = format!("{path:?} never matches: paths begin with /");
        findings.add(Code::NeverMatches, field, message, format!("write /{path}"));
    } else if path.contains('?') {
        let message = format!("{path:?} never matches: the query is not part of uri");
        findings.add(Code::NeverMatches, field, message, "match on queryParams");
    } else if path.contains('*') {
        let message = format!("in {path:?} the * is an ordinary character, not a wildcard");
        findings.add(Code::LiteralPattern, field, message, "use prefix without *, or regex");
    }
}

fn destinations(list: &[HttpDestination], field: &str, findings: &mut Findings) {
    for (index, target) in list.iter().enumerate() {
        let field = format!("{field}.route[{index}]");
        destination(&target.destination, &format!("{field}.destination"), findings);
        headers(target.headers.as_ref(), &format!("{field}.headers"), findings);
    }
    if list.iter().any(|target| target.weight.is_some()) {
        for (index, _) in
            list.iter().enumerate().filter(|(_, target)| target.weight.is_none() && list.len() > 1)
        {
            let message = "is missing beside destinations with a weight, so this one gets no requests";
            findings.add(
                Code::MissingWeight,
                format!("{field}.route[{index}].weight"),
                message,
                "set a weight",
            );
        }
    }
    weights(list.iter().map(|target| target.weight.unwrap_or_default()), field, findings);
}

fn l4_destinations(list: &[L4Destination], field: &str, findings: &mut Findings) {
    if list.is_empty() {
        findings.add(Code::MissingField, format!("{field}.route"), "is missing", "add a destination");
    }
    for (index, target) in list.iter().enumerate() {
        destination(&target.destination, &format!("{field}.route[{index}].destination"), findings);
    }
    weights(list.iter().map(|target| target.weight), field, findings);
}

fn weights(list: impl Iterator<Item = i32>, field: &str, findings: &mut Findings) {
    let list: Vec<i32> = list.collect();
    let mut sum = 0i64;
    for (index, weight) in list.iter().enumerate() {
        sum += i64::from(*weight);
        if *weight < 0 {
            findings.add(
                Code::InvalidWeight,
                format!("{field}.route[{index}].weight"),
                format!("{weight} is below 0"),
                "use 0 or more",
            );
        }
    }
    if list.len() > 1 && sum == 0 {
        findings.add(
            Code::ZeroWeights,
            format!("{field}.route"),
            "all weights are 0",
            "set a weight of at least one destination",
        );
    }
    if sum > i64::from(u32::MAX) {
        findings.add(
            Code::InvalidWeight,
            format!("{field}.route"),
            "the sum of the weights exceeds 4294967295",
            "use smaller weights",
        );
    }
}

fn destination(target: &Destination, field: &str, findings: &mut Findings) {
    let name = &target.host;
    if name == "*" {
        findings.add(
            Code::InvalidHost,
            format!("{field}.host"),
            format!("{name:?} is not a single host"),
            "use the name of one service",
        );
    } else {
        host(name, &format!("{field}.host"), findings);
    }
    if let Some(selector) = &target.port {
        port(selector.number, &format!("{field}.port.number"), findings);
    }
    if !target.subset.is_empty() && !super::is_label_text(&target.subset, false) {
        findings.add(
            Code::InvalidName,
            format!("{field}.subset"),
            format!("{:?} is not a valid subset name", target.subset),
            "use the name of a subset of the DestinationRule",
        );
    }
}

fn http_redirect(redirect: &HttpRedirect, field: &str, findings: &mut Findings) {
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

fn http_rewrite(rewrite: &HttpRewrite, route: &HttpRoute, field: &str, findings: &mut Findings) {
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
    let Ok(pattern) = regex::Regex::new(pattern) else { return };
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
    positive(retry.per_try_timeout, &format!("{field}.perTryTimeout"), findings);
    positive(retry.backoff, &format!("{field}.backoff"), findings);
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
fn per_try_timeout(route: &HttpRoute, retry: &HttpRetry, field: &str, findings: &mut Findings) {
    let whole = route.timeout.filter(|timeout| *timeout > Duration::ZERO);
    if let (Some(whole), Some(one)) = (whole, retry.per_try_timeout)
        && one > whole
    {
        let message = format!("is longer than the route's timeout of {whole}, which ends the request first");
        let field = format!("{field}.retries.perTryTimeout");
        findings.add(Code::RetryTimeout, field, message, "set a shorter perTryTimeout or a longer timeout");
    }
}

fn http_fault(fault: &HttpFault, field: &str, findings: &mut Findings) {
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
        positive(delay.fixed_delay, &format!("{field}.fixedDelay"), findings);
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

fn status(code: u32, highest: u32, field: &str, findings: &mut Findings) {
    if !(200..=highest).contains(&code) {
        findings.add(
            Code::InvalidStatus,
            field,
            format!("{code} is not a valid response status"),
            format!("use 200 to {highest}"),
        );
    }
}

fn headers(headers: Option<&Headers>, field: &str, findings: &mut Findings) {
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
