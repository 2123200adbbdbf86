//! The certificate authority of the mesh. A self-signed one changes with the steps of a root rotation, a plugged-in one
//! with the files in `--ca-dir`.

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

/// Interval at which the clock and the files are read even if no event arrives.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Files are loaded after they have not changed for this time, so that a set of files is complete.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// Interval of the warning that a plugged-in authority expires soon.
const WARNING_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// Provides the current authority and replaces it.
pub(crate) struct AuthorityManager {
    source: Mutex<AuthoritySource>,
    current: watch::Sender<Arc<Authority>>,
    /// Notified when an administrator has started a rotation.
    rotation_started: Notify,
}

/// Origin of the authority.
enum AuthoritySource {
    SelfSigned(SelfSigned),
    PluggedIn(PluggedIn),
}

/// An authority whose files the operator provides.
struct PluggedIn {
    directory: PathBuf,
    /// Files of the current authority.
    files: Files,
    since: SystemTime,
    /// Reason why the files in the directory cannot be used.
    problem: Option<String>,
    /// Time of the last warning about its expiry.
    warned_at: Option<SystemTime>,
}

/// Status for `/debug/ca` and metrics. Times are in seconds since 1970.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct AuthorityStatus {
    /// `self-signed` or `plugged-in`.
    kind: &'static str,
    /// Step of the root rotation.
    pub(crate) step: Step,
    pub(crate) since: u64,
    /// End of this step; `None` for a plugged-in authority.
    until: Option<u64>,
    waits_for: &'static str,
    /// Reason why the files in `--ca-dir` cannot be used.
    pub(crate) problem: Option<String>,
    /// Expiry of the signing certificate.
    pub(crate) not_after: u64,
    roots: Vec<RootStatus>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct RootStatus {
    name: String,
    serial: String,
    not_after: u64,
    /// New certificates chain to this root.
    signs: bool,
    /// The root is in the trust bundle of workloads.
    trusted: bool,
}

impl AuthorityManager {
    /// Opens the authority in a directory. Without a directory, it lasts until the process ends.
    pub(crate) fn open(directory: Option<&Path>, lifetimes: Lifetimes) -> anyhow::Result<Self> {
        let now = SystemTime::now();
        let (source, authority) = match directory {
            Some(directory) if Files::are_in(directory) => {
                let files = Files::read(directory)?;
                let authority = files.authority()?;
                info!(folder = %directory.display(), "plugged-in certificate authority loaded");
                let directory = directory.to_owned();
                (
                    AuthoritySource::PluggedIn(PluggedIn {
                        directory,
                        files,
                        since: now,
                        problem: None,
                        warned_at: None,
                    }),
                    authority,
                )
            }
            directory => {
                let self_signed = SelfSigned::open(directory, lifetimes, now)?;
                let authority = self_signed.authority()?;
                (AuthoritySource::SelfSigned(self_signed), authority)
            }
        };
        let manager = Self {
            source: Mutex::new(source),
            current: watch::Sender::new(Arc::new(authority)),
            rotation_started: Notify::new(),
        };
        manager.log_status();
        Ok(manager)
    }

    /// Returns the current authority.
    pub(crate) fn current(&self) -> Arc<Authority> {
        Arc::clone(&self.current.borrow())
    }

    /// Returns a receiver of the current authority and its successors.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<Authority>> {
        self.current.subscribe()
    }

    fn source(&self) -> std::sync::MutexGuard<'_, AuthoritySource> {
        self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> AuthorityStatus {
        // The authority changes under this lock only, so the source and the authority match.
        let source = self.source();
        let authority = self.current();
        let mut roots: Vec<_> = authority.described().iter().map(|root| RootStatus::of(root, true)).collect();
        let not_after = seconds(authority.not_after());
        match &*source {
            AuthoritySource::SelfSigned(self_signed) => {
                let retired = self_signed.retired().ok().flatten();
                roots.extend(retired.map(|root| RootStatus::of(&root, false)));
                AuthorityStatus {
                    kind: "self-signed",
                    step: self_signed.step(),
                    since: seconds(self_signed.since()),
                    until: Some(seconds(self_signed.until())),
                    waits_for: self_signed.step().waits_for(),
                    problem: None,
                    not_after,
                    roots,
                }
            }
            AuthoritySource::PluggedIn(plugged_in) => AuthorityStatus {
                kind: "plugged-in",
                step: Step::Settled,
                since: seconds(plugged_in.since),
                until: None,
                waits_for: "its files to be replaced",
                problem: plugged_in.problem.clone(),
                not_after,
                roots,
            },
        }
    }

    /// Starts a rotation of the root.
    pub(crate) fn rotate(&self) -> Result<(), String> {
        let now = SystemTime::now();
        let begun = match &mut *self.source() {
            AuthoritySource::PluggedIn(plugged_in) => {
                return Err(format!(
                    "a plugged-in authority is rotated by its files: in {}, add the new root to root-cert.pem; after the lifetime of a \
                     certificate, replace the files that sign (ca-cert.pem, ca-key.pem, cert-chain.pem)",
                    plugged_in.directory.display()
                ));
            }
            AuthoritySource::SelfSigned(self_signed) => {
                self.change(self_signed, |self_signed| self_signed.rotate(now))
            }
        };
        match begun {
            Ok(true) => {
                self.rotation_started.notify_one();
                self.log_status();
                Ok(())
            }
            Ok(false) => {
                Err("a rotation of the root is already in progress; /debug/ca shows its step".to_owned())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Changes a self-signed authority and publishes the result.
    fn change(
        &self,
        self_signed: &mut SelfSigned,
        change: impl FnOnce(&mut SelfSigned) -> Result<bool, skysail_identity::Error>,
    ) -> Result<bool, skysail_identity::Error> {
        let before = self_signed.step();
        let changed = change(self_signed);
        if self_signed.step() != before {
            self.current.send_replace(Arc::new(self_signed.authority()?));
        }
        changed
    }

    fn log_status(&self) {
        let status = self.status();
        let trusted = status.trusted_roots();
        let AuthorityStatus { kind, step, until, waits_for, roots, .. } = status;
        let signs = roots.iter().filter(|root| root.signs).map(|root| root.name.as_str()).collect::<Vec<_>>();
        info!(kind, step = step.name(), signs = ?signs, trusted, ?until, "certificate authority: waiting for {waits_for}");
    }

    /// Runs the steps of rotations and loads changed files. Never returns.
    pub(crate) async fn run(self: Arc<Self>) {
        let changed = Arc::new(Notify::new());
        let _watcher = self.watch(&changed);
        let mut failed = false;
        loop {
            let pause = match &*self.source() {
                // Bounded, because the system clock may be set.
                AuthoritySource::SelfSigned(self_signed) if !failed => self_signed
                    .until()
                    .duration_since(SystemTime::now())
                    .unwrap_or_default()
                    .min(POLL_INTERVAL),
                _ => POLL_INTERVAL,
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = changed.notified() => {}
                () = self.rotation_started.notified() => {}
            }
            match self.advance() {
                None => self.load_files().await,
                Some(result) => failed = result.is_err(),
            }
        }
    }

    /// Watches the directory of a plugged-in authority.
    fn watch(&self, changed: &Arc<Notify>) -> Option<notify::RecommendedWatcher> {
        let AuthoritySource::PluggedIn(plugged_in) = &*self.source() else { return None };
        watch_folder(&plugged_in.directory, changed)
    }

    /// Runs the due step of a rotation. Returns `None` for a plugged-in authority.
    fn advance(&self) -> Option<Result<(), skysail_identity::Error>> {
        let advanced = match &mut *self.source() {
            AuthoritySource::PluggedIn(_) => return None,
            AuthoritySource::SelfSigned(self_signed) => {
                self.change(self_signed, |self_signed| self_signed.advance(SystemTime::now()))
            }
        };
        match &advanced {
            Ok(true) => self.log_status(),
            Ok(false) => {}
            Err(error) => {
                error!(%error, "rotation of the root failed; the current roots stay in use and the step is retried");
            }
        }
        Some(advanced.map(drop))
    }

    /// Loads the authority in the directory after its files have settled.
    async fn load_files(&self) {
        let Some(directory) = (match &*self.source() {
            AuthoritySource::PluggedIn(plugged_in) => Some(plugged_in.directory.clone()),
            AuthoritySource::SelfSigned(_) => None,
        }) else {
            return;
        };
        let mut found = Files::read(&directory).map_err(|error| error.to_string());
        loop {
            if matches!((&found, &*self.source()), (Ok(files), AuthoritySource::PluggedIn(plugged_in)) if *files == plugged_in.files)
            {
                break;
            }
            tokio::time::sleep(SETTLE_TIME).await;
            let again = Files::read(&directory).map_err(|error| error.to_string());
            if std::mem::replace(&mut found, again.clone()) == again {
                break;
            }
        }
        let found = found.and_then(|files| {
            let authority = files.authority().map_err(|error| error.to_string())?;
            Ok((files, authority))
        });
        if let AuthoritySource::PluggedIn(plugged_in) = &mut *self.source() {
            plugged_in.apply(found, &self.current);
        }
    }
}

impl PluggedIn {
    fn apply(&mut self, found: Result<(Files, Authority), String>, current: &watch::Sender<Arc<Authority>>) {
        let now = SystemTime::now();
        match found {
            Err(problem) => {
                if self.problem.as_ref() != Some(&problem) {
                    warn!(folder = %self.directory.display(), problem, "certificate authority in --ca-dir cannot be used; the current one stays in use");
                }
                self.problem = Some(problem);
            }
            Ok((files, authority)) => {
                self.problem = None;
                if files != self.files {
                    let before = current.send_replace(Arc::new(authority));
                    let after = current.borrow().clone();
                    let trusted =
                        |root: &&RootInfo| after.described().iter().any(|new| new.serial == root.serial);
                    if let Some(removed) =
                        before.described().iter().filter(|root| root.signs).find(|root| !trusted(root))
                    {
                        warn!(
                            root = removed.name,
                            "root-cert.pem no longer contains the root of the certificates in use: calls fail until all workloads have renewed \
                               them; keep the old root in the file for the lifetime of a certificate"
                        );
                    }
                    let roots: Vec<_> = after.described().iter().map(|root| &*root.name).collect();
                    info!(folder = %self.directory.display(), ?roots, "plugged-in certificate authority replaced");
                    (self.files, self.since, self.warned_at) = (files, now, None);
                }
            }
        }
        let authority = current.borrow().clone();
        let life = authority.not_after().duration_since(authority.not_before()).unwrap_or_default();
        let left = authority.not_after().duration_since(now).unwrap_or_default();
        let was_logged = self.warned_at.is_some_and(|at| now < at + WARNING_INTERVAL);
        if left < life / 5 && !was_logged {
            self.warned_at = Some(now);
            warn!(folder = %self.directory.display(), ?left, "plugged-in certificate authority expires soon; replace its files");
        }
    }
}

impl AuthorityStatus {
    /// Returns the number of roots that workloads trust.
    pub(crate) fn trusted_roots(&self) -> u64 {
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
