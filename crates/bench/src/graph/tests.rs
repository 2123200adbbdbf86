//! Tests of the format, the generators and the conversions.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use clap::Parser as _;

use super::{
    model::{GraphProtocol, ScriptCommand, ServiceCall},
    *,
};

/// A graph with every field of the format.
const FULL: &str = "\
apiVersion: v1alpha1
kind: MockServiceGraph
defaults:
  type: grpc
  errorRate: 0.5%
  requestSize: 1 KB
  responseSize: 16K
  numReplicas: 2
  numRbacPolicies: 3
  script:
  - sleep: 10ms
services:
- name: front
  namespace: shop
  cluster: east
  labels: {tier: web}
  type: http
  isEntrypoint: true
  errorRate: 0.01
  responseSize: 128
  numReplicas: 1
  numRbacPolicies: 0
  script:
  - - call: stock
    - call:
        service: price
        size: 10K
        hostname: price.shop.svc.cluster.local:8080
        probability: 25
        extra-header:
          x-tenant: blue
    - sleep: 1.5s
  - call: stock
- name: stock
- name: price
  script: []
";

/// Calls a service with the request size.
fn call(service: &str, size: u64) -> ScriptCommand {
    ScriptCommand::Call(ServiceCall {
        service: service.to_owned(),
        size,
        hostname: None,
        headers: BTreeMap::new(),
        probability: 100.0,
    })
}

#[test]
fn every_field_is_read() {
    let graph = format::parse(FULL).unwrap();
    let [front, stock, price] = &graph.services[..] else { panic!("{graph:?}") };
    assert_eq!((front.namespace.as_deref(), front.cluster.as_deref()), (Some("shop"), Some("east")));
    assert_eq!(front.labels, BTreeMap::from([("tier".to_owned(), "web".to_owned())]));
    assert_eq!((front.protocol, front.replicas, front.policies), (GraphProtocol::Http, 1, 0));
    assert_eq!((front.is_entry_point, front.error_percent, front.response_size), (true, 1.0, 128));
    let rare = ScriptCommand::Call(ServiceCall {
        service: "price".to_owned(),
        size: 10_240,
        hostname: Some("price.shop.svc.cluster.local:8080".to_owned()),
        headers: BTreeMap::from([("x-tenant".to_owned(), "blue".to_owned())]),
        probability: 25.0,
    });
    let pause = ScriptCommand::Sleep(Duration::from_millis(1_500));
    let expected = vec![vec![call("stock", 1_024), rare, pause], vec![call("stock", 1_024)]];
    assert_eq!(front.script, expected);
    assert_eq!((stock.protocol, stock.replicas, stock.policies), (GraphProtocol::Grpc, 2, 3));
    assert_eq!((stock.is_entry_point, stock.error_percent, stock.response_size), (false, 0.5, 16_384));
    assert_eq!(stock.script, vec![vec![ScriptCommand::Sleep(Duration::from_millis(10))]]);
    assert!(price.script.is_empty());
    assert_eq!(graph.requests(), [1.0, 2.0, 0.25]);
}

/// Mistakes in a field of the only service, which is on line 4, with their messages.
const MISTAKES: &[(&str, &str)] = &[
    (
        "color: red",
        "4: services[0].color: unknown field; the fields are name, namespace, cluster, labels, type, numReplicas, \
            isEntrypoint, errorRate, responseSize, numRbacPolicies, script",
    ),
    (
        "computeUsage: 50%",
        "4: services[0].computeUsage: isotope does not implement it; remove it, and use `sleep` for \
            processing time",
    ),
    (
        "requestSize: 1",
        "4: services[0].requestSize: it is a default of all calls; move it to `defaults`, or write `size` in a call",
    ),
    ("type: tcp", "4: services[0].type: must be http or grpc"),
    ("numReplicas: 0", "4: services[0].numReplicas: must be a whole number from 1 to 10000"),
    ("numReplicas: many", "4: services[0].numReplicas: must be a whole number from 1 to 10000"),
    ("numRbacPolicies: -1", "4: services[0].numRbacPolicies: must be a whole number from 0 to 1000"),
    ("errorRate: 5", "4: services[0].errorRate: must be a percentage such as 0.1%, or a number from 0 to 1"),
    (
        "errorRate: 101%",
        "4: services[0].errorRate: \"101%\" is not a percentage; write 0% to 100%, such as 0.1%, or a number \
            from 0 to 1",
    ),
    (
        "responseSize: 1 XB",
        "4: services[0].responseSize: \"1 XB\" is not a size; write bytes, or a size such as 10K, 1 KB or 1.5 MiB",
    ),
    ("responseSize: -1", "4: services[0].responseSize: a size must be from 0 to 1 GiB"),
    (
        "responseSize: 1.5",
        "4: services[0].responseSize: must be a size; write bytes, or a size such as 10K, 1 KB or 1.5 MiB",
    ),
    (
        "namespace: Shop",
        "4: services[0].namespace: \"Shop\" must be 1 to 63 lower-case letters, digits and hyphens, begin with a \
            letter, and not end with a hyphen",
    ),
    ("labels: [x]", "4: services[0].labels: must be a mapping of names to texts"),
    ("labels: {x: 1}", "4: services[0].labels.x: must be text; write it in quotes if it is one"),
    ("script: {sleep: 1s}", "4: services[0].script: must be a list; write each item after `- `"),
    ("script: [wait]", "4: services[0].script[0]: must be a mapping with sleep, call"),
    ("script: [{}]", "4: services[0].script[0]: a command must have `sleep` or `call`"),
    ("script: [{wait: 1s}]", "4: services[0].script[0].wait: unknown field; the fields are sleep, call"),
    (
        "script: [{sleep: 1s, call: a}]",
        "4: services[0].script[0]: a command is either `sleep` or `call`; write two steps, or a \
            list of both to run them concurrently",
    ),
    ("script: [[]]", "4: services[0].script[0]: the step has no command; remove it"),
    (
        "script: [[[{sleep: 1s}]]]",
        "4: services[0].script[0][0]: the commands of a step run concurrently and must not be lists; \
            write its commands directly",
    ),
    (
        "script: [{sleep: 10}]",
        "4: services[0].script[0].sleep: must be a duration such as 10ms; distributions of isotope's \
            earlier versions are not supported, write their mean",
    ),
    (
        "script: [{sleep: 10 ms}]",
        "4: services[0].script[0].sleep: \"10 ms\" is not a duration, such as 5s, 1m30s or 250ms",
    ),
    ("script: [{sleep: 2h}]", "4: services[0].script[0].sleep: \"2h\" is longer than the maximum of 1h"),
    ("script: [{call: {size: 1}}]", "4: services[0].script[0].call: must have `service`"),
    (
        "script: [{call: {service: b, call-override: 'b:80'}}]",
        "4: services[0].script[0].call.call-override: isotope reads `hostname`; rename the field",
    ),
    (
        "script: [{call: {service: b, payloadSize: 1}}]",
        "4: services[0].script[0].call.payloadSize: isotope reads `size`; rename the field",
    ),
    (
        "script: [{call: {service: b, probability: 0}}]",
        "4: services[0].script[0].call.probability: must be a number above 0 and \
            at most 100; a call without `probability` is always made",
    ),
    (
        "script: [{call: {service: b, hostname: 'http://b'}}]",
        "4: services[0].script[0].call.hostname: \"http://b\" must be a host \
            name, or a host name and a port (`b.shop:8080`)",
    ),
    (
        "script: [{call: {service: b, extra-header: {Host: x}}}]",
        "4: services[0].script[0].call.extra-header.Host: the mock service \
            sets this header itself; remove it",
    ),
    (
        "script: [{call: {service: b, extra-header: {'a b': x}}}]",
        "4: services[0].script[0].call.extra-header[a b]: is not a header \
            of HTTP; correct its name or value",
    ),
    (
        "script: [{call: b}]",
        "4: services[0].script[0].call: there is no service b; correct the name, or add the service",
    ),
    (
        "script: [{call: a}]",
        "4: services[0].script[0].call: the calls a -> a are a cycle without end; remove one of them",
    ),
];

#[test]
fn mistakes_have_line_field_and_remedy() {
    for (fields, expected) in MISTAKES {
        let text = format!("services:\n- name: a\n  isEntrypoint: true\n  {fields}\n");
        assert_eq!(format::parse(&text).unwrap_err(), *expected, "{fields}");
    }
}

#[test]
fn mistakes_of_the_whole_graph_are_refused() {
    let entry = "services: [{name: a, isEntrypoint: true}]\n";
    for (text, expected) in [
        ("", "1: the file is empty; write the fields of a service graph".to_owned()),
        ("a: [", "1: not valid YAML".to_owned()),
        ("[]", "1: must be a mapping with apiVersion, kind, defaults, services".to_owned()),
        ("defaults: {}", "1: must have `services`".to_owned()),
        ("services: []", "1: services: must have 1 to 10000 services".to_owned()),
        ("services: [{isEntrypoint: true}]", "1: services[0]: must have `name`".to_owned()),
        (&format!("default: {{}}\n{entry}"), "1: default: isotope reads `defaults`; rename the field".to_owned()),
        (&format!("{entry}---\n{entry}"), "2: a second document; write each service graph to a file of its own".to_owned()),
        (&format!("{entry}{entry}"), "2: services: also on line 1; remove one of them".to_owned()),
        (
            &format!("kind: Pod\n{entry}"),
            "1: kind: must be MockServiceGraph; write it, or remove the field".to_owned(),
        ),
        (
            "services:\n- name: a\n- name: b\n",
            "2: services: no service has `isEntrypoint: true`, so no request can enter the graph; set it for the first service"
                .to_owned(),
        ),
        (
            "services:\n- name: a\n  isEntrypoint: true\n- name: a\n",
            "4: services[1].name: the service a is also on line 2; rename one of them".to_owned(),
        ),
        (
            "services:\n- name: a\n  isEntrypoint: true\n  script:\n  - call: b\n- name: b\n  script:\n  - call: c\n- name: c\n  script:\n  - - sleep: 1s\n    - call: b\n",
            "12: services[2].script[0][1].call: the calls b -> c -> b are a cycle without end; remove one of them".to_owned(),
        ),
        (
            "defaults:\n  script: [{call: b}]\nservices:\n- {name: a, isEntrypoint: true}\n- name: b\n",
            "2: defaults.script[0].call: the calls b -> b are a cycle without end; remove one of them".to_owned(),
        ),
    ] {
        let error = format::parse(text).unwrap_err();
        assert!(error.starts_with(&expected), "{text}\n{error}\n{expected}");
    }
}

/// Parses arguments of `skysail bench graph`.
fn arguments(words: &str) -> GraphCommand {
    #[derive(clap::Parser)]
    struct CommandOfTest {
        #[command(flatten)]
        args: GraphArgs,
    }
    CommandOfTest::try_parse_from(words.split(' ')).unwrap_or_else(|error| panic!("{error}")).args.command
}

fn generated(words: &str) -> anyhow::Result<ServiceGraph> {
    match arguments(&format!("graph generate {words}")) {
        GraphCommand::Generate { shape } => generate::graph(&shape),
        command => panic!("{command:?}"),
    }
}

#[test]
fn generated_graphs_have_their_shape() {
    for (words, services, requests) in [
        ("tree --levels 1", 1, 1.0),
        ("tree", 13, 13.0),
        ("tree --levels 3 --branches 10", 111, 111.0),
        ("tree --levels 4 --branches 1", 4, 4.0),
        ("star", 10, 10.0),
        ("star --services 1000 --replicas 2", 1_000, 1_000.0),
        ("mesh --levels 3 --branches 2", 5, 7.0),
    ] {
        let graph = generated(words).unwrap();
        assert_eq!(graph.services.len(), services, "{words}");
        assert!((graph.requests().iter().sum::<f64>() - requests).abs() < 1e-9, "{words}");
        assert_eq!(format::parse(&write::yaml(&graph)).unwrap(), graph, "{words}");
    }
    let settings = "tree --levels 2 --branches 2 --type grpc --replicas 3 --request-size 1KB --response-size 10K --error-rate \
                    0.1% --sleep 5ms";
    assert_eq!(
        write::yaml(&generated(settings).unwrap()),
        "\
defaults:
  type: grpc
  numReplicas: 3
  errorRate: 0.1%
  responseSize: 10 KiB
  requestSize: 1 KiB
services:
- name: svc-0
  isEntrypoint: true
  script:
  - sleep: 5ms
  - - call: svc-0-0
    - call: svc-0-1
- name: svc-0-0
  script:
  - sleep: 5ms
- name: svc-0-1
  script:
  - sleep: 5ms
"
    );
    for words in [
        "tree --levels 0",
        "star --services 0",
        "tree --levels 9 --branches 9",
        "star --services 20000",
        "mesh --branches 9999",
    ] {
        assert!(generated(words).is_err(), "{words}");
    }
    let long = generated("tree --levels 40 --branches 1").unwrap_err().to_string();
    assert_eq!(long, "names would have 83 of at most 63 characters; reduce --levels");
}

/// Returns a random graph in which services call only later ones.
fn random(rng: &mut fastrand::Rng) -> ServiceGraph {
    let count = rng.usize(1..12);
    let names: Vec<String> = (0..count).map(|at| format!("svc-{at}")).collect();
    let some = |rng: &mut fastrand::Rng| {
        let texts = ["yes", "a b", "42", "\"", "x: y", "plain"];
        rng.bool().then(|| texts[rng.usize(..texts.len())].to_owned())
    };
    let service = |at: usize, rng: &mut fastrand::Rng| {
        let mut command = || match rng.usize(at + 1..=count) {
            callee if callee < count => ScriptCommand::Call(ServiceCall {
                service: names[callee].clone(),
                size: [0, 1, 1_024, 1 << 20][rng.usize(..4)],
                hostname: rng.bool().then(|| format!("host-{callee}:80")),
                headers: some(rng).map(|value| ("x-a".to_owned(), value)).into_iter().collect(),
                probability: [0.5, 33.333_333, 99.0, 100.0][rng.usize(..4)],
            }),
            _ => ScriptCommand::Sleep(Duration::from_micros(rng.u64(0..3_000_000))),
        };
        let script = (0..3).map(|step| (0..=step % 2).map(|_| command()).collect()).collect();
        GraphService {
            name: names[at].clone(),
            namespace: rng.bool().then(|| "no".to_owned()),
            cluster: rng.bool().then(|| "east".to_owned()),
            labels: some(rng)
                .map(|value| ("app.kubernetes.io/part-of".to_owned(), value))
                .into_iter()
                .collect(),
            protocol: if rng.bool() { GraphProtocol::Grpc } else { GraphProtocol::Http },
            replicas: rng.u32(1..3),
            is_entry_point: at == 0,
            error_percent: [0.0, 0.1, 33.3, 100.0][rng.usize(..4)],
            response_size: [0, 7, 2_048][rng.usize(..3)],
            policies: rng.u32(0..2),
            script,
        }
    };
    ServiceGraph { services: (0..count).map(|at| service(at, rng)).collect() }
}

#[test]
fn written_graphs_are_read_as_they_were() {
    let mut rng = fastrand::Rng::with_seed(1);
    for _ in 0..500 {
        let graph = random(&mut rng);
        let text = write::yaml(&graph);
        assert_eq!(format::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}")), graph, "{text}");
    }
}

#[test]
fn a_check_shows_requests_and_unreachable_services() {
    let graph = format::parse(&format!("{FULL}- name: spare\n")).unwrap();
    let text = summary(&graph);
    assert!(text.contains("| stock   | grpc |        2 |  0.5 % |   16 KiB |        2 |"), "{text}");
    assert!(text.contains("| price   | grpc |        2 |  0.5 % |   16 KiB |     0.25 |"), "{text}");
    let end = "\n\nservices: 4, replicas: 7, requests for one request to each entry point: 3.25\nservices without a request: spare\n";
    assert!(text.ends_with(end), "{text}");
}

fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/graph/golden").join(name);
    if std::env::var_os("SKYSAIL_WRITE_GOLDEN").is_some() {
        fs::write(&path, text).unwrap();
    }
    assert_eq!(text, fs::read_to_string(&path).unwrap(), "run with SKYSAIL_WRITE_GOLDEN=1 to write {name}");
}

fn kubernetes(text: &str, options: &str) -> anyhow::Result<(String, Vec<String>)> {
    match arguments(&format!("graph convert kubernetes FILE{options}")) {
        GraphCommand::Convert { format: Conversion::Kubernetes(args) } => {
            kubernetes::convert(format::parse(text).unwrap(), &args)
        }
        command => panic!("{command:?}"),
    }
}

#[test]
fn conversions_are_stable() {
    golden("graph.dot", &graphviz::convert(&format::parse(FULL).unwrap()));
    let small = "services:\n- name: front\n  isEntrypoint: true\n  numReplicas: 2\n  labels: {app: other, tier: web}\n  \
                 script: [{call: stock}]\n- {name: stock, namespace: back, type: grpc, numRbacPolicies: 1}\n";
    let (text, warnings) = kubernetes(small, "").unwrap();
    assert_eq!(
        warnings,
        ["service front: the label app of the graph has no effect: the conversion sets it; rename it"]
    );
    assert!(skysail_yaml::documents(&text).all(|document| document.root.is_ok()), "{text}");
    golden("kubernetes.yaml", &text);
}

#[test]
fn a_conversion_may_select_a_cluster() {
    let text = "services:\n- {name: a, isEntrypoint: true, cluster: east, script: [{call: b}]}\n- {name: b, cluster: west}\n";
    let (all, warnings) = kubernetes(text, "").unwrap();
    assert_eq!(all.matches("kind: Deployment").count(), 2);
    assert_eq!(
        warnings,
        [
            "the services name the clusters east, west, and all are converted for one; --cluster NAME selects one"
        ]
    );
    let (east, warnings) = kubernetes(text, " --cluster east").unwrap();
    assert_eq!((east.matches("kind: Deployment").count(), warnings.len()), (1, 0));
    let error = kubernetes(text, " --cluster north").unwrap_err().to_string();
    assert_eq!(error, "no service has the cluster of --cluster north; the clusters of the graph: east, west");
}
