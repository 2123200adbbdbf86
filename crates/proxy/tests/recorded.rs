//! What a real istiod sent, served to a running sidecar, and requests through it: header matches, faults and weights
//! of Istio's traffic management tasks, over mutual TLS. Only addresses are others: the listener for port 9080 is bound
//! here, and the recorded endpoints are servers of this test.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::{
    collections::HashMap,
    fs,
    io::Read as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bytes::Bytes;
use prost::Message as _;
use skysail_core::SpiffeId;
use skysail_identity::{Authority, KeyAndCsr, Live, NameMatch, PeerCheck, TlsSpec};
use skysail_xds::{
    Kind, Resource, Resources,
    client::Form,
    envoy::pb::envoy::{
        config::{
            core::v3::{
                Address, DataSource, Node, SocketAddress, address, data_source::Specifier,
                socket_address::PortSpecifier,
            },
            endpoint::v3::{ClusterLoadAssignment, lb_endpoint::HostIdentifier},
            listener::v3::Listener,
        },
        extensions::transport_sockets::tls::v3::{
            CertificateValidationContext, Secret, TlsCertificate, secret,
        },
        service::{
            discovery::v3::{
                DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
            },
            secret::v3::secret_discovery_service_server::{
                SecretDiscoveryService, SecretDiscoveryServiceServer,
            },
        },
    },
    server::{DiscoveryService, Event, View, Views},
};
use support::{Client, within};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    sync::watch,
};
use tokio_stream::{Stream, StreamExt as _, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// The recorded address of a pod, its service account, and what its server calls itself.
const PODS: [(&str, &str, &str); 4] = [
    ("10.244.0.13", "bookinfo-reviews", "reviews-v1"),
    ("10.244.1.12", "bookinfo-reviews", "reviews-v2"),
    ("10.244.2.11", "bookinfo-reviews", "reviews-v3"),
    ("10.244.1.11", "bookinfo-ratings", "ratings-v1"),
];
const LISTENER: &str = "0.0.0.0_9080";

/// A sidecar of productpage that has taken a scenario.
struct Sidecar {
    _child: Child,
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
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/istiod").join(scenario);
        let proxy = folder.join("xds/productpage-v1");
        let refused = Arc::default();
        let control = discovery(&mesh, resources(&proxy, &servers), &refused).await;
        let home = tempfile::tempdir().unwrap();
        let file = bootstrap(home.path(), &proxy, control);
        let mut child = Command::new(env!("CARGO_BIN_EXE_skysail-proxy"))
            .args(["--concurrency", "1", "--admin-port", "0", "--bootstrap"])
            .arg(file)
            .env("NO_COLOR", "1")
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut admin = None;
        loop {
            let line = within(log.next_line()).await.unwrap().expect("the sidecar ended");
            if line.contains("admin page") {
                admin = line.rsplit('=').next().map(|address| address.trim().parse().unwrap());
            }
            if line.contains("ready: the first configuration") {
                break;
            }
        }
        tokio::spawn(async move { while let Ok(Some(_)) = log.next_line().await {} });
        let listeners = page(admin.unwrap(), "/listeners").await;
        let address = listeners.lines().find_map(|line| line.strip_prefix(&format!("{LISTENER}::")));
        Self { _child: child, address: address.unwrap().trim().parse().unwrap(), refused }
    }

    /// Asks a service; `user` is the header `end-user`. The status and the body.
    async fn ask(&self, service: &str, user: Option<&str>) -> (u16, String) {
        let mut client = Client::new(TcpStream::connect(self.address).await.unwrap());
        let user = user.map(|user| format!("end-user: {user}\r\n")).unwrap_or_default();
        client.send(&format!("GET /{service}/0 HTTP/1.1\r\nhost: {service}:9080\r\n{user}\r\n")).await;
        let (head, body) = client.message().await;
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body)
    }

    /// Nothing was refused.
    fn took_all(&self) {
        assert_eq!(*self.refused.lock().unwrap(), [""; 0]);
    }
}

#[tokio::test]
async fn a_header_leads_to_another_version() {
    let sidecar = Sidecar::start("c-reviews-test-v2").await;
    for _ in 0..3 {
        assert_eq!(sidecar.ask("reviews", None).await, (200, "reviews-v1".to_owned()));
        assert_eq!(sidecar.ask("reviews", Some("jason")).await, (200, "reviews-v2".to_owned()));
        assert_eq!(sidecar.ask("ratings", Some("jason")).await, (200, "ratings-v1".to_owned()));
    }
    sidecar.took_all();
}

#[tokio::test]
async fn requests_of_one_user_are_aborted() {
    let sidecar = Sidecar::start("d-fault-abort").await;
    assert_eq!(sidecar.ask("ratings", Some("jason")).await, (500, "fault filter abort".to_owned()));
    assert_eq!(sidecar.ask("ratings", None).await, (200, "ratings-v1".to_owned()));
    sidecar.took_all();
}

#[tokio::test]
async fn requests_of_one_user_are_delayed() {
    let sidecar = Sidecar::start("d-fault-delay").await;
    let start = Instant::now();
    assert_eq!(sidecar.ask("ratings", Some("jason")).await, (200, "ratings-v1".to_owned()));
    assert!(start.elapsed() >= Duration::from_secs(7));
    assert_eq!(sidecar.ask("ratings", None).await, (200, "ratings-v1".to_owned()));
    sidecar.took_all();
}

#[tokio::test]
async fn weights_share_requests_out() {
    let sidecar = Sidecar::start("e-reviews-50-v3").await;
    let mut answers: HashMap<String, u32> = HashMap::new();
    for _ in 0..200 {
        let (status, answer) = sidecar.ask("reviews", None).await;
        assert_eq!(status, 200, "{answer}");
        *answers.entry(answer).or_default() += 1;
    }
    // Fewer than one in ten million fair draws of 200 are below 63.
    let share = |name: &str| answers.get(name).copied().unwrap_or_default();
    assert!(share("reviews-v1") >= 63 && share("reviews-v3") >= 63, "{answers:?}");
    assert_eq!(share("reviews-v1") + share("reviews-v3"), 200, "{answers:?}");
    sidecar.took_all();
}

#[tokio::test]
async fn all_go_to_one_version_and_nothing_is_refused() {
    let sidecar = Sidecar::start("b-mtls-all-v1").await;
    assert_eq!(sidecar.ask("reviews", Some("jason")).await, (200, "reviews-v1".to_owned()));
    sidecar.took_all();
    let sidecar = Sidecar::start("a-bookinfo").await;
    assert_eq!(sidecar.ask("ratings", Some("jason")).await, (200, "ratings-v1".to_owned()));
    sidecar.took_all();
}

/// What a workload's TLS is checked with and shows.
fn spec(mesh: &Authority, account: &str) -> (TlsSpec, String, String) {
    let id = SpiffeId::new("cluster.local", "default", account);
    let request = KeyAndCsr::generate(Some(&id)).unwrap();
    let signed = mesh.sign(&request.csr_pem, &id, Duration::from_hours(1)).unwrap();
    let key = request.key_pem();
    let identity = request.finish(signed.pem().as_bytes()).unwrap();
    let caller = SpiffeId::new("cluster.local", "default", "bookinfo-productpage");
    let names = vec![NameMatch::uri(caller.to_string())];
    let spec = TlsSpec {
        identities: vec![Live::new(identity)],
        peer: Some(PeerCheck::spiffe(Live::new(mesh.roots().unwrap()), names)),
        alpn: vec![b"http/1.1".to_vec()],
        ..TlsSpec::default()
    };
    (spec, signed.pem(), key)
}

/// A pod: takes mutual TLS from productpage alone, and answers with its name.
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

/// The recorded resources, with the addresses of this test.
fn resources(proxy: &Path, servers: &HashMap<&str, SocketAddr>) -> Resources {
    let mut resources = Resources::default();
    for kind in [Kind::Cluster, Kind::Endpoint, Kind::Listener, Kind::Route] {
        let mut bytes = Vec::new();
        let file = fs::File::open(proxy.join(format!("{}.sotw.pb.gz", kind.short()))).unwrap();
        flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
        for any in DiscoveryResponse::decode(bytes.as_slice()).unwrap().resources {
            let (name, body) = match kind {
                Kind::Listener => listener(&any.value),
                Kind::Endpoint => assignment(&any.value, servers),
                _ => (name(&any.value), any.value),
            };
            // The others are found by the address a connection was for, which takes interception.
            if kind != Kind::Listener || name == LISTENER {
                resources.insert(Resource::from_body(kind, &name, Bytes::from(body)));
            }
        }
    }
    resources
}

/// The name of a cluster or a route configuration, which is its first field.
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

/// A bootstrap file as Istio's agent writes it, as far as it matters here.
fn bootstrap(home: &Path, proxy: &Path, control: SocketAddr) -> PathBuf {
    let mut node: serde_json::Value =
        serde_json::from_slice(&fs::read(proxy.join("node.json")).unwrap()).unwrap();
    for what_envoy_adds in ["userAgentName", "userAgentBuildVersion", "clientFeatures"] {
        node.as_object_mut().unwrap().remove(what_envoy_adds);
    }
    let cluster = |name: &str| {
        serde_json::json!({
            "name": name, "type": "STATIC", "connect_timeout": "1s",
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}}}},
            "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {
                "socket_address": {"address": "127.0.0.1", "port_value": control.port()}}}}]}]}
        })
    };
    let ads = serde_json::json!({"ads": {}, "resource_api_version": "V3"});
    let file = serde_json::json!({
        "node": node,
        "dynamic_resources": {
            "lds_config": ads, "cds_config": ads,
            "ads_config": {"api_type": "DELTA_GRPC", "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}]}
        },
        "static_resources": {"clusters": [cluster("xds-grpc"), cluster("sds-grpc")]}
    });
    let path = home.join("bootstrap.json");
    fs::write(&path, file.to_string()).unwrap();
    path
}

async fn page(admin: SocketAddr, path: &str) -> String {
    let mut client = Client::new(TcpStream::connect(admin).await.unwrap());
    client.send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")).await;
    client.rest().await
}

/// Discovery and secrets on one port, in plain text.
async fn discovery(
    mesh: &Arc<Authority>,
    resources: Resources,
    refused: &Arc<Mutex<Vec<String>>>,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let one = OneView { resources: watch::channel(Arc::new(resources)).0, refused: Arc::clone(refused) };
    let router = tonic::transport::Server::builder()
        .add_service(DiscoveryService::new(Arc::new(one)))
        .add_service(SecretDiscoveryServiceServer::new(Agent(Arc::clone(mesh))));
    tokio::spawn(async move {
        router.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
    });
    address
}

/// Gives everybody the same, and notes what is refused.
struct OneView {
    resources: watch::Sender<Arc<Resources>>,
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
        Ok(View { resources: self.resources.subscribe(), report: Box::new(report) })
    }
}

/// Serves certificates as Istio's agent does.
struct Agent(Arc<Authority>);

type Answers<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl SecretDiscoveryService for Agent {
    type StreamSecretsStream = Answers<DiscoveryResponse>;
    type DeltaSecretsStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_secrets(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamSecretsStream>, Status> {
        let mesh = Arc::clone(&self.0);
        let answers = request.into_inner().filter_map(move |request| {
            let request = request.ok()?;
            // An acknowledgement, after which nothing changes.
            let first = request.response_nonce.is_empty();
            first.then(|| Ok(secrets(&mesh, &request.resource_names)))
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn delta_secrets(
        &self,
        _: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaSecretsStream>, Status> {
        Err(Status::unimplemented("not asked for"))
    }

    async fn fetch_secrets(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented("not asked for"))
    }
}

fn secrets(mesh: &Authority, names: &[String]) -> DiscoveryResponse {
    let inline = |text: &str| {
        let specifier = Some(Specifier::InlineBytes(text.as_bytes().to_vec()));
        Some(DataSource { specifier, ..DataSource::default() })
    };
    let secret = |name: &String| {
        let content = if name == "ROOTCA" {
            let trusted_ca = inline(mesh.root_pem());
            let context = CertificateValidationContext { trusted_ca, ..Default::default() };
            secret::Type::ValidationContext(context)
        } else {
            let (_, chain, key) = spec(mesh, "bookinfo-productpage");
            secret::Type::TlsCertificate(TlsCertificate {
                certificate_chain: inline(&chain),
                private_key: inline(&key),
                ..Default::default()
            })
        };
        let secret = Secret { name: name.clone(), r#type: Some(content) };
        let url = Kind::Secret.url().to_owned();
        skysail_xds::envoy::pb::google::protobuf::Any { type_url: url, value: secret.encode_to_vec() }
    };
    DiscoveryResponse {
        version_info: "1".into(),
        nonce: "1".into(),
        type_url: Kind::Secret.url().into(),
        resources: names.iter().map(secret).collect(),
        ..DiscoveryResponse::default()
    }
}
