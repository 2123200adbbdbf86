//! Endpoints of other networks, gateways between networks, and endpoints that clients prefer.

use super::*;
use crate::api::kube::Locality;

/// Two pods with a sidecar and one without in network `far`, one in network `near`, and two gateways of `far`.
const FAR: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: api, namespace: shop}
spec: {clusterIP: 10.96.3.1, selector: {app: api}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: near, namespace: shop, labels: {app: api, v: "1", security.istio.io/tlsMode: istio, topology.istio.io/network: near}}
spec: {nodeName: n1, containers: [{name: c, image: i}]}
status: {podIP: 10.1.0.1, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far-1, namespace: shop, labels: {app: api, v: "2", security.istio.io/tlsMode: istio, topology.istio.io/network: far}}
spec: {nodeName: n2, containers: [{name: c, image: i}]}
status: {podIP: 10.2.0.1, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far-2, namespace: shop, labels: {app: api, v: "2", security.istio.io/tlsMode: istio, topology.istio.io/network: far}}
spec: {nodeName: n3, containers: [{name: c, image: i}]}
status: {podIP: 10.2.0.2, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far-plain, namespace: shop, labels: {app: api, topology.istio.io/network: far}}
spec: {nodeName: n3, containers: [{name: c, image: i}]}
status: {podIP: 10.2.0.3, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Service
metadata: {name: crossing, namespace: shop, labels: {topology.istio.io/network: far}}
spec: {clusterIP: 10.96.3.2, externalIPs: [192.0.2.1, 192.0.2.2], selector: {app: crossing}, ports: [{name: tls, port: 15443}]}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: api, namespace: shop}
spec: {host: api, subsets: [{name: v2, labels: {v: "2"}}]}
"#;

const API: &str = "outbound|80||api.shop.svc.cluster.local";

fn in_network(network: &str) -> ProxyView {
    ProxyView { network: network.into(), ..view() }
}

/// Returns the endpoints of a cluster: priority, address, port, weight, and `mutual` if they take mutual TLS.
fn endpoints(made: &Resources, cluster: &str) -> Vec<String> {
    let found: endpoint::ClusterLoadAssignment = get(made, Kind::Endpoint, cluster);
    let mut list = Vec::new();
    for group in &found.endpoints {
        let sum: u32 = group.lb_endpoints.iter().map(|one| one.load_balancing_weight.unwrap().value).sum();
        assert_eq!(group.load_balancing_weight.map_or(0, |weight| weight.value), sum);
        for one in &group.lb_endpoints {
            let Some(endpoint::lb_endpoint::HostIdentifier::Endpoint(host)) = &one.host_identifier else {
                panic!()
            };
            let Some(core::address::Address::SocketAddress(at)) =
                host.address.as_ref().and_then(|address| address.address.as_ref())
            else {
                panic!("{host:?}")
            };
            let Some(core::socket_address::PortSpecifier::PortValue(port)) = at.port_specifier else {
                panic!()
            };
            let metadata = &one.metadata.as_ref().unwrap().filter_metadata;
            let mutual =
                if metadata.contains_key("envoy.transport_socket_match") { "mutual" } else { "plain" };
            let weight = one.load_balancing_weight.unwrap().value;
            list.push(format!("{} {}:{port} {weight} {mutual}", group.priority, at.address));
        }
    }
    list
}

#[test]
fn gateways_replace_the_endpoints_of_their_network() {
    let world = world(FAR);
    let of = |view: &ProxyView, cluster: &str| endpoints(&compile(&world, view).0, cluster);
    let far = ["0 10.2.0.1:8080 2 mutual", "0 10.2.0.2:8080 2 mutual", "0 10.2.0.3:8080 2 plain"];
    // Each of the two gateways has half of the weight of two endpoints; the one without a sidecar is left out.
    let gateways = ["0 192.0.2.1:15443 2 mutual", "0 192.0.2.2:15443 2 mutual"];
    assert_eq!(of(&in_network("near"), API), [&["0 10.1.0.1:8080 2 mutual"], &gateways[..]].concat());
    let v2 = "outbound|80|v2|api.shop.svc.cluster.local";
    assert_eq!(of(&in_network("near"), v2), gateways);
    // Network near has no gateway.
    assert_eq!(of(&in_network("far"), API), [&["0 10.1.0.1:8080 2 mutual"], &far[..]].concat());
    // A client of an unknown network uses the gateways too.
    assert_eq!(of(&in_network(""), API), [&["0 10.1.0.1:8080 2 mutual"], &gateways[..]].concat());
    let v6_only = ProxyView { ipv4: false, ipv6: true, ..in_network("near") };
    assert_eq!(of(&v6_only, v2), [""; 0], "the gateways have no address of the client's family");

    let direct = FAR.replace("externalIPs: [192.0.2.1, 192.0.2.2], ", "");
    let made = compile(&super::world(&direct), &in_network("near")).0;
    assert_eq!(endpoints(&made, v2), ["0 10.2.0.1:8080 1 mutual", "0 10.2.0.2:8080 1 mutual"]);
}

#[test]
fn an_endpoint_without_an_address_is_reached_through_its_network_only() {
    let entry = r#"
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: vm, namespace: shop}
spec:
  hosts: [vm.example.com]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints:
  - {network: far, serviceAccount: vm, weight: 3}
  - {network: far, serviceAccount: vm}
"#;
    let world = world(&format!("{FAR}{entry}"));
    let vm = "outbound|80||vm.example.com";
    let of = |network: &str| endpoints(&compile(&world, &in_network(network)).0, vm);
    assert_eq!(of("near"), ["0 192.0.2.1:15443 4 mutual", "0 192.0.2.2:15443 4 mutual"]);
    assert_eq!(of("far"), [""; 0]);
}

#[test]
fn a_gateway_between_networks_forwards_by_server_name() {
    let gateway = r#"
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: crossing, namespace: shop}
spec:
  selector: {app: crossing}
  servers: [{port: {number: 15443, name: tls, protocol: TLS}, hosts: ["*.local"], tls: {mode: AUTO_PASSTHROUGH}}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: outside, namespace: shop}
spec:
  hosts: [outside.shop.svc.cluster.local]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: 192.0.2.99}]
"#;
    let world = world(&format!("{FAR}{gateway}"));
    let labels = Arc::new(BTreeMap::from([("app".into(), "crossing".into())]));
    let router = ProxyView { role: Role::Router, labels, ..in_network("far") };
    let (made, _) = compile(&world, &router);
    let listener: listener::Listener = get(&made, Kind::Listener, "0.0.0.0_15443");
    let mut names = Vec::new();
    for chain in &listener.filter_chains {
        let found = chain.filter_chain_match.as_ref().unwrap();
        assert_eq!(found.application_protocols[..2], ["istio", "istio-peer-exchange"]);
        assert_eq!(found.application_protocols.len(), 5);
        assert!(chain.transport_socket.is_none(), "TLS is forwarded");
        let proxy = configs(chain).into_iter().find_map(unpack::<TcpProxy>).unwrap();
        let cluster = skysail_xds::envoy::pb::envoy::extensions::filters::network::tcp_proxy::v3::tcp_proxy::ClusterSpecifier::Cluster(found.server_names[0].clone());
        assert_eq!(proxy.cluster_specifier, Some(cluster));
        names.extend(found.server_names.clone());
    }
    let api = ["outbound_.80_._.api.shop.svc.cluster.local", "outbound_.80_.v2_.api.shop.svc.cluster.local"];
    assert_eq!(
        names.iter().filter(|name| name.contains("_.api.")).collect::<Vec<_>>(),
        api.iter().collect::<Vec<_>>()
    );
    assert!(names.iter().all(|name| !name.contains("outside")), "{names:?}");
    let cluster: cluster::Cluster = get(&made, Kind::Cluster, api[1]);
    assert!(cluster.transport_socket.is_none() && cluster.transport_socket_matches.is_empty());
    assert_eq!(endpoints(&made, api[1]), ["0 10.2.0.1:8080 2 mutual", "0 10.2.0.2:8080 2 mutual"]);
    // Endpoints that take no mutual TLS are not forwarded to.
    assert_eq!(endpoints(&made, api[0]).len(), 3);

    let disabled = "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\n\
                    metadata: {name: plain, namespace: shop}\n\
                    spec: {selector: {matchLabels: {v: \"2\"}}, mtls: {mode: DISABLE}}\n";
    let (made, _) = compile(&super::world(&format!("{FAR}{gateway}{disabled}")), &router);
    assert_eq!(endpoints(&made, api[1]), [""; 0]);

    let other = ProxyView { labels: view().labels, ..router };
    assert!(compile(&world, &other).0.get(Kind::Cluster, api[0]).is_none());
}

/// Clients of zone `a`, and endpoints on two nodes of this zone, in the same region, and elsewhere.
#[test]
fn a_service_prefers_endpoints_of_the_zone() {
    let node = |name: &str, region: &str, zone: &str| {
        format!(
            "---\napiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {{topology.kubernetes.io/region: {region}, topology.kubernetes.io/zone: {zone}}}}}\n"
        )
    };
    let pod = |name: &str, ip: u8, node: &str| {
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, labels: {{app: web}}}}\nspec: {{nodeName: {node}, containers: [{{name: c, image: i}}]}}\nstatus: {{podIP: 10.9.0.{ip}, conditions: [{{type: Ready, status: \"True\"}}]}}\n"
        )
    };
    let objects = [
        node("n1", "r", "a"),
        node("n2", "r", "a"),
        node("n3", "r", "b"),
        node("n4", "s", "c"),
        pod("p1", 1, "n1"),
        pod("p2", 2, "n2"),
        pod("p3", 3, "n3"),
        pod("p4", 4, "n4"),
    ]
    .concat();
    let web = "outbound|80||web.shop.svc.cluster.local";
    let of = |metadata: &str, spec: &str| {
        let service = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop{metadata}}}\nspec: {{clusterIP: 10.96.9.9, selector: {{app: web}}, ports: [{{name: http, port: 80}}]{spec}}}\n"
        );
        let world = world(&format!("{service}{objects}"));
        let locality = Locality { region: "r".into(), zone: "a".into(), ..Locality::default() };
        let (made, _) = compile(&world, &ProxyView { locality, ..view() });
        let cluster: cluster::Cluster = get(&made, Kind::Cluster, web);
        let specifier = cluster.common_lb_config.unwrap().locality_config_specifier;
        let mut list: Vec<(u8, u8)> = Vec::new();
        for text in endpoints(&made, web) {
            let (priority, rest) = text.split_once(' ').unwrap();
            let last = rest.split(':').next().unwrap().rsplit('.').next().unwrap();
            list.push((last.parse().unwrap(), priority.parse().unwrap()));
        }
        list.sort_unstable();
        (list, specifier.is_some())
    };
    let zone = (vec![(1, 0), (2, 0), (3, 1), (4, 2)], true);
    assert_eq!(of("", ", trafficDistribution: PreferClose"), zone);
    assert_eq!(of("", ", trafficDistribution: PreferSameNode"), zone, "this client's node is not known");
    let annotated = ", annotations: {networking.istio.io/traffic-distribution: PreferSameZone}";
    assert_eq!(of(annotated, ""), zone);
    let none = (vec![(1, 0), (2, 0), (3, 0), (4, 0)], false);
    assert_eq!(of("", ""), none, "without outlier detection");
}
