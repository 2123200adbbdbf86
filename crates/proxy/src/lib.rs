//! skysail-proxy: the sidecar.

pub mod config;
pub mod head;
