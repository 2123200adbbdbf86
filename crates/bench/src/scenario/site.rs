//! `skysail bench report --site`: a static site with a page for each scenario, which has the newest result and the history
//! of its figures, and with the result files themselves.

mod history;
mod index;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};

use super::{
    cases::{self, CaseResult, CaseStudy},
    format::SizeName,
    page,
    study::{AnyResult, read},
};
use crate::{html, plot::escape, report::Machine};

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

/// Writes the site of all results in these folders and in the folders directly in them. Results of other sizes than
/// `default`, and those with flame graphs, are left out.
///
/// # Errors
/// There is no result, or a file cannot be read or written.
pub(super) fn write(folders: &[PathBuf], site: &Path) -> anyhow::Result<()> {
    let mut by_name: BTreeMap<String, Vec<StoredResult>> = BTreeMap::new();
    for folder in folders {
        for stored in results_below(folder)? {
            let facts = stored.facts();
            if facts.size == SizeName::Default && !stored.has_perf() {
                by_name.entry(facts.name.to_owned()).or_default().push(stored);
            }
        }
    }
    ensure!(
        !by_name.is_empty(),
        "--site: no folder has a result of bench run in the size default; measure with skysail bench run"
    );
    let mut entries = String::new();
    for results in by_name.values_mut() {
        results.sort_by_key(|stored| stored.facts().started);
        let Some(newest) = results.last() else { continue };
        let facts = newest.facts();
        let files: Vec<String> =
            results.iter().map(|stored| stored.copy_to(site)).collect::<anyhow::Result<_>>()?;
        entries.push_str(&index::entry(newest, results, &files));
        let body = scenario_page(newest, results, &files);
        write_page(site, &format!("{}.html", facts.name), facts.title, &body)?;
    }
    let newest: Vec<&StoredResult> = by_name.values().filter_map(|results| results.last()).collect();
    let index = format!("{}{entries}", index::introduction(&newest));
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
    let mut figures = 0;
    text.push_str(&page::section_of(&newest.result, &[], &mut figures));
    text.push_str(&history::section(results, &mut figures));
    text.push_str("<h3>Result files</h3>");
    text.push_str(&file_list(results, files));
    text
}

/// Returns the list of result files, the newest first.
fn file_list(results: &[StoredResult], files: &[String]) -> String {
    let mut text = String::new();
    for (stored, file) in results.iter().zip(files).rev() {
        let facts = stored.facts();
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            r#"<li><a href="{}">{}, commit {}</a> (JSON): {}</li>"#,
            escape(file),
            html::date(facts.started),
            escape(facts.commit),
            escape(&html::machine(facts.machine))
        );
    }
    format!("<ul>{text}</ul>")
}

/// Returns the first characters of a commit.
fn short(commit: &str) -> String {
    commit.chars().take(COMMIT).collect()
}

impl StoredResult {
    fn has_perf(&self) -> bool {
        matches!(&self.result, AnyResult::Traffic(result) if result.perf)
    }

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

#[cfg(test)]
mod tests;
