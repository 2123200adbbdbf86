//! Named resources: encoded once, shared by reference between all the views and streams they go to.
//!
//! A resource's version is a fingerprint of its content. Two servers, or one before and after a restart,
//! therefore give the same version to the same content, and a client that reconnects is sent only what changed.

use std::{collections::BTreeMap, fmt, sync::Arc};

use bytes::Bytes;
use skysail_proto::Codec;
use xxhash_rust::xxh3::xxh3_64;

use crate::aliases;

/// Which of the discovery services a resource belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `envoy.config.cluster.v3.Cluster`
    Cluster,
    /// `envoy.config.endpoint.v3.ClusterLoadAssignment`
    Endpoint,
    /// `envoy.config.listener.v3.Listener`
    Listener,
    /// `envoy.config.route.v3.RouteConfiguration`
    Route,
    /// `envoy.config.route.v3.VirtualHost`, named `ROUTE CONFIGURATION/NAME`.
    VirtualHost,
    /// `envoy.extensions.transport_sockets.tls.v3.Secret`
    Secret,
    /// `envoy.config.core.v3.TypedExtensionConfig`
    ExtensionConfig,
    /// `istio.networking.nds.v1.NameTable`: host names and addresses for the proxy's DNS.
    NameTable,
}

impl Kind {
    /// All kinds, in the order they are to be sent: what is referred to before what refers to it.
    pub const ALL: [Self; 8] = [
        Self::Cluster,
        Self::Endpoint,
        Self::Listener,
        Self::Route,
        Self::VirtualHost,
        Self::Secret,
        Self::ExtensionConfig,
        Self::NameTable,
    ];

    /// The type URL.
    pub const fn url(self) -> &'static str {
        match self {
            Self::Cluster => "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            Self::Endpoint => "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            Self::Listener => "type.googleapis.com/envoy.config.listener.v3.Listener",
            Self::Route => "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
            Self::VirtualHost => "type.googleapis.com/envoy.config.route.v3.VirtualHost",
            Self::Secret => "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
            Self::ExtensionConfig => "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
            Self::NameTable => "type.googleapis.com/istio.networking.nds.v1.NameTable",
        }
    }

    /// The kind of a type URL; `None` for one that is not served.
    pub fn from_url(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.url() == url)
    }

    /// The service's short name as people and metrics use it: `cds`, `eds`, …
    pub const fn short(self) -> &'static str {
        match self {
            Self::Cluster => "cds",
            Self::Endpoint => "eds",
            Self::Listener => "lds",
            Self::Route => "rds",
            Self::VirtualHost => "vhds",
            Self::Secret => "sds",
            Self::ExtensionConfig => "ecds",
            Self::NameTable => "nds",
        }
    }

    /// The name by which others of its kind are asked for together with this one: virtual hosts are by that of their route
    /// configuration.
    pub fn family(self, name: &str) -> Option<&str> {
        let (family, _) = name.rsplit_once('/').filter(|_| self == Self::VirtualHost)?;
        Some(family)
    }

    /// Whether a name stands for all resources that have it as their [`family`](Self::family).
    pub(crate) fn is_family(self, name: &str) -> bool {
        self == Self::VirtualHost && !name.contains('/')
    }

    /// True for kinds of which a client takes all unless it names some.
    pub const fn is_wildcard(self) -> bool {
        matches!(self, Self::Cluster | Self::Listener | Self::VirtualHost | Self::NameTable)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.short())
    }
}

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
