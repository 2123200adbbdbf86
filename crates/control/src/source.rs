//! Configuration from folders of files, or single files, watched.
//!
//! Any event means: look at everything again and see what differs. Events only say when, so lost, merged and
//! misleading ones (editors rename, copy tools truncate first) do no harm. Two things need care. A file that is
//! being written is half there, and taking it would remove what is still to come; so the look waits until the
//! writer closes the file, up to a limit. And a folder can vanish and come back, so there is a look now and then
//! without any event. A file is read again only if its metadata differ, or are so young that they may not tell.

use std::{
    collections::{BTreeMap, HashSet},
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

/// A file's new state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileChange {
    /// Which folder it is in; later ones win.
    pub(crate) layer: usize,
    /// Its path.
    pub(crate) path: String,
    /// What stands in it now.
    pub(crate) state: FileState,
}

/// What became of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FileState {
    /// It has this text.
    Text(String),
    /// It is there but cannot be read; what was read of it before stays.
    Unreadable(String),
    /// It is gone.
    Gone,
}

/// Folders of files and what was last seen in them.
pub(crate) struct Folders {
    folders: Vec<PathBuf>,
    seen: Seen,
}

/// What was seen in each file, by folder and path.
type Seen = BTreeMap<(usize, PathBuf), File>;

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
    /// When one is neither a folder nor a file.
    pub(crate) fn new(folders: &[PathBuf]) -> io::Result<Self> {
        for folder in folders {
            let wrong = |error: io::Error| {
                io::Error::new(error.kind(), format!("configuration {}: {error}", folder.display()))
            };
            Look { before: &Seen::new(), now: Seen::new(), changes: Vec::new() }
                .collect(folder, 0)
                .map_err(wrong)?;
        }
        Ok(Self { folders: folders.to_vec(), seen: Seen::new() })
    }

    /// Looks at everything; gives what differs from the last time.
    pub(crate) fn look(&mut self) -> Vec<FileChange> {
        let mut look = Look { before: &self.seen, now: Seen::new(), changes: Vec::new() };
        for (layer, folder) in self.folders.iter().enumerate() {
            if let Err(error) = look.collect(folder, layer) {
                // A folder that is being replaced is not a request to remove everything.
                warn!(folder = %folder.display(), %error, "configuration folder cannot be read; what was read of it stays");
                let kept = self.seen.range((layer, PathBuf::new())..(layer + 1, PathBuf::new()));
                look.now.retain(|(of, _), _| *of != layer);
                look.now.extend(kept.map(|(key, file)| (key.clone(), file.clone())));
                look.changes.retain(|change| change.layer != layer);
            }
        }
        let Look { now, changes, .. } = look;
        // First, as what is gone may stand elsewhere now.
        let gone = self.seen.keys().filter(|key| !now.contains_key(*key));
        let gone = gone.map(|(layer, path)| change(*layer, path, FileState::Gone));
        let changes = gone.chain(changes).collect();
        self.seen = now;
        changes
    }

    /// Looks again whenever something happens, and hands what differs to `changed`, which may block, until
    /// dropped.
    ///
    /// # Errors
    /// When the folders cannot be watched.
    pub(crate) async fn watch(
        mut self,
        changed: impl Fn(Vec<FileChange>) + Send + Sync + 'static,
    ) -> notify::Result<()> {
        let changed = Arc::new(changed);
        let (sender, mut events) = mpsc::unbounded_channel();
        let mut watcher = notify::recommended_watcher(move |event| {
            if !is_reading(&event) {
                let _ = sender.send(event);
            }
        })?;
        let mut watched = self.watch_all(&mut watcher);
        loop {
            // The first look is for what happened between the caller's look and the watching.
            let changed = Arc::clone(&changed);
            let look = move || {
                let changes = self.look();
                if !changes.is_empty() {
                    changed(changes);
                }
                self
            };
            self = tokio::task::spawn_blocking(look)
                .await
                .map_err(|error| notify::Error::generic(&error.to_string()))?;
            if self.folders.iter().any(|folder| !folder.exists()) {
                watched = 0;
            }
            settle(&mut events).await;
            if watched < self.folders.len() {
                watched = self.watch_all(&mut watcher);
            }
        }
    }

    /// Watches all folders that can be watched; says how many.
    fn watch_all(&self, watcher: &mut RecommendedWatcher) -> usize {
        let watch = |folder: &&PathBuf| {
            let (place, mode) = match folder.parent() {
                // A watch on a file would not see another one take its place.
                Some(parent) if folder.is_file() => (parent, RecursiveMode::NonRecursive),
                _ => (folder.as_path(), RecursiveMode::Recursive),
            };
            let watched = watcher.watch(place, mode);
            if let Err(error) = &watched {
                warn!(folder = %folder.display(), %error, "cannot be watched; looking at it every {LOOK:?}");
            }
            watched.is_ok()
        };
        let watched = self.folders.iter().filter(watch).count();
        info!(folders = watched, "watching configuration");
        watched
    }
}

/// Tells of every change in a folder, as long as what it returns lives; nothing if the folder cannot be watched.
pub(crate) fn watch_folder(folder: &Path, changed: &Arc<Notify>) -> Option<RecommendedWatcher> {
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

/// Waits for an event, then until no more follow and no file is being written.
async fn settle(events: &mut mpsc::UnboundedReceiver<notify::Result<Event>>) {
    let mut writing = HashSet::new();
    // The watcher is alive as long as we wait, so the channel does not end.
    match tokio::time::timeout(LOOK, events.recv()).await {
        Ok(Some(event)) => note(event, &mut writing),
        Ok(None) => return std::future::pending().await,
        Err(_) => return,
    }
    let limit = Instant::now() + MAX_WAIT;
    loop {
        let deadline = if writing.is_empty() { (Instant::now() + SETTLE).min(limit) } else { limit };
        match timeout_at(deadline, events.recv()).await {
            Ok(Some(event)) => note(event, &mut writing),
            Ok(None) | Err(_) => return,
        }
    }
}

/// Keeps track of files being written.
fn note(event: notify::Result<Event>, writing: &mut HashSet<PathBuf>) {
    let Ok(event) = event else { return };
    match event.kind {
        EventKind::Create(CreateKind::File) | EventKind::Modify(ModifyKind::Data(_)) => {
            writing.extend(event.paths);
        }
        EventKind::Access(AccessKind::Close(AccessMode::Write))
        | EventKind::Remove(_)
        | EventKind::Modify(ModifyKind::Name(_)) => {
            for path in &event.paths {
                writing.remove(path);
            }
        }
        _ => {}
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
}

impl Look<'_> {
    /// Reads one file that was named, or the configuration files of a folder and the folders in it. Hidden ones are not
    /// ours: editors' and Kubernetes' own (`..data`).
    fn collect(&mut self, folder: &Path, layer: usize) -> io::Result<()> {
        if folder.is_file() {
            return self.file(folder, layer);
        }
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
            let extension = path.extension().and_then(|extension| extension.to_str());
            if hidden {
                continue;
            }
            if path.is_dir() {
                self.collect(&path, layer)?;
            } else if matches!(extension, Some("yaml" | "yml" | "json"))
                && let Err(error) = self.file(&path, layer)
                // Else it was removed between listing and reading.
                && error.kind() != io::ErrorKind::NotFound
            {
                let reason = error.to_string();
                let content = Content::Unreadable(reason.clone());
                if self.before.get(&(layer, path.clone())).is_none_or(|before| before.content != content) {
                    self.changes.push(change(layer, &path, FileState::Unreadable(reason)));
                }
                self.now.insert((layer, path), File { content, stamp: None });
            }
        }
        Ok(())
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
        file.read_to_string(&mut text)?;
        let content = Content::Text(fingerprint(&text));
        if before.is_none_or(|before| before.content != content) {
            self.changes.push(change(layer, path, FileState::Text(text)));
        }
        self.now.insert(key, File { content, stamp });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(changes: &[FileChange]) -> Vec<(usize, String, bool)> {
        let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        changes.iter().map(|c| (c.layer, name(&c.path), c.state == FileState::Gone)).collect()
    }

    #[test]
    fn only_configuration_files_that_differ_are_reported() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |path: PathBuf, text: &str| fs::write(path, text).unwrap();
        write(first.path().join("a.yaml"), "a");
        write(first.path().join(".a.yaml.swp"), "a");
        write(first.path().join(".hidden.yaml"), "a");
        write(first.path().join("notes.txt"), "a");
        fs::create_dir(first.path().join("sub")).unwrap();
        write(first.path().join("sub/b.json"), "b");
        write(second.path().join("a.yaml"), "c");
        let mut folders = Folders::new(&[first.path().into(), second.path().into()]).unwrap();
        let mut found = names(&folders.look());
        found.sort();
        assert_eq!(
            found,
            [(0, "a.yaml".into(), false), (0, "b.json".into(), false), (1, "a.yaml".into(), false)]
        );
        assert_eq!(folders.look(), []);

        write(second.path().join("new"), "d");
        fs::rename(second.path().join("new"), second.path().join("a.yaml")).unwrap();
        fs::remove_file(first.path().join("a.yaml")).unwrap();
        fs::write(first.path().join("sub/b.json"), [0xff]).unwrap();
        let changes = folders.look();
        assert_eq!(names(&changes).len(), 3);
        assert!(changes.iter().any(|change| matches!(change.state, FileState::Unreadable(_))));

        fs::remove_dir_all(second.path()).unwrap();
        assert_eq!(folders.look(), [], "a folder that vanished removes nothing");
    }

    #[test]
    fn what_is_no_regular_file_is_named_and_does_not_hold_up_others() {
        let folder = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&folder.path().join("a.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("b.yaml")).unwrap();
        fs::write(folder.path().join("c.yaml"), "c").unwrap();
        let mut folders = Folders::new(&[folder.path().into()]).unwrap();
        let mut changes = folders.look();
        changes.sort_by(|one, other| one.path.cmp(&other.path));
        let reason = |change: &FileChange| match &change.state {
            FileState::Unreadable(reason) => reason.clone(),
            state => panic!("{state:?}"),
        };
        assert_eq!(reason(&changes[0]), "it is not a regular file");
        assert!(!reason(&changes[1]).is_empty());
        assert_eq!(changes[2].state, FileState::Text("c".into()));
        assert_eq!(folders.look(), [], "they are named once");
        fs::remove_file(folder.path().join("a.yaml")).unwrap();
        fs::write(folder.path().join("a.yaml"), "a").unwrap();
        assert_eq!(folders.look().len(), 1);
    }

    #[test]
    fn a_file_may_stand_for_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.yaml");
        assert!(Folders::new(std::slice::from_ref(&file)).is_err());
        fs::write(&file, "a").unwrap();
        fs::write(folder.path().join("b.yaml"), "b").unwrap();
        let mut folders = Folders::new(std::slice::from_ref(&file)).unwrap();
        assert_eq!(names(&folders.look()), [(0, "a.yaml".into(), false)]);
        fs::rename(folder.path().join("b.yaml"), &file).unwrap();
        assert_eq!(names(&folders.look()), [(0, "a.yaml".into(), false)]);
        fs::remove_file(&file).unwrap();
        assert_eq!(folders.look(), [], "a file that vanished removes nothing");
    }

    #[tokio::test]
    async fn looking_does_not_lead_to_looking() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yaml"), "a").unwrap();
        let (sender, mut events) = mpsc::unbounded_channel();
        let mut watcher = notify::recommended_watcher(move |event| {
            let _ = sender.send(event);
        })
        .unwrap();
        watcher.watch(folder.path(), RecursiveMode::Recursive).unwrap();
        Folders::new(&[folder.path().into()]).unwrap().look();
        // The end of what reading caused is marked by a change.
        fs::remove_file(folder.path().join("a.yaml")).unwrap();
        loop {
            let event = events.recv().await.unwrap();
            if matches!(&event, Ok(event) if event.kind.is_remove()) {
                break;
            }
            assert!(is_reading(&event), "{event:?}");
        }
    }

    #[tokio::test]
    async fn a_change_is_seen_when_the_writer_is_done() {
        use std::io::Write as _;
        let folder = tempfile::tempdir().unwrap();
        let folders = Folders::new(&[folder.path().into()]).unwrap();
        let (sender, mut seen) = mpsc::unbounded_channel();
        let watching = tokio::spawn(folders.watch(move |changes| {
            let _ = sender.send(changes);
        }));
        // The watch is on once a change is seen; the first may come too early to be one.
        let path = folder.path().join("a.yaml");
        let mut number = 0;
        let text = loop {
            number += 1;
            fs::write(&path, format!("number {number}")).unwrap();
            if let Ok(Some(changes)) = tokio::time::timeout(Duration::from_millis(50), seen.recv()).await {
                break changes;
            }
        };
        assert_eq!(text.len(), 1);

        let mut file = fs::File::create(&path).unwrap();
        file.write_all(b"first half, ").unwrap();
        file.flush().unwrap();
        tokio::task::yield_now().await;
        file.write_all(b"second half").unwrap();
        drop(file);
        loop {
            let changes = seen.recv().await.unwrap();
            let FileState::Text(text) = &changes[0].state else { panic!("{changes:?}") };
            assert!(text.starts_with("number") || text == "first half, second half", "{text}");
            if text.ends_with("half") {
                break;
            }
        }
        watching.abort();
    }
}
