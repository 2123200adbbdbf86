//! Resources of gRPC clients, beyond the test with a real client.

use skysail_xds::envoy::pb::envoy::extensions::filters::network::http_connection_manager::v3::http_connection_manager::RouteSpecifier;

use super::*;

use cluster::cluster::{ClusterDiscoveryType, DiscoveryType, LbPolicy};

fn client(namespace: &str) -> ProxyView {
    ProxyView { role: Role::Grpc, namespace: namespace.into(), takes_resolved_addresses: true, ..view() }
}

fn names(made: &Resources, kind: Kind) -> Vec<&str> {
    made.iter(kind).map(|resource| &*resource.name).collect()
}

#[test]
fn a_service_has_short_names_in_its_own_namespace_only() {
    let world = world("");
    let near = compile(&world, &client("shop")).0;
    let of_http = |made: &Resources| -> Vec<String> {
        let all = names(made, Kind::Listener).into_iter().filter_map(|name| name.strip_suffix(":80"));
        all.map(str::to_owned).collect()
    };
    assert_eq!(of_http(&near), ["db.shop.svc.cluster.local", "db.shop.svc", "db.shop", "db"]);
    let far = compile(&world, &client("elsewhere")).0;
    assert_eq!(of_http(&far), ["db.shop.svc.cluster.local"]);
    // Each name leads to the same routes, these to the cluster, and the cluster to its endpoints.
    for name in ["db:80", "db.shop.svc.cluster.local:80"] {
        let listener: listener::Listener = get(&near, Kind::Listener, name);
        assert_eq!((listener.name.as_str(), listener.address), (name, None));
        let api = listener.api_listener.unwrap().api_listener.unwrap();
        let manager: HttpConnectionManager = unpack(&api).unwrap();
        let Some(RouteSpecifier::Rds(rds)) = manager.route_specifier else { panic!("{name}") };
        assert_eq!(rds.route_config_name, "outbound|80||db.shop.svc.cluster.local");
    }
    let all: Vec<&str> = names(&near, Kind::Route);
    assert_eq!(all, names(&near, Kind::Cluster));
    assert_eq!(all, names(&near, Kind::Endpoint));
    // Ports of any protocol, and headless services.
    assert_eq!(
        all,
        [
            "outbound|3306||db.shop.svc.cluster.local",
            "outbound|3307||db-headless.shop.svc.cluster.local",
            "outbound|7000||db.shop.svc.cluster.local",
            "outbound|80||db.shop.svc.cluster.local",
        ]
    );
    for kind in [Kind::VirtualHost, Kind::NameTable, Kind::Secret] {
        assert_eq!(near.len(kind), 0, "{kind}");
    }
}

const RULE: &str = r"
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: db, namespace: shop}
spec:
  host: db
  trafficPolicy:
    loadBalancer: {simple: RANDOM}
    connectionPool: {http: {http2MaxRequests: 7, maxRequestsPerConnection: 3}, tcp: {maxConnections: 5}}
    outlierDetection: {consecutive5xxErrors: 3}
  subsets:
    - {name: least, trafficPolicy: {loadBalancer: {simple: LEAST_REQUEST}, tls: {mode: ISTIO_MUTUAL}}}
    - {name: maglev, trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: x-user, maglev: {}}}}}
";

#[test]
fn clusters_have_only_fields_that_grpc_supports() {
    let made = compile(&world(RULE), &client("shop")).0;
    let of = |subset: &str| -> cluster::Cluster {
        get(&made, Kind::Cluster, &format!("outbound|80|{subset}|db.shop.svc.cluster.local"))
    };
    for (subset, policy) in
        [("", LbPolicy::RoundRobin), ("least", LbPolicy::LeastRequest), ("maglev", LbPolicy::RingHash)]
    {
        let cluster = of(subset);
        assert_eq!(cluster.lb_policy(), policy, "{subset}");
        let by_discovery = ClusterDiscoveryType::Type(DiscoveryType::Eds as i32);
        assert_eq!(cluster.cluster_discovery_type, Some(by_discovery));
        assert_eq!(cluster.eds_cluster_config.as_ref().unwrap().service_name, cluster.name);
        let limits = &cluster.circuit_breakers.as_ref().unwrap().thresholds[0];
        assert_eq!(limits.max_requests.map(|limit| limit.value), Some(7));
        // gRPC would eject by success rate, which Istio's settings do not have.
        assert_eq!(cluster.outlier_detection, None);
        assert!(cluster.transport_socket_matches.is_empty() && cluster.filters.is_empty());
        assert_eq!(cluster.transport_socket.is_some(), subset == "least", "{subset}");
    }
    let headless: cluster::Cluster =
        get(&made, Kind::Cluster, "outbound|3307||db-headless.shop.svc.cluster.local");
    assert!(headless.eds_cluster_config.is_some());
}

const ROUTES: &str = r"
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: db, namespace: shop}
spec:
  hosts: [db]
  http:
    - timeout: 3s
      corsPolicy: {allowOrigins: [{exact: 'https://a'}]}
      fault: {delay: {fixedDelay: 1s, percentage: {value: 10}}}
      route: [{destination: {host: db, port: {number: 7000}}}]
";

#[test]
fn routes_match_every_host_and_have_grpcs_timeouts() {
    let world = world(ROUTES);
    let name = "outbound|80||db.shop.svc.cluster.local";
    let of = |view: &ProxyView, name: &str| -> route::RouteConfiguration {
        get(&compile(&world, view).0, Kind::Route, name)
    };
    let routes = of(&client("shop"), name);
    assert_eq!(routes.virtual_hosts.len(), 1);
    assert_eq!(routes.virtual_hosts[0].domains, ["*"]);
    let action = |route: &route::Route| match &route.action {
        Some(route::route::Action::Route(action)) => action.clone(),
        other => panic!("{other:?}"),
    };
    let made = &routes.virtual_hosts[0].routes[0];
    let longest = action(made).max_stream_duration.unwrap().max_stream_duration.unwrap();
    assert_eq!(longest.seconds, 3);
    assert_eq!(made.typed_per_filter_config.keys().collect::<Vec<_>>(), ["envoy.filters.http.fault"]);
    // Sidecars get both in another form.
    let sidecars = of(&view(), "80");
    let host = sidecars.virtual_hosts.iter().find(|host| host.name.starts_with("db.")).unwrap();
    assert_eq!(action(&host.routes[0]).max_stream_duration, None);
    assert_eq!(host.routes[0].typed_per_filter_config.len(), 2);
}

#[test]
fn a_full_name_is_never_the_short_name_of_another_service() {
    let world = world(
        r"
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: alike, namespace: other}
spec:
  hosts: [db.shop]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: 10.8.0.1}]
",
    );
    let scope = ClientScope::of(&client("shop"), &crate::world::Grouping::default());
    let made = compile_part(&world, &scope, &Part::Names);
    let of_name: Vec<_> = made.iter().filter(|resource| &*resource.name == "db.shop:80").collect();
    assert_eq!(of_name.len(), 1);
    let listener: listener::Listener = Message::decode(of_name[0].body.clone()).unwrap();
    let manager: HttpConnectionManager =
        unpack(&listener.api_listener.unwrap().api_listener.unwrap()).unwrap();
    let Some(RouteSpecifier::Rds(rds)) = manager.route_specifier else { panic!("no routes") };
    assert_eq!(rds.route_config_name, "outbound|80||db.shop");
}

#[test]
fn names_that_only_a_proxy_could_resolve_are_omitted() {
    let world = world(
        r"
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: out, namespace: shop}
spec:
  hosts: [out.example]
  resolution: DNS
  ports: [{number: 443, name: grpc, protocol: GRPC}]
  endpoints: [{address: 10.8.0.1}, {address: other.example}]
",
    );
    for takes_resolved_addresses in [true, false] {
        let view = ProxyView { takes_resolved_addresses, ..client("shop") };
        let (made, _) = compile(&world, &view);
        assert!(made.get(Kind::Listener, "out.example:443").is_some());
        let all: endpoint::ClusterLoadAssignment = get(&made, Kind::Endpoint, "outbound|443||out.example");
        let count: usize = all.endpoints.iter().map(|locality| locality.lb_endpoints.len()).sum();
        assert_eq!(count, 1, "{all:?}");
    }
}
