//! Running a command inside a pod of a mesh that somebody else started.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
};

use nix::sched::{CloneFlags, setns};

use crate::{
    error::{Context as _, Error},
    isolate::exit_code,
    rundir::{PodState, State},
};

/// Runs a command in a pod's namespaces and returns its exit code.
///
/// The process must have one thread only (the kernel wants that for user namespaces).
///
/// # Errors
/// When the pod is gone or the command cannot be started.
pub fn run(mesh: &State, pod: &PodState, command: &[OsString]) -> Result<u8, Error> {
    let handles = pod.handles.ok_or_else(|| Error::Refused(format!("pod {} is not there yet", pod.name)))?;
    let process = mesh.process;
    let open = |path: String| File::open(&path).context(format!("opening {path} (has the pod ended?)"));
    let user = open(format!("/proc/{process}/ns/user"))?;
    // All are opened first: inside, /proc is another one.
    let others = [
        (open(format!("/proc/{process}/ns/pid"))?, CloneFlags::CLONE_NEWPID),
        (open(format!("/proc/{process}/ns/ipc"))?, CloneFlags::CLONE_NEWIPC),
        (open(format!("/proc/{process}/fd/{}", handles.net))?, CloneFlags::CLONE_NEWNET),
        (open(format!("/proc/{process}/fd/{}", handles.uts))?, CloneFlags::CLONE_NEWUTS),
        (open(format!("/proc/{process}/fd/{}", handles.mnt))?, CloneFlags::CLONE_NEWNS),
    ];
    let here = std::env::current_dir().ok();
    let own = fs::metadata("/proc/self/ns/user").context("looking at this process's namespaces")?;
    let theirs = user.metadata().context("looking at the mesh's namespaces")?;
    let entering = format!("entering pod {}", pod.name);
    if (own.dev(), own.ino()) != (theirs.dev(), theirs.ino()) {
        setns(&user, CloneFlags::CLONE_NEWUSER).context(&entering)?;
    }
    for (file, kind) in others {
        setns(file, kind).context(&entering)?;
    }
    // Entering a mount namespace leads to its root.
    if let Some(here) = here {
        let _ = std::env::set_current_dir(here);
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(wait_for(command))
}

/// The command's child of this process; a Ctrl-C is for it to answer.
async fn wait_for(command: &[OsString]) -> Result<u8, Error> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Error::Refused("there is no command to run".to_owned()));
    };
    let mut child = tokio::process::Command::new(program)
        .args(arguments)
        .spawn()
        .map_err(|cause| Error::Command { program: program.to_string_lossy().into_owned(), cause })?;
    loop {
        tokio::select! {
            status = child.wait() => return status.map(exit_code).context("waiting for the command"),
            _ = tokio::signal::ctrl_c() => {}
        }
    }
}
