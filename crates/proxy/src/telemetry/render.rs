//! Metrics as Prometheus text, in the shape of Envoy's `/stats/prometheus`.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use super::{
    access_log::AccessLogger,
    series::{BOUNDS, Histogram, HttpSeries, TcpSeries, escape},
    shard::ShardSnapshot,
    stats::Type,
};
use crate::peer::LocalWorkload;

/// Adds up what the workers counted and renders it.
pub fn collect(shards: Vec<ShardSnapshot>, local: &LocalWorkload, log: Option<&AccessLogger>) -> String {
    let mut http: BTreeMap<Arc<str>, HttpSeries> = BTreeMap::new();
    let mut tcp: BTreeMap<Arc<str>, TcpSeries> = BTreeMap::new();
    let mut samples: BTreeMap<(&'static str, Type), BTreeMap<String, u64>> = BTreeMap::new();
    let mut dropped = 0;
    for shard in shards {
        for (labels, series) in shard.http {
            http.entry(labels).or_default().merge(&series);
        }
        for (labels, series) in shard.tcp {
            tcp.entry(labels).or_default().merge(&series);
        }
        for (labels, values) in shard.samples {
            for (name, kind, value) in values {
                let sum = samples.entry((name, kind)).or_default().entry(labels.clone()).or_default();
                // A gauge may go up on one worker and down on another.
                *sum = sum.wrapping_add(value);
            }
        }
        dropped += shard.dropped;
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
    let panics = skysail_core::logging::panics();
    family("skysail_panics_total", "counter", [("", panics)].into_iter(), out);
    if let Some(log) = log {
        family("skysail_access_log_dropped_total", "counter", [("", log.dropped())].into_iter(), out);
    }
    text
}

fn requests(http: &BTreeMap<Arc<str>, HttpSeries>, out: &mut String) {
    let count =
        |pick: fn(&HttpSeries) -> u64| http.iter().map(move |(labels, series)| (&**labels, pick(series)));
    family("istio_requests_total", "counter", count(|series| series.requests), out);
    let grpc = || http.iter().filter(|(_, series)| series.grpc);
    let messages = grpc().map(|(labels, series)| (&**labels, series.request_messages));
    family("istio_request_messages_total", "counter", messages, out);
    let messages = grpc().map(|(labels, series)| (&**labels, series.response_messages));
    family("istio_response_messages_total", "counter", messages, out);
    type Pick = fn(&HttpSeries) -> &Histogram;
    let histograms: [(&str, Pick); 3] = [
        ("istio_request_bytes", |series| &series.request_bytes),
        ("istio_request_duration_milliseconds", |series| &series.duration),
        ("istio_response_bytes", |series| &series.response_bytes),
    ];
    for (name, pick) in histograms {
        for (index, (labels, series)) in http.iter().enumerate() {
            if index == 0 {
                let _ = writeln!(out, "# TYPE {name} histogram");
            }
            histogram(name, labels, pick(series), out);
        }
    }
}

fn connections(tcp: &BTreeMap<Arc<str>, TcpSeries>, out: &mut String) {
    let count =
        |pick: fn(&TcpSeries) -> u64| tcp.iter().map(move |(labels, series)| (&**labels, pick(series)));
    family("istio_tcp_connections_closed_total", "counter", count(|series| series.closed), out);
    family("istio_tcp_connections_opened_total", "counter", count(|series| series.opened), out);
    family("istio_tcp_received_bytes_total", "counter", count(|series| series.received), out);
    family("istio_tcp_sent_bytes_total", "counter", count(|series| series.sent), out);
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
