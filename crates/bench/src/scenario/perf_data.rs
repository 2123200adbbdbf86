//! Writes figures in the format of ClusterLoader2's results (kubernetes/perf-tests,
//! `clusterloader2/pkg/measurement/util/perftype.go`), which Perfdash draws.

use std::collections::BTreeMap;

use serde::Serialize;

use super::cases::{CaseResult, CaseStudy};

/// Version of the figures, by which their readers notice changes.
const VERSION: &str = "v1";

/// The file.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PerfData {
    version: &'static str,
    data_items: Vec<PerfItem>,
    labels: BTreeMap<&'static str, String>,
}

/// A figure of a case.
#[derive(Debug, Serialize)]
struct PerfItem {
    /// Minimum, median and maximum over the rounds, as percentiles.
    data: BTreeMap<&'static str, f64>,
    unit: &'static str,
    labels: BTreeMap<&'static str, String>,
}

/// Returns the figures of all cases.
pub(super) fn of<S: CaseStudy>(result: &CaseResult<S>) -> PerfData {
    let report = &result.report;
    let mut data_items = Vec::new();
    for row in &report.summary {
        for (metric, spread) in &row.metrics {
            data_items.push(PerfItem {
                data: [("Perc0", spread.min), ("Perc50", spread.median), ("Perc100", spread.max)].into(),
                unit: unit(metric),
                labels: [("Case", row.case.clone()), ("Metric", metric.clone())].into(),
            });
        }
    }
    let commit = report.commit.as_ref().map(|commit| ("commit", commit.clone()));
    let name = ("scenario", result.scenario.heading()[0].to_owned());
    PerfData { version: VERSION, data_items, labels: [name].into_iter().chain(commit).collect() }
}

/// Returns the unit of a figure, which is the end of its name.
fn unit(metric: &str) -> &'static str {
    let units = [("_ms", "ms"), ("_seconds", "s"), ("_mb", "MB"), ("_per_second", "1/s")];
    units.iter().find(|(end, _)| metric.ends_with(end)).map_or("", |(_, unit)| unit)
}
