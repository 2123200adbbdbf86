//! A timer with a resolution of nanoseconds. The timers of the runtime have a resolution of milliseconds.

use std::{
    cell::RefCell,
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
    os::fd::AsFd as _,
    rc::Rc,
};

use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::{net::unix::pipe::Receiver, sync::oneshot};

use crate::clock;

/// Timer of a thread. A task of its [`tokio::task::LocalSet`] serves it.
pub(super) struct Timer(Rc<State>);

struct State {
    timer: TimerFd,
    /// Another descriptor of the timer. The runtime reads it like a pipe.
    expirations: Receiver,
    waiting: RefCell<BinaryHeap<Reverse<Waiting>>>,
}

struct Waiting {
    due: u64,
    wake: oneshot::Sender<()>,
}

impl Timer {
    /// Creates a timer and spawns its task.
    pub(super) fn start() -> anyhow::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let expirations = Receiver::from_owned_fd_unchecked(timer.as_fd().try_clone_to_owned()?)?;
        let state = Rc::new(State { timer, expirations, waiting: RefCell::default() });
        tokio::task::spawn_local(serve(Rc::clone(&state)));
        Ok(Self(state))
    }

    /// Waits until this time of the monotonic clock, in nanoseconds. Returns at once if the timer cannot be set.
    pub(super) async fn until(&self, due: u64) {
        let (wake, woken) = oneshot::channel();
        let is_first = {
            let mut waiting = self.0.waiting.borrow_mut();
            let is_first = waiting.peek().is_none_or(|Reverse(first)| due < first.due);
            waiting.push(Reverse(Waiting { due, wake }));
            is_first
        };
        if is_first && self.0.arm(due).is_err() {
            return;
        }
        // The sender is dropped only at the end of the thread.
        let _ = woken.await;
    }
}

impl State {
    fn arm(&self, due: u64) -> nix::Result<()> {
        let at = Expiration::OneShot(clock::timespec(due.max(1)));
        self.timer.set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME)
    }
}

/// Wakes the waiters that are due each time the timer expires.
async fn serve(state: Rc<State>) {
    loop {
        if state.expirations.readable().await.is_err() {
            return;
        }
        // Clears the expirations. Fails without consequences if the timer has been set again.
        let _ = state.expirations.try_read(&mut [0; 8]);
        let now = clock::now();
        let next = loop {
            let mut waiting = state.waiting.borrow_mut();
            let Some(Reverse(first)) = waiting.peek() else { break None };
            if first.due > now {
                break Some(first.due);
            }
            if let Some(Reverse(first)) = waiting.pop() {
                // The waiter may have been dropped.
                let _ = first.wake.send(());
            }
        };
        if let Some(due) = next
            && state.arm(due).is_err()
        {
            return;
        }
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        self.due.cmp(&other.due)
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}

impl Eq for Waiting {}
