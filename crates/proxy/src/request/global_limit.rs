//! Global rate limits: a service decides about the descriptors of a request.
//!
//! Sources: `envoy.service.ratelimit.v3`, and Envoy's `ratelimit` filter for the effect of the answers.

use std::fmt::Write as _;

use serde_json::{Map, Value};
use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::HeaderValue,
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, DescriptorStatus, rate_limit::Unit},
        },
        r#type::v3::RateLimitUnit,
    },
    google::protobuf::UInt64Value,
};
use tracing::warn;

use crate::{
    call,
    request::{
        authorization::json,
        context::{Filtered, RequestContext, ResponseField, add_metadata},
        hop,
        transfer::unless_closed,
    },
};
use skysail_http::http1::parse;
use skysail_policy::{
    config::{
        limit::{GlobalRateLimit, HostRules, RouteRateLimit},
        route::AppendAction,
    },
    error::{Error, Flags, Kind},
    limit::Descriptor,
};

/// Path of the gRPC method.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A call for the descriptors of a request.
pub(crate) struct LimitCall<'a> {
    config: &'a GlobalRateLimit,
    domain: &'a str,
    descriptors: Vec<Descriptor>,
}

/// A header's name and value.
type LimitField = (Box<str>, Box<[u8]>);

/// The service's decision.
#[derive(Debug, Default, PartialEq)]
struct LimitVerdict {
    limited: bool,
    /// Fields to add to the request.
    request: Vec<LimitField>,
    /// Fields to add to the response.
    response: Vec<LimitField>,
    /// Content of the response to a refused request.
    body: Vec<u8>,
    metadata: Map<String, Value>,
    /// Seconds until the limits that the request exceeds are reset.
    wait: Option<u64>,
}

impl<'a> RequestContext<'a> {
    /// Returns the call that a rate limit needs; `None` if it does not apply to the request.
    pub(crate) fn limit_call(
        &self,
        config: &'a GlobalRateLimit,
        route: Option<&'a RouteRateLimit>,
    ) -> Option<LimitCall<'a>> {
        if !self.is_sampled(config.enabled) {
            return None;
        }
        let is_internal = self.exchange.request.header("x-envoy-internal") == Some(b"true");
        if config.internal.is_some_and(|internal| internal != is_internal) {
            return None;
        }
        // As in Envoy, a request whose cluster does not exist is not limited.
        self.routed_cluster()?;
        let rules = route.and_then(|route| route.rules.as_deref()).or(config.rules.as_deref());
        let host = route.map_or(HostRules::default(), |route| route.host_rules);
        let descriptors = self.descriptors(rules, host, config.stage);
        let domain = route.and_then(|route| route.domain.as_deref()).unwrap_or(&config.domain);
        (!descriptors.is_empty()).then_some(LimitCall { config, domain, descriptors })
    }

    /// Calls the rate limit service and applies its decision.
    pub(crate) async fn call_rate_limit(&mut self, call: LimitCall<'a>) -> Result<Filtered, Error> {
        let LimitCall { config, domain, descriptors } = call;
        let mut head = call::grpc_head(SHOULD_RATE_LIMIT, &config.authority);
        for (name, value) in &config.metadata {
            head.append(name, value.as_bytes());
        }
        let content = call::grpc_frame(&request(domain, &descriptors).to_vec());
        let (worker, snapshot) = (self.scope.worker, self.scope.snapshot);
        let call =
            Box::pin(call::send_request(worker, snapshot, &config.cluster, &head, &content, config.timeout));
        let call = unless_closed(&mut self.exchange, async { Ok(call.await) }).await?;
        let answer = call.and_then(|answer| {
            RateLimitResponse::from_slice(call::grpc_message(&answer)?)
                .map_err(|error| Error::caused(Kind::UpstreamProtocol, error))
        });
        let Some(name) = self.routed_cluster().map(|cluster| cluster.name.clone()) else {
            return Ok(Filtered::Continue);
        };
        let counters = worker.shard.rate_limits(&name);
        match answer.map(|answer| verdict(answer, &descriptors, config)) {
            Ok(verdict) => {
                if verdict.limited { &counters.over_limit } else { &counters.ok }.inc();
                self.apply_limit(config, verdict).await
            }
            Err(error) => {
                counters.error.inc();
                warn!("the rate limit service of cluster {} failed: {error}", config.cluster);
                if !self.is_sampled(config.denied_on_failure) {
                    counters.failure_mode_allowed.inc();
                    return Ok(Filtered::Continue);
                }
                self.outcome.flags.insert(Flags::RLSE);
                self.outcome.details = "rate_limiter_error".into();
                self.local_reply(config.status_on_error, &[], b"").await?;
                Ok(Filtered::Answered)
            }
        }
    }

    async fn apply_limit(
        &mut self,
        config: &GlobalRateLimit,
        mut verdict: LimitVerdict,
    ) -> Result<Filtered, Error> {
        self.decision.filter_results.add_metadata(&config.namespace, &verdict.metadata);
        add_metadata(&mut self.outcome, &config.namespace, std::mem::take(&mut verdict.metadata));
        let is_refused = verdict.limited && self.is_sampled(config.enforced);
        if !is_refused {
            if !verdict.request.is_empty() {
                self.decision.filter_results.keep_head(self.exchange.request);
            }
            for (name, value) in &verdict.request {
                self.exchange.request.append(name, value);
            }
            let fields = verdict.response.into_iter();
            let fields =
                fields.map(|(name, value)| ResponseField { name, value, action: AppendAction::Append });
            self.decision.response_filters_mut().fields.extend(fields);
            return Ok(Filtered::Continue);
        }
        self.outcome.flags.insert(Flags::RL);
        self.outcome.details = "request_rate_limited".into();
        self.begin_local_reply(config.status);
        // The service decides about the type of the content that it sends.
        let is_type = |(name, _): &mut LimitField| &**name == "content-type";
        let content_type = verdict.response.extract_if(.., is_type).last();
        for (name, value) in &verdict.response {
            self.exchange.response.append(name, value);
        }
        self.apply_ops(&config.answer);
        if let Some(seconds) = verdict.wait.filter(|_| config.retry_after && config.status == 429)
            && !self.exchange.response.has("retry-after")
        {
            self.exchange.response.set_number("retry-after", seconds.max(1));
        }
        if config.resource_exhausted && self.decision.grpc {
            self.exchange.response.set("grpc-status", b"8");
        }
        match content_type {
            Some((name, value))
                if !self.decision.grpc
                    && !verdict.body.is_empty()
                    && self.scope.manager.local_replies.is_empty() =>
            {
                self.exchange.response.set(&name, &value);
                self.send_local(&verdict.body).await?;
            }
            _ => self.send_text(&verdict.body).await?,
        }
        Ok(Filtered::Answered)
    }
}

fn request(domain: &str, descriptors: &[Descriptor]) -> RateLimitRequest {
    let descriptor = |descriptor: &Descriptor| RateLimitDescriptor {
        entries: descriptor
            .entries
            .iter()
            .map(|entry| Entry { key: entry.key.to_string(), value: entry.value.to_string() })
            .collect(),
        limit: descriptor.limit.as_ref().and_then(|(requests_per_unit, unit)| {
            let unit = RateLimitUnit::from_str_name(unit)? as i32;
            Some(RateLimitOverride { requests_per_unit: *requests_per_unit, unit })
        }),
        hits_addend: descriptor.hits.map(|value| UInt64Value { value }),
        ..RateLimitDescriptor::default()
    };
    RateLimitRequest {
        domain: domain.to_owned(),
        descriptors: descriptors.iter().map(descriptor).collect(),
        ..RateLimitRequest::default()
    }
}

fn verdict(answer: RateLimitResponse, descriptors: &[Descriptor], config: &GlobalRateLimit) -> LimitVerdict {
    let limited = answer.overall_code() == Code::OverLimit;
    let mut response = fields(answer.response_headers_to_add);
    if limited && config.marked {
        response.push(("x-envoy-ratelimited".into(), b"true".as_slice().into()));
    }
    let reports = |index: usize| descriptors.get(index).and_then(|it| it.report).unwrap_or(config.report);
    let statuses = answer.statuses.iter().enumerate();
    report(statuses.filter(|(index, _)| reports(*index)).map(|(_, status)| status), &mut response);
    let exceeded = answer.statuses.iter().filter(|status| status.code() == Code::OverLimit);
    LimitVerdict {
        limited,
        request: fields(answer.request_headers_to_add),
        response,
        body: answer.raw_body,
        metadata: answer.dynamic_metadata.map(json).unwrap_or_default(),
        wait: exceeded.map(reset).max(),
    }
}

/// Returns header fields of the service, except those that frame or address a message. Names must be tokens. Control
/// characters in values are dropped, because a line feed would begin another field.
fn fields(headers: Vec<HeaderValue>) -> Vec<LimitField> {
    let field = |header: HeaderValue| {
        let name = header.key.to_ascii_lowercase();
        let is_name = !name.is_empty() && name.bytes().all(parse::is_token);
        let is_allowed = is_name && !hop::OWN_FIELDS.contains(&&*name) && name != "host";
        let value = if header.value.is_empty() { header.raw_value } else { header.value.into_bytes() };
        let value = value.into_iter().filter(|byte| !byte.is_ascii_control() || *byte == b'\t').collect();
        is_allowed.then(|| (name.into_boxed_str(), value))
    };
    headers.into_iter().filter_map(field).collect()
}

/// Seconds until a limit is reset.
fn reset(status: &DescriptorStatus) -> u64 {
    status.duration_until_reset.and_then(|time| u64::try_from(time.seconds).ok()).unwrap_or(0)
}

/// Adds `x-ratelimit` headers for the limit with the fewest remaining requests, and the policies of all limits.
fn report<'s>(statuses: impl Iterator<Item = &'s DescriptorStatus>, response: &mut Vec<LimitField>) {
    let mut min: Option<(&DescriptorStatus, u32)> = None;
    let mut policies = String::new();
    for status in statuses {
        let Some(limit) = &status.current_limit else { continue };
        if min.is_none_or(|(min, _)| status.limit_remaining < min.limit_remaining) {
            min = Some((status, limit.requests_per_unit));
        }
        let window = match limit.unit() {
            Unit::Unknown => continue,
            Unit::Second => 1,
            Unit::Minute => 60,
            Unit::Hour => 3_600,
            Unit::Day => 86_400,
            Unit::Week => 7 * 86_400,
            Unit::Month => 30 * 86_400,
            Unit::Year => 365 * 86_400,
        };
        _ = write!(policies, ", {};w={window}", limit.requests_per_unit);
        if !limit.name.is_empty() {
            let name: String = limit.name.chars().filter(|character| !character.is_control()).collect();
            _ = write!(policies, ";name=\"{name}\"");
        }
    }
    if let Some((status, requests)) = min {
        let mut add = |name: &str, value: String| response.push((name.into(), value.into_bytes().into()));
        add("x-ratelimit-limit", format!("{requests}{policies}"));
        add("x-ratelimit-remaining", status.limit_remaining.to_string());
        add("x-ratelimit-reset", reset(status).to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_service_cannot_break_the_framing() {
        let header = |key: &str, value: &str| HeaderValue {
            key: key.to_owned(),
            value: value.to_owned(),
            ..HeaderValue::default()
        };
        let refused = ["Content-Length", "transfer-encoding", "connection", "host", ":path", "a b", ""];
        let refused = refused.map(|name| header(name, "5"));
        let kept = [header("X-Good", "a\r\nx-evil: 1")];
        let found = fields(refused.into_iter().chain(kept).collect());
        assert_eq!(found, [("x-good".into(), b"ax-evil: 1".as_slice().into())]);
    }
}
