//! Endpoints by node: proxies on all nodes share a scope, and only the differences are compiled by node.

use serde_json::json;
use skysail_model::compile_for;

use super::{
    scopes::{client, connect, pod, put, service, snapshot},
    *,
};

/// Cluster whose endpoints are on the nodes n, n1 and n2.
const NAME: &str = "outbound|80||a.x.svc.cluster.local";
const RULE: &str = "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: a, namespace: x}, spec: {host: a, trafficPolicy: {outlierDetection: {}, loadBalancer: {localityLbSetting: {failoverPriority: [kubernetes.io/hostname]}}}}}";

type Proxy = (ResourceFeed, Connected);

/// Starts a control plane of a service with a pod on each node.
fn start() -> Arc<Publisher> {
    let publisher = Arc::new(publisher(Compiler::default(), LIMITS));
    put(&publisher, "service", &service("a"));
    put(&publisher, "n", &server(0, "n"));
    put(&publisher, "n1", &server(1, "n1"));
    put(&publisher, "n2", &server(2, "n2"));
    publisher
}

/// Returns a pod of the service: the first one is that of [`client`].
fn server(number: usize, node: &str) -> String {
    let name = if number == 0 { "p".to_owned() } else { format!("p{number}") };
    pod("v1", "default")
        .replace("nodeName: n,", &format!("nodeName: {node},"))
        .replace("name: p,", &format!("name: {name},"))
        .replace("10.2.0.1", &format!("10.2.0.{}", number + 1))
        .replace("podIP", "conditions: [{type: Ready, status: 'True'}], podIP")
}

/// Connects a proxy without a known pod that declares a node.
fn on_node(publisher: &Arc<Publisher>, namespace: &str, node: &str) -> Proxy {
    connect(publisher, client(namespace, json!({"NODE_NAME": node}))).unwrap()
}

fn endpoints(proxy: &Proxy) -> Arc<Resource> {
    Arc::clone(snapshot(proxy).get(Kind::Endpoint, NAME).unwrap())
}

/// Returns the nodes for which a control plane has differences, in all scopes.
fn nodes(publisher: &Publisher) -> Vec<String> {
    let state = publisher.read();
    let entries = state.scopes.values().filter_map(|entry| entry.published.as_ref());
    let nodes = entries.flat_map(|published| published.nodes.iter());
    let differing = nodes.filter(|(_, of_node)| of_node.layer.is_some());
    differing.map(|(node, _)| node.to_string()).collect()
}

#[test]
fn proxies_of_one_scope_prefer_the_endpoints_of_their_node() {
    let publisher = start();
    let proxies = ["n1", "n2", "made-up", ""].map(|node| (node, on_node(&publisher, "z", node)));
    let other = on_node(&publisher, "w", "n1");
    assert!(proxies.iter().all(|(_, proxy)| Arc::ptr_eq(&endpoints(proxy), &endpoints(&other))));
    let (scopes, shared) = (publisher.gauges().scopes, endpoints(&other));

    put(&publisher, "rule", RULE);
    assert_eq!(publisher.gauges().scopes, scopes);
    let view = Arc::clone(&publisher.read().clients[&proxies[0].1.1.id()].view);
    for (node, proxy) in &proxies {
        let (expected, _) = compile_for(&publisher.read().world, &view, node);
        assert_eq!(endpoints(proxy), *expected.get(Kind::Endpoint, NAME).unwrap(), "{node}");
    }
    let [of_n1, of_n2, made_up, unknown] = [0, 1, 2, 3].map(|at| endpoints(&proxies[at].1));
    assert!(of_n1 != of_n2 && of_n1 != made_up);
    assert!(Arc::ptr_eq(&made_up, &unknown), "no endpoint is on an unknown node");
    assert!(Arc::ptr_eq(&of_n1, &endpoints(&other)), "namespaces share the endpoints of a node");
    let later = on_node(&publisher, "z", "n1");
    assert!(Arc::ptr_eq(&of_n1, &endpoints(&later)));

    put(&publisher, "rule", "");
    for (node, proxy) in &proxies {
        assert!(Arc::ptr_eq(&endpoints(proxy), &endpoints(&other)), "{node}");
        assert_eq!(endpoints(proxy), shared, "{node}");
        assert!(proxy.0.snapshot.has_changed().is_ok(), "the stream of {node} has ended");
    }
}

#[test]
fn a_change_wakes_only_the_proxies_of_the_nodes_that_it_concerns() {
    let publisher = start();
    put(&publisher, "rule", RULE);
    let mut proxies = ["n1", "n2", "n3", "n4"].map(|node| on_node(&publisher, "z", node));
    for (feed, _) in &mut proxies {
        Kind::ALL.into_iter().for_each(|kind| feed.interest.add_all(kind));
        feed.snapshot.mark_unchanged();
    }
    let generations = proxies.each_ref().map(|proxy| snapshot(proxy).generation());
    put(&publisher, "n2", &server(2, "n3"));
    for ((proxy, generation), moved) in proxies.iter().zip(generations).zip([false, true, true, false]) {
        let expected = moved.then(|| format!("{} {NAME}", Kind::Endpoint));
        assert_eq!(sent(&snapshot(proxy), generation), expected.into_iter().collect());
        assert_eq!(proxy.0.snapshot.has_changed().unwrap(), moved);
    }
}

#[test]
fn nodes_without_endpoints_or_without_proxies_have_no_differences() {
    let publisher = start();
    put(&publisher, "rule", RULE);
    assert_eq!(nodes(&publisher), [""; 0]);
    let made_up: Vec<_> = (0..50).map(|number| on_node(&publisher, "z", &format!("node-{number}"))).collect();
    assert_eq!(nodes(&publisher), [""; 0]);
    let one = on_node(&publisher, "z", "n1");
    assert_eq!(nodes(&publisher), ["n1"; 2], "the scope and its base");
    drop((one, made_up));
    put(&publisher, "b", &service("b"));
    assert_eq!(nodes(&publisher), [""; 0]);
    let entries: usize = {
        let state = publisher.read();
        state.scopes.values().filter_map(|entry| entry.resources.as_ref()).map(|of| of.nodes.len()).sum()
    };
    assert_eq!(entries, 0);
}

#[test]
fn the_node_of_a_known_pod_is_that_of_its_pod() {
    let publisher = start();
    put(&publisher, "rule", RULE);
    let of_pod = connect(&publisher, client("x", json!({"NODE_NAME": "n2"}))).unwrap();
    let [of_n, of_n2] = ["n", "n2"].map(|node| on_node(&publisher, "z", node));
    assert_eq!(endpoints(&of_pod), endpoints(&of_n));
    assert_ne!(endpoints(&of_pod), endpoints(&of_n2));
    // A pod of the same name on another node is another pod.
    put(&publisher, "n", &server(0, "n2"));
    assert!(of_pod.0.snapshot.has_changed().is_err(), "its stream has ended");
}

#[test]
fn proxies_that_move_to_another_scope_are_sent_what_differs_on_their_node() {
    let publisher = start();
    let by_version = RULE.replace("[kubernetes.io/hostname]", "[version, kubernetes.io/hostname]");
    let without_node = RULE.replace("kubernetes.io/hostname", "version");
    let on = |version: &str, node: &str| {
        let labels = json!({"NODE_NAME": node, "LABELS": {"app": "a", "version": version}});
        connect(&publisher, client("z", labels)).unwrap()
    };
    let proxies = [on("v1", "n1"), on("v1", "n2"), on("v2", "n1"), on("v2", "n3"), on("v3", "n1")];
    let mut had = proxies.each_ref().map(|proxy| (snapshot(proxy).generation(), endpoints(proxy)));
    // The label splits the scope, and its end merges the scopes.
    for rule in [RULE, &*without_node, RULE, &by_version, "", &by_version, RULE, ""] {
        put(&publisher, "rule", rule);
        for (number, (proxy, had)) in proxies.iter().zip(&mut had).enumerate() {
            let now = endpoints(proxy);
            let is_sent = sent(&snapshot(proxy), had.0).contains(&format!("{} {NAME}", Kind::Endpoint));
            assert!(is_sent || now == had.1, "proxy {number} has old endpoints with {rule}");
            let view = Arc::clone(&publisher.read().clients[&proxy.1.id()].view);
            let node = Arc::clone(&publisher.read().clients[&proxy.1.id()].node);
            let (expected, _) = compile_for(&publisher.read().world, &view, &node);
            assert_eq!(now, *expected.get(Kind::Endpoint, NAME).unwrap(), "proxy {number} with {rule}");
            *had = (snapshot(proxy).generation(), now);
        }
    }
}
