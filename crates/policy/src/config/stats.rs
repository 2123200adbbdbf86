//! Istio's metrics and the overrides of their labels. Source: `stats.PluginConfig`.

use std::{sync::Arc, time::Duration};

use crate::expression::Expression;

/// Default interval at which the bytes of open connections are counted. Source: Istio.
pub const TCP_INTERVAL: Duration = Duration::from_secs(5);

/// Metrics to keep for requests and connections. The default is all metrics with all labels.
#[derive(Debug)]
pub struct Stats {
    /// Metrics of requests with their overrides; empty for all metrics with all labels.
    pub http: Vec<MetricOverride>,
    /// Metrics of connections with their overrides; empty for all metrics with all labels.
    pub tcp: Vec<MetricOverride>,
    /// Time after which an unused series is dropped (`rotation_interval` and `graceful_deletion_interval`).
    pub expiry: Option<Duration>,
    /// Interval at which the bytes of open connections are counted (`tcp_reporting_duration`).
    pub tcp_interval: Duration,
}

impl Default for Stats {
    fn default() -> Self {
        Self { http: Vec::new(), tcp: Vec::new(), expiry: None, tcp_interval: TCP_INTERVAL }
    }
}

/// Metrics with the same overrides. A metric that is in no entry is dropped.
#[derive(Debug)]
pub struct MetricOverride {
    /// Bit set of metrics, by index into [`HTTP`] or [`TCP`].
    pub metrics: u8,
    /// Labels that are removed (`None`) or replaced by the value of an expression. In order, each once.
    pub labels: Vec<(Box<str>, Option<Arc<Expression>>)>,
}

/// Metrics of requests, by the names in overrides: without the prefix `istio_`.
pub const HTTP: [&str; 6] = [
    "requests_total",
    "request_duration_milliseconds",
    "request_bytes",
    "response_bytes",
    "request_messages_total",
    "response_messages_total",
];

/// Metrics of connections, by the names in overrides.
pub const TCP: [&str; 4] = [
    "tcp_sent_bytes_total",
    "tcp_received_bytes_total",
    "tcp_connections_opened_total",
    "tcp_connections_closed_total",
];
