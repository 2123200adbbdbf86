//! The admin page `/debug/config_dump` for a sidecar that requests virtual hosts on demand, and for a gateway with a
//! certificate.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests may end the test"
)]

mod support;

use std::fs;

use serde_json::json;
use skysail_core::names;
use skysail_xds::{
    Kind,
    envoy::pb::{
        envoy::{
            admin::v3::{
                ClustersConfigDump, ConfigDump, EndpointsConfigDump, ListenersConfigDump, RoutesConfigDump,
            },
            config::{
                cluster::v3::Cluster,
                core::v3::{Node, address, socket_address::PortSpecifier},
                endpoint::v3::{ClusterLoadAssignment, lb_endpoint::HostIdentifier},
                route::v3::{RouteConfiguration, VirtualHost},
            },
            service::discovery::v3::{
                DeltaDiscoveryRequest, DeltaDiscoveryResponse,
                aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
            },
        },
        google::protobuf::{Any, Value, value},
    },
    istio::{string, structure},
};
use support::{Control, Folder, bearer, connect};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_stream::StreamExt as _;
use tonic::{Request, Streaming};

const CLUSTER: &str = "outbound|80||reviews.default.svc.cluster.local";
const HOST: &str = "reviews.default.svc.cluster.local";
/// A line of a private key in PEM, with and without its algorithm.
const KEY: &str = "PRIVATE KEY-----";

/// A pod of the Service, and a Gateway with a certificate.
const MESH: &str = "
apiVersion: v1
kind: Pod
metadata: {name: reviews-1, namespace: default, labels: {app: reviews}}
spec: {serviceAccountName: reviews, containers: [{name: a, image: i}]}
status: {phase: Running, podIP: 10.0.0.7, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge, namespace: default}
spec:
  selector: {app: edge}
  servers:
  - {port: {number: 443, name: a, protocol: HTTPS}, hosts: [a.example], tls: {mode: SIMPLE, credentialName: edge}}
";

/// A connected proxy with the first response.
struct Proxy {
    first: DeltaDiscoveryResponse,
    _responses: Streaming<DeltaDiscoveryResponse>,
}

/// Connects a proxy of the service account with its name, and requests these resources.
async fn proxy(
    (control, folder): (&Control, &Folder),
    (role, name): (&str, &str),
    field: (&str, Value),
    (kind, names): (Kind, &[&str]),
) -> Proxy {
    let fields = [("SERVICE_ACCOUNT", string(name)), ("NAMESPACE", string("default")), field];
    let Some(value::Kind::StructValue(metadata)) = structure(fields).kind else { panic!("a structure") };
    let id = format!("{role}~10.0.0.1~{name}-1.default~default.svc.cluster.local");
    let request = DeltaDiscoveryRequest {
        node: Some(Node { id, metadata: Some(metadata), ..Node::default() }),
        type_url: kind.url().into(),
        resource_names_subscribe: names.iter().map(|name| (*name).into()).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    let mut call = Request::new(tokio_stream::once(request).chain(tokio_stream::pending()));
    *call.metadata_mut() = bearer(&folder.token(name));
    let mut client = AggregatedDiscoveryServiceClient::new(connect(control, folder).await);
    let mut responses = client.delta_aggregated_resources(call).await.unwrap().into_inner();
    let first = responses.message().await.unwrap().expect("a response");
    Proxy { first, _responses: responses }
}

/// Requests the page. Returns the head of the response and its body.
async fn page(control: &Control, proxy: &str) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(&control.admin).await.unwrap();
    let path = format!("/debug/config_dump?proxyID={proxy}");
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
    let body = answer.split_off(end + 4);
    (String::from_utf8(answer).unwrap(), body)
}

async fn dump(control: &Control, proxy: &str) -> ConfigDump {
    let (head, body) = page(control, proxy).await;
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.contains("content-type: application/x-protobuf"),
        "{head}"
    );
    assert!(!contains(&body, KEY), "the page of {proxy} has a private key");
    let dump: ConfigDump = prost::Message::decode(&*body).unwrap();
    let types: Vec<_> = dump.configs.iter().map(|of| of.type_url.rsplit('.').next().unwrap()).collect();
    let expected = ["ClustersConfigDump", "EndpointsConfigDump", "ListenersConfigDump", "RoutesConfigDump"];
    assert_eq!(types, expected, "{proxy}");
    dump
}

fn section<M: prost::Message + prost::Name + Default>(dump: &ConfigDump) -> M {
    let section = dump.configs.iter().find(|of| of.type_url.ends_with(M::NAME)).unwrap();
    read(section)
}

fn read<M: prost::Message + Default>(any: &Any) -> M {
    M::decode(any.value.as_slice()).unwrap()
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|part| part == text.as_bytes())
}

/// Returns addresses and ports of endpoints.
fn addresses(of: &ClusterLoadAssignment) -> Vec<(String, u32)> {
    let endpoints = of.endpoints.iter().flat_map(|locality| &locality.lb_endpoints);
    let address = |host: &HostIdentifier| {
        let HostIdentifier::Endpoint(endpoint) = host else { panic!("{host:?}") };
        match endpoint.address.as_ref().unwrap().address.as_ref().unwrap() {
            address::Address::SocketAddress(socket) => match socket.port_specifier {
                Some(PortSpecifier::PortValue(port)) => (socket.address.clone(), port),
                ref other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    };
    endpoints.map(|endpoint| address(endpoint.host_identifier.as_ref().unwrap())).collect()
}

#[tokio::test]
async fn the_page_has_what_a_proxy_is_served_except_secrets() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let pair = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "edge", "namespace": "default"},
        "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": pair.cert.pem(), "tls.key": pair.signing_key.serialize_pem()},
    });
    fs::write(folder.at("config/mesh.yaml"), MESH).unwrap();
    fs::write(folder.at("config/secret.yaml"), secret.to_string()).unwrap();
    let control = folder.start("0").await;
    let on_demand = (names::TAKES_VIRTUAL_HOSTS, string("true"));
    let _sidecar =
        proxy((&control, &folder), ("sidecar", "client"), on_demand, (Kind::Cluster, &[][..])).await;

    let client = dump(&control, "client-1.default").await;
    let clusters: ClustersConfigDump = section(&client);
    let clusters = clusters.dynamic_active_clusters.iter().map(|of| read(of.cluster.as_ref().unwrap()));
    assert!(clusters.into_iter().any(|cluster: Cluster| cluster.name == CLUSTER));
    let endpoints: EndpointsConfigDump = section(&client);
    let mut endpoints = endpoints
        .dynamic_endpoint_configs
        .iter()
        .map(|of| read::<ClusterLoadAssignment>(of.endpoint_config.as_ref().unwrap()));
    let reviews = endpoints.find(|of| of.cluster_name == CLUSTER).unwrap();
    assert_eq!(addresses(&reviews), [("10.0.0.7".to_owned(), 8080)]);
    let listeners: ListenersConfigDump = section(&client);
    assert!(listeners.dynamic_listeners.iter().any(|listener| listener.name == "virtualInbound"));
    let routes: RoutesConfigDump = section(&client);
    let mut tables = routes
        .dynamic_route_configs
        .iter()
        .map(|of| read::<RouteConfiguration>(of.route_config.as_ref().unwrap()));
    let table = tables.find(|table| table.name == "80").unwrap();
    assert!(table.vhds.is_some(), "the proxy requests virtual hosts on demand");
    let is_reviews = |host: &&VirtualHost| host.domains.iter().any(|domain| domain == HOST);
    let hosts: Vec<&VirtualHost> = table.virtual_hosts.iter().filter(is_reviews).collect();
    assert!(hosts.len() == 1 && !hosts[0].routes.is_empty(), "{:?}", table.virtual_hosts);

    // The gateway is served its certificate and key, which the page does not have.
    let labels = ("LABELS", structure([("app", string("edge"))]));
    let secrets = (Kind::Secret, &["kubernetes://edge"][..]);
    let gateway = proxy((&control, &folder), ("router", "edge"), labels, secrets).await;
    let mut served = gateway.first.resources.iter().filter_map(|secret| secret.resource.as_ref());
    assert!(served.any(|secret| contains(&secret.value, KEY)), "{:?}", gateway.first);
    let edge = dump(&control, "edge-1.default").await;
    let listeners: ListenersConfigDump = section(&edge);
    assert!(listeners.dynamic_listeners.iter().any(|of| {
        let listener = of.active_state.as_ref().and_then(|state| state.listener.as_ref());
        listener.is_some_and(|listener| contains(&listener.value, "kubernetes://edge"))
    }));
    let (head, _) = page(&control, "reviews-1.default").await;
    assert!(head.starts_with("HTTP/1.1 404 "), "a pod without a connected proxy: {head}");
}
