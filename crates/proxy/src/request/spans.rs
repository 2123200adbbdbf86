//! The spans of a request: its own, and one for each attempt at an upstream if the configuration enables
//! these.
//!
//! A request without tracing has no [`Trace`].

use std::{
    rc::Rc,
    time::{Instant, SystemTime},
};

use serde_json::Value;

use crate::{
    call::export,
    telemetry::span::{Reporter, Span, SpanOutcome, Tags},
    worker::Worker,
};
use skysail_http::{
    grpc_status,
    head::{Headers, RequestHead, ResponseHead},
};
use skysail_policy::{
    config::{
        HttpManager,
        route::Route,
        trace::{CustomTag, Decorator, RouteTracing, TagValue, TraceProvider, Tracer, Tracing},
    },
    error::{Error, Kind},
    format, matching,
    record::Context,
    trace::{self, CallSide, ContextFormat, SpanContext},
};

/// Field in which a client's sidecar names the server's span, and the server's sidecar the client's span.
pub(crate) const OPERATION: &str = "x-envoy-decorator-operation";

/// The tracing state of a request.
pub(crate) struct Trace<'a> {
    tracing: &'a Tracing,
    route: Option<&'a RouteTracing>,
    outbound: bool,
    /// Kind of the request's own span: client or server.
    end: CallSide,
    /// Position in the trace; `None` if the client's trace context cannot be parsed.
    position: Option<TracePosition>,
    /// Name of the request's span; used only if the request is sampled.
    name: Box<str>,
    /// Name that the response gives to the client's span.
    client_operation: Option<&'a str>,
    /// The current attempt, if it is sampled.
    attempt: Option<AttemptSpan>,
    /// `grpc-message` from the trailers of the response.
    message: Option<Box<[u8]>>,
}

struct TracePosition {
    context: SpanContext,
    form: ContextFormat,
}

/// The span of an attempt that has begun.
pub(crate) struct AttemptSpan {
    context: SpanContext,
    start: SystemTime,
    began: Instant,
    /// Number of attempts before this one.
    retries: u32,
}

/// End of an attempt.
pub(crate) struct AttemptEnd<'a> {
    /// The failure; `None` if the upstream responded.
    pub(crate) error: Option<&'a Error>,
    /// The response is discarded, because a retry follows.
    pub(crate) is_abandoned: bool,
    /// Protocol of the upstream connection; `-` without one.
    pub(crate) protocol: &'static str,
}

impl<'a> Trace<'a> {
    /// Makes the sampling decision for a request whose route is known, and begins its span.
    pub(crate) fn begin(
        worker: &Worker,
        manager: &HttpManager,
        tracing: &'a Tracing,
        outbound: bool,
        route: Option<&'a Route>,
        head: &mut RequestHead,
    ) -> Self {
        let of_route = route.and_then(|route| route.tracing.as_deref());
        let sampling = of_route.map_or(&tracing.sampling, |route| &route.sampling);
        // If attempts have spans, these are the client spans.
        let end = if outbound && !tracing.attempt_spans { CallSide::Client } else { CallSide::Server };
        let mut rng = worker.rng.borrow_mut();
        let decision = trace::decide(sampling, manager.request_id, head, &mut rng);
        let position = trace::context(tracing.provider.tracer, end, decision, head, &mut rng);
        let position = position.ok().map(|(context, form)| TracePosition { context, form });
        drop(rng);
        let mut trace = Self {
            tracing,
            route: of_route,
            outbound,
            end,
            position,
            name: Box::default(),
            client_operation: None,
            attempt: None,
            message: None,
        };
        let decorator = route.and_then(|route| route.decorator.as_ref());
        if trace.sampled().is_some() {
            trace.name = match (decorator, tracing.provider.tracer) {
                (Some(decorator), _) => decorator.operation.clone(),
                (None, Tracer::Zipkin(_)) => head.authority().into(),
                (None, Tracer::OpenTelemetry) if outbound => format!("egress {}", head.authority()).into(),
                (None, Tracer::OpenTelemetry) => "ingress".into(),
            };
        }
        let operation =
            decorator.filter(|decorator| decorator.propagate).map(|Decorator { operation, .. }| &**operation);
        if outbound {
            if let Some(operation) = operation {
                head.set(OPERATION, operation.as_bytes());
            }
        } else {
            trace.client_operation = operation;
            if let Some(name) = take_operation(head) {
                (trace.name, trace.client_operation) = (name, None);
            }
        }
        trace
    }

    /// Returns the request's position in its trace.
    pub(crate) fn context(&self) -> Option<&SpanContext> {
        self.position.as_ref().map(|position| &position.context)
    }

    /// Returns the request's position if its span is exported.
    fn sampled(&self) -> Option<&TracePosition> {
        self.position.as_ref().filter(|position| position.context.sampled)
    }

    /// Adds the trace context to the forwarded request, unless each attempt adds its own.
    pub(crate) fn inject(&self, head: &mut RequestHead) {
        if let Some(position) = self.position.as_ref().filter(|_| !self.tracing.attempt_spans) {
            self.propagate(&position.context, position.form, head);
        }
    }

    fn propagate(&self, context: &SpanContext, form: ContextFormat, head: &mut RequestHead) {
        if self.tracing.propagates {
            trace::inject(context, form, self.tracing.provider.tracer, head);
        }
    }

    /// Begins the span of attempt number `number`, counted from 1, unless it has begun.
    pub(crate) fn begin_attempt(&mut self, worker: &Worker, number: u32, head: &mut RequestHead) {
        let Some(position) = &self.position else { return };
        if !self.tracing.attempt_spans || self.attempt.is_some() {
            return;
        }
        let id = worker.rng.borrow_mut().u64(1..);
        let context = trace::below(&position.context, id, position.context.sampled, false);
        self.propagate(&context, position.form, head);
        if context.sampled {
            let (start, began) = (SystemTime::now(), Instant::now());
            self.attempt = Some(AttemptSpan { context, start, began, retries: number.saturating_sub(1) });
        }
    }

    /// Records the trailers of the response.
    pub(crate) fn note_trailers(&mut self, trailers: Option<&Headers>) {
        if self.sampled().is_some() {
            self.message = trailers.and_then(|trailers| trailers.header("grpc-message")).map(Box::from);
        }
    }

    /// Takes the span of the current attempt, to export it.
    pub(crate) fn take_attempt(&mut self) -> Option<AttemptSpan> {
        self.attempt.take()
    }

    /// Exports the span of an attempt. `context` is the record up to now, with the flags of the attempt.
    pub(crate) fn export_attempt(
        &self,
        worker: &Rc<Worker>,
        attempt: &AttemptSpan,
        context: &Context<'_>,
        end: &AttemptEnd<'_>,
    ) {
        let record = context.record;
        let mut tags = Tags::default();
        if attempt.retries > 0 {
            tags.set("retry.count", attempt.retries.to_string());
        }
        let reason = end.error.and_then(|error| reason(&error.kind));
        if end.is_abandoned || end.error.is_some() && reason.is_none() {
            tags.set("canceled", "true");
        }
        if let Some(reason) = reason {
            tags.set("error.reason", reason);
        }
        tags.set("http.protocol", end.protocol);
        if let Some(address) = record.upstream_remote.and_then(|_| record.upstream_place()) {
            tags.set("upstream_address", address.to_string());
            tags.set("peer.address", address.to_string());
        }
        let status = context.response.filter(|_| end.error.is_none()).map_or(0, ResponseHead::status);
        let outcome = SpanOutcome { status, grpc: None };
        self.add_common(&mut tags, context, outcome);
        let cluster = record.cluster.map_or("", |cluster| &cluster.name);
        self.export(
            worker,
            Span {
                context: &attempt.context,
                name: &format!("router {cluster} egress"),
                end: CallSide::Client,
                start: attempt.start,
                duration: attempt.began.elapsed(),
                tags,
                outcome,
            },
        );
    }

    /// Sets the fields of the response that concern spans, and takes the name of the span from the upstream's response.
    pub(crate) fn finish_response(&mut self, request: &RequestHead, response: &mut ResponseHead) {
        if self.outbound {
            if let Some(name) = take_operation(response) {
                self.name = name;
            }
        } else if let Some(operation) = self.client_operation {
            response.set(OPERATION, operation.as_bytes());
        }
        if request.has("x-envoy-force-trace")
            && let Some(id) = request.header("x-request-id")
        {
            response.set("x-request-id", id);
        }
    }

    /// Exports the span of the request, if it is sampled. `grpc_status` is the status from the trailers.
    pub(crate) fn export_request(
        &self,
        worker: &Rc<Worker>,
        context: &Context<'_>,
        grpc_status: Option<u32>,
    ) {
        let (Some(position), Some(head)) = (self.sampled(), context.request) else { return };
        let record = context.record;
        let mut tags = Tags::default();
        let local = &worker.shared.local;
        let header = |name: &'static str| head.header(name);
        tags.set("node_id", &*local.node_id);
        tags.set("zone", &*local.zone);
        if let Some(id) = header("x-request-id") {
            tags.set_bytes("guid:x-request-id", id);
        }
        tags.set("http.url", url(head, self.tracing.max_path));
        tags.set("http.method", head.method());
        tags.set_bytes("downstream_cluster", header("x-envoy-downstream-service-cluster").unwrap_or(b"-"));
        tags.set_bytes("user_agent", header("user-agent").unwrap_or(b"-"));
        tags.set("http.protocol", head.version.as_str());
        if let Some(direct) = record.downstream_direct {
            tags.set("peer.address", direct.ip().to_string());
        }
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
        // Unlike the access log, the span has no gRPC status that is derived from the HTTP status.
        let in_response = || grpc_status::in_fields(context.response?);
        let grpc = grpc_status.or_else(in_response).filter(|_| record.grpc);
        let outcome = SpanOutcome { status: record.status, grpc };
        self.add_common(&mut tags, context, outcome);
        self.export(
            worker,
            Span {
                context: &position.context,
                name: &self.name,
                end: self.end,
                start: record.start,
                duration: record.duration,
                tags,
                outcome,
            },
        );
    }

    /// Adds the tags that the spans of requests and of attempts share.
    fn add_common<'t>(&'t self, tags: &mut Tags<'t>, context: &Context<'t>, outcome: SpanOutcome) {
        let record = context.record;
        let in_request = |name: &str| context.request.and_then(|head| head.header(name));
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
            let in_response = || context.response?.header("grpc-message");
            tags.set_grpc(status, self.message.as_deref().or_else(in_response));
        }
        let of_route = self.route.map_or(&[][..], |route| &route.tags);
        for CustomTag { name, value } in self.tracing.tags.iter().chain(of_route) {
            match value {
                TagValue::Literal(text) => tags.set(name, &**text),
                TagValue::Header(header, otherwise) => match in_request(header) {
                    Some(value) => tags.set_bytes(name, value),
                    None if otherwise.is_empty() => {}
                    None => tags.set(name, &**otherwise),
                },
                TagValue::Metadata(path, otherwise) => {
                    match matching::metadata_value(path, record.metadata) {
                        Some(Value::String(text)) => tags.set(name, text.as_str()),
                        Some(value) => tags.set(name, value.to_string()),
                        None if otherwise.is_empty() => {}
                        None => tags.set(name, &**otherwise),
                    }
                }
                TagValue::Format(text) => {
                    let mut value = Vec::new();
                    format::write(text, context, b"", &mut value);
                    if !value.is_empty() {
                        tags.set(name, String::from_utf8_lossy(&value).into_owned());
                    }
                }
            }
        }
    }

    fn export(&self, worker: &Rc<Worker>, span: Span<'_>) {
        let local = &worker.shared.local;
        let reporter = Reporter { service: &local.node_cluster, address: local.address };
        let TraceProvider { tracer, collector } = &self.tracing.provider;
        export::export(worker, collector, |out| span.write(*tracer, reporter, out));
    }
}

/// Returns the URL that the client asked for, with at most `max_path` bytes of the path.
fn url(head: &RequestHead, max_path: usize) -> String {
    let text = |name| head.header(name).map(String::from_utf8_lossy);
    let path = text("x-envoy-original-path").unwrap_or_else(|| head.path().into());
    let end = path.floor_char_boundary(max_path);
    let scheme = text("x-forwarded-proto").unwrap_or_default();
    format!("{scheme}://{}{}", head.authority(), &path[..end])
}

/// Returns the span name that the other sidecar sent, and removes its field, which is meant only for this
/// proxy.
fn take_operation(headers: &mut Headers) -> Option<Box<str>> {
    let name = headers.header(OPERATION).filter(|name| !name.is_empty());
    let name = name.map(|name| String::from_utf8_lossy(name).into());
    headers.remove(OPERATION);
    name
}

/// Returns Envoy's name for the reason why a stream to the upstream ended.
fn reason(kind: &Kind) -> Option<&'static str> {
    Some(match kind {
        Kind::ConnectFailed => "remote connection failure",
        Kind::ConnectTimeout => "connection timeout",
        Kind::UpstreamClosed | Kind::UpstreamSilent => "connection termination",
        Kind::UpstreamReset => "remote reset",
        Kind::UpstreamRefused => "remote refused stream reset",
        Kind::UpstreamProtocol | Kind::AnswerTooLarge => "protocol error",
        Kind::Overflow => "overflow",
        _ => return None,
    })
}
