//! Processes under measurement, started with the same scheduling and ended with this process.
//!
//! Real-time scheduling (`SCHED_RR` at its lowest priority) prevents other work of the machine from delaying a
//! wake-up by a whole time slice. On a shared machine, that delay would dominate the latency.
#![allow(unsafe_code, reason = "sched_setscheduler has no safe wrapper, and pre_exec is unsafe to call")]

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use nix::{
    libc,
    sched::{CloneFlags, CpuSet, sched_setaffinity, setns},
    sys::{
        prctl,
        signal::{Signal, kill, killpg},
    },
    unistd::Pid,
};
use tokio::process::{Child, Command};

use crate::accounting::LastCpu;

/// Priority of everything that takes part in a measurement.
const PARTICIPANT: i32 = 1;
/// Priority of the measuring threads, which mostly sleep and must not be late, and of other work that must not wait for
/// a participant.
pub(crate) const OBSERVER: i32 = 2;

/// Timeout for a process to listen. Under valgrind it runs many times slower than usual.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for a process to end by itself.
const GRACE: Duration = Duration::from_secs(30);

/// Scheduling and network of a participant in a measurement. Default: those of the benchmark.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scheduling {
    pub(crate) realtime: bool,
    /// Runs before all others that share its CPUs.
    pub(crate) first: bool,
    /// CPUs that it may use; all if `None`.
    pub(crate) cpus: Option<CpuSet>,
    /// Network namespace; that of the benchmark if `None`.
    pub(crate) network: Option<Arc<OwnedFd>>,
}

impl Scheduling {
    /// Applies the settings to the calling thread and its future children. It only makes system calls.
    pub(crate) fn apply(&self) -> io::Result<()> {
        if let Some(network) = &self.network {
            setns(network, CloneFlags::CLONE_NEWNET)?;
        }
        if let Some(cpus) = &self.cpus {
            sched_setaffinity(Pid::from_raw(0), cpus)?;
        }
        let priority = if self.first { OBSERVER } else { PARTICIPANT };
        if self.realtime { set_realtime(priority) } else { Ok(()) }
    }
}

/// Requests real-time scheduling of the calling thread.
pub(crate) fn set_realtime(priority: i32) -> io::Result<()> {
    set_scheduler(libc::SCHED_RR, priority)
}

fn set_scheduler(policy: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the pointer is to a live sched_param, which the kernel only reads; 0 is the calling thread.
    match unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ends real-time scheduling of the calling thread. Returns true if it was on.
fn leave_realtime() -> bool {
    // SAFETY: no pointers; 0 is the calling thread.
    let had = unsafe { libc::sched_getscheduler(0) } == libc::SCHED_RR;
    had && set_scheduler(libc::SCHED_OTHER, 0).is_ok()
}

/// Standard streams of a process. Default: no input, and output to its log.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: Option<OwnedFd>,
}

/// A running process and its children; ended when dropped.
pub(crate) struct Running {
    child: Child,
    pid: Pid,
    /// Name in messages.
    pub(crate) name: String,
    log: PathBuf,
}

impl Running {
    /// Starts a program with its output in `NAME.log` in the folder.
    pub(crate) fn start(
        name: &str,
        command: &[OsString],
        folder: &Path,
        schedule: Scheduling,
    ) -> anyhow::Result<Self> {
        Self::start_with(name, command, folder, schedule, Streams::default())
    }

    /// Starts a program like [`Running::start`], with other standard streams.
    pub(crate) fn start_with(
        name: &str,
        command: &[OsString],
        folder: &Path,
        schedule: Scheduling,
        streams: Streams,
    ) -> anyhow::Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let output = File::create(&log)?;
        let (program, arguments) =
            command.split_first().ok_or_else(|| anyhow::anyhow!("the command of {name} is empty"))?;
        let mut prepared = Command::new(program);
        prepared
            .args(arguments)
            .current_dir(folder)
            .stdin(streams.stdin.map_or_else(Stdio::null, Stdio::from))
            .stdout(match streams.stdout {
                Some(stdout) => Stdio::from(stdout),
                None => Stdio::from(output.try_clone()?),
            })
            .stderr(output)
            // Ctrl-C on the terminal reaches only the benchmark, which then ends its processes.
            .process_group(0)
            .kill_on_drop(true);
        // SAFETY: between fork and exec the closure only makes system calls and allocates nothing.
        unsafe {
            prepared.pre_exec(move || {
                // SIGTERM and not SIGKILL, so that a master process ends its workers.
                prctl::set_pdeathsig(Signal::SIGTERM)?;
                schedule.apply()
            });
        }
        let child = prepared
            .spawn()
            .map_err(|error| anyhow::anyhow!("cannot start {}: {error}", Path::new(program).display()))?;
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        let id = id.ok_or_else(|| anyhow::anyhow!("{name} ended immediately"))?;
        Ok(Self { child, pid: Pid::from_raw(id), name: name.to_owned(), log })
    }

    /// Returns the process ID.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Waits until the process listens on the port.
    pub(crate) async fn ready(&mut self, port: u16) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        while !self.listens(port) {
            if let Some(status) = self.child.try_wait()? {
                anyhow::bail!("{} ended with {status} before it listened: {}", self.name, self.output_tail());
            }
            if tokio::time::Instant::now() > deadline {
                anyhow::bail!("{} does not listen after {TIMEOUT:?}: {}", self.name, self.output_tail());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Returns true if a socket listens on the port in the network namespace of the process.
    fn listens(&self, port: u16) -> bool {
        ["tcp", "tcp6"].iter().any(|table| {
            let sockets = std::fs::read_to_string(format!("/proc/{}/net/{table}", self.pid));
            sockets.is_ok_and(|sockets| is_listening(&sockets, port))
        })
    }

    /// Waits until the output of the process contains a text.
    ///
    /// # Errors
    /// The process has ended, or the text does not appear in time.
    pub(crate) async fn printed(&mut self, text: &str, limit: Duration) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + limit;
        while self.count_lines(text) == 0 {
            if let Some(status) = self.child.try_wait()? {
                anyhow::bail!("{} ended with {status}: {}", self.name, self.output_tail());
            }
            if tokio::time::Instant::now() > deadline {
                anyhow::bail!("{} is not ready after {limit:?}: {}", self.name, self.output_tail());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Returns the end of the process's output.
    pub(crate) fn output_tail(&self) -> String {
        const MAX: usize = 600;
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text[text.len().saturating_sub(MAX)..]).trim().to_owned();
        if text.is_empty() { "it has no output".to_owned() } else { text }
    }

    /// Returns the number of lines of the process's output that contain a text.
    pub(crate) fn count_lines(&self, text: &str) -> usize {
        let output = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&output).lines().filter(|line| line.contains(text)).count()
    }

    /// Ends the process and waits for it.
    ///
    /// This runs under ordinary scheduling. To reap a process, the kernel retries until no reader has its `/proc`
    /// files open, and such readers may never run next to a real-time thread.
    pub(crate) async fn stop(mut self) {
        let used = LastCpu::of(self.pid());
        let realtime = leave_realtime();
        // It fails only if the process is gone already.
        let _ = kill(self.pid, Signal::SIGTERM);
        let _ = tokio::time::timeout(GRACE, self.child.wait()).await;
        used.charge();
        if realtime {
            // It was permitted before.
            let _ = set_realtime(OBSERVER);
        }
    }
}

/// Returns true if a table of sockets, as in `/proc/net/tcp`, has one that listens on the port.
fn is_listening(sockets: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{port:04X}");
    sockets.lines().any(|line| {
        let mut cells = line.split_whitespace().skip(1);
        cells.next().is_some_and(|local| local.ends_with(&suffix)) && cells.nth(1) == Some(LISTEN)
    })
}

impl Drop for Running {
    fn drop(&mut self) {
        // The group, so that workers end too. Its number is not reused while a member lives.
        let _ = killpg(self.pid, Signal::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_sockets_count() {
        let sockets = "  sl  local_address rem_address   st tx_queue\n   \
             0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n   \
             1: 0100007F:1F91 0100007F:0050 01 00000000:00000000\n   \
             2: 00000000000000000000000000000000:0051 00000000000000000000000000000000:0000 0A 0\n";
        assert!(is_listening(sockets, 8_080) && is_listening(sockets, 0x51));
        assert!(!is_listening(sockets, 8_081), "it is connected");
        assert!(!is_listening(sockets, 0x50) && !is_listening("", 1));
    }
}
