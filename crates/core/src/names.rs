//! Names that both halves of the mesh build and take apart.
//!
//! They are Istio's, because dashboards, `EnvoyFilter`s and the other half of a mixed mesh match on them.

use std::fmt;

/// The port a sidecar takes redirected outbound connections on.
pub const OUTBOUND_PORT: u16 = 15001;
/// The port a sidecar takes redirected inbound connections on.
pub const INBOUND_PORT: u16 = 15006;
/// The sidecar's admin page.
pub const ADMIN_PORT: u16 = 15000;
/// Readiness: `/healthz/ready`.
pub const HEALTH_PORT: u16 = 15021;
/// Metrics: `/stats/prometheus`.
pub const METRICS_PORT: u16 = 15090;
/// Discovery and certificates over TLS.
pub const DISCOVERY_TLS_PORT: u16 = 15012;
/// Discovery in plain text.
pub const DISCOVERY_PLAIN_PORT: u16 = 15010;
/// The control plane's admin page and metrics.
pub const CONTROL_ADMIN_PORT: u16 = 15014;

/// Metadata of a proxy's node by which it says that virtual hosts may come one by one (VHDS): `"true"`.
pub const TAKES_VIRTUAL_HOSTS: &str = "SKYSAIL_VHDS";
/// Metadata of a proxy's node by which it says that it takes the addresses of names that the control plane looked up,
/// by endpoint discovery: `"true"`.
pub const TAKES_RESOLVED_NAMES: &str = "SKYSAIL_RESOLVED";
/// Our own metadata of resources.
pub const METADATA: &str = "skysail";
/// Key in it, of the virtual host for `*`: also takes hosts that the control plane has not answered about: `"true"`.
pub const TAKES_UNANSWERED: &str = "takes_unanswered";

/// The audience a service account token must carry to be good for the certificate authority.
pub const TOKEN_AUDIENCE: &str = "istio-ca";

/// Which way a cluster's traffic goes, seen from the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Into the workload.
    Inbound,
    /// Out of the workload.
    Outbound,
}

impl Direction {
    /// The word in cluster names.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Inbound => "inbound",
            Self::Outbound => "outbound",
        }
    }
}

/// A cluster name in Istio's form, `outbound|9080|v1|reviews.default.svc.cluster.local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClusterName<'a> {
    /// Which way its traffic goes.
    pub direction: Direction,
    /// The service port.
    pub port: u16,
    /// The subset of a DestinationRule; empty for the whole service.
    pub subset: &'a str,
    /// The service's fully qualified name; empty for inbound clusters.
    pub host: &'a str,
}

impl<'a> ClusterName<'a> {
    /// Names an outbound cluster.
    pub const fn outbound(port: u16, subset: &'a str, host: &'a str) -> Self {
        Self { direction: Direction::Outbound, port, subset, host }
    }

    /// Names the inbound cluster of a container port.
    pub const fn inbound(port: u16) -> Self {
        Self { direction: Direction::Inbound, port, subset: "", host: "" }
    }

    /// Takes a name apart; `None` for names that are not of this form, such as `PassthroughCluster`.
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

    /// The server name a sidecar sends in TLS for this cluster, `outbound_.9080_.v1_.host`.
    pub fn sni(&self) -> String {
        format!("{}_.{}_.{}_.{}", self.direction.as_str(), self.port, self.subset, self.host)
    }
}

impl fmt::Display for ClusterName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}|{}|{}|{}", self.direction.as_str(), self.port, self.subset, self.host)
    }
}

/// The fully qualified name of a Kubernetes service.
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
