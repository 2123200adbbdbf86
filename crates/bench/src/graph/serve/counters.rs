//! Counters of a service, with the names, labels and buckets of isotope.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use anyhow::Context as _;

use super::{script, unknown};
use crate::graph::model::ServiceGraph;

/// Upper bounds of the duration of a request in milliseconds.
const DURATIONS: [u64; 32] = [
    7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 90, 100, 120, 140, 160, 180,
    200, 250, 300, 350, 400, 450, 500,
];
/// Upper bounds of sizes in bytes.
const SIZES: [u64; 10] =
    [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];
/// Status codes of responses.
const CODES: [&str; 2] = ["200", "500"];

/// Counters that the threads of a service share.
pub(super) struct Counters {
    incoming: AtomicU64,
    /// By destination, in the order of [`script::hosts`].
    outgoing: Vec<(String, BucketCounter)>,
    /// Nanoseconds by status code.
    durations: [BucketCounter; 2],
    /// Sizes of responses by status code.
    responses: [BucketCounter; 2],
}

/// A histogram with fixed buckets.
struct BucketCounter {
    /// Values by the first bound that is not below them; the last bucket has none.
    buckets: Vec<AtomicU64>,
    sum: AtomicU64,
}

impl Counters {
    /// Creates the counters of a service.
    ///
    /// # Errors
    /// The graph has no such service.
    pub(super) fn new(graph: &ServiceGraph, name: &str) -> anyhow::Result<Self> {
        let service = graph.service(name).with_context(|| unknown(graph, name))?;
        let outgoing = script::hosts(graph, service);
        Ok(Self {
            incoming: AtomicU64::new(0),
            outgoing: outgoing.into_iter().map(|host| (host, BucketCounter::new(SIZES.len()))).collect(),
            durations: [0; 2].map(|_| BucketCounter::new(DURATIONS.len())),
            responses: [0; 2].map(|_| BucketCounter::new(SIZES.len())),
        })
    }

    /// Counts a request that arrived.
    pub(super) fn received(&self) {
        self.incoming.fetch_add(1, Relaxed);
    }

    /// Counts a response.
    pub(super) fn answered(&self, is_good: bool, duration: Duration, size: u64) {
        let code = usize::from(!is_good);
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let bucket = DURATIONS.partition_point(|bound| bound * 1_000_000 < nanoseconds);
        self.durations[code].add(bucket, nanoseconds);
        self.responses[code].add(SIZES.partition_point(|bound| *bound < size), size);
    }

    /// Counts a call of a destination.
    pub(super) fn called(&self, destination: usize, size: u64) {
        if let Some((_, sizes)) = self.outgoing.get(destination) {
            sizes.add(SIZES.partition_point(|bound| *bound < size), size);
        }
    }

    /// Returns the counters in the text format of Prometheus.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        describe(
            &mut text,
            "service_incoming_requests_total",
            "counter",
            "Requests that the service received.",
        );
        let _ = writeln!(text, "service_incoming_requests_total {}", self.incoming.load(Relaxed));
        describe(&mut text, "service_outgoing_requests_total", "counter", "Requests that the service sent.");
        for (host, sizes) in &self.outgoing {
            let label = "service_outgoing_requests_total{destination_service=";
            let _ = writeln!(text, "{label}\"{host}\"}} {}", sizes.count());
        }
        let name = "service_outgoing_request_size";
        describe(&mut text, name, "histogram", "Size of request bodies that the service sent, in bytes.");
        for (host, sizes) in &self.outgoing {
            sizes.write(&mut text, name, &format!("destination_service=\"{host}\""), &SIZES, 1.0);
        }
        let name = "service_request_duration_seconds";
        describe(&mut text, name, "histogram", "Time from the head of a request to the end of its response.");
        for (code, durations) in CODES.iter().zip(&self.durations) {
            durations.write(&mut text, name, &format!("code=\"{code}\""), &DURATIONS, 1e3);
        }
        let name = "service_response_size";
        describe(&mut text, name, "histogram", "Size of response bodies, in bytes.");
        for (code, sizes) in CODES.iter().zip(&self.responses) {
            sizes.write(&mut text, name, &format!("code=\"{code}\""), &SIZES, 1.0);
        }
        text
    }
}

impl BucketCounter {
    /// Creates a histogram with this number of bounds.
    fn new(bounds: usize) -> Self {
        Self { buckets: (0..=bounds).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    fn add(&self, bucket: usize, value: u64) {
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Relaxed);
        }
        self.sum.fetch_add(value, Relaxed);
    }

    fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum()
    }

    /// Writes the histogram, unless it is empty. Bounds are divided by `unit`. The sum of durations is in nanoseconds.
    fn write(&self, text: &mut String, name: &str, labels: &str, bounds: &[u64], unit: f64) {
        let mut count = 0;
        if self.count() == 0 {
            return;
        }
        for (bucket, bound) in self.buckets.iter().zip(bounds) {
            count += bucket.load(Relaxed);
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{}\"}} {count}", *bound as f64 / unit);
        }
        count += self.buckets.last().map_or(0, |bucket| bucket.load(Relaxed));
        let sum = self.sum.load(Relaxed) as f64 / if unit > 1.0 { 1e9 } else { 1.0 };
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}");
    }
}

fn describe(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}
