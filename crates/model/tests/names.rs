//! DNS names in ServiceEntries: the resources of proxies with and without resolution by the control plane.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::collections::BTreeSet;

use prost::Message as _;
use serde_json::json;
use skysail_model::{ProxyNode, ProxyView, Resolved, Severity, World, api::kube::Locality, compile, parse};
use skysail_xds::{
    Kind, Resources,
    envoy::pb::envoy::config::{
        cluster::v3::{
            Cluster,
            cluster::{ClusterDiscoveryType, DiscoveryType},
        },
        core::v3::address::Address,
        endpoint::v3::{ClusterLoadAssignment, lb_endpoint::HostIdentifier},
    },
};

const ENTRY: &str = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: api, namespace: shop, annotations: {skysail.io/resolve: BY}}
spec:
  hosts: [api.example.com]
  resolution: RESOLUTION
  ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}]
";
const CLUSTER: &str = "outbound|80||api.example.com";

fn world(entry: &str) -> World {
    let parsed = parse(entry, "entry.yaml");
    assert_eq!(parsed.diagnostics, []);
    let mut world = World::new();
    for (object, origin) in parsed.objects {
        world.apply(object, origin);
    }
    world
}

fn entry(resolution: &str, by: &str, rest: &str) -> World {
    world(&(ENTRY.replace("RESOLUTION", resolution).replace("BY", by) + rest))
}

fn resolve(world: &mut World, name: &str, addresses: &[&str]) {
    let all = addresses.iter().map(|text| text.parse().unwrap());
    let now = Resolved { addresses: all.clone().collect(), current: all.take(1).collect() };
    assert!(world.resolve(name, Some(now)));
}

fn view(ips: &str, resolved: bool) -> ProxyView {
    let first = ips.split(',').next().unwrap();
    let id = format!("sidecar~{first}~web-1.shop~shop.svc.cluster.local");
    let metadata = json!({"INSTANCE_IPS": ips, "SKYSAIL_RESOLVED": resolved.to_string()});
    ProxyNode::parse(&id, metadata, Locality::default()).unwrap().view
}

fn cluster(made: &Resources) -> Cluster {
    Cluster::decode(made.get(Kind::Cluster, CLUSTER).unwrap().body.clone()).unwrap()
}

fn kind(cluster: &Cluster) -> DiscoveryType {
    let Some(ClusterDiscoveryType::Type(kind)) = cluster.cluster_discovery_type else {
        return DiscoveryType::Static;
    };
    kind.try_into().unwrap()
}

/// Returns address, port, weight and region of each endpoint.
fn endpoints(assignment: &ClusterLoadAssignment) -> Vec<(String, u16, u32, String)> {
    let of_group = assignment.endpoints.iter().flat_map(|group| {
        let region = group.locality.as_ref().map_or(String::new(), |place| place.region.clone());
        group.lb_endpoints.iter().map(move |endpoint| (endpoint, region.clone()))
    });
    let made = of_group.map(|(endpoint, region)| {
        let Some(HostIdentifier::Endpoint(of)) = &endpoint.host_identifier else { unreachable!() };
        let Some(Address::SocketAddress(at)) = of.address.clone().unwrap().address else { unreachable!() };
        let Some(skysail_xds::envoy::pb::envoy::config::core::v3::socket_address::PortSpecifier::PortValue(
            port,
        )) = at.port_specifier
        else {
            unreachable!()
        };
        (at.address, u16::try_from(port).unwrap(), endpoint.load_balancing_weight.unwrap().value, region)
    });
    made.collect()
}

fn sent(world: &World, view: &ProxyView) -> Vec<(String, u16, u32, String)> {
    let (made, _) = compile(world, view);
    assert_eq!(kind(&cluster(&made)), DiscoveryType::Eds);
    let assignment = made.get(Kind::Endpoint, CLUSTER).unwrap();
    endpoints(&ClusterLoadAssignment::decode(assignment.body.clone()).unwrap())
}

fn addresses(world: &World, view: &ProxyView) -> Vec<String> {
    sent(world, view).into_iter().map(|(address, ..)| address).collect()
}

#[test]
fn a_proxy_that_takes_addresses_gets_all_of_its_families() {
    let mut world = entry("DNS", "control", "");
    assert_eq!(
        addresses(&world, &view("10.0.0.1", true)),
        [""; 0],
        "the cluster is there, its endpoints are not"
    );
    resolve(&mut world, "api.example.com", &["192.0.2.2", "192.0.2.1", "2001:db8::1"]);
    assert_eq!(addresses(&world, &view("10.0.0.1", true)), ["192.0.2.1", "192.0.2.2"]);
    assert_eq!(addresses(&world, &view("fd00::1", true)), ["2001:db8::1"]);
    assert_eq!(addresses(&world, &view("10.0.0.1,fd00::1", true)).len(), 3);
    assert_eq!(sent(&world, &view("fd00::1", true))[0].1, 8080);
    assert!(!world.resolve("api.example.com", world.resolved("api.example.com").cloned()));
    assert!(world.resolve("api.example.com", None));
    assert_eq!(addresses(&world, &view("10.0.0.1", true)), [""; 0]);
}

#[test]
fn other_proxies_get_the_name() {
    let mut world = entry("DNS", "control", "");
    resolve(&mut world, "api.example.com", &["192.0.2.1"]);
    let round_robin = entry("DNS_ROUND_ROBIN", "control", "");
    let own = entry("DNS", "proxy", "");
    assert!(own.names_to_resolve().is_empty());
    for (world, takes, expected) in [
        (&world, false, DiscoveryType::StrictDns),
        (&round_robin, false, DiscoveryType::LogicalDns),
        (&own, true, DiscoveryType::StrictDns),
    ] {
        let (made, _) = compile(world, &view("10.0.0.1", takes));
        let cluster = cluster(&made);
        assert_eq!(kind(&cluster), expected);
        let assignment = cluster.load_assignment.unwrap();
        assert_eq!(endpoints(&assignment), [("api.example.com".to_owned(), 8080, 1, String::new())]);
        assert!(made.get(Kind::Endpoint, CLUSTER).is_none());
    }
}

#[test]
fn round_robin_uses_one_address() {
    let mut world = entry("DNS_ROUND_ROBIN", "control", "");
    resolve(&mut world, "api.example.com", &["192.0.2.2", "192.0.2.1"]);
    assert_eq!(addresses(&world, &view("10.0.0.1", true)), ["192.0.2.2"]);
}

#[test]
fn each_address_has_the_properties_of_its_endpoint() {
    let rest = "  endpoints:
  - {address: One.example., weight: 3, locality: near/a, ports: {http: 81}}
  - {address: two.example, locality: far}
  - {address: 192.0.2.9, locality: far}
";
    let mut world = entry("DNS", "control", rest);
    let wanted: Vec<_> = world.names_to_resolve().into_iter().collect();
    let users = vec!["shop/api.example.com".to_owned()];
    assert_eq!(wanted, [("one.example".into(), users.clone()), ("two.example".into(), users)]);
    resolve(&mut world, "one.example", &["192.0.2.1", "192.0.2.2"]);
    resolve(&mut world, "two.example", &["192.0.2.3", "192.0.2.9"]);
    let of =
        |address: &str, port, weight, region: &str| (address.to_owned(), port, weight, region.to_owned());
    let expected = [
        of("192.0.2.9", 8080, 1, "far"),
        of("192.0.2.3", 8080, 1, "far"),
        of("192.0.2.1", 81, 3, "near"),
        of("192.0.2.2", 81, 3, "near"),
    ];
    assert_eq!(sent(&world, &view("10.0.0.1", true)), expected);
    // Weights are those of the names, so the addresses of a name count once.
    let (made, _) = compile(&world, &view("10.0.0.1", true));
    let assignment = made.get(Kind::Endpoint, CLUSTER).unwrap();
    let assignment = ClusterLoadAssignment::decode(assignment.body.clone()).unwrap();
    let weights: Vec<u32> =
        assignment.endpoints.iter().map(|group| group.load_balancing_weight.unwrap().value).collect();
    assert_eq!(weights, [2, 3]);
}

#[test]
fn a_new_address_touches_the_services_that_use_the_name() {
    let mut world = entry("DNS", "control", "");
    world.take_changes();
    resolve(&mut world, "api.example.com", &["192.0.2.1"]);
    let changes = world.take_changes();
    assert_eq!(changes.services, BTreeSet::from([("shop".to_owned(), "api.example.com".to_owned())]));
    assert!(!changes.everything && !changes.routes && !changes.names && !changes.workloads);
    resolve(&mut world, "other.example.com", &["192.0.2.1"]);
    assert!(world.take_changes().is_empty());
}

#[test]
fn a_host_is_defined_by_the_own_namespace_then_by_the_oldest_entry() {
    let of = |namespace: &str, name: &str, port: u16| {
        format!(
            "---\n{{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {{name: {name}, namespace: {namespace}}}, spec: {{hosts: [api.example.com], resolution: DNS, ports: [{{number: 80, targetPort: {port}, name: http, protocol: HTTP}}]}}}}\n"
        )
    };
    let mut world = world(&(of("first", "a", 1) + &of("shop", "b", 2) + &of("shop", "c", 3)));
    resolve(&mut world, "api.example.com", &["192.0.2.1"]);
    let here = view("10.0.0.1", true);
    let elsewhere = ProxyView { namespace: "elsewhere".into(), ..here.clone() };
    assert_eq!(sent(&world, &here)[0].1, 2);
    assert_eq!(sent(&world, &elsewhere)[0].1, 1);
    // Entries of one host in one namespace are merged.
    let found: Vec<String> = world.validate().iter().map(ToString::to_string).collect();
    assert_eq!(found, [""; 0]);
}

#[test]
fn unsupported_entries_are_refused_with_the_field() {
    for (change, expected) in [
        ("hosts: [api]", "has no dot"),
        ("hosts: [\"*.example.com\"]", "cannot resolve a wildcard"),
        ("endpoints: [{address: \"unix:///x\"}]", "is a socket, which is not resolved"),
        ("endpoints: [{address: a.example, ports: {other: 1}}]", "has no port named"),
        ("ports: [{number: 80, name: a, protocol: SPDY}]", "is not a protocol"),
        ("resolution: STATIC", "is missing"),
    ] {
        let key = change.split(':').next().unwrap();
        let text = ENTRY.replace("RESOLUTION", "DNS");
        let lines = text.lines().filter(|line| !line.trim().starts_with(&format!("{key}:")));
        let text = lines.collect::<Vec<_>>().join("\n") + &format!("\n  {change}\n");
        let parsed = parse(&text, "entry.yaml");
        let errors = parsed.diagnostics.iter().filter(|found| found.severity == Severity::Error);
        let errors: Vec<String> = errors.map(ToString::to_string).collect();
        assert!(errors.iter().any(|error| error.contains(expected)), "{change}: {errors:?}");
        assert!(parsed.objects.is_empty(), "{change}");
    }
}
