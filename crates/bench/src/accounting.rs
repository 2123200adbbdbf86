//! CPU time and memory of processes, and the load of the machine, as the kernel reports them.

use std::{
    collections::BTreeMap,
    fs,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::Context as _;
use nix::{
    sys::{
        resource::{UsageWho, getrusage},
        time::{TimeVal, TimeValLike as _},
    },
    time::ClockId,
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

use crate::clock;

/// Nanoseconds of a tick in /proc/stat.
const TICK: u64 = 10_000_000;

/// Memory of a process and its descendants, in kilobytes as the kernel counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Resident set: pages in memory, shared ones in full.
    pub(crate) rss_kb: u64,
    /// Proportional set: shared pages divided by the number of processes that share them.
    pub(crate) pss_kb: u64,
    /// Private pages.
    pub(crate) private_kb: u64,
    /// Number of threads.
    pub(crate) threads: u64,
}

/// CPU time of processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cpu {
    /// Nanoseconds on a CPU, exact.
    pub(crate) nanoseconds: u64,
    /// Ticks in user mode and in the kernel. Most kernels sample them: their ratio is reliable from a few hundred
    /// ticks on.
    pub(crate) user: u64,
    pub(crate) kernel: u64,
}

impl Cpu {
    /// Returns the time since an earlier measurement.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            nanoseconds: self.nanoseconds.saturating_sub(earlier.nanoseconds),
            user: self.user.saturating_sub(earlier.user),
            kernel: self.kernel.saturating_sub(earlier.kernel),
        }
    }

    /// Returns the share of user mode; `None` without ticks.
    pub(crate) fn user_share(self) -> Option<f64> {
        let ticks = self.user + self.kernel;
        (ticks > 0).then(|| self.user as f64 / ticks as f64)
    }
}

/// Time of all CPUs, in ticks of 10 ms.
///
/// The kernel samples which process is on a CPU at a tick. Requests at even intervals may then always or never be in
/// progress at the moment of a sample. Idle time is exact, at least where idle CPUs have no ticks (`CONFIG_NO_HZ`). So
/// busy time is elapsed time without idle time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ticks {
    /// Elapsed time, times the number of CPUs.
    pub(crate) all: u64,
    /// Idle time since boot.
    pub(crate) idle: u64,
    /// Time that the hypervisor gave to other machines, since boot.
    pub(crate) stolen: u64,
}

impl Ticks {
    /// Returns how many of `cores` were busy since an earlier reading, on average, and how many of these were stolen.
    pub(crate) fn busy_since(self, earlier: Self, cores: f64) -> (f64, f64) {
        let all = self.all.saturating_sub(earlier.all);
        let share = |ticks: u64| ticks as f64 / all.max(1) as f64 * cores;
        let busy = all.saturating_sub(self.idle.saturating_sub(earlier.idle));
        (share(busy), share(self.stolen.saturating_sub(earlier.stolen)))
    }
}

/// Returns the process and all its descendants.
pub(crate) fn family(root: i32) -> Vec<i32> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
        if let Some(parent) =
            fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(|text| parent(&text))
        {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut family = vec![root];
    let mut at = 0;
    while let Some(pid) = family.get(at) {
        family.extend(children.remove(pid).unwrap_or_default());
        at += 1;
    }
    family
}

/// Returns the CPU time of these processes, including their threads that have ended.
///
/// # Errors
/// A process has ended. Its CPU time is unknown then.
pub(crate) fn cpu(pids: &[i32]) -> anyhow::Result<Cpu> {
    let mut sum = Cpu::default();
    for pid in pids {
        let clock = ClockId::pid_cpu_clock_id(Pid::from_raw(*pid)).and_then(ClockId::now);
        let time = clock
            .map(Duration::from)
            .with_context(|| format!("the CPU time of process {pid} is unknown, because it has ended"))?;
        sum.nanoseconds += u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let (user, kernel) = ticks_by_mode(&text).unwrap_or_default();
        sum.user += user;
        sum.kernel += kernel;
    }
    Ok(sum)
}

/// CPU time in nanoseconds of descendants that have ended without a parent that waited for them.
static UNWAITED: AtomicU64 = AtomicU64::new(0);

/// CPU time that processes had used when they were about to be ended.
pub(crate) struct LastCpu {
    processes: Duration,
    own: Duration,
}

impl LastCpu {
    /// Reads the CPU time of a process and its descendants, which are about to be ended.
    pub(crate) fn of(root: i32) -> Self {
        let used = family(root).iter().filter_map(|pid| Some(cpu(&[*pid]).ok()?.nanoseconds)).sum();
        Self { processes: Duration::from_nanos(used), own: own_cpu() }
    }

    /// Adds what the kernel did not charge to this process to [`own_cpu`]. All processes must have ended. At the end of a
    /// PID namespace, nobody waits for its processes.
    pub(crate) fn charge(self) {
        let charged = own_cpu().saturating_sub(self.own);
        let missing = self.processes.saturating_sub(charged).as_nanos();
        UNWAITED.fetch_add(u64::try_from(missing).unwrap_or(0), Ordering::Relaxed);
    }
}

/// Returns the CPU time of this process, and of its descendants that have ended.
pub(crate) fn own_cpu() -> Duration {
    let unwaited = Duration::from_nanos(UNWAITED.load(Ordering::Relaxed));
    let time = |time: TimeVal| Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap_or(0));
    let used =
        [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN].into_iter().filter_map(|who| getrusage(who).ok());
    unwaited + used.map(|used| time(used.user_time()) + time(used.system_time())).sum::<Duration>()
}

/// Returns the memory of these processes together.
pub(crate) fn memory(pids: &[i32]) -> Memory {
    let mut sum = Memory::default();
    for pid in pids {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let one = memory_of(&text);
        sum.rss_kb += one.rss_kb;
        sum.pss_kb += one.pss_kb;
        sum.private_kb += one.private_kb;
        sum.threads += fs::read_dir(format!("/proc/{pid}/task")).map_or(0, |tasks| tasks.count() as u64);
    }
    sum
}

/// Returns the resident memory of these processes together, in kilobytes. It is less exact than [`memory`], but the
/// kernel does not delay the processes to visit all their pages.
pub(crate) fn resident(pids: &[i32]) -> u64 {
    let one = |pid: &i32| kilobytes(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, "VmRSS:");
    pids.iter().filter_map(one).sum()
}

/// Returns the peak resident memory of a process, in kilobytes.
pub(crate) fn peak(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    kilobytes(&status, "VmHWM:").unwrap_or_default()
}

fn kilobytes(status: &str, field: &str) -> Option<u64> {
    status.lines().find_map(|line| line.strip_prefix(field)?.trim().strip_suffix(" kB")?.parse().ok())
}

/// Returns the current ticks of the machine.
pub(crate) fn ticks() -> Ticks {
    ticks_of(&fs::read_to_string("/proc/stat").unwrap_or_default(), clock::now() / TICK)
}

/// Returns the number of CPUs in /proc/stat, at least one.
pub(crate) fn cores() -> usize {
    cores_of(&fs::read_to_string("/proc/stat").unwrap_or_default())
}

/// Field 4 of proc_pid_stat(5). The name in field 2 may contain anything, also parentheses.
fn parent(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Fields 14 and 15 of proc_pid_stat(5).
fn ticks_by_mode(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn memory_of(rollup: &str) -> Memory {
    let mut memory = Memory::default();
    for line in rollup.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let kb: u64 = value.trim().trim_end_matches(" kB").parse().unwrap_or_default();
        match name {
            "Rss" => memory.rss_kb = kb,
            "Pss" => memory.pss_kb = kb,
            "Private_Clean" | "Private_Dirty" => memory.private_kb += kb,
            _ => {}
        }
    }
    memory
}

fn ticks_of(stat: &str, elapsed: u64) -> Ticks {
    // user nice system idle iowait irq softirq steal; user includes guest time.
    let fields = stat.lines().next().unwrap_or_default().split_ascii_whitespace().skip(1).take(8);
    let fields: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
    let at = |index: usize| fields.get(index).copied().unwrap_or_default();
    Ticks { all: elapsed * cores_of(stat) as u64, idle: at(3) + at(4), stolen: at(7) }
}

fn cores_of(stat: &str) -> usize {
    // `cpu` is the sum of `cpu0`, `cpu1` and so on.
    stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number above the maximum of process IDs.
    const NO_PROCESS: i32 = 1 << 23;

    #[test]
    fn files_of_the_kernel_are_parsed() {
        assert_eq!(parent("42 (a) b (c) S 7 42 42 0"), Some(7));
        let stat = "42 (a) b (c) S 7 42 42 0 -1 4194560 1 2 3 4 55 66 0 0";
        assert_eq!(ticks_by_mode(stat), Some((55, 66)));
        let rollup = "5500-7ffd ---p 00000000 00:00 0 [rollup]\nRss:   2048 kB\nPss:   1024 kB\n\
                      Private_Clean:  100 kB\nPrivate_Dirty:  200 kB\nSwap: 1 kB\n";
        let expected = Memory { rss_kb: 2048, pss_kb: 1024, private_kb: 300, threads: 0 };
        assert_eq!(memory_of(rollup), expected);
        let status = "Name:\tx\nVmHWM:\t   6508 kB\nVmRSS:\t   5508 kB\nVmSwap:\t 1 kB\n";
        assert_eq!(kilobytes(status, "VmRSS:"), Some(5_508));
        assert_eq!(kilobytes(status, "VmHWM:"), Some(6_508));
        let ticks = ticks_of("cpu  10 20 30 400 50 6 7 8 9 9\ncpu0 1 2 3\ncpu1 1 2 3\n", 300);
        assert_eq!(ticks, Ticks { all: 600, idle: 450, stolen: 8 });
        // Two cores for 100 ticks each.
        let later = Ticks { all: 800, idle: 550, stolen: 48 };
        assert_eq!(later.busy_since(ticks, 2.0), (1.0, 0.4));
        assert_eq!(ticks.busy_since(later, 2.0), (0.0, 0.0), "counters that decrease mean no load");
        assert_eq!(cores_of("cpu  3 4\ncpu0 1 2\ncpu11 2 2\nintr 7\n"), 2);
        assert_eq!(cores_of(""), 1);
    }

    #[test]
    fn time_is_split_by_ticks() {
        let cpu = |nanoseconds, user, kernel| Cpu { nanoseconds, user, kernel };
        let used = cpu(10, 4, 8).since(cpu(4, 3, 5));
        assert_eq!(used, cpu(6, 1, 3));
        assert_eq!(used.user_share(), Some(0.25));
        assert_eq!(Cpu::default().user_share(), None);
    }

    #[test]
    fn this_process_has_memory_and_used_a_cpu() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(family(me).contains(&me));
        assert!(memory(&[me]).rss_kb > 0);
        assert!(cpu(&[me]).unwrap().nanoseconds > 0);
        let ended = cpu(&[NO_PROCESS]).unwrap_err().to_string();
        assert!(ended.contains("because it has ended"), "{ended}");
    }

    #[test]
    fn cpu_time_includes_threads_that_have_ended() {
        let own = i32::try_from(std::process::id()).unwrap();
        let before = cpu(&[own]).unwrap().nanoseconds;
        let spent = std::thread::spawn(|| {
            let on_cpu = || Duration::from(ClockId::CLOCK_THREAD_CPUTIME_ID.now().unwrap());
            while on_cpu() < Duration::from_millis(20) {}
            u64::try_from(on_cpu().as_nanos()).unwrap()
        });
        let spent = spent.join().unwrap();
        assert!(cpu(&[own]).unwrap().nanoseconds >= before + spent);
    }
}
