//! The spans of a request: where it stands in its trace, what the other ends are told of that, and what a collector is
//! told of the request and, where that is wanted, of each try at an upstream.

use std::time::{Instant, SystemTime};

use serde_json::Value;

use crate::{
    call::export,
    request::story::RequestContext,
    telemetry::span::{Outcome, Span, Tags, Teller},
};
use skysail_http::{
    grpc_status,
    head::{Headers, Version},
    wire::Wire,
};
use skysail_policy::{
    config::{
        listener::Direction,
        trace::{CustomTag, Decorator, RouteTracing, TagValue, TraceProvider, Tracer, Tracing},
    },
    error::{Error, Flags, Kind},
    format, matching,
    record::{Context, Record},
    trace::{self, End, Form, SpanContext},
};

/// What the span of the other end is called: a client's sidecar tells the server's, and the other way round.
pub(crate) const OPERATION: &str = "x-envoy-decorator-operation";

/// How a request is traced.
pub(crate) struct Trace<'a> {
    tracing: &'a Tracing,
    route: Option<&'a RouteTracing>,
    outbound: bool,
    /// Which end the request's own span is.
    end: End,
    /// Where it stands; `None` where what the client says cannot be read.
    place: Option<TracePosition>,
    /// What its span is called, if it is told.
    name: Box<str>,
    /// What the client's span is to be called.
    answer: Option<&'a str>,
    /// The try under way, if it is told.
    attempt: Option<Attempt>,
    /// `grpc-message` that came after the answer's content.
    message: Option<Box<[u8]>>,
}

struct TracePosition {
    context: SpanContext,
    form: Form,
}

struct Attempt {
    context: SpanContext,
    start: SystemTime,
    began: Instant,
    /// How many came before it.
    retries: u32,
}

impl Trace<'_> {
    /// Where the request stands in its trace.
    pub(crate) fn context(&self) -> Option<&SpanContext> {
        self.place.as_ref().map(|place| &place.context)
    }

    /// Its place, if it is told.
    fn told(&self) -> Option<&TracePosition> {
        self.place.as_ref().filter(|place| place.context.sampled)
    }
}

impl<'a> RequestContext<'a> {
    /// Decides whether the request is traced, once its route is known.
    pub(crate) fn begin_trace(&mut self, tracing: &'a Tracing) {
        let found = self.found.ok().map(|found| found.route);
        let route = found.and_then(|route| route.tracing.as_deref());
        let outbound = self.downstream.origin.listener.direction == Direction::Outbound;
        let sampling = route.map_or(&tracing.sampling, |route| &route.sampling);
        // Where tries have spans of their own, those are the client's end.
        let end = if outbound && !tracing.tries { End::Client } else { End::Server };
        let mut dice = self.worker.dice.borrow_mut();
        let decision = trace::decide(sampling, self.manager.request_id, self.head, &mut dice);
        let place = trace::context(tracing.provider.tracer, end, decision, self.head, &mut dice);
        let place = place.ok().map(|(context, form)| TracePosition { context, form });
        drop(dice);
        let mut trace = Trace {
            tracing,
            route,
            outbound,
            end,
            place,
            name: Box::default(),
            answer: None,
            attempt: None,
            message: None,
        };
        let decorator = found.and_then(|route| route.decorator.as_ref());
        if trace.told().is_some() {
            trace.name = match (decorator, tracing.provider.tracer) {
                (Some(decorator), _) => decorator.operation.clone(),
                (None, Tracer::Zipkin(_)) => self.head.authority().into(),
                (None, Tracer::OpenTelemetry) if outbound => {
                    format!("egress {}", self.head.authority()).into()
                }
                (None, Tracer::OpenTelemetry) => "ingress".into(),
            };
        }
        let operation =
            decorator.filter(|decorator| decorator.propagate).map(|Decorator { operation, .. }| &**operation);
        if outbound {
            if let Some(operation) = operation {
                self.head.set(OPERATION, operation.as_bytes());
            }
        } else {
            trace.answer = operation;
            if let Some(name) = take_operation(self.head) {
                (trace.name, trace.answer) = (name, None);
            }
        }
        self.trace = Some(Box::new(trace));
    }

    /// Says to the server where the request stands, unless each try says where it stands itself.
    pub(crate) fn inject(&mut self) {
        if let Some(Trace { place: Some(place), tracing, .. }) = self.trace.as_deref()
            && !tracing.tries
        {
            trace::inject(&place.context, place.form, tracing.provider.tracer, self.head);
        }
    }

    /// Begins the span of a try, unless it has begun.
    pub(crate) fn begin_try(&mut self) {
        let Some(Trace { place: Some(place), tracing, attempt, .. }) = self.trace.as_deref_mut() else {
            return;
        };
        if !tracing.tries || attempt.is_some() {
            return;
        }
        let id = self.worker.dice.borrow_mut().u64(1..);
        let context = trace::below(&place.context, id, place.context.sampled, false);
        trace::inject(&context, place.form, tracing.provider.tracer, self.head);
        if context.sampled {
            let retries = self.told.attempts.saturating_sub(1);
            *attempt = Some(Attempt { context, start: SystemTime::now(), began: Instant::now(), retries });
        }
    }

    /// Takes down what came after an answer's content.
    pub(crate) fn note_trailers(&mut self, trailers: Option<&Headers>) {
        if let Some(trace) = self.trace.as_deref_mut().filter(|trace| trace.told().is_some()) {
            trace.message = trailers.and_then(|trailers| trailers.header("grpc-message")).map(Box::from);
        }
    }

    /// Ends it: with an answer, or for this reason. `given_up` says that its answer is not wanted.
    pub(crate) fn end_try(&mut self, error: Option<&Error>, given_up: bool) {
        let Some(attempt) = self.trace.as_deref_mut().and_then(|trace| trace.attempt.take()) else { return };
        let Some(trace) = self.trace.as_deref() else { return };
        let record = self.record();
        let mut tags = Tags::default();
        if attempt.retries > 0 {
            tags.set("retry.count", attempt.retries.to_string());
        }
        let reason = error.and_then(|error| reason(&error.kind));
        if given_up || error.is_some() && reason.is_none() {
            tags.set("canceled", "true");
        }
        if let Some(reason) = reason {
            tags.set("error.reason", reason);
        }
        let version = match self.told.upstream.as_ref().map(|upstream| &upstream.wire) {
            None => "-",
            Some(Wire::Http1(_)) => Version::Http11.as_str(),
            Some(Wire::Http2(_)) => Version::Http2.as_str(),
        };
        tags.set("http.protocol", version);
        if let Some(address) = record.upstream_remote {
            tags.set("upstream_address", address.to_string());
            tags.set("peer.address", address.to_string());
        }
        let status = if error.is_some() { 0 } else { self.response.status() };
        let flags = error.map_or(Flags::NONE, |error| error.answer().flags);
        let outcome = Outcome { status, grpc: None };
        self.add_common(&mut tags, trace, &Record { flags, ..record.clone() }, outcome);
        let cluster = record.cluster.map_or("", |cluster| &cluster.name);
        self.export(
            trace,
            Span {
                context: &attempt.context,
                name: &format!("router {cluster} egress"),
                end: End::Client,
                start: attempt.start,
                duration: attempt.began.elapsed(),
                tags,
                outcome,
            },
        );
    }

    /// What answers say because of it.
    pub(crate) fn name_spans(&mut self) {
        let Some(trace) = self.trace.as_deref_mut() else { return };
        if trace.outbound {
            if let Some(name) = take_operation(self.response) {
                trace.name = name;
            }
        } else if let Some(operation) = trace.answer {
            self.response.set(OPERATION, operation.as_bytes());
        }
        if self.head.has("x-envoy-force-trace")
            && let Some(id) = self.head.header("x-request-id")
        {
            self.response.set("x-request-id", id);
        }
    }

    /// Tells of the request, which is over.
    pub(crate) fn end_trace(&self, record: &Record<'_>) {
        let Some((trace, place)) = self.trace.as_deref().and_then(|trace| Some((trace, trace.told()?)))
        else {
            return;
        };
        let head = &*self.head;
        let mut tags = Tags::default();
        let local = &self.worker.shared.local;
        let header = |name: &'static str| head.header(name);
        tags.set("node_id", &*local.node_id);
        tags.set("zone", &*local.zone);
        if let Some(id) = header("x-request-id") {
            tags.set_bytes("guid:x-request-id", id);
        }
        tags.set("http.url", self.url(trace.tracing.max_path));
        tags.set("http.method", head.method());
        tags.set_bytes("downstream_cluster", header("x-envoy-downstream-service-cluster").unwrap_or(b"-"));
        tags.set_bytes("user_agent", header("user-agent").unwrap_or(b"-"));
        tags.set("http.protocol", head.version.as_str());
        tags.set("peer.address", self.downstream.origin.direct.ip().to_string());
        if let Some(id) = header("x-client-trace-id") {
            tags.set_bytes("guid:x-client-trace-id", id);
        }
        if record.grpc {
            tags.set("grpc.path", head.path());
            tags.set("grpc.authority", head.authority());
            for (tag, name) in [("grpc.content_type", "content-type"), ("grpc.timeout", "grpc-timeout")] {
                if let Some(value) = header(name) {
                    tags.set_bytes(tag, value);
                }
            }
        }
        tags.set("request_size", record.bytes_received.to_string());
        tags.set("response_size", record.bytes_sent.to_string());
        // What is not said is not told.
        let said =
            self.told.grpc_status.or_else(|| grpc_status::in_fields(self.response)).filter(|_| record.grpc);
        let outcome = Outcome { status: record.status, grpc: said };
        self.add_common(&mut tags, trace, record, outcome);
        self.export(
            trace,
            Span {
                context: &place.context,
                name: &trace.name,
                end: trace.end,
                start: self.start,
                duration: record.duration,
                tags,
                outcome,
            },
        );
    }

    /// What is said of a request and of a try alike.
    fn add_common<'t>(
        &'t self,
        tags: &mut Tags<'t>,
        trace: &'t Trace<'_>,
        record: &Record<'t>,
        outcome: Outcome,
    ) {
        tags.set("component", "proxy");
        if let Some(cluster) = record.cluster {
            tags.set("upstream_cluster", &*cluster.name);
            tags.set("upstream_cluster.name", &*cluster.name);
        }
        tags.set("http.status_code", outcome.status.to_string());
        tags.set("response_flags", record.flags.to_string());
        if outcome.status == 0 || outcome.status >= 500 {
            tags.set("error", "true");
        }
        if let Some(status) = outcome.grpc {
            tags.set_grpc(status, trace.message.as_deref().or_else(|| self.response.header("grpc-message")));
        }
        let context = Context { record, request: Some(self.head), response: Some(self.response) };
        let of_route = trace.route.map_or(&[][..], |route| &route.tags);
        for CustomTag { name, value } in trace.tracing.tags.iter().chain(of_route) {
            match value {
                TagValue::Literal(text) => tags.set(name, &**text),
                TagValue::Header(header, otherwise) => match self.head.header(header) {
                    Some(value) => tags.set_bytes(name, value),
                    None if otherwise.is_empty() => {}
                    None => tags.set(name, &**otherwise),
                },
                TagValue::Metadata(path, otherwise) => {
                    match matching::known(path, self.metadata.as_deref()) {
                        Some(Value::String(text)) => tags.set(name, text.as_str()),
                        Some(value) => tags.set(name, value.to_string()),
                        None if otherwise.is_empty() => {}
                        None => tags.set(name, &**otherwise),
                    }
                }
                TagValue::Format(text) => {
                    let mut value = Vec::new();
                    format::write(text, &context, b"", &mut value);
                    if !value.is_empty() {
                        tags.set(name, String::from_utf8_lossy(&value).into_owned());
                    }
                }
            }
        }
    }

    /// Where the request was sent by the client, with so many bytes of the path.
    fn url(&self, most: usize) -> String {
        let text = |name| self.head.header(name).map(String::from_utf8_lossy);
        let path = text("x-envoy-original-path").unwrap_or_else(|| self.head.path().into());
        let end = path.floor_char_boundary(most);
        let scheme = text("x-forwarded-proto").unwrap_or_default();
        format!("{scheme}://{}{}", self.head.authority(), &path[..end])
    }

    fn export(&self, trace: &Trace<'_>, span: Span<'_>) {
        let local = &self.worker.shared.local;
        let teller = Teller { service: &local.node_cluster, address: local.address };
        let TraceProvider { tracer, collector } = &trace.tracing.provider;
        export::export(self.worker, collector, |out| span.write(*tracer, teller, out));
    }
}

/// What the other end says that a span is called; nobody else is to hear it.
fn take_operation(headers: &mut Headers) -> Option<Box<str>> {
    let name = headers.header(OPERATION).filter(|name| !name.is_empty());
    let name = name.map(|name| String::from_utf8_lossy(name).into());
    headers.remove(OPERATION);
    name
}

/// Why a stream ended, in Envoy's words.
fn reason(kind: &Kind) -> Option<&'static str> {
    Some(match kind {
        Kind::ConnectFailed => "remote connection failure",
        Kind::ConnectTimeout => "connection timeout",
        Kind::UpstreamClosed => "connection termination",
        Kind::UpstreamReset => "remote reset",
        Kind::UpstreamRefused => "remote refused stream reset",
        Kind::UpstreamProtocol | Kind::AnswerTooLarge => "protocol error",
        Kind::Overflow => "overflow",
        _ => return None,
    })
}
