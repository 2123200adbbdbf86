//! Admission of requests on a busy worker: they begin a few at a time, in the order of their arrival.
//!
//! If all requests began at once, a thousand would be half done before the first is answered. The state of each
//! (connections, buffers, kernel memory) would leave the CPU caches before its next use. Requests in flight therefore
//! have priority, and waiting requests are not even read. The worker never idles for this: when no other task is ready
//! the next requests begin, whatever the number in flight.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
    task::{Context, Poll, Waker},
};

use tokio::{sync::Notify, task::yield_now};

/// Requests admitted together.
const ADMITTED_TOGETHER: usize = 16;
/// Maximum number of passes of the event loop between two admissions, while requests complete. Without it a steady
/// stream of slow responses would keep all others waiting.
const MAX_PASSES: usize = 4;

/// The queue of requests on one worker.
#[derive(Default)]
pub(crate) struct AdmissionQueue {
    waiting: RefCell<VecDeque<Rc<QueueSlot>>>,
    /// Number of requests that have completed.
    ended: Cell<u64>,
    /// Notified when a request joins the queue.
    joined: Notify,
}

/// A place in the queue. A request that drops it leaves the queue.
pub(crate) struct QueueSlot {
    admitted: Cell<bool>,
    waker: RefCell<Waker>,
}

impl AdmissionQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }

    /// Counts a request that has completed.
    pub(crate) fn ended(&self) {
        self.ended.set(self.ended.get() + 1);
    }

    /// Joins the queue unless `slot` is in it. Ready when the request is admitted.
    pub(crate) fn poll(&self, slot: &mut Option<Rc<QueueSlot>>, cx: &Context<'_>) -> Poll<()> {
        match slot {
            Some(taken) if taken.admitted.get() => {
                *slot = None;
                return Poll::Ready(());
            }
            Some(taken) => taken.waker.borrow_mut().clone_from(cx.waker()),
            None => {
                let taken = QueueSlot { admitted: Cell::new(false), waker: RefCell::new(cx.waker().clone()) };
                let taken = Rc::new(taken);
                *slot = Some(taken.clone());
                self.waiting.borrow_mut().push_back(taken);
                self.joined.notify_one();
            }
        }
        Poll::Pending
    }

    /// Admits the first requests of the queue.
    fn admit(&self) {
        let mut admitted = 0;
        while admitted < ADMITTED_TOGETHER {
            let first = self.waiting.borrow_mut().pop_front();
            let Some(slot) = first else { return };
            // A request that has left the queue has dropped its reference to the slot.
            if Rc::strong_count(&slot) > 1 {
                slot.admitted.set(true);
                slot.waker.borrow().wake_by_ref();
                admitted += 1;
            }
        }
    }

    /// Admits requests from the queue, forever.
    pub(crate) async fn run(&self) {
        loop {
            self.joined.notified().await;
            loop {
                self.admit();
                if self.is_empty() {
                    break;
                }
                // The admitted requests run, then those in flight continue, and only then the next are admitted.
                yield_now().await;
                for _ in 0..MAX_PASSES {
                    let before = self.ended.get();
                    yield_now().await;
                    if self.ended.get() == before {
                        break;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls all slots, and returns the indices of the admitted ones.
    fn admitted(turns: &AdmissionQueue, slots: &mut [Option<Rc<QueueSlot>>]) -> Vec<usize> {
        let cx = Context::from_waker(Waker::noop());
        let waiting = slots.iter_mut().enumerate().filter(|(_, slot)| slot.is_some());
        waiting.filter_map(|(number, slot)| turns.poll(slot, &cx).is_ready().then_some(number)).collect()
    }

    #[test]
    fn requests_are_admitted_in_order_and_those_that_left_are_skipped() {
        let (turns, cx) = (AdmissionQueue::default(), Context::from_waker(Waker::noop()));
        let mut slots = vec![None; 2 * ADMITTED_TOGETHER];
        for slot in &mut slots {
            assert!(turns.poll(slot, &cx).is_pending());
        }
        assert_eq!(admitted(&turns, &mut slots), [0; 0], "no request is admitted yet");
        slots[1] = None;
        turns.admit();
        let first: Vec<usize> = [0].into_iter().chain(2..=ADMITTED_TOGETHER).collect();
        assert_eq!(admitted(&turns, &mut slots), first);
        turns.admit();
        assert_eq!(
            admitted(&turns, &mut slots),
            Vec::from_iter(ADMITTED_TOGETHER + 1..2 * ADMITTED_TOGETHER)
        );
        assert!(turns.is_empty());
    }
}
