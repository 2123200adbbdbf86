//! Scenarios of other benchmarks: each case is a run of `skysail bench control` or `skysail bench dns`.
//!
//! [`format`](mod@format) has the fields of the scenario. [`run`](mod@run) takes the turns, [`search`] finds the capacity of
//! a control plane. [`arguments`] merges those of a case and of a size.

mod arguments;
mod format;
mod run;
mod search;

pub(super) use self::{
    format::{CommandMeasurement, CommandScenario},
    run::run,
};

#[cfg(test)]
mod tests;
