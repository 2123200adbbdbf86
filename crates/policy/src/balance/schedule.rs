//! Earliest-deadline scheduling: an item is due again after the inverse of its weight. This spreads turns evenly over
//! time and costs O(log n).

use std::{cmp::Reverse, collections::BinaryHeap};

/// Items by deadline.
#[derive(Debug, Default)]
pub(super) struct Schedule(BinaryHeap<Reverse<Due>>);

/// Deadline of an item.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: f64,
    index: usize,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.total_cmp(&other.at).then(self.index.cmp(&other.index))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

impl Schedule {
    /// Returns a schedule of items with these weights. First deadlines are random, so that workers do not all start
    /// with the same item.
    pub(super) fn new(weights: impl Iterator<Item = f64>, rng: &mut fastrand::Rng) -> Self {
        let due = |(index, weight): (usize, f64)| Reverse(Due { at: rng.f64() / weight, index });
        Self(weights.enumerate().map(due).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the item with the earliest deadline, and sets its next deadline by its current weight.
    pub(super) fn next(&mut self, weight: impl FnOnce(usize) -> f64) -> Option<usize> {
        let mut due = self.0.peek_mut()?;
        let index = due.0.index;
        due.0.at += 1.0 / weight(index);
        Some(index)
    }
}
