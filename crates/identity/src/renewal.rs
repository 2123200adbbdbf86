//! When to renew a certificate, and when to try again after that failed.

use std::time::{Duration, SystemTime};

/// The shortest pause between attempts.
const MIN_RETRY: Duration = Duration::from_millis(500);
/// The longest pause between attempts.
const MAX_RETRY: Duration = Duration::from_secs(30);
/// How often the wall clock is read. Timers of the runtime stand still while the machine is suspended, and do not see the
/// clock being set.
const LOOK: Duration = Duration::from_secs(10);

/// When a certificate is to be renewed, by the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// Due from then on.
    pub(crate) at: SystemTime,
    /// Due before then, too: the clock was set back to a time at which the certificate is not valid.
    pub(crate) valid_from: SystemTime,
}

impl Renewal {
    /// Plans the renewal of a certificate that was obtained at `obtained`: when 50 to 70 % of its life have gone by. `jitter`,
    /// from 0 to 1, says where in between, so that certificates of one hour do not all come back in one second.
    ///
    /// Its life counts from when it was obtained: authorities date certificates back, Istio's by two minutes, and a
    /// certificate of one minute would else be due at once.
    pub(crate) fn plan(
        not_before: SystemTime,
        not_after: SystemTime,
        obtained: SystemTime,
        jitter: f64,
    ) -> Self {
        let start = not_before.max(obtained);
        let lifetime = not_after.duration_since(start).unwrap_or_default();
        // An authority whose clock is ahead of ours would be asked again and again.
        let valid_from = not_before.min(obtained);
        Self { at: start + lifetime.mul_f64(0.5 + 0.2 * jitter.clamp(0.0, 1.0)), valid_from }
    }

    /// Time from `now` until the renewal; zero when it is due.
    pub fn left(&self, now: SystemTime) -> Duration {
        if now < self.valid_from { Duration::ZERO } else { self.at.duration_since(now).unwrap_or_default() }
    }

    /// Waits until the renewal is due by `clock`, at least a second.
    pub async fn wait(&self, clock: impl Fn() -> SystemTime) {
        let mut pause = self.left(clock()).clamp(Duration::from_secs(1), LOOK);
        while !pause.is_zero() {
            tokio::time::sleep(pause).await;
            pause = self.left(clock()).min(LOOK);
        }
    }
}

/// How long to wait after `failures` failed attempts in a row: doubling from half a second to half a minute, of
/// which `jitter`, from 0 to 1, takes away up to half.
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
    fn renewal_is_due_at_half_to_seven_tenths() {
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
    fn a_certificate_that_is_not_valid_by_a_clock_set_back_is_due() {
        let renewal = Renewal::plan(at(1000), at(2000), at(1100), 0.0);
        assert_eq!(renewal.left(at(999)), Duration::ZERO);
        let ahead = Renewal::plan(at(1000), at(2000), at(900), 0.0);
        assert_eq!(ahead.left(at(900)), Duration::from_secs(600), "the authority's clock is ahead of ours");
    }

    /// Waits for a renewal that is due after 5,000 s, while the wall clock is changed as `change` says after 105 s of the
    /// runtime's clock; returns how long that took by the runtime's clock.
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
        // A suspend, or a step forward: renewed at the next look.
        assert_eq!(waited(|clock| clock + secs(20_000)).await, secs(110));
        // A step back within the certificate's validity.
        assert_eq!(waited(|clock| clock - secs(50)).await, secs(5050));
        // A step back to before it.
        assert_eq!(waited(|clock| clock - secs(90_000)).await, secs(110));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_due_at_once_is_not_renewed_without_a_pause() {
        let renewal = Renewal::plan(at(1000), at(1000), at(1000), 0.0);
        let start = Instant::now();
        renewal.wait(|| at(1000)).await;
        assert_eq!(start.elapsed(), Duration::from_secs(1));
    }

    #[test]
    fn attempts_back_off() {
        assert_eq!(retry(1, 0.0), Duration::from_millis(500));
        assert_eq!(retry(3, 0.0), Duration::from_secs(2));
        assert_eq!(retry(u32::MAX, 0.0), MAX_RETRY);
        assert_eq!(retry(u32::MAX, 1.0), MAX_RETRY / 2);
    }
}
