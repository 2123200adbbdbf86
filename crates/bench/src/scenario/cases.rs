//! Studies of named cases: a scenario has a list of cases, each case has its own turns, and a result has a row for each
//! case.
//!
//! A study implements [`CaseStudy`]. [`run`](mod@run) takes its turns. [`result`] has the result file, its acceptance and
//! its summary. [`table`], [`page`] and [`diff`](mod@diff) show and compare results.

mod diff;
mod page;
mod result;
mod run;
mod table;

use std::{collections::BTreeMap, fmt::Debug};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    document::{Checked, ensure, text, within},
    format::Figure,
};

pub(super) use self::{
    diff::diff,
    page::section,
    result::{CaseReport, CaseResult, CaseSettings},
    run::{run, run_groups},
    table::markdown,
};
#[cfg(test)]
pub(super) use self::{
    diff::{compare, is_accepted},
    result::CaseRun,
};

/// A scenario of named cases.
pub(super) trait CaseStudy: Clone + Debug + Serialize + DeserializeOwned {
    /// A case to measure.
    type Case: Clone + Debug + PartialEq + Serialize + DeserializeOwned;
    /// A group of figures.
    type Group: Copy;
    /// Result of a turn.
    type Measurement: Clone + Debug + Serialize + DeserializeOwned;

    /// Titles of the first two columns: the case, and the value of [`CaseStudy::amount`].
    const COLUMNS: [&'static str; 2];

    /// Returns name, title and question.
    fn heading(&self) -> [&str; 3];

    /// Returns what tables and plots show, and what `bench diff` compares.
    fn groups(&self) -> &[Self::Group];

    /// Returns the maximum medians.
    fn limits(&self) -> &[CaseLimit];

    /// Returns the name of a case, which is unique in the scenario.
    fn name(case: &Self::Case) -> &str;

    /// Returns the title of the section that has the case.
    fn section(case: &Self::Case) -> &str;

    /// Returns true if the case has figures of Skysail, which `bench diff` compares.
    fn is_own(case: &Self::Case) -> bool;

    /// Returns true if the figure is one of Skysail, which `bench diff` compares.
    fn is_own_figure(_: &Figure) -> bool {
        true
    }

    /// Returns the value of the second column, from a turn.
    fn amount(measurement: &Self::Measurement) -> String;

    /// Returns the most important figures of a turn, for its line of progress.
    fn progress(measurement: &Self::Measurement) -> String;

    /// Returns why the result of a turn of this case is not accepted.
    fn violation(&self, case: &str, measurement: &Self::Measurement) -> Option<String>;

    /// Returns the figures that others have published.
    fn published(&self) -> &[PublishedCase];

    /// Returns the figures of a group.
    fn figures(group: Self::Group) -> &'static [Figure];

    /// Returns the title of a group.
    fn group_title(group: Self::Group) -> &'static str;

    /// Returns the plots of a group. The figures of a plot are the parts of its bars, or have bars of their own.
    fn plots(group: Self::Group) -> Vec<Vec<&'static Figure>>;

    /// Returns true if the figures of a plot add up, so that they are the parts of one bar.
    fn are_parts(_: Self::Group) -> bool {
        true
    }

    /// Returns the figures of a turn by name.
    fn metrics(measurement: &Self::Measurement) -> BTreeMap<String, f64>;

    /// Returns the name of the case with which a case is compared in each round, if there is one.
    fn reference<'a>(_: &Self::Case, _: &'a [Self::Case]) -> Option<&'a str> {
        None
    }

    /// Returns the figures of a turn that are relative to the turn of the reference in the same round.
    fn relative(_: &Self::Measurement, _: &Self::Measurement) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }

    /// Returns the explanations of the figures.
    fn legend(&self, report: &CaseReport<Self>) -> Vec<String>;

    /// Returns the method of measurement.
    fn method(&self, settings: &CaseSettings<Self::Case>) -> String;
}

/// Conditions that a result of a study with requests must meet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CaseAcceptance {
    /// Maximum share of failed requests of each turn, in percent. Default: 0.
    #[serde(default)]
    pub(super) failed_percent: f64,
    /// Maximum medians. They are checked only in the size `default`.
    #[serde(default)]
    pub(super) limits: Vec<CaseLimit>,
}

impl CaseAcceptance {
    /// Checks the bounds, with these figures and cases.
    pub(super) fn check<'a>(
        &self,
        figures: impl Iterator<Item = &'a Figure> + Clone,
        cases: &[&str],
    ) -> Checked {
        within("acceptance.failed_percent", self.failed_percent, 0.0, 100.0)?;
        check_limits(&self.limits, figures, cases, "case")
    }

    /// Returns why a turn with these numbers of requests is not accepted.
    pub(super) fn violation(&self, failed: u64, requests: u64) -> Option<String> {
        let most = self.failed_percent;
        (failed as f64 * 100.0 > most * requests as f64)
            .then(|| format!("{failed} of {requests} requests failed, at most {most} % may fail,"))
    }
}

/// Maximum of the median of a figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CaseLimit {
    pub(super) metric: String,
    #[serde(alias = "input")]
    pub(super) case: String,
    pub(super) at_most: f64,
}

/// Figures that others have published for a question of this kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PublishedCase {
    /// Name and version of the mesh, and what was measured.
    pub(super) system: String,
    /// Document or file, with its date and its method of measurement.
    pub(super) source: String,
    /// Number of sidecars, and of requests per second in the whole mesh. Absent if the source does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sidecars: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rate: Option<f64>,
    /// Figures by their names in results.
    pub(super) metrics: BTreeMap<String, f64>,
}

/// Checks published figures.
pub(super) fn check_published<'a>(
    all: &[PublishedCase],
    figures: impl Iterator<Item = &'a Figure> + Clone,
) -> Checked {
    for (index, published) in all.iter().enumerate() {
        let field = |field: &str| format!("published[{index}].{field}");
        text(&field("system"), &published.system, 60)?;
        text(&field("source"), &published.source, 500)?;
        within(&field("rate"), published.rate.unwrap_or_default(), 0.0, 1e9)?;
        for (metric, value) in &published.metrics {
            let field = field(&format!("metrics.{metric}"));
            is_metric(&field, metric, figures.clone())?;
            within(&field, *value, 0.0, 1e12)?;
        }
    }
    Ok(())
}

/// Checks that a figure has this name.
pub(super) fn is_metric<'a>(
    field: &str,
    metric: &str,
    mut figures: impl Iterator<Item = &'a Figure> + Clone,
) -> Checked {
    let names = figures.clone();
    ensure(figures.any(|figure| figure.metric == metric), field, || {
        let names: Vec<&str> = names.map(|figure| figure.metric).collect();
        format!("no such metric; use {}", names.join(", "))
    })
}

/// Checks the limits of a scenario with these figures and cases. `case` is the name of a case in the scenario's format.
pub(super) fn check_limits<'a>(
    limits: &[CaseLimit],
    figures: impl Iterator<Item = &'a Figure> + Clone,
    cases: &[&str],
    case: &str,
) -> Checked {
    for (index, limit) in limits.iter().enumerate() {
        let field = |field: &str| format!("acceptance.limits[{index}].{field}");
        is_metric(&field("metric"), &limit.metric, figures.clone())?;
        ensure(cases.contains(&&*limit.case), &field(case), || {
            format!("must be one of {}, else the limit is never checked", cases.join(", "))
        })?;
        within(&field("at_most"), limit.at_most, 0.0, 1e12)?;
    }
    Ok(())
}
