//! Prefetch: the control plane records which virtual hosts the proxies of an identity request. The next proxy of that
//! identity receives them before it requests them.
//!
//! The history affects nothing but the latency of a first request.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use skysail_xds::{Kind, Snapshot};

use crate::state_file::StateFile;

/// Name of the file in the state directory.
const FILE: &str = "used-hosts.json";
/// Maximum number of hosts per identity; the least recently requested are removed.
const MAX_HOSTS: usize = 300;
/// Maximum number of identities; the one with the oldest last request is removed.
const MAX_IDENTITIES: usize = 50_000;

/// Virtual hosts that the proxies of each identity have requested.
pub(crate) struct PrefetchHistory {
    state: Mutex<History>,
    file: StateFile,
}

#[derive(Default)]
struct History {
    identities: HashMap<Arc<str>, IdentityHosts>,
    /// Logical clock: orders hosts by their last request.
    clock: u64,
}

/// Virtual hosts that an identity uses.
#[derive(Default)]
struct IdentityHosts {
    /// Logical time of the last request for each host, by name.
    hosts: HashMap<Arc<str>, u64>,
    /// Logical time of the last request for any host.
    last_request: u64,
    /// The list of hosts that subscriptions share until the hosts change.
    list: Option<Arc<[Arc<str>]>>,
}

impl IdentityHosts {
    /// Returns the hosts, the least recently requested first.
    fn sorted(&self) -> Vec<Arc<str>> {
        let mut hosts: Vec<_> = self.hosts.iter().collect();
        hosts.sort_unstable_by_key(|(_, last)| **last);
        hosts.into_iter().map(|(host, _)| Arc::clone(host)).collect()
    }
}

impl PrefetchHistory {
    /// Reads the history in the state directory; empty without one.
    pub(crate) fn open(directory: Option<&Path>) -> Self {
        let file = StateFile::new(directory, FILE);
        let mut history = History { clock: MAX_HOSTS as u64, ..History::default() };
        for (identity, hosts) in file.read::<BTreeMap<String, Vec<String>>>() {
            let hosts = hosts.into_iter().map(Arc::from).zip(0..).take(MAX_HOSTS).collect();
            history.identities.insert(identity.into(), IdentityHosts { hosts, ..IdentityHosts::default() });
        }
        Self { state: Mutex::new(history), file }
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        // A lock that a panic has poisoned is used too: no change leaves the history inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the hosts to send to a new proxy of an identity. Hosts that no longer exist are removed when the list is
    /// rebuilt.
    pub(crate) fn hosts_of(&self, identity: &str, snapshot: &Snapshot) -> Arc<[Arc<str>]> {
        let mut history = self.lock();
        let Some(entry) = history.identities.get_mut(identity) else { return Arc::default() };
        // A proxy that receives virtual hosts within their routes has no resources of this kind. Its hosts
        // may exist nevertheless.
        if snapshot.iter(Kind::VirtualHost).next().is_none() {
            return Arc::default();
        }
        if entry.list.is_none() {
            entry.hosts.retain(|host, _| snapshot.get(Kind::VirtualHost, host).is_some());
            entry.list = Some(entry.sorted().into());
        }
        entry.list.clone().unwrap_or_default()
    }

    /// Records that a proxy of an identity has requested a host that exists.
    pub(crate) fn record_use(&self, identity: &Arc<str>, host: &Arc<str>) {
        let mut history = self.lock();
        history.clock += 1;
        let now = history.clock;
        if history.identities.len() >= MAX_IDENTITIES && !history.identities.contains_key(identity) {
            let oldest = history.identities.iter().min_by_key(|(_, entry)| entry.last_request);
            if let Some(oldest) = oldest.map(|(identity, _)| Arc::clone(identity)) {
                history.identities.remove(&oldest);
            }
        }
        let entry = history.identities.entry(Arc::clone(identity)).or_default();
        entry.last_request = now;
        if entry.hosts.insert(Arc::clone(host), now).is_some() {
            return;
        }
        if entry.hosts.len() > MAX_HOSTS {
            let oldest = entry.hosts.iter().min_by_key(|(_, last)| **last);
            if let Some(oldest) = oldest.map(|(host, _)| Arc::clone(host)) {
                entry.hosts.remove(&oldest);
            }
        }
        entry.list = None;
        self.file.mark_changed();
    }

    /// Records that a proxy of an identity has unsubscribed from a host.
    pub(crate) fn record_unused(&self, identity: &str, host: &str) {
        let mut history = self.lock();
        let Some(entry) = history.identities.get_mut(identity) else { return };
        if entry.hosts.remove(host).is_some() {
            entry.list = None;
            self.file.mark_changed();
        }
    }

    /// Returns the hosts of all identities, for the admin page and the state file.
    pub(crate) fn all(&self) -> BTreeMap<String, Vec<String>> {
        let history = self.lock();
        let with_hosts = history.identities.iter().filter(|(_, entry)| !entry.hosts.is_empty());
        let text = |name: &Arc<str>| name.to_string();
        with_hosts
            .map(|(identity, entry)| (text(identity), entry.sorted().iter().map(text).collect()))
            .collect()
    }

    /// Writes changes to the state file. Never returns.
    pub(crate) async fn write_changes(self: Arc<Self>) {
        let history = Arc::clone(&self);
        self.file.write_changes(move || history.write()).await;
    }

    /// Writes the history if it has changed. Blocks.
    ///
    /// # Errors
    /// When the state directory cannot be written to.
    pub(crate) fn write(&self) -> io::Result<()> {
        self.file.write(|| self.all())
    }
}

#[cfg(test)]
mod tests {
    use skysail_xds::{Layer, Resource};

    use super::*;

    fn snapshot_with(hosts: &[&str]) -> Snapshot {
        let mut layer = Layer::default();
        for host in hosts {
            layer.set(1, Resource::from_body(Kind::VirtualHost, host, Default::default()));
        }
        Snapshot { shared: Arc::new(layer), ..Snapshot::default() }
    }

    fn hosts_of(history: &PrefetchHistory, identity: &str, snapshot: &Snapshot) -> Vec<String> {
        history.hosts_of(identity, snapshot).iter().map(|host| host.to_string()).collect()
    }

    #[test]
    fn deleted_unused_and_least_recent_hosts_are_removed() {
        let history = PrefetchHistory::open(None);
        let identity: Arc<str> = "a/a".into();
        for host in ["80/a", "80/b", "80/c", "80/a"] {
            history.record_use(&identity, &host.into());
        }
        let snapshot = snapshot_with(&["80/a", "80/b", "80/c"]);
        assert_eq!(hosts_of(&history, "a/a", &snapshot), ["80/b", "80/c", "80/a"]);
        assert!(hosts_of(&history, "a/a", &Snapshot::default()).is_empty());
        assert!(hosts_of(&history, "b/b", &snapshot).is_empty());
        // All proxies of an identity share one list.
        assert!(Arc::ptr_eq(&history.hosts_of("a/a", &snapshot), &history.hosts_of("a/a", &snapshot)));
        history.record_unused("a/a", "80/c");
        assert_eq!(hosts_of(&history, "a/a", &snapshot_with(&["80/a"])), ["80/a"]);
        assert_eq!(hosts_of(&history, "a/a", &snapshot), ["80/a"]);
        for number in 0..MAX_HOSTS {
            history.record_use(&identity, &format!("80/{number}").into());
        }
        assert_eq!(history.all()["a/a"].len(), MAX_HOSTS);
        assert_eq!(history.all()["a/a"][0], "80/0");
    }

    #[test]
    fn the_history_survives_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let history = PrefetchHistory::open(Some(folder.path()));
        history.record_use(&"a/a".into(), &"80/a".into());
        history.write().unwrap();
        let history = PrefetchHistory::open(Some(folder.path()));
        assert_eq!(hosts_of(&history, "a/a", &snapshot_with(&["80/a"])), ["80/a"]);
    }
}
