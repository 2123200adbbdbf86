//! When to renew a certificate, and when to try again after that failed.

use std::time::{Duration, SystemTime};

/// The shortest pause between attempts.
const MIN_RETRY: Duration = Duration::from_millis(500);
/// The longest pause between attempts.
const MAX_RETRY: Duration = Duration::from_secs(30);

/// How long to wait, from `now`, before renewing a certificate of this lifetime.
///
/// That is when 50 to 70 % of it have gone by; `jitter`, from 0 to 1, says where in between, so that
/// certificates of one hour do not all come back in one second. Zero when the time is past.
pub fn due(not_before: SystemTime, not_after: SystemTime, now: SystemTime, jitter: f64) -> Duration {
    let lifetime = not_after.duration_since(not_before).unwrap_or_default();
    let at = not_before + lifetime.mul_f64(0.5 + 0.2 * jitter.clamp(0.0, 1.0));
    at.duration_since(now).unwrap_or_default()
}

/// How long to wait after `failures` failed attempts in a row: doubling from half a second to half a minute, of
/// which `jitter`, from 0 to 1, takes away up to half.
pub fn retry(failures: u32, jitter: f64) -> Duration {
    let full = MIN_RETRY.saturating_mul(1 << failures.clamp(1, 16).saturating_sub(1)).min(MAX_RETRY);
    full.mul_f64(1.0 - 0.5 * jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn renewal_is_due_at_half_to_two_thirds() {
        let at = |secs| UNIX_EPOCH + Duration::from_secs(secs);
        assert_eq!(due(at(1000), at(2000), at(1000), 0.0), Duration::from_secs(500));
        assert_eq!(due(at(1000), at(2000), at(1000), 1.0), Duration::from_secs(700));
        assert_eq!(due(at(1000), at(2000), at(1900), 0.5), Duration::ZERO);
        assert_eq!(due(at(2000), at(1000), at(3000), 0.5), Duration::ZERO);
    }

    #[test]
    fn attempts_back_off() {
        assert_eq!(retry(1, 0.0), Duration::from_millis(500));
        assert_eq!(retry(3, 0.0), Duration::from_secs(2));
        assert_eq!(retry(u32::MAX, 0.0), MAX_RETRY);
        assert_eq!(retry(u32::MAX, 1.0), MAX_RETRY / 2);
    }
}
