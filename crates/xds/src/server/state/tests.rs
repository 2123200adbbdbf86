//! The rules of a session, request by request.

use bytes::Bytes;

use super::*;
use crate::{
    layer::Layer,
    resource::{Resource, Resources},
};

mod authorities;
mod lists;
mod protocol;
mod work;

/// Resources that change one by one.
#[derive(Default)]
struct World(Layer);

impl World {
    fn insert(&mut self, resource: Arc<Resource>) {
        let generation = self.now().generation() + 1;
        self.0.set(generation, resource);
    }

    /// Replaces all resources.
    fn becomes(&mut self, all: &[(Kind, &str, &'static [u8])]) {
        let mut resources = Resources::default();
        for (kind, name, body) in all {
            resources.insert(Resource::from_body(*kind, name, Bytes::from_static(body)));
        }
        let generation = self.now().generation() + 1;
        self.0.replace(generation, &resources);
    }

    /// Returns a copy in which all resources are replaced.
    fn then(&self, all: &[(Kind, &str, &'static [u8])]) -> Self {
        let mut later = Self(self.0.clone());
        later.becomes(all);
        later
    }

    fn now(&self) -> Snapshot {
        Snapshot { shared: Arc::new(self.0.clone()), ..Snapshot::default() }
    }
}

fn resources(all: &[(Kind, &str, &'static [u8])]) -> World {
    let mut world = World::default();
    world.becomes(all);
    world
}

fn ask(kind: Kind, nonce: u64, names: &[&str]) -> SubscriptionRequest {
    SubscriptionRequest {
        kind,
        nonce: if nonce == 0 { Nonce::None } else { Nonce::Of(nonce) },
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        ..SubscriptionRequest::default()
    }
}

/// Applies a request and returns the responses: type, number, names sent, names removed.
fn exchange(
    session: &mut Session,
    request: SubscriptionRequest,
    world: &World,
) -> Vec<(Kind, u64, String, String)> {
    session.request(request, &world.now(), &mut |_| {});
    out(session, world)
}

fn out(session: &mut Session, world: &World) -> Vec<(Kind, u64, String, String)> {
    let join = |names: Vec<&str>| names.join(",");
    session
        .pushes(&world.now())
        .unwrap()
        .iter()
        .map(|push| {
            let sent = join(push.resources.iter().map(|resource| &*resource.name).collect());
            (push.kind, push.number, sent, join(push.removed.iter().map(|name| &**name).collect()))
        })
        .collect()
}

fn one(kind: Kind, nonce: u64, sent: &str, removed: &str) -> Vec<(Kind, u64, String, String)> {
    vec![(kind, nonce, sent.into(), removed.into())]
}

use Kind::{Cluster, Endpoint, Listener, Route, VirtualHost};

#[test]
fn incremental_sends_all_then_only_changes() {
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let mut world = resources(&[(Cluster, "a", b"1"), (Cluster, "b", b"1")]);
    assert_eq!(exchange(&mut session, ask(Cluster, 0, &[]), &world), one(Cluster, 1, "a,b", ""));
    assert_eq!(exchange(&mut session, ask(Cluster, 1, &[]), &world), []);
    world.insert(Resource::from_body(Cluster, "b", Bytes::from_static(b"2")));
    assert_eq!(out(&mut session, &world), one(Cluster, 2, "b", ""));
    // While a response is in flight, changes are merged into the next one.
    world.insert(Resource::from_body(Cluster, "c", Bytes::from_static(b"1")));
    assert_eq!(out(&mut session, &world), []);
    world.insert(Resource::from_body(Cluster, "c", Bytes::from_static(b"2")));
    assert_eq!(out(&mut session, &world), []);
    assert_eq!(exchange(&mut session, ask(Cluster, 2, &[]), &world), one(Cluster, 3, "c", ""));
    exchange(&mut session, ask(Cluster, 3, &[]), &world);
    let less = world.then(&[(Cluster, "a", b"1")]);
    assert_eq!(out(&mut session, &less), one(Cluster, 4, "", "b,c"));
}

#[test]
fn incremental_sends_only_resources_that_differ_from_the_initial_versions() {
    let world = resources(&[(Cluster, "a", b"1"), (Cluster, "b", b"1"), (Endpoint, "a", b"1")]);
    let version = |name| world.now().get(Cluster, name).unwrap().version_text();
    let have = |pairs: &[(&str, String)]| pairs.iter().map(|(n, v)| ((*n).to_owned(), v.clone())).collect();

    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let all = SubscriptionRequest {
        have: have(&[("a", version("a")), ("b", version("b"))]),
        ..ask(Cluster, 0, &[])
    };
    assert_eq!(exchange(&mut session, all, &world), []);

    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let stale = [("a", version("a")), ("b", "of another server".into()), ("gone", version("a"))];
    let some = SubscriptionRequest { have: have(&stale), ..ask(Cluster, 0, &[]) };
    assert_eq!(
        exchange(&mut session, some, &world),
        [one(Cluster, 1, "b", "")].concat(),
        "a is up to date; removals are sent when the rest is settled"
    );
    assert_eq!(exchange(&mut session, ask(Cluster, 1, &[]), &world), one(Cluster, 2, "", "gone"));

    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let endpoint = world.now().get(Endpoint, "a").unwrap().version_text();
    let named = SubscriptionRequest { have: have(&[("a", endpoint)]), ..ask(Endpoint, 0, &["a", "none"]) };
    assert_eq!(exchange(&mut session, named, &world), one(Endpoint, 1, "", "none"));
}

#[test]
fn incremental_answers_new_repeated_and_missing_names() {
    let world = resources(&[(Route, "80", b"1"), (Route, "90", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, ask(Route, 0, &["80", "none"]), &world), one(Route, 1, "80", "none"));
    assert_eq!(exchange(&mut session, ask(Route, 1, &[]), &world), []);
    assert_eq!(exchange(&mut session, ask(Route, 0, &["80"]), &world), one(Route, 2, "80", ""));
    // Names are added even while a response is in flight.
    assert_eq!(exchange(&mut session, ask(Route, 0, &["90"]), &world), []);
    assert_eq!(exchange(&mut session, ask(Route, 2, &[]), &world), one(Route, 3, "90", ""));
    exchange(&mut session, ask(Route, 3, &[]), &world);
    let unsubscribe = SubscriptionRequest { unsubscribe: vec!["80".into()], ..ask(Route, 0, &[]) };
    assert_eq!(exchange(&mut session, unsubscribe, &world), []);
    let changed = world.then(&[(Route, "80", b"2"), (Route, "none", b"1")]);
    assert_eq!(out(&mut session, &changed), one(Route, 4, "none", "90"));
}

#[test]
fn a_rejected_version_is_not_sent_again_until_it_changes() {
    for form in [Form::Delta, Form::Sotw] {
        let mut session = Session::new(form, Arc::default(), Arc::default());
        let world = resources(&[(Cluster, "a", b"1")]);
        exchange(&mut session, ask(Cluster, 0, &[]), &world);
        let mut events = Vec::new();
        let nack = SubscriptionRequest { error: Some("no".into()), ..ask(Cluster, 1, &[]) };
        session.request(nack, &world.now(), &mut |event| events.push(format!("{event:?}")));
        assert_eq!(events, [r#"Rejected { kind: Cluster, nonce: 1, reason: "no" }"#]);
        assert_eq!(out(&mut session, &world), []);
        let fixed = world.then(&[(Cluster, "a", b"2")]);
        assert_eq!(out(&mut session, &fixed), one(Cluster, 2, "a", ""));
    }
}

#[test]
fn clusters_are_sent_first_and_removed_last() {
    let before = resources(&[
        (Cluster, "old", b"1"),
        (Endpoint, "old", b"1"),
        (Listener, "l", b"1"),
        (Route, "r", b"1"),
    ]);
    let after = before.then(&[
        (Cluster, "new", b"1"),
        (Endpoint, "new", b"1"),
        (Listener, "l", b"1"),
        (Route, "r", b"2"),
    ]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let first =
        [ask(Cluster, 0, &[]), ask(Endpoint, 0, &["old"]), ask(Listener, 0, &[]), ask(Route, 0, &["r"])];
    for (request, nonce) in first.into_iter().zip(1..) {
        let kind = request.kind;
        assert_eq!(exchange(&mut session, request, &before).len(), 1);
        assert_eq!(exchange(&mut session, ask(kind, nonce, &[]), &before), []);
    }
    // The route follows the endpoints of the new cluster. The removal of the old cluster follows the route.
    assert_eq!(out(&mut session, &after), one(Cluster, 5, "new", ""));
    assert!(session.is_holding());
    assert_eq!(exchange(&mut session, ask(Cluster, 5, &[]), &after), []);
    let sent = exchange(&mut session, ask(Endpoint, 0, &["new"]), &after);
    let expected = [one(Endpoint, 6, "new", ""), one(Route, 7, "r", ""), one(Cluster, 8, "", "old")];
    assert_eq!(sent, expected.concat());
    assert_eq!(exchange(&mut session, ask(Endpoint, 6, &[]), &after), one(Endpoint, 9, "", "old"));
}

#[test]
fn a_client_without_endpoint_requests_does_not_wait_forever() {
    let world = resources(&[(Cluster, "a", b"1"), (Endpoint, "a", b"1"), (Listener, "l", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, ask(Cluster, 0, &[]), &world), one(Cluster, 1, "a", ""));
    assert_eq!(exchange(&mut session, ask(Cluster, 1, &[]), &world), []);
    assert_eq!(exchange(&mut session, ask(Listener, 0, &[]), &world), []);
    assert!(session.is_holding());
    session.release();
    assert_eq!(out(&mut session, &world), one(Listener, 2, "l", ""));

    // The session does not wait for the endpoints of a rejected cluster.
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    exchange(&mut session, ask(Cluster, 0, &[]), &world);
    exchange(&mut session, SubscriptionRequest { error: Some("no".into()), ..ask(Cluster, 1, &[]) }, &world);
    assert_eq!(exchange(&mut session, ask(Listener, 0, &[]), &world), one(Listener, 2, "l", ""));
}

#[test]
fn clusters_without_endpoints_do_not_delay_the_first_generation() {
    let mut world = World::default();
    for (kind, name) in [(Cluster, "a"), (Cluster, "passthrough"), (Endpoint, "a"), (Listener, "l")] {
        world.0.set(0, Resource::from_body(kind, name, Bytes::from_static(b"1")));
    }
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    exchange(&mut session, ask(Cluster, 0, &[]), &world);
    exchange(&mut session, ask(Cluster, 1, &[]), &world);
    exchange(&mut session, ask(Listener, 0, &[]), &world);
    let sent = exchange(&mut session, ask(Endpoint, 0, &["a"]), &world);
    assert_eq!(sent, [one(Endpoint, 2, "a", ""), one(Listener, 3, "l", "")].concat());
}

#[test]
fn a_changed_cluster_is_followed_by_its_endpoints() {
    let world = resources(&[(Cluster, "a", b"1"), (Endpoint, "a", b"1")]);
    let changed = world.then(&[(Cluster, "a", b"2"), (Endpoint, "a", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    exchange(&mut session, ask(Cluster, 0, &[]), &world);
    exchange(&mut session, ask(Cluster, 1, &[]), &world);
    exchange(&mut session, ask(Endpoint, 0, &["a"]), &world);
    exchange(&mut session, ask(Endpoint, 2, &[]), &world);
    assert_eq!(out(&mut session, &changed), [one(Cluster, 3, "a", ""), one(Endpoint, 4, "a", "")].concat());

    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    exchange(&mut session, ask(Cluster, 0, &[]), &world);
    exchange(&mut session, ask(Cluster, 1, &[]), &world);
    assert_eq!(exchange(&mut session, ask(Endpoint, 0, &["a"]), &world), one(Endpoint, 2, "a", ""));
    assert_eq!(exchange(&mut session, ask(Endpoint, 2, &["a"]), &world), []);
    assert_eq!(out(&mut session, &changed), one(Cluster, 3, "a", ""));
    // Envoy repeats the request while it warms the cluster.
    assert_eq!(exchange(&mut session, ask(Endpoint, 2, &["a"]), &changed), one(Endpoint, 4, "a", ""));
    assert_eq!(exchange(&mut session, ask(Endpoint, 4, &["a"]), &changed), []);
}

#[test]
fn state_of_the_world_sends_all_clusters_but_only_changed_endpoints() {
    let world = resources(&[
        (Cluster, "a", b"1"),
        (Cluster, "b", b"1"),
        (Endpoint, "a", b"1"),
        (Endpoint, "b", b"1"),
    ]);
    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, ask(Cluster, 0, &[]), &world), one(Cluster, 1, "a,b", ""));
    assert_eq!(exchange(&mut session, ask(Cluster, 1, &[]), &world), []);
    assert_eq!(exchange(&mut session, ask(Endpoint, 0, &["a", "b"]), &world), one(Endpoint, 2, "a,b", ""));
    assert_eq!(exchange(&mut session, ask(Endpoint, 2, &["a", "b"]), &world), []);

    let changed = world.then(&[
        (Cluster, "a", b"1"),
        (Cluster, "b", b"2"),
        (Endpoint, "a", b"1"),
        (Endpoint, "b", b"2"),
    ]);
    assert_eq!(out(&mut session, &changed), [one(Cluster, 3, "a,b", ""), one(Endpoint, 4, "b", "")].concat());
    exchange(&mut session, ask(Cluster, 3, &[]), &changed);
    // A request with an older nonce is not answered.
    assert_eq!(exchange(&mut session, ask(Endpoint, 2, &["a"]), &changed), []);
    exchange(&mut session, ask(Endpoint, 4, &["a", "b"]), &changed);
    exchange(&mut session, ask(Endpoint, 5, &["a", "b"]), &changed);

    let fewer = changed.then(&[(Cluster, "a", b"1"), (Endpoint, "a", b"1"), (Endpoint, "b", b"2")]);
    assert_eq!(out(&mut session, &fewer), one(Cluster, 6, "a", ""));
    assert_eq!(exchange(&mut session, ask(Cluster, 6, &[]), &fewer), []);
    assert_eq!(out(&mut session, &fewer), []);
}

#[test]
fn state_of_the_world_answers_new_names_and_foreign_nonces() {
    let world = resources(&[(Route, "80", b"1"), (Route, "90", b"1")]);
    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    // The nonce of another server.
    assert_eq!(exchange(&mut session, ask(Route, 99, &["80"]), &world), one(Route, 1, "80", ""));
    assert_eq!(exchange(&mut session, ask(Route, 1, &["80", "90"]), &world), one(Route, 2, "90", ""));
    assert_eq!(exchange(&mut session, ask(Route, 2, &["80", "90"]), &world), []);
    assert_eq!(exchange(&mut session, ask(Route, 2, &["90"]), &world), []);
    // A name to which the client subscribes again.
    assert_eq!(exchange(&mut session, ask(Route, 2, &["80", "90"]), &world), one(Route, 3, "80", ""));
}

#[test]
fn an_empty_wildcard_is_answered() {
    for form in [Form::Delta, Form::Sotw] {
        let mut session = Session::new(form, Arc::default(), Arc::default());
        let world = World::default();
        assert_eq!(exchange(&mut session, ask(Listener, 0, &[]), &world), one(Listener, 1, "", ""));
        assert_eq!(exchange(&mut session, ask(Listener, 1, &[]), &world), []);
        assert_eq!(exchange(&mut session, ask(Endpoint, 0, &[]), &world), []);
    }
}

/// A client forgets a resource from which it unsubscribes, also if it subscribes to all. The resource is sent again.
#[test]
fn unsubscribing_a_name_beside_the_wildcard_resends_it() {
    let world = resources(&[(Cluster, "a", b"1"), (Cluster, "b", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    assert_eq!(exchange(&mut session, ask(Cluster, 0, &["*", "a"]), &world), one(Cluster, 1, "a,b", ""));
    let unsubscribe = |names: &[&str]| SubscriptionRequest {
        unsubscribe: names.iter().map(|name| (*name).to_owned()).collect(),
        ..ask(Cluster, 1, &[])
    };
    assert_eq!(exchange(&mut session, unsubscribe(&["a", "none"]), &world), one(Cluster, 2, "a", "none"));
    exchange(&mut session, ask(Cluster, 2, &["b"]), &world);
    exchange(&mut session, ask(Cluster, 3, &[]), &world);
    // The names that the client listed are left.
    assert_eq!(exchange(&mut session, unsubscribe(&["*"]), &world), []);
    let changed = world.then(&[(Cluster, "a", b"2"), (Cluster, "b", b"2")]);
    assert_eq!(out(&mut session, &changed), one(Cluster, 4, "b", ""));
}

#[test]
fn a_client_too_far_behind_must_reconnect() {
    let mut world = resources(&[(Cluster, "a", b"1"), (Cluster, "gone", b"1")]);
    let mut delta = Session::new(Form::Delta, Arc::default(), Arc::default());
    let mut sotw = Session::new(Form::Sotw, Arc::default(), Arc::default());
    exchange(&mut delta, ask(Cluster, 0, &[]), &world);
    exchange(&mut sotw, ask(Cluster, 0, &[]), &world);
    world = world.then(&[(Cluster, "a", b"1")]);
    for count in 0..5_000 {
        let body: &'static [u8] = if count % 2 == 0 { b"2" } else { b"3" };
        world.insert(Resource::from_body(Cluster, "a", Bytes::from_static(body)));
    }
    assert_eq!(exchange(&mut delta, ask(Cluster, 1, &[]), &world), one(Cluster, 2, "a", ""));
    delta.request(ask(Cluster, 2, &[]), &world.now(), &mut |_| {});
    assert_eq!(delta.pushes(&world.now()).unwrap_err(), TooFarBehind);
    // In the state of the world, the missing resource shows that it is gone.
    assert_eq!(exchange(&mut sotw, ask(Cluster, 1, &[]), &world), one(Cluster, 2, "a", ""));
}

#[test]
fn virtual_hosts_are_subscribed_to_by_name_or_by_route_configuration() {
    let before =
        resources(&[(VirtualHost, "80/a", b"1"), (VirtualHost, "80/b", b"1"), (VirtualHost, "8080/a", b"1")]);
    let after = before.then(&[
        (VirtualHost, "80/a", b"2"),
        (VirtualHost, "80/c", b"1"),
        (VirtualHost, "8080/a", b"2"),
    ]);

    let mut all_of_80 = Session::new(Form::Delta, Arc::default(), Arc::default());
    let sent = exchange(&mut all_of_80, ask(VirtualHost, 0, &["80"]), &before);
    assert_eq!(sent, one(VirtualHost, 1, "80/a,80/b", ""));
    assert_eq!(exchange(&mut all_of_80, ask(VirtualHost, 1, &[]), &before), []);
    assert_eq!(out(&mut all_of_80, &after), one(VirtualHost, 2, "80/a,80/c", "80/b"));
    exchange(&mut all_of_80, ask(VirtualHost, 2, &[]), &after);
    let unsubscribe = SubscriptionRequest { unsubscribe: vec!["80".into()], ..ask(VirtualHost, 0, &[]) };
    assert_eq!(exchange(&mut all_of_80, unsubscribe, &after), []);
    assert_eq!(out(&mut all_of_80, &after.then(&[])), []);

    let mut one_of_80 = Session::new(Form::Delta, Arc::default(), Arc::default());
    let sent = exchange(&mut one_of_80, ask(VirtualHost, 0, &["80/b", "80/none"]), &before);
    assert_eq!(sent, one(VirtualHost, 1, "80/b", "80/none"));
    exchange(&mut one_of_80, ask(VirtualHost, 1, &[]), &before);
    assert_eq!(out(&mut one_of_80, &after), one(VirtualHost, 2, "", "80/b"));

    // A reconnecting client is sent what differs from its versions.
    let version = |name| before.now().get(VirtualHost, name).unwrap().version_text();
    let have = ["80/a", "80/b"].map(|name| (name.to_owned(), version(name))).into();
    let mut again = Session::new(Form::Delta, Arc::default(), Arc::default());
    let sent = exchange(&mut again, SubscriptionRequest { have, ..ask(VirtualHost, 0, &["80"]) }, &after);
    assert_eq!(sent, one(VirtualHost, 1, "80/a,80/c", "80/b"));
}

#[test]
fn a_new_route_configuration_resends_its_virtual_hosts_under_the_wildcard() {
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let world = resources(&[
        (Route, "80", b"1"),
        (Route, "90", b"1"),
        (VirtualHost, "80/a", b"1"),
        (VirtualHost, "90/a", b"1"),
    ]);
    exchange(&mut session, ask(Route, 0, &["80"]), &world);
    exchange(&mut session, ask(Route, 1, &[]), &world);
    assert_eq!(
        exchange(&mut session, ask(VirtualHost, 0, &[]), &world),
        one(VirtualHost, 2, "80/a,90/a", "")
    );
    exchange(&mut session, ask(VirtualHost, 2, &[]), &world);
    let both = [one(Route, 3, "90", ""), one(VirtualHost, 4, "90/a", "")].concat();
    assert_eq!(exchange(&mut session, ask(Route, 0, &["90"]), &world), both);
}

/// Virtual hosts of the route configuration `80`: name, body and domains.
fn hosts(all: &[(&str, &'static [u8], &[&str])]) -> World {
    let mut world = World::default();
    add_hosts(&mut world, all);
    world
}

fn add_hosts(world: &mut World, all: &[(&str, &'static [u8], &[&str])]) {
    for (name, body, domains) in all {
        let aliases: Vec<String> = domains.iter().map(|domain| format!("80/{domain}")).collect();
        let body = Bytes::from_static(body);
        let aliases = aliases.iter().map(String::as_str);
        world.insert(Resource::with_aliases(Kind::VirtualHost, &format!("80/{name}"), body, aliases));
    }
}

#[test]
fn a_virtual_host_is_found_by_authority() {
    let kind = Kind::VirtualHost;
    let mut world = hosts(&[("a:80", b"1", &["a", "a.default"]), ("*.b:80", b"1", &["*.b"])]);
    let find = |world: &World, name: &str| world.now().find(kind, name).map(|host| host.name.to_string());
    assert_eq!(find(&world, "80/a.default").as_deref(), Some("80/a:80"));
    assert_eq!(find(&world, "80/a:80").as_deref(), Some("80/a:80"), "its own name is one as well");
    assert_eq!(find(&world, "80/x.y.b").as_deref(), Some("80/*.b:80"));
    for unknown in ["80/b", "80/.b.c", "8080/a", "80/*", "a", "80/", ""] {
        assert_eq!(find(&world, unknown), None, "{unknown}");
    }
    add_hosts(&mut world, &[("y.b:80", b"1", &["*.y.b", "x.y.b"])]);
    assert_eq!(find(&world, "80/z.y.b").as_deref(), Some("80/y.b:80"), "the longest suffix");
    assert_eq!(find(&world, "80/x.b").as_deref(), Some("80/*.b:80"));
}

#[test]
fn an_authority_is_answered_as_absent_and_by_its_host() {
    let kind = Kind::VirtualHost;
    let mut world = hosts(&[("a:80", b"1", &["a"]), ("*.b:80", b"1", &["*.b"]), ("c:80", b"1", &["c"])]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let mut used = Vec::new();
    session.request(ask(kind, 0, &["80/*", "80/a", "80/x.b", "80/none"]), &world.now(), &mut |event| {
        if let Event::HostUsed { host } = event {
            used.push(host.to_string());
        }
    });
    assert_eq!(used, ["80/*.b:80", "80/a:80"]);
    let first = out(&mut session, &world);
    assert_eq!(first, one(kind, 1, "80/*.b:80,80/a:80", "80/*,80/a,80/none,80/x.b"));
    // The client confirms the hosts, and is not sent them again.
    assert_eq!(exchange(&mut session, ask(kind, 1, &[]), &world), []);
    assert_eq!(exchange(&mut session, ask(kind, 0, &["80/*.b:80", "80/a:80"]), &world), []);
    let done = SubscriptionRequest { unsubscribe: vec!["80/a".into()], ..ask(kind, 0, &[]) };
    assert_eq!(exchange(&mut session, done, &world), []);
    // The client is sent changes and removals of the hosts that it subscribes to, and no others.
    add_hosts(&mut world, &[("a:80", b"2", &["a"]), ("c:80", b"2", &["c"])]);
    assert_eq!(out(&mut session, &world), one(kind, 2, "80/a:80", ""));
    assert_eq!(exchange(&mut session, ask(kind, 2, &[]), &world), []);
    // An authority without a host is sent one when it appears; so is an authority that only a wildcard matched.
    add_hosts(&mut world, &[("n:80", b"1", &["none"]), ("x.b:80", b"1", &["x.b"])]);
    assert_eq!(out(&mut session, &world), one(kind, 3, "80/n:80,80/x.b:80", ""));
    assert_eq!(exchange(&mut session, ask(kind, 3, &[]), &world), []);
    world.0.remove(100, kind, "80/a:80");
    assert_eq!(out(&mut session, &world), one(kind, 4, "", "80/a:80"));
}

#[test]
fn remembered_hosts_are_sent_with_the_catch_all_to_a_new_client() {
    let kind = Kind::VirtualHost;
    let world = hosts(&[("a:80", b"1", &["a"]), ("b:80", b"1", &["b"])]);
    let remembered: Arc<[Arc<str>]> = ["80/a:80".into(), "80/gone:80".into(), "81/a:81".into()].into();
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::clone(&remembered));
    assert_eq!(exchange(&mut session, ask(kind, 0, &["80/*"]), &world), one(kind, 1, "80/a:80", "80/*"));
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::clone(&remembered));
    let have = HashMap::from([("80/b:80".to_owned(), "old".to_owned())]);
    let again = SubscriptionRequest { have, ..ask(kind, 0, &["80/*", "80/b:80"]) };
    assert_eq!(exchange(&mut session, again, &world), one(kind, 1, "80/b:80", "80/*"));
    // A client that subscribes to all hosts is sent no remembered ones.
    let mut session = Session::new(Form::Delta, Arc::default(), remembered);
    assert_eq!(exchange(&mut session, ask(kind, 0, &["80"]), &world), one(kind, 1, "80/a:80,80/b:80", ""));
}

#[test]
fn repeated_subscriptions_cost_and_acknowledgements_are_free() {
    let world =
        resources(&[(VirtualHost, "80/a", b"1"), (VirtualHost, "80/b", b"1"), (VirtualHost, "90/a", b"1")]);
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let mut cost = |request| {
        let taken = session.request(request, &world.now(), &mut |_| {});
        session.pushes(&world.now()).unwrap();
        taken.cost
    };
    let both =
        limits::REQUEST_COST + limits::NAME_COST + 3 * limits::HELD_NAME_COST + 2 * limits::RESOURCE_COST;
    assert_eq!(cost(ask(VirtualHost, 0, &["80"])), both);
    assert_eq!(cost(ask(VirtualHost, 1, &[])), 0);
    assert_eq!(cost(ask(VirtualHost, 0, &["80"])), both);
    // Also in a request that acknowledges a response.
    assert_eq!(cost(ask(VirtualHost, 2, &["80"])), both);
    assert_eq!(cost(ask(VirtualHost, 2, &[])), limits::REQUEST_COST);

    // In the state of the world, an acknowledgement lists all names again.
    let mut session = Session::new(Form::Sotw, Arc::default(), Arc::default());
    let endpoints = resources(&[(Endpoint, "a", b"1"), (Endpoint, "b", b"1")]);
    assert_eq!(exchange(&mut session, ask(Endpoint, 0, &["a", "b"]), &endpoints).len(), 1);
    let acknowledged = session.request(ask(Endpoint, 1, &["a", "b"]), &endpoints.now(), &mut |_| {});
    assert_eq!((acknowledged.acknowledges, acknowledged.cost), (true, 0));
}
