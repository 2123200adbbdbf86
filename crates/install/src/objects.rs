//! The objects of an installation, in the order in which they are applied.

mod permissions;
mod webhook;
mod workload;

pub(crate) use self::webhook::INJECTOR;

use serde_json::{Value, json};

use crate::{
    object::{Object, ObjectKind},
    settings::{Installation, Target},
};

/// Label with the program that manages an object, and its value.
pub(crate) const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
pub(crate) const MANAGER: &str = "skysail";
/// Secret of a self-signed certificate authority.
pub(crate) const AUTHORITY: &str = "istio-ca-secret";
/// ConfigMap with the trust bundle, in each namespace.
pub(crate) const ROOTS: &str = "istio-ca-root-cert";
/// Label by which Istio's tools find control planes, and its value.
pub(crate) const APP: &str = "app";
pub(crate) const ISTIOD: &str = "istiod";
/// Label with the name of the program.
const NAME: &str = "app.kubernetes.io/name";
/// Label with the revision.
pub(crate) const REVISION: &str = "istio.io/rev";

/// Returns the objects of an installation. The webhook configurations are the last ones: with them, the API server asks the
/// control plane.
pub fn objects(installation: &Installation) -> Vec<Object> {
    let Target { namespace, .. } = &installation.target;
    let mut objects = vec![Object::new(ObjectKind::NAMESPACE, "", namespace, json!({}))];
    objects.extend(permissions::objects(installation));
    objects.extend(workload::objects(installation));
    objects.extend(webhook::validation(&installation.target, installation.validation));
    objects.push(webhook::configuration(&installation.target));
    objects
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
    labels["app.kubernetes.io/part-of"] = MANAGER.into();
    labels[MANAGED_BY] = MANAGER.into();
    labels
}

#[cfg(test)]
mod tests;
