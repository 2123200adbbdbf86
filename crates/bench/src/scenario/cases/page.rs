//! The section of a result in the page of `bench report`, and what the site shows of a result.

mod plots;

use super::{
    CaseStudy,
    result::{CaseResult, CaseSummary},
    table,
};
use crate::{
    html,
    scenario::{
        figures::{self, FigureHistory, MainFigure},
        format::Figure,
        page::{self, RunFacts, not_accepted},
    },
};

/// Maximum number of cases of the main figure of a result.
const MAX_MAIN: usize = 8;

/// Returns the section. `figures` counts the figures so far, which are numbered.
pub(in crate::scenario) fn section<S: CaseStudy>(result: &CaseResult<S>, figures: &mut usize) -> String {
    let CaseResult { scenario, report, .. } = result;
    let run = RunFacts {
        version: &report.version,
        commit: report.commit.as_deref(),
        started: report.started,
        machine: &report.machine,
    };
    let [_, title, question] = scenario.heading();
    let mut text = run.heading(title, question);
    text.push_str(&page::terms(&terms(result)));
    let made = made(result);
    let mut tables = table::tables(result).into_iter();
    for (section, rows) in report.sections() {
        text.push_str(&page::subheading(section));
        for group in scenario.groups() {
            let Some(plot) = plots::of_group::<S>(*group, (section, &rows), scenario.published()) else {
                continue;
            };
            let title = format!("{}: {section}", plots::group_title::<S>(*group));
            text.push_str(&page::figure_of(&title, &plot, &made, figures));
        }
        text.extend(tables.next().into_iter().flat_map(|(_, tables)| tables).map(|of| html::table(&of)));
    }
    // The figures of others are the last section.
    for (section, tables) in tables {
        text.push_str(&page::subheading(section));
        text.extend(tables.iter().map(html::table));
    }
    text.push_str(&page::subheading("How to read the tables"));
    text.push_str(&html::list(table::legend(result)));
    text.push_str(&not_accepted(missing(result)));
    text
}

/// Returns the terms that the page uses.
fn terms<S: CaseStudy>(result: &CaseResult<S>) -> Vec<figures::Term> {
    // A scenario has been read from JSON or YAML, so it has a JSON form.
    let scenario = serde_json::to_value(&result.scenario).unwrap_or_default();
    let cases = serde_json::to_value(&result.report.settings.cases).unwrap_or_default();
    let names: Vec<&str> = figures_of(result).map(|figure| figure.metric).collect();
    figures::of_cases((&scenario, &cases), &result.report.peers, names.into_iter())
}

fn figures_of<S: CaseStudy>(result: &CaseResult<S>) -> impl Iterator<Item = &'static Figure> {
    result.scenario.groups().iter().flat_map(|group| S::figures(*group))
}

/// Returns the method of measurement, for the captions of plots.
fn made<S: CaseStudy>(result: &CaseResult<S>) -> String {
    let settings = &result.report.settings;
    let size = result.size.option();
    format!(
        "{}. Command: skysail bench run {} --rounds {}{size}.",
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

impl<S: CaseStudy> CaseResult<S> {
    /// Returns the medians and ranges of all figures, for the history of the site.
    pub(in crate::scenario) fn history(&self) -> Vec<FigureHistory> {
        let mut values = Vec::new();
        for (section, rows) in self.report.sections() {
            for figure in figures_of(self) {
                values.extend(rows.iter().filter_map(|row| {
                    Some(FigureHistory {
                        section: section.to_owned(),
                        series: row.case.clone(),
                        colour: figures::colour(plots::peer_of(&row.case, figure)),
                        figure,
                        spread: row.metrics.get(figure.metric)?.divided_by(figure.unit),
                        is_drawn: true,
                    })
                }));
            }
        }
        values
    }

    /// Returns the main figure for the index of the site: that of few cases of the first section. `metrics` are the names
    /// of figures by importance; one that others have published comes first.
    pub(in crate::scenario) fn main_figure(&self, metrics: &[&str]) -> Option<MainFigure> {
        let sections = self.report.sections();
        let is_measured =
            |metric: &str| self.report.summary.iter().any(|row| row.metrics.contains_key(metric));
        let is_published =
            |metric: &str| self.scenario.published().iter().any(|of| of.metrics.contains_key(metric));
        let of = |metric: &str| figures_of(self).find(|figure| figure.metric == metric);
        let mut measured = metrics.iter().copied().filter(|metric| is_measured(metric));
        let figure = measured.clone().find(|metric| is_published(metric)).or_else(|| measured.next());
        let figure = figure.and_then(of)?;
        let has_figure = |row: &&CaseSummary| row.metrics.contains_key(figure.metric);
        let (section, rows) =
            sections.into_iter().find(|(_, rows)| rows.iter().copied().any(|row| has_figure(&row)))?;
        let mut rows: Vec<&CaseSummary> = rows.into_iter().filter(has_figure).collect();
        let heading = |row: &CaseSummary| plots::heading_of(&row.case, section);
        // More cases than a reader compares: those of the first network or phase.
        if rows.len() > MAX_MAIN {
            let first = heading(rows.first()?);
            rows.retain(|row| heading(row) == first);
            rows.truncate(MAX_MAIN);
        }
        let measured = rows.iter().filter_map(|row| {
            Some((row.case.clone(), row.metrics.get(figure.metric)?.divided_by(figure.unit)))
        });
        let published = self.scenario.published().iter().enumerate().filter_map(|(index, of)| {
            Some((plots::published_label(of, index), of.metrics.get(figure.metric)? / figure.unit))
        });
        Some(MainFigure {
            place: section.to_owned(),
            figure,
            measured: measured.collect(),
            published: published.collect(),
        })
    }
}
