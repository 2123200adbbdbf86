//! Listening sockets. One thread binds them for all workers.
//!
//! Every worker has its own socket on an IP address (`SO_REUSEPORT`), so the kernel distributes the connections. A Unix
//! domain socket cannot be bound twice: all workers accept from the same. Sockets are bound before the workers get the
//! configuration: a listener that cannot be bound is reported, and does not delay the others.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_core::{descriptors, logging::Throttle};
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tracing::{debug, warn};

use crate::{
    accept::connection,
    overload::{
        drain::ConnectionSet,
        limit_log::{self, Limit},
        pressure::Acceptance,
    },
    upstream::pipe_path,
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

/// Address of the clients of Unix domain sockets: programs on this machine.
const PIPE_CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

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

/// Binds a Unix domain socket and listens: all workers have the same socket. Replaces only a socket on which no process
/// listens any more, never another file.
pub(crate) fn bind_pipe(path: &str, workers: usize) -> io::Result<Vec<std::net::TcpListener>> {
    let address = pipe_path(path)?;
    let socket = match listen(&address) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let Some(abandoned) = abandoned(path, &address) else { return Err(error) };
            abandoned.remove();
            listen(&address)?
        }
        made => made?,
    };
    // The workers treat all sockets alike; only the addresses of connections differ.
    let of_worker = |_| Ok(std::net::TcpListener::from(OwnedFd::from(socket.try_clone()?)));
    (0..workers).map(of_worker).collect()
}

fn listen(address: &SockAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// Returns the socket at a path if no process listens on it.
fn abandoned(path: &str, address: &SockAddr) -> Option<PipeFile> {
    // Identified before the attempt: another process may replace it meanwhile.
    let file = PipeFile::at(path)?;
    let connected = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None).ok()?.connect(address);
    connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused).then_some(file)
}

/// The file of a Unix domain socket.
#[derive(PartialEq, Eq)]
pub(crate) struct PipeFile {
    path: Box<str>,
    device: u64,
    inode: u64,
}

impl PipeFile {
    /// Returns the socket at a path; `None` for any other file, and for an abstract name.
    pub(crate) fn at(path: &str) -> Option<Self> {
        let file = std::fs::symlink_metadata(path).ok().filter(|of| of.file_type().is_socket())?;
        let (device, inode) = (file.dev(), file.ino());
        (!path.starts_with('@')).then(|| Self { path: path.into(), device, inode })
    }

    /// Removes the file, unless another one has taken its place.
    pub(crate) fn remove(self) {
        if Self::at(&self.path).as_ref() == Some(&self)
            && let Err(error) = std::fs::remove_file(&*self.path)
        {
            debug!("cannot remove socket {}: {error}", self.path);
        }
    }
}

/// A listening socket of a worker.
pub(crate) enum ListeningSocket {
    Ip(TcpListener),
    Pipe(UnixListener),
}

impl ListeningSocket {
    /// Registers a socket with the event loop.
    pub(crate) fn new(socket: std::net::TcpListener, is_pipe: bool) -> io::Result<Self> {
        if is_pipe {
            let socket = std::os::unix::net::UnixListener::from(OwnedFd::from(socket));
            return UnixListener::from_std(socket).map(Self::Pipe);
        }
        TcpListener::from_std(socket).map(Self::Ip)
    }

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        match self {
            Self::Ip(listener) => listener.accept().await,
            Self::Pipe(listener) => {
                let (stream, _) = listener.accept().await?;
                Ok((TcpStream::from_std(OwnedFd::from(stream.into_std()?).into())?, PIPE_CLIENT))
            }
        }
    }

    fn as_socket(&self) -> SockRef<'_> {
        match self {
            Self::Ip(listener) => listener.into(),
            Self::Pipe(listener) => listener.into(),
        }
    }
}

/// Accepts connections until the task is aborted.
pub(crate) async fn accept(
    worker: Rc<Worker>,
    connections: Rc<ConnectionSet>,
    name: Arc<str>,
    listener: Rc<ListeningSocket>,
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
pub(crate) fn accept_queued(listener: &ListeningSocket) -> Option<(TcpStream, SocketAddr)> {
    loop {
        match listener.as_socket().accept() {
            Ok((socket, source)) => {
                let tcp = socket.set_nonblocking(true).and_then(|()| TcpStream::from_std(socket.into()));
                if let Ok(tcp) = tcp {
                    return Some((tcp, source.as_socket().unwrap_or(PIPE_CLIENT)));
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
