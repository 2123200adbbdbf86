//! The section of a result in the page of `bench report`.

use std::fmt::Write as _;

use super::{
    format::GenerationMeasure,
    result::{GenerationResult, GenerationSummary},
    table,
};
use crate::{
    html,
    plot::{self, Bar, escape},
    report::Spread,
    scenario::{
        format::{Figure, SizeName},
        page::{RunFacts, not_accepted},
    },
};

/// Returns the section. `figures` counts the plots so far, which are numbered.
pub(in crate::scenario) fn section(result: &GenerationResult, figures: &mut usize) -> String {
    let GenerationResult { scenario, report, .. } = result;
    let run = RunFacts {
        version: &report.version,
        commit: report.commit.as_deref(),
        started: report.started,
        machine: &report.machine,
        peers: &report.peers,
    };
    let mut text = run.heading(&scenario.title, &scenario.question);
    let made = made(result);
    for (kind, rows) in report.by_proxy() {
        for group in &scenario.measure {
            *figures += 1;
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "<figure>{}<figcaption>Figure {figures}. {}, {}. Parts of the bars: {}. {}</figcaption></figure>",
                bars(*group, &rows),
                title(*group),
                kind.name(),
                key(*group),
                escape(&made)
            );
        }
    }
    for (kind, tables) in table::tables(result) {
        let tables: String = tables.iter().map(html::table).collect();
        let _ = write!(text, "<h3>{}</h3>{tables}", kind.name());
    }
    text.push_str(&html::list(table::legend(result)));
    text.push_str(&not_accepted(missing(result)));
    text
}

/// Returns the figures of a group that are the parts of a bar: all but the sums.
fn parts(group: GenerationMeasure) -> impl Iterator<Item = (String, &'static Figure)> {
    let is_part = |figure: &&Figure| {
        let is_sum = matches!(figure.metric, "resources" | "bytes" | "compile_cpu_us");
        !is_sum
    };
    let parts = group.figures().iter().filter(is_part).enumerate();
    parts.map(|(index, figure)| (format!("peer{index}"), figure))
}

/// Plots a bar for each input. Its range is that of the sum of the minima and of the maxima.
fn bars(group: GenerationMeasure, rows: &[&GenerationSummary]) -> String {
    let bar = |row: &&GenerationSummary| {
        let values: Vec<(String, Spread)> = parts(group)
            .filter_map(|(class, figure)| {
                Some((class, row.metrics.get(figure.metric)?.divided_by(figure.unit)))
            })
            .collect();
        let sum = |of: fn(&Spread) -> f64| values.iter().map(|(_, spread)| of(spread)).sum();
        Bar {
            label: row.input.clone(),
            range: (sum(|spread| spread.min), sum(|spread| spread.max)),
            parts: values.iter().map(|(class, spread)| (spread.median, class.clone())).collect(),
        }
    };
    plot::bars(&[(title(group).to_owned(), rows.iter().map(bar).collect())], 0)
}

/// Returns the colours of the parts with their meaning, as HTML.
fn key(group: GenerationMeasure) -> String {
    let part = |(class, figure): (String, &Figure)| {
        format!(r#"<span class="key {class}"></span>{}"#, escape(figure.title))
    };
    parts(group).map(part).collect()
}

fn title(group: GenerationMeasure) -> &'static str {
    match group {
        GenerationMeasure::Cpu => "CPU time of each phase, µs",
        GenerationMeasure::Time => "Elapsed time, µs",
        GenerationMeasure::Resources => "Number of resources",
        GenerationMeasure::Bytes => "Size of resources, kB",
    }
}

/// Returns the method of measurement, for the captions of plots.
fn made(result: &GenerationResult) -> String {
    let settings = &result.report.settings;
    let tiny = match result.size {
        SizeName::Default => "",
        SizeName::Tiny => " --size tiny (too short for reliable figures)",
    };
    format!(
        "Medians of {} rounds in which all inputs take turns of at least {} s after {} s of warm-up, in process, on one \
         thread. Command: skysail bench run {} --rounds {}{tiny}.",
        settings.rounds, settings.seconds, settings.warmup, result.scenario.name, settings.rounds
    )
}

/// Returns the conditions that the result does not meet, and the missing turns with the reasons.
fn missing(result: &GenerationResult) -> Vec<String> {
    let mut lines = result.violations.clone();
    if result.report.interrupted {
        lines.push("The run was interrupted: turns are missing.".to_owned());
    }
    lines.extend(result.report.runs.iter().filter_map(|run| {
        let error = run.error.as_ref()?;
        Some(format!("Round {}, {}: {error}", run.round, run.input))
    }));
    lines
}
