//! Load of other processes before a benchmark measures anything.
//!
//! A busy machine does not stop a benchmark, nor does a build without optimisation. The user gets a warning, and the
//! result file keeps the figures.

use std::{fs, time::Duration};

use serde::{Deserialize, Serialize};
use skysail_core::stdio;

use crate::accounting::{self, Ticks};

/// Time over which the machine is observed.
const WINDOW: Duration = Duration::from_secs(1);
/// Share of all cores that other processes use, from which the figures of a benchmark become noisy.
const NOISY: f64 = 0.1;
/// Microseconds in one percent of [`WINDOW`].
const PERCENT: f64 = 10_000.0;

/// Load of other processes over one second, in the result file.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ForeignLoad {
    /// Cores in use on average, including `stolen`.
    pub(crate) cores: f64,
    /// Cores that the hypervisor gave to other machines, on average.
    pub(crate) stolen: f64,
    /// Number of cores of the machine.
    pub(crate) of: usize,
    /// Share of the time in which a task waited for a CPU, in percent (`/proc/pressure/cpu`, `some`); null if the
    /// kernel does not report it.
    pub(crate) waiting_percent: Option<f64>,
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
        let all = after.all.saturating_sub(before.all).max(1) as f64;
        let cores = |before: u64, after: u64| after.saturating_sub(before) as f64 / all * of as f64;
        Self {
            cores: cores(before.busy, after.busy),
            stolen: cores(before.stolen, after.stolen),
            of,
            waiting_percent: waited.map(|microseconds| (microseconds as f64 / PERCENT).min(100.0)),
        }
    }

    /// Returns a warning if the figures of this machine will be noisy.
    fn warning(&self) -> Option<String> {
        let Self { cores, stolen, of, waiting_percent } = *self;
        if cores < NOISY * of as f64 {
            return None;
        }
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

/// Returns the total of the line `some` of /proc/pressure/cpu, in microseconds.
fn waited(pressure: &str) -> Option<u64> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_ascii_whitespace().find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(busy: u64, all: u64, stolen: u64) -> Ticks {
        Ticks { busy, all, stolen }
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
        // Counters that do not change or that decrease mean no load.
        assert_eq!(ForeignLoad::between(ticks(9, 9, 9), ticks(8, 9, 9), 2, None).cores, 0.0);
    }

    #[test]
    fn pressure_is_read_from_the_line_for_any_task() {
        let text = "some avg10=77.32 avg60=30.63 avg300=26.78 total=260012966\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(waited(text), Some(260_012_966));
        assert_eq!(waited("full avg10=0.00 total=7\n"), None);
    }
}
