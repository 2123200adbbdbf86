//! `skysail bench latency`: rounds in which each peer takes a turn under the same load.
//!
//! For each number of connections, a round has one turn of the baseline, then in each topology one turn of each peer.
//! Disturbances of the machine therefore affect all peers alike.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use skysail_core::{shutdown, stdio};

use crate::{
    access_log::{self, AccessLog},
    foreign_load::{Attempt, Repeats},
    load::{Load, LoadProtocol},
    peers::Peer,
    report::{LatencyReport, LatencyRun, LatencySettings, Machine, Series},
    results::ResultFile,
    schedule::Schedule,
    stage::{self, Output, Turns, deduplicate, minutes},
    topology::{self, Measurement, Setup, Shape, Topology},
    variant::{self, Variant},
};

/// Settings of `skysail bench latency`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LatencyArgs {
    #[command(flatten)]
    turns: Turns,

    /// Topologies between client and server. Added latency needs `baseline`.
    #[arg(long, value_name = "TOPOLOGY,…", value_delimiter = ',', value_enum, default_values = ["baseline", "server-sidecar", "both-sidecars"])]
    topologies: Vec<Topology>,

    /// Numbers of client connections.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values = ["2", "4", "8", "16", "32", "64"], value_parser = connections)]
    connections: Vec<usize>,

    /// Requests per second over all connections, due at even intervals.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    qps: u32,

    /// Bytes of the body of each request, and of its response.
    #[arg(long, value_name = "BYTES", default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(0..=524_288))]
    payload: u32,

    /// Worker threads (nginx: processes) of each proxy.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    workers: u32,

    /// Result file (JSON). Default: a file in the current directory with the time in its name. An existing file is
    /// refused.
    #[arg(long, value_name = "FILE")]
    result: Option<PathBuf>,
}

/// A turn to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LatencyTurn {
    round: u32,
    connections: usize,
    series: Series,
}

/// Estimated time to start and end the processes of one turn.
const OVERHEAD: Duration = Duration::from_millis(1_300);

/// Measures, writes the result file and prints the result. Returns true if all of it was measured.
pub(crate) fn run(mut args: LatencyArgs) -> anyhow::Result<bool> {
    deduplicate(&mut args.connections);
    let environment = &args.turns.environment;
    let peers = environment.programs(&Peer::ALL)?;
    let file = ResultFile::new(args.result.as_deref(), "latency")?;
    let stage = environment.stage()?;
    let mut report = new_report("latency", settings(&args), &peers, stage.machine.clone());
    take_turns(&mut report, &peers, &stage.setup)?;
    drop(stage);
    let (file, json) = file.write(&report)?;
    match environment.output {
        Output::Table => {
            stdio::print(report.tables())?;
            stdio::print(format_args!("The result is in {}.", file.display()))?;
        }
        Output::Json => stdio::print(json)?,
    }
    Ok(is_complete(&report))
}

/// Takes all turns and summarizes them. A signal ends them early.
pub(crate) fn take_turns(
    report: &mut LatencyReport,
    peers: &[(Peer, PathBuf)],
    setup: &Setup,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    report.interrupted = runtime.block_on(async {
        tokio::select! {
            signal = shutdown::terminate() => signal.map(|_| true),
            () = take(&report.settings, peers, setup, (&mut report.runs, &mut report.repeated)) => Ok(false),
        }
    })?;
    report.summarize();
    Ok(())
}

async fn take(
    settings: &LatencySettings,
    peers: &[(Peer, PathBuf)],
    setup: &Setup,
    (runs, repeated): (&mut Vec<LatencyRun>, &mut Vec<LatencyRun>),
) {
    let names: Vec<Peer> = peers.iter().map(|(peer, _)| *peer).collect();
    let (turns, mut repeats) = (plan(settings, &names), Repeats::new(settings.rounds));
    let began = Instant::now();
    for (index, turn) in turns.iter().enumerate() {
        let program = turn.series.peer.and_then(|peer| peers.iter().find(|(other, _)| *other == peer));
        let program = program.map(|(peer, program)| (*peer, program.as_path()));
        // Sampling takes CPU time, so one turn of each setting is enough.
        let perf = setup.perf.as_ref().filter(|_| turn.round == 1 && turn.series.peer.is_some());
        let setup = Setup { perf: perf.map(|prefix| turn.files(prefix)), ..setup.clone() };
        let taken = repeats.take(async || {
            let (shape, load) = shape_and_load(settings, turn.series, turn.connections)?;
            topology::measure(&setup, shape, program, load).await
        });
        let taken = taken.await;
        let done = u32::try_from(index + 1).unwrap_or(u32::MAX);
        let left = u32::try_from(turns.len()).unwrap_or(u32::MAX) - done;
        let measured = taken.counts.result.as_ref();
        stdio::print_error(format_args!(
            "[{done}/{}, {} left] round {}, {} connections, {}: {}{}",
            turns.len(),
            minutes(if index == 0 { duration(settings) } else { began.elapsed() / done } * left),
            turn.round,
            turn.connections,
            turn.series,
            measured.map_or_else(|error| format!("failed: {error:#}"), Measurement::short),
            taken.note(),
        ));
        runs.push(turn.run(taken.counts));
        repeated.extend(taken.dropped.map(|attempt| turn.run(attempt)));
    }
}

impl LatencyTurn {
    /// Returns the start of the names of the files for flame graphs of the turn.
    fn files(self, prefix: &Path) -> PathBuf {
        let mut name = prefix.as_os_str().to_owned();
        name.push(format!("-{}-{}", self.series, self.connections).replace(", ", "-"));
        name.into()
    }

    /// Returns the turn with what an attempt measured.
    fn run(self, Attempt { result, busy }: Attempt<Measurement>) -> LatencyRun {
        let Self { round, series, connections } = self;
        let (measurement, error) = match result {
            Ok(measurement) => (Some(measurement), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        LatencyRun { round, series, connections, measurement, error, busy }
    }
}

/// Returns the estimated duration of a turn.
fn duration(settings: &LatencySettings) -> Duration {
    Duration::from_secs_f64(settings.seconds + settings.warmup) + OVERHEAD
}

/// Returns the sidecars and the load of a turn.
///
/// # Errors
/// The token of a variant cannot be issued.
pub(crate) fn shape_and_load(
    settings: &LatencySettings,
    series: Series,
    connections: usize,
) -> anyhow::Result<(Shape, Load)> {
    let traffic = settings.protocol.traffic();
    let shape = Shape {
        topology: series.topology,
        protocol: traffic.protocol(),
        workers: settings.workers,
        pinned: false,
        client_alone: false,
        resumption: false,
        clusters: 1,
        extra: series.variant.extra()?,
        access_log: if series.variant == Variant::AccessLog { AccessLog::File } else { series.access_log },
        connections,
    };
    let load = Load {
        target: ([127, 0, 0, 1], 0).into(),
        traffic,
        connections,
        schedule: Some(Schedule::per_second(settings.qps)),
        payload: settings.payload,
        warmup: Duration::from_secs_f64(settings.warmup),
        window: Duration::from_secs_f64(settings.seconds),
        tls: None,
    };
    Ok((shape, load))
}

/// Returns all turns in the order in which they are taken.
fn plan(settings: &LatencySettings, peers: &[Peer]) -> Vec<LatencyTurn> {
    let mut turns = Vec::new();
    for round in 1..=settings.rounds {
        for &connections in &settings.connections {
            for topology in
                Topology::ALL.into_iter().filter(|topology| settings.topologies.contains(topology))
            {
                let peers = peers.iter().map(|peer| Some(*peer));
                let peers = if topology == Topology::Baseline { vec![None] } else { peers.collect() };
                let has_sidecars = topology != Topology::Baseline;
                let logs = if has_sidecars { &settings.access_logs[..] } else { &[AccessLog::None] };
                let variants = if has_sidecars { &settings.variants[..] } else { &[Variant::Usual] };
                for (&variant, &access_log) in
                    variants.iter().flat_map(|variant| logs.iter().map(move |log| (variant, log)))
                {
                    let possible = peers.iter().filter(|peer| variant.is_possible(**peer));
                    turns.extend(possible.map(|&peer| LatencyTurn {
                        round,
                        connections,
                        series: Series { topology, peer, access_log, variant },
                    }));
                }
            }
        }
    }
    turns
}

fn settings(args: &LatencyArgs) -> LatencySettings {
    LatencySettings {
        topologies: args.topologies.clone(),
        connections: args.connections.clone(),
        qps: args.qps,
        seconds: args.turns.seconds.as_secs_f64(),
        warmup: args.turns.warmup.as_secs_f64(),
        payload: args.payload as usize,
        rounds: args.turns.rounds,
        workers: args.workers,
        access_logs: access_log::only_none(),
        variants: variant::only_usual(),
        protocol: LoadProtocol::Http1,
    }
}

/// Creates the report of a run without turns.
pub(crate) fn new_report(
    benchmark: &str,
    settings: LatencySettings,
    peers: &[(Peer, PathBuf)],
    machine: Machine,
) -> LatencyReport {
    LatencyReport {
        format: 1,
        benchmark: benchmark.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: stage::commit(),
        started: stage::now(),
        interrupted: false,
        machine,
        settings,
        peers: stage::versions(peers),
        runs: Vec::new(),
        repeated: Vec::new(),
        summary: Vec::new(),
        comparisons: Vec::new(),
    }
}

/// Returns true if all turns were taken and none failed. Prints a message if not.
pub(crate) fn is_complete(report: &LatencyReport) -> bool {
    if report.interrupted {
        stdio::print_error(format_args!("interrupted after {} turns", report.runs.len()));
    }
    let failed: Vec<&LatencyRun> = report.runs.iter().filter(|run| run.error.is_some()).collect();
    if let Some(run) = failed.first() {
        stdio::print_error(format_args!(
            "{} of {} turns failed, the first one {}: {}",
            failed.len(),
            report.runs.len(),
            run.series,
            run.error.as_deref().unwrap_or_default()
        ));
    }
    !report.interrupted && failed.is_empty()
}

fn connections(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=4_096) => Ok(number),
        _ => Err("must be a number from 1 to 4096".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: LatencyArgs,
    }

    fn args(line: &str) -> LatencyArgs {
        CommandLine::try_parse_from(["bench"].into_iter().chain(line.split_whitespace())).unwrap().args
    }

    #[test]
    fn peers_alternate_within_a_round() {
        let args = args("--rounds 2 --connections 2,64 --topologies both-sidecars,baseline");
        let turns = plan(&settings(&args), &[Peer::Skysail, Peer::Envoy]);
        let short: Vec<_> =
            turns.iter().map(|turn| (turn.round, turn.connections, turn.series.peer)).collect();
        let (skysail, envoy) = (Some(Peer::Skysail), Some(Peer::Envoy));
        let once =
            |round| [2, 64].map(|n| [(round, n, None), (round, n, skysail), (round, n, envoy)]).concat();
        assert_eq!(short, [once(1), once(2)].concat());
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let args = args("");
        assert_eq!(args.connections, [2, 4, 8, 16, 32, 64]);
        assert_eq!(args.topologies, [Topology::Baseline, Topology::ServerSidecar, Topology::BothSidecars]);
        assert_eq!((args.qps, args.payload, args.turns.rounds), (1_000, 1_024, 3));
    }

    #[test]
    fn invalid_input_is_refused() {
        for line in ["--connections 0", "--qps 0", "--seconds nan", "--peers apache", "--rounds 0"] {
            assert!(
                CommandLine::try_parse_from(["bench"].into_iter().chain(line.split(' '))).is_err(),
                "{line}"
            );
        }
    }
}
