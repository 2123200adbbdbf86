//! Use of a cluster's circuit breakers.
//!
//! Source: `envoy.config.cluster.v3.CircuitBreakers`.

use std::sync::atomic::AtomicU32;

/// Connections and requests of a cluster, across workers. Each is counted only where the cluster limits it.
#[derive(Debug, Default)]
pub struct Usage {
    /// Open connections.
    pub connections: AtomicU32,
    /// Requests that wait for a connection.
    pub pending: AtomicU32,
    /// Requests in flight.
    pub requests: AtomicU32,
    /// Retries in flight.
    pub retries: AtomicU32,
}
