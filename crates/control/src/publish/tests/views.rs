//! How many views proxies may have that are only declared, and that many views of one identity do not delay those of others.

use std::sync::OnceLock;

use serde_json::json;
use skysail_model::compile_own;

use super::{
    super::round::BATCH,
    scopes::{client, connect, pod, put, service, snapshot},
    *,
};

/// A policy that concerns the listeners of every workload.
const POLICY: &str = "{apiVersion: security.istio.io/v1, kind: AuthorizationPolicy, metadata: {name: p, namespace: istio-system}, spec: {rules: [{from: [{source: {namespaces: [x]}}]}]}}";

/// A proxy of which no pod is known, with a view of its own.
fn declared(namespace: &str, number: usize) -> NewClient {
    client(namespace, json!({"LABELS": {"app": "a", "number": number.to_string()}}))
}

#[test]
fn views_are_bounded_for_an_identity_and_in_all_where_no_pod_is_known() {
    let publisher = Arc::new(publisher(Compiler::default()));
    put(&publisher, "service", &service("a"));
    put(&publisher, "pod", &pod("v1", "default"));
    let Limits { views: most, views_of_identity, .. } = publisher.settings.limits;
    let open = |namespace, numbers: std::ops::Range<usize>| -> Vec<_> {
        numbers.map(|number| connect(&publisher, declared(namespace, number)).unwrap()).collect()
    };
    let mut of_y = open("y", 0..views_of_identity);
    let refused = connect(&publisher, declared("y", views_of_identity)).err().unwrap();
    assert!(matches!(refused, Refused::Limit(Limit::IdentityViews)), "{refused:?}");
    let reason = refused.reason(&publisher.settings);
    assert!(reason.contains("--max-views-per-identity") && reason.contains("300"), "{reason}");
    // A view that is there may be joined, and other identities have theirs, up to the limit in all.
    connect(&publisher, declared("y", 0)).unwrap();
    let of_z = open("z", views_of_identity..most);
    let refused = connect(&publisher, declared("z", 0)).err().unwrap();
    assert!(matches!(refused, Refused::Limit(Limit::Views)), "{refused:?}");
    assert!(refused.reason(&publisher.settings).contains("--max-views allows"));
    // A known pod is not counted, whatever its proxy declares.
    let of_pod = connect(&publisher, declared("x", 0)).unwrap();
    assert_eq!(publisher.gauges().views, most + 1);
    // A view that is gone makes room for another.
    of_y.pop();
    let again = open("y", views_of_identity..views_of_identity + 1);
    let refusals = [Limit::IdentityViews, Limit::Views]
        .map(|limit| publisher.metrics.scope_refusals[limit as usize].load(Relaxed));
    assert_eq!(refusals, [1, 1]);
    drop((of_y, of_z, of_pod, again));
    assert_eq!(publisher.gauges().views, 0);
    open("y", 0..views_of_identity);
}

#[test]
fn many_views_of_one_identity_do_not_delay_those_of_others() {
    let honest = Arc::<OnceLock<(ResourceFeed, Connected)>>::default();
    let (watched, compiled) = (Arc::clone(&honest), Arc::new(Mutex::new((0, 0))));
    let counted = Arc::clone(&compiled);
    // Counts views compiled after the change, and those of them before the honest proxy had it.
    let own = move |world: &_, view: &ProxyView, outline: &_| {
        if let Some((watched, _)) = watched.get() {
            let mut counted = lock(&counted);
            counted.0 += 1;
            counted.1 += usize::from(!watched.snapshot.has_changed().unwrap());
        }
        compile_own(world, view, outline)
    };
    let publisher = Arc::new(publisher(Compiler { own: Box::new(own), ..Compiler::default() }));
    put(&publisher, "service", &service("a"));
    let many: Vec<_> = (0..300).map(|number| connect(&publisher, declared("y", number)).unwrap()).collect();
    let one = connect(&publisher, declared("z", 0)).unwrap();
    Kind::ALL.into_iter().for_each(|kind| one.0.interest.add_all(kind));
    honest.set(one).ok().unwrap();

    // Shared resources change too, which all are to have together with their own.
    let with_port = service("b").replace("http, port: 80", "tcp, port: 9000");
    put(&publisher, "change", &format!("{with_port}\n---\n{POLICY}"));
    let (views, before) = *lock(&compiled);
    assert_eq!(views, 301);
    assert!(
        before <= BATCH,
        "{before} of {views} views were compiled before the honest proxy had the change"
    );
    let fresh = Arc::new(super::publisher(Compiler::default()));
    put(&fresh, "service", &service("a"));
    put(&fresh, "change", &format!("{with_port}\n---\n{POLICY}"));
    for (number, one) in many.iter().enumerate() {
        let entitled = bodies(&snapshot(&connect(&fresh, declared("y", number)).unwrap()));
        assert_eq!(differences(&bodies(&snapshot(one)), &entitled), [""; 0], "view {number}");
    }
}
