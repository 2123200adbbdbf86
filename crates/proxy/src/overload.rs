//! What a worker does when more comes than it can do: it refuses the rest at once, so that those it takes are answered
//! soon and memory does not grow with what waits.
//!
//! The measure is the worker's lag: how long a task that is ready waits until it runs. A request that begins wakes the
//! probe, which goes to the end of the queue as everything does; how long it took to get through is the lag. Probes are
//! made only while many requests are under way, and not often: who has little to do, or nothing, does nothing for this,
//! and a process that was merely not scheduled for a while refuses nobody.

use std::{
    cell::Cell,
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::sync::Notify;
use tracing::warn;

use crate::context::Worker;

/// When a worker has more to do than it can.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Nothing is refused while fewer requests are under way on the worker.
    pub requests: u32,
    /// The lag that is too much.
    pub lag: Duration,
    /// For so long it must have been too much.
    pub lasting: Duration,
}

/// So much that thousands of connections which are busy all the time, each with its share of a worker, are no overload.
impl Default for Limits {
    fn default() -> Self {
        Self { requests: 64, lag: Duration::from_millis(200), lasting: Duration::from_secs(1) }
    }
}

/// Between two probes.
const PAUSE: Duration = Duration::from_millis(10);
/// Probes further apart say nothing about what was between them.
const GAP: Duration = Duration::from_millis(100);
/// So many probes in a row must show too much.
const PROBES: u32 = 3;
/// If it is too much again so soon nothing is waited for.
const AGAIN: Duration = Duration::from_secs(1);
/// What the last probe showed holds no longer than this, or twice the lag, without another.
const HOLDS: Duration = Duration::from_millis(250);
/// A line in the log is followed by another no sooner.
const QUIET: Duration = Duration::from_secs(5);

/// A worker's requests under way, and whether more are taken.
pub(crate) struct Overload {
    limits: Limits,
    under_way: Cell<u32>,
    /// New requests are refused until then.
    refusing: Cell<Instant>,
    /// No probe is made before.
    next: Cell<Instant>,
    /// When the probe was woken.
    woken: Cell<Instant>,
    probe: Notify,
}

/// A request under way, as long as this lives.
pub(crate) struct UnderWay<'a>(&'a Overload);

impl Overload {
    pub(crate) fn new(limits: Limits) -> Self {
        let now = Instant::now();
        Self {
            limits,
            under_way: Cell::new(0),
            refusing: Cell::new(now),
            next: Cell::new(now),
            woken: Cell::new(now),
            probe: Notify::new(),
        }
    }

    /// A request begins. Says whether it is taken; if not, it is to be refused without further work.
    #[inline]
    pub(crate) fn begin(&self, now: Instant) -> (UnderWay<'_>, bool) {
        let under_way = self.under_way.get() + 1;
        self.under_way.set(under_way);
        (UnderWay(self), under_way < self.limits.requests || self.takes(now))
    }

    fn takes(&self, now: Instant) -> bool {
        if now >= self.next.get() {
            // One probe at a time.
            self.next.set(now + AGAIN);
            self.woken.set(now);
            self.probe.notify_one();
        }
        now >= self.refusing.get()
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.under_way.set(self.0.under_way.get() - 1);
    }
}

/// Measures a worker's lag as long as it is polled.
pub(crate) async fn watch(worker: Rc<Worker>) {
    let overload = &worker.overload;
    let limits = overload.limits;
    let (mut judge, mut told) = (Judge::default(), None);
    loop {
        overload.probe.notified().await;
        let now = Instant::now();
        let lag = now.saturating_duration_since(overload.woken.get());
        overload.next.set(now + PAUSE);
        if !judge.refuses(&limits, now, lag) {
            overload.refusing.set(now);
            continue;
        }
        overload.refusing.set(now + HOLDS.max(2 * lag));
        if told.is_none_or(|told| now.saturating_duration_since(told) >= QUIET) {
            told = Some(now);
            warn!(
                "overloaded: a worker has {} requests under way and gets to what is ready after {} ms; until that is below {} ms \
                 it answers new requests with 503. It needs more CPU, or there must be more workers (--concurrency) or replicas",
                overload.under_way.get(),
                lag.as_millis(),
                (limits.lag / 2).as_millis(),
            );
        }
    }
}

/// What follows from lags.
#[derive(Default)]
struct Judge {
    /// The end of the last probe.
    last: Option<Instant>,
    /// How many probes in a row showed too much, and when the first of them ended.
    above: Option<(u32, Instant)>,
    refuses: bool,
    /// When it was last so.
    refused: Option<Instant>,
}

impl Judge {
    /// A probe that took so long has ended now. Says whether requests are to be refused.
    fn refuses(&mut self, limits: &Limits, now: Instant, lag: Duration) -> bool {
        let since = |at: Instant| now.saturating_duration_since(at);
        let in_a_row = self.last.is_some_and(|last| since(last) < lag + GAP);
        self.last = Some(now);
        if lag > limits.lag {
            let (count, first) = self.above.filter(|_| in_a_row).unwrap_or((0, now));
            self.above = Some((count + 1, first));
            let lasting = count + 1 >= PROBES && since(first) >= limits.lasting;
            self.refuses |= lasting || self.refused.is_some_and(|refused| since(refused) < AGAIN);
        } else {
            self.above = None;
            self.refuses &= lag >= limits.lag / 2;
        }
        if self.refuses {
            self.refused = Some(now);
        }
        self.refuses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { requests: 64, lag: Duration::from_millis(50), lasting: Duration::from_millis(200) };

    /// What a judge says of probes, each given by when it ended and how long it took, in milliseconds.
    fn judge(probes: &[(u64, u64)]) -> Vec<bool> {
        let (start, mut judge) = (Instant::now(), Judge::default());
        let ms = Duration::from_millis;
        let probes = probes.iter();
        probes.map(|(at, lag)| judge.refuses(&LIMITS, start + ms(*at), ms(*lag))).collect()
    }

    #[test]
    fn lasting_lag_is_refused_and_a_moments_is_not() {
        let rising = [(60, 60), (140, 70), (220, 70), (300, 70), (380, 70)];
        assert_eq!(judge(&rising), [false, false, false, true, true]);
        // Stopped for seconds, and again: between the two there was time.
        assert_eq!(judge(&[(3_000, 3_000), (3_010, 1), (6_000, 2_990), (6_020, 10)]), [false; 4]);
        assert_eq!(judge(&[(3_000, 3_000), (6_010, 3_000)]), [false; 2]);
        // One good probe and it begins anew.
        assert_eq!(judge(&[(60, 60), (140, 70), (200, 49), (280, 70), (360, 70), (440, 70)]), [false; 6]);
        // Long ago is not in a row.
        assert_eq!(judge(&[(60, 60), (140, 70), (900, 60), (970, 60)]), [false; 4]);
    }

    #[test]
    fn it_is_over_at_half_and_back_at_once() {
        let start = [(60, 60), (140, 70), (220, 70), (300, 70)];
        let after = |more: &[(u64, u64)]| judge(&[&start, more].concat())[start.len()..].to_vec();
        assert_eq!(after(&[(350, 40), (390, 25), (430, 24), (480, 40)]), [true, true, false, false]);
        assert_eq!(after(&[(330, 5), (400, 60)]), [false, true]);
        assert_eq!(after(&[(330, 5), (1_500, 60)]), [false, false]);
    }

    #[test]
    fn nothing_is_refused_while_little_is_under_way() {
        let overload = Overload::new(Limits { requests: 3, ..Limits::default() });
        let now = Instant::now();
        overload.refusing.set(now + HOLDS);
        let (first, taken) = overload.begin(now);
        assert!(taken);
        let second = overload.begin(now);
        assert!(second.1);
        assert!(!overload.begin(now).1);
        drop(first);
        assert!(overload.begin(now).1, "what was refused is no longer under way");
        let third = overload.begin(now);
        assert!(third.1);
        assert!(!overload.begin(now).1);
        assert!(overload.begin(now + HOLDS).1, "no probe came to say that it is still so");
    }
}
