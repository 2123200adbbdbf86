//! One pod: a thread that lives in the pod's namespaces, and the programs it keeps running there.
//!
//! Namespaces belong to threads in Linux, and what a thread starts is born in its namespaces. So a pod needs no
//! process to hold it: the thread makes its network, mount and host name namespaces, cables itself to the bridge,
//! sets the packet rules and then supervises sidecar and workload with a runtime of its own.

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
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use mounted::{Volumes, renew_tokens};

use crate::{
    error::{Context as _, Error},
    links,
    netlink::Socket,
    nftables,
    process::{self, Ended, Finish, Outcome, Program},
    readiness::{self, Check, Life, Lives, Probe, RestartProbes, Watched},
    rules::Rules,
    rundir::Handles,
    token::Issuer,
    volumes::{
        Contents,
        store::{Made, Store},
    },
};

/// What a pod is made from.
pub(crate) struct Blueprint {
    /// Namespace and name.
    pub(crate) key: (String, String),
    pub(crate) account: String,
    pub(crate) address: Ipv4Addr,
    pub(crate) prefix: u8,
    pub(crate) gateway: Ipv4Addr,
    /// The bridge's link number and what the pod's end there is called.
    pub(crate) bridge: u32,
    pub(crate) link: String,
    /// Holds the pod's own files.
    pub(crate) folder: PathBuf,
    pub(crate) domain: &'static str,
    pub(crate) issuer: Issuer,
    pub(crate) rules: Rules,
    pub(crate) sidecar: Option<Program>,
    /// The volumes that its programs mount, and the files in them.
    pub(crate) volumes: Vec<Made>,
    pub(crate) contents: Contents,
    /// Programs that run to their end, one after the other, before the containers start.
    pub(crate) init: Vec<Program>,
    pub(crate) containers: Vec<Containerized>,
}

/// A container of a pod.
#[derive(Clone, Debug)]
pub(crate) struct Containerized {
    pub(crate) program: Program,
    /// How to see that it is ready; without one it is when it runs.
    pub(crate) check: Option<Check>,
    /// How to see that it is to be started again.
    pub(crate) restart_probes: RestartProbes,
    /// Its ports, for messages: `8080 (http)`.
    pub(crate) ports: Vec<String>,
}

/// What the mesh tells a pod.
#[derive(Debug)]
pub(crate) enum Order {
    /// Replace the packet rules. What comes with them is dropped when that is done.
    Rules(Rules, Arc<()>),
    /// Replace the files of its volumes.
    Contents(Contents),
    /// End within this time: first the workload, then the sidecar.
    Stop(Duration),
}

/// What a pod tells the mesh.
#[derive(Debug)]
pub(crate) enum Event {
    /// The namespaces are there, open under these file numbers.
    Made(Handles),
    /// It became ready, or stopped being so; for the latter, why.
    Ready(Result<(), String>),
    /// A program started under this number, and with this file of its mount namespace, if it has one of its own.
    Started(String, u32, Option<i32>),
    /// A program ended.
    Ended(String, Ended),
    /// All of its containers have ended for good; if one of them failed, which and how.
    Completed(Result<(), String>),
    /// The pod could not be made or kept.
    Failed(Error),
    /// It is over.
    Gone,
}

/// A running pod.
#[derive(Debug)]
pub(crate) struct Running {
    orders: mpsc::UnboundedSender<Order>,
}

type Tell = mpsc::UnboundedSender<((String, String), Event)>;

/// The sidecar gets this long to end: more than the 5 s in which it finishes what it has in hand.
const SIDECAR_GRACE: Duration = Duration::from_secs(8);
/// How often to see whether a sidecar that starts is ready.
const SIDECAR_LOOK: Duration = Duration::from_millis(50);
/// How often a ready sidecar is probed, as by Istio's injection.
const SIDECAR_PERIOD: Duration = Duration::from_secs(15);

impl Running {
    /// Starts a pod. What becomes of it arrives at `tell` under its name.
    pub(crate) fn start(blueprint: Blueprint, tell: Tell) -> io::Result<Self> {
        let (orders, received) = mpsc::unbounded_channel();
        std::thread::Builder::new().name(format!("pod {}", blueprint.key.1)).spawn(move || {
            let key = blueprint.key.clone();
            // A thread that panics without a word would leave its pod in the list for ever.
            let ended = catch_unwind(AssertUnwindSafe(|| live(&blueprint, received, &tell)));
            let failed = match ended {
                Ok(ended) => ended.err(),
                Err(_) => Some(Error::Refused(format!(
                    "the thread of pod {}/{} panicked, which is a mistake in this program; the message is above",
                    key.0, key.1
                ))),
            };
            if let Some(error) = failed {
                let _ = tell.send((key.clone(), Event::Failed(error)));
            }
            let _ = tell.send((key, Event::Gone));
        })?;
        Ok(Self { orders })
    }

    /// Gives an order. A pod that is gone needs none.
    pub(crate) fn order(&self, order: Order) {
        let _ = self.orders.send(order);
    }
}

/// The whole life of a pod, on its thread.
fn live(pod: &Blueprint, orders: mpsc::UnboundedReceiver<Order>, tell: &Tell) -> Result<(), Error> {
    let say = |event| {
        // Nobody to tell means that the mesh ends, and the pod with it.
        let _ = tell.send((pod.key.clone(), event));
    };
    // Opened before the thread leaves the bridge's namespace.
    let mut outside = Socket::route().context("opening a netlink socket")?;
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS)
        .context("making the pod's namespaces (is user.max_net_namespaces too low?)")?;
    sethostname(&pod.key.1).context("naming the pod")?;
    let namespace = |name: &str| File::open(format!("/proc/thread-self/ns/{name}"));
    let open = "opening the pod's namespaces";
    let (net, mnt) = (namespace("net").context(open)?, namespace("mnt").context(open)?);
    let uts = namespace("uts").context(open)?;

    links::cable(&mut outside, pod.bridge, &pod.link, net.as_fd(), pod.address)
        .map_err(|source| missing("virtual links (veth)", "veth", source))?;
    drop(outside);
    let mut inside = Socket::route().context("opening a netlink socket")?;
    links::pod(&mut inside, pod.address, pod.prefix, pod.gateway).context("setting the pod's address")?;
    let mut netfilter = netfilter()?;
    set_rules(&mut netfilter, &pod.rules)?;
    write_files(pod)?;
    let store = Store::make(&pod.folder, &pod.volumes).context("making the pod's volumes")?;
    say(Event::Made(Handles { net: net.as_raw_fd(), mnt: mnt.as_raw_fd(), uts: uts.as_raw_fd() }));

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the pod's runtime")?;
    runtime.block_on(supervise(pod, netfilter, store, orders, &say));
    Ok(())
}

fn missing(what: &'static str, module: &str, source: io::Error) -> Error {
    let remedy = format!(
        "The kernel needs it built in or as a module: try `sudo modprobe {module}`, or take a distribution's kernel"
    );
    Error::Missing { what, remedy, cause: source }
}

/// Opens the way to the packet rules of this thread's network.
pub(crate) fn netfilter() -> Result<Socket, Error> {
    Socket::netfilter().map_err(|source| missing("packet rules (nf_tables)", "nf_tables", source))
}

pub(crate) fn set_rules(netfilter: &mut Socket, rules: &Rules) -> Result<(), Error> {
    nftables::replace(netfilter, rules).map_err(|source| {
        let what = "packet rules (nf_tables with nat, redirect and numgen)";
        missing(what, "-a nf_tables nft_chain_nat nft_redir nft_nat nft_numgen", source)
    })
}

/// The pod's own versions of the files that say how names are resolved, and its token.
fn write_files(pod: &Blueprint) -> Result<(), Error> {
    fs::create_dir_all(&pod.folder).context(format!("making {}", pod.folder.display()))?;
    write_token(pod).context("writing the service account token")?;
    let (namespace, name) = &pod.key;
    let domain = pod.domain;
    let resolv = format!(
        "nameserver {}\nsearch {namespace}.svc.{domain} svc.{domain} {domain}\noptions ndots:5\n",
        pod.gateway
    );
    let hosts = format!("127.0.0.1\tlocalhost\n::1\tlocalhost\n{}\t{name}\n", pod.address);
    // The host's own file may send names to a resolver that knows nothing of the mesh.
    let switch = fs::read_to_string("/etc/nsswitch.conf").unwrap_or_default();
    let others = switch.lines().filter(|line| !line.trim_start().starts_with("hosts:"));
    let switch = others.chain(["hosts: files dns"]).flat_map(|line| [line, "\n"]).collect();
    for (file, content) in [("resolv.conf", resolv), ("hosts", hosts), ("nsswitch.conf", switch)] {
        let own = pod.folder.join(file);
        fs::write(&own, content).context(format!("writing {}", own.display()))?;
        let place = Path::new("/etc").join(file);
        if file == "nsswitch.conf" && !place.exists() {
            continue;
        }
        let nothing: Option<&str> = None;
        mount(Some(&own), &place, nothing, MsFlags::MS_BIND, nothing).map_err(|errno| {
            let remedy =
                format!("Make sure that the file {} is there (an empty one will do)", place.display());
            Error::Missing { what: "its own view of name resolution", remedy, cause: errno.into() }
        })?;
    }
    Ok(())
}

/// Replaces the token's file, so that a reader sees the old token or the new one.
fn write_token(pod: &Blueprint) -> io::Result<()> {
    let (namespace, name) = &pod.key;
    let token = pod.issuer.token(namespace, &pod.account, name, TOKEN_AUDIENCE)?;
    let (file, new) = (pod.folder.join("token"), pod.folder.join(".token.new"));
    fs::write(&new, token)?;
    fs::rename(new, file)
}

async fn supervise(
    pod: &Blueprint,
    mut netfilter: Socket,
    store: Store,
    mut orders: mpsc::UnboundedReceiver<Order>,
    say: &impl Fn(Event),
) {
    let (stop_programs, programs_stopped) = watch::channel(None);
    let (stop_sidecar, sidecar_stopped) = watch::channel(None);
    let watched = watched(pod);
    let lives = Lives::new(watched.len());
    let mut stopped_early = programs_stopped.clone();
    let volumes = Volumes::new(pod, store);
    let workload = async {
        // As with Istio's native sidecars: what the workload does first already finds a way out.
        let starts = tokio::select! {
            () = async { tokio::join!(sidecar_ready(&watched, &lives), volumes.mounted(pod, &lives)); } => true,
            _ = stopped_early.wait_for(Option::is_some) => false,
        };
        let finish = if starts { run_containers(pod, &programs_stopped, &lives, say).await } else { None };
        // Only when the workload has answered its last request may the sidecar go.
        stop_sidecar.send_replace(Some(SIDECAR_GRACE));
        if let Some(result) = finish {
            say(Event::Completed(result));
            let _ = programs_stopped.clone().wait_for(Option::is_some).await;
        }
    };
    let sidecar = async {
        if let Some(sidecar) = &pod.sidecar {
            let report = |outcome| {
                lives.set(0, life(sidecar, &[], &outcome));
                tell(sidecar, say, outcome);
            };
            process::keep(sidecar, sidecar_stopped, None, report).await;
        }
    };
    let obey = async {
        while let Some(order) = orders.recv().await {
            match order {
                Order::Rules(rules, _until_done) => {
                    if let Err(error) = set_rules(&mut netfilter, &rules) {
                        say(Event::Failed(error));
                    }
                }
                Order::Contents(contents) => volumes.replace(pod, contents),
                Order::Stop(grace) => {
                    stop_programs.send_replace(Some(grace));
                }
            }
        }
    };
    let readiness = readiness::watch(pod.address, &watched, &lives, |state| say(Event::Ready(state)));
    tokio::select! {
        _ = async { tokio::join!(workload, sidecar) } => {}
        () = readiness => {}
        () = renew_tokens(pod, &volumes) => {}
        () = async { obey.await; std::future::pending().await } => {}
    }
}

/// What must run for the pod to be ready: the sidecar first, and every container.
fn watched(pod: &Blueprint) -> Vec<Watched> {
    let sidecar = pod.sidecar.iter();
    let sidecar = sidecar.map(|_| (String::from("sidecar"), Some(sidecar_check()), RestartProbes::default()));
    let containers = pod.containers.iter().map(|one| {
        (format!("container {}", one.program.name), one.check.clone(), one.restart_probes.clone())
    });
    let all = sidecar.chain(containers).enumerate();
    all.map(|(program, (name, check, restart_probes))| Watched { program, name, check, restart_probes })
        .collect()
}

/// Runs the init containers and then the containers. `None` when they were stopped, and else whether all succeeded.
async fn run_containers(
    pod: &Blueprint,
    stopped: &watch::Receiver<Option<Duration>>,
    lives: &Lives,
    say: &impl Fn(Event),
) -> Option<Result<(), String>> {
    let first = usize::from(pod.sidecar.is_some());
    for program in &pod.init {
        wait(pod, lives, &format!("waits for init container {}", program.name));
        let report = |outcome| {
            if let Life::Crashed(reason) = life(program, &[], &outcome) {
                wait(pod, lives, &format!("waits for init container {}: {reason}", program.name));
            }
            tell(program, say, outcome);
        };
        match process::keep(program, stopped.clone(), None, report).await {
            Finish::Stopped => return None,
            Finish::Succeeded => {}
            Finish::Failed => {
                let reason = format!("init container {} has failed: {}", program.name, program.last_line());
                return Some(Err(reason));
            }
        }
    }
    let run = async |(index, one): (usize, &Containerized)| {
        let report = |outcome| {
            lives.set(first + index, life(&one.program, &one.ports, &outcome));
            tell(&one.program, say, outcome);
        };
        process::keep(&one.program, stopped.clone(), lives.kills(first + index), report).await
    };
    let finishes = join_all(pod.containers.iter().enumerate().map(run)).await;
    let mut failed = finishes.iter().zip(&pod.containers).filter(|(finish, _)| **finish == Finish::Failed);
    if finishes.contains(&Finish::Stopped) {
        return None;
    }
    Some(failed.next().map_or(Ok(()), |(_, one)| {
        Err(format!("container {} has failed: {}", one.program.name, one.program.last_line()))
    }))
}

/// The state of a program after this outcome.
fn life(program: &Program, ports: &[String], outcome: &Outcome) -> Life {
    match outcome {
        Outcome::Started(..) => Life::Running(Instant::now(), None),
        Outcome::Ended(ended) if ended.code == Some(0) && ended.again.is_none() => Life::Done,
        Outcome::Ended(ended) => Life::Crashed(crash(ended, &program.last_line(), ports)),
    }
}

fn tell(program: &Program, say: &impl Fn(Event), outcome: Outcome) {
    say(match outcome {
        Outcome::Started(id, mounts) => Event::Started(program.name.clone(), id, mounts),
        Outcome::Ended(ended) => Event::Ended(program.name.clone(), ended),
    });
}

/// Why a container is not ready that has ended, in Kubernetes' words.
fn crash(ended: &Ended, last_line: &str, ports: &[String]) -> String {
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

/// Says of all containers what they wait for.
fn wait(pod: &Blueprint, lives: &Lives, reason: &str) {
    let first = usize::from(pod.sidecar.is_some());
    (0..pod.containers.len()).for_each(|index| lives.set(first + index, Life::Waiting(reason.to_owned())));
}

fn sidecar_check() -> Check {
    Check {
        probe: Probe::Get(HEALTH_PORT, "/healthz/ready".to_owned()),
        period: Some(SIDECAR_PERIOD),
        limit: Duration::from_secs(3),
        failures: 4,
    }
}

/// Waits until the sidecar is ready, if there is one.
async fn sidecar_ready(watched: &[Watched], lives: &Lives) {
    let Some(sidecar) = watched.iter().find(|one| one.name == "sidecar") else { return };
    while !lives.is_ready(sidecar.program) {
        tokio::time::sleep(SIDECAR_LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_named_as_in_kubernetes_and_with_the_port() {
        let ended = |code, crashes| Ended {
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
