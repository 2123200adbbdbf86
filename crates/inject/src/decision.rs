//! Whether a pod gets a sidecar, as Istio's webhook configurations and its injector decide together.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    annotations::text_map,
    settings::{NAME, Settings},
};

/// Labels of a namespace.
pub type NamespaceLabels = BTreeMap<String, String>;

/// Label or annotation of a pod that enables or disables injection.
const INJECT: &str = "sidecar.istio.io/inject";
/// Annotation that an injector writes.
pub(crate) const STATUS: &str = "sidecar.istio.io/status";
/// Label with the revision of the control plane.
pub(crate) const REVISION: &str = "istio.io/rev";
/// Label of a namespace that enables or disables injection.
const NAMESPACE: &str = "istio-injection";
/// Namespaces whose pods never get a sidecar.
pub const SYSTEM_NAMESPACES: [&str; 4] =
    ["kube-system", "kube-public", "kube-node-lease", "local-path-storage"];

/// Decision about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The pod gets a sidecar.
    Inject,
    /// The pod gets none, for this reason.
    Leave(String),
}

/// Decides about a pod in a namespace.
///
/// With `labels` of the namespace, this includes the selectors of Istio's webhook configurations. Without them, the
/// caller has made this choice already: the webhook is called only for selected pods, and a user names files.
pub fn decide(
    pod: &Value,
    namespace: &str,
    labels: Option<&NamespaceLabels>,
    settings: &Settings,
) -> (Decision, Vec<String>) {
    let mut warnings = Vec::new();
    let leave = |reason: &str| Decision::Leave(reason.to_owned());
    let metadata = &pod["metadata"];
    let annotations = text_map(&metadata["annotations"]);
    let pod_labels = text_map(&metadata["labels"]);
    if annotations.contains_key(STATUS) {
        if has_sidecar(pod) {
            return (leave("it is injected already (annotation sidecar.istio.io/status)"), warnings);
        }
        warnings.push(format!("{STATUS}: the pod has no container {NAME}, so the annotation has no effect"));
    }
    if pod["spec"]["hostNetwork"] == Value::Bool(true) {
        return (leave("it uses the network of its node (hostNetwork)"), warnings);
    }
    if SYSTEM_NAMESPACES.contains(&namespace) {
        return (leave("injection is disabled in this namespace"), warnings);
    }
    // The label replaces the annotation, even if its value is not valid.
    let switch = pod_labels.get(INJECT).or_else(|| annotations.get(INJECT)).copied().unwrap_or_default();
    match switch {
        "false" => return (leave("sidecar.istio.io/inject is \"false\""), warnings),
        "true" | "" => {}
        other => {
            warnings.push(format!("{INJECT}: {other:?} is neither \"true\" nor \"false\" and has no effect"));
        }
    }
    let Some(labels) = labels else { return (Decision::Inject, warnings) };
    // The webhooks select by the label of the pod, not by the annotation.
    let label = pod_labels.get(INJECT).copied().unwrap_or_default();
    let revision = pod_labels.get(REVISION).copied();
    let decision = match (labels.get(NAMESPACE).map(String::as_str), labels.get(REVISION)) {
        (Some("enabled"), _) if settings.is_default_revision => Decision::Inject,
        (Some("enabled"), _) => leave("its namespace has istio-injection, which is for the default revision"),
        (Some("disabled"), _) => leave("istio-injection of its namespace is disabled"),
        (Some(_), _) => leave("istio-injection of its namespace has another value than enabled"),
        (None, Some(chosen)) if *chosen == settings.revision => Decision::Inject,
        (None, Some(_)) => leave("its namespace names another revision (istio.io/rev)"),
        (None, None) => match revision {
            Some(revision) if revision == settings.revision => Decision::Inject,
            Some(_) => leave("it names another revision (istio.io/rev)"),
            None if label == "true" && settings.is_default_revision => Decision::Inject,
            None => leave("neither its namespace nor the pod enables injection"),
        },
    };
    (decision, warnings)
}

/// Returns whether a pod has the container of a sidecar.
fn has_sidecar(pod: &Value) -> bool {
    let lists = ["containers", "initContainers"].map(|list| pod["spec"][list].as_array());
    lists.into_iter().flatten().flatten().any(|container| container["name"] == NAME)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn is_injected(namespace: Option<&[(&str, &str)]>, pod: &[(&str, &str)]) -> bool {
        let pod = json!({ "metadata": { "labels": pod.iter().copied().collect::<BTreeMap<_, _>>() } });
        let labels = namespace
            .map(|labels| labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect());
        let settings = Settings::new("image");
        decide(&pod, "shop", labels.as_ref(), &settings).0 == Decision::Inject
    }

    #[test]
    fn labels_of_namespace_and_pod_decide_as_in_istio() {
        let enabled: &[_] = &[("istio-injection", "enabled")];
        let revision: &[_] = &[("istio.io/rev", "default")];
        let other: &[_] = &[("istio.io/rev", "canary")];
        let disabled: &[_] = &[("istio-injection", "disabled")];
        let (on, off): (&[_], &[_]) = (&[(INJECT, "true")], &[(INJECT, "false")]);
        for (namespace, pod, expected) in [
            (enabled, &[][..], true),
            (enabled, off, false),
            (revision, &[], true),
            (revision, off, false),
            (other, &[], false),
            (other, on, false),
            (disabled, on, false),
            (disabled, revision, false),
            (&[], &[], false),
            (&[], on, true),
            (&[], revision, true),
            (&[], other, false),
            (&[("istio-injection", "enabled"), ("istio.io/rev", "canary")], &[], true),
        ] {
            assert_eq!(is_injected(Some(namespace), pod), expected, "{namespace:?} {pod:?}");
        }
        assert!(is_injected(None, &[]) && !is_injected(None, off) && is_injected(None, &[(INJECT, "maybe")]));
    }

    #[test]
    fn some_pods_never_get_a_sidecar() {
        let settings = Settings::new("image");
        let reason = |pod: &Value, namespace| match decide(pod, namespace, None, &settings).0 {
            Decision::Leave(reason) => reason,
            Decision::Inject => String::new(),
        };
        let mut injected = json!({ "metadata": { "annotations": { STATUS: "{}" } } });
        assert_eq!(reason(&injected, "shop"), "", "an annotation alone is no sidecar");
        injected["spec"]["initContainers"] = json!([{ "name": NAME }]);
        assert!(reason(&injected, "shop").contains("already"));
        assert!(reason(&json!({ "spec": { "hostNetwork": true } }), "shop").contains("hostNetwork"));
        assert!(reason(&json!({}), "kube-system").contains("namespace"));
        assert_eq!(reason(&json!({}), "shop"), "");
    }
}
