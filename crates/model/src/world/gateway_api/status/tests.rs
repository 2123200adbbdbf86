use super::*;
use crate::world::gateway_api::tests::apply;

const SERVICES: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: other, labels: {listeners: allowed}}
---
apiVersion: v1
kind: Service
metadata: {name: stock, namespace: shop}
spec: {clusterIP: 10.0.0.2, ports: [{name: http, port: 80}]}
";

/// Returns an object of Gateway API in namespace `shop`, or in the namespace of `NAMESPACE/NAME`.
fn object(kind: &str, name: &str, spec: &str) -> String {
    let (namespace, name) = name.split_once('/').unwrap_or(("shop", name));
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: {kind}\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
         spec: {{{spec}}}\n"
    )
}

fn gateway(spec: &str) -> String {
    object("Gateway", "edge", &format!("gatewayClassName: istio, {spec}"))
}

fn listener_set(name: &str, listeners: &str) -> String {
    let parent = "parentRef: {kind: Gateway, group: gateway.networking.k8s.io, name: edge, namespace: shop}";
    object("ListenerSet", name, &format!("{parent}, listeners: [{listeners}]"))
}

fn listener(name: &str, port: u16, protocol: &str, host: &str) -> String {
    let host = if host.is_empty() { String::new() } else { format!(", hostname: '{host}'") };
    format!("{{name: {name}, port: {port}, protocol: {protocol}{host}}}")
}

/// Returns the status of an object by `KIND NAMESPACE/NAME`.
struct Statuses(Vec<GatewayApiStatus>);

impl Statuses {
    fn of(objects: &[String]) -> Self {
        let mut world = World::new();
        apply(&mut world, &[SERVICES, &objects.concat()].concat());
        Self(world.gateway_api_status())
    }

    fn get(&self, key: &str) -> &GatewayApiStatus {
        self.0.iter().find(|of| of.object.to_string() == key).unwrap()
    }

    /// Returns the conditions `Accepted` and `Programmed` of an object.
    fn shown(&self, key: &str) -> String {
        shown(&self.get(key).conditions)
    }

    fn listener(&self, key: &str, name: &str) -> &ListenerStatus {
        self.get(key).listeners.iter().find(|of| of.name == name).unwrap()
    }

    /// Returns the conditions of a route at its parents.
    fn parents(&self, key: &str) -> Vec<String> {
        self.get(key).parents.iter().map(|of| shown(&of.conditions)).collect()
    }
}

fn shown(conditions: &[StatusCondition]) -> String {
    let shown = conditions.iter().map(|of| format!("{} {} {}", of.kind, of.status, of.reason));
    shown.take(2).collect::<Vec<_>>().join(", ")
}

const FINE: &str = "Accepted true Accepted, Programmed true Programmed";
const NONE_VALID: &str = "Accepted false ListenersNotValid, Programmed false ListenersNotValid";

#[test]
fn listeners_of_earlier_objects_precede_those_of_later_sets() {
    let conflicts = |(first, second): (&str, &str), (port, of_gateway, of_sets): (u16, &str, &str)| {
        let of = |name: &str, protocol: &str, host: &str, port: u16| listener(name, port, protocol, host);
        let own = [of("own", "HTTP", "own.example", 70), of("gateway", first, of_gateway, port)];
        let sets = [
            // Each set has one listener that conflicts with an earlier one; the odd ones have another listener.
            [
                of("a", "HTTP", "a.example", 71),
                of("x", second, of_gateway, port),
                of("s", first, of_sets, 90),
            ]
            .join(", "),
            of("x", second, of_gateway, port),
            [of("b", "HTTP", "b.example", 72), of("x", second, of_sets, 90)].join(", "),
            of("x", second, of_sets, 90),
        ];
        let mut objects = vec![gateway(&format!(
            "allowedListeners: {{namespaces: {{from: Same}}}}, listeners: [{}]",
            own.join(", ")
        ))];
        let numbered = (1..).zip(sets);
        objects
            .extend(numbered.map(|(number, listeners)| listener_set(&format!("set-{number}"), &listeners)));
        Statuses::of(&objects)
    };
    for (reason, statuses) in [
        ("HostnameConflict", conflicts(("HTTP", "HTTP"), (80, "one.example", "two.example"))),
        ("ProtocolConflict", conflicts(("HTTP", "TCP"), (80, "", ""))),
    ] {
        assert_eq!(statuses.shown("Gateway shop/edge"), FINE, "{reason}");
        assert_eq!(statuses.get("Gateway shop/edge").attached_listener_sets, Some(2), "{reason}");
        for (number, expected) in [(1, FINE), (2, NONE_VALID), (3, FINE), (4, NONE_VALID)] {
            let key = format!("ListenerSet shop/set-{number}");
            assert_eq!(statuses.shown(&key), expected, "{reason} {key}");
            assert_eq!(statuses.get(&key).attached_listener_sets, None);
            let conflict =
                statuses.listener(&key, "x").conditions.iter().map(|of| (of.kind, of.status, of.reason));
            let expected = [
                ("Accepted", false, reason),
                ("Conflicted", true, reason),
                ("Programmed", false, reason),
                ("ResolvedRefs", true, "ResolvedRefs"),
            ];
            assert_eq!(conflict.collect::<Vec<_>>(), expected, "{key}");
        }
        let first = statuses.listener("ListenerSet shop/set-1", "s");
        assert!(first.is_valid() && statuses.listener("Gateway shop/edge", "gateway").is_valid());
    }
}

#[test]
fn a_gateway_allows_listener_sets_by_namespace() {
    let of = |allowed: &str| {
        let listeners = listener("own", 80, "HTTP", "own.example");
        let sets = ["shop/near", "other/far"].map(|name| {
            listener_set(name, &listener("more", 80, "HTTP", &format!("{}.example", &name[..3])))
        });
        let gateway = gateway(&format!("{allowed}listeners: [{listeners}]"));
        let statuses = Statuses::of(&[&[gateway], &sets[..]].concat());
        let attached = statuses.get("Gateway shop/edge").attached_listener_sets;
        let sets = ["ListenerSet shop/near", "ListenerSet other/far"].map(|key| statuses.shown(key) == FINE);
        for key in ["ListenerSet shop/near", "ListenerSet other/far"] {
            let refused = "Accepted false NotAllowed, Programmed false NotAllowed";
            assert!([FINE, refused].contains(&&*statuses.shown(key)), "{}", statuses.shown(key));
        }
        (sets, attached)
    };
    let from = |from: &str| of(&format!("allowedListeners: {{namespaces: {{from: {from}}}}}, "));
    assert_eq!(of(""), ([false, false], Some(0)));
    assert_eq!(from("None"), ([false, false], Some(0)));
    assert_eq!(from("Same"), ([true, false], Some(1)));
    assert_eq!(from("Selector, selector: {matchLabels: {listeners: allowed}}"), ([false, true], Some(1)));
    assert_eq!(from("All"), ([true, true], Some(2)));
}

#[test]
fn parameters_are_those_of_a_config_map() {
    let of = |group: &str, kind: &str, more: &str| {
        let parameters =
            format!("infrastructure: {{parametersRef: {{group: '{group}', kind: {kind}, name: own}}}}");
        let text = gateway(&format!("{parameters}, listeners: [{}]", listener("a", 80, "HTTP", ""))) + more;
        let mut world = World::new();
        // Settings of deployed proxies are warned about.
        for (object, origin) in crate::parse(&text, "test.yaml").objects {
            world.apply(object, origin);
        }
        world.settle();
        assert!(world.gateways.iter().next().is_some(), "the listener is served");
        shown(&world.gateway_api_status()[0].conditions)
    };
    let config_map =
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: own, namespace: shop}\ndata: {a: b}\n";
    let invalid = "Accepted false InvalidParameters, Programmed true Programmed";
    assert_eq!(of("", "ConfigMap", config_map), FINE);
    assert_eq!(of("", "ConfigMap", &config_map.replace("shop", "other")), invalid);
    assert_eq!(of("", "ConfigMap", ""), invalid);
    assert_eq!(of("invalid.io", "InvalidParameters", config_map), invalid);
    assert_eq!(of("invalid.io", "ConfigMap", config_map), invalid);
}

#[test]
fn a_service_without_an_external_address_is_an_address_by_its_name() {
    const KEY: &str = "Gateway shop/edge";
    let addresses = |kind: &str, ingress: &str| {
        let service = format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: edges, namespace: shop}}\n\
             spec: {{type: {kind}, clusterIP: 10.0.0.3, selector: {{app: edge}}, ports: [{{name: http, port: 80}}]}}\n\
             status: {{loadBalancer: {{ingress: [{ingress}]}}}}\n---\napiVersion: v1\nkind: Pod\n\
             metadata: {{name: edge, namespace: shop, labels: {{app: edge}}}}\nspec: {{containers: [{{name: a, image: a}}]}}\n"
        );
        let spec = format!(
            "addresses: [{{type: Hostname, value: edges}}], listeners: [{}]",
            listener("a", 80, "HTTP", "")
        );
        let mut world = World::new();
        for (object, origin) in crate::parse(&(service + &gateway(&spec)), "test.yaml").objects {
            world.apply(object, origin);
        }
        world.settle();
        let key = ObjectKey { kind: Kind::KubernetesGateway, namespace: "shop".into(), name: "edge".into() };
        let status = world.cluster_status(&key);
        assert_eq!((status.attached_listener_sets, key.to_string()), (Some(0), KEY.to_owned()));
        status.addresses.unwrap()
    };
    assert_eq!(addresses("ClusterIP", ""), ["edges.shop.svc.cluster.local"]);
    assert_eq!(addresses("LoadBalancer", "{ip: 192.0.2.1}"), ["192.0.2.1"]);
}

/// Returns an HTTPRoute with these parents and the backend `NAME`, or of the kind `KIND/NAME`.
fn http_route(name: &str, parents: &str, backend: &str) -> String {
    let backend = match backend.split_once('/') {
        Some((kind, name)) => format!("group: example.com, kind: {kind}, name: {name}"),
        None => format!("name: {backend}"),
    };
    object(
        "HTTPRoute",
        name,
        &format!("parentRefs: [{parents}], rules: [{{backendRefs: [{{{backend}, port: 80}}]}}]"),
    )
}

#[test]
fn routes_are_counted_at_their_listeners_alone() {
    let listeners = [
        listener("one", 80, "HTTP", ""),
        listener("two", 81, "HTTP", ""),
        "{name: tls, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: does-not-exist}]}}"
            .to_owned(),
    ];
    let statuses = Statuses::of(&[
        gateway(&format!("listeners: [{}]", listeners.join(", "))),
        http_route("all", "{name: edge}", "stock"),
        http_route("by-name", "{name: edge, sectionName: one}", "stock"),
        http_route("by-port", "{name: edge, port: 81}", "none"),
        http_route("other-name", "{name: edge, sectionName: none}", "stock"),
        http_route("other-port", "{name: edge, port: 82}", "stock"),
        http_route("name-of-other-port", "{name: edge, sectionName: one, port: 81}", "stock"),
        http_route("both", "{name: edge, sectionName: two}, {name: edge, sectionName: none}", "stock"),
    ]);
    let counts =
        ["one", "two", "tls"].map(|name| statuses.listener("Gateway shop/edge", name).attached_routes);
    // Routes whose backend does not exist are counted, also at a listener without its certificate.
    assert_eq!(counts, [2, 3, 1]);
    let accepted = "Accepted true Accepted, ResolvedRefs true ResolvedRefs";
    let apart = "Accepted false NoMatchingParent, ResolvedRefs true ResolvedRefs";
    for (name, expected) in [
        ("all", &[accepted][..]),
        ("by-name", &[accepted]),
        ("by-port", &["Accepted true Accepted, ResolvedRefs false BackendNotFound"]),
        ("other-name", &[apart]),
        ("other-port", &[apart]),
        ("name-of-other-port", &[apart]),
        ("both", &[accepted, apart]),
    ] {
        assert_eq!(statuses.parents(&format!("HTTPRoute shop/{name}")), expected, "{name}");
    }
}

#[test]
fn backends_of_other_kinds_are_not_resolved() {
    let mut world = World::new();
    let text = gateway(&format!("listeners: [{}]", listener("a", 80, "HTTP", "")))
        + &http_route("r", "{name: edge}", "Widget/stock");
    // The kind is warned about.
    for (object, origin) in crate::parse(&text, "test.yaml").objects {
        world.apply(object, origin);
    }
    world.settle();
    let statuses = Statuses(world.gateway_api_status());
    let expected = "Accepted true Accepted, ResolvedRefs false InvalidKind";
    assert_eq!(statuses.parents("HTTPRoute shop/r"), [expected]);
    assert_eq!(statuses.listener("Gateway shop/edge", "a").attached_routes, 1);
}

#[test]
fn all_routes_of_a_listener_for_tcp_are_accepted() {
    let route = |name: &str| {
        let spec =
            "parentRefs: [{name: edge, sectionName: tcp}], rules: [{backendRefs: [{name: stock, port: 80}]}]";
        object("TCPRoute", name, spec)
    };
    let statuses = Statuses::of(&[
        gateway(&format!("listeners: [{}]", listener("tcp", 9091, "TCP", ""))),
        route("older"),
        route("newer"),
    ]);
    assert_eq!(statuses.listener("Gateway shop/edge", "tcp").attached_routes, 2);
    for name in ["older", "newer"] {
        let expected = ["Accepted true Accepted, ResolvedRefs true ResolvedRefs"];
        assert_eq!(statuses.parents(&format!("TCPRoute shop/{name}")), expected);
    }
}

#[test]
fn the_name_of_a_sets_listener_is_none_of_its_gateway() {
    let statuses = Statuses::of(&[
        gateway(&format!(
            "allowedListeners: {{namespaces: {{from: Same}}}}, listeners: [{}]",
            listener("own", 80, "HTTP", "own.example")
        )),
        listener_set("set", &listener("of-set", 80, "HTTP", "set.example")),
        http_route("both", "{name: edge}, {kind: ListenerSet, name: set}", "stock"),
        http_route(
            "one",
            "{name: edge, sectionName: of-set}, {kind: ListenerSet, name: set, sectionName: of-set}",
            "stock",
        ),
    ]);
    let accepted = "Accepted true Accepted, ResolvedRefs true ResolvedRefs";
    let apart = "Accepted false NoMatchingParent, ResolvedRefs true ResolvedRefs";
    assert_eq!(statuses.parents("HTTPRoute shop/both"), [accepted, accepted]);
    assert_eq!(statuses.parents("HTTPRoute shop/one"), [apart, accepted]);
    assert_eq!(statuses.listener("ListenerSet shop/set", "of-set").attached_routes, 2);
    assert_eq!(statuses.listener("Gateway shop/edge", "own").attached_routes, 1);
}
