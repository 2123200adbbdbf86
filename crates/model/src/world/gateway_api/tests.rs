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
fn routes_have_the_default_export_of_the_mesh() {
    let mesh = "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\n\
                data: {mesh: 'defaultVirtualServiceExportTo: [\".\"]'}\n";
    let world = world(&[&route("producer", "shop", "", "{name: producer}"), mesh].concat());
    assert_eq!(names(&world, 80, "shop"), ["producer"]);
    assert_eq!(names(&world, 80, "web"), [""; 0]);
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
fn backends_of_other_namespaces_require_a_grant_at_gateways() {
    let text = route("consumer", "web", "", "{backendRefs: [{name: stock, namespace: shop, port: 80}]}");
    let edge = "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: edge, namespace: web}\n\
        spec: {gatewayClassName: istio, listeners: [{name: a, port: 80, protocol: HTTP}]}\n";
    let mut world = world(&(text.replace("parentRefs: [", "parentRefs: [{name: edge}, ") + edge));
    let host = |world: &World| {
        let mut rules = world.virtual_services.iter().map(|entry| &entry.object.spec);
        let of_gateway = rules.find(|rule| rule.gateways.iter().any(|name| name != "mesh")).unwrap();
        of_gateway.http[0].route[0].destination.host.clone()
    };
    let of_mesh = |world: &World| found(world, 80, "web").unwrap().http[0].route[0].destination.host.clone();
    assert_eq!((host(&world).as_str(), of_mesh(&world).as_str()), ("", "stock.shop.svc.cluster.local"));
    let statuses = world.gateway_api_status();
    let parents = &statuses.iter().find(|of| of.object.kind == Kind::HttpRoute).unwrap().parents;
    let resolved: Vec<_> = parents.iter().map(|parent| parent.conditions[1].reason).collect();
    assert_eq!(resolved, ["RefNotPermitted", "ResolvedRefs"]);
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

fn gateway(spec: &str) -> String {
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: edge, namespace: shop}}\n\
         spec: {{gatewayClassName: istio, {spec}}}\n"
    )
}

/// Returns the Secret `c` with certificate and key, and the ConfigMap `clients` with roots.
fn credentials() -> String {
    let made = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
    let block = |text: String| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    format!(
        "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: c, namespace: shop}}\ntype: kubernetes.io/tls\nstringData:\n  \
         tls.crt: |\n{chain}  tls.key: |\n{}---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: clients, namespace: \
         shop}}\ndata:\n  ca.crt: |\n{chain}",
        block(made.signing_key.serialize_pem()),
        chain = block(made.cert.pem()),
    )
}

/// Applies objects of which some have warnings, and returns the status of the Gateway.
fn gateway_status(yaml: &str) -> (World, GatewayApiStatus) {
    let mut world = World::new();
    for (object, origin) in crate::parse(yaml, "test.yaml").objects {
        world.apply(object, origin);
    }
    world.settle();
    let key = ObjectKey { kind: Kind::KubernetesGateway, namespace: "shop".into(), name: "edge".into() };
    let status = world.gateway_api_status().into_iter().find(|status| status.object == key).unwrap();
    (world, status)
}

/// Returns the conditions of each listener that are not as for a valid one.
fn exceptions(status: &GatewayApiStatus) -> Vec<String> {
    let listeners =
        status.listeners.iter().flat_map(|of| of.conditions.iter().map(|condition| (&of.name, condition)));
    let is_usual =
        |of: &StatusCondition| of.status != (of.kind == "Conflicted") && of.kind != "OverlappingTLSConfig";
    let shown =
        |(name, of): (&String, &StatusCondition)| format!("{name} {} {} {}", of.kind, of.status, of.reason);
    listeners.filter(|(_, of)| !is_usual(of)).map(shown).collect()
}

#[test]
fn listeners_say_why_they_are_not_served() {
    let listeners = "listeners: [\
        {name: udp, port: 443, protocol: UDP}, \
        {name: waypoint, port: 15008, protocol: HBONE}, \
        {name: bare, port: 8443, protocol: HTTPS}, \
        {name: web, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: c}]}, allowedRoutes: {kinds: [{kind: HTTPRoute}, {kind: TCPRoute}]}}, \
        {name: same, port: 443, protocol: TLS, tls: {mode: Passthrough}}, \
        {name: other, port: 443, protocol: TCP}]";
    let (_, status) = gateway_status(&(credentials() + &gateway(listeners)));
    let expected = [
        "udp Accepted false UnsupportedProtocol",
        "udp Programmed false Invalid",
        "waypoint Accepted false UnsupportedProtocol",
        "waypoint Programmed false Invalid",
        "bare Accepted false UnsupportedProtocol",
        "bare Programmed false Invalid",
        "web ResolvedRefs false InvalidRouteKinds",
        "same Accepted false HostnameConflict",
        "same Conflicted true HostnameConflict",
        "same Programmed false HostnameConflict",
        "other Accepted false ProtocolConflict",
        "other Conflicted true ProtocolConflict",
        "other Programmed false ProtocolConflict",
    ];
    assert_eq!(exceptions(&status), expected);
    assert_eq!(status.listeners[3].supported_kinds, [Kind::HttpRoute]);
    assert_eq!(status.listeners[0].supported_kinds, []);
}

#[test]
fn listeners_whose_hosts_share_connections_are_named() {
    let listener = |name: &str, host: &str, port: u16| {
        format!(
            "{{name: {name}, port: {port}, protocol: HTTPS, hostname: {host}, tls: {{certificateRefs: [{{name: c}}]}}}}"
        )
    };
    let listeners = [
        listener("wide", "'*.example'", 443),
        listener("narrow", "a.example", 443),
        listener("apart", "a.test", 443),
        listener("elsewhere", "b.example", 444),
    ];
    let (_, status) = gateway_status(&gateway(&format!("listeners: [{}]", listeners.join(", "))));
    let overlaps =
        |of: &ListenerStatus| of.conditions.iter().any(|of| of.kind == "OverlappingTLSConfig" && of.status);
    let found: Vec<_> =
        status.listeners.iter().filter(|of| overlaps(of)).map(|of| of.name.as_str()).collect();
    assert_eq!(found, ["wide", "narrow"]);
}

#[test]
fn roots_of_clients_are_those_of_the_port_and_permitted() {
    const ROOTS: &str = "validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: clients";
    let settings = |of_port: &str| {
        gateway(&format!(
            "tls: {{frontend: {{default: {{{ROOTS}}}]}}}}, perPort: [{{port: 444, tls: {{{of_port}}}}}]}}}}, \
             listeners: [{{name: a, port: 443, protocol: HTTPS, tls: {{certificateRefs: [{{name: c}}]}}}}, \
             {{name: b, port: 444, protocol: HTTPS, tls: {{certificateRefs: [{{name: c}}]}}}}]"
        ))
    };
    let made = |yaml: &str| {
        let (world, status) = gateway_status(&(credentials() + yaml));
        let internal = |name: &str| {
            let entry =
                world.gateways.get("shop", &format!("edge~istio-autogenerated-k8s-gateway~{name}"))?;
            let tls = entry.object.spec.servers[0].tls.clone()?;
            let skips = if tls.insecure_skip_verify == Some(true) { " insecure" } else { "" };
            Some(format!("{:?} {}{skips}", tls.mode, tls.ca_cert_credential_name))
        };
        (internal("a"), internal("b"), exceptions(&status), status.conditions.len())
    };
    let default = || Some("Mutual configmap://shop/clients-cacert".to_owned());
    assert_eq!(made(&settings("")), (default(), Some("Simple ".to_owned()), vec![], 3));
    let insecure = format!("{ROOTS}}}], mode: AllowInsecureFallback}}");
    let optional = Some("OptionalMutual configmap://shop/clients-cacert insecure".to_owned());
    assert_eq!(made(&settings(&insecure)), (default(), optional, vec![], 4));
    let refused = |reason: &str| {
        let conditions = [
            "b Accepted false NoValidCACertificate".to_owned(),
            "b Programmed false Invalid".to_owned(),
            format!("b ResolvedRefs false {reason}"),
        ];
        (default(), None, conditions.to_vec(), 3)
    };
    assert_eq!(made(&settings(&format!("{ROOTS}, namespace: other}}]}}"))), refused("RefNotPermitted"));
    assert_eq!(
        made(&settings(&format!("{ROOTS}}}, {{kind: Secret, name: c}}]}}"))),
        refused("InvalidCACertificateRef")
    );
    let other_kind = format!("{ROOTS}}}]}}").replace("ConfigMap", "Bundle");
    assert_eq!(made(&settings(&other_kind)), refused("InvalidCACertificateKind"));
}

#[test]
fn missing_certificates_and_roots_are_named_until_they_come() {
    let roots = "validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: clients}]}";
    let text = gateway(&format!(
        "tls: {{frontend: {{default: {{{roots}}}}}}}, \
         listeners: [{{name: a, port: 443, protocol: HTTPS, tls: {{certificateRefs: [{{name: none}}, {{name: c}}]}}}}]"
    ));
    let (mut world, status) = gateway_status(&text);
    assert_eq!(
        exceptions(&status),
        ["a Programmed false Invalid", "a ResolvedRefs false InvalidCertificateRef"]
    );
    let both = credentials();
    let (secret, config_map) = both.split_at(both.find("---\napiVersion: v1\nkind: ConfigMap").unwrap());
    apply(&mut world, secret);
    let expected = [
        "a Accepted false NoValidCACertificate",
        "a Programmed false Invalid",
        "a ResolvedRefs false InvalidCACertificateRef",
    ];
    assert_eq!(exceptions(&world.gateway_api_status()[0]), expected);
    apply(&mut world, config_map);
    assert_eq!(exceptions(&world.gateway_api_status()[0]), [""; 0], "one of the certificates suffices");
}

#[test]
fn retries_include_failures_of_connections() {
    let made = |retry: &str, timeouts: &str| {
        let world = world(&route(
            "r",
            "shop",
            "",
            &format!("{{retry: {retry}, timeouts: {timeouts}, backendRefs: [{{name: stock, port: 80}}]}}"),
        ));
        let rule = found(&world, 80, "shop").unwrap().http.remove(0);
        (rule.retries.unwrap(), rule.timeout)
    };
    let (retries, timeout) = made("{codes: [503, 429], backoff: 0s}", "{request: 2s, backendRequest: 1s}");
    assert_eq!(retries.retry_on, "connect-failure,refused-stream,reset,unavailable,cancelled,503,429");
    assert_eq!((retries.attempts, retries.backoff), (2, None));
    let seconds = |length: Option<crate::api::Duration>| length.map(|length| length.0.as_secs());
    assert_eq!((seconds(retries.per_try_timeout), seconds(timeout)), (Some(1), Some(2)));
    assert_eq!(made("{attempts: 0}", "{}").0.attempts, 0);
}

#[test]
fn requested_addresses_are_supported_and_exist() {
    const SERVICE: &str = "---
apiVersion: v1
kind: Service
metadata: {name: edge, namespace: shop}
spec: {type: LoadBalancer, selector: {app: edge}, ports: [{name: http, port: 80}]}
status: {loadBalancer: {ingress: [{ip: 192.0.2.1}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: edge, namespace: shop, labels: {app: edge, gateway.networking.k8s.io/gateway-name: edge}}
spec: {containers: [{name: a, image: a}]}
";
    let conditions = |addresses: &str| {
        let spec = format!("addresses: [{addresses}], listeners: [{{name: a, port: 80, protocol: HTTP}}]");
        let (world, status) = gateway_status(&(SERVICE.to_owned() + &gateway(&spec)));
        let is_served = world.gateways.get("shop", "edge~istio-autogenerated-k8s-gateway~a").is_some();
        let shown = status.conditions.iter().take(2).map(|of| format!("{} {}", of.status, of.reason));
        (shown.collect::<Vec<_>>().join(", "), is_served)
    };
    let fine = ("true Accepted, true Programmed".to_owned(), true);
    for usable in ["", "{type: Hostname, value: edge}", "{value: 192.0.2.1}", "{type: IPAddress}"] {
        assert_eq!(conditions(usable), fine, "{usable}");
    }
    for unusable in ["{type: Hostname, value: none}", "{value: 192.0.2.2}"] {
        let expected = ("true Accepted, false AddressNotUsable".to_owned(), true);
        assert_eq!(conditions(unusable), expected, "{unusable}");
    }
    let partly = conditions("{type: Hostname, value: edge}, {value: 192.0.2.1}");
    assert_eq!(partly, ("false UnsupportedAddress, true Programmed".to_owned(), true));
    for unsupported in ["{type: example.com/name, value: a}", "{value: 192.0.2.1}, {value: 192.0.2.2}"] {
        let expected = ("false UnsupportedAddress, false UnsupportedAddress".to_owned(), false);
        assert_eq!(conditions(unsupported), expected, "{unsupported}");
    }
}
