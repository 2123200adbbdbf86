//! How long an endpoint takes, as a moving average that follows what is slower at once and what is faster slowly (peak
//! EWMA, as in Finagle).

use std::time::{Duration, Instant};

/// What one worker has seen of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// In nanoseconds.
    average: f64,
    at: Instant,
}

impl Latency {
    /// With what has been seen last.
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

    /// What it is taken for now: what was seen counts less and less, so that who was slow is tried again.
    pub fn now(self, now: Instant, decay: Duration) -> Duration {
        Duration::from_nanos((self.average * self.kept(now, decay)) as u64)
    }

    /// How much of it still counts, from 0 to 1.
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
        // A tenth of the decay later a tenth, nearly, is what is new.
        let faster = Latency::with(Some(slower), millis(0), after(2), decay).now(after(2), decay);
        assert!(millis(90) < faster && faster < millis(91), "{faster:?}");
        // Nothing seen for the length of the decay: e^-1 of it is left.
        let left = slower.now(after(11), decay);
        assert!(millis(36) < left && left < millis(37), "{left:?}");
        assert_eq!(slower.now(after(100_000), decay), Duration::ZERO);
        assert_eq!(slower.now(after(2), Duration::ZERO), Duration::ZERO);
    }
}
