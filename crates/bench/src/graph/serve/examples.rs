//! Graphs with the structures of isotope's fourteen example topologies: read, converted, and run over real sockets.
//!
//! Each service runs once: the number of replicas matters for the conversion alone.

use std::collections::HashMap;

use super::{
    tests::{RECEIVED, counter, get},
    *,
};
use crate::graph::{
    format, graphviz,
    kubernetes::{self, KubernetesArgs},
    model::ScriptCommand,
};

/// A graph, and what follows from it.
struct Example {
    /// File in isotope's folder `example-topologies` with this structure.
    file: &'static str,
    text: String,
    services: usize,
    replicas: u32,
    /// Requests between services, and to the entry point, for one request to it.
    requests: f64,
}

fn examples() -> Vec<Example> {
    let of = |file, text: String, services, replicas, requests: u32| Example {
        file,
        text,
        services,
        replicas,
        requests: f64::from(requests),
    };
    let elsewhere = |host: &str| format!("\n      service: q\n      hostname: {host}:8080");
    vec![
        of("1-service", format!("{SIZES}services:\n- name: p\n  isEntrypoint: true\n"), 1, 1, 1),
        of("10-svc_10-end", star(1, 10), 10, 10, 10),
        of("10-svc_100-end", star(10, 10), 10, 100, 10),
        of("10-svc_1000-end", star(100, 10), 10, 1_000, 10),
        of("10-svc_10000-end", star(1_000, 10), 10, 10_000, 10),
        of("1000-svc_5000-end", partial_tree(), 1_000, 5_000, 1_000),
        of("canonical", canonical("  numRbacPolicies: 3\n"), 4, 4, 6),
        of("canonical-2-replicas", canonical("  numReplicas: 2\n"), 4, 8, 6),
        of("chain-2-services", chain(" q", ""), 2, 2, 2),
        of("chain-2-services-different-cluster", chain(&elsewhere("q.global"), "  cluster: west\n"), 2, 2, 2),
        of(
            "chain-2-services-different-namespace",
            chain(&elsewhere("q.two.svc.cluster.local"), "  namespace: two\n"),
            2,
            2,
            2,
        ),
        of("chain-3-services", format!("services:\n{}", tree("svc", 3, 1)), 3, 3, 3),
        of("tree-13-services", format!("services:\n{}", tree("svc", 3, 3)), 13, 13, 13),
        of(
            "tree-111-services",
            format!("defaults:\n  numReplicas: 2\nservices:\n{}", tree("svc", 3, 10)),
            111,
            222,
            111,
        ),
    ]
}

const SIZES: &str = "defaults:\n  requestSize: 1 KB\n  responseSize: 1 KB\n";

/// Steps in order, concurrent calls, and a service with several callers.
fn canonical(defaults: &str) -> String {
    format!(
        "{SIZES}{defaults}services:\n- name: p\n- name: q\n- name: r\n  script:\n  - call: p\n  - call: q\n- name: s\n  \
         isEntrypoint: true\n  script:\n  - - call: p\n    - call: r\n  - call: q\n"
    )
}

/// Two services, the second one with these fields.
fn chain(call: &str, of_callee: &str) -> String {
    format!(
        "{SIZES}services:\n- isEntrypoint: true\n  name: p\n  namespace: one\n  script:\n  - call:{call}\n- name: \
         q\n{of_callee}"
    )
}

/// An entry point that calls all other services concurrently.
fn star(replicas: u32, services: usize) -> String {
    let leaves = (1..services).map(|at| format!("leaf-{at}"));
    let calls: String = leaves.clone().map(|leaf| format!("    - call: {leaf}\n")).collect();
    let leaves: String = leaves.map(|leaf| format!("- name: {leaf}\n")).collect();
    let calls = calls.replacen("    - ", "  - - ", 1);
    format!(
        "defaults:\n  numReplicas: {replicas}\nservices:\n- isEntrypoint: true\n  name: root\n  script:\n{calls}{leaves}"
    )
}

/// A tree of 1,000 services, cut off in its third level: 100 branches, of which the first nine have their own.
fn partial_tree() -> String {
    let calls = |name: &str, number: usize| -> String {
        let calls: Vec<String> = (0..number).map(|at| format!("call: {name}-{at}")).collect();
        format!("- name: {name}\n  script:\n  - - {}\n", calls.join("\n    - "))
    };
    let mut text =
        format!("defaults: {{numReplicas: 5}}\nservices:\n{}  isEntrypoint: true\n", calls("svc", 100));
    for at in 0..100 {
        let name = format!("svc-{at}");
        let below = [100, 99, 0][usize::from(at >= 8) + usize::from(at >= 9)];
        if below == 0 {
            text.push_str(&format!("- name: {name}\n"));
            continue;
        }
        text.push_str(&calls(&name, below));
        text.extend((0..below).map(|leaf| format!("- name: {name}-{leaf}\n")));
    }
    text
}

/// Services in levels, each of which calls those below it concurrently. The one at the top is the entry point.
fn tree(name: &str, levels: u32, branches: usize) -> String {
    let mut text = format!("- name: {name}\n");
    if name == "svc" {
        text.push_str("  isEntrypoint: true\n");
    }
    if levels > 1 {
        let below: Vec<String> = (0..branches).map(|at| format!("{name}-{at}")).collect();
        let calls: Vec<String> = below.iter().map(|name| format!("call: {name}")).collect();
        text.push_str(&format!("  script:\n  - - {}\n", calls.join("\n    - ")));
        text.extend(below.iter().map(|name| tree(name, levels - 1, branches)));
    }
    text
}

fn read(example: &Example) -> ServiceGraph {
    format::parse(&example.text).unwrap_or_else(|error| panic!("{}: {error}\n{}", example.file, example.text))
}

#[test]
fn isotope_s_examples_are_read_and_converted() {
    let all = examples();
    assert_eq!(all.len(), 14);
    for example in &all {
        let (graph, file) = (read(example), example.file);
        let replicas: u32 = graph.services.iter().map(|service| service.replicas).sum();
        assert_eq!((graph.services.len(), replicas), (example.services, example.replicas), "{file}");
        assert!((graph.requests().iter().sum::<f64>() - example.requests).abs() < 1e-9, "{file}");
        let dot = graphviz::convert(&graph);
        assert!(graph.services.iter().all(|service| dot.contains(&service.name)), "{file}");
        let (objects, _) = kubernetes::convert(graph, &KubernetesArgs::of("examples")).unwrap();
        assert!(skysail_yaml::documents(&objects).all(|document| document.root.is_ok()), "{file}");
        let deployments = objects.matches("\nkind: Deployment\n").count();
        let with_client = example.services..=example.services + 1;
        assert!(with_client.contains(&deployments), "{file}: {deployments}");
    }
}

#[test]
fn isotope_s_examples_run_with_the_requests_of_their_graphs() {
    // 1,000 services have a listener and a runtime each.
    skysail_core::descriptors::raise();
    for example in &examples() {
        let mut graph = read(example);
        let expected = graph.requests();
        let switches: Vec<WorkerSwitch> = graph
            .services
            .iter()
            .map(|_| WorkerSwitch::open("127.0.0.1:0".parse().unwrap()).unwrap())
            .collect();
        let addresses: HashMap<String, SocketAddr> = graph
            .services
            .iter()
            .zip(&switches)
            .map(|(of, switch)| (of.name.clone(), switch.address))
            .collect();
        // The names of pods have no meaning here.
        for command in graph.services.iter_mut().flat_map(|service| service.script.iter_mut().flatten()) {
            if let ScriptCommand::Call(call) = command {
                call.hostname = Some(addresses[&call.service].to_string());
            }
        }
        let graph = Arc::new(graph);
        for (at, switch) in switches.iter().enumerate() {
            let (graph, state) = (Arc::clone(&graph), switch.watch());
            let counters = Arc::new(Counters::new(&graph, &graph.services[at].name).unwrap());
            let permits = Arc::new(Semaphore::new(100));
            thread::spawn(move || serve(state, permits, &graph, &graph.services[at].name, counters));
        }
        let entry = graph.services.iter().position(|service| service.is_entry_point).unwrap();
        for _ in 0..2 {
            let (status, body) = get(switches[entry].address, "/");
            assert_eq!(
                (status, body.len() as u64),
                (200, graph.services[entry].response_size),
                "{}",
                example.file
            );
        }
        let received = |switch: &WorkerSwitch| counter(switch.address, RECEIVED) as f64 / 2.0;
        let received: Vec<f64> = switches.iter().map(received).collect();
        assert_eq!(received, expected, "{}", example.file);
    }
}
