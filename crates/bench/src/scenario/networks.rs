//! Scenarios of networks: the same requests through sidecars over networks of several kinds.
//!
//! [`format`](mod@format) has the fields of the scenario. [`run`](mod@run) takes the turns.

mod format;
mod run;

pub(super) use self::{format::NetworksScenario, run::run};

#[cfg(test)]
mod tests;
