//! Times of the distribution of resources, by the number of resources in the mesh or in a response. `skysail bench micro`
//! compares them with a baseline.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panic")]

#[path = "../../../benchmarks/micro.rs"]
mod settings;

use std::{
    future::pending,
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use criterion::{BatchSize, BenchmarkId, Criterion};
use skysail_xds::{
    Kind, Layer, Resource, Snapshot,
    client::{Client, Connection, Options, Update},
    envoy::pb::envoy::config::{
        cluster::v3::Cluster,
        core::v3::{Address, Node, SocketAddress, address, socket_address::PortSpecifier},
        endpoint::v3::{
            ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints, lb_endpoint::HostIdentifier,
        },
    },
    grpc,
    layer::Edits,
    limits::Limits,
    server::{DiscoveryService, Form, ResourceFeed, View, Views},
};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{Notify, watch},
};
use tonic::{Extensions, Request, Status, transport::Endpoint as ServerEndpoint};

/// Numbers of services in a mesh.
const MESHES: [usize; 2] = [1_000, 10_000];
/// Number of services behind the stream of pushes.
const PUSHED: usize = 200;
/// Length of the body of a resource in bytes, about that of a cluster.
const BODY: usize = 500;

fn main() {
    let mut criterion = settings::criterion();
    encode(&mut criterion);
    edit(&mut criterion);
    find(&mut criterion);
    push(&mut criterion);
    criterion.final_summary();
}

/// Encodes the endpoints of a service and hashes them.
fn encode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("xds/encode_endpoints");
    for endpoints in [10, 1_000] {
        let message = assignment(endpoints);
        group.bench_with_input(BenchmarkId::from_parameter(endpoints), &message, |bencher, message| {
            bencher.iter(|| Resource::encode(Kind::Endpoint, &message.cluster_name, black_box(message)));
        });
    }
}

fn assignment(endpoints: u16) -> ClusterLoadAssignment {
    let endpoint = |number: u16| {
        let [high, low] = number.to_be_bytes();
        let socket = SocketAddress {
            address: format!("10.0.{high}.{low}"),
            port_specifier: Some(PortSpecifier::PortValue(8080)),
            ..SocketAddress::default()
        };
        let address = Address { address: Some(address::Address::SocketAddress(socket)) };
        let endpoint = Endpoint { address: Some(address), ..Endpoint::default() };
        LbEndpoint { host_identifier: Some(HostIdentifier::Endpoint(endpoint)), ..LbEndpoint::default() }
    };
    ClusterLoadAssignment {
        cluster_name: "outbound|9080||reviews.default.svc.cluster.local".into(),
        endpoints: vec![LocalityLbEndpoints {
            lb_endpoints: (0..endpoints).map(endpoint).collect(),
            ..LocalityLbEndpoints::default()
        }],
        ..ClusterLoadAssignment::default()
    }
}

/// Changes one resource of a layer while clients still read the former one, and finds this change.
fn edit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("xds/edit_layer");
    for services in MESHES {
        let layer = layer(services);
        group.bench_with_input(BenchmarkId::from_parameter(services), &layer, |bencher, layer| {
            let edits = || changed(services / 2);
            let routine = |edits| {
                let mut layer = layer.clone();
                assert!(layer.edit(2, black_box(edits), None));
                layer
            };
            bencher.iter_batched(edits, routine, BatchSize::SmallInput);
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("xds/changes");
    for services in MESHES {
        let mut layer = layer(services);
        assert!(layer.edit(2, changed(services / 2), None));
        let snapshot = Snapshot { shared: Arc::new(layer), ..Snapshot::default() };
        group.bench_with_input(BenchmarkId::from_parameter(services), &snapshot, |bencher, snapshot| {
            bencher.iter(|| {
                let changes = black_box(snapshot).changes(Kind::Cluster, 1);
                assert_eq!(changes.resources.len(), 1);
            });
        });
    }
}

/// Finds the virtual host of an authority, as for a sidecar that subscribes on demand.
fn find(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("xds/find_host");
    for services in MESHES {
        let mut layer = Layer::default();
        for number in 0..services {
            let domains =
                ["svc.cluster.local:9080", "svc:9080"].map(|end| format!("9080/svc-{number}.default.{end}"));
            let name = format!("9080/svc-{number}.default.svc.cluster.local:9080-host");
            let domains = domains.iter().map(String::as_str);
            layer.set(
                1,
                Resource::with_aliases(Kind::VirtualHost, &name, Bytes::from(vec![0; BODY]), domains),
            );
        }
        let snapshot = Snapshot { shared: Arc::new(layer), ..Snapshot::default() };
        let authority = format!("9080/svc-{}.default.svc:9080", services / 2);
        group.bench_with_input(BenchmarkId::from_parameter(services), &snapshot, |bencher, snapshot| {
            bencher.iter(|| {
                assert!(black_box(snapshot).find(Kind::VirtualHost, &authority).is_some());
            });
        });
    }
}

/// Pushes this number of changed resources in one incremental response. The time ends when the client has decoded them.
/// Both ends share a thread and a connection over loopback.
fn push(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("xds/push_delta");
    for resources in [1, 100] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let stream = PushStream::open(&runtime, PUSHED);
        let mut generation = 1;
        group.bench_function(BenchmarkId::from_parameter(resources), |bencher| {
            let edits = || {
                generation += 1;
                let mut edits = Edits::default();
                (0..resources).for_each(|number| edits.set(cluster(number, generation)));
                (generation, edits)
            };
            let routine = |(generation, edits)| runtime.block_on(stream.push(generation, edits, resources));
            bencher.iter_batched(edits, routine, BatchSize::PerIteration);
        });
    }
}

/// A discovery stream between a server and a client.
struct PushStream {
    snapshot: Arc<watch::Sender<Snapshot>>,
    received: Arc<ReceivedResources>,
}

/// Resources that the client has received since the last push.
#[derive(Default)]
struct ReceivedResources {
    count: AtomicUsize,
    changed: Notify,
}

impl PushStream {
    /// Opens a stream that subscribes to all clusters, and waits for the first response.
    fn open(runtime: &Runtime, services: usize) -> Self {
        let snapshot = Snapshot { shared: Arc::new(layer(services)), ..Snapshot::default() };
        let snapshot = Arc::new(watch::channel(snapshot).0);
        let received = Arc::<ReceivedResources>::default();
        let stream = Self { snapshot: Arc::clone(&snapshot), received: Arc::clone(&received) };
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let service = DiscoveryService::new(Arc::new(SharedView(snapshot)));
            tokio::spawn(async move {
                let (socket, _) = listener.accept().await.unwrap();
                let limits = Arc::new(Limits::default());
                grpc::serve(socket, Extensions::new(), &service, &limits, pending()).await
            });
            let connect = async move || {
                let endpoint = ServerEndpoint::from_shared(format!("http://{address}"))?;
                Ok(Connection::new(endpoint.connect().await?))
            };
            let handler = async move |update: Update| {
                received.count.fetch_add(update.added.len(), Ordering::Relaxed);
                received.changed.notify_one();
                Vec::new()
            };
            let node =
                Node { id: "sidecar~10.0.0.1~a.default~default.svc.cluster.local".into(), ..Node::default() };
            let (client, _) = Client::new(Options { node, form: Form::Delta, wildcard: vec![Kind::Cluster] });
            tokio::spawn(client.run(connect, handler));
            stream.received.wait(services).await;
        });
        stream
    }

    /// Publishes a change and waits until the client has received it.
    async fn push(&self, generation: u64, edits: Edits, resources: usize) {
        self.snapshot.send_modify(|snapshot| {
            assert!(Arc::make_mut(&mut snapshot.shared).edit(generation, edits, None));
        });
        self.received.wait(resources).await;
    }
}

impl ReceivedResources {
    /// Waits for this number of resources, and forgets them.
    async fn wait(&self, count: usize) {
        while self.count.load(Ordering::Relaxed) < count {
            self.changed.notified().await;
        }
        self.count.store(0, Ordering::Relaxed);
    }
}

/// Returns the same resources for every client.
struct SharedView(Arc<watch::Sender<Snapshot>>);

impl Views for SharedView {
    async fn connect(&self, node: Node, _: Form, _: Request<()>) -> Result<View, Status> {
        Ok(View {
            identity: node.id.into(),
            resources: ResourceFeed { snapshot: self.0.subscribe(), interest: Arc::default() },
            report: Box::new(|_| {}),
            remembered: Arc::default(),
            ended: Box::pin(pending()),
        })
    }
}

/// Returns a layer with the clusters of this number of services.
fn layer(services: usize) -> Layer {
    let mut layer = Layer::default();
    (0..services).for_each(|number| assert!(layer.set(1, cluster(number, 1))));
    layer
}

/// Returns an edit that changes the cluster of a service.
fn changed(number: usize) -> Edits {
    let mut edits = Edits::default();
    edits.set(cluster(number, 2));
    edits
}

/// Returns the cluster of a service; the salt makes it different.
fn cluster(number: usize, salt: u64) -> Arc<Resource> {
    let name = format!("outbound|9080||svc-{number}.default.svc.cluster.local");
    let cluster =
        Cluster { name: name.clone(), alt_stat_name: format!("{salt:0BODY$}"), ..Cluster::default() };
    Resource::encode(Kind::Cluster, &name, &cluster)
}
