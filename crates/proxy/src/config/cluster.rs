//! Clusters and endpoints.
//!
//! Source: `envoy.config.cluster.v3`, `envoy.config.endpoint.v3`.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::AtomicU32},
    time::Duration,
};

use arc_swap::ArcSwap;

use super::{http::Http2Options, tls::ClientTls};
use crate::proxy_protocol::Version;

/// Somewhere to send to.
#[derive(Debug)]
pub struct Cluster {
    /// `outbound|9080|v1|reviews.default.svc.cluster.local`.
    pub name: Arc<str>,
    /// How its endpoints are known.
    pub discovery: Discovery,
    /// Its endpoints now. Replaced when they change; the cluster stays.
    pub endpoints: ArcSwap<Endpoints>,
    /// How one is picked.
    pub balancer: Balancer,
    /// How long a connection may take to come about.
    pub connect_timeout: Duration,
    /// The greatest numbers allowed.
    pub limits: Limits,
    /// How much of them all workers together use. Counted only where there is a limit. `Usage::default()` to begin with.
    pub usage: Usage,
    /// TLS by endpoint metadata, first match wins. The choice is made when endpoints arrive: see [`Endpoint::tls`].
    pub transport_matches: Vec<TransportMatch>,
    /// TLS where none of the matches holds.
    pub tls: Option<Arc<ClientTls>>,
    /// Which HTTP is spoken.
    pub protocol: UpstreamProtocol,
    /// What is agreed on with servers of HTTP/2.
    pub http2: Http2Options,
    /// Address that connections come from: 127.0.0.6 for inbound ones, so that interception lets them through.
    pub source: Option<IpAddr>,
    /// A pooled connection is closed after so long without a request; `None`: an hour.
    pub idle_timeout: Option<Duration>,
    /// A connection serves at most so many requests; `None` for any number.
    pub max_requests_per_connection: Option<u32>,
    /// The service it stands for, for metrics: its host, name, namespace.
    pub service: Option<Service>,
    /// The header that says to an endpoint whose connection it is (`upstream_proxy_protocol`). Such a connection serves one
    /// request.
    pub proxy_protocol: Option<Version>,
    /// Whether peers get metadata (cluster filter `istio.metadata_exchange`).
    pub metadata_exchange: bool,
    /// Whether localities share the load by their weights (`locality_weighted_lb_config`); see [`Endpoint::weight`].
    pub weigh_localities: bool,
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
        /// Host, port, weight.
        names: Vec<(Box<str>, u16, u32)>,
        /// Only one address at a time is used.
        logical: bool,
        /// How often they are looked up.
        refresh: Duration,
    },
}

/// How an endpoint is picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balancer {
    /// One after the other, by weight.
    RoundRobin,
    /// The less busy of this many picked at random.
    LeastRequest(u32),
    /// Any.
    Random,
    /// None: the address that the client dialled.
    OriginalDst,
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
    /// Retries.
    pub retries: u32,
}

impl Limits {
    /// No limits: what Istio sends where nothing is configured.
    pub const NONE: Self =
        Self { connections: u32::MAX, pending: u32::MAX, requests: u32::MAX, retries: u32::MAX };
}

/// How much of [`Limits`] is in use, across workers.
#[derive(Debug, Default)]
pub struct Usage {
    /// Connections.
    pub connections: AtomicU32,
    /// Requests waiting for a connection.
    pub pending: AtomicU32,
    /// Requests.
    pub requests: AtomicU32,
    /// Retries.
    pub retries: AtomicU32,
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
#[derive(Debug, Default)]
pub struct Endpoints {
    /// Priority 0 first; a lower priority is used only when those above have none that is healthy.
    pub priorities: Vec<Vec<Arc<Endpoint>>>,
}

/// One address to send to.
#[derive(Debug)]
pub struct Endpoint {
    /// Where it is.
    pub address: SocketAddr,
    /// Its weight in its priority: its own times its locality's share; at least 1.
    pub weight: u32,
    /// TLS chosen by its metadata; `None` is plain text.
    pub tls: Option<Arc<ClientTls>>,
    /// Who serves there, if it said so (`istio.workload`).
    pub workload: Option<Arc<Workload>>,
    /// Its host name, for `auto_host_rewrite`; else its address.
    pub hostname: Option<Box<str>>,
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
