//! Each part and operation, the order of EnvoyFilters, and the choice of proxies.

use std::sync::Arc;

use prost_reflect::DynamicMessage;
use serde_json::json;
use skysail_xds::{Kind, Resources};

use super::*;
use crate::{ProxyNode, api::kube::Locality, compile, parse};

const BASE: &str = r"
apiVersion: v1
kind: Service
metadata: {name: stock, namespace: shop}
spec: {clusterIP: 10.0.0.1, selector: {app: stock}, ports: [{name: http, port: 80, targetPort: 9090}, {name: tcp, port: 81}]}
";
const MANAGER: &str = "{filterChain: {filter: {name: envoy.filters.network.http_connection_manager}}}";

fn world_of(text: &str) -> World {
    let mut world = World::new();
    for text in [BASE, text] {
        let parsed = parse(text, "test.yaml");
        let errors: Vec<String> = parsed.diagnostics.iter().map(ToString::to_string).collect();
        assert_eq!(errors, [""; 0]);
        for (object, origin) in parsed.objects {
            world.apply(object, origin);
        }
    }
    world
}

fn view_of(world: &World, app: &str, metadata: &serde_json::Value) -> ProxyView {
    let mut fields = json!({"LABELS": {"app": app}, "ISTIO_VERSION": "1.32.0"});
    for (key, value) in metadata.as_object().into_iter().flatten() {
        fields[key] = value.clone();
    }
    let id = format!("sidecar~10.0.1.1~{app}.shop~shop.svc.cluster.local");
    let mut node = ProxyNode::parse(&id, fields, Locality::default()).unwrap();
    world.identify(&mut node, "Kubernetes").unwrap();
    node.view
}

/// Returns an EnvoyFilter with one patch.
fn filter(apply_to: &str, matched: &str, operation: &str, value: &str) -> String {
    named("one", "shop", "", apply_to, matched, operation, value)
}

fn named(
    name: &str,
    namespace: &str,
    more: &str,
    apply_to: &str,
    matched: &str,
    operation: &str,
    value: &str,
) -> String {
    let value = if value.is_empty() { String::new() } else { format!(", value: {value}") };
    format!(
        "---\napiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\nmetadata: {{name: {name}, namespace: \
         {namespace}}}\nspec:\n  configPatches:\n  - applyTo: {apply_to}\n    match: {matched}\n    patch: {{operation: \
         {operation}{value}}}\n{more}"
    )
}

/// Compiles for workload `stock`.
fn compiled(text: &str) -> Resources {
    let world = world_of(text);
    compile(&world, &view_of(&world, "stock", &json!({}))).0
}

fn message(made: &Resources, kind: Kind, name: &str) -> DynamicMessage {
    decode(made.get(kind, name).unwrap_or_else(|| panic!("no {kind} {name}"))).unwrap()
}

/// Returns the message as JSON text.
fn shown(message: &DynamicMessage) -> String {
    serde_json::to_string(message).unwrap()
}

fn names(message: &mut DynamicMessage, field: &str) -> Vec<String> {
    take_names(&reflect::take_list(message, field))
}

fn take_names(list: &[DynamicMessage]) -> Vec<String> {
    list.iter().map(|one| reflect::text(one, "name")).collect()
}

/// Returns the chains of the inbound listener.
fn chains(made: &Resources) -> Vec<DynamicMessage> {
    reflect::take_list(&mut message(made, Kind::Listener, "virtualInbound"), "filter_chains")
}

/// Returns the filters of the chain of the workload's port.
fn network_filters(made: &Resources) -> Vec<DynamicMessage> {
    let mut chains = chains(made);
    let chain = chains.iter_mut().find(|chain| shown(chain).contains("\"destinationPort\":9090")).unwrap();
    reflect::take_list(chain, "filters")
}

fn http_filters(made: &Resources) -> Vec<String> {
    let manager = network_filters(made).pop().unwrap();
    let mut manager = reflect::unpack(reflect::child(&manager, "typed_config").unwrap()).unwrap();
    names(&mut manager, "http_filters")
}

const BUFFER: &str = "{name: extra, typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer, max_request_bytes: 1}}";

#[test]
fn http_filters_are_inserted_replaced_and_removed() {
    let router = "{context: SIDECAR_INBOUND, listener: {filterChain: {filter: {name: envoy.filters.network.http_connection_manager, subFilter: {name: envoy.filters.http.router}}}}}";
    let anywhere = format!("{{context: SIDECAR_INBOUND, listener: {MANAGER}}}");
    let before = http_filters(&compiled(""));
    let last = before.len() - 1;
    assert_eq!(before[last], "envoy.filters.http.router");
    let with = |matched: &str, operation: &str| {
        http_filters(&compiled(&filter("HTTP_FILTER", matched, operation, BUFFER)))
    };
    let insert = |at: usize| {
        let mut list = before.clone();
        list.insert(at, "extra".into());
        list
    };
    assert_eq!(with(router, "INSERT_BEFORE"), insert(last));
    assert_eq!(with(router, "INSERT_AFTER"), insert(last + 1));
    assert_eq!(with(router, "INSERT_FIRST"), insert(0));
    assert_eq!(with(router, "ADD"), insert(last + 1));
    assert_eq!(with(&anywhere, "INSERT_BEFORE"), insert(0));
    assert_eq!(with(&anywhere, "INSERT_AFTER"), insert(last + 1));
    assert_eq!(with(&router.replace("http.router", "http.none"), "INSERT_BEFORE"), before);
    assert_eq!(with(&router.replace("INBOUND", "OUTBOUND"), "INSERT_FIRST"), before);
    let mut replaced = before.clone();
    replaced[last] = "extra".into();
    assert_eq!(with(router, "REPLACE"), replaced);
    assert_eq!(http_filters(&compiled(&filter("HTTP_FILTER", router, "REMOVE", ""))), before[..last]);
    // MERGE may change the name and merges the configuration.
    let cors = router.replace("http.router", "http.cors");
    let value = "{name: other, typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.cors.v3.Cors}}";
    assert!(http_filters(&compiled(&filter("HTTP_FILTER", &cors, "MERGE", value))).contains(&"other".into()));
}

#[test]
fn network_filters_are_patched() {
    let matched = format!("{{context: SIDECAR_INBOUND, listener: {MANAGER}}}");
    let value = "{typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager, xff_num_trusted_hops: 3}}";
    let merged = network_filters(&compiled(&filter("NETWORK_FILTER", &matched, "MERGE", value)));
    let manager = reflect::unpack(reflect::child(merged.last().unwrap(), "typed_config").unwrap()).unwrap();
    assert_eq!(reflect::number(&manager, "xff_num_trusted_hops"), Some(3));
    assert!(!reflect::text(&manager, "stat_prefix").is_empty());

    let limit = "{name: limit, typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit, stat_prefix: l}}";
    let before = take_names(&network_filters(&compiled("")));
    let with = |operation: &str| {
        let value = if operation == "REMOVE" { "" } else { limit };
        take_names(&network_filters(&compiled(&filter("NETWORK_FILTER", &matched, operation, value))))
    };
    let position = before.len() - 1;
    assert_eq!(with("INSERT_BEFORE")[position], "limit");
    assert_eq!(with("INSERT_AFTER")[position + 1], "limit");
    assert_eq!(with("INSERT_FIRST")[0], "limit");
    assert_eq!(with("ADD")[position + 1], "limit");
    assert_eq!(with("REPLACE")[position], "limit");
    assert_eq!(with("REMOVE"), before[..position]);
}

#[test]
fn listeners_chains_and_listener_filters_are_patched() {
    let inbound = "{context: SIDECAR_INBOUND, listener: {name: virtualInbound}}";
    let made = compiled(&filter("LISTENER", inbound, "MERGE", "{per_connection_buffer_limit_bytes: 8192}"));
    let listener = message(&made, Kind::Listener, "virtualInbound");
    assert_eq!(reflect::number(&listener, "per_connection_buffer_limit_bytes"), Some(8192));
    let outbound = "{context: SIDECAR_OUTBOUND, listener: {portNumber: 80}}";
    let made = compiled(&filter("LISTENER", outbound, "REMOVE", ""));
    assert!(made.get(Kind::Listener, "0.0.0.0_80").is_none());
    let made = compiled(&filter("LISTENER", "{context: SIDECAR_OUTBOUND}", "ADD", "{name: extra}"));
    assert!(made.get(Kind::Listener, "extra").is_some());

    let tls = "{context: SIDECAR_INBOUND, listener: {filterChain: {transportProtocol: tls, destinationPort: 9090}}}";
    let made = compiled(&filter("FILTER_CHAIN", tls, "MERGE", "{transport_socket_connect_timeout: 6s}"));
    let with = chains(&made).into_iter().filter(|chain| shown(chain).contains("\"6s\""));
    assert_eq!(with.count(), 1);
    let socket = "{transport_socket: {name: envoy.transport_sockets.tls, typed_config: {'@type': type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext, session_timeout: 7s}}}";
    let made = compiled(&filter("FILTER_CHAIN", tls, "MERGE", socket));
    let chain =
        chains(&made).into_iter().find(|chain| shown(chain).contains("\"sessionTimeout\":\"7s\"")).unwrap();
    assert!(shown(&chain).contains("requireClientCertificate"), "the rest of the socket stays");
    let count = chains(&compiled("")).len();
    assert_eq!(chains(&compiled(&filter("FILTER_CHAIN", tls, "REMOVE", ""))).len(), count - 1);
    let added = filter("FILTER_CHAIN", inbound, "ADD", "{name: extra, filters: [{name: x}]}");
    assert_eq!(chains(&compiled(&added)).len(), count + 1);

    let filters = |operation: &str, value: &str| {
        let matched = "{context: SIDECAR_INBOUND, listener: {name: virtualInbound, listenerFilter: envoy.filters.listener.tls_inspector}}";
        let made = compiled(&filter("LISTENER_FILTER", matched, operation, value));
        names(&mut message(&made, Kind::Listener, "virtualInbound"), "listener_filters")
    };
    let before = names(&mut message(&compiled(""), Kind::Listener, "virtualInbound"), "listener_filters");
    let at = before.iter().position(|name| name.ends_with("tls_inspector")).unwrap();
    assert_eq!(filters("INSERT_BEFORE", "{name: x}")[at], "x");
    assert_eq!(filters("INSERT_AFTER", "{name: x}")[at + 1], "x");
    assert_eq!(filters("INSERT_FIRST", "{name: x}")[0], "x");
    assert_eq!(filters("ADD", "{name: x}").last().unwrap(), "x");
    assert_eq!(filters("REPLACE", "{name: x}")[at], "x");
    assert_eq!(filters("REMOVE", "").len(), before.len() - 1);
}

#[test]
fn clusters_are_patched() {
    const STOCK: &str = "outbound|80||stock.shop.svc.cluster.local";
    let of_service =
        "{context: SIDECAR_OUTBOUND, cluster: {service: stock.shop.svc.cluster.local, portNumber: 80}}";
    let made = compiled(&filter("CLUSTER", of_service, "MERGE", "{connect_timeout: 4s}"));
    assert!(shown(&message(&made, Kind::Cluster, STOCK)).contains("\"connectTimeout\":\"4s\""));
    let other = message(&made, Kind::Cluster, "outbound|81||stock.shop.svc.cluster.local");
    assert!(!shown(&other).contains("\"connectTimeout\":\"4s\""));

    let thresholds = "{circuit_breakers: {thresholds: [{max_retries: 9}]}}";
    let count = |operation: &str| {
        let made = compiled(&filter("CLUSTER", of_service, operation, thresholds));
        shown(&message(&made, Kind::Cluster, STOCK)).matches("maxRetries").count()
    };
    assert_eq!((count("MERGE"), count("MERGE_AND_REPLACE_LIST")), (2, 1));

    let made = compiled(&filter("CLUSTER", of_service, "REMOVE", ""));
    assert!(made.get(Kind::Cluster, STOCK).is_none() && made.get(Kind::Endpoint, STOCK).is_none());
    let made = compiled(&filter("CLUSTER", "{}", "ADD", "{name: extra, connect_timeout: 1s}"));
    assert!(made.get(Kind::Cluster, "extra").is_some());

    let inbound = "{context: SIDECAR_INBOUND, cluster: {service: stock.shop.svc.cluster.local}}";
    let made = compiled(&filter("CLUSTER", inbound, "MERGE", "{connect_timeout: 4s}"));
    assert!(shown(&message(&made, Kind::Cluster, "inbound|9090||")).contains("\"connectTimeout\":\"4s\""));
    assert!(!shown(&message(&made, Kind::Cluster, STOCK)).contains("\"connectTimeout\":\"4s\""));

    let socket = "{transport_socket: {name: tlsMode-none, typed_config: {'@type': type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext, sni: other}}}";
    let made = compiled(&filter("CLUSTER", of_service, "MERGE", socket));
    assert!(
        !shown(&message(&made, Kind::Cluster, STOCK))
            .contains("\"transportSocket\":{\"name\":\"tlsMode-none")
    );
    let same = socket.replace("tlsMode-none", "envoy.transport_sockets.tls");
    let made = compiled(&filter("CLUSTER", of_service, "MERGE", &same));
    assert!(shown(&message(&made, Kind::Cluster, STOCK)).contains("\"sni\":\"other\""));
}

/// Returns route configuration 80 as text.
fn routes(apply_to: &str, matched: &str, operation: &str, value: &str) -> String {
    let matched = format!("{{context: SIDECAR_OUTBOUND, routeConfiguration: {matched}}}");
    shown(&message(&compiled(&filter(apply_to, &matched, operation, value)), Kind::Route, "80"))
}

#[test]
fn routes_are_patched() {
    let value = "{response_headers_to_remove: [x-a]}";
    assert!(routes("ROUTE_CONFIGURATION", "{name: '80'}", "MERGE", value).contains("x-a"));
    assert!(routes("ROUTE_CONFIGURATION", "{portNumber: 80}", "MERGE", value).contains("x-a"));
    assert!(!routes("ROUTE_CONFIGURATION", "{portNumber: 82}", "MERGE", value).contains("x-a"));

    let host = "{vhost: {name: 'stock.shop.svc.cluster.local:80'}}";
    let domain = "{vhost: {domainName: stock}}";
    let attempts = "{include_request_attempt_count: true, response_headers_to_remove: [x-a]}";
    assert!(routes("VIRTUAL_HOST", host, "MERGE", attempts).contains("x-a"));
    assert!(routes("VIRTUAL_HOST", domain, "MERGE", attempts).contains("x-a"));
    assert!(!routes("VIRTUAL_HOST", host, "REMOVE", "").contains("stock.shop"));
    let other = "{name: other, domains: [other.example.com]}";
    assert!(routes("VIRTUAL_HOST", "{name: '80'}", "ADD", other).contains("other.example.com"));
    let replaced = routes("VIRTUAL_HOST", host, "REPLACE", other);
    assert!(replaced.contains("other.example.com") && !replaced.contains("stock.shop"));

    let default = "{vhost: {name: 'stock.shop.svc.cluster.local:80', route: {name: default, action: ROUTE}}}";
    let merged = routes("HTTP_ROUTE", default, "MERGE", "{route: {timeout: 11s}}");
    assert_eq!(merged.matches("\"timeout\":\"11s\"").count(), 1);
    assert!(merged.contains("outbound|80||stock"), "the cluster stays");
    let redirect = default.replace("ROUTE}", "REDIRECT}");
    assert!(!routes("HTTP_ROUTE", &redirect, "MERGE", "{route: {timeout: 11s}}").contains("11s"));
    assert!(!routes("HTTP_ROUTE", default, "REMOVE", "").contains("outbound|80||stock"));
    let ping = "{name: ping, match: {path: /ping}, direct_response: {status: 200}}";
    let order = |operation: &str, matched: &str| {
        let text = routes("HTTP_ROUTE", matched, operation, ping);
        text.find("\"ping\"").zip(text.find("\"default\"")).map(|(ping, default)| ping < default)
    };
    assert_eq!(order("INSERT_FIRST", default), Some(true));
    assert_eq!(order("INSERT_BEFORE", default), Some(true));
    assert_eq!(order("INSERT_AFTER", default), Some(false));
    assert_eq!(order("ADD", default), Some(false));
    assert_eq!(order("INSERT_FIRST", &redirect), None);
}

#[test]
fn virtual_hosts_that_are_resources_are_patched() {
    let matched = "{context: SIDECAR_OUTBOUND, routeConfiguration: {name: '80', vhost: {name: 'stock.shop.svc.cluster.local:80'}}}";
    let extra = "{name: extra, domains: [Extra.example.com], routes: []}";
    let text = [
        filter("VIRTUAL_HOST", matched, "MERGE", "{response_headers_to_remove: [x-a]}"),
        named("two", "shop", "", "HTTP_ROUTE", matched, "MERGE", "{route: {timeout: 11s}}"),
        named("three", "shop", "", "VIRTUAL_HOST", "{routeConfiguration: {name: '80'}}", "ADD", extra),
    ]
    .concat();
    let world = world_of(&text);
    let view = view_of(&world, "stock", &json!({"SKYSAIL_VHDS": "true"}));
    assert!(view.uses_vhds);
    let (made, _) = compile(&world, &view);
    let host = shown(&message(&made, Kind::VirtualHost, "80/stock.shop.svc.cluster.local:80"));
    assert!(host.contains("x-a") && host.contains("\"11s\""), "{host}");
    assert!(made.get(Kind::VirtualHost, "80/extra").is_some());
    // A change of a host compiles all its routes, because a patch must not apply twice.
    assert!(!ClientScope::of(&view, &world.grouping()).routes_by_host());
}

#[test]
fn extension_configurations_are_added() {
    let made = compiled(&filter("EXTENSION_CONFIG", "{}", "ADD", BUFFER));
    assert!(made.get(Kind::ExtensionConfig, "extra").is_some());
}

/// Returns the access limit that the last of several filters sets.
fn hops(text: &str, app: &str, metadata: &serde_json::Value) -> Option<u32> {
    let world = world_of(text);
    let (made, _) = compile(&world, &view_of(&world, app, metadata));
    let listener = message(&made, Kind::Listener, "virtualInbound");
    reflect::number(&listener, "per_connection_buffer_limit_bytes")
}

fn limit(name: &str, namespace: &str, more: &str, proxy: &str, bytes: u32) -> String {
    let matched = format!("{{context: SIDECAR_INBOUND{proxy}}}");
    let value = format!("{{per_connection_buffer_limit_bytes: {bytes}}}");
    named(name, namespace, more, "LISTENER", &matched, "MERGE", &value)
}

#[test]
fn filters_apply_by_priority_root_first_then_age() {
    let none = json!({});
    let root = limit("z", "istio-system", "", "", 1);
    let own = limit("a", "shop", "", "", 2);
    assert_eq!(hops(&format!("{root}{own}"), "stock", &none), Some(2));
    let late = limit("z", "istio-system", "  priority: 10\n", "", 1);
    assert_eq!(hops(&format!("{late}{own}"), "stock", &none), Some(1));
    let created = |text: String, at: &str| {
        text.replace("namespace: shop}", &format!("namespace: shop, creationTimestamp: {at}}}"))
    };
    let older = created(limit("z", "shop", "", "", 3), "'2026-01-01T00:00:00Z'");
    let newer = created(limit("a", "shop", "", "", 4), "'2026-01-02T00:00:00Z'");
    assert_eq!(hops(&format!("{newer}{older}"), "stock", &none), Some(4));
    let same = created(limit("a", "shop", "", "", 4), "'2026-01-01T00:00:00Z'");
    assert_eq!(hops(&format!("{older}{same}"), "stock", &none), Some(3));
    assert_eq!(hops(&limit("a", "other", "", "", 2), "stock", &none), None);
}

#[test]
fn proxies_are_chosen_by_labels_version_and_metadata() {
    let none = json!({});
    let selector = limit("a", "shop", "  workloadSelector: {labels: {app: stock}}\n", "", 2);
    assert_eq!(hops(&selector, "stock", &none), Some(2));
    assert_eq!(hops(&selector, "front", &none), None);
    let gateway = limit(
        "a",
        "shop",
        "  targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: g}]\n",
        "",
        2,
    );
    assert_eq!(hops(&gateway, "stock", &none), None);
    let version =
        |expression: &str| limit("a", "shop", "", &format!(", proxy: {{proxyVersion: '{expression}'}}"), 2);
    assert_eq!(hops(&version(r"^1\.3[0-9].*"), "stock", &none), Some(2));
    assert_eq!(hops(&version(r"^1\.1[0-9].*"), "stock", &none), None);
    let metadata = limit("a", "shop", "", ", proxy: {metadata: {ZONE: a}}", 2);
    assert_eq!(hops(&metadata, "stock", &json!({"ZONE": "a"})), Some(2));
    assert_eq!(hops(&metadata, "stock", &json!({"ZONE": "b"})), None);
    assert_eq!(hops(&metadata, "stock", &none), None);
}

#[test]
fn scopes_differ_only_for_selected_proxies() {
    let patch = |apply_to: &str| {
        named("a", "shop", "  workloadSelector: {labels: {app: stock}}\n", apply_to, "{}", "MERGE", "{}")
    };
    let scope =
        |world: &World, app: &str| ClientScope::of(&view_of(world, app, &json!({})), &world.grouping());
    let world = world_of(&patch("CLUSTER"));
    assert_eq!(scope(&world, "front"), scope(&world, "other"));
    assert_ne!(scope(&world, "front"), scope(&world, "stock"));
    assert!(!scope(&world, "front").is_sibling(&scope(&world, "stock")));
    // Listeners belong to workloads, so their patches divide no scope.
    let world = world_of(&patch("LISTENER"));
    assert_eq!(scope(&world, "front"), scope(&world, "stock"));
    assert_eq!(world.grouping(), World::new().grouping());
}

#[test]
fn views_have_only_the_metadata_that_filters_compare() {
    let declared = json!({"ZONE": "a", "OTHER": "b"});
    assert!(view_of(&world_of(""), "stock", &declared).metadata.is_empty());
    let world = world_of(&limit("a", "shop", "", ", proxy: {metadata: {ZONE: a}}", 2));
    let keys: Vec<_> = view_of(&world, "stock", &declared).metadata.keys().cloned().collect();
    assert_eq!(keys, ["ZONE"]);
}

#[test]
fn a_patch_of_another_type_is_reported() {
    let matched = format!("{{context: SIDECAR_INBOUND, listener: {MANAGER}}}");
    let value = "{typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy}}";
    let world = world_of(&filter("NETWORK_FILTER", &matched, "MERGE", value));
    let view = view_of(&world, "stock", &json!({}));
    let (_, findings) = compile(&world, &view);
    let found: Vec<&Diagnostic> =
        findings.iter().filter(|found| found.object.starts_with("EnvoyFilter")).collect();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].field, "spec.configPatches[0].patch.value");
    assert!(found[0].message.contains("cannot be merged"), "{}", found[0].message);
    let same: Arc<_> = world.service_named("shop", "stock").unwrap().clone();
    assert_eq!(same.meta.name, "stock");
}

/// Returns field and severity of each finding about a specification.
fn findings(text: &str) -> Vec<String> {
    parse(text, "f.yaml").diagnostics.iter().map(ToString::to_string).collect()
}

#[test]
fn errors_have_field_and_line() {
    let text = "apiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\nmetadata: {name: a, namespace: shop}\nspec:\n  configPatches:\n  - applyTo: CLUSTER\n    patch:\n      operation: MERGE\n      value:\n        connect_timeout: 1s\n        circuit_breakers:\n          thresholds:\n          - max_retrys: 3\n";
    assert_eq!(
        findings(text),
        [
            "f.yaml:13: warning: EnvoyFilter shop/a: spec.configPatches[0].patch.value.circuit_breakers.thresholds[0].max_retrys: \
          envoy.config.cluster.v3.CircuitBreakers.Thresholds has no field \"max_retrys\", so it has no effect; did you mean max_retries? [SKY0126]"
        ]
    );
    let has = |text: &str, part: &str| {
        let found = findings(text);
        assert!(found.iter().any(|one| one.contains(part)), "{part}: {found:?}");
    };
    has(
        &filter("BOOTSTRAP", "{}", "MERGE", "{}"),
        "warning: EnvoyFilter shop/one: spec.configPatches[0].applyTo: BOOTSTRAP",
    );
    has(
        &filter("CLUSTER", "{listener: {}}", "MERGE", "{}"),
        "match.listener: does not belong to applyTo CLUSTER",
    );
    has(&filter("CLUSTER", "{context: WAYPOINT}", "MERGE", "{}"), "no waypoints");
    has(&filter("CLUSTER", "{}", "MERGE", ""), "patch.value: is missing");
    has(&filter("CLUSTER", "{}", "REPLACE", "{}"), "REPLACE has no effect with applyTo CLUSTER");
    has(&filter("HTTP_FILTER", "{}", "REMOVE", ""), "REMOVE has no effect without the name of a filter");
    has(
        &filter("CLUSTER", "{proxy: {proxyVersion: '('}}", "MERGE", "{}"),
        "proxyVersion: \"(\" is not an RE2",
    );
    has(&filter("CLUSTERS", "{}", "MERGE", "{}"), "did you mean CLUSTER?");
    has(&filter("HTTP_FILTER", "{}", "MERGE", "{typed_config: {}}"), "typed_config: \"@type\" is missing");
}
