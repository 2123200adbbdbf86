//! Settings with which the sidecar of a pod starts: those of its annotation `proxy.istio.io/config`, and the metadata
//! of its node that environment variables add, as Istio's agent reads them.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use skysail_model::api::proxy_config::StartSettings;

use crate::objects::Labels;

/// Annotation with the settings of the pod's proxy, in YAML.
const ANNOTATION: &str = "proxy.istio.io/config";
/// Metadata key with the WorkloadGroup of a machine.
pub(crate) const GROUP: &str = "AUTO_REGISTER_GROUP";
/// Prefix of variables whose value is text.
const TEXT: &str = "ISTIO_META_";
/// Prefix of variables whose value is a JSON object, whose keys are added.
const JSON: &str = "ISTIO_METAJSON_";

/// Reads the annotation of a pod. Also returns the errors as texts.
pub(crate) fn annotated(annotations: &Labels) -> (StartSettings, Vec<String>) {
    let (mut settings, mut problems) = (StartSettings::default(), Vec::new());
    let Some(text) = annotations.get(ANNOTATION) else { return (settings, problems) };
    let mut add = |problem: String| problems.push(format!("annotation {ANNOTATION}: {problem}"));
    let root = match skysail_yaml::documents(text).next().map(|document| document.root) {
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
    for (name, value) in root.get("proxyMetadata").and_then(Value::as_object).into_iter().flatten() {
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        settings.variables.insert(name.clone(), text);
    }
    (settings, problems)
}

/// Returns the metadata that the environment variables of a sidecar add to its node. Also returns the errors as texts.
pub(crate) fn of_variables(variables: &BTreeMap<String, String>) -> (Map<String, Value>, Vec<String>) {
    let (mut metadata, mut problems) = (Map::new(), Vec::new());
    for (name, text) in variables {
        if let Some(key) = name.strip_prefix(TEXT) {
            metadata.insert(key.to_owned(), Value::String(text.clone()));
        } else if name.starts_with(JSON) {
            match serde_json::from_str(text) {
                Ok(Value::Object(more)) => metadata.extend(more),
                _ => problems
                    .push(format!("variable {name} of the proxy is not a JSON object and has no effect")),
            }
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
             ISTIO_META_IDLE_TIMEOUT: 5\n  ISTIO_METAJSON_MORE: '{\"A\": {\"b\": 1}}'\n");
        let expected = serde_json::json!({"DNS_CAPTURE": "true", "IDLE_TIMEOUT": "5", "A": {"b": 1}});
        assert_eq!((concurrency, metadata, problems), (Some(2), expected, Vec::<String>::new()));
    }

    #[test]
    fn others_are_reported() {
        let (concurrency, metadata, problems) =
            of("{proxyMetadata: {EXIT_ON_ZERO_ACTIVE_CONNECTIONS: 'true', \
             ISTIO_METAJSON_X: '1'}, concurrency: many}");
        assert_eq!((concurrency, metadata), (None, serde_json::json!({})));
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(problems[0].contains("concurrency \"many\" is not a number of threads"), "{problems:?}");
        assert!(
            problems[1].contains("variable EXIT_ON_ZERO_ACTIVE_CONNECTIONS of the proxy is not supported"),
            "{problems:?}"
        );
        assert!(problems[2].contains("variable ISTIO_METAJSON_X of the proxy is not a JSON"), "{problems:?}");
        let (_, _, problems) = of("a: [");
        assert!(problems[0].contains("no field of it has an effect"), "{problems:?}");
        assert_eq!(of("").2, Vec::<String>::new());
    }
}
