//! Named resources: encoded once, shared by reference between all the views and streams they go to.
//!
//! A resource's version is a fingerprint of its content. Two servers, or one before and after a restart,
//! therefore give the same version to the same content, and a client that reconnects is sent only what changed.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use skysail_proto::Codec;
use xxhash_rust::xxh3::xxh3_64;

use crate::{aliases, kind::Kind};

/// One resource, encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Which service gives it.
    pub kind: Kind,
    /// Its name, unique within its kind.
    pub name: Arc<str>,
    /// A fingerprint of the body. Who encodes a message with maps must write them in one order, or it is another one each time.
    pub version: u64,
    /// The encoded message, the `value` of the `Any` it is sent in.
    pub body: Bytes,
    /// Keys of the other names it is found by ([`Snapshot::find`](crate::Snapshot::find)), which follow from the body; sorted.
    pub(crate) aliases: Box<[u64]>,
}

impl Resource {
    /// Encodes a message.
    pub fn encode<M: Codec>(kind: Kind, name: &str, message: &M) -> Arc<Self> {
        Self::from_body(kind, name, message.to_vec().into())
    }

    /// Wraps a message that is encoded already.
    pub fn from_body(kind: Kind, name: &str, body: Bytes) -> Arc<Self> {
        Self::with_aliases(kind, name, body, [])
    }

    /// Wraps a message that is found by other names as well: a virtual host by `ROUTE CONFIGURATION/DOMAIN`, in lower case.
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

    /// The version as it goes over the wire.
    pub fn version_text(&self) -> String {
        format!("{:016x}", self.version)
    }
}

/// A plain set of resources, by kind and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    kinds: [BTreeMap<Arc<str>, Arc<Resource>>; Kind::ALL.len()],
}

impl Resources {
    /// Adds a resource; one of the same kind and name is replaced.
    pub fn insert(&mut self, resource: Arc<Resource>) {
        self.kinds[resource.kind as usize].insert(Arc::clone(&resource.name), resource);
    }

    /// The resource of a kind and name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.kinds[kind as usize].get(name)
    }

    /// All resources of a kind, sorted by name.
    pub fn iter(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> {
        self.kinds[kind as usize].values()
    }

    /// How many resources of a kind there are.
    pub fn len(&self, kind: Kind) -> usize {
        self.kinds[kind as usize].len()
    }

    /// True when there is nothing of any kind.
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
