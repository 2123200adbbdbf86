//! Buffers of items for collectors: one bounded batch per collector and worker.
//!
//! Requests append to a batch and never wait. Items that do not fit are dropped, counted, and logged at most
//! once a minute. [`crate::call::export`] sends the batches, and puts back those that the collector did not get.

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
/// Maximum time between two attempts to send to a collector that is away, unless its interval is longer.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum number of consecutive attempts without new items. A collector that the configuration no longer has would
/// otherwise keep its batch forever. With [`MAX_BACKOFF`] they take a quarter of an hour.
const MAX_IDLE_ATTEMPTS: u32 = 20;
/// Minimum interval between warnings about dropped items.
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
    /// Number of batches that failed in a row. After a failure a full batch is not sent at once.
    failures: Cell<u32>,
    /// Number of these failures since the last item was added.
    idle_failures: Cell<u32>,
    /// The worker is shutting down.
    pub(crate) ending: Cell<bool>,
    /// All items from before the shutdown are sent.
    pub(crate) finished: Cell<bool>,
    /// Dropped items since the last warning, and the time of that warning.
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
            failures: Cell::new(0),
            idle_failures: Cell::new(0),
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
        if batch.items.len() >= self.max_bytes() {
            drop(batch);
            self.stats.dropped.inc();
            return self.report_dropped(1, "the buffer is full");
        }
        if batch.count == 0 {
            self.some.notify_one();
        }
        write(&mut batch.items);
        batch.count += 1;
        if batch.items.len() >= self.collector.size && self.failures.get() == 0 {
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
        self.failures.set(0);
        self.idle_failures.set(0);
    }

    /// Records that a batch of `count` items is dropped after a failure.
    pub(crate) fn failed(&self, count: u64, why: &str) {
        self.stats.failed.add(count);
        self.failures.set(self.failures.get().saturating_add(1));
        self.idle_failures.set(0);
        self.report_dropped(count, why);
    }

    /// Puts back a batch that the collector did not get, before the items added since. The batch is dropped if the
    /// worker is shutting down, if both exceed the buffer, or after [`MAX_IDLE_ATTEMPTS`].
    pub(crate) fn put_back(&self, failed: Batch, why: &str) {
        let mut batch = self.batch.borrow_mut();
        self.idle_failures.set(if batch.count == 0 { self.idle_failures.get() + 1 } else { 0 });
        let is_abandoned = self.idle_failures.get() >= MAX_IDLE_ATTEMPTS;
        if self.ending.get() || is_abandoned || failed.items.len() + batch.items.len() > self.max_bytes() {
            drop(batch);
            return self.failed(failed.count, why);
        }
        self.stats.retried.add(failed.count);
        self.failures.set(self.failures.get().saturating_add(1));
        let Batch { mut items, count } = failed;
        items.append(&mut batch.items);
        *batch = Batch { items, count: count + batch.count };
        drop(batch);
        let Collector { what, cluster, .. } = &*self.collector;
        if self.is_warning_due() {
            tracing::warn!(
                "{count} {what} could not be sent to cluster {cluster}: {why}; they are sent again (logged at most once \
                 a minute; counted in skysail_export_retried_total)"
            );
        }
    }

    /// Returns the time until a batch is sent that is not full: the interval of the collector, doubled for each failure
    /// in a row up to [`MAX_BACKOFF`].
    pub(crate) fn interval(&self) -> Duration {
        let interval = self.collector.interval;
        let doubled = interval.saturating_mul(1 << self.failures.get().min(16));
        doubled.min(MAX_BACKOFF.max(interval))
    }

    fn max_bytes(&self) -> usize {
        MAX_BYTES.max(self.collector.size)
    }

    /// Returns whether a warning may be logged now, and then counts it as logged.
    fn is_warning_due(&self) -> bool {
        let now = Instant::now();
        let is_due =
            self.last_warning.get().is_none_or(|last_warning| now - last_warning >= WARNING_INTERVAL);
        if is_due {
            self.last_warning.set(Some(now));
        }
        is_due
    }

    fn report_dropped(&self, count: u64, why: &str) {
        let unreported = self.unreported.get() + count;
        if !self.is_warning_due() {
            return self.unreported.set(unreported);
        }
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

        // A batch that did not arrive is sent again before later items, after a longer time each time.
        let failed = exporter.take();
        exporter.add(|items| items.push(7));
        assert_eq!(exporter.interval(), Duration::from_secs(1));
        exporter.put_back(failed, "test");
        assert_eq!(exporter.interval(), Duration::from_secs(2));
        let batch = exporter.take();
        assert_eq!((batch.count, batch.items[..100].iter().sum::<u8>(), batch.items[100]), (2, 0, 7));
        assert_eq!(exporter.stats.retried.get(), 1);
        exporter.put_back(batch, "test");
        exporter.add(|items| items.resize(MAX_BYTES, 0));
        let full = exporter.take();
        exporter.add(|items| items.push(0));
        exporter.put_back(full, "test");
        assert_eq!((exporter.stats.failed.get(), exporter.take().count), (5, 1), "both exceed the buffer");
        (0..20).for_each(|_| exporter.put_back(Batch { items: vec![0], count: 1 }, "test"));
        assert_eq!(exporter.interval(), MAX_BACKOFF);
        // A batch without new items is dropped after some attempts, otherwise at shutdown.
        for attempt in 1..=MAX_IDLE_ATTEMPTS {
            assert_eq!(exporter.stats.failed.get(), 5, "{attempt}");
            exporter.put_back(exporter.take(), "test");
        }
        assert_eq!((exporter.stats.failed.get(), exporter.is_empty()), (25, true));
        exporter.add(|items| items.push(0));
        exporter.ending.set(true);
        exporter.put_back(exporter.take(), "test");
        assert_eq!((exporter.stats.failed.get(), exporter.is_empty()), (26, true));

        exporters.remove(&exporter);
        assert!(exporters.of(&collector(100), &shard).1);
    }
}
