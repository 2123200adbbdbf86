//! EnvoyFilter. Fields are Istio's (`networking.istio.io`).

use serde::Deserialize;

/// `spec` of an EnvoyFilter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EnvoyFilter {}
