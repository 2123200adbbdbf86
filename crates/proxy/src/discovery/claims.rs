//! Addresses of listeners. As in Envoy, two listeners must not have the same address: it would be unclear which of them
//! gets a connection.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::Arc,
};

use super::slot::Slot;
use crate::translate::Reject;
use skysail_policy::config::Listener;

/// Minimum number of entries at which stale ones are dropped.
const MIN_SWEPT: usize = 1024;

/// Listeners by address. An entry may be stale: the listener may have moved since.
#[derive(Default)]
pub(super) struct Claims(HashMap<SocketAddr, Arc<str>>);

impl Claims {
    /// Records the addresses of a listener.
    ///
    /// # Errors
    /// Another listener, in effect or warming, has one of them.
    pub(super) fn claim(
        &mut self,
        name: &Arc<str>,
        listener: &Listener,
        all: &BTreeMap<Arc<str>, Slot<Listener>>,
    ) -> Result<(), Reject> {
        // The kernel assigns different ports instead of port 0, which addresses of Unix domain sockets also have.
        let is_fixed =
            |address: &&SocketAddr| !listener.bind || listener.pipe.is_some() || address.port() != 0;
        let fixed = || listener.addresses.iter().filter(is_fixed);
        for address in fixed() {
            if let Some(other) =
                self.0.get(address).filter(|other| *other != name && has(all, other, address))
            {
                let address = listener.pipe.as_ref().map_or_else(|| address.to_string(), ToString::to_string);
                return Err(Reject::new(format!(
                    "listener {other:?} has the address {address} already: choose another, or remove one of the listeners"
                )));
            }
        }
        if self.0.len() >= MIN_SWEPT.max(4 * all.len()) {
            self.0.retain(|address, name| has(all, name, address));
        }
        self.0.extend(fixed().map(|address| (*address, Arc::clone(name))));
        Ok(())
    }
}

fn has(all: &BTreeMap<Arc<str>, Slot<Listener>>, name: &Arc<str>, address: &SocketAddr) -> bool {
    all.get(name).is_some_and(|slot| slot.both().any(|known| known.value.addresses.contains(address)))
}
