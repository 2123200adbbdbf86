//! The threads that carry traffic, and how the rest of the process talks to them.
//!
//! Each worker is a thread with a single-threaded runtime and everything it needs for itself. It is told things
//! (a new configuration, the end) and asked for things (its figures) by messages; workers never wait for each
//! other.

use std::{
    collections::{HashMap, HashSet},
    future::poll_fn,
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
    task::Poll,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tokio::{
    net::TcpListener,
    runtime::{Builder, LocalOptions},
    sync::{mpsc, oneshot},
    task::{JoinHandle as Task, spawn_local},
};

use crate::{
    accept::listen,
    call::export,
    overload::drain::Side,
    telemetry::ShardSnapshot,
    upstream::pool,
    worker::{Worker, revalidation},
};
use skysail_http::timer;
use skysail_policy::config::{Listener, Snapshot, listener::Direction};

pub use crate::{upstream::pool::HostStats, worker::Shared};

/// How long the end waits for collectors to take what was told.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// All workers of the process.
pub struct Workers {
    shared: Shared,
    senders: Vec<mpsc::UnboundedSender<Command>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Sockets open now: listener and configured address, and the address it came to be.
    bound: tokio::sync::Mutex<HashMap<(Arc<str>, SocketAddr), SocketAddr>>,
}

/// A listener that could not be bound.
#[derive(Debug, thiserror::Error)]
#[error("listener {listener} cannot be bound to {address}: {cause}")]
pub struct BindError {
    /// The listener's name.
    pub listener: Arc<str>,
    /// The address.
    pub address: SocketAddr,
    /// Why.
    #[source]
    pub cause: std::io::Error,
}

/// What a worker is told.
enum Command {
    Publish(Box<Publish>),
    Scrape(oneshot::Sender<ShardSnapshot>),
    Clusters(oneshot::Sender<Vec<HostStats>>),
    Refuse(bool, oneshot::Sender<()>),
    Drain(Drain, oneshot::Sender<()>),
    Quiet(&'static [Direction], Duration, oneshot::Sender<()>),
    End(Duration, oneshot::Sender<usize>),
}

/// What is drained, and how.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// Of which listeners.
    pub directions: &'static [Direction],
    /// Whether they take no more connections.
    pub close: bool,
    /// How much time connections have. Those without a request end after a second, or a quarter of it.
    pub patience: Duration,
}

struct Publish {
    snapshot: Snapshot,
    open: Vec<(Arc<str>, SocketAddr, std::net::TcpListener)>,
    close: Vec<(Arc<str>, SocketAddr)>,
    done: oneshot::Sender<()>,
}

impl Workers {
    /// Starts so many workers, at least one. They do nothing until the first [`Self::publish`].
    ///
    /// # Errors
    /// When the system gives no thread or no event queue.
    pub fn start(concurrency: usize, shared: Shared) -> anyhow::Result<Self> {
        let (mut senders, mut threads) = (Vec::new(), Vec::new());
        for index in 0..concurrency.max(1) {
            let (sender, receiver) = mpsc::unbounded_channel();
            let (started, start) = std::sync::mpsc::channel();
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
                // It belongs to the thread it is made on.
                // Its timers are `timer`'s: the runtime's would be asked before each wait.
                let runtime = Builder::new_current_thread().enable_io().build_local(LocalOptions::default());
                let ready = runtime.and_then(|runtime| {
                    let _entered = runtime.enter();
                    let timers = timer::start()?;
                    Ok((runtime, timers))
                });
                // Who starts the workers waits for this.
                match ready {
                    Ok((runtime, timers)) => {
                        let _ = started.send(Ok(()));
                        runtime.block_on(run(Worker::new(shared), timers, receiver));
                    }
                    Err(error) => {
                        let _ = started.send(Err(error));
                    }
                }
            });
            threads.push(thread.with_context(|| format!("worker {index} cannot get a thread"))?);
            start
                .recv()
                .unwrap_or_else(|_| Err(std::io::ErrorKind::BrokenPipe.into()))
                .with_context(|| format!("worker {index} cannot get an event loop"))?;
            senders.push(sender);
        }
        Ok(Self { shared, senders, threads: Mutex::new(threads), bound: tokio::sync::Mutex::default() })
    }

    /// Makes this the configuration of every worker, and returns when all have it. Listeners whose sockets cannot be
    /// bound are named; everything else is in force all the same.
    ///
    /// # Errors
    /// The listeners that could not be bound.
    pub async fn publish(&self, snapshot: Snapshot) -> Result<(), Vec<BindError>> {
        let mut bound = self.bound.lock().await;
        let wanted: HashSet<_> =
            snapshot.listeners.by_name.values().filter(|listener| listener.bind).flat_map(sockets).collect();
        let close: Vec<_> = bound.keys().filter(|key| !wanted.contains(key)).cloned().collect();
        bound.retain(|key, _| wanted.contains(key));
        let mut open: Vec<Vec<_>> = self.senders.iter().map(|_| Vec::new()).collect();
        let mut errors = Vec::new();
        for key in wanted {
            if bound.contains_key(&key) {
                continue;
            }
            let (listener, address) = key.clone();
            match listen::bind(address, self.senders.len()) {
                Ok(sockets) => {
                    let came_to_be = sockets.first().and_then(|socket| socket.local_addr().ok());
                    bound.insert(key, came_to_be.unwrap_or(address));
                    for (worker, socket) in open.iter_mut().zip(sockets) {
                        worker.push((listener.clone(), address, socket));
                    }
                }
                Err(cause) => errors.push(BindError { listener, address, cause }),
            }
        }
        self.shared.snapshot.store(Arc::new(snapshot.clone()));
        let mut waiting = Vec::new();
        for (sender, open) in self.senders.iter().zip(open) {
            let (done, wait) = oneshot::channel();
            let (snapshot, close) = (snapshot.clone(), close.clone());
            let _ = sender.send(Command::Publish(Box::new(Publish { snapshot, open, close, done })));
            waiting.push(wait);
        }
        for wait in waiting {
            let _ = wait.await;
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// The addresses listened on: listener, configured address, and what it came to be (ports).
    pub async fn addresses(&self) -> Vec<(Arc<str>, SocketAddr, SocketAddr)> {
        let bound = self.bound.lock().await;
        bound.iter().map(|((name, wanted), real)| (name.clone(), *wanted, *real)).collect()
    }

    /// Every worker's metrics.
    pub async fn scrape(&self) -> Vec<ShardSnapshot> {
        self.ask(Command::Scrape).await
    }

    /// Figures of every endpoint, by worker.
    pub async fn clusters(&self) -> Vec<HostStats> {
        self.ask(Command::Clusters).await.into_iter().flatten().collect()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.senders.len()
    }

    /// Has all workers refuse requests, or no longer.
    pub(crate) async fn refuse_requests(&self, refuse: bool) {
        self.ask(|done| Command::Refuse(refuse, done)).await;
    }

    /// Tells clients to go, by `connection: close` or GOAWAY; connections end once they have. Returns when
    /// all workers have begun.
    pub async fn begin_drain(&self, drain: Drain) {
        self.ask(|begun| Command::Drain(drain, begun)).await;
    }

    /// Closes listeners and idle connections, lets requests under way finish for at most so long, and
    /// returns how many connections were cut off.
    ///
    /// Outbound listeners serve on until nothing that came in is left on any worker: who answers that may need them.
    pub async fn drain(&self, patience: Duration) -> usize {
        const FIRST: &[Direction] = &[Direction::Inbound, Direction::Unspecified];
        let begun = Instant::now();
        self.begin_drain(Drain { directions: FIRST, close: true, patience }).await;
        self.ask(|quiet| Command::Quiet(FIRST, patience, quiet)).await;
        let left = patience.saturating_sub(begun.elapsed());
        self.begin_drain(Drain { directions: Direction::ALL, close: true, patience: left }).await;
        self.ask(|done| Command::End(left, done)).await.into_iter().sum()
    }

    /// Ends the threads. Call [`Self::drain`] first.
    pub fn join(self) {
        drop(self.senders);
        for thread in self.threads.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let _ = thread.join();
        }
    }

    async fn ask<T>(&self, command: impl Fn(oneshot::Sender<T>) -> Command) -> Vec<T> {
        let answers: Vec<_> = self
            .senders
            .iter()
            .map(|worker| {
                let (sender, answer) = oneshot::channel();
                let _ = worker.send(command(sender));
                answer
            })
            .collect();
        let mut all = Vec::with_capacity(answers.len());
        for answer in answers {
            all.extend(answer.await);
        }
        all
    }
}

fn sockets(listener: &Arc<Listener>) -> impl Iterator<Item = (Arc<str>, SocketAddr)> {
    listener.addresses.iter().map(|address| (listener.name.clone(), *address))
}

/// A worker's main task: does what it is told until nobody can tell it anything.
async fn run(
    worker: Rc<Worker>,
    timers: impl Future<Output = ()> + 'static,
    mut commands: mpsc::UnboundedReceiver<Command>,
) {
    let mut sockets = HashMap::new();
    let timers = spawn_local(timers);
    let [swept, watched, judged, taking_turns] = std::array::from_fn(|_| worker.clone());
    let judge = spawn_local(steadily(async move || revalidation::wake(judged.clone()).await));
    let sweeper = spawn_local(steadily(async move || sweep(swept.clone()).await));
    let watch = spawn_local(steadily(async move || watched.overload.watch().await));
    let turns = spawn_local(steadily(async move || taking_turns.overload.turns.run().await));
    steadily(async || obey(&worker, &mut sockets, &mut commands).await).await;
    turns.abort();
    judge.abort();
    watch.abort();
    sweeper.abort();
    timers.abort();
}

/// Goes on after a panic, which is a mistake of ours and told by the log: what serves all connections must not end with
/// what one of them led to. (A connection's own task ends with it, and with that the connection.)
///
/// It begins again at once the first time, and ever later while it panics each time, so that neither the log nor the CPU
/// is full of it.
async fn steadily(mut work: impl AsyncFnMut()) {
    const LONGEST: Duration = Duration::from_secs(1);
    let mut pause = Duration::ZERO;
    loop {
        let begun = Instant::now();
        let mut once = Box::pin(work());
        let ended = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| once.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(())) => Poll::Ready(true),
            Err(_) => Poll::Ready(false),
        });
        if ended.await {
            return;
        }
        if begun.elapsed() > LONGEST {
            pause = Duration::ZERO;
        }
        timer::sleep(pause).await;
        pause = (2 * pause).clamp(Duration::from_millis(1), LONGEST);
    }
}

/// Does what commands say until nobody can give any.
async fn obey(
    worker: &Rc<Worker>,
    sockets: &mut HashMap<(Arc<str>, SocketAddr), Socket>,
    commands: &mut mpsc::UnboundedReceiver<Command>,
) {
    while let Some(command) = commands.recv().await {
        match command {
            Command::Publish(publish) => apply(worker, sockets, *publish),
            Command::Scrape(answer) => {
                let _ = answer.send(worker.shard.snapshot());
            }
            Command::Clusters(answer) => {
                let _ = answer.send(worker.clusters.stats());
            }
            Command::Refuse(refuse, answer) => {
                worker.overload.refuse_all(refuse);
                let _ = answer.send(());
            }
            Command::Drain(drain, answer) => {
                begin_drain(worker, sockets, drain);
                let _ = answer.send(());
            }
            // What waits holds up no other command: outbound listeners need the newest endpoints to the last.
            Command::Quiet(directions, patience, answer) => {
                let worker = worker.clone();
                spawn_local(async move {
                    quiet(&worker, directions, patience).await;
                    let _ = answer.send(());
                });
            }
            Command::End(patience, answer) => {
                let worker = worker.clone();
                spawn_local(async move {
                    worker.end();
                    let cut = quiet(&worker, Direction::ALL, patience).await;
                    export::finish(&worker.exporters, LAST_WORDS).await;
                    let _ = answer.send(cut);
                });
            }
        }
    }
}

/// A listening socket on one worker.
struct Socket {
    name: Arc<str>,
    side: Rc<Side>,
    listener: Rc<TcpListener>,
    task: Task<()>,
}

fn apply(worker: &Rc<Worker>, sockets: &mut HashMap<(Arc<str>, SocketAddr), Socket>, publish: Publish) {
    worker.update(publish.snapshot);
    for key in publish.close {
        if let Some(socket) = sockets.remove(&key) {
            close(worker, socket);
        }
    }
    let snapshot = worker.snapshot();
    for (name, address, socket) in publish.open {
        let Some(listener) = snapshot.listeners.by_name.get(&name) else { continue };
        let side = worker.side(listener.direction);
        // What is drained gets no new listeners.
        if side.is_closed() {
            continue;
        }
        match TcpListener::from_std(socket) {
            Ok(listener) => {
                let listener = Rc::new(listener);
                let (of, by, called, own) = (worker.clone(), side.clone(), name.clone(), listener.clone());
                let accept = async move || {
                    listen::accept(of.clone(), by.clone(), called.clone(), own.clone()).await;
                };
                let task = spawn_local(steadily(accept));
                let socket = Socket { name: name.clone(), side: side.clone(), listener, task };
                sockets.insert((name, address), socket);
            }
            Err(error) => tracing::error!("listener {name} on {address} cannot be watched: {error}"),
        }
    }
    let _ = publish.done.send(());
}

fn begin_drain(
    worker: &Rc<Worker>,
    sockets: &mut HashMap<(Arc<str>, SocketAddr), Socket>,
    Drain { directions, close: closes, patience }: Drain,
) {
    for side in directions.iter().map(|direction| worker.side(*direction)) {
        if closes {
            side.close();
        }
        side.drain(patience);
    }
    for (_, socket) in sockets.extract_if(|_, socket| socket.side.is_closed()) {
        close(worker, socket);
    }
}

/// Takes the connections that wait on a socket already, so that none is reset, and closes it.
fn close(worker: &Rc<Worker>, socket: Socket) {
    socket.task.abort();
    while let Some((tcp, source)) = listen::waiting(&socket.listener) {
        let (side, name) = (socket.side.clone(), socket.name.clone());
        spawn_local(crate::accept::connection::serve(worker.clone(), side, name, tcp, source));
    }
}

async fn sweep(worker: Rc<Worker>) {
    loop {
        timer::sleep(pool::SWEEP).await;
        let now = Instant::now();
        worker.clusters.sweep(now);
        worker.shard.sweep(now, &worker.snapshot());
        if worker.shared.limits.end_with_certificate {
            worker.begin_epoch();
        }
    }
}

/// Waits until no connection is left, and says how many are if that takes too long.
async fn quiet(worker: &Worker, directions: &[Direction], patience: Duration) -> usize {
    let sides = || directions.iter().map(|direction| worker.side(*direction));
    let emptied = async {
        for side in sides() {
            side.emptied().await;
        }
    };
    timer::timeout(patience, emptied).await;
    sides().map(|side| side.connections()).sum()
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn what_serves_all_goes_on_after_a_panic() {
        let mut times = 0;
        let work = steadily(async || {
            times += 1;
            yield_now().await;
            assert!(times > 3, "this is meant to be");
        });
        let timers = timer::start().unwrap();
        tokio::select! {
            () = work => {}
            () = timers => unreachable!("timers go on for ever"),
        }
        assert_eq!(times, 4);
    }
}
