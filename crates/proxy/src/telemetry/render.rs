//! All metrics, added up over the workers; as Prometheus text in the shape of Envoy's `/stats/prometheus`.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use serde_json::Value;
use skysail_core::logging;

use super::{
    access_log::AccessLogger,
    plain::{Kind, Plain, Wanted},
    series::{BOUNDS, Histogram, HttpSeries, TcpCounts, TcpSeries, escape},
    shard::ShardSnapshot,
    stats::Type,
};
use crate::peer::LocalWorkload;

/// Adds up what the workers counted, and renders it as Prometheus text.
pub fn collect(shards: Vec<ShardSnapshot>, local: &LocalWorkload, log: Option<&AccessLogger>) -> String {
    Metrics::new(shards, local, log).prometheus(&Wanted::default())
}

/// All metrics of the process, added up over its workers.
#[derive(Debug, Default)]
pub struct Metrics {
    http: BTreeMap<Arc<str>, HttpSeries>,
    tcp: BTreeMap<Arc<str>, TcpSeries>,
    /// By name and labels as Prometheus has them.
    samples: BTreeMap<(&'static str, Type), BTreeMap<String, u64>>,
    /// Those of the whole process, by Envoy's names.
    process: Vec<(String, Type, u64)>,
}

impl Metrics {
    /// Adds up what the workers counted.
    pub fn new(shards: Vec<ShardSnapshot>, local: &LocalWorkload, log: Option<&AccessLogger>) -> Self {
        let mut all = Self::default();
        let (mut dropped, mut expired) = (0, 0);
        for shard in shards {
            for (labels, series) in shard.http {
                all.http.entry(labels).and_modify(|sum| sum.merge(&series)).or_insert(series);
            }
            for (labels, series) in shard.tcp {
                all.tcp.entry(labels).and_modify(|sum| sum.merge(&series)).or_insert(series);
            }
            for (labels, values) in shard.samples {
                for (name, kind, value) in values {
                    let sum = all.samples.entry((name, kind)).or_default().entry(labels.clone()).or_default();
                    // A gauge may go up on one worker and down on another.
                    *sum = sum.wrapping_add(value);
                }
            }
            dropped += shard.dropped;
            expired += shard.expired;
        }
        let mut build = String::from("component=\"proxy\",tag=\"");
        escape(&local.version, &mut build);
        build.push('"');
        all.samples.insert(("istio_build", Type::Gauge), [(build, 1)].into());
        let mut alone = |name, value| {
            all.samples.insert((name, Type::Counter), [(String::new(), value)].into());
        };
        alone("skysail_metric_series_dropped_total", dropped);
        alone("skysail_metric_series_expired_total", expired);
        alone("skysail_panics_total", logging::panics());
        alone("skysail_log_lines_lost_total", logging::lost_lines());
        if let Some(log) = log {
            alone("skysail_access_log_dropped_total", log.dropped());
        }
        all
    }

    /// Adds a number of the whole process that only grows, by Envoy's name: `cluster_manager.cds.update_success`.
    pub(crate) fn add_counter(&mut self, name: impl Into<String>, value: u64) {
        self.process.push((name.into(), Type::Counter, value));
    }

    /// Adds one that goes up and down.
    pub(crate) fn add_gauge(&mut self, name: impl Into<String>, value: u64) {
        self.process.push((name.into(), Type::Gauge, value));
    }

    /// The sum of a metric over all its labels.
    pub(crate) fn sum(&self, metric: &str) -> u64 {
        let of_name = self.samples.iter().filter(|((name, _), _)| *name == metric);
        of_name.flat_map(|(_, by_labels)| by_labels.values()).sum()
    }

    /// Prometheus text.
    pub fn prometheus(&self, wanted: &Wanted) -> String {
        let mut text = String::new();
        let out = &mut text;
        requests(&self.http, wanted, out);
        connections(&self.tcp, wanted, out);
        for ((name, kind), by_labels) in &self.samples {
            let values = by_labels.iter().map(|(labels, value)| (labels.as_str(), *value));
            family(name, *kind, values, wanted, out);
        }
        for (name, kind, value) in &self.process {
            let name = format!("envoy_{}", name.replace(|c: char| !c.is_ascii_alphanumeric(), "_"));
            family(&name, *kind, [("", *value)].into_iter(), &wanted.even_zero(), out);
        }
        text
    }

    /// Envoy's names, one a line.
    pub fn text(&self, wanted: &Wanted) -> String {
        self.plain().text(wanted)
    }

    /// The same as JSON.
    pub fn json(&self, wanted: &Wanted) -> Value {
        self.plain().json(wanted)
    }

    fn plain(&self) -> Plain {
        let mut plain = Plain::default();
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

/// Name, index among Istio's metrics, and where the value is.
type Shown<S, T> = (&'static str, u8, fn(&S) -> T);
/// The same of a histogram.
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

fn requests(http: &BTreeMap<Arc<str>, HttpSeries>, wanted: &Wanted, out: &mut String) {
    let shown = |metric: u8| http.iter().filter(move |(_, series)| series.shows(metric));
    for (name, metric, pick) in COUNTS {
        let values = shown(metric).map(|(labels, series)| (&**labels, pick(series)));
        family(name, Type::Counter, values, wanted, out);
    }
    for (name, metric, pick) in
        HISTOGRAMS.into_iter().filter(|(name, ..)| wanted.takes(name, Kind::Histograms))
    {
        for (index, (labels, series)) in shown(metric).enumerate() {
            if index == 0 {
                let _ = writeln!(out, "# TYPE {name} histogram");
            }
            histogram(name, labels, pick(series), out);
        }
    }
}

fn connections(tcp: &BTreeMap<Arc<str>, TcpSeries>, wanted: &Wanted, out: &mut String) {
    for (name, metric, pick) in TCP_COUNTS {
        let shown = tcp.iter().filter(|(_, series)| series.shows(metric));
        let values = shown.map(|(labels, series)| (&**labels, pick(&series.counts)));
        family(name, Type::Counter, values, wanted, out);
    }
}

fn family<'a>(
    name: &str,
    kind: Type,
    values: impl Iterator<Item = (&'a str, u64)>,
    wanted: &Wanted,
    out: &mut String,
) {
    let (word, of) = match kind {
        Type::Counter => ("counter", Kind::Counters),
        Type::Gauge => ("gauge", Kind::Gauges),
    };
    if !wanted.takes(name, of) {
        return;
    }
    let values = values.filter(|(_, value)| *value > 0 || !wanted.used_only);
    // Writing into memory cannot fail.
    for (index, (labels, value)) in values.enumerate() {
        if index == 0 {
            let _ = writeln!(out, "# TYPE {name} {word}");
        }
        let _ = if labels.is_empty() {
            writeln!(out, "{name}{{}} {value}")
        } else {
            writeln!(out, "{name}{{{labels}}} {value}")
        };
    }
}

fn histogram(name: &str, labels: &str, values: &Histogram, out: &mut String) {
    let mut count = 0;
    for (bound, here) in BOUNDS.iter().zip(values.counts) {
        count += here;
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}");
    }
    count += values.counts[BOUNDS.len()];
    let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
    let _ = writeln!(out, "{name}_sum{{{labels}}} {}", values.sum);
    let _ = writeln!(out, "{name}_count{{{labels}}} {count}");
}
