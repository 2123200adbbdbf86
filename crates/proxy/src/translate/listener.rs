//! Translates listeners and filter chains.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            core::v3::{Address, TrafficDirection, address, proxy_protocol_config},
            listener::v3::{
                Filter, FilterChain as ChainProto, FilterChainMatch, Listener as Proto, ListenerFilter,
                ListenerFilterChainMatchPredicate as Predicate, filter, listener_filter,
                listener_filter_chain_match_predicate::Rule,
            },
        },
        extensions::filters::{
            listener::proxy_protocol::v3::ProxyProtocol,
            network::{
                connection_limit::v3::ConnectionLimit as ConnectionLimitProto,
                http_connection_manager::v3::HttpConnectionManager,
                sni_dynamic_forward_proxy::v3::{FilterConfig as SniDynamic, filter_config::PortSpecifier},
                tcp_proxy::v3::{
                    TcpProxy as TcpProxyProto,
                    tcp_proxy::{ClusterSpecifier, TunnelingConfig, weighted_cluster::ClusterWeight},
                },
            },
        },
        r#type::v3::hash_policy::PolicySpecifier,
    },
    google::protobuf::Any,
};

use super::{
    At as _, Reject, Result, Translator, access_log, authorization, cluster, distinct, duration, dynamic,
    endpoints, fingerprint, flag, http, number, policy, timeout, tls_context, type_name, unknown_type,
    unpack, warn_once,
};
use skysail_http::proxy_protocol::ProxyVersion;
use skysail_policy::config::{
    cluster::{HostCacheConfig, pipe_address},
    listener::{
        ChainMatch, ConnectionLimit, Direction, FilterChain, Inspect, Listener, ProxyProtocolFilter,
        TcpProxy, Terminal, Transport, Tunneling,
    },
    route::{HeaderOps, Target, Targets},
    stats::Stats,
    tls::ServerTls,
};
use skysail_policy::state::connections::OpenConnections;

/// Envoy's default.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Envoy's default for TCP.
const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

const CONNECTION_LIMIT: &str = "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit";
const SNI_DYNAMIC: &str = "envoy.extensions.filters.network.sni_dynamic_forward_proxy.v3.FilterConfig";
const MONGO_PROXY: &str = "envoy.extensions.filters.network.mongo_proxy.v3.MongoProxy";

/// Returns the addresses to listen on. With `ipv4_compat`, `::` includes `0.0.0.0`.
pub(super) fn bound_to(proto: Option<&Address>) -> Result<Vec<SocketAddr>> {
    let address = endpoints::ip_and_port(proto)?;
    let mut addresses = vec![address];
    if let Some(address::Address::SocketAddress(socket)) = proto.and_then(|proto| proto.address.as_ref())
        && socket.ipv4_compat
        && address.ip() == Ipv6Addr::UNSPECIFIED
    {
        addresses.push((Ipv4Addr::UNSPECIFIED, address.port()).into());
    }
    Ok(addresses)
}

/// Returns the path of the Unix domain socket to listen on; `None` for any other address.
fn listening_pipe(proto: &Proto) -> Result<Option<Box<str>>> {
    let Some(path) = endpoints::pipe(proto.address.as_ref())? else { return Ok(None) };
    if let Some(address::Address::Pipe(pipe)) = proto.address.as_ref().and_then(|of| of.address.as_ref())
        && pipe.mode != 0
    {
        return Err(Reject::new("is not supported for listeners: leave it unset").at_field("pipe.mode"));
    }
    if !proto.additional_addresses.is_empty() {
        return Err(Reject::new("a Unix domain socket has no additional addresses: remove them"));
    }
    Ok(Some(path.into()))
}

#[expect(deprecated, reason = "Istio still sends deprecated_v1 to old proxies")]
pub(super) fn translate(translator: Translator<'_>, proto: Proto) -> Result<Listener> {
    if proto.name.is_empty() && !translator.strict {
        return Err(Reject::new("a listener needs a name"));
    }
    let pipe = listening_pipe(&proto).at("address")?;
    let mut addresses = match &pipe {
        Some(path) => vec![pipe_address(path)],
        None => bound_to(proto.address.as_ref()).at("address")?,
    };
    for (index, additional) in proto.additional_addresses.iter().enumerate() {
        let more = bound_to(additional.address.as_ref());
        addresses.extend(more.at(format_args!("additional_addresses[{index}].address"))?);
    }
    let old_bind = proto.deprecated_v1.and_then(|old| flag(old.bind_to_port));
    let mut listener = Listener {
        name: match (proto.name.as_str(), &pipe) {
            // The name is optional in a file.
            ("", Some(path)) => (&**path).into(),
            ("", None) => addresses[0].to_string().into(),
            (name, _) => name.into(),
        },
        addresses,
        pipe,
        bind: flag(proto.bind_to_port).or(old_bind).unwrap_or(true),
        use_original_dst: flag(proto.use_original_dst).unwrap_or(false),
        read_original_dst: flag(proto.use_original_dst).unwrap_or(false),
        proxy_protocol: None,
        inspect_tls: None,
        inspect_http: None,
        inspect_timeout: timeout(proto.listener_filters_timeout.as_ref(), Some(INSPECT_TIMEOUT))
            .at("listener_filters_timeout")?,
        continue_on_timeout: proto.continue_on_listener_filters_timeout,
        bypass_overload: proto.bypass_overload_manager,
        ignore_connection_limit: proto.ignore_global_conn_limit,
        direction: match proto.traffic_direction() {
            TrafficDirection::Inbound => Direction::Inbound,
            TrafficDirection::Outbound => Direction::Outbound,
            TrafficDirection::Unspecified => Direction::Unspecified,
        },
        chains: Vec::new(),
        default_chain: None,
        access_logs: access_log::of_listener(&proto.access_log, translator)?,
    };
    for (index, filter) in proto.listener_filters.iter().enumerate() {
        listener_filter(&mut listener, filter).at(format_args!("listener_filters[{index}]"))?;
    }
    for (index, chain) in proto.filter_chains.iter().enumerate() {
        let chain = self::chain(translator, chain).at(format_args!("filter_chains[{index}]"))?;
        listener.chains.push(Arc::new(chain));
    }
    distinct::check(listener.chains.iter().map(|chain| &chain.matches))?;
    if let Some(chain) = &proto.default_filter_chain {
        listener.default_chain = Some(Arc::new(self::chain(translator, chain).at("default_filter_chain")?));
    }
    if listener.chains.is_empty() && listener.default_chain.is_none() {
        return Err(Reject::new("a listener needs a filter chain").at_field("filter_chains"));
    }
    // Envoy adds the TLS inspector automatically if a filter chain matches on what only it detects.
    let asks = listener.chains.iter().any(|chain| {
        !chain.matches.server_names.is_empty() || chain.matches.transport == Some(Transport::Tls)
    });
    if asks && listener.inspect_tls.is_none() {
        listener.inspect_tls = Some(Inspect::default());
    }
    Ok(listener)
}

fn listener_filter(listener: &mut Listener, filter: &ListenerFilter) -> Result<()> {
    let Some(listener_filter::ConfigType::TypedConfig(any)) = &filter.config_type else {
        return Err(Reject::new(format!("listener filter {:?} has no typed_config", filter.name)));
    };
    let disabled = filter.filter_disabled.as_ref().map(port_ranges).transpose().at("filter_disabled")?;
    let except = disabled.unwrap_or_default();
    match type_name(any) {
        "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector" => {
            listener.inspect_tls = Some(Inspect { except });
        }
        "envoy.extensions.filters.listener.http_inspector.v3.HttpInspector" => {
            listener.inspect_http = Some(Inspect { except });
        }
        "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol" => {
            if listener.inspect_tls.is_some() || listener.inspect_http.is_some() {
                return Err(Reject::new(
                    "must come before the listener filters that inspect the bytes after its header",
                ));
            }
            let proto: ProxyProtocol = unpack(any).at("typed_config")?;
            let refused = proto.disallowed_versions().map(proxy_version).collect();
            let optional = proto.allow_requests_without_proxy_protocol;
            listener.proxy_protocol = Some(ProxyProtocolFilter { except, optional, refused });
        }
        "envoy.extensions.filters.listener.original_dst.v3.OriginalDst" if except.is_empty() => {
            listener.read_original_dst = true;
        }
        _ => return Err(unknown_type("listener filter", &filter.name, any)),
    }
    Ok(())
}

/// Translates the version of the PROXY protocol.
pub(super) fn proxy_version(proto: proxy_protocol_config::Version) -> ProxyVersion {
    match proto {
        proxy_protocol_config::Version::V1 => ProxyVersion::V1,
        proxy_protocol_config::Version::V2 => ProxyVersion::V2,
    }
}

/// Returns the ports that a predicate matches.
fn port_ranges(predicate: &Predicate) -> Result<Vec<RangeInclusive<u16>>> {
    match &predicate.rule {
        Some(Rule::DestinationPortRange(range)) => {
            // The end is exclusive.
            let (start, last) = (u16::try_from(range.start), u16::try_from(range.end.saturating_sub(1)));
            match (start, last) {
                (Ok(start), Ok(last)) if start <= last => Ok(vec![start..=last]),
                _ => {
                    let (start, end) = (range.start, range.end);
                    let reason = format!("{start} to below {end} is not a range of ports, or an empty one");
                    Err(Reject::new(reason).at_field("destination_port_range"))
                }
            }
        }
        Some(Rule::OrMatch(set)) => {
            let ranges = set.rules.iter().map(port_ranges).collect::<Result<Vec<_>>>();
            Ok(ranges.at("or_match.rules")?.concat())
        }
        Some(Rule::NotMatch(inner)) => Ok(other_ports(port_ranges(inner).at("not_match")?)),
        _ => {
            Err(Reject::new("only port ranges, joined by or_match and inverted by not_match, are supported"))
        }
    }
}

/// Returns the ports outside of these ranges.
fn other_ports(mut ranges: Vec<RangeInclusive<u16>>) -> Vec<RangeInclusive<u16>> {
    ranges.sort_by_key(|range| *range.start());
    let (mut others, mut next) = (Vec::new(), 0_u32);
    for range in ranges {
        let (start, end) = (u32::from(*range.start()), u32::from(*range.end()));
        if next < start {
            others.push(next as u16..=(start - 1) as u16);
        }
        next = next.max(end + 1);
    }
    if next <= u32::from(u16::MAX) {
        others.push(next as u16..=u16::MAX);
    }
    others
}

fn chain(translator: Translator<'_>, proto: &ChainProto) -> Result<FilterChain> {
    let none = FilterChainMatch::default();
    let matches = chain_match(proto.filter_chain_match.as_ref().unwrap_or(&none)).at("filter_chain_match")?;
    let tls = server_tls(translator, proto).at("transport_socket")?;
    let (mut policies, mut limits) = (Vec::new(), Vec::new());
    let (mut sni_port, mut host_cache) = (None, None);
    let mut external_authorization = None;
    let mut metadata_exchange = false;
    let mut stats = None;
    let mut terminal = None;
    for (index, filter) in proto.filters.iter().enumerate() {
        let path = format_args!("filters[{index}]").to_string();
        if terminal.is_some() {
            return Err(Reject::new("comes after the last filter").at_field(path));
        }
        let any = typed_config(filter).at(&path)?;
        match type_name(any) {
            "envoy.extensions.filters.network.rbac.v3.RBAC" => {
                policies
                    .push(unpack(any).and_then(|rbac| policy::network(&rbac)).at("typed_config").at(&path)?);
            }
            SNI_DYNAMIC => {
                let port = unpack(any).and_then(|proto| sni_dynamic(&proto));
                let (port, cache) = port.at("typed_config").at(&path)?;
                (sni_port, host_cache) = (Some(port), Some(Box::new(cache)));
            }
            CONNECTION_LIMIT => {
                let limit = unpack(any).and_then(|proto| connection_limit(&proto));
                limits.extend(limit.at("typed_config").at(&path)?);
            }
            "envoy.extensions.filters.network.ext_authz.v3.ExtAuthz" => {
                let config = unpack(any).and_then(|proto| authorization::network(&proto));
                let config = config.at("typed_config").at(&path)?;
                external_authorization = Some(Box::new(config));
            }
            "stats.PluginConfig" => {
                let proto = unpack(any).and_then(|proto| super::stats::translate(&proto, translator.strict));
                stats = Some(proto.at("typed_config").at(&path)?);
            }
            "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy" => {
                let proto: TcpProxyProto = unpack(any).at(&path)?;
                let tcp = tcp_proxy(&proto, stats.clone(), translator).at("typed_config").at(&path)?;
                terminal = Some(Terminal::Tcp(Arc::new(tcp)));
            }
            "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager" => {
                let proto: HttpConnectionManager = unpack(any).at(&path)?;
                let manager = http::translate(translator, &proto).at("typed_config").at(&path)?;
                terminal = Some(Terminal::Http(Arc::new(manager)));
            }
            // This filter only counts MongoDB operations.
            MONGO_PROXY if !translator.strict => {
                warn_once(format!("network filter {MONGO_PROXY} is not supported and ignored"));
            }
            MONGO_PROXY => {
                let reason = format!("{MONGO_PROXY} is not supported: remove it; it only counts operations");
                return Err(Reject::new(reason).at_field(path));
            }
            _ if cluster::is_tcp_exchange(any)? => metadata_exchange = true,
            _ => return Err(unknown_type("network filter", &filter.name, any).at_field(path)),
        }
    }
    Ok(FilterChain {
        name: proto.name.as_str().into(),
        matches,
        tls,
        policies,
        connection_limits: limits,
        sni_port,
        host_cache,
        external_authorization,
        metadata_exchange,
        terminal: terminal.ok_or_else(|| {
            Reject::new("the last filter must be a tcp_proxy or an http_connection_manager")
                .at_field("filters")
        })?,
        handshake_timeout: timeout(proto.transport_socket_connect_timeout.as_ref(), None)
            .at("transport_socket_connect_timeout")?,
        fingerprint: Some(fingerprint(proto.to_vec())),
    })
}

/// Returns the port for the SNI of connections, and the cache of their hosts.
fn sni_dynamic(proto: &SniDynamic) -> Result<(u16, HostCacheConfig)> {
    let cache = dynamic::host_cache(proto.dns_cache_config.as_ref()).at("dns_cache_config")?;
    match &proto.port_specifier {
        None => Ok((443, cache)),
        Some(PortSpecifier::PortValue(port)) => match u16::try_from(*port) {
            Ok(port @ 1..) => Ok((port, cache)),
            _ => Err(Reject::new(format!("{port} is not a port")).at_field("port_value")),
        },
    }
}

/// Translates a limit on connections; returns `None` if it is disabled.
fn connection_limit(proto: &ConnectionLimitProto) -> Result<Option<Arc<ConnectionLimit>>> {
    if proto.stat_prefix.is_empty() {
        return Err(Reject::new("must be given").at_field("stat_prefix"));
    }
    let max = proto.max_connections.map(|max| max.value).filter(|max| *max > 0);
    let max = max.ok_or_else(|| Reject::new("must be at least 1").at_field("max_connections"))?;
    let delay = timeout(proto.delay.as_ref(), None).at("delay")?;
    let enabled = proto.runtime_enabled.as_ref().and_then(|runtime| flag(runtime.default_value));
    let limit = ConnectionLimit {
        stat_prefix: proto.stat_prefix.as_str().into(),
        max_connections: max,
        delay,
        open: OpenConnections::default(),
    };
    Ok(enabled.unwrap_or(true).then(|| Arc::new(limit)))
}

fn typed_config(filter: &Filter) -> Result<&Any> {
    match &filter.config_type {
        Some(filter::ConfigType::TypedConfig(any)) => Ok(any),
        _ => Err(Reject::new(format!("network filter {:?} has no typed_config", filter.name))),
    }
}

fn server_tls(translator: Translator<'_>, proto: &ChainProto) -> Result<Option<Arc<ServerTls>>> {
    match tls_context::typed_config(proto.transport_socket.as_ref())? {
        None => Ok(None),
        Some((name, any)) => match type_name(any) {
            "envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer" => Ok(None),
            "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext" => {
                tls_context::server(translator, &unpack(any)?).map(Some).at("typed_config")
            }
            _ => Err(unknown_type("transport socket", name, any)),
        },
    }
}

fn chain_match(proto: &FilterChainMatch) -> Result<ChainMatch> {
    let destination_port = match number(proto.destination_port) {
        None => None,
        Some(port) => Some(
            u16::try_from(port)
                .map_err(|_| Reject::new(format!("{port} is not a port")).at_field("destination_port"))?,
        ),
    };
    let transport = match proto.transport_protocol.as_str() {
        "" => None,
        "raw_buffer" => Some(Transport::RawBuffer),
        "tls" => Some(Transport::Tls),
        other => {
            return Err(
                Reject::new(format!("{other:?} must be raw_buffer or tls")).at_field("transport_protocol")
            );
        }
    };
    Ok(ChainMatch {
        destination_port,
        destinations: proto
            .prefix_ranges
            .iter()
            .map(policy::cidr)
            .collect::<Result<_>>()
            .at("prefix_ranges")?,
        server_names: proto.server_names.iter().map(|name| name.to_ascii_lowercase().into()).collect(),
        transport,
        application_protocols: proto.application_protocols.iter().map(|name| name.as_str().into()).collect(),
        sources: proto
            .source_prefix_ranges
            .iter()
            .map(policy::cidr)
            .collect::<Result<_>>()
            .at("source_prefix_ranges")?,
    })
}

fn tunnel(proto: &TunnelingConfig) -> Result<Tunneling> {
    // The name becomes part of a request, so nothing in it may end a line or a token.
    let is_target =
        proto.hostname.bytes().all(|byte| byte.is_ascii_graphic()) && proto.hostname.contains(':');
    if !is_target {
        return Err(Reject::new("must be HOST:PORT").at_field("hostname"));
    }
    Ok(Tunneling { target: proto.hostname.as_str().into(), is_post: proto.use_post })
}

fn tcp_proxy(
    proto: &TcpProxyProto,
    stats: Option<Arc<Stats>>,
    translator: Translator<'_>,
) -> Result<TcpProxy> {
    let targets = match &proto.cluster_specifier {
        Some(ClusterSpecifier::Cluster(name)) => Targets::Single(name.as_str().into()),
        Some(ClusterSpecifier::WeightedClusters(weighted)) => {
            let target = |cluster: &ClusterWeight| Target {
                cluster: cluster.name.as_str().into(),
                weight: cluster.weight,
                headers: HeaderOps::default(),
                host: None,
            };
            let targets: Vec<_> = weighted.clusters.iter().map(target).collect();
            let total = targets.iter().fold(0u32, |sum, target| sum.saturating_add(target.weight));
            if total == 0 {
                return Err(Reject::new("the weights must not all be zero").at_field("weighted_clusters"));
            }
            Targets::Weighted { total, targets }
        }
        None => return Err(Reject::new("must name a cluster")),
    };
    let idle_timeout = match &proto.idle_timeout {
        Some(time) => Some(duration(time).at("idle_timeout")?).filter(|time| !time.is_zero()),
        None => Some(TCP_IDLE_TIMEOUT),
    };
    let mut hash_source_ip = false;
    for (index, policy) in proto.hash_policy.iter().enumerate() {
        match policy.policy_specifier {
            Some(PolicySpecifier::SourceIp(_)) => hash_source_ip = true,
            _ => {
                let path = format_args!("hash_policy[{index}]").to_string();
                return Err(Reject::new("only source_ip is supported").at_field(path));
            }
        }
    }
    Ok(TcpProxy {
        hash_source_ip,
        tunnel: proto.tunneling_config.as_ref().map(tunnel).transpose().at("tunneling_config")?,
        max_duration: timeout(proto.max_downstream_connection_duration.as_ref(), None)
            .at("max_downstream_connection_duration")?,
        stat_prefix: proto.stat_prefix.as_str().into(),
        targets,
        idle_timeout,
        stats,
        access_logs: access_log::access_logs(&proto.access_log, translator)?,
    })
}

#[cfg(test)]
mod tests {
    use super::other_ports;

    #[test]
    fn inverted_port_ranges_are_the_other_ports() {
        assert_eq!(other_ports(vec![7000..=7000]), [0..=6999, 7001..=u16::MAX]);
        assert_eq!(other_ports(vec![]), [0..=u16::MAX]);
        assert_eq!(other_ports(vec![5..=9, 0..=6, 20..=u16::MAX]), [10..=19]);
        assert!(other_ports(vec![0..=u16::MAX]).is_empty());
    }
}
