//! What the request path works with besides the connection itself: what all workers share, and what each has
//! for itself.

pub(crate) mod downstream;
pub(crate) mod filter_chain_match;
pub(crate) mod inspect;
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
    overload::{Limits, Overload, drain::Side, pressure::Pressure},
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

/// What all workers share.
#[derive(Clone)]
pub struct Shared {
    /// The configuration published last, for those who look at it from outside.
    pub snapshot: Arc<ArcSwap<Snapshot>>,
    /// Who we are.
    pub local: Arc<LocalWorkload>,
    /// What connections to upstreams are made with.
    pub dialer: Dialer,
    /// Where access log lines go.
    pub access_log: Arc<AccessLogger>,
    /// When a worker refuses requests.
    pub limits: Limits,
    /// Whether connections are taken.
    pub pressure: Arc<Pressure>,
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
    /// By [`Direction`].
    sides: [Rc<Side>; Direction::ALL.len()],
    /// Counts the configurations that may not admit what was admitted before.
    epoch: Cell<u32>,
    /// When the epoch began.
    epoch_begun: Cell<Instant>,
    /// Told when the epoch changes.
    pub(crate) reconsider: Notify,
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
            dice: RefCell::default(),
            peers: PeerCache::default(),
            shard,
            log,
            exporters: Exporters::default(),
            snapshot: RefCell::new(snapshot),
            date: RefCell::default(),
            sides: Default::default(),
            epoch: Cell::new(0),
            epoch_begun: Cell::new(Instant::now()),
            reconsider: Notify::new(),
            ending: Cell::new(false),
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
        self.shard.expire_after(snapshot.metrics_expiry());
        let before = self.snapshot.replace(Rc::new(snapshot));
        if self.snapshot.borrow().concerns_admission(&before) {
            self.begin_epoch();
        }
    }

    /// Which of the configurations is in force that may not admit what was admitted before.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.get()
    }

    /// Until when what was admitted before this epoch may go on, if it would not be admitted now.
    pub(crate) fn drain_end(&self) -> Instant {
        self.epoch_begun.get() + self.shared.limits.revoked_drain
    }

    /// Has all that is open judged again.
    pub(crate) fn begin_epoch(&self) {
        self.epoch.set(self.epoch.get().wrapping_add(1));
        self.epoch_begun.set(Instant::now());
        self.reconsider.notify_one();
    }

    /// The connections of all directions.
    pub(crate) fn sides(&self) -> &[Rc<Side>] {
        &self.sides
    }

    /// The connections that come in by listeners of this direction.
    pub(crate) fn side(&self, direction: Direction) -> &Rc<Side> {
        &self.sides[direction as usize]
    }

    /// Whether the worker serves what it has and nothing after that.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.get()
    }

    /// Connections to upstreams end with what they serve.
    pub(crate) fn end(&self) {
        self.ending.set(true);
        self.clusters.clear();
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
