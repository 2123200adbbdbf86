//! Load shedding of a worker. An overloaded worker starts a few requests at a time, accepts hardly any connections, and
//! at last refuses requests. Admitted requests are then answered soon, and memory does not grow with the queue.
//!
//! The measure is the worker's lag: the time from the arrival of a request to its start. A request or a connection that
//! begins wakes the probe, a task that waits for its turn like any other. Its waiting time is the lag. Probes run only
//! while many requests are in flight, and not often. An idle worker pays nothing for them, and a process that was not
//! scheduled for a while refuses no request.
//!
//! A connection that is not accepted costs next to nothing: the kernel queues it, and makes clients retry when its
//! queue is full. A connection or request whose client has disconnected is not served. After a surge there are
//! thousands of them, and serving them would prolong the surge. Refusing a request costs half as much as answering it,
//! so this is the last resort.

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

use crate::overload::admission::AdmissionQueue;

/// Thresholds of load shedding, and other limits of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Number of requests and new connections in flight below which load shedding is off. Default: 64.
    pub under_way: u32,
    /// Lag above which hardly any connections are accepted and requests of closed connections are dropped, until the
    /// lag is below half of it. Default: 100 ms.
    pub late: Duration,
    /// Lag above which requests are refused once it has lasted for `lag_duration`, until the lag is below half of it.
    /// Default: 400 ms.
    pub overloaded: Duration,
    /// Time for which the lag must be above `overloaded` before requests are refused. Default: 1 s.
    pub lag_duration: Duration,
    /// Time for which the result of a probe is valid; twice the lag, if that is longer. Default: 250 ms.
    pub probe_validity: Duration,
    /// Maximum excess of streams that an HTTP/2 client resets over those that it lets complete, within 30 seconds.
    /// Default: 200.
    pub resets: u32,
    /// Maximum number of series of Istio's metrics, for requests and for connections each. Others are counted as
    /// dropped. Default: 10,000.
    pub series: usize,
    /// Drain time of connections and requests that a new configuration does not admit. Default: 5 s.
    pub revoked_drain: Duration,
    /// Whether a connection ends when the client's certificate expires. Default: false.
    pub end_with_certificate: bool,
}

/// The defaults tolerate thousands of connections that are always busy, each with its share of a worker.
impl Default for Limits {
    fn default() -> Self {
        Self {
            under_way: 64,
            late: Duration::from_millis(100),
            overloaded: Duration::from_millis(400),
            lag_duration: Duration::from_secs(1),
            probe_validity: Duration::from_millis(250),
            resets: 200,
            series: 10_000,
            revoked_drain: Duration::from_secs(5),
            end_with_certificate: false,
        }
    }
}

/// Connections accepted per probe, so that the load of new connections shows before the next ones.
const ACCEPTED: u32 = 64;
/// Connections accepted per probe while at least [`Limits::under_way`] requests are in flight. After a surge most
/// queued connections have been closed by their clients, and finding that out takes time.
const ACCEPTED_BUSY: u32 = 16;
/// Connections accepted per probe while the lag is above [`Limits::late`]; not 0, so that no connection waits forever.
const ACCEPTED_LATE: u32 = 1;
/// Minimum time between two probes.
const PROBE_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum time between two consecutive probes. Probes further apart say nothing about the time between them.
const MAX_PROBE_GAP: Duration = Duration::from_millis(100);
/// Number of consecutive probes above [`Limits::overloaded`] before requests are refused.
const MIN_PROBES: u32 = 3;
/// Time after an overload within which a single probe above the threshold begins it again.
const RELAPSE: Duration = Duration::from_secs(1);
/// Minimum time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// The load of a worker, and what it admits.
pub(crate) struct Overload {
    limits: Limits,
    /// Requests and new connections in flight.
    in_flight: Cell<u32>,
    /// Number in flight from which the worker counts as busy: [`Limits::under_way`], or 0 while all requests are
    /// refused.
    busy_from: Cell<u32>,
    /// Whether all new requests are refused, because the process runs short of memory.
    refuses_all: Cell<bool>,
    /// Time until which the lag counts as above [`Limits::late`], unless another probe ends first.
    late_until: Cell<Instant>,
    /// Connections that may be accepted before the next probe ends.
    acceptable: Cell<u32>,
    /// Time until which new requests are refused.
    refusing_until: Cell<Instant>,
    /// Time of the next probe at the earliest.
    next_probe: Cell<Instant>,
    /// Time at which the current probe was woken.
    woken: Cell<Option<Instant>>,
    probe: Notify,
    /// Queue of requests that have not begun.
    pub(crate) turns: AdmissionQueue,
}

/// The decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Accept,
    /// The request is served if its client is still connected: the lag is high, and the client may have given up.
    AcceptIfConnected,
    /// The request is refused.
    Reject,
}

/// Counts a request, or a connection that begins, as in flight while this lives.
pub(crate) struct InFlight<'a>(&'a Overload);

impl Overload {
    pub(crate) fn new(limits: Limits) -> Self {
        let now = Instant::now();
        Self {
            limits,
            in_flight: Cell::new(0),
            busy_from: Cell::new(limits.under_way),
            refuses_all: Cell::new(false),
            late_until: Cell::new(now),
            acceptable: Cell::new(ACCEPTED),
            refusing_until: Cell::new(now),
            next_probe: Cell::new(now),
            woken: Cell::new(None),
            probe: Notify::new(),
            turns: AdmissionQueue::default(),
        }
    }

    /// Begins a request or a connection. Returns the decision about it, which applies to requests only.
    #[inline]
    pub(crate) fn begin(&self, now: Instant) -> (InFlight<'_>, Admission) {
        self.in_flight.set(self.in_flight.get() + 1);
        let admission = if self.is_busy() { self.decide(now) } else { Admission::Accept };
        (InFlight(self), admission)
    }

    /// Begins or ends refusing all new requests, because the process runs short of memory.
    pub(crate) fn refuse_all(&self, refuse: bool) {
        self.refuses_all.set(refuse);
        self.busy_from.set(if refuse { 0 } else { self.limits.under_way });
    }

    fn decide(&self, now: Instant) -> Admission {
        self.wake_probe(now);
        if self.refuses_all.get() || now < self.refusing_until.get() {
            Admission::Reject
        } else if self.is_late(now) {
            Admission::AcceptIfConnected
        } else {
            Admission::Accept
        }
    }

    /// Returns whether one more connection is accepted, and counts it.
    pub(crate) fn accepts_connection(&self, now: Instant) -> bool {
        let acceptable = self.acceptable.get();
        // The probe is woken before the number reaches 0, so that sequential connections never wait.
        if acceptable <= ACCEPTED_BUSY / 2 {
            self.wake_probe(now);
        }
        self.acceptable.set(acceptable.saturating_sub(1));
        acceptable > 0
    }

    /// Returns whether the lag is above [`Limits::late`], by the last probe or by the time that the current
    /// probe has waited so far.
    fn is_late(&self, now: Instant) -> bool {
        let is_overdue = |woken| now.saturating_duration_since(woken) > self.limits.late;
        self.is_busy() && (now < self.late_until.get() || self.woken.get().is_some_and(is_overdue))
    }

    /// Returns whether new requests have to wait for their turn.
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight.get() >= self.busy_from.get() || !self.turns.is_empty()
    }

    /// Waits for a turn if the worker is busy. Returns whether it was.
    pub(crate) async fn wait_for_turn(&self) -> bool {
        let busy = self.is_busy();
        if busy {
            let mut slot = None;
            poll_fn(|cx| self.turns.poll(&mut slot, cx)).await;
        }
        busy
    }

    /// Wakes the probe if none is under way and [`PROBE_INTERVAL`] has passed.
    fn wake_probe(&self, now: Instant) {
        if self.woken.get().is_none() && now >= self.next_probe.get() {
            self.woken.set(Some(now));
            self.probe.notify_one();
        }
    }

    /// Processes the result of a probe that has ended at `now`.
    fn probe_ended(&self, history: &mut LagHistory, now: Instant, lag: Duration) {
        self.woken.set(None);
        self.next_probe.set(now + PROBE_INTERVAL);
        let until = now + self.limits.probe_validity.max(2 * lag);
        let threshold = if now < self.late_until.get() { self.limits.late / 2 } else { self.limits.late };
        let late = lag > threshold;
        self.late_until.set(if late { until } else { now });
        self.acceptable.set(match (self.is_busy(), late) {
            (false, _) => ACCEPTED,
            (true, false) => ACCEPTED_BUSY,
            (true, true) => ACCEPTED_LATE,
        });
        self.refusing_until.set(if history.is_overload(&self.limits, now, lag) { until } else { now });
    }

    /// Measures the worker's lag while it is polled.
    pub(crate) async fn watch(&self) {
        let mut history = LagHistory::default();
        let (mut since, mut logged) = (None, None);
        loop {
            self.probe.notified().await;
            self.wait_for_turn().await;
            let now = Instant::now();
            let lag = self.woken.get().map_or(Duration::ZERO, |woken| now.saturating_duration_since(woken));
            self.probe_ended(&mut history, now, lag);
            if !self.is_late(now) {
                since = None;
                continue;
            }
            // Short lag is not logged.
            let is_lasting =
                now.saturating_duration_since(*since.get_or_insert(now)) >= self.limits.lag_duration;
            if is_lasting && logged.is_none_or(|at| now.saturating_duration_since(at) >= LOG_INTERVAL) {
                logged = Some(now);
                warn!(
                    "overloaded: a worker has {} requests in flight and a lag of {} ms; until the lag is lower the \
                     worker {}. Add CPU, workers (--concurrency) or replicas",
                    self.in_flight.get(),
                    lag.as_millis(),
                    if history.is_overloaded {
                        "refuses new requests and delays new connections"
                    } else {
                        "delays new connections"
                    },
                );
            }
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
        self.0.turns.ended();
    }
}

/// The recent lag, which decides whether requests are refused.
#[derive(Default)]
struct LagHistory {
    /// The end of the last probe.
    last: Option<Instant>,
    /// Number of consecutive probes above [`Limits::overloaded`], and the end of the first of them.
    above: Option<(u32, Instant)>,
    is_overloaded: bool,
    /// Time of the last probe that found the worker overloaded.
    last_overload: Option<Instant>,
}

impl LagHistory {
    /// Adds a probe that has ended at `now`. Returns whether requests are to be refused.
    fn is_overload(&mut self, limits: &Limits, now: Instant, lag: Duration) -> bool {
        let since = |at: Instant| now.saturating_duration_since(at);
        let in_a_row = self.last.is_some_and(|last| since(last) < lag + MAX_PROBE_GAP);
        self.last = Some(now);
        if lag > limits.overloaded {
            let (count, first) = self.above.filter(|_| in_a_row).unwrap_or((0, now));
            self.above = Some((count + 1, first));
            let lasting = count + 1 >= MIN_PROBES && since(first) >= limits.lag_duration;
            self.is_overloaded |= lasting || self.last_overload.is_some_and(|at| since(at) < RELAPSE);
        } else {
            self.above = None;
            self.is_overloaded &= lag >= limits.overloaded / 2;
        }
        if self.is_overloaded {
            self.last_overload = Some(now);
        }
        self.is_overloaded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        under_way: 3,
        late: Duration::from_millis(20),
        overloaded: Duration::from_millis(50),
        lag_duration: Duration::from_millis(200),
        probe_validity: Duration::from_millis(250),
        resets: 200,
        series: 0,
        revoked_drain: Duration::ZERO,
        end_with_certificate: false,
    };

    /// Returns whether each of these probes finds an overload. A probe is its end and its lag, both in milliseconds.
    fn overloads(probes: &[(u64, u64)]) -> Vec<bool> {
        let (start, mut history) = (Instant::now(), LagHistory::default());
        let ms = Duration::from_millis;
        let probes = probes.iter();
        probes.map(|(at, lag)| history.is_overload(&LIMITS, start + ms(*at), ms(*lag))).collect()
    }

    #[test]
    fn lasting_lag_is_an_overload_and_short_lag_is_not() {
        let rising = [(60, 60), (140, 70), (220, 70), (300, 70), (380, 70)];
        assert_eq!(overloads(&rising), [false, false, false, true, true]);
        // The process was stopped for seconds, twice. It had time between.
        assert_eq!(overloads(&[(3_000, 3_000), (3_010, 1), (6_000, 2_990), (6_020, 10)]), [false; 4]);
        assert_eq!(overloads(&[(3_000, 3_000), (6_010, 3_000)]), [false; 2]);
        // One probe below the threshold resets the count.
        assert_eq!(overloads(&[(60, 60), (140, 70), (200, 49), (280, 70), (360, 70), (440, 70)]), [false; 6]);
        // Probes with a long gap are not consecutive.
        assert_eq!(overloads(&[(60, 60), (140, 70), (900, 60), (970, 60)]), [false; 4]);
    }

    #[test]
    fn an_overload_ends_at_half_the_threshold_and_may_return_at_once() {
        let start = [(60, 60), (140, 70), (220, 70), (300, 70)];
        let after = |more: &[(u64, u64)]| overloads(&[&start, more].concat())[start.len()..].to_vec();
        assert_eq!(after(&[(350, 40), (390, 25), (430, 24), (480, 40)]), [true, true, false, false]);
        assert_eq!(after(&[(330, 5), (400, 60)]), [false, true]);
        assert_eq!(after(&[(330, 5), (1_500, 60)]), [false, false]);
    }

    #[test]
    fn no_request_is_refused_while_few_are_in_flight() {
        let overload = Overload::new(LIMITS);
        let now = Instant::now();
        overload.refusing_until.set(now + LIMITS.probe_validity);
        let first = overload.begin(now);
        let second = overload.begin(now);
        assert_eq!(
            (first.1, second.1, overload.begin(now).1),
            (Admission::Accept, Admission::Accept, Admission::Reject)
        );
        drop(first);
        assert_eq!(overload.begin(now).1, Admission::Accept, "the refused request is no longer in flight");
        let third = overload.begin(now);
        assert_eq!((third.1, overload.begin(now).1), (Admission::Accept, Admission::Reject));
        assert_eq!(
            overload.begin(now + LIMITS.probe_validity).1,
            Admission::AcceptIfConnected,
            "the last probe is no longer valid"
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
    fn lag_limits_connections_and_checks_clients() {
        let (overload, mut history) = (Overload::new(LIMITS), LagHistory::default());
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let accepted = |now: Instant| (0..=ACCEPTED).take_while(|_| overload.accepts_connection(now)).count();
        let mut after = |at: u64, lag: u64| {
            let now = start + ms(at);
            overload.probe_ended(&mut history, now, ms(lag));
            (accepted(now), overload.begin(now).1)
        };
        let in_flight = [overload.begin(start), overload.begin(start), overload.begin(start)];
        let (open, shut) = (
            (ACCEPTED_BUSY as usize, Admission::Accept),
            (ACCEPTED_LATE as usize, Admission::AcceptIfConnected),
        );
        assert_eq!(after(10, 20), open);
        assert_eq!(after(40, 21), shut);
        assert_eq!(after(80, 11), shut, "above half of it");
        assert_eq!(after(120, 10), open);
        assert_eq!(after(140, 15), open, "above half of it, but it was below the threshold before");
        assert_eq!(after(200, 25), shut);
        assert_eq!(after(240, 25), shut);
        drop(in_flight);
        assert_eq!(after(280, 25), (ACCEPTED as usize, Admission::Accept), "no request is in flight");
    }

    #[test]
    fn a_probe_that_is_late_shows_lag_before_it_ends() {
        let (overload, mut history) = (Overload::new(LIMITS), LagHistory::default());
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let _in_flight = [overload.begin(start), overload.begin(start), overload.begin(start)];
        assert_eq!(overload.begin(start + ms(20)).1, Admission::Accept);
        assert_eq!(overload.begin(start + ms(21)).1, Admission::AcceptIfConnected);
        overload.probe_ended(&mut history, start + ms(22), ms(22));
        assert_eq!(overload.begin(start + ms(22)).1, Admission::AcceptIfConnected);
        // The last request woke the next probe.
        overload.probe_ended(&mut history, start + ms(30), ms(8));
        assert_eq!(overload.begin(start + ms(30)).1, Admission::Accept);
    }
}
