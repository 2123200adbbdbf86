//! Configuration in effect.
//!
//! Every change goes through [`Configuration`], one at a time: an update from the control plane, a secret, a
//! DNS result, a warming timeout. Each change is applied in the same steps: accept the resource, put warm
//! resources into effect, subscribe to the names that they refer to, publish a snapshot.

pub(crate) mod remote;
pub(crate) mod secrets;

mod claims;
mod hosts;
pub(crate) mod inventory;
pub(crate) mod names;
mod references;
mod slot;
mod uses;
mod warming;

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

use self::inventory::{ClusterMode, Inventory};
use crate::{
    accept::workers::Workers,
    discovery::{remote::Remote, secrets::Secrets},
    translate::{TlsContexts, Translator, bootstrap},
};
use skysail_policy::state::demand::HostRequest;

/// Time without a further change after which memory is trimmed.
const QUIET_PERIOD: Duration = Duration::from_secs(5);
/// Interval between trims of the heap.
const TRIM_INTERVAL: Duration = Duration::from_secs(30);

/// Owns the configuration and publishes it to the workers.
pub(crate) struct Configuration {
    inventory: Mutex<Inventory>,
    workers: Arc<Workers>,
    secrets: Secrets,
    node: Node,
    /// Encoded static clusters, any of which may be the server of discovery or secrets.
    remotes: HashMap<String, Bytes>,
    mark: Option<u32>,
    /// Runs in a mesh without a bootstrap file. Secrets are not fetched from SDS servers, and the control plane
    /// may be Skysail's.
    in_mesh: bool,
    /// Channel of requests for virtual hosts.
    host_requests: (mpsc::UnboundedSender<HostRequest>, Mutex<mpsc::UnboundedReceiver<HostRequest>>),
    /// Whether clusters and listeners have been received once, or none are expected.
    seen: [AtomicBool; 2],
    /// Subscriptions of the discovery client; unset without discovery.
    subscriptions: std::sync::OnceLock<Subscriptions>,
    /// The first configuration is completely in effect.
    ready: AtomicBool,
    /// Indexed by [`Kind`].
    updates: std::sync::Mutex<[Updates; Kind::ALL.len()]>,
    /// Notified when a new wait begins, so that [`Self::keep_fresh`] computes its deadline again.
    waits: Notify,
    /// Notified after a change was applied.
    settled: Notify,
}

/// Counters of the updates of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Updates {
    pub(crate) success: u64,
    /// Updates of which at least one resource was rejected.
    pub(crate) rejected: u64,
    /// Time of the last accepted update in milliseconds since 1970; 0 before the first.
    pub(crate) at_ms: u64,
}

/// Arguments of [`Configuration::new`].
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
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut inventory = Inventory::new(secrets.clone(), node.clone());
        if in_mesh {
            inventory.set_mode(ClusterMode::Undecided, None);
        }
        Self {
            inventory: Mutex::new(inventory),
            workers,
            secrets,
            node,
            remotes: HashMap::new(),
            mark,
            in_mesh,
            host_requests: (sender, Mutex::new(receiver)),
            seen: [AtomicBool::new(false), AtomicBool::new(false)],
            subscriptions: std::sync::OnceLock::new(),
            ready: AtomicBool::new(false),
            updates: std::sync::Mutex::default(),
            waits: Notify::new(),
            settled: Notify::new(),
        }
    }

    /// Adds the static resources of a bootstrap file.
    ///
    /// # Errors
    /// A resource cannot be used. One invalid resource makes the whole file unusable.
    pub(crate) fn add_static(&mut self, file: &bootstrap::Bootstrap) -> anyhow::Result<()> {
        put_static(self.inventory.get_mut(), &self.secrets, file)?;
        self.remotes.extend(file.clusters.iter().cloned());
        let (clusters, listeners) =
            file.ads.as_ref().map_or((false, false), |ads| (ads.clusters, ads.listeners));
        self.seen = [AtomicBool::new(!clusters), AtomicBool::new(!listeners)];
        Ok(())
    }

    /// Returns the server behind a static cluster.
    pub(crate) fn remote(&self, cluster: &str) -> Option<Remote> {
        let body = self.remotes.get(cluster)?;
        let translator = Translator { tls: &self.secrets.tls, node: &self.node, strict: false };
        match Remote::from_cluster(body, translator, self.mark) {
            Ok(remote) => Some(remote),
            Err(reject) => {
                tracing::error!(cluster, %reject, "cluster cannot be used for discovery or secrets");
                None
            }
        }
    }

    /// Returns the certificates and trusted roots of all TLS contexts.
    pub(crate) fn tls(&self) -> &Arc<TlsContexts> {
        &self.secrets.tls
    }

    /// Locks the inventory, for the admin page.
    pub(crate) async fn inventory(&self) -> MutexGuard<'_, Inventory> {
        self.inventory.lock().await
    }

    /// Returns whether the first listeners, clusters and certificates are in effect.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Returns the update counters of a kind.
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

    /// Returns whether a discovery stream is open.
    pub(crate) fn is_connected(&self) -> bool {
        self.subscriptions.get().is_some_and(|subscriptions| *subscriptions.connected().borrow())
    }

    /// Runs discovery against a server and never returns. `metadata` returns the headers of each connection
    /// attempt.
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

    /// Reports the health of the workload to the control plane; an error says why it is not healthy.
    pub(crate) fn report_health(&self, error: Option<String>) {
        if let Some(subscriptions) = self.subscriptions.get() {
            subscriptions.report_health(error);
        }
    }

    /// Applies an update and returns the rejected resources.
    async fn update(self: &Arc<Self>, update: Update) -> Vec<Rejection> {
        let mut inventory = self.inventory.lock().await;
        if inventory.mode() != ClusterMode::AsConfigured {
            // Only Skysail's own control plane finds virtual hosts by authority.
            let ours = self.subscriptions.get().is_some_and(Subscriptions::is_ours);
            let mode = if ours { ClusterMode::OnDemand } else { ClusterMode::All };
            if inventory.mode() != mode {
                tracing::info!(on_demand = ours, "discovery");
                inventory.set_mode(mode, Some(self.host_requests.0.clone()));
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
        // Endpoints and secrets name nothing. A resource that becomes warm because of them is a change of its own.
        let names = if matches!(update.kind, Kind::Endpoint | Kind::Secret) {
            ChangedNames::AsChanged
        } else {
            ChangedNames::All
        };
        let failed = self.settle(&mut inventory, names).await;
        if update.kind == Kind::Listener {
            let of_this =
                failed.into_iter().filter(|(name, _)| update.added.iter().any(|added| *added.name == **name));
            rejections.extend(of_this.map(|(name, reason)| Rejection { name: name.to_string(), reason }));
        }
        self.count_update(update.kind, !rejections.is_empty());
        tracing::debug!(kind = %update.kind, added = update.added.len(), removed = update.removed.len(), refused = rejections.len(), "update");
        rejections
    }

    /// Puts warm resources into effect: for the first configuration, and after a change other than an update.
    pub(crate) async fn refresh(self: &Arc<Self>) -> Vec<(Arc<str>, String)> {
        let mut inventory = self.inventory.lock().await;
        self.settle(&mut inventory, ChangedNames::All).await
    }

    /// Refreshes after a secret or a DNS result has arrived, or a warming timeout has passed.
    pub(crate) async fn keep_fresh(self: &Arc<Self>) -> std::convert::Infallible {
        loop {
            let deadline = self.inventory.lock().await.deadline(Instant::now());
            let late = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            let names = tokio::select! {
                () = self.secrets.changed.notified() => ChangedNames::AsChanged,
                () = late => ChangedNames::All,
                () = self.waits.notified() => continue,
            };
            self.settle(&mut *self.inventory.lock().await, names).await;
        }
    }

    /// Processes requests for virtual hosts, and drops names that no request has used for a long
    /// time.
    pub(crate) async fn serve_host_requests(self: &Arc<Self>) -> std::convert::Infallible {
        let mut host_requests = self.host_requests.1.lock().await;
        let mut sweep = tokio::time::interval(hosts::IDLE_TIMEOUT / 8);
        loop {
            let mut received = Vec::new();
            tokio::select! {
                _ = host_requests.recv_many(&mut received, 1_024) => {}
                _ = sweep.tick() => {}
            }
            let mut inventory = self.inventory.lock().await;
            let now = Instant::now();
            let connected = self.subscriptions.get().is_some_and(|server| *server.connected().borrow());
            // Without a connection, a dropped name could not be requested again.
            if received.is_empty() && connected {
                inventory.drop_idle(now);
            }
            received
                .into_iter()
                .for_each(|host_request| inventory.request_host(host_request, now, connected));
            self.settle(&mut inventory, ChangedNames::All).await;
        }
    }

    /// Returns memory to the system: after a change, what only startup or that change needed; at intervals,
    /// what traffic no longer needs.
    pub(crate) async fn trim_memory(&self) -> std::convert::Infallible {
        loop {
            let changed = tokio::time::timeout(TRIM_INTERVAL, self.settled.notified()).await.is_ok();
            if changed {
                // Changes usually come in groups.
                tokio::time::sleep(QUIET_PERIOD).await;
                if self.is_ready() {
                    trim::startup_code();
                }
            }
            trim::heap();
        }
    }

    /// Subscribes to the names in use and drops resources that nothing names any more. Returns whether a new snapshot
    /// is due.
    fn subscribe(&self, inventory: &mut Inventory) -> bool {
        self.secrets.follow_files(self.in_mesh);
        if !self.in_mesh {
            self.secrets.fetch(&self.node, |cluster| self.remote(cluster));
        }
        let wanted = inventory.wanted();
        inventory.drop_unwanted(&wanted, Instant::now());
        if let Some(subscriptions) = self.subscriptions.get() {
            for (kind, names) in wanted {
                subscriptions.set(kind, names);
            }
        }
        // Resources dropped just now leave the snapshot as well.
        inventory.settle(Instant::now())
    }

    /// Puts warm resources into effect, updates subscriptions and publishes. Returns the listeners that could
    /// not be bound, with the reason.
    async fn settle(
        self: &Arc<Self>,
        inventory: &mut Inventory,
        names: ChangedNames,
    ) -> Vec<(Arc<str>, String)> {
        names::look_up(inventory, &self.secrets.changed);
        let mut changed = inventory.settle(Instant::now());
        if names == ChangedNames::All || changed {
            changed |= self.subscribe(inventory);
        }
        let mut failed = Vec::new();
        if changed && let Err(errors) = self.workers.publish(inventory.snapshot()).await {
            for error in errors {
                tracing::error!(%error, "listener is not in effect");
                failed.push((Arc::clone(&error.listener), error.to_string()));
            }
        }
        for waiting in inventory.answer(Instant::now()) {
            // Sending fails if the client has disconnected.
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
                "ready: the first configuration is in effect"
            );
        }
        self.settled.notify_one();
        failed
    }
}

/// Which names [`Configuration::settle`] computes again. A gateway has thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangedNames {
    All,
    /// All if a resource comes into effect or goes, otherwise none.
    AsChanged,
}

/// Checks the static resources of a bootstrap file, without any effect.
///
/// # Errors
/// A resource cannot be used.
pub(crate) fn check_static(file: &bootstrap::Bootstrap) -> anyhow::Result<()> {
    let secrets = Secrets::new(Arc::default());
    put_static(&mut Inventory::new(secrets.clone(), file.node.clone()), &secrets, file)
}

/// Adds the static resources of a bootstrap file to an inventory.
fn put_static(
    inventory: &mut Inventory,
    secrets: &Secrets,
    file: &bootstrap::Bootstrap,
) -> anyhow::Result<()> {
    for (index, (name, body)) in file.clusters.iter().enumerate() {
        let outcome = inventory.add_static(Kind::Cluster, name, body);
        outcome
            .map_err(|reason| anyhow::anyhow!("static_resources.clusters[{index}] ({name:?}): {reason}"))?;
    }
    for (index, (name, body)) in file.listeners.iter().enumerate() {
        let key = if name.is_empty() { format!("listener {index}") } else { name.clone() };
        let outcome = inventory.add_static(Kind::Listener, &key, body);
        outcome
            .map_err(|reason| anyhow::anyhow!("static_resources.listeners[{index}] ({name:?}): {reason}"))?;
    }
    for secret in &file.secrets {
        let name = crate::translate::SecretName {
            source: crate::translate::SecretSource::Static,
            name: secret.name.as_str().into(),
        };
        let taken = secrets.store(&name, secret);
        taken.map_err(|reject| anyhow::anyhow!("static_resources.secrets ({:?}): {reject}", secret.name))?;
    }
    Ok(())
}
