//! Certificates of a mesh, and sidecars with mutual TLS.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use skysail_core::SpiffeId;
use skysail_identity::{
    Acceptor, Authority, Connector, Identity, KeyAndCsr, Live, NameMatch, Peer, PeerCheck, TlsSpec,
};
use skysail_policy::config::{
    http::{ClientCertDetails, ForwardClientCert, MetadataExchange},
    listener::Direction,
    tls::{ClientConfigs, ClientTls, ServerTls},
};
use tokio_rustls::client::TlsStream;

use crate::support::{Proxy, cluster, http, listener};

/// Certificates of one mesh.
pub(crate) struct Mesh(pub(crate) Authority);

impl Mesh {
    pub(crate) fn new() -> Self {
        Self(Authority::ephemeral().unwrap())
    }

    /// Issues a certificate.
    pub(crate) fn identity(&self, account: &str) -> Identity {
        let id = SpiffeId::new("cluster.local", "default", account);
        let request = KeyAndCsr::generate(Some(&id)).unwrap();
        let signed = self.0.sign(&request.csr_pem, &id, Duration::from_hours(1)).unwrap();
        request.finish(signed.pem().as_bytes()).unwrap()
    }

    pub(crate) fn spec(&self, account: &str, accepts: &str, alpn: &[&[u8]]) -> TlsSpec {
        let names = vec![NameMatch::uri(SpiffeId::new("cluster.local", "default", accepts).to_string())];
        TlsSpec {
            identities: vec![Live::new(self.identity(account))],
            peer: Some(PeerCheck::spiffe(Live::new(self.0.roots().unwrap()), names)),
            alpn: alpn.iter().map(|protocol| protocol.to_vec()).collect(),
            ..TlsSpec::default()
        }
    }

    pub(crate) fn server(&self, account: &str, accepts: &str) -> Arc<ServerTls> {
        let spec = self.spec(account, accepts, &[b"istio-http/1.1", b"istio-peer-exchange"]);
        accepting(&spec)
    }

    pub(crate) fn client(&self, account: &str, accepts: &str) -> Arc<ClientTls> {
        connecting(&self.spec(account, accepts, &[b"istio-peer-exchange"]))
    }
}

/// Returns the TLS settings of a listener.
pub(crate) fn accepting(spec: &TlsSpec) -> Arc<ServerTls> {
    let acceptor = Acceptor::new(spec).unwrap();
    Arc::new(ServerTls { config: Arc::new(ArcSwapOption::from_pointee(acceptor)) })
}

/// Returns the TLS settings of a cluster.
pub(crate) fn connecting(spec: &TlsSpec) -> Arc<ClientTls> {
    let own = Connector::new(spec).unwrap();
    let with = |alpn: &[&[u8]]| Arc::new(own.offering(alpn).unwrap());
    let configs = ClientConfigs {
        http2: with(&[b"h2"]),
        istio_http1: with(&[b"istio-http/1.1"]),
        istio_h2: with(&[b"istio-h2"]),
        own: Arc::new(own),
    };
    Arc::new(ClientTls {
        config: Arc::new(ArcSwapOption::from_pointee(configs)),
        sni: Some("outbound_.80_._.a.default.svc.cluster.local".try_into().unwrap()),
        alpn: Arc::new([]),
        secrets: Box::default(),
    })
}

/// Starts an outbound and an inbound proxy in front of a server.
pub(crate) async fn pair(
    server: SocketAddr,
    inbound: Arc<ServerTls>,
    outbound: Arc<ClientTls>,
) -> (Proxy, Proxy) {
    let exchange = Some(MetadataExchange { skip_external: false });
    let terminal = http(|manager, _| {
        manager.metadata_exchange = exchange;
        let forward = ForwardClientCert::AppendForward;
        manager.client_cert = ClientCertDetails { forward, uri: true, ..ClientCertDetails::default() };
    });
    let mut behind = listener(terminal, Some(inbound));
    behind.direction = Direction::Inbound;
    let behind = Proxy::called("behind", behind, vec![cluster(&[server], None)]).await;
    let terminal = http(|manager, _| {
        manager.metadata_exchange = exchange;
        manager.istio_alpn = true;
    });
    let mut before = listener(terminal, None);
    before.direction = Direction::Outbound;
    let before = Proxy::called("before", before, vec![cluster(&[behind.address], Some(&outbound))]).await;
    (before, behind)
}

/// Returns the account of a server's certificate.
pub(crate) fn account(stream: &TlsStream<impl Sized>) -> String {
    let certificate = &stream.get_ref().1.peer_certificates().unwrap()[0];
    Peer::from_der(certificate).unwrap().uris[0].rsplit('/').next().unwrap().to_owned()
}
