//! Watches folders of configuration files, and single files.
//!
//! Any event causes a scan of all files, which finds the differences. Events only trigger scans, so lost,
//! merged and misleading events do no harm. For example, editors rename files, and copy tools truncate them
//! first. Two cases need care:
//!
//! - A file that is being written is incomplete, and reading it would remove objects that are still to come. The scan
//!   therefore waits until the writer closes the file, up to a limit.
//! - A folder can vanish and come back, so a scan also happens at intervals without an event.
//!
//! A file is read again only if its metadata differ, or are too recent to prove that the file is unchanged.
//!
//! A folder that cannot be read is reported by name. The files last read in it stay in effect until it can be
//! read again. Removing a subfolder removes its files, but if a path that was given to [`Folders::new`] is
//! missing, its files stay in effect. All other folders are still watched. Symbolic links to folders are followed, and
//! each folder is read once, so cycles do no harm.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs,
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use nix::libc::O_NONBLOCK;
use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode, CreateKind, ModifyKind},
};
use skysail_core::fingerprint;
use tokio::{
    sync::{Notify, mpsc},
    task::{JoinError, spawn_blocking},
    time::{Instant, timeout_at},
};
use tracing::{info, warn};

/// Time without events that ends a burst of changes. One scan handles the whole burst.
const SETTLE: Duration = Duration::from_millis(5);
/// Maximum time that a file may stay open for writing before it is read as it is.
const MAX_WAIT: Duration = Duration::from_millis(500);
/// Interval of scans without an event.
const SCAN_INTERVAL: Duration = Duration::from_secs(10);
/// Granularity of file system clocks: a second change within this time may leave the metadata unchanged.
const CLOCK_GRANULARITY: Duration = Duration::from_secs(2);
/// Maximum size of a file in bytes. A parsed file takes up to 30 times its size in memory.
pub const MAX_FILE: u64 = 32 << 20;

/// New state of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileChange {
    /// Index of the folder that the file is in; later folders take precedence.
    pub layer: usize,
    /// Path of the file.
    pub path: String,
    /// Current state of the file.
    pub state: FileState,
}

/// State of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileState {
    /// The file has this text.
    Text(String),
    /// The file or folder cannot be read, or a path that was given to [`Folders::new`] is missing. The content that was
    /// last read stays in effect.
    Unreadable(String),
    /// The file was removed.
    Deleted,
}

/// Folders of files and the state found by the last scan.
pub struct Folders {
    folders: Vec<PathBuf>,
    seen: FileStates,
    walked: FolderIds,
}

/// Last state of each file, by folder index and path.
type FileStates = BTreeMap<(usize, PathBuf), File>;

/// Folders that were read, each with an id that differs if another folder takes its place.
type FolderIds = BTreeMap<PathBuf, FolderId>;

/// Device and inode of a folder.
type FolderId = (u64, u64);

fn folder_id(metadata: &fs::Metadata) -> FolderId {
    (metadata.dev(), metadata.ino())
}

/// Last state of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct File {
    content: Content,
    /// Metadata that prove the file unchanged; absent if they are too recent for that.
    stamp: Option<FileMetadata>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    /// Fingerprint of the text.
    Text(u64),
    Unreadable(String),
}

/// Metadata of a file, which differ after a change or replacement.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileMetadata {
    changed: (i64, i64),
    length: u64,
    device: u64,
    inode: u64,
}

impl FileMetadata {
    /// Returns the metadata that were read at `at`, or `None` if they are too recent to prove that a file is unchanged.
    fn of(metadata: &fs::Metadata, at: SystemTime) -> Option<Self> {
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        let seconds = u64::try_from(changed.0).ok()?;
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds + 1))?;
        let old = at.duration_since(time).is_ok_and(|age| age > CLOCK_GRANULARITY);
        let (length, device, inode) = (metadata.len(), metadata.dev(), metadata.ino());
        old.then_some(Self { changed, length, device, inode })
    }
}

impl Folders {
    /// Creates the set of folders; no file is seen yet.
    ///
    /// # Errors
    /// Fails if a path cannot be read. Also fails if a folder below it cannot be read, or a file there for lack of
    /// permission, because either may hold a policy.
    pub fn new(folders: &[PathBuf]) -> io::Result<Self> {
        let (seen, walked) = (FileStates::new(), FolderIds::new());
        let mut scan = Scan::new(&seen);
        for (layer, folder) in folders.iter().enumerate() {
            scan.collect(folder, layer);
        }
        if let Some((path, error)) = scan.failed {
            let text = format!("configuration {} cannot be read: {error}", path.display());
            return Err(io::Error::new(error.kind(), text));
        }
        Ok(Self { folders: folders.to_vec(), seen, walked })
    }

    /// Scans everything and returns the differences from the last scan.
    pub fn scan(&mut self) -> Vec<FileChange> {
        let mut scan = Scan::new(&self.seen);
        for (layer, folder) in self.folders.iter().enumerate() {
            scan.collect(folder, layer);
        }
        let Scan { now, changes, walked, .. } = scan;
        // Removals come first, since a removed object may now be in another file.
        let removed = self.seen.keys().filter(|key| !now.contains_key(*key));
        let removed = removed.map(|(layer, path)| change(*layer, path, FileState::Deleted));
        let changes = removed.chain(changes).collect();
        (self.seen, self.walked) = (now, walked);
        changes
    }

    /// Scans after events and at intervals, and passes the differences to `changed`, which may block. Runs until
    /// dropped.
    ///
    /// # Errors
    /// Fails if a scan panicked.
    pub async fn watch(
        mut self,
        changed: impl Fn(Vec<FileChange>) + Send + Sync + 'static,
    ) -> Result<(), JoinError> {
        let changed = Arc::new(changed);
        let (sender, mut events) = mpsc::unbounded_channel();
        let mut watch =
            Watch { events: sender, watcher: None, folders: FolderIds::new(), is_complete: false };
        loop {
            // The watch begins before the scan, so that a change which the scan misses causes an event.
            let follow = move || {
                let is_new = watch.follow(&self.walked);
                (self, watch, is_new)
            };
            let is_new;
            (self, watch, is_new) = spawn_blocking(follow).await?;
            if is_new {
                // The files of a new folder may not be complete yet.
                watch.is_complete &= settle(&mut events, &watch.folders, SETTLE).await;
            }
            let changed = Arc::clone(&changed);
            let scan = move || {
                let changes = self.scan();
                if !changes.is_empty() {
                    changed(changes);
                }
                self
            };
            self = spawn_blocking(scan).await?;
            if self.walked == watch.folders {
                watch.is_complete &= settle(&mut events, &watch.folders, SCAN_INTERVAL).await;
            }
        }
    }
}

/// Watch on all folders that were read.
struct Watch {
    events: mpsc::UnboundedSender<notify::Result<Event>>,
    /// Watches each folder separately: a recursive watch would end at a folder that cannot be read.
    watcher: Option<RecommendedWatcher>,
    folders: FolderIds,
    /// Whether all folders are watched.
    is_complete: bool,
}

impl Watch {
    /// Watches these folders. Returns whether they differ from those watched before.
    fn follow(&mut self, folders: &FolderIds) -> bool {
        let is_other = self.folders != *folders;
        if self.is_complete && !is_other {
            return false;
        }
        self.folders.clone_from(folders);
        let watched = self.watch();
        self.is_complete = watched.is_ok();
        match watched {
            Err(error) => {
                warn!(%error, "configuration cannot be watched; scanning it every {SCAN_INTERVAL:?}");
            }
            Ok(()) if is_other => info!(folders = folders.len(), "watching configuration"),
            Ok(()) => {}
        }
        is_other
    }

    fn watch(&mut self) -> notify::Result<()> {
        let events = self.events.clone();
        let watcher = notify::recommended_watcher(move |event| {
            if !is_reading(&event) {
                let _ = events.send(event);
            }
        })?;
        let watcher = self.watcher.insert(watcher);
        // A folder that cannot be watched does not end the watches of other folders.
        let watch = |folder: &PathBuf| match watcher.watch(folder, RecursiveMode::NonRecursive) {
            // The folder was removed after the scan; the next scan notices that.
            Err(error) if matches!(error.kind, notify::ErrorKind::PathNotFound) => Ok(()),
            watched => watched,
        };
        self.folders.keys().map(watch).fold(Ok(()), Result::and)
    }
}

/// Notifies of every change in a folder while the returned watcher lives. Returns `None` if the folder cannot be
/// watched.
pub fn watch_folder(folder: &Path, changed: &Arc<Notify>) -> Option<RecommendedWatcher> {
    let changed = Arc::clone(changed);
    let watcher = notify::recommended_watcher(move |event| {
        if !is_reading(&event) {
            changed.notify_one();
        }
    });
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let watched =
        watcher.and_then(|mut watcher| watcher.watch(folder, RecursiveMode::NonRecursive).map(|()| watcher));
    let log = |error| {
        warn!(folder = %folder.display(), %error, "folder cannot be watched; scanning it every {SCAN_INTERVAL:?}");
    };
    watched.map_err(log).ok()
}

/// Returns whether an event only says that a file was read. The scan's own reads cause such events too, so each scan
/// would otherwise cause another.
fn is_reading(event: &notify::Result<Event>) -> bool {
    let kind = event.as_ref().map(|event| event.kind);
    matches!(kind, Ok(EventKind::Access(access)) if access != AccessKind::Close(AccessMode::Write))
}

/// Waits up to `wait` for an event, then until no more follow and no file is being written. Returns whether the
/// `folders` are still watched.
async fn settle(
    events: &mut mpsc::UnboundedReceiver<notify::Result<Event>>,
    folders: &FolderIds,
    wait: Duration,
) -> bool {
    let mut state = EventState { folders, writing: HashSet::new(), are_watched: true };
    // The watcher lives as long as this wait, so the channel does not close.
    match tokio::time::timeout(wait, events.recv()).await {
        Ok(Some(event)) => state.record(event),
        Ok(None) => return std::future::pending().await,
        Err(_) => return true,
    }
    let limit = Instant::now() + MAX_WAIT;
    loop {
        let deadline = if state.writing.is_empty() { (Instant::now() + SETTLE).min(limit) } else { limit };
        match timeout_at(deadline, events.recv()).await {
            Ok(Some(event)) => state.record(event),
            Ok(None) | Err(_) => return state.are_watched,
        }
    }
}

/// State collected from events.
struct EventState<'a> {
    folders: &'a FolderIds,
    /// Files being written.
    writing: HashSet<PathBuf>,
    /// False once a folder was removed or renamed. That ends its watch, even if another folder takes its name.
    are_watched: bool,
}

impl EventState<'_> {
    fn record(&mut self, event: notify::Result<Event>) {
        let Ok(event) = event else { return };
        match event.kind {
            EventKind::Create(CreateKind::File) | EventKind::Modify(ModifyKind::Data(_)) => {
                self.writing.extend(event.paths);
            }
            EventKind::Access(AccessKind::Close(AccessMode::Write))
            | EventKind::Remove(_)
            | EventKind::Modify(ModifyKind::Name(_)) => {
                for path in &event.paths {
                    self.writing.remove(path);
                    self.are_watched &= !self.folders.contains_key(path);
                }
            }
            // Events were lost.
            _ if event.need_rescan() => self.are_watched = false,
            _ => {}
        }
    }
}

fn change(layer: usize, path: &Path, state: FileState) -> FileChange {
    FileChange { layer, path: path.display().to_string(), state }
}

/// A scan of everything.
struct Scan<'a> {
    before: &'a FileStates,
    now: FileStates,
    /// Files that exist and differ from the last scan.
    changes: Vec<FileChange>,
    walked: FolderIds,
    /// First error that makes [`Folders::new`] fail, and its folder or file.
    failed: Option<(PathBuf, io::Error)>,
}

/// Folders of a layer that are still to be read.
#[derive(Default)]
struct Pending {
    folders: Vec<PathBuf>,
    /// Symbolic links to folders. They are read last and in order, so that a folder always has the same path.
    links: BTreeSet<PathBuf>,
    known: HashSet<FolderId>,
}

impl<'a> Scan<'a> {
    fn new(before: &'a FileStates) -> Self {
        Self { before, now: FileStates::new(), changes: Vec::new(), walked: FolderIds::new(), failed: None }
    }

    /// Reads one named file, or the configuration files of a folder and its subfolders.
    fn collect(&mut self, root: &Path, layer: usize) {
        if !root.is_dir() {
            if let Err(error) = self.file(root, layer) {
                self.unreadable(root, layer, &error);
                self.failed.get_or_insert((root.to_owned(), error));
            }
            self.walk_parent(root);
            return;
        }
        let mut pending = Pending { folders: vec![root.to_owned()], ..Pending::default() };
        while let Some(folder) = pending.folders.pop().or_else(|| pending.links.pop_first()) {
            match self.folder(&folder, layer, &mut pending) {
                // The folder was removed between listing and reading.
                Err(error) if error.kind() == io::ErrorKind::NotFound && folder != root => {}
                Err(error) => {
                    self.unreadable(&folder, layer, &error);
                    self.failed.get_or_insert((folder, error));
                }
                Ok(()) => {}
            }
        }
        if !self.walked.contains_key(root) {
            self.walk_parent(root);
        }
    }

    /// Adds the parent of a file, or of a missing folder, to the folders to watch.
    fn walk_parent(&mut self, root: &Path) {
        let parent = root.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        if let Ok(metadata) = fs::metadata(parent) {
            self.walked.insert(parent.to_owned(), folder_id(&metadata));
        }
    }

    /// Reads the configuration files of a folder and finds its subfolders. Hidden entries are skipped: they belong to
    /// editors or to Kubernetes (`..data`).
    fn folder(&mut self, folder: &Path, layer: usize, pending: &mut Pending) -> io::Result<()> {
        let id = folder_id(&fs::metadata(folder)?);
        if !pending.known.insert(id) {
            return Ok(());
        }
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let listed = entry.file_type()?;
            let extension = path.extension().and_then(|extension| extension.to_str());
            match fs::metadata(&path) {
                Ok(metadata) if metadata.is_dir() && listed.is_symlink() => _ = pending.links.insert(path),
                Ok(metadata) if metadata.is_dir() => pending.folders.push(path),
                Err(error) if error.kind() != io::ErrorKind::NotFound && !listed.is_file() => {
                    self.unreadable(&path, layer, &error);
                    self.failed.get_or_insert((path, error));
                }
                // The target of the link was removed, the link itself was not.
                Err(error) if listed.is_symlink() && fs::symlink_metadata(&path).is_ok() => {
                    let error = io::Error::new(error.kind(), "a symbolic link whose target does not exist");
                    self.unreadable(&path, layer, &error);
                }
                _ if matches!(extension, Some("yaml" | "yml" | "json")) => {
                    if listed.is_symlink()
                        && let Ok(target) = fs::canonicalize(&path)
                    {
                        self.walk_parent(&target);
                    }
                    if let Err(error) = self.file(&path, layer)
                        // Otherwise the file was removed between listing and reading.
                        && error.kind() != io::ErrorKind::NotFound
                    {
                        self.unreadable(&path, layer, &error);
                        if error.kind() == io::ErrorKind::PermissionDenied {
                            self.failed.get_or_insert((path, error));
                        }
                    }
                }
                _ => {}
            }
        }
        self.walked.insert(folder.to_owned(), id);
        Ok(())
    }

    /// Keeps the last state of a file that cannot be read, or of the files in such a folder.
    fn unreadable(&mut self, path: &Path, layer: usize, error: &io::Error) {
        let key = (layer, path.to_owned());
        let reason = error.to_string();
        let content = Content::Unreadable(reason.clone());
        if self.before.get(&key).is_none_or(|before| before.content != content) {
            self.changes.push(change(layer, path, FileState::Unreadable(reason)));
        }
        let within = self.before.range(key.clone()..);
        let within = within.take_while(|((of, file), _)| *of == layer && file.starts_with(path));
        for (file, before) in within {
            self.now.entry(file.clone()).or_insert_with(|| before.clone());
        }
        self.now.insert(key, File { content, stamp: None });
    }

    /// Reads a file unless its metadata prove that it is unchanged.
    fn file(&mut self, path: &Path, layer: usize) -> io::Result<()> {
        let at = SystemTime::now();
        let stamp = FileMetadata::of(&fs::metadata(path)?, at);
        let key = (layer, path.to_owned());
        let before = self.before.get(&key);
        if let Some(before) = before.filter(|before| stamp.is_some() && before.stamp == stamp) {
            self.now.insert(key, before.clone());
            return Ok(());
        }
        // Without O_NONBLOCK, opening a FIFO without a writer would block for ever and end the watch.
        let mut file = fs::OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        let mut text = String::new();
        file.by_ref().take(MAX_FILE).read_to_string(&mut text)?;
        if file.read(&mut [0])? > 0 {
            let text = format!("it is larger than {} MiB: split it", MAX_FILE >> 20);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
        }
        let content = Content::Text(fingerprint(&text));
        if before.is_none_or(|before| before.content != content) {
            self.changes.push(change(layer, path, FileState::Text(text)));
        }
        self.now.insert(key, File { content, stamp });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
