//! The format of a scenario of a mesh: graphs with their load, peers, what to measure, acceptance, sizes.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use skysail_yaml::Node;

use super::{
    phases::{self, PhaseInput},
    size::{self, MeshSize},
    telemetry::{self, MeshTelemetry, OF_TELEMETRY},
};
use crate::{
    graph::{GraphDeployment, MeshPolicies},
    mesh::{MeshMeasurement, MeshPart},
    peers::Peer,
    percentiles::is_supported,
    scenario::{
        CPU_PRICE,
        cases::{
            CaseAcceptance, CaseLimit, CaseReport, CaseSettings, CaseStudy, PublishedCase, check_published,
        },
        document::{Checked, decode, distinct, heading, is_name, message, text, within},
        format::{Figure, MAX_ROUNDS, SizeName, Sizes, Study, figure},
    },
};

/// Name of a mesh without sidecars in the names of cases.
const NO_SIDECARS: &str = "none";

/// A scenario of a mesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct MeshScenario {
    study: Study,
    /// Name of the result file: lower-case letters, digits and hyphens.
    pub(in crate::scenario) name: String,
    pub(in crate::scenario) title: String,
    /// What the scenario answers.
    pub(in crate::scenario) question: String,
    /// Meshes; each has turns without sidecars and with the sidecars of each peer.
    meshes: Vec<MeshInput>,
    /// Sidecars to compare: skysail and envoy.
    pub(in crate::scenario) peers: Vec<Peer>,
    /// What tables and plots show, and what `bench diff` compares.
    measure: Vec<MeshMeasure>,
    #[serde(default)]
    acceptance: CaseAcceptance,
    pub(super) sizes: Sizes<MeshSize>,
    /// Figures of others for the same question.
    #[serde(default)]
    published: Vec<PublishedCase>,
    /// Sidecars that cannot take part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    not_available: Vec<AbsentSystem>,
}

/// A system that cannot take part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AbsentSystem {
    system: String,
    reason: String,
}

/// A mesh and its load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MeshInput {
    pub(super) name: String,
    /// Arguments of `skysail bench graph generate`, or a file in the format of isotope whose name ends in `.yaml`.
    pub(super) graph: String,
    #[serde(default)]
    pub(super) policies: MeshPolicies,
    #[serde(default, skip_serializing_if = "MeshTelemetry::is_metrics")]
    pub(super) telemetry: MeshTelemetry,
    /// Requests per second of the client, due at even intervals. The graph multiplies them.
    pub(super) rate: u32,
    /// Connections of the client.
    pub(super) connections: u32,
    /// Phases of the load, in their order. None: a single one without a name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) phases: Vec<PhaseInput>,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::scenario) enum MeshMeasure {
    /// Latency of the client's requests from when they were due.
    Latency,
    /// Failed requests of the client, by cause.
    Errors,
    /// CPU time of sidecars, services and the control plane.
    Cpu,
    /// Resident memory of sidecars and the control plane.
    Memory,
    /// Price of the CPU time of sidecars.
    Cost,
    /// Time until the mesh is ready.
    Start,
}

/// A phase of a mesh with the sidecars of a peer, or without sidecars.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scenario) struct MeshCase {
    /// `MESH/PEER`, or `MESH/PEER/PHASE`.
    name: String,
    /// The mesh, with graph and rate of the size.
    pub(super) mesh: MeshInput,
    pub(super) peer: Option<Peer>,
    /// Name of the phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    phase: Option<String>,
}

impl MeshCase {
    /// Returns the phase; `None` for a mesh without phases.
    pub(super) fn phase(&self) -> Option<&PhaseInput> {
        self.mesh.phases.iter().find(|phase| Some(&phase.name) == self.phase.as_ref())
    }
}

/// Causes of failed requests with figures of their own: the figure, and the names of the causes in results.
const CAUSES: [(&str, &[&str]); 7] = [
    ("errors_connect_percent", &["connect"]),
    ("errors_closed_percent", &["closed", "reset"]),
    ("errors_timeout_percent", &["timeout"]),
    ("errors_unsent_percent", &["unsent"]),
    ("errors_500_percent", &["500"]),
    ("errors_503_percent", &["503"]),
    ("errors_504_percent", &["504"]),
];

impl MeshMeasure {
    const ALL: [Self; 6] = [Self::Latency, Self::Errors, Self::Cpu, Self::Memory, Self::Cost, Self::Start];

    /// Returns the figures of the group. Less is better in all of them.
    pub(super) fn figures(self) -> &'static [Figure] {
        const LATENCY: [Figure; 4] = [
            figure("latency_p50_us", "P50 ms", 1e3, 2),
            figure("latency_p90_us", "P90 ms", 1e3, 2),
            figure("latency_p99_us", "P99 ms", 1e3, 2),
            figure("latency_p99_9_us", "P99.9 ms", 1e3, 2),
        ];
        const ERRORS: [Figure; 9] = [
            figure("failed_percent", "failed %", 1.0, 2),
            figure("errors_connect_percent", "connect %", 1.0, 2),
            figure("errors_closed_percent", "closed %", 1.0, 2),
            figure("errors_timeout_percent", "timeout %", 1.0, 2),
            figure("errors_unsent_percent", "unsent %", 1.0, 2),
            figure("errors_500_percent", "500 %", 1.0, 2),
            figure("errors_503_percent", "503 %", 1.0, 2),
            figure("errors_504_percent", "504 %", 1.0, 2),
            figure("errors_other_percent", "other %", 1.0, 2),
        ];
        const CPU: [Figure; 5] = [
            figure("cpu_sidecars_us_per_request", "sidecars CPU µs", 1.0, 0),
            figure(OF_TELEMETRY, "of it telemetry µs", 1.0, 0),
            figure("cpu_services_us_per_request", "services CPU µs", 1.0, 0),
            figure("cpu_idle_sidecar_us_per_second", "idle sidecar µs/s", 1.0, 0),
            figure("cpu_control_percent", "control CPU %", 1.0, 2),
        ];
        const MEMORY: [Figure; 3] = [
            figure("rss_sidecar_kb", "sidecar MB", 1_024.0, 1),
            figure("rss_sidecars_kb", "all sidecars MB", 1_024.0, 0),
            figure("rss_control_kb", "control plane MB", 1_024.0, 1),
        ];
        const COST: [Figure; 1] = [figure("cost_month", "$ a month", 1.0, 0)];
        const START: [Figure; 1] = [figure("ready_seconds", "ready after s", 1.0, 1)];
        match self {
            Self::Latency => &LATENCY,
            Self::Errors => &ERRORS,
            Self::Cpu => &CPU,
            Self::Memory => &MEMORY,
            Self::Cost => &COST,
            Self::Start => &START,
        }
    }
}

impl MeshScenario {
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

    /// Returns the cases of a run: the phases of each mesh without sidecars, then with those of each peer.
    pub(super) fn cases(&self, size: SizeName, peers: &[Peer]) -> Vec<MeshCase> {
        let size = self.sizes.of(size);
        let peers: Vec<Option<Peer>> = [None].into_iter().chain(peers.iter().copied().map(Some)).collect();
        let of = |mesh: &MeshInput, peer: Option<Peer>, phase: Option<&PhaseInput>| {
            let name = format!("{}/{}", mesh.name, peer.map_or(NO_SIDECARS, Peer::name));
            let phase = phase.map(|phase| phase.name.clone());
            MeshCase {
                name: phase.iter().fold(name, |name, phase| format!("{name}/{phase}")),
                mesh: size.of(mesh),
                peer,
                phase,
            }
        };
        let mut cases = Vec::new();
        for mesh in self.meshes.iter().filter(|mesh| size.has(&mesh.name)) {
            // Without sidecars there is no telemetry to leave out.
            let has_turn = |peer: &&Option<Peer>| peer.is_some() || mesh.telemetry.is_metrics();
            for peer in peers.iter().filter(has_turn) {
                match mesh.phases.is_empty() {
                    true => cases.push(of(mesh, *peer, None)),
                    false => cases.extend(mesh.phases.iter().map(|phase| of(mesh, *peer, Some(phase)))),
                }
            }
        }
        cases
    }

    /// Fails if the scenario cannot be run with one of these peers.
    pub(in crate::scenario) fn check_peers(&self, peers: &[(Peer, PathBuf)]) -> anyhow::Result<()> {
        check_peers(&self.name, peers)
    }

    fn check(&self) -> Checked {
        heading(&self.name, &self.title, &self.question)?;
        let names: Vec<&str> = self.meshes.iter().map(|mesh| mesh.name.as_str()).collect();
        distinct("meshes", &names, 16)?;
        for (index, mesh) in self.meshes.iter().enumerate() {
            let field = |field: &str| format!("meshes[{index}].{field}");
            is_name(&field("name"), &mesh.name)?;
            let graph = graph(&field("graph"), &mesh.graph)?;
            within(&field("rate"), f64::from(mesh.rate), 1.0, 1e5)?;
            within(&field("connections"), f64::from(mesh.connections), 1.0, size::MAX_CONNECTIONS)?;
            phases::check(&format!("meshes[{index}]"), &mesh.phases)?;
            phases::check_services(&format!("meshes[{index}]"), &mesh.phases, &graph)?;
        }
        check_names(&self.peers)?;
        distinct("measure", &self.measure, MeshMeasure::ALL.len())?;
        let figures = MeshMeasure::ALL.iter().flat_map(|group| group.figures());
        let cases = self.cases(SizeName::Default, &self.peers);
        let cases: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        self.acceptance.check(figures.clone(), &cases)?;
        check_published(&self.published, figures)?;
        for (name, size) in self.sizes.all() {
            let field = |field: &str| format!("sizes.{name}.{field}");
            within(&field("rounds"), f64::from(size.rounds), 1.0, f64::from(MAX_ROUNDS))?;
            within(&field("seconds"), size.seconds, 0.1, 3_600.0)?;
            within(&field("warmup"), size.warmup, 0.1, 3_600.0)?;
            within(&field("rate"), f64::from(size.rate.unwrap_or(1)), 1.0, 1e5)?;
            size.check(&format!("sizes.{name}"), &self.meshes)?;
            for (of_mesh, sized) in &size.meshes {
                let Some(of_mesh_graph) = &sized.graph else { continue };
                let graph = graph(&field(&format!("meshes.{of_mesh}.graph")), of_mesh_graph)?;
                for mesh in self.meshes.iter().filter(|mesh| mesh.name == *of_mesh) {
                    phases::check_services(&field(&format!("meshes.{of_mesh}")), &mesh.phases, &graph)?;
                }
            }
            let Some(of_size) = &size.graph else { continue };
            let graph = graph(&field("graph"), of_size)?;
            for (index, mesh) in self.meshes.iter().enumerate() {
                phases::check_services(&format!("meshes[{index}]"), &mesh.phases, &graph)?;
            }
        }
        for (index, absent) in self.not_available.iter().enumerate() {
            text(&format!("not_available[{index}].system"), &absent.system, 60)?;
            text(&format!("not_available[{index}].reason"), &absent.reason, 500)?;
        }
        Ok(())
    }

    /// Returns the scale of each published mesh beside that of the largest of the result.
    fn scales(&self, report: &CaseReport<Self>) -> Vec<String> {
        let measured = || report.runs.iter().filter_map(|run| run.measurement.as_ref());
        let sidecars = measured().map(|of| of.sidecars).max().unwrap_or_default();
        let rate = measured().map(rate).fold(0.0, f64::max);
        // Meshes of the same scale are named together.
        let mut scales: Vec<((u32, f64), Vec<String>)> = Vec::new();
        for (index, published) in self.published.iter().enumerate() {
            let (Some(sidecars), Some(rate)) = (published.sidecars, published.rate) else { continue };
            let name = format!("[{}]", index + 1);
            match scales.iter_mut().find(|(scale, _)| *scale == (sidecars, rate)) {
                Some((_, names)) => names.push(name),
                None => scales.push(((sidecars, rate), vec![name])),
            }
        }
        let line = |((of_sidecars, of_rate), names): ((u32, f64), Vec<String>)| {
            let share = |here: f64, there: f64| {
                if here < there { format!(", 1/{:.0} of them", there / here) } else { String::new() }
            };
            format!(
                "Scale of {}: {of_sidecars} sidecars, {of_rate:.0} requests/s. Scale here: at most {sidecars} sidecars{}, and \
                 {rate:.0} requests/s{}.",
                names.join(", "),
                share(sidecars as f64, f64::from(of_sidecars)),
                share(rate, of_rate)
            )
        };
        if sidecars == 0 { Vec::new() } else { scales.into_iter().map(line).collect() }
    }
}

/// Fails if a scenario of this name cannot be run with one of these peers.
pub(in crate::scenario) fn check_peers(name: &str, peers: &[(Peer, PathBuf)]) -> anyhow::Result<()> {
    for (peer, program) in peers {
        let refused = unable(*peer);
        ensure!(refused.is_none(), "{name}: --peers: {}", refused.unwrap_or_default());
        ensure!(
            *peer != Peer::Skysail || Peer::has_subcommands(program),
            "{name}: --skysail {}: the mesh needs the program skysail, which has the control plane too",
            program.display()
        );
    }
    Ok(())
}

/// Checks the peers of a scenario.
pub(in crate::scenario) fn check_names(peers: &[Peer]) -> Checked {
    distinct("peers", peers, 2)?;
    for (index, peer) in peers.iter().enumerate() {
        unable(*peer).map_or(Ok(()), |reason| Err((format!("peers[{index}]"), reason)))?;
    }
    Ok(())
}

/// Returns why a mesh cannot have the sidecars of a peer.
fn unable(peer: Peer) -> Option<String> {
    let is_able = matches!(peer, Peer::Skysail | Peer::Envoy);
    (!is_able).then(|| {
        format!("{} takes no configuration from a control plane; use skysail and envoy", peer.name())
    })
}

fn graph(field: &str, graph: &str) -> Result<GraphDeployment, (String, String)> {
    let made = GraphDeployment::new(graph, MeshPolicies::default());
    made.map_err(|error| (field.to_owned(), format!("{error:#}")))
}

/// Returns the requests per second between pods.
fn rate(measured: &MeshMeasurement) -> f64 {
    measured.requests_in_mesh / measured.seconds.max(f64::MIN_POSITIVE)
}

impl CaseStudy for MeshScenario {
    type Case = MeshCase;
    type Group = MeshMeasure;
    type Measurement = MeshMeasurement;

    const COLUMNS: [&'static str; 2] = ["mesh", "requests/s"];

    fn heading(&self) -> [&str; 3] {
        [&self.name, &self.title, &self.question]
    }

    fn groups(&self) -> &[MeshMeasure] {
        &self.measure
    }

    fn limits(&self) -> &[CaseLimit] {
        &self.acceptance.limits
    }

    fn name(case: &MeshCase) -> &str {
        &case.name
    }

    fn section(case: &MeshCase) -> &str {
        &case.mesh.name
    }

    fn is_own(case: &MeshCase) -> bool {
        case.peer == Some(Peer::Skysail)
    }

    fn amount(measured: &MeshMeasurement) -> String {
        format!("{:.0}", rate(measured))
    }

    fn progress(measured: &MeshMeasurement) -> String {
        let metrics = Self::metrics(measured);
        let of = |name: &str| metrics.get(name).copied().unwrap_or_default();
        let failed = match measured.failed {
            0 => String::new(),
            failed => format!(", {failed} of {} requests failed", measured.requests),
        };
        format!(
            "ready after {:.1} s, P50 {:.2} ms, sidecars {:.0} µs of CPU for a request{failed}",
            measured.ready_seconds,
            of("latency_p50_us") / 1e3,
            of("cpu_sidecars_us_per_request")
        )
    }

    fn violation(&self, case: &str, measured: &MeshMeasurement) -> Option<String> {
        let mut parts = case.split('/');
        let (mesh, phase) = (parts.next(), parts.nth(1));
        let mesh = self.meshes.iter().find(|of| Some(&*of.name) == mesh);
        let phase = mesh.and_then(|mesh| mesh.phases.iter().find(|of| Some(&*of.name) == phase));
        let failed_percent = phase.and_then(|phase| phase.failed_percent);
        let failed_percent = failed_percent.unwrap_or(self.acceptance.failed_percent);
        let acceptance = CaseAcceptance { failed_percent, limits: Vec::new() };
        acceptance.violation(measured.failed, measured.requests)
    }

    fn published(&self) -> &[PublishedCase] {
        &self.published
    }

    fn figures(group: MeshMeasure) -> &'static [Figure] {
        group.figures()
    }

    fn group_title(group: MeshMeasure) -> &'static str {
        match group {
            MeshMeasure::Latency => "Latency of the client's requests, ms",
            MeshMeasure::Errors => "Failed requests of the client, % of those that were due",
            MeshMeasure::Cpu => "CPU time",
            MeshMeasure::Memory => "Resident memory, MB",
            MeshMeasure::Cost => "Price of the sidecars' CPU time for 1,000,000 requests/s, $ a month",
            MeshMeasure::Start => "Time until the mesh is ready, s",
        }
    }

    fn plots(group: MeshMeasure) -> Vec<Vec<&'static Figure>> {
        let figures = |names: &[&str]| {
            group.figures().iter().filter(|figure| names.contains(&figure.metric)).collect::<Vec<_>>()
        };
        match group {
            MeshMeasure::Latency => vec![figures(&["latency_p50_us"]), figures(&["latency_p99_us"])],
            MeshMeasure::Errors => vec![group.figures().iter().skip(1).collect()],
            MeshMeasure::Cpu => vec![
                figures(&["cpu_sidecars_us_per_request", "cpu_services_us_per_request"]),
                figures(&["cpu_idle_sidecar_us_per_second"]),
            ],
            MeshMeasure::Memory => vec![figures(&["rss_sidecar_kb"]), figures(&["rss_control_kb"])],
            MeshMeasure::Cost => vec![figures(&["cost_month"])],
            MeshMeasure::Start => vec![figures(&["ready_seconds"])],
        }
    }

    fn metrics(measured: &MeshMeasurement) -> BTreeMap<String, f64> {
        let requests = measured.requests_in_mesh.max(1.0);
        let part = |part: MeshPart| measured.parts.get(&part).copied();
        let of_request = |cpu_us_per_second: f64| cpu_us_per_second * measured.seconds / requests;
        let mut metrics = BTreeMap::from([("ready_seconds".to_owned(), measured.ready_seconds)]);
        let mut add = |name: &str, value: f64| metrics.insert(name.to_owned(), value);
        let unsent = measured.errors.get("unsent").copied().unwrap_or_default();
        let samples = measured.requests.saturating_sub(unsent);
        for (name, value) in measured.latency_us.iter().filter(|(name, _)| is_supported(name, samples)) {
            add(&format!("latency_{name}_us"), *value);
        }
        let percent = |failed: u64| failed as f64 * 100.0 / measured.requests.max(1) as f64;
        let mut other = measured.failed;
        for (figure, causes) in CAUSES {
            let failed: u64 = causes.iter().filter_map(|cause| measured.errors.get(*cause)).sum();
            other = other.saturating_sub(failed);
            add(figure, percent(failed));
        }
        add("errors_other_percent", percent(other));
        add("failed_percent", percent(measured.failed));
        if let Some(services) = part(MeshPart::Services) {
            add("cpu_services_us_per_request", of_request(services.cpu_us_per_second));
        }
        if let Some(sidecars) = part(MeshPart::Sidecars) {
            let cpu_us = of_request(sidecars.cpu_us_per_second);
            add("cpu_sidecars_us_per_request", cpu_us);
            // A microsecond for a request is a vCPU for 1,000,000 requests/s.
            add("cost_month", cpu_us * CPU_PRICE);
            let each = |amount: f64| amount / measured.sidecars.max(1) as f64;
            add("cpu_idle_sidecar_us_per_second", each(sidecars.idle_cpu_us_per_second));
            add("rss_sidecars_kb", sidecars.rss_kb as f64);
            add("rss_sidecar_kb", each(sidecars.rss_kb as f64));
        }
        if let Some(control) = part(MeshPart::Control) {
            add("cpu_control_percent", control.cpu_us_per_second / 1e4);
            add("rss_control_kb", control.rss_kb as f64);
        }
        metrics
    }

    fn reference<'a>(case: &MeshCase, cases: &'a [MeshCase]) -> Option<&'a str> {
        telemetry::reference(case, cases).map(|case| case.name.as_str())
    }

    fn relative(measured: &MeshMeasurement, without: &MeshMeasurement) -> BTreeMap<String, f64> {
        let cpu = |of: &MeshMeasurement| Self::metrics(of).remove("cpu_sidecars_us_per_request");
        let of_telemetry = cpu(measured).zip(cpu(without)).map(|(with, without)| with - without);
        of_telemetry.map(|cost| (OF_TELEMETRY.to_owned(), cost)).into_iter().collect()
    }

    fn legend(&self, report: &CaseReport<Self>) -> Vec<String> {
        let rounds = report.settings.rounds;
        let mut lines = vec![
            format!(
                "Figures: medians (min–max) over the rounds, here {rounds}. failed 0/{rounds}: 0 of {rounds} turns failed. \
                 none: the mesh without sidecars and without mutual TLS."
            ),
            "requests/s: requests between pods. P50 to P99.9: latency of the client's requests from when they were due. It includes \
             all requests that they cause."
                .to_owned(),
            "CPU µs: CPU time of all sidecars, or of all services, for a request between pods. A request passes two sidecars. \
             Divided by 1,000 it is vCPU per 1,000 requests/s. idle sidecar: CPU time of a sidecar in a second without load; the \
             CPU time of requests contains it. CPU %: of one CPU. An Envoy has an agent, which is not part of \
             these figures. MB: resident memory after the load."
                .to_owned(),
        ];
        if self.meshes.iter().any(|mesh| !mesh.phases.is_empty()) {
            lines.push(
                "The last part of a name is the phase of the load. The mesh runs on between the phases of a turn. Changes of                  workers are made after a tenth of a phase, and end with the changes of the next one. Requests between pods                  are those that the graph makes for the client's, also if these fail."
                    .to_owned(),
            );
        }
        if self.measure.contains(&MeshMeasure::Errors) {
            lines.push(
                "connect: no connection could be opened. closed: it was closed or reset before the response. timeout: no                  response within 3 s. unsent: due, and not sent or without a response at the end of the phase. 500: of a                  service, whose call failed or which the graph lets fail. 503, 504: of a sidecar."
                    .to_owned(),
            );
        }
        if self.measure.contains(&MeshMeasure::Cost) {
            lines.push(format!(
                "$ a month: the sidecars' CPU time for 1,000,000 requests/s between pods, at {CPU_PRICE} $ a month for a                  vCPU (50,000 $ for 1,200, M. Kipper, 2019)."
            ));
        }
        lines.extend(
            self.not_available
                .iter()
                .map(|of| format!("Not available: {}, because {}.", of.system, of.reason)),
        );
        if self.meshes.iter().any(|mesh| !mesh.telemetry.is_metrics()) {
            lines.push(telemetry::LEGEND.to_owned());
        }
        lines.extend(self.scales(report));
        lines.extend(self.sizes.all().filter_map(|(name, _)| {
            size::scale(name, &self.cases(name, &self.peers), &report.settings.cases)
        }));

        lines
    }

    fn method(&self, settings: &CaseSettings<MeshCase>) -> String {
        settings.method("with all pods on this machine; each turn starts the mesh anew")
    }
}
