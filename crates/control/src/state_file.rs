//! Persistent state: files in the state directory (`--state-dir`). A change replaces the whole file after
//! [`WRITE_DELAY`].

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::Notify;
use tracing::warn;

/// Time from a change to the write, so that one write covers a burst of changes.
const WRITE_DELAY: Duration = Duration::from_secs(5);

/// A file with the state of one module. Without a state directory, nothing is read or written.
#[derive(Debug, Default)]
pub(crate) struct StateFile {
    path: Option<PathBuf>,
    changed: Notify,
    /// The state has changed since the last write.
    is_dirty: AtomicBool,
}

impl StateFile {
    /// Returns the file `name` in the state directory.
    pub(crate) fn new(directory: Option<&Path>, name: &str) -> Self {
        Self { path: directory.map(|directory| directory.join(name)), ..Self::default() }
    }

    /// Reads the state. Returns the default if the file does not exist or cannot be read.
    pub(crate) fn read<T: DeserializeOwned + Default>(&self) -> T {
        let Some(path) = &self.path else { return T::default() };
        let state = fs::read(path).and_then(|text| Ok(serde_json::from_slice(&text)?));
        state.unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                warn!(file = %path.display(), %error, "state file cannot be read; starting with empty state");
            }
            T::default()
        })
    }

    /// Marks the state as changed.
    pub(crate) fn mark_changed(&self) {
        self.is_dirty.store(true, Relaxed);
        self.changed.notify_one();
    }

    /// Writes the state if it has changed. Blocks.
    ///
    /// # Errors
    /// When the directory cannot be written to. The next call writes the state again.
    pub(crate) fn write<T: Serialize>(&self, state: impl FnOnce() -> T) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        if !self.is_dirty.swap(false, Relaxed) {
            return Ok(());
        }
        let written = replace(path, &state());
        if written.is_err() {
            self.is_dirty.store(true, Relaxed);
        }
        written.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    }

    /// Calls `write`, which calls [`Self::write`], after each burst of changes. Never returns.
    pub(crate) async fn write_changes(&self, write: impl Fn() -> io::Result<()> + Clone + Send + 'static) {
        let mut failed = false;
        loop {
            self.changed.notified().await;
            tokio::time::sleep(WRITE_DELAY).await;
            let Ok(written) = tokio::task::spawn_blocking(write.clone()).await else { continue };
            if let Err(error) = &written
                && !failed
            {
                warn!(%error, "state file cannot be written; a restart loses the changes");
            }
            failed = written.is_err();
        }
    }
}

/// Replaces a file in one step, so that a crash leaves the old or the new content.
fn replace(path: &Path, state: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(state)?;
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_survives_a_restart_and_an_invalid_file_counts_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("state");
        let file = StateFile::new(Some(&directory), "known.json");
        assert!(file.read::<Vec<u8>>().is_empty());
        file.write(|| [1]).unwrap();
        assert!(!directory.exists(), "nothing has changed");
        file.mark_changed();
        file.write(|| [2]).unwrap();
        assert_eq!(StateFile::new(Some(&directory), "known.json").read::<Vec<u8>>(), [2]);
        fs::write(directory.join("known.json"), "{").unwrap();
        assert!(file.read::<Vec<u8>>().is_empty());
        fs::remove_dir_all(&directory).unwrap();
        fs::write(&directory, "not a directory").unwrap();
        file.mark_changed();
        let error = file.write(|| [3]).unwrap_err().to_string();
        assert!(error.contains("known.json"), "{error}");
        fs::remove_file(&directory).unwrap();
        file.write(|| [3]).unwrap();
        assert_eq!(file.read::<Vec<u8>>(), [3], "a failed write is repeated");
    }
}
