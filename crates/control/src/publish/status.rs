//! Status of connected proxies, for the admin pages, the metrics and the log.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, atomic::Ordering::Relaxed},
    time::{Duration, Instant, SystemTime},
};

use serde::{Serialize, Serializer};
use skysail_core::logging::printable;
use skysail_model::ProxyView;
use skysail_xds::{Kind, Snapshot, client::Form, server::Event};
use tracing::warn;

use super::{NewClient, Publisher};
use crate::{
    metrics::count,
    rate_limit::{Rate, TokenBuckets},
};

/// Status of a proxy with its own lock, so that a stream does not wait for the lock of the state.
pub(super) type SharedStatus = Arc<Mutex<ClientStatus>>;

/// Status of a proxy.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ClientStatus {
    /// Number of the stream.
    pub(crate) connection: u64,
    /// Node id of the proxy.
    pub(crate) proxy: String,
    /// Address of the proxy.
    pub(crate) address: String,
    /// Istio version that the proxy declares.
    pub(crate) version: String,
    /// Authenticated identity; empty on the plain-text port.
    identity: String,
    /// `delta` or `sotw`.
    form: &'static str,
    /// Start of the stream, in seconds since 1970.
    connected_at: u64,
    /// Status by resource type. A list takes less memory than a map, and there are thousands of proxies.
    #[serde(serialize_with = "by_type")]
    types: Vec<(Kind, TypeStatus)>,
}

/// Status of one resource type.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct TypeStatus {
    /// Number of responses sent.
    responses: u64,
    /// Nonce of the last response sent; 0 if the proxy was up to date when it subscribed.
    sent: u64,
    /// Time of the last response sent.
    #[serde(skip)]
    pub(crate) sent_at: Option<SystemTime>,
    /// Nonce of the last response that the proxy accepted.
    acked: u64,
    /// Nonce of the last response that the proxy rejected; 0 if it has accepted a later one, or rejected none.
    nacked: u64,
    /// Error message of that rejection.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) error: String,
    /// The proxy has accepted the last response, or was up to date when it subscribed.
    pub(crate) synced: bool,
    /// Time of the last logged rejection.
    #[serde(skip)]
    logged: Option<Instant>,
    /// Last generation whose changes the last response contained.
    #[serde(skip)]
    pub(super) sent_generation: Option<u64>,
    /// Last generation whose changes the proxy has accepted or rejected.
    #[serde(skip)]
    pub(super) answered_generation: Option<u64>,
    /// The last rejections, the oldest first; at most [`MAX_REJECTIONS`], and [`MAX_REJECTION_BYTES`] of all types.
    #[serde(skip)]
    pub(super) rejections: Vec<Rejection>,
    /// The proxy subscribes to all resources.
    #[serde(skip)]
    pub(super) subscribes_to_all: bool,
    /// Names that the proxy subscribes to. The stream holds them, and counts their memory.
    #[serde(skip)]
    pub(super) names: Option<Weak<[Arc<str>]>>,
}

/// A rejected response.
#[derive(Clone, Debug)]
pub(super) struct Rejection {
    /// Last generation whose changes the proxy had accepted or rejected before.
    pub(super) after: Option<u64>,
    /// Last generation whose changes the response contained.
    pub(super) up_to: u64,
    /// Error message of the proxy.
    pub(super) error: Arc<str>,
}

/// Minimum time between two log lines about rejections of one stream and resource type.
const REJECTION_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of rejections that are kept of one stream and resource type. Later responses may have been accepted.
const MAX_REJECTIONS: usize = 4;
/// Maximum size in bytes of the error messages of these rejections, over all resource types of a stream.
const MAX_REJECTION_BYTES: usize = 8 << 10;
/// Rate limit of log lines about rejections of one identity, over all its streams. All clients of the plain-text port
/// are one identity.
pub(super) const REJECTION_LINES: Rate = Rate { burst: 20.0, per_second: 0.1 };

impl ClientStatus {
    pub(super) fn new(connection: u64, client: &NewClient) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            connection,
            proxy: client.node.id.clone(),
            address: client.address.clone(),
            version: client.version.clone(),
            identity: client.identity.clone(),
            form: match client.form {
                Form::Delta => "delta",
                Form::Sotw => "sotw",
            },
            connected_at: now.as_secs(),
            types: Vec::new(),
        }
    }

    /// Returns the status of each resource type.
    pub(crate) fn types(&self) -> impl Iterator<Item = (Kind, &TypeStatus)> {
        let by_kind =
            move |kind| self.types.iter().find(|(of, _)| *of == kind).map(|(_, status)| (kind, status));
        Kind::ALL.into_iter().filter_map(by_kind)
    }

    /// Records an event of the proxy's stream.
    pub(super) fn record(&mut self, event: Event<'_>) {
        match event {
            Event::Requested { kind, generation } => {
                *self.of(kind) =
                    TypeStatus { synced: true, answered_generation: generation, ..TypeStatus::default() };
            }
            Event::Subscribed { kind, all, names } => {
                let status = self.of(kind);
                status.subscribes_to_all = all;
                status.names = Some(Arc::downgrade(names));
            }
            Event::Sent { kind, nonce, generation, .. } => {
                let status = self.of(kind);
                if status.responses == 0 {
                    status.answered_generation = None;
                }
                status.sent = nonce;
                status.sent_generation = Some(generation);
                status.sent_at = Some(SystemTime::now());
                status.responses += 1;
                status.synced = false;
            }
            Event::Acked { kind, nonce } => {
                let status = self.of(kind);
                (status.acked, status.nacked, status.synced) = (nonce, 0, true);
                status.error = String::new();
                status.answered_generation = status.sent_generation;
            }
            Event::Rejected { kind, nonce, reason } => {
                let status = self.of(kind);
                status.nacked = nonce;
                status.error = printable(reason);
                status.synced = false;
                let error = status.error.as_str().into();
                let (after, up_to) = (status.answered_generation, status.sent_generation.unwrap_or_default());
                status.answered_generation = status.sent_generation;
                self.keep_rejection(kind, Rejection { after, up_to, error });
            }
            Event::HostUsed { .. } | Event::HostUnused { .. } | Event::Health { .. } => {}
        }
    }

    /// Keeps a rejection. Above the limits, removes the oldest ones: those of its type, then those of the type with the
    /// most bytes.
    fn keep_rejection(&mut self, kind: Kind, rejection: Rejection) {
        let rejections = &mut self.of(kind).rejections;
        rejections.push(rejection);
        if rejections.len() > MAX_REJECTIONS {
            rejections.remove(0);
        }
        while self.types.iter().map(|(_, status)| status.rejection_bytes()).sum::<usize>()
            > MAX_REJECTION_BYTES
        {
            let largest = self.types.iter_mut().max_by_key(|(_, status)| status.rejection_bytes());
            let Some((_, status)) = largest else { return };
            status.rejections.remove(0);
        }
    }

    /// Returns the number of log lines of the identity suppressed since its last one; `None` if this rejection is not
    /// logged.
    pub(super) fn admit_rejection_line(
        &mut self,
        kind: Kind,
        lines: &TokenBuckets,
        now: Instant,
    ) -> Option<u64> {
        let is_recent = |logged: Instant| now.saturating_duration_since(logged) < REJECTION_LOG_INTERVAL;
        let logged = &mut self.of(kind).logged;
        if logged.is_some_and(is_recent) {
            return None;
        }
        *logged = Some(now);
        lines.take(&self.identity, now)
    }

    fn of(&mut self, kind: Kind) -> &mut TypeStatus {
        let index = self.types.iter().position(|(of, _)| *of == kind).unwrap_or_else(|| {
            self.types.reserve_exact(1);
            self.types.push((kind, TypeStatus::default()));
            self.types.len() - 1
        });
        &mut self.types[index].1
    }
}

impl TypeStatus {
    /// Returns the size of the error messages of the kept rejections in bytes.
    fn rejection_bytes(&self) -> usize {
        self.rejections.iter().map(|rejection| rejection.error.len()).sum()
    }
}

impl Publisher {
    /// Records an event of a proxy's stream in its status, the metrics and the log.
    pub(super) fn record_event(&self, status: &SharedStatus, event: Event<'_>) {
        let metrics = &self.metrics;
        let mut status = lock(status);
        match event {
            Event::Sent { kind, bytes, .. } => {
                count(&metrics.pushes[kind as usize]);
                let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
                metrics.push_bytes[kind as usize].fetch_add(bytes, Relaxed);
            }
            Event::Rejected { kind, reason, .. } => {
                count(&metrics.rejects[kind as usize]);
                let line = status.admit_rejection_line(kind, &self.rejection_lines, Instant::now());
                if let Some(more) = line {
                    warn!(proxy = status.proxy, %kind, reason, more, "proxy rejected its configuration");
                }
            }
            Event::Requested { .. }
            | Event::Subscribed { .. }
            | Event::Acked { .. }
            | Event::HostUsed { .. }
            | Event::HostUnused { .. }
            | Event::Health { .. } => {}
        }
        status.record(event);
    }

    /// Returns the status of all connected proxies.
    pub(crate) fn clients(&self) -> Vec<ClientStatus> {
        self.read().clients.values().map(|client| lock(&client.status).clone()).collect()
    }

    /// Returns the views and the status of all connected proxies.
    pub(crate) fn proxies(&self) -> Vec<(Arc<ProxyView>, ClientStatus)> {
        let state = self.read();
        let clients = state.clients.values();
        clients.map(|client| (Arc::clone(&client.view), lock(&client.status).clone())).collect()
    }

    /// Returns all resources of a proxy, by its node id or `POD.NAMESPACE`; `None` if no such proxy is connected.
    pub(crate) fn resources_of(&self, proxy: &str) -> Option<Snapshot> {
        let state = self.read();
        let is_match = |id: &str| id == proxy || id.split('~').nth(2) == Some(proxy);
        let client = state.clients.values().find(|client| is_match(&lock(&client.status).proxy))?;
        let feed = state.views.get(&client.view)?.feeds.get(&client.node)?;
        Some(feed.snapshots.borrow().clone())
    }

    /// Returns the root namespace of the mesh.
    pub(crate) fn root_namespace(&self) -> String {
        self.read().world.mesh().root_namespace.clone()
    }

    /// Returns the files of the published configuration, with the fingerprints of their texts.
    pub(crate) fn file_fingerprints(&self) -> BTreeMap<String, u64> {
        self.read().fingerprints.clone()
    }
}

fn by_type<S: Serializer>(types: &[(Kind, TypeStatus)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(types.iter().map(|(kind, status)| (kind.short(), status)))
}

/// Locks a mutex and ignores poisoning: no panic leaves the data of this module's mutexes inconsistent.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
