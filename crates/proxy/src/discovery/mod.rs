//! Which configuration is in force.
//!
//! Everything that can change it, an update from the control plane, a secret, a host name looked up, patience at
//! its end, goes through [`Configuration`] one after the other: take it, put into force what is warm, ask for what is
//! named, publish.

pub(crate) mod remote;
pub(crate) mod secrets;

mod hosts;
pub(crate) mod inventory;
pub(crate) mod names;
mod slot;
mod uses;

use std::{
    collections::HashMap,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use skysail_core::trim;
use skysail_xds::{
    Kind,
    client::{Client, Connection, Options, Rejection, Subscriptions, Update},
    envoy::pb::envoy::config::core::v3::Node,
};
use tokio::sync::{Mutex, MutexGuard, Notify, mpsc};
use tonic::metadata::MetadataMap;

use self::inventory::{Inventory, Take};
use crate::{
    accept::workers::Workers,
    discovery::{remote::Remote, secrets::Secrets},
    translate::{TlsContexts, Translator, bootstrap},
};
use skysail_policy::state::demand::Question;

/// After a change, further ones are expected for so long.
const QUIET: Duration = Duration::from_secs(5);
/// How often memory that traffic no longer needs is given back.
const BETWEEN_TRIMS: Duration = Duration::from_secs(30);

/// The configuration and those it is published to.
pub(crate) struct Configuration {
    inventory: Mutex<Inventory>,
    workers: Arc<Workers>,
    secrets: Secrets,
    node: Node,
    /// Encoded static clusters, which discovery and secrets may be behind.
    remotes: HashMap<String, Bytes>,
    mark: Option<u32>,
    /// In a mesh without a bootstrap file: secrets are not fetched from SDS servers, and the server may be ours.
    in_mesh: bool,
    /// Where requests ask for virtual hosts, and where they are heard.
    questions: (mpsc::UnboundedSender<Question>, Mutex<mpsc::UnboundedReceiver<Question>>),
    /// Clusters and listeners have come once, or none were to come.
    seen: [AtomicBool; 2],
    /// Told what to ask for; `None` without discovery.
    subscriptions: std::sync::OnceLock<Subscriptions>,
    /// All of the first configuration is in force.
    ready: AtomicBool,
    /// By [`Kind`].
    updates: std::sync::Mutex<[Updates; Kind::ALL.len()]>,
    /// Something began to wait, so that the one who watches deadlines must look again.
    waits: Notify,
    /// A change has been dealt with.
    settled: Notify,
}

/// How many updates of a kind have come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Updates {
    pub(crate) success: u64,
    /// Something in them was refused.
    pub(crate) rejected: u64,
    /// When the last came that was taken, in milliseconds since 1970; 0 before the first.
    pub(crate) at_ms: u64,
}

/// What [`Configuration::new`] needs to know.
pub(crate) struct Setup {
    pub(crate) workers: Arc<Workers>,
    pub(crate) secrets: Secrets,
    pub(crate) node: Node,
    pub(crate) mark: Option<u32>,
    pub(crate) in_mesh: bool,
}

impl Configuration {
    pub(crate) fn new(setup: Setup) -> Self {
        let Setup { workers, secrets, node, mark, in_mesh } = setup;
        let (ask, asked) = mpsc::unbounded_channel();
        let mut inventory = Inventory::new(secrets.clone(), node.clone());
        if in_mesh {
            inventory.set_take(Take::NotYet, None);
        }
        Self {
            inventory: Mutex::new(inventory),
            workers,
            secrets,
            node,
            remotes: HashMap::new(),
            mark,
            in_mesh,
            questions: (ask, Mutex::new(asked)),
            seen: [AtomicBool::new(false), AtomicBool::new(false)],
            subscriptions: std::sync::OnceLock::new(),
            ready: AtomicBool::new(false),
            updates: std::sync::Mutex::default(),
            waits: Notify::new(),
            settled: Notify::new(),
        }
    }

    /// Takes the static resources of a bootstrap file.
    ///
    /// # Errors
    /// The first that cannot be used; a file is refused whole.
    pub(crate) fn add_static(&mut self, file: &bootstrap::Bootstrap) -> anyhow::Result<()> {
        let inventory = self.inventory.get_mut();
        for (index, (name, body)) in file.clusters.iter().enumerate() {
            self.remotes.insert(name.clone(), body.clone());
            if !bootstrap::is_pipe(body) {
                let outcome = inventory.add_static(Kind::Cluster, name, body);
                outcome.map_err(|reason| {
                    anyhow::anyhow!("static_resources.clusters[{index}] ({name:?}): {reason}")
                })?;
            }
        }
        for (index, (name, body)) in file.listeners.iter().enumerate() {
            let key = if name.is_empty() { format!("listener {index}") } else { name.clone() };
            let outcome = inventory.add_static(Kind::Listener, &key, body);
            outcome.map_err(|reason| {
                anyhow::anyhow!("static_resources.listeners[{index}] ({name:?}): {reason}")
            })?;
        }
        for secret in &file.secrets {
            let name = crate::translate::SecretName {
                source: crate::translate::SecretSource::Static,
                name: secret.name.as_str().into(),
            };
            let taken = self.secrets.take(&name, secret);
            taken.map_err(|reject| {
                anyhow::anyhow!("static_resources.secrets ({:?}): {reject}", secret.name)
            })?;
        }
        let (clusters, listeners) =
            file.ads.as_ref().map_or((false, false), |ads| (ads.clusters, ads.listeners));
        self.seen = [AtomicBool::new(!clusters), AtomicBool::new(!listeners)];
        Ok(())
    }

    /// The server behind a static cluster.
    pub(crate) fn remote(&self, cluster: &str) -> Option<Remote> {
        let body = self.remotes.get(cluster)?;
        let translator = Translator { tls: &self.secrets.tls, node: &self.node, strict: false };
        match Remote::from_cluster(body, translator, self.mark) {
            Ok(remote) => Some(remote),
            Err(reject) => {
                tracing::error!(cluster, %reject, "cannot be used for discovery or secrets");
                None
            }
        }
    }

    /// The certificates and roots of all contexts.
    pub(crate) fn tls(&self) -> &Arc<TlsContexts> {
        &self.secrets.tls
    }

    /// What there is, for the admin page.
    pub(crate) async fn inventory(&self) -> MutexGuard<'_, Inventory> {
        self.inventory.lock().await
    }

    /// Whether listeners, clusters and certificates are in force.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// How many updates of a kind have come.
    pub(crate) fn updates(&self, kind: Kind) -> Updates {
        self.updates.lock().unwrap_or_else(PoisonError::into_inner)[kind as usize]
    }

    fn count_update(&self, kind: Kind, rejected: bool) {
        let updates = &mut self.updates.lock().unwrap_or_else(PoisonError::into_inner)[kind as usize];
        if rejected {
            updates.rejected += 1;
        } else {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            updates.success += 1;
            updates.at_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        }
    }

    /// Whether a discovery stream is open.
    pub(crate) fn is_connected(&self) -> bool {
        self.subscriptions.get().is_some_and(|subscriptions| *subscriptions.connected().borrow())
    }

    /// Takes configuration from a server for ever. `metadata` gives the headers of each attempt.
    pub(crate) async fn follow(
        self: &Arc<Self>,
        options: Options,
        remote: Remote,
        metadata: impl Fn() -> anyhow::Result<MetadataMap>,
    ) -> std::convert::Infallible {
        let (client, subscriptions) = Client::new(options);
        let _ = self.subscriptions.set(subscriptions.clone());
        let mut renewed = self.secrets.renewed.subscribe();
        let retries = async {
            while renewed.changed().await.is_ok() {
                subscriptions.retry();
            }
        };
        let connect = async || {
            let metadata = metadata()?;
            Ok(Connection { channel: remote.connect().await?, metadata })
        };
        let run = client.run(connect, async |update| self.update(update).await);
        tokio::join!(run, retries).0
    }

    /// Takes an update; gives what of it is refused.
    async fn update(self: &Arc<Self>, update: Update) -> Vec<Rejection> {
        let mut inventory = self.inventory.lock().await;
        if inventory.take() != Take::AsTold {
            // Only our own server finds virtual hosts by authority.
            let ours = self.subscriptions.get().is_some_and(Subscriptions::is_ours);
            let take = if ours { Take::Used } else { Take::All };
            if inventory.take() != take {
                tracing::info!(on_demand = ours, "discovery");
                inventory.set_take(take, Some(self.questions.0.clone()));
            }
            if ours {
                self.seen[0].store(true, Ordering::Release);
            }
        }
        let mut rejections = inventory.apply(&update);
        match update.kind {
            Kind::Cluster => self.seen[0].store(true, Ordering::Release),
            Kind::Listener => self.seen[1].store(true, Ordering::Release),
            _ => {}
        }
        let failed = self.settle(&mut inventory).await;
        if update.kind == Kind::Listener {
            let of_this =
                failed.into_iter().filter(|(name, _)| update.added.iter().any(|added| *added.name == **name));
            rejections.extend(of_this.map(|(name, reason)| Rejection { name: name.to_string(), reason }));
        }
        self.count_update(update.kind, !rejections.is_empty());
        tracing::debug!(kind = %update.kind, added = update.added.len(), removed = update.removed.len(), refused = rejections.len(), "update");
        rejections
    }

    /// Puts into force what can be; for the first configuration and after each change that is no update.
    pub(crate) async fn refresh(self: &Arc<Self>) -> Vec<(Arc<str>, String)> {
        let mut inventory = self.inventory.lock().await;
        self.settle(&mut inventory).await
    }

    /// Refreshes whenever a secret came, a name was looked up, or something has waited for long enough.
    pub(crate) async fn keep_fresh(self: &Arc<Self>) -> std::convert::Infallible {
        loop {
            let deadline = self.inventory.lock().await.deadline(Instant::now());
            let late = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.secrets.changed.notified() => {}
                () = late => {}
                () = self.waits.notified() => continue,
            }
            self.refresh().await;
        }
    }

    /// Hears the questions of requests, and lets go of what none has used for long.
    pub(crate) async fn hear(self: &Arc<Self>) -> std::convert::Infallible {
        let mut questions = self.questions.1.lock().await;
        let mut sweep = tokio::time::interval(hosts::IDLE / 8);
        loop {
            let mut asked = Vec::new();
            tokio::select! {
                _ = questions.recv_many(&mut asked, 1_024) => {}
                _ = sweep.tick() => {}
            }
            let mut inventory = self.inventory.lock().await;
            let now = Instant::now();
            let connected = self.subscriptions.get().is_some_and(|server| *server.connected().borrow());
            // What is let go of now could not be had again.
            if asked.is_empty() && connected {
                inventory.drop_idle(now);
            }
            asked.into_iter().for_each(|question| inventory.ask(question, now, connected));
            self.settle(&mut inventory).await;
        }
    }

    /// Gives memory back: what only the start or a change needed soon after it, and what traffic needed from time
    /// to time.
    pub(crate) async fn keep_small(&self) -> std::convert::Infallible {
        loop {
            let changed = tokio::time::timeout(BETWEEN_TRIMS, self.settled.notified()).await.is_ok();
            if changed {
                // Changes seldom come alone.
                tokio::time::sleep(QUIET).await;
                if self.is_ready() {
                    trim::startup_code();
                }
            }
            trim::heap();
        }
    }

    /// Gives the listeners that could not be bound, with the reason.
    async fn settle(self: &Arc<Self>, inventory: &mut Inventory) -> Vec<(Arc<str>, String)> {
        names::look_up(inventory, &self.secrets.changed);
        self.secrets.follow_files();
        if !self.in_mesh {
            self.secrets.fetch(&self.node, |cluster| self.remote(cluster));
        }
        let mut changed = inventory.settle(Instant::now());
        let wanted = inventory.wanted();
        inventory.forget_unwanted(&wanted, Instant::now());
        // What was forgotten leaves the snapshot as well.
        changed |= inventory.settle(Instant::now());
        if let Some(subscriptions) = self.subscriptions.get() {
            for (kind, names) in wanted {
                subscriptions.set(kind, names);
            }
        }
        let mut failed = Vec::new();
        if changed && let Err(errors) = self.workers.publish(inventory.snapshot()).await {
            for error in errors {
                tracing::error!(%error, "listener not in force");
                failed.push((Arc::clone(&error.listener), error.to_string()));
            }
        }
        for waiting in inventory.answer(Instant::now()) {
            // Who is gone waits no more.
            let _ = waiting.send(());
        }
        if inventory.deadline(Instant::now()).is_some() {
            self.waits.notify_one();
        }
        let seen = self.seen.iter().all(|seen| seen.load(Ordering::Acquire));
        if seen
            && failed.is_empty()
            && inventory.is_warm(Instant::now())
            && !self.ready.swap(true, Ordering::AcqRel)
        {
            tracing::info!(
                listeners = inventory.listeners.len(),
                clusters = inventory.clusters.len(),
                "ready: the first configuration is in force"
            );
        }
        self.settled.notify_one();
        failed
    }
}
