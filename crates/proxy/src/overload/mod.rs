//! What a worker does when more comes than it can do: it lets in a few requests at a time, takes hardly any connections, and
//! if that is not enough refuses requests, so that those it takes are answered soon and memory does not grow with what
//! waits.
//!
//! The measure is the worker's lag: how long what has come waits until it begins. A request or a connection that
//! begins wakes the probe, which waits for its turn as everything does; how long it took to get through is the
//! lag. Probes are made only while much is under way, and not often: who has little to do, or nothing, does nothing for
//! this, and a process that was merely not scheduled for a while refuses nobody.
//!
//! Connections that are not taken cost next to nothing: the kernel keeps them, and beyond its limit lets clients try
//! again. Whose client has given up meanwhile is not served: after a surge those are thousands, and to serve them all would
//! keep the worker as busy as the surge did. A request that is refused costs half of one that is answered, so it comes last.

pub(crate) mod admission;
pub(crate) mod drain;
pub(crate) mod limit_log;
pub mod pressure;

use std::{
    cell::Cell,
    future::poll_fn,
    time::{Duration, Instant},
};

use tokio::sync::Notify;
use tracing::warn;

use crate::overload::admission::Turns;

/// What is too much for a worker.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Nothing begins to wait or is refused while fewer requests, and connections that begin, are under way on the worker.
    pub under_way: u32,
    /// With more lag than this hardly any connections are taken, until it is below half of it, and requests whose clients
    /// have gone are dropped.
    pub late: Duration,
    /// With more lag than this requests are refused, until it is below half of it, if it was so for `lasting`.
    pub overloaded: Duration,
    /// Requests are refused if there was too much lag for so long.
    pub lasting: Duration,
    /// What a probe showed holds no longer than this, or twice the lag, without another.
    pub holds: Duration,
    /// So many streams more than it lets end well may a client of HTTP/2 reset within 30 seconds.
    pub resets: u32,
    /// So many series of Istio's metrics are kept, of requests and of connections each; what would be more is counted
    /// as dropped.
    pub series: usize,
    /// How long connections and requests may go on that a new configuration would not admit.
    pub revoked_drain: Duration,
    /// Whether connections end with the certificate that the client has shown.
    pub end_with_certificate: bool,
}

/// So much that thousands of connections which are busy all the time, each with its share of a worker, are no overload.
impl Default for Limits {
    fn default() -> Self {
        Self {
            under_way: 64,
            late: Duration::from_millis(100),
            overloaded: Duration::from_millis(400),
            lasting: Duration::from_secs(1),
            holds: Duration::from_millis(250),
            resets: 200,
            series: 10_000,
            revoked_drain: Duration::from_secs(5),
            end_with_certificate: false,
        }
    }
}

/// So many connections are taken from one probe to the next, as what they bring must show first.
const MANY: u32 = 64;
/// So many while much is under way: after a surge most of those that wait have been given up, and even that takes time.
const SOME: u32 = 16;
/// So many while there is too much lag: nobody shall wait for as long as others keep the worker busy.
const FEW: u32 = 1;
/// Between two probes.
const PAUSE: Duration = Duration::from_millis(2);
/// Probes further apart say nothing about what was between them.
const GAP: Duration = Duration::from_millis(100);
/// So many probes in a row must show too much.
const PROBES: u32 = 3;
/// If it is too much again so soon nothing is waited for.
const AGAIN: Duration = Duration::from_secs(1);
/// A line in the log is followed by another no sooner.
const QUIET: Duration = Duration::from_secs(5);

/// What a worker has under way, and whether it takes more.
pub(crate) struct Overload {
    limits: Limits,
    under_way: Cell<u32>,
    /// So many requests under way are many: [`Limits::under_way`], or none while all requests are refused.
    many: Cell<u32>,
    /// All new requests are refused, whatever the lag.
    refuses_all: Cell<bool>,
    /// There is too much lag until then, unless a probe says more.
    late: Cell<Instant>,
    /// So many more connections are taken, unless a probe says more.
    more: Cell<u32>,
    /// New requests are refused until then.
    refusing: Cell<Instant>,
    /// No probe is made before.
    next: Cell<Instant>,
    /// When the probe under way was woken.
    woken: Cell<Option<Instant>>,
    probe: Notify,
    /// Requests that wait until they begin.
    pub(crate) turns: Turns,
}

/// What to do with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Accept,
    /// It may have waited so long that nobody waits for its answer.
    AcceptIfConnected,
    /// It is to be refused without further work.
    Reject,
}

/// A request under way, or a connection that begins, as long as this lives.
pub(crate) struct InFlight<'a>(&'a Overload);

impl Overload {
    pub(crate) fn new(limits: Limits) -> Self {
        let now = Instant::now();
        Self {
            limits,
            under_way: Cell::new(0),
            many: Cell::new(limits.under_way),
            refuses_all: Cell::new(false),
            late: Cell::new(now),
            more: Cell::new(MANY),
            refusing: Cell::new(now),
            next: Cell::new(now),
            woken: Cell::new(None),
            probe: Notify::new(),
            turns: Turns::default(),
        }
    }

    /// A request or a connection begins. Says of a request whether it is welcome.
    #[inline]
    pub(crate) fn begin(&self, now: Instant) -> (InFlight<'_>, Admission) {
        self.under_way.set(self.under_way.get() + 1);
        let welcome = if self.is_busy() { self.consider(now) } else { Admission::Accept };
        (InFlight(self), welcome)
    }

    /// Refuses all requests that come, or no longer: the process runs short of memory.
    pub(crate) fn refuse_all(&self, refuse: bool) {
        self.refuses_all.set(refuse);
        self.many.set(if refuse { 0 } else { self.limits.under_way });
    }

    fn consider(&self, now: Instant) -> Admission {
        self.wake(now);
        if self.refuses_all.get() || now < self.refusing.get() {
            Admission::Reject
        } else if self.is_late(now) {
            Admission::AcceptIfConnected
        } else {
            Admission::Accept
        }
    }

    /// Whether one more connection is taken.
    pub(crate) fn takes(&self, now: Instant) -> bool {
        let more = self.more.get();
        // In time, so that connections that come one after the other never wait.
        if more <= SOME / 2 {
            self.wake(now);
        }
        self.more.set(more.saturating_sub(1));
        more > 0
    }

    /// A probe that has not got through yet says so, too.
    fn is_late(&self, now: Instant) -> bool {
        let waits = |woken| now.saturating_duration_since(woken) > self.limits.late;
        self.is_busy() && (now < self.late.get() || self.woken.get().is_some_and(waits))
    }

    /// Whether what comes has to wait for its turn.
    pub(crate) fn is_busy(&self) -> bool {
        self.under_way.get() >= self.many.get() || !self.turns.is_empty()
    }

    /// Waits for a turn, if there is much to do; says whether it did.
    pub(crate) async fn turn(&self) -> bool {
        let busy = self.is_busy();
        if busy {
            let mut place = None;
            poll_fn(|cx| self.turns.poll(&mut place, cx)).await;
        }
        busy
    }

    /// Wakes the probe, if it is time for it.
    fn wake(&self, now: Instant) {
        if self.woken.get().is_none() && now >= self.next.get() {
            self.woken.set(Some(now));
            self.probe.notify_one();
        }
    }

    /// A probe has ended now that took so long.
    fn probed(&self, judge: &mut Judge, now: Instant, lag: Duration) {
        self.woken.set(None);
        self.next.set(now + PAUSE);
        let until = now + self.limits.holds.max(2 * lag);
        let most = if now < self.late.get() { self.limits.late / 2 } else { self.limits.late };
        let late = lag > most;
        self.late.set(if late { until } else { now });
        self.more.set(match (self.is_busy(), late) {
            (false, _) => MANY,
            (true, false) => SOME,
            (true, true) => FEW,
        });
        self.refusing.set(if judge.refuses(&self.limits, now, lag) { until } else { now });
    }

    /// Measures the worker's lag for as long as it is polled.
    pub(crate) async fn watch(&self) {
        let mut judge = Judge::default();
        let (mut since, mut told) = (None, None);
        loop {
            self.probe.notified().await;
            self.turn().await;
            let now = Instant::now();
            let lag = self.woken.get().map_or(Duration::ZERO, |woken| now.saturating_duration_since(woken));
            self.probed(&mut judge, now, lag);
            if !self.is_late(now) {
                since = None;
                continue;
            }
            // A moment's lag need not be told.
            let lasting = now.saturating_duration_since(*since.get_or_insert(now)) >= self.limits.lasting;
            if lasting && told.is_none_or(|told| now.saturating_duration_since(told) >= QUIET) {
                told = Some(now);
                warn!(
                    "overloaded: a worker has {} requests under way and gets to what is ready after {} ms; until it is quicker \
                     it {}. It needs more CPU, or there must be more workers (--concurrency) or replicas",
                    self.under_way.get(),
                    lag.as_millis(),
                    if judge.refuses {
                        "refuses new requests, and connections wait"
                    } else {
                        "lets new connections wait"
                    },
                );
            }
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.under_way.set(self.0.under_way.get() - 1);
        self.0.turns.ended();
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
        if lag > limits.overloaded {
            let (count, first) = self.above.filter(|_| in_a_row).unwrap_or((0, now));
            self.above = Some((count + 1, first));
            let lasting = count + 1 >= PROBES && since(first) >= limits.lasting;
            self.refuses |= lasting || self.refused.is_some_and(|refused| since(refused) < AGAIN);
        } else {
            self.above = None;
            self.refuses &= lag >= limits.overloaded / 2;
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

    const LIMITS: Limits = Limits {
        under_way: 3,
        late: Duration::from_millis(20),
        overloaded: Duration::from_millis(50),
        lasting: Duration::from_millis(200),
        holds: Duration::from_millis(250),
        resets: 200,
        series: 0,
        revoked_drain: Duration::ZERO,
        end_with_certificate: false,
    };

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
        let overload = Overload::new(LIMITS);
        let now = Instant::now();
        overload.refusing.set(now + LIMITS.holds);
        let first = overload.begin(now);
        let second = overload.begin(now);
        assert_eq!(
            (first.1, second.1, overload.begin(now).1),
            (Admission::Accept, Admission::Accept, Admission::Reject)
        );
        drop(first);
        assert_eq!(overload.begin(now).1, Admission::Accept, "what was refused is no longer under way");
        let third = overload.begin(now);
        assert_eq!((third.1, overload.begin(now).1), (Admission::Accept, Admission::Reject));
        assert_eq!(
            overload.begin(now + LIMITS.holds).1,
            Admission::AcceptIfConnected,
            "no probe came to say that it is still so"
        );
    }

    #[test]
    fn all_requests_are_refused_while_memory_is_short() {
        let overload = Overload::new(LIMITS);
        overload.refuse_all(true);
        assert_eq!(overload.begin(Instant::now()).1, Admission::Reject);
        overload.refuse_all(false);
        assert_eq!(overload.begin(Instant::now()).1, Admission::Accept);
    }

    #[test]
    fn while_there_is_lag_few_connections_are_taken_and_requests_are_looked_at() {
        let (overload, mut judge) = (Overload::new(LIMITS), Judge::default());
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let taken = |now: Instant| (0..=MANY).take_while(|_| overload.takes(now)).count();
        let mut after = |at: u64, lag: u64| {
            let now = start + ms(at);
            overload.probed(&mut judge, now, ms(lag));
            (taken(now), overload.begin(now).1)
        };
        let under_way = [overload.begin(start), overload.begin(start), overload.begin(start)];
        let (open, shut) = ((SOME as usize, Admission::Accept), (FEW as usize, Admission::AcceptIfConnected));
        assert_eq!(after(10, 20), open);
        assert_eq!(after(40, 21), shut);
        assert_eq!(after(80, 11), shut, "above half of it");
        assert_eq!(after(120, 10), open);
        assert_eq!(after(140, 15), open, "above half of it, but it was below");
        assert_eq!(after(200, 25), shut);
        assert_eq!(after(240, 25), shut);
        drop(under_way);
        assert_eq!(after(280, 25), (MANY as usize, Admission::Accept), "nothing is under way");
    }

    #[test]
    fn a_probe_that_does_not_get_through_tells_of_lag_too() {
        let (overload, mut judge) = (Overload::new(LIMITS), Judge::default());
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let _under_way = [overload.begin(start), overload.begin(start), overload.begin(start)];
        assert_eq!(overload.begin(start + ms(20)).1, Admission::Accept);
        assert_eq!(overload.begin(start + ms(21)).1, Admission::AcceptIfConnected);
        overload.probed(&mut judge, start + ms(22), ms(22));
        assert_eq!(overload.begin(start + ms(22)).1, Admission::AcceptIfConnected);
        // The last one woke the next probe.
        overload.probed(&mut judge, start + ms(30), ms(8));
        assert_eq!(overload.begin(start + ms(30)).1, Admission::Accept);
    }
}
