//! Which percentiles the number of samples of a turn supports.
//!
//! The P99 of 60 requests is their greatest value, and says nothing about one request in a hundred. Result files have all
//! percentiles of each turn as they were computed. Summaries, tables, plots, CSV and comparisons leave out those that
//! too few samples support.

use std::collections::BTreeMap;

/// Parts of the names of figures, with the number of samples that has [`MIN_BEYOND`] beyond this percentile. The first
/// that fits holds.
const PERCENTILES: [(&str, u64); 4] = [
    ("p99_9", 1_000 * MIN_BEYOND),
    ("p99", 100 * MIN_BEYOND),
    ("p90", 10 * MIN_BEYOND),
    ("p50", 2 * MIN_BEYOND),
];
/// Minimum number of samples beyond a percentile.
const MIN_BEYOND: u64 = 10;
/// Explanation for reports.
pub(crate) const RULE: &str = "A turn has a percentile only if at least 10 of its samples are beyond it: P90 needs 100 samples, \
                               P99 needs 1,000, and P99.9 needs 10,000. \"-\": all turns had fewer.";

/// Returns true if this number of samples supports the figure. Figures that are no percentiles need none.
pub(crate) fn is_supported(metric: &str, samples: u64) -> bool {
    least(metric).is_none_or(|least| samples >= least)
}

/// Returns true if the figure is a percentile.
pub(crate) fn is_percentile(metric: &str) -> bool {
    least(metric).is_some()
}

/// Removes the percentiles that this number of samples does not support.
pub(crate) fn retain(metrics: &mut BTreeMap<String, f64>, samples: u64) {
    metrics.retain(|metric, _| is_supported(metric, samples));
}

/// Returns a percentile as text for lines of progress; `-` if the samples do not support it.
pub(crate) fn shown(metric: &str, value: f64, samples: u64) -> String {
    if is_supported(metric, samples) { format!("{value:.0}") } else { "-".to_owned() }
}

fn least(metric: &str) -> Option<u64> {
    let is_part =
        |part: &str| metric.match_indices(part).any(|(at, _)| at == 0 || metric[..at].ends_with('_'));
    PERCENTILES.iter().find(|(part, _)| is_part(part)).map(|(_, least)| *least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_needs_ten_samples_beyond_it() {
        for (metric, least) in [
            ("latency_p50_us", 20),
            ("p90", 100),
            ("added_p99_us", 1_000),
            ("churn_p99_ms", 1_000),
            ("latency_p99_9_us", 10_000),
        ] {
            assert!(is_supported(metric, least) && !is_supported(metric, least - 1), "{metric}");
        }
        assert!(is_supported("cpu_proxies_us_per_request", 0) && !is_percentile("resident_mb"));
        let mut metrics: BTreeMap<String, f64> =
            ["latency_p50_us", "latency_p99_us", "bytes"].map(|name| (name.to_owned(), 1.0)).into();
        retain(&mut metrics, 60);
        assert_eq!(metrics.into_keys().collect::<Vec<_>>(), ["bytes", "latency_p50_us"]);
        assert_eq!([60, 2_000].map(|samples| shown("p99", 7.4, samples)), ["-", "7"]);
    }
}
