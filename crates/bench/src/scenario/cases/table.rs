//! Tables of a result.

use std::fmt::Write as _;

use super::{
    CaseStudy, PublishedCase,
    result::{CaseResult, CaseSummary},
};
use crate::{
    layout::{self, TextTable},
    percentiles,
    report::{self, cell},
    scenario::format::Figure,
};

/// Number of columns that identify a row.
const KEYS: usize = 1;

/// Returns a table for each section and group of figures. Published figures are the last section.
pub(super) fn tables<S: CaseStudy>(result: &CaseResult<S>) -> Vec<(&str, Vec<TextTable>)> {
    let groups = result.scenario.groups();
    let mut tables: Vec<(&str, Vec<TextTable>)> = Vec::new();
    for (title, rows) in result.report.sections() {
        tables.push((title, groups.iter().map(|group| table::<S>(*group, &rows)).collect()));
    }
    let published = result.scenario.published();
    let of_others: Vec<TextTable> =
        groups.iter().filter_map(|group| published_table(S::figures(*group), published)).collect();
    if !of_others.is_empty() {
        tables.push(("published by others", of_others));
    }
    tables
}

/// Returns the published figures of a group. Columns and rows without a figure are left out.
fn published_table(figures: &'static [Figure], published: &[PublishedCase]) -> Option<TextTable> {
    let is_published = |figure: &&Figure| published.iter().any(|of| of.metrics.contains_key(figure.metric));
    let figures: Vec<&Figure> = figures.iter().filter(is_published).collect();
    let number = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
    };
    let mut head = ["system", "sidecars", "requests/s"].map(str::to_owned).to_vec();
    head.extend(figures.iter().map(|figure| figure.title.to_owned()));
    let has_figure = |of: &PublishedCase| figures.iter().any(|figure| of.metrics.contains_key(figure.metric));
    let rows: Vec<Vec<String>> = published
        .iter()
        .enumerate()
        .filter(|(_, of)| has_figure(of))
        .map(|(index, of)| {
            let start = [
                format!("{} [{}]", of.system, index + 1),
                number(of.sidecars.map(f64::from), 0),
                number(of.rate, 0),
            ];
            let cells = figures.iter().map(|figure| {
                number(of.metrics.get(figure.metric).map(|value| value / figure.unit), figure.digits)
            });
            start.into_iter().chain(cells).collect()
        })
        .collect();
    (!rows.is_empty()).then_some(TextTable { head, rows })
}

fn table<S: CaseStudy>(group: S::Group, rows: &[&CaseSummary]) -> TextTable {
    let figures = S::figures(group);
    let mut head = [S::COLUMNS[0], S::COLUMNS[1], "failed"].map(str::to_owned).to_vec();
    head.extend(figures.iter().map(|figure| figure.title.to_owned()));
    let line = |row: &&CaseSummary| {
        let failed = match row.unavailable {
            true => "not available".to_owned(),
            false => report::failed(row.failed, row.rounds),
        };
        let start = [row.case.clone(), row.amount.clone(), failed];
        let cells = figures.iter().map(|Figure { metric, unit, digits, .. }| {
            row.metrics.get(*metric).map_or_else(|| "-".to_owned(), |spread| cell(spread, *unit, *digits))
        });
        start.into_iter().chain(cells).collect()
    };
    TextTable { head, rows: rows.iter().map(line).collect() }
}

/// Returns the explanations of the figures, and the sources of those of others.
pub(super) fn legend<S: CaseStudy>(result: &CaseResult<S>) -> Vec<String> {
    let mut lines = result.scenario.legend(&result.report);
    let mut figures = result.scenario.groups().iter().flat_map(|group| S::figures(*group));
    if figures.any(|figure| percentiles::is_percentile(figure.metric)) {
        lines.push(percentiles::RULE.to_owned());
    }
    lines.extend(result.report.disturbed());
    let unavailable = result.report.unavailable();
    let unavailable = unavailable.iter().map(|reason| reason.trim_end_matches('.'));
    lines.extend(unavailable.map(|reason| format!("Not available on this machine: {reason}.")));
    let sources = result.scenario.published().iter().enumerate();
    lines.extend(sources.map(|(index, of)| format!("[{}] {}: {}", index + 1, of.system, of.source)));
    lines
}

/// Returns all tables and their explanation in Markdown.
pub(in crate::scenario) fn markdown<S: CaseStudy>(result: &CaseResult<S>) -> String {
    let [_, title, question] = result.scenario.heading();
    let mut text = format!("## {title}\n\n{}\n\n", layout::paragraph(question));
    for (section, tables) in tables(result) {
        // Writing to a String cannot fail.
        let _ = write!(text, "### {section}\n\n");
        for table in tables {
            let _ = write!(text, "{}\n\n", table.markdown(KEYS));
        }
    }
    let violations = result.violations.iter().map(|violation| format!("Not accepted: {violation}"));
    for line in legend(result).into_iter().chain(violations) {
        let _ = writeln!(text, "{}", layout::paragraph(&line));
    }
    text
}
