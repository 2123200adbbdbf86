//! Recorded configurations of istiod are accepted and translated correctly; unsupported fields are refused by
//! name.

use std::{fs, io::Read as _, net::IpAddr, path::PathBuf, sync::Arc};

use prost::Message;
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
use skysail_policy::config::{
    cluster::{Balancer, Discovery, HashFunction, Keepalive, Limits, RetryBudget},
    health::{ConsecutiveLimit, SlowStart},
    http::{self, FilterKind, Part},
    listener::{Terminal, Transport},
    route::{Action, Targets},
};

mod clusters;
mod filters;
mod protocols;
mod routes;
mod tracing;

/// Recorded scenarios that must be accepted completely.
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
    // A gateway proxy without a Gateway subscribes to no routes.
    let Ok(file) = fs::File::open(proxy.join(format!("{kind}.sotw.pb.gz"))) else { return Vec::new() };
    let mut body = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut body).unwrap();
    let response = DiscoveryResponse::decode(body.as_slice()).unwrap();
    response.resources.into_iter().map(|any| any.value).collect()
}

fn with<T>(strict: bool, work: impl FnOnce(Translator<'_>) -> T) -> T {
    let tls = TlsContexts::default();
    work(Translator { tls: &tls, node: &Node::default(), strict })
}

/// Resources that one proxy received.
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
fn all_recordings_are_accepted() {
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
fn a_sidecars_configuration_is_translated() {
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
    assert_eq!(inbound.sources, ["127.0.0.6".parse::<IpAddr>().unwrap()]);

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
    assert!(manager.stats.is_some() && manager.metadata_exchange.is_some());
    assert!(matches!(
        &manager.filters[..],
        [http::Filter { kind: FilterKind::Fault(_), .. }, http::Filter { kind: FilterKind::Cors, .. }]
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
    let translator = Translator { tls: &tls, node: &Node::default(), strict: false };
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
        store_secret(&tls, &name, &secret_named(&name.name, &certificates)).unwrap();
    }
    tls.refresh().unwrap();
    assert!(contexts.iter().all(|context| client_ready(context)));
    let configs = contexts[0].config.load_full().unwrap();
    assert_eq!(configs.istio_http1.alpn(), [&b"istio-http/1.1"[..], b"istio", b"http/1.1"]);
}

/// Returns the mesh's root and a workload's certificate and key, all PEM.
fn certificates() -> [String; 3] {
    let authority = skysail_identity::Authority::ephemeral().unwrap();
    let request = skysail_identity::KeyAndCsr::generate(None).unwrap();
    let id = skysail_core::SpiffeId::new("cluster.local", "default", "reviews");
    let signed = authority.sign(&request.csr_pem, &id, Duration::from_secs(3600)).unwrap();
    [authority.roots_pem().to_owned(), signed.pem(), request.key_pem()]
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
    assert!(reason.contains("consistent_hashing_lb_config") && reason.contains("remove it"), "{reason}");

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
        "filter_chains[0].filters[0]: skysail-proxy has no network filter \"acme\" of type acme.Filter: remove it"
    );
}

#[test]
fn fields_without_effect_are_refused_in_a_file() {
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
    proto.load_assignment =
        Some(ClusterLoadAssignment { cluster_name: "c".to_owned(), ..ClusterLoadAssignment::default() });
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

fn address_proto(host: &str, port: u32) -> Address {
    Address {
        address: Some(address::Address::SocketAddress(SocketAddress {
            address: host.to_owned(),
            port_specifier: Some(PortSpecifier::PortValue(port)),
            ..SocketAddress::default()
        })),
    }
}

#[test]
fn the_unspecified_ipv6_address_may_include_ipv4() {
    let bound_to = |compat| {
        let mut address = address_proto("::", 80);
        if let Some(address::Address::SocketAddress(socket)) = &mut address.address {
            socket.ipv4_compat = compat;
        }
        let addresses = listener::bound_to(Some(&address)).unwrap();
        addresses.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(bound_to(false), ["[::]:80"]);
    assert_eq!(bound_to(true), ["[::]:80", "0.0.0.0:80"]);
}

#[test]
fn formats_are_split_into_operators() {
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
fn path_templates_match_segments() {
    let matches =
        |template: &str, path: &str| policy::template_regex(template).unwrap().is_match(path.as_bytes());
    assert!(matches("/a/{*}/c", "/a/b/c") && !matches("/a/{*}/c", "/a/b/b/c"));
    assert!(matches("/a/{**}", "/a/b/c") && !matches("/a/{**}", "/b"));
    assert!(matches("/v{n=*}.x", "/v1.x") && !matches("/v{n=*}.x", "/v1-x"));
    assert!(policy::template_regex("/{").is_err());
}

#[test]
fn durations_are_bounded_so_that_clocks_can_add_them() {
    let longest = DurationProto { seconds: i64::MAX, nanos: i32::MAX };
    let time = super::duration(&longest).unwrap();
    assert!(std::time::Instant::now().checked_add(time).is_some());
    assert!(super::duration(&DurationProto { seconds: -1, nanos: 0 }).is_err());
}

/// A change that affects no decision must not end admitted requests and connections.
#[test]
fn timeouts_do_not_affect_decisions() {
    use skysail_xds::envoy::pb::envoy::{
        config::core::v3::{
            GrpcService, HttpUri,
            grpc_service::{EnvoyGrpc, TargetSpecifier},
            http_uri::HttpUpstreamType,
        },
        extensions::filters::http::{
            ext_authz::v3::{ExtAuthz, ext_authz::Services},
            jwt_authn::v3::{JwtAuthentication, JwtProvider, RemoteJwks, jwt_provider::JwksSourceSpecifier},
        },
    };
    let seconds = |seconds| Some(DurationProto { seconds, nanos: 0 });
    let ask = |cluster: &str, timeout| {
        let target = EnvoyGrpc { cluster_name: cluster.into(), ..EnvoyGrpc::default() };
        let target_specifier = Some(TargetSpecifier::EnvoyGrpc(target));
        let service = GrpcService { timeout: seconds(timeout), target_specifier, ..GrpcService::default() };
        let services = Some(Services::GrpcService(service));
        authorization::translate(&ExtAuthz { services, ..ExtAuthz::default() }).unwrap().fingerprint
    };
    assert_eq!(ask("a", 1), ask("a", 2));
    assert_ne!(ask("a", 1), ask("b", 1));
    let tokens = |issuers: [&str; 3], timeout| {
        let provider = |issuer: &str| {
            let uri = HttpUri {
                uri: format!("https://{issuer}/keys"),
                timeout: seconds(timeout),
                http_upstream_type: Some(HttpUpstreamType::Cluster("keys".into())),
            };
            let remote =
                RemoteJwks { http_uri: Some(uri), cache_duration: seconds(timeout), ..RemoteJwks::default() };
            let jwks_source_specifier = Some(JwksSourceSpecifier::RemoteJwks(remote));
            JwtProvider { issuer: issuer.into(), jwks_source_specifier, ..JwtProvider::default() }
        };
        let providers = issuers.map(|issuer| (issuer.to_owned(), provider(issuer))).into();
        jwt::translate(&JwtAuthentication { providers, ..JwtAuthentication::default() }).unwrap().fingerprint
    };
    assert_eq!(tokens(["a", "b", "c"], 1), tokens(["c", "a", "b"], 2));
    assert_ne!(tokens(["a", "b", "c"], 1), tokens(["a", "b", "d"], 1));
}
