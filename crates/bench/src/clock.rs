//! Clocks in nanoseconds: the monotonic one, which the schedule's timer runs by, and the calling thread's.

use nix::{
    sys::time::TimeSpec,
    time::{ClockId, clock_gettime},
};

/// Nanoseconds since some moment in the past.
pub(crate) fn now() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Nanoseconds that the calling thread was on a CPU.
pub(crate) fn thread_cpu() -> u64 {
    read(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

/// The same moment as the kernel's timers take it.
pub(crate) fn timespec(nanoseconds: u64) -> TimeSpec {
    let part = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    TimeSpec::new(part(nanoseconds / 1_000_000_000), part(nanoseconds % 1_000_000_000))
}

fn read(clock: ClockId) -> u64 {
    // Linux always has these clocks.
    let time = clock_gettime(clock).unwrap_or(TimeSpec::new(0, 0));
    time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs()
}
