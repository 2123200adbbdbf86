//! Server and client against each other over sockets.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::pending,
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use envoy_types::pb::envoy::config::cluster::v3::Cluster;
use tokio::net::{TcpListener, TcpStream};
use tonic::{
    Extensions,
    codegen::http,
    transport::{
        Endpoint,
        server::{Connected, TcpConnectInfo},
    },
};

use super::*;
use crate::{
    Layer, Resource, Resources,
    client::{Client, Connection, Options, Rejection, Subscriptions, Update},
    grpc,
};

/// Gives every client the same view and records what it reports.
struct OneView {
    world: watch::Sender<Snapshot>,
    events: Arc<watch::Sender<Vec<String>>>,
    connects: AtomicUsize,
}

impl Views for OneView {
    async fn connect(&self, node: Node, _: Form, call: Request<()>) -> Result<View, Status> {
        assert!(call.extensions().get::<TcpConnectInfo>().is_some());
        self.connects.fetch_add(1, Ordering::Relaxed);
        if node.id != "client" {
            return Err(Status::permission_denied("not you"));
        }
        let events = Arc::clone(&self.events);
        let report = move |event: Event<'_>| events.send_modify(|events| events.push(format!("{event:?}")));
        let resources = super::Resources { snapshot: self.world.subscribe(), interest: Arc::default() };
        Ok(View { resources, report: Box::new(report), remembered: Arc::default() })
    }
}

impl OneView {
    /// Waits until so many responses went out.
    async fn until_sent(&self, count: usize) {
        let sent = |events: &Vec<String>| events.iter().filter(|event| event.starts_with("Sent")).count();
        self.events.subscribe().wait_for(|events| sent(events) >= count).await.unwrap();
    }

    fn becomes(&self, world: &Resources) {
        self.world.send_modify(|now| {
            let generation = now.generation() + 1;
            Arc::make_mut(&mut now.shared).replace(generation, world);
        });
    }
}

struct Server {
    views: Arc<OneView>,
    address: SocketAddr,
}

async fn serve(world: Resources, address: &str) -> Server {
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut layer = Layer::default();
    layer.replace(1, &world);
    let views = Arc::new(OneView {
        world: watch::channel(Snapshot { shared: Arc::new(layer), ..Snapshot::default() }).0,
        events: Arc::default(),
        connects: AtomicUsize::new(0),
    });
    let service = DiscoveryService::new(Arc::clone(&views));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let mut extensions = Extensions::new();
            extensions.insert(stream.connect_info());
            let service = service.clone();
            tokio::spawn(async move { grpc::serve(stream, extensions, &service, pending()).await });
        }
    });
    Server { views, address }
}

fn world(clusters: &[(&str, u32)]) -> Resources {
    let mut resources = Resources::default();
    for (name, timeout) in clusters {
        let cluster =
            Cluster { name: (*name).into(), alt_stat_name: timeout.to_string(), ..Cluster::default() };
        resources.insert(Resource::encode(Kind::Cluster, name, &cluster));
        resources.insert(Resource::from_body(Kind::Endpoint, name, Bytes::copy_from_slice(&encoded(name))));
    }
    resources
}

/// A message with only a name.
fn encoded(name: &str) -> Vec<u8> {
    use prost::Message as _;
    Cluster { name: name.into(), ..Cluster::default() }.encode_to_vec()
}

/// A running client that keeps what it takes and rejects clusters called "bad".
struct Taker {
    state: watch::Receiver<BTreeMap<(Kind, String), Bytes>>,
    updates: Arc<Mutex<Vec<Update>>>,
    connected: watch::Receiver<bool>,
    task: tokio::task::JoinHandle<Infallible>,
}

fn take(address: SocketAddr, form: Form, id: &str) -> Taker {
    let node = Node { id: id.into(), ..Node::default() };
    let (client, subscriptions) = Client::new(Options { node, form, wildcard: vec![Kind::Cluster] });
    let (sender, state) = watch::channel(BTreeMap::new());
    let updates = Arc::new(Mutex::new(Vec::new()));
    let connected = subscriptions.connected();
    let kept = Arc::clone(&updates);
    let handler = async move |update: Update| {
        kept.lock().unwrap().push(update.clone());
        apply(&sender, &subscriptions, update)
    };
    let connect = async move || {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
        Ok(Connection::new(endpoint.connect().await?))
    };
    Taker { state, updates, connected, task: tokio::spawn(client.run(connect, handler)) }
}

fn apply(
    state: &watch::Sender<BTreeMap<(Kind, String), Bytes>>,
    subscriptions: &Subscriptions,
    update: Update,
) -> Vec<Rejection> {
    let (bad, good): (Vec<_>, Vec<_>) = update.added.into_iter().partition(|r| r.name == "bad");
    state.send_modify(|state| {
        for resource in &good {
            state.insert((update.kind, resource.name.clone()), resource.body.clone());
        }
        for name in &update.removed {
            state.remove(&(update.kind, name.clone()));
        }
        if update.kind == Kind::Cluster {
            let names = state.keys().filter(|(kind, _)| *kind == Kind::Cluster).map(|(_, name)| name.clone());
            subscriptions.set(Kind::Endpoint, names.collect());
        }
    });
    bad.into_iter().map(|r| Rejection { name: r.name, reason: "it is bad".into() }).collect()
}

impl Taker {
    async fn until(&mut self, names: &[&str]) {
        self.state
            .wait_for(|state| {
                let of = |kind| state.keys().filter(move |(k, _)| *k == kind).map(|(_, name)| name.as_str());
                // The state keeps endpoints of clusters that went; nobody looks at them.
                of(Kind::Cluster).eq(names.iter().copied())
                    && names.iter().all(|name| of(Kind::Endpoint).any(|n| n == *name))
            })
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn both_forms_bring_everything_and_then_changes() {
    for form in [Form::Delta, Form::Sotw] {
        let server = serve(world(&[("a", 1), ("b", 1)]), "127.0.0.1:0").await;
        let mut taker = take(server.address, form, "client");
        taker.until(&["a", "b"]).await;
        server.views.becomes(&world(&[("a", 1), ("b", 2), ("c", 1)]));
        taker.until(&["a", "b", "c"]).await;
        server.views.becomes(&world(&[("c", 1)]));
        taker.until(&["c"]).await;
        taker.task.abort();
    }
}

#[tokio::test]
async fn a_rejection_reaches_the_server_and_the_rest_is_used() {
    for form in [Form::Delta, Form::Sotw] {
        let server = serve(world(&[("a", 1), ("bad", 1)]), "127.0.0.1:0").await;
        let mut taker = take(server.address, form, "client");
        taker.until(&["a"]).await;
        // The endpoints are asked for after the clusters were answered, so the answer is there.
        let events = server.views.events.borrow().clone();
        let rejected = events.iter().find(|event| event.starts_with("Rejected")).unwrap();
        assert!(rejected.contains("bad: it is bad"), "{rejected}");
        taker.task.abort();
    }
}

#[tokio::test]
async fn a_restarted_server_sends_only_what_changed() {
    // A runtime of its own, whose end is like the end of a process.
    let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = process.spawn(serve(world(&[("a", 1), ("b", 1)]), "127.0.0.1:0")).await.unwrap();
    let address = first.address;
    let mut taker = take(address, Form::Delta, "client");
    taker.until(&["a", "b"]).await;
    let end = move || process.shutdown_timeout(std::time::Duration::from_secs(10));
    tokio::task::spawn_blocking(end).await.unwrap();
    taker.connected.wait_for(|connected| !connected).await.unwrap();
    assert_eq!(taker.state.borrow().len(), 4, "losing the server loses nothing");
    taker.updates.lock().unwrap().clear();

    let second = serve(world(&[("b", 2), ("c", 1)]), &address.to_string()).await;
    taker.until(&["b", "c"]).await;
    let clusters: Vec<_> = taker
        .updates
        .lock()
        .unwrap()
        .iter()
        .filter(|update| update.kind == Kind::Cluster)
        .flat_map(|update| update.added.iter().map(|resource| resource.name.clone()))
        .collect();
    assert_eq!(clusters, ["b", "c"]);
    assert_eq!(second.views.connects.load(Ordering::Relaxed), 1);
    taker.task.abort();
}

#[tokio::test]
async fn a_stranger_is_refused_with_the_reason() {
    let server = serve(world(&[("a", 1)]), "127.0.0.1:0").await;
    let endpoint = Endpoint::from_shared(format!("http://{}", server.address)).unwrap();
    let mut client = envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient::new(endpoint.connect().await.unwrap());
    let node = Node { id: "stranger".into(), ..Node::default() };
    let request = DeltaDiscoveryRequest {
        node: Some(node),
        type_url: Kind::Cluster.url().into(),
        ..Default::default()
    };
    let requests = tokio_stream::StreamExt::chain(tokio_stream::once(request), tokio_stream::pending());
    let status = client.delta_aggregated_resources(requests).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (tonic::Code::PermissionDenied, "not you"));
}

/// A client of its own kind, which takes no more than it says.
struct Slow {
    connection: h2::client::Connection<TcpStream, Bytes>,
    requests: h2::SendStream<Bytes>,
    answer: h2::client::ResponseFuture,
}

impl Slow {
    async fn connect(address: SocketAddr, first: &DeltaDiscoveryRequest) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let mut builder = h2::client::Builder::new();
        let (client, mut connection) = builder.initial_window_size(0).handshake(stream).await.unwrap();
        let mut client = alongside(&mut connection, client.ready()).await.unwrap();
        let request = http::Request::post(format!("http://a{}", wire::DELTA));
        let request = request.header("content-type", "application/grpc").body(()).unwrap();
        let (answer, requests) = client.send_request(request, false).unwrap();
        let mut slow = Self { connection, requests, answer };
        slow.send(first);
        slow
    }

    fn send(&mut self, request: &DeltaDiscoveryRequest) {
        self.requests.send_data(grpc::framed(request), false).unwrap();
    }

    /// Takes all there is from now on: the responses up to one that takes this name away. Each is acknowledged.
    async fn until_gone(mut self, name: &str) -> Vec<wire::DeltaResponse> {
        // Not before the server has acknowledged the first settings.
        while self.connection.set_initial_window_size(1 << 20).is_err() {
            alongside(&mut self.connection, tokio::task::yield_now()).await;
        }
        let mut body = alongside(&mut self.connection, &mut self.answer).await.unwrap().into_body();
        let (mut bytes, mut responses) = (bytes::BytesMut::new(), Vec::<wire::DeltaResponse>::new());
        while !responses.iter().flat_map(|response| &response.removed_resources).any(|gone| gone == name) {
            let piece = alongside(&mut self.connection, body.data()).await.unwrap().unwrap();
            body.flow_control().release_capacity(piece.len()).unwrap();
            bytes.extend_from_slice(&piece);
            let Some((prefix, content)) = bytes.split_first_chunk::<5>() else { continue };
            let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            if content.len() < length {
                continue;
            }
            let message = bytes.split_to(5 + length).freeze().slice(5..);
            let response: wire::DeltaResponse = prost::Message::decode(message).unwrap();
            let nonce = response.nonce.clone();
            self.send(&DeltaDiscoveryRequest {
                type_url: Kind::Cluster.url().into(),
                response_nonce: nonce,
                ..Default::default()
            });
            responses.push(response);
        }
        responses
    }
}

/// What comes of a future while the connection goes on.
async fn alongside<T>(
    connection: &mut h2::client::Connection<TcpStream, Bytes>,
    future: impl Future<Output = T>,
) -> T {
    tokio::select! {
        done = future => done,
        ended = connection => panic!("the connection ended: {ended:?}"),
    }
}

#[tokio::test]
async fn who_takes_nothing_holds_up_nobody_and_is_sent_the_last_of_many_changes() {
    let server = serve(world(&[("first", 1)]), "127.0.0.1:0").await;
    let node = Node { id: "client".into(), ..Node::default() };
    let type_url = Kind::Cluster.url().to_owned();
    let mut slow = Slow::connect(
        server.address,
        &DeltaDiscoveryRequest { node: Some(node), type_url, ..Default::default() },
    )
    .await;
    // Its first response is under way before anything changes.
    alongside(&mut slow.connection, server.views.until_sent(1)).await;
    let mut taker = take(server.address, Form::Delta, "client");
    taker.until(&["first"]).await;
    for change in 0..100 {
        let name = format!("change-{change}");
        server.views.becomes(&world(&[(&name, 1)]));
        taker.until(&[&name]).await;
    }
    let responses = slow.until_gone("first").await;
    let names: Vec<Vec<&str>> = responses
        .iter()
        .map(|response| response.resources.iter().map(|resource| &*resource.name).collect())
        .collect();
    assert_eq!(names, [vec!["first"], vec!["change-99"], vec![]]);
    taker.task.abort();
}
