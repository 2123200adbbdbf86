//! Bytes to heads and bodies and back: buffers, sockets, TLS sessions, HTTP/1, HTTP/2 and what wraps them.

pub(crate) mod buffer;
pub mod compress;
pub(crate) mod flow;
pub mod grpc_status;
pub(crate) mod grpc_web;
pub mod head;
pub mod http1;
pub mod http2;
pub mod map;
pub mod proxy_protocol;
pub(crate) mod session;
pub(crate) mod socket;
pub(crate) mod splice;
pub(crate) mod timer;
pub(crate) mod wire;
