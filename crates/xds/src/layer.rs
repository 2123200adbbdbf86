//! Current resources and their changes.
//!
//! All changes of all layers are counted by one sequence of generations. One number therefore tells what a client was
//! sent: what changed in a later generation is due. Nothing is stored per client and resource.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, OnceLock},
};

use crate::{
    aliases::{AliasIndex, AliasLog, ChangedAliases, key},
    kind::Kind,
    resource::{Resource, Resources},
    wire::{EncodedSequence, Form},
};

/// Maximum number of changes of a type that are remembered by name. For a client that is further behind, all
/// resources are looked through.
const REMEMBERED: usize = 2_048;
/// Minimum number of resources of a type that are kept in encoded form as well.
const MIN_ENCODED: usize = 16;

/// Resources that many clients share. A clone shares everything.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    kinds: [Arc<KindLayer>; Kind::ALL.len()],
    /// Generation of the last change.
    generation: u64,
}

/// Changes that are made together; of each name, the last one counts.
#[derive(Debug, Default)]
pub struct Edits([BTreeMap<Arc<str>, Option<Arc<Resource>>>; Kind::ALL.len()]);

impl Edits {
    /// Adds or replaces a resource.
    pub fn set(&mut self, resource: Arc<Resource>) {
        self.0[resource.kind as usize].insert(Arc::clone(&resource.name), Some(resource));
    }

    /// Removes a resource.
    pub fn remove(&mut self, kind: Kind, name: Arc<str>) {
        self.0[kind as usize].insert(name, None);
    }

    /// Returns the edit of a name, if there is one: a resource, or `None` for a removal.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Option<Arc<Resource>>> {
        self.0[kind as usize].get(name)
    }

    /// Returns true if there are no edits.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(BTreeMap::is_empty)
    }
}

/// The resources of one type.
#[derive(Clone, Debug, Default)]
struct KindLayer {
    by_name: BTreeMap<Arc<str>, Entry>,
    /// Generations and the names that changed in them, the oldest first.
    changes: VecDeque<(u64, Arc<str>)>,
    /// Generation up to which changes are forgotten.
    forgotten: u64,
    /// All resources as encoded for each form, and the encoding before the last change.
    encoded: [OnceLock<EncodedSequence>; 2],
    former: [Option<EncodedSequence>; 2],
    /// All names.
    names: OnceLock<Arc<[Arc<str>]>>,
    /// Built at the first lookup.
    aliases: OnceLock<AliasIndex>,
    /// The latest changes of aliases.
    changed_aliases: AliasLog,
}

#[derive(Clone, Debug)]
struct Entry {
    resource: Arc<Resource>,
    /// Generations in which a resource of this name was added, and last changed.
    added: u64,
    changed: u64,
}

impl Layer {
    /// Adds a resource or replaces the one of its name. Returns false if that was equal.
    pub fn set(&mut self, generation: u64, resource: Arc<Resource>) -> bool {
        let of_kind = &mut self.kinds[resource.kind as usize];
        let before = of_kind.by_name.get(&resource.name);
        if before.is_some_and(|entry| entry.resource.version == resource.version) {
            return false;
        }
        let added = before.map_or(generation, |entry| entry.added);
        let aliases = before.map_or(&[][..], |entry| &entry.resource.aliases);
        let less = |of: &[u64], others: &[u64]| -> Vec<u64> {
            of.iter().filter(|alias| others.binary_search(alias).is_err()).copied().collect()
        };
        let changed_aliases = [less(aliases, &resource.aliases), less(&resource.aliases, aliases)].concat();
        let name =
            before.map_or_else(|| Arc::clone(&resource.name), |entry| Arc::clone(&entry.resource.name));
        let of_kind = Arc::make_mut(of_kind);
        of_kind.by_name.insert(Arc::clone(&name), Entry { resource, added, changed: generation });
        of_kind.note(generation, name);
        if !changed_aliases.is_empty() {
            of_kind.note_aliases(generation, changed_aliases);
        }
        self.generation = generation;
        true
    }

    /// Removes a resource. Returns false if there was none.
    pub fn remove(&mut self, generation: u64, kind: Kind, name: &str) -> bool {
        let of_kind = &mut self.kinds[kind as usize];
        if !of_kind.by_name.contains_key(name) {
            return false;
        }
        let of_kind = Arc::make_mut(of_kind);
        if let Some((name, entry)) = of_kind.by_name.remove_entry(name) {
            if kind == Kind::VirtualHost {
                // Another virtual host may match this name now.
                of_kind.note_aliases(generation, entry.resource.aliases.iter().copied().chain([key(&name)]));
            }
            of_kind.note(generation, name);
        }
        self.generation = generation;
        true
    }

    /// Replaces all resources. Returns false if nothing changed.
    pub fn replace(&mut self, generation: u64, resources: &Resources) -> bool {
        let mut changed = false;
        for kind in Kind::ALL {
            let names = self.kinds[kind as usize].by_name.keys();
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

    /// Returns the resource of a type and name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.of_kind(kind).by_name.get(name).map(|entry| &entry.resource)
    }

    /// Applies edits. `like` is another layer before and after its edits: types that are equal are shared with it, so
    /// that they are held and encoded once.
    pub fn edit(&mut self, generation: u64, edits: Edits, like: Option<(&Self, &Self)>) {
        for (kind, edits) in Kind::ALL.into_iter().zip(edits.0) {
            if let Some((before, after)) = like
                && Arc::ptr_eq(&self.kinds[kind as usize], &before.kinds[kind as usize])
                && after.of_kind(kind).results_from(before.of_kind(kind), &edits, generation)
            {
                self.kinds[kind as usize] = Arc::clone(&after.kinds[kind as usize]);
                self.generation = self.generation.max(self.of_kind(kind).last_change());
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

    /// Returns the names of a type that changed after a generation; `None` if some are forgotten.
    pub(crate) fn changed_names(&self, kind: Kind, since: u64) -> Option<impl Iterator<Item = &str>> {
        let of_kind = self.of_kind(kind);
        let first = of_kind.changes.partition_point(|(generation, _)| *generation <= since);
        let names = of_kind.changes.range(first..).map(|(_, name)| &**name);
        (since >= of_kind.forgotten).then_some(names)
    }

    /// Returns true if aliases changed after a generation.
    pub(crate) fn has_changed_aliases(&self, kind: Kind, since: u64) -> bool {
        self.of_kind(kind).changed_aliases.last() > since
    }

    /// Shares equal content with another layer, so that it is held once. Must be called before a client is sent
    /// anything of this layer.
    pub fn share(&mut self, other: &Self) {
        for (of_kind, other) in self.kinds.iter_mut().zip(&other.kinds) {
            let mut entries = of_kind.by_name.values().zip(other.by_name.values());
            if of_kind.by_name.len() == other.by_name.len()
                && entries.all(|(one, other)| one.resource == other.resource)
            {
                *of_kind = Arc::clone(other);
                // Changes that the other layer made before are not due to a client that begins here, also if this
                // layer is empty.
                self.generation = self.generation.max(of_kind.last_change());
                continue;
            }
            let of_kind = Arc::make_mut(of_kind);
            of_kind.share_encoded(other);
            for (name, entry) in &mut of_kind.by_name {
                if let Some(equal) = other.by_name.get(name).filter(|other| other.resource == entry.resource)
                {
                    entry.resource = Arc::clone(&equal.resource);
                }
            }
        }
    }

    fn of_kind(&self, kind: Kind) -> &KindLayer {
        &self.kinds[kind as usize]
    }
}

impl KindLayer {
    /// Returns true if these edits turn the other layer into this one.
    fn results_from(
        &self,
        before: &Self,
        edits: &BTreeMap<Arc<str>, Option<Arc<Resource>>>,
        generation: u64,
    ) -> bool {
        let version =
            |of_kind: &Self, name: &str| of_kind.by_name.get(name).map(|entry| entry.resource.version);
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

    /// Takes the encoded parts of another layer, so that only what differs is encoded and held again.
    fn share_encoded(&mut self, other: &Self) {
        let of_other = other.encoded.iter().zip(&other.former);
        for ((encoded, former), (now, before)) in self.encoded.iter().zip(&mut self.former).zip(of_other) {
            if encoded.get().is_none() && former.is_none() {
                *former = now.get().or(before.as_ref()).cloned();
            }
        }
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

    /// Records aliases that were added or removed.
    fn note_aliases(&mut self, generation: u64, keys: impl IntoIterator<Item = u64>) {
        self.aliases = OnceLock::new();
        self.changed_aliases.note(generation, keys);
    }

    /// Returns the resource that a name matches by an alias.
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

/// All resources of one client: those for clients like it alone, and those shared with more clients. A name is in one
/// of the layers only.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Resources that depend on the workload.
    pub own: Arc<Layer>,
    /// Resources that do not.
    pub shared: Arc<Layer>,
}

/// Changes of a type.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Resources that were added or changed.
    pub resources: Vec<Arc<Resource>>,
    /// Names that were removed; `None` if some are forgotten.
    pub gone: Option<Vec<Arc<str>>>,
}

impl Snapshot {
    /// Returns the generation of the last change.
    pub fn generation(&self) -> u64 {
        self.own.generation.max(self.shared.generation)
    }

    /// Returns the resource of a type and name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.entry(kind, name).map(|entry| &entry.resource)
    }

    /// Returns the resource of a name, or the virtual host that serves `ROUTE CONFIGURATION/AUTHORITY`: the one with
    /// that domain, else the one with the longest `*.suffix` of it.
    pub fn find(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        let by_alias = || self.shared.of_kind(kind).by_alias(kind, name);
        self.entry(kind, name).or_else(by_alias).map(|entry| &entry.resource)
    }

    /// Returns true if aliases changed after a generation.
    pub(crate) fn has_changed_aliases(&self, kind: Kind, since: u64) -> bool {
        self.own.has_changed_aliases(kind, since) || self.shared.has_changed_aliases(kind, since)
    }

    /// Returns the aliases that were added or removed after a generation; `None` if some are forgotten.
    pub(crate) fn changed_aliases(&self, kind: Kind, since: u64) -> Option<ChangedAliases> {
        let [own, shared] = self.kinds(kind).map(|of_kind| of_kind.changed_aliases.since(since));
        Some(own?.chain(shared?).collect())
    }

    /// Returns all resources of a type: those of the workload, then the shared ones, each sorted by name.
    pub fn iter(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> {
        self.kinds(kind).into_iter().flat_map(|of_kind| of_kind.by_name.values()).map(|entry| &entry.resource)
    }

    /// Removes the shared resources from the end of `send` and returns them in encoded form, if all of them are in
    /// it. That is so for most new clients, so they are encoded once.
    pub(crate) fn take_shared(
        &self,
        kind: Kind,
        form: Form,
        send: &mut Vec<Arc<Resource>>,
    ) -> EncodedSequence {
        let of_kind = self.shared.of_kind(kind);
        let Some(first) = send.len().checked_sub(of_kind.by_name.len()) else {
            return EncodedSequence::default();
        };
        let shared = || of_kind.by_name.values().map(|entry| &entry.resource);
        let same = send[first..].iter().zip(shared()).all(|(one, other)| Arc::ptr_eq(one, other));
        if of_kind.by_name.len() < MIN_ENCODED || !same {
            return EncodedSequence::default();
        }
        send.truncate(first);
        let former = of_kind.former[form as usize].as_ref();
        of_kind.encoded[form as usize].get_or_init(|| EncodedSequence::encode(form, shared(), former)).clone()
    }

    /// Returns names sorted, without duplicates, and as they are stored here: clients list thousands, and all list
    /// the same. The second list has the names that no resource has.
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

    /// Returns the number of resources of a type.
    pub(crate) fn count(&self, kind: Kind) -> usize {
        self.kinds(kind).into_iter().map(|of_kind| of_kind.by_name.len()).sum()
    }

    /// Returns the shared list of all names, if these names are equal to it; otherwise the same list.
    pub(crate) fn share_names(&self, kind: Kind, names: &Arc<[Arc<str>]>) -> Arc<[Arc<str>]> {
        let of_kind = self.shared.of_kind(kind);
        let known = || of_kind.by_name.keys();
        if names.len() != of_kind.by_name.len() || !names.iter().zip(known()).all(|(one, other)| one == other)
        {
            return Arc::clone(names);
        }
        Arc::clone(of_kind.names.get_or_init(|| known().cloned().collect()))
    }

    /// Returns the resource of each of some sorted names, and whether it changed after a generation.
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

    /// Returns the entries of sorted names: a lookup for each of few names, one pass over the resources for many.
    fn entries<N: AsRef<str>>(&self, kind: Kind, names: &[N]) -> Vec<Option<&Entry>> {
        let kinds = self.kinds(kind);
        let all: usize = kinds.iter().map(|of_kind| of_kind.by_name.len()).sum();
        if names.len() < all / 8 {
            return names.iter().map(|name| self.entry(kind, name.as_ref())).collect();
        }
        let mut found = vec![None; names.len()];
        for of_kind in kinds {
            let mut entries = of_kind.by_name.iter().peekable();
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

    /// Returns true if a resource of this name was added after a generation.
    pub(crate) fn is_new(&self, kind: Kind, name: &str, since: u64) -> bool {
        self.entry(kind, name).is_some_and(|entry| entry.added > since)
    }

    /// Returns true if anything changed after a generation.
    pub(crate) fn is_changed(&self, kind: Kind, since: u64) -> bool {
        self.kinds(kind).into_iter().any(|of_kind| of_kind.last_change() > since)
    }

    /// Returns the changes after a generation.
    pub fn changes(&self, kind: Kind, since: u64) -> Changes {
        let mut changes = Changes { gone: Some(Vec::new()), ..Changes::default() };
        for of_kind in self.kinds(kind) {
            if since < of_kind.forgotten {
                let changed = of_kind.by_name.values().filter(|entry| entry.changed > since);
                changes.resources.extend(changed.map(|entry| Arc::clone(&entry.resource)));
                changes.gone = None;
                continue;
            }
            let first = of_kind.changes.partition_point(|(generation, _)| *generation <= since);
            let mut names: Vec<_> = of_kind.changes.range(first..).map(|(_, name)| name).collect();
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

    fn kinds(&self, kind: Kind) -> [&KindLayer; 2] {
        [self.own.of_kind(kind), self.shared.of_kind(kind)]
    }

    fn entry(&self, kind: Kind, name: &str) -> Option<&Entry> {
        self.kinds(kind).into_iter().find_map(|of_kind| of_kind.by_name.get(name))
    }
}

#[cfg(test)]
mod tests;
