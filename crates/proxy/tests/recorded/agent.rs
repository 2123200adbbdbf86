//! The environment of a sidecar in its pod: the program, started as Istio's agent starts it, and certificates.

use std::{
    fs,
    io::Read as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use prost::Message as _;
use skysail_core::SpiffeId;
use skysail_identity::{Authority, KeyAndCsr, Live, NameMatch, PeerCheck, TlsSpec};
use skysail_xds::{
    Kind,
    envoy::pb::envoy::{
        config::core::v3::{DataSource, data_source::Specifier},
        extensions::transport_sockets::tls::v3::{
            CertificateValidationContext, Secret, TlsCertificate, secret,
        },
        service::{
            discovery::v3::{
                DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
            },
            secret::v3::secret_discovery_service_server::SecretDiscoveryService,
        },
    },
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::TcpStream,
    process::{Child, Command},
};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

use crate::support::{Client, within};

/// Returns the directory of a scenario.
pub(crate) fn recording(scenario: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/istiod").join(scenario)
}

/// Returns the uncompressed content of a file.
pub(crate) fn unpacked(file: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(file).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

/// A sidecar that runs until it is dropped.
pub(crate) struct Program {
    _child: Child,
    _home: TempDir,
    admin: SocketAddr,
}

impl Program {
    /// Starts a sidecar for the node of a recorded proxy, with these servers of configuration and secrets, and
    /// waits until the first configuration is in effect.
    pub(crate) async fn start(proxy: &Path, api_type: &str, control: SocketAddr, agent: SocketAddr) -> Self {
        let home = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_skysail-proxy"))
            .args(["--concurrency", "1", "--admin-port", "0", "--bootstrap"])
            .arg(bootstrap(home.path(), proxy, api_type, control, agent))
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
        Self { _child: child, _home: home, admin: admin.unwrap() }
    }

    /// Requests a page of its admin interface.
    pub(crate) async fn page(&self, path: &str) -> String {
        let mut client = Client::new(TcpStream::connect(self.admin).await.unwrap());
        client.send(&format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).await;
        client.rest().await
    }
}

/// Writes the relevant parts of the bootstrap of Istio's agent.
fn bootstrap(home: &Path, proxy: &Path, api_type: &str, control: SocketAddr, agent: SocketAddr) -> PathBuf {
    let mut node: serde_json::Value =
        serde_json::from_slice(&fs::read(proxy.join("node.json")).unwrap()).unwrap();
    for what_envoy_adds in ["userAgentName", "userAgentBuildVersion", "clientFeatures"] {
        node.as_object_mut().unwrap().remove(what_envoy_adds);
    }
    let cluster = |name: &str, server: SocketAddr| {
        serde_json::json!({
            "name": name, "type": "STATIC", "connect_timeout": "1s",
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}}}},
            "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {
                "socket_address": {"address": "127.0.0.1", "port_value": server.port()}}}}]}]}
        })
    };
    let ads = serde_json::json!({"ads": {}, "resource_api_version": "V3"});
    let file = serde_json::json!({
        "node": node,
        "dynamic_resources": {
            "lds_config": ads, "cds_config": ads,
            "ads_config": {"api_type": api_type, "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}]}
        },
        "static_resources": {"clusters": [cluster("xds-grpc", control), cluster("sds-grpc", agent)]}
    });
    let path = home.join("bootstrap.json");
    fs::write(&path, file.to_string()).unwrap();
    path
}

/// Returns the TLS settings of a workload, with its chain and key.
pub(crate) fn spec(mesh: &Authority, account: &str) -> (TlsSpec, String, String) {
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

/// Serves certificates as Istio's agent does.
pub(crate) struct Agent(pub(crate) Arc<Authority>);

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
            // An acknowledgement gets no further response.
            let first = request.response_nonce.is_empty();
            first.then(|| Ok(secrets(&mesh, &request.resource_names)))
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn delta_secrets(
        &self,
        _: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaSecretsStream>, Status> {
        Err(Status::unimplemented("not supported"))
    }

    async fn fetch_secrets(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented("not supported"))
    }
}

fn secrets(mesh: &Authority, names: &[String]) -> DiscoveryResponse {
    let secret = |name: &String| {
        let content = if name == "ROOTCA" || name.starts_with("file-root:") {
            let trusted_ca = inline(mesh.roots_pem());
            let context = CertificateValidationContext { trusted_ca, ..Default::default() };
            secret::Type::ValidationContext(context)
        } else {
            secret::Type::TlsCertificate(certificate(mesh))
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

/// Returns a certificate of the mesh with its key.
pub(crate) fn certificate(mesh: &Authority) -> TlsCertificate {
    let (_, chain, key) = spec(mesh, "bookinfo-productpage");
    TlsCertificate { certificate_chain: inline(&chain), private_key: inline(&key), ..Default::default() }
}

fn inline(text: &str) -> Option<DataSource> {
    let specifier = Some(Specifier::InlineBytes(text.as_bytes().to_vec()));
    Some(DataSource { specifier, ..DataSource::default() })
}
