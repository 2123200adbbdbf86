//! DestinationRule: settings of clients towards a service's endpoints. Fields are Istio's (`networking.istio.io`).

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{
    Labels,
    locality::HOSTNAME,
    value::{Duration, PortSelector},
};

/// `spec` of a DestinationRule.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DestinationRule {
    /// Host of the service; a short name is completed with the rule's namespace.
    pub host: String,
    /// Settings of all subsets that do not override them.
    pub traffic_policy: Option<TrafficPolicy>,
    /// Subsets of the service.
    pub subsets: Vec<Subset>,
    /// Namespaces in which the rule is visible; empty: all.
    pub export_to: Vec<String>,
    /// Client workloads to which the rule applies; unset: all.
    pub workload_selector: Option<WorkloadSelector>,
    /// Whether it is made from policies of Gateway API.
    #[serde(skip)]
    pub is_derived: bool,
}

impl DestinationRule {
    /// Returns the tunnel to a subset; the empty name is the whole service.
    pub fn tunnel(&self, subset: &str) -> Option<&Tunnel> {
        let of_subset = self.subsets.iter().find(|known| known.name == subset);
        let own = of_subset.and_then(|subset| subset.traffic_policy.as_ref()?.tunnel.as_ref());
        own.or_else(|| self.traffic_policy.as_ref()?.tunnel.as_ref())
    }

    /// Returns the TLS settings with a `credentialName`, of any port or subset.
    pub fn credentials(&self) -> impl Iterator<Item = &ClientTls> {
        let subsets = self.subsets.iter().map(|subset| &subset.traffic_policy);
        let policies = std::iter::once(&self.traffic_policy).chain(subsets).flatten();
        let all = policies.flat_map(|policy| {
            let ports = policy.port_level_settings.iter().map(|port| &port.tls);
            std::iter::once(&policy.tls).chain(ports).flatten()
        });
        all.filter(|tls| !tls.credential_name.is_empty())
    }

    /// Returns whether a Secret is named for TLS.
    pub fn has_credential(&self) -> bool {
        self.credentials().next().is_some()
    }

    /// Returns whether a setting prefers the endpoints of the client's node.
    pub fn prefers_node(&self) -> bool {
        self.balancers().any(LoadBalancer::prefers_node)
    }

    /// Returns all load balancer settings, of any port or subset.
    pub fn balancers(&self) -> impl Iterator<Item = &LoadBalancer> {
        let subsets = self.subsets.iter().map(|subset| &subset.traffic_policy);
        let policies = std::iter::once(&self.traffic_policy).chain(subsets).flatten();
        policies.flat_map(|policy| {
            let ports = policy.port_level_settings.iter().map(|port| &port.load_balancer);
            std::iter::once(&policy.load_balancer).chain(ports).flatten()
        })
    }
}

/// A named subset of a service's pods.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Subset {
    /// Name that VirtualServices use.
    pub name: String,
    /// Labels of the pods in the subset.
    pub labels: Labels,
    /// Settings that replace those of the rule, one by one.
    pub traffic_policy: Option<TrafficPolicy>,
}

/// Selector of workloads (`matchLabels`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadSelector {
    /// Labels; all must match.
    pub match_labels: Labels,
}

/// Settings towards a service.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TrafficPolicy {
    /// Load balancing.
    pub load_balancer: Option<LoadBalancer>,
    /// Limits and timeouts of connections.
    pub connection_pool: Option<ConnectionPool>,
    /// Ejection of endpoints that fail.
    pub outlier_detection: Option<OutlierDetection>,
    /// TLS to the endpoints.
    pub tls: Option<ClientTls>,
    /// Settings for single ports, which replace the others as a whole.
    pub port_level_settings: Vec<PortTrafficPolicy>,
    /// Tunnel of TCP through CONNECT.
    pub tunnel: Option<Tunnel>,
    /// PROXY protocol to the endpoints.
    pub proxy_protocol: Option<ProxyProtocol>,
    /// Limit of retries as a share of the requests.
    pub retry_budget: Option<RetryBudget>,
}

/// [`TrafficPolicy`] of one port.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PortTrafficPolicy {
    /// Service port.
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

/// Load balancing.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LoadBalancer {
    /// Simple algorithm.
    pub simple: Option<SimpleLb>,
    /// Consistent hashing of requests.
    pub consistent_hash: Option<ConsistentHash>,
    /// Preference for near endpoints.
    pub locality_lb_setting: Option<LocalityLb>,
    /// Preference for near endpoints by capacity.
    pub zone_aware_lb_setting: Option<ZoneAwareLb>,
    /// Slow start of new endpoints.
    pub warmup: Option<Warmup>,
    /// Old form of `warmup`.
    pub warmup_duration_secs: Option<Duration>,
}

/// Simple load balancing algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum SimpleLb {
    /// The default.
    Unspecified,
    /// Old name of [`Self::LeastRequest`].
    LeastConn,
    /// Random.
    Random,
    /// The original destination.
    Passthrough,
    /// Round robin.
    RoundRobin,
    /// The endpoint with fewer active requests of two.
    LeastRequest,
}

/// Consistent hashing.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ConsistentHash {
    /// Name of the header used as key.
    pub http_header_name: Option<String>,
    /// Cookie used as key.
    pub http_cookie: Option<HttpCookie>,
    /// Whether the client's address is the key.
    pub use_source_ip: Option<bool>,
    /// Name of the query parameter used as key.
    pub http_query_parameter_name: Option<String>,
    /// Hash ring.
    pub ring_hash: Option<RingHash>,
    /// Maglev table.
    pub maglev: Option<Maglev>,
    /// Old form of `ringHash.minimumRingSize`.
    pub minimum_ring_size: u64,
}

/// Cookie used as key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HttpCookie {
    /// Name.
    pub name: String,
    /// Path.
    pub path: String,
    /// Lifetime; if set, a missing cookie is generated.
    pub ttl: Option<Duration>,
    /// Further attributes.
    pub attributes: Vec<CookieAttribute>,
}

/// Attribute of a cookie.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CookieAttribute {
    /// Name.
    pub name: String,
    /// Value.
    pub value: String,
}

/// Size of the hash ring.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RingHash {
    /// Minimum number of points.
    pub minimum_ring_size: u64,
}

/// Size of the Maglev table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Maglev {
    /// Number of entries, a prime.
    pub table_size: u64,
}

impl LoadBalancer {
    /// Returns the keys of client labels that decide the priority of endpoints.
    pub fn label_keys(&self) -> impl Iterator<Item = &String> {
        let of_zones = self.zone_aware_lb_setting.iter().flat_map(ZoneAwareLb::label_keys);
        self.locality_lb_setting.iter().flat_map(LocalityLb::label_keys).chain(of_zones)
    }

    fn prefers_node(&self) -> bool {
        self.locality_lb_setting.as_ref().is_some_and(LocalityLb::prefers_node)
            || self.zone_aware_lb_setting.as_ref().is_some_and(ZoneAwareLb::prefers_node)
    }
}

impl LocalityLb {
    /// Returns the keys of client labels that decide the priority of endpoints; `key=value` does not depend on the
    /// client.
    pub fn label_keys(&self) -> impl Iterator<Item = &String> {
        keys(&self.failover_priority)
    }

    /// Returns whether the setting prefers the endpoints of the client's node.
    pub fn prefers_node(&self) -> bool {
        prefers_node(&self.failover_priority)
    }
}

impl ZoneAwareLb {
    /// Returns the keys of client labels that decide the priority of endpoints.
    pub fn label_keys(&self) -> impl Iterator<Item = &String> {
        keys(&self.failover_priority)
    }

    /// Returns whether the setting prefers the endpoints of the client's node.
    pub fn prefers_node(&self) -> bool {
        prefers_node(&self.failover_priority)
    }
}

/// Returns the keys whose values are those of the client. The node is none of them: it is not a label of the client.
fn keys(priority: &[String]) -> impl Iterator<Item = &String> {
    priority.iter().filter(|label| !label.contains('=') && *label != HOSTNAME)
}

fn prefers_node(priority: &[String]) -> bool {
    priority.iter().any(|label| label == HOSTNAME)
}

/// Preference for near endpoints.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LocalityLb {
    /// Fixed shares from a locality to others.
    pub distribute: Vec<Distribute>,
    /// Regions that take over for others.
    pub failover: Vec<Failover>,
    /// Labels whose equality gives an endpoint priority.
    pub failover_priority: Vec<String>,
    /// Whether the setting is enabled.
    pub enabled: Option<bool>,
}

/// Shares of the traffic from one locality.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Distribute {
    /// Locality of the client, `region/zone/*`.
    pub from: String,
    /// Percentage by locality.
    pub to: BTreeMap<String, u32>,
}

/// Failover between regions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Failover {
    /// Region that fails.
    pub from: String,
    /// Region that takes over.
    pub to: String,
}

/// Preference for near endpoints by capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ZoneAwareLb {
    /// Whether the setting is enabled.
    pub enabled: Option<bool>,
    /// Regions that take over for others.
    pub failover: Vec<Failover>,
    /// Labels whose equality gives an endpoint priority.
    pub failover_priority: Vec<String>,
    /// Minimum number of endpoints; with fewer the setting is disabled.
    pub min_cluster_size: Option<u32>,
}

/// Slow start of new endpoints.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Warmup {
    /// Duration.
    pub duration: Option<Duration>,
    /// Initial share in per cent.
    pub minimum_percent: Option<f64>,
    /// Shape of the curve.
    pub aggression: Option<f64>,
}

/// Limits and timeouts of connections.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ConnectionPool {
    /// Settings of all connections.
    pub tcp: Option<TcpPool>,
    /// Settings of HTTP.
    pub http: Option<HttpPool>,
}

/// Limits of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TcpPool {
    /// Maximum number of connections.
    pub max_connections: i32,
    /// Connect timeout; 10 s if unset.
    pub connect_timeout: Option<Duration>,
    /// TCP keep-alive.
    pub tcp_keepalive: Option<TcpKeepalive>,
    /// Maximum lifetime of a connection.
    pub max_connection_duration: Option<Duration>,
    /// Idle timeout of a connection.
    pub idle_timeout: Option<Duration>,
}

/// TCP keep-alive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TcpKeepalive {
    /// Number of unanswered probes after which the connection is closed.
    pub probes: u32,
    /// Idle time before the first probe.
    pub time: Option<Duration>,
    /// Interval between probes.
    pub interval: Option<Duration>,
}

/// Limits and timeouts of HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpPool {
    /// Maximum number of requests that wait for a connection.
    pub http1_max_pending_requests: i32,
    /// Maximum number of active requests.
    pub http2_max_requests: i32,
    /// Maximum number of requests per connection; 0: no limit.
    pub max_requests_per_connection: i32,
    /// Maximum number of simultaneous retries.
    pub max_retries: i32,
    /// Idle timeout of a connection without requests.
    pub idle_timeout: Option<Duration>,
    /// Upgrade of HTTP/1.1 to HTTP/2.
    pub h2_upgrade_policy: Option<H2Upgrade>,
    /// Whether upstream requests use the client's protocol.
    pub use_client_protocol: bool,
    /// Maximum number of streams per connection.
    pub max_concurrent_streams: i32,
    /// HTTP/2 keep-alive.
    pub http2_keep_alive: Option<Http2KeepAlive>,
}

/// Upgrade of HTTP/1.1 to HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum H2Upgrade {
    /// Mesh default.
    Default,
    /// Never.
    DoNotUpgrade,
    /// Always.
    Upgrade,
}

/// HTTP/2 keep-alive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Http2KeepAlive {
    /// Interval between pings.
    pub interval: Option<Duration>,
    /// Timeout of the answer to a ping.
    pub timeout: Option<Duration>,
}

/// Ejection of endpoints that fail.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OutlierDetection {
    /// Old form of `consecutive5xxErrors`.
    pub consecutive_errors: i32,
    /// Whether locally originated errors are counted separately.
    pub split_external_local_origin_errors: bool,
    /// Number of consecutive locally originated errors.
    pub consecutive_local_origin_failures: Option<u32>,
    /// Number of consecutive responses with 502, 503 or 504.
    pub consecutive_gateway_errors: Option<u32>,
    /// Number of consecutive 5xx responses.
    #[serde(rename = "consecutive5xxErrors")]
    pub consecutive_5xx_errors: Option<u32>,
    /// Interval between sweeps.
    pub interval: Option<Duration>,
    /// Duration of the first ejection.
    pub base_ejection_time: Option<Duration>,
    /// Maximum percentage of ejected endpoints.
    pub max_ejection_percent: i32,
    /// Minimum percentage of healthy endpoints; with fewer, health is ignored.
    pub min_health_percent: i32,
    /// Status codes that count as errors.
    pub outlier_detection_http_error_codes: Vec<u32>,
}

/// TLS to the endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientTls {
    /// Mode.
    pub mode: ClientTlsMode,
    /// File of the client certificate.
    pub client_certificate: String,
    /// File of the private key.
    pub private_key: String,
    /// File of the CA certificates.
    pub ca_certificates: String,
    /// Name of a Secret.
    pub credential_name: String,
    /// Names of which the server's certificate must have one.
    pub subject_alt_names: Vec<String>,
    /// Server name sent in the handshake (SNI).
    pub sni: String,
    /// Whether the server's certificate is not verified.
    pub insecure_skip_verify: Option<bool>,
    /// File of the certificate revocation list.
    pub ca_crl: String,
    /// Whether the settings are made from a BackendTLSPolicy. A gateway may then present a certificate.
    #[serde(skip)]
    pub is_of_backend: bool,
}

/// Modes of TLS to the endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ClientTlsMode {
    /// Plain text.
    #[default]
    Disable,
    /// Only the server presents a certificate.
    Simple,
    /// Both sides present certificates, from files or a Secret.
    Mutual,
    /// Both sides present certificates of the mesh.
    IstioMutual,
}

/// Tunnel of TCP through CONNECT.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Tunnel {
    /// `CONNECT` or `POST`.
    pub protocol: String,
    /// Host of the tunnel's target.
    pub target_host: String,
    /// Port of the tunnel's target.
    pub target_port: u32,
}

/// PROXY protocol to the endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ProxyProtocol {
    /// `V1` or `V2`.
    pub version: String,
}

/// Limit of retries as a share of the requests.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RetryBudget {
    /// Percentage of the active requests.
    pub percent: Option<f64>,
    /// Number of retries that are always permitted.
    pub min_retry_concurrency: u32,
    /// Interval over which requests are counted.
    pub budget_interval: Option<Duration>,
}
