//! Waits for changes of files.
//!
//! Directories are watched instead of files, because files are replaced by renaming; Kubernetes replaces only
//! the link `..data` beside them. Some changes raise no event: on a network file system, when a parent
//! directory is replaced, or when the event queue is full. Checks every [`CHECK_INTERVAL`] find these.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode},
};
use tokio::sync::Notify;

/// Interval between checks without an event.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of links followed from a file to its content, as in Linux.
const MAX_LINKS: usize = 40;

/// Returns the directories in which a change can replace the content of a file: its own, and those of the files
/// that it links to.
pub(super) fn folders_of_file(path: &Path) -> impl Iterator<Item = PathBuf> {
    let link = |path: &PathBuf| Some(folder_of(path).join(std::fs::read_link(path).ok()?));
    std::iter::successors(Some(path.to_owned()), link).take(MAX_LINKS).map(|path| folder_of(&path))
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// A watch on directories. Create it before reading the files, so that no change is missed.
pub(super) struct Watch {
    changed: Arc<Notify>,
    /// `None` if a directory cannot be watched.
    _watcher: Option<RecommendedWatcher>,
}

impl Watch {
    pub(super) fn new(folders: &BTreeSet<PathBuf>) -> Self {
        let changed = Arc::new(Notify::new());
        let sender = Arc::clone(&changed);
        let watcher = notify::recommended_watcher(move |event| {
            if !is_reading(&event) {
                sender.notify_one();
            }
        });
        let watcher = watcher.and_then(|mut watcher| {
            folders.iter().try_for_each(|folder| watcher.watch(folder, RecursiveMode::NonRecursive))?;
            Ok(watcher)
        });
        let unwatched = |error| tracing::warn!(?folders, %error, "cannot watch directories; checking every {CHECK_INTERVAL:?}");
        Self { changed, _watcher: watcher.map_err(unwatched).ok() }
    }

    /// Waits for an event or the next check. Returns whether there was an event, after which the directories to
    /// watch may have changed.
    pub(super) async fn changed(&self) -> bool {
        tokio::time::timeout(CHECK_INTERVAL, self.changed.notified()).await.is_ok()
    }
}

/// Returns whether an event only reports a read. The sidecar's own reads raise such events, which must not trigger
/// another read.
fn is_reading(event: &notify::Result<Event>) -> bool {
    let kind = event.as_ref().map(|event| event.kind);
    matches!(kind, Ok(EventKind::Access(access)) if access != AccessKind::Close(AccessMode::Write))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn directories_of_link_targets_are_watched() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("..1")).unwrap();
        fs::write(at("..1/file"), "").unwrap();
        symlink("..1", at("..data")).unwrap();
        symlink("..data/file", at("file")).unwrap();
        let folders: Vec<_> = folders_of_file(&at("file")).collect();
        assert_eq!(folders, [folder.path().to_owned(), at("..data")]);
        symlink("loop", at("loop")).unwrap();
        assert_eq!(folders_of_file(&at("loop")).count(), MAX_LINKS);
        assert_eq!(folders_of_file(Path::new("file")).collect::<Vec<_>>(), [Path::new(".")]);
    }
}
