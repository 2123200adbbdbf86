//! State of one resource name: the version in effect and the version that is warming.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;

use super::warming::WarmingNeed;
use crate::translate;

/// Maximum time that a resource waits for secrets, and that one without a version in effect waits for other resources:
/// the default of Envoy's `initial_fetch_timeout`.
pub(crate) const WARMING_TIMEOUT: Duration = Duration::from_secs(15);

/// Versions of one resource name.
pub(crate) struct Slot<T> {
    pub(crate) active: Option<AcceptedResource<T>>,
    pub(crate) warming: Option<AcceptedResource<T>>,
    /// The resource that was rejected last.
    pub(crate) error: Option<Failure>,
    /// The server has answered that the resource does not exist.
    pub(super) absent: bool,
    /// Time when the server deleted the resource, which is still in use.
    pub(super) removed: Option<Instant>,
    /// Time since which the warming versions have waited only for secrets.
    pub(super) waits_for_secrets: Option<Instant>,
    /// Time when the resource was subscribed to by name.
    pub(super) requested_at: Option<Instant>,
}

/// An accepted resource.
pub(crate) struct AcceptedResource<T> {
    pub(crate) value: Arc<T>,
    pub(crate) body: Bytes,
    pub(crate) version: String,
    pub(crate) updated: SystemTime,
    /// Comes from the bootstrap file.
    pub(crate) is_static: bool,
    pub(super) since: Instant,
    /// For clusters with DNS names: the names have been resolved once.
    pub(crate) resolved: Arc<AtomicBool>,
    /// For clusters with DNS names: a task resolves them.
    pub(crate) looked_up: bool,
}

/// A rejected resource.
pub(crate) struct Failure {
    pub(crate) reason: String,
    pub(crate) body: Bytes,
    pub(crate) version: String,
    pub(crate) at: SystemTime,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self {
            active: None,
            warming: None,
            error: None,
            absent: false,
            removed: None,
            waits_for_secrets: None,
            requested_at: None,
        }
    }
}

impl<T> Slot<T> {
    /// Returns the warming version, or else the active one.
    pub(crate) fn newest(&self) -> Option<&AcceptedResource<T>> {
        self.warming.as_ref().or(self.active.as_ref())
    }

    /// Returns the active and the warming version.
    pub(super) fn both(&self) -> impl Iterator<Item = &AcceptedResource<T>> {
        self.active.iter().chain(&self.warming)
    }

    /// Accepts a new version unless it equals the newest. Returns whether anything has changed.
    pub(super) fn accept(
        &mut self,
        body: &Bytes,
        version: &str,
        is_static: bool,
        make: impl FnOnce() -> translate::Result<T>,
    ) -> Result<bool, String> {
        self.absent = false;
        let revived = self.removed.take().is_some();
        if let Some(accepted) = self.warming.as_mut().or(self.active.as_mut())
            && accepted.body == *body
        {
            version.clone_into(&mut accepted.version);
            self.error = None;
            return Ok(revived);
        }
        match make() {
            Ok(value) => {
                self.error = None;
                self.warming = Some(AcceptedResource {
                    value: Arc::new(value),
                    body: body.clone(),
                    version: version.to_owned(),
                    updated: SystemTime::now(),
                    is_static,
                    since: Instant::now(),
                    resolved: Arc::default(),
                    looked_up: false,
                });
                Ok(true)
            }
            Err(reject) => {
                let reason = reject.to_string();
                self.reject(body, version, &reason);
                Err(reason)
            }
        }
    }

    /// Records a rejected version.
    pub(super) fn reject(&mut self, body: &Bytes, version: &str, reason: &str) {
        let (body, version, reason) = (body.clone(), version.to_owned(), reason.to_owned());
        self.error = Some(Failure { reason, body, version, at: SystemTime::now() });
    }

    /// Puts the warming version into effect if it is warm, or if it has timed out. A version that waits for other
    /// resources than secrets does not replace one in effect. A version that waits only for secrets does, because the
    /// former one may have no TLS; handshakes then fail until the secrets arrive. A newer version continues this wait.
    /// Returns whether the version is in effect.
    pub(super) fn promote(
        &mut self,
        name: &str,
        now: Instant,
        awaited: impl FnOnce(&AcceptedResource<T>) -> WarmingNeed,
    ) -> bool {
        let Some(accepted) = &self.warming else { return false };
        let awaited = awaited(accepted);
        let since = match awaited {
            WarmingNeed::Secrets => Some(*self.waits_for_secrets.get_or_insert(now)),
            WarmingNeed::Nothing | WarmingNeed::Resources => None,
        };
        self.waits_for_secrets = since;
        let is_late = |since| now.duration_since(since) >= WARMING_TIMEOUT;
        let comes = awaited == WarmingNeed::Nothing
            || since.is_some_and(is_late)
            || self.active.is_none() && is_late(accepted.since);
        if comes {
            self.waits_for_secrets = None;
            if awaited == WarmingNeed::Secrets {
                tracing::warn!(
                    resource = name,
                    "in effect without its secrets, which have not arrived: TLS fails"
                );
            }
            self.active = self.warming.take();
        }
        comes
    }

    /// Returns whether no version is in effect yet and one is expected.
    pub(super) fn is_awaited(&self, now: Instant) -> bool {
        let is_requested = || self.requested_at.is_some_and(|at| now.duration_since(at) < WARMING_TIMEOUT);
        self.active.is_none() && (self.warming.is_some() || (!self.absent && is_requested()))
    }
}

/// Returns the start times of all waits that end by timeout.
pub(super) fn waiting<'a, K: 'a, T: 'a>(
    slots: &'a BTreeMap<K, Slot<T>>,
    now: Instant,
) -> impl Iterator<Item = Instant> + 'a {
    let has_time = move |since: &Instant| now.duration_since(*since) < WARMING_TIMEOUT;
    slots.values().filter_map(move |slot| match (&slot.warming, &slot.active) {
        (Some(accepted), None) => Some(accepted.since),
        (Some(_), Some(_)) => slot.waits_for_secrets.filter(has_time),
        (None, None) if slot.is_awaited(now) => slot.requested_at,
        _ => slot.removed,
    })
}
