use super::*;
use crate::{report::LatencyRun, scenario::tests::result};

#[test]
fn a_verdict_needs_five_rounds_unless_fewer_are_accepted() {
    let few = |factor: f64| {
        let mut few = result(|peer| if peer == Some(Peer::Skysail) { factor } else { 1.0 });
        few.report.runs.retain(|run| run.round < 5);
        few
    };
    let verdicts = |a: &ScenarioResult, b: &ScenarioResult, bounds: DiffBounds| -> Vec<Verdict> {
        let rows = compare(a, b, None, bounds).unwrap();
        let own = rows
            .iter()
            .filter(|row| row.series.peer == Some(Peer::Skysail) && row.metric.starts_with("latency_p"));
        own.map(|row| row.verdict).collect()
    };
    let usual = DiffBounds::from((5.0, 99.0));
    assert_eq!(verdicts(&few(1.0), &few(1.3), usual), [Verdict::TooFewRounds; 4]);
    assert_eq!(verdicts(&result(|_| 1.0), &few(1.3), usual), [Verdict::TooFewRounds; 4], "of one result");
    assert_eq!(verdicts(&few(1.0), &few(1.0), usual), [Verdict::Same; 4], "equal values need no more rounds");
    let accepted = DiffBounds { rounds: 4, ..usual };
    assert_eq!(verdicts(&few(1.0), &few(1.3), accepted), [Verdict::Worse; 4]);
    let rows = compare(&few(1.0), &few(1.3), None, usual).unwrap();
    assert!(is_accepted(&rows), "without a verdict nothing is worse");
    assert_eq!(serde_json::to_value(Verdict::TooFewRounds).unwrap(), "too-few-rounds");
}

#[test]
fn a_failed_turn_takes_the_verdict_from_its_own_number_of_connections() {
    let mut later = result(|peer| if peer == Some(Peer::Skysail) { 1.3 } else { 1.0 });
    let all = later.report.settings.connections.clone();
    let is_of = |run: &LatencyRun| run.series.peer == Some(Peer::Skysail) && run.connections == all[0];
    let failed = later.report.runs.iter_mut().filter(|run| run.round > 4 && is_of(run));
    failed.for_each(|run| run.measurement = None);
    let rows = compare(&result(|_| 1.0), &later, None, DiffBounds::from((5.0, 99.0))).unwrap();
    let of = |row: &&DiffRow| {
        row.series.peer == Some(Peer::Skysail) && row.metric == "cpu_server_proxy_us_per_request"
    };
    let found: Vec<_> = rows.iter().filter(of).map(|row| (row.verdict, row.connections.clone())).collect();
    assert_eq!(found, [(Verdict::Worse, all[1..].to_vec()), (Verdict::TooFewRounds, vec![all[0]])]);
    assert!(!is_accepted(&rows), "the other numbers of connections are judged");
}
