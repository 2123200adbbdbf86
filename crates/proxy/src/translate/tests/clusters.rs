//! Translation of clusters and their endpoints.

use skysail_xds::{
    envoy::pb::envoy::extensions::transport_sockets::tls::v3::UpstreamTlsContext, istio::PeakEwma,
};

use super::*;

#[test]
fn original_destination_clusters_exclude_other_settings() {
    let outcome = |proto: &ClusterProto| {
        let body = proto.encode_to_vec();
        with(false, |translator| translator.cluster(&body)).map_err(|reject| reject.to_string())
    };
    let mut original = cluster_proto(DiscoveryType::OriginalDst);
    for policy in [LbPolicy::RoundRobin, LbPolicy::LeastRequest, LbPolicy::Random, LbPolicy::Maglev] {
        original.set_lb_policy(policy);
        let reason = outcome(&original).unwrap_err();
        let expected = format!("lb_policy {} is not allowed with type ORIGINAL_DST", policy.as_str_name());
        assert!(reason.starts_with(&expected), "{reason}");
    }
    original.set_lb_policy(LbPolicy::ClusterProvided);
    assert_eq!(outcome(&original).unwrap().balancer, Balancer::OriginalDst);
    original.load_assignment =
        Some(ClusterLoadAssignment { cluster_name: "a".to_owned(), ..ClusterLoadAssignment::default() });
    let reason = outcome(&original).unwrap_err();
    assert!(reason.starts_with("load_assignment: a cluster of type ORIGINAL_DST"), "{reason}");
    for kind in [DiscoveryType::Static, DiscoveryType::StrictDns] {
        let mut other = cluster_proto(kind);
        other.set_lb_policy(LbPolicy::ClusterProvided);
        let reason = outcome(&other).unwrap_err();
        assert!(reason.starts_with("lb_policy: CLUSTER_PROVIDED is not supported here"), "{reason}");
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
fn outlier_detection_and_slow_start_have_envoys_defaults() {
    let sent = recorded(&recordings().join("n-destinationrule-policies/xds/productpage-v1"), "cds");
    let named = |name: &str| {
        let name = format!("outbound|9080||{name}.default.svc.cluster.local");
        let body = sent.iter().find(|body| ClusterProto::decode(body.as_slice()).unwrap().name == name);
        with(false, |translator| translator.cluster(body.unwrap())).unwrap()
    };
    let reviews = named("reviews");
    assert_eq!(reviews.panic_threshold, 40);
    let slow_start = SlowStart { window: Duration::from_secs(30), aggression: 1.5, min: 0.1 };
    assert_eq!(reviews.slow_start, Some(slow_start));
    assert_eq!(reviews.max_connection_duration, Some(Duration::from_secs(3600)));
    assert_eq!(reviews.http2.max_streams, 64);
    assert!(reviews.http2.keepalive.is_none());
    let outlier = reviews.outlier.unwrap();
    assert_eq!(outlier.consecutive_5xx, ConsecutiveLimit { number: 5, enforcing: 100 });
    assert_eq!(outlier.consecutive_gateway_failure, ConsecutiveLimit { number: 3, enforcing: 100 });
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
fn load_balancing_policies_may_be_extensions() {
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
    let expected = |policy| {
        let mut proto = cluster_proto(DiscoveryType::Static);
        proto.load_balancing_policy = Some(policy);
        let body = proto.encode_to_vec();
        let made = with(true, |translator| translator.cluster(&body)).map_err(|reject| reject.to_string());
        made.map(|cluster| (cluster.balancer, cluster.locality_weighted))
    };
    let min = LeastRequest { choice_count: Some(UInt32Value { value: 3 }), ..LeastRequest::default() };
    assert_eq!(expected(policy(&min)), Ok((Balancer::LeastRequest { choices: 3, bias: 1.0 }, false)));
    let within = WrrLocality { endpoint_picking_policy: Some(policy(&min)) };
    assert_eq!(expected(policy(&within)), Ok((Balancer::LeastRequest { choices: 3, bias: 1.0 }, true)));
    let ring = Balancer::RingHash { minimum: 1024, maximum: 8_388_608, function: HashFunction::Xx };
    assert_eq!(expected(policy(&RingHash::default())), Ok((ring, false)));
    let usual = Balancer::PeakEwma { decay: Duration::from_secs(10), unknown: Duration::from_millis(10) };
    assert_eq!(expected(policy(&PeakEwma::default())), Ok((usual, false)));
    let named = RingHash { consistent_hashing_lb_config: Some(Default::default()), ..RingHash::default() };
    let reason = expected(policy(&named)).unwrap_err();
    assert!(reason.contains("consistent_hashing_lb_config") && reason.contains("remove it"), "{reason}");
    let reason = expected(policy(&Any::default())).unwrap_err();
    let expected =
        "load_balancing_policy.policies[0].typed_extension_config.typed_config: skysail-proxy has no";
    assert!(reason.starts_with(expected), "{reason}");
}

#[test]
fn connection_pools_have_envoys_defaults() {
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
    let expected = |proto: ClusterProto| {
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
    let cluster = expected(proto.clone()).unwrap();
    assert_eq!(cluster.limits.budget, Some(RetryBudget { share: 125_000, min: 3, interval: None }));
    assert_eq!((cluster.limits.connections_per_host, cluster.limits.connections), (4, 1024));
    let time = Some(Duration::from_secs(70));
    assert_eq!(cluster.keepalive, Some(Keepalive { time, ..Keepalive::default() }));
    proto.circuit_breakers.as_mut().unwrap().per_host_thresholds[0].max_requests = some(4);
    let reason = expected(proto).unwrap_err();
    assert_eq!(reason, "circuit_breakers.per_host_thresholds: only max_connections is supported");
}

#[test]
fn hashing_balancers_have_sizes() {
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
        let expected = if bad > 5_000_011 { "must be" } else { "must be a prime number of" };
        assert_eq!(reason, format!("maglev_lb_config.table_size: {expected} at most 5000011"));
    }
}

#[test]
fn endpoints_have_a_locality() {
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
fn the_panic_threshold_is_rounded_as_in_envoy() {
    use skysail_xds::envoy::pb::envoy::r#type::v3::Percent;
    for (percent, expected) in
        [(0.0, 0), (40.0, 40), (56.9, 56), (58.0, 57), (28.9, 28), (29.0, 28), (100.0, 100)]
    {
        let config = CommonLbConfig {
            healthy_panic_threshold: Some(Percent { value: percent }),
            ..CommonLbConfig::default()
        };
        let proto = ClusterProto { common_lb_config: Some(config), ..ClusterProto::default() };
        assert_eq!(balancer::panic_threshold(&proto).unwrap(), expected, "{percent}");
    }
}

#[test]
fn an_sni_that_is_no_dns_name_is_not_sent() {
    let sni = |name: &str, verifies_name| {
        let proto = UpstreamTlsContext { sni: name.to_owned(), ..UpstreamTlsContext::default() };
        let client = with(false, |translator| tls_context::client(translator, &proto, verifies_name));
        client.map(|client| client.sni.as_ref().map(|name| name.to_str().into_owned()))
    };
    let name = "outbound_.80_._.a.example";
    assert_eq!(sni(name, false).unwrap().as_deref(), Some(name));
    let address = "outbound_.80_._.192.0.2.1";
    assert_eq!(sni(address, false).unwrap(), None);
    let reason = sni(address, true).unwrap_err().to_string();
    assert_eq!(reason, format!("sni: {address:?} is not a server name"));
}
