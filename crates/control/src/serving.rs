//! Sockets: gRPC over TLS with our own, renewed certificate, or in plain text.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use rustls::ServerConfig;
use skysail_core::{SpiffeId, shutdown::Shutdown};
use skysail_identity::{Authority, Identity, Live, PeerCheck, Roots, TlsSpec, renewal};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_stream::{
    StreamExt as _,
    wrappers::{ReceiverStream, TcpListenerStream},
};
use tonic::transport::{Server, server::Router};
use tracing::{debug, warn};

use crate::authority::Keeper;

/// How long a client may take for the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How often to see whether a silent client still lives, and how long it may take to say so.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
/// Names proxies know the control plane by.
const NAMES: [&str; 5] = [
    "istiod.istio-system.svc",
    "istiod.istio-system.svc.cluster.local",
    "skysaild.istio-system.svc",
    "skysaild.istio-system.svc.cluster.local",
    "localhost",
];

/// A gRPC server with what all of ours have in common.
pub(crate) fn server() -> Server {
    Server::builder().http2_keepalive_interval(Some(KEEP_ALIVE.0)).http2_keepalive_timeout(Some(KEEP_ALIVE.1))
}

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
            peer: Some(PeerCheck { roots, names: Vec::new(), host_name: false, required: false }),
            alpn: vec![b"h2".to_vec()],
            ..TlsSpec::default()
        }
        .server()
    }

    /// Renews it in time, and when there is another authority, forever.
    pub(crate) async fn renew(mut self) {
        let mut failures = 0;
        loop {
            let pause = match self.live.get() {
                Some(identity) if failures == 0 => identity.renewal_due(),
                _ => renewal::retry(failures, fastrand::f64()),
            };
            // At least a second, or an authority at its own end would keep us busy.
            let pause = pause.max(Duration::from_secs(1));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
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

/// Serves in plain text until the shutdown begins and the last call ends.
pub(crate) async fn serve_plain(
    listener: TcpListener,
    router: Router,
    mut shutdown: Shutdown,
) -> Result<(), tonic::transport::Error> {
    let incoming = TcpListenerStream::new(listener).map(|accepted| {
        accepted.inspect(|stream| {
            let _ = stream.set_nodelay(true);
        })
    });
    router.serve_with_incoming_shutdown(incoming, async move { shutdown.draining().await }).await
}

/// Serves over TLS until the shutdown begins and the last call ends.
pub(crate) async fn serve_tls(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    router: Router,
    shutdown: Shutdown,
) -> Result<(), tonic::transport::Error> {
    let (sender, incoming) = mpsc::channel(64);
    let accepting = tokio::spawn(accept(listener, TlsAcceptor::from(config), sender, shutdown.clone()));
    let mut draining = shutdown;
    let signal = async move { draining.draining().await };
    let served = router.serve_with_incoming_shutdown(ReceiverStream::new(incoming), signal).await;
    accepting.abort();
    served
}

type Accepted = io::Result<TlsStream<TcpStream>>;

/// Accepts connections; each shakes hands by itself, so that a slow one holds up nobody.
async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    sender: mpsc::Sender<Accepted>,
    mut shutdown: Shutdown,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.draining() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, most likely; accepting at once again would only burn CPU.
                warn!(%error, "cannot accept connections");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (acceptor, sender) = (acceptor.clone(), sender.clone());
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => {
                    let _ = sender.send(Ok(stream)).await;
                }
                Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
                Err(_) => debug!("TLS handshake took too long"),
            }
        });
    }
}
