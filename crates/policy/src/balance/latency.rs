//! Latency of an endpoint as a moving average that rises at once and falls slowly (peak EWMA, as in Finagle).

use std::time::{Duration, Instant};

/// Latency of an endpoint, as one worker measured it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// Average in nanoseconds.
    average: f64,
    at: Instant,
}

impl Latency {
    /// Returns the average with one more measurement.
    pub fn with(before: Option<Self>, took: Duration, now: Instant, decay: Duration) -> Self {
        let took = took.as_nanos() as f64;
        let average = match before {
            Some(before) if took < before.average => {
                let kept = before.kept(now, decay);
                before.average * kept + took * (1.0 - kept)
            }
            _ => took,
        };
        Self { average, at: now }
    }

    /// Returns the current estimate. It decays with time, so that a slow endpoint is tried again.
    pub fn now(self, now: Instant, decay: Duration) -> Duration {
        Duration::from_nanos((self.average * self.kept(now, decay)) as u64)
    }

    /// Returns the remaining weight of the average, from 0 to 1.
    fn kept(self, now: Instant, decay: Duration) -> f64 {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        (-passed / decay.as_secs_f64().max(f64::MIN_POSITIVE)).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_rises_at_once_and_falls_slowly() {
        let (decay, start) = (Duration::from_secs(10), Instant::now());
        let (millis, after) = (Duration::from_millis, |seconds| start + Duration::from_secs(seconds));
        let first = Latency::with(None, millis(10), start, decay);
        assert_eq!(first.now(start, decay), millis(10));
        let slower = Latency::with(Some(first), millis(100), after(1), decay);
        assert_eq!(slower.now(after(1), decay), millis(100));
        // After a tenth of the decay time, the new value has a weight of nearly a tenth.
        let faster = Latency::with(Some(slower), millis(0), after(2), decay).now(after(2), decay);
        assert!(millis(90) < faster && faster < millis(91), "{faster:?}");
        // After one decay time without a measurement, e^-1 remains.
        let left = slower.now(after(11), decay);
        assert!(millis(36) < left && left < millis(37), "{left:?}");
        assert_eq!(slower.now(after(100_000), decay), Duration::ZERO);
        assert_eq!(slower.now(after(2), Duration::ZERO), Duration::ZERO);
    }
}
