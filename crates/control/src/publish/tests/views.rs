//! Limits of declared views, and that many views of one identity do not delay those of others.

use std::sync::OnceLock;

use serde_json::json;
use skysail_model::compile_own;
use skysail_xds::server::Event;

use super::{
    super::round::BATCH,
    scopes::{client, connect, pod, put, service, snapshot},
    *,
};

/// A policy that affects the listeners of every workload.
const POLICY: &str = "{apiVersion: security.istio.io/v1, kind: AuthorizationPolicy, metadata: {name: p, namespace: istio-system}, spec: {rules: [{from: [{source: {namespaces: [x]}}]}]}}";

/// An object that affects all resources.
const MESH: &str = "{apiVersion: v1, kind: ConfigMap, metadata: {name: istio, namespace: istio-system}, data: {mesh: 'accessLogFile: /dev/stdout'}}";

/// Returns a proxy without a known pod, with its own view.
fn declared(namespace: &str, number: usize) -> NewClient {
    client(namespace, json!({"LABELS": {"app": "a", "number": number.to_string()}}))
}

#[test]
fn views_of_unknown_pods_are_limited_by_identity_and_in_total() {
    let publisher = Arc::new(publisher(Compiler::default(), LIMITS));
    put(&publisher, "service", &service("a"));
    put(&publisher, "pod", &pod("v1", "default"));
    let ScopeLimits { views: max_views, views_per_identity, .. } = publisher.settings.limits;
    let open = |namespace, numbers: std::ops::Range<usize>| -> Vec<_> {
        numbers.map(|number| connect(&publisher, declared(namespace, number)).unwrap()).collect()
    };
    let mut of_y = open("y", 0..views_per_identity);
    let refused = connect(&publisher, declared("y", views_per_identity)).err().unwrap();
    assert!(matches!(refused, Refused::Limit(Limit::IdentityViews)), "{refused:?}");
    let reason = refused.reason(&publisher.settings);
    assert!(reason.contains("--max-views-per-identity") && reason.contains("300"), "{reason}");
    // Proxies may join an existing view. Other identities may add views up to the total limit.
    connect(&publisher, declared("y", 0)).unwrap();
    let of_z = open("z", views_per_identity..max_views);
    let refused = connect(&publisher, declared("z", 0)).err().unwrap();
    assert!(matches!(refused, Refused::Limit(Limit::Views)), "{refused:?}");
    assert!(refused.reason(&publisher.settings).ends_with("the limit of --max-views"));
    // The view of a known pod does not count, whatever its proxy declares.
    let of_pod = connect(&publisher, declared("x", 0)).unwrap();
    assert_eq!(publisher.gauges().views, max_views + 1);
    // A removed view allows another one.
    of_y.pop();
    let again = open("y", views_per_identity..views_per_identity + 1);
    let refusals = [Limit::IdentityViews, Limit::Views]
        .map(|limit| publisher.metrics.limit_refusals[limit as usize].load(Relaxed));
    assert_eq!(refusals, [1, 1]);
    drop((of_y, of_z, of_pod, again));
    assert_eq!(publisher.gauges().views, 0);
    open("y", 0..views_per_identity);
}

#[test]
fn many_views_of_one_identity_do_not_delay_those_of_others() {
    let other = Arc::<OnceLock<(ResourceFeed, Connected)>>::default();
    let (watched, compiled) = (Arc::clone(&other), Arc::new(Mutex::new((0, 0))));
    let counted = Arc::clone(&compiled);
    // Counts views compiled after the change, and those compiled before the other identity's proxy had the change.
    let own = move |world: &_, view: &ProxyView, outline: &_| {
        if let Some((watched, _)) = watched.get() {
            let mut counted = lock(&counted);
            counted.0 += 1;
            counted.1 += usize::from(!watched.snapshot.has_changed().unwrap());
        }
        compile_own(world, view, outline)
    };
    let publisher = Arc::new(publisher(Compiler { own: Box::new(own), ..Compiler::default() }, LIMITS));
    put(&publisher, "service", &service("a"));
    let many: Vec<_> = (0..300).map(|number| connect(&publisher, declared("y", number)).unwrap()).collect();
    let one = connect(&publisher, declared("z", 0)).unwrap();
    Kind::ALL.into_iter().for_each(|kind| one.0.interest.add_all(kind));
    other.set(one).ok().unwrap();

    // Shared resources change too; each proxy receives them together with its own.
    let with_port = service("b").replace("http, port: 80", "tcp, port: 9000");
    put(&publisher, "change", &format!("{with_port}\n---\n{POLICY}"));
    let (views, before) = *lock(&compiled);
    assert_eq!(views, 301);
    assert!(
        before <= BATCH,
        "{before} of {views} views were compiled before the proxy of the other identity had the change"
    );
    let fresh = Arc::new(super::publisher(Compiler::default(), LIMITS));
    put(&fresh, "service", &service("a"));
    put(&fresh, "change", &format!("{with_port}\n---\n{POLICY}"));
    for (number, one) in many.iter().enumerate() {
        let expected = bodies(&snapshot(&connect(&fresh, declared("y", number)).unwrap()));
        assert_eq!(differences(&bodies(&snapshot(one)), &expected), [""; 0], "view {number}");
    }
}

#[test]
fn the_status_of_an_object_omits_resources_that_are_hidden_from_its_proxies() {
    let publisher = Arc::new(publisher(Compiler::default(), LIMITS));
    let rule = |namespace: &str, spec: &str| {
        format!(
            "{{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {{name: r, namespace: {namespace}}}, spec: {{host: b.y.svc.cluster.local, {spec}}}}}"
        )
    };
    put(&publisher, "b", &service("b").replace("namespace: x", "namespace: y"));
    put(&publisher, "shared", &rule("y", "subsets: [{name: v1, labels: {version: v1}}]"));
    put(&publisher, "local", &rule("x", "trafficPolicy: {loadBalancer: {simple: RANDOM}}"));
    put(&publisher, "mesh", MESH);
    let one = connect(&publisher, declared("x", 0)).unwrap();
    let (snapshot, kind) = (snapshot(&one), Kind::Cluster);
    assert!(snapshot.local.hides(kind, "outbound|80|v1|b.y.svc.cluster.local"));
    one.1.report(Event::Subscribed { kind, all: true, names: &Arc::default() });
    let status = publisher.object("ConfigMap", "istio-system", "istio").unwrap();
    let status = serde_json::to_value(&status).unwrap();
    let listed = status["resources"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap());
    let listed: BTreeSet<&str> = listed.collect();
    assert_eq!(listed, snapshot.iter(kind).map(|one| &*one.name).collect::<BTreeSet<_>>());
    assert!(listed.contains("outbound|80||b.y.svc.cluster.local"), "{listed:?}");
}
