//! Which connections a server keeps: caps in all and by source address, and who goes first when there is no room.
//!
//! A connection is *unproven* until its server says otherwise: it has not authenticated, or has not sent a whole request. Only
//! such connections make room for others, the oldest first, so what nobody vouches for never keeps out what somebody does.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
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
    /// Unproven ones.
    pub unproven: usize,
}

/// The connections of a server.
#[derive(Debug)]
pub struct Connections {
    limits: Limits,
    state: Mutex<State>,
    /// Connections closed because there was no room for them.
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
        let Limits { most, by_address, unproven } = self.limits;
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

    /// How many were closed since the start because there was no room for them.
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
    /// The connection is vouched for from now on, and not closed for others.
    pub fn prove(&self) {
        self.connections.state().trust(self.id);
    }

    /// The connection is unproven again, as one that waits for its next request. It counts as old as it is.
    pub fn doubt(&self) {
        let mut state = self.connections.state();
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
        state.trust(self.id);
        if !self.place.lost.load(Ordering::Relaxed) {
            state.leave(self.from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOMY: Limits = Limits { most: 100, by_address: None, unproven: 100 };

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
