//! Retries of requests.

use skysail_xds::envoy::pb::envoy::extensions::retry::{
    host::previous_hosts::v3::PreviousHostsPredicate,
    priority::previous_priorities::v3::PreviousPrioritiesConfig,
};

use crate::{
    api::{MeshConfig, virtual_service::HttpRetry},
    compile::pb::{duration, pack, route, uint32},
};

use route::retry_policy::{
    RetryBackOff, RetryHostPredicate, RetryPriority, retry_host_predicate, retry_priority,
};

/// Default retry conditions: failures in which the application cannot have received the request.
const DEFAULT_RETRY_ON: &str = "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes";
const DEFAULT_RETRIES: u32 = 2;
/// Number of attempts to select another host before a failed one is used again.
const HOST_SELECTION_ATTEMPTS: i64 = 5;
/// Number of failures after which another locality is tried.
const PRIORITY_UPDATE_FREQUENCY: i32 = 2;

/// Returns the retry policy of a route. Without settings it is the mesh's default; `None` if retries are disabled.
pub(super) fn policy(mesh: &MeshConfig, of_route: Option<&HttpRetry>) -> Option<route::RetryPolicy> {
    let mut policy = route::RetryPolicy {
        retry_on: DEFAULT_RETRY_ON.into(),
        num_retries: uint32(DEFAULT_RETRIES),
        retry_host_predicate: vec![other_hosts()],
        host_selection_retry_max_attempts: HOST_SELECTION_ATTEMPTS,
        ..Default::default()
    };
    let Some(retries) = of_route.or(mesh.default_http_retry_policy.as_ref()) else { return Some(policy) };
    let attempts = u32::try_from(retries.attempts).ok().filter(|attempts| *attempts > 0)?;
    policy.num_retries = uint32(attempts);
    if !retries.retry_on.is_empty() {
        (policy.retry_on, policy.retriable_status_codes) = conditions(&retries.retry_on);
    }
    policy.per_try_timeout = retries.per_try_timeout.map(|length| duration(length.0));
    if retries.retry_ignore_previous_hosts == Some(false) {
        policy.retry_host_predicate.clear();
        policy.host_selection_retry_max_attempts = 0;
    }
    if retries.retry_remote_localities == Some(true) {
        policy.retry_priority = Some(other_localities());
    }
    policy.retry_back_off = retries
        .backoff
        .map(|length| RetryBackOff { base_interval: Some(duration(length.0)), ..Default::default() });
    Some(policy)
}

/// Separates Envoy's conditions from HTTP status codes.
fn conditions(retry_on: &str) -> (String, Vec<u32>) {
    const BY_STATUS: &str = "retriable-status-codes";
    let (mut conditions, mut codes) = (Vec::new(), Vec::new());
    for part in retry_on.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.parse::<u32>() {
            Ok(code) => codes.push(code),
            Err(_) => conditions.push(part),
        }
    }
    if !codes.is_empty() && !conditions.contains(&BY_STATUS) {
        conditions.push(BY_STATUS);
    }
    (conditions.join(","), codes)
}

fn other_hosts() -> RetryHostPredicate {
    RetryHostPredicate {
        name: "envoy.retry_host_predicates.previous_hosts".into(),
        config_type: Some(retry_host_predicate::ConfigType::TypedConfig(pack(
            &PreviousHostsPredicate::default(),
        ))),
    }
}

fn other_localities() -> RetryPriority {
    let config = PreviousPrioritiesConfig { update_frequency: PRIORITY_UPDATE_FREQUENCY };
    RetryPriority {
        name: "envoy.retry_priorities.previous_priorities".into(),
        config_type: Some(retry_priority::ConfigType::TypedConfig(pack(&config))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy_of(text: &str) -> Option<route::RetryPolicy> {
        policy(&MeshConfig::default(), Some(&serde_json::from_str(text).unwrap()))
    }

    #[test]
    fn status_codes_become_a_condition() {
        let made = policy_of(r#"{"attempts": 3, "retryOn": "reset, 503,429"}"#).unwrap();
        assert_eq!(made.retry_on, "reset,retriable-status-codes");
        assert_eq!(made.retriable_status_codes, [503, 429]);
        assert_eq!(made.num_retries, uint32(3));
    }

    #[test]
    fn no_attempts_mean_no_policy() {
        assert_eq!(policy_of(r#"{"attempts": 0}"#), None);
        assert_eq!(policy(&MeshConfig::default(), None).unwrap().num_retries, uint32(2));
    }
}
