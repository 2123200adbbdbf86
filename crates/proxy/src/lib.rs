//! skysail-proxy: the sidecar.
//!
//! Modules are listed from top to bottom: a module uses those below it, never those above. `crates/testkit/tests/structure.rs` checks it.

#[cfg(feature = "fuzzing")]
pub mod fuzzing;

// Start, command line, admin page.
pub(crate) mod app;

pub(crate) mod admin;

// Configuration and certificates in force.
pub(crate) mod discovery;

// Envoy's protos as the types of `skysail_policy::config`.
pub(crate) mod translate;

// Connections and requests, in the order in which they pass.
pub mod accept;

pub(crate) mod request;

pub(crate) mod tcp;

// Calls of the sidecar's own: external authorization, key sets, collectors.
pub(crate) mod call;

// State of one worker and its connections.
pub mod worker;

// Connections to upstreams: endpoints, pools, TLS.
pub mod upstream;

// Limits and drain.
pub mod overload;

// Metrics, access logs, spans.
pub mod telemetry;

pub use app::{args::Args, run};
