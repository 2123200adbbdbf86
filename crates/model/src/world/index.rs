//! Indexes over objects: by any key, and pods by label. Clones share the maps until one of them changes.

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
    sync::Arc,
};

use crate::api::{Labels, Meta};

/// Objects (namespace, name) by a key that several may share. Most keys have one object, so a list starts with capacity
/// one. Lists are sorted.
#[derive(Clone, Debug)]
pub(super) struct MultiMap<K>(Arc<HashMap<K, Vec<(String, String)>>>);

impl<K> Default for MultiMap<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Clone + Eq + Hash> MultiMap<K> {
    pub(super) fn insert(&mut self, key: K, meta: &Meta) {
        self.insert_name(key, (meta.namespace.clone(), meta.name.clone()));
    }

    pub(super) fn insert_name(&mut self, key: K, name: (String, String)) {
        let objects = Arc::make_mut(&mut self.0).entry(key).or_insert_with(|| Vec::with_capacity(1));
        if let Err(at) = objects.binary_search(&name) {
            objects.insert(at, name);
        }
    }

    pub(super) fn remove(&mut self, key: &K, meta: &Meta) {
        self.remove_name(key, &(meta.namespace.clone(), meta.name.clone()));
    }

    pub(super) fn remove_name(&mut self, key: &K, name: &(String, String)) {
        if !self.0.contains_key(key) {
            return;
        }
        let all = Arc::make_mut(&mut self.0);
        if let Some(objects) = all.get_mut(key) {
            objects.retain(|known| known != name);
            if objects.is_empty() {
                all.remove(key);
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &Vec<(String, String)>)> {
        self.0.iter()
    }

    pub(super) fn get<Q>(&self, key: &Q) -> impl Iterator<Item = &(String, String)>
    where
        K: std::borrow::Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.0.get(key).into_iter().flatten()
    }
}

/// Objects by the host name or wildcard (`*.example.com`) that they apply to.
#[derive(Clone, Debug, Default)]
pub(super) struct HostIndex {
    hosts: MultiMap<String>,
    /// Wildcards, longest first.
    wild: Vec<String>,
}

impl HostIndex {
    pub(super) fn insert(&mut self, host: String, meta: &Meta) {
        if host.starts_with('*') && !self.wild.contains(&host) {
            self.wild.push(host.clone());
            self.wild.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        }
        self.hosts.insert(host, meta);
    }

    pub(super) fn remove(&mut self, host: &String, meta: &Meta) {
        self.hosts.remove(host, meta);
        if self.hosts.get(host).next().is_none() {
            self.wild.retain(|known| known != host);
        }
    }

    /// Returns the objects of exactly this name or wildcard.
    pub(super) fn get(&self, host: &str) -> impl Iterator<Item = &(String, String)> {
        self.hosts.get(host)
    }

    /// Returns the wildcards that match a host, longest first.
    pub(super) fn wildcards(&self, host: &str) -> impl Iterator<Item = &String> {
        self.wild.iter().filter(move |pattern| super::host_matches(pattern, host))
    }
}

/// Names of pods by namespace and label.
#[derive(Clone, Debug, Default)]
pub(super) struct LabelIndex(Arc<HashMap<String, Arc<ByLabel>>>);

/// Names of pods by label.
type ByLabel = HashMap<(String, String), BTreeSet<String>>;

impl LabelIndex {
    pub(super) fn insert(&mut self, meta: &Meta) {
        let labels = Arc::make_mut(&mut self.0).entry(meta.namespace.clone()).or_default();
        let labels = Arc::make_mut(labels);
        for (key, value) in meta.labels.iter() {
            labels.entry((key.clone(), value.clone())).or_default().insert(meta.name.clone());
        }
    }

    pub(super) fn remove(&mut self, meta: &Meta) {
        let namespaces = Arc::make_mut(&mut self.0);
        let Some(labels) = namespaces.get_mut(&meta.namespace).map(Arc::make_mut) else { return };
        for (key, value) in meta.labels.iter() {
            let label = (key.clone(), value.clone());
            if let Some(names) = labels.get_mut(&label) {
                names.remove(&meta.name);
                if names.is_empty() {
                    labels.remove(&label);
                }
            }
        }
        if labels.is_empty() {
            namespaces.remove(&meta.namespace);
        }
    }

    /// Returns the names, in order, of the pods that have the selector's rarest label; none for the empty selector. The
    /// caller checks the other labels.
    pub(super) fn candidates(&self, namespace: &str, selector: &Labels) -> impl Iterator<Item = &String> {
        let rarest = self.0.get(namespace).and_then(|labels| {
            let sets = selector.iter().map(|(key, value)| labels.get(&(key.clone(), value.clone())));
            // A label that no pod has makes the whole result empty.
            sets.collect::<Option<Vec<_>>>()?.into_iter().min_by_key(|names| names.len())
        });
        rarest.into_iter().flatten()
    }
}
