//! What is told to collectors of OpenTelemetry: logs and spans.
//!
//! Field numbers are those of open-telemetry/opentelemetry-proto 1.x. What the messages have in common
//! (`opentelemetry.proto.common.v1`) comes with Envoy's API, whose access logs are configured with it.

pub use envoy_types::pb::opentelemetry::proto::common::v1::{
    AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList, any_value,
};
use prost::Message;

/// The method that takes an [`ExportLogsServiceRequest`].
pub const EXPORT_LOGS: &str = "/opentelemetry.proto.collector.logs.v1.LogsService/Export";
/// The method that takes an [`ExportTraceServiceRequest`].
pub const EXPORT_SPANS: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// `opentelemetry.proto.resource.v1.Resource`: who tells it.
#[derive(Clone, PartialEq, Message)]
pub struct Resource {
    /// What is known of it.
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
    /// How many attributes were left out.
    #[prost(uint32, tag = "2")]
    pub dropped_attributes_count: u32,
}

/// `opentelemetry.proto.collector.logs.v1.ExportLogsServiceRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExportLogsServiceRequest {
    /// Logs by who tells them.
    #[prost(message, repeated, tag = "1")]
    pub resource_logs: Vec<ResourceLogs>,
}

/// `opentelemetry.proto.logs.v1.ResourceLogs`.
#[derive(Clone, PartialEq, Message)]
pub struct ResourceLogs {
    /// Who tells them.
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    /// Logs by what made them.
    #[prost(message, repeated, tag = "2")]
    pub scope_logs: Vec<ScopeLogs>,
    /// The schema that `resource` follows.
    #[prost(string, tag = "3")]
    pub schema_url: String,
}

/// `opentelemetry.proto.logs.v1.ScopeLogs`.
#[derive(Clone, PartialEq, Message)]
pub struct ScopeLogs {
    /// What made them.
    #[prost(message, optional, tag = "1")]
    pub scope: Option<InstrumentationScope>,
    /// The logs.
    #[prost(message, repeated, tag = "2")]
    pub log_records: Vec<LogRecord>,
    /// The schema that the logs follow.
    #[prost(string, tag = "3")]
    pub schema_url: String,
}

/// `opentelemetry.proto.logs.v1.LogRecord`.
#[derive(Clone, PartialEq, Message)]
pub struct LogRecord {
    /// When it happened, in nanoseconds since 1970.
    #[prost(fixed64, tag = "1")]
    pub time_unix_nano: u64,
    /// When it was seen.
    #[prost(fixed64, tag = "11")]
    pub observed_time_unix_nano: u64,
    /// How bad it is (`SeverityNumber`).
    #[prost(int32, tag = "2")]
    pub severity_number: i32,
    /// The same in words.
    #[prost(string, tag = "3")]
    pub severity_text: String,
    /// What is told.
    #[prost(message, optional, tag = "5")]
    pub body: Option<AnyValue>,
    /// What else is known.
    #[prost(message, repeated, tag = "6")]
    pub attributes: Vec<KeyValue>,
    /// How many attributes were left out.
    #[prost(uint32, tag = "7")]
    pub dropped_attributes_count: u32,
    /// Trace flags of W3C in the lowest 8 bits.
    #[prost(fixed32, tag = "8")]
    pub flags: u32,
    /// 16 bytes; empty for none.
    #[prost(bytes = "vec", tag = "9")]
    pub trace_id: Vec<u8>,
    /// 8 bytes; empty for none.
    #[prost(bytes = "vec", tag = "10")]
    pub span_id: Vec<u8>,
    /// What kind of event it is.
    #[prost(string, tag = "12")]
    pub event_name: String,
}

/// `opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExportTraceServiceRequest {
    /// Spans by who tells them.
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

/// `opentelemetry.proto.trace.v1.ResourceSpans`.
#[derive(Clone, PartialEq, Message)]
pub struct ResourceSpans {
    /// Who tells them.
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    /// Spans by what made them.
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
    /// The schema that `resource` follows.
    #[prost(string, tag = "3")]
    pub schema_url: String,
}

/// `opentelemetry.proto.trace.v1.ScopeSpans`.
#[derive(Clone, PartialEq, Message)]
pub struct ScopeSpans {
    /// What made them.
    #[prost(message, optional, tag = "1")]
    pub scope: Option<InstrumentationScope>,
    /// The spans.
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<Span>,
    /// The schema that the spans follow.
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
    /// `tracestate` as W3C has it.
    #[prost(string, tag = "3")]
    pub trace_state: String,
    /// 8 bytes; empty for the first span of a trace.
    #[prost(bytes = "vec", tag = "4")]
    pub parent_span_id: Vec<u8>,
    /// Trace flags of W3C in the lowest 8 bits.
    #[prost(fixed32, tag = "16")]
    pub flags: u32,
    /// What was done.
    #[prost(string, tag = "5")]
    pub name: String,
    /// Which side tells it.
    #[prost(enumeration = "SpanKind", tag = "6")]
    pub kind: i32,
    /// In nanoseconds since 1970.
    #[prost(fixed64, tag = "7")]
    pub start_time_unix_nano: u64,
    /// In nanoseconds since 1970.
    #[prost(fixed64, tag = "8")]
    pub end_time_unix_nano: u64,
    /// What is known of it.
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<KeyValue>,
    /// How many attributes were left out.
    #[prost(uint32, tag = "10")]
    pub dropped_attributes_count: u32,
    /// What happened meanwhile.
    #[prost(message, repeated, tag = "11")]
    pub events: Vec<SpanEvent>,
    /// How many events were left out.
    #[prost(uint32, tag = "12")]
    pub dropped_events_count: u32,
    /// How it ended; nothing said means well.
    #[prost(message, optional, tag = "15")]
    pub status: Option<Status>,
}

/// `opentelemetry.proto.trace.v1.Span.SpanKind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum SpanKind {
    /// Unsaid.
    Unspecified = 0,
    /// Inside of a program.
    Internal = 1,
    /// Who answers.
    Server = 2,
    /// Who asks.
    Client = 3,
    /// Who sends without waiting for an answer.
    Producer = 4,
    /// Who gets what was sent so.
    Consumer = 5,
}

/// `opentelemetry.proto.trace.v1.Span.Event`.
#[derive(Clone, PartialEq, Message)]
pub struct SpanEvent {
    /// In nanoseconds since 1970.
    #[prost(fixed64, tag = "1")]
    pub time_unix_nano: u64,
    /// What happened.
    #[prost(string, tag = "2")]
    pub name: String,
    /// What is known of it.
    #[prost(message, repeated, tag = "3")]
    pub attributes: Vec<KeyValue>,
    /// How many attributes were left out.
    #[prost(uint32, tag = "4")]
    pub dropped_attributes_count: u32,
}

/// `opentelemetry.proto.trace.v1.Status`.
#[derive(Clone, PartialEq, Message)]
pub struct Status {
    /// In words.
    #[prost(string, tag = "2")]
    pub message: String,
    /// See [`StatusCode`].
    #[prost(enumeration = "StatusCode", tag = "3")]
    pub code: i32,
}

/// `opentelemetry.proto.trace.v1.Status.StatusCode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum StatusCode {
    /// Unsaid.
    Unset = 0,
    /// It went well.
    Ok = 1,
    /// It failed.
    Error = 2,
}

/// What a collector answers, to logs and to spans alike: `Export…ServiceResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ExportResponse {
    /// What it did not take.
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<PartialSuccess>,
}

/// `Export…PartialSuccess`.
#[derive(Clone, PartialEq, Message)]
pub struct PartialSuccess {
    /// How many logs or spans it did not take.
    #[prost(int64, tag = "1")]
    pub rejected: i64,
    /// Why.
    #[prost(string, tag = "2")]
    pub error_message: String,
}

/// A text as an attribute's value.
pub fn string(text: impl Into<String>) -> AnyValue {
    AnyValue { value: Some(any_value::Value::StringValue(text.into())) }
}

/// An attribute whose value is a text.
pub fn attribute(key: impl Into<String>, text: impl Into<String>) -> KeyValue {
    KeyValue { key: key.into(), value: Some(string(text)), ..KeyValue::default() }
}
