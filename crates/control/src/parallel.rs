//! Parallel work on all cores, for work that all clients wait for.

use std::{
    num::NonZero,
    panic::resume_unwind,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

/// Fewer are done sooner than threads begin.
const FEW: usize = 16;
/// Asking for it reads files.
static CORES: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get));

/// Applies `work` to each item; returns the results in the same order.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = CORES.min(items.len() / FEW);
    if threads < 2 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let some = || {
        let mine = std::iter::from_fn(|| {
            let at = next.fetch_add(1, Relaxed);
            Some((at, work(items.get(at)?)))
        });
        mine.collect::<Vec<_>>()
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        let done =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        done.flatten().collect()
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, made)| made).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_done_once_and_keep_their_order() {
        for count in [0, 1, FEW, 2 * FEW, 1000] {
            let items: Vec<usize> = (0..count).collect();
            assert_eq!(map(&items, |item| item * 2), items.iter().map(|item| item * 2).collect::<Vec<_>>());
        }
    }

    #[test]
    #[should_panic(expected = "the seventh")]
    fn a_panic_is_the_callers() {
        let items: Vec<usize> = (0..100).collect();
        map(&items, |item| assert_ne!(*item, 7, "the seventh"));
    }
}
