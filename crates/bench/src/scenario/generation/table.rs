//! Tables of a result.

use std::fmt::Write as _;

use super::{
    format::GenerationMeasure,
    result::{GenerationResult, GenerationSummary},
};
use crate::{
    generation::ProxyKind,
    layout::{self, TextTable},
    report::{self, cell},
    scenario::format::Figure,
};

/// Number of columns that identify a row.
const KEYS: usize = 1;

/// Returns a table for each kind of proxy and group of figures.
pub(super) fn tables(result: &GenerationResult) -> Vec<(ProxyKind, Vec<TextTable>)> {
    let of = |(kind, rows): (ProxyKind, Vec<&GenerationSummary>)| {
        (kind, result.scenario.measure.iter().map(|group| table(*group, &rows)).collect())
    };
    result.report.by_proxy().into_iter().map(of).collect()
}

fn table(group: GenerationMeasure, rows: &[&GenerationSummary]) -> TextTable {
    let figures = group.figures();
    let mut head = ["input", "objects", "failed"].map(str::to_owned).to_vec();
    head.extend(figures.iter().map(|figure| figure.title.to_owned()));
    let line = |row: &&GenerationSummary| {
        let start = [row.input.clone(), row.objects.to_string(), report::failed(row.failed, row.rounds)];
        let cells = figures.iter().map(|Figure { metric, unit, digits, .. }| {
            row.metrics.get(*metric).map_or_else(|| "-".to_owned(), |spread| cell(spread, *unit, *digits))
        });
        start.into_iter().chain(cells).collect()
    };
    TextTable { head, rows: rows.iter().map(line).collect() }
}

/// Returns the explanations of the figures.
pub(super) fn legend(result: &GenerationResult) -> Vec<String> {
    let rounds = result.report.settings.rounds;
    [
        format!(
            "Figures: medians (min–max) over the rounds, here {rounds}; a turn has the mean of its repetitions. failed \
             0/{rounds}: 0 of {rounds} turns failed. A turn fails if the proxy gets no listeners."
        ),
        "All phases run on one thread. parse: text to validated objects. index: objects into the index. services: clusters \
         and endpoints. routes: routes of sidecars. names: name table. own: listeners, inbound clusters, and routes and \
         secrets of gateways. compile: services, routes, names and own together."
            .to_owned(),
        "CDS, EDS, LDS, RDS, SDS, NDS: resources of each type that a new proxy receives, as encoded messages.".to_owned(),
    ]
    .to_vec()
}

/// Returns all tables and their explanation in Markdown.
pub(in crate::scenario) fn markdown(result: &GenerationResult) -> String {
    let mut text =
        format!("## {}\n\n{}\n\n", result.scenario.title, layout::paragraph(&result.scenario.question));
    for (kind, tables) in tables(result) {
        // Writing to a String cannot fail.
        let _ = write!(text, "### {}\n\n", kind.name());
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
