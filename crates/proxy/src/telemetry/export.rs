//! Buffers of items for collectors: one bounded batch per collector and worker.
//!
//! Requests append to a batch and never wait. Items that do not fit are dropped, counted, and logged at most
//! once a minute. [`crate::call::export`] sends the batches.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use super::{Shard, stats::ExportStats};
use skysail_policy::config::collector::Collector;

/// Maximum size of a buffer in bytes, unless the batch size is larger.
const MAX_BYTES: usize = 1 << 20;
/// Minimum interval between warnings about lost items.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Batches of a worker.
#[derive(Debug, Default)]
pub(crate) struct Exporters(RefCell<Vec<Rc<Exporter>>>);

/// Buffer of one collector.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(crate) collector: Arc<Collector>,
    pub(crate) stats: Rc<ExportStats>,
    batch: RefCell<Batch>,
    /// Notified when the first item is added to an empty batch.
    pub(crate) some: Notify,
    /// Notified when the batch must be sent at once.
    pub(crate) now: Notify,
    /// Notified when [`Self::finished`] becomes true.
    pub(crate) done: Notify,
    /// The last batch failed: a full batch is not sent at once.
    failing: Cell<bool>,
    /// The worker is shutting down.
    pub(crate) ending: Cell<bool>,
    /// All items from before the shutdown are sent.
    pub(crate) finished: Cell<bool>,
    /// Lost items since the last warning, and the time of that warning.
    unreported: Cell<u64>,
    last_warning: Cell<Option<Instant>>,
}

/// Items, encoded one after the other.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) items: Vec<u8>,
    pub(crate) count: u64,
}

impl Exporters {
    /// Returns the buffer of a collector, and whether it is new and needs a task that sends it.
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
            unreported: Cell::new(0),
            last_warning: Cell::new(None),
        });
        exporters.push(exporter.clone());
        (exporter, true)
    }

    /// Removes an unused buffer.
    pub(crate) fn remove(&self, exporter: &Rc<Exporter>) {
        self.0.borrow_mut().retain(|other| !Rc::ptr_eq(other, exporter));
    }

    /// Returns all buffers.
    pub(crate) fn all(&self) -> Vec<Rc<Exporter>> {
        self.0.borrow().clone()
    }
}

impl Exporter {
    /// Appends an item unless the buffer is full.
    pub(crate) fn add(&self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut batch = self.batch.borrow_mut();
        if batch.items.len() >= MAX_BYTES.max(self.collector.size) {
            drop(batch);
            self.stats.dropped.inc();
            return self.lose(1, "the buffer is full");
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

    /// Takes the batch.
    pub(crate) fn take(&self) -> Batch {
        self.batch.take()
    }

    /// Returns whether the batch is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.batch.borrow().count == 0
    }

    /// Records that a batch of `count` items was delivered.
    pub(crate) fn sent(&self, count: u64) {
        self.stats.sent.add(count);
        self.failing.set(false);
    }

    /// Records that a batch of `count` items was lost.
    pub(crate) fn failed(&self, count: u64, why: &str) {
        self.stats.failed.add(count);
        self.failing.set(true);
        self.lose(count, why);
    }

    fn lose(&self, count: u64, why: &str) {
        let (now, unreported) = (Instant::now(), self.unreported.get() + count);
        if self.last_warning.get().is_some_and(|last_warning| now - last_warning < WARNING_INTERVAL) {
            return self.unreported.set(unreported);
        }
        self.last_warning.set(Some(now));
        self.unreported.set(0);
        let Collector { what, cluster, .. } = &*self.collector;
        tracing::warn!(
            "{unreported} {what} could not be sent to cluster {cluster}: {why}; check that the collector runs and keeps up \
             (logged at most once a minute; counted in skysail_export_dropped_total and skysail_export_failed_total)"
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

    fn is_notified(notify: &Notify) -> bool {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::pin!(notify.notified()).poll(&mut cx).is_ready()
    }

    #[test]
    fn buffers_are_bounded_and_full_batches_are_sent_at_once() {
        let shard = Shard::new(Arc::new(LocalWorkload::default()), 10);
        let exporters = Exporters::default();
        let (exporter, new) = exporters.of(&collector(100), &shard);
        assert!(new);
        // Collectors of equal configuration share a buffer.
        assert!(Rc::ptr_eq(&exporter, &exporters.of(&collector(100), &shard).0));
        assert!(!Rc::ptr_eq(&exporter, &exporters.of(&collector(101), &shard).0));

        exporter.add(|items| items.extend([0; 99]));
        assert!(is_notified(&exporter.some) && !is_notified(&exporter.now));
        exporter.add(|items| items.push(0));
        assert!(!is_notified(&exporter.some) && is_notified(&exporter.now));
        let batch = exporter.take();
        assert_eq!((batch.items.len(), batch.count), (100, 2));
        assert!(exporter.is_empty());

        // After a failure only the flush interval sends a batch.
        exporter.failed(2, "test");
        exporter.add(|items| items.resize(MAX_BYTES, 0));
        assert!(!is_notified(&exporter.now));
        for _ in 0..3 {
            exporter.add(|_| panic!("there is no room"));
        }
        assert_eq!((exporter.stats.dropped.get(), exporter.stats.failed.get()), (3, 2));
        assert_eq!(exporter.take().count, 1);
        exporter.sent(1);
        exporter.add(|items| items.extend([0; 100]));
        assert!(is_notified(&exporter.now));

        exporters.remove(&exporter);
        assert!(exporters.of(&collector(100), &shard).1);
    }
}
