//! WorkloadEntry and WorkloadGroup. Fields are Istio's (`networking.istio.io`).

use serde::Deserialize;

/// `spec` of a WorkloadEntry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadEntry {}

/// `spec` of a WorkloadGroup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadGroup {}
