//! skysail-proxy: the sidecar.

pub mod config;
pub mod head;
pub(crate) mod buffer;
pub mod http1;
pub(crate) mod socket;
