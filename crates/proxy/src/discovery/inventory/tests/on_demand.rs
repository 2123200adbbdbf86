//! On-demand discovery of the virtual hosts of requests.

use super::*;

/// Returns an inventory in on-demand mode. Route configuration `t` is in effect; its catch-all selects cluster `all`.
fn on_demand() -> (Inventory, mpsc::UnboundedReceiver<HostRequest>, Instant) {
    let mut inventory = inventory();
    let (sender, host_requests) = mpsc::unbounded_channel();
    inventory.set_mode(ClusterMode::OnDemand, Some(sender));
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
    (inventory, host_requests, now)
}

fn settled(inventory: &mut Inventory, now: Instant) -> bool {
    let changed = inventory.settle(now);
    let wanted = inventory.wanted();
    inventory.drop_unwanted(&wanted, now);
    inventory.settle(now) || changed
}

/// Returns the names of clusters and virtual hosts that are subscribed to.
fn wanted(inventory: &Inventory) -> (Vec<String>, Vec<String>) {
    let [(_, clusters), _, _, (_, hosts), _] = inventory.wanted();
    (clusters.into_iter().collect(), hosts.into_iter().collect())
}

/// Adds a cluster and its endpoints.
fn serve(inventory: &mut Inventory, name: &str) {
    add(inventory, Kind::Cluster, vec![cluster(name, 1)]);
    add(inventory, Kind::Endpoint, vec![endpoints(name, 1)]);
}

/// Requests an authority, if the route configuration in effect needs the request.
fn host_request(
    inventory: &mut Inventory,
    host_requests: &mut mpsc::UnboundedReceiver<HostRequest>,
    authority: &str,
    now: Instant,
) -> Option<oneshot::Receiver<()>> {
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    let demand = table.demand.as_ref().unwrap();
    if demand.status(authority) != HostStatus::Unknown {
        return None;
    }
    let answer = demand.request(authority);
    inventory.request_host(host_requests.try_recv().unwrap(), now, true);
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
    let (mut inventory, mut host_requests, now) = on_demand();
    let mut first = host_request(&mut inventory, &mut host_requests, "one", now).unwrap();
    let mut second = host_request(&mut inventory, &mut host_requests, "one", now).unwrap();
    assert_eq!(wanted(&inventory).1, ["t/*", "t/one"], "they share one request");
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
    assert_eq!(wanted(&inventory).1, ["t/*", "t/1"], "the host stays subscribed by its name");

    // A deleted virtual host is removed, and so is its cluster, which no route selects any more.
    remove(&mut inventory, Kind::VirtualHost, "t/1");
    assert!(settled(&mut inventory, now));
    assert_eq!(wanted(&inventory), (vec!["all".to_owned()], vec!["t/*".to_owned()]));
    assert!(!inventory.snapshot().clusters.contains_key("a"));
}

#[test]
fn an_absent_authority_is_remembered_until_a_virtual_host_has_it() {
    let (mut inventory, mut host_requests, now) = on_demand();
    let mut answer = host_request(&mut inventory, &mut host_requests, "none", now).unwrap();
    remove(&mut inventory, Kind::VirtualHost, "t/none");
    settled(&mut inventory, now);
    answer_all(&mut inventory, now);
    assert!(answer.try_recv().is_ok());
    assert!(host_request(&mut inventory, &mut host_requests, "none", now).is_none(), "it is not asked again");
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
fn a_wildcard_host_does_not_answer_for_authorities_that_were_never_requested() {
    let (mut inventory, mut host_requests, now) = on_demand();
    host_request(&mut inventory, &mut host_requests, "a.b", now).unwrap();
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
    assert!(host_request(&mut inventory, &mut host_requests, "a.b", now).is_none());
    let mut other = host_request(&mut inventory, &mut host_requests, "c.b", now).unwrap();
    assert!(other.try_recv().is_err());
    let own = host("own", "c.b");
    inventory.apply(&Update { kind: Kind::VirtualHost, added: vec![own], removed: vec!["t/c.b".to_owned()] });
    settled(&mut inventory, now);
    answer_all(&mut inventory, now);
    assert!(other.try_recv().is_ok());
    assert_eq!(leads_to(&inventory, "c.b"), "t/own");
}

#[test]
fn without_an_answer_an_authority_times_out_but_stays_subscribed() {
    let (mut inventory, mut host_requests, now) = on_demand();
    let mut answer = host_request(&mut inventory, &mut host_requests, "one", now).unwrap();
    let deadline = inventory.deadline(now).unwrap();
    settled(&mut inventory, deadline);
    answer_all(&mut inventory, deadline);
    assert!(answer.try_recv().is_ok());
    assert_eq!(host_status(&inventory, "one"), HostStatus::Unanswered);
    assert_eq!(wanted(&inventory).1, ["t/*", "t/one"]);
    assert_eq!(inventory.deadline(deadline), None);
    // A late answer is accepted.
    remove(&mut inventory, Kind::VirtualHost, "t/one");
    answer_all(&mut inventory, deadline);
    assert_eq!(host_status(&inventory, "one"), HostStatus::Settled);
    // Once the authority exists, no request uses the catch-all for it, though its cluster is missing.
    add(&mut inventory, Kind::VirtualHost, vec![host("1", "one")]);
    settled(&mut inventory, deadline);
    answer_all(&mut inventory, deadline);
    assert_eq!(host_status(&inventory, "one"), HostStatus::Unknown);
    serve(&mut inventory, "a");
    assert!(settled(&mut inventory, deadline));
    assert_eq!(leads_to(&inventory, "one"), "t/1");
}

#[test]
fn pending_authorities_do_not_evict_answered_ones() {
    let (mut inventory, mut host_requests, now) = on_demand();
    for number in 0..1_000 {
        let name = format!("old-{number}");
        host_request(&mut inventory, &mut host_requests, &name, now).unwrap();
        remove(&mut inventory, Kind::VirtualHost, &format!("t/{name}"));
        answer_all(&mut inventory, now);
    }
    // Without a connection to the control plane.
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    let mut over = table.demand.as_ref().unwrap().request("new");
    inventory.request_host(host_requests.try_recv().unwrap(), now, false);
    assert!(over.try_recv().is_ok());
    assert_eq!(host_status(&inventory, "new"), HostStatus::Unknown);
    assert!(
        (0..1_000).all(|number| host_status(&inventory, &format!("old-{number}")) == HostStatus::Settled)
    );
}

#[test]
fn a_listener_that_passes_through_connections_starts_last() {
    let mut inventory = inventory();
    inventory.set_mode(ClusterMode::OnDemand, None);
    let now = Instant::now();
    let with = |name: &str, table: &str, redirects: bool| {
        let mut proto = ListenerProto::decode(listener(name, table).body).unwrap();
        proto.use_original_dst = redirects.then_some(BoolValue { value: true });
        proto.bind_to_port = Some(BoolValue { value: redirects });
        proto.address = address(if redirects { 15_001 } else { 8080 });
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
    // It stays in effect when another listener arrives that is not warm.
    add(
        &mut inventory,
        Kind::Listener,
        vec![with("virtualOutbound", "t", true), with("late", "none", false)],
    );
    settled(&mut inventory, now);
    assert_eq!(inventory.snapshot().listeners.by_name.len(), 2);
}

fn host_status(inventory: &Inventory, authority: &str) -> HostStatus {
    inventory.snapshot().routes["t"].demand.as_ref().unwrap().status(authority)
}

#[test]
fn random_authorities_use_bounded_memory_and_do_not_evict_those_in_use() {
    let (mut inventory, mut host_requests, now) = on_demand();
    let absent = |inventory: &mut Inventory, host_requests: &mut _, name: &str| {
        host_request(inventory, host_requests, name, now).map(|mut answer| {
            remove(inventory, Kind::VirtualHost, &format!("t/{name}"));
            settled(inventory, now);
            answer_all(inventory, now);
            assert!(answer.try_recv().is_ok());
        })
    };
    assert!(absent(&mut inventory, &mut host_requests, "used").is_some());
    for number in 0..2_500 {
        assert!(absent(&mut inventory, &mut host_requests, &format!("random-{number}")).is_some());
        assert!(absent(&mut inventory, &mut host_requests, "used").is_none());
        assert!(wanted(&inventory).1.len() <= 1_001);
    }
    // Neither do authorities without an answer.
    for number in 0..2_500 {
        host_request(&mut inventory, &mut host_requests, &format!("open-{number}"), now);
    }
    assert!(wanted(&inventory).1.len() <= 1_001);
    let mut over = host_request(&mut inventory, &mut host_requests, "one-more", now).unwrap();
    assert!(over.try_recv().is_ok(), "the request is answered at once");
    // An invalid name is not subscribed to.
    for wrong in ["", "a/b", "*", "a b", "\u{e4}", &"x".repeat(300)] {
        assert!(host_request(&mut inventory, &mut host_requests, wrong, now).is_none(), "{wrong:?}");
    }
}

#[test]
fn a_host_that_no_request_uses_for_an_hour_is_dropped() {
    let (mut inventory, mut host_requests, now) = on_demand();
    host_request(&mut inventory, &mut host_requests, "one", now).unwrap();
    let added = vec![host("1", "one"), host("2", "two")];
    inventory.apply(&Update { kind: Kind::VirtualHost, added, removed: vec!["t/one".to_owned()] });
    settled(&mut inventory, now);
    serve(&mut inventory, "a");
    settled(&mut inventory, now);
    answer_all(&mut inventory, now);
    host_request(&mut inventory, &mut host_requests, "none", now).unwrap();
    remove(&mut inventory, Kind::VirtualHost, "t/none");
    answer_all(&mut inventory, now);
    let half = now + std::time::Duration::from_secs(1_801);
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    skysail_policy::route::virtual_host(&table, "one").unwrap().0.used.mark();
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
fn a_host_that_is_not_warm_delays_no_other_and_its_old_version_stays() {
    let (mut inventory, _questions, now) = on_demand();
    add(&mut inventory, Kind::VirtualHost, vec![host("1", "one")]);
    settled(&mut inventory, now);
    serve(&mut inventory, "a");
    settled(&mut inventory, now);
    // The new version of the virtual host selects a cluster that does not arrive.
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
    // The absence of the cluster is an answer.
    remove(&mut inventory, Kind::Cluster, "b");
    assert!(settled(&mut inventory, now));
    let table = Arc::clone(&inventory.snapshot().routes["t"]);
    assert!(uses::of_table(&table).any(|name| name == "b"));
}

#[test]
fn another_vendors_server_is_asked_for_all_clusters() {
    let mut inventory = inventory();
    let now = Instant::now();
    inventory.set_mode(ClusterMode::Undecided, None);
    assert_eq!(wanted(&inventory), (vec![], vec![]));
    let (sender, _questions) = mpsc::unbounded_channel();
    inventory.set_mode(ClusterMode::All, Some(sender));
    add(&mut inventory, Kind::Listener, vec![listener("l", "t")]);
    add(&mut inventory, Kind::Route, vec![routes("t", "a")]);
    assert!(!settled(&mut inventory, now), "no clusters have come");
    assert!(!inventory.is_warm(now));
    assert_eq!(wanted(&inventory), (vec!["*".to_owned()], vec![]));
    serve(&mut inventory, "a");
    serve(&mut inventory, "unused");
    assert!(settled(&mut inventory, now));
    assert!(inventory.is_warm(now));
    assert_eq!(inventory.snapshot().clusters.len(), 2);
    assert!(inventory.snapshot().routes["t"].demand.is_none());
    // A cluster that the wildcard subscription did not deliver is not waited for.
    add(&mut inventory, Kind::Route, vec![routes("t", "none")]);
    assert!(settled(&mut inventory, now));
    // All virtual hosts are subscribed to, too.
    add(&mut inventory, Kind::Route, vec![table_of_hosts()]);
    assert_eq!(wanted(&inventory).1, ["t"]);
}
