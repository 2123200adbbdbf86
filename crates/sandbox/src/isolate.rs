//! Namespaces of the mesh: entering them, and setting up the process inside.
//!
//! The program runs twice. *Outside*, [`run_inside`] creates mount, network, PID, IPC and host name namespaces, and a
//! user namespace unless it runs as root. It starts the program again inside them and forwards signals and the exit
//! code. *Inside*, the second process is process 1 of the PID namespace. When it ends, the kernel ends every process of
//! the mesh and frees every namespace. The inner process ends when the outer one ends ([`set_up`]).

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
use skysail_intercept::netlink::Socket;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{sleep, timeout},
};

use crate::{
    descriptor,
    egress::forwarder::Forwarder,
    error::{Context as _, Error},
    links,
};

/// Interval at which orphans that have ended are reaped.
const REAP: Duration = Duration::from_millis(500);
/// Time between the end signal and SIGKILL.
const ENDING: Duration = Duration::from_secs(8);
/// Interval at which a signal is sent to the inner process again until it ends. A signal has no effect before the inner
/// process waits for it ([`install_handlers`]).
const REPEAT: Duration = Duration::from_millis(100);
/// The signals that end a mesh.
const END_SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// Blocks the signals that end a mesh until [`run_inside`] handles them. Otherwise a signal could end this process
/// before it removes its files.
///
/// # Errors
/// When the kernel refuses to block them.
pub fn block_signals() -> Result<(), Error> {
    SigSet::from_iter(END_SIGNALS).thread_block().context("blocking signals")
}

/// Creates namespaces and runs this program again in them, with these arguments. Returns its exit code.
///
/// This outer process shares the network namespace of the inner process, and runs `alongside` until that ends. With
/// `forwarder`, the program also runs in the host's network namespace, with those arguments. The inner process gets a
/// socket to the forwarder.
///
/// The process must have one thread only, because the kernel requires that for user namespaces.
///
/// # Errors
/// When the kernel forbids namespaces. The message says which setting to change.
pub fn run_inside(
    arguments: &[OsString],
    forwarder: Option<&[OsString]>,
    alongside: impl Future<Output = ()>,
) -> Result<u8, Error> {
    let mut forwarder = forwarder.map(Forwarder::start).transpose()?;
    enter()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    let channel = forwarder.as_mut().and_then(|forwarder| forwarder.channel.take());
    runtime.block_on(async {
        tokio::select! {
            code = supervise(arguments, channel) => code,
            code = async { alongside.await; std::future::pending().await } => code,
        }
    })
}

fn enter() -> Result<(), Error> {
    let others = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC;
    // Root without CAP_SYS_ADMIN, as in a container, may still create a user namespace.
    if Uid::effective().is_root() && unshare(others).is_ok() {
        return Ok(());
    }
    let (user, group) = (getuid(), getgid());
    unshare(CloneFlags::CLONE_NEWUSER).map_err(forbidden)?;
    fs::write("/proc/self/setgroups", "deny").context("dropping supplementary groups")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1")).map_err(forbidden_by)?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1")).map_err(forbidden_by)?;
    unshare(others).map_err(forbidden)
}

/// Starts the inner process, passes it the socket to the forwarder, and waits for its end.
async fn supervise(arguments: &[OsString], channel: Option<UnixStream>) -> Result<u8, Error> {
    let failed = "forwarding signals";
    let mut interrupted = signal(SignalKind::interrupt()).context(failed)?;
    let mut terminated = signal(SignalKind::terminate()).context(failed)?;
    let mut hung_up = signal(SignalKind::hangup()).context(failed)?;
    SigSet::from_iter(END_SIGNALS).thread_unblock().context("unblocking signals")?;
    let program = std::env::current_exe().context("cannot find this program's file")?;
    let (own_end, inner_end) = UnixStream::pair().context(failed)?;
    if let Some(channel) = channel {
        descriptor::send(&own_end, channel.as_fd()).context("sending the socket to the forwarder")?;
    }
    let mut child = tokio::process::Command::new(&program)
        .args(arguments)
        // The socket closes when this process ends. The inner process sees that even if this one ends before it calls
        // `prctl`.
        .stdin(OwnedFd::from(inner_end))
        .spawn()
        .context(format!("starting {} again inside", program.display()))?;
    let id = child.id().and_then(|id| i32::try_from(id).ok());
    let pass_on = |signal| {
        if let Some(id) = id {
            // It fails only if the process has already ended.
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
                    stdio::print_error(format!("skysail: the mesh did not stop within {ENDING:?}; killing it"));
                    pass_on(Signal::SIGKILL);
                    child.wait().await
                }
            }
        }
    };
    let status = status.context("waiting for the mesh")?;
    drop(own_end);
    Ok(exit_code(status))
}

/// Returns the exit code as a shell does: 128 plus the signal's number if a signal ended the process.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Installs handlers of the signals that the inner process receives. They have no effect until the process waits for the
/// signals.
///
/// The inner process must call this before it creates a thread. The kernel discards a signal to process 1 that has no
/// handler. However, the signal ends the process if the first thread blocks signals at that time and another thread
/// does not. A thread blocks signals while it creates another thread.
///
/// # Errors
/// When the kernel refuses the handlers.
pub fn install_handlers() -> Result<(), Error> {
    let failed = "installing signal handlers";
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context(failed)?;
    // The handlers remain installed after the runtime's end.
    let _entered = runtime.enter();
    for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
        let _ = signal(kind).context(failed)?;
    }
    Ok(())
}

/// Sets up the inner process. Returns its process id outside, by which `skysail exec` finds it, and the socket to the
/// forwarder if `egress` is set.
///
/// # Errors
/// When the kernel forbids changes of mounts or links in spite of the new namespaces.
pub(crate) fn set_up(egress: bool) -> Result<(u32, Option<UnixStream>), Error> {
    prctl::set_pdeathsig(Signal::SIGKILL).context("requesting a signal at the end of the outer process")?;
    let channel =
        egress.then(|| descriptor::receive(io::stdin()).context("receiving the socket to the forwarder"));
    let channel = channel.transpose()?.map(UnixStream::from);
    thread::Builder::new()
        .name("starter".to_owned())
        .spawn(end_with_starter)
        .context("starting the thread that watches the outer process")?;
    // The mounted /proc is still the one of the outer PID namespace, so it has the process id there.
    let link = fs::read_link("/proc/self").context("reading /proc/self")?;
    let outside = link.to_string_lossy().parse().unwrap_or_default();
    let nothing: Option<&str> = None;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(nothing, "/", nothing, private, nothing).map_err(forbidden)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    if let Err(error) = mount(Some("proc"), "/proc", Some("proc"), flags, nothing) {
        // In a container that hides parts of /proc, the kernel refuses a new one. The present one is used instead.
        tracing::debug!(%error, "keeping the outer /proc");
    }
    let mut socket = Socket::route().context("opening a netlink socket")?;
    links::loopback(&mut socket).map_err(forbidden_by)?;
    // Without this, the kernel passes bridged packets through the IPv4 rules. There are none here, so that costs time
    // only.
    let _ = fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
    // `ip_forward`: a router without a route reports a destination as unreachable, so connections to addresses outside
    // the mesh fail at once. `icmp_ratelimit`: after the first few reports, two limits of the kernel each allow a pod
    // one report per second. The setting disables one of them. With both, a connection often fails only at its third
    // retransmission, after 7 s. If /proc is read-only, connections fail after their timeouts.
    for (setting, value) in [("ip_forward", "1"), ("icmp_ratelimit", "0")] {
        if let Err(error) = fs::write(format!("/proc/sys/net/ipv4/{setting}"), value) {
            tracing::debug!(%error, setting, "connections to addresses outside the mesh fail only after their timeouts");
        }
    }
    Ok((outside, channel))
}

/// Runs the work of process 1 on another thread while this thread, the first of the process, reaps orphans. The kernel
/// makes an orphan a child of the first thread of process 1. The process's own children belong to other threads, so the
/// reaper takes no exit code that another thread waits for.
pub fn with_reaper<T: Send>(work: impl FnOnce() -> T + Send) -> T {
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

/// Waits for the end of standard input, which the outer process holds open.
fn end_with_starter() {
    let mut byte = [0; 1];
    while matches!(io::Read::read(&mut io::stdin(), &mut byte), Ok(1..)) {}
    std::process::exit(1);
}

fn forbidden(errno: Errno) -> Error {
    forbidden_by(errno.into())
}

/// Returns the error with the setting that forbids namespaces on this machine.
fn forbidden_by(source: io::Error) -> Error {
    let setting = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let zero = Some("0".to_owned());
    let remedy = if setting("/proc/sys/user/max_user_namespaces") == zero {
        "This machine does not allow user namespaces: run `sudo sysctl -w user.max_user_namespaces=15000`, or run as root"
    } else if setting("/proc/sys/kernel/unprivileged_userns_clone") == zero {
        "Only root may create user namespaces on this machine: run `sudo sysctl -w kernel.unprivileged_userns_clone=1`, or run as root"
    } else if setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some("1".to_owned()) {
        "AppArmor restricts user namespaces on this machine: run \
         `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, or run as root"
    } else {
        "The kernel or a container's seccomp filter forbids it; start a container with `--privileged` \
         or with `--security-opt seccomp=unconfined --cap-add SYS_ADMIN --cap-add NET_ADMIN`"
    };
    Error::Missing { what: "the mesh's namespaces", remedy: remedy.to_owned(), cause: source }
}
