//! Forwarding of TCP connections between the host and a mesh.
//!
//! A socket stays in the network namespace in which it was created. So a process binds its listeners on the host and
//! then enters the network namespace of a mesh or a pod. From there it opens a connection to a target for each accepted
//! connection. [`crate::egress`] does the same in the other direction.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr, TcpListener as HostListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};

/// Maximum number of connections of one listener; further ones wait in the kernel.
const MAX_CONNECTIONS: usize = 256;
/// Timeout for connecting to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// TCP keep-alive: idle time and probe interval, in seconds; the kernel sends 9 probes. A pod may end without closing
/// its connections.
const KEEP_ALIVE: (u32, u32) = (60, 10);
/// Size of the buffer for each direction of a connection, in bytes.
const BUFFER: usize = 16 << 10;
/// Pause after a failed accept, which usually has a lasting cause such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Reason why a connection failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It could not be accepted.
    Accept(String),
    /// The listener has its maximum number of connections; further ones wait. Reported only the first time.
    Full(usize),
    /// There is no target now.
    NoTarget,
    /// The target is closed, for this reason.
    Refused(String),
    /// No target accepted the connection; the error of the last target.
    Connect(String),
    /// The target ended the connection without an answer, and the client had sent data and not closed its side.
    NoAnswer,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept(reason) => write!(f, "accepting a connection: {reason}"),
            Self::Full(max) => write!(f, "all {max} connections are open; further ones wait"),
            Self::NoTarget => f.write_str("there is no ready pod"),
            Self::Connect(reason) | Self::Refused(reason) => f.write_str(reason),
            Self::NoAnswer => f.write_str("the pod closed the connection without an answer"),
        }
    }
}

/// Binds a listener. Must be called before the process enters another network namespace.
///
/// # Errors
/// When the address is in use or forbidden; the error names the cause.
pub fn bind(address: SocketAddr) -> io::Result<HostListener> {
    let listener = HostListener::bind(address).map_err(|error| {
        let text = match error.kind() {
            io::ErrorKind::AddrInUse => format!("{address} is in use; choose another port"),
            io::ErrorKind::PermissionDenied => {
                format!("only root can listen on {address}; choose port 1024 or above")
            }
            io::ErrorKind::AddrNotAvailable => format!("this machine has no address {}", address.ip()),
            _ => format!("listening on {address}: {error}"),
        };
        io::Error::new(error.kind(), text)
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Accepts connections and connects each to the first of `targets` that accepts it. Failures are passed to `failed`.
///
/// # Errors
/// When the listener cannot be used.
pub async fn serve(
    listener: HostListener,
    targets: impl Fn() -> Vec<SocketAddr>,
    failed: impl Fn(Failure) + Clone + Send + 'static,
) -> io::Result<()> {
    serve_each(listener, MAX_CONNECTIONS, |_| Ok(targets()), move |_, failure| failed(failure)).await
}

/// Like [`serve`], with at most `max` connections. The targets depend on the client, and `failed` also gets the
/// client's address.
pub(crate) async fn serve_each(
    listener: HostListener,
    max: usize,
    targets: impl Fn(&TcpStream) -> Result<Vec<SocketAddr>, Failure>,
    failed: impl Fn(Option<IpAddr>, Failure) + Clone + Send + 'static,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let free = Arc::new(Semaphore::new(max));
    let mut was_full = false;
    loop {
        if free.available_permits() == 0 && !was_full {
            was_full = true;
            failed(None, Failure::Full(max));
        }
        let Ok(permit) = Arc::clone(&free).acquire_owned().await else { return Ok(()) };
        let (client, from) = match listener.accept().await {
            Ok((client, from)) => (client, from.ip()),
            Err(error) => {
                failed(None, Failure::Accept(error.to_string()));
                sleep(PAUSE).await;
                continue;
            }
        };
        let (targets, failed) = (targets(&client), failed.clone());
        tokio::spawn(async move {
            let mut client = client;
            let _permit = permit;
            let connected = match targets {
                Ok(targets) => connect(&targets).await,
                Err(failure) => Err(failure),
            };
            let joined = match connected {
                Ok(mut server) => join(&mut client, &mut server).await,
                Err(failure) => {
                    reset(&client);
                    Err(failure)
                }
            };
            if let Err(failure) = joined {
                failed(Some(from), failure);
            }
        });
    }
}

async fn connect(targets: &[SocketAddr]) -> Result<TcpStream, Failure> {
    let mut failed = Failure::NoTarget;
    for target in targets {
        failed = Failure::Connect(match timeout(CONNECT_TIMEOUT, TcpStream::connect(target)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => format!("{target}: {error}"),
            Err(_) => format!("{target}: no answer within {CONNECT_TIMEOUT:?}"),
        });
    }
    Err(failed)
}

/// Side of a connection that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

/// Copies until the end of `from`. Fails with the side that failed.
async fn copy(
    (from, from_side): (&mut (impl AsyncRead + Unpin), Side),
    (to, to_side): (&mut (impl AsyncWrite + Unpin), Side),
) -> Result<(), Side> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = from.read(&mut buffer).await.map_err(|_| from_side)?;
        let Some(data) = buffer.get(..length).filter(|data| !data.is_empty()) else {
            return Ok(());
        };
        to.write_all(data).await.map_err(|_| to_side)?;
    }
}

/// Copies in both directions until both have ended. An error, such as a reset, ends both.
async fn join(client: &mut TcpStream, server: &mut TcpStream) -> Result<(), Failure> {
    for stream in [&*client, &*server] {
        // The connection works without these options.
        let _ = stream.set_nodelay(true);
        let _ = setsockopt(stream, sockopt::KeepAlive, &true);
        let _ = setsockopt(stream, sockopt::TcpKeepIdle, &KEEP_ALIVE.0);
        let _ = setsockopt(stream, sockopt::TcpKeepInterval, &KEEP_ALIVE.1);
    }
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    // Whether the client has sent data and may send more, whether the server has sent data, and whether the server
    // closed first.
    let [client_sent, answered, closed] = [(); 3].map(|()| AtomicBool::new(false));
    let there = async {
        let length = from_client.peek(&mut [0]).await.map_err(|_| Side::Client)?;
        client_sent.store(length > 0, Ordering::Relaxed);
        copy((&mut from_client, Side::Client), (&mut to_server, Side::Server)).await?;
        client_sent.store(false, Ordering::Relaxed);
        to_server.shutdown().await.map_err(|_| Side::Server)
    };
    let back = async {
        if from_server.peek(&mut [0]).await.map_err(|_| Side::Server)? > 0 {
            answered.store(true, Ordering::Relaxed);
        } else {
            closed.store(client_sent.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        copy((&mut from_server, Side::Server), (&mut to_client, Side::Client)).await?;
        to_client.shutdown().await.map_err(|_| Side::Client)
    };
    let done = tokio::try_join!(there, back);
    let [client_sent, answered, closed] = [client_sent, answered, closed].map(AtomicBool::into_inner);
    let was_reset = done == Err(Side::Server) && client_sent && !answered;
    let result = if closed || was_reset { Err(Failure::NoAnswer) } else { Ok(()) };
    if done.is_err() {
        // After a regular close, the peer could take a truncated body for a complete one.
        reset(client);
        reset(server);
    }
    result
}

fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::{io::AsyncReadExt as _, sync::mpsc};

    use super::*;

    fn any() -> HostListener {
        bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap()
    }

    /// Forwards to these targets. Returns the address and the failures.
    fn start(targets: Vec<SocketAddr>) -> (SocketAddr, mpsc::UnboundedReceiver<Failure>) {
        let (tell, failures) = mpsc::unbounded_channel();
        let listener = any();
        let address = listener.local_addr().unwrap();
        let failed = move |failure| tell.send(failure).unwrap();
        tokio::spawn(async move { serve(listener, move || targets.clone(), failed).await });
        (address, failures)
    }

    fn closed() -> SocketAddr {
        any().local_addr().unwrap()
    }

    #[tokio::test]
    async fn a_half_closed_connection_still_carries_the_other_direction() {
        let server = TcpListener::from_std(any()).unwrap();
        let (address, _told) = start(vec![closed(), server.local_addr().unwrap()]);
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let (mut served, _) = server.accept().await.unwrap();
        let mut question = String::new();
        served.read_to_string(&mut question).await.unwrap();
        assert_eq!(question, "question");
        served.write_all(b"answer").await.unwrap();
        drop(served);
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "answer");
    }

    #[tokio::test]
    async fn a_reset_is_passed_on() {
        let server = TcpListener::from_std(any()).unwrap();
        let (address, _told) = start(vec![server.local_addr().unwrap()]);
        let mut client = TcpStream::connect(address).await.unwrap();
        let (served, _) = server.accept().await.unwrap();
        reset(&served);
        drop(served);
        let error = client.read(&mut [0]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn a_connection_without_a_target_is_reset_and_reported() {
        for (targets, reason) in [(vec![], "no ready pod"), (vec![closed()], "refused")] {
            let (address, mut failures) = start(targets);
            let mut client = TcpStream::connect(address).await.unwrap();
            let error = client.read(&mut [0]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            let failure = failures.recv().await.unwrap().to_string();
            assert!(failure.contains(reason), "{failure}");
        }
    }

    #[tokio::test]
    async fn only_a_server_that_closes_without_an_answer_is_reported() {
        let server = TcpListener::from_std(any()).unwrap();
        let (address, mut failures) = start(vec![server.local_addr().unwrap()]);
        for client_first in [true, false] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"question").await.unwrap();
            let (mut served, _) = server.accept().await.unwrap();
            served.read_exact(&mut [0; 8]).await.unwrap();
            if client_first {
                client.shutdown().await.unwrap();
                assert_eq!(served.read(&mut [0]).await.unwrap(), 0);
            }
            drop(served);
            assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        }
        // The second connection is the first one that failed.
        assert_eq!(failures.recv().await, Some(Failure::NoAnswer));
        assert!(failures.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_reset_is_reported_only_if_the_server_sent_it() {
        let server = TcpListener::from_std(any()).unwrap();
        let (tell, mut failures) = mpsc::unbounded_channel();
        let listener = any();
        let (address, target) = (listener.local_addr().unwrap(), server.local_addr().unwrap());
        let failed = move |_, failure| tell.send(failure).unwrap();
        // A connection is accepted only after the one before it has been reported.
        tokio::spawn(serve_each(listener, 1, move |_| Ok(vec![target]), failed));
        for client_resets in [true, false] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"question").await.unwrap();
            let (mut served, _) = server.accept().await.unwrap();
            served.read_exact(&mut [0; 8]).await.unwrap();
            let (from, mut to) = if client_resets { (client, served) } else { (served, client) };
            reset(&from);
            drop(from);
            assert_eq!(to.read(&mut [0]).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        }
        assert_eq!(failures.recv().await, Some(Failure::Full(1)));
        assert_eq!(failures.recv().await, Some(Failure::NoAnswer));
        assert!(failures.try_recv().is_err());
    }

    #[tokio::test]
    async fn connections_above_the_limit_wait_and_are_reported_once() {
        let server = TcpListener::from_std(any()).unwrap();
        let (tell, mut failures) = mpsc::unbounded_channel();
        let listener = any();
        let (address, target) = (listener.local_addr().unwrap(), server.local_addr().unwrap());
        let failed = move |_, failure| tell.send(failure).unwrap();
        tokio::spawn(serve_each(listener, 1, move |_| Ok(vec![target]), failed));
        let first = TcpStream::connect(address).await.unwrap();
        server.accept().await.unwrap();
        assert_eq!(failures.recv().await, Some(Failure::Full(1)));
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(b"waits").await.unwrap();
        drop(first);
        // The slot is free, but only since the first connection has ended.
        let (mut served, _) = server.accept().await.unwrap();
        served.read_exact(&mut [0; 5]).await.unwrap();
        assert!(failures.try_recv().is_err());
    }

    #[test]
    fn an_error_names_a_port_in_use() {
        let listener = any();
        let error = bind(listener.local_addr().unwrap()).unwrap_err().to_string();
        assert!(error.ends_with("is in use; choose another port"), "{error}");
    }
}
