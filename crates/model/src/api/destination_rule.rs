//! DestinationRule: how a client treats a service's endpoints. Fields are Istio's (`networking.istio.io`).

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{
    Labels,
    value::{Duration, PortSelector},
};

/// `spec` of a DestinationRule.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DestinationRule {
    /// The service; a short name is meant in the rule's own namespace.
    pub host: String,
    /// Holds for all subsets that do not say otherwise.
    pub traffic_policy: Option<TrafficPolicy>,
    /// Named parts of the service.
    pub subsets: Vec<Subset>,
    /// The namespaces that see it; none means all.
    pub export_to: Vec<String>,
    /// Client workloads it holds for; unset means all.
    pub workload_selector: Option<WorkloadSelector>,
}

impl DestinationRule {
    /// All settings of how endpoints are picked, of whichever port or subset.
    pub fn balancers(&self) -> impl Iterator<Item = &LoadBalancer> {
        let subsets = self.subsets.iter().map(|subset| &subset.traffic_policy);
        let policies = std::iter::once(&self.traffic_policy).chain(subsets).flatten();
        policies.flat_map(|policy| {
            let ports = policy.port_level_settings.iter().map(|port| &port.load_balancer);
            std::iter::once(&policy.load_balancer).chain(ports).flatten()
        })
    }
}

/// A named part of a service.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Subset {
    /// The name VirtualServices use.
    pub name: String,
    /// Labels of the pods in it.
    pub labels: Labels,
    /// Replaces the rule's policy, setting by setting.
    pub traffic_policy: Option<TrafficPolicy>,
}

/// `matchLabels`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadSelector {
    /// All must match.
    pub match_labels: Labels,
}

/// Settings towards a service.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TrafficPolicy {
    /// How an endpoint is picked.
    pub load_balancer: Option<LoadBalancer>,
    /// Limits and timeouts of connections.
    pub connection_pool: Option<ConnectionPool>,
    /// Throws out endpoints that fail.
    pub outlier_detection: Option<OutlierDetection>,
    /// TLS towards the endpoints.
    pub tls: Option<ClientTls>,
    /// Settings for single ports; they replace the others whole.
    pub port_level_settings: Vec<PortTrafficPolicy>,
    /// Tunnels TCP through CONNECT.
    pub tunnel: Option<Tunnel>,
    /// Sends the PROXY protocol.
    pub proxy_protocol: Option<ProxyProtocol>,
    /// Limits retries to a share of the requests.
    pub retry_budget: Option<RetryBudget>,
}

/// [`TrafficPolicy`] of one port.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PortTrafficPolicy {
    /// The service port.
    pub port: PortSelector,
    /// As in [`TrafficPolicy`].
    pub load_balancer: Option<LoadBalancer>,
    /// As in [`TrafficPolicy`].
    pub connection_pool: Option<ConnectionPool>,
    /// As in [`TrafficPolicy`].
    pub outlier_detection: Option<OutlierDetection>,
    /// As in [`TrafficPolicy`].
    pub tls: Option<ClientTls>,
}

/// How an endpoint is picked.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LoadBalancer {
    /// One of the simple ways.
    pub simple: Option<SimpleLb>,
    /// By hash of the request.
    pub consistent_hash: Option<ConsistentHash>,
    /// Prefers endpoints that are near.
    pub locality_lb_setting: Option<LocalityLb>,
    /// Prefers endpoints that are near, by capacity.
    pub zone_aware_lb_setting: Option<ZoneAwareLb>,
    /// New endpoints get traffic slowly.
    pub warmup: Option<Warmup>,
    /// Old form of `warmup`.
    pub warmup_duration_secs: Option<Duration>,
}

/// The simple ways to pick an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum SimpleLb {
    /// The default.
    Unspecified,
    /// Old name of [`Self::LeastRequest`].
    LeastConn,
    /// Any.
    Random,
    /// The address asked for.
    Passthrough,
    /// In turn.
    RoundRobin,
    /// The less busy of two.
    LeastRequest,
}

/// By hash of the request.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ConsistentHash {
    /// The key is a header.
    pub http_header_name: Option<String>,
    /// The key is a cookie.
    pub http_cookie: Option<HttpCookie>,
    /// The key is the client's address.
    pub use_source_ip: Option<bool>,
    /// The key is a query parameter.
    pub http_query_parameter_name: Option<String>,
    /// The ring.
    pub ring_hash: Option<RingHash>,
    /// The Maglev table.
    pub maglev: Option<Maglev>,
    /// Old form of `ringHash.minimumRingSize`.
    pub minimum_ring_size: u64,
}

/// A cookie that carries the key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HttpCookie {
    /// Its name.
    pub name: String,
    /// Its path.
    pub path: String,
    /// Its life; the cookie is made if missing.
    pub ttl: Option<Duration>,
    /// Further attributes.
    pub attributes: Vec<CookieAttribute>,
}

/// One attribute of a cookie.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CookieAttribute {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
}

/// The size of the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RingHash {
    /// At least this many points.
    pub minimum_ring_size: u64,
}

/// The size of the Maglev table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Maglev {
    /// A prime.
    pub table_size: u64,
}

impl LoadBalancer {
    /// Keys of the client's labels that decide which endpoints are near.
    pub fn label_keys(&self) -> impl Iterator<Item = &String> {
        self.locality_lb_setting.iter().flat_map(LocalityLb::label_keys)
    }
}

impl LocalityLb {
    /// Keys of the client's labels that decide which endpoints are near; `key=value` does not depend on the client.
    pub fn label_keys(&self) -> impl Iterator<Item = &String> {
        self.failover_priority.iter().filter(|label| !label.contains('='))
    }
}

/// Prefers endpoints that are near.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LocalityLb {
    /// Fixed shares from a locality to others.
    pub distribute: Vec<Distribute>,
    /// Where to go when a region fails.
    pub failover: Vec<Failover>,
    /// Labels whose equality makes an endpoint near.
    pub failover_priority: Vec<String>,
    /// On or off.
    pub enabled: Option<bool>,
}

/// Shares of the traffic from one locality.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Distribute {
    /// `region/zone/*`.
    pub from: String,
    /// Per cent by locality.
    pub to: BTreeMap<String, u32>,
}

/// Which region takes over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Failover {
    /// The region that fails.
    pub from: String,
    /// The region that takes over.
    pub to: String,
}

/// Prefers endpoints that are near, by capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ZoneAwareLb {
    /// On or off.
    pub enabled: Option<bool>,
    /// Where to go when a region fails.
    pub failover: Vec<Failover>,
    /// Labels whose equality makes an endpoint near.
    pub failover_priority: Vec<String>,
    /// Fewer endpoints turn it off.
    pub min_cluster_size: Option<u32>,
}

/// New endpoints get traffic slowly.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Warmup {
    /// How long.
    pub duration: Option<Duration>,
    /// The share they begin with.
    pub minimum_percent: Option<f64>,
    /// The curve.
    pub aggression: Option<f64>,
}

/// Limits and timeouts of connections.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ConnectionPool {
    /// For all.
    pub tcp: Option<TcpPool>,
    /// For HTTP.
    pub http: Option<HttpPool>,
}

/// Limits of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TcpPool {
    /// At most this many at a time.
    pub max_connections: i32,
    /// How long connecting may take; 10 s if unset.
    pub connect_timeout: Option<Duration>,
    /// Keepalive of the kernel.
    pub tcp_keepalive: Option<TcpKeepalive>,
    /// A connection lives no longer.
    pub max_connection_duration: Option<Duration>,
    /// A silent connection is closed.
    pub idle_timeout: Option<Duration>,
}

/// Keepalive of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TcpKeepalive {
    /// Probes before giving up.
    pub probes: u32,
    /// Silence before the first probe.
    pub time: Option<Duration>,
    /// Between probes.
    pub interval: Option<Duration>,
}

/// Limits of HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpPool {
    /// Requests that may wait for a connection.
    pub http1_max_pending_requests: i32,
    /// Requests at a time.
    pub http2_max_requests: i32,
    /// Requests a connection serves before it is closed; 0: no limit.
    pub max_requests_per_connection: i32,
    /// Retries at a time.
    pub max_retries: i32,
    /// A connection without requests is closed.
    pub idle_timeout: Option<Duration>,
    /// HTTP/1.1 to HTTP/2.
    pub h2_upgrade_policy: Option<H2Upgrade>,
    /// Upstream speaks what the client speaks.
    pub use_client_protocol: bool,
    /// Streams a connection carries.
    pub max_concurrent_streams: i32,
    /// Pings.
    pub http2_keep_alive: Option<Http2KeepAlive>,
}

/// HTTP/1.1 to HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum H2Upgrade {
    /// As the mesh says.
    Default,
    /// Never.
    DoNotUpgrade,
    /// Always.
    Upgrade,
}

/// Pings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Http2KeepAlive {
    /// Between pings.
    pub interval: Option<Duration>,
    /// How long an answer may take.
    pub timeout: Option<Duration>,
}

/// Throws out endpoints that fail.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OutlierDetection {
    /// Old form of `consecutive5xxErrors`.
    pub consecutive_errors: i32,
    /// Local and remote errors are counted apart.
    pub split_external_local_origin_errors: bool,
    /// Local errors in a row.
    pub consecutive_local_origin_failures: Option<u32>,
    /// 502, 503, 504 in a row.
    pub consecutive_gateway_errors: Option<u32>,
    /// 5xx in a row.
    #[serde(rename = "consecutive5xxErrors")]
    pub consecutive_5xx_errors: Option<u32>,
    /// Between sweeps.
    pub interval: Option<Duration>,
    /// The first time out.
    pub base_ejection_time: Option<Duration>,
    /// At most this share is out.
    pub max_ejection_percent: i32,
    /// With fewer healthy ones, health is not looked at.
    pub min_health_percent: i32,
    /// Status codes that count as errors.
    pub outlier_detection_http_error_codes: Vec<u32>,
}

/// TLS towards the endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientTls {
    /// Which kind.
    pub mode: TlsMode,
    /// A file.
    pub client_certificate: String,
    /// A file.
    pub private_key: String,
    /// A file.
    pub ca_certificates: String,
    /// A Secret.
    pub credential_name: String,
    /// Names one of which the server must have.
    pub subject_alt_names: Vec<String>,
    /// The server name sent.
    pub sni: String,
    /// The server is not verified.
    pub insecure_skip_verify: Option<bool>,
    /// A file.
    pub ca_crl: String,
}

/// The kinds of TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TlsMode {
    /// None.
    #[default]
    Disable,
    /// The server shows a certificate.
    Simple,
    /// Both show certificates, from files or a Secret.
    Mutual,
    /// Both show the mesh's certificates.
    IstioMutual,
}

/// Tunnels TCP through CONNECT.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Tunnel {
    /// `CONNECT` or `POST`.
    pub protocol: String,
    /// Where the tunnel leads.
    pub target_host: String,
    /// Its port.
    pub target_port: u32,
}

/// Sends the PROXY protocol.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ProxyProtocol {
    /// `V1` or `V2`.
    pub version: String,
}

/// Limits retries to a share of the requests.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RetryBudget {
    /// The share.
    pub percent: Option<f64>,
    /// Retries that are always allowed.
    pub min_retry_concurrency: u32,
    /// The time looked back.
    pub budget_interval: Option<Duration>,
}
