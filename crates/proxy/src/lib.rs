//! skysail-proxy: the sidecar.
//!
//! Modules are listed from top to bottom: a module uses those below it, never those above. `tests/structure.rs` checks it.

// Start, command line, admin page.
pub(crate) mod app;

pub(crate) mod admin;

// Configuration and certificates in force: discovery, and Envoy's protos as the types of `policy::config`.
pub(crate) mod discovery;
pub(crate) mod translate;

// Connections and requests, in the order in which they pass.
pub mod accept;
pub(crate) mod request;
pub(crate) mod tcp;

// Calls of the sidecar's own: external authorization, key sets, collectors.
pub(crate) mod call;

// State of one worker, its connections and its upstreams.
pub mod upstream;
pub mod worker;

// Limits, drain and telemetry.
pub mod overload;
pub mod telemetry;

#[cfg(feature = "fuzzing")]
pub mod fuzzing;

pub use app::{args::Args, run};
