//! Serves gRPC on a socket, over TLS with the control plane's own certificate or in plain text. Renews that
//! certificate.

use std::{
    future::poll_fn,
    io, mem,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::{Duration, SystemTime},
};

use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, recv},
};
use rustls::{ServerConfig, server::Acceptor};
use skysail_core::{
    SpiffeId,
    connections::{Admitted, Connections},
    descriptors,
    shutdown::Shutdown,
};
use skysail_identity::{Authority, Identity, Live, PeerCheck, Roots, TlsSpec, renewal};
use skysail_xds::{
    grpc::{self, Service},
    limits::Limits,
};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    time::timeout,
};
use tokio_rustls::{LazyConfigAcceptor, server::TlsStream};
use tonic::{Extensions, transport::server::Connected};
use tracing::{debug, warn};

use crate::{
    authority::AuthorityManager,
    handshakes::{HandshakeLimiter, Priority},
};

/// Timeout of a TLS handshake, including the waits for a permit.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of steps of a handshake with the priority [`Priority::InProgress`]. A usual client needs one or two.
/// A client that sends its messages byte by byte then waits like a new one.
const PRIORITY_STEPS: usize = 4;
/// Length of the kernel's accept queue; `net.core.somaxconn` may limit it further.
const BACKLOG: u32 = 4_096;
/// Limit of unsent bytes in the kernel's send buffer (`TCP_NOTSENT_LOWAT`).
const MAX_UNSENT: u32 = 128 << 10;
/// DNS names that each certificate of a control plane has, as proxies verify them.
const NAMES: [&str; 5] = [
    "istiod.istio-system.svc",
    "istiod.istio-system.svc.cluster.local",
    "skysaild.istio-system.svc",
    "skysaild.istio-system.svc.cluster.local",
    "localhost",
];

/// Returns the DNS names of the certificate of a control plane that sidecars and the API server know by this host.
fn names(host: &str) -> Vec<String> {
    let mut names: Vec<String> = NAMES.map(str::to_owned).into();
    let is_new = !names.iter().any(|name| name == host) && host.parse::<IpAddr>().is_err();
    if is_new {
        if host.ends_with(".svc") {
            names.push(format!("{host}.cluster.local"));
        }
        names.push(host.to_owned());
    }
    names
}

/// The control plane's own certificate.
pub(crate) struct ServerCertificate {
    authority: watch::Receiver<Arc<Authority>>,
    id: SpiffeId,
    names: Vec<String>,
    addresses: Vec<IpAddr>,
    lifetime: Duration,
    live: Arc<Live<Identity>>,
    /// Roots of client certificates.
    roots: Arc<Live<Roots>>,
}

impl ServerCertificate {
    /// Issues the first certificate.
    pub(crate) fn new(
        manager: &AuthorityManager,
        trust_domain: String,
        listen: IpAddr,
        host: &str,
        lifetime: Duration,
    ) -> Result<Self, skysail_identity::Error> {
        let mut addresses = vec![IpAddr::from([127, 0, 0, 1]), IpAddr::from(std::net::Ipv6Addr::LOCALHOST)];
        if !listen.is_unspecified() && !addresses.contains(&listen) {
            addresses.push(listen);
        }
        let id = SpiffeId::new(trust_domain, "istio-system", "istiod");
        let (authority, live, roots) = (manager.subscribe(), Live::empty(), Live::empty());
        let names = names(host);
        let mut certificate = Self { authority, id, names, addresses, lifetime, live, roots };
        certificate.issue()?;
        Ok(certificate)
    }

    /// Issues a certificate of the current authority and applies the authority's trust bundle.
    fn issue(&mut self) -> Result<(), skysail_identity::Error> {
        let authority = Arc::clone(&self.authority.borrow_and_update());
        let identity = authority.server(&self.id, &self.names, &self.addresses, self.lifetime)?;
        self.roots.set(Arc::new(authority.roots()?));
        self.live.set(Arc::new(identity));
        Ok(())
    }

    /// Returns a TLS configuration that uses renewed certificates. Clients may present a certificate of the mesh.
    pub(crate) fn config(&self) -> Result<Arc<ServerConfig>, skysail_identity::Error> {
        let roots = Arc::clone(&self.roots);
        TlsSpec {
            identities: vec![Arc::clone(&self.live)],
            peer: Some(PeerCheck::new(roots)),
            alpn: vec![b"h2".to_vec()],
            ..TlsSpec::default()
        }
        .server()
    }

    /// Returns a TLS configuration for HTTP/1.1 that uses renewed certificates. It requests no certificate of clients.
    pub(crate) fn webhook_config(&self) -> Result<Arc<ServerConfig>, skysail_identity::Error> {
        TlsSpec {
            identities: vec![Arc::clone(&self.live)],
            alpn: vec![b"http/1.1".to_vec()],
            ..TlsSpec::default()
        }
        .server()
    }

    /// Renews the certificate before it expires and when the authority changes. Never returns.
    pub(crate) async fn renew(mut self) {
        let mut failures = 0;
        loop {
            let renewal = self.live.get().filter(|_| failures == 0).map(|identity| identity.renewal());
            let due = async {
                match renewal {
                    Some(renewal) => renewal.wait(SystemTime::now).await,
                    // At least one second: an authority that is about to expire would cause a busy loop.
                    None => {
                        let pause = renewal::retry(failures, fastrand::f64()).max(Duration::from_secs(1));
                        tokio::time::sleep(pause).await;
                    }
                }
            };
            tokio::select! {
                () = due => {}
                Ok(()) = self.authority.changed() => {}
            }
            match self.issue() {
                Ok(()) => {
                    failures = 0;
                    debug!("certificate of the control plane renewed");
                }
                Err(error) => {
                    failures += 1;
                    warn!(%error, failures, "certificate of the control plane cannot be renewed; retrying");
                }
            }
        }
    }
}

/// Returns a listener on an address.
///
/// # Errors
/// When the address is in use or not local, or when the process may not bind it.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Connections of a previous process may be in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Disables Nagle's algorithm and limits unsent bytes. In a large send buffer, a `WINDOW_UPDATE` for a request would
/// wait behind megabytes of responses until the request times out.
fn set_socket_options(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(MAX_UNSENT);
}

/// Serves connections until the shutdown begins. Open connections continue until their calls end.
///
/// Each connection has its own task, so that a slow handshake delays no other client.
pub(crate) async fn serve<S: Service + 'static>(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    service: Arc<S>,
    (connections, limits): (Arc<Connections>, Arc<Limits>),
    shutdown: Shutdown,
) {
    let limiter = HandshakeLimiter::new();
    let mut draining = shutdown.clone();
    loop {
        let accepted = async {
            limiter.ready_to_accept().await;
            listener.accept().await
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = draining.draining() => return,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // The usual reason is the limit of open files. A pause avoids a busy loop.
                warn!(%error, "connections cannot be accepted; retrying");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(admitted) = connections.admit(from.ip(), descriptors::is_reserved(&stream)) else {
            continue;
        };
        set_socket_options(&stream);
        let (service, shutdown, tls) = (Arc::clone(&service), shutdown.clone(), tls.clone());
        let (limits, limiter) = (Arc::clone(&limits), Arc::clone(&limiter));
        let admitted = Arc::new(admitted);
        tokio::spawn(async move {
            tokio::select! {
                () = serve_connection(stream, tls, (limiter, from.ip()), &admitted, service, &limits, shutdown) => {}
                () = admitted.shed() => debug!(%from, "unused connection closed to make room for another"),
            }
        });
    }
}

/// Serves one connection: the TLS handshake, if any, and its calls.
async fn serve_connection(
    stream: TcpStream,
    tls: Option<Arc<ServerConfig>>,
    (limiter, from): (Arc<HandshakeLimiter>, IpAddr),
    admitted: &Arc<Admitted>,
    service: Arc<impl Service>,
    limits: &Arc<Limits>,
    shutdown: Shutdown,
) {
    match tls {
        // Boxed, so that the memory of the handshake is freed at its end.
        Some(config) => {
            if let Some(stream) = Box::pin(handshake_with_timeout(config, stream, limiter, from)).await {
                let info = stream.connect_info();
                serve_calls(Box::new(stream), info, admitted, service, limits, shutdown).await;
            }
        }
        None => {
            let info = stream.connect_info();
            serve_calls(stream, info, admitted, service, limits, shutdown).await;
        }
    }
}

/// Returns the TLS stream; `None` if the handshake fails or exceeds [`HANDSHAKE_TIMEOUT`].
async fn handshake_with_timeout(
    config: Arc<ServerConfig>,
    stream: TcpStream,
    limiter: Arc<HandshakeLimiter>,
    from: IpAddr,
) -> Option<TlsStream<TcpStream>> {
    match timeout(HANDSHAKE_TIMEOUT, handshake(config, stream, limiter, from)).await {
        Ok(Ok(stream)) => return Some(stream),
        Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
        Err(_) => debug!("TLS handshake timed out"),
    }
    None
}

/// Performs the handshake. Holds a permit while it processes data, and none while it waits for the client.
async fn handshake(
    config: Arc<ServerConfig>,
    stream: TcpStream,
    limiter: Arc<HandshakeLimiter>,
    from: IpAddr,
) -> io::Result<TlsStream<TcpStream>> {
    let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
    let mut permit = limiter.acquire(from, Priority::New).await;
    if is_closed(&hello.io) {
        return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the client has closed the connection"));
    }
    let mut accept = hello.into_stream(config);
    let mut steps = 0;
    loop {
        if let Poll::Ready(done) = poll_fn(|context| Poll::Ready(Pin::new(&mut accept).poll(context))).await {
            return done;
        }
        drop(permit);
        wait_for_wake().await;
        steps += 1;
        permit = limiter
            .acquire(from, if steps <= PRIORITY_STEPS { Priority::InProgress } else { Priority::New })
            .await;
    }
}

/// Returns whether the client has closed the connection, so that the server need not compute a signature for it.
fn is_closed(stream: &TcpStream) -> bool {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    !matches!(recv(stream.as_raw_fd(), &mut [0], flags), Ok(1) | Err(Errno::EAGAIN))
}

/// Waits until a future that the task has polled before wakes it.
async fn wait_for_wake() {
    let mut waited = false;
    poll_fn(|_| if mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// Serves the calls of a connection. `info` is its connection data. Delays the end of the process until the connection
/// ends.
async fn serve_calls<IO, Info>(
    stream: IO,
    info: Info,
    admitted: &Arc<Admitted>,
    service: Arc<impl Service>,
    limits: &Arc<Limits>,
    mut shutdown: Shutdown,
) where
    IO: AsyncRead + AsyncWrite + Unpin,
    Info: Clone + Send + Sync + 'static,
{
    let _guard = shutdown.guard();
    let mut extensions = Extensions::new();
    extensions.insert(info);
    extensions.insert(Arc::clone(admitted));
    if let Err(error) = grpc::serve(stream, extensions, &*service, limits, shutdown.draining()).await {
        debug!(%error, "connection ended with an error");
    }
}

#[cfg(test)]
mod tests {
    use rustls::{ClientConfig, ClientConnection, pki_types::ServerName};
    use skysail_identity::rotation::Lifetimes;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        task::JoinHandle,
        time::Instant,
    };
    use tokio_rustls::TlsConnector;

    use super::*;

    /// State that the handshakes of a server share, and a client's first message.
    struct Server {
        listener: TcpListener,
        config: Arc<ServerConfig>,
        limiter: Arc<HandshakeLimiter>,
        client: Arc<ClientConfig>,
        hello: Vec<u8>,
    }

    type Handshake = JoinHandle<io::Result<TlsStream<TcpStream>>>;

    impl Server {
        async fn new() -> Self {
            let day = Duration::from_secs(24 * 3600);
            let manager =
                AuthorityManager::open(None, Lifetimes { certificate: day, root: 100 * day }).unwrap();
            let own =
                ServerCertificate::new(&manager, "mesh.example".into(), [127, 0, 0, 1].into(), NAMES[0], day)
                    .unwrap();
            let client = TlsSpec { alpn: vec![b"h2".to_vec()], ..TlsSpec::default() }.client().unwrap();
            let mut hello = Vec::new();
            let name = ServerName::try_from("localhost").unwrap();
            ClientConnection::new(Arc::clone(&client), name).unwrap().write_tls(&mut hello).unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            Self { listener, config: own.config().unwrap(), limiter: HandshakeLimiter::new(), client, hello }
        }

        /// Connects a client that sends these bytes.
        async fn connect(&self, sent: &[u8]) -> (TcpStream, Handshake) {
            let mut client = TcpStream::connect(self.listener.local_addr().unwrap()).await.unwrap();
            let (server, from) = self.listener.accept().await.unwrap();
            client.write_all(sent).await.unwrap();
            let (config, limiter) = (Arc::clone(&self.config), Arc::clone(&self.limiter));
            (client, tokio::spawn(handshake(config, server, limiter, from.ip())))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_clients_do_not_delay_other_handshakes() {
        let server = Server::new().await;
        // Paused time advances only when all tasks wait, to the next timer. Handshakes have no timer.
        let start = Instant::now();
        let mut silent = Vec::new();
        for _ in 0..100 {
            for sent in [&[][..], &server.hello[..9], &server.hello] {
                let (mut client, handshake) = server.connect(sent).await;
                if sent == server.hello {
                    client.read_exact(&mut [0; 5]).await.unwrap();
                }
                silent.push((client, handshake));
            }
        }
        let (client, honest) = server.connect(&[]).await;
        let name = ServerName::try_from("localhost").unwrap();
        let connector = TlsConnector::from(Arc::clone(&server.client));
        let (connected, accepted) = tokio::join!(connector.connect(name, client), honest);
        connected.unwrap();
        accepted.unwrap().unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert!(silent.iter().all(|(_, handshake)| !handshake.is_finished()));
    }

    #[tokio::test]
    async fn the_send_buffer_of_a_client_that_does_not_read_is_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpSocket::new_v4().unwrap();
        client.set_recv_buffer_size(MAX_UNSENT / 2).unwrap();
        let _client = client.connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        set_socket_options(&server);
        server.writable().await.unwrap();
        let mut taken = 0;
        while let Ok(bytes) = server.try_write(&[0; 16 << 10]) {
            taken += bytes;
        }
        assert!(taken < 4 * MAX_UNSENT as usize, "{taken} bytes");
    }

    #[tokio::test]
    async fn a_closed_connection_costs_no_signature() {
        let server = Server::new().await;
        let (client, handshake) = server.connect(&server.hello).await;
        drop(client);
        let error = handshake.await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "the client has closed the connection");
    }
}
