//! `skysail bench size`: vCPU, memory and cost of a mesh, computed from results.
//!
//! The cost of a request and of a sidecar is that of the scenario `mesh-wide`, the cost of the control plane that of
//! `capacity`. The program contains a result of each; `--results` takes others.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Serialize;
use skysail_core::stdio;

use super::{
    CPU_PRICE,
    cases::CaseResult,
    command::{CommandMeasurement, CommandScenario},
    format::SizeName,
    mesh::MeshScenario,
    page,
    study::{AnyResult, parse, read},
};
use crate::{
    html,
    layout::{self, TextTable},
    mesh::{MeshMeasurement, MeshPart},
    report::{self, Spread, cell},
    stage::Output,
};

/// Results that the program contains.
const RESULTS: [&str; 2] = [
    include_str!("../../../../benchmarks/results/2026-11-28-74287b2d/mesh-wide.json"),
    include_str!("../../../../benchmarks/results/2026-11-28-74287b2d/capacity.json"),
];
/// Names of the scenarios.
const MESH: &str = "mesh-wide";
const CONTROL: &str = "capacity";
/// Meshes of `mesh-wide`: the one with the most requests, and the one with the most sidecars.
const REQUESTS: &str = "chain";
const SIDECARS: &str = "tree";
/// Cases of `capacity`: one with 1,000 services, and one with a single service.
const CONTROL_CASE: &str = "services-1000";
const SERVICES: f64 = 1_000.0;
const BASE_CASE: &str = "churn-0";
/// Sidecars, by the ends of the names of their cases.
const PEERS: [&str; 2] = ["skysail", "envoy"];

/// Settings of `skysail bench size`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SizeArgs {
    /// Requests per second between pods, in the whole mesh.
    #[arg(long, value_name = "N", value_parser = number)]
    rps: f64,

    /// Number of pods with a sidecar.
    #[arg(long, value_name = "N", value_parser = number)]
    pods: f64,

    /// Number of services.
    #[arg(long, value_name = "N", default_value = "1000", value_parser = number)]
    services: f64,

    /// Changes of endpoints per second, such as starts and ends of pods.
    #[arg(long, value_name = "N", default_value = "1", value_parser = number)]
    changes: f64,

    /// Price of a vCPU for a month. Default: 50,000 for 1,200 vCPU, from "Benchmarking Istio and Linkerd CPU" (M. Kipper,
    /// 2019).
    #[arg(long, value_name = "PRICE", default_value_t = CPU_PRICE, value_parser = number)]
    cpu_price: f64,

    /// Price of a gigabyte of memory for a month. The default price of a vCPU includes memory.
    #[arg(long, value_name = "PRICE", default_value = "0", value_parser = number)]
    memory_price: f64,

    /// Folder with results of the scenarios mesh-wide and capacity, such as those of a machine like yours. Default: those
    /// that this program contains.
    #[arg(long, value_name = "FOLDER")]
    results: Option<PathBuf>,

    /// Output format.
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Results of both scenarios.
struct SizeResults {
    mesh: CaseResult<MeshScenario>,
    control: CaseResult<CommandScenario>,
}

/// Size of a mesh with the sidecars of a peer.
#[derive(Debug, Serialize)]
struct MeshSizing {
    peer: &'static str,
    parts: Vec<SizePart>,
    vcpu: Spread,
    memory_gb: Spread,
    /// Cost of a month.
    cost: Spread,
}

/// A part of the size: a number of things, and what each of them takes.
#[derive(Debug, Serialize)]
struct SizePart {
    part: &'static str,
    number: f64,
    each: Spread,
    unit: SizeUnit,
    /// vCPU, or gigabytes.
    all: Spread,
}

/// Unit of what a thing takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum SizeUnit {
    /// Microseconds of CPU time per second, or for one request or change per second.
    MicrosecondsOfCpu,
    /// Megabytes of resident memory.
    Megabytes,
}

/// Computes and prints the size.
///
/// # Errors
/// A result cannot be read, or lacks a figure.
pub(crate) fn size(args: &SizeArgs) -> anyhow::Result<()> {
    let results = match &args.results {
        Some(folder) => SizeResults::in_folder(folder)?,
        None => SizeResults::own()?,
    };
    let measured = PEERS.into_iter().filter(|peer| results.has(peer));
    let sizings = measured.map(|peer| args.sizing(&results, peer)).collect::<anyhow::Result<Vec<_>>>()?;
    match args.output {
        Output::Json => stdio::print(serde_json::to_string_pretty(&sizings)?)?,
        Output::Table => stdio::print(args.text(&results, &sizings))?,
    }
    Ok(())
}

impl SizeResults {
    /// Returns the results that the program contains.
    fn own() -> anyhow::Result<Self> {
        let parsed: anyhow::Result<Vec<Option<AnyResult>>> =
            RESULTS.iter().map(|text| parse(text.as_bytes())).collect();
        Self::of(parsed?.into_iter().flatten()).context("the results of this program")
    }

    /// Reads the results of a folder.
    fn in_folder(folder: &Path) -> anyhow::Result<Self> {
        let files = page::json_files(folder)?;
        let results: anyhow::Result<Vec<Option<AnyResult>>> = files.iter().map(|file| read(file)).collect();
        Self::of(results?.into_iter().flatten()).with_context(|| format!("--results {}", folder.display()))
    }

    /// Returns the newest results of the size `default`.
    fn of(results: impl Iterator<Item = AnyResult>) -> anyhow::Result<Self> {
        let (mut mesh, mut control) = (Vec::new(), Vec::new());
        for result in results {
            match result {
                AnyResult::Mesh(result) if result.scenario.name == MESH => mesh.push(*result),
                AnyResult::Command(result) if result.scenario.name == CONTROL => control.push(*result),
                _ => {}
            }
        }
        mesh.retain(|result| result.size == SizeName::Default);
        control.retain(|result| result.size == SizeName::Default);
        let mesh = mesh.into_iter().max_by_key(|result| result.report.started);
        let control = control.into_iter().max_by_key(|result| result.report.started);
        let missing = |name: &str| {
            format!(
                "there is no result of the scenario {name} in the size default; measure with skysail bench run {name}"
            )
        };
        Ok(Self {
            mesh: mesh.with_context(|| missing(MESH))?,
            control: control.with_context(|| missing(CONTROL))?,
        })
    }

    /// Returns true if a mesh was measured with the sidecars of the peer.
    fn has(&self, peer: &str) -> bool {
        let case = format!("{SIDECARS}/{peer}");
        self.mesh.report.runs.iter().any(|run| run.case == case && run.measurement.is_some())
    }

    /// Returns a figure of the turns of a mesh with the sidecars of a peer.
    fn of_mesh(
        &self,
        mesh: &str,
        peer: &str,
        figure: impl Fn(&MeshMeasurement) -> Option<f64>,
    ) -> anyhow::Result<Spread> {
        let case = format!("{mesh}/{peer}");
        let runs = self.mesh.report.runs.iter().filter(|run| run.case == case);
        let values = runs.filter_map(|run| figure(run.measurement.as_ref()?)).collect();
        report::spread(values).with_context(|| format!("the result of {MESH} has no turn of {case}"))
    }

    /// Returns a figure of the turns of a case of the control plane. `figure` gets the number of sidecars, and a function
    /// that returns a figure by name.
    fn of_control(
        &self,
        case: &str,
        figure: impl Fn(f64, &dyn Fn(&str) -> Option<f64>) -> Option<f64>,
    ) -> anyhow::Result<Spread> {
        let runs = self.control.report.runs.iter().filter(|run| run.case == case);
        let value = |measured: &CommandMeasurement| {
            figure(measured.sidecars as f64, &|name: &str| measured.figures.get(name).copied())
        };
        let values = runs.filter_map(|run| value(run.measurement.as_ref()?)).collect();
        report::spread(values).with_context(|| format!("the result of {CONTROL} lacks a figure of {case}"))
    }
}

impl SizeArgs {
    fn sizing(&self, results: &SizeResults, peer: &'static str) -> anyhow::Result<MeshSizing> {
        let sidecars = |measured: &MeshMeasurement| measured.parts.get(&MeshPart::Sidecars).copied();
        let request = results.of_mesh(REQUESTS, peer, |measured| {
            let of = sidecars(measured)?;
            let used = of.cpu_us_per_second - of.idle_cpu_us_per_second;
            Some(used * measured.seconds / measured.requests_in_mesh)
        })?;
        let idle = results.of_mesh(SIDECARS, peer, |measured| {
            Some(sidecars(measured)?.idle_cpu_us_per_second / measured.sidecars as f64)
        })?;
        let memory = results.of_mesh(SIDECARS, peer, |measured| {
            Some(sidecars(measured)?.rss_kb as f64 / 1_024.0 / measured.sidecars as f64)
        })?;
        let mut parts = vec![
            SizePart::new("requests per second", self.rps, request, SizeUnit::MicrosecondsOfCpu),
            SizePart::new("sidecars, idle", self.pods, idle, SizeUnit::MicrosecondsOfCpu),
            SizePart::new("sidecars", self.pods, memory, SizeUnit::Megabytes),
        ];
        // Both peers were measured with this control plane; that of another mesh was not measured.
        if peer == PEERS[0] {
            let of_case = CONTROL_CASE;
            let change =
                results.of_control(of_case, |sidecars, of| Some(of("endpoint_cpu_ms")? * 1e3 / sidecars))?;
            let sidecar = results
                .of_control(of_case, |sidecars, of| Some((of("resident_mb")? - of("idle_mb")?) / sidecars))?;
            let base = results.of_control(BASE_CASE, |_, of| of("idle_mb"))?;
            let service = results
                .of_control(of_case, |_, of| Some((of("idle_mb")? - base.median) / (SERVICES - 1.0)))?;
            let pushes = self.changes * self.pods;
            parts.extend([
                SizePart::new(
                    "control plane, changes × sidecars",
                    pushes,
                    change,
                    SizeUnit::MicrosecondsOfCpu,
                ),
                SizePart::new("control plane", 1.0, base, SizeUnit::Megabytes),
                SizePart::new("control plane, sidecars", self.pods, sidecar, SizeUnit::Megabytes),
                SizePart::new("control plane, services", self.services, service, SizeUnit::Megabytes),
            ]);
        }
        let sum = |unit: SizeUnit| {
            let all = parts.iter().filter(|part| part.unit == unit).map(|part| part.all);
            all.fold(Spread { median: 0.0, min: 0.0, max: 0.0 }, |sum, part| combine(sum, part, 1.0))
        };
        let (vcpu, memory_gb) = (sum(SizeUnit::MicrosecondsOfCpu), sum(SizeUnit::Megabytes));
        let cost = combine(
            vcpu.divided_by(1.0 / self.cpu_price.max(f64::MIN_POSITIVE)),
            memory_gb,
            self.memory_price,
        );
        Ok(MeshSizing { peer, parts, vcpu, memory_gb, cost })
    }

    /// Returns a table for each peer, and explanations.
    fn text(&self, results: &SizeResults, sizings: &[MeshSizing]) -> String {
        let tables = sizings.iter().map(MeshSizing::table);
        let measured = || results.mesh.report.runs.iter().filter_map(|run| run.measurement.as_ref());
        let rate = measured().map(|of| of.requests_in_mesh / of.seconds).fold(0.0, f64::max);
        let sidecars = measured().map(|of| of.sidecars).max().unwrap_or_default();
        let explanations = [
            format!(
                "number × for each = together. for each: median (min–max) over the turns; sums add medians, minima and maxima. \
                 Price of a month: {} for a vCPU, {} for a GB of memory.",
                self.cpu_price, self.memory_price
            ),
            format!(
                "Measured in meshes with at most {rate:.0} requests/s and {sidecars} sidecars. requests per second: CPU time of \
                 sidecars for a request between pods, which passes two of them, without their idle cost ({MESH}, {REQUESTS}). \
                 sidecars: idle cost and memory ({MESH}, {SIDECARS}); with more services a sidecar takes more memory."
            ),
            format!(
                "control plane: CPU time for a sidecar that receives a change of an endpoint, memory for a sidecar with the \
                 whole mesh, and memory for a service ({CONTROL}, {CONTROL_CASE} and {BASE_CASE}). The table of Envoy has none: \
                 both were measured with the control plane of Skysail, and that of another mesh was not measured."
            ),
            format!("Machine: {}.", html::machine(&results.mesh.report.machine)),
        ];
        let lines = explanations.iter().map(|line| layout::paragraph(line));
        tables.chain(lines).collect::<Vec<_>>().join("\n\n")
    }
}

impl SizePart {
    fn new(part: &'static str, number: f64, each: Spread, unit: SizeUnit) -> Self {
        let per_whole = if unit == SizeUnit::Megabytes { 1_024.0 } else { 1e6 };
        let all = each.divided_by(per_whole / number.max(f64::MIN_POSITIVE));
        Self { part, number, each, unit, all }
    }
}

impl MeshSizing {
    fn table(&self) -> String {
        let row = |part: &SizePart| {
            let (unit, whole) = match part.unit {
                SizeUnit::MicrosecondsOfCpu => ("µs", "vCPU"),
                SizeUnit::Megabytes => ("MB", "GB"),
            };
            vec![
                part.part.to_owned(),
                format!("{:.0}", part.number),
                format!("{} {unit}", cell(&part.each, 1.0, 2)),
                format!("{} {whole}", cell(&part.all, 1.0, 2)),
            ]
        };
        let sum = |name: &str, value: String| vec![name.to_owned(), String::new(), String::new(), value];
        let mut rows: Vec<Vec<String>> = self.parts.iter().map(row).collect();
        rows.push(sum("all CPU time", format!("{} vCPU", cell(&self.vcpu, 1.0, 2))));
        rows.push(sum("all memory", format!("{} GB", cell(&self.memory_gb, 1.0, 2))));
        rows.push(sum("cost of a month", cell(&self.cost, 1.0, 0)));
        let head = [self.peer, "number", "for each", "together"].map(str::to_owned).to_vec();
        TextTable { head, rows }.markdown(1)
    }
}

/// Returns the sum of a value and a multiple of another.
fn combine(sum: Spread, other: Spread, factor: f64) -> Spread {
    let add = |of: fn(&Spread) -> f64| of(&sum) + of(&other) * factor;
    Spread { median: add(|of| of.median), min: add(|of| of.min), max: add(|of| of.max) }
}

fn number(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number @ 0.0..=1e9) => Ok(number),
        _ => Err("must be a number from 0 to 1000000000".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(rps: f64, pods: f64) -> SizeArgs {
        SizeArgs {
            rps,
            pods,
            services: 200.0,
            changes: 2.0,
            cpu_price: 40.0,
            memory_price: 5.0,
            results: None,
            output: Output::Table,
        }
    }

    #[test]
    fn a_size_is_the_sum_of_its_parts() {
        let results = SizeResults::own().unwrap();
        let one = args(10_000.0, 600.0).sizing(&results, "skysail").unwrap();
        for (unit, sum) in [(SizeUnit::MicrosecondsOfCpu, one.vcpu), (SizeUnit::Megabytes, one.memory_gb)] {
            let parts: f64 =
                one.parts.iter().filter(|part| part.unit == unit).map(|part| part.all.median).sum();
            assert!(
                (sum.median - parts).abs() < 1e-9 && sum.min <= sum.median && sum.median <= sum.max,
                "{one:?}"
            );
        }
        let cost = one.vcpu.median * 40.0 + one.memory_gb.median * 5.0;
        assert!((one.cost.median - cost).abs() < 1e-6, "{one:?}");
        let twice = args(20_000.0, 1_200.0).sizing(&results, "skysail").unwrap();
        assert!((twice.vcpu.median / one.vcpu.median - 2.0).abs() < 1e-9, "all parts of CPU time double");
        let requests = &one.parts[0];
        assert!((requests.all.median - requests.each.median * 10_000.0 / 1e6).abs() < 1e-9, "{requests:?}");
    }

    #[test]
    fn the_text_fits_a_terminal_and_names_its_sources() {
        let results = SizeResults::own().unwrap();
        let args = args(10_000.0, 600.0);
        let sizings = PEERS.map(|peer| args.sizing(&results, peer).unwrap());
        let text = args.text(&results, &sizings);
        layout::assert_fits(&text);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in
            ["| skysail ", "| envoy ", "| cost of a month", "mesh-wide, chain", "capacity, services-1000"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let none = tempfile::tempdir().unwrap();
        let missing = format!("{:#}", SizeResults::in_folder(none.path()).err().unwrap());
        assert!(missing.contains("measure with skysail bench run mesh-wide"), "{missing}");
    }
}
