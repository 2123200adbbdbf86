//! Places of the authority: memory, and a directory with a self-signed or a plugged-in one.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use skysail_identity::{
    Authority, Error,
    cacerts::Files,
    rotation::{Lifetimes, SelfSigned, folder::Folder},
};
use skysail_source::watch_folder;
use tokio::sync::Notify;

/// Files are loaded after they have not changed for this time, so that a set of files is complete.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// An authority as its store holds it.
#[derive(Clone, PartialEq)]
pub(super) enum Held {
    SelfSigned(SelfSigned),
    PluggedIn(Files),
}

impl Held {
    pub(super) fn authority(&self) -> Result<Authority, Error> {
        match self {
            Self::SelfSigned(self_signed) => self_signed.authority(),
            Self::PluggedIn(files) => files.authority(),
        }
    }
}

/// Place of the authority.
pub(super) enum Store {
    /// It lasts until the process ends.
    Memory,
    /// A self-signed one, in a directory.
    Folder(Folder),
    /// A plugged-in one, in a directory.
    Files(PathBuf),
}

impl Store {
    /// Opens a directory, or memory.
    pub(super) fn open(directory: Option<&Path>, lifetimes: Lifetimes) -> Result<(Self, Held), Error> {
        let now = SystemTime::now();
        let Some(directory) = directory else {
            return Ok((Self::Memory, Held::SelfSigned(SelfSigned::create(lifetimes, now)?)));
        };
        if Files::are_in(directory) {
            return Ok((Self::Files(directory.to_owned()), Held::PluggedIn(Files::read(directory)?)));
        }
        let folder = Folder::open(directory)?;
        let held = folder.load(lifetimes, now)?;
        Ok((Self::Folder(folder), Held::SelfSigned(held)))
    }

    /// Returns the place of an authority, for messages.
    pub(super) fn place(&self) -> String {
        match self {
            Self::Memory => "memory".to_owned(),
            Self::Folder(folder) => folder.path().display().to_string(),
            Self::Files(directory) => directory.display().to_string(),
        }
    }

    /// Returns what the store holds. `used` is the authority in use.
    pub(super) async fn load(&mut self, used: Held) -> anyhow::Result<Held> {
        match self {
            Self::Memory | Self::Folder(_) => Ok(used),
            Self::Files(directory) => Ok(Held::PluggedIn(settled(directory, &used).await?)),
        }
    }

    /// Stores the next state of a self-signed authority.
    pub(super) fn replace(&self, next: &SelfSigned) -> anyhow::Result<()> {
        match self {
            Self::Memory | Self::Files(_) => Ok(()),
            Self::Folder(folder) => Ok(folder.replace(next)?),
        }
    }

    /// Writes the trust bundle for other programs, unless it is up to date.
    pub(super) fn write_roots(&self, held: &SelfSigned) -> anyhow::Result<()> {
        if let Self::Folder(folder) = self {
            folder.write_roots(held)?;
        }
        Ok(())
    }

    /// Notifies of changes that other programs make, while the result is kept.
    pub(super) fn follow(&self, changed: &Arc<Notify>) -> Option<notify::RecommendedWatcher> {
        match self {
            Self::Memory | Self::Folder(_) => None,
            Self::Files(directory) => watch_folder(directory, changed),
        }
    }
}

/// Reads the files of a plugged-in authority after they have settled.
async fn settled(directory: &Path, used: &Held) -> anyhow::Result<Files> {
    // Errors of the system cannot be compared, but their texts can.
    let read = || Files::read(directory).map_err(|error| (error.to_string(), error));
    let mut found = read();
    loop {
        if matches!((&found, used), (Ok(files), Held::PluggedIn(used)) if files == used) {
            break;
        }
        tokio::time::sleep(SETTLE_TIME).await;
        let again = read();
        let is_same = match (&found, &again) {
            (Ok(before), Ok(after)) => before == after,
            (Err((before, _)), Err((after, _))) => before == after,
            _ => false,
        };
        found = again;
        if is_same {
            break;
        }
    }
    found.map_err(|(_, error)| error.into())
}
