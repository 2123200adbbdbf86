//! What workloads use: which virtual hosts the proxies of each identity asked for and got, so that the next one of it is sent
//! them before it asks.
//!
//! Nothing depends on it but how long a first request takes.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use skysail_xds::{Kind, Snapshot};

use crate::kept::Kept;

/// The file in the folder.
const FILE: &str = "used-hosts.json";
/// Most hosts remembered for an identity: the most recently requested.
const MOST_HOSTS: usize = 300;
/// Most identities remembered: those with the most recent hosts.
const MOST_IDENTITIES: usize = 50_000;

/// The memory of all identities.
pub(crate) struct Habits {
    known: Mutex<Known>,
    kept: Kept,
}

#[derive(Default)]
struct Known {
    identities: HashMap<Arc<str>, Habit>,
    /// Counter that orders hosts by the time of their last request.
    learned: u64,
}

/// Hosts that an identity uses.
#[derive(Default)]
struct Habit {
    /// By name, with when each was asked for last.
    hosts: HashMap<Arc<str>, u64>,
    /// When something was learned last.
    last: u64,
    /// The hosts as handed out; shared until they change.
    listed: Option<Arc<[Arc<str>]>>,
}

impl Habit {
    /// Its hosts, the oldest first.
    fn list(&self) -> Vec<Arc<str>> {
        let mut hosts: Vec<_> = self.hosts.iter().collect();
        hosts.sort_unstable_by_key(|(_, last)| **last);
        hosts.into_iter().map(|(host, _)| Arc::clone(host)).collect()
    }
}

impl Habits {
    /// What is kept in a folder.
    pub(crate) fn open(folder: Option<&Path>) -> Self {
        let kept = Kept::new(folder, FILE);
        let mut known = Known { learned: MOST_HOSTS as u64, ..Known::default() };
        for (identity, hosts) in kept.read::<BTreeMap<String, Vec<String>>>() {
            let hosts = hosts.into_iter().map(Arc::from).zip(0..).take(MOST_HOSTS).collect();
            known.identities.insert(identity.into(), Habit { hosts, ..Habit::default() });
        }
        Self { known: Mutex::new(known), kept }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Every change is whole at any moment, so even after a panic.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What an identity has used. What there is no more is forgotten when it learns something.
    pub(crate) fn of(&self, identity: &str, now: &Snapshot) -> Arc<[Arc<str>]> {
        let mut known = self.lock();
        let Some(habit) = known.identities.get_mut(identity) else { return Arc::default() };
        // Who gets virtual hosts with their routes is no measure of which there are.
        if now.iter(Kind::VirtualHost).next().is_none() {
            return Arc::default();
        }
        if habit.listed.is_none() {
            habit.hosts.retain(|host, _| now.get(Kind::VirtualHost, host).is_some());
            habit.listed = Some(habit.list().into());
        }
        habit.listed.clone().unwrap_or_default()
    }

    /// A proxy of an identity asked for a host, and it is there.
    pub(crate) fn used(&self, identity: &Arc<str>, host: &Arc<str>) {
        let mut known = self.lock();
        known.learned += 1;
        let (last, full) = (known.learned, known.identities.len() >= MOST_IDENTITIES);
        if full && !known.identities.contains_key(identity) {
            let oldest = known.identities.iter().min_by_key(|(_, habit)| habit.last);
            if let Some(oldest) = oldest.map(|(identity, _)| Arc::clone(identity)) {
                known.identities.remove(&oldest);
            }
        }
        let habit = known.identities.entry(Arc::clone(identity)).or_default();
        habit.last = last;
        if habit.hosts.insert(Arc::clone(host), last).is_some() {
            return;
        }
        if habit.hosts.len() > MOST_HOSTS {
            let oldest = habit.hosts.iter().min_by_key(|(_, last)| **last);
            if let Some(oldest) = oldest.map(|(host, _)| Arc::clone(host)) {
                habit.hosts.remove(&oldest);
            }
        }
        habit.listed = None;
        self.kept.note();
    }

    /// A proxy of an identity has no use for a host any more.
    pub(crate) fn unused(&self, identity: &str, host: &str) {
        let mut known = self.lock();
        let Some(habit) = known.identities.get_mut(identity) else { return };
        if habit.hosts.remove(host).is_some() {
            habit.listed = None;
            self.kept.note();
        }
    }

    /// All of it, for people.
    pub(crate) fn all(&self) -> BTreeMap<String, Vec<String>> {
        let known = self.lock();
        let some = known.identities.iter().filter(|(_, habit)| !habit.hosts.is_empty());
        let text = |name: &Arc<str>| name.to_string();
        some.map(|(identity, habit)| (text(identity), habit.list().iter().map(text).collect())).collect()
    }

    /// Writes changes down, now and then.
    pub(crate) async fn keep(self: Arc<Self>) {
        let habits = Arc::clone(&self);
        self.kept.keep(move || habits.write()).await;
    }

    /// Writes changes down. Blocks.
    ///
    /// # Errors
    /// When the folder cannot be written to.
    pub(crate) fn write(&self) -> io::Result<()> {
        self.kept.write(|| self.all())
    }
}

#[cfg(test)]
mod tests {
    use skysail_xds::{Layer, Resource};

    use super::*;

    fn world(hosts: &[&str]) -> Snapshot {
        let mut layer = Layer::default();
        for host in hosts {
            layer.set(1, Resource::from_body(Kind::VirtualHost, host, Default::default()));
        }
        Snapshot { shared: Arc::new(layer), ..Snapshot::default() }
    }

    fn of(habits: &Habits, identity: &str, now: &Snapshot) -> Vec<String> {
        habits.of(identity, now).iter().map(|host| host.to_string()).collect()
    }

    #[test]
    fn what_is_gone_unused_or_too_old_drops_out() {
        let habits = Habits::open(None);
        let who: Arc<str> = "a/a".into();
        for host in ["80/a", "80/b", "80/c", "80/a"] {
            habits.used(&who, &host.into());
        }
        let now = world(&["80/a", "80/b", "80/c"]);
        assert_eq!(of(&habits, "a/a", &now), ["80/b", "80/c", "80/a"]);
        assert!(of(&habits, "a/a", &Snapshot::default()).is_empty());
        assert!(of(&habits, "b/b", &now).is_empty());
        // All who come are given the same.
        assert!(Arc::ptr_eq(&habits.of("a/a", &now), &habits.of("a/a", &now)));
        habits.unused("a/a", "80/c");
        assert_eq!(of(&habits, "a/a", &world(&["80/a"])), ["80/a"]);
        assert_eq!(of(&habits, "a/a", &now), ["80/a"]);
        for number in 0..MOST_HOSTS {
            habits.used(&who, &format!("80/{number}").into());
        }
        assert_eq!(habits.all()["a/a"].len(), MOST_HOSTS);
        assert_eq!(habits.all()["a/a"][0], "80/0");
    }

    #[test]
    fn it_survives_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let habits = Habits::open(Some(folder.path()));
        habits.used(&"a/a".into(), &"80/a".into());
        habits.write().unwrap();
        let habits = Habits::open(Some(folder.path()));
        assert_eq!(of(&habits, "a/a", &world(&["80/a"])), ["80/a"]);
    }
}
