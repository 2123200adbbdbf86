//! Accepts connections: the workers with their listening sockets, and the steps of a connection up to its filter chain.

pub mod workers;

pub(crate) mod connection;
mod connection_limit;
pub(crate) mod listen;
