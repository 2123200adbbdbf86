//! Runs work on all cores when all clients wait for the result.

use std::{
    num::NonZero,
    panic::resume_unwind,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

/// Minimum number of items per thread: fewer take less time than the start of a thread.
const MIN_PER_THREAD: usize = 16;
/// Cached, because the standard library reads files for it.
static CORES: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get));

/// Applies `work` to each item. Returns the results in the order of the items; a panic in `work` reaches the caller.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = CORES.min(items.len() / MIN_PER_THREAD);
    if threads < 2 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let run = || {
        let results = std::iter::from_fn(|| {
            let at = next.fetch_add(1, Relaxed);
            Some((at, work(items.get(at)?)))
        });
        results.collect::<Vec<_>>()
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        let done =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        done.flatten().collect()
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_processed_once_and_results_keep_the_order() {
        for count in [0, 1, MIN_PER_THREAD, 2 * MIN_PER_THREAD, 1000] {
            let items: Vec<usize> = (0..count).collect();
            assert_eq!(map(&items, |item| item * 2), items.iter().map(|item| item * 2).collect::<Vec<_>>());
        }
    }

    #[test]
    #[should_panic(expected = "the seventh")]
    fn a_panic_reaches_the_caller() {
        let items: Vec<usize> = (0..100).collect();
        map(&items, |item| assert_ne!(*item, 7, "the seventh"));
    }
}
