//! Replays istiod's recorded responses in their order: first the initial ones, then the updates.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use prost::Message;
use skysail_identity::Authority;
use skysail_xds::{
    Kind,
    envoy::pb::{
        envoy::{
            config::listener::v3::Listener,
            extensions::transport_sockets::tls::v3::{Secret, secret},
            service::{
                discovery::v3::{
                    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
                    aggregated_discovery_service_server::{
                        AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
                    },
                },
                secret::v3::secret_discovery_service_server::SecretDiscoveryServiceServer,
            },
        },
        google::protobuf::Any,
    },
};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc},
};
use tokio_stream::{
    StreamExt as _,
    wrappers::{TcpListenerStream, UnboundedReceiverStream},
};
use tonic::{Request, Response, Status, Streaming};

use crate::agent::{self, Agent, unpacked};

/// A replay and its progress.
pub(crate) struct Player {
    mesh: Arc<Authority>,
    /// Directory of the initial responses.
    folder: PathBuf,
    /// Updates that follow them.
    updates: Vec<(Kind, PathBuf)>,
    /// Notified when the sidecar is ready for the updates.
    pub(crate) ready: Notify,
    /// Notified when everything was sent and answered.
    pub(crate) finished: Notify,
    pub(crate) state: Mutex<State>,
}

/// State of the discovery stream.
#[derive(Default)]
pub(crate) struct State {
    /// Reasons of the sidecar's rejections.
    pub(crate) refused: Vec<String>,
    /// Names of the resources that the sidecar must have.
    pub(crate) there: HashMap<Kind, BTreeSet<String>>,
}

impl Player {
    /// Starts a replay of the recording in a directory; returns the address for the sidecar.
    pub(crate) async fn start(folder: &Path) -> (Arc<Self>, SocketAddr) {
        let mut files: Vec<PathBuf> = fs::read_dir(folder.join("updates"))
            .map(|entries| entries.map(|entry| entry.unwrap().path()).collect())
            .unwrap_or_default();
        files.sort();
        let kind = |file: &PathBuf| {
            let name = file.file_name().unwrap().to_str().unwrap();
            Kind::ALL.into_iter().find(|kind| name[4..].starts_with(&format!("{}.", kind.short())))
        };
        let mesh = Arc::new(Authority::ephemeral().unwrap());
        let player = Arc::new(Self {
            mesh: Arc::clone(&mesh),
            folder: folder.to_owned(),
            // The name table is for the agent.
            updates: files.into_iter().filter_map(|file| Some((kind(&file)?, file))).collect(),
            ready: Notify::new(),
            finished: Notify::new(),
            state: Mutex::default(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = tonic::transport::Server::builder()
            .add_service(AggregatedDiscoveryServiceServer::new(Service(Arc::clone(&player))))
            .add_service(SecretDiscoveryServiceServer::new(Agent(mesh)));
        tokio::spawn(async move {
            router.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        (player, address)
    }

    async fn play<F: Form>(
        self: Arc<Self>,
        mut requests: Streaming<F::Request>,
        answers: mpsc::UnboundedSender<Result<F::Response, Status>>,
    ) {
        let mut subscribed: HashMap<Kind, Vec<String>> = HashMap::new();
        let mut unanswered = HashSet::new();
        let mut updates = self.updates.iter();
        let mut updating = false;
        let send = |unanswered: &mut HashSet<String>, kind, file: &Path| {
            let mut response = F::Response::decode(unpacked(file).as_slice()).unwrap();
            let nonce = file.file_name().unwrap().to_string_lossy().into_owned();
            F::prepare(&mut response, kind, &nonce, &self);
            unanswered.insert(nonce);
            // Sending fails once the sidecar has ended.
            let _ = answers.send(Ok(response));
        };
        loop {
            tokio::select! {
                () = self.ready.notified() => updating = true,
                request = requests.next() => {
                    let Some(Ok(request)) = request else { return };
                    let RequestParts { url, names, nonce, refused } = F::parts(request);
                    let kind = Kind::from_url(&url).unwrap();
                    unanswered.remove(&nonce);
                    self.state.lock().unwrap().refused.extend(refused);
                    let is_new = nonce.is_empty()
                        || !names.is_empty() && subscribed.get(&kind).is_none_or(|known| *known != names);
                    subscribed.insert(kind, names);
                    if is_new && !updating {
                        let name = format!("{}.{}.pb.gz", kind.short(), F::NAME);
                        send(&mut unanswered, kind, &self.folder.join(name));
                    }
                }
            }
            if updating && unanswered.is_empty() {
                match updates.next() {
                    Some((kind, file)) => send(&mut unanswered, *kind, file),
                    None => self.finished.notify_one(),
                }
            }
        }
    }

    /// Assigns free ports to listeners and adds the omitted private keys.
    fn prepare(&self, kind: Kind, resource: &mut Any) {
        match kind {
            Kind::Listener => {
                let mut listener = Listener::decode(resource.value.as_slice()).unwrap();
                if listener.bind_to_port.is_none_or(|bind| bind.value) {
                    listener.address = Some(super::socket("127.0.0.1", 0));
                    listener.additional_addresses.clear();
                }
                resource.value = listener.encode_to_vec();
            }
            Kind::Secret => {
                let mut secret = Secret::decode(resource.value.as_slice()).unwrap();
                if let Some(secret::Type::TlsCertificate(certificate)) = &mut secret.r#type {
                    *certificate = agent::certificate(&self.mesh);
                }
                resource.value = secret.encode_to_vec();
            }
            _ => {}
        }
    }
}

/// Contents of a request.
struct RequestParts {
    url: String,
    names: Vec<String>,
    nonce: String,
    refused: Option<String>,
}

/// One of the two variants of the discovery protocol.
trait Form {
    /// Name in file names.
    const NAME: &str;
    type Request;
    type Response: Message + Default;

    fn parts(request: Self::Request) -> RequestParts;
    fn prepare(response: &mut Self::Response, kind: Kind, nonce: &str, player: &Player);
}

struct StateOfTheWorld;

impl Form for StateOfTheWorld {
    const NAME: &str = "sotw";
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;

    fn parts(request: DiscoveryRequest) -> RequestParts {
        RequestParts {
            url: request.type_url,
            names: request.resource_names,
            nonce: request.response_nonce,
            refused: request.error_detail.map(|error| error.message),
        }
    }

    fn prepare(response: &mut DiscoveryResponse, kind: Kind, nonce: &str, player: &Player) {
        nonce.clone_into(&mut response.nonce);
        response.resources.iter_mut().for_each(|resource| player.prepare(kind, resource));
        let names = response.resources.iter().map(|resource| super::name(&resource.value)).collect();
        player.state.lock().unwrap().there.insert(kind, names);
    }
}

struct Delta;

impl Form for Delta {
    const NAME: &str = "delta";
    type Request = DeltaDiscoveryRequest;
    type Response = DeltaDiscoveryResponse;

    fn parts(request: DeltaDiscoveryRequest) -> RequestParts {
        RequestParts {
            url: request.type_url,
            names: request.resource_names_subscribe,
            nonce: request.response_nonce,
            refused: request.error_detail.map(|error| error.message),
        }
    }

    fn prepare(response: &mut DeltaDiscoveryResponse, kind: Kind, nonce: &str, player: &Player) {
        nonce.clone_into(&mut response.nonce);
        let bodies = response.resources.iter_mut().filter_map(|resource| resource.resource.as_mut());
        bodies.for_each(|resource| player.prepare(kind, resource));
        let mut state = player.state.lock().unwrap();
        let there = state.there.entry(kind).or_default();
        there.retain(|name| !response.removed_resources.contains(name));
        there.extend(response.resources.iter().map(|resource| resource.name.clone()));
    }
}

struct Service(Arc<Player>);

impl Service {
    fn answer<F: Form<Request: Send + 'static, Response: Send> + 'static>(
        &self,
        requests: Request<Streaming<F::Request>>,
    ) -> Response<UnboundedReceiverStream<Result<F::Response, Status>>> {
        let (answers, receiver) = mpsc::unbounded_channel();
        tokio::spawn(Arc::clone(&self.0).play::<F>(requests.into_inner(), answers));
        Response::new(UnboundedReceiverStream::new(receiver))
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type StreamAggregatedResourcesStream = UnboundedReceiverStream<Result<DiscoveryResponse, Status>>;
    type DeltaAggregatedResourcesStream = UnboundedReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn stream_aggregated_resources(
        &self,
        requests: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        Ok(self.answer::<StateOfTheWorld>(requests))
    }

    async fn delta_aggregated_resources(
        &self,
        requests: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        Ok(self.answer::<Delta>(requests))
    }
}
