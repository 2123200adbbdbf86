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
    /// Time up to which payments are counted.
    since: Instant,
}

impl Default for LeakyBucket {
    fn default() -> Self {
        Self(Mutex::new(BucketState { units: 0, since: Instant::now() }))
    }
}

impl LeakyBucket {
    /// Charges work.
    pub(crate) fn spend(&self, units: u64) {
        lock(&self.0).spend(units, Instant::now());
    }

    /// Takes back a charge.
    pub(crate) fn refund(&self, units: u64) {
        let mut owed = lock(&self.0);
        owed.units = owed.units.saturating_sub(units);
    }

    /// Returns the current debt.
    pub(super) fn owed(&self) -> u64 {
        let mut owed = lock(&self.0);
        owed.leak(Instant::now());
        owed.units
    }

    /// Returns the time until more work is allowed; `None` if it is allowed now.
    pub(crate) fn wait(&self) -> Option<Duration> {
        let mut owed = lock(&self.0);
        if owed.units <= BURST {
            return None;
        }
        owed.leak(Instant::now());
        let over = owed.units.checked_sub(BURST).filter(|over| *over > 0)?;
        // Rounded up to the milliseconds of a timer.
        Some(Duration::from_millis(over * 1_000 / RATE + 1))
    }
}

/// Nanoseconds per second.
const NANOS: u128 = 1_000_000_000;

impl BucketState {
    /// Charges work after counting payments, because time before a debt pays nothing of it.
    fn spend(&mut self, units: u64, now: Instant) {
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
        // The time of a part of a unit is left for the next call; otherwise frequent calls would pay nothing.
        let counted = (u128::from(leaked) * NANOS).div_ceil(u128::from(RATE));
        self.since += Duration::from_nanos(u64::try_from(counted).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_allows_a_burst_and_then_a_rate() {
        let mut owed = BucketState { units: BURST + RATE, since: Instant::now() };
        let start = owed.since;
        owed.leak(start + Duration::from_millis(250));
        assert_eq!(owed.units, BURST + RATE * 3 / 4);
        owed.leak(start + Duration::from_millis(1_000));
        assert_eq!(owed.units, BURST);
        owed.leak(start + Duration::from_secs(3_600));
        assert_eq!(owed.units, 0, "an hour's rest earns no more than the burst");

        // A rest before the debt earns no second burst.
        let mut owed = BucketState { units: 0, since: start };
        let rested = start + Duration::from_secs(3_600);
        owed.spend(BURST, rested);
        owed.spend(BURST, rested);
        owed.leak(rested);
        assert_eq!(owed.units, 2 * BURST);
        // Frequent calls pay the same.
        let mut owed = BucketState { units: BURST, since: start };
        (1..=1_000_000).for_each(|micros| owed.leak(start + Duration::from_micros(micros)));
        assert!(owed.units.abs_diff(BURST - RATE) <= RATE / 1_000, "{}", owed.units);

        let pace = LeakyBucket::default();
        pace.spend(BURST);
        assert_eq!(pace.wait(), None);
        pace.spend(RATE * 60);
        let wait = pace.wait().unwrap();
        assert!(wait <= Duration::from_millis(60_001), "{wait:?}");
        pace.refund(RATE * 60);
        assert_eq!(pace.wait(), None);
    }
}
