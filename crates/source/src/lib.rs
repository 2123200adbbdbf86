//! Configuration from folders of files, or single files, watched.
//!
//! Any event means: look at everything again and see what differs. Events only say when, so lost, merged and
//! misleading ones (editors rename, copy tools truncate first) do no harm. Two things need care. A file that is
//! being written is half there, and taking it would remove what is still to come; so the look waits until the
//! writer closes the file, up to a limit. And a folder can vanish and come back, so there is a look now and then
//! without any event. A file is read again only if its metadata differ, or are so young that they may not tell.
//!
//! A folder that cannot be read is an error by its name: what was read in it before stays in force until it can be read again or is
//! gone, and all others are followed. Symbolic links to folders are followed, and each folder is read once, so circles do no harm.

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

/// Changes that follow each other within this time are one.
const SETTLE: Duration = Duration::from_millis(5);
/// How long a file may stay open for writing before it is taken as it is.
const MAX_WAIT: Duration = Duration::from_millis(500);
/// How often to look without an event.
const LOOK: Duration = Duration::from_secs(10);
/// Clocks of file systems are coarse: a file may change again within this time without a trace in its metadata.
const COARSE: Duration = Duration::from_secs(2);
/// Largest file that is read, in bytes. A parsed file takes up to 30 times its size in memory.
pub const MAX_FILE: u64 = 32 << 20;

/// A file's new state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileChange {
    /// Which folder it is in; later ones win.
    pub layer: usize,
    /// Its path.
    pub path: String,
    /// What stands in it now.
    pub state: FileState,
}

/// What became of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileState {
    /// It has this text.
    Text(String),
    /// It is there but cannot be read; what was read of it before, or in it, stays.
    Unreadable(String),
    /// It is gone.
    Gone,
}

/// Folders of files and what was last seen in them.
pub struct Folders {
    folders: Vec<PathBuf>,
    seen: Seen,
    walked: Walked,
}

/// What was seen in each file, by folder and path.
type Seen = BTreeMap<(usize, PathBuf), File>;

/// Folders that were read, with what tells one from another that has come in its place.
type Walked = BTreeMap<PathBuf, Id>;

/// Device and inode of a folder.
type Id = (u64, u64);

fn id(metadata: &fs::Metadata) -> Id {
    (metadata.dev(), metadata.ino())
}

/// What was last seen in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct File {
    content: Content,
    /// By which it is known not to have changed; absent where it may be too young for that.
    stamp: Option<Stamp>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    /// A text of this fingerprint.
    Text(u64),
    Unreadable(String),
}

/// Metadata of a file that differ when it was changed or replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    changed: (i64, i64),
    length: u64,
    device: u64,
    inode: u64,
}

impl Stamp {
    /// Of metadata read at a time.
    fn of(metadata: &fs::Metadata, at: SystemTime) -> Option<Self> {
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        let seconds = u64::try_from(changed.0).ok()?;
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds + 1))?;
        let old = at.duration_since(time).is_ok_and(|age| age > COARSE);
        let (length, device, inode) = (metadata.len(), metadata.dev(), metadata.ino());
        old.then_some(Self { changed, length, device, inode })
    }
}

impl Folders {
    /// Nothing seen yet.
    ///
    /// # Errors
    /// When one is neither a folder nor a file, or there is no permission to read a file or folder in it: a policy may stand there.
    pub fn new(folders: &[PathBuf]) -> io::Result<Self> {
        let (seen, walked) = (Seen::new(), Walked::new());
        let mut look = Look::new(&seen);
        for (layer, folder) in folders.iter().enumerate() {
            look.collect(folder, layer);
        }
        if let Some((path, error)) = look.failed {
            let text = format!("configuration {} cannot be read: {error}", path.display());
            return Err(io::Error::new(error.kind(), text));
        }
        Ok(Self { folders: folders.to_vec(), seen, walked })
    }

    /// Looks at everything; gives what differs from the last time.
    pub fn look(&mut self) -> Vec<FileChange> {
        let mut look = Look::new(&self.seen);
        for (layer, folder) in self.folders.iter().enumerate() {
            look.collect(folder, layer);
        }
        let Look { now, changes, walked, .. } = look;
        // First, as what is gone may stand elsewhere now.
        let gone = self.seen.keys().filter(|key| !now.contains_key(*key));
        let gone = gone.map(|(layer, path)| change(*layer, path, FileState::Gone));
        let changes = gone.chain(changes).collect();
        (self.seen, self.walked) = (now, walked);
        changes
    }

    /// Looks again whenever something happens, and hands what differs to `changed`, which may block, until
    /// dropped.
    ///
    /// # Errors
    /// When a look panicked.
    pub async fn watch(
        mut self,
        changed: impl Fn(Vec<FileChange>) + Send + Sync + 'static,
    ) -> Result<(), JoinError> {
        let changed = Arc::new(changed);
        let (sender, mut events) = mpsc::unbounded_channel();
        let mut watch = Watch { events: sender, watcher: None, folders: Walked::new(), is_whole: false };
        loop {
            // Watched first, so that a change which the look does not see is an event.
            let follow = move || {
                let is_new = watch.follow(&self.walked);
                (self, watch, is_new)
            };
            let is_new;
            (self, watch, is_new) = spawn_blocking(follow).await?;
            if is_new {
                // The files of a new folder may not be complete yet.
                watch.is_whole &= settle(&mut events, &watch.folders, SETTLE).await;
            }
            let changed = Arc::clone(&changed);
            let look = move || {
                let changes = self.look();
                if !changes.is_empty() {
                    changed(changes);
                }
                self
            };
            self = spawn_blocking(look).await?;
            if self.walked == watch.folders {
                watch.is_whole &= settle(&mut events, &watch.folders, LOOK).await;
            }
        }
    }
}

/// The watch on all folders that were read.
struct Watch {
    events: mpsc::UnboundedSender<notify::Result<Event>>,
    /// It watches each folder by itself: if it were to look for folders, it would end at one that cannot be read.
    watcher: Option<RecommendedWatcher>,
    folders: Walked,
    /// All folders are watched.
    is_whole: bool,
}

impl Watch {
    /// Watches these folders. Returns whether there is a new one.
    fn follow(&mut self, folders: &Walked) -> bool {
        let is_other = self.folders != *folders;
        if self.is_whole && !is_other {
            return false;
        }
        self.folders.clone_from(folders);
        let watched = self.watch();
        self.is_whole = watched.is_ok();
        match watched {
            Err(error) => warn!(%error, "configuration cannot be watched; looking at it every {LOOK:?}"),
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
        // One that cannot be watched leaves others watched.
        let watch = |folder: &PathBuf| match watcher.watch(folder, RecursiveMode::NonRecursive) {
            // It went away after the look; the next look finds that.
            Err(error) if matches!(error.kind, notify::ErrorKind::PathNotFound) => Ok(()),
            watched => watched,
        };
        self.folders.keys().map(watch).fold(Ok(()), Result::and)
    }
}

/// Tells of every change in a folder, as long as what it returns lives; nothing if the folder cannot be watched.
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
    let said = |error| {
        warn!(folder = %folder.display(), %error, "cannot be watched; looking at it every {LOOK:?}");
    };
    watched.map_err(said).ok()
}

/// Reading is an event too, our own as well: looking would lead to looking again.
fn is_reading(event: &notify::Result<Event>) -> bool {
    let kind = event.as_ref().map(|event| event.kind);
    matches!(kind, Ok(EventKind::Access(access)) if access != AccessKind::Close(AccessMode::Write))
}

/// Waits for an event, which comes within `wait` or not at all, then until no more follow and no file is being written. Returns
/// whether the `folders` are watched still.
async fn settle(
    events: &mut mpsc::UnboundedReceiver<notify::Result<Event>>,
    folders: &Walked,
    wait: Duration,
) -> bool {
    let mut noted = Noted { folders, writing: HashSet::new(), are_watched: true };
    // The watcher is alive as long as we wait, so the channel does not end.
    match tokio::time::timeout(wait, events.recv()).await {
        Ok(Some(event)) => noted.note(event),
        Ok(None) => return std::future::pending().await,
        Err(_) => return true,
    }
    let limit = Instant::now() + MAX_WAIT;
    loop {
        let deadline = if noted.writing.is_empty() { (Instant::now() + SETTLE).min(limit) } else { limit };
        match timeout_at(deadline, events.recv()).await {
            Ok(Some(event)) => noted.note(event),
            Ok(None) | Err(_) => return noted.are_watched,
        }
    }
}

/// What events say.
struct Noted<'a> {
    folders: &'a Walked,
    /// Files being written.
    writing: HashSet<PathBuf>,
    /// No folder was removed or renamed, which ends its watch even if there is another by its name.
    are_watched: bool,
}

impl Noted<'_> {
    fn note(&mut self, event: notify::Result<Event>) {
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

/// A look at everything.
struct Look<'a> {
    before: &'a Seen,
    now: Seen,
    /// What is there and differs from before.
    changes: Vec<FileChange>,
    walked: Walked,
    /// The first folder that cannot be read.
    failed: Option<(PathBuf, io::Error)>,
}

/// Folders of a layer to be read.
#[derive(Default)]
struct Ahead {
    folders: Vec<PathBuf>,
    /// Symbolic links to folders. They come last, and in their order, so that a folder always has the same path.
    links: BTreeSet<PathBuf>,
    known: HashSet<Id>,
}

impl<'a> Look<'a> {
    fn new(before: &'a Seen) -> Self {
        Self { before, now: Seen::new(), changes: Vec::new(), walked: Walked::new(), failed: None }
    }

    /// Reads one file that was named, or the configuration files of a folder and the folders in it.
    fn collect(&mut self, root: &Path, layer: usize) {
        if !root.is_dir() {
            if let Err(error) = self.file(root, layer) {
                self.unreadable(root, layer, &error);
                self.failed.get_or_insert((root.to_owned(), error));
            }
            self.walk_parent(root);
            return;
        }
        let mut ahead = Ahead { folders: vec![root.to_owned()], ..Ahead::default() };
        while let Some(folder) = ahead.folders.pop().or_else(|| ahead.links.pop_first()) {
            match self.folder(&folder, layer, &mut ahead) {
                // It was removed between listing and reading.
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

    /// Has the folder watched in which a file stands, or a folder that is to come back.
    fn walk_parent(&mut self, root: &Path) {
        let parent = root.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        if let Ok(metadata) = fs::metadata(parent) {
            self.walked.insert(parent.to_owned(), id(&metadata));
        }
    }

    /// Reads the configuration files of a folder, and finds the folders in it. Hidden ones are not ours: editors' and Kubernetes'
    /// own (`..data`).
    fn folder(&mut self, folder: &Path, layer: usize, ahead: &mut Ahead) -> io::Result<()> {
        let id = id(&fs::metadata(folder)?);
        if !ahead.known.insert(id) {
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
                Ok(metadata) if metadata.is_dir() && listed.is_symlink() => _ = ahead.links.insert(path),
                Ok(metadata) if metadata.is_dir() => ahead.folders.push(path),
                Err(error) if error.kind() != io::ErrorKind::NotFound && !listed.is_file() => {
                    self.unreadable(&path, layer, &error);
                    self.failed.get_or_insert((path, error));
                }
                // The target of the link was removed, the link was not.
                Err(error) if listed.is_symlink() && fs::symlink_metadata(&path).is_ok() => {
                    let error = io::Error::new(error.kind(), "a symbolic link to nothing");
                    self.unreadable(&path, layer, &error);
                }
                _ if matches!(extension, Some("yaml" | "yml" | "json")) => {
                    if listed.is_symlink()
                        && let Ok(target) = fs::canonicalize(&path)
                    {
                        self.walk_parent(&target);
                    }
                    if let Err(error) = self.file(&path, layer)
                        // Else it was removed between listing and reading.
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

    /// Keeps what was read of a file, or in a folder, that cannot be read.
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

    /// Reads a file unless it is known not to have changed.
    fn file(&mut self, path: &Path, layer: usize) -> io::Result<()> {
        let at = SystemTime::now();
        let stamp = Stamp::of(&fs::metadata(path)?, at);
        let key = (layer, path.to_owned());
        let before = self.before.get(&key);
        if let Some(before) = before.filter(|before| stamp.is_some() && before.stamp == stamp) {
            self.now.insert(key, before.clone());
            return Ok(());
        }
        // To open a FIFO that nobody writes to would wait for ever, and so end the following of files.
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
