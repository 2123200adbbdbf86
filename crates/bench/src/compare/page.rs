//! The result as a self-contained HTML page.

use std::fmt::Write as _;

use super::{
    experiments::{Experiment, Setting},
    result::{Comparison, Row},
    table,
};
use crate::{
    html,
    plot::{self, Bar, Line, escape},
};

/// Returns the page.
pub(super) fn page(comparison: &Comparison) -> String {
    let mut body = heading(comparison);
    for experiment in &comparison.settings.experiments {
        let Some(cells) = table::cells(comparison, experiment) else { continue };
        // Writing to a String cannot fail.
        let _ =
            write!(body, "<h2>{}</h2><p>{}.</p>", escape(experiment), escape(Experiment::title(experiment)));
        body.push_str(&plots(comparison, experiment));
        body.push_str(&html::table(&cells));
    }
    body.push_str(&omissions(comparison));
    html::document("skysail bench compare", &body)
}

fn heading(comparison: &Comparison) -> String {
    let Comparison { machine, settings, version, commit, started, .. } = comparison;
    let commit = commit.as_ref().map(|commit| format!(", commit {}", escape(commit))).unwrap_or_default();
    let versions = comparison.peers.iter().map(|(name, program)| format!("{name}: {}", program.version));
    format!(
        "<h1>skysail bench compare</h1><p>Skysail {}{commit}, {}. {}. Medians (lowest–highest) of {} rounds of {} s in \
         alternation. CPU is that of the proxies, for a request, a connection, or 1 MB of TCP; user and kernel time are \
         separated by sampled ticks.</p>{}",
        escape(version),
        html::date(*started),
        escape(&html::machine(machine)),
        settings.rounds,
        settings.seconds,
        html::list(versions)
    )
}

fn plots(comparison: &Comparison, experiment: &str) -> String {
    let rows = || comparison.summary.iter().filter(move |row| row.experiment == experiment);
    match experiment {
        "memory" => bars(
            rows(),
            &[
                ("without connections", &[("rss_kb", "whole")]),
                ("with 1,000 idle connections", &[("rss_1000_kb", "whole")]),
                ("with 10,000 idle connections", &[("rss_10000_kb", "whole")]),
            ],
            ("Resident memory, MB", 1_024.0),
        ),
        "tcp" => bars(
            rows(),
            &[("", &[("gb_per_cpu_second", "whole")])],
            ("GB per CPU second of the proxy (more is better)", 1.0),
        ),
        "overload" => bars(
            rows(),
            &[
                ("answered with 200", &[("latency_p99_us", "whole")]),
                ("the same, from when they had a connection", &[("served_p99_us", "whole")]),
                ("any answer", &[("any_p99_us", "whole")]),
            ],
            ("P99 from when requests were due, ms", 1_000.0),
        ),
        "connections" => latency(comparison, "connections"),
        "rates" => format!("{}{}", latency(comparison, "requests per second"), cpu(rows())),
        _ => cpu(rows()),
    }
}

/// Plots the CPU time of the proxies, in user mode and in the kernel.
fn cpu<'a>(rows: impl Iterator<Item = &'a Row> + Clone) -> String {
    let parts: &[(&str, &str)] =
        &[("cpu_user_proxies_us_per_request", "user"), ("cpu_kernel_proxies_us_per_request", "kernel")];
    let key = r#"CPU of the proxies, µs: <span class="key user"></span>user <span class="key kernel"></span>kernel"#;
    let plot = bars(rows, &[("", parts)], ("", 1.0));
    if plot.is_empty() { plot } else { format!("<p>{key}</p>{plot}") }
}

/// Plots bars of every peer, grouped by setting and by figure.
fn bars<'a>(
    rows: impl Iterator<Item = &'a Row> + Clone,
    what: &[(&str, &[(&str, &str)])],
    (title, unit): (&str, f64),
) -> String {
    let mut settings: Vec<&str> = Vec::new();
    for row in rows.clone() {
        if !settings.contains(&row.setting.as_str()) {
            settings.push(&row.setting);
        }
    }
    let mut groups = Vec::new();
    for setting in settings {
        for (name, metrics) in what {
            let of_setting = rows.clone().filter(|row| row.setting == setting);
            let bars: Vec<Bar> = of_setting.filter_map(|row| bar(row, metrics, unit)).collect();
            if !bars.is_empty() {
                let comma = if name.is_empty() { "" } else { ", " };
                groups.push((format!("{setting}{comma}{name}"), bars));
            }
        }
    }
    if groups.is_empty() {
        return String::new();
    }
    let digits = if unit > 1.0 { 1 } else { 2 };
    let title = if title.is_empty() { String::new() } else { format!("<p>{}</p>", escape(title)) };
    format!("{title}{}", plot::bars(&groups, digits))
}

fn bar(row: &Row, metrics: &[(&str, &str)], unit: f64) -> Option<Bar> {
    let spreads: Option<Vec<_>> = metrics.iter().map(|(name, _)| row.metrics.get(*name)).collect();
    let spreads = spreads?;
    // The range of a bar with parts is that of their sum.
    let whole = row
        .metrics
        .get("cpu_proxies_us_per_request")
        .filter(|_| metrics.len() > 1)
        .or(spreads.first().copied())?;
    Some(Bar {
        label: row.peer.clone()?,
        parts: spreads
            .iter()
            .zip(metrics)
            .map(|(s, (_, class))| (s.median / unit, (*class).to_owned()))
            .collect(),
        range: (whole.min / unit, whole.max / unit),
    })
}

/// Plots P50 and P99 of every peer against connections or against the rate.
fn latency(comparison: &Comparison, axis: &str) -> String {
    let by_rate = axis != "connections";
    let own = if by_rate { "rates" } else { "connections" };
    let mut lines = Vec::new();
    let peers = comparison.settings.peers.iter().map(Some).chain([None]);
    for (index, peer) in peers.enumerate() {
        let class = peer.map_or_else(|| "none".to_owned(), |_| format!("peer{}", index % 5));
        for (metric, style) in [("latency_p50_us", ""), ("latency_p99_us", " high")] {
            let mut points: Vec<(f64, f64)> = comparison
                .summary
                .iter()
                .filter(|row| {
                    row.peer.as_ref() == peer && (row.experiment == own || row.experiment == "pair")
                })
                .filter_map(|row| {
                    let (connections, rate) = Setting::latency_point(&row.experiment, &row.setting)?;
                    let x = if by_rate { f64::from(rate) } else { connections as f64 };
                    Some((x, row.metrics.get(metric)?.median))
                })
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let name = peer.map_or("no sidecars", String::as_str);
            let what = if style.is_empty() { "P50" } else { "P99" };
            if !points.is_empty() {
                lines.push(Line {
                    label: format!("{name} {what}"),
                    class: format!("{class}{style}"),
                    points,
                });
            }
        }
    }
    let plot = plot::lines(&lines, axis, "latency, µs");
    if plot.is_empty() {
        return plot;
    }
    let note = if by_rate { " (1,000 over 16 connections, the others over 32)" } else { "" };
    format!("<p>Latency from when requests were due against {}{note}.</p>{plot}", escape(axis))
}

/// Lists what is missing, with the reasons.
fn omissions(comparison: &Comparison) -> String {
    let mut lines: Vec<String> = Vec::new();
    if comparison.interrupted {
        lines.push("The run was interrupted: turns are missing.".to_owned());
    }
    lines.extend(comparison.skipped.iter().map(|skipped| {
        format!(
            "{}, {}: without {}, because {}.",
            skipped.experiment, skipped.setting, skipped.peer, skipped.reason
        )
    }));
    lines.extend(comparison.runs.iter().filter_map(|run| {
        let peer = run.peer.as_deref().unwrap_or("no sidecars");
        Some(format!(
            "{}, {}, {peer}, round {}: {}",
            run.experiment,
            run.setting,
            run.round,
            run.error.as_ref()?
        ))
    }));
    let list = html::list(lines);
    if list.is_empty() { list } else { format!("<h2>What is missing</h2>{list}") }
}
