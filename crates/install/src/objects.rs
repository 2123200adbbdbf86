//! The objects of an installation, in the order in which they are applied.

mod permissions;
mod webhook;
mod workload;

pub(crate) use self::{permissions::LEASE, webhook::INJECTOR};

use serde_json::{Value, json};

use crate::{
    object::{Object, ObjectKind},
    settings::{Installation, Target},
};

/// Label with the program that manages an object, and its value.
pub(crate) const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
pub(crate) const MANAGER: &str = "skysail";
/// Label with the system that an object is a part of.
const PART_OF: &str = "app.kubernetes.io/part-of";
/// Secret of a self-signed certificate authority.
pub(crate) const AUTHORITY: &str = "istio-ca-secret";
/// ConfigMap with the trust bundle, in each namespace.
pub(crate) const ROOTS: &str = "istio-ca-root-cert";
/// Label by which Istio's tools find control planes, and its value.
pub(crate) const APP: &str = "app";
pub(crate) const ISTIOD: &str = "istiod";
/// Label with the name of the program.
const NAME: &str = "app.kubernetes.io/name";
/// Name of the container of a sidecar.
pub(crate) const SIDECAR: &str = "istio-proxy";
/// Label with the revision.
pub(crate) const REVISION: &str = "istio.io/rev";

/// Returns the objects of an installation. The webhook configurations are the last ones: with them, the API server asks the
/// control plane.
pub fn objects(installation: &Installation) -> Vec<Object> {
    let Target { namespace, .. } = &installation.target;
    let mut objects = vec![Object::new(ObjectKind::NAMESPACE, "", namespace, json!({}))];
    objects.extend(definitions());
    objects.extend(permissions::objects(installation));
    objects.extend(workload::objects(installation));
    objects.extend(webhook::validation(&installation.target, installation.validation));
    objects.push(webhook::configuration(&installation.target));
    objects
}

/// Returns the definitions of Skysail's own kinds. All revisions share them.
pub fn definitions() -> Vec<Object> {
    let all = skysail_model::definitions::definitions().into_iter();
    let definition = |mut fields: Value| {
        let name = fields["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        fields["metadata"]["labels"] = json!({ PART_OF: MANAGER, MANAGED_BY: MANAGER });
        Object::new(ObjectKind::DEFINITION, "", &name, fields)
    };
    all.map(definition).collect()
}

impl Installation {
    /// Returns all options of skysaild.
    pub fn control_arguments(&self) -> Vec<String> {
        workload::arguments(self)
    }
}

/// Returns the labels that select the control plane's pods.
fn selector(target: &Target) -> Value {
    json!({ NAME: "skysaild", REVISION: target.revision })
}

/// Returns the labels of all objects but the namespace.
fn labels(target: &Target) -> Value {
    let mut labels = selector(target);
    labels[PART_OF] = MANAGER.into();
    labels[MANAGED_BY] = MANAGER.into();
    labels
}

#[cfg(test)]
mod tests;
