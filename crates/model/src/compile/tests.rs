//! Tests of the compile step beyond the recordings of a real istiod.

use std::collections::{BTreeMap, HashSet};

use prost::{Message, Name};
use skysail_xds::envoy::pb::envoy::extensions::{
    filters::{
        http::rbac::v3::Rbac as HttpRbac,
        network::http_connection_manager::v3::{HttpConnectionManager, http_filter::ConfigType},
        network::rbac::v3::Rbac as NetworkRbac,
        network::tcp_proxy::v3::TcpProxy,
    },
    transport_sockets::tls::v3::UpstreamTlsContext,
};

use super::{
    pb::{Any, cluster, core, endpoint, listener, rbac, route},
    *,
};
use crate::parse;

mod addresses;
mod extensions;
mod gateway;
mod grpc;
mod networks;
mod order;
mod rate_limits;
mod settings;
mod sidecar;
mod tokens;
mod trust;

const APP: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec:
  clusterIP: 10.96.1.1
  selector: {app: db}
  ports: [{name: tcp-db, port: 3306}, {name: http, port: 80, targetPort: 8080}, {name: other, port: 7000}]
---
apiVersion: v1
kind: Service
metadata: {name: db-headless, namespace: shop}
spec:
  clusterIP: None
  selector: {app: db}
  ports: [{name: tcp-db, port: 3307}]
---
apiVersion: v1
kind: Pod
metadata: {name: db-1, namespace: shop, labels: {app: db, security.istio.io/tlsMode: istio}}
spec: {serviceAccountName: db, containers: [{name: db, image: db}]}
status: {podIP: 10.244.0.5, conditions: [{type: Ready, status: "True"}]}
"#;

fn world(more: &str) -> World {
    let mut world = World::new();
    for text in [APP, more] {
        let parsed = parse(text, "test.yaml");
        let errors = parsed.diagnostics.iter().filter(|found| found.severity == crate::Severity::Error);
        assert_eq!(errors.map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
        for (object, origin) in parsed.objects {
            world.apply(object, origin);
        }
    }
    world
}

fn view() -> ProxyView {
    ProxyView {
        role: Role::Sidecar,
        namespace: "shop".into(),
        labels: Arc::new(BTreeMap::from([("app".into(), "db".into())])),
        service_account: "db".into(),
        canonical_service: "db".into(),
        cluster_id: "Kubernetes".into(),
        locality: api::kube::Locality::default(),
        network: String::new(),
        named_ports: BTreeMap::new(),
        addressed: Vec::new(),
        ipv4: true,
        ipv6: false,
        address: None,
        intercepts: true,
        plain_envoy: false,
        uses_vhds: false,
        takes_resolved_addresses: false,
        answers_dns: false,
        metadata: std::sync::Arc::default(),
        settings: Arc::default(),
        idle_timeout: None,
        is_authenticated: false,
    }
}

fn get<M: Message + Default>(made: &Resources, kind: Kind, name: &str) -> M {
    M::decode(made.get(kind, name).unwrap_or_else(|| panic!("no {kind} {name}")).body.clone()).unwrap()
}

fn unpack<M: Message + Name + Default>(any: &Any) -> Option<M> {
    (any.type_url == M::type_url()).then(|| M::decode(any.value.as_slice()).unwrap())
}

fn configs(chain: &listener::FilterChain) -> Vec<&Any> {
    chain
        .filters
        .iter()
        .filter_map(|filter| match &filter.config_type {
            Some(listener::filter::ConfigType::TypedConfig(any)) => Some(any),
            _ => None,
        })
        .collect()
}

/// Returns the filter chains of a port of `virtualInbound`.
fn chains(made: &Resources, port: u32) -> Vec<listener::FilterChain> {
    let listener: listener::Listener = get(made, Kind::Listener, "virtualInbound");
    let of_port = |chain: &listener::FilterChain| {
        chain.filter_chain_match.as_ref().unwrap().destination_port.map(|number| number.value) == Some(port)
    };
    listener.filter_chains.into_iter().filter(of_port).collect()
}

fn tcp_rules(chain: &listener::FilterChain) -> Vec<rbac::Rbac> {
    configs(chain).into_iter().filter_map(unpack::<NetworkRbac>).filter_map(|rbac| rbac.rules).collect()
}

fn http_rules(chain: &listener::FilterChain) -> Vec<rbac::Rbac> {
    let managers = configs(chain).into_iter().filter_map(unpack::<HttpConnectionManager>);
    let filters = managers.flat_map(|manager| manager.http_filters);
    let typed = filters.filter_map(|filter| match filter.config_type {
        Some(ConfigType::TypedConfig(any)) => unpack::<HttpRbac>(&any),
        _ => None,
    });
    typed.filter_map(|rbac| rbac.rules).collect()
}

const GET_ONLY: &str = r"
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: get-only, namespace: shop}
spec:
  action: ACTION
  rules: [{to: [{operation: {methods: [GET]}}]}]
";

#[test]
fn an_allow_rule_on_http_allows_nothing_on_tcp_and_is_reported() {
    let (made, findings) = compile(&world(&GET_ONLY.replace("ACTION", "ALLOW")), &view());
    let tcp = tcp_rules(&chains(&made, 3306)[0]);
    assert_eq!(tcp.len(), 1);
    assert!(tcp[0].policies.is_empty(), "{tcp:?}");
    assert_eq!(http_rules(&chains(&made, 8080)[0])[0].policies.len(), 1);
    let shown: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(shown.len(), 1, "{shown:?}");
    assert!(shown[0].contains("AuthorizationPolicy shop/get-only: spec.rules[0]"), "{shown:?}");
    assert!(
        shown[0].contains("port 3306 is not HTTP: on this port the ALLOW rule matches no connection"),
        "{shown:?}"
    );
}

#[test]
fn a_deny_rule_on_http_denies_more_on_tcp() {
    let bad = "istio-ext-authz-none-ns[shop]-policy[get-only]-rule[0]-deny-due-to-bad-CUSTOM-action";
    for (action, name) in [
        ("DENY", "ns[shop]-policy[get-only]-rule[0]"),
        // Without its authorizer.
        ("CUSTOM\n  provider: {name: none}", bad),
    ] {
        let (made, _) = compile(&world(&GET_ONLY.replace("ACTION", action)), &view());
        let tcp = tcp_rules(&chains(&made, 3306)[0]);
        assert_eq!(tcp[0].action(), rbac::rbac::Action::Deny);
        let policy = &tcp[0].policies[name];
        let Some(rbac::permission::Rule::AndRules(all)) = &policy.permissions[0].rule else { panic!() };
        assert_eq!(all.rules[0].rule, Some(rbac::permission::Rule::Any(true)));
    }
}

#[test]
fn no_domain_belongs_to_two_virtual_hosts() {
    let more = r"
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: clash, namespace: other}
spec:
  hosts: [db.shop, DB.shop.svc, elsewhere.example.com]
  http: [{route: [{destination: {host: db.shop.svc.cluster.local}}]}]
";
    let (made, _) = compile(&world(more), &view());
    let routes: route::RouteConfiguration = get(&made, Kind::Route, "80");
    let domains: Vec<&String> = routes.virtual_hosts.iter().flat_map(|host| &host.domains).collect();
    let unique: HashSet<_> = domains.iter().collect();
    assert_eq!(unique.len(), domains.len(), "{domains:?}");
    assert!(domains.iter().any(|domain| *domain == "elsewhere.example.com"));
    let service =
        routes.virtual_hosts.iter().find(|host| host.name == "db.shop.svc.cluster.local:80").unwrap();
    assert!(!service.domains.contains(&"db.shop".to_owned()), "the VirtualService has it");
}

#[test]
fn headless_services_have_a_listener_per_pod() {
    let (made, _) = compile(&world(""), &view());
    let listener: listener::Listener = get(&made, Kind::Listener, "10.244.0.5_3307");
    let proxy: TcpProxy = configs(&listener.filter_chains[0]).into_iter().find_map(unpack).unwrap();
    let name = "outbound|3307||db-headless.shop.svc.cluster.local";
    assert_eq!(proxy.stat_prefix, name);
    let cluster: cluster::Cluster = get(&made, Kind::Cluster, name);
    assert_eq!(cluster.lb_policy(), cluster::cluster::LbPolicy::ClusterProvided);
    assert!(made.get(Kind::Endpoint, name).is_none());
    assert!(cluster.transport_socket.is_some(), "its only pod has a sidecar");
}

#[test]
fn gateways_discover_the_endpoints_of_headless_services() {
    let entries = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: passed, namespace: shop}
spec: {hosts: [passed.example], resolution: NONE, ports: [{number: 80, name: http, protocol: HTTP}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: dynamic, namespace: shop}
spec: {hosts: ['*.dynamic.example'], resolution: DYNAMIC_DNS, ports: [{number: 80, name: http, protocol: HTTP}]}
";
    let (made, _) = compile(&world(entries), &ProxyView { role: crate::Role::Router, ..view() });
    let name = "outbound|3307||db-headless.shop.svc.cluster.local";
    let cluster: cluster::Cluster = get(&made, Kind::Cluster, name);
    assert!(cluster.eds_cluster_config.is_some());
    assert_eq!(cluster.transport_socket_matches.len(), 2);
    let assignment: endpoint::ClusterLoadAssignment = get(&made, Kind::Endpoint, name);
    assert_eq!(assignment.endpoints[0].lb_endpoints.len(), 1);
    let cluster: cluster::Cluster = get(&made, Kind::Cluster, "outbound|80||passed.example");
    assert!(cluster.eds_cluster_config.is_some());
    let cluster: cluster::Cluster = get(&made, Kind::Cluster, "outbound|80||*.dynamic.example");
    assert!(cluster.eds_cluster_config.is_none());
}

#[test]
fn registry_only_refuses_unknown_destinations() {
    let more = r"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    outboundTrafficPolicy: {mode: REGISTRY_ONLY}
    accessLogFile: /dev/stdout
";
    let (made, _) = compile(&world(more), &view());
    let routes: route::RouteConfiguration = get(&made, Kind::Route, "80");
    assert_eq!(routes.virtual_hosts.last().unwrap().name, "block_all");
    let all: listener::Listener = get(&made, Kind::Listener, "virtualOutbound");
    let proxy: TcpProxy = configs(&all.filter_chains[1]).into_iter().find_map(unpack).unwrap();
    assert_eq!(proxy.stat_prefix, clusters::BLACK_HOLE);
    assert_eq!((proxy.access_log.len(), all.access_log.len()), (1, 1));
}

#[test]
fn the_catch_all_serves_unanswered_hosts_only_if_configured() {
    let says = |policy: &str| {
        let more = format!(
            "{{apiVersion: v1, kind: ConfigMap, metadata: {{name: istio, namespace: istio-system}}, data: {{mesh: \"{policy}\"}}}}"
        );
        let (made, _) = compile(&world(&more), &view());
        let routes: route::RouteConfiguration = get(&made, Kind::Route, "80");
        let catch_all = routes.virtual_hosts.last().unwrap();
        assert_eq!(catch_all.domains, ["*"]);
        let ours = catch_all.metadata.as_ref().and_then(|found| found.filter_metadata.get("skysail"));
        ours.is_some_and(|ours| ours.fields["takes_unanswered"] == skysail_xds::istio::string("true"))
    };
    assert!(!says("outboundTrafficPolicy: {mode: ALLOW_ANY}"));
    assert!(!says("outboundTrafficPolicy: {unansweredHosts: REFUSE}"));
    assert!(says("outboundTrafficPolicy: {unansweredHosts: CATCH_ALL}"));
}

#[test]
fn an_envoy_without_the_filters_offers_the_protocol_of_its_cluster() {
    let alpn = |plain_envoy: bool, port: u16| {
        let (made, _) = compile(&world(""), &ProxyView { plain_envoy, ..view() });
        let name = format!("outbound|{port}||db.shop.svc.cluster.local");
        let cluster: cluster::Cluster = get(&made, Kind::Cluster, &name);
        let socket = cluster.transport_socket_matches[0].transport_socket.clone().unwrap();
        let Some(core::transport_socket::ConfigType::TypedConfig(any)) = socket.config_type else { panic!() };
        unpack::<UpstreamTlsContext>(&any).unwrap().common_tls_context.unwrap().alpn_protocols
    };
    assert_eq!(alpn(false, 80), ["istio-peer-exchange", "istio"]);
    assert_eq!(alpn(true, 80), ["istio-http/1.1", "istio", "http/1.1"]);
    assert_eq!(alpn(true, 3306), ["istio"]);
    assert_eq!(alpn(true, 7000), ["istio"]);
}

#[test]
fn routes_and_tcp_proxies_have_the_hash_policy() {
    let more = r"
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: db, namespace: shop}
spec:
  hosts: [db]
  http:
  - match: [{uri: {prefix: /all}}]
    route: [{destination: {host: db}}]
  - route:
    - {destination: {host: db, subset: a}, weight: 50}
    - {destination: {host: db, subset: b}, weight: 50}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: db, namespace: shop}
spec:
  host: db
  trafficPolicy:
    loadBalancer: {consistentHash: {useSourceIp: true}}
    retryBudget: {percent: 25, minRetryConcurrency: 5}
  subsets:
  - {name: a, labels: {v: a}, trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: x-user, maglev: {}}}}}
  - {name: b, labels: {v: b}, trafficPolicy: {loadBalancer: {simple: RANDOM}}}
";
    use route::route_action::hash_policy::{ConnectionProperties, Header, PolicySpecifier};
    let (made, _) = compile(&world(more), &view());
    let routes: route::RouteConfiguration = get(&made, Kind::Route, "80");
    let host = routes.virtual_hosts.iter().find(|host| host.name.starts_with("db.shop")).unwrap();
    let hashed = |index: usize| -> Vec<PolicySpecifier> {
        let Some(route::route::Action::Route(to)) = &host.routes[index].action else { panic!() };
        to.hash_policy.iter().map(|policy| policy.policy_specifier.clone().unwrap()).collect()
    };
    let address = PolicySpecifier::ConnectionProperties(ConnectionProperties { source_ip: true });
    assert_eq!(hashed(0), [address]);
    // Only one of the two possible clusters has a hash policy.
    let header = Header { header_name: "x-user".into(), ..Default::default() };
    assert_eq!(hashed(1), [PolicySpecifier::Header(header)]);
    let cluster = |subset: &str| -> cluster::Cluster {
        get(&made, Kind::Cluster, &format!("outbound|80|{subset}|db.shop.svc.cluster.local"))
    };
    use cluster::cluster::LbPolicy::{Maglev, Random, RingHash};
    assert_eq!(["", "a", "b"].map(|subset| cluster(subset).lb_policy()), [RingHash, Maglev, Random]);
    assert_eq!(cluster("a").lb_config, None);
    let budget = cluster("a").circuit_breakers.unwrap().thresholds[0].retry_budget.unwrap();
    assert_eq!(budget.budget_percent.unwrap().value, 25.0);
    assert_eq!(budget.min_retry_concurrency.unwrap().value, 5);

    let listener: listener::Listener = get(&made, Kind::Listener, "10.96.1.1_3306");
    let proxy: TcpProxy = configs(&listener.filter_chains[0]).into_iter().find_map(unpack).unwrap();
    assert_eq!(proxy.hash_policy.len(), 1);
    let (made, _) = compile(&world(""), &view());
    let listener: listener::Listener = get(&made, Kind::Listener, "10.96.1.1_3306");
    let proxy: TcpProxy = configs(&listener.filter_chains[0]).into_iter().find_map(unpack).unwrap();
    assert_eq!(proxy.hash_policy, []);
}

const ZONES: &str = r#"
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/region: r, topology.kubernetes.io/zone: a}}
---
apiVersion: v1
kind: Node
metadata: {name: n2, labels: {topology.kubernetes.io/region: r, topology.kubernetes.io/zone: b}}
---
apiVersion: v1
kind: Pod
metadata: {name: db-2, namespace: shop, labels: {app: db, rack: one}}
spec: {nodeName: n1, containers: [{name: db, image: db}]}
status: {podIP: 10.244.0.6, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db-3, namespace: shop, labels: {app: db, rack: two}}
spec: {nodeName: n1, containers: [{name: db, image: db}]}
status: {podIP: 10.244.0.7, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db-4, namespace: shop, labels: {app: db, rack: one}}
spec: {nodeName: n2, containers: [{name: db, image: db}]}
status: {podIP: 10.244.0.8, conditions: [{type: Ready, status: "True"}]}
"#;

#[test]
fn the_nearest_endpoints_come_first_with_outlier_detection() {
    let assignment = |policy: &str| {
        let rule = format!(
            "apiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: db, namespace: shop}}\n\
             spec: {{host: db, trafficPolicy: {policy}}}\n"
        );
        let world = world(&format!("{ZONES}---\n{rule}"));
        let mut node = crate::ProxyNode::parse(
            "sidecar~10.0.0.9~web-1.shop~shop.svc.cluster.local",
            serde_json::json!({"NODE_NAME": "n1", "LABELS": {"rack": "two"}}),
            api::kube::Locality::default(),
        )
        .unwrap();
        world.identify(&mut node, "Kubernetes").unwrap();
        let (made, _) = compile_for(&world, &node.view, node.hostname());
        let name = "outbound|80||db.shop.svc.cluster.local";
        let assignment: pb::endpoint::ClusterLoadAssignment = get(&made, Kind::Endpoint, name);
        let cluster: cluster::Cluster = get(&made, Kind::Cluster, name);
        // Endpoints by the last part of their address, with their priority.
        let mut found = Vec::new();
        for group in &assignment.endpoints {
            for lb in &group.lb_endpoints {
                let Some(pb::endpoint::lb_endpoint::HostIdentifier::Endpoint(one)) = &lb.host_identifier
                else {
                    panic!()
                };
                let Some(core::address::Address::SocketAddress(socket)) =
                    one.address.as_ref().unwrap().address.as_ref()
                else {
                    panic!()
                };
                found.push((socket.address.rsplit('.').next().unwrap().to_owned(), group.priority));
            }
        }
        found.sort();
        let weighed = cluster.common_lb_config.unwrap().locality_config_specifier.is_some();
        (found.into_iter().map(|(_, priority)| priority).collect::<Vec<_>>(), weighed)
    };
    // Pods 5 to 8: elsewhere, in the client's zone, in the client's zone, in the other zone.
    assert_eq!(assignment("{}"), (vec![0, 0, 0, 0], false));
    assert_eq!(assignment("{outlierDetection: {}}"), (vec![2, 0, 0, 1], false));
    let off = "{outlierDetection: {}, loadBalancer: {localityLbSetting: {enabled: false}}}";
    assert_eq!(assignment(off), (vec![0, 0, 0, 0], false));
    let labels = |labels: &str| {
        format!(
            "{{outlierDetection: {{}}, loadBalancer: {{localityLbSetting: {{failoverPriority: [{labels}]}}}}}}"
        )
    };
    assert_eq!(assignment(&labels("rack")), (vec![1, 1, 0, 1], true));
    assert_eq!(assignment(&labels("rack=one")), (vec![1, 0, 1, 0], true));
    assert_eq!(assignment(&labels("topology.kubernetes.io/zone, rack")), (vec![2, 1, 0, 2], true));
    // The client is on the node of pods 6 and 7.
    assert_eq!(assignment(&labels("kubernetes.io/hostname")), (vec![1, 0, 0, 1], true));
    assert_eq!(assignment(&labels("kubernetes.io/hostname, rack")), (vec![2, 1, 0, 2], true));
    assert_eq!(assignment(&labels("rack, kubernetes.io/hostname")), (vec![1, 1, 0, 1], true));
    assert_eq!(assignment(&labels("kubernetes.io/hostname=n2")), (vec![1, 1, 1, 0], true));
    assert_eq!(
        assignment(&labels("topology.istio.io/network=far, kubernetes.io/hostname")),
        (vec![0; 4], true)
    );
    // Without outlier detection a failing endpoint would not be noticed.
    let alone = "{loadBalancer: {localityLbSetting: {failoverPriority: [rack]}}}";
    assert_eq!(assignment(alone), (vec![0, 0, 0, 0], false));
}

#[test]
fn equal_configuration_has_equal_versions() {
    let (first, _) = compile(&world(""), &view());
    let (second, _) = compile(&world(""), &view());
    let versions = |made: &Resources| -> Vec<_> {
        Kind::ALL
            .iter()
            .flat_map(|kind| made.iter(*kind).map(|made| made.version).collect::<Vec<_>>())
            .collect()
    };
    assert_eq!(versions(&first), versions(&second));
}

/// As in Istio, servers of gRPC-Web speak gRPC. Their sidecars translate and forward by HTTP/2.
#[test]
fn the_servers_sidecar_translates_grpc_web() {
    use skysail_xds::envoy::pb::envoy::extensions::upstreams::http::v3::{
        HttpProtocolOptions,
        http_protocol_options::{UpstreamProtocolOptions, explicit_http_config::ProtocolConfig},
    };
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.1.9, selector: {app: db}, ports: [{name: grpc-web, port: 81, targetPort: 8081}]}\n";
    let (made, _) = compile(&world(service), &view());
    for name in ["outbound|81||web.shop.svc.cluster.local", "inbound|8081||"] {
        let cluster: cluster::Cluster = get(&made, Kind::Cluster, name);
        let mut options = cluster.typed_extension_protocol_options.values();
        let options = options.find_map(unpack::<HttpProtocolOptions>).unwrap();
        let Some(UpstreamProtocolOptions::ExplicitHttpConfig(explicit)) = options.upstream_protocol_options
        else {
            panic!("{name}")
        };
        assert!(matches!(explicit.protocol_config, Some(ProtocolConfig::Http2ProtocolOptions(_))), "{name}");
    }
    let translates = |port: u32| {
        let chain = chains(&made, port).remove(0);
        let manager = configs(&chain).into_iter().find_map(unpack::<HttpConnectionManager>).unwrap();
        manager.http_filters.iter().any(|filter| filter.name == "envoy.filters.http.grpc_web")
    };
    assert!(translates(8081) && !translates(8080));
}
