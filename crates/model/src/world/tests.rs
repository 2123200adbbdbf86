use super::*;

mod affected;
mod workload_entries;

use crate::api::{MtlsMode, Protocol};

/// Returns a World of this YAML. Warnings are permitted, errors are not.
fn world(yaml: &str) -> World {
    let parsed = crate::parse(yaml, "test.yaml");
    let errors = parsed.diagnostics.iter().filter(|finding| finding.severity == crate::Severity::Error);
    assert_eq!(errors.map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
    let mut world = World::new();
    world.reset(parsed.objects);
    world
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn rule(name: &str, namespace: &str, more: &str) -> String {
    format!(
        "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\n\
         metadata: {{name: {name}, namespace: {namespace}}}\nspec: {{host: a.svc.svc.cluster.local, {more}}}\n"
    )
}

fn routes(name: &str, namespace: &str, more: &str) -> String {
    format!(
        "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\n\
         metadata: {{name: {name}, namespace: {namespace}}}\n\
         spec: {{http: [{{route: [{{destination: {{host: a}}}}]}}], {more}}}\n"
    )
}

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: a, namespace: svc}
spec:
  clusterIP: 10.0.0.1
  selector: {app: a}
  ports: [{name: http, port: 80, targetPort: web}, {name: grpc, port: 81, targetPort: 9000}]
";

fn pod(name: &str, ip: &str, more_labels: &str, ready: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: svc, labels: {{app: a{more_labels}}}}}\n\
         spec: {{nodeName: n, serviceAccountName: sa-{name}, containers: [{{name: c, image: c, ports: [{{name: web, containerPort: 8080}}]}}]}}\n\
         status: {{podIP: {ip}, conditions: [{{type: Ready, status: \"{ready}\"}}]}}\n"
    )
}

/// Returns whether an endpoint has labels for clients of cluster `one`, in network `net`.
fn has_labels(endpoint: &Endpoint, wanted: &Labels) -> bool {
    endpoint.has_labels(wanted, "one", || "net")
}

#[test]
fn an_empty_world_has_istios_defaults() {
    let world = World::new();
    assert_eq!(world.mesh().root_namespace, "istio-system");
    assert_eq!(world.peer_mode("default", &Labels::new(), 80), MtlsMode::Permissive);
}

#[test]
fn access_logs_go_to_the_configured_file_or_the_default() {
    let config = |mesh: &str| {
        let yaml = format!(
            "{{apiVersion: v1, kind: ConfigMap, metadata: {{name: istio, namespace: istio-system}}, data: {{mesh: '{mesh}'}}}}"
        );
        crate::parse(&yaml, "test.yaml").objects
    };
    let mut world = World::new().with_access_log("/dev/stdout");
    assert_eq!(world.mesh().access_log_file.as_deref(), Some("/dev/stdout"));
    for (mesh, file) in [
        ("accessLogFile: /tmp/log", "/tmp/log"),
        ("accessLogFile: \"\"", ""),
        ("enableAutoMtls: true", "/dev/stdout"),
        ("", "/dev/stdout"),
    ] {
        world.reset(config(mesh));
        assert_eq!(world.mesh().access_log_file.as_deref(), Some(file), "{mesh}");
    }
    let mut plain = World::new();
    plain.reset(config("enableAutoMtls: true"));
    assert_eq!(plain.mesh().access_log_file, None);
}

#[test]
fn endpoints_are_ready_pods_with_named_ports_resolved() {
    let node = "---\napiVersion: v1\nkind: Node\nmetadata: {name: n, labels: {topology.kubernetes.io/region: r, topology.kubernetes.io/zone: z}}\n";
    let yaml =
        [SERVICE, node, &pod("p", "10.1.0.1", ", version: v1", "True"), &pod("q", "10.1.0.2", "", "False")];
    let mut world = world(&yaml.concat());
    let service = world.service("a.svc.svc.cluster.local").unwrap().clone();
    assert_eq!(service.spec.ports[1].protocol, Protocol::Grpc);
    let endpoints = world.endpoints(&service, &service.spec.ports[0]);
    assert_eq!(
        endpoints.iter().map(|e| (e.port, e.ready)).collect::<Vec<_>>(),
        [(8080, true), (8080, false)]
    );
    assert_eq!((endpoints[0].locality.region.as_str(), endpoints[0].locality.zone.as_str()), ("r", "z"));
    assert!(has_labels(&endpoints[0], &labels(&[("version", "v1")])));
    assert!(!has_labels(&endpoints[1], &labels(&[("version", "v1")])));
    let of_place = |zone| labels(&[("version", "v1"), ("topology.kubernetes.io/zone", zone)]);
    assert!(has_labels(&endpoints[0], &of_place("z")) && !has_labels(&endpoints[0], &of_place("y")));
    let of_cluster = |name| labels(&[("topology.istio.io/cluster", name)]);
    assert!(has_labels(&endpoints[0], &of_cluster("one")) && !has_labels(&endpoints[0], &of_cluster("two")));
    let of_network = |name| labels(&[("topology.istio.io/network", name)]);
    assert!(
        has_labels(&endpoints[0], &of_network("net")) && !has_labels(&endpoints[0], &of_network("other"))
    );
    assert_eq!(world.endpoints(&service, &service.spec.ports[1])[0].port, 9000);
    let identities: Vec<_> =
        world.service_identities(&service).iter().map(|id| id.service_account.clone()).collect();
    assert_eq!(identities, ["sa-p", "sa-q"]);

    // A removed pod, and one whose labels change, leave the service.
    assert!(world.delete(&ObjectKey { kind: Kind::Pod, namespace: "svc".into(), name: "q".into() }));
    let parsed = crate::parse(&pod("p", "10.1.0.1", "", "True").replace("app: a", "app: b"), "test.yaml");
    for (object, origin) in parsed.objects {
        assert!(world.apply(object.clone(), origin.clone()));
        assert!(!world.apply(object, origin), "nothing changed");
    }
    assert_eq!(world.endpoints(&service, &service.spec.ports[0]), []);
    assert!(world.pod_by_ip("10.1.0.1".parse().unwrap()).is_some());
    assert!(world.pod_by_ip("10.1.0.2".parse().unwrap()).is_none());
}

/// As the API server writes it for a Service without pods.
#[test]
fn an_endpoint_slice_may_be_empty() {
    let slice = r#"{"addressType": "IPv4", "apiVersion": "discovery.k8s.io/v1", "endpoints": null, "ports": null,
        "kind": "EndpointSlice", "metadata": {"name": "a-1", "namespace": "svc",
        "labels": {"kubernetes.io/service-name": "a"}}}"#;
    let world = world(&[SERVICE, &pod("p", "10.1.0.1", "", "True"), "---\n", slice].concat());
    let service = world.service("a.svc.svc.cluster.local").unwrap();
    assert_eq!(world.endpoints(service, &service.spec.ports[0]), []);
}

#[test]
fn endpoint_slices_of_a_service_replace_its_pods() {
    let slice = "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a-1, namespace: svc, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
ports: [{name: http, port: 8081}]
endpoints:
- {addresses: [10.1.0.1], conditions: {ready: true}, targetRef: {kind: Pod, name: p}}
- {addresses: [10.2.0.9], zone: z2}
- {addresses: [10.2.0.10], conditions: {ready: false}}
";
    let world = world(
        &[SERVICE, slice, &pod("p", "10.1.0.1", "", "True"), &pod("q", "10.1.0.2", "", "True")].concat(),
    );
    let service = world.service("a.svc.svc.cluster.local").unwrap();
    let endpoints = world.endpoints(service, &service.spec.ports[0]);
    let found: Vec<_> = endpoints
        .iter()
        .map(|e| (e.address.ip().unwrap().to_string(), e.port, e.ready, e.pod.is_some()))
        .collect();
    assert_eq!(
        found,
        [
            ("10.1.0.1".to_owned(), 8081, true, true),
            ("10.2.0.9".to_owned(), 8081, true, false),
            ("10.2.0.10".to_owned(), 8081, false, false)
        ]
    );
    assert_eq!(endpoints[1].locality.zone, "z2");
    assert_eq!(world.endpoints(service, &service.spec.ports[1]), [], "the slice has no such port");
}

#[test]
fn destination_rules_of_the_clients_namespace_take_precedence() {
    let subset = |name: &str| format!("subsets: [{{name: {name}}}]");
    let name_for = |world: &World, client: &str| {
        world.destination_rule("a.svc.svc.cluster.local", client).map(|rule| rule.meta.namespace.clone())
    };
    let own = rule("r", "client", &subset("own"));
    let services = rule("r", "svc", &subset("services"));
    let private = rule("r", "svc", "exportTo: [.]");
    let root = rule("r", "istio-system", &subset("root"));
    let all = world(&[SERVICE, &own, &services, &root].concat());
    assert_eq!(name_for(&all, "client").as_deref(), Some("client"));
    assert_eq!(name_for(&all, "other").as_deref(), Some("svc"));
    let without = world(&[SERVICE, &private, &root].concat());
    assert_eq!(name_for(&without, "other").as_deref(), Some("istio-system"));
    assert_eq!(name_for(&without, "svc").as_deref(), Some("svc"));
    assert_eq!(name_for(&world(SERVICE), "svc"), None);
}

#[test]
fn destination_rules_for_one_host_are_merged_and_precede_wildcards() {
    let first = rule(
        "r1",
        "svc",
        "subsets: [{name: v1, labels: {v: one}}], trafficPolicy: {loadBalancer: {simple: RANDOM}}",
    );
    let second = rule("r2", "svc", "subsets: [{name: v1, labels: {v: two}}, {name: v2}]");
    let wild = rule("r0", "svc", "subsets: [{name: w}]")
        .replace("host: a.svc", "host: '*.svc'")
        .replace("'*.svc'", "'*'");
    let wild = wild.replace("host: '*'.svc.cluster.local", "host: '*.svc.cluster.local'");
    let world = world(&[SERVICE, &wild, &first, &second].concat());
    let rule = world.destination_rule("a.svc.svc.cluster.local", "svc").unwrap();
    let subsets: Vec<_> = rule.spec.subsets.iter().map(|subset| subset.name.as_str()).collect();
    assert_eq!(subsets, ["v1", "v2"]);
    assert_eq!(rule.spec.subsets[0].labels, labels(&[("v", "one")]));
    assert!(rule.spec.traffic_policy.is_some());
    let wild = world.destination_rule("b.svc.svc.cluster.local", "svc").unwrap();
    assert_eq!(wild.meta.name, "r0");
}

#[test]
fn the_oldest_virtual_service_routes_a_host() {
    let young = routes("a-young", "svc", "hosts: [a]")
        .replace("namespace: svc}", "namespace: svc, creationTimestamp: '2024-01-02T00:00:00Z'}");
    let old = routes("b-old", "svc", "hosts: [a]")
        .replace("namespace: svc}", "namespace: svc, creationTimestamp: '2024-01-01T00:00:00Z'}");
    let gateway = routes("c-gateway", "svc", "hosts: [a], gateways: [g]");
    let found = |world: &World| {
        world.virtual_service("a.svc.svc.cluster.local", "svc", |_| true).map(|found| found.meta.name.clone())
    };
    assert_eq!(found(&world(&[SERVICE, &young, &old, &gateway].concat())).as_deref(), Some("b-old"));
    // Without creation times the order in the files decides.
    let (first, second) = (routes("z", "svc", "hosts: [a]"), routes("y", "svc", "hosts: [a]"));
    assert_eq!(found(&world(&[SERVICE, &first, &second].concat())).as_deref(), Some("z"));
    assert_eq!(found(&world(&[SERVICE, &gateway].concat())), None);
    // One without HTTP rules routes no requests, so it does not hide others.
    let tcp = first.split("http:").next().unwrap().to_owned()
        + "hosts: [a], tcp: [{route: [{destination: {host: a}}]}]}\n";
    assert_eq!(found(&world(&[SERVICE, &tcp, &second].concat())).as_deref(), Some("y"));
    let on_port = world(&[SERVICE, &tcp, &second].concat());
    let routed = on_port.virtual_service_on("a.svc.svc.cluster.local", 80, "svc", |_| true);
    assert_eq!(routed.map(|found| &*found.meta.name), Some("y"));
}

#[test]
fn the_narrower_export_precedes_the_older_virtual_service() {
    const HOST: &str = "a.svc.svc.cluster.local";
    let of = |name: &str, namespace: &str, year: u32, more: &str| {
        routes(name, namespace, &format!("hosts: [{HOST}]{more}")).replace(
            &format!("namespace: {namespace}}}"),
            &format!("namespace: {namespace}, creationTimestamp: '{year}-01-01T00:00:00Z'}}"),
        )
    };
    let route = "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
                 metadata: {name: route, namespace: client, creationTimestamp: '2023-01-01T00:00:00Z'}\n\
                 spec: {parentRefs: [{group: '', kind: Service, name: a, namespace: svc}], rules: [{backendRefs: [{name: a, namespace: svc, port: 80}]}]}\n";
    let public = of("public", "svc", 2020, "");
    let named = of("named", "svc", 2021, ", exportTo: [client]");
    let own = of("own", "client", 2022, ", exportTo: [.]");
    let mut world = world(&[SERVICE, &public, &named, &own, route].concat());
    world.settle();
    let found = |world: &World, client: &str| {
        let found = world.virtual_service_on(HOST, 80, client, |_| true);
        found.map(|found| found.meta.name.clone()).unwrap_or_default()
    };
    assert_eq!([found(&world, "client"), found(&world, "other")], ["own", "public"]);
    let mut delete = |kind: Kind, namespace: &str, name: &str| {
        world.delete(&ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() });
        world.settle();
        found(&world, "client")
    };
    assert_eq!(delete(Kind::VirtualService, "client", "own"), "named");
    assert!(delete(Kind::VirtualService, "svc", "named").starts_with("client~"));
    assert_eq!(delete(Kind::HttpRoute, "client", "route"), "public");
}

#[test]
fn virtual_services_are_visible_where_exported() {
    let private = routes("r", "svc", "hosts: [a], exportTo: [.]");
    let world = world(&[SERVICE, &private].concat());
    assert_eq!(world.virtual_services("svc").len(), 1);
    assert_eq!(world.virtual_services("other").len(), 0);
    assert!(world.virtual_service("a.svc.svc.cluster.local", "other", |_| true).is_none());
}

#[test]
fn hosts_are_completed_only_without_dots() {
    assert_eq!(fqdn("reviews", "ns"), "reviews.ns.svc.cluster.local");
    assert_eq!(fqdn("reviews.other", "ns"), "reviews.other");
    assert_eq!(fqdn("*.example.com", "ns"), "*.example.com");
    assert!(host_matches("*", "a") && host_matches("*.b", "a.b") && host_matches("a.b", "a.b"));
    assert!(!host_matches("*.b", "b") && !host_matches("*.b", ".b") && !host_matches("a", "b"));
}

const ENTRY: &str = "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: api, namespace: svc}
spec:
  hosts: [api.example.com]
  ports: [{number: 443, name: tls, protocol: TLS, targetPort: 8443}]
  resolution: STATIC
  workloadSelector: {labels: {app: a}}
";

const ALLOCATION: &str = "---
apiVersion: v1
kind: ConfigMap
metadata: {name: skysail-addresses, namespace: istio-system}
data: {api.example.com: 240.240.0.1}
";

/// Returns the addresses of a host and the diagnostics of the World.
fn addresses(world: &World, host: &str) -> (Vec<String>, String) {
    let service = world.service(host).unwrap();
    let addresses = service.spec.cluster_ips.iter().map(ToString::to_string).collect();
    (addresses, world.validate().iter().map(ToString::to_string).collect())
}

#[test]
fn hosts_without_addresses_get_allocated_ones() {
    // TLS is recognised by its server name, other bytes by an address only.
    let tcp = ENTRY.replace("protocol: TLS", "protocol: TCP");
    let mut world = world(&[&tcp, &*pod("a", "10.244.0.2", "", "True")].concat());
    let (found, findings) = addresses(&world, "api.example.com");
    assert!(found.is_empty() && findings.contains("has no address to recognise"), "{found:?} {findings}");
    let allocate = |world: &mut World, text: &str| {
        let parsed = crate::parse(text, "addresses.yaml");
        parsed.objects.into_iter().map(|(object, origin)| world.apply(object, origin)).collect::<Vec<_>>()
    };
    assert_eq!(allocate(&mut world, ALLOCATION), [true]);
    assert_eq!(allocate(&mut world, ALLOCATION), [false]);
    assert_eq!(addresses(&world, "api.example.com"), (vec!["240.240.0.1".to_owned()], String::new()));
    assert_eq!(allocate(&mut world, &ALLOCATION.replace("0.1", "0.2")), [true]);
    assert_eq!(addresses(&world, "api.example.com").0, ["240.240.0.2"]);
    // An entry added later, and one with addresses of its own.
    allocate(&mut world, &ENTRY.replace("hosts:", "addresses: [240.0.0.9]\n  hosts:"));
    assert_eq!(addresses(&world, "api.example.com").0, ["240.0.0.9"]);
    allocate(&mut world, ENTRY);
    assert_eq!(addresses(&world, "api.example.com").0, ["240.240.0.2"]);
    let none =
        tcp.replace("STATIC", "NONE").replace("workloadSelector: {labels: {app: a}}", "exportTo: ['*']");
    allocate(&mut world, &none);
    let (found, findings) = addresses(&world, "api.example.com");
    assert!(found.is_empty() && findings.contains("has no address to recognise"), "{found:?} {findings}");
    allocate(&mut world, ENTRY);
    let key = ObjectKey {
        kind: Kind::ConfigMap,
        namespace: "istio-system".into(),
        name: "skysail-addresses".into(),
    };
    assert!(world.delete(&key));
    assert!(addresses(&world, "api.example.com").0.is_empty());
    let wrong = crate::parse(&ALLOCATION.replace("240.240.0.1", "x"), "addresses.yaml");
    assert!(wrong.objects.is_empty());
    assert!(wrong.diagnostics[0].to_string().contains("\"x\" is not an address"), "{:?}", wrong.diagnostics);
}

#[test]
fn a_service_entry_selects_pods_of_its_namespace() {
    let others = pod("b", "10.244.0.3", "", "True").replace("namespace: svc", "namespace: other");
    let mut world = world(&[ENTRY, &pod("a", "10.244.0.2", "", "True"), &others].concat());
    let endpoints = |world: &World| -> Vec<String> {
        let service = world.service("api.example.com").unwrap();
        let endpoints = world.endpoints(service, &service.spec.ports[0]).into_iter();
        endpoints.map(|it| format!("{}:{} {}", it.address.ip().unwrap(), it.port, it.ready)).collect()
    };
    assert_eq!(endpoints(&world), ["10.244.0.2:8443 true"]);
    world.take_changes();
    for (object, origin) in crate::parse(&pod("a", "10.244.0.2", "", "False"), "test.yaml").objects {
        world.apply(object, origin);
    }
    assert_eq!(endpoints(&world), ["10.244.0.2:8443 false"]);
    let service = ("svc".to_owned(), "api.example.com".to_owned());
    assert!(world.take_changes().services.contains(&service), "its endpoints are sent again");
    for (object, origin) in crate::parse(&ENTRY.replace("app: a", "app: c"), "test.yaml").objects {
        world.apply(object, origin);
    }
    assert!(endpoints(&world).is_empty());
    let selected = |value| ("svc".to_owned(), AffectedWorkloads::Labelled(labels(&[("app", value)])));
    let changed = world.take_changes().workloads_in;
    assert!(changed.contains(&selected("a")) && changed.contains(&selected("c")), "{changed:?}");
    let findings = addresses(&world, "api.example.com").1;
    assert!(findings.contains("no pod or WorkloadEntry of namespace svc has app: c"), "{findings}");
    let by_name = crate::parse(&ENTRY.replace("STATIC", "DNS"), "test.yaml");
    world.apply(by_name.objects[0].0.clone(), by_name.objects[0].1.clone());
    assert!(endpoints(&world).is_empty(), "with DNS only WorkloadEntries are selected");
    for (from, to, expected) in [
        (
            "resolution:",
            "endpoints: [{address: 10.0.0.1}]\n  resolution:",
            "is not allowed together with endpoints",
        ),
        ("{labels: {app: a}}", "{matchLabels: {app: a}}", "matchLabels"),
    ] {
        let parsed = crate::parse(&ENTRY.replace(from, to), "test.yaml");
        let findings: String = parsed.diagnostics.iter().map(ToString::to_string).collect();
        assert!(
            parsed.objects.is_empty() && findings.replace(": is", " is").contains(expected),
            "{findings}"
        );
    }
    let empty = crate::parse(&ENTRY.replace("{labels: {app: a}}", "{labels: {}}"), "test.yaml");
    assert!(empty.diagnostics[0].to_string().contains("so it selects no workload"));
    assert_eq!(empty.objects.len(), 1, "as in Istio");
}

fn peer(name: &str, namespace: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\n\
         metadata: {{name: {name}, namespace: {namespace}}}\nspec: {{{spec}}}\n"
    )
}

#[test]
fn narrower_peer_authentications_take_precedence_and_unset_inherits() {
    let world = world(
        &[
            peer("mesh", "istio-system", "mtls: {mode: STRICT}"),
            peer("ns", "a", "mtls: {mode: PERMISSIVE}"),
            peer("unset", "b", "mtls: {mode: UNSET}"),
            peer("w1", "a", "selector: {matchLabels: {app: x}}, mtls: {mode: DISABLE}, portLevelMtls: {'80': {mode: STRICT}, '81': {mode: UNSET}}"),
            peer("w2", "a", "selector: {matchLabels: {app: x}}, mtls: {mode: STRICT}"),
        ]
        .concat(),
    );
    let x = labels(&[("app", "x")]);
    assert_eq!(world.peer_mode("c", &x, 1), MtlsMode::Strict, "the mesh's");
    assert_eq!(world.peer_mode("b", &x, 1), MtlsMode::Strict, "UNSET asks the mesh");
    assert_eq!(world.peer_mode("a", &Labels::new(), 1), MtlsMode::Permissive, "the namespace's");
    assert_eq!(world.peer_mode("a", &x, 1), MtlsMode::Disable, "the oldest that selects it");
    assert_eq!(world.peer_mode("a", &x, 80), MtlsMode::Strict, "the port's");
    assert_eq!(world.peer_mode("a", &x, 81), MtlsMode::Disable, "the port asks the workload");
    assert_eq!(world.port_modes("a", &x), [(80, MtlsMode::Strict), (81, MtlsMode::Disable)]);
}

#[test]
fn authorization_policies_come_from_the_root_and_the_own_namespace() {
    let policy = |name: &str, namespace: &str, spec: &str| {
        format!(
            "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
             metadata: {{name: {name}, namespace: {namespace}}}\nspec: {{{spec}}}\n"
        )
    };
    let world = world(
        &[
            policy("own", "a", ""),
            policy("selecting", "a", "selector: {matchLabels: {app: x}}"),
            policy("other", "b", ""),
            policy("root", "istio-system", "selector: {matchLabels: {app: x}}"),
        ]
        .concat(),
    );
    let names = |namespace: &str, labels: &Labels| -> Vec<String> {
        world
            .authorization_policies(namespace, labels)
            .iter()
            .map(|policy| policy.meta.name.clone())
            .collect()
    };
    assert_eq!(names("a", &labels(&[("app", "x")])), ["root", "own", "selecting"]);
    assert_eq!(names("a", &Labels::new()), ["own"]);
    assert_eq!(names("istio-system", &labels(&[("app", "x")])), ["root"]);
}

#[test]
fn deleted_objects_leave_every_index() {
    let mut world =
        world(&[SERVICE, &rule("r", "svc", "subsets: []"), &routes("v", "svc", "hosts: [a]")].concat());
    let key = |kind, name: &str| ObjectKey { kind, namespace: "svc".into(), name: name.into() };
    assert!(world.delete(&key(Kind::DestinationRule, "r")));
    assert!(world.delete(&key(Kind::VirtualService, "v")));
    assert!(!world.delete(&key(Kind::VirtualService, "v")), "it is gone already");
    assert!(world.destination_rule("a.svc.svc.cluster.local", "svc").is_none());
    assert!(world.virtual_service("a.svc.svc.cluster.local", "svc", |_| true).is_none());
}

#[test]
fn the_line_of_an_absent_field_is_that_of_its_parent() {
    let lines = [("spec".to_owned(), 3), ("spec.http[0]".to_owned(), 5)].into();
    let origin = Origin { file: "x".into(), line: 1, lines: Some(Arc::new(lines)), ..Origin::default() };
    assert_eq!(origin.line_of("spec.http[0].route[1].weight"), 5);
    assert_eq!(origin.line_of("spec.tls[0]"), 3);
    assert_eq!(origin.line_of("metadata.name"), 1);
}
