//! Files that a container sees: this machine's files, and its volumes mounted over them.
//!
//! A mount point need not exist on this machine, and must not be created there. Therefore a container with volumes gets
//! a root of its own, as in rootless container runtimes. It is a tmpfs with a bind mount for each entry of this
//! machine's root. A folder that lacks a mount point is covered by a tmpfs in the same way. Overlays would need fewer
//! mounts, but they hide the mounts below them, and not every file system and kernel allows them in a user namespace.

use std::{
    collections::BTreeSet,
    fs::{self, File, Permissions},
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::{Component, Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::stat::{Mode, mkdirat},
    unistd::pivot_root,
};

/// Mount of a volume in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Name of the volume, for messages.
    pub(crate) volume: String,
    /// Folder of the volume.
    pub(crate) source: PathBuf,
    /// Path in the volume that is mounted; empty for the whole volume.
    pub(crate) sub_path: PathBuf,
    /// True if a missing `sub_path` is created.
    pub(crate) makes: bool,
    pub(crate) target: PathBuf,
    pub(crate) read_only: bool,
}

/// Files that the programs of a container see, and their working directory.
#[derive(Debug, Default)]
pub(crate) struct View {
    mounts: Vec<Mount>,
    working_dir: Option<PathBuf>,
    /// Empty folder in which the new root is created.
    staging: PathBuf,
    /// Mount namespace of the program that was started last.
    namespace: Mutex<Option<File>>,
}

/// Mount point of the former root while the new one is set up.
const FORMER: &str = "/.skysail-former-root";
/// Size limit of a tmpfs that holds mount points only.
const POINTS: &str = "mode=0755,size=64m";
/// Maximum number of entries of a covered folder.
const MAX_ENTRIES: usize = 10_000;

impl View {
    pub(crate) fn new(mut mounts: Vec<Mount>, working_dir: Option<PathBuf>, staging: PathBuf) -> Self {
        // A mount below another volume must follow that volume.
        mounts.sort_by_key(|mount| mount.target.components().count());
        Self { mounts, working_dir, staging, namespace: Mutex::default() }
    }

    /// Mounts the volumes for a program that is about to start.
    pub(crate) fn renew(&self) -> io::Result<()> {
        if self.mounts.is_empty() {
            return Ok(());
        }
        // Runs on a separate thread, because after a failure its mount namespace is in an unknown state.
        let made = thread::scope(|scope| scope.spawn(|| self.make()).join());
        let made = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        *self.namespace.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
        Ok(())
    }

    /// Returns the file descriptor of the mount namespace, if there is a separate one.
    pub(crate) fn handle(&self) -> Option<i32> {
        self.namespace.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|file| file.as_raw_fd())
    }

    /// Runs a closure in the container's mount namespace and working directory. The closure must not leave this thread.
    pub(crate) fn within<T>(&self, action: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let namespace = self.namespace.lock().unwrap_or_else(PoisonError::into_inner);
        if namespace.is_none() && self.working_dir.is_none() {
            return action();
        }
        let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
        let outside = File::open("/proc/thread-self/ns/mnt")?;
        // The kernel requires that no other thread shares the root and the working directory.
        unshare(CloneFlags::CLONE_FS)?;
        if let Some(namespace) = &*namespace {
            setns(namespace.as_fd(), CloneFlags::CLONE_NEWNS)?;
        }
        let entered = match &self.working_dir {
            Some(folder) => std::env::set_current_dir(folder).map_err(|error| {
                io::Error::new(error.kind(), format!("workingDir {}: {error}", folder.display()))
            }),
            // A volume may hide the working directory of `skysail up`; the program then starts in the root.
            None => std::env::set_current_dir(&here).or(Ok(())),
        };
        let done = entered.and_then(|()| action());
        if namespace.is_some() {
            setns(outside.as_fd(), CloneFlags::CLONE_NEWNS)?;
        }
        std::env::set_current_dir(here)?;
        done
    }

    /// Creates the mount namespace, on the thread that enters it.
    fn make(&self) -> io::Result<File> {
        let about = |what: &str, error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
        let root = self.root().map_err(|error| about("cannot make a root for its volumes", error))?;
        let mut own = BTreeSet::from([root]);
        for mount in &self.mounts {
            let device = mount_volume(mount, &own).map_err(|error| {
                let what = format!("cannot mount volume {} at {}", mount.volume, mount.target.display());
                about(&what, error)
            })?;
            own.extend(device);
        }
        umount2(FORMER, MntFlags::MNT_DETACH)?;
        fs::remove_dir(FORMER)?;
        File::open("/proc/thread-self/ns/mnt")
    }

    /// Enters a root in memory with all entries of the former one. Returns its device.
    fn root(&self) -> io::Result<u64> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        fs::create_dir_all(&self.staging)?;
        tmpfs(&self.staging, POINTS)?;
        let former = self.staging.join(FORMER.trim_start_matches('/'));
        fs::create_dir(&former)?;
        pivot_root(&self.staging, &former)?;
        std::env::set_current_dir("/")?;
        fill(Path::new(FORMER), Path::new("/"))?;
        Ok(fs::metadata("/")?.dev())
    }
}

/// Mounts a tmpfs without devices and set-user-ID programs.
pub(crate) fn tmpfs(at: &Path, options: &str) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    Ok(mount(Some("tmpfs"), at, Some("tmpfs"), flags, Some(options))?)
}

pub(crate) fn bind(from: &Path, to: &Path, flags: MsFlags) -> io::Result<()> {
    let nothing: Option<&str> = None;
    Ok(mount(Some(from), to, nothing, MsFlags::MS_BIND | flags, nothing)?)
}

/// Bind-mounts each entry of a folder into another one, including the mounts below it.
fn fill(from: &Path, to: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(from) {
        // The program cannot read it either.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
        entries => entries?,
    };
    for (index, entry) in entries.enumerate() {
        if index == MAX_ENTRIES {
            let problem = format!("{} has more than {MAX_ENTRIES} entries", to.display());
            return Err(io::Error::other(problem));
        }
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
            continue;
        }
        if kind.is_dir() {
            fs::create_dir(&to)?;
        } else {
            File::create(&to)?;
        }
        // In a user namespace, a folder can only be bound together with the mounts below it.
        match bind(&from, &to, MsFlags::MS_REC) {
            // The entry was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            bound => {
                bound.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", to.display())))?;
            }
        }
    }
    Ok(())
}

/// Mounts a volume. `own` holds the devices of all file systems that were created here. Returns the devices that this
/// mount adds.
fn mount_volume(mount: &Mount, own: &BTreeSet<u64>) -> io::Result<Vec<u64>> {
    let source = source(mount)?;
    // By descriptor, because programs of the pod may replace a name.
    let by_number = by_number(&source);
    let found = fs::metadata(&by_number)?;
    let (target, covered) = mount_point(&mount.target, found.is_dir(), own)?;
    bind(&by_number, &target, MsFlags::empty())?;
    if mount.read_only {
        let kept = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | kept;
        let nothing: Option<&str> = None;
        nix::mount::mount(nothing, &target, nothing, flags, nothing)?;
    }
    Ok(covered.into_iter().chain([found.dev()]).collect())
}

/// Returns a path that leads to an open file.
fn by_number(file: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Opens the folder or file to mount. Symbolic links, which the pod's programs may have created, cannot lead out of the
/// volume.
fn source(mount: &Mount) -> io::Result<OwnedFd> {
    let former = Path::new(FORMER).join(mount.source.strip_prefix("/").unwrap_or(&mount.source));
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let volume = open(&former, flags | OFlag::O_DIRECTORY, Mode::empty())?;
    if mount.sub_path.as_os_str().is_empty() {
        return Ok(volume);
    }
    let beneath = OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    match openat2(&volume, &mount.sub_path, beneath) {
        Err(Errno::ENOENT) if mount.makes => {}
        Err(Errno::ENOENT) => {
            let problem = format!("subPath {}: the volume has no such file", mount.sub_path.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, problem));
        }
        Err(Errno::EXDEV) => {
            return Err(io::Error::other(format!(
                "subPath {} leads out of the volume",
                mount.sub_path.display()
            )));
        }
        opened => return Ok(opened?),
    }
    let one = OpenHow::new()
        .flags(flags | OFlag::O_DIRECTORY)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    let mut folder = volume;
    for part in &mount.sub_path {
        match mkdirat(&folder, part, Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        folder = openat2(&folder, part, one)?;
    }
    Ok(folder)
}

/// Creates a mount point if there is none, without a change of this machine's files. Returns its path without symbolic
/// links, and the device of the tmpfs that covers a folder for it.
fn mount_point(target: &Path, is_dir: bool, own: &BTreeSet<u64>) -> io::Result<(PathBuf, Option<u64>)> {
    if let Ok(there) = target.canonicalize() {
        return match there.is_dir() == is_dir {
            true => Ok((there, None)),
            false if is_dir => Err(io::Error::other("a folder cannot be mounted on a file")),
            false => Err(io::Error::other("a file cannot be mounted on a folder")),
        };
    }
    let mut missing = Vec::new();
    let mut at = target;
    let existing = loop {
        let (Some(parent), Some(Component::Normal(name))) = (at.parent(), at.components().next_back()) else {
            return Err(io::Error::other("not an absolute path"));
        };
        missing.push(name);
        at = parent;
        if let Ok(existing) = at.canonicalize() {
            break existing;
        }
    };
    if ["/proc", "/sys"].iter().any(|folder| existing.starts_with(folder)) {
        return Err(io::Error::other("there is no such folder, and it cannot be created there"));
    }
    let data = fs::metadata(&existing)?;
    let covered = match own.contains(&data.dev()) {
        true => None,
        false => Some(cover(&existing, data.permissions())?),
    };
    let mut made = existing;
    while let Some(name) = missing.pop() {
        made.push(name);
        if is_dir || !missing.is_empty() {
            fs::create_dir(&made)?;
        } else {
            File::create_new(&made)?;
        }
    }
    Ok((made, covered))
}

/// Covers a folder with a tmpfs that has the same entries. Returns its device.
fn cover(folder: &Path, permissions: Permissions) -> io::Result<u64> {
    // The entries of a covered folder, and the volumes mounted on them, are reached by its descriptor.
    let covered = open(folder, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    tmpfs(folder, POINTS)?;
    fill(&by_number(&covered), folder)?;
    fs::set_permissions(folder, Permissions::from_mode(permissions.mode()))?;
    Ok(fs::metadata(folder)?.dev())
}
