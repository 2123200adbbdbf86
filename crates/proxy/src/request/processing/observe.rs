//! External processing that only observes: messages are sent, and nothing waits for answers.
//!
//! As in Envoy, the processor gets bodies only in the mode `STREAMED`.

use skysail_xds::envoy::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, processing_request::Request as Message,
};

use crate::request::{
    context::RequestContext,
    processor::{
        Processor, Side, StageMode,
        changes::{request_fields, response_fields},
    },
    response_body::ResponseBody,
};
use skysail_http::http1::Framing;
use skysail_policy::config::processing::BodyMode;

impl<'a> RequestContext<'a> {
    /// Sends the request to a processor that only observes.
    pub(super) fn observe_request(&mut self, processor: &Processor<'a>) {
        let has_body = self.exchange.body.framing() != Framing::None;
        self.set_data(processor, Side::Request, true);
        if processor.mode.request_headers {
            let headers = Some(request_fields(processor.config, self.exchange.request));
            let headers = HttpHeaders { headers, end_of_stream: !has_body, ..HttpHeaders::default() };
            processor.tell(Side::Request, Message::RequestHeaders(headers));
        }
        let mode = stage(processor.mode.request_body, processor.mode.request_trailers);
        if let Some(mode) = mode.filter(|_| has_body) {
            self.stage_request(processor, mode);
        }
    }

    /// Sends the response to a processor that only observes.
    pub(super) fn observe_response(&mut self, processor: &Processor<'a>, body: &mut ResponseBody<'_>) {
        let has_body = body.has_content();
        self.set_data(processor, Side::Response, true);
        if processor.mode.response_headers {
            let headers = Some(response_fields(processor.config, self.exchange.response));
            let headers = HttpHeaders { headers, end_of_stream: !has_body, ..HttpHeaders::default() };
            processor.tell(Side::Response, Message::ResponseHeaders(headers));
        }
        let mode = stage(processor.mode.response_body, processor.mode.response_trailers);
        let Some(mode) = mode.filter(|_| has_body) else { return };
        match &body.content {
            Some(content) if mode == StageMode::Chunks => {
                let body = HttpBody { body: content.clone(), end_of_stream: true, ..HttpBody::default() };
                processor.tell(Side::Response, Message::ResponseBody(body));
            }
            Some(_) => {}
            None => self.stage_response(processor, mode, body),
        }
    }
}

/// Returns what a processor gets of a body.
fn stage(body: BodyMode, trailers: bool) -> Option<StageMode> {
    match body {
        BodyMode::Streamed => Some(StageMode::Chunks),
        _ if trailers => Some(StageMode::Trailers),
        _ => None,
    }
}
