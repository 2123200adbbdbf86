//! Two results, figure by figure. A case is one stratum of the test: cases are compared apart. Those without figures of
//! Skysail are not compared.

use std::collections::BTreeMap;

use anyhow::ensure;
use serde::Serialize;

use super::{CaseStudy, result::CaseResult};
use crate::{
    layout::{self, TextTable},
    report::cell,
    scenario::{
        diff::{DiffArgs, DiffBounds, FigureChange, Verdict, explain, judge, warn},
        rank::Stratum,
    },
};

/// Comparison of a figure of a case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in crate::scenario) struct CaseDiff {
    pub(in crate::scenario) case: String,
    pub(in crate::scenario) metric: &'static str,
    /// Title of the figure in tables.
    #[serde(skip)]
    title: &'static str,
    pub(in crate::scenario) verdict: Verdict,
    /// The scenario has a limit on the figure.
    has_limit: bool,
    /// Absent if a result lacks the figure.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    change: Option<FigureChange>,
}

/// Compares two results. Returns false if a figure is worse, or if a result lacks a figure with a limit.
///
/// # Errors
/// The results have different scenarios or cases, or there is `--relative-to`.
pub(in crate::scenario) fn diff<S: CaseStudy>(
    args: &DiffArgs,
    first: &CaseResult<S>,
    second: &CaseResult<S>,
) -> anyhow::Result<bool> {
    ensure!(
        args.relative_to.is_none(),
        "--relative-to: results of this study are compared case by case; leave the option out"
    );
    let rows = compare(first, second, args.bounds())?;
    warn([first.report.disturbed(), second.report.disturbed()]);
    args.print(&rows, || text::<S>(&rows, args))?;
    Ok(is_accepted(&rows))
}

/// Returns a row for each figure of a case. `bounds` are the conditions for verdicts.
pub(in crate::scenario) fn compare<S: CaseStudy>(
    first: &CaseResult<S>,
    second: &CaseResult<S>,
    bounds: impl Into<DiffBounds>,
) -> anyhow::Result<Vec<CaseDiff>> {
    let bounds = bounds.into();
    let [of_first, of_second] = [first, second].map(|result| &result.report.settings.cases);
    ensure!(
        first.scenario.heading()[0] == second.scenario.heading()[0] && of_first == of_second,
        "A and B have different scenarios, or cases with different settings; compare results of the same cases"
    );
    let mut rows = Vec::new();
    for case in of_second.iter().filter(|case| S::is_own(case)).map(S::name) {
        let [of_first, of_second] = [first, second].map(|result| result.report.metrics(case));
        let figures = second.scenario.groups().iter().flat_map(|group| S::figures(*group));
        for figure in figures.filter(|figure| S::is_own_figure(figure)) {
            let values = |turns: &[BTreeMap<String, f64>]| {
                turns.iter().filter_map(|turn| turn.get(figure.metric).copied()).collect::<Vec<f64>>()
            };
            let stratum = Stratum { first: values(&of_first), second: values(&of_second) };
            let mut limits = second.scenario.limits().iter();
            let has_limit = limits.any(|limit| limit.case == case && limit.metric == figure.metric);
            let (verdict, change) = match judge(std::slice::from_ref(&stratum), bounds) {
                Some((verdict, change)) if figure.is_gain => (verdict.reversed(), Some(change)),
                Some((verdict, change)) => (verdict, Some(change)),
                None if !stratum.first.is_empty() => (Verdict::OnlyInA, None),
                None if !stratum.second.is_empty() => (Verdict::OnlyInB, None),
                None => (Verdict::InNeither, None),
            };
            let (case, metric, title) = (case.to_owned(), figure.metric, figure.title);
            rows.push(CaseDiff { case, metric, title, verdict, has_limit, change });
        }
    }
    rows.retain(|row| row.has_limit || row.verdict != Verdict::InNeither);
    ensure!(!rows.is_empty(), "no figure is in a result; all turns failed");
    Ok(rows)
}

/// Returns true if no figure is worse, and no figure with a limit is missing.
pub(in crate::scenario) fn is_accepted(rows: &[CaseDiff]) -> bool {
    !rows.iter().any(|row| row.verdict == Verdict::Worse || row.has_limit && row.verdict.is_incomplete())
}

/// Returns the table and its explanations.
fn text<S: CaseStudy>(rows: &[CaseDiff], args: &DiffArgs) -> String {
    let head = [S::COLUMNS[0], "figure", "verdict", "confidence %", "B / A"].map(str::to_owned).to_vec();
    let line = |row: &CaseDiff| {
        let ratio = row.change.and_then(|change| change.ratio);
        vec![
            row.case.clone(),
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
