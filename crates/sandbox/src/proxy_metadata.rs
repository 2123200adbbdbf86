//! Settings with which the sidecar of a pod starts: those of its annotation `proxy.istio.io/config`, and the metadata
//! of its node that environment variables add, as Istio's agent reads them.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use skysail_core::node;
use skysail_model::api::{
    Duration,
    own_settings::OwnSettings,
    proxy_config::{Interception, StartSettings},
};

use crate::{objects::Labels, scrape};

/// Annotation with the settings of the pod's proxy, in YAML.
const ANNOTATION: &str = "proxy.istio.io/config";
/// Annotation that says how connections reach the sidecar. It overrides `interceptionMode` of [`ANNOTATION`].
const INTERCEPTION: &str = "sidecar.istio.io/interceptionMode";
/// Annotations without an effect, each with the reason and a remedy.
const WITHOUT_EFFECT: &[(&str, &str, &str)] = &[
    (
        "sidecar.istio.io/bootstrapOverride",
        "the sidecar has no bootstrap file",
        "change what the control plane sends with an EnvoyFilter",
    ),
    (
        "sidecar.istio.io/proxyImage",
        "the sidecar is no image",
        "run an Envoy in its place with `skysail up --envoy`",
    ),
    ("sidecar.istio.io/proxyImageType", "the sidecar is no image", "remove it"),
    ("sidecar.istio.io/logLevel", LOGS, LOGGING),
    ("sidecar.istio.io/componentLogLevel", LOGS, LOGGING),
    ("sidecar.istio.io/agentLogLevel", "the sidecar has no agent", "remove it"),
    ("sidecar.istio.io/enableCoreDump", "the sidecar writes no core dumps", "remove it"),
    ("sidecar.istio.io/statsHistogramBuckets", "the sidecar's buckets are fixed", "remove it"),
    ("sidecar.istio.io/userVolume", FILES, "name files of this machine"),
    ("sidecar.istio.io/userVolumeMount", FILES, "name files of this machine"),
];
const LOGS: &str = "the sidecar starts with its default log level";
const LOGGING: &str = "set it on the sidecar's admin page `/logging`";
const FILES: &str = "the sidecar sees the files of this machine";
/// Variable with an idle timeout.
const IDLE_TIMEOUT: &str = "ISTIO_META_IDLE_TIMEOUT";
/// Variable of Istio's agent that ends the drain early.
const EXIT_EARLY: &str = "EXIT_ON_ZERO_ACTIVE_CONNECTIONS";
/// Metadata key with the WorkloadGroup of a machine.
pub(crate) const GROUP: &str = "AUTO_REGISTER_GROUP";

/// Reads the annotations of a pod. Also returns the errors as texts.
pub(crate) fn annotated(annotations: &Labels) -> (StartSettings, Vec<String>) {
    let (mut settings, mut problems) = configured(annotations);
    if let Some(text) = annotations.get(INTERCEPTION) {
        let mode = interception(&Value::String(text.clone()));
        mode.iter().for_each(|mode| settings.interception = Some(*mode));
        problems.extend(mode.err().map(|problem| format!("annotation {INTERCEPTION}: {problem}")));
    }
    if let Some(text) = annotations.get(scrape::MERGE) {
        settings.merges_metrics = scrape::boolean(text);
        if settings.merges_metrics.is_none() {
            problems.push(format!("annotation {}: {text:?} is not true or false", scrape::MERGE));
        }
    }
    problems.extend(scrape::page(annotations).err());
    for (name, reason, remedy) in WITHOUT_EFFECT.iter().filter(|(name, ..)| annotations.contains_key(*name)) {
        problems.push(format!("annotation {name} has no effect: {reason}; {remedy}"));
    }
    if settings.interception == Some(Interception::Tproxy) {
        problems.push(
            "interceptionMode TPROXY has the effect of REDIRECT: programs see connections from 127.0.0.6; \
             use the header x-forwarded-for"
                .to_owned(),
        );
    }
    (settings, problems)
}

/// Parses a mode of interception.
fn interception(value: &Value) -> Result<Interception, String> {
    serde_json::from_value(value.clone())
        .map_err(|_| format!("{value} is not REDIRECT, TPROXY or NONE and has no effect"))
}

/// Reads the annotation with the settings of the proxy. Also returns the errors as texts.
fn configured(annotations: &Labels) -> (StartSettings, Vec<String>) {
    let (mut settings, mut problems) = (StartSettings::default(), Vec::new());
    let Some(text) = annotations.get(ANNOTATION) else { return (settings, problems) };
    let mut add = |problem: String| problems.push(format!("annotation {ANNOTATION}: {problem}"));
    let root = match skysail_yaml::embedded(text).map(|document| document.root) {
        None => return (settings, problems),
        Some(Err(error)) => {
            add(format!("{error}; no field of it has an effect"));
            return (settings, problems);
        }
        Some(Ok(root)) => root.to_json(),
    };
    match root.get("concurrency") {
        None | Some(Value::Null) => {}
        Some(value) => match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            Some(number) => settings.concurrency = Some(number),
            None => add(format!("concurrency {value} is not a number of threads and has no effect")),
        },
    }
    if let Some(value) = root.get("interceptionMode") {
        match interception(value) {
            Ok(mode) => settings.interception = Some(mode),
            Err(problem) => add(format!("interceptionMode {problem}")),
        }
    }
    if let Some(value) = root.get("terminationDrainDuration") {
        settings.drain = value.as_str().and_then(Duration::parse);
        if settings.drain.is_none() {
            add(format!("terminationDrainDuration {value} is not a duration and has no effect"));
        }
    }
    if let Some(value) = root.get("tracingServiceName") {
        match serde_json::from_value(value.clone()) {
            Ok(name) => settings.tracing_service_name = name,
            Err(error) => add(format!("tracingServiceName has no effect: {error}")),
        }
    }
    if root.is_object() {
        match serde_json::from_value(root.clone()) {
            Ok(own) => settings.own = own,
            Err(error) => {
                add(format!("{error}: drainDuration, proxyStatsMatcher and runtimeValues have no effect"));
            }
        }
    }
    for (name, value) in root.get("proxyMetadata").and_then(Value::as_object).into_iter().flatten() {
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        settings.variables.insert(name.clone(), text);
    }
    (settings, problems)
}

/// Returns the settings of a proxy's own configuration as Istio's agent writes them into the metadata of the node.
pub(crate) fn own_config(settings: &OwnSettings) -> Map<String, Value> {
    let OwnSettings { drain_duration, proxy_stats_matcher, runtime_values } = settings;
    let mut config = Map::new();
    if let Some(length) = drain_duration {
        config.insert("drainDuration".into(), format!("{}s", length.0.as_secs_f64()).into());
    }
    if let Some(matcher) = proxy_stats_matcher {
        let matcher = json!({
            "inclusionPrefixes": matcher.inclusion_prefixes,
            "inclusionSuffixes": matcher.inclusion_suffixes,
            "inclusionRegexps": matcher.inclusion_regexps,
        });
        config.insert("proxyStatsMatcher".into(), matcher);
    }
    if !runtime_values.is_empty() {
        config.insert("runtimeValues".into(), json!(runtime_values));
    }
    config
}

/// Returns the metadata that the environment variables of a sidecar add to its node. Also returns the errors as texts.
pub(crate) fn of_variables(variables: &BTreeMap<String, String>) -> (Map<String, Value>, Vec<String>) {
    let (metadata, mut problems) = node::metadata(variables);
    for (name, text) in variables {
        if name == IDLE_TIMEOUT && Duration::parse(text).is_none() {
            problems.push(format!(
                "variable {name} of the proxy: {text:?} is not a duration such as 300s and has no effect"
            ));
        } else if node::is_metadata(name) {
            continue;
        } else if name == EXIT_EARLY {
            problems.push(format!(
                "variable {name} of the proxy is not needed: a drain always ends with the last connection"
            ));
        } else {
            problems.push(format!("variable {name} of the proxy is not supported here and has no effect"));
        }
    }
    (metadata, problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> (Option<u32>, Value, Vec<String>) {
        let (settings, mut problems) = annotated(&[(ANNOTATION.to_owned(), text.to_owned())].into());
        let (metadata, more) = of_variables(&settings.variables);
        problems.extend(more);
        (settings.concurrency, Value::Object(metadata), problems)
    }

    #[test]
    fn variables_become_metadata() {
        let (concurrency, metadata, problems) =
            of("concurrency: 2\nproxyMetadata:\n  ISTIO_META_DNS_CAPTURE: 'true'\n  \
             ISTIO_META_IDLE_TIMEOUT: 5s\n  ISTIO_METAJSON_MORE: '{\"A\": {\"b\": 1}}'\n");
        let expected = serde_json::json!({"DNS_CAPTURE": "true", "IDLE_TIMEOUT": "5s", "A": {"b": 1}});
        assert_eq!((concurrency, metadata, problems), (Some(2), expected, Vec::<String>::new()));
    }

    #[test]
    fn others_are_reported() {
        let (concurrency, metadata, problems) = of("{proxyMetadata: {PROXY_XDS_VIA_AGENT: 'true', \
             ISTIO_METAJSON_X: '1'}, concurrency: many}");
        assert_eq!((concurrency, metadata), (None, serde_json::json!({})));
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(problems[0].contains("concurrency \"many\" is not a number of threads"), "{problems:?}");
        assert!(problems[1].contains("variable ISTIO_METAJSON_X of the proxy is not a JSON"), "{problems:?}");
        assert!(
            problems[2].contains("variable PROXY_XDS_VIA_AGENT of the proxy is not supported"),
            "{problems:?}"
        );
        let (_, _, problems) = of("a: [");
        assert!(problems[0].contains("no field of it has an effect"), "{problems:?}");
        assert_eq!(of("").2, Vec::<String>::new());
    }

    #[test]
    fn annotations_without_an_effect_are_reported() {
        let of = |key: &str, value: &str| {
            let (settings, mut problems) = annotated(&[(key.to_owned(), value.to_owned())].into());
            problems.extend(of_variables(&settings.variables).1);
            (settings, problems.join("\n"))
        };
        let (settings, problems) = of(INTERCEPTION, "NONE");
        assert_eq!((settings.interception, &*problems), (Some(Interception::None), ""));
        for (key, value, expected) in [
            (INTERCEPTION, "IPTABLES", "is not REDIRECT, TPROXY or NONE"),
            (INTERCEPTION, "TPROXY", "has the effect of REDIRECT"),
            (ANNOTATION, "interceptionMode: 1", "is not REDIRECT, TPROXY or NONE"),
            (ANNOTATION, "terminationDrainDuration: 1", "is not a duration"),
            (ANNOTATION, "proxyMetadata: {ISTIO_META_IDLE_TIMEOUT: 5}", "\"5\" is not a duration"),
            (
                ANNOTATION,
                "proxyMetadata: {EXIT_ON_ZERO_ACTIVE_CONNECTIONS: 'true'}",
                "a drain always ends with the last connection",
            ),
            (
                "sidecar.istio.io/bootstrapOverride",
                "map",
                "has no effect: the sidecar has no bootstrap file; change",
            ),
        ] {
            let (_, problems) = of(key, value);
            assert!(problems.contains(expected), "{key}: {value}: {problems}");
        }
        let (settings, problems) = of(ANNOTATION, "{terminationDrainDuration: 12s, interceptionMode: NONE}");
        assert_eq!(settings.drain, Duration::parse("12s"));
        assert_eq!((settings.interception, &*problems), (Some(Interception::None), ""));
    }
}
