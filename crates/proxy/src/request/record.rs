//! The last phase: the spans, the metrics and the access logs of a request.

use std::time::Instant;

use crate::{
    call::export,
    request::{
        context::RequestContext,
        spans::{AttemptEnd, Trace},
    },
    upstream::pool::increment,
};
use skysail_http::{head::Version, wire::Wire};
use skysail_policy::{
    error::{Error, Flags},
    record::Context,
};

impl RequestContext<'_> {
    /// Records the request, which ends now, in metrics, access logs and its trace.
    pub(crate) fn write_record(&mut self, now: Instant) {
        self.end_attempt_span(None, false);
        let worker = self.scope.worker;
        let mut record = self.record();
        record.duration = now.saturating_duration_since(self.outcome.started);
        record.grpc_status = self.grpc_status(self.exchange.response);
        if record.status >= 500
            && let Some(host) = &self.outcome.host
        {
            increment(&host.totals.errors);
        }
        let (request, response) = (Some(&*self.exchange.request), Some(&*self.exchange.response));
        let context = Context { record: &record, request, response };
        if let Some(stats) = &self.scope.manager.stats {
            if stats.http.is_empty() {
                worker.shard.request(&record, self.exchange.request);
            } else {
                worker.shard.request_changed(&stats.http, &context);
            }
        }
        if let Ok(found) = &self.decision.found
            && let Some(prefix) = &found.route.stat_prefix
            && self.outcome.pool.is_some()
            && record.status > 0
        {
            let status = if self.outcome.failed > 0 { self.outcome.failed } else { record.status };
            let retries = u64::from(record.attempts).saturating_sub(1);
            worker.shard.route(&found.host.name, prefix, status, retries);
        }
        if let Some(trace) = &self.outcome.trace {
            trace.export_request(worker, &context, self.outcome.grpc_status);
        }
        export::log(worker, &self.scope.manager.access_logs, &context);
    }

    /// Exports the span of the current attempt, if it has one. `error` is the reason if the attempt failed.
    /// `is_abandoned` says that its response is discarded.
    #[inline]
    pub(crate) fn end_attempt_span(&mut self, error: Option<&Error>, is_abandoned: bool) {
        if self.outcome.trace.is_some() {
            self.export_attempt_span(error, is_abandoned);
        }
    }

    fn export_attempt_span(&mut self, error: Option<&Error>, is_abandoned: bool) {
        let attempt = self.outcome.trace.as_deref_mut().and_then(Trace::take_attempt);
        let (Some(attempt), Some(trace)) = (attempt, self.outcome.trace.as_deref()) else { return };
        let protocol = match self.outcome.upstream.as_ref().map(|upstream| &upstream.wire) {
            None => "-",
            Some(Wire::Http1(_)) => Version::Http11.as_str(),
            Some(Wire::Http2(_)) => Version::Http2.as_str(),
        };
        let mut record = self.record();
        record.flags = error.map_or(Flags::NONE, |error| error.response().flags);
        let (request, response) = (Some(&*self.exchange.request), Some(&*self.exchange.response));
        let context = Context { record: &record, request, response };
        let end = AttemptEnd { error, is_abandoned, protocol };
        trace.export_attempt(self.scope.worker, &attempt, &context, &end);
    }
}
