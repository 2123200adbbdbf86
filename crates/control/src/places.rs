//! Places for the CPU work of TLS handshakes.
//!
//! A connection has a place only while the server computes for it, so a silent client has none. Handshakes in progress come
//! before new ones: after a restart all clients connect at once, and a handshake that has begun should end before its client
//! gives up. Among those that wait for the same, addresses take turns.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, oneshot};

/// Places in all: enough to keep the cores busy beside other work, few enough that the next in turn soon has one.
const PLACES: usize = 64;
/// Connections that wait to begin their handshake, beyond which no more are accepted. The others wait in the kernel's queue.
const CROWD: usize = 1_024;
/// Waiting connections that count of one address at most, so that one address cannot keep others in the kernel's queue.
const CROWD_BY_ADDRESS: usize = 64;

/// Purpose of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Its handshake begins.
    First,
    /// Its handshake is in progress.
    Later,
}

/// The places of a server.
#[derive(Debug)]
pub(crate) struct Places {
    state: Mutex<State>,
    /// A connection no longer waits to begin its handshake.
    begun: Notify,
}

#[derive(Debug)]
struct State {
    free: usize,
    first: Queue,
    later: Queue,
}

/// Connections that wait for a place.
#[derive(Debug, Default)]
struct Queue {
    /// By address, the first to come first.
    waiting: HashMap<IpAddr, VecDeque<oneshot::Sender<Place>>>,
    /// The addresses, the next in turn first.
    turns: VecDeque<IpAddr>,
    /// Waiting connections, of each address at most [`CROWD_BY_ADDRESS`].
    crowd: usize,
}

impl Queue {
    fn push(&mut self, from: IpAddr, waits: oneshot::Sender<Place>) {
        let of_address = self.waiting.entry(from).or_default();
        if of_address.is_empty() {
            self.turns.push_back(from);
        }
        of_address.push_back(waits);
        self.crowd += usize::from(of_address.len() <= CROWD_BY_ADDRESS);
    }

    fn pop(&mut self) -> Option<oneshot::Sender<Place>> {
        let from = self.turns.pop_front()?;
        let Entry::Occupied(mut of_address) = self.waiting.entry(from) else { return None };
        let next = of_address.get_mut().pop_front();
        let left = of_address.get().len();
        self.crowd -= usize::from(left < CROWD_BY_ADDRESS);
        if left == 0 {
            of_address.remove();
        } else {
            self.turns.push_back(from);
        }
        next
    }
}

impl State {
    /// Returns the next connection in turn. If there is none, the place that was meant for it is free.
    fn next(&mut self) -> Option<oneshot::Sender<Place>> {
        let next = self.later.pop().or_else(|| self.first.pop());
        self.free += usize::from(next.is_none());
        next
    }
}

impl Places {
    pub(crate) fn new() -> Arc<Self> {
        let state = State { free: PLACES, first: Queue::default(), later: Queue::default() };
        Arc::new(Self { state: Mutex::new(state), begun: Notify::new() })
    }

    /// Waits for a place. `None` does not occur: no queue drops a waiting connection.
    pub(crate) async fn take(self: &Arc<Self>, from: IpAddr, step: Step) -> Option<Place> {
        let granted = {
            let mut state = self.state();
            if state.free > 0 {
                state.free -= 1;
                return Some(Place(Some(Arc::clone(self))));
            }
            let (waits, granted) = oneshot::channel();
            let queue = if step == Step::First { &mut state.first } else { &mut state.later };
            queue.push(from.to_canonical(), waits);
            granted
        };
        granted.await.ok()
    }

    /// Waits until another connection should be accepted. For one caller at a time.
    pub(crate) async fn uncrowded(&self) {
        while self.state().first.crowd >= CROWD {
            self.begun.notified().await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place, given to the next connection in turn when dropped.
#[derive(Debug)]
pub(crate) struct Place(Option<Arc<Places>>);

impl Drop for Place {
    fn drop(&mut self) {
        let Some(places) = self.0.take() else { return };
        let mut place = Self(Some(Arc::clone(&places)));
        loop {
            let next = places.state().next();
            places.begun.notify_one();
            let Some(next) = next else { break };
            match next.send(place) {
                Ok(()) => return,
                // It was closed while it waited.
                Err(back) => place = back,
            }
        }
        // It is counted as free.
        place.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: [Step; 2] = [Step::First, Step::Later];

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Takes all places.
    async fn all(places: &Arc<Places>) -> Vec<Place> {
        let mut held = Vec::new();
        while places.state().free > 0 {
            held.extend(places.take(address(0), Step::First).await);
        }
        held
    }

    /// Connections that wait, and record their address once they have a place, which they give back at once.
    #[derive(Default)]
    struct Waiting {
        served: Arc<Mutex<Vec<IpAddr>>>,
        tasks: Vec<tokio::task::JoinHandle<()>>,
    }

    impl Waiting {
        async fn add(&mut self, places: &Arc<Places>, from: IpAddr, step: Step) {
            let (served, places) = (Arc::clone(&self.served), Arc::clone(places));
            self.tasks.push(tokio::spawn(async move {
                let _place = places.take(from, step).await;
                served.lock().unwrap().push(from);
            }));
            tokio::task::yield_now().await;
        }

        /// Returns the addresses in the order in which they were served.
        async fn served(self) -> Vec<IpAddr> {
            for task in self.tasks {
                task.await.unwrap();
            }
            self.served.lock().unwrap().clone()
        }
    }

    fn is_idle(places: &Places) -> bool {
        let state = places.state();
        let queues = [&state.first, &state.later];
        state.free == PLACES
            && queues
                .iter()
                .all(|queue| queue.crowd == 0 && queue.waiting.is_empty() && queue.turns.is_empty())
    }

    #[tokio::test]
    async fn addresses_take_turns_and_handshakes_in_progress_come_first() {
        let places = Places::new();
        let mut held = all(&places).await;
        let mut waiting = Waiting::default();
        for _ in 0..100 {
            waiting.add(&places, address(1), Step::First).await;
        }
        waiting.add(&places, address(2), Step::First).await;
        waiting.add(&places, "::ffff:10.0.0.1".parse().unwrap(), Step::First).await;
        waiting.add(&places, address(3), Step::First).await;
        for _ in 0..2 {
            waiting.add(&places, address(1), Step::Later).await;
        }
        waiting.add(&places, address(2), Step::Later).await;
        // One place goes round.
        held.pop();
        let served = waiting.served().await;
        assert_eq!(served[..6], [1, 2, 1, 1, 2, 3].map(address));
        assert_eq!(served[6..].len(), 100);
        drop(held);
        assert!(is_idle(&places));
    }

    #[tokio::test]
    async fn who_goes_away_keeps_no_place() {
        for step in STEPS {
            let places = Places::new();
            let mut held = all(&places).await;
            let mut waiting = Waiting::default();
            for from in 0..4 {
                waiting.add(&places, address(from), step).await;
            }
            // One waits, one has been granted a place that it has not seen yet.
            waiting.tasks.remove(2).abort();
            held.pop();
            waiting.tasks.remove(0).abort();
            assert_eq!(waiting.served().await, [1, 3].map(address));
            drop(held);
            assert!(is_idle(&places));
        }
    }

    #[tokio::test]
    async fn a_crowd_of_many_addresses_waits_in_the_kernel_but_one_address_is_no_crowd() {
        let places = Places::new();
        let held = all(&places).await;
        let mut waiting = Waiting::default();
        for _ in 0..2 * CROWD {
            waiting.add(&places, address(1), Step::First).await;
        }
        places.uncrowded().await;
        for from in 0..u32::try_from(CROWD - CROWD_BY_ADDRESS).unwrap() {
            waiting.add(&places, IpAddr::from(from.to_be_bytes()), Step::First).await;
        }
        let accepts = tokio::spawn({
            let places = Arc::clone(&places);
            async move { places.uncrowded().await }
        });
        tokio::task::yield_now().await;
        assert!(!accepts.is_finished());
        drop(held);
        accepts.await.unwrap();
        assert_eq!(waiting.served().await.len(), 3 * CROWD - CROWD_BY_ADDRESS);
        assert!(is_idle(&places));
    }
}
