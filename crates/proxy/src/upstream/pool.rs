//! A worker's connections to upstreams.
//!
//! Every worker has its own, so nothing here is locked. The connection given back last is taken first: it is
//! the likeliest to be alive, and those not needed age and go. A connection is used again only if the endpoint
//! is still there, its TLS configuration is still the newest and the peer has said nothing meanwhile. Requests
//! of HTTP/2 share connections instead.

use std::{
    cell::{Cell, RefCell},
    net::SocketAddr,
    rc::{Rc, Weak},
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_identity::Connector;
use tokio::sync::Notify;

use crate::telemetry::{
    Shard,
    stats::{ClusterStats, OutlierStats},
};
use skysail_http::{
    http2::{Connection, Duplex},
    map::Map,
    socket::Stream,
    wire::Wire,
};
use skysail_policy::{
    balance::{PickState, latency::Latency},
    config::{Cluster, Endpoint, Endpoints, Snapshot, cluster::Balancer},
    outlier,
    peer::Peer,
};

mod eject;
mod limits;

pub(crate) use limits::{Busy, ConnectionSlot, Counted, Full};

/// How often idle connections are looked after.
pub(crate) const SWEEP: Duration = Duration::from_secs(1);
/// Envoy's default for idle upstream connections.
const IDLE_TIMEOUT: Duration = Duration::from_hours(1);

/// Clusters that this worker has used, with their connections.
#[derive(Default)]
pub(crate) struct Clusters {
    used: RefCell<Map<Arc<str>, Rc<Pool>>>,
}

/// One cluster as this worker uses it.
pub(crate) struct Pool {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) stats: Rc<ClusterStats>,
    /// Where endpoints can be ejected.
    pub(crate) outliers: Option<Rc<OutlierStats>>,
    pub(crate) pick: RefCell<PickState>,
    hosts: RefCell<Map<SocketAddr, Rc<Host>>>,
    /// The cluster has been replaced or removed: connections end with the request they serve.
    gone: Cell<bool>,
    /// Told when there is a place for another connection, to whichever endpoint.
    pub(crate) room: Notify,
}

/// One endpoint as this worker uses it.
pub(crate) struct Host {
    /// What the configuration says of it.
    pub(crate) endpoint: Arc<Endpoint>,
    idle: RefCell<Vec<Upstream>>,
    /// Connections of HTTP/2, each for many requests.
    shared: RefCell<Vec<Rc<Multiplexed>>>,
    /// One that requests will share is on its way.
    pub(crate) connecting: Cell<bool>,
    /// Told when a connection becomes idle, or can be shared.
    pub(crate) freed: Notify,
    gone: Cell<bool>,
    /// Requests under way.
    pub(crate) requests: Cell<u32>,
    /// How long they took, where the balancer wants to know.
    latency: Cell<Option<Latency>>,
    /// Connections open or about to be.
    connections: Cell<u32>,
    /// Figures for `/clusters`.
    pub(crate) totals: Totals,
}

/// What happened so far with an endpoint.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) connections: Cell<u64>,
    pub(crate) connect_failures: Cell<u64>,
    pub(crate) requests: Cell<u64>,
    pub(crate) errors: Cell<u64>,
}

/// An endpoint's figures on one worker, for the admin page.
#[derive(Clone, Debug, Default)]
pub struct HostStats {
    /// The cluster.
    pub cluster: Arc<str>,
    /// The endpoint.
    pub address: Option<SocketAddr>,
    /// Connections open now.
    pub connections: u32,
    /// Connections opened so far.
    pub connections_total: u64,
    /// Connections that did not come about.
    pub connect_failures: u64,
    /// Requests under way.
    pub requests: u32,
    /// Requests so far.
    pub requests_total: u64,
    /// Requests that failed or were answered 5xx.
    pub errors: u64,
}

/// A connection to an upstream: what all its requests have in common.
pub(crate) struct Link {
    pub(crate) host: Rc<Host>,
    pub(crate) peer: Peer,
    pub(crate) tls: Option<UpstreamTls>,
    opened: Instant,
    /// Requests it has served.
    pub(crate) served: Cell<u32>,
    /// The peer remembers who we are, so it need not be told with every request.
    pub(crate) introduced: Cell<bool>,
    pub(crate) local: Option<SocketAddr>,
    /// Its other end, which is one of the endpoint's addresses.
    pub(crate) remote: SocketAddr,
    idle_since: Cell<Instant>,
    place: ConnectionSlot,
}

/// How a connection begins TLS.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamTls {
    pub(crate) config: Arc<Connector>,
    /// The host that the server is asked for, where it depends on the request (`auto_sni`).
    pub(crate) host: Option<Box<str>>,
}

/// A connection to an upstream, or a share of one, for one request.
pub(crate) struct Upstream {
    pub(crate) wire: Wire,
    pub(crate) link: Rc<Link>,
}

/// A connection of HTTP/2. It ends by itself once neither the pool nor a request holds it.
struct Multiplexed {
    link: Rc<Link>,
    connection: Connection,
}

impl Clusters {
    /// The cluster of this name; `None` if the configuration has none.
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
            gone: Cell::new(false),
            room: Notify::new(),
        });
        if pool.outliers.is_some() {
            tokio::task::spawn_local(eject::watch(Rc::downgrade(&pool)));
        }
        used.insert(cluster.name.clone(), pool.clone());
        Some(pool)
    }

    /// Lets go of clusters that a new configuration replaces or removes.
    pub(crate) fn update(&self, snapshot: &Snapshot) {
        self.used.borrow_mut().retain(|name, pool| {
            let kept = snapshot.clusters.get(name).is_some_and(|cluster| Arc::ptr_eq(cluster, &pool.cluster));
            if !kept {
                pool.retire();
            }
            kept
        });
    }

    /// Closes idle connections that the peer closed, that were idle too long or whose endpoint is gone.
    pub(crate) fn sweep(&self, now: Instant) {
        let pools: Vec<_> = self.used.borrow().values().cloned().collect();
        for pool in pools {
            pool.sweep(now);
        }
    }

    /// Closes all idle connections, at the end.
    pub(crate) fn clear(&self) {
        let pools: Vec<_> = self.used.borrow_mut().drain().collect();
        for (_, pool) in pools {
            pool.retire();
        }
    }

    /// Figures of every endpoint used.
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
    /// The endpoint as this worker uses it.
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
            gone: Cell::new(false),
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

    /// The endpoint at an address that a client dialled.
    pub(crate) fn original(&self, address: SocketAddr) -> Arc<Endpoint> {
        if let Some(host) = self.hosts.borrow().get(&address) {
            return host.endpoint.clone();
        }
        Arc::new(Endpoint::new(address, self.cluster.tls.clone()))
    }

    /// How many requests an endpoint has under way on this worker.
    pub(crate) fn busy(&self, endpoint: &Endpoint) -> u32 {
        self.hosts.borrow().get(&endpoint.address).map_or(0, |host| host.requests.get())
    }

    /// When a request begins, if the balancer wants to know how long it takes.
    pub(crate) fn begun(&self) -> Option<Instant> {
        matches!(self.cluster.balancer, Balancer::PeakEwma { .. }).then(Instant::now)
    }

    /// Takes notice of how long an endpoint took to answer, or until it was given up.
    pub(crate) fn took(&self, host: &Host, begun: Instant) {
        if let Balancer::PeakEwma { decay, .. } = self.cluster.balancer {
            let now = Instant::now();
            host.latency.set(Some(Latency::with(host.latency.get(), now - begun, now, decay)));
        }
    }

    /// How long an endpoint's next request is expected to take, in nanoseconds: as long as those before it did, and as
    /// long again for each that is under way.
    pub(crate) fn expected(&self, endpoint: &Endpoint, decay: Duration, unknown: Duration) -> u64 {
        let hosts = self.hosts.borrow();
        let host = hosts.get(&endpoint.address);
        let seen = host.and_then(|host| host.latency.get());
        let latency = seen.map_or(unknown, |seen| seen.now(Instant::now(), decay)).as_nanos();
        let requests = host.map_or(0, |host| host.requests.get());
        u64::try_from(latency.max(1) * (u128::from(requests) + 1)).unwrap_or(u64::MAX)
    }

    /// An idle connection that can be used.
    pub(crate) fn take(&self, host: &Host, tls: Option<&UpstreamTls>) -> Option<Upstream> {
        loop {
            let mut idle = host.idle.borrow_mut();
            let index = idle.iter().rposition(|upstream| upstream.link.asks_as(tls))?;
            let mut upstream = idle.remove(index);
            drop(idle);
            if upstream.link.uses(tls) && !upstream.link.is_old(Instant::now) && upstream.is_quiet() {
                return Some(upstream);
            }
        }
    }

    /// Closes a connection to an endpoint that nobody uses; `false` if there is none.
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
        // The borrow ends first: a connection's end looks at its host.
        drop(shared);
        unused.is_some()
    }

    /// A share of a connection of HTTP/2.
    pub(crate) fn share(&self, host: &Host, tls: Option<&UpstreamTls>) -> Option<Upstream> {
        let mut shared = host.shared.borrow_mut();
        let mut found = None;
        let streams = self.cluster.http2.max_streams as usize;
        shared.retain(|multiplexed| {
            let connection = &multiplexed.connection;
            let asked = multiplexed.link.asks_as(tls);
            let current = connection.is_usable()
                && (!asked || multiplexed.link.uses(tls))
                && !multiplexed.link.is_old(Instant::now)
                && multiplexed.begun() < self.most() as usize;
            if current
                && asked
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

    /// How many requests a connection may serve.
    fn most(&self) -> u32 {
        // What says whose connection it is serves nobody else.
        let own = self.cluster.proxy_protocol.map(|_| 1);
        own.or(self.cluster.max_requests_per_connection).unwrap_or(u32::MAX)
    }

    /// A new connection, at the place that [`Self::admit`] gave.
    pub(crate) fn opened(
        place: ConnectionSlot,
        stream: &Stream,
        peer: Peer,
        tls: Option<UpstreamTls>,
    ) -> Rc<Link> {
        bump(&place.host.totals.connections);
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
        let dynamic =
            matches!(self.cluster.discovery, skysail_policy::config::cluster::Discovery::OriginalDst(_));
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
        self.gone.set(true);
        if let (Some(outlier), Some(stats)) = (&self.cluster.outlier, &self.outliers) {
            stats.ejections_active.add(outlier::end(outlier));
        }
        for host in self.hosts.borrow().values() {
            host.retire();
        }
        self.room.notify_waiters();
    }
}

impl Host {
    fn retire(&self) {
        self.gone.set(true);
        // Dropped after the borrow ends: a connection's end looks at its host.
        let _closed = (self.idle.take(), self.shared.take());
    }

    /// Takes in a connection of HTTP/2 that requests may share, and gives the first its share.
    pub(crate) fn add_shared(&self, link: Rc<Link>, connection: Connection) -> Upstream {
        let wire = Wire::Http2(Box::new(Duplex::idle(connection.clone())));
        if !self.gone.get() && !link.place.pool.gone.get() {
            self.shared.borrow_mut().push(Rc::new(Multiplexed { link: link.clone(), connection }));
        }
        Upstream { wire, link }
    }

    /// Lets go of a connection of HTTP/2 that has ended.
    pub(crate) fn remove_shared(&self, link: &Weak<Link>) {
        // Dropped after the borrow ends, as above.
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
    /// Requests under way.
    fn requests(&self) -> usize {
        Rc::strong_count(&self.link) - 1
    }

    /// Requests that it has served, and those under way.
    fn begun(&self) -> usize {
        self.link.served.get() as usize + self.requests()
    }
}

impl Link {
    /// Whether it was made with this TLS configuration.
    fn uses(&self, tls: Option<&UpstreamTls>) -> bool {
        match (&self.tls, tls) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(&a.config, &b.config),
            _ => false,
        }
    }

    /// Whether its server was asked for by the same host, if it was by any.
    fn asks_as(&self, tls: Option<&UpstreamTls>) -> bool {
        let own = self.tls.as_ref().and_then(|own| own.host.as_deref());
        own == tls.and_then(|tls| tls.host.as_deref())
    }

    /// Whether it has been open for as long as it may. The clock is asked only where there is such a limit.
    fn is_old(&self, now: impl FnOnce() -> Instant) -> bool {
        let most = self.pool().cluster.max_connection_duration;
        most.is_some_and(|most| now().saturating_duration_since(self.opened) >= most)
    }

    /// Whether it may serve more than it has.
    pub(crate) fn is_good(&self) -> bool {
        !self.pool().gone.get()
            && !self.host.gone.get()
            && self.served.get() < self.pool().most()
            && !self.is_old(Instant::now)
    }

    /// The cluster it belongs to.
    pub(crate) fn pool(&self) -> &Rc<Pool> {
        &self.place.pool
    }
}

impl Upstream {
    /// A connection of its own.
    pub(crate) fn own(stream: Box<Stream>, link: Rc<Link>) -> Self {
        Self { wire: Wire::Http1(stream), link }
    }

    /// Gives the connection back for another request, or closes it if it cannot serve one.
    pub(crate) fn give_back(mut self) {
        let link = &self.link;
        link.served.set(link.served.get() + 1);
        if Some(link.served.get()) == link.pool().cluster.max_requests_per_connection {
            link.pool().stats.cx_max_requests.inc();
        }
        link.idle_since.set(Instant::now());
        let Wire::Http1(stream) = &mut self.wire else {
            // There may be room for another stream now.
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

    /// Whether the peer may well have closed meanwhile, so that it is worth asking the kernel.
    pub(crate) fn may_be_stale(&self, now: Instant) -> bool {
        const RECENT: Duration = Duration::from_millis(100);
        matches!(self.wire, Wire::Http1(_))
            && self.link.served.get() > 0
            && now.saturating_duration_since(self.link.idle_since.get()) > RECENT
    }

    /// Whether the kernel, asked now, knows of nothing that the peer has done since the last request.
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

pub(crate) fn bump(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

/// Whether connections to one serve the other.
fn same_place(a: &Arc<Endpoint>, b: &Arc<Endpoint>) -> bool {
    let same_tls = match (&a.tls, &b.tls) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    };
    let same_addresses = a.address == b.address && a.others == b.others;
    Arc::ptr_eq(a, b) || (same_tls && same_addresses && a.hostname == b.hostname && a.workload == b.workload)
}

fn lists(endpoints: &Endpoints, host: &Host) -> bool {
    endpoints.iter().any(|endpoint| same_place(endpoint, &host.endpoint))
}
