//! Which downstream connections there are, and how they are told to end.
//!
//! They are drained by the direction of the listener whose socket they came in by: who still answers what came in may
//! need connections that go out for it.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    task::Waker,
    time::Duration,
};

use tokio::sync::Notify;

use skysail_http::map::Map;

/// A connection without a request that is to end is kept so long for a request that is on its way.
pub(crate) const FAREWELL: Duration = Duration::from_secs(1);

/// The connections of one direction on one worker.
#[derive(Default)]
pub(crate) struct Side {
    connections: RefCell<Map<u64, Waker>>,
    next: Cell<u64>,
    farewell: Cell<Option<Duration>>,
    closed: Cell<bool>,
    /// Told when the last connection ends.
    empty: Notify,
}

/// A connection that its side knows of.
pub(crate) struct Registered {
    side: Rc<Side>,
    id: u64,
}

impl Side {
    /// Takes down a connection. `waker` is its task's, to be woken when the side drains.
    pub(crate) fn register(self: &Rc<Self>, waker: Waker) -> Registered {
        let id = self.next.get();
        self.next.set(id + 1);
        self.connections.borrow_mut().insert(id, waker);
        Registered { side: self.clone(), id }
    }

    /// Tells every connection to end soon: those without a request within a part of this time.
    pub(crate) fn drain(&self, patience: Duration) {
        let farewell = FAREWELL.min(patience / 4);
        self.farewell.set(Some(self.farewell.get().map_or(farewell, |before| before.min(farewell))));
        for waker in self.connections.borrow().values() {
            waker.wake_by_ref();
        }
    }

    /// The tasks of all connections.
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        self.connections.borrow().values().cloned().collect()
    }

    /// Whether connections are to end.
    pub(crate) fn is_draining(&self) -> bool {
        self.farewell.get().is_some()
    }

    /// If connections are to end: how long one without a request is kept.
    pub(crate) fn farewell(&self) -> Option<Duration> {
        self.farewell.get()
    }

    /// From now on there are no listening sockets.
    pub(crate) fn close(&self) {
        self.closed.set(true);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// How many connections there are.
    pub(crate) fn connections(&self) -> usize {
        self.connections.borrow().len()
    }

    /// Waits until there are none.
    pub(crate) async fn emptied(&self) {
        loop {
            let told = self.empty.notified();
            if self.connections() == 0 {
                return;
            }
            told.await;
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut connections = self.side.connections.borrow_mut();
        connections.remove(&self.id);
        if connections.is_empty() {
            self.side.empty.notify_waiters();
        }
    }
}
