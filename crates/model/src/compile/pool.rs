//! Connection limits and outlier detection: `connectionPool` and `outlierDetection` of a DestinationRule.

use skysail_xds::envoy::pb::envoy::config::common::matcher::v3::{
    HttpHeadersMatch, MatchPredicate,
    match_predicate::{MatchSet, Rule},
};

use super::pb::{cluster, core, duration, matcher, matching, route, types, uint32};
use crate::api::{
    MeshConfig,
    destination_rule::{
        ConnectionPool, H2Upgrade, HttpPool, OutlierDetection, RetryBudget, TcpKeepalive, TcpPool,
    },
};

use cluster::{
    CircuitBreakers,
    circuit_breakers::{Thresholds, thresholds},
};

/// Returns circuit breakers without limits, as Istio sets them. Envoy's defaults are 1,024, and 3 for retries.
pub(super) fn unlimited() -> CircuitBreakers {
    CircuitBreakers {
        thresholds: vec![Thresholds {
            max_connections: uint32(u32::MAX),
            max_pending_requests: uint32(u32::MAX),
            max_requests: uint32(u32::MAX),
            max_retries: uint32(u32::MAX),
            ..Default::default()
        }],
        ..Default::default()
    }
}

/// Sets the limits, connect timeout and keep-alive of a cluster.
pub(super) fn apply(made: &mut cluster::Cluster, mesh: &MeshConfig, pool: Option<&ConnectionPool>) {
    let (tcp, http) = parts(pool);
    if let Some(timeout) = tcp.and_then(|tcp| tcp.connect_timeout).or(mesh.connect_timeout) {
        made.connect_timeout = Some(duration(timeout.0));
    }
    let keepalive = tcp.and_then(|tcp| tcp.tcp_keepalive.as_ref()).or(mesh.tcp_keepalive.as_ref());
    if let Some(keepalive) = keepalive {
        made.upstream_connection_options = Some(cluster::UpstreamConnectionOptions {
            tcp_keepalive: Some(kernel_keepalive(keepalive)),
            ..Default::default()
        });
    }
    let Some(limits) = made.circuit_breakers.as_mut().and_then(|breakers| breakers.thresholds.first_mut())
    else {
        return;
    };
    if let Some(tcp) = tcp {
        limit(&mut limits.max_connections, tcp.max_connections);
    }
    if let Some(http) = http {
        limit(&mut limits.max_pending_requests, http.http1_max_pending_requests);
        limit(&mut limits.max_requests, http.http2_max_requests);
        limit(&mut limits.max_retries, http.max_retries);
    }
}

/// Limits retries to a share of the requests.
pub(super) fn apply_retry_budget(made: &mut cluster::Cluster, from: &RetryBudget) {
    let breakers = made.circuit_breakers.as_mut();
    if let Some(limits) = breakers.and_then(|breakers| breakers.thresholds.first_mut()) {
        limits.retry_budget = Some(thresholds::RetryBudget {
            budget_percent: from.percent.map(|value| types::Percent { value }),
            min_retry_concurrency: Some(from.min_retry_concurrency).filter(|min| *min > 0).and_then(uint32),
            budget_interval: from.budget_interval.map(|length| duration(length.0)),
        });
    }
}

/// Sets the outlier detection of a cluster.
pub(super) fn apply_outlier_detection(made: &mut cluster::Cluster, from: &OutlierDetection) {
    let percent = |value: i32| u32::try_from(value).ok().filter(|value| *value > 0).and_then(uint32);
    let mut detection = cluster::OutlierDetection {
        interval: from.interval.map(|length| duration(length.0)),
        base_ejection_time: from.base_ejection_time.map(|length| duration(length.0)),
        max_ejection_percent: percent(from.max_ejection_percent),
        enforcing_success_rate: uint32(0),
        ..Default::default()
    };
    let enforcing = |errors: u32| uint32(if errors > 0 { 100 } else { 0 });
    if let Some(errors) = from.consecutive_5xx_errors {
        detection.consecutive_5xx = uint32(errors);
        detection.enforcing_consecutive_5xx = enforcing(errors);
    }
    if let Some(errors) = from.consecutive_gateway_errors {
        detection.consecutive_gateway_failure = uint32(errors);
        detection.enforcing_consecutive_gateway_failure = enforcing(errors);
    }
    if from.split_external_local_origin_errors {
        detection.split_external_local_origin_errors = true;
        if let Some(errors) = from.consecutive_local_origin_failures.filter(|errors| *errors > 0) {
            detection.consecutive_local_origin_failure = uint32(errors);
            detection.enforcing_consecutive_local_origin_failure = uint32(100);
        }
        detection.enforcing_local_origin_success_rate = uint32(0);
    }
    made.outlier_detection = Some(detection);
    if let Some(common) = &mut made.common_lb_config {
        let healthy = f64::from(from.min_health_percent.clamp(0, 100));
        common.healthy_panic_threshold = Some(types::Percent { value: healthy });
    }
}

/// Returns the predicate of the responses that count as errors; `None` for the default, status 500 and above.
pub(super) fn error_codes(from: &OutlierDetection) -> Option<MatchPredicate> {
    let rule = |code: &u32| {
        let exact = matcher::string_matcher::MatchPattern::Exact(code.to_string());
        let status = route::HeaderMatcher {
            name: ":status".to_owned(),
            header_match_specifier: Some(route::header_matcher::HeaderMatchSpecifier::StringMatch(matching(
                exact,
            ))),
            ..Default::default()
        };
        let headers = HttpHeadersMatch { headers: vec![status] };
        MatchPredicate { rule: Some(Rule::HttpResponseHeadersMatch(headers)) }
    };
    let mut rules: Vec<MatchPredicate> = from.outlier_detection_http_error_codes.iter().map(rule).collect();
    match rules.len() {
        0 | 1 => rules.pop(),
        _ => Some(MatchPredicate { rule: Some(Rule::OrMatch(MatchSet { rules })) }),
    }
}

/// Returns the timeouts and limits of each connection; `None` if there are none.
pub(super) fn common_options(pool: Option<&ConnectionPool>) -> Option<core::HttpProtocolOptions> {
    let (tcp, http) = parts(pool);
    let idle = http.and_then(|http| http.idle_timeout).or(tcp.and_then(|tcp| tcp.idle_timeout));
    let longest = tcp.and_then(|tcp| tcp.max_connection_duration);
    let requests = http.and_then(|http| positive(http.max_requests_per_connection));
    let options = core::HttpProtocolOptions {
        idle_timeout: idle.map(|length| duration(length.0)),
        max_connection_duration: longest.map(|length| duration(length.0)),
        max_requests_per_connection: requests.and_then(uint32),
        ..Default::default()
    };
    (options != core::HttpProtocolOptions::default()).then_some(options)
}

/// Returns the settings of HTTP/2 connections.
pub(super) fn http2(pool: Option<&ConnectionPool>) -> core::Http2ProtocolOptions {
    let http = parts(pool).1;
    let keepalive = http.and_then(|http| http.http2_keep_alive.as_ref());
    core::Http2ProtocolOptions {
        max_concurrent_streams: http.and_then(|http| positive(http.max_concurrent_streams)).and_then(uint32),
        connection_keepalive: keepalive.map(|keepalive| core::KeepaliveSettings {
            interval: keepalive.interval.map(|length| duration(length.0)),
            timeout: keepalive.timeout.map(|length| duration(length.0)),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Returns whether HTTP/1.1 requests are sent as HTTP/2; `default` is the setting of the mesh.
pub(super) fn upgrades(pool: Option<&ConnectionPool>, default: bool) -> bool {
    let Some(http) = parts(pool).1 else { return default };
    match http.h2_upgrade_policy {
        _ if http.use_client_protocol => false,
        Some(H2Upgrade::Upgrade) => true,
        Some(H2Upgrade::DoNotUpgrade) => false,
        _ => default,
    }
}

/// Returns whether requests are sent to endpoints with the HTTP version that the client uses.
pub(super) fn uses_client_protocol(pool: Option<&ConnectionPool>) -> bool {
    parts(pool).1.is_some_and(|http| http.use_client_protocol)
}

fn parts(pool: Option<&ConnectionPool>) -> (Option<&TcpPool>, Option<&HttpPool>) {
    (pool.and_then(|pool| pool.tcp.as_ref()), pool.and_then(|pool| pool.http.as_ref()))
}

fn kernel_keepalive(from: &TcpKeepalive) -> core::TcpKeepalive {
    let whole = |length: crate::api::Duration| u32::try_from(length.0.as_secs()).unwrap_or(u32::MAX);
    core::TcpKeepalive {
        keepalive_probes: Some(from.probes).filter(|probes| *probes > 0).and_then(uint32),
        keepalive_time: from.time.map(whole).and_then(uint32),
        keepalive_interval: from.interval.map(whole).and_then(uint32),
    }
}

fn limit(field: &mut Option<super::pb::UInt32Value>, value: i32) {
    if let Some(value) = positive(value) {
        *field = uint32(value);
    }
}

/// Returns a positive number; 0 means unset.
fn positive(value: i32) -> Option<u32> {
    u32::try_from(value).ok().filter(|value| *value > 0)
}
