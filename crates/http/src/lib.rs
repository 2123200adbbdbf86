//! HTTP codecs: buffers, sockets, TLS sessions, HTTP/1, HTTP/2, and the encodings of bodies.

pub mod buffer;
pub mod compress;
pub mod decompress;
pub mod flow;
pub mod grpc_status;
pub mod grpc_web;
pub mod head;
pub mod http1;
pub mod http2;
pub mod map;
pub mod proxy_protocol;
pub mod session;
pub mod socket;
pub mod splice;
pub mod stage;
pub mod timer;
pub mod wire;
