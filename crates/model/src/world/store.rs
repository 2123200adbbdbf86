//! Objects of one kind by namespace and name, each with its origin.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    api::{Meta, Typed},
    origin::Origin,
};

/// Sort key by age, which never depends on when the objects were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Age<'a> {
    /// `creationTimestamp`, in seconds since 1970, and two names. Objects that are applied together have the same time.
    Created(i64, &'a str, &'a str),
    /// File, line, namespace and name of an object without a time. It is younger than those with one.
    Read(&'a str, u32, &'a str, &'a str),
}

impl<'a> Age<'a> {
    /// Returns the age of an object of Istio's kinds or of Kubernetes. As in Istio, the name decides before the
    /// namespace.
    pub(super) fn of(meta: &'a Meta, origin: &'a Origin) -> Self {
        Self::read(meta, origin, (&meta.name, &meta.namespace))
    }

    /// Returns the age of an object of Gateway API. By its specification, the namespace decides before the name.
    pub(super) fn of_gateway_api(meta: &'a Meta, origin: &'a Origin) -> Self {
        Self::read(meta, origin, (&meta.namespace, &meta.name))
    }

    fn read(meta: &'a Meta, origin: &'a Origin, (first, second): (&'a str, &'a str)) -> Self {
        match meta.created {
            Some(time) => Self::Created(time, first, second),
            None => Self::Read(&origin.file, origin.line, &meta.namespace, &meta.name),
        }
    }
}

/// An object and where it was read.
#[derive(Clone, Debug)]
pub(super) struct Entry<T> {
    pub(super) object: Arc<Typed<T>>,
    pub(super) origin: Origin,
}

impl<T> Entry<T> {
    pub(super) fn age(&self) -> Age<'_> {
        Age::of(&self.object.meta, &self.origin)
    }

    pub(super) fn gateway_api_age(&self) -> Age<'_> {
        Age::of_gateway_api(&self.object.meta, &self.origin)
    }
}

impl<T: PartialEq> Entry<T> {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let is_equal = Arc::ptr_eq(&self.object, &other.object) || self.object == other.object;
        is_equal && self.origin == other.origin
    }
}

/// Objects of one kind. Clones share the maps until one of them changes.
#[derive(Clone, Debug)]
pub(super) struct Store<T>(Arc<BTreeMap<String, Arc<ByName<T>>>>);

/// Objects of a namespace by name.
type ByName<T> = BTreeMap<String, Entry<T>>;

impl<T> Default for Store<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Clone + PartialEq> Store<T> {
    /// Adds or replaces an object. Returns false if it is equal to the replaced one.
    pub(super) fn insert(&mut self, object: Arc<Typed<T>>, origin: Origin) -> bool {
        let names = Arc::make_mut(&mut self.0).entry(object.meta.namespace.clone()).or_default();
        let name = object.meta.name.clone();
        let before = Arc::make_mut(names).insert(name, Entry { object: Arc::clone(&object), origin });
        before.is_none_or(|before| before.object != object)
    }
}

impl<T> Store<T> {
    /// Calls `each` with the entries that the two stores do not have in common by this comparison, those of both. Maps
    /// that they share are not read.
    pub(super) fn differences<'a>(
        &'a self,
        other: &'a Self,
        is_same: impl Fn(&Entry<T>, &Entry<T>) -> bool,
        mut each: impl FnMut(&'a Entry<T>),
    ) {
        if Arc::ptr_eq(&self.0, &other.0) {
            return;
        }
        for (one, another) in [(self, other), (other, self)] {
            for (namespace, names) in &*one.0 {
                let others = another.0.get(namespace);
                if others.is_some_and(|others| Arc::ptr_eq(names, others)) {
                    continue;
                }
                let is_common = |(name, entry): &(&String, &Entry<T>)| {
                    others.and_then(|others| others.get(*name)).is_some_and(|other| is_same(entry, other))
                };
                names.iter().filter(|pair| !is_common(pair)).for_each(|(_, entry)| each(entry));
            }
        }
    }
}

impl<T: Clone> Store<T> {
    pub(super) fn remove(&mut self, namespace: &str, name: &str) -> bool {
        if self.get(namespace, name).is_none() {
            return false;
        }
        let namespaces = Arc::make_mut(&mut self.0);
        if let Some(names) = namespaces.get_mut(namespace) {
            Arc::make_mut(names).remove(name);
            if names.is_empty() {
                namespaces.remove(namespace);
            }
        }
        true
    }
}

impl<T> Store<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    pub(super) fn get(&self, namespace: &str, name: &str) -> Option<&Entry<T>> {
        self.0.get(namespace)?.get(name)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry<T>> {
        self.0.values().flat_map(|names| names.values())
    }

    pub(super) fn in_namespace(&self, namespace: &str) -> impl Iterator<Item = &Entry<T>> {
        self.0.get(namespace).into_iter().flat_map(|names| names.values())
    }
}
