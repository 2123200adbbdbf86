use super::*;
use crate::{
    accounting::Memory,
    load::LoadProtocol,
    topology::{Cost, Latencies},
};

fn measurement(p50: f64, cpu: f64) -> Measurement {
    let latencies =
        Latencies { mean: p50, p50, p90: 2.0 * p50, p99: 3.0 * p50, p99_9: 4.0 * p50, max: 5.0 * p50 };
    let memory = Memory { rss_kb: 2048, pss_kb: 1024, private_kb: 512, threads: 3 };
    let cost = |cpu: f64| Cost {
        cpu_us_per_request: cpu,
        cpu_user_us_per_request: Some(cpu / 4.0),
        memory: Some(memory),
    };
    let parts = [("client", 1.0), ("server", 2.0), ("client-proxy", cpu), ("server-proxy", cpu)];
    Measurement {
        requests: 10_000,
        unanswered: 0,
        refused: 0,
        resumed: 0,
        answers_per_second: 1_000.0,
        latency_us: latencies.clone(),
        latency_since_sent_us: latencies,
        parts: parts.map(|(name, cpu)| (name.to_owned(), cost(cpu))).into(),
        other_cpus: 0.0,
        stolen_cpus: 0.0,
        generator_late_p99_us: Some(7.0),
        log_entries: BTreeMap::new(),
    }
}

fn report(runs: Vec<LatencyRun>) -> LatencyReport {
    let settings = LatencySettings {
        protocol: LoadProtocol::Http1,
        topologies: vec![Topology::Baseline, Topology::BothSidecars],
        connections: vec![16],
        qps: 1_000,
        seconds: 5.0,
        warmup: 1.5,
        payload: 1024,
        rounds: 3,
        workers: 2,
        access_logs: access_log::only_none(),
        variants: variant::only_usual(),
    };
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
        benchmark: "latency".to_owned(),
        version: "0".to_owned(),
        commit: None,
        started: 0,
        interrupted: false,
        machine,
        settings,
        peers: BTreeMap::new(),
        runs,
        repeated: Vec::new(),
        summary: Vec::new(),
        comparisons: Vec::new(),
    };
    report.summarize();
    report
}

fn run(round: u32, peer: Option<Peer>, p50: f64, cpu: f64) -> LatencyRun {
    let topology = if peer.is_some() { Topology::BothSidecars } else { Topology::Baseline };
    LatencyRun {
        round,
        series: Series { topology, peer, ..Series::BASELINE },
        connections: 16,
        measurement: Some(measurement(p50, cpu)),
        error: None,
        busy: None,
    }
}

#[test]
fn medians_and_ranges() {
    assert_eq!(spread(vec![]), None);
    assert_eq!(spread(vec![3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
    assert_eq!(spread(vec![4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
}

#[test]
fn added_latency_is_over_the_baseline_of_the_same_round() {
    let report = report(vec![
        run(1, None, 100.0, 0.0),
        run(1, Some(Peer::Envoy), 400.0, 100.0),
        run(2, None, 200.0, 0.0),
        run(2, Some(Peer::Envoy), 520.0, 120.0),
    ]);
    assert_eq!(report.summary.len(), 2);
    assert!(!report.summary[0].metrics.contains_key("added_p50_us"), "nothing is added to the baseline");
    let envoy = &report.summary[1];
    assert_eq!(envoy.metrics["added_p50_us"], Spread { median: 310.0, min: 300.0, max: 320.0 });
    assert_eq!(envoy.metrics["cpu_proxies_us_per_request"].median, 220.0);
    assert_eq!(envoy.metrics["cpu_ends_us_per_request"].median, 3.0);
    assert_eq!(envoy.metrics["rss_server_proxy_kb"].median, 2048.0);
    assert_eq!(envoy.metrics["rss_proxies_kb"].median, 4096.0);
}

#[test]
fn the_cost_of_an_access_log_is_over_the_same_peer_without_one_in_the_same_round() {
    let mut runs = Vec::new();
    for (round, cpu) in [(1, 100.0), (2, 200.0)] {
        runs.push(run(round, Some(Peer::Envoy), 400.0, cpu));
        let mut with = run(round, Some(Peer::Envoy), 400.0, cpu + 15.0);
        with.series.access_log = AccessLog::Otlp;
        let collector = Cost { cpu_us_per_request: 7.0, cpu_user_us_per_request: None, memory: None };
        let parts = &mut with.measurement.as_mut().unwrap().parts;
        parts.extend(
            ["client-collector", "server-collector"].map(|part| (part.to_owned(), collector.clone())),
        );
        runs.push(with);
    }
    let report = report(runs);
    let [without, with] = report.summary.as_slice() else { panic!("{:?}", report.summary) };
    assert!(!without.metrics.contains_key("cpu_access_log_us_per_request"));
    assert_eq!(with.series.to_string(), "both-sidecars, envoy, otlp");
    let median = |metric: &str| with.metrics[metric].median;
    assert_eq!(median("cpu_access_log_us_per_request"), 30.0);
    assert_eq!(median("cpu_collectors_us_per_request"), 14.0);
    assert_eq!((median("cpu_proxies_us_per_request"), median("cpu_ends_us_per_request")), (330.0, 3.0));
    let json = serde_json::to_value(&report.runs).unwrap();
    assert_eq!((&json[0]["access_log"], &json[1]["access_log"]), (&serde_json::Value::Null, &"otlp".into()));
}

#[test]
fn peers_are_compared_within_rounds_and_failures_counted() {
    let mut failed = run(3, Some(Peer::Envoy), 0.0, 0.0);
    failed.measurement = None;
    failed.error = Some("ended".to_owned());
    let report = report(vec![
        run(1, Some(Peer::Skysail), 100.0, 40.0),
        run(1, Some(Peer::Envoy), 100.0, 100.0),
        run(2, Some(Peer::Skysail), 100.0, 120.0),
        run(2, Some(Peer::Envoy), 100.0, 200.0),
        run(3, Some(Peer::Skysail), 100.0, 1.0),
        failed,
    ]);
    let [comparison] = report.comparisons.as_slice() else { panic!("{:?}", report.comparisons) };
    assert_eq!((comparison.peer, comparison.other), (Peer::Skysail, Peer::Envoy));
    let cpu = comparison.ratios["cpu_proxies_us_per_request"];
    assert!((cpu.median - 0.5).abs() < 1e-9 && (cpu.max - 0.6).abs() < 1e-9, "{cpu:?}");
    let envoy = report.summary.iter().find(|row| row.series.peer == Some(Peer::Envoy)).unwrap();
    assert_eq!((envoy.rounds, envoy.failed), (2, 1));
    let text = report.tables();
    assert!(text.contains(" 1/3 |"), "{text}");
    let ratio = text.lines().find(|line| line.contains("| skysail / envoy |")).unwrap();
    assert!(ratio.contains("| 0.50 (0.40–0.60) | 1.00 |"), "{text}");
    assert!(text.contains("failed 0/3: 0 of 3 turns failed."), "{text}");
    assert!(
        text.contains("skysail / envoy: skysail's figure divided by envoy's of the same round"),
        "{text}"
    );
}

#[test]
fn tables_fit_a_terminal_with_all_peers_and_long_figures() {
    let mut runs = Vec::new();
    for round in 1..=3 {
        // A slow machine: the median and the range of each latency have seven digits.
        let factor = f64::from(round);
        runs.push(run(round, None, 1_234_567.8 * factor, 0.0));
        for peer in Peer::ALL {
            runs.push(run(round, Some(peer), 1_876_543.2 * factor, 98_765.4 * factor));
        }
    }
    let text = report(runs).tables();
    crate::layout::assert_fits(&text);
    for column in ["P99.9 µs", "added P99 µs", "proxies CPU µs", "server PSS MB", "others' CPUs"] {
        assert!(text.contains(column), "{column}: {text}");
    }
    assert!(text.contains("| skysail / haproxy |"), "{text}");
}

#[test]
fn the_result_file_has_one_flat_object_per_turn() {
    let json = serde_json::to_value(report(vec![run(1, None, 100.0, 0.0)])).unwrap();
    let turn = &json["runs"][0];
    assert_eq!(turn["topology"], "baseline");
    assert_eq!(turn["peer"], serde_json::Value::Null);
    assert_eq!(turn["latency_us"]["p99_9"], 400.0);
    assert_eq!(turn["parts"]["server-proxy"]["rss_kb"], 2048);
    assert_eq!(json["summary"][0]["metrics"]["latency_p50_us"]["median"], 100.0);
}
