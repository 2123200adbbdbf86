//! Retries: the policy of the route, and the overrides in request headers.
//!
//! Internal clients may set retries and timeouts by header; `headers::receive` has removed these headers from requests
//! of external clients. Source: Envoy's router filter.

use std::time::Duration;

use crate::{
    config::{
        route::{RetryOn, RetryPolicy},
        text::{HeaderMatch, HeaderTest},
    },
    error::{Error, Kind},
    matching,
};
use skysail_http::head::{Names, RequestHead, ResponseHead};

/// Headers that are removed from every request.
const FIELDS: [&str; 10] = [
    "x-envoy-retry-on",
    "x-envoy-retry-grpc-on",
    "x-envoy-max-retries",
    "x-envoy-retriable-status-codes",
    "x-envoy-retriable-header-names",
    "x-envoy-hedge-on-per-try-timeout",
    "x-envoy-upstream-rq-timeout-ms",
    "x-envoy-upstream-rq-per-try-timeout-ms",
    "x-envoy-upstream-rq-timeout-alt-response",
    "x-envoy-upstream-alt-stat-name",
];

/// Retry policy and timeouts of a request, including its overrides.
#[derive(Debug)]
pub struct AttemptPolicy<'a> {
    /// Policy of the route; `None` if the request overrides it or may not be retried.
    policy: Option<&'a RetryPolicy>,
    own: Option<Box<RetryPolicy>>,
    /// Timeout of the response; `None` disables it.
    pub timeout: Option<Duration>,
    /// Timeout of each attempt; `None`: only that of the response applies.
    pub try_timeout: Option<Duration>,
}

/// Reads and removes the overrides in a request's headers. `policy` and `timeout` are those of the route.
pub fn overrides<'a>(
    head: &mut RequestHead,
    policy: Option<&'a RetryPolicy>,
    timeout: Option<Duration>,
) -> AttemptPolicy<'a> {
    let mut attempt = AttemptPolicy {
        policy,
        own: None,
        timeout,
        try_timeout: policy.and_then(|policy| policy.per_try_timeout),
    };
    if head.may_have(Names::ENVOY) {
        read(head, &mut attempt);
        head.remove_any(&FIELDS, Names::ENVOY);
    }
    if attempt.retry().is_some_and(|retry| !is_for(retry, head)) {
        (attempt.policy, attempt.own) = (None, None);
    }
    if attempt.timeout.is_some_and(|all| attempt.try_timeout.is_some_and(|one| one >= all)) {
        attempt.try_timeout = None;
    }
    attempt
}

impl AttemptPolicy<'_> {
    /// Returns the retry policy; `None` for no retries.
    pub fn retry(&self) -> Option<&RetryPolicy> {
        self.own.as_deref().or(self.policy)
    }
}

/// Returns whether a policy applies to this request and has any condition.
fn is_for(retry: &RetryPolicy, head: &RequestHead) -> bool {
    let mut tests = retry.requests.iter();
    let is_meant = tests.len() == 0 || tests.any(|test| matching::header(test, head));
    is_meant && retry.on != RetryOn::default()
}

fn read(head: &RequestHead, attempt: &mut AttemptPolicy<'_>) {
    let field = |name: &str| head.header(name).and_then(|value| std::str::from_utf8(value).ok());
    let list = |name: &str| field(name).into_iter().flat_map(|value| value.split(',')).map(str::trim);
    let number = |name: &str| field(name).and_then(|value| value.trim().parse::<u32>().ok());
    let time = |name: &str| number(name).map(|ms| Duration::from_millis(ms.into()));
    let any = |time: Duration| (!time.is_zero()).then_some(time);
    if let Some(timeout) = time("x-envoy-upstream-rq-timeout-ms") {
        attempt.timeout = any(timeout);
    }
    if let Some(timeout) = time("x-envoy-upstream-rq-per-try-timeout-ms") {
        attempt.try_timeout = any(timeout);
    }
    if attempt.policy.is_none() && !head.has("x-envoy-retry-on") && !head.has("x-envoy-retry-grpc-on") {
        return;
    }
    let retry = attempt.own.insert(attempt.policy.map(|policy| Box::new(policy.clone())).unwrap_or_default());
    // Unknown conditions are ignored.
    for word in list("x-envoy-retry-on") {
        retry.on.set(word);
    }
    for word in list("x-envoy-retry-grpc-on") {
        retry.on.set_grpc(word);
    }
    if let Some(retries) = number("x-envoy-max-retries") {
        retry.retries = retries;
    }
    retry.statuses.extend(list("x-envoy-retriable-status-codes").filter_map(|code| code.parse::<u16>().ok()));
    retry.answers.extend(list("x-envoy-retriable-header-names").filter(|name| !name.is_empty()).map(
        |name| HeaderMatch {
            name: name.to_ascii_lowercase().into(),
            test: HeaderTest::Present(true),
            invert: false,
            missing_as_empty: false,
        },
    ));
}

/// Result of an attempt.
#[derive(Clone, Copy, Debug)]
pub enum AttemptResult<'a> {
    /// The attempt failed.
    Failed {
        /// Error of the attempt.
        error: &'a Error,
        /// A part of the request had been sent.
        request_sent: bool,
    },
    /// The upstream responded.
    Answered(&'a ResponseHead),
}

/// Returns whether the policy retries this result. The caller checks the number of retries, and whether the body can
/// be sent again.
pub fn should_retry(policy: &RetryPolicy, outcome: AttemptResult<'_>) -> bool {
    match outcome {
        AttemptResult::Failed { error, request_sent } => {
            error.may_retry() && retry_reset(policy.on, &error.kind, request_sent)
        }
        // A rate limit would be reached again, unless the policy says otherwise.
        AttemptResult::Answered(head) if head.has("x-envoy-ratelimited") => policy.on.envoy_ratelimited,
        AttemptResult::Answered(head) => retry_answer(policy, head),
    }
}

fn retry_reset(on: RetryOn, kind: &Kind, request_sent: bool) -> bool {
    on.reset
        || on.server_error
        || on.gateway_error
        || (on.reset_before_request && !request_sent)
        || (on.connect_failure && matches!(kind, Kind::ConnectFailed | Kind::ConnectTimeout))
        || (on.refused_stream && *kind == Kind::UpstreamRefused)
}

fn retry_answer(policy: &RetryPolicy, head: &ResponseHead) -> bool {
    let (on, status) = (policy.on, head.status());
    let by_status = (on.server_error && status >= 500)
        || (on.gateway_error && matches!(status, 502..=504))
        || (on.retriable_4xx && status == 409)
        || (on.retriable_status_codes && policy.statuses.contains(&status));
    by_status
        || (on.retriable_headers && policy.answers.iter().any(|test| matching::response_header(test, head)))
        || match head.header("grpc-status") {
            Some(b"1") => on.grpc_cancelled,
            Some(b"4") => on.grpc_deadline_exceeded,
            Some(b"8") => on.grpc_resource_exhausted,
            Some(b"13") => on.grpc_internal,
            Some(b"14") => on.grpc_unavailable,
            _ => false,
        }
}

/// Returns the backoff after a number of attempts: full jitter over an interval that doubles.
pub fn backoff(policy: &RetryPolicy, tries: u32, rng: &mut fastrand::Rng) -> Duration {
    let doubled = policy.backoff_base.saturating_mul(1 << tries.saturating_sub(1).min(16));
    let max = u64::try_from(doubled.min(policy.backoff_max).as_micros()).unwrap_or(u64::MAX);
    Duration::from_micros(rng.u64(..=max))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(
        policy: Option<&RetryPolicy>,
        fields: &[(&str, &str)],
    ) -> (Option<RetryPolicy>, [Option<u64>; 2]) {
        let mut head = RequestHead::build("GET", "/", "a", fields);
        let attempt = overrides(&mut head, policy, Some(Duration::from_millis(100)));
        assert!(!head.iter().any(|(name, _)| name.starts_with(b"x-envoy-")));
        let ms = |time: Option<Duration>| time.map(|time| time.as_millis() as u64);
        (attempt.retry().cloned(), [ms(attempt.timeout), ms(attempt.try_timeout)])
    }

    #[test]
    fn headers_extend_the_policy_of_the_route() {
        let mut policy = RetryPolicy { retries: 2, ..RetryPolicy::default() };
        policy.on.set("reset");
        let fields = [
            ("x-envoy-retry-on", "5xx, unknown,cancelled"),
            ("x-envoy-retry-grpc-on", "unavailable"),
            ("x-envoy-max-retries", "7"),
            ("x-envoy-retriable-status-codes", "404,no"),
            ("x-envoy-retriable-header-names", "X-Again"),
        ];
        let retry = taken(Some(&policy), &fields).0.unwrap();
        let on = RetryOn { reset: true, server_error: true, grpc_unavailable: true, ..RetryOn::default() };
        assert_eq!((retry.on, retry.retries, retry.statuses), (on, 7, vec![404]));
        assert_eq!(&*retry.answers[0].name, "x-again");
        assert_eq!(taken(None, &fields[..1]).0.unwrap().retries, 1);
        assert!(taken(None, &fields[2..]).0.is_none());
        assert!(taken(None, &[("x-envoy-retry-on", "unknown")]).0.is_none());
    }

    #[test]
    fn only_matching_requests_are_retried() {
        let mut policy = RetryPolicy::default();
        policy.on.set("5xx");
        let test = HeaderTest::Present(true);
        policy.requests =
            vec![HeaderMatch { name: "x-a".into(), test, invert: false, missing_as_empty: false }];
        assert!(taken(Some(&policy), &[]).0.is_none());
        assert!(taken(Some(&policy), &[("x-a", "")]).0.is_some());
    }

    #[test]
    fn the_timeout_of_an_attempt_is_below_that_of_the_request() {
        let (all, one) = ("x-envoy-upstream-rq-timeout-ms", "x-envoy-upstream-rq-per-try-timeout-ms");
        let cases: [(&[(&str, &str)], _); 5] = [
            (&[], [Some(100), None]),
            (&[(all, "50"), (one, "20")], [Some(50), Some(20)]),
            (&[(one, "100")], [Some(100), None]),
            (&[(all, "0"), (one, "500")], [None, Some(500)]),
            (&[(all, "no")], [Some(100), None]),
        ];
        for (fields, times) in cases {
            assert_eq!(taken(None, fields).1, times, "{fields:?}");
        }
    }

    #[test]
    fn retries_follow_the_conditions_of_the_policy() {
        let failed = |kind, request_sent| (Error::new(kind), request_sent);
        let on = |set: fn(&mut RetryOn)| {
            let mut on = RetryOn::default();
            set(&mut on);
            policy(on)
        };
        let cases: [(RetryPolicy, (Error, bool), bool); 10] = [
            (on(|on| on.connect_failure = true), failed(Kind::ConnectFailed, false), true),
            (on(|on| on.connect_failure = true), failed(Kind::UpstreamClosed, true), false),
            (on(|on| on.reset = true), failed(Kind::UpstreamClosed, true), true),
            (on(|on| on.reset_before_request = true), failed(Kind::UpstreamClosed, true), false),
            (on(|on| on.reset_before_request = true), failed(Kind::UpstreamClosed, false), true),
            (on(|on| on.refused_stream = true), failed(Kind::UpstreamRefused, true), true),
            (on(|on| on.gateway_error = true), failed(Kind::TryTimeout, true), true),
            (on(|on| on.server_error = true), failed(Kind::ResponseTimeout, true), false),
            (on(|on| on.server_error = true), failed(Kind::Overflow, false), false),
            (on(|_| ()), failed(Kind::ConnectFailed, false), false),
        ];
        for (policy, (error, request_sent), expected) in cases {
            let outcome = AttemptResult::Failed { error: &error, request_sent };
            assert_eq!(should_retry(&policy, outcome), expected, "{error} {:?}", policy.on);
        }
    }

    #[test]
    fn responses_are_retried_by_status_and_grpc_status() {
        let mut policy = policy(RetryOn {
            gateway_error: true,
            retriable_status_codes: true,
            grpc_unavailable: true,
            ..RetryOn::default()
        });
        policy.statuses = vec![418];
        let cases = [
            (ResponseHead::build(503, &[]), true),
            (ResponseHead::build(500, &[]), false),
            (ResponseHead::build(418, &[]), true),
            (ResponseHead::build(200, &[("grpc-status", "14")]), true),
            (ResponseHead::build(200, &[("grpc-status", "1")]), false),
            (ResponseHead::build(503, &[("x-envoy-overloaded", "true")]), true),
            (ResponseHead::build(503, &[("x-envoy-ratelimited", "true")]), false),
        ];
        for (head, expected) in cases {
            assert_eq!(should_retry(&policy, AttemptResult::Answered(&head)), expected, "{head:?}");
        }
    }

    #[test]
    fn the_backoff_doubles_up_to_the_limit() {
        let ms = Duration::from_millis;
        let policy = RetryPolicy { backoff_base: ms(10), backoff_max: ms(45), ..policy(RetryOn::default()) };
        let mut rng = fastrand::Rng::with_seed(5);
        for (tries, max) in [(1, 10), (2, 20), (3, 40), (4, 45), (5, 45), (40, 45), (u32::MAX, 45)] {
            let waits: Vec<_> = (0..1000).map(|_| backoff(&policy, tries, &mut rng)).collect();
            let (min, longest) = (waits.iter().min().unwrap(), waits.iter().max().unwrap());
            // The whole interval is used, and nothing beyond it.
            assert!(*longest <= ms(max) && *longest > ms(max) * 9 / 10, "{tries}: {longest:?}");
            assert!(*min < ms(max) / 10, "{tries}: {min:?}");
        }
        let endless = RetryPolicy { backoff_base: Duration::MAX, backoff_max: Duration::MAX, ..policy };
        backoff(&endless, u32::MAX, &mut rng);
    }

    fn policy(on: RetryOn) -> RetryPolicy {
        RetryPolicy { on, retries: 2, ..RetryPolicy::default() }
    }
}
