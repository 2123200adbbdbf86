//! Due times of requests: evenly spaced, and fixed before the first one is sent.
//!
//! The latency of a request counts from its due time, even if it waits because the system is slow. A generator that
//! waits for responses instead would measure least when the system is slowest.

use std::time::Duration;

/// Evenly spaced times, in nanoseconds from the start of the schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    interval: u64,
}

impl Schedule {
    /// Creates a schedule with this rate. The interval is a whole number of nanoseconds, so that the periodic timer
    /// of the kernel does not drift from it over hours.
    pub(crate) fn per_second(rate: u32) -> Self {
        let rate = u64::from(rate.max(1));
        Self { interval: (1_000_000_000 + rate / 2) / rate }
    }

    /// Returns the nanoseconds between two requests.
    pub(crate) fn interval(self) -> u64 {
        self.interval
    }

    /// Returns the due time of a request; number 0 is due at once.
    pub(crate) fn due(self, number: u64) -> u64 {
        number * self.interval
    }

    /// Returns the number of requests that are due before this time.
    pub(crate) fn due_before(self, moment: Duration) -> u64 {
        nanoseconds(moment).div_ceil(self.interval)
    }
}

/// Converts a duration to nanoseconds; the maximum is 584 years.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_evenly_spaced() {
        let schedule = Schedule::per_second(1_000);
        assert_eq!(schedule.interval(), 1_000_000);
        assert_eq!(schedule.due(0), 0);
        assert_eq!(schedule.due(3), 3_000_000);
    }

    #[test]
    fn a_window_excludes_its_end() {
        let schedule = Schedule::per_second(1_000);
        assert_eq!(schedule.due_before(Duration::ZERO), 0);
        assert_eq!(schedule.due_before(Duration::from_nanos(1)), 1);
        assert_eq!(schedule.due_before(Duration::from_millis(1)), 1);
        assert_eq!(schedule.due_before(Duration::from_secs(5)), 5_000);
    }

    #[test]
    fn counts_and_moments_agree_at_odd_rates() {
        for rate in [1, 3, 7, 999, 3_000, 44_100, 1_000_000] {
            let schedule = Schedule::per_second(rate);
            let end = Duration::from_secs(2);
            let count = schedule.due_before(end);
            assert!(schedule.due(count - 1) < nanoseconds(end), "{rate}");
            assert!(schedule.due(count) >= nanoseconds(end), "{rate}");
            assert!(count.abs_diff(2 * u64::from(rate)) <= 1 + u64::from(rate) / 1_000, "{rate}: {count}");
        }
    }
}
