//! Named resources, encoded once and shared by reference between all views and streams.
//!
//! The version of a resource is a hash of its content. Two servers therefore give the same version to the same content,
//! and so does one server after a restart. An incremental client that reconnects gets only the changes.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use skysail_proto::Codec;
use xxhash_rust::xxh3::xxh3_64;

use crate::{aliases, kind::Kind};

/// An encoded resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Resource type.
    pub kind: Kind,
    /// Name, unique within the type.
    pub name: Arc<str>,
    /// Hash of the body. The encoder must write maps in a fixed order; otherwise each encoding has another version.
    pub version: u64,
    /// Encoded message, the `value` of the `Any` in which it is sent.
    pub body: Bytes,
    /// Sorted keys of the other names by which it is found ([`Snapshot::find`](crate::Snapshot::find)). They follow
    /// from the body.
    pub(crate) aliases: Box<[u64]>,
}

impl Resource {
    /// Encodes a message.
    pub fn encode<M: Codec>(kind: Kind, name: &str, message: &M) -> Arc<Self> {
        Self::from_body(kind, name, message.to_vec().into())
    }

    /// Wraps an encoded message.
    pub fn from_body(kind: Kind, name: &str, body: Bytes) -> Arc<Self> {
        Self::with_aliases(kind, name, body, [])
    }

    /// Wraps an encoded message that also has other names. Those of a virtual host are `ROUTE CONFIGURATION/DOMAIN`, in
    /// lower case.
    pub fn with_aliases<'a>(
        kind: Kind,
        name: &str,
        body: Bytes,
        aliases: impl IntoIterator<Item = &'a str>,
    ) -> Arc<Self> {
        let mut aliases: Vec<_> = aliases.into_iter().map(aliases::key).collect();
        aliases.sort_unstable();
        aliases.dedup();
        Arc::new(Self { kind, name: name.into(), version: xxh3_64(&body), body, aliases: aliases.into() })
    }

    /// Returns the version as it is sent.
    pub fn version_text(&self) -> String {
        format!("{:016x}", self.version)
    }
}

/// A set of resources by type and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    kinds: [BTreeMap<Arc<str>, Arc<Resource>>; Kind::ALL.len()],
}

impl Resources {
    /// Adds a resource, or replaces the one with the same type and name.
    pub fn insert(&mut self, resource: Arc<Resource>) {
        self.kinds[resource.kind as usize].insert(Arc::clone(&resource.name), resource);
    }

    /// Returns the resource of a type and name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.kinds[kind as usize].get(name)
    }

    /// Returns all resources of a type, sorted by name.
    pub fn iter(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> {
        self.kinds[kind as usize].values()
    }

    /// Returns the number of resources of a type.
    pub fn len(&self, kind: Kind) -> usize {
        self.kinds[kind as usize].len()
    }

    /// Returns true if there is no resource of any type.
    pub fn is_empty(&self) -> bool {
        self.kinds.iter().all(BTreeMap::is_empty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_round_trip() {
        for (index, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(Kind::from_url(kind.url()), Some(kind));
            assert_eq!(kind as usize, index);
        }
        assert_eq!(Kind::from_url("type.googleapis.com/other"), None);
    }
}
