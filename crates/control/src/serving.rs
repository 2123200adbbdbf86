//! Sockets: gRPC over TLS with our own, renewed certificate, or in plain text.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::{Duration, SystemTime},
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
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::timeout,
};
use tokio_rustls::{LazyConfigAcceptor, server::TlsStream};
use tonic::{Extensions, transport::server::Connected};
use tracing::{debug, warn};

use crate::authority::Keeper;

/// How long a client may take for the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes in progress: after a restart all clients come at once, and a handshake that has begun should end before its client
/// gives up. The others wait in the kernel's queue, in their order.
const ADMITTED: usize = 256;
/// How long a new connection takes one of these places before its `ClientHello` has come, which usually is there already. A client
/// that sends none, or a part of it, keeps no other one waiting.
const HELLO: Duration = Duration::from_millis(25);
/// How long a handshake takes one of these places after that. What it needs from the server takes less; the rest is the client.
const GRACE: Duration = Duration::from_millis(250);
/// Connections in the kernel's queue, if the system allows so many (`net.core.somaxconn`).
const QUEUE: u32 = 4_096;
/// Names proxies know the control plane by.
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
    /// Whose certificates clients may bring.
    roots: Arc<Live<Roots>>,
}

impl OwnCertificate {
    /// Issues the first.
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

    /// Takes a new certificate of the authority of now, and whom that trusts.
    fn issue(&mut self) -> Result<(), skysail_identity::Error> {
        let authority = Arc::clone(&self.authority.borrow_and_update());
        let names = NAMES.map(str::to_owned);
        let identity = authority.server(&self.id, &names, &self.addresses, self.lifetime)?;
        self.roots.set(Arc::new(authority.roots()?));
        self.live.set(Arc::new(identity));
        Ok(())
    }

    /// TLS with this certificate, also after renewals. Clients may bring a certificate of ours.
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

    /// Renews it in time, and when there is another authority, forever.
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

/// Serves connections until the shutdown begins; those there are go on until their calls end.
///
/// Each shakes hands by itself, if it is to be in `tls`, so that a slow one holds up nobody.
pub(crate) async fn serve<S: Service + 'static>(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    service: Arc<S>,
    (connections, limits): (Arc<Connections>, Arc<Limits>),
    shutdown: Shutdown,
) {
    let admission = Arc::new(Semaphore::new(ADMITTED));
    let mut draining = shutdown.clone();
    loop {
        let admitted = async {
            // It is never closed.
            let permit = Arc::clone(&admission).acquire_owned().await.ok();
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            admitted = admitted => admitted,
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
        let _ = stream.set_nodelay(true);
        let (service, shutdown, tls) = (Arc::clone(&service), shutdown.clone(), tls.clone());
        let (limits, admission) = (Arc::clone(&limits), Arc::clone(&admission));
        let admitted = Arc::new(admitted);
        tokio::spawn(async move {
            tokio::select! {
                () = one(stream, tls, (admission, permit), &admitted, service, &limits, shutdown) => {}
                () = admitted.shed() => debug!(%from, "an unauthenticated connection made room for another"),
            }
        });
    }
}

/// Serves one connection from its first byte.
async fn one(
    stream: TcpStream,
    tls: Option<Arc<ServerConfig>>,
    (admission, permit): Admission,
    admitted: &Arc<Admitted>,
    service: Arc<impl Service>,
    limits: &Arc<Limits>,
    shutdown: Shutdown,
) {
    match tls {
        // What a handshake needs is held no longer than that.
        Some(config) => {
            if let Some(stream) = Box::pin(shake_hands(config, stream, (admission, permit))).await {
                let info = stream.connect_info();
                connection(Box::new(stream), info, admitted, service, limits, shutdown).await;
            }
        }
        None => {
            drop(permit);
            let info = stream.connect_info();
            connection(stream, info, admitted, service, limits, shutdown).await;
        }
    }
}

/// Handshakes in progress, and the place among them that a connection came with.
type Admission = (Arc<Semaphore>, Option<OwnedSemaphorePermit>);

/// Returns the TLS stream; `None` if the handshake fails or takes longer than [`HANDSHAKE`].
async fn shake_hands(
    config: Arc<ServerConfig>,
    stream: TcpStream,
    admission: Admission,
) -> Option<TlsStream<TcpStream>> {
    match timeout(HANDSHAKE, handshake(config, stream, admission)).await {
        Ok(Ok(stream)) => return Some(stream),
        Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
        Err(_) => debug!("TLS handshake took too long"),
    }
    None
}

/// Takes a place among the handshakes in progress only while the server has work to do.
async fn handshake<IO: AsyncRead + AsyncWrite + Unpin>(
    config: Arc<ServerConfig>,
    stream: IO,
    (admission, permit): Admission,
) -> io::Result<TlsStream<IO>> {
    let mut hello = pin!(LazyConfigAcceptor::new(Acceptor::default(), stream));
    let (hello, permit) = match timeout(HELLO, &mut hello).await {
        Ok(hello) => (hello?, permit),
        Err(_) => {
            drop(permit);
            // The semaphore is never closed.
            (hello.await?, admission.acquire_owned().await.ok())
        }
    };
    let mut rest = pin!(hello.into_stream(config));
    let soon = timeout(GRACE, &mut rest).await;
    drop(permit);
    match soon {
        Ok(done) => done,
        Err(_) => rest.await,
    }
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
    use skysail_identity::rotation::Lifetimes;
    use tokio::{
        io::{AsyncWriteExt as _, duplex},
        time::Instant,
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_without_a_hello_keeps_no_other_waiting() {
        let day = Duration::from_secs(24 * 3600);
        let keeper = Keeper::open(None, Lifetimes { certificate: day, root: 100 * day }).unwrap();
        let own = OwnCertificate::new(&keeper, "mesh.example".into(), [127, 0, 0, 1].into(), day).unwrap();
        let config = own.config().unwrap();
        let admission = Arc::new(Semaphore::new(1));
        // Nothing, and the beginning of a record.
        for sent in [&[][..], &[22, 3, 1, 1, 0, 1]] {
            let (mut client, server) = duplex(1024);
            client.write_all(sent).await.unwrap();
            let permit = Arc::clone(&admission).acquire_owned().await.ok();
            let start = Instant::now();
            let slow = tokio::spawn(handshake(Arc::clone(&config), server, (Arc::clone(&admission), permit)));
            let place = admission.acquire().await.unwrap();
            // By the test's own clock, which goes on only when nothing else does.
            assert!(start.elapsed() < 2 * HELLO, "{:?}", start.elapsed());
            assert!(!slow.is_finished());
            drop(place);
            slow.abort();
        }
    }
}
