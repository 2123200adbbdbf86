//! `skysail bench run`, `report` and `diff`: scenarios as files, and their results.
//!
//! [`study`] reads scenarios and results of all studies. [`generation`] is the study of the generation of configuration,
//! [`mesh`] that of a whole mesh, [`networks`] that of networks of several kinds, [`airline`] that of the airline
//! example, [`command`] those of other benchmarks; they are studies of [`cases`]. [`site`] shows the history of all
//! results, [`size`](mod@size) computes the size of a mesh from them. The other modules are those of
//! traffic: [`format`](mod@format) reads a scenario, [`sizes`] has the sizes of a run.
//! [`run`](mod@run) takes its turns and stores a [`ScenarioResult`]. [`table`] and [`page`](mod@page) with [`figures`] show
//! results together with figures that others have published. [`diff`](mod@diff) compares two results. [`csv`] reads and
//! writes the columns of Istio's `benchmark.csv`, [`perf_data`] writes the results of ClusterLoader2.

mod airline;
mod cases;
mod command;
mod csv;
mod diff;
mod document;
mod figures;
mod format;
mod generation;
mod mesh;
mod networks;
mod page;
mod perf_data;
mod rank;
mod run;
mod site;
mod size;
mod sizes;
mod study;
mod table;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use self::format::{Scenario, SizeName};
pub(crate) use self::{
    diff::{DiffArgs, diff},
    page::{PageArgs, page},
    run::{RunArgs, run},
    size::{SizeArgs, size},
};
use crate::report::LatencyReport;

/// Value of `benchmark` in result files.
const BENCHMARK: &str = "scenario";
/// Price of a vCPU for a month in dollars: 50,000 for 1,200 vCPU, from "Benchmarking Istio and Linkerd CPU" (M. Kipper,
/// 2019).
const CPU_PRICE: f64 = 41.67;
/// Format of result files.
const FORMAT: u32 = 1;

/// The result file of a scenario of traffic; `docs/scenarios.md` describes its format.
#[derive(Debug, Serialize, Deserialize)]
struct ScenarioResult {
    scenario: Scenario,
    size: SizeName,
    /// Conditions of the scenario that the result does not meet.
    violations: Vec<String>,
    /// Flame graphs were recorded in the first round, which costs CPU time. `bench diff` and the site do not use the result.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    perf: bool,
    #[serde(flatten)]
    report: LatencyReport,
}

impl ScenarioResult {
    /// Reads the JSON of a result file, and computes the summary.
    ///
    /// # Errors
    /// The fields are not those of a result, or the format is another.
    fn of(value: serde_json::Value) -> anyhow::Result<Self> {
        let mut result: Self = serde_json::from_value(value)?;
        let format = result.report.format;
        ensure!(format == FORMAT, "it has format {format}; this program reads format {FORMAT}");
        result.report.summarize();
        Ok(result)
    }
}

#[cfg(test)]
mod tests;
