//! Validation of VirtualServices.

use super::{
    Code, Finding, Findings, export_to, header_name, host, milliseconds, percent, port,
    route_actions::{headers, http_fault, http_redirect, http_rewrite, per_try_timeout, retries, status},
    security::is_cidr,
    shadowed, string_match,
};
use crate::api::{
    StringMatch, VirtualService,
    gateway_api::INTERNAL,
    virtual_service::{
        Destination, HttpDestination, HttpMatchRequest, IstioHttpRoute, L4Destination, L4Match,
    },
};

/// Checks a VirtualService.
pub(crate) fn virtual_service(spec: &VirtualService) -> Vec<Finding> {
    let mut findings = Findings::default();
    hosts(spec, &mut findings);
    if spec.hosts.is_empty() {
        delegate(spec, &mut findings);
    }
    export_to(&spec.export_to, "spec.exportTo", &mut findings);
    for (index, name) in spec.gateways.iter().enumerate().filter(|(_, name)| name.contains(INTERNAL)) {
        let message = format!("{name:?} is made from a Gateway of Gateway API, and has no fixed name");
        let remedy = "use an HTTPRoute, or a Gateway of Istio's API";
        findings.add(Code::InternalGateway, format!("spec.gateways[{index}]"), message, remedy);
    }
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
    shadowed::connections(spec, &mut findings);
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

fn http_route(route: &IstioHttpRoute, field: &str, findings: &mut Findings) {
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
        if let Some(body) =
            direct.body.as_ref().filter(|body| body.bytes.is_some() && body.decoded().is_none())
        {
            let message = format!("{:?} is not Base64", body.bytes.as_deref().unwrap_or_default());
            findings.add(
                Code::InvalidValue,
                at("directResponse.body.bytes"),
                message,
                "use string for a text",
            );
        }
    }
    milliseconds(route.timeout, &at("timeout"), findings);
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
fn action(route: &IstioHttpRoute, field: &str, findings: &mut Findings) {
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

fn http_match(matched: &HttpMatchRequest, field: &str, findings: &mut Findings) {
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
