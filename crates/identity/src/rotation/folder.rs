//! Store of a self-signed authority: a directory.
//!
//! The state is in one file, `authority.json`. Each write replaces the whole file. `root-cert.pem` beside it is for
//! other programs. The process locks the directory, because two processes would replace each other's roots.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::{Lifetimes, STATE, SelfSigned};
use crate::{Error, cacerts::Files};

const ROOTS: &str = "root-cert.pem";

/// A directory that this process has locked.
pub struct Folder {
    path: PathBuf,
    _lock: fs::File,
}

impl Folder {
    /// Locks a directory, and creates it if necessary.
    ///
    /// # Errors
    /// The directory cannot be read or created, or another process uses it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Ok(Self { path: path.to_owned(), _lock: lock(path)? })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the authority of the directory; creates one if it contains none.
    ///
    /// This function writes to an existing authority only if the lifetime of certificates has changed.
    ///
    /// # Errors
    /// The directory cannot be read or written. It contains other files or an expired root. The lifetimes are
    /// inconsistent.
    pub fn load(&self, lifetimes: Lifetimes, now: SystemTime) -> Result<SelfSigned, Error> {
        let stored = self.read()?.map(|text| SelfSigned::from_text(&text, lifetimes)).transpose()?;
        let authority = match stored.clone() {
            Some(stored) => stored.with_lifetime(lifetimes.certificate, now),
            None => SelfSigned::create(lifetimes, now)?,
        };
        authority.check_alive(now)?;
        if stored.as_ref() == Some(&authority) {
            // The directory may be read-only. A later call reports the error.
            let _ = self.write_roots(&authority);
        } else {
            self.replace(&authority)?;
            self.write_roots(&authority)?;
        }
        Ok(authority)
    }

    /// Reads the stored state; `None` if there is none.
    fn read(&self) -> Result<Option<String>, Error> {
        let path = self.path.join(STATE);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !self.path.join(ROOTS).exists() => {
                Ok(None)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let problem = "it is missing, but root-cert.pem exists: restore it, or remove root-cert.pem to create a new \
                               authority, which workloads with the old root do not trust"
                    .to_owned();
                Err(Error::Authority { file: STATE, problem })
            }
            Err(error) => Err(file_error(&path, error)),
        }
    }

    /// Stores a state.
    ///
    /// # Errors
    /// The file cannot be written; the former state is still stored.
    pub fn replace(&self, authority: &SelfSigned) -> Result<(), Error> {
        write(&self.path.join(STATE), &authority.to_text()?, 0o600)
    }

    /// Writes `root-cert.pem`, unless it is up to date or belongs to a plugged-in authority that the next start
    /// will use.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_roots(&self, authority: &SelfSigned) -> Result<(), Error> {
        if Files::are_in(&self.path) {
            return Ok(());
        }
        let (path, roots) = (self.path.join(ROOTS), authority.roots_pem());
        if fs::read_to_string(&path).ok().as_deref() == Some(&roots) {
            return Ok(());
        }
        write(&path, &roots, 0o644)
    }
}

/// Locks the directory, and creates it if necessary. The lock lasts while the file is open. It works in
/// read-only directories too.
fn lock(folder: &Path) -> Result<fs::File, Error> {
    let open = || {
        fs::create_dir_all(folder)?;
        fs::File::open(folder)
    };
    let file = open().map_err(|error| file_error(folder, error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => {
            let problem = "another process uses the folder; each control plane needs one of its own, or an authority that is \
                           plugged in"
                .to_owned();
            Err(Error::Authority { file: STATE, problem })
        }
        Err(fs::TryLockError::Error(error)) => Err(file_error(folder, error)),
    }
}

/// Replaces a file atomically.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    let new = path.with_extension("new");
    let replace = || {
        // A file that a crashed process has left may have another mode.
        match fs::remove_file(&new) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        path.parent().map_or(Ok(()), |folder| fs::File::open(folder)?.sync_all())
    };
    replace().map_err(|error| file_error(path, error))
}

fn file_error(path: &Path, error: std::io::Error) -> Error {
    Error::File { path: path.display().to_string(), error }
}
