//! Validation of EnvoyFilter.

use super::{Code, Finding, Findings};
use crate::api::{
    EnvoyFilter,
    envoy_filter::{ApplyTo, ConfigPatch, Context, FilterClass, MAX_VERSION, PatchOperation},
};

/// Name of the network filter that holds HTTP filters.
const HTTP_MANAGER: &str = "envoy.filters.network.http_connection_manager";

/// Maximum number of patches of an object.
const MAX_PATCHES: usize = 1_000;

/// Checks an EnvoyFilter.
pub(crate) fn envoy_filter(spec: &EnvoyFilter) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.workload_selector.is_some() && !spec.target_refs.is_empty() {
        findings.add(
            Code::ExclusiveFields,
            "spec.targetRefs",
            "is not allowed together with workloadSelector",
            "keep one of them",
        );
    }
    if spec.workload_selector.as_ref().is_some_and(|selector| selector.labels.is_empty()) {
        let message = "has no labels, so the filter applies to all workloads of the namespace";
        findings.add(
            Code::EmptySelector,
            "spec.workloadSelector",
            message,
            "set labels, or remove the field",
        );
    }
    for (index, target) in spec.target_refs.iter().enumerate() {
        let is_gateway = target.group == "gateway.networking.k8s.io"
            && matches!(target.kind.as_str(), "Gateway" | "GatewayClass");
        if !is_gateway || target.name.is_empty() {
            let field = format!("spec.targetRefs[{index}]");
            let remedy = "refer to a Gateway or GatewayClass of group gateway.networking.k8s.io by name";
            findings.add(Code::InvalidTarget, field, "does not select a gateway", remedy);
        }
    }
    if spec.config_patches.len() > MAX_PATCHES {
        let message = format!("has more than {MAX_PATCHES} patches");
        findings.add(Code::TooMany, "spec.configPatches", message, "divide it into several objects");
        return findings.done();
    }
    for (index, patch) in spec.config_patches.iter().enumerate() {
        config_patch(patch, &format!("spec.configPatches[{index}]"), &mut findings);
    }
    findings.done()
}

fn config_patch(patch: &ConfigPatch, field: &str, findings: &mut Findings) {
    if patch.matched.context == Context::Waypoint || patch.matched.waypoint.is_some() {
        let message = "the mesh has no waypoints, so the patch has no effect";
        return findings.add(Code::PatchWithoutEffect, format!("{field}.match"), message, "remove the patch");
    }
    let apply_to = format!("{field}.applyTo");
    match patch.apply_to {
        ApplyTo::Invalid => {
            return findings.add(Code::MissingField, apply_to, "is missing", "set it, such as HTTP_FILTER");
        }
        ApplyTo::Bootstrap => {
            let message = "BOOTSTRAP patches a file that the mesh does not write, so it has no effect";
            findings.add(Code::PatchWithoutEffect, apply_to, message, "use the settings of the proxy");
        }
        _ => {}
    }
    let Some(written) = &patch.patch else {
        return findings.add(
            Code::MissingField,
            format!("{field}.patch"),
            "is missing",
            "add operation and value",
        );
    };
    let operation = format!("{field}.patch.operation");
    if written.operation == PatchOperation::Invalid {
        return findings.add(Code::MissingField, operation, "is missing", "set it, such as MERGE");
    }
    if written.value.is_none() && written.operation != PatchOperation::Remove {
        return findings.add(
            Code::MissingField,
            format!("{field}.patch.value"),
            "is missing",
            "add the value",
        );
    }
    if let Some((message, remedy)) = without_effect(patch) {
        findings.add(Code::PatchOperation, operation, message, remedy);
    }
    if written.filter_class != FilterClass::Unspecified {
        let message = "has no effect, as in Istio";
        let remedy = "choose the place with INSERT_BEFORE, INSERT_AFTER or INSERT_FIRST";
        findings.add(Code::NoEffect, format!("{field}.patch.filterClass"), message, remedy);
    }
    proxy(patch, field, findings);
    matched(patch, field, findings);
    let at = |within: &str| match within {
        "" => format!("{field}.patch.value"),
        within if within.starts_with('[') => format!("{field}.patch.value{within}"),
        within => format!("{field}.patch.value.{within}"),
    };
    match patch.build() {
        Ok(built) => {
            for unknown in built.into_iter().flat_map(|built| built.unknown) {
                let message = format!("{}, so it has no effect", unknown.message);
                findings.add(Code::NoEffect, at(&unknown.field), message, unknown.remedy);
            }
        }
        Err(misfit) => findings.add(Code::InvalidPatch, at(&misfit.field), misfit.message, misfit.remedy),
    }
}

/// Returns why an operation never changes anything in Istio, and the remedy.
fn without_effect(patch: &ConfigPatch) -> Option<(String, &'static str)> {
    use {ApplyTo as To, PatchOperation as Op};
    let (to, operation) = (patch.apply_to, patch.operation());
    let is_merge = matches!(operation, Op::Merge | Op::MergeAndReplaceList);
    let works = match to {
        To::Listener | To::FilterChain | To::Cluster => is_merge || matches!(operation, Op::Add | Op::Remove),
        To::RouteConfiguration => is_merge,
        To::VirtualHost => is_merge || matches!(operation, Op::Add | Op::Remove | Op::Replace),
        To::HttpRoute => operation != Op::Replace,
        To::NetworkFilter | To::HttpFilter | To::ListenerFilter => operation != Op::MergeAndReplaceList,
        To::ExtensionConfig => operation == Op::Add,
        To::Bootstrap | To::Invalid => true,
    };
    if !works {
        let message =
            format!("{} has no effect with applyTo {}, as in Istio", operation.as_str(), to.as_str());
        return Some((message, "use another operation"));
    }
    let needs_name = match to {
        To::NetworkFilter => !patch.has_filter_match(),
        To::HttpFilter => !patch.has_sub_filter_match(),
        To::ListenerFilter => !patch.has_listener_filter_match(),
        _ => false,
    };
    let chooses = match operation {
        Op::Replace | Op::Remove => true,
        Op::Merge => to == To::ListenerFilter,
        _ => false,
    };
    (needs_name && chooses).then(|| {
        let message =
            format!("{} has no effect without the name of a filter, as in Istio", operation.as_str());
        (message, "add the name of the filter to match.listener")
    })
}

fn proxy(patch: &ConfigPatch, field: &str, findings: &mut Findings) {
    let version = patch.matched.proxy.as_ref().map_or("", |proxy| proxy.proxy_version.as_str());
    if version.len() > MAX_VERSION {
        let message = format!("has more than {MAX_VERSION} bytes, so the patch has no effect");
        let at = format!("{field}.match.proxy.proxyVersion");
        findings.add(Code::PatchWithoutEffect, at, message, "write a shorter expression");
    } else if !version.is_empty() {
        super::regex(version, &format!("{field}.match.proxy.proxyVersion"), findings);
    }
}

/// Checks that the match is of the patched part.
fn matched(patch: &ConfigPatch, field: &str, findings: &mut Findings) {
    use ApplyTo as To;
    let condition = &patch.matched;
    let present = [
        ("listener", condition.listener.is_some()),
        ("routeConfiguration", condition.route_configuration.is_some()),
        ("cluster", condition.cluster.is_some()),
    ];
    let expected = match patch.apply_to {
        To::Listener | To::FilterChain | To::NetworkFilter | To::HttpFilter | To::ListenerFilter => {
            "listener"
        }
        To::RouteConfiguration | To::VirtualHost | To::HttpRoute => "routeConfiguration",
        To::Cluster => "cluster",
        To::ExtensionConfig | To::Bootstrap | To::Invalid => "",
    };
    for (name, _) in present.into_iter().filter(|(name, is_present)| *is_present && *name != expected) {
        let at = format!("{field}.match.{name}");
        let message = format!("does not belong to applyTo {}", patch.apply_to.as_str());
        if expected.is_empty() {
            findings.add(Code::PatchWithoutEffect, at, format!("{message} and has no effect"), "remove it");
        } else {
            findings.add(Code::FieldNotAllowed, at, message, format!("write match.{expected}"));
        }
    }
    let Some(listener) = &condition.listener else { return };
    let at = format!("{field}.match.listener");
    if !listener.port_name.is_empty() {
        findings.add(
            Code::NoEffect,
            format!("{at}.portName"),
            "has no effect, as in Istio",
            "use portNumber",
        );
    }
    let Some(filter) = listener.filter_chain.as_ref().and_then(|chain| chain.filter.as_ref()) else { return };
    let at = format!("{at}.filterChain.filter");
    if matches!(patch.apply_to, To::Listener | To::FilterChain) {
        findings.add(
            Code::NoEffect,
            &at,
            format!("has no effect with applyTo {}", patch.apply_to.as_str()),
            "remove it",
        );
    }
    if filter.name.is_empty() {
        return findings.add(
            Code::MissingField,
            format!("{at}.name"),
            "is missing",
            "add the name of the filter",
        );
    }
    let Some(within) = &filter.sub_filter else { return };
    let at = format!("{at}.subFilter");
    if patch.apply_to != To::HttpFilter {
        findings.add(Code::FieldNotAllowed, at, "belongs to applyTo HTTP_FILTER", "remove it");
    } else if filter.name != HTTP_MANAGER {
        let message = format!("the filter around it is {:?}, which has no HTTP filters", filter.name);
        findings.add(Code::InvalidPatch, at, message, format!("write filter.name: {HTTP_MANAGER}"));
    } else if within.name.is_empty() {
        findings.add(
            Code::MissingField,
            format!("{at}.name"),
            "is missing",
            "add the name of the HTTP filter",
        );
    }
}
