//! Environment of the turns of a benchmark: settings, scheduling, network namespace, description of the machine, and
//! progress.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail, ensure};
use skysail_core::stdio;
use tempfile::TempDir;
use time::OffsetDateTime;

use crate::{
    certificates::Certificates,
    child,
    foreign_load::{self, ForeignLoad},
    namespace,
    peers::{Peer, PeerPrograms},
    report::{Machine, Program},
    topology::{HostPair, Setup},
};

/// Settings of the turns.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Turns {
    #[command(flatten)]
    pub(crate) environment: Environment,

    /// Duration of the measurement in each turn.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(crate) seconds: Duration,

    /// Duration of the load before the measurement.
    #[arg(long, value_name = "SECONDS", default_value = "1.5", value_parser = seconds)]
    pub(crate) warmup: Duration,

    /// Number of turns of every peer.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
}

/// Peers, scheduling and output of a benchmark with turns.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Environment {
    /// Proxies to measure. Default: those of the benchmark that are installed.
    #[arg(long, value_name = "PEER,…", value_delimiter = ',', value_enum)]
    pub(crate) peers: Vec<Peer>,

    /// Program of Envoy. Default: ~/.cache/skysail/envoy-1.40.0/envoy, then PATH.
    #[arg(long, value_name = "FILE", env = "SKYSAIL_ENVOY")]
    envoy: Option<PathBuf>,

    /// Another build of skysail or skysail-proxy to measure instead of this one. The latter is recognized by the
    /// prefix of its name.
    #[arg(long, value_name = "FILE")]
    skysail: Option<PathBuf>,

    /// Output format.
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,

    /// Do not use real-time scheduling, even if it is permitted.
    #[arg(long)]
    no_realtime: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Output {
    /// Tables in Markdown.
    Table,
    /// The content of the result file.
    Json,
}

impl Environment {
    /// Returns the peers that take part, with their programs.
    pub(crate) fn programs(&self, usual: &[Peer]) -> anyhow::Result<Vec<(Peer, PathBuf)>> {
        let places = PeerPrograms { skysail: self.skysail.clone(), envoy: self.envoy.clone() };
        let mut selected = self.peers.clone();
        deduplicate(&mut selected);
        Peer::choose(&selected, usual, &places)
    }

    /// Fails if an option selects another program than this one, whose functions a benchmark measures in process. Peers
    /// that are left out are named.
    pub(crate) fn check_in_process(&self, benchmark: &str) -> anyhow::Result<()> {
        if let Some(program) = &self.skysail {
            bail!(
                "{benchmark}: --skysail {}: the benchmark measures functions of the program that runs it; run it with that \
                 program instead",
                program.display()
            );
        }
        self.check_only(benchmark, &[Peer::Skysail])
    }

    /// Returns the program to measure of a benchmark that measures a control plane. Peers that are left out are named.
    pub(crate) fn own_program(&self, benchmark: &str) -> anyhow::Result<PathBuf> {
        self.own_program_among(benchmark, &[Peer::Skysail])
    }

    /// Returns the program to measure of a benchmark that measures a control plane beside an Envoy, and that of Envoy if it
    /// is installed and requested. Other peers are named as left out.
    pub(crate) fn programs_with_envoy(&self, benchmark: &str) -> anyhow::Result<Vec<(Peer, PathBuf)>> {
        const ABLE: [Peer; 2] = [Peer::Skysail, Peer::Envoy];
        let skysail = self.own_program_among(benchmark, &ABLE)?;
        let places = PeerPrograms { skysail: None, envoy: self.envoy.clone() };
        let envoy = match self.peers.contains(&Peer::Envoy) {
            true => Peer::choose(&[Peer::Envoy], &[], &places)?,
            false if self.peers.is_empty() => Peer::choose(&[], &[Peer::Envoy], &places)?,
            false => Vec::new(),
        };
        Ok([(Peer::Skysail, skysail)].into_iter().chain(envoy).collect())
    }

    /// Returns the program of Skysail, which has the control plane too. `able` are the peers that can take part.
    fn own_program_among(&self, benchmark: &str, able: &[Peer]) -> anyhow::Result<PathBuf> {
        self.check_only(benchmark, able)?;
        let program = Peer::Skysail.find(&PeerPrograms { skysail: self.skysail.clone(), envoy: None })?;
        ensure!(
            Peer::has_subcommands(&program),
            "{benchmark}: --skysail {}: the benchmark needs the program skysail, which has the control plane too",
            program.display()
        );
        Ok(program)
    }

    /// Fails if the peers lack Skysail. Peers that cannot take part are named as left out.
    fn check_only(&self, benchmark: &str, able: &[Peer]) -> anyhow::Result<()> {
        let names = |peers: &[Peer]| peers.iter().map(|peer| peer.name()).collect::<Vec<_>>();
        ensure!(
            self.peers.is_empty() || self.peers.contains(&Peer::Skysail),
            "{benchmark}: --peers {}: the benchmark has no peer but {}; add skysail, or leave --peers out",
            names(&self.peers).join(","),
            names(able).join(" and ")
        );
        let others: Vec<Peer> = self.peers.iter().copied().filter(|peer| !able.contains(peer)).collect();
        if !others.is_empty() {
            stdio::print_error(format_args!(
                "{benchmark}: without {}, which take no part in it",
                names(&others).join(", ")
            ));
        }
        Ok(())
    }

    /// Observes the load of other processes, and enters the environment of the turns.
    ///
    /// # Errors
    /// A file cannot be created.
    pub(crate) fn stage(&self) -> anyhow::Result<Stage> {
        let foreign_load = foreign_load::observe();
        let mut stage = Stage::enter(!self.no_realtime)?;
        stage.machine.busy = Some(foreign_load);
        Ok(stage)
    }
}

/// Environment of the turns.
pub(crate) struct Stage {
    pub(crate) setup: Setup,
    pub(crate) machine: Machine,
    /// Folder of all files of the run; removed on drop.
    _folder: TempDir,
}

impl Stage {
    /// Sets up real-time scheduling and a network namespace if permitted, a folder and certificates. The process must
    /// have only one thread, because the kernel requires that for namespaces.
    pub(crate) fn enter(realtime: bool) -> anyhow::Result<Self> {
        let scheduling = if realtime {
            child::set_realtime(child::OBSERVER).map_err(|error| error.to_string())
        } else {
            Err("not requested".to_owned())
        };
        let network = namespace::enter();
        for (what, error) in [
            ("real-time scheduling", scheduling.as_ref().err().cloned().filter(|_| realtime)),
            ("a network namespace of its own", network.as_ref().err().map(ToString::to_string)),
        ] {
            if let Some(error) = error {
                stdio::print_error(format_args!("continuing without {what}: {error}"));
            }
        }
        let folder =
            tempfile::Builder::new().prefix("skysail-bench-").tempdir().context("cannot make a folder")?;
        let setup = Setup {
            executable: std::env::current_exe().context("cannot find this program's file")?,
            folder: folder.path().to_owned(),
            certificates: Certificates::make(folder.path())?,
            realtime: scheduling.is_ok(),
            under: Vec::new(),
            hosts: HostPair::default(),
            perf: None,
        };
        let machine = machine(scheduling.err().as_deref(), &network, None);
        Ok(Self { setup, machine, _folder: folder })
    }
}

/// Observes the load of other processes, and enters a network namespace if permitted. Returns a description of the
/// machine for benchmarks without real-time scheduling. The process must have only one thread.
pub(crate) fn enter_network() -> Machine {
    let foreign_load = foreign_load::observe();
    let network = namespace::enter();
    if let Err(error) = &network {
        stdio::print_error(format_args!("continuing without a network namespace of its own: {error}"));
    }
    machine(Some("this benchmark does not use SCHED_RR"), &network, Some(foreign_load))
}

/// Observes the load of other processes. Returns a description of the machine for benchmarks that do not enter a network
/// namespace; `network` describes the network of the turns.
pub(crate) fn observe_machine(network: &str) -> Machine {
    let foreign_load = foreign_load::observe();
    let described = machine(Some("this benchmark does not use SCHED_RR"), &Ok(()), Some(foreign_load));
    Machine { network: network.to_owned(), ..described }
}

/// Returns a description of the machine. `no_realtime` is the reason why there is no real-time scheduling.
pub(crate) fn machine(
    no_realtime: Option<&str>,
    network: &io::Result<()>,
    busy: Option<ForeignLoad>,
) -> Machine {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpu = text("/proc/cpuinfo");
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    Machine {
        kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
        cpu: cpu.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        load: text("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default(),
        busy,
        network: match network {
            Ok(()) => "own namespace".to_owned(),
            Err(error) => format!("the loopback of the machine: {error}"),
        },
        congestion_control: namespace::congestion_control(),
        scheduling: no_realtime
            .map_or_else(|| "SCHED_RR".to_owned(), |reason| format!("SCHED_OTHER: {reason}")),
    }
}

/// Returns the Git commit of the source tree that contains this program, if there is one.
pub(crate) fn commit() -> Option<String> {
    commit_of(std::env::current_exe().ok()?.parent()?, None)
}

/// Returns the Git commit of the source tree with this folder, if there is one. It says whether files differ from the
/// commit, other than the given file of the folder.
pub(crate) fn commit_of(folder: &Path, except: Option<&str>) -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let mut status = vec!["status", "--porcelain", "--untracked-files=no", "--", ":/"];
    let except = except.map(|file| format!(":(exclude){file}"));
    status.extend(except.as_deref());
    let changed = git(&status)?;
    Some(if changed.is_empty() { commit } else { format!("{commit} with changes") })
}

/// Returns the seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Converts seconds since 1970 to a time; returns the start of 1970 if they are out of range.
pub(crate) fn utc(seconds: u64) -> OffsetDateTime {
    let moment =
        i64::try_from(seconds).ok().and_then(|moment| OffsetDateTime::from_unix_timestamp(moment).ok());
    moment.unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// Formats a time as RFC 3339 has it; `fraction` is that of the second, as in `.5`.
pub(crate) fn rfc3339(moment: OffsetDateTime, fraction: &str) -> String {
    let ((year, month, day), (hour, minute, second)) = (moment.to_calendar_date(), moment.to_hms());
    let month = u8::from(month);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z")
}

/// Returns the versions of the programs, by peer.
pub(crate) fn versions(peers: &[(Peer, PathBuf)]) -> BTreeMap<String, Program> {
    peers.iter().map(|(peer, program)| (peer.name().to_owned(), version(*peer, program))).collect()
}

/// Returns the name and the version of a program, without its folder: results are published.
pub(crate) fn version(peer: Peer, program: &Path) -> Program {
    let output = std::process::Command::new(program).arg(peer.version_argument()).output();
    let text = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("unknown");
    let path = program.display().to_string();
    let file = program.file_name().map_or(path.clone(), |name| name.to_string_lossy().into_owned());
    // Envoy's version begins with its path.
    Program { version: line.replace(&path, &file), file }
}

/// Removes repeated values; the first of equal ones stays. Settings identify a turn, so each may occur only once.
pub(crate) fn deduplicate<T: PartialEq>(values: &mut Vec<T>) {
    let mut kept = Vec::with_capacity(values.len());
    for value in values.drain(..) {
        if !kept.contains(&value) {
            kept.push(value);
        }
    }
    *values = kept;
}

/// Formats a duration for people.
pub(crate) fn minutes(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds < 100 { format!("{seconds} s") } else { format!("{} min", seconds.div_ceil(60)) }
}

/// Parses the arguments of a benchmark that are in a file.
///
/// # Errors
/// An argument is unknown or out of bounds. The error is the first line of the message on the command line.
pub(crate) fn parse_arguments<A: clap::Args>(arguments: &str) -> Result<A, String> {
    let command = clap::Command::new("bench").no_binary_name(true).disable_help_flag(true);
    let parsed = A::augment_args(command)
        .try_get_matches_from(arguments.split_whitespace())
        .and_then(|matches| A::from_arg_matches(&matches));
    parsed.map_err(|error| {
        let text = error.to_string();
        text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
    })
}

/// Parses a number of seconds on the command line.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 0.1..=3_600.0) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("must be a number of seconds from 0.1 to 3600".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_values_count_once() {
        let mut connections = vec![4, 2, 4, 4, 8];
        deduplicate(&mut connections);
        assert_eq!(connections, [4, 2, 8]);
    }

    #[test]
    fn durations_have_a_suitable_unit() {
        assert_eq!(minutes(Duration::from_secs(99)), "99 s");
        assert_eq!(minutes(Duration::from_secs(121)), "3 min");
        assert!(seconds("nan").is_err() && seconds("0").is_err());
    }
}
