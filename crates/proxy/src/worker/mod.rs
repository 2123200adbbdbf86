//! The state of the workers: the part that all workers share, and the part of each worker.

pub(crate) mod downstream;
pub(crate) mod filter_chain_match;
pub(crate) mod inspect;
pub(crate) mod limits;
pub(crate) mod revalidation;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use crate::{
    overload::{Limits, Overload, drain::ConnectionSet, pressure::OverloadActions},
    script,
    telemetry::{AccessLogger, LogWriter, Shard, export::Exporters},
    upstream::{
        Dialer,
        pool::{Clusters, Pool},
    },
};
use skysail_policy::{
    config::{Snapshot, listener::Direction},
    peer::{LocalWorkload, PeerCache},
};

/// State that all workers share.
#[derive(Clone)]
pub struct Shared {
    /// The configuration that was published last; a worker loads it when it starts.
    pub snapshot: Arc<ArcSwap<Snapshot>>,
    /// This sidecar's workload.
    pub local: Arc<LocalWorkload>,
    /// Opens connections to upstreams.
    pub dialer: Dialer,
    /// Writes access logs to files.
    pub access_log: Arc<AccessLogger>,
    /// Thresholds of load shedding and other limits.
    pub limits: Limits,
    /// The overload manager.
    pub pressure: Arc<OverloadActions>,
}

/// State of one worker. Every task of the worker holds a reference.
pub(crate) struct Worker {
    pub(crate) shared: Shared,
    pub(crate) clusters: Clusters,
    pub(crate) rng: RefCell<fastrand::Rng>,
    pub(crate) peers: PeerCache,
    pub(crate) shard: Shard,
    pub(crate) log: Option<LogWriter>,
    pub(crate) exporters: Exporters,
    pub(crate) overload: Overload,
    /// States of Lua scripts.
    pub(crate) scripts: script::States,
    snapshot: RefCell<Rc<Snapshot>>,
    date: RefCell<(Option<Instant>, String)>,
    /// Downstream connections, by [`Direction`].
    connection_sets: [Rc<ConnectionSet>; Direction::ALL.len()],
    /// Number of the current admission epoch: incremented by a configuration that may not admit all open connections.
    epoch: Cell<u32>,
    /// Start of the epoch.
    epoch_begun: Cell<Instant>,
    /// Notified when an epoch begins.
    pub(crate) epoch_changed: Notify,
    ending: Cell<bool>,
}

impl Worker {
    pub(crate) fn new(shared: Shared) -> Rc<Self> {
        let snapshot = Rc::new(Snapshot::clone(&shared.snapshot.load()));
        let shard = Shard::new(shared.local.clone(), shared.limits.series);
        shard.expire_after(snapshot.metrics_expiry());
        let log = shared.access_log.writer();
        Rc::new(Self {
            overload: Overload::new(shared.limits),
            shared,
            clusters: Clusters::default(),
            rng: RefCell::default(),
            peers: PeerCache::default(),
            shard,
            log,
            exporters: Exporters::default(),
            scripts: script::States::default(),
            snapshot: RefCell::new(snapshot),
            date: RefCell::default(),
            connection_sets: Default::default(),
            epoch: Cell::new(0),
            epoch_begun: Cell::new(Instant::now()),
            epoch_changed: Notify::new(),
            ending: Cell::new(false),
        })
    }

    /// Returns the configuration in effect.
    pub(crate) fn snapshot(&self) -> Rc<Snapshot> {
        self.snapshot.borrow().clone()
    }

    /// Returns whether this is the configuration in effect.
    pub(crate) fn is_current(&self, snapshot: &Rc<Snapshot>) -> bool {
        Rc::ptr_eq(&self.snapshot.borrow(), snapshot)
    }

    /// Returns the connection pool of a cluster.
    pub(crate) fn pool(&self, name: &str, snapshot: &Snapshot) -> Option<Rc<Pool>> {
        self.clusters.get(name, snapshot, &self.shard)
    }

    /// Puts a new configuration in effect.
    pub(crate) fn update(&self, snapshot: Snapshot) {
        self.clusters.update(&snapshot);
        self.shard.expire_after(snapshot.metrics_expiry());
        let before = self.snapshot.replace(Rc::new(snapshot));
        if self.snapshot.borrow().concerns_admission(&before) {
            self.begin_epoch();
        }
    }

    /// Returns the number of the current admission epoch.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.get()
    }

    /// Returns the end of the drain time of connections and requests that the current epoch does not admit.
    pub(crate) fn drain_end(&self) -> Instant {
        self.epoch_begun.get() + self.shared.limits.revoked_drain
    }

    /// Begins an epoch: all open connections and requests are revalidated.
    pub(crate) fn begin_epoch(&self) {
        self.epoch.set(self.epoch.get().wrapping_add(1));
        self.epoch_begun.set(Instant::now());
        self.epoch_changed.notify_one();
    }

    /// Returns the connections of all directions.
    pub(crate) fn connection_sets(&self) -> &[Rc<ConnectionSet>] {
        &self.connection_sets
    }

    /// Returns the connections of the listeners of a direction.
    pub(crate) fn connections(&self, direction: Direction) -> &Rc<ConnectionSet> {
        &self.connection_sets[direction as usize]
    }

    /// Returns whether the worker shuts down.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.get()
    }

    /// Begins the shutdown: connections to upstreams end with the requests that they serve.
    pub(crate) fn end(&self) {
        self.ending.set(true);
        self.clusters.clear();
    }

    /// Calls `with` with the current date in HTTP format, which is computed at most every 500 ms.
    pub(crate) fn with_date<T>(&self, now: Instant, with: impl FnOnce(&str) -> T) -> T {
        let mut date = self.date.borrow_mut();
        if date.0.is_none_or(|at| now.saturating_duration_since(at) >= Duration::from_millis(500)) {
            date.1 = httpdate::fmt_http_date(std::time::SystemTime::now());
            date.0 = Some(now);
        }
        with(&date.1)
    }
}
