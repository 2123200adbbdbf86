//! An authority that is made here, and how its root is replaced without a call that fails.
//!
//! | step | signs | is trusted | waits until |
//! |---|---|---|---|
//! | settled | the root | the root | the root nears its end, or somebody asks for a new one |
//! | distribute | the root | it and the next | every workload has renewed its certificate, and with it got both roots |
//! | issue | the next | both | no certificate that the former root signed can be alive |
//! | retire | the new root | the new root | every workload has renewed, and with it forgotten the former root |
//!
//! Workloads learn whom to trust with each certificate they get, which needs nothing of them but what they do anyway, and
//! holds for Istio's agents as well as for ours. So a step lasts for the lifetime of a certificate, and a little more for
//! clocks that are behind: whoever has a valid certificate at its end has got it after its beginning.
//!
//! All there is to know is in one file, `authority.json`, which is replaced as a whole; a process that ends at any
//! moment goes on where it was. `root-cert.pem` beside it is for others to read. The folder is locked by the process that
//! uses it, since two would replace each other's roots. A root that has ended by the clock is never replaced: the clock may
//! be wrong, and the key would be lost.

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
/// A root lives at least as many lifetimes of certificates.
const LEAST_LIVES: u32 = 10;

/// How long things live.
#[derive(Clone, Copy, Debug)]
pub struct Lifetimes {
    /// Certificates of workloads, at most.
    pub certificate: Duration,
    /// A root.
    pub root: Duration,
}

/// Where the replacement of a root stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// There is one root.
    Settled,
    /// The next root is trusted and does not sign yet.
    Distribute,
    /// The next root signs, and the former one is still trusted.
    Issue,
    /// The former root is no longer trusted.
    Retire,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 4] = [Self::Settled, Self::Distribute, Self::Issue, Self::Retire];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Distribute => "distribute",
            Self::Issue => "issue",
            Self::Retire => "retire",
        }
    }

    /// What it waits for.
    pub fn waits_for(self) -> &'static str {
        match self {
            Self::Settled => "the root to near its end",
            Self::Distribute => "every workload to renew its certificate and learn of the next root",
            Self::Issue => "the last certificate of the former root to end",
            Self::Retire => "every workload to renew its certificate and forget the former root",
        }
    }
}

/// An authority that is made here.
pub struct SelfSigned {
    /// Where it is kept; nowhere without.
    folder: Option<PathBuf>,
    /// Locks the folder while it is open.
    _lock: Option<fs::File>,
    lifetimes: Lifetimes,
    state: State,
}

/// What is kept.
#[derive(Clone, Serialize, Deserialize)]
struct State {
    step: Step,
    since: SystemTime,
    /// When the step may end.
    until: SystemTime,
    signing: Root,
    /// The one that comes next, while it is distributed.
    next: Option<Root>,
    /// The certificate of the one before, from when it no longer signs.
    former: Option<String>,
    /// How long certificates live that are signed now.
    lifetime: Duration,
    /// When the last has ended that was signed while they lived longer.
    longer_until: SystemTime,
}

impl SelfSigned {
    /// Goes on with the authority of a folder; makes one there if it holds none. Without a folder it lives as long as the
    /// process.
    ///
    /// An existing authority is not written to, unless certificates live for another time than before.
    ///
    /// # Errors
    /// When the folder cannot be read or written, is used by another process, holds something else or a root that has ended,
    /// or the lifetimes do not go together.
    pub fn open(folder: Option<&Path>, lifetimes: Lifetimes, now: SystemTime) -> Result<Self, Error> {
        let Lifetimes { certificate, root } = lifetimes;
        if root < certificate * LEAST_LIVES {
            let problem = format!(
                "a root must live at least {LEAST_LIVES} times as long as certificates; {root:?} and {certificate:?} were asked for"
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
            // The folder may be read-only. `advance` tries again, and says what is wrong.
            let _ = opened.tell_roots();
        } else {
            opened.keep(opened.state.clone())?;
        }
        Ok(opened)
    }

    /// The authority as of this step.
    ///
    /// # Errors
    /// When its root has ended.
    pub fn authority(&self) -> Result<Authority, Error> {
        Authority::of_root(&self.state.signing, self.other().as_slice())
    }

    /// The certificate that is trusted beside the one that signs.
    fn other(&self) -> Option<&str> {
        match self.state.step {
            Step::Distribute => self.state.next.as_ref().map(|root| &*root.certificate),
            Step::Issue => self.state.former.as_deref(),
            Step::Settled | Step::Retire => None,
        }
    }

    /// Where it stands.
    pub fn step(&self) -> Step {
        self.state.step
    }

    /// When this step began.
    pub fn since(&self) -> SystemTime {
        self.state.since
    }

    /// When it ends.
    pub fn until(&self) -> SystemTime {
        self.state.until
    }

    /// The former root, once it is no longer trusted and may not be forgotten yet.
    ///
    /// # Errors
    /// Not after it was read.
    pub fn retired(&self) -> Result<Option<RootInfo>, Error> {
        let retired = self.state.former.as_ref().filter(|_| self.state.step == Step::Retire);
        let Some(pem) = retired else { return Ok(None) };
        let certificates = certificates(pem.as_bytes(), STATE)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificates[0])
            .map_err(|error| Error::Certificate(error.to_string()))?;
        Ok(Some(describe_root(&parsed, false)))
    }

    /// Begins to replace the root; `false` if that is under way already.
    ///
    /// # Errors
    /// When the new state cannot be kept, or the root has ended by the clock; see [`Self::step`] for where it stands then.
    pub fn rotate(&mut self, now: SystemTime) -> Result<bool, Error> {
        self.state.check_alive(now)?;
        if self.state.step != Step::Settled {
            return Ok(false);
        }
        let next = Some(Root::generate(self.lifetimes.root, now)?);
        let state = self.state.clone();
        let until = state.renewed(now).min(state.last_chance(now)?);
        self.keep(State { step: Step::Distribute, since: now, until, next, ..state })?;
        Ok(true)
    }

    /// Goes to the next step if this one is over; says whether it did.
    ///
    /// # Errors
    /// When the new state cannot be kept, or the root has ended by the clock; see [`Self::step`] for where it stands then.
    pub fn advance(&mut self, now: SystemTime) -> Result<bool, Error> {
        self.state.check_alive(now)?;
        if now < self.state.until {
            // It may have been removed, or there was no room for it.
            self.tell_roots()?;
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
        self.tell_roots()
    }

    /// Writes `root-cert.pem`, unless it is as it should be or somebody else's: files of an authority that is to be
    /// plugged in with the next start.
    fn tell_roots(&self) -> Result<(), Error> {
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
        // Time for all steps, and one more in case of trouble.
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

    /// Fails if the root that signs has ended by the clock.
    fn check_alive(&self, now: SystemTime) -> Result<(), Error> {
        let (_, end) = validity(&self.signing.certificate)?;
        if now < end {
            return Ok(());
        }
        let time = |time: SystemTime| {
            time::OffsetDateTime::from(time).replace_nanosecond(0).unwrap_or(time::OffsetDateTime::UNIX_EPOCH)
        };
        let problem = format!(
            "its root has ended: at {} UTC, and this machine's clock says {} UTC. If the clock is wrong, set it. If it is right, move \
             authority.json and root-cert.pem away for a new root, which workloads trust once they have got a new certificate",
            time(end),
            time(now)
        );
        Err(Error::Authority { file: STATE, problem })
    }

    /// The same where certificates live so long from now on.
    fn with_lifetime(mut self, lifetime: Duration, now: SystemTime) -> Self {
        if lifetime < self.lifetime {
            self.longer_until = self.longer_until.max(now + self.lifetime);
        }
        self.lifetime = lifetime;
        self
    }

    /// When every certificate that was signed before `now` has ended.
    fn renewed(&self, now: SystemTime) -> SystemTime {
        (now + self.lifetime).max(self.longer_until) + slack(self.lifetime)
    }

    /// When another root must sign at the latest, where this one was made for shorter lifetimes: while it is still valid, and
    /// when what it signed, which ends with it, has been renewed.
    fn last_chance(&self, now: SystemTime) -> Result<SystemTime, Error> {
        let (_, end) = validity(&self.signing.certificate)?;
        Ok(now + end.duration_since(now).unwrap_or_default() * 4 / 5)
    }
}

/// For clocks that are behind, and for times that certificates tell in whole seconds.
fn slack(lifetime: Duration) -> Duration {
    margin(lifetime) + Duration::from_secs(1)
}

fn validity(pem: &str) -> Result<(SystemTime, SystemTime), Error> {
    let certificates = certificates(pem.as_bytes(), STATE)?;
    let first = certificates.first().ok_or(Error::Certificate("none".into()))?;
    describe(first).map(|(_, begin, end)| (begin, end))
}

/// Locks the folder, which is made if need be, for as long as the file is open. A folder can be locked where it cannot be
/// written to.
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

/// Reads what is kept; nothing if there is none.
fn read(folder: &Path) -> Result<Option<State>, Error> {
    let path = folder.join(STATE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !folder.join(ROOTS).exists() => {
            return Ok(None);
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let problem = "it is gone, and root-cert.pem is there: put it back, or remove root-cert.pem for a new authority, \
                           which no workload will trust that has the old root"
                .to_owned();
            return Err(Error::Authority { file: STATE, problem });
        }
        Err(error) => return Err(file_error(&path, error)),
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| Error::Authority { file: STATE, problem: format!("it cannot be read: {error}") })
}

/// Replaces a file as a whole.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    let new = path.with_extension("new");
    let replace = || {
        // One that is left from a process that ended may have another mode.
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
