//! `skysail bench instructions`: counts the instructions that a sidecar executes per request, and those of the work of a
//! control plane.
//!
//! Time depends on the machine and its load; the number of instructions hardly does. It can be kept with the source,
//! and shows a regression before a time measurement could. The sidecar runs under `valgrind --tool=callgrind` with
//! one worker. It serves a number of requests in sequence, and after a restart three times as many. The difference is
//! the cost of the requests, because start and end are in both. Only the worker is counted, so that timers of other
//! threads are left out. The work of a control plane is counted in the same way in small programs, which are examples of
//! the crates with its functions: a control plane would count its network and its threads too.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, bail, ensure};
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use serde::{Deserialize, Serialize};
use skysail_core::{shutdown, stdio};

use crate::{
    access_log::AccessLog,
    callgrind::{self, ThreadWork},
    load::{self, LoadProtocol, Traffic},
    node::Extra,
    peers::{self, Peer, PeerPrograms},
    report::{Machine, Program},
    results,
    stage::{self, Output, Stage, deduplicate},
    token::Token,
    topology::{RunningTopology, Setup, Shape, Topology},
};

/// Settings of `skysail bench instructions`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct InstructionsArgs {
    /// Cases to count. Default: all for which there is a program.
    #[arg(long, value_name = "CASE,…", value_delimiter = ',', value_enum)]
    only: Vec<Case>,

    /// Requests of the shorter of the two runs; the longer one has three times as many. Handshakes: a tenth. Hellos and
    /// certificates: a twentieth. Parsed and compiled configurations: a thousandth.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(100..=100_000))]
    requests: u32,

    /// Program to count: skysail, or skysail-proxy, recognized by the prefix of its name. Default: this program.
    #[arg(long, value_name = "FILE")]
    skysail: Option<PathBuf>,

    /// Folder of the programs that the cases parse, configuration and certificate count: target/release/examples. Default:
    /// these cases are left out.
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,

    /// Fail if a case takes over 3% more than this file says; parse and configuration: 2%.
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,

    /// Write the counts as the new baseline. Cases that were not counted keep their values.
    #[arg(long, value_name = "FILE", conflicts_with = "baseline")]
    write_baseline: Option<PathBuf>,

    /// Output format.
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Work of the sidecar, and of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Case {
    /// HTTP/1.1, plain text on both sides.
    Http1,
    /// Like `http1`, with a route that changes the path and adds a header.
    Rewrite,
    /// The server's sidecar: mutual TLS from the client, plain text to the server.
    MtlsIn,
    /// The client's sidecar: plain text from the client, mutual TLS to the server's sidecar.
    MtlsOut,
    /// HTTP/2, plain text on both sides.
    Http2,
    /// A unary call of gRPC: plain text from the client, mutual TLS to the server's sidecar.
    Grpc,
    /// Like `http1`, with a JSON Web Token that the worker has seen before.
    Jwt,
    /// Like `http1`, with 1,000 access policies, of which the last one allows the request.
    Rbac,
    /// Like `http1`, with 10,000 virtual hosts.
    Hosts,
    /// A connection with a full handshake of mutual TLS and one request.
    Handshake,
    /// A connection whose client hello arrives in 64 records, each in a read of its own, and ends before the last
    /// one.
    Hello,
    /// Text of 1,000 services to objects.
    Parse,
    /// All resources of a sidecar in a mesh of 1,000 services.
    Configuration,
    /// A certificate, with the checks of token and signing request.
    Certificate,
}

/// Program whose work is counted.
enum Subject {
    /// A sidecar in this topology, under this traffic.
    Sidecar(Topology, Traffic),
    /// A program with this name, and its arguments before the number of repetitions.
    Program(&'static str, &'static [&'static str]),
}

impl Case {
    const ALL: [Self; 14] = [
        Self::Http1,
        Self::Rewrite,
        Self::MtlsIn,
        Self::MtlsOut,
        Self::Http2,
        Self::Grpc,
        Self::Jwt,
        Self::Rbac,
        Self::Hosts,
        Self::Handshake,
        Self::Hello,
        Self::Parse,
        Self::Configuration,
        Self::Certificate,
    ];

    /// Returns the name on the command line and in files.
    fn name(self) -> &'static str {
        match self {
            Self::Http1 => "http1",
            Self::Rewrite => "rewrite",
            Self::MtlsIn => "mtls-in",
            Self::MtlsOut => "mtls-out",
            Self::Http2 => "http2",
            Self::Grpc => "grpc",
            Self::Jwt => "jwt",
            Self::Rbac => "rbac",
            Self::Hosts => "hosts",
            Self::Handshake => "handshake",
            Self::Hello => "hello",
            Self::Parse => "parse",
            Self::Configuration => "configuration",
            Self::Certificate => "certificate",
        }
    }

    fn subject(self) -> Subject {
        let handshake = Traffic::NewConnections { resume: false };
        match self {
            Self::Http1 | Self::Rewrite | Self::Jwt | Self::Rbac | Self::Hosts => {
                Subject::Sidecar(Topology::ServerSidecar, Traffic::Http1)
            }
            Self::Http2 => Subject::Sidecar(Topology::ServerSidecar, Traffic::Http2 { streams: 1 }),
            Self::MtlsIn => Subject::Sidecar(Topology::ServerMtls, Traffic::Http1),
            Self::Handshake | Self::Hello => Subject::Sidecar(Topology::ServerMtls, handshake),
            Self::MtlsOut => Subject::Sidecar(Topology::BothSidecars, Traffic::Http1),
            Self::Grpc => Subject::Sidecar(Topology::BothSidecars, Traffic::Scheduled(LoadProtocol::Grpc)),
            Self::Parse => Subject::Program("configuration", &["parse"]),
            Self::Configuration => Subject::Program("configuration", &["compile"]),
            Self::Certificate => Subject::Program("certificate", &[]),
        }
    }

    /// Returns the tolerated deviation from the baseline. A lower count should become the new baseline.
    fn tolerance(self) -> f64 {
        match self {
            // No other threads and no network: repeated counts differ by 0.01 %.
            Self::Parse | Self::Configuration => 0.02,
            _ => 0.03,
        }
    }

    /// Returns the number by which the number of repetitions is divided, so that no case takes much longer than others.
    fn divisor(self) -> u32 {
        match self {
            Self::Handshake => 10,
            Self::Hello | Self::Certificate => 20,
            Self::Parse | Self::Configuration => 1_000,
            _ => 1,
        }
    }

    /// Returns the configuration of the sidecar beyond the usual one.
    fn extra(self) -> anyhow::Result<Extra> {
        Ok(match self {
            Self::Rewrite => Extra::Rewrite,
            Self::Jwt => Extra::Token(Token::issue()?),
            Self::Rbac => Extra::Policies(1_000),
            Self::Hosts => Extra::Hosts(10_000),
            _ => Extra::None,
        })
    }
}

/// The printed result; `docs/benchmarks.md` describes its format.
#[derive(Debug, Serialize)]
struct Counts {
    format: u32,
    benchmark: &'static str,
    version: &'static str,
    /// Seconds since 1970.
    started: u64,
    interrupted: bool,
    machine: Machine,
    program: Program,
    requests: u32,
    cases: BTreeMap<Case, Count>,
}

/// Result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Count {
    #[serde(flatten)]
    each: RequestCost,
    /// Instructions of the allocator, which are not compared.
    allocator_instructions: u64,
    /// Values of the baseline, if there is one.
    baseline: Option<RequestCost>,
}

/// Cost of a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct RequestCost {
    /// Instructions outside of the allocator.
    instructions: u64,
    /// Number of allocations.
    allocations: f64,
}

/// Counts that are kept with the source.
type Baseline = BTreeMap<Case, RequestCost>;

/// Tolerated deviation of allocations, if it is more than [`Case::tolerance`]: one more on every other request.
const TOLERATED_ALLOCATIONS: f64 = 0.5;
/// Bytes of the body of a request, and of a response.
const PAYLOAD: usize = 1_024;

/// Counts, compares and prints. Returns true if everything was counted and no case takes more than it may.
pub(crate) fn run(mut args: InstructionsArgs) -> anyhow::Result<bool> {
    deduplicate(&mut args.only);
    let cases = args.cases()?;
    let valgrind = peers::in_path("valgrind").context(
        "instructions are counted by valgrind, which is not installed: install the package valgrind",
    )?;
    let places = PeerPrograms { skysail: args.skysail.clone(), ..PeerPrograms::default() };
    let program = Peer::Skysail.find(&places)?;
    let counts_sidecar = cases.iter().any(|case| matches!(case.subject(), Subject::Sidecar(..)));
    if cfg!(unoptimised) && args.skysail.is_none() && counts_sidecar {
        stdio::print_error(
            "this program was built without optimisation (use --release): it executes many times the instructions of a release build",
        );
    }
    let baseline = args.baseline.as_deref().map(read).transpose()?;
    if let Some(file) = &args.write_baseline {
        results::check_writable("--write-baseline", file)?;
    }
    let mut stage = Stage::enter(false)?;
    stage.setup.under = command(&valgrind, &stage.setup.folder);
    let mut counts = Counts {
        format: 1,
        benchmark: "instructions",
        version: env!("CARGO_PKG_VERSION"),
        started: stage::now(),
        interrupted: false,
        machine: stage.machine.clone(),
        program: stage::version(Peer::Skysail, &program),
        requests: args.requests,
        cases: BTreeMap::new(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    counts.interrupted = runtime.block_on(async {
        tokio::select! {
            signal = shutdown::terminate() => anyhow::Ok(signal.map(|_| true)?),
            done = count_all(&cases, &args, &program, &stage.setup, &mut counts.cases) => done.map(|()| false),
        }
    })?;
    // A client thread may still wait for a response; the process does not wait for it.
    runtime.shutdown_background();
    drop(stage);
    if let Some(baseline) = &baseline {
        for (case, count) in &mut counts.cases {
            count.baseline = baseline.get(case).copied();
        }
    }
    show(args.output, &counts)?;
    if counts.interrupted {
        stdio::print_error("interrupted: the last cases are missing");
        return Ok(false);
    }
    if let Some(file) = &args.write_baseline {
        write(file, &counts)?;
    }
    Ok(args.baseline.is_none_or(|file| compare(&counts, &file)))
}

impl InstructionsArgs {
    /// Returns the cases to count. Without `--only` and `--programs`, those of the sidecar.
    ///
    /// # Errors
    /// The program of a case is missing.
    fn cases(&self) -> anyhow::Result<Vec<Case>> {
        let is_default = self.only.is_empty();
        let cases = if is_default { &Case::ALL[..] } else { &self.only };
        let mut counted = Vec::new();
        for case in cases {
            match (case.subject(), &self.programs) {
                (Subject::Program(..), None) if is_default => continue,
                (Subject::Program(name, _), folder) => {
                    let is_built = folder.as_ref().is_some_and(|folder| folder.join(name).is_file());
                    ensure!(
                        is_built,
                        "{}: --programs must name the folder of the program {name}; {BUILD}",
                        case.name()
                    );
                }
                (Subject::Sidecar(..), _) => {}
            }
            counted.push(*case);
        }
        Ok(counted)
    }
}

/// Returns the command under which programs run. Each thread gets a file of its own.
fn command(valgrind: &Path, folder: &Path) -> Vec<OsString> {
    let mut file = OsString::from("--callgrind-out-file=");
    file.push(folder.join(COUNTS));
    let mut command = vec![valgrind.as_os_str().to_owned()];
    command.extend(["--tool=callgrind", "--separate-threads=yes", "--vgdb=no"].map(OsString::from));
    command.push(file);
    command
}

/// What to do if a program is missing.
const BUILD: &str = "build it with cargo build --release --package skysail-model --example configuration, and the same with \
    --package skysail-identity --example certificate";
/// Prefix of the files that callgrind writes.
const COUNTS: &str = "instructions";
/// Number of the first thread of a process in these files.
const FIRST: u32 = 1;

async fn count_all(
    cases: &[Case],
    args: &InstructionsArgs,
    program: &Path,
    setup: &Setup,
    counts: &mut BTreeMap<Case, Count>,
) -> anyhow::Result<()> {
    for case in cases {
        let requests = (args.requests / case.divisor()).max(1);
        let [few, many] = [requests, 3 * requests].map(async |requests| match case.subject() {
            Subject::Sidecar(topology, traffic) => {
                run_sidecar(*case, (topology, traffic), requests, program, setup).await
            }
            Subject::Program(name, arguments) => {
                let file = args.programs.iter().map(|folder| folder.join(name)).next().unwrap_or_default();
                run_program(&file, arguments, requests, setup).await
            }
        });
        let (few, many) = (few.await, many.await);
        let (few, many) = few.and_then(|few| Ok((few, many?))).with_context(|| case.name())?;
        let count = Count::new(many - few, 2 * requests);
        stdio::print_error(format_args!("{}: {}", case.name(), count.each.instructions));
        counts.insert(*case, count);
    }
    Ok(())
}

/// Returns the work of a program that repeats something this number of times, on one thread.
async fn run_program(
    program: &Path,
    arguments: &[&str],
    times: u32,
    setup: &Setup,
) -> anyhow::Result<ThreadWork> {
    let [valgrind, options @ ..] = &setup.under[..] else { bail!("valgrind is missing") };
    let output = tokio::process::Command::new(valgrind)
        .args(options)
        .arg(program)
        .args(arguments)
        .arg(times.to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {}", program.display(), output.status, errors.trim());
    busiest(&setup.folder, |thread| thread == FIRST)
}

/// Returns the work of the worker during a run with this number of requests. The first thread reads the configuration
/// and serves no requests. Of the others, only the worker does anything for a request.
async fn run_sidecar(
    case: Case,
    (topology, traffic): (Topology, Traffic),
    requests: u32,
    program: &Path,
    setup: &Setup,
) -> anyhow::Result<ThreadWork> {
    let shape = Shape {
        topology,
        protocol: traffic.protocol(),
        workers: 1,
        pinned: false,
        client_alone: false,
        resumption: false,
        clusters: 1,
        extra: case.extra()?,
        access_log: AccessLog::None,
        connections: 1,
    };
    let token = match &shape.extra {
        Extra::Token(token) => Some(token.text.clone()),
        _ => None,
    };
    let standing = RunningTopology::start(setup, &shape, Some((Peer::Skysail, program))).await?;
    let (target, tls) = (standing.entry, standing.tls(setup, false)?);
    let sending = tokio::task::spawn_blocking(move || match (case, &tls) {
        (Case::Hello, Some(tls)) => load::hellos(target, tls, requests),
        (_, tls) => load::send(target, traffic, tls.as_ref(), (PAYLOAD, token.as_deref()), requests),
    });
    let sent = sending.await.context("the client failed")?;
    standing.end(sent).await?;
    busiest(&setup.folder, |thread| thread != FIRST)
}

/// Returns the work of the busiest of these threads, and removes all files.
fn busiest(folder: &Path, is_counted: impl Fn(u32) -> bool) -> anyhow::Result<ThreadWork> {
    let mut max = None;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(COUNTS.as_bytes()) {
            continue;
        }
        let text = fs::read(entry.path())?;
        fs::remove_file(entry.path())?;
        let read = callgrind::read(&String::from_utf8_lossy(&text));
        max = max.max(read.filter(|(thread, _)| is_counted(*thread)).map(|(_, work)| work));
    }
    max.context("valgrind wrote no counts: the program was killed")
}

fn read(file: &Path) -> anyhow::Result<Baseline> {
    let text = fs::read(file).with_context(|| format!("cannot read the baseline {}", file.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} is no baseline of bench instructions", file.display()))
}

/// Writes the counts, and keeps those of other cases.
fn write(file: &Path, counts: &Counts) -> anyhow::Result<()> {
    let mut baseline = if file.exists() { read(file)? } else { Baseline::default() };
    baseline.extend(counts.cases.iter().map(|(case, count)| (*case, count.each)));
    let json = serde_json::to_string_pretty(&baseline)?;
    fs::write(file, format!("{json}\n"))
        .with_context(|| format!("cannot write the baseline to {}", file.display()))
}

/// Prints the cases that take more or less than the baseline. Returns false if a case takes more.
fn compare(counts: &Counts, file: &Path) -> bool {
    let mut good = true;
    for (case, count) in &counts.cases {
        let (name, file) = (case.name(), file.display());
        let Some(baseline) = count.baseline else {
            stdio::print_error(format_args!("{name}: not in {file}; add it with --write-baseline {file}"));
            good = false;
            continue;
        };
        let change = count.change().unwrap_or_default();
        let more = count.each.allocations - baseline.allocations;
        let tolerance = case.tolerance();
        let much = TOLERATED_ALLOCATIONS.max(tolerance * baseline.allocations);
        let remedy = format_args!(
            "reduce them, or justify them in the commit and update the file: bench instructions --only {name} --write-baseline {file}"
        );
        if change > tolerance {
            let change = 100.0 * change;
            stdio::print_error(format_args!(
                "{name}: {change:.1}% more instructions than in {file}; {remedy}"
            ));
        }
        if more > much {
            stdio::print_error(format_args!("{name}: {more:.1} more allocations than in {file}; {remedy}"));
        }
        if change > tolerance || more > much {
            good = false;
        } else if change < -tolerance || more < -much {
            stdio::print_error(format_args!(
                "{name}: {:.1}% fewer instructions and {:.1} fewer allocations than in {file}; update it with --write-baseline {file}",
                -100.0 * change,
                -more
            ));
        }
    }
    good
}

impl Count {
    /// Divides the work by the number of requests.
    fn new(work: ThreadWork, requests: u32) -> Self {
        let share = |whole: u64| whole as f64 / f64::from(requests);
        Self {
            each: RequestCost {
                instructions: share(work.instructions).round() as u64,
                // Rounded to hundredths, because allocations differ slightly between runs.
                allocations: (share(work.allocations) * 100.0).round() / 100.0,
            },
            allocator_instructions: share(work.allocator).round() as u64,
            baseline: None,
        }
    }

    /// Returns the relative change from the baseline.
    fn change(&self) -> Option<f64> {
        let baseline = self.baseline?.instructions;
        Some(self.each.instructions as f64 / baseline.max(1) as f64 - 1.0)
    }
}

fn show(output: Output, counts: &Counts) -> anyhow::Result<()> {
    if output == Output::Json {
        return Ok(stdio::print(serde_json::to_string_pretty(counts)?)?);
    }
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header([
        "case",
        "instructions",
        "baseline",
        "change %",
        "allocations",
        "baseline",
        "allocator's instructions",
    ]);
    for (case, count) in &counts.cases {
        let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        table.add_row([
            case.name().to_owned(),
            count.each.instructions.to_string(),
            or_none(count.baseline.map(|baseline| baseline.instructions.to_string())),
            or_none(count.change().map(|change| format!("{:+.2}", 100.0 * change))),
            count.each.allocations.to_string(),
            or_none(count.baseline.map(|baseline| baseline.allocations.to_string())),
            count.allocator_instructions.to_string(),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    Ok(stdio::print(table)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(cases: &[(Case, RequestCost, Option<RequestCost>)]) -> Counts {
        Counts {
            format: 1,
            benchmark: "instructions",
            version: "0",
            started: 0,
            interrupted: false,
            machine: Machine {
                kernel: String::new(),
                cpu: String::new(),
                cpus: 1,
                load: 0.0,
                busy: None,
                network: String::new(),
                congestion_control: String::new(),
                scheduling: String::new(),
            },
            program: Program { file: String::new(), version: String::new() },
            requests: 1_000,
            cases: cases
                .iter()
                .map(|(case, each, baseline)| {
                    (*case, Count { each: *each, allocator_instructions: 0, baseline: *baseline })
                })
                .collect(),
        }
    }

    fn each(instructions: u64, allocations: f64) -> RequestCost {
        RequestCost { instructions, allocations }
    }

    #[test]
    fn only_an_increase_over_the_baseline_fails() {
        let file = Path::new("baseline.json");
        let good = |now, baseline| compare(&counts(&[(Case::Http1, now, baseline)]), file);
        let baseline = Some(each(1_000, 4.0));
        for fine in [each(1_029, 4.0), each(1_000, 4.5), each(500, 0.0)] {
            assert!(good(fine, baseline), "{fine:?}");
        }
        assert!(!good(each(1_031, 4.0), baseline) && !good(each(1_000, 5.0), baseline));
        assert!(good(each(1_000, 102.0), Some(each(1_000, 100.0))));
        assert!(!good(each(1_000, 4.0), None), "a case that the file does not contain is a failure");
    }

    #[test]
    fn a_baseline_keeps_uncounted_cases() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("baseline.json");
        let (first, second, third) = (each(7, 1.0), each(8, 2.0), each(9, 3.0));
        write(&file, &counts(&[(Case::Http1, first, None), (Case::MtlsIn, second, None)])).unwrap();
        write(&file, &counts(&[(Case::MtlsIn, third, None)])).unwrap();
        assert_eq!(read(&file).unwrap(), Baseline::from([(Case::Http1, first), (Case::MtlsIn, third)]));
        fs::write(&file, "[]").unwrap();
        assert!(read(&file).unwrap_err().to_string().contains("is no baseline"));
    }

    #[test]
    fn the_busiest_of_the_counted_threads_is_found() {
        let folder = tempfile::tempdir().unwrap();
        for (thread, total) in [(1, 900), (2, 5), (3, 70)] {
            let text = format!("# callgrind format\nthread: {thread}\n\ntotals: {total}\n");
            fs::write(folder.path().join(format!("{COUNTS}-0{thread}")), text).unwrap();
        }
        fs::write(folder.path().join(COUNTS), "").unwrap();
        fs::write(folder.path().join("other"), "thread: 4\ntotals: 1000\n").unwrap();
        assert_eq!(busiest(folder.path(), |thread| thread != FIRST).unwrap().instructions, 70);
        assert!(busiest(folder.path(), |_| true).is_err(), "the files are gone");
    }

    #[test]
    fn work_is_divided_by_requests() {
        let count = Count::new(ThreadWork { instructions: 4_001, allocator: 399, allocations: 801 }, 200);
        assert_eq!((count.each, count.allocator_instructions), (each(20, 4.01), 2));
    }
}
