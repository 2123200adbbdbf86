//! Results as text for people.

use crate::result::{HistogramData, RunResult};

/// Share of the median latency above which the generator's own delay makes a result unreliable.
const LATE: f64 = 0.1;
/// Share of the time of the generator's threads above which the generator, not the target, limits the rate.
const BUSY: f64 = 0.9;

/// Returns the result as text.
pub(crate) fn of(result: &RunResult) -> String {
    let mut lines = vec![line("requests", requests(result)), line("responses", responses(result))];
    if !result.failures.is_empty() {
        lines.push(line("no response", failures(result)));
    }
    lines.push(line("latency", histogram(&result.duration_histogram)));
    if result.since_sent_histogram != result.duration_histogram {
        lines.push(line("since sent", histogram(&result.since_sent_histogram)));
    }
    if result.sizes.count > 0 {
        lines.push(line(
            "size",
            format!("{:.0} bytes (head {:.0})", result.sizes.avg, result.header_sizes.avg),
        ));
    }
    lines.push(line("sockets", sockets(result)));
    lines.push(line("generator", generator(result)));
    lines.extend(warnings(result).into_iter().map(|text| line("warning", text)));
    lines.join("\n")
}

fn line(name: &str, text: String) -> String {
    format!("{name:<12} {text}")
}

fn requests(result: &RunResult) -> String {
    let wanted = match result.requested_qps.as_str() {
        "max" => "closed loop".to_owned(),
        rate => format!("requested: {rate}/s"),
    };
    format!(
        "{} in {:.2} s: {}/s ({wanted})",
        number(result.duration_histogram.count),
        result.actual_duration as f64 / 1e9,
        number(result.actual_qps.round() as u64)
    )
}

fn responses(result: &RunResult) -> String {
    // Requests without a response have a line of their own.
    let mut codes = result.ret_codes.clone();
    codes.remove("-1");
    if let Some(count) = codes.get_mut("ERROR") {
        *count -= result.failures.values().sum::<u64>().min(*count);
    }
    codes.retain(|_, count| *count > 0);
    let text = counts(codes.iter());
    if text.is_empty() { "none".to_owned() } else { text }
}

fn failures(result: &RunResult) -> String {
    let one = |(name, count): (&String, &u64)| match result.failure_errors.get(name) {
        Some(error) => format!("{name}: {} ({error})", number(*count)),
        None => format!("{name}: {}", number(*count)),
    };
    result.failures.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn counts<'a>(of: impl Iterator<Item = (&'a String, &'a u64)>) -> String {
    let all: Vec<String> = of.map(|(name, count)| format!("{name}: {}", number(*count))).collect();
    all.join(", ")
}

fn histogram(of: &HistogramData) -> String {
    let percentiles = of.percentiles.iter().flatten();
    let mut all: Vec<String> =
        percentiles.map(|one| format!("P{} {}", one.percentile, time(one.value))).collect();
    all.push(format!("mean {}", time(of.avg)));
    all.push(format!("max {}", time(of.max)));
    all.join("  ")
}

fn sockets(result: &RunResult) -> String {
    let connect = &result.connection_stats;
    let took = if connect.count > 0 {
        format!(", opened in {} on average", time(connect.avg))
    } else {
        String::new()
    };
    format!("{} for {} connections{took}", number(result.socket_count), number(result.num_threads))
}

fn generator(result: &RunResult) -> String {
    let lateness = percentile(&result.generator_lateness, 99.0);
    let late = lateness.map_or_else(String::new, |late| format!(", P99 late by {}", time(late)));
    format!(
        "{:.1} µs of CPU for a request, {} % of {} threads{late}",
        result.generator_cpu * 1e6,
        (busy(result) * 100.0).round(),
        result.generator_threads
    )
}

/// Returns the share of the run in which the generator's threads used a CPU, on average.
fn busy(result: &RunResult) -> f64 {
    let cpu = result.generator_cpu * result.duration_histogram.count as f64;
    cpu / (result.actual_duration.max(1) as f64 / 1e9 * result.generator_threads.max(1) as f64)
}

fn percentile(of: &HistogramData, wanted: f64) -> Option<f64> {
    of.percentiles.iter().flatten().find(|one| one.percentile == wanted).map(|one| one.value)
}

/// Returns the reasons why the result may not describe the target.
pub(crate) fn warnings(result: &RunResult) -> Vec<String> {
    let mut warnings = Vec::new();
    if result.interrupted {
        warnings.push("the load ended early".to_owned());
    }
    if result.unsent > 0 {
        warnings.push(format!(
            "{} due requests were not sent or had no response at the end: the target was too slow for the rate; the \
             latencies do not include these requests",
            number(result.unsent)
        ));
    }
    if result.skipped > 0 {
        warnings.push(format!("{} overdue requests were skipped (-nocatchup)", number(result.skipped)));
    }
    let late = percentile(&result.generator_lateness, 99.0).unwrap_or(0.0);
    // Without P50 among the percentiles, the mean replaces it.
    let typical = percentile(&result.duration_histogram, 50.0).unwrap_or(result.duration_histogram.avg);
    if late > typical * LATE && late > 1e-4 {
        warnings.push(format!(
            "the generator itself was late by {} at P99: latencies include that; use fewer requests or more CPUs",
            time(late)
        ));
    }
    if result.requested_qps != "max" && busy(result) > BUSY {
        warnings.push(
            "the generator used all of its CPU: it limits the rate and the latencies, not the target"
                .to_owned(),
        );
    }
    warnings
}

/// Formats a time in seconds with three significant digits and a suitable unit.
pub(crate) fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        _ if seconds < 1e-3 => (seconds * 1e6, "µs"),
        _ if seconds < 1.0 => (seconds * 1e3, "ms"),
        _ => (seconds, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

/// Formats a number with a comma before each group of three digits.
pub(crate) fn number(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_readable() {
        assert_eq!([0, 12, 999, 1_000, 1_234_567].map(number), ["0", "12", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0.000_001_5, 0.000_25, 0.012_34, 1.5, 75.2].map(time),
            ["1.50 µs", "250 µs", "12.3 ms", "1.50 s", "75.2 s"]
        );
    }

    #[test]
    fn doubtful_results_have_warnings() {
        let histogram = |value| HistogramData {
            count: 10,
            percentiles: Some(vec![
                crate::result::Percentile { percentile: 50.0, value },
                crate::result::Percentile { percentile: 99.0, value },
            ]),
            ..HistogramData::default()
        };
        let sound = RunResult {
            requested_qps: "100".to_owned(),
            actual_duration: 1_000_000_000,
            duration_histogram: histogram(0.01),
            generator_lateness: histogram(0.000_1),
            ..RunResult::default()
        };
        assert_eq!(warnings(&sound), Vec::<String>::new());
        let late = RunResult { generator_lateness: histogram(0.002), unsent: 1, skipped: 2, ..sound };
        assert_eq!(warnings(&late).len(), 3);
    }
}
