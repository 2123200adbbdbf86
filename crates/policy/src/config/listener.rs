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
    authorization::ExternalAuthorization, http::HttpManager, policy::Policy, route::Targets, tls::ServerTls,
};
use skysail_http::proxy_protocol::ProxyVersion;

/// Where connections come in, or what a redirected one is looked up in.
#[derive(Debug)]
pub struct Listener {
    /// Its name: `virtualInbound`, `0.0.0.0_9080`.
    pub name: Arc<str>,
    /// The address in its configuration, and any additional ones.
    pub addresses: Vec<SocketAddr>,
    /// Whether it has sockets of its own (`bind_to_port`).
    pub bind: bool,
    /// Whether a connection is handed on to the listener of its original destination.
    pub use_original_dst: bool,
    /// Whether the original destination is read at all (listener filter `original_dst`).
    pub read_original_dst: bool,
    /// What a proxy in front says of a connection (listener filter `proxy_protocol`); `None` without the filter.
    pub proxy_protocol: Option<Proxied>,
    /// Which ports' first bytes are looked at for TLS; `None` without the filter.
    pub inspect_tls: Option<Inspect>,
    /// Which ports' first bytes are looked at for HTTP; `None` without the filter.
    pub inspect_http: Option<Inspect>,
    /// How long to wait for those bytes; `None` is for ever.
    pub inspect_timeout: Option<Duration>,
    /// After the timeout go on with what is known (else close).
    pub continue_on_timeout: bool,
    /// Its connections are neither refused nor kept waiting when the process runs short of memory, nor its requests when a worker
    /// is overloaded (`bypass_overload_manager`).
    pub bypass_overload: bool,
    /// Its connections do not count against the limit of all connections (`ignore_global_conn_limit`).
    pub ignore_connection_limit: bool,
    /// Inbound or outbound, for metrics and the order of a drain.
    pub direction: Direction,
    /// In the order of the configuration; the most specific match wins, by Envoy's order of criteria.
    pub chains: Vec<Arc<FilterChain>>,
    /// When no chain matches.
    pub default_chain: Option<Arc<FilterChain>>,
    /// Logs of connections for which there is no chain.
    pub access_logs: Vec<Arc<super::http::AccessLog>>,
}

/// Which way a listener's traffic goes, for metrics, for the peer's role, and for what is drained first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the workload. Metrics say `reporter="destination"`.
    Inbound,
    /// From the workload. Metrics say `reporter="source"`.
    Outbound,
    /// Unsaid: a plain Envoy bootstrap. Metrics as for outbound.
    Unspecified,
}

impl Direction {
    /// All there are.
    pub const ALL: &[Self] = &[Self::Inbound, Self::Outbound, Self::Unspecified];
}

/// How connections begin that come by another proxy. Source: `envoy.extensions.filters.listener.proxy_protocol.v3`.
#[derive(Clone, Debug)]
pub struct Proxied {
    /// Destination ports on which no header is looked for.
    pub except: Vec<RangeInclusive<u16>>,
    /// Connections without a header are taken, too (`allow_requests_without_proxy_protocol`).
    pub optional: bool,
    /// Versions that are refused (`disallowed_versions`).
    pub refused: Vec<ProxyVersion>,
}

/// Ports that an inspecting listener filter is switched off for.
#[derive(Clone, Debug, Default)]
pub struct Inspect {
    /// Destination ports left alone.
    pub except: Vec<RangeInclusive<u16>>,
}

/// What happens to a connection.
#[derive(Debug)]
pub struct FilterChain {
    /// Its name; several may share one.
    pub name: Arc<str>,
    /// When it applies.
    pub matches: ChainMatch,
    /// TLS to terminate; `None` leaves the bytes as they are.
    pub tls: Option<Arc<ServerTls>>,
    /// Network policies, in order, before the last filter.
    pub policies: Vec<Arc<Policy>>,
    /// Who is asked about connections, once the policies let them pass.
    pub ask: Option<Box<ExternalAuthorization>>,
    /// Whether Istio's TCP metadata exchange is expected when ALPN says `istio-peer-exchange`.
    pub metadata_exchange: bool,
    /// The last filter.
    pub terminal: Terminal,
    /// How long a TLS handshake may take; `None` for Envoy's default of none.
    pub handshake_timeout: Option<Duration>,
    /// Fingerprint of the chain's encoded configuration, by which it is found again in another form of its listener.
    pub fingerprint: Option<u64>,
}

/// The last filter of a chain.
#[derive(Clone, Debug)]
pub enum Terminal {
    /// HTTP.
    Http(Arc<HttpManager>),
    /// Bytes.
    Tcp(Arc<TcpProxy>),
}

/// Bytes passed on. Source: `envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy`.
#[derive(Debug)]
pub struct TcpProxy {
    /// Prefix of its statistics.
    pub stat_prefix: Arc<str>,
    /// Where to.
    pub targets: Targets,
    /// Closed when nothing was sent either way for so long; `None` is for ever.
    pub idle_timeout: Option<Duration>,
    /// Closed after so long, whatever happens (`max_downstream_connection_duration`); `None` for any time.
    pub max_duration: Option<Duration>,
    /// Whether connections from the same address go to the same endpoint, for clusters whose balancer hashes.
    pub hash_source_ip: bool,
    /// Which of Istio's TCP metrics are kept (filter `istio.stats`).
    pub stats: Option<Arc<super::stats::Stats>>,
    /// Where each connection is logged.
    pub access_logs: Vec<Arc<super::http::AccessLog>>,
}

/// When a chain applies: all that is given must hold. Source: `envoy.config.listener.v3.FilterChainMatch`.
#[derive(Clone, Debug, Default)]
pub struct ChainMatch {
    /// The (original) destination port.
    pub destination_port: Option<u16>,
    /// The (original) destination address; empty for any.
    pub destinations: Vec<Cidr>,
    /// TLS server names, in lower case, `*.example.com` for subdomains; empty for any.
    pub server_names: Vec<Box<str>>,
    /// `raw_buffer` or `tls`, as found by the TLS inspector.
    pub transport: Option<Transport>,
    /// ALPN of the TLS client, or what the HTTP inspector found (`http/1.1`, `h2c`); empty for any.
    pub application_protocols: Vec<Box<str>>,
    /// The caller's address; empty for any.
    pub sources: Vec<Cidr>,
}

/// What a connection begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Anything but TLS.
    RawBuffer,
    /// A TLS client hello.
    Tls,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    /// The network's address, host bits zero.
    pub address: IpAddr,
    /// How many leading bits count.
    pub prefix_len: u8,
}

impl Cidr {
    /// Whether the address lies in the range. An IPv4 address mapped into IPv6 counts as IPv4.
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
