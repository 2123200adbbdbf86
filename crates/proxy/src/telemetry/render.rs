//! Metrics summed over the workers, as Prometheus text in the format of Envoy's `/stats/prometheus`.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fmt::{self, Write as _},
    sync::Arc,
};

use serde_json::Value;
use skysail_core::logging;

use super::{
    access_log::AccessLogger,
    plain::{Kind, NamedStats, StatsFilter},
    series::{BOUNDS, Histogram, HttpSeries, TcpCounts, TcpSeries, escape},
    shard::ShardSnapshot,
    stats::Type,
};
use skysail_policy::peer::LocalWorkload;

/// Size of one piece of a page in bytes. A piece exceeds it by at most one series.
const PIECE: usize = 48 << 10;

/// Sums the workers' metrics and renders them as Prometheus text.
pub fn collect(shards: Vec<ShardSnapshot>, local: &LocalWorkload, log: Option<&AccessLogger>) -> String {
    let metrics = Metrics::new(shards, local, log);
    let mut page = Page::new(StatsFilter::default());
    std::iter::from_fn(|| page.next(&metrics)).collect()
}

/// Values by Prometheus labels.
type Samples = Vec<(String, u64)>;

/// Metrics of the process, summed over its workers.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Request series, sorted by labels.
    http: Vec<(Arc<str>, HttpSeries)>,
    /// Connection series, sorted by labels.
    tcp: Vec<(Arc<str>, TcpSeries)>,
    /// Counters and gauges, sorted by name.
    samples: Vec<((&'static str, Type), Samples)>,
    /// Values of the whole process, by Envoy's names.
    process: Vec<(String, Type, u64)>,
}

impl Metrics {
    /// Sums the workers' metrics.
    pub fn new(shards: Vec<ShardSnapshot>, local: &LocalWorkload, log: Option<&AccessLogger>) -> Self {
        let mut all = Self::default();
        let mut samples = BTreeMap::<_, BTreeMap<String, u64>>::new();
        let (mut dropped, mut unlabelled, mut expired) = (0, 0, 0);
        for shard in shards {
            all.http.extend(shard.http);
            all.tcp.extend(shard.tcp);
            for (labels, values) in shard.samples {
                for (name, kind, value) in values {
                    let sum = samples.entry((name, kind)).or_default().entry(labels.clone()).or_default();
                    // A connection may increment a gauge on one worker and decrement it on another.
                    *sum = sum.wrapping_add(value);
                }
            }
            dropped += shard.dropped;
            unlabelled += shard.unlabelled;
            expired += shard.expired;
        }
        add_up(&mut all.http, HttpSeries::merge);
        add_up(&mut all.tcp, TcpSeries::merge);
        let mut build = String::from("component=\"proxy\",tag=\"");
        escape(&local.version, &mut build);
        build.push('"');
        samples.insert(("istio_build", Type::Gauge), [(build, 1)].into());
        let mut alone = |name, value| {
            samples.insert((name, Type::Counter), [(String::new(), value)].into());
        };
        alone("skysail_metric_series_dropped_total", dropped);
        alone("skysail_metric_series_expired_total", expired);
        alone("skysail_metric_peers_unlabelled_total", unlabelled);
        alone("skysail_panics_total", logging::panics());
        alone("skysail_log_lines_dropped_total", logging::dropped_lines());
        if let Some(log) = log {
            alone("skysail_access_log_dropped_total", log.dropped());
        }
        all.samples =
            samples.into_iter().map(|(name, values)| (name, values.into_iter().collect())).collect();
        all
    }

    /// Adds a counter of the whole process by Envoy's name: `cluster_manager.cds.update_success`.
    pub(crate) fn add_counter(&mut self, name: impl Into<String>, value: u64) {
        self.process.push((name.into(), Type::Counter, value));
    }

    /// Adds a gauge of the whole process by Envoy's name.
    pub(crate) fn add_gauge(&mut self, name: impl Into<String>, value: u64) {
        self.process.push((name.into(), Type::Gauge, value));
    }

    /// Returns the sum of a metric over all its labels.
    pub(crate) fn sum(&self, metric: &str) -> u64 {
        let of_name = self.samples.iter().filter(|((name, _), _)| *name == metric);
        of_name.flat_map(|(_, by_labels)| by_labels).map(|(_, value)| value).sum()
    }

    /// Formats the statistics as text under Envoy's names.
    pub fn text(&self, wanted: &StatsFilter) -> String {
        self.plain().text(wanted)
    }

    /// Returns the statistics as JSON under Envoy's names.
    pub fn json(&self, wanted: &StatsFilter) -> Value {
        self.plain().json(wanted)
    }

    fn plain(&self) -> NamedStats {
        let mut plain = NamedStats::default();
        for ((name, kind), by_labels) in &self.samples {
            by_labels.iter().for_each(|(labels, value)| plain.labelled(name, labels, *kind, *value));
        }
        for (name, kind, value) in &self.process {
            plain.number(name.clone(), *kind, *value, *kind == Type::Gauge || *value > 0);
        }
        for (labels, series) in &self.http {
            for (name, metric, pick) in COUNTS {
                if series.shows(metric) {
                    plain.labelled(name, labels, Type::Counter, pick(series));
                }
            }
            for (name, metric, pick) in HISTOGRAMS {
                if series.shows(metric) {
                    plain.histogram(name, labels, pick(series));
                }
            }
        }
        for (labels, series) in &self.tcp {
            for (name, metric, pick) in TCP_COUNTS {
                if series.shows(metric) {
                    plain.labelled(name, labels, Type::Counter, pick(&series.counts));
                }
            }
        }
        plain
    }
}

/// Name, index among Istio's metrics, and accessor of the value.
type Shown<S, T> = (&'static str, u8, fn(&S) -> T);
/// Name, index among Istio's metrics, and accessor of a histogram.
type ShownHistogram = (&'static str, u8, fn(&HttpSeries) -> &Histogram);

const COUNTS: [Shown<HttpSeries, u64>; 3] = [
    ("istio_requests_total", 0, |series| series.requests),
    ("istio_request_messages_total", 4, |series| series.request_messages),
    ("istio_response_messages_total", 5, |series| series.response_messages),
];
const HISTOGRAMS: [ShownHistogram; 3] = [
    ("istio_request_bytes", 2, |series| &series.request_bytes),
    ("istio_request_duration_milliseconds", 1, |series| &series.duration),
    ("istio_response_bytes", 3, |series| &series.response_bytes),
];
const TCP_COUNTS: [Shown<TcpCounts, u64>; 4] = [
    ("istio_tcp_connections_closed_total", 3, |counts| counts.closed),
    ("istio_tcp_connections_opened_total", 2, |counts| counts.opened),
    ("istio_tcp_received_bytes_total", 1, |counts| counts.received),
    ("istio_tcp_sent_bytes_total", 0, |counts| counts.sent),
];

/// A metric family with the values of its series.
struct Family<'a> {
    name: Cow<'a, str>,
    kind: Kind,
    values: FamilyValues<'a>,
}

enum FamilyValues<'a> {
    Http(&'a [(Arc<str>, HttpSeries)], u8, fn(&HttpSeries) -> u64),
    Histograms(&'a [(Arc<str>, HttpSeries)], u8, fn(&HttpSeries) -> &Histogram),
    Tcp(&'a [(Arc<str>, TcpSeries)], u8, fn(&TcpCounts) -> u64),
    Samples(&'a [(String, u64)]),
    /// A value without labels, shown even if it is 0.
    Process(u64),
}

/// Value of one series in a family.
enum Row<'a> {
    Hidden,
    Number(&'a str, u64),
    Histogram(&'a str, &'a Histogram),
}

impl FamilyValues<'_> {
    /// Returns the series at an index; `None` after the last.
    fn row(&self, index: usize, used_only: bool) -> Option<Row<'_>> {
        let row = match *self {
            Self::Http(all, metric, pick) => {
                let (labels, series) = all.get(index)?;
                if series.shows(metric) { Row::Number(labels, pick(series)) } else { Row::Hidden }
            }
            Self::Histograms(all, metric, pick) => {
                let (labels, series) = all.get(index)?;
                if series.shows(metric) { Row::Histogram(labels, pick(series)) } else { Row::Hidden }
            }
            Self::Tcp(all, metric, pick) => {
                let (labels, series) = all.get(index)?;
                if series.shows(metric) { Row::Number(labels, pick(&series.counts)) } else { Row::Hidden }
            }
            Self::Samples(all) => {
                let (labels, value) = all.get(index)?;
                Row::Number(labels, *value)
            }
            Self::Process(value) => return (index == 0).then_some(Row::Number("", value)),
        };
        Some(match row {
            Row::Number(_, 0) if used_only => Row::Hidden,
            row => row,
        })
    }
}

impl Metrics {
    /// Returns the family at an index; `None` after the last.
    fn family(&self, index: usize) -> Option<Family<'_>> {
        let counter = |name, values| Family { name: Cow::Borrowed(name), kind: Kind::Counters, values };
        if let Some((name, metric, pick)) = COUNTS.get(index) {
            return Some(counter(*name, FamilyValues::Http(&self.http, *metric, *pick)));
        }
        let index = index - COUNTS.len();
        if let Some((name, metric, pick)) = HISTOGRAMS.get(index) {
            let values = FamilyValues::Histograms(&self.http, *metric, *pick);
            return Some(Family { name: Cow::Borrowed(name), kind: Kind::Histograms, values });
        }
        let index = index - HISTOGRAMS.len();
        if let Some((name, metric, pick)) = TCP_COUNTS.get(index) {
            return Some(counter(*name, FamilyValues::Tcp(&self.tcp, *metric, *pick)));
        }
        let index = index - TCP_COUNTS.len();
        if let Some(((name, kind), values)) = self.samples.get(index) {
            return Some(Family { kind: kind.kind(), ..counter(*name, FamilyValues::Samples(values)) });
        }
        let (name, kind, value) = self.process.get(index - self.samples.len())?;
        let name = format!("envoy_{}", name.replace(|c: char| !c.is_ascii_alphanumeric(), "_"));
        Some(Family { name: Cow::Owned(name), kind: kind.kind(), values: FamilyValues::Process(*value) })
    }
}

/// Prometheus text in pieces. For a slow client, only one piece is in memory, not a whole page.
#[derive(Debug, Default)]
pub struct Page {
    wanted: StatsFilter,
    /// Next series to write: index of its family, and index within it.
    next: (usize, usize),
    /// The `# TYPE` line of the family has been written.
    titled: bool,
}

impl Page {
    /// Returns a page at its beginning.
    pub fn new(wanted: StatsFilter) -> Self {
        Self { wanted, ..Self::default() }
    }

    /// Returns the next piece, which consists of complete lines; `None` after the last. `metrics` must be the
    /// same in each call.
    pub fn next(&mut self, metrics: &Metrics) -> Option<String> {
        let mut out = String::with_capacity(PIECE + PIECE / 4);
        let (mut family, mut row) = self.next;
        while let Some(Family { name, kind, values }) = metrics.family(family) {
            if self.wanted.takes(&name, kind) {
                while let Some(value) = values.row(row, self.wanted.used_only) {
                    if out.len() >= PIECE {
                        self.next = (family, row);
                        return Some(out);
                    }
                    row += 1;
                    if !self.titled && !matches!(value, Row::Hidden) {
                        self.titled = true;
                        // Writing into memory cannot fail.
                        let _ = writeln!(out, "# TYPE {name} {}", word(kind));
                    }
                    let _ = match value {
                        Row::Hidden => Ok(()),
                        Row::Number("", value) => writeln!(out, "{name}{{}} {value}"),
                        Row::Number(labels, value) => writeln!(out, "{name}{{{labels}}} {value}"),
                        Row::Histogram(labels, values) => histogram(&name, labels, values, &mut out),
                    };
                }
            }
            (family, row, self.titled) = (family + 1, 0, false);
        }
        self.next = (family, row);
        (!out.is_empty()).then_some(out)
    }
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Counters => "counter",
        Kind::Gauges => "gauge",
        Kind::Histograms => "histogram",
        Kind::TextReadouts => "untyped",
    }
}

/// Merges series with equal labels and sorts all by labels.
fn add_up<S>(all: &mut Vec<(Arc<str>, S)>, merge: fn(&mut S, &S)) {
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    all.dedup_by(|(labels, more), (first, sum)| {
        let same = labels == first;
        if same {
            merge(sum, more);
        }
        same
    });
}

fn histogram(name: &str, labels: &str, values: &Histogram, out: &mut String) -> fmt::Result {
    let mut count = 0;
    for (bound, here) in BOUNDS.iter().zip(values.counts) {
        count += here;
        writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}")?;
    }
    count += values.counts[BOUNDS.len()];
    writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}")?;
    writeln!(out, "{name}_sum{{{labels}}} {}", values.sum)?;
    writeln!(out, "{name}_count{{{labels}}} {count}")
}
