//! Connection limits of a server: in total, per source address and per identity.
//!
//! A connection is *evictable* in three cases: it has not authenticated, it has not sent a whole request, or
//! it has no call in progress. Every other connection is *used*. At the total limit and at the limit of evictable
//! connections, the server closes the oldest evictable connection to make room for a new one. At the limit of an
//! address, it closes the oldest evictable one of that address. At the limit of an identity, it refuses the call.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::Notify;
use tracing::warn;

use crate::logging::Throttle;

/// Minimum interval between two log lines about refused connections.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum numbers of simultaneous connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum in total.
    pub total: usize,
    /// Maximum per source address; `None` for no limit.
    pub by_address: Option<usize>,
    /// Maximum of used connections per identity; `None` for no limit.
    pub by_identity: Option<usize>,
    /// Maximum of evictable connections.
    pub evictable: usize,
}

/// Table of a server's connections.
#[derive(Debug)]
pub struct Connections {
    limits: Limits,
    state: Mutex<Table>,
    /// Number of connections closed for lack of room, plus calls refused because their identity was at its limit.
    refused: AtomicU64,
    /// Number of evictable connections closed to make room.
    shed: AtomicU64,
    refusals: Throttle,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    open: usize,
    addresses: HashMap<IpAddr, AddressConnections>,
    /// Evictable connections by id, hence the oldest first.
    evictable: BTreeMap<u64, (IpAddr, Arc<Slot>)>,
    /// Identities of used connections, where known.
    used: HashMap<u64, Arc<str>>,
    /// Number of used connections per identity.
    identities: HashMap<Arc<str>, usize>,
}

#[derive(Debug, Default)]
struct AddressConnections {
    open: usize,
    /// Ids of evictable connections, the oldest first.
    evictable: BTreeSet<u64>,
}

/// State that a connection shares with the table.
#[derive(Debug, Default)]
struct Slot {
    /// The connection was removed from the table to make room for another one.
    is_shed: AtomicBool,
    closing: Notify,
}

/// A connection's entry in the table, removed on drop.
#[derive(Debug)]
pub struct Admitted {
    connections: Arc<Connections>,
    id: u64,
    from: IpAddr,
    slot: Arc<Slot>,
}

impl Connections {
    /// Creates an empty table.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            state: Mutex::default(),
            refused: AtomicU64::new(0),
            shed: AtomicU64::new(0),
            refusals: Throttle::new(WARNING_INTERVAL),
        })
    }

    /// Admits a connection as evictable. Returns `None` if there is no room; the caller then closes the connection.
    ///
    /// `scarce` says that another resource, such as file descriptors, is nearly used up. An evictable connection then
    /// makes room.
    pub fn admit(self: &Arc<Self>, from: IpAddr, scarce: bool) -> Option<Admitted> {
        let from = from.to_canonical();
        let Limits { total, by_address, evictable, .. } = self.limits;
        let mut state = self.state();
        let mut room = true;
        let same_address = state.addresses.get(&from);
        if by_address.is_some_and(|limit| same_address.is_some_and(|address| address.open >= limit)) {
            let oldest = same_address.and_then(|address| address.evictable.first()).copied();
            room &= self.shed(&mut state, oldest);
        }
        if room && (scarce || state.open >= total || state.evictable.len() >= evictable) {
            let oldest = state.evictable.keys().next().copied();
            room &= self.shed(&mut state, oldest);
        }
        if !room {
            let open = state.open;
            drop(state);
            self.refused.fetch_add(1, Ordering::Relaxed);
            if let Some(more) = self.refusals.admit(Instant::now()) {
                warn!(%from, open, more, "connection closed: the limit is reached and no connection is evictable");
            }
            return None;
        }
        let id = state.next;
        let slot = Arc::<Slot>::default();
        state.next += 1;
        state.open += 1;
        state.addresses.entry(from).or_default().open += 1;
        state.add_evictable(id, from, &slot);
        Some(Admitted { connections: Arc::clone(self), id, from, slot })
    }

    /// Removes an evictable connection from the table and asks its task to close it.
    fn shed(&self, state: &mut Table, id: Option<u64>) -> bool {
        let Some((from, slot)) = id.and_then(|id| state.remove_evictable(id)) else { return false };
        state.close(from);
        slot.is_shed.store(true, Ordering::Relaxed);
        slot.closing.notify_one();
        self.shed.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Returns the number of open connections.
    pub fn open(&self) -> usize {
        self.state().open
    }

    /// Returns the number of evictable connections.
    pub fn evictable(&self) -> usize {
        self.state().evictable.len()
    }

    /// Returns the number of connections closed for lack of room since the start, plus the calls refused because their
    /// identity was at its limit.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the number of evictable connections closed to make room since the start.
    pub fn sheds(&self) -> u64 {
        self.shed.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, Table> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Counts a connection as evictable.
    fn add_evictable(&mut self, id: u64, from: IpAddr, slot: &Arc<Slot>) {
        self.addresses.entry(from).or_default().evictable.insert(id);
        self.evictable.insert(id, (from, Arc::clone(slot)));
    }

    /// Counts a used connection for an identity, unless the identity has `limit` already. Returns whether it is
    /// counted.
    fn count_for_identity(&mut self, id: u64, identity: &Arc<str>, limit: Option<usize>) -> bool {
        if self.used.contains_key(&id) {
            return true;
        }
        let count = self.identities.entry(Arc::clone(identity)).or_default();
        if limit.is_some_and(|limit| *count >= limit) {
            return false;
        }
        *count += 1;
        self.used.insert(id, Arc::clone(identity));
        true
    }

    /// Stops counting a connection for its identity.
    fn release_identity(&mut self, id: u64) {
        let Some(identity) = self.used.remove(&id) else { return };
        if let Entry::Occupied(mut count) = self.identities.entry(identity) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Stops counting a connection as evictable.
    fn remove_evictable(&mut self, id: u64) -> Option<(IpAddr, Arc<Slot>)> {
        let (from, slot) = self.evictable.remove(&id)?;
        if let Some(address) = self.addresses.get_mut(&from) {
            address.evictable.remove(&id);
        }
        Some((from, slot))
    }

    /// Removes a connection from the totals of its source address and of the table.
    fn close(&mut self, from: IpAddr) {
        self.open -= 1;
        if let Some(address) = self.addresses.get_mut(&from) {
            address.open -= 1;
            if address.open == 0 {
                self.addresses.remove(&from);
            }
        }
    }
}

impl Admitted {
    /// Marks the connection as used, so it is not closed to make room.
    pub fn mark_used(&self) {
        self.connections.state().remove_evictable(self.id);
    }

    /// Marks the connection as used by an identity. It counts for the identity until it is evictable again
    /// or ends.
    ///
    /// # Errors
    /// Returns the limit if the identity is at its limit. The connection's state is then unchanged.
    pub fn mark_used_by(&self, identity: &Arc<str>) -> Result<(), usize> {
        let limit = self.connections.limits.by_identity;
        let mut state = self.connections.state();
        if state.count_for_identity(self.id, identity, limit) {
            state.remove_evictable(self.id);
            return Ok(());
        }
        drop(state);
        self.connections.refused.fetch_add(1, Ordering::Relaxed);
        let limit = limit.unwrap_or_default();
        if let Some(more) = self.connections.refusals.admit(Instant::now()) {
            warn!(from = %self.from, identity = &**identity, limit, more, "identity is at its limit of connections; call refused");
        }
        Err(limit)
    }

    /// Marks the connection as evictable again while it waits for its next request. It keeps its age.
    pub fn mark_evictable(&self) {
        let mut state = self.connections.state();
        state.release_identity(self.id);
        if !self.slot.is_shed.load(Ordering::Relaxed) {
            state.add_evictable(self.id, self.from, &self.slot);
        }
    }

    /// Waits until the connection must be closed to make room.
    pub async fn shed(&self) {
        self.slot.closing.notified().await;
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.connections.state();
        state.release_identity(self.id);
        state.remove_evictable(self.id);
        if !self.slot.is_shed.load(Ordering::Relaxed) {
            state.close(self.from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOMY: Limits = Limits { total: 100, by_address: None, by_identity: None, evictable: 100 };

    fn from(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Returns whether the table has asked the connection to close.
    fn is_shed(admitted: &Admitted) -> bool {
        admitted.slot.is_shed.load(Ordering::Relaxed)
    }

    #[test]
    fn the_oldest_evictable_connection_makes_room() {
        let table = Connections::new(Limits { total: 3, ..ROOMY });
        let [first, second, third] = [1, 2, 3].map(|last| table.admit(from(last), false).unwrap());
        first.mark_used();
        let fourth = table.admit(from(4), false).unwrap();
        assert_eq!([&first, &second, &third, &fourth].map(is_shed), [false, true, false, false]);
        third.mark_used();
        fourth.mark_used();
        assert!(table.admit(from(5), false).is_none(), "all are used");
        assert_eq!((table.open(), table.sheds(), table.refused()), (3, 1, 1));
        drop(second);
        assert_eq!(table.open(), 3, "another connection has its slot");
        drop(first);
        table.admit(from(5), false).unwrap();
        assert_eq!(table.open(), 2, "given back at once");
        fourth.mark_evictable();
        assert_eq!(table.evictable(), 1);
        drop((third, fourth));
        assert_eq!((table.open(), table.evictable()), (0, 0));
        assert!(table.state().addresses.is_empty());
    }

    #[test]
    fn an_address_at_its_limit_closes_only_its_own_connections() {
        let table = Connections::new(Limits { by_address: Some(2), ..ROOMY });
        let other = table.admit(from(1), false).unwrap();
        let [first, second, third] = [(); 3].map(|()| table.admit(from(2), false).unwrap());
        assert_eq!([&other, &first, &second, &third].map(is_shed), [false, true, false, false]);
        second.mark_used();
        third.mark_used();
        assert!(table.admit(from(2), false).is_none());
        let mapped: IpAddr = "::ffff:10.0.0.2".parse().unwrap();
        assert!(table.admit(mapped, false).is_none(), "the same address");
        table.admit(from(3), false).unwrap();
    }

    #[test]
    fn an_identity_is_limited_in_proven_connections() {
        let table = Connections::new(Limits { total: 4, by_identity: Some(2), ..ROOMY });
        let [first, second, third] = [(); 3].map(|()| table.admit(from(1), false).unwrap());
        let [a, b] = ["a", "b"].map(Arc::<str>::from);
        assert_eq!(
            [&first, &second, &first, &third].map(|one| one.mark_used_by(&a)),
            [Ok(()), Ok(()), Ok(()), Err(2)]
        );
        assert_eq!((table.evictable(), table.refused()), (1, 1), "it stays evictable");
        third.mark_used_by(&b).unwrap();
        first.mark_used_by(&b).unwrap();
        second.mark_evictable();
        second.mark_evictable();
        let fourth = table.admit(from(1), false).unwrap();
        fourth.mark_used_by(&a).unwrap();
        assert_eq!(second.mark_used_by(&a), Err(2), "another connection has its slot");
        drop(first);
        second.mark_used_by(&a).unwrap();
        drop((second, third, fourth));
        assert!(table.state().identities.is_empty() && table.state().used.is_empty());
    }

    #[test]
    fn a_closed_connection_is_counted_for_no_identity() {
        let table = Connections::new(Limits { total: 1, by_identity: Some(1), ..ROOMY });
        let first = table.admit(from(1), false).unwrap();
        let second = table.admit(from(2), false).unwrap();
        let a = "a".into();
        // The call arrived before the connection was closed.
        first.mark_used_by(&a).unwrap();
        drop(first);
        second.mark_used_by(&a).unwrap();
        assert_eq!((table.open(), table.evictable()), (1, 0));
    }

    #[test]
    fn evictable_connections_have_their_own_limit_and_close_when_descriptors_are_scarce() {
        let table = Connections::new(Limits { evictable: 2, ..ROOMY });
        let mut kept: Vec<_> = (0..5).map(|last| table.admit(from(last), false).unwrap()).collect();
        assert_eq!(kept.iter().map(is_shed).collect::<Vec<_>>(), [true, true, true, false, false]);
        assert_eq!((table.open(), table.evictable()), (2, 2));
        kept.push(table.admit(from(9), true).unwrap());
        kept.iter().for_each(Admitted::mark_used);
        assert!(table.admit(from(9), true).is_none());
        kept[0].mark_evictable();
        assert_eq!(table.evictable(), 0, "its slot is gone already");
    }

    #[tokio::test]
    async fn a_shed_connection_is_notified_even_if_it_waits_later() {
        let table = Connections::new(Limits { total: 1, ..ROOMY });
        let first = table.admit(from(1), false).unwrap();
        let _second = table.admit(from(2), false).unwrap();
        first.shed().await;
    }
}
