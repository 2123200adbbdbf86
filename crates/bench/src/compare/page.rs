//! The result as a self-contained HTML page: without scripts, fonts or images from elsewhere.

use std::fmt::Write as _;

use super::{
    experiments::{Experiment, Setting},
    plot::{self, Bar, Line, escape},
    result::{Comparison, Row},
    table,
};

const STYLE: &str = "
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1,h2{line-height:1.2}h2{margin-top:2.2em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}
th,td{border-bottom:1px solid #ddd;padding:.25em .6em;text-align:right;white-space:nowrap}
th{white-space:normal;vertical-align:bottom}th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif;display:block;margin:.8em 0}
svg text{fill:#333}.group{font-weight:600}.grid{stroke:#ddd}.range{stroke:#000;stroke-width:1.5;fill:none}
.line{fill:none;stroke-width:2}.high{stroke-dasharray:5 4}
.user{fill:#4c78a8}.kernel{fill:#b8cbe0}.whole{fill:#4c78a8}
.peer0{stroke:#d1495b;--c:#d1495b}.peer1{stroke:#2e6f9e;--c:#2e6f9e}.peer2{stroke:#3f8f5b;--c:#3f8f5b}
.peer3{stroke:#b07b2c;--c:#b07b2c}.peer4{stroke:#777;--c:#777}circle{fill:var(--c)}
.key{display:inline-block;width:1em;height:1em;vertical-align:-.15em;margin:0 .3em 0 1em}
.key.user{background:#4c78a8}.key.kernel{background:#b8cbe0}
";

/// Returns the page.
pub(super) fn page(comparison: &Comparison) -> String {
    let mut body = heading(comparison);
    for experiment in &comparison.settings.experiments {
        let Some(cells) = table::cells(comparison, experiment) else { continue };
        // Writing to a String cannot fail.
        let _ =
            write!(body, "<h2>{}</h2><p>{}.</p>", escape(experiment), escape(Experiment::title(experiment)));
        body.push_str(&plots(comparison, experiment));
        let row = |cells: &[String], tag: &str| {
            let cells = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell)));
            format!("<tr>{}</tr>", cells.collect::<String>())
        };
        let rows: String = cells.rows.iter().map(|cells| row(cells, "td")).collect();
        let _ = write!(body, r#"<div class="wide"><table>{}{rows}</table></div>"#, row(&cells.head, "th"));
    }
    body.push_str(&omissions(comparison));
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>skysail bench compare</title>\
         <style>{STYLE}</style></head><body>{body}</body></html>\n"
    )
}

fn heading(comparison: &Comparison) -> String {
    let Comparison { machine, settings, version, commit, started, .. } = comparison;
    let mut text = format!(
        "<h1>skysail bench compare</h1><p>Skysail {}{}, {}. {} ({} CPUs), Linux {}, {}, {}; load {:.1} at the start. \
         Medians (lowest–highest) of {} rounds of {} s in alternation. CPU is that of the proxies, for a request, a connection, \
         or 1 MB of TCP; user and kernel time are separated by sampled ticks.</p>",
        escape(version),
        commit.as_ref().map(|commit| format!(", commit {}", escape(commit))).unwrap_or_default(),
        date(*started),
        escape(&machine.cpu),
        machine.cpus,
        escape(&machine.kernel),
        escape(&machine.network),
        escape(&machine.scheduling),
        machine.load,
        settings.rounds,
        settings.seconds,
    );
    let versions = comparison.peers.iter();
    let versions =
        versions.map(|(name, program)| format!("<li>{}: {}</li>", escape(name), escape(&program.version)));
    let _ = write!(text, "<ul>{}</ul>", versions.collect::<String>());
    text
}

/// Formats seconds since 1970 as date and time in UTC (the civil calendar by eras of 400 years).
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 { (month + 3, year) } else { (month - 9, year + 1) };
    format!("{:04}-{month:02}-{day:02} {:02}:{:02} UTC", year + era * 400, rest / 3_600, rest / 60 % 60)
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
    // Of a bar with parts, the range is that of the sum.
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
        let class = peer.map_or(4, |_| index % 5);
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
                    class: format!("peer{class}{style}"),
                    points,
                });
            }
        }
    }
    let plot = plot::lines(&lines, axis, "µs");
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
        lines.push("It was interrupted: turns are missing.".to_owned());
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
    if lines.is_empty() {
        return String::new();
    }
    let items = lines.iter().map(|line| format!("<li>{}</li>", escape(line)));
    format!("<h2>What is missing</h2><ul>{}</ul>", items.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_827_696), "2000-02-29 12:34 UTC");
        assert_eq!(date(1_735_689_599), "2024-12-31 23:59 UTC");
    }
}
