//! Terms of a page with their meanings, for readers without the documentation: names of topologies, peers, networks and
//! inputs from tables, and those that a scenario defines from its fields. Cases are those that were measured: a size may
//! have other numbers than the scenario, and fewer cases.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{report::Program, scenario::ScenarioResult};

/// A term and its meaning.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::scenario) struct Term {
    pub(in crate::scenario) name: String,
    pub(in crate::scenario) meaning: String,
}

/// Names with their meanings.
type Meanings = &'static [(&'static str, &'static str)];

const TOPOLOGIES: Meanings = &[
    ("baseline", "client – server: no sidecar"),
    ("client-sidecar", "client – sidecar – server: the client's sidecar alone, in plain text to the server"),
    (
        "server-sidecar",
        "client – sidecar – server: the server's sidecar alone, in plain text from the client",
    ),
    (
        "server-mtls",
        "client – sidecar – server: the server's sidecar alone; the client uses mutual TLS itself",
    ),
    ("both-sidecars", "client – sidecar – sidecar – server, with mutual TLS between the sidecars"),
    ("ingress", "client – gateway – sidecar – server, with mutual TLS between gateway and sidecar"),
];
const PEERS: Meanings = &[
    ("skysail", "the sidecar or the control plane of this project"),
    ("envoy", "the proxy Envoy, which Istio uses, with the same configuration"),
    ("haproxy", "the proxy HAProxy, configured as the same sidecar"),
    ("nginx", "the web server nginx, configured as the same sidecar"),
    ("relay", "a relay of bytes without HTTP or TLS, the lower bound of any sidecar"),
];
const ACCESS_LOGS: Meanings = &[
    ("file", "the access log is a file that nothing reads"),
    ("stdout", "the access log is standard output, which a collector beside the sidecar reads"),
    ("otlp", "the access log is sent as OpenTelemetry records over gRPC to a collector beside the sidecar"),
];
const VARIANTS: Meanings = &[
    ("no-telemetry", "configuration without the filters that make metrics alone; Envoy keeps no metrics"),
    ("metrics", "configuration with Istio's standard metrics"),
    ("access-log", "configuration with an access log in a file"),
    ("policies-address", "configuration with 100 access policies by the caller's address"),
    ("policies-path", "configuration with 100 access policies by path"),
    ("policies-jwt", "configuration with 100 access policies by the subject of a verified JSON Web Token"),
    (
        "external-authorization",
        "the server's sidecar asks another server (the authorizer) before each request",
    ),
];
const AIRLINE: Meanings = &[
    ("none", "no mesh: the client calls the services"),
    ("ingress-only", "a gateway before services without sidecars"),
    ("no-policy", "a gateway and sidecars with mutual TLS, without access policies"),
    ("full", "a gateway and sidecars with mutual TLS and all access policies of the example"),
];
const NETWORKS: Meanings = &[
    ("bridge", "a bridge on each node, routes between the nodes"),
    ("routed", "a route to each pod on its node, routes between the nodes"),
    ("ipvlan", "pods share the link of their node (ipvlan)"),
    ("vxlan", "a bridge on each node, packets between the nodes in VXLAN"),
    ("wireguard", "routes, with WireGuard encryption between the nodes"),
];
const TEMPLATES: Meanings = &[
    (
        "gateways",
        "a Gateway with two servers, a VirtualService with three hosts and a ServiceEntry for each service",
    ),
    (
        "gateways-shared",
        "one Gateway; a VirtualService with six prefixes and a ServiceEntry for each service",
    ),
    (
        "knative-gateway",
        "objects of Knative: two Gateways, and two VirtualServices with six routes for each service",
    ),
    ("secrets", "a Gateway with a server and a Secret for each service"),
    ("empty", "services with four ports"),
    ("http", "services with one HTTP port"),
    ("tcp", "services with one TCP port"),
    ("tls", "services with one TLS port"),
    ("auto", "services with one port whose protocol is detected"),
    ("strict", "no service; a PeerAuthentication that requires mutual TLS"),
    ("disabled", "no service; a PeerAuthentication that disables mutual TLS"),
    ("externalname", "Kubernetes Services of type ExternalName"),
    ("telemetry-api", "services with four ports, and a Telemetry with metrics and an access log"),
    ("virtualservice", "a VirtualService with a rewrite and a ServiceEntry for each service"),
    ("authorizationpolicy", "AuthorizationPolicies of the proxy's namespace"),
    ("serviceentry-workloadentry", "services with four ports whose endpoints are WorkloadEntries"),
    ("endpoints", "services with many endpoints in four networks"),
];
const GENERATION: Meanings = &[
    ("parse", "phase: from text to validated objects"),
    ("index", "phase: from objects to the index of the control plane"),
    (
        "services, routes, names",
        "phases that compile clusters with endpoints, routes of sidecars, and the name table",
    ),
    (
        "own",
        "phase that compiles what depends on the workload: listeners, inbound clusters, routes of gateways",
    ),
    (
        "CDS, EDS, LDS, RDS, SDS, NDS",
        "types of resources: clusters, endpoints, listeners, routes, secrets, names",
    ),
];
/// Words for an argument of a benchmark or of a service graph; `{}` is its value.
const ARGUMENTS: Meanings = &[
    ("--sidecars", "simulated sidecars: {}"),
    ("--services", "services: {}"),
    ("--namespaces", "namespaces: {}"),
    ("--endpoints", "endpoints of each service: {}"),
    ("--names", "hosts of ServiceEntries: {}"),
    ("--churn", "{} % of the sidecars disconnect and reconnect"),
    ("--subscribe", "resources to which a sidecar subscribes: {}"),
    ("--changes", "changes: {}"),
    ("--repeat", "repetitions of each change: {}"),
    ("--seconds", "seconds: {}"),
    ("--mesh", "amount of configuration: {}"),
    ("--cluster", "sizes from the file {}"),
    ("--set", "value of the file's templates: {}"),
    ("--used", "services that each workload uses: {}"),
    ("--whole-routes", "virtual hosts within their route configuration"),
    ("--form", "form of the protocol: {}"),
    ("--tls", "mutual TLS"),
    ("--streams", "sidecars for each connection: {}"),
    ("--at-once", "sidecars that connect at the same time: {}"),
    ("--all-changes", "all changes that the mesh permits"),
    ("--resolution", "resolution of the ServiceEntries: {}"),
    ("--ttl", "TTL of addresses in seconds: {}"),
    ("--copies", "copies: {}"),
    ("--type", "protocol: {}"),
    ("--request-size", "size of requests: {}"),
    ("--response-size", "size of responses: {}"),
    ("--error-rate", "responses that are errors: {}"),
    ("--levels", "levels: {}"),
    ("--branches", "calls of each service to the next level: {}"),
    ("--replicas", "workers of each service: {}"),
    ("--sleep", "each worker takes {}"),
    ("--probability", "each call happens with {} % probability"),
    ("--policies", "policies: {}"),
    ("tree", "a tree of services"),
    ("star", "an entry point that calls all other services"),
    ("mesh", "levels of services, each of which calls all services of the next level"),
    ("demo", "an entry point that calls random copies of a demo application of ten services"),
];
/// Ends and beginnings of the names of figures, with the term that they use.
const MEASURES: &[(&str, &str, &str)] = &[
    (
        "_p",
        "P50, P90, P99, P99.9",
        "percentiles: 50 %, 90 %, 99 % or 99.9 % of requests (or of sidecars) took at most this time. Latency counts from when a request was \
         due, so it includes the time that the request waited. A turn with fewer than 10 requests beyond a percentile does not have it",
    ),
    ("added_", "over the baseline", "latency with sidecars less that without, in the same round"),
    (
        "cpu_",
        "CPU time",
        "time in which a CPU worked for a request or a change, in user space and in the kernel",
    ),
    ("rss_", "memory", "resident memory (RSS) of a process: its pages in physical memory, in MB of 1,024 kB"),
];

/// Returns the terms of a page of traffic.
pub(in crate::scenario) fn of_traffic(result: &ScenarioResult) -> Vec<Term> {
    let settings = &result.report.settings;
    let mut terms = of_peers(&result.report.peers);
    terms.push(term("no sidecar", "the client calls the server; the baseline of all topologies"));
    let names = settings.topologies.iter().map(|topology| topology.name());
    terms.extend(names.filter_map(|name| named(TOPOLOGIES, name)));
    terms.extend(settings.access_logs.iter().filter_map(|log| named(ACCESS_LOGS, log.name())));
    terms.extend(settings.variants.iter().filter_map(|variant| named(VARIANTS, variant.name())));
    terms.extend(of_figures(result.scenario.figures().map(|figure| figure.metric)));
    terms
}

/// Returns the terms of a page of cases. `scenario` has the fields of the scenario, `cases` those of the measured cases,
/// `figures` are the names of its figures.
pub(in crate::scenario) fn of_cases<'a>(
    (scenario, cases): (&Value, &Value),
    peers: &BTreeMap<String, Program>,
    figures: impl Iterator<Item = &'a str> + Clone,
) -> Vec<Term> {
    let mut terms = of_peers(peers);
    let cases = || cases.as_array().into_iter().flatten();
    let of_cases = |field: &str| {
        let mut values: Vec<&Value> = Vec::new();
        for value in cases().map(|case| &case[field]).filter(|value| !value.is_null()) {
            if !values.contains(&value) {
                values.push(value);
            }
        }
        values
    };
    let (networks, meshes) = (of_cases("network"), of_cases("mesh"));
    for network in scenario["networks"].as_array().into_iter().flatten() {
        if networks.contains(&&network["name"]) {
            terms.extend(name_of(network).map(|name| Term { name, meaning: network_words(network) }));
        }
    }
    for &mesh in &meshes {
        terms.extend(name_of(mesh).map(|name| Term { name, meaning: mesh_words(mesh) }));
        let phases = mesh["phases"].as_array().into_iter().flatten();
        terms.extend(
            phases.filter_map(|phase| Some(Term { name: name_of(phase)?, meaning: phase_words(phase) })),
        );
    }
    if !networks.is_empty() || !meshes.is_empty() {
        terms.push(term("none, no sidecar", "without sidecars and without mutual TLS"));
    }
    let variants = of_cases("variant").into_iter().filter_map(Value::as_str);
    terms.extend(variants.filter_map(|name| named(AIRLINE, name)));
    for case in cases().filter(|case| case["arguments"].is_string()) {
        terms.extend(name_of(case).map(|name| Term { name, meaning: command_words(case) }));
    }
    let inputs: Vec<Term> = cases().filter_map(input_term).collect();
    let has_inputs = !inputs.is_empty();
    terms.extend(inputs);
    if has_inputs {
        terms.extend(GENERATION.iter().map(|(name, meaning)| term(name, meaning)));
    }
    terms.extend(of_figures(figures));
    terms
}

/// Returns the terms of what all studies have: rounds, and the percentiles, CPU times and memories among the figures.
fn of_figures<'a>(figures: impl Iterator<Item = &'a str> + Clone) -> Vec<Term> {
    let uses = |part: &str| {
        figures.clone().any(|metric| match part {
            "_p" => metric.contains("_p50") || metric.contains("_p99"),
            "cpu_" => metric.contains("cpu_"),
            "rss_" => metric.starts_with(part) || metric.ends_with("_mb"),
            _ => metric.starts_with(part),
        })
    };
    let mut terms: Vec<Term> = MEASURES
        .iter()
        .filter(|(part, ..)| uses(part))
        .map(|(_, name, meaning)| term(name, meaning))
        .collect();
    terms.push(term(
        "round",
        "each case has one turn in a round, one after the other, so that all see the same state of the machine",
    ));
    terms
}

fn term(name: &str, meaning: &str) -> Term {
    Term { name: name.to_owned(), meaning: meaning.to_owned() }
}

fn named(meanings: Meanings, name: &str) -> Option<Term> {
    meanings.iter().find(|(of, _)| *of == name).map(|(name, meaning)| term(name, meaning))
}

fn name_of(value: &Value) -> Option<String> {
    value["name"].as_str().map(str::to_owned)
}

/// Returns the peers with their versions.
fn of_peers(peers: &BTreeMap<String, Program>) -> Vec<Term> {
    let of = |(name, program): (&String, &Program)| {
        let meaning = named(PEERS, name).map_or_else(|| name.clone(), |term| term.meaning);
        Term { name: name.clone(), meaning: format!("{meaning}; version {}", version(&program.version)) }
    };
    peers.iter().map(of).collect()
}

/// Returns the number in the output of a program for its version, as in `1.40.0`; the whole output without one.
fn version(text: &str) -> &str {
    let mut numbers = text.split(|character: char| !character.is_ascii_digit() && character != '.');
    let is_version =
        |number: &&str| number.matches('.').count() >= 2 && number.split('.').all(|part| !part.is_empty());
    numbers.find(is_version).unwrap_or(text)
}

fn network_words(network: &Value) -> String {
    let kind = network["kind"].as_str().unwrap_or_default();
    let mut words = named(NETWORKS, kind).map_or_else(|| kind.to_owned(), |term| term.meaning);
    for (field, text, unit) in [
        ("bandwidth_mbit", "bandwidth", "Mbit/s"),
        ("delay_ms", "delay", "ms"),
        ("loss_percent", "loss", "%"),
    ] {
        if let Some(number) = network[field].as_f64() {
            words.push_str(&format!("; {text} {number} {unit} in each direction"));
        }
    }
    format!("network between pods: {words}")
}

fn mesh_words(mesh: &Value) -> String {
    let mut words = argument_words(mesh["graph"].as_str().unwrap_or_default());
    if let Some(policies) = mesh["policies"].as_str() {
        words.push_str(&format!(", policies: {policies}"));
    }
    if mesh["telemetry"] == "none" {
        words.push_str(", sidecars without metrics of requests");
    }
    if let (Some(rate), Some(connections)) = (mesh["rate"].as_u64(), mesh["connections"].as_u64()) {
        words.push_str(&format!("; the client sends {rate} requests/s over {connections} connections"));
    }
    format!("mesh: {words}")
}

fn phase_words(phase: &Value) -> String {
    let mut words: Vec<String> = Vec::new();
    if let Some(percent) = phase["rate_percent"].as_f64().filter(|percent| (percent - 100.0).abs() > 1e-9) {
        words.push(format!("{percent} % of the rate"));
    }
    for change in phase["changes"].as_array().into_iter().flatten() {
        let service = change["service"].as_str().unwrap_or_default();
        let replicas =
            change["replicas"].as_u64().map_or_else(|| "all".to_owned(), |number| number.to_string());
        let set: Vec<String> = change["set"]
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| format!("{name} {}", value.to_string().trim_matches('"')))
            .collect();
        words.push(format!("workers of {service} ({replicas}): {}", set.join(", ")));
    }
    let words = if words.is_empty() { "no change".to_owned() } else { words.join("; ") };
    format!("phase of the load: {words}")
}

fn command_words(case: &Value) -> String {
    let mut words = argument_words(case["arguments"].as_str().unwrap_or_default());
    if let Some(limits) = case["search"]["limits"].as_object() {
        let limits: Vec<String> = limits.iter().map(|(name, value)| format!("{name} {value}")).collect();
        words.push_str(&format!("; search for the most sidecars within the limits {}", limits.join(", ")));
    }
    words
}

fn input_term(input: &Value) -> Option<Term> {
    let template = input["template"].as_str()?;
    let name = name_of(input).unwrap_or_else(|| template.to_owned());
    let mut meaning = named(TEMPLATES, template).map_or_else(|| template.to_owned(), |term| term.meaning);
    for (field, text) in [("services", "services or objects"), ("instances", "instances")] {
        if let Some(number) = input[field].as_u64().filter(|number| *number > 0) {
            meaning.push_str(&format!("; {text}: {number}"));
        }
    }
    Some(Term { name, meaning })
}

/// Returns arguments in words. An argument without words remains as it is.
fn argument_words(arguments: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut rest = arguments.split_whitespace().peekable();
    while let Some(argument) = rest.next() {
        let (argument, value) = match argument.split_once('=') {
            Some((argument, value)) => (argument, Some(value)),
            None => (argument, rest.next_if(|next| argument.starts_with("--") && !next.starts_with("--"))),
        };
        let meaning = ARGUMENTS.iter().find(|(name, _)| *name == argument).map(|(_, meaning)| *meaning);
        words.push(match (meaning, value) {
            (Some(meaning), Some(value)) => meaning.replace("{}", value),
            (Some(meaning), None) => meaning.replace(": {}", ""),
            (None, Some(value)) => format!("{argument} {value}"),
            (None, None) => argument.to_owned(),
        });
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};
    use serde_json::json;

    use super::*;
    use crate::{control::ControlArgs, dns::DnsArgs, topology::Topology};

    fn meaning(terms: &[Term], name: &str) -> String {
        terms
            .iter()
            .find(|term| term.name == name)
            .unwrap_or_else(|| panic!("{name}: {terms:?}"))
            .meaning
            .clone()
    }

    #[test]
    fn every_topology_is_explained() {
        for topology in Topology::ALL {
            assert!(named(TOPOLOGIES, topology.name()).is_some(), "{}", topology.name());
        }
    }

    #[test]
    fn versions_are_numbers_without_hashes() {
        let envoy = "envoy  version: 9e5580933739775e8bce/1.40.0/Clean/RELEASE/BoringSSL";
        assert_eq!(version(envoy), "1.40.0");
        assert_eq!(version("nginx version: nginx/1.22.1"), "1.22.1");
        assert_eq!(version("unknown"), "unknown");
    }

    #[test]
    fn names_of_a_scenario_are_explained_by_its_fields() {
        let program = Program { file: "envoy".to_owned(), version: "envoy 1.40.0".to_owned() };
        let peers = BTreeMap::from([("envoy".to_owned(), program)]);
        let scenario = json!({
            "networks": [
                {"name": "narrow", "kind": "routed", "bandwidth_mbit": 20},
                {"name": "far", "kind": "routed", "delay_ms": 1.0, "loss_percent": 0.01},
                {"name": "unmeasured", "kind": "routed"},
            ],
            "meshes": [{"name": "tree", "graph": "tree --levels 9 --branches 9", "rate": 99, "connections": 8}],
            "cases": [{"name": "churn-50", "arguments": "--sidecars 5000 --churn 50"}],
        });
        let mesh = json!({
            "name": "tree", "graph": "tree --levels 3 --branches 5", "rate": 10, "connections": 8,
            "phases": [
                {"name": "before", "rate_percent": 100.0},
                {"name": "degraded", "changes": [{"service": "svc-0", "replicas": 1, "set": {"delay": "400ms"}}]},
            ],
        });
        // No study has cases of all these kinds.
        let cases = json!([
            {"name": "narrow/none/16", "network": "narrow"},
            {"name": "far/none/16", "network": "far"},
            {"name": "tree/none/before", "mesh": mesh, "phase": "before"},
            {"name": "tree/none/degraded", "mesh": mesh, "phase": "degraded"},
            {"name": "none", "variant": "none"},
            {"name": "full/skysail", "variant": "full"},
            {"name": "churn-25", "arguments": "--sidecars=5000 --churn 25 --streams 2 --new 7"},
            {"name": "http-10", "template": "http", "services": 10, "instances": 0},
        ]);
        let terms = of_cases((&scenario, &cases), &peers, ["latency_p99_us", "rss_proxies_kb"].into_iter());
        for (name, words) in [
            (
                "narrow",
                "network between pods: a route to each pod on its node, routes between the nodes; bandwidth 20 Mbit/s",
            ),
            ("far", "delay 1 ms in each direction; loss 0.01 % in each direction"),
            (
                "tree",
                "a tree of services, levels: 3, calls of each service to the next level: 5; the client sends 10 requests/s",
            ),
            ("before", "no change"),
            ("degraded", "workers of svc-0 (1): delay 400ms"),
            ("full", "all access policies"),
            ("none, no sidecar", "without sidecars"),
            (
                "churn-25",
                "simulated sidecars: 5000, 25 % of the sidecars disconnect and reconnect, sidecars for each connection: 2, --new 7",
            ),
            ("http-10", "services with one HTTP port; services or objects: 10"),
            ("envoy", "the proxy Envoy, which Istio uses, with the same configuration; version 1.40.0"),
            ("P50, P90, P99, P99.9", "99 % or 99.9 % of requests (or of sidecars) took at most this time"),
            ("memory", "resident memory"),
            ("round", "one turn"),
        ] {
            assert!(meaning(&terms, name).contains(words), "{name}: {}", meaning(&terms, name));
        }
        assert!(!terms.iter().any(|term| term.name == "CPU time"), "no figure is one: {terms:?}");
        let of = |name: &str| terms.iter().filter(|term| term.name == name).count();
        assert_eq!((of("tree"), of("unmeasured"), of("churn-50")), (1, 0, 0), "{terms:?}");
        let words = argument_words("demo --copies 4 --probability 50");
        assert!(words.starts_with("an entry point that calls random copies"), "{words}");
    }

    #[test]
    fn every_option_of_a_case_has_words() {
        let other = [
            "hostile",
            "attacks",
            "connections",
            "kubeconfig",
            "istiod",
            "skysail",
            "envoy",
            "no-envoy",
            "result",
            "output",
        ];
        for command in
            [ControlArgs::augment_args(Command::new("x")), DnsArgs::augment_args(Command::new("x"))]
        {
            for option in command.get_arguments().filter_map(clap::Arg::get_long) {
                let name = format!("--{option}");
                let has_words = ARGUMENTS.iter().any(|(of, _)| *of == name);
                assert!(has_words || other.contains(&option), "{option}: add it to ARGUMENTS");
            }
        }
    }
}
