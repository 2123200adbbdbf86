//! Statistics of the traffic generator: number, outcome and duration of each call.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hdrhistogram::Histogram;
use serde::Serialize;

/// Maximum of a latency in microseconds: greater ones are counted as an hour.
const MAX_LATENCY: u64 = 3_600_000_000;

/// The counters of one generator.
#[derive(Debug, Default)]
pub(crate) struct Stats(Mutex<Snapshot>);

/// Times of calls in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Latencies(pub(crate) Histogram<u64>);

impl Default for Latencies {
    #[expect(clippy::expect_used, reason = "the bounds are constants")]
    fn default() -> Self {
        Self(Histogram::new_with_bounds(1, MAX_LATENCY, 3).expect("the bounds are valid"))
    }
}

/// All counters, as `/stats` shows them.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Snapshot {
    /// Sessions of travellers: started, finished, and rejected because too many were active.
    pub(crate) sessions: Sessions,
    /// Calls by name.
    pub(crate) calls: BTreeMap<&'static str, Call>,
    /// Number of searches without `x-canary` by the version of `flight` that answered.
    pub(crate) flight_versions: BTreeMap<String, u64>,
    /// Number of searches with `x-canary: always` by the version of `flight` that answered.
    pub(crate) canary_flight_versions: BTreeMap<String, u64>,
    /// Number of calls without a response yet.
    #[serde(skip)]
    pub(crate) active: u64,
    /// Times of all calls.
    #[serde(skip)]
    pub(crate) latencies: Latencies,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sessions {
    pub(crate) started: u64,
    pub(crate) finished: u64,
    pub(crate) skipped: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Call {
    pub(crate) total: u64,
    /// Responses with the expected status: 200, and 403 for the forbidden call.
    pub(crate) as_expected: u64,
    /// Responses by status code; "none" for a call without a response.
    pub(crate) by_status: BTreeMap<String, u64>,
    pub(crate) mean_ms: f64,
    pub(crate) max_ms: f64,
    /// Message of the last call without a response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_error: Option<String>,
}

impl Stats {
    /// Counts a call that begins.
    pub(crate) fn begin(&self) {
        self.lock().active += 1;
    }

    /// Counts the end of a call; `status` is `None` if there was no response.
    pub(crate) fn count(
        &self,
        name: &'static str,
        expected: u16,
        outcome: Result<u16, String>,
        took: Duration,
    ) {
        let mut all = self.lock();
        all.active -= 1;
        all.latencies.0.saturating_record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        let call = all.calls.entry(name).or_default();
        call.total += 1;
        let ms = took.as_secs_f64() * 1000.0;
        #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
        let total = call.total as f64;
        call.mean_ms += (ms - call.mean_ms) / total;
        call.max_ms = call.max_ms.max(ms);
        let status = match outcome {
            Ok(status) => {
                call.as_expected += u64::from(status == expected);
                status.to_string()
            }
            Err(error) => {
                call.last_error = Some(error);
                "none".to_owned()
            }
        };
        *call.by_status.entry(status).or_default() += 1;
    }

    /// Begins a new window, whose counters are 0. Returns the earlier ones.
    pub(crate) fn next_window(&self) -> Snapshot {
        let mut all = self.lock();
        let next = Snapshot { sessions: all.sessions.clone(), active: all.active, ..Snapshot::default() };
        std::mem::replace(&mut *all, next)
    }

    /// Returns the number of calls without a response yet.
    pub(crate) fn active(&self) -> u64 {
        self.lock().active
    }

    /// Counts a session that is due. Returns false if it must be skipped because so many are active.
    pub(crate) fn admit(&self, most: u64) -> bool {
        let sessions = &mut self.lock().sessions;
        let has_room = sessions.started - sessions.finished < most;
        *(if has_room { &mut sessions.started } else { &mut sessions.skipped }) += 1;
        has_room
    }

    /// Changes other counters.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Snapshot) -> T) -> T {
        act(&mut self.lock())
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sessions {
    /// Returns the sessions since an earlier count.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        Self {
            started: self.started - earlier.started,
            finished: self.finished - earlier.finished,
            skipped: self.skipped - earlier.skipped,
        }
    }
}

impl Snapshot {
    /// Returns the number of calls and the number of those with the expected status.
    pub(crate) fn totals(&self) -> (u64, u64) {
        self.calls.values().fold((0, 0), |(all, good), call| (all + call.total, good + call.as_expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_counted_by_status_and_by_expectation() {
        let stats = Stats::default();
        (0..3).for_each(|_| stats.begin());
        stats.count("forbidden", 403, Ok(403), Duration::from_millis(2));
        stats.count("forbidden", 403, Ok(200), Duration::from_millis(4));
        stats.count("login", 200, Err("refused".to_owned()), Duration::from_millis(1));
        let all = stats.snapshot();
        assert_eq!(all.totals(), (3, 1));
        let call = &all.calls["forbidden"];
        assert_eq!((call.by_status["403"], call.by_status["200"]), (1, 1));
        assert!((call.mean_ms - 3.0).abs() < 1e-9 && (call.max_ms - 4.0).abs() < 1e-9);
        assert_eq!(all.calls["login"].by_status["none"], 1);
    }
}
