//! The mock service: runs the script of one service of a graph for each request.
//!
//! Each thread has a runtime and a [`MockService`] with connections of its own; threads share [`Counters`].
//! [`incoming`] serves HTTP/1.1, [`grpc`] both sides of gRPC, [`script`] runs the steps, [`outgoing`] calls services over
//! HTTP/1.1. [`control`] changes the service while it runs.

mod control;
mod counters;
mod grpc;
mod incoming;
mod outgoing;
mod script;

use std::{
    cell::{Cell, RefCell},
    future,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    rc::Rc,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::Context as _;
use bytes::Bytes;
use skysail_core::{shutdown, stdio};
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::{JoinSet, LocalSet},
};

use self::{
    control::{OpenListener, WorkerState, WorkerSwitch},
    counters::Counters,
    script::MockCommand,
};
use super::{behavior::WorkerBehavior, format, model::ServiceGraph};

/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// First bytes of HTTP/2 (RFC 9113, section 3.4).
const PREFACE: &[u8; 4] = b"PRI ";

/// Settings of the mock service.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct MockArgs {
    /// Service graph (YAML).
    #[arg(long, value_name = "FILE")]
    graph: PathBuf,

    /// Service of the graph to run.
    #[arg(long, value_name = "NAME")]
    service: String,

    /// Address and port to listen on.
    #[arg(long, value_name = "IP:PORT", default_value = "0.0.0.0:8080")]
    listen: SocketAddr,

    /// Threads.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_024))]
    threads: u32,

    /// Maximum number of connections. Later ones wait.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    connections: u32,

    /// Address and port at which callers of this machine or pod change the service: GET returns its behaviour as JSON,
    /// PUT sets it. `{"delay": "300ms", "errors": "10%", "down": true}` has all fields. Default: none.
    #[arg(long, value_name = "IP:PORT")]
    control: Option<SocketAddr>,
}

/// Serves until a signal ends the process.
///
/// # Errors
/// The graph cannot be read or has no such service, or the port cannot be opened.
pub(super) fn run(args: &MockArgs) -> anyhow::Result<()> {
    skysail_core::descriptors::raise();
    let graph = Arc::new(format::read(&args.graph)?);
    let counters = Arc::new(Counters::new(&graph, &args.service)?);
    let switch =
        WorkerSwitch::open(args.listen).with_context(|| format!("cannot listen on {}", args.listen))?;
    let control = args.control.map(|address| {
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        listener.set_nonblocking(true)?;
        anyhow::Ok(listener)
    });
    let control = control.transpose()?;
    let permits = Arc::new(Semaphore::new(args.connections as usize));
    let (failed, mut failure) = tokio::sync::mpsc::channel(1);
    for _ in 0..args.threads {
        let (graph, counters, failed) = (Arc::clone(&graph), Arc::clone(&counters), failed.clone());
        let (name, state, permits) = (args.service.clone(), switch.watch(), Arc::clone(&permits));
        thread::spawn(move || failed.blocking_send(serve(state, permits, &graph, &name, counters).err()));
    }
    stdio::print(format_args!("service {} on {}", args.service, switch.address))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let control = control.map(tokio::net::TcpListener::from_std).transpose()?;
        let changes = async {
            match control {
                Some(listener) => match control::serve(listener, switch).await {},
                None => future::pending::<()>().await,
            }
        };
        tokio::select! {
            signal = shutdown::terminate() => signal.map(|_| ()).map_err(Into::into),
            Some(Some(error)) = failure.recv() => Err(error).context("the mock service failed"),
            () = changes => Ok(()),
        }
    })
}

/// Serves connections on this thread until the state has no sender.
///
/// # Errors
/// The socket fails, or the graph has no such service.
fn serve(
    state: watch::Receiver<WorkerState>,
    permits: Arc<Semaphore>,
    graph: &ServiceGraph,
    name: &str,
    counters: Arc<Counters>,
) -> anyhow::Result<()> {
    let service = Rc::new(MockService::new(graph, name, counters)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, follow(state, &permits, &service))
}

/// Accepts connections while the state has a socket.
async fn follow(
    mut state: watch::Receiver<WorkerState>,
    permits: &Arc<Semaphore>,
    service: &Rc<MockService>,
) -> anyhow::Result<()> {
    let mut listening: Option<(tokio::net::TcpListener, Arc<OpenListener>)> = None;
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            (stream, permit) = accept(listening.as_ref().map(|(listener, _)| listener), permits) => {
                let service = Rc::clone(service);
                // An error ends the connection, which the client notices.
                connections.spawn_local(async move {
                    drop(connection(stream, service).await);
                    drop(permit);
                });
                while connections.try_join_next().is_some() {}
            }
            changed = state.changed() => {
                if changed.is_err() {
                    return Ok(());
                }
                let WorkerState { behavior, open } = state.borrow_and_update().clone();
                service.adopt(&behavior);
                let is_same = match (&listening, &open) {
                    (Some((_, held)), Some(open)) => Arc::ptr_eq(held, open),
                    _ => false,
                };
                if is_same {
                    continue;
                }
                if let Some((listener, held)) = listening.take() {
                    drop(listener);
                    connections.shutdown().await;
                    drop(held);
                }
                if let Some(open) = open {
                    listening = Some((tokio::net::TcpListener::from_std(open.socket.try_clone()?)?, open));
                }
            }
        }
    }
}

/// Returns the next connection; waits for ever without a listener.
async fn accept(
    listener: Option<&tokio::net::TcpListener>,
    permits: &Arc<Semaphore>,
) -> (TcpStream, OwnedSemaphorePermit) {
    let Some(listener) = listener else { return future::pending().await };
    let Ok(permit) = Arc::clone(permits).acquire_owned().await else { return future::pending().await };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, permit),
            // Too many open files: later connections wait.
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn connection(stream: TcpStream, service: Rc<MockService>) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut first = [0; PREFACE.len()];
    stream.peek(&mut first).await?;
    if first == *PREFACE {
        grpc::serve(stream, service).await?;
    } else {
        incoming::serve(stream, service).await?;
    }
    Ok(())
}

/// A service of a graph as one thread runs it.
struct MockService {
    script: Vec<Vec<MockCommand>>,
    /// Share of errors in the graph.
    graph_error_percent: f64,
    error_percent: Cell<f64>,
    /// Processing time before the script.
    delay: Cell<Duration>,
    /// Percentages of the requests since the last error.
    error_sum: Cell<f64>,
    response_size: u64,
    /// Response of gRPC, which is encoded at its first use.
    response_message: RefCell<Option<Bytes>>,
    rng: RefCell<fastrand::Rng>,
    counters: Arc<Counters>,
}

impl MockService {
    fn new(graph: &ServiceGraph, name: &str, counters: Arc<Counters>) -> anyhow::Result<Self> {
        let service = graph.service(name).with_context(|| unknown(graph, name))?;
        Ok(Self {
            script: script::compile(graph, service)?,
            graph_error_percent: service.error_percent,
            error_percent: Cell::new(service.error_percent),
            delay: Cell::default(),
            error_sum: Cell::new(0.0),
            response_size: service.response_size,
            response_message: RefCell::new(None),
            rng: RefCell::new(fastrand::Rng::new()),
            counters,
        })
    }

    /// Applies a behaviour to later requests.
    fn adopt(&self, behavior: &WorkerBehavior) {
        self.error_percent.set(behavior.errors.unwrap_or(self.graph_error_percent));
        self.delay.set(behavior.delay);
    }

    /// Returns whether the response to the next request is an error. Errors are spread evenly, so their share is exact.
    fn fails(&self) -> bool {
        let sum = self.error_sum.get() + self.error_percent.get();
        let fails = sum >= 100.0;
        self.error_sum.set(if fails { sum - 100.0 } else { sum });
        fails
    }

    /// Runs the service for one request. `forwarded` has the lines of headers that calls repeat. Returns the text of an
    /// error.
    async fn answer(self: &Rc<Self>, forwarded: Rc<[u8]>) -> Result<(), String> {
        let delay = self.delay.get();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        if self.fails() {
            return Err("simulated error\n".to_owned());
        }
        script::run(self, forwarded).await
    }
}

/// Returns the message for a service that the graph does not have.
fn unknown(graph: &ServiceGraph, name: &str) -> String {
    let names: Vec<&str> = graph.services.iter().take(10).map(|service| service.name.as_str()).collect();
    let more = if graph.services.len() > names.len() { ", …" } else { "" };
    format!("the graph has no service {name}; its services: {}{more}", names.join(", "))
}

#[cfg(test)]
mod examples;
#[cfg(test)]
mod tests;
