//! `skysail bench compare`: a fixed set of experiments, each with all peers in turn, round after round.
//!
//! [`experiments`] defines them; this module runs them; [`result`] summarizes them; [`table`] and [`page`] show them.

mod experiments;
mod overload;
mod page;
mod result;
mod table;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use skysail_core::{shutdown, stdio};

use self::{
    experiments::{Experiment, PAYLOAD, SETTINGS, Setting, TurnWork},
    result::{CompareSettings, Comparison, HeldMemory, Run, Skipped, TurnResult},
};
use crate::{
    load::{Idle, Load},
    peers::Peer,
    report::Machine,
    results::{self, ResultFile},
    schedule::Schedule,
    stage::{self, Output, Turns, deduplicate, minutes},
    topology::{self, RunningTopology, Setup, Shape},
};

/// Settings of `skysail bench compare`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    turns: Turns,

    /// Experiments to run. Default: all.
    #[arg(long, value_name = "EXPERIMENT,…", value_delimiter = ',', value_enum)]
    only: Vec<Experiment>,

    /// Result file (JSON). Default: a file in the current directory with the time in its name. An existing file is
    /// refused.
    #[arg(long, value_name = "FILE")]
    result: Option<PathBuf>,

    /// File of a self-contained page with tables and plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Measure nothing; show this result file of an earlier run.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "peers", "result"])]
    from: Option<PathBuf>,
}

/// A turn to run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CompareTurn {
    round: u32,
    setting: &'static Setting,
    peer: Option<Peer>,
}

/// Estimated time to start and end the processes of one turn.
const OVERHEAD: Duration = Duration::from_millis(1_300);
/// Time until a sidecar has released the memory of its start. `skysail-proxy` does so 5 seconds after a change of
/// configuration.
const START_UP: Duration = Duration::from_millis(6_500);
/// Time until connections count as idle.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// Measures, writes the result file and prints the result. Returns true if all of it was measured.
pub(crate) fn run(mut args: CompareArgs) -> anyhow::Result<bool> {
    if let Some(html) = &args.html {
        results::check_writable("--html", html)?;
    }
    if let Some(file) = &args.from {
        let mut comparison = read(file)?;
        comparison.summarize();
        show(&args, &comparison, file)?;
        return Ok(complete(&comparison));
    }
    deduplicate(&mut args.only);
    let usual = [&Peer::ALL[..], &[Peer::Relay]].concat();
    let peers = args.turns.environment.programs(&usual)?;
    let result = ResultFile::new(args.result.as_deref(), "compare")?;
    let names: Vec<Peer> = peers.iter().map(|(peer, _)| *peer).collect();
    let (turns, skipped) = plan(&args.only, &names, args.turns.rounds);
    for one in &skipped {
        let Skipped { experiment, setting, peer, reason } = one;
        stdio::print_error(format_args!("{experiment}, {setting}: without {peer}, because {reason}"));
    }
    let stage = args.turns.environment.stage()?;
    let mut comparison = new_comparison(&args, &peers, stage.machine.clone(), skipped);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    comparison.interrupted = runtime.block_on(async {
        tokio::select! {
            signal = shutdown::terminate() => signal.map(|_| true),
            () = take_turns(&args.turns, &turns, &peers, &stage.setup, &mut comparison.runs) => Ok(false),
        }
    })?;
    // A client thread may still run for a moment; the process does not wait for it.
    runtime.shutdown_background();
    drop(stage);
    comparison.summarize();
    let (file, _) = result.write(&comparison)?;
    show(&args, &comparison, &file)?;
    Ok(complete(&comparison))
}

fn read(file: &Path) -> anyhow::Result<Comparison> {
    let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let comparison: Comparison = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not a result of bench compare", file.display()))?;
    if comparison.benchmark != "compare" || comparison.format != 1 {
        bail!("{} is not a result of bench compare in format 1", file.display());
    }
    Ok(comparison)
}

/// Returns all turns in the order in which they are taken, and those that cannot be taken.
fn plan(only: &[Experiment], peers: &[Peer], rounds: u32) -> (Vec<CompareTurn>, Vec<Skipped>) {
    let wanted = |setting: &&Setting| only.is_empty() || only.contains(&setting.experiment);
    let (mut turns, mut skipped) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        for setting in SETTINGS.iter().filter(wanted) {
            turns.extend(setting.baseline.then_some(CompareTurn { round, setting, peer: None }));
            for &peer in peers {
                match setting.unable(peer) {
                    None => turns.push(CompareTurn { round, setting, peer: Some(peer) }),
                    Some(reason) if round == 1 => skipped.push(Skipped {
                        experiment: setting.experiment.name().to_owned(),
                        setting: setting.name.to_owned(),
                        peer: peer.name().to_owned(),
                        reason: reason.to_owned(),
                    }),
                    Some(_) => {}
                }
            }
        }
    }
    (turns, skipped)
}

async fn take_turns(
    how: &Turns,
    turns: &[CompareTurn],
    peers: &[(Peer, PathBuf)],
    setup: &Setup,
    runs: &mut Vec<Run>,
) {
    let expected: Vec<Duration> = turns.iter().map(|turn| duration(turn.setting, how)).collect();
    let began = Instant::now();
    for (index, turn) in turns.iter().enumerate() {
        let (past, left): (Duration, Duration) =
            (expected[..index].iter().sum(), expected[index..].iter().sum());
        let pace = if index == 0 { 1.0 } else { began.elapsed().as_secs_f64() / past.as_secs_f64() };
        stdio::print_error(format_args!(
            "[{}/{}, {} left] round {}, {}, {}: {}",
            index + 1,
            turns.len(),
            minutes(left.mul_f64(pace)),
            turn.round,
            turn.setting.experiment.name(),
            turn.setting.name,
            turn.peer.map_or("without sidecars", Peer::name),
        ));
        let program = turn.peer.and_then(|peer| peers.iter().find(|(other, _)| *other == peer));
        let program = program.map(|(peer, program)| (*peer, program.as_path()));
        let (shown, error) = match take(how, turn, program, setup).await {
            Ok(shown) => (shown, None),
            Err(error) => (TurnResult::default(), Some(format!("{error:#}"))),
        };
        stdio::print_error(format_args!("    {}", error.clone().unwrap_or_else(|| table::short(&shown))));
        runs.push(Run {
            round: turn.round,
            experiment: turn.setting.experiment.name().to_owned(),
            setting: turn.setting.name.to_owned(),
            peer: turn.peer.map(|peer| peer.name().to_owned()),
            shown,
            error,
        });
    }
}

/// Returns the estimated duration of a turn.
fn duration(setting: &Setting, how: &Turns) -> Duration {
    match setting.work {
        TurnWork::Load { .. } => how.seconds + how.warmup + OVERHEAD,
        TurnWork::Surge { .. } => 4 * how.seconds + how.warmup + OVERHEAD,
        TurnWork::Hold(steps) => {
            let opening =
                Duration::from_micros(300) * u32::try_from(steps.iter().sum::<usize>()).unwrap_or(0);
            START_UP + OVERHEAD + opening + IDLE_TIME * u32::try_from(steps.len()).unwrap_or(0)
        }
    }
}

async fn take(
    how: &Turns,
    turn: &CompareTurn,
    peer: Option<(Peer, &Path)>,
    setup: &Setup,
) -> anyhow::Result<TurnResult> {
    let mut shape = turn.setting.shape();
    match turn.setting.work {
        TurnWork::Load { traffic, connections, rate } => {
            if peer.is_none() {
                shape.topology = topology::Topology::Baseline;
            }
            let load = Load {
                target: ([127, 0, 0, 1], 0).into(),
                traffic,
                connections,
                schedule: rate.map(Schedule::per_second),
                payload: PAYLOAD,
                warmup: how.warmup,
                window: how.seconds,
                tls: None,
            };
            let measurement = topology::measure(setup, shape, peer, load).await?;
            Ok(TurnResult { measurement: Some(measurement), ..TurnResult::default() })
        }
        TurnWork::Surge { .. } => {
            let overload = overload::take(setup, shape, peer, how.warmup, how.seconds).await?;
            Ok(TurnResult { overload: Some(overload), ..TurnResult::default() })
        }
        TurnWork::Hold(steps) => {
            let standing = RunningTopology::start(setup, &shape, peer).await?;
            let held = hold(&standing, setup, shape, steps).await;
            Ok(TurnResult { held: standing.end(held).await?, ..TurnResult::default() })
        }
    }
}

/// Measures the memory without connections, then with the number of connections of each step.
async fn hold(
    standing: &RunningTopology,
    setup: &Setup,
    shape: Shape,
    steps: &[usize],
) -> anyhow::Result<Vec<HeldMemory>> {
    tokio::time::sleep(START_UP).await;
    let mut held = vec![HeldMemory { connections: 0, memory: standing.memory() }];
    let resume = shape.resumption;
    let mut idle = Idle::new(standing.entry, standing.tls(setup, resume)?);
    for &connections in steps {
        let growing = tokio::task::spawn_blocking(move || idle.grow(connections).map(|()| idle));
        idle = growing.await.context("the client failed")??;
        tokio::time::sleep(IDLE_TIME).await;
        held.push(HeldMemory { connections, memory: standing.memory() });
    }
    Ok(held)
}

fn new_comparison(
    args: &CompareArgs,
    peers: &[(Peer, PathBuf)],
    machine: Machine,
    skipped: Vec<Skipped>,
) -> Comparison {
    let wanted = |experiment: &Experiment| args.only.is_empty() || args.only.contains(experiment);
    let experiments = Experiment::ALL.into_iter().filter(wanted);
    Comparison {
        format: 1,
        benchmark: "compare".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: stage::commit(),
        started: stage::now(),
        interrupted: false,
        machine,
        settings: CompareSettings {
            experiments: experiments.map(|experiment| experiment.name().to_owned()).collect(),
            peers: peers.iter().map(|(peer, _)| peer.name().to_owned()).collect(),
            seconds: args.turns.seconds.as_secs_f64(),
            warmup: args.turns.warmup.as_secs_f64(),
            rounds: args.turns.rounds,
        },
        peers: stage::versions(peers),
        skipped,
        runs: Vec::new(),
        summary: Vec::new(),
    }
}

/// Prints the result, which `file` contains, and writes the page.
fn show(args: &CompareArgs, comparison: &Comparison, file: &Path) -> anyhow::Result<()> {
    if let Some(html) = &args.html {
        fs::write(html, page::page(comparison))
            .with_context(|| format!("cannot write {}", html.display()))?;
    }
    match args.turns.environment.output {
        Output::Table => {
            stdio::print(table::tables(comparison))?;
            stdio::print(format_args!("The result is in {}.", file.display()))?;
        }
        Output::Json => stdio::print(serde_json::to_string_pretty(comparison)?)?,
    }
    Ok(())
}

/// Returns true if all turns were taken and none failed. Prints a message if not.
fn complete(comparison: &Comparison) -> bool {
    if comparison.interrupted {
        stdio::print_error(format_args!("interrupted after {} turns", comparison.runs.len()));
    }
    let failed: Vec<&Run> = comparison.runs.iter().filter(|run| run.error.is_some()).collect();
    if let Some(run) = failed.first() {
        stdio::print_error(format_args!(
            "{} of {} turns failed, the first one {}, {} with {}: {}",
            failed.len(),
            comparison.runs.len(),
            run.experiment,
            run.setting,
            run.peer.as_deref().unwrap_or("no proxy"),
            run.error.as_deref().unwrap_or_default()
        ));
    }
    !comparison.interrupted && failed.is_empty()
}

#[cfg(test)]
mod tests;
