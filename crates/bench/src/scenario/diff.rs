//! `skysail bench diff`: two results, figure by figure.
//!
//! A row is a figure of a peer in a topology. The numbers of connections are the strata of one test ([`rank`]). So a
//! few rounds are enough, and there are fewer tests whose result may be due to chance.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use serde::Serialize;
use skysail_core::stdio;

use super::{
    ScenarioResult,
    format::{Figure, MAX_ROUNDS},
    rank::{self, RankTest, Stratum},
    read,
};
use crate::{
    layout::{self, TextTable},
    peers::Peer,
    report::{self, Spread, cell},
    stage::Output,
    topology::Topology,
};

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
    relative_to: Option<Peer>,

    /// Minimum change of the median, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0, value_parser = threshold)]
    threshold: f64,

    /// Minimum confidence that a change is not by chance, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, value_parser = confidence)]
    confidence: f64,

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
}

/// Comparison of a figure of a peer in a topology.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct DiffRow {
    pub(super) topology: Topology,
    /// `None` for the baseline.
    pub(super) peer: Option<Peer>,
    pub(super) metric: &'static str,
    /// Title of the figure in tables.
    #[serde(skip)]
    title: &'static str,
    /// Median of B divided by that of A: the median, least and greatest over the numbers of connections.
    pub(super) ratio: Spread,
    /// Confidence in percent that A and B differ.
    pub(super) confidence: f64,
    /// Maximum confidence that the test can reach with these numbers of rounds.
    pub(super) greatest_confidence: f64,
    pub(super) verdict: Verdict,
}

/// Compares two results. Returns false if a figure of skysail is worse.
///
/// # Errors
/// A file is not a result, or the results have different loads.
pub(crate) fn diff(args: &DiffArgs) -> anyhow::Result<bool> {
    let of =
        |file: &Path| read(file)?.with_context(|| format!("{} is not a result of bench run", file.display()));
    let (first, second) = (of(&args.first)?, of(&args.second)?);
    let rows = compare(&first, &second, args.relative_to, (args.threshold, args.confidence))?;
    match args.output {
        Output::Table => stdio::print(text(&rows, args))?,
        Output::Json => stdio::print(serde_json::to_string_pretty(&rows)?)?,
    }
    Ok(!rows.iter().any(|row| row.verdict == Verdict::Worse && row.peer == Some(Peer::Skysail)))
}

/// Returns a row for each figure that both results have. `bounds` are the minimum change and confidence, in percent.
///
/// # Errors
/// The results have different scenarios or loads, too many rounds, or no figure in common.
pub(super) fn compare(
    first: &ScenarioResult,
    second: &ScenarioResult,
    relative_to: Option<Peer>,
    bounds: (f64, f64),
) -> anyhow::Result<Vec<DiffRow>> {
    let (a, b) = (&first.report.settings, &second.report.settings);
    let loads =
        [a, b].map(|settings| (settings.qps, settings.payload, settings.workers, &settings.connections));
    ensure!(
        first.scenario.name == second.scenario.name && loads[0] == loads[1],
        "A has scenario {} with (requests/s, bytes, workers, connections) {:?}, B has {} with {:?}; compare results of the \
         same load",
        first.scenario.name,
        loads[0],
        second.scenario.name,
        loads[1]
    );
    ensure!(a.rounds.max(b.rounds) <= MAX_ROUNDS, "a result has more than {MAX_ROUNDS} rounds");
    let mut rows = Vec::new();
    for &topology in a.topologies.iter().filter(|topology| b.topologies.contains(topology)) {
        let peers: Vec<Option<Peer>> = if topology == Topology::Baseline {
            vec![None]
        } else {
            let all = [&Peer::ALL[..], &[Peer::Relay]].concat();
            all.into_iter().filter(|peer| Some(*peer) != relative_to).map(Some).collect()
        };
        for peer in peers.into_iter().filter(|peer| relative_to.is_none() || peer.is_some()) {
            let rows_of = second.scenario.figures().filter_map(|figure| {
                let strata = strata(first, second, (topology, peer, relative_to), figure);
                row((topology, peer), figure, &strata, bounds)
            });
            rows.extend(rows_of);
        }
    }
    ensure!(!rows.is_empty(), "no figure is in both results; run both with the same topologies and peers");
    Ok(rows)
}

/// Returns the values of both results for each number of connections; ratios to the peer `relative_to` if there is one.
fn strata(
    first: &ScenarioResult,
    second: &ScenarioResult,
    (topology, peer, relative_to): (Topology, Option<Peer>, Option<Peer>),
    figure: &Figure,
) -> Vec<Stratum> {
    let values = |result: &ScenarioResult, connections: usize| -> Vec<f64> {
        let own = result.report.metrics_by_round((topology, connections, peer));
        let other =
            relative_to.map(|peer| result.report.metrics_by_round((topology, connections, Some(peer))));
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
        .map(|&number| Stratum { first: values(first, number), second: values(second, number) })
        .collect()
}

fn row(
    (topology, peer): (Topology, Option<Peer>),
    figure: &Figure,
    strata: &[Stratum],
    (threshold, needed): (f64, f64),
) -> Option<DiffRow> {
    let RankTest { p, least_p } = rank::test(strata)?;
    let ratio = |stratum: &Stratum| {
        let [a, b] = [&stratum.first, &stratum.second].map(|values| report::spread(values.clone()));
        let (a, b) = (a?.median, b?.median);
        // An added latency may be 0 or negative; then there is no meaningful ratio.
        (a > 0.0 && b > 0.0).then_some(b / a)
    };
    let ratio = report::spread(strata.iter().filter_map(ratio).collect())?;
    let confidence = 100.0 * (1.0 - p);
    let is_different = confidence >= needed && 100.0 * (ratio.median - 1.0).abs() >= threshold;
    let verdict = match ratio.median > 1.0 {
        _ if !is_different => Verdict::Same,
        true => Verdict::Worse,
        false => Verdict::Better,
    };
    Some(DiffRow {
        topology,
        peer,
        metric: figure.metric,
        title: figure.title,
        ratio,
        confidence,
        greatest_confidence: 100.0 * (1.0 - least_p),
        verdict,
    })
}

fn text(rows: &[DiffRow], args: &DiffArgs) -> String {
    let head = ["topology", "peer", "figure", "verdict", "confidence %", "B / A"].map(str::to_owned).to_vec();
    let line = |row: &DiffRow| {
        let verdict = match row.verdict {
            Verdict::Better => "better",
            Verdict::Same => "same",
            Verdict::Worse => "worse",
        };
        vec![
            row.topology.name().to_owned(),
            row.peer.map_or("no sidecar", Peer::name).to_owned(),
            row.title.to_owned(),
            verdict.to_owned(),
            format!("{:.1}", row.confidence),
            cell(&row.ratio, 1.0, 2),
        ]
    };
    let table = TextTable { head, rows: rows.iter().map(line).collect() };
    let mut lines = vec![format!(
        "B / A: ratio of the medians, and its range over the numbers of connections; less is better. A figure is better or \
         worse if it changed by at least {} % with a confidence of at least {} % (stratified Mann-Whitney test, two-sided), \
         otherwise the same. Each figure is tested separately, so some of many figures differ by chance.",
        args.threshold, args.confidence
    )];
    if rows.iter().any(|row| row.greatest_confidence < args.confidence) {
        lines.push(format!(
            "Some figures have too few rounds for a confidence of {} %; measure more rounds.",
            args.confidence
        ));
    }
    if args.relative_to.is_none()
        && rows.iter().any(|row| row.peer != Some(Peer::Skysail) && row.verdict != Verdict::Same)
    {
        lines.push(
            "Figures without skysail differ as well, so the machine was not the same; --relative-to PEER cancels its speed."
                .to_owned(),
        );
    }
    let lines: Vec<String> = lines.iter().map(|line| layout::paragraph(line)).collect();
    format!("{}\n\n{}\n", table.markdown(3), lines.join("\n"))
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
