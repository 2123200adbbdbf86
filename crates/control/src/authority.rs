//! The certificate authority that is in force, and what changes it: the steps of a root's replacement, or other files
//! where it is plugged in.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use serde::Serialize;
use skysail_identity::{
    Authority,
    cacerts::Files,
    cacerts::RootInfo,
    rotation::{Lifetimes, SelfSigned, Step},
};
use tokio::sync::{Notify, watch};
use tracing::{error, info, warn};

use skysail_source::watch_folder;

/// How often to look at the clock, or at files without an event.
const LOOK: Duration = Duration::from_secs(10);
/// Files are taken once they have been the same for so long.
const SETTLE: Duration = Duration::from_secs(1);
/// A plugged-in authority that nears its end is told of this often.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(24 * 3600);

/// Keeps the authority in force.
pub(crate) struct Keeper {
    kind: Mutex<Kind>,
    current: watch::Sender<Arc<Authority>>,
    /// Something was asked for.
    asked: Notify,
}

/// Where the authority comes from.
enum Kind {
    Made(SelfSigned),
    Plugged(Plugged),
}

/// An authority of other people's making.
struct Plugged {
    folder: PathBuf,
    taken: Files,
    since: SystemTime,
    /// Error of the current content of the folder.
    problem: Option<String>,
    warned: Option<SystemTime>,
}

/// Status, for people and scripts. Times are in seconds since 1970.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Status {
    /// `self-signed` or `plugged-in`.
    kind: &'static str,
    /// Step of the replacement of the root.
    pub(crate) step: Step,
    pub(crate) since: u64,
    /// When this step ends; unknown where it is plugged in.
    until: Option<u64>,
    waits_for: &'static str,
    /// Reason why the content of its folder is not in force.
    pub(crate) problem: Option<String>,
    /// Expiry of the certificate that signs.
    pub(crate) not_after: u64,
    roots: Vec<RootStatus>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct RootStatus {
    name: String,
    serial: String,
    not_after: u64,
    /// True if certificates signed now lead to it.
    signs: bool,
    /// Whether it is sent to workloads.
    trusted: bool,
}

impl Keeper {
    /// The authority of a folder, or one that lives as long as the process.
    pub(crate) fn open(folder: Option<&Path>, lifetimes: Lifetimes) -> anyhow::Result<Self> {
        let now = SystemTime::now();
        let (kind, authority) = match folder {
            Some(folder) if Files::are_in(folder) => {
                let taken = Files::read(folder)?;
                let authority = taken.authority()?;
                info!(folder = %folder.display(), "the certificate authority is plugged in");
                let folder = folder.to_owned();
                (Kind::Plugged(Plugged { folder, taken, since: now, problem: None, warned: None }), authority)
            }
            folder => {
                let made = SelfSigned::open(folder, lifetimes, now)?;
                let authority = made.authority()?;
                (Kind::Made(made), authority)
            }
        };
        let keeper = Self {
            kind: Mutex::new(kind),
            current: watch::Sender::new(Arc::new(authority)),
            asked: Notify::new(),
        };
        keeper.tell();
        Ok(keeper)
    }

    /// The authority of now.
    pub(crate) fn current(&self) -> Arc<Authority> {
        Arc::clone(&self.current.borrow())
    }

    /// The authority of now and each that follows.
    pub(crate) fn follow(&self) -> watch::Receiver<Arc<Authority>> {
        self.current.subscribe()
    }

    fn kind(&self) -> std::sync::MutexGuard<'_, Kind> {
        self.kind.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> Status {
        // What is in force changes under this lock, so that the two go together.
        let kind = self.kind();
        let authority = self.current();
        let mut roots: Vec<_> = authority.described().iter().map(|root| RootStatus::of(root, true)).collect();
        let not_after = seconds(authority.not_after());
        match &*kind {
            Kind::Made(made) => {
                let retired = made.retired().ok().flatten();
                roots.extend(retired.map(|root| RootStatus::of(&root, false)));
                Status {
                    kind: "self-signed",
                    step: made.step(),
                    since: seconds(made.since()),
                    until: Some(seconds(made.until())),
                    waits_for: made.step().waits_for(),
                    problem: None,
                    not_after,
                    roots,
                }
            }
            Kind::Plugged(plugged) => Status {
                kind: "plugged-in",
                step: Step::Settled,
                since: seconds(plugged.since),
                until: None,
                waits_for: "its files to be replaced",
                problem: plugged.problem.clone(),
                not_after,
                roots,
            },
        }
    }

    /// Begins to replace the root.
    pub(crate) fn rotate(&self) -> Result<(), String> {
        let now = SystemTime::now();
        let begun = match &mut *self.kind() {
            Kind::Plugged(plugged) => {
                return Err(format!(
                    "the authority is plugged in: replace the files in {}, first with the next root in root-cert.pem beside the \
                     old one, and after the lifetime of a certificate with what it signs with",
                    plugged.folder.display()
                ));
            }
            Kind::Made(made) => self.change(made, |made| made.rotate(now)),
        };
        match begun {
            Ok(true) => {
                self.asked.notify_one();
                self.tell();
                Ok(())
            }
            Ok(false) => Err("the root is being replaced already; see its status".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Changes an authority that is made here, and puts the result in force.
    fn change(
        &self,
        made: &mut SelfSigned,
        change: impl FnOnce(&mut SelfSigned) -> Result<bool, skysail_identity::Error>,
    ) -> Result<bool, skysail_identity::Error> {
        let before = made.step();
        let changed = change(made);
        if made.step() != before {
            self.current.send_replace(Arc::new(made.authority()?));
        }
        changed
    }

    fn tell(&self) {
        let status = self.status();
        let trusted = status.trusted();
        let Status { kind, step, until, waits_for, roots, .. } = status;
        let signs = roots.iter().filter(|root| root.signs).map(|root| root.name.as_str()).collect::<Vec<_>>();
        info!(kind, step = step.name(), signs = ?signs, trusted, ?until, "certificate authority: waits for {waits_for}");
    }

    /// Runs due steps, until the process ends.
    pub(crate) async fn run(self: Arc<Self>) {
        let changed = Arc::new(Notify::new());
        let _watcher = self.watch(&changed);
        let mut failed = false;
        loop {
            let pause = match &*self.kind() {
                // The clock may be set, so it is looked at now and then.
                Kind::Made(made) if !failed => {
                    made.until().duration_since(SystemTime::now()).unwrap_or_default().min(LOOK)
                }
                _ => LOOK,
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = changed.notified() => {}
                () = self.asked.notified() => {}
            }
            match self.advance() {
                None => self.take_files().await,
                Some(result) => failed = result.is_err(),
            }
        }
    }

    /// Watches the folder of a plugged-in authority.
    fn watch(&self, changed: &Arc<Notify>) -> Option<notify::RecommendedWatcher> {
        let Kind::Plugged(plugged) = &*self.kind() else { return None };
        watch_folder(&plugged.folder, changed)
    }

    /// Continues the replacement of a root; does nothing for a plugged-in authority.
    fn advance(&self) -> Option<Result<(), skysail_identity::Error>> {
        let advanced = match &mut *self.kind() {
            Kind::Plugged(_) => return None,
            Kind::Made(made) => self.change(made, |made| made.advance(SystemTime::now())),
        };
        match &advanced {
            Ok(true) => self.tell(),
            Ok(false) => {}
            Err(error) => {
                error!(%error, "the replacement of the root does not go on; what there is stays in force");
            }
        }
        Some(advanced.map(drop))
    }

    /// Loads the authority in the folder once it is complete.
    async fn take_files(&self) {
        let Some(folder) = (match &*self.kind() {
            Kind::Plugged(plugged) => Some(plugged.folder.clone()),
            Kind::Made(_) => None,
        }) else {
            return;
        };
        let mut found = Files::read(&folder).map_err(|error| error.to_string());
        loop {
            if matches!((&found, &*self.kind()), (Ok(files), Kind::Plugged(plugged)) if *files == plugged.taken)
            {
                break;
            }
            tokio::time::sleep(SETTLE).await;
            let again = Files::read(&folder).map_err(|error| error.to_string());
            if std::mem::replace(&mut found, again.clone()) == again {
                break;
            }
        }
        let found = found.and_then(|files| {
            let authority = files.authority().map_err(|error| error.to_string())?;
            Ok((files, authority))
        });
        if let Kind::Plugged(plugged) = &mut *self.kind() {
            plugged.take(found, &self.current);
        }
    }
}

impl Plugged {
    fn take(&mut self, found: Result<(Files, Authority), String>, current: &watch::Sender<Arc<Authority>>) {
        let now = SystemTime::now();
        match found {
            Err(problem) => {
                if self.problem.as_ref() != Some(&problem) {
                    warn!(folder = %self.folder.display(), problem, "the authority in --ca-dir cannot be used; the one before stays in force");
                }
                self.problem = Some(problem);
            }
            Ok((files, authority)) => {
                self.problem = None;
                if files != self.taken {
                    let before = current.send_replace(Arc::new(authority));
                    let after = current.borrow().clone();
                    let trusted =
                        |root: &&RootInfo| after.described().iter().any(|new| new.serial == root.serial);
                    if let Some(lost) =
                        before.described().iter().filter(|root| root.signs).find(|root| !trusted(root))
                    {
                        warn!(
                            root = lost.name,
                            "root-cert.pem no longer holds the root of the certificates in use: calls fail until all workloads \
                               have renewed theirs; keep it there for the lifetime of a certificate"
                        );
                    }
                    let roots: Vec<_> = after.described().iter().map(|root| &*root.name).collect();
                    info!(folder = %self.folder.display(), ?roots, "another certificate authority is plugged in");
                    (self.taken, self.since, self.warned) = (files, now, None);
                }
            }
        }
        let authority = current.borrow().clone();
        let life = authority.not_after().duration_since(authority.not_before()).unwrap_or_default();
        let left = authority.not_after().duration_since(now).unwrap_or_default();
        let said = self.warned.is_some_and(|at| now < at + BETWEEN_WARNINGS);
        if left < life / 5 && !said {
            self.warned = Some(now);
            warn!(folder = %self.folder.display(), ?left, "the plugged-in authority ends soon: replace its files");
        }
    }
}

impl Status {
    /// How many roots workloads trust.
    pub(crate) fn trusted(&self) -> u64 {
        self.roots.iter().filter(|root| root.trusted).count() as u64
    }
}

impl RootStatus {
    fn of(root: &RootInfo, trusted: bool) -> Self {
        let RootInfo { name, serial, not_after, signs } = root.clone();
        Self { name, serial, not_after: seconds(not_after), signs, trusted }
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}
