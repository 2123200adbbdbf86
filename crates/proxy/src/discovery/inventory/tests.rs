//! Warming: which resource waits for which, and that no change is applied by half.

use prost::Message as _;
use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            cluster::v3::{
                Cluster as ClusterProto,
                cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig},
            },
            core::v3::{
                Address, AggregatedConfigSource, ConfigSource, SocketAddress, TransportSocket, address,
                config_source::ConfigSourceSpecifier, socket_address::PortSpecifier, transport_socket,
            },
            endpoint::v3::{
                ClusterLoadAssignment, Endpoint as EndpointProto, LbEndpoint, LocalityLbEndpoints,
                lb_endpoint::HostIdentifier,
            },
            listener::v3::{AdditionalAddress, Filter, FilterChain, Listener as ListenerProto, filter},
            route::v3::{
                Route, RouteAction, RouteConfiguration, RouteMatch, Vhds, VirtualHost, route, route_action,
                route_match,
            },
        },
        extensions::{
            filters::{
                http::router::v3::Router,
                network::http_connection_manager::v3::{
                    HttpConnectionManager, HttpFilter, Rds, http_connection_manager::RouteSpecifier,
                    http_filter,
                },
            },
            transport_sockets::tls::v3::{
                CommonTlsContext, SdsSecretConfig, UpstreamTlsContext,
                common_tls_context::ValidationContextType,
            },
        },
    },
    google::protobuf::{Any, BoolValue},
};

use super::*;
use skysail_policy::state::demand::HostStatus;

mod on_demand;

fn inventory() -> Inventory {
    Inventory::new(Secrets::new(Arc::default()), Default::default())
}

fn ads() -> Option<ConfigSource> {
    let specifier = ConfigSourceSpecifier::Ads(AggregatedConfigSource {});
    Some(ConfigSource { config_source_specifier: Some(specifier), ..ConfigSource::default() })
}

fn any<M: prost::Message + prost::Name>(message: &M) -> Any {
    Any { type_url: M::type_url(), value: message.encode_to_vec() }
}

fn address(port: u32) -> Option<Address> {
    let port = Some(PortSpecifier::PortValue(port));
    let socket =
        SocketAddress { address: "127.0.0.1".to_owned(), port_specifier: port, ..SocketAddress::default() };
    Some(Address { address: Some(address::Address::SocketAddress(socket)) })
}

fn cluster(name: &str, choices: u32) -> Received {
    let eds = EdsClusterConfig { eds_config: ads(), service_name: String::new() };
    let proto = ClusterProto {
        name: name.to_owned(),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::Eds.into())),
        eds_cluster_config: Some(eds),
        // Distinguishes versions of the cluster.
        alt_stat_name: choices.to_string(),
        ..ClusterProto::default()
    };
    received(name, &proto)
}

fn endpoints(name: &str, port: u32) -> Received {
    let endpoint = EndpointProto { address: address(port), ..EndpointProto::default() };
    let lb =
        LbEndpoint { host_identifier: Some(HostIdentifier::Endpoint(endpoint)), ..LbEndpoint::default() };
    let proto = ClusterLoadAssignment {
        cluster_name: name.to_owned(),
        endpoints: vec![LocalityLbEndpoints { lb_endpoints: vec![lb], ..LocalityLbEndpoints::default() }],
        ..ClusterLoadAssignment::default()
    };
    received(name, &proto)
}

fn routes(name: &str, cluster: &str) -> Received {
    let prefix = route_match::PathSpecifier::Prefix("/".to_owned());
    let target = route_action::ClusterSpecifier::Cluster(cluster.to_owned());
    let route = Route {
        r#match: Some(RouteMatch { path_specifier: Some(prefix), ..RouteMatch::default() }),
        action: Some(route::Action::Route(RouteAction {
            cluster_specifier: Some(target),
            ..RouteAction::default()
        })),
        ..Route::default()
    };
    let host = VirtualHost {
        name: "any".to_owned(),
        domains: vec!["*".to_owned()],
        routes: vec![route],
        ..VirtualHost::default()
    };
    let proto = RouteConfiguration {
        name: name.to_owned(),
        virtual_hosts: vec![host],
        ..RouteConfiguration::default()
    };
    received(name, &proto)
}

fn listener(name: &str, table: &str) -> Received {
    let router = http_filter::ConfigType::TypedConfig(any(&Router::default()));
    let manager = HttpConnectionManager {
        route_specifier: Some(RouteSpecifier::Rds(Rds {
            config_source: ads(),
            route_config_name: table.to_owned(),
        })),
        http_filters: vec![HttpFilter {
            name: "router".to_owned(),
            config_type: Some(router),
            ..HttpFilter::default()
        }],
        stat_prefix: "a".to_owned(),
        ..HttpConnectionManager::default()
    };
    let filter =
        Filter { name: "http".to_owned(), config_type: Some(filter::ConfigType::TypedConfig(any(&manager))) };
    let proto = ListenerProto {
        name: name.to_owned(),
        address: address(8080),
        filter_chains: vec![FilterChain { filters: vec![filter], ..FilterChain::default() }],
        ..ListenerProto::default()
    };
    received(name, &proto)
}

fn received<M: prost::Message>(name: &str, proto: &M) -> Received {
    Received { name: name.to_owned(), version: "1".to_owned(), body: proto.encode_to_vec().into() }
}

fn add(inventory: &mut Inventory, kind: Kind, added: Vec<Received>) -> Vec<Rejection> {
    inventory.apply(&Update { kind, added, removed: Vec::new() })
}

fn remove(inventory: &mut Inventory, kind: Kind, name: &str) {
    inventory.apply(&Update { kind, added: Vec::new(), removed: vec![name.to_owned()] });
}

fn port(snapshot: &Snapshot, cluster: &str) -> u16 {
    snapshot.clusters[cluster].endpoints.load().priorities[0][0].address.port()
}

#[test]
fn a_cluster_waits_for_its_endpoints_and_a_table_for_its_clusters() {
    let mut inventory = inventory();
    let now = Instant::now();
    assert!(add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]).is_empty());
    assert!(add(&mut inventory, Kind::Listener, vec![listener("l", "t")]).is_empty());
    assert!(!inventory.settle(now), "nothing is warm");
    let [_, (_, endpoints_wanted), (_, routes_wanted), ..] = inventory.wanted();
    assert_eq!((endpoints_wanted.len(), routes_wanted.len()), (1, 1));

    add(&mut inventory, Kind::Route, vec![routes("t", "a")]);
    assert!(!inventory.settle(now), "the table leads to a cluster that is warming");
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    assert!(inventory.settle(now), "now all of it at once");
    let snapshot = inventory.snapshot();
    assert_eq!((snapshot.clusters.len(), snapshot.routes.len(), snapshot.listeners.by_name.len()), (1, 1, 1));
    assert!(inventory.is_warm(now));
    assert_eq!(inventory.deadline(Instant::now()), None);
}

#[test]
fn the_old_version_stays_until_the_new_one_is_warm() {
    let mut inventory = inventory();
    let now = Instant::now();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    add(&mut inventory, Kind::Route, vec![routes("t", "a")]);
    assert!(inventory.settle(now));
    // The table's new version leads to a cluster that is not warm.
    add(&mut inventory, Kind::Cluster, vec![cluster("b", 1)]);
    add(&mut inventory, Kind::Route, vec![routes("t", "b")]);
    assert!(!inventory.settle(now));
    assert!(uses::of_table(&inventory.snapshot().routes["t"]).all(|name| name == "a"));
    // The server deletes the old cluster, which stays while the table in effect leads to it.
    remove(&mut inventory, Kind::Cluster, "a");
    assert!(!inventory.settle(now));
    assert_eq!(port(&inventory.snapshot(), "a"), 1);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("b", 2)]);
    assert!(inventory.settle(now));
    let snapshot = inventory.snapshot();
    assert!(uses::of_table(&snapshot.routes["t"]).all(|name| name == "b"));
    assert!(!snapshot.clusters.contains_key("a"));
    assert_eq!(port(&snapshot, "b"), 2);
}

#[test]
fn endpoints_change_without_a_snapshot_and_survive_a_change_of_their_cluster() {
    let mut inventory = inventory();
    let now = Instant::now();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    assert!(inventory.settle(now));
    let snapshot = inventory.snapshot();
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 2)]);
    assert!(!inventory.settle(now));
    assert_eq!(port(&snapshot, "a"), 2, "the snapshot published before has them");
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 2)]);
    assert!(inventory.settle(now));
    assert_eq!(port(&inventory.snapshot(), "a"), 2);
    // The same version changes nothing.
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 2)]);
    assert!(!inventory.settle(now));
}

#[test]
fn an_invalid_resource_is_rejected_alone() {
    let mut inventory = inventory();
    let mut bad = cluster("bad", 1);
    bad.body = ClusterProto { name: "bad".to_owned(), lb_policy: 7, ..ClusterProto::default() }
        .encode_to_vec()
        .into();
    let rejections = add(&mut inventory, Kind::Cluster, vec![bad, cluster("a", 1)]);
    assert_eq!(rejections.len(), 1);
    assert_eq!(rejections[0].name, "bad");
    assert!(rejections[0].reason.contains("lb_policy"), "{}", rejections[0].reason);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    assert!(inventory.settle(Instant::now()));
    assert!(inventory.snapshot().clusters.contains_key("a"));
    assert!(inventory.clusters["bad"].error.is_some());
}

#[test]
fn no_resource_waits_for_ever() {
    let mut inventory = inventory();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    assert!(!inventory.settle(Instant::now()));
    let deadline = inventory.deadline(Instant::now()).unwrap();
    assert!(inventory.settle(deadline));
    assert!(inventory.snapshot().clusters.contains_key("a"));
}

/// Returns a cluster with TLS whose trusted roots are a secret that never arrives.
fn cluster_with_roots(name: &str, version: u32) -> Received {
    let roots = SdsSecretConfig { name: "absent".to_owned(), sds_config: ads() };
    let context = UpstreamTlsContext {
        common_tls_context: Some(CommonTlsContext {
            validation_context_type: Some(ValidationContextType::ValidationContextSdsSecretConfig(roots)),
            ..CommonTlsContext::default()
        }),
        ..UpstreamTlsContext::default()
    };
    let socket = TransportSocket {
        name: "envoy.transport_sockets.tls".to_owned(),
        config_type: Some(transport_socket::ConfigType::TypedConfig(any(&context))),
    };
    let proto = ClusterProto::decode(cluster(name, version).body).unwrap();
    received(name, &ClusterProto { transport_socket: Some(socket), ..proto })
}

#[test]
fn a_cluster_that_waits_for_secrets_replaces_one_without_tls_in_the_end() {
    let mut inventory = inventory();
    let has_tls = |inventory: &Inventory| inventory.snapshot().clusters["a"].tls.is_some();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    assert!(inventory.settle(Instant::now()));
    assert!(add(&mut inventory, Kind::Cluster, vec![cluster_with_roots("a", 1)]).is_empty());
    assert!(!inventory.settle(Instant::now()));
    assert!(!has_tls(&inventory));
    let deadline = inventory.deadline(Instant::now()).unwrap();
    // Further versions do not begin the wait again.
    assert!(add(&mut inventory, Kind::Cluster, vec![cluster_with_roots("a", 2)]).is_empty());
    assert!(!inventory.settle(deadline - WARMING_TIMEOUT / 2));
    assert_eq!(inventory.deadline(deadline - WARMING_TIMEOUT / 2), Some(deadline));
    assert!(inventory.settle(deadline));
    assert!(has_tls(&inventory));
    assert_eq!(inventory.deadline(deadline), None);
}

#[test]
fn a_cluster_that_waits_for_endpoints_replaces_none_and_has_no_deadline() {
    let mut inventory = inventory();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    assert!(inventory.settle(Instant::now()));
    let mut proto = ClusterProto::decode(cluster("a", 1).body).unwrap();
    proto.eds_cluster_config = Some(EdsClusterConfig { eds_config: ads(), service_name: "b".to_owned() });
    add(&mut inventory, Kind::Cluster, vec![received("a", &proto)]);
    assert!(!inventory.settle(Instant::now() + WARMING_TIMEOUT));
    assert_eq!(port(&inventory.snapshot(), "a"), 1);
    assert_eq!(inventory.deadline(Instant::now()), None);
}

#[test]
fn a_table_that_does_not_exist_delays_no_listener() {
    let mut inventory = inventory();
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    assert!(!inventory.settle(Instant::now()));
    remove(&mut inventory, Kind::Route, "t");
    assert!(inventory.settle(Instant::now()));
    assert!(inventory.snapshot().listeners.by_name.contains_key("l"));
}

/// Returns a virtual host of table `t` that leads to cluster `a`.
fn host(name: &str, domain: &str) -> Received {
    let table = RouteConfiguration::decode(routes("t", "a").body).unwrap();
    let mut host = table.virtual_hosts.into_iter().next().unwrap();
    host.name = format!("t/{name}");
    host.domains = vec![domain.to_owned()];
    Received { name: host.name.clone(), version: "1".to_owned(), body: host.encode_to_vec().into() }
}

/// Returns table `t`, which uses VHDS.
fn table_of_hosts() -> Received {
    let vhds = Some(Vhds { config_source: ads() });
    let table = RouteConfiguration { name: "t".to_owned(), vhds, ..RouteConfiguration::default() };
    Received { name: "t".to_owned(), version: "1".to_owned(), body: table.encode_to_vec().into() }
}

fn hosts_in_force(inventory: &Inventory) -> Vec<String> {
    let table = inventory.merged_body(inventory.routes["t"].active.as_ref().unwrap());
    let table = RouteConfiguration::decode(table).unwrap();
    table.virtual_hosts.into_iter().map(|host| host.domains.concat()).collect()
}

#[test]
fn virtual_hosts_received_by_vhds_are_merged_into_their_table() {
    let mut inventory = inventory();
    let now = Instant::now();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    add(&mut inventory, Kind::Route, vec![table_of_hosts()]);
    inventory.settle(now);
    assert!(inventory.snapshot().listeners.by_name.is_empty(), "its virtual hosts are missing");
    let [.., (kind, wanted), _] = inventory.wanted();
    assert_eq!((kind, wanted), (Kind::VirtualHost, BTreeSet::from(["t".to_owned()])));

    assert!(add(&mut inventory, Kind::VirtualHost, vec![host("1", "one"), host("2", "two")]).is_empty());
    assert!(inventory.settle(now));
    assert_eq!(hosts_in_force(&inventory), ["one", "two"]);
    assert!(inventory.snapshot().listeners.by_name.contains_key("l"));
    remove(&mut inventory, Kind::VirtualHost, "t/1");
    add(&mut inventory, Kind::VirtualHost, vec![host("2", "zwei")]);
    assert!(inventory.settle(now));
    assert_eq!(hosts_in_force(&inventory), ["zwei"]);

    // A table without VHDS no longer subscribes to virtual hosts.
    add(&mut inventory, Kind::Route, vec![routes("t", "a")]);
    let [.., (_, wanted), _] = inventory.wanted();
    assert!(wanted.is_empty());
}

#[test]
fn an_invalid_virtual_host_is_rejected_alone_and_two_of_one_domain_both() {
    let mut inventory = inventory();
    let now = Instant::now();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    add(&mut inventory, Kind::Route, vec![table_of_hosts()]);
    let without_match = VirtualHost { routes: vec![Route::default()], ..VirtualHost::default() };
    let bad = Received { body: without_match.encode_to_vec().into(), ..host("bad", "bad") };
    let refused = add(&mut inventory, Kind::VirtualHost, vec![host("1", "one"), bad]);
    assert_eq!(refused.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["t/bad"]);
    assert!(inventory.settle(now));
    assert_eq!(hosts_in_force(&inventory), ["one"]);

    let refused = add(&mut inventory, Kind::VirtualHost, vec![host("2", "one"), host("3", "three")]);
    assert_eq!(refused.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["t/2", "t/3"]);
    assert!(!inventory.settle(now));
    assert_eq!(hosts_in_force(&inventory), ["one"]);
    let nameless = Received { name: "nameless".to_owned(), ..host("4", "four") };
    assert_eq!(add(&mut inventory, Kind::VirtualHost, vec![nameless]).len(), 1);
}

#[test]
fn two_listeners_must_not_have_the_same_address() {
    let of = |name: &str, ports: &[u16], binds: bool| {
        let others = ports[1..].iter().map(|port| AdditionalAddress {
            address: address((*port).into()),
            ..AdditionalAddress::default()
        });
        let mut proto = ListenerProto::decode(&*listener(name, "t").body).unwrap();
        proto.address = address(ports[0].into());
        proto.additional_addresses = others.collect();
        proto.bind_to_port = Some(BoolValue { value: binds });
        received(name, &proto)
    };
    let mut inventory = inventory();
    let taken =
        |inventory: &mut Inventory, added| add(inventory, Kind::Listener, added).pop().map(|it| it.reason);
    assert_eq!(taken(&mut inventory, vec![of("a", &[80, 81], true), of("b", &[82], false)]), None);
    for (name, ports, binds) in
        [("c", [80, 90], true), ("d", [91, 81], true), ("e", [92, 82], true), ("f", [82, 93], false)]
    {
        let reason = taken(&mut inventory, vec![of(name, &ports, binds)]).unwrap();
        assert!(reason.contains("already: choose another"), "{reason}");
        assert!(reason.starts_with("listener \""), "{reason}");
    }
    // The refused listeners do not have the addresses that they asked for, and an update keeps its own.
    assert_eq!(taken(&mut inventory, vec![of("g", &[90, 91], true), of("a", &[80, 83], true)]), None);
    // Different listeners with port 0 get different ports.
    assert_eq!(taken(&mut inventory, vec![of("h", &[0], true), of("i", &[0], true)]), None);
    assert!(taken(&mut inventory, vec![of("j", &[0], false), of("k", &[0], false)]).is_some());
    // A removed listener frees its addresses for the same update.
    let update =
        Update { kind: Kind::Listener, added: vec![of("l", &[82], true)], removed: vec!["b".to_owned()] };
    assert!(inventory.apply(&update).is_empty());
}
