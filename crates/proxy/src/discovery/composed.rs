//! Route configurations whose virtual hosts come one by one (VHDS), put together.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::encoding::{WireType, encode_key, encode_varint};
use skysail_xds::client::Received;

/// `envoy.config.route.v3.RouteConfiguration.virtual_hosts`
const VIRTUAL_HOSTS: u32 = 2;

/// All of them, by name.
#[derive(Default)]
pub(super) struct Composed(BTreeMap<Arc<str>, Parts>);

/// One route configuration and its virtual hosts.
#[derive(Clone, Default)]
pub(super) struct Parts {
    /// The configuration itself, with its version.
    configuration: Option<(Bytes, String)>,
    /// The hosts by name; absent until some have come.
    hosts: Option<BTreeMap<String, Bytes>>,
}

/// A route configuration as if it had come whole.
pub(super) struct Whole {
    pub(super) version: String,
    pub(super) body: Bytes,
}

impl Composed {
    /// The parts of one, to change them or to put them back.
    pub(super) fn parts(&mut self, name: &str) -> &mut Parts {
        self.0.entry(name.into()).or_default()
    }

    /// One has its hosts within it now.
    pub(super) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// The names to ask for hosts by.
    pub(super) fn wanted(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(_, parts)| parts.configuration.is_some()).map(|(name, _)| &**name)
    }

    /// Keeps only those of some names.
    pub(super) fn retain(&mut self, names: &BTreeSet<String>) {
        self.0.retain(|name, _| names.contains(&**name));
    }
}

impl Parts {
    pub(super) fn set_configuration(&mut self, received: &Received) {
        self.configuration = Some((received.body.clone(), received.version.clone()));
    }

    pub(super) fn set_host(&mut self, received: &Received) {
        self.hosts.get_or_insert_default().insert(received.name.clone(), received.body.clone());
    }

    pub(super) fn remove_host(&mut self, name: &str) {
        self.hosts.get_or_insert_default().remove(name);
    }

    /// Puts a host back as it was.
    pub(super) fn restore_host(&mut self, name: &str, before: &Self) {
        let hosts = self.hosts.get_or_insert_default();
        match before.hosts.as_ref().and_then(|hosts| hosts.get(name)) {
            Some(body) => hosts.insert(name.to_owned(), body.clone()),
            None => hosts.remove(name),
        };
    }

    /// All of it, unless something is still to come.
    pub(super) fn whole(&self) -> Option<Whole> {
        let (configuration, version) = self.configuration.as_ref()?;
        Some(Whole { version: version.clone(), body: compose(configuration, self.hosts.as_ref()?.values()) })
    }
}

/// A route configuration with these virtual hosts as well: messages are put together by putting their bytes together.
pub(super) fn compose<'a>(configuration: &[u8], hosts: impl Iterator<Item = &'a Bytes>) -> Bytes {
    let mut body = BytesMut::from(configuration);
    for host in hosts {
        encode_key(VIRTUAL_HOSTS, WireType::LengthDelimited, &mut body);
        encode_varint(host.len() as u64, &mut body);
        body.put_slice(host);
    }
    body.freeze()
}
