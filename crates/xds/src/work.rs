//! Counts steps of work in tests, which show the cost of a request without a clock.

#[cfg(test)]
thread_local! {
    static DONE: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Counts steps.
#[inline]
pub(crate) fn count(steps: usize) {
    #[cfg(test)]
    DONE.set(DONE.get() + steps);
    #[cfg(not(test))]
    let _ = steps;
}

/// Returns the number of steps that `run` takes on this thread.
#[cfg(test)]
pub(crate) fn steps_of(run: impl FnOnce()) -> usize {
    let before = DONE.get();
    run();
    DONE.get() - before
}
