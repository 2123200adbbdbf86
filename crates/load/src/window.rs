//! The measured window of a load in progress. Requests that are due before it warm the target up and do not count.

use crate::tally::Tally;

/// Boundary of the measured window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowBoundary {
    /// The measured window begins.
    Begin,
    /// The measured window ends.
    End,
}

/// The window of a load in progress. Times are nanoseconds from the start of the load.
pub(crate) struct Window<'a> {
    begin: u64,
    end: u64,
    next: Option<WindowBoundary>,
    on_boundary: &'a mut dyn FnMut(WindowBoundary),
}

impl<'a> Window<'a> {
    /// Creates a window from `begin` to `end`, which calls a function at both.
    pub(crate) fn new(begin: u64, end: u64, on_boundary: &'a mut dyn FnMut(WindowBoundary)) -> Self {
        Self { begin, end, next: Some(WindowBoundary::Begin), on_boundary }
    }

    /// Returns when the next boundary is due; `None` after the end.
    pub(crate) fn next(&self) -> Option<u64> {
        self.next.map(|boundary| match boundary {
            WindowBoundary::Begin => self.begin,
            WindowBoundary::End => self.end,
        })
    }

    /// Reports the boundaries that are due.
    pub(crate) fn pass(&mut self, now: u64, tally: &mut Tally) {
        while let Some(boundary) = self.next
            && self.next().is_some_and(|due| due <= now)
        {
            tally.in_window = boundary == WindowBoundary::Begin;
            self.next = tally.in_window.then_some(WindowBoundary::End);
            (self.on_boundary)(boundary);
        }
    }

    /// Returns when the window begins.
    pub(crate) fn begin(&self) -> u64 {
        self.begin
    }
}
