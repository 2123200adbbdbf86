//! Translates local rate limits.

use std::collections::HashSet;

use skysail_xds::envoy::pb::envoy::{
    extensions::{
        common::ratelimit::v3::{
            LocalRateLimitDescriptor, VhRateLimitsOptions, XRateLimitHeadersRfcVersion, rate_limit_descriptor,
        },
        filters::http::local_ratelimit::v3::LocalRateLimit,
    },
    r#type::v3::TokenBucket as BucketProto,
};

use super::{
    At as _, Reject, Result, authorization::share, duration, flag, limit_rules, number, route,
    route_filters::status_code,
};
use skysail_policy::{
    config::limit::{HostRules, RateLimit},
    state::rate_limit::{BucketSettings, Buckets, BucketsSettings, DescriptorSettings, Entry},
};

/// Envoy's default for `max_dynamic_descriptors`.
const DEFAULT_DYNAMIC_DESCRIPTORS: u32 = 20;
/// Maximum number of buckets of a descriptor with wildcards. Each takes about 200 bytes.
const MAX_DYNAMIC_DESCRIPTORS: u32 = 1 << 20;

/// Translates the HTTP filter or a route's override of it.
pub(super) fn translate(proto: &LocalRateLimit) -> Result<RateLimit> {
    let settings = BucketsSettings {
        default: proto.token_bucket.as_ref().map(bucket).transpose().at("token_bucket")?,
        descriptors: descriptors(&proto.descriptors)?,
        max_dynamic_descriptors: match number(proto.max_dynamic_descriptors)
            .unwrap_or(DEFAULT_DYNAMIC_DESCRIPTORS)
        {
            max @ 1..=MAX_DYNAMIC_DESCRIPTORS => max as usize,
            max => {
                return Err(Reject::new(format!("{max} is not between 1 and {MAX_DYNAMIC_DESCRIPTORS}"))
                    .at_field("max_dynamic_descriptors"));
            }
        },
    };
    let per_connection = proto.local_rate_limit_per_downstream_connection;
    let is_wild = |descriptor: &DescriptorSettings| descriptor.entries.iter().any(|it| it.value.is_empty());
    if per_connection && settings.descriptors.iter().any(is_wild) {
        return Err(Reject::new("excludes descriptors without a value, as in Envoy")
            .at_field("local_rate_limit_per_downstream_connection"));
    }
    let stage = limit_rules::stage(proto.stage)?;
    Ok(RateLimit {
        stat_prefix: proto.stat_prefix.as_str().into(),
        buckets: (!per_connection).then(|| Buckets::new(&settings)),
        settings,
        rules: limit_rules::of_filter(&proto.rate_limits, stage)?,
        stage,
        host_rules: match proto.vh_rate_limits() {
            VhRateLimitsOptions::Override => HostRules::Override,
            VhRateLimitsOptions::Include => HostRules::Include,
            VhRateLimitsOptions::Ignore => HostRules::Ignore,
        },
        always_take_default: flag(proto.always_consume_default_token_bucket).unwrap_or(true),
        status: limited_status(proto.status.as_ref().map(|status| status.code)).at("status.code")?,
        enabled: share(proto.filter_enabled.as_ref()).unwrap_or(0),
        enforced: share(proto.filter_enforced.as_ref()).unwrap_or(0),
        resource_exhausted: proto.rate_limited_as_resource_exhausted,
        report: proto.enable_x_ratelimit_headers() == XRateLimitHeadersRfcVersion::DraftVersion03,
        retry_after: proto.enable_retry_after_header,
        answer: route::additions(&proto.response_headers_to_add).at("response_headers_to_add")?,
        unenforced: route::additions(&proto.request_headers_to_add_when_not_enforced)
            .at("request_headers_to_add_when_not_enforced")?,
    })
}

/// Returns the status of a refusal. As in Envoy, a status below 400 becomes 429.
pub(super) fn limited_status(code: Option<i32>) -> Result<u16> {
    match code.map_or(429, i32::cast_unsigned) {
        ..400 => Ok(429),
        status => status_code(status),
    }
}

fn descriptors(protos: &[LocalRateLimitDescriptor]) -> Result<Vec<DescriptorSettings>> {
    let indexed = protos.iter().enumerate();
    let all: Vec<_> = indexed
        .map(|(index, proto)| descriptor(proto).at(format_args!("descriptors[{index}]")))
        .collect::<Result<_>>()?;
    let mut known = HashSet::new();
    if !all.iter().all(|descriptor| known.insert(&descriptor.entries)) {
        return Err(Reject::new("two descriptors have the same entries").at_field("descriptors"));
    }
    Ok(all)
}

fn descriptor(proto: &LocalRateLimitDescriptor) -> Result<DescriptorSettings> {
    let entry = |proto: &rate_limit_descriptor::Entry| Entry {
        key: proto.key.as_str().into(),
        value: proto.value.as_str().into(),
    };
    if proto.entries.is_empty() {
        return Err(Reject::new("must not be empty").at_field("entries"));
    }
    let tokens = proto.token_bucket.as_ref().ok_or_else(|| Reject::new("must be given"));
    Ok(DescriptorSettings {
        entries: proto.entries.iter().map(entry).collect(),
        bucket: tokens.and_then(bucket).at("token_bucket")?,
        shadow: proto.shadow_mode,
    })
}

fn bucket(proto: &BucketProto) -> Result<BucketSettings> {
    let interval = proto.fill_interval.as_ref().ok_or_else(|| Reject::new("must be given"));
    let interval = interval.and_then(duration).at("fill_interval")?;
    if interval.as_millis() < 50 {
        return Err(Reject::new("must be at least 50 ms, as in Envoy").at_field("fill_interval"));
    }
    Ok(BucketSettings {
        max_tokens: proto.max_tokens,
        fill: number(proto.tokens_per_fill).unwrap_or(1),
        interval,
    })
}
