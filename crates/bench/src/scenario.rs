//! `skysail bench run`, `report` and `diff`: scenarios as files, and their results.
//!
//! [`format`](mod@format) reads a scenario. [`run`](mod@run) takes its turns and stores a [`ScenarioResult`]. [`table`]
//! and [`page`](mod@page) with [`figures`] show results together with figures that others have published. [`diff`](mod@diff) compares
//! two results. [`csv`] reads and writes the columns of Istio's `benchmark.csv`.

mod csv;
mod diff;
mod figures;
mod format;
mod page;
mod rank;
mod run;
mod table;

use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use self::format::{Scenario, SizeName};
pub(crate) use self::{
    diff::{DiffArgs, diff},
    page::{PageArgs, page},
    run::{RunArgs, run},
};
use crate::{report::LatencyReport, results};

/// Value of `benchmark` in result files.
const BENCHMARK: &str = "scenario";
/// Format of result files.
const FORMAT: u32 = 1;
/// Maximum size of a result file in bytes.
const MAX_FILE: u64 = 64 << 20;

/// The result file; `docs/scenarios.md` describes its format.
#[derive(Debug, Serialize, Deserialize)]
struct ScenarioResult {
    scenario: Scenario,
    size: SizeName,
    /// Conditions of the scenario that the result does not meet.
    violations: Vec<String>,
    #[serde(flatten)]
    report: LatencyReport,
}

/// Reads a result file and computes the summary of the result. Returns `None` for the result of another benchmark.
fn read(file: &Path) -> anyhow::Result<Option<ScenarioResult>> {
    let name = file.display();
    let text = results::read_text(file, MAX_FILE).with_context(|| format!("cannot read {name}"))?;
    parse(text.as_bytes()).with_context(|| format!("{name} is not a result of bench run"))
}

fn parse(text: &[u8]) -> anyhow::Result<Option<ScenarioResult>> {
    let value: serde_json::Value = serde_json::from_slice(text)?;
    if value.get("benchmark").and_then(serde_json::Value::as_str) != Some(BENCHMARK) {
        return Ok(None);
    }
    let mut result: ScenarioResult = serde_json::from_value(value)?;
    ensure!(
        result.report.format == FORMAT,
        "it has format {}; this program reads format {FORMAT}",
        result.report.format
    );
    result.report.summarize();
    Ok(Some(result))
}

#[cfg(test)]
mod tests;
