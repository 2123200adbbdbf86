//! Telemetry of a mesh: sidecars with Istio's standard metrics, and without.

use serde::{Deserialize, Serialize};

use super::format::MeshCase;

/// Figure of the cost of telemetry.
pub(super) const OF_TELEMETRY: &str = "cpu_telemetry_us_per_request";
/// Explanation of the figure.
pub(super) const LEGEND: &str = "of it telemetry: CPU time of the sidecars over that of the same mesh in the same round, whose \
     sidecars make no metrics of requests. Divided by 1,000 it is vCPU of telemetry per 1,000 requests/s.";
/// Object that turns the metrics of all sidecars off.
const NO_METRICS: &str = "---
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata:
  name: no-metrics
  namespace: istio-system
spec:
  metrics:
  - providers:
    - name: prometheus
    overrides:
    - match:
        metric: ALL_METRICS
      disabled: true
";

/// Telemetry of the sidecars of a mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum MeshTelemetry {
    /// Istio's standard metrics.
    #[default]
    Metrics,
    /// No metrics of requests.
    None,
}

impl MeshTelemetry {
    /// Returns true for the default; for serialization.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(super) fn is_metrics(&self) -> bool {
        *self == Self::Metrics
    }

    /// Returns the objects of the mesh as YAML.
    pub(super) fn objects(self) -> &'static str {
        if self == Self::None { NO_METRICS } else { "" }
    }
}

/// Returns the case that differs in telemetry alone, for a case with metrics.
pub(super) fn reference<'a>(case: &MeshCase, cases: &'a [MeshCase]) -> Option<&'a MeshCase> {
    let of = |case: &MeshCase| {
        let mesh = &case.mesh;
        (case.peer, mesh.graph.clone(), mesh.policies, mesh.rate, mesh.connections, case.phase().cloned())
    };
    let is_same = |other: &&MeshCase| !other.mesh.telemetry.is_metrics() && of(other) == of(case);
    cases.iter().find(is_same).filter(|_| case.mesh.telemetry.is_metrics())
}
