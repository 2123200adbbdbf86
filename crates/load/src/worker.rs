//! State that the threads of a run share: its start, its end, and the counts so far.

use std::{
    mem,
    sync::{
        Arc, Barrier, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use hdrhistogram::Histogram;

use crate::{
    clock,
    tally::{Failure, Outcome},
};

/// Time from when all threads are ready until the load starts, in nanoseconds.
const LEAD: u64 = 10_000_000;
/// Value of `abort_on` for no status.
const NEVER: i32 = i32::MIN;
/// Significant digits of the latencies so far that percentiles in a progress line need.
pub(crate) const FOR_PERCENTILES: u8 = 2;
/// Significant digits of the latencies so far that the buckets of a histogram need. With fewer, values at the edges of
/// narrow buckets would be counted in the adjacent ones.
pub(crate) const FOR_BUCKETS: u8 = 3;

/// State that all threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// All threads, and the one that prints, wait here once their connections are ready.
    ready: Barrier,
    /// Start of the load in nanoseconds of the monotonic clock; 0 before it.
    start: AtomicU64,
    stopped: AtomicBool,
    abort_on: AtomicI32,
    interval: Mutex<Interval>,
}

/// Results since the last report of progress.
#[derive(Clone, Debug)]
pub(crate) struct Interval {
    pub(crate) latency: Histogram<u64>,
    pub(crate) failed: u64,
}

impl Interval {
    /// Creates an empty interval with this number of significant digits.
    pub(crate) fn new(digits: u8) -> anyhow::Result<Self> {
        Ok(Self { latency: Histogram::new_with_bounds(1, 3_600_000_000_000, digits)?, failed: 0 })
    }

    /// Creates an empty interval with the same number of significant digits.
    fn to_empty(&self) -> Self {
        Self { latency: Histogram::new_from(&self.latency), failed: 0 }
    }

    /// Adds later results.
    pub(crate) fn add(&mut self, later: &Self) -> anyhow::Result<()> {
        self.failed += later.failed;
        Ok(self.latency.add(&later.latency)?)
    }

    /// Records a request.
    pub(crate) fn record(&mut self, latency: u64, is_success: bool) {
        self.latency.saturating_record(latency);
        self.failed += u64::from(!is_success);
    }
}

impl Shared {
    /// Creates the state of a run with this number of threads. `digits` is the precision of the results so far.
    pub(crate) fn new(threads: usize, abort_on: Option<i32>, digits: u8) -> anyhow::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            ready: Barrier::new(threads + 1),
            start: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            abort_on: AtomicI32::new(abort_on.unwrap_or(NEVER)),
            interval: Mutex::new(Interval::new(digits)?),
        }))
    }

    /// Waits for all threads. Returns the start of the load.
    pub(crate) fn wait_ready(&self) -> u64 {
        if self.ready.wait().is_leader() {
            self.start.store(clock::now() + LEAD, Relaxed);
        }
        // After the second wait, the leader has stored the start.
        self.ready.wait();
        self.start.load(Relaxed)
    }

    /// Ends the load.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Returns whether the load was ended early.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    /// Ends the load if the outcome is the one of `-abort-on`.
    pub(crate) fn check_abort(&self, outcome: Outcome) {
        let code = match outcome {
            Outcome::Status(status) => i32::from(status),
            Outcome::Failed(_) => -1,
            Outcome::Named(_) => return,
        };
        if code == self.abort_on.load(Relaxed) {
            self.stop();
        }
    }

    /// Returns an empty interval for the results of a thread.
    pub(crate) fn empty_interval(&self) -> Interval {
        self.interval().to_empty()
    }

    /// Adds the results of a thread since its last report.
    pub(crate) fn report(&self, interval: &mut Interval) {
        let mut all = self.interval();
        // Both have the same bounds.
        let _ = all.latency.add(&interval.latency);
        all.failed += interval.failed;
        interval.latency.reset();
        interval.failed = 0;
    }

    /// Takes the results since the last call.
    pub(crate) fn take_interval(&self) -> Interval {
        let mut all = self.interval();
        let empty = all.to_empty();
        mem::replace(&mut *all, empty)
    }

    fn interval(&self) -> MutexGuard<'_, Interval> {
        self.interval.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Converts a duration to nanoseconds; the maximum is 584 years.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the failure that an error of a socket means.
pub(crate) fn failure_of(error: &std::io::Error) -> Failure {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Failure::Reset,
        ErrorKind::UnexpectedEof => Failure::Closed,
        ErrorKind::InvalidData => Failure::Tls,
        _ => Failure::Connect,
    }
}
