use super::{format::CommandMeasure, run::figures, *};
use crate::{
    document,
    scenario::{cases::CaseStudy as _, format::SizeName},
};

const SMALL: &str = "\
study: control
name: small
title: Small
question: What?
cases:
  - {name: few, arguments: --sidecars 100 --changes endpoint}
  - {name: churn, arguments: --sidecars 100 --churn 50}
measure: [connect, churn]
acceptance:
  limits:
    - {metric: resident_mb, case: few, at_most: 200}
sizes:
  default: {rounds: 3}
  tiny: {rounds: 1, arguments: --sidecars 2, cases: [churn]}
";

fn scenario(text: &str) -> Result<CommandScenario, String> {
    CommandScenario::of(&document::parse(text, "scenario")?)
}

#[test]
fn arguments_are_those_of_the_benchmark() {
    for (from, to, error) in [
        ("--changes endpoint", "--ttl 5", "6: cases[0].arguments: unexpected argument '--ttl' found"),
        ("--changes endpoint", "--hostile", "6: cases[0].arguments: must not have --hostile"),
        ("--changes endpoint", "--output json", "6: cases[0].arguments: must not have --hostile, --skysail"),
        ("--churn 50", "--churn 150", "7: cases[1].arguments: invalid value '150' for '--churn"),
        ("study: control", "study: dns", "6: cases[0].arguments: unexpected argument '--changes' found"),
        ("name: churn", "name: few", "5: cases: must have 1 to 32 values, each once"),
        ("case: few", "case: many", "11: acceptance.limits[0].case: must be one of few, churn, else"),
        (
            "[connect, churn]",
            "[connect, queries]",
            "8: measure[1]: the benchmark does not measure it; use connect",
        ),
        ("[connect, churn]", "[cpu]", "8: measure[0]: unknown variant `cpu`"),
        ("arguments: --sidecars 2,", "arguments: 2,", "14: sizes.tiny.arguments: "),
        ("cases: [churn]", "cases: [none]", "14: sizes.tiny.cases: must be some of few, churn"),
    ] {
        let text = SMALL.replacen(from, to, 1);
        assert_ne!(text, SMALL, "{from}");
        let got = scenario(&text).unwrap_err();
        assert!(got.starts_with(error), "{got}\nexpected: {error}");
    }
    let tiny = scenario(SMALL).unwrap().cases(SizeName::Tiny);
    let tiny: Vec<(&str, &str)> =
        tiny.iter().map(|case| (CommandScenario::name(case), case.arguments.as_str())).collect();
    assert_eq!(tiny, [("churn", "--sidecars 2 --churn 50")]);
}

#[test]
fn a_search_is_checked_and_limited_by_the_size() {
    let search = "search: {from: 50, to: 800, steps: 2, limits: {peak_mb: 100}}";
    let text = SMALL.replacen("--changes endpoint}", &format!("--changes endpoint, {search}}}"), 1);
    let text = text.replacen("[connect, churn]", "[connect, capacity]", 1);
    let tiny = text.replacen("cases: [churn]", "cases: [few], search_to: 8", 1);
    let cases = scenario(&tiny).unwrap().cases(SizeName::Tiny);
    let shown = cases[0].search.as_ref().map(|search| search.text());
    assert_eq!(shown.as_deref(), Some("from 4 to 8, within peak_mb 100"));
    for (from, to, error) in [
        ("from: 50", "from: 900", "6: cases[0].search.from: 900 must be from 1 to 800"),
        ("peak_mb: 100", "mb: 1", "6: cases[0].search.limits.mb: no such metric"),
        ("{peak_mb: 100}", "{}", "6: cases[0].search.limits: must have a limit"),
        ("steps: 2", "steps: 11", "6: cases[0].search.steps: 11 must be from 0 to 10"),
    ] {
        let got = scenario(&text.replacen(from, to, 1)).unwrap_err();
        assert!(got.starts_with(error), "{got}\nexpected: {error}");
    }
}

#[test]
fn results_of_both_benchmarks_give_figures() {
    let control = serde_json::json!({
        "idle_mb": 20.0, "left_mb": 30.0,
        "connect": {"seconds": 2.0, "cpu_ms_each": 1.5, "ms": {"p99": 90.0}, "resident_mb": 100.0, "peak_mb": 110.0},
        "changes": [{"change": "endpoint", "last_ms": 40.0, "cpu_ms": 50.0}],
        "churn": {"per_second": 500.0, "seconds": 10.0, "cpu_ms_each": 1.0, "ms": {"p99": 80.0}},
    });
    let control = figures(&control);
    assert_eq!((control["churn_interval_ms"], control["endpoint_last_ms"]), (2.0, 40.0));
    let dns = figures(&serde_json::json!({"skysail": {"per_second": 6.5}, "envoys_per_second": 3_000.0}));
    assert_eq!((dns.len(), dns["queries_envoys_per_second"]), (2, 3_000.0));
    // Each figure of the tables is one of these.
    let known = [control, dns].map(|figures| figures.into_keys().collect::<Vec<_>>()).concat();
    for group in
        [CommandMeasure::Connect, CommandMeasure::Memory, CommandMeasure::Churn, CommandMeasure::Queries]
    {
        for figure in CommandScenario::figures(group) {
            assert!(known.iter().any(|name| name == figure.metric), "{}", figure.metric);
        }
    }
}
