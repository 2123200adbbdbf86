//! `skysail bench report`: results of `bench run` as one self-contained HTML page.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use skysail_core::stdio;

use super::{
    ScenarioResult, cases, csv, figures,
    format::{Measure, Published, SizeName},
    site,
    study::{AnyResult, read},
    table,
};
use crate::{
    html,
    plot::escape,
    report::{Machine, Program},
    results,
    topology::Topology,
};

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
    let made = made(result);
    let published: Vec<&Published> = result.scenario.published.iter().chain(further).collect();
    for topology in
        result.report.settings.topologies.iter().filter(|topology| **topology != Topology::Baseline)
    {
        for measure in &result.scenario.measure {
            text.push_str(&figure(result, &published, (*topology, *measure), (&made, &mut *figures)));
        }
    }
    for (topology, tables) in table::tables(result, further) {
        let tables: String = tables.iter().map(html::table).collect();
        // Writing to a String cannot fail.
        let _ = write!(text, "<h3>{}</h3>{tables}", topology.name());
    }
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
        peers: &report.peers,
    };
    run.heading(&scenario.title, &scenario.question)
}

/// Facts about a run of any study.
pub(super) struct RunFacts<'a> {
    pub(super) version: &'a str,
    pub(super) commit: Option<&'a str>,
    pub(super) started: u64,
    pub(super) machine: &'a Machine,
    pub(super) peers: &'a BTreeMap<String, Program>,
}

impl RunFacts<'_> {
    /// Returns the begin of a section.
    pub(super) fn heading(&self, title: &str, question: &str) -> String {
        let versions = self.peers.iter().map(|(name, program)| format!("{name}: {}", program.version));
        format!(
            "<h2>{}</h2><p>{}</p><p>Skysail {}, commit {}, {}. {}.</p>{}",
            escape(title),
            escape(question),
            escape(self.version),
            escape(self.commit.unwrap_or("unknown")),
            html::date(self.started),
            escape(&html::machine(self.machine)),
            html::list(versions)
        )
    }
}

/// Returns the method of measurement, for the captions of plots.
fn made(result: &ScenarioResult) -> String {
    let settings = &result.report.settings;
    let tiny = match result.size {
        SizeName::Default => "",
        SizeName::Tiny => " --size tiny (too short for reliable figures)",
    };
    format!(
        "Medians of {} rounds in which all peers take turns of {} s after {} s of warm-up; {} requests/s over {}, \
         due at even intervals; {} bytes each way; {} workers of each sidecar. Command: skysail bench run {} \
         --rounds {}{tiny}.",
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

/// Returns a plot of a group of figures against the number of connections; empty without values.
fn figure(
    result: &ScenarioResult,
    published: &[&Published],
    (topology, measure): (Topology, Measure),
    (made, figures): (&str, &mut usize),
) -> String {
    let (what, y_title) = match measure {
        Measure::Latency => ("Latency from when requests were due, P50 and P99", "latency, µs"),
        Measure::AddedLatency => ("Latency over the baseline, P50 and P99", "added latency, µs"),
        Measure::Cpu => ("CPU time of each sidecar for a request", "CPU, µs for a request"),
        Measure::AccessLog => ("CPU time of sidecars and collectors for a request", "CPU, µs for a request"),
        Measure::Memory => ("Resident memory of each sidecar", "resident memory, MB"),
    };
    let Some(figures::Plot { svg, explanation }) =
        figures::plot(result, published, (topology, measure), y_title)
    else {
        return String::new();
    };
    *figures += 1;
    format!(
        "<figure>{svg}<figcaption>Figure {figures}. {what}, {}. {explanation} {}</figcaption></figure>",
        topology.name(),
        escape(made)
    )
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
