//! Forwarding of TCP connections between the host and a mesh.
//!
//! A socket stays in the network namespace that it was made in. So a process binds its listeners on the host, enters
//! the network of a mesh or of a pod, and joins each connection that it accepts there with one that it makes here.
//! [`crate::egress`] does the same in the other direction.

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
    io::{AsyncWriteExt as _, copy},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};

/// Limit of the connections of one listener; further ones wait in the kernel.
const CONNECTIONS: usize = 256;
/// Limit for connecting to one address.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Seconds without a packet after which the peer is probed, and seconds between probes; the kernel makes 9 of them. A pod may go
/// without closing its connections.
const KEEP_ALIVE: (u32, u32) = (60, 10);
/// Pause after a failed accept, which has a lasting cause such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a connection came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It could not be accepted.
    Accept(String),
    /// All connections that a listener may have are open; further ones wait. It is reported once.
    Full(usize),
    /// There is no target now.
    NoTarget,
    /// The target must not be reached; the reason.
    Refused(String),
    /// No target accepts it; the reason of the last one.
    Connect(String),
    /// The target took what the client sent and closed the connection.
    NoAnswer,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept(reason) => write!(f, "accepting a connection: {reason}"),
            Self::Full(most) => write!(f, "all {most} connections are open; further ones wait"),
            Self::NoTarget => f.write_str("there is no ready pod"),
            Self::Connect(reason) | Self::Refused(reason) => f.write_str(reason),
            Self::NoAnswer => f.write_str("the pod closed the connection without an answer"),
        }
    }
}

/// Binds a listener. Call it before the process enters another network.
///
/// # Errors
/// When the address is in use or forbidden; the error says so.
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

/// Accepts connections and joins each with one to the first of `targets` that accepts it. `failed` hears why
/// one came to nothing.
///
/// # Errors
/// When the listener cannot be used at all.
pub async fn serve(
    listener: HostListener,
    targets: impl Fn() -> Vec<SocketAddr>,
    failed: impl Fn(Failure) + Clone + Send + 'static,
) -> io::Result<()> {
    serve_each(listener, CONNECTIONS, |_| Ok(targets()), move |_, failure| failed(failure)).await
}

/// As [`serve`], with at most so many connections at a time. The targets depend on the client, and `failed` hears of its address.
pub(crate) async fn serve_each(
    listener: HostListener,
    most: usize,
    targets: impl Fn(&TcpStream) -> Result<Vec<SocketAddr>, Failure>,
    failed: impl Fn(Option<IpAddr>, Failure) + Clone + Send + 'static,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let free = Arc::new(Semaphore::new(most));
    let mut was_full = false;
    loop {
        if free.available_permits() == 0 && !was_full {
            was_full = true;
            failed(None, Failure::Full(most));
        }
        let Ok(place) = Arc::clone(&free).acquire_owned().await else { return Ok(()) };
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
            let _place = place;
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
        failed = Failure::Connect(match timeout(CONNECT_WITHIN, TcpStream::connect(target)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => format!("{target}: {error}"),
            Err(_) => format!("{target}: no answer within {CONNECT_WITHIN:?}"),
        });
    }
    Err(failed)
}

/// Copies both ways until both directions have ended, each by itself. A reset ends both.
async fn join(client: &mut TcpStream, server: &mut TcpStream) -> Result<(), Failure> {
    for stream in [&*client, &*server] {
        // Without one of these, the connection works all the same.
        let _ = stream.set_nodelay(true);
        let _ = setsockopt(stream, sockopt::KeepAlive, &true);
        let _ = setsockopt(stream, sockopt::TcpKeepIdle, &KEEP_ALIVE.0);
        let _ = setsockopt(stream, sockopt::TcpKeepInterval, &KEEP_ALIVE.1);
    }
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    // Whether the client has sent something and may send more, whether the server has, and whether it closed first.
    let [asks, answered, closed] = [(); 3].map(|()| AtomicBool::new(false));
    let there = async {
        asks.store(from_client.peek(&mut [0]).await? > 0, Ordering::Relaxed);
        copy(&mut from_client, &mut to_server).await?;
        asks.store(false, Ordering::Relaxed);
        to_server.shutdown().await
    };
    let back = async {
        if from_server.peek(&mut [0]).await? > 0 {
            answered.store(true, Ordering::Relaxed);
        } else {
            closed.store(asks.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        copy(&mut from_server, &mut to_client).await?;
        to_client.shutdown().await
    };
    let done = tokio::try_join!(there, back);
    let [asks, answered, closed] = [asks, answered, closed].map(AtomicBool::into_inner);
    let result = if closed || done.is_err() && asks && !answered { Err(Failure::NoAnswer) } else { Ok(()) };
    if done.is_err() {
        // An end that looks like the regular one could pass for a complete body.
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

    /// Forwards to these targets. Returns the address, and why connections came to nothing.
    fn start(targets: Vec<SocketAddr>) -> (SocketAddr, mpsc::UnboundedReceiver<Failure>) {
        let (tell, told) = mpsc::unbounded_channel();
        let listener = any();
        let address = listener.local_addr().unwrap();
        let failed = move |failure| tell.send(failure).unwrap();
        tokio::spawn(async move { serve(listener, move || targets.clone(), failed).await });
        (address, told)
    }

    fn closed() -> SocketAddr {
        any().local_addr().unwrap()
    }

    #[tokio::test]
    async fn half_closed_connections_go_on_the_other_way() {
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
    async fn a_reset_passes_through() {
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
    async fn a_connection_without_a_target_is_reset_and_told() {
        for (targets, reason) in [(vec![], "no ready pod"), (vec![closed()], "refused")] {
            let (address, mut told) = start(targets);
            let mut client = TcpStream::connect(address).await.unwrap();
            let error = client.read(&mut [0]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            let said = told.recv().await.unwrap().to_string();
            assert!(said.contains(reason), "{said}");
        }
    }

    #[tokio::test]
    async fn a_server_that_closes_without_an_answer_is_told_and_a_client_that_does_is_not() {
        let server = TcpListener::from_std(any()).unwrap();
        let (address, mut told) = start(vec![server.local_addr().unwrap()]);
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
        // The second connection is the first that came to nothing.
        assert_eq!(told.recv().await, Some(Failure::NoAnswer));
        assert!(told.try_recv().is_err());
    }

    #[tokio::test]
    async fn connections_beyond_the_limit_wait_and_that_is_told_once() {
        let server = TcpListener::from_std(any()).unwrap();
        let (tell, mut told) = mpsc::unbounded_channel();
        let listener = any();
        let (address, target) = (listener.local_addr().unwrap(), server.local_addr().unwrap());
        let failed = move |_, failure| tell.send(failure).unwrap();
        tokio::spawn(serve_each(listener, 1, move |_| Ok(vec![target]), failed));
        let first = TcpStream::connect(address).await.unwrap();
        server.accept().await.unwrap();
        assert_eq!(told.recv().await, Some(Failure::Full(1)));
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(b"waits").await.unwrap();
        drop(first);
        // The place is free, though only since the first connection has ended.
        let (mut served, _) = server.accept().await.unwrap();
        served.read_exact(&mut [0; 5]).await.unwrap();
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn a_port_in_use_is_named() {
        let listener = any();
        let error = bind(listener.local_addr().unwrap()).unwrap_err().to_string();
        assert!(error.ends_with("is in use; choose another port"), "{error}");
    }
}
