//! Validation of the kinds of Gateway API, as by the rules of its CRDs.

mod filters;
mod gateways;
mod routes;

pub(crate) use gateways::{
    backend_tls_policy, gateway_class, kubernetes_gateway, listener_set, reference_grant,
};
pub(crate) use routes::{grpc_route, http_route, tcp_route, tls_route};

use super::{Code, Findings, is_dns_name, is_label_text, port, regex};
use crate::api::gateway_api::{BackendRef, MatchType, NamedMatch, ParentReference};

/// Maximum weight of a backend.
const MAX_WEIGHT: i32 = 1_000_000;

/// Reports a list that is longer than its limit.
fn limit(length: usize, max: usize, field: &str, findings: &mut Findings) {
    if length > max {
        findings.add(
            Code::TooMany,
            field,
            format!("has {length} items, at most {max} are allowed"),
            "split the object",
        );
    }
}

/// Checks a host name with an optional `*.`. Addresses are not allowed.
fn hostname(name: &str, wildcard: bool, field: &str, findings: &mut Findings) {
    let bare = if wildcard { name.strip_prefix("*.").unwrap_or(name) } else { name };
    let strict = bare.split('.').all(|label| is_label_text(label, false));
    if !is_dns_name(bare) || !strict {
        let remedy =
            if wildcard { "use a DNS name in lower case, optionally with *." } else { "use a DNS name" };
        findings.add(Code::InvalidHost, field, format!("{name:?} is not a valid host name"), remedy);
    } else if bare.parse::<std::net::IpAddr>().is_ok() {
        findings.add(Code::InvalidHost, field, format!("{name:?} is an address"), "use a DNS name");
    }
}

fn hostnames(names: &[String], findings: &mut Findings) {
    limit(names.len(), 16, "spec.hostnames", findings);
    for (index, name) in names.iter().enumerate() {
        hostname(name, true, &format!("spec.hostnames[{index}]"), findings);
    }
}

fn parents(list: &[ParentReference], findings: &mut Findings) {
    if list.is_empty() {
        findings.add(
            Code::RouteWithoutParent,
            "spec.parentRefs",
            "is missing, so the route has no effect",
            "add a parent",
        );
    }
    limit(list.len(), 32, "spec.parentRefs", findings);
    for (index, parent) in list.iter().enumerate() {
        let field = format!("spec.parentRefs[{index}]");
        if parent.name.is_empty() {
            findings.add(
                Code::MissingField,
                format!("{field}.name"),
                "is missing",
                "set the name of the parent",
            );
        }
        if let Some(number) = parent.port {
            port(number, &format!("{field}.port"), findings);
        }
        if list[..index].contains(parent) {
            findings.add(
                Code::DuplicateName,
                &field,
                "is listed twice",
                "remove one of them, or set sectionName",
            );
        }
        let (group, kind) = parent.group_kind();
        let known = [
            ("gateway.networking.k8s.io", "Gateway"),
            ("gateway.networking.k8s.io", "ListenerSet"),
            ("", "Service"),
            ("networking.istio.io", "ServiceEntry"),
        ];
        if !known.contains(&(group, kind)) {
            let message = format!("parents of kind {kind} of group {group:?} have no effect");
            findings.add(
                Code::ParentWithoutEffect,
                &field,
                message,
                "use a Gateway, a ListenerSet, a Service or a ServiceEntry",
            );
        } else if parent.section_name.is_some() && group != "gateway.networking.k8s.io" {
            let field = format!("{field}.sectionName");
            findings.add(Code::NoEffect, field, "has no effect for this kind of parent", "use port");
        }
    }
}

fn backend(of: &BackendRef, field: &str, findings: &mut Findings) {
    if of.name.is_empty() {
        findings.add(
            Code::MissingField,
            format!("{field}.name"),
            "is missing",
            "set the name of the backend",
        );
    }
    match (of.port, of.group_kind()) {
        (Some(number), _) => port(number, &format!("{field}.port"), findings),
        (None, ("", "Service")) => {
            findings.add(
                Code::MissingField,
                format!("{field}.port"),
                "is missing",
                "set a port of the Service",
            );
        }
        _ => {}
    }
    if !(0..=MAX_WEIGHT).contains(&of.share()) {
        let message = format!("{} is not a weight", of.share());
        findings.add(
            Code::InvalidWeight,
            format!("{field}.weight"),
            message,
            format!("weights go from 0 to {MAX_WEIGHT}"),
        );
    }
    let (group, kind) = of.group_kind();
    if !matches!((group, kind), ("", "Service") | ("networking.istio.io", "Hostname")) {
        let message =
            format!("backends of kind {kind} of group {group:?} are not supported: requests get 500");
        findings.add(
            Code::UnsupportedBackend,
            field,
            message,
            "use a Service, or a Hostname of networking.istio.io",
        );
    }
}

fn backends(list: &[BackendRef], field: &str, findings: &mut Findings) {
    limit(list.len(), 16, field, findings);
    for (index, of) in list.iter().enumerate() {
        backend(of, &format!("{field}[{index}]"), findings);
    }
}

fn named_matches(list: &[NamedMatch], field: &str, is_header: bool, findings: &mut Findings) {
    limit(list.len(), 16, field, findings);
    for (index, of) in list.iter().enumerate() {
        let at = format!("{field}[{index}]");
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if of.name.is_empty() || of.name.len() > 256 || !of.name.bytes().all(token) {
            findings.add(
                Code::InvalidName,
                format!("{at}.name"),
                format!("{:?} is not a valid name", of.name),
                "",
            );
        }
        let same = |other: &NamedMatch| match is_header {
            true => other.name.eq_ignore_ascii_case(&of.name),
            false => other.name == of.name,
        };
        if list[..index].iter().any(same) {
            findings.add(
                Code::DuplicateName,
                format!("{at}.name"),
                format!("{:?} is matched twice", of.name),
                "remove one of them",
            );
        }
        if of.value.is_empty() {
            findings.add(
                Code::MissingField,
                format!("{at}.value"),
                "is missing",
                "set the value to compare with",
            );
        } else if of.kind == MatchType::RegularExpression {
            regex(&of.value, &format!("{at}.value"), findings);
        }
    }
}
