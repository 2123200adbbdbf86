//! Tables of a comparison, one per experiment.

use std::fmt::Write as _;

use super::{
    experiments::Experiment,
    result::{Comparison, Row, Skipped, TurnResult},
};
use crate::{
    layout::{self, TextTable},
    percentiles,
    report::{self, cell},
};

/// Title, metric, unit (a divisor) and number of decimals. The table of an experiment has the columns whose
/// metrics the experiment measured. The result file has more metrics.
const COLUMNS: [(&str, &str, f64, usize); 31] = [
    ("flat out/s", "capacity_per_second", 1.0, 0),
    ("offered/s", "offered_per_second", 1.0, 0),
    ("answers/s", "answers_per_second", 1.0, 0),
    ("refused/s", "refused_per_second", 1.0, 0),
    ("failed/s", "failed_per_second", 1.0, 0),
    ("GB/s", "gb_per_second", 1.0, 2),
    ("GB per CPU second", "gb_per_cpu_second", 1.0, 2),
    ("CPU µs", "cpu_proxies_us_per_request", 1.0, 1),
    ("user µs", "cpu_user_proxies_us_per_request", 1.0, 1),
    ("kernel µs", "cpu_kernel_proxies_us_per_request", 1.0, 1),
    ("× relay", "ratio_to_relay", 1.0, 2),
    ("P50 µs", "latency_p50_us", 1.0, 0),
    ("P99 µs", "latency_p99_us", 1.0, 0),
    ("any answer P50 µs", "any_p50_us", 1.0, 0),
    ("any answer P99 µs", "any_p99_us", 1.0, 0),
    ("P99 µs before", "calm_p99_us", 1.0, 0),
    ("recovery ms", "recovery_ms", 1.0, 0),
    ("connections", "surge_connections", 1.0, 0),
    ("most RSS MB", "rss_most_kb", 1_024.0, 1),
    ("added P50 µs", "added_p50_us", 1.0, 0),
    ("added P99 µs", "added_p99_us", 1.0, 0),
    ("resumed %", "resumed_percent", 1.0, 0),
    ("RSS MB", "rss_kb", 1_024.0, 1),
    ("PSS MB", "pss_kb", 1_024.0, 1),
    ("RSS MB, 1,000 idle", "rss_1000_kb", 1_024.0, 1),
    ("bytes each of 1,000", "bytes_per_connection_1000", 1.0, 0),
    ("RSS MB, 10,000 idle", "rss_10000_kb", 1_024.0, 1),
    ("bytes each of 10,000", "bytes_per_connection_10000", 1.0, 0),
    ("server RSS MB", "rss_server_proxy_kb", 1_024.0, 1),
    ("others' CPUs", "other_cpus", 1.0, 2),
    (FIRST, "first_to_this", 1.0, 2),
];
/// Placeholder title of the column with the ratio of the first peer to this one. The table shows the first
/// peer's name instead.
const FIRST: &str = "first";

/// Returns the table of an experiment; `None` if it has no rows.
pub(super) fn cells(comparison: &Comparison, experiment: &str) -> Option<TextTable> {
    let rows: Vec<&Row> = comparison.summary.iter().filter(|row| row.experiment == experiment).collect();
    if rows.is_empty() {
        return None;
    }
    let columns: Vec<_> = COLUMNS
        .iter()
        .filter(|(_, name, ..)| rows.iter().any(|row| row.metrics.contains_key(*name)))
        .collect();
    let first = first(comparison);
    let mut head = ["setting", "peer", "failed"].map(str::to_owned).to_vec();
    head.extend(columns.iter().map(|(title, ..)| {
        if *title == FIRST { format!("{first} / this one") } else { (*title).to_owned() }
    }));
    let line = |row: &&Row| {
        let peer = row.peer.clone().unwrap_or_else(|| "none".to_owned());
        let mut line = vec![row.setting.clone(), peer, report::failed(row.failed, row.rounds)];
        line.extend(columns.iter().map(|(_, name, unit, digits)| {
            row.metrics.get(*name).map_or_else(|| "-".to_owned(), |spread| cell(spread, *unit, *digits))
        }));
        line
    };
    Some(TextTable { head, rows: rows.iter().map(line).collect() })
}

/// Returns all tables in Markdown.
pub(super) fn tables(comparison: &Comparison) -> String {
    let mut text = String::new();
    for experiment in &comparison.settings.experiments {
        let Some(table) = cells(comparison, experiment) else { continue };
        let title = layout::paragraph(&format!("{}.", Experiment::title(experiment)));
        // Writing to a String cannot fail.
        let _ = write!(text, "### {experiment}\n\n{title}\n\n{}\n\n", table.markdown(2));
    }
    for line in legend(comparison) {
        let _ = writeln!(text, "{}", layout::paragraph(&line));
    }
    for skipped in &comparison.skipped {
        let Skipped { experiment, setting, peer, reason } = skipped;
        let line = format!("{experiment}, {setting}: without {peer}, because {reason}.");
        let _ = writeln!(text, "{}", layout::paragraph(&line));
    }
    text
}

/// Explains the figures, and the columns whose titles are not clear by themselves.
fn legend(comparison: &Comparison) -> Vec<String> {
    let has = |metric: &str| comparison.summary.iter().any(|row| row.metrics.contains_key(metric));
    let mut lines = vec![report::legend(comparison.settings.rounds)];
    if comparison
        .summary
        .iter()
        .any(|row| row.metrics.keys().any(|metric| percentiles::is_percentile(metric)))
    {
        lines.push(percentiles::RULE.to_owned());
    }
    if has("cpu_proxies_us_per_request") {
        lines.push(
            "CPU µs: of all proxies, for a request; in handshakes for a connection with its request, in tcp for a megabyte."
                .to_owned(),
        );
    }
    if has("ratio_to_relay") {
        lines.push(
            "× relay: this peer's CPU divided by the relay's of the same round; 2.00 is twice as much."
                .to_owned(),
        );
    }
    if has("first_to_this") {
        let first = first(comparison);
        lines.push(format!(
            "{first} / this one: {first}'s CPU (in memory: RSS) divided by this peer's of the same round; 0.50 is half as much."
        ));
    }
    lines
}

fn first(comparison: &Comparison) -> &str {
    comparison.settings.peers.first().map_or("", String::as_str)
}

/// Formats a turn in one line.
pub(super) fn short(shown: &TurnResult) -> String {
    if let Some(measurement) = &shown.measurement {
        let parts = &measurement.parts;
        let costs = parts.iter().map(|(part, cost)| format!("{part} {:.1}", cost.cpu_us_per_request));
        let latency = &measurement.latency_us;
        // A transfer in one direction has no latency.
        let shown = |metric: &str, value: f64| percentiles::shown(metric, value, measurement.answered());
        let latency = (latency.max > 0.0)
            .then(|| format!(", P50 {} P99 {} µs", shown("p50", latency.p50), shown("p99", latency.p99)));
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
