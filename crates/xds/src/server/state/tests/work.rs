//! Cost of requests for the server, counted in steps and not in time.

use super::*;
use crate::work::steps_of;

/// Returns names that no resource has.
fn unknown(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("none-{number:06}")).collect()
}

fn names(kind: Kind, nonce: u64, names: Vec<String>) -> SubscriptionRequest {
    SubscriptionRequest { names, ..ask(kind, nonce, &[]) }
}

/// Returns clusters with these names.
fn clusters(names: &[String]) -> World {
    let mut resources = Resources::default();
    for name in names {
        resources.insert(Resource::from_body(Cluster, name, Bytes::from_static(b"1")));
    }
    let mut world = World::default();
    world.0.replace(1, &resources);
    world
}

/// Applies a request and makes the responses. Returns the steps, and the cost that is charged.
fn steps(session: &mut Session, request: SubscriptionRequest, world: &World) -> (usize, u64) {
    let mut cost = 0;
    let steps = steps_of(|| {
        cost = session.request(request, &world.now(), &mut |_| {}).cost;
        session.pushes(&world.now()).unwrap();
    });
    (steps, cost)
}

#[test]
fn invalid_authorities_are_not_looked_up_by_suffix() {
    let world = hosts(&[("*.b:80", b"1", &["*.b"])]);
    let find = |authority: String| {
        let mut found = false;
        let name = format!("80/{authority}");
        let steps = steps_of(|| found = world.now().find(VirtualHost, &name).is_some());
        (found, steps)
    };
    let longest = format!("{}b:15021", "a.".repeat(126).trim_end_matches(":15021"));
    assert_eq!(find(format!("{}b", "a.".repeat(127))), (true, 2), "as many labels as a domain name has");
    assert_eq!(find(longest).1, 1, "no wildcard has a suffix of the length of one of these");
    assert_eq!(find(format!("{}b", "a.".repeat(128))), (false, 0), "too many labels");
    assert_eq!(find(format!("{}.b", "a".repeat(257))), (true, 2));
    assert_eq!(find(format!("{}.b", "a".repeat(258))), (false, 0), "too long");
    assert_eq!(find(format!("{}b", ".".repeat(200_000))), (false, 0));
    let long_family = format!("{}/a.b", "8".repeat(2_000));
    assert!(world.now().find(VirtualHost, &long_family).is_none());
}

#[test]
fn each_lookup_of_an_authority_is_charged() {
    let world = hosts(&[("*.b:80", b"1", &["*.b"])]);
    let cost = |authority: &str| {
        let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
        steps(&mut session, ask(VirtualHost, 0, &[&format!("80/{authority}")]), &world).1
    };
    assert_eq!(cost("a.a.a.a.c") - cost("a.c"), 3 * limits::LOOKUP_COST);
}

#[test]
fn unsubscribing_a_name_resolves_no_other() {
    let world = hosts(&[("*.b:80", b"1", &["*.b"])]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let mut wanted: Vec<_> = (0..1_000).map(|number| format!("80/x.y.none-{number}")).collect();
    wanted.push("80/x.b".into());
    assert!(steps(&mut session, names(VirtualHost, 0, wanted), &world).0 >= 2_000);
    session.request(ask(VirtualHost, 1, &["80/*.b:80"]), &world.now(), &mut |_| {});
    let give_up =
        |name: &str| SubscriptionRequest { unsubscribe: vec![name.to_owned()], ..ask(VirtualHost, 0, &[]) };
    let of_none = steps(&mut session, give_up("80/y"), &world).0;
    let of_one = steps(&mut session, give_up("80/x.y.none-7"), &world).0;
    assert!(of_none < 10, "{of_none} steps for a name that was not held");
    assert!(of_one < 1_100, "{of_one} steps for one of 1,000 names, which are summed up once");
    // A subscribed authority still resolves to the host.
    let again = exchange(&mut session, give_up("80/*.b:80"), &world);
    assert_eq!(again.last().map(|(kind, _, sent, _)| (*kind, &**sent)), Some((VirtualHost, "80/*.b:80")));
}

#[test]
fn too_many_authorities_are_not_resolved() {
    let world = hosts(&[("*.b:80", b"1", &["*.b"])]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let many = (0..=limits::MAX_AUTHORITIES).map(|number| format!("80/{number}.x.y.b")).collect();
    session.request(names(VirtualHost, 0, many), &world.now(), &mut |_| {});
    assert_eq!(session.authorities(), limits::MAX_AUTHORITIES + 1, "the stream is ended for that");
    let looked_up = &session.subscriptions[VirtualHost as usize].resolved;
    assert!(looked_up.is_empty(), "{} were looked up", looked_up.len());
}

#[test]
fn empty_requests_do_not_scan_names_that_wait_for_an_ack() {
    const MANY: usize = 5_000;
    for form in [Form::Delta, Form::Sotw] {
        let world = resources(&[(Endpoint, "a", b"1")]);
        let mut session = Session::new(form, Arc::default(), Arc::default());
        steps(&mut session, ask(Endpoint, 0, &["a"]), &world);
        // These names wait for the acknowledgement of the first response.
        steps(&mut session, names(Endpoint, 0, unknown(MANY)), &world);
        let repeated = || if form == Form::Delta { Vec::new() } else { unknown(10) };
        steps(&mut session, names(Endpoint, 0, repeated()), &world);
        let (steps, _) = steps(&mut session, names(Endpoint, 0, repeated()), &world);
        assert!(steps <= 2 * repeated().len(), "{form:?}: {steps} steps");
    }
}

#[test]
fn requests_that_change_nothing_do_not_scan_the_subscription() {
    const MANY: usize = 5_000;
    let world = resources(&[(Endpoint, "a", b"1"), (Cluster, "a", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let cost = steps(&mut session, names(Endpoint, 0, unknown(MANY)), &world);
    assert!(cost.0 >= MANY && cost.1 >= MANY as u64 * limits::RESOURCE_COST, "{cost:?}");
    assert!(steps(&mut session, ask(Endpoint, 1, &[]), &world).0 < 10, "an acknowledgement");
    assert!(steps(&mut session, ask(Endpoint, 0, &[]), &world).0 < 10, "an empty request");
    assert_eq!(session.name_bytes(), unknown(MANY).iter().map(|name| limits::name_cost(name)).sum::<usize>());
}

#[test]
fn removals_are_not_scanned_while_they_must_wait() {
    const MANY: usize = 5_000;
    let world = resources(&[(Cluster, "a", b"1"), (Listener, "a", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    steps(&mut session, ask(Listener, 0, &["*"]), &world);
    // Removals of clusters wait until the listeners are acknowledged.
    let have = unknown(MANY).into_iter().chain(["a".into()]).map(|name| (name, "1".to_owned())).collect();
    let first = steps(&mut session, SubscriptionRequest { have, ..ask(Cluster, 0, &["*"]) }, &world);
    assert!(first.0 >= MANY, "{first:?}");
    session.request(ask(Cluster, 2, &[]), &world.now(), &mut |_| {});
    session.release();
    session.pushes(&world.now()).unwrap();
    assert!(session.name_bytes() > 0, "they are still to be said");
    assert!(steps(&mut session, ask(Cluster, 0, &["x"]), &world).0 < 100);
}

#[test]
fn state_of_the_world_pays_for_repeated_subscriptions() {
    let world = clusters(&unknown(100));
    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    for nonce in 1..3 {
        let (_, cost) = steps(&mut session, ask(Cluster, 0, &[]), &world);
        assert!(cost >= 100 * limits::RESOURCE_COST, "{cost} for response {nonce}");
        assert_eq!(steps(&mut session, ask(Cluster, nonce, &[]), &world).1, 0, "an acknowledgement");
    }
}

/// Returns authorities that match no host, with the maximum number of labels.
fn authorities(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("80/{}{number:04}", "a.".repeat(127))).collect()
}

#[test]
fn a_change_of_domains_costs_in_proportion_to_the_affected_names() {
    const MANY: usize = 2_000;
    let world = hosts(&[("a:80", b"1", &["a"])]);
    let mut waiting = Session::new(Form::Delta, Arc::default(), Arc::default());
    session_waits(&mut waiting, authorities(MANY), &world);
    let mut change = |world: &mut World, name: &str, domain: &str| {
        add_hosts(world, &[(name, b"1", &[domain])]);
        let steps = steps_of(|| _ = waiting.pushes(&world.now()).unwrap());
        (steps, waiting.take_debt())
    };
    let mut world = world.then(&[]);
    change(&mut world, "first:80", "first");
    let (exact, owed) = change(&mut world, "b:80", "b");
    assert!(exact < 10 && owed == 0, "{exact} steps, {owed} owed for an alias without waiting names");
    let (wildcard, owed) = change(&mut world, "c:80", "*.c");
    assert!((MANY..3 * MANY).contains(&wildcard), "{wildcard} steps for a wildcard");
    assert_eq!(owed, limits::HELD_NAME_COST * MANY as u64);
    let (found, owed) = change(&mut world, "d:80", &authorities(8)[7][3..]);
    assert!((MANY..4 * MANY).contains(&found), "{found} steps for an alias that one name waits for");
    assert!(
        owed >= limits::LOOKUP_COST * 128
            && owed < limits::LOOKUP_COST * 128 + 4 * limits::HELD_NAME_COST * MANY as u64,
        "{owed}"
    );
}

#[test]
fn forgotten_changes_cost_one_lookup_per_wildcard_length() {
    const MANY: usize = 2_000;
    let mut world = hosts(&[("*.b:80", b"1", &["*.b"]), ("*.c:80", b"1", &["*.c"])]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    session_waits(&mut session, authorities(MANY), &world);
    let domains: Vec<_> = (0..3_000).map(|number| format!("new-{number}")).collect();
    add_hosts(&mut world, &[("new:80", b"1", &domains.iter().map(String::as_str).collect::<Vec<_>>())]);
    let steps = steps_of(|| _ = session.pushes(&world.now()).unwrap());
    assert!((MANY..3 * MANY).contains(&steps), "{steps} steps");
    assert_eq!(session.take_debt(), limits::LOOKUP_COST * 128 * MANY as u64);
}

/// Subscribes to virtual host names and acknowledges the response.
fn session_waits(session: &mut Session, wanted: Vec<String>, world: &World) {
    session.request(names(VirtualHost, 0, wanted), &world.now(), &mut |_| {});
    session.pushes(&world.now()).unwrap();
    session.request(ask(VirtualHost, 1, &[]), &world.now(), &mut |_| {});
}

#[test]
fn a_wildcard_is_charged_once_while_nothing_is_sent() {
    let world = clusters(&unknown(100));
    for form in [Form::Delta, Form::Sotw] {
        let mut session = Session::new(form, Arc::default(), Arc::default());
        let mut cost = |names: &[&str], unsubscribe: &[&str]| {
            let unsubscribe = unsubscribe.iter().map(|name| (*name).to_owned()).collect();
            let request = SubscriptionRequest { unsubscribe, ..ask(Cluster, 0, names) };
            // No response is made between the requests.
            session.request(request, &world.now(), &mut |_| {}).cost
        };
        assert!(cost(&["*"], &[]) >= 100 * limits::RESOURCE_COST, "{form:?}");
        let again = if form == Form::Delta { cost(&[], &["x"]) } else { cost(&["*"], &[]) };
        assert!(again < 100 * limits::RESOURCE_COST, "{form:?}: {again}");
        if form == Form::Delta {
            cost(&[], &["*"]);
            assert!(cost(&["*"], &[]) >= 100 * limits::RESOURCE_COST, "the wildcard is subscribed to again");
        }
    }
}

#[test]
fn the_required_bytes_of_an_acknowledgement_are_free() {
    let many: Vec<_> = (0..100).map(|number| format!("endpoints-{number}")).collect();
    let world = resources(&[(Endpoint, "a", b"1"), (Cluster, "a", b"1")]);
    for form in [Form::Delta, Form::Sotw] {
        let mut session = Session::new(form, Arc::default(), Arc::default());
        let mut take = |nonce, names: Vec<String>| {
            let taken = session.request(
                SubscriptionRequest { names, ..ask(Endpoint, nonce, &[]) },
                &world.now(),
                &mut |_| {},
            );
            session.pushes(&world.now()).unwrap();
            (taken.cost, taken.free)
        };
        let with = |more: Vec<String>| [many.clone(), vec!["a".into()], more].concat();
        assert_eq!(take(0, with(Vec::new())).1, 0, "{form:?}: a subscription");
        if form == Form::Delta {
            assert_eq!(take(1, Vec::new()), (0, limits::FREE_ACKNOWLEDGEMENT));
            continue;
        }
        let names = with(Vec::new()).iter().map(|name| 4 + name.len()).sum::<usize>();
        assert_eq!(take(1, with(Vec::new())), (0, limits::FREE_ACKNOWLEDGEMENT + names));
        // The same subscription again, which is answered.
        take(0, with(Vec::new()));
        let (cost, free) = take(2, with(vec!["a".into(); 1_000]));
        assert!(cost >= 999 * limits::NAME_COST && free == 0, "repeated names: {cost}, {free}");
    }
}
