//! The format of a scenario of the airline example: variants of the mesh, load, peers, what to measure, acceptance, sizes.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};
use skysail_yaml::Node;

use crate::{
    airline::{AirlineDatabase, AirlineLoad, AirlineMeasurement, AirlineTrial, AirlineVariant},
    mesh::MeshPart,
    peers::Peer,
    percentiles,
    scenario::{
        cases::{
            CaseLimit, CaseReport, CaseSettings, CaseStudy, PublishedCase, check_limits, check_published,
        },
        document::{Checked, decode, distinct, heading, message, within},
        format::{Figure, MAX_ROUNDS, SizeName, Sizes, Study, figure},
        mesh,
    },
};

/// Figure without a latency limit, which others have published.
const OF_USERS: &str = "users_calls_per_second";

/// A scenario of the airline example.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct AirlineScenario {
    study: Study,
    /// Name of the result file: lower-case letters, digits and hyphens.
    pub(in crate::scenario) name: String,
    pub(in crate::scenario) title: String,
    /// What the scenario answers.
    pub(in crate::scenario) question: String,
    /// Variants of the mesh; each but `none` has turns with the proxies of each peer.
    variants: Vec<AirlineVariant>,
    #[serde(default)]
    database: AirlineDatabase,
    load: AirlineLoad,
    /// Proxies to compare: skysail and envoy.
    pub(in crate::scenario) peers: Vec<Peer>,
    /// What tables and plots show, and what `bench diff` compares.
    measure: Vec<AirlineMeasure>,
    #[serde(default)]
    acceptance: AirlineAcceptance,
    pub(super) sizes: Sizes<AirlineSize>,
    /// Figures of others for the same question.
    #[serde(default)]
    published: Vec<PublishedCase>,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::scenario) enum AirlineMeasure {
    /// Calls per second within the latency limit, and with the users.
    Throughput,
    /// Latency of calls at the fixed rate.
    Latency,
    /// CPU time of proxies, services and database at the fixed rate.
    Cpu,
    /// Resident memory at the end.
    Memory,
}

/// Conditions that a result must meet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AirlineAcceptance {
    /// Maximum share of failed calls at the fixed rate and with the users, in percent. Default: 0.
    #[serde(default)]
    failed_percent: f64,
    /// Maximum medians. They are checked only in the size `default`.
    #[serde(default)]
    limits: Vec<CaseLimit>,
}

/// Number and duration of turns, and the load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AirlineSize {
    pub(super) rounds: u32,
    /// Duration of the measurement of each load in a turn, in seconds.
    pub(super) seconds: f64,
    /// Duration of each load before its measurement, in seconds.
    pub(super) warmup: f64,
    /// Replaces `load`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    load: Option<AirlineLoad>,
}

/// A variant with the proxies of a peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scenario) struct AirlineCase {
    /// `VARIANT/PEER`, or `none`.
    name: String,
    pub(super) variant: AirlineVariant,
    pub(super) database: AirlineDatabase,
    /// The load of the size.
    pub(super) load: AirlineLoad,
    pub(super) peer: Option<Peer>,
}

impl AirlineMeasure {
    const ALL: [Self; 4] = [Self::Throughput, Self::Latency, Self::Cpu, Self::Memory];

    /// Returns the figures of the group.
    pub(super) fn figures(self) -> &'static [Figure] {
        const THROUGHPUT: [Figure; 2] = [
            figure("limit_calls_per_second", "within limit calls/s", 1.0, 0).gain(),
            figure(OF_USERS, "all users calls/s", 1.0, 0).gain(),
        ];
        const LATENCY: [Figure; 3] = [
            figure("latency_p50_us", "P50 ms", 1e3, 2),
            figure("latency_p90_us", "P90 ms", 1e3, 2),
            figure("latency_p99_us", "P99 ms", 1e3, 2),
        ];
        const CPU: [Figure; 4] = [
            figure("cpu_sidecars_us_per_call", "proxies CPU µs", 1.0, 0),
            figure("cpu_services_us_per_call", "services CPU µs", 1.0, 0),
            figure("cpu_database_us_per_call", "database CPU µs", 1.0, 0),
            figure("cpu_control_percent", "control CPU %", 1.0, 2),
        ];
        const MEMORY: [Figure; 3] = [
            figure("rss_sidecars_kb", "all proxies MB", 1_024.0, 1),
            figure("rss_services_kb", "all services MB", 1_024.0, 1),
            figure("rss_control_kb", "control plane MB", 1_024.0, 1),
        ];
        match self {
            Self::Throughput => &THROUGHPUT,
            Self::Latency => &LATENCY,
            Self::Cpu => &CPU,
            Self::Memory => &MEMORY,
        }
    }
}

impl AirlineScenario {
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

    /// Returns the cases of a run: each variant with the proxies of each peer.
    pub(super) fn cases(&self, size: SizeName, peers: &[Peer]) -> Vec<AirlineCase> {
        let load = self.sizes.of(size).load.as_ref().unwrap_or(&self.load);
        let of = |variant: AirlineVariant, peer: Option<Peer>| AirlineCase {
            name: peer.map_or_else(
                || variant.name().to_owned(),
                |peer| format!("{}/{}", variant.name(), peer.name()),
            ),
            variant,
            database: self.database,
            load: load.clone(),
            peer,
        };
        let of_variant = |&variant: &AirlineVariant| match variant {
            AirlineVariant::None => vec![of(variant, None)],
            _ => peers.iter().map(|peer| of(variant, Some(*peer))).collect(),
        };
        self.variants.iter().flat_map(of_variant).collect()
    }

    /// Fails if the scenario cannot be run with one of these peers.
    pub(in crate::scenario) fn check_peers(&self, peers: &[(Peer, PathBuf)]) -> anyhow::Result<()> {
        mesh::check_peers(&self.name, peers)
    }

    fn check(&self) -> Checked {
        heading(&self.name, &self.title, &self.question)?;
        distinct("variants", &self.variants, AirlineVariant::ALL.len())?;
        check_load("load", &self.load)?;
        mesh::check_names(&self.peers)?;
        distinct("measure", &self.measure, AirlineMeasure::ALL.len())?;
        within("acceptance.failed_percent", self.acceptance.failed_percent, 0.0, 100.0)?;
        let figures = AirlineMeasure::ALL.iter().flat_map(|group| group.figures());
        let cases = self.cases(SizeName::Default, &self.peers);
        let cases: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        check_limits(&self.acceptance.limits, figures.clone(), &cases, "case")?;
        check_published(&self.published, figures)?;
        for (name, size) in self.sizes.all() {
            let field = |field: &str| format!("sizes.{name}.{field}");
            within(&field("rounds"), f64::from(size.rounds), 1.0, f64::from(MAX_ROUNDS))?;
            within(&field("seconds"), size.seconds, 0.1, 3_600.0)?;
            within(&field("warmup"), size.warmup, 0.1, 3_600.0)?;
            size.load.as_ref().map_or(Ok(()), |load| check_load(&field("load"), load))?;
        }
        Ok(())
    }

    /// Returns the load of a result.
    fn load_of<'a>(&'a self, report: &'a CaseReport<Self>) -> &'a AirlineLoad {
        report.settings.cases.first().map_or(&self.load, |case| &case.load)
    }

    /// Returns the throughput of the users of each peer relative to `ingress-only`, as in the published figures.
    fn shares(&self, report: &CaseReport<Self>) -> Option<String> {
        let median = |variant: AirlineVariant, peer: Option<Peer>| {
            let is_of = |case: &&AirlineCase| case.variant == variant && case.peer == peer;
            let name = &report.settings.cases.iter().find(is_of)?.name;
            let row = report.summary.iter().find(|row| row.case == *name)?;
            Some(row.metrics.get(OF_USERS)?.median).filter(|median| *median > 0.0)
        };
        let share = |case: &AirlineCase| {
            let has_share = matches!(case.variant, AirlineVariant::Full | AirlineVariant::NoPolicy);
            let ingress = has_share.then(|| median(AirlineVariant::IngressOnly, case.peer))??;
            let own = median(case.variant, case.peer)?;
            Some(format!("{} {:.0} %", case.name, 100.0 * own / ingress))
        };
        let shares: Vec<String> = report.settings.cases.iter().filter_map(share).collect();
        (!shares.is_empty()).then(|| {
            format!(
                "Throughput of all users relative to ingress-only of the same proxy: {}.",
                shares.join(", ")
            )
        })
    }
}

fn check_load(field: &str, load: &AirlineLoad) -> Checked {
    let of = |name: &str| format!("{field}.{name}");
    within(&of("rate"), f64::from(load.rate), 1.0, 1e6)?;
    within(&of("users"), f64::from(load.users), 1.0, 10_000.0)?;
    within(&of("loaded"), f64::from(load.loaded), 1.0, 1e6)?;
    within(&of("customers"), f64::from(load.customers), f64::from(load.users), f64::from(load.loaded))?;
    within(&of("pause_ms"), f64::from(load.pause_ms), 0.0, 60_000.0)?;
    within(&of("limit_ms"), load.limit_ms, 0.1, 60_000.0)?;
    within(&of("steps"), f64::from(load.steps), 1.0, 20.0)
}

impl CaseStudy for AirlineScenario {
    type Case = AirlineCase;
    type Group = AirlineMeasure;
    type Measurement = AirlineMeasurement;

    const COLUMNS: [&'static str; 2] = ["variant", "proxies"];

    fn heading(&self) -> [&str; 3] {
        [&self.name, &self.title, &self.question]
    }

    fn groups(&self) -> &[AirlineMeasure] {
        &self.measure
    }

    fn limits(&self) -> &[CaseLimit] {
        &self.acceptance.limits
    }

    fn name(case: &AirlineCase) -> &str {
        &case.name
    }

    fn section(case: &AirlineCase) -> &str {
        match case.database {
            AirlineDatabase::Embedded => "embedded databases",
            AirlineDatabase::Postgresql => "PostgreSQL",
        }
    }

    fn is_own(case: &AirlineCase) -> bool {
        case.peer == Some(Peer::Skysail)
    }

    fn amount(measured: &AirlineMeasurement) -> String {
        measured.sidecars.to_string()
    }

    fn progress(measured: &AirlineMeasurement) -> String {
        format!(
            "ready after {:.1} s, {:.0} calls/s within the limit, {:.0} calls/s of all users",
            measured.ready_seconds,
            measured.within_limit.calls_per_second,
            measured.of_users.calls_per_second
        )
    }

    fn violation(&self, _: &str, measured: &AirlineMeasurement) -> Option<String> {
        let most = self.acceptance.failed_percent;
        let AirlineMeasurement { at_rate, of_users, .. } = measured;
        let is_refused = |trial: &&AirlineTrial| trial.failed as f64 * 100.0 > most * trial.calls as f64;
        [at_rate, of_users].into_iter().find(is_refused).map(|AirlineTrial { failed, calls, .. }| {
            format!("{failed} of {calls} calls failed, at most {most} % may fail,")
        })
    }

    fn published(&self) -> &[PublishedCase] {
        &self.published
    }

    fn figures(group: AirlineMeasure) -> &'static [Figure] {
        group.figures()
    }

    fn group_title(group: AirlineMeasure) -> &'static str {
        match group {
            AirlineMeasure::Throughput => "Maximum throughput, calls/s",
            AirlineMeasure::Latency => "Latency of calls at the fixed rate, ms",
            AirlineMeasure::Cpu => "CPU time of a call at the fixed rate, µs",
            AirlineMeasure::Memory => "Resident memory, MB",
        }
    }

    fn plots(group: AirlineMeasure) -> Vec<Vec<&'static Figure>> {
        let figures = |names: &[&str]| {
            group.figures().iter().filter(|figure| names.contains(&figure.metric)).collect::<Vec<_>>()
        };
        match group {
            AirlineMeasure::Throughput => vec![figures(&["limit_calls_per_second"]), figures(&[OF_USERS])],
            AirlineMeasure::Latency => vec![figures(&["latency_p50_us"]), figures(&["latency_p99_us"])],
            AirlineMeasure::Cpu => vec![figures(&[
                "cpu_sidecars_us_per_call",
                "cpu_services_us_per_call",
                "cpu_database_us_per_call",
            ])],
            AirlineMeasure::Memory => vec![figures(&["rss_sidecars_kb"])],
        }
    }

    fn metrics(measured: &AirlineMeasurement) -> BTreeMap<String, f64> {
        let mut metrics = BTreeMap::from([
            ("limit_calls_per_second".to_owned(), measured.within_limit.calls_per_second),
            (OF_USERS.to_owned(), measured.of_users.calls_per_second),
        ]);
        let latency = measured.at_rate.latency_us.iter();
        metrics.extend(latency.map(|(name, value)| (format!("latency_{name}_us"), *value)));
        percentiles::retain(&mut metrics, measured.at_rate.calls);
        for (part, cost) in &measured.parts {
            let name = match part {
                MeshPart::Sidecars => "sidecars",
                MeshPart::Services => "services",
                MeshPart::Database => "database",
                MeshPart::Control => "control",
            };
            if *part == MeshPart::Control {
                metrics.insert("cpu_control_percent".to_owned(), cost.cpu_us_per_second / 1e4);
            } else {
                metrics.insert(format!("cpu_{name}_us_per_call"), cost.cpu_us_per_call);
            }
            metrics.insert(format!("rss_{name}_kb"), cost.rss_kb as f64);
        }
        metrics
    }

    fn legend(&self, report: &CaseReport<Self>) -> Vec<String> {
        let rounds = report.settings.rounds;
        let AirlineLoad { rate, users, customers, pause_ms, limit_ms, steps, .. } = self.load_of(report);
        let mut lines = vec![
            format!(
                "Figures: medians (min–max) over the rounds, here {rounds}. failed 0/{rounds}: 0 of {rounds} turns failed."
            ),
            "none: no mesh, the client calls the services. ingress-only: a gateway before services without sidecars. \
             no-policy: gateway and sidecars with mutual TLS. full: the same with all policies of the example. proxies: gateway \
             and sidecars."
                .to_owned(),
            format!(
                "within limit: sessions start at even intervals, whether or not earlier ones have ended, with pauses of {pause_ms} \
                 ms on average. The search halves the range of rates {steps} times. A rate is within the limit if the P99 of \
                 calls is at most {limit_ms} ms, no call fails, active sessions do not grow by more than a tenth of those that \
                 start, and none has to wait for one of {customers} customers. The figure is the throughput at the greatest such rate, as measured."
            ),
            format!(
                "all users: {users} travellers without pauses, each with one session after another, as the threads of Acme Air's \
                 JMeter script."
            ),
            format!(
                "Latency and CPU: at {rate} calls/s in all variants. CPU µs: CPU time of all processes of the part for a call of \
                 the client; about half of the calls cause a further one between services. MB: resident memory at the end."
            ),
        ];
        lines.extend(self.shares(report));
        lines
    }

    fn method(&self, settings: &CaseSettings<AirlineCase>) -> String {
        settings.method(
            "for each load, with all pods and the client on this machine; each turn starts the mesh anew",
        )
    }
}
