use std::{collections::BTreeMap, fs};

use super::{
    airline::AirlineScenario,
    command::CommandScenario,
    diff::{DiffRow, Verdict, compare},
    format::{Measure, Published, PublishedRow},
    generation::GenerationScenario,
    mesh::MeshScenario,
    networks::NetworksScenario,
    study::{AnyResult, AnyScenario, parse},
    *,
};
use crate::{
    access_log::AccessLog,
    accounting::Memory,
    document,
    peers::Peer,
    report::{LatencyRun, Machine, Series},
    topology::{Cost, Latencies, Measurement, Topology},
    variant::Variant,
};

/// Folder of the scenarios.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benchmarks/scenarios");

const SMALL: &str = "\
name: small
title: Small <title>
question: What?
topologies: [baseline, both-sidecars]
configuration:
  workers: 2
load:
  protocol: http1
  rate: 1000
  connections: [2, 16]
  payload: 1024
peers: [skysail, envoy]
measure: [latency, added-latency, cpu, memory]
acceptance:
  limits:
    - {metric: rss_server_proxy_kb, topology: both-sidecars, peer: skysail, at_most: 100}
sizes:
  default: {rounds: 5, seconds: 3, warmup: 1}
  tiny: {rounds: 1, seconds: 0.5, warmup: 0.2, rate: 200, connections: [2]}
published:
  - {system: Other 1, source: A page, topology: both-sidecars, rows: [{metrics: {rss_server_proxy_kb: 2048}}]}
";

fn traffic(text: &str) -> Result<Scenario, String> {
    Scenario::of(&document::parse(text, "scenario")?)
}

fn measurement(p50: f64, cpu: f64) -> Measurement {
    let latencies =
        Latencies { mean: p50, p50, p90: p50 * 2.0, p99: p50 * 3.0, p99_9: p50 * 4.0, max: p50 * 5.0 };
    let memory = Some(Memory { rss_kb: 2_048, ..Memory::default() });
    let cost = Cost { cpu_us_per_request: cpu, cpu_user_us_per_request: None, memory };
    Measurement {
        requests: 10_000,
        unanswered: 0,
        refused: 0,
        resumed: 0,
        answers_per_second: 1_000.0,
        latency_us: latencies.clone(),
        latency_since_sent_us: latencies,
        parts: ["client-proxy", "server-proxy"].map(|name| (name.to_owned(), cost.clone())).into(),
        other_cpus: 0.0,
        stolen_cpus: 0.0,
        generator_late_p99_us: Some(9.0),
        log_entries: BTreeMap::new(),
    }
}

/// Returns a result with 5 rounds. Latencies and CPU of a peer are multiplied by the factor.
pub(super) fn result(factor: impl Fn(Option<Peer>) -> f64) -> ScenarioResult {
    let scenario = traffic(SMALL).unwrap();
    let mut runs = Vec::new();
    for round in 1..=5 {
        for connections in [2, 16] {
            for peer in [None, Some(Peer::Skysail), Some(Peer::Envoy)] {
                let topology = if peer.is_some() { Topology::BothSidecars } else { Topology::Baseline };
                let own = match peer {
                    None => 100.0,
                    Some(Peer::Skysail) => 300.0,
                    Some(_) => 900.0,
                };
                let value = factor(peer) * (own + f64::from(round) + connections as f64);
                let measurement = Some(measurement(value, value));
                let series = Series { topology, peer, ..Series::BASELINE };
                runs.push(LatencyRun { round, series, connections, measurement, error: None, busy: None });
            }
        }
    }
    let machine = Machine {
        kernel: "6".to_owned(),
        cpu: "x".to_owned(),
        cpus: 2,
        load: 0.0,
        busy: None,
        network: "own namespace".to_owned(),
        congestion_control: "reno".to_owned(),
        scheduling: "SCHED_RR".to_owned(),
    };
    let mut report = LatencyReport {
        format: 1,
        benchmark: BENCHMARK.to_owned(),
        version: "0".to_owned(),
        commit: Some("abc".to_owned()),
        started: 1_795_567_931,
        interrupted: false,
        machine,
        settings: scenario.settings(SizeName::Default, None),
        peers: BTreeMap::new(),
        runs,
        repeated: Vec::new(),
        summary: Vec::new(),
        comparisons: Vec::new(),
    };
    report.summarize();
    let violations = run::violations(&scenario, SizeName::Default, &report);
    ScenarioResult { scenario, size: SizeName::Default, violations, perf: false, report }
}

#[test]
fn all_scenarios_of_the_repository_are_valid() {
    let files = fs::read_dir(FOLDER).unwrap().map(|entry| entry.unwrap().path());
    let scenarios: Vec<_> = files.map(|file| (AnyScenario::read(&file).unwrap(), file)).collect();
    assert!(!scenarios.is_empty());
    for (scenario, file) in scenarios {
        let (AnyScenario::Traffic(Scenario { name, .. })
        | AnyScenario::Generation(GenerationScenario { name, .. })
        | AnyScenario::Mesh(MeshScenario { name, .. })
        | AnyScenario::Networks(NetworksScenario { name, .. })
        | AnyScenario::Airline(AirlineScenario { name, .. })
        | AnyScenario::Command(CommandScenario { name, .. })) = &scenario;
        assert_eq!(file.file_stem().unwrap().to_str(), Some(name.as_str()), "the file has the name");
        let AnyScenario::Traffic(scenario) = scenario else { continue };
        let tiny = scenario.settings(SizeName::Tiny, None);
        let turns =
            tiny.topologies.len() * tiny.connections.len() * tiny.rounds as usize * scenario.peers.len();
        assert!(
            turns as f64 * (tiny.seconds + tiny.warmup) < 60.0,
            "{}: tiny takes too long",
            file.display()
        );
    }
}

#[test]
fn sizes_replace_values_of_the_load() {
    let scenario = traffic(SMALL).unwrap();
    let tiny = scenario.settings(SizeName::Tiny, Some(3));
    assert_eq!((tiny.qps, tiny.connections, tiny.rounds), (200, vec![2], 3));
    let default = scenario.settings(SizeName::Default, None);
    assert_eq!((default.qps, default.connections, default.rounds), (1_000, vec![2, 16], 5));
}

#[test]
fn errors_name_line_field_and_remedy() {
    for (from, to, error) in [
        ("rate: 1000", "rate: 0", "9: load.rate: 0 must be from 1 to 1000000"),
        ("rate: 1000", "rate: x", "9: load.rate: invalid type: string \"x\""),
        (
            "rate: 1000",
            "speed: 1",
            "9: load.speed: unknown field `speed`, expected one of `protocol`, `rate`",
        ),
        ("  rate: 1000\n", "", "7: load: missing field `rate`"),
        ("title: Small <title>\n", "", "1: missing field `title`"),
        ("[2, 16]", "[2, 2]", "10: load.connections: must have 1 to 32 values, each once"),
        ("[2, 16]", "[2, 5000]", "10: load.connections[1]: 5000 must be from 1 to 4096"),
        (
            "protocol: http1",
            "protocol: h3",
            "8: load.protocol: unknown variant `h3`, expected one of `http1`, `http2`, `grpc`, `tcp`",
        ),
        (
            "[baseline, both-sidecars]\nconfiguration:\n  workers: 2\nload:\n  protocol: http1",
            "[baseline, server-mtls]\nconfiguration:\n  workers: 2\nload:\n  protocol: grpc",
            "4: topologies: server-mtls is measured with the protocol http1 only",
        ),
        (
            "workers: 2\nload:\n  protocol: http1",
            "workers: 2\n  access_logs: [file]\nload:\n  protocol: tcp",
            "7: configuration.access_logs: an access log has no entries of requests over tcp",
        ),
        ("peers: [skysail, envoy]", "peers: [skysail, linkerd]", "12: peers[1]: unknown variant `linkerd`"),
        ("topologies: [baseline, ", "topologies: [", "4: topologies: must contain baseline"),
        (
            "metric: rss_server_proxy_kb, topology",
            "metric: rss, topology",
            "16: acceptance.limits[0].metric: no such metric",
        ),
        ("peer: skysail, at_most", "at_most", "16: acceptance.limits[0].peer: must name a peer"),
        ("peer: skysail, at_most", "peer: nginx, at_most", "16: acceptance.limits[0].peer: must be one of"),
        ("both-sidecars, peer", "server-sidecar, peer", "16: acceptance.limits[0].topology: must be one of"),
        (
            "workers: 2",
            "workers: 2\n  access_logs: [disk]",
            "7: configuration.access_logs[0]: unknown variant `disk`",
        ),
        (
            "workers: 2",
            "workers: 2\n  access_logs: [none, none]",
            "7: configuration.access_logs: must have 1 to 4 values, each once",
        ),
        (
            "peer: skysail, at_most",
            "peer: skysail, access_log: otlp, at_most",
            "16: acceptance.limits[0].access_log: must be one of",
        ),
        ("rounds: 5", "rounds: 31", "18: sizes.default.rounds: 31 must be from 1 to 30"),
        ("warmup: 0.2", "warmup: .nan", "19: sizes.tiny.warmup"),
        ("name: small", "name: ../x", "1: name: must be 1 to 64 lower-case letters"),
        ("title: Small", "name: again\ntitle: Small", "2: name: also on line 1; remove one of them"),
        ("name: small", "name: [", "3: not valid YAML"),
    ] {
        let text = SMALL.replacen(from, to, 1);
        assert_ne!(text, SMALL, "{from}");
        let got = traffic(&text).unwrap_err();
        assert!(got.starts_with(error), "{got}\nexpected: {error}");
    }
    let logs = SMALL.replacen("workers: 2", "workers: 2\n  access_logs: [file]", 1);
    let without = traffic(&logs.replacen("measure: [", "measure: [access-log, ", 1)).unwrap_err();
    assert!(without.starts_with("7: configuration.access_logs: must contain none, because"), "{without}");
    let haproxy = traffic(&logs.replacen("envoy]", "haproxy]", 1)).unwrap_err();
    assert!(haproxy.starts_with("13: peers[1]: haproxy is measured without access logs only"), "{haproxy}");
    let scenario = traffic(&logs.replacen("[file]", "[none, file]", 1)).unwrap();
    let refused = scenario.check_peers(&[(Peer::Relay, "/x".into())]).unwrap_err().to_string();
    assert!(refused.starts_with("small: --peers: relay is measured without access logs only"), "{refused}");
    let two = traffic(&SMALL.replacen("name: small\n", "name: small\n---\n", 1)).unwrap_err();
    assert!(two.contains(": a second document; write each scenario to a file of its own"), "{two}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    fs::write(&file, SMALL.replacen("workers: 2", "workers: 0", 1)).unwrap();
    let error = format!("{:#}", AnyScenario::read(&file).err().unwrap());
    assert!(error.contains("x.yaml:6: configuration.workers: 0 must be from 1 to 256; docs/"), "{error}");
}

#[test]
fn variants_are_possible_with_some_topologies_and_measurements_only() {
    let variants = SMALL.replacen("workers: 2", "workers: 2\n  variants: [metrics]", 1);
    for (from, to, error) in [
        ("[metrics]", "[fast]", "7: configuration.variants[0]: unknown variant `fast`"),
        (
            "[metrics]",
            "[metrics]\n  access_logs: [none, file]",
            "8: configuration.access_logs: must be left out, because there are variants",
        ),
        ("measure: [", "measure: [variants, ", "7: configuration.variants: must contain usual, because"),
        (
            "[baseline, both",
            "[baseline, ingress, both",
            "7: configuration.variants: are measured in baseline and both",
        ),
        (
            "protocol: http1",
            "protocol: grpc",
            "7: configuration.variants: are measured with the protocol http1 only",
        ),
        (
            "peer: skysail, at_most",
            "peer: skysail, variant: usual, at_most",
            "17: acceptance.limits[0].variant: must be",
        ),
    ] {
        let text = variants.replacen(from, to, 1);
        assert_ne!(text, variants, "{from}");
        let got = traffic(&text).unwrap_err();
        assert!(got.starts_with(error), "{got}\nexpected: {error}");
    }
}

fn read_traffic(json: &[u8]) -> ScenarioResult {
    match parse(json).unwrap() {
        Some(AnyResult::Traffic(result)) => *result,
        _ => panic!("another study"),
    }
}

#[test]
fn a_result_can_be_read_again() {
    let original = result(|_| 1.0);
    let json = serde_json::to_vec_pretty(&original).unwrap();
    let again = read_traffic(&json);
    assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&original).unwrap());
    assert!(parse(br#"{"benchmark": "compare", "format": 1}"#).unwrap().is_none());
    assert!(parse(br#"{"benchmark": "scenario", "format": 1}"#).is_err());
    let later = String::from_utf8(json).unwrap().replacen("\"format\": 1", "\"format\": 2", 1);
    assert!(parse(later.as_bytes()).err().unwrap().to_string().contains("this program reads format 1"));
    assert!(parse(b"x").is_err());
}

#[test]
fn limits_and_failures_are_reported() {
    let mut all = result(|_| 1.0);
    assert_eq!(
        all.violations[0],
        "rss_server_proxy_kb is 2048.0 in both-sidecars with skysail, 2 connections; at most 100 is accepted"
    );
    assert_eq!(all.violations.len(), 2);
    all.report.runs[1].measurement.as_mut().unwrap().refused = 1;
    // The limits of figures do not hold for the tiny size.
    let tiny = run::violations(&all.scenario, SizeName::Tiny, &all.report);
    assert_eq!(
        tiny,
        [
            "1 of 10000 requests failed in round 1, both-sidecars, skysail, 2 connections; at most 0 % may fail"
        ]
    );
}

#[test]
fn tables_have_published_figures_beside_those_of_the_run() {
    let text = table::markdown(&result(|_| 1.0));
    crate::layout::assert_fits(&text);
    let both = text.split("### both-sidecars").nth(1).unwrap();
    assert!(both.contains("added P50 µs") && both.contains("| Other 1 [1]"), "{text}");
    assert!(text.contains("[1] published, not measured here: A page"), "{text}");
    assert!(text.contains("late by at most 9 µs at P99"), "{text}");
    assert!(text.contains("Not accepted: rss_server_proxy_kb is 2048.0"), "{text}");
    let published = both.lines().rfind(|line| line.contains("Other 1")).unwrap();
    assert!(published.contains("2.0"), "{text}");
}

#[test]
fn differences_are_found_and_chance_is_not() {
    let verdict = |rows: &[DiffRow], peer: Option<Peer>, metric: &str| {
        rows.iter().find(|row| row.series.peer == peer && row.metric == metric).map(|row| row.verdict)
    };
    let before = result(|_| 1.0);
    let bounds = (5.0, 99.0);
    let same = compare(&before, &result(|_| 1.0), None, bounds).unwrap();
    assert!(same.iter().all(|row| row.verdict == Verdict::Same), "{same:?}");
    let skysail = Some(Peer::Skysail);
    let slower = |peer: Option<Peer>| if peer == Some(Peer::Skysail) { 1.3 } else { 1.0 };
    let rows = compare(&before, &result(slower), None, bounds).unwrap();
    assert_eq!(verdict(&rows, skysail, "latency_p99_us"), Some(Verdict::Worse));
    assert_eq!(verdict(&rows, Some(Peer::Envoy), "latency_p99_us"), Some(Verdict::Same));
    assert_eq!(verdict(&rows, skysail, "rss_server_proxy_kb"), Some(Verdict::Same));
    assert_eq!(verdict(&rows, None, "latency_p50_us"), Some(Verdict::Same));
    let rows = compare(&result(slower), &before, None, bounds).unwrap();
    assert_eq!(verdict(&rows, skysail, "latency_p50_us"), Some(Verdict::Better));
    // A change below the threshold does not count, whatever its confidence.
    let rows = compare(&before, &result(|_| 1.04), None, bounds).unwrap();
    assert_eq!(verdict(&rows, skysail, "latency_p99_us"), Some(Verdict::Same));
}

/// Lets the turns of skysail with this number of connections fail.
fn fail(result: &mut ScenarioResult, connections: usize) {
    for run in &mut result.report.runs {
        if run.series.peer == Some(Peer::Skysail) && run.connections == connections {
            (run.measurement, run.error) = (None, Some("ended".to_owned()));
        }
    }
}

#[test]
fn figures_that_a_result_lacks_are_named_and_not_accepted() {
    let bounds = (5.0, 99.0);
    let both = result(|_| 1.0);
    let mut lacking = result(|_| 1.0);
    fail(&mut lacking, 16);
    let rows_of = |a: &ScenarioResult, b: &ScenarioResult, metric: &str| -> Vec<(Verdict, Vec<usize>)> {
        let rows = compare(a, b, None, bounds).unwrap();
        let rows = rows.into_iter();
        let own = rows.filter(|row| row.series.peer == Some(Peer::Skysail) && row.metric == metric);
        own.map(|row| (row.verdict, row.connections)).collect()
    };
    let rss = "rss_server_proxy_kb";
    assert_eq!(rows_of(&both, &lacking, rss), [(Verdict::Same, vec![2]), (Verdict::OnlyInA, vec![16])]);
    assert_eq!(rows_of(&lacking, &both, rss), [(Verdict::Same, vec![2]), (Verdict::OnlyInB, vec![16])]);
    fail(&mut lacking, 2);
    assert_eq!(rows_of(&both, &lacking, "latency_p50_us"), [(Verdict::OnlyInA, vec![2, 16])]);
    assert_eq!(rows_of(&lacking, &lacking, rss), [(Verdict::InNeither, vec![2, 16])], "it has a limit");
    assert_eq!(rows_of(&lacking, &lacking, "latency_p50_us"), []);

    let is_accepted =
        |a: &ScenarioResult, b: &ScenarioResult| diff::is_accepted(&compare(a, b, None, bounds).unwrap());
    assert!(is_accepted(&both, &both));
    assert!(!is_accepted(&both, &lacking) && !is_accepted(&lacking, &both), "there is a limit on its memory");
    // Without a limit, the row is all.
    lacking.scenario.acceptance.limits.clear();
    assert!(is_accepted(&both, &lacking));
    // A peer that one of the runs did not have is no failure.
    lacking.report.runs.retain(|run| run.series.peer != Some(Peer::Skysail));
    lacking.scenario = both.scenario.clone();
    assert!(is_accepted(&both, &lacking));
}

#[test]
fn ratios_to_a_peer_cancel_the_speed_of_the_machine() {
    let before = result(|_| 1.0);
    let slow_machine = result(|_| 2.0);
    let bounds = (5.0, 99.0);
    let rows = compare(&before, &slow_machine, None, bounds).unwrap();
    assert!(rows.iter().any(|row| row.series.peer.is_none() && row.verdict == Verdict::Worse), "{rows:?}");
    let rows = compare(&before, &slow_machine, Some(Peer::Envoy), bounds).unwrap();
    assert!(rows.iter().all(|row| row.series.peer == Some(Peer::Skysail)), "{rows:?}");
    assert!(rows.iter().all(|row| row.verdict == Verdict::Same), "{rows:?}");
}

#[test]
fn results_of_different_loads_are_not_compared() {
    let mut other = result(|_| 1.0);
    other.report.settings.qps = 5;
    let error = compare(&result(|_| 1.0), &other, None, (5.0, 99.0)).unwrap_err().to_string();
    assert!(error.contains("compare results of the same load"), "{error}");
}

#[test]
fn the_page_of_a_result_is_self_contained_and_balanced() {
    let mut all = result(|_| 1.0);
    all.report.runs[1].error = Some("the server <ended>".to_owned());
    let further = Published {
        system: "Mesh & Co".to_owned(),
        source: "x.csv".to_owned(),
        topology: Topology::Baseline,
        access_log: AccessLog::None,
        variant: Variant::Usual,
        rows: vec![PublishedRow {
            connections: Some(2),
            metrics: BTreeMap::from([("latency_p50_us".to_owned(), 7.0)]),
        }],
    };
    let mut figures = 0;
    let page = crate::html::document("x", &page::section(&all, &[further], &mut figures));
    assert_eq!(figures, 4, "latency, added latency, CPU, memory");
    assert_eq!(page.matches("<svg ").count(), 11, "four and three percentiles, and two sidecars twice");
    crate::html::assert_complete(&page);
    // A published row without a number of connections is a level line; one of the baseline is a point.
    let published = |class: &str| page.matches(&format!(r#"<circle class="{class} published"#)).count();
    assert_eq!((published("published0"), published("published1")), (2, 1));
    for text in [
        "Hollow marks: published, not measured here",
        "Vertical lines: least and greatest value of the rounds",
        "Both axes are logarithmic;",
        "Figure 1. Latency from when requests were due, µs: both-sidecars",
        r#"<span class="key line peer0"></span>skysail</li>"#,
        r#"<span class="key line peer1"></span>envoy</li>"#,
        r#"<span class="key line none"></span>no sidecar</li>"#,
        r#"<span class="key line published0 published"></span>Other 1 [1]</li>"#,
        ">P50 of latency</text>",
        ">P90 of latency</text>",
        ">P99 of latency</text>",
        ">P99.9 of latency</text>",
        ">connections of the client</text>",
        ">µs for a request</text>",
        ">MB</text>",
        "<dt>both-sidecars</dt><dd>client – sidecar – sidecar – server, with mutual TLS",
        "<dt>P50, P90, P99, P99.9</dt>",
        "Small &lt;title&gt;",
        "the server &lt;ended&gt;",
        "Mesh &amp; Co [2]",
        "Command: skysail bench run small",
        "Medians of 5 rounds",
    ] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn a_result_with_one_number_of_connections_has_bars_with_ranges_in_the_colours_of_lines() {
    let mut all = result(|_| 1.0);
    all.report.settings.connections = vec![2];
    all.report.runs.retain(|run| run.connections == 2);
    all.report.summarize();
    let page = page::section(&all, &[], &mut 0);
    for class in ["peer0", "peer1", "none", "published0 published"] {
        assert!(page.contains(&format!(r#"<rect class="{class}""#)), "{class}");
    }
    for text in [
        "Black lines: least and greatest value of the rounds",
        ">P99 of latency, µs</text>",
        ">CPU time of the server's sidecar, µs for a request</text>",
        r#"<circle class="published0 published""#,
        r#"<path class="range""#,
    ] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn columns_of_istio_are_written_and_read() {
    let original = result(|_| 1.0);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("benchmark.csv");
    fs::write(&file, csv::write(&original)).unwrap();
    let published = csv::read(&file, &original.report.settings).unwrap();
    let modes: Vec<_> =
        published.iter().map(|one| (one.system.as_str(), one.topology, one.rows.len())).collect();
    assert_eq!(
        modes,
        [
            ("none", Topology::Baseline, 10),
            ("envoy", Topology::BothSidecars, 10),
            ("skysail", Topology::BothSidecars, 10)
        ]
    );
    let row = &published[2].rows[0];
    assert_eq!((row.connections, row.metrics["latency_p99_9_us"]), (Some(2), 1_212.0));
    assert_eq!(row.metrics["cpu_client_proxy_us_per_request"], 303.0);
    assert_eq!(row.metrics["rss_server_proxy_kb"], 2_048.0);
    for figure in [Measure::Latency, Measure::Cpu, Measure::Memory].iter().flat_map(|group| group.figures()) {
        // The run has no gateway.
        let is_read = row.metrics.contains_key(figure.metric);
        assert_eq!(is_read, !figure.metric.contains("gateway"), "{}", figure.metric);
    }
}

#[test]
fn rows_of_istio_with_the_same_load_are_read() {
    let text = "StartTime,ActualDuration,Labels,NumThreads,ActualQPS,p50,p90,p99,cpu_mili_avg_istio_proxy_fortioclient,\
                mem_Mi_avg_istio_proxy_fortioclient\n\
                2020-08-12T08:44:44.4Z,240,ecbc1c65_qps_1000_c_8_1024_v2-stats-nullvm_both,8,1000,2241,2839,3363,277.0,70.5\n\
                2020-08-12T04:04:47.7Z,240,ff93ac4f_qps_10_c_16_1024_none_mtls_baseline,16,10,517,634,698,2.9,64\n\
                2020-08-12T04:29:06.1Z,240,ff93ac4f_qps_1000_c_16_1024_none_mtls_baseline,16,1000,316,421,547,2.6,66\n\
                2020-08-12T04:29:06.1Z,240,ff93ac4f_qps_1000_c_16_1024_none_mtls_ingress,16,1000,616,721,847,2.6,66\n";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("benchmark.csv");
    let read = |text: &str| {
        fs::write(&file, text).unwrap();
        csv::read(&file, &result(|_| 1.0).report.settings)
    };
    let published = read(text).unwrap();
    let [baseline, both, ingress] = published.as_slice() else { panic!("{published:?}") };
    assert_eq!((ingress.topology, ingress.rows[0].metrics["latency_p50_us"]), (Topology::Ingress, 616.0));
    assert_eq!((baseline.system.as_str(), baseline.topology), ("none_mtls", Topology::Baseline));
    assert_eq!(baseline.rows[0].metrics.len(), 3, "an idle container has no figures");
    assert_eq!((both.system.as_str(), both.topology), ("v2-stats-nullvm", Topology::BothSidecars));
    assert_eq!(both.rows[0].metrics["cpu_client_proxy_us_per_request"], 277.0);
    assert_eq!(both.rows[0].metrics["rss_client_proxy_kb"], 72_192.0);
    for (text, error) in [
        ("a,b\n", "line 1: no column Labels"),
        ("", "line 1: no column Labels"),
        (&text.replacen(",2241,", ",x,", 1), "line 2: p50 \"x\" is not a number"),
        (&text.replacen(",2241,", ",-1,", 1), "line 2: p50 -1 is out of bounds"),
        (&text.replacen(",277.0,70.5", "", 1), "line 2: 8 cells, but 10 columns"),
        (&text.replace("qps_1000", "qps_7"), "has no row with 1000 requests/s and 1024 bytes"),
    ] {
        let got = format!("{:#}", read(text).unwrap_err());
        assert!(got.contains(error), "{got}\nexpected: {error}");
    }
}
