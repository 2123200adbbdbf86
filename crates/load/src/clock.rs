//! Clocks in nanoseconds: the monotonic clock, which timers use, and the CPU clock of the calling thread.

use nix::{
    sys::time::TimeSpec,
    time::{ClockId, clock_gettime},
};

/// Returns the monotonic time in nanoseconds.
pub fn now() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Returns the CPU time of the calling thread in nanoseconds.
pub fn thread_cpu() -> u64 {
    read(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

/// Converts a time to the form of the kernel's timers.
pub fn timespec(nanoseconds: u64) -> TimeSpec {
    let part = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    TimeSpec::new(part(nanoseconds / 1_000_000_000), part(nanoseconds % 1_000_000_000))
}

fn read(clock: ClockId) -> u64 {
    // Linux always has these clocks.
    let time = clock_gettime(clock).unwrap_or(TimeSpec::new(0, 0));
    time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs()
}
