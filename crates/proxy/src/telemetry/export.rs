//! What waits to be sent to collectors: bounded batches, one of a collector on each worker.
//!
//! Requests only add to a batch, which never waits. What does not fit is dropped and counted, and told of once in a
//! while. How batches are sent is in [`crate::call::export`].

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use super::{Shard, stats::ExportStats};
use skysail_policy::config::collector::Collector;

/// So many bytes may wait, or a batch where that is more.
const MOST: usize = 1 << 20;
/// How often losses are told of.
const TELL: Duration = Duration::from_secs(60);

/// The batches of a worker.
#[derive(Debug, Default)]
pub(crate) struct Exporters(RefCell<Vec<Rc<Exporter>>>);

/// What waits to be sent to one collector.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(crate) collector: Arc<Collector>,
    pub(crate) stats: Rc<ExportStats>,
    batch: RefCell<Batch>,
    /// Told when there is something to send, where there was nothing.
    pub(crate) some: Notify,
    /// Told when what waits is to be sent at once.
    pub(crate) now: Notify,
    /// Told when [`Self::finished`] has come to be.
    pub(crate) done: Notify,
    /// The last batch did not get there: large ones wait, too.
    failing: Cell<bool>,
    /// The worker ends.
    pub(crate) ending: Cell<bool>,
    /// All that was told before that end is sent.
    pub(crate) finished: Cell<bool>,
    /// What was lost that nobody has been told of, and when somebody was.
    lost: Cell<u64>,
    told: Cell<Option<Instant>>,
}

/// Items, encoded one after the other.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) items: Vec<u8>,
    pub(crate) count: u64,
}

impl Exporters {
    /// The batch for this collector, and whether it is new, so that somebody has to send it.
    pub(crate) fn of(&self, collector: &Arc<Collector>, shard: &Shard) -> (Rc<Exporter>, bool) {
        let mut exporters = self.0.borrow_mut();
        let same = |exporter: &&Rc<Exporter>| {
            Arc::ptr_eq(&exporter.collector, collector) || exporter.collector == *collector
        };
        if let Some(exporter) = exporters.iter().find(same) {
            return (exporter.clone(), false);
        }
        let exporter = Rc::new(Exporter {
            stats: shard.exports(&collector.cluster, collector.what),
            collector: collector.clone(),
            batch: RefCell::default(),
            some: Notify::new(),
            now: Notify::new(),
            done: Notify::new(),
            failing: Cell::new(false),
            ending: Cell::new(false),
            finished: Cell::new(false),
            lost: Cell::new(0),
            told: Cell::new(None),
        });
        exporters.push(exporter.clone());
        (exporter, true)
    }

    /// Forgets one that is not used any more.
    pub(crate) fn remove(&self, exporter: &Rc<Exporter>) {
        self.0.borrow_mut().retain(|other| !Rc::ptr_eq(other, exporter));
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Rc<Exporter>> {
        self.0.borrow().clone()
    }
}

impl Exporter {
    /// Adds an item, unless too much waits already.
    pub(crate) fn add(&self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut batch = self.batch.borrow_mut();
        if batch.items.len() >= MOST.max(self.collector.size) {
            drop(batch);
            self.stats.dropped.inc();
            return self.lose(1, "more is told than it takes");
        }
        if batch.count == 0 {
            self.some.notify_one();
        }
        write(&mut batch.items);
        batch.count += 1;
        if batch.items.len() >= self.collector.size && !self.failing.get() {
            self.now.notify_one();
        }
    }

    /// All that waits.
    pub(crate) fn take(&self) -> Batch {
        self.batch.take()
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.batch.borrow().count == 0
    }

    /// So many items got there.
    pub(crate) fn sent(&self, count: u64) {
        self.stats.sent.add(count);
        self.failing.set(false);
    }

    /// So many items did not.
    pub(crate) fn failed(&self, count: u64, why: &str) {
        self.stats.failed.add(count);
        self.failing.set(true);
        self.lose(count, why);
    }

    fn lose(&self, count: u64, why: &str) {
        let (now, lost) = (Instant::now(), self.lost.get() + count);
        if self.told.get().is_some_and(|told| now - told < TELL) {
            return self.lost.set(lost);
        }
        self.told.set(Some(now));
        self.lost.set(0);
        let Collector { what, cluster, .. } = &*self.collector;
        tracing::warn!(
            "{lost} {what} did not get to cluster {cluster}: {why}; see that the collector runs and keeps up \
             (told of once a minute, counted in skysail_export_dropped_total and skysail_export_failed_total)"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skysail_policy::{
        config::collector::{Call, Envelope},
        peer::LocalWorkload,
    };

    fn collector(size: usize) -> Arc<Collector> {
        Arc::new(Collector {
            what: "spans",
            cluster: "c".into(),
            authority: "c".into(),
            call: Call::Unary("/s/M"),
            headers: Vec::new(),
            timeout: Duration::from_secs(1),
            interval: Duration::from_secs(1),
            size,
            envelope: Envelope::Array,
        })
    }

    fn is_told(notify: &Notify) -> bool {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::pin!(notify.notified()).poll(&mut cx).is_ready()
    }

    #[test]
    fn what_waits_is_bounded_and_full_batches_go_at_once() {
        let shard = Shard::new(Arc::new(LocalWorkload::default()), 10);
        let exporters = Exporters::default();
        let (exporter, new) = exporters.of(&collector(100), &shard);
        assert!(new);
        // Others of the same content share it.
        assert!(Rc::ptr_eq(&exporter, &exporters.of(&collector(100), &shard).0));
        assert!(!Rc::ptr_eq(&exporter, &exporters.of(&collector(101), &shard).0));

        exporter.add(|items| items.extend([0; 99]));
        assert!(is_told(&exporter.some) && !is_told(&exporter.now));
        exporter.add(|items| items.push(0));
        assert!(!is_told(&exporter.some) && is_told(&exporter.now));
        let batch = exporter.take();
        assert_eq!((batch.items.len(), batch.count), (100, 2));
        assert!(exporter.is_empty());

        // After a failure only time sends what waits.
        exporter.failed(2, "test");
        exporter.add(|items| items.resize(MOST, 0));
        assert!(!is_told(&exporter.now));
        for _ in 0..3 {
            exporter.add(|_| panic!("there is no room"));
        }
        assert_eq!((exporter.stats.dropped.get(), exporter.stats.failed.get()), (3, 2));
        assert_eq!(exporter.take().count, 1);
        exporter.sent(1);
        exporter.add(|items| items.extend([0; 100]));
        assert!(is_told(&exporter.now));

        exporters.remove(&exporter);
        assert!(exporters.of(&collector(100), &shard).1);
    }
}
