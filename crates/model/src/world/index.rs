//! Indexes over objects: by any key, and pods by label.

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
};

use crate::api::{Labels, Meta};

/// Objects (namespace, name) by a key that several may share.
#[derive(Clone, Debug)]
pub(super) struct MultiMap<K>(HashMap<K, BTreeSet<(String, String)>>);

impl<K> Default for MultiMap<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> MultiMap<K> {
    pub(super) fn insert(&mut self, key: K, meta: &Meta) {
        self.0.entry(key).or_default().insert((meta.namespace.clone(), meta.name.clone()));
    }

    pub(super) fn remove(&mut self, key: &K, meta: &Meta) {
        let Some(objects) = self.0.get_mut(key) else { return };
        objects.remove(&(meta.namespace.clone(), meta.name.clone()));
        if objects.is_empty() {
            self.0.remove(key);
        }
    }

    pub(super) fn get<Q>(&self, key: &Q) -> impl Iterator<Item = &(String, String)>
    where
        K: std::borrow::Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.0.get(key).into_iter().flatten()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }
}

/// Names of pods by namespace and label. A selector is answered from its rarest label.
#[derive(Clone, Debug, Default)]
pub(super) struct LabelIndex(HashMap<String, Namespace>);

#[derive(Clone, Debug, Default)]
struct Namespace {
    labels: HashMap<String, Labels>,
    names: HashMap<(String, String), BTreeSet<String>>,
}

impl LabelIndex {
    pub(super) fn insert(&mut self, meta: &Meta) {
        let namespace = self.0.entry(meta.namespace.clone()).or_default();
        for (key, value) in &meta.labels {
            let names = namespace.names.entry((key.clone(), value.clone())).or_default();
            names.insert(meta.name.clone());
        }
        namespace.labels.insert(meta.name.clone(), meta.labels.clone());
    }

    pub(super) fn remove(&mut self, meta: &Meta) {
        let Some(namespace) = self.0.get_mut(&meta.namespace) else { return };
        for label in &meta.labels {
            let label = (label.0.clone(), label.1.clone());
            if let Some(names) = namespace.names.get_mut(&label) {
                names.remove(&meta.name);
                if names.is_empty() {
                    namespace.names.remove(&label);
                }
            }
        }
        namespace.labels.remove(&meta.name);
        if namespace.labels.is_empty() {
            self.0.remove(&meta.namespace);
        }
    }

    /// Names of the pods that have all labels of the selector, in order; none for the empty selector.
    pub(super) fn select<'a>(
        &'a self,
        namespace: &str,
        selector: &'a Labels,
    ) -> impl Iterator<Item = &'a String> {
        let namespace = self.0.get(namespace);
        let rarest = namespace.and_then(|namespace| {
            let sets = selector.iter().map(|(key, value)| namespace.names.get(&(key.clone(), value.clone())));
            // A label nobody has makes the whole answer empty.
            sets.collect::<Option<Vec<_>>>()?.into_iter().min_by_key(|names| names.len())
        });
        rarest.into_iter().flatten().filter(move |name| {
            let labels = namespace.and_then(|namespace| namespace.labels.get(*name));
            labels.is_some_and(|labels| crate::api::selects(selector, labels))
        })
    }
}
