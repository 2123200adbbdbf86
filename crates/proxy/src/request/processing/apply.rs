//! Applies the answers of a processor to the request and the response.

use skysail_xds::envoy::pb::envoy::service::ext_proc::v3::{
    CommonResponse, HeadersResponse, common_response::ResponseStatus, processing_response::Response as Answer,
};

use super::Step;
use crate::request::{
    context::RequestContext,
    processor::{
        Processor, ProcessorFailure,
        changes::{Head, apply, content},
    },
    response_body::{BodySource, ResponseBody, set_length},
    routing,
};
use skysail_http::http1::Framing;
use skysail_policy::config::processing::RouteReselection;

impl<'a> RequestContext<'a> {
    /// Applies an answer about the request.
    pub(super) fn apply_to_request(
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
                let rejected = apply(&config.rules, &mutation, &mut Head::Trailers(&mut fields))?;
                processor.stats().ext_proc_rejected.add(rejected);
                let content = self.exchange.body.kept().unwrap_or_default().to_vec();
                let framing = set_length(self.exchange.request, content.len(), true);
                self.exchange.body.replace(content, framing, Some(fields));
                return Ok(Step::Continue);
            }
            _ => return Err(ProcessorFailure::Spurious),
        };
        let replaces = is_headers && response.status() == ResponseStatus::ContinueAndReplace;
        let CommonResponse { header_mutation, body_mutation, clear_route_cache, .. } = response;
        let has_mutation = header_mutation.is_some();
        if let Some(mutation) = header_mutation {
            self.decision.filter_results.keep_head(self.exchange.request);
            let rejected = apply(&config.rules, &mutation, &mut Head::Request(self.exchange.request))?;
            processor.stats().ext_proc_rejected.add(rejected);
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
            RouteReselection::OnRequest => clear_route_cache && has_mutation,
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

    /// Applies an answer about the response.
    pub(super) fn apply_to_response(
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
                    let rejected = apply(&config.rules, &mutation, &mut Head::Trailers(&mut fields))?;
                    processor.stats().ext_proc_rejected.add(rejected);
                    (body.trailers, body.is_changed) = (Some(fields), true);
                }
                return Ok(Step::Continue);
            }
            _ => return Err(ProcessorFailure::Spurious),
        };
        let replaces = is_headers && response.status() == ResponseStatus::ContinueAndReplace;
        if let Some(mutation) = response.header_mutation {
            let rejected = apply(&config.rules, &mutation, &mut Head::Response(self.exchange.response))?;
            processor.stats().ext_proc_rejected.add(rejected);
        }
        let new = response.body_mutation.filter(|_| replaces || !is_headers);
        let new = new.map(|mutation| content(mutation.mutation)).transpose()?;
        if let Some(new) = new.or_else(|| replaces.then(Vec::new)) {
            body.content = Some(new);
            body.is_changed = !matches!(body.source, BodySource::Local);
        }
        Ok(if replaces { Step::Replaced } else { Step::Continue })
    }
}

/// Returns whether an answer about headers replaces the body.
pub(super) fn replaces(answer: &Answer) -> bool {
    let (Answer::RequestHeaders(HeadersResponse { response })
    | Answer::ResponseHeaders(HeadersResponse { response })) = answer
    else {
        return false;
    };
    response.as_ref().is_some_and(|response| response.status() == ResponseStatus::ContinueAndReplace)
}
