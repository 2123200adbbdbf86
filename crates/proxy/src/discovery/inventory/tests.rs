//! What waits for what, and what never happens half.

use prost::Message as _;
use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            cluster::v3::{
                Cluster as ClusterProto,
                cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig},
            },
            core::v3::{
                Address, AggregatedConfigSource, ConfigSource, SocketAddress, address,
                config_source::ConfigSourceSpecifier, socket_address::PortSpecifier,
            },
            endpoint::v3::{
                ClusterLoadAssignment, Endpoint as EndpointProto, LbEndpoint, LocalityLbEndpoints,
                lb_endpoint::HostIdentifier,
            },
            listener::v3::{Filter, FilterChain, Listener as ListenerProto, filter},
            route::v3::{
                Route, RouteAction, RouteConfiguration, RouteMatch, Vhds, VirtualHost, route, route_action,
                route_match,
            },
        },
        extensions::filters::{
            http::router::v3::Router,
            network::http_connection_manager::v3::{
                HttpConnectionManager, HttpFilter, Rds, http_connection_manager::RouteSpecifier, http_filter,
            },
        },
    },
    google::protobuf::{Any, BoolValue},
};

use super::*;
use skysail_policy::config::demand::Standing;

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
        // Something to tell versions of it apart.
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
    let host = VirtualHost { domains: vec!["*".to_owned()], routes: vec![route], ..VirtualHost::default() };
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
        http_filters: vec![HttpFilter { config_type: Some(router), ..HttpFilter::default() }],
        ..HttpConnectionManager::default()
    };
    let filter =
        Filter { config_type: Some(filter::ConfigType::TypedConfig(any(&manager))), ..Filter::default() };
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
fn the_old_stays_until_the_new_is_warm() {
    let mut inventory = inventory();
    let now = Instant::now();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    add(&mut inventory, Kind::Route, vec![routes("t", "a")]);
    assert!(inventory.settle(now));
    // The table moves to a cluster that is not ready.
    add(&mut inventory, Kind::Cluster, vec![cluster("b", 1)]);
    add(&mut inventory, Kind::Route, vec![routes("t", "b")]);
    assert!(!inventory.settle(now));
    assert!(uses::of_table(&inventory.snapshot().routes["t"]).all(|name| name == "a"));
    // The old cluster is taken away meanwhile, and stays while the table in force leads to it.
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
    // The same once more changes nothing.
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 2)]);
    assert!(!inventory.settle(now));
}

#[test]
fn one_bad_resource_is_refused_alone() {
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
fn nothing_waits_for_ever() {
    let mut inventory = inventory();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    assert!(!inventory.settle(Instant::now()));
    let deadline = inventory.deadline(Instant::now()).unwrap();
    assert!(inventory.settle(deadline));
    assert!(inventory.snapshot().clusters.contains_key("a"));
}

#[test]
fn a_table_that_does_not_exist_holds_up_no_listener() {
    let mut inventory = inventory();
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    assert!(!inventory.settle(Instant::now()));
    remove(&mut inventory, Kind::Route, "t");
    assert!(inventory.settle(Instant::now()));
    assert!(inventory.snapshot().listeners.by_name.contains_key("l"));
}

/// A virtual host of table `t` that leads to cluster `a`.
fn host(name: &str, domain: &str) -> Received {
    let table = RouteConfiguration::decode(routes("t", "a").body).unwrap();
    let mut host = table.virtual_hosts.into_iter().next().unwrap();
    host.name = format!("t/{name}");
    host.domains = vec![domain.to_owned()];
    Received { name: host.name.clone(), version: "1".to_owned(), body: host.encode_to_vec().into() }
}

/// Table `t`, whose virtual hosts come apart.
fn table_of_hosts() -> Received {
    let vhds = Some(Vhds { config_source: ads() });
    let table = RouteConfiguration { name: "t".to_owned(), vhds, ..RouteConfiguration::default() };
    Received { name: "t".to_owned(), version: "1".to_owned(), body: table.encode_to_vec().into() }
}

fn hosts_in_force(inventory: &Inventory) -> Vec<String> {
    let table = inventory.whole_body(inventory.routes["t"].active.as_ref().unwrap());
    let table = RouteConfiguration::decode(table).unwrap();
    table.virtual_hosts.into_iter().map(|host| host.domains.concat()).collect()
}

#[test]
fn virtual_hosts_that_come_apart_are_put_together() {
    let mut inventory = inventory();
    let now = Instant::now();
    add(&mut inventory, Kind::Cluster, vec![cluster("a", 1)]);
    add(&mut inventory, Kind::Endpoint, vec![endpoints("a", 1)]);
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    add(&mut inventory, Kind::Route, vec![table_of_hosts()]);
    inventory.settle(now);
    assert!(inventory.snapshot().listeners.by_name.is_empty(), "its hosts are still to come");
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

    // What was not asked for in parts is whole again.
    add(&mut inventory, Kind::Route, vec![routes("t", "a")]);
    let [.., (_, wanted), _] = inventory.wanted();
    assert!(wanted.is_empty());
}

#[test]
fn a_bad_virtual_host_is_refused_alone_and_two_of_one_domain_both() {
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

/// An inventory that asks for what it uses, with table `t` in force, whose catch-all leads to cluster `all`.
fn on_demand() -> (Inventory, mpsc::UnboundedReceiver<Question>, Instant) {
    let mut inventory = inventory();
    let (sender, questions) = mpsc::unbounded_channel();
    inventory.set_take(Take::Used, Some(sender));
    let now = Instant::now();
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    let mut table = RouteConfiguration::decode(routes("t", "all").body).unwrap();
    table.vhds = Some(Vhds { config_source: ads() });
    add(&mut inventory, Kind::Route, vec![received("t", &table)]);
    settled(&mut inventory, now);
    assert_eq!(wanted(&inventory), (vec!["all".to_owned()], vec!["t/*".to_owned()]));
    serve(&mut inventory, "all");
    remove(&mut inventory, Kind::VirtualHost, "t/*");
    assert!(settled(&mut inventory, now), "the catch-all has all it needs");
    assert!(inventory.is_warm(now) && inventory.snapshot().listeners.by_name.contains_key("l"));
    (inventory, questions, now)
}

fn settled(inventory: &mut Inventory, now: Instant) -> bool {
    let changed = inventory.settle(now);
    let wanted = inventory.wanted();
    inventory.forget_unwanted(&wanted, now);
    inventory.settle(now) || changed
}

/// The names of clusters and virtual hosts that are asked for.
fn wanted(inventory: &Inventory) -> (Vec<String>, Vec<String>) {
    let [(_, clusters), _, _, (_, hosts), _] = inventory.wanted();
    (clusters.into_iter().collect(), hosts.into_iter().collect())
}

/// A cluster and its endpoints are here.
fn serve(inventory: &mut Inventory, name: &str) {
    add(inventory, Kind::Cluster, vec![cluster(name, 1)]);
    add(inventory, Kind::Endpoint, vec![endpoints(name, 1)]);
}

/// Requests for an authority ask as many questions, by the table in force.
fn question(
    inventory: &mut Inventory,
    questions: &mut mpsc::UnboundedReceiver<Question>,
    authority: &str,
    now: Instant,
) -> Option<oneshot::Receiver<()>> {
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    let demand = table.demand.as_ref().unwrap();
    if demand.standing(authority) != Standing::Unknown {
        return None;
    }
    let answer = demand.ask(authority);
    inventory.ask(questions.try_recv().unwrap(), now, true);
    settled(inventory, now);
    answer_all(inventory, now);
    Some(answer)
}

fn answer_all(inventory: &mut Inventory, now: Instant) {
    inventory.answer(now).into_iter().for_each(|waiting| _ = waiting.send(()));
}

fn leads_to(inventory: &Inventory, authority: &str) -> String {
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    let (host, _) = skysail_policy::route::virtual_host(&table, authority).unwrap();
    host.name.to_string()
}

#[test]
fn a_host_is_asked_for_by_authority_and_in_force_when_its_cluster_is() {
    let (mut inventory, mut questions, now) = on_demand();
    let mut first = question(&mut inventory, &mut questions, "one", now).unwrap();
    let mut second = question(&mut inventory, &mut questions, "one", now).unwrap();
    assert_eq!(wanted(&inventory).1, ["t/*", "t/one"], "they share one question");
    let update =
        Update { kind: Kind::VirtualHost, added: vec![host("1", "one")], removed: vec!["t/one".to_owned()] };
    assert!(inventory.apply(&update).is_empty());
    assert!(!settled(&mut inventory, now), "its cluster is not here");
    answer_all(&mut inventory, now);
    assert!(first.try_recv().is_err());
    assert_eq!(wanted(&inventory).0, ["a", "all"]);
    serve(&mut inventory, "a");
    assert!(settled(&mut inventory, now));
    answer_all(&mut inventory, now);
    assert!(first.try_recv().is_ok() && second.try_recv().is_ok());
    assert_eq!(leads_to(&inventory, "one"), "t/1");
    assert_eq!(wanted(&inventory).1, ["t/*", "t/1"], "the host stays asked for by its name");

    // What is taken away goes, and so does its cluster, which nothing leads to any more.
    remove(&mut inventory, Kind::VirtualHost, "t/1");
    assert!(settled(&mut inventory, now));
    assert_eq!(wanted(&inventory), (vec!["all".to_owned()], vec!["t/*".to_owned()]));
    assert!(!inventory.snapshot().clusters.contains_key("a"));
}

#[test]
fn what_nobody_has_is_known_until_somebody_has_it() {
    let (mut inventory, mut questions, now) = on_demand();
    let mut answer = question(&mut inventory, &mut questions, "none", now).unwrap();
    remove(&mut inventory, Kind::VirtualHost, "t/none");
    settled(&mut inventory, now);
    answer_all(&mut inventory, now);
    assert!(answer.try_recv().is_ok());
    assert!(question(&mut inventory, &mut questions, "none", now).is_none(), "it is not asked again");
    assert_eq!(wanted(&inventory).1, ["t/*", "t/none"]);
    add(&mut inventory, Kind::VirtualHost, vec![host("1", "none")]);
    settled(&mut inventory, now);
    serve(&mut inventory, "a");
    assert!(settled(&mut inventory, now));
    answer_all(&mut inventory, now);
    assert_eq!(leads_to(&inventory, "none"), "t/1");
    assert_eq!(wanted(&inventory).1, ["t/*", "t/1"]);
}

#[test]
fn a_wildcard_in_hand_does_not_answer_for_names_that_were_never_asked_for() {
    let (mut inventory, mut questions, now) = on_demand();
    question(&mut inventory, &mut questions, "a.b", now).unwrap();
    let update = Update {
        kind: Kind::VirtualHost,
        added: vec![host("wild", "*.b")],
        removed: vec!["t/a.b".to_owned()],
    };
    inventory.apply(&update);
    settled(&mut inventory, now);
    serve(&mut inventory, "a");
    settled(&mut inventory, now);
    answer_all(&mut inventory, now);
    assert_eq!(leads_to(&inventory, "a.b"), "t/wild");
    assert!(question(&mut inventory, &mut questions, "a.b", now).is_none());
    let mut other = question(&mut inventory, &mut questions, "c.b", now).unwrap();
    assert!(other.try_recv().is_err());
    let own = host("own", "c.b");
    inventory.apply(&Update { kind: Kind::VirtualHost, added: vec![own], removed: vec!["t/c.b".to_owned()] });
    settled(&mut inventory, now);
    answer_all(&mut inventory, now);
    assert!(other.try_recv().is_ok());
    assert_eq!(leads_to(&inventory, "c.b"), "t/own");
}

#[test]
fn without_an_answer_a_name_is_given_up_but_stays_asked_for() {
    let (mut inventory, mut questions, now) = on_demand();
    let mut answer = question(&mut inventory, &mut questions, "one", now).unwrap();
    let deadline = inventory.deadline(now).unwrap();
    settled(&mut inventory, deadline);
    answer_all(&mut inventory, deadline);
    assert!(answer.try_recv().is_ok());
    assert_eq!(standing(&inventory, "one"), Standing::Unanswered);
    assert_eq!(wanted(&inventory).1, ["t/*", "t/one"]);
    assert_eq!(inventory.deadline(deadline), None);
    // The answer may come later.
    remove(&mut inventory, Kind::VirtualHost, "t/one");
    answer_all(&mut inventory, deadline);
    assert_eq!(standing(&inventory, "one"), Standing::Settled);
    // Once the mesh has it, nothing goes by the catch-all any more, though its cluster is not here yet.
    add(&mut inventory, Kind::VirtualHost, vec![host("1", "one")]);
    settled(&mut inventory, deadline);
    answer_all(&mut inventory, deadline);
    assert_eq!(standing(&inventory, "one"), Standing::Unknown);
    serve(&mut inventory, "a");
    assert!(settled(&mut inventory, deadline));
    assert_eq!(leads_to(&inventory, "one"), "t/1");
}

#[test]
fn names_without_an_answer_push_out_no_name_that_has_one() {
    let (mut inventory, mut questions, now) = on_demand();
    for number in 0..1_000 {
        let name = format!("old-{number}");
        question(&mut inventory, &mut questions, &name, now).unwrap();
        remove(&mut inventory, Kind::VirtualHost, &format!("t/{name}"));
        answer_all(&mut inventory, now);
    }
    // Without a control plane.
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    let mut over = table.demand.as_ref().unwrap().ask("new");
    inventory.ask(questions.try_recv().unwrap(), now, false);
    assert!(over.try_recv().is_ok());
    assert_eq!(standing(&inventory, "new"), Standing::Unknown);
    assert!((0..1_000).all(|number| standing(&inventory, &format!("old-{number}")) == Standing::Settled));
}

#[test]
fn what_passes_through_unknown_destinations_comes_last() {
    let mut inventory = inventory();
    inventory.set_take(Take::Used, None);
    let now = Instant::now();
    let with = |name: &str, table: &str, redirects: bool| {
        let mut proto = ListenerProto::decode(listener(name, table).body).unwrap();
        proto.use_original_dst = redirects.then_some(BoolValue { value: true });
        proto.bind_to_port = Some(BoolValue { value: redirects });
        received(name, &proto)
    };
    add(&mut inventory, Kind::Route, vec![routes("all", "passthrough"), routes("t", "a")]);
    add(
        &mut inventory,
        Kind::Listener,
        vec![with("virtualOutbound", "all", true), with("service", "t", false)],
    );
    settled(&mut inventory, now);
    serve(&mut inventory, "passthrough");
    settled(&mut inventory, now);
    assert!(
        inventory.snapshot().listeners.by_name.is_empty(),
        "connections to the service would pass through"
    );
    serve(&mut inventory, "a");
    assert!(settled(&mut inventory, now));
    assert_eq!(inventory.snapshot().listeners.by_name.len(), 2);
    // Later ones do not take it out of force.
    add(
        &mut inventory,
        Kind::Listener,
        vec![with("virtualOutbound", "t", true), with("late", "none", false)],
    );
    settled(&mut inventory, now);
    assert_eq!(inventory.snapshot().listeners.by_name.len(), 2);
}

fn standing(inventory: &Inventory, authority: &str) -> Standing {
    inventory.snapshot().routes["t"].demand.as_ref().unwrap().standing(authority)
}

#[test]
fn random_names_cost_a_bounded_memory_and_do_not_push_out_what_is_used() {
    let (mut inventory, mut questions, now) = on_demand();
    let absent = |inventory: &mut Inventory, questions: &mut _, name: &str| {
        question(inventory, questions, name, now).map(|mut answer| {
            remove(inventory, Kind::VirtualHost, &format!("t/{name}"));
            settled(inventory, now);
            answer_all(inventory, now);
            assert!(answer.try_recv().is_ok());
        })
    };
    assert!(absent(&mut inventory, &mut questions, "used").is_some());
    for number in 0..2_500 {
        assert!(absent(&mut inventory, &mut questions, &format!("random-{number}")).is_some());
        assert!(absent(&mut inventory, &mut questions, "used").is_none());
        assert!(wanted(&inventory).1.len() <= 1_001);
    }
    // Nor do names that nobody answers to.
    for number in 0..2_500 {
        question(&mut inventory, &mut questions, &format!("open-{number}"), now);
    }
    assert!(wanted(&inventory).1.len() <= 1_001);
    let mut over = question(&mut inventory, &mut questions, "one-more", now).unwrap();
    assert!(over.try_recv().is_ok(), "it does not wait");
    // What is no name is not asked for.
    for wrong in ["", "a/b", "*", "a b", "\u{e4}", &"x".repeat(300)] {
        assert!(question(&mut inventory, &mut questions, wrong, now).is_none(), "{wrong:?}");
    }
}

#[test]
fn what_no_request_uses_for_an_hour_is_let_go_of() {
    let (mut inventory, mut questions, now) = on_demand();
    question(&mut inventory, &mut questions, "one", now).unwrap();
    let added = vec![host("1", "one"), host("2", "two")];
    inventory.apply(&Update { kind: Kind::VirtualHost, added, removed: vec!["t/one".to_owned()] });
    settled(&mut inventory, now);
    serve(&mut inventory, "a");
    settled(&mut inventory, now);
    answer_all(&mut inventory, now);
    question(&mut inventory, &mut questions, "none", now).unwrap();
    remove(&mut inventory, Kind::VirtualHost, "t/none");
    answer_all(&mut inventory, now);
    let half = now + std::time::Duration::from_secs(1_801);
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    skysail_policy::config::demand::mark(&skysail_policy::route::virtual_host(&table, "one").unwrap().0.used);
    inventory.drop_idle(half);
    assert_eq!(wanted(&inventory).1, ["t/*", "t/1", "t/2", "t/none"]);
    inventory.drop_idle(half + std::time::Duration::from_secs(1_801));
    assert!(settled(&mut inventory, now));
    assert_eq!(wanted(&inventory).1, ["t/*", "t/1"]);
    inventory.drop_idle(half + std::time::Duration::from_secs(5_000));
    assert!(settled(&mut inventory, now));
    assert_eq!(wanted(&inventory), (vec!["all".to_owned()], vec!["t/*".to_owned()]));
}

#[test]
fn a_slow_host_holds_up_no_other_and_its_old_form_stays_meanwhile() {
    let (mut inventory, _questions, now) = on_demand();
    add(&mut inventory, Kind::VirtualHost, vec![host("1", "one")]);
    settled(&mut inventory, now);
    serve(&mut inventory, "a");
    settled(&mut inventory, now);
    // The host moves to a cluster that does not come.
    let moved = RouteConfiguration::decode(routes("t", "b").body).unwrap().virtual_hosts.remove(0);
    let moved = VirtualHost { name: "t/1".into(), domains: vec!["one".into()], ..moved };
    add(&mut inventory, Kind::VirtualHost, vec![received("t/1", &moved), host("2", "two")]);
    settled(&mut inventory, now);
    assert_eq!(leads_to(&inventory, "two"), "t/2");
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    assert!(
        uses::of_table(&table).any(|name| name == "a") && !uses::of_table(&table).any(|name| name == "b")
    );
    assert_eq!(wanted(&inventory).0, ["a", "all", "b"]);
    // That there is none is an answer.
    remove(&mut inventory, Kind::Cluster, "b");
    assert!(settled(&mut inventory, now));
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    assert!(uses::of_table(&table).any(|name| name == "b"));
}

#[test]
fn a_server_that_is_not_ours_is_asked_for_all() {
    let mut inventory = inventory();
    let now = Instant::now();
    inventory.set_take(Take::NotYet, None);
    assert_eq!(wanted(&inventory), (vec![], vec![]));
    let (sender, _questions) = mpsc::unbounded_channel();
    inventory.set_take(Take::All, Some(sender));
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    add(&mut inventory, Kind::Route, vec![routes("t", "a")]);
    assert!(!settled(&mut inventory, now), "no clusters have come");
    assert!(!inventory.is_warm(now));
    assert_eq!(wanted(&inventory), (vec!["*".to_owned()], vec![]));
    serve(&mut inventory, "a");
    serve(&mut inventory, "of nobody");
    assert!(settled(&mut inventory, now));
    assert!(inventory.is_warm(now));
    assert_eq!(inventory.snapshot().clusters.len(), 2);
    assert!(inventory.snapshot().routes["t"].demand.is_none());
    // What is not among all is not waited for.
    add(&mut inventory, Kind::Route, vec![routes("t", "none")]);
    assert!(settled(&mut inventory, now));
    // Virtual hosts come all, too.
    add(&mut inventory, Kind::Route, vec![table_of_hosts()]);
    assert_eq!(wanted(&inventory).1, ["t"]);
}
