//! What the request path works with besides the connection itself: what all workers share, and what each has
//! for itself.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
    task::Waker,
    time::{Duration, Instant},
};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::Notify;

use crate::{
    config::{Map, Snapshot},
    overload::{Limits, Overload},
    peer::{LocalWorkload, PeerCache},
    pool::{Clusters, Pool},
    telemetry::{AccessLogger, LogWriter, Shard, export::Exporters},
};

/// What all workers share.
#[derive(Clone)]
pub struct Shared {
    /// The configuration published last, for those who look at it from outside.
    pub snapshot: Arc<ArcSwap<Snapshot>>,
    /// Who we are.
    pub local: Arc<LocalWorkload>,
    /// Mark of every socket opened to an upstream, so that interception lets it through.
    pub mark: Option<u32>,
    /// The first URI name of our certificate, once there is one.
    pub principal: Arc<ArcSwapOption<Arc<str>>>,
    /// Where access log lines go.
    pub access_log: Arc<AccessLogger>,
    /// When a worker refuses requests.
    pub limits: Limits,
}

impl Shared {
    pub(crate) fn principal(&self) -> Option<Arc<str>> {
        self.principal.load().as_deref().cloned()
    }
}

/// What one worker has for itself. Everything that runs on it holds a reference.
pub(crate) struct Worker {
    pub(crate) shared: Shared,
    pub(crate) clusters: Clusters,
    pub(crate) dice: RefCell<fastrand::Rng>,
    pub(crate) peers: PeerCache,
    pub(crate) shard: Shard,
    pub(crate) log: Option<LogWriter>,
    pub(crate) exporters: Exporters,
    pub(crate) overload: Overload,
    snapshot: RefCell<Rc<Snapshot>>,
    date: RefCell<(Option<Instant>, String)>,
    connections: RefCell<Map<u64, Waker>>,
    next_connection: Cell<u64>,
    draining: Cell<bool>,
    /// Told when the last connection ends.
    pub(crate) quiet: Notify,
}

/// A downstream connection that the worker knows of.
pub(crate) struct Registered {
    worker: Rc<Worker>,
    id: u64,
}

impl Worker {
    pub(crate) fn new(shared: Shared) -> Rc<Self> {
        let snapshot = Rc::new(Snapshot::clone(&shared.snapshot.load()));
        let shard = Shard::new(shared.local.clone());
        let log = shared.access_log.writer();
        Rc::new(Self {
            overload: Overload::new(shared.limits),
            shared,
            clusters: Clusters::default(),
            dice: RefCell::default(),
            peers: PeerCache::default(),
            shard,
            log,
            exporters: Exporters::default(),
            snapshot: RefCell::new(snapshot),
            date: RefCell::default(),
            connections: RefCell::default(),
            next_connection: Cell::new(0),
            draining: Cell::new(false),
            quiet: Notify::new(),
        })
    }

    /// The newest configuration.
    pub(crate) fn snapshot(&self) -> Rc<Snapshot> {
        self.snapshot.borrow().clone()
    }

    /// Whether this is still the newest configuration.
    pub(crate) fn is_current(&self, snapshot: &Rc<Snapshot>) -> bool {
        Rc::ptr_eq(&self.snapshot.borrow(), snapshot)
    }

    /// The cluster of this name, as this worker uses it.
    pub(crate) fn pool(&self, name: &str, snapshot: &Snapshot) -> Option<Rc<Pool>> {
        self.clusters.get(name, snapshot, &self.shard)
    }

    /// Takes over a new configuration.
    pub(crate) fn update(&self, snapshot: Snapshot) {
        self.clusters.update(&snapshot);
        *self.snapshot.borrow_mut() = Rc::new(snapshot);
    }

    /// Whether no new work is taken.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// Tells every connection that the end is near.
    pub(crate) fn drain(&self) {
        self.draining.set(true);
        for waker in self.connections.borrow().values() {
            waker.wake_by_ref();
        }
        self.clusters.clear();
    }

    /// How many downstream connections there are.
    pub(crate) fn connections(&self) -> usize {
        self.connections.borrow().len()
    }

    /// Takes down a connection. `waker` is its task's, to be woken when the worker drains.
    pub(crate) fn register(self: &Rc<Self>, waker: Waker) -> Registered {
        let id = self.next_connection.get();
        self.next_connection.set(id + 1);
        self.connections.borrow_mut().insert(id, waker);
        Registered { worker: self.clone(), id }
    }

    /// Appends the date as headers have it; worked out once a second.
    pub(crate) fn with_date<T>(&self, now: Instant, with: impl FnOnce(&str) -> T) -> T {
        let mut date = self.date.borrow_mut();
        if date.0.is_none_or(|at| now.saturating_duration_since(at) >= Duration::from_millis(500)) {
            date.1 = httpdate::fmt_http_date(std::time::SystemTime::now());
            date.0 = Some(now);
        }
        with(&date.1)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut connections = self.worker.connections.borrow_mut();
        connections.remove(&self.id);
        if connections.is_empty() {
            self.worker.quiet.notify_waiters();
        }
    }
}
