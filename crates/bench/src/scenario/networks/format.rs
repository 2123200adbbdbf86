//! The format of a scenario of networks: networks, load, peers, what to measure, acceptance, sizes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use skysail_yaml::Node;

use crate::{
    network::NetworkInput,
    peers::Peer,
    report::{self, LatencySettings},
    scenario::{
        cases::{
            CaseAcceptance, CaseLimit, CaseReport, CaseSettings, CaseStudy, PublishedCase, check_published,
        },
        document::{Checked, decode, distinct, heading, is_name, message, within},
        format::{Figure, RunSize, ScenarioLoad, SizeName, Sizes, Study, check_load, check_peers, figure},
    },
    topology::Measurement,
};

/// Name of the client without sidecars in the names of cases.
const NO_SIDECARS: &str = "none";

/// A scenario of networks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct NetworksScenario {
    study: Study,
    /// Name of the result file: lower-case letters, digits and hyphens.
    pub(in crate::scenario) name: String,
    pub(in crate::scenario) title: String,
    /// What the scenario answers.
    pub(in crate::scenario) question: String,
    /// Networks; each has turns without sidecars and with those of each peer.
    pub(super) networks: Vec<NetworkInput>,
    configuration: NetworksConfiguration,
    load: ScenarioLoad,
    /// Proxies to compare.
    pub(in crate::scenario) peers: Vec<Peer>,
    /// What tables and plots show, and what `bench diff` compares.
    measure: Vec<NetworksMeasure>,
    #[serde(default)]
    acceptance: CaseAcceptance,
    sizes: Sizes<RunSize>,
    /// Figures of others for the same question.
    #[serde(default)]
    published: Vec<PublishedCase>,
}

/// Configuration of each sidecar.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworksConfiguration {
    /// Worker threads (nginx: processes).
    workers: u32,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::scenario) enum NetworksMeasure {
    /// Latency from when requests were due.
    Latency,
    /// CPU time of both sidecars, and of client and server.
    Cpu,
    /// Resident memory of both sidecars.
    Memory,
}

/// A network with the sidecars of a peer, or without sidecars, and a number of connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scenario) struct NetworkCase {
    /// `NETWORK/PEER/CONNECTIONS`.
    name: String,
    /// Title of the section.
    section: String,
    pub(super) network: String,
    pub(super) peer: Option<Peer>,
    pub(super) connections: usize,
}

impl NetworksMeasure {
    const ALL: [Self; 3] = [Self::Latency, Self::Cpu, Self::Memory];

    /// Returns the figures of the group. Less is better in all of them.
    fn figures(self) -> &'static [Figure] {
        const LATENCY: [Figure; 4] = [
            figure("latency_p50_us", "P50 µs", 1.0, 0),
            figure("latency_p90_us", "P90 µs", 1.0, 0),
            figure("latency_p99_us", "P99 µs", 1.0, 0),
            figure("latency_p99_9_us", "P99.9 µs", 1.0, 0),
        ];
        const CPU: [Figure; 2] = [
            figure("cpu_proxies_us_per_request", "sidecars CPU µs", 1.0, 1),
            figure("cpu_ends_us_per_request", "ends CPU µs", 1.0, 1),
        ];
        const MEMORY: [Figure; 1] = [figure("rss_proxies_kb", "sidecars RSS MB", 1_024.0, 1)];
        match self {
            Self::Latency => &LATENCY,
            Self::Cpu => &CPU,
            Self::Memory => &MEMORY,
        }
    }
}

impl NetworksScenario {
    /// Checks the fields of a document. An error begins with the number of the line.
    pub(in crate::scenario) fn of(root: &Node) -> Result<Self, String> {
        let scenario: Self = decode(root)?;
        scenario.check().map_err(|(field, reason)| message(root, &field, &reason))?;
        Ok(scenario)
    }

    /// Fails if the scenario has no size of this name.
    pub(in crate::scenario) fn check_size(&self, size: SizeName) -> anyhow::Result<()> {
        self.sizes.check(&self.name, size)
    }

    /// Returns the settings of a run. `rounds` replaces the number in the file.
    pub(super) fn settings(&self, size: SizeName, rounds: Option<u32>) -> LatencySettings {
        self.load.settings(self.sizes.of(size), rounds, self.configuration.workers)
    }

    /// Returns the cases of a run: for each number of connections all networks without sidecars, then with those of each
    /// peer.
    pub(super) fn cases(&self, connections: &[usize], peers: &[Peer]) -> Vec<NetworkCase> {
        let peers: Vec<Option<Peer>> = [None].into_iter().chain(peers.iter().copied().map(Some)).collect();
        let mut cases = Vec::new();
        for &connections in connections {
            for &peer in &peers {
                let name = peer.map_or(NO_SIDECARS, Peer::name);
                cases.extend(self.networks.iter().map(|network| NetworkCase {
                    name: format!("{}/{name}/{connections}", network.name),
                    section: format!("{connections} connections"),
                    network: network.name.clone(),
                    peer,
                    connections,
                }));
            }
        }
        cases
    }

    fn check(&self) -> Checked {
        heading(&self.name, &self.title, &self.question)?;
        let names: Vec<&str> = self.networks.iter().map(|network| network.name.as_str()).collect();
        distinct("networks", &names, 16)?;
        for (index, network) in self.networks.iter().enumerate() {
            let field = |field: &str| format!("networks[{index}].{field}");
            is_name(&field("name"), &network.name)?;
            within(&field("delay_ms"), network.delay_ms, 0.0, 1_000.0)?;
            within(&field("loss_percent"), network.loss_percent, 0.0, 50.0)?;
            within(&field("bandwidth_mbit"), network.bandwidth_mbit.unwrap_or(1).into(), 1.0, 100_000.0)?;
        }
        within("configuration.workers", f64::from(self.configuration.workers), 1.0, 256.0)?;
        distinct("peers", &self.peers, 5)?;
        distinct("measure", &self.measure, NetworksMeasure::ALL.len())?;
        check_load(&self.load, &self.sizes)?;
        check_peers(self.load.protocol, &self.peers)?;
        let figures = NetworksMeasure::ALL.iter().flat_map(|group| group.figures());
        let settings = self.settings(SizeName::Default, None);
        let cases = self.cases(&settings.connections, &self.peers);
        let cases: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        self.acceptance.check(figures.clone(), &cases)?;
        check_published(&self.published, figures)
    }
}

impl CaseStudy for NetworksScenario {
    type Case = NetworkCase;
    type Group = NetworksMeasure;
    type Measurement = Measurement;

    const COLUMNS: [&'static str; 2] = ["network", "requests/s"];

    fn heading(&self) -> [&str; 3] {
        [&self.name, &self.title, &self.question]
    }

    fn groups(&self) -> &[NetworksMeasure] {
        &self.measure
    }

    fn limits(&self) -> &[CaseLimit] {
        &self.acceptance.limits
    }

    fn name(case: &NetworkCase) -> &str {
        &case.name
    }

    fn section(case: &NetworkCase) -> &str {
        &case.section
    }

    fn is_own(case: &NetworkCase) -> bool {
        case.peer == Some(Peer::Skysail)
    }

    fn amount(measured: &Measurement) -> String {
        format!("{:.0}", measured.answers_per_second)
    }

    fn progress(measured: &Measurement) -> String {
        measured.short()
    }

    fn violation(&self, _: &str, measured: &Measurement) -> Option<String> {
        self.acceptance.violation(measured.unanswered + measured.refused, measured.requests)
    }

    fn published(&self) -> &[PublishedCase] {
        &self.published
    }

    fn figures(group: NetworksMeasure) -> &'static [Figure] {
        group.figures()
    }

    fn group_title(group: NetworksMeasure) -> &'static str {
        match group {
            NetworksMeasure::Latency => "Latency from when requests were due, µs",
            NetworksMeasure::Cpu => "CPU time for a request, µs",
            NetworksMeasure::Memory => "Resident memory of both sidecars, MB",
        }
    }

    /// Of latencies, P90 and P99 are plotted, as in the study of AKS.
    fn plots(group: NetworksMeasure) -> Vec<Vec<&'static Figure>> {
        let is_plotted = |figure: &&Figure| !matches!(figure.metric, "latency_p50_us" | "latency_p99_9_us");
        vec![group.figures().iter().filter(is_plotted).collect()]
    }

    fn are_parts(group: NetworksMeasure) -> bool {
        group != NetworksMeasure::Latency
    }

    fn metrics(measured: &Measurement) -> BTreeMap<String, f64> {
        report::metrics(measured, None)
    }

    fn legend(&self, report: &CaseReport<Self>) -> Vec<String> {
        let late = report.summary.iter().filter_map(|row| row.metrics.get("generator_late_p99_us"));
        let late = late.map(|spread| spread.median).fold(0.0, f64::max);
        vec![
            report::legend(report.settings.rounds),
            "none: without sidecars and without mutual TLS. Others: a sidecar beside the client and one beside the server, with \
             mutual TLS between them. The last part of a name is the number of connections."
                .to_owned(),
            "Latency counts from when requests were due. CPU: time of both sidecars for a request, and of the ends, which are \
             client and server; 1 µs is 1 mCPU at 1,000 requests/s. The work of nodes is part of the process that causes \
             it, or of none. RSS: memory of both sidecars."
                .to_owned(),
            format!(
                "The load generator itself was late by at most {late:.0} µs at P99 (the case with the greatest median); \
                 latencies include this."
            ),
        ]
    }

    fn method(&self, settings: &CaseSettings<NetworkCase>) -> String {
        let ScenarioLoad { payload, protocol, .. } = self.load;
        settings.method(&format!(
            "requests over {} with {payload} bytes each way, due at even intervals; {} workers of each sidecar; pods and nodes \
             are network namespaces of this machine",
            protocol.title(),
            self.configuration.workers
        ))
    }
}
