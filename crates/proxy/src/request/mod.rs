//! Serves HTTP requests: reads the head, finds the route, runs the filters, forwards, responds and records.
//!
//! Modules stand in the order in which a request passes them.

pub(crate) mod serve;

pub(crate) mod story;

pub(crate) mod filters;
pub(crate) mod on_demand;
pub(crate) mod spans;

pub(crate) mod authorization;
pub(crate) mod forward;
pub(crate) mod mirror;

pub(crate) mod exchange;
pub(crate) mod tunnel;

pub(crate) mod hop;
