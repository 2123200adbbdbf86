//! Messages for OpenTelemetry collectors: logs and spans.
//!
//! Field numbers are those of open-telemetry/opentelemetry-proto 1.x. The common messages
//! (`opentelemetry.proto.common.v1`) are part of Envoy's API, which uses them to configure access logs.

pub use envoy_types::pb::opentelemetry::proto::common::v1::{
    AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList, any_value,
};
use prost::Message;

/// Method that receives an [`ExportLogsServiceRequest`].
pub const EXPORT_LOGS: &str = "/opentelemetry.proto.collector.logs.v1.LogsService/Export";
/// Method that receives an [`ExportTraceServiceRequest`].
pub const EXPORT_SPANS: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// `opentelemetry.proto.resource.v1.Resource`: the reporting entity.
#[derive(Clone, PartialEq, Message)]
pub struct Resource {
    /// Attributes of the entity.
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
    /// Number of omitted attributes.
    #[prost(uint32, tag = "2")]
    pub dropped_attributes_count: u32,
}

/// `opentelemetry.proto.collector.logs.v1.ExportLogsServiceRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExportLogsServiceRequest {
    /// Logs by resource.
    #[prost(message, repeated, tag = "1")]
    pub resource_logs: Vec<ResourceLogs>,
}

/// `opentelemetry.proto.logs.v1.ResourceLogs`.
#[derive(Clone, PartialEq, Message)]
pub struct ResourceLogs {
    /// Reporting entity.
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    /// Logs by instrumentation scope.
    #[prost(message, repeated, tag = "2")]
    pub scope_logs: Vec<ScopeLogs>,
    /// Schema of `resource`.
    #[prost(string, tag = "3")]
    pub schema_url: String,
}

/// `opentelemetry.proto.logs.v1.ScopeLogs`.
#[derive(Clone, PartialEq, Message)]
pub struct ScopeLogs {
    /// Instrumentation scope.
    #[prost(message, optional, tag = "1")]
    pub scope: Option<InstrumentationScope>,
    /// Log records.
    #[prost(message, repeated, tag = "2")]
    pub log_records: Vec<LogRecord>,
    /// Schema of the records.
    #[prost(string, tag = "3")]
    pub schema_url: String,
}

/// `opentelemetry.proto.logs.v1.LogRecord`.
#[derive(Clone, PartialEq, Message)]
pub struct LogRecord {
    /// Time of the event, in nanoseconds since 1970.
    #[prost(fixed64, tag = "1")]
    pub time_unix_nano: u64,
    /// Time of its observation.
    #[prost(fixed64, tag = "11")]
    pub observed_time_unix_nano: u64,
    /// Severity (`SeverityNumber`).
    #[prost(int32, tag = "2")]
    pub severity_number: i32,
    /// Severity as text.
    #[prost(string, tag = "3")]
    pub severity_text: String,
    /// Body.
    #[prost(message, optional, tag = "5")]
    pub body: Option<AnyValue>,
    /// Attributes.
    #[prost(message, repeated, tag = "6")]
    pub attributes: Vec<KeyValue>,
    /// Number of omitted attributes.
    #[prost(uint32, tag = "7")]
    pub dropped_attributes_count: u32,
    /// W3C trace flags in the lowest 8 bits.
    #[prost(fixed32, tag = "8")]
    pub flags: u32,
    /// 16 bytes; empty for none.
    #[prost(bytes = "vec", tag = "9")]
    pub trace_id: Vec<u8>,
    /// 8 bytes; empty for none.
    #[prost(bytes = "vec", tag = "10")]
    pub span_id: Vec<u8>,
    /// Kind of event.
    #[prost(string, tag = "12")]
    pub event_name: String,
}

/// `opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExportTraceServiceRequest {
    /// Spans by resource.
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

/// `opentelemetry.proto.trace.v1.ResourceSpans`.
#[derive(Clone, PartialEq, Message)]
pub struct ResourceSpans {
    /// Reporting entity.
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    /// Spans by instrumentation scope.
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
    /// Schema of `resource`.
    #[prost(string, tag = "3")]
    pub schema_url: String,
}

/// `opentelemetry.proto.trace.v1.ScopeSpans`.
#[derive(Clone, PartialEq, Message)]
pub struct ScopeSpans {
    /// Instrumentation scope.
    #[prost(message, optional, tag = "1")]
    pub scope: Option<InstrumentationScope>,
    /// Spans.
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<Span>,
    /// Schema of the spans.
    #[prost(string, tag = "3")]
    pub schema_url: String,
}

/// `opentelemetry.proto.trace.v1.Span`.
#[derive(Clone, PartialEq, Message)]
pub struct Span {
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub trace_id: Vec<u8>,
    /// 8 bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub span_id: Vec<u8>,
    /// W3C `tracestate`.
    #[prost(string, tag = "3")]
    pub trace_state: String,
    /// 8 bytes; empty for the first span of a trace.
    #[prost(bytes = "vec", tag = "4")]
    pub parent_span_id: Vec<u8>,
    /// W3C trace flags in the lowest 8 bits.
    #[prost(fixed32, tag = "16")]
    pub flags: u32,
    /// Name of the operation.
    #[prost(string, tag = "5")]
    pub name: String,
    /// Reporting side ([`SpanKind`]).
    #[prost(enumeration = "SpanKind", tag = "6")]
    pub kind: i32,
    /// Start time in nanoseconds since 1970.
    #[prost(fixed64, tag = "7")]
    pub start_time_unix_nano: u64,
    /// End time in nanoseconds since 1970.
    #[prost(fixed64, tag = "8")]
    pub end_time_unix_nano: u64,
    /// Attributes.
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<KeyValue>,
    /// Number of omitted attributes.
    #[prost(uint32, tag = "10")]
    pub dropped_attributes_count: u32,
    /// Events during the span.
    #[prost(message, repeated, tag = "11")]
    pub events: Vec<SpanEvent>,
    /// Number of omitted events.
    #[prost(uint32, tag = "12")]
    pub dropped_events_count: u32,
    /// Status; unset means success.
    #[prost(message, optional, tag = "15")]
    pub status: Option<Status>,
}

/// `opentelemetry.proto.trace.v1.Span.SpanKind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum SpanKind {
    /// Unspecified.
    Unspecified = 0,
    /// Internal operation.
    Internal = 1,
    /// Server of a request.
    Server = 2,
    /// Client of a request.
    Client = 3,
    /// Producer of an asynchronous message.
    Producer = 4,
    /// Consumer of an asynchronous message.
    Consumer = 5,
}

/// `opentelemetry.proto.trace.v1.Span.Event`.
#[derive(Clone, PartialEq, Message)]
pub struct SpanEvent {
    /// Time in nanoseconds since 1970.
    #[prost(fixed64, tag = "1")]
    pub time_unix_nano: u64,
    /// Name of the event.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Attributes.
    #[prost(message, repeated, tag = "3")]
    pub attributes: Vec<KeyValue>,
    /// Number of omitted attributes.
    #[prost(uint32, tag = "4")]
    pub dropped_attributes_count: u32,
}

/// `opentelemetry.proto.trace.v1.Status`.
#[derive(Clone, PartialEq, Message)]
pub struct Status {
    /// Description.
    #[prost(string, tag = "2")]
    pub message: String,
    /// Code; see [`StatusCode`].
    #[prost(enumeration = "StatusCode", tag = "3")]
    pub code: i32,
}

/// `opentelemetry.proto.trace.v1.Status.StatusCode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum StatusCode {
    /// Unspecified.
    Unset = 0,
    /// Success.
    Ok = 1,
    /// Error.
    Error = 2,
}

/// Response of a collector, the same for logs and spans: `Export…ServiceResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ExportResponse {
    /// Rejected part of the request.
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<PartialSuccess>,
}

/// `Export…PartialSuccess`.
#[derive(Clone, PartialEq, Message)]
pub struct PartialSuccess {
    /// Number of rejected logs or spans.
    #[prost(int64, tag = "1")]
    pub rejected: i64,
    /// Reason.
    #[prost(string, tag = "2")]
    pub error_message: String,
}

/// Returns a string value.
pub fn string(text: impl Into<String>) -> AnyValue {
    AnyValue { value: Some(any_value::Value::StringValue(text.into())) }
}

/// Returns an attribute with a string value.
pub fn attribute(key: impl Into<String>, text: impl Into<String>) -> KeyValue {
    KeyValue { key: key.into(), value: Some(string(text)), ..KeyValue::default() }
}
