//! Listening sockets. One thread binds them for all workers, and each worker accepts from its own.
//!
//! Every worker has a socket on the same address (`SO_REUSEPORT`), so the kernel distributes the connections and
//! workers share nothing. Sockets are bound before the workers get the configuration: a listener that cannot be bound
//! is reported, and does not delay the others.

use std::{
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_core::{descriptors, logging::Throttle};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tracing::{debug, warn};

use crate::{
    accept::connection,
    overload::{
        drain::ConnectionSet,
        limit_log::{self, Limit},
        pressure::Acceptance,
    },
    worker::Worker,
};
use skysail_http::timer;

/// Maximum number of connections that wait to be accepted, per worker. Enough for a short delay of the worker; few
/// enough that after a surge the queue does not consist of connections that their clients have closed.
const BACKLOG: i32 = 1024;
/// Delay of a worker that has accepted its share of connections since the last probe, before it checks again.
const OVERLOAD_DELAY: Duration = Duration::from_millis(2);
/// Delay while the overload manager stops new connections.
const PRESSURE_DELAY: Duration = Duration::from_millis(100);
/// Limits the log lines about connections closed for lack of file descriptors, for all workers.
static DESCRIPTORS_LOG: Throttle = Throttle::new(Duration::from_secs(10));

/// Binds and listens: one socket for each worker.
pub(crate) fn bind(address: SocketAddr, workers: usize) -> io::Result<Vec<std::net::TcpListener>> {
    let mut sockets = Vec::with_capacity(workers);
    let mut address = address;
    for _ in 0..workers {
        let socket =
            Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(true)?;
        if address.is_ipv6() {
            // As in Envoy without `ipv4_compat`, an IPv6 listener does not accept IPv4.
            socket.set_only_v6(true)?;
        }
        // Accepted connections inherit the option.
        socket.set_tcp_nodelay(true)?;
        socket.bind(&address.into())?;
        let listener = std::net::TcpListener::from(socket);
        // Port 0 is replaced by the port of the first socket, so that all workers use the same.
        address = listener.local_addr()?;
        sockets.push(listener);
    }
    for socket in &sockets {
        SockRef::from(socket).listen(BACKLOG)?;
    }
    Ok(sockets)
}

/// Accepts connections until the task is aborted.
pub(crate) async fn accept(
    worker: Rc<Worker>,
    connections: Rc<ConnectionSet>,
    name: Arc<str>,
    listener: Rc<TcpListener>,
) {
    loop {
        // Meanwhile the kernel queues new connections.
        while !worker.overload.accepts_connection(Instant::now()) {
            timer::sleep(OVERLOAD_DELAY).await;
        }
        match listener.accept().await {
            Ok((tcp, _)) if descriptors::is_reserved(&tcp) => {
                if let Some(more) = DESCRIPTORS_LOG.admit(Instant::now()) {
                    warn!(
                        listener = &*name,
                        more, "a connection is closed: nearly all file descriptors of the process are in use"
                    );
                }
            }
            Ok((tcp, source)) => {
                // This connection waits here, later ones in the kernel.
                while worker.shared.pressure.is_stopped() && !bypasses(&worker, &name) {
                    timer::sleep(PRESSURE_DELAY).await;
                }
                let Some(admission) = admit(&worker, &name, source) else { continue };
                let serve = connection::serve(worker.clone(), connections.clone(), name.clone(), tcp, source);
                match admission {
                    Acceptance::Counted(admitted) => tokio::task::spawn_local(async move {
                        serve.await;
                        drop(admitted);
                    }),
                    _ => tokio::task::spawn_local(serve),
                };
            }
            // The client closed the connection while it was queued.
            Err(error) if is_client_error(&error) => {
                debug!("a connection to {name} ended before it was accepted: {error}");
            }
            Err(error) => {
                warn!("listener {name} cannot accept a connection: {error}; check the limit of open files");
                timer::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn bypasses(worker: &Worker, name: &str) -> bool {
    worker.snapshot().listeners.by_name.get(name).is_some_and(|listener| listener.bypass_overload)
}

/// Decides whether the process accepts a connection; `None` if not. Counts refused connections, and logs those above
/// the limit.
fn admit(worker: &Worker, name: &Arc<str>, source: SocketAddr) -> Option<Acceptance> {
    if worker.shared.pressure.is_free() {
        return Some(Acceptance::Free);
    }
    let snapshot = worker.snapshot();
    let listener = snapshot.listeners.by_name.get(name);
    let random = || worker.rng.borrow_mut().f64();
    let admission = worker.shared.pressure.admit(listener.map(|listener| &**listener), random);
    match admission {
        Acceptance::Counted(_) | Acceptance::Free => return Some(admission),
        Acceptance::TooMany => {
            worker.shard.listener(name).global_overflow.inc();
            limit_log::log(Limit::Clients, format_args!("listener {name}, client {source}"));
        }
        Acceptance::Rejected => worker.shard.listener(name).overload_reject.inc(),
    }
    None
}

/// Accepts a connection that is queued, even if the event loop has not reported it yet.
pub(crate) fn accept_queued(listener: &TcpListener) -> Option<(TcpStream, SocketAddr)> {
    loop {
        match SockRef::from(listener).accept() {
            Ok((socket, source)) => {
                let tcp = socket.set_nonblocking(true).and_then(|()| TcpStream::from_std(socket.into()));
                if let (Ok(tcp), Some(source)) = (tcp, source.as_socket()) {
                    return Some((tcp, source));
                }
            }
            Err(error) if is_client_error(&error) => {}
            Err(_) => return None,
        }
    }
}

/// Returns whether an error of `accept` concerns one connection only.
fn is_client_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}
