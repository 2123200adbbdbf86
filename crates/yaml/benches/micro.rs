//! Times of the YAML parser, by the size of its input in kilobytes. `skysail bench micro` compares them with a baseline.

#[path = "../../../benchmarks/micro.rs"]
mod settings;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use skysail_yaml::{documents, objects};

/// Sizes of the inputs in kilobytes: a file of a user, and a large one.
const SIZES: [usize; 2] = [10, 100];

fn main() {
    let mut criterion = settings::criterion();
    parse(&mut criterion);
    to_json(&mut criterion);
    criterion.final_summary();
}

/// Parses one document, the same as JSON, and a stream of small documents.
fn parse(criterion: &mut Criterion) {
    for (name, input) in [
        ("yaml/parse_document", document as fn(usize) -> String),
        ("yaml/parse_json", json),
        ("yaml/parse_objects", stream),
    ] {
        let mut group = criterion.benchmark_group(name);
        for size in SIZES {
            let text = input(size << 10);
            group.throughput(Throughput::Bytes(text.len() as u64));
            group.bench_with_input(BenchmarkId::from_parameter(size), &text, |bencher, text| {
                // `objects` adds the limits of Kubernetes' objects to the same parser.
                bencher.iter(|| objects(black_box(text)).for_each(|document| drop(black_box(document))));
            });
        }
    }
}

/// Converts a parsed document, as custom resources with free-form fields are.
fn to_json(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("yaml/to_json");
    for size in SIZES {
        let root = documents(&document(size << 10)).next().and_then(|document| document.root.ok());
        group.bench_with_input(BenchmarkId::from_parameter(size), &root, |bencher, root| {
            bencher.iter(|| black_box(root).as_ref().map(skysail_yaml::Node::to_json));
        });
    }
}

/// Returns a VirtualService with as many routes as fit into this number of bytes.
fn document(bytes: usize) -> String {
    let mut text = String::from(
        "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata:\n  name: reviews\n  namespace: default\nspec:\n  \
         hosts: [reviews.default.svc.cluster.local]\n  http:\n",
    );
    for number in 0.. {
        let route = format!(
            "  - name: \"route-{number}\"  # of the team\n    match:\n    - uri:\n        prefix: /api/v{number}/\n      headers:\n        \
             x-user:\n          exact: user-{number}\n    route:\n    - destination:\n        host: reviews.default.svc.cluster.local\n        \
             subset: v{}\n        port: {{number: 9080}}\n      weight: 100\n    timeout: 2.5s\n",
            number % 7
        );
        if text.len() + route.len() > bytes {
            break;
        }
        text.push_str(&route);
    }
    text
}

/// Returns the same object as JSON, as the API server of Kubernetes sends it.
fn json(bytes: usize) -> String {
    let root = documents(&document(bytes)).next().and_then(|document| document.root.ok());
    root.map(|root| root.to_json().to_string()).unwrap_or_default()
}

/// Returns a stream of Services.
fn stream(bytes: usize) -> String {
    let mut text = String::new();
    for number in 0.. {
        let service = format!(
            "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: svc-{number}\n  namespace: ns-{}\nspec:\n  clusterIP: 10.96.0.{}\n  \
             selector: {{app: svc-{number}}}\n  ports:\n  - name: http\n    port: 80\n    targetPort: 8080\n",
            number % 10,
            number % 250
        );
        if text.len() + service.len() > bytes {
            break;
        }
        text.push_str(&service);
    }
    text
}
