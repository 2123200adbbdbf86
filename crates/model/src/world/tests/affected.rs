//! Estimates of what a change may affect.

use super::*;
use crate::{
    ClientScope, Grouping, Parsed, ProxyNode,
    api::{Meta, kube::Locality},
};

/// Applies objects to a World and returns the estimate.
fn changes(world: &mut World, yaml: &str) -> ChangeSet {
    let Parsed { objects, .. } = crate::parse(yaml, "change.yaml");
    assert!(!objects.is_empty(), "{yaml}");
    objects.into_iter().for_each(|(object, origin)| _ = world.apply(object, origin));
    world.take_changes()
}

/// Returns a World whose changes have been taken.
fn settled(yaml: &str) -> World {
    let mut world = world(yaml);
    world.take_changes();
    world
}

fn in_svc() -> ChangeSet {
    ChangeSet::of_workloads("svc", [AffectedWorkloads::ALL])
}

fn service_a() -> BTreeSet<(String, String)> {
    BTreeSet::from([("svc".to_owned(), "a".to_owned())])
}

const OTHER: &str = "
---
apiVersion: v1
kind: Service
metadata: {name: b, namespace: svc}
spec: {clusterIP: 10.0.0.2, ports: [{name: http, port: 80}, {name: grpc, port: 81}]}
";

fn sidecar(hosts: &str) -> String {
    format!(
        "---\napiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {{name: one, namespace: client}}\n\
         spec: {{egress: [{{hosts: [{hosts}]}}]}}\n"
    )
}

/// The visibility of ServiceEntries may depend on the labels of their namespaces.
#[test]
fn the_visibility_of_entries_is_bounded_by_their_namespaces() {
    let setting = "applyToSidecars: true, defaultVisibility: NAMESPACE, policies: [\
                   {visibility: NONE, matchingRules: [{namespaceSelector: {matchLabels: {tier: closed}}}]}, \
                   {visibility: PUBLIC, matchingRules: [{namespaceSelector: {matchLabels: {tier: closed}}}]}, \
                   {visibility: PUBLIC, matchingRules: [{namespaceSelector: {matchLabels: {tier: open}}}, \
                   {namespaceSelector: {matchLabels: {more: 'yes'}}}]}, \
                   {visibility: NONE, matchingRules: [{}, {namespaceSelector: {}}]}]";
    let mesh = |setting: &str| {
        format!(
            "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\n\
             data: {{mesh: \"serviceEntryVisibility: {{{setting}}}\"}}\n"
        )
    };
    let namespace = |labels: &str| {
        format!("---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: own, labels: {{{labels}}}}}\n")
    };
    let entry = |export_to: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: a, namespace: own}}\n\
             spec: {{hosts: [a.example], exportTo: [{export_to}], resolution: NONE, \
             ports: [{{number: 80, name: http, protocol: HTTP}}]}}\n"
        )
    };
    let seen = |world: &World| {
        let service = world.service("a.example").unwrap();
        let of = |namespace| world.service_visible(service, namespace);
        let facts = world.namespace_facts();
        // The base does not have what one namespace alone sees.
        let is_special = |namespace: &str| facts.of(namespace).names;
        ([of("own"), of("other")], is_special("own"))
    };
    let of = |setting: &str, labels: &str, export_to: &str| {
        seen(&world(&[mesh(setting), namespace(labels), entry(export_to)].concat()))
    };
    assert_eq!(of(setting, "", "'*'"), ([true, false], true));
    assert_eq!(of(setting, "tier: closed", "'*'").0, [false, false]);
    assert_eq!(of(setting, "tier: open", "'*'").0, [true, false]);
    assert_eq!(of(setting, "tier: open, more: 'yes'", "'*'"), ([true, true], false));
    // A narrower export stays.
    assert_eq!(of(setting, "", "other").0, [false, false]);
    assert_eq!(of(setting, "tier: open, more: 'yes'", ".").0, [true, false]);
    let unset = setting.replace("applyToSidecars: true", "applyToSidecars: false");
    assert_eq!(of(&unset, "tier: closed", "'*'").0, [true, true]);

    // A change of labels affects everything if rules depend on them, and nothing else.
    let mut with_rules = settled(&[mesh(setting), namespace(""), entry("'*'")].concat());
    assert_eq!(changes(&mut with_rules, &namespace("tier: closed")), ChangeSet::everything());
    assert_eq!(seen(&with_rules), of(setting, "tier: closed", "'*'"));
    let without = "applyToSidecars: true, defaultVisibility: NAMESPACE";
    let mut without = settled(&[mesh(without), namespace(""), entry("'*'")].concat());
    assert!(!changes(&mut without, &namespace("tier: closed")).everything);
}

#[test]
fn a_namespace_affects_its_services_by_an_annotation_only() {
    let mut world = settled(SERVICE);
    let namespace =
        |more: &str| format!("---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: svc, {more}}}\n");
    assert!(changes(&mut world, &namespace("labels: {team: a}")).is_empty());
    let annotated = namespace("annotations: {networking.istio.io/traffic-distribution: PreferClose}");
    let expected = ChangeSet { services: service_a(), ..ChangeSet::default() };
    assert_eq!(changes(&mut world, &annotated), expected);
    assert_eq!(changes(&mut world, &namespace("labels: {team: b}")), expected, "the annotation is gone");
}

#[test]
fn a_peer_authentication_affects_services_if_one_disables_mutual_tls() {
    let mut world = settled(&format!("{SERVICE}{}", pod("p", "10.1.0.1", "", "True")));
    let policy = |mode: &str| {
        format!(
            "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\n\
             metadata: {{name: one, namespace: svc}}\nspec: {{mtls: {{mode: {mode}}}}}\n"
        )
    };
    let own = in_svc();
    assert_eq!(changes(&mut world, &policy("STRICT")), own);
    let with_services = ChangeSet { services: service_a(), ..own };
    assert_eq!(changes(&mut world, &policy("DISABLE")), with_services);
    assert_eq!(changes(&mut world, &policy("STRICT")), with_services);
}

#[test]
fn a_node_affects_the_services_of_its_pods() {
    let mut world = settled(&format!("{SERVICE}{OTHER}{}", pod("p", "10.1.0.1", "", "True")));
    let node = |name: &str, zone: &str| {
        format!(
            "---\napiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {{topology.kubernetes.io/region: r, \
             topology.kubernetes.io/zone: {zone}}}}}\n"
        )
    };
    assert!(changes(&mut world, &node("new", "z")).is_empty(), "it has no pods yet");
    let pods = BTreeSet::from([("svc".to_owned(), "p".to_owned())]);
    let expected = ChangeSet { services: service_a(), pods, ..ChangeSet::default() };
    assert_eq!(changes(&mut world, &node("n", "z")), expected);
    assert!(changes(&mut world, &node("n", "z")).is_empty(), "nothing changed");
    assert_eq!(changes(&mut world, &node("n", "other")), expected);
}

#[test]
fn objects_affect_the_workloads_that_they_select() {
    // With another service of the same ports, a service shapes no listeners of other workloads.
    let mut world = settled(&format!("{SERVICE}{OTHER}"));
    let labelled = |key: &str, value: &str| AffectedWorkloads::Labelled(labels(&[(key, value)]));
    let object = |kind: &str, spec: &str| {
        let group = match kind {
            "Sidecar" | "EnvoyFilter" => "networking.istio.io/v1alpha3",
            "Telemetry" => "telemetry.istio.io/v1",
            "WasmPlugin" | "TrafficExtension" => "extensions.istio.io/v1alpha1",
            "RateLimitPolicy" => "skysail.io/v1alpha1",
            _ => "security.istio.io/v1",
        };
        format!(
            "---\napiVersion: {group}\nkind: {kind}\nmetadata: {{name: x, namespace: svc}}\nspec: {{{spec}}}\n"
        )
    };
    let selector = "selector: {matchLabels: {app: b}}";
    let edge = "targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: edge}]";
    let gateway = || labelled("gateway.networking.k8s.io/gateway-name", "edge");
    let b = || labelled("app", "b");
    for (kind, spec, selected) in [
        ("AuthorizationPolicy", format!("{selector}, rules: [{{}}]"), b()),
        ("AuthorizationPolicy", format!("{edge}, rules: [{{}}]"), gateway()),
        ("RequestAuthentication", selector.to_owned(), b()),
        ("PeerAuthentication", format!("{selector}, mtls: {{mode: STRICT}}"), b()),
        ("Telemetry", format!("{selector}, tracing: [{{disableSpanReporting: true}}]"), b()),
        ("Telemetry", format!("{edge}, tracing: [{{disableSpanReporting: true}}]"), gateway()),
        ("WasmPlugin", format!("{selector}, url: oci://a/b"), b()),
        ("TrafficExtension", format!("{selector}, wasm: {{url: oci://a/b}}"), b()),
        ("RateLimitPolicy", format!("{selector}, rules: [{{limit: {{requests: 1, unit: DAY}}}}]"), b()),
        ("Sidecar", "workloadSelector: {labels: {app: b}}, egress: [{hosts: ['./*']}]".to_owned(), b()),
        (
            "EnvoyFilter",
            "workloadSelector: {labels: {app: b}}, configPatches: [{applyTo: LISTENER, \
             match: {context: SIDECAR_INBOUND}, patch: {operation: MERGE, value: {}}}]"
                .to_owned(),
            b(),
        ),
    ] {
        let mut world = world.clone();
        let changed = changes(&mut world, &object(kind, &spec));
        assert_eq!(changed.workloads_in, BTreeSet::from([("svc".to_owned(), selected)]), "{kind} {spec}");
        assert!(!changed.workloads && !changed.everything, "{kind} {spec}");
    }
    let changed = changes(&mut world, &SERVICE.replace("9000", "9001"));
    let of_service = [labelled("app", "a"), AffectedWorkloads::Addressed("a".to_owned())];
    let of_service = of_service.map(|which| ("svc".to_owned(), which));
    assert_eq!(changed.workloads_in, BTreeSet::from(of_service));
    for (namespace, app, addressed, affects) in [
        ("svc", "a", "", true),
        ("svc", "b", "", false),
        ("svc", "b", "a", true),
        ("svc", "b", "b", false),
        ("client", "a", "a", false),
    ] {
        let id = format!("sidecar~10.9.0.1~c.{namespace}~{namespace}.svc.cluster.local");
        let metadata = serde_json::json!({"LABELS": {"app": app}});
        let mut view = ProxyNode::parse(&id, metadata, Locality::default()).unwrap().view;
        view.addressed = vec![(addressed.to_owned(), 80, 9000)];
        assert_eq!(changed.affects_own(&view), affects, "{namespace} {app} {addressed}");
        assert!(!affects || changed.may_affect_own_in(&view.namespace), "{namespace} {app} {addressed}");
    }
}

#[test]
fn entries_of_one_host_affect_the_workloads_of_each_other() {
    let entry = |name: &str, app: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: {name}, namespace: svc}}\n\
             spec: {{hosts: [x.example.com], location: MESH_INTERNAL, resolution: STATIC, \
             ports: [{{number: 80, name: http, protocol: HTTP}}], workloadSelector: {{labels: {{app: {app}}}}}}}\n"
        )
    };
    let mut world = settled(&format!("{SERVICE}{OTHER}"));
    let all = ("svc".to_owned(), AffectedWorkloads::ALL);
    assert!(!changes(&mut world, &entry("one", "a")).workloads_in.contains(&all));
    assert!(changes(&mut world, &entry("two", "b")).workloads_in.contains(&all));
    // The other one takes effect.
    assert!(world.delete(&ObjectKey {
        kind: Kind::ServiceEntry,
        namespace: "svc".into(),
        name: "one".into()
    }));
    assert!(world.take_changes().workloads_in.contains(&all));
}

#[test]
fn an_envoy_filter_of_listeners_affects_its_namespace() {
    let mut world = settled(SERVICE);
    let filter = |apply_to: &str, more: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\n\
             metadata: {{name: one, namespace: svc}}\nspec: {{configPatches: [{{applyTo: {apply_to}, \
             match: {{context: SIDECAR_INBOUND{more}}}, patch: {{operation: MERGE, value: {{}}}}}}]}}\n"
        )
    };
    let own = in_svc();
    assert_eq!(changes(&mut world, &filter("LISTENER", "")), own);
    assert!(changes(&mut world, &filter("CLUSTER", "")).everything, "proxies share clusters");
    world.take_changes();
    let by_metadata = filter("LISTENER", ", proxy: {metadata: {a: b}}");
    assert!(changes(&mut world, &by_metadata).everything, "views have the metadata");
}

#[test]
fn a_service_affects_the_gateways_that_route_to_it() {
    let gateway = |name: &str, to: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: {name}, namespace: edge}}\n\
             spec: {{selector: {{gateway: {name}}}, servers: [{{port: {{number: 80, name: http, protocol: HTTP}}, \
             hosts: ['*']}}]}}\n---\napiVersion: networking.istio.io/v1\nkind: VirtualService\n\
             metadata: {{name: {name}, namespace: svc}}\nspec: {{hosts: [{name}.example.com], \
             gateways: [edge/{name}], http: [{{route: [{{destination: {{host: {to}}}}}]}}]}}\n"
        )
    };
    let (one, two) = (gateway("one", "a"), gateway("two", "b"));
    let mut world = settled(&format!("{SERVICE}{OTHER}{one}{two}"));
    let changed = changes(&mut world, &SERVICE.replace("9000", "9001"));
    assert_eq!(changed.gateways, BTreeSet::from([labels(&[("gateway", "one")])]));
    assert!(!changed.gateway_routes && !changed.everything && !changed.workloads);
    let changed =
        changes(&mut world, &rule("r", "svc", "trafficPolicy: {connectionPool: {tcp: {maxConnections: 7}}}"));
    assert_eq!(changed.gateways, BTreeSet::from([labels(&[("gateway", "one")])]));
    assert!(!changed.routes, "the rule has no hash policy");
    let hashed = "trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: user}}}";
    assert!(changes(&mut world, &rule("r", "svc", hashed)).routes);
    assert!(
        changes(&mut world, &rule("r", "svc", "trafficPolicy: {connectionPool: {tcp: {maxConnections: 7}}}"))
            .routes
    );
}

#[test]
fn with_sidecars_a_virtual_service_affects_its_destinations_if_they_change() {
    let mut world = settled(&format!("{SERVICE}{OTHER}{}", sidecar("svc/alias.example.com")));
    let alias = |to: &str, timeout: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: alias, namespace: svc}}\n\
             spec: {{hosts: [alias.example.com], http: [{{timeout: {timeout}, route: [{{destination: {{host: {to}}}}}]}}]}}\n"
        )
    };
    assert_eq!(changes(&mut world, &alias("a", "1s")).services, service_a());
    let changed = changes(&mut world, &alias("a", "2s"));
    assert!(changed.services.is_empty() && !changed.names && !changed.routes);
    let host = ("svc".to_owned(), "alias.example.com".to_owned());
    assert_eq!(changed.rule_hosts, BTreeSet::from([host]));
    assert_eq!(changes(&mut world, &alias("b", "2s")).services.len(), 2);
}

#[test]
fn a_scope_with_a_sidecar_is_affected_by_what_it_sees() {
    let mut world = settled(&format!("{SERVICE}{OTHER}{}", sidecar("svc/a.svc.svc.cluster.local")));
    let id = "sidecar~10.9.0.1~c.client~client.svc.cluster.local";
    let node = ProxyNode::parse(id, serde_json::Value::Null, Locality::default()).unwrap();
    let scope = ClientScope::of(&node.view, &world.grouping());
    assert!(scope.egress.is_some());
    let mut free = scope.clone();
    free.egress = None;
    for (yaml, affects) in [
        (SERVICE.replace("9000", "9001"), true),
        (OTHER.replace("81}", "81, targetPort: 9000}"), false),
        (OTHER.replace("name: b", "name: c").replace("10.0.0.2", "10.0.0.3"), false),
        (routes("a", "svc", "hosts: [a]"), true),
        (routes("b", "svc", "hosts: [b]").replace("host: a", "host: b"), false),
        (routes("other", "svc", "hosts: [other.example.com]").replace("host: a", "host: b"), false),
        (rule("r", "svc", "trafficPolicy: {connectionPool: {tcp: {maxConnections: 7}}}"), true),
    ] {
        let changed = changes(&mut world, &yaml);
        assert_eq!(changed.affects_scope(&world, &scope, |_| false), affects, "{yaml}: {changed:?}");
        assert!(changed.affects_scope(&world, &free, |_| false), "{yaml}");
        let has_service = changed.affects_scope(&world, &scope, |_| true);
        assert!(has_service || changed.services.is_empty(), "{yaml}");
    }
}

#[test]
fn changes_together_affect_the_scopes_that_each_of_them_affects() {
    let mut world = settled(&format!(
        "{SERVICE}{OTHER}{ENTRIES}{}",
        sidecar("svc/a.svc.svc.cluster.local, svc/api.example.com")
    ));
    let id = "sidecar~10.9.0.1~c.client~client.svc.cluster.local";
    let node = ProxyNode::parse(id, serde_json::Value::Null, Locality::default()).unwrap();
    let scope = ClientScope::of(&node.view, &world.grouping());
    let mut all: Vec<(String, ChangeSet)> = [
        SERVICE.replace("9000", "9001"),
        OTHER.replace("81}", "81, targetPort: 9000}"),
        OTHER.replace("name: b", "name: c").replace("10.0.0.2", "10.0.0.3"),
        ENTRIES.replace("number: 80", "number: 81"),
        ENTRIES.replace("number: 443", "number: 444").replace("api.example.com", "other.example.com"),
        rule("r", "svc", "trafficPolicy: {connectionPool: {tcp: {maxConnections: 7}}}"),
    ]
    .map(|yaml| (yaml.clone(), changes(&mut world, &yaml)))
    .into();
    // Validation refuses an entry without a host.
    let empty = Typed {
        meta: Meta { namespace: "svc".into(), name: "empty".into(), ..Meta::default() },
        spec: ServiceEntry::default(),
    };
    assert!(world.apply(Object::from(empty), Origin::default()));
    all.push(("an entry without a host".to_owned(), world.take_changes()));
    let affects = |changes: &ChangeSet| changes.affects_scope(&world, &scope, |_| false);
    let mut affecting = 0;
    for (one, of_one) in &all {
        affecting += usize::from(affects(of_one));
        assert!(!of_one.names || !of_one.services.is_empty(), "{one}: names belong to services");
        for (other, of_other) in &all {
            let mut both = of_one.clone();
            both.add(of_other.clone());
            assert_eq!(affects(&both), affects(of_one) || affects(of_other), "{one}\n{other}");
        }
    }
    assert!((1..all.len()).contains(&affecting), "{affecting}");
}

#[test]
fn a_sidecar_differs_from_others_by_the_assignment_of_views() {
    let mut world = settled(&format!("{SERVICE}{}", sidecar("svc/a.svc.svc.cluster.local")));
    let before: Grouping = world.grouping();
    let changed = changes(&mut world, &sidecar("svc/*"));
    let expected = ChangeSet::of_workloads("client", [AffectedWorkloads::ALL]);
    assert_eq!(changed, expected);
    assert!(before != world.grouping() && before.differs_by_sidecars(&world.grouping()));
    let root = sidecar("svc/*").replace("namespace: client", "namespace: istio-system");
    assert!(changes(&mut world, &root).everything);
    assert!(!before.differs_by_sidecars(&world.grouping()));
}

const ENTRIES: &str = "
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: wide, namespace: svc}
spec: {hosts: ['*.example.com'], ports: [{number: 443, name: tls, protocol: TLS}], resolution: NONE}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: narrow, namespace: svc}
spec: {hosts: [api.example.com], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}
";

#[test]
fn a_rule_of_a_wildcard_affects_narrower_hosts() {
    let mut world = settled(ENTRIES);
    let rule = "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: r, namespace: svc}\n\
                spec: {host: '*.example.com', trafficPolicy: {tls: {mode: SIMPLE}}}\n";
    assert!(changes(&mut world, rule).everything);
}

#[test]
fn an_entry_affects_all_gateways_if_a_service_is_an_alias() {
    let alias = "---\napiVersion: v1\nkind: Service\nmetadata: {name: alias, namespace: svc}\n\
                 spec: {type: ExternalName, externalName: api.example.com, ports: [{name: http, port: 80}]}\n";
    let mut world = settled(&format!("{ENTRIES}{alias}"));
    assert!(changes(&mut world, &ENTRIES.replace("number: 80", "number: 81")).gateway_routes);
}

#[test]
fn allocated_addresses_affect_all_clients_beside_a_mesh_configuration() {
    let config = |name: &str, data: &str| {
        format!(
            "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: istio-system}}\ndata: {data}\n"
        )
    };
    let mut world = settled(&format!("{ENTRIES}{}", config("istio", "{mesh: ''}")));
    let addresses = config("skysail-addresses", "{api.example.com: 240.240.0.9}");
    assert!(changes(&mut world, &addresses).everything);
}
