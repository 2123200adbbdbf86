//! Tables of a comparison, one for each experiment.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};

use super::{
    experiments::Experiment,
    result::{Comparison, Row, Shown},
};
use crate::report::cell;

/// Title, metric, unit, digits. An experiment has the columns of which it has figures; the result file has more.
const COLUMNS: [(&str, &str, f64, usize); 31] = [
    ("flat out/s", "capacity_per_second", 1.0, 0),
    ("offered/s", "offered_per_second", 1.0, 0),
    ("answers/s", "answers_per_second", 1.0, 0),
    ("refused/s", "refused_per_second", 1.0, 0),
    ("failed/s", "failed_per_second", 1.0, 0),
    ("GB/s", "gb_per_second", 1.0, 2),
    ("GB per CPU second", "gb_per_cpu_second", 1.0, 2),
    ("CPU µs", "cpu_proxies_us_per_request", 1.0, 1),
    ("of it user", "cpu_user_proxies_us_per_request", 1.0, 1),
    ("kernel", "cpu_kernel_proxies_us_per_request", 1.0, 1),
    ("× relay", "ratio_to_relay", 1.0, 2),
    ("P50 µs", "latency_p50_us", 1.0, 0),
    ("P99", "latency_p99_us", 1.0, 0),
    ("any answer P50", "any_p50_us", 1.0, 0),
    ("P99", "any_p99_us", 1.0, 0),
    ("P99 before", "calm_p99_us", 1.0, 0),
    ("recovery ms", "recovery_ms", 1.0, 0),
    ("connections", "surge_connections", 1.0, 0),
    ("most RSS MB", "rss_most_kb", 1_024.0, 1),
    ("added P50", "added_p50_us", 1.0, 0),
    ("added P99", "added_p99_us", 1.0, 0),
    ("resumed %", "resumed_percent", 1.0, 0),
    ("RSS MB", "rss_kb", 1_024.0, 1),
    ("PSS MB", "pss_kb", 1_024.0, 1),
    ("RSS MB, 1,000 idle", "rss_1000_kb", 1_024.0, 1),
    ("bytes each", "bytes_per_connection_1000", 1.0, 0),
    ("RSS MB, 10,000 idle", "rss_10000_kb", 1_024.0, 1),
    ("bytes each", "bytes_per_connection_10000", 1.0, 0),
    ("RSS MB, server's proxy", "rss_server_proxy_kb", 1_024.0, 1),
    ("others' CPUs", "other_cpus", 1.0, 2),
    (FIRST, "first_to_this", 1.0, 2),
];
/// The column in which the first peer is divided by each other; its title names that peer.
const FIRST: &str = "first";

/// A table as text, cell by cell.
pub(super) struct Cells {
    pub(super) head: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

/// The table of one experiment; nothing if it has no rows.
pub(super) fn cells(comparison: &Comparison, experiment: &str) -> Option<Cells> {
    let rows: Vec<&Row> = comparison.summary.iter().filter(|row| row.experiment == experiment).collect();
    if rows.is_empty() {
        return None;
    }
    let columns: Vec<_> = COLUMNS
        .iter()
        .filter(|(_, name, ..)| rows.iter().any(|row| row.metrics.contains_key(*name)))
        .collect();
    let first = comparison.settings.peers.first().map_or("", String::as_str);
    let mut head = vec!["setting".to_owned(), "peer".to_owned()];
    head.extend(columns.iter().map(|(title, ..)| {
        if *title == FIRST { format!("{first} / this one") } else { (*title).to_owned() }
    }));
    head.push("failed".to_owned());
    let line = |row: &&Row| {
        let mut line = vec![row.setting.clone(), row.peer.clone().unwrap_or_else(|| "none".to_owned())];
        line.extend(columns.iter().map(|(_, name, unit, digits)| {
            row.metrics.get(*name).map_or_else(|| "-".to_owned(), |spread| cell(spread, *unit, *digits))
        }));
        line.push(format!("{}/{}", row.failed, row.failed + row.rounds));
        line
    };
    Some(Cells { head, rows: rows.iter().map(line).collect() })
}

/// All tables, in Markdown.
pub(super) fn tables(comparison: &Comparison) -> String {
    let mut text = String::new();
    for experiment in &comparison.settings.experiments {
        let Some(Cells { head, rows }) = cells(comparison, experiment) else { continue };
        let mut table = Table::new();
        table.load_style(ASCII_MARKDOWN);
        table.set_header(head);
        table.add_rows(rows);
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        // Writing to a String cannot fail.
        let _ = write!(text, "### {experiment}\n\n{}.\n\n{table}\n\n", Experiment::title(experiment));
    }
    for skipped in &comparison.skipped {
        let _ = writeln!(
            text,
            "{}, {}: without {}, since {}.",
            skipped.experiment, skipped.setting, skipped.peer, skipped.reason
        );
    }
    text
}

/// One turn in a line.
pub(super) fn short(shown: &Shown) -> String {
    if let Some(measurement) = &shown.measurement {
        let parts = &measurement.parts;
        let costs = parts.iter().map(|(part, cost)| format!("{part} {:.1}", cost.cpu_us_per_request));
        let latency = &measurement.latency_us;
        // Bytes one way have none.
        let latency =
            (latency.max > 0.0).then(|| format!(", P50 {:.0} P99 {:.0} µs", latency.p50, latency.p99));
        return format!(
            "{:.0}/s{}, CPU µs each: {}; others' CPUs {:.2}",
            measurement.answers_per_second,
            latency.unwrap_or_default(),
            costs.collect::<Vec<_>>().join(", "),
            measurement.other_cpus
        );
    }
    if let Some(overload) = &shown.overload {
        return format!(
            "flat out {:.0}/s; of {:.0}/s {:.0} answered, {:.0} refused, {:.0} failed; P50 {:.0} P99 {:.0} µs, {:.0} and {:.0} since sent; normal after {}; {:.1} MB",
            overload.capacity,
            overload.offered,
            overload.answered,
            overload.refused,
            overload.failed,
            overload.answered_p50_us,
            overload.answered_p99_us,
            overload.served_p50_us,
            overload.served_p99_us,
            match overload.recovery_ms {
                Some(ms) => format!("{ms:.0} ms"),
                None if overload.disturbed => "? (the calm was disturbed)".to_owned(),
                None => "more".to_owned(),
            },
            overload.rss_most_kb as f64 / 1_024.0
        );
    }
    let looks = shown.held.iter().map(|held| {
        format!("{:.1} MB with {} connections", held.memory.rss_kb as f64 / 1_024.0, held.connections)
    });
    looks.collect::<Vec<_>>().join(", ")
}
