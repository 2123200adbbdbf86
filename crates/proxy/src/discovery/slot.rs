//! A place for one name's resource: the one in force, and the one that is to come into force.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;

use crate::translate;

/// How long something new waits for what it needs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);

/// What there is of one name.
pub(crate) struct Slot<T> {
    pub(crate) active: Option<Kept<T>>,
    pub(crate) warming: Option<Kept<T>>,
    /// The last one that was refused.
    pub(crate) error: Option<Failure>,
    /// The server says there is none.
    pub(super) absent: bool,
    /// Taken away at this time, but still in use.
    pub(super) removed: Option<Instant>,
    /// Asked for by name at this time.
    pub(super) asked: Option<Instant>,
}

/// A resource that was taken.
pub(crate) struct Kept<T> {
    pub(crate) value: Arc<T>,
    pub(crate) body: Bytes,
    pub(crate) version: String,
    pub(crate) updated: SystemTime,
    /// From the bootstrap file.
    pub(crate) fixed: bool,
    pub(super) since: Instant,
    /// For clusters whose host names are looked up: whether that has happened.
    pub(crate) resolved: Arc<AtomicBool>,
    /// The same: whether somebody looks them up.
    pub(crate) looked_up: bool,
}

/// A resource that was refused.
pub(crate) struct Failure {
    pub(crate) reason: String,
    pub(crate) body: Bytes,
    pub(crate) version: String,
    pub(crate) at: SystemTime,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { active: None, warming: None, error: None, absent: false, removed: None, asked: None }
    }
}

impl<T> Slot<T> {
    /// The newest.
    pub(crate) fn newest(&self) -> Option<&Kept<T>> {
        self.warming.as_ref().or(self.active.as_ref())
    }

    /// What is or may come into force.
    pub(super) fn both(&self) -> impl Iterator<Item = &Kept<T>> {
        self.active.iter().chain(&self.warming)
    }

    /// Takes a new one unless it is the same as the newest.
    pub(super) fn offer(
        &mut self,
        body: &Bytes,
        version: &str,
        fixed: bool,
        make: impl FnOnce() -> translate::Result<T>,
    ) -> Result<bool, String> {
        self.absent = false;
        let revived = self.removed.take().is_some();
        if let Some(kept) = self.warming.as_mut().or(self.active.as_mut())
            && kept.body == *body
        {
            version.clone_into(&mut kept.version);
            self.error = None;
            return Ok(revived);
        }
        match make() {
            Ok(value) => {
                self.error = None;
                self.warming = Some(Kept {
                    value: Arc::new(value),
                    body: body.clone(),
                    version: version.to_owned(),
                    updated: SystemTime::now(),
                    fixed,
                    since: Instant::now(),
                    resolved: Arc::default(),
                    looked_up: false,
                });
                Ok(true)
            }
            Err(reject) => {
                let reason = reject.to_string();
                self.refuse(body, version, &reason);
                Err(reason)
            }
        }
    }

    /// Notes that one was refused.
    pub(super) fn refuse(&mut self, body: &Bytes, version: &str, reason: &str) {
        let (body, version, reason) = (body.clone(), version.to_owned(), reason.to_owned());
        self.error = Some(Failure { reason, body, version, at: SystemTime::now() });
    }

    /// Puts what is warm into force; true if there was something.
    pub(super) fn promote(&mut self, now: Instant, warm: impl FnOnce(&Kept<T>) -> bool) -> bool {
        let Some(kept) = &self.warming else { return false };
        let must = self.active.is_none() && now.duration_since(kept.since) >= PATIENCE;
        if !must && !warm(kept) {
            return false;
        }
        self.active = self.warming.take();
        true
    }

    /// Whether there is none in force so far, and is to be.
    pub(super) fn is_awaited(&self, now: Instant) -> bool {
        let asked = || self.asked.is_some_and(|asked| now.duration_since(asked) < PATIENCE);
        self.active.is_none() && (self.warming.is_some() || (!self.absent && asked()))
    }
}

/// Since when those wait that will not for ever.
pub(super) fn waiting<'a, K: 'a, T: 'a>(
    slots: &'a BTreeMap<K, Slot<T>>,
    now: Instant,
) -> impl Iterator<Item = Instant> + 'a {
    slots.values().filter_map(move |slot| match (&slot.warming, &slot.active) {
        (Some(kept), None) => Some(kept.since),
        (None, None) if slot.is_awaited(now) => slot.asked,
        _ => slot.removed,
    })
}
