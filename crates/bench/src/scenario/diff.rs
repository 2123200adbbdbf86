//! `skysail bench diff`: two results, figure by figure.
//!
//! A row is a figure of a peer in a topology. The numbers of connections are the strata of one test ([`rank`]). So a
//! few rounds are enough, and there are fewer tests whose result may be due to chance. Numbers of connections get a row
//! of their own if a result has too few rounds of them, or lacks the figure because all its turns failed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;
use skysail_core::stdio;

use super::{
    ScenarioResult, cases,
    format::{Figure, MAX_ROUNDS},
    rank::{self, RankTest, Stratum},
    study::{AnyResult, read},
};
use crate::{
    layout::{self, TextTable},
    peers::Peer,
    report::{self, Series, Spread, cell},
    stage::Output,
    topology::Topology,
    variant::Variant,
};

/// Minimum number of rounds of each result for a verdict, unless an option says otherwise.
const MIN_ROUNDS: u32 = 5;

/// Conditions for the verdicts better and worse.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiffBounds {
    /// Minimum change of the median, in percent.
    pub(super) threshold: f64,
    /// Minimum confidence, in percent.
    pub(super) confidence: f64,
    /// Minimum number of rounds of each result.
    pub(super) rounds: u32,
}

impl DiffBounds {
    /// Returns true if a result has too few rounds of a stratum. Values that are the same in all rounds need no further
    /// ones.
    fn is_short(self, stratum: &Stratum) -> bool {
        let rounds = stratum.first.len().min(stratum.second.len());
        rounds < self.rounds as usize && !is_equal(stratum)
    }
}

/// Minimum change and confidence, in percent, with the usual number of rounds.
impl From<(f64, f64)> for DiffBounds {
    fn from((threshold, confidence): (f64, f64)) -> Self {
        Self { threshold, confidence, rounds: MIN_ROUNDS }
    }
}

/// Settings of `skysail bench diff`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DiffArgs {
    /// Result file of the earlier build.
    #[arg(value_name = "A")]
    first: PathBuf,

    /// Result file of the later build, of the same scenario and load.
    #[arg(value_name = "B")]
    second: PathBuf,

    /// Compare ratios to this peer in the same round, which cancel the speed of the machine.
    #[arg(long, value_name = "PEER", value_enum)]
    pub(super) relative_to: Option<Peer>,

    /// Minimum change of the median, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0, value_parser = threshold)]
    pub(super) threshold: f64,

    /// Minimum confidence that a change is not by chance, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, value_parser = confidence)]
    pub(super) confidence: f64,

    /// Minimum number of rounds of A and of B for a verdict. With fewer, a figure that differs has the verdict "too few
    /// rounds".
    #[arg(long, value_name = "NUMBER", default_value_t = MIN_ROUNDS, value_parser = clap::value_parser!(u32).range(1..=30))]
    pub(super) min_rounds: u32,

    /// Output format.
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Outcome of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    Better,
    Same,
    Worse,
    /// The figure differs, and a result has too few rounds to tell a change from chance.
    TooFewRounds,
    /// B has no such figure.
    OnlyInA,
    /// A has no such figure.
    OnlyInB,
    /// Neither result has the figure, on which the scenario has a limit.
    InNeither,
}

impl Verdict {
    /// Returns the text in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Same => "same",
            Self::Worse => "worse",
            Self::TooFewRounds => "too few rounds",
            Self::OnlyInA => "only in A",
            Self::OnlyInB => "only in B",
            Self::InNeither => "in neither",
        }
    }

    /// Returns the verdict of a figure of which more is better.
    pub(super) fn reversed(self) -> Self {
        match self {
            Self::Better => Self::Worse,
            Self::Worse => Self::Better,
            other => other,
        }
    }

    /// Returns true if a result lacks the figure.
    pub(super) fn is_incomplete(self) -> bool {
        matches!(self, Self::OnlyInA | Self::OnlyInB | Self::InNeither)
    }
}

/// Comparison of a figure of a peer in a topology.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct DiffRow {
    #[serde(flatten)]
    pub(super) series: Series,
    pub(super) metric: &'static str,
    /// Title of the figure in tables.
    #[serde(skip)]
    title: &'static str,
    pub(super) verdict: Verdict,
    /// Numbers of connections to which the verdict applies.
    pub(super) connections: Vec<usize>,
    /// The scenario has a limit on the figure.
    pub(super) has_limit: bool,
    /// Absent if a result lacks the figure.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) change: Option<FigureChange>,
}

/// Change of a figure from A to B.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct FigureChange {
    /// Median of B divided by that of A: the median, least and greatest over the numbers of connections. `None` if no
    /// two medians are above 0.
    pub(super) ratio: Option<Spread>,
    /// Confidence in percent that A and B differ.
    pub(super) confidence: f64,
    /// Maximum confidence that the test can reach with these numbers of rounds.
    pub(super) greatest_confidence: f64,
}

/// Compares two results. Returns false if a figure of skysail is worse, or if a result lacks a figure on which the
/// scenario has a limit.
///
/// # Errors
/// A file is not a result, or the results have different loads.
pub(crate) fn diff(args: &DiffArgs) -> anyhow::Result<bool> {
    let of =
        |file: &Path| read(file)?.with_context(|| format!("{} is not a result of bench run", file.display()));
    match (of(&args.first)?, of(&args.second)?) {
        (AnyResult::Traffic(first), AnyResult::Traffic(second)) => {
            for (file, result) in [(&args.first, &first), (&args.second, &second)] {
                ensure!(
                    !result.perf,
                    "{} was measured with --perf, which costs CPU time; measure without it",
                    file.display()
                );
            }
            let rows = compare(&first, &second, args.relative_to, args.bounds())?;
            for difference in differences(&first, &second) {
                stdio::print_error(difference);
            }
            warn([first.report.disturbed(), second.report.disturbed()]);
            args.print(&rows, || text(&rows, args))?;
            Ok(is_accepted(&rows))
        }
        (AnyResult::Generation(first), AnyResult::Generation(second)) => cases::diff(args, &first, &second),
        (AnyResult::Mesh(first), AnyResult::Mesh(second)) => cases::diff(args, &first, &second),
        (AnyResult::Command(first), AnyResult::Command(second)) => cases::diff(args, &first, &second),
        (AnyResult::Networks(first), AnyResult::Networks(second)) => cases::diff(args, &first, &second),
        (AnyResult::Airline(first), AnyResult::Airline(second)) => cases::diff(args, &first, &second),
        _ => bail!("A and B are results of different studies; compare results of the same scenario"),
    }
}

/// Prints the lines about disturbed turns of A and of B.
pub(super) fn warn(disturbed: [Option<String>; 2]) {
    for (name, line) in ["A", "B"].iter().zip(disturbed) {
        if let Some(line) = line {
            stdio::print_error(format_args!("{name}: {line}"));
        }
    }
}

impl DiffArgs {
    /// Returns the conditions for verdicts.
    pub(super) fn bounds(&self) -> DiffBounds {
        DiffBounds { threshold: self.threshold, confidence: self.confidence, rounds: self.min_rounds }
    }

    /// Prints rows as JSON, or the text of their table.
    pub(super) fn print<R: Serialize>(
        &self,
        rows: &[R],
        table: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        match self.output {
            Output::Table => stdio::print(table())?,
            Output::Json => stdio::print(serde_json::to_string_pretty(rows)?)?,
        }
        Ok(())
    }
}

/// Returns true if no figure of skysail is worse, and no figure on which the scenario has a limit is missing.
pub(super) fn is_accepted(rows: &[DiffRow]) -> bool {
    let is_worse = |row: &DiffRow| row.verdict == Verdict::Worse && row.series.peer == Some(Peer::Skysail);
    !rows.iter().any(|row| is_worse(row) || row.has_limit && row.verdict.is_incomplete())
}

/// Returns a row for each figure of a topology and a peer in which both results were measured, and one more for the
/// numbers of connections at which only one result has the figure. `bounds` are the conditions for verdicts.
///
/// # Errors
/// The results have different scenarios or loads, too many rounds, or no topology and peer in common.
pub(super) fn compare(
    first: &ScenarioResult,
    second: &ScenarioResult,
    relative_to: Option<Peer>,
    bounds: impl Into<DiffBounds>,
) -> anyhow::Result<Vec<DiffRow>> {
    let bounds = bounds.into();
    let (a, b) = (&first.report.settings, &second.report.settings);
    let loads = [a, b].map(|of| (of.protocol.title(), of.qps, of.payload, of.workers, &of.connections));
    ensure!(
        first.scenario.name == second.scenario.name && loads[0] == loads[1],
        "A has scenario {} with (protocol, requests/s, bytes, workers, connections) {:?}, B has {} with {:?}; compare results of the \
         same load",
        first.scenario.name,
        loads[0],
        second.scenario.name,
        loads[1]
    );
    ensure!(a.rounds.max(b.rounds) <= MAX_ROUNDS, "a result has more than {MAX_ROUNDS} rounds");
    let (of_first, of_second) = (series_of(first), series_of(second));
    let common = of_first.into_iter().filter(|series| of_second.contains(series));
    let compared =
        common.filter(|series| relative_to.is_none() || series.peer.is_some() && series.peer != relative_to);
    let mut rows = Vec::new();
    for series in compared {
        for figure in second.scenario.figures() {
            let strata = strata(first, second, (series, relative_to), figure);
            let limits = &second.scenario.acceptance.limits;
            let has_limit =
                limits.iter().any(|limit| limit.series() == series && limit.metric == figure.metric);
            let found = judged(series, figure, &strata, bounds).into_iter();
            let found = found.chain(missing(series, figure, &strata));
            let found = found.filter(|row| has_limit || row.verdict != Verdict::InNeither);
            rows.extend(found.map(|row| DiffRow { has_limit, ..row }));
        }
    }
    ensure!(!rows.is_empty(), "no figure is in a result; run both with the same topologies and peers");
    Ok(rows)
}

/// Returns all topologies of a run with its peers, also those whose turns all failed or were not taken.
fn series_of(result: &ScenarioResult) -> Vec<Series> {
    let peers = [&Peer::ALL[..], &[Peer::Relay]].concat();
    let is_measured = |peer: &Peer| {
        result.report.peers.contains_key(peer.name())
            || result.report.runs.iter().any(|run| run.series.peer == Some(*peer))
    };
    let peers: Vec<Option<Peer>> = peers.into_iter().filter(is_measured).map(Some).collect();
    let settings = &result.report.settings;
    let of = |&topology: &Topology| {
        if topology == Topology::Baseline {
            return vec![Series::BASELINE];
        }
        let logs = |&peer: &Option<Peer>| {
            let of_variant = move |&variant: &Variant| {
                settings.access_logs.iter().map(move |&access_log| Series {
                    topology,
                    peer,
                    access_log,
                    variant,
                })
            };
            settings.variants.iter().filter(move |variant| variant.is_possible(peer)).flat_map(of_variant)
        };
        peers.iter().flat_map(logs).collect()
    };
    settings.topologies.iter().flat_map(of).collect()
}

/// Returns a message for each topology and peer that was measured only in one of the results.
fn differences(first: &ScenarioResult, second: &ScenarioResult) -> Vec<String> {
    let (of_first, of_second) = (series_of(first), series_of(second));
    let only = |own: &[Series], other: &[Series], name: &str| {
        let lacking = own.iter().filter(|series| !other.contains(series));
        let lines = lacking.map(|series| format!("not compared: {series} was measured only in {name}"));
        lines.collect::<Vec<_>>()
    };
    [only(&of_first, &of_second, "A"), only(&of_second, &of_first, "B")].concat()
}

/// Returns the values of both results for each number of connections; ratios to the peer `relative_to` if there is one.
fn strata(
    first: &ScenarioResult,
    second: &ScenarioResult,
    (series, relative_to): (Series, Option<Peer>),
    figure: &Figure,
) -> Vec<(usize, Stratum)> {
    let values = |result: &ScenarioResult, connections: usize| -> Vec<f64> {
        let own = result.report.metrics_by_round(series, connections);
        let other = relative_to
            .map(|peer| result.report.metrics_by_round(Series { peer: Some(peer), ..series }, connections));
        let value = |(round, metrics): (&u32, &BTreeMap<String, f64>)| {
            let value = *metrics.get(figure.metric)?;
            let Some(other) = &other else { return Some(value) };
            let other = *other.get(round)?.get(figure.metric)?;
            (other > 0.0).then_some(value / other)
        };
        own.iter().filter_map(value).collect()
    };
    let connections = first.report.settings.connections.iter();
    connections
        .map(|&number| (number, Stratum { first: values(first, number), second: values(second, number) }))
        .collect()
}

/// Returns the comparison at the numbers of connections at which both results have the figure in enough rounds, and the
/// comparison at the others. So a failed turn takes the verdict from its own number of connections alone.
fn judged(series: Series, figure: &Figure, strata: &[(usize, Stratum)], bounds: DiffBounds) -> Vec<DiffRow> {
    let common = strata.iter().filter(|(_, one)| !one.first.is_empty() && !one.second.is_empty());
    let (short, enough): (Vec<_>, Vec<_>) = common.cloned().partition(|(_, one)| bounds.is_short(one));
    let row = |strata: Vec<(usize, Stratum)>| {
        let (connections, strata): (Vec<usize>, Vec<Stratum>) = strata.into_iter().unzip();
        let (verdict, change) = judge(&strata, bounds)?;
        Some(DiffRow {
            series,
            metric: figure.metric,
            title: figure.title,
            verdict,
            connections,
            has_limit: false,
            change: Some(change),
        })
    };
    [enough, short].into_iter().filter_map(row).collect()
}

/// Compares a figure in the strata. Returns `None` if no stratum has values of both results.
pub(super) fn judge(strata: &[Stratum], bounds: DiffBounds) -> Option<(Verdict, FigureChange)> {
    let RankTest { p, least_p } = rank::test(strata)?;
    let ratio = |stratum: &Stratum| {
        let [a, b] = [&stratum.first, &stratum.second].map(|values| report::spread(values.clone()));
        let (a, b) = (a?.median, b?.median);
        // An added latency may be 0 or negative; then there is no meaningful ratio.
        (a > 0.0 && b > 0.0).then_some(b / a)
    };
    let ratio = report::spread(strata.iter().filter_map(ratio).collect());
    let change = ratio.map_or(0.0, |ratio| ratio.median - 1.0);
    let confidence = 100.0 * (1.0 - p);
    let is_different = confidence >= bounds.confidence && 100.0 * change.abs() >= bounds.threshold;
    let verdict = match change > 0.0 {
        _ if strata.iter().any(|stratum| bounds.is_short(stratum)) => Verdict::TooFewRounds,
        _ if !is_different => Verdict::Same,
        true => Verdict::Worse,
        false => Verdict::Better,
    };
    Some((verdict, FigureChange { ratio, confidence, greatest_confidence: 100.0 * (1.0 - least_p) }))
}

/// Returns true if both results have the same values in the same rounds, or one value in all rounds.
fn is_equal(stratum: &Stratum) -> bool {
    let pairs = stratum.first.iter().zip(&stratum.second);
    let is_same =
        stratum.first.len() == stratum.second.len() && pairs.into_iter().all(|(a, b)| a.total_cmp(b).is_eq());
    let mut all = stratum.first.iter().chain(&stratum.second);
    let first = all.next();
    is_same || all.all(|value| first.is_some_and(|first| first.total_cmp(value).is_eq()))
}

/// Returns a row each for the numbers of connections at which B, A, or both lack the figure.
fn missing(series: Series, figure: &Figure, strata: &[(usize, Stratum)]) -> Vec<DiffRow> {
    let verdict = |stratum: &Stratum| match (stratum.first.is_empty(), stratum.second.is_empty()) {
        (false, false) => None,
        (false, true) => Some(Verdict::OnlyInA),
        (true, false) => Some(Verdict::OnlyInB),
        (true, true) => Some(Verdict::InNeither),
    };
    let row = |is: Verdict| {
        let lacking = strata.iter().filter(|(_, stratum)| verdict(stratum) == Some(is));
        let connections: Vec<usize> = lacking.map(|(number, _)| *number).collect();
        (!connections.is_empty()).then_some(DiffRow {
            series,
            metric: figure.metric,
            title: figure.title,
            verdict: is,
            connections,
            has_limit: false,
            change: None,
        })
    };
    [Verdict::OnlyInA, Verdict::OnlyInB, Verdict::InNeither].into_iter().filter_map(row).collect()
}

fn text(rows: &[DiffRow], args: &DiffArgs) -> String {
    let head = ["topology", "peer", "connections", "figure", "verdict", "confidence %", "B / A"];
    let head = head.map(str::to_owned).to_vec();
    let line = |row: &DiffRow| {
        let numbers: Vec<String> = row.connections.iter().map(usize::to_string).collect();
        vec![
            row.series.topology.name().to_owned(),
            row.series.measured_with(),
            numbers.join(", "),
            row.title.to_owned(),
            row.verdict.name().to_owned(),
            row.change.map_or_else(|| "-".to_owned(), |change| format!("{:.1}", change.confidence)),
            row.change
                .and_then(|change| change.ratio)
                .map_or_else(|| "-".to_owned(), |ratio| cell(&ratio, 1.0, 2)),
        ]
    };
    let table = TextTable { head, rows: rows.iter().map(line).collect() };
    let outcomes: Vec<_> = rows.iter().map(|row| (row.verdict, row.change)).collect();
    let mut lines = explain(&outcomes, args, Some("numbers of connections"));
    if args.relative_to.is_none()
        && rows.iter().any(|row| {
            row.series.peer != Some(Peer::Skysail) && matches!(row.verdict, Verdict::Better | Verdict::Worse)
        })
    {
        lines.push(
            "Figures without skysail differ as well, so the machine was not the same; --relative-to PEER cancels its speed."
                .to_owned(),
        );
    }
    let lines: Vec<String> = lines.iter().map(|line| layout::paragraph(line)).collect();
    format!("{}\n\n{}\n", table.markdown(4), lines.join("\n"))
}

/// Returns the explanations of verdicts. `strata` names what a row combines; `None` if it has one stratum.
pub(super) fn explain(
    outcomes: &[(Verdict, Option<FigureChange>)],
    args: &DiffArgs,
    strata: Option<&str>,
) -> Vec<String> {
    let range = strata.map_or_else(String::new, |strata| format!(", and its range over the {strata}"));
    let place = strata.map_or_else(String::new, |strata| format!(" at these {strata}"));
    let mut lines = vec![format!(
        "B / A: ratio of the medians{range}; less is better, except for calls/s. A figure is better or worse if it changed by at least {} % with \
         a confidence of at least {} % (stratified Mann-Whitney test, two-sided), otherwise the same. Each figure is tested \
         separately, so some of many figures differ by chance.",
        args.threshold, args.confidence
    )];
    if outcomes.iter().any(|(verdict, _)| verdict.is_incomplete()) {
        lines.push(format!(
            "only in A, only in B, in neither: a result lacks the figure{place}, because all its turns failed or were not \
             taken."
        ));
    }
    if outcomes.iter().any(|(verdict, _)| *verdict == Verdict::TooFewRounds) {
        lines.push(format!(
            "too few rounds: a figure differs, and a result has fewer than {} rounds of it{place}. Measure more rounds, or accept \
             fewer with --min-rounds.",
            args.min_rounds
        ));
    }
    // More rounds do not change a figure that is the same in each round and result.
    let may_differ = |change: &FigureChange| {
        change.ratio.map_or(change.greatest_confidence > 0.0, |ratio| ratio.min < 1.0 || ratio.max > 1.0)
    };
    let is_short = |change: &FigureChange| change.greatest_confidence < args.confidence && may_differ(change);
    if outcomes.iter().any(|(_, change)| change.as_ref().is_some_and(is_short)) {
        lines.push(format!(
            "Some figures have too few rounds for a confidence of {} %; measure more rounds.",
            args.confidence
        ));
    }
    lines
}

fn threshold(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(percent @ 0.0..=1_000.0) => Ok(percent),
        _ => Err("must be a number of percent from 0 to 1000".to_owned()),
    }
}

fn confidence(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(percent @ 50.0..=99.999) => Ok(percent),
        _ => Err("must be a number of percent from 50 to 99.999".to_owned()),
    }
}

#[cfg(test)]
mod tests;
