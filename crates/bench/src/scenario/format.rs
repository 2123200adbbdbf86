//! The format of a scenario of traffic: topologies, configuration, load, peers, what to measure, acceptance.
//!
//! A scenario has no property of a machine, so the same file can describe a run on another machine. Every value has
//! bounds. An error names the file, the line, the field and the remedy.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};
use skysail_yaml::Node;

use super::document::{Checked, decode, distinct, ensure, heading, message, text, within};
pub(super) use super::sizes::{SizeName, Sizes};
use crate::{
    access_log::{self, AccessLog},
    load::LoadProtocol,
    peers::Peer,
    percentiles,
    report::{LatencySettings, Series},
    topology::Topology,
    variant::{self, Variant},
};

/// Maximum number of connections of a turn.
const MAX_CONNECTIONS: usize = 4_096;
/// Maximum number of rounds; `bench diff` computes exact probabilities up to it.
pub(super) const MAX_ROUNDS: u32 = 30;

/// What a scenario studies. It decides on the other fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Study {
    /// Requests through sidecars: this format.
    #[default]
    Traffic,
    /// Generation of configuration.
    Generation,
    /// A whole mesh.
    Mesh,
    /// A control plane, with `skysail bench control`.
    Control,
    /// DNS queries, with `skysail bench dns`.
    Dns,
    /// Requests through sidecars over networks of several kinds.
    Networks,
    /// The airline example.
    Airline,
}

impl Study {
    fn is_traffic(&self) -> bool {
        *self == Self::Traffic
    }
}

/// A scenario of traffic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scenario {
    #[serde(default, skip_serializing_if = "Study::is_traffic")]
    study: Study,
    /// Name of the result files: lower-case letters, digits and hyphens.
    pub(super) name: String,
    pub(super) title: String,
    /// What the scenario answers.
    pub(super) question: String,
    /// Topologies between client and server. Added latency needs `baseline`.
    pub(super) topologies: Vec<Topology>,
    pub(super) configuration: Configuration,
    pub(super) load: ScenarioLoad,
    /// Proxies to compare.
    pub(super) peers: Vec<Peer>,
    /// What tables and plots show, and what `bench diff` compares.
    pub(super) measure: Vec<Measure>,
    #[serde(default)]
    pub(super) acceptance: Acceptance,
    pub(super) sizes: Sizes<RunSize>,
    /// Figures of others for the same question.
    #[serde(default)]
    pub(super) published: Vec<Published>,
}

/// Configuration of each sidecar.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Configuration {
    /// Worker threads (nginx: processes).
    pub(super) workers: u32,
    /// Access logs; each has its own turns. Default: none.
    #[serde(default = "access_log::only_none", skip_serializing_if = "access_log::is_only_none")]
    pub(super) access_logs: Vec<AccessLog>,
    /// Variants of the configuration; each has its own turns. Default: the usual one.
    #[serde(default = "variant::only_usual", skip_serializing_if = "variant::is_only_usual")]
    pub(super) variants: Vec<Variant>,
}

/// Load on the topology.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScenarioLoad {
    pub(super) protocol: LoadProtocol,
    /// Requests per second over all connections, due at even intervals.
    pub(super) rate: u32,
    /// Numbers of client connections; each number has its own turns.
    pub(super) connections: Vec<usize>,
    /// Bytes of the body of a request, and of its response.
    pub(super) payload: u32,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Measure {
    /// Latency from when requests were due.
    Latency,
    /// Latency over the baseline of the same round.
    AddedLatency,
    /// CPU time of each sidecar.
    Cpu,
    /// Resident memory of each sidecar.
    Memory,
    /// CPU time of all sidecars together, of it for the access log, and of the collectors.
    AccessLog,
    /// CPU time of all sidecars together, of it over the usual configuration, and of the authorizer.
    Variants,
}

/// A figure: its name in results, title, divisor of its unit, and decimals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) metric: &'static str,
    pub(super) title: &'static str,
    pub(super) unit: f64,
    pub(super) digits: usize,
    /// More is better. Of other figures, less is better.
    pub(super) is_gain: bool,
}

pub(super) const fn figure(metric: &'static str, title: &'static str, unit: f64, digits: usize) -> Figure {
    Figure { metric, title, unit, digits, is_gain: false }
}

impl Figure {
    /// Returns the figure as one of which more is better.
    pub(super) const fn gain(self) -> Self {
        Self { is_gain: true, ..self }
    }
}

impl Measure {
    const ALL: [Self; 6] =
        [Self::Latency, Self::AddedLatency, Self::Cpu, Self::Memory, Self::AccessLog, Self::Variants];

    /// Returns the figures of the group. Less is better in all of them.
    pub(super) fn figures(self) -> &'static [Figure] {
        const LATENCY: [Figure; 4] = [
            figure("latency_p50_us", "P50 µs", 1.0, 0),
            figure("latency_p90_us", "P90 µs", 1.0, 0),
            figure("latency_p99_us", "P99 µs", 1.0, 0),
            figure("latency_p99_9_us", "P99.9 µs", 1.0, 0),
        ];
        const ADDED: [Figure; 3] = [
            figure("added_p50_us", "added P50 µs", 1.0, 0),
            figure("added_p90_us", "added P90 µs", 1.0, 0),
            figure("added_p99_us", "added P99 µs", 1.0, 0),
        ];
        const CPU: [Figure; 3] = [
            figure("cpu_client_proxy_us_per_request", "client-proxy CPU µs", 1.0, 1),
            figure("cpu_gateway_proxy_us_per_request", "gateway CPU µs", 1.0, 1),
            figure("cpu_server_proxy_us_per_request", "server-proxy CPU µs", 1.0, 1),
        ];
        const MEMORY: [Figure; 3] = [
            figure("rss_client_proxy_kb", "client-proxy RSS MB", 1_024.0, 1),
            figure("rss_gateway_proxy_kb", "gateway RSS MB", 1_024.0, 1),
            figure("rss_server_proxy_kb", "server-proxy RSS MB", 1_024.0, 1),
        ];
        const ACCESS_LOG: [Figure; 3] = [
            figure("cpu_proxies_us_per_request", "sidecars CPU µs", 1.0, 1),
            figure("cpu_access_log_us_per_request", "of it for the log µs", 1.0, 1),
            figure("cpu_collectors_us_per_request", "collectors CPU µs", 1.0, 1),
        ];
        const VARIANTS: [Figure; 3] = [
            figure("cpu_proxies_us_per_request", "sidecars CPU µs", 1.0, 1),
            figure("cpu_variant_us_per_request", "over usual µs", 1.0, 1),
            figure("cpu_authorizers_us_per_request", "authorizer CPU µs", 1.0, 1),
        ];
        match self {
            Self::Latency => &LATENCY,
            Self::AddedLatency => &ADDED,
            Self::Cpu => &CPU,
            Self::Memory => &MEMORY,
            Self::AccessLog => &ACCESS_LOG,
            Self::Variants => &VARIANTS,
        }
    }

    /// Returns the figure with this name.
    fn figure(metric: &str) -> Option<Figure> {
        Self::ALL.iter().flat_map(|group| group.figures()).find(|figure| figure.metric == metric).copied()
    }
}

/// Conditions that a result must meet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Acceptance {
    /// Maximum share of failed requests of each turn, in percent. Default: 0.
    #[serde(default)]
    pub(super) failed_percent: f64,
    /// Maximum medians. They are checked only in the size `default`.
    #[serde(default)]
    pub(super) limits: Vec<Limit>,
}

/// Maximum of the median of a figure for each number of connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limit {
    pub(super) metric: String,
    pub(super) topology: Topology,
    /// Absent for the baseline.
    #[serde(default)]
    pub(super) peer: Option<Peer>,
    #[serde(default, skip_serializing_if = "AccessLog::is_none")]
    pub(super) access_log: AccessLog,
    #[serde(default, skip_serializing_if = "Variant::is_usual")]
    pub(super) variant: Variant,
    pub(super) at_most: f64,
}

/// Number and duration of turns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunSize {
    pub(super) rounds: u32,
    /// Duration of the measurement in each turn, in seconds.
    pub(super) seconds: f64,
    /// Duration of the load before the measurement, in seconds.
    pub(super) warmup: f64,
    /// Replaces `load.rate`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rate: Option<u32>,
    /// Replaces `load.connections`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) connections: Option<Vec<usize>>,
}

/// Figures that others have published.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Published {
    /// Name and version of the mesh.
    pub(super) system: String,
    /// Document or file, with its date and its method of measurement.
    pub(super) source: String,
    pub(super) topology: Topology,
    #[serde(default, skip_serializing_if = "AccessLog::is_none")]
    pub(super) access_log: AccessLog,
    #[serde(default, skip_serializing_if = "Variant::is_usual")]
    pub(super) variant: Variant,
    pub(super) rows: Vec<PublishedRow>,
}

impl Published {
    /// Returns the system, its variant and its access log, with its number in the list of sources.
    pub(super) fn label(&self, index: usize) -> String {
        format!("{} [{}]", self.access_log.after(&self.variant.after(&self.system)), index + 1)
    }
}

/// Figures of one number of connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PublishedRow {
    /// Absent if the source does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) connections: Option<usize>,
    /// Figures by their names in results.
    pub(super) metrics: BTreeMap<String, f64>,
}

impl ScenarioLoad {
    /// Returns the settings of a run of this size with all topologies, the usual configuration and no access logs. `rounds` replaces the number of
    /// the size.
    pub(super) fn settings(&self, size: &RunSize, rounds: Option<u32>, workers: u32) -> LatencySettings {
        LatencySettings {
            topologies: Topology::ALL.to_vec(),
            connections: size.connections.as_ref().unwrap_or(&self.connections).clone(),
            qps: size.rate.unwrap_or(self.rate),
            seconds: size.seconds,
            warmup: size.warmup,
            payload: self.payload as usize,
            rounds: rounds.unwrap_or(size.rounds),
            workers,
            access_logs: access_log::only_none(),
            variants: variant::only_usual(),
            protocol: self.protocol,
        }
    }
}

impl Limit {
    /// Returns the turns to which the limit applies.
    pub(super) fn series(&self) -> Series {
        Series {
            topology: self.topology,
            peer: self.peer,
            access_log: self.access_log,
            variant: self.variant,
        }
    }
}

impl Scenario {
    /// Checks the fields of a document. An error begins with the number of the line.
    pub(super) fn of(root: &Node) -> Result<Self, String> {
        let scenario: Self = decode(root)?;
        scenario.check().map_err(|(field, reason)| message(root, &field, &reason))?;
        Ok(scenario)
    }

    /// Returns the settings of a run. `rounds` replaces the number in the file.
    pub(super) fn settings(&self, size: SizeName, rounds: Option<u32>) -> LatencySettings {
        let size = self.sizes.of(size);
        let Configuration { workers, access_logs, variants } = &self.configuration;
        LatencySettings {
            topologies: self.topologies.clone(),
            access_logs: access_logs.clone(),
            variants: variants.clone(),
            ..self.load.settings(size, rounds, *workers)
        }
    }

    /// Fails if the scenario has no size of this name.
    pub(super) fn check_size(&self, size: SizeName) -> anyhow::Result<()> {
        self.sizes.check(&self.name, size)
    }

    /// Returns the figures to show, in order.
    pub(super) fn figures(&self) -> impl Iterator<Item = &'static Figure> + Clone {
        self.measure.iter().flat_map(|group| group.figures())
    }

    /// Checks the bounds. An error has the field and the reason.
    fn check(&self) -> Checked {
        heading(&self.name, &self.title, &self.question)?;
        distinct("topologies", &self.topologies, Topology::ALL.len())?;
        distinct("peers", &self.peers, 5)?;
        distinct("measure", &self.measure, Measure::ALL.len())?;
        self.check_access_logs()?;
        self.check_variants()?;
        let needs_baseline = self.measure.contains(&Measure::AddedLatency);
        ensure(!needs_baseline || self.topologies.contains(&Topology::Baseline), "topologies", || {
            "must contain baseline, because `measure` has added-latency".to_owned()
        })?;
        within("configuration.workers", f64::from(self.configuration.workers), 1.0, 256.0)?;
        check_load(&self.load, &self.sizes)?;
        self.check_protocol()?;
        self.check_acceptance()?;
        self.check_published()
    }

    /// Checks that topologies, access logs and peers are possible with the protocol.
    fn check_protocol(&self) -> Checked {
        let protocol = self.load.protocol;
        let has_mtls = self.topologies.contains(&Topology::ServerMtls);
        ensure(protocol.is_http1() || !has_mtls, "topologies", || {
            "server-mtls is measured with the protocol http1 only; leave it out".to_owned()
        })?;
        let has_logs = !access_log::is_only_none(&self.configuration.access_logs);
        ensure(protocol != LoadProtocol::Tcp || !has_logs, "configuration.access_logs", || {
            "an access log has no entries of requests over tcp; leave it out".to_owned()
        })?;
        check_peers(protocol, &self.peers)
    }

    fn check_access_logs(&self) -> Checked {
        let logs = &self.configuration.access_logs;
        distinct("configuration.access_logs", logs, AccessLog::ALL.len())?;
        let needs_none = self.measure.contains(&Measure::AccessLog);
        ensure(!needs_none || logs.contains(&AccessLog::None), "configuration.access_logs", || {
            "must contain none, because `measure` has access-log".to_owned()
        })?;
        self.peer_without_access_log(&self.peers)
            .map_or(Ok(()), |(index, reason)| Err((format!("peers[{index}]"), reason)))
    }

    fn check_variants(&self) -> Checked {
        let Configuration { variants, access_logs, .. } = &self.configuration;
        distinct("configuration.variants", variants, Variant::ALL.len())?;
        let needs_usual = self.measure.contains(&Measure::Variants);
        ensure(!needs_usual || variants.contains(&Variant::Usual), "configuration.variants", || {
            "must contain usual, because `measure` has variants".to_owned()
        })?;
        if variant::is_only_usual(variants) {
            return Ok(());
        }
        ensure(access_log::is_only_none(access_logs), "configuration.access_logs", || {
            "must be left out, because there are variants; use the variant access-log".to_owned()
        })?;
        ensure(self.load.protocol.is_http1(), "configuration.variants", || {
            "are measured with the protocol http1 only; leave them out".to_owned()
        })?;
        let needs_both = [Topology::Baseline, Topology::BothSidecars];
        ensure(
            self.topologies.iter().all(|topology| needs_both.contains(topology)),
            "configuration.variants",
            || "are measured in baseline and both-sidecars only; leave the other topologies out".to_owned(),
        )
    }

    /// Returns the index of the first peer that cannot have the access logs of the scenario, and the remedy.
    fn peer_without_access_log(&self, peers: &[Peer]) -> Option<(usize, String)> {
        let has_logs = !access_log::is_only_none(&self.configuration.access_logs);
        let index = peers.iter().position(|peer| has_logs && !peer.has_access_log())?;
        let name = peers[index].name();
        Some((
            index,
            format!(
                "{name} is measured without access logs only; leave it out, or configuration.access_logs"
            ),
        ))
    }

    /// Fails if the scenario cannot be run with one of these peers.
    pub(super) fn check_peers(&self, peers: &[(Peer, PathBuf)]) -> anyhow::Result<()> {
        let peers: Vec<Peer> = peers.iter().map(|(peer, _)| *peer).collect();
        let refused = self.peer_without_access_log(&peers);
        refused
            .map_or(Ok(()), Err)
            .map_err(|(_, reason)| reason)
            .and_then(|()| check_peers(self.load.protocol, &peers).map_err(|(_, reason)| reason))
            .map_err(|reason| anyhow::anyhow!("{}: --peers: {reason}", self.name))
    }

    fn check_acceptance(&self) -> Checked {
        within("acceptance.failed_percent", self.acceptance.failed_percent, 0.0, 100.0)?;
        for (index, limit) in self.acceptance.limits.iter().enumerate() {
            let field = |field: &str| format!("acceptance.limits[{index}].{field}");
            ensure(Measure::figure(&limit.metric).is_some(), &field("metric"), unknown_metric)?;
            within(&field("at_most"), limit.at_most, 0.0, 1e12)?;
            let settings = self.settings(SizeName::Default, None);
            let requests = f64::from(settings.qps) * settings.seconds;
            let is_supported = percentiles::is_supported(&limit.metric, requests as u64);
            ensure(is_supported, &field("metric"), || {
                format!(
                    "has too few of the {requests:.0} requests of a turn in the size default beyond it, so the limit is never \
                     checked; use another percentile or more seconds"
                )
            })?;
            let has_peer = limit.peer.is_some();
            ensure(has_peer != (limit.topology == Topology::Baseline), &field("peer"), || {
                "must name a peer, unless the topology is baseline".to_owned()
            })?;
            ensure(self.topologies.contains(&limit.topology), &field("topology"), || {
                "must be one of `topologies`, else the limit is never checked".to_owned()
            })?;
            ensure(self.configuration.access_logs.contains(&limit.access_log), &field("access_log"), || {
                "must be one of `configuration.access_logs`, else the limit is never checked".to_owned()
            })?;
            ensure(self.configuration.variants.contains(&limit.variant), &field("variant"), || {
                "must be one of `configuration.variants`, else the limit is never checked".to_owned()
            })?;
            ensure(limit.peer.is_none_or(|peer| self.peers.contains(&peer)), &field("peer"), || {
                "must be one of `peers`, else the limit is never checked".to_owned()
            })?;
        }
        Ok(())
    }

    fn check_published(&self) -> Checked {
        for (index, published) in self.published.iter().enumerate() {
            text(&format!("published[{index}].system"), &published.system, 60)?;
            text(&format!("published[{index}].source"), &published.source, 500)?;
            for (row, PublishedRow { metrics, .. }) in published.rows.iter().enumerate() {
                for (metric, value) in metrics {
                    let field = format!("published[{index}].rows[{row}].metrics.{metric}");
                    ensure(Measure::figure(metric).is_some(), &field, unknown_metric)?;
                    within(&field, *value, 0.0, 1e12)?;
                }
            }
        }
        Ok(())
    }
}

/// Checks that peers without TLS of the client can carry a protocol.
pub(super) fn check_peers(protocol: LoadProtocol, peers: &[Peer]) -> Checked {
    for (index, peer) in peers.iter().enumerate() {
        let unable = peer.unable(protocol.traffic().protocol(), false);
        unable.map_or(Ok(()), |reason| {
            Err((format!("peers[{index}]"), format!("{reason}; leave {} out", peer.name())))
        })?;
    }
    Ok(())
}

/// Checks the load of a scenario, and its sizes.
pub(super) fn check_load(load: &ScenarioLoad, sizes: &Sizes<RunSize>) -> Checked {
    within("load.rate", f64::from(load.rate), 1.0, 1e6)?;
    // Without a byte there is no echo.
    let least = if load.protocol == LoadProtocol::Tcp { 1.0 } else { 0.0 };
    within("load.payload", f64::from(load.payload), least, 524_288.0)?;
    connections("load.connections", &load.connections)?;
    for (name, size) in sizes.all() {
        let field = |field: &str| format!("sizes.{name}.{field}");
        within(&field("rounds"), f64::from(size.rounds), 1.0, f64::from(MAX_ROUNDS))?;
        within(&field("seconds"), size.seconds, 0.1, 3_600.0)?;
        within(&field("warmup"), size.warmup, 0.1, 3_600.0)?;
        within(&field("rate"), f64::from(size.rate.unwrap_or(1)), 1.0, 1e6)?;
        size.connections.as_ref().map_or(Ok(()), |numbers| connections(&field("connections"), numbers))?;
    }
    Ok(())
}

fn connections(field: &str, numbers: &[usize]) -> Checked {
    distinct(field, numbers, 32)?;
    for (index, number) in numbers.iter().enumerate() {
        within(&format!("{field}[{index}]"), *number as f64, 1.0, MAX_CONNECTIONS as f64)?;
    }
    Ok(())
}

fn unknown_metric() -> String {
    let names: Vec<&str> =
        Measure::ALL.iter().flat_map(|group| group.figures()).map(|figure| figure.metric).collect();
    format!("no such metric; use {}", names.join(", "))
}
