//! Recorded responses of a real istiod, served to a running sidecar, and requests through it over mutual TLS.
//! The scenarios are header matches, faults and weights of Istio's traffic management tasks. Only addresses
//! differ: the listener for port 9080 is bound here, and the recorded endpoints are servers of this test.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod agent;
mod player;
#[path = "../support/mod.rs"]
mod support;
mod views;

use std::{
    collections::HashMap,
    future::pending,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use agent::{Agent, Program, recording, spec};

use bytes::Bytes;
use prost::Message as _;
use skysail_identity::Authority;
use skysail_xds::{
    Kind, Layer, Resource, Snapshot,
    client::Form,
    envoy::pb::envoy::{
        config::{
            core::v3::{Address, Node, SocketAddress, address, socket_address::PortSpecifier},
            endpoint::v3::{ClusterLoadAssignment, lb_endpoint::HostIdentifier},
            listener::v3::Listener,
        },
        service::{
            discovery::v3::DiscoveryResponse,
            secret::v3::secret_discovery_service_server::SecretDiscoveryServiceServer,
        },
    },
    grpc,
    server::{self, DiscoveryService, Event, View, Views},
};
use support::Client;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Extensions, Request, Status};

/// Recorded address of a pod, its service account, and the name that its server returns.
const PODS: [(&str, &str, &str); 4] = [
    ("10.244.0.13", "bookinfo-reviews", "reviews-v1"),
    ("10.244.1.12", "bookinfo-reviews", "reviews-v2"),
    ("10.244.2.11", "bookinfo-reviews", "reviews-v3"),
    ("10.244.1.11", "bookinfo-ratings", "ratings-v1"),
];
const LISTENER: &str = "0.0.0.0_9080";

/// A sidecar of productpage with the configuration of a scenario.
struct Sidecar {
    _program: Program,
    address: SocketAddr,
    refused: Arc<Mutex<Vec<String>>>,
}

impl Sidecar {
    async fn start(scenario: &str) -> Self {
        let mesh = Arc::new(Authority::ephemeral().unwrap());
        let mut servers = HashMap::new();
        for (pod, account, name) in PODS {
            servers.insert(pod, serve(&mesh, account, name).await);
        }
        let proxy = recording(scenario).join("xds/productpage-v1");
        let refused = Arc::default();
        let control = discovery(resources(&proxy, &servers), &refused).await;
        let program = Program::start(&proxy, "DELTA_GRPC", control, agent(&mesh).await).await;
        let listeners = program.page("/listeners").await;
        let address = listeners.lines().find_map(|line| line.strip_prefix(&format!("{LISTENER}::")));
        Self { address: address.unwrap().trim().parse().unwrap(), _program: program, refused }
    }

    /// Sends a request to a service; `user` is the header `end-user`. Returns the status and the body.
    async fn ask(&self, service: &str, user: Option<&str>) -> (u16, String) {
        let mut client = Client::new(TcpStream::connect(self.address).await.unwrap());
        let user = user.map(|user| format!("end-user: {user}\r\n")).unwrap_or_default();
        client.send(&format!("GET /{service}/0 HTTP/1.1\r\nhost: {service}:9080\r\n{user}\r\n")).await;
        let (head, body) = client.message().await;
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body)
    }

    /// Checks that the sidecar rejected nothing.
    fn assert_nothing_rejected(&self) {
        assert_eq!(*self.refused.lock().unwrap(), [""; 0]);
    }
}

#[tokio::test]
async fn a_header_selects_another_version() {
    let sidecar = Sidecar::start("c-reviews-test-v2").await;
    for _ in 0..3 {
        assert_eq!(sidecar.ask("reviews", None).await, (200, "reviews-v1".to_owned()));
        assert_eq!(sidecar.ask("reviews", Some("jason")).await, (200, "reviews-v2".to_owned()));
        assert_eq!(sidecar.ask("ratings", Some("jason")).await, (200, "ratings-v1".to_owned()));
    }
    sidecar.assert_nothing_rejected();
}

#[tokio::test]
async fn requests_of_one_user_are_aborted() {
    let sidecar = Sidecar::start("d-fault-abort").await;
    assert_eq!(sidecar.ask("ratings", Some("jason")).await, (500, "fault filter abort".to_owned()));
    assert_eq!(sidecar.ask("ratings", None).await, (200, "ratings-v1".to_owned()));
    sidecar.assert_nothing_rejected();
}

#[tokio::test]
async fn requests_of_one_user_are_delayed() {
    let sidecar = Sidecar::start("d-fault-delay").await;
    let start = Instant::now();
    assert_eq!(sidecar.ask("ratings", Some("jason")).await, (200, "ratings-v1".to_owned()));
    assert!(start.elapsed() >= Duration::from_secs(7));
    assert_eq!(sidecar.ask("ratings", None).await, (200, "ratings-v1".to_owned()));
    sidecar.assert_nothing_rejected();
}

#[tokio::test]
async fn weights_split_requests() {
    let sidecar = Sidecar::start("e-reviews-50-v3").await;
    let mut answers: HashMap<String, u32> = HashMap::new();
    for _ in 0..200 {
        let (status, answer) = sidecar.ask("reviews", None).await;
        assert_eq!(status, 200, "{answer}");
        *answers.entry(answer).or_default() += 1;
    }
    // The probability of fewer than 63 of 200 fair draws is below one in ten million.
    let share = |name: &str| answers.get(name).copied().unwrap_or_default();
    assert!(share("reviews-v1") >= 63 && share("reviews-v3") >= 63, "{answers:?}");
    assert_eq!(share("reviews-v1") + share("reviews-v3"), 200, "{answers:?}");
    sidecar.assert_nothing_rejected();
}

#[tokio::test]
async fn all_requests_reach_one_version_and_nothing_is_rejected() {
    let sidecar = Sidecar::start("b-mtls-all-v1").await;
    assert_eq!(sidecar.ask("reviews", Some("jason")).await, (200, "reviews-v1".to_owned()));
    sidecar.assert_nothing_rejected();
    let sidecar = Sidecar::start("a-bookinfo").await;
    assert_eq!(sidecar.ask("ratings", Some("jason")).await, (200, "ratings-v1".to_owned()));
    sidecar.assert_nothing_rejected();
}

/// Starts a pod that accepts mutual TLS only from productpage and answers with its name.
async fn serve(mesh: &Authority, account: &str, name: &'static str) -> SocketAddr {
    let acceptor = tokio_rustls::TlsAcceptor::from(spec(mesh, account).0.server().unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut unread = Vec::new();
                while stream.read_buf(&mut unread).await.is_ok_and(|count| count > 0) {
                    if unread.ends_with(b"\r\n\r\n") {
                        unread.clear();
                        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", name.len());
                        stream.write_all((head + name).as_bytes()).await.unwrap();
                    }
                }
            });
        }
    });
    address
}

/// Returns the recorded resources with the addresses of this test.
fn resources(proxy: &Path, servers: &HashMap<&str, SocketAddr>) -> Layer {
    let mut resources = Layer::default();
    for kind in [Kind::Cluster, Kind::Endpoint, Kind::Listener, Kind::Route] {
        let recorded = agent::unpacked(&proxy.join(format!("{}.sotw.pb.gz", kind.short())));
        for any in DiscoveryResponse::decode(recorded.as_slice()).unwrap().resources {
            let (name, body) = match kind {
                Kind::Listener => listener(&any.value),
                Kind::Endpoint => assignment(&any.value, servers),
                _ => (name(&any.value), any.value),
            };
            // The other listeners are found by original destination, which needs interception.
            if kind != Kind::Listener || name == LISTENER {
                resources.set(1, Resource::from_body(kind, &name, Bytes::from(body)));
            }
        }
    }
    resources
}

/// Returns the name of a cluster or a route configuration, its first field.
fn name(body: &[u8]) -> String {
    #[derive(Clone, PartialEq, prost::Message)]
    struct Named {
        #[prost(string, tag = "1")]
        name: String,
    }
    Named::decode(body).unwrap().name
}

fn listener(body: &[u8]) -> (String, Vec<u8>) {
    let mut listener = Listener::decode(body).unwrap();
    listener.address = Some(socket("127.0.0.1", 0));
    listener.bind_to_port = None;
    (listener.name.clone(), listener.encode_to_vec())
}

fn assignment(body: &[u8], servers: &HashMap<&str, SocketAddr>) -> (String, Vec<u8>) {
    let mut assignment = ClusterLoadAssignment::decode(body).unwrap();
    for endpoint in assignment.endpoints.iter_mut().flat_map(|locality| &mut locality.lb_endpoints) {
        let Some(HostIdentifier::Endpoint(endpoint)) = &mut endpoint.host_identifier else { continue };
        let Some(address::Address::SocketAddress(old)) =
            endpoint.address.as_ref().and_then(|address| address.address.clone())
        else {
            continue;
        };
        if let Some(server) = servers.get(old.address.as_str()) {
            endpoint.address = Some(socket("127.0.0.1", server.port()));
        }
    }
    (assignment.cluster_name.clone(), assignment.encode_to_vec())
}

fn socket(address: &str, port: u16) -> Address {
    let address = SocketAddress {
        address: address.to_owned(),
        port_specifier: Some(PortSpecifier::PortValue(port.into())),
        ..SocketAddress::default()
    };
    Address { address: Some(address::Address::SocketAddress(address)) }
}

/// Starts a discovery server in plain text.
async fn discovery(resources: Layer, refused: &Arc<Mutex<Vec<String>>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let resources = Snapshot { shared: Arc::new(resources), ..Snapshot::default() };
    let one = OneView { resources: watch::channel(resources).0, refused: Arc::clone(refused) };
    let service = Arc::new(DiscoveryService::new(Arc::new(one)));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (service, limits) = (Arc::clone(&service), Arc::default());
            tokio::spawn(async move {
                grpc::serve(stream, Extensions::new(), &*service, &limits, pending()).await
            });
        }
    });
    address
}

/// Starts an SDS server in plain text.
async fn agent(mesh: &Arc<Authority>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let agent = SecretDiscoveryServiceServer::new(Agent(Arc::clone(mesh)));
    let router = tonic::transport::Server::builder().add_service(agent);
    tokio::spawn(async move {
        router.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
    });
    address
}

/// Serves the same resources to every client and records rejections.
struct OneView {
    resources: watch::Sender<Snapshot>,
    refused: Arc<Mutex<Vec<String>>>,
}

impl Views for OneView {
    async fn connect(&self, _: Node, _: Form, _: Request<()>) -> Result<View, Status> {
        let refused = Arc::clone(&self.refused);
        let report = move |event: Event<'_>| {
            if let Event::Rejected { reason, .. } = event {
                refused.lock().unwrap().push(reason.to_owned());
            }
        };
        Ok(View {
            identity: "anyone".into(),
            resources: server::ResourceFeed {
                snapshot: self.resources.subscribe(),
                interest: Arc::default(),
            },
            report: Box::new(report),
            remembered: Arc::default(),
            ended: Box::pin(pending()),
        })
    }
}
