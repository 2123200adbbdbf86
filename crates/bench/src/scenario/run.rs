//! `skysail bench run`: takes the turns of scenarios, checks their acceptance, and stores the results.

use std::{
    fs,
    io::Write as _,
    path::{self, Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use serde::Serialize;
use skysail_core::stdio;

use super::{
    BENCHMARK, ScenarioResult,
    airline::{self, AirlineScenario},
    cases::{self, CaseResult, CaseStudy},
    command::{self, CommandScenario},
    csv,
    format::{Limit, MAX_ROUNDS, Scenario, SizeName},
    generation::{self, GenerationScenario},
    mesh::{self, MeshScenario},
    networks::{self, NetworksScenario},
    perf_data,
    study::AnyScenario,
    table,
};
use crate::{
    html, latency, network,
    peers::Peer,
    perf,
    report::{LatencyReport, Machine},
    results::{self, ResultFile},
    stage::{self, Environment, Output},
    topology::Setup,
};

/// Folder of scenarios that are given by name.
const FOLDER: &str = "benchmarks/scenarios";
/// Number of characters of a commit in the name of a folder.
const COMMIT: usize = 8;

/// Settings of `skysail bench run`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Files of scenarios, or names of files in benchmarks/scenarios without `.yaml`.
    #[arg(value_name = "SCENARIO", required = true)]
    scenarios: Vec<PathBuf>,

    #[command(flatten)]
    environment: Environment,

    /// Number of turns of every peer, from 1 to 30. Default: that of the size.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_ROUNDS)))]
    rounds: Option<u32>,

    /// Size of the run: `default`, `tiny`, or another one of `sizes` in the file, such as `full` for a bigger machine.
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = SizeName::parse)]
    size: SizeName,

    /// Folder of the result files: NAME.json, and NAME.csv with the columns of Istio's benchmark.csv. Existing files are
    /// kept. Default: benchmarks/results/DATE-COMMIT.
    #[arg(long, value_name = "FOLDER")]
    results: Option<PathBuf>,

    /// Folder for flame graphs of each sidecar (SVG), of the first round of scenarios of traffic. Existing files are
    /// replaced. Needs the program perf. Sampling takes CPU time, so the figures of the first round contain it.
    #[arg(long, value_name = "DIR")]
    perf: Option<PathBuf>,
}

/// A scenario of traffic or of networks to run, with its peers, their programs and the result file.
struct PreparedScenario<S> {
    scenario: S,
    peers: Vec<(Peer, PathBuf)>,
    file: ResultFile,
}

/// A scenario of cases to run, with the programs that it needs.
enum PreparedCases {
    Generation(GenerationScenario),
    Mesh(MeshScenario, Vec<(Peer, PathBuf)>),
    Command(CommandScenario, Vec<(Peer, PathBuf)>),
    Airline(AirlineScenario, Vec<(Peer, PathBuf)>),
}

impl PreparedCases {
    /// Takes all turns, writes the result file and prints the result. Returns true if the result is complete and
    /// accepted, and true if the run was interrupted.
    fn run(self, args: &RunArgs, file: ResultFile) -> anyhow::Result<(bool, bool)> {
        let (size, rounds, output) = (args.size, args.rounds, args.environment.output);
        match self {
            Self::Generation(scenario) => {
                let machine = stage::observe_machine("not used");
                publish_cases(&generation::run(scenario, size, rounds, machine)?, file, output)
            }
            Self::Mesh(scenario, peers) => {
                let machine = stage::observe_machine("a namespace for each pod");
                publish_cases(&mesh::run(scenario, size, rounds, &peers, machine)?, file, output)
            }
            Self::Command(scenario, peers) => {
                let machine = stage::observe_machine("a namespace for each turn");
                let result = command::run(scenario, size, rounds, &peers, machine)?;
                let file = publish(&result, file, output, &result.violations, || cases::markdown(&result))?;
                let figures = serde_json::to_string_pretty(&perf_data::of(&result))?;
                write_beside(&file, "perfdata.json", &figures)?;
                Ok(outcome(&result))
            }
            Self::Airline(scenario, peers) => {
                let machine = stage::observe_machine("a namespace for each pod");
                publish_cases(&airline::run(scenario, size, rounds, &peers, machine)?, file, output)
            }
        }
    }
}

/// Scenarios to run, with all that was checked before the first turn.
#[derive(Default)]
struct PreparedRun {
    of_traffic: Vec<PreparedScenario<Scenario>>,
    of_networks: Vec<PreparedScenario<NetworksScenario>>,
    of_cases: Vec<(PreparedCases, ResultFile)>,
}

/// Reads the scenarios, and checks size, peers and the folder of results.
fn prepare(args: &RunArgs) -> anyhow::Result<PreparedRun> {
    let scenarios: anyhow::Result<Vec<AnyScenario>> =
        args.scenarios.iter().map(|given| AnyScenario::read(&file_of(given))).collect();
    let folder = args.results.clone().unwrap_or_else(default_folder);
    let mut prepared = PreparedRun::default();
    for scenario in scenarios? {
        scenario.check_size(args.size)?;
        match scenario {
            AnyScenario::Traffic(scenario) => {
                let peers = args.environment.programs(&scenario.peers)?;
                scenario.check_peers(&peers)?;
                let file = ResultFile::in_folder(&folder, &scenario.name)?;
                prepared.of_traffic.push(PreparedScenario { scenario, peers, file });
            }
            AnyScenario::Generation(scenario) => {
                args.environment.check_in_process(&scenario.name)?;
                let file = ResultFile::in_folder(&folder, &scenario.name)?;
                prepared.of_cases.push((PreparedCases::Generation(scenario), file));
            }
            AnyScenario::Mesh(scenario) => {
                let peers = args.environment.programs(&scenario.peers)?;
                scenario.check_peers(&peers)?;
                let file = ResultFile::in_folder(&folder, &scenario.name)?;
                prepared.of_cases.push((PreparedCases::Mesh(scenario, peers), file));
            }
            AnyScenario::Networks(scenario) => {
                network::check().with_context(|| scenario.name.clone())?;
                let peers = args.environment.programs(&scenario.peers)?;
                let file = ResultFile::in_folder(&folder, &scenario.name)?;
                prepared.of_networks.push(PreparedScenario { scenario, peers, file });
            }
            AnyScenario::Command(scenario) => {
                let peers = match scenario.has_envoy() {
                    true => args.environment.programs_with_envoy(&scenario.name)?,
                    false => vec![(Peer::Skysail, args.environment.own_program(&scenario.name)?)],
                };
                let file = ResultFile::in_folder(&folder, &scenario.name)?;
                prepared.of_cases.push((PreparedCases::Command(scenario, peers), file));
            }
            AnyScenario::Airline(scenario) => {
                let peers = args.environment.programs(&scenario.peers)?;
                scenario.check_peers(&peers)?;
                let file = ResultFile::in_folder(&folder, &scenario.name)?;
                prepared.of_cases.push((PreparedCases::Airline(scenario, peers), file));
            }
        }
    }
    Ok(prepared)
}

/// Runs scenarios; those of networks and of traffic last, because they change scheduling and network of this process.
/// Returns true if all turns succeeded and all results are accepted.
///
/// # Errors
/// A scenario is invalid, a peer is missing, or a result cannot be written. Scenarios, peers and the folder are checked
/// before the first turn.
pub(crate) fn run(args: &RunArgs) -> anyhow::Result<bool> {
    let PreparedRun { of_traffic, of_networks, of_cases } = prepare(args)?;
    if let Some(folder) = &args.perf {
        ensure!(!of_traffic.is_empty(), "--perf: no scenario is one of traffic; leave the option out");
        perf::check()?;
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    }
    let mut is_good = true;
    for (prepared, file) in of_cases {
        let (is_accepted, interrupted) = prepared.run(args, file)?;
        is_good &= is_accepted;
        if interrupted {
            return Ok(false);
        }
    }
    if of_traffic.is_empty() && of_networks.is_empty() {
        return Ok(is_good);
    }
    let stage = args.environment.stage()?;
    for PreparedScenario { scenario, peers, file } in of_networks {
        let machine = Machine { network: "namespaces of pods and nodes".to_owned(), ..stage.machine.clone() };
        let place = (&stage.setup, machine);
        let result = networks::run(scenario, args.size, args.rounds, &peers, place)?;
        let (is_accepted, interrupted) = publish_cases(&result, file, args.environment.output)?;
        is_good &= is_accepted;
        if interrupted {
            return Ok(false);
        }
    }
    for PreparedScenario { scenario, peers, file } in of_traffic {
        let settings = scenario.settings(args.size, args.rounds);
        let mut report = latency::new_report(BENCHMARK, settings, &peers, stage.machine.clone());
        let perf =
            args.perf.as_ref().map(|folder| path::absolute(folder.join(&scenario.name))).transpose()?;
        latency::take_turns(&mut report, &peers, &Setup { perf, ..stage.setup.clone() })?;
        let violations = violations(&scenario, args.size, &report);
        let perf = args.perf.is_some();
        let result = ScenarioResult { scenario, size: args.size, violations, perf, report };
        let output = args.environment.output;
        let file = publish(&result, file, output, &result.violations, || table::markdown(&result))?;
        write_beside(&file, "csv", &csv::write(&result))?;
        is_good &= latency::is_complete(&result.report) && result.violations.is_empty();
        if result.report.interrupted {
            break;
        }
    }
    Ok(is_good)
}

/// Writes the result file and prints the result. Returns as [`PreparedCases::run`].
fn publish_cases<S: CaseStudy>(
    result: &CaseResult<S>,
    file: ResultFile,
    output: Output,
) -> anyhow::Result<(bool, bool)> {
    publish(result, file, output, &result.violations, || cases::markdown(result))?;
    Ok(outcome(result))
}

/// Returns true if a result is complete and accepted, and true if its run was interrupted.
fn outcome<S: CaseStudy>(result: &CaseResult<S>) -> (bool, bool) {
    (result.is_complete() && result.violations.is_empty(), result.report.interrupted)
}

/// Writes the result file and prints the result. Returns the file.
fn publish(
    result: &impl Serialize,
    file: ResultFile,
    output: Output,
    violations: &[String],
    tables: impl FnOnce() -> String,
) -> anyhow::Result<PathBuf> {
    let (file, json) = file.write(result)?;
    match output {
        Output::Table => {
            stdio::print(tables())?;
            stdio::print(format_args!("The result is in {}.", file.display()))?;
        }
        Output::Json => stdio::print(json)?,
    }
    for violation in violations {
        stdio::print_error(format_args!("not accepted: {violation}"));
    }
    Ok(file)
}

/// Writes a text beside the result file, with another extension.
fn write_beside(file: &Path, extension: &str, text: &str) -> anyhow::Result<()> {
    let path = file.with_extension(extension);
    results::create(&path)
        .and_then(|(_, mut file)| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the file of a scenario. A name without extension and folder is that of a file in [`FOLDER`].
fn file_of(given: &Path) -> PathBuf {
    let is_name = given.extension().is_none() && given.components().count() == 1;
    if is_name { Path::new(FOLDER).join(given).with_extension("yaml") } else { given.to_owned() }
}

fn default_folder() -> PathBuf {
    let date: String = html::date(stage::now()).chars().take_while(|character| *character != ' ').collect();
    let commit: String =
        stage::commit().map_or_else(|| "unknown".to_owned(), |commit| commit.chars().take(COMMIT).collect());
    Path::new("benchmarks/results").join(format!("{date}-{commit}"))
}

/// Returns the conditions that a run does not meet.
pub(super) fn violations(scenario: &Scenario, size: SizeName, report: &LatencyReport) -> Vec<String> {
    let mut violations = Vec::new();
    let most = scenario.acceptance.failed_percent;
    // A failed request is not hidden by a repeat of its turn.
    for run in report.runs.iter().chain(&report.repeated) {
        let Some(measurement) = &run.measurement else { continue };
        let failed = measurement.unanswered + measurement.refused;
        if failed as f64 * 100.0 > most * measurement.requests as f64 {
            violations.push(format!(
                "{} of {} requests failed in round {}, {}, {} connections; at most {most} % may fail",
                failed, measurement.requests, run.round, run.series, run.connections
            ));
        }
    }
    if size == SizeName::Default {
        violations.extend(scenario.acceptance.limits.iter().flat_map(|limit| beyond(limit, report)));
    }
    violations
}

/// Returns a message for each number of connections for which the median of a figure is above its limit.
fn beyond(limit: &Limit, report: &LatencyReport) -> Vec<String> {
    let rows = report.summary.iter().filter(|row| row.series == limit.series());
    let beyond = rows.filter_map(|row| {
        let median = row.metrics.get(&limit.metric)?.median;
        (median > limit.at_most).then(|| {
            format!(
                "{} is {median:.1} in {} with {}, {} connections; at most {} is accepted",
                limit.metric,
                row.series.topology.name(),
                row.series.measured_with(),
                row.connections,
                limit.at_most
            )
        })
    });
    beyond.collect()
}
