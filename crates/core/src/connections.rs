//! Which connections a server keeps: caps in all, by source address and by identity, and which are closed when there is no room.
//!
//! A connection is *unproven* unless its server says otherwise: it has not authenticated, has not sent a whole request, or has no call
//! in progress. Only such connections make room for others, the oldest first, so an unused connection never keeps out a used one.

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

/// Lost connections are logged this often at most.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(10);

/// How many connections there may be at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In all.
    pub most: usize,
    /// From one source address; `None` for no limit.
    pub by_address: Option<usize>,
    /// Proven ones of one identity; `None` for no limit.
    pub by_identity: Option<usize>,
    /// Unproven ones.
    pub unproven: usize,
}

/// The connections of a server.
#[derive(Debug)]
pub struct Connections {
    limits: Limits,
    state: Mutex<State>,
    /// Connections closed because there was no room for them, and calls refused because their identity has too many.
    refused: AtomicU64,
    /// Unproven connections closed to make room.
    shed: AtomicU64,
    said: Throttle,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    open: usize,
    addresses: HashMap<IpAddr, Address>,
    /// The oldest first.
    unproven: BTreeMap<u64, (IpAddr, Arc<Place>)>,
    /// The identities of proven connections, where they are known.
    proven: HashMap<u64, Arc<str>>,
    /// How many proven connections each identity has.
    identities: HashMap<Arc<str>, usize>,
}

#[derive(Debug, Default)]
struct Address {
    open: usize,
    /// The oldest first.
    unproven: BTreeSet<u64>,
}

/// What a connection and the table share.
#[derive(Debug, Default)]
struct Place {
    /// Another connection has it now.
    lost: AtomicBool,
    told: Notify,
}

/// A connection's place in the table, given back when dropped.
#[derive(Debug)]
pub struct Admitted {
    connections: Arc<Connections>,
    id: u64,
    from: IpAddr,
    place: Arc<Place>,
}

impl Connections {
    /// An empty table.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            state: Mutex::default(),
            refused: AtomicU64::new(0),
            shed: AtomicU64::new(0),
            said: Throttle::new(BETWEEN_WARNINGS),
        })
    }

    /// Takes a connection in, unproven; `None`: there is no room, close it. `scarce`: something else than these limits, such as
    /// descriptors, is nearly used up.
    pub fn admit(self: &Arc<Self>, from: IpAddr, scarce: bool) -> Option<Admitted> {
        let from = from.to_canonical();
        let Limits { most, by_address, unproven, .. } = self.limits;
        let mut state = self.state();
        let mut room = true;
        let at_home = state.addresses.get(&from);
        if by_address.is_some_and(|most| at_home.is_some_and(|address| address.open >= most)) {
            let oldest = at_home.and_then(|address| address.unproven.first()).copied();
            room &= self.shed(&mut state, oldest);
        }
        if room && (scarce || state.open >= most || state.unproven.len() >= unproven) {
            let oldest = state.unproven.keys().next().copied();
            room &= self.shed(&mut state, oldest);
        }
        if !room {
            let open = state.open;
            drop(state);
            self.refused.fetch_add(1, Ordering::Relaxed);
            if let Some(more) = self.said.admit(Instant::now()) {
                warn!(%from, open, more, "a connection is closed: there are as many as allowed, and none is unproven");
            }
            return None;
        }
        let id = state.next;
        let place = Arc::<Place>::default();
        state.next += 1;
        state.open += 1;
        state.addresses.entry(from).or_default().open += 1;
        state.doubt(id, from, &place);
        Some(Admitted { connections: Arc::clone(self), id, from, place })
    }

    /// Takes an unproven connection's place away.
    fn shed(&self, state: &mut State, id: Option<u64>) -> bool {
        let Some((from, place)) = id.and_then(|id| state.trust(id)) else { return false };
        state.leave(from);
        place.lost.store(true, Ordering::Relaxed);
        place.told.notify_one();
        self.shed.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// How many there are.
    pub fn open(&self) -> usize {
        self.state().open
    }

    /// How many of them are unproven.
    pub fn unproven(&self) -> usize {
        self.state().unproven.len()
    }

    /// How many were closed since the start because there was no room for them, and how many calls were refused because their identity
    /// had too many.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// How many unproven ones were closed since the start to make room.
    pub fn sheds(&self) -> u64 {
        self.shed.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts a connection as unproven.
    fn doubt(&mut self, id: u64, from: IpAddr, place: &Arc<Place>) {
        self.addresses.entry(from).or_default().unproven.insert(id);
        self.unproven.insert(id, (from, Arc::clone(place)));
    }

    /// Counts a proven connection for an identity, unless it has `most` already; returns whether it is counted.
    fn belong(&mut self, id: u64, identity: &Arc<str>, most: Option<usize>) -> bool {
        if self.proven.contains_key(&id) {
            return true;
        }
        let count = self.identities.entry(Arc::clone(identity)).or_default();
        if most.is_some_and(|most| *count >= most) {
            return false;
        }
        *count += 1;
        self.proven.insert(id, Arc::clone(identity));
        true
    }

    /// No longer counts a connection for an identity.
    fn part(&mut self, id: u64) {
        let Some(identity) = self.proven.remove(&id) else { return };
        if let Entry::Occupied(mut count) = self.identities.entry(identity) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// No longer counts a connection as unproven.
    fn trust(&mut self, id: u64) -> Option<(IpAddr, Arc<Place>)> {
        let (from, place) = self.unproven.remove(&id)?;
        if let Some(address) = self.addresses.get_mut(&from) {
            address.unproven.remove(&id);
        }
        Some((from, place))
    }

    /// Counts a connection from this address as gone.
    fn leave(&mut self, from: IpAddr) {
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
    /// Makes the connection proven: it is not closed for others.
    pub fn prove(&self) {
        self.connections.state().trust(self.id);
    }

    /// Makes the connection proven by an identity, for which it is counted until it is unproven again or ends. Fails if the identity has
    /// as many proven connections as it may have; the connection stays as it is then.
    ///
    /// # Errors
    /// That number.
    pub fn prove_by(&self, identity: &Arc<str>) -> Result<(), usize> {
        let most = self.connections.limits.by_identity;
        let mut state = self.connections.state();
        if state.belong(self.id, identity, most) {
            state.trust(self.id);
            return Ok(());
        }
        drop(state);
        self.connections.refused.fetch_add(1, Ordering::Relaxed);
        let most = most.unwrap_or_default();
        if let Some(more) = self.connections.said.admit(Instant::now()) {
            warn!(from = %self.from, identity = &**identity, most, more, "an identity has as many connections as allowed");
        }
        Err(most)
    }

    /// Makes the connection unproven again, as one that waits for its next request. It keeps its age.
    pub fn doubt(&self) {
        let mut state = self.connections.state();
        state.part(self.id);
        if !self.place.lost.load(Ordering::Relaxed) {
            state.doubt(self.id, self.from, &self.place);
        }
    }

    /// Waits until the connection must be closed to make room.
    pub async fn shed(&self) {
        self.place.told.notified().await;
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.connections.state();
        state.part(self.id);
        state.trust(self.id);
        if !self.place.lost.load(Ordering::Relaxed) {
            state.leave(self.from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOMY: Limits = Limits { most: 100, by_address: None, by_identity: None, unproven: 100 };

    fn from(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Whether a connection has been told to go.
    fn is_shed(admitted: &Admitted) -> bool {
        admitted.place.lost.load(Ordering::Relaxed)
    }

    #[test]
    fn unproven_connections_make_room_the_oldest_first() {
        let table = Connections::new(Limits { most: 3, ..ROOMY });
        let [first, second, third] = [1, 2, 3].map(|last| table.admit(from(last), false).unwrap());
        first.prove();
        let fourth = table.admit(from(4), false).unwrap();
        assert_eq!([&first, &second, &third, &fourth].map(is_shed), [false, true, false, false]);
        third.prove();
        fourth.prove();
        assert!(table.admit(from(5), false).is_none(), "all are proven");
        assert_eq!((table.open(), table.sheds(), table.refused()), (3, 1, 1));
        drop(second);
        assert_eq!(table.open(), 3, "its place is another's");
        drop(first);
        table.admit(from(5), false).unwrap();
        assert_eq!(table.open(), 2, "given back at once");
        fourth.doubt();
        assert_eq!(table.unproven(), 1);
        drop((third, fourth));
        assert_eq!((table.open(), table.unproven()), (0, 0));
        assert!(table.state().addresses.is_empty());
    }

    #[test]
    fn an_address_takes_room_from_itself_only() {
        let table = Connections::new(Limits { by_address: Some(2), ..ROOMY });
        let other = table.admit(from(1), false).unwrap();
        let [first, second, third] = [(); 3].map(|()| table.admit(from(2), false).unwrap());
        assert_eq!([&other, &first, &second, &third].map(is_shed), [false, true, false, false]);
        second.prove();
        third.prove();
        assert!(table.admit(from(2), false).is_none());
        let mapped: IpAddr = "::ffff:10.0.0.2".parse().unwrap();
        assert!(table.admit(mapped, false).is_none(), "the same address");
        table.admit(from(3), false).unwrap();
    }

    #[test]
    fn an_identity_has_so_many_proven_connections_and_no_more() {
        let table = Connections::new(Limits { most: 4, by_identity: Some(2), ..ROOMY });
        let [first, second, third] = [(); 3].map(|()| table.admit(from(1), false).unwrap());
        let [a, b] = ["a", "b"].map(Arc::<str>::from);
        assert_eq!(
            [&first, &second, &first, &third].map(|one| one.prove_by(&a)),
            [Ok(()), Ok(()), Ok(()), Err(2)]
        );
        assert_eq!((table.unproven(), table.refused()), (1, 1), "it stays unproven");
        third.prove_by(&b).unwrap();
        first.prove_by(&b).unwrap();
        second.doubt();
        second.doubt();
        let fourth = table.admit(from(1), false).unwrap();
        fourth.prove_by(&a).unwrap();
        assert_eq!(second.prove_by(&a), Err(2), "another connection has its place");
        drop(first);
        second.prove_by(&a).unwrap();
        drop((second, third, fourth));
        assert!(table.state().identities.is_empty() && table.state().proven.is_empty());
    }

    #[test]
    fn a_connection_that_was_closed_for_another_is_counted_for_nobody() {
        let table = Connections::new(Limits { most: 1, by_identity: Some(1), ..ROOMY });
        let first = table.admit(from(1), false).unwrap();
        let second = table.admit(from(2), false).unwrap();
        let a = "a".into();
        // Its call came before it was closed.
        first.prove_by(&a).unwrap();
        drop(first);
        second.prove_by(&a).unwrap();
        assert_eq!((table.open(), table.unproven()), (1, 0));
    }

    #[test]
    fn unproven_connections_have_a_cap_of_their_own_and_go_where_descriptors_are_scarce() {
        let table = Connections::new(Limits { unproven: 2, ..ROOMY });
        let mut kept: Vec<_> = (0..5).map(|last| table.admit(from(last), false).unwrap()).collect();
        assert_eq!(kept.iter().map(is_shed).collect::<Vec<_>>(), [true, true, true, false, false]);
        assert_eq!((table.open(), table.unproven()), (2, 2));
        kept.push(table.admit(from(9), true).unwrap());
        kept.iter().for_each(Admitted::prove);
        assert!(table.admit(from(9), true).is_none());
        kept[0].doubt();
        assert_eq!(table.unproven(), 0, "its place is gone already");
    }

    #[tokio::test]
    async fn a_connection_that_is_shed_is_told_whenever_it_asks() {
        let table = Connections::new(Limits { most: 1, ..ROOMY });
        let first = table.admit(from(1), false).unwrap();
        let _second = table.admit(from(2), false).unwrap();
        first.shed().await;
    }
}
