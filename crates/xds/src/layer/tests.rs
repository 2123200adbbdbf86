use bytes::Bytes;

use std::collections::BTreeSet;

use super::{snapshot::*, *};
use crate::wire::Form;

fn resource(name: &str, body: &'static [u8]) -> Arc<Resource> {
    Resource::from_body(Kind::Cluster, name, Bytes::from_static(body))
}

fn snapshot(own: &Layer, shared: &Layer) -> Snapshot {
    Snapshot { own: Arc::new(own.clone()), shared: Arc::new(shared.clone()), ..Snapshot::default() }
}

fn names(changes: &Changes) -> (Vec<&str>, Option<Vec<&str>>) {
    let sent = changes.resources.iter().map(|resource| &*resource.name).collect();
    (sent, changes.removed.as_ref().map(|removed| removed.iter().map(|name| &**name).collect()))
}

#[test]
fn changes_are_known_by_their_generation() {
    let (mut own, mut shared) = (Layer::default(), Layer::default());
    assert!(shared.set(1, resource("a", b"1")) && shared.set(1, resource("b", b"1")));
    assert!(own.set(2, resource("inbound", b"1")));
    assert!(!shared.set(3, resource("a", b"1")), "it is equal");
    assert!(shared.set(4, resource("b", b"2")) && shared.remove(5, Kind::Cluster, "a"));
    assert!(!shared.remove(6, Kind::Cluster, "a") && !shared.remove(6, Kind::Cluster, "none"));
    let now = snapshot(&own, &shared);
    assert_eq!(now.generation(), 5);
    assert_eq!(names(&now.changes(Kind::Cluster, 0)), (vec!["inbound", "b"], Some(vec!["a"])));
    assert_eq!(names(&now.changes(Kind::Cluster, 2)), (vec!["b"], Some(vec!["a"])));
    assert_eq!(names(&now.changes(Kind::Cluster, 4)), (vec![], Some(vec!["a"])));
    assert_eq!(names(&now.changes(Kind::Cluster, 5)), (vec![], Some(vec![])));
    assert!(now.is_new(Kind::Cluster, "inbound", 1) && !now.is_new(Kind::Cluster, "b", 1));
}

#[test]
fn replacing_a_layer_records_only_differences() {
    let mut layer = Layer::default();
    let set = |all: &[(&str, &'static [u8])]| {
        let mut set = Resources::default();
        all.iter().for_each(|(name, body)| set.insert(resource(name, body)));
        set
    };
    assert!(layer.replace(1, &set(&[("a", b"1"), ("b", b"1")])));
    assert!(!layer.replace(2, &set(&[("a", b"1"), ("b", b"1")])));
    assert!(layer.replace(3, &set(&[("b", b"2"), ("c", b"1")])));
    let now = snapshot(&Layer::default(), &layer);
    assert_eq!(names(&now.changes(Kind::Cluster, 1)), (vec!["b", "c"], Some(vec!["a"])));
}

fn change(
    layer: &mut Layer,
    generation: u64,
    all: &[(&str, Option<&'static [u8]>)],
    like: Option<(&Layer, &Layer)>,
) {
    let mut edits = Edits::default();
    for (name, body) in all {
        match body {
            Some(body) => edits.set(resource(name, body)),
            None => edits.remove(Kind::Cluster, (*name).into()),
        }
    }
    layer.edit(generation, edits, like);
}

#[test]
fn equal_layers_are_shared() {
    let is_one = |one: &Layer, other: &Layer| {
        let index = Kind::Cluster as usize;
        Arc::ptr_eq(&one.kinds[index], &other.kinds[index])
    };
    let (mut first, mut second) = (Layer::default(), Layer::default());
    for layer in [&mut first, &mut second] {
        layer.set(1, resource("a", b"1"));
        layer.set(1, resource("b", b"1"));
    }
    assert!(!is_one(&first, &second));
    second.share(&first);
    assert!(is_one(&first, &second));
    // Changes of the other layer are not due to a client that never had any of it.
    let (mut emptied, mut empty) = (Layer::default(), Layer::default());
    emptied.set(1, resource("gone", b"1"));
    emptied.remove(2, Kind::Cluster, "gone");
    empty.share(&emptied);
    let now = snapshot(&Layer::default(), &empty);
    assert!(is_one(&emptied, &empty) && !now.is_changed(Kind::Cluster, now.generation()));

    // An equal edit keeps them shared, also if it lists unchanged resources.
    let before = first.clone();
    change(&mut first, 2, &[("a", Some(b"2")), ("c", Some(b"1"))], None);
    change(
        &mut second,
        2,
        &[("a", Some(b"2")), ("b", Some(b"1")), ("c", Some(b"1")), ("d", None)],
        Some((&before, &first)),
    );
    assert!(is_one(&first, &second));
    assert_eq!(snapshot(&Layer::default(), &second).generation(), 2);

    // Fewer, more or other changes separate them.
    for other in [
        &[("a", Some(&b"3"[..]))][..],
        &[("a", Some(b"3")), ("b", None), ("c", None)],
        &[("a", Some(b"3")), ("b", Some(b"3"))],
    ] {
        let (before, mut first, mut second) = (first.clone(), first.clone(), second.clone());
        change(&mut first, 3, &[("a", Some(b"3")), ("b", None)], None);
        change(&mut second, 3, other, Some((&before, &first)));
        assert!(!is_one(&first, &second), "{other:?}");
        for (name, body) in other {
            let now = second.get(Kind::Cluster, name).map(|resource| &*resource.body);
            assert_eq!(now, *body, "{name}");
        }
    }
}

#[test]
fn encoded_parts_are_reused_if_unchanged() {
    let mut layer = Layer::default();
    let mut row = |generation: u64, changed: std::ops::Range<usize>| {
        for number in changed {
            let body = format!("{number}, {generation}").into();
            layer.set(generation, Resource::from_body(Kind::Cluster, &number.to_string(), body));
        }
        let now = snapshot(&Layer::default(), &layer);
        now.take_shared(Kind::Cluster, Form::Delta, &mut now.iter(Kind::Cluster).cloned().collect())
    };
    let rows = [row(1, 0..10_000), row(2, 100..102), row(3, 5_000..5_002)];
    for [former, row] in rows.array_windows() {
        assert_eq!(row.count, 10_000);
        assert!((1..100_000).contains(&row.own_bytes(former)), "{}", row.own_bytes(former));
        assert!(row.own_bytes(&EncodedSequence::default()) > 8 * row.own_bytes(former));
    }
}

#[test]
fn layers_that_differ_in_few_resources_share_their_encoded_parts() {
    let encoded = |layer: &Layer| {
        let now = snapshot(&Layer::default(), layer);
        now.take_shared(Kind::Cluster, Form::Delta, &mut now.iter(Kind::Cluster).cloned().collect())
    };
    let layer = |changed: usize| {
        let mut layer = Layer::default();
        for number in 0..10_000 {
            let body = format!("{number}, {}", number == changed).into();
            layer.set(1, Resource::from_body(Kind::Cluster, &number.to_string(), body));
        }
        layer
    };
    let (first, mut second, mut third) = (layer(1), layer(5_000), layer(9_000));
    let of_first = encoded(&first);
    second.share(&first);
    let of_second = encoded(&second);
    // A layer that has only taken parts passes them on.
    third.share(&second);
    for row in [of_second, encoded(&third)] {
        assert_eq!(row.count, 10_000);
        assert!(row.own_bytes(&EncodedSequence::default()) > 8 * row.own_bytes(&of_first));
    }
}

#[test]
fn a_stream_far_behind_is_given_changes_but_no_removals() {
    let mut layer = Layer::default();
    layer.set(1, resource("old", b"1"));
    layer.set(1, resource("gone", b"1"));
    layer.remove(2, Kind::Cluster, "gone");
    for generation in 3..REMEMBERED as u64 + 10 {
        layer.set(generation, resource("a", if generation % 2 == 0 { b"1" } else { b"2" }));
    }
    let now = snapshot(&Layer::default(), &layer);
    assert_eq!(names(&now.changes(Kind::Cluster, 1)), (vec!["a"], None));
    assert_eq!(names(&now.changes(Kind::Cluster, 100)), (vec!["a"], Some(vec![])));
}

/// Layers over a common one, each beside a layer of its own with the same content, through random changes.
#[test]
fn a_layer_over_another_is_read_like_one_layer() {
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut below = Layer::default();
        let mut clients: Vec<(Layer, Layer)> = vec![Default::default(); 3];
        for generation in 1..60 {
            let name = |random: &mut fastrand::Rng| format!("{}", random.usize(..12));
            let body = |random: &mut fastrand::Rng| random.usize(..3).to_string();
            let host = |name: &str, body: &str| {
                let aliases = [format!("80/{body}"), format!("80/*.{body}.x")];
                let body = body.to_owned().into();
                Resource::with_aliases(
                    Kind::VirtualHost,
                    &format!("80/{name}"),
                    body,
                    aliases.iter().map(String::as_str),
                )
            };
            let edit = |random: &mut fastrand::Rng, edits: &mut Edits| {
                let name = name(random);
                match random.usize(..3) {
                    0 => edits.remove(Kind::VirtualHost, format!("80/{name}").into()),
                    _ => edits.set(host(&name, &body(random))),
                }
            };
            let mut common = Edits::default();
            (0..random.usize(..3)).for_each(|_| edit(&mut random, &mut common));
            let before = below.clone();
            let edited: Vec<Arc<str>> = common.0[Kind::VirtualHost as usize].keys().cloned().collect();
            below.edit(generation, common, None);
            let get = |layer: &Layer, name: &str| layer.get(Kind::VirtualHost, name).cloned();
            let changed: Vec<Arc<str>> =
                edited.into_iter().filter(|name| get(&before, name) != get(&below, name)).collect();
            for (local, flat) in &mut clients {
                let then = Snapshot {
                    local: Arc::new(local.clone()),
                    shared: Arc::new(before.clone()),
                    ..Snapshot::default()
                };
                let mut own = Edits::default();
                (0..random.usize(..3)).for_each(|_| edit(&mut random, &mut own));
                // A change of the layer below reaches the other one as well.
                let mut all = Edits::default();
                for name in &changed {
                    match below.get(Kind::VirtualHost, name) {
                        Some(resource) => all.set(Arc::clone(resource)),
                        None => all.remove(Kind::VirtualHost, Arc::clone(name)),
                    }
                }
                for (name, edit) in &own.0[Kind::VirtualHost as usize] {
                    all.0[Kind::VirtualHost as usize].insert(Arc::clone(name), edit.clone());
                }
                local.edit_over(generation, (&before, &below), own);
                flat.edit(generation, all, None);
                let now = Snapshot {
                    local: Arc::new(local.clone()),
                    shared: Arc::new(below.clone()),
                    ..Snapshot::default()
                };
                let one = Snapshot { shared: Arc::new(flat.clone()), ..Snapshot::default() };
                let flattened = Snapshot { shared: Arc::new(local.flatten(&below)), ..Snapshot::default() };
                compare(&now, &one, &then, &format!("seed {seed}, generation {generation}"));
                compare(&flattened, &one, &then, &format!("seed {seed}, {generation}, flattened"));
            }
        }
    }
}

fn compare(now: &Snapshot, one: &Snapshot, then: &Snapshot, at: &str) {
    let kind = Kind::VirtualHost;
    let sorted = |snapshot: &Snapshot| {
        let mut all: Vec<_> = snapshot.iter(kind).cloned().collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    };
    assert_eq!(sorted(now), sorted(one), "{at}");
    assert_eq!(now.count(kind), one.count(kind), "{at}");
    let generation = then.generation();
    for since in [generation, generation.saturating_sub(3)] {
        let (of_now, of_one) = (now.changes(kind, since), one.changes(kind, since));
        let sent = |changes: &Changes| {
            let names: Vec<_> = changes.resources.iter().map(|resource| Arc::clone(&resource.name)).collect();
            (names, changes.removed.clone())
        };
        if since == generation {
            assert_eq!(sent(&of_now), sent(&of_one), "{at}: since {since}");
        } else {
            // A client that is behind may be sent more, but misses nothing.
            let all: BTreeSet<_> = sent(&of_now).0.into_iter().chain(sent(&of_now).1.unwrap()).collect();
            let needed = sent(&of_one).0.into_iter().chain(sent(&of_one).1.unwrap());
            assert!(needed.into_iter().all(|name| all.contains(&name)), "{at}: since {since}");
        }
        if let Some(changed) = now.changed_aliases(kind, since) {
            let of_one = one.changed_aliases(kind, since).unwrap();
            for authority in ["80/0", "80/a.1.x", "80/3"] {
                let affects = changed.affects(kind, authority);
                assert!(affects || !of_one.affects(kind, authority), "{at}: {authority}");
            }
        }
    }
    let names: Vec<Arc<str>> = (0..12).map(|name| format!("80/{name}").into()).collect();
    let mut names = names;
    names.sort_unstable();
    for few in [&names[..], &names[..1]] {
        let each = |of: &Snapshot| -> Vec<_> {
            of.each(kind, few, generation).map(|(name, one, new)| (name.clone(), one.cloned(), new)).collect()
        };
        assert_eq!(each(now), each(one), "{at}");
    }
    for authority in ["80/0", "80/1", "80/2", "80/a.0.x", "80/b.c.1.x", "80/3"] {
        assert_eq!(now.find(kind, authority), one.find(kind, authority), "{at}: {authority}");
    }
    let mut send: Vec<_> = now.iter(kind).cloned().collect();
    let shared = now.take_shared(kind, Form::Delta, &mut send);
    assert_eq!(send.len() + shared.count, one.count(kind), "{at}");
}

#[test]
fn encoded_parts_without_hidden_resources_are_shared() {
    let mut below = Layer::default();
    for number in 0..1_000 {
        let body = format!("{number}").into();
        below.set(1, Resource::from_body(Kind::Cluster, &number.to_string(), body));
    }
    let mut local = Layer::default();
    let mut edits = Edits::default();
    edits.set(resource("5", b"other"));
    edits.set(resource("new", b"other"));
    edits.remove(Kind::Cluster, "7".into());
    local.edit_over(1, (&below, &below), edits);
    let now = Snapshot { local: Arc::new(local), shared: Arc::new(below), ..Snapshot::default() };
    let mut send: Vec<_> = now.iter(Kind::Cluster).cloned().collect();
    let all: BTreeMap<_, _> = send.iter().map(|one| (one.name.clone(), one.version)).collect();
    let parts = now.take_shared(Kind::Cluster, Form::Delta, &mut send);
    assert!(parts.count > 500, "{}", parts.count);
    let rest = send.iter().map(|one| (one.name.clone(), one.version));
    let sent: BTreeMap<_, _> =
        parts.resources().map(|one| (one.name.clone(), one.version)).chain(rest).collect();
    assert_eq!(sent, all);
    assert_eq!(parts.count + send.len(), all.len());
    assert!(!all.contains_key("7") && all.len() == 1_000);
}
