//! Maximum number of pods, computed from the machine's memory, open files and tasks.

use std::{fmt, fs};

use nix::sys::resource::{Resource, getrlimit};

/// Upper limit on pods of a mesh: a bridge takes 1,023 links (linux/br_private.h).
const MAX_PODS: usize = 1000;
/// Memory of a pod with a sidecar, in bytes. An idle one takes 6.6 MB (docs/performance.md); the rest is for traffic.
const MEMORY: u64 = 16 << 20;
/// Memory of a pod without a sidecar, in bytes.
const MEMORY_PLAIN: u64 = 8 << 20;
/// Divisor of the free memory that gives the reserve: one fifth.
const RESERVE_DIVISOR: u64 = 5;
/// Open files of the mesh's process per pod: three namespaces, a runtime, pipes, logs and probes.
const FILES: u64 = 20;
/// Open files of the mesh's process that belong to no pod.
const OWN_FILES: u64 = 256;
/// Threads and processes per pod: its supervisor, its sidecar's and its container's.
const TASKS: u64 = 8;

/// Maximum number of pods and the resource that limits it.
#[derive(Clone, Debug)]
pub struct Capacity {
    /// Maximum number of pods.
    pub pods: usize,
    /// Reason for the number, for messages.
    limit: String,
}

impl Capacity {
    /// Computes the limit from this machine's memory, open files and tasks; `allowed` replaces it. `is_plain` tells
    /// whether pods have no sidecars.
    pub fn of_machine(allowed: Option<usize>, is_plain: bool) -> Self {
        if let Some(pods) = allowed {
            return Self { pods: pods.min(MAX_PODS), limit: "--max-pods".to_owned() };
        }
        let mut capacity = Self { pods: MAX_PODS, limit: "the maximum of a network bridge".to_owned() };
        let each = if is_plain { MEMORY_PLAIN } else { MEMORY };
        if let Some(free) = free_memory() {
            let usable = free - free / RESERVE_DIVISOR;
            capacity.at_most(usable / each, format!("{} MB of memory are free", free >> 20));
        }
        // The hard limit: a process may raise its soft limit to it.
        if let Ok((_, files)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let pods = files.saturating_sub(OWN_FILES) / FILES;
            capacity.at_most(pods, format!("a process may have {files} files open (ulimit -Hn)"));
        }
        if let Some(tasks) = max_tasks() {
            capacity.at_most(tasks / TASKS, format!("{tasks} processes and threads are allowed (pids.max)"));
        }
        capacity
    }

    fn at_most(&mut self, pods: u64, limit: String) {
        let pods = usize::try_from(pods).unwrap_or(usize::MAX);
        if pods < self.pods {
            *self = Self { pods, limit };
        }
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pods ({})", self.pods, self.limit)
    }
}

/// Returns the memory available without swapping, in bytes: the machine's or the control group's, whichever is less.
fn free_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let machine = line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10;
    let number = |file: &str| fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse().ok();
    let group = number("memory.max")
        .zip(number("memory.current"))
        .map(|(max, now): (u64, u64)| max.saturating_sub(now));
    Some(group.map_or(machine, |group| group.min(machine)))
}

/// Returns the control group's limit on processes and threads.
fn max_tasks() -> Option<u64> {
    fs::read_to_string("/sys/fs/cgroup/pids.max").ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcest_resource_sets_the_limit_and_is_named() {
        let mut capacity = Capacity { pods: MAX_PODS, limit: "a".to_owned() };
        capacity.at_most(20, "b".to_owned());
        capacity.at_most(30, "c".to_owned());
        assert_eq!(capacity.to_string(), "20 pods (b)");
        assert_eq!(Capacity::of_machine(Some(5000), false).to_string(), "1000 pods (--max-pods)");
        assert!((1..=MAX_PODS).contains(&Capacity::of_machine(None, false).pods));
    }
}
