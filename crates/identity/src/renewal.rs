//! Times of certificate renewals, and of retries after failures.

use std::time::{Duration, SystemTime};

/// Minimum pause between attempts.
const MIN_RETRY: Duration = Duration::from_millis(500);
/// Maximum pause between attempts.
const MAX_RETRY: Duration = Duration::from_secs(30);
/// Interval at which the wall clock is read. Timers of the runtime stop while the machine is suspended, and are
/// not affected when the clock is set.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Time of a certificate renewal by the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// The renewal is due from this time on.
    pub(crate) at: SystemTime,
    /// The renewal is also due before this time: the clock was set back to a time at which the certificate is
    /// not valid.
    pub(crate) valid_from: SystemTime,
}

impl Renewal {
    /// Plans the renewal of a certificate that was obtained at `obtained`: after 50 to 70 % of its lifetime.
    /// `jitter`, from 0 to 1, selects the time in this range, so that certificates that were issued at the same
    /// time are not all renewed at the same time.
    ///
    /// The lifetime counts from `obtained`, because authorities backdate certificates, Istio's by two minutes.
    /// The renewal of a certificate with a lifetime of one minute would otherwise be due at once.
    pub(crate) fn plan(
        not_before: SystemTime,
        not_after: SystemTime,
        obtained: SystemTime,
        jitter: f64,
    ) -> Self {
        let start = not_before.max(obtained);
        let lifetime = not_after.duration_since(start).unwrap_or_default();
        // Otherwise an authority whose clock is ahead would receive requests continuously.
        let valid_from = not_before.min(obtained);
        Self { at: start + lifetime.mul_f64(0.5 + 0.2 * jitter.clamp(0.0, 1.0)), valid_from }
    }

    /// Returns the time from `now` until the renewal; zero when it is due.
    pub fn left(&self, now: SystemTime) -> Duration {
        if now < self.valid_from { Duration::ZERO } else { self.at.duration_since(now).unwrap_or_default() }
    }

    /// Waits until the renewal is due by `clock`, but at least one second.
    pub async fn wait(&self, clock: impl Fn() -> SystemTime) {
        let mut pause = self.left(clock()).clamp(Duration::from_secs(1), CHECK_INTERVAL);
        while !pause.is_zero() {
            tokio::time::sleep(pause).await;
            pause = self.left(clock()).min(CHECK_INTERVAL);
        }
    }
}

/// Returns the pause after `failures` consecutive failures: it doubles from 0.5 s to 30 s. `jitter`, from 0 to
/// 1, shortens it by up to half.
pub fn retry(failures: u32, jitter: f64) -> Duration {
    let full = MIN_RETRY.saturating_mul(1 << failures.clamp(1, 16).saturating_sub(1)).min(MAX_RETRY);
    full.mul_f64(1.0 - 0.5 * jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, time::UNIX_EPOCH};

    use tokio::time::{Instant, sleep};

    use super::*;

    fn at(secs: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(secs)
    }

    #[test]
    fn renewal_is_due_after_50_to_70_percent_of_the_lifetime() {
        let left = |jitter, now| Renewal::plan(at(1000), at(2000), at(1000), jitter).left(at(now));
        assert_eq!(left(0.0, 1000), Duration::from_secs(500));
        assert_eq!(left(1.0, 1000), Duration::from_secs(700));
        assert_eq!(left(0.5, 1900), Duration::ZERO);
        let inside_out = Renewal::plan(at(2000), at(1000), at(3000), 0.5);
        assert_eq!(inside_out.left(at(3000)), Duration::ZERO);
        let late = Renewal::plan(at(1000), at(2000), at(1900), 0.0);
        assert_eq!(late.left(at(1900)), Duration::from_secs(50), "its life counts from when it was obtained");
    }

    #[test]
    fn a_certificate_is_due_if_the_clock_is_set_back_before_its_validity() {
        let renewal = Renewal::plan(at(1000), at(2000), at(1100), 0.0);
        assert_eq!(renewal.left(at(999)), Duration::ZERO);
        let ahead = Renewal::plan(at(1000), at(2000), at(900), 0.0);
        assert_eq!(ahead.left(at(900)), Duration::from_secs(600), "the authority's clock is ahead of ours");
    }

    /// Waits for a renewal that is due after 5,000 s. After 105 s of the runtime's clock, `change` sets the
    /// wall clock. Returns the time waited by the runtime's clock.
    async fn waited(change: impl Fn(SystemTime) -> SystemTime) -> Duration {
        let renewal = Renewal::plan(at(100_000), at(110_000), at(100_000), 0.0);
        let (start, skew) = (Instant::now(), Cell::new(None));
        let clock = || skew.get().unwrap_or(at(100_000)) + start.elapsed();
        let set = async {
            sleep(Duration::from_secs(105)).await;
            skew.set(Some(change(at(100_000))));
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = renewal.wait(clock) => {}
            () = set => {}
        }
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn renewal_follows_the_wall_clock() {
        let secs = Duration::from_secs;
        assert_eq!(waited(|clock| clock).await, secs(5000));
        // A suspend or a step forward: due at the next check.
        assert_eq!(waited(|clock| clock + secs(20_000)).await, secs(110));
        // A step back within the certificate's validity.
        assert_eq!(waited(|clock| clock - secs(50)).await, secs(5050));
        // A step back to before its validity.
        assert_eq!(waited(|clock| clock - secs(90_000)).await, secs(110));
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_that_is_due_waits_at_least_one_second() {
        let renewal = Renewal::plan(at(1000), at(1000), at(1000), 0.0);
        let start = Instant::now();
        renewal.wait(|| at(1000)).await;
        assert_eq!(start.elapsed(), Duration::from_secs(1));
    }

    #[test]
    fn the_pause_between_retries_doubles() {
        assert_eq!(retry(1, 0.0), Duration::from_millis(500));
        assert_eq!(retry(3, 0.0), Duration::from_secs(2));
        assert_eq!(retry(u32::MAX, 0.0), MAX_RETRY);
        assert_eq!(retry(u32::MAX, 1.0), MAX_RETRY / 2);
    }
}
