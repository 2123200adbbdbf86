//! Listening sockets: bound by one thread for all workers, accepted from by each.
//!
//! Every worker has a socket of its own on the same address (`SO_REUSEPORT`), so the kernel spreads connections
//! and workers share nothing. Binding is done before any worker is told, so that a listener that cannot be
//! bound is known as such, and the others are not held up.

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
        drain::Side,
        limit_log::{self, Limit},
        pressure::Acceptance,
    },
    worker::Worker,
};
use skysail_http::timer;

/// Connections that may wait to be accepted, on each worker: more than come while a worker is merely held up, but not so many
/// that after a surge most have been given up by their clients, and to find that out takes long.
const BACKLOG: i32 = 1024;
/// A worker that has no time for connections looks again after so long.
const RECONSIDER: Duration = Duration::from_millis(2);
/// The same while the process runs short of memory.
const RECOVER: Duration = Duration::from_millis(100);
/// Limits the log lines about connections closed for want of descriptors, for all workers.
static SCARCE: Throttle = Throttle::new(Duration::from_secs(10));

/// One socket for each of so many workers.
pub(crate) fn bind(address: SocketAddr, workers: usize) -> io::Result<Vec<std::net::TcpListener>> {
    let mut sockets = Vec::with_capacity(workers);
    let mut address = address;
    for _ in 0..workers {
        let socket =
            Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(true)?;
        if address.is_ipv6() {
            // Envoy leaves IPv4 to listeners of its own unless `ipv4_compat` says otherwise.
            socket.set_only_v6(true)?;
        }
        // Accepted connections inherit it.
        socket.set_tcp_nodelay(true)?;
        socket.bind(&address.into())?;
        let listener = std::net::TcpListener::from(socket);
        // Port 0 is any free one, but the same for all.
        address = listener.local_addr()?;
        sockets.push(listener);
    }
    for socket in &sockets {
        SockRef::from(socket).listen(BACKLOG)?;
    }
    Ok(sockets)
}

/// Takes connections until the task is ended.
pub(crate) async fn accept(worker: Rc<Worker>, side: Rc<Side>, name: Arc<str>, listener: Rc<TcpListener>) {
    loop {
        // The kernel keeps those that come meanwhile.
        while !worker.overload.takes(Instant::now()) {
            timer::sleep(RECONSIDER).await;
        }
        match listener.accept().await {
            Ok((tcp, _)) if descriptors::is_reserved(&tcp) => {
                if let Some(more) = SCARCE.admit(Instant::now()) {
                    warn!(
                        listener = &*name,
                        more, "a connection is closed: nearly all files the process may open are open"
                    );
                }
            }
            Ok((tcp, source)) => {
                // The first waits here, those after it in the kernel.
                while worker.shared.pressure.is_stopped() && !bypasses(&worker, &name) {
                    timer::sleep(RECOVER).await;
                }
                let Some(admission) = admit(&worker, &name, source) else { continue };
                let serve = connection::serve(worker.clone(), side.clone(), name.clone(), tcp, source);
                match admission {
                    Acceptance::Counted(admitted) => tokio::task::spawn_local(async move {
                        serve.await;
                        drop(admitted);
                    }),
                    _ => tokio::task::spawn_local(serve),
                };
            }
            // The client gave up while it waited.
            Err(error) if is_the_clients(&error) => {
                debug!("a connection to {name} ended before it was taken: {error}");
            }
            Err(error) => {
                warn!(
                    "no connection can be taken on {name}: {error}; is the limit of open files high enough?"
                );
                timer::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn bypasses(worker: &Worker, name: &str) -> bool {
    worker.snapshot().listeners.by_name.get(name).is_some_and(|listener| listener.bypass_overload)
}

/// Whether the process takes a connection; counts those that it does not.
fn admit(worker: &Worker, name: &Arc<str>, source: SocketAddr) -> Option<Acceptance> {
    if worker.shared.pressure.is_free() {
        return Some(Acceptance::Free);
    }
    let snapshot = worker.snapshot();
    let listener = snapshot.listeners.by_name.get(name);
    let roll = || worker.dice.borrow_mut().f64();
    let admission = worker.shared.pressure.admit(listener.map(|listener| &**listener), roll);
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

/// A connection that waits to be accepted; the event loop may not know of it yet.
pub(crate) fn waiting(listener: &TcpListener) -> Option<(TcpStream, SocketAddr)> {
    loop {
        match SockRef::from(listener).accept() {
            Ok((socket, source)) => {
                let tcp = socket.set_nonblocking(true).and_then(|()| TcpStream::from_std(socket.into()));
                if let (Ok(tcp), Some(source)) = (tcp, source.as_socket()) {
                    return Some((tcp, source));
                }
            }
            Err(error) if is_the_clients(&error) => {}
            Err(_) => return None,
        }
    }
}

fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}
