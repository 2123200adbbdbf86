//! Parts of the node that a proxy declares to the control plane: an Envoy `Node` in the form of Istio's agent.
//! `skysail up` makes it for its sidecars, and `skysail-proxy` in a pod of Kubernetes for itself.
//!
//! Source: istio/pkg/bootstrap/config.go and istio/pilot/cmd/pilot-agent.

use std::{collections::BTreeMap, net::IpAddr};

use serde::Deserialize;
use serde_json::{Map, Value};

/// Version of Istio that proxies declare. EnvoyFilters compare it.
pub const ISTIO_VERSION: &str = "1.32.0";
/// DNS domain in the id of a node.
const DOMAIN: &str = "cluster.local";
/// Prefix of variables whose value is text.
const TEXT: &str = "ISTIO_META_";
/// Prefix of variables whose value is a JSON object, whose keys are added.
const JSON: &str = "ISTIO_METAJSON_";

/// Returns the id of a node. `role` is `sidecar` or `router`.
pub fn id(role: &str, address: IpAddr, pod: &str, namespace: &str) -> String {
    format!("{role}~{address}~{pod}.{namespace}~{namespace}.svc.{DOMAIN}")
}

/// Returns whether an environment variable adds metadata to the node.
pub fn is_metadata(variable: &str) -> bool {
    variable.starts_with(TEXT) || variable.starts_with(JSON)
}

/// Returns the metadata that environment variables add to the node: `ISTIO_META_NAME` the text `NAME`, and
/// `ISTIO_METAJSON_…` the keys of a JSON object. Also returns errors as sentences.
pub fn metadata(variables: &BTreeMap<String, String>) -> (Map<String, Value>, Vec<String>) {
    let texts = variables.iter().filter_map(|(name, text)| Some((name.strip_prefix(TEXT)?, text)));
    let mut metadata: Map<String, Value> =
        texts.map(|(key, text)| (key.to_owned(), text.as_str().into())).collect();
    let mut problems = Vec::new();
    for (name, text) in variables.iter().filter(|(name, _)| name.starts_with(JSON)) {
        if let Ok(Value::Object(more)) = serde_json::from_str(text) {
            metadata.extend(more);
        } else {
            problems.push(format!("variable {name} of the proxy is not a JSON object and has no effect"));
        }
    }
    (metadata, problems)
}

/// Name of a proxy in traces, which is also the cluster of its node. Source:
/// `istio.mesh.v1alpha1.ProxyConfig.TracingServiceName`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TracingServiceName {
    /// The label `app` or `app.kubernetes.io/name`, or the canonical service, with the namespace.
    #[default]
    AppLabelAndNamespace,
    /// The canonical service.
    CanonicalNameOnly,
    /// The canonical service with the namespace.
    CanonicalNameAndNamespace,
}

impl TracingServiceName {
    /// Returns the name. `canonical` is the canonical service, which is the workload if no label names one.
    pub fn of(self, labels: &BTreeMap<String, String>, canonical: &str, namespace: &str) -> String {
        match self {
            Self::AppLabelAndNamespace => {
                let app = labels.get("app").or_else(|| labels.get("app.kubernetes.io/name"));
                format!("{}.{namespace}", app.map_or(canonical, String::as_str))
            }
            Self::CanonicalNameOnly => canonical.to_owned(),
            Self::CanonicalNameAndNamespace => format!("{canonical}.{namespace}"),
        }
    }
}

/// Returns the canonical service of a workload with these labels.
pub fn canonical_name<'a>(labels: &'a BTreeMap<String, String>, workload: &'a str) -> &'a str {
    ["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]
        .iter()
        .find_map(|name| labels.get(*name))
        .map_or(workload, String::as_str)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn variables_become_metadata() {
        let variables = [
            ("ISTIO_META_DNS_CAPTURE", "true"),
            ("ISTIO_META_A", "text"),
            ("ISTIO_METAJSON_MORE", r#"{"A": {"b": 1}}"#),
            ("ISTIO_METAJSON_BAD", "1"),
            ("OTHER", "x"),
        ];
        let variables = variables.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        let (metadata, problems) = metadata(&variables);
        assert_eq!(Value::Object(metadata), json!({"DNS_CAPTURE": "true", "A": {"b": 1}}));
        assert_eq!(
            problems,
            ["variable ISTIO_METAJSON_BAD of the proxy is not a JSON object and has no effect"]
        );
    }
}
