//! Limits the TLS handshakes for which the server computes at the same time.
//!
//! A connection holds a permit only while the server computes for it, so a silent client holds none. Handshakes in
//! progress take precedence over new ones: after a restart all clients connect at once, and a handshake should end
//! before its client times out. Within one priority, source addresses take turns.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, oneshot};

/// Number of permits: enough to keep all cores busy beside other work, and few enough for a short wait in the queue.
const PERMITS: usize = 64;
/// Connections that wait to begin their handshake. Beyond this number the server accepts no more; others wait in the
/// kernel's queue.
const MAX_WAITING: usize = 1_024;
/// Connections of one address that count towards [`MAX_WAITING`], so that one address cannot stop the server from
/// accepting.
const MAX_WAITING_PER_ADDRESS: usize = 64;

/// Priority of a connection that waits for a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Low: the handshake has not begun.
    New,
    /// High: the handshake is in progress.
    InProgress,
}

/// The permits of one server.
#[derive(Debug)]
pub(crate) struct HandshakeLimiter {
    state: Mutex<LimiterState>,
    /// Notified when a connection stops waiting to begin its handshake.
    dequeued: Notify,
}

#[derive(Debug)]
struct LimiterState {
    /// Permits that no connection holds.
    free: usize,
    new: Queue,
    in_progress: Queue,
}

/// Connections that wait for a permit.
#[derive(Debug, Default)]
struct Queue {
    /// By source address, the oldest first.
    waiting: HashMap<IpAddr, VecDeque<oneshot::Sender<Permit>>>,
    /// Source addresses with waiting connections, the next in turn first.
    turns: VecDeque<IpAddr>,
    /// Number of waiting connections, of each address at most [`MAX_WAITING_PER_ADDRESS`].
    length: usize,
}

impl Queue {
    fn push(&mut self, from: IpAddr, connection: oneshot::Sender<Permit>) {
        let of_address = self.waiting.entry(from).or_default();
        if of_address.is_empty() {
            self.turns.push_back(from);
        }
        of_address.push_back(connection);
        self.length += usize::from(of_address.len() <= MAX_WAITING_PER_ADDRESS);
    }

    fn pop(&mut self) -> Option<oneshot::Sender<Permit>> {
        let from = self.turns.pop_front()?;
        let Entry::Occupied(mut of_address) = self.waiting.entry(from) else { return None };
        let next = of_address.get_mut().pop_front();
        let left = of_address.get().len();
        self.length -= usize::from(left < MAX_WAITING_PER_ADDRESS);
        if left == 0 {
            of_address.remove();
        } else {
            self.turns.push_back(from);
        }
        next
    }
}

impl LimiterState {
    /// Removes and returns the next connection. If none waits, counts the permit as free.
    fn next(&mut self) -> Option<oneshot::Sender<Permit>> {
        let next = self.in_progress.pop().or_else(|| self.new.pop());
        self.free += usize::from(next.is_none());
        next
    }
}

impl HandshakeLimiter {
    pub(crate) fn new() -> Arc<Self> {
        let state = LimiterState { free: PERMITS, new: Queue::default(), in_progress: Queue::default() };
        Arc::new(Self { state: Mutex::new(state), dequeued: Notify::new() })
    }

    /// Waits for a permit. `None` does not occur: no queue drops a waiting connection.
    pub(crate) async fn acquire(self: &Arc<Self>, from: IpAddr, priority: Priority) -> Option<Permit> {
        let granted = {
            let mut state = self.state();
            if state.free > 0 {
                state.free -= 1;
                return Some(Permit(Some(Arc::clone(self))));
            }
            let (connection, granted) = oneshot::channel();
            let queue = if priority == Priority::New { &mut state.new } else { &mut state.in_progress };
            queue.push(from.to_canonical(), connection);
            granted
        };
        granted.await.ok()
    }

    /// Waits until the server should accept another connection. Supports one caller at a time.
    pub(crate) async fn ready_to_accept(&self) {
        while self.state().new.length >= MAX_WAITING {
            self.dequeued.notified().await;
        }
    }

    fn state(&self) -> MutexGuard<'_, LimiterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A permit to compute for one handshake. Passes to the next waiting connection when dropped.
#[derive(Debug)]
pub(crate) struct Permit(Option<Arc<HandshakeLimiter>>);

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(limiter) = self.0.take() else { return };
        let mut permit = Self(Some(Arc::clone(&limiter)));
        loop {
            let next = limiter.state().next();
            limiter.dequeued.notify_one();
            let Some(next) = next else { break };
            match next.send(permit) {
                Ok(()) => return,
                // The connection was closed while it waited.
                Err(returned) => permit = returned,
            }
        }
        // `next` has counted the permit as free, so dropping it must not count it again.
        permit.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIORITIES: [Priority; 2] = [Priority::New, Priority::InProgress];

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Takes all permits.
    async fn all(limiter: &Arc<HandshakeLimiter>) -> Vec<Permit> {
        let mut held = Vec::new();
        while limiter.state().free > 0 {
            held.extend(limiter.acquire(address(0), Priority::New).await);
        }
        held
    }

    /// Tasks of connections. Each waits for a permit, records its address and releases the permit.
    #[derive(Default)]
    struct Waiting {
        served: Arc<Mutex<Vec<IpAddr>>>,
        tasks: Vec<tokio::task::JoinHandle<()>>,
    }

    impl Waiting {
        async fn add(&mut self, limiter: &Arc<HandshakeLimiter>, from: IpAddr, priority: Priority) {
            let (served, limiter) = (Arc::clone(&self.served), Arc::clone(limiter));
            self.tasks.push(tokio::spawn(async move {
                let _permit = limiter.acquire(from, priority).await;
                served.lock().unwrap().push(from);
            }));
            tokio::task::yield_now().await;
        }

        /// Returns the addresses in the order in which they got their permits.
        async fn served(self) -> Vec<IpAddr> {
            for task in self.tasks {
                task.await.unwrap();
            }
            self.served.lock().unwrap().clone()
        }
    }

    fn is_idle(limiter: &HandshakeLimiter) -> bool {
        let state = limiter.state();
        let queues = [&state.new, &state.in_progress];
        state.free == PERMITS
            && queues
                .iter()
                .all(|queue| queue.length == 0 && queue.waiting.is_empty() && queue.turns.is_empty())
    }

    #[tokio::test]
    async fn addresses_take_turns_and_handshakes_in_progress_take_precedence() {
        let limiter = HandshakeLimiter::new();
        let mut held = all(&limiter).await;
        let mut waiting = Waiting::default();
        for _ in 0..100 {
            waiting.add(&limiter, address(1), Priority::New).await;
        }
        waiting.add(&limiter, address(2), Priority::New).await;
        waiting.add(&limiter, "::ffff:10.0.0.1".parse().unwrap(), Priority::New).await;
        waiting.add(&limiter, address(3), Priority::New).await;
        for _ in 0..2 {
            waiting.add(&limiter, address(1), Priority::InProgress).await;
        }
        waiting.add(&limiter, address(2), Priority::InProgress).await;
        // One permit serves all of them.
        held.pop();
        let served = waiting.served().await;
        assert_eq!(served[..6], [1, 2, 1, 1, 2, 3].map(address));
        assert_eq!(served[6..].len(), 100);
        drop(held);
        assert!(is_idle(&limiter));
    }

    #[tokio::test]
    async fn a_closed_connection_holds_no_permit() {
        for priority in PRIORITIES {
            let limiter = HandshakeLimiter::new();
            let mut held = all(&limiter).await;
            let mut waiting = Waiting::default();
            for from in 0..4 {
                waiting.add(&limiter, address(from), priority).await;
            }
            // One connection waits; another has been granted a permit that it has not received yet.
            waiting.tasks.remove(2).abort();
            held.pop();
            waiting.tasks.remove(0).abort();
            assert_eq!(waiting.served().await, [1, 3].map(address));
            drop(held);
            assert!(is_idle(&limiter));
        }
    }

    #[tokio::test]
    async fn many_addresses_stop_the_server_from_accepting_but_one_address_does_not() {
        let limiter = HandshakeLimiter::new();
        let held = all(&limiter).await;
        let mut waiting = Waiting::default();
        for _ in 0..2 * MAX_WAITING {
            waiting.add(&limiter, address(1), Priority::New).await;
        }
        limiter.ready_to_accept().await;
        for from in 0..u32::try_from(MAX_WAITING - MAX_WAITING_PER_ADDRESS).unwrap() {
            waiting.add(&limiter, IpAddr::from(from.to_be_bytes()), Priority::New).await;
        }
        let accepts = tokio::spawn({
            let limiter = Arc::clone(&limiter);
            async move { limiter.ready_to_accept().await }
        });
        tokio::task::yield_now().await;
        assert!(!accepts.is_finished());
        drop(held);
        accepts.await.unwrap();
        assert_eq!(waiting.served().await.len(), 3 * MAX_WAITING - MAX_WAITING_PER_ADDRESS);
        assert!(is_idle(&limiter));
    }
}
