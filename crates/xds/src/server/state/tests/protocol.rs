//! Statements of the protocol that the other tests do not cover:
//! <https://www.envoyproxy.io/docs/envoy/v1.40.0/api-docs/xds_protocol>.

use super::*;

fn unsubscribe(kind: Kind, nonce: u64, names: &[&str]) -> SubscriptionRequest {
    SubscriptionRequest {
        unsubscribe: names.iter().map(|name| (*name).to_owned()).collect(),
        ..ask(kind, nonce, &[])
    }
}

/// Applies a request and returns the reported events, without those about the names of a subscription.
fn reported(session: &mut Session, request: SubscriptionRequest, world: &World) -> Vec<String> {
    let mut events = Vec::new();
    session.request(request, &world.now(), &mut |event| {
        if !matches!(event, Event::Subscribed { .. }) {
            events.push(format!("{event:?}"));
        }
    });
    events
}

/// "How the client specifies what resources to return": the example for the state of the world.
#[test]
fn state_of_the_world_empty_list_is_a_wildcard_until_a_name_is_listed() {
    let world = resources(&[(Cluster, "a", b"1"), (Cluster, "b", b"1")]);
    let changed = world.then(&[(Cluster, "a", b"2"), (Cluster, "b", b"2")]);
    let again = changed.then(&[(Cluster, "a", b"3"), (Cluster, "b", b"3")]);
    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, ask(Cluster, 0, &[]), &world), one(Cluster, 1, "a,b", ""));
    // An acknowledgement is an empty list too.
    assert_eq!(exchange(&mut session, ask(Cluster, 1, &[]), &world), []);
    assert_eq!(exchange(&mut session, ask(Cluster, 1, &["*", "a"]), &world), one(Cluster, 2, "a,b", ""));
    assert_eq!(exchange(&mut session, ask(Cluster, 2, &["*", "a"]), &world), []);
    assert_eq!(exchange(&mut session, ask(Cluster, 2, &["a"]), &world), []);
    assert_eq!(out(&mut session, &changed), one(Cluster, 3, "a", ""));
    assert_eq!(exchange(&mut session, ask(Cluster, 3, &[]), &changed), []);
    assert_eq!(out(&mut session, &again), []);
    assert_eq!(exchange(&mut session, ask(Cluster, 3, &["*"]), &again), one(Cluster, 4, "a,b", ""));

    // A stream whose first request lists a name never has the legacy wildcard.
    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, ask(Listener, 0, &["none"]), &world), one(Listener, 1, "", ""));
    let listeners = world.then(&[(Listener, "l", b"1")]);
    assert_eq!(exchange(&mut session, ask(Listener, 1, &[]), &listeners), []);
}

/// The same section: the example for the incremental form.
#[test]
fn incremental_wildcard_is_an_empty_first_request_or_the_name() {
    let world = resources(&[(Cluster, "a", b"1"), (Cluster, "b", b"1")]);
    let changed = world.then(&[(Cluster, "a", b"2"), (Cluster, "b", b"2")]);
    let again = changed.then(&[(Cluster, "a", b"3"), (Cluster, "b", b"3")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, ask(Cluster, 0, &[]), &world), one(Cluster, 1, "a,b", ""));
    assert_eq!(exchange(&mut session, ask(Cluster, 1, &["a"]), &world), one(Cluster, 2, "a", ""));
    assert_eq!(exchange(&mut session, unsubscribe(Cluster, 2, &["*"]), &world), []);
    assert_eq!(out(&mut session, &changed), one(Cluster, 3, "a", ""));
    assert_eq!(exchange(&mut session, unsubscribe(Cluster, 3, &["a"]), &changed), []);
    assert_eq!(exchange(&mut session, ask(Cluster, 0, &[]), &again), []);
    assert_eq!(exchange(&mut session, ask(Cluster, 0, &["*"]), &again), one(Cluster, 4, "a,b", ""));

    // A first request that unsubscribes is no wildcard.
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, unsubscribe(Cluster, 0, &["a"]), &world), []);
}

/// "Grouping Resources into Responses", "Deleting Resources", "Knowing When a Requested Resource Does Not Exist".
#[test]
fn state_of_the_world_clusters_and_listeners_are_sent_whole() {
    for kind in [Cluster, Listener] {
        let world = resources(&[(kind, "a", b"1"), (kind, "b", b"1"), (kind, "other", b"1")]);
        let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
        assert_eq!(exchange(&mut session, ask(kind, 0, &["a"]), &world), one(kind, 1, "a", ""));
        assert_eq!(exchange(&mut session, ask(kind, 1, &["a"]), &world), []);
        assert_eq!(exchange(&mut session, ask(kind, 1, &["a", "b"]), &world), one(kind, 2, "a,b", ""));
        // A name that no resource has is answered at once by a response without it.
        assert_eq!(exchange(&mut session, ask(kind, 2, &["a", "b", "c"]), &world), one(kind, 3, "a,b", ""));
        assert_eq!(exchange(&mut session, ask(kind, 3, &["a", "b", "c"]), &world), []);
        // The subscription to it remains.
        let more = world.then(&[(kind, "a", b"1"), (kind, "b", b"1"), (kind, "c", b"1")]);
        assert_eq!(out(&mut session, &more), one(kind, 4, "a,b,c", ""));
        assert_eq!(exchange(&mut session, ask(kind, 4, &["a", "b", "c"]), &more), []);
        let fewer = more.then(&[(kind, "b", b"1")]);
        assert_eq!(out(&mut session, &fewer), one(kind, 5, "b", ""));
        assert_eq!(exchange(&mut session, ask(kind, 5, &["a", "b", "c"]), &fewer), []);
        // Also after the last one is deleted.
        assert_eq!(out(&mut session, &fewer.then(&[])), one(kind, 6, "", ""));
    }
}

/// The same sections, for all other types.
#[test]
fn state_of_the_world_absent_routes_and_endpoints_are_not_removals() {
    for kind in [Route, Endpoint] {
        let world = resources(&[(kind, "a", b"1"), (kind, "b", b"1")]);
        let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
        assert_eq!(exchange(&mut session, ask(kind, 0, &["a", "b"]), &world), one(kind, 1, "a,b", ""));
        assert_eq!(exchange(&mut session, ask(kind, 1, &["a", "b", "c"]), &world), []);
        let fewer = world.then(&[(kind, "b", b"1")]);
        assert_eq!(out(&mut session, &fewer), []);
        let others = fewer.then(&[(kind, "b", b"1"), (kind, "c", b"1")]);
        assert_eq!(out(&mut session, &others), one(kind, 2, "c", ""));
        assert_eq!(exchange(&mut session, ask(kind, 2, &["b", "c"]), &others), []);
        assert_eq!(exchange(&mut session, ask(kind, 2, &[]), &others), []);
        assert_eq!(out(&mut session, &others.then(&[(kind, "b", b"2")])), []);
    }
}

/// "Resource updates": a request that answers an older response is stale, also if it lists other names.
#[test]
fn state_of_the_world_stale_requests_are_not_answered() {
    let world = resources(&[(Endpoint, "a", b"1"), (Endpoint, "b", b"1")]);
    let changed = world.then(&[(Endpoint, "a", b"2"), (Endpoint, "b", b"1")]);
    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, ask(Endpoint, 0, &["a"]), &world), one(Endpoint, 1, "a", ""));
    assert_eq!(exchange(&mut session, ask(Endpoint, 1, &["a"]), &world), []);
    assert_eq!(out(&mut session, &changed), one(Endpoint, 2, "a", ""));
    let late = SubscriptionRequest { error: Some("of the former".into()), ..ask(Endpoint, 1, &["a", "b"]) };
    assert_eq!(reported(&mut session, late, &changed), [""; 0]);
    assert_eq!(out(&mut session, &changed), []);
    // The client lists the names again in its answer to the last response.
    assert_eq!(exchange(&mut session, ask(Endpoint, 2, &["a", "b"]), &changed), one(Endpoint, 3, "b", ""));
    // Several requests may answer the same response.
    exchange(&mut session, ask(Endpoint, 3, &["a", "b"]), &changed);
    assert_eq!(exchange(&mut session, ask(Endpoint, 3, &["a"]), &changed), []);
    assert_eq!(exchange(&mut session, ask(Endpoint, 3, &["a", "b"]), &changed), one(Endpoint, 4, "b", ""));
}

/// "Incremental xDS": the nonce decides what is acknowledged, and nothing else.
#[test]
fn incremental_stale_requests_change_the_subscription() {
    let world = resources(&[(Endpoint, "a", b"1"), (Endpoint, "b", b"1")]);
    let changed = world.then(&[(Endpoint, "a", b"2"), (Endpoint, "b", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    exchange(&mut session, ask(Endpoint, 0, &["a"]), &world);
    exchange(&mut session, ask(Endpoint, 1, &[]), &world);
    assert_eq!(out(&mut session, &changed), one(Endpoint, 2, "a", ""));
    assert_eq!(reported(&mut session, ask(Endpoint, 1, &["b"]), &changed), [""; 0]);
    assert_eq!(out(&mut session, &changed), [], "the second response is still in flight");
    let acked = reported(&mut session, ask(Endpoint, 2, &[]), &changed);
    assert_eq!(acked, ["Acked { kind: Endpoint, nonce: 2 }"]);
    assert_eq!(out(&mut session, &changed), one(Endpoint, 3, "b", ""));
    // A nonce that was never sent acknowledges nothing.
    assert_eq!(reported(&mut session, ask(Endpoint, 99, &[]), &changed), [""; 0]);
}

/// "ACK/NACK": for each type separately, also if the NACK adds names.
#[test]
fn a_nack_concerns_its_response_only() {
    for form in [Form::Delta, Form::Sotw] {
        let world = resources(&[(Route, "a", b"1"), (Route, "b", b"1"), (Endpoint, "a", b"1")]);
        let mut session = Session::new(form, Arc::default(), Arc::default());
        assert_eq!(exchange(&mut session, ask(Route, 0, &["a"]), &world), one(Route, 1, "a", ""));
        assert_eq!(exchange(&mut session, ask(Endpoint, 0, &["a"]), &world), one(Endpoint, 2, "a", ""));
        let names: &[&str] = if form == Form::Delta { &["b"] } else { &["a", "b"] };
        let nack = SubscriptionRequest { error: Some("no".into()), ..ask(Route, 1, names) };
        assert_eq!(
            reported(&mut session, nack, &world),
            [r#"Rejected { kind: Route, nonce: 1, reason: "no" }"#]
        );
        assert_eq!(out(&mut session, &world), one(Route, 3, "b", ""));
        let acked = reported(&mut session, ask(Endpoint, 2, &["a"]), &world);
        assert_eq!(acked, ["Acked { kind: Endpoint, nonce: 2 }"]);
    }
}

/// "Unsubscribing from Resources": a client may unsubscribe from a name that it does not subscribe to.
#[test]
fn unsubscribing_an_unknown_name_is_ignored() {
    let world = resources(&[(Endpoint, "a", b"1"), (Endpoint, "b", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    exchange(&mut session, ask(Endpoint, 0, &["a"]), &world);
    exchange(&mut session, ask(Endpoint, 1, &[]), &world);
    assert_eq!(exchange(&mut session, unsubscribe(Endpoint, 0, &["b", "none", "*"]), &world), []);
    let changed = world.then(&[(Endpoint, "a", b"2"), (Endpoint, "b", b"2")]);
    assert_eq!(out(&mut session, &changed), one(Endpoint, 2, "a", ""));
}

/// "Incremental xDS", on reconnecting: the client lists all names again, and is not sent what it has, however it
/// subscribes.
#[test]
fn a_reconnecting_client_is_sent_only_what_differs() {
    let before = resources(&[(Cluster, "a", b"1"), (Cluster, "b", b"1"), (Cluster, "gone", b"1")]);
    let after = before.then(&[(Cluster, "a", b"1"), (Cluster, "b", b"2"), (Cluster, "c", b"1")]);
    let have = ["a", "b", "gone"].map(|name| {
        let version = before.now().get(Cluster, name).unwrap().version_text();
        (name.to_owned(), version)
    });
    let asks: [&[&str]; 3] = [&["*"], &["*", "a", "gone"], &["a", "b", "c", "gone"]];
    for names in asks {
        let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
        let again = SubscriptionRequest { have: have.clone().into(), ..ask(Cluster, 0, names) };
        let mut pushes = exchange(&mut session, again, &after);
        pushes.extend(exchange(&mut session, ask(Cluster, 1, &[]), &after));
        let sent: Vec<_> =
            pushes.iter().map(|push| push.2.as_str()).filter(|text| !text.is_empty()).collect();
        let removed: Vec<_> =
            pushes.iter().map(|push| push.3.as_str()).filter(|text| !text.is_empty()).collect();
        assert_eq!((sent, removed), (vec!["b,c"], vec!["gone"]), "{names:?}");
    }
}

/// "Eventual consistency considerations", as far as whole states allow it.
#[test]
fn state_of_the_world_clusters_are_sent_first_and_removed_last() {
    let before = resources(&[
        (Cluster, "old", b"1"),
        (Endpoint, "old", b"1"),
        (Listener, "l", b"1"),
        (Route, "r", b"1"),
    ]);
    let both = before.then(&[
        (Cluster, "new", b"1"),
        (Cluster, "old", b"1"),
        (Endpoint, "new", b"1"),
        (Endpoint, "old", b"1"),
        (Listener, "l", b"2"),
        (Route, "r", b"2"),
    ]);
    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    let first =
        [ask(Cluster, 0, &[]), ask(Endpoint, 0, &["old"]), ask(Listener, 0, &[]), ask(Route, 0, &["r"])];
    for (request, nonce) in first.into_iter().zip(1..) {
        let (kind, names) = (request.kind, request.names.clone());
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(exchange(&mut session, request, &before).len(), 1);
        assert_eq!(exchange(&mut session, ask(kind, nonce, &names), &before), []);
    }
    // Listeners and routes follow the endpoints of the new cluster.
    assert_eq!(out(&mut session, &both), one(Cluster, 5, "new,old", ""));
    assert!(session.is_holding());
    assert_eq!(exchange(&mut session, ask(Cluster, 5, &[]), &both), []);
    let sent = exchange(&mut session, ask(Endpoint, 2, &["new", "old"]), &both);
    let expected = [one(Endpoint, 6, "new,old", ""), one(Listener, 7, "l", ""), one(Route, 8, "r", "")];
    assert_eq!(sent, expected.concat());
    assert_eq!(exchange(&mut session, ask(Endpoint, 6, &["new", "old"]), &both), []);
    exchange(&mut session, ask(Listener, 7, &[]), &both);
    exchange(&mut session, ask(Route, 8, &["r"]), &both);
    // The removal of a cluster follows the route that no longer refers to it.
    let after = both.then(&[
        (Cluster, "new", b"1"),
        (Endpoint, "new", b"1"),
        (Listener, "l", b"2"),
        (Route, "r", b"3"),
    ]);
    let sent = out(&mut session, &after);
    assert_eq!(sent, [one(Route, 9, "r", ""), one(Cluster, 10, "new", "")].concat());
    assert_eq!(exchange(&mut session, ask(Route, 9, &["r"]), &after), []);
    assert_eq!(exchange(&mut session, ask(Cluster, 10, &[]), &after), []);
    assert_eq!(exchange(&mut session, ask(Endpoint, 6, &["new"]), &after), []);
}

/// An Envoy that has requested listeners receives the endpoints of an added cluster with it. Its subscription, which
/// follows, confirms them.
#[test]
fn an_envoy_receives_the_endpoints_of_an_added_cluster_at_once() {
    let first = [(Cluster, "a", &b"1"[..]), (Endpoint, "a", b"1"), (Listener, "l", b"1")];
    let added = [(Cluster, "b", &b"1"[..]), (Endpoint, "b", b"1"), (Listener, "m", b"1")];
    let before = resources(&first);
    let after = before.then(&[first, added].concat());
    let opened = |is_envoy, kinds: &[Kind]| {
        let mut session = Session::new(Form::Delta, Arc::default(), Arc::default()).with_envoy(is_envoy);
        for (nonce, kind) in (1..).zip(kinds) {
            let names: &[&str] = if *kind == Endpoint { &["a"] } else { &[] };
            assert_eq!(exchange(&mut session, ask(*kind, 0, names), &before).len(), 1, "{kind}");
            exchange(&mut session, ask(*kind, nonce, &[]), &before);
        }
        session
    };
    let kinds = [Cluster, Endpoint, Listener];
    let at_once = [one(Cluster, 4, "b", ""), one(Endpoint, 5, "b", ""), one(Listener, 6, "m", "")].concat();
    let mut envoy = opened(true, &kinds);
    assert_eq!(out(&mut envoy, &after), at_once);
    assert_eq!(exchange(&mut envoy, ask(Endpoint, 0, &["b"]), &after), []);
    assert_eq!(exchange(&mut envoy, ask(Endpoint, 5, &[]), &after), []);
    assert_eq!(exchange(&mut envoy, ask(Endpoint, 0, &["b"]), &after), one(Endpoint, 7, "b", ""));

    // It does not subscribe to the endpoints of a cluster that it rejects.
    let mut envoy = opened(true, &kinds);
    assert_eq!(out(&mut envoy, &after), at_once);
    let rejection = SubscriptionRequest { error: Some("no".into()), ..ask(Cluster, 4, &[]) };
    exchange(&mut envoy, rejection, &after);
    exchange(&mut envoy, ask(Endpoint, 5, &[]), &after);
    let changed = after.then(&[&first[..], &added[..1], &added[2..], &[(Endpoint, "b", b"2")]].concat());
    assert_eq!(out(&mut envoy, &changed), []);

    // Before it requests listeners, it may apply clusters later. Other clients may do so at any time.
    for (is_envoy, kinds) in [(true, &kinds[..2]), (false, &kinds)] {
        let sent = out(&mut opened(is_envoy, kinds), &after);
        assert_eq!(sent, one(Cluster, kinds.len() as u64 + 1, "b", ""));
    }
}
