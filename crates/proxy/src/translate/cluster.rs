//! Translates clusters.

use std::{net::IpAddr, sync::Arc, time::Duration};

use skysail_proto::Codec;
use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            cluster::v3::{
                CircuitBreakers, Cluster as Proto, Filter, UpstreamConnectionOptions,
                circuit_breakers::{Thresholds, thresholds::RetryBudget as RetryBudgetProto},
                cluster::{
                    ClusterDiscoveryType, DiscoveryType, DnsLookupFamily, LbConfig, TransportSocketMatch,
                    common_lb_config,
                },
            },
            core::v3::{
                HttpProtocolOptions as CommonHttpOptions, Metadata, RoutingPriority, TransportSocket,
                config_source,
            },
            endpoint::v3::ClusterLoadAssignment,
        },
        extensions::{
            transport_sockets::proxy_protocol::v3::ProxyProtocolUpstreamTransport,
            upstreams::http::v3::{
                HttpProtocolOptions,
                http_protocol_options::{
                    UpstreamProtocolOptions as Options, explicit_http_config::ProtocolConfig,
                },
            },
        },
    },
    google::protobuf::{Any, Struct, Value, value::Kind},
};
use skysail_xds::istio::{TCP_METADATA_EXCHANGE, TypedStruct};

use super::{
    At as _, Reject, Result, Translator, balancer, duration, dynamic, endpoints, http, lb_policy, listener,
    number, outlier, timeout, tls_context, type_name, unknown_type, unpack, warn_once,
};
use skysail_http::http2::Http2Options;
use skysail_http::proxy_protocol::ProxyVersion;
use skysail_policy::config::{
    Cluster, Endpoints,
    cluster::{
        AutoSni, Discovery, Family, Keepalive, Limits, MAX_HEAD, MAX_HEADERS, RetryBudget, Service,
        TransportMatch, UpstreamProtocol,
    },
    health::Outlier,
    tls::ClientTls,
};
use skysail_policy::state::Published;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const DNS_REFRESH: Duration = Duration::from_secs(5);
const PROXY_PROTOCOL: &str =
    "envoy.extensions.transport_sockets.proxy_protocol.v3.ProxyProtocolUpstreamTransport";
const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// Translates a cluster, with its inline endpoints.
pub(super) fn translate(translator: Translator<'_>, mut proto: Proto) -> Result<Cluster> {
    if proto.name.is_empty() {
        return Err(Reject::new("a cluster needs a name"));
    }
    let new_balancer = lb_policy::resolve(&mut proto).at("load_balancing_policy")?;
    let discovery = discovery(&proto)?;
    let mut http = Http::read(&proto, translator.strict)?;
    if matches!(discovery, Discovery::Dynamic(_)) {
        http.verify_hosts(&proto)?;
    }
    let host_name = http.validates_host;
    let mut cluster = Cluster {
        name: proto.name.as_str().into(),
        balancer: balancer::translate(&proto, &discovery, new_balancer)?,
        panic_threshold: balancer::panic_threshold(&proto)?,
        outlier: detection(&proto, http.errors.take())?,
        slow_start: outlier::slow_start(&proto)?,
        hash_tables: Arc::default(),
        discovery,
        endpoints: Arc::default(),
        connect_timeout: match &proto.connect_timeout {
            Some(time) => duration(time).at("connect_timeout")?,
            None => CONNECT_TIMEOUT,
        },
        limits: limits(proto.circuit_breakers.as_ref()).at("circuit_breakers")?,
        usage: Arc::default(),
        transport_matches: transport_matches(translator, &proto.transport_socket_matches, host_name)?,
        tls: transport(translator, proto.transport_socket.as_ref(), host_name).at("transport_socket")?,
        auto_sni: http.auto_sni,
        protocol: http.protocol,
        http2: http.http2,
        sources: sources(&proto)?,
        idle_timeout: http.idle_timeout,
        max_head: http.max_head,
        max_headers: http.max_headers,
        keep_case: http.keep_case,
        max_requests_per_connection: http.max_requests,
        max_connection_duration: http.max_duration,
        keepalive: proto.upstream_connection_options.as_ref().and_then(keepalive),
        service: service(proto.metadata.as_ref()),
        is_external: is_external(&proto),
        keeps_alpn: keeps_alpn(proto.metadata.as_ref()),
        metadata_exchange: metadata_exchange(&proto.filters)?,
        proxy_protocol: proxy_protocol(&proto)?,
        locality_weighted: weighs_localities(&proto),
    };
    if let Some(assignment) = &proto.load_assignment {
        match cluster.discovery {
            Discovery::Static => {
                let endpoints = endpoints::translate(assignment, &cluster).at("load_assignment")?;
                cluster.endpoints = Arc::new(Published::from_pointee(endpoints));
            }
            // The host names are in `discovery` already.
            Discovery::Dns { .. } => {}
            Discovery::Dynamic(_) => {
                return Err(Reject::new("a dynamic forward proxy has no endpoints of its own: remove it")
                    .at_field("load_assignment"));
            }
            Discovery::OriginalDst(_) => {
                return Err(Reject::new(
                    "a cluster of type ORIGINAL_DST has no endpoints of its own: remove it",
                )
                .at_field("load_assignment"));
            }
            Discovery::Eds(_) if translator.strict => {
                let reason = "a cluster of type EDS gets its endpoints by discovery: remove it";
                return Err(Reject::new(reason).at_field("load_assignment"));
            }
            Discovery::Eds(_) => {
                warn_once("load_assignment has no effect in a cluster of type EDS".to_owned());
            }
        }
    }
    Ok(cluster)
}

#[expect(deprecated, reason = "Istio and files still set dns_refresh_rate here")]
fn discovery(proto: &Proto) -> Result<Discovery> {
    let kind = match &proto.cluster_discovery_type {
        Some(ClusterDiscoveryType::Type(kind)) => DiscoveryType::try_from(*kind)
            .map_err(|_| Reject::new(format!("{kind} is not a discovery type")).at_field("type"))?,
        Some(ClusterDiscoveryType::ClusterType(kind)) => {
            return dynamic::cluster(kind).at("cluster_type").map(Discovery::Dynamic);
        }
        None => DiscoveryType::Static,
    };
    Ok(match kind {
        DiscoveryType::Static => Discovery::Static,
        DiscoveryType::Eds => {
            let config = proto.eds_cluster_config.as_ref();
            let source = config.and_then(|config| config.eds_config.as_ref());
            if !matches!(
                source.and_then(|source| source.config_source_specifier.as_ref()),
                Some(config_source::ConfigSourceSpecifier::Ads(_))
            ) {
                return Err(Reject::new("endpoints by EDS must come over ADS: set `ads: {}`")
                    .at_field("eds_cluster_config.eds_config"));
            }
            let name = config.map(|config| config.service_name.as_str()).filter(|name| !name.is_empty());
            Discovery::Eds(name.unwrap_or(&proto.name).into())
        }
        DiscoveryType::OriginalDst => {
            let port = match &proto.lb_config {
                Some(LbConfig::OriginalDstLbConfig(config)) => {
                    number(config.upstream_port_override).and_then(|port| u16::try_from(port).ok())
                }
                _ => None,
            };
            Discovery::OriginalDst(port)
        }
        DiscoveryType::StrictDns | DiscoveryType::LogicalDns => {
            let none = ClusterLoadAssignment::default();
            let assignment = proto.load_assignment.as_ref().unwrap_or(&none);
            let refresh = match &proto.dns_refresh_rate {
                Some(time) => duration(time).at("dns_refresh_rate")?,
                None => DNS_REFRESH,
            };
            let Endpoints { localities, overprovisioning, .. } =
                endpoints::empty(assignment).at("load_assignment")?;
            let names = endpoints::names(assignment).at("load_assignment")?;
            if kind == DiscoveryType::LogicalDns && names.len() != 1 {
                let reason = "a cluster of type LOGICAL_DNS must have one endpoint: use STRICT_DNS";
                return Err(Reject::new(reason).at_field("load_assignment"));
            }
            Discovery::Dns {
                localities,
                overprovisioning,
                names,
                logical: kind == DiscoveryType::LogicalDns,
                family: family(proto.dns_lookup_family()),
                refresh: refresh.max(Duration::from_secs(1)),
            }
        }
    })
}

pub(super) fn family(proto: DnsLookupFamily) -> Family {
    match proto {
        DnsLookupFamily::Auto => Family::V6Preferred,
        DnsLookupFamily::V4Only => Family::V4,
        DnsLookupFamily::V6Only => Family::V6,
        DnsLookupFamily::V4Preferred => Family::V4Preferred,
        DnsLookupFamily::All => Family::All,
    }
}

/// Translates circuit breaker thresholds; unset ones have Envoy's defaults.
fn limits(breakers: Option<&CircuitBreakers>) -> Result<Limits> {
    let default = |list: &[Thresholds]| {
        list.iter().find(|thresholds| thresholds.priority() == RoutingPriority::Default).cloned()
    };
    let thresholds = breakers.and_then(|breakers| default(&breakers.thresholds)).unwrap_or_default();
    let of_host = breakers.and_then(|breakers| default(&breakers.per_host_thresholds)).unwrap_or_default();
    if of_host != (Thresholds { max_connections: of_host.max_connections, ..Thresholds::default() }) {
        return Err(Reject::new("only max_connections is supported").at_field("per_host_thresholds"));
    }
    Ok(Limits {
        connections: number(thresholds.max_connections).unwrap_or(1024),
        pending: number(thresholds.max_pending_requests).unwrap_or(1024),
        requests: number(thresholds.max_requests).unwrap_or(1024),
        retries: number(thresholds.max_retries).unwrap_or(3),
        budget: thresholds
            .retry_budget
            .as_ref()
            .map(retry_budget)
            .transpose()
            .at("thresholds.retry_budget")?,
        connections_per_host: number(of_host.max_connections).unwrap_or(u32::MAX),
    })
}

fn retry_budget(proto: &RetryBudgetProto) -> Result<RetryBudget> {
    let percent = proto.budget_percent.map_or(20.0, |percent| percent.value);
    if !(0.0..=100.0).contains(&percent) {
        return Err(Reject::new("must be from 0 to 100").at_field("budget_percent"));
    }
    let share = (percent * 10_000.0).round() as u32;
    let interval = proto.budget_interval.as_ref().map(duration).transpose().at("budget_interval")?;
    let interval = interval.filter(|interval| !interval.is_zero());
    Ok(RetryBudget { share, min: number(proto.min_retry_concurrency).unwrap_or(3), interval })
}

fn keepalive(options: &UpstreamConnectionOptions) -> Option<Keepalive> {
    let proto = options.tcp_keepalive?;
    let seconds = |wrapped| number(wrapped).map(|seconds| Duration::from_secs(seconds.into()));
    // Zero disables keep-alive.
    let off = [proto.keepalive_probes, proto.keepalive_time, proto.keepalive_interval];
    (!off.iter().any(|value| number(*value) == Some(0))).then(|| Keepalive {
        probes: number(proto.keepalive_probes),
        time: seconds(proto.keepalive_time),
        interval: seconds(proto.keepalive_interval),
    })
}

fn transport_matches(
    translator: Translator<'_>,
    protos: &[TransportSocketMatch],
    host_name: bool,
) -> Result<Vec<TransportMatch>> {
    let one = |proto: &TransportSocketMatch| {
        Ok(TransportMatch {
            name: proto.name.as_str().into(),
            labels: proto.r#match.as_ref().map(labels).unwrap_or_default(),
            tls: transport(translator, proto.transport_socket.as_ref(), host_name).at("transport_socket")?,
        })
    };
    let indexed = protos.iter().enumerate();
    indexed.map(|(index, proto)| one(proto).at(format_args!("transport_socket_matches[{index}]"))).collect()
}

/// Returns the string fields of a struct as keys and values.
pub(super) fn labels(metadata: &Struct) -> Vec<(Box<str>, Box<str>)> {
    let text = |(key, value): (&String, &skysail_xds::envoy::pb::google::protobuf::Value)| match &value.kind {
        Some(Kind::StringValue(value)) => Some((key.as_str().into(), value.as_str().into())),
        _ => None,
    };
    metadata.fields.iter().filter_map(text).collect()
}

/// Translates the transport socket; `None` means plain text.
pub(super) fn transport(
    translator: Translator<'_>,
    socket: Option<&TransportSocket>,
    host_name: bool,
) -> Result<Option<Arc<ClientTls>>> {
    match tls_context::typed_config(socket)? {
        None => Ok(None),
        Some((name, any)) => match type_name(any) {
            "envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer" => Ok(None),
            "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext" => {
                tls_context::client(translator, &unpack(any)?, host_name).map(Some).at("typed_config")
            }
            PROXY_PROTOCOL => {
                let proto: ProxyProtocolUpstreamTransport = unpack(any).at("typed_config")?;
                let inner = transport(translator, proto.transport_socket.as_ref(), host_name);
                inner.at("typed_config.transport_socket")
            }
            _ => Err(unknown_type("transport socket", name, any)),
        },
    }
}

/// Returns the PROXY protocol version of upstream connections: the same for all endpoints.
pub(super) fn proxy_protocol(proto: &Proto) -> Result<Option<ProxyVersion>> {
    let matches = proto.transport_socket_matches.iter().map(|one| one.transport_socket.as_ref());
    // Where the transport socket is chosen by labels, Istio sends no default socket.
    let other = proto.transport_socket.as_ref();
    let sockets =
        matches.chain((other.is_some() || proto.transport_socket_matches.is_empty()).then_some(other));
    let mut versions = Vec::new();
    for socket in sockets {
        versions.push(match tls_context::typed_config(socket)? {
            Some((_, any)) if type_name(any) == PROXY_PROTOCOL => {
                let proto: ProxyProtocolUpstreamTransport = unpack(any)?;
                Some(listener::proxy_version(proto.config.unwrap_or_default().version()))
            }
            _ => None,
        });
    }
    versions.dedup();
    match versions[..] {
        [version] => Ok(version),
        _ => Err(Reject::new("all transport sockets of a cluster must use the same PROXY protocol, or none")),
    }
}

/// HTTP settings of upstream connections.
struct Http {
    protocol: UpstreamProtocol,
    http2: Http2Options,
    /// The server certificate must match the request's host (`auto_san_validation`).
    validates_host: bool,
    auto_sni: Option<AutoSni>,
    idle_timeout: Option<Duration>,
    max_head: usize,
    max_headers: usize,
    /// Names of response headers keep their spelling.
    keep_case: bool,
    max_requests: Option<u32>,
    max_duration: Option<Duration>,
    /// Statuses that outlier detection counts as errors.
    errors: Option<Box<[u16]>>,
}

/// Translates outlier detection.
fn detection(proto: &Proto, errors: Option<Box<[u16]>>) -> Result<Option<Outlier>> {
    let made = proto.outlier_detection.as_ref().map(outlier::translate).transpose();
    Ok(made.at("outlier_detection")?.map(|made| Outlier { errors, ..made }))
}

impl Http {
    #[expect(deprecated, reason = "older files still use the older fields")]
    fn read(proto: &Proto, strict: bool) -> Result<Self> {
        let protocol = match (&proto.http2_protocol_options, &proto.http_protocol_options) {
            (Some(_), _) => UpstreamProtocol::Http2,
            (None, _) => UpstreamProtocol::Http1,
        };
        let options = proto.http2_protocol_options.as_ref();
        let mut http = Self {
            protocol,
            http2: http::http2_options(options, u32::MAX).at("http2_protocol_options")?,
            validates_host: false,
            auto_sni: None,
            idle_timeout: None,
            max_head: MAX_HEAD,
            max_headers: MAX_HEADERS,
            keep_case: http::keeps_case(proto.http_protocol_options.as_ref(), strict)
                .at("http_protocol_options")?,
            max_requests: number(proto.max_requests_per_connection).filter(|max| *max > 0),
            max_duration: None,
            errors: None,
        };
        http.common(proto.common_http_protocol_options.as_ref(), strict)
            .at("common_http_protocol_options")?;
        for (key, any) in &proto.typed_extension_protocol_options {
            http.options(key, any, strict).at(format_args!("typed_extension_protocol_options[{key:?}]"))?;
        }
        Ok(http)
    }

    /// Requires that the certificate of a resolved host is for that host. As in Envoy, this is the default, and other
    /// options must say that it is not wanted.
    fn verify_hosts(&mut self, proto: &Proto) -> Result<()> {
        if proto.typed_extension_protocol_options.is_empty() {
            (self.validates_host, self.auto_sni) = (true, Some(AutoSni { header: None }));
        } else if !(dynamic::allows_insecure(proto)? || self.validates_host && self.auto_sni.is_some()) {
            return Err(Reject::new(
                "a dynamic forward proxy needs auto_sni and auto_san_validation: set them, or allow_insecure_cluster_options",
            )
            .at_field("typed_extension_protocol_options"));
        }
        Ok(())
    }

    fn options(&mut self, key: &str, any: &Any, strict: bool) -> Result<()> {
        if type_name(any) != HTTP_OPTIONS {
            return Err(unknown_type("protocol options", key, any));
        }
        let options: HttpProtocolOptions = unpack(any)?;
        self.common(options.common_http_protocol_options.as_ref(), strict)
            .at("common_http_protocol_options")?;
        if let Some(upstream) = options.upstream_http_protocol_options {
            self.validates_host = upstream.auto_san_validation;
            let header = Some(upstream.override_auto_sni_header).filter(|name| !name.is_empty());
            let header = header.map(|name| name.to_ascii_lowercase().into());
            self.auto_sni = upstream.auto_sni.then_some(AutoSni { header });
        }
        let matcher =
            options.outlier_detection.as_ref().and_then(|detection| detection.error_matcher.as_ref());
        if let Some(matcher) = matcher {
            self.errors = Some(outlier::errors(matcher).at("outlier_detection.error_matcher")?);
        }
        let http2 = match &options.upstream_protocol_options {
            Some(Options::ExplicitHttpConfig(config)) => match &config.protocol_config {
                Some(ProtocolConfig::Http2ProtocolOptions(http2)) => Some(http2),
                _ => None,
            },
            Some(Options::UseDownstreamProtocolConfig(config)) => config.http2_protocol_options.as_ref(),
            Some(Options::AutoConfig(config)) => config.http2_protocol_options.as_ref(),
            None => None,
        };
        let http1 = match &options.upstream_protocol_options {
            Some(Options::ExplicitHttpConfig(config)) => match &config.protocol_config {
                Some(ProtocolConfig::HttpProtocolOptions(http1)) => Some(http1),
                _ => None,
            },
            Some(Options::UseDownstreamProtocolConfig(config)) => config.http_protocol_options.as_ref(),
            Some(Options::AutoConfig(config)) => config.http_protocol_options.as_ref(),
            None => None,
        };
        if http1.is_some() {
            self.keep_case = http::keeps_case(http1, strict).at("http_protocol_options")?;
        }
        if http2.is_some() {
            self.http2 = http::http2_options(http2, u32::MAX).at("http2_protocol_options")?;
        }
        self.protocol = match options.upstream_protocol_options {
            Some(Options::ExplicitHttpConfig(config)) => match config.protocol_config {
                Some(ProtocolConfig::Http2ProtocolOptions(_)) => UpstreamProtocol::Http2,
                Some(ProtocolConfig::HttpProtocolOptions(_)) | None => UpstreamProtocol::Http1,
                Some(ProtocolConfig::Http3ProtocolOptions(_)) => {
                    return Err(Reject::new("HTTP/3 is not supported"));
                }
            },
            Some(Options::UseDownstreamProtocolConfig(_)) => UpstreamProtocol::AsDownstream,
            Some(Options::AutoConfig(_)) => UpstreamProtocol::Auto,
            None => self.protocol,
        };
        Ok(())
    }

    fn common(&mut self, options: Option<&CommonHttpOptions>, strict: bool) -> Result<()> {
        let Some(options) = options else { return Ok(()) };
        for (name, is_set) in [
            ("max_stream_duration", options.max_stream_duration.is_some()),
            ("headers_with_underscores_action", options.headers_with_underscores_action != 0),
        ] {
            if is_set && strict {
                let reason = "skysail-proxy does not support this field in clusters: remove it";
                return Err(Reject::new(reason).at_field(name));
            } else if is_set {
                warn_once(format!("{name} is not supported in clusters and has no effect"));
            }
        }
        if let Some(time) = &options.idle_timeout {
            // Zero disables the timeout.
            let time = duration(time).at("idle_timeout")?;
            self.idle_timeout = Some(if time.is_zero() { Duration::MAX } else { time });
        }
        if options.max_response_headers_kb.is_some() {
            self.max_head = http::max_head(options.max_response_headers_kb).at("max_response_headers_kb")?;
        }
        if options.max_headers_count.is_some() {
            self.max_headers = http::max_headers(Some(options))?;
        }
        self.max_duration = timeout(options.max_connection_duration.as_ref(), self.max_duration)
            .at("max_connection_duration")?;
        self.max_requests =
            number(options.max_requests_per_connection).or(self.max_requests).filter(|&max| max > 0);
        Ok(())
    }
}

/// Returns the source addresses of upstream connections.
#[expect(deprecated, reason = "additional_source_addresses is what older Istios send")]
fn sources(proto: &Proto) -> Result<Vec<IpAddr>> {
    let Some(bind) = &proto.upstream_bind_config else { return Ok(Vec::new()) };
    let extra = bind.extra_source_addresses.iter().filter_map(|extra| extra.address.as_ref());
    let all = bind.source_address.iter().chain(extra).chain(&bind.additional_source_addresses);
    all.map(|address| {
        let wrong = |_| Reject::new(format!("{:?} is not an IP address", address.address));
        address.address.parse().map_err(wrong).at("upstream_bind_config")
    })
    .collect()
}

/// Returns the service of a cluster: metadata `istio.services[0]`.
fn service(metadata: Option<&Metadata>) -> Option<Service> {
    let services = metadata?.filter_metadata.get("istio")?.fields.get("services")?;
    let Some(Kind::ListValue(list)) = &services.kind else { return None };
    let Some(Kind::StructValue(first)) = &list.values.first()?.kind else { return None };
    let labels = labels(first);
    let get = |key: &str| -> Arc<str> {
        labels.iter().find(|(name, _)| &**name == key).map(|(_, value)| &**value).unwrap_or_default().into()
    };
    Some(Service { host: get("host"), name: get("name"), namespace: get("namespace") })
}

/// Returns whether the endpoints are outside the mesh, as Istio's metadata exchange decides it.
fn is_external(proto: &Proto) -> bool {
    let metadata = || proto.metadata.as_ref()?.filter_metadata.get("istio")?.fields.get("external");
    let is_marked = |value: &Value| value.kind == Some(Kind::BoolValue(true));
    proto.name == "PassthroughCluster" || metadata().is_some_and(is_marked)
}

/// Returns whether Istio's filter `istio.alpn` leaves the offer of the cluster as it is.
fn keeps_alpn(metadata: Option<&Metadata>) -> bool {
    let of_istio = metadata.and_then(|metadata| metadata.filter_metadata.get("istio"));
    let value = of_istio.and_then(|fields| fields.fields.get("alpn_override"));
    value.and_then(|value| value.kind.as_ref()).is_some_and(|kind| *kind == Kind::StringValue("false".into()))
}

/// Returns whether the cluster has Istio's TCP metadata exchange, the only supported cluster filter.
fn metadata_exchange(filters: &[Filter]) -> Result<bool> {
    let mut exchange = false;
    for (index, filter) in filters.iter().enumerate() {
        let any = filter.typed_config.as_ref();
        let Some(any) = any else {
            return Err(Reject::new(format!("filter {:?} has no typed_config", filter.name)));
        };
        if !is_tcp_exchange(any)? {
            return Err(
                unknown_type("cluster filter", &filter.name, any).at_field(format_args!("filters[{index}]"))
            );
        }
        exchange = true;
    }
    Ok(exchange)
}

/// Returns whether this is the configuration of Istio's TCP metadata exchange.
pub(super) fn is_tcp_exchange(any: &Any) -> Result<bool> {
    if TCP_METADATA_EXCHANGE.ends_with(&format!("/{}", type_name(any))) {
        return Ok(true);
    }
    Ok(matches!(type_name(any), "udpa.type.v1.TypedStruct" | "xds.type.v3.TypedStruct")
        && typed_struct(any)?.type_url == TCP_METADATA_EXCHANGE)
}

/// Decodes a typed struct of either type name.
pub(super) fn typed_struct(any: &Any) -> Result<TypedStruct> {
    Codec::from_slice(&any.value).map_err(|error| Reject::new(format!("not a valid TypedStruct: {error}")))
}

fn weighs_localities(proto: &Proto) -> bool {
    use common_lb_config::LocalityConfigSpecifier as Spec;
    let config = proto.common_lb_config.as_ref();
    let specifier = config.and_then(|config| config.locality_config_specifier.as_ref());
    matches!(specifier, Some(Spec::LocalityWeightedLbConfig(_)))
}
