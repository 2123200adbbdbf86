//! The metrics of one worker.
//!
//! A request finds its series by a key of a few numbers: the other end is numbered once per connection, the
//! cluster is known by the address of its name (which is kept alive here, so that the address stays its own).
//! Labels are put together only when a key is new. All that others can make grow is bounded.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    attributes,
    series::{
        self, Destination, HttpSeries, LONGEST_NAME, LabelChange, OtherEnd, Series, TcpCounts, TcpSeries,
    },
    stats::{ClusterStats, ExportStats, ListenerStats, ManagerStats, OutlierStats, Sample},
};
use skysail_http::{head::RequestHead, map::Map};
use skysail_policy::{
    config::{
        Snapshot,
        listener::{Direction, Terminal},
        stats::{HTTP, MetricChange, Stats, TCP},
    },
    expression::Expression,
    peer::{LocalWorkload, Peer},
    record::{Context, Record},
};

#[cfg(test)]
mod tests;

/// The most keys remembered; then all are forgotten and found anew by their labels.
const MOST_KEYS: usize = 8_192;
/// The most other ends that have numbers; then they get new ones.
const MOST_OTHERS: usize = 8_192;
/// How long series are kept that nothing is counted in, where the configuration does not say.
const EXPIRY: Duration = Duration::from_hours(1);
/// Length of the labels of a series in bytes, on average over as many series as there may be.
const LABELS: usize = 2048;
/// How often is looked for those at most, and how often is told of what is too much.
const SWEEP: Duration = Duration::from_secs(60);

/// The metrics of one worker thread.
#[derive(Debug)]
pub struct Shard {
    local: Arc<LocalWorkload>,
    /// The most series of requests, and of connections.
    most: usize,
    expiry: Cell<Duration>,
    swept: Cell<Option<Instant>>,
    /// When a warning was logged last: of too many series, and of labels that take too much room.
    told: [Cell<Option<Instant>>; 2],
    numbers: RefCell<Numbers>,
    /// Hashes authorities: with a secret, as clients choose them.
    secret: RandomState,
}

#[derive(Debug, Default)]
struct Numbers {
    others: HashMap<OtherEnd, u32>,
    /// The last number that another end got.
    last_other: u32,
    keys: HashMap<Key, u32, BuildHasherDefault<Mix>>,
    /// Names of clusters that keys refer to by address.
    held: HashMap<usize, Arc<str>>,
    http: Table<HttpSeries>,
    tcp: Table<TcpSeries>,
    dropped: u64,
    /// Requests and connections that were counted without what their peers say of themselves.
    unlabelled: u64,
    expired: u64,
    clusters: Map<Arc<str>, Rc<ClusterStats>>,
    outliers: Map<Arc<str>, Rc<OutlierStats>>,
    managers: Map<Arc<str>, Rc<ManagerStats>>,
    listeners: Map<Arc<str>, Rc<ListenerStats>>,
    /// By cluster and what is told.
    exports: Map<(Box<str>, &'static str), Rc<ExportStats>>,
}

/// Series by their labels.
#[derive(Debug)]
struct Table<T> {
    by_labels: HashMap<Arc<str>, u32>,
    /// Length of all labels in bytes.
    bytes: usize,
    series: Vec<(Arc<str>, T)>,
    /// What was counted in each when it was last looked at, and since when that is so.
    counted: Vec<(u64, Instant)>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { by_labels: HashMap::new(), bytes: 0, series: Vec::new(), counted: Vec::new() }
    }
}

/// All that tells one series from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    other: u32,
    flags: u32,
    cluster: usize,
    authority: u64,
    grpc_status: u32,
    status: u16,
    direction: Direction,
    protocol: Protocol,
    /// `allow_any`, `block_all` or neither.
    route: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Protocol {
    Http,
    Grpc,
    Tcp,
}

/// The numbers of one worker at one moment.
#[derive(Clone, Debug, Default)]
pub struct ShardSnapshot {
    pub(super) http: Vec<(Arc<str>, HttpSeries)>,
    pub(super) tcp: Vec<(Arc<str>, TcpSeries)>,
    /// Label text and values.
    pub(super) samples: Vec<(String, Vec<Sample>)>,
    pub(super) dropped: u64,
    pub(super) unlabelled: u64,
    pub(super) expired: u64,
}

impl Shard {
    /// Nothing counted yet. There may be so many series of requests, and as many of connections.
    pub fn new(local: Arc<LocalWorkload>, most: usize) -> Self {
        Self {
            local,
            most,
            expiry: Cell::new(EXPIRY),
            swept: Cell::new(None),
            told: Default::default(),
            numbers: RefCell::default(),
            secret: RandomState::new(),
        }
    }

    /// How long series are kept that nothing is counted in; `None` for an hour.
    pub fn expire_after(&self, expiry: Option<Duration>) {
        self.expiry.set(expiry.unwrap_or(EXPIRY));
    }

    /// Lets go of series that nothing has been counted in for too long, and of the counters of what the configuration
    /// has no more, if it is time to look for them.
    pub fn sweep(&self, now: Instant, snapshot: &Snapshot) {
        let expiry = self.expiry.get();
        if self.swept.get().is_some_and(|swept| now.saturating_duration_since(swept) < SWEEP.min(expiry / 2))
        {
            return;
        }
        self.swept.set(Some(now));
        let mut numbers = self.numbers.borrow_mut();
        numbers.forget(snapshot);
        let expired = numbers.http.sweep(now, expiry) + numbers.tcp.sweep(now, expiry);
        if expired > 0 {
            // Series have other places now, and who was counted in them may have gone.
            numbers.expired += expired;
            numbers.keys.clear();
            numbers.held.clear();
            numbers.others.clear();
        }
    }

    /// Counts a finished request.
    pub fn request(&self, record: &Record<'_>, head: &RequestHead) {
        let protocol = if record.grpc { Protocol::Grpc } else { Protocol::Http };
        let mut numbers = self.numbers.borrow_mut();
        match self.find(&mut numbers, record, head.authority(), protocol, None) {
            Some(index) => numbers.http.series[index as usize].1.add(record),
            None => self.drop(&mut numbers),
        }
    }

    /// The same where metrics have other labels than Istio's.
    pub(crate) fn request_changed(&self, changes: &[MetricChange], context: &Context<'_>) {
        let (record, authority) = (context.record, context.request.map_or("", RequestHead::authority));
        let protocol = if record.grpc { Protocol::Grpc } else { Protocol::Http };
        for change in changes.iter().filter(|change| change.metrics != 0) {
            let changed = Changed::new(change, HTTP.len(), context);
            let mut numbers = self.numbers.borrow_mut();
            match self.find(&mut numbers, record, authority, protocol, Some(&changed)) {
                Some(index) => numbers.http.series[index as usize].1.add_some(record, change.metrics),
                None => self.drop(&mut numbers),
            }
        }
    }

    /// Counts what happened to a connection, once its other end is known.
    pub fn connection(&self, stats: &Stats, record: &Record<'_>, counts: TcpCounts) {
        if stats.tcp.is_empty() {
            return self.count(record, counts, None);
        }
        let context = Context { record, request: None, response: None };
        for change in stats.tcp.iter().filter(|change| change.metrics != 0) {
            let changed = Changed::new(change, TCP.len(), &context);
            self.count(record, counts.only(change.metrics), Some(&changed));
        }
    }

    fn count(&self, record: &Record<'_>, counts: TcpCounts, changed: Option<&Changed<'_>>) {
        let mut numbers = self.numbers.borrow_mut();
        match self.find(&mut numbers, record, "", Protocol::Tcp, changed) {
            Some(index) => numbers.tcp.series[index as usize].1.add(counts),
            None => self.drop(&mut numbers),
        }
    }

    #[cold]
    fn drop(&self, numbers: &mut Numbers) {
        numbers.dropped += 1;
        if self.may_tell(0) {
            tracing::warn!(
                "there are {} series of metrics, as many as may be, or their labels take {LABELS} bytes each on \
                 average: others are not counted (see skysail_metric_series_dropped_total); leave out labels that \
                 have many values (tagOverrides of Telemetry), or raise --max-metric-series",
                self.most
            );
        }
    }

    /// Whether it is time for a warning.
    fn may_tell(&self, of: usize) -> bool {
        let (told, now) = (&self.told[of], Instant::now());
        let due = told.get().is_none_or(|told| now - told >= SWEEP);
        if due {
            told.set(Some(now));
        }
        due
    }

    /// The counters of a cluster, by its name. To be kept by the worker.
    pub fn cluster(&self, name: &Arc<str>) -> Rc<ClusterStats> {
        Rc::clone(self.numbers.borrow_mut().clusters.entry(Arc::clone(name)).or_default())
    }

    /// Those of a cluster whose endpoints can be ejected.
    pub fn outliers(&self, name: &Arc<str>) -> Rc<OutlierStats> {
        Rc::clone(self.numbers.borrow_mut().outliers.entry(Arc::clone(name)).or_default())
    }

    /// The counters of an HTTP manager, by its prefix.
    pub fn manager(&self, stat_prefix: &Arc<str>) -> Rc<ManagerStats> {
        Rc::clone(self.numbers.borrow_mut().managers.entry(Arc::clone(stat_prefix)).or_default())
    }

    /// The counters of a listener, by its name.
    pub fn listener(&self, name: &Arc<str>) -> Rc<ListenerStats> {
        Rc::clone(self.numbers.borrow_mut().listeners.entry(Arc::clone(name)).or_default())
    }

    /// The counters of what is told to a collector, by its cluster.
    pub(crate) fn exports(&self, cluster: &str, what: &'static str) -> Rc<ExportStats> {
        Rc::clone(self.numbers.borrow_mut().exports.entry((cluster.into(), what)).or_default())
    }

    /// All numbers of now.
    pub fn snapshot(&self) -> ShardSnapshot {
        let numbers = self.numbers.borrow();
        let mut samples = Vec::new();
        let label = |label: &str, name: &str| {
            let mut text = format!("{label}=\"");
            series::escape(name, &mut text);
            text.push('"');
            text
        };
        let mut add = |name: &str, value: &str, values: Vec<Sample>| {
            samples.push((label(name, value), values));
        };
        for (name, stats) in &numbers.clusters {
            add("cluster_name", name, stats.samples());
        }
        for (name, stats) in &numbers.outliers {
            add("cluster_name", name, stats.samples());
        }
        for (name, stats) in &numbers.managers {
            add("http_conn_manager_prefix", name.trim_end_matches(';'), stats.samples());
        }
        for (name, stats) in &numbers.listeners {
            add("listener_address", name, stats.samples());
        }
        for ((cluster, what), stats) in &numbers.exports {
            samples.push((format!("{},what=\"{what}\"", label("cluster_name", cluster)), stats.samples()));
        }
        ShardSnapshot {
            http: numbers.http.series.clone(),
            tcp: numbers.tcp.series.clone(),
            samples,
            dropped: numbers.dropped,
            unlabelled: numbers.unlabelled,
            expired: numbers.expired,
        }
    }

    fn find(
        &self,
        numbers: &mut Numbers,
        record: &Record<'_>,
        authority: &str,
        protocol: Protocol,
        changed: Option<&Changed<'_>>,
    ) -> Option<u32> {
        let destination = series::destination(record, authority);
        let other = numbers.other_end(record);
        let key = Key {
            other,
            flags: record.flags.bits(),
            cluster: record.cluster.map_or(0, |cluster| Arc::as_ptr(&cluster.name).addr()),
            authority: if destination.by_authority { self.secret.hash_one(authority) } else { 0 }
                ^ changed.map_or(0, |changed| self.secret.hash_one(changed)),
            grpc_status: record.grpc_status.map_or(u32::MAX, series::grpc_status),
            status: record.status,
            direction: record.direction,
            protocol,
            route: match record.route_name {
                "allow_any" => 1,
                "block_all" => 2,
                _ => 0,
            },
        };
        if let Some(index) = numbers.keys.get(&key) {
            return Some(*index);
        }
        let mut by_labels = |end: &OtherEnd, bytes| {
            self.find_by_labels(numbers, record, (end, destination), protocol, changed, bytes)
        };
        let (mut end, bytes) = (other_end(record), self.most.saturating_mul(LABELS));
        let Some(index) = by_labels(&end, bytes) else {
            // Peers choose what they say of themselves. Series without it have some room of their own.
            end.workload.take()?;
            let index = by_labels(&end, bytes + bytes / 16)?;
            numbers.unlabelled += 1;
            if self.may_tell(1) {
                tracing::warn!(
                    "there are {} series of metrics, as many as may be, or their labels take {LABELS} bytes each on \
                     average: what is new is counted without what the peer says of itself (see \
                     skysail_metric_peers_unlabelled_total); leave out labels that have many or long values \
                     (tagOverrides of Telemetry), or raise --max-metric-series",
                    self.most
                );
            }
            return Some(index);
        };
        if numbers.keys.len() >= MOST_KEYS {
            numbers.keys.clear();
            numbers.held.clear();
        }
        if let Some(cluster) = record.cluster {
            numbers.held.insert(key.cluster, Arc::clone(&cluster.name));
        }
        numbers.keys.insert(key, index);
        Some(index)
    }

    #[cold]
    fn find_by_labels(
        &self,
        numbers: &mut Numbers,
        record: &Record<'_>,
        (other, destination): (&OtherEnd, Destination<'_>),
        protocol: Protocol,
        changed: Option<&Changed<'_>>,
        bytes: usize,
    ) -> Option<u32> {
        let http = protocol != Protocol::Tcp;
        let (hidden, changes) = changed.map_or((0, &[][..]), |changed| (changed.hidden, &changed.labels));
        let labels = series::labels(&self.local, other, record, destination, (http, changes));
        if http {
            numbers.http.index(labels, hidden, (self.most, bytes))
        } else {
            numbers.tcp.index(labels, hidden, (self.most, bytes))
        }
    }
}

/// What a change comes to for one request or connection.
#[derive(Debug, Hash)]
struct Changed<'a> {
    /// Metrics that it is not about.
    hidden: u8,
    labels: Vec<LabelChange<'a>>,
}

impl<'a> Changed<'a> {
    /// Of so many metrics. What an expression has no value for is `unknown`.
    fn new(change: &'a MetricChange, metrics: usize, context: &Context<'_>) -> Self {
        let value = |expression: &Expression| {
            let mut text = attributes::text(expression, context).unwrap_or_default();
            // A client says how long a header is, and each series has it in every line.
            text.truncate(text.floor_char_boundary(LONGEST_NAME));
            if text.is_empty() { "unknown".to_owned() } else { text }
        };
        let labels = change.labels.iter();
        let labels = labels.map(|(name, expression)| (&**name, expression.as_deref().map(value)));
        Self { hidden: !change.metrics & ((1 << metrics) - 1), labels: labels.collect() }
    }
}

impl<T: Series> Table<T> {
    /// Where the series with these labels is, without these metrics; `None` when there are too many, or when labels
    /// take too many bytes.
    fn index(&mut self, labels: String, hidden: u8, (most, bytes): (usize, usize)) -> Option<u32> {
        if let Some(index) = self.by_labels.get(labels.as_str()) {
            *self.series[*index as usize].1.hidden() &= hidden;
            return Some(*index);
        }
        let index = u32::try_from(self.series.len()).ok().filter(|index| (*index as usize) < most)?;
        if self.bytes + labels.len() > bytes {
            return None;
        }
        self.bytes += labels.len();
        let labels: Arc<str> = labels.into();
        self.by_labels.insert(Arc::clone(&labels), index);
        let mut series = T::default();
        *series.hidden() = hidden;
        self.series.push((labels, series));
        Some(index)
    }

    /// Lets go of series that nothing has been counted in for so long, and says how many they were. The others have
    /// other places then.
    fn sweep(&mut self, now: Instant, expiry: Duration) -> u64 {
        let before = self.series.len();
        self.counted.resize(before, (u64::MAX, now));
        let mut counted = std::mem::take(&mut self.counted).into_iter();
        let kept = &mut self.counted;
        self.series.retain(|(_, series)| {
            let (then, since) = counted.next().unwrap_or((u64::MAX, now));
            let current = series.counted();
            let since = if current == then { since } else { now };
            let keep = now.saturating_duration_since(since) < expiry;
            if keep {
                kept.push((current, since));
            }
            keep
        });
        let expired = before - self.series.len();
        if expired > 0 {
            let places = self.series.iter().zip(0..).map(|((labels, _), index)| (Arc::clone(labels), index));
            self.by_labels = places.collect();
            self.bytes = self.series.iter().map(|(labels, _)| labels.len()).sum();
        }
        expired as u64
    }
}

impl Numbers {
    /// Lets go of the counters of what is neither configured nor used any more.
    fn forget(&mut self, snapshot: &Snapshot) {
        let Snapshot { clusters, listeners, .. } = snapshot;
        self.clusters.retain(|name, stats| Rc::strong_count(stats) > 1 || clusters.contains_key(name));
        self.outliers.retain(|name, stats| Rc::strong_count(stats) > 1 || clusters.contains_key(name));
        self.exports.retain(|(name, _), stats| Rc::strong_count(stats) > 1 || clusters.contains_key(&**name));
        self.listeners
            .retain(|name, stats| Rc::strong_count(stats) > 1 || listeners.by_name.contains_key(name));
        let prefixes: HashSet<&str> = snapshot
            .terminals()
            .filter_map(|terminal| match terminal {
                Terminal::Http(manager) => Some(&*manager.stat_prefix),
                Terminal::Tcp(_) => None,
            })
            .collect();
        self.managers.retain(|prefix, stats| Rc::strong_count(stats) > 1 || prefixes.contains(&**prefix));
    }

    /// The number of the other end. Remembered in the peer, so that a connection is looked up once. No number is
    /// given twice; who has several is counted in the same series all the same.
    fn other_end(&mut self, record: &Record<'_>) -> u32 {
        let peer = far_peer(record);
        if let Some(known) = peer.map(|peer| peer.series.get()).filter(|known| *known != 0) {
            return known;
        }
        let other = other_end(record);
        let number = match self.others.get(&other) {
            Some(number) => *number,
            None => {
                if self.others.len() >= MOST_OTHERS {
                    self.others.clear();
                }
                self.last_other = self.last_other.wrapping_add(1).max(1);
                self.others.insert(other, self.last_other);
                self.last_other
            }
        };
        if let Some(peer) = peer {
            peer.series.set(number);
        }
        number
    }
}

fn far_peer<'a>(record: &Record<'a>) -> Option<&'a Peer> {
    if record.direction == Direction::Inbound { record.downstream } else { record.upstream }
}

fn other_end(record: &Record<'_>) -> OtherEnd {
    let peer = far_peer(record);
    let endpoint = || match record.direction {
        Direction::Inbound => None,
        Direction::Outbound | Direction::Unspecified => record.endpoint?.workload.clone(),
    };
    OtherEnd {
        workload: peer.and_then(Peer::workload).or_else(endpoint),
        principal: peer.and_then(|peer| peer.principal().cloned()),
        local_principal: peer.and_then(|peer| peer.local_principal.clone()),
    }
}

/// Hashes keys. They hold nothing that others choose, but for a hash that already is keyed with a secret.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        // The table takes its bits from both ends.
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u64(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value.cast_unsigned() as u64);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
