//! Time of the next query for a name.

use std::time::Duration;

use tokio::time::Instant;

/// Minimum time to the next query, whatever the TTL.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time to the next query while the name has addresses.
const MAX_INTERVAL: Duration = Duration::from_secs(3600);
/// Maximum time to the next query while the name has no addresses: it may be about to be created.
const MAX_INTERVAL_NO_ADDRESSES: Duration = Duration::from_secs(60);
/// Time to the next query after an answer without addresses and without TTL, which must not be cached (RFC 2308,
/// section 5).
const INTERVAL_WITHOUT_TTL: Duration = Duration::from_secs(5);
/// Delay after the first failure; each further failure doubles it.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay after failures.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Maximum random share by which an interval is extended, so that names queried together spread out.
const JITTER: f64 = 0.1;

/// Expiry of the last answer, and time of the next query.
#[derive(Debug)]
pub(super) struct QuerySchedule {
    pub(super) next_query: Instant,
    /// Expiry of the last answer; `None` before the first one.
    expires: Option<Instant>,
    /// Number of queries without an answer since the last answer.
    pub(super) failures: u32,
    /// An answer had a TTL above 0. A later TTL of 0 then means that the server's cached copy is about to expire.
    had_ttl: bool,
}

impl QuerySchedule {
    /// Schedules the first query at once.
    pub(super) fn new(now: Instant) -> Self {
        Self { next_query: now, expires: None, failures: 0, had_ttl: false }
    }

    /// Schedules the next query after an answer with addresses. Addresses whose TTL is always 0 are queried at `rate`,
    /// as in Envoy.
    pub(super) fn after_addresses(&mut self, ttl: Duration, rate: Duration, now: Instant) {
        self.had_ttl |= !ttl.is_zero();
        let interval = if ttl.is_zero() && !self.had_ttl { rate } else { ttl };
        self.after_answer(interval.clamp(MIN_INTERVAL, MAX_INTERVAL), now);
    }

    /// Schedules the next query after an answer without addresses.
    pub(super) fn after_no_addresses(&mut self, ttl: Option<Duration>, now: Instant) {
        let interval = ttl.unwrap_or(INTERVAL_WITHOUT_TTL);
        self.after_answer(interval.clamp(MIN_INTERVAL, MAX_INTERVAL_NO_ADDRESSES), now);
    }

    fn after_answer(&mut self, interval: Duration, now: Instant) {
        (self.failures, self.expires) = (0, Some(now + interval));
        self.next_query = now + interval.mul_f64(1.0 + JITTER * fastrand::f64());
    }

    /// Schedules the next query after a failure: exponential backoff, half of it random.
    pub(super) fn after_failure(&mut self, now: Instant) {
        let delay = RETRY_DELAY.saturating_mul(1 << self.failures.min(16)).min(MAX_RETRY_DELAY);
        self.failures = self.failures.saturating_add(1);
        self.next_query = now + delay.mul_f64(0.5 + 0.5 * fastrand::f64());
    }

    /// Returns the seconds until the last answer expires; negative after its expiry.
    pub(super) fn seconds_left(&self, now: Instant) -> Option<f64> {
        let expires = self.expires?;
        let (ahead, past) = (expires.saturating_duration_since(now), now.saturating_duration_since(expires));
        Some(ahead.as_secs_f64() - past.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Duration = Duration::from_secs(30);

    /// Asserts the interval after an answer, in seconds; jitter may extend the longest.
    fn assert_interval(answer: impl Fn(&mut QuerySchedule, Instant), shortest: u64, longest: u64) {
        let now = Instant::now();
        let mut schedule = QuerySchedule::new(now);
        answer(&mut schedule, now);
        let interval = schedule.next_query - now;
        let bounds = Duration::from_secs(shortest)..=Duration::from_secs(longest).mul_f64(1.0 + JITTER);
        assert!(bounds.contains(&interval), "{interval:?} is not in {bounds:?}");
    }

    #[test]
    fn the_interval_is_the_ttl_within_bounds() {
        let addresses =
            |ttl| move |it: &mut QuerySchedule, now| it.after_addresses(Duration::from_secs(ttl), RATE, now);
        assert_interval(addresses(5), 5, 5);
        assert_interval(addresses(100_000), 3600, 3600);
        assert_interval(addresses(0), 30, 30);
        let none = |ttl: Option<u64>| {
            move |it: &mut QuerySchedule, now| it.after_no_addresses(ttl.map(Duration::from_secs), now)
        };
        assert_interval(none(None), 5, 5);
        assert_interval(none(Some(10)), 10, 10);
        assert_interval(none(Some(0)), 1, 1);
        assert_interval(none(Some(86_400)), 60, 60);
    }

    #[test]
    fn a_ttl_of_zero_after_a_longer_ttl_is_queried_again_soon() {
        let now = Instant::now();
        let mut schedule = QuerySchedule::new(now);
        schedule.after_addresses(Duration::from_secs(5), RATE, now);
        schedule.after_addresses(Duration::ZERO, RATE, now);
        assert!(schedule.next_query - now < Duration::from_secs(2));
    }

    #[test]
    fn retry_delays_double_until_an_answer_resets_them() {
        let now = Instant::now();
        let mut schedule = QuerySchedule::new(now);
        for longest in [1, 2, 4, 8, 16, 32, 60, 60, 60] {
            schedule.after_failure(now);
            let delay = (schedule.next_query - now).as_secs_f64();
            assert!((longest as f64 / 2.0..=longest as f64).contains(&delay), "{delay} of {longest}");
        }
        schedule.after_addresses(Duration::from_secs(5), RATE, now);
        schedule.after_failure(now);
        assert!(schedule.next_query - now <= RETRY_DELAY);
        assert_eq!(schedule.seconds_left(now + Duration::from_secs(7)), Some(-2.0));
    }
}
