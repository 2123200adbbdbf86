//! Sockets: gRPC over TLS with our own, renewed certificate, or in plain text.

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
    authority::Keeper,
    places::{Places, Step},
};

/// Timeout of a handshake, including the waits for a place.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Steps of a handshake in progress that come before new handshakes. An ordinary client needs one or two; one that sends its
/// messages byte by byte waits like a new one after these.
const SOONER: usize = 4;
/// Connections in the kernel's queue, if the system allows so many (`net.core.somaxconn`).
const QUEUE: u32 = 4_096;
/// Bytes that the kernel buffers for a connection beyond those in flight.
const UNSENT: u32 = 128 << 10;
/// Names by which proxies know the control plane.
const NAMES: [&str; 5] = [
    "istiod.istio-system.svc",
    "istiod.istio-system.svc.cluster.local",
    "skysaild.istio-system.svc",
    "skysaild.istio-system.svc.cluster.local",
    "localhost",
];

/// Our own certificate.
pub(crate) struct OwnCertificate {
    authority: watch::Receiver<Arc<Authority>>,
    id: SpiffeId,
    addresses: Vec<IpAddr>,
    lifetime: Duration,
    live: Arc<Live<Identity>>,
    /// Roots of client certificates.
    roots: Arc<Live<Roots>>,
}

impl OwnCertificate {
    /// Issues the first certificate.
    pub(crate) fn new(
        keeper: &Keeper,
        trust_domain: String,
        listen: IpAddr,
        lifetime: Duration,
    ) -> Result<Self, skysail_identity::Error> {
        let mut addresses = vec![IpAddr::from([127, 0, 0, 1]), IpAddr::from(std::net::Ipv6Addr::LOCALHOST)];
        if !listen.is_unspecified() && !addresses.contains(&listen) {
            addresses.push(listen);
        }
        let id = SpiffeId::new(trust_domain, "istio-system", "istiod");
        let (authority, live, roots) = (keeper.follow(), Live::empty(), Live::empty());
        let mut own = Self { authority, id, addresses, lifetime, live, roots };
        own.issue()?;
        Ok(own)
    }

    /// Issues a new certificate of the current authority and takes over its trust bundle.
    fn issue(&mut self) -> Result<(), skysail_identity::Error> {
        let authority = Arc::clone(&self.authority.borrow_and_update());
        let names = NAMES.map(str::to_owned);
        let identity = authority.server(&self.id, &names, &self.addresses, self.lifetime)?;
        self.roots.set(Arc::new(authority.roots()?));
        self.live.set(Arc::new(identity));
        Ok(())
    }

    /// Returns a TLS configuration that follows renewals. Clients may present a certificate of the mesh.
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

    /// Renews the certificate before it expires and when the authority changes. Never returns.
    pub(crate) async fn renew(mut self) {
        let mut failures = 0;
        loop {
            let renewal = self.live.get().filter(|_| failures == 0).map(|identity| identity.renewal());
            let due = async {
                match renewal {
                    Some(renewal) => renewal.wait(SystemTime::now).await,
                    // At least a second, or an authority at its own end would keep us busy.
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
                    debug!("own certificate renewed");
                }
                Err(error) => {
                    failures += 1;
                    warn!(%error, failures, "own certificate could not be renewed");
                }
            }
        }
    }
}

/// Listens.
///
/// # Errors
/// When the address is taken, not ours, or not for us.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Connections of a process before us may linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(QUEUE)
}

/// Disables Nagle's algorithm and limits the kernel's send buffer: in a large buffer a `WINDOW_UPDATE` for a request would wait behind
/// megabytes of responses, until the request times out.
fn prepare(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT);
}

/// Serves connections until the shutdown begins. Open connections continue until their calls end.
///
/// Each connection has a task for its handshake, so that a slow client delays no other.
pub(crate) async fn serve<S: Service + 'static>(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    service: Arc<S>,
    (connections, limits): (Arc<Connections>, Arc<Limits>),
    shutdown: Shutdown,
) {
    let places = Places::new();
    let mut draining = shutdown.clone();
    loop {
        let accepted = async {
            places.uncrowded().await;
            listener.accept().await
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = draining.draining() => return,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, most likely; accepting at once again would only burn CPU.
                warn!(%error, "cannot accept connections");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(admitted) = connections.admit(from.ip(), descriptors::is_reserved(&stream)) else {
            continue;
        };
        prepare(&stream);
        let (service, shutdown, tls) = (Arc::clone(&service), shutdown.clone(), tls.clone());
        let (limits, places) = (Arc::clone(&limits), Arc::clone(&places));
        let admitted = Arc::new(admitted);
        tokio::spawn(async move {
            tokio::select! {
                () = one(stream, tls, (places, from.ip()), &admitted, service, &limits, shutdown) => {}
                () = admitted.shed() => debug!(%from, "an unused connection made room for another"),
            }
        });
    }
}

/// Serves one connection from its first byte.
async fn one(
    stream: TcpStream,
    tls: Option<Arc<ServerConfig>>,
    place: (Arc<Places>, IpAddr),
    admitted: &Arc<Admitted>,
    service: Arc<impl Service>,
    limits: &Arc<Limits>,
    shutdown: Shutdown,
) {
    match tls {
        // What a handshake needs is held no longer than that.
        Some(config) => {
            if let Some(stream) = Box::pin(shake_hands(config, stream, place)).await {
                let info = stream.connect_info();
                connection(Box::new(stream), info, admitted, service, limits, shutdown).await;
            }
        }
        None => {
            let info = stream.connect_info();
            connection(stream, info, admitted, service, limits, shutdown).await;
        }
    }
}

/// Returns the TLS stream; `None` if the handshake fails or takes longer than [`HANDSHAKE`].
async fn shake_hands(
    config: Arc<ServerConfig>,
    stream: TcpStream,
    place: (Arc<Places>, IpAddr),
) -> Option<TlsStream<TcpStream>> {
    match timeout(HANDSHAKE, handshake(config, stream, place)).await {
        Ok(Ok(stream)) => return Some(stream),
        Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
        Err(_) => debug!("TLS handshake took too long"),
    }
    None
}

/// Performs the handshake. Takes a place when the client has sent data, and returns it once the answer is written.
async fn handshake(
    config: Arc<ServerConfig>,
    stream: TcpStream,
    (places, from): (Arc<Places>, IpAddr),
) -> io::Result<TlsStream<TcpStream>> {
    let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
    let mut place = places.take(from, Step::First).await;
    if is_closed(&hello.io) {
        return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the client gave up"));
    }
    let mut rest = hello.into_stream(config);
    let mut steps = 0;
    loop {
        if let Poll::Ready(done) = poll_fn(|context| Poll::Ready(Pin::new(&mut rest).poll(context))).await {
            return done;
        }
        drop(place);
        woken().await;
        steps += 1;
        place = places.take(from, if steps <= SOONER { Step::Later } else { Step::First }).await;
    }
}

/// Returns whether the client has closed the connection, and so needs no answer to its hello.
fn is_closed(stream: &TcpStream) -> bool {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    !matches!(recv(stream.as_raw_fd(), &mut [0], flags), Ok(1) | Err(Errno::EAGAIN))
}

/// Waits until the task is woken, by a future that it has polled before.
async fn woken() {
    let mut waited = false;
    poll_fn(|_| if mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// Serves a connection, of which `info` is known, and holds up the exit as long as it is there.
async fn connection<IO, Info>(
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
        debug!(%error, "a connection ended");
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

    /// What the handshakes of a server have in common, and what a client sends.
    struct Server {
        listener: TcpListener,
        config: Arc<ServerConfig>,
        places: Arc<Places>,
        client: Arc<ClientConfig>,
        hello: Vec<u8>,
    }

    type Handshake = JoinHandle<io::Result<TlsStream<TcpStream>>>;

    impl Server {
        async fn new() -> Self {
            let day = Duration::from_secs(24 * 3600);
            let keeper = Keeper::open(None, Lifetimes { certificate: day, root: 100 * day }).unwrap();
            let own =
                OwnCertificate::new(&keeper, "mesh.example".into(), [127, 0, 0, 1].into(), day).unwrap();
            let client = TlsSpec { alpn: vec![b"h2".to_vec()], ..TlsSpec::default() }.client().unwrap();
            let mut hello = Vec::new();
            let name = ServerName::try_from("localhost").unwrap();
            ClientConnection::new(Arc::clone(&client), name).unwrap().write_tls(&mut hello).unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            Self { listener, config: own.config().unwrap(), places: Places::new(), client, hello }
        }

        /// Connects a client that has sent this.
        async fn connect(&self, sent: &[u8]) -> (TcpStream, Handshake) {
            let mut client = TcpStream::connect(self.listener.local_addr().unwrap()).await.unwrap();
            let (server, from) = self.listener.accept().await.unwrap();
            client.write_all(sent).await.unwrap();
            let place = (Arc::clone(&self.places), from.ip());
            (client, tokio::spawn(handshake(Arc::clone(&self.config), server, place)))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_keeps_no_other_waiting() {
        let server = Server::new().await;
        // This clock only moves when everything waits, and then to the next timer: of which handshakes have none.
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
    async fn the_kernel_takes_little_for_a_client_that_does_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpSocket::new_v4().unwrap();
        client.set_recv_buffer_size(UNSENT / 2).unwrap();
        let _client = client.connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        prepare(&server);
        server.writable().await.unwrap();
        let mut taken = 0;
        while let Ok(bytes) = server.try_write(&[0; 16 << 10]) {
            taken += bytes;
        }
        assert!(taken < 4 * UNSENT as usize, "{taken} bytes");
    }

    #[tokio::test]
    async fn a_client_that_gave_up_costs_no_signature() {
        let server = Server::new().await;
        let (client, handshake) = server.connect(&server.hello).await;
        drop(client);
        let error = handshake.await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "the client gave up");
    }
}
