//! Connection pools of a worker.
//!
//! Every worker has its own pools, so nothing is locked. The connection that became idle last is reused first:
//! it is the most likely to be alive, and unneeded connections reach the idle timeout. A connection is reused
//! only if the endpoint still exists, its TLS configuration is current and the peer has sent nothing since.
//! HTTP/2 requests share connections instead.

use std::{
    cell::{Cell, RefCell},
    net::SocketAddr,
    rc::{Rc, Weak},
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_identity::Connector;
use tokio::sync::Notify;

use crate::{
    telemetry::{
        Shard,
        stats::{ClusterStats, OutlierStats},
    },
    upstream::dynamic::HostCache,
};
use skysail_http::{
    http2::{Connection, Duplex},
    map::Map,
    socket::Stream,
    wire::Wire,
};
use skysail_policy::{
    balance::{PickState, latency::Latency},
    config::{
        Cluster, Endpoint, Endpoints, Snapshot,
        cluster::{Balancer, Discovery},
    },
    outlier,
    peer::Peer,
};

mod eject;
mod limits;

pub(crate) use limits::{ActiveRequest, ConnectionSlot, LimitGuard, LimitReached};

/// Interval between sweeps of idle connections.
pub(crate) const SWEEP: Duration = Duration::from_secs(1);
/// Envoy's default idle timeout of upstream connections.
const IDLE_TIMEOUT: Duration = Duration::from_hours(1);

/// Clusters that this worker has used, with their connection pools.
#[derive(Default)]
pub(crate) struct Clusters {
    used: RefCell<Map<Arc<str>, Rc<Pool>>>,
}

/// Connection pool of one cluster on this worker.
pub(crate) struct Pool {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) stats: Rc<ClusterStats>,
    /// Present if outlier detection is enabled.
    pub(crate) outliers: Option<Rc<OutlierStats>>,
    pub(crate) pick: RefCell<PickState>,
    hosts: RefCell<Map<SocketAddr, Rc<Host>>>,
    /// The cluster has been replaced or removed: connections close after the current request.
    is_removed: Cell<bool>,
    /// Notified when a slot for another connection to any endpoint is free.
    pub(crate) room: Notify,
    /// Resolved hosts of a dynamic forward proxy.
    pub(crate) resolved: Option<Arc<HostCache>>,
}

/// Connections to one endpoint on this worker.
pub(crate) struct Host {
    /// Configuration of the endpoint.
    pub(crate) endpoint: Arc<Endpoint>,
    idle: RefCell<Vec<Upstream>>,
    /// HTTP/2 connections, each shared by several requests.
    shared: RefCell<Vec<Rc<Multiplexed>>>,
    /// A connection that requests can share is being established.
    pub(crate) connecting: Cell<bool>,
    /// Notified when a connection becomes idle or sharable.
    pub(crate) freed: Notify,
    is_removed: Cell<bool>,
    /// Requests in flight.
    pub(crate) requests: Cell<u32>,
    /// Measured response time, if the load balancer needs it.
    latency: Cell<Option<Latency>>,
    /// Connections open or being established.
    connections: Cell<u32>,
    /// Counters for `/clusters`.
    pub(crate) totals: Totals,
}

/// Cumulative counters of an endpoint.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) connections: Cell<u64>,
    pub(crate) connect_failures: Cell<u64>,
    pub(crate) requests: Cell<u64>,
    pub(crate) errors: Cell<u64>,
}

/// Statistics of an endpoint on one worker, for the admin page.
#[derive(Clone, Debug, Default)]
pub struct HostStats {
    /// Cluster name.
    pub cluster: Arc<str>,
    /// Endpoint address.
    pub address: Option<SocketAddr>,
    /// Open connections.
    pub connections: u32,
    /// Connections opened.
    pub connections_total: u64,
    /// Failed connection attempts.
    pub connect_failures: u64,
    /// Requests in flight.
    pub requests: u32,
    /// Requests.
    pub requests_total: u64,
    /// Requests that failed or had a 5xx response.
    pub errors: u64,
}

/// State of an upstream connection that all its requests share.
pub(crate) struct Link {
    pub(crate) host: Rc<Host>,
    pub(crate) peer: Peer,
    pub(crate) tls: Option<UpstreamTls>,
    opened: Instant,
    /// Requests served.
    pub(crate) served: Cell<u32>,
    /// The peer has received the sidecar's metadata, so later requests need not repeat it.
    pub(crate) introduced: Cell<bool>,
    pub(crate) local: Option<SocketAddr>,
    /// Remote address, one of the endpoint's addresses.
    pub(crate) remote: SocketAddr,
    idle_since: Cell<Instant>,
    place: ConnectionSlot,
}

/// TLS settings of a connection.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamTls {
    pub(crate) config: Arc<Connector>,
    /// Host for SNI, if it depends on the request (`auto_sni`).
    pub(crate) host: Option<Box<str>>,
}

/// An upstream connection, or a stream of a shared one, for one request.
pub(crate) struct Upstream {
    pub(crate) wire: Wire,
    pub(crate) link: Rc<Link>,
}

/// A shared HTTP/2 connection. It closes once neither the pool nor a request holds it.
struct Multiplexed {
    link: Rc<Link>,
    connection: Connection,
}

impl Clusters {
    /// Returns the pool of a cluster; `None` if the configuration does not contain it.
    pub(crate) fn get(&self, name: &str, snapshot: &Snapshot, shard: &Shard) -> Option<Rc<Pool>> {
        let mut used = self.used.borrow_mut();
        if let Some(pool) = used.get(name) {
            return Some(pool.clone());
        }
        let cluster = snapshot.clusters.get(name)?.clone();
        let pool = Rc::new(Pool {
            stats: shard.cluster(&cluster.name),
            outliers: cluster.outlier.as_ref().map(|_| shard.outliers(&cluster.name)),
            cluster: cluster.clone(),
            pick: RefCell::default(),
            hosts: RefCell::default(),
            is_removed: Cell::new(false),
            room: Notify::new(),
            resolved: match &cluster.discovery {
                Discovery::Dynamic(config) => Some(HostCache::shared(config)),
                _ => None,
            },
        });
        if pool.outliers.is_some() {
            tokio::task::spawn_local(eject::watch(Rc::downgrade(&pool)));
        }
        used.insert(cluster.name.clone(), pool.clone());
        Some(pool)
    }

    /// Drops the pools of clusters that a new configuration replaces or removes.
    pub(crate) fn update(&self, snapshot: &Snapshot) {
        self.used.borrow_mut().retain(|name, pool| {
            let kept = snapshot.clusters.get(name).is_some_and(|cluster| Arc::ptr_eq(cluster, &pool.cluster));
            if !kept {
                pool.retire();
            }
            kept
        });
    }

    /// Closes idle connections that the peer closed, that reached the idle timeout or whose endpoint was
    /// removed.
    pub(crate) fn sweep(&self, now: Instant) {
        let pools: Vec<_> = self.used.borrow().values().cloned().collect();
        for pool in pools {
            pool.sweep(now);
        }
    }

    /// Closes all idle connections, at shutdown.
    pub(crate) fn clear(&self) {
        let pools: Vec<_> = self.used.borrow_mut().drain().collect();
        for (_, pool) in pools {
            pool.retire();
        }
    }

    /// Returns the statistics of every endpoint used.
    pub(crate) fn stats(&self) -> Vec<HostStats> {
        let used = self.used.borrow();
        let stats = |pool: &Rc<Pool>| {
            let hosts = pool.hosts.borrow();
            hosts.values().map(|host| host.stats(&pool.cluster.name)).collect::<Vec<_>>()
        };
        used.values().flat_map(stats).collect()
    }
}

impl Pool {
    /// Returns the connections to an endpoint.
    pub(crate) fn host(&self, endpoint: &Arc<Endpoint>) -> Rc<Host> {
        let mut hosts = self.hosts.borrow_mut();
        if let Some(host) = hosts.get(&endpoint.address)
            && same_place(&host.endpoint, endpoint)
        {
            return host.clone();
        }
        let host = Rc::new(Host {
            endpoint: endpoint.clone(),
            idle: RefCell::default(),
            shared: RefCell::default(),
            connecting: Cell::new(false),
            freed: Notify::new(),
            is_removed: Cell::new(false),
            requests: Cell::new(0),
            latency: Cell::new(None),
            connections: Cell::new(0),
            totals: Totals::default(),
        });
        if let Some(replaced) = hosts.insert(endpoint.address, host.clone()) {
            replaced.retire();
        }
        host
    }

    /// Returns the endpoint at the original destination address.
    pub(crate) fn original(&self, address: SocketAddr) -> Arc<Endpoint> {
        if let Some(host) = self.hosts.borrow().get(&address) {
            return host.endpoint.clone();
        }
        Arc::new(Endpoint::new(address, self.cluster.tls.clone()))
    }

    /// Returns the number of requests to an endpoint in flight on this worker.
    pub(crate) fn active_requests(&self, endpoint: &Endpoint) -> u32 {
        self.hosts.borrow().get(&endpoint.address).map_or(0, |host| host.requests.get())
    }

    /// Returns the start time of a request, if the load balancer needs response times.
    pub(crate) fn latency_start(&self) -> Option<Instant> {
        matches!(self.cluster.balancer, Balancer::PeakEwma { .. }).then(Instant::now)
    }

    /// Records the response time of an endpoint, or the time until the request was abandoned.
    pub(crate) fn record_latency(&self, host: &Host, begun: Instant) {
        if let Balancer::PeakEwma { decay, .. } = self.cluster.balancer {
            let now = Instant::now();
            host.latency.set(Some(Latency::with(host.latency.get(), now - begun, now, decay)));
        }
    }

    /// Returns the expected response time of an endpoint's next request in nanoseconds: its average, multiplied
    /// by the number of requests in flight plus one.
    pub(crate) fn expected_latency(&self, endpoint: &Endpoint, decay: Duration, unknown: Duration) -> u64 {
        let hosts = self.hosts.borrow();
        let host = hosts.get(&endpoint.address);
        let seen = host.and_then(|host| host.latency.get());
        let latency = seen.map_or(unknown, |seen| seen.now(Instant::now(), decay)).as_nanos();
        let requests = host.map_or(0, |host| host.requests.get());
        u64::try_from(latency.max(1) * (u128::from(requests) + 1)).unwrap_or(u64::MAX)
    }

    /// Returns a usable idle connection.
    pub(crate) fn take(&self, host: &Host, tls: Option<&UpstreamTls>) -> Option<Upstream> {
        loop {
            let mut idle = host.idle.borrow_mut();
            let index = idle.iter().rposition(|upstream| upstream.link.asks_as(tls))?;
            let mut upstream = idle.remove(index);
            drop(idle);
            let link = &upstream.link;
            if link.uses(tls) && !link.is_old(Instant::now) && !self.is_overdue(link) && upstream.is_quiet() {
                return Some(upstream);
            }
        }
    }

    /// Returns whether an idle connection has reached the idle timeout since the last [`sweep`](Self::sweep), and
    /// counts it. Reads the clock only if the cluster sets a timeout.
    fn is_overdue(&self, link: &Link) -> bool {
        let is_overdue =
            self.cluster.idle_timeout.is_some_and(|timeout| link.idle_since.get().elapsed() >= timeout);
        self.stats.cx_idle_timeout.add(is_overdue.into());
        is_overdue
    }

    /// Closes an unused connection to an endpoint; returns whether there was one.
    pub(crate) fn make_room(&self, host: &Host) -> bool {
        let mut idle = host.idle.borrow_mut();
        let oldest = (!idle.is_empty()).then(|| idle.remove(0));
        drop(idle);
        if oldest.is_some() {
            return true;
        }
        let mut shared = host.shared.borrow_mut();
        let unused = shared.iter().position(|multiplexed| multiplexed.requests() == 0);
        let unused = unused.map(|index| shared.remove(index));
        // Dropping a connection borrows its host, so this borrow must end first.
        drop(shared);
        unused.is_some()
    }

    /// Returns a stream of a shared HTTP/2 connection.
    pub(crate) fn share(&self, host: &Host, tls: Option<&UpstreamTls>) -> Option<Upstream> {
        let mut shared = host.shared.borrow_mut();
        let mut found = None;
        let streams = self.cluster.http2.max_streams as usize;
        shared.retain(|multiplexed| {
            let connection = &multiplexed.connection;
            let fits = multiplexed.link.asks_as(tls);
            let current = connection.is_usable()
                && (!fits || multiplexed.link.uses(tls))
                && !multiplexed.link.is_old(Instant::now)
                && (multiplexed.requests() > 0 || !self.is_overdue(&multiplexed.link))
                && multiplexed.total_requests() < self.max_requests() as usize;
            if current
                && fits
                && found.is_none()
                && multiplexed.requests() < connection.capacity().min(streams)
            {
                multiplexed.link.idle_since.set(Instant::now());
                let wire = Wire::Http2(Box::new(Duplex::idle(connection.clone())));
                found = Some(Upstream { wire, link: multiplexed.link.clone() });
            }
            current
        });
        found
    }

    /// Returns the maximum number of requests per connection.
    fn max_requests(&self) -> u32 {
        // A connection whose PROXY header identifies a client serves no other client.
        let own = self.cluster.proxy_protocol.map(|_| 1);
        own.or(self.cluster.max_requests_per_connection).unwrap_or(u32::MAX)
    }

    /// Registers a new connection in the slot from [`Self::admit`].
    pub(crate) fn opened(
        place: ConnectionSlot,
        stream: &Stream,
        peer: Peer,
        tls: Option<UpstreamTls>,
    ) -> Rc<Link> {
        increment(&place.host.totals.connections);
        place.pool.stats.cx_total.inc();
        place.pool.stats.cx_active.inc();
        Rc::new(Link {
            local: stream.local_address(),
            remote: stream.remote_address().unwrap_or(place.host.endpoint.address),
            host: place.host.clone(),
            peer,
            tls,
            opened: Instant::now(),
            served: Cell::new(0),
            introduced: Cell::new(false),
            idle_since: Cell::new(Instant::now()),
            place,
        })
    }

    fn sweep(&self, now: Instant) {
        let endpoints = self.cluster.endpoints.load();
        let timeout = self.cluster.idle_timeout.unwrap_or(IDLE_TIMEOUT);
        let dynamic = matches!(self.cluster.discovery, Discovery::OriginalDst(_) | Discovery::Dynamic(_));
        self.hosts.borrow_mut().retain(|_, host| {
            if !dynamic && !lists(&endpoints, host) {
                host.retire();
                return false;
            }
            let mut idle = host.idle.take();
            let recent = |link: &Link| {
                let idle = now - link.idle_since.get() >= timeout;
                self.stats.cx_idle_timeout.add(idle.into());
                !idle && !link.is_old(|| now)
            };
            idle.retain_mut(|upstream| recent(&upstream.link) && upstream.is_quiet());
            *host.idle.borrow_mut() = idle;
            let mut shared = host.shared.take();
            shared.retain(|multiplexed| {
                let link = &multiplexed.link;
                if multiplexed.requests() > 0 { !link.is_old(|| now) } else { recent(link) }
            });
            *host.shared.borrow_mut() = shared;
            !dynamic || host.connections.get() > 0 || host.requests.get() > 0
        });
    }

    fn retire(&self) {
        self.is_removed.set(true);
        if let (Some(outlier), Some(stats)) = (&self.cluster.outlier, &self.outliers) {
            stats.ejections_active.add(outlier::end_all(outlier));
        }
        for host in self.hosts.borrow().values() {
            host.retire();
        }
        self.room.notify_waiters();
    }
}

impl Host {
    fn retire(&self) {
        self.is_removed.set(true);
        // Dropped after the borrow has ended, because dropping a connection borrows its host.
        let _closed = (self.idle.take(), self.shared.take());
    }

    /// Adds a sharable HTTP/2 connection and returns its first stream.
    pub(crate) fn add_shared(&self, link: Rc<Link>, connection: Connection) -> Upstream {
        let wire = Wire::Http2(Box::new(Duplex::idle(connection.clone())));
        if !self.is_removed.get() && !link.place.pool.is_removed.get() {
            self.shared.borrow_mut().push(Rc::new(Multiplexed { link: link.clone(), connection }));
        }
        Upstream { wire, link }
    }

    /// Removes an HTTP/2 connection that has closed.
    pub(crate) fn remove_shared(&self, link: &Weak<Link>) {
        // Dropped after the borrow has ended, as above.
        let mut shared = self.shared.take();
        shared.retain(|multiplexed| !std::ptr::eq(Rc::as_ptr(&multiplexed.link), link.as_ptr()));
        *self.shared.borrow_mut() = shared;
    }

    fn stats(&self, cluster: &Arc<str>) -> HostStats {
        HostStats {
            cluster: cluster.clone(),
            address: Some(self.endpoint.address),
            connections: self.connections.get(),
            connections_total: self.totals.connections.get(),
            connect_failures: self.totals.connect_failures.get(),
            requests: self.requests.get(),
            requests_total: self.totals.requests.get(),
            errors: self.totals.errors.get(),
        }
    }
}

impl Multiplexed {
    /// Requests in flight.
    fn requests(&self) -> usize {
        Rc::strong_count(&self.link) - 1
    }

    /// Requests served and in flight.
    fn total_requests(&self) -> usize {
        self.link.served.get() as usize + self.requests()
    }
}

impl Link {
    /// Returns whether the connection was opened with this TLS configuration.
    fn uses(&self, tls: Option<&UpstreamTls>) -> bool {
        match (&self.tls, tls) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(&a.config, &b.config),
            _ => false,
        }
    }

    /// Returns whether the connection was opened with the same SNI host.
    fn asks_as(&self, tls: Option<&UpstreamTls>) -> bool {
        let own = self.tls.as_ref().and_then(|own| own.host.as_deref());
        own == tls.and_then(|tls| tls.host.as_deref())
    }

    /// Returns whether the connection has reached its maximum duration. Reads the clock only if there is a
    /// maximum.
    fn is_old(&self, now: impl FnOnce() -> Instant) -> bool {
        let max_requests = self.pool().cluster.max_connection_duration;
        max_requests.is_some_and(|max_requests| now().saturating_duration_since(self.opened) >= max_requests)
    }

    /// Returns whether the connection may serve further requests.
    pub(crate) fn is_good(&self) -> bool {
        !self.pool().is_removed.get()
            && !self.host.is_removed.get()
            && self.served.get() < self.pool().max_requests()
            && !self.is_old(Instant::now)
    }

    /// Returns the pool of the connection.
    pub(crate) fn pool(&self) -> &Rc<Pool> {
        &self.place.pool
    }
}

impl Upstream {
    /// Returns a connection that is not shared.
    pub(crate) fn own(stream: Box<Stream>, link: Rc<Link>) -> Self {
        Self { wire: Wire::Http1(stream), link }
    }

    /// Returns the connection, which becomes idle now, to the pool, or closes it if it is not reusable.
    pub(crate) fn give_back(mut self, now: Instant) {
        let link = &self.link;
        link.served.set(link.served.get() + 1);
        if Some(link.served.get()) == link.pool().cluster.max_requests_per_connection {
            link.pool().stats.cx_max_requests.inc();
        }
        link.idle_since.set(now);
        let Wire::Http1(stream) = &mut self.wire else {
            // A shared connection has a free stream now.
            return link.host.freed.notify_one();
        };
        if !link.is_good() || !stream.input.is_empty() || !stream.output.is_empty() {
            return;
        }
        stream.rest();
        let host = link.host.clone();
        host.idle.borrow_mut().push(self);
        host.freed.notify_one();
    }

    /// Returns whether the peer may have closed the connection since its last use, so that a system call to
    /// check it is worthwhile.
    pub(crate) fn may_be_closed(&self, now: Instant) -> bool {
        const RECENT: Duration = Duration::from_millis(100);
        matches!(self.wire, Wire::Http1(_))
            && self.link.served.get() > 0
            && now.saturating_duration_since(self.link.idle_since.get()) > RECENT
    }

    /// Returns whether nothing has arrived from the peer since the last request, according to the kernel.
    pub(crate) fn is_quiet_now(&mut self) -> bool {
        match &mut self.wire {
            Wire::Http1(stream) => stream.is_quiet_now(),
            Wire::Http2(_) => true,
        }
    }

    fn is_quiet(&mut self) -> bool {
        match &mut self.wire {
            Wire::Http1(stream) => stream.is_quiet(),
            Wire::Http2(_) => true,
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.place.pool.stats.cx_active.dec();
    }
}

pub(crate) fn increment(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

/// Returns whether connections to one endpoint can serve the other.
fn same_place(a: &Arc<Endpoint>, b: &Arc<Endpoint>) -> bool {
    let same_tls = match (&a.tls, &b.tls) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    };
    let same_addresses = a.address == b.address && a.pipe == b.pipe && a.others == b.others;
    Arc::ptr_eq(a, b) || (same_tls && same_addresses && a.hostname == b.hostname && a.workload == b.workload)
}

fn lists(endpoints: &Endpoints, host: &Host) -> bool {
    endpoints.iter().any(|endpoint| same_place(endpoint, &host.endpoint))
}
