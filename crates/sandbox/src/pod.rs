//! One pod: a thread that lives in the pod's namespaces, and the programs it keeps running there.
//!
//! Namespaces belong to threads in Linux, and what a thread starts is born in its namespaces. So a pod needs no
//! process to hold it: the thread makes its network, mount and host name namespaces, cables itself to the bridge,
//! sets the packet rules and then supervises sidecar and workload with a runtime of its own.

use std::{
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::fd::{AsFd as _, AsRawFd as _},
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
use skysail_core::names::HEALTH_PORT;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use crate::{
    error::{Context as _, Error},
    http, links,
    netlink::Socket,
    nftables,
    process::{self, Outcome, Program},
    rules::Rules,
    token::{self, Issuer},
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
    pub(crate) programs: Vec<Program>,
    pub(crate) probes: Vec<Check>,
}

/// How to find out whether a container is ready.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    pub(crate) port: u16,
    /// A page to ask for; without one it is enough that the port accepts.
    pub(crate) path: Option<String>,
    pub(crate) period: Duration,
    pub(crate) limit: Duration,
    /// So many failures in a row make it not ready.
    pub(crate) failures: u32,
}

impl Default for Check {
    fn default() -> Self {
        let second = Duration::from_secs(1);
        Self { port: 0, path: None, period: second, limit: second, failures: 3 }
    }
}

/// What the mesh tells a pod.
#[derive(Debug)]
pub(crate) enum Order {
    /// Replace the packet rules. What comes with them is dropped when that is done.
    Rules(Rules, Arc<()>),
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
    /// A program started under this number.
    Started(String, u32),
    /// A program ended and is started again.
    Ended(String, String),
    /// The pod could not be made or kept.
    Failed(Error),
    /// It is over.
    Gone,
}

/// The open files of a pod's namespaces, by which others find them under /proc.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Handles {
    pub(crate) net: i32,
    pub(crate) mnt: i32,
    pub(crate) uts: i32,
}

/// A running pod.
#[derive(Debug)]
pub(crate) struct Running {
    orders: mpsc::UnboundedSender<Order>,
}

type Tell = mpsc::UnboundedSender<((String, String), Event)>;

/// Readiness is asked for this often until it is there.
const IMPATIENT: Duration = Duration::from_millis(100);
/// The sidecar gets this long to end: more than the 5 s in which it finishes what it has in hand.
const SIDECAR_GRACE: Duration = Duration::from_secs(8);
/// Connections from here are not intercepted; see [`crate::rules`].
const PROBES_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 6);

impl Running {
    /// Starts a pod. What becomes of it arrives at `tell` under its name.
    pub(crate) fn start(blueprint: Blueprint, tell: Tell) -> io::Result<Self> {
        let (orders, received) = mpsc::unbounded_channel();
        std::thread::Builder::new().name(format!("pod {}", blueprint.key.1)).spawn(move || {
            let key = blueprint.key.clone();
            if let Err(error) = live(&blueprint, received, &tell) {
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
    let mut netfilter =
        Socket::netfilter().map_err(|source| missing("packet rules (nf_tables)", "nf_tables", source))?;
    set_rules(&mut netfilter, &pod.rules)?;
    write_files(pod)?;
    say(Event::Made(Handles { net: net.as_raw_fd(), mnt: mnt.as_raw_fd(), uts: uts.as_raw_fd() }));

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the pod's runtime")?;
    runtime.block_on(supervise(pod, netfilter, orders, &say));
    Ok(())
}

fn missing(what: &'static str, module: &str, source: io::Error) -> Error {
    let remedy = format!(
        "The kernel needs it built in or as a module: try `sudo modprobe {module}`, or take a distribution's kernel"
    );
    Error::Missing { what, remedy, cause: source }
}

fn set_rules(netfilter: &mut Socket, rules: &Rules) -> Result<(), Error> {
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
    let token = pod.issuer.token(namespace, &pod.account, name)?;
    let (file, new) = (pod.folder.join("token"), pod.folder.join(".token.new"));
    fs::write(&new, token)?;
    fs::rename(new, file)
}

async fn supervise(
    pod: &Blueprint,
    mut netfilter: Socket,
    mut orders: mpsc::UnboundedReceiver<Order>,
    say: &impl Fn(Event),
) {
    let (stop_programs, programs_stopped) = watch::channel(None);
    let (stop_sidecar, sidecar_stopped) = watch::channel(None);
    let report = |program: &Program, outcome| {
        say(match outcome {
            Outcome::Started(id) => Event::Started(program.name.clone(), id),
            Outcome::Ended(how) => Event::Ended(program.name.clone(), how),
        });
    };
    let run = |program, stopped| process::keep(program, stopped, move |outcome| report(program, outcome));
    let programs = pod.programs.iter().map(|program| run(program, programs_stopped.clone()));
    let mut stopped_early = programs_stopped.clone();
    let workload = async {
        // As with Istio's sidecars of today: what the workload does first already finds a way out.
        tokio::select! {
            () = sidecar_ready(pod) => { join_all(programs).await; }
            _ = stopped_early.wait_for(Option::is_some) => {}
        }
        // Only when the workload has answered its last request may the sidecar go.
        stop_sidecar.send_replace(Some(SIDECAR_GRACE));
    };
    let sidecar = async {
        if let Some(sidecar) = &pod.sidecar {
            run(sidecar, sidecar_stopped).await;
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
                Order::Stop(grace) => {
                    stop_programs.send_replace(Some(grace));
                }
            }
        }
    };
    let lives = async { tokio::join!(workload, sidecar) };
    tokio::select! {
        _ = lives => {}
        () = watch_readiness(pod, say) => {}
        () = renew_token(pod) => {}
        () = async { obey.await; std::future::pending().await } => {}
    }
}

async fn renew_token(pod: &Blueprint) {
    loop {
        tokio::time::sleep(token::RENEWAL).await;
        if let Err(error) = write_token(pod) {
            tracing::warn!(pod = pod.key.1, %error, "the service account token is not renewed");
        }
    }
}

/// Tells of every change of the pod's readiness, for ever.
async fn watch_readiness(pod: &Blueprint, say: &impl Fn(Event)) {
    let sidecar = sidecar_check(pod);
    let checks: Vec<(&str, &Check)> = sidecar
        .iter()
        .map(|check| ("sidecar", check))
        .chain(pod.probes.iter().map(|c| ("workload", c)))
        .collect();
    let mut failed = vec![0; checks.len()];
    let mut told: Option<Result<(), String>> = None;
    loop {
        let started = Instant::now();
        let mut state = Ok(());
        let ready = told == Some(Ok(()));
        for ((who, check), failed) in checks.iter().zip(&mut failed) {
            match attempt(pod.address, check).await {
                Ok(()) => *failed = 0,
                Err(problem) => {
                    *failed += 1;
                    if !ready || *failed >= check.failures {
                        state = state.and(Err(format!("{who}: port {}: {problem}", check.port)));
                    }
                }
            }
        }
        if told.as_ref() != Some(&state) {
            say(Event::Ready(state.clone()));
            told = Some(state.clone());
        }
        let period = checks.iter().map(|(_, check)| check.period).min().unwrap_or(Duration::from_secs(1));
        let pause = if state.is_ok() { period } else { IMPATIENT };
        tokio::time::sleep_until(started + pause.max(IMPATIENT)).await;
    }
}

fn sidecar_check(pod: &Blueprint) -> Option<Check> {
    pod.sidecar.as_ref().map(|_| Check {
        port: HEALTH_PORT,
        path: Some("/healthz/ready".to_owned()),
        period: Duration::from_secs(1),
        limit: Duration::from_secs(3),
        failures: 3,
    })
}

/// Waits until the sidecar is ready, if there is one.
async fn sidecar_ready(pod: &Blueprint) {
    let Some(check) = sidecar_check(pod) else { return };
    while attempt(pod.address, &check).await.is_err() {
        tokio::time::sleep(IMPATIENT).await;
    }
}

async fn attempt(address: Ipv4Addr, check: &Check) -> Result<(), String> {
    let to = SocketAddr::new(IpAddr::V4(address), check.port);
    let Some(path) = &check.path else {
        let connecting = tokio::time::timeout(check.limit, http::connect(to, Some(PROBES_FROM)));
        return match connecting.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer".to_owned()),
        };
    };
    match http::get_from(to, Some(PROBES_FROM), path, check.limit).await {
        Ok((200..=399, _)) => Ok(()),
        Ok((status, _)) => Err(format!("{path} answers {status}")),
        Err(error) => Err(format!("{path}: {error}")),
    }
}
