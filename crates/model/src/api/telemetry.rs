//! Telemetry. Fields are Istio's (`telemetry.istio.io`).

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{
    destination_rule::WorkloadSelector,
    security::TargetRef,
    value::{Duration, is_header_name},
};

/// `spec` of a Telemetry.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Telemetry {
    /// Workloads that it selects; unset: the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// Gateway or Service that it is attached to.
    pub target_ref: Option<TargetRef>,
    /// Gateways and Services that it is attached to.
    pub target_refs: Vec<TargetRef>,
    /// Traces; later entries override earlier ones.
    pub tracing: Vec<Tracing>,
    /// Metrics; later entries override earlier ones.
    pub metrics: Vec<Metrics>,
    /// Access logs; later entries override earlier ones.
    pub access_logging: Vec<AccessLogging>,
}

/// Reference to a provider of the mesh configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ProviderRef {
    /// Name.
    pub name: String,
}

/// Side of a request on which a setting applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Mode {
    /// Both sides; also `UNDEFINED` in the `match` of an extension.
    #[default]
    #[serde(alias = "UNDEFINED")]
    ClientAndServer,
    /// Outbound requests, and requests of gateways.
    Client,
    /// Inbound requests.
    Server,
}

impl Mode {
    /// Returns whether a setting for this mode applies to a side.
    pub fn covers(self, side: Self) -> bool {
        self == Self::ClientAndServer || self == side
    }
}

/// `{mode: CLIENT}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ModeSelector {
    /// Side.
    pub mode: Mode,
}

/// Traces.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Tracing {
    /// Side.
    #[serde(rename = "match")]
    pub matched: Option<ModeSelector>,
    /// Providers; the first is used.
    pub providers: Vec<ProviderRef>,
    /// Percentage of new traces that are sampled.
    pub random_sampling_percentage: Option<f64>,
    /// Whether no spans are reported.
    pub disable_span_reporting: Option<bool>,
    /// Tags of spans.
    pub custom_tags: Option<BTreeMap<String, CustomTag>>,
    /// Whether the request id carries the sampling decision.
    pub use_request_id_for_trace_sampling: Option<bool>,
    /// Whether spans have Istio's own tags.
    pub enable_istio_tags: Option<bool>,
    /// Whether the trace context is not forwarded.
    pub disable_context_propagation: Option<bool>,
}

/// Tag of a span; one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct CustomTag {
    /// Fixed text.
    pub literal: Option<Literal>,
    /// Variable of the proxy's environment.
    pub environment: Option<NamedTag>,
    /// Request header.
    pub header: Option<NamedTag>,
    /// Text with command operators.
    pub formatter: Option<Literal>,
}

impl CustomTag {
    /// Returns whether the tag has exactly one value, and the names in it are valid.
    pub(crate) fn is_valid(&self) -> bool {
        let kinds = [
            self.literal.is_some(),
            self.environment.is_some(),
            self.header.is_some(),
            self.formatter.is_some(),
        ];
        kinds.iter().filter(|is_set| **is_set).count() == 1
            && self.environment.as_ref().is_none_or(|of| !of.name.is_empty())
            && self.header.as_ref().is_none_or(|of| is_header_name(&of.name))
    }

    /// Returns the size of the texts in bytes.
    pub(crate) fn size(&self) -> usize {
        let literals = [&self.literal, &self.formatter].into_iter().flatten().map(|of| of.value.len());
        let named = [&self.environment, &self.header].into_iter().flatten();
        literals.sum::<usize>() + named.map(|of| of.name.len() + of.default_value.len()).sum::<usize>()
    }
}

/// `{value: text}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct Literal {
    /// Text.
    pub value: String,
}

/// Variable or header.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NamedTag {
    /// Name.
    pub name: String,
    /// Text if it does not exist; empty: no tag.
    pub default_value: String,
}

/// Metrics.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metrics {
    /// Providers.
    pub providers: Vec<ProviderRef>,
    /// Changes to metrics; later entries override earlier ones.
    pub overrides: Vec<MetricsOverride>,
    /// Reporting interval of TCP metrics.
    pub reporting_interval: Option<Duration>,
}

/// Change to metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct MetricsOverride {
    /// Metrics; unset: all.
    #[serde(rename = "match")]
    pub matched: Option<MetricSelector>,
    /// Whether the metrics are not recorded.
    pub disabled: Option<bool>,
    /// Changes to labels, by label.
    pub tag_overrides: BTreeMap<String, TagOverride>,
}

/// Selects metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct MetricSelector {
    /// Metric of Istio.
    pub metric: Option<Metric>,
    /// Metric of another name.
    pub custom_metric: String,
    /// Side.
    pub mode: Mode,
}

/// Metric of Istio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Metric {
    AllMetrics,
    GrpcRequestMessages,
    GrpcResponseMessages,
    RequestCount,
    RequestDuration,
    RequestSize,
    ResponseSize,
    TcpClosedConnections,
    TcpOpenedConnections,
    TcpReceivedBytes,
    TcpSentBytes,
}

impl Metric {
    /// Single metrics with their names in Istio's API and in Prometheus, sorted by the former.
    pub const ALL: [(&'static str, Self, &'static str); 10] = [
        ("GRPC_REQUEST_MESSAGES", Self::GrpcRequestMessages, "request_messages_total"),
        ("GRPC_RESPONSE_MESSAGES", Self::GrpcResponseMessages, "response_messages_total"),
        ("REQUEST_COUNT", Self::RequestCount, "requests_total"),
        ("REQUEST_DURATION", Self::RequestDuration, "request_duration_milliseconds"),
        ("REQUEST_SIZE", Self::RequestSize, "request_bytes"),
        ("RESPONSE_SIZE", Self::ResponseSize, "response_bytes"),
        ("TCP_CLOSED_CONNECTIONS", Self::TcpClosedConnections, "tcp_connections_closed_total"),
        ("TCP_OPENED_CONNECTIONS", Self::TcpOpenedConnections, "tcp_connections_opened_total"),
        ("TCP_RECEIVED_BYTES", Self::TcpReceivedBytes, "tcp_received_bytes_total"),
        ("TCP_SENT_BYTES", Self::TcpSentBytes, "tcp_sent_bytes_total"),
    ];
}

/// Change to a label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TagOverride {
    /// Operation.
    pub operation: TagOperation,
    /// Expression of the value.
    pub value: String,
}

/// Operation on a label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TagOperation {
    /// Adds or replaces it.
    #[default]
    Upsert,
    /// Removes it.
    Remove,
}

/// Access logs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct AccessLogging {
    /// Side.
    #[serde(rename = "match")]
    pub matched: Option<ModeSelector>,
    /// Providers.
    pub providers: Vec<ProviderRef>,
    /// Whether nothing is logged.
    pub disabled: Option<bool>,
    /// Requests that are logged.
    pub filter: Option<LogFilter>,
}

/// Requests that are logged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct LogFilter {
    /// CEL expression.
    pub expression: String,
}
