//! Limits of scopes, and the effect of a slow or panicking compilation on other scopes.

use std::{
    pin::{Pin, pin},
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use serde_json::{Value, json};
use skysail_model::{Part, ProxyView, compile_own, compile_part};

use super::{super::identities::IDLE_TIMEOUT, *};

const SERVICE: &str = "{apiVersion: v1, kind: Service, metadata: {name: NAME, namespace: x}, spec: {clusterIP: 10.0.0.1, selector: {app: NAME}, ports: [{name: http, port: 80}]}}";
const ROUTE: &str = "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: v, namespace: x}, spec: {hosts: [a], http: [{match: [{sourceLabels: {version: v1}}], timeout: 3s, route: [{destination: {host: a}}]}, {route: [{destination: {host: a}}]}]}}";
const POLICY: &str = "{apiVersion: security.istio.io/v1, kind: AuthorizationPolicy, metadata: {name: p, namespace: istio-system}, spec: {rules: [{from: [{source: {namespaces: [x]}}]}]}}";
const STRICT: &str = "{apiVersion: security.istio.io/v1, kind: PeerAuthentication, metadata: {name: default, namespace: istio-system}, spec: {mtls: {mode: STRICT}}}";
const NODE: &str = "{apiVersion: v1, kind: Node, metadata: {name: n, labels: {topology.kubernetes.io/region: r, topology.kubernetes.io/zone: z}}}";

pub(super) fn service(name: &str) -> String {
    SERVICE.replace("NAME", name)
}

/// Returns the pod that [`client`] names, in namespace x.
pub(super) fn pod(version: &str, account: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: p, namespace: x, labels: {{app: a, version: {version}}}}}, spec: {{nodeName: n, serviceAccountName: {account}, containers: [{{name: c, image: c, ports: [{{name: web, containerPort: 8080}}]}}]}}, status: {{podIP: 10.2.0.1}}}}"
    )
}

/// Returns a proxy whose declared node has these fields, besides the default ones.
pub(super) fn client(namespace: &str, declared: Value) -> NewClient {
    let mut metadata = json!({
        "LABELS": {"app": "a", "version": "v1"}, "WORKLOAD_NAME": "p", "NODE_NAME": "n",
        "POD_PORTS": [{"name": "web", "containerPort": 8080}],
    });
    for (name, value) in declared.as_object().unwrap() {
        metadata[name] = value.clone();
    }
    let region = metadata["REGION"].as_str().unwrap_or_default().to_owned();
    let locality = Locality { region, ..Locality::default() };
    let id = format!("sidecar~10.2.0.1~p.{namespace}~{namespace}.svc.cluster.local");
    let node = ProxyNode::parse(&id, metadata, locality).unwrap();
    let accounted_to = format!("{namespace}/{}", node.view.service_account).into();
    NewClient {
        node,
        version: String::new(),
        address: String::new(),
        identity: String::new(),
        accounted_to,
        form: Form::Delta,
    }
}

pub(super) fn put(publisher: &Publisher, name: &str, text: &str) {
    let state = if text.is_empty() { FileState::Deleted } else { FileState::Text(text.to_owned()) };
    publisher.apply(vec![FileChange { layer: 0, path: name.to_owned(), state }]);
}

pub(super) fn connect(
    publisher: &Arc<Publisher>,
    client: NewClient,
) -> Result<(ResourceFeed, Connected), Refused> {
    RUNTIME.block_on(publisher.connect(client))
}

pub(super) fn snapshot((feed, _): &(ResourceFeed, Connected)) -> Snapshot {
    feed.snapshot.borrow().clone()
}

/// Returns the resources that a proxy receives from a control plane that has just read these files.
fn fresh(files: &[&str], client: NewClient) -> Bodies {
    let publisher = Arc::new(publisher(Compiler::default(), LIMITS));
    for (number, text) in files.iter().enumerate() {
        put(&publisher, &number.to_string(), text);
    }
    bodies(&snapshot(&connect(&publisher, client).unwrap()))
}

fn scopes(publisher: &Publisher) -> usize {
    publisher.gauges().scopes
}

/// Returns the number of first compilations of scopes.
fn compiles(publisher: &Publisher) -> usize {
    publisher.metrics.scopes_opened.load(Relaxed) as usize
}

fn new_publisher() -> Arc<Publisher> {
    Arc::new(publisher(Compiler::default(), LIMITS))
}

/// Returns nodes that a proxy may declare falsely.
fn declarations() -> Vec<Value> {
    let some = |number: usize| {
        [
            json!({"CLUSTER_ID": format!("cluster-{number}")}),
            json!({"REGION": format!("region-{number}")}),
            json!({"LABELS": {"app": "a", "version": format!("v{number}")}}),
            json!({"INSTANCE_IPS": format!("fd00::{number}")}),
            json!({"POD_PORTS": [{"name": "web", "containerPort": number + 1}]}),
            json!({"LABELS": {}, "WORKLOAD_NAME": format!("w-{number}")}),
            json!({"NODE_NAME": format!("n-{number}")}),
            json!({"ISTIO_VERSION": format!("1.{number}.0")}),
            json!({"MESH_ID": format!("mesh-{number}")}),
            json!({"PROXY_CONFIG": {"gatewayTopology": {"numTrustedProxies": number + 1}}}),
            json!({"NETWORK": format!("network-{number}")}),
            json!({"ENVOY_CAPABILITIES": {"number": number}}),
        ]
    };
    (0..10).flat_map(some).collect()
}

/// [`declarations`] omits the identity, because it is authenticated. It also omits capabilities, because they
/// have few combinations. This test fails to compile if a view has a field that it neither omits nor
/// compares.
#[test]
fn declarations_cover_every_field_of_a_view() {
    let view = |declared| client("x", declared).node.view;
    let ProxyView {
        role: _,
        namespace: _,
        service_account: _,
        plain_envoy: _,
        intercepts: _,
        uses_vhds: _,
        takes_resolved_addresses: _,
        is_authenticated: _,
        answers_dns: _,
        // Listeners of the workload alone depend on it.
        idle_timeout: _,
        // Nothing without an EnvoyFilter that compares it.
        metadata: _,
        ipv4: _,
        // Known pods alone have it.
        address: _,
        addressed: _,
        labels,
        canonical_service,
        cluster_id,
        locality,
        network,
        named_ports,
        settings,
        ipv6,
    } = view(json!({}));
    let others: Vec<ProxyView> = declarations().into_iter().map(view).collect();
    let covered = [
        others.iter().any(|other| other.labels != labels),
        others.iter().any(|other| other.canonical_service != canonical_service),
        others.iter().any(|other| other.cluster_id != cluster_id),
        others.iter().any(|other| other.network != network),
        others.iter().any(|other| other.locality != locality),
        others.iter().any(|other| other.named_ports != named_ports),
        others.iter().any(|other| other.settings != settings),
        others.iter().any(|other| other.ipv6 != ipv6),
    ];
    assert_eq!(covered, [true; 8]);
}

#[test]
fn declared_properties_create_no_scope_if_the_pod_is_known() {
    let publisher = new_publisher();
    put(&publisher, "service", &service("a"));
    put(&publisher, "node", NODE);
    // A route that matches labels, so that scopes depend on labels.
    put(&publisher, "route", ROUTE);
    put(&publisher, "pod", &pod("v1", "default"));
    let existing = connect(&publisher, client("x", json!({}))).unwrap();
    let expected = bodies(&snapshot(&existing));
    let declarations = declarations();
    let mut all: Vec<_> = declarations
        .iter()
        .map(|declared| connect(&publisher, client("x", declared.clone())).unwrap())
        .collect();
    all.retain(|one| differences(&expected, &bodies(&snapshot(one))).is_empty());
    assert_eq!(
        all.len(),
        declarations.len(),
        "some proxies have resources that their pod is not entitled to"
    );
    let gauges = publisher.gauges();
    assert_eq!((gauges.scopes, gauges.views, compiles(&publisher)), (1, 1, 1));
}

#[test]
fn scopes_of_unknown_pods_are_limited_by_identity_and_in_total() {
    let publisher = new_publisher();
    put(&publisher, "service", &service("a"));
    put(&publisher, "route", ROUTE);
    let ScopeLimits { scopes: max_scopes, scopes_per_identity, .. } = publisher.settings.limits;
    let existing = connect(&publisher, client("x", json!({}))).unwrap();
    // A compiled scope counts until its idle timeout, even after its proxies have disconnected.
    for declared in declarations().into_iter().cycle().take(500) {
        match connect(&publisher, client("y", declared)) {
            Ok(_) | Err(Refused::Limit(Limit::Identity)) => {}
            Err(refused) => panic!("{refused:?}"),
        }
    }
    assert_eq!(
        (scopes(&publisher), compiles(&publisher)),
        (1 + scopes_per_identity, 1 + scopes_per_identity)
    );
    assert!(publisher.metrics.limit_refusals[Limit::Identity as usize].load(Relaxed) > 100);
    assert_eq!(publisher.metrics.limit_refusals[Limit::Total as usize].load(Relaxed), 0);
    let refused = connect(&publisher, client("y", json!({"CLUSTER_ID": "another"}))).err().unwrap();
    let reason = refused.reason(&publisher.settings);
    assert!(reason.contains("--max-scopes-per-identity") && reason.contains('6'), "{reason}");

    // Each identity adds a scope until the total limit is reached.
    for number in 0.. {
        let next = client(&format!("n{number}"), json!({}));
        match connect(&publisher, next) {
            Ok(_) => {}
            Err(Refused::Limit(Limit::Total)) => break,
            Err(refused) => panic!("{refused:?}"),
        }
    }
    assert_eq!(scopes(&publisher), max_scopes);
    // Connected proxies stay connected, and may connect again.
    connect(&publisher, client("x", json!({}))).unwrap();
    put(&publisher, "service", &service("b"));
    assert!(bodies(&snapshot(&existing)).keys().any(|(_, name)| name.contains("|b.x.")));

    // Scopes without proxies are removed after the timeout.
    publisher.drop_idle(Instant::now() + IDLE_TIMEOUT / 2);
    assert_eq!(scopes(&publisher), max_scopes);
    publisher.drop_idle(Instant::now() + IDLE_TIMEOUT);
    assert_eq!(scopes(&publisher), 1);
    connect(&publisher, client("y", json!({"CLUSTER_ID": "another"}))).unwrap();
    assert!(bodies(&snapshot(&existing)).keys().any(|(_, name)| name.contains("|b.x.")));
}

#[test]
fn the_pod_of_another_account_is_refused() {
    let publisher = new_publisher();
    put(&publisher, "pod", &pod("v1", "other"));
    match connect(&publisher, client("x", json!({}))) {
        Err(Refused::AccountMismatch(error)) => {
            assert!(error.to_string().starts_with("pod x/p runs as x/other, not as x/default"), "{error}");
        }
        other => panic!("{:?}", other.err()),
    }
    connect(&publisher, client("x", json!({"SERVICE_ACCOUNT": "other"}))).unwrap();
}

#[test]
fn streams_end_when_the_pod_no_longer_matches_the_view() {
    let publisher = new_publisher();
    let files = [service("a"), ROUTE.to_owned(), POLICY.to_owned()];
    files.iter().enumerate().for_each(|(number, text)| put(&publisher, &number.to_string(), text));
    let is_ended = |one: &(ResourceFeed, Connected)| one.0.snapshot.has_changed().is_err();
    let mut one = connect(&publisher, client("x", json!({}))).unwrap();
    put(&publisher, "pod", &pod("v1", "default"));
    assert!(!is_ended(&one), "the pod matches the declared view");
    let (v2, moved) = (pod("v2", "default"), NODE.replace("zone: z", "zone: other"));
    for (name, text) in [("pod", &*v2), ("node", NODE), ("node", &moved)] {
        put(&publisher, name, text);
        assert!(is_ended(&one), "{text}");
        // The new stream may begin before the old one has ended.
        let next = connect(&publisher, client("x", json!({}))).unwrap();
        drop(std::mem::replace(&mut one, next));
        assert!(!is_ended(&one));
    }
    let fresh = fresh(&[&files[0], &files[1], &files[2], &v2, &moved], client("x", json!({})));
    assert_eq!(differences(&bodies(&snapshot(&one)), &fresh), [""; 0]);
    // If the service account of the pod changes, the proxy is no longer authorized.
    put(&publisher, "pod", &pod("v2", "other"));
    assert!(is_ended(&one));
    assert!(matches!(connect(&publisher, client("x", json!({}))), Err(Refused::AccountMismatch(_))));
}

#[test]
fn a_scope_that_loses_its_views_and_its_filters_in_one_change_gets_a_base() {
    // Scopes with filters have no base.
    const FILTER: &str = "{apiVersion: networking.istio.io/v1alpha3, kind: EnvoyFilter, metadata: {name: f, namespace: istio-system}, spec: {configPatches: [{applyTo: CLUSTER, patch: {operation: MERGE, value: {connect_timeout: 7s}}}]}}";
    let publisher = new_publisher();
    for (name, text) in [("a", service("a")), ("filter", FILTER.to_owned()), ("pod", pod("v1", "default"))] {
        put(&publisher, name, &text);
    }
    let ended = connect(&publisher, client("x", json!({}))).unwrap();
    let change = |path: &str, state| FileChange { layer: 0, path: path.to_owned(), state };
    publisher.apply(vec![
        change("filter", FileState::Deleted),
        change("pod", FileState::Text(pod("v2", "default"))),
    ]);
    assert!(ended.0.snapshot.has_changed().is_err());
    // The new stream begins before the old one has ended.
    let next = publisher.connect(client("x", json!({})));
    let next = RUNTIME.block_on(async { tokio::time::timeout(Duration::from_secs(60), next).await });
    let next = next.expect("the scope is never compiled").unwrap();
    let fresh = fresh(&[&service("a"), &pod("v2", "default")], client("x", json!({})));
    assert_eq!(differences(&bodies(&snapshot(&next)), &fresh), [""; 0]);
}

#[test]
fn a_private_rule_for_a_service_without_port_80_has_a_virtual_host_there() {
    const RULE: &str = "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: v, namespace: x}, spec: {hosts: [b], exportTo: [.], http: [{route: [{destination: {host: a}}]}]}}";
    let publisher = new_publisher();
    let other = service("b").replace("name: http, port: 80", "name: tcp, port: 3306");
    for (name, text) in [("a", service("a")), ("b", other), ("rule", RULE.to_owned())] {
        put(&publisher, name, &text);
    }
    let has = |namespace: &str| {
        let one = connect(&publisher, client(namespace, json!({"SKYSAIL_VHDS": "true"}))).unwrap();
        let name: Arc<str> = "80/b.x.svc.cluster.local:80".into();
        bodies(&snapshot(&one)).contains_key(&(Kind::VirtualHost, name))
    };
    // Clients of both namespaces share a base, which does not have it.
    assert_eq!((has("x"), has("y")), (true, false));
}

/// Cluster whose scopes a [`Gate`] pauses.
const PAUSED: &str = "paused";

/// Pauses the first compilation of a scope outside of the mesh's own cluster.
struct Gate {
    armed: AtomicBool,
    started: Barrier,
    released: Barrier,
}

impl Gate {
    fn new() -> Arc<Self> {
        Arc::new(Self { armed: AtomicBool::new(true), started: Barrier::new(2), released: Barrier::new(2) })
    }

    /// Returns a control plane with this gate, and its number of compilations for other clusters.
    fn publisher(self: &Arc<Self>) -> (Arc<Publisher>, Arc<AtomicUsize>) {
        let (gate, compiles) = (Arc::clone(self), Arc::<AtomicUsize>::default());
        let counted = Arc::clone(&compiles);
        let part = move |world: &_, client_scope: &ClientScope, part: &Part| {
            let resources = compile_part(world, client_scope, part);
            if client_scope.cluster_id != "Kubernetes" && *part == Part::Names {
                counted.fetch_add(1, Relaxed);
                if gate.armed.swap(false, Relaxed) {
                    gate.started.wait();
                    gate.released.wait();
                }
            }
            resources
        };
        (Arc::new(publisher(Compiler { part: Box::new(part), ..Compiler::default() }, LIMITS)), compiles)
    }
}

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    let _entered = RUNTIME.enter();
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_new_scope_is_compiled_once_for_all_proxies_that_wait_for_it() {
    let gate = Gate::new();
    let (publisher, compiles) = gate.publisher();
    put(&publisher, "a", &service("a"));
    let mut first = pin!(publisher.connect(client("y", json!({"CLUSTER_ID": PAUSED}))));
    let mut second =
        pin!(publisher.connect(client("y", json!({"CLUSTER_ID": PAUSED, "LABELS": {"app": "b"}}))));
    assert!(poll(first.as_mut()).is_pending());
    gate.started.wait();
    assert!(poll(second.as_mut()).is_pending());
    gate.released.wait();
    let both = RUNTIME.block_on(async { (first.await.unwrap(), second.await.unwrap()) });
    assert_eq!(compiles.load(Relaxed), 1);
    assert!(Arc::ptr_eq(&snapshot(&both.0).shared, &snapshot(&both.1).shared));
}

#[test]
fn a_new_scope_is_compiled_even_if_the_first_proxy_disconnects() {
    let gate = Gate::new();
    let (publisher, compiles) = gate.publisher();
    put(&publisher, "a", &service("a"));
    let mut first = Box::pin(publisher.connect(client("y", json!({"CLUSTER_ID": PAUSED}))));
    let mut second = pin!(publisher.connect(client("y", json!({"CLUSTER_ID": PAUSED}))));
    assert!(poll(first.as_mut()).is_pending() && poll(second.as_mut()).is_pending());
    gate.started.wait();
    drop(first);
    gate.released.wait();
    RUNTIME.block_on(second).unwrap();
    assert_eq!(compiles.load(Relaxed), 1);
}

#[test]
fn the_compilation_of_a_new_scope_delays_nothing_else_and_misses_no_change() {
    let other = ROUTE.replace("sourceLabels: {version: v1}", "method: {exact: POST}");
    let (a, b, removed) = (service("a"), service("b"), service("gone"));
    // In order: a new service; changes of one host's routes, of all listeners, of everything and of the label
    // keys; a deleted service.
    for change in [&*b, &other, POLICY, STRICT, ROUTE, ""] {
        let gate = Gate::new();
        let (publisher, _) = gate.publisher();
        put(&publisher, "0", &a);
        put(&publisher, "1", &removed);
        let existing = connect(&publisher, client("x", json!({}))).unwrap();
        let mut late = pin!(publisher.connect(client("y", json!({"CLUSTER_ID": PAUSED}))));
        assert!(poll(late.as_mut()).is_pending());
        gate.started.wait();
        // During the compilation, other proxies connect and receive changes.
        let newcomer = connect(&publisher, client("x", json!({}))).unwrap();
        let files = if change.is_empty() { vec![&*a] } else { vec![&*a, &removed, change] };
        put(&publisher, if change.is_empty() { "1" } else { "2" }, change);
        assert!(poll(late.as_mut()).is_pending());
        let expected = fresh(&files, client("x", json!({})));
        for one in [&existing, &newcomer] {
            let wrong = differences(&bodies(&snapshot(one)), &expected);
            assert!(wrong.is_empty(), "{change}: {wrong:?}");
        }
        gate.released.wait();
        let late = RUNTIME.block_on(late).unwrap();
        let expected = fresh(&files, client("y", json!({"CLUSTER_ID": PAUSED})));
        let wrong = differences(&bodies(&snapshot(&late)), &expected);
        assert!(wrong.is_empty(), "{change}: the new scope lacks {wrong:?}");
        // The new scope receives later changes.
        put(&publisher, "3", &service("c"));
        assert!(bodies(&snapshot(&late)).keys().any(|(_, name)| name.contains("|c.x.")), "{change}");
    }
}

#[test]
fn a_change_reaches_large_scopes_first_and_proxies_that_connect_during_the_compilation() {
    let gate = Gate::new();
    gate.armed.store(false, Relaxed);
    let (publisher, _) = gate.publisher();
    put(&publisher, "a", &service("a"));
    let many: Vec<_> = (0..3).map(|_| connect(&publisher, client("x", json!({}))).unwrap()).collect();
    let few = ["one", "two"].map(|cluster| {
        let one = client("y", json!({"CLUSTER_ID": cluster}));
        connect(&publisher, one).unwrap()
    });
    gate.armed.store(true, Relaxed);
    // The change adds a listener.
    let change = service("b").replace("http, port: 80", "tcp, port: 9000");
    let new = |cluster| client("y", json!({"CLUSTER_ID": cluster, "LABELS": {"app": "new"}}));
    let has_change = |one: &(ResourceFeed, Connected)| {
        bodies(&snapshot(one)).keys().any(|(_, name)| name.contains("|b.x."))
    };
    std::thread::scope(|scope| {
        let applied = scope.spawn(|| put(&publisher, "b", &change));
        gate.started.wait();
        // One of the small scopes is being compiled; the other waits.
        let newcomers = ["one", "two"].map(|cluster| connect(&publisher, new(cluster)).unwrap());
        let reached = (many.iter().all(has_change), few.iter().any(has_change));
        gate.released.wait();
        applied.join().unwrap();
        assert_eq!(reached, (true, false));
        for (one, cluster) in newcomers.iter().zip(["one", "two"]) {
            let expected = fresh(&[&service("a"), &change], new(cluster));
            assert_eq!(differences(&bodies(&snapshot(one)), &expected), [""; 0]);
        }
    });
    assert!(few.iter().all(has_change));
}

/// Returns a control plane, and the flag that makes two of its compilations panic. One compiles service `bad`
/// for the clusters of namespace x. The other compiles the own resources of workloads in namespace z.
fn failing() -> (Arc<Publisher>, Arc<AtomicBool>) {
    let fails = Arc::<AtomicBool>::default();
    let (in_part, in_own) = (Arc::clone(&fails), Arc::clone(&fails));
    let part = move |world: &_, client_scope: &ClientScope, part: &Part| {
        let is_bad = *part == Part::Service("x".into(), "bad".into()) && client_scope.cluster_id != "two";
        assert!(!is_bad || !in_part.load(Relaxed), "the service is bad");
        compile_part(world, client_scope, part)
    };
    let own = move |world: &_, view: &ProxyView, outline: &_| {
        assert!(view.namespace != "z" || !in_own.load(Relaxed), "the listeners are bad");
        compile_own(world, view, outline)
    };
    (Arc::new(publisher(Compiler { part: Box::new(part), own: Box::new(own) }, LIMITS)), fails)
}

#[test]
fn a_panic_affects_the_panicking_compilation_only() {
    let (publisher, fails) = failing();
    // Namespace x is in a cluster of its own. Its scope therefore has no sibling scope whose compiled service
    // it could reuse.
    let cluster = |namespace: &str| if namespace == "x" { "one" } else { "two" };
    let of = |namespace: &str| client(namespace, json!({"CLUSTER_ID": cluster(namespace)}));
    put(&publisher, "0", &service("a"));
    let [x, y, z] = ["x", "y", "z"].map(|namespace| connect(&publisher, of(namespace)).unwrap());
    let [before_x, before_z] = [&x, &z].map(|one| bodies(&snapshot(one)));

    fails.store(true, Relaxed);
    put(&publisher, "1", &service("bad"));
    let fresh_of = |files: &[&str], namespace| fresh(files, of(namespace));
    let (a, bad) = (service("a"), service("bad"));
    assert_eq!(
        differences(&bodies(&snapshot(&x)), &before_x),
        [""; 0],
        "the proxy keeps its last valid configuration"
    );
    assert_eq!(differences(&bodies(&snapshot(&y)), &fresh_of(&[&a, &bad], "y")), [""; 0]);
    let (own, all) = (&before_z, fresh_of(&[&a, &bad], "z"));
    let of_z = bodies(&snapshot(&z));
    for (key, resource) in &of_z {
        let shared = z.0.snapshot.borrow().own.get(key.0, &key.1).is_none();
        assert_eq!(Some(resource), if shared { all.get(key) } else { own.get(key) }, "{key:?}");
    }
    assert!(publisher.metrics.compile_panics.load(Relaxed) > 0);

    // Proxies of the failed scope may connect. New scopes and views whose compilation panics are refused.
    let newcomer = connect(&publisher, of("x")).unwrap();
    assert_eq!(differences(&bodies(&snapshot(&newcomer)), &before_x), [""; 0]);
    drop(newcomer);
    for (namespace, declared) in
        [("x", json!({"CLUSTER_ID": "new"})), ("z", json!({"LABELS": {"app": "new"}}))]
    {
        match connect(&publisher, client(namespace, declared)) {
            Err(Refused::Broken(panic)) => assert!(panic.message.contains("bad"), "{panic}"),
            other => panic!("{namespace}: {:?}", other.err()),
        }
    }
    put(&publisher, "2", &service("b"));
    assert!(bodies(&snapshot(&y)).keys().any(|(_, name)| name.contains("|b.x.")));
    assert_eq!(differences(&bodies(&snapshot(&x)), &before_x), [""; 0]);

    // The next change compiles everything that failed.
    fails.store(false, Relaxed);
    put(&publisher, "3", &service("c"));
    let (b, c) = (service("b"), service("c"));
    for (one, namespace) in [(&x, "x"), (&y, "y"), (&z, "z")] {
        let wrong = differences(&bodies(&snapshot(one)), &fresh_of(&[&a, &bad, &b, &c], namespace));
        assert_eq!(wrong, [""; 0], "{namespace}");
    }
    connect(&publisher, client("x", json!({"CLUSTER_ID": "new"}))).unwrap();
}
