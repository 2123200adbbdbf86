//! CPU time that clients may use, counted in units of work.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{BURST, RATE, lock};

/// A leaky bucket of [`BURST`] that empties at [`RATE`].
#[derive(Debug)]
pub(crate) struct Pace(Mutex<Owed>);

#[derive(Debug)]
struct Owed {
    units: u64,
    /// Up to when it has emptied.
    since: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self(Mutex::new(Owed { units: 0, since: Instant::now() }))
    }
}

impl Pace {
    /// Charges for something.
    pub(crate) fn spend(&self, units: u64) {
        lock(&self.0).spend(units, Instant::now());
    }

    /// Takes back a charge.
    pub(crate) fn refund(&self, units: u64) {
        let mut owed = lock(&self.0);
        owed.units = owed.units.saturating_sub(units);
    }

    /// What is owed now.
    pub(super) fn owed(&self) -> u64 {
        let mut owed = lock(&self.0);
        owed.leak(Instant::now());
        owed.units
    }

    /// How long to wait before more is done; `None` if there is no need to.
    pub(crate) fn wait(&self) -> Option<Duration> {
        let mut owed = lock(&self.0);
        if owed.units <= BURST {
            return None;
        }
        owed.leak(Instant::now());
        let over = owed.units.checked_sub(BURST).filter(|over| *over > 0)?;
        // Rounded up to a timer's milliseconds.
        Some(Duration::from_millis(over * 1_000 / RATE + 1))
    }
}

/// Nanoseconds in a second.
const NANOS: u128 = 1_000_000_000;

impl Owed {
    /// Charges for something, after what has leaked: time before a debt does not count towards it.
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
        // The time of a part of a unit is left for the next look, or frequent ones would empty nothing.
        let counted = (u128::from(leaked) * NANOS).div_ceil(u128::from(RATE));
        self.since += Duration::from_nanos(u64::try_from(counted).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_allows_a_burst_and_then_a_rate() {
        let mut owed = Owed { units: BURST + RATE, since: Instant::now() };
        let start = owed.since;
        owed.leak(start + Duration::from_millis(250));
        assert_eq!(owed.units, BURST + RATE * 3 / 4);
        owed.leak(start + Duration::from_millis(1_000));
        assert_eq!(owed.units, BURST);
        owed.leak(start + Duration::from_secs(3_600));
        assert_eq!(owed.units, 0, "an hour's rest earns no more than the burst");

        // Nor does a rest before the debt earn another.
        let mut owed = Owed { units: 0, since: start };
        let rested = start + Duration::from_secs(3_600);
        owed.spend(BURST, rested);
        owed.spend(BURST, rested);
        owed.leak(rested);
        assert_eq!(owed.units, 2 * BURST);
        // However often it is looked at.
        let mut owed = Owed { units: BURST, since: start };
        (1..=1_000_000).for_each(|micros| owed.leak(start + Duration::from_micros(micros)));
        assert!(owed.units.abs_diff(BURST - RATE) <= RATE / 1_000, "{}", owed.units);

        let pace = Pace::default();
        pace.spend(BURST);
        assert_eq!(pace.wait(), None);
        pace.spend(RATE * 60);
        let wait = pace.wait().unwrap();
        assert!(wait <= Duration::from_millis(60_001), "{wait:?}");
        pace.refund(RATE * 60);
        assert_eq!(pace.wait(), None);
    }
}
