use std::collections::BTreeMap;

use super::*;
use crate::{
    airline::{AirlineCost, AirlineMeasurement, AirlineTrial},
    document,
    mesh::MeshPart,
    peers::Peer,
    report::Machine,
    scenario::{
        cases::{CaseReport, CaseResult, CaseRun, CaseSettings, CaseStudy as _, compare, markdown, section},
        diff::Verdict,
        format::SizeName,
        study::{AnyResult, parse},
    },
};

const SMALL: &str = "\
study: airline
name: small
title: Small
question: What?
variants: [none, ingress-only, full]
load: {rate: 100, users: 5, loaded: 30, customers: 20, pause_ms: 10, limit_ms: 50, steps: 3}
peers: [skysail, envoy]
measure: [throughput, latency, cpu, memory]
acceptance:
  failed_percent: 1
  limits:
    - {metric: latency_p99_us, case: full/skysail, at_most: 20000}
sizes:
  default: {rounds: 7, seconds: 2, warmup: 1}
  tiny:
    {rounds: 1, seconds: 1, warmup: 0.2, load: {rate: 9, users: 2, loaded: 4, customers: 4, pause_ms: 0, limit_ms: 99, steps: 1}}
published:
  - {system: Other 1, source: A page, metrics: {users_calls_per_second: 1032}}
";

fn scenario(text: &str) -> Result<AirlineScenario, String> {
    AirlineScenario::of(&document::parse(text, "scenario")?)
}

fn trial(calls: u64, failed: u64) -> AirlineTrial {
    AirlineTrial {
        calls_per_second: calls as f64 / 2.0,
        calls,
        failed,
        started: 20,
        finished: 20,
        skipped: 0,
        latency_us: BTreeMap::from(
            [("p50", 2_000.0), ("p90", 4_000.0), ("p99", 9_000.0)].map(|(n, v)| (n.to_owned(), v)),
        ),
        by_name: BTreeMap::new(),
    }
}

/// Returns a turn with `factor` times the throughput.
fn measurement(peer: Option<Peer>, factor: f64, failed: u64) -> AirlineMeasurement {
    let calls = |calls: f64| trial((calls * factor) as u64, 0);
    let cost = AirlineCost { cpu_us_per_call: 400.0, cpu_us_per_second: 40_000.0, rss_kb: 10_240 };
    let mut parts = BTreeMap::from([(MeshPart::Services, cost)]);
    if peer.is_some() {
        parts.extend([(MeshPart::Sidecars, cost), (MeshPart::Control, cost)]);
    }
    AirlineMeasurement {
        sidecars: if peer.is_some() { 7 } else { 0 },
        ready_seconds: 1.5,
        at_rate: trial(2_000, failed),
        of_users: calls(4_000.0),
        within_limit: calls(3_000.0),
        searched: vec![(1_600.0, false), (1_500.0, true)],
        parts,
    }
}

/// Returns a result with 7 rounds, in which `full` has 80 % of the throughput.
fn result(factor: f64, failed: u64) -> CaseResult<AirlineScenario> {
    let scenario = scenario(SMALL).unwrap();
    let cases = scenario.cases(SizeName::Default, &[Peer::Skysail, Peer::Envoy]);
    let runs = (1..=7).flat_map(|round| {
        cases.iter().map(move |case| {
            let name = AirlineScenario::name(case);
            let own = 1.0 + f64::from(round) / 1_024.0;
            let is_full = name == "full/skysail";
            let measured = measurement(
                case.peer,
                if is_full { 0.8 * own * factor } else { own },
                if is_full { failed } else { 0 },
            );
            CaseRun {
                round,
                case: name.to_owned(),
                measurement: Some(measured),
                error: None,
                unavailable: None,
                busy: None,
            }
        })
    });
    let runs = runs.collect();
    let machine = Machine {
        kernel: "6".to_owned(),
        cpu: "x".to_owned(),
        cpus: 2,
        load: 0.0,
        busy: None,
        network: "a namespace for each pod".to_owned(),
        congestion_control: "reno".to_owned(),
        scheduling: "SCHED_OTHER".to_owned(),
    };
    let settings = CaseSettings { cases, rounds: 7, seconds: 2.0, warmup: 1.0 };
    let report = CaseReport::new((1_795_567_931, false), machine, settings, [].into(), runs);
    CaseResult::new(scenario, SizeName::Default, report)
}

#[test]
fn fields_out_of_bounds_are_refused_with_their_line() {
    for (from, to, error) in [
        ("none, ingress-only", "none, half", "5: variants[1]: unknown variant `half`"),
        ("none, ingress-only", "none, none", "5: variants: must have 1 to 4 values, each once"),
        ("customers: 20", "customers: 4", "6: load.customers: 4 must be from 5 to 30"),
        ("steps: 3", "steps: 0", "6: load.steps: 0 must be from 1 to 20"),
        (
            "skysail, envoy",
            "skysail, nginx",
            "7: peers[1]: nginx takes no configuration from a control plane",
        ),
        (
            "case: full/skysail",
            "case: full",
            "12: acceptance.limits[0].case: must be one of none, ingress-only",
        ),
        ("rate: 9,", "rate: 0,", "16: sizes.tiny.load.rate: 0 must be from 1 to 1000000"),
        ("users_calls_per_second", "tps", "18: published[0].metrics.tps: no such metric"),
    ] {
        let text = SMALL.replacen(from, to, 1);
        assert_ne!(text, SMALL, "{from}");
        let got = scenario(&text).unwrap_err();
        assert!(got.starts_with(error), "{got}\nexpected: {error}");
    }
}

#[test]
fn a_variant_has_a_case_of_each_peer() {
    let cases = scenario(SMALL).unwrap().cases(SizeName::Tiny, &[Peer::Skysail, Peer::Envoy]);
    let names: Vec<&str> = cases.iter().map(AirlineScenario::name).collect();
    assert_eq!(names, ["none", "ingress-only/skysail", "ingress-only/envoy", "full/skysail", "full/envoy"]);
    assert!(cases.iter().all(|case| case.load.rate == 9));
}

#[test]
fn failed_calls_and_limits_are_checked() {
    assert_eq!(result(1.0, 20).violations, [""; 0], "1 % may fail");
    let refused = result(1.0, 21).violations;
    assert_eq!(refused.len(), 7);
    assert_eq!(refused[0], "21 of 2000 calls failed, at most 1 % may fail, in round 1, variant full/skysail");
}

#[test]
fn tables_show_throughput_and_its_share_of_ingress_only() {
    let all = result(1.0, 0);
    let text = markdown(&all);
    crate::layout::assert_fits(&text);
    let (own, others) = text.split_once("### published by others").unwrap();
    assert!(own.contains("### embedded databases") && own.contains("| full/envoy"), "{text}");
    assert!(others.contains("| Other 1 [1]") && others.contains(" 1032 |"), "{others}");
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(joined.contains("same proxy: full/skysail 80 %, full/envoy 100 %."), "{text}");
    let mut figures = 0;
    let page = crate::html::document("x", &section(&all, &mut figures));
    assert_eq!(
        (page.matches("<svg ").count(), figures),
        (7, 4),
        "two throughputs, three percentiles, CPU, memory"
    );
    assert!(page.contains(">Throughput of all users, calls/s</text>"), "{page}");
    assert!(
        page.contains(">Other 1 [1]</text>") && page.contains(r#"class="published0 published""#),
        "{page}"
    );
    assert!(
        page.contains("<dt>full</dt><dd>a gateway and sidecars with mutual TLS and all access policies"),
        "{page}"
    );
    assert!(!page.contains("NaN") && page.contains("skysail bench run small"), "{page}");
}

#[test]
fn less_throughput_is_worse() {
    let original = result(1.0, 0);
    let json = serde_json::to_vec_pretty(&original).unwrap();
    let Some(AnyResult::Airline(again)) = parse(&json).unwrap() else { panic!("another study") };
    assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&original).unwrap());
    for (factor, verdict) in [(0.8, Verdict::Worse), (1.25, Verdict::Better)] {
        let rows = compare(&again, &result(factor, 0), (5.0, 99.0)).unwrap();
        let is_throughput = |metric: &str| metric == "limit_calls_per_second";
        let of = rows.iter().find(|row| row.case == "full/skysail" && is_throughput(row.metric)).unwrap();
        assert_eq!(of.verdict, verdict);
        assert!(rows.iter().all(|row| row.case != "none"), "{rows:?}");
    }
}
