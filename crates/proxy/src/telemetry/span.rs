//! Spans: what is told of a request to a collector of traces, as OTLP or as Zipkin's JSON.

use std::{
    borrow::Cow,
    net::IpAddr,
    time::{Duration, SystemTime},
};

use prost::encoding::message;
use serde_json::{Map, Value, json};
use skysail_xds::otlp::{self, SpanKind, Status, StatusCode, attribute};

use skysail_policy::{
    config::trace::{Tracer, Zipkin},
    trace::{End, SpanContext},
};

#[cfg(test)]
mod tests;

/// A span that is over.
#[derive(Debug)]
pub struct Span<'a> {
    /// Where it stands.
    pub context: &'a SpanContext,
    /// What was done.
    pub name: &'a str,
    /// Which end tells it.
    pub end: End,
    /// When it began.
    pub start: SystemTime,
    /// How long it took.
    pub duration: Duration,
    /// What is known of it.
    pub tags: Tags<'a>,
    /// How it ended.
    pub outcome: Outcome,
}

/// How a span ended, for its status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The HTTP status; 0 for none.
    pub status: u16,
    /// gRPC's status, of a call of gRPC.
    pub grpc: Option<u32>,
}

/// Names and values; each name once.
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

    /// Sets a tag to bytes that should be text.
    pub fn set_bytes(&mut self, name: &'a str, value: &'a [u8]) {
        self.set(name, String::from_utf8_lossy(value));
    }

    /// Says how a call of gRPC ended. What is the server's fault is an error, and so is `RESOURCE_EXHAUSTED`.
    pub(crate) fn set_grpc(&mut self, status: u32, text: Option<&'a [u8]>) {
        self.set("grpc.status_code", status.to_string());
        if let Some(text) = text {
            self.set_bytes("grpc.message", text);
        }
        if status == 8 || is_servers_fault(status) {
            self.set("error", "true");
        }
    }
}

/// `UNKNOWN`, `DEADLINE_EXCEEDED`, `UNIMPLEMENTED`, `INTERNAL`, `UNAVAILABLE`, `DATA_LOSS`.
fn is_servers_fault(grpc: u32) -> bool {
    matches!(grpc, 2 | 4 | 12..=15)
}

/// Who tells spans, for Zipkin.
#[derive(Clone, Copy, Debug)]
pub struct Teller<'a> {
    /// The service.
    pub service: &'a str,
    /// Where it is.
    pub address: Option<IpAddr>,
}

impl Span<'_> {
    /// Writes it as an item of a batch.
    pub fn write(&self, tracer: Tracer, teller: Teller<'_>, out: &mut Vec<u8>) {
        match tracer {
            // `ScopeSpans.spans`
            Tracer::OpenTelemetry => message::encode(2, &self.otlp(), out),
            Tracer::Zipkin(zipkin) => {
                let json = self.zipkin(zipkin, teller).to_string();
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
                End::Server => SpanKind::Server,
                End::Client => SpanKind::Client,
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

    /// Whether it failed, as OpenTelemetry's conventions have it: what is the client's fault is no failure of the server.
    fn has_failed(&self) -> bool {
        match (self.end, self.outcome.grpc) {
            (End::Server, Some(grpc)) => is_servers_fault(grpc),
            (End::Client, Some(grpc)) => grpc != 0,
            (End::Server, None) => self.outcome.status >= 500,
            (End::Client, None) => self.outcome.status >= 400,
        }
    }

    fn zipkin(&self, zipkin: Zipkin, teller: Teller<'_>) -> Value {
        let (start, duration) = (nanos(self.start) / 1000, saturating(self.duration.as_micros()));
        let server = self.end == End::Server;
        let (kind, last) = if server { ("SERVER", "ss") } else { ("CLIENT", "cr") };
        let mut endpoint = json!({"serviceName": teller.service, "port": 0});
        match teller.address {
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
            // Zipkin takes 0 for unknown.
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

/// Methods beyond those that are known are one.
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
