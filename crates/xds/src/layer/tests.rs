use bytes::Bytes;

use super::*;

fn resource(name: &str, body: &'static [u8]) -> Arc<Resource> {
    Resource::from_body(Kind::Cluster, name, Bytes::from_static(body))
}

fn snapshot(own: &Layer, shared: &Layer) -> Snapshot {
    Snapshot { own: Arc::new(own.clone()), shared: Arc::new(shared.clone()) }
}

fn names(changes: &Changes) -> (Vec<&str>, Option<Vec<&str>>) {
    let sent = changes.resources.iter().map(|resource| &*resource.name).collect();
    (sent, changes.gone.as_ref().map(|gone| gone.iter().map(|name| &**name).collect()))
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
