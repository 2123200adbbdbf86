//! Layers over another one: a layer with the resources that a namespace does not have in common with the others.
//!
//! The layer above lists the names that it replaces or hides in the layer below. All other resources are stored once,
//! in the layer below. The resources that are due to a client depend only on the effective resource of each name.
//! [`Layer::edit_over`] keeps the generations of a resource that moves between the layers, so that it is neither sent
//! again nor missed.

use std::{collections::BTreeSet, sync::Arc};

use super::{AliasLog, Edits, Entry, KindLayer, Layer, changed_aliases};
use crate::{kind::Kind, resource::Resource};

impl Layer {
    /// Changes this layer. `before` and `after` are the layer below, before and after its changes. A name without an
    /// edit gets the resource of the layer below if that has changed, and keeps its own otherwise. An edit that is
    /// equal to the resource of the layer below is stored only there.
    pub fn edit_over(&mut self, generation: u64, (before, after): (&Self, &Self), edits: Edits) {
        for (kind, edits) in Kind::ALL.into_iter().zip(edits.0) {
            let index = kind as usize;
            let below = (&*before.kinds[index], &*after.kinds[index]);
            let is_same = Arc::ptr_eq(&before.kinds[index], &after.kinds[index]);
            let changed = if is_same { BTreeSet::new() } else { changed_names(below) };
            let of_kind = &self.kinds[index];
            let dropped: Vec<Arc<str>> = changed
                .iter()
                .filter(|name| !edits.contains_key(*name) && of_kind.hides.contains_key(*name))
                .cloned()
                .collect();
            let dropped = dropped.into_iter().map(|name| {
                let resource = below.1.by_name.get(&name).map(|entry| Arc::clone(&entry.resource));
                (name, resource)
            });
            for (name, resource) in dropped.chain(edits) {
                let placed = Placed::new(&self.kinds[index], below, generation, &name, resource);
                // The layer below has recorded the same change.
                let is_noted_below =
                    placed.follows && !self.kinds[index].hides.contains_key(&name) && changed.contains(&name);
                let notes = placed.is_changed && !is_noted_below;
                if placed.follows && !self.kinds[index].hides.contains_key(&name) && !notes {
                    continue;
                }
                placed.put(Arc::make_mut(&mut self.kinds[index]), below.1, generation, name, notes);
                if notes {
                    self.generation = generation;
                }
            }
            let is_in = |of_kind: &KindLayer, name: &str| of_kind.by_name.contains_key(name);
            let mut names = changed.iter().map(|name| is_in(below.0, name) != is_in(below.1, name));
            if self.kinds[index].names.get().is_some() && names.any(|differs| differs) {
                Arc::make_mut(&mut self.kinds[index]).forget_list();
            }
        }
    }

    /// Returns the resources of this layer and the layer below as one layer. Generations stay as they are.
    pub fn flatten(&self, below: &Self) -> Self {
        let mut flat = below.clone();
        flat.generation = self.generation.max(below.generation);
        for (of_kind, above) in flat.kinds.iter_mut().zip(&self.kinds) {
            if !above.is_empty() {
                Arc::make_mut(of_kind).absorb(above);
            }
        }
        flat
    }
}

impl KindLayer {
    /// Returns whether clients of this layer do not see a change of the layer below.
    pub(super) fn hides_change(&self, name: &str, generation: u64) -> bool {
        self.hides.get(name).is_some_and(|since| generation >= *since)
    }

    fn is_empty(&self) -> bool {
        self.hides.is_empty() && self.last_change() == 0
    }

    /// Adds the content and the changes of the layer above.
    fn absorb(&mut self, above: &Self) {
        for name in above.hides.keys() {
            self.by_name.remove(name);
        }
        self.by_name.extend(above.by_name.iter().map(|(name, entry)| (Arc::clone(name), entry.clone())));
        let below = self.changes.iter().filter(|(of, name)| !above.hides_change(name, *of));
        let mut changes: Vec<_> = below.chain(&above.changes).cloned().collect();
        changes.sort_by_key(|(generation, _)| *generation);
        self.changes = changes.into();
        self.forgotten = self.forgotten.max(above.forgotten);
        self.changed_aliases = AliasLog::forget(&self.changed_aliases, &above.changed_aliases);
        self.aliases = Default::default();
        self.forget_list();
        for (encoded, former) in self.encoded.iter_mut().zip(&mut self.former) {
            *former = encoded.take().or(former.take());
        }
    }
}

/// The resource of a name before and after an edit, and the layer that stores it.
struct Placed {
    old: Option<Entry>,
    now: Option<Entry>,
    /// The layer below has the same resource and generation, or neither layer has a resource.
    follows: bool,
    /// The effective resource changes.
    is_changed: bool,
}

impl Placed {
    fn new(
        above: &KindLayer,
        (before, after): (&KindLayer, &KindLayer),
        generation: u64,
        name: &str,
        resource: Option<Arc<Resource>>,
    ) -> Self {
        let below = || before.by_name.get(name).filter(|_| !above.hides.contains_key(name));
        let old = above.by_name.get(name).or_else(below).cloned();
        let version = |entry: Option<&Entry>| entry.map(|entry| entry.resource.version);
        let is_changed = version(old.as_ref()) != resource.as_ref().map(|resource| resource.version);
        let now = resource.map(|resource| match &old {
            Some(old) if !is_changed => Entry { resource, ..old.clone() },
            Some(old) => Entry { resource, added: old.added, changed: generation },
            None => Entry { resource, added: generation, changed: generation },
        });
        let follows = match (&now, after.by_name.get(name)) {
            // If the name was hidden, the removal in the layer below changes nothing for the clients.
            (None, None) => is_changed || !above.hides.contains_key(name),
            (Some(now), Some(below)) => {
                now.resource.version == below.resource.version && now.changed == below.changed
            }
            _ => false,
        };
        Self { old, now, follows, is_changed }
    }

    fn put(self, above: &mut KindLayer, after: &KindLayer, generation: u64, name: Arc<str>, notes: bool) {
        let Self { old, now, follows, .. } = self;
        let changed = changed_aliases(
            old.as_ref().map(|entry| &*entry.resource),
            now.as_ref().map(|entry| &*entry.resource),
        );
        let below = after.by_name.get_key_value(&name);
        let name = below.map_or(name, |(name, _)| Arc::clone(name));
        above.aliases = Default::default();
        above.by_name.remove(&name);
        let hidden_since = above.hides.remove(&name).unwrap_or(generation);
        if !follows {
            // Also if the layer below has removed its resource: these clients must not see that removal.
            above.hides.insert(Arc::clone(&name), hidden_since);
            if let Some(mut now) = now {
                // Equal resources are stored once.
                if let Some((_, below)) = below.filter(|(_, below)| below.resource == now.resource) {
                    now.resource = Arc::clone(&below.resource);
                }
                above.by_name.insert(Arc::clone(&name), now);
            }
        }
        if notes {
            above.note(generation, name);
            if !changed.is_empty() {
                above.note_aliases(generation, changed);
            }
        } else {
            above.forget_list();
        }
    }
}

/// Returns the names of a type that differ between two states of a layer, or that changed in between.
fn changed_names((before, after): (&KindLayer, &KindLayer)) -> BTreeSet<Arc<str>> {
    let since = before.last_change();
    // Without a change before, the layer after may have changes of the first generation, which is 0.
    let is_logged = since > 0 || !before.changes.is_empty();
    if is_logged && since >= after.forgotten {
        return after.changed_since(since).cloned().collect();
    }
    let version = |of_kind: &KindLayer, name: &str| {
        of_kind.by_name.get(name).map(|entry| (entry.resource.version, entry.changed))
    };
    let all = before.by_name.keys().chain(after.by_name.keys());
    all.filter(|name| version(before, name) != version(after, name)).cloned().collect()
}
