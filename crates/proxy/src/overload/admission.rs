//! Requests that come faster than a worker gets to them are let in a few at a time, in their order.
//!
//! If all that has come were begun at once, a thousand requests would be half done before the first is answered, and
//! whatever belongs to one (connections to both sides, buffers, their state here and in the kernel) would have left the
//! caches each time it is needed again. So those that are under way go first, and those that wait have not even been read.
//! Nothing is held up that could go on: when the worker has nothing else to do the next are let in, however many are
//! under way.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
    task::{Context, Poll, Waker},
};

use tokio::{sync::Notify, task::yield_now};

/// So many are let in together.
const TOGETHER: usize = 16;
/// So often the event loop looks for what goes on, as long as something does, before it lets in the next. Without a bound
/// a steady stream of slow answers would keep all others out.
const PASSES: usize = 4;

/// Those that wait on one worker.
#[derive(Default)]
pub(crate) struct Turns {
    waiting: RefCell<VecDeque<Rc<QueueSlot>>>,
    /// How many requests have come to their end.
    ended: Cell<u64>,
    /// Somebody has come.
    begun: Notify,
}

/// A place among those that wait; who drops it waits no longer.
pub(crate) struct QueueSlot {
    called: Cell<bool>,
    waker: RefCell<Waker>,
}

impl Turns {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }

    /// A request has come to its end.
    pub(crate) fn ended(&self) {
        self.ended.set(self.ended.get() + 1);
    }

    /// Takes a place if there is none yet; ready when it has been called.
    pub(crate) fn poll(&self, place: &mut Option<Rc<QueueSlot>>, cx: &Context<'_>) -> Poll<()> {
        match place {
            Some(taken) if taken.called.get() => {
                *place = None;
                return Poll::Ready(());
            }
            Some(taken) => taken.waker.borrow_mut().clone_from(cx.waker()),
            None => {
                let taken = QueueSlot { called: Cell::new(false), waker: RefCell::new(cx.waker().clone()) };
                let taken = Rc::new(taken);
                *place = Some(taken.clone());
                self.waiting.borrow_mut().push_back(taken);
                self.begun.notify_one();
            }
        }
        Poll::Pending
    }

    /// Calls the first of those that wait.
    fn call(&self) {
        let mut called = 0;
        while called < TOGETHER {
            let first = self.waiting.borrow_mut().pop_front();
            let Some(place) = first else { return };
            // Nobody else holds a place that was given up.
            if Rc::strong_count(&place) > 1 {
                place.called.set(true);
                place.waker.borrow().wake_by_ref();
                called += 1;
            }
        }
    }

    /// Lets in those that wait as long as it is polled.
    pub(crate) async fn run(&self) {
        loop {
            self.begun.notified().await;
            loop {
                self.call();
                if self.is_empty() {
                    break;
                }
                // They run, then what is under way goes on, and only then the next come.
                yield_now().await;
                for _ in 0..PASSES {
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

    /// Polls each that has a place, and says which were let in.
    fn let_in(turns: &Turns, places: &mut [Option<Rc<QueueSlot>>]) -> Vec<usize> {
        let cx = Context::from_waker(Waker::noop());
        let waiting = places.iter_mut().enumerate().filter(|(_, place)| place.is_some());
        waiting.filter_map(|(number, place)| turns.poll(place, &cx).is_ready().then_some(number)).collect()
    }

    #[test]
    fn the_first_to_come_are_let_in_first_and_who_has_gone_takes_no_place() {
        let (turns, cx) = (Turns::default(), Context::from_waker(Waker::noop()));
        let mut places = vec![None; 2 * TOGETHER];
        for place in &mut places {
            assert!(turns.poll(place, &cx).is_pending());
        }
        assert_eq!(let_in(&turns, &mut places), [0; 0], "nobody has been called");
        places[1] = None;
        turns.call();
        let first: Vec<usize> = [0].into_iter().chain(2..=TOGETHER).collect();
        assert_eq!(let_in(&turns, &mut places), first);
        turns.call();
        assert_eq!(let_in(&turns, &mut places), Vec::from_iter(TOGETHER + 1..2 * TOGETHER));
        assert!(turns.is_empty());
    }
}
