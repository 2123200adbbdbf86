//! The metrics of one worker.
//!
//! A request finds its series by a key of a few numbers: the other end is numbered once per connection, the
//! cluster is known by the address of its name (which is kept alive here, so that the address stays its own).
//! Labels are put together only when a key is new. All that others can make grow is bounded.

use std::{
    cell::RefCell,
    collections::HashMap,
    hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState},
    rc::Rc,
    sync::Arc,
};

use super::{
    record::Record,
    series::{self, Destination, HttpSeries, OtherEnd, TcpSeries},
    stats::{ClusterStats, ExportStats, ListenerStats, ManagerStats, OutlierStats, Sample},
};
use crate::{
    config::{Map, listener::Direction},
    head::RequestHead,
    peer::{LocalWorkload, Peer},
};

#[cfg(test)]
mod tests;

/// The most series of one worker; what would be more is counted as dropped.
const MOST_SERIES: usize = 10_000;
/// The most keys remembered; then all are forgotten and found anew by their labels.
const MOST_KEYS: usize = 8_192;

/// The metrics of one worker thread.
#[derive(Debug)]
pub struct Shard {
    local: Arc<LocalWorkload>,
    numbers: RefCell<Numbers>,
    /// Hashes authorities: with a secret, as clients choose them.
    secret: RandomState,
}

#[derive(Debug, Default)]
struct Numbers {
    others: HashMap<OtherEnd, u32>,
    keys: HashMap<Key, u32, BuildHasherDefault<Mix>>,
    /// Names of clusters that keys refer to by address.
    held: HashMap<usize, Arc<str>>,
    http: Table<HttpSeries>,
    tcp: Table<TcpSeries>,
    dropped: u64,
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
    series: Vec<(Arc<str>, T)>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { by_labels: HashMap::new(), series: Vec::new() }
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
}

impl Shard {
    /// Nothing counted yet.
    pub fn new(local: Arc<LocalWorkload>) -> Self {
        Self { local, numbers: RefCell::default(), secret: RandomState::new() }
    }

    /// Counts a finished request.
    pub fn request(&self, record: &Record<'_>, head: &RequestHead) {
        let protocol = if record.grpc { Protocol::Grpc } else { Protocol::Http };
        let mut numbers = self.numbers.borrow_mut();
        match self.find(&mut numbers, record, head.authority(), protocol) {
            Some(index) => numbers.http.series[index as usize].1.add(record),
            None => numbers.dropped += 1,
        }
    }

    /// Counts a connection once its other end is known.
    pub fn connection_opened(&self, record: &Record<'_>) {
        self.connection(record, |series| series.opened += 1);
    }

    /// Counts bytes of a connection that goes on: those since last time.
    pub fn connection_bytes(&self, record: &Record<'_>, received: u64, sent: u64) {
        self.connection(record, |series| {
            series.received += received;
            series.sent += sent;
        });
    }

    /// Counts a connection's end. Its bytes are for [`Self::connection_bytes`].
    pub fn connection_closed(&self, record: &Record<'_>) {
        self.connection(record, |series| series.closed += 1);
    }

    fn connection(&self, record: &Record<'_>, count: impl FnOnce(&mut TcpSeries)) {
        let mut numbers = self.numbers.borrow_mut();
        match self.find(&mut numbers, record, "", Protocol::Tcp) {
            Some(index) => count(&mut numbers.tcp.series[index as usize].1),
            None => numbers.dropped += 1,
        }
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
        }
    }

    fn find(
        &self,
        numbers: &mut Numbers,
        record: &Record<'_>,
        authority: &str,
        protocol: Protocol,
    ) -> Option<u32> {
        let destination = series::destination(record, authority);
        let (other, numbered) = numbers.other_end(record);
        let key = Key {
            other,
            flags: record.flags.bits(),
            cluster: record.cluster.map_or(0, |cluster| Arc::as_ptr(&cluster.name).addr()),
            authority: if destination.by_authority { self.secret.hash_one(authority) } else { 0 },
            grpc_status: record.grpc_status.map_or(u32::MAX, |status| status),
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
        let index = self.find_by_labels(numbers, record, destination, protocol, numbered)?;
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
        destination: Destination<'_>,
        protocol: Protocol,
        numbered: bool,
    ) -> Option<u32> {
        let other = if numbered { other_end(record) } else { OtherEnd::default() };
        let http = protocol != Protocol::Tcp;
        let labels = series::labels(&self.local, &other, record, destination, http);
        if http { numbers.http.index(labels) } else { numbers.tcp.index(labels) }
    }
}

impl<T: Default> Table<T> {
    /// Where the series with these labels is; `None` when there are too many.
    fn index(&mut self, labels: String) -> Option<u32> {
        if let Some(index) = self.by_labels.get(labels.as_str()) {
            return Some(*index);
        }
        let index = u32::try_from(self.series.len()).ok().filter(|index| (*index as usize) < MOST_SERIES)?;
        let labels: Arc<str> = labels.into();
        self.by_labels.insert(Arc::clone(&labels), index);
        self.series.push((labels, T::default()));
        Some(index)
    }
}

impl Numbers {
    /// The number of the other end, and whether it has one of its own. Remembered in the peer, so that a
    /// connection is looked up once.
    fn other_end(&mut self, record: &Record<'_>) -> (u32, bool) {
        let peer = far_peer(record);
        if let Some(known) = peer.map(|peer| peer.series.get()).filter(|known| *known != 0) {
            return (known, true);
        }
        let other = other_end(record);
        let next = u32::try_from(self.others.len() + 1).unwrap_or(u32::MAX);
        let number = match self.others.get(&other) {
            Some(number) => *number,
            None if self.others.len() >= MOST_SERIES => return (0, false),
            None => {
                self.others.insert(other, next);
                next
            }
        };
        if let Some(peer) = peer {
            peer.series.set(number);
        }
        (number, true)
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
