//! Translates outlier detection and slow start.

use std::{collections::BTreeSet, ops::Range, sync::Arc, time::Duration};

use skysail_xds::envoy::pb::{
    envoy::config::{
        cluster::v3::{
            Cluster as Proto, OutlierDetection,
            cluster::{LbConfig, SlowStartConfig},
        },
        common::matcher::v3::{
            MatchPredicate,
            match_predicate::{MatchSet, Rule},
        },
    },
    google::protobuf::{Duration as DurationProto, UInt32Value},
};

use super::{At as _, Reject, Result, duration, flag, number, text};
use skysail_policy::{
    config::{
        health::{ConsecutiveLimit, HealthComparison, Outlier, SlowStart},
        text::{HeaderMatch, HeaderTest},
    },
    matching,
};

/// Statuses of responses.
const STATUSES: Range<u16> = 100..600;

/// Translates outlier detection, with Envoy's defaults.
pub(super) fn translate(proto: &OutlierDetection) -> Result<Outlier> {
    let time = |proto: &Option<DurationProto>, field, default| match proto {
        Some(time) => {
            let time = duration(time).at(field)?;
            if time.is_zero() { Err(Reject::new("must be greater than 0").at_field(field)) } else { Ok(time) }
        }
        None => Ok(default),
    };
    let percent = |proto: Option<UInt32Value>, field, default| {
        let percent = number(proto).unwrap_or(default);
        if percent > 100 { Err(Reject::new("must be at most 100").at_field(field)) } else { Ok(percent) }
    };
    let limit = |value, enforcing, field, default| {
        Ok(ConsecutiveLimit {
            number: number(value).unwrap_or(5),
            enforcing: percent(enforcing, field, default)?,
        })
    };
    let base_ejection = time(&proto.base_ejection_time, "base_ejection_time", Duration::from_secs(30))?;
    Ok(Outlier {
        consecutive_5xx: limit(
            proto.consecutive_5xx,
            proto.enforcing_consecutive_5xx,
            "enforcing_consecutive_5xx",
            100,
        )?,
        consecutive_gateway_failure: limit(
            proto.consecutive_gateway_failure,
            proto.enforcing_consecutive_gateway_failure,
            "enforcing_consecutive_gateway_failure",
            0,
        )?,
        consecutive_local_origin_failure: limit(
            proto.consecutive_local_origin_failure,
            proto.enforcing_consecutive_local_origin_failure,
            "enforcing_consecutive_local_origin_failure",
            100,
        )?,
        split: proto.split_external_local_origin_errors,
        interval: time(&proto.interval, "interval", Duration::from_secs(10))?,
        base_ejection,
        max_ejection: time(
            &proto.max_ejection_time,
            "max_ejection_time",
            base_ejection.max(Duration::from_secs(300)),
        )?,
        jitter: match &proto.max_ejection_time_jitter {
            Some(time) => duration(time).at("max_ejection_time_jitter")?,
            None => Duration::ZERO,
        },
        max_percent: percent(proto.max_ejection_percent, "max_ejection_percent", 10)?,
        always_one: flag(proto.always_eject_one_host).unwrap_or(false),
        success_rate: HealthComparison {
            hosts: number(proto.success_rate_minimum_hosts).unwrap_or(5),
            requests: number(proto.success_rate_request_volume).unwrap_or(100),
            threshold: number(proto.success_rate_stdev_factor).unwrap_or(1900),
            enforcing: percent(proto.enforcing_success_rate, "enforcing_success_rate", 100)?,
            enforcing_local: percent(
                proto.enforcing_local_origin_success_rate,
                "enforcing_local_origin_success_rate",
                100,
            )?,
        },
        failure_percentage: HealthComparison {
            hosts: number(proto.failure_percentage_minimum_hosts).unwrap_or(5),
            requests: number(proto.failure_percentage_request_volume).unwrap_or(50),
            threshold: percent(proto.failure_percentage_threshold, "failure_percentage_threshold", 85)?,
            enforcing: percent(proto.enforcing_failure_percentage, "enforcing_failure_percentage", 0)?,
            enforcing_local: percent(
                proto.enforcing_failure_percentage_local_origin,
                "enforcing_failure_percentage_local_origin",
                0,
            )?,
        },
        errors: None,
        state: Arc::default(),
    })
}

/// Translates the predicate of responses that count as errors: the statuses for which it holds.
pub(super) fn errors(proto: &MatchPredicate) -> Result<Box<[u16]>> {
    Ok(statuses(proto)?.into_iter().collect())
}

fn statuses(proto: &MatchPredicate) -> Result<BTreeSet<u16>> {
    let every = || STATUSES.clone().collect::<BTreeSet<u16>>();
    let all = |set: &MatchSet| set.rules.iter().map(statuses).collect::<Result<Vec<_>>>();
    Ok(match &proto.rule {
        Some(Rule::OrMatch(set)) => all(set)?.into_iter().flatten().collect(),
        Some(Rule::AndMatch(set)) => all(set)?.iter().fold(every(), |both, set| &both & set),
        Some(Rule::NotMatch(inner)) => &every() - &statuses(inner)?,
        Some(Rule::AnyMatch(_)) => every(),
        Some(Rule::HttpResponseHeadersMatch(of)) => {
            let tests = text::headers(&of.headers)?;
            if tests.iter().any(|test| &*test.name != ":status") {
                return Err(Reject::new("only the header :status is supported"));
            }
            STATUSES.clone().filter(|status| tests.iter().all(|test| has_status(test, *status))).collect()
        }
        _ => {
            return Err(Reject::new("only http_response_headers_match and combinations of it are supported"));
        }
    })
}

fn has_status(test: &HeaderMatch, status: u16) -> bool {
    let matches = match &test.test {
        HeaderTest::Present(present) => *present,
        HeaderTest::Value(value) => matching::text(value, status.to_string().as_bytes()),
        HeaderTest::Range(start, end) => (*start..*end).contains(&i64::from(status)),
    };
    matches != test.invert
}

/// Translates slow start of new endpoints.
pub(super) fn slow_start(proto: &Proto) -> Result<Option<SlowStart>> {
    let (config, field) = match &proto.lb_config {
        Some(LbConfig::RoundRobinLbConfig(config)) => (&config.slow_start_config, "round_robin_lb_config"),
        Some(LbConfig::LeastRequestLbConfig(config)) => {
            (&config.slow_start_config, "least_request_lb_config")
        }
        _ => return Ok(None),
    };
    match config {
        Some(config) => one(config).at("slow_start_config").at(field),
        None => Ok(None),
    }
}

fn one(config: &SlowStartConfig) -> Result<Option<SlowStart>> {
    let window = match &config.slow_start_window {
        Some(window) => duration(window).at("slow_start_window")?,
        None => Duration::ZERO,
    };
    let aggression = config.aggression.as_ref().map_or(1.0, |aggression| aggression.default_value);
    if aggression.is_nan() || aggression <= 0.0 {
        return Err(Reject::new("must be greater than 0").at_field("aggression"));
    }
    let min = config.min_weight_percent.map_or(10.0, |percent| percent.value);
    if !(0.0..=100.0).contains(&min) {
        return Err(Reject::new("must be from 0 to 100").at_field("min_weight_percent"));
    }
    // With weight 0 an endpoint would never be selected.
    let min = (min / 100.0).max(0.0001);
    Ok((!window.is_zero()).then_some(SlowStart { window, aggression, min }))
}
