//! Result of a scenario of cases: all turns, and medians and ranges over the rounds.

use std::collections::BTreeMap;

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use skysail_core::stdio;

use super::{CaseLimit, CaseStudy};
use crate::{
    foreign_load::{self, ForeignLoad},
    report::{self, Machine, Program, Spread},
    scenario::{BENCHMARK, FORMAT, format::SizeName},
    stage::{self, deduplicate},
};

/// The result file; `docs/scenarios.md` describes its format.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound = "S: CaseStudy")]
pub(in crate::scenario) struct CaseResult<S: CaseStudy> {
    pub(in crate::scenario) scenario: S,
    pub(in crate::scenario) size: SizeName,
    /// Conditions of the scenario that the result does not meet.
    pub(in crate::scenario) violations: Vec<String>,
    #[serde(flatten)]
    pub(in crate::scenario) report: CaseReport<S>,
}

/// Turns of a run. The first fields are those of all result files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound = "S: CaseStudy")]
pub(in crate::scenario) struct CaseReport<S: CaseStudy> {
    pub(super) format: u32,
    pub(super) benchmark: String,
    pub(super) version: String,
    #[serde(default)]
    pub(in crate::scenario) commit: Option<String>,
    pub(in crate::scenario) started: u64,
    pub(in crate::scenario) interrupted: bool,
    pub(in crate::scenario) machine: Machine,
    pub(in crate::scenario) settings: CaseSettings<S::Case>,
    pub(super) peers: BTreeMap<String, Program>,
    pub(in crate::scenario) runs: Vec<CaseRun<S::Measurement>>,
    /// Attempts at disturbed turns that do not count, because another attempt is in `runs`.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub(in crate::scenario) repeated: Vec<CaseRun<S::Measurement>>,
    /// Computed from the turns.
    #[serde(skip_deserializing)]
    pub(in crate::scenario) summary: Vec<CaseSummary>,
}

/// Settings of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scenario) struct CaseSettings<C> {
    #[serde(alias = "inputs")]
    pub(in crate::scenario) cases: Vec<C>,
    pub(in crate::scenario) rounds: u32,
    pub(in crate::scenario) seconds: f64,
    pub(in crate::scenario) warmup: f64,
}

/// A turn.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::scenario) struct CaseRun<M> {
    pub(in crate::scenario) round: u32,
    #[serde(alias = "input")]
    pub(in crate::scenario) case: String,
    #[serde(flatten)]
    pub(in crate::scenario) measurement: Option<M>,
    pub(in crate::scenario) error: Option<String>,
    /// What the machine lacks for the turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::scenario) unavailable: Option<String>,
    /// Other processes during the turn. Absent if it was too short to know, and in results of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::scenario) busy: Option<ForeignLoad>,
}

/// A case over the rounds.
#[derive(Debug, Serialize)]
pub(in crate::scenario) struct CaseSummary {
    pub(in crate::scenario) case: String,
    /// Text of the second column; empty if all turns failed.
    #[serde(skip)]
    pub(super) amount: String,
    /// Number of successful turns, and of failed ones.
    pub(super) rounds: usize,
    pub(super) failed: usize,
    /// The machine lacks something for the case.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) unavailable: bool,
    pub(in crate::scenario) metrics: BTreeMap<String, Spread>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

impl<S: CaseStudy> CaseResult<S> {
    /// Returns the result of these turns, with its summary. The limits are checked in the size `default`.
    pub(in crate::scenario) fn new(scenario: S, size: SizeName, mut report: CaseReport<S>) -> Self {
        report.summarize();
        let mut violations = report.refused(&scenario);
        if size == SizeName::Default {
            violations.extend(report.beyond(&scenario));
        }
        Self { scenario, size, violations, report }
    }

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

    /// Returns true if all turns were taken and none failed. Prints a message if not.
    pub(in crate::scenario) fn is_complete(&self) -> bool {
        let report = &self.report;
        if report.interrupted {
            stdio::print_error(format_args!("interrupted after {} turns", report.runs.len()));
        }
        let mut failed = report.runs.iter().filter(|run| run.error.is_some());
        !report.interrupted && failed.next().is_none()
    }
}

impl<C> CaseSettings<C> {
    /// Returns the method of measurement of a study whose turns have a window. `how` is the end of the sentence.
    pub(in crate::scenario) fn method(&self, how: &str) -> String {
        format!(
            "Medians of {} rounds in which all cases take turns of at least {} s after {} s of warm-up, {how}",
            self.rounds, self.seconds, self.warmup
        )
    }
}

impl<S: CaseStudy> CaseReport<S> {
    /// Returns a report of these turns.
    pub(in crate::scenario) fn new(
        (started, interrupted): (u64, bool),
        machine: Machine,
        settings: CaseSettings<S::Case>,
        peers: BTreeMap<String, Program>,
        runs: Vec<CaseRun<S::Measurement>>,
    ) -> Self {
        Self {
            format: FORMAT,
            benchmark: BENCHMARK.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: stage::commit(),
            started,
            interrupted,
            machine,
            settings,
            peers,
            runs,
            repeated: Vec::new(),
            summary: Vec::new(),
        }
    }

    /// Computes the summary of the turns.
    fn summarize(&mut self) {
        self.summary = self.settings.cases.iter().map(|case| self.row(S::name(case))).collect();
    }

    fn row(&self, case: &str) -> CaseSummary {
        let rounds = self.metrics(case);
        let mut values: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (name, value) in rounds.iter().flatten() {
            values.entry(name).or_default().push(*value);
        }
        let metrics =
            values.into_iter().filter_map(|(name, values)| Some((name.to_owned(), report::spread(values)?)));
        let measured = self.runs_of(case).find_map(|run| run.measurement.as_ref());
        CaseSummary {
            case: case.to_owned(),
            amount: measured.map(S::amount).unwrap_or_default(),
            rounds: rounds.len(),
            failed: self.runs_of(case).filter(|run| run.error.is_some()).count(),
            unavailable: self.runs_of(case).any(|run| run.unavailable.is_some()),
            metrics: metrics.collect(),
        }
    }

    fn runs_of(&self, case: &str) -> impl Iterator<Item = &CaseRun<S::Measurement>> {
        self.runs.iter().filter(move |run| run.case == case)
    }

    /// Returns the figures of a case by name, of each successful turn.
    pub(super) fn metrics(&self, case: &str) -> Vec<BTreeMap<String, f64>> {
        let cases = &self.settings.cases;
        let of_case = cases.iter().find(|of| S::name(of) == case);
        let reference = of_case.and_then(|of| S::reference(of, cases));
        let in_round = |name: &str, round: u32| {
            self.runs_of(name).find(|run| run.round == round).and_then(|run| run.measurement.as_ref())
        };
        let figures = |run: &CaseRun<S::Measurement>| {
            let measured = run.measurement.as_ref()?;
            let mut figures = S::metrics(measured);
            if let Some(other) = reference.and_then(|name| in_round(name, run.round)) {
                figures.extend(S::relative(measured, other));
            }
            Some(figures)
        };
        self.runs_of(case).filter_map(figures).collect()
    }

    /// Returns what the machine lacks for some of the cases, each once.
    pub(super) fn unavailable(&self) -> Vec<&str> {
        let mut reasons: Vec<&str> = self.runs.iter().filter_map(|run| run.unavailable.as_deref()).collect();
        deduplicate(&mut reasons);
        reasons
    }

    /// Returns the sections with the rows of their cases.
    pub(super) fn sections(&self) -> Vec<(&str, Vec<&CaseSummary>)> {
        let mut sections: Vec<(&str, Vec<&CaseSummary>)> = Vec::new();
        for (case, row) in self.settings.cases.iter().zip(&self.summary) {
            let title = S::section(case);
            match sections.iter_mut().find(|(of, _)| *of == title) {
                Some((_, rows)) => rows.push(row),
                None => sections.push((title, vec![row])),
            }
        }
        sections
    }

    /// Returns a line about disturbed turns, if there were any.
    pub(super) fn disturbed(&self) -> Option<String> {
        foreign_load::disturbed(self.runs.iter().map(|run| run.busy), self.repeated.len())
    }

    /// Returns a message for each turn that is not accepted. A failed request is not hidden by a repeat of its turn.
    fn refused(&self, scenario: &S) -> Vec<String> {
        let refused = |run: &CaseRun<S::Measurement>| {
            let why = scenario.violation(&run.case, run.measurement.as_ref()?)?;
            Some(format!("{why} in round {}, {} {}", run.round, S::COLUMNS[0], run.case))
        };
        self.runs.iter().chain(&self.repeated).filter_map(refused).collect()
    }

    /// Returns a message for each median above its limit, and for each figure with a limit that no turn has.
    fn beyond(&self, scenario: &S) -> Vec<String> {
        let beyond = |limit: &CaseLimit| {
            let CaseLimit { metric, case, at_most } = limit;
            let what = S::COLUMNS[0];
            let row = self.summary.iter().find(|row| row.case == *case && row.rounds > 0)?;
            let Some(Spread { median, .. }) = row.metrics.get(metric) else {
                return Some(format!("{metric} was not measured for {what} {case}"));
            };
            (median > at_most)
                .then(|| format!("{metric} is {median:.1} for {what} {case}; at most {at_most} is accepted"))
        };
        scenario.limits().iter().filter_map(beyond).collect()
    }
}
