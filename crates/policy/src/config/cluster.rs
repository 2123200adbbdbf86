//! Clusters and endpoints.
//!
//! Source: `envoy.config.cluster.v3`, `envoy.config.endpoint.v3`.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    health::{Outlier, SlowStart},
    tls::ClientTls,
};
use crate::state::{Published, PublishedOption, circuit_breaker::Usage, health::Track};
use skysail_http::{http1, http2::Http2Options, map::Map, proxy_protocol::ProxyVersion};

/// Largest head in bytes where nothing is configured (`max_request_headers_kb`, `max_response_headers_kb`).
pub const MAX_HEAD: usize = 60 << 10;
/// Most fields of a head where nothing is configured (`max_headers_count`).
pub const MAX_HEADERS: usize = 100;

/// Somewhere to send to.
#[derive(Debug)]
pub struct Cluster {
    /// `outbound|9080|v1|reviews.default.svc.cluster.local`.
    pub name: Arc<str>,
    /// How its endpoints are known.
    pub discovery: Discovery,
    /// Its endpoints now. Replaced when they change; the cluster stays.
    pub endpoints: Arc<Published<Endpoints>>,
    /// How one is picked.
    pub balancer: Balancer,
    /// Below this share of available endpoints (in percent) all of a priority are used, whatever their health
    /// (`common_lb_config.healthy_panic_threshold`); 0 for never.
    pub panic_threshold: u32,
    /// Which endpoints are ejected because they fail; `None`: none.
    pub outlier: Option<Outlier>,
    /// How endpoints that are new come into use; `None`: at once.
    pub slow_start: Option<SlowStart>,
    /// For balancers that hash: made by the first worker that needs it.
    pub hashed: Arc<PublishedOption<Hashed>>,
    /// How long a connection may take to come about.
    pub connect_timeout: Duration,
    /// The greatest numbers allowed.
    pub limits: Limits,
    /// How much of them all workers together use. Counted only where there is a limit. `Usage::default()` to begin with.
    pub usage: Arc<Usage>,
    /// TLS by endpoint metadata, first match wins. The choice is made when endpoints arrive: see [`Endpoint::tls`].
    pub transport_matches: Vec<TransportMatch>,
    /// TLS where none of the matches holds.
    pub tls: Option<Arc<ClientTls>>,
    /// Servers are asked for, over TLS, by the host of each request instead of one name.
    pub auto_sni: Option<AutoSni>,
    /// Which HTTP is spoken.
    pub protocol: UpstreamProtocol,
    /// What is agreed on with servers of HTTP/2.
    pub http2: Http2Options,
    /// Addresses that connections come from, the first of an endpoint's family: 127.0.0.6 or ::6 for inbound ones, so that
    /// interception lets them through.
    pub sources: Vec<IpAddr>,
    /// A pooled connection is closed after so long without a request; `None`: an hour.
    pub idle_timeout: Option<Duration>,
    /// Largest head of an answer in bytes.
    pub max_head: usize,
    /// Most fields in an answer's head, those of HTTP/2's own among them.
    pub max_headers: usize,
    /// A connection serves at most so many requests; `None` for any number.
    pub max_requests_per_connection: Option<u32>,
    /// A connection that has been open for so long serves no further request; `None` for any time.
    pub max_connection_duration: Option<Duration>,
    /// How the kernel finds out that a peer is gone (`upstream_connection_options.tcp_keepalive`); `None`: not at all.
    pub keepalive: Option<Keepalive>,
    /// The service it stands for, for metrics: its host, name, namespace.
    pub service: Option<Service>,
    /// The header that says to an endpoint whose connection it is (`upstream_proxy_protocol`). Such a connection serves one
    /// request.
    pub proxy_protocol: Option<ProxyVersion>,
    /// Whether peers get metadata (cluster filter `istio.metadata_exchange`).
    pub metadata_exchange: bool,
    /// Whether localities share the load by their weights (`common_lb_config.locality_weighted_lb_config`).
    pub weigh_localities: bool,
}

impl Cluster {
    /// Returns the limits on the heads of responses.
    pub fn head_limits(&self) -> http1::HeadLimits {
        http1::HeadLimits { max_head: self.max_head, max_headers: self.max_headers }
    }

    /// A cluster without endpoints that sets nothing and limits nothing.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            discovery: Discovery::Static,
            endpoints: Arc::default(),
            balancer: Balancer::RoundRobin,
            panic_threshold: 50,
            outlier: None,
            slow_start: None,
            hashed: Arc::default(),
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
            max_requests_per_connection: None,
            max_connection_duration: None,
            keepalive: None,
            http2: Http2Options::new(u32::MAX),
            proxy_protocol: None,
            service: None,
            metadata_exchange: false,
            weigh_localities: false,
        }
    }

    /// What is to be known of an endpoint at this address: what was known before, if there is anything to know.
    pub fn track(&self, address: SocketAddr, before: &Map<SocketAddr, Arc<Track>>) -> Option<Arc<Track>> {
        let counted = self.limits.connections_per_host != u32::MAX;
        if self.outlier.is_none() && self.slow_start.is_none() && !counted {
            return None;
        }
        Some(before.get(&address).cloned().unwrap_or_else(|| Arc::new(Track::new(Instant::now()))))
    }

    /// What is known of the endpoints of now.
    pub fn tracks(&self) -> Map<SocketAddr, Arc<Track>> {
        let endpoints = self.endpoints.load();
        endpoints.iter().filter_map(|endpoint| Some((endpoint.address, endpoint.track.clone()?))).collect()
    }
}

/// How endpoints are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Discovery {
    /// Given with the cluster.
    Static,
    /// By EDS, under this name.
    Eds(Arc<str>),
    /// The address that the client dialled; with a port in its place if given.
    OriginalDst(Option<u16>),
    /// Host names, looked up again and again; every address is an endpoint (`STRICT_DNS`), or only the first (`LOGICAL_DNS`).
    Dns {
        /// What is looked up.
        names: Vec<DnsName>,
        /// As in [`Endpoints`].
        localities: Vec<Locality>,
        /// As in [`Endpoints`].
        overprovisioning: u32,
        /// Only one address at a time is used.
        logical: bool,
        /// Which addresses count.
        family: Family,
        /// How often they are looked up.
        refresh: Duration,
    },
}

/// Which of a name's addresses count. Source: `envoy.config.cluster.v3.Cluster.DnsLookupFamily`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `V4_ONLY`
    V4,
    /// `V6_ONLY`
    V6,
    /// `AUTO`: those of IPv6, or where there are none those of IPv4.
    V6Preferred,
    /// `V4_PREFERRED`: the other way round.
    V4Preferred,
    /// `ALL`
    All,
}

impl Family {
    /// Those of these addresses that count.
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

/// A host name whose addresses are endpoints. All of them are as [`Endpoint`] says.
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

/// How an endpoint is picked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Balancer {
    /// One after the other, by weight.
    RoundRobin,
    /// The less busy of a few.
    LeastRequest {
        /// How many are picked at random to compare (`choice_count`).
        choices: u32,
        /// Where weights differ, they are divided by the number of requests under way, to this power
        /// (`active_request_bias`).
        bias: f64,
    },
    /// Of two that are picked at random, whatever their weight, the one where its latency times the requests under way
    /// is less. Source: `envoy.extensions.load_balancing_policies.peak_ewma.v3alpha.PeakEwma`.
    PeakEwma {
        /// For how long what was seen of an endpoint counts (`decay_time`).
        decay: Duration,
        /// The latency of endpoints of which nothing has been seen (`default_rtt`).
        unknown: Duration,
    },
    /// Any, whatever its weight.
    Random,
    /// The next on a ring of hashes (`RING_HASH`).
    RingHash {
        /// Entries at least (`minimum_ring_size`), as many as there are endpoints of the least weight.
        minimum: u64,
        /// Entries at most (`maximum_ring_size`).
        maximum: u64,
        /// How places on the ring are found.
        function: HashFunction,
    },
    /// An entry of a table of this size, a prime (`MAGLEV`).
    Maglev(u32),
    /// None: the address that the client dialled.
    OriginalDst,
}

impl Balancer {
    /// Whether endpoints take turns by weight, so that those that are new may have fewer.
    pub fn is_by_turns(self) -> bool {
        matches!(self, Self::RoundRobin | Self::LeastRequest { .. })
    }

    /// Whether it looks at a request's hash.
    pub fn hashes(self) -> bool {
        matches!(self, Self::RingHash { .. } | Self::Maglev(_))
    }
}

/// Source: `envoy.config.cluster.v3.Cluster.RingHashLbConfig.HashFunction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashFunction {
    /// `XX_HASH`.
    Xx,
    /// `MURMUR_HASH_2`.
    Murmur2,
}

/// What balancers that hash look up, shared by all workers.
#[derive(Debug)]
pub struct Hashed {
    /// What it was made of.
    pub endpoints: Arc<Endpoints>,
    /// Which endpoints were ejected then (`OutlierState::version`).
    pub version: u32,
    /// By priority.
    pub tables: Vec<Table>,
}

/// Endpoints of one priority by hash. They are named by their places in [`Endpoints::priorities`].
#[derive(Debug, PartialEq, Eq)]
pub enum Table {
    /// Hashes in order, each with the endpoint that it and those before it lead to.
    Ring(Box<[(u64, u32)]>),
    /// As many entries as the table is to have; none where there are no endpoints.
    Maglev(Box<[u32]>),
}

/// The greatest numbers allowed at once. Source: `envoy.config.cluster.v3.CircuitBreakers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections.
    pub connections: u32,
    /// Requests waiting for a connection.
    pub pending: u32,
    /// Requests.
    pub requests: u32,
    /// Retries; unless there is a budget for them.
    pub retries: u32,
    /// What retries may be instead (`retry_budget`).
    pub budget: Option<RetryBudget>,
    /// Connections to each endpoint (`per_host_thresholds`).
    pub connections_per_host: u32,
}

impl Limits {
    /// No limits: what Istio sends where nothing is configured.
    pub const NONE: Self = Self {
        connections: u32::MAX,
        pending: u32::MAX,
        requests: u32::MAX,
        retries: u32::MAX,
        budget: None,
        connections_per_host: u32::MAX,
    };
}

/// Source: `envoy.config.cluster.v3.CircuitBreakers.Thresholds.RetryBudget`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryBudget {
    /// The part of all requests that may be retries, in millionths.
    pub share: u32,
    /// But always so many.
    pub least: u32,
}

/// Source: `envoy.config.core.v3.UpstreamHttpProtocolOptions`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AutoSni {
    /// A header that says the host, where a request has it (`override_auto_sni_header`).
    pub header: Option<Box<str>>,
}

/// Source: `envoy.config.core.v3.TcpKeepalive`. What is not given is as the system has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keepalive {
    /// The connection ends when so many probes are not answered.
    pub probes: Option<u32>,
    /// The first goes out when nothing was heard for so long.
    pub time: Option<Duration>,
    /// Between two of them.
    pub interval: Option<Duration>,
}

/// TLS, or none, for endpoints whose metadata match.
#[derive(Clone, Debug)]
pub struct TransportMatch {
    /// `tlsMode-istio`.
    pub name: Box<str>,
    /// Key and value under `envoy.transport_socket_match`; all must be there.
    pub labels: Vec<(Box<str>, Box<str>)>,
    /// `None` is plain text.
    pub tls: Option<Arc<ClientTls>>,
}

/// Which HTTP is spoken to a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamProtocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2.
    Http2,
    /// As the client does.
    AsDownstream,
    /// By ALPN.
    Auto,
}

/// The service a cluster stands for. Source: cluster metadata `istio.services[0]`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Service {
    /// `reviews.default.svc.cluster.local`.
    pub host: Arc<str>,
    /// `reviews`.
    pub name: Arc<str>,
    /// `default`.
    pub namespace: Arc<str>,
}

/// All endpoints of a cluster at one moment, by priority.
#[derive(Debug)]
pub struct Endpoints {
    /// Priority 0 first; a lower priority takes what those above have not enough healthy endpoints for.
    pub priorities: Vec<Vec<Arc<Endpoint>>>,
    /// Where endpoints are; see [`Endpoint::locality`].
    pub localities: Vec<Locality>,
    /// In percent: by how much more than its part those that are left can carry (`policy.overprovisioning_factor`).
    pub overprovisioning: u32,
}

impl Default for Endpoints {
    fn default() -> Self {
        Self { priorities: Vec::new(), localities: Vec::new(), overprovisioning: 140 }
    }
}

impl Endpoints {
    /// Endpoints of one priority.
    pub fn of(endpoints: Vec<Arc<Endpoint>>) -> Self {
        Self { priorities: vec![endpoints], ..Self::default() }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Endpoint>> {
        self.priorities.iter().flatten()
    }
}

/// Where endpoints are. Source: `envoy.config.endpoint.v3.LocalityLbEndpoints`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Locality {
    /// Region, zone and sub-zone.
    pub place: [Box<str>; 3],
    /// Its share of its priority's load, where localities are weighed.
    pub weight: u32,
}

/// One address to send to.
#[derive(Debug)]
pub struct Endpoint {
    /// Where it is.
    pub address: SocketAddr,
    /// Where it is as well, as with addresses of both families (`additional_addresses`).
    pub others: Box<[SocketAddr]>,
    /// Its weight in its locality; at least 1.
    pub weight: u32,
    /// What the configuration says about its health.
    pub health: Health,
    /// Its place in [`Endpoints::localities`].
    pub locality: u32,
    /// TLS chosen by its metadata; `None` is plain text.
    pub tls: Option<Arc<ClientTls>>,
    /// Who serves there, if it said so (`istio.workload`).
    pub workload: Option<Arc<Workload>>,
    /// Its host name, for `auto_host_rewrite`; else its address.
    pub hostname: Option<Box<str>>,
    /// How it does, where that counts for something.
    pub track: Option<Arc<Track>>,
}

impl Endpoint {
    /// A healthy endpoint of which nothing else is known.
    pub fn new(address: SocketAddr, tls: Option<Arc<ClientTls>>) -> Self {
        let (weight, health, locality) = (1, Health::Healthy, 0);
        let others = Box::default();
        Self { address, others, weight, health, locality, tls, workload: None, hostname: None, track: None }
    }
}

/// Source: `envoy.config.core.v3.HealthStatus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// `HEALTHY`, `UNKNOWN`.
    Healthy,
    /// `DEGRADED`: used for what the healthy cannot carry.
    Degraded,
    /// `UNHEALTHY`, `TIMEOUT`.
    Unhealthy,
    /// `DRAINING`: not used, and not counted among those that should be healthy.
    Draining,
}

/// Who serves or calls. Source: endpoint metadata `istio.workload`, `x-envoy-peer-metadata`.
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
