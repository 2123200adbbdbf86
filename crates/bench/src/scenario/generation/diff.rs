//! Two results, figure by figure. An input is one stratum of the test: inputs are compared apart.

use std::collections::BTreeMap;

use anyhow::ensure;
use serde::Serialize;

use super::result::GenerationResult;
use crate::{
    layout::{self, TextTable},
    report::cell,
    scenario::{
        diff::{DiffArgs, FigureChange, Verdict, explain, judge},
        rank::Stratum,
    },
};

/// Comparison of a figure of an input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct InputDiff {
    pub(super) input: String,
    pub(super) metric: &'static str,
    /// Title of the figure in tables.
    #[serde(skip)]
    title: &'static str,
    pub(super) verdict: Verdict,
    /// The scenario has a limit on the figure.
    has_limit: bool,
    /// Absent if a result lacks the figure.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    change: Option<FigureChange>,
}

/// Compares two results. Returns false if a figure is worse, or if a result lacks a figure with a limit.
///
/// # Errors
/// The results have different scenarios or inputs, or there is `--relative-to`.
pub(in crate::scenario) fn diff(
    args: &DiffArgs,
    first: &GenerationResult,
    second: &GenerationResult,
) -> anyhow::Result<bool> {
    ensure!(
        args.relative_to.is_none(),
        "--relative-to: a result of generation has no other peer; leave the option out"
    );
    let rows = compare(first, second, (args.threshold, args.confidence))?;
    args.print(&rows, || text(&rows, args))?;
    Ok(is_accepted(&rows))
}

/// Returns a row for each figure of an input. `bounds` are the minimum change and confidence, in percent.
pub(super) fn compare(
    first: &GenerationResult,
    second: &GenerationResult,
    bounds: (f64, f64),
) -> anyhow::Result<Vec<InputDiff>> {
    let inputs = [first, second].map(|result| &result.report.settings.inputs);
    ensure!(
        first.scenario.name == second.scenario.name && inputs[0] == inputs[1],
        "A and B have different scenarios, inputs or numbers of objects; compare results of the same inputs"
    );
    let mut rows = Vec::new();
    for input in inputs[1] {
        let [of_first, of_second] = [first, second].map(|result| result.report.metrics(input.name()));
        for figure in second.scenario.figures() {
            let values = |turns: &[BTreeMap<String, f64>]| {
                turns.iter().filter_map(|turn| turn.get(figure.metric).copied()).collect::<Vec<f64>>()
            };
            let stratum = Stratum { first: values(&of_first), second: values(&of_second) };
            let limits = &second.scenario.acceptance.limits;
            let has_limit =
                limits.iter().any(|limit| limit.input == input.name() && limit.metric == figure.metric);
            let (verdict, change) = match judge(std::slice::from_ref(&stratum), bounds) {
                Some((verdict, change)) => (verdict, Some(change)),
                None if !stratum.first.is_empty() => (Verdict::OnlyInA, None),
                None if !stratum.second.is_empty() => (Verdict::OnlyInB, None),
                None => (Verdict::InNeither, None),
            };
            let (input, metric, title) = (input.name().to_owned(), figure.metric, figure.title);
            rows.push(InputDiff { input, metric, title, verdict, has_limit, change });
        }
    }
    rows.retain(|row| row.has_limit || row.verdict != Verdict::InNeither);
    ensure!(!rows.is_empty(), "no figure is in a result; all turns failed");
    Ok(rows)
}

/// Returns true if no figure is worse, and no figure with a limit is missing.
pub(super) fn is_accepted(rows: &[InputDiff]) -> bool {
    !rows.iter().any(|row| row.verdict == Verdict::Worse || row.has_limit && row.verdict.is_incomplete())
}

/// Returns the table and its explanations.
fn text(rows: &[InputDiff], args: &DiffArgs) -> String {
    let head = ["input", "figure", "verdict", "confidence %", "B / A"].map(str::to_owned).to_vec();
    let line = |row: &InputDiff| {
        let ratio = row.change.and_then(|change| change.ratio);
        vec![
            row.input.clone(),
            row.title.to_owned(),
            row.verdict.name().to_owned(),
            row.change.map_or_else(|| "-".to_owned(), |change| format!("{:.1}", change.confidence)),
            ratio.map_or_else(|| "-".to_owned(), |ratio| cell(&ratio, 1.0, 2)),
        ]
    };
    let table = TextTable { head, rows: rows.iter().map(line).collect() };
    let outcomes: Vec<_> = rows.iter().map(|row| (row.verdict, row.change)).collect();
    let lines = explain(&outcomes, args, None);
    let lines: Vec<String> = lines.iter().map(|line| layout::paragraph(line)).collect();
    format!("{}\n\n{}\n", table.markdown(2), lines.join("\n"))
}
