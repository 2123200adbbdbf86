//! Ingress and IngressClass (`networking.k8s.io`).

use serde::Deserialize;

/// `spec` of an Ingress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Ingress {}

/// `spec` of an IngressClass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct IngressClass {}
