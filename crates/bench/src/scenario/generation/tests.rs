use super::{format::GenerationMeasure, *};
use crate::{
    document,
    generation::{GenerationMeasurement, Phase, PhaseCost, ResourceCount},
    report::Machine,
    scenario::{
        cases::{CaseReport, CaseResult, CaseRun, CaseSettings, compare, is_accepted, markdown, section},
        diff::Verdict,
        format::SizeName,
        site,
        study::{AnyResult, parse},
    },
};

const SMALL: &str = "\
study: generation
name: small
title: Small <title>
question: What?
inputs:
  - {template: http, services: 100}
  - {name: few, template: gateways, services: 2}
measure: [cpu, bytes]
acceptance:
  limits:
    - {metric: compile_cpu_us, input: http, at_most: 250}
sizes:
  default: {rounds: 7, seconds: 0.3, warmup: 0.1}
  tiny: {rounds: 1, seconds: 0, warmup: 0, services: 3}
";

fn scenario(text: &str) -> Result<GenerationScenario, String> {
    GenerationScenario::of(&document::parse(text, "scenario")?)
}

fn measurement(cpu: f64, bytes: usize) -> GenerationMeasurement {
    let phases = [Phase::Parse, Phase::Index, Phase::Services, Phase::Routes, Phase::Names, Phase::Own];
    let cost = PhaseCost { cpu_us: cpu, time_us: cpu + 1.0 };
    let count = ResourceCount { number: 3, bytes };
    GenerationMeasurement {
        objects: 101,
        input_bytes: 1_000,
        repetitions: 9,
        phases: phases.map(|phase| (phase, cost)).into(),
        resources: ["cds", "lds"].map(|kind| (kind.to_owned(), count)).into(),
    }
}

/// Returns a result with 7 rounds. CPU time and bytes of the input `http` are multiplied by the factors.
fn result(cpu: f64, bytes: usize) -> CaseResult<GenerationScenario> {
    let scenario = scenario(SMALL).unwrap();
    let inputs = scenario.inputs(SizeName::Default);
    let run = |round: u32, input: &str| {
        let own = 60.0 + f64::from(round);
        let measured = match input {
            "http" => measurement(own * cpu, 1_000 * bytes),
            _ => measurement(own, 1_000),
        };
        CaseRun {
            round,
            case: input.to_owned(),
            measurement: Some(measured),
            error: None,
            unavailable: None,
            busy: None,
        }
    };
    let runs = (1..=7).flat_map(|round| ["http", "few"].map(|input| run(round, input))).collect();
    let machine = Machine {
        kernel: "6".to_owned(),
        cpu: "x".to_owned(),
        cpus: 2,
        load: 0.0,
        busy: None,
        network: "not used".to_owned(),
        congestion_control: "reno".to_owned(),
        scheduling: "SCHED_OTHER".to_owned(),
    };
    let settings = CaseSettings { cases: inputs, rounds: 7, seconds: 0.3, warmup: 0.1 };
    let report = CaseReport::new((1_795_567_931, false), machine, settings, [].into(), runs);
    CaseResult::new(scenario, SizeName::Default, report)
}

#[test]
fn fields_out_of_bounds_are_refused_with_their_line() {
    for (from, to, error) in [
        (
            "study: generation",
            "study: other",
            "1: study: unknown variant `other`, expected one of `traffic`, `gen",
        ),
        ("measure: [cpu, bytes]", "peers: [envoy]", "8: peers: unknown field `peers`"),
        ("template: http", "template: waypoint", "6: inputs[0].template: unknown variant `waypoint`"),
        ("http, services: 100", "http", "6: inputs[0].services: 0 must be from 1 to 10000"),
        (
            "http, services: 100",
            "strict, services: 1",
            "6: inputs[0].services: has no effect on the template strict",
        ),
        (
            "services: 100",
            "services: 1, instances: 1",
            "6: inputs[0].instances: has no effect on the template http",
        ),
        (
            "http, services: 100",
            "endpoints, services: 1000, instances: 1001",
            "6: inputs[0].instances: services × instances is 1001000; at most 1000000 is allowed",
        ),
        ("name: few", "name: http", "7: inputs[1].name: http is the name of an earlier input"),
        ("name: few", "name: Few", "7: inputs[1].name: must be 1 to 64 lower-case"),
        ("[cpu, bytes]", "[cpu, cpu]", "8: measure: must have 1 to 4 values, each once"),
        ("compile_cpu_us", "cpu", "11: acceptance.limits[0].metric: no such metric; use parse_cpu_us"),
        ("input: http", "input: tcp", "11: acceptance.limits[0].input: must be one of http, few, else"),
        ("rounds: 7", "rounds: 31", "13: sizes.default.rounds: 31 must be from 1 to 30"),
        ("services: 3}", "services: 0}", "14: sizes.tiny.services: 0 must be from 1 to 10000"),
    ] {
        let text = SMALL.replacen(from, to, 1);
        assert_ne!(text, SMALL, "{from}");
        let got = scenario(&text).unwrap_err();
        assert!(got.starts_with(error), "{got}\nexpected: {error}");
    }
}

#[test]
fn the_tiny_size_limits_the_inputs() {
    let scenario = scenario(SMALL).unwrap();
    let numbers = |size| scenario.inputs(size).iter().map(|input| input.services).collect::<Vec<_>>();
    assert_eq!(numbers(SizeName::Default), [100, 2]);
    assert_eq!(numbers(SizeName::Tiny), [3, 2]);
}

#[test]
fn a_result_can_be_read_again() {
    let original = result(1.0, 1);
    let json = serde_json::to_vec_pretty(&original).unwrap();
    let Some(AnyResult::Generation(again)) = parse(&json).unwrap() else { panic!("another study") };
    assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&original).unwrap());
    let later = String::from_utf8(json).unwrap().replacen("\"format\": 1", "\"format\": 2", 1);
    assert!(parse(later.as_bytes()).err().unwrap().to_string().contains("this program reads format 1"));
}

#[test]
fn the_sums_of_phases_and_resources_have_limits() {
    let all = result(1.0, 1);
    let metrics = &all.report.summary[0].metrics;
    assert_eq!((metrics["own_cpu_us"].median, metrics["compile_cpu_us"].median), (64.0, 256.0));
    assert_eq!((metrics["resources"].median, metrics["bytes"].median), (6.0, 2_000.0));
    assert_eq!(all.violations, ["compile_cpu_us is 256.0 for input http; at most 250 is accepted"]);
    assert_eq!(result(0.5, 1).violations, [""; 0]);
}

#[test]
fn tables_have_a_section_for_each_kind_of_proxy() {
    let text = markdown(&result(1.0, 1));
    crate::layout::assert_fits(&text);
    let (sidecar, gateway) = text.split_once("### gateway").unwrap();
    assert!(
        sidecar.contains("### sidecar") && sidecar.contains("| http ") && !sidecar.contains("| few "),
        "{text}"
    );
    assert!(gateway.contains("| few ") && gateway.contains("64 (61–67)"), "{text}");
    assert!(gateway.contains("Not accepted: compile_cpu_us"), "{text}");
    for title in GenerationMeasure::Cpu.figures().iter().map(|figure| figure.title) {
        assert!(sidecar.contains(title), "{title}");
    }
}

#[test]
fn the_page_is_self_contained_and_balanced() {
    let mut all = result(1.0, 1);
    (all.report.runs[0].measurement, all.report.runs[0].error) = (None, Some("no <listeners>".to_owned()));
    let mut figures = 0;
    let page = crate::html::document("x", &section(&all, &mut figures));
    assert_eq!((page.matches("<svg ").count(), figures), (4, 4), "two groups for two kinds of proxies");
    crate::html::assert_complete(&page);
    for text in [
        "Small &lt;title&gt;",
        "Round 1, http: no &lt;listeners&gt;",
        "skysail bench run small",
        "CPU time of each phase, µs",
        r#"<span class="key step0"></span>parse</li>"#,
        "<dt>http</dt><dd>services with one HTTP port",
    ] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn differences_are_found_for_each_input() {
    let verdict = |a: &CaseResult<GenerationScenario>,
                   b: &CaseResult<GenerationScenario>,
                   input: &str,
                   metric: &str| {
        let rows = compare(a, b, (5.0, 99.0)).unwrap();
        rows.iter().find(|row| row.case == input && row.metric == metric).map(|row| row.verdict)
    };
    let (before, slower, larger) = (result(1.0, 1), result(1.5, 1), result(1.0, 2));
    assert_eq!(verdict(&before, &before, "http", "own_cpu_us"), Some(Verdict::Same));
    assert_eq!(verdict(&before, &slower, "http", "own_cpu_us"), Some(Verdict::Worse));
    assert_eq!(verdict(&slower, &before, "http", "own_cpu_us"), Some(Verdict::Better));
    assert_eq!(verdict(&before, &slower, "few", "own_cpu_us"), Some(Verdict::Same));
    // A deterministic figure has the same value in all rounds.
    assert_eq!(verdict(&before, &larger, "http", "bytes"), Some(Verdict::Worse));
    assert_eq!(verdict(&before, &larger, "http", "eds_bytes"), None, "no result has it");

    let mut lacking = result(1.0, 1);
    lacking.report.runs.retain(|run| run.case != "http");
    assert_eq!(verdict(&before, &lacking, "http", "compile_cpu_us"), Some(Verdict::OnlyInA));
    let accepted = |a: &CaseResult<GenerationScenario>, b: &CaseResult<GenerationScenario>| {
        is_accepted(&compare(a, b, (5.0, 99.0)).unwrap())
    };
    assert!(accepted(&before, &before) && !accepted(&before, &slower) && !accepted(&before, &lacking));
    lacking.report.settings.cases.pop();
    assert!(compare(&before, &lacking, (5.0, 99.0)).unwrap_err().to_string().contains("different scenarios"));
}

#[test]
fn a_site_has_the_history_of_a_scenario_and_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let (results, site) = (folder.path().join("results"), folder.path().join("site"));
    let write = |name: &str, started: u64, result: CaseResult<GenerationScenario>| {
        let mut json = serde_json::to_value(&result).unwrap();
        json["started"] = started.into();
        json["commit"] = format!("{name}0123456789").into();
        std::fs::create_dir_all(results.join(name)).unwrap();
        std::fs::write(results.join(name).join("small.json"), json.to_string()).unwrap();
    };
    write("later", 1_795_600_000, result(1.5, 1));
    write("first", 1_795_500_000, result(1.0, 1));
    std::fs::create_dir(&site).unwrap();
    site::write(std::slice::from_ref(&results), &site).unwrap();

    let page = |name: &str| std::fs::read_to_string(site.join(name)).unwrap();
    let index = page("index.html");
    assert!(index.contains(r#"<a href="small.html">Small &lt;title&gt;</a>"#), "{index}");
    assert!(index.contains("commit later0123456789. Machine: x (2 CPUs)"), "{index}");
    let small = page("small.html");
    let row = "<td>compile CPU µs</td><td>× 1.50</td><td>256</td><td>384</td></tr>";
    assert!(small.contains(&format!("<tr><td>sidecar, http</td>{row}")), "{small}");
    assert!(small.contains(">first012 11-24</text>") && small.contains(">later012 11-25</text>"), "{small}");
    assert!(small.contains(">CPU time to compile all resources</text>"), "{small}");
    for (file, folder) in
        [("data/1795600000-later/small.json", "later"), ("data/1795500000-first/small.json", "first")]
    {
        assert!(small.contains(&format!(r#"<a href="{file}">"#)), "{small}");
        assert_eq!(page(file), std::fs::read_to_string(results.join(folder).join("small.json")).unwrap());
    }
    let none = site::write(&[site.join("data/none")], &site).unwrap_err();
    assert!(none.to_string().contains("cannot read"), "{none}");
    let empty = tempfile::tempdir().unwrap();
    let none = site::write(&[empty.path().to_owned()], &site).unwrap_err();
    assert!(none.to_string().contains("no folder has a result"), "{none}");
}
