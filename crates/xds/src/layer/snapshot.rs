//! The resources of one client: its layers, read as one.

use std::{collections::BTreeMap, sync::Arc};

use super::{Entry, KindLayer, Layer, ListEdit, MIN_ENCODED, NameEdit};
use crate::{
    aliases::{AliasIndex, ChangedAliases},
    kind::Kind,
    resource::Resource,
    wire::{EncodedSequence, Form},
};

/// All resources of one client: those for clients like it alone, and those shared with more clients. `own` has no name
/// of the other layers. `local` may replace or hide resources of `shared` ([`Layer::edit_over`]).
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Resources that depend on the workload.
    pub own: Arc<Layer>,
    /// Differences of the client's namespace, or of its node, from `shared`.
    pub local: Arc<Layer>,
    /// Resources that clients of other namespaces have in common.
    pub shared: Arc<Layer>,
}

/// Changes of a type.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Resources that were added or changed.
    pub resources: Vec<Arc<Resource>>,
    /// Names that were removed; `None` if some are forgotten.
    pub removed: Option<Vec<Arc<str>>>,
}

impl Snapshot {
    /// Returns the generation of the last change.
    pub fn generation(&self) -> u64 {
        self.own.generation.max(self.local.generation).max(self.shared.generation)
    }

    /// Returns the resource of a type and name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.entry(kind, name).map(|entry| &entry.resource)
    }

    /// Returns the resource of a name. For `ROUTE CONFIGURATION/AUTHORITY` it is the virtual host with that domain,
    /// else the one with the longest matching `*.suffix`.
    pub fn find(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        let by_alias = || {
            let (local, shared) = (self.local.of_kind(kind), self.shared.of_kind(kind));
            let indexes = [local.alias_index(), shared.alias_index()];
            let host = AliasIndex::find(indexes, kind, name, |name| !local.hides.contains_key(name))?;
            local.by_name.get(host).or_else(|| shared.by_name.get(host))
        };
        self.entry(kind, name).or_else(by_alias).map(|entry| &entry.resource)
    }

    /// Returns true if aliases changed after a generation.
    pub(crate) fn has_changed_aliases(&self, kind: Kind, since: u64) -> bool {
        self.layers().iter().any(|layer| layer.has_changed_aliases(kind, since))
    }

    /// Returns the aliases that were added or removed after a generation; `None` if some are forgotten.
    pub(crate) fn changed_aliases(&self, kind: Kind, since: u64) -> Option<ChangedAliases> {
        let [own, local, shared] =
            self.layers().map(|layer| layer.of_kind(kind).changed_aliases.since(since));
        Some(own?.chain(local?).chain(shared?).collect())
    }

    /// Returns all resources of a type: those of the workload, of the namespace, and the shared ones, each sorted by
    /// name.
    pub fn iter(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> {
        self.entries_of(kind).map(|entry| &entry.resource)
    }

    /// Removes the shared resources from the end of `send` and returns them in encoded form, if all of them are in
    /// it. That is so for most new clients, so they are encoded once. Encoded parts with a hidden resource are left
    /// out, and their other resources stay in `send`.
    pub(crate) fn take_shared(
        &self,
        kind: Kind,
        form: Form,
        send: &mut Vec<Arc<Resource>>,
    ) -> EncodedSequence {
        let of_kind = self.shared.of_kind(kind);
        let hides = &self.local.of_kind(kind).hides;
        // Most responses carry a few changes. Hidden resources are not counted for them.
        let min = of_kind.by_name.len().saturating_sub(hides.len());
        if of_kind.by_name.len() < MIN_ENCODED || send.len() < min {
            return EncodedSequence::default();
        }
        let count = of_kind.by_name.len() - self.hidden(kind);
        let Some(first) = send.len().checked_sub(count) else { return EncodedSequence::default() };
        let visible = || visible(of_kind, hides).map(|entry| &entry.resource);
        let mut sent = send.get(first..).unwrap_or_default().iter();
        if !visible().all(|shared| sent.next().is_some_and(|sent| Arc::ptr_eq(shared, sent))) {
            return EncodedSequence::default();
        }
        send.truncate(first);
        let former = of_kind.former[form as usize].as_ref();
        let all = || of_kind.by_name.values().map(|entry| &entry.resource);
        let encoded =
            of_kind.encoded[form as usize].get_or_init(|| EncodedSequence::encode(form, all(), former));
        if hides.is_empty() {
            return encoded.clone();
        }
        let (parts, rest) = encoded.without(hides);
        send.extend(rest);
        parts
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
    pub fn count(&self, kind: Kind) -> usize {
        let all: usize = self.layers().iter().map(|layer| layer.of_kind(kind).by_name.len()).sum();
        all - self.hidden(kind)
    }

    /// Returns the number of shared resources that are hidden.
    fn hidden(&self, kind: Kind) -> usize {
        let shared = &self.shared.of_kind(kind).by_name;
        self.local.of_kind(kind).hides.keys().filter(|name| shared.contains_key(*name)).count()
    }

    /// Returns the shared list of all names, if these names are equal to it; otherwise the same list.
    pub(crate) fn share_names(&self, kind: Kind, names: &Arc<[Arc<str>]>) -> Arc<[Arc<str>]> {
        Arc::clone(self.list_of_all(kind, names).map_or(names, |(_, all)| all))
    }

    /// Returns the shared list of all names and the layer that has it, if these names are equal to it.
    fn list_of_all(&self, kind: Kind, names: &Arc<[Arc<str>]>) -> Option<(&KindLayer, &Arc<[Arc<str>]>)> {
        let (local, shared) = (self.local.of_kind(kind), self.shared.of_kind(kind));
        // A shorter list lacks a name of the namespace. Most lists do, so the layers are not compared for them.
        if names.len() < local.by_name.len() || names.len() + local.hides.len() < shared.by_name.len() {
            return None;
        }
        let is_replaced = local.hides.len() == local.by_name.len()
            && local.by_name.keys().all(|name| shared.by_name.contains_key(name));
        // The names of a namespace that hides or adds resources are a list of their own.
        let of_kind = if is_replaced { shared } else { local };
        let all = of_kind.names.get_or_init(|| {
            let visible = shared.by_name.keys().filter(|name| !local.hides.contains_key(*name));
            let mut all: Vec<_> = visible.chain(local.by_name.keys()).cloned().collect();
            all.sort_unstable();
            all.into()
        });
        (all == names).then_some((of_kind, all))
    }

    /// Returns the result of an edit of a list of names, which `apply` makes, as [`Snapshot::share_names`] returns it.
    /// After a change of the mesh, thousands of clients edit the same list in the same way, and only the first edit is
    /// made.
    pub(crate) fn edit_names(
        &self,
        kind: Kind,
        before: &Arc<[Arc<str>]>,
        edit: NameEdit<'_>,
        apply: impl FnOnce() -> Arc<[Arc<str>]>,
    ) -> Arc<[Arc<str>]> {
        let layers = [&self.local, &self.shared].map(|layer| layer.of_kind(kind).list_edit.get());
        if let Some(after) = layers.into_iter().flatten().find_map(|known| known.result(before, edit)) {
            return Arc::clone(after);
        }
        let after = apply();
        if Arc::ptr_eq(&after, before) {
            return after;
        }
        let Some((of_kind, all)) = self.list_of_all(kind, &after) else { return after };
        if let Some(edit) = ListEdit::new(before, edit, all) {
            _ = of_kind.list_edit.set(edit);
        }
        Arc::clone(all)
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
        let layers = self.layers().map(|layer| layer.of_kind(kind));
        let all: usize = layers.iter().map(|of_kind| of_kind.by_name.len()).sum();
        if names.len() < all / 8 {
            return names.iter().map(|name| self.entry(kind, name.as_ref())).collect();
        }
        let mut found = vec![None; names.len()];
        for of_kind in layers {
            if of_kind.by_name.is_empty() {
                continue;
            }
            let mut entries = of_kind.by_name.iter().peekable();
            for (name, found) in names.iter().zip(&mut found) {
                let name = name.as_ref();
                while entries.next_if(|(known, _)| &***known < name).is_some() {}
                if let Some((_, entry)) = entries.next_if(|(known, _)| &***known == name) {
                    found.get_or_insert(entry);
                }
            }
        }
        let hides = &self.local.of_kind(kind).hides;
        if !hides.is_empty() {
            for (name, found) in names.iter().zip(&mut found) {
                if found.is_some() && hides.contains_key(name.as_ref()) {
                    *found = self.entry(kind, name.as_ref());
                }
            }
        }
        found
    }

    /// Returns true if a resource of this name was added after a generation.
    pub(crate) fn is_new(&self, kind: Kind, name: &str, since: u64) -> bool {
        self.entry(kind, name).is_some_and(|entry| entry.added > since)
    }

    /// Returns the generation in which a resource last changed; `None` if there is no such resource.
    pub fn generation_of(&self, kind: Kind, name: &str) -> Option<u64> {
        self.entry(kind, name).map(|entry| entry.changed)
    }

    /// Returns the generation of the last change of a type.
    pub fn last_change(&self, kind: Kind) -> u64 {
        self.layers().map(|layer| layer.of_kind(kind).last_change()).into_iter().max().unwrap_or_default()
    }

    /// Returns true if anything changed after a generation.
    pub(crate) fn is_changed(&self, kind: Kind, since: u64) -> bool {
        self.last_change(kind) > since
    }

    /// Returns the changes after a generation: those of the workload, then the others, each sorted by name.
    pub fn changes(&self, kind: Kind, since: u64) -> Changes {
        let mut changes = Changes { removed: Some(Vec::new()), ..Changes::default() };
        let [own, local, shared] = self.layers().map(|layer| layer.of_kind(kind));
        for layers in [&[own][..], &[local, shared]] {
            if layers.iter().any(|of_kind| since < of_kind.forgotten) {
                let is_own = |name: &str| own.by_name.contains_key(name);
                let of_these = self.entries_of(kind).filter(|entry| {
                    entry.changed > since && is_own(&entry.resource.name) == (layers.len() == 1)
                });
                changes.resources.extend(of_these.map(|entry| Arc::clone(&entry.resource)));
                changes.removed = None;
                continue;
            }
            let mut names: Vec<&Arc<str>> = match layers {
                // The layer above has recorded when it hid a name.
                [local, shared] if !local.hides.is_empty() => {
                    let below = shared.logged_since(since);
                    let below = below.filter(|(of, name)| !local.hides_change(name, *of));
                    below.map(|(_, name)| name).chain(local.changed_since(since)).collect()
                }
                _ => layers.iter().flat_map(|of_kind| of_kind.changed_since(since)).collect(),
            };
            names.sort_unstable();
            names.dedup();
            for name in names {
                match (self.get(kind, name), &mut changes.removed) {
                    (Some(resource), _) => changes.resources.push(Arc::clone(resource)),
                    (None, Some(removed)) => removed.push(Arc::clone(name)),
                    (None, None) => {}
                }
            }
        }
        changes
    }

    fn layers(&self) -> [&Layer; 3] {
        [&self.own, &self.local, &self.shared]
    }

    fn entry(&self, kind: Kind, name: &str) -> Option<&Entry> {
        let [own, local, shared] = self.layers().map(|layer| layer.of_kind(kind));
        let above = own.by_name.get(name).or_else(|| local.by_name.get(name));
        above.or_else(|| shared.by_name.get(name).filter(|_| !local.hides.contains_key(name)))
    }

    fn entries_of(&self, kind: Kind) -> impl Iterator<Item = &Entry> {
        let [own, local, shared] = self.layers().map(|layer| layer.of_kind(kind));
        own.by_name.values().chain(local.by_name.values()).chain(visible(shared, &local.hides))
    }
}

/// Returns the entries of a layer that the layer above does not hide.
fn visible<'a>(
    of_kind: &'a KindLayer,
    hides: &'a BTreeMap<Arc<str>, u64>,
) -> impl Iterator<Item = &'a Entry> {
    let entries = of_kind.by_name.iter();
    entries.filter(|(name, _)| hides.is_empty() || !hides.contains_key(*name)).map(|(_, entry)| entry)
}
