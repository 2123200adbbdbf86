//! Scenarios of the airline example: variants of its mesh with the proxies of each peer, under the load of user sessions.
//!
//! [`format`](mod@format) has the fields of the scenario. [`run`](mod@run) takes the turns.

mod format;
mod run;

pub(super) use self::{format::AirlineScenario, run::run};

#[cfg(test)]
mod tests;
