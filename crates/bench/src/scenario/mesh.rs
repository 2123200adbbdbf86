//! Scenarios of a whole mesh: service graphs that `skysail up` runs, without sidecars and with those of each peer.
//!
//! [`format`](mod@format) has the fields of the scenario, with [`phases`] of the load, [`size`] of the
//! meshes and their [`telemetry`]. [`run`](mod@run) takes the turns.

mod format;
mod phases;
mod run;
mod size;
mod telemetry;

pub(super) use self::{
    format::{MeshScenario, check_names, check_peers},
    run::run,
};

#[cfg(test)]
mod tests;
