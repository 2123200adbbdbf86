//! Effects of a Sidecar that the recordings of istiod do not show.

use super::*;

/// Services `a` (ports 80 and 81) and `b` (80 and 82) of namespace `shop`, and `c` (80) of namespace `other`.
const SERVICES: &str = r"
{apiVersion: v1, kind: Service, metadata: {name: a, namespace: shop}, spec: {clusterIP: 10.96.2.1, ports: [{name: http, port: 80}, {name: http-two, port: 81}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: b, namespace: shop}, spec: {clusterIP: 10.96.2.2, ports: [{name: http, port: 80}, {name: tcp, port: 82}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: c, namespace: other}, spec: {clusterIP: 10.96.2.3, ports: [{name: http, port: 80}]}}
";

fn sidecar(name: &str, namespace: &str, spec: &str) -> String {
    format!(
        "---\n{{apiVersion: networking.istio.io/v1, kind: Sidecar, metadata: {{name: {name}, namespace: {namespace}}}, spec: {spec}}}\n"
    )
}

fn made(more: &str) -> Resources {
    compile(&world(&format!("{SERVICES}{more}")), &view()).0
}

/// Returns the outbound clusters as `PORT/SUBSET/SERVICE`, without those of Service `db`.
fn clusters_of(made: &Resources) -> Vec<String> {
    let names = made.iter(Kind::Cluster).filter_map(|one| one.name.strip_prefix("outbound|"));
    let short = |name: &str| name.trim_end_matches(".svc.cluster.local").replace('|', "/");
    names.map(short).filter(|name| !name.contains("db")).collect()
}

fn hosts_of(made: &Resources, route: &str) -> Vec<String> {
    let routes: route::RouteConfiguration = get(made, Kind::Route, route);
    routes.virtual_hosts.into_iter().map(|host| host.name).collect()
}

#[test]
fn the_most_specific_sidecar_applies() {
    let own = |service: &str| format!("{{egress: [{{hosts: ['*/{service}']}}]}}");
    let root = sidecar("all", "istio-system", &own("c.other.svc.cluster.local"));
    let of_namespace = sidecar("default", "shop", &own("b.shop.svc.cluster.local"));
    let with = "{workloadSelector: {labels: {app: db}}, egress: [{hosts: [./a.shop.svc.cluster.local]}]}";
    let of_workload = sidecar("z", "shop", with);
    let other = sidecar("other", "shop", &with.replace("app: db", "app: other"));
    assert_eq!(clusters_of(&made(&root)), ["80//c.other"]);
    assert_eq!(clusters_of(&made(&format!("{root}{of_namespace}{other}"))), ["80//b.shop", "82//b.shop"]);
    let all = format!("{root}{of_namespace}{other}{of_workload}");
    assert_eq!(clusters_of(&made(&all)), ["80//a.shop", "81//a.shop"]);
    // In the root namespace, a Sidecar with a selector has no effect.
    assert_eq!(clusters_of(&made(&sidecar("all", "istio-system", with))).len(), 5);
}

#[test]
fn hosts_name_namespaces_and_wildcards() {
    let of =
        |hosts: &str| clusters_of(&made(&sidecar("s", "shop", &format!("{{egress: [{{hosts: {hosts}}}]}}"))));
    assert_eq!(of("[other/*]"), ["80//c.other"]);
    assert_eq!(of("['*/*.other.svc.cluster.local']"), ["80//c.other"]);
    assert_eq!(of("['./*.other.svc.cluster.local']"), [""; 0]);
    assert_eq!(of("[other/*, '~/*']"), [""; 0]);
}

#[test]
fn an_egress_listener_serves_its_port_alone() {
    let spec = "{egress: [{port: {number: 80, protocol: HTTP}, hosts: [./b.shop.svc.cluster.local]}, {hosts: [./*]}]}";
    let made = made(&sidecar("s", "shop", spec));
    // The last listener gives clusters for all ports of its services, but port 80 has only the routes of the first.
    assert_eq!(clusters_of(&made), ["80//a.shop", "80//b.shop", "81//a.shop", "82//b.shop"]);
    assert_eq!(hosts_of(&made, "80"), ["b.shop.svc.cluster.local:80", "allow_any"]);
    assert!(hosts_of(&made, "81").contains(&"a.shop.svc.cluster.local:81".to_owned()));
}

#[test]
fn a_bound_egress_listener_has_a_socket_of_its_own() {
    let spec = "{egress: [{port: {number: 82, protocol: TCP}, bind: 127.0.0.9, captureMode: NONE, hosts: [./*]}, {port: {number: 81, protocol: HTTP}, captureMode: NONE, hosts: [./*]}]}";
    let made = made(&sidecar("s", "shop", spec));
    let tcp: listener::Listener = get(&made, Kind::Listener, "127.0.0.9_82");
    assert_eq!(tcp.bind_to_port, None);
    let proxy: TcpProxy = configs(&tcp.filter_chains[0]).into_iter().find_map(unpack).unwrap();
    assert_eq!(proxy.stat_prefix, "outbound|82||b.shop.svc.cluster.local");
    let http: listener::Listener = get(&made, Kind::Listener, "127.0.0.1_81");
    assert_eq!(http.bind_to_port, None);
    assert_eq!(hosts_of(&made, "81"), ["a.shop.svc.cluster.local:81", "allow_any"]);
    // Nothing else is captured.
    let names = made.iter(Kind::Listener).map(|listener| &*listener.name);
    assert_eq!(
        names.collect::<Vec<_>>(),
        ["127.0.0.1_81", "127.0.0.9_82", "virtualInbound", "virtualOutbound"]
    );
}

#[test]
fn an_egress_listener_may_be_a_unix_socket() {
    let spec = "{egress: [{port: {protocol: HTTP}, bind: 'unix:///run/out.sock', hosts: [./a.shop.svc.cluster.local, ./b.shop.svc.cluster.local]}, {port: {protocol: TCP}, bind: 'unix://@tcp', hosts: [other/*]}]}";
    let made = made(&sidecar("s", "shop", spec));
    let pipe = |name: &str| {
        let listener: listener::Listener = get(&made, Kind::Listener, name);
        assert_eq!(listener.bind_to_port, None);
        match listener.address.clone().unwrap().address.unwrap() {
            core::address::Address::Pipe(pipe) => (pipe.path, listener),
            other => panic!("{other:?}"),
        }
    };
    let (path, http) = pipe("unix:///run/out.sock_0");
    assert_eq!(path, "/run/out.sock");
    let manager: HttpConnectionManager =
        configs(&http.filter_chains[0]).into_iter().find_map(unpack).unwrap();
    assert_eq!(manager.stat_prefix, "outbound_unix:///run/out.sock_0;");
    // Requests go to the first port of HTTP of a service.
    let hosts = hosts_of(&made, "unix:///run/out.sock");
    assert_eq!(hosts, ["a.shop.svc.cluster.local:80", "b.shop.svc.cluster.local:80", "allow_any"]);
    let (path, tcp) = pipe("unix://@tcp_0");
    assert_eq!(path, "@tcp");
    let proxy: TcpProxy = configs(&tcp.filter_chains[0]).into_iter().find_map(unpack).unwrap();
    assert_eq!(proxy.stat_prefix, "outbound|80||c.other.svc.cluster.local");
    // All ports of the services have clusters, and no other route or listener.
    assert_eq!(clusters_of(&made), ["80//a.shop", "80//b.shop", "80//c.other", "81//a.shop", "82//b.shop"]);
    let names = |kind| made.iter(kind).map(|of| of.name.to_string()).collect::<Vec<_>>();
    assert_eq!(names(Kind::Route), ["unix:///run/out.sock"]);
    assert_eq!(
        names(Kind::Listener),
        ["unix:///run/out.sock_0", "unix://@tcp_0", "virtualInbound", "virtualOutbound"]
    );
}

#[test]
fn destinations_of_visible_virtual_services_have_clusters() {
    let rule = "---\n{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: v, namespace: shop}, spec: {hosts: [a], http: [{route: [{destination: {host: c.other.svc.cluster.local}}]}]}}\n";
    let spec = |host: &str| {
        sidecar("s", "shop", &format!("{{egress: [{{hosts: [./{host}.shop.svc.cluster.local]}}]}}"))
    };
    let with_rule = made(&format!("{rule}{}", spec("a")));
    assert_eq!(clusters_of(&with_rule), ["80//a.shop", "80//c.other", "81//a.shop"]);
    // The destination itself has no routes.
    assert_eq!(hosts_of(&with_rule, "80"), ["a.shop.svc.cluster.local:80", "allow_any"]);
    assert_eq!(clusters_of(&made(&format!("{rule}{}", spec("b")))), ["80//b.shop", "82//b.shop"]);
}

#[test]
fn the_policy_for_unknown_destinations_is_that_of_the_sidecar() {
    let cluster_of = |spec: &str| {
        let made = made(&sidecar("s", "shop", spec));
        let all: listener::Listener = get(&made, Kind::Listener, "virtualOutbound");
        let proxy: TcpProxy =
            configs(all.filter_chains.last().unwrap()).into_iter().find_map(unpack).unwrap();
        (proxy.stat_prefix, hosts_of(&made, "80").pop().unwrap())
    };
    let expected = |cluster: &str, host: &str| (cluster.to_owned(), host.to_owned());
    let policy = |policy: &str| cluster_of(&format!("{{outboundTrafficPolicy: {policy}}}"));
    assert_eq!(policy("{mode: REGISTRY_ONLY}"), expected("BlackHoleCluster", "block_all"));
    // The first value of the enumeration is the default here.
    assert_eq!(policy("{}"), expected("BlackHoleCluster", "block_all"));
    assert_eq!(policy("{mode: ALLOW_ANY}"), expected("PassthroughCluster", "allow_any"));
    assert_eq!(
        policy("{mode: ALLOW_ANY_DYNAMIC_DNS}"),
        expected("PassthroughCluster", "allow_any_dynamic_dns")
    );
    assert_eq!(
        policy("{mode: ALLOW_ANY, egressProxy: {host: c.other.svc.cluster.local, port: {number: 80}}}"),
        expected("outbound|80||c.other.svc.cluster.local", "allow_any")
    );
}

#[test]
fn inbound_connection_pools_limit_the_workloads_ports() {
    let limit = |spec: &str, port: u16| {
        let made = made(&sidecar("s", "shop", spec));
        let cluster: cluster::Cluster = get(&made, Kind::Cluster, &format!("inbound|{port}||"));
        cluster.circuit_breakers.unwrap().thresholds[0].max_connections.unwrap().value
    };
    let all = "inboundConnectionPool: {tcp: {maxConnections: 3}}";
    assert_eq!(limit(&format!("{{{all}}}"), 8080), 3);
    let ingress = format!(
        "{{{all}, ingress: [{{port: {{number: 90, protocol: HTTP}}, connectionPool: {{tcp: {{maxConnections: 4}}}}}}, {{port: {{number: 91, protocol: HTTP}}}}]}}"
    );
    assert_eq!((limit(&ingress, 90), limit(&ingress, 91)), (4, 3));
}

#[test]
fn ingress_listeners_replace_the_ports_of_services() {
    let spec = "{ingress: [{port: {number: 90, protocol: HTTP}, defaultEndpoint: '127.0.0.1:9000'}, {port: {number: 91, protocol: TCP}, defaultEndpoint: '0.0.0.0:9001'}, {port: {number: 92, protocol: TCP}, defaultEndpoint: 'unix:///run/a.sock'}]}";
    let world = world(&format!("{SERVICES}{}", sidecar("s", "shop", spec)));
    let mut node = skysail_node();
    assert!(world.identify(&mut node, "Kubernetes").unwrap());
    let (made, _) = compile(&world, &node.view);
    let inbound: Vec<&str> =
        made.iter(Kind::Cluster).map(|one| &*one.name).filter(|name| name.starts_with("inbound")).collect();
    assert_eq!(inbound, ["inbound|90||", "inbound|91||", "inbound|92||"]);
    let address = |port: u16| {
        let cluster: cluster::Cluster = get(&made, Kind::Cluster, &format!("inbound|{port}||"));
        let load = cluster.load_assignment.unwrap();
        let Some(endpoint::lb_endpoint::HostIdentifier::Endpoint(host)) =
            load.endpoints[0].lb_endpoints[0].host_identifier.clone()
        else {
            panic!("no endpoint")
        };
        match host.address.unwrap().address.unwrap() {
            core::address::Address::SocketAddress(address) => address.address,
            core::address::Address::Pipe(pipe) => pipe.path,
            core::address::Address::EnvoyInternalAddress(_) => String::new(),
        }
    };
    assert_eq!([90, 91, 92].map(address), ["127.0.0.1", "10.244.0.5", "/run/a.sock"]);
}

fn skysail_node() -> crate::ProxyNode {
    let id = "sidecar~10.244.0.5~db-1.shop~shop.svc.cluster.local";
    let metadata = serde_json::json!({"SERVICE_ACCOUNT": "db"});
    crate::ProxyNode::parse(id, metadata, api::kube::Locality::default()).unwrap()
}
