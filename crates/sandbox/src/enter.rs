//! Running a command inside a mesh that somebody else started: in a pod, or where the control plane is.

use std::{
    ffi::OsString,
    fs::{self, File},
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
};

use nix::sched::{CloneFlags, setns};
use skysail_core::names::CONTROL_ADMIN_PORT;

use crate::{
    error::{Context as _, Error},
    isolate::exit_code,
    plan::BRIDGE,
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
    let file = |number: i32| format!("fd/{number}");
    enter(
        mesh,
        [file(handles.net), file(handles.uts), file(handles.mnt)],
        &format!("entering pod {}", pod.name),
    )?;
    here(command)
}

/// Runs a command beside the control plane, at whose address [`control`] it is reached, and returns its exit code.
///
/// # Errors
/// As with [`run`].
pub fn beside_control(mesh: &State, command: &[OsString]) -> Result<u8, Error> {
    let file = |name: &str| format!("ns/{name}");
    enter(mesh, ["net", "uts", "mnt"].map(file), &format!("entering mesh {}", mesh.name))?;
    here(command)
}

/// The control plane's address inside a mesh, for its admin pages.
pub fn control() -> SocketAddr {
    SocketAddr::from((BRIDGE, CONTROL_ADMIN_PORT))
}

/// Enters namespaces of a mesh; those of the network, the host's name and the mounts by their places under /proc.
fn enter(mesh: &State, [net, uts, mnt]: [String; 3], entering: &str) -> Result<(), Error> {
    let process = mesh.process;
    let open = |name: &str| {
        let path = format!("/proc/{process}/{name}");
        File::open(&path).context(format!("opening {path} (has it ended?)"))
    };
    let user = open("ns/user")?;
    // All are opened first: inside, /proc is another one.
    let others = [
        (open("ns/pid")?, CloneFlags::CLONE_NEWPID),
        (open("ns/ipc")?, CloneFlags::CLONE_NEWIPC),
        (open(&net)?, CloneFlags::CLONE_NEWNET),
        (open(&uts)?, CloneFlags::CLONE_NEWUTS),
        (open(&mnt)?, CloneFlags::CLONE_NEWNS),
    ];
    let here = std::env::current_dir().ok();
    let own = fs::metadata("/proc/self/ns/user").context("looking at this process's namespaces")?;
    let theirs = user.metadata().context("looking at the mesh's namespaces")?;
    if (own.dev(), own.ino()) != (theirs.dev(), theirs.ino()) {
        setns(&user, CloneFlags::CLONE_NEWUSER).context(entering)?;
    }
    for (file, kind) in others {
        setns(file, kind).context(entering)?;
    }
    // Entering a mount namespace leads to its root.
    if let Some(here) = here {
        let _ = std::env::set_current_dir(here);
    }
    Ok(())
}

/// Runs a command in the namespaces of this process.
fn here(command: &[OsString]) -> Result<u8, Error> {
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
