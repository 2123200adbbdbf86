//! Places of the authority: memory, a directory, Secrets of a cluster.
//!
//! Several control planes share the Secrets without a leader. Each writes only over the version that it has read, and
//! uses a state only after the API server has stored it. So all states that any of them uses are in one sequence.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};
use skysail_identity::{
    Authority, Error,
    cacerts::Files,
    rotation::{Lifetimes, SelfSigned, folder::Folder, secret},
};
use skysail_kubernetes::{SecretError, Secrets, StoredSecret};
use skysail_source::watch_folder;
use tokio::sync::Notify;
use tracing::{info, warn};

/// Files are loaded after they have not changed for this time, so that a set of files is complete.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// Name of the Secret of a plugged-in authority, as in Istio.
const CACERTS: &str = "cacerts";
/// Number of attempts to write a Secret that other control planes change at the same time.
pub(super) const ATTEMPTS: usize = 8;

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
    Cluster(Box<ClusterStore>),
}

/// Either kind, in Secrets of a cluster: `cacerts`, or else `istio-ca-secret`.
pub(super) struct ClusterStore {
    secrets: Arc<Secrets>,
    lifetimes: Lifetimes,
    /// Version of the self-signed authority that was read or written last.
    stored: Option<StoredSecret>,
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
    pub(super) fn place(&self, held: &Held) -> String {
        match self {
            Self::Memory => "memory".to_owned(),
            Self::Folder(folder) => folder.path().display().to_string(),
            Self::Files(directory) => directory.display().to_string(),
            Self::Cluster(store) => {
                let name = if let Held::PluggedIn(_) = held { CACERTS } else { secret::NAME };
                format!("Secret {}", store.secrets.full_name(name))
            }
        }
    }

    /// Returns what the store holds. `used` is the authority in use.
    pub(super) async fn load(&mut self, used: Held) -> anyhow::Result<Held> {
        match self {
            Self::Memory | Self::Folder(_) => Ok(used),
            Self::Files(directory) => Ok(Held::PluggedIn(settled(directory, &used).await?)),
            Self::Cluster(store) => store.load(Some(&used)).await,
        }
    }

    /// Stores the next state of the self-signed authority that was loaded. Returns false if another control plane has
    /// changed it meanwhile.
    pub(super) async fn replace(&mut self, next: &SelfSigned) -> anyhow::Result<bool> {
        match self {
            Self::Memory | Self::Files(_) => Ok(true),
            Self::Folder(folder) => Ok(folder.replace(next).map(|()| true)?),
            Self::Cluster(store) => store.write(next).await,
        }
    }

    /// Writes the trust bundle for other programs, unless it is up to date.
    pub(super) fn write_roots(&self, held: &SelfSigned) -> anyhow::Result<()> {
        if let Self::Folder(folder) = self {
            folder.write_roots(held)?;
        }
        Ok(())
    }

    /// Watches the folder for changes by other programs, until the returned watcher is dropped. `None` without a folder.
    pub(super) fn follow(&self, changed: &Arc<Notify>) -> Option<notify::RecommendedWatcher> {
        match self {
            Self::Memory | Self::Folder(_) => None,
            Self::Files(directory) => watch_folder(directory, changed),
            Self::Cluster(store) => {
                let (secrets, changed) = (Arc::clone(&store.secrets), Arc::clone(changed));
                tokio::spawn(async move { secrets.follow(&[CACERTS, secret::NAME], &changed).await });
                None
            }
        }
    }
}

impl ClusterStore {
    pub(super) fn new(secrets: Secrets, lifetimes: Lifetimes) -> Self {
        Self { secrets: Arc::new(secrets), lifetimes, stored: None }
    }

    /// Returns what the Secrets hold. `used` is the authority in use; without one, this is the start, which creates an
    /// authority if the cluster says that there is none.
    pub(super) async fn load(&mut self, used: Option<&Held>) -> anyhow::Result<Held> {
        for _ in 0..ATTEMPTS {
            if let Some(files) = self.secrets.read(CACERTS).await? {
                let files = Files::from_secret(|key| files.get(key));
                let place = || format!("Secret {}", self.secrets.full_name(CACERTS));
                return Ok(Held::PluggedIn(files.with_context(place)?));
            }
            self.stored = self.secrets.read(secret::NAME).await?;
            let (held, is_stored) = self.self_signed(used)?;
            if is_stored || self.write(&held).await? {
                return Ok(Held::SelfSigned(held));
            }
        }
        bail!("other programs change Secret {} all the time", self.secrets.full_name(secret::NAME))
    }

    /// Returns the self-signed authority, and whether the Secret holds it.
    fn self_signed(&self, used: Option<&Held>) -> anyhow::Result<(SelfSigned, bool)> {
        let (now, lifetimes) = (SystemTime::now(), self.lifetimes);
        let name = self.secrets.full_name(secret::NAME);
        if let Some(Held::PluggedIn(_)) = used {
            bail!(
                "Secret {} is gone; create it again, or restart all control planes to use {name}",
                self.secrets.full_name(CACERTS)
            );
        }
        let Some(stored) = &self.stored else {
            if let Some(Held::SelfSigned(used)) = used {
                warn!(secret = name, "Secret of the certificate authority was deleted; it is written again");
                return Ok((used.clone(), false));
            }
            info!(secret = name, "the cluster has no certificate authority; a self-signed one is created");
            return Ok((SelfSigned::create(lifetimes, now)?, false));
        };
        let place = || format!("Secret {name}");
        let read = SelfSigned::from_secret(|key| stored.get(key), lifetimes, now).with_context(place)?;
        let (held, is_stored) = read;
        held.check_alive(now).with_context(place)?;
        // Another control plane may sign with a longer lifetime; a running one does not shorten it.
        let lifetime = match used {
            Some(_) => lifetimes.certificate.max(held.lifetime()),
            None => lifetimes.certificate,
        };
        let is_kept = is_stored && held.lifetime() == lifetime;
        Ok((held.with_lifetime(lifetime, now), is_kept))
    }

    /// Writes an authority over the version that was read last. Returns false if that is no longer the present one.
    async fn write(&mut self, next: &SelfSigned) -> anyhow::Result<bool> {
        let values = next.to_secret()?;
        let written = match &self.stored {
            None => self.secrets.create(secret::NAME, secret::KIND, values).await,
            Some(stored) => self.secrets.replace(stored, values).await,
        };
        match written {
            Ok(stored) => {
                self.stored = Some(stored);
                Ok(true)
            }
            Err(SecretError::Conflict { .. }) => Ok(false),
            Err(error) => Err(error.into()),
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
