//! Result of a comparison: all turns, and medians and ranges over the rounds.
//!
//! Ratios are computed within a round and then summarized, as in [`crate::report`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::overload::Overload;
use crate::{
    accounting::Memory,
    percentiles,
    report::{self, Machine, Program, Spread},
    topology::Measurement,
};

/// The result file; `docs/benchmarks.md` describes its format.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Comparison {
    /// Incremented when the meaning of a field changes.
    pub(crate) format: u32,
    pub(crate) benchmark: String,
    pub(crate) version: String,
    /// Git commit of the source tree that contains this program, at the time of the run.
    pub(crate) commit: Option<String>,
    /// Seconds since 1970.
    pub(crate) started: u64,
    /// The run was ended before all turns were taken.
    pub(crate) interrupted: bool,
    pub(crate) machine: Machine,
    pub(crate) settings: CompareSettings,
    pub(crate) peers: BTreeMap<String, Program>,
    pub(crate) skipped: Vec<Skipped>,
    pub(crate) runs: Vec<Run>,
    pub(crate) summary: Vec<Row>,
}

/// Settings of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CompareSettings {
    pub(crate) experiments: Vec<String>,
    /// Peers in order: the first one is compared with each other one.
    pub(crate) peers: Vec<String>,
    pub(crate) seconds: f64,
    pub(crate) warmup: f64,
    pub(crate) rounds: u32,
}

/// A turn that a peer cannot take.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Skipped {
    pub(crate) experiment: String,
    pub(crate) setting: String,
    pub(crate) peer: String,
    pub(crate) reason: String,
}

/// A turn: a setting measured with one peer once.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) round: u32,
    pub(crate) experiment: String,
    pub(crate) setting: String,
    /// Absent without a proxy.
    pub(crate) peer: Option<String>,
    #[serde(flatten)]
    pub(crate) shown: TurnResult,
    pub(crate) error: Option<String>,
}

/// Figures of a turn.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TurnResult {
    /// Under a load.
    pub(crate) measurement: Option<Measurement>,
    /// With connections held, step by step.
    #[serde(default)]
    pub(crate) held: Vec<HeldMemory>,
    /// In a surge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) overload: Option<Overload>,
}

/// Memory of the sidecar while it holds connections.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct HeldMemory {
    pub(crate) connections: usize,
    #[serde(flatten)]
    pub(crate) memory: Memory,
}

/// A setting with one peer over the rounds.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) experiment: String,
    pub(crate) setting: String,
    pub(crate) peer: Option<String>,
    /// Number of successful turns, and of failed ones.
    pub(crate) rounds: usize,
    pub(crate) failed: usize,
    pub(crate) metrics: BTreeMap<String, Spread>,
}

type Metrics = BTreeMap<String, f64>;

/// Figures for ratios, in order of preference. A ratio uses the first one that the turn has.
const COMPARED: [&str; 2] = ["cpu_proxies_us_per_request", "rss_kb"];
const RELAY: &str = "relay";

impl Comparison {
    /// Computes the summary of the turns so far.
    pub(crate) fn summarize(&mut self) {
        let mut keys: Vec<(&str, &str, Option<&str>)> = Vec::new();
        for experiment in &self.settings.experiments {
            for run in self.runs.iter().filter(|run| run.experiment == *experiment) {
                let key = (run.experiment.as_str(), run.setting.as_str(), run.peer.as_deref());
                if !keys.contains(&key) {
                    keys.push(key);
                }
            }
        }
        // Rows of a setting are adjacent, even if its turns are not.
        let settings: Vec<_> = keys.iter().map(|(experiment, setting, _)| (*experiment, *setting)).collect();
        keys.sort_by_key(|(experiment, setting, _)| {
            settings.iter().position(|other| *other == (*experiment, *setting))
        });
        self.summary = keys.iter().map(|(e, s, p)| self.row(e, s, *p)).collect();
    }

    fn row(&self, experiment: &str, setting: &str, peer: Option<&str>) -> Row {
        let mut values: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let (mut rounds, mut failed) = (0, 0);
        for run in self.runs_of(experiment, setting, peer) {
            if run.error.is_some() {
                failed += 1;
                continue;
            }
            rounds += 1;
            let own = self.metrics(run);
            for (name, other) in [("ratio_to_relay", RELAY), ("first_to_this", self.first())] {
                if let Some(value) = self.ratio(run, &own, other, name == "first_to_this") {
                    values.entry(name.to_owned()).or_default().push(value);
                }
            }
            for (name, value) in own {
                values.entry(name).or_default().push(value);
            }
        }
        let metrics = values.into_iter().filter_map(|(name, values)| Some((name, report::spread(values)?)));
        Row {
            experiment: experiment.to_owned(),
            setting: setting.to_owned(),
            peer: peer.map(str::to_owned),
            rounds,
            failed,
            metrics: metrics.collect(),
        }
    }

    fn first(&self) -> &str {
        self.settings.peers.first().map_or("", String::as_str)
    }

    /// Returns the figure of this turn divided by that of the other peer in the same round; the inverse if `inverse`.
    fn ratio(&self, run: &Run, own: &Metrics, other: &str, inverse: bool) -> Option<f64> {
        if run.peer.as_deref()? == other {
            return None;
        }
        let mut others = self.runs_of(&run.experiment, &run.setting, Some(other));
        let theirs = self.metrics(others.find(|theirs| theirs.round == run.round)?);
        let name = COMPARED.iter().find(|name| own.contains_key(**name))?;
        let (own, theirs) = (*own.get(*name)?, *theirs.get(*name)?);
        let (above, below) = if inverse { (theirs, own) } else { (own, theirs) };
        (below > 0.0).then_some(above / below)
    }

    fn runs_of(&self, experiment: &str, setting: &str, peer: Option<&str>) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(move |run| {
            (run.experiment.as_str(), run.setting.as_str(), run.peer.as_deref())
                == (experiment, setting, peer)
        })
    }

    /// Returns the figures of a turn by their names in summaries.
    fn metrics(&self, run: &Run) -> Metrics {
        let mut metrics = Metrics::new();
        if let Some(measurement) = &run.shown.measurement {
            let mut baseline = self.runs_of(&run.experiment, &run.setting, None);
            let baseline = baseline.find(|other| other.round == run.round && run.peer.is_some());
            let baseline = baseline.and_then(|run| run.shown.measurement.as_ref());
            metrics = report::metrics(measurement, baseline);
            let cpu = metrics.get("cpu_proxies_us_per_request").copied();
            if run.experiment == "tcp" {
                // A "request" is a megabyte without a response.
                metrics.retain(|name, _| !name.starts_with("latency_"));
                metrics.insert("gb_per_second".to_owned(), measurement.answers_per_second / 1e3);
                metrics.remove("answers_per_second");
                metrics.extend(cpu.map(|cpu| ("gb_per_cpu_second".to_owned(), 1e3 / cpu)));
            }
            if run.experiment == "handshakes" {
                let share = 100.0 * measurement.resumed as f64 / measurement.requests.max(1) as f64;
                metrics.insert("resumed_percent".to_owned(), share);
            }
        }
        if let Some(overload) = &run.shown.overload {
            let figures = [
                ("capacity_per_second", Some(overload.capacity)),
                ("offered_per_second", Some(overload.offered)),
                ("answers_per_second", Some(overload.answered)),
                ("refused_per_second", Some(overload.refused)),
                ("failed_per_second", Some(overload.failed)),
                ("calm_p99_us", Some(overload.calm_p99_us)),
                ("latency_p50_us", Some(overload.answered_p50_us)),
                ("latency_p99_us", Some(overload.answered_p99_us)),
                ("served_p50_us", Some(overload.served_p50_us)),
                ("served_p99_us", Some(overload.served_p99_us)),
                ("any_p50_us", Some(overload.any_p50_us)),
                ("any_p99_us", Some(overload.any_p99_us)),
                ("recovery_ms", overload.recovery_ms),
                ("surge_connections", Some(overload.connections as f64)),
                ("rss_before_kb", Some(overload.rss_before_kb as f64)),
                ("rss_most_kb", Some(overload.rss_most_kb as f64)),
            ];
            let is_supported =
                |name: &str| percentiles::is_supported(name, overload.samples(name, self.settings.seconds));
            let figures = figures.into_iter().filter(|(name, _)| is_supported(name));
            metrics.extend(figures.filter_map(|(name, value)| Some((name.to_owned(), value?))));
        }
        let idle = run.shown.held.first().map(|held| held.memory.rss_kb as f64);
        for HeldMemory { connections, memory } in &run.shown.held {
            let rss = memory.rss_kb as f64;
            let Some(idle) = idle.filter(|_| *connections > 0) else {
                metrics.insert("rss_kb".to_owned(), rss);
                metrics.insert("pss_kb".to_owned(), memory.pss_kb as f64);
                continue;
            };
            metrics.insert(format!("rss_{connections}_kb"), rss);
            let each = (rss - idle) * 1_024.0 / *connections as f64;
            metrics.insert(format!("bytes_per_connection_{connections}"), each);
        }
        metrics
    }
}
