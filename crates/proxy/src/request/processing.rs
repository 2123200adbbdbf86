//! External processing: a service sees the request and the response, and changes or answers them.
//!
//! Each message to the processor has one answer, and nothing is forwarded before it. Bodies are read completely, up to
//! a limit, before they are sent. Sources: `envoy.service.ext_proc.v3`, and Envoy's `ext_proc` filter for the effect of
//! answers.

use std::collections::HashMap;

use serde_json::{Map, Value};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{HeaderMap, Metadata},
        service::ext_proc::v3::{
            CommonResponse, HeadersResponse, HttpBody, HttpHeaders, HttpTrailers, ImmediateResponse,
            ProcessingRequest, ProcessingResponse, common_response::ResponseStatus,
            processing_request::Request as Message, processing_response::Response as Answer,
        },
    },
    google::protobuf::Struct,
};

use crate::{
    call::{self, CallFailure},
    overload::limit_log::{self, Limit},
    request::{
        authorization::json,
        context::{Filtered, RequestContext, add_metadata},
        processor::{Processor, ProcessorFailure},
        response_body::{BodySource, MAX_BODY, ResponseBody, ScriptOutcome, set_length},
        routing,
        transfer::{self, unless_closed},
    },
    telemetry::{self, structure},
};
use skysail_http::http1::Framing;
use skysail_policy::{
    config::{
        http::Filter,
        processing::{Attributes, BodyMode, ExternalProcessing, ProcessingMode, RouteReselection},
        route::Setting,
    },
    error::{Error, Kind},
    record::Context,
};

mod changes;

use changes::{Head, apply, content, fields, request_fields, response_fields};

/// Name of the filter in attributes.
const EXT_PROC: &str = "envoy.filters.http.ext_proc";

/// Direction of a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Request,
    Response,
}

/// Effect of an answer.
enum Step {
    /// The message continues.
    Continue,
    /// The message continues, and its body has been replaced.
    Replaced,
    /// The processor answers the request.
    Answer(Box<ImmediateResponse>),
}

impl<'a> RequestContext<'a> {
    /// Passes a request to a processor.
    pub(crate) async fn process_request(
        &mut self,
        filter: &'a Filter,
        config: &'a ExternalProcessing,
        setting: Option<&'a Setting>,
    ) -> Result<Filtered, Error> {
        let mut processor = processor(filter, config, setting);
        self.decision.filter_results.begin(filter, setting);
        let step = self.request_steps(&mut processor).await?;
        let done = self.conclude(&mut processor, step);
        self.decision.response_filters_mut().processors.push(processor);
        match done {
            Ok(None) => Ok(Filtered::Continue),
            Ok(Some(answer)) => {
                self.answer_immediately(config, *answer).await?;
                Ok(Filtered::Answered)
            }
            Err(details) => {
                self.answer_processor_failure(details).await?;
                Ok(Filtered::Answered)
            }
        }
    }

    /// Passes a response to a processor.
    pub(crate) async fn process_response(
        &mut self,
        filter: &'a Filter,
        config: &'a ExternalProcessing,
        setting: Option<&'a Setting>,
        body: &mut ResponseBody<'_>,
    ) -> Result<ScriptOutcome, Error> {
        let known = &mut self.decision.response_filters_mut().processors;
        let index = known.iter().position(|known| std::ptr::eq(known.filter, filter));
        let mut processor = match index {
            Some(index) => known.swap_remove(index),
            None => self::processor(filter, config, setting),
        };
        if processor.is_done {
            return Ok(ScriptOutcome::Continue);
        }
        let step = match self.response_steps(&mut processor, body).await? {
            Some(step) => step,
            None => return Ok(ScriptOutcome::TooLarge),
        };
        let done = self.conclude(&mut processor, step);
        processor.is_done = true;
        match done {
            Ok(None) => return Ok(ScriptOutcome::Continue),
            Ok(Some(answer)) => {
                self.outcome.reusable = false;
                self.answer_immediately(config, *answer).await?;
            }
            Err(details) => {
                self.outcome.reusable = false;
                self.answer_processor_failure(details).await?;
            }
        }
        Ok(ScriptOutcome::Answered)
    }

    /// Sends the parts of a request to a processor.
    async fn request_steps(
        &mut self,
        processor: &mut Processor<'a>,
    ) -> Result<Result<Step, ProcessorFailure>, Error> {
        let has_body = self.exchange.body.framing() != Framing::None;
        let mut attributes = self.attributes(processor, Side::Request);
        if processor.mode.request_headers {
            let headers = request_fields(processor.config, self.exchange.request);
            let message = Message::RequestHeaders(HttpHeaders {
                headers: Some(headers),
                end_of_stream: !has_body,
                ..HttpHeaders::default()
            });
            match self.ask(processor, message, attributes.take()).await? {
                Ok(Step::Continue) => {}
                other => return Ok(other),
            }
        }
        if !has_body || processor.mode.request_body == BodyMode::None {
            return Ok(Ok(Step::Continue));
        }
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
        match self.ask(processor, message, attributes.take()).await? {
            Ok(Step::Continue | Step::Replaced) => {}
            other => return Ok(other),
        }
        let Some(trailers) = trailers.filter(|_| processor.mode.request_trailers) else {
            return Ok(Ok(Step::Continue));
        };
        let fields = fields(processor.config, &trailers);
        let message =
            Message::RequestTrailers(HttpTrailers { trailers: Some(HeaderMap { headers: fields }) });
        self.ask(processor, message, attributes.take()).await
    }

    /// Sends the parts of a response to a processor. Returns `None` if the body exceeds the limit.
    async fn response_steps(
        &mut self,
        processor: &mut Processor<'a>,
        body: &mut ResponseBody<'_>,
    ) -> Result<Option<Result<Step, ProcessorFailure>>, Error> {
        let has_body = body.has_content();
        let mut attributes = self.attributes(processor, Side::Response);
        if processor.mode.response_headers {
            let headers = response_fields(processor.config, self.exchange.response);
            let message = Message::ResponseHeaders(HttpHeaders {
                headers: Some(headers),
                end_of_stream: !has_body,
                ..HttpHeaders::default()
            });
            match self.ask_about_response(processor, message, attributes.take(), body).await? {
                Some(Ok(Step::Continue)) => {}
                other => return Ok(other),
            }
        }
        if !has_body || processor.mode.response_body == BodyMode::None {
            return Ok(Some(Ok(Step::Continue)));
        }
        if self.decision.grpc_web.is_some() {
            return Ok(Some(Err(ProcessorFailure::Invalid("grpc_web_body"))));
        }
        if !self.load_response_body(body).await? {
            return Ok(None);
        }
        let content = body.content.clone().unwrap_or_default();
        let end_of_stream = body.trailers.is_none();
        let message = Message::ResponseBody(HttpBody { body: content, end_of_stream, ..HttpBody::default() });
        match self.ask_about_response(processor, message, attributes.take(), body).await? {
            Some(Ok(Step::Continue | Step::Replaced)) => {}
            other => return Ok(other),
        }
        let Some(trailers) = body.trailers.as_ref().filter(|_| processor.mode.response_trailers) else {
            return Ok(Some(Ok(Step::Continue)));
        };
        let fields = fields(processor.config, trailers);
        let message =
            Message::ResponseTrailers(HttpTrailers { trailers: Some(HeaderMap { headers: fields }) });
        self.ask_about_response(processor, message, attributes.take(), body).await
    }

    /// Sends a message about the request and applies the answer.
    async fn ask(
        &mut self,
        processor: &mut Processor<'a>,
        message: Message,
        attributes: Option<Struct>,
    ) -> Result<Result<Step, ProcessorFailure>, Error> {
        let answer = match self.send(processor, message, attributes, Side::Request).await? {
            Ok(answer) => answer,
            Err(failure) => return Ok(Err(failure)),
        };
        if matches!(&answer, Answer::RequestHeaders(headers) if replaces(headers)) {
            // The content that is replaced is read, so that the connection can be used again.
            let exchange = &mut self.exchange;
            transfer::collect(self.scope.manager, exchange, MAX_BODY).await?;
            if !exchange.body.is_collected() && exchange.body.framing() != Framing::None {
                return Err(Error::new(Kind::BodyTooLarge));
            }
            exchange.request.remove("content-length");
        }
        Ok(self.apply_to_request(processor, answer))
    }

    /// Sends a message about the response and applies the answer. Returns `None` if the body exceeds the limit.
    async fn ask_about_response(
        &mut self,
        processor: &mut Processor<'a>,
        message: Message,
        attributes: Option<Struct>,
        body: &mut ResponseBody<'_>,
    ) -> Result<Option<Result<Step, ProcessorFailure>>, Error> {
        let answer = match self.send(processor, message, attributes, Side::Response).await? {
            Ok(answer) => answer,
            Err(failure) => return Ok(Some(Err(failure))),
        };
        let replaces = matches!(&answer, Answer::ResponseHeaders(headers) if replaces(headers));
        if replaces && !self.load_response_body(body).await? {
            return Ok(None);
        }
        Ok(Some(self.apply_to_response(processor, answer, body)))
    }

    /// Sends a message and returns the answer to it, after its metadata and mode have been applied.
    async fn send(
        &mut self,
        processor: &mut Processor<'a>,
        message: Message,
        attributes: Option<Struct>,
        side: Side,
    ) -> Result<Result<Answer, ProcessorFailure>, Error> {
        let is_headers = matches!(message, Message::RequestHeaders(_) | Message::ResponseHeaders(_));
        let is_answer = answers(&message);
        let message = ProcessingRequest {
            request: Some(message),
            metadata_context: Some(self.metadata_context(processor)),
            attributes: attributes
                .map(|found| HashMap::from([(EXT_PROC.to_owned(), found)]))
                .unwrap_or_default(),
            ..ProcessingRequest::default()
        };
        let asked = Box::pin(processor.ask(self.scope.worker, self.scope.snapshot, message));
        let asked = unless_closed(&mut self.exchange, async { Ok(asked.await) }).await?;
        let response = match asked {
            Ok(response) => response,
            Err(failure) => return Ok(Err(failure)),
        };
        let ProcessingResponse { response: Some(answer), dynamic_metadata, mode_override, .. } = response
        else {
            return Ok(Err(ProcessorFailure::Invalid("no_answer")));
        };
        if !matches!(answer, Answer::ImmediateResponse(_)) && !is_answer(&answer) {
            return Ok(Err(ProcessorFailure::Invalid("spurious_message")));
        }
        if let Some(found) = dynamic_metadata {
            self.take_metadata(processor, found, side);
        }
        if let Some(mode) = mode_override.filter(|_| is_headers && processor.config.allow_override) {
            match call::processing::mode(&mode) {
                Ok(mode) if is_allowed(processor.config, mode) => processor.mode = mode,
                // As in Envoy, a mode that is not allowed is ignored.
                Ok(_) => {}
                Err(_) => return Ok(Err(ProcessorFailure::Invalid("unsupported_mode_override"))),
            }
        }
        Ok(Ok(answer))
    }

    fn apply_to_request(
        &mut self,
        processor: &Processor<'a>,
        answer: Answer,
    ) -> Result<Step, ProcessorFailure> {
        let config = processor.config;
        let (response, is_headers) = match answer {
            Answer::RequestHeaders(headers) => (headers.response.unwrap_or_default(), true),
            Answer::RequestBody(body) => (body.response.unwrap_or_default(), false),
            Answer::RequestTrailers(trailers) => {
                let Some(mutation) = trailers.header_mutation else { return Ok(Step::Continue) };
                let mut fields = self.exchange.body.trailers().cloned().unwrap_or_default();
                apply(&config.rules, &mutation, &mut Head::Trailers(&mut fields))?;
                let content = self.exchange.body.kept().unwrap_or_default().to_vec();
                let framing = set_length(self.exchange.request, content.len(), true);
                self.exchange.body.replace(content, framing, Some(fields));
                return Ok(Step::Continue);
            }
            Answer::ImmediateResponse(answer) => return Ok(Step::Answer(Box::new(answer))),
            _ => return Err(ProcessorFailure::Invalid("spurious_message")),
        };
        let replaces = is_headers && response.status() == ResponseStatus::ContinueAndReplace;
        let CommonResponse { header_mutation, body_mutation, clear_route_cache, .. } = response;
        let has_mutation = header_mutation.is_some();
        if let Some(mutation) = header_mutation {
            self.decision.filter_results.keep_head(self.exchange.request);
            apply(&config.rules, &mutation, &mut Head::Request(self.exchange.request))?;
        }
        // In an answer about headers, the body counts only if it replaces the body that follows.
        let new =
            body_mutation.filter(|_| replaces || !is_headers).map(|mutation| content(mutation.mutation));
        match new {
            Some(Err(failure)) => return Err(failure),
            Some(Ok(new)) => self.replace_request_content(new),
            None if replaces => self.replace_request_content(Vec::new()),
            None => {}
        }
        let reselects = match config.route {
            RouteReselection::IfAsked => clear_route_cache && has_mutation,
            RouteReselection::Always => is_headers,
            RouteReselection::Never => false,
        };
        if reselects {
            let found = self.outcome.metadata.as_deref();
            routing::find_route(&self.scope, self.exchange.request, found, &mut self.decision);
        }
        Ok(if replaces { Step::Replaced } else { Step::Continue })
    }

    /// Sets new content of the request. The rest of a larger body follows it.
    fn replace_request_content(&mut self, content: Vec<u8>) {
        self.decision.filter_results.keep_head(self.exchange.request);
        let body = &mut self.exchange.body;
        if body.is_collected() || body.framing() == Framing::None {
            let trailers = body.trailers().cloned();
            let framing = match self.exchange.request.has("content-length") {
                true => set_length(self.exchange.request, content.len(), trailers.is_some()),
                false => Framing::Chunked,
            };
            body.replace(content, framing, trailers);
        } else {
            self.exchange.request.remove("content-length");
            body.replace_start(content);
        }
    }

    fn apply_to_response(
        &mut self,
        processor: &Processor<'a>,
        answer: Answer,
        body: &mut ResponseBody<'_>,
    ) -> Result<Step, ProcessorFailure> {
        let config = processor.config;
        let (response, is_headers) = match answer {
            Answer::ResponseHeaders(headers) => (headers.response.unwrap_or_default(), true),
            Answer::ResponseBody(body) => (body.response.unwrap_or_default(), false),
            Answer::ResponseTrailers(trailers) => {
                if let Some(mutation) = trailers.header_mutation {
                    let mut fields = body.trailers.take().unwrap_or_default();
                    apply(&config.rules, &mutation, &mut Head::Trailers(&mut fields))?;
                    (body.trailers, body.is_changed) = (Some(fields), true);
                }
                return Ok(Step::Continue);
            }
            Answer::ImmediateResponse(answer) => return Ok(Step::Answer(Box::new(answer))),
            _ => return Err(ProcessorFailure::Invalid("spurious_message")),
        };
        let replaces = is_headers && response.status() == ResponseStatus::ContinueAndReplace;
        if let Some(mutation) = response.header_mutation {
            apply(&config.rules, &mutation, &mut Head::Response(self.exchange.response))?;
        }
        let new = response.body_mutation.filter(|_| replaces || !is_headers);
        let new = new.map(|mutation| content(mutation.mutation)).transpose()?;
        if let Some(new) = new.or_else(|| replaces.then(Vec::new)) {
            body.content = Some(new);
            body.is_changed = !matches!(body.source, BodySource::Local);
        }
        Ok(if replaces { Step::Replaced } else { Step::Continue })
    }

    /// Returns the processor's own answer to the request, or the details of a failure that ends the request.
    fn conclude(
        &mut self,
        processor: &mut Processor<'a>,
        step: Result<Step, ProcessorFailure>,
    ) -> Result<Option<Box<ImmediateResponse>>, (u16, String)> {
        let failure = match step {
            Ok(Step::Answer(answer)) if processor.config.allow_immediate => {
                processor.is_done = true;
                return Ok(Some(answer));
            }
            Ok(Step::Answer(_)) => ProcessorFailure::Invalid("immediate_response_disabled"),
            Ok(Step::Continue) => return Ok(None),
            // As in Envoy, the request side is complete, but the response is still processed.
            Ok(Step::Replaced) => return Ok(None),
            Err(failure) => failure,
        };
        processor.is_done = true;
        let cluster = &processor.config.service.cluster;
        let on_error = processor.config.status_on_error;
        let (status, details, cause) = match failure {
            ProcessorFailure::Ended => return Ok(None),
            ProcessorFailure::Late => {
                (504, "ext_proc_error_per-message_timeout_exceeded".to_owned(), Box::default())
            }
            ProcessorFailure::Call(CallFailure { status, message }) => {
                (on_error, format!("ext_proc_error_gRPC_error_{status}"), message)
            }
            ProcessorFailure::Invalid(reason) => {
                (on_error, format!("ext_proc_error_{reason}"), Box::default())
            }
        };
        let prefix = &self.scope.manager.stat_prefix;
        limit_log::log(Limit::Processor, format_args!("{prefix}, cluster {cluster}: {details} {cause}"));
        if processor.is_failure_allowed() { Ok(None) } else { Err((status, details)) }
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
            let rules = skysail_policy::config::processing::MutationRules {
                allowed: config.rules.allowed.clone(),
                disallowed: config.rules.disallowed.clone(),
                allow_routing: config.rules.allow_routing,
                allow_envoy: config.rules.allow_envoy,
                ..Default::default()
            };
            let _ = apply(&rules, &mutation, &mut Head::Response(self.exchange.response));
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

    /// Returns the metadata that the processor gets.
    fn metadata_context(&self, processor: &Processor<'a>) -> Metadata {
        let own = processor.by_route.and_then(|by_route| by_route.forwarded.as_ref());
        let names = own.unwrap_or(&processor.config.data.forwarded);
        let found = self.outcome.metadata.as_deref();
        let entries = names.iter().filter_map(|name| {
            let Value::Object(object) = found?.get(&**name)? else { return None };
            Some((name.to_string(), structure(object)))
        });
        Metadata { filter_metadata: entries.collect(), ..Metadata::default() }
    }

    /// Stores the metadata of an answer that the processor may set.
    fn take_metadata(&mut self, processor: &Processor<'a>, found: Struct, side: Side) {
        let own = processor.by_route.and_then(|by_route| by_route.received.as_ref());
        let names = own.unwrap_or(&processor.config.data.received);
        let mut taken = Map::new();
        for (namespace, value) in json(found) {
            if let Value::Object(object) = value
                && names.iter().any(|name| **name == *namespace)
            {
                add_metadata(&mut self.outcome, &namespace, object.clone());
                taken.insert(namespace, object.into());
            }
        }
        if side == Side::Request {
            self.decision.filter_results.add_metadata(&taken);
        }
    }

    /// Returns the attributes for the first message of a side; `None` if the processor gets none.
    fn attributes(&self, processor: &Processor<'a>, side: Side) -> Option<Struct> {
        let data = &processor.config.data;
        let own = processor.by_route.and_then(|by_route| match side {
            Side::Request => by_route.request_attributes.as_ref(),
            Side::Response => by_route.response_attributes.as_ref(),
        });
        let list: &Attributes = own.unwrap_or(match side {
            Side::Request => &data.request_attributes,
            Side::Response => &data.response_attributes,
        });
        if list.is_empty() {
            return None;
        }
        let record = self.record();
        let context = Context {
            record: &record,
            request: Some(self.exchange.request),
            response: (side == Side::Response).then_some(&*self.exchange.response),
        };
        let found = list.iter().filter_map(|(name, expression)| {
            Some((name.to_string(), telemetry::attribute_json(expression, &context)?))
        });
        Some(structure(&found.collect()))
    }
}

fn processor<'a>(
    filter: &'a Filter,
    config: &'a ExternalProcessing,
    setting: Option<&'a Setting>,
) -> Processor<'a> {
    let by_route = match setting {
        Some(Setting::Processing(by_route)) => Some(&**by_route),
        _ => None,
    };
    Processor::new(filter, config, by_route)
}

/// Returns whether an answer replaces the body.
fn replaces(headers: &HeadersResponse) -> bool {
    headers.response.as_ref().is_some_and(|it| it.status() == ResponseStatus::ContinueAndReplace)
}

/// Returns a function that says whether an answer is one to this message.
fn answers(message: &Message) -> fn(&Answer) -> bool {
    match message {
        Message::RequestHeaders(_) => |answer| matches!(answer, Answer::RequestHeaders(_)),
        Message::ResponseHeaders(_) => |answer| matches!(answer, Answer::ResponseHeaders(_)),
        Message::RequestBody(_) => |answer| matches!(answer, Answer::RequestBody(_)),
        Message::ResponseBody(_) => |answer| matches!(answer, Answer::ResponseBody(_)),
        Message::RequestTrailers(_) => |answer| matches!(answer, Answer::RequestTrailers(_)),
        Message::ResponseTrailers(_) => |answer| matches!(answer, Answer::ResponseTrailers(_)),
    }
}

/// Returns whether the processor may choose a mode. As in Envoy, the mode of the request's headers does not count.
fn is_allowed(config: &ExternalProcessing, mode: ProcessingMode) -> bool {
    let same = |allowed: &ProcessingMode| {
        ProcessingMode { request_headers: mode.request_headers, ..*allowed } == mode
    };
    config.allowed_modes.is_empty() || config.allowed_modes.iter().any(same)
}
