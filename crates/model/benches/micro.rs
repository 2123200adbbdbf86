//! Times of the steps from an object to the resources of a proxy, by the number of services in the mesh. `skysail bench
//! micro` compares them with a baseline.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panic")]

#[path = "../../../benchmarks/micro.rs"]
mod settings;

use std::{fmt::Write as _, hint::black_box};

use criterion::{BatchSize, BenchmarkId, Criterion};
use serde_json::json;
use skysail_model::{
    ClientScope, Files, Object, Origin, Part, ProxyNode, Validator, World, api::kube::Locality, compile,
    compile_part, parse,
};

/// Numbers of services: a team's mesh, and that of a company.
const MESHES: [u16; 2] = [100, 1_000];
const NAMESPACES: u16 = 10;
/// Name of the file in diagnostics.
const FILE: &str = "mesh.yaml";

fn main() {
    let mut criterion = settings::criterion();
    parse_objects(&mut criterion);
    change(&mut criterion);
    compile_resources(&mut criterion);
    criterion.final_summary();
}

/// Parses and validates one object.
fn parse_objects(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("model/parse_object");
    let kinds = [("service", service(1)), ("virtual-service", virtual_service(1)), ("policy", policy(1))];
    for (kind, text) in kinds {
        let parsed = parse(&text, FILE);
        assert!(parsed.objects.len() == 1 && parsed.diagnostics.is_empty(), "{:?}", parsed.diagnostics);
        group.bench_with_input(BenchmarkId::from_parameter(kind), &text, |bencher, text| {
            bencher.iter(|| parse(black_box(text), FILE));
        });
    }
}

/// Applies changed endpoints while a compilation still uses a snapshot of the World, and validates the mesh after them.
fn change(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("model/apply_endpoints");
    for services in MESHES {
        let (mut world, versions) = (world(services), versions(services / 2));
        let mut turn = versions.iter().cycle();
        group.bench_function(BenchmarkId::from_parameter(services), |bencher| {
            let next = || turn.next().cloned().unwrap();
            let routine = |(object, origin): (Object, Origin)| {
                let snapshot = world.clone();
                assert!(world.apply(object, origin));
                (snapshot, world.take_changes())
            };
            bencher.iter_batched(next, routine, BatchSize::PerIteration);
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("model/validate_change");
    for services in MESHES {
        let (mut world, versions) = (world(services), versions(services / 2));
        let mut validator = Validator::default();
        validator.validate(&world);
        let mut turn = versions.iter().cycle();
        group.bench_function(BenchmarkId::from_parameter(services), |bencher| {
            bencher.iter(|| {
                let (object, origin) = turn.next().cloned().unwrap();
                world.apply(object, origin);
                validator.validate(black_box(&world))
            });
        });
    }
}

/// Compiles all resources of a new sidecar, and those of one service after a change.
fn compile_resources(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("model/compile_sidecar");
    for services in MESHES {
        let world = world(services);
        let node = sidecar(&world);
        group.bench_with_input(BenchmarkId::from_parameter(services), &world, |bencher, world| {
            bencher.iter(|| compile(black_box(world), &node.view));
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("model/compile_service");
    for services in MESHES {
        let world = world(services);
        let scope = ClientScope::of(&sidecar(&world).view, &world.grouping());
        let number = services / 2;
        let part = Part::Service(namespace(number), format!("svc-{number}"));
        assert!(!compile_part(&world, &scope, &part).is_empty());
        group.bench_with_input(BenchmarkId::from_parameter(services), &world, |bencher, world| {
            bencher.iter(|| compile_part(black_box(world), &scope, &part));
        });
    }
}

/// Returns a sidecar of the first service.
fn sidecar(world: &World) -> ProxyNode {
    let metadata = json!({"NAMESPACE": "ns-0", "LABELS": {"app": "svc-0"}, "CLUSTER_ID": "Kubernetes"});
    let id = "sidecar~10.0.0.0~svc-0-0.ns-0~ns-0.svc.cluster.local";
    let mut node = ProxyNode::parse(id, metadata, Locality::default()).unwrap();
    node.view.is_authenticated = true;
    let cluster = node.view.cluster_id.clone();
    world.identify(&mut node, &cluster).unwrap();
    node
}

/// Returns a mesh with endpoints of each service, and routes and a policy of every tenth one.
fn world(services: u16) -> World {
    let mut text = String::new();
    for number in 0..services {
        write!(text, "---\n{}---\n{}", service(number), endpoints(number, 1)).unwrap();
        if number % 10 == 0 {
            write!(text, "---\n{}---\n{}", virtual_service(number), policy(number)).unwrap();
        }
    }
    let (mut files, mut world) = (Files::new(), World::new());
    for change in files.set(0, FILE, &text) {
        assert!(change.apply_to(&mut world));
    }
    let errors = files.diagnostics();
    assert!(errors.is_empty(), "{errors:?}");
    world.take_changes();
    world
}

/// Returns two versions of a service's endpoints.
fn versions(number: u16) -> Vec<(Object, Origin)> {
    let version = |version| parse(&endpoints(number, version), FILE).objects.remove(0);
    [2, 3].map(version).into()
}

fn namespace(number: u16) -> String {
    format!("ns-{}", number % NAMESPACES)
}

fn service(number: u16) -> String {
    let [high, low] = number.to_be_bytes();
    format!(
        "apiVersion: v1
kind: Service
metadata:
  name: svc-{number}
  namespace: {}
spec:
  clusterIP: 172.16.{high}.{low}
  selector:
    app: svc-{number}
  ports:
  - name: http
    port: 80
    targetPort: 8080
",
        namespace(number)
    )
}

/// Returns an EndpointSlice with two endpoints.
fn endpoints(number: u16, version: u8) -> String {
    let [high, low] = number.to_be_bytes();
    format!(
        "apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: svc-{number}-1
  namespace: {}
  labels:
    kubernetes.io/service-name: svc-{number}
addressType: IPv4
ports:
- name: http
  port: 8080
endpoints:
- addresses: [10.0.{high}.{low}]
- addresses: [10.{version}.{high}.{low}]
",
        namespace(number)
    )
}

fn virtual_service(number: u16) -> String {
    format!(
        "apiVersion: networking.istio.io/v1
kind: VirtualService
metadata:
  name: svc-{number}
  namespace: {namespace}
spec:
  hosts: [svc-{number}.{namespace}.svc.cluster.local]
  http:
  - name: api
    match:
    - uri:
        prefix: /api/
      headers:
        x-user:
          exact: tester
    route:
    - destination:
        host: svc-{number}.{namespace}.svc.cluster.local
    retries:
      attempts: 3
      perTryTimeout: 2s
      retryOn: 5xx,reset
  - route:
    - destination:
        host: svc-{number}.{namespace}.svc.cluster.local
    timeout: 10s
",
        namespace = namespace(number)
    )
}

fn policy(number: u16) -> String {
    format!(
        "apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata:
  name: svc-{number}
  namespace: {}
spec:
  selector:
    matchLabels:
      app: svc-{number}
  action: ALLOW
  rules:
  - from:
    - source:
        principals: [cluster.local/ns/ns-1/sa/default]
    to:
    - operation:
        methods: [GET, POST]
        paths: [/api/*]
",
        namespace(number)
    )
}
