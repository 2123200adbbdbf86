//! `skysail load report`: shows results, those of Fortio too, side by side.

use std::{fs, path::PathBuf};

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use skysail_core::stdio;

use crate::{
    result::{HistogramData, RunResult},
    text,
};

/// Settings of `skysail load report`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReportArgs {
    /// Results of `skysail load` or of Fortio (JSON).
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

/// Prints the results as a table.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn run(args: &ReportArgs) -> anyhow::Result<()> {
    let mut results = Vec::new();
    for file in &args.files {
        let json = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let result: RunResult = serde_json::from_str(&json)
            .with_context(|| format!("{} is not a result of a load", file.display()))?;
        results.push(result);
    }
    stdio::print(table(&results))?;
    Ok(())
}

fn table(results: &[RunResult]) -> Table {
    let mut percentiles: Vec<f64> = results
        .iter()
        .flat_map(|result| result.duration_histogram.percentiles.iter().flatten())
        .map(|one| one.percentile)
        .collect();
    percentiles.sort_by(f64::total_cmp);
    percentiles.dedup();
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let mut header = vec!["result".to_owned(), "connections".to_owned(), "requests".to_owned()];
    header.extend(["requests/s", "failed %"].map(str::to_owned));
    header.extend(percentiles.iter().map(|percentile| format!("P{percentile}")));
    header.push("max".to_owned());
    let columns = header.len();
    table.set_header(header);
    for column in table.column_iter_mut().take(columns).skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for result in results {
        let histogram = &result.duration_histogram;
        let failed = result.errors_duration_histogram.count as f64 * 100.0 / histogram.count.max(1) as f64;
        let mut row = vec![
            if result.labels.is_empty() { result.id.clone() } else { result.labels.clone() },
            text::number(result.num_threads),
            text::number(histogram.count),
            format!("{:.1}", result.actual_qps),
            format!("{failed:.2}"),
        ];
        row.extend(percentiles.iter().map(|percentile| value(histogram, *percentile)));
        row.push(text::time(histogram.max));
        table.add_row(row);
    }
    table
}

fn value(histogram: &HistogramData, percentile: f64) -> String {
    let found = histogram.percentiles.iter().flatten().find(|one| one.percentile == percentile);
    found.map_or_else(|| "-".to_owned(), |one| text::time(one.value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Fortio 1.66 writes it, shortened.
    const FORTIO: &str = r#"{
  "RunType": "HTTP", "Labels": "localhost , host", "StartTime": "2026-11-27T19:00:00.123456789Z",
  "RequestedQPS": "1000", "RequestedDuration": "5s", "ActualQPS": 999.7, "ActualDuration": 5001000000,
  "NumThreads": 16, "Version": "1.66.0",
  "DurationHistogram": {
    "Count": 5000, "Min": 0.0001, "Max": 0.01, "Sum": 1.5, "Avg": 0.0003, "StdDev": 0.0002,
    "Data": [{"Start": 0.0001, "End": 0.01, "Percent": 100, "Count": 5000}],
    "Percentiles": [{"Percentile": 50, "Value": 0.00025}, {"Percentile": 99.9, "Value": 0.009}]
  },
  "ErrorsDurationHistogram": {"Count": 0, "Min": 0, "Max": 0, "Sum": 0, "Avg": 0, "StdDev": 0, "Data": null},
  "Exactly": 0, "RunID": 0, "AccessLoggerInfo": "", "ID": "2026-11-27-190000_localhost_host",
  "RetCodes": {"200": 5000}, "IPCountMap": {"127.0.0.1:8080": 16}, "Insecure": false, "URL": "http://localhost:8080/",
  "NumConnections": 1, "Sizes": {"Count": 5000}, "HeaderSizes": {"Count": 5000}, "Sockets": [1], "SocketCount": 16,
  "ConnectionStats": {"Count": 16}, "AbortOn": 0
}"#;

    #[test]
    fn results_of_fortio_are_shown() {
        let fortio: RunResult = serde_json::from_str(FORTIO).unwrap();
        let other = RunResult { labels: "ours".to_owned(), ..RunResult::default() };
        let text = table(&[fortio, other]).to_string();
        for expected in ["localhost , host", "999.7", "250 µs", "9.00 ms", "10.0 ms", "P99.9", "| ours"] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}
