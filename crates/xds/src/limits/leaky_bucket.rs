//! Limit of the CPU time that clients may use, in units of work.

use std::{sync::Mutex, time::Duration};

use tokio::time::Instant;

use super::{BURST, RATE, lock};

/// A leaky bucket of [`BURST`] units that empties at [`RATE`].
#[derive(Debug)]
pub(crate) struct LeakyBucket(Mutex<BucketState>);

#[derive(Debug)]
struct BucketState {
    units: u64,
    /// Time up to which the leak is counted.
    since: Instant,
}

impl Default for LeakyBucket {
    fn default() -> Self {
        Self(Mutex::new(BucketState { units: 0, since: Instant::now() }))
    }
}

impl LeakyBucket {
    /// Charges work.
    pub(crate) fn charge(&self, units: u64) {
        if units > 0 {
            lock(&self.0).charge(units, Instant::now());
        }
    }

    /// Takes back a charge.
    pub(crate) fn refund(&self, units: u64) {
        if units > 0 {
            let mut debt = lock(&self.0);
            debt.units = debt.units.saturating_sub(units);
        }
    }

    /// Returns the current debt.
    pub(super) fn debt(&self) -> u64 {
        let mut debt = lock(&self.0);
        debt.leak(Instant::now());
        debt.units
    }

    /// Returns the time until more work is allowed; `None` if it is allowed now.
    pub(crate) fn wait(&self) -> Option<Duration> {
        let mut debt = lock(&self.0);
        if debt.units <= BURST {
            return None;
        }
        debt.leak(Instant::now());
        let over = debt.units.checked_sub(BURST).filter(|over| *over > 0)?;
        // Rounded up to the milliseconds of a timer.
        Some(Duration::from_millis(over * 1_000 / RATE + 1))
    }
}

/// Nanoseconds per second.
const NANOS: u128 = 1_000_000_000;

impl BucketState {
    /// Charges work. Counts the leak first, because time before a charge does not reduce it.
    fn charge(&mut self, units: u64, now: Instant) {
        self.leak(now);
        self.units = self.units.saturating_add(units);
    }

    fn leak(&mut self, now: Instant) {
        let nanos = u64::try_from(now.saturating_duration_since(self.since).as_nanos()).unwrap_or(u64::MAX);
        let leaked = u64::try_from(u128::from(nanos) * u128::from(RATE) / NANOS).unwrap_or(u64::MAX);
        if leaked >= self.units {
            (self.units, self.since) = (0, now);
            return;
        }
        self.units -= leaked;
        // The time for a fraction of a unit is left for the next call; otherwise nothing would leak at frequent calls.
        let counted = (u128::from(leaked) * NANOS).div_ceil(u128::from(RATE));
        self.since += Duration::from_nanos(u64::try_from(counted).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_allows_a_burst_and_then_a_rate() {
        let mut debt = BucketState { units: BURST + RATE, since: Instant::now() };
        let start = debt.since;
        debt.leak(start + Duration::from_millis(250));
        assert_eq!(debt.units, BURST + RATE * 3 / 4);
        debt.leak(start + Duration::from_millis(1_000));
        assert_eq!(debt.units, BURST);
        debt.leak(start + Duration::from_secs(3_600));
        assert_eq!(debt.units, 0, "an hour's rest earns no more than the burst");

        // A rest before the debt earns no second burst.
        let mut debt = BucketState { units: 0, since: start };
        let rested = start + Duration::from_secs(3_600);
        debt.charge(BURST, rested);
        debt.charge(BURST, rested);
        debt.leak(rested);
        assert_eq!(debt.units, 2 * BURST);
        // Frequent calls pay the same.
        let mut debt = BucketState { units: BURST, since: start };
        (1..=1_000_000).for_each(|micros| debt.leak(start + Duration::from_micros(micros)));
        assert!(debt.units.abs_diff(BURST - RATE) <= RATE / 1_000, "{}", debt.units);

        let pace = LeakyBucket::default();
        pace.charge(BURST);
        assert_eq!(pace.wait(), None);
        pace.charge(RATE * 60);
        let wait = pace.wait().unwrap();
        assert!(wait <= Duration::from_millis(60_001), "{wait:?}");
        pace.refund(RATE * 60);
        assert_eq!(pace.wait(), None);
    }
}
