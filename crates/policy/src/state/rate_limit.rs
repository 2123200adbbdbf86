//! Token buckets of local rate limits.
//!
//! Source: `envoy.type.v3.TokenBucket`, and Envoy's `local_ratelimit` filter for the selection of buckets.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use skysail_http::map::Map;

/// Tokens that arrive at a steady rate, up to a maximum. The bucket is full at first, and needs no lock. Its only state
/// is the time at which it would have been empty if no further token had been taken.
#[derive(Debug)]
pub struct TokenBucket {
    /// Time until one token arrives.
    interval: Duration,
    /// Maximum number of tokens.
    max_tokens: u32,
    start: Instant,
    /// Nanoseconds from `start` to the time at which the bucket was empty.
    empty: AtomicU64,
}

impl TokenBucket {
    /// Returns a full bucket, into which `fill` tokens arrive in each `interval`.
    pub fn new(max_tokens: u32, fill: u32, interval: Duration) -> Self {
        let interval = interval / fill.max(1);
        let full = interval.saturating_mul(max_tokens);
        let now = Instant::now();
        let start = now.checked_sub(full).unwrap_or(now);
        Self { interval, max_tokens, start, empty: AtomicU64::new(0) }
    }

    /// Takes a token; returns false if there is none.
    pub fn take(&self, now: Instant) -> bool {
        self.take_many(now, 1)
    }

    /// Takes this many tokens; takes none and returns false if there are fewer.
    pub fn take_many(&self, now: Instant, count: u64) -> bool {
        let now = self.nanos(now);
        let cost = nanos(self.interval).saturating_mul(count);
        let taken = self.empty.fetch_update(Ordering::AcqRel, Ordering::Acquire, |empty| {
            let after = self.empty_at(empty, now).saturating_add(cost);
            (after <= now).then_some(after)
        });
        taken.is_ok()
    }

    /// Returns the maximum number of tokens.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Returns the number of tokens in the bucket.
    pub fn remaining(&self, now: Instant) -> u64 {
        let now = self.nanos(now);
        let level = now.saturating_sub(self.empty_at(self.empty.load(Ordering::Acquire), now));
        level.checked_div(nanos(self.interval)).unwrap_or(self.max_tokens.into())
    }

    /// Returns the time until the bucket has a token; zero if it has one.
    pub fn time_to_token(&self, now: Instant) -> Duration {
        let now = self.nanos(now);
        let next =
            self.empty_at(self.empty.load(Ordering::Acquire), now).saturating_add(nanos(self.interval));
        Duration::from_nanos(next.saturating_sub(now))
    }

    /// Returns the time since `start` in nanoseconds, at least that of the bucket's creation: another worker may have
    /// created the bucket after `now`.
    fn nanos(&self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(self.start)).max(self.full())
    }

    /// Returns the time in which an empty bucket becomes full, in nanoseconds.
    fn full(&self) -> u64 {
        nanos(self.interval.saturating_mul(self.max_tokens))
    }

    /// Returns the time of emptiness that holds now: a full bucket takes no further token.
    fn empty_at(&self, empty: u64, now: u64) -> u64 {
        empty.max(now.saturating_sub(self.full()))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Settings of a [`TokenBucket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSettings {
    /// Maximum number of tokens.
    pub max_tokens: u32,
    /// Number of tokens that arrive in each interval.
    pub fill: u32,
    /// Interval.
    pub interval: Duration,
}

impl BucketSettings {
    fn bucket(self) -> TokenBucket {
        TokenBucket::new(self.max_tokens, self.fill, self.interval)
    }
}

/// An entry of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Entry {
    /// Key.
    pub key: Box<str>,
    /// Value. In a setting an empty value is a wildcard.
    pub value: Box<str>,
}

/// A descriptor that has buckets of its own.
#[derive(Clone, Debug)]
pub struct DescriptorSettings {
    /// Entries, all of which must match.
    pub entries: Box<[Entry]>,
    /// Settings of its buckets.
    pub bucket: BucketSettings,
    /// Requests above the limit are only counted.
    pub shadow: bool,
}

impl DescriptorSettings {
    /// Returns whether a request's descriptor matches; an entry without a value is a wildcard.
    pub fn matches(&self, entries: &[Entry]) -> bool {
        let same = |(known, entry): (&Entry, &Entry)| {
            known.key == entry.key && (known.value.is_empty() || known.value == entry.value)
        };
        self.entries.len() == entries.len() && self.entries.iter().zip(entries).all(same)
    }
}

/// Settings of [`Buckets`].
#[derive(Clone, Debug, Default)]
pub struct BucketsSettings {
    /// The default bucket.
    pub default: Option<BucketSettings>,
    /// Descriptors with buckets of their own.
    pub descriptors: Vec<DescriptorSettings>,
    /// Maximum number of buckets of each descriptor with wildcards.
    pub max_dynamic_descriptors: usize,
}

/// The buckets of a local rate limit.
#[derive(Debug)]
pub struct Buckets {
    /// The default bucket.
    pub default: Option<Arc<LimitBucket>>,
    exact: Map<Box<[Entry]>, Arc<LimitBucket>>,
    wildcards: Vec<Wildcard>,
}

/// A bucket of a local rate limit.
#[derive(Debug)]
pub struct LimitBucket {
    /// Tokens.
    pub tokens: TokenBucket,
    /// Time until one token arrives. Of several buckets the slowest is asked first.
    pub interval: Duration,
    /// Requests above the limit are only counted.
    pub shadow: bool,
}

impl LimitBucket {
    fn new(settings: BucketSettings, shadow: bool) -> Arc<Self> {
        let interval = settings.interval / settings.fill.max(1);
        Arc::new(Self { tokens: settings.bucket(), interval, shadow })
    }
}

impl Buckets {
    /// Returns full buckets.
    pub fn new(settings: &BucketsSettings) -> Self {
        let (wild, exact): (Vec<_>, Vec<_>) = settings
            .descriptors
            .iter()
            .partition(|descriptor| descriptor.entries.iter().any(|entry| entry.value.is_empty()));
        let exact = exact.into_iter();
        Self {
            default: settings.default.map(|bucket| LimitBucket::new(bucket, false)),
            exact: exact.map(|it| (it.entries.clone(), LimitBucket::new(it.bucket, it.shadow))).collect(),
            wildcards: wild
                .into_iter()
                .map(|it| Wildcard::new(it, settings.max_dynamic_descriptors))
                .collect(),
        }
    }

    /// Returns the bucket of a request's descriptor.
    pub fn find(&self, entries: &[Entry]) -> Option<Arc<LimitBucket>> {
        if let Some(bucket) = self.exact.get(entries) {
            return Some(Arc::clone(bucket));
        }
        self.wildcards
            .iter()
            .find(|wildcard| wildcard.settings.matches(entries))
            .map(|wildcard| wildcard.bucket(entries))
    }
}

/// A descriptor with wildcards, and the buckets of the values that requests had most recently. Values are kept as keyed
/// hashes, so that their length does not matter.
#[derive(Debug)]
struct Wildcard {
    settings: DescriptorSettings,
    capacity: usize,
    keys: [RandomState; 2],
    recent: Mutex<Recent>,
}

/// Buckets in the order of their last use.
#[derive(Debug, Default)]
struct Recent {
    buckets: HashMap<[u64; 2], (u64, Arc<LimitBucket>)>,
    order: BTreeMap<u64, [u64; 2]>,
    uses: u64,
}

impl Wildcard {
    fn new(settings: &DescriptorSettings, capacity: usize) -> Self {
        Self { settings: settings.clone(), capacity, keys: Default::default(), recent: Mutex::default() }
    }

    /// Returns the bucket of these values. A new one replaces the least recently used one if there are too many.
    fn bucket(&self, entries: &[Entry]) -> Arc<LimitBucket> {
        let key = [self.keys[0].hash_one(entries), self.keys[1].hash_one(entries)];
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = &mut *recent;
        recent.uses += 1;
        let used = recent.uses;
        if let Some((last, bucket)) = recent.buckets.get_mut(&key) {
            recent.order.remove(last);
            *last = used;
            recent.order.insert(used, key);
            return Arc::clone(bucket);
        }
        if recent.buckets.len() >= self.capacity
            && let Some((_, oldest)) = recent.order.pop_first()
        {
            recent.buckets.remove(&oldest);
        }
        let bucket = LimitBucket::new(self.settings.bucket, self.settings.shadow);
        recent.buckets.insert(key, (used, Arc::clone(&bucket)));
        recent.order.insert(used, key);
        bucket
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

    fn entries(pairs: &[(&str, &str)]) -> Box<[Entry]> {
        pairs.iter().map(|(key, value)| Entry { key: (*key).into(), value: (*value).into() }).collect()
    }

    #[test]
    fn remaining_tokens_and_the_time_to_the_next_are_those_that_requests_find() {
        let bucket = TokenBucket::new(2, 1, 10 * SECOND);
        let now = Instant::now();
        let state = || (bucket.max_tokens(), bucket.remaining(now), bucket.time_to_token(now).as_secs());
        assert_eq!(state(), (2, 2, 0));
        assert!(bucket.take(now));
        assert_eq!(state(), (2, 1, 0));
        assert!(!bucket.take_many(now, 2));
        assert!(bucket.take(now));
        assert_eq!(bucket.remaining(now), 0);
        assert_eq!(bucket.time_to_token(now + SECOND).as_secs().div_ceil(9), 1);
    }

    #[test]
    fn wildcards_have_a_bucket_for_each_value_and_keep_only_the_most_recent_ones() {
        let bucket = BucketSettings { max_tokens: 1, fill: 1, interval: 1000 * SECOND };
        let descriptor = |pairs: &[_]| DescriptorSettings { entries: entries(pairs), bucket, shadow: false };
        let buckets = Buckets::new(&BucketsSettings {
            default: None,
            descriptors: vec![descriptor(&[("a", "1")]), descriptor(&[("a", ""), ("b", "2")])],
            max_dynamic_descriptors: 2,
        });
        let take =
            |pairs: &[_]| buckets.find(&entries(pairs)).map(|bucket| bucket.tokens.take(Instant::now()));
        assert_eq!(take(&[("a", "1")]), Some(true));
        assert_eq!(take(&[("a", "1")]), Some(false));
        assert_eq!(take(&[("a", "2")]), None);
        assert_eq!(take(&[("a", "x"), ("b", "3")]), None);
        assert_eq!(take(&[("a", "x"), ("b", "2")]), Some(true));
        assert_eq!(take(&[("a", "y"), ("b", "2")]), Some(true));
        assert_eq!(take(&[("a", "x"), ("b", "2")]), Some(false));
        // The bucket of `y` was used least recently.
        assert_eq!(take(&[("a", "z"), ("b", "2")]), Some(true));
        assert_eq!(take(&[("a", "x"), ("b", "2")]), Some(false));
        assert_eq!(take(&[("a", "y"), ("b", "2")]), Some(true));
        let sizes = buckets.wildcards.iter().map(|one| one.recent.lock().unwrap().buckets.len());
        assert_eq!(sizes.collect::<Vec<_>>(), [2]);
    }

    proptest! {
        #[test]
        fn tokens_taken_never_exceed_size_and_rate(
            max_tokens in 1_u32..20, fill in 1_u32..20, steps in proptest::collection::vec(0_u64..400, 1..200),
        ) {
            let bucket = TokenBucket::new(max_tokens, fill, SECOND);
            let start = Instant::now();
            let (mut at, mut taken) = (Duration::ZERO, 0_u32);
            for step in steps {
                at += Duration::from_millis(step);
                taken += u32::from(bucket.take(start + at));
                let come = at.as_secs_f64() * f64::from(fill);
                prop_assert!(f64::from(taken) <= f64::from(max_tokens) + come + 1.0, "{taken} of {max_tokens} after {at:?}");
            }
        }
    }
}
