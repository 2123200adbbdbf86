//! Scenarios of the generation of configuration: inputs instead of topologies and a load, and no peers.
//!
//! [`format`](mod@format) has the fields of the scenario. [`run`](mod@run) takes the turns.

mod format;
mod run;

pub(super) use self::{format::GenerationScenario, run::run};

#[cfg(test)]
mod tests;
