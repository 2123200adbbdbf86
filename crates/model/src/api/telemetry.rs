//! Telemetry. Fields are Istio's (`telemetry.istio.io`).

use serde::Deserialize;

/// `spec` of a Telemetry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Telemetry {}
