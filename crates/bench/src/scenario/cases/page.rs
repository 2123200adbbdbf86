//! The section of a result in the page of `bench report`.

use std::fmt::Write as _;

use super::{
    CaseStudy,
    result::{CaseResult, CaseSummary},
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
pub(in crate::scenario) fn section<S: CaseStudy>(result: &CaseResult<S>, figures: &mut usize) -> String {
    let CaseResult { scenario, report, .. } = result;
    let run = RunFacts {
        version: &report.version,
        commit: report.commit.as_deref(),
        started: report.started,
        machine: &report.machine,
        peers: &report.peers,
    };
    let [_, title, question] = scenario.heading();
    let mut text = run.heading(title, question);
    let made = made(result);
    for (section, rows) in report.sections() {
        let plots = scenario
            .groups()
            .iter()
            .flat_map(|group| S::plots(*group).into_iter().map(move |figures| (*group, figures)));
        for (group, of_plot) in plots {
            let title = S::group_title(group);
            let (svg, key) = if S::are_parts(group) {
                (bars(&[(title, &of_plot)], &rows), format!(" Parts of the bars: {}.", key(&of_plot)))
            } else {
                let groups: Vec<_> =
                    of_plot.iter().map(|figure| (figure.title, std::slice::from_ref(figure))).collect();
                (bars(&groups, &rows), String::new())
            };
            *figures += 1;
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "<figure>{svg}<figcaption>Figure {figures}. {title}, {}.{key} {}</figcaption></figure>",
                escape(section),
                escape(&made)
            );
        }
    }
    for (section, tables) in table::tables(result) {
        let tables: String = tables.iter().map(html::table).collect();
        let _ = write!(text, "<h3>{}</h3>{tables}", escape(section));
    }
    text.push_str(&html::list(table::legend(result)));
    text.push_str(&not_accepted(missing(result)));
    text
}

/// Returns the class of a part in the page.
fn class(index: usize) -> String {
    format!("peer{index}")
}

/// Plots a bar for each case with a value, under a title for each group of parts. The range of a bar is that of the sum
/// of the minima and of the maxima.
fn bars(groups: &[(&str, &[&Figure])], rows: &[&CaseSummary]) -> String {
    let bar = |row: &CaseSummary, parts: &[&Figure]| {
        let value = |(index, figure): (usize, &&Figure)| {
            Some((class(index), row.metrics.get(figure.metric)?.divided_by(figure.unit)))
        };
        let values: Vec<(String, Spread)> = parts.iter().enumerate().filter_map(value).collect();
        let sum = |of: fn(&Spread) -> f64| values.iter().map(|(_, spread)| of(spread)).sum();
        (!values.is_empty()).then(|| Bar {
            label: row.case.clone(),
            range: (sum(|spread| spread.min), sum(|spread| spread.max)),
            parts: values.iter().map(|(class, spread)| (spread.median, class.clone())).collect(),
        })
    };
    let digits = groups.iter().flat_map(|(_, parts)| *parts).map(|figure| figure.digits).max();
    let groups: Vec<_> = groups
        .iter()
        .map(|(title, parts)| ((*title).to_owned(), rows.iter().filter_map(|row| bar(row, parts)).collect()))
        .collect();
    plot::bars(&groups, digits.unwrap_or_default())
}

/// Returns the colours of the parts with their meaning, as HTML.
fn key(parts: &[&Figure]) -> String {
    let part = |(index, figure): (usize, &&Figure)| {
        format!(r#"<span class="key {}"></span>{}"#, class(index), escape(figure.title))
    };
    parts.iter().enumerate().map(part).collect()
}

/// Returns the method of measurement, for the captions of plots.
fn made<S: CaseStudy>(result: &CaseResult<S>) -> String {
    let settings = &result.report.settings;
    let tiny = match result.size {
        SizeName::Default => "",
        SizeName::Tiny => " --size tiny (too short for reliable figures)",
    };
    format!(
        "{}. Command: skysail bench run {} --rounds {}{tiny}.",
        result.scenario.method(settings),
        result.scenario.heading()[0],
        settings.rounds
    )
}

/// Returns the conditions that the result does not meet, and the missing turns with the reasons.
fn missing<S: CaseStudy>(result: &CaseResult<S>) -> Vec<String> {
    let mut lines = result.violations.clone();
    if result.report.interrupted {
        lines.push("The run was interrupted: turns are missing.".to_owned());
    }
    lines.extend(result.report.runs.iter().filter_map(|run| {
        let error = run.error.as_ref()?;
        Some(format!("Round {}, {}: {error}", run.round, run.case))
    }));
    lines
}
