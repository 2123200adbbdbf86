//! Rate limits: the tokens and descriptors of a request, and the response to one above a limit.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::request::context::{Filtered, RequestContext, ResponseField};
use skysail_policy::{
    config::{
        limit::{HostRules, LimitRule, RateLimit},
        route::{Action, AppendAction},
    },
    error::{Error, Flags},
    headers,
    limit::{self, Descriptor, LimitRequest, TokenDecision},
    route,
    state::rate_limit::LimitBucket,
};

/// A refusal by a local rate limit.
pub(crate) struct LimitedRate<'a> {
    limit: &'a RateLimit,
    /// Time until the bucket has a token.
    wait: Duration,
}

impl<'a> RequestContext<'a> {
    /// Takes the request's tokens. Returns the refusal if a bucket is empty and the limit is enforced.
    pub(crate) fn take_tokens(&mut self, limit: &'a Arc<RateLimit>) -> Option<LimitedRate<'a>> {
        if limit.is_unlimited() || !self.is_sampled(limit.enabled) {
            return None;
        }
        let counters = self.scope.worker.shard.local_limit(&limit.stat_prefix);
        counters.enabled.inc();
        let now = Instant::now();
        let taken = self.take_from_buckets(limit, now);
        if let Some(bucket) = taken.bucket.as_deref().filter(|_| taken.report.unwrap_or(limit.report)) {
            self.report_bucket(bucket, now);
        }
        if taken.allowed {
            counters.ok.inc();
            return None;
        }
        counters.limited.inc();
        if taken.bucket.as_ref().is_some_and(|bucket| bucket.shadow) {
            counters.shadow_mode.inc();
            return None;
        }
        if self.is_sampled(limit.enforced) {
            counters.enforced.inc();
            let wait = taken.bucket.map_or(Duration::ZERO, |bucket| bucket.tokens.time_to_token(now));
            return Some(LimitedRate { limit, wait });
        }
        if !limit.unenforced.is_empty() {
            self.decision.filter_results.keep_head(self.exchange.request);
            let mut head = std::mem::take(self.exchange.request);
            headers::apply_request(&limit.unenforced, &mut head, &self.record());
            *self.exchange.request = head;
        }
        None
    }

    /// Returns true for this share of requests, in millionths.
    pub(crate) fn is_sampled(&self, share: u32) -> bool {
        route::sample(&mut self.scope.worker.rng.borrow_mut(), share)
    }

    fn take_from_buckets(&self, limit: &'a Arc<RateLimit>, now: Instant) -> TokenDecision {
        let descriptors = if limit.settings.descriptors.is_empty() {
            Vec::new()
        } else {
            self.descriptors(limit.rules.as_deref(), limit.host_rules, limit.stage)
        };
        match &limit.buckets {
            Some(buckets) => limit::take(buckets, &descriptors, limit.always_take_default, now),
            None => {
                let buckets = self.exchange.downstream.origin.limits.buckets(limit);
                limit::take(&buckets, &descriptors, limit.always_take_default, now)
            }
        }
    }

    /// Returns the request's descriptors: by the rules of a filter for every request, or by those of its route and
    /// virtual host for a request with a route to a cluster. Source: Envoy's `local_ratelimit` and `ratelimit` filters.
    pub(crate) fn descriptors(
        &self,
        by_filter: Option<&[LimitRule]>,
        host: HostRules,
        stage: u32,
    ) -> Vec<Descriptor> {
        let forwarded = self.decision.found.as_ref().ok().and_then(|found| match &found.route.action {
            Action::Forward(forward) => Some((found, forward)),
            _ => None,
        });
        let record = self.record();
        let request = LimitRequest {
            head: self.exchange.request,
            client: self.exchange.client,
            source_cluster: &self.scope.worker.shared.local.node_cluster,
            destination_cluster: forwarded
                .and_then(|(found, forward)| forward.cluster(found.target, self.exchange.request)),
            record: &record,
        };
        match (by_filter, forwarded) {
            (Some(rules), _) => limit::descriptors(rules, &request),
            (None, Some((found, forward))) => {
                let rules = limit::rules(forward.limits.as_deref(), &found.host.limits, host, stage);
                limit::descriptors(rules, &request)
            }
            (None, None) => Vec::new(),
        }
    }

    /// Adds `x-ratelimit` headers to the response.
    fn report_bucket(&mut self, bucket: &LimitBucket, now: Instant) {
        let tokens = &bucket.tokens;
        for (name, value) in [
            ("x-ratelimit-limit", tokens.max_tokens().into()),
            ("x-ratelimit-remaining", tokens.remaining(now)),
            ("x-ratelimit-reset", tokens.time_to_token(now).as_secs()),
        ] {
            let value = value.to_string().into_bytes().into();
            let field = ResponseField { name: name.into(), value, action: AppendAction::Append };
            self.decision.response_filters_mut().fields.push(field);
        }
    }

    /// Answers a request above a local rate limit.
    pub(crate) async fn refuse_rate(&mut self, refusal: LimitedRate<'_>) -> Result<Filtered, Error> {
        let LimitedRate { limit, wait } = refusal;
        self.outcome.flags.insert(Flags::RL);
        self.outcome.details = "local_rate_limited".into();
        self.begin_local_reply(limit.status);
        self.apply_ops(&limit.answer);
        if limit.retry_after && limit.status == 429 && !self.exchange.response.has("retry-after") {
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            self.exchange.response.set_number("retry-after", seconds.max(1));
        }
        if limit.resource_exhausted && self.decision.grpc {
            self.exchange.response.set("grpc-status", b"8");
        }
        self.send_text(b"local_rate_limited").await?;
        Ok(Filtered::Answered)
    }
}
