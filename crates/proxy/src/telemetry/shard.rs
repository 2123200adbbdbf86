//! Metrics of one worker.
//!
//! A request finds its series by a key of a few numbers. A peer is numbered once per connection. A cluster is
//! identified by the address of its name, which is kept alive here so that the address is not reused. Labels
//! are formatted only for a new key. All data that peers can grow is bounded.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    hash::{BuildHasher, BuildHasherDefault, RandomState},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    attributes,
    series::{self, Destination, HttpSeries, LabelChange, PeerLabels, Series, TcpCounts, TcpSeries},
    stats::{
        ClusterStats, ConnectionLimitStats, ExportStats, ListenerStats, LocalLimitStats, ManagerStats,
        OutlierStats, RateLimitStats, Sample,
    },
};
use skysail_http::{head::RequestHead, map::Map};
use skysail_policy::{
    config::{
        Snapshot,
        listener::{Direction, Terminal},
        stats::{HTTP, MetricOverride, Stats, TCP},
    },
    expression::Expression,
    peer::{LocalWorkload, Peer},
    record::{Context, Record},
    state::demand::MAX_AUTHORITY,
};

mod hasher;
mod routes;
#[cfg(test)]
mod tests;

use hasher::KeyHasher;
use routes::RouteStats;

/// Maximum number of keys; beyond it all are dropped and found again by their labels.
const MAX_KEYS: usize = 8_192;
/// Maximum number of peers with numbers; beyond it they get new numbers.
const MAX_PEERS: usize = 8_192;
/// Maximum number of prefixes of local rate limits that are kept when the configuration changes.
const MAX_LIMITS: usize = 4_096;
/// Default time without an update after which a series expires.
const EXPIRY: Duration = Duration::from_hours(1);
/// Maximum length of a series' labels in bytes, on average over the maximum number of series.
const MAX_LABEL_BYTES: usize = 2048;
/// Minimum interval between sweeps of expired series, and between warnings about exceeded limits.
const SWEEP: Duration = Duration::from_secs(60);

/// The metrics of one worker thread.
#[derive(Debug)]
pub struct Shard {
    local: Arc<LocalWorkload>,
    /// Maximum number of request series, and of connection series.
    max_series: usize,
    expiry: Cell<Duration>,
    swept: Cell<Option<Instant>>,
    /// Times of the last warnings: too many series, and labels too long.
    last_warning: [Cell<Option<Instant>>; 2],
    numbers: RefCell<Numbers>,
    /// Hash key for authorities, secret because clients choose them.
    secret: RandomState,
}

#[derive(Debug, Default)]
struct Numbers {
    peers: HashMap<PeerLabels, u32>,
    /// Number that was assigned last.
    last_peer: u32,
    keys: HashMap<Key, u32, BuildHasherDefault<KeyHasher>>,
    /// Cluster names that keys refer to by address.
    cluster_names: HashMap<usize, Arc<str>>,
    http: Table<HttpSeries>,
    tcp: Table<TcpSeries>,
    dropped: u64,
    /// Requests and connections that were counted without the metadata of their peers.
    unlabelled: u64,
    expired: u64,
    clusters: Map<Arc<str>, Rc<ClusterStats>>,
    outliers: Map<Arc<str>, Rc<OutlierStats>>,
    rate_limits: Map<Arc<str>, Rc<RateLimitStats>>,
    /// By prefix.
    local_limits: Map<Arc<str>, Rc<LocalLimitStats>>,
    routes: RouteStats,
    managers: Map<Arc<str>, Rc<ManagerStats>>,
    listeners: Map<Arc<str>, Rc<ListenerStats>>,
    connection_limits: Map<Arc<str>, Rc<ConnectionLimitStats>>,
    /// By cluster and kind of item.
    exports: Map<(Box<str>, &'static str), Rc<ExportStats>>,
}

/// Series by their labels.
#[derive(Debug)]
struct Table<T> {
    by_labels: HashMap<Arc<str>, u32>,
    /// Total length of all labels, in bytes.
    bytes: usize,
    series: Vec<(Arc<str>, T)>,
    /// Update number of each series at the last sweep, and since when it has been the same.
    counted: Vec<(u64, Instant)>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { by_labels: HashMap::new(), bytes: 0, series: Vec::new(), counted: Vec::new() }
    }
}

/// Properties that distinguish series.
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
    /// 1 for `allow_any`, 2 for `block_all`, 0 otherwise.
    route: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Protocol {
    Http,
    Grpc,
    Tcp,
}

/// Metrics of one worker at one moment.
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
    /// Returns an empty shard with at most `max_series` series of requests, and as many of connections.
    pub fn new(local: Arc<LocalWorkload>, max_series: usize) -> Self {
        Self {
            local,
            max_series,
            expiry: Cell::new(EXPIRY),
            swept: Cell::new(None),
            last_warning: Default::default(),
            numbers: RefCell::default(),
            secret: RandomState::new(),
        }
    }

    /// Sets the time without an update after which series expire; `None` means one hour.
    pub fn expire_after(&self, expiry: Option<Duration>) {
        self.expiry.set(expiry.unwrap_or(EXPIRY));
    }

    /// Drops expired series and the counters of removed resources, if the sweep interval has passed.
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
            // The remaining series have other indices, and keys may refer to expired ones.
            numbers.expired += expired;
            numbers.keys.clear();
            numbers.cluster_names.clear();
            numbers.peers.clear();
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

    /// Counts a finished request in metrics with changed labels.
    pub(crate) fn request_changed(&self, changes: &[MetricOverride], context: &Context<'_>) {
        let (record, authority) = (context.record, context.request.map_or("", RequestHead::authority));
        let protocol = if record.grpc { Protocol::Grpc } else { Protocol::Http };
        for change in changes.iter().filter(|change| change.metrics != 0) {
            let changed = EvaluatedChange::new(change, HTTP.len(), context);
            let mut numbers = self.numbers.borrow_mut();
            match self.find(&mut numbers, record, authority, protocol, Some(&changed)) {
                Some(index) => numbers.http.series[index as usize].1.add_some(record, change.metrics),
                None => self.drop(&mut numbers),
            }
        }
    }

    /// Counts an event of a connection, once its peer is known.
    pub fn connection(&self, stats: &Stats, record: &Record<'_>, counts: TcpCounts) {
        if stats.tcp.is_empty() {
            return self.count(record, counts, None);
        }
        let context = Context { record, request: None, response: None };
        for change in stats.tcp.iter().filter(|change| change.metrics != 0) {
            let changed = EvaluatedChange::new(change, TCP.len(), &context);
            self.count(record, counts.only(change.metrics), Some(&changed));
        }
    }

    fn count(&self, record: &Record<'_>, counts: TcpCounts, changed: Option<&EvaluatedChange<'_>>) {
        let mut numbers = self.numbers.borrow_mut();
        match self.find(&mut numbers, record, "", Protocol::Tcp, changed) {
            Some(index) => numbers.tcp.series[index as usize].1.add(counts),
            None => self.drop(&mut numbers),
        }
    }

    #[cold]
    fn drop(&self, numbers: &mut Numbers) {
        numbers.dropped += 1;
        if self.may_warn(0) {
            tracing::warn!(
                "the limit of {} metric series is reached, or their labels exceed {MAX_LABEL_BYTES} bytes each on average: \
                 new series are not recorded (see skysail_metric_series_dropped_total); remove labels that \
                 have many values (tagOverrides of Telemetry), or raise --max-metric-series",
                self.max_series
            );
        }
    }

    /// Returns whether a warning is due.
    fn may_warn(&self, of: usize) -> bool {
        let (last_warning, now) = (&self.last_warning[of], Instant::now());
        let due = last_warning.get().is_none_or(|last_warning| now - last_warning >= SWEEP);
        if due {
            last_warning.set(Some(now));
        }
        due
    }

    /// Returns the statistics of a cluster; the worker keeps them.
    pub fn cluster(&self, name: &Arc<str>) -> Rc<ClusterStats> {
        Rc::clone(self.numbers.borrow_mut().clusters.entry(Arc::clone(name)).or_default())
    }

    /// Returns the outlier detection statistics of a cluster.
    pub fn outliers(&self, name: &Arc<str>) -> Rc<OutlierStats> {
        Rc::clone(self.numbers.borrow_mut().outliers.entry(Arc::clone(name)).or_default())
    }

    /// Returns the results of calls of rate limit services for requests to a cluster.
    pub fn rate_limits(&self, name: &Arc<str>) -> Rc<RateLimitStats> {
        Rc::clone(self.numbers.borrow_mut().rate_limits.entry(Arc::clone(name)).or_default())
    }

    /// Returns the statistics of local rate limits, by their prefix.
    pub(crate) fn local_limit(&self, prefix: &Arc<str>) -> Rc<LocalLimitStats> {
        Rc::clone(self.numbers.borrow_mut().local_limits.entry(Arc::clone(prefix)).or_default())
    }

    /// Counts a forwarded request of a route with a `stat_prefix`, its response and its retries.
    pub(crate) fn route(&self, host: &Arc<str>, prefix: &Arc<str>, status: u16, retries: u64) {
        self.numbers.borrow_mut().routes.add(host, prefix, status, retries);
    }

    /// Returns the statistics of an HTTP connection manager, by its prefix.
    pub fn manager(&self, stat_prefix: &Arc<str>) -> Rc<ManagerStats> {
        Rc::clone(self.numbers.borrow_mut().managers.entry(Arc::clone(stat_prefix)).or_default())
    }

    /// Returns the statistics of a listener.
    pub fn listener(&self, name: &Arc<str>) -> Rc<ListenerStats> {
        Rc::clone(self.numbers.borrow_mut().listeners.entry(Arc::clone(name)).or_default())
    }

    /// Returns the statistics of limits on connections, by their prefix.
    pub(crate) fn connection_limit(&self, prefix: &Arc<str>) -> Rc<ConnectionLimitStats> {
        Rc::clone(self.numbers.borrow_mut().connection_limits.entry(Arc::clone(prefix)).or_default())
    }

    /// Returns the statistics of the items sent to a collector, by its cluster.
    pub(crate) fn exports(&self, cluster: &str, what: &'static str) -> Rc<ExportStats> {
        Rc::clone(self.numbers.borrow_mut().exports.entry((cluster.into(), what)).or_default())
    }

    /// Returns the current values.
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
        for (name, stats) in &numbers.rate_limits {
            add("cluster_name", name, stats.samples());
        }
        for (prefix, stats) in &numbers.local_limits {
            add("envoy_local_http_ratelimit_prefix", prefix, stats.samples());
        }
        for (name, stats) in &numbers.managers {
            add("http_conn_manager_prefix", name.trim_end_matches(';'), stats.samples());
        }
        for (name, stats) in &numbers.listeners {
            add("listener_address", name, stats.samples());
        }
        for (prefix, stats) in &numbers.connection_limits {
            add("connection_limit_prefix", prefix, stats.samples());
        }
        for ((cluster, what), stats) in &numbers.exports {
            samples.push((format!("{},what=\"{what}\"", label("cluster_name", cluster)), stats.samples()));
        }
        numbers.routes.samples(&mut samples);
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
        changed: Option<&EvaluatedChange<'_>>,
    ) -> Option<u32> {
        let destination = series::destination(record, authority);
        let other = numbers.peer_labels(record);
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
        let mut by_labels = |end: &PeerLabels, bytes| {
            self.find_by_labels(numbers, record, (end, destination), protocol, changed, bytes)
        };
        let (mut end, bytes) = (peer_labels(record), self.max_series.saturating_mul(MAX_LABEL_BYTES));
        let Some(index) = by_labels(&end, bytes) else {
            // Peers choose their own metadata. Series without it have reserved room.
            end.workload.take()?;
            let index = by_labels(&end, bytes + bytes / 16)?;
            numbers.unlabelled += 1;
            if self.may_warn(1) {
                tracing::warn!(
                    "the limit of {} metric series is reached, or their labels exceed {MAX_LABEL_BYTES} bytes each on average: \
                     new series are recorded without the peer's metadata (see \
                     skysail_metric_peers_unlabelled_total); remove labels that have many or long values \
                     (tagOverrides of Telemetry), or raise --max-metric-series",
                    self.max_series
                );
            }
            return Some(index);
        };
        if numbers.keys.len() >= MAX_KEYS {
            numbers.keys.clear();
            numbers.cluster_names.clear();
        }
        if let Some(cluster) = record.cluster {
            numbers.cluster_names.insert(key.cluster, Arc::clone(&cluster.name));
        }
        numbers.keys.insert(key, index);
        Some(index)
    }

    #[cold]
    fn find_by_labels(
        &self,
        numbers: &mut Numbers,
        record: &Record<'_>,
        (other, destination): (&PeerLabels, Destination<'_>),
        protocol: Protocol,
        changed: Option<&EvaluatedChange<'_>>,
        bytes: usize,
    ) -> Option<u32> {
        let http = protocol != Protocol::Tcp;
        let (hidden, changes) = changed.map_or((0, &[][..]), |changed| (changed.hidden, &changed.labels));
        let labels = series::labels(&self.local, other, record, destination, (http, changes));
        if http {
            numbers.http.index(labels, hidden, (self.max_series, bytes))
        } else {
            numbers.tcp.index(labels, hidden, (self.max_series, bytes))
        }
    }
}

/// A label change, evaluated for one request or connection.
#[derive(Debug, Hash)]
struct EvaluatedChange<'a> {
    /// Metrics that the change does not affect.
    hidden: u8,
    labels: Vec<LabelChange<'a>>,
}

impl<'a> EvaluatedChange<'a> {
    /// Evaluates a change of `metrics` metrics. An expression without a value gives `unknown`.
    fn new(change: &'a MetricOverride, metrics: usize, context: &Context<'_>) -> Self {
        let value = |expression: &Expression| {
            let mut text = attributes::text(expression, context).unwrap_or_default();
            // A client chooses the length of a header, and each series repeats the value in every line.
            text.truncate(text.floor_char_boundary(MAX_AUTHORITY));
            if text.is_empty() { "unknown".to_owned() } else { text }
        };
        let labels = change.labels.iter();
        let labels = labels.map(|(name, expression)| (&**name, expression.as_deref().map(value)));
        Self { hidden: !change.metrics & ((1 << metrics) - 1), labels: labels.collect() }
    }
}

impl<T: Series> Table<T> {
    /// Returns the index of the series with these labels and hidden metrics; `None` when there are too many
    /// series or label bytes.
    fn index(&mut self, labels: String, hidden: u8, (max_series, bytes): (usize, usize)) -> Option<u32> {
        if let Some(index) = self.by_labels.get(labels.as_str()) {
            *self.series[*index as usize].1.hidden() &= hidden;
            return Some(*index);
        }
        let index = u32::try_from(self.series.len()).ok().filter(|index| (*index as usize) < max_series)?;
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

    /// Drops series without an update for `expiry` and returns their number. The indices of the others change.
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
    /// Drops the counters of resources that are neither configured nor in use.
    fn forget(&mut self, snapshot: &Snapshot) {
        let Snapshot { clusters, listeners, .. } = snapshot;
        self.clusters.retain(|name, stats| Rc::strong_count(stats) > 1 || clusters.contains_key(name));
        self.outliers.retain(|name, stats| Rc::strong_count(stats) > 1 || clusters.contains_key(name));
        self.rate_limits.retain(|name, stats| Rc::strong_count(stats) > 1 || clusters.contains_key(name));
        self.exports.retain(|(name, _), stats| Rc::strong_count(stats) > 1 || clusters.contains_key(&**name));
        self.listeners
            .retain(|name, stats| Rc::strong_count(stats) > 1 || listeners.by_name.contains_key(name));
        if !self.connection_limits.is_empty() {
            let chains = listeners
                .by_name
                .values()
                .flat_map(|listener| listener.chains.iter().chain(listener.default_chain.as_ref()));
            let limits: HashSet<&str> = chains
                .flat_map(|chain| chain.connection_limits.iter().map(|limit| &*limit.stat_prefix))
                .collect();
            self.connection_limits
                .retain(|prefix, stats| Rc::strong_count(stats) > 1 || limits.contains(&**prefix));
        }
        let prefixes: HashSet<&str> = snapshot
            .terminals()
            .filter_map(|terminal| match terminal {
                Terminal::Http(manager) => Some(&*manager.stat_prefix),
                Terminal::Tcp(_) => None,
            })
            .collect();
        self.managers.retain(|prefix, stats| Rc::strong_count(stats) > 1 || prefixes.contains(&**prefix));
        self.routes.forget();
        // Limits of routes are not looked up: few prefixes are kept without that.
        if self.local_limits.len() > MAX_LIMITS {
            self.local_limits.clear();
        }
    }

    /// Returns the number of the peer and stores it in the connection's peer, so that the lookup happens once.
    /// No number is assigned twice. A peer with several numbers is still counted in one series.
    fn peer_labels(&mut self, record: &Record<'_>) -> u32 {
        let peer = remote_peer(record);
        if let Some(known) = peer.map(|peer| peer.series.get()).filter(|known| *known != 0) {
            return known;
        }
        let other = peer_labels(record);
        let number = match self.peers.get(&other) {
            Some(number) => *number,
            None => {
                if self.peers.len() >= MAX_PEERS {
                    self.peers.clear();
                }
                self.last_peer = self.last_peer.wrapping_add(1).max(1);
                self.peers.insert(other, self.last_peer);
                self.last_peer
            }
        };
        if let Some(peer) = peer {
            peer.series.set(number);
        }
        number
    }
}

fn remote_peer<'a>(record: &Record<'a>) -> Option<&'a Peer> {
    if record.direction == Direction::Inbound { record.downstream } else { record.upstream }
}

fn peer_labels(record: &Record<'_>) -> PeerLabels {
    let peer = remote_peer(record);
    let endpoint = || match record.direction {
        Direction::Inbound => None,
        Direction::Outbound | Direction::Unspecified => record.endpoint?.workload.clone(),
    };
    PeerLabels {
        workload: peer.and_then(Peer::workload).or_else(endpoint),
        principal: peer.and_then(|peer| peer.principal().cloned()),
        local_principal: peer.and_then(|peer| peer.local_principal.clone()),
    }
}
