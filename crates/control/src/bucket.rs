//! Token buckets: rate limits that count the events they suppress, in all or for each caller.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Instant,
};

/// The number of buckets from which on full ones are dropped, each time the number has doubled.
const MANY: usize = 1_024;

/// The size of a bucket, and how fast it fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    /// Events at once, after a pause.
    pub(crate) burst: f64,
    /// Events per second in the long run.
    pub(crate) each_second: f64,
}

/// A token bucket that counts the events it suppresses.
#[derive(Debug)]
pub(crate) struct Bucket {
    rate: Rate,
    tokens: f64,
    since: Option<Instant>,
    suppressed: u64,
}

impl Bucket {
    pub(crate) fn new(rate: Rate) -> Self {
        Self { rate, tokens: rate.burst, since: None, suppressed: 0 }
    }

    /// Takes a token; returns how many events were suppressed since the last one, or `None` if this one is to be.
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
        let elapsed = self.since.map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
        self.since = Some(now);
        self.tokens = (self.tokens + elapsed * self.rate.each_second).min(self.rate.burst);
    }
}

/// A bucket for each caller.
#[derive(Debug)]
pub(crate) struct Buckets {
    rate: Rate,
    /// The buckets, and the number of them at which full ones are dropped.
    all: Mutex<(HashMap<Box<str>, Bucket>, usize)>,
}

impl Buckets {
    pub(crate) fn new(rate: Rate) -> Self {
        Self { rate, all: Mutex::new((HashMap::new(), MANY)) }
    }

    /// The rate of each bucket.
    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    /// Takes a token of a caller; returns how many of its events were suppressed since the last one, or `None` if this one is to be.
    pub(crate) fn take(&self, caller: &str, now: Instant) -> Option<u64> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let (buckets, most) = &mut *all;
        if let Some(bucket) = buckets.get_mut(caller) {
            return bucket.take(now);
        }
        if buckets.len() >= *most {
            buckets.retain(|_, bucket| {
                bucket.fill(now);
                bucket.tokens < bucket.rate.burst
            });
            *most = MANY.max(2 * buckets.len());
        }
        buckets.entry(caller.into()).or_insert_with(|| Bucket::new(self.rate)).take(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const RATE: Rate = Rate { burst: 100.0, each_second: 10.0 };

    #[test]
    fn a_flood_is_suppressed_and_counted() {
        let mut bucket = Bucket::new(RATE);
        let start = Instant::now();
        let taken = (0..1000).filter(|_| bucket.take(start) == Some(0)).count();
        assert_eq!(taken, 100);
        assert_eq!(bucket.take(start + Duration::from_millis(50)), None);
        assert_eq!(bucket.take(start + Duration::from_millis(150)), Some(901));
        assert_eq!(bucket.take(start + Duration::from_millis(150)), None);
        assert_eq!(bucket.take(start + Duration::from_secs(1)), Some(1));
    }

    #[test]
    fn each_caller_has_a_bucket_of_its_own_until_it_is_full_again() {
        let buckets = Buckets::new(RATE);
        let start = Instant::now();
        let taken = |caller: &str| (0..1000).filter(|_| buckets.take(caller, start).is_some()).count();
        assert_eq!([taken("a"), taken("b"), taken("a")], [100, 100, 0]);
        let later = start + Duration::from_secs(5);
        for number in 0..10 * MANY {
            buckets.take(&number.to_string(), later);
        }
        let all = || buckets.all.lock().unwrap().0.len();
        assert!(all() > 10 * MANY, "none is full");
        buckets.all.lock().unwrap().1 = 0;
        buckets.take("new", later + Duration::from_secs(1));
        assert_eq!(all(), 3, "those that are not full, and the new one");
    }
}
