//! Due times of the requests of one connection.
//!
//! In the open loop, request number n is due at a fixed time, whatever the latency of earlier requests. A request that
//! waits because the target is slow counts from its due time. In the closed loop, a request is due once the connection
//! has its last response.

/// Nanoseconds of a second.
const SECOND: f64 = 1e9;
/// Maximum deviation of a due time with jitter, as a share of the interval.
const JITTER: f64 = 0.1;

/// Settings that all connections share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PaceSettings {
    /// Requests per second over all connections; `None` for the closed loop.
    pub(crate) rate: Option<f64>,
    /// Number of connections (HTTP/2: streams) over which the rate is spread.
    pub(crate) connections: u64,
    /// Due times deviate at random by up to a tenth of the interval of a connection.
    pub(crate) jitter: bool,
    /// The due times of different connections are evenly spaced. Otherwise all connections send at the same time.
    pub(crate) uniform: bool,
    /// Requests that are overdue when their connection becomes free are sent. Otherwise they are skipped.
    pub(crate) catch_up: bool,
    /// Number of requests over all connections; `None` for no limit.
    pub(crate) count: Option<u64>,
    /// Nanoseconds from the start after which no request is due.
    pub(crate) end: u64,
}

/// Due times of one connection, in nanoseconds from the start.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    /// Time between two requests; `None` for the closed loop.
    interval: Option<f64>,
    first: f64,
    jitter: bool,
    catch_up: bool,
    /// Number of the next request.
    next: u64,
    count: u64,
    end: u64,
    /// Number of requests that were skipped, because they were overdue.
    pub(crate) skipped: u64,
}

impl PaceSettings {
    /// Returns the due times of a connection by its index.
    pub(crate) fn of_connection(&self, index: u64) -> Pace {
        let interval = self.rate.map(|rate| self.connections as f64 * SECOND / rate);
        let offset = if self.uniform { index as f64 / self.connections as f64 } else { 0.0 };
        let count = self
            .count
            .map_or(u64::MAX, |count| count / self.connections + u64::from(index < count % self.connections));
        Pace {
            interval,
            first: interval.unwrap_or(0.0) * offset,
            jitter: self.jitter,
            catch_up: self.catch_up,
            next: 0,
            count,
            end: self.end,
            skipped: 0,
        }
    }
}

impl Pace {
    /// Returns the due time of the next request. It may lie in the past. `None` if there are no more requests.
    pub(crate) fn next(&mut self, now: u64, rng: &mut fastrand::Rng) -> Option<u64> {
        let Some(interval) = self.interval else {
            if self.next >= self.count || now >= self.end {
                return None;
            }
            self.next += 1;
            return Some(now);
        };
        if !self.catch_up {
            let overdue = ((now as f64 - self.first) / interval).floor() - self.next as f64;
            if overdue >= 1.0 {
                let last = ((self.end as f64 - self.first) / interval).ceil().max(0.0) as u64;
                let overdue = (overdue as u64).min(last.min(self.count).saturating_sub(self.next));
                self.skipped += overdue;
                self.next += overdue;
            }
        }
        let due = self.first + self.next as f64 * interval;
        if self.next >= self.count || due as u64 >= self.end {
            return None;
        }
        self.next += 1;
        let deviation = if self.jitter { (rng.f64() * 2.0 - 1.0) * JITTER * interval } else { 0.0 };
        Some((due + deviation).max(0.0) as u64)
    }

    /// Returns whether requests are due at fixed times.
    pub(crate) fn is_open_loop(&self) -> bool {
        self.interval.is_some()
    }

    /// Returns the number of requests that are due before `moment` and were not taken.
    pub(crate) fn left_before(&self, moment: u64) -> u64 {
        let Some(interval) = self.interval else { return 0 };
        let due = ((moment.min(self.end) as f64 - self.first) / interval).ceil().max(0.0) as u64;
        due.min(self.count).saturating_sub(self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn settings() -> PaceSettings {
        PaceSettings {
            rate: Some(1_000.0),
            connections: 4,
            jitter: false,
            uniform: true,
            catch_up: true,
            count: None,
            end: 100 * MS,
        }
    }

    fn dues(settings: &PaceSettings, index: u64, now: u64) -> Vec<u64> {
        let (mut pace, mut rng) = (settings.of_connection(index), fastrand::Rng::with_seed(1));
        std::iter::from_fn(|| pace.next(now, &mut rng)).collect()
    }

    #[test]
    fn connections_share_the_rate_evenly() {
        let mut all: Vec<u64> = (0..4).flat_map(|index| dues(&settings(), index, 0)).collect();
        all.sort_unstable();
        assert_eq!(all, (0..100).map(|number| number * MS).collect::<Vec<_>>());
        let together = PaceSettings { uniform: false, ..settings() };
        assert_eq!(dues(&together, 0, 0), dues(&together, 3, 0));
    }

    #[test]
    fn a_count_is_exact() {
        for (count, connections) in [(10, 4), (3, 4), (400, 7), (0, 2)] {
            for rate in [None, Some(50.0)] {
                let settings =
                    PaceSettings { rate, connections, count: Some(count), end: u64::MAX, ..settings() };
                let sum: usize = (0..connections).map(|index| dues(&settings, index, 0).len()).sum();
                assert_eq!(sum as u64, count, "{count} over {connections}");
            }
        }
    }

    #[test]
    fn overdue_requests_are_sent_or_skipped() {
        let now = 50 * MS;
        assert_eq!(dues(&settings(), 0, now).len(), 25);
        let skips = PaceSettings { catch_up: false, ..settings() };
        assert_eq!(dues(&skips, 0, now).len(), 13);
        let (mut pace, mut rng) = (skips.of_connection(0), fastrand::Rng::with_seed(1));
        assert_eq!(pace.next(now, &mut rng), Some(48 * MS));
        assert_eq!(pace.skipped, 12);
    }

    #[test]
    fn jitter_stays_within_a_tenth_of_the_interval() {
        let jitter = PaceSettings { jitter: true, end: 10_000 * MS, ..settings() };
        let even = PaceSettings { jitter: false, ..jitter };
        let (with, without) = (dues(&jitter, 1, 0), dues(&even, 1, 0));
        assert_eq!(with.len(), without.len());
        let most = with.iter().zip(&without).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0);
        assert!(most > 200_000 && most <= 400_000, "{most}");
    }

    #[test]
    fn the_closed_loop_ends_with_the_time() {
        let closed = PaceSettings { rate: None, ..settings() };
        let (mut pace, mut rng) = (closed.of_connection(0), fastrand::Rng::with_seed(1));
        assert_eq!(pace.next(7, &mut rng), Some(7));
        assert_eq!(pace.next(100 * MS, &mut rng), None);
        assert_eq!(pace.left_before(100 * MS), 0);
    }

    #[test]
    fn requests_that_were_not_taken_are_counted() {
        let (mut pace, mut rng) = (settings().of_connection(0), fastrand::Rng::with_seed(1));
        assert_eq!(pace.left_before(100 * MS), 25);
        assert_eq!(pace.left_before(10 * MS), 3);
        pace.next(0, &mut rng);
        assert_eq!(pace.left_before(100 * MS), 24);
    }
}
