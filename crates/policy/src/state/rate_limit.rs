//! Token bucket of a local rate limit.
//!
//! Source: `envoy.type.v3.TokenBucket`.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Tokens that arrive at a steady rate, up to a maximum. The bucket is full at first, and needs no lock. Its only state
/// is the time at which it would have been empty if no further token had been taken.
#[derive(Debug)]
pub struct TokenBucket {
    /// Time until one token arrives.
    interval: Duration,
    /// Maximum number of tokens.
    most: u32,
    start: Instant,
    /// Nanoseconds from `start` to the time at which the bucket was empty.
    empty: AtomicU64,
}

impl TokenBucket {
    /// Returns a full bucket, into which `fill` tokens arrive in each `interval`.
    pub fn new(most: u32, fill: u32, interval: Duration) -> Self {
        let interval = interval / fill.max(1);
        let full = interval.saturating_mul(most);
        let now = Instant::now();
        let start = now.checked_sub(full).unwrap_or(now);
        Self { interval, most, start, empty: AtomicU64::new(0) }
    }

    /// Takes a token; returns false if there is none.
    pub fn take(&self, now: Instant) -> bool {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let now = nanos(now.saturating_duration_since(self.start));
        let (one, full) = (nanos(self.interval), nanos(self.interval.saturating_mul(self.most)));
        let taken = self.empty.fetch_update(Ordering::AcqRel, Ordering::Acquire, |empty| {
            // A full bucket takes no further token.
            let after = empty.max(now.saturating_sub(full)).saturating_add(one);
            (after <= now).then_some(after)
        });
        taken.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_full_bucket_gives_its_tokens_then_those_that_arrive() {
        let bucket = TokenBucket::new(3, 2, SECOND);
        let now = Instant::now();
        assert_eq!((0..10).filter(|_| bucket.take(now)).count(), 3);
        assert!(!bucket.take(now + SECOND / 4));
        assert!(bucket.take(now + SECOND / 2 + SECOND / 100));
        assert!(!bucket.take(now + SECOND / 2 + SECOND / 100));
        // The bucket never holds more than its maximum, however long it is idle.
        assert_eq!((0..10).filter(|_| bucket.take(now + 100 * SECOND)).count(), 3);
    }

    proptest! {
        #[test]
        fn tokens_taken_never_exceed_size_and_rate(
            most in 1_u32..20, fill in 1_u32..20, steps in proptest::collection::vec(0_u64..400, 1..200),
        ) {
            let bucket = TokenBucket::new(most, fill, SECOND);
            let start = Instant::now();
            let (mut at, mut taken) = (Duration::ZERO, 0_u32);
            for step in steps {
                at += Duration::from_millis(step);
                taken += u32::from(bucket.take(start + at));
                let come = at.as_secs_f64() * f64::from(fill);
                prop_assert!(f64::from(taken) <= f64::from(most) + come + 1.0, "{taken} of {most} after {at:?}");
            }
        }
    }
}
