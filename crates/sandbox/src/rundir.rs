//! The run folder of a mesh, and the state file in it by which other commands find the mesh.
//!
//! The path is `$XDG_RUNTIME_DIR/skysail/NAME`, or `/tmp/skysail-UID/NAME`. Only its owner may read it, because it
//! holds keys.

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::LazyLock,
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    mount::{MntFlags, umount2},
    unistd::getuid,
};
use serde::{Deserialize, Serialize};

use crate::error::{Context as _, Error};

/// State of a running mesh, for other commands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Name of the mesh.
    pub name: String,
    /// Process id of the mesh's first process, in the host's PID namespace.
    pub(crate) process: u32,
    /// Process id of the control plane in the mesh's PID namespace, while it runs.
    pub control: Option<u32>,
    /// Folders and files of the configuration.
    #[serde(default)]
    pub config: Vec<PathBuf>,
    /// Pods of the mesh.
    pub pods: Vec<PodState>,
    /// Reasons why workloads have fewer pods than their replicas.
    #[serde(default)]
    pub refused: Vec<String>,
    /// A workload (`NAMESPACE/NAME`) and the URL of an HTTP service that it can call; `None` if there is none.
    #[serde(default)]
    pub example_call: Option<(String, String)>,
}

/// A pod of a running mesh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodState {
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// Kind of its workload.
    pub kind: String,
    /// Name of its workload.
    pub workload: String,
    /// Service account.
    pub account: String,
    /// IP address.
    pub address: String,
    /// True if the pod has a sidecar.
    pub sidecar: bool,
    /// Phase.
    #[serde(default)]
    pub phase: Phase,
    /// `Ok` if the pod is ready, and otherwise the reason.
    pub ready: Result<(), String>,
    /// Number of restarts of its programs.
    pub restarts: u32,
    /// Folder of its log files.
    pub logs: PathBuf,
    /// Names of its containers.
    #[serde(default)]
    pub containers: Vec<String>,
    /// Programs of the pod.
    pub programs: Vec<ProgramState>,
    pub(crate) handles: Option<Handles>,
    /// File descriptors of the mount namespaces that programs have beside the pod's, by program.
    #[serde(default)]
    pub(crate) mounts: BTreeMap<String, i32>,
}

/// Phase of a pod. Source: Kubernetes' `PodPhase`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// At least one container runs or will be started.
    #[default]
    Running,
    /// All containers have ended with exit code 0.
    Succeeded,
    /// All containers have ended, at least one of them with a failure.
    Failed,
}

impl PodState {
    /// Returns whether the pod is ready or has succeeded.
    pub fn is_healthy(&self) -> bool {
        self.ready.is_ok() || self.phase == Phase::Succeeded
    }
}

/// File descriptors of a pod's namespaces, by which other processes find them under /proc.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Handles {
    pub(crate) net: i32,
    pub(crate) mnt: i32,
    pub(crate) uts: i32,
}

/// A program of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramState {
    /// Name of the container, or `proxy`.
    pub name: String,
    /// Process id in the mesh's PID namespace, while it runs.
    pub process: Option<u32>,
}

/// Lock of a mesh's name, held while the mesh runs.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

/// Returns the folder that holds the run folders of this user. The first call decides, because the user id is another
/// one once the process has entered the user namespace of a mesh.
pub(crate) fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| Path::new(folder).is_dir()) {
            Some(folder) => Path::new(&folder).join("skysail"),
            None => PathBuf::from(format!("/tmp/skysail-{}", getuid())),
        }
    });
    &ROOT
}

/// Creates an empty run folder for a mesh of this name and locks it.
///
/// # Errors
/// When the name is invalid, a mesh of this name runs already, or another user owns the folder.
pub fn create(name: &str) -> Result<(PathBuf, Lock), Error> {
    let simple = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.');
    if name.is_empty() || name.starts_with('.') || !simple {
        return Err(Error::Refused(format!(
            "invalid mesh name {name:?}: use letters, digits, '-', '_' and '.', but no '.' at the beginning"
        )));
    }
    let root = root();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(root)
        .context(format!("making {}", root.display()))?;
    let data = fs::symlink_metadata(root).context(format!("looking at {}", root.display()))?;
    if !data.is_dir() || data.uid() != getuid().as_raw() {
        let what = format!(
            "{} belongs to another user; set XDG_RUNTIME_DIR to a folder that you own",
            root.display()
        );
        return Err(Error::Refused(what));
    }
    fs::set_permissions(root, Permissions::from_mode(0o700)).context("keeping the folder private")?;
    let path = lock_file(root, name);
    let file = File::create(&path).context(format!("making {}", path.display()))?;
    let file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => {
            Error::Refused(format!("a mesh named {name} is already running; choose another --name"))
        }
        errno => Error::System { what: format!("locking {}", path.display()), cause: errno.into() },
    })?;
    let folder = root.join(name);
    remove(&folder).context(format!("clearing {}", folder.display()))?;
    DirBuilder::new().mode(0o700).create(&folder).context(format!("making {}", folder.display()))?;
    Ok((folder, Lock { _file: file }))
}

fn lock_file(root: &Path, name: &str) -> PathBuf {
    root.join(format!(".{name}.lock"))
}

/// Removes a run folder.
///
/// # Errors
/// When a file in it cannot be removed.
pub fn remove(folder: &Path) -> io::Result<()> {
    unmount_claims(folder);
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes all of a mesh's folder except the logs: keys, tokens and the user's files.
///
/// # Errors
/// When a file cannot be removed.
pub fn keep_logs(folder: &Path) -> io::Result<()> {
    unmount_claims(folder);
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name() == LOGS {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Unmounts the folders of PersistentVolumeClaims. The outer process shares the mount namespace of the mesh.
fn unmount_claims(folder: &Path) {
    for claim in fs::read_dir(folder.join(CLAIMS)).into_iter().flatten().flatten() {
        // It fails in another process, where nothing is mounted.
        let _ = umount2(&claim.path(), MntFlags::MNT_DETACH);
    }
}

/// Folder of the logs, in a mesh's folder.
const LOGS: &str = "logs";
/// Folder of the volumes that outlive pods.
pub(crate) const CLAIMS: &str = "claims";

/// Returns the state of a running mesh: the one of this name, or the only one.
///
/// # Errors
/// When no such mesh runs, or several run and no name is given.
pub fn find(name: Option<&str>) -> Result<State, Error> {
    let root = root();
    let folders = fs::read_dir(root).into_iter().flatten().filter_map(Result::ok);
    let running: Vec<State> =
        folders.filter_map(|entry| read(&entry.path()).ok().filter(State::is_alive)).collect();
    let chosen: Vec<&State> =
        running.iter().filter(|state| name.is_none_or(|name| name == state.name)).collect();
    match chosen.as_slice() {
        [state] => Ok((*state).clone()),
        [] => {
            let named = name.map(|name| format!(" named {name}")).unwrap_or_default();
            Err(Error::Refused(format!("no mesh{named} is running; start one with `skysail up DIR`")))
        }
        several => {
            let names: Vec<_> = several.iter().map(|state| state.name.as_str()).collect();
            Err(Error::Refused(format!(
                "several meshes are running ({}): choose with --name",
                names.join(", ")
            )))
        }
    }
}

impl State {
    /// Returns whether the mesh runs. The outer process holds the lock until the end.
    fn is_alive(&self) -> bool {
        let Ok(file) = File::open(lock_file(root(), &self.name)) else { return false };
        matches!(Flock::lock(file, FlockArg::LockSharedNonblock), Err((_, Errno::EWOULDBLOCK)))
    }

    /// Returns whether `later` is a state of this run, and not of another mesh with the same name.
    pub fn is_same_run(&self, later: &Self) -> bool {
        self.process == later.process
    }

    /// Returns the objects that the mesh has written to this file for its control plane.
    pub(crate) fn generated(&self, file: &str) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(root().join(&self.name).join(file)).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Returns the folder of its programs' logs.
    pub fn logs(&self) -> PathBuf {
        root().join(&self.name).join("logs")
    }

    /// Returns the pods of the workload, or the pod, with this name, `NAME` or `NAMESPACE/NAME`.
    pub fn matching(&self, name: &str) -> Vec<&PodState> {
        let (namespace, name) = match name.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, name),
        };
        let pods =
            self.pods.iter().filter(|pod| namespace.is_none_or(|namespace| namespace == pod.namespace));
        pods.filter(|pod| pod.workload == name || pod.name == name).collect()
    }
}

fn read(folder: &Path) -> io::Result<State> {
    Ok(serde_json::from_slice(&fs::read(folder.join("state.json"))?)?)
}

/// Replaces a file atomically: readers see the old content or the new.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{name}.new"));
    fs::write(&new, content)?;
    fs::rename(new, path)
}
