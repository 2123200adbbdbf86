//! One kind of resource on one stream: what the client asked for of it, has, and is to be sent.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use super::{
    Ask, Behind, Form, WILDCARD,
    names::{SubscribedNames, sorted},
};
use crate::{
    aliases::{self, lookups},
    interest::Interest,
    kind::Kind,
    layer::Snapshot,
    limits,
    resource::Resource,
    work,
};

/// The state of one kind on one stream.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// The client has asked for this kind.
    pub(super) open: bool,
    pub(super) wildcard: bool,
    pub(super) names: SubscribedNames,
    /// Those of them that the client has not said, and is to confirm.
    given: SubscribedNames,
    /// Those of them that no resource had when they were asked for, which are held for this stream alone.
    pub(super) strange: SubscribedNames,
    /// What these take.
    pub(super) kept: usize,
    /// What those in `lost` take, and how many they were when that was summed up.
    pub(super) kept_lost: (usize, usize),
    /// SubscribedNames by which virtual hosts were found, and those hosts.
    pub(super) found: BTreeMap<Arc<str>, Arc<str>>,
    /// Keys of the names that no resource has, sorted; `None` after names were added.
    keys: Option<Box<[u64]>>,
    /// Lookups that are not charged yet.
    pub(super) lookups: usize,
    /// SubscribedNames looked through after a change, which are not charged yet.
    pub(super) scanned: usize,
    /// What is asked for has changed since it was noted in the interest.
    pub(super) renamed: bool,
    /// SubscribedNames that are not noted in the interest yet.
    untold: Vec<Arc<str>>,
    /// Everything that there is is news.
    pub(super) all: bool,
    /// Changes up to this generation have been told, but for removals that must wait.
    pub(super) seen: u64,
    /// Removals up to this generation have been told.
    cleared: u64,
    /// To be answered even if the client has them, or if there are none.
    pub(super) again: SubscribedNames,
    /// What the client has from an earlier stream and is no more.
    lost: Vec<Arc<str>>,
    /// To be answered even with nothing.
    pub(super) answer: bool,
    /// The response that is neither acknowledged nor refused yet.
    pub(super) in_flight: Option<u64>,
    /// The generation that the last response was made of.
    pub(super) sent: u64,
    /// The last response's number.
    pub(super) nonce: Option<u64>,
    /// State of the world: the next request is to be answered, whatever it looks like.
    pub(super) answer_next: bool,
    /// State of the world: names were given, so that none means nothing and no longer all.
    explicit: bool,
}

/// What is to be said of a kind.
#[derive(Default)]
pub(super) struct PendingChanges {
    pub(super) send: Vec<Arc<Resource>>,
    pub(super) removed: Vec<Arc<str>>,
    /// Something that the client has is gone, or may be.
    pub(super) shrunk: bool,
}

impl Watched {
    /// Notes what is asked for, if that is not noted yet.
    pub(super) fn tell(&mut self, kind: Kind, interest: &Interest) {
        if std::mem::take(&mut self.renamed) {
            if self.wildcard {
                interest.add_all(kind);
            }
            interest.add(kind, std::mem::take(&mut self.untold).iter().map(|name| &**name));
            self.keys = None;
        }
    }

    /// Sums up what is held for this stream alone, unless that is as it was.
    pub(super) fn sum_up(&mut self, before: &Arc<[Arc<str>]>) {
        let sum = |names: &[Arc<str>]| {
            work::did(names.len());
            names.iter().map(|name| limits::name_cost(name)).sum()
        };
        if !Arc::ptr_eq(before, &self.strange.0) {
            self.kept = sum(&self.strange.0);
        }
        if self.kept_lost.1 != self.lost.len() {
            self.kept_lost = (sum(&self.lost), self.lost.len());
        }
    }

    /// Finds the virtual hosts that answer to those of these names that no resource has.
    fn find(&mut self, kind: Kind, names: &[Arc<str>], snapshot: &Snapshot) -> Vec<Arc<str>> {
        let mut found = Vec::new();
        // A stream that asks for more is ended.
        if self.strange.0.len() > limits::AUTHORITIES {
            return found;
        }
        for name in names.iter().filter(|name| snapshot.get(kind, name).is_none()) {
            self.lookups += lookups(kind, name);
            if let Some(host) = snapshot.find(kind, name) {
                self.found.insert(Arc::clone(name), Arc::clone(&host.name));
                found.push(Arc::clone(&host.name));
            }
        }
        found
    }

    pub(super) fn ask_delta(&mut self, ask: Ask, snapshot: &Snapshot) {
        let Ask { kind, names, unsubscribe, have, .. } = ask;
        if self.open {
            // Most requests only acknowledge.
            if !names.is_empty() {
                self.subscribe(kind, names, snapshot, |_| true);
            }
        } else {
            // The older way to ask for everything: a first request without names.
            let wildcard = names.is_empty() && unsubscribe.is_empty() && kind.is_wildcard();
            self.answer = wildcard && have.is_empty();
            self.open(snapshot);
            // A version we never gave is different from all of ours.
            let versions: HashMap<&str, u64> = have
                .iter()
                .filter_map(|(name, version)| Some((name.as_str(), u64::from_str_radix(version, 16).ok()?)))
                .collect();
            let stale = |name: &str| {
                let version = snapshot.get(kind, name).map(|resource| resource.version);
                version.is_none() || version != versions.get(name).copied()
            };
            self.subscribe(kind, names, snapshot, stale);
            self.wildcard |= wildcard;
            self.renamed |= wildcard;
            self.all &= have.is_empty();
            if self.wildcard && !have.is_empty() {
                let all = snapshot.iter(kind).map(|resource| &resource.name);
                self.again.extend(all.filter(|name| stale(name)).cloned());
            }
            let gone = have.keys().filter(|name| {
                snapshot.get(kind, name).is_none() && self.watches(kind, name) && !self.names.contains(name)
            });
            self.lost = gone.map(|name| name.as_str().into()).collect();
        }
        if !unsubscribe.is_empty() {
            let (before, wildcard) = (Arc::clone(&self.names.0), self.wildcard);
            self.unsubscribe(kind, &SubscribedNames(snapshot.intern(kind, unsubscribe).0.into()));
            let same = Arc::ptr_eq(&before, &self.names.0) && wildcard == self.wildcard;
            if kind == Kind::VirtualHost && !(same && self.given.0.is_empty()) {
                // What it did not confirm it may have forgotten, or not take when it comes. Who still asks for what leads to one is
                // to have it.
                let given = std::mem::take(&mut self.given);
                self.unsubscribe(kind, &given);
                self.lookups += self.found.len();
                let there = |name: &str| snapshot.get(kind, name).is_some();
                let found = self.found.iter().filter(|(name, host)| !there(name) && there(host));
                let hosts = found.map(|(_, host)| Arc::clone(host)).collect();
                self.give(kind, hosts);
            }
        }
    }

    fn unsubscribe(&mut self, kind: Kind, names: &SubscribedNames) {
        if names.contains(WILDCARD) {
            self.wildcard = false;
            self.all = false;
            self.lost.clear();
        }
        self.names.remove(&names.0);
        self.given.remove(&names.0);
        self.strange.remove(&names.0);
        self.found.retain(|name, _| !names.contains(name));
        let mut again = std::mem::take(&mut self.again);
        again.retain(|name| !names.contains(name) && self.watches(kind, name));
        // The client has forgotten what it is still to have, if there is any.
        again.extend(names.0.iter().filter(|name| self.watches(kind, name)).cloned());
        self.again = again;
    }

    /// Begins with the client as up to date, but for what is noted otherwise.
    fn open(&mut self, snapshot: &Snapshot) {
        self.open = true;
        self.all = true;
        (self.seen, self.cleared) = (snapshot.generation(), snapshot.generation());
    }

    fn subscribe(
        &mut self,
        kind: Kind,
        names: Vec<String>,
        snapshot: &Snapshot,
        news: impl Fn(&str) -> bool,
    ) {
        let (mut named, mut again, mut families) = (Vec::new(), Vec::new(), Vec::new());
        let (names, strange) = snapshot.intern(kind, names);
        self.strange.extend(strange);
        for name in names {
            if &*name == WILDCARD {
                self.all |= !self.wildcard;
                self.wildcard = true;
                self.look_back();
                continue;
            }
            if kind.is_family(&name) {
                families.push(Arc::clone(&name));
            } else if !self.given.contains(&name) && news(&name) {
                again.push(Arc::clone(&name));
            }
            named.push(name);
        }
        self.given.remove(&named);
        if !families.is_empty() {
            self.look_back();
            let families = SubscribedNames(families.into());
            let asked = |member: &&Arc<str>| kind.family(member).is_some_and(|name| families.contains(name));
            let members = snapshot.iter(kind).map(|resource| &resource.name).filter(asked);
            again.extend(members.filter(|member| news(member)).cloned());
        }
        self.renamed = true;
        self.untold.extend(named.iter().cloned());
        self.names.extend(named.iter().cloned());
        self.names.0 = snapshot.share_names(kind, &self.names.0);
        self.again.extend(again);
        if kind == Kind::VirtualHost {
            let found = self.find(kind, &named, snapshot);
            self.give(kind, found);
        }
    }

    /// What is under way may bring what the client asked for before, and is gone by now, to one who asks for many.
    fn look_back(&mut self) {
        if self.in_flight.is_some() {
            self.cleared = self.cleared.min(self.sent);
        }
    }

    /// Gives the client what answers to names that it asks for since aliases changed, unless it has that. Returns the hosts
    /// that answer.
    pub(super) fn resolve(&mut self, kind: Kind, snapshot: &Snapshot) -> Vec<Arc<str>> {
        let names = self.touched(kind, snapshot).unwrap_or_else(|| {
            self.found.clear();
            Arc::clone(&self.names.0)
        });
        for name in &*names {
            self.found.remove(name);
        }
        let found = self.find(kind, &names, snapshot);
        self.give(kind, found.clone());
        found
    }

    /// The names that may be answered otherwise since aliases changed; `None` if that is not known. SubscribedNames are looked through only
    /// when a wildcard changed, the alias of one of them did, or they did themselves.
    fn touched(&mut self, kind: Kind, snapshot: &Snapshot) -> Option<Arc<[Arc<str>]>> {
        let changed = snapshot.realiased(kind, self.seen)?;
        let gone = snapshot.changes(kind, self.seen).gone?;
        if gone.iter().any(|name| self.names.contains(name)) {
            self.keys = None;
        }
        let (names, found) = (&self.names, &mut self.found);
        let mut scanned = 0;
        let mut scan = || {
            scanned += names.0.len();
            work::did(names.0.len());
            snapshot
                .each(kind, &names.0, 0)
                .filter(|(_, resource, _)| resource.is_none())
                .map(|(name, ..)| name)
        };
        let keys = self.keys.get_or_insert_with(|| {
            found.retain(|name, _| names.contains(name));
            let mut keys: Vec<_> = scan().map(|name| aliases::key(name)).collect();
            keys.sort_unstable();
            keys.into()
        });
        let touched = if changed.may_touch(keys) {
            scan().filter(|name| changed.touches(kind, name)).cloned().collect()
        } else {
            Arc::default()
        };
        self.scanned += scanned;
        Some(touched)
    }

    /// Gives the client what is remembered of the route configurations whose catch-all it asks for now.
    pub(super) fn give_remembered(
        &mut self,
        remembered: &[Arc<str>],
        before: &[Arc<str>],
        snapshot: &Snapshot,
    ) {
        let kind = Kind::VirtualHost;
        // Few hosts are remembered, and the client may have named many catch-alls.
        let is_new = |name: &str| self.names.contains(name) && !sorted::contains(before, name);
        let theirs =
            |name: &&Arc<str>| kind.family(name).is_some_and(|family| is_new(&format!("{family}/*")));
        let found = remembered.iter().filter(theirs).filter_map(|name| snapshot.get(kind, name));
        let found = found.map(|resource| Arc::clone(&resource.name)).collect();
        self.give(kind, found);
    }

    /// Sends these as if the client had asked for them.
    fn give(&mut self, kind: Kind, mut names: Vec<Arc<str>>) {
        names.retain(|name| !self.watches(kind, name));
        self.renamed |= !names.is_empty();
        self.untold.extend(names.iter().cloned());
        self.names.extend(names.iter().cloned());
        self.again.extend(names.iter().cloned());
        self.given.extend(names);
    }

    pub(super) fn ask_sotw(&mut self, ask: Ask, acknowledges: bool, snapshot: &Snapshot) {
        let Ask { kind, mut names, .. } = ask;
        self.explicit |= !names.is_empty();
        let wildcard = names.iter().any(|name| name == WILDCARD) || (!self.explicit && kind.is_wildcard());
        names.retain(|name| name != WILDCARD);
        let (names, strange) = snapshot.intern(kind, names);
        let names = SubscribedNames(names.into());
        self.strange = SubscribedNames(strange.into());
        let first = !self.open;
        let same = names == self.names;
        let repeated = !first && !acknowledges && same && wildcard == self.wildcard;
        if first || repeated || self.answer_next {
            self.answer = wildcard || !names.0.is_empty();
            self.again.extend(names.0.iter().cloned());
            self.answer_next = false;
        } else {
            let new: Vec<_> = names.0.iter().filter(|name| !self.names.contains(name)).cloned().collect();
            let missing = || new.iter().any(|name| snapshot.get(kind, name).is_none());
            self.answer |= (wildcard && !self.wildcard) || (kind.is_wildcard() && missing());
            self.again.extend(new);
        }
        if first {
            self.open(snapshot);
        }
        self.all = wildcard && (self.all || !self.wildcard);
        self.renamed |= first || !same || wildcard != self.wildcard;
        self.wildcard = wildcard;
        self.again.retain(|name| names.contains(name));
        if first || !same {
            self.untold =
                names.0.iter().filter(|name| first || !self.names.contains(name)).cloned().collect();
        }
        if !same {
            self.names = SubscribedNames(snapshot.share_names(kind, &names.0));
        }
    }

    /// A request that answers an older response than the last. It is not answered, as a client that saw the last one repeats
    /// itself. But what it does not ask for the client forgets, and is to have anew if it then asks for it.
    pub(super) fn ask_late(&mut self, ask: &Ask) {
        self.wildcard &=
            (!self.explicit && ask.kind.is_wildcard()) || ask.names.iter().any(|name| name == WILDCARD);
        self.all &= self.wildcard;
        if !self.names.0.is_empty() {
            let said: HashSet<&str> = ask.names.iter().map(String::as_str).collect();
            self.names.retain(|name| said.contains(name));
            self.strange.retain(|name| said.contains(name));
        }
    }

    /// What the lists of names take that have their places in no other account. In bytes.
    pub(super) fn lists(&self) -> usize {
        let lists = [&self.names, &self.again, &self.given];
        let found = 2 * self.found.len();
        (lists.into_iter().map(SubscribedNames::places).sum::<usize>() + found) * size_of::<Arc<str>>()
    }

    /// Length of the names in a request that lists them all, with what goes before each. In bytes.
    pub(super) fn names_length(&self) -> usize {
        self.names.0.iter().map(|name| 4 + name.len()).sum()
    }

    /// What a request costs that lists so many names, where so many waited to be answered before. `all` if it has all there is
    /// sent.
    pub(super) fn cost(
        &self,
        kind: Kind,
        snapshot: &Snapshot,
        listed: usize,
        waiting: usize,
        all: bool,
    ) -> u64 {
        let all = if all { snapshot.count(kind) } else { 0 };
        let anew = self.again.0.len().saturating_sub(waiting) + all;
        let held = if listed > 0 { self.names.0.len() + self.again.0.len() } else { 0 };
        limits::ASK
            + limits::RESOURCE * anew as u64
            + limits::NAMED * listed as u64
            + limits::HELD * held as u64
    }

    /// Whether the client takes part in what happens to a name.
    fn watches(&self, kind: Kind, name: &str) -> bool {
        self.wildcard
            || self.names.contains(name)
            || kind.family(name).is_some_and(|family| self.names.contains(family))
    }

    /// Whether the client takes part in what happens to names that it did not say.
    pub(super) fn takes_many(&self, kind: Kind) -> bool {
        self.wildcard || self.names.0.iter().any(|name| kind.is_family(name))
    }

    /// Whether the client was told of a name, whatever there is to it.
    pub(super) fn has(&self, kind: Kind, name: &str) -> bool {
        self.open && !self.all && self.watches(kind, name) && !self.again.contains(name)
    }

    /// Whether the client never had a resource that is to be sent.
    pub(super) fn lacks(&self, kind: Kind, snapshot: &Snapshot, name: &str) -> bool {
        self.all || self.again.contains(name) || snapshot.is_new(kind, name, self.seen)
    }

    /// Whether there is nothing to say, as far as a glance tells.
    pub(super) fn is_settled(&self, kind: Kind, snapshot: &Snapshot, removals: bool) -> bool {
        let since = if removals { self.seen.min(self.cleared) } else { self.seen };
        !self.all
            && !self.answer
            && self.again.0.is_empty()
            && (self.lost.is_empty() || !removals)
            && !snapshot.is_changed(kind, since)
    }

    /// Resources the client lacks, and names it must be told are not there.
    pub(super) fn due(
        &self,
        form: Form,
        kind: Kind,
        snapshot: &Snapshot,
        removals: bool,
    ) -> Result<PendingChanges, Behind> {
        work::did(1 + self.again.0.len() + if removals { self.lost.len() } else { 0 });
        let mut due = PendingChanges::default();
        if self.all && self.wildcard {
            due.send.extend(snapshot.iter(kind).cloned());
        } else {
            let news = snapshot.changes(kind, self.seen).resources;
            due.send.extend(news.into_iter().filter(|resource| self.watches(kind, &resource.name)));
            for (name, resource, is_changed) in snapshot.each(kind, &self.again.0, self.seen) {
                match resource {
                    // It is among the news.
                    Some(_) if is_changed && self.watches(kind, name) => {}
                    Some(resource) => due.send.push(Arc::clone(resource)),
                    None => {}
                }
            }
        }
        let missing = |name: &&Arc<str>| snapshot.get(kind, name).is_none();
        if form == Form::Delta {
            let again = snapshot.each(kind, &self.again.0, self.seen);
            due.removed.extend(
                again.filter(|(_, resource, _)| resource.is_none()).map(|(name, ..)| Arc::clone(name)),
            );
        }
        if removals {
            let gone = snapshot.changes(kind, self.cleared).gone;
            match gone {
                Some(gone) => due.removed.extend(gone.into_iter().filter(|name| self.watches(kind, name))),
                None if form == Form::Delta && self.takes_many(kind) => return Err(Behind),
                None => {
                    due.removed.extend(self.names.0.iter().filter(missing).cloned());
                    due.shrunk = true;
                }
            }
            due.removed.extend(self.lost.iter().filter(missing).cloned());
            due.removed.sort_unstable();
            due.removed.dedup();
            due.shrunk |= !due.removed.is_empty();
        }
        Ok(due)
    }

    /// State of the world: all the client is to have of a kind that is always sent whole.
    pub(super) fn whole(&self, snapshot: &Snapshot, kind: Kind) -> Vec<Arc<Resource>> {
        if self.takes_many(kind) {
            return snapshot
                .iter(kind)
                .filter(|resource| self.watches(kind, &resource.name))
                .cloned()
                .collect();
        }
        snapshot.each(kind, &self.names.0, 0).filter_map(|(_, resource, _)| resource).cloned().collect()
    }

    /// The client knows all there is, with or without what is gone.
    pub(super) fn told(&mut self, snapshot: &Snapshot, removals: bool) {
        self.seen = snapshot.generation();
        self.all = false;
        self.again = SubscribedNames::default();
        if removals {
            self.cleared = self.seen;
            self.lost.clear();
        }
    }
}
