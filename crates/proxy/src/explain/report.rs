//! Content of an explanation.

use serde::Serialize;
use skysail_http::head::RequestHead;

/// Explanation of a request at one proxy.
#[derive(Debug, Default, Serialize)]
pub struct Explanation {
    /// Listener.
    pub listener: String,
    /// A filter chain takes the connection.
    pub has_filter_chain: bool,
    /// Name of the filter chain; empty for none.
    pub filter_chain: String,
    /// Path of the object that caused the filter chain, from its metadata.
    pub filter_chain_origin: Option<String>,
    /// Server names that the filter chain matches; empty for all connections.
    pub server_names: Vec<String>,
    /// Other filter chains for the port.
    pub unmatched_chains: Vec<ChainReport>,
    /// `http` or `tcp`; empty if the connection is refused before.
    pub protocol: &'static str,
    /// The proxy terminates TLS.
    pub terminates_tls: bool,
    /// Verdict of the proxy about the client's certificate.
    pub certificate: CertificateVerdict,
    /// Route table; empty for TCP.
    pub route_table: String,
    /// Virtual host.
    pub virtual_host: String,
    /// A domain of the virtual host equals the authority; otherwise a wildcard matches.
    pub is_exact_domain: bool,
    /// Routes of the virtual host up to the one that the request takes.
    pub routes: Vec<RouteReport>,
    /// Filters in the order of their evaluation, up to the first that refuses.
    pub filters: Vec<FilterReport>,
    /// Result.
    pub outcome: Outcome,
    /// Clusters that the request may be forwarded to.
    pub targets: Vec<Target>,
    /// Timeout of the request in seconds; `None` disables it.
    pub timeout: Option<f64>,
    /// Idle timeout of the stream or connection in seconds; `None` disables it.
    pub idle_timeout: Option<f64>,
    /// Retry policy; `None` for no retries.
    pub retry: Option<RetryReport>,
    /// Clusters that receive a copy of the request.
    pub mirrors: Vec<String>,
}

/// Verdict of a proxy about the certificate of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CertificateVerdict {
    /// The client has none.
    #[default]
    Absent,
    /// The proxy requests none, so the client does not present its certificate.
    NotRequested,
    /// It leads to a trusted root and has an accepted name.
    Valid,
    /// Its names are accepted. Its issuer is taken as trusted, because the roots in this secret are not known.
    Assumed(String),
    /// The handshake fails, for this reason.
    Refused(String),
    /// It is not valid, for this reason. The client is accepted as one without a certificate.
    Ignored(String),
}

impl CertificateVerdict {
    /// Returns whether the client presents a certificate and the proxy accepts it.
    pub fn is_presented(&self) -> bool {
        matches!(self, Self::Valid | Self::Assumed(_))
    }
}

/// Result of a request at one proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is forwarded to one of the targets.
    #[default]
    Forwarded,
    /// The proxy responds itself: status and reason.
    Responded(u16, String),
    /// The connection is closed, for this reason.
    Refused(String),
}

/// A filter chain that a connection does not get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChainReport {
    /// Name; empty for none.
    pub name: String,
    /// Server names that it matches; empty for all connections.
    pub server_names: Vec<String>,
    /// Criterion that the connection does not meet.
    pub mismatch: String,
}

/// A route and whether the request matches it.
#[derive(Clone, Debug, Serialize)]
pub struct RouteReport {
    /// Position in the virtual host, from 0.
    pub index: usize,
    /// Name.
    pub name: String,
    /// Path of the object that caused it.
    pub origin: Option<String>,
    /// Criterion that the request does not meet; `None` if the request matches.
    pub mismatch: Option<String>,
    /// Share of the matching requests that take the route, from 0 to 1; `None` for all.
    pub share: Option<f64>,
}

/// A filter that the request passes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct FilterReport {
    /// Name.
    pub name: String,
    /// Effect of a filter that is more than a policy.
    pub effect: String,
    /// Policy of an RBAC filter.
    pub policy: Option<PolicyReport>,
    /// Tokens of the request, with the verdicts of the rules of their issuers.
    pub tokens: Vec<TokenReport>,
    /// Rate limit.
    pub limit: Option<LimitReport>,
    /// Cluster of the external authorizer that decides about the request; empty for none.
    pub asks: String,
}

/// Verdict of an issuer's rule about a token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenReport {
    /// Position of the rule among those of the filter.
    pub rule: usize,
    /// Place of the token in the request.
    pub place: String,
    /// Issuer of the rule.
    pub issuer: String,
    /// Principal of the token, `ISSUER/SUBJECT`.
    pub principal: String,
    /// Reason for the refusal; `None` if the rule accepts the token.
    pub refused: Option<String>,
    /// The signature is taken as valid, because the keys are not known.
    pub is_assumed: bool,
    /// Further claims, verified or not.
    pub claims: Vec<(String, serde_json::Value)>,
}

/// Rate limit and the descriptors of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LimitReport {
    /// Cluster and domain of the service that decides; empty for a limit in the proxy.
    pub service: String,
    /// Each connection has buckets of its own.
    pub per_connection: bool,
    /// Buckets from which the request takes a token; empty if the limit does not apply.
    pub buckets: Vec<BucketReport>,
    /// Descriptors of the request.
    pub descriptors: Vec<String>,
    /// Reasons why there is no descriptor.
    pub unmet: Vec<String>,
    /// Status of the response to requests above the limit.
    pub status: u16,
    /// Share of the requests above the limit that are refused, from 0 to 1. The others are only counted.
    pub enforced: f64,
}

/// Token bucket.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BucketReport {
    /// Descriptor whose requests share it; empty for all requests.
    pub descriptor: String,
    /// Maximum number of requests at once.
    pub at_once: u32,
    /// Number of requests in `seconds`.
    pub requests: u32,
    /// Time in seconds.
    pub seconds: f64,
    /// Requests above the limit are only counted.
    pub is_shadow: bool,
}

/// Verdict of one RBAC filter.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyReport {
    /// `ALLOW`, `DENY` or `LOG`.
    pub action: &'static str,
    /// False for a dry run.
    pub is_enforced: bool,
    /// The request is admitted.
    pub allowed: bool,
    /// Rule that matches the request.
    pub matched: Option<String>,
    /// All rules.
    pub rules: Vec<String>,
    /// Rules that do not match, with the conditions that the request does not meet; up to the one that matches.
    pub unmatched: Vec<(String, String)>,
}

/// Retry policy of a route.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RetryReport {
    /// Maximum number of retries.
    pub retries: u32,
    /// Conditions, by Envoy's names.
    pub on: Vec<&'static str>,
    /// Timeout of each attempt in seconds; `None`: only the timeout of the request applies.
    pub per_try_timeout: Option<f64>,
}

/// A cluster that a request may be forwarded to.
#[derive(Debug, Serialize)]
pub struct Target {
    /// Name of the cluster.
    pub cluster: String,
    /// Share of the requests, from 0 to 1.
    pub share: f64,
    /// The cluster; `None` if it does not exist.
    pub report: Option<ClusterReport>,
    /// Reason why requests for this cluster fail, with the status of the response (0: the connection is closed).
    pub failure: Option<(u16, String)>,
    /// Head that the endpoint receives; `None` for TCP.
    #[serde(skip)]
    pub head: Option<RequestHead>,
    /// Path of that head, if the route changes it.
    pub rewritten_path: Option<String>,
    /// Authority of that head, if the route changes it.
    pub rewritten_host: Option<String>,
    /// Headers that the route adds, sets or removes (`-name`), in order.
    pub header_changes: Vec<String>,
}

/// A cluster.
#[derive(Clone, Debug, Serialize)]
pub struct ClusterReport {
    /// Path of the object that configures it, such as a DestinationRule.
    pub origin: Option<String>,
    /// Services, as `NAMESPACE/NAME`.
    pub services: Vec<String>,
    /// Subset; empty for none.
    pub subset: String,
    /// Load balancing policy.
    pub balancer: &'static str,
    /// The endpoint is the address that the client dialled.
    pub is_original_destination: bool,
    /// Host names that the proxy resolves; their addresses are the endpoints.
    pub resolves: Vec<String>,
    /// Connect timeout in seconds.
    pub connect_timeout: f64,
    /// Outlier detection may eject endpoints.
    pub has_outlier_detection: bool,
    /// The state of outlier detection is known.
    pub knows_ejections: bool,
    /// Endpoints, by priority.
    pub endpoints: Vec<EndpointReport>,
}

/// An endpoint.
#[derive(Clone, Debug, Serialize)]
pub struct EndpointReport {
    /// Address, or path of a Unix domain socket.
    pub address: String,
    /// Locality as `REGION/ZONE/SUBZONE`; empty if unknown.
    pub locality: String,
    /// Priority; 0 is used first.
    pub priority: usize,
    /// Weight in its locality.
    pub weight: u32,
    /// `healthy`, `degraded`, `unhealthy`, `draining`, or `ejected` (by outlier detection).
    pub health: &'static str,
    /// The configuration says that it is healthy.
    pub is_healthy: bool,
    /// Outlier detection has ejected it.
    pub is_ejected: bool,
    /// Share of the requests to the cluster, from 0 to 1, without the load of the endpoints.
    pub share: f64,
    /// Requests reach it.
    pub is_candidate: bool,
    /// Reason why no request reaches it; empty for a candidate.
    pub unused: String,
    /// TLS of connections to it; `None` is plain text.
    pub tls: Option<TlsReport>,
}

/// TLS that a proxy originates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TlsReport {
    /// SNI; empty for none.
    pub server_name: String,
    /// ALPN protocols.
    pub alpn: Vec<String>,
    /// The client presents the certificate of its workload.
    pub is_mesh: bool,
    /// The client presents another certificate.
    pub has_certificate: bool,
}

impl Explanation {
    /// Returns whether the proxy forwards the request.
    pub fn is_forwarded(&self) -> bool {
        self.outcome == Outcome::Forwarded
    }

    /// Returns the share of the requests, from 0 to 1, to which the outcome applies. The others take a route
    /// for a fraction of the requests.
    pub fn explained_share(&self) -> f64 {
        let matched = self.routes.iter().filter(|route| route.mismatch.is_none());
        matched.filter_map(|route| route.share).map(|share| 1.0 - share).product()
    }
}
