//! Results as JSON, in the form of Fortio (`periodic.RunnerResults`, `stats.HistogramData`). Times are in seconds.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use chrono::{DateTime, SecondsFormat, Utc};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::{
    args::LoadArgs,
    tally::{Outcome, Tally},
    target::{Protocol, Target},
};

/// Nanoseconds of a second.
const SECOND: f64 = 1e9;
/// Code of requests without a response, as in Fortio.
const NO_RESPONSE: &str = "-1";

/// A result. Fortio ignores the fields that it does not have, from `since_sent_histogram` on.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct RunResult {
    pub(crate) run_type: String,
    pub(crate) labels: String,
    /// RFC 3339, with nanoseconds.
    pub(crate) start_time: String,
    /// A rate, or `max`.
    #[serde(rename = "RequestedQPS")]
    pub(crate) requested_qps: String,
    /// A duration of Go, or `exactly N calls`.
    pub(crate) requested_duration: String,
    #[serde(rename = "ActualQPS")]
    pub(crate) actual_qps: f64,
    /// Nanoseconds.
    pub(crate) actual_duration: u64,
    /// Number of connections.
    pub(crate) num_threads: u64,
    pub(crate) version: String,
    pub(crate) duration_histogram: HistogramData,
    pub(crate) errors_duration_histogram: HistogramData,
    pub(crate) exactly: u64,
    pub(crate) jitter: bool,
    pub(crate) uniform: bool,
    pub(crate) no_catch_up: bool,
    #[serde(rename = "RunID")]
    pub(crate) run_id: i64,
    #[serde(rename = "ID")]
    pub(crate) id: String,
    /// Number of responses by status, or by name.
    pub(crate) ret_codes: BTreeMap<String, u64>,
    #[serde(rename = "IPCountMap")]
    pub(crate) ip_count_map: BTreeMap<String, u64>,
    #[serde(rename = "URL")]
    pub(crate) url: String,
    pub(crate) sizes: HistogramData,
    pub(crate) header_sizes: HistogramData,
    /// Sockets of each connection.
    pub(crate) sockets: Vec<u64>,
    pub(crate) socket_count: u64,
    pub(crate) connection_stats: HistogramData,
    pub(crate) abort_on: i64,
    /// gRPC and TCP: the target as the user gave it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) destination: Option<String>,
    /// gRPC: streams of each connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) streams: Option<u32>,
    /// gRPC: the calls are Fortio's ping, not the health check.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ping: Option<bool>,
    /// Latency from the time of sending; in the open loop it excludes the wait for a connection.
    pub(crate) since_sent_histogram: HistogramData,
    /// Delay of the generator itself between the due time and the sending of a request.
    pub(crate) generator_lateness: HistogramData,
    /// CPU time of the generator per request, in seconds.
    pub(crate) generator_cpu: f64,
    /// Number of threads of the generator.
    pub(crate) generator_threads: u64,
    /// Requests without a response, by reason.
    pub(crate) failures: BTreeMap<String, u64>,
    /// Text of the first error of each reason in `failures` that has one.
    pub(crate) failure_errors: BTreeMap<String, String>,
    /// Overdue requests that were skipped (`-nocatchup`).
    pub(crate) skipped: u64,
    /// Requests that were due and had not been sent at the end, or had no response.
    pub(crate) unsent: u64,
    /// The load ended early, by a signal or by `-abort-on`.
    pub(crate) interrupted: bool,
}

/// A histogram.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct HistogramData {
    pub(crate) count: u64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) sum: f64,
    pub(crate) avg: f64,
    pub(crate) std_dev: f64,
    pub(crate) data: Option<Vec<Bucket>>,
    pub(crate) percentiles: Option<Vec<Percentile>>,
}

/// Number of values above `start`, up to `end`. The first bucket includes its start, the minimum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Bucket {
    pub(crate) start: f64,
    pub(crate) end: f64,
    /// Share of the values up to `end`, in percent.
    pub(crate) percent: f64,
    pub(crate) count: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Percentile {
    pub(crate) percentile: f64,
    pub(crate) value: f64,
}

impl Default for RunResult {
    fn default() -> Self {
        Self {
            run_type: "HTTP".to_owned(),
            labels: String::new(),
            start_time: String::new(),
            requested_qps: "max".to_owned(),
            requested_duration: String::new(),
            actual_qps: 0.0,
            actual_duration: 0,
            num_threads: 0,
            version: String::new(),
            duration_histogram: HistogramData::default(),
            errors_duration_histogram: HistogramData::default(),
            exactly: 0,
            jitter: false,
            uniform: false,
            no_catch_up: false,
            run_id: 0,
            id: String::new(),
            ret_codes: BTreeMap::new(),
            ip_count_map: BTreeMap::new(),
            url: String::new(),
            sizes: HistogramData::default(),
            header_sizes: HistogramData::default(),
            sockets: Vec::new(),
            socket_count: 0,
            connection_stats: HistogramData::default(),
            abort_on: 0,
            destination: None,
            streams: None,
            ping: None,
            since_sent_histogram: HistogramData::default(),
            generator_lateness: HistogramData::default(),
            generator_cpu: 0.0,
            generator_threads: 0,
            failures: BTreeMap::new(),
            failure_errors: BTreeMap::new(),
            skipped: 0,
            unsent: 0,
            interrupted: false,
        }
    }
}

/// Facts about a run that do not concern single requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunFacts {
    pub(crate) started: DateTime<Utc>,
    /// Nanoseconds.
    pub(crate) duration: u64,
    pub(crate) threads: usize,
    pub(crate) interrupted: bool,
}

impl RunResult {
    /// Summarizes a run.
    pub(crate) fn of(args: &LoadArgs, target: &Target, tally: &Tally, facts: RunFacts) -> Self {
        let (exactly, jitter, uniform, no_catch_up) = args.recorded();
        let (count, _) = tally.counts();
        let time = |histogram: &Histogram<u64>| HistogramData::of_times(histogram, args);
        let size = |histogram: &Histogram<u64>| HistogramData::of(histogram, 1.0, args);
        let labels = args.labels.clone().unwrap_or_else(|| target.url.clone());
        let is_grpc = target.protocol == Protocol::Grpc;
        let is_http = matches!(target.protocol, Protocol::Http1 | Protocol::Http2);
        let OutcomeCounts { ret_codes, failures, failure_errors } = OutcomeCounts::of(tally, is_grpc);
        Self {
            run_type: run_type(args, target),
            start_time: facts.started.to_rfc3339_opts(SecondsFormat::Nanos, true),
            requested_qps: args.rate().map_or_else(|| "max".to_owned(), |rate| rate.to_string()),
            requested_duration: match (args.count(), args.duration()) {
                (Some(count), _) => format!("exactly {count} calls"),
                (None, Some(duration)) => go_duration(duration.as_nanos()),
                (None, None) => "until stop".to_owned(),
            },
            actual_qps: count as f64 * SECOND / facts.duration.max(1) as f64,
            actual_duration: facts.duration,
            num_threads: u64::from(args.connections),
            version: concat!("skysail ", env!("CARGO_PKG_VERSION")).to_owned(),
            duration_histogram: time(&tally.latency),
            errors_duration_histogram: time(&tally.failed),
            exactly,
            jitter,
            uniform,
            no_catch_up,
            id: id(&facts.started, &labels),
            labels,
            ret_codes,
            ip_count_map: BTreeMap::from([(target.address_name.clone(), tally.sockets.iter().sum())]),
            url: target.url.clone(),
            sizes: size(&tally.sizes),
            header_sizes: size(&tally.heads),
            sockets: tally.sockets.clone(),
            socket_count: tally.sockets.iter().sum(),
            connection_stats: time(&tally.connects),
            abort_on: args.abort_on.unwrap_or(0).into(),
            destination: (!is_http).then(|| target.url.clone()),
            streams: is_grpc.then_some(args.streams),
            ping: is_grpc.then_some(args.ping),
            since_sent_histogram: time(&tally.since_sent),
            generator_lateness: HistogramData {
                percentiles: (!tally.lateness.is_empty())
                    .then(|| percentiles(&tally.lateness, SECOND, &[50.0, 99.0])),
                ..time(&tally.lateness)
            },
            generator_cpu: tally.cpu as f64 / SECOND / count.max(1) as f64,
            generator_threads: facts.threads as u64,
            failures,
            failure_errors,
            skipped: tally.skipped,
            unsent: tally.unsent,
            interrupted: facts.interrupted,
            run_id: 0,
        }
    }

    /// Writes the result to a new file in a folder, and returns the file. The name of a result that began in the same
    /// second gets a number.
    ///
    /// # Errors
    /// The file cannot be created or written.
    pub(crate) fn save(&mut self, folder: &Path) -> anyhow::Result<PathBuf> {
        let id = self.id.clone();
        for number in 2..1_000 {
            let path = folder.join(format!("{}.json", self.id));
            match File::create_new(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => self.id = format!("{id}_{number}"),
                file => {
                    let json = serde_json::to_string_pretty(self)?;
                    file.and_then(|mut file| writeln!(file, "{json}"))
                        .with_context(|| format!("cannot write {}", path.display()))?;
                    return Ok(path);
                }
            }
        }
        bail!("every name of the result {id} is taken")
    }
}

/// Returns the type of a run as Fortio does. For gRPC it has the name of the service and the length of the payload.
fn run_type(args: &LoadArgs, target: &Target) -> String {
    let call = match target.protocol {
        Protocol::Http1 | Protocol::Http2 => return "HTTP".to_owned(),
        Protocol::Tcp => return "TCP".to_owned(),
        Protocol::Grpc if args.ping => "GRPC Ping".to_owned(),
        Protocol::Grpc => format!("GRPC Health for '{}'", args.healthservice),
    };
    match target.payload.len() {
        0 => call,
        length => format!("{call} PayloadLength={length}"),
    }
}

/// Numbers of requests by outcome, with the names of results.
struct OutcomeCounts {
    ret_codes: BTreeMap<String, u64>,
    failures: BTreeMap<String, u64>,
    failure_errors: BTreeMap<String, String>,
}

impl OutcomeCounts {
    fn of(tally: &Tally, is_grpc: bool) -> Self {
        let mut counts =
            Self { ret_codes: BTreeMap::new(), failures: BTreeMap::new(), failure_errors: BTreeMap::new() };
        for (outcome, count) in &tally.outcomes {
            let code = match outcome {
                Outcome::Status(status) => status.to_string(),
                Outcome::Named(name) => (*name).to_owned(),
                Outcome::Failed(failure) => {
                    let name = failure.name().to_owned();
                    let error = tally.errors.get(failure).cloned();
                    counts.failure_errors.extend(error.map(|error| (name.clone(), error)));
                    counts.failures.insert(name, *count);
                    if is_grpc { "ERROR" } else { NO_RESPONSE }.to_owned()
                }
            };
            *counts.ret_codes.entry(code).or_default() += count;
        }
        counts
    }
}

impl HistogramData {
    /// Converts a histogram of times in nanoseconds, with the buckets and percentiles of these settings.
    pub(crate) fn of_times(histogram: &Histogram<u64>, args: &LoadArgs) -> Self {
        Self::of(histogram, SECOND, args)
    }

    /// Converts a histogram. `unit` is the number of its units in one unit of the result.
    fn of(histogram: &Histogram<u64>, unit: f64, args: &LoadArgs) -> Self {
        let count = histogram.len();
        if count == 0 {
            return Self::default();
        }
        let is_time = unit > 1.0;
        let (width, offset) = match is_time {
            true => (args.resolution * unit, args.offset.as_nanos() as f64),
            false => (1.0, 0.0),
        };
        Self {
            count,
            min: histogram.min() as f64 / unit,
            max: histogram.max() as f64 / unit,
            sum: histogram.mean() * count as f64 / unit,
            avg: histogram.mean() / unit,
            std_dev: histogram.stdev() / unit,
            data: Some(buckets(histogram, unit, width, offset)),
            percentiles: is_time.then(|| percentiles(histogram, unit, &args.percentiles)),
        }
    }
}

fn percentiles(histogram: &Histogram<u64>, unit: f64, wanted: &[f64]) -> Vec<Percentile> {
    let value = |percentile: f64| histogram.value_at_quantile(percentile / 100.0) as f64 / unit;
    wanted
        .iter()
        .map(|percentile| Percentile { percentile: *percentile, value: value(*percentile) })
        .collect()
}

/// Groups the values in buckets. The width of a bucket is `width` up to 100 times `width`, and above it 1 to 10 % of
/// the value.
fn buckets(histogram: &Histogram<u64>, unit: f64, width: f64, offset: f64) -> Vec<Bucket> {
    let (min, count) = (histogram.min() as f64, histogram.len() as f64);
    let mut buckets: Vec<Bucket> = Vec::new();
    let (mut so_far, mut start) = (0, min);
    for value in histogram.iter_recorded() {
        let at = histogram.lowest_equivalent(value.value_iterated_to()) as f64;
        so_far += value.count_since_last_iteration();
        let percent = so_far as f64 * 100.0 / count;
        let end = edge(at - offset, width) + offset;
        match buckets.last_mut() {
            Some(last) if last.end * unit >= end - 0.5 => {
                last.count += value.count_since_last_iteration();
                last.percent = percent;
            }
            _ => buckets.push(Bucket {
                start: start / unit,
                end: end / unit,
                percent,
                count: value.count_since_last_iteration(),
            }),
        }
        start = end;
    }
    // As in Fortio, the last bucket ends with the maximum.
    if let Some(last) = buckets.last_mut() {
        last.end = (histogram.max() as f64 / unit).max(last.start);
    }
    buckets
}

/// Returns the end of the bucket of a value: the value, rounded up to a multiple of `width` with two significant
/// digits.
fn edge(value: f64, width: f64) -> f64 {
    let units = (value / width).ceil().max(1.0);
    let mut scale = 1.0;
    while units / scale > 100.0 {
        scale *= 10.0;
    }
    (units / scale).ceil() * scale * width
}

/// Returns the name of a result as Fortio does: its time in UTC, and the labels with `_` for other characters than
/// letters and digits.
fn id(started: &DateTime<Utc>, labels: &str) -> String {
    /// Maximum length in Fortio.
    const MAX: usize = 96;
    let mut id = format!("{}_", started.format("%Y-%m-%d-%H%M%S"));
    for character in labels.chars() {
        match character {
            _ if id.len() >= MAX => break,
            'a'..='z' | 'A'..='Z' | '0'..='9' => id.push(character),
            _ if id.ends_with('_') => {}
            _ => id.push('_'),
        }
    }
    id
}

/// Writes a duration as Go does for whole milliseconds: `1m30s`, `250ms`.
fn go_duration(nanoseconds: u128) -> String {
    let milliseconds = nanoseconds / 1_000_000;
    let (minutes, rest) = (milliseconds / 60_000, milliseconds % 60_000);
    match (minutes, rest) {
        (0, rest) if rest < 1_000 => format!("{rest}ms"),
        (0, rest) => format!("{}s", rest as f64 / 1e3),
        (minutes, rest) if minutes < 60 => format!("{minutes}m{}s", rest as f64 / 1e3),
        (minutes, rest) => format!("{}h{}m{}s", minutes / 60, minutes % 60, rest as f64 / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_the_same_second_have_files_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let result = RunResult { id: "a".to_owned(), ..RunResult::default() };
        let names = [(); 3].map(|()| result.clone().save(folder.path()).unwrap());
        assert_eq!(names, ["a.json", "a_2.json", "a_3.json"].map(|name| folder.path().join(name)));
        let read: RunResult = serde_json::from_slice(&std::fs::read(&names[2]).unwrap()).unwrap();
        assert_eq!(read.id, "a_3");
    }

    #[test]
    fn buckets_have_two_significant_digits_and_count_everything() {
        let mut histogram = Histogram::<u64>::new_with_bounds(1, 3_600_000_000_000, 3).unwrap();
        for value in [50_000, 100_000, 150_000, 1_234_567, 12_345_678, 12_345_999] {
            histogram.record(value).unwrap();
        }
        let buckets = buckets(&histogram, SECOND, 100_000.0, 0.0);
        assert_eq!(buckets.iter().map(|bucket| bucket.count).collect::<Vec<_>>(), [2, 1, 1, 2]);
        let ends: Vec<f64> = buckets.iter().map(|bucket| (bucket.end * 1e5).round() / 1e5).collect();
        assert_eq!(ends[..3], [0.0001, 0.0002, 0.0013]);
        assert!(buckets.iter().all(|bucket| bucket.start <= bucket.end));
        assert!((buckets[3].percent - 100.0).abs() < 1e-9);
    }

    #[test]
    fn the_number_of_buckets_is_bounded() {
        let mut histogram = Histogram::<u64>::new_with_bounds(1, 3_600_000_000_000, 3).unwrap();
        let mut value = 1.0;
        while value < 3.6e12 {
            histogram.record(value as u64).unwrap();
            value *= 1.000_5;
        }
        // The smallest resolution that the command line accepts.
        let buckets = buckets(&histogram, SECOND, 1.0, 0.0);
        assert!((900..1_100).contains(&buckets.len()), "{}", buckets.len());
        assert_eq!(buckets.iter().map(|bucket| bucket.count).sum::<u64>(), histogram.len());
    }

    #[test]
    fn names_and_durations_are_those_of_fortio() {
        let started = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        assert_eq!(id(&started, "a b://c-8"), "2023-11-14-221320_a_b_c_8");
        for (text, milliseconds) in
            [("250ms", 250), ("5s", 5_000), ("1m30s", 90_000), ("1h0m0.5s", 3_600_500)]
        {
            assert_eq!(go_duration(milliseconds * 1_000_000), text);
        }
    }
}
