//! Sorted lists of names.

use std::sync::Arc;

/// Names of a subscription, sorted and without duplicates. A slice, because thousands of streams hold thousands of
/// names each. A list of all names of a type is shared between streams.
#[derive(Debug, Default, PartialEq)]
pub(super) struct SubscribedNames(pub(super) Arc<[Arc<str>]>);

impl SubscribedNames {
    pub(super) fn contains(&self, name: &str) -> bool {
        sorted::contains(&self.0, name)
    }

    /// Returns the number of names, divided by the number of lists that share them.
    pub(super) fn places(&self) -> usize {
        self.0.len() / Arc::strong_count(&self.0).max(1)
    }

    /// Adds names; duplicates are ignored.
    pub(super) fn extend(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        let mut all: Vec<Arc<str>> = names.into_iter().collect();
        if !all.is_empty() {
            all.extend(self.0.iter().cloned());
            // The stable sort is fast where a part is already sorted.
            all.sort();
            all.dedup();
            self.0 = all.into();
        }
    }

    /// Removes names, which are sorted; unknown ones are ignored.
    pub(super) fn remove(&mut self, removed: &[Arc<str>]) {
        if let Some(left) = sorted::without(&self.0, removed) {
            self.0 = left.into();
        }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        if !self.0.iter().all(|name| keep(name)) {
            self.0 = self.0.iter().filter(|name| keep(name)).cloned().collect();
        }
    }
}

/// Operations on sorted lists. A client decides their lengths, so the cost is never the product of two lengths.
pub(super) mod sorted {
    use std::{cmp::Ordering, sync::Arc};

    pub(in super::super) fn contains(names: &[Arc<str>], name: &str) -> bool {
        names.binary_search_by(|known| (**known).cmp(name)).is_ok()
    }

    /// Returns the items that are not in `removed`; `None` if no item is in it. The number of comparisons is at most
    /// the sum of both lengths.
    pub(super) fn without<T: Ord + Clone>(items: &[T], removed: &[T]) -> Option<Vec<T>> {
        let mut removed = removed.iter().peekable();
        let mut is_left = |item: &&T| {
            loop {
                match removed.peek().map(|next| (*next).cmp(*item)) {
                    Some(Ordering::Less) => removed.next(),
                    Some(Ordering::Equal) => return false,
                    Some(Ordering::Greater) | None => return true,
                };
            }
        };
        let left: Vec<T> = items.iter().filter(&mut is_left).cloned().collect();
        (left.len() < items.len()).then_some(left)
    }

    #[cfg(test)]
    mod tests {
        use std::cell::Cell;

        use super::*;

        /// Counts comparisons.
        #[derive(Clone, Debug)]
        struct Counted<'a>(u32, &'a Cell<usize>);

        impl Ord for Counted<'_> {
            fn cmp(&self, other: &Self) -> Ordering {
                self.1.update(|count| count + 1);
                self.0.cmp(&other.0)
            }
        }

        impl PartialOrd for Counted<'_> {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }

        impl Eq for Counted<'_> {}

        impl PartialEq for Counted<'_> {
            fn eq(&self, other: &Self) -> bool {
                self.cmp(other).is_eq()
            }
        }

        #[test]
        fn removing_names_takes_one_comparison_per_name() {
            let count = Cell::new(0);
            let list = |numbers: &mut dyn Iterator<Item = u32>| -> Vec<_> {
                numbers.map(|number| Counted(number, &count)).collect()
            };
            let items = list(&mut (0..3_000).map(|number| number * 30));
            let none = list(&mut (0..100_000).map(|number| number * 30 + 1));
            let all = list(&mut (0..100_000));
            for (removed, left) in [(&none, None), (&all, Some(0)), (&items, Some(0))] {
                count.set(0);
                assert_eq!(without(&items, removed).map(|left| left.len()), left);
                assert!(count.get() <= items.len() + removed.len(), "{} comparisons", count.get());
            }
            let some = list(&mut [0, 1, 60, 90_000].into_iter());
            let left = without(&items, &some).unwrap();
            assert_eq!((left.len(), left[0].0, left[1].0), (2_998, 30, 90));
        }
    }
}
