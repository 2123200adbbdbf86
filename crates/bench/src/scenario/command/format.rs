//! The format of a scenario of another benchmark: cases with their arguments, what to measure, acceptance, sizes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use skysail_yaml::Node;

use super::{
    arguments,
    search::{CapacitySearch, CapacityTrial, MOST, with_sidecars},
};
use crate::{
    control::ControlArgs,
    dns::DnsArgs,
    percentiles,
    scenario::{
        cases::{
            CaseLimit, CaseReport, CaseSettings, CaseStudy, PublishedCase, check_limits, check_published,
        },
        document::{Checked, decode, distinct, ensure, heading, is_name, message, within},
        format::{Figure, MAX_ROUNDS, SizeName, Sizes, Study, figure},
    },
};

/// Percentile over the sidecars.
const CONNECT_P99: &str = "connect_p99_ms";
/// Figure of Envoys.
const ENVOYS: &str = "queries_envoys_per_second";

/// A scenario of another benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct CommandScenario {
    study: Study,
    /// Name of the result file: lower-case letters, digits and hyphens.
    pub(in crate::scenario) name: String,
    pub(in crate::scenario) title: String,
    /// What the scenario answers.
    pub(in crate::scenario) question: String,
    /// Cases; each has its own turns.
    cases: Vec<CommandCase>,
    /// What tables and plots show, and what `bench diff` compares.
    measure: Vec<CommandMeasure>,
    #[serde(default)]
    acceptance: CommandAcceptance,
    pub(super) sizes: Sizes<CommandSize>,
    /// Figures of others for the same question.
    #[serde(default)]
    published: Vec<PublishedCase>,
}

/// A run of the benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct CommandCase {
    name: String,
    /// Arguments of the command.
    pub(super) arguments: String,
    /// Search for the largest number of sidecars, in place of that of the arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) search: Option<CapacitySearch>,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::scenario) enum CommandMeasure {
    /// All sidecars connect.
    Connect,
    /// Changes reach the sidecars.
    Changes,
    /// Memory of the control plane.
    Memory,
    /// Sidecars disconnect and reconnect.
    Churn,
    /// Largest number of sidecars within the limits of a search.
    Capacity,
    /// DNS queries.
    Queries,
}

/// Conditions that a result must meet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CommandAcceptance {
    /// Maximum medians. They are checked only in the size `default`.
    #[serde(default)]
    limits: Vec<CaseLimit>,
}

/// Number of rounds, and arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CommandSize {
    pub(super) rounds: u32,
    /// Options that replace those of all cases, or are added to them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    arguments: Option<String>,
    /// Names of the cases that are measured. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cases: Option<Vec<String>>,
    /// Maximum number of sidecars of all searches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    search_to: Option<u32>,
}

/// Result of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scenario) struct CommandMeasurement {
    pub(in crate::scenario) sidecars: u64,
    /// Figures by their names.
    pub(in crate::scenario) figures: BTreeMap<String, f64>,
    /// Trials of a search, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) searched: Vec<CapacityTrial>,
}

impl CommandMeasure {
    const ALL: [Self; 6] =
        [Self::Connect, Self::Changes, Self::Memory, Self::Churn, Self::Capacity, Self::Queries];

    /// Returns the figures of the group.
    pub(super) fn figures(self) -> &'static [Figure] {
        const CONNECT: [Figure; 3] = [
            figure("connect_seconds", "all configured s", 1.0, 2),
            figure(CONNECT_P99, "each P99 ms", 1.0, 0),
            figure("connect_cpu_ms", "CPU of each ms", 1.0, 2),
        ];
        const CHANGES: [Figure; 8] = [
            figure("endpoint_last_ms", "endpoint ms", 1.0, 0),
            figure("endpoint_cpu_ms", "endpoint CPU ms", 1.0, 0),
            figure("route_last_ms", "route ms", 1.0, 0),
            figure("route_cpu_ms", "route CPU ms", 1.0, 0),
            figure("service_last_ms", "service ms", 1.0, 0),
            figure("service_cpu_ms", "service CPU ms", 1.0, 0),
            figure("policy_last_ms", "policy ms", 1.0, 0),
            figure("policy_cpu_ms", "policy CPU ms", 1.0, 0),
        ];
        const MEMORY: [Figure; 4] = [
            figure("idle_mb", "before MB", 1.0, 0),
            figure("resident_mb", "connected MB", 1.0, 0),
            figure("peak_mb", "peak MB", 1.0, 0),
            figure("left_mb", "afterwards MB", 1.0, 0),
        ];
        const CHURN: [Figure; 3] = [
            figure("churn_interval_ms", "interval ms", 1.0, 2),
            figure("churn_p99_ms", "reconnect P99 ms", 1.0, 0),
            figure("churn_cpu_ms", "reconnect CPU ms", 1.0, 2),
        ];
        const CAPACITY: [Figure; 1] = [figure(MOST, "most sidecars", 1.0, 0).gain()];
        const QUERIES: [Figure; 2] = [
            figure("queries_skysail_per_second", "Skysail queries/s", 1.0, 1),
            figure(ENVOYS, "Envoys queries/s", 1.0, 0),
        ];
        match self {
            Self::Connect => &CONNECT,
            Self::Changes => &CHANGES,
            Self::Memory => &MEMORY,
            Self::Churn => &CHURN,
            Self::Capacity => &CAPACITY,
            Self::Queries => &QUERIES,
        }
    }
}

impl CommandScenario {
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

    /// Returns the name of the benchmark, which is a subcommand of `skysail bench`.
    pub(super) fn benchmark(&self) -> &'static str {
        if self.study == Study::Dns { "dns" } else { "control" }
    }

    /// Returns true if the benchmark starts an Envoy too.
    pub(in crate::scenario) fn has_envoy(&self) -> bool {
        self.study == Study::Dns
    }

    /// Returns the cases of a run of this size.
    pub(super) fn cases(&self, size: SizeName) -> Vec<CommandCase> {
        let CommandSize { arguments, cases, search_to, .. } = self.sizes.of(size);
        let is_measured = |case: &&CommandCase| cases.as_ref().is_none_or(|names| names.contains(&case.name));
        let of = |case: &CommandCase| CommandCase {
            name: case.name.clone(),
            arguments: arguments.as_ref().map_or_else(
                || case.arguments.clone(),
                |of_size| arguments::merged(&case.arguments, of_size),
            ),
            search: case.search.as_ref().map(|search| search.up_to(*search_to)),
        };
        self.cases.iter().filter(is_measured).map(of).collect()
    }

    fn check(&self) -> Checked {
        heading(&self.name, &self.title, &self.question)?;
        let names: Vec<&str> = self.cases.iter().map(|case| case.name.as_str()).collect();
        distinct("cases", &names, 32)?;
        for (index, case) in self.cases.iter().enumerate() {
            is_name(&format!("cases[{index}].name"), &case.name)?;
            self.check_arguments(&format!("cases[{index}].arguments"), &case.arguments)?;
            let Some(search) = &case.search else { continue };
            let field = format!("cases[{index}]");
            ensure(self.study == Study::Control, &format!("{field}.search"), || {
                "the benchmark has no number of sidecars to search for; leave it out".to_owned()
            })?;
            search.check(&field, CommandMeasure::ALL.iter().flat_map(|group| group.figures()))?;
        }
        distinct("measure", &self.measure, CommandMeasure::ALL.len())?;
        let of_dns = self.study == Study::Dns;
        for (index, measure) in self.measure.iter().enumerate() {
            let is_measured = (*measure == CommandMeasure::Queries) == of_dns;
            ensure(is_measured, &format!("measure[{index}]"), || {
                let groups = if of_dns { "queries" } else { "connect, changes, memory, churn, capacity" };
                format!("the benchmark does not measure it; use {groups}")
            })?;
        }
        let figures = CommandMeasure::ALL.iter().flat_map(|group| group.figures());
        check_limits(&self.acceptance.limits, figures.clone(), &names, "case")?;
        check_published(&self.published, figures)?;
        for (name, size) in self.sizes.all() {
            let field = |field: &str| format!("sizes.{name}.{field}");
            within(&field("rounds"), f64::from(size.rounds), 1.0, f64::from(MAX_ROUNDS))?;
            if let Some(arguments) = &size.arguments {
                for case in &self.cases {
                    let merged = arguments::merged(&case.arguments, arguments);
                    self.check_arguments(&field("arguments"), &merged)?;
                }
            }
            within(&field("search_to"), f64::from(size.search_to.unwrap_or(1)), 1.0, 200_000.0)?;
            if let Some(cases) = &size.cases {
                distinct(&field("cases"), cases, names.len())?;
                ensure(cases.iter().all(|case| names.contains(&&**case)), &field("cases"), || {
                    format!("must be some of {}", names.join(", "))
                })?;
            }
        }
        Ok(())
    }

    fn check_arguments(&self, field: &str, arguments: &str) -> Checked {
        let fits = match self.study {
            Study::Dns => DnsArgs::parse(arguments).map(|args| args.is_plain()),
            _ => ControlArgs::parse(arguments).map(|args| args.is_plain()),
        };
        let is_plain = fits.map_err(|error| (field.to_owned(), error))?;
        ensure(is_plain, field, || {
            "must not have --hostile, --skysail, --istiod, --kubeconfig, --no-envoy, --result and --output"
                .to_owned()
        })
    }
}

impl CaseStudy for CommandScenario {
    type Case = CommandCase;
    type Group = CommandMeasure;
    type Measurement = CommandMeasurement;

    const COLUMNS: [&'static str; 2] = ["case", "sidecars"];

    fn heading(&self) -> [&str; 3] {
        [&self.name, &self.title, &self.question]
    }

    fn groups(&self) -> &[CommandMeasure] {
        &self.measure
    }

    fn limits(&self) -> &[CaseLimit] {
        &self.acceptance.limits
    }

    fn name(case: &CommandCase) -> &str {
        &case.name
    }

    fn section(_: &CommandCase) -> &str {
        "control plane"
    }

    fn is_own(_: &CommandCase) -> bool {
        true
    }

    fn is_own_figure(figure: &Figure) -> bool {
        figure.metric != ENVOYS
    }

    fn amount(measured: &CommandMeasurement) -> String {
        measured.sidecars.to_string()
    }

    fn progress(measured: &CommandMeasurement) -> String {
        let shown =
            [MOST, "connect_seconds", "resident_mb", "churn_interval_ms", "queries_skysail_per_second"];
        let value = |name: &&str| Some(format!("{name} {:.1}", measured.figures.get(*name)?));
        shown.iter().filter_map(value).collect::<Vec<_>>().join(", ")
    }

    fn violation(&self, _: &str, _: &CommandMeasurement) -> Option<String> {
        None
    }

    fn published(&self) -> &[PublishedCase] {
        &self.published
    }

    fn figures(group: CommandMeasure) -> &'static [Figure] {
        group.figures()
    }

    fn group_title(group: CommandMeasure) -> &'static str {
        match group {
            CommandMeasure::Connect => "All sidecars connect",
            CommandMeasure::Changes => "A change reaches the last sidecar",
            CommandMeasure::Memory => "Resident memory, MB",
            CommandMeasure::Churn => "Sidecars disconnect and reconnect",
            CommandMeasure::Capacity => "Largest number of sidecars within the limits",
            CommandMeasure::Queries => "DNS queries per second",
        }
    }

    fn plots(group: CommandMeasure) -> Vec<Vec<&'static Figure>> {
        let is_plotted = |figure: &&Figure| match group {
            CommandMeasure::Changes => figure.metric.ends_with("_last_ms"),
            CommandMeasure::Memory => figure.metric == "resident_mb",
            _ => true,
        };
        group.figures().iter().filter(is_plotted).map(|figure| vec![figure]).collect()
    }

    fn metrics(measured: &CommandMeasurement) -> BTreeMap<String, f64> {
        let mut figures = measured.figures.clone();
        if !percentiles::is_supported(CONNECT_P99, measured.sidecars) {
            figures.remove(CONNECT_P99);
        }
        figures
    }

    fn legend(&self, report: &CaseReport<Self>) -> Vec<String> {
        let rounds = report.settings.rounds;
        let mut lines = vec![format!(
            "Figures: medians (min–max) over the rounds, here {rounds}. failed 0/{rounds}: 0 of {rounds} turns failed."
        )];
        let of = |group: CommandMeasure, text: &str| self.measure.contains(&group).then(|| text.to_owned());
        let groups = [
            of(
                CommandMeasure::Connect,
                "all configured: from the first connection until the last sidecar has its whole configuration. each P99: the \
                 time of a sidecar. CPU: CPU time of the control plane for a sidecar.",
            ),
            of(
                CommandMeasure::Changes,
                "endpoint, route, service, policy: from the change of a file until the last sidecar that must receive it has \
                 it, and the CPU time of the control plane for it.",
            ),
            of(
                CommandMeasure::Churn,
                "interval: mean time between two sidecars that reconnect and are configured, while an endpoint or a route \
                 changes ten times a second. 1,000 divided by it is the number of sidecars per second.",
            ),
            of(
                CommandMeasure::Capacity,
                "most sidecars: the largest number that was within the limits of its case. The number is doubled until a limit is \
                 exceeded or the benchmark fails, and then searched between both. The other figures of the case are those of \
                 this number.",
            ),
            of(
                CommandMeasure::Queries,
                "Skysail: queries of one control plane for all sidecars. Envoys: queries of one Envoy times the number of \
                 sidecars.",
            ),
        ];
        lines.extend(groups.into_iter().flatten());
        lines.extend(report.settings.cases.iter().map(|case| {
            let (arguments, range) = match &case.search {
                Some(search) => (with_sidecars(&case.arguments, "N"), format!(", N {}", search.text())),
                None => (case.arguments.clone(), String::new()),
            };
            format!("{}: skysail bench {} {arguments}{range}", case.name, self.benchmark())
        }));
        lines
    }

    fn method(&self, settings: &CaseSettings<CommandCase>) -> String {
        format!(
            "Medians of {} rounds in which all cases take turns; each turn starts a control plane, and one process acts as \
             all sidecars",
            settings.rounds
        )
    }
}
