//! `skysail bench latency`: rounds in which every peer takes its turn under the same load.
//!
//! In each round, for each number of connections: the baseline, then for each topology every peer. So whatever the
//! machine does in the meantime hits all alike.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, ensure};
use skysail_core::{shutdown, stdio};

use crate::{
    accounting,
    certificates::Certificates,
    child,
    load::Load,
    namespace,
    peers::{Peer, Places},
    report::{Machine, Program, Report, Run, Settings},
    schedule::Schedule,
    topology::{self, Measurement, Setup, Topology},
};

/// What to measure, and how.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Proxies to measure; by default all that are installed.
    #[arg(long, value_name = "PEER,…", value_delimiter = ',', value_enum)]
    peers: Vec<Peer>,

    /// What is between client and server. Without `baseline` no added latency can be told.
    #[arg(long, value_name = "TOPOLOGY,…", value_delimiter = ',', value_enum, default_values = ["baseline", "server-sidecar", "both-sidecars"])]
    topologies: Vec<Topology>,

    /// Numbers of client connections.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values = ["2", "4", "8", "16", "32", "64"], value_parser = connections)]
    connections: Vec<usize>,

    /// Requests a second over all connections, due at even intervals.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    qps: u32,

    /// How long each turn is measured.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    seconds: Duration,

    /// How long the load is applied before.
    #[arg(long, value_name = "SECONDS", default_value = "1.5", value_parser = seconds)]
    warmup: Duration,

    /// Bytes of each request's body, and of its answer's.
    #[arg(long, value_name = "BYTES", default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(0..=524_288))]
    payload: u32,

    /// How often every peer takes its turn.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Worker threads (nginx: processes) of each proxy.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    workers: u32,

    /// Envoy's program; by default ~/.cache/skysail/envoy-1.40.0/envoy, then the one in PATH.
    #[arg(long, value_name = "FILE", env = "SKYSAIL_ENVOY")]
    envoy: Option<PathBuf>,

    /// Another build of skysail or skysail-proxy to measure instead of this one.
    #[arg(long, value_name = "FILE")]
    skysail: Option<PathBuf>,

    /// Where the result goes, as JSON.
    #[arg(long, value_name = "FILE", default_value = "skysail-bench-latency.json")]
    result: PathBuf,

    /// What is printed at the end.
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Output::Table)]
    output: Output,

    /// Leave scheduling to the kernel's defaults even where real-time scheduling is permitted.
    #[arg(long)]
    no_realtime: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// Tables in Markdown.
    Table,
    /// What the result file holds.
    Json,
}

/// One turn to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    round: u32,
    connections: usize,
    topology: Topology,
    peer: Option<Peer>,
}

/// Start and end of the processes of one turn, about, for the estimate of what is left.
const OVERHEAD: Duration = Duration::from_millis(1_300);

/// Measures, writes the result file and prints the result. Says whether all of it was measured.
pub(crate) fn run(mut args: Args) -> anyhow::Result<bool> {
    keep_first(&mut args.peers);
    keep_first(&mut args.connections);
    ensure!(
        accounting::available(),
        "the kernel keeps no /proc/PID/schedstat (CONFIG_SCHED_INFO), which tells CPU time"
    );
    let peers = find(&args)?;
    check_writable(&args.result)
        .with_context(|| format!("--result {}: it cannot be written", args.result.display()))?;
    // What the machine is like comes first: then there is one thread only, as a user namespace needs.
    let scheduling = if args.no_realtime {
        Err("not asked for".to_owned())
    } else {
        child::set_realtime(child::OBSERVER).map_err(|error| error.to_string())
    };
    let network = namespace::enter();
    for (what, error) in [
        ("real-time scheduling", scheduling.as_ref().err().cloned().filter(|_| !args.no_realtime)),
        ("a network namespace of its own", network.as_ref().err().map(ToString::to_string)),
    ] {
        if let Some(error) = error {
            stdio::tell(format_args!("going on without {what}: {error}"));
        }
    }
    let mut report = new_report(&args, &peers, scheduling.as_ref().err(), &network);
    let folder =
        tempfile::Builder::new().prefix("skysail-bench-").tempdir().context("cannot make a folder")?;
    let setup = Setup {
        executable: std::env::current_exe().context("finding this program's file")?,
        folder: folder.path().to_owned(),
        certificates: Certificates::make(folder.path())?,
        realtime: scheduling.is_ok(),
        workers: args.workers,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    report.interrupted = runtime.block_on(async {
        tokio::select! {
            signal = shutdown::terminate() => signal.map(|_| true),
            () = take_turns(&args, &peers, &setup, &mut report.runs) => Ok(false),
        }
    })?;
    drop(folder);
    finish(&args, report)
}

/// Whether a file can be written, found out without leaving anything behind.
fn check_writable(file: &Path) -> io::Result<()> {
    if file.exists() {
        return fs::OpenOptions::new().append(true).open(file).map(|_| ());
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    tempfile::tempfile_in(folder).map(|_| ())
}

/// The peers with their programs: those asked for, or those installed.
fn find(args: &Args) -> anyhow::Result<Vec<(Peer, PathBuf)>> {
    let places = Places { skysail: args.skysail.clone(), envoy: args.envoy.clone() };
    let with_program = |peer: &Peer| Ok((*peer, peer.find(&places)?));
    if !args.peers.is_empty() {
        return args.peers.iter().map(with_program).collect();
    }
    // A file that was named must be there.
    let named = |peer: Peer| match peer {
        Peer::Skysail => true,
        Peer::Envoy => args.envoy.is_some(),
        Peer::Haproxy | Peer::Nginx => false,
    };
    let found = Peer::ALL.iter().map(|peer| (*peer, with_program(peer)));
    found.filter(|(peer, found)| found.is_ok() || named(*peer)).map(|(_, found)| found).collect()
}

async fn take_turns(args: &Args, peers: &[(Peer, PathBuf)], setup: &Setup, runs: &mut Vec<Run>) {
    let names: Vec<Peer> = peers.iter().map(|(peer, _)| *peer).collect();
    let turns = plan(args, &names);
    let each = args.seconds + args.warmup + OVERHEAD;
    let began = Instant::now();
    for (index, turn) in turns.iter().enumerate() {
        let program = turn.peer.and_then(|peer| peers.iter().find(|(other, _)| *other == peer));
        let load = Load {
            target: ([127, 0, 0, 1], 0).into(),
            connections: turn.connections,
            schedule: Schedule::per_second(args.qps),
            payload: args.payload as usize,
            warmup: args.warmup,
            window: args.seconds,
        };
        let program = program.map(|(peer, program)| (*peer, program.as_path()));
        let measured = topology::measure(setup, turn.topology, program, load).await;
        let done = u32::try_from(index + 1).unwrap_or(u32::MAX);
        let left = u32::try_from(turns.len()).unwrap_or(u32::MAX) - done;
        let pace = if index == 0 { each } else { began.elapsed() / done };
        stdio::tell(format_args!(
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
        runs.push(Run {
            round: turn.round,
            topology: turn.topology.name(),
            peer: turn.peer.map(Peer::name),
            connections: turn.connections,
            measurement,
            error,
        });
    }
}

/// All turns in the order in which they are taken.
fn plan(args: &Args, peers: &[Peer]) -> Vec<Turn> {
    let mut turns = Vec::new();
    for round in 1..=args.rounds {
        for &connections in &args.connections {
            for topology in Topology::ALL.into_iter().filter(|topology| args.topologies.contains(topology)) {
                if topology == Topology::Baseline {
                    turns.push(Turn { round, connections, topology, peer: None });
                    continue;
                }
                turns.extend(peers.iter().map(|peer| Turn {
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

/// Drops what was given before: a turn is known by its settings.
fn keep_first<T: PartialEq>(values: &mut Vec<T>) {
    let mut kept = Vec::with_capacity(values.len());
    for value in values.drain(..) {
        if !kept.contains(&value) {
            kept.push(value);
        }
    }
    *values = kept;
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

fn minutes(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds < 100 { format!("{seconds} s") } else { format!("{} min", seconds.div_ceil(60)) }
}

fn new_report(
    args: &Args,
    peers: &[(Peer, PathBuf)],
    no_realtime: Option<&String>,
    network: &io::Result<()>,
) -> Report {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpu = text("/proc/cpuinfo");
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    Report {
        format: 1,
        benchmark: "latency",
        version: env!("CARGO_PKG_VERSION"),
        started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        interrupted: false,
        machine: Machine {
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            cpu: cpu.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            load: text("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|load| load.parse().ok())
                .unwrap_or_default(),
            network: match network {
                Ok(()) => "own namespace".to_owned(),
                Err(error) => format!("the machine's loopback: {error}"),
            },
            congestion_control: namespace::congestion_control(),
            scheduling: match no_realtime {
                None => "SCHED_RR".to_owned(),
                Some(reason) => format!("SCHED_OTHER: {reason}"),
            },
        },
        settings: Settings {
            topologies: args.topologies.iter().map(|topology| topology.name()).collect(),
            connections: args.connections.clone(),
            qps: args.qps,
            seconds: args.seconds.as_secs_f64(),
            warmup: args.warmup.as_secs_f64(),
            payload: args.payload as usize,
            rounds: args.rounds,
            workers: args.workers,
        },
        peers: peers.iter().map(|(peer, program)| (peer.name(), version(*peer, program))).collect(),
        runs: Vec::new(),
        summary: Vec::new(),
        comparisons: Vec::new(),
    }
}

/// What the program says it is.
fn version(peer: Peer, program: &Path) -> Program {
    let output = std::process::Command::new(program).arg(peer.version_argument()).output();
    let text = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("unknown");
    Program { file: program.display().to_string(), version: line.to_owned() }
}

/// Writes and prints the result, and says whether it is complete.
fn finish(args: &Args, mut report: Report) -> anyhow::Result<bool> {
    report.summarize();
    let json = serde_json::to_string_pretty(&report)?;
    fs::write(&args.result, format!("{json}\n"))
        .with_context(|| format!("cannot write the result to {}", args.result.display()))?;
    match args.output {
        Output::Table => {
            stdio::print(report.tables())?;
            let file = args.result.display();
            stdio::print(format_args!("Medians (min–max) of {} rounds; all of it in {file}.", args.rounds))?;
        }
        Output::Json => stdio::print(json)?,
    }
    if report.interrupted {
        stdio::tell(format_args!("interrupted after {} turns", report.runs.len()));
    }
    let failed: Vec<&Run> = report.runs.iter().filter(|run| run.error.is_some()).collect();
    if let Some(run) = failed.first() {
        stdio::tell(format_args!(
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
        _ => Err("a number from 1 to 4096 is needed".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 0.1..=3_600.0) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("a number of seconds from 0.1 to 3600 is needed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(line: &str) -> Args {
        Line::try_parse_from(["bench"].into_iter().chain(line.split_whitespace())).unwrap().args
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
        assert_eq!(args.topologies, Topology::ALL);
        assert_eq!((args.qps, args.payload, args.rounds), (1_000, 1_024, 3));
    }

    #[test]
    fn what_is_given_twice_counts_once() {
        let mut connections = vec![4, 2, 4, 4, 8];
        keep_first(&mut connections);
        assert_eq!(connections, [4, 2, 8]);
    }

    #[test]
    fn nonsense_is_refused() {
        for line in ["--connections 0", "--qps 0", "--seconds nan", "--peers apache", "--rounds 0"] {
            assert!(Line::try_parse_from(["bench"].into_iter().chain(line.split(' '))).is_err(), "{line}");
        }
    }

    #[test]
    fn a_peer_asked_for_must_be_there() {
        let missing = args("--peers envoy --envoy /nonexistent/envoy");
        assert!(find(&missing).unwrap_err().to_string().contains("/nonexistent/envoy"));
        // Found or not, what is not asked for is no error.
        assert!(find(&args("")).unwrap().iter().any(|(peer, _)| *peer == Peer::Skysail));
    }
}
