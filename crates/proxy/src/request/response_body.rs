//! The body of a response, for filters that process responses: Lua scripts and external processing.

use std::time::Instant;

use crate::request::{
    context::{RequestContext, admitted_request},
    transfer::{Client, Deadlines},
};
use skysail_http::{flow::Flow, grpc_web::Conversion, head::Headers, http1::Framing, wire::Wire};
use skysail_policy::error::{Error, Kind};

/// Maximum size in bytes of a body that a filter reads.
pub(crate) const MAX_BODY: usize = crate::script::MAX_BODY;

/// The body of a response.
pub(crate) struct ResponseBody<'d> {
    pub(crate) source: BodySource<'d>,
    /// The content, if a filter has read it.
    pub(crate) content: Option<Vec<u8>>,
    pub(crate) trailers: Option<Headers>,
    /// A filter has changed content or trailers.
    pub(crate) is_changed: bool,
}

/// The source of a response's body.
pub(crate) enum BodySource<'d> {
    /// The response has no body, or its body is a tunnel.
    None,
    /// A local reply.
    Local,
    /// The upstream.
    Upstream { framing: Framing, flow: Option<Box<Flow>>, is_sent: bool, deadlines: &'d mut Deadlines },
}

/// The upstream's side of an exchange, for work on its response.
pub(crate) struct UpstreamPart<'u, 'c> {
    pub(crate) client: &'u mut Client<'c>,
    pub(crate) wire: &'u mut Wire,
    /// The response's body, if a filter reads it.
    pub(crate) flow: Option<&'u mut Flow>,
    /// Returns the deadline of a request that is no longer admitted.
    pub(crate) revoked: &'u mut dyn FnMut() -> Option<Instant>,
}

/// The end of a filter's work on a message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FilterOutcome {
    /// The message continues, even if the filter has failed.
    Continue,
    /// The filter has answered the request.
    Answered,
    /// The body exceeds the limit.
    TooLarge,
}

impl ResponseBody<'_> {
    /// Returns whether the response has content.
    pub(crate) fn has_content(&self) -> bool {
        match &self.content {
            Some(content) => !content.is_empty(),
            None => matches!(self.source, BodySource::Upstream { .. }),
        }
    }
}

impl RequestContext<'_> {
    /// Returns the body of a response that is not in memory, after its decompression.
    pub(crate) fn response_flow<'b>(&mut self, body: &'b mut ResponseBody<'_>) -> Option<&'b mut Flow> {
        let BodySource::Upstream { framing, flow, .. } = &mut body.source else { return None };
        if flow.is_none() {
            let limits = self.outcome.upstream.as_ref()?.link.pool().cluster.head_limits();
            let mut read = Box::new(Flow::new(*framing, *framing, limits, true));
            let state = self.decision.response_filters.as_deref_mut();
            if let Some(decoding) = state.and_then(|state| state.decoding.take()) {
                read.convert(Conversion::Decompress(decoding));
            }
            *flow = Some(read);
        }
        flow.as_deref_mut()
    }

    /// Reads the body of the response, if that has not been done. Returns false if it exceeds the limit.
    ///
    /// # Errors
    /// The upstream fails, or a deadline passes.
    pub(crate) async fn load_response_body(&mut self, body: &mut ResponseBody<'_>) -> Result<bool, Error> {
        if body.content.is_some() || self.response_flow(body).is_none() {
            return Ok(true);
        }
        let work = async |part: UpstreamPart<'_, '_>| match part.flow {
            Some(flow) => part.client.collect(part.wire, flow, MAX_BODY, part.revoked).await,
            None => Ok(()),
        };
        if self.with_upstream(body, work).await?.is_none() {
            return Ok(true);
        }
        let Some(read) = self.response_flow(body) else { return Ok(true) };
        let kept = read.kept().filter(|kept| read.is_collected() && kept.len() <= MAX_BODY);
        let Some(kept) = kept.map(<[u8]>::to_vec) else { return Ok(false) };
        let trailers = read.trailers().cloned();
        (body.content, body.trailers) = (Some(kept), trailers);
        Ok(true)
    }

    /// Does `work` on the upstream's response, while the rest of the request is sent. Returns `None` without an
    /// upstream.
    ///
    /// # Errors
    /// The work fails. A failure of the upstream is noted.
    pub(crate) async fn with_upstream<T>(
        &mut self,
        body: &mut ResponseBody<'_>,
        work: impl AsyncFnOnce(UpstreamPart<'_, '_>) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let BodySource::Upstream { flow, is_sent, deadlines, .. } = &mut body.source else { return Ok(None) };
        let Some(mut upstream) = self.outcome.upstream.take() else { return Ok(None) };
        let origin = self.exchange.downstream.origin.clone();
        let admitted = admitted_request!(self, &origin, &upstream.link);
        let admission = &mut self.decision.admission;
        let mut revoked = || admission.deadline(admitted.worker, || admitted.revalidate());
        let mut client = Client::new(self.exchange.downstream, deadlines, &mut self.exchange.body, false);
        client.complete = *is_sent;
        let (wire, flow) = (&mut upstream.wire, flow.as_deref_mut());
        let result = work(UpstreamPart { client: &mut client, wire, flow, revoked: &mut revoked }).await;
        *is_sent = client.complete;
        if let Err(error) = &result
            && !matches!(error.kind, Kind::ResponseTimeout | Kind::Revoked)
        {
            let host = &upstream.link.host;
            upstream.link.pool().note_failure(&host.endpoint, &error.kind, &self.scope.worker.rng);
        }
        self.outcome.upstream = Some(upstream);
        result.map(Some)
    }
}

/// Sets the length of a new body in a head, and returns its framing.
pub(crate) fn set_length(head: &mut Headers, length: usize, has_trailers: bool) -> Framing {
    head.set_number("content-length", length as u64);
    if has_trailers { Framing::Chunked } else { Framing::Length(length as u64) }
}
