//! Names and ports that the control plane and the sidecar share.
//!
//! The names are Istio's, because dashboards and `EnvoyFilter`s match on them, and so do istiod and `istio-proxy` in a
//! mixed mesh.

use std::fmt;

/// Port on which a sidecar accepts redirected outbound connections.
pub const OUTBOUND_PORT: u16 = 15001;
/// Port on which a sidecar accepts redirected inbound connections.
pub const INBOUND_PORT: u16 = 15006;
/// Port of the sidecar's admin page.
pub const ADMIN_PORT: u16 = 15000;
/// Port of readiness: `/healthz/ready`.
pub const HEALTH_PORT: u16 = 15021;
/// Port of metrics: `/stats/prometheus`.
pub const METRICS_PORT: u16 = 15090;
/// Port of the metrics of the sidecar and of its workload: `/stats/prometheus`.
pub const MERGED_METRICS_PORT: u16 = 15020;
/// Port of discovery and certificates over TLS.
pub const DISCOVERY_TLS_PORT: u16 = 15012;
/// Port of discovery in plain text.
pub const DISCOVERY_PLAIN_PORT: u16 = 15010;
/// Port of the control plane's admin page and metrics.
pub const CONTROL_ADMIN_PORT: u16 = 15014;

/// Names of gRPC's status codes, by number from 0. Source: gRPC's "Status codes and their use in gRPC".
pub const GRPC_STATUS: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// Key of node metadata: the proxy subscribes to virtual hosts one by one (VHDS). Value `"true"`.
pub const TAKES_VIRTUAL_HOSTS: &str = "SKYSAIL_VHDS";
/// Key of node metadata: the proxy gets the addresses of names that the control plane has resolved by endpoint
/// discovery. Value `"true"`.
pub const TAKES_RESOLVED_NAMES: &str = "SKYSAIL_RESOLVED";
/// Filter name of our own metadata in resources.
pub const METADATA: &str = "skysail";
/// Key in [`METADATA`] of the virtual host for `*`: it also serves hosts for which the control plane has not answered.
/// Value `"true"`.
pub const TAKES_UNANSWERED: &str = "takes_unanswered";

/// ID of a key that verifies no token. It stands for a key set that the control plane has not fetched.
pub const UNFETCHED_KEY: &str = "none";
/// Audience that the certificate authority requires in a service account token.
pub const TOKEN_AUDIENCE: &str = "istio-ca";

/// Direction of a cluster's traffic, as seen from the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Into the workload.
    Inbound,
    /// Out of the workload.
    Outbound,
}

impl Direction {
    /// Returns the word used in cluster names.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Inbound => "inbound",
            Self::Outbound => "outbound",
        }
    }
}

/// Cluster name in Istio's form, `outbound|9080|v1|reviews.default.svc.cluster.local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClusterName<'a> {
    /// Direction of its traffic.
    pub direction: Direction,
    /// Port of the service.
    pub port: u16,
    /// Subset of a DestinationRule; empty for the whole service.
    pub subset: &'a str,
    /// Fully qualified name of the service; empty for inbound clusters.
    pub host: &'a str,
}

impl<'a> ClusterName<'a> {
    /// Returns the name of an outbound cluster.
    pub const fn outbound(port: u16, subset: &'a str, host: &'a str) -> Self {
        Self { direction: Direction::Outbound, port, subset, host }
    }

    /// Returns the name of the inbound cluster of a container port.
    pub const fn inbound(port: u16) -> Self {
        Self { direction: Direction::Inbound, port, subset: "", host: "" }
    }

    /// Parses a cluster name. Returns `None` for names of another form, such as `PassthroughCluster`.
    pub fn parse(name: &'a str) -> Option<Self> {
        let mut parts = name.split('|');
        let direction = match parts.next()? {
            "inbound" => Direction::Inbound,
            "outbound" => Direction::Outbound,
            _ => return None,
        };
        let port = parts.next()?.parse().ok()?;
        let (subset, host) = (parts.next()?, parts.next()?);
        parts.next().is_none().then_some(Self { direction, port, subset, host })
    }

    /// Returns the server name that a sidecar sends in TLS for this cluster, `outbound_.9080_.v1_.host`.
    pub fn sni(&self) -> String {
        format!("{}_.{}_.{}_.{}", self.direction.as_str(), self.port, self.subset, self.host)
    }
}

impl fmt::Display for ClusterName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}|{}|{}|{}", self.direction.as_str(), self.port, self.subset, self.host)
    }
}

/// Returns the fully qualified name of a Kubernetes service.
pub fn service_fqdn(name: &str, namespace: &str, domain: &str) -> String {
    format!("{name}.{namespace}.svc.{domain}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_names_round_trip() {
        for name in
            ["outbound|9080|v1|reviews.default.svc.cluster.local", "outbound|80||a.b", "inbound|8080||"]
        {
            assert_eq!(ClusterName::parse(name).unwrap().to_string(), name);
        }
        for name in ["PassthroughCluster", "outbound|x||a", "outbound|80|a", "outbound|80||a|b", ""] {
            assert_eq!(ClusterName::parse(name), None, "{name}");
        }
        assert_eq!(ClusterName::outbound(9080, "v1", "r.d").sni(), "outbound_.9080_.v1_.r.d");
    }
}
