//! Translates rate limits that a service decides about. Source: `envoy.extensions.filters.http.ratelimit.v3`.

use std::time::Duration;

use skysail_xds::envoy::pb::envoy::extensions::filters::http::ratelimit::v3::{
    RateLimit as Proto, RateLimitPerRoute, rate_limit::XRateLimitHeadersRfcVersion,
    rate_limit_per_route::VhRateLimitsOptions,
};

use super::{
    At as _, Reject, Result, authorization, authorization::share, duration, jwt, limit::limited_status,
    limit_rules, route, route_filters::status_code,
};
use skysail_policy::config::{
    http::metadata,
    limit::{GlobalRateLimit, HostRules, RouteRateLimit},
};

/// Envoy's default timeout.
const TIMEOUT: Duration = Duration::from_millis(20);
const ALL: u32 = 1_000_000;

/// Translates the HTTP filter.
pub(super) fn translate(proto: &Proto) -> Result<GlobalRateLimit> {
    if proto.domain.is_empty() {
        return Err(Reject::new("must be given").at_field("domain"));
    }
    let service = proto.rate_limit_service.as_ref().and_then(|service| service.grpc_service.as_ref());
    let service = service.ok_or_else(|| Reject::new("must be given"));
    let service = service.and_then(authorization::grpc).at("rate_limit_service.grpc_service")?;
    let stage = limit_rules::stage(proto.stage)?;
    let by_mode = if proto.failure_mode_deny { ALL } else { 0 };
    Ok(GlobalRateLimit {
        domain: proto.domain.as_str().into(),
        stage,
        rules: limit_rules::of_filter(&proto.rate_limits, stage)?,
        internal: match proto.request_type.as_str() {
            "" | "both" => None,
            "internal" => Some(true),
            "external" => Some(false),
            other => {
                let reason = format!("{other:?} is not internal, external or both");
                return Err(Reject::new(reason).at_field("request_type"));
            }
        },
        cluster: service.cluster,
        authority: service.authority,
        metadata: service.metadata,
        timeout: match &proto.timeout {
            Some(time) => jwt::timeout_or_day(duration(time).at("timeout")?),
            None => TIMEOUT,
        },
        enabled: share(proto.filter_enabled.as_ref()).unwrap_or(ALL),
        enforced: share(proto.filter_enforced.as_ref()).unwrap_or(ALL),
        denied_on_failure: share(proto.failure_mode_deny_percent.as_ref()).unwrap_or(by_mode),
        status: limited_status(proto.rate_limited_status.as_ref().map(|status| status.code))
            .at("rate_limited_status.code")?,
        status_on_error: match &proto.status_on_error {
            Some(status) => status_code(status.code.cast_unsigned()).at("status_on_error.code")?,
            None => 500,
        },
        resource_exhausted: proto.rate_limited_as_resource_exhausted,
        report: proto.enable_x_ratelimit_headers() == XRateLimitHeadersRfcVersion::DraftVersion03,
        retry_after: proto.enable_retry_after_header,
        marked: !proto.disable_x_envoy_ratelimited_header,
        answer: route::additions(&proto.response_headers_to_add).at("response_headers_to_add")?,
        namespace: match proto.metadata_namespace.as_str() {
            "" => metadata::RATE_LIMIT,
            name => name,
        }
        .into(),
    })
}

/// Translates a route's settings.
pub(super) fn setting(proto: &RateLimitPerRoute) -> Result<RouteRateLimit> {
    Ok(RouteRateLimit {
        rules: limit_rules::of_filter(&proto.rate_limits, 0)?,
        host_rules: match proto.vh_rate_limits() {
            VhRateLimitsOptions::Override => HostRules::Override,
            VhRateLimitsOptions::Include => HostRules::Include,
            VhRateLimitsOptions::Ignore => HostRules::Ignore,
        },
        domain: Some(proto.domain.as_str()).filter(|domain| !domain.is_empty()).map(Into::into),
    })
}
