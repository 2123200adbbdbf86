//! Scenarios of other benchmarks: each case is a run of `skysail bench control` or `skysail bench dns`.
//!
//! [`format`](mod@format) has the fields of the scenario. [`run`](mod@run) takes the turns.

mod format;
mod run;

pub(super) use self::{
    format::{CommandMeasurement, CommandScenario},
    run::run,
};

#[cfg(test)]
mod tests;
