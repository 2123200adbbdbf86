//! What istiod was recorded to send is taken, and means what it says; what is not supported is refused by name.

use std::{fs, io::Read as _, path::PathBuf, sync::Arc};

use skysail_xds::envoy::pb::envoy::{
    config::{
        cluster::v3::{
            OutlierDetection,
            cluster::{
                ClusterDiscoveryType, CommonLbConfig, DiscoveryType, LbConfig, LbPolicy, MaglevLbConfig,
                RingHashLbConfig, common_lb_config::ConsistentHashingLbConfig,
            },
        },
        core::v3::{Address, SocketAddress, address, socket_address::PortSpecifier},
        endpoint::v3::{
            Endpoint as EndpointProto, LbEndpoint, LocalityLbEndpoints, lb_endpoint::HostIdentifier,
        },
        listener::v3::{Filter, FilterChain as ChainProto, filter},
        route::v3::{
            Route as RouteProto, RouteAction, RouteMatch, VirtualHost, route, route_action, route_match,
        },
    },
    service::discovery::v3::DiscoveryResponse,
};

use super::*;
use crate::config::{
    cluster::{Balancer, Discovery, HashFunction, Keepalive, Limits, RetryBudget},
    health::{Limit, SlowStart},
    http::{self, Does, Part},
    listener::{Terminal, Transport},
    route::{Action, Targets},
};

mod protocols;

/// The recorded scenarios that everything must be taken of.
const TAKEN: [&str; 9] = [
    "a-bookinfo",
    "b-mtls-all-v1",
    "c-reviews-test-v2",
    "d-fault-abort",
    "d-fault-delay",
    "e-reviews-50-v3",
    "f-strict-authz",
    "o-virtualservice-features",
    "f2-authz-deny-custom-ports",
];

fn recordings() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/istiod")
}

fn recorded(proxy: &std::path::Path, kind: &str) -> Vec<Vec<u8>> {
    // A gateway without a Gateway asks for no routes.
    let Ok(file) = fs::File::open(proxy.join(format!("{kind}.sotw.pb.gz"))) else { return Vec::new() };
    let mut body = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut body).unwrap();
    let response = DiscoveryResponse::decode(body.as_slice()).unwrap();
    response.resources.into_iter().map(|any| any.value).collect()
}

fn with<T>(strict: bool, work: impl FnOnce(Translator<'_>) -> T) -> T {
    let tls = TlsContexts::default();
    work(Translator { tls: &tls, strict })
}

/// Everything one proxy was sent.
struct Sent {
    clusters: Vec<Cluster>,
    listeners: Vec<Listener>,
    routes: Vec<RouteTable>,
}

fn translate_all(scenario: &str, proxy: &str) -> Sent {
    let folder = recordings().join(scenario).join("xds").join(proxy);
    with(false, |translator| {
        let clusters: Vec<_> =
            recorded(&folder, "cds").iter().map(|body| translator.cluster(body).unwrap()).collect();
        for body in recorded(&folder, "eds") {
            let name = ClusterLoadAssignment::decode(body.as_slice()).unwrap().cluster_name;
            let user = clusters.iter().find(|cluster| *cluster.name == *name).unwrap();
            user.endpoints.store(Arc::new(translator.endpoints(&body, user).unwrap()));
        }
        Sent {
            clusters,
            listeners: recorded(&folder, "lds")
                .iter()
                .map(|body| translator.listener(body).unwrap())
                .collect(),
            routes: recorded(&folder, "rds").iter().map(|body| translator.routes(body).unwrap()).collect(),
        }
    })
}

#[test]
fn everything_recorded_is_taken() {
    let (mut taken, mut refused) = (0, Vec::new());
    for scenario in TAKEN {
        for proxy in fs::read_dir(recordings().join(scenario).join("xds")).unwrap() {
            let proxy = proxy.unwrap().path();
            for kind in ["cds", "lds", "rds"] {
                for body in recorded(&proxy, kind) {
                    let outcome = with(false, |translator| match kind {
                        "cds" => translator.cluster(&body).map(drop),
                        "lds" => translator.listener(&body).map(drop),
                        _ => translator.routes(&body).map(drop),
                    });
                    match outcome {
                        Ok(()) => taken += 1,
                        Err(reject) => refused.push(format!("{scenario}: {reject}")),
                    }
                }
            }
        }
    }
    assert!(taken > 400, "{taken}");
    assert!(refused.is_empty(), "{refused:#?}");
}

#[test]
fn a_sidecars_configuration_means_what_it_says() {
    let sent = translate_all("a-bookinfo", "productpage-v1");
    let cluster = |name: &str| sent.clusters.iter().find(|cluster| *cluster.name == *name).unwrap();
    let reviews = cluster("outbound|9080||reviews.default.svc.cluster.local");
    assert_eq!(reviews.discovery, Discovery::Eds(Arc::clone(&reviews.name)));
    assert_eq!(reviews.balancer, Balancer::LeastRequest { choices: 2, bias: 1.0 });
    assert_eq!(reviews.limits, Limits::NONE);
    assert_eq!(&*reviews.service.as_ref().unwrap().name, "reviews");
    assert!(reviews.metadata_exchange);
    let endpoints = reviews.endpoints.load();
    let first = &endpoints.priorities[0][0];
    assert!(first.tls.is_some(), "the pods have sidecars");
    let workload = first.workload.as_ref().unwrap();
    assert_eq!((&*workload.namespace, &*workload.cluster), ("default", "Kubernetes"));
    let inbound = cluster("inbound|9080||");
    assert_eq!(inbound.balancer, Balancer::OriginalDst);
    assert_eq!(inbound.source, Some("127.0.0.6".parse().unwrap()));

    let listener = |name: &str| sent.listeners.iter().find(|listener| *listener.name == *name).unwrap();
    assert!(listener("virtualOutbound").use_original_dst && listener("virtualOutbound").bind);
    let inbound = listener("virtualInbound");
    assert!(inbound.read_original_dst && inbound.inspect_tls.is_some());
    let except = &inbound.inspect_http.as_ref().unwrap().except;
    assert!(except.contains(&(9080..=9080)), "{except:?}");
    assert_eq!(inbound.inspect_timeout, None, "0s waits for ever");
    let app = inbound.chains.iter().find(|chain| {
        chain.matches.destination_port == Some(9080) && chain.matches.transport == Some(Transport::Tls)
    });
    let app = app.unwrap();
    assert!(app.metadata_exchange && app.tls.is_some());
    let Terminal::Http(manager) = &app.terminal else { panic!("not HTTP") };
    assert!(manager.stats && manager.metadata_exchange.is_some());
    assert!(matches!(
        &manager.filters[..],
        [http::Filter { does: Does::Fault(_), .. }, http::Filter { does: Does::Cors, .. }]
    ));
    let outbound = listener("0.0.0.0_9080");
    assert!(!outbound.bind && outbound.default_chain.is_some());

    let table = sent.routes.iter().find(|table| &*table.name == "9080").unwrap();
    let index = table.exact["reviews.default.svc.cluster.local"];
    let Action::Forward(forward) = &table.hosts[index].routes[0].action else { panic!("not forwarded") };
    assert!(matches!(&forward.targets, Targets::Single(name) if *name == reviews.name));
    assert_eq!(forward.timeout, None);
    let retry = forward.retry.as_ref().unwrap();
    assert!(retry.avoid_previous && retry.on.connect_failure && retry.retries == 2);
    assert!(table.any.is_some() && table.ignore_port);
}

#[test]
fn secrets_make_contexts_usable() {
    let certificates = certificates();
    let folder = recordings().join("a-bookinfo/xds/productpage-v1");
    let tls = TlsContexts::default();
    let translator = Translator { tls: &tls, strict: false };
    let clusters: Vec<_> =
        recorded(&folder, "cds").iter().map(|body| translator.cluster(body).unwrap()).collect();
    let contexts: Vec<_> = clusters
        .iter()
        .flat_map(|cluster| &cluster.transport_matches)
        .filter_map(|m| m.tls.as_ref())
        .collect();
    assert!(!contexts.is_empty() && contexts.iter().all(|context| !client_ready(context)));
    let names: Vec<_> = tls.names().into_iter().map(|name| name.name).collect();
    assert_eq!(names, ["ROOTCA".into(), "default".into()] as [Box<str>; 2]);
    for name in tls.names() {
        take_secret(&tls, &name, &secret_named(&name.name, &certificates)).unwrap();
    }
    tls.refresh().unwrap();
    assert!(contexts.iter().all(|context| client_ready(context)));
    let configs = contexts[0].config.load_full().unwrap();
    assert_eq!(configs.istio_http1.alpn(), [&b"istio-http/1.1"[..], b"istio", b"http/1.1"]);
}

/// The mesh's root and a workload's certificate and key, all PEM.
fn certificates() -> [String; 3] {
    let authority = skysail_identity::Authority::ephemeral().unwrap();
    let request = skysail_identity::KeyAndCsr::generate(None).unwrap();
    let id = skysail_core::SpiffeId::new("cluster.local", "default", "reviews");
    let signed = authority.sign(&request.csr_pem, &id, Duration::from_secs(3600)).unwrap();
    [authority.root_pem().to_owned(), signed.pem(), request.key_pem()]
}

fn secret_named(name: &str, [root, chain, key]: &[String; 3]) -> Secret {
    use skysail_xds::envoy::pb::envoy::{
        config::core::v3::{DataSource, data_source::Specifier},
        extensions::transport_sockets::tls::v3::{CertificateValidationContext, TlsCertificate},
    };
    let text = |text: &str| {
        Some(DataSource {
            specifier: Some(Specifier::InlineString(text.to_owned())),
            ..DataSource::default()
        })
    };
    let kind = match name {
        "ROOTCA" => secret::Type::ValidationContext(CertificateValidationContext {
            trusted_ca: text(root),
            ..CertificateValidationContext::default()
        }),
        _ => secret::Type::TlsCertificate(TlsCertificate {
            certificate_chain: text(chain),
            private_key: text(key),
            ..TlsCertificate::default()
        }),
    };
    Secret { name: name.to_owned(), r#type: Some(kind) }
}

fn cluster_proto(kind: DiscoveryType) -> ClusterProto {
    ClusterProto {
        name: "c".to_owned(),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(kind.into())),
        ..ClusterProto::default()
    }
}

#[test]
fn fields_without_support_are_refused_with_their_path() {
    let refusal = |proto: ClusterProto| {
        with(false, |translator| translator.cluster(&proto.encode_to_vec())).unwrap_err().to_string()
    };
    let mut proto = cluster_proto(DiscoveryType::Static);
    proto.common_lb_config = Some(CommonLbConfig {
        consistent_hashing_lb_config: Some(ConsistentHashingLbConfig::default()),
        ..CommonLbConfig::default()
    });
    let reason = refusal(proto);
    assert!(reason.contains("consistent_hashing_lb_config") && reason.contains("take it out"), "{reason}");

    let mut proto = cluster_proto(DiscoveryType::Static);
    proto.set_lb_policy(LbPolicy::LoadBalancingPolicyConfig);
    let reason = refusal(proto);
    assert!(reason.starts_with("lb_policy: LOAD_BALANCING_POLICY_CONFIG is not supported here"), "{reason}");

    let unknown = Any { type_url: "type.googleapis.com/acme.Filter".to_owned(), value: Vec::new() };
    let filter =
        Filter { name: "acme".to_owned(), config_type: Some(filter::ConfigType::TypedConfig(unknown)) };
    let proto = ListenerProto {
        name: "l".to_owned(),
        address: Some(address_proto("127.0.0.1", 80)),
        filter_chains: vec![ChainProto { filters: vec![filter], ..ChainProto::default() }],
        ..ListenerProto::default()
    };
    let reason =
        with(false, |translator| translator.listener(&proto.encode_to_vec())).unwrap_err().to_string();
    assert_eq!(
        reason,
        "filter_chains[0].filters[0]: skysail-proxy has no network filter \"acme\" of type acme.Filter: take it out"
    );
}

#[test]
fn what_istio_may_send_without_effect_is_refused_in_a_file() {
    let refused = |proto: ClusterProto| {
        let body = proto.encode_to_vec();
        with(false, |translator| translator.cluster(&body)).unwrap();
        with(true, |translator| translator.cluster(&body)).unwrap_err().to_string()
    };
    let mut proto = cluster_proto(DiscoveryType::Static);
    proto.health_checks.push(Default::default());
    let reason = refused(proto);
    assert!(reason.contains("health_checks"), "{reason}");
    let mut proto = by_discovery();
    proto.load_assignment = Some(ClusterLoadAssignment::default());
    let reason = refused(proto);
    assert!(reason.starts_with("load_assignment: a cluster of type EDS"), "{reason}");
}

fn by_discovery() -> ClusterProto {
    use skysail_xds::envoy::pb::envoy::config::{
        cluster::v3::cluster::EdsClusterConfig,
        core::v3::{AggregatedConfigSource, ConfigSource, config_source::ConfigSourceSpecifier},
    };
    let ads = ConfigSourceSpecifier::Ads(AggregatedConfigSource::default());
    let source = ConfigSource { config_source_specifier: Some(ads), ..ConfigSource::default() };
    let config = EdsClusterConfig { eds_config: Some(source), ..EdsClusterConfig::default() };
    ClusterProto { eds_cluster_config: Some(config), ..cluster_proto(DiscoveryType::Eds) }
}

#[test]
fn original_destinations_go_with_nothing_else() {
    let outcome = |proto: &ClusterProto| {
        let body = proto.encode_to_vec();
        with(false, |translator| translator.cluster(&body)).map_err(|reject| reject.to_string())
    };
    let mut original = cluster_proto(DiscoveryType::OriginalDst);
    for policy in [LbPolicy::RoundRobin, LbPolicy::LeastRequest, LbPolicy::Random, LbPolicy::Maglev] {
        original.set_lb_policy(policy);
        let reason = outcome(&original).unwrap_err();
        let expected = format!("lb_policy {} does not go with type ORIGINAL_DST", policy.as_str_name());
        assert!(reason.starts_with(&expected), "{reason}");
    }
    original.set_lb_policy(LbPolicy::ClusterProvided);
    assert_eq!(outcome(&original).unwrap().balancer, Balancer::OriginalDst);
    original.load_assignment = Some(ClusterLoadAssignment::default());
    let reason = outcome(&original).unwrap_err();
    assert!(reason.starts_with("load_assignment: a cluster of type ORIGINAL_DST"), "{reason}");
    for kind in [DiscoveryType::Static, DiscoveryType::StrictDns, DiscoveryType::LogicalDns] {
        let mut other = cluster_proto(kind);
        other.set_lb_policy(LbPolicy::ClusterProvided);
        let reason = outcome(&other).unwrap_err();
        assert!(reason.starts_with("lb_policy: CLUSTER_PROVIDED is not supported here"), "{reason}");
    }
}

fn address_proto(host: &str, port: u32) -> Address {
    Address {
        address: Some(address::Address::SocketAddress(SocketAddress {
            address: host.to_owned(),
            port_specifier: Some(PortSpecifier::PortValue(port)),
            ..SocketAddress::default()
        })),
    }
}

fn locality(share: u32, hosts: &[&str]) -> LocalityLbEndpoints {
    let endpoint = |host: &&str| LbEndpoint {
        host_identifier: Some(HostIdentifier::Endpoint(EndpointProto {
            address: Some(address_proto(host, 80)),
            ..EndpointProto::default()
        })),
        ..LbEndpoint::default()
    };
    LocalityLbEndpoints {
        lb_endpoints: hosts.iter().map(endpoint).collect(),
        load_balancing_weight: Some(UInt32Value { value: share }),
        ..LocalityLbEndpoints::default()
    }
}

#[test]
fn outliers_and_slow_starts_are_taken_with_envoys_defaults() {
    let sent = recorded(&recordings().join("n-destinationrule-policies/xds/productpage-v1"), "cds");
    let named = |name: &str| {
        let name = format!("outbound|9080||{name}.default.svc.cluster.local");
        let body = sent.iter().find(|body| ClusterProto::decode(body.as_slice()).unwrap().name == name);
        with(false, |translator| translator.cluster(body.unwrap())).unwrap()
    };
    let reviews = named("reviews");
    assert_eq!(reviews.panic_threshold, 40);
    let slow_start = SlowStart { window: Duration::from_secs(30), aggression: 1.5, least: 0.1 };
    assert_eq!(reviews.slow_start, Some(slow_start));
    assert_eq!(reviews.max_connection_duration, Some(Duration::from_secs(3600)));
    assert_eq!(reviews.http2.max_streams, 64);
    assert!(reviews.http2.keepalive.is_none());
    let outlier = reviews.outlier.unwrap();
    assert_eq!(outlier.consecutive_5xx, Limit { number: 5, enforcing: 100 });
    assert_eq!(outlier.consecutive_gateway_failure, Limit { number: 3, enforcing: 100 });
    assert_eq!(outlier.success_rate.enforcing, 0);
    assert_eq!((outlier.interval, outlier.base_ejection), (Duration::from_secs(10), Duration::from_secs(30)));
    assert_eq!(
        (outlier.max_ejection, outlier.max_percent, outlier.split),
        (Duration::from_secs(300), 50, false)
    );
    let ratings = named("ratings");
    let function = HashFunction::Xx;
    assert_eq!(ratings.balancer, Balancer::RingHash { minimum: 1024, maximum: 8_388_608, function });
    assert!(ratings.outlier.is_none() && ratings.slow_start.is_none());
    assert_eq!(named("details").balancer, Balancer::Maglev(1009));

    let mut proto = cluster_proto(DiscoveryType::Static);
    let value = UInt32Value { value: 101 };
    proto.outlier_detection =
        Some(OutlierDetection { max_ejection_percent: Some(value), ..OutlierDetection::default() });
    let reason = with(true, |translator| translator.cluster(&proto.encode_to_vec())).unwrap_err().to_string();
    assert_eq!(reason, "outlier_detection.max_ejection_percent: must be at most 100");
}

#[test]
fn balancers_may_be_extensions() {
    use skysail_xds::envoy::pb::envoy::{
        config::{
            cluster::v3::{LoadBalancingPolicy, load_balancing_policy::Policy},
            core::v3::TypedExtensionConfig,
        },
        extensions::load_balancing_policies::{
            least_request::v3::LeastRequest, ring_hash::v3::RingHash, wrr_locality::v3::WrrLocality,
        },
    };
    fn policy<M: Message + Name>(message: &M) -> LoadBalancingPolicy {
        let typed_config = Some(Any {
            type_url: format!("type.googleapis.com/{}", M::full_name()),
            value: message.encode_to_vec(),
        });
        let extension = TypedExtensionConfig { name: "a".to_owned(), typed_config };
        LoadBalancingPolicy { policies: vec![Policy { typed_extension_config: Some(extension) }] }
    }
    let taken = |policy| {
        let mut proto = cluster_proto(DiscoveryType::Static);
        proto.load_balancing_policy = Some(policy);
        let body = proto.encode_to_vec();
        let made = with(true, |translator| translator.cluster(&body)).map_err(|reject| reject.to_string());
        made.map(|cluster| (cluster.balancer, cluster.weigh_localities))
    };
    let least = LeastRequest { choice_count: Some(UInt32Value { value: 3 }), ..LeastRequest::default() };
    assert_eq!(taken(policy(&least)), Ok((Balancer::LeastRequest { choices: 3, bias: 1.0 }, false)));
    let within = WrrLocality { endpoint_picking_policy: Some(policy(&least)) };
    assert_eq!(taken(policy(&within)), Ok((Balancer::LeastRequest { choices: 3, bias: 1.0 }, true)));
    let ring = Balancer::RingHash { minimum: 1024, maximum: 8_388_608, function: HashFunction::Xx };
    assert_eq!(taken(policy(&RingHash::default())), Ok((ring, false)));
    let named = RingHash { consistent_hashing_lb_config: Some(Default::default()), ..RingHash::default() };
    let reason = taken(policy(&named)).unwrap_err();
    assert!(reason.contains("consistent_hashing_lb_config") && reason.contains("take it out"), "{reason}");
    let reason = taken(policy(&Any::default())).unwrap_err();
    let expected =
        "load_balancing_policy.policies[0].typed_extension_config.typed_config: skysail-proxy has no";
    assert!(reason.starts_with(expected), "{reason}");
}

#[test]
fn pools_are_taken_with_envoys_defaults() {
    use skysail_xds::envoy::pb::{
        envoy::config::{
            cluster::v3::{
                CircuitBreakers, UpstreamConnectionOptions,
                circuit_breakers::{Thresholds, thresholds::RetryBudget as BudgetProto},
            },
            core::v3::TcpKeepalive,
        },
        envoy::r#type::v3::Percent,
    };
    let some = |value| Some(UInt32Value { value });
    let taken = |proto: ClusterProto| {
        let body = proto.encode_to_vec();
        with(true, |translator| translator.cluster(&body)).map_err(|reject| reject.to_string())
    };
    let mut proto = cluster_proto(DiscoveryType::Static);
    let budget = BudgetProto { budget_percent: Some(Percent { value: 12.5 }), ..BudgetProto::default() };
    proto.circuit_breakers = Some(CircuitBreakers {
        thresholds: vec![Thresholds { retry_budget: Some(budget), ..Thresholds::default() }],
        per_host_thresholds: vec![Thresholds { max_connections: some(4), ..Thresholds::default() }],
    });
    let keepalive = TcpKeepalive { keepalive_time: some(70), ..TcpKeepalive::default() };
    proto.upstream_connection_options = Some(UpstreamConnectionOptions {
        tcp_keepalive: Some(keepalive),
        ..UpstreamConnectionOptions::default()
    });
    let cluster = taken(proto.clone()).unwrap();
    assert_eq!(cluster.limits.budget, Some(RetryBudget { share: 125_000, least: 3 }));
    assert_eq!((cluster.limits.connections_per_host, cluster.limits.connections), (4, 1024));
    let time = Some(Duration::from_secs(70));
    assert_eq!(cluster.keepalive, Some(Keepalive { time, ..Keepalive::default() }));
    proto.circuit_breakers.as_mut().unwrap().per_host_thresholds[0].max_requests = some(4);
    let reason = taken(proto).unwrap_err();
    assert_eq!(reason, "circuit_breakers.per_host_thresholds: only max_connections is supported");
}

#[test]
fn balancers_that_hash_have_sizes() {
    use skysail_xds::envoy::pb::google::protobuf::UInt64Value;
    let outcome = |policy, config| {
        let mut proto = cluster_proto(DiscoveryType::Static);
        proto.set_lb_policy(policy);
        proto.lb_config = config;
        let body = proto.encode_to_vec();
        with(true, |translator| translator.cluster(&body)).map_err(|reject| reject.to_string())
    };
    let some = |value| Some(UInt64Value { value });
    let ring = |minimum_ring_size, maximum_ring_size| {
        let config = RingHashLbConfig { minimum_ring_size, maximum_ring_size, hash_function: 1 };
        outcome(LbPolicy::RingHash, Some(LbConfig::RingHashLbConfig(config))).map(|cluster| cluster.balancer)
    };
    let function = HashFunction::Murmur2;
    assert_eq!(ring(None, None), Ok(Balancer::RingHash { minimum: 1024, maximum: 8_388_608, function }));
    assert_eq!(ring(some(7), some(9)), Ok(Balancer::RingHash { minimum: 7, maximum: 9, function }));
    let reason = ring(some(7), some(6)).unwrap_err();
    assert_eq!(reason, "ring_hash_lb_config.minimum_ring_size: must be at most maximum_ring_size, 6");
    assert!(ring(some(1 << 40), None).unwrap_err().contains("must be at most 8388608"));
    let maglev = |table_size| {
        let config = MaglevLbConfig { table_size };
        outcome(LbPolicy::Maglev, Some(LbConfig::MaglevLbConfig(config))).map(|cluster| cluster.balancer)
    };
    assert_eq!(maglev(None), Ok(Balancer::Maglev(65_537)));
    assert_eq!(maglev(some(1009)), Ok(Balancer::Maglev(1009)));
    for bad in [0, 1, 1024, 5_000_012] {
        let reason = maglev(some(bad)).unwrap_err();
        assert_eq!(reason, "maglev_lb_config.table_size: must be a prime number of at most 5000011");
    }
}

#[test]
fn endpoints_know_their_locality() {
    let body = ClusterLoadAssignment {
        cluster_name: "c".to_owned(),
        endpoints: vec![locality(80, &["10.0.0.1"]), locality(20, &["10.0.1.1", "10.0.1.2"])],
        ..ClusterLoadAssignment::default()
    }
    .encode_to_vec();
    with(false, |translator| {
        let cluster = translator.cluster(&cluster_proto(DiscoveryType::Static).encode_to_vec()).unwrap();
        let endpoints = translator.endpoints(&body, &cluster).unwrap();
        let localities: Vec<_> = endpoints.iter().map(|endpoint| endpoint.locality).collect();
        assert_eq!(localities, [0, 1, 1]);
        let weights: Vec<_> = endpoints.localities.iter().map(|locality| locality.weight).collect();
        assert_eq!(weights, [80, 20]);
    });
}

#[test]
fn formats_split_into_operators() {
    let format = text::format("a%%b [%START_TIME%] %REQ(X-A?:PATH):10%").unwrap();
    let parts: Vec<String> = format
        .parts
        .iter()
        .map(|part| match part {
            Part::Text(text) => text.to_string(),
            Part::Operator { name, argument, max_len } => format!("{name} {argument:?} {max_len:?}"),
        })
        .collect();
    assert_eq!(parts, ["a%b [", "START_TIME None None", "] ", "REQ Some(\"X-A?:PATH\") Some(10)"]);
    for bad in ["%", "%REQ", "%REQ(x%", "%nope%", "%ACME%", "%REQ(x):y%"] {
        assert!(text::format(bad).is_err(), "{bad}");
    }
}

#[test]
fn domains_are_indexed_and_must_be_unique() {
    let host = |name: &str, domains: &[&str]| VirtualHost {
        name: name.to_owned(),
        domains: domains.iter().map(|&domain| domain.to_owned()).collect(),
        routes: vec![RouteProto {
            r#match: Some(RouteMatch {
                path_specifier: Some(route_match::PathSpecifier::Prefix("/".to_owned())),
                ..RouteMatch::default()
            }),
            action: Some(route::Action::Route(RouteAction {
                cluster_specifier: Some(route_action::ClusterSpecifier::Cluster("c".to_owned())),
                ..RouteAction::default()
            })),
            ..RouteProto::default()
        }],
        ..VirtualHost::default()
    };
    let table = |hosts| {
        let proto = RouteConfiguration { virtual_hosts: hosts, ..RouteConfiguration::default() };
        with(false, |translator| translator.routes(&proto.encode_to_vec()))
    };
    let good = table(vec![host("a", &["A.b", "*.c.d", "*.x.c.d", "w.*"]), host("any", &["*"])]).unwrap();
    assert_eq!((good.exact["a.b"], good.any), (0, Some(1)));
    assert_eq!(good.suffixes.iter().map(|(text, _)| &**text).collect::<Vec<_>>(), [".x.c.d", ".c.d"]);
    assert_eq!(&*good.prefixes[0].0, "w.");
    let reason = table(vec![host("a", &["x"]), host("b", &["X"])]).unwrap_err().to_string();
    assert!(reason.starts_with("virtual_hosts[1].domains:"), "{reason}");
}

#[test]
fn a_new_host_must_be_one() {
    let table = |host: &str| {
        let action = RouteAction {
            cluster_specifier: Some(route_action::ClusterSpecifier::Cluster("c".to_owned())),
            host_rewrite_specifier: Some(route_action::HostRewriteSpecifier::HostRewriteLiteral(
                host.to_owned(),
            )),
            ..RouteAction::default()
        };
        let route = RouteProto {
            r#match: Some(RouteMatch {
                path_specifier: Some(route_match::PathSpecifier::Prefix("/".to_owned())),
                ..RouteMatch::default()
            }),
            action: Some(route::Action::Route(action)),
            ..RouteProto::default()
        };
        let host =
            VirtualHost { domains: vec!["*".to_owned()], routes: vec![route], ..VirtualHost::default() };
        let proto = RouteConfiguration { virtual_hosts: vec![host], ..RouteConfiguration::default() };
        with(false, |translator| translator.routes(&proto.encode_to_vec()))
    };
    table("b.example:80").unwrap();
    table("").unwrap();
    for host in ["b c", "b\r\nx: y", "b/c"] {
        let reason = table(host).unwrap_err().to_string();
        assert!(reason.contains("host_rewrite_literal: ") && reason.ends_with("is not a host"), "{reason}");
    }
}

#[test]
fn path_templates_match_segments() {
    let matches =
        |template: &str, path: &str| policy::template_regex(template).unwrap().is_match(path.as_bytes());
    assert!(matches("/a/{*}/c", "/a/b/c") && !matches("/a/{*}/c", "/a/b/b/c"));
    assert!(matches("/a/{**}", "/a/b/c") && !matches("/a/{**}", "/b"));
    assert!(matches("/v{n=*}.x", "/v1.x") && !matches("/v{n=*}.x", "/v1-x"));
    assert!(policy::template_regex("/{").is_err());
}

#[test]
fn no_duration_is_too_long_for_a_clock() {
    let longest = DurationProto { seconds: i64::MAX, nanos: i32::MAX };
    let time = super::duration(&longest).unwrap();
    assert!(std::time::Instant::now().checked_add(time).is_some());
    assert!(super::duration(&DurationProto { seconds: -1, nanos: 0 }).is_err());
}
