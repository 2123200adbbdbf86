//! skysail-proxy: the sidecar.

pub mod config;
