//! Scenarios of the generation of configuration: inputs instead of topologies and a load, and no peers.
//!
//! [`format`](mod@format) has the fields of the scenario, [`result`] those of the result file. [`run`](mod@run) takes
//! the turns. [`table`], [`page`] and [`diff`](mod@diff) show and compare results.

mod diff;
mod format;
mod page;
mod result;
mod run;
mod table;

pub(super) use self::{
    diff::diff, format::GenerationScenario, page::section, result::GenerationResult, run::run,
    table::markdown,
};

#[cfg(test)]
mod tests;
