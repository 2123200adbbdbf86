//! The webhook configurations: which pods and which objects the API server asks the control plane about.

use serde_json::{Value, json};

use super::{APP, REVISION, labels};
use crate::{
    object::{Object, ObjectKind},
    settings::{Target, Validation},
};

/// Value of the label [`APP`], by which the control plane finds the configuration to fill in `caBundle`.
pub(crate) const INJECTOR: &str = "skysail-injector";
/// Label of a namespace that enables or disables injection by the default revision.
const NAMESPACE: &str = "istio-injection";
/// API groups of the objects that are validated. Those of Kubernetes itself are not: without a control plane, nothing else
/// in the cluster may wait for it.
const GROUPS: [&str; 6] = [
    "networking.istio.io",
    "security.istio.io",
    "telemetry.istio.io",
    "extensions.istio.io",
    "gateway.networking.k8s.io",
    "skysail.io",
];
/// Label of a pod that enables or disables injection.
const POD: &str = "sidecar.istio.io/inject";

/// Returns the configuration. As Istio's, it has several webhooks, because each has one pair of selectors. Their
/// conditions exclude each other, so a pod is injected once.
pub(super) fn configuration(target: &Target) -> Object {
    let is = |key: &str, values: &[&str]| json!({ "key": key, "operator": "In", "values": values });
    let is_absent = |key: &str| json!({ "key": key, "operator": "DoesNotExist" });
    let is_enabled = json!({ "key": POD, "operator": "NotIn", "values": ["false"] });
    let revision = is(REVISION, &[&target.revision]);
    let mut webhooks = vec![
        webhook(target, "rev.namespace", json!([revision, is_absent(NAMESPACE)]), json!([is_enabled])),
        webhook(
            target,
            "rev.object",
            json!([is_absent(REVISION), is_absent(NAMESPACE)]),
            json!([is_enabled, revision]),
        ),
    ];
    if target.is_default() {
        webhooks.extend([
            webhook(target, "namespace", json!([is(NAMESPACE, &["enabled"])]), json!([is_enabled])),
            webhook(
                target,
                "object",
                json!([is_absent(NAMESPACE), is_absent(REVISION)]),
                json!([is(POD, &["true"]), is_absent(REVISION)]),
            ),
        ]);
    }
    let mut labels = labels(target);
    labels[APP] = INJECTOR.into();
    let fields = json!({ "metadata": { "labels": labels }, "webhooks": webhooks });
    Object::new(ObjectKind::WEBHOOK, "", &target.webhook(), fields)
}

/// Returns a webhook. The control plane sets its `caBundle`.
fn webhook(target: &Target, name: &str, namespaces: Value, pods: Value) -> Value {
    json!({
        "name": format!("{name}.sidecar-injector.istio.io"),
        "clientConfig": { "service": { "name": target.service(), "namespace": target.namespace,
                                       "path": "/inject", "port": 443 } },
        "namespaceSelector": { "matchExpressions": namespaces },
        "objectSelector": { "matchExpressions": pods },
        "rules": [{ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
                    "resources": ["pods"], "scope": "Namespaced" }],
        "admissionReviewVersions": ["v1"],
        // A pod without a sidecar would send and accept plain text.
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "sideEffects": "None",
        "timeoutSeconds": 10,
    })
}

/// Returns the configuration of the webhook for validation; `None` if there is none. The default revision validates all
/// objects, another one those with its label.
pub(super) fn validation(target: &Target, validation: Validation) -> Option<Object> {
    let policy = match validation {
        Validation::Ignore => "Ignore",
        Validation::Fail => "Fail",
        Validation::Off => return None,
    };
    let of_revision = [json!({ "key": REVISION, "operator": "In", "values": [target.revision] })];
    let objects = if target.is_default() { json!({}) } else { json!({ "matchExpressions": of_revision }) };
    let rules = json!([{ "apiGroups": GROUPS, "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"],
                         "resources": ["*"], "scope": "*" }]);
    let webhook = json!({
        "name": "validation.skysail.io",
        "clientConfig": { "service": { "name": target.service(), "namespace": target.namespace,
                                       "path": "/validate", "port": 443 } },
        "objectSelector": objects,
        "rules": rules,
        "admissionReviewVersions": ["v1"],
        "failurePolicy": policy,
        "sideEffects": "None",
        "timeoutSeconds": 5,
    });
    let mut labels = labels(target);
    labels[APP] = INJECTOR.into();
    let fields = json!({ "metadata": { "labels": labels }, "webhooks": [webhook] });
    Some(Object::new(ObjectKind::VALIDATION, "", &target.validator(), fields))
}
