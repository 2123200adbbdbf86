//! The worker threads, which carry all traffic, and the commands that the rest of the process sends them.
//!
//! A worker is a thread with a single-threaded runtime and its own state. Commands publish a configuration, request
//! statistics, or drain the worker. Workers never wait for each other.

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
    runtime::{Builder, LocalOptions},
    sync::{mpsc, oneshot},
    task::{JoinHandle as Task, spawn_local},
};

use crate::{
    accept::listen::{self, ListeningSocket, PipeFile},
    call::export,
    overload::drain::ConnectionSet,
    telemetry::ShardSnapshot,
    upstream::pool,
    worker::{Worker, revalidation},
};
use skysail_http::timer;
use skysail_policy::config::{Listener, Snapshot, listener::Direction};

pub use crate::{upstream::pool::HostStats, worker::Shared};

/// Time that collectors have to accept the last batches at shutdown.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// All workers of the process.
pub struct Workers {
    shared: Shared,
    senders: Vec<mpsc::UnboundedSender<Command>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Open sockets by listener name and configured address.
    bound: tokio::sync::Mutex<HashMap<(Arc<str>, SocketAddr), Bound>>,
}

/// An open socket.
struct Bound {
    /// Actual address.
    address: SocketAddr,
    /// File of a Unix domain socket.
    file: Option<PipeFile>,
}

/// A listener that could not be bound.
#[derive(Debug, thiserror::Error)]
#[error("listener {listener} cannot be bound to {address}: {cause}")]
pub struct BindError {
    /// Name of the listener.
    pub listener: Arc<str>,
    /// Configured address.
    pub address: SocketAddr,
    /// Error of the system.
    #[source]
    pub cause: std::io::Error,
}

/// A command to a worker. The senders carry its response.
enum Command {
    Publish(Box<Publish>),
    Scrape(oneshot::Sender<ShardSnapshot>),
    Clusters(oneshot::Sender<Vec<HostStats>>),
    Refuse(bool, oneshot::Sender<()>),
    Drain(Drain, oneshot::Sender<()>),
    Quiet(&'static [Direction], Duration, oneshot::Sender<()>),
    End(Duration, oneshot::Sender<usize>),
}

/// A drain of connections.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// Directions of the listeners whose connections are drained.
    pub directions: &'static [Direction],
    /// Whether the listeners stop accepting connections.
    pub close: bool,
    /// Drain time. Connections without a request end after a second, or after a quarter of this if that is less.
    pub timeout: Duration,
}

struct Publish {
    snapshot: Snapshot,
    open: Vec<(Arc<str>, SocketAddr, std::net::TcpListener)>,
    close: Vec<(Arc<str>, SocketAddr)>,
    done: oneshot::Sender<()>,
}

impl Workers {
    /// Starts `concurrency` workers, at least one. They do nothing until the first [`Self::publish`].
    ///
    /// # Errors
    /// The system provides no thread or no event queue.
    pub fn start(concurrency: usize, shared: Shared) -> anyhow::Result<Self> {
        let (mut senders, mut threads) = (Vec::new(), Vec::new());
        for index in 0..concurrency.max(1) {
            let (sender, receiver) = mpsc::unbounded_channel();
            let (started, start) = std::sync::mpsc::channel();
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
                // The runtime must be built on its thread. Its own timers stay off: they would be checked before each
                // wait, and `timer` replaces them.
                let runtime = Builder::new_current_thread().enable_io().build_local(LocalOptions::default());
                let ready = runtime.and_then(|runtime| {
                    let _entered = runtime.enter();
                    let timers = timer::start()?;
                    Ok((runtime, timers))
                });
                // `start` waits for this result.
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
            threads.push(thread.with_context(|| format!("cannot start the thread of worker {index}"))?);
            start
                .recv()
                .unwrap_or_else(|_| Err(std::io::ErrorKind::BrokenPipe.into()))
                .with_context(|| format!("cannot start the event loop of worker {index}"))?;
            senders.push(sender);
        }
        Ok(Self { shared, senders, threads: Mutex::new(threads), bound: tokio::sync::Mutex::default() })
    }

    /// Publishes a configuration to every worker, and returns once it is in effect on all of them.
    ///
    /// # Errors
    /// The listeners that could not be bound. The rest of the configuration is in effect nevertheless.
    pub async fn publish(&self, snapshot: Snapshot) -> Result<(), Vec<BindError>> {
        let mut bound = self.bound.lock().await;
        let wanted: HashSet<_> =
            snapshot.listeners.by_name.values().filter(|listener| listener.bind).flat_map(sockets).collect();
        let closed: Vec<_> = bound.extract_if(|key, _| !wanted.contains(key)).collect();
        let (close, files): (Vec<_>, Vec<_>) = closed.into_iter().map(|(key, of)| (key, of.file)).unzip();
        let mut open: Vec<Vec<_>> = self.senders.iter().map(|_| Vec::new()).collect();
        let mut errors = Vec::new();
        for key in wanted {
            if bound.contains_key(&key) {
                continue;
            }
            let (listener, address) = key.clone();
            let pipe = snapshot.listeners.by_name.get(&listener).and_then(|listener| listener.pipe.clone());
            let sockets = match &pipe {
                Some(path) => listen::bind_pipe(path, self.senders.len()),
                None => listen::bind(address, self.senders.len()),
            };
            match sockets {
                Ok(sockets) => {
                    let actual = sockets.first().and_then(|socket| socket.local_addr().ok());
                    let file = pipe.as_deref().and_then(PipeFile::at);
                    bound.insert(key, Bound { address: actual.unwrap_or(address), file });
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
        // Until then, clients may connect to the old sockets.
        files.into_iter().flatten().for_each(PipeFile::remove);
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Returns the listening sockets: listener name, configured address, and actual address (which differs for port 0).
    pub async fn addresses(&self) -> Vec<(Arc<str>, SocketAddr, SocketAddr)> {
        let bound = self.bound.lock().await;
        bound.iter().map(|((name, wanted), of)| (name.clone(), *wanted, of.address)).collect()
    }

    /// Returns the path of a listener's Unix domain socket.
    pub(crate) fn pipe(&self, listener: &str) -> Option<Box<str>> {
        self.shared.snapshot.load().listeners.by_name.get(listener)?.pipe.clone()
    }

    /// Returns the metrics of every worker.
    pub async fn scrape(&self) -> Vec<ShardSnapshot> {
        self.broadcast(Command::Scrape).await
    }

    /// Returns the statistics of every endpoint on each worker.
    pub async fn clusters(&self) -> Vec<HostStats> {
        self.broadcast(Command::Clusters).await.into_iter().flatten().collect()
    }

    /// Returns the number of workers.
    pub(crate) fn count(&self) -> usize {
        self.senders.len()
    }

    /// Makes all workers refuse new requests, or no longer.
    pub(crate) async fn refuse_requests(&self, refuse: bool) {
        self.broadcast(|done| Command::Refuse(refuse, done)).await;
    }

    /// Begins a drain on all workers: clients get `connection: close` or GOAWAY. Returns once all workers have begun.
    pub async fn begin_drain(&self, drain: Drain) {
        self.broadcast(|begun| Command::Drain(drain, begun)).await;
    }

    /// Closes listeners and idle connections, waits for the requests in flight for at most `timeout`, and returns the
    /// number of connections that were still open then.
    ///
    /// Outbound listeners stay open until no inbound connection is left on any worker, because the workload may need
    /// them to answer.
    pub async fn drain(&self, timeout: Duration) -> usize {
        const FIRST: &[Direction] = &[Direction::Inbound, Direction::Unspecified];
        let begun = Instant::now();
        self.begin_drain(Drain { directions: FIRST, close: true, timeout }).await;
        self.broadcast(|quiet| Command::Quiet(FIRST, timeout, quiet)).await;
        let left = timeout.saturating_sub(begun.elapsed());
        self.begin_drain(Drain { directions: Direction::ALL, close: true, timeout: left }).await;
        self.broadcast(|done| Command::End(left, done)).await.into_iter().sum()
    }

    /// Ends the threads and waits for them. Call [`Self::drain`] first.
    pub fn join(self) {
        drop(self.senders);
        for thread in self.threads.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let _ = thread.join();
        }
    }

    /// Sends a command to every worker, and returns the responses.
    async fn broadcast<T>(&self, command: impl Fn(oneshot::Sender<T>) -> Command) -> Vec<T> {
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

/// Runs a worker's main task until the command channel closes.
async fn run(
    worker: Rc<Worker>,
    timers: impl Future<Output = ()> + 'static,
    mut commands: mpsc::UnboundedReceiver<Command>,
) {
    let mut sockets = HashMap::new();
    let timers = spawn_local(timers);
    let [swept, watched, revalidating, admitting] = std::array::from_fn(|_| worker.clone());
    let revalidate =
        spawn_local(restart_on_panic(async move || revalidation::wake(revalidating.clone()).await));
    let sweeper = spawn_local(restart_on_panic(async move || sweep(swept.clone()).await));
    let watch = spawn_local(restart_on_panic(async move || watched.overload.watch().await));
    let turns = spawn_local(restart_on_panic(async move || admitting.overload.turns.run().await));
    restart_on_panic(async || execute(&worker, &mut sockets, &mut commands).await).await;
    turns.abort();
    revalidate.abort();
    watch.abort();
    sweeper.abort();
    timers.abort();
}

/// Runs a task, and starts it again after a panic. The panic hook logs the panic. A task that serves all connections
/// must survive a panic about one of them; the task of a single connection ends with its connection.
///
/// The first restart is immediate. Repeated panics delay it by up to a second, to spare the log and the CPU.
async fn restart_on_panic(mut work: impl AsyncFnMut()) {
    const MAX_DELAY: Duration = Duration::from_secs(1);
    let mut delay = Duration::ZERO;
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
        if begun.elapsed() > MAX_DELAY {
            delay = Duration::ZERO;
        }
        timer::sleep(delay).await;
        delay = (2 * delay).clamp(Duration::from_millis(1), MAX_DELAY);
    }
}

/// Executes commands until their channel closes.
async fn execute(
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
                // The connections that were queued are counted before the answer.
                tokio::task::yield_now().await;
                let _ = answer.send(());
            }
            // The wait must not block other commands: outbound listeners need the newest endpoints until the end.
            Command::Quiet(directions, timeout, answer) => {
                let worker = worker.clone();
                spawn_local(async move {
                    quiet(&worker, directions, timeout).await;
                    let _ = answer.send(());
                });
            }
            Command::End(timeout, answer) => {
                let worker = worker.clone();
                spawn_local(async move {
                    worker.end();
                    let cut = quiet(&worker, Direction::ALL, timeout).await;
                    export::finish(&worker.exporters, EXPORT_TIMEOUT).await;
                    let _ = answer.send(cut);
                });
            }
        }
    }
}

/// A listening socket on one worker.
struct Socket {
    name: Arc<str>,
    connections: Rc<ConnectionSet>,
    listener: Rc<ListeningSocket>,
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
        let connections = worker.connections(listener.direction);
        // A direction that drains gets no new listeners.
        if connections.is_closed() {
            continue;
        }
        match ListeningSocket::new(socket, listener.pipe.is_some()) {
            Ok(listener) => {
                let listener = Rc::new(listener);
                let (of, by, called, own) =
                    (worker.clone(), connections.clone(), name.clone(), listener.clone());
                let accept = async move || {
                    listen::accept(of.clone(), by.clone(), called.clone(), own.clone()).await;
                };
                let task = spawn_local(restart_on_panic(accept));
                let socket = Socket { name: name.clone(), connections: connections.clone(), listener, task };
                sockets.insert((name, address), socket);
            }
            Err(error) => tracing::error!(
                "cannot register the socket of listener {name} on {address} with the event loop: {error}"
            ),
        }
    }
    let _ = publish.done.send(());
}

fn begin_drain(
    worker: &Rc<Worker>,
    sockets: &mut HashMap<(Arc<str>, SocketAddr), Socket>,
    Drain { directions, close: closes, timeout }: Drain,
) {
    for connections in directions.iter().map(|direction| worker.connections(*direction)) {
        if closes {
            connections.close_listeners();
        }
        connections.drain(timeout);
    }
    for (_, socket) in sockets.extract_if(|_, socket| socket.connections.is_closed()) {
        close(worker, socket);
    }
}

/// Closes a socket. Accepts the connections that are queued on it first, so that none is reset.
fn close(worker: &Rc<Worker>, socket: Socket) {
    socket.task.abort();
    while let Some((tcp, source)) = listen::accept_queued(&socket.listener) {
        let (connections, name) = (socket.connections.clone(), socket.name.clone());
        spawn_local(crate::accept::connection::serve(worker.clone(), connections, name, tcp, source));
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

/// Waits until no connection is left, for at most `timeout`. Returns the number of open connections.
async fn quiet(worker: &Worker, directions: &[Direction], timeout: Duration) -> usize {
    let connection_sets = || directions.iter().map(|direction| worker.connections(*direction));
    let emptied = async {
        for connections in connection_sets() {
            connections.emptied().await;
        }
    };
    timer::timeout(timeout, emptied).await;
    connection_sets().map(|connections| connections.count()).sum()
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn a_task_is_restarted_after_a_panic() {
        let mut times = 0;
        let work = restart_on_panic(async || {
            times += 1;
            yield_now().await;
            assert!(times > 3, "expected panic");
        });
        let timers = timer::start().unwrap();
        tokio::select! {
            () = work => {}
            () = timers => unreachable!("timers never end"),
        }
        assert_eq!(times, 4);
    }
}
