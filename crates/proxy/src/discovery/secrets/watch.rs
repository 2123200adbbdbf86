//! Waits for changes of files.
//!
//! Folders are watched rather than files, because files are replaced by renaming; Kubernetes replaces only the link
//! `..data` beside them. A change that raises no event here (a network file system, a folder further up that was
//! replaced, a full event queue) is found by looking every [`LOOK`].

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

/// Time between looks without an event.
const LOOK: Duration = Duration::from_secs(10);
/// Links followed from a file to its content, as in Linux.
const MAX_LINKS: usize = 40;

/// The folders in which a change can replace the content of a file: its own, and those of the files that it links to.
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

/// A watch of folders. Create it before reading, so that no change is missed between the two.
pub(super) struct Watch {
    changed: Arc<Notify>,
    /// `None` where a folder cannot be watched.
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
        let unwatched = |error| tracing::warn!(?folders, %error, "cannot be watched; looking every {LOOK:?}");
        Self { changed, _watcher: watcher.map_err(unwatched).ok() }
    }

    /// Waits for an event, or until it is time to look without one. Returns whether there was an event, after which
    /// the folders may be others than those watched.
    pub(super) async fn changed(&self) -> bool {
        tokio::time::timeout(LOOK, self.changed.notified()).await.is_ok()
    }
}

/// Our own reading is an event too, and looking would lead to looking again.
fn is_reading(event: &notify::Result<Event>) -> bool {
    let kind = event.as_ref().map(|event| event.kind);
    matches!(kind, Ok(EventKind::Access(access)) if access != AccessKind::Close(AccessMode::Write))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn folders_of_links_are_watched_too() {
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
