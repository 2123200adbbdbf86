//! Metrics as Prometheus text, in the shape of Envoy's `/stats/prometheus`.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use super::{
    access_log::AccessLogger,
    series::{BOUNDS, Histogram, HttpSeries, TcpCounts, TcpSeries, escape},
    shard::ShardSnapshot,
    stats::Type,
};
use crate::peer::LocalWorkload;

/// Adds up what the workers counted and renders it.
pub fn collect(shards: Vec<ShardSnapshot>, local: &LocalWorkload, log: Option<&AccessLogger>) -> String {
    let mut http: BTreeMap<Arc<str>, HttpSeries> = BTreeMap::new();
    let mut tcp: BTreeMap<Arc<str>, TcpSeries> = BTreeMap::new();
    let mut samples: BTreeMap<(&'static str, Type), BTreeMap<String, u64>> = BTreeMap::new();
    let (mut dropped, mut expired) = (0, 0);
    for shard in shards {
        for (labels, series) in shard.http {
            http.entry(labels).and_modify(|sum| sum.merge(&series)).or_insert(series);
        }
        for (labels, series) in shard.tcp {
            tcp.entry(labels).and_modify(|sum| sum.merge(&series)).or_insert(series);
        }
        for (labels, values) in shard.samples {
            for (name, kind, value) in values {
                let sum = samples.entry((name, kind)).or_default().entry(labels.clone()).or_default();
                // A gauge may go up on one worker and down on another.
                *sum = sum.wrapping_add(value);
            }
        }
        dropped += shard.dropped;
        expired += shard.expired;
    }
    let mut text = String::new();
    let out = &mut text;
    requests(&http, out);
    connections(&tcp, out);
    for ((name, kind), by_labels) in &samples {
        let kind = if *kind == Type::Counter { "counter" } else { "gauge" };
        family(name, kind, by_labels.iter().map(|(labels, value)| (labels.as_str(), *value)), out);
    }
    let mut build = String::from("component=\"proxy\",tag=\"");
    escape(&local.version, &mut build);
    build.push('"');
    family("istio_build", "gauge", [(build.as_str(), 1)].into_iter(), out);
    family("skysail_metric_series_dropped_total", "counter", [("", dropped)].into_iter(), out);
    family("skysail_metric_series_expired_total", "counter", [("", expired)].into_iter(), out);
    let panics = skysail_core::logging::panics();
    family("skysail_panics_total", "counter", [("", panics)].into_iter(), out);
    let lost = skysail_core::logging::lost_lines();
    family("skysail_log_lines_lost_total", "counter", [("", lost)].into_iter(), out);
    if let Some(log) = log {
        family("skysail_access_log_dropped_total", "counter", [("", log.dropped())].into_iter(), out);
    }
    text
}

fn requests(http: &BTreeMap<Arc<str>, HttpSeries>, out: &mut String) {
    let shown = |metric: u8| http.iter().filter(move |(_, series)| series.shows(metric));
    let count = |metric: u8, pick: fn(&HttpSeries) -> u64| {
        shown(metric).map(move |(labels, series)| (&**labels, pick(series)))
    };
    family("istio_requests_total", "counter", count(0, |series| series.requests), out);
    family("istio_request_messages_total", "counter", count(4, |series| series.request_messages), out);
    family("istio_response_messages_total", "counter", count(5, |series| series.response_messages), out);
    type Pick = fn(&HttpSeries) -> &Histogram;
    let histograms: [(&str, u8, Pick); 3] = [
        ("istio_request_bytes", 2, |series| &series.request_bytes),
        ("istio_request_duration_milliseconds", 1, |series| &series.duration),
        ("istio_response_bytes", 3, |series| &series.response_bytes),
    ];
    for (name, metric, pick) in histograms {
        for (index, (labels, series)) in shown(metric).enumerate() {
            if index == 0 {
                let _ = writeln!(out, "# TYPE {name} histogram");
            }
            histogram(name, labels, pick(series), out);
        }
    }
}

fn connections(tcp: &BTreeMap<Arc<str>, TcpSeries>, out: &mut String) {
    let count = |metric: u8, pick: fn(&TcpCounts) -> u64| {
        let shown = tcp.iter().filter(move |(_, series)| series.shows(metric));
        shown.map(move |(labels, series)| (&**labels, pick(&series.counts)))
    };
    family("istio_tcp_connections_closed_total", "counter", count(3, |counts| counts.closed), out);
    family("istio_tcp_connections_opened_total", "counter", count(2, |counts| counts.opened), out);
    family("istio_tcp_received_bytes_total", "counter", count(1, |counts| counts.received), out);
    family("istio_tcp_sent_bytes_total", "counter", count(0, |counts| counts.sent), out);
}

fn family<'a>(name: &str, kind: &str, values: impl Iterator<Item = (&'a str, u64)>, out: &mut String) {
    // Writing into memory cannot fail.
    for (index, (labels, value)) in values.enumerate() {
        if index == 0 {
            let _ = writeln!(out, "# TYPE {name} {kind}");
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
