//! Content of an explanation.

use serde::Serialize;
use skysail_policy::config::{
    Cluster, Endpoints,
    cluster::{Balancer, Health},
    route::{Forward, HostRewrite, Rewrite},
};

/// Explanation of a request at one proxy.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Explanation {
    /// Listener.
    pub listener: String,
    /// Filter chain.
    pub filter_chain: String,
    /// `http` or `tcp`; empty if the connection is refused before.
    pub protocol: &'static str,
    /// Route table; empty for TCP.
    pub route_table: String,
    /// Virtual host.
    pub virtual_host: String,
    /// A domain of the virtual host equals the authority; otherwise a wildcard matches.
    pub is_exact_domain: bool,
    /// Routes of the virtual host up to the one that the request takes.
    pub routes: Vec<RouteReport>,
    /// Policies in the order of their evaluation, up to the first that refuses.
    pub policies: Vec<PolicyReport>,
    /// Filters whose decision depends on more than the request, such as external authorization.
    pub filters: Vec<String>,
    /// Result.
    pub outcome: Outcome,
    /// Clusters that the request may be forwarded to.
    pub targets: Vec<Target>,
    /// Timeout of the request in seconds; `None` disables it.
    pub timeout: Option<f64>,
    /// Maximum number of retries.
    pub retries: u32,
    /// New path; `None` if it is unchanged.
    pub rewrite: Option<String>,
    /// New host; `None` if it is unchanged.
    pub host: Option<String>,
    /// Clusters that receive a copy of the request.
    pub mirrors: Vec<String>,
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
    /// Share of the matching requests that take the route; `None` for all.
    pub share: Option<f64>,
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
}

/// A cluster that a request may be forwarded to.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// Name of the cluster.
    pub cluster: String,
    /// Share of the requests, from 0 to 1.
    pub share: f64,
    /// The cluster; `None` if it does not exist.
    pub report: Option<ClusterReport>,
}

/// A cluster.
#[derive(Clone, Debug, Serialize)]
pub struct ClusterReport {
    /// Path of the object that configures it, such as a DestinationRule.
    pub origin: Option<String>,
    /// Load balancing policy.
    pub balancer: &'static str,
    /// Connect timeout in seconds.
    pub connect_timeout: f64,
    /// Endpoints, by priority.
    pub endpoints: Vec<EndpointReport>,
}

/// An endpoint.
#[derive(Clone, Debug, Serialize)]
pub struct EndpointReport {
    /// Address, or path of a Unix domain socket.
    pub address: String,
    /// Priority; 0 is used first.
    pub priority: usize,
    /// Weight.
    pub weight: u32,
    /// The configuration says that it is healthy.
    pub is_healthy: bool,
    /// Connections to it use TLS.
    pub tls: bool,
}

impl Explanation {
    pub(super) fn set_forward(&mut self, forward: &Forward) {
        self.timeout = forward.timeout.map(|timeout| timeout.as_secs_f64());
        self.retries = forward.retry.as_ref().map_or(0, |retry| retry.retries);
        self.rewrite = forward.rewrite.as_ref().map(|rewrite| match rewrite {
            Rewrite::Prefix(prefix) => format!("prefix {prefix}"),
            Rewrite::Full(path) => path.to_string(),
            Rewrite::Regex(regex, with) => format!("{regex} by {with}"),
        });
        self.host = forward.host.as_ref().map(|host| match host {
            HostRewrite::Literal(host) => host.to_string(),
            HostRewrite::Auto => "host name of the endpoint".to_owned(),
            HostRewrite::Header(name) => format!("value of header {name}"),
        });
        self.mirrors = forward.mirrors.iter().map(|mirror| mirror.cluster.to_string()).collect();
    }
}

impl ClusterReport {
    pub(super) fn new(cluster: &Cluster, endpoints: &Endpoints, origin: Option<&str>) -> Self {
        let endpoints = endpoints.priorities.iter().enumerate().flat_map(|(priority, endpoints)| {
            endpoints.iter().map(move |endpoint| EndpointReport {
                address: endpoint
                    .pipe
                    .as_ref()
                    .map_or_else(|| endpoint.address.to_string(), ToString::to_string),
                priority,
                weight: endpoint.weight,
                is_healthy: endpoint.health == Health::Healthy,
                tls: endpoint.tls.is_some(),
            })
        });
        Self {
            origin: origin.map(ToOwned::to_owned),
            balancer: balancer(&cluster.balancer),
            connect_timeout: cluster.connect_timeout.as_secs_f64(),
            endpoints: endpoints.collect(),
        }
    }
}

fn balancer(balancer: &Balancer) -> &'static str {
    match balancer {
        Balancer::RoundRobin => "round robin",
        Balancer::LeastRequest { .. } => "least request",
        Balancer::PeakEwma { .. } => "peak EWMA",
        Balancer::Random => "random",
        _ => "consistent hashing or original destination",
    }
}
