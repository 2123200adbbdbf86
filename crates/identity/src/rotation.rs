//! Self-signed authority, and the rotation of its root without failing requests.
//!
//! | step | signs | trusted | ends |
//! |---|---|---|---|
//! | settled | the root | the root | when the root nears its end, or on request |
//! | distribute | the root | the root and the next root | when every workload has renewed and received both roots |
//! | issue | the next root | both | when all certificates of the former root have expired |
//! | retire | the new root | the new root | when every workload has renewed and dropped the former root |
//!
//! Workloads receive the trust bundle with each certificate, so a rotation needs only their normal renewals.
//! It works for Istio's agents too. A step lasts for the lifetime of a certificate plus a margin for slow
//! clocks. Every certificate that is valid at the end of a step was issued after the step began. Distribute
//! ends earlier if too little of the root's lifetime is left (`latest_switch`).
//!
//! The state is in one file, `authority.json`. Each write replaces the whole file, so a process can continue
//! after a crash at any moment. `root-cert.pem` beside it is for other programs. The process locks the
//! directory, because two processes would replace each other's roots. A root that has expired by the clock is
//! not replaced, because the clock may be wrong and the key would be lost.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::{
    Authority, Error,
    authority::{Root, margin},
    cacerts::{Files, RootInfo, describe_root},
    identity::{certificates, describe},
};

const STATE: &str = "authority.json";
const ROOTS: &str = "root-cert.pem";
/// Minimum lifetime of a root, in lifetimes of certificates.
const MIN_LIFETIMES: u32 = 10;

/// Lifetimes of certificates.
#[derive(Clone, Copy, Debug)]
pub struct Lifetimes {
    /// Maximum lifetime of workload certificates.
    pub certificate: Duration,
    /// Lifetime of a root.
    pub root: Duration,
}

/// Step of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// There is one root.
    Settled,
    /// The next root is trusted but does not sign yet.
    Distribute,
    /// The next root signs, and the former one is still trusted.
    Issue,
    /// The former root is no longer trusted.
    Retire,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 4] = [Self::Settled, Self::Distribute, Self::Issue, Self::Retire];

    /// Returns the name of the step.
    pub fn name(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Distribute => "distribute",
            Self::Issue => "issue",
            Self::Retire => "retire",
        }
    }

    /// Returns the condition that ends the step, for users.
    pub fn waits_for(self) -> &'static str {
        match self {
            Self::Settled => "the root to approach its expiry",
            Self::Distribute => "every workload to renew its certificate and receive the next root",
            Self::Issue => "the last certificate of the former root to expire",
            Self::Retire => "every workload to renew its certificate and remove the former root",
        }
    }
}

/// A self-signed authority.
pub struct SelfSigned {
    /// Directory of the state; without one it is not stored.
    folder: Option<PathBuf>,
    /// Holds the lock of the directory.
    _lock: Option<fs::File>,
    lifetimes: Lifetimes,
    state: State,
}

/// Stored state.
#[derive(Clone, Serialize, Deserialize)]
struct State {
    step: Step,
    since: SystemTime,
    /// Earliest end of the step.
    until: SystemTime,
    signing: Root,
    /// Next root, during [`Step::Distribute`].
    next: Option<Root>,
    /// Certificate of the former root, during [`Step::Issue`] and [`Step::Retire`].
    former: Option<String>,
    /// Lifetime of certificates that are signed now.
    lifetime: Duration,
    /// Time by which all certificates with a former, longer lifetime have expired.
    longer_until: SystemTime,
}

impl SelfSigned {
    /// Opens the authority of a directory; creates one if it contains none. Without a directory the authority
    /// exists only in memory.
    ///
    /// This function writes to an existing authority only if the lifetime of certificates has changed.
    ///
    /// # Errors
    /// The directory cannot be read or written, or another process uses it. It contains other files or an
    /// expired root. The lifetimes are inconsistent.
    pub fn open(folder: Option<&Path>, lifetimes: Lifetimes, now: SystemTime) -> Result<Self, Error> {
        let Lifetimes { certificate, root } = lifetimes;
        if root < certificate * MIN_LIFETIMES {
            let problem = format!(
                "a root must live at least {MIN_LIFETIMES} times as long as certificates; {root:?} and {certificate:?} were requested"
            );
            return Err(Error::Authority { file: STATE, problem });
        }
        let lock = folder.map(lock).transpose()?;
        let kept = folder.map(read).transpose()?.flatten();
        let is_kept = kept.as_ref().is_some_and(|state| state.lifetime == certificate);
        let state = match kept {
            Some(state) => state.with_lifetime(certificate, now),
            None => State::settled(Root::generate(root, now)?, certificate, now)?,
        };
        state.check_alive(now)?;
        let mut opened = Self { folder: folder.map(Path::to_owned), _lock: lock, lifetimes, state };
        if is_kept {
            // The directory may be read-only. `advance` tries again and reports the error.
            let _ = opened.write_roots();
        } else {
            opened.keep(opened.state.clone())?;
        }
        Ok(opened)
    }

    /// Returns the authority in its current step.
    ///
    /// # Errors
    /// Its root has expired.
    pub fn authority(&self) -> Result<Authority, Error> {
        Authority::of_root(&self.state.signing, self.other().as_slice())
    }

    /// Returns the certificate that is trusted in addition to the signing one.
    fn other(&self) -> Option<&str> {
        match self.state.step {
            Step::Distribute => self.state.next.as_ref().map(|root| &*root.certificate),
            Step::Issue => self.state.former.as_deref(),
            Step::Settled | Step::Retire => None,
        }
    }

    /// Returns the current step.
    pub fn step(&self) -> Step {
        self.state.step
    }

    /// Returns the start of the current step.
    pub fn since(&self) -> SystemTime {
        self.state.since
    }

    /// Returns the earliest end of the current step.
    pub fn until(&self) -> SystemTime {
        self.state.until
    }

    /// Returns the former root during [`Step::Retire`].
    ///
    /// # Errors
    /// None in practice, because the certificate was parsed before.
    pub fn retired(&self) -> Result<Option<RootInfo>, Error> {
        let retired = self.state.former.as_ref().filter(|_| self.state.step == Step::Retire);
        let Some(pem) = retired else { return Ok(None) };
        let certificates = certificates(pem.as_bytes(), STATE)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificates[0])
            .map_err(|error| Error::Certificate(error.to_string()))?;
        Ok(Some(describe_root(&parsed, false)))
    }

    /// Starts a rotation; returns `false` if one is in progress.
    ///
    /// # Errors
    /// The new state cannot be stored, or the root has expired by the clock. [`Self::step`] then returns the
    /// actual step.
    pub fn rotate(&mut self, now: SystemTime) -> Result<bool, Error> {
        self.state.check_alive(now)?;
        if self.state.step != Step::Settled {
            return Ok(false);
        }
        let next = Some(Root::generate(self.lifetimes.root, now)?);
        let state = self.state.clone();
        let until = state.renewed(now).min(state.latest_switch(now)?);
        self.keep(State { step: Step::Distribute, since: now, until, next, ..state })?;
        Ok(true)
    }

    /// Advances to the next step if the current one has ended; returns whether it did.
    ///
    /// # Errors
    /// The new state cannot be stored, or the root has expired by the clock. [`Self::step`] then returns the
    /// actual step.
    pub fn advance(&mut self, now: SystemTime) -> Result<bool, Error> {
        self.state.check_alive(now)?;
        if now < self.state.until {
            // The file may have been removed, or an earlier write may have failed.
            self.write_roots()?;
            return Ok(false);
        }
        let state = State { since: now, until: self.state.renewed(now), ..self.state.clone() };
        let state = match (state.step, state.next.clone()) {
            (Step::Distribute, Some(next)) => {
                let former = Some(state.signing.certificate);
                State { step: Step::Issue, signing: next, next: None, former, ..state }
            }
            (Step::Issue, _) => State { step: Step::Retire, ..state },
            (Step::Retire, _) => {
                let longer_until = state.longer_until;
                State { longer_until, ..State::settled(state.signing, state.lifetime, now)? }
            }
            (Step::Settled | Step::Distribute, _) => return self.rotate(now),
        };
        self.keep(state)?;
        Ok(true)
    }

    fn keep(&mut self, state: State) -> Result<(), Error> {
        if let Some(folder) = &self.folder {
            let text = serde_json::to_string_pretty(&state).map_err(|error| Error::Key(error.to_string()))?;
            write(&folder.join(STATE), &text, 0o600)?;
        }
        self.state = state;
        self.write_roots()
    }

    /// Writes `root-cert.pem`, unless it is up to date or belongs to a plugged-in authority that the next start
    /// will use.
    fn write_roots(&self) -> Result<(), Error> {
        if let Some(folder) = self.folder.as_ref().filter(|folder| !Files::are_in(folder)) {
            let State { signing, .. } = &self.state;
            let roots: String = std::iter::once(&*signing.certificate).chain(self.other()).collect();
            if fs::read_to_string(folder.join(ROOTS)).ok().as_deref() != Some(&roots) {
                write(&folder.join(ROOTS), &roots, 0o644)?;
            }
        }
        Ok(())
    }
}

impl State {
    fn settled(signing: Root, lifetime: Duration, now: SystemTime) -> Result<Self, Error> {
        let (begin, end) = validity(&signing.certificate)?;
        let life = end.duration_since(begin).unwrap_or_default();
        // Time for all steps, plus one step as a reserve.
        let before = (life / 5).max(4 * (lifetime + slack(lifetime)));
        Ok(Self {
            step: Step::Settled,
            since: now,
            until: end - before,
            signing,
            next: None,
            former: None,
            lifetime,
            longer_until: now,
        })
    }

    /// Fails if the signing root has expired by the clock.
    fn check_alive(&self, now: SystemTime) -> Result<(), Error> {
        let (_, end) = validity(&self.signing.certificate)?;
        if now < end {
            return Ok(());
        }
        let time = |time: SystemTime| {
            time::OffsetDateTime::from(time).replace_nanosecond(0).unwrap_or(time::OffsetDateTime::UNIX_EPOCH)
        };
        let problem = format!(
            "its root has expired: at {} UTC, and this machine's clock says {} UTC. If the clock is wrong, set it. If it is right, move \
             authority.json and root-cert.pem away for a new root, which workloads trust after their next certificate",
            time(end),
            time(now)
        );
        Err(Error::Authority { file: STATE, problem })
    }

    /// Changes the lifetime of certificates that are signed from now on.
    fn with_lifetime(mut self, lifetime: Duration, now: SystemTime) -> Self {
        if lifetime < self.lifetime {
            self.longer_until = self.longer_until.max(now + self.lifetime);
        }
        self.lifetime = lifetime;
        self
    }

    /// Returns the time by which every certificate signed before `now` has expired.
    fn renewed(&self, now: SystemTime) -> SystemTime {
        (now + self.lifetime).max(self.longer_until) + slack(self.lifetime)
    }

    /// Returns the latest time for the next root to begin to sign. It comes before the end of this step if
    /// the signing root was made for shorter lifetimes. At that time the signing root is still valid. Its
    /// certificates expire no later than the root itself, and workloads have renewed them.
    fn latest_switch(&self, now: SystemTime) -> Result<SystemTime, Error> {
        let (_, end) = validity(&self.signing.certificate)?;
        Ok(now + end.duration_since(now).unwrap_or_default() * 4 / 5)
    }
}

/// Margin for slow clocks, and for the whole seconds of certificates.
fn slack(lifetime: Duration) -> Duration {
    margin(lifetime) + Duration::from_secs(1)
}

fn validity(pem: &str) -> Result<(SystemTime, SystemTime), Error> {
    let certificates = certificates(pem.as_bytes(), STATE)?;
    let first = certificates.first().ok_or(Error::Certificate("none".into()))?;
    describe(first).map(|(_, begin, end)| (begin, end))
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

/// Reads the stored state; `None` if there is none.
fn read(folder: &Path) -> Result<Option<State>, Error> {
    let path = folder.join(STATE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !folder.join(ROOTS).exists() => {
            return Ok(None);
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let problem = "it is missing, but root-cert.pem exists: restore it, or remove root-cert.pem to create a new \
                           authority, which workloads with the old root do not trust"
                .to_owned();
            return Err(Error::Authority { file: STATE, problem });
        }
        Err(error) => return Err(file_error(&path, error)),
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| Error::Authority { file: STATE, problem: format!("it cannot be read: {error}") })
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

#[cfg(test)]
mod tests;
