//! `skysail bench report --site`: a static site with a page for each scenario, which has the newest result and the history
//! of its figures, and with the result files themselves.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};

use super::{
    cases::{self, CaseResult, CaseStudy},
    format::{Figure, SizeName},
    page,
    study::{AnyResult, read},
};
use crate::{
    html,
    plot::{self, escape},
    report::Machine,
};

/// Maximum number of results of which the history has values.
const MAX_COLUMNS: usize = 8;
/// Number of characters of a commit in the history.
const COMMIT: usize = 8;

/// A result and its file.
struct StoredResult {
    file: PathBuf,
    result: AnyResult,
}

/// What the site needs to know of a result of any study.
struct ResultFacts<'a> {
    name: &'a str,
    title: &'a str,
    question: &'a str,
    started: u64,
    commit: &'a str,
    machine: &'a Machine,
    size: SizeName,
}

/// Median of a figure of a result, in the unit of tables.
struct HistoryValue {
    /// Topology and peer, or case.
    series: String,
    figure: &'static Figure,
    median: f64,
}

/// Writes the site of all results in these folders and in the folders directly in them. Results of the size `tiny` are
/// left out.
///
/// # Errors
/// There is no result, or a file cannot be read or written.
pub(super) fn write(folders: &[PathBuf], site: &Path) -> anyhow::Result<()> {
    let mut by_name: BTreeMap<String, Vec<StoredResult>> = BTreeMap::new();
    for folder in folders {
        for stored in results_below(folder)? {
            let facts = stored.facts();
            if facts.size == SizeName::Default {
                by_name.entry(facts.name.to_owned()).or_default().push(stored);
            }
        }
    }
    ensure!(
        !by_name.is_empty(),
        "--site: no folder has a result of bench run in the size default; measure with skysail bench run"
    );
    let mut index = "<h1>Skysail benchmarks</h1><p>Each page has the newest result of a scenario, the figures that others \
                     have published, and the history of its figures.</p>"
        .to_owned();
    for results in by_name.values_mut() {
        results.sort_by_key(|stored| stored.facts().started);
        let Some(newest) = results.last() else { continue };
        let facts = newest.facts();
        // Writing to a String cannot fail.
        let _ = write!(
            index,
            r#"<h2><a href="{0}.html">{1}</a></h2><p>{2}</p><p>Newest result: {3}, commit {4}. Number of results: {5}.</p>"#,
            escape(facts.name),
            escape(facts.title),
            escape(facts.question),
            html::date(facts.started),
            escape(facts.commit),
            results.len()
        );
        let files: anyhow::Result<Vec<String>> = results.iter().map(|stored| stored.copy_to(site)).collect();
        let body = scenario_page(newest, results, &files?);
        write_page(site, &format!("{}.html", facts.name), facts.title, &body)?;
    }
    write_page(site, "index.html", "Skysail benchmarks", &index)
}

fn write_page(site: &Path, name: &str, title: &str, body: &str) -> anyhow::Result<()> {
    let file = site.join(name);
    fs::write(&file, html::document(title, body)).with_context(|| format!("cannot write {}", file.display()))
}

/// Returns the results of a folder and of the folders directly in it.
fn results_below(folder: &Path) -> anyhow::Result<Vec<StoredResult>> {
    let mut folders = vec![folder.to_owned()];
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            folders.push(path);
        }
    }
    let mut stored = Vec::new();
    for folder in &folders {
        for file in page::json_files(folder)? {
            stored.extend(read(&file)?.map(|result| StoredResult { file, result }));
        }
    }
    Ok(stored)
}

/// Returns the page of a scenario: the newest result, the history, and links to the result files.
fn scenario_page(newest: &StoredResult, results: &[StoredResult], files: &[String]) -> String {
    let mut text = r#"<p><a href="index.html">All scenarios</a></p>"#.to_owned();
    text.push_str(&page::section_of(&newest.result, &[], &mut 0));
    if results.len() > 1 {
        text.push_str(&history(results));
    }
    text.push_str("<h3>Result files</h3><ul>");
    for (stored, file) in results.iter().zip(files).rev() {
        let facts = stored.facts();
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            r#"<li><a href="{}">{}, commit {}</a>: {}</li>"#,
            escape(file),
            html::date(facts.started),
            escape(facts.commit),
            escape(&html::machine(facts.machine))
        );
    }
    text.push_str("</ul>");
    text
}

/// Returns the table of the history: a row for each figure of the newest result, a column for each result.
fn history(results: &[StoredResult]) -> String {
    let all: Vec<Vec<HistoryValue>> = results.iter().map(StoredResult::values).collect();
    let shown = results.len().saturating_sub(MAX_COLUMNS);
    let cpu = results.last().map(|stored| stored.facts().machine.cpu.as_str()).unwrap_or_default();
    let mut text = "<h3>History</h3><p>Medians, from the oldest result to the newest. The line begins at zero. change: the \
                    newest median over the one before it with the same processor. bench diff tests whether a difference is \
                    chance.</p><div class=\"wide\"><table><tr><th>series</th><th>figure</th><th></th>\
                    <th>change</th>"
        .to_owned();
    // Writing to a String cannot fail.
    for stored in &results[shown..] {
        let facts = stored.facts();
        let commit: String = facts.commit.chars().take(COMMIT).collect();
        let _ = write!(text, "<th>{}<br>{}</th>", escape(&html::date(facts.started)), escape(&commit));
    }
    text.push_str("</tr>");
    for row in all.last().into_iter().flatten() {
        let of = |values: &Vec<HistoryValue>| {
            let mut same = values
                .iter()
                .filter(|value| value.series == row.series && value.figure.metric == row.figure.metric);
            same.next().map(|value| value.median)
        };
        let medians: Vec<Option<f64>> = all.iter().map(of).collect();
        let earlier = results.iter().zip(&medians).rev().skip(1);
        let before =
            earlier.filter(|(stored, _)| stored.facts().machine.cpu == cpu).find_map(|(_, median)| *median);
        let change = before.filter(|before| *before > 0.0).map(|before| row.median / before);
        let cells = medians[shown..].iter().map(|median| {
            median.map_or_else(
                || "<td>-</td>".to_owned(),
                |median| format!("<td>{median:.*}</td>", row.figure.digits),
            )
        });
        let _ = write!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td>{}</tr>",
            escape(&row.series),
            escape(row.figure.title),
            plot::sparkline(&medians),
            change.map_or_else(|| "-".to_owned(), |change| format!("× {change:.2}")),
            cells.collect::<String>()
        );
    }
    text.push_str("</table></div>");
    text
}

impl StoredResult {
    fn facts(&self) -> ResultFacts<'_> {
        match &self.result {
            AnyResult::Traffic(result) => {
                let (scenario, report) = (&result.scenario, &result.report);
                ResultFacts {
                    name: &scenario.name,
                    title: &scenario.title,
                    question: &scenario.question,
                    started: report.started,
                    commit: report.commit.as_deref().unwrap_or("unknown"),
                    machine: &report.machine,
                    size: result.size,
                }
            }
            AnyResult::Generation(result) => facts_of_cases(result),
            AnyResult::Mesh(result) => facts_of_cases(result),
            AnyResult::Command(result) => facts_of_cases(result),
            AnyResult::Networks(result) => facts_of_cases(result),
            AnyResult::Airline(result) => facts_of_cases(result),
        }
    }

    fn values(&self) -> Vec<HistoryValue> {
        match &self.result {
            AnyResult::Traffic(result) => {
                let rows = result.report.summary.iter().flat_map(|row| {
                    let series = format!("{}, {} connections", row.series, row.connections);
                    result.scenario.figures().filter_map(move |figure| {
                        let median = row.metrics.get(figure.metric)?.median / figure.unit;
                        Some(HistoryValue { series: series.clone(), figure, median })
                    })
                });
                rows.collect()
            }
            AnyResult::Generation(result) => values_of_cases(result),
            AnyResult::Mesh(result) => values_of_cases(result),
            AnyResult::Command(result) => values_of_cases(result),
            AnyResult::Networks(result) => values_of_cases(result),
            AnyResult::Airline(result) => values_of_cases(result),
        }
    }

    /// Copies the result file into the site. Returns its path there.
    fn copy_to(&self, site: &Path) -> anyhow::Result<String> {
        let part = |path: Option<&Path>| {
            path.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
        };
        // Folders of several places may have the same name.
        let folder = format!("{}-{}", self.facts().started, part(self.file.parent()));
        let name = part(Some(&self.file));
        let place = site.join("data").join(&folder);
        fs::create_dir_all(&place)
            .and_then(|()| fs::copy(&self.file, place.join(&name)))
            .with_context(|| format!("cannot copy {} to {}", self.file.display(), place.display()))?;
        Ok(format!("data/{folder}/{name}"))
    }
}

fn facts_of_cases<S: CaseStudy>(result: &CaseResult<S>) -> ResultFacts<'_> {
    let [name, title, question] = result.scenario.heading();
    let cases::CaseReport { started, commit, machine, .. } = &result.report;
    ResultFacts {
        name,
        title,
        question,
        started: *started,
        commit: commit.as_deref().unwrap_or("unknown"),
        machine,
        size: result.size,
    }
}

fn values_of_cases<S: CaseStudy>(result: &CaseResult<S>) -> Vec<HistoryValue> {
    let figures = || result.scenario.groups().iter().flat_map(|group| S::figures(*group));
    let rows = result.report.summary.iter().flat_map(|row| {
        figures().filter_map(move |figure| {
            let median = row.metrics.get(figure.metric)?.median / figure.unit;
            Some(HistoryValue { series: row.case.clone(), figure, median })
        })
    });
    rows.collect()
}
