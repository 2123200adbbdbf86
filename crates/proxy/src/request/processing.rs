//! External processing: a service sees the request and the response, and changes or answers them.
//!
//! A part is forwarded only after the processor has answered all earlier messages. A buffered body is read completely,
//! up to a limit, before it is sent to the processor. A body in chunks passes a stage, which sends it to the processor
//! while it is forwarded.
//! Sources: `envoy.service.ext_proc.v3`, and Envoy's `ext_proc` filter for the effect of answers.
//!
//! `apply` applies answers, `data` has metadata and attributes, `observe` serves processors that only observe.

mod apply;
mod data;
mod observe;

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use skysail_xds::envoy::pb::envoy::{
    config::core::v3::HeaderMap,
    service::ext_proc::v3::{
        HttpBody, HttpHeaders, HttpTrailers, ImmediateResponse, ProcessingResponse,
        processing_request::Request as Message, processing_response::Response as Answer,
    },
};

use crate::{
    call,
    request::{
        context::{Filtered, RequestContext},
        processor::{
            CallEnd, Processor, ProcessorFailure, Side, StageMode, Stopped,
            changes::{Head, apply, fields, request_fields, response_fields},
        },
        response_body::{BodySource, FilterOutcome, MAX_BODY, ResponseBody, UpstreamPart},
        transfer::{self, Deadlines, unless_closed},
    },
};
use skysail_http::http1::Framing;
use skysail_policy::{
    config::{
        http::Filter,
        processing::{BodyMode, ExternalProcessing, MutationRules, ProcessingMode},
        route::Setting,
    },
    error::{Error, Kind},
};

use apply::replaces;

/// Effect of an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The message continues.
    Continue,
    /// The message continues, and its body has been replaced. The rest of it is not processed, as in Envoy.
    Replaced,
}

impl<'a> RequestContext<'a> {
    /// Passes a request to a processor.
    pub(crate) async fn process_request(
        &mut self,
        filter: &'a Filter,
        config: &'a Arc<ExternalProcessing>,
        setting: Option<&'a Setting>,
    ) -> Result<Filtered, Error> {
        let mut processor = self.processor(filter, config, setting);
        if config.observes.is_some() {
            self.observe_request(&processor);
            self.decision.response_filters_mut().processors.push(processor);
            return Ok(Filtered::Continue);
        }
        self.decision.filter_results.begin(filter, setting);
        let result = self.request_steps(&mut processor).await;
        self.decision.response_filters_mut().processors.push(processor);
        // If the call has ended, the way it ended decides about the request.
        if let Ok(Err(Stopped)) = result
            && self.answer_for_processor().await?
        {
            return Ok(Filtered::Answered);
        }
        result.map(|_| Filtered::Continue)
    }

    /// Passes a response to a processor.
    pub(crate) async fn process_response(
        &mut self,
        filter: &'a Filter,
        config: &'a Arc<ExternalProcessing>,
        setting: Option<&'a Setting>,
        body: &mut ResponseBody<'_>,
    ) -> Result<FilterOutcome, Error> {
        let known = &mut self.decision.response_filters_mut().processors;
        let index = known.iter().position(|known| std::ptr::eq(known.filter, filter));
        let mut processor = match index {
            Some(index) => known.swap_remove(index),
            None => self.processor(filter, config, setting),
        };
        let result = match processor.is_done() {
            true => Ok(Some(Ok(()))),
            false if config.observes.is_some() => {
                self.observe_response(&processor, body);
                Ok(Some(Ok(())))
            }
            false => self.response_steps(&mut processor, body).await,
        };
        self.take_stage_metadata(&processor);
        self.decision.response_filters_mut().processors.push(processor);
        match result? {
            None => return Ok(FilterOutcome::TooLarge),
            Some(Ok(())) => return Ok(FilterOutcome::Continue),
            Some(Err(Stopped)) => {}
        }
        let is_reusable = std::mem::replace(&mut self.outcome.reusable, false);
        if self.answer_for_processor().await? {
            return Ok(FilterOutcome::Answered);
        }
        self.outcome.reusable = is_reusable;
        Ok(FilterOutcome::Continue)
    }

    /// Answers the request as a processor says, or because it failed. Returns false if the request continues.
    pub(crate) async fn answer_for_processor(&mut self) -> Result<bool, Error> {
        let Some(filters) = &self.decision.response_filters else { return Ok(false) };
        let mut ends = filters.processors.iter().filter_map(|processor| {
            let end = processor.session.borrow_mut().take_end()?;
            (!matches!(end, CallEnd::Continue)).then_some((processor.config, end))
        });
        let end = ends.next_back();
        if end.is_some() {
            self.scope.counters.ext_proc_immediate.inc();
        }
        match end {
            Some((config, CallEnd::Answered(answer))) => self.answer_immediately(config, *answer).await?,
            Some((_, CallEnd::Failed(status, details))) => {
                self.answer_processor_failure((status, details)).await?;
            }
            Some((_, CallEnd::Continue)) | None => return Ok(false),
        }
        Ok(true)
    }

    /// Sends the parts of a request to a processor.
    async fn request_steps(&mut self, processor: &mut Processor<'a>) -> Result<Result<(), Stopped>, Error> {
        let has_body = self.exchange.body.framing() != Framing::None;
        self.set_data(processor, Side::Request, true);
        if processor.mode.request_headers {
            let headers = request_fields(processor.config, self.exchange.request);
            let message = Message::RequestHeaders(HttpHeaders {
                headers: Some(headers),
                end_of_stream: !has_body,
                ..HttpHeaders::default()
            });
            if has_body && processor.mode.request_body == BodyMode::FullDuplex {
                processor.session.borrow_mut().begin_stage(Side::Request, StageMode::Duplex, true);
            }
            match self.ask(processor, message).await? {
                Ok(Step::Continue) => {}
                Ok(Step::Replaced) => return Ok(Ok(())),
                Err(Stopped) => return Ok(Err(Stopped)),
            }
        }
        if !has_body || processor.session.borrow().has_stage(Side::Request) {
            return Ok(Ok(()));
        }
        let trailers = processor.mode.request_trailers;
        match processor.mode.request_body {
            BodyMode::Streamed => self.stage_request(processor, StageMode::Chunks),
            BodyMode::FullDuplex => self.stage_request(processor, StageMode::Duplex),
            BodyMode::None if trailers => self.stage_request(processor, StageMode::Trailers),
            BodyMode::None => {}
            BodyMode::Buffered | BodyMode::BufferedPartial => return self.send_request_body(processor).await,
        }
        Ok(Ok(()))
    }

    /// Reads the body of a request and sends it, and its trailers, to a processor.
    async fn send_request_body(
        &mut self,
        processor: &mut Processor<'a>,
    ) -> Result<Result<(), Stopped>, Error> {
        if self.exchange.request.has("expect") {
            self.decision.filter_results.keep_head(self.exchange.request);
        }
        transfer::collect(self.scope.manager, &mut self.exchange, MAX_BODY).await?;
        let body = &self.exchange.body;
        let content = body.kept().unwrap_or_default().to_vec();
        let is_whole = body.is_collected() && content.len() <= MAX_BODY;
        if !is_whole && processor.mode.request_body == BodyMode::Buffered {
            return Err(Error::new(Kind::BodyTooLarge));
        }
        let trailers = body.trailers().cloned();
        let end_of_stream = is_whole && trailers.is_none();
        let message = Message::RequestBody(HttpBody { body: content, end_of_stream, ..HttpBody::default() });
        if let Err(Stopped) = self.ask(processor, message).await? {
            return Ok(Err(Stopped));
        }
        if !processor.mode.request_trailers {
            return Ok(Ok(()));
        }
        if !is_whole {
            // The trailers follow the rest of the body.
            self.stage_request(processor, StageMode::Trailers);
            return Ok(Ok(()));
        }
        let Some(trailers) = trailers else { return Ok(Ok(())) };
        let fields = fields(processor.config, &trailers);
        let message =
            Message::RequestTrailers(HttpTrailers { trailers: Some(HeaderMap { headers: fields }) });
        Ok(self.ask(processor, message).await?.map(|_| ()))
    }

    /// Passes the body of the request through the processor while it is forwarded.
    pub(super) fn stage_request(&mut self, processor: &Processor<'a>, mode: StageMode) {
        let is_length_kept = mode == StageMode::Trailers || processor.config.observes.is_some();
        if !is_length_kept && self.exchange.request.has("content-length") {
            self.decision.filter_results.keep_head(self.exchange.request);
            self.exchange.request.remove("content-length");
        }
        processor.session.borrow_mut().begin_stage(Side::Request, mode, processor.mode.request_trailers);
        self.set_data(processor, Side::Request, false);
        self.exchange.body.stage(Box::new(processor.stage(Side::Request)), is_length_kept);
    }

    /// Sends the parts of a response to a processor. Returns `None` if the body exceeds the limit.
    async fn response_steps(
        &mut self,
        processor: &mut Processor<'a>,
        body: &mut ResponseBody<'_>,
    ) -> Result<Option<Result<(), Stopped>>, Error> {
        let has_body = body.has_content();
        self.set_data(processor, Side::Response, true);
        if processor.mode.response_headers {
            let headers = response_fields(processor.config, self.exchange.response);
            let message = Message::ResponseHeaders(HttpHeaders {
                headers: Some(headers),
                end_of_stream: !has_body,
                ..HttpHeaders::default()
            });
            let is_duplex = processor.mode.response_body == BodyMode::FullDuplex;
            if has_body && is_duplex && body.content.is_none() {
                processor.session.borrow_mut().begin_stage(Side::Response, StageMode::Duplex, true);
            }
            match self.ask_about_response(processor, message, body).await? {
                None => return Ok(None),
                Some(Ok(Step::Continue)) => {}
                Some(Ok(Step::Replaced)) => return Ok(Some(Ok(()))),
                Some(Err(Stopped)) => return Ok(Some(Err(Stopped))),
            }
        }
        if !has_body || processor.session.borrow().has_stage(Side::Response) {
            return Ok(Some(Ok(())));
        }
        let mode = match processor.mode.response_body {
            BodyMode::Streamed => StageMode::Chunks,
            BodyMode::FullDuplex => StageMode::Duplex,
            BodyMode::None if processor.mode.response_trailers => StageMode::Trailers,
            BodyMode::None => return Ok(Some(Ok(()))),
            BodyMode::Buffered | BodyMode::BufferedPartial => {
                return self.send_response_body(processor, body).await;
            }
        };
        if let Some(content) = body.content.take() {
            return self.pass_content(processor, mode, content, body).await.map(Some);
        }
        self.stage_response(processor, mode, body);
        Ok(Some(Ok(())))
    }

    /// Passes a body that is in memory through the processor.
    async fn pass_content(
        &mut self,
        processor: &Processor<'a>,
        mode: StageMode,
        content: Vec<u8>,
        body: &mut ResponseBody<'_>,
    ) -> Result<Result<(), Stopped>, Error> {
        processor.session.borrow_mut().begin_stage(Side::Response, mode, processor.mode.response_trailers);
        self.set_data(processor, Side::Response, false);
        let stage = processor.stage(Side::Response);
        let passed = Box::pin(stage.pass(content, body.trailers.take(), MAX_BODY));
        let passed = unless_closed(&mut self.exchange, async { Ok(passed.await) }).await?;
        Ok(passed.map(|(content, trailers)| {
            (body.content, body.trailers) = (Some(content), trailers);
            body.is_changed = !matches!(body.source, BodySource::Local);
        }))
    }

    /// Passes the body of the response through the processor while it is forwarded.
    pub(super) fn stage_response(
        &mut self,
        processor: &Processor<'a>,
        mode: StageMode,
        body: &mut ResponseBody<'_>,
    ) {
        let is_length_kept = mode == StageMode::Trailers || processor.config.observes.is_some();
        if !is_length_kept {
            self.exchange.response.remove("content-length");
        }
        processor.session.borrow_mut().begin_stage(Side::Response, mode, processor.mode.response_trailers);
        self.set_data(processor, Side::Response, false);
        if let Some(flow) = self.response_flow(body) {
            flow.stage(Box::new(processor.stage(Side::Response)), is_length_kept);
        }
    }

    /// Reads the body of a response and sends it, and its trailers, to a processor. Returns `None` if the body exceeds
    /// the limit.
    async fn send_response_body(
        &mut self,
        processor: &mut Processor<'a>,
        body: &mut ResponseBody<'_>,
    ) -> Result<Option<Result<(), Stopped>>, Error> {
        if self.decision.grpc_web.is_some() {
            return Ok(Some(Err(processor.fail(ProcessorFailure::Invalid("grpc_web_body")))));
        }
        if !self.load_response_body(body).await? {
            return Ok(None);
        }
        let content = body.content.clone().unwrap_or_default();
        let end_of_stream = body.trailers.is_none();
        let message = Message::ResponseBody(HttpBody { body: content, end_of_stream, ..HttpBody::default() });
        match self.ask_about_response(processor, message, body).await? {
            Some(Ok(_)) => {}
            Some(Err(Stopped)) => return Ok(Some(Err(Stopped))),
            None => return Ok(None),
        }
        let Some(trailers) = body.trailers.as_ref().filter(|_| processor.mode.response_trailers) else {
            return Ok(Some(Ok(())));
        };
        let fields = fields(processor.config, trailers);
        let message =
            Message::ResponseTrailers(HttpTrailers { trailers: Some(HeaderMap { headers: fields }) });
        let step = self.ask_about_response(processor, message, body).await?;
        Ok(step.map(|step| step.map(|_| ())))
    }

    /// Sends a message about the request and applies the answer.
    async fn ask(
        &mut self,
        processor: &mut Processor<'a>,
        message: Message,
    ) -> Result<Result<Step, Stopped>, Error> {
        let is_headers = matches!(message, Message::RequestHeaders(_));
        let is_duplex = processor.mode.request_body == BodyMode::FullDuplex;
        self.set_data(processor, Side::Request, false);
        let session = processor.session.clone();
        session.borrow_mut().ask(Side::Request, message, !is_duplex);
        if session.borrow().has_stage(Side::Request) {
            if self.exchange.request.has("expect") {
                self.decision.filter_results.keep_head(self.exchange.request);
            }
            // The processor may wait for the body, and the client for the interim response.
            transfer::send_continue(&mut self.exchange);
            self.stage_request(processor, StageMode::Duplex);
        }
        let idle_timeout = self.scope.manager.stream_idle_timeout.filter(|_| is_duplex);
        let request = self.scope.manager.request_timeout.map(|timeout| self.outcome.started + timeout);
        let deadlines = Deadlines::new(None, None, request, idle_timeout);
        let poll = |cx: &mut Context<'_>| session.borrow_mut().poll_answer(cx, Side::Request);
        let answered = transfer::fill_stage(deadlines, &mut self.exchange, poll).await?;
        let answer =
            answered.and_then(|response| self.accept(processor, response, Side::Request, is_headers));
        let answer = match answer {
            Ok(answer) => answer,
            Err(Stopped) => return Ok(Err(Stopped)),
        };
        if replaces(&answer) {
            if session.borrow().has_stage(Side::Request) {
                return Ok(Err(processor.fail(ProcessorFailure::Invalid("body_already_streamed"))));
            }
            // The content that is replaced is read, so that the connection can be used again.
            let exchange = &mut self.exchange;
            transfer::collect(self.scope.manager, exchange, MAX_BODY).await?;
            if !exchange.body.is_collected() && exchange.body.framing() != Framing::None {
                return Err(Error::new(Kind::BodyTooLarge));
            }
            exchange.request.remove("content-length");
        }
        Ok(self.apply_to_request(processor, answer).map_err(|failure| processor.fail(failure)))
    }

    /// Sends a message about the response and applies the answer. Returns `None` if the body exceeds the limit.
    async fn ask_about_response(
        &mut self,
        processor: &mut Processor<'a>,
        message: Message,
        body: &mut ResponseBody<'_>,
    ) -> Result<Option<Result<Step, Stopped>>, Error> {
        let is_headers = matches!(message, Message::ResponseHeaders(_));
        let is_duplex = processor.mode.response_body == BodyMode::FullDuplex;
        self.set_data(processor, Side::Response, false);
        let session = processor.session.clone();
        session.borrow_mut().ask(Side::Response, message, !is_duplex);
        let is_staged = session.borrow().has_stage(Side::Response);
        if is_staged {
            self.stage_response(processor, StageMode::Duplex, body);
        }
        let poll = |cx: &mut Context<'_>| session.borrow_mut().poll_answer(cx, Side::Response);
        let answered = self.wait_for_answer(body, poll).await?;
        let answer =
            answered.and_then(|response| self.accept(processor, response, Side::Response, is_headers));
        let answer = match answer {
            Ok(answer) => answer,
            Err(Stopped) => return Ok(Some(Err(Stopped))),
        };
        if replaces(&answer) {
            if is_staged {
                return Ok(Some(Err(processor.fail(ProcessorFailure::Invalid("body_already_streamed")))));
            }
            if !self.load_response_body(body).await? {
                return Ok(None);
            }
        }
        let step = self.apply_to_response(processor, answer, body);
        Ok(Some(step.map_err(|failure| processor.fail(failure))))
    }

    /// Waits for an answer about the response. The rest of the request is sent in the meantime, and the response is
    /// given to its stage.
    async fn wait_for_answer<T>(
        &mut self,
        body: &mut ResponseBody<'_>,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Result<T, Error> {
        let work = async |part: UpstreamPart<'_, '_>| {
            part.client.process(part.wire, part.flow, &mut poll, part.revoked).await
        };
        match self.with_upstream(body, work).await? {
            Some(answered) => Ok(answered),
            None => unless_closed(&mut self.exchange, async { Ok(poll_fn(poll).await) }).await,
        }
    }

    /// Applies the metadata and the mode in a message of the processor, and returns its answer.
    fn accept(
        &mut self,
        processor: &mut Processor<'a>,
        response: ProcessingResponse,
        side: Side,
        is_headers: bool,
    ) -> Result<Answer, Stopped> {
        let ProcessingResponse { response: Some(answer), dynamic_metadata, mode_override, .. } = response
        else {
            return Err(processor.fail(ProcessorFailure::Invalid("no_answer")));
        };
        if let Some(found) = dynamic_metadata {
            self.take_metadata(processor, found, side == Side::Request);
        }
        // As in Envoy, no mode changes if a body is sent in both directions.
        let may_override = is_headers && processor.config.allow_override && {
            let ProcessingMode { request_body, response_body, .. } = processor.mode;
            ![request_body, response_body].contains(&BodyMode::FullDuplex)
        };
        if let Some(mode) = mode_override.filter(|_| may_override) {
            match call::processing::mode(&mode) {
                Ok(mode) if is_allowed(processor.config, mode) => processor.mode = mode,
                // As in Envoy, a mode that is not allowed is ignored.
                Ok(_) => {}
                Err(_) => {
                    return Err(processor.fail(ProcessorFailure::Invalid("unsupported_mode_override")));
                }
            }
        }
        Ok(answer)
    }

    async fn answer_processor_failure(&mut self, (status, details): (u16, String)) -> Result<(), Error> {
        self.outcome.details = details.into();
        self.local_reply(status, &[], b"").await
    }

    /// Answers the request as the processor says.
    async fn answer_immediately(
        &mut self,
        config: &ExternalProcessing,
        answer: ImmediateResponse,
    ) -> Result<(), Error> {
        let status = answer.status.and_then(|status| u16::try_from(status.code).ok());
        self.begin_local_reply(status.filter(|status| (200..600).contains(status)).unwrap_or(200));
        self.outcome.details = answer.details.into();
        let is_grpc = self.decision.grpc;
        if let Some(grpc) = answer.grpc_status.filter(|_| is_grpc) {
            self.exchange.response.set_number("grpc-status", grpc.status.into());
        }
        if let Some(mutation) = answer.headers {
            // A change that is not allowed is left out.
            let rules = MutationRules {
                allowed: config.rules.allowed.clone(),
                disallowed: config.rules.disallowed.clone(),
                allow_routing: config.rules.allow_routing,
                allow_envoy: config.rules.allow_envoy,
                ..Default::default()
            };
            let applied = apply(&rules, &mutation, &mut Head::Response(self.exchange.response));
            self.scope.counters.ext_proc_rejected.add(applied.unwrap_or_default());
        }
        self.exchange.response.remove("content-length");
        let body = &answer.body[..];
        let is_typed = body.is_empty() || self.exchange.response.has("content-type");
        if is_grpc || !is_typed {
            return self.send_text(body).await;
        }
        let may_have_body = !matches!(self.exchange.response.status(), 204 | 304);
        self.send_local(if may_have_body { body } else { b"" }).await
    }

    /// Returns the processor of a filter, with the route's settings.
    fn processor(
        &self,
        filter: &'a Filter,
        config: &'a Arc<ExternalProcessing>,
        setting: Option<&'a Setting>,
    ) -> Processor<'a> {
        let by_route = match setting {
            Some(Setting::Processing(by_route)) => Some(by_route),
            _ => None,
        };
        Processor::new(self.scope.worker, self.scope.manager, filter, config, by_route)
    }
}

/// Returns whether the processor may choose a mode. As in Envoy, the mode of the request's headers does not count.
fn is_allowed(config: &ExternalProcessing, mode: ProcessingMode) -> bool {
    let same = |allowed: &ProcessingMode| {
        ProcessingMode { request_headers: mode.request_headers, ..*allowed } == mode
    };
    config.allowed_modes.is_empty() || config.allowed_modes.iter().any(same)
}
