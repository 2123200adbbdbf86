//! Current resources and their changes.
//!
//! One sequence of generations numbers the changes of all layers. One number therefore describes what a client has
//! received: resources that changed in a later generation are due. A client's state has no entry for each resource.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, OnceLock},
};

pub use self::snapshot::{Changes, Snapshot};
use crate::{
    aliases::{AliasIndex, AliasLog, key},
    kind::Kind,
    resource::{Resource, Resources},
    wire::EncodedSequence,
};

mod overlay;
mod snapshot;

/// Maximum number of changes of a type that are remembered by name. For a client that is further behind, all resources
/// are searched.
const REMEMBERED: usize = 2_048;
/// Minimum number of resources of a type for which the layer also keeps their encoded sequence.
const MIN_ENCODED: usize = 16;
/// Maximum number of names in an edit that is kept ([`ListEdit`]).
const MAX_EDITED: usize = 64;

/// Resources that many clients share. A clone shares everything.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    kinds: [Arc<KindLayer>; Kind::ALL.len()],
    /// Generation of the last change.
    generation: u64,
}

/// Changes that are made together. A later change of a name replaces an earlier one.
#[derive(Clone, Debug, Default)]
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
    /// Encoded sequence of all resources, for each form of the protocol.
    encoded: [OnceLock<EncodedSequence>; 2],
    /// Encoded sequence before the last change, whose unchanged parts are used again.
    former: [Option<EncodedSequence>; 2],
    /// All names.
    names: OnceLock<Arc<[Arc<str>]>>,
    /// An edit of a client's list of names that gave the list of all names.
    list_edit: OnceLock<ListEdit>,
    /// Built at the first lookup.
    aliases: OnceLock<AliasIndex>,
    /// The latest changes of aliases.
    changed_aliases: AliasLog,
    /// Names for which this layer is used instead of the layer below: it adds, replaces or hides them. With the first
    /// such generation; see [`overlay`].
    hides: BTreeMap<Arc<str>, u64>,
}

/// Addition or removal of sorted names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NameEdit<'a> {
    Add(&'a [Arc<str>]),
    Remove(&'a [Arc<str>]),
}

/// Edit of a list of names, and its result.
#[derive(Clone, Debug)]
struct ListEdit {
    before: Arc<[Arc<str>]>,
    removes: bool,
    names: Box<[Arc<str>]>,
    after: Arc<[Arc<str>]>,
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
        let changed_aliases = changed_aliases(before.map(|entry| &*entry.resource), Some(&resource));
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
                of_kind.note_aliases(generation, changed_aliases(Some(&entry.resource), None));
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
            let removed: Vec<_> = names.filter(|name| resources.get(kind, name).is_none()).cloned().collect();
            for name in removed {
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

    /// Returns the stored name of a resource and the generation in which it last changed.
    pub fn generation_of(&self, kind: Kind, name: &str) -> Option<(&Arc<str>, u64)> {
        let (name, entry) = self.of_kind(kind).by_name.get_key_value(name)?;
        Some((name, entry.changed))
    }

    /// Returns the names of a type with the generation in which each last changed, sorted by name.
    pub fn generations(&self, kind: Kind) -> impl ExactSizeIterator<Item = (&Arc<str>, u64)> {
        self.of_kind(kind).by_name.iter().map(|(name, entry)| (name, entry.changed))
    }

    /// Returns whether a name of the layer below is replaced or hidden.
    pub fn hides(&self, kind: Kind, name: &str) -> bool {
        let hides = &self.of_kind(kind).hides;
        !hides.is_empty() && hides.contains_key(name)
    }

    /// Applies edits. Returns false if nothing changed. `like` is another layer before and after its edits. Resource
    /// types with the same result share the memory of that layer, so they are stored and encoded once.
    pub fn edit(&mut self, generation: u64, edits: Edits, like: Option<(&Self, &Self)>) -> bool {
        let mut changed = false;
        for (kind, edits) in Kind::ALL.into_iter().zip(edits.0) {
            if let Some((before, after)) = like
                && Arc::ptr_eq(&self.kinds[kind as usize], &before.kinds[kind as usize])
                && after.of_kind(kind).results_from(before.of_kind(kind), &edits, generation)
            {
                self.kinds[kind as usize] = Arc::clone(&after.kinds[kind as usize]);
                self.generation = self.generation.max(self.of_kind(kind).last_change());
                changed |= !edits.is_empty();
                continue;
            }
            for (name, edit) in edits {
                changed |= match edit {
                    Some(resource) => self.set(generation, resource),
                    None => self.remove(generation, kind, &name),
                };
            }
        }
        changed
    }

    /// Returns the names of a type that changed after a generation; `None` if some are forgotten.
    pub(crate) fn changed_names(&self, kind: Kind, since: u64) -> Option<impl Iterator<Item = &str>> {
        let of_kind = self.of_kind(kind);
        let names = of_kind.changed_since(since).map(|name| &**name);
        (since >= of_kind.forgotten).then_some(names)
    }

    /// Returns true if aliases changed after a generation.
    pub(crate) fn has_changed_aliases(&self, kind: Kind, since: u64) -> bool {
        self.of_kind(kind).changed_aliases.last() > since
    }

    /// Shares equal content with another layer, so that it is stored once. Must be called before the first client
    /// receives resources of this layer.
    pub fn share(&mut self, other: &Self) {
        for (of_kind, other) in self.kinds.iter_mut().zip(&other.kinds) {
            let mut entries = of_kind.by_name.values().zip(other.by_name.values());
            if of_kind.by_name.len() == other.by_name.len()
                && entries.all(|(one, other)| one.resource == other.resource)
            {
                *of_kind = Arc::clone(other);
                // Earlier changes of the other layer are not due to new clients of this layer, even if this layer is
                // empty.
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

impl NameEdit<'_> {
    fn parts(&self) -> (bool, &[Arc<str>]) {
        match self {
            Self::Add(names) => (false, names),
            Self::Remove(names) => (true, names),
        }
    }
}

impl ListEdit {
    /// Returns an edit that is kept: one that follows a change of the mesh. The edits of new clients, and of clients that
    /// list many other names, concern no other client, and their names would outlive their streams.
    fn new(before: &Arc<[Arc<str>]>, edit: NameEdit<'_>, after: &Arc<[Arc<str>]>) -> Option<Self> {
        let (removes, names) = edit.parts();
        let is_kept = names.len() <= MAX_EDITED && before.len().abs_diff(after.len()) <= names.len();
        let (before, after) = (Arc::clone(before), Arc::clone(after));
        is_kept.then(|| Self { before, removes, names: names.into(), after })
    }

    /// Returns the result if this is the edit of that list.
    fn result(&self, before: &Arc<[Arc<str>]>, edit: NameEdit<'_>) -> Option<&Arc<[Arc<str>]>> {
        let is_same = Arc::ptr_eq(&self.before, before) && edit.parts() == (self.removes, &self.names);
        is_same.then_some(&self.after)
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

    /// Reuses the encoded parts of another layer. Only the differences are encoded and stored.
    fn share_encoded(&mut self, other: &Self) {
        let of_other = other.encoded.iter().zip(&other.former);
        for ((encoded, former), (now, before)) in self.encoded.iter().zip(&mut self.former).zip(of_other) {
            if encoded.get().is_none() && former.is_none() {
                *former = now.get().or(before.as_ref()).cloned();
            }
        }
    }

    /// Returns the remembered names that changed after a generation.
    fn changed_since(&self, since: u64) -> impl Iterator<Item = &Arc<str>> {
        self.logged_since(since).map(|(_, name)| name)
    }

    fn logged_since(&self, since: u64) -> impl Iterator<Item = &(u64, Arc<str>)> {
        let first = self.changes.partition_point(|(generation, _)| *generation <= since);
        self.changes.range(first..)
    }

    fn last_change(&self) -> u64 {
        self.changes.back().map_or(self.forgotten, |(generation, _)| *generation)
    }

    fn note(&mut self, generation: u64, name: Arc<str>) {
        for (encoded, former) in self.encoded.iter_mut().zip(&mut self.former) {
            *former = encoded.take().or(former.take());
        }
        self.forget_list();
        self.changes.push_back((generation, name));
        if self.changes.len() > REMEMBERED
            && let Some((generation, _)) = self.changes.pop_front()
        {
            self.forgotten = generation;
        }
    }

    /// Forgets the list of all names. It must be called after a name was added or removed, also in the layer below.
    fn forget_list(&mut self) {
        (self.names, self.list_edit) = Default::default();
    }

    /// Records aliases that were added or removed.
    fn note_aliases(&mut self, generation: u64, keys: impl IntoIterator<Item = u64>) {
        self.aliases = OnceLock::new();
        self.changed_aliases.note(generation, keys);
    }

    /// Returns the aliases of all resources.
    fn alias_index(&self) -> &AliasIndex {
        self.aliases.get_or_init(|| {
            let each = self.by_name.iter();
            let all = each.flat_map(|(name, entry)| {
                entry.resource.aliases.iter().map(|alias| (*alias, Arc::clone(name)))
            });
            all.collect()
        })
    }
}

/// Returns the keys of the aliases that only one of two resources of a name has. Includes the name itself if the
/// resource was removed: another virtual host may match it.
fn changed_aliases(before: Option<&Resource>, now: Option<&Resource>) -> Vec<u64> {
    let of =
        |resource: Option<&Resource>| resource.map(|resource| resource.aliases.clone()).unwrap_or_default();
    let less = |of: &[u64], others: &[u64]| -> Vec<u64> {
        of.iter().filter(|alias| others.binary_search(alias).is_err()).copied().collect()
    };
    let (old, new) = (of(before), of(now));
    let removed = before.filter(|before| now.is_none() && before.kind == Kind::VirtualHost);
    [less(&old, &new), less(&new, &old), removed.iter().map(|removed| key(&removed.name)).collect()].concat()
}

#[cfg(test)]
mod tests;
