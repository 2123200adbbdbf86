//! Clusters and endpoints.
//!
//! Source: `envoy.config.cluster.v3`, `envoy.config.endpoint.v3`.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    health::{Outlier, SlowStart},
    tls::ClientTls,
};
use crate::state::{Published, PublishedOption, circuit_breaker::Usage, health::EndpointState};
use skysail_http::{http1, http2::Http2Options, map::Map, proxy_protocol::ProxyVersion};

/// Maximum size of a head in bytes if nothing is configured (`max_request_headers_kb`, `max_response_headers_kb`).
pub const MAX_HEAD: usize = 60 << 10;
/// Maximum number of header fields if nothing is configured (`max_headers_count`).
pub const MAX_HEADERS: usize = 100;

/// A cluster: endpoints that serve the same purpose, and how the proxy connects to them.
#[derive(Debug)]
pub struct Cluster {
    /// Name, such as `outbound|9080|v1|reviews.default.svc.cluster.local`.
    pub name: Arc<str>,
    /// Source of the endpoints.
    pub discovery: Discovery,
    /// Endpoints in effect. They are replaced when they change; the cluster stays.
    pub endpoints: Arc<Published<Endpoints>>,
    /// Load balancing policy.
    pub balancer: Balancer,
    /// Panic threshold in percent (`common_lb_config.healthy_panic_threshold`); 0 disables it. If fewer endpoints of a
    /// priority are available, all of them are used, whatever their health.
    pub panic_threshold: u32,
    /// Outlier detection; `None` disables it.
    pub outlier: Option<Outlier>,
    /// Slow start of new endpoints; `None` disables it.
    pub slow_start: Option<SlowStart>,
    /// Lookup tables of a hashing balancer. The first worker that needs them builds them.
    pub hash_tables: Arc<PublishedOption<HashTables>>,
    /// Connect timeout.
    pub connect_timeout: Duration,
    /// Circuit breakers.
    pub limits: Limits,
    /// Use of the circuit breakers, across workers. Each number is counted only where it is limited.
    pub usage: Arc<Usage>,
    /// TLS by endpoint metadata; the first match wins. The choice is made when endpoints arrive: see
    /// [`Endpoint::tls`].
    pub transport_matches: Vec<TransportMatch>,
    /// TLS of endpoints that match none of [`Self::transport_matches`].
    pub tls: Option<Arc<ClientTls>>,
    /// The SNI is the host of each request instead of one configured name.
    pub auto_sni: Option<AutoSni>,
    /// Protocol to the endpoints.
    pub protocol: UpstreamProtocol,
    /// HTTP/2 settings.
    pub http2: Http2Options,
    /// Source addresses of connections; the first of the endpoint's address family is used. For inbound clusters
    /// 127.0.0.6 or ::6, which traffic interception lets through.
    pub sources: Vec<IpAddr>,
    /// Idle timeout of a pooled connection; `None`: one hour.
    pub idle_timeout: Option<Duration>,
    /// Maximum size of a response head in bytes.
    pub max_head: usize,
    /// Maximum number of fields in a response head, including the pseudo-header fields of HTTP/2.
    pub max_headers: usize,
    /// Whether clients of HTTP/1 receive the names of response headers as the endpoints spell them (`preserve_case`).
    pub keep_case: bool,
    /// Maximum number of requests on a connection; `None` for no limit.
    pub max_requests_per_connection: Option<u32>,
    /// Maximum age of a connection that takes further requests; `None` for no limit.
    pub max_connection_duration: Option<Duration>,
    /// TCP keep-alive (`upstream_connection_options.tcp_keepalive`); `None` disables it.
    pub keepalive: Option<Keepalive>,
    /// Service of the cluster, for metrics.
    pub service: Option<Service>,
    /// The endpoints are outside the mesh (Istio's metadata `external`).
    pub is_external: bool,
    /// Connections offer the cluster's own protocols, not those of sidecars (Istio's metadata `alpn_override`).
    pub keeps_alpn: bool,
    /// PROXY protocol header that is sent to the endpoint (`upstream_proxy_protocol`). A connection with a header
    /// serves one request, because the header names one client.
    pub proxy_protocol: Option<ProxyVersion>,
    /// Metadata of this proxy is sent to the peer (cluster filter `istio.metadata_exchange`).
    pub metadata_exchange: bool,
    /// Localities share the load by their weights (`common_lb_config.locality_weighted_lb_config`).
    pub locality_weighted: bool,
}

impl Cluster {
    /// Returns the limits on the heads of responses.
    pub fn head_limits(&self) -> http1::HeadLimits {
        let Self { max_head, max_headers, keep_case, .. } = *self;
        let max_headers = u32::try_from(max_headers).unwrap_or(u32::MAX);
        http1::HeadLimits { max_head, max_headers, keep_case }
    }

    /// Returns a cluster without endpoints and without limits.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            discovery: Discovery::Static,
            endpoints: Arc::default(),
            balancer: Balancer::RoundRobin,
            panic_threshold: 50,
            outlier: None,
            slow_start: None,
            hash_tables: Arc::default(),
            connect_timeout: Duration::from_secs(5),
            limits: Limits::NONE,
            usage: Arc::default(),
            transport_matches: Vec::new(),
            tls: None,
            auto_sni: None,
            protocol: UpstreamProtocol::Http1,
            sources: Vec::new(),
            idle_timeout: None,
            max_head: MAX_HEAD,
            max_headers: MAX_HEADERS,
            keep_case: false,
            max_requests_per_connection: None,
            max_connection_duration: None,
            keepalive: None,
            http2: Http2Options::new(u32::MAX),
            proxy_protocol: None,
            service: None,
            is_external: false,
            keeps_alpn: false,
            metadata_exchange: false,
            locality_weighted: false,
        }
    }

    /// Returns the state of an endpoint at this address: the state in `before`, or a new one. Returns `None` if no
    /// setting of this cluster needs state.
    pub fn endpoint_state(
        &self,
        address: SocketAddr,
        before: &Map<SocketAddr, Arc<EndpointState>>,
    ) -> Option<Arc<EndpointState>> {
        let counted = self.limits.connections_per_host != u32::MAX;
        if self.outlier.is_none() && self.slow_start.is_none() && !counted {
            return None;
        }
        Some(before.get(&address).cloned().unwrap_or_else(|| Arc::new(EndpointState::new(Instant::now()))))
    }

    /// Returns the state of all endpoints in effect, by address.
    pub fn endpoint_states(&self) -> Map<SocketAddr, Arc<EndpointState>> {
        let endpoints = self.endpoints.load();
        endpoints.iter().filter_map(|endpoint| Some((endpoint.address, endpoint.state.clone()?))).collect()
    }
}

/// Source of a cluster's endpoints. Source: `envoy.config.cluster.v3.Cluster.DiscoveryType`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Discovery {
    /// `STATIC`: given with the cluster.
    Static,
    /// `EDS`, with the name of the resource.
    Eds(Arc<str>),
    /// `ORIGINAL_DST`: the address that the client dialled; with this port if given.
    OriginalDst(Option<u16>),
    /// The host of each request, or the SNI of each connection, which the proxy resolves (`cluster_type`
    /// `envoy.clusters.dynamic_forward_proxy`).
    Dynamic(HostCacheConfig),
    /// Host names that the proxy resolves periodically. Every address is an endpoint (`STRICT_DNS`), or only the first
    /// (`LOGICAL_DNS`).
    Dns {
        /// Names to resolve.
        names: Vec<DnsName>,
        /// See [`Endpoints::localities`].
        localities: Vec<Locality>,
        /// See [`Endpoints::overprovisioning`].
        overprovisioning: u32,
        /// `LOGICAL_DNS`: one address at a time is used.
        logical: bool,
        /// Address families that are used.
        family: Family,
        /// Time between two lookups.
        refresh: Duration,
    },
}

/// Cache of resolved hosts. Source: `envoy.extensions.common.dynamic_forward_proxy.v3.DnsCacheConfig`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCacheConfig {
    /// Name; clusters with the same name and settings share the cache.
    pub name: Box<str>,
    /// Address families that are used (`dns_lookup_family`).
    pub family: Family,
    /// Time for which the addresses of a host are used without another lookup (`dns_refresh_rate`).
    pub refresh: Duration,
    /// Time after which an unused host makes room for others (`host_ttl`).
    pub host_ttl: Duration,
    /// Maximum number of hosts (`max_hosts`).
    pub max_hosts: u32,
    /// Timeout of a lookup (`dns_query_timeout`).
    pub query_timeout: Duration,
    /// Maximum number of requests that wait for a lookup (`dns_cache_circuit_breaker.max_pending_requests`).
    pub max_pending: u32,
}

/// Address families of a resolved name. Source: `envoy.config.cluster.v3.Cluster.DnsLookupFamily`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `V4_ONLY`
    V4,
    /// `V6_ONLY`
    V6,
    /// `AUTO`: IPv6 addresses, or IPv4 addresses if there are none.
    V6Preferred,
    /// `V4_PREFERRED`: IPv4 addresses, or IPv6 addresses if there are none.
    V4Preferred,
    /// `ALL`
    All,
}

impl Family {
    /// Returns the addresses of these that are used.
    pub fn of(self, addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let (v4, v6): (Vec<_>, Vec<_>) = addresses.iter().partition(|address| address.is_ipv4());
        match self {
            Self::V4 => v4,
            Self::V6 => v6,
            Self::V6Preferred if v6.is_empty() => v4,
            Self::V6Preferred => v6,
            Self::V4Preferred if v4.is_empty() => v6,
            Self::V4Preferred => v4,
            Self::All => addresses,
        }
    }
}

/// A host name whose addresses are endpoints. The other fields apply to each of them, as in [`Endpoint`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the like-named field of an endpoint, or the priority it is in")]
pub struct DnsName {
    pub host: Box<str>,
    pub port: u16,
    pub priority: usize,
    pub weight: u32,
    pub health: Health,
    pub locality: u32,
}

/// Load balancing policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Balancer {
    /// Endpoints in turn, by weight.
    RoundRobin,
    /// The endpoint with the fewest requests in flight among a few.
    LeastRequest {
        /// Number of endpoints to compare, picked at random (`choice_count`).
        choices: u32,
        /// Exponent for clusters with unequal weights: a weight is divided by the number of requests in flight to this
        /// power (`active_request_bias`).
        bias: f64,
    },
    /// Of two endpoints picked at random, whatever their weight: the one with the lower product of latency and
    /// requests in flight. Source: `envoy.extensions.load_balancing_policies.peak_ewma.v3alpha.PeakEwma`.
    PeakEwma {
        /// Decay time of a latency sample (`decay_time`).
        decay: Duration,
        /// Latency of an endpoint without samples (`default_rtt`).
        unknown: Duration,
    },
    /// A random endpoint, whatever its weight.
    Random,
    /// The next endpoint on a ring of hashes (`RING_HASH`).
    RingHash {
        /// Minimum number of entries on the ring (`minimum_ring_size`). There may be more, because the share of the
        /// smallest weight is rounded up.
        minimum: u64,
        /// Maximum number of entries (`maximum_ring_size`).
        maximum: u64,
        /// Hash function of the entries.
        function: HashFunction,
    },
    /// An entry of a table of this size, which is prime (`MAGLEV`).
    Maglev(u32),
    /// No balancing: the address that the client dialled.
    OriginalDst,
}

impl Balancer {
    /// Returns whether endpoints take turns by weight, so that slow start can lower the weight of new ones.
    pub fn takes_endpoints_in_turn(self) -> bool {
        matches!(self, Self::RoundRobin | Self::LeastRequest { .. })
    }

    /// Returns whether the balancer uses the hash of a request.
    pub fn hashes(self) -> bool {
        matches!(self, Self::RingHash { .. } | Self::Maglev(_))
    }
}

/// Hash function of a ring. Source: `envoy.config.cluster.v3.Cluster.RingHashLbConfig.HashFunction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashFunction {
    /// `XX_HASH`.
    Xx,
    /// `MURMUR_HASH_2`.
    Murmur2,
}

/// Lookup tables of a hashing balancer, shared by all workers.
#[derive(Debug)]
pub struct HashTables {
    /// Endpoints that the tables were built for.
    pub endpoints: Arc<Endpoints>,
    /// Version of the ejections that the tables were built for (`OutlierState::version`).
    pub version: u32,
    /// One table for each priority.
    pub tables: Vec<HashTable>,
}

/// Endpoints of one priority by hash. An entry is an index into that priority of [`Endpoints::priorities`].
#[derive(Debug, PartialEq, Eq)]
pub enum HashTable {
    /// Hashes in ascending order. Each leads to its endpoint, as do the hashes between it and the one before.
    Ring(Box<[(u64, u32)]>),
    /// Entries of the Maglev table; empty if there are no endpoints.
    Maglev(Box<[u32]>),
}

/// Circuit breakers: limits on what is open at once. Source: `envoy.config.cluster.v3.CircuitBreakers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of connections.
    pub connections: u32,
    /// Maximum number of requests that wait for a connection.
    pub pending: u32,
    /// Maximum number of requests in flight.
    pub requests: u32,
    /// Maximum number of retries in flight; not used with [`Self::budget`].
    pub retries: u32,
    /// Limit on retries as a share of requests (`retry_budget`).
    pub budget: Option<RetryBudget>,
    /// Maximum number of connections to each endpoint (`per_host_thresholds`).
    pub connections_per_host: u32,
}

impl Limits {
    /// No limits. Istio sends these values if nothing is configured.
    pub const NONE: Self = Self {
        connections: u32::MAX,
        pending: u32::MAX,
        requests: u32::MAX,
        retries: u32::MAX,
        budget: None,
        connections_per_host: u32::MAX,
    };
}

/// Retry budget. Source: `envoy.config.cluster.v3.CircuitBreakers.Thresholds.RetryBudget`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryBudget {
    /// Share of requests that may be retries, in millionths.
    pub share: u32,
    /// Number of retries that is always allowed.
    pub min: u32,
    /// Requests that began within this time count instead of those in flight (`budget_interval`).
    pub interval: Option<Duration>,
}

/// SNI by request. Source: `envoy.config.core.v3.UpstreamHttpProtocolOptions`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AutoSni {
    /// Header that holds the host name; without it in a request, the host of the request (`override_auto_sni_header`).
    pub header: Option<Box<str>>,
}

/// TCP keep-alive. The system's defaults apply to values that are not given. Source:
/// `envoy.config.core.v3.TcpKeepalive`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keepalive {
    /// Number of unanswered probes after which the connection is closed.
    pub probes: Option<u32>,
    /// Time without traffic before the first probe.
    pub time: Option<Duration>,
    /// Time between two probes.
    pub interval: Option<Duration>,
}

/// TLS settings, or plain text, for endpoints whose metadata match.
#[derive(Clone, Debug)]
pub struct TransportMatch {
    /// Name, such as `tlsMode-istio`.
    pub name: Box<str>,
    /// Keys and values under `envoy.transport_socket_match`. The endpoint must have all of them.
    pub labels: Vec<(Box<str>, Box<str>)>,
    /// TLS settings; `None` is plain text.
    pub tls: Option<Arc<ClientTls>>,
}

/// Protocol to the endpoints of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamProtocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2.
    Http2,
    /// The protocol of the downstream connection.
    AsDownstream,
    /// Chosen by ALPN.
    Auto,
}

/// Service of a cluster. Source: cluster metadata `istio.services[0]`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Service {
    /// Host name, such as `reviews.default.svc.cluster.local`.
    pub host: Arc<str>,
    /// Name, such as `reviews`.
    pub name: Arc<str>,
    /// Namespace, such as `default`.
    pub namespace: Arc<str>,
}

/// All endpoints of a cluster, by priority.
#[derive(Debug)]
pub struct Endpoints {
    /// Priority 0 first. A lower priority takes the load for which the priorities above have too few healthy
    /// endpoints.
    pub priorities: Vec<Vec<Arc<Endpoint>>>,
    /// Localities of the endpoints; see [`Endpoint::locality`].
    pub localities: Vec<Locality>,
    /// Overprovisioning factor in percent (`policy.overprovisioning_factor`): how much load the healthy endpoints of a
    /// priority can take, relative to their share.
    pub overprovisioning: u32,
}

impl Default for Endpoints {
    fn default() -> Self {
        Self { priorities: Vec::new(), localities: Vec::new(), overprovisioning: 140 }
    }
}

impl Endpoints {
    /// Returns endpoints of a single priority.
    pub fn of(endpoints: Vec<Arc<Endpoint>>) -> Self {
        Self { priorities: vec![endpoints], ..Self::default() }
    }

    /// Returns an iterator over all endpoints.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Endpoint>> {
        self.priorities.iter().flatten()
    }
}

/// A locality. Source: `envoy.config.endpoint.v3.LocalityLbEndpoints`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Locality {
    /// Region, zone and sub-zone.
    pub place: [Box<str>; 3],
    /// Weight among the localities of its priority, where localities are weighted.
    pub weight: u32,
}

/// An endpoint of a cluster.
#[derive(Debug)]
pub struct Endpoint {
    /// Address. For a Unix domain socket: an address of the discard prefix 100::/64 (RFC 6666) that stands for
    /// [`Self::pipe`] wherever endpoints are identified by address.
    pub address: SocketAddr,
    /// Path of the Unix domain socket (`address.pipe`); a path that begins with `@` is in the abstract namespace.
    pub pipe: Option<Box<str>>,
    /// Further addresses of the same endpoint, such as one of the other address family (`additional_addresses`).
    pub others: Box<[SocketAddr]>,
    /// Weight in its locality; at least 1.
    pub weight: u32,
    /// Health status in the configuration.
    pub health: Health,
    /// Index into [`Endpoints::localities`].
    pub locality: u32,
    /// TLS settings, chosen by the endpoint's metadata; `None` is plain text.
    pub tls: Option<Arc<ClientTls>>,
    /// Workload of the endpoint, if its metadata name one (`istio.workload`).
    pub workload: Option<Arc<Workload>>,
    /// Host name for `auto_host_rewrite`; `None`: its address.
    pub hostname: Option<Box<str>>,
    /// State of the endpoint, if the cluster needs any; see [`Cluster::endpoint_state`].
    pub state: Option<Arc<EndpointState>>,
}

impl Endpoint {
    /// Returns a healthy endpoint without further settings.
    pub fn new(address: SocketAddr, tls: Option<Arc<ClientTls>>) -> Self {
        let (weight, health, locality) = (1, Health::Healthy, 0);
        let others = Box::default();
        let (workload, hostname, state, pipe) = (None, None, None, None);
        Self { address, pipe, others, weight, health, locality, tls, workload, hostname, state }
    }

    /// Returns an endpoint on a Unix domain socket.
    pub fn of_pipe(path: &str, tls: Option<Arc<ClientTls>>) -> Self {
        Self { pipe: Some(path.into()), ..Self::new(pipe_address(path), tls) }
    }

    /// Returns the address as logs and statistics contain it: IP address and port, or a path.
    pub fn place(&self) -> Place<'_> {
        match &self.pipe {
            Some(path) => Place::Pipe(path),
            None => Place::Ip(self.address),
        }
    }
}

/// Address of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place<'a> {
    /// IP address and port.
    Ip(SocketAddr),
    /// Path of a Unix domain socket.
    Pipe(&'a str),
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(out),
            Self::Pipe(path) => out.write_str(path),
        }
    }
}

/// Returns the address that stands for a Unix domain socket. Different paths have different addresses, except for
/// the collisions of a 64-bit hash.
pub fn pipe_address(path: &str) -> SocketAddr {
    let hash = xxhash_rust::xxh64::xxh64(path.as_bytes(), 0);
    SocketAddr::new(Ipv6Addr::from_bits((0x0100 << 112) | u128::from(hash)).into(), 0)
}

/// Health status. Source: `envoy.config.core.v3.HealthStatus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// `HEALTHY`, `UNKNOWN`.
    Healthy,
    /// `DEGRADED`: takes the load for which there are too few healthy endpoints.
    Degraded,
    /// `UNHEALTHY`, `TIMEOUT`.
    Unhealthy,
    /// `DRAINING`: not used, and not counted in the share of healthy endpoints.
    Draining,
}

/// A workload, upstream or downstream. Source: endpoint metadata `istio.workload`, header `x-envoy-peer-metadata`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
#[expect(missing_docs, reason = "each is the like-named label of Istio's metrics")]
pub struct Workload {
    pub name: Arc<str>,
    pub namespace: Arc<str>,
    pub canonical_name: Arc<str>,
    pub canonical_revision: Arc<str>,
    pub cluster: Arc<str>,
    pub app: Arc<str>,
    pub version: Arc<str>,
}
