//! `skysail bench report`: results of `bench run` as one self-contained HTML page.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use skysail_core::stdio;

use super::{
    ScenarioResult, cases, csv,
    figures::{self, Plot, Term},
    format::{Measure, Published},
    site,
    study::{AnyResult, read},
    table,
};
use crate::{html, plot::escape, report::Machine, results, topology::Topology};

/// Settings of `skysail bench report`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PageArgs {
    /// Folders with result files of `bench run`. Files of other benchmarks are ignored.
    #[arg(value_name = "DIR", required = true)]
    folders: Vec<PathBuf>,

    /// File of the page. An existing file is replaced.
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    html: PathBuf,

    /// Folder of a static site, instead of a page: a page for each scenario with its newest result and the history of its
    /// figures. Folders directly in each DIR are searched too. Existing pages are replaced.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["html", "istio_csv"])]
    site: Option<PathBuf>,

    /// Files with the columns of Istio's benchmark.csv. Rows of the same rate and payload are shown beside the results.
    #[arg(long, value_name = "FILE")]
    istio_csv: Vec<PathBuf>,
}

/// Writes the page.
///
/// # Errors
/// A folder has no result, a file cannot be read or written, or a CSV file has no row of the rate and payload of a
/// result.
pub(crate) fn page(args: &PageArgs) -> anyhow::Result<()> {
    if let Some(folder) = &args.site {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
        site::write(&args.folders, folder)?;
        stdio::print(format_args!("The site is {}.", folder.join("index.html").display()))?;
        return Ok(());
    }
    results::check_writable("--html", &args.html)?;
    let mut all = Vec::new();
    for folder in &args.folders {
        let found = results_in(folder)?;
        ensure!(
            !found.is_empty(),
            "{} has no result of bench run; measure with skysail bench run",
            folder.display()
        );
        all.extend(found);
    }
    ensure!(
        args.istio_csv.is_empty() || all.iter().any(takes_istio_rows),
        "--istio-csv: no result is one of traffic over http1, to which its rows belong; leave the option out"
    );
    let mut body = "<h1>Skysail benchmarks</h1>".to_owned();
    let mut figures = 0;
    for result in &all {
        let further = match result {
            AnyResult::Traffic(traffic) if takes_istio_rows(result) => {
                let further: anyhow::Result<Vec<_>> =
                    args.istio_csv.iter().map(|file| csv::read(file, &traffic.report.settings)).collect();
                further?.concat()
            }
            _ => Vec::new(),
        };
        body.push_str(&section_of(result, &further, &mut figures));
    }
    fs::write(&args.html, html::document("Skysail benchmarks", &body))
        .with_context(|| format!("cannot write {}", args.html.display()))?;
    stdio::print(format_args!("The page is {}.", args.html.display()))?;
    Ok(())
}

/// Returns true if the rows of Istio's `benchmark.csv` answer the same question. They are of HTTP/1.1.
fn takes_istio_rows(result: &AnyResult) -> bool {
    matches!(result, AnyResult::Traffic(result) if result.report.settings.protocol.is_http1())
}

/// Returns the section of a result of any study. `further` are figures of others, beside those of a result of traffic.
pub(super) fn section_of(result: &AnyResult, further: &[Published], figures: &mut usize) -> String {
    match result {
        AnyResult::Traffic(result) => section(result, further, figures),
        AnyResult::Generation(result) => cases::section(result, figures),
        AnyResult::Mesh(result) => cases::section(result, figures),
        AnyResult::Command(result) => cases::section(result, figures),
        AnyResult::Networks(result) => cases::section(result, figures),
        AnyResult::Airline(result) => cases::section(result, figures),
    }
}

/// Returns the results of `bench run` in a folder, by file name.
fn results_in(folder: &Path) -> anyhow::Result<Vec<AnyResult>> {
    let mut results = Vec::new();
    for file in &json_files(folder)? {
        results.extend(read(file)?);
    }
    Ok(results)
}

/// Returns the JSON files of a folder, by name.
pub(super) fn json_files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)
        .with_context(|| format!("cannot read {}; name a folder of results", folder.display()))?;
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    Ok(files)
}

/// Returns the section of a result. `figures` counts the plots so far, which are numbered.
pub(super) fn section(result: &ScenarioResult, further: &[Published], figures: &mut usize) -> String {
    let mut text = heading(result);
    text.push_str(&terms(&figures::of_traffic(result)));
    let made = made(result);
    let published: Vec<&Published> = result.scenario.published.iter().chain(further).collect();
    for (topology, tables) in table::tables(result, further) {
        text.push_str(&subheading(topology.name()));
        // Plots of the other topologies have the baseline too.
        let measures = result.scenario.measure.iter().filter(|_| topology != Topology::Baseline);
        for measure in measures {
            text.push_str(&figure(result, &published, (topology, *measure), (&made, &mut *figures)));
        }
        text.extend(tables.iter().map(html::table));
    }
    text.push_str(&subheading("How to read the tables"));
    let explained = table::legend(result).into_iter().chain(table::sources(result, further));
    text.push_str(&html::list(explained));
    text.push_str(&not_accepted(missing(result)));
    text
}

/// Returns the list of missing turns and of conditions that were not met; empty if there are none.
pub(super) fn not_accepted(lines: Vec<String>) -> String {
    if lines.is_empty() {
        return String::new();
    }
    format!("<h3>Missing or not accepted</h3>{}", html::list(lines))
}

fn heading(ScenarioResult { scenario, report, .. }: &ScenarioResult) -> String {
    let run = RunFacts {
        version: &report.version,
        commit: report.commit.as_deref(),
        started: report.started,
        machine: &report.machine,
    };
    run.heading(&scenario.title, &scenario.question)
}

/// Facts about a run of any study.
pub(super) struct RunFacts<'a> {
    pub(super) version: &'a str,
    pub(super) commit: Option<&'a str>,
    pub(super) started: u64,
    pub(super) machine: &'a Machine,
}

impl RunFacts<'_> {
    /// Returns the begin of a section.
    pub(super) fn heading(&self, title: &str, question: &str) -> String {
        format!(
            "<h2>{}</h2><p>{}</p><p>Measured on {} with Skysail {}, commit {}. Machine: {}.</p>",
            escape(title),
            escape(question),
            html::date(self.started),
            escape(self.version),
            escape(self.commit.unwrap_or("unknown")),
            escape(&html::machine(self.machine))
        )
    }
}

/// Returns the heading of a part of a section.
pub(super) fn subheading(title: &str) -> String {
    format!("<h3>{}</h3>", escape(title))
}

/// Returns the list of the terms that a section uses.
pub(super) fn terms(terms: &[Term]) -> String {
    let items = terms.iter().map(|term| (term.name.as_str(), term.meaning.as_str()));
    format!("{}{}", subheading("Terms"), html::terms(items))
}

/// Returns plots with a title, their legend and a caption. `figures` counts the figures so far, which are numbered.
pub(super) fn figure_of(title: &str, plot: &Plot, made: &str, figures: &mut usize) -> String {
    *figures += 1;
    let Plot { panels, legend, explanation } = plot;
    format!(
        r#"<figure><p class="title">Figure {figures}. {}</p><div class="panels">{}</div>{legend}<figcaption>{} {}</figcaption></figure>"#,
        escape(title),
        panels.concat(),
        escape(explanation),
        escape(made)
    )
}

/// Returns the end of the title of one of several plots of the same figures, as in `, part 1 of 2`.
pub(super) fn part(index: usize, number: usize) -> String {
    if number > 1 { format!(", part {} of {number}", index + 1) } else { String::new() }
}

/// Returns the method of measurement, for the captions of plots.
fn made(result: &ScenarioResult) -> String {
    let settings = &result.report.settings;
    let size = result.size.option();
    format!(
        "Medians of {} rounds in which all peers take turns of {} s after {} s of warm-up; {} requests/s over {}, \
         due at even intervals; {} bytes each way; {} workers of each sidecar. Command: skysail bench run {} \
         --rounds {}{size}.",
        settings.rounds,
        settings.seconds,
        settings.warmup,
        settings.qps,
        settings.protocol.title(),
        settings.payload,
        settings.workers,
        result.scenario.name,
        settings.rounds
    )
}

/// Returns the plots of a group of figures; empty without values.
fn figure(
    result: &ScenarioResult,
    published: &[&Published],
    (topology, measure): (Topology, Measure),
    (made, figures): (&str, &mut usize),
) -> String {
    let what = match measure {
        Measure::Latency => "Latency from when requests were due, µs",
        Measure::AddedLatency => "Latency over the baseline, µs",
        Measure::Cpu => "CPU time of each sidecar, µs for a request",
        Measure::AccessLog => "CPU time of sidecars and collectors, µs for a request",
        Measure::Variants => "CPU time of sidecars and the authorizer, µs for a request",
        Measure::Memory => "Resident memory of each sidecar, MB",
    };
    let plots = figures::plots(result, published, (topology, measure));
    let number = plots.len();
    let figure = |(index, plot): (usize, &Plot)| {
        let title = format!("{what}: {}{}", topology.name(), part(index, number));
        figure_of(&title, plot, made, figures)
    };
    plots.iter().enumerate().map(figure).collect()
}

/// Returns the conditions that the result does not meet, and the missing turns with the reasons.
fn missing(result: &ScenarioResult) -> Vec<String> {
    let mut lines = result.violations.clone();
    if result.report.interrupted {
        lines.push("The run was interrupted: turns are missing.".to_owned());
    }
    lines.extend(result.report.runs.iter().filter_map(|run| {
        let error = run.error.as_ref()?;
        Some(format!("Round {}, {}, {} connections: {error}", run.round, run.series, run.connections))
    }));
    lines
}
