//! skysail-proxy: the sidecar.

pub mod config;
pub mod head;
pub(crate) mod buffer;
pub mod http1;
pub(crate) mod socket;
pub(crate) mod translate;
pub mod balance;
pub mod cors;
pub mod error;
pub mod fault;
pub mod headers;
pub mod matching;
pub mod peer;
pub mod policy;
pub mod route;
pub mod telemetry;
