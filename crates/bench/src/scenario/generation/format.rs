//! The format of a scenario of generation: inputs, what to measure, acceptance, sizes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use skysail_yaml::Node;

use crate::{
    generation::{GenerationInput, GenerationMeasurement},
    scenario::{
        cases::{CaseLimit, CaseReport, CaseSettings, CaseStudy, PublishedCase, check_limits},
        document::{Checked, decode, distinct, ensure, heading, is_name, message, within},
        format::{Figure, MAX_ROUNDS, SizeName, Sizes, Study, figure},
    },
};

/// Maximum number of services, and of instances.
const MAX_NUMBER: f64 = 10_000.0;
/// Maximum of the product of services and instances.
const MAX_PRODUCT: f64 = 1_000_000.0;

/// A scenario of generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct GenerationScenario {
    study: Study,
    /// Name of the result file: lower-case letters, digits and hyphens.
    pub(in crate::scenario) name: String,
    pub(in crate::scenario) title: String,
    /// What the scenario answers.
    pub(in crate::scenario) question: String,
    /// Inputs; each has its own turns.
    pub(super) inputs: Vec<GenerationInput>,
    /// What tables and plots show, and what `bench diff` compares.
    pub(super) measure: Vec<GenerationMeasure>,
    #[serde(default)]
    pub(super) acceptance: GenerationAcceptance,
    pub(super) sizes: Sizes<GenerationSize>,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::scenario) enum GenerationMeasure {
    /// CPU time of each phase.
    Cpu,
    /// Elapsed time.
    Time,
    /// Number of resources.
    Resources,
    /// Bytes of resources.
    Bytes,
}

/// Conditions that a result must meet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GenerationAcceptance {
    /// Maximum medians. They are checked only in the size `default`.
    #[serde(default)]
    pub(super) limits: Vec<CaseLimit>,
}

/// Number and duration of turns, and of objects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GenerationSize {
    pub(super) rounds: u32,
    /// Duration of the measurement in each turn, in seconds.
    pub(super) seconds: f64,
    /// Duration of the repetitions before the measurement, in seconds.
    pub(super) warmup: f64,
    /// Maximum number of services, and of instances. Absent: those of the inputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    services: Option<u32>,
}

impl GenerationMeasure {
    const ALL: [Self; 4] = [Self::Cpu, Self::Time, Self::Resources, Self::Bytes];

    /// Returns the figures of the group. Less is better in all of them.
    pub(super) fn figures(self) -> &'static [Figure] {
        const CPU: [Figure; 7] = [
            figure("parse_cpu_us", "parse CPU µs", 1.0, 0),
            figure("index_cpu_us", "index CPU µs", 1.0, 0),
            figure("services_cpu_us", "services CPU µs", 1.0, 0),
            figure("routes_cpu_us", "routes CPU µs", 1.0, 0),
            figure("names_cpu_us", "names CPU µs", 1.0, 0),
            figure("own_cpu_us", "own CPU µs", 1.0, 0),
            figure("compile_cpu_us", "compile CPU µs", 1.0, 0),
        ];
        const TIME: [Figure; 3] = [
            figure("parse_time_us", "parse time µs", 1.0, 0),
            figure("index_time_us", "index time µs", 1.0, 0),
            figure("compile_time_us", "compile time µs", 1.0, 0),
        ];
        const RESOURCES: [Figure; 7] = [
            figure("resources", "resources", 1.0, 0),
            figure("cds_resources", "CDS", 1.0, 0),
            figure("eds_resources", "EDS", 1.0, 0),
            figure("lds_resources", "LDS", 1.0, 0),
            figure("rds_resources", "RDS", 1.0, 0),
            figure("sds_resources", "SDS", 1.0, 0),
            figure("nds_resources", "NDS", 1.0, 0),
        ];
        const BYTES: [Figure; 7] = [
            figure("bytes", "all kB", 1e3, 1),
            figure("cds_bytes", "CDS kB", 1e3, 1),
            figure("eds_bytes", "EDS kB", 1e3, 1),
            figure("lds_bytes", "LDS kB", 1e3, 1),
            figure("rds_bytes", "RDS kB", 1e3, 1),
            figure("sds_bytes", "SDS kB", 1e3, 1),
            figure("nds_bytes", "NDS kB", 1e3, 1),
        ];
        match self {
            Self::Cpu => &CPU,
            Self::Time => &TIME,
            Self::Resources => &RESOURCES,
            Self::Bytes => &BYTES,
        }
    }
}

impl GenerationScenario {
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

    /// Returns the inputs of a run of this size.
    pub(super) fn inputs(&self, size: SizeName) -> Vec<GenerationInput> {
        let most = self.sizes.of(size).services.unwrap_or(u32::MAX);
        self.inputs.iter().map(|input| input.limited(most)).collect()
    }

    fn check(&self) -> Checked {
        heading(&self.name, &self.title, &self.question)?;
        let names: Vec<&str> = self.inputs.iter().map(GenerationInput::name).collect();
        ensure((1..=64).contains(&names.len()), "inputs", || "must have 1 to 64 inputs".to_owned())?;
        for (index, input) in self.inputs.iter().enumerate() {
            let field = |field: &str| format!("inputs[{index}].{field}");
            is_name(&field("name"), input.name())?;
            ensure(!names[..index].contains(&input.name()), &field("name"), || {
                format!("{} is the name of an earlier input; name this one differently", input.name())
            })?;
            let template = input.template;
            for (name, number, has_effect) in [
                ("services", input.services, template.has_services()),
                ("instances", input.instances, template.has_instances()),
            ] {
                ensure(has_effect || number == 0, &field(name), || {
                    format!("has no effect on the template {}; leave it out", template.name())
                })?;
                if has_effect {
                    within(&field(name), f64::from(number), 1.0, MAX_NUMBER)?;
                }
            }
            let product = f64::from(input.services) * f64::from(input.instances);
            ensure(product <= MAX_PRODUCT, &field("instances"), || {
                format!("services × instances is {product}; at most {MAX_PRODUCT} is allowed")
            })?;
        }
        distinct("measure", &self.measure, GenerationMeasure::ALL.len())?;
        let figures = GenerationMeasure::ALL.iter().flat_map(|group| group.figures());
        check_limits(&self.acceptance.limits, figures, &names, "input")?;
        for (name, size) in self.sizes.all() {
            let field = |field: &str| format!("sizes.{name}.{field}");
            within(&field("rounds"), f64::from(size.rounds), 1.0, f64::from(MAX_ROUNDS))?;
            within(&field("seconds"), size.seconds, 0.0, 3_600.0)?;
            within(&field("warmup"), size.warmup, 0.0, 3_600.0)?;
            within(&field("services"), f64::from(size.services.unwrap_or(1)), 1.0, MAX_NUMBER)?;
        }
        Ok(())
    }
}

impl CaseStudy for GenerationScenario {
    type Case = GenerationInput;
    type Group = GenerationMeasure;
    type Measurement = GenerationMeasurement;

    const COLUMNS: [&'static str; 2] = ["input", "objects"];

    fn heading(&self) -> [&str; 3] {
        [&self.name, &self.title, &self.question]
    }

    fn groups(&self) -> &[GenerationMeasure] {
        &self.measure
    }

    fn limits(&self) -> &[CaseLimit] {
        &self.acceptance.limits
    }

    fn name(case: &GenerationInput) -> &str {
        case.name()
    }

    fn section(case: &GenerationInput) -> &str {
        case.template.proxy().name()
    }

    fn is_own(_: &GenerationInput) -> bool {
        true
    }

    fn amount(measurement: &GenerationMeasurement) -> String {
        measurement.objects.to_string()
    }

    fn progress(measured: &GenerationMeasurement) -> String {
        let metrics = Self::metrics(measured);
        let cpu = |name: &str| metrics.get(&format!("{name}_cpu_us")).copied().unwrap_or_default();
        format!("CPU parse {:.0}, index {:.0}, compile {:.0} µs", cpu("parse"), cpu("index"), cpu("compile"))
    }

    fn violation(&self, _: &str, _: &GenerationMeasurement) -> Option<String> {
        None
    }

    fn published(&self) -> &[PublishedCase] {
        &[]
    }

    fn figures(group: GenerationMeasure) -> &'static [Figure] {
        group.figures()
    }

    fn group_title(group: GenerationMeasure) -> &'static str {
        match group {
            GenerationMeasure::Cpu => "CPU time of each phase, µs",
            GenerationMeasure::Time => "Elapsed time, µs",
            GenerationMeasure::Resources => "Number of resources",
            GenerationMeasure::Bytes => "Size of resources, kB",
        }
    }

    fn plots(group: GenerationMeasure) -> Vec<Vec<&'static Figure>> {
        let is_sum = |figure: &Figure| matches!(figure.metric, "resources" | "bytes" | "compile_cpu_us");
        vec![group.figures().iter().filter(|figure| !is_sum(figure)).collect()]
    }

    fn metrics(measurement: &GenerationMeasurement) -> BTreeMap<String, f64> {
        let mut metrics = BTreeMap::new();
        let mut add = |name: String, value: f64| *metrics.entry(name).or_default() += value;
        for (phase, cost) in &measurement.phases {
            let whole = phase.is_compilation().then_some("compile");
            for name in [phase.name()].into_iter().chain(whole) {
                add(format!("{name}_cpu_us"), cost.cpu_us);
                add(format!("{name}_time_us"), cost.time_us);
            }
        }
        for (kind, count) in &measurement.resources {
            for prefix in [String::new(), format!("{kind}_")] {
                add(format!("{prefix}resources"), count.number as f64);
                add(format!("{prefix}bytes"), count.bytes as f64);
            }
        }
        metrics
    }

    fn legend(&self, report: &CaseReport<Self>) -> Vec<String> {
        let rounds = report.settings.rounds;
        [
            format!(
                "Figures: medians (min–max) over the rounds, here {rounds}; a turn has the mean of its repetitions. failed \
                 0/{rounds}: 0 of {rounds} turns failed. A turn fails if the proxy gets no listeners."
            ),
            "All phases run on one thread. parse: text to validated objects. index: objects into the index. services: \
             clusters and endpoints. routes: routes of sidecars. names: name table. own: listeners, inbound clusters, and \
             routes and secrets of gateways. compile: services, routes, names and own together."
                .to_owned(),
            "CDS, EDS, LDS, RDS, SDS, NDS: resources of each type that a new proxy receives, as encoded messages."
                .to_owned(),
        ]
        .to_vec()
    }

    fn method(&self, settings: &CaseSettings<GenerationInput>) -> String {
        settings.method("in process, on one thread")
    }
}
