use std::collections::BTreeMap;

use super::{result::Row, *};
use crate::report::Spread;

/// Two rounds of an earlier run, with one failed turn.
fn recorded() -> Comparison {
    let mut comparison: Comparison = serde_json::from_str(include_str!("recorded.json")).unwrap();
    comparison.summarize();
    comparison
}

#[test]
fn peers_alternate_and_unsupported_turns_are_reported_once() {
    let only = [Experiment::Pair, Experiment::Http2];
    let (turns, skipped) = plan(&only, &[Peer::Skysail, Peer::Nginx], 2);
    let short: Vec<_> = turns.iter().map(|turn| (turn.round, turn.setting.experiment, turn.peer)).collect();
    let (skysail, nginx) = (Some(Peer::Skysail), Some(Peer::Nginx));
    let once = |round| {
        let pair = [None, skysail, nginx].map(|peer| (round, Experiment::Pair, peer));
        [&pair[..], &[(round, Experiment::Http2, skysail)]].concat()
    };
    assert_eq!(short, [once(1), once(2)].concat());
    let skipped: Vec<_> = skipped.iter().map(|one| (one.experiment.as_str(), one.peer.as_str())).collect();
    assert_eq!(skipped, [("http2", "nginx")]);
    assert_eq!(plan(&[], &Peer::ALL, 1).0.iter().filter(|turn| turn.peer == skysail).count(), SETTINGS.len());
}

#[test]
fn a_result_round_trips() {
    let recorded: serde_json::Value = serde_json::from_str(include_str!("recorded.json")).unwrap();
    let again: Comparison = serde_json::from_value(recorded.clone()).unwrap();
    assert_eq!(serde_json::to_value(&again).unwrap(), recorded);
}

#[test]
fn ratios_and_derived_figures_are_taken_within_a_round() {
    let comparison = recorded();
    let row = |experiment: &str, peer: &str| {
        let mut rows = comparison.summary.iter();
        rows.find(|row| row.experiment == experiment && row.peer.as_deref() == Some(peer)).unwrap()
    };
    let cpu = |peer: &str, round: u32| {
        let mut runs = comparison.runs.iter();
        let run = runs
            .find(|run| run.experiment == "tcp" && run.peer.as_deref() == Some(peer) && run.round == round);
        run.unwrap().shown.measurement.as_ref().unwrap().parts["server-proxy"].cpu_us_per_request
    };
    let close = |a: f64, b: f64| assert!((a - b).abs() <= 1e-9 * a.abs(), "{a} {b}");
    let ratio = row("tcp", "skysail").metrics["ratio_to_relay"];
    let rounds = [1, 2].map(|round| cpu("skysail", round) / cpu("relay", round));
    close(ratio.median, f64::midpoint(rounds[0], rounds[1]));
    assert_eq!(row("tcp", "relay").metrics["first_to_this"], ratio);
    let gb = row("tcp", "skysail").metrics["gb_per_cpu_second"];
    close(gb.median, f64::midpoint(1e3 / cpu("skysail", 1), 1e3 / cpu("skysail", 2)));
    assert!(!row("tcp", "skysail").metrics.contains_key("latency_p50_us"));
    let memory = &row("memory", "skysail").metrics;
    let each = (memory["rss_1000_kb"].median - memory["rss_kb"].median) * 1.024;
    assert!((memory["bytes_per_connection_1000"].median - each).abs() < 1.0, "{memory:?}");
    let failed = comparison.summary.iter().find(|row| row.failed > 0).unwrap();
    assert_eq!((failed.rounds, failed.failed), (1, 1));
}

#[test]
fn tables_have_only_columns_with_figures() {
    let text = table::tables(&recorded());
    let of = |experiment: &str| {
        let start = text.find(&format!("### {experiment}\n")).unwrap();
        text[start..].split("###").nth(1).unwrap().split("\nFigures: ").next().unwrap()
    };
    assert!(of("pair").contains("added P50") && of("pair").contains("× relay"), "{text}");
    assert!(of("tcp").contains("GB per CPU second") && !of("tcp").contains("P50"), "{text}");
    assert!(of("memory").contains("RSS MB, 10,000 idle") && !of("memory").contains("CPU"), "{text}");
    assert!(text.contains("memory, one cluster: without relay, because the relay holds no"), "{text}");
    for explained in
        ["failed 0/2: 0 of 2 turns failed.", "× relay: this peer's CPU", "skysail / this one: skysail's CPU"]
    {
        assert!(text.contains(explained), "{explained}: {text}");
    }
}

#[test]
fn tables_fit_a_terminal_whatever_was_measured() {
    let mut comparison = recorded();
    comparison.settings.experiments =
        Experiment::ALL.iter().map(|experiment| experiment.name().to_owned()).collect();
    let long = Spread { median: 1_234_567.8, min: 1_000_000.0, max: 7_654_321.0 };
    // Each experiment has all settings, with the figures of any.
    let metrics: BTreeMap<String, Spread> = comparison
        .summary
        .iter()
        .flat_map(|row| row.metrics.keys().cloned())
        .map(|name| (name, long))
        .collect();
    comparison.summary = SETTINGS
        .iter()
        .map(|setting| Row {
            experiment: setting.experiment.name().to_owned(),
            setting: setting.name.to_owned(),
            peer: Some("haproxy".to_owned()),
            rounds: 99,
            failed: 99,
            metrics: metrics.clone(),
        })
        .collect();
    let text = table::tables(&comparison);
    crate::layout::assert_fits(&text);
    for experiment in Experiment::ALL {
        assert!(text.contains(&format!("### {}\n", experiment.name())), "{text}");
    }
}

#[test]
fn the_page_is_self_contained_and_balanced() {
    let page = page::page(&recorded());
    crate::html::assert_complete(&page);
    // pair: CPU; rates: latency and CPU; tcp; memory.
    assert_eq!(page.matches("<svg ").count(), 5);
    assert!(page.contains("the server &lt;ended&gt;"), "errors are shown, and are escaped");
}

#[test]
fn invalid_results_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.json");
    assert!(read(&file).unwrap_err().to_string().contains("cannot read"));
    for text in ["{}", include_str!("recorded.json").replacen("\"format\": 1", "\"format\": 9", 1).as_str()] {
        fs::write(&file, text).unwrap();
        assert!(read(&file).unwrap_err().to_string().contains("is not a result of bench compare"));
    }
}
