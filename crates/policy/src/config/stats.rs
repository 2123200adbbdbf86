//! Istio's metrics, and what is changed about them. Source: `stats.PluginConfig`.

use std::{sync::Arc, time::Duration};

use crate::expression::Expression;

/// Which metrics are kept of requests and connections. Nothing changed by default.
#[derive(Debug, Default)]
pub struct Stats {
    /// Metrics of requests with the labels they have; empty for all with all labels.
    pub http: Vec<MetricChange>,
    /// The same of connections.
    pub tcp: Vec<MetricChange>,
    /// How long series are kept that nothing is counted in (`rotation_interval` and `graceful_deletion_interval`).
    pub expiry: Option<Duration>,
}

/// Metrics whose labels are changed in the same way. Metrics in no change are dropped.
#[derive(Debug)]
pub struct MetricChange {
    /// Which: bits by their places in [`HTTP`] or [`TCP`].
    pub metrics: u8,
    /// Labels that are taken away, or have this value. In order, each once.
    pub labels: Vec<(Box<str>, Option<Arc<Expression>>)>,
}

/// Metrics of requests, by the names that changes know them by: without `istio_`.
pub const HTTP: [&str; 6] = [
    "requests_total",
    "request_duration_milliseconds",
    "request_bytes",
    "response_bytes",
    "request_messages_total",
    "response_messages_total",
];

/// Metrics of connections.
pub const TCP: [&str; 4] = [
    "tcp_sent_bytes_total",
    "tcp_received_bytes_total",
    "tcp_connections_opened_total",
    "tcp_connections_closed_total",
];
