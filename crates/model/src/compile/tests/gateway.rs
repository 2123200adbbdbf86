//! Gateways: merging of servers, secrets, and what a change affects.

use skysail_xds::envoy::pb::envoy::extensions::transport_sockets::tls::v3::{
    DownstreamTlsContext, Secret, common_tls_context::ValidationContextType, secret::Type,
};

use super::*;
use crate::api::Kind as ObjectKind;

const GATEWAY: &str = r#"
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge, namespace: shop}
spec:
  selector: {app: edge}
  servers:
  - {port: {number: 80, name: http, protocol: HTTP}, hosts: ["*.example.com"]}
  - {port: {number: 443, name: a, protocol: HTTPS}, hosts: [a.example.com], tls: {mode: SIMPLE, credentialName: pair}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: a, namespace: shop}
spec:
  hosts: [a.example.com]
  gateways: [edge]
  http: [{route: [{destination: {host: db}}]}]
"#;

fn gateway() -> ProxyView {
    let labels = Arc::new(BTreeMap::from([("app".into(), "edge".into())]));
    ProxyView { role: Role::Router, labels, is_authenticated: true, ..view() }
}

/// Returns a certificate and its key.
fn pair() -> (String, String) {
    let made = rcgen::generate_simple_self_signed(["a.example.com".to_owned()]).unwrap();
    (made.cert.pem(), made.signing_key.serialize_pem())
}

fn secret(namespace: &str, (chain, key): (&str, &str)) -> String {
    let block = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: pair, namespace: {namespace}}}\ntype: kubernetes.io/tls\n\
         stringData:\n  other: hidden\n  tls.crt: |\n{}  tls.key: |\n{}",
        block(chain),
        block(key)
    )
}

fn names(made: &Resources, kind: Kind) -> Vec<String> {
    let mut names: Vec<String> = made.iter(kind).map(|resource| resource.name.to_string()).collect();
    names.sort();
    names
}

/// Returns the filter chains of a listener.
fn at_port(made: &Resources, port: u16) -> Vec<listener::FilterChain> {
    get::<listener::Listener>(made, Kind::Listener, &format!("0.0.0.0_{port}")).filter_chains
}

#[test]
fn ports_of_the_service_are_mapped_and_servers_of_a_port_are_merged() {
    let more = r#"
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: second, namespace: shop}
spec:
  servers:
  - {port: {number: 80, name: tcp, protocol: TCP}, hosts: ["*"]}
  - {port: {number: 443, name: a, protocol: TLS}, hosts: ["./a.example.com"], tls: {}}
  - {port: {number: 443, name: b, protocol: HTTPS}, hosts: [b.example.com], tls: {mode: ISTIO_MUTUAL}}
  - {port: {number: 443, name: c, protocol: HTTPS}, hosts: [c.example.com], bind: 10.0.0.1, tls: {mode: ISTIO_MUTUAL}}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: elsewhere, namespace: shop}
spec:
  selector: {app: other}
  servers: [{port: {number: 81, name: http, protocol: HTTP}, hosts: ["*"]}]
---
apiVersion: v1
kind: Service
metadata: {name: edge, namespace: shop}
spec: {selector: {app: edge}, ports: [{name: http, port: 80, targetPort: 8080}, {name: https, port: 443, targetPort: 8443}]}
"#;
    let (made, _) = compile(&world(&format!("{GATEWAY}{more}")), &gateway());
    assert_eq!(names(&made, Kind::Listener), ["0.0.0.0_8080", "0.0.0.0_8443", "10.0.0.1_8443"]);
    let all = at_port(&made, 8443);
    let found = all.iter().filter_map(|chain| chain.filter_chain_match.clone()).flat_map(|m| m.server_names);
    assert_eq!(found.collect::<Vec<_>>(), ["a.example.com", "b.example.com"]);
    let routes = names(&made, Kind::Route);
    let own = ["https.443.a.edge.shop", "https.443.b.second.shop", "https.443.c.second.shop.10.0.0.1"];
    assert_eq!(routes, [&["http.8080"], &own[..]].concat());
    let http: route::RouteConfiguration = get(&made, Kind::Route, "http.8080");
    assert_eq!(http.virtual_hosts[0].domains, ["a.example.com"]);
}

#[test]
fn ports_of_services_with_the_address_of_the_gateway_are_mapped() {
    let entry = "
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: machine, namespace: shop}
spec:
  hosts: [edge.example.com]
  ports: [{number: 80, targetPort: 8080, name: http, protocol: HTTP}]
  resolution: STATIC
  endpoints: [{address: 192.0.2.7}]
";
    let of = |text: &str| {
        let world = world(&format!("{GATEWAY}{text}"));
        let addressed = world.services_at("shop", &["192.0.2.7".parse().unwrap()]);
        let (made, _) = compile(&world, &ProxyView { addressed, ..gateway() });
        names(&made, Kind::Listener)
    };
    assert_eq!(of(entry), ["0.0.0.0_443", "0.0.0.0_8080"]);
    let label = "labels: {experimental.istio.io/disable-gateway-port-translation: \"\"}";
    let untranslated = entry.replace("namespace: shop}", &format!("namespace: shop, {label}}}"));
    assert_eq!(of(&untranslated), ["0.0.0.0_443", "0.0.0.0_80"]);
    // The oldest service with the port decides.
    let select = "
---
apiVersion: v1
kind: Service
metadata: {name: edge, namespace: shop, creationTimestamp: \"2026-01-01T00:00:00Z\"}
spec: {selector: {app: edge}, ports: [{name: http, port: 80, targetPort: 9090}]}
";
    assert_eq!(of(&format!("{entry}{select}")), ["0.0.0.0_443", "0.0.0.0_9090"]);
}

#[test]
fn a_gateway_that_names_a_service_has_the_ports_of_that_service() {
    let service = |name: &str, target: u16, more: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop, {more}}}\n\
             spec: {{clusterIP: 10.0.0.{}, selector: {{app: edge}}, ports: [{{name: http, port: 80, targetPort: {target}}}]}}\n",
            target % 250
        )
    };
    let label = "labels: {experimental.istio.io/disable-gateway-port-translation: ''}";
    let objects = [
        service("older", 9090, "creationTimestamp: '2020-01-01T00:00:00Z'"),
        service("named", 8080, label),
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: edge, namespace: shop}\n\
         spec: {gatewayClassName: istio, addresses: [{type: Hostname, value: named}], \
         listeners: [{name: a, port: 80, protocol: HTTP}]}\n"
            .to_owned(),
    ];
    let mut world = world(&objects.concat());
    world.settle();
    assert_eq!(names(&compile(&world, &gateway()).0, Kind::Listener), ["0.0.0.0_8080"]);
}

#[test]
fn a_destination_without_a_port_gets_the_single_port_of_its_service() {
    let more = "
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: 10.96.1.1, selector: {app: db}, ports: [{name: http, port: 7777}]}
";
    let (made, _) = compile(&world(&format!("{GATEWAY}{more}")), &gateway());
    let http: route::RouteConfiguration = get(&made, Kind::Route, "http.80");
    let Some(route::route::Action::Route(to)) = &http.virtual_hosts[0].routes[0].action else { panic!() };
    let cluster =
        route::route_action::ClusterSpecifier::Cluster("outbound|7777||db.shop.svc.cluster.local".into());
    assert_eq!(to.cluster_specifier, Some(cluster));
}

#[test]
fn secrets_go_to_authenticated_gateways_of_their_namespace_only() {
    let (chain, key) = pair();
    let of = |namespace: &str, view: &ProxyView| {
        let more = format!("{GATEWAY}---\n{}", secret(namespace, (&chain, &key)));
        let (made, _) = compile(&world(&more), view);
        (names(&made, Kind::Secret), made)
    };
    let (found, made) = of("shop", &gateway());
    assert_eq!(found, ["kubernetes://pair"]);
    let sent: Secret = get(&made, Kind::Secret, "kubernetes://pair");
    let Some(Type::TlsCertificate(sent)) = sent.r#type else { panic!("not a certificate") };
    let bytes = |text: &str| Some(core::data_source::Specifier::InlineBytes(text.as_bytes().to_vec()));
    assert_eq!(sent.certificate_chain.unwrap().specifier, bytes(&chain));
    assert_eq!(sent.private_key.unwrap().specifier, bytes(&key));

    assert_eq!(of("other", &gateway()).0, [""; 0]);
    assert_eq!(of("shop", &ProxyView { is_authenticated: false, ..gateway() }).0, [""; 0]);
    assert_eq!(of("shop", &ProxyView { labels: view().labels, ..gateway() }).0, [""; 0]);
    assert_eq!(of("shop", &ProxyView { role: Role::Sidecar, ..gateway() }).0, [""; 0]);
}

#[test]
fn a_key_of_another_certificate_is_refused_and_not_shown() {
    let ((chain, _), (_, key)) = (pair(), pair());
    let found = |text: &str| {
        let parsed = parse(text, "s.yaml");
        assert!(parsed.objects.is_empty());
        parsed.diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let findings = found(&secret("shop", (&chain, &key)));
    assert!(
        findings.contains("Secret shop/pair: data: the private key does not belong to the certificate"),
        "{findings}"
    );
    assert!(!findings.contains(key.lines().nth(1).unwrap()), "{findings}");
    let findings = found("apiVersion: v1\nkind: Secret\nmetadata: {name: s}\ndata: c2VjcmV0\n");
    assert!(findings.contains("another type") && !findings.contains("c2VjcmV0"), "{findings}");
}

#[test]
fn a_change_affects_the_gateways_that_it_concerns() {
    let mut world = world(GATEWAY);
    let (gateway, elsewhere) = (gateway(), ProxyView { labels: view().labels, ..gateway() });
    let mut changed = |text: &str| {
        world.take_changes();
        for (object, origin) in parse(text, "more.yaml").objects {
            world.apply(object, origin);
        }
        let changes = world.take_changes();
        assert!(!changes.everything && !changes.routes && changes.services.is_empty(), "{changes:?}");
        [&gateway, &elsewhere, &view()].map(|view| changes.affects_own(view))
    };
    assert_eq!(changed(&GATEWAY.replace("number: 80", "number: 8080")), [true, false, false]);
    assert_eq!(
        changed(
            &GATEWAY
                .replace("number: 80", "number: 8080")
                .replace("[{destination", "[{weight: 1, destination")
        ),
        [true, false, false]
    );
    let mesh = "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: a, namespace: shop}\nspec: {}\n";
    assert_eq!(changed(mesh), [true, true, true]);
    let key = ObjectKey { kind: ObjectKind::Gateway, namespace: "shop".into(), name: "edge".into() };
    world.take_changes();
    assert!(world.delete(&key) && world.take_changes().affects_own(&gateway));

    // Secrets affect the secrets of gateways only.
    let (chain, key) = pair();
    for (object, origin) in parse(&secret("shop", (&chain, &key)), "secret.yaml").objects {
        world.apply(object, origin);
    }
    let changes = world.take_changes();
    let own = [&gateway, &elsewhere, &view()].map(|view| changes.affects_own(view));
    let secrets = [&gateway, &elsewhere, &view()].map(|view| changes.affects_secrets(view));
    assert_eq!((own, secrets), ([false; 3], [true, true, false]));
    assert!(!changes.affects_shared(), "{changes:?}");
}

#[test]
fn authorization_policies_apply_to_gateways() {
    let more = "
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: deny, namespace: shop}
spec: {action: DENY, selector: {matchLabels: {app: edge}}, rules: [{to: [{operation: {paths: [/admin]}}]}]}
";
    let (made, _) = compile(&world(&format!("{GATEWAY}{more}")), &gateway());
    let all = at_port(&made, 80);
    let managers = all.iter().flat_map(configs).filter_map(unpack::<HttpConnectionManager>);
    let managers: Vec<_> = managers.collect();
    assert!(managers[0].http_filters.iter().any(|filter| filter.name == "envoy.filters.http.rbac"));
}

#[test]
fn certificates_come_from_several_secrets_or_files() {
    let sources = |tls: &str| {
        let text = GATEWAY.replace("{mode: SIMPLE, credentialName: pair}", tls);
        let (made, _) = compile(&world(&text), &gateway());
        let socket = at_port(&made, 443).remove(0).transport_socket.unwrap();
        let Some(core::transport_socket::ConfigType::TypedConfig(any)) = socket.config_type else { panic!() };
        let context: DownstreamTlsContext = unpack(&any).unwrap();
        let requires = context.require_client_certificate.unwrap().value;
        let common = context.common_tls_context.unwrap();
        let mut names: Vec<String> =
            common.tls_certificate_sds_secret_configs.into_iter().map(|config| config.name).collect();
        if let Some(ValidationContextType::CombinedValidationContext(both)) = common.validation_context_type {
            names.push(both.validation_context_sds_secret_config.unwrap().name);
            let list = both.default_validation_context.unwrap().crl.and_then(|list| list.specifier);
            names.extend(list.map(|list| match list {
                core::data_source::Specifier::Filename(name) => name,
                other => panic!("{other:?}"),
            }));
        }
        (names.join(" "), requires)
    };
    for (tls, names, requires) in [
        ("{mode: SIMPLE, credentialNames: [rsa, ec]}", "kubernetes://rsa kubernetes://ec", false),
        (
            "{mode: MUTUAL, credentialName: a, caCertCredentialName: roots}",
            "kubernetes://a kubernetes://roots",
            true,
        ),
        ("{mode: OPTIONAL_MUTUAL, credentialName: a}", "kubernetes://a kubernetes://a-cacert", false),
        (
            "{mode: SIMPLE, tlsCertificates: [{serverCertificate: /a, privateKey: /b}]}",
            "file-cert:/a~/b",
            false,
        ),
        (
            "{mode: MUTUAL, tlsCertificates: [{serverCertificate: /a, privateKey: /b, caCertificates: /c}], \
             caCrl: /d}",
            "file-cert:/a~/b file-root:/c /d",
            true,
        ),
        ("{mode: ISTIO_MUTUAL}", "default ROOTCA", true),
        ("{mode: SIMPLE, credentialName: 'builtin://'}", "default", false),
        ("{mode: MUTUAL, credentialName: 'builtin://'}", "default ROOTCA", true),
        (
            "{mode: MUTUAL, credentialName: 'builtin://', caCertCredentialName: roots}",
            "default kubernetes://roots",
            true,
        ),
    ] {
        assert_eq!(sources(tls), (names.to_owned(), requires), "{tls}");
    }
}

#[test]
fn a_listener_without_routes_for_its_connections_is_left_out() {
    let more = r#"
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: bytes, namespace: shop}
spec:
  selector: {app: edge}
  servers:
  - {port: {number: 81, name: tcp, protocol: TCP}, hosts: ["*"]}
  - {port: {number: 82, name: pass, protocol: TLS}, hosts: ["*.example.com"], tls: {}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: pass, namespace: shop}
spec:
  hosts: ["*.example.com"]
  gateways: [bytes]
  tls:
  - {match: [{sniHosts: [b.example.com]}], route: [{destination: {host: db, port: {number: 3306}}}]}
  - {match: [{sniHosts: [b.example.com]}], route: [{destination: {host: db, port: {number: 80}}}]}
"#;
    let (made, _) = compile(&world(&format!("{GATEWAY}{more}")), &gateway());
    assert_eq!(names(&made, Kind::Listener), ["0.0.0.0_443", "0.0.0.0_80", "0.0.0.0_82"]);
    let all = at_port(&made, 82);
    assert_eq!(all.len(), 1, "Envoy refuses two chains with one match");
    let proxies = all.iter().flat_map(configs).filter_map(unpack::<TcpProxy>);
    let prefixes: Vec<_> = proxies.map(|proxy| proxy.stat_prefix).collect();
    assert_eq!(prefixes, ["outbound|3306||db.shop.svc.cluster.local"]);
}
