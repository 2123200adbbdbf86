//! Use of a cluster's circuit breakers.
//!
//! Source: `envoy.config.cluster.v3.CircuitBreakers`.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Connections and requests of a cluster, across workers. Each is counted only where the cluster limits it.
#[derive(Debug, Default)]
pub struct Usage {
    /// Open connections.
    pub connections: AtomicU32,
    /// Requests that wait for a connection.
    pub pending: AtomicU32,
    /// Requests in flight.
    pub requests: AtomicU32,
    /// Retries in flight.
    pub retries: AtomicU32,
    /// Requests that began within the interval of the retry budget.
    pub recent: RecentRequests,
}

/// Number of parts of an interval. A request counts for up to one part less than the interval.
const PARTS: u64 = 64;

/// Number of requests that began within an interval.
#[derive(Debug, Default)]
pub struct RecentRequests(OnceLock<Box<Window>>);

#[derive(Debug)]
struct Window {
    start: Instant,
    /// For each part of the interval in turn: its number since the start, and in the lower 32 bits its requests.
    parts: [AtomicU64; PARTS as usize],
}

impl RecentRequests {
    /// Counts a request.
    pub fn add(&self, interval: Duration, now: Instant) {
        let window = self.0.get_or_init(|| {
            Box::new(Window { start: now, parts: std::array::from_fn(|_| AtomicU64::new(0)) })
        });
        let number = window.number(interval, now);
        let count = |part: u64| {
            if part >> 32 == number { part.saturating_add(1) } else { number << 32 | 1 }
        };
        let part = &window.parts[(number % PARTS) as usize];
        _ = part.fetch_update(Relaxed, Relaxed, |part| Some(count(part)));
    }

    /// Returns the number of requests that began within the interval.
    pub fn count(&self, interval: Duration, now: Instant) -> u64 {
        let Some(window) = self.0.get() else { return 0 };
        let number = window.number(interval, now);
        let parts = window.parts.iter().map(|part| part.load(Relaxed));
        let recent = parts.filter(|part| (number.saturating_sub(PARTS - 1)..=number).contains(&(part >> 32)));
        recent.map(|part| part & u64::from(u32::MAX)).sum()
    }
}

impl Window {
    /// Returns the number of the part of the interval that `now` is in.
    fn number(&self, interval: Duration, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.start).as_nanos();
        let part = (interval.as_nanos() / u128::from(PARTS)).max(1);
        u64::try_from(elapsed / part).unwrap_or(u64::MAX) & u64::from(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_count_until_the_interval_has_passed() {
        let (recent, start) = (RecentRequests::default(), Instant::now());
        let interval = Duration::from_secs(64);
        let at = |second| start + Duration::from_secs(second);
        assert_eq!(recent.count(interval, at(0)), 0);
        for second in [0, 0, 10, 63] {
            recent.add(interval, at(second));
        }
        assert_eq!([63, 64, 73, 74].map(|second| recent.count(interval, at(second))), [4, 2, 2, 1]);
        recent.add(interval, at(74));
        assert_eq!([74, 127, 138].map(|second| recent.count(interval, at(second))), [2, 1, 0]);
    }
}
