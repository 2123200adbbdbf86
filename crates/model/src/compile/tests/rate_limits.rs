//! RateLimitPolicies: the proxies and chains that they apply to, and what a change affects.

use skysail_xds::envoy::pb::envoy::{
    config::route::v3::FilterConfig,
    extensions::filters::{
        http::{
            header_mutation::v3::HeaderMutation, local_ratelimit::v3::LocalRateLimit,
            ratelimit::v3::RateLimit as GlobalRateLimit,
        },
        network::http_connection_manager::v3::HttpFilter,
    },
};

use super::*;
use crate::api::Kind as ObjectKind;

const PROVIDER: &str = r"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    extensionProviders:
    - name: limits
      envoyRateLimit: {service: db.shop.svc.cluster.local, port: 7000, timeout: 1s, domain: d, failClosed: true, statusOnError: 503}
---
";

fn policy(target: &str, rules: &str) -> String {
    format!(
        "apiVersion: skysail.io/v1alpha1\nkind: RateLimitPolicy\nmetadata: {{name: p, namespace: shop}}\nspec:\n  {target}\n  rules:\n{rules}\n---\n"
    )
}

const RULE: &str = "  - {name: all, limit: {requests: 5, unit: MINUTE}}";

fn filters_of(chain: &listener::FilterChain) -> Vec<HttpFilter> {
    let managers = configs(chain).into_iter().filter_map(unpack::<HttpConnectionManager>);
    let filters = managers.flat_map(|manager| manager.http_filters);
    filters.filter(|filter| filter.name.starts_with("skysail.rate_limit")).collect()
}

fn config<M: Message + Name + Default>(filter: &HttpFilter) -> M {
    match &filter.config_type {
        Some(ConfigType::TypedConfig(any)) => unpack(any).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Returns the names of the filters of each HTTP port, without duplicates.
fn names_by_port(world: &World, view: &ProxyView) -> Vec<(u32, Vec<String>)> {
    let (made, _) = compile(world, view);
    let names = |port| {
        let of_chains = chains(&made, port).into_iter();
        let named = of_chains.flat_map(|chain| filters_of(&chain)).map(|filter| filter.name);
        let mut names: Vec<String> = named.collect();
        names.dedup();
        (port, names)
    };
    [8080, 7000].map(names).into_iter().filter(|(_, names)| !names.is_empty()).collect()
}

#[test]
fn a_policy_applies_to_its_targets() {
    let all = vec!["skysail.rate_limit/shop/p/all".to_owned()];
    let both = vec![(8080, all.clone()), (7000, all)];
    for (target, expected) in [
        ("selector: {matchLabels: {app: db}}", both.clone()),
        ("selector: {matchLabels: {app: other}}", vec![]),
        ("targetRefs: []", both.clone()),
        ("targetRefs: [{kind: Service, name: db}]", both),
        ("targetRefs: [{kind: Service, name: db-headless}]", vec![]),
        ("targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: db}]", vec![]),
        ("targetRefs: [{group: networking.istio.io, kind: VirtualService, name: db}]", vec![]),
    ] {
        let text = policy(&target.replace("targetRefs: []", ""), RULE);
        assert_eq!(names_by_port(&world(&text), &view()), expected, "{target}");
    }
    let of_root = policy("", RULE).replace("namespace: shop", "namespace: istio-system");
    let names = names_by_port(&world(&of_root), &view());
    assert_eq!(names[0].1, ["skysail.rate_limit/istio-system/p/all"]);
    let elsewhere = policy("", RULE).replace("namespace: shop", "namespace: other");
    assert_eq!(names_by_port(&world(&elsewhere), &view()), []);
}

#[test]
fn a_rule_becomes_a_filter_with_its_own_descriptors() {
    let rules = r"
  - name: a
    match: {paths: [/a/*, /b], methods: [GET], hosts: ['*.example.com'], headers: {X-A: {exact: x}}, withoutHeaders: {x-b: {prefix: y}}, principals: [cluster.local/ns/shop/sa/front]}
    by: [{sourcePrincipal: true}, {header: X-User, key: user}, {jwtClaim: a.b}, {clientAddress: {ipv4PrefixLength: 24}}]
    limit: {requests: 10, interval: 2s, burst: 3, maxKeys: 7}
    response: {status: 503, headers: {X-Limited: 100%}, rateLimitHeaders: true}
    shadow: true";
    let (made, _) = compile(&world(&policy("", rules)), &view());
    let filters = filters_of(&chains(&made, 8080)[0]);
    let names: Vec<&str> = filters.iter().map(|filter| filter.name.as_str()).collect();
    let expected =
        ["skysail.rate_limit.attributes", "skysail.rate_limit/shop/p/a", "skysail.rate_limit.cleanup"];
    assert_eq!(names, expected);
    let limit: LocalRateLimit = config(&filters[1]);
    let descriptor = &limit.descriptors[0];
    let entries: Vec<_> = descriptor.entries.iter().map(|it| (it.key.as_str(), it.value.as_str())).collect();
    let keys = [
        ("rule", "shop/p/a"),
        ("sourcePrincipal", ""),
        ("user", ""),
        ("jwtClaim.a.b", ""),
        ("masked_remote_address", ""),
    ];
    assert_eq!(entries, keys);
    let bucket = descriptor.token_bucket.as_ref().unwrap();
    assert_eq!((bucket.max_tokens, bucket.tokens_per_fill.unwrap().value), (3, 10));
    assert_eq!(bucket.fill_interval.unwrap().seconds, 2);
    assert_eq!((limit.status.unwrap().code, limit.max_dynamic_descriptors.unwrap().value), (503, 7));
    let header = limit.response_headers_to_add[0].header.as_ref().unwrap();
    assert_eq!((header.key.as_str(), header.value.as_str()), ("x-limited", "100%%"));
    assert_eq!(limit.filter_enforced.unwrap().default_value.unwrap().numerator, 0);
    assert_eq!(limit.rate_limits[0].actions.len(), keys.len());
    // Principals are compared and counted by one header, the user by another.
    let set: HeaderMutation = config(&filters[0]);
    let remove: HeaderMutation = config(&filters[2]);
    assert_eq!(set.mutations.unwrap().request_mutations.len(), 4);
    assert_eq!(remove.mutations.unwrap().request_mutations.len(), 2);
}

#[test]
fn a_rate_limit_service_gets_the_settings_of_its_provider() {
    let rules = "  - {name: a, by: [{header: x-user}], global: {provider: {name: limits}}, response: {status: 403}}\n  - {name: b, global: {provider: {name: other}}}";
    let (made, _) = compile(&world(&(PROVIDER.to_owned() + &policy("", rules))), &view());
    let filters = filters_of(&chains(&made, 8080)[0]);
    assert_eq!(filters.len(), 3, "the unknown provider has no filter: {filters:?}");
    let limit: GlobalRateLimit = config(&filters[1]);
    assert_eq!((limit.domain.as_str(), limit.failure_mode_deny), ("d", true));
    assert_eq!(limit.timeout.unwrap().seconds, 1);
    assert_eq!(limit.rate_limited_status.unwrap().code, 403);
    assert_eq!(limit.status_on_error.unwrap().code, 503);
    let service = format!("{:?}", limit.rate_limit_service);
    assert!(service.contains("outbound|7000||db.shop.svc.cluster.local"), "{service}");
}

const GATEWAY: &str = r"
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge, namespace: shop}
spec:
  selector: {app: edge}
  servers: [{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: a, namespace: shop}
spec:
  hosts: [a.example.com]
  gateways: [edge]
  http:
  - {name: one, match: [{uri: {prefix: /one}}], route: [{destination: {host: db}}]}
  - {name: two, route: [{destination: {host: db}}]}
---
";

#[test]
fn routes_enable_the_filters_of_a_gateway() {
    let labels = Arc::new(BTreeMap::from([("app".into(), "edge".into())]));
    let edge = ProxyView { role: Role::Router, labels, ..view() };
    let target =
        "targetRefs: [{group: networking.istio.io, kind: VirtualService, name: a, sectionName: one}]";
    let (made, _) = compile(&world(&(GATEWAY.to_owned() + &policy(target, RULE))), &edge);
    let listener: listener::Listener = get(&made, Kind::Listener, "0.0.0.0_80");
    let filters = filters_of(&listener.filter_chains[0]);
    assert_eq!(filters.iter().map(|filter| filter.disabled).collect::<Vec<_>>(), [true]);
    let routes: route::RouteConfiguration = get(&made, Kind::Route, "http.80");
    let enabled = |route: &route::Route| {
        let config = route.typed_per_filter_config.get("skysail.rate_limit/shop/p/all");
        config.map(|any| unpack::<FilterConfig>(any).unwrap())
    };
    let found: Vec<_> = routes.virtual_hosts[0].routes.iter().map(enabled).collect();
    let on = FilterConfig { config: Some(Any::default()), ..Default::default() };
    assert_eq!(found, [Some(on), None]);
}

#[test]
fn a_change_affects_the_proxies_of_the_policy() {
    let other = ProxyView { namespace: "other".into(), ..view() };
    let edge = ProxyView { role: Role::Router, ..other.clone() };
    let route = "targetRefs: [{group: networking.istio.io, kind: VirtualService, name: a}]";
    for (text, expected) in [
        (policy("", RULE), [true, false, false]),
        (policy("selector: {matchLabels: {app: db}}", RULE), [true, false, false]),
        (policy("targetRefs: [{kind: Service, name: db}]", RULE), [true, false, false]),
        (policy(route, RULE), [false, false, true]),
        (policy("", RULE).replace("namespace: shop", "namespace: istio-system"), [true, true, true]),
    ] {
        let mut world = world("");
        world.take_changes();
        let parsed = parse(&text, "test.yaml");
        for (object, origin) in parsed.objects {
            world.apply(object, origin);
        }
        let changes = world.take_changes();
        let affected = [&view(), &other, &edge].map(|view| changes.affects_own(view));
        assert_eq!(affected, expected, "{text}");
        assert!(!changes.everything && !changes.routes && changes.services.is_empty(), "{changes:?}");
        let namespace = if text.contains("istio-system") { "istio-system" } else { "shop" };
        let key =
            ObjectKey { kind: ObjectKind::RateLimitPolicy, namespace: namespace.into(), name: "p".into() };
        assert!(world.delete(&key));
        let changes = world.take_changes();
        assert_eq!([&view(), &other, &edge].map(|view| changes.affects_own(view)), expected, "{text}");
    }
}

#[test]
fn the_order_of_events_does_not_matter() {
    let second = policy("", "  - {name: b, by: [{host: true}], limit: {requests: 1, unit: DAY}}")
        .replace("name: p,", "name: q,");
    let texts = [GATEWAY.to_owned(), policy("", RULE), second];
    let parsed =
        || texts.iter().enumerate().flat_map(|(index, text)| parse(text, &format!("{index}.yaml")).objects);
    let (mut one, mut other) = (world(""), world(""));
    for (object, origin) in parsed() {
        one.apply(object, origin);
    }
    let backwards: Vec<_> = parsed().collect();
    for (object, origin) in backwards.into_iter().rev() {
        other.apply(object, origin);
    }
    let body = |world: &World| {
        let (made, _) = compile(world, &view());
        made.get(Kind::Listener, "virtualInbound").unwrap().body.clone()
    };
    assert!(body(&one) == body(&other));
}
