//! Annotations of a pod: typed access, and the checks of Istio's injector. An invalid value refuses the pod.

use std::{collections::BTreeMap, net::IpAddr};

use serde_json::Value;

/// Annotations without an effect, each with a remedy.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("sidecar.istio.io/bootstrapOverride", "change the configuration with an EnvoyFilter"),
    ("sidecar.istio.io/proxyImageType", "name the image in sidecar.istio.io/proxyImage"),
    ("sidecar.istio.io/componentLogLevel", "use sidecar.istio.io/logLevel"),
    ("sidecar.istio.io/agentLogLevel", "use sidecar.istio.io/logLevel: the sidecar has no agent"),
    ("sidecar.istio.io/enableCoreDump", "remove it"),
    ("sidecar.istio.io/controlPlaneAuthPolicy", "remove it: the control plane is always authenticated"),
    ("sidecar.istio.io/discoveryAddress", "use discoveryAddress in proxy.istio.io/config"),
    ("sidecar.istio.io/extraStatTags", "use a Telemetry"),
    ("sidecar.istio.io/statsInclusionPrefixes", STATISTICS),
    ("sidecar.istio.io/statsInclusionRegexps", STATISTICS),
    ("sidecar.istio.io/statsInclusionSuffixes", STATISTICS),
    ("sidecar.istio.io/statsHistogramBuckets", "remove it: the buckets are fixed"),
    ("sidecar.istio.io/statsHistogramBins", "remove it: the buckets are fixed"),
    ("sidecar.istio.io/statsFlushInterval", "remove it"),
    ("sidecar.istio.io/statsEvictionInterval", "remove it"),
    ("sidecar.istio.io/statsCompression", "remove it"),
    ("prometheus.istio.io/scrape-targets", "use prometheus.io/port: the sidecar merges one page"),
];
/// Remedy for annotations that add statistics of an Envoy.
const STATISTICS: &str = "remove it: the sidecar serves all of its statistics";

/// Annotations of a pod.
#[derive(Clone, Debug, Default)]
pub(crate) struct Annotations(BTreeMap<String, String>);

/// Error of an annotation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {name}: {value:?} {problem}")]
pub struct AnnotationError {
    name: String,
    value: String,
    problem: &'static str,
}

/// Returns the entries of a mapping whose values are texts.
pub(crate) fn text_map(map: &Value) -> BTreeMap<&str, &str> {
    let entries = map.as_object().into_iter().flatten();
    entries.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?))).collect()
}

impl Annotations {
    /// Reads and checks the annotations of a pod.
    pub(crate) fn of(pod: &Value) -> Result<Self, AnnotationError> {
        let map = text_map(&pod["metadata"]["annotations"]);
        let own: BTreeMap<String, String> =
            map.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        for (name, value) in &own {
            if let Some(problem) = problem(name, value) {
                return Err(AnnotationError { name: name.clone(), value: value.clone(), problem });
            }
        }
        Ok(Self(own))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Returns a boolean, which [`Annotations::of`] has checked.
    pub(crate) fn boolean(&self, name: &str) -> Option<bool> {
        self.get(name).and_then(boolean)
    }

    /// Returns an error about an annotation.
    pub(crate) fn error(&self, name: &str, problem: &'static str) -> AnnotationError {
        AnnotationError {
            name: name.to_owned(),
            value: self.get(name).unwrap_or_default().to_owned(),
            problem,
        }
    }

    /// Returns warnings about annotations without an effect.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let given = WITHOUT_EFFECT.iter().filter(|(name, _)| self.0.contains_key(*name));
        let mut warnings: Vec<String> =
            given.map(|(name, remedy)| format!("annotation {name} has no effect; {remedy}")).collect();
        if self.get("sidecar.istio.io/proxyImage").is_some_and(|image| !image.contains('/')) {
            warnings.push(
                "annotation sidecar.istio.io/proxyImage has no effect: it names no repository; write REGISTRY/IMAGE:TAG"
                    .to_owned(),
            );
        }
        warnings
    }

    /// Returns all annotations.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

/// Returns what is wrong with the value of an annotation.
fn problem(name: &str, value: &str) -> Option<&'static str> {
    let valid = |valid: bool, problem| (!valid).then_some(problem);
    const PORTS: &str = "is not a list of ports such as 80,443";
    const RANGES: &str = "is not a list of networks such as 10.0.0.0/8,fd00::/8";
    match name {
        "traffic.sidecar.istio.io/includeInboundPorts" => valid(value == "*" || ports(value), PORTS),
        "traffic.sidecar.istio.io/excludeInboundPorts"
        | "traffic.sidecar.istio.io/includeOutboundPorts"
        | "traffic.sidecar.istio.io/excludeOutboundPorts" => valid(ports(value), PORTS),
        "traffic.sidecar.istio.io/includeOutboundIPRanges" => valid(value == "*" || ranges(value), RANGES),
        "traffic.sidecar.istio.io/excludeOutboundIPRanges" => valid(ranges(value), RANGES),
        "traffic.sidecar.istio.io/excludeInterfaces"
        | "traffic.sidecar.istio.io/kubevirtInterfaces"
        | "istio.io/reroute-virtual-interfaces" => {
            valid(value.split(',').all(interface), "is not a list of network interfaces such as eth0,eth1")
        }
        "sidecar.istio.io/interceptionMode" => {
            valid(["REDIRECT", "TPROXY", "NONE"].contains(&value), "is not REDIRECT, TPROXY or NONE")
        }
        "status.sidecar.istio.io/port" => valid(value.parse::<u16>().is_ok(), "is not a port"),
        "readiness.status.sidecar.istio.io/initialDelaySeconds"
        | "readiness.status.sidecar.istio.io/periodSeconds"
        | "readiness.status.sidecar.istio.io/failureThreshold" => {
            valid(value.parse::<u32>().is_ok(), "is not a number")
        }
        "sidecar.istio.io/rewriteAppHTTPProbers"
        | "sidecar.istio.io/nativeSidecar"
        | "prometheus.istio.io/merge-metrics" => valid(boolean(value).is_some(), "is not true or false"),
        "sidecar.istio.io/proxyCPU"
        | "sidecar.istio.io/proxyCPULimit"
        | "sidecar.istio.io/proxyMemory"
        | "sidecar.istio.io/proxyMemoryLimit" => {
            valid(quantity(value), "is not a quantity such as 100m or 64Mi")
        }
        _ => None,
    }
}

/// Parses a boolean. Source: Go's `strconv.ParseBool`.
pub(crate) fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

fn ports(text: &str) -> bool {
    // Rust accepts a leading plus, Go does not.
    let port = |text: &str| !text.starts_with('+') && text.parse::<u16>().is_ok();
    text.trim().is_empty() || text.split(',').all(|text| port(text.trim()))
}

fn ranges(text: &str) -> bool {
    let range = |text: &str| {
        let (address, length) = text.split_once('/')?;
        let longest = if address.parse::<IpAddr>().ok()?.is_ipv4() { 32 } else { 128 };
        length.parse::<u8>().ok().filter(|length| *length <= longest)
    };
    text.is_empty() || text.split(',').all(|text| range(text).is_some())
}

/// Returns whether a text can be the name of a network interface. A trailing `+` stands for any suffix.
fn interface(name: &str) -> bool {
    let name = name.trim();
    !name.is_empty()
        && name.len() <= 15
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:@+".contains(&byte))
}

/// Returns whether a text is a quantity of Kubernetes: a number with an optional suffix or exponent.
fn quantity(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let number = match number.split_once('.') {
        Some((whole, fraction)) => digits(&format!("{whole}{fraction}")),
        None => digits(number),
    };
    let exponent = suffix.strip_prefix(['e', 'E']).map(|rest| rest.strip_prefix(['+', '-']).unwrap_or(rest));
    let known = ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    number && (known.contains(&suffix) || exponent.is_some_and(digits))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn invalid_values_are_refused_by_name() {
        let error = |name: &str, value: &str| {
            Annotations::of(&json!({ "metadata": { "annotations": { name: value } } }))
                .err()
                .map(|error| error.to_string())
        };
        for (name, bad, good) in [
            ("traffic.sidecar.istio.io/includeInboundPorts", "http", "*"),
            ("traffic.sidecar.istio.io/excludeInboundPorts", "*", "80, 443"),
            ("traffic.sidecar.istio.io/excludeOutboundPorts", "+80", "0080"),
            ("traffic.sidecar.istio.io/includeOutboundIPRanges", "10.0.0.0", "10.0.0.0/8,fd00::/8"),
            ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.0.0.0/33", ""),
            ("traffic.sidecar.istio.io/excludeInterfaces", "eth0;reboot", "eth0,net1"),
            ("sidecar.istio.io/interceptionMode", "redirect", "NONE"),
            ("status.sidecar.istio.io/port", "-1", "0"),
            ("sidecar.istio.io/nativeSidecar", "yes", "false"),
            ("sidecar.istio.io/proxyCPU", "100\nm", "1.5"),
            ("sidecar.istio.io/proxyMemory", "64MiB", "64Mi"),
        ] {
            assert!(error(name, bad).is_some_and(|text| text.contains(name)), "{name}");
            assert_eq!(error(name, good), None, "{name}");
        }
    }

    #[test]
    fn annotations_without_an_effect_are_named() {
        let names: Vec<&str> = WITHOUT_EFFECT.iter().map(|(name, _)| *name).collect();
        let all: BTreeMap<&str, &str> = names.iter().map(|name| (*name, "x")).collect();
        let warnings =
            Annotations::of(&json!({ "metadata": { "annotations": all } })).unwrap_or_default().warnings();
        assert_eq!(warnings.len(), names.len());
    }
}
