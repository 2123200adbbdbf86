//! Memory for requests that are arriving.
//!
//! Without a reservation, a connection holds what HTTP/2 lets a client send unread, and one request of [`SMALL`]
//! bytes. The rest of a longer request is read after memory for all its bytes is reserved; its prefix has the length.
//! Until then HTTP/2 flow control keeps the rest in the client; a request is never refused for lack of memory. No
//! request holds a part of its memory while it waits, so two requests cannot block each other.
//!
//! Identities take turns, and so do the workload instances of an identity. An instance that holds its maximum is
//! skipped. A request for which its identity or the server has no memory holds up later requests, so that a long
//! request is not overtaken forever. The next request is found within a few steps, because only few instances or
//! identities can hold that much.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex},
};

use tokio::sync::oneshot;

use super::{IDENTITY_MEMORY, INSTANCE_MEMORY, Limits, TOTAL_MEMORY, lock};

/// Maximum length of a request for which each connection has a place, one at a time, in bytes: the first window of
/// HTTP/2.
pub(crate) const SMALL: usize = 64 << 10;

/// The memory that all connections share.
#[derive(Debug, Default)]
pub(super) struct SharedMemory(Mutex<MemoryState>);

#[derive(Debug, Default)]
struct MemoryState {
    held: usize,
    identities: HashMap<Arc<str>, IdentityMemory>,
    /// Identities with waiting requests, the next in turn first.
    turns: VecDeque<Arc<str>>,
    /// Number of reservations made so far.
    tickets: u64,
}

#[derive(Debug, Default)]
struct IdentityMemory {
    held: usize,
    instances: HashMap<Arc<str>, InstanceMemory>,
    /// Instances with waiting requests, the next in turn first.
    turns: VecDeque<Arc<str>>,
}

#[derive(Debug, Default)]
struct InstanceMemory {
    held: usize,
    /// Waiting requests, by ticket.
    waiting: BTreeMap<u64, QueueEntry>,
}

#[derive(Debug)]
struct QueueEntry {
    bytes: usize,
    granted: oneshot::Sender<()>,
}

/// Result of a turn.
enum GrantResult {
    Granted(usize),
    /// Only other identities can be served.
    Passed,
    /// There is no memory for the request whose turn it is.
    Full,
}

impl IdentityMemory {
    /// Grants the next request in turn, if there is memory for it and `free` bytes are left in total.
    fn next(&mut self, free: usize) -> GrantResult {
        for turn in 0..self.turns.len() {
            let name = &self.turns[turn];
            let Some(instance) = self.instances.get_mut(name) else { continue };
            let Some(first) = instance.waiting.first_entry() else { continue };
            let bytes = first.get().bytes;
            if instance.held + bytes > INSTANCE_MEMORY {
                continue;
            }
            if self.held + bytes > IDENTITY_MEMORY {
                return GrantResult::Passed;
            }
            if bytes > free {
                return GrantResult::Full;
            }
            // A waiting request is removed before its reservation is dropped, so the receiver exists.
            _ = first.remove().granted.send(());
            instance.held += bytes;
            self.held += bytes;
            let waits = !instance.waiting.is_empty();
            rotate(&mut self.turns, turn, waits);
            return GrantResult::Granted(bytes);
        }
        GrantResult::Passed
    }
}

/// Moves an entry that had its turn to the end, if it `waits` for another.
fn rotate(turns: &mut VecDeque<Arc<str>>, turn: usize, waits: bool) {
    let name = turns.remove(turn).filter(|_| waits);
    turns.extend(name);
}

impl MemoryState {
    fn wait(&mut self, identity: &Arc<str>, instance: &Arc<str>, waiting: QueueEntry) -> u64 {
        self.tickets += 1;
        let of_identity = self.identities.entry(Arc::clone(identity)).or_default();
        let of_instance = of_identity.instances.entry(Arc::clone(instance)).or_default();
        if of_identity.turns.is_empty() {
            self.turns.push_back(Arc::clone(identity));
        }
        if of_instance.waiting.is_empty() {
            of_identity.turns.push_back(Arc::clone(instance));
        }
        of_instance.waiting.insert(self.tickets, waiting);
        self.grant();
        self.tickets
    }

    /// Grants all requests for which there is memory.
    fn grant(&mut self) {
        let mut turn = 0;
        while let Some(name) = self.turns.get(turn) {
            let Some(identity) = self.identities.get_mut(name) else { return };
            match identity.next(TOTAL_MEMORY - self.held) {
                GrantResult::Granted(bytes) => {
                    self.held += bytes;
                    let waits = !identity.turns.is_empty();
                    rotate(&mut self.turns, turn, waits);
                }
                GrantResult::Passed => turn += 1,
                GrantResult::Full => return,
            }
        }
    }

    /// Releases a ticket, or removes it from the queue.
    fn release(&mut self, of: &Reservation) {
        let Some(identity) = self.identities.get_mut(&of.identity) else { return };
        let Some(instance) = identity.instances.get_mut(&of.instance) else { return };
        if instance.waiting.remove(&of.ticket).is_none() {
            instance.held -= of.bytes;
            identity.held -= of.bytes;
            self.held -= of.bytes;
        } else if instance.waiting.is_empty() {
            identity.turns.retain(|name| *name != of.instance);
            if identity.turns.is_empty() {
                self.turns.retain(|name| *name != of.identity);
            }
        }
        if instance.held == 0 && instance.waiting.is_empty() {
            identity.instances.remove(&of.instance);
        }
        if identity.instances.is_empty() {
            self.identities.remove(&of.identity);
        }
        self.grant();
    }
}

/// Memory for one request, or a place in the queue for it; released when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    limits: Arc<Limits>,
    identity: Arc<str>,
    instance: Arc<str>,
    ticket: u64,
    bytes: usize,
    /// Set until the reservation is granted.
    waits: Option<oneshot::Receiver<()>>,
}

impl Reservation {
    pub(crate) fn new(limits: &Arc<Limits>, identity: &Arc<str>, instance: &Arc<str>, bytes: usize) -> Self {
        // No longer request is read.
        let bytes = bytes.min(INSTANCE_MEMORY);
        let (granted, mut waits) = oneshot::channel();
        let ticket = lock(&limits.memory.0).wait(identity, instance, QueueEntry { bytes, granted });
        let waits = waits.try_recv().is_err().then_some(waits);
        let (identity, instance) = (Arc::clone(identity), Arc::clone(instance));
        Self { limits: Arc::clone(limits), identity, instance, ticket, bytes, waits }
    }

    /// Returns true if there is memory for the request.
    pub(crate) fn is_granted(&self) -> bool {
        self.waits.is_none()
    }

    /// Waits until there is memory for the request. Cancel safe.
    pub(crate) async fn granted(&mut self) {
        if let Some(waits) = &mut self.waits {
            _ = waits.await;
            self.waits = None;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock(&self.limits.memory.0).release(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn reserve(limits: &Arc<Limits>, identity: &str, instance: &str, bytes: usize) -> Reservation {
        Reservation::new(limits, &identity.into(), &instance.into(), bytes)
    }

    /// Returns true if the reservation has been granted.
    fn has(reservation: &mut Reservation) -> bool {
        if reservation.waits.as_mut().is_some_and(|waits| waits.try_recv().is_ok()) {
            reservation.waits = None;
        }
        reservation.is_granted()
    }

    fn is_empty(limits: &Limits) -> bool {
        let memory = lock(&limits.memory.0);
        memory.held == 0 && memory.identities.is_empty() && memory.turns.is_empty()
    }

    #[test]
    fn many_replicas_are_served_in_order_within_the_limit() {
        const REQUEST: usize = 350 << 10;
        let limits = Arc::<Limits>::default();
        let mut waiting: VecDeque<_> =
            (0..500).map(|replica| reserve(&limits, "a", &replica.to_string(), REQUEST)).collect();
        let mut served = 0;
        while let Some(mut first) = waiting.pop_front() {
            assert!(has(&mut first), "replica {served} of 500, first come first served");
            served += 1;
            assert!(lock(&limits.memory.0).held <= IDENTITY_MEMORY);
        }
        assert_eq!(served, 500);
        assert!(is_empty(&limits));
    }

    #[test]
    fn an_instance_delays_neither_its_replicas_nor_other_identities() {
        let limits = Arc::<Limits>::default();
        let mut held = Vec::new();
        for identity in 0..8 {
            held.extend((0..100).map(|_| reserve(&limits, &identity.to_string(), "evil", 4 * MIB)));
        }
        assert_eq!(held.iter().filter(|one| one.is_granted()).count(), 16);
        assert!(reserve(&limits, "0", "good", 4 * MIB).is_granted(), "a replica");
        assert!(reserve(&limits, "good", "good", 4 * MIB).is_granted(), "another identity");
        drop(held);
        assert!(is_empty(&limits));
    }

    #[test]
    fn a_waiting_request_is_not_starved_by_earlier_reservations() {
        let limits = Arc::<Limits>::default();
        // Four instances hold all of the identity's memory, and each waits for more.
        let names = ["1", "2", "3", "4"];
        let mut held: VecDeque<_> =
            (0..10).flat_map(|_| names).map(|name| reserve(&limits, "a", name, 4 * MIB)).collect();
        assert_eq!(held.iter().filter(|one| one.is_granted()).count(), 8);
        let mut good = reserve(&limits, "a", "good", 4 * MIB);
        let mut small = reserve(&limits, "a", "small", 1 << 10);
        assert!(!has(&mut good) && !has(&mut small));
        let mut released = 0;
        while !has(&mut good) {
            assert!(!has(&mut small), "a long request is not overtaken");
            let index = held.iter_mut().position(has).unwrap();
            held.remove(index);
            released += 1;
        }
        assert!(released <= 5, "{released} others were served before");
        drop((held, good, small));
        assert!(is_empty(&limits));
    }

    #[test]
    fn identities_share_the_total_limit_in_turns() {
        let limits = Arc::<Limits>::default();
        let mut held = Vec::new();
        for identity in 0..8 {
            for instance in 0..4 {
                held.extend(
                    (0..3).map(|_| reserve(&limits, &identity.to_string(), &instance.to_string(), 4 * MIB)),
                );
            }
        }
        assert_eq!(lock(&limits.memory.0).held, TOTAL_MEMORY);
        let mut good = reserve(&limits, "good", "good", 4 * MIB);
        assert!(!has(&mut good));
        for released in 0.. {
            if has(&mut good) {
                break;
            }
            assert!(released <= 8, "{released} others were served before");
            let index = held.iter_mut().position(has).unwrap();
            held.remove(index);
        }
        // A dropped reservation releases its place, whether it was granted or waited.
        drop(good);
        while let Some(last) = held.pop() {
            drop(last);
        }
        assert!(is_empty(&limits));
    }

    #[test]
    fn each_connection_can_receive_one_small_request() {
        use super::super::{Account, Place};
        let limits = Arc::<Limits>::default();
        let mut held = Vec::new();
        for identity in 0..8 {
            for instance in 0..4 {
                held.extend(
                    (0..2).map(|_| reserve(&limits, &identity.to_string(), &instance.to_string(), 4 * MIB)),
                );
            }
        }
        let account = Arc::new(Account::new(Arc::clone(&limits), String::new()));
        let place = |bytes| Place::of(&account, &"good".into(), &"good".into(), bytes);
        let small = place(SMALL);
        assert!(matches!(small, Place::Small(_)));
        assert!(matches!(place(SMALL), Place::Shared(ref shared) if !shared.is_granted()), "one at a time");
        drop(small);
        assert!(matches!(place(SMALL + 1), Place::Shared(_)));
        assert!(matches!(place(1), Place::Small(_)));
    }
}
