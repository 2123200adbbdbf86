//! Validation of PeerAuthentication and AuthorizationPolicy.

use skysail_core::SpiffeId;
use skysail_yaml::{Node, Value, join};

use super::{Code, Finding, Findings};
use crate::api::{
    AuthorizationPolicy, Kind, MtlsMode, PeerAuthentication,
    destination_rule::WorkloadSelector,
    security::{Action, Condition, Operation, Rule, Source, TargetRef},
};
use crate::clause::{Clause, claim_path};

/// Methods of RFC 9110 and RFC 5789.
const METHODS: &[&str] = &["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];

/// Attributes that `when` may name. Those that end in `[` take a name in brackets; one that ends in `.` is a prefix.
const CONDITIONS: &[&str] = &[
    "request.headers[",
    "source.ip",
    "remote.ip",
    "source.namespace",
    "source.serviceAccount",
    "source.trustDomain",
    "source.principal",
    "request.auth.principal",
    "request.auth.audiences",
    "request.auth.presenter",
    "request.auth.claims[",
    "destination.ip",
    "destination.port",
    "connection.sni",
    "experimental.envoy.filters.",
];

/// Checks a PeerAuthentication.
pub(crate) fn peer_authentication(spec: &PeerAuthentication) -> Vec<Finding> {
    let mut findings = Findings::default();
    selector(spec.selector.as_ref(), &mut findings);
    let wide = spec.selector.as_ref().is_none_or(|selector| selector.match_labels.is_empty());
    if wide && !spec.port_level_mtls.is_empty() {
        let remedy = "add selector.matchLabels, or use mtls";
        findings.add(
            Code::MissingField,
            "spec.portLevelMtls",
            "requires a selector: it applies to the ports of selected workloads",
            remedy,
        );
    }
    let no_mode = spec.mtls.is_none_or(|mtls| mtls.mode == MtlsMode::Unset);
    if no_mode && spec.port_level_mtls.is_empty() {
        findings.add(
            Code::PolicyWithoutEffect,
            "spec.mtls.mode",
            "is not set, so the policy has no effect",
            "set mode, such as STRICT",
        );
    }
    for number in spec.port_level_mtls.keys() {
        port_text(number, &format!("spec.portLevelMtls.{number}"), &mut findings);
    }
    findings.done()
}

/// Checks an AuthorizationPolicy.
pub(crate) fn authorization_policy(spec: &AuthorizationPolicy) -> Vec<Finding> {
    let mut findings = Findings::default();
    selector(spec.selector.as_ref(), &mut findings);
    let attached = spec.target_ref.is_some() || !spec.target_refs.is_empty();
    attachment(spec.selector.is_some(), spec.target_ref.as_ref(), &spec.target_refs, &mut findings);
    match spec.action {
        Action::Custom if spec.provider.as_ref().is_none_or(|provider| provider.name.is_empty()) => {
            let remedy = "set the name of a provider of the mesh configuration";
            findings.add(
                Code::MissingField,
                "spec.provider.name",
                "is missing; action CUSTOM requires it",
                remedy,
            );
        }
        action if action != Action::Custom && spec.provider.is_some() => {
            findings.add(
                Code::FieldNotAllowed,
                "spec.provider",
                "is allowed with action CUSTOM only",
                "remove it, or set action: CUSTOM",
            );
        }
        _ => {}
    }
    if spec.action == Action::Deny && spec.rules.is_empty() {
        findings.add(
            Code::DenyNothing,
            "spec.rules",
            "is empty, so the policy denies no request",
            "add `- {}` to deny every request",
        );
    }
    if spec.action == Action::Allow && spec.rules.is_empty() && !attached {
        let message = "has no rules: requests that no other ALLOW policy matches are denied";
        findings.add(Code::DenyAll, "spec.rules", message, "add `- {}` to allow every request");
    }
    for (index, one) in spec.rules.iter().enumerate() {
        if spec.action == Action::Allow && *one == Rule::default() {
            let message = "matches every request, so the policy allows every client";
            findings.add(
                Code::AllowAll,
                format!("spec.rules[{index}]"),
                message,
                "add from, to or when to limit it",
            );
        }
        rule(one, &format!("spec.rules[{index}]"), &mut findings);
    }
    findings.done()
}

/// Reports fields of a policy without a value. They would count as absent, and the policy would match more than it
/// says: every client for `from:`, every workload of the namespace for `selector:`.
pub(crate) fn empty_fields(kind: Kind, root: &Node) -> Vec<Finding> {
    let mut findings = Findings::default();
    if (kind.is_policy() || kind == Kind::RateLimitPolicy)
        && let Some(spec) = root.get("spec")
    {
        empty_fields_of(spec, "spec", &mut findings);
    }
    findings.done()
}

fn empty_fields_of(node: &Node, at: &str, findings: &mut Findings) {
    match &node.value {
        Value::Map(entries) => {
            for entry in entries {
                let field = join(at, &entry.key);
                let is_empty_list = matches!(&entry.value.value, Value::List(items) if items.is_empty());
                if entry.value.value == Value::Null || is_empty_list && field != "spec.rules" {
                    let message = "has no value, and without it the policy would match more";
                    findings.add(Code::EmptyRuleField, &field, message, "set a value, or remove the field");
                }
                empty_fields_of(&entry.value, &field, findings);
            }
        }
        Value::List(items) => {
            for (index, item) in items.iter().enumerate() {
                empty_fields_of(item, &format!("{at}[{index}]"), findings);
            }
        }
        _ => {}
    }
}

/// Checks the objects that a policy is attached to.
pub(super) fn attachment(
    has_selector: bool,
    target: Option<&TargetRef>,
    targets: &[TargetRef],
    findings: &mut Findings,
) {
    if (target.is_some() || !targets.is_empty()) && has_selector {
        let message = "is not allowed together with targetRef or targetRefs";
        findings.add(Code::ExclusiveFields, "spec.selector", message, "remove one of them");
    }
    if target.is_some() && !targets.is_empty() {
        findings.add(
            Code::ExclusiveFields,
            "spec.targetRef",
            "is not allowed together with targetRefs",
            "remove it",
        );
    }
    let listed = targets.iter().enumerate();
    let listed = listed.map(|(index, target)| (format!("spec.targetRefs[{index}]"), target));
    let single = target.map(|target| ("spec.targetRef".to_owned(), target));
    for (field, target) in single.into_iter().chain(listed) {
        if target.name.is_empty() {
            findings.add(
                Code::MissingField,
                format!("{field}.name"),
                "is missing",
                "set the name of the object",
            );
        }
        match (&*target.group, &*target.kind) {
            ("gateway.networking.k8s.io", "Gateway") => {}
            ("gateway.networking.k8s.io", "GatewayClass")
            | ("" | "core", "Service")
            | ("networking.istio.io", "ServiceEntry") => {
                let message = format!(
                    "the policy has no effect on the {}: as in Istio, only waypoint proxies apply it",
                    target.kind
                );
                findings.add(
                    Code::TargetIgnored,
                    &field,
                    message,
                    "use selector to apply it to the workloads",
                );
            }
            _ => {
                let message = format!("{}/{} cannot be a target", target.group, target.kind);
                let remedy = "name a Gateway of group gateway.networking.k8s.io";
                findings.add(Code::InvalidTarget, format!("{field}.kind"), message, remedy);
            }
        }
    }
}

pub(super) fn selector(selector: Option<&WorkloadSelector>, findings: &mut Findings) {
    if selector.is_some_and(|selector| selector.match_labels.is_empty()) {
        let message = "is empty, so the policy applies to every workload of the namespace";
        findings.add(
            Code::EmptySelector,
            "spec.selector",
            message,
            "add matchLabels, or remove the selector",
        );
    }
    for (key, value) in selector.iter().flat_map(|selector| &selector.match_labels) {
        let field = skysail_yaml::join("spec.selector.matchLabels", key);
        if key.is_empty() || value.contains('*') || key.contains('*') {
            findings.add(
                Code::InvalidLabel,
                field,
                format!("{key}: {value} is not a label: wildcards are not supported"),
                "write the exact label",
            );
        }
    }
}

fn rule(rule: &Rule, field: &str, findings: &mut Findings) {
    for (index, from) in rule.from.iter().enumerate() {
        source(&from.source, &format!("{field}.from[{index}].source"), findings);
    }
    for (index, to) in rule.to.iter().enumerate() {
        operation(&to.operation, &format!("{field}.to[{index}].operation"), findings);
    }
    for (index, when) in rule.when.iter().enumerate() {
        condition(when, &format!("{field}.when[{index}]"), findings);
    }
}

fn source(source: &Source, field: &str, findings: &mut Findings) {
    if *source == Source::default() {
        findings.add(
            Code::EmptyRuleField,
            field,
            "is empty",
            "set a field of source, or remove `from` to match every source",
        );
    }
    let accounts = !source.service_accounts.is_empty() || !source.not_service_accounts.is_empty();
    let others = [&source.principals, &source.not_principals, &source.namespaces, &source.not_namespaces];
    if accounts && others.iter().any(|list| !list.is_empty()) {
        let message = "is not allowed together with principals or namespaces";
        findings.add(Code::ExclusiveFields, format!("{field}.serviceAccounts"), message, "use one of them");
    }
    for (list, name) in
        [(&source.service_accounts, "serviceAccounts"), (&source.not_service_accounts, "notServiceAccounts")]
    {
        for (index, account) in list.iter().enumerate() {
            if account.contains('*') || account.matches('/').count() > 1 {
                let message = format!("{account:?} is not a valid service account");
                findings.add(
                    Code::InvalidName,
                    format!("{field}.{name}[{index}]"),
                    message,
                    "write NAME or NAMESPACE/NAME",
                );
            }
        }
    }
    for (list, name) in [(&source.principals, "principals"), (&source.not_principals, "notPrincipals")] {
        for (index, value) in list.iter().enumerate() {
            principal(value, &format!("{field}.{name}[{index}]"), findings);
        }
    }
    for (list, name) in [
        (&source.ip_blocks, "ipBlocks"),
        (&source.not_ip_blocks, "notIpBlocks"),
        (&source.remote_ip_blocks, "remoteIpBlocks"),
        (&source.not_remote_ip_blocks, "notRemoteIpBlocks"),
    ] {
        for (index, block) in list.iter().enumerate().filter(|(_, block)| !is_cidr(block)) {
            let message = format!("{block:?} is neither an IP address nor a CIDR block");
            findings.add(
                Code::InvalidAddress,
                format!("{field}.{name}[{index}]"),
                message,
                "write 10.0.0.1 or 10.0.0.0/8",
            );
        }
    }
    let lists = [
        (&source.principals, "principals"),
        (&source.not_principals, "notPrincipals"),
        (&source.request_principals, "requestPrincipals"),
        (&source.not_request_principals, "notRequestPrincipals"),
        (&source.namespaces, "namespaces"),
        (&source.not_namespaces, "notNamespaces"),
        (&source.service_accounts, "serviceAccounts"),
        (&source.not_service_accounts, "notServiceAccounts"),
        (&source.trust_domains, "trustDomains"),
        (&source.not_trust_domains, "notTrustDomains"),
    ];
    no_empty_values(&lists, field, findings);
}

fn operation(operation: &Operation, field: &str, findings: &mut Findings) {
    if *operation == Operation::default() {
        findings.add(
            Code::EmptyRuleField,
            field,
            "is empty",
            "set a field of operation, or remove `to` to match every operation",
        );
    }
    for (list, name) in [(&operation.ports, "ports"), (&operation.not_ports, "notPorts")] {
        for (index, number) in list.iter().enumerate() {
            port_text(number, &format!("{field}.{name}[{index}]"), findings);
        }
    }
    for (list, name) in [(&operation.paths, "paths"), (&operation.not_paths, "notPaths")] {
        for (index, path) in list.iter().enumerate() {
            path_pattern(path, &format!("{field}.{name}[{index}]"), findings);
        }
    }
    for (list, name) in [(&operation.methods, "methods"), (&operation.not_methods, "notMethods")] {
        for (index, one) in list.iter().enumerate() {
            method(one, &format!("{field}.{name}[{index}]"), findings);
        }
    }
    for (list, name) in [(&operation.hosts, "hosts"), (&operation.not_hosts, "notHosts")] {
        for (index, host) in list.iter().enumerate().filter(|(_, host)| host.contains('/')) {
            let message = format!("{host:?} never matches: a host has no scheme and no path");
            findings.add(
                Code::NeverMatches,
                format!("{field}.{name}[{index}]"),
                message,
                "write the host name alone",
            );
        }
    }
    let lists = [
        (&operation.hosts, "hosts"),
        (&operation.not_hosts, "notHosts"),
        (&operation.methods, "methods"),
        (&operation.not_methods, "notMethods"),
        (&operation.paths, "paths"),
        (&operation.not_paths, "notPaths"),
    ];
    no_empty_values(&lists, field, findings);
}

/// Reports a principal that no peer can have. It never matches, so a DENY rule with it denies nothing.
fn principal(value: &str, field: &str, findings: &mut Findings) {
    if let Some(bare) = value.strip_prefix("spiffe://") {
        let message = "never matches: principals have no scheme";
        return findings.add(
            Code::NeverMatches,
            field,
            message,
            format!("write {bare:?}, without spiffe://"),
        );
    }
    let open = value.starts_with('*') || value.ends_with('*');
    let inner = value.strip_prefix('*').or_else(|| value.strip_suffix('*')).unwrap_or(value);
    if inner.contains('*') {
        let message =
            format!("{value:?} never matches: only the first or the last character can be the wildcard *");
        findings.add(
            Code::NeverMatches,
            field,
            message,
            "use namespaces or serviceAccounts, or list the principals",
        );
    } else if !open && !value.is_empty() && format!("spiffe://{value}").parse::<SpiffeId>().is_err() {
        let message = format!("{value:?} never matches: it is not a principal");
        findings.add(
            Code::NeverMatches,
            field,
            message,
            "write TRUST_DOMAIN/ns/NAMESPACE/sa/SERVICE_ACCOUNT",
        );
    }
}

fn method(method: &str, field: &str, findings: &mut Findings) {
    let upper = method.to_uppercase();
    if upper != method {
        let message = format!("{method:?} never matches: methods are upper case");
        findings.add(Code::NeverMatches, field, message, format!("write {upper}"));
    } else if !METHODS.contains(&method) && !method.contains('*') {
        let near = METHODS.iter().find(|known| crate::spelling::distance(known, method) == 1);
        if let Some(near) = near {
            let message = format!("{method:?} is not a method of HTTP");
            findings.add(Code::NeverMatches, field, message, format!("did you mean {near}?"));
        }
    }
}

fn no_empty_values(lists: &[(&Vec<String>, &str)], field: &str, findings: &mut Findings) {
    for (list, name) in lists {
        for (index, _) in list.iter().enumerate().filter(|(_, value)| value.is_empty()) {
            findings.add(
                Code::EmptyRuleField,
                format!("{field}.{name}[{index}]"),
                "is empty",
                "remove it; \"*\" matches any value",
            );
        }
    }
}

fn path_pattern(path: &str, field: &str, findings: &mut Findings) {
    if path.contains(['{', '}']) {
        for part in path.split('/').filter(|part| part.contains(['{', '}', '*'])) {
            if !matches!(part, "{*}" | "{**}") {
                let message =
                    format!("{path:?} is not a valid path template: {part:?} is not {{*}} or {{**}}");
                findings.add(
                    Code::InvalidPath,
                    field,
                    message,
                    "use {*} or {**} as whole path segments, and no other *",
                );
            }
        }
        return;
    }
    let inner = path.strip_prefix('*').unwrap_or(path);
    let inner = inner.strip_suffix('*').unwrap_or(inner);
    if inner.contains(".*") || inner.ends_with('.') && path.ends_with('*') || path.contains(['^', '$', '|']) {
        let message = format!("{path:?} looks like a regular expression, and is compared as text");
        findings.add(Code::LiteralPattern, field, message, "write an exact path, PREFIX* or *SUFFIX");
    } else if inner.contains('*') || (path.len() > 1 && path.starts_with('*') && path.ends_with('*')) {
        let message = format!("in {path:?} the * is an ordinary character");
        findings.add(
            Code::LiteralPattern,
            field,
            message,
            "use * as the first or the last character only, or a path template such as /a/{*}",
        );
    } else if path.contains('?') {
        let message = format!("{path:?} never matches: a path has no query");
        findings.add(Code::NeverMatches, field, message, "remove the part from ? on");
    } else if !path.is_empty() && !path.starts_with(['/', '*']) {
        findings.add(
            Code::NeverMatches,
            field,
            format!("{path:?} never matches: paths begin with /"),
            format!("write /{path}"),
        );
    }
}

fn condition(when: &Condition, field: &str, findings: &mut Findings) {
    let known = CONDITIONS.iter().any(|known| match known.strip_suffix('[') {
        Some(name) => {
            when.key.strip_prefix(name).is_some_and(|rest| rest.starts_with('[') && rest.ends_with(']'))
        }
        None if known.ends_with('.') => when.key.starts_with(known),
        None => when.key == *known,
    });
    if when.key.is_empty() {
        findings.add(Code::MissingField, format!("{field}.key"), "is missing", "set an attribute");
    } else if !known {
        let near = if when.key.starts_with("request.header") {
            Some("request.headers[NAME]")
        } else {
            crate::spelling::nearest(&when.key, CONDITIONS).filter(|near| !near.ends_with('['))
        };
        let remedy = near.map_or_else(
            || "see Istio's list of authorization policy conditions".to_owned(),
            |near| format!("did you mean {near}?"),
        );
        findings.add(
            Code::UnknownAttribute,
            format!("{field}.key"),
            format!("unknown attribute {:?}", when.key),
            remedy,
        );
    } else if Clause::of_condition(when).is_none() || !has_valid_path(&when.key) {
        let remedy = "write NAME[KEY], for a claim within a claim NAME[KEY][KEY]";
        findings.add(
            Code::UnknownAttribute,
            format!("{field}.key"),
            format!("{:?} is not an attribute", when.key),
            remedy,
        );
    }
    if when.values.is_empty() && when.not_values.is_empty() {
        findings.add(Code::EmptyRuleField, field, "has neither values nor notValues", "set one of them");
    }
    for (list, name) in [(&when.values, "values"), (&when.not_values, "notValues")] {
        for (index, value) in list.iter().enumerate() {
            let field = format!("{field}.{name}[{index}]");
            match when.key.as_str() {
                "source.ip" | "remote.ip" | "destination.ip" if !is_cidr(value) => {
                    findings.add(
                        Code::InvalidAddress,
                        field,
                        format!("{value:?} is neither an IP address nor a CIDR block"),
                        "write 10.0.0.1 or 10.0.0.0/8",
                    );
                }
                "destination.port" => port_text(value, &field, findings),
                _ => {}
            }
        }
    }
}

/// Returns whether the path of a claim is valid.
fn has_valid_path(key: &str) -> bool {
    key.strip_prefix("request.auth.claims").is_none_or(|path| claim_path(path).is_some())
}

fn port_text(text: &str, field: &str, findings: &mut Findings) {
    if text.parse::<u16>().is_ok_and(|number| number > 0) {
        return;
    }
    findings.add(Code::InvalidPort, field, format!("{text:?} is not a port"), "ports go from 1 to 65535");
}

pub(super) fn is_cidr(text: &str) -> bool {
    let (address, length) =
        text.split_once('/').map_or((text, None), |(address, length)| (address, Some(length)));
    let Ok(address) = address.parse::<std::net::IpAddr>() else { return false };
    let longest = if address.is_ipv4() { 32 } else { 128 };
    length.is_none_or(|length| length.parse::<u8>().is_ok_and(|length| length <= longest))
}
