use std::collections::BTreeMap;

use super::{format::NetworkCase, *};
use crate::{
    accounting::Memory,
    document,
    peers::Peer,
    report::Machine,
    scenario::{
        cases::{CaseReport, CaseResult, CaseRun, CaseSettings, CaseStudy as _, compare, markdown, section},
        diff::Verdict,
        format::SizeName,
        study::{AnyResult, parse},
    },
    topology::{Cost, Latencies, Measurement},
};

const SMALL: &str = "\
study: networks
name: small
title: Small <title>
question: What?
networks:
  - {name: flat, kind: bridge}
  - {name: secret, kind: wireguard, delay_ms: 1, loss_percent: 0.1, bandwidth_mbit: 10}
configuration: {workers: 2}
load: {protocol: http1, rate: 1000, connections: [2, 16], payload: 1024}
peers: [skysail]
measure: [latency, cpu, memory]
acceptance:
  limits:
    - {metric: latency_p99_us, case: flat/skysail/16, at_most: 900}
sizes:
  default: {rounds: 7, seconds: 2, warmup: 1}
  tiny: {rounds: 1, seconds: 1, warmup: 0.2, rate: 70, connections: [3]}
published:
  - {system: Other, source: A page, rate: 1000, metrics: {cpu_proxies_us_per_request: 400}}
";

fn scenario(text: &str) -> Result<NetworksScenario, String> {
    NetworksScenario::of(&document::parse(text, "scenario")?)
}

fn measurement(p50: f64, refused: u64) -> Measurement {
    let latencies =
        Latencies { mean: p50, p50, p90: p50 * 2.0, p99: p50 * 3.0, p99_9: p50 * 4.0, max: p50 * 5.0 };
    let memory = Some(Memory { rss_kb: 2_048, ..Memory::default() });
    let cost = Cost { cpu_us_per_request: p50, cpu_user_us_per_request: None, memory };
    Measurement {
        requests: 10_000,
        unanswered: 0,
        refused,
        resumed: 0,
        answers_per_second: 1_000.0,
        latency_us: latencies.clone(),
        latency_since_sent_us: latencies,
        parts: ["client-proxy", "server-proxy", "server"].map(|name| (name.to_owned(), cost.clone())).into(),
        other_cpus: 0.0,
        stolen_cpus: 0.0,
        generator_late_p99_us: Some(9.0),
        log_entries: BTreeMap::new(),
    }
}

/// Returns a result with 7 rounds on a machine without WireGuard. Latencies with Skysail are multiplied by the factor.
fn result(factor: f64, refused: u64) -> CaseResult<NetworksScenario> {
    let scenario = scenario(SMALL).unwrap();
    let cases = scenario.cases(&[2, 16], &[Peer::Skysail]);
    let turn = |round: u32, case: &NetworkCase| {
        let own = 100.0 + f64::from(round);
        let is_available = case.network == "flat";
        CaseRun {
            round,
            case: NetworksScenario::name(case).to_owned(),
            measurement: is_available
                .then(|| measurement(if case.peer.is_some() { own * factor } else { own }, refused)),
            error: None,
            unavailable: (!is_available).then(|| "the network secret needs <WireGuard>".to_owned()),
            busy: None,
        }
    };
    let runs = (1..=7).flat_map(|round| cases.iter().map(move |case| turn(round, case))).collect();
    let machine = Machine {
        kernel: "6".to_owned(),
        cpu: "x".to_owned(),
        cpus: 2,
        load: 0.0,
        busy: None,
        network: "namespaces of pods and nodes".to_owned(),
        congestion_control: "reno".to_owned(),
        scheduling: "SCHED_RR".to_owned(),
    };
    let settings = CaseSettings { cases, rounds: 7, seconds: 2.0, warmup: 1.0 };
    let report = CaseReport::new((1_795_567_931, false), machine, settings, [].into(), runs);
    CaseResult::new(scenario, SizeName::Default, report)
}

#[test]
fn fields_out_of_bounds_are_refused_with_their_line() {
    for (from, to, error) in [
        ("kind: bridge", "kind: ring", "6: networks[0].kind: unknown variant `ring`"),
        ("name: secret", "name: flat", "5: networks: must have 1 to 16 values, each once"),
        ("name: secret", "name: Se", "7: networks[1].name: must be 1 to 64"),
        ("delay_ms: 1", "delay_ms: -1", "7: networks[1].delay_ms: -1 must be from 0 to 1000"),
        ("loss_percent: 0.1", "loss_percent: 51", "7: networks[1].loss_percent: 51 must be from 0 to 50"),
        ("bandwidth_mbit: 10", "bandwidth_mbit: 0", "7: networks[1].bandwidth_mbit: 0 must be from 1"),
        ("workers: 2", "workers: 0", "8: configuration.workers: 0 must be from 1 to 256"),
        ("rate: 1000,", "rate: 0,", "9: load.rate: 0 must be from 1 to 1000000"),
        ("flat/skysail/16", "flat/skysail", "14: acceptance.limits[0].case: must be one of flat/none/2, "),
        ("cpu_proxies_us_per_request: 400", "cpu: 4", "19: published[0].metrics.cpu: no such metric"),
    ] {
        let text = SMALL.replacen(from, to, 1);
        assert_ne!(text, SMALL, "{from}");
        let got = scenario(&text).unwrap_err();
        assert!(got.starts_with(error), "{got}\nexpected: {error}");
    }
}

#[test]
fn each_network_has_turns_without_sidecars_and_with_those_of_each_peer() {
    let scenario = scenario(SMALL).unwrap();
    let settings = scenario.settings(SizeName::Tiny, None);
    assert_eq!((settings.qps, &settings.connections[..], settings.rounds), (70, &[3][..], 1));
    let cases = scenario.cases(&settings.connections, &[Peer::Skysail, Peer::Envoy]);
    let names: Vec<&str> = cases.iter().map(NetworksScenario::name).collect();
    let expected =
        ["none", "skysail", "envoy"].map(|peer| ["flat", "secret"].map(|of| format!("{of}/{peer}/3")));
    assert_eq!(names, expected.concat());
}

#[test]
fn limits_and_failed_requests_are_checked_only_where_the_machine_has_the_network() {
    assert_eq!(result(1.0, 0).violations, [""; 0]);
    let slow = result(3.0, 0).violations;
    assert_eq!(slow, ["latency_p99_us is 936.0 for network flat/skysail/16; at most 900 is accepted"]);
    let failed = result(1.0, 1).violations;
    assert_eq!(failed.len(), 7 * 4, "{failed:?}");
    assert!(result(1.0, 0).is_complete(), "an unavailable network is no failure");
}

#[test]
fn tables_and_page_name_networks_that_the_machine_lacks() {
    let all = result(1.0, 0);
    let text = markdown(&all);
    crate::layout::assert_fits(&text);
    let row = |case: &str| text.lines().find(|line| line.contains(case)).unwrap();
    assert!(row("secret/skysail/16").contains("| not available |"), "{text}");
    assert!(row("flat/skysail/16").contains(" 0/7 |"), "{text}");
    let line = "Not available on this machine: the network secret needs <WireGuard>.";
    assert_eq!(text.matches(line).count(), 1, "{text}");
    assert!(text.contains("| Other [1] "), "{text}");
    let mut figures = 0;
    let page = crate::html::document("x", &section(&all, &mut figures));
    assert_eq!(
        (page.matches("<svg ").count(), figures),
        (12, 6),
        "four percentiles, CPU and memory for two numbers of connections"
    );
    for text in [
        ">P50 of latency</text>",
        ">P90 of latency, µs</text>",
        ">P99 of latency, µs</text>",
        ">P99.9 of latency, µs</text>",
        "Latency from when requests were due, µs: 16 connections",
        "<dt>secret</dt><dd>network between pods: ",
        "bandwidth 10 Mbit/s",
        r#"<rect class="peer0""#,
        r#"<span class="key none part1"></span>paler: CPU time of client and server</li>"#,
        ">published: CPU time of all sidecars</text>",
        ">Other, 1,000 requests/s [1]</text>",
        "published, not measured here",
    ] {
        assert!(page.contains(text), "{text}: {page}");
    }
    assert!(!page.contains(">secret</text>") && page.contains(">flat</text>"), "{page}");
    assert!(page.contains("Not available on this machine: the network secret needs &lt;WireGuard&gt;."));
    crate::html::assert_complete(&page);
}

#[test]
fn a_result_can_be_read_again_and_only_own_cases_are_compared() {
    let original = result(1.0, 0);
    let json = serde_json::to_vec_pretty(&original).unwrap();
    let Some(AnyResult::Networks(again)) = parse(&json).unwrap() else { panic!("another study") };
    assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&original).unwrap());
    let rows = compare(&again, &result(1.5, 0), (5.0, 99.0)).unwrap();
    assert!(rows.iter().all(|row| row.case.starts_with("flat/skysail/")), "{rows:?}");
    let of = rows.iter().find(|row| row.metric == "latency_p50_us").unwrap();
    assert_eq!(of.verdict, Verdict::Worse);
}
