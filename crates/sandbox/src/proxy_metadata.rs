//! Metadata of a sidecar's node that its pod adds, as Istio's agent reads them: `proxyMetadata` of the annotation
//! `proxy.istio.io/config`.

use serde_json::{Map, Value};

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
pub(crate) fn read(annotations: &Labels) -> (Map<String, Value>, Vec<String>) {
    let (mut metadata, mut problems) = (Map::new(), Vec::new());
    let Some(text) = annotations.get(ANNOTATION) else { return (metadata, problems) };
    let mut add = |problem: String| problems.push(format!("annotation {ANNOTATION}: {problem}"));
    let root = match skysail_yaml::documents(text).next().map(|document| document.root) {
        None => return (metadata, problems),
        Some(Err(error)) => {
            add(format!("{error}; no field of it has an effect"));
            return (metadata, problems);
        }
        Some(Ok(root)) => root.to_json(),
    };
    for (name, value) in root.get("proxyMetadata").and_then(Value::as_object).into_iter().flatten() {
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if let Some(key) = name.strip_prefix(TEXT) {
            metadata.insert(key.to_owned(), Value::String(text));
        } else if name.starts_with(JSON) {
            match serde_json::from_str(&text) {
                Ok(Value::Object(more)) => metadata.extend(more),
                _ => add(format!("proxyMetadata.{name} is not a JSON object and has no effect")),
            }
        } else {
            add(format!("proxyMetadata.{name} is not supported here and has no effect"));
        }
    }
    (metadata, problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> (Value, Vec<String>) {
        let (metadata, problems) = read(&[(ANNOTATION.to_owned(), text.to_owned())].into());
        (Value::Object(metadata), problems)
    }

    #[test]
    fn variables_become_metadata() {
        let (metadata, problems) = of("concurrency: 2\nproxyMetadata:\n  ISTIO_META_DNS_CAPTURE: 'true'\n  \
             ISTIO_META_IDLE_TIMEOUT: 5\n  ISTIO_METAJSON_MORE: '{\"A\": {\"b\": 1}}'\n");
        let expected = serde_json::json!({"DNS_CAPTURE": "true", "IDLE_TIMEOUT": "5", "A": {"b": 1}});
        assert_eq!((metadata, problems), (expected, Vec::<String>::new()));
    }

    #[test]
    fn others_are_reported() {
        let (metadata, problems) =
            of("proxyMetadata: {EXIT_ON_ZERO_ACTIVE_CONNECTIONS: 'true', ISTIO_METAJSON_X: '1'}");
        assert_eq!(metadata, serde_json::json!({}));
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(
            problems[0].contains("proxyMetadata.EXIT_ON_ZERO_ACTIVE_CONNECTIONS is not supported"),
            "{problems:?}"
        );
        assert!(problems[1].contains("proxyMetadata.ISTIO_METAJSON_X is not a JSON object"), "{problems:?}");
        let (_, problems) = of("a: [");
        assert!(problems[0].contains("no field of it has an effect"), "{problems:?}");
        assert_eq!(of("").1, Vec::<String>::new());
    }
}
