//! Tables of a scenario, with published figures below those of the run.

use std::fmt::Write as _;

use super::{
    ScenarioResult,
    format::{Figure, Measure, Published, PublishedRow},
};
use crate::{
    access_log,
    layout::{self, TextTable},
    percentiles,
    report::{self, cell},
    topology::Topology,
    variant,
};

/// Number of columns that identify a row.
const KEYS: usize = 2;

/// Returns a table for each topology and group of figures. `further` are published figures that the scenario does not
/// contain. Published figures are shown if their number of connections is one of the run's, or is not known.
pub(super) fn tables(result: &ScenarioResult, further: &[Published]) -> Vec<(Topology, Vec<TextTable>)> {
    let published: Vec<&Published> = result.scenario.published.iter().chain(further).collect();
    let of = |topology: &Topology| {
        let groups = result.scenario.measure.iter();
        let tables = groups.filter_map(|group| group_table(result, *topology, *group, &published));
        (*topology, tables.collect())
    };
    result.report.settings.topologies.iter().map(of).collect()
}

/// Returns the table of a group of figures; `None` if the run has none of them.
fn group_table(
    result: &ScenarioResult,
    topology: Topology,
    group: Measure,
    published: &[&Published],
) -> Option<TextTable> {
    let rows: Vec<_> = result.report.summary.iter().filter(|row| row.series.topology == topology).collect();
    let is_measured = |figure: &&Figure| rows.iter().any(|row| row.metrics.contains_key(figure.metric));
    let figures: Vec<&Figure> = group.figures().iter().filter(is_measured).collect();
    if figures.is_empty() {
        return None;
    }
    let is_shown = |row: &PublishedRow| {
        has_connections_of(result, row)
            && figures.iter().any(|figure| row.metrics.contains_key(figure.metric))
    };
    let others: Vec<(usize, &PublishedRow)> = published
        .iter()
        .enumerate()
        .filter(|(_, published)| published.topology == topology)
        .flat_map(|(index, published)| published.rows.iter().map(move |row| (index, row)))
        .filter(|(_, row)| is_shown(row))
        .collect();
    let mut head = ["connections", "measured with", "failed"].map(str::to_owned).to_vec();
    head.extend(figures.iter().map(|figure| figure.title.to_owned()));
    let mut lines = Vec::new();
    for row in &rows {
        let mut line = vec![
            row.connections.to_string(),
            row.series.measured_with(),
            report::failed(row.failed, row.rounds),
        ];
        line.extend(figures.iter().map(|Figure { metric, unit, digits, .. }| {
            row.metrics.get(*metric).map_or_else(|| "-".to_owned(), |spread| cell(spread, *unit, *digits))
        }));
        lines.push(line);
    }
    for (index, row) in others {
        let connections = row.connections.map_or_else(|| "-".to_owned(), |number| number.to_string());
        let name = published.get(index).map_or_else(String::new, |published| published.label(index));
        let mut line = vec![connections, name, "-".to_owned()];
        line.extend(figures.iter().map(|Figure { metric, unit, digits, .. }| {
            let digits = *digits;
            row.metrics
                .get(*metric)
                .map_or_else(|| "-".to_owned(), |value| format!("{:.digits$}", value / unit))
        }));
        lines.push(line);
    }
    Some(TextTable { head, rows: lines })
}

/// Returns true if the number of connections is one of the run's, or is not known.
pub(super) fn has_connections_of(result: &ScenarioResult, row: &PublishedRow) -> bool {
    row.connections.is_none_or(|number| result.report.settings.connections.contains(&number))
}

/// Returns the sources of published figures, by their numbers in the tables.
pub(super) fn sources(result: &ScenarioResult, further: &[Published]) -> Vec<String> {
    let published = result.scenario.published.iter().chain(further).enumerate();
    published
        .map(|(index, one)| format!("[{}] published, not measured here: {}", index + 1, one.source))
        .collect()
}

/// Returns the explanations of the figures.
pub(super) fn legend(result: &ScenarioResult) -> Vec<String> {
    let mut lines = vec![
        report::legend(result.report.settings.rounds),
        "Latency counts from when requests were due. CPU: time of a sidecar for a request; 1 µs is 1 mCPU at 1,000 \
         requests/s. added: over the baseline of the same round."
            .to_owned(),
    ];
    if result.scenario.figures().any(|figure| percentiles::is_percentile(figure.metric)) {
        lines.push(percentiles::RULE.to_owned());
    }
    if !access_log::is_only_none(&result.report.settings.access_logs) {
        lines.push(
            "file, stdout, otlp: destination of the access log of each sidecar; a row without one has no access log. Of it \
             for the log: CPU over the same proxy without access log in the same round. A collector beside each sidecar \
             reads its standard output or receives OpenTelemetry records over gRPC, and writes lines to a file."
                .to_owned(),
        );
    }
    if !variant::is_only_usual(&result.report.settings.variants) {
        lines.push(
            "A row without variant has the usual configuration. no-telemetry: without the filters that make metrics alone, and \
             Envoy without any metric. metrics: Istio's standard metrics, whose filter only Istio's build of Envoy has. \
             access-log: lines in a file. policies-address, policies-path, policies-jwt: 100 access policies by the caller's \
             address, by path, or by the subject of a verified JSON Web Token; a request meets the last one only. \
             external-authorization: the server's sidecar asks another server over HTTP before each request. over usual: \
             CPU over the usual configuration of the same proxy in the same round."
                .to_owned(),
        );
    }
    lines.extend(result.report.disturbed());
    let late = result.report.summary.iter().filter_map(|row| row.metrics.get("generator_late_p99_us"));
    if let Some(most) = late.map(|spread| spread.median).max_by(f64::total_cmp) {
        lines.push(format!(
            "The load generator itself was late by at most {most:.0} µs at P99 (the setting with the greatest median); \
             latencies include this."
        ));
    }
    lines
}

/// Returns all tables and their explanation in Markdown.
pub(super) fn markdown(result: &ScenarioResult) -> String {
    let mut text =
        format!("## {}\n\n{}\n\n", result.scenario.title, layout::paragraph(&result.scenario.question));
    for (topology, tables) in tables(result, &[]) {
        // Writing to a String cannot fail.
        let _ = write!(text, "### {}\n\n", topology.name());
        for table in tables {
            let _ = write!(text, "{}\n\n", table.markdown(KEYS));
        }
    }
    let violations = result.violations.iter().map(|violation| format!("Not accepted: {violation}"));
    for line in legend(result).into_iter().chain(sources(result, &[])).chain(violations) {
        let _ = writeln!(text, "{}", layout::paragraph(&line));
    }
    text
}
