//! An object of the installation, and the kinds of these objects.

use std::fmt;

use kube::{api::ApiResource, core::GroupVersionKind};
use serde_json::{Value, json};

/// A kind of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObjectKind {
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    is_namespaced: bool,
}

const RBAC: &str = "rbac.authorization.k8s.io";

macro_rules! kinds {
    ($($name:ident: $group:expr, $version:literal, $kind:literal, $is_namespaced:literal;)*) => {
        impl ObjectKind {
            $(pub(crate) const $name: Self =
                Self { group: $group, version: $version, kind: $kind, is_namespaced: $is_namespaced };)*
        }
    };
}

kinds! {
    NAMESPACE: "", "v1", "Namespace", false;
    SERVICE_ACCOUNT: "", "v1", "ServiceAccount", true;
    CLUSTER_ROLE: RBAC, "v1", "ClusterRole", false;
    CLUSTER_ROLE_BINDING: RBAC, "v1", "ClusterRoleBinding", false;
    ROLE: RBAC, "v1", "Role", true;
    ROLE_BINDING: RBAC, "v1", "RoleBinding", true;
    SECRET: "", "v1", "Secret", true;
    CONFIG_MAP: "", "v1", "ConfigMap", true;
    SERVICE: "", "v1", "Service", true;
    DEPLOYMENT: "apps", "v1", "Deployment", true;
    DISRUPTION_BUDGET: "policy", "v1", "PodDisruptionBudget", true;
    AUTOSCALER: "autoscaling", "v2", "HorizontalPodAutoscaler", true;
    WEBHOOK: "admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration", false;
    DEFINITION: "apiextensions.k8s.io", "v1", "CustomResourceDefinition", false;
    VALIDATION: "admissionregistration.k8s.io", "v1", "ValidatingWebhookConfiguration", false;
}

impl ObjectKind {
    /// Returns what requests name.
    pub(crate) fn resource(self) -> ApiResource {
        ApiResource::from_gvk(&GroupVersionKind::gvk(self.group, self.version, self.kind))
    }
}

/// An object of the installation.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    pub(crate) kind: ObjectKind,
    /// Namespace; `None` for an object of the cluster.
    pub(crate) namespace: Option<String>,
    pub(crate) name: String,
    value: Value,
}

impl Object {
    /// Makes an object of fields besides its type and name. The namespace counts for kinds that have one.
    pub(crate) fn new(kind: ObjectKind, namespace: &str, name: &str, fields: Value) -> Self {
        let namespace = kind.is_namespaced.then(|| namespace.to_owned());
        let mut value = fields;
        let ApiResource { api_version, .. } = kind.resource();
        value["apiVersion"] = api_version.into();
        value["kind"] = kind.kind.into();
        value["metadata"]["name"] = name.into();
        if let Some(namespace) = &namespace {
            value["metadata"]["namespace"] = json!(namespace);
        }
        Self { kind, namespace, name: name.to_owned(), value }
    }

    /// Returns the object as Kubernetes reads it.
    pub fn value(&self) -> &Value {
        &self.value
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name, .. } = self;
        match namespace {
            Some(namespace) => write!(f, "{} {namespace}/{name}", kind.kind),
            None => write!(f, "{} {name}", kind.kind),
        }
    }
}
