//! Sidecar. Fields are Istio's (`networking.istio.io`).

use std::net::IpAddr;

use serde::Deserialize;

use super::{
    destination_rule::ConnectionPool, kube::Protocol, mesh_config::OutboundMode, value::WorkloadLabels,
    workload::UNIX,
};

/// `spec` of a Sidecar.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Sidecar {
    /// Workloads of the namespace that use it; all if unset.
    pub workload_selector: Option<WorkloadLabels>,
    /// Inbound ports. Empty: those of the services that select the workload.
    pub ingress: Vec<IngressListener>,
    /// Services that the workload may call. Empty: all.
    pub egress: Vec<EgressListener>,
    /// Limits of connections to the workload; an ingress listener's own settings replace them.
    pub inbound_connection_pool: Option<ConnectionPool>,
    /// Policy for traffic to unknown destinations; the mesh's if unset.
    pub outbound_traffic_policy: Option<SidecarOutbound>,
}

/// Inbound port of a workload.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct IngressListener {
    /// Port on which the workload is reached.
    pub port: SidecarPort,
    /// Address of the listener, if it has a socket of its own.
    pub bind: String,
    /// Whether connections are redirected to the listener.
    pub capture_mode: CaptureMode,
    /// Destination: `127.0.0.1:PORT`, `0.0.0.0:PORT` (the workload's address) or `unix:///PATH`. Empty: the original
    /// destination.
    pub default_endpoint: String,
    /// TLS of clients outside the mesh. It has no effect, as in Istio by default.
    pub tls: Option<serde_json::Map<String, serde_json::Value>>,
    /// Limits of connections to the destination.
    pub connection_pool: Option<ConnectionPool>,
}

/// Destination of an inbound port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IngressEndpoint {
    /// Loopback address and port.
    Loopback(IpAddr, u16),
    /// Port of the workload's own address.
    Workload(u16),
    /// Path of a Unix socket; `@` begins an abstract name.
    Unix(String),
}

impl IngressEndpoint {
    /// Parses `defaultEndpoint`; `None` if it is empty or malformed.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(path) = text.strip_prefix("unix://") {
            let is_absolute = path.starts_with('/') || path.starts_with('@') && path.len() > 1;
            return is_absolute.then(|| Self::Unix(path.to_owned()));
        }
        let address: std::net::SocketAddr =
            text.parse().ok().filter(|of: &std::net::SocketAddr| of.port() != 0)?;
        match address.ip() {
            ip if ip.is_loopback() => Some(Self::Loopback(ip, address.port())),
            ip if ip.is_unspecified() => Some(Self::Workload(address.port())),
            _ => None,
        }
    }
}

/// Services that a workload may call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EgressListener {
    /// Port of the listener. Unset: all ports that no other listener has.
    pub port: Option<SidecarPort>,
    /// Address of the listener, if it has one of its own, or `unix://` and the path of a socket.
    pub bind: String,
    /// Whether connections are redirected to the listener.
    pub capture_mode: CaptureMode,
    /// Services as `NAMESPACE/HOST`. The namespace may be `*`, `.` (the workload's) or `~` (none).
    pub hosts: Vec<String>,
}

/// Port of a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SidecarPort {
    /// Number.
    pub number: u32,
    /// Protocol.
    pub protocol: String,
    /// Name.
    pub name: String,
    /// Deprecated in Istio, without effect.
    pub target_port: u32,
}

/// Whether connections are redirected to a listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum CaptureMode {
    /// As the proxy is configured.
    #[default]
    Default,
    /// Redirected by iptables.
    Iptables,
    /// Not redirected: clients connect to the listener's own socket.
    None,
}

/// Policy for traffic to unknown destinations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SidecarOutbound {
    /// Mode. Unlike in the mesh configuration, the default is `REGISTRY_ONLY`, the first value of the enumeration.
    pub mode: SidecarOutboundMode,
    /// Service to which traffic to unknown destinations goes.
    pub egress_proxy: Option<EgressProxy>,
}

/// Mode of a Sidecar's policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(transparent)]
pub struct SidecarOutboundMode(pub OutboundMode);

impl Default for SidecarOutboundMode {
    fn default() -> Self {
        Self(OutboundMode::RegistryOnly)
    }
}

/// Service for traffic to unknown destinations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct EgressProxy {
    /// Full name of the service.
    pub host: String,
    /// Subset.
    pub subset: String,
    /// Port.
    pub port: EgressProxyPort,
}

/// Port of an egress proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct EgressProxyPort {
    /// Number.
    pub number: u32,
}

/// The part of a Sidecar on which shared resources depend: what the workload may call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Egress {
    /// Services; all if empty.
    pub listeners: Vec<EgressListener>,
    /// Policy for traffic to unknown destinations; the mesh's if unset.
    pub policy: Option<SidecarOutbound>,
}

impl Egress {
    /// Returns whether a listener is a Unix domain socket.
    pub fn has_socket(&self) -> bool {
        self.listeners.iter().any(|listener| listener.socket().is_some())
    }
}

impl Sidecar {
    /// Returns what the workload may call; `None` if the Sidecar does not restrict it.
    pub fn egress(&self) -> Option<Egress> {
        let egress = Egress { listeners: self.egress.clone(), policy: self.outbound_traffic_policy.clone() };
        (egress != Egress::default()).then_some(egress)
    }
}

impl SidecarPort {
    /// Returns the number; `None` if it is not a port.
    pub fn port(&self) -> Option<u16> {
        u16::try_from(self.number).ok().filter(|port| *port != 0)
    }

    /// Returns the protocol; `None` if it is unknown.
    pub fn parsed_protocol(&self) -> Option<Protocol> {
        if self.protocol.is_empty() { Some(Protocol::Unknown) } else { Protocol::parse(&self.protocol) }
    }
}

impl EgressListener {
    /// Returns the number of its port.
    pub fn port(&self) -> Option<u16> {
        self.port.as_ref().and_then(SidecarPort::port)
    }

    /// Returns the path of the Unix domain socket of the listener; `@` begins an abstract name.
    pub fn socket(&self) -> Option<&str> {
        self.bind.strip_prefix(UNIX)
    }

    /// Returns whether the listener serves requests of HTTP.
    pub fn is_http(&self) -> bool {
        let protocol = self.port.as_ref().and_then(SidecarPort::parsed_protocol);
        protocol.is_some_and(Protocol::is_http)
    }

    /// Returns whether the listener has a socket or an address of its own.
    pub fn is_bound(&self) -> bool {
        self.capture_mode == CaptureMode::None || !matches!(self.bind.as_str(), "" | "0.0.0.0" | "::")
    }
}
