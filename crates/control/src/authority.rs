//! The certificate authority of the mesh. A self-signed one changes with the steps of a root rotation, a plugged-in one
//! with its files. The manager uses what the store holds. It stores a step of a rotation before it uses the step.

mod store;

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use anyhow::bail;
use serde::Serialize;
use skysail_identity::{
    Authority,
    cacerts::RootInfo,
    rotation::{Lifetimes, SelfSigned, Step},
};
use skysail_kubernetes::{SecretError, Secrets};
use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use self::store::{ClusterStore, Held, Store};

/// Interval at which the clock and the store are read even if no event arrives.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the start asks an API server that is away.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the warning that a plugged-in authority expires soon.
const WARNING_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// Interval of messages about the same problem.
const PROBLEM_INTERVAL: Duration = Duration::from_secs(60);

/// Provides the current authority and replaces it.
pub(crate) struct AuthorityManager {
    /// Locked while the authority changes.
    store: tokio::sync::Mutex<Store>,
    used: Mutex<Used>,
    current: watch::Sender<Arc<Authority>>,
    /// Notified when an administrator has started a rotation.
    rotation_started: Notify,
}

/// The authority in use.
struct Used {
    held: Held,
    /// Its place, for messages.
    place: String,
    since: SystemTime,
    /// Reason why the store cannot be used, and the time of the last message about it.
    problem: Option<(String, Instant)>,
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
    /// Reason why what the store holds cannot be used, or why a step cannot be stored.
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
        let (store, held) = Store::open(directory, lifetimes)?;
        Self::new(store, held)
    }

    /// Opens the authority in Secrets of a cluster. Waits while the API server is away.
    pub(crate) async fn open_in_cluster(secrets: Secrets, lifetimes: Lifetimes) -> anyhow::Result<Self> {
        let mut store = ClusterStore::new(secrets, lifetimes);
        let mut logged: Option<Instant> = None;
        loop {
            let error = match store.load(None).await {
                Ok(held) => return Self::new(Store::Cluster(store.into()), held),
                Err(error) => error,
            };
            if !error.downcast_ref::<SecretError>().is_some_and(SecretError::is_temporary) {
                return Err(error);
            }
            if logged.is_none_or(|at| at.elapsed() >= PROBLEM_INTERVAL) {
                logged = Some(Instant::now());
                warn!(error = format!("{error:#}"), "the start waits for the certificate authority");
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    fn new(store: Store, held: Held) -> anyhow::Result<Self> {
        let current = watch::Sender::new(Arc::new(held.authority()?));
        let place = store.place(&held);
        if let Held::PluggedIn(_) = held {
            info!(place, "plugged-in certificate authority loaded");
        }
        let used = Used { held, place, since: SystemTime::now(), problem: None, warned_at: None };
        let manager =
            Self { store: store.into(), used: used.into(), current, rotation_started: Notify::new() };
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

    fn used(&self) -> std::sync::MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> AuthorityStatus {
        // The authority changes under this lock only, so both match.
        let used = self.used();
        let authority = self.current();
        let mut roots: Vec<_> = authority.described().iter().map(|root| RootStatus::of(root, true)).collect();
        let not_after = seconds(authority.not_after());
        let problem = used.problem.as_ref().map(|(problem, _)| problem.clone());
        match &used.held {
            Held::SelfSigned(self_signed) => {
                let retired = self_signed.retired().ok().flatten();
                roots.extend(retired.map(|root| RootStatus::of(&root, false)));
                AuthorityStatus {
                    kind: "self-signed",
                    step: self_signed.step(),
                    since: seconds(self_signed.since()),
                    until: Some(seconds(self_signed.until())),
                    waits_for: self_signed.step().waits_for(),
                    problem,
                    not_after,
                    roots,
                }
            }
            Held::PluggedIn(_) => AuthorityStatus {
                kind: "plugged-in",
                step: Step::Settled,
                since: seconds(used.since),
                until: None,
                waits_for: "its files to be replaced",
                problem,
                not_after,
                roots,
            },
        }
    }

    /// Starts a rotation of the root.
    pub(crate) async fn rotate(&self) -> Result<(), String> {
        let is_started = match self.plugged_in() {
            Some(_) => false,
            None => self
                .change(|used| used.rotated(SystemTime::now()))
                .await
                .map_err(|error| format!("{error:#}"))?,
        };
        if is_started {
            self.rotation_started.notify_one();
            return Ok(());
        }
        Err(match self.plugged_in() {
            None => "a rotation of the root is already in progress; /debug/ca shows its step".to_owned(),
            Some(place) => format!(
                "a plugged-in authority is rotated by its files: in {place}, add the new root to root-cert.pem; after the lifetime of a \
                 certificate, replace the files that sign (ca-cert.pem, ca-key.pem, cert-chain.pem)"
            ),
        })
    }

    /// Returns the place of the authority if it is plugged in.
    fn plugged_in(&self) -> Option<String> {
        let used = self.used();
        matches!(used.held, Held::PluggedIn(_)).then(|| used.place.clone())
    }

    /// Uses what the store holds. If that is a self-signed authority, stores its next state, if there is one, and uses
    /// that. Returns whether there was one.
    async fn change(
        &self,
        next: impl Fn(&SelfSigned) -> Result<Option<SelfSigned>, skysail_identity::Error>,
    ) -> anyhow::Result<bool> {
        let mut store = self.store.lock().await;
        for _ in 0..store::ATTEMPTS {
            let used = self.used().held.clone();
            let held = store.load(used).await?;
            self.adopt(&store, &held)?;
            let Held::SelfSigned(held) = held else { return Ok(false) };
            let Some(next) = next(&held)? else {
                store.write_roots(&held)?;
                return Ok(false);
            };
            // A state that cannot sign is not stored.
            next.authority()?;
            // Otherwise another control plane was first; what it has stored decides.
            if store.replace(&next).await? {
                self.adopt(&store, &Held::SelfSigned(next.clone()))?;
                store.write_roots(&next)?;
                return Ok(true);
            }
        }
        bail!("other programs change {} all the time", self.used().place)
    }

    /// Uses an authority that is stored.
    fn adopt(&self, store: &Store, held: &Held) -> Result<(), skysail_identity::Error> {
        let mut used = self.used();
        if *held == used.held {
            return Ok(());
        }
        let is_published = match (held, &used.held) {
            (Held::SelfSigned(new), Held::SelfSigned(old)) => {
                (new.step(), new.roots_pem()) != (old.step(), old.roots_pem())
            }
            _ => true,
        };
        if is_published {
            let before = self.current.send_replace(Arc::new(held.authority()?));
            warn_of_removed_root(&before, &self.current.borrow());
        }
        let problem = used.problem.take();
        *used = Used {
            held: held.clone(),
            place: store.place(held),
            since: SystemTime::now(),
            problem,
            warned_at: None,
        };
        let place = used.place.clone();
        drop(used);
        match held {
            Held::PluggedIn(_) => {
                let after = self.current();
                let roots: Vec<_> = after.described().iter().map(|root| &*root.name).collect();
                info!(place, ?roots, "plugged-in certificate authority replaced");
            }
            Held::SelfSigned(_) if is_published => self.log_status(),
            Held::SelfSigned(_) => {}
        }
        Ok(())
    }

    fn log_status(&self) {
        let status = self.status();
        let trusted = status.trusted_roots();
        let AuthorityStatus { kind, step, until, waits_for, roots, .. } = status;
        let signs = roots.iter().filter(|root| root.signs).map(|root| root.name.as_str()).collect::<Vec<_>>();
        info!(kind, step = step.name(), signs = ?signs, trusted, ?until, "certificate authority: waiting for {waits_for}");
    }

    /// Runs the steps of rotations and follows the store. Never returns.
    pub(crate) async fn run(self: Arc<Self>) {
        let changed = Arc::new(Notify::new());
        let _watcher = self.store.lock().await.follow(&changed);
        let mut failed = false;
        loop {
            let pause = match &self.used().held {
                // Bounded, because the system clock may be set.
                Held::SelfSigned(self_signed) if !failed => self_signed
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
            let changed = self.change(|used| used.advanced(SystemTime::now())).await;
            failed = changed.is_err();
            self.used().report(changed.err());
            self.warn_of_expiry();
        }
    }

    /// Warns once a day about a plugged-in authority that expires soon.
    fn warn_of_expiry(&self) {
        let mut used = self.used();
        let authority = self.current();
        let now = SystemTime::now();
        let life = authority.not_after().duration_since(authority.not_before()).unwrap_or_default();
        let left = authority.not_after().duration_since(now).unwrap_or_default();
        let was_logged = used.warned_at.is_some_and(|at| now < at + WARNING_INTERVAL);
        if matches!(used.held, Held::PluggedIn(_)) && left < life / 5 && !was_logged {
            used.warned_at = Some(now);
            warn!(
                place = used.place,
                ?left,
                "plugged-in certificate authority expires soon; replace its files"
            );
        }
    }
}

impl Used {
    /// Keeps the present problem, and logs it once a minute.
    fn report(&mut self, problem: Option<anyhow::Error>) {
        let Some(problem) = problem.map(|problem| format!("{problem:#}")) else {
            self.problem = None;
            return;
        };
        let logged = self.problem.as_ref().filter(|(known, _)| *known == problem).map(|(_, at)| *at);
        let at = logged.filter(|at| at.elapsed() < PROBLEM_INTERVAL).unwrap_or_else(|| {
            warn!(
                place = self.place,
                problem, "certificate authority cannot be used or changed; the current one stays in use, and this is tried again"
            );
            Instant::now()
        });
        self.problem = Some((problem, at));
    }
}

/// Warns if a root of certificates in use is no longer trusted.
fn warn_of_removed_root(before: &Authority, after: &Authority) {
    let trusted = |root: &&RootInfo| after.described().iter().any(|new| new.serial == root.serial);
    if let Some(removed) = before.described().iter().filter(|root| root.signs).find(|root| !trusted(root)) {
        warn!(
            root = removed.name,
            "the root of the certificates in use is no longer trusted: calls fail until all workloads have renewed them; keep the old \
             root in root-cert.pem for the lifetime of a certificate"
        );
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

#[cfg(test)]
mod tests;
