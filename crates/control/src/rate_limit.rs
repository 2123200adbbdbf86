//! Rate limits by token buckets that count the events they suppress: a single bucket, or one for each caller.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Instant,
};

/// Number of buckets at which full ones are removed for the first time.
const FIRST_SWEEP: usize = 1_024;

/// Size of a token bucket, and how fast it fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    /// Capacity of the bucket: maximum number of events at once.
    pub(crate) burst: f64,
    /// Tokens added per second: maximum rate of events over a long time.
    pub(crate) per_second: f64,
}

/// A token bucket that counts the events it suppresses.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    rate: Rate,
    tokens: f64,
    filled_at: Option<Instant>,
    suppressed: u64,
}

impl TokenBucket {
    /// Returns a full bucket.
    pub(crate) fn new(rate: Rate) -> Self {
        Self { rate, tokens: rate.burst, filled_at: None, suppressed: 0 }
    }

    /// Takes a token. Returns the number of events suppressed since the last token, or `None` if this event is
    /// suppressed.
    pub(crate) fn take(&mut self, now: Instant) -> Option<u64> {
        self.fill(now);
        if self.tokens < 1.0 {
            self.suppressed += 1;
            return None;
        }
        self.tokens -= 1.0;
        Some(std::mem::take(&mut self.suppressed))
    }

    fn fill(&mut self, now: Instant) {
        let elapsed = self.filled_at.map_or(0.0, |at| now.saturating_duration_since(at).as_secs_f64());
        self.filled_at = Some(now);
        self.tokens = (self.tokens + elapsed * self.rate.per_second).min(self.rate.burst);
    }

    fn is_full(&self) -> bool {
        self.tokens >= self.rate.burst
    }
}

/// A token bucket for each caller.
#[derive(Debug)]
pub(crate) struct TokenBuckets {
    rate: Rate,
    callers: Mutex<Callers>,
}

#[derive(Debug)]
struct Callers {
    buckets: HashMap<Box<str>, TokenBucket>,
    /// Number of buckets at which full ones are removed: twice the number left after the last removal, and at least
    /// [`FIRST_SWEEP`].
    next_sweep: usize,
}

impl TokenBuckets {
    /// Returns buckets of this rate.
    pub(crate) fn new(rate: Rate) -> Self {
        Self { rate, callers: Mutex::new(Callers { buckets: HashMap::new(), next_sweep: FIRST_SWEEP }) }
    }

    /// Returns the rate of each bucket.
    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    /// Takes a token of a caller. Returns the number of its events suppressed since its last token, or `None` if this
    /// event is suppressed.
    pub(crate) fn take(&self, caller: &str, now: Instant) -> Option<u64> {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        let Callers { buckets, next_sweep } = &mut *callers;
        if let Some(bucket) = buckets.get_mut(caller) {
            return bucket.take(now);
        }
        if buckets.len() >= *next_sweep {
            buckets.retain(|_, bucket| {
                bucket.fill(now);
                !bucket.is_full()
            });
            *next_sweep = FIRST_SWEEP.max(2 * buckets.len());
        }
        buckets.entry(caller.into()).or_insert_with(|| TokenBucket::new(self.rate)).take(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const RATE: Rate = Rate { burst: 100.0, per_second: 10.0 };

    #[test]
    fn events_above_the_rate_are_suppressed_and_counted() {
        let mut bucket = TokenBucket::new(RATE);
        let start = Instant::now();
        let taken = (0..1000).filter(|_| bucket.take(start) == Some(0)).count();
        assert_eq!(taken, 100);
        assert_eq!(bucket.take(start + Duration::from_millis(50)), None);
        assert_eq!(bucket.take(start + Duration::from_millis(150)), Some(901));
        assert_eq!(bucket.take(start + Duration::from_millis(150)), None);
        assert_eq!(bucket.take(start + Duration::from_secs(1)), Some(1));
    }

    #[test]
    fn each_caller_has_its_own_bucket_and_full_buckets_are_removed() {
        let buckets = TokenBuckets::new(RATE);
        let start = Instant::now();
        let taken = |caller: &str| (0..1000).filter(|_| buckets.take(caller, start).is_some()).count();
        assert_eq!([taken("a"), taken("b"), taken("a")], [100, 100, 0]);
        let later = start + Duration::from_secs(5);
        for number in 0..10 * FIRST_SWEEP {
            buckets.take(&number.to_string(), later);
        }
        let count = || buckets.callers.lock().unwrap().buckets.len();
        assert!(count() > 10 * FIRST_SWEEP, "no bucket is full");
        buckets.callers.lock().unwrap().next_sweep = 0;
        buckets.take("new", later + Duration::from_secs(1));
        assert_eq!(count(), 3, "two buckets that are not full, and the new one");
    }
}
