//! DNS lookups of the names of endpoints, each once for the whole mesh.
//!
//! One task receives the names to look up, requests the A and AAAA records of each (`ask`, at the servers of `system`), requests
//! them again when they expire (`expiry`), and reports changes. The number of pending requests is limited. Random pauses keep
//! names from expiring at the same time.
//!
//! While a name cannot be looked up, its last addresses stay in force without a limit of time, as in Envoy: an address that may be
//! wrong is better than none. The answer that a name has no addresses removes them. The last addresses are [kept](Kept) over
//! restarts.

mod ask;
mod expiry;
mod lookups;
mod system;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    io,
    net::IpAddr,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::Serialize;
use skysail_model::Resolved;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tracing::{info, warn};

use self::expiry::Expiry;
pub(crate) use self::{
    ask::{Answer, Failure, Family},
    lookups::Lookups,
    system::server,
};
use crate::{kept::Kept, metrics::Condition, publish::Wanted};

/// The file in the folder.
const FILE: &str = "addresses.json";
/// Most pending requests.
const AT_ONCE: usize = 64;

/// Result for a name.
#[derive(Debug, PartialEq)]
pub(crate) enum Event {
    /// Addresses of a name; `None` if it is no longer used.
    Changed(Arc<str>, Option<Resolved>),
    /// Every name of the first set was looked up once, with or without success. Sent once.
    Settled,
}

/// The names and their states.
#[derive(Debug, Default)]
pub(crate) struct Names {
    known: Mutex<BTreeMap<Arc<str>, Known>>,
    /// Addresses from an earlier process, for names that were not looked up yet.
    before: Mutex<Addresses>,
    kept: Kept,
}

/// The addresses of names, of each family the current one first.
type Addresses = HashMap<String, Vec<IpAddr>>;

/// State of a name.
#[derive(Debug, Default)]
struct Known {
    used_by: Vec<String>,
    families: BTreeMap<Family, Records>,
    /// Condition that was logged last.
    said: Condition,
}

/// State of the addresses of one family of a name.
#[derive(Debug)]
struct Records {
    /// In the order of the last answer.
    addresses: Vec<IpAddr>,
    /// Address that is used where one is enough.
    current: Option<IpAddr>,
    /// Expiry and time of the next request.
    expiry: Expiry,
    /// The name does not exist.
    missing: bool,
    /// Reason why the last request had no answer.
    error: Option<Failure>,
    /// No answer yet.
    new: bool,
}

/// A name's state, for people.
#[derive(Debug, Serialize)]
pub(crate) struct NameStatus {
    name: String,
    condition: Condition,
    /// The services ("NAMESPACE/HOST") whose endpoint it is.
    used_by: Vec<String>,
    /// By record type.
    records: BTreeMap<String, RecordStatus>,
}

/// The state of one family of addresses, for people.
#[derive(Debug, Serialize)]
struct RecordStatus {
    addresses: Vec<IpAddr>,
    /// Of the last answer that was had; less than nothing where that is too old.
    seconds_left: Option<f64>,
    /// Until it is asked for next; 0 while an answer is under way.
    next_in_seconds: f64,
    /// Questions without an answer since the last one that had one.
    failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Names {
    /// None yet; the addresses they last had are kept in a folder.
    pub(crate) fn open(folder: Option<&Path>) -> Self {
        let kept = Kept::new(folder, FILE);
        Self { before: Mutex::new(kept.read()), kept, ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a name is to begin with.
    fn first(&self, name: &str, now: Instant) -> Known {
        let before = self.before.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        let of = |family: Family| {
            let addresses = before.iter().flatten().filter(|address| family.is_of(address));
            (family, Records::new(addresses.copied().collect(), now))
        };
        Known { families: Family::BOTH.map(of).into(), ..Known::default() }
    }

    /// Writes changed addresses periodically.
    pub(crate) async fn keep(self: Arc<Self>) {
        let names = Arc::clone(&self);
        self.kept.keep(move || names.write()).await;
    }

    /// Writes changed addresses. Blocks.
    ///
    /// # Errors
    /// When the folder cannot be written to.
    pub(crate) fn write(&self) -> io::Result<()> {
        self.kept.write(|| {
            let known = self.lock();
            let some = known.iter().map(|(name, known)| (name.to_string(), known.addresses()));
            some.filter(|(_, addresses)| !addresses.is_empty()).collect::<BTreeMap<_, _>>()
        })
    }

    /// Every name's state.
    pub(crate) fn status(&self) -> Vec<NameStatus> {
        let now = Instant::now();
        let of = |(name, known): (&Arc<str>, &Known)| NameStatus {
            name: name.to_string(),
            condition: known.condition(),
            used_by: known.used_by.clone(),
            records: known.families.iter().map(|(family, of)| (family.to_string(), of.status(now))).collect(),
        };
        self.lock().iter().map(of).collect()
    }

    /// How many names are in each condition.
    pub(crate) fn conditions(&self) -> BTreeMap<Condition, usize> {
        let mut counts = BTreeMap::new();
        self.lock().values().for_each(|known| *counts.entry(known.condition()).or_default() += 1);
        counts
    }
}

impl Known {
    fn condition(&self) -> Condition {
        let mut all = self.families.values();
        let some = self.families.values().any(|records| !records.addresses.is_empty());
        if self.families.values().all(|records| records.new) {
            Condition::New
        } else if all.any(|records| records.error.is_some()) {
            if some { Condition::Stale } else { Condition::Failed }
        } else if some {
            Condition::Resolved
        } else {
            Condition::Missing
        }
    }

    /// All its addresses, of each family the current one first.
    fn addresses(&self) -> Vec<IpAddr> {
        let of = |records: &Records| {
            let others =
                records.addresses.iter().copied().filter(|address| Some(*address) != records.current);
            records.current.into_iter().chain(others).collect::<Vec<_>>()
        };
        self.families.values().flat_map(of).collect()
    }

    fn resolved(&self) -> Resolved {
        let addresses = self.families.values().flat_map(|records| records.addresses.iter().copied());
        let current = self.families.values().filter_map(|records| records.current);
        Resolved { addresses: addresses.collect(), current: current.collect() }
    }

    /// Logs the condition of a name when it changes.
    fn say(&mut self, name: &str) {
        let now = self.condition();
        let before = std::mem::replace(&mut self.said, now);
        let error = self.families.values().find_map(|records| records.error.as_deref()).unwrap_or_default();
        let used_by = self.used_by.join(", ");
        match now {
            same if same == before => {}
            Condition::Stale => {
                warn!(name, error, used_by, "a name cannot be looked up: its last addresses stay in force");
            }
            Condition::Failed => {
                warn!(
                    name,
                    error, used_by, "a name cannot be looked up: its endpoints are missing until it can"
                );
            }
            Condition::Missing => {
                warn!(
                    name,
                    used_by, "DNS has no addresses for a name: its endpoints are missing; check the name"
                );
            }
            Condition::Resolved if before != Condition::New => info!(name, "a name has its addresses again"),
            Condition::Resolved | Condition::New => {}
        }
    }
}

impl Records {
    /// Before the first answer, with the addresses of before.
    fn new(addresses: Vec<IpAddr>, now: Instant) -> Self {
        let (current, expiry) = (addresses.first().copied(), Expiry::new(now));
        Self { addresses, current, expiry, missing: false, error: None, new: true }
    }

    /// Takes the result of a request.
    fn take(&mut self, answer: Result<Answer, Failure>, rate: Duration, now: Instant) {
        self.new = false;
        match answer {
            Ok(Answer::Addresses(addresses, ttl)) => {
                // It stays, so that one that many have does not change with the order of the answers.
                let stays = self.current.filter(|current| addresses.contains(current));
                self.current = stays.or(addresses.first().copied());
                self.addresses = addresses;
                (self.missing, self.error) = (false, None);
                self.expiry.found(ttl, rate, now);
            }
            Ok(Answer::Nothing { missing, ttl }) => {
                (self.addresses, self.current) = (Vec::new(), None);
                (self.missing, self.error) = (missing, None);
                self.expiry.nothing(ttl, now);
            }
            Err(error) => {
                self.error = Some(error);
                self.expiry.failed(now);
            }
        }
    }

    fn status(&self, now: Instant) -> RecordStatus {
        let missing = || self.missing.then(|| "there is no such name".to_owned());
        RecordStatus {
            addresses: self.addresses.clone(),
            seconds_left: self.expiry.left(now),
            next_in_seconds: self.expiry.due.saturating_duration_since(now).as_secs_f64(),
            failures: self.expiry.failures,
            error: self.error.as_ref().map(ToString::to_string).or_else(missing),
        }
    }
}

/// Name and family of a request.
type Key = (Arc<str>, Family);

/// Looks names up until the receiver is dropped.
pub(crate) struct Resolver<A> {
    /// Asks.
    pub(crate) ask: A,
    /// The names, also for pages.
    pub(crate) names: Arc<Names>,
    /// The names that are wanted, and how often to ask where an answer does not say how long it holds.
    pub(crate) wanted: watch::Receiver<(Arc<Wanted>, Duration)>,
    /// Sender of the results.
    pub(crate) told: mpsc::UnboundedSender<Event>,
}

impl<A, F> Resolver<A>
where
    A: Fn(Arc<str>, Family) -> F,
    F: Future<Output = Result<Answer, Failure>> + Send + 'static,
{
    /// Runs.
    pub(crate) async fn run(mut self) {
        let mut due: BTreeSet<(Instant, Key)> = BTreeSet::new();
        let mut under_way: HashSet<Key> = HashSet::new();
        let mut answers = JoinSet::new();
        let mut settled = false;
        self.follow(&mut due);
        loop {
            let now = Instant::now();
            while answers.len() < AT_ONCE
                && let Some((at, _)) = due.first()
                && *at <= now
                && let Some((_, key)) = due.pop_first()
            {
                let answer = (self.ask)(Arc::clone(&key.0), key.1);
                under_way.insert(key.clone());
                answers.spawn(async move { (key, answer.await) });
            }
            if !settled && answers.is_empty() && due.first().is_none_or(|(at, _)| *at > now) {
                settled = true;
                let _ = self.told.send(Event::Settled);
            }
            let next = due.first().filter(|_| answers.len() < AT_ONCE).map(|(at, _)| *at);
            let sleep = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.wanted.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let asked: HashSet<Key> =
                        self.follow(&mut due).into_iter().filter(|key| under_way.contains(key)).collect();
                    if !asked.is_empty() {
                        // Their answers are to come already.
                        due.retain(|(_, key)| !asked.contains(key));
                    }
                }
                Some(answered) = answers.join_next() => {
                    let Ok((key, answer)) = answered else { continue };
                    under_way.remove(&key);
                    due.extend(self.take(&key, answer).map(|at| (at, key)));
                }
                () = sleep => {}
                () = self.told.closed() => return,
            }
        }
    }

    /// Takes the names to look up. Returns the new ones.
    fn follow(&mut self, due: &mut BTreeSet<(Instant, Key)>) -> Vec<Key> {
        let (wanted, _) = self.wanted.borrow_and_update().clone();
        let now = Instant::now();
        let mut names = self.names.lock();
        let gone: HashSet<Arc<str>> =
            names.keys().filter(|name| !wanted.contains_key(*name)).cloned().collect();
        if !gone.is_empty() {
            due.retain(|(_, (of, _))| !gone.contains(of));
        }
        for name in gone {
            names.remove(&name);
            self.names.kept.note();
            let _ = self.told.send(Event::Changed(name, None));
        }
        let mut new = Vec::new();
        for (name, used_by) in &*wanted {
            let known = names.entry(Arc::clone(name)).or_insert_with(|| {
                new.extend(Family::BOTH.map(|family| (Arc::clone(name), family)));
                let known = self.names.first(name, now);
                let before = known.resolved();
                if !before.addresses.is_empty() {
                    let _ = self.told.send(Event::Changed(Arc::clone(name), Some(before)));
                }
                known
            });
            known.used_by.clone_from(used_by);
        }
        due.extend(new.iter().map(|key| (now, key.clone())));
        new
    }

    /// Takes a result and reports changes. Returns the time of the next request; `None` if the name is no longer used.
    fn take(&self, key: &Key, answer: Result<Answer, Failure>) -> Option<Instant> {
        let (name, family) = key;
        let rate = self.wanted.borrow().1;
        let mut names = self.names.lock();
        let known = names.get_mut(name)?;
        let was_new = known.condition() == Condition::New;
        let before = known.resolved();
        let records = known.families.get_mut(family)?;
        records.take(answer, rate, Instant::now());
        let due = records.expiry.due;
        let now = known.resolved();
        if was_new || before != now {
            self.names.kept.note();
            let _ = self.told.send(Event::Changed(Arc::clone(name), Some(now)));
        }
        // What the first of two answers says is half of it.
        if known.families.values().all(|records| !records.new) {
            known.say(name);
        }
        Some(due)
    }
}

#[cfg(test)]
mod tests;
