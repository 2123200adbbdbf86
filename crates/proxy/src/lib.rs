//! skysail-proxy: the sidecar of the mesh.
//!
//! Modules are listed from top to bottom: a module uses those below it, never those above.
//! `crates/testkit/tests/structure.rs` checks the order.

#[cfg(feature = "fuzzing")]
pub mod fuzzing;

// The program with its commands.
mod program;

// Process start, command line, admin page.
pub(crate) mod app;

pub(crate) mod admin;

// Configuration and certificates in effect.
pub(crate) mod discovery;

// Decisions about one request, with reasons, from resources given as bytes.
pub mod explain;

// Translation of Envoy's protos into the types of `skysail_policy::config`.
pub(crate) mod translate;

// Downstream connections and requests, in processing order.
pub mod accept;

pub(crate) mod request;

pub(crate) mod tcp;

// Requests of the sidecar itself: external authorization, JWKS, telemetry collectors.
pub(crate) mod call;

// State of one worker and its connections.
pub mod worker;

// Lua scripts of HTTP filters.
pub(crate) mod script;

// Upstream connections: endpoints, connection pools, TLS.
pub mod upstream;

// Overload limits and drain.
pub mod overload;

// Metrics, access logs, spans.
pub mod telemetry;

pub use program::Program;
