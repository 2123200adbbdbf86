//! Load of other processes, before a benchmark measures anything and during its turns.
//!
//! A busy machine does not stop a benchmark, nor does a build without optimisation. The user gets a warning, and the
//! result file keeps the figures. A turn during which other processes used the CPUs is disturbed and taken again
//! ([`Repeats`]). Only the load of others decides this, never a figure of the turn, so repeats do not select figures.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use skysail_core::stdio;

use crate::accounting::{self, Ticks};

/// Time over which the machine is observed.
const WINDOW: Duration = Duration::from_secs(1);
/// Share of all cores that other processes use, from which the figures of a benchmark become noisy.
const NOISY: f64 = 0.1;
/// Microseconds in one percent of [`WINDOW`].
const PERCENT: f64 = 10_000.0;
/// Minimum duration of a turn to judge. The kernel reports idle time in ticks of 10 ms.
const MIN_TURN: Duration = Duration::from_millis(500);

/// Load of other processes over one second or a turn, in the result file.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ForeignLoad {
    /// Cores in use on average, including `stolen`.
    pub(crate) cores: f64,
    /// Cores that the hypervisor gave to other machines, on average.
    pub(crate) stolen: f64,
    /// Number of cores of the machine.
    pub(crate) of: usize,
    /// Share of the time in which a task waited for a CPU, in percent (`/proc/pressure/cpu`, `some`); null if the
    /// kernel does not report it, and for a turn, whose own tasks wait too.
    pub(crate) waiting_percent: Option<f64>,
}

/// Repeats of disturbed turns: at most one for each turn, and at most as many as the run has rounds.
#[derive(Debug)]
pub(crate) struct Repeats {
    left: u32,
}

/// An attempt at a turn.
#[derive(Debug)]
pub(crate) struct Attempt<T> {
    pub(crate) result: anyhow::Result<T>,
    /// Load of other processes meanwhile. `None` if the attempt was too short to know.
    pub(crate) busy: Option<ForeignLoad>,
}

/// A turn that was taken.
#[derive(Debug)]
pub(crate) struct TakenTurn<T> {
    pub(crate) counts: Attempt<T>,
    /// The other attempt of a turn that was repeated.
    pub(crate) dropped: Option<Attempt<T>>,
}

/// Observes the machine for one second, and warns if other processes keep it busy or this program is slow.
#[allow(clippy::disallowed_methods, reason = "observes an interval; nothing else runs in this process yet")]
pub(crate) fn observe() -> ForeignLoad {
    let pressure = || waited(&fs::read_to_string("/proc/pressure/cpu").ok()?);
    let (ticks, waited) = (accounting::ticks(), pressure());
    std::thread::sleep(WINDOW);
    let waited = pressure().zip(waited).map(|(now, before)| now.saturating_sub(before));
    let busy = ForeignLoad::between(ticks, accounting::ticks(), accounting::cores(), waited);
    if let Some(warning) = busy.warning() {
        stdio::print_error(warning);
    }
    if cfg!(unoptimised) {
        stdio::print_error(
            "warning: this program was built without optimisation; figures need a build with --release",
        );
    }
    busy
}

impl ForeignLoad {
    /// Computes the load from two readings of /proc/stat, and the microseconds between them in which tasks waited.
    fn between(before: Ticks, after: Ticks, of: usize, waited: Option<u64>) -> Self {
        let (cores, stolen) = after.busy_since(before, of as f64);
        Self {
            cores,
            stolen,
            of,
            waiting_percent: waited.map(|microseconds| (microseconds as f64 / PERCENT).min(100.0)),
        }
    }

    /// Returns true if figures measured meanwhile are noisy.
    fn is_noisy(&self) -> bool {
        self.cores >= NOISY * self.of as f64
    }

    /// Returns a warning if the figures of this machine will be noisy.
    fn warning(&self) -> Option<String> {
        if !self.is_noisy() {
            return None;
        }
        let Self { cores, stolen, of, waiting_percent } = *self;
        let stolen = if stolen >= 0.05 {
            format!(" ({stolen:.1} of these taken by the hypervisor)")
        } else {
            String::new()
        };
        let waiting = waiting_percent
            .map(|percent| format!(", and tasks wait for a CPU {percent:.0} % of the time"))
            .unwrap_or_default();
        Some(format!(
            "warning: {cores:.1} of {of} cores are busy with other processes{stolen}{waiting}; figures will be noisy"
        ))
    }
}

impl Repeats {
    /// Allows as many repeats as there are rounds.
    pub(crate) fn new(rounds: u32) -> Self {
        Self { left: rounds }
    }

    /// Takes a turn, and takes it again if it was disturbed. A failed turn is not repeated, because a failure must be
    /// visible.
    pub(crate) async fn take<T>(&mut self, measure: impl AsyncFn() -> anyhow::Result<T>) -> TakenTurn<T> {
        self.choose(async || {
            let watch = TurnWatch::start();
            let result = measure().await;
            Attempt { result, busy: watch.end() }
        })
        .await
    }

    /// Of two attempts, the one with less load of others counts; a failed one always does.
    async fn choose<T>(&mut self, attempt: impl AsyncFn() -> Attempt<T>) -> TakenTurn<T> {
        let first = attempt().await;
        if self.left == 0 || first.result.is_err() || !first.is_disturbed() {
            return TakenTurn { counts: first, dropped: None };
        }
        self.left -= 1;
        let second = attempt().await;
        let cores = |of: &Attempt<T>| of.busy.map_or(0.0, |busy| busy.cores);
        let (counts, dropped) = match second.result.is_err() || cores(&second) <= cores(&first) {
            true => (second, first),
            false => (first, second),
        };
        TakenTurn { counts, dropped: Some(dropped) }
    }
}

impl<T> Attempt<T> {
    fn is_disturbed(&self) -> bool {
        self.busy.is_some_and(|busy| busy.is_noisy())
    }
}

impl<T> TakenTurn<T> {
    /// Returns what the line of progress says about the load of others; empty for an undisturbed turn.
    pub(crate) fn note(&self) -> String {
        let used = |of: &Attempt<T>| of.busy.map_or(0.0, |busy| busy.cores);
        match &self.dropped {
            Some(dropped) => format!(
                "; disturbed and repeated: other processes used {:.1} CPUs in the attempt that does not count, {:.1} in this one",
                used(dropped),
                used(&self.counts)
            ),
            None if self.counts.is_disturbed() => {
                format!("; disturbed: other processes used {:.1} CPUs", used(&self.counts))
            }
            None => String::new(),
        }
    }
}

/// Returns a line about the disturbed turns of a run, if it had any. `busy` is the load of others in the turns that count.
pub(crate) fn disturbed(busy: impl Iterator<Item = Option<ForeignLoad>>, repeated: usize) -> Option<String> {
    let still = busy.flatten().filter(ForeignLoad::is_noisy).count();
    (still + repeated > 0).then(|| {
        format!(
            "Disturbed turns, in which other processes used at least {:.0} % of the CPUs: {repeated} repeated, {still} among \
             the figures.",
            100.0 * NOISY
        )
    })
}

/// Observes the load of other processes during a turn.
struct TurnWatch {
    began: Instant,
    ticks: Ticks,
    own: Duration,
}

impl TurnWatch {
    fn start() -> Self {
        Self { began: Instant::now(), ticks: accounting::ticks(), own: accounting::own_cpu() }
    }

    /// Returns the load since the start. The processes of the turn must have ended.
    fn end(&self) -> Option<ForeignLoad> {
        let elapsed = self.began.elapsed();
        let all = ForeignLoad::between(self.ticks, accounting::ticks(), accounting::cores(), None);
        let own = accounting::own_cpu().saturating_sub(self.own);
        let cores = (all.cores - own.as_secs_f64() / elapsed.as_secs_f64()).max(0.0);
        (elapsed >= MIN_TURN).then_some(ForeignLoad { cores, ..all })
    }
}

/// Returns the total of the line `some` of /proc/pressure/cpu, in microseconds.
fn waited(pressure: &str) -> Option<u64> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_ascii_whitespace().find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(busy: u64, all: u64, stolen: u64) -> Ticks {
        Ticks { all, idle: all - busy, stolen }
    }

    #[test]
    fn a_busy_machine_gets_a_warning_with_figures() {
        // Two cores with 100 ticks each: 130 of them busy, 20 of these stolen.
        let busy = ForeignLoad::between(ticks(1_000, 5_000, 10), ticks(1_130, 5_200, 30), 2, Some(340_000));
        assert_eq!(busy, ForeignLoad { cores: 1.3, stolen: 0.2, of: 2, waiting_percent: Some(34.0) });
        assert_eq!(
            busy.warning().unwrap(),
            "warning: 1.3 of 2 cores are busy with other processes (0.2 of these taken by the hypervisor), and tasks wait \
             for a CPU 34 % of the time; figures will be noisy"
        );
        let plain = ForeignLoad { stolen: 0.0, waiting_percent: None, ..busy };
        assert_eq!(
            plain.warning().unwrap(),
            "warning: 1.3 of 2 cores are busy with other processes; figures will be noisy"
        );
    }

    #[test]
    fn a_quiet_machine_gets_no_warning() {
        let quiet = ForeignLoad::between(ticks(1_000, 5_000, 10), ticks(1_019, 5_200, 10), 2, None);
        assert_eq!((quiet.warning(), quiet.waiting_percent), (None, None));
        // Counters that do not change mean no load.
        assert_eq!(ForeignLoad::between(ticks(9, 9, 9), ticks(9, 9, 9), 2, None).cores, 0.0);
    }

    /// Takes a turn whose attempts have these loads of others and results.
    async fn take(repeats: &mut Repeats, attempts: &[(f64, Result<u32, &'static str>)]) -> TakenTurn<u32> {
        let index = std::cell::Cell::new(0);
        let taken = repeats.choose(async || {
            let (cores, result) = attempts[index.replace(index.get() + 1)];
            let busy = ForeignLoad { cores, stolen: 0.0, of: 2, waiting_percent: None };
            Attempt { result: result.map_err(anyhow::Error::msg), busy: Some(busy) }
        });
        let taken = taken.await;
        assert_eq!(
            index.get(),
            1 + usize::from(taken.dropped.is_some()),
            "each turn is repeated at most once"
        );
        taken
    }

    #[tokio::test]
    async fn a_disturbed_turn_is_repeated_once_and_the_quieter_attempt_counts() {
        let mut repeats = Repeats::new(9);
        for (attempts, counts, note) in [
            (&[(0.19, Ok(1))][..], Ok(1), ""),
            (
                &[(0.5, Ok(1)), (0.1, Ok(2))],
                Ok(2),
                "0.5 CPUs in the attempt that does not count, 0.1 in this",
            ),
            (
                &[(0.5, Ok(1)), (0.9, Ok(2))],
                Ok(1),
                "0.9 CPUs in the attempt that does not count, 0.5 in this",
            ),
            (&[(0.5, Ok(1)), (0.9, Err("x"))], Err("x"), "0.5 CPUs in the attempt that does not count"),
            (&[(0.5, Err("x"))], Err("x"), "; disturbed: other processes used 0.5 CPUs"),
        ] {
            let taken = take(&mut repeats, attempts).await;
            let result = taken.counts.result.as_ref().map_err(ToString::to_string);
            assert_eq!(result, counts.as_ref().map_err(|text: &&str| (*text).to_owned()), "{attempts:?}");
            assert!(
                taken.note().contains(note) && taken.note().is_empty() == note.is_empty(),
                "{attempts:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_run_has_at_most_as_many_repeats_as_rounds() {
        let mut repeats = Repeats::new(2);
        let mut repeated = Vec::new();
        for _ in 0..4 {
            repeated.push(take(&mut repeats, &[(0.5, Ok(1)), (0.5, Ok(2))]).await.dropped.is_some());
        }
        assert_eq!(repeated, [true, true, false, false]);
    }

    #[test]
    fn disturbed_turns_are_counted() {
        let load = |cores| Some(ForeignLoad { cores, stolen: 0.0, of: 2, waiting_percent: None });
        assert_eq!(disturbed([load(0.1), None].into_iter(), 0), None);
        let line = disturbed([load(0.1), load(0.2), None].into_iter(), 3).unwrap();
        assert!(line.ends_with("at least 10 % of the CPUs: 3 repeated, 1 among the figures."), "{line}");
    }

    #[test]
    fn pressure_is_read_from_the_line_for_any_task() {
        let text = "some avg10=77.32 avg60=30.63 avg300=26.78 total=260012966\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(waited(text), Some(260_012_966));
        assert_eq!(waited("full avg10=0.00 total=7\n"), None);
    }
}
