//! The downstream connections of a worker, and their drain.
//!
//! Connections are drained by the direction of their listener. A workload that still answers inbound requests may need
//! outbound connections for that.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    task::Waker,
    time::Duration,
};

use tokio::sync::Notify;

use skysail_http::map::Map;

/// Time for which a draining connection without a request stays open, because a request may be in flight.
pub(crate) const IDLE_DRAIN: Duration = Duration::from_secs(1);

/// The downstream connections of one direction on one worker.
#[derive(Default)]
pub(crate) struct ConnectionSet {
    connections: RefCell<Map<u64, Waker>>,
    next: Cell<u64>,
    /// While draining: the time for which a connection without a request stays open.
    idle_drain: Cell<Option<Duration>>,
    /// Whether the listening sockets are closed.
    closed: Cell<bool>,
    /// Notified when the last connection ends.
    empty: Notify,
}

/// Keeps a connection in its set while this lives.
pub(crate) struct Registered {
    set: Rc<ConnectionSet>,
    id: u64,
}

impl ConnectionSet {
    /// Adds a connection. `waker` wakes its task when the set drains.
    pub(crate) fn register(self: &Rc<Self>, waker: Waker) -> Registered {
        let id = self.next.get();
        self.next.set(id + 1);
        self.connections.borrow_mut().insert(id, waker);
        Registered { set: self.clone(), id }
    }

    /// Begins to drain all connections within `timeout`. Those without a request end after a quarter of it, at most
    /// [`IDLE_DRAIN`].
    pub(crate) fn drain(&self, timeout: Duration) {
        let idle_drain = IDLE_DRAIN.min(timeout / 4);
        self.idle_drain.set(Some(self.idle_drain.get().map_or(idle_drain, |before| before.min(idle_drain))));
        for waker in self.connections.borrow().values() {
            waker.wake_by_ref();
        }
    }

    /// Returns the wakers of the tasks of all connections.
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        self.connections.borrow().values().cloned().collect()
    }

    /// Returns whether the connections are being drained.
    pub(crate) fn is_draining(&self) -> bool {
        self.idle_drain.get().is_some()
    }

    /// Returns the time for which a connection without a request stays open while the set drains; `None` if it does not
    /// drain.
    pub(crate) fn idle_drain(&self) -> Option<Duration> {
        self.idle_drain.get()
    }

    /// Records that the listening sockets are closed for good.
    pub(crate) fn close_listeners(&self) {
        self.closed.set(true);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Returns the number of connections.
    pub(crate) fn count(&self) -> usize {
        self.connections.borrow().len()
    }

    /// Waits until there are no connections.
    pub(crate) async fn emptied(&self) {
        loop {
            let emptied = self.empty.notified();
            if self.count() == 0 {
                return;
            }
            emptied.await;
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut connections = self.set.connections.borrow_mut();
        connections.remove(&self.id);
        if connections.is_empty() {
            self.set.empty.notify_waiters();
        }
    }
}
