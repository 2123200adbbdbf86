//! Listeners and filter chains.
//!
//! Source: `envoy.config.listener.v3`.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use super::{
    authorization::ExternalAuthorization, cluster::HostCacheConfig, http::HttpManager, policy::Policy,
    route::Targets, tls::ServerTls,
};
use crate::state::connections::OpenConnections;
use skysail_http::proxy_protocol::ProxyVersion;

/// A listener: accepts connections, or takes redirected ones from a listener with `use_original_dst`.
#[derive(Debug)]
pub struct Listener {
    /// Name, such as `virtualInbound` or `0.0.0.0_9080`.
    pub name: Arc<str>,
    /// Address and additional addresses. For a Unix domain socket: the address that stands for [`Self::pipe`].
    pub addresses: Vec<SocketAddr>,
    /// Path of the Unix domain socket (`address.pipe`); a path that begins with `@` is in the abstract namespace.
    pub pipe: Option<Box<str>>,
    /// The listener has sockets (`bind_to_port`).
    pub bind: bool,
    /// Connections go to the listener of their original destination.
    pub use_original_dst: bool,
    /// The original destination is read (listener filter `original_dst`).
    pub read_original_dst: bool,
    /// Settings of the listener filter `proxy_protocol`; `None` without the filter.
    pub proxy_protocol: Option<ProxyProtocolFilter>,
    /// Settings of the listener filter `tls_inspector`; `None` without the filter.
    pub inspect_tls: Option<Inspect>,
    /// Settings of the listener filter `http_inspector`; `None` without the filter.
    pub inspect_http: Option<Inspect>,
    /// Timeout of the listener filters; `None` disables it.
    pub inspect_timeout: Option<Duration>,
    /// After the timeout the connection continues with what is known. Otherwise it is closed.
    pub continue_on_timeout: bool,
    /// The listener is exempt from overload protection: its connections are admitted when memory is short, and its
    /// requests when a worker is overloaded (`bypass_overload_manager`).
    pub bypass_overload: bool,
    /// Connections do not count towards the limit on all connections (`ignore_global_conn_limit`).
    pub ignore_connection_limit: bool,
    /// Traffic direction.
    pub direction: Direction,
    /// Filter chains. The most specific match wins, by Envoy's order of criteria.
    pub chains: Vec<Arc<FilterChain>>,
    /// Filter chain for connections that match no other.
    pub default_chain: Option<Arc<FilterChain>>,
    /// Access logs for connections without a filter chain.
    pub access_logs: Vec<Arc<super::http::AccessLog>>,
}

/// Traffic direction of a listener. It decides the labels of metrics, the role of the peer and the order of draining.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the workload. Metrics have `reporter="destination"`.
    Inbound,
    /// From the workload. Metrics have `reporter="source"`.
    Outbound,
    /// Not given, as in a plain Envoy bootstrap. Metrics as for outbound.
    Unspecified,
}

impl Direction {
    /// All directions.
    pub const ALL: &[Self] = &[Self::Inbound, Self::Outbound, Self::Unspecified];
}

/// PROXY protocol on accepted connections. Source: `envoy.extensions.filters.listener.proxy_protocol.v3`.
#[derive(Clone, Debug)]
pub struct ProxyProtocolFilter {
    /// Destination ports without the filter.
    pub except: Vec<RangeInclusive<u16>>,
    /// Connections without a header are accepted (`allow_requests_without_proxy_protocol`).
    pub optional: bool,
    /// Versions that are refused (`disallowed_versions`).
    pub refused: Vec<ProxyVersion>,
}

/// Settings of an inspecting listener filter.
#[derive(Clone, Debug, Default)]
pub struct Inspect {
    /// Destination ports without the filter.
    pub except: Vec<RangeInclusive<u16>>,
}

/// A filter chain.
#[derive(Debug)]
pub struct FilterChain {
    /// Name; several chains may share one.
    pub name: Arc<str>,
    /// Match of connections.
    pub matches: ChainMatch,
    /// TLS termination; `None` passes the bytes through.
    pub tls: Option<Arc<ServerTls>>,
    /// RBAC network filters, in order. They run before the last filter.
    pub policies: Vec<Arc<Policy>>,
    /// The SNI of connections to dynamic clusters is resolved, with this port (filter `sni_dynamic_forward_proxy`).
    pub sni_port: Option<u16>,
    /// Cache of the hosts of these connections.
    pub host_cache: Option<Box<HostCacheConfig>>,
    /// Limits on open connections (filter `connection_limit`), which apply before the TLS handshake.
    pub connection_limits: Vec<Arc<ConnectionLimit>>,
    /// External authorization of connections, after the RBAC filters.
    pub external_authorization: Option<Box<ExternalAuthorization>>,
    /// Istio's TCP metadata exchange is expected if ALPN is `istio-peer-exchange`.
    pub metadata_exchange: bool,
    /// The last filter.
    pub terminal: Terminal,
    /// Timeout of the TLS handshake; `None`, Envoy's default, disables it.
    pub handshake_timeout: Option<Duration>,
    /// Fingerprint of the encoded configuration. It identifies the chain in a new version of its listener.
    pub fingerprint: Option<u64>,
}

/// Limit on the open connections of a filter chain, across workers. Source:
/// `envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit`.
#[derive(Debug)]
pub struct ConnectionLimit {
    /// Prefix of statistics.
    pub stat_prefix: Arc<str>,
    /// Maximum number of connections (`max_connections`).
    pub max_connections: u64,
    /// Time until a refused connection is closed (`delay`); `None` closes it at once.
    pub delay: Option<Duration>,
    /// Open connections.
    pub open: OpenConnections,
}

/// Last filter of a filter chain.
#[derive(Clone, Debug)]
pub enum Terminal {
    /// HTTP connection manager.
    Http(Arc<HttpManager>),
    /// TCP proxy.
    Tcp(Arc<TcpProxy>),
}

/// A TCP proxy. Source: `envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy`.
#[derive(Debug)]
pub struct TcpProxy {
    /// Prefix of statistics.
    pub stat_prefix: Arc<str>,
    /// Clusters.
    pub targets: Targets,
    /// Idle timeout: time without bytes in either direction; `None` disables it.
    pub idle_timeout: Option<Duration>,
    /// Maximum duration of a connection (`max_downstream_connection_duration`); `None` for no limit.
    pub max_duration: Option<Duration>,
    /// Connections from the same address go to the same endpoint, for clusters with a hashing balancer.
    pub hash_source_ip: bool,
    /// Tunnel that the upstream is asked for (`tunneling_config`).
    pub tunnel: Option<Tunneling>,
    /// Settings of Istio's TCP metrics (filter `istio.stats`).
    pub stats: Option<Arc<super::stats::Stats>>,
    /// Access logs.
    pub access_logs: Vec<Arc<super::http::AccessLog>>,
}

/// A tunnel through an HTTP proxy. Source: `envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy.TunnelingConfig`.
#[derive(Debug)]
pub struct Tunneling {
    /// Target, HOST:PORT.
    pub target: Box<str>,
    /// The bytes are the bodies of a POST and its response; otherwise, CONNECT is used.
    pub is_post: bool,
}

/// Match of connections; all given criteria must hold. Source: `envoy.config.listener.v3.FilterChainMatch`.
#[derive(Clone, Debug, Default)]
pub struct ChainMatch {
    /// Destination port, by original destination if known.
    pub destination_port: Option<u16>,
    /// Destination addresses, by original destination if known; empty for any.
    pub destinations: Vec<Cidr>,
    /// SNI values in lower case, `*.example.com` for subdomains; empty for any.
    pub server_names: Vec<Box<str>>,
    /// `raw_buffer` or `tls`, as detected by the TLS inspector; `None` for any.
    pub transport: Option<Transport>,
    /// ALPN protocols of the client, or the protocol that the HTTP inspector detected (`http/1.1`, `h2c`); empty for
    /// any.
    pub application_protocols: Vec<Box<str>>,
    /// Source addresses; empty for any.
    pub sources: Vec<Cidr>,
}

/// Transport protocol, detected by the first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Anything but TLS.
    RawBuffer,
    /// A TLS client hello.
    Tls,
}

/// A range of IP addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    /// Network address; the host bits are zero.
    pub address: IpAddr,
    /// Length of the prefix in bits.
    pub prefix_len: u8,
}

impl Cidr {
    /// Returns whether the range contains an address. An IPv4 address mapped into IPv6 is treated as IPv4.
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.address, ip.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(ip)) => {
                let shift = 32 - u32::from(self.prefix_len.min(32));
                u64::from(net.to_bits() ^ ip.to_bits()) >> shift == 0
            }
            (IpAddr::V6(net), IpAddr::V6(ip)) => {
                let shift = 128 - u32::from(self.prefix_len.min(128));
                shift == 128 || (net.to_bits() ^ ip.to_bits()) >> shift == 0
            }
            _ => false,
        }
    }
}
