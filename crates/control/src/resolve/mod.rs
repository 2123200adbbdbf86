//! DNS lookups of the names of endpoints: one lookup per name for the whole mesh.
//!
//! One task ([`Resolver`]) receives the names and reports changes of their addresses. It looks up the A and AAAA
//! records of each name ([`query`]) at the servers of [`servers`]. It repeats a lookup when its answer expires
//! ([`schedule`]). It limits the number of concurrent lookups. Jitter keeps names from expiring at the same time. The
//! [`cache`] holds the addresses.

mod cache;
mod lookups;
mod query;
mod schedule;
mod servers;

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use skysail_model::Resolved;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};

pub(crate) use self::{
    cache::DnsCache,
    lookups::Lookups,
    query::{Answer, Family, LookupError, lookup},
    servers::{Servers, parse_server},
};
use crate::{metrics::Condition, publish::LookupNames};

/// Maximum number of concurrent lookups.
const MAX_CONCURRENT: usize = 64;

/// A result of the resolver.
#[derive(Debug, PartialEq)]
pub(crate) enum LookupEvent {
    /// New addresses of a name; `None` if the mesh no longer uses the name.
    Changed(Arc<str>, Option<Resolved>),
    /// Every name of the first set was looked up once, with or without success. Sent once.
    FirstRoundDone,
}

/// Name and family of a lookup.
type LookupKey = (Arc<str>, Family);

/// Looks up names and reports changes of their addresses.
pub(crate) struct Resolver<L> {
    /// Looks up one family of a name.
    pub(crate) lookup: L,
    pub(crate) cache: Arc<DnsCache>,
    /// Names to look up, and the interval of lookups of a name whose TTL is always 0.
    pub(crate) names: watch::Receiver<(Arc<LookupNames>, Duration)>,
    pub(crate) events: mpsc::UnboundedSender<LookupEvent>,
}

impl<L, F> Resolver<L>
where
    L: Fn(Arc<str>, Family) -> F,
    F: Future<Output = Result<Answer, LookupError>> + Send + 'static,
{
    /// Runs until the sender of the names or the receiver of the events is dropped.
    pub(crate) async fn run(mut self) {
        let mut due: BTreeSet<(Instant, LookupKey)> = BTreeSet::new();
        let mut in_progress: HashSet<LookupKey> = HashSet::new();
        let mut answers = JoinSet::new();
        let mut first_round_done = false;
        self.update_names(&mut due);
        loop {
            let now = Instant::now();
            while answers.len() < MAX_CONCURRENT
                && let Some((at, _)) = due.first()
                && *at <= now
                && let Some((_, key)) = due.pop_first()
            {
                let answer = (self.lookup)(Arc::clone(&key.0), key.1);
                in_progress.insert(key.clone());
                answers.spawn(async move { (key, answer.await) });
            }
            if !first_round_done && answers.is_empty() && due.first().is_none_or(|(at, _)| *at > now) {
                first_round_done = true;
                let _ = self.events.send(LookupEvent::FirstRoundDone);
            }
            let next = due.first().filter(|_| answers.len() < MAX_CONCURRENT).map(|(at, _)| *at);
            let sleep = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.names.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    // A name that was removed and added again may have a lookup in progress, whose answer is enough.
                    let new = self.update_names(&mut due).into_iter();
                    let pending: HashSet<LookupKey> = new.filter(|key| in_progress.contains(key)).collect();
                    if !pending.is_empty() {
                        due.retain(|(_, key)| !pending.contains(key));
                    }
                }
                Some(answered) = answers.join_next() => {
                    let Ok((key, answer)) = answered else { continue };
                    in_progress.remove(&key);
                    due.extend(self.apply(&key, answer).map(|at| (at, key)));
                }
                () = sleep => {}
                () = self.events.closed() => return,
            }
        }
    }

    /// Adds new names to the cache and to `due`, and removes unused ones. Returns the new lookups.
    fn update_names(&mut self, due: &mut BTreeSet<(Instant, LookupKey)>) -> Vec<LookupKey> {
        let (wanted, _) = self.names.borrow_and_update().clone();
        let now = Instant::now();
        let mut entries = self.cache.lock();
        let unused: HashSet<Arc<str>> =
            entries.keys().filter(|name| !wanted.contains_key(*name)).cloned().collect();
        if !unused.is_empty() {
            due.retain(|(_, (name, _))| !unused.contains(name));
        }
        for name in unused {
            entries.remove(&name);
            self.cache.mark_changed();
            let _ = self.events.send(LookupEvent::Changed(name, None));
        }
        let mut new = Vec::new();
        for (name, used_by) in &*wanted {
            let entry = entries.entry(Arc::clone(name)).or_insert_with(|| {
                new.extend(Family::BOTH.map(|family| (Arc::clone(name), family)));
                let entry = self.cache.new_entry(name, now);
                let restored = entry.resolved();
                if !restored.addresses.is_empty() {
                    let _ = self.events.send(LookupEvent::Changed(Arc::clone(name), Some(restored)));
                }
                entry
            });
            entry.used_by.clone_from(used_by);
        }
        due.extend(new.iter().map(|key| (now, key.clone())));
        new
    }

    /// Applies a result and reports a change. Returns the time of the next lookup; `None` if the mesh no longer uses
    /// the name.
    fn apply(&self, key: &LookupKey, answer: Result<Answer, LookupError>) -> Option<Instant> {
        let (name, family) = key;
        let rate = self.names.borrow().1;
        let mut entries = self.cache.lock();
        let entry = entries.get_mut(name)?;
        let was_new = entry.condition() == Condition::New;
        let before = entry.resolved();
        let records = entry.families.get_mut(family)?;
        records.apply(answer, rate, Instant::now());
        let next_query = records.schedule.next_query;
        let resolved = entry.resolved();
        if was_new || before != resolved {
            self.cache.mark_changed();
            let _ = self.events.send(LookupEvent::Changed(Arc::clone(name), Some(resolved)));
        }
        // The condition depends on both families.
        if entry.is_complete() {
            entry.log_condition(name);
        }
        Some(next_query)
    }
}

#[cfg(test)]
mod tests;
