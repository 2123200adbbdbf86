use super::*;
use crate::{
    parse,
    world::{StatusCondition, gateway_api::tests::apply},
};

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: vault, namespace: shop}
spec: {clusterIP: 10.0.0.1, ports: [{name: https, port: 443}, {name: https-admin, port: 8443}]}
";
const HOST: &str = "vault.shop.svc.cluster.local";

fn policy(name: &str, target: &str, validation: &str) -> String {
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: BackendTLSPolicy\n\
         metadata: {{name: {name}, namespace: shop}}\n\
         spec: {{targetRefs: [{{group: '', kind: Service, {target}}}], validation: {{hostname: {name}.example.com, \
         {validation}}}}}\n"
    )
}

const SYSTEM_ROOTS: &str = "wellKnownCACertificates: System";
const MAP: &str = "caCertificateRefs: [{group: '', kind: ConfigMap, name: roots}]";

fn map() -> String {
    let pem = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap().cert.pem();
    let lines: String = pem.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: roots, namespace: shop}}\ndata:\n  ca.crt: |\n{lines}"
    )
}

fn world(text: &str) -> World {
    let mut world = World::new();
    apply(&mut world, &[SERVICE, text].concat());
    world
}

fn traffic(world: &World) -> TrafficPolicy {
    world.destination_rule(HOST, "web").unwrap().spec.traffic_policy.clone().unwrap()
}

/// Returns status and reason of the conditions at the first target of a policy.
fn conditions(world: &World, name: &str) -> Vec<(bool, &'static str)> {
    let all = world.gateway_api_status();
    let status = all.iter().find(|status| status.object.name == name).unwrap();
    status.parents[0]
        .conditions
        .iter()
        .map(|StatusCondition { status, reason, .. }| (*status, *reason))
        .collect()
}

#[test]
fn the_host_name_or_the_listed_names_are_verified() {
    let tls = traffic(&world(&policy("a", "name: vault", SYSTEM_ROOTS))).tls.unwrap();
    assert_eq!((tls.mode, tls.sni.as_str()), (ClientTlsMode::Simple, "a.example.com"));
    assert_eq!(tls.subject_alt_names, ["a.example.com"]);
    let names =
        "subjectAltNames: [{type: URI, uri: 'spiffe://x/y'}, {type: Hostname, hostname: z.example.com}]";
    let listed = format!("{SYSTEM_ROOTS}, {names}");
    let tls = traffic(&world(&policy("a", "name: vault", &listed))).tls.unwrap();
    assert_eq!(tls.subject_alt_names, ["spiffe://x/y", "z.example.com"]);
}

#[test]
fn roots_are_those_of_a_config_map_and_missing_ones_break_connections() {
    let mut world = world(&policy("a", "name: vault", MAP));
    let credential = |world: &World| traffic(world).tls.unwrap().credential_name;
    assert_eq!(credential(&world), INVALID);
    assert_eq!(
        conditions(&world, "a"),
        [(false, "NoValidCACertificate"), (false, "InvalidCACertificateRef")]
    );
    world.take_changes();
    apply(&mut world, &map());
    assert!(world.take_changes().workloads);
    assert_eq!(credential(&world), "configmap://shop/roots");
    assert_eq!(conditions(&world, "a"), [(true, "Accepted"), (true, "ResolvedRefs")]);
    // A key does not belong there and is never sent.
    let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
    let lines: String = key.lines().map(|line| format!("    {line}\n")).collect();
    let with_key = format!("{}{lines}", map());
    apply(&mut world, &with_key);
    assert_eq!(credential(&world), INVALID);
}

#[test]
fn other_config_maps_change_nothing() {
    let mut world = world(&policy("a", "name: vault", SYSTEM_ROOTS));
    world.take_changes();
    apply(&mut world, &map().replace("name: roots", "name: kube-root-ca.crt"));
    assert!(world.take_changes().is_empty());
}

#[test]
fn a_section_is_a_port_and_takes_precedence() {
    let both = [
        policy("a", "name: vault", SYSTEM_ROOTS),
        policy("b", "name: vault, sectionName: https-admin", SYSTEM_ROOTS),
    ];
    let made = traffic(&world(&both.concat()));
    assert_eq!(made.tls.unwrap().sni, "a.example.com");
    let ports: Vec<_> = made
        .port_level_settings
        .iter()
        .map(|of| (of.port.number, of.tls.as_ref().unwrap().sni.as_str()))
        .collect();
    assert_eq!(ports, [(8443, "b.example.com")]);
    let absent = world(&policy("c", "name: vault, sectionName: none", SYSTEM_ROOTS));
    assert!(absent.destination_rule(HOST, "web").is_none());
    assert_eq!(conditions(&absent, "c")[0], (false, "TargetNotFound"));
    // The policy applies once the port exists.
    let mut absent = absent;
    apply(&mut absent, &SERVICE.replace("https-admin", "none"));
    assert_eq!(traffic(&absent).port_level_settings.len(), 1);
}

#[test]
fn of_two_policies_the_older_applies() {
    let policies =
        [policy("b", "name: vault", SYSTEM_ROOTS), policy("a", "name: vault", SYSTEM_ROOTS)].concat();
    let world = world(&policies);
    assert_eq!(traffic(&world).tls.unwrap().sni, "a.example.com");
    assert_eq!(conditions(&world, "a")[0], (true, "Accepted"));
    assert_eq!(conditions(&world, "b")[0], (false, "Conflicted"));
    let older =
        policies.replacen("namespace: shop", "namespace: shop, creationTimestamp: '2026-01-01T00:00:00Z'", 1);
    assert_eq!(traffic(&self::world(&older)).tls.unwrap().sni, "b.example.com");
}

#[test]
fn fields_of_a_destination_rule_take_precedence() {
    let rule = |policy: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: r, namespace: shop}}\n\
             spec: {{host: vault, trafficPolicy: {{{policy}}}}}\n"
        )
    };
    let policy = policy("a", "name: vault", SYSTEM_ROOTS);
    for order in [0, 1] {
        let texts = |rule: String| if order == 0 { [rule, policy.clone()] } else { [policy.clone(), rule] };
        let made = traffic(&world(&texts(rule("loadBalancer: {simple: RANDOM}")).concat()));
        assert!(made.load_balancer.is_some());
        assert_eq!(made.tls.unwrap().sni, "a.example.com");
        let made = traffic(&world(&texts(rule("tls: {mode: DISABLE}")).concat()));
        assert_eq!(made.tls.unwrap().mode, ClientTlsMode::Disable);
    }
}

#[test]
fn an_ignored_policy_has_no_effect() {
    let text = policy("a", "name: vault", SYSTEM_ROOTS).replace(
        "namespace: shop",
        "namespace: shop, annotations: {istio.io/ignore-policy-attachment: 'true'}",
    );
    assert!(world(&text).destination_rule(HOST, "web").is_none());
}

/// Only Gateway API refers to ConfigMaps, and to Secrets of other namespaces: a DestinationRule gets none by its name.
#[test]
fn a_destination_rule_does_not_reach_other_namespaces() {
    let text = "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: r, namespace: shop}\n\
                spec: {host: vault, trafficPolicy: {tls: {mode: MUTUAL, credentialName: NAME}}}\n";
    let node = "router~10.0.0.9~edge.shop~shop.svc.cluster.local";
    let node = crate::ProxyNode::parse(node, serde_json::json!({}), Default::default()).unwrap();
    for name in
        ["configmap://other/roots", "kubernetes-gateway://other/key", "invalid://", "kubernetes://a/b"]
    {
        let parsed = parse(&text.replace("NAME", &format!("'{name}'")), "a.yaml");
        assert!(parsed.objects.is_empty(), "{name}");
        assert!(
            parsed.diagnostics.iter().any(|of| of.message.contains("is not the name of a Secret")),
            "{name}"
        );
        // The name is not sent either if it comes by another way.
        let mut parsed = parse(&text.replace("NAME", "own"), "a.yaml");
        let (mut object, origin) = parsed.objects.remove(0);
        let crate::Object::DestinationRule(rule) = &mut object else { panic!("another kind") };
        let policy = std::sync::Arc::make_mut(rule).spec.traffic_policy.as_mut().unwrap();
        policy.tls.as_mut().unwrap().credential_name = name.to_owned();
        let mut world = World::new();
        world.apply(object, origin);
        let is_foreign = name.starts_with("configmap://") || name.starts_with("kubernetes-gateway://");
        assert_eq!(world.client_credentials(&node.view).is_empty(), is_foreign, "{name}");
    }
}

#[test]
fn the_certificate_of_a_gateway_is_a_permitted_secret() {
    let gateway = |reference: &str| {
        format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: edge, namespace: shop}}\n\
             spec:\n  gatewayClassName: istio\n  listeners: [{{name: http, port: 80, protocol: HTTP}}]\n  \
             tls: {{backend: {{clientCertificateRef: {{{reference}}}}}}}\n"
        )
    };
    let empty = "---\napiVersion: v1\nkind: Secret\nmetadata: {name: empty, namespace: shop}\nstringData: {other: x}\n";
    let reason = |reference: &str| {
        let world = world(&[gateway(reference), empty.to_owned()].concat());
        let all = world.gateway_api_status();
        let edge = all.into_iter().find(|status| status.object.name == "edge").unwrap();
        let accepted = edge.conditions.iter().find(|of| of.kind == "Accepted").unwrap();
        assert!(accepted.status, "{reference}");
        let resolved = edge.conditions.into_iter().find(|of| of.kind == "ResolvedRefs").unwrap();
        assert!(!resolved.status, "{reference}");
        resolved.reason
    };
    let refused = ["name: missing", "name: empty", "name: a, group: a.example", "name: a, kind: ConfigMap"];
    for reference in refused {
        assert_eq!(reason(reference), "InvalidClientCertificateRef", "{reference}");
    }
    assert_eq!(reason("name: a, namespace: web"), "RefNotPermitted");
    let elsewhere = "---\napiVersion: v1\nkind: Service\nmetadata: {name: edge, namespace: web}\n\
                     spec: {clusterIP: 10.0.0.2, selector: {app: edge}, ports: [{name: http, port: 80}]}\n";
    let addressed = gateway("name: own").replace(
        "  listeners:",
        "  addresses: [{type: Hostname, value: edge.web.svc.cluster.local}]\n  listeners:",
    );
    let own = empty.replace("name: empty", "name: own").replace("other: x", "tls.crt: x, tls.key: x");
    let world = world(&[&addressed, &*own, elsewhere].concat());
    let labels = crate::api::Labels::from([("app".to_owned(), "edge".to_owned())]);
    let gateways = world.gateways("web", &labels);
    assert!(!gateways.is_empty() && gateways.iter().all(|of| of.spec.client_credential.is_none()));
}
