//! The monotonic clock in nanoseconds: the one that the schedule's timer runs by.

use nix::{
    sys::time::TimeSpec,
    time::{ClockId, clock_gettime},
};

/// Nanoseconds since some moment in the past.
pub(crate) fn now() -> u64 {
    // Linux always has this clock.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap_or(TimeSpec::new(0, 0));
    now.tv_sec().unsigned_abs() * 1_000_000_000 + now.tv_nsec().unsigned_abs()
}

/// The same moment as the kernel's timers take it.
pub(crate) fn timespec(nanoseconds: u64) -> TimeSpec {
    let part = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    TimeSpec::new(part(nanoseconds / 1_000_000_000), part(nanoseconds % 1_000_000_000))
}
