//! Result of a scenario of generation: all turns, and medians and ranges over the rounds.

use std::collections::BTreeMap;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::format::GenerationScenario;
use crate::{
    generation::{GenerationInput, GenerationMeasurement, ProxyKind},
    report::{self, Machine, Program, Spread},
    scenario::{FORMAT, format::SizeName},
};

/// The result file; `docs/scenarios.md` describes its format.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::scenario) struct GenerationResult {
    pub(super) scenario: GenerationScenario,
    pub(super) size: SizeName,
    /// Conditions of the scenario that the result does not meet.
    pub(super) violations: Vec<String>,
    #[serde(flatten)]
    pub(super) report: GenerationReport,
}

/// Turns of a run. The first fields are those of all result files.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GenerationReport {
    pub(super) format: u32,
    pub(super) benchmark: String,
    pub(super) version: String,
    #[serde(default)]
    pub(super) commit: Option<String>,
    pub(super) started: u64,
    pub(super) interrupted: bool,
    pub(super) machine: Machine,
    pub(super) settings: GenerationSettings,
    /// This program alone: the phases are its functions.
    pub(super) peers: BTreeMap<String, Program>,
    pub(super) runs: Vec<GenerationRun>,
    /// Computed from the turns.
    #[serde(skip_deserializing)]
    pub(super) summary: Vec<GenerationSummary>,
}

/// Settings of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct GenerationSettings {
    pub(super) inputs: Vec<GenerationInput>,
    pub(super) rounds: u32,
    pub(super) seconds: f64,
    pub(super) warmup: f64,
}

/// A turn.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct GenerationRun {
    pub(super) round: u32,
    pub(super) input: String,
    #[serde(flatten)]
    pub(super) measurement: Option<GenerationMeasurement>,
    pub(super) error: Option<String>,
}

/// An input over the rounds.
#[derive(Debug, Serialize)]
pub(super) struct GenerationSummary {
    pub(super) input: String,
    /// Number of objects; 0 if all turns failed.
    pub(super) objects: usize,
    /// Number of successful turns, and of failed ones.
    pub(super) rounds: usize,
    pub(super) failed: usize,
    pub(super) metrics: BTreeMap<String, Spread>,
}

impl GenerationResult {
    /// Reads the JSON of a result file, and computes the summary.
    ///
    /// # Errors
    /// The fields are not those of a result, or the format is another.
    pub(in crate::scenario) fn of(value: serde_json::Value) -> anyhow::Result<Self> {
        let mut result: Self = serde_json::from_value(value)?;
        let format = result.report.format;
        ensure!(format == FORMAT, "it has format {format}; this program reads format {FORMAT}");
        result.report.summarize();
        Ok(result)
    }
}

impl GenerationReport {
    /// Computes the summary of the turns so far.
    pub(super) fn summarize(&mut self) {
        self.summary = self.settings.inputs.iter().map(|input| self.row(input.name())).collect();
    }

    fn row(&self, input: &str) -> GenerationSummary {
        let rounds = self.metrics(input);
        let mut values: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (name, value) in rounds.iter().flatten() {
            values.entry(name).or_default().push(*value);
        }
        let metrics =
            values.into_iter().filter_map(|(name, values)| Some((name.to_owned(), report::spread(values)?)));
        let measured = self.runs_of(input).find_map(|run| run.measurement.as_ref());
        GenerationSummary {
            input: input.to_owned(),
            objects: measured.map_or(0, |measured| measured.objects),
            rounds: rounds.len(),
            failed: self.runs_of(input).filter(|run| run.error.is_some()).count(),
            metrics: metrics.collect(),
        }
    }

    fn runs_of(&self, input: &str) -> impl Iterator<Item = &GenerationRun> {
        self.runs.iter().filter(move |run| run.input == input)
    }

    /// Returns the figures of an input by name, of each successful turn.
    pub(super) fn metrics(&self, input: &str) -> Vec<BTreeMap<String, f64>> {
        self.runs_of(input).filter_map(|run| run.measurement.as_ref()).map(metrics).collect()
    }

    /// Returns the kinds of proxies with the rows of their inputs.
    pub(super) fn by_proxy(&self) -> Vec<(ProxyKind, Vec<&GenerationSummary>)> {
        let is_of = |kind: ProxyKind, row: &GenerationSummary| {
            let mut inputs = self.settings.inputs.iter();
            inputs.any(|input| input.name() == row.input && input.template.proxy() == kind)
        };
        let of = |kind| (kind, self.summary.iter().filter(|row| is_of(kind, row)).collect::<Vec<_>>());
        ProxyKind::ALL.map(of).into_iter().filter(|(_, rows)| !rows.is_empty()).collect()
    }
}

/// Returns the figures of a turn by their names in summaries.
pub(super) fn metrics(measurement: &GenerationMeasurement) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    let mut add = |name: String, value: f64| *metrics.entry(name).or_default() += value;
    for (phase, cost) in &measurement.phases {
        let whole = phase.is_compilation().then_some("compile");
        for name in [phase.name()].into_iter().chain(whole) {
            add(format!("{name}_cpu_us"), cost.cpu_us);
            add(format!("{name}_time_us"), cost.time_us);
        }
    }
    for (kind, count) in &measurement.resources {
        for prefix in [String::new(), format!("{kind}_")] {
            add(format!("{prefix}resources"), count.number as f64);
            add(format!("{prefix}bytes"), count.bytes as f64);
        }
    }
    metrics
}
