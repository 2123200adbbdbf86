//! Accepts connections: the workers with their listening sockets, and the steps of a connection up to its filter chain.

pub mod workers;

mod arrival;
pub(crate) mod connection;
mod connection_limit;
mod first_bytes;
pub(crate) mod listen;
