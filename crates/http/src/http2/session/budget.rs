//! Budgets for actions of a peer that cost this side more than the peer.

use std::time::{Duration, Instant};

/// Time after which a budget is full again.
const PERIOD: Duration = Duration::from_secs(30);

/// A number of actions per period. Useful actions replenish it.
pub(super) struct Budget {
    full: u32,
    left: u32,
    since: Option<Instant>,
}

impl Budget {
    pub(super) fn new(full: u32) -> Self {
        Self { full, left: full, since: None }
    }

    /// Takes `count` from the budget; returns false if less is left.
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

    /// Replenishes the budget for `count` useful actions.
    pub(super) fn give(&mut self, count: u32) {
        self.left = self.full.min(self.left + count);
    }
}
