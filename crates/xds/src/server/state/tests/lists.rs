//! Lists of names: their bytes, and what streams share.

use super::*;
use crate::layer::Edits;

#[test]
fn unknown_names_are_counted_while_they_are_held() {
    let world = resources(&[(Endpoint, "a", b"1"), (Endpoint, "b", b"1")]);
    let cost = |names: &[&str]| names.iter().map(|name| limits::name_cost(name)).sum::<usize>();
    for form in [Form::Delta, Form::Sotw] {
        let mut session = Session::new(form, Arc::default(), Arc::default());
        exchange(&mut session, ask(Endpoint, 0, &["a", "b", "none", "never"]), &world);
        assert_eq!(session.name_bytes(), cost(&["none", "never"]), "{form:?}");
        let less = if form == Form::Delta {
            SubscriptionRequest { unsubscribe: vec!["none".into(), "a".into()], ..ask(Endpoint, 1, &[]) }
        } else {
            ask(Endpoint, 1, &["b", "never"])
        };
        exchange(&mut session, less, &world);
        assert_eq!(session.name_bytes(), cost(&["never"]), "{form:?}");
    }
    // A name in the client's versions that no resource has is held until its removal is sent.
    let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
    let have = ["lost", "a"].map(|name| (name.to_owned(), "1".to_owned())).into();
    let all = SubscriptionRequest { have, ..ask(Endpoint, 0, &["*"]) };
    assert_eq!(exchange(&mut session, all, &world), one(Endpoint, 1, "a,b", ""));
    assert_eq!(session.name_bytes(), cost(&["lost", "*"]));
    assert_eq!(exchange(&mut session, ask(Endpoint, 1, &[]), &world), one(Endpoint, 2, "", "lost"));
    exchange(&mut session, ask(Endpoint, 2, &[]), &world);
    assert_eq!(session.name_bytes(), cost(&["*"]));
}

#[test]
fn lists_of_names_are_counted_without_shared_ones() {
    const MANY: usize = 1_000;
    const PLACE: usize = size_of::<Arc<str>>();
    let all: Vec<_> = (0..MANY).map(|number| format!("name-{number:04}")).collect();
    let mut resources = Resources::default();
    for name in &all {
        resources.insert(Resource::from_body(Endpoint, name, Bytes::from_static(b"1")));
    }
    let mut world = World::default();
    world.0.replace(1, &resources);
    for form in [Form::Delta, Form::Sotw] {
        let stream = |names: &[String]| {
            let mut session = Session::new(form, Arc::default(), Arc::default());
            let first = SubscriptionRequest { names: names.to_vec(), ..ask(Endpoint, 0, &[]) };
            session.request(first, &world.now(), &mut |_| {});
            assert!(session.list_bytes() >= names.len() * PLACE, "{form:?}: they are to be sent");
            session.pushes(&world.now()).unwrap();
            session
        };
        let some: Vec<_> = (0..2).map(|_| stream(&all[1..])).collect();
        assert!(
            some.iter().all(|stream| stream.list_bytes() == (MANY - 1) * PLACE),
            "{form:?}: each has its own"
        );
        let whole: Vec<_> = (0..100).map(|_| stream(&all)).collect();
        let sum = whole.iter().map(Session::list_bytes).sum::<usize>();
        assert!(sum <= MANY * PLACE, "{form:?}: {sum} for a shared list");
    }
}

/// Clients that follow a new and a removed cluster keep a shared list.
#[test]
fn clients_that_edit_a_shared_list_share_the_result() {
    const MANY: usize = 1_000;
    let all: Vec<_> = (0..MANY).map(|number| format!("name-{number:04}")).collect();
    let mut world = World::default();
    for name in &all {
        world.insert(Resource::from_body(Endpoint, name, Bytes::from_static(b"1")));
    }
    let mut clients: Vec<_> =
        (0..100).map(|_| Session::new(Form::Delta, Arc::default(), Arc::default())).collect();
    let mut request = |world: &World, subscribe: &[String], unsubscribe: &[String]| {
        for client in &mut clients {
            let (names, unsubscribe) = (subscribe.to_vec(), unsubscribe.to_vec());
            let nonce = if client.nonce == 0 { Nonce::None } else { Nonce::Of(client.nonce) };
            let request = SubscriptionRequest { names, unsubscribe, nonce, ..ask(Endpoint, 0, &[]) };
            client.request(request, &world.now(), &mut |_| {});
            client.pushes(&world.now()).unwrap();
        }
        clients.iter().map(Session::list_bytes).sum::<usize>()
    };
    let max = (MANY + 1) * size_of::<Arc<str>>();
    assert!(request(&world, &all, &[]) <= max);
    let new = ["name-0500-new".to_owned()];
    world.insert(Resource::from_body(Endpoint, &new[0], Bytes::from_static(b"1")));
    assert!(request(&world, &new, &[]) <= max);
    let generation = world.now().generation() + 1;
    world.0.remove(generation, Endpoint, &new[0]);
    assert!(request(&world, &[], &new) <= max);
    // An edit that differs is not mistaken for the shared one.
    assert!(request(&world, &[], &all[..1]) >= (MANY - 1) * size_of::<Arc<str>>());
    assert!(clients.iter().all(|client| {
        let names = &client.subscriptions[Endpoint as usize].names;
        names.0.len() == MANY - 1 && !names.contains(&all[0]) && names.contains(&all[1])
    }));
}

/// A namespace with a Service of its own has a list of its own, which changes with the shared layer.
#[test]
fn lists_of_a_namespace_follow_the_shared_layer() {
    let set = |layer: &mut Layer, generation, name: &str| {
        layer.set(generation, Resource::from_body(Endpoint, name, Bytes::from_static(b"1")));
    };
    let ask_all = |session: &mut Session, snapshot: &Snapshot, request| {
        session.request(request, snapshot, &mut |_| {});
        let pushes = session.pushes(snapshot).unwrap();
        pushes.iter().flat_map(|push| &push.resources).map(|sent| sent.name.to_string()).collect::<Vec<_>>()
    };
    for form in [Form::Delta, Form::Sotw] {
        let (mut shared, mut local) = (Layer::default(), Layer::default());
        set(&mut shared, 1, "a");
        set(&mut shared, 1, "b");
        let mut edits = Edits::default();
        edits.set(Resource::from_body(Endpoint, "private", Bytes::from_static(b"1")));
        local.edit_over(1, (&Layer::default(), &shared), edits);
        let snapshot = |local: &Layer, shared: &Layer| Snapshot {
            local: Arc::new(local.clone()),
            shared: Arc::new(shared.clone()),
            ..Snapshot::default()
        };
        let now = snapshot(&local, &shared);
        let mut clients = [(); 2].map(|()| Session::new(form, Arc::default(), Arc::default()));
        for client in &mut clients {
            let sent = ask_all(client, &now, ask(Endpoint, 0, &["a", "b", "private"]));
            assert_eq!(sent.len(), 3);
            ask_all(
                client,
                &now,
                ask(Endpoint, 1, if form == Form::Sotw { &["a", "b", "private"] } else { &[] }),
            );
        }

        let before = shared.clone();
        set(&mut shared, 2, "c");
        local.edit_over(2, (&before, &shared), Edits::default());
        let now = snapshot(&local, &shared);
        let (all, new): (&[&str], &[&str]) = (&["a", "b", "c", "private"], &["c"]);
        for client in &mut clients {
            let names = if form == Form::Sotw { all } else { new };
            assert_eq!(ask_all(client, &now, ask(Endpoint, 1, names)), ["c"], "{form:?}");
            let acknowledgement = ask(Endpoint, 2, if form == Form::Sotw { all } else { &[] });
            assert!(ask_all(client, &now, acknowledgement).is_empty(), "{form:?}");
            assert_eq!(client.subscriptions[Endpoint as usize].names.0.len(), 4, "{form:?}");
        }
        let list = |client: &Session| Arc::as_ptr(&client.subscriptions[Endpoint as usize].names.0);
        assert!(std::ptr::addr_eq(list(&clients[0]), list(&clients[1])), "{form:?}: each has its own");

        let before = shared.clone();
        shared.remove(3, Endpoint, "a");
        local.edit_over(3, (&before, &shared), Edits::default());
        let now = snapshot(&local, &shared);
        for client in &mut clients {
            client.pushes(&now).unwrap();
            let less = match form {
                Form::Delta => SubscriptionRequest { unsubscribe: vec!["a".into()], ..ask(Endpoint, 3, &[]) },
                Form::Sotw => ask(Endpoint, 2, &["b", "c", "private"]),
            };
            ask_all(client, &now, less);
            let names = &client.subscriptions[Endpoint as usize].names;
            assert!(!names.contains("a") && names.contains("c") && names.0.len() == 3, "{form:?}");
        }
        assert!(std::ptr::addr_eq(list(&clients[0]), list(&clients[1])), "{form:?}: each has its own");
    }
}
