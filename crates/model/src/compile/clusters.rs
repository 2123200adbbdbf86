//! CDS: one cluster for each service port and each subset, the special clusters, and one for each of the workload's own
//! ports.

use std::time::Duration;

use skysail_core::ClusterName;
use skysail_xds::{
    envoy::pb::envoy::extensions::{
        clusters::dynamic_forward_proxy, common::dynamic_forward_proxy::v3::DnsCacheConfig,
        network::dns_resolver::cares::v3::CaresDnsResolverConfig,
    },
    istio,
};

use super::{
    Scope, balance,
    dynamic_dns::{self, Families},
    endpoints, filters,
    listeners::InboundPort,
    locality,
    networks::ClusterForm,
    pb::{
        Struct, address, cluster, config_path, core, duration, fields, metadata, pack, seconds, socket,
        types, uint32,
    },
    policy::Effective,
    pool,
    protocol::{self, ClusterProtocol},
    stat_names, tls,
};
use crate::{
    ProxyView, Role,
    api::{
        DestinationRule, MeshConfig, Resolution, Service, ServicePort, Typed,
        destination_rule::{ClientTls, ClientTlsMode, ProxyProtocol, SimpleLb},
        mesh_config::InboundMode,
        sidecar::IngressEndpoint,
    },
    world::{CONFIG_MAP, INVALID},
};

use cluster::cluster::{
    ClusterDiscoveryType, CommonLbConfig, DiscoveryType, EdsClusterConfig, LbPolicy, TransportSocketMatch,
};

/// Cluster that refuses every connection.
pub(super) const BLACK_HOLE: &str = "BlackHoleCluster";
/// Cluster that connects to the original destination.
pub(super) const PASSTHROUGH: &str = "PassthroughCluster";
/// Cluster that connects to the addresses that the proxy resolves for the host of a request.
pub(super) const DYNAMIC_DNS: &str = "AllowAnyDynamicDNSCluster";
/// Cluster that connects inbound connections to their original destination.
pub(super) const INBOUND_PASSTHROUGH: &str = "InboundPassthroughCluster";

/// Source address of connections to the workload itself, so that they are not taken for those of its clients.
const INBOUND_SOURCE_V4: &str = "127.0.0.6";
const INBOUND_SOURCE_V6: &str = "::6";
/// Maximum duration in Go, which istiod uses for "never".
const MAX_GO_SECONDS: i64 = 9_223_372_035;

/// Maximum number of unknown hosts in the DNS cache of a proxy, as in istiod.
const DYNAMIC_DNS_HOSTS: u32 = 1_024;
/// Jitter of DNS lookups by proxies, as in istiod.
const DNS_JITTER: Duration = Duration::from_millis(100);
/// Number of DNS queries after which proxies use another source port, as in istiod.
const DNS_UDP_QUERIES: u32 = 100;

/// Returns the clusters of a sidecar that do not come from services.
pub(super) fn special(scope: &Scope<'_>, view: &ProxyView) -> Vec<cluster::Cluster> {
    let mesh = scope.world.mesh();
    let mut inbound = original_dst(INBOUND_PASSTHROUGH);
    inbound.alt_stat_name = format!("{PASSTHROUGH};");
    inbound.typed_extension_protocol_options = protocol::passthrough_options(scope.headers, None);
    inbound.upstream_bind_config = Some(inbound_source(view));
    let mut outbound = original_dst(PASSTHROUGH);
    outbound.typed_extension_protocol_options = protocol::passthrough_options(scope.headers, None);
    outbound.filters = filters::of_cluster(view.plain_envoy);
    for made in [&mut inbound, &mut outbound] {
        pool::apply(made, mesh, mesh.default_traffic_policy.connection_pool.as_ref());
    }
    vec![black_hole(mesh), inbound, outbound]
}

/// Returns the cluster for unknown hosts of HTTP, whose addresses the proxy resolves.
pub(super) fn dynamic_dns(scope: &Scope<'_>, view: &ProxyView) -> cluster::Cluster {
    let mesh = scope.world.mesh();
    let tls = mesh.outbound_traffic_policy.tls.as_ref().filter(|tls| tls.mode != ClientTlsMode::Disable);
    let names = tls.map(|tls| core::UpstreamHttpProtocolOptions {
        auto_sni: tls.sni.is_empty(),
        auto_san_validation: tls.insecure_skip_verify != Some(true),
        ..Default::default()
    });
    let is_safe = names.as_ref().is_some_and(|names| names.auto_sni && names.auto_san_validation);
    let config = dynamic_forward_proxy::v3::ClusterConfig {
        allow_insecure_cluster_options: !is_safe,
        cluster_implementation_specifier: Some(
            dynamic_forward_proxy::v3::cluster_config::ClusterImplementationSpecifier::DnsCacheConfig(
                dns_cache(view),
            ),
        ),
        ..Default::default()
    };
    let mut made = cluster::Cluster {
        cluster_discovery_type: Some(ClusterDiscoveryType::ClusterType(
            cluster::cluster::CustomClusterType {
                name: "envoy.clusters.dynamic_forward_proxy".into(),
                typed_config: Some(pack(&config)),
            },
        )),
        typed_extension_protocol_options: protocol::passthrough_options(scope.headers, names),
        filters: filters::of_cluster(view.plain_envoy),
        transport_socket: tls.map(|tls| tls::client(mesh, tls, None, tls::UpstreamProtocol::Other)),
        ..original_dst(DYNAMIC_DNS)
    };
    pool::apply(&mut made, mesh, None);
    made
}

/// Returns the DNS cache of unknown hosts; the HTTP filter and the cluster must have the same.
pub(super) fn dns_cache(view: &ProxyView) -> DnsCacheConfig {
    DnsCacheConfig {
        name: "allow_any_dfp_dns_cache".into(),
        dns_lookup_family: Families { ipv4: view.ipv4, ipv6: view.ipv6 }.lookup() as i32,
        max_hosts: uint32(DYNAMIC_DNS_HOSTS),
        ..Default::default()
    }
}

/// Returns the cluster that refuses every connection.
pub(super) fn black_hole(mesh: &MeshConfig) -> cluster::Cluster {
    let mut made = base(BLACK_HOLE.to_owned(), DiscoveryType::Static);
    if let Some(timeout) = mesh.connect_timeout {
        made.connect_timeout = Some(duration(timeout.0));
    }
    made
}

/// Returns the cluster of one of the workload's own ports.
pub(super) fn inbound(scope: &Scope<'_>, view: &ProxyView, port: &InboundPort<'_>) -> cluster::Cluster {
    let name = ClusterName::inbound(port.port).to_string();
    let mut made = match scope.world.mesh().inbound_traffic_policy.mode {
        InboundMode::Localhost => localhost(name, view, port.port),
        InboundMode::Passthrough => {
            let mut made = original_dst(&name);
            made.cleanup_interval = Some(seconds(MAX_GO_SECONDS));
            made.upstream_bind_config = Some(core::BindConfig {
                source_address: Some(socket(inbound_address(view), 0)),
                ..Default::default()
            });
            made
        }
    };
    made.common_lb_config = Some(CommonLbConfig::default());
    if let Some((_, ingress)) = port.ingress {
        set_destination(&mut made, view, &ingress.default_endpoint);
    }
    // Selectors of workloads apply to outbound connections only.
    let service = port.services.first().filter(|_| port.ingress.is_none());
    let rule =
        service.and_then(|(service, _)| scope.world.destination_rule(&service.fqdn(), scope.namespace));
    let same = port.services.iter().filter(|(_, known)| known.port == port.services[0].1.port);
    let services = same.map(|(service, _)| *service);
    made.metadata =
        (!port.services.is_empty()).then(|| metadata("istio", describe(services, rule.as_deref(), "")));
    let mesh = scope.world.mesh();
    let of_rule = rule.as_ref().map(|rule| Effective::of_rule(&rule.spec, port.service_port()));
    let of_mesh = mesh.default_traffic_policy.connection_pool.as_ref();
    let of_rule = of_rule.and_then(|of_rule| of_rule.connection_pool);
    let effective = Effective { connection_pool: port.pool.or(of_rule).or(of_mesh), ..Default::default() };
    pool::apply(&mut made, mesh, effective.connection_pool);
    if let (Some((service, first)), pattern) = (service, &mesh.inbound_cluster_stat_name)
        && !pattern.is_empty()
    {
        let named = stat_names::StatNameVariables::of_port(service, first, port.port);
        made.alt_stat_name = format!("{};", named.fill(pattern));
    }
    let speech = ClusterProtocol::new(scope, port.protocol, &effective).without_upgrade();
    made.typed_extension_protocol_options = protocol::options(speech, &effective, None);
    made
}

/// Sets the destination that a Sidecar defines for one of the workload's own ports; empty: the original destination.
fn set_destination(made: &mut cluster::Cluster, view: &ProxyView, endpoint: &str) {
    let Some(endpoint) = IngressEndpoint::parse(endpoint) else { return };
    let address = match &endpoint {
        IngressEndpoint::Loopback(ip, port) => address(ip.to_string(), *port),
        // The address of an unknown pod is not known; a server for all addresses is reached here, too.
        IngressEndpoint::Workload(port) => {
            let loopback = if view.ipv4 || !view.ipv6 { "127.0.0.1" } else { "::1" };
            address(view.address.map_or_else(|| loopback.to_owned(), |ip| ip.to_string()), *port)
        }
        IngressEndpoint::Unix(path) => core::Address {
            address: Some(core::address::Address::Pipe(core::Pipe { path: path.clone(), mode: 0 })),
        },
    };
    if matches!(endpoint, IngressEndpoint::Loopback(..)) {
        made.upstream_bind_config = None;
    }
    made.cleanup_interval = None;
    made.lb_policy = LbPolicy::RoundRobin as i32;
    made.cluster_discovery_type = Some(ClusterDiscoveryType::Type(DiscoveryType::Static as i32));
    made.load_assignment = Some(endpoints::single(&made.name, address));
}

/// Returns a cluster that connects to a port of the workload at loopback.
fn localhost(name: String, view: &ProxyView, port: u16) -> cluster::Cluster {
    let loopback = if view.ipv4 || !view.ipv6 { "127.0.0.1" } else { "::1" };
    cluster::Cluster {
        load_assignment: Some(endpoints::single(&name, address(loopback, port))),
        circuit_breakers: Some(pool::unlimited()),
        ..base(name, DiscoveryType::Static)
    }
}

/// Returns the clusters of a service port: that of the whole service, then that of each subset.
pub(super) fn outbound(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    port: &ServicePort,
    rule: Option<&Typed<DestinationRule>>,
    form: ClusterForm,
) -> Vec<cluster::Cluster> {
    let host = service.fqdn();
    let whole = rule.map(|rule| Effective::of_rule(&rule.spec, port.port)).unwrap_or_default();
    let whole = whole.or(&scope.world.mesh().default_traffic_policy);
    let named = |subset| (ClusterName::outbound(port.port, subset, &host), form);
    let mut clusters = vec![outbound_cluster(scope, service, port, rule, named(""), &whole)];
    if let Some(rule) = rule {
        clusters.extend(rule.spec.subsets.iter().map(|subset| {
            let effective = whole.of_subset(subset, port.port);
            outbound_cluster(scope, service, port, Some(rule), named(&subset.name), &effective)
        }));
    }
    clusters
}

fn outbound_cluster(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    port: &ServicePort,
    rule: Option<&Typed<DestinationRule>>,
    (name, form): (ClusterName<'_>, ClusterForm),
    effective: &Effective<'_>,
) -> cluster::Cluster {
    let (subset, host, full_name) = (name.subset, name.host, form.name(&name));
    let balancer = effective.load_balancer;
    let simple = balancer.and_then(|balancer| balancer.simple);
    let entry_host = service.spec.entry_host.as_deref();
    let resolution = entry_host.map_or(Resolution::Static, |entry_host| entry_host.resolution);
    // As in istiod: connections to a gateway have its own address as their destination.
    let is_passed_through =
        (service.spec.headless || resolution == Resolution::None) && scope.role != Role::Router;
    let is_original_destination =
        is_passed_through || resolution == Resolution::DynamicDns || simple == Some(SimpleLb::Passthrough);
    let mut made = if is_original_destination {
        original_dst(&full_name)
    } else if resolution.is_dns() && !endpoints::are_resolved(scope, service) {
        dns(scope, &full_name, resolution)
    } else {
        eds(&full_name)
    };
    let is_dynamic = resolution == Resolution::DynamicDns;
    made.common_lb_config = (!is_dynamic).then(|| CommonLbConfig {
        healthy_panic_threshold: Some(types::Percent::default()),
        ..Default::default()
    });
    if let Some(common) = &mut made.common_lb_config {
        common.locality_config_specifier = locality::specifier(scope, service, effective);
    }
    if made.lb_policy != LbPolicy::ClusterProvided as i32 {
        balance::apply(&mut made, balancer);
    }
    pool::apply(&mut made, scope.world.mesh(), effective.connection_pool);
    if let Some(budget) = effective.retry_budget {
        pool::apply_retry_budget(&mut made, budget);
    }
    if let Some(outlier) = effective.outlier_detection {
        pool::apply_outlier_detection(&mut made, outlier);
    }
    // A gateway between networks forwards the TLS of its clients.
    let forwards = form == ClusterForm::Forwarded;
    let sends = !forwards && sends_credential(scope, rule, effective);
    let auto_sni = effective.tls.filter(|_| sends).and_then(auto_sni);
    let speech = ClusterProtocol::new(scope, port.protocol, effective);
    made.typed_extension_protocol_options = protocol::options(speech, effective, auto_sni);
    let pattern = &scope.world.mesh().outbound_cluster_stat_name;
    if !pattern.is_empty() {
        let named = stat_names::StatNameVariables {
            subset,
            target: 0,
            ..stat_names::StatNameVariables::of_port(service, port, 0)
        };
        made.alt_stat_name = format!("{};", named.fill(pattern));
    }
    if is_dynamic {
        let families = Families { ipv4: scope.ipv4, ipv6: scope.ipv6 };
        let has_options = !made.typed_extension_protocol_options.is_empty();
        dynamic_dns::resolve_hosts(&mut made, host, families, has_options);
    }
    if sends {
        apply_tls(scope, &mut made, service, port, &name, effective);
    }
    if let Some(protocol) = effective.proxy_protocol.filter(|_| !forwards) {
        send_proxy_protocol(&mut made, protocol);
    }
    let mut described = describe(std::iter::once(service), rule, subset);
    if is_dynamic {
        // As in istiod: the host of a request names the service.
        described.fields.remove("services");
    }
    if subset.is_empty() && entry_host.is_some_and(|entry_host| entry_host.external) {
        described.fields.insert("external".into(), istio::boolean(true));
    }
    if is_originated(effective) {
        // The server has no sidecar, so it would not know the protocols that `istio.alpn` offers.
        let no = ("alpn_override".to_owned(), istio::string("false"));
        described.fields.extend([no]);
    }
    made.metadata = Some(metadata("istio", described));
    made.filters = filters::of_cluster(scope.plain_envoy);
    made
}

fn base(name: String, kind: DiscoveryType) -> cluster::Cluster {
    cluster::Cluster {
        // The `;` ends the name, so that the tag extraction of statistics takes nothing beyond it.
        alt_stat_name: format!("{name};"),
        name,
        connect_timeout: Some(seconds(10)),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(kind as i32)),
        ..Default::default()
    }
}

fn original_dst(name: &str) -> cluster::Cluster {
    cluster::Cluster {
        lb_policy: LbPolicy::ClusterProvided as i32,
        circuit_breakers: Some(pool::unlimited()),
        ..base(name.to_owned(), DiscoveryType::OriginalDst)
    }
}

fn eds(name: &str) -> cluster::Cluster {
    cluster::Cluster {
        eds_cluster_config: Some(EdsClusterConfig {
            eds_config: Some(super::pb::from_ads()),
            service_name: name.to_owned(),
        }),
        circuit_breakers: Some(pool::unlimited()),
        ..base(name.to_owned(), DiscoveryType::Eds)
    }
}

/// Returns a cluster whose proxies resolve the names of its endpoints.
#[expect(deprecated, reason = "what istiod sends; the successor is not known by older proxies")]
fn dns(scope: &Scope<'_>, name: &str, resolution: Resolution) -> cluster::Cluster {
    let kind =
        if resolution == Resolution::Dns { DiscoveryType::StrictDns } else { DiscoveryType::LogicalDns };
    let family = Families { ipv4: scope.ipv4, ipv6: scope.ipv6 }.lookup();
    let cares = CaresDnsResolverConfig { udp_max_queries: uint32(DNS_UDP_QUERIES), ..Default::default() };
    cluster::Cluster {
        dns_refresh_rate: Some(duration(scope.world.mesh().dns_refresh_rate.0)),
        dns_jitter: Some(duration(DNS_JITTER)),
        respect_dns_ttl: true,
        dns_lookup_family: family as i32,
        typed_dns_resolver_config: Some(core::TypedExtensionConfig {
            name: "envoy.network.dns_resolver.cares".into(),
            typed_config: Some(pack(&cares)),
        }),
        circuit_breakers: Some(pool::unlimited()),
        ..base(name.to_owned(), kind)
    }
}

/// Returns whether the proxies resolve the names of a cluster's endpoints.
pub(super) fn is_resolved_by_proxies(cluster: &cluster::Cluster) -> bool {
    let kinds = [DiscoveryType::StrictDns, DiscoveryType::LogicalDns];
    kinds.iter().any(|kind| cluster.cluster_discovery_type == Some(ClusterDiscoveryType::Type(*kind as i32)))
}

/// Returns whether the DestinationRule originates TLS to a server without a sidecar.
fn is_originated(effective: &Effective<'_>) -> bool {
    effective.tls.is_some_and(|tls| matches!(tls.mode, ClientTlsMode::Simple | ClientTlsMode::Mutual))
}

/// Returns whether the cluster gets the TLS settings of the rule. As in Istio, sidecars get a `credentialName` only
/// from a rule for selected workloads: all others would wait for a Secret that they may not read. They connect in
/// plain text.
fn sends_credential(
    scope: &Scope<'_>,
    rule: Option<&Typed<DestinationRule>>,
    effective: &Effective<'_>,
) -> bool {
    let has_credential = effective.tls.is_some_and(|tls| !tls.credential_name.is_empty());
    let is_selected = rule.is_some_and(|rule| rule.spec.workload_selector.is_some());
    // Policies of Gateway API apply to all clients, and refer to roots that are no secret.
    let is_public = effective.tls.is_some_and(|tls| {
        tls.credential_name.starts_with(CONFIG_MAP) || tls.credential_name.starts_with(INVALID)
    });
    !(is_originated(effective) && has_credential) || scope.role == Role::Router || is_selected || is_public
}

/// Returns the options by which the server name, and the name that is verified, are the authority of the request.
fn auto_sni(tls: &ClientTls) -> Option<core::UpstreamHttpProtocolOptions> {
    let originates = matches!(tls.mode, ClientTlsMode::Simple | ClientTlsMode::Mutual);
    let verifies = tls.subject_alt_names.is_empty() && tls.insecure_skip_verify != Some(true);
    (originates && tls.sni.is_empty()).then(|| core::UpstreamHttpProtocolOptions {
        auto_sni: true,
        auto_san_validation: verifies,
        ..Default::default()
    })
}

/// Sets TLS as the DestinationRule defines it, otherwise mutual TLS to the endpoints with a sidecar.
fn apply_tls(
    scope: &Scope<'_>,
    made: &mut cluster::Cluster,
    service: &Typed<Service>,
    port: &ServicePort,
    name: &ClusterName<'_>,
    effective: &Effective<'_>,
) {
    let inside = protocol::inside_tls(ClusterProtocol::new(scope, port.protocol, effective));
    let names = service.spec.entry_host.as_deref().map_or(&[][..], |entry| &entry.subject_alt_names);
    let client = |settings: &ClientTls| {
        let own = scope.client_credential.filter(|_| settings.is_of_backend);
        Some(tls::client(scope.world.mesh(), settings, own, inside))
    };
    let mutual = |sni: &str| {
        let identities = scope.world.service_identities(service);
        tls::upstream(scope.world.mesh(), &identities, names, sni, inside, scope.plain_envoy)
    };
    match effective.tls {
        Some(settings) if settings.mode == ClientTlsMode::IstioMutual => {
            let sni = if settings.sni.is_empty() { name.sni() } else { settings.sni.clone() };
            made.transport_socket = Some(mutual(&sni));
        }
        Some(settings) if settings.mode == ClientTlsMode::Disable => {}
        // Names of the rule take precedence over those of the ServiceEntry.
        Some(settings) if settings.subject_alt_names.is_empty() && !names.is_empty() => {
            let settings = ClientTls { subject_alt_names: names.to_vec(), ..settings.clone() };
            made.transport_socket = client(&settings);
        }
        Some(settings) => {
            made.transport_socket = client(settings);
        }
        None if !scope.world.mesh().enable_auto_mtls => {}
        None if service.spec.entry_host.as_ref().is_some_and(|entry_host| entry_host.external) => {}
        // The endpoints of such a cluster have no metadata to choose by, so either all get mutual TLS or none.
        None if made.lb_policy == LbPolicy::ClusterProvided as i32 => {
            if endpoints::all_take_mtls(scope, service, port) {
                made.transport_socket = Some(mutual(&name.sni()));
            }
        }
        None => {
            made.transport_socket_matches = vec![
                socket_match("tlsMode-istio", [("tlsMode", istio::string("istio"))], mutual(&name.sni())),
                socket_match("tlsMode-disabled", [], tls::plaintext()),
            ];
        }
    }
}

/// Sends the PROXY protocol header before everything else on each connection.
fn send_proxy_protocol(made: &mut cluster::Cluster, protocol: &ProxyProtocol) {
    let is_v2 = protocol.version == "V2";
    for found in &mut made.transport_socket_matches {
        found.transport_socket =
            found.transport_socket.take().map(|inner| tls::with_proxy_protocol(inner, is_v2));
    }
    if made.transport_socket_matches.is_empty() {
        let inner = made.transport_socket.take().unwrap_or_else(tls::plaintext);
        made.transport_socket = Some(tls::with_proxy_protocol(inner, is_v2));
    }
}

fn socket_match<const N: usize>(
    name: &str,
    labels: [(&str, super::pb::Value); N],
    socket: core::TransportSocket,
) -> TransportSocketMatch {
    TransportSocketMatch {
        name: name.to_owned(),
        r#match: Some(fields(labels)),
        transport_socket: Some(socket),
    }
}

/// Returns the source address of inbound connections: IPv4 if the proxy has both families.
fn inbound_address(view: &ProxyView) -> &'static str {
    if view.ipv4 || !view.ipv6 { INBOUND_SOURCE_V4 } else { INBOUND_SOURCE_V6 }
}

fn inbound_source(view: &ProxyView) -> core::BindConfig {
    let both = view.ipv4 && view.ipv6;
    let extra =
        core::ExtraSourceAddress { address: Some(socket(INBOUND_SOURCE_V6, 0)), ..Default::default() };
    core::BindConfig {
        source_address: Some(socket(inbound_address(view), 0)),
        extra_source_addresses: both.then_some(extra).into_iter().collect(),
        ..Default::default()
    }
}

/// Adds the services, rule and subset of a cluster to its metadata, for metrics and people.
fn describe<'a>(
    services: impl Iterator<Item = &'a Typed<Service>>,
    rule: Option<&Typed<DestinationRule>>,
    subset: &str,
) -> Struct {
    let list = services.map(|service| {
        istio::structure([
            ("host", istio::string(service.fqdn())),
            ("name", istio::string(&service.meta.name)),
            ("namespace", istio::string(&service.meta.namespace)),
        ])
    });
    let mut described = fields([("services", istio::list(list))]);
    if let Some(rule) = rule {
        let path = config_path("destination-rule", &rule.meta.namespace, &rule.meta.name);
        described.fields.insert("config".into(), path);
    }
    if !subset.is_empty() {
        described.fields.insert("subset".into(), istio::string(subset));
    }
    described
}
