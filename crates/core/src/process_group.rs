//! Ends a child process together with all processes that it has started.

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

/// Guard of a process group, for example of a probe's command. It kills the group's processes on drop, including when
/// the future that waits for the command is dropped.
///
/// Drop it before the `Child`: the ID of the group is reserved only until the exited leader has been waited for.
#[derive(Debug)]
pub struct ProcessGroup(Option<Pid>);

impl ProcessGroup {
    /// Returns the group of a child that was started with `process_group(0)`; `leader` is the child's process ID.
    pub fn new(leader: Option<u32>) -> Self {
        let leader = leader.and_then(|id| i32::try_from(id).ok()).filter(|id| *id > 0);
        Self(leader.map(Pid::from_raw))
    }

    /// Consumes the guard without killing the remaining processes of the group.
    pub fn release(mut self) {
        self.0 = None;
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It fails if no process is left, which is the usual case.
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}
