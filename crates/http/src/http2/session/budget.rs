//! How often a peer may do what costs us more than it.

use std::time::{Duration, Instant};

/// After this long all is forgiven.
const PERIOD: Duration = Duration::from_secs(30);

/// So many times in a period, and once more for every sensible thing done meanwhile.
pub(super) struct Budget {
    full: u32,
    left: u32,
    since: Option<Instant>,
}

impl Budget {
    pub(super) fn new(full: u32) -> Self {
        Self { full, left: full, since: None }
    }

    /// Takes `count` of what is left; false if there is less.
    pub(super) fn take(&mut self, count: u32) -> bool {
        if self.left < count && self.since.is_some_and(|since| since.elapsed() > PERIOD) {
            (self.left, self.since) = (self.full, None);
        }
        if self.since.is_none() {
            self.since = Some(Instant::now());
        }
        let allowed = self.left >= count;
        self.left = self.left.saturating_sub(count);
        allowed
    }

    /// So many sensible things were done.
    pub(super) fn give(&mut self, count: u32) {
        self.left = self.full.min(self.left + count);
    }
}
