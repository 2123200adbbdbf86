//! Network and HTTP filters, in Istio's order.
//!
//! Istio's own (`istio.metadata_exchange`, `istio.stats`, `istio.alpn`) exist in its build of Envoy and in
//! `skysail-proxy`. An Envoy without them refuses a listener or cluster that has one, so it gets none.

use skysail_core::names::Direction;
use skysail_xds::{
    envoy::pb::{
        envoy::{
            config::route::v3::RouteConfiguration,
            extensions::{
                filters::{
                    http::{
                        cors::v3::Cors,
                        dynamic_forward_proxy,
                        fault::v3::HttpFault,
                        grpc_stats::v3::{FilterConfig, filter_config::PerMethodStatSpecifier},
                        grpc_web::v3::GrpcWeb,
                        router::v3::Router,
                    },
                    network::{
                        http_connection_manager::v3::{
                            HttpConnectionManager, HttpFilter, LocalReplyConfig, Rds, RequestIdExtension,
                            ResponseMapper,
                            http_connection_manager::{
                                ForwardClientCertDetails, PathWithEscapedSlashesAction, RouteSpecifier,
                                ServerHeaderTransformation, SetCurrentClientCertDetails, UpgradeConfig,
                            },
                            http_filter,
                        },
                        tcp_proxy::v3::{TcpProxy, tcp_proxy::ClusterSpecifier},
                    },
                },
                request_id::uuid::v3::UuidRequestIdConfig,
            },
        },
        google::protobuf::Value,
    },
    istio::{self, AlpnConfig, AlpnOverride, AlpnProtocol},
};

use super::{
    clusters, connections,
    extension::{self, Extensions},
    packed,
    pb::{Any, boolean, cluster, core, duration, from_ads, listener, pack, seconds, types},
    telemetry::SideTelemetry,
    tls,
};
use crate::{
    ProxyView, Role,
    api::{
        MeshConfig,
        connection_settings::ConnectionSettings,
        extension::Phase,
        mesh_config::Normalization,
        proxy_config::{ExchangeMode, ForwardedClientCert, GatewayTopology, HttpSettings, ProxyHeaders},
    },
};

use core::http1_protocol_options::{HeaderKeyFormat, header_key_format::HeaderFormat};

const METADATA_EXCHANGE: &str = "istio.metadata_exchange";
const STATS: &str = "istio.stats";
/// Header `server` of responses of gateways and of inbound listeners.
const SERVER_NAME: &str = "istio-envoy";

/// Settings of filters.
#[derive(Clone, Copy)]
pub(super) struct FilterSettings<'a> {
    pub(super) mesh: &'a MeshConfig,
    pub(super) view: &'a ProxyView,
    pub(super) telemetry: &'a SideTelemetry,
    /// Whether connections from one address go to the same endpoint.
    pub(super) hash_source_ip: bool,
    /// Whether requests of gRPC-Web are translated to gRPC.
    pub(super) grpc_web: bool,
    /// Whether the port is declared to speak HTTP/2.
    pub(super) http2: bool,
    /// Whether requests for unknown hosts go to the addresses that the proxy resolves.
    pub(super) dynamic_dns: bool,
    /// Settings of the proxy, with those of the mesh configuration.
    pub(super) proxy: &'a HttpSettings,
    /// Extensions of the proxy.
    pub(super) extensions: &'a Extensions<'a>,
    /// Port of the chain: that of the workload at servers, of the service at clients; 0 if the chain has all ports.
    pub(super) port: u16,
}

/// Returns the settings of a proxy, with those of the mesh configuration.
pub(super) fn settings(mesh: &MeshConfig, view: &ProxyView) -> HttpSettings {
    let mut settings = mesh.default_config.http().overlaid(&view.settings);
    if view.role == Role::Router {
        settings.connection_settings =
            settings.connection_settings.as_ref().map(ConnectionSettings::at_gateway);
    }
    settings
}

/// Source of the routes of an HTTP connection manager.
pub(super) enum Routes {
    /// Name of a route configuration.
    ByName(String),
    /// Route configuration within the filter.
    Inline(Box<RouteConfiguration>),
}

/// Returns the filters of clusters.
pub(super) fn of_cluster(plain_envoy: bool) -> Vec<cluster::Filter> {
    let exchange = || cluster::Filter {
        name: METADATA_EXCHANGE.into(),
        typed_config: Some(tcp_exchange()),
        ..Default::default()
    };
    (!plain_envoy).then(exchange).into_iter().collect()
}

/// Returns the filters of a TCP chain to a cluster. `policy` holds authorization filters.
pub(super) fn tcp_chain(
    setting: FilterSettings<'_>,
    direction: Direction,
    cluster: &str,
    policy: Vec<listener::Filter>,
) -> Vec<listener::Filter> {
    named_tcp_chain(setting, direction, cluster.to_owned(), cluster, policy)
}

/// Returns the same filters with another name in statistics.
pub(super) fn named_tcp_chain(
    setting: FilterSettings<'_>,
    direction: Direction,
    stat_prefix: String,
    cluster: &str,
    policy: Vec<listener::Filter>,
) -> Vec<listener::Filter> {
    let proxy = tcp_proxy(setting, stat_prefix, ClusterSpecifier::Cluster(cluster.to_owned()));
    let exchange = if direction == Direction::Inbound { exchange(setting.view) } else { None };
    exchange.into_iter().chain(policy).chain(tcp_chain_of(setting, direction, Vec::new(), &proxy)).collect()
}

/// Returns the filters of the chain for connections to the listener itself, which are not logged.
pub(super) fn black_hole_chain(
    setting: FilterSettings<'_>,
    direction: Direction,
    cluster: &str,
) -> Vec<listener::Filter> {
    let proxy = tcp_proxy(setting, cluster.to_owned(), ClusterSpecifier::Cluster(cluster.to_owned()));
    let proxy = TcpProxy { access_log: Vec::new(), ..proxy };
    let exchange = if direction == Direction::Inbound { exchange(setting.view) } else { None };
    exchange.into_iter().chain(tcp_chain_of(setting, direction, Vec::new(), &proxy)).collect()
}

/// Returns the filters at the end of a TCP chain. `before` stands before the TCP proxy.
pub(super) fn tcp_chain_of(
    setting: FilterSettings<'_>,
    direction: Direction,
    before: Vec<listener::Filter>,
    proxy: &TcpProxy,
) -> Vec<listener::Filter> {
    let mut filters: Vec<listener::Filter> = setting.network_extensions(direction).collect();
    filters.extend(network_stats(setting));
    filters.extend(before);
    filters.push(network("envoy.filters.network.tcp_proxy", pack(proxy)));
    filters
}

/// Policies of an HTTP chain in their order, and changes of local replies. Extensions run between them.
#[derive(Clone, Default)]
pub(super) struct HttpPolicy {
    /// External authorizers.
    pub(super) authorizers: Vec<HttpFilter>,
    /// Verification of tokens.
    pub(super) tokens: Vec<HttpFilter>,
    /// Authorization.
    pub(super) rules: Vec<HttpFilter>,
    /// Rate limits.
    pub(super) limits: Vec<HttpFilter>,
    pub(super) replies: Vec<ResponseMapper>,
}

impl FilterSettings<'_> {
    /// Returns the policies of a chain with the extensions of each phase.
    fn with_extensions(self, direction: Direction, policy: HttpPolicy) -> Vec<HttpFilter> {
        let side = extension::side(direction, self.view.role);
        let of = |phase: Phase| self.extensions.http(phase, side, self.port);
        let HttpPolicy { authorizers, tokens, rules, limits, replies: _ } = policy;
        let authenticated = authorizers.into_iter().chain(of(Phase::Authn)).chain(tokens);
        let authorized = authenticated.chain(of(Phase::Authz)).chain(rules).chain(of(Phase::Stats));
        authorized.chain(of(Phase::Unspecified)).chain(limits).collect()
    }

    /// Returns the network filters of extensions.
    pub(super) fn network_extensions(&self, direction: Direction) -> impl Iterator<Item = listener::Filter> {
        self.extensions.network(extension::side(direction, self.view.role), self.port)
    }
}

/// Returns the filters of an HTTP chain. `policy` holds authorization filters and rate limits.
pub(super) fn http_chain(
    setting: FilterSettings<'_>,
    direction: Direction,
    stat_prefix: String,
    routes: Routes,
    policy: HttpPolicy,
) -> Vec<listener::Filter> {
    let mut filters = Vec::new();
    if direction == Direction::Inbound {
        filters.extend(exchange(setting.view));
    }
    filters.extend(setting.network_extensions(direction));
    let manager = connection_manager(setting, direction, stat_prefix, routes, policy);
    filters.push(network("envoy.filters.network.http_connection_manager", pack(&manager)));
    filters
}

/// Returns a network filter.
pub(super) fn network(name: &str, config: Any) -> listener::Filter {
    listener::Filter {
        name: name.to_owned(),
        config_type: Some(listener::filter::ConfigType::TypedConfig(config)),
    }
}

/// Returns an HTTP filter.
pub(super) fn http(name: &str, config: Any) -> HttpFilter {
    HttpFilter {
        name: name.to_owned(),
        config_type: Some(http_filter::ConfigType::TypedConfig(config)),
        ..Default::default()
    }
}

fn connection_manager(
    setting: FilterSettings<'_>,
    direction: Direction,
    stat_prefix: String,
    routes: Routes,
    mut policy: HttpPolicy,
) -> HttpConnectionManager {
    let replies = std::mem::take(&mut policy.replies);
    let uuid = UuidRequestIdConfig {
        use_request_id_for_trace_sampling: boolean(setting.telemetry.samples_by_request_id),
        ..Default::default()
    };
    let mut manager = HttpConnectionManager {
        stat_prefix,
        http_filters: http_filters(setting, direction, policy),
        tracing: setting.telemetry.tracing.clone(),
        access_log: setting.telemetry.logs.clone(),
        common_http_protocol_options: setting.view.idle_timeout.map(|length| core::HttpProtocolOptions {
            idle_timeout: Some(duration(length.0)),
            ..Default::default()
        }),
        stream_idle_timeout: Some(seconds(0)),
        use_remote_address: boolean(false),
        proxy_100_continue: true,
        upgrade_configs: vec![UpgradeConfig { upgrade_type: "websocket".into(), ..Default::default() }],
        request_id_extension: Some(RequestIdExtension { typed_config: Some(pack(&uuid)) }),
        route_specifier: Some(match routes {
            Routes::ByName(name) => {
                RouteSpecifier::Rds(Rds { config_source: Some(from_ads()), route_config_name: name })
            }
            Routes::Inline(routes) => RouteSpecifier::RouteConfig(*routes),
        }),
        ..Default::default()
    };
    manager.local_reply_config =
        (!replies.is_empty()).then(|| LocalReplyConfig { mappers: replies, ..Default::default() });
    manager.http2_protocol_options = setting.http2.then(Default::default);
    normalize_paths(&mut manager, setting.mesh.path_normalization.normalization);
    if let Some(settings) = &setting.proxy.connection_settings {
        connections::apply(&mut manager, settings);
    }
    if direction == Direction::Inbound {
        manager.server_name = SERVER_NAME.into();
        at_workload(&mut manager, &setting.proxy.proxy_headers);
    }
    if setting.view.role == Role::Router {
        manager.server_name = SERVER_NAME.into();
        at_edge(&mut manager, &setting.proxy.gateway_topology);
    }
    set_headers(&mut manager, &setting.proxy.proxy_headers);
    manager
}

/// Sets what inbound listeners tell the workload of the certificates of clients.
fn at_workload(manager: &mut HttpConnectionManager, headers: &ProxyHeaders) {
    manager.forward_client_cert_details =
        forwarded(headers.forwarded_client_cert, ForwardClientCertDetails::AppendForward);
    let details = headers.set_current_client_cert_details;
    manager.set_current_client_cert_details = Some(SetCurrentClientCertDetails {
        subject: boolean(details.subject != Some(false)),
        dns: details.dns != Some(false),
        uri: details.uri != Some(false),
        cert: details.cert == Some(true),
        chain: details.chain == Some(true),
        ..Default::default()
    });
}

/// Sets how gateways handle requests of untrusted clients. The client's address and certificate replace the requests'
/// headers about them, unless a trusted proxy is in front of the gateway.
fn at_edge(manager: &mut HttpConnectionManager, topology: &GatewayTopology) {
    manager.http_protocol_options = Some(Default::default());
    manager.use_remote_address = boolean(true);
    manager.xff_num_trusted_hops = topology.num_trusted_proxies.unwrap_or_default();
    let details = topology.forward_client_cert_details;
    manager.forward_client_cert_details = forwarded(details, ForwardClientCertDetails::SanitizeSet);
    if manager.forward_client_cert_details == ForwardClientCertDetails::AppendForward as i32
        || manager.forward_client_cert_details == ForwardClientCertDetails::SanitizeSet as i32
    {
        manager.set_current_client_cert_details = Some(SetCurrentClientCertDetails {
            subject: boolean(true),
            cert: true,
            dns: true,
            uri: true,
            ..Default::default()
        });
    }
}

fn forwarded(from: ForwardedClientCert, default: ForwardClientCertDetails) -> i32 {
    (match from {
        ForwardedClientCert::Undefined => default,
        ForwardedClientCert::Sanitize => ForwardClientCertDetails::Sanitize,
        ForwardedClientCert::ForwardOnly => ForwardClientCertDetails::ForwardOnly,
        ForwardedClientCert::AppendForward => ForwardClientCertDetails::AppendForward,
        ForwardedClientCert::SanitizeSet => ForwardClientCertDetails::SanitizeSet,
        ForwardedClientCert::AlwaysForwardOnly => ForwardClientCertDetails::AlwaysForwardOnly,
    }) as i32
}

/// Sets the headers that all connection managers of a proxy have in common.
fn set_headers(manager: &mut HttpConnectionManager, headers: &ProxyHeaders) {
    if headers.server.disabled == Some(true) {
        manager.server_name = String::new();
        manager.server_header_transformation = ServerHeaderTransformation::PassThrough as i32;
    } else if !headers.server.value.is_empty() {
        manager.server_name.clone_from(&headers.server.value);
    }
    manager.generate_request_id = headers.request_id.is_off().then(|| boolean(false)).flatten();
    manager.append_x_forwarded_port = headers.x_forwarded_port.enabled == Some(true);
    if headers.preserve_http1_header_case == Some(true) {
        manager.http_protocol_options.get_or_insert_default().header_key_format = Some(preserved_case());
    }
}

/// Returns the format of HTTP/1.1 headers that preserves their case.
pub(super) fn preserved_case() -> HeaderKeyFormat {
    const TYPE: &str = "type.googleapis.com/envoy.extensions.http.header_formatters.preserve_case.v3.PreserveCaseFormatterConfig";
    HeaderKeyFormat {
        header_format: Some(HeaderFormat::StatefulFormatter(core::TypedExtensionConfig {
            name: "preserve_case".into(),
            typed_config: Some(Any { type_url: TYPE.into(), value: Vec::new() }),
        })),
    }
}

fn normalize_paths(manager: &mut HttpConnectionManager, how: Normalization) {
    use PathWithEscapedSlashesAction::{KeepUnchanged, UnescapeAndForward};
    manager.normalize_path = boolean(how != Normalization::None);
    manager.merge_slashes = matches!(how, Normalization::MergeSlashes | Normalization::DecodeAndMergeSlashes);
    let decodes = how == Normalization::DecodeAndMergeSlashes;
    manager.path_with_escaped_slashes_action =
        if decodes { UnescapeAndForward } else { KeepUnchanged } as i32;
}

fn http_filters(setting: FilterSettings<'_>, direction: Direction, policy: HttpPolicy) -> Vec<HttpFilter> {
    let view = setting.view;
    let grpc = FilterConfig {
        emit_filter_state: true,
        per_method_stat_specifier: Some(PerMethodStatSpecifier::StatsForAllMethods(super::pb::BoolValue {
            value: false,
        })),
        ..Default::default()
    };
    let mut filters = Vec::new();
    if !view.plain_envoy {
        let in_mesh = setting.proxy.proxy_headers.metadata_exchange_headers.mode == ExchangeMode::InMesh;
        filters.push(http(METADATA_EXCHANGE, peer_metadata(direction, in_mesh)));
    }
    filters.extend(setting.with_extensions(direction, policy));
    if setting.grpc_web {
        filters.push(http("envoy.filters.http.grpc_web", pack(&GrpcWeb::default())));
    }
    filters.push(http("envoy.filters.http.grpc_stats", pack(&grpc)));
    if direction == Direction::Outbound && !view.plain_envoy {
        filters.push(http("istio.alpn", pack(&alpn())));
    }
    filters.push(http("envoy.filters.http.fault", pack(&HttpFault::default())));
    filters.push(http("envoy.filters.http.cors", pack(&Cors::default())));
    filters.extend(stats(setting).map(|config| http(STATS, config)));
    if setting.dynamic_dns {
        let config = dynamic_forward_proxy::v3::FilterConfig {
            implementation_specifier: Some(
                dynamic_forward_proxy::v3::filter_config::ImplementationSpecifier::DnsCacheConfig(
                    clusters::dns_cache(view),
                ),
            ),
            ..Default::default()
        };
        filters.push(http("envoy.filters.http.dynamic_forward_proxy", pack(&config)));
    }
    let suppress_envoy_headers = setting.proxy.proxy_headers.envoy_debug_headers.is_off();
    let router = Router { suppress_envoy_headers, ..Default::default() };
    filters.push(http("envoy.filters.http.router", pack(&router)));
    filters
}

/// Returns a TCP proxy to a cluster, or to several.
pub(super) fn tcp_proxy(setting: FilterSettings<'_>, stat_prefix: String, to: ClusterSpecifier) -> TcpProxy {
    let source_ip = types::HashPolicy {
        policy_specifier: Some(types::hash_policy::PolicySpecifier::SourceIp(Default::default())),
    };
    TcpProxy {
        stat_prefix,
        access_log: setting.telemetry.logs.clone(),
        idle_timeout: setting.view.idle_timeout.map(|length| duration(length.0)),
        hash_policy: setting.hash_source_ip.then_some(source_ip).into_iter().collect(),
        cluster_specifier: Some(to),
        ..Default::default()
    }
}

/// Returns the network filter that exchanges peer metadata.
pub(super) fn exchange(view: &ProxyView) -> Option<listener::Filter> {
    (!view.plain_envoy).then(|| network(METADATA_EXCHANGE, tcp_exchange()))
}

/// Returns the filter that exchanges peer metadata in the first bytes of a TCP connection.
fn tcp_exchange() -> Any {
    packed::typed_struct(
        istio::TCP_METADATA_EXCHANGE,
        [("protocol", istio::string(tls::PEER_EXCHANGE)), ("enable_discovery", istio::boolean(true))].into(),
    )
}

/// Returns the filter that exchanges peer metadata in headers, with services of the mesh alone (`in_mesh`) or with all.
fn peer_metadata(direction: Direction, in_mesh: bool) -> Any {
    let by = |name: &str| istio::structure([(name, istio::structure([]))]);
    let skip = istio::structure([("skip_external_clusters", istio::boolean(true))]);
    let to_upstream = if in_mesh { istio::structure([("istio_headers", skip)]) } else { by("istio_headers") };
    let lists: [(&str, Vec<Value>); 2] = match direction {
        Direction::Inbound => [
            ("downstream_discovery", vec![by("istio_headers"), by("workload_discovery")]),
            ("downstream_propagation", vec![by("istio_headers")]),
        ],
        Direction::Outbound => [
            ("upstream_discovery", vec![by("istio_headers"), by("workload_discovery")]),
            ("upstream_propagation", vec![to_upstream]),
        ],
    };
    let fields = lists.map(|(name, list)| (name, istio::list(list)));
    packed::typed_struct(istio::HTTP_PEER_METADATA, fields.into())
}

/// Returns the network filter of Istio's standard metrics.
pub(super) fn network_stats(setting: FilterSettings<'_>) -> Option<listener::Filter> {
    stats(setting).map(|config| network(STATS, config))
}

/// Returns the filter of Istio's standard metrics.
fn stats(setting: FilterSettings<'_>) -> Option<Any> {
    // On inbound requests the client controls the host header, so it does not identify a service.
    setting.telemetry.stats.clone().filter(|_| !setting.view.plain_envoy)
}

/// Returns the ALPN offered to the peer by the request's protocol, so that the peer's filter chains see HTTP.
fn alpn() -> AlpnConfig {
    let entry = |protocol: AlpnProtocol, istio: &str, own: &str| AlpnOverride {
        upstream_protocol: protocol as i32,
        alpn_override: vec![istio.to_owned(), tls::ISTIO.to_owned(), own.to_owned()],
    };
    let [http10, http11, http2] = tls::ISTIO_HTTP;
    AlpnConfig {
        alpn_override: vec![
            entry(AlpnProtocol::Http10, http10, "http/1.0"),
            entry(AlpnProtocol::Http11, http11, "http/1.1"),
            entry(AlpnProtocol::Http2, http2, "h2"),
        ],
    }
}
