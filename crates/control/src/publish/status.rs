//! Status of connected proxies, for the admin page.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use serde::{Serialize, Serializer};
use skysail_core::logging::printable;
use skysail_xds::{Kind, client::Form, server::Event};

use super::NewClient;
use crate::bucket::{Buckets, Rate};

/// A proxy's status has a lock of its own, so that streams do not wait for anything else.
pub(super) type SharedStatus = Arc<Mutex<ClientStatus>>;

/// Status of a proxy.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ClientStatus {
    /// The stream's number.
    pub(crate) connection: u64,
    /// The proxy's node id.
    pub(crate) proxy: String,
    /// Its address.
    pub(crate) address: String,
    /// Istio version that it declares.
    pub(crate) version: String,
    /// Authenticated identity; empty on the plain port.
    identity: String,
    /// `delta` or `sotw`.
    form: &'static str,
    /// Seconds since 1970.
    connected_at: u64,
    /// Status by type; a short list, as there are thousands of proxies.
    #[serde(serialize_with = "by_type")]
    types: Vec<(Kind, TypeStatus)>,
}

/// Status of one type of resource.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct TypeStatus {
    /// Number of responses sent.
    responses: u64,
    /// Number of the last response sent on the stream; 0 if the proxy was up to date from the start.
    sent: u64,
    /// Time of that response.
    #[serde(skip)]
    pub(crate) sent_at: Option<SystemTime>,
    /// Last response that the proxy accepted.
    acked: u64,
    /// Last response that the proxy rejected; 0 if none.
    nacked: u64,
    /// Reason of the rejection.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) error: String,
    /// True if no response is pending and none was rejected.
    pub(crate) synced: bool,
    /// Time of the last logged rejection.
    #[serde(skip)]
    logged: Option<Instant>,
}

/// Time between two log lines about the refusals of one stream and type.
const BETWEEN_REFUSALS: Duration = Duration::from_secs(10);
/// Log lines about the refusals of one identity, however many streams it opens. All clients of the plain port are one identity.
pub(super) const REFUSALS: Rate = Rate { burst: 20.0, each_second: 0.1 };

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

    /// Status of each type.
    pub(crate) fn types(&self) -> impl Iterator<Item = (Kind, &TypeStatus)> {
        let by_kind =
            move |kind| self.types.iter().find(|(of, _)| *of == kind).map(|(_, status)| (kind, status));
        Kind::ALL.into_iter().filter_map(by_kind)
    }

    /// Records what happened on the proxy's stream.
    pub(super) fn record(&mut self, event: Event<'_>) {
        match event {
            Event::Asked { kind } => {
                *self.of(kind) = TypeStatus { synced: true, ..TypeStatus::default() };
            }
            Event::Sent { kind, nonce, .. } => {
                let status = self.of(kind);
                status.sent = nonce;
                status.sent_at = Some(SystemTime::now());
                status.responses += 1;
                status.synced = false;
            }
            Event::Acked { kind, nonce } => {
                let status = self.of(kind);
                let TypeStatus { sent, sent_at, responses, logged, .. } = *status;
                *status = TypeStatus {
                    sent,
                    sent_at,
                    responses,
                    acked: nonce,
                    synced: true,
                    logged,
                    ..TypeStatus::default()
                };
            }
            Event::Rejected { kind, nonce, reason } => {
                let status = self.of(kind);
                status.nacked = nonce;
                status.error = printable(reason);
                status.synced = false;
            }
            Event::Used { .. } | Event::Unused { .. } => {}
        }
    }

    /// Returns how many lines of the identity were left out since its last one; `None` if this refusal is not to be logged.
    pub(super) fn refusal_to_log(&mut self, kind: Kind, lines: &Buckets, now: Instant) -> Option<u64> {
        let lately = |logged: Instant| now.saturating_duration_since(logged) < BETWEEN_REFUSALS;
        let logged = &mut self.of(kind).logged;
        if logged.is_some_and(lately) {
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

fn by_type<S: Serializer>(types: &[(Kind, TypeStatus)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(types.iter().map(|(kind, status)| (kind.short(), status)))
}

/// Locks, also after a panic: each change of what is locked here is whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
