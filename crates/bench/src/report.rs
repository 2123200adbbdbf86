//! Result of `skysail bench latency` and of a scenario: all turns, medians and ranges over the rounds, ratios between peers, and
//! tables.
//!
//! Added latency and the ratio of two peers are computed within a round and then summarized: a machine's speed drifts,
//! and consecutive turns see the same drift.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
};

use serde::{Deserialize, Serialize};

use crate::{
    access_log::{self, AccessLog},
    foreign_load::{self, ForeignLoad},
    layout,
    load::LoadProtocol,
    node::AUTHORIZER,
    peers::Peer,
    percentiles,
    topology::{Measurement, Topology},
    variant::{self, Variant},
};

/// The result file; `docs/benchmarks.md` describes its format.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LatencyReport {
    /// Incremented when the meaning of a field changes.
    pub(crate) format: u32,
    pub(crate) benchmark: String,
    pub(crate) version: String,
    /// Git commit of the source tree that contains this program, at the time of the run.
    #[serde(default)]
    pub(crate) commit: Option<String>,
    /// Seconds since 1970.
    pub(crate) started: u64,
    /// The run was ended before all turns were taken.
    pub(crate) interrupted: bool,
    pub(crate) machine: Machine,
    pub(crate) settings: LatencySettings,
    pub(crate) peers: BTreeMap<String, Program>,
    pub(crate) runs: Vec<LatencyRun>,
    /// Attempts at disturbed turns that do not count, because another attempt is in `runs`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) repeated: Vec<LatencyRun>,
    /// Computed from the turns.
    #[serde(skip_deserializing)]
    pub(crate) summary: Vec<SummaryRow>,
    #[serde(skip_deserializing)]
    pub(crate) comparisons: Vec<PeerRatio>,
}

/// Machine of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    /// Load average at the start.
    pub(crate) load: f64,
    /// Other processes before the first turn. Absent where they do not matter, and in results of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) busy: Option<ForeignLoad>,
    /// `own namespace`, or the reason why not.
    pub(crate) network: String,
    pub(crate) congestion_control: String,
    /// `SCHED_RR`, or the reason why not.
    pub(crate) scheduling: String,
}

/// Settings of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LatencySettings {
    pub(crate) topologies: Vec<Topology>,
    pub(crate) connections: Vec<usize>,
    pub(crate) qps: u32,
    pub(crate) seconds: f64,
    pub(crate) warmup: f64,
    pub(crate) payload: usize,
    pub(crate) rounds: u32,
    pub(crate) workers: u32,
    /// Access logs of the sidecars; each has its own turns. Absent if there is none.
    #[serde(default = "access_log::only_none", skip_serializing_if = "access_log::is_only_none")]
    pub(crate) access_logs: Vec<AccessLog>,
    /// Variants of the sidecars' configuration; each has its own turns. Absent if there is only the usual one.
    #[serde(default = "variant::only_usual", skip_serializing_if = "variant::is_only_usual")]
    pub(crate) variants: Vec<Variant>,
    /// Absent for HTTP/1.1.
    #[serde(default, skip_serializing_if = "LoadProtocol::is_http1")]
    pub(crate) protocol: LoadProtocol,
}

/// Program of a peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Program {
    /// Name of the file.
    pub(crate) file: String,
    pub(crate) version: String,
}

/// Settings of turns that differ in their round and number of connections: a line of a plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Series {
    pub(crate) topology: Topology,
    /// Absent without a proxy.
    pub(crate) peer: Option<Peer>,
    /// Access log of the sidecars. Absent without one, and in results of earlier versions.
    #[serde(default, skip_serializing_if = "AccessLog::is_none")]
    pub(crate) access_log: AccessLog,
    /// Variant of the sidecars' configuration. Absent for the usual one.
    #[serde(default, skip_serializing_if = "Variant::is_usual")]
    pub(crate) variant: Variant,
}

impl Series {
    /// The topology without sidecars.
    pub(crate) const BASELINE: Self = Self {
        topology: Topology::Baseline,
        peer: None,
        access_log: AccessLog::None,
        variant: Variant::Usual,
    };

    /// Returns the proxy, its variant and its access log, as in `envoy, stdout`.
    pub(crate) fn measured_with(self) -> String {
        let peer = self.peer.map_or("no sidecar", Peer::name);
        self.access_log.after(&self.variant.after(peer))
    }
}

/// Topology, proxy and access log, as in `both-sidecars, envoy, stdout`.
impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.topology.name(), self.measured_with())
    }
}

/// A turn.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LatencyRun {
    pub(crate) round: u32,
    #[serde(flatten)]
    pub(crate) series: Series,
    pub(crate) connections: usize,
    #[serde(flatten)]
    pub(crate) measurement: Option<Measurement>,
    pub(crate) error: Option<String>,
    /// Other processes during the turn. Absent if it was too short to know, and in results of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) busy: Option<ForeignLoad>,
}

/// A value over the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Returns the value in another unit.
    pub(crate) fn divided_by(self, unit: f64) -> Self {
        Self { median: self.median / unit, min: self.min / unit, max: self.max / unit }
    }
}

/// A setting over the rounds.
#[derive(Debug, Serialize)]
pub(crate) struct SummaryRow {
    #[serde(flatten)]
    pub(crate) series: Series,
    pub(crate) connections: usize,
    /// Number of successful turns, and of failed ones.
    pub(crate) rounds: usize,
    pub(crate) failed: usize,
    pub(crate) metrics: BTreeMap<String, Spread>,
}

/// Ratio of the first peer to another one: its value divided by the other's, round by round.
#[derive(Debug, Serialize)]
pub(crate) struct PeerRatio {
    pub(crate) topology: Topology,
    #[serde(skip_serializing_if = "AccessLog::is_none")]
    pub(crate) access_log: AccessLog,
    #[serde(skip_serializing_if = "Variant::is_usual")]
    pub(crate) variant: Variant,
    pub(crate) connections: usize,
    pub(crate) peer: Peer,
    pub(crate) other: Peer,
    pub(crate) ratios: BTreeMap<String, Spread>,
}

/// End of the names of sidecars in measurements.
const PROXY: &str = "-proxy";
const COMPARED: [&str; 4] = ["cpu_proxies_us_per_request", "rss_proxies_kb", "added_p50_us", "added_p99_us"];

impl LatencyReport {
    /// Computes the summary and the comparisons of the turns so far.
    pub(crate) fn summarize(&mut self) {
        let mut settings: Vec<(Series, usize)> = Vec::new();
        for run in &self.runs {
            let setting = (run.series, run.connections);
            if !settings.contains(&setting) {
                settings.push(setting);
            }
        }
        let order = &self.settings.topologies;
        settings.sort_by_key(|(series, connections)| {
            (order.iter().position(|topology| *topology == series.topology), *connections)
        });
        self.summary = settings.iter().map(|setting| self.row(*setting)).collect();
        self.comparisons =
            settings.iter().filter_map(|setting| self.comparison(*setting, &settings)).collect();
    }

    fn row(&self, (series, connections): (Series, usize)) -> SummaryRow {
        let rounds = self.metrics_by_round(series, connections);
        let mut values: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
        for (name, value) in rounds.values().flatten() {
            values.entry(name).or_default().push(*value);
        }
        let metrics = values.into_iter().filter_map(|(name, values)| Some((name.clone(), spread(values)?)));
        let failed = self.runs_of(series, connections).filter(|run| run.error.is_some()).count();
        SummaryRow { series, connections, rounds: rounds.len(), failed, metrics: metrics.collect() }
    }

    /// Compares the first peer at this setting with the setting's own peer.
    fn comparison(
        &self,
        (series, connections): (Series, usize),
        settings: &[(Series, usize)],
    ) -> Option<PeerRatio> {
        let other = series.peer?;
        let is_same = |(one, number): &&(Series, usize)| {
            (Series { peer: series.peer, ..*one }, *number) == (series, connections)
        };
        let first = settings.iter().find(is_same)?.0.peer?;
        if first == other {
            return None;
        }
        let own = self.metrics_by_round(Series { peer: Some(first), ..series }, connections);
        let others = self.metrics_by_round(series, connections);
        let ratio = |name: &str| {
            let in_round = |(round, metrics): (&u32, &BTreeMap<String, f64>)| {
                let other = *others.get(round)?.get(name)?;
                (other > 0.0).then_some(*metrics.get(name)? / other)
            };
            spread(own.iter().filter_map(in_round).collect())
        };
        let ratios = COMPARED.iter().filter_map(|name| Some(((*name).to_owned(), ratio(name)?))).collect();
        Some(PeerRatio {
            topology: series.topology,
            access_log: series.access_log,
            variant: series.variant,
            connections,
            peer: first,
            other,
            ratios,
        })
    }

    fn runs_of(&self, series: Series, connections: usize) -> impl Iterator<Item = &LatencyRun> {
        self.runs.iter().filter(move |run| (run.series, run.connections) == (series, connections))
    }

    /// Returns the figures of a setting by round and name.
    pub(crate) fn metrics_by_round(
        &self,
        series: Series,
        connections: usize,
    ) -> BTreeMap<u32, BTreeMap<String, f64>> {
        let figures = |run: &LatencyRun| {
            let measurement = run.measurement.as_ref()?;
            let in_round = |series: Series| {
                let other = self.runs_of(series, connections).find(|other| other.round == run.round);
                other.and_then(|other| other.measurement.as_ref())
            };
            let baseline = in_round(Series::BASELINE).filter(|_| series.peer.is_some());
            let mut figures = metrics(measurement, baseline);
            let without_log = in_round(Series { access_log: AccessLog::None, ..series });
            if let Some(without) = without_log.filter(|_| !series.access_log.is_none()) {
                let cost = cpu_of_proxies(measurement) - cpu_of_proxies(without);
                figures.insert("cpu_access_log_us_per_request".to_owned(), cost);
            }
            let usual = in_round(Series { variant: Variant::Usual, ..series });
            if let Some(usual) = usual.filter(|_| !series.variant.is_usual()) {
                let cost = cpu_of_proxies(measurement) - cpu_of_proxies(usual);
                figures.insert("cpu_variant_us_per_request".to_owned(), cost);
            }
            Some((run.round, figures))
        };
        self.runs_of(series, connections).filter_map(figures).collect()
    }

    /// Returns the tables in Markdown, with their legend.
    pub(crate) fn tables(&self) -> String {
        let mut text = String::new();
        for topology in &self.settings.topologies {
            let rows: Vec<&SummaryRow> =
                self.summary.iter().filter(|row| row.series.topology == *topology).collect();
            if !rows.is_empty() {
                // Writing to a String cannot fail.
                let _ = write!(text, "### {}\n\n{}\n\n", topology.name(), table(&rows));
            }
        }
        if !self.comparisons.is_empty() {
            let _ = write!(text, "### ratios\n\n{}\n\n", ratios(&self.comparisons));
        }
        for line in self.legend() {
            let _ = writeln!(text, "{}", layout::paragraph(&line));
        }
        text
    }

    /// Returns a line about disturbed turns, if there were any.
    pub(crate) fn disturbed(&self) -> Option<String> {
        foreign_load::disturbed(self.runs.iter().map(|run| run.busy), self.repeated.len())
    }

    fn legend(&self) -> Vec<String> {
        let mut lines = vec![legend(self.settings.rounds), COSTS.to_owned(), percentiles::RULE.to_owned()];
        lines.extend(self.disturbed());
        if let Some(PeerRatio { peer, other, .. }) = self.comparisons.first() {
            let (peer, other) = (peer.name(), other.name());
            lines.push(format!(
                "{peer} / {other}: {peer}'s figure divided by {other}'s of the same round; 0.50 is half as much. \
                 \"-\": a figure is missing, or {other}'s is not above 0."
            ));
        }
        lines
    }
}

/// Returns the explanation of the figures and of the column `failed`, for all tables with rounds.
pub(crate) fn legend(rounds: u32) -> String {
    format!(
        "Figures: medians (min–max) over the rounds, here {rounds}. failed 0/{rounds}: 0 of {rounds} turns failed. A turn fails \
         if a process ends or more than 1 % of its requests fail; the figures leave it out."
    )
}

/// Returns the figures of a turn by their names in summaries, without percentiles of too few requests.
pub(crate) fn metrics(run: &Measurement, baseline: Option<&Measurement>) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    let quantiles = |run: &Measurement| {
        let l = &run.latency_us;
        [("p50", l.p50), ("p90", l.p90), ("p99", l.p99), ("p99_9", l.p99_9)]
    };
    for (name, value) in quantiles(run) {
        metrics.insert(format!("latency_{name}_us"), value);
    }
    if let Some(baseline) = baseline {
        for ((name, value), (_, without)) in quantiles(run).into_iter().zip(quantiles(baseline)) {
            metrics.insert(format!("added_{name}_us"), value - without);
        }
    }
    let samples = baseline.map_or(u64::MAX, Measurement::answered).min(run.answered());
    metrics.retain(|metric, _| {
        let of_both = metric.starts_with("added_");
        percentiles::is_supported(metric, if of_both { samples } else { run.answered() })
    });
    let mut add = |name: String, value: f64| *metrics.entry(name).or_default() += value;
    for (part, cost) in &run.parts {
        let proxy = part.ends_with(PROXY);
        let group = match part {
            _ if proxy => "proxies",
            part if part.ends_with("-collector") => "collectors",
            part if part == AUTHORIZER => "authorizers",
            _ => "ends",
        };
        for name in [part.replace('-', "_"), group.to_owned()] {
            add(format!("cpu_{name}_us_per_request"), cost.cpu_us_per_request);
            if let Some(user) = cost.cpu_user_us_per_request.filter(|_| proxy) {
                add(format!("cpu_user_{name}_us_per_request"), user);
                add(format!("cpu_kernel_{name}_us_per_request"), cost.cpu_us_per_request - user);
            }
            if let Some(memory) = cost.memory.filter(|_| proxy) {
                add(format!("rss_{name}_kb"), memory.rss_kb as f64);
                add(format!("pss_{name}_kb"), memory.pss_kb as f64);
            }
        }
    }
    add("answers_per_second".to_owned(), run.answers_per_second);
    add("other_cpus".to_owned(), run.other_cpus);
    let is_supported = percentiles::is_supported("generator_late_p99_us", run.requests);
    if let Some(late) = run.generator_late_p99_us.filter(|_| is_supported) {
        add("generator_late_p99_us".to_owned(), late);
    }
    metrics
}

/// Returns the CPU time of all proxies for a request, in microseconds.
fn cpu_of_proxies(run: &Measurement) -> f64 {
    let proxies = run.parts.iter().filter(|(part, _)| part.ends_with(PROXY));
    proxies.map(|(_, cost)| cost.cpu_us_per_request).sum()
}

/// Returns median, minimum and maximum. The median of an even number of values is between the two in the middle.
pub(crate) fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_by(f64::total_cmp);
    let (min, max) = (*values.first()?, *values.last()?);
    let middle = values.len() / 2;
    let median = if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    };
    Some(Spread { median, min, max })
}

const COLUMNS: [(&str, &str, f64, usize); 13] = [
    ("P50 µs", "latency_p50_us", 1.0, 0),
    ("P90 µs", "latency_p90_us", 1.0, 0),
    ("P99 µs", "latency_p99_us", 1.0, 0),
    ("P99.9 µs", "latency_p99_9_us", 1.0, 0),
    ("added P50 µs", "added_p50_us", 1.0, 0),
    ("added P99 µs", "added_p99_us", 1.0, 0),
    ("proxies CPU µs", "cpu_proxies_us_per_request", 1.0, 1),
    ("user µs", "cpu_user_proxies_us_per_request", 1.0, 1),
    ("ends CPU µs", "cpu_ends_us_per_request", 1.0, 1),
    ("client RSS MB", "rss_client_proxy_kb", 1024.0, 1),
    ("server RSS MB", "rss_server_proxy_kb", 1024.0, 1),
    ("server PSS MB", "pss_server_proxy_kb", 1024.0, 1),
    ("others' CPUs", "other_cpus", 1.0, 2),
];

const COSTS: &str = "CPU: for a request; proxies: of all proxies, user: the part in user space, ends: client and server. RSS, PSS: \
    memory of the client's and of the server's proxy. added: over the baseline of the same round.";

fn table(rows: &[&SummaryRow]) -> String {
    let columns: Vec<_> = COLUMNS
        .iter()
        .filter(|(_, name, ..)| rows.iter().any(|row| row.metrics.contains_key(*name)))
        .collect();
    let titles = columns.iter().map(|(title, ..)| *title);
    let head = ["connections", "peer", "failed"].into_iter().chain(titles);
    let line = |row: &&SummaryRow| {
        let cells = columns.iter().map(|(_, name, unit, digits)| {
            row.metrics.get(*name).map_or_else(|| "-".to_owned(), |spread| cell(spread, *unit, *digits))
        });
        let start = [
            row.connections.to_string(),
            row.series.peer.map_or("-", Peer::name).to_owned(),
            failed(row.failed, row.rounds),
        ];
        start.into_iter().chain(cells).collect()
    };
    let head: Vec<String> = head.map(str::to_owned).collect();
    layout::tables(2, &head, &rows.iter().map(line).collect::<Vec<_>>())
}

fn ratios(comparisons: &[PeerRatio]) -> String {
    let columns = [
        ("CPU", "cpu_proxies_us_per_request"),
        ("RSS", "rss_proxies_kb"),
        ("added P50", "added_p50_us"),
        ("added P99", "added_p99_us"),
    ];
    let head = ["topology", "connections", "ratio"].into_iter().chain(columns.map(|(title, _)| title));
    let line = |one: &PeerRatio| {
        let start = [
            one.topology.name().to_owned(),
            one.connections.to_string(),
            format!("{} / {}", one.peer.name(), one.other.name()),
        ];
        let ratio = |(_, name): (&str, &str)| {
            one.ratios.get(name).map_or_else(|| "-".to_owned(), |ratio| cell(ratio, 1.0, 2))
        };
        start.into_iter().chain(columns.map(ratio)).collect()
    };
    let head: Vec<String> = head.map(str::to_owned).collect();
    layout::tables(3, &head, &comparisons.iter().map(line).collect::<Vec<_>>())
}

/// Returns the number of failed turns of all turns, as in `0/3`.
pub(crate) fn failed(failed: usize, rounds: usize) -> String {
    format!("{failed}/{}", failed + rounds)
}

/// Returns median and range as text.
pub(crate) fn cell(spread: &Spread, unit: f64, digits: usize) -> String {
    let number = |value: f64| format!("{:.digits$}", value / unit);
    let (min, max) = (number(spread.min), number(spread.max));
    if min == max { min } else { format!("{} ({min}–{max})", number(spread.median)) }
}

#[cfg(test)]
mod tests;
