//! Entering a running mesh from another process: the namespaces of a pod or of the control plane.

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
    networks::BRIDGE,
    rundir::{PodState, State},
};

/// Namespaces of a running mesh.
#[derive(Clone, Copy, Debug)]
pub enum EnterTarget<'a> {
    /// Those of a pod.
    Pod(&'a PodState),
    /// Those of the control plane, whose admin pages are at [`control_address`].
    Control,
}

/// Runs a command in these namespaces, with the files of a container if one is given, and returns its exit code.
///
/// # Errors
/// Those of [`enter`], and when the command cannot be started.
pub fn run(
    mesh: &State,
    target: EnterTarget<'_>,
    container: Option<&str>,
    command: &[OsString],
) -> Result<u8, Error> {
    let mut namespaces = vec![
        ("ns/pid".to_owned(), CloneFlags::CLONE_NEWPID),
        ("ns/ipc".to_owned(), CloneFlags::CLONE_NEWIPC),
    ];
    namespaces.extend(target.handles()?);
    // Must follow the pod's: the last one is in effect.
    let mounts = match (target, container) {
        (EnterTarget::Pod(pod), Some(container)) => pod.mounts.get(container),
        _ => None,
    };
    namespaces.extend(mounts.map(|number| (format!("fd/{number}"), CloneFlags::CLONE_NEWNS)));
    target.enter(mesh, namespaces)?;
    here(command)
}

/// Moves this process to the user, network, host name and mount namespaces.
///
/// The process must have one thread only, because the kernel requires that for user namespaces. It may start threads
/// afterwards, because it does not enter the PID namespace.
///
/// # Errors
/// When the pod has not started yet, or the pod or the mesh has ended.
pub fn enter(mesh: &State, target: EnterTarget<'_>) -> Result<(), Error> {
    target.enter(mesh, target.handles()?.into())
}

/// Moves this process to the user and network namespaces. Open sockets stay in the network namespace in which they were
/// created.
///
/// # Errors
/// Those of [`enter`], which has the same condition.
pub fn enter_network(mesh: &State, target: EnterTarget<'_>) -> Result<(), Error> {
    let [net, ..] = target.handles()?;
    target.enter(mesh, vec![net])
}

/// Returns the address of the control plane's admin pages inside a mesh.
pub fn control_address() -> SocketAddr {
    SocketAddr::from((BRIDGE, CONTROL_ADMIN_PORT))
}

impl EnterTarget<'_> {
    /// Returns the network, host name and mount namespaces, by their files in /proc of the mesh's process.
    fn handles(self) -> Result<[(String, CloneFlags); 3], Error> {
        let [net, uts, mnt] = match self {
            Self::Pod(pod) => {
                let not_yet = || Error::Refused(format!("pod {} has not started yet", pod.name));
                let handles = pod.handles.ok_or_else(not_yet)?;
                [handles.net, handles.uts, handles.mnt].map(|number| format!("fd/{number}"))
            }
            Self::Control => ["net", "uts", "mnt"].map(|name| format!("ns/{name}")),
        };
        Ok([(net, CloneFlags::CLONE_NEWNET), (uts, CloneFlags::CLONE_NEWUTS), (mnt, CloneFlags::CLONE_NEWNS)])
    }

    /// Enters namespaces, after the user namespace that owns them.
    fn enter(self, mesh: &State, namespaces: Vec<(String, CloneFlags)>) -> Result<(), Error> {
        let process = mesh.process;
        let entering = match self {
            Self::Pod(pod) => format!("entering pod {}", pod.name),
            Self::Control => format!("entering mesh {}", mesh.name),
        };
        let open = |name: &str| {
            let path = format!("/proc/{process}/{name}");
            File::open(&path).context(format!("opening {path} (has it ended?)"))
        };
        let user = open("ns/user")?;
        // All files are opened first, because /proc is another one inside.
        let opened = namespaces.iter().map(|(name, kind)| Ok((open(name)?, *kind)));
        let opened = opened.collect::<Result<Vec<_>, Error>>()?;
        let own = fs::metadata("/proc/self/ns/user").context("looking at this process's namespaces")?;
        let theirs = user.metadata().context("looking at the mesh's namespaces")?;
        if (own.dev(), own.ino()) != (theirs.dev(), theirs.ino()) {
            setns(&user, CloneFlags::CLONE_NEWUSER).context(&entering)?;
        }
        let here = std::env::current_dir().ok();
        opened.into_iter().try_for_each(|(file, kind)| setns(file, kind).context(&entering))?;
        // Entering a mount namespace changes the working directory to its root.
        if let Some(here) = here {
            let _ = std::env::set_current_dir(here);
        }
        Ok(())
    }
}

/// Runs a command in the namespaces of this process.
fn here(command: &[OsString]) -> Result<u8, Error> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(wait_for(command))
}

/// Starts a command and waits for its end. A Ctrl-C is left to the command.
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
