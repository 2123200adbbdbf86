use super::*;
use crate::api::{StringMatch, VirtualService};

const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}, {name: http-admin, port: 90}]}
---
apiVersion: v1
kind: Service
metadata: {name: stock, namespace: shop}
spec: {clusterIP: 10.0.0.2, ports: [{name: http, port: 80}]}
";

const CART: &str = "cart.shop.svc.cluster.local";

fn route(name: &str, namespace: &str, parent: &str, rules: &str) -> String {
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
         metadata: {{name: {name}, namespace: {namespace}}}\n\
         spec: {{parentRefs: [{{group: '', kind: Service, name: cart, namespace: shop{parent}}}], rules: [{rules}]}}\n"
    )
}

/// Applies valid objects.
pub(super) fn apply(world: &mut World, yaml: &str) {
    let parsed = crate::parse(yaml, "test.yaml");
    assert_eq!(parsed.diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
    for (object, origin) in parsed.objects {
        world.apply(object, origin);
    }
    world.settle();
}

fn world(yaml: &str) -> World {
    let mut world = World::new();
    apply(&mut world, &[SERVICES, yaml].concat());
    world
}

/// Returns the VirtualService of a port of the cart for clients of a namespace.
fn found(world: &World, port: u16, client: &str) -> Option<VirtualService> {
    world.virtual_service_on(CART, port, client, |_| true).map(|found| found.spec.clone())
}

fn names(world: &World, port: u16, client: &str) -> Vec<String> {
    found(world, port, client).into_iter().flat_map(|of| of.http).map(|rule| rule.name).collect()
}

#[test]
fn routes_of_one_service_are_merged_by_precedence() {
    let many = "{matches: [{path: {value: /a}}, {path: {type: Exact, value: /b}}, {path: {value: /a/b}}, \
                {path: {value: /a}, method: GET}, {path: {value: /a}, headers: [{name: X-One, value: '1'}]}]}";
    let other = "{name: other, matches: [{path: {type: RegularExpression, value: '/[a-z]+/long'}}, {}]}";
    let world = world(&[route("one", "shop", "", many), route("two", "shop", "", other)].concat());
    let rules = found(&world, 80, "shop").unwrap().http;
    let shown = rules.iter().map(|rule| {
        let of = &rule.matches[0];
        let method = of.method.as_ref().map_or("", StringMatch::text);
        format!("{} {} {method}{}", rule.name, of.uri.as_ref().unwrap().text(), of.headers.len())
    });
    let expected = [
        "shop.one.0 /b 0",
        "shop.one.0 /a/b 0",
        "shop.one.0 /a GET0",
        "shop.one.0 /a 1",
        "shop.one.0 /a 0",
        "other / 0",
        "other /[a-z]+/long 0",
    ];
    assert_eq!(shown.collect::<Vec<_>>(), expected);
    assert!(rules[3].matches[0].headers.contains_key("x-one"), "names of headers have no case");
}

#[test]
fn a_consumer_route_applies_to_clients_of_its_namespace_alone() {
    let world = world(
        &[
            route("producer", "shop", "", "{name: producer}"),
            route("consumer", "web", "", "{name: consumer}"),
        ]
        .concat(),
    );
    assert_eq!(names(&world, 80, "web"), ["consumer"]);
    assert_eq!(names(&world, 80, "shop"), ["producer"]);
    assert_eq!(names(&world, 80, "other"), ["producer"]);
}

#[test]
fn a_port_of_the_parent_limits_the_route() {
    let world = world(
        &[route("all", "shop", "", "{name: all}"), route("admin", "shop", ", port: 90", "{name: admin}")]
            .concat(),
    );
    assert_eq!(names(&world, 80, "shop"), ["all"]);
    assert_eq!(names(&world, 90, "shop"), ["all", "admin"]);
    let absent = self::world(&route("absent", "shop", ", port: 70", "{}"));
    assert_eq!(found(&absent, 80, "shop"), None);
    let status = &absent.gateway_api_status()[0].parents[0].conditions[0];
    assert_eq!((status.status, status.reason), (false, "NoMatchingParent"));
}

#[test]
fn backends_of_other_namespaces_require_a_grant() {
    let mut world =
        world(&route("consumer", "web", "", "{backendRefs: [{name: stock, namespace: shop, port: 80}]}"));
    let host = |world: &World| found(world, 80, "web").unwrap().http[0].route[0].destination.host.clone();
    assert_eq!(host(&world), "");
    let resolved = world.gateway_api_status()[0].parents[0].conditions[1].reason;
    assert_eq!(resolved, "RefNotPermitted");
    let grant = "
apiVersion: gateway.networking.k8s.io/v1
kind: ReferenceGrant
metadata: {name: g, namespace: shop}
spec:
  from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: web}]
  to: [{group: '', kind: Service, name: stock}]
";
    apply(&mut world, grant);
    assert_eq!(host(&world), "stock.shop.svc.cluster.local");
    apply(&mut world, &grant.replace("kind: HTTPRoute", "kind: GRPCRoute"));
    assert_eq!(host(&world), "");
    apply(&mut world, &grant.replace("name: stock}", "name: other}"));
    assert_eq!(host(&world), "");
}

#[test]
fn rules_without_backends_get_500_and_redirects_default_to_302() {
    let world = world(&route(
        "r",
        "shop",
        "",
        "{name: none}, {name: zero, backendRefs: [{name: stock, port: 80, weight: 0}]}, \
         {name: moved, filters: [{type: RequestRedirect, requestRedirect: {hostname: a.example.com}}]}",
    ));
    let rules = found(&world, 80, "shop").unwrap().http;
    assert_eq!(rules[0].direct_response.as_ref().unwrap().status, 500);
    assert_eq!(rules[1].direct_response.as_ref().unwrap().status, 500);
    let redirect = rules[2].redirect.as_ref().unwrap();
    assert_eq!((redirect.redirect_code, redirect.authority.as_str()), (302, "a.example.com"));
    assert!(rules[2].direct_response.is_none());
}

#[test]
fn a_change_of_a_route_changes_its_host_alone() {
    let mut world = world(&route("r", "shop", "", "{backendRefs: [{name: stock, port: 80}]}"));
    world.take_changes();
    apply(&mut world, &route("r", "shop", "", "{backendRefs: [{name: cart, port: 80}]}"));
    let changes = world.take_changes();
    assert_eq!(changes.hosts.iter().collect::<Vec<_>>(), [CART]);
    assert!(!changes.everything && !changes.routes && changes.services.is_empty());
    let key = ObjectKey { kind: Kind::HttpRoute, namespace: "shop".into(), name: "r".into() };
    assert!(world.delete(&key));
    assert_eq!(world.take_changes().hosts.len(), 1);
    assert_eq!(found(&world, 80, "shop"), None);
    // A route waits for its parent.
    let mut world = World::new();
    apply(&mut world, &route("r", "shop", "", "{name: one}"));
    assert_eq!(found(&world, 80, "shop"), None);
    apply(&mut world, SERVICES);
    assert_eq!(names(&world, 80, "shop"), ["one"]);
}

#[test]
fn grpc_methods_are_paths() {
    let world = world(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: GRPCRoute\nmetadata: {name: g, namespace: shop}\n\
         spec: {parentRefs: [{group: '', kind: Service, name: cart}], rules: [{matches: [{method: {service: a.B}}, \
         {method: {service: a.B, method: C}}, {method: {method: C}}, {method: {type: RegularExpression, service: 'a\\..*'}}]}]}\n",
    );
    let rules = found(&world, 80, "shop").unwrap().http;
    let paths: Vec<_> = rules.iter().map(|rule| rule.matches[0].uri.clone().unwrap()).collect();
    let expected = [
        StringMatch::Exact("/a.B/C".into()),
        StringMatch::Prefix("/a.B/".into()),
        StringMatch::Regex(r"/a\..*/.+".into()),
        StringMatch::Regex("/[^/]+/C".into()),
    ];
    assert_eq!(paths, expected);
}

#[test]
fn mistakes_in_routes_are_refused() {
    for (rules, expected) in [
        ("{matches: [{path: {value: a}}]}", "does not begin with /"),
        ("{matches: [{method: get}]}", "is not one of GET"),
        (
            "{filters: [{type: RequestRedirect, requestRedirect: {}}], backendRefs: [{name: a, port: 80}]}",
            "not allowed together",
        ),
        (
            "{filters: [{type: RequestRedirect, requestRedirect: {}}, {type: URLRewrite, urlRewrite: {hostname: a.b}}]}",
            "exclude each other",
        ),
        ("{filters: [{type: CORS}]}", "cors: is missing"),
        ("{filters: [{type: ExtensionRef}]}", "ExtensionRef is not supported"),
        ("{backendRefs: [{name: a}]}", "port: is missing"),
        ("{backendRefs: [{name: a, port: 80, weight: -1}]}", "is not a weight"),
        ("{backendRefs: [{name: a, port: 80, filters: [{type: CORS, cors: {}}]}]}", "single backends"),
        (
            "{matches: [{path: {type: Exact, value: /a}}], filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]}",
            "requires exactly one match",
        ),
        ("{timeouts: {request: 1s, backendRequest: 2s}}", "is longer than"),
        ("{matches: [{headers: [{name: A, value: a}, {name: a, value: b}]}]}", "matched twice"),
    ] {
        let parsed = crate::parse(&route("r", "shop", "", rules), "test.yaml");
        let findings: String = parsed.diagnostics.iter().map(ToString::to_string).collect();
        let findings = findings.replace(" is missing", ": is missing").replace(":: is", ": is");
        assert!(parsed.objects.is_empty() && findings.contains(expected), "{rules}: {findings}");
    }
}

#[test]
fn selectors_select_namespaces_by_label_and_name() {
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {tier: web}}\n";
    let mut world = World::new();
    apply(&mut world, namespace);
    let selected = |selector: serde_json::Value| {
        let selector = serde_json::from_value(selector).unwrap();
        ["shop", "other"].map(|namespace| world.selects_namespace(&selector, namespace))
    };
    let by = |key: &str, operator: &str, values: &[&str]| serde_json::json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
    // Kubernetes sets the label with the name itself.
    let name = "kubernetes.io/metadata.name";
    assert_eq!(selected(serde_json::json!({"matchLabels": {name: "other"}})), [false, true]);
    assert_eq!(selected(by(name, "In", &["shop"])), [true, false]);
    assert_eq!(selected(serde_json::json!({"matchLabels": {"tier": "web"}})), [true, false]);
    assert_eq!(selected(by("tier", "NotIn", &["web"])), [false, true]);
    assert_eq!(selected(by("tier", "Exists", &[])), [true, false]);
    assert_eq!(selected(by("tier", "DoesNotExist", &[])), [false, true]);
    assert_eq!(selected(serde_json::json!({})), [true, true]);
}
