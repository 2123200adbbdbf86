use super::*;
use crate::parse;

/// Networks by address and by cluster, and gateways by address, name, Service and Gateway.
const MESH: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: ""
  meshNetworks: |
    networks:
      east:
        endpoints: [{fromCidr: 10.1.0.0/16}, {fromRegistry: remote}]
        gateways:
        - {address: 192.0.2.9, port: 443}
        - {address: east.example.com, port: 443}
        - {registryServiceName: crossing.shop.svc.cluster.local, port: 15443}
      wide:
        endpoints: [{fromCidr: 10.0.0.0/8}]
---
apiVersion: v1
kind: Service
metadata: {name: crossing, namespace: shop}
spec: {externalIPs: [192.0.2.1], ports: [{name: tls, port: 15443}]}
---
apiVersion: v1
kind: Service
metadata: {name: west, namespace: shop, labels: {topology.istio.io/network: west, networking.istio.io/gatewayPort: "443"}}
spec: {type: LoadBalancer, ports: [{name: tls, port: 443}]}
status: {loadBalancer: {ingress: [{ip: 198.51.100.7}]}}
---
apiVersion: v1
kind: Service
metadata: {name: closed, namespace: shop, labels: {topology.istio.io/network: west}}
spec: {externalIPs: [198.51.100.8], ports: [{name: tls, port: 443}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: north, namespace: shop, labels: {topology.istio.io/network: north}}
spec:
  gatewayClassName: istio
  addresses: [{type: IPAddress, value: 203.0.113.1}]
  listeners:
  - {name: http, port: 80, protocol: HTTP}
  - {name: cross, port: 15443, protocol: TLS, tls: {mode: Passthrough}}
  - {name: marked, port: 9443, protocol: TLS, tls: {mode: Passthrough, options: {gateway.istio.io/listener-protocol: auto-passthrough}}}
"#;

fn apply(world: &mut World, text: &str) {
    let parsed = parse(text, "test.yaml");
    assert_eq!(parsed.diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
    for (object, origin) in parsed.objects {
        world.apply(object, origin);
    }
}

fn gateways(world: &World, cluster: &str) -> Vec<String> {
    let all = world.topology().gateways(cluster);
    let text = |gateway: &NetworkGateway| {
        format!("{} {}:{} {}", gateway.network, gateway.address, gateway.port, gateway.cluster)
    };
    all.values().flatten().map(|gateway| text(gateway).trim_end().to_owned()).collect()
}

#[test]
fn gateways_come_from_networks_services_and_gateways() {
    let mut world = World::new();
    apply(&mut world, MESH);
    let of_all =
        ["north 203.0.113.1:9443 home", "north 203.0.113.1:15443 home", "west 198.51.100.7:443 home"];
    assert_eq!(gateways(&world, "home"), [&["east 192.0.2.9:443"], &of_all[..]].concat());
    // The Service is a gateway in the cluster that the network names.
    let of_remote = gateways(&world, "remote");
    assert_eq!(of_remote[..2], ["east 192.0.2.1:15443 remote", "east 192.0.2.9:443"]);

    // The addresses of a name come from DNS.
    assert!(world.names_to_resolve().contains_key("east.example.com"));
    world.take_changes();
    let addresses = BTreeSet::from(["192.0.2.77".parse().unwrap()]);
    world.resolve(
        "east.example.com",
        Some(crate::Resolved { addresses: addresses.clone(), current: addresses }),
    );
    let changes = world.take_changes();
    assert!(!changes.everything && changes.services.len() == world.services().count(), "{changes:?}");
    assert!(gateways(&world, "home").contains(&"east 192.0.2.77:443".to_owned()));
}

#[test]
fn a_change_of_gateways_affects_endpoints_alone() {
    let mut world = World::new();
    apply(&mut world, MESH);
    world.take_changes();
    let of_all = world.services().count();
    let mut replace = |from: &str, to: &str| {
        assert!(MESH.contains(from));
        apply(&mut world, &MESH.replace(from, to));
        world.take_changes()
    };
    for (from, to, everything) in [
        ("192.0.2.9, port: 443", "192.0.2.10, port: 443", false),
        ("fromCidr: 10.1.0.0/16", "fromCidr: 10.2.0.0/16", true),
        ("mesh: \"\"", "mesh: \"trustDomain: other\"", true),
    ] {
        let changes = replace(from, to);
        assert_eq!(changes.everything, everything, "{to}: {changes:?}");
        if !everything {
            let expected = ChangeSet { services: changes.services.clone(), ..ChangeSet::default() };
            assert_eq!((&changes, changes.services.len()), (&expected, of_all));
        }
        let _ = replace("", "");
    }
}

#[test]
fn a_label_precedes_the_system_namespace_and_that_the_networks_of_the_mesh() {
    let mut world = World::new();
    apply(&mut world, MESH);
    let labelled = Labels::from([(NETWORK.to_owned(), "south".to_owned())]);
    let none = Labels::new();
    let network = |world: &World, labels: &Labels, ip: &str, cluster: &str| {
        world.topology().network_of(labels, ip.parse().ok(), cluster).to_owned()
    };
    assert_eq!(network(&world, &labelled, "10.1.0.1", "home"), "south");
    assert_eq!(network(&world, &none, "10.1.0.1", "home"), "wide", "as in Istio, the largest block");
    assert_eq!(network(&world, &none, "172.16.0.1", "home"), "");
    assert_eq!(network(&world, &none, "172.16.0.1", "remote"), "east");
    let system = "apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system, labels: {topology.istio.io/network: main}}\n";
    world.take_changes();
    apply(&mut world, system);
    assert!(world.take_changes().everything);
    assert_eq!(network(&world, &none, "10.1.0.1", "home"), "main");
    assert_eq!(network(&world, &labelled, "10.1.0.1", "home"), "south");
}
