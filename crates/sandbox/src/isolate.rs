//! Namespaces of the whole mesh: going in, and what the process inside finds there.
//!
//! The program runs twice. *Outside*, [`run_inside`] enters a fresh user namespace (unless root), mount, network,
//! PID and host name namespaces, starts the program again and passes signals and the exit code on. *Inside*, the
//! second process is process 1 of the PID namespace: when it ends, for whatever reason, the kernel ends every
//! process of the mesh and frees every namespace. It ends with the one outside, too ([`settle`]).

use std::{
    ffi::OsString,
    fs, io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{net::UnixStream, process::ExitStatusExt as _},
    },
    process::ExitStatus,
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{
        prctl,
        signal::{SigSet, Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::{Pid, Uid, getgid, getuid},
};
use skysail_core::stdio;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{sleep, timeout},
};

use crate::{
    descriptor,
    egress::forwarder::Forwarder,
    error::{Context as _, Error},
    links,
    netlink::Socket,
};

/// An orphan that has ended is in nobody's way for so long.
const REAP: Duration = Duration::from_millis(500);
/// A mesh that is told to end is killed after this time.
const ENDING: Duration = Duration::from_secs(8);
/// Interval at which a signal is sent to the inner process again until that ends. The kernel discards a signal to process 1 of a
/// PID namespace as long as that has no handler for it.
const REPEAT: Duration = Duration::from_millis(100);
/// The signals that end a mesh.
const END_SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// Blocks the signals that end a mesh until [`run_inside`] handles them, so that none ends this process between its first file and
/// its last.
///
/// # Errors
/// When the kernel refuses it.
pub fn hold_signals() -> Result<(), Error> {
    SigSet::from_iter(END_SIGNALS).thread_block().context("blocking signals")
}

/// Enters fresh namespaces and runs this program again in them, with these arguments. Returns its exit code. This process
/// shares the network of the new one, and runs `beside` until that ends. With `forwarder`, the program runs a third time, with those
/// arguments and in the present network, and the process inside gets a socket to it.
///
/// The process must have one thread only (the kernel wants that for user namespaces).
///
/// # Errors
/// When the kernel forbids namespaces; the message says what to allow.
pub fn run_inside(
    arguments: &[OsString],
    forwarder: Option<&[OsString]>,
    beside: impl Future<Output = ()>,
) -> Result<u8, Error> {
    let mut forwarder = forwarder.map(Forwarder::start).transpose()?;
    enter()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    let channel = forwarder.as_mut().and_then(|forwarder| forwarder.channel.take());
    runtime.block_on(async {
        tokio::select! {
            code = attend(arguments, channel) => code,
            code = async { beside.await; std::future::pending().await } => code,
        }
    })
}

fn enter() -> Result<(), Error> {
    let others = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC;
    // Root without the capability (in a container, say) may still be allowed a user namespace.
    if Uid::effective().is_root() && unshare(others).is_ok() {
        return Ok(());
    }
    let (user, group) = (getuid(), getgid());
    unshare(CloneFlags::CLONE_NEWUSER).map_err(forbidden)?;
    fs::write("/proc/self/setgroups", "deny").context("giving up further groups")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1")).map_err(forbidden_by)?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1")).map_err(forbidden_by)?;
    unshare(others).map_err(forbidden)
}

/// Starts the inner process, hands it the socket to the forwarder, and waits for it.
async fn attend(arguments: &[OsString], channel: Option<UnixStream>) -> Result<u8, Error> {
    let failed = "passing signals on";
    let mut interrupted = signal(SignalKind::interrupt()).context(failed)?;
    let mut terminated = signal(SignalKind::terminate()).context(failed)?;
    let mut hung_up = signal(SignalKind::hangup()).context(failed)?;
    SigSet::from_iter(END_SIGNALS).thread_unblock().context("unblocking signals")?;
    let program = std::env::current_exe().context("finding this program's file")?;
    let (held, theirs) = UnixStream::pair().context(failed)?;
    if let Some(channel) = channel {
        descriptor::send(&held, channel.as_fd()).context("handing over the socket to the forwarder")?;
    }
    let mut child = tokio::process::Command::new(&program)
        .args(arguments)
        // Its end tells the inner process that this one is gone, should that happen before it listens for it.
        .stdin(OwnedFd::from(theirs))
        .spawn()
        .context(format!("starting {} again inside", program.display()))?;
    let id = child.id().and_then(|id| i32::try_from(id).ok());
    let pass_on = |signal| {
        if let Some(id) = id {
            // It fails only when the process is gone already.
            let _ = kill(Pid::from_raw(id), signal);
        }
    };
    let signal = tokio::select! {
        status = child.wait() => Err(status),
        _ = interrupted.recv() => Ok(Signal::SIGINT),
        _ = terminated.recv() => Ok(Signal::SIGTERM),
        _ = hung_up.recv() => Ok(Signal::SIGTERM),
    };
    let status = match signal {
        Err(status) => status,
        Ok(signal) => {
            let repeat = async {
                loop {
                    pass_on(signal);
                    sleep(REPEAT).await;
                }
            };
            tokio::select! {
                status = child.wait() => status,
                _ = timeout(ENDING, repeat) => {
                    stdio::tell(format!("skysail: the mesh did not end within {ENDING:?} and is killed"));
                    pass_on(Signal::SIGKILL);
                    child.wait().await
                }
            }
        }
    };
    let status = status.context("waiting for the mesh")?;
    drop(held);
    Ok(exit_code(status))
}

/// A process's exit code in the shell's way: 128 and the signal's number if it died of one.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// What the inner process does first. Returns its number outside, by which `skysail exec` finds it, and the socket to the forwarder
/// if there is to be one.
///
/// # Errors
/// When mounts or links may not be changed, though namespaces were given.
pub(crate) fn settle(egress: bool) -> Result<(u32, Option<UnixStream>), Error> {
    prctl::set_pdeathsig(Signal::SIGKILL).context("tying the mesh to its starter")?;
    let channel =
        egress.then(|| descriptor::receive(io::stdin()).context("taking the socket to the forwarder"));
    let channel = channel.transpose()?.map(UnixStream::from);
    thread::Builder::new()
        .name("starter".to_owned())
        .spawn(end_with_starter)
        .context("tying the mesh to its starter")?;
    // This is still the starter's /proc, so it knows the number there.
    let link = fs::read_link("/proc/self").context("reading /proc/self")?;
    let outside = link.to_string_lossy().parse().unwrap_or_default();
    let nothing: Option<&str> = None;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(nothing, "/", nothing, private, nothing).map_err(forbidden)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    if let Err(error) = mount(Some("proc"), "/proc", Some("proc"), flags, nothing) {
        // Containers hide parts of /proc, and the kernel then lets nobody have a whole one. The old one will do.
        tracing::debug!(%error, "keeping the starter's /proc");
    }
    let mut socket = Socket::route().context("opening a netlink socket")?;
    links::loopback(&mut socket).map_err(forbidden_by)?;
    // Without this, bridged packets go through IPv4's rules, of which there are none here, for nothing.
    let _ = fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
    // A router without a route answers that a destination is unreachable, so connections beyond the mesh fail at once. Where /proc is
    // read-only, they fail after their timeouts.
    // The kernel answers a pod once a second after the first few times, for each of two limits; the second setting lifts one of them. With
    // both, a connection often fails only with its third retransmission, after 7 s.
    for (setting, value) in [("ip_forward", "1"), ("icmp_ratelimit", "0")] {
        if let Err(error) = fs::write(format!("/proc/sys/net/ipv4/{setting}"), value) {
            tracing::debug!(%error, setting, "connections beyond the mesh fail after their timeouts");
        }
    }
    Ok((outside, channel))
}

/// Does the work of process 1 on another thread while this one, the process's first, reaps orphans: what loses its
/// parent inside becomes a child of process 1, and there of the first thread. Of the process's own children none is
/// that thread's, so it takes no exit code from whoever waits for one.
pub fn reaping<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let first = thread::current();
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let done = work();
            first.unpark();
            done
        });
        while !worker.is_finished() {
            let own = WaitPidFlag::WNOHANG | WaitPidFlag::__WNOTHREAD;
            while waitpid(None, Some(own)).is_ok_and(|status| status.pid().is_some()) {}
            thread::park_timeout(REAP);
        }
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Waits for the end of standard input, which the starter holds open.
fn end_with_starter() {
    let mut byte = [0; 1];
    while matches!(io::Read::read(&mut io::stdin(), &mut byte), Ok(1..)) {}
    std::process::exit(1);
}

fn forbidden(errno: Errno) -> Error {
    forbidden_by(errno.into())
}

/// Says which of the ways to forbid namespaces is at work here.
fn forbidden_by(source: io::Error) -> Error {
    let setting = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let zero = Some("0".to_owned());
    let remedy = if setting("/proc/sys/user/max_user_namespaces") == zero {
        "This machine allows no user namespaces: `sudo sysctl -w user.max_user_namespaces=15000`, or run as root"
    } else if setting("/proc/sys/kernel/unprivileged_userns_clone") == zero {
        "User namespaces are for root only here: `sudo sysctl -w kernel.unprivileged_userns_clone=1`, or run as root"
    } else if setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some("1".to_owned()) {
        "AppArmor takes the rights from user namespaces here: \
         `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, or run as root"
    } else {
        "The kernel or a container's seccomp filter forbids it; in a container, start it with `--privileged` \
         or `--security-opt seccomp=unconfined --cap-add SYS_ADMIN --cap-add NET_ADMIN`"
    };
    Error::Missing { what: "namespaces of its own", remedy: remedy.to_owned(), cause: source }
}
