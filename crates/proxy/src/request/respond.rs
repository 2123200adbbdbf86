//! The response phase: forwards the upstream's response, or sends a local reply.
//!
//! A local reply has the header operations of the route only if the route forwards requests, as in Envoy.

use std::{
    future::poll_fn,
    task::Poll,
    time::{Duration, Instant},
};

use crate::{
    overload::limit_log::{self, Limit},
    request::{
        context::{Compression, RequestContext, admitted_request},
        hop,
        transfer::{Client, Deadlines},
    },
    telemetry::filter,
    worker::downstream::Downstream,
};
use skysail_http::{
    compress,
    flow::Flow,
    grpc_status,
    grpc_web::Conversion,
    head::{ResponseHead, Version},
    http1::{ConnectionOptions, Framing},
};
use skysail_policy::{
    config::{http::LocalReply, route::HeaderOp},
    error::{self, Error, Kind},
    headers,
    peer::{METADATA, METADATA_ID},
    record::Context,
};

/// Response header that tells a peer that this sidecar keeps the peer's metadata for the connection. Sidecars
/// remove it.
pub(crate) const METADATA_KEPT: &str = "x-skysail-peer-metadata-kept";

impl<'a> RequestContext<'a> {
    /// Applies the configured change of local replies to the head. Returns the change.
    fn change_local_reply(&mut self) -> Option<&'a LocalReply> {
        let replies = &self.scope.manager.local_replies;
        if replies.is_empty() {
            return None;
        }
        let mut record = self.record();
        record.status = self.exchange.response.status();
        let context = Context { record: &record, request: Some(self.exchange.request), response: None };
        let mut rng = self.scope.worker.rng.borrow_mut();
        let reply = replies.iter().find(|reply| filter::passes(&reply.filter, &context, &mut rng))?;
        drop(rng);
        if let Some(status) = reply.status {
            self.exchange.response.set_status(status);
        }
        self.apply_ops(&reply.headers);
        Some(reply)
    }
}

impl RequestContext<'_> {
    /// Forwards the response, whose head has arrived. `is_sent` says that the whole request has been sent. `scripted`
    /// is the body, if a script or external processing has read it.
    pub(crate) async fn forward_response(
        &mut self,
        framing: Framing,
        connection: ConnectionOptions,
        is_sent: bool,
        scripted: Option<Box<Flow>>,
        deadlines: &mut Deadlines,
    ) -> Result<(), Error> {
        let framing = scripted.as_ref().map_or(framing, |body| body.framing());
        let is_http10 = self.exchange.request.version == Version::Http10;
        let mut state = self.decision.response_filters.as_deref_mut();
        let decoding = state.as_deref_mut().and_then(|state| state.decoding.take());
        let compression = state.and_then(|state| state.compression.as_ref());
        let through = match (self.decision.grpc_web, compression) {
            (None, None) => None,
            (Some(web), _) => {
                let through = web.answer(self.exchange.response);
                if through.is_none() {
                    // The response is not gRPC, so a gRPC-Web client could not read its content.
                    self.outcome.reusable = false;
                    return self.send_local(b"").await;
                }
                through
            }
            // Content that a filter has collected is not compressed.
            (None, Some(_)) if scripted.as_ref().is_some_and(|body| body.is_collected()) => None,
            (None, Some(accepted)) => compress(accepted, framing, self.exchange.response),
        };
        let through = match (decoding, through) {
            (None, through) => through,
            (Some(decoding), None) => Some(Conversion::Decompress(decoding)),
            (Some(decoding), Some(second)) => {
                Some(Conversion::Then(Box::new([Conversion::Decompress(decoding), second])))
            }
        };
        let out_framing = out_framing(framing, through.is_some(), is_http10);
        let exchange = &mut self.exchange;
        exchange.keep_alive &=
            out_framing != Framing::UntilClose && !exchange.downstream.origin.is_ending(self.scope.manager);
        // A response that begins before the request is complete may also end before it. Its head must then
        // say `close`.
        exchange.keep_alive &= exchange.body.has_arrived(&exchange.downstream.wire);
        let persistence = exchange.persistence();
        let Some(mut upstream) = self.outcome.upstream.take() else { return Ok(()) };
        exchange
            .downstream
            .wire
            .respond(exchange.response, out_framing, exchange.request.method(), persistence)
            .map_err(Error::from)?;
        let limits = upstream.link.pool().cluster.head_limits();
        let mut body = match scripted {
            None => Flow::new(framing, out_framing, limits, false),
            Some(mut body) => {
                body.set_framing(out_framing);
                if !body.is_collected() {
                    body.forget();
                }
                *body
            }
        };
        if let Some(through) = through {
            body.convert(through);
        }
        exchange.body.forget();
        let origin = exchange.downstream.origin.clone();
        let admitted = admitted_request!(self, &origin, &upstream.link);
        let admission = &mut self.decision.admission;
        let revoked = || admission.deadline(admitted.worker, || admitted.revalidate());
        let mut client = Client::new(self.exchange.downstream, deadlines, &mut self.exchange.body, false);
        client.complete = is_sent;
        let result = client.respond(&mut upstream.wire, &mut body, revoked).await;
        let is_sent = client.complete;
        if let Err(error) = &result
            && !matches!(error.kind, Kind::ResponseTimeout | Kind::Revoked)
        {
            let host = &upstream.link.host;
            upstream.link.pool().note_failure(&host.endpoint, &error.kind, &self.scope.worker.rng);
        }
        self.outcome.sent = body.given();
        self.outcome.grpc_status = body.trailers().and_then(grpc_status::in_fields);
        if let Some(trace) = &mut self.outcome.trace {
            trace.note_trailers(body.trailers());
        }
        self.outcome.reusable = result.is_ok() && is_sent && !connection.close;
        self.outcome.upstream = Some(upstream);
        self.skip_body();
        result
    }

    /// Sends a direct response or a redirect. The header operations of the route apply after `headers`.
    pub(crate) async fn direct_response(
        &mut self,
        status: u16,
        headers: &[(&str, &str)],
        text: &[u8],
    ) -> Result<(), Error> {
        self.outcome.details = "direct_response".into();
        *self.exchange.response = ResponseHead::build(status, headers);
        self.apply_route_ops();
        self.send_text(text).await
    }

    /// Sends a local reply. `headers` replace fields that the route's header operations have set.
    pub(crate) async fn local_reply(
        &mut self,
        status: u16,
        headers: &[(Box<str>, Box<[u8]>)],
        text: &[u8],
    ) -> Result<(), Error> {
        self.begin_local_reply(status);
        for (name, _) in headers {
            self.exchange.response.remove(name);
        }
        for (name, value) in headers {
            self.exchange.response.append(name, value);
        }
        self.send_text(text).await
    }

    /// Sets the head of a local reply, with the header operations of a route that forwards requests.
    pub(crate) fn begin_local_reply(&mut self, status: u16) {
        *self.exchange.response = ResponseHead::build(status, &[]);
        if self.decision.is_forwarded() {
            self.apply_route_ops();
        }
    }

    /// Sends a local reply with a text. A gRPC client receives the text as `grpc-message`, other clients as
    /// content.
    pub(crate) async fn send_text(&mut self, text: &[u8]) -> Result<(), Error> {
        let reply = self.change_local_reply();
        let text = reply.and_then(|reply| reply.body.as_deref()).map_or(text, str::as_bytes);
        let response = &mut *self.exchange.response;
        if let Some(web) = self.decision.grpc_web {
            response.remove("content-type");
            _ = web.answer(response);
            if !text.is_empty() {
                response.set("grpc-message", percent_encoded(text).as_bytes());
            }
            return self.send_local(b"").await;
        }
        if self.decision.grpc {
            let status = response.status();
            response.set_status(200);
            response.set("content-type", b"application/grpc");
            if !response.has("grpc-status") {
                response.set_number("grpc-status", grpc_status::from_http(status).into());
            }
            if !text.is_empty() && self.exchange.request.method() != "HEAD" {
                response.set("grpc-message", percent_encoded(text).as_bytes());
            }
            return self.send_local(b"").await;
        }
        if text.is_empty() {
            response.remove("content-type");
        } else {
            let content_type = reply.and_then(|reply| reply.content_type.as_deref());
            response.set("content-type", content_type.unwrap_or("text/plain").as_bytes());
        }
        self.send_local(text).await
    }

    /// Answers a failure, if the client can still get a response.
    pub(crate) async fn answer_failure(&mut self, error: &Error) {
        if error.kind == Kind::ProcessorEnded && !error.response_started {
            self.outcome.reusable = false;
            match Box::pin(self.answer_for_processor()).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => return self.count_failure(&error.kind),
            }
        }
        self.count_failure(&error.kind);
        let mut answer = error.response();
        if error.kind == Kind::Revoked
            && let Some(refusal) = self.decision.admission.expired()
        {
            answer.details = error::revoked(refusal).into();
            self.exchange.keep_alive = false;
        }
        self.outcome.flags.insert(answer.flags);
        self.outcome.details = answer.details;
        self.outcome.reusable = false;
        self.outcome.failure = error.cause.clone().unwrap_or_default();
        if error.response_started || answer.status == 0 {
            // Only the end of the connection or stream shows the client that its response is incomplete.
            self.exchange.downstream.wire.abort();
            self.exchange.keep_alive = false;
            self.outcome.status = if error.response_started { self.outcome.status } else { 0 };
            return;
        }
        let grpc = || ("grpc-status".into(), answer.grpc.to_string().into_bytes().into());
        let grpc = self.decision.grpc.then(grpc);
        // This field asks the proxies in front not to retry, because the cluster is at its limit.
        let overloaded = matches!(error.kind, Kind::Overflow);
        let overloaded = overloaded.then(|| ("x-envoy-overloaded".into(), b"true".to_vec().into()));
        let headers: Vec<_> = grpc.into_iter().chain(overloaded).collect();
        let mut text = answer.body;
        if self.outcome.attempts > 1 {
            text = text.replace("reset reason:", "retried and the latest reset reason:").into();
        }
        self.outcome.failed = answer.status;
        if let Err(error) = self.local_reply(answer.status, &headers, text.as_bytes()).await {
            self.count_failure(&error.kind);
        }
    }

    /// Counts and logs a failure that a limit causes.
    fn count_failure(&self, kind: &Kind) {
        let counters = self.scope.counters;
        let (counter, limit) = match kind {
            Kind::StreamIdle(_) => (&counters.rq_idle_timeout, Limit::StreamIdle),
            Kind::RequestTimeout => (&counters.rq_timeout, Limit::RequestTime),
            Kind::StreamDuration(_) => (&counters.rq_max_duration, Limit::StreamDuration),
            Kind::BodyTooLarge => (&counters.rq_too_large, Limit::Content),
            Kind::Revoked => return self.note_revoked(),
            Kind::ResponseTimeout => {
                return self.outcome.pool.iter().for_each(|pool| pool.stats.rq_timeout.inc());
            }
            _ => return,
        };
        counter.inc();
        let source = self.exchange.downstream.origin.source;
        limit_log::log(limit, format_args!("{}, client {source}", self.scope.manager.stat_prefix));
    }

    /// Counts and logs a request that ends because the configuration in effect no longer admits it.
    pub(crate) fn note_revoked(&self) {
        self.scope.counters.rq_revoked.inc();
        let (manager, source) = (&self.scope.manager.stat_prefix, self.exchange.downstream.origin.source);
        if let Some(refusal) = self.decision.admission.expired() {
            limit_log::log(Limit::Admission, format_args!("{manager}, client {source}, {refusal}"));
        }
    }

    /// Sends a local reply, whose head is in the exchange.
    pub(crate) async fn send_local(&mut self, content: &[u8]) -> Result<(), Error> {
        if self.scope.manager.processes_responses && !self.decision.has_run_scripts {
            return Box::pin(self.send_filtered(content)).await;
        }
        self.exchange.keep_alive &= !self.exchange.downstream.origin.is_ending(self.scope.manager);
        self.skip_body();
        self.finish_response(Instant::now());
        self.add_workload_metadata();
        let framing = match content.len() as u64 {
            0 => Framing::None,
            length => Framing::Length(length),
        };
        let exchange = &mut self.exchange;
        if let Framing::Length(length) = framing {
            exchange.response.set_number("content-length", length);
        }
        // A response to HEAD has the length of the content that it omits.
        let is_head = exchange.request.method() == "HEAD";
        let mut content = Flow::whole(if is_head { b"" } else { content }, framing, None);
        self.outcome.sent = content.bytes;
        self.outcome.status = exchange.response.status();
        let persistence = exchange.persistence();
        let Downstream { wire, timer, .. } = &mut *exchange.downstream;
        wire.respond(exchange.response, framing, exchange.request.method(), persistence)?;
        let idle_timeout: Option<Duration> = self.scope.manager.stream_idle_timeout;
        let deadline = idle_timeout.map(|timeout| Instant::now() + timeout);
        let written = poll_fn(|cx| match content.poll_send(cx, wire) {
            Poll::Ready(result) => Poll::Ready(result.map_err(|_| Kind::DownstreamClosed)),
            // A client that does not read is disconnected after the idle timeout.
            Poll::Pending => timer.poll(cx, deadline).map(|()| Err(Kind::StreamIdle(true))),
        });
        let written = written.await;
        exchange.keep_alive &= written.is_ok();
        written.map_err(|kind| Error::new(kind).after_response_started())
    }

    /// Discards the rest of the request's body. Reads only bytes that have arrived; if more are to come, the
    /// connection closes after the response.
    fn skip_body(&mut self) {
        let exchange = &mut self.exchange;
        if !exchange.body.is_read() && !exchange.body.skip(&mut exchange.downstream.wire) {
            exchange.keep_alive = false;
        }
    }

    /// Applies the route's operations to the response, in Envoy's order.
    pub(crate) fn apply_route_ops(&mut self) {
        let Ok(found) = self.decision.found else { return };
        let target = found.target.map(|target| &target.headers);
        let ops = [target, Some(&found.route.headers), Some(&found.host.headers), Some(&found.table.headers)];
        for ops in ops.into_iter().flatten() {
            self.apply_ops(&ops.response);
        }
    }

    /// Applies header operations to the response.
    pub(crate) fn apply_ops(&mut self, ops: &[HeaderOp]) {
        if !ops.is_empty() {
            let mut response = std::mem::take(self.exchange.response);
            let mut record = self.record();
            record.grpc_status = self.grpc_status(&response);
            headers::apply_response(ops, &mut response, Some(self.exchange.request), &record);
            *self.exchange.response = response;
        }
    }

    /// Completes the head of a response: fields from filters and tracing, `date` and `server`.
    pub(crate) fn finish_response(&mut self, now: Instant) {
        if self.scope.manager.mutates_responses {
            self.mutate_response();
        }
        let response = &mut *self.exchange.response;
        if let Some(state) = &mut self.decision.response_filters {
            state.fields.drain(..).for_each(|field| field.add_to(response));
        }
        if let Some(trace) = &mut self.outcome.trace {
            trace.finish_response(self.exchange.request, response);
        }
        if self.scope.manager.request_id_in_response
            && let Some(id) = self.exchange.request.header("x-request-id")
        {
            response.set("x-request-id", id);
        }
        hop::finish_response(self.scope.worker, self.scope.manager, response, now);
    }

    /// Adds this workload's metadata to the response, if the client's sidecar sent its own.
    pub(crate) fn add_workload_metadata(&mut self) {
        if self.decision.sends_metadata {
            let local = &self.scope.worker.shared.local;
            let response = &mut *self.exchange.response;
            response.set(METADATA, local.metadata.as_bytes());
            response.set(METADATA_ID, local.node_id.as_bytes());
            response.set(METADATA_KEPT, b"1");
        }
    }
}

/// Returns the framing of the response to the client. The length of converted content is unknown.
#[inline]
fn out_framing(framing: Framing, is_converted: bool, is_http10: bool) -> Framing {
    match framing {
        Framing::Length(_) if is_converted && is_http10 => Framing::UntilClose,
        Framing::Length(_) if is_converted => Framing::Chunked,
        Framing::Chunked | Framing::UntilClose if is_http10 => Framing::UntilClose,
        Framing::UntilClose => Framing::Chunked,
        framing => framing,
    }
}

/// Begins to compress a response, if the compressor's settings include it.
fn compress(
    compression: &Compression<'_>,
    framing: Framing,
    response: &mut ResponseHead,
) -> Option<Conversion> {
    let length = match framing {
        Framing::None => return None,
        Framing::Length(length) => Some(length),
        Framing::Chunked | Framing::UntilClose => None,
    };
    let chosen = compress::choose(&compression.accept, &compression.compressors);
    let compressor = chosen.or_else(|| compression.compressors.first().copied())?;
    compressor.begin(response, length, chosen.is_some()).map(Conversion::Compress)
}

/// Encodes a text as gRPC does in a field (PROTOCOL-HTTP2: `Percent-Encoded`).
fn percent_encoded(text: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text {
        match byte {
            b'%' | ..b' ' | 0x7f.. => encoded.push_str(&format!("%{byte:02X}")),
            _ => encoded.push(char::from(*byte)),
        }
    }
    encoded
}
