//! Labels and annotations that control sidecars. A wrong one may leave a pod without the sidecar that enforces
//! its policies.

use skysail_yaml::join;

use super::{
    Code, Findings,
    proxy_config::{bad_numbers, bad_tags},
};
use crate::{
    api::{
        Kind, Labels, Meta,
        manifest::PodSpec,
        proxy_config::{self, ProxySettings},
    },
    fields::{self, FieldRow},
    spelling::nearest,
};

/// Switch of injection: a label, and an older annotation.
pub(super) const INJECT: &str = "sidecar.istio.io/inject";
const NAMESPACE_LABEL: &str = "istio-injection";

/// Istio's labels and annotations of pods. Source: istio.io, "Resource Annotations" and "Resource Labels".
pub(super) const KNOWN: &[&str] = &[
    "sidecar.istio.io/inject",
    "sidecar.istio.io/status",
    "sidecar.istio.io/proxyImage",
    "sidecar.istio.io/proxyImageType",
    "sidecar.istio.io/proxyCPU",
    "sidecar.istio.io/proxyCPULimit",
    "sidecar.istio.io/proxyMemory",
    "sidecar.istio.io/proxyMemoryLimit",
    "sidecar.istio.io/logLevel",
    "sidecar.istio.io/componentLogLevel",
    "sidecar.istio.io/agentLogLevel",
    "sidecar.istio.io/nativeSidecar",
    "sidecar.istio.io/interceptionMode",
    "sidecar.istio.io/discoveryAddress",
    "sidecar.istio.io/bootstrapOverride",
    "sidecar.istio.io/enableCoreDump",
    "sidecar.istio.io/extraStatTags",
    "sidecar.istio.io/statsEvictionInterval",
    "sidecar.istio.io/statsFlushInterval",
    "sidecar.istio.io/statsHistogramBins",
    "sidecar.istio.io/statsHistogramBuckets",
    "sidecar.istio.io/statsInclusionPrefixes",
    "sidecar.istio.io/statsInclusionRegexps",
    "sidecar.istio.io/statsInclusionSuffixes",
    "sidecar.istio.io/statsCompression",
    "sidecar.istio.io/rewriteAppHTTPProbers",
    "sidecar.istio.io/controlPlaneAuthPolicy",
    "sidecar.istio.io/userVolume",
    "sidecar.istio.io/userVolumeMount",
    "traffic.sidecar.istio.io/includeInboundPorts",
    "traffic.sidecar.istio.io/excludeInboundPorts",
    "traffic.sidecar.istio.io/includeOutboundPorts",
    "traffic.sidecar.istio.io/excludeOutboundPorts",
    "traffic.sidecar.istio.io/includeOutboundIPRanges",
    "traffic.sidecar.istio.io/excludeOutboundIPRanges",
    "traffic.sidecar.istio.io/excludeInterfaces",
    "traffic.sidecar.istio.io/kubevirtInterfaces",
    "proxy.istio.io/config",
    "proxy.istio.io/overrides",
];

/// Deprecated annotations of pods, each with a replacement. Source: Istio's `annotations.yaml`.
pub(super) const DEPRECATED: &[(&str, &str)] = &[
    (INJECT, "use the label sidecar.istio.io/inject"),
    ("sidecar.istio.io/discoveryAddress", "use discoveryAddress in proxy.istio.io/config"),
    ("sidecar.istio.io/extraStatTags", "use a Telemetry"),
    ("sidecar.istio.io/statsCompression", "remove it"),
    ("sidecar.istio.io/statsInclusionPrefixes", STATISTICS),
    ("sidecar.istio.io/statsInclusionRegexps", STATISTICS),
    ("sidecar.istio.io/statsInclusionSuffixes", STATISTICS),
    ("traffic.sidecar.istio.io/kubevirtInterfaces", "use istio.io/reroute-virtual-interfaces"),
];
/// Remedy for annotations that add statistics of an Envoy.
const STATISTICS: &str = "remove it: the sidecar serves all of its statistics";

/// Image name that injection replaces by the image of the proxy.
const AUTO: &str = "auto";
/// User id of the proxy.
const PROXY_USER: i64 = 1337;
/// Name of the container of the proxy.
const PROXY: &str = "istio-proxy";

/// Checks a pod for deprecated annotations, the image `auto` without injection, and the user id of the proxy. `at` is
/// the prefix of the paths of fields.
pub(super) fn pod(spec: &PodSpec, labels: &Labels, annotations: &Labels, at: &str, findings: &mut Findings) {
    for (key, replacement) in DEPRECATED.iter().filter(|(key, _)| annotations.contains_key(*key)) {
        // If both exist, the label applies; the annotation is for older versions of Istio.
        if *key != INJECT || !labels.contains_key(INJECT) {
            let field = join(&format!("{at}metadata.annotations"), key);
            findings.add(Code::DeprecatedAnnotation, field, "is deprecated", *replacement);
        }
    }
    let switch = labels.get(INJECT).or_else(|| annotations.get(INJECT));
    let is_off = switch.is_some_and(|value| value == "false");
    let lists = [("initContainers", &spec.init_containers), ("containers", &spec.containers)];
    for (list, containers) in lists {
        for (index, container) in containers.iter().enumerate() {
            let field = format!("{at}spec.{list}[{index}]");
            if container.image == AUTO && is_off {
                let message = format!("is replaced by injection, which {INJECT} disables");
                findings.add(
                    Code::AutoImageNotInjected,
                    format!("{field}.image"),
                    message,
                    "remove the label",
                );
            }
            if container.security_context.run_as_user == Some(PROXY_USER) && container.name != PROXY {
                let field = format!("{field}.securityContext.runAsUser");
                findings.add(Code::ReservedUser, field, RESERVED, "use another user id");
            }
        }
    }
    let is_gateway = spec.containers.iter().any(|container| container.name == PROXY);
    if spec.security_context.run_as_user == Some(PROXY_USER) && !is_gateway {
        let field = format!("{at}spec.securityContext.runAsUser");
        findings.add(Code::ReservedUser, field, RESERVED, "use another user id");
    }
}

const RESERVED: &str = "is the user of the sidecar, whose connections are not intercepted";

/// Checks the labels and annotations of an object.
pub(super) fn check(kind: Kind, meta: &Meta, findings: &mut Findings) {
    match kind {
        Kind::Pod => {
            values(&meta.labels, "metadata.labels", findings);
            values(&meta.annotations, "metadata.annotations", findings);
        }
        Kind::Namespace => of_namespace(&meta.labels, findings),
        // Labels of the workload itself do not apply to its pods.
        _ if kind.makes_pods() => {
            for (map, name) in [(&*meta.labels, "labels"), (&meta.annotations, "annotations")] {
                if map.contains_key(INJECT) {
                    let field = join(&format!("metadata.{name}"), INJECT);
                    let message = "has no effect on a workload: injection reads the labels of its pods";
                    findings.add(
                        Code::InjectionLabelMisplaced,
                        field,
                        message,
                        "move it to the labels of the pod template",
                    );
                }
            }
        }
        _ => {}
    }
}

/// Label of a namespace that names the revision of the control plane.
const REVISION: &str = "istio.io/rev";
/// Label of a namespace that selects Istio's ambient mode.
const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

fn of_namespace(labels: &Labels, findings: &mut Findings) {
    let injection = labels.get(NAMESPACE_LABEL).map(String::as_str);
    let mut several = |label, message: &str| {
        let field = join("metadata.labels", label);
        findings.add(Code::InjectionLabels, field, message, "remove one of the labels");
    };
    if injection.is_some_and(|value| value != "disabled") && labels.contains_key(REVISION) {
        several(REVISION, "controls injection too, but istio-injection takes precedence");
    }
    let is_injected = injection.map_or_else(|| labels.contains_key(REVISION), |value| value != "disabled");
    if is_injected && labels.get(DATAPLANE_MODE).is_some_and(|mode| mode == "ambient") {
        several(DATAPLANE_MODE, "selects ambient mode, and another label has sidecars injected");
    }
    for (key, value) in labels {
        let field = join("metadata.labels", key);
        if key == NAMESPACE_LABEL && !matches!(value.as_str(), "enabled" | "disabled") {
            let message = format!("{value:?} is not a value of this label, so it has no effect");
            findings.add(Code::InjectionLabelValue, field, message, "write enabled or disabled");
        } else if key != NAMESPACE_LABEL && crate::spelling::distance(key, NAMESPACE_LABEL) <= 2 {
            let message = format!("{key:?} is not a label of Istio, so it has no effect");
            findings.add(Code::UnknownAnnotation, field, message, format!("did you mean {NAMESPACE_LABEL}?"));
        }
    }
}

/// Annotations of pods whose values are numbers.
const NUMBERS: &[&str] = &[
    "readiness.status.sidecar.istio.io/failureThreshold",
    "readiness.status.sidecar.istio.io/initialDelaySeconds",
    "readiness.status.sidecar.istio.io/periodSeconds",
    "status.sidecar.istio.io/port",
];

/// Returns whether a label or an annotation is in a domain whose names are all known.
pub(super) fn is_of_domain(key: &str) -> bool {
    let domain = key.split('/').next().unwrap_or_default();
    ["sidecar.istio.io", "traffic.sidecar.istio.io", "proxy.istio.io"].contains(&domain)
}

/// Checks the labels or annotations of a pod.
pub(super) fn values(map: &Labels, at: &str, findings: &mut Findings) {
    for (key, value) in map {
        let field = join(at, key);
        if key == INJECT && !matches!(value.as_str(), "true" | "false") {
            let remedy = "write \"true\" or \"false\"";
            findings.add(
                Code::InjectionLabelValue,
                field,
                format!("{value:?} is neither \"true\" nor \"false\""),
                remedy,
            );
            continue;
        }
        if key == proxy_config::ANNOTATION {
            settings(value, &field, findings);
            continue;
        }
        if NUMBERS.contains(&key.as_str()) && value.parse::<u32>().is_err() {
            let message = format!("{value:?} is not a number, so it has no effect");
            findings.add(Code::InjectionLabelValue, field, message, "write a number in quotes");
            continue;
        }
        let domain = key.split('/').next().unwrap_or_default();
        if is_of_domain(key) && !KNOWN.contains(&key.as_str()) && !key.starts_with("sidecar.istio.io/istio") {
            let of_domain: Vec<&str> =
                KNOWN.iter().copied().filter(|known| known.split('/').next() == Some(domain)).collect();
            let remedy =
                nearest(key, &of_domain).map_or_else(String::new, |near| format!("did you mean {near}?"));
            findings.add(
                Code::UnknownAnnotation,
                field,
                format!("{key:?} is unknown and has no effect"),
                remedy,
            );
        }
    }
}

/// Checks the settings of a proxy in an annotation.
fn settings(text: &str, field: &str, findings: &mut Findings) {
    match ProxySettings::read(text) {
        Err(reason) => {
            let message = format!("cannot be read and has no effect: {reason}");
            findings.add(Code::NoEffect, field, message, "write the fields of ProxyConfig as YAML");
        }
        Ok((settings, others)) => {
            for name in others {
                let known = fields::proxy_setting(&name).map(FieldRow::effect);
                let (effect, remedy) = known.unwrap_or(("it has no effect", ""));
                let message = format!("setting {name} is not supported: {effect}");
                findings.add(Code::UnsupportedField, field, message, remedy);
            }
            for (name, reason, remedy) in bad_tags(&settings) {
                findings.add(Code::NoEffect, field, format!("tracing.{name} {reason}"), remedy);
            }
            if let Some(tracing) = &settings.tracing {
                let share = tracing.sampling.0;
                if !(0.0..=100.0).contains(&share) {
                    let message = format!("tracing.sampling {share} is not a percentage and has no effect");
                    findings.add(Code::NoEffect, field, message, "percentages go from 0 to 100");
                }
                if tracing.zipkin.is_some() {
                    let remedy = "set it in the mesh configuration, or use an extension provider";
                    findings.add(
                        Code::UnsupportedField,
                        field,
                        "setting tracing.zipkin has no effect in the annotation",
                        remedy,
                    );
                }
            }
            for (name, least) in bad_numbers(&settings) {
                let message = format!("connectionSettings.{name} is below {least} and has no effect");
                findings.add(Code::NoEffect, field, message, format!("use {least} or more"));
            }
            let value = &settings.proxy_headers.server.value;
            if !proxy_config::is_header_value(value) {
                let message = format!("proxyHeaders.server.value {value:?} is not a header value");
                findings.add(Code::NoEffect, field, message, "use printable ASCII characters");
            }
        }
    }
}
