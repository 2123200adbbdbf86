//! Time of the next request for a name.

use std::time::Duration;

use tokio::time::Instant;

/// Shortest pause, whatever the answer says.
const SHORTEST: Duration = Duration::from_secs(1);
/// Longest pause while the name has addresses.
const LONGEST: Duration = Duration::from_secs(3600);
/// Longest pause while it has none, as the name may be about to be created.
const LONGEST_NOTHING: Duration = Duration::from_secs(60);
/// Where there are none and it is not said for how long, which is not to be kept (RFC 2308, section 5).
const UNSAID_NOTHING: Duration = Duration::from_secs(5);
/// Pause after the first failure; each further failure doubles it.
const RETRY: Duration = Duration::from_secs(1);
/// Longest pause after failures.
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// By at most this share a pause is longer by chance, so that names that were asked for together part.
const JITTER: f64 = 0.1;

/// Expiry of the last answer and time of the next request.
#[derive(Debug)]
pub(super) struct Expiry {
    /// Ask then.
    pub(super) due: Instant,
    /// The end of the last answer; none before there was one.
    end: Option<Instant>,
    /// Questions without an answer since the last one that had one.
    pub(super) failures: u32,
    /// Some answer could be kept for a while, so nothing means that a server's copy is just about to expire.
    lasts: bool,
}

impl Expiry {
    /// At once.
    pub(super) fn new(now: Instant) -> Self {
        Self { due: now, end: None, failures: 0, lasts: false }
    }

    /// Addresses that hold for so long; those that are not to be kept at all are asked for at this rate, as in Envoy.
    pub(super) fn found(&mut self, ttl: Duration, rate: Duration, now: Instant) {
        self.lasts |= !ttl.is_zero();
        let pause = if ttl.is_zero() && !self.lasts { rate } else { ttl };
        self.answered(pause.clamp(SHORTEST, LONGEST), now);
    }

    /// No addresses, for so long if that was said.
    pub(super) fn nothing(&mut self, ttl: Option<Duration>, now: Instant) {
        self.answered(ttl.unwrap_or(UNSAID_NOTHING).clamp(SHORTEST, LONGEST_NOTHING), now);
    }

    fn answered(&mut self, pause: Duration, now: Instant) {
        (self.failures, self.end) = (0, Some(now + pause));
        self.due = now + pause.mul_f64(1.0 + JITTER * fastrand::f64());
    }

    /// No answer: again after a pause that grows, of which a half is left to chance.
    pub(super) fn failed(&mut self, now: Instant) {
        let pause = RETRY.saturating_mul(1 << self.failures.min(16)).min(LONGEST_RETRY);
        self.failures = self.failures.saturating_add(1);
        self.due = now + pause.mul_f64(0.5 + 0.5 * fastrand::f64());
    }

    /// The seconds left of the last answer; less than nothing if it is over.
    pub(super) fn left(&self, now: Instant) -> Option<f64> {
        let end = self.end?;
        let (ahead, past) = (end.saturating_duration_since(now), now.saturating_duration_since(end));
        Some(ahead.as_secs_f64() - past.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Duration = Duration::from_secs(30);

    /// The pause after an answer, and how much longer it may be.
    fn assert_pause(act: impl Fn(&mut Expiry, Instant), shortest: u64, longest: u64) {
        let now = Instant::now();
        let mut expiry = Expiry::new(now);
        act(&mut expiry, now);
        let pause = expiry.due - now;
        let bounds = Duration::from_secs(shortest)..=Duration::from_secs(longest).mul_f64(1.0 + JITTER);
        assert!(bounds.contains(&pause), "{pause:?} is not in {bounds:?}");
    }

    #[test]
    fn answers_hold_as_long_as_they_say_within_bounds() {
        let found = |ttl| move |it: &mut Expiry, now| it.found(Duration::from_secs(ttl), RATE, now);
        assert_pause(found(5), 5, 5);
        assert_pause(found(100_000), 3600, 3600);
        assert_pause(found(0), 30, 30);
        let nothing =
            |ttl: Option<u64>| move |it: &mut Expiry, now| it.nothing(ttl.map(Duration::from_secs), now);
        assert_pause(nothing(None), 5, 5);
        assert_pause(nothing(Some(10)), 10, 10);
        assert_pause(nothing(Some(0)), 1, 1);
        assert_pause(nothing(Some(86_400)), 60, 60);
    }

    #[test]
    fn what_was_kept_before_is_asked_for_soon_when_it_says_zero() {
        let now = Instant::now();
        let mut expiry = Expiry::new(now);
        expiry.found(Duration::from_secs(5), RATE, now);
        expiry.found(Duration::ZERO, RATE, now);
        assert!(expiry.due - now < Duration::from_secs(2));
    }

    #[test]
    fn pauses_after_failures_grow_and_end_with_an_answer() {
        let now = Instant::now();
        let mut expiry = Expiry::new(now);
        for longest in [1, 2, 4, 8, 16, 32, 60, 60, 60] {
            expiry.failed(now);
            let pause = (expiry.due - now).as_secs_f64();
            assert!((longest as f64 / 2.0..=longest as f64).contains(&pause), "{pause} of {longest}");
        }
        expiry.found(Duration::from_secs(5), RATE, now);
        expiry.failed(now);
        assert!(expiry.due - now <= RETRY);
        assert_eq!(expiry.left(now + Duration::from_secs(7)), Some(-2.0));
    }
}
