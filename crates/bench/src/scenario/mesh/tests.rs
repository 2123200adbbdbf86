use std::collections::BTreeMap;

use super::*;
use crate::{
    document,
    mesh::{MeshMeasurement, MeshPart, PartCost},
    peers::Peer,
    report::Machine,
    scenario::{
        CPU_PRICE,
        cases::{CaseReport, CaseResult, CaseRun, CaseSettings, CaseStudy as _, compare, markdown, section},
        diff::Verdict,
        format::SizeName,
        study::{AnyResult, parse},
    },
};

const SMALL: &str = "\
study: mesh
name: small
title: Small <title>
question: What?
meshes:
  - {name: tree, graph: tree --levels 2, rate: 100, connections: 8}
  - {name: strict, graph: star, policies: restricted, rate: 50, connections: 4}
peers: [skysail, envoy]
measure: [latency, cpu, memory, start]
acceptance:
  failed_percent: 1
  limits:
    - {metric: latency_p99_us, case: tree/skysail, at_most: 2000}
sizes:
  default: {rounds: 7, seconds: 10, warmup: 2}
  tiny: {rounds: 1, seconds: 1, warmup: 0.2, rate: 70, graph: star --services 2}
published:
  - {system: Other 1, source: A page, sidecars: 2000, rate: 70000, metrics: {rss_control_kb: 2048}}
  - {system: Other 2, source: A page, sidecars: 2000, rate: 70000, metrics: {rss_control_kb: 1024}}
  - {system: Third, source: A page, metrics: {cpu_sidecars_us_per_request: 400}}
";

fn scenario(text: &str) -> Result<MeshScenario, String> {
    MeshScenario::of(&document::parse(text, "scenario")?)
}

/// Returns a turn with 1,000 requests of the client and 4,000 between pods.
fn measurement(peer: Option<Peer>, factor: f64, failed: u64) -> MeshMeasurement {
    let cost = |cpu_us: f64, rss_kb: u64| PartCost {
        cpu_us_per_second: cpu_us * factor / 10.0,
        idle_cpu_us_per_second: 5_000.0,
        rss_kb,
    };
    let mut parts = BTreeMap::from([(MeshPart::Services, cost(80_000.0, 4_096))]);
    if peer.is_some() {
        parts.insert(MeshPart::Sidecars, cost(400_000.0, 10_240));
        parts.insert(MeshPart::Control, cost(100_000.0, 20_480));
    }
    MeshMeasurement {
        pods: 5,
        sidecars: if peer.is_some() { 5 } else { 0 },
        ready_seconds: 1.5,
        seconds: 10.0,
        requests: 1_000,
        failed,
        errors: if failed > 0 { [("503".to_owned(), failed)].into() } else { BTreeMap::new() },
        requests_in_mesh: 4_000.0,
        latency_us: [("p50", 500.0), ("p90", 900.0), ("p99", 1_900.0), ("p99_9", 2_500.0)]
            .map(|(name, value)| (name.to_owned(), value * factor))
            .into(),
        parts,
    }
}

/// Returns a result with 7 rounds. Costs and latencies of the case are multiplied by the factor.
fn result(of: &str, factor: f64, failed: u64) -> CaseResult<MeshScenario> {
    let scenario = scenario(SMALL).unwrap();
    let cases = scenario.cases(SizeName::Default, &[Peer::Skysail, Peer::Envoy]);
    let runs = (1..=7).flat_map(|round| {
        cases.iter().map(move |case| {
            let name = MeshScenario::name(case);
            let own = 1.0 + f64::from(round) / 1_024.0;
            let changed = name == of;
            let measured = measurement(
                case.peer,
                if changed { own * factor } else { own },
                if changed { failed } else { 0 },
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
    let settings = CaseSettings { cases, rounds: 7, seconds: 10.0, warmup: 2.0 };
    let report = CaseReport::new((1_795_567_931, false), machine, settings, [].into(), runs);
    CaseResult::new(scenario, SizeName::Default, report)
}

#[test]
fn fields_out_of_bounds_are_refused_with_their_line() {
    for (from, to, error) in [
        ("graph: star,", "graph: ring,", "7: meshes[1].graph: unrecognized subcommand 'ring'"),
        ("--levels 2", "--levels 99", "6: meshes[0].graph: "),
        ("graph: star,", "graph: none.yaml,", "7: meshes[1].graph: cannot read the service graph none.yaml"),
        ("name: strict", "name: tree", "5: meshes: must have 1 to 16 values, each once"),
        ("policies: restricted", "policies: open", "7: meshes[1].policies: unknown variant `open`"),
        ("rate: 50", "rate: 0", "7: meshes[1].rate: 0 must be from 1 to 100000"),
        ("connections: 4", "connections: 9000", "7: meshes[1].connections: 9000 must be from 1 to 8192"),
        ("rate: 70,", "rate: 70, only: [other],", "16: sizes.tiny.only[0]: must be one of tree, strict"),
        (
            "rate: 70,",
            "rate: 70, meshes: {other: {rate: 5}},",
            "16: sizes.tiny.meshes.other: must be one of tree, strict",
        ),
        (
            "skysail, envoy",
            "skysail, nginx",
            "8: peers[1]: nginx takes no configuration from a control plane",
        ),
        ("case: tree/skysail", "case: tree", "13: acceptance.limits[0].case: must be one of tree/none, "),
        ("latency_p99_us", "p99", "13: acceptance.limits[0].metric: no such metric; use latency_p50_us"),
        ("star --services 2}", "x.json}", "16: sizes.tiny.graph: unrecognized subcommand 'x.json'"),
        ("rss_control_kb: 2048", "mb: 2", "18: published[0].metrics.mb: no such metric"),
        (
            "connections: 4}",
            "connections: 4, phases: [{name: A}]}",
            "7: meshes[1].phases[0].name: must be 1 to 64",
        ),
        (
            "connections: 4}",
            "connections: 4, phases: [{name: a, changes: [{service: svc-10, set: {down: true}}]}]}",
            "7: meshes[1].phases[0].changes[0].service: the graph star has no service svc-10; its services: svc-0, svc-0-0, svc-0-1, ",
        ),
        (
            "connections: 4}",
            "connections: 4, phases: [{name: a, changes: [{service: svc-0-2, set: {down: true}}]}]}",
            "7: meshes[1].phases[0].changes[0].service: the graph star --services 2 has no service svc-0-2; its services: svc-0, svc-0-0;",
        ),
        (
            "connections: 4}",
            "connections: 4, phases: [{name: a, changes: [{service: svc-0-0, set: {delay: 5}}]}]}",
            "7: meshes[1].phases[0].changes[0].set.delay: invalid type: integer `5`",
        ),
    ] {
        let text = SMALL.replacen(from, to, 1);
        assert_ne!(text, SMALL, "{from}");
        let got = scenario(&text).unwrap_err();
        assert!(got.starts_with(error), "{got}\nexpected: {error}");
    }
}

#[test]
fn a_mesh_has_a_case_without_sidecars_and_one_of_each_peer() {
    let scenario = scenario(SMALL).unwrap();
    let cases = scenario.cases(SizeName::Tiny, &[Peer::Skysail]);
    let names: Vec<&str> = cases.iter().map(MeshScenario::name).collect();
    assert_eq!(names, ["tree/none", "tree/skysail", "strict/none", "strict/skysail"]);
    let of_size = |case: &format::MeshCase| (case.mesh.graph.clone(), case.mesh.rate);
    let expected = [70, 70, 50, 50].map(|rate| ("star --services 2".to_owned(), rate));
    assert_eq!(cases.iter().map(of_size).collect::<Vec<_>>(), expected);
    let refused = |peer: Peer, program: &str| {
        scenario.check_peers(&[(peer, program.into())]).map_err(|error| error.to_string())
    };
    assert_eq!(refused(Peer::Skysail, "/bin/skysail"), Ok(()));
    assert!(refused(Peer::Skysail, "/bin/skysail-proxy").unwrap_err().contains("needs the program skysail"));
    assert!(refused(Peer::Haproxy, "/bin/haproxy").unwrap_err().contains("small: --peers: haproxy takes no"));
}

const PHASES: &str = "connections: 4, phases: [{name: before}, {name: dies, failed_percent: 40, changes: [{service: svc-0-0, \
                      replicas: 1, set: {down: true}}]}, {name: twice, rate_percent: 200}]}";

#[test]
fn the_phases_of_a_mesh_are_cases_in_their_order() {
    let scenario = scenario(&SMALL.replacen("connections: 4}", PHASES, 1)).unwrap();
    let cases = scenario.cases(SizeName::Tiny, &[Peer::Skysail]);
    let names: Vec<&str> = cases.iter().map(MeshScenario::name).collect();
    let phases = ["before", "dies", "twice"];
    let of = |peer: &str| phases.map(|phase| format!("strict/{peer}/{phase}"));
    assert_eq!(names[..2], ["tree/none", "tree/skysail"]);
    assert_eq!(names[2..], [of("none"), of("skysail")].concat());
    let measured = |case: &format::MeshCase| phases::PhaseInput::measured(case.phase());
    let rates: Vec<f64> = cases.iter().map(|case| measured(case).rate_percent).collect();
    assert_eq!(rates, [100.0, 100.0, 100.0, 100.0, 200.0, 100.0, 100.0, 200.0]);
    let changes: Vec<usize> = cases.iter().map(|case| measured(case).changes.len()).collect();
    assert_eq!(changes, [0, 0, 0, 1, 0, 0, 1, 0]);

    let failed = measurement(Some(Peer::Skysail), 1.0, 400);
    assert_eq!(scenario.violation("strict/skysail/dies", &failed), None);
    let why = "400 of 1000 requests failed, at most 1 % may fail,";
    for case in ["strict/skysail/before", "tree/skysail"] {
        assert_eq!(scenario.violation(case, &failed).as_deref(), Some(why));
    }
    let written = serde_json::to_value(&cases).unwrap();
    assert_eq!(serde_json::from_value::<Vec<format::MeshCase>>(written).unwrap(), cases);
}

#[test]
fn failed_requests_have_their_causes() {
    let mut measured = measurement(None, 1.0, 100);
    measured.errors = [("connect", 40), ("closed", 5), ("reset", 10), ("503", 30), ("418", 15)]
        .map(|(cause, count)| (cause.to_owned(), count))
        .into();
    let metrics = MeshScenario::metrics(&measured);
    let of = |name: &str| metrics[&format!("errors_{name}_percent")];
    let named = ["connect", "closed", "timeout", "unsent", "500", "503", "504", "other"].map(of);
    assert_eq!(named, [4.0, 1.5, 0.0, 0.0, 0.0, 3.0, 0.0, 1.5]);
    assert_eq!(metrics["failed_percent"], 10.0);
}

#[test]
fn figures_are_those_of_a_request_between_pods() {
    let metrics = MeshScenario::metrics(&measurement(Some(Peer::Skysail), 1.0, 0));
    let of = |name: &str| metrics.get(name).copied();
    assert_eq!(of("cpu_sidecars_us_per_request"), Some(100.0));
    assert_eq!(of("cpu_services_us_per_request"), Some(20.0));
    assert_eq!(of("cost_month"), Some(100.0 * CPU_PRICE));
    assert_eq!(of("cpu_control_percent"), Some(1.0));
    assert_eq!(of("cpu_idle_sidecar_us_per_second"), Some(1_000.0), "5 ms for 5 sidecars");
    assert_eq!(of("rss_sidecar_kb"), Some(2_048.0));
    assert_eq!(of("latency_p99_us"), Some(1_900.0));
    assert_eq!(of("latency_p99_9_us"), None, "1,000 requests do not support it");
    let plain = MeshScenario::metrics(&measurement(None, 1.0, 0));
    assert!(!plain.contains_key("cpu_sidecars_us_per_request"), "{plain:?}");
}

#[test]
fn limits_and_failed_requests_are_checked() {
    assert_eq!(result("", 1.0, 0).violations, [""; 0]);
    assert_eq!(result("tree/skysail", 1.0, 10).violations, [""; 0], "1 % may fail");
    let slow = result("tree/skysail", 2.0, 0).violations;
    assert_eq!(slow, ["latency_p99_us is 3814.8 for mesh tree/skysail; at most 2000 is accepted"]);
    let failed = result("tree/envoy", 1.0, 11).violations;
    assert_eq!(failed.len(), 7);
    let expected = "11 of 1000 requests failed, at most 1 % may fail, in round 1, mesh tree/envoy";
    assert_eq!(failed[0], expected);
}

#[test]
fn tables_and_page_show_meshes_and_what_others_published() {
    let all = result("", 1.0, 0);
    let text = markdown(&all);
    crate::layout::assert_fits(&text);
    let (own, others) = text.split_once("### published by others").unwrap();
    assert!(own.contains("### tree") && own.contains("### strict") && own.contains("| tree/envoy"), "{text}");
    assert!(others.contains("| Other 2 [2]") && others.contains(" 1.0 |"), "{others}");
    assert!(!others.contains("P50 ms"), "{others}");
    let scale =
        "Scale of [1], [2]: 2000 sidecars, 70000 requests/s. Scale here: at most 5 sidecars, 1/400 of";
    assert!(others.contains(scale), "{others}");
    let mut figures = 0;
    let page = crate::html::document("x", &section(&all, &mut figures));
    assert_eq!(
        (page.matches("<svg ").count(), figures),
        (16, 8),
        "eight plots in four groups for two meshes"
    );
    for text in [
        r#"<rect class="none""#,
        r#"<rect class="peer0""#,
        r#"<rect class="peer1""#,
        r#"<span class="key peer0"></span>skysail</li>"#,
        r#"<span class="key peer1"></span>envoy</li>"#,
        ">Time until the mesh is ready, s</text>",
        ">P99 of latency, ms</text>",
        "<dt>tree</dt><dd>mesh: ",
        r#"<circle class="published"#,
        ">Other 2, 2,000 sidecars, 70,000 requests/s [2]</text>",
    ] {
        assert!(page.contains(text), "{text}: {page}");
    }
    crate::html::assert_complete(&page);
    assert!(page.contains("Small &lt;title&gt;") && page.contains("skysail bench run small"), "{page}");
}

#[test]
fn a_result_can_be_read_again_and_only_own_cases_are_compared() {
    let original = result("", 1.0, 0);
    let json = serde_json::to_vec_pretty(&original).unwrap();
    let Some(AnyResult::Mesh(again)) = parse(&json).unwrap() else { panic!("another study") };
    assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&original).unwrap());

    let rows = compare(&again, &result("tree/skysail", 1.5, 0), (5.0, 99.0)).unwrap();
    assert!(rows.iter().all(|row| row.case.ends_with("/skysail")), "{rows:?}");
    let of = |case: &str| rows.iter().find(|row| row.case == case && row.metric == "latency_p50_us").unwrap();
    assert_eq!(of("tree/skysail").verdict, Verdict::Worse);
    assert_eq!(of("strict/skysail").verdict, Verdict::Same);
}

#[test]
fn telemetry_costs_the_difference_to_the_same_mesh_without_it() {
    let text = SMALL.replacen(
        "  - {name: strict,",
        "  - {name: plain, graph: tree --levels 2, telemetry: none, rate: 100, connections: 8}\n  - {name: strict,",
        1,
    );
    let scenario = scenario(&text).unwrap();
    let cases = scenario.cases(SizeName::Default, &[Peer::Skysail]);
    let names: Vec<&str> = cases.iter().map(MeshScenario::name).collect();
    assert_eq!(names, ["tree/none", "tree/skysail", "plain/skysail", "strict/none", "strict/skysail"]);
    let references: Vec<_> = cases.iter().map(|case| MeshScenario::reference(case, &cases)).collect();
    assert_eq!(references, [None, Some("plain/skysail"), None, None, None]);
    let [with, without] = [1.5, 1.0].map(|factor| measurement(Some(Peer::Skysail), factor, 0));
    // 60,000 and 40,000 µs/s in 10 s with 4,000 requests.
    let expected = BTreeMap::from([("cpu_telemetry_us_per_request".to_owned(), 50.0)]);
    assert_eq!(MeshScenario::relative(&with, &without), expected);
    assert!(MeshScenario::relative(&measurement(None, 1.0, 0), &without).is_empty());
}
