//! How many requests may come in.
//!
//! Source: `envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit`, `envoy.type.v3.TokenBucket`.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use super::route::HeaderOp;

/// A limit of requests.
#[derive(Debug)]
pub struct RateLimit {
    /// What requests are taken from, for all workers together; `None` for no limit.
    pub bucket: Option<TokenBucket>,
    /// What is answered when it is empty.
    pub status: u16,
    /// The share of requests, in millionths, that take from the bucket.
    pub enabled: u32,
    /// The share of those, in millionths, that are refused when it is empty.
    pub enforced: u32,
    /// gRPC clients are told `RESOURCE_EXHAUSTED` instead of `UNAVAILABLE`.
    pub resource_exhausted: bool,
    /// For the answer to what is refused.
    pub answer: Vec<HeaderOp>,
    /// For requests that would be refused, were it enforced.
    pub unenforced: Vec<HeaderOp>,
}

/// Tokens that come at a steady rate, up to a number. Full to begin with, and shared without locks: all it knows is when it
/// would have been empty, had nothing more been taken.
#[derive(Debug)]
pub struct TokenBucket {
    /// How long one token takes to come.
    interval: Duration,
    /// As many as are kept.
    most: u32,
    start: Instant,
    /// Nanoseconds since `start` at which it was empty.
    empty: AtomicU64,
}

impl TokenBucket {
    /// A full bucket, into which `fill` tokens come in each `interval`.
    pub fn new(most: u32, fill: u32, interval: Duration) -> Self {
        let interval = interval / fill.max(1);
        let full = interval.saturating_mul(most);
        let now = Instant::now();
        let start = now.checked_sub(full).unwrap_or(now);
        Self { interval, most, start, empty: AtomicU64::new(0) }
    }

    /// Takes a token, if there is one.
    pub fn take(&self, now: Instant) -> bool {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let now = nanos(now.saturating_duration_since(self.start));
        let (one, full) = (nanos(self.interval), nanos(self.interval.saturating_mul(self.most)));
        let taken = self.empty.fetch_update(Ordering::AcqRel, Ordering::Acquire, |empty| {
            // What would not fit in has not come.
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
    fn a_full_bucket_gives_what_it_holds_then_what_comes() {
        let bucket = TokenBucket::new(3, 2, SECOND);
        let now = Instant::now();
        assert_eq!((0..10).filter(|_| bucket.take(now)).count(), 3);
        assert!(!bucket.take(now + SECOND / 4));
        assert!(bucket.take(now + SECOND / 2 + SECOND / 100));
        assert!(!bucket.take(now + SECOND / 2 + SECOND / 100));
        // However long nobody comes, there are no more than it holds.
        assert_eq!((0..10).filter(|_| bucket.take(now + 100 * SECOND)).count(), 3);
    }

    proptest! {
        #[test]
        fn never_more_than_its_size_and_its_rate(
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
