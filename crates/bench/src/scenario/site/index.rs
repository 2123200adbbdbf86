//! The index of the site: for each scenario its question, its newest result with the main figure, and all result files.

use std::fmt::Write as _;

use super::{StoredResult, file_list, short};
use crate::{
    html,
    layout::TextTable,
    plot::escape,
    report::cell,
    scenario::{
        ScenarioResult,
        figures::{self, MainFigure},
        format::{Published, PublishedRow},
        study::AnyResult,
    },
    topology::Topology,
};

/// Names of figures by importance. The main figure of a result is the first that others have published too, or else the first
/// that was measured.
const MAIN: [&str; 12] = [
    "cpu_access_log_us_per_request",
    "cpu_variant_us_per_request",
    "limit_calls_per_second",
    "users_calls_per_second",
    "latency_p99_us",
    "cpu_sidecars_us_per_request",
    "cpu_proxies_us_per_request",
    "resident_mb",
    "connect_cpu_ms",
    "queries_skysail_per_second",
    "compile_cpu_us",
    "added_p99_us",
];

/// Returns the head of the index. It says so if results are of several commits or machines.
pub(super) fn introduction(newest: &[&StoredResult]) -> String {
    let distinct = |of: fn(&StoredResult) -> String| {
        let mut all: Vec<String> = newest.iter().map(|stored| of(stored)).collect();
        all.sort();
        all.dedup();
        all
    };
    let commits = distinct(|stored| stored.facts().commit.to_owned());
    let machines = distinct(|stored| stored.facts().machine.cpu.clone());
    let of_several = |what: &str, number: usize| match number {
        1 => String::new(),
        _ => format!(" The newest results are of {number} {what}; each entry names its own."),
    };
    format!(
        "<h1>Skysail benchmarks</h1><p>Skysail is a service mesh: sidecars, and a control plane that configures them. Each page \
         has the newest result of a scenario with its terms, plots and tables, figures that others have published, and the trend \
         over all results.{}{}</p>",
        of_several("commits", commits.len()),
        of_several("processors", machines.len())
    )
}

/// Returns the entry of a scenario.
pub(super) fn entry(newest: &StoredResult, results: &[StoredResult], files: &[String]) -> String {
    let facts = newest.facts();
    let mut text = format!(
        r#"<h2><a href="{0}.html">{1}</a></h2><p>{2}</p><p>Measured on {3}, commit {4}. Machine: {5}.</p>"#,
        escape(facts.name),
        escape(facts.title),
        escape(facts.question),
        html::date(facts.started),
        escape(facts.commit),
        escape(&html::machine(facts.machine))
    );
    text.push_str(&main_figure(newest));
    let mut commits: Vec<String> = results.iter().map(|stored| short(stored.facts().commit)).collect();
    commits.dedup();
    // Writing to a String cannot fail.
    let _ = match commits.len() {
        1 => write!(text, "<p>Results: {}, of this commit.</p>", results.len()),
        number => write!(
            text,
            "<p>Results: {}, of {number} commits, from the oldest to the newest: {}. The page shows the newest one and the \
             trend.</p>",
            results.len(),
            escape(&commits.join(", "))
        ),
    };
    text.push_str(&file_list(results, files));
    text
}

/// Returns the table of the main figure; empty without one.
fn main_figure(stored: &StoredResult) -> String {
    let Some(main) = stored.main_figure() else { return String::new() };
    let MainFigure { place, figure, measured, published } = main;
    let title = figures::title(figure);
    let mut rows: Vec<Vec<String>> =
        measured.into_iter().map(|(name, spread)| vec![name, cell(&spread, 1.0, figure.digits)]).collect();
    let has_published = !published.is_empty();
    rows.extend(
        published
            .into_iter()
            .map(|(name, value)| vec![format!("published: {name}"), format!("{value:.*}", figure.digits)]),
    );
    let head = vec!["measured with".to_owned(), title];
    let note = if has_published {
        "The page has the sources of the published figures, which were not measured on this machine."
    } else {
        "No other system has published this figure in a form that can be compared."
    };
    let better = if figure.is_gain { "More is better." } else { "Less is better." };
    format!(
        "<p>{}: median (min–max) of the rounds. {better} {note}</p>{}",
        escape(&place),
        html::table(&TextTable { head, rows })
    )
}

impl StoredResult {
    fn main_figure(&self) -> Option<MainFigure> {
        match &self.result {
            AnyResult::Traffic(result) => of_traffic(result),
            AnyResult::Generation(result) => result.main_figure(&MAIN),
            AnyResult::Mesh(result) => result.main_figure(&MAIN),
            AnyResult::Command(result) => result.main_figure(&MAIN),
            AnyResult::Networks(result) => result.main_figure(&MAIN),
            AnyResult::Airline(result) => result.main_figure(&MAIN),
        }
    }
}

/// Returns the main figure of a result of traffic, with both sidecars if it has this topology, and the most connections.
fn of_traffic(result: &ScenarioResult) -> Option<MainFigure> {
    let settings = &result.report.settings;
    let both = settings.topologies.iter().find(|topology| **topology == Topology::BothSidecars);
    let topology = *both.or(settings.topologies.last())?;
    let most = *settings.connections.iter().max()?;
    let rows = || {
        let of = result.report.summary.iter().filter(move |row| row.connections == most);
        of.filter(move |row| row.series.topology == topology || row.series.topology == Topology::Baseline)
    };
    let is_of = |row: &&PublishedRow| row.connections.is_none_or(|number| number == most);
    let values = |metric: &str| -> Vec<(String, f64)> {
        let value = |(index, of): (usize, &Published)| {
            let row = of.rows.iter().filter(is_of).find(|row| row.metrics.contains_key(metric))?;
            Some((of.label(index), *row.metrics.get(metric)?))
        };
        let all = result.scenario.published.iter().enumerate();
        all.filter(|(_, of)| of.topology == topology).filter_map(value).collect()
    };
    let measured = MAIN.iter().filter_map(|metric| {
        let figure = result.scenario.figures().find(|figure| figure.metric == *metric)?;
        rows().any(|row| row.metrics.contains_key(*metric)).then_some(figure)
    });
    let all: Vec<_> = measured.collect();
    let figure = all.iter().find(|figure| !values(figure.metric).is_empty()).or(all.first())?;
    let measured = rows().filter_map(|row| {
        let spread = row.metrics.get(figure.metric)?.divided_by(figure.unit);
        Some((row.series.measured_with(), spread))
    });
    Some(MainFigure {
        place: format!("{}, {most} connections", topology.name()),
        figure,
        measured: measured.collect(),
        published: values(figure.metric)
            .into_iter()
            .map(|(name, value)| (name, value / figure.unit))
            .collect(),
    })
}
