//! Registration of machines: a WorkloadEntry for each connected proxy that names a WorkloadGroup. It is removed a while
//! after the last connection of the proxy.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tracing::info;

use super::{NewClient, Publisher, Refused, state::State, status::lock};

/// Time after the last disconnection until an entry is removed, as in istiod.
const GRACE: Duration = Duration::from_secs(10);
/// Maximum number of registered entries of an identity, including those within [`GRACE`].
const MAX_ENTRIES: usize = 1_000;

/// Registered WorkloadEntry: namespace and name.
type EntryName = (String, String);

/// Registered entries.
#[derive(Debug, Default)]
pub(super) struct Registrations(HashMap<EntryName, Registration>);

#[derive(Debug)]
struct Registration {
    identity: Arc<str>,
    /// Number of connections.
    connections: usize,
    /// Time of the last disconnection.
    left: Option<Instant>,
}

impl Registrations {
    /// Counts a connection. Returns false if the identity has too many entries.
    fn enter(&mut self, name: &EntryName, identity: &Arc<str>) -> bool {
        if let Some(known) = self.0.get_mut(name) {
            known.connections += 1;
            known.left = None;
            return true;
        }
        if self.0.values().filter(|known| known.identity == *identity).count() >= MAX_ENTRIES {
            return false;
        }
        let new = Registration { identity: Arc::clone(identity), connections: 1, left: None };
        self.0.insert(name.clone(), new);
        true
    }

    fn leave(&mut self, name: &EntryName, now: Instant) {
        if let Some(known) = self.0.get_mut(name) {
            known.connections = known.connections.saturating_sub(1);
            known.left = (known.connections == 0).then_some(now);
        }
    }

    /// Removes and returns the entries whose proxies have been gone for long enough.
    fn expire(&mut self, now: Instant) -> Vec<EntryName> {
        let is_over = |known: &Registration| {
            known.left.is_some_and(|left| now.saturating_duration_since(left) >= GRACE)
        };
        self.0.extract_if(|_, known| is_over(known)).map(|(name, _)| name).collect()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Guard of a connection for which an entry is registered.
pub(crate) struct Registered {
    publisher: Arc<Publisher>,
    name: EntryName,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.publisher.write().registrations.leave(&self.name, Instant::now());
    }
}

impl Publisher {
    /// Registers a proxy that names a WorkloadGroup.
    pub(super) async fn register(
        self: &Arc<Self>,
        client: &NewClient,
    ) -> Result<Option<Registered>, Refused> {
        let entry = self.read().world.registration(&client.node);
        let Some(entry) = entry.map_err(|error| Refused::Registration(error.to_string()))? else {
            return Ok(None);
        };
        if client.identity.is_empty() {
            let reason = "a proxy is registered only with an authenticated identity; use the TLS port";
            return Err(Refused::Registration(reason.to_owned()));
        }
        let name = (entry.meta.namespace.clone(), entry.meta.name.clone());
        let (publisher, key, identity) = (Arc::clone(self), name.clone(), Arc::clone(&client.accounted_to));
        let apply = move || {
            let mut is_counted = false;
            let is_new = publisher.change_registered(|state| {
                is_counted = state.registrations.enter(&key, &identity);
                is_counted && state.world.register(entry)
            });
            (is_counted, is_new)
        };
        let (is_counted, is_new) = tokio::task::spawn_blocking(apply).await.unwrap_or_default();
        if !is_counted {
            let reason =
                format!("this identity has {MAX_ENTRIES} registered WorkloadEntries, which is the limit");
            return Err(Refused::Registration(reason));
        }
        if is_new {
            info!(namespace = name.0, entry = name.1, group = client.node.group, "WorkloadEntry registered");
        }
        Ok(Some(Registered { publisher: Arc::clone(self), name }))
    }

    /// Removes the entries of proxies that have been gone for a while. Blocks during the compilation.
    pub(crate) fn expire_registrations(&self, now: Instant) {
        if self.read().registrations.is_empty() {
            return;
        }
        let mut expired = Vec::new();
        self.change_registered(|state| {
            // Within one lock, since a proxy may return meanwhile.
            expired = state.registrations.expire(now);
            let mut changed = false;
            for (namespace, name) in &expired {
                changed |= state.world.unregister(namespace, name);
            }
            changed
        });
        if !expired.is_empty() {
            info!(entries = expired.len(), "registered WorkloadEntries removed");
        }
    }

    fn change_registered(&self, change: impl FnOnce(&mut State) -> bool) -> bool {
        let _publishing = lock(&self.publishing);
        let changed = {
            let mut state = self.write();
            let changed = change(&mut state);
            if changed {
                state.mark_changes(&self.settings.cluster_id);
            }
            changed
        };
        if changed {
            self.publish();
        }
        changed
    }
}
