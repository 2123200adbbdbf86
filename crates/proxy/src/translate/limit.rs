//! Translates local rate limits.

use std::sync::Arc;

use skysail_xds::envoy::pb::envoy::{
    extensions::filters::http::local_ratelimit::v3::LocalRateLimit, r#type::v3::TokenBucket as BucketProto,
};

use super::{
    At as _, Reject, Result, authorization::share, duration, number, route, route_filters::status_code,
};
use skysail_policy::{config::limit::RateLimit, state::rate_limit::TokenBucket};

/// Translates the HTTP filter or a route's override of it.
pub(super) fn translate(proto: &LocalRateLimit) -> Result<RateLimit> {
    if proto.local_rate_limit_per_downstream_connection {
        return Err(Reject::new("a limit per connection is not supported")
            .at_field("local_rate_limit_per_downstream_connection"));
    }
    let status = proto.status.as_ref().map_or(429, |status| status.code.cast_unsigned());
    Ok(RateLimit {
        bucket: proto.token_bucket.as_ref().map(bucket).transpose().at("token_bucket")?.map(Arc::new),
        // As in Envoy, a status below 400 becomes 429.
        status: if status < 400 { 429 } else { status_code(status).at("status.code")? },
        enabled: share(proto.filter_enabled.as_ref()).unwrap_or(0),
        enforced: share(proto.filter_enforced.as_ref()).unwrap_or(0),
        resource_exhausted: proto.rate_limited_as_resource_exhausted,
        answer: route::additions(&proto.response_headers_to_add).at("response_headers_to_add")?,
        unenforced: route::additions(&proto.request_headers_to_add_when_not_enforced)
            .at("request_headers_to_add_when_not_enforced")?,
    })
}

fn bucket(proto: &BucketProto) -> Result<TokenBucket> {
    if proto.max_tokens == 0 {
        return Err(Reject::new("must be at least 1").at_field("max_tokens"));
    }
    let interval = proto.fill_interval.as_ref().ok_or_else(|| Reject::new("must be given"));
    let interval = interval.and_then(duration).at("fill_interval")?;
    if interval.as_millis() < 50 {
        return Err(Reject::new("must be at least 50 ms, as in Envoy").at_field("fill_interval"));
    }
    Ok(TokenBucket::new(proto.max_tokens, number(proto.tokens_per_fill).unwrap_or(1), interval))
}
