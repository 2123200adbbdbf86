//! Number of open connections of a limit, across workers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Open connections.
#[derive(Debug, Default)]
pub struct OpenConnections(AtomicU64);

impl OpenConnections {
    /// Counts a connection that begins; returns false, without counting it, if `max` are open.
    pub fn begin(&self, max: u64) -> bool {
        self.0.fetch_update(Relaxed, Relaxed, |open| (open < max).then_some(open + 1)).is_ok()
    }

    /// Counts the end of a connection that [`Self::begin`] counted.
    pub fn end(&self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
