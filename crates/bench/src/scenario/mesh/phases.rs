//! Phases of the load on a mesh: its rate, and the workers that change.

use serde::{Deserialize, Serialize};

use crate::{
    graph::GraphDeployment,
    mesh::{MeshPhase, WorkerChange},
    scenario::document::{Checked, distinct, ensure, is_name, within},
};

/// Maximum number of phases, and of changes of a phase.
const MAX: usize = 16;
/// Maximum number of services in a message.
const SHOWN: usize = 10;

/// A phase of the load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PhaseInput {
    pub(super) name: String,
    /// Rate in percent of that of the mesh.
    #[serde(default = "same_rate")]
    rate_percent: f64,
    /// Changes of workers, which end with the phase.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    changes: Vec<WorkerChange>,
    /// Maximum share of failed requests, in percent. Absent: that of `acceptance`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) failed_percent: Option<f64>,
}

fn same_rate() -> f64 {
    100.0
}

impl PhaseInput {
    /// Returns the phase to measure; `None` is that of a mesh without phases.
    pub(super) fn measured(phase: Option<&Self>) -> MeshPhase {
        let unchanged = MeshPhase { rate_percent: same_rate(), changes: Vec::new() };
        phase.map_or(unchanged, |phase| MeshPhase {
            rate_percent: phase.rate_percent,
            changes: phase.changes.clone(),
        })
    }
}

/// Checks the phases of a mesh. `field` is that of the mesh.
pub(super) fn check(field: &str, phases: &[PhaseInput]) -> Checked {
    if phases.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = phases.iter().map(|phase| phase.name.as_str()).collect();
    distinct(&format!("{field}.phases"), &names, MAX)?;
    for (index, phase) in phases.iter().enumerate() {
        let field = |name: &str| format!("{field}.phases[{index}].{name}");
        is_name(&field("name"), &phase.name)?;
        within(&field("rate_percent"), phase.rate_percent, 1.0, 1_000.0)?;
        within(&field("failed_percent"), phase.failed_percent.unwrap_or_default(), 0.0, 100.0)?;
        ensure(phase.changes.len() <= MAX, &field("changes"), || format!("must have at most {MAX} values"))?;
        for (index, change) in phase.changes.iter().enumerate() {
            let replicas = change.replicas.map_or(1.0, f64::from);
            within(&field(&format!("changes[{index}].replicas")), replicas, 1.0, 10_000.0)?;
        }
    }
    Ok(())
}

/// Checks that a graph has the services that change. `field` is that of the mesh, or of the size that replaces graphs.
pub(super) fn check_services(field: &str, phases: &[PhaseInput], graph: &GraphDeployment) -> Checked {
    for (index, phase) in phases.iter().enumerate() {
        for (at, change) in phase.changes.iter().enumerate() {
            let field = format!("{field}.phases[{index}].changes[{at}].service");
            ensure(graph.services().any(|name| name == change.service), &field, || {
                let names = graph.services().take(SHOWN).collect::<Vec<_>>().join(", ");
                let more = if graph.services().count() > SHOWN { ", …" } else { "" };
                format!(
                    "the graph {} has no service {}; its services: {names}{more}",
                    graph.source, change.service
                )
            })?;
        }
    }
    Ok(())
}
