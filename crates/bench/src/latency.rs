//! `skysail bench latency`: rounds in which each peer takes a turn under the same load.
//!
//! For each number of connections, a round has one turn of the baseline, then in each topology one turn of each peer.
//! Disturbances of the machine therefore affect all peers alike.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use skysail_core::{shutdown, stdio};

use crate::{
    load::{Load, Traffic},
    node::Protocol,
    peers::Peer,
    report::{LatencyReport, LatencyRun, LatencySettings, Machine},
    results::ResultFile,
    schedule::Schedule,
    stage::{self, Output, Turns, deduplicate, minutes},
    topology::{self, Measurement, Setup, Shape, Topology},
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
    topology: Topology,
    peer: Option<Peer>,
}

/// Estimated time to start and end the processes of one turn.
const OVERHEAD: Duration = Duration::from_millis(1_300);

/// Measures, writes the result file and prints the result. Returns true if all of it was measured.
pub(crate) fn run(mut args: LatencyArgs) -> anyhow::Result<bool> {
    deduplicate(&mut args.connections);
    let peers = args.turns.programs(&Peer::ALL)?;
    let file = ResultFile::new(args.result.as_deref(), "latency")?;
    let stage = args.turns.stage()?;
    let mut report = new_report(&args, &peers, stage.machine.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    report.interrupted = runtime.block_on(async {
        tokio::select! {
            signal = shutdown::terminate() => signal.map(|_| true),
            () = take_turns(&args, &peers, &stage.setup, &mut report.runs) => Ok(false),
        }
    })?;
    drop(stage);
    finish(&args, file, report)
}

async fn take_turns(
    args: &LatencyArgs,
    peers: &[(Peer, PathBuf)],
    setup: &Setup,
    runs: &mut Vec<LatencyRun>,
) {
    let names: Vec<Peer> = peers.iter().map(|(peer, _)| *peer).collect();
    let turns = plan(args, &names);
    let each = args.turns.seconds + args.turns.warmup + OVERHEAD;
    let began = Instant::now();
    for (index, turn) in turns.iter().enumerate() {
        let program = turn.peer.and_then(|peer| peers.iter().find(|(other, _)| *other == peer));
        let load = Load {
            target: ([127, 0, 0, 1], 0).into(),
            traffic: Traffic::Http1,
            connections: turn.connections,
            schedule: Some(Schedule::per_second(args.qps)),
            payload: args.payload as usize,
            warmup: args.turns.warmup,
            window: args.turns.seconds,
            tls: None,
        };
        let shape = Shape {
            topology: turn.topology,
            protocol: Protocol::Http1,
            workers: args.workers,
            pinned: false,
            client_alone: false,

            resumption: false,
            clusters: 1,
            rewrites: false,
            connections: turn.connections,
        };
        let program = program.map(|(peer, program)| (*peer, program.as_path()));
        let measured = topology::measure(setup, shape, program, load).await;
        let done = u32::try_from(index + 1).unwrap_or(u32::MAX);
        let left = u32::try_from(turns.len()).unwrap_or(u32::MAX) - done;
        let pace = if index == 0 { each } else { began.elapsed() / done };
        stdio::print_error(format_args!(
            "[{done}/{}, {} left] round {}, {} connections, {} {}: {}",
            turns.len(),
            minutes(pace * left),
            turn.round,
            turn.connections,
            turn.topology.name(),
            turn.peer.map_or("", Peer::name),
            measured.as_ref().map_or_else(|error| format!("failed: {error:#}"), short),
        ));
        let (measurement, error) = match measured {
            Ok(measurement) => (Some(measurement), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        runs.push(LatencyRun {
            round: turn.round,
            topology: turn.topology.name(),
            peer: turn.peer.map(Peer::name),
            connections: turn.connections,
            measurement,
            error,
        });
    }
}

/// Returns all turns in the order in which they are taken.
fn plan(args: &LatencyArgs, peers: &[Peer]) -> Vec<LatencyTurn> {
    let mut turns = Vec::new();
    for round in 1..=args.turns.rounds {
        for &connections in &args.connections {
            for topology in Topology::ALL.into_iter().filter(|topology| args.topologies.contains(topology)) {
                if topology == Topology::Baseline {
                    turns.push(LatencyTurn { round, connections, topology, peer: None });
                    continue;
                }
                turns.extend(peers.iter().map(|peer| LatencyTurn {
                    round,
                    connections,
                    topology,
                    peer: Some(*peer),
                }));
            }
        }
    }
    turns
}

fn short(measurement: &Measurement) -> String {
    let latency = &measurement.latency_us;
    let costs = measurement.parts.iter().map(|(part, cost)| format!("{part} {:.1}", cost.cpu_us_per_request));
    let costs: Vec<String> = costs.collect();
    format!(
        "P50 {:.0} P99 {:.0} P99.9 {:.0} µs; CPU µs/request {}; others' CPUs {:.2}",
        latency.p50,
        latency.p99,
        latency.p99_9,
        costs.join(", "),
        measurement.other_cpus
    )
}

fn new_report(args: &LatencyArgs, peers: &[(Peer, PathBuf)], machine: Machine) -> LatencyReport {
    LatencyReport {
        format: 1,
        benchmark: "latency",
        version: env!("CARGO_PKG_VERSION"),
        started: stage::now(),
        interrupted: false,
        machine,
        settings: LatencySettings {
            topologies: args.topologies.iter().map(|topology| topology.name()).collect(),
            connections: args.connections.clone(),
            qps: args.qps,
            seconds: args.turns.seconds.as_secs_f64(),
            warmup: args.turns.warmup.as_secs_f64(),
            payload: args.payload as usize,
            rounds: args.turns.rounds,
            workers: args.workers,
        },
        peers: stage::versions(peers),
        runs: Vec::new(),
        summary: Vec::new(),
        comparisons: Vec::new(),
    }
}

/// Writes and prints the result. Returns true if it is complete.
fn finish(args: &LatencyArgs, file: ResultFile, mut report: LatencyReport) -> anyhow::Result<bool> {
    report.summarize();
    let (file, json) = file.write(&report)?;
    match args.turns.output {
        Output::Table => {
            stdio::print(report.tables())?;
            stdio::print(format_args!("The result is in {}.", file.display()))?;
        }
        Output::Json => stdio::print(json)?,
    }
    if report.interrupted {
        stdio::print_error(format_args!("interrupted after {} turns", report.runs.len()));
    }
    let failed: Vec<&LatencyRun> = report.runs.iter().filter(|run| run.error.is_some()).collect();
    if let Some(run) = failed.first() {
        stdio::print_error(format_args!(
            "{} of {} turns failed, the first one {} with {}: {}",
            failed.len(),
            report.runs.len(),
            run.topology,
            run.peer.unwrap_or("no proxy"),
            run.error.as_deref().unwrap_or_default()
        ));
    }
    Ok(!report.interrupted && failed.is_empty())
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
        let turns = plan(&args, &[Peer::Skysail, Peer::Envoy]);
        let short: Vec<_> = turns.iter().map(|turn| (turn.round, turn.connections, turn.peer)).collect();
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
