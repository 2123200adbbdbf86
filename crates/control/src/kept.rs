//! Persistent state: files of the state folder, each replaced as a whole some seconds after a change.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::Notify;
use tracing::warn;

/// Changes seldom come alone.
const QUIET: Duration = Duration::from_secs(5);

/// A file with the state of one owner; without a folder nothing is written.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    file: Option<PathBuf>,
    changed: Notify,
    /// Something is not in the file yet.
    unwritten: AtomicBool,
}

impl Kept {
    pub(crate) fn new(folder: Option<&Path>, name: &str) -> Self {
        Self { file: folder.map(|folder| folder.join(name)), ..Self::default() }
    }

    /// Content of the file; `None` if it does not exist or cannot be read.
    pub(crate) fn read<T: DeserializeOwned + Default>(&self) -> T {
        let Some(file) = &self.file else { return T::default() };
        let read = fs::read(file).and_then(|text| Ok(serde_json::from_slice(&text)?));
        read.unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                warn!(file = %file.display(), %error, "cannot be read; what it said is learned anew");
            }
            T::default()
        })
    }

    /// Marks the state as changed.
    pub(crate) fn note(&self) {
        self.unwritten.store(true, Relaxed);
        self.changed.notify_one();
    }

    /// Writes the state if it has changed. Blocks.
    ///
    /// # Errors
    /// When the folder cannot be written to.
    pub(crate) fn write<T: Serialize>(&self, known: impl FnOnce() -> T) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        if !self.unwritten.swap(false, Relaxed) {
            return Ok(());
        }
        let written = replace(file, &known());
        if written.is_err() {
            self.unwritten.store(true, Relaxed);
        }
        written.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", file.display())))
    }

    /// Has changes written down by `write` ([`Self::write`]), now and then, as long as it runs.
    pub(crate) async fn keep(&self, write: impl Fn() -> io::Result<()> + Clone + Send + 'static) {
        let mut failed = false;
        loop {
            self.changed.notified().await;
            tokio::time::sleep(QUIET).await;
            let Ok(written) = tokio::task::spawn_blocking(write.clone()).await else { continue };
            if let Err(error) = &written
                && !failed
            {
                warn!(%error, "cannot be written; what was learned since is forgotten with a restart");
            }
            failed = written.is_err();
        }
    }
}

fn replace(file: &Path, known: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(known)?;
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = file.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_survives_and_a_broken_file_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let kept = Kept::new(Some(&state), "known.json");
        assert!(kept.read::<Vec<u8>>().is_empty());
        kept.write(|| [1]).unwrap();
        assert!(!state.exists(), "nothing has changed");
        kept.note();
        kept.write(|| [2]).unwrap();
        assert_eq!(Kept::new(Some(&state), "known.json").read::<Vec<u8>>(), [2]);
        fs::write(state.join("known.json"), "{").unwrap();
        assert!(kept.read::<Vec<u8>>().is_empty());
        fs::remove_dir_all(&state).unwrap();
        fs::write(&state, "in the way").unwrap();
        kept.note();
        let error = kept.write(|| [3]).unwrap_err().to_string();
        assert!(error.contains("known.json"), "{error}");
        fs::remove_file(&state).unwrap();
        kept.write(|| [3]).unwrap();
        assert_eq!(kept.read::<Vec<u8>>(), [3], "what could not be written is written later");
    }
}
