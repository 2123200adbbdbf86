//! Settings of proxies: of the mesh configuration, of a pod's annotation and of a node.

use skysail_xds::envoy::pb::envoy::{
    config::trace::v3::{OpenTelemetryConfig, ZipkinConfig, tracing},
    extensions::filters::network::http_connection_manager::v3::http_connection_manager::{
        ForwardClientCertDetails, ServerHeaderTransformation,
    },
};

use super::*;
use crate::{ProxyNode, api::kube::Locality};

const GATEWAY: &str = r#"
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge, namespace: shop}
spec:
  selector: {app: edge}
  servers: [{port: {number: 8080, name: http, protocol: HTTP}, hosts: ["*"]}]
"#;

/// Returns a mesh configuration with these settings, which are one line, and a Gateway.
fn mesh(settings: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\ndata:\n  mesh: |\n    \
         {settings}\n{GATEWAY}"
    )
}

fn manager(chain: &listener::FilterChain) -> HttpConnectionManager {
    configs(chain).into_iter().find_map(unpack::<HttpConnectionManager>).unwrap()
}

/// Returns the listener of a gateway, and its connection manager.
fn at_gateway(text: &str) -> (listener::Listener, HttpConnectionManager) {
    let labels = Arc::new(BTreeMap::from([("app".into(), "edge".into())]));
    let (made, _) = compile(&world(text), &ProxyView { role: Role::Router, labels, ..view() });
    let listener: listener::Listener = get(&made, Kind::Listener, "0.0.0.0_8080");
    let manager = manager(&listener.filter_chains[0]);
    (listener, manager)
}

#[test]
fn the_proxies_in_front_of_a_gateway_are_trusted() {
    let (plain, _) = at_gateway(GATEWAY);
    assert!(plain.listener_filters.is_empty());
    let topology = "{numTrustedProxies: 2, proxyProtocol: {}, forwardClientCertDetails: APPEND_FORWARD}";
    let (listener, manager) = at_gateway(&mesh(&format!("defaultConfig: {{gatewayTopology: {topology}}}")));
    assert_eq!(listener.listener_filters[0].name, "envoy.filters.listener.proxy_protocol");
    assert_eq!(manager.xff_num_trusted_hops, 2);
    assert_eq!(manager.forward_client_cert_details(), ForwardClientCertDetails::AppendForward);
    assert!(manager.set_current_client_cert_details.is_some());
}

#[test]
fn headers_are_set_as_configured() {
    let headers = "{server: {disabled: true}, xForwardedPort: {enabled: true}, forwardedClientCert: SANITIZE_SET, \
                    setCurrentClientCertDetails: {subject: false, cert: true}}";
    let world = world(&mesh(&format!("defaultConfig: {{proxyHeaders: {headers}}}")));
    let (made, _) = compile(&world, &view());
    let manager = manager(&chains(&made, 8080)[0]);
    assert_eq!(manager.server_header_transformation(), ServerHeaderTransformation::PassThrough);
    assert_eq!(manager.server_name, "");
    assert!(manager.append_x_forwarded_port);
    assert_eq!(manager.forward_client_cert_details(), ForwardClientCertDetails::SanitizeSet);
    let details = manager.set_current_client_cert_details.unwrap();
    assert_eq!(details.subject.map(|subject| subject.value), Some(false));
    assert!(details.cert && details.dns && details.uri && !details.chain);
}

#[test]
fn rewritten_requests_name_their_first_host_on_demand() {
    let rule = r#"
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: db, namespace: shop}
spec:
  hosts: [db]
  http: [{rewrite: {authority: other}, route: [{destination: {host: db}}]}]
"#;
    for (settings, expected) in [("{}", false), ("{xForwardedHost: {enabled: true}}", true)] {
        let text = mesh(&format!("defaultConfig: {{proxyHeaders: {settings}}}")) + rule;
        let (made, _) = compile(&world(&text), &view());
        let routes: route::RouteConfiguration = get(&made, Kind::Route, "80");
        let host = routes.virtual_hosts.iter().find(|host| host.name.starts_with("db.shop")).unwrap();
        let Some(route::route::Action::Route(to)) = &host.routes[0].action else { panic!("no action") };
        assert_eq!(to.append_x_forwarded_host, expected);
    }
}

#[test]
fn a_pod_or_a_machine_changes_settings_of_the_mesh() {
    let annotated = |text: &str| {
        let pod = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web-1, namespace: shop, annotations: \
             {{proxy.istio.io/config: {text:?}}}}}\nspec: {{containers: [{{name: web, image: web}}]}}\n---\n"
        );
        pod + &mesh("defaultConfig: {proxyHeaders: {attemptCount: {disabled: true}}}")
    };
    let counts = |pod: &str, text: &str, config: serde_json::Value| {
        let world = world(&annotated(text));
        let id = format!("sidecar~10.244.0.9~{pod}.shop~shop.svc.cluster.local");
        let metadata = serde_json::json!({"PROXY_CONFIG": config});
        let mut node = ProxyNode::parse(&id, metadata, Locality::default()).unwrap();
        assert_eq!(world.identify(&mut node, "Kubernetes"), Ok(pod == "web-1"));
        let (made, _) = compile(&world, &node.view);
        let routes: route::RouteConfiguration = get(&made, Kind::Route, "80");
        routes.virtual_hosts[0].include_request_attempt_count
    };
    let on = serde_json::json!({"proxyHeaders": {"attemptCount": {"disabled": false}}, "concurrency": 2});
    assert!(!counts("web-1", "", serde_json::Value::Null));
    assert!(counts("web-1", "proxyHeaders: {attemptCount: {disabled: false}}", serde_json::Value::Null));
    // Settings that a proxy declares itself apply only if its pod is unknown.
    assert!(!counts("web-1", "", on.clone()));
    assert!(counts("machine", "", on));
    // Settings that cannot be read have no effect.
    let wrong = serde_json::json!({"proxyHeaders": 3});
    assert!(!counts("web-1", "proxyHeaders: [", wrong.clone()));
    assert!(!counts("machine", "", wrong));
}

#[test]
fn settings_of_an_annotation_without_effect_are_named() {
    let pod = |text: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: a, annotations: {{proxy.istio.io/config: {text:?}}}}}\nspec: \
             {{containers: [{{name: a, image: a}}]}}\n"
        );
        let findings = parse(&text, "a.yaml").diagnostics;
        findings.iter().map(|found| found.message.clone()).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(pod("proxyHeaders: {requestId: {disabled: true}}"), "");
    for (text, name) in [
        ("statusPort: 1", "statusPort"),
        (
            "connectionSettings: {httpMergeSlashes: true, listenerConnectionLimit: 1}",
            "connectionSettings.listenerConnectionLimit",
        ),
    ] {
        assert!(pod(text).contains(&format!("setting {name} is not supported")), "{}", pod(text));
    }
    let low = pod("connectionSettings: {httpMaxConcurrentStreams: 0}");
    assert_eq!(low, "connectionSettings.httpMaxConcurrentStreams is below 1 and has no effect");
    assert!(pod("proxyHeaders: 3").contains("cannot be read"));
}

#[test]
fn curves_and_ciphers_of_the_mesh_are_used() {
    let text = mesh("meshMTLS: {minProtocolVersion: TLSV1_3, cipherSuites: [ECDHE-RSA-AES256-GCM-SHA384]}");
    let (made, _) = compile(&world(&text), &view());
    let chain = chains(&made, 8080).remove(0);
    let Some(core::transport_socket::ConfigType::TypedConfig(any)) =
        chain.transport_socket.unwrap().config_type
    else {
        panic!("no TLS")
    };
    let context: skysail_xds::envoy::pb::envoy::extensions::transport_sockets::tls::v3::DownstreamTlsContext =
        unpack(&any).unwrap();
    let params = context.common_tls_context.unwrap().tls_params.unwrap();
    assert_eq!(params.cipher_suites, ["ECDHE-RSA-AES256-GCM-SHA384"]);
    assert_eq!(params.tls_minimum_protocol_version, 4);
}

#[test]
fn zones_share_by_capacity_unless_disabled() {
    use cluster::cluster::common_lb_config::LocalityConfigSpecifier;
    let specifier = |mesh_wide: &str, balancer: &str| {
        let rule = format!(
            "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: db, namespace: shop}}\n\
             spec: {{host: db, trafficPolicy: {{loadBalancer: {{{balancer}}}}}}}\n"
        );
        let (made, _) = compile(&world(&(mesh(mesh_wide) + &rule)), &view());
        let cluster: cluster::Cluster = get(&made, Kind::Cluster, "outbound|80||db.shop.svc.cluster.local");
        match cluster.common_lb_config.unwrap().locality_config_specifier {
            Some(LocalityConfigSpecifier::ZoneAwareLbConfig(zones)) => {
                let share = zones.routing_enabled.map(|percent| percent.value);
                Some((share, zones.min_cluster_size.map(|size| size.value)))
            }
            _ => None,
        }
    };
    assert_eq!(specifier("{}", ""), None);
    assert_eq!(specifier("{}", "zoneAwareLbSetting: {minClusterSize: 3}"), Some((None, Some(3))));
    assert_eq!(specifier("{}", "zoneAwareLbSetting: {enabled: false}"), Some((Some(0.0), None)));
    assert_eq!(specifier("zoneAwareLbSetting: {}", ""), Some((None, None)));
    // The rule's own setting of either kind takes precedence.
    assert_eq!(specifier("zoneAwareLbSetting: {}", "localityLbSetting: {enabled: true}"), None);
}

/// Envoy refuses a URI without a timeout.
#[test]
fn reports_over_http_always_have_a_timeout() {
    let seconds_of = |timeout: &str| {
        let provider = format!(
            "{{name: otel, opentelemetry: {{service: db.shop.svc.cluster.local, port: 7000, http: {{path: /v1/traces{timeout}}}}}}}"
        );
        let settings = format!("{{extensionProviders: [{provider}], defaultProviders: {{tracing: [otel]}}}}");
        let (made, _) = compile(&world(&mesh(&settings)), &view());
        let spans = manager(&chains(&made, 8080)[0]).tracing.unwrap();
        let tracing::http::ConfigType::TypedConfig(config) = spans.provider.unwrap().config_type.unwrap();
        let config: OpenTelemetryConfig = unpack(&config).unwrap();
        config.http_service.unwrap().http_uri.unwrap().timeout.unwrap().seconds
    };
    assert_eq!(seconds_of(""), 10);
    assert_eq!(seconds_of(", timeout: 3s"), 3);
}

#[test]
fn the_address_of_zipkin_is_a_service_or_a_host() {
    const ENTRY: &str = "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: HOST, namespace: shop}
spec: {hosts: [HOST], ports: [{number: 7000, name: http, protocol: HTTP}], resolution: DNS}
";
    let cluster = |address: &str, entry: &str| {
        let settings = format!(
            "{{enableTracing: true, defaultConfig: {{tracing: {{zipkin: {{address: \"{address}\"}}}}}}}}"
        );
        let world = world(&format!("{}{}", mesh(&settings), ENTRY.replace("HOST", entry)));
        let reported: Vec<String> = world.validate().iter().map(|of| of.field.clone()).collect();
        let (made, _) = compile(&world, &view());
        let provider = manager(&chains(&made, 8080)[0]).tracing.unwrap().provider;
        let is_reported = reported.iter().any(|field| field.ends_with("zipkin.address"));
        assert_eq!(is_reported, provider.is_none(), "{reported:?}");
        let Some(tracing::http::ConfigType::TypedConfig(config)) = provider?.config_type else { return None };
        Some(unpack::<ZipkinConfig>(&config).unwrap().collector_service?.http_uri?.uri)
    };
    let service = Some("http://db.shop.svc.cluster.local/api/v2/spans".to_owned());
    assert_eq!(cluster("db.shop:7000", "other.example"), service);
    assert_eq!(cluster("db.shop:7000", "db.shop"), service, "an entry takes no service's spans");
    assert_eq!(cluster("example.com:7000", "example.com"), Some("http://example.com/api/v2/spans".into()));
    assert_eq!(cluster("example.com:7000", "other.example"), None);
}
