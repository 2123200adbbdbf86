//! Counts steps of work in tests, so that they can show what a request costs without a clock.

#[cfg(test)]
thread_local! {
    static DONE: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Notes so many steps.
#[inline]
pub(crate) fn did(steps: usize) {
    #[cfg(test)]
    DONE.set(DONE.get() + steps);
    #[cfg(not(test))]
    let _ = steps;
}

/// The steps that this thread takes in `run`.
#[cfg(test)]
pub(crate) fn steps_of(run: impl FnOnce()) -> usize {
    let before = DONE.get();
    run();
    DONE.get() - before
}
