//! How many refusals are recorded, so that callers cannot fill a disk with them.

use std::time::Instant;

/// Records a second.
const RATE: f64 = 10.0;
/// Records at once.
const BURST: f64 = 100.0;

/// A token bucket that counts what it held back.
pub(super) struct Bucket {
    tokens: f64,
    since: Option<Instant>,
    suppressed: u64,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { tokens: BURST, since: None, suppressed: 0 }
    }
}

impl Bucket {
    /// Returns how many were held back since the last one; `None` if this one is, too.
    pub(super) fn take(&mut self, now: Instant) -> Option<u64> {
        let elapsed = self.since.map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
        self.since = Some(now);
        self.tokens = (self.tokens + elapsed * RATE).min(BURST);
        if self.tokens < 1.0 {
            self.suppressed += 1;
            return None;
        }
        self.tokens -= 1.0;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_flood_is_held_back_and_counted() {
        let mut bucket = Bucket::default();
        let start = Instant::now();
        let taken = (0..1000).filter(|_| bucket.take(start) == Some(0)).count();
        assert_eq!(taken, 100);
        assert_eq!(bucket.take(start + Duration::from_millis(50)), None);
        assert_eq!(bucket.take(start + Duration::from_millis(150)), Some(901));
        assert_eq!(bucket.take(start + Duration::from_millis(150)), None);
        assert_eq!(bucket.take(start + Duration::from_secs(1)), Some(1));
    }
}
