//! A pod: a thread in the pod's namespaces, and the programs that it supervises there.
//!
//! In Linux, namespaces belong to threads, and a new process inherits the namespaces of the thread that starts it.
//! Therefore a pod needs no process of its own. The thread creates the network, mount and host name namespaces,
//! connects the pod to the bridge and sets the packet rules. Then it supervises the sidecar and the containers with a
//! runtime of its own.

mod mounted;

use std::{
    fs::{self, File},
    io,
    net::Ipv4Addr,
    os::fd::{AsFd as _, AsRawFd as _},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::sethostname,
};
use skysail_core::names::{HEALTH_PORT, TOKEN_AUDIENCE};
use skysail_identity::TokenSigner;
use skysail_intercept::{
    netlink::Socket,
    nftables,
    rules::{Family, Rules},
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use mounted::{Volumes, renew_tokens};

use crate::{
    drain,
    error::{Context as _, Error},
    links,
    process::{self, FinalState, ProcessEvent, ProcessExit, Program},
    readiness::{self, Check, MonitoredProgram, ProbeAction, ProgramStatus, ProgramStatuses, RestartProbes},
    rundir::Handles,
    volumes::{
        Contents,
        store::{Store, VolumeSetup},
    },
};

/// Configuration of a pod.
pub(crate) struct PodConfig {
    /// Namespace and name.
    pub(crate) key: (String, String),
    pub(crate) account: String,
    pub(crate) address: Ipv4Addr,
    pub(crate) prefix: u8,
    pub(crate) gateway: Ipv4Addr,
    /// Link index of the bridge.
    pub(crate) bridge: u32,
    pub(crate) link: String,
    /// Folder of the pod's own files.
    pub(crate) folder: PathBuf,
    pub(crate) domain: &'static str,
    pub(crate) signer: TokenSigner,
    pub(crate) rules: Rules,
    pub(crate) sidecar: Option<Program>,
    /// Time limit of the sidecar's drain.
    pub(crate) sidecar_drain: Duration,
    /// Volumes that the pod's programs mount, and their files.
    pub(crate) volumes: Vec<VolumeSetup>,
    pub(crate) contents: Contents,
    /// Programs of the init containers, which run one after the other before the containers start.
    pub(crate) init: Vec<Program>,
    pub(crate) containers: Vec<ContainerProgram>,
}

/// Container of a pod.
#[derive(Clone, Debug)]
pub(crate) struct ContainerProgram {
    pub(crate) program: Program,
    /// Readiness check; without one, a running container is ready.
    pub(crate) check: Option<Check>,
    /// Startup and liveness probes.
    pub(crate) restart_probes: RestartProbes,
    /// Ports for messages: `8080 (http)`.
    pub(crate) ports: Vec<String>,
}

/// Command from the mesh to a pod.
#[derive(Debug)]
pub(crate) enum PodCommand {
    /// Replace the packet rules. The second value is dropped when the rules are in effect or have failed.
    Rules(Rules, Arc<()>),
    /// Replace the files of the pod's volumes.
    Contents(Contents),
    /// Stop the containers, with this time between SIGTERM and SIGKILL, and then the sidecar.
    Stop(Duration),
}

/// Event that a pod reports to the mesh.
#[derive(Debug)]
pub(crate) enum PodEvent {
    /// The namespaces exist, with these file descriptors.
    Created(Handles),
    /// The pod is ready, or is not, with the reason.
    Ready(Result<(), String>),
    /// A program started with this process id, and this file descriptor of its mount namespace if it has a separate
    /// one.
    Started(String, u32, Option<i32>),
    /// A program ended.
    Ended(String, ProcessExit),
    /// All containers have ended for good, or an init container has failed. The error names the container that failed.
    Completed(Result<(), String>),
    /// The pod could not be created, its packet rules could not be replaced, or its thread panicked.
    Failed(Error),
    /// The pod has ended.
    Terminated,
}

/// Handle of a running pod.
#[derive(Debug)]
pub(crate) struct PodHandle {
    commands: mpsc::UnboundedSender<PodCommand>,
}

type EventSender = mpsc::UnboundedSender<((String, String), PodEvent)>;

/// Grace period of the sidecar beyond the time in which it drains its connections.
const SIDECAR_MARGIN: Duration = Duration::from_secs(3);
/// Interval at which the containers' start checks whether the sidecar has become ready.
const SIDECAR_INTERVAL: Duration = Duration::from_millis(50);
/// Probe interval of a ready sidecar, the one of Istio's injection.
const SIDECAR_PERIOD: Duration = Duration::from_secs(15);

impl PodHandle {
    /// Starts a pod. Its events are sent to `event_sender` under its key.
    pub(crate) fn start(config: PodConfig, event_sender: EventSender) -> io::Result<Self> {
        let (commands, received) = mpsc::unbounded_channel();
        std::thread::Builder::new().name(format!("pod {}", config.key.1)).spawn(move || {
            let key = config.key.clone();
            // After an unreported panic, the mesh would list the pod forever.
            let ended = catch_unwind(AssertUnwindSafe(|| run(&config, received, &event_sender)));
            let failed = match ended {
                Ok(ended) => ended.err(),
                Err(_) => Some(Error::Refused(format!(
                    "the thread of pod {}/{} panicked, which is a bug; the message is above",
                    key.0, key.1
                ))),
            };
            if let Some(error) = failed {
                let _ = event_sender.send((key.clone(), PodEvent::Failed(error)));
            }
            let _ = event_sender.send((key, PodEvent::Terminated));
        })?;
        Ok(Self { commands })
    }

    /// Sends a command. Does nothing if the pod has ended.
    pub(crate) fn command(&self, command: PodCommand) {
        let _ = self.commands.send(command);
    }
}

/// Creates the pod, supervises it and returns at its end. Runs on the pod's thread.
fn run(
    pod: &PodConfig,
    commands: mpsc::UnboundedReceiver<PodCommand>,
    event_sender: &EventSender,
) -> Result<(), Error> {
    let emit = |event| {
        // The receiver is gone when the mesh ends, and the pod ends with it.
        let _ = event_sender.send((pod.key.clone(), event));
    };
    // It must be opened before the thread leaves the bridge's namespace.
    let mut outside = Socket::route().context("opening a netlink socket")?;
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS)
        .context("making the pod's namespaces (is user.max_net_namespaces too low?)")?;
    sethostname(&pod.key.1).context("naming the pod")?;
    let namespace = |name: &str| File::open(format!("/proc/thread-self/ns/{name}"));
    let open = "opening the pod's namespaces";
    let (net, mnt) = (namespace("net").context(open)?, namespace("mnt").context(open)?);
    let uts = namespace("uts").context(open)?;

    links::veth_pair(&mut outside, pod.bridge, &pod.link, net.as_fd(), pod.address)
        .map_err(|source| missing("virtual links (veth)", "veth", source))?;
    drop(outside);
    let mut inside = Socket::route().context("opening a netlink socket")?;
    links::pod(&mut inside, pod.address, pod.prefix, pod.gateway).context("setting the pod's address")?;
    let mut netfilter = netfilter()?;
    set_rules(&mut netfilter, &pod.rules)?;
    write_files(pod)?;
    let store = Store::make(&pod.folder, &pod.volumes).context("making the pod's volumes")?;
    emit(PodEvent::Created(Handles { net: net.as_raw_fd(), mnt: mnt.as_raw_fd(), uts: uts.as_raw_fd() }));

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the pod's runtime")?;
    runtime.block_on(supervise(pod, netfilter, store, commands, &emit));
    Ok(())
}

fn missing(what: &'static str, module: &str, source: io::Error) -> Error {
    let remedy = format!(
        "The kernel needs it built in or as a module: try `sudo modprobe {module}`, or use a distribution's kernel"
    );
    Error::Missing { what, remedy, cause: source }
}

/// Opens a netlink socket for the packet rules of this thread's network namespace.
pub(crate) fn netfilter() -> Result<Socket, Error> {
    Socket::netfilter().map_err(|source| missing("packet rules (nf_tables)", "nf_tables", source))
}

pub(crate) fn set_rules(netfilter: &mut Socket, rules: &Rules) -> Result<(), Error> {
    nftables::replace(netfilter, &[(Family::V4, rules)]).map_err(|source| {
        let what = "packet rules (nf_tables with nat, redirect, numgen and ct)";
        missing(what, "-a nf_tables nft_chain_nat nft_redir nft_nat nft_numgen nft_ct", source)
    })
}

/// Writes the pod's token and its own versions of the files for name resolution.
fn write_files(pod: &PodConfig) -> Result<(), Error> {
    fs::create_dir_all(&pod.folder).context(format!("making {}", pod.folder.display()))?;
    write_token(pod).context("writing the service account token")?;
    let (namespace, name) = &pod.key;
    let domain = pod.domain;
    let resolv = format!(
        "nameserver {}\nsearch {namespace}.svc.{domain} svc.{domain} {domain}\noptions ndots:5\n",
        pod.gateway
    );
    let hosts = format!("127.0.0.1\tlocalhost\n::1\tlocalhost\n{}\t{name}\n", pod.address);
    // The host's file may send names to a resolver that does not know the mesh.
    let switch = fs::read_to_string("/etc/nsswitch.conf").unwrap_or_default();
    let others = switch.lines().filter(|line| !line.trim_start().starts_with("hosts:"));
    let switch = others.chain(["hosts: files dns"]).flat_map(|line| [line, "\n"]).collect();
    for (file, content) in [("resolv.conf", resolv), ("hosts", hosts), ("nsswitch.conf", switch)] {
        let own = pod.folder.join(file);
        fs::write(&own, content).context(format!("writing {}", own.display()))?;
        let path = Path::new("/etc").join(file);
        if file == "nsswitch.conf" && !path.exists() {
            continue;
        }
        let nothing: Option<&str> = None;
        mount(Some(&own), &path, nothing, MsFlags::MS_BIND, nothing).map_err(|errno| {
            let remedy = format!("Create the file {}; it may be empty", path.display());
            Error::Missing { what: "the pod's files for name resolution", remedy, cause: errno.into() }
        })?;
    }
    Ok(())
}

/// Replaces the token's file atomically.
fn write_token(pod: &PodConfig) -> io::Result<()> {
    let (namespace, name) = &pod.key;
    let token = pod.signer.token(namespace, &pod.account, name, TOKEN_AUDIENCE)?;
    let (file, new) = (pod.folder.join("token"), pod.folder.join(".token.new"));
    fs::write(&new, token)?;
    fs::rename(new, file)
}

async fn supervise(
    pod: &PodConfig,
    mut netfilter: Socket,
    store: Store,
    mut commands: mpsc::UnboundedReceiver<PodCommand>,
    emit: &impl Fn(PodEvent),
) {
    let (stop_programs, programs_stopped) = watch::channel(None);
    let (stop_sidecar, sidecar_stopped) = watch::channel(None);
    let monitored = monitored(pod);
    let statuses = ProgramStatuses::new(monitored.len());
    let mut stopped_early = programs_stopped.clone();
    let volumes = Volumes::new(pod, store);
    let workload = async {
        // As with Istio's native sidecars, the first request of a container already finds the sidecar ready.
        let starts = tokio::select! {
            () = async { tokio::join!(sidecar_ready(&monitored, &statuses), volumes.mounted(pod, &statuses)); } => true,
            _ = stopped_early.wait_for(Option::is_some) => false,
        };
        let finish =
            if starts { run_containers(pod, &programs_stopped, &statuses, emit).await } else { None };
        // The sidecar stops only after the containers, so that they can answer their last requests.
        stop_sidecar.send_replace(Some(pod.sidecar_drain + SIDECAR_MARGIN));
        if let Some(result) = finish {
            emit(PodEvent::Completed(result));
            let _ = programs_stopped.clone().wait_for(Option::is_some).await;
        }
    };
    let sidecar = async {
        if let Some(sidecar) = &pod.sidecar {
            let report = |outcome| {
                statuses.set(0, status_after(sidecar, &[], &outcome));
                send_event(sidecar, emit, outcome);
            };
            process::supervise(sidecar, sidecar_stopped, None, report).await;
        }
    };
    let handle_commands = async {
        while let Some(command) = commands.recv().await {
            match command {
                PodCommand::Rules(rules, _until_done) => {
                    if let Err(error) = set_rules(&mut netfilter, &rules) {
                        emit(PodEvent::Failed(error));
                    }
                }
                PodCommand::Contents(contents) => volumes.replace(pod, contents),
                PodCommand::Stop(grace) => {
                    if pod.sidecar.is_some() {
                        drain::inbound().await;
                    }
                    stop_programs.send_replace(Some(grace));
                }
            }
        }
    };
    let readiness =
        readiness::watch(pod.address, &monitored, &statuses, |state| emit(PodEvent::Ready(state)));
    tokio::select! {
        _ = async { tokio::join!(workload, sidecar) } => {}
        () = readiness => {}
        () = renew_tokens(pod, &volumes) => {}
        () = async { handle_commands.await; std::future::pending().await } => {}
    }
}

/// Returns the programs on which the pod's readiness depends: the sidecar first, then every container.
fn monitored(pod: &PodConfig) -> Vec<MonitoredProgram> {
    let sidecar = pod.sidecar.iter();
    let sidecar = sidecar.map(|_| (String::from("sidecar"), Some(sidecar_check()), RestartProbes::default()));
    let containers = pod.containers.iter().map(|one| {
        (format!("container {}", one.program.name), one.check.clone(), one.restart_probes.clone())
    });
    let all = sidecar.chain(containers).enumerate();
    all.map(|(program, (name, check, restart_probes))| MonitoredProgram {
        program,
        name,
        check,
        restart_probes,
    })
    .collect()
}

/// Runs the init containers and then the containers. Returns `None` if they were stopped, and otherwise whether all
/// succeeded.
async fn run_containers(
    pod: &PodConfig,
    stopped: &watch::Receiver<Option<Duration>>,
    statuses: &ProgramStatuses,
    emit: &impl Fn(PodEvent),
) -> Option<Result<(), String>> {
    let first = usize::from(pod.sidecar.is_some());
    for program in &pod.init {
        set_waiting(pod, statuses, &format!("waits for init container {}", program.name));
        let report = |outcome| {
            if let ProgramStatus::Crashed(reason) = status_after(program, &[], &outcome) {
                set_waiting(pod, statuses, &format!("waits for init container {}: {reason}", program.name));
            }
            send_event(program, emit, outcome);
        };
        match process::supervise(program, stopped.clone(), None, report).await {
            FinalState::Stopped => return None,
            FinalState::Succeeded => {}
            FinalState::Failed => {
                let reason = format!("init container {} has failed: {}", program.name, program.last_line());
                return Some(Err(reason));
            }
        }
    }
    if pod.containers.is_empty() {
        // A gateway: its proxy is the only program.
        let _ = stopped.clone().wait_for(Option::is_some).await;
        return None;
    }
    let run = async |(index, one): (usize, &ContainerProgram)| {
        let report = |outcome| {
            statuses.set(first + index, status_after(&one.program, &one.ports, &outcome));
            send_event(&one.program, emit, outcome);
        };
        process::supervise(&one.program, stopped.clone(), statuses.kills(first + index), report).await
    };
    let finishes = join_all(pod.containers.iter().enumerate().map(run)).await;
    let mut failed =
        finishes.iter().zip(&pod.containers).filter(|(finish, _)| **finish == FinalState::Failed);
    if finishes.contains(&FinalState::Stopped) {
        return None;
    }
    Some(failed.next().map_or(Ok(()), |(_, one)| {
        Err(format!("container {} has failed: {}", one.program.name, one.program.last_line()))
    }))
}

/// Returns the status of a program after an event.
fn status_after(program: &Program, ports: &[String], outcome: &ProcessEvent) -> ProgramStatus {
    match outcome {
        ProcessEvent::Started(..) => ProgramStatus::Running(Instant::now(), None),
        ProcessEvent::Ended(ended) if ended.code == Some(0) && ended.again.is_none() => ProgramStatus::Done,
        ProcessEvent::Ended(ended) => ProgramStatus::Crashed(crash(ended, &program.last_line(), ports)),
    }
}

fn send_event(program: &Program, emit: &impl Fn(PodEvent), outcome: ProcessEvent) {
    emit(match outcome {
        ProcessEvent::Started(id, mounts) => PodEvent::Started(program.name.clone(), id, mounts),
        ProcessEvent::Ended(ended) => PodEvent::Ended(program.name.clone(), ended),
    });
}

/// Returns the reason why a container that has ended is not ready, in Kubernetes' terms.
fn crash(ended: &ProcessExit, last_line: &str, ports: &[String]) -> String {
    let word = match (ended.code, ended.crashes) {
        (Some(0), ..=1) => "Completed",
        (_, ..=1) => "Error",
        _ => "CrashLoopBackOff",
    };
    let taken = ["ddress already in use", "EADDRINUSE", "address in use"];
    let ports = match ports {
        [_, ..] if taken.iter().any(|text| last_line.contains(text)) => {
            format!(" (its ports: {}; the containers of a pod share one address)", ports.join(", "))
        }
        _ => String::new(),
    };
    format!("{word}: {}: {last_line}{ports}", ended.how)
}

/// Sets the reason for which all containers wait.
fn set_waiting(pod: &PodConfig, statuses: &ProgramStatuses, reason: &str) {
    let first = usize::from(pod.sidecar.is_some());
    (0..pod.containers.len())
        .for_each(|index| statuses.set(first + index, ProgramStatus::Waiting(reason.to_owned())));
}

fn sidecar_check() -> Check {
    Check {
        probe: ProbeAction::Get(HEALTH_PORT, "/healthz/ready".to_owned()),
        period: Some(SIDECAR_PERIOD),
        limit: Duration::from_secs(3),
        failures: 4,
    }
}

/// Waits until the sidecar is ready, if there is one.
async fn sidecar_ready(monitored: &[MonitoredProgram], statuses: &ProgramStatuses) {
    let Some(sidecar) = monitored.iter().find(|one| one.name == "sidecar") else { return };
    while !statuses.is_ready(sidecar.program) {
        tokio::time::sleep(SIDECAR_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_named_as_in_kubernetes_and_with_the_port() {
        let ended = |code, crashes| ProcessExit {
            how: format!("exit status: {code}"),
            code: Some(code),
            crashes,
            again: Some(Duration::ZERO),
        };
        let ports = ["8080 (http)".to_owned()];
        assert_eq!(crash(&ended(1, 1), "no such file", &ports), "Error: exit status: 1: no such file");
        assert_eq!(crash(&ended(0, 2), "bye", &ports), "CrashLoopBackOff: exit status: 0: bye");
        assert_eq!(
            crash(&ended(1, 3), "Error: Address already in use (os error 98)", &ports),
            "CrashLoopBackOff: exit status: 1: Error: Address already in use (os error 98) (its ports: 8080 (http); \
             the containers of a pod share one address)"
        );
    }
}
