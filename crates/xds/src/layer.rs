//! Resources as they are now, and which of them changed since when.
//!
//! All changes of all layers are counted in one row of generations, so one number says what a client was told: whatever
//! changed in a later generation is news to it. Nothing is kept for a client and a resource.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, OnceLock},
};

use crate::{
    aliases::{Index, Log, Realiased, key},
    kind::Kind,
    resource::{Resource, Resources},
    wire::{Entries, Form},
};

/// How many changes of a kind are remembered by name. Who is further behind has everything looked through.
const REMEMBERED: usize = 2_048;
/// So few resources are not kept in their encoded form as well.
const FEW: usize = 16;

/// Resources that many clients share. Cloning shares everything.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    shelves: [Arc<Shelf>; Kind::ALL.len()],
    /// The last change.
    generation: u64,
}

/// Changes that are made together, of each name the last.
#[derive(Debug, Default)]
pub struct Edits([BTreeMap<Arc<str>, Option<Arc<Resource>>>; Kind::ALL.len()]);

impl Edits {
    /// Has a resource added, or replaced.
    pub fn set(&mut self, resource: Arc<Resource>) {
        self.0[resource.kind as usize].insert(Arc::clone(&resource.name), Some(resource));
    }

    /// Has a resource taken away.
    pub fn remove(&mut self, kind: Kind, name: Arc<str>) {
        self.0[kind as usize].insert(name, None);
    }

    /// What is to become of a name, if anything: a resource, or none.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Option<Arc<Resource>>> {
        self.0[kind as usize].get(name)
    }

    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(BTreeMap::is_empty)
    }
}

/// The resources of one kind.
#[derive(Clone, Debug, Default)]
struct Shelf {
    by_name: BTreeMap<Arc<str>, Entry>,
    /// Generations and what changed in them, the oldest first.
    changes: VecDeque<(u64, Arc<str>)>,
    /// Changes up to this generation are forgotten.
    forgotten: u64,
    /// All of it as it is sent, by form, and as it was when it was last encoded.
    encoded: [OnceLock<Entries>; 2],
    former: [Option<Entries>; 2],
    /// All names.
    names: OnceLock<Arc<[Arc<str>]>>,
    /// Made at the first lookup.
    aliases: OnceLock<Index>,
    /// Their latest changes.
    realiased: Log,
}

#[derive(Clone, Debug)]
struct Entry {
    resource: Arc<Resource>,
    /// Since when there has been a resource of this name, and since when it is as it is.
    added: u64,
    changed: u64,
}

impl Layer {
    /// Adds a resource or replaces the one of its name. `false` if that was equal.
    pub fn set(&mut self, generation: u64, resource: Arc<Resource>) -> bool {
        let shelf = &mut self.shelves[resource.kind as usize];
        let before = shelf.by_name.get(&resource.name);
        if before.is_some_and(|entry| entry.resource.version == resource.version) {
            return false;
        }
        let added = before.map_or(generation, |entry| entry.added);
        let aliases = before.map_or(&[][..], |entry| &entry.resource.aliases);
        let less = |of: &[u64], others: &[u64]| -> Vec<u64> {
            of.iter().filter(|alias| others.binary_search(alias).is_err()).copied().collect()
        };
        let realiased = [less(aliases, &resource.aliases), less(&resource.aliases, aliases)].concat();
        let name =
            before.map_or_else(|| Arc::clone(&resource.name), |entry| Arc::clone(&entry.resource.name));
        let shelf = Arc::make_mut(shelf);
        shelf.by_name.insert(Arc::clone(&name), Entry { resource, added, changed: generation });
        shelf.note(generation, name);
        if !realiased.is_empty() {
            shelf.realias(generation, realiased);
        }
        self.generation = generation;
        true
    }

    /// Takes a resource away. `false` if there was none.
    pub fn remove(&mut self, generation: u64, kind: Kind, name: &str) -> bool {
        let shelf = &mut self.shelves[kind as usize];
        if !shelf.by_name.contains_key(name) {
            return false;
        }
        let shelf = Arc::make_mut(shelf);
        if let Some((name, entry)) = shelf.by_name.remove_entry(name) {
            if kind == Kind::VirtualHost {
                // Another may answer to its name now.
                shelf.realias(generation, entry.resource.aliases.iter().copied().chain([key(&name)]));
            }
            shelf.note(generation, name);
        }
        self.generation = generation;
        true
    }

    /// Makes these resources all there are. `false` if they were.
    pub fn replace(&mut self, generation: u64, resources: &Resources) -> bool {
        let mut changed = false;
        for kind in Kind::ALL {
            let names = self.shelves[kind as usize].by_name.keys();
            let gone: Vec<_> = names.filter(|name| resources.get(kind, name).is_none()).cloned().collect();
            for name in gone {
                changed |= self.remove(generation, kind, &name);
            }
            for resource in resources.iter(kind) {
                changed |= self.set(generation, Arc::clone(resource));
            }
        }
        changed
    }

    /// The resource of a kind and name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.shelf(kind).by_name.get(name).map(|entry| &entry.resource)
    }

    /// Makes changes. What another layer was `before` them and is `after` is taken from there where it is the same here, so
    /// that it is held, and encoded, once.
    pub fn edit(&mut self, generation: u64, edits: Edits, like: Option<(&Self, &Self)>) {
        for (kind, edits) in Kind::ALL.into_iter().zip(edits.0) {
            if let Some((before, after)) = like
                && Arc::ptr_eq(&self.shelves[kind as usize], &before.shelves[kind as usize])
                && after.shelf(kind).came_of(before.shelf(kind), &edits, generation)
            {
                self.shelves[kind as usize] = Arc::clone(&after.shelves[kind as usize]);
                self.generation = self.generation.max(self.shelf(kind).last_change());
                continue;
            }
            for (name, edit) in edits {
                match edit {
                    Some(resource) => self.set(generation, resource),
                    None => self.remove(generation, kind, &name),
                };
            }
        }
    }

    /// The names of a kind of which something changed after a generation; `None` if they are not all known any more.
    pub(crate) fn changed_names(&self, kind: Kind, since: u64) -> Option<impl Iterator<Item = &str>> {
        let shelf = self.shelf(kind);
        let first = shelf.changes.partition_point(|(generation, _)| *generation <= since);
        let names = shelf.changes.range(first..).map(|(_, name)| &**name);
        (since >= shelf.forgotten).then_some(names)
    }

    /// Whether any name is found otherwise than in a generation.
    pub(crate) fn is_realiased(&self, kind: Kind, since: u64) -> bool {
        self.shelf(kind).realiased.last() > since
    }

    /// Shares with another layer what is equal, so that it is held once. For a layer that nobody was sent anything of.
    pub fn share(&mut self, other: &Self) {
        for (shelf, other) in self.shelves.iter_mut().zip(&other.shelves) {
            let mut entries = shelf.by_name.values().zip(other.by_name.values());
            if shelf.by_name.len() == other.by_name.len()
                && entries.all(|(one, other)| one.resource == other.resource)
            {
                *shelf = Arc::clone(other);
                // What came to pass there before is no news to who begins here, also where this layer is empty.
                self.generation = self.generation.max(shelf.last_change());
                continue;
            }
            for (name, entry) in &mut Arc::make_mut(shelf).by_name {
                if let Some(equal) = other.by_name.get(name).filter(|other| other.resource == entry.resource)
                {
                    entry.resource = Arc::clone(&equal.resource);
                }
            }
        }
    }

    fn shelf(&self, kind: Kind) -> &Shelf {
        &self.shelves[kind as usize]
    }
}

impl Shelf {
    /// Whether this is what another shelf becomes by these edits.
    fn came_of(
        &self,
        before: &Self,
        edits: &BTreeMap<Arc<str>, Option<Arc<Resource>>>,
        generation: u64,
    ) -> bool {
        let version = |shelf: &Self, name: &str| shelf.by_name.get(name).map(|entry| entry.resource.version);
        let mut changed = 0;
        for (name, edit) in edits {
            let now = edit.as_ref().map(|resource| resource.version);
            if version(self, name) != now {
                return false;
            }
            changed += usize::from(version(before, name) != now);
        }
        self.changes.iter().rev().take_while(|(of, _)| *of == generation).count() == changed
    }

    fn last_change(&self) -> u64 {
        self.changes.back().map_or(self.forgotten, |(generation, _)| *generation)
    }

    fn note(&mut self, generation: u64, name: Arc<str>) {
        for (encoded, former) in self.encoded.iter_mut().zip(&mut self.former) {
            *former = encoded.take().or(former.take());
        }
        self.names = OnceLock::new();
        self.changes.push_back((generation, name));
        if self.changes.len() > REMEMBERED
            && let Some((generation, _)) = self.changes.pop_front()
        {
            self.forgotten = generation;
        }
    }

    /// Notes aliases that were added or removed.
    fn realias(&mut self, generation: u64, keys: impl IntoIterator<Item = u64>) {
        self.aliases = OnceLock::new();
        self.realiased.note(generation, keys);
    }

    /// The resource that answers to a name by one of its aliases.
    fn by_alias(&self, kind: Kind, name: &str) -> Option<&Entry> {
        let aliases = self.aliases.get_or_init(|| {
            let each = self.by_name.iter();
            let all = each.flat_map(|(name, entry)| {
                entry.resource.aliases.iter().map(|alias| (*alias, Arc::clone(name)))
            });
            all.collect()
        });
        self.by_name.get(aliases.find(kind, name)?)
    }
}

/// All that one client is served now: what is only for those like it, and what it shares with many more. A name stands in one
/// of them.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// What depends on the workload.
    pub own: Arc<Layer>,
    /// What does not.
    pub shared: Arc<Layer>,
}

/// What changed of a kind.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// What there is now of it.
    pub resources: Vec<Arc<Resource>>,
    /// What there is no more; absent if that is not known any more.
    pub gone: Option<Vec<Arc<str>>>,
}

impl Snapshot {
    /// The last change of anything in it.
    pub fn generation(&self) -> u64 {
        self.own.generation.max(self.shared.generation)
    }

    /// The resource of a kind and name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.entry(kind, name).map(|entry| &entry.resource)
    }

    /// The resource of a name, or the virtual host that a request goes to by `ROUTE CONFIGURATION/AUTHORITY`: the one of that
    /// domain, else the one of the longest `*.suffix` of it.
    pub fn find(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        let by_alias = || self.shared.shelf(kind).by_alias(kind, name);
        self.entry(kind, name).or_else(by_alias).map(|entry| &entry.resource)
    }

    /// Whether any name is found otherwise than in a generation.
    pub(crate) fn is_realiased(&self, kind: Kind, since: u64) -> bool {
        self.own.is_realiased(kind, since) || self.shared.is_realiased(kind, since)
    }

    /// The aliases that were added or removed after a generation; `None` if they are not all remembered.
    pub(crate) fn realiased(&self, kind: Kind, since: u64) -> Option<Realiased> {
        let [own, shared] = self.shelves(kind).map(|shelf| shelf.realiased.since(since));
        Some(own?.chain(shared?).collect())
    }

    /// All resources of a kind: those of the workload, then the shared ones, each sorted by name.
    pub fn iter(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> {
        self.shelves(kind).into_iter().flat_map(|shelf| shelf.by_name.values()).map(|entry| &entry.resource)
    }

    /// Takes out of what is to be sent the last resources if they are all that is shared, as most are who come anew: they
    /// are encoded once.
    pub(crate) fn together(&self, kind: Kind, form: Form, send: &mut Vec<Arc<Resource>>) -> Entries {
        let shelf = self.shared.shelf(kind);
        let Some(first) = send.len().checked_sub(shelf.by_name.len()) else { return Entries::default() };
        let shared = || shelf.by_name.values().map(|entry| &entry.resource);
        let same = send[first..].iter().zip(shared()).all(|(one, other)| Arc::ptr_eq(one, other));
        if shelf.by_name.len() < FEW || !same {
            return Entries::default();
        }
        send.truncate(first);
        let former = shelf.former[form as usize].as_ref();
        shelf.encoded[form as usize].get_or_init(|| Entries::encode(form, shared(), former)).clone()
    }

    /// Names as they are kept here, sorted and each once: clients ask for thousands, and all of them have the same. The second list has
    /// those that no resource has.
    pub(crate) fn intern(&self, kind: Kind, mut names: Vec<String>) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
        names.sort_unstable();
        names.dedup();
        let entries = self.entries(kind, &names);
        let mut unknown = Vec::new();
        let known = |(name, entry): (&String, Option<&Entry>)| {
            entry.map(|entry| Arc::clone(&entry.resource.name)).unwrap_or_else(|| {
                let name = Arc::from(name.as_str());
                unknown.push(Arc::clone(&name));
                name
            })
        };
        let names = names.iter().zip(entries).map(known).collect();
        (names, unknown)
    }

    /// How many resources of a kind there are.
    pub(crate) fn count(&self, kind: Kind) -> usize {
        self.shelves(kind).into_iter().map(|shelf| shelf.by_name.len()).sum()
    }

    /// These names as others have them too, if they are all that are shared.
    pub(crate) fn share_names(&self, kind: Kind, names: &Arc<[Arc<str>]>) -> Arc<[Arc<str>]> {
        let shelf = self.shared.shelf(kind);
        let known = || shelf.by_name.keys();
        if names.len() != shelf.by_name.len() || !names.iter().zip(known()).all(|(one, other)| one == other) {
            return Arc::clone(names);
        }
        Arc::clone(shelf.names.get_or_init(|| known().cloned().collect()))
    }

    /// What there is of each of some sorted names, and whether it changed after a generation.
    pub(crate) fn each<'a>(
        &'a self,
        kind: Kind,
        names: &'a [Arc<str>],
        since: u64,
    ) -> impl Iterator<Item = (&'a Arc<str>, Option<&'a Arc<Resource>>, bool)> {
        let found = self.entries(kind, names);
        names.iter().zip(found).map(move |(name, entry)| {
            (name, entry.map(|entry| &entry.resource), entry.is_some_and(|entry| entry.changed > since))
        })
    }

    /// Looks few names up one by one, and goes along with many.
    fn entries<N: AsRef<str>>(&self, kind: Kind, names: &[N]) -> Vec<Option<&Entry>> {
        let shelves = self.shelves(kind);
        let all: usize = shelves.iter().map(|shelf| shelf.by_name.len()).sum();
        if names.len() < all / 8 {
            return names.iter().map(|name| self.entry(kind, name.as_ref())).collect();
        }
        let mut found = vec![None; names.len()];
        for shelf in shelves {
            let mut entries = shelf.by_name.iter().peekable();
            for (name, found) in names.iter().zip(&mut found) {
                let name = name.as_ref();
                while entries.next_if(|(known, _)| &***known < name).is_some() {}
                if let Some((_, entry)) = entries.next_if(|(known, _)| &***known == name) {
                    found.get_or_insert(entry);
                }
            }
        }
        found
    }

    /// Whether there was none of this name in a generation.
    pub(crate) fn is_new(&self, kind: Kind, name: &str, since: u64) -> bool {
        self.entry(kind, name).is_some_and(|entry| entry.added > since)
    }

    /// Whether anything changed after a generation.
    pub(crate) fn is_changed(&self, kind: Kind, since: u64) -> bool {
        self.shelves(kind).into_iter().any(|shelf| shelf.last_change() > since)
    }

    /// What changed after a generation.
    pub fn changes(&self, kind: Kind, since: u64) -> Changes {
        let mut changes = Changes { gone: Some(Vec::new()), ..Changes::default() };
        for shelf in self.shelves(kind) {
            if since < shelf.forgotten {
                let changed = shelf.by_name.values().filter(|entry| entry.changed > since);
                changes.resources.extend(changed.map(|entry| Arc::clone(&entry.resource)));
                changes.gone = None;
                continue;
            }
            let first = shelf.changes.partition_point(|(generation, _)| *generation <= since);
            let mut names: Vec<_> = shelf.changes.range(first..).map(|(_, name)| name).collect();
            names.sort_unstable();
            names.dedup();
            for name in names {
                match (self.get(kind, name), &mut changes.gone) {
                    (Some(resource), _) => changes.resources.push(Arc::clone(resource)),
                    (None, Some(gone)) => gone.push(Arc::clone(name)),
                    (None, None) => {}
                }
            }
        }
        changes
    }

    fn shelves(&self, kind: Kind) -> [&Shelf; 2] {
        [self.own.shelf(kind), self.shared.shelf(kind)]
    }

    fn entry(&self, kind: Kind, name: &str) -> Option<&Entry> {
        self.shelves(kind).into_iter().find_map(|shelf| shelf.by_name.get(name))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn resource(name: &str, body: &'static [u8]) -> Arc<Resource> {
        Resource::from_body(Kind::Cluster, name, Bytes::from_static(body))
    }

    fn snapshot(own: &Layer, shared: &Layer) -> Snapshot {
        Snapshot { own: Arc::new(own.clone()), shared: Arc::new(shared.clone()) }
    }

    fn names(changes: &Changes) -> (Vec<&str>, Option<Vec<&str>>) {
        let sent = changes.resources.iter().map(|resource| &*resource.name).collect();
        (sent, changes.gone.as_ref().map(|gone| gone.iter().map(|name| &**name).collect()))
    }

    #[test]
    fn changes_are_known_by_their_generation() {
        let (mut own, mut shared) = (Layer::default(), Layer::default());
        assert!(shared.set(1, resource("a", b"1")) && shared.set(1, resource("b", b"1")));
        assert!(own.set(2, resource("inbound", b"1")));
        assert!(!shared.set(3, resource("a", b"1")), "it is equal");
        assert!(shared.set(4, resource("b", b"2")) && shared.remove(5, Kind::Cluster, "a"));
        assert!(!shared.remove(6, Kind::Cluster, "a") && !shared.remove(6, Kind::Cluster, "none"));
        let now = snapshot(&own, &shared);
        assert_eq!(now.generation(), 5);
        assert_eq!(names(&now.changes(Kind::Cluster, 0)), (vec!["inbound", "b"], Some(vec!["a"])));
        assert_eq!(names(&now.changes(Kind::Cluster, 2)), (vec!["b"], Some(vec!["a"])));
        assert_eq!(names(&now.changes(Kind::Cluster, 4)), (vec![], Some(vec!["a"])));
        assert_eq!(names(&now.changes(Kind::Cluster, 5)), (vec![], Some(vec![])));
        assert!(now.is_new(Kind::Cluster, "inbound", 1) && !now.is_new(Kind::Cluster, "b", 1));
    }

    #[test]
    fn what_is_replaced_counts_only_where_it_differs() {
        let mut layer = Layer::default();
        let set = |all: &[(&str, &'static [u8])]| {
            let mut set = Resources::default();
            all.iter().for_each(|(name, body)| set.insert(resource(name, body)));
            set
        };
        assert!(layer.replace(1, &set(&[("a", b"1"), ("b", b"1")])));
        assert!(!layer.replace(2, &set(&[("a", b"1"), ("b", b"1")])));
        assert!(layer.replace(3, &set(&[("b", b"2"), ("c", b"1")])));
        let now = snapshot(&Layer::default(), &layer);
        assert_eq!(names(&now.changes(Kind::Cluster, 1)), (vec!["b", "c"], Some(vec!["a"])));
    }

    fn change(
        layer: &mut Layer,
        generation: u64,
        all: &[(&str, Option<&'static [u8]>)],
        like: Option<(&Layer, &Layer)>,
    ) {
        let mut edits = Edits::default();
        for (name, body) in all {
            match body {
                Some(body) => edits.set(resource(name, body)),
                None => edits.remove(Kind::Cluster, (*name).into()),
            }
        }
        layer.edit(generation, edits, like);
    }

    #[test]
    fn layers_that_become_the_same_are_held_once() {
        let is_one = |one: &Layer, other: &Layer| {
            let index = Kind::Cluster as usize;
            Arc::ptr_eq(&one.shelves[index], &other.shelves[index])
        };
        let (mut first, mut second) = (Layer::default(), Layer::default());
        for layer in [&mut first, &mut second] {
            layer.set(1, resource("a", b"1"));
            layer.set(1, resource("b", b"1"));
        }
        assert!(!is_one(&first, &second));
        second.share(&first);
        assert!(is_one(&first, &second));
        // What another went through is not told to who never had any of it.
        let (mut emptied, mut empty) = (Layer::default(), Layer::default());
        emptied.set(1, resource("gone", b"1"));
        emptied.remove(2, Kind::Cluster, "gone");
        empty.share(&emptied);
        let now = snapshot(&Layer::default(), &empty);
        assert!(is_one(&emptied, &empty) && !now.is_changed(Kind::Cluster, now.generation()));

        // An equal change keeps them one, whatever else is said of what stays as it is.
        let before = first.clone();
        change(&mut first, 2, &[("a", Some(b"2")), ("c", Some(b"1"))], None);
        change(
            &mut second,
            2,
            &[("a", Some(b"2")), ("b", Some(b"1")), ("c", Some(b"1")), ("d", None)],
            Some((&before, &first)),
        );
        assert!(is_one(&first, &second));
        assert_eq!(snapshot(&Layer::default(), &second).generation(), 2);

        // Less, more and other changes part them.
        for other in [
            &[("a", Some(&b"3"[..]))][..],
            &[("a", Some(b"3")), ("b", None), ("c", None)],
            &[("a", Some(b"3")), ("b", Some(b"3"))],
        ] {
            let (before, mut first, mut second) = (first.clone(), first.clone(), second.clone());
            change(&mut first, 3, &[("a", Some(b"3")), ("b", None)], None);
            change(&mut second, 3, other, Some((&before, &first)));
            assert!(!is_one(&first, &second), "{other:?}");
            for (name, body) in other {
                let now = second.get(Kind::Cluster, name).map(|resource| &*resource.body);
                assert_eq!(now, *body, "{name}");
            }
        }
    }

    #[test]
    fn what_is_encoded_lives_on_where_it_did_not_change() {
        let mut layer = Layer::default();
        let mut row = |generation: u64, changed: std::ops::Range<usize>| {
            for number in changed {
                let body = format!("{number}, {generation}").into();
                layer.set(generation, Resource::from_body(Kind::Cluster, &number.to_string(), body));
            }
            let now = snapshot(&Layer::default(), &layer);
            now.together(Kind::Cluster, Form::Delta, &mut now.iter(Kind::Cluster).cloned().collect())
        };
        let rows = [row(1, 0..10_000), row(2, 100..102), row(3, 5_000..5_002)];
        for [former, row] in rows.array_windows() {
            assert_eq!(row.count, 10_000);
            assert!((1..100_000).contains(&row.own_bytes(former)), "{}", row.own_bytes(former));
            assert!(row.own_bytes(&Entries::default()) > 8 * row.own_bytes(former));
        }
    }

    #[test]
    fn who_is_far_behind_is_given_what_changed_but_not_what_is_gone() {
        let mut layer = Layer::default();
        layer.set(1, resource("old", b"1"));
        layer.set(1, resource("gone", b"1"));
        layer.remove(2, Kind::Cluster, "gone");
        for generation in 3..REMEMBERED as u64 + 10 {
            layer.set(generation, resource("a", if generation % 2 == 0 { b"1" } else { b"2" }));
        }
        let now = snapshot(&Layer::default(), &layer);
        assert_eq!(names(&now.changes(Kind::Cluster, 1)), (vec!["a"], None));
        assert_eq!(names(&now.changes(Kind::Cluster, 100)), (vec!["a"], Some(vec![])));
    }
}
