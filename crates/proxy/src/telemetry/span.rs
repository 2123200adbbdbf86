//! Spans of requests, as OTLP or as Zipkin's JSON.

use std::{
    borrow::Cow,
    net::IpAddr,
    time::{Duration, SystemTime},
};

use prost::encoding::message;
use serde_json::{Map, Value, json};
use skysail_proto::otlp::{self, SpanKind, Status, StatusCode, attribute};

use skysail_policy::{
    config::trace::{Tracer, Zipkin},
    trace::{CallSide, SpanContext},
};

#[cfg(test)]
mod tests;

/// A finished span.
#[derive(Debug)]
pub struct Span<'a> {
    /// Trace and span IDs.
    pub context: &'a SpanContext,
    /// Name of the span.
    pub name: &'a str,
    /// Reporting end, client or server.
    pub end: CallSide,
    /// Start time.
    pub start: SystemTime,
    /// Duration.
    pub duration: Duration,
    /// Attributes of the span.
    pub tags: Tags<'a>,
    /// Result, which determines the status.
    pub outcome: SpanOutcome,
}

/// Result of a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanOutcome {
    /// HTTP status; 0 for none.
    pub status: u16,
    /// gRPC status of a gRPC request.
    pub grpc: Option<u32>,
}

/// Tag names and values; names are unique.
#[derive(Debug, Default)]
pub struct Tags<'a>(Vec<(&'a str, Cow<'a, str>)>);

impl<'a> Tags<'a> {
    /// Sets a tag.
    pub fn set(&mut self, name: &'a str, value: impl Into<Cow<'a, str>>) {
        match self.0.iter_mut().find(|(other, _)| *other == name) {
            Some((_, before)) => *before = value.into(),
            None => self.0.push((name, value.into())),
        }
    }

    /// Sets a tag to bytes that should be UTF-8.
    pub fn set_bytes(&mut self, name: &'a str, value: &'a [u8]) {
        self.set(name, String::from_utf8_lossy(value));
    }

    /// Sets the tags of a gRPC status. A server error or `RESOURCE_EXHAUSTED` is an error.
    pub(crate) fn set_grpc(&mut self, status: u32, text: Option<&'a [u8]>) {
        self.set("grpc.status_code", status.to_string());
        if let Some(text) = text {
            self.set_bytes("grpc.message", text);
        }
        if status == 8 || is_server_error(status) {
            self.set("error", "true");
        }
    }
}

/// Returns whether a gRPC status is `UNKNOWN`, `DEADLINE_EXCEEDED`, `UNIMPLEMENTED`, `INTERNAL`, `UNAVAILABLE` or
/// `DATA_LOSS`.
fn is_server_error(grpc: u32) -> bool {
    matches!(grpc, 2 | 4 | 12..=15)
}

/// Reporting service, for Zipkin.
#[derive(Clone, Copy, Debug)]
pub struct Reporter<'a> {
    /// Name of the service.
    pub service: &'a str,
    /// Its IP address.
    pub address: Option<IpAddr>,
}

impl Span<'_> {
    /// Writes the span as an item of a batch.
    pub fn write(&self, tracer: Tracer, reporter: Reporter<'_>, out: &mut Vec<u8>) {
        match tracer {
            // Field number of `ScopeSpans.spans`.
            Tracer::OpenTelemetry => message::encode(2, &self.otlp(), out),
            Tracer::Zipkin(zipkin) => {
                let json = self.zipkin(zipkin, reporter).to_string();
                out.extend_from_slice(json.as_bytes());
                out.push(b',');
            }
        }
    }

    fn otlp(&self) -> otlp::Span {
        const HAS_IS_REMOTE: u32 = 0x100;
        const IS_REMOTE: u32 = 0x200;
        let context = self.context;
        let start = nanos(self.start);
        let remote = if context.remote { IS_REMOTE } else { 0 };
        otlp::Span {
            trace_id: context.trace.to_be_bytes().into(),
            span_id: context.span.to_be_bytes().into(),
            trace_state: context.state.to_string(),
            parent_span_id: context.parent.map(|parent| parent.to_be_bytes().into()).unwrap_or_default(),
            flags: HAS_IS_REMOTE | remote | u32::from(context.sampled),
            name: self.name.to_owned(),
            kind: match self.end {
                CallSide::Server => SpanKind::Server,
                CallSide::Client => SpanKind::Client,
            }
            .into(),
            start_time_unix_nano: start,
            end_time_unix_nano: start.saturating_add(saturating(self.duration.as_nanos())),
            attributes: self
                .tags
                .0
                .iter()
                .map(|(name, value)| attribute(*name, otlp_value(name, value)))
                .collect(),
            status: self
                .has_failed()
                .then(|| Status { message: String::new(), code: StatusCode::Error.into() }),
            ..otlp::Span::default()
        }
    }

    /// Returns whether the span failed. By OpenTelemetry's conventions, a client error is not a failure of the
    /// server's span.
    fn has_failed(&self) -> bool {
        match (self.end, self.outcome.grpc) {
            (CallSide::Server, Some(grpc)) => is_server_error(grpc),
            (CallSide::Client, Some(grpc)) => grpc != 0,
            (CallSide::Server, None) => self.outcome.status >= 500,
            (CallSide::Client, None) => self.outcome.status >= 400,
        }
    }

    fn zipkin(&self, zipkin: Zipkin, reporter: Reporter<'_>) -> Value {
        let (start, duration) = (nanos(self.start) / 1000, saturating(self.duration.as_micros()));
        let server = self.end == CallSide::Server;
        let (kind, last) = if server { ("SERVER", "ss") } else { ("CLIENT", "cr") };
        let mut endpoint = json!({"serviceName": reporter.service, "port": 0});
        match reporter.address {
            Some(IpAddr::V4(ip)) => endpoint["ipv4"] = ip.to_string().into(),
            Some(IpAddr::V6(ip)) => endpoint["ipv6"] = ip.to_string().into(),
            None => {}
        }
        let tags = self.tags.0.iter().map(|(name, value)| ((*name).to_owned(), Value::from(&**value)));
        let mut span = json!({
            "traceId": self.context.trace_id(),
            "id": self.context.span_id(),
            "name": self.name,
            "kind": kind,
            "timestamp": start,
            // 0 means unknown in Zipkin.
            "duration": duration.max(1),
            "localEndpoint": endpoint,
            "annotations": [{"timestamp": start.saturating_add(duration), "value": last}],
            "tags": tags.collect::<Map<_, _>>(),
        });
        if let Some(parent) = self.context.parent {
            span["parentId"] = format!("{parent:016x}").into();
        }
        if server && zipkin.shared {
            span["shared"] = true.into();
        }
        span
    }
}

/// Returns the value of a tag for OTLP. All unknown methods have one value.
fn otlp_value<'a>(name: &str, value: &'a str) -> &'a str {
    const METHODS: [&str; 9] =
        ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];
    if name == "http.method" && !METHODS.contains(&value) { "_OTHER" } else { value }
}

fn nanos(time: SystemTime) -> u64 {
    saturating(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos())
}

fn saturating(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
