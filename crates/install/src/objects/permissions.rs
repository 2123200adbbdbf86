//! The service account of the control plane, and what it may do.

use std::collections::BTreeMap;

use kube::{api::ApiResource, core::GroupVersionKind};
use serde_json::{Value, json};
use skysail_model::api::Kind;

use super::{AUTHORITY, ROOTS, labels};
use crate::{
    object::{Object, ObjectKind},
    settings::Installation,
};

/// Webhook configurations.
const ADMISSION: &str = "admissionregistration.k8s.io";
const WEBHOOKS: [&str; 2] = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];
/// Lease of the leader of the control planes.
pub(crate) const LEASE: &str = "skysail-leader";
/// Lease of the replica that deploys gateways, without its revision.
const GATEWAYS_LEASE: &str = "skysail-gateways";
/// API group of roles.
const GROUP: &str = "rbac.authorization.k8s.io";

/// Returns the service account, the roles and their bindings.
pub(super) fn objects(installation: &Installation) -> Vec<Object> {
    let target = &installation.target;
    let metadata = json!({ "labels": labels(target) });
    let (name, everywhere, namespace) = (&target.name(), &target.cluster_name(), &target.namespace);
    let object = |kind, name: &str, mut fields: Value| {
        fields["metadata"] = metadata.clone();
        Object::new(kind, namespace, name, fields)
    };
    let subjects = json!([{ "kind": "ServiceAccount", "name": name, "namespace": namespace }]);
    let role = |kind: &str, name: &str| json!({ "apiGroup": GROUP, "kind": kind, "name": name });
    let binding = |role: Value| json!({ "roleRef": role, "subjects": subjects });
    vec![
        object(ObjectKind::SERVICE_ACCOUNT, name, json!({})),
        object(ObjectKind::CLUSTER_ROLE, everywhere, json!({ "rules": cluster_rules(installation) })),
        object(ObjectKind::CLUSTER_ROLE_BINDING, everywhere, binding(role("ClusterRole", everywhere))),
        object(ObjectKind::ROLE, name, json!({ "rules": namespace_rules(installation) })),
        object(ObjectKind::ROLE_BINDING, name, binding(role("Role", name))),
    ]
}

/// Returns the kinds that the control plane watches. It knows the workloads of other kinds by their pods.
pub(super) fn watched_kinds() -> impl Iterator<Item = Kind> {
    Kind::ALL.iter().copied().filter(|kind| !matches!(kind.group(), "apps" | "batch"))
}

/// Returns what the control plane may do in all namespaces.
fn cluster_rules(installation: &Installation) -> Vec<Value> {
    let mut by_group: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for kind in watched_kinds() {
        // The plural does not depend on the version.
        let named = GroupVersionKind::gvk(kind.group(), "v1", kind.as_str());
        by_group.entry(kind.group()).or_default().push(ApiResource::from_gvk(&named).plural);
    }
    let watch = |(group, mut resources): (&str, Vec<String>)| {
        resources.sort_unstable();
        rule(group, &resources, &["get", "list", "watch"])
    };
    let gateway_api = by_group.get("gateway.networking.k8s.io").into_iter().flatten();
    let gateway_api = gateway_api.filter(|resource| *resource != "referencegrants");
    let statuses: Vec<String> = gateway_api.map(|resource| format!("{resource}/status")).collect();
    let mut rules: Vec<Value> = by_group.into_iter().map(watch).collect();
    rules.extend([
        // The trust bundle for sidecars, in each namespace. The name of a new object cannot be prescribed.
        rule("", &["configmaps"], &["create"]),
        named(rule("", &["configmaps"], &["patch"]), ROOTS),
        // The trust bundle for the API server (caBundle).
        rule(ADMISSION, &WEBHOOKS, &["list", "watch"]),
        named(rule(ADMISSION, &WEBHOOKS[..1], &["update"]), &installation.target.webhook()),
        named(rule(ADMISSION, &WEBHOOKS[1..], &["update"]), &installation.target.validator()),
        // The status of objects.
        rule("gateway.networking.k8s.io", &statuses, &["patch"]),
        rule("networking.k8s.io", &["ingresses/status"], &["patch"]),
        // Tokens of service accounts.
        rule("authentication.k8s.io", &["tokenreviews"], &["create"]),
        json!({ "nonResourceURLs": ["/.well-known/openid-configuration", "/openid/v1/jwks"],
                "verbs": ["get"] }),
    ]);
    if installation.deploys_gateways {
        let verbs = ["get", "create", "patch"];
        rules.push(rule("", &["serviceaccounts", "services"], &verbs));
        rules.push(rule("apps", &["deployments"], &verbs));
        rules.push(rule("gateway.networking.k8s.io", &["gatewayclasses"], &["create"]));
    }
    rules
}

/// Returns what the control plane may do in its namespace besides: keep its certificate authority, and elect a leader.
fn namespace_rules(installation: &Installation) -> Vec<Value> {
    let leases = |verbs: &[&str]| rule("coordination.k8s.io", &["leases"], verbs);
    let mut rules = vec![
        rule("", &["secrets"], &["create"]),
        named(rule("", &["secrets"], &["update"]), AUTHORITY),
        leases(&["create"]),
        named(leases(&["get", "update"]), LEASE),
    ];
    if installation.deploys_gateways {
        let lease = format!("{GATEWAYS_LEASE}-{}", installation.target.revision);
        rules.push(named(leases(&["get", "update"]), &lease));
    }
    rules
}

/// Restricts a rule to the objects of a name.
fn named(mut rule: Value, name: &str) -> Value {
    rule["resourceNames"] = json!([name]);
    rule
}

fn rule(group: &str, resources: &[impl AsRef<str>], verbs: &[&str]) -> Value {
    let resources: Vec<&str> = resources.iter().map(AsRef::as_ref).collect();
    json!({ "apiGroups": [group], "resources": resources, "verbs": verbs })
}
