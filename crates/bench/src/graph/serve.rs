//! The mock service: runs the script of one service of a graph for each request.
//!
//! Each thread has a runtime and a [`MockService`] with connections of its own; threads share [`Counters`].
//! [`incoming`] serves HTTP/1.1, [`grpc`] both sides of gRPC, [`script`] runs the steps, [`outgoing`] calls services over
//! HTTP/1.1.

mod counters;
mod grpc;
mod incoming;
mod outgoing;
mod script;

use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
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
use tokio::task::LocalSet;

use self::{counters::Counters, script::MockCommand};
use super::{format, model::ServiceGraph};

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
}

/// Serves until a signal ends the process.
///
/// # Errors
/// The graph cannot be read or has no such service, or the port cannot be opened.
pub(super) fn run(args: &MockArgs) -> anyhow::Result<()> {
    skysail_core::descriptors::raise();
    let graph = Arc::new(format::read(&args.graph)?);
    let counters = Arc::new(Counters::new(&graph, &args.service)?);
    let listener =
        TcpListener::bind(args.listen).with_context(|| format!("cannot listen on {}", args.listen))?;
    let address = listener.local_addr()?;
    let (failed, mut failure) = tokio::sync::mpsc::channel(1);
    for _ in 0..args.threads {
        let (graph, counters, failed) = (Arc::clone(&graph), Arc::clone(&counters), failed.clone());
        let (name, listener) = (args.service.clone(), listener.try_clone()?);
        thread::spawn(move || failed.blocking_send(serve(listener, &graph, &name, counters).err()));
    }
    stdio::print(format_args!("service {} on {address}", args.service))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        tokio::select! {
            signal = shutdown::terminate() => signal.map(|_| ()).map_err(Into::into),
            Some(Some(error)) = failure.recv() => Err(error).context("the mock service failed"),
        }
    })
}

/// Serves the connections of a listener on this thread.
///
/// # Errors
/// The listener fails, or the graph has no such service.
fn serve(
    listener: TcpListener,
    graph: &ServiceGraph,
    name: &str,
    counters: Arc<Counters>,
) -> anyhow::Result<Infallible> {
    let service = Rc::new(MockService::new(graph, name, counters)?);
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                // Too many open files: later connections wait.
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let service = Rc::clone(&service);
            // An error ends the connection, which the client notices.
            tokio::task::spawn_local(async move { drop(connection(stream, service).await) });
        }
    })
}

async fn connection(stream: tokio::net::TcpStream, service: Rc<MockService>) -> anyhow::Result<()> {
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
    error_percent: f64,
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
            error_percent: service.error_percent,
            error_sum: Cell::new(0.0),
            response_size: service.response_size,
            response_message: RefCell::new(None),
            rng: RefCell::new(fastrand::Rng::new()),
            counters,
        })
    }

    /// Returns whether the response to the next request is an error. Errors are spread evenly, so their share is exact.
    fn fails(&self) -> bool {
        let sum = self.error_sum.get() + self.error_percent;
        let fails = sum >= 100.0;
        self.error_sum.set(if fails { sum - 100.0 } else { sum });
        fails
    }

    /// Runs the service for one request. `forwarded` has the lines of headers that calls repeat. Returns the text of an
    /// error.
    async fn answer(self: &Rc<Self>, forwarded: Rc<[u8]>) -> Result<(), String> {
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
mod tests;
