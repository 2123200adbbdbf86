//! The server and the client against each other, over sockets.

mod arriving;

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
use skysail_proto::envoy::pb::envoy::{
    config::cluster::v3::Cluster, service::discovery::v3::DeltaDiscoveryRequest,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};
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
    limits::Limits,
};

/// Returns the same view for every client, and records the reported events.
struct FixedView {
    world: watch::Sender<Snapshot>,
    events: Arc<watch::Sender<Vec<String>>>,
    connects: AtomicUsize,
}

impl Views for FixedView {
    async fn connect(&self, node: Node, _: Form, call: Request<()>) -> Result<View, Status> {
        assert!(call.extensions().get::<TcpConnectInfo>().is_some());
        self.connects.fetch_add(1, Ordering::Relaxed);
        if node.id != "client" {
            return Err(Status::permission_denied("not you"));
        }
        let events = Arc::clone(&self.events);
        let report = move |event: Event<'_>| events.send_modify(|events| events.push(format!("{event:?}")));
        let resources = super::ResourceFeed { snapshot: self.world.subscribe(), interest: Arc::default() };
        let identity = node.id.into();
        let (report, ended) = (Box::new(report), Box::pin(pending()));
        Ok(View { identity, resources, report, remembered: Arc::default(), ended })
    }
}

impl FixedView {
    /// Waits until this number of responses was sent.
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
    views: Arc<FixedView>,
    address: SocketAddr,
    limits: Arc<Limits>,
}

async fn serve(world: Resources, address: &str) -> Server {
    serve_with(Limits::default(), world, address).await
}

async fn serve_with(limits: Limits, world: Resources, address: &str) -> Server {
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut layer = Layer::default();
    layer.replace(1, &world);
    let views = Arc::new(FixedView {
        world: watch::channel(Snapshot { shared: Arc::new(layer), ..Snapshot::default() }).0,
        events: Arc::default(),
        connects: AtomicUsize::new(0),
    });
    let service = DiscoveryService::new(Arc::clone(&views));
    let limits = Arc::new(limits);
    let all = Arc::clone(&limits);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let mut extensions = Extensions::new();
            extensions.insert(stream.connect_info());
            let (service, limits) = (service.clone(), Arc::clone(&all));
            tokio::spawn(async move { grpc::serve(stream, extensions, &service, &limits, pending()).await });
        }
    });
    Server { views, address, limits }
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

/// Returns an encoded message that has only a name.
fn encoded(name: &str) -> Vec<u8> {
    use prost::Message as _;
    Cluster { name: name.into(), ..Cluster::default() }.encode_to_vec()
}

/// A running client that keeps its resources and rejects clusters called "bad".
struct TestClient {
    state: watch::Receiver<BTreeMap<(Kind, String), Bytes>>,
    updates: Arc<Mutex<Vec<Update>>>,
    connected: watch::Receiver<bool>,
    task: tokio::task::JoinHandle<Infallible>,
}

fn take(address: SocketAddr, form: Form, id: &str) -> TestClient {
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
    TestClient { state, updates, connected, task: tokio::spawn(client.run(connect, handler)) }
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

impl TestClient {
    async fn until(&mut self, names: &[&str]) {
        self.state
            .wait_for(|state| {
                let of = |kind| state.keys().filter(move |(k, _)| *k == kind).map(|(_, name)| name.as_str());
                // The state keeps the endpoints of deleted clusters, which this test ignores.
                of(Kind::Cluster).eq(names.iter().copied())
                    && names.iter().all(|name| of(Kind::Endpoint).any(|n| n == *name))
            })
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn both_forms_deliver_everything_and_then_changes() {
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
        // The client requests endpoints after it has answered the clusters, so the rejection is recorded.
        let events = server.views.events.borrow().clone();
        let rejected = events.iter().find(|event| event.starts_with("Rejected")).unwrap();
        assert!(rejected.contains("bad: it is bad"), "{rejected}");
        taker.task.abort();
    }
}

#[tokio::test]
async fn a_restarted_server_sends_only_what_changed() {
    // A runtime of its own, whose shutdown is like the end of a process.
    let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = process.spawn(serve(world(&[("a", 1), ("b", 1)]), "127.0.0.1:0")).await.unwrap();
    let address = first.address;
    let mut taker = take(address, Form::Delta, "client");
    taker.until(&["a", "b"]).await;
    let end = move || process.shutdown_timeout(std::time::Duration::from_secs(10));
    tokio::task::spawn_blocking(end).await.unwrap();
    taker.connected.wait_for(|connected| !connected).await.unwrap();
    assert_eq!(taker.state.borrow().len(), 4, "a lost server changes no resource");
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
async fn an_unknown_client_is_refused_with_the_reason() {
    let server = serve(world(&[("a", 1)]), "127.0.0.1:0").await;
    let endpoint = Endpoint::from_shared(format!("http://{}", server.address)).unwrap();
    let mut client = skysail_proto::envoy::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient::new(endpoint.connect().await.unwrap());
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

/// A client with a small window that reads only when a test says so.
struct SlowClient {
    connection: h2::client::Connection<TcpStream, Bytes>,
    requests: h2::SendStream<Bytes>,
    answer: h2::client::ResponseFuture,
}

impl SlowClient {
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
        self.send_all(std::slice::from_ref(request));
    }

    /// Sends requests in frames of usual length: HTTP/2 limits the number of short frames in a row.
    fn send_all(&mut self, requests: &[DeltaDiscoveryRequest]) {
        let bytes = requests.iter().map(grpc::framed).collect::<Vec<_>>().concat();
        self.requests.send_data(bytes.into(), false).unwrap();
    }

    /// ReadAll and acknowledges responses up to the one that removes this name.
    async fn until_gone(mut self, name: &str) -> Vec<wire::DeltaResponse> {
        // The window can change only after the server has acknowledged the first settings.
        while self.connection.set_initial_window_size(1 << 20).is_err() {
            alongside(&mut self.connection, tokio::task::yield_now()).await;
        }
        let mut body = alongside(&mut self.connection, &mut self.answer).await.unwrap().into_body();
        let (mut bytes, mut responses) = (bytes::BytesMut::new(), Vec::<wire::DeltaResponse>::new());
        while !responses
            .iter()
            .flat_map(|response| &response.removed_resources)
            .any(|removed| removed == name)
        {
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

/// Awaits a future while the connection makes progress.
async fn alongside<T, IO: AsyncRead + AsyncWrite + Unpin>(
    connection: &mut h2::client::Connection<IO, Bytes>,
    future: impl Future<Output = T>,
) -> T {
    tokio::select! {
        done = future => done,
        ended = connection => panic!("the connection ended: {ended:?}"),
    }
}

/// Returns a first request of a client that the view accepts.
fn first(kind: Kind, names: &[&str]) -> DeltaDiscoveryRequest {
    let node = Node { id: "client".into(), ..Node::default() };
    DeltaDiscoveryRequest { node: Some(node), ..request(kind, names) }
}

fn request(kind: Kind, names: &[&str]) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: kind.url().into(),
        resource_names_subscribe: names.iter().map(|name| (*name).to_owned()).collect(),
        ..Default::default()
    }
}

impl SlowClient {
    /// Waits until the server has read a request for this type.
    async fn until_asked(&mut self, server: &Server, kind: Kind) {
        let requested = format!("{:?}", Event::Requested { kind, generation: None });
        let mut events = server.views.events.subscribe();
        alongside(&mut self.connection, events.wait_for(|events| events.contains(&requested))).await.unwrap();
    }

    /// Returns the nonce of the first response.
    async fn nonce(&mut self) -> String {
        while self.connection.set_initial_window_size(1 << 20).is_err() {
            alongside(&mut self.connection, tokio::task::yield_now()).await;
        }
        let mut body = alongside(&mut self.connection, &mut self.answer).await.unwrap().into_body();
        let message = alongside(&mut self.connection, body.data()).await.unwrap().unwrap();
        let response: wire::DeltaResponse = prost::Message::decode(message.slice(5..)).unwrap();
        response.nonce
    }

    /// Returns the status with which the call ends.
    async fn status(mut self) -> Status {
        while self.connection.set_initial_window_size(1 << 20).is_err() {
            alongside(&mut self.connection, tokio::task::yield_now()).await;
        }
        let answer = alongside(&mut self.connection, &mut self.answer).await.unwrap();
        if let Some(status) = Status::from_header_map(answer.headers()) {
            return status;
        }
        let mut body = answer.into_body();
        while let Some(piece) = alongside(&mut self.connection, body.data()).await {
            body.flow_control().release_capacity(piece.unwrap().len()).unwrap();
        }
        let trailers = alongside(&mut self.connection, body.trailers()).await.unwrap().unwrap();
        Status::from_header_map(&trailers).unwrap()
    }
}

/// Returns the number of responses that were made.
fn sent(server: &Server) -> usize {
    server.views.events.borrow().iter().filter(|event| event.starts_with("Sent")).count()
}

fn hosts() -> Resources {
    let mut world = world(&[("a", 1)]);
    for host in ["80/a", "80/b"] {
        world.insert(Resource::from_body(Kind::VirtualHost, host, Bytes::copy_from_slice(&encoded(host))));
    }
    world
}

#[tokio::test]
async fn a_client_that_does_not_read_gets_one_response() {
    let server = serve(hosts(), "127.0.0.1:0").await;
    let mut slow = SlowClient::connect(server.address, &first(Kind::VirtualHost, &["80"])).await;
    let mut requests = Vec::new();
    for guess in 1..=1_000 {
        let again = request(Kind::VirtualHost, &["80"]);
        let mut change = again.clone();
        if guess % 2 == 1 {
            std::mem::swap(&mut change.resource_names_subscribe, &mut change.resource_names_unsubscribe);
        }
        requests.push(DeltaDiscoveryRequest { response_nonce: guess.to_string(), ..change });
        requests.push(DeltaDiscoveryRequest { response_nonce: format!("{guess}-{guess:016x}"), ..again });
    }
    slow.send_all(&requests);
    // A response of another type also waits until the first one is read.
    slow.send(&request(Kind::Cluster, &[]));
    slow.send(&request(Kind::Endpoint, &["a"]));
    slow.until_asked(&server, Kind::Endpoint).await;
    assert_eq!(sent(&server), 1);
    assert_eq!(server.limits.reached(Bound::Nonce), 2_000);
}

#[tokio::test]
async fn responses_are_encoded_as_far_as_the_client_reads() {
    /// Sends an endless number of pieces.
    struct Endless(Arc<AtomicUsize>);
    const PIECE: usize = 1_000;

    impl Service for Endless {
        fn has(&self, _: &str) -> bool {
            true
        }

        fn handle(&self, mut call: Call) -> CallFuture {
            let made = Arc::clone(&self.0);
            Box::pin(async move {
                let pieces = std::iter::repeat_with(move || {
                    made.fetch_add(1, Ordering::Relaxed);
                    Bytes::from_static(&[0; PIECE])
                });
                call.responses.send(pieces).unwrap();
                _ = call.responses.flushed().await;
            })
        }
    }

    let (client, server) = tokio::io::duplex(1 << 30);
    let made = Arc::<AtomicUsize>::default();
    let (endless, limits) = (Endless(Arc::clone(&made)), Arc::<Limits>::default());
    tokio::spawn(async move { grpc::serve(server, Extensions::new(), &endless, &limits, pending()).await });
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(10 * PIECE as u32);
    let (client, mut connection) = builder.handshake::<_, Bytes>(client).await.unwrap();
    let mut client = alongside(&mut connection, client.ready()).await.unwrap();
    let request =
        http::Request::post("http://a/b").header("content-type", "application/grpc").body(()).unwrap();
    let (answer, _requests) = client.send_request(request, false).unwrap();
    let mut body = alongside(&mut connection, answer).await.unwrap().into_body();
    let mut read = 0;
    for _ in 0..100 {
        let piece = alongside(&mut connection, body.data()).await.unwrap().unwrap();
        read += piece.len();
        let ahead = made.load(Ordering::Relaxed) * PIECE - read;
        assert!(ahead <= 11 * PIECE, "{ahead} bytes were made for a window of {}", 10 * PIECE);
        body.flow_control().release_capacity(piece.len()).unwrap();
    }
}

#[tokio::test]
async fn the_number_of_authorities_of_a_stream_is_limited() {
    let server = serve(hosts(), "127.0.0.1:0").await;
    let names: Vec<_> = (0..=limits::MAX_AUTHORITIES).map(|number| format!("80/none-{number}")).collect();
    let rest: Vec<_> = names.iter().skip(1).map(String::as_str).collect();
    let mut slow = SlowClient::connect(server.address, &first(Kind::VirtualHost, &rest)).await;
    slow.until_asked(&server, Kind::VirtualHost).await;
    assert_eq!(server.limits.reached(Bound::Names), 0);
    slow.send(&request(Kind::VirtualHost, &[&names[0]]));
    let status = slow.status().await;
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
    assert_eq!(server.limits.reached(Bound::Names), 1);
}

#[tokio::test]
async fn a_client_that_does_not_read_is_disconnected() {
    let limits = Limits::new(Duration::from_millis(50), 10, 1 << 20);
    let server = serve_with(limits, hosts(), "127.0.0.1:0").await;
    let slow = SlowClient::connect(server.address, &first(Kind::VirtualHost, &["80"])).await;
    // The connection still answers PINGs.
    _ = slow.connection.await;
    assert_eq!(server.limits.reached(Bound::Unread), 1);
}

#[tokio::test]
async fn too_many_unknown_names_end_the_stream() {
    let limits = Limits::new(Duration::from_secs(60), 10, 100_000);
    let server = serve_with(limits, hosts(), "127.0.0.1:0").await;
    let mut slow = SlowClient::connect(server.address, &first(Kind::Endpoint, &["a"])).await;
    let names = |numbers: std::ops::Range<usize>| numbers.map(|number| format!("none-{number}"));
    // Names from which the client unsubscribes do not count.
    let in_turn = names(0..10_000).flat_map(|name| {
        let requested = request(Kind::Endpoint, &[&name]);
        let back = request(Kind::Endpoint, &[]);
        [requested, DeltaDiscoveryRequest { resource_names_unsubscribe: vec![name], ..back }]
    });
    slow.send_all(&in_turn.collect::<Vec<_>>());
    slow.send(&request(Kind::Cluster, &[]));
    slow.until_asked(&server, Kind::Cluster).await;
    assert_eq!(server.limits.reached(Bound::IdentityNames), 0);
    let all = names(0..2_000).map(|name| request(Kind::Endpoint, &[&name]));
    slow.send_all(&all.collect::<Vec<_>>());
    let status = slow.status().await;
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert!(status.message().contains("names of client that no resource has"), "{status}");
    assert_eq!(server.limits.reached(Bound::IdentityNames), 1);
}

#[tokio::test]
async fn too_long_lists_of_names_end_the_stream() {
    let names: Vec<_> = (0..30).map(|number| format!("name-{number}")).collect();
    let all: Vec<_> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let server = serve(world(&all), "127.0.0.1:0").await;
    // Lists that other streams of the instance hold.
    let account = Arc::new(Account::new(Arc::clone(&server.limits), "test".into()));
    let caller = CallerAccount::new(&server.limits, &"client".into(), &"127.0.0.1".into());
    let mut other = StreamAccount::enter(account, caller).unwrap();
    other.set_list_bytes(limits::MAX_INSTANCE_LISTS - 10 * size_of::<Arc<str>>()).unwrap();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let mut slow = SlowClient::connect(server.address, &first(Kind::Endpoint, &names[..10])).await;
    slow.until_asked(&server, Kind::Endpoint).await;
    slow.send(&request(Kind::Endpoint, &names[10..20]));
    let status = slow.status().await;
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
    assert!(status.message().contains("lists of names"), "{status}");
}

#[tokio::test]
async fn the_number_of_streams_of_an_identity_is_limited() {
    let limits = Limits::new(Duration::from_secs(60), 1, 1 << 20);
    let server = serve_with(limits, hosts(), "127.0.0.1:0").await;
    let mut one = SlowClient::connect(server.address, &first(Kind::Cluster, &[])).await;
    one.until_asked(&server, Kind::Cluster).await;
    let status = SlowClient::connect(server.address, &first(Kind::Cluster, &[])).await.status().await;
    assert_eq!(
        (status.code(), status.message()),
        (tonic::Code::ResourceExhausted, "client has 1 discovery streams, which is the limit")
    );
}

#[tokio::test]
async fn a_long_nack_reason_is_truncated() {
    let server = serve(world(&[("a", 1)]), "127.0.0.1:0").await;
    let mut slow = SlowClient::connect(server.address, &first(Kind::Cluster, &[])).await;
    let response_nonce = slow.nonce().await;
    let error_detail =
        skysail_proto::envoy::pb::google::rpc::Status { message: "é".repeat(100_000), ..Default::default() };
    slow.send(&DeltaDiscoveryRequest {
        response_nonce,
        error_detail: Some(error_detail),
        ..request(Kind::Cluster, &[])
    });
    slow.send(&request(Kind::Listener, &[]));
    slow.until_asked(&server, Kind::Listener).await;
    let events = server.views.events.borrow().clone();
    let rejected = events.iter().find(|event| event.starts_with("Rejected")).unwrap();
    assert!(rejected.len() < limits::MAX_REASON + 100, "{}", rejected.len());
}

#[tokio::test]
async fn a_client_that_does_not_read_delays_no_other_and_skips_changes() {
    let server = serve(world(&[("first", 1)]), "127.0.0.1:0").await;
    let node = Node { id: "client".into(), ..Node::default() };
    let type_url = Kind::Cluster.url().to_owned();
    let mut slow = SlowClient::connect(
        server.address,
        &DeltaDiscoveryRequest { node: Some(node), type_url, ..Default::default() },
    )
    .await;
    // The first response is in flight before anything changes.
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
